//! What everybody said on entering a call, as one rank has heard it.
//!
//! ```text
//!   a neighbour       its tag in its entry's line here, its counts in its publication there
//!   another node      one message from the rail peer there: the tags of its members, the sum of their counts
//! ```
//!
//! A caller and its relay hear the same and judge it by the same rules, so they come to the same end without a word
//! between them: so do all ranks.

use super::fixed::Fixed;
use crate::error::{CallError, CallKind, Error, MemoryError};
use crate::plan::{Counts, Overflow, Sizes};
use crate::schedule::{Calls, Control, Flag, Refusal, Setting, Tag, WindowId};
use crate::topology::Paths;

/// Everybody's entry into one call.
#[derive(Clone, Copy)]
pub(super) struct Meeting<'a> {
    pub fixed: &'a Fixed,
    pub setting: Setting<'a>,
    pub calls: Calls,
}

/// Numbers that a judgement is made of, used again by all calls.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    pub counts: Counts,
    pub sizes: Sizes,
    /// Per rank: where rows land there.
    pub landing: Vec<u64>,
    /// Per rank: the bytes that it announced from there on.
    pub free: Vec<u64>,
    /// Of one rank or node.
    pub scratch: Vec<u32>,
}

impl Numbers {
    /// To be found in each call or, where slots are fixed, here for all calls.
    pub fn new(fixed: &Fixed) -> Self {
        let (mut numbers, Fixed { spec, bins, .. }) = (Numbers::default(), fixed);
        if let Some(slots) = spec.mode.slots() {
            numbers.counts.fix(bins, &fixed.paths(), slots, spec.max_tokens);
            numbers.sizes.fill(bins, spec.align, &numbers.counts.total, None);
        }
        numbers
    }
}

impl<'a> Meeting<'a> {
    fn paths(&self) -> Paths<'a> {
        self.setting.paths
    }

    fn control(&self) -> &'a Control {
        self.setting.control
    }

    /// What a rank said when it entered the call. Its own tag a rank finds where it told its relay.
    pub fn tag_of(&self, rank: u32) -> Result<Tag, MemoryError> {
        let paths = self.paths();
        if rank == paths.me() {
            return Ok(self.fixed.port.flag(rank, Flag::Block)?.tag(self.calls.value()));
        }
        if paths.near(rank) {
            return Ok(self.fixed.port.flag(rank, Flag::Entry)?.tag(self.calls.value()));
        }
        let mut words = [0u64; 3];
        let place = u64::from(paths.nodes().index_in_node(rank)) * Control::TAG_BYTES;
        let at = self.message(paths.nodes().node_of(rank)) + place;
        self.fixed.port.read(paths.me(), WindowId::CONTROL, at, &mut words)?;
        Ok(Tag::from_words(words))
    }

    fn message(&self, node: u32) -> u64 {
        self.control().message_in(node, self.setting.parity)
    }

    /// Compares what all ranks entered: what this rank got `ready` is used only if everybody makes the same call and
    /// nobody refuses; otherwise `take_back` has it.
    ///
    /// # Errors
    /// [`CallError::KindsDiffer`], [`CallError::Disagree`]; else what this rank itself refused; else
    /// [`CallError::PeerRefused`] or [`MemoryError::OutOfSpace`] of the lowest rank that refused.
    pub fn conclude<T>(
        &self,
        mine: Tag,
        ready: Result<T, Error>,
        take_back: impl FnOnce(T),
    ) -> Result<T, Error> {
        let ready = match ready {
            Ok(ready) => ready,
            Err(own) => return Err(self.all_alike(mine).err().unwrap_or_else(|| self.in_group(own))),
        };
        match self.agree(mine) {
            Ok(()) => Ok(ready),
            Err(error) => {
                take_back(ready);
                Err(error)
            }
        }
    }

    /// The pool knows its rank in the world; errors of calls name positions in the group.
    fn in_group(&self, error: Error) -> Error {
        match error {
            Error::Memory(MemoryError::OutOfSpace { asked, free, .. }) => {
                self.out_of_space(self.paths().me(), asked, free)
            }
            other => other,
        }
    }

    /// Whether all ranks make the same call as this one, and none refuses.
    ///
    /// # Errors
    /// [`CallError::KindsDiffer`], [`CallError::Disagree`]; else [`CallError::PeerRefused`] or
    /// [`MemoryError::OutOfSpace`] of the lowest rank that refused.
    pub fn agree(&self, mine: Tag) -> Result<(), Error> {
        self.all_alike(mine)?;
        for peer in self.others() {
            let tag = self.tag_of(peer)?;
            match tag.refusal {
                Refusal::None => {}
                Refusal::Input => {
                    return Err(CallError::PeerRefused { call: self.calls.number(), peer }.into());
                }
                Refusal::Space => return Err(self.out_of_space(peer, tag.handle, tag.base)),
            }
        }
        Ok(())
    }

    /// Whether all ranks make the same call as this one.
    ///
    /// # Errors
    /// [`CallError::KindsDiffer`], [`CallError::Disagree`].
    pub fn all_alike(&self, mine: Tag) -> Result<(), Error> {
        let (call, kind, rank) = (self.calls.number(), mine.kind, self.paths().me());
        for peer in self.others() {
            let theirs = self.tag_of(peer)?;
            if theirs.kind != kind {
                let (mine, theirs) = (kind, theirs.kind);
                return Err(CallError::KindsDiffer { call, rank, peer, mine, theirs }.into());
            }
            if [mine.refusal, theirs.refusal] != [Refusal::None; 2] {
                continue;
            }
            // Where counts are exchanged there is no handle yet: the tag says how much memory is free.
            let handles = if kind.places() { (0, 0) } else { (mine.handle, theirs.handle) };
            let options = (u64::from(mine.options), u64::from(theirs.options));
            for (what, (mine, theirs)) in [("options", options), ("handle", handles)] {
                if mine != theirs {
                    return Err(CallError::Disagree { call, kind, what, rank, peer, mine, theirs }.into());
                }
            }
        }
        Ok(())
    }

    /// Whether all that comes has room: from everybody's counts, or from what is fixed, to where rows land.
    ///
    /// # Errors
    /// [`CallError::Disagree`] if a neighbour counts more than it may; else, the same on every rank,
    /// [`CallError::OverBudget`] or [`MemoryError::OutOfSpace`].
    pub fn judge(&self, mine: Tag, numbers: &mut Numbers) -> Result<(), Error> {
        let Fixed { spec, bins, .. } = self.fixed;
        if spec.mode.slots().is_none() {
            self.count(numbers)?;
            numbers.sizes.fill(bins, spec.align, &numbers.counts.total, spec.mode.budget());
        }
        self.within_budget(&numbers.sizes)?;
        self.room(mine, numbers)
    }

    /// Whether no rank needs more than its budget, if that is an error.
    ///
    /// # Errors
    /// [`CallError::OverBudget`], the same on every rank.
    pub fn within_budget(&self, sizes: &Sizes) -> Result<(), Error> {
        let mode = self.fixed.spec.mode;
        if let (Some(budget), Overflow::Error) = (mode.budget(), mode.overflow())
            && let Some((rank, &required)) =
                (0..).zip(&sizes.required).find(|(_, required)| **required > budget)
        {
            return Err(CallError::OverBudget { call: self.calls.number(), rank, required, budget }.into());
        }
        Ok(())
    }

    /// Adds up what all ranks count, as this rank needs it. `scratch` is for one node's or rank's numbers.
    ///
    /// # Errors
    /// [`CallError::Disagree`] if a neighbour counts more than it may.
    fn count(&self, Numbers { counts, scratch, .. }: &mut Numbers) -> Result<(), Error> {
        let (paths, control) = (self.paths(), self.control());
        let words = control.words() as usize;
        counts.clear(words as u32);
        for &member in paths.nodes().members(paths.nodes().node_of(paths.me())) {
            self.publication_of(member, words, scratch)?;
            counts.add(paths.me(), member, scratch);
        }
        scratch.resize(2 * words, 0);
        for node in (0..paths.nodes().nodes()).filter(|&node| node != paths.nodes().node_of(paths.me())) {
            let at = self.message(node) + control.below();
            self.fixed.port.read(paths.me(), WindowId::CONTROL, at, scratch)?;
            let (below, total) = scratch.split_at(words);
            counts.add_node(below, total);
        }
        Ok(())
    }

    /// Adds up what this node counts, as `source` of another node needs it, and composes the message that tells it.
    ///
    /// # Errors
    /// As [`Meeting::count`].
    pub fn compose(&self, source: u32, numbers: Option<&mut Numbers>) -> Result<(), Error> {
        let (paths, control) = (self.paths(), self.control());
        let members = paths.nodes().members(paths.nodes().node_of(paths.me()));
        let at = control.message_out(paths.place_of_told(source), self.setting.parity);
        for (place, &member) in (0..).zip(members) {
            let tag = self.tag_of(member)?.to_words();
            let to = at + place * Control::TAG_BYTES;
            self.fixed.port.write(WindowId::CONTROL, to, &tag)?;
        }
        if let Some(Numbers { counts, scratch, .. }) = numbers {
            let words = control.words() as usize;
            counts.clear(words as u32);
            for &member in members {
                self.publication_of(member, words, scratch)?;
                counts.add(source, member, scratch);
            }
            self.fixed.port.write(WindowId::CONTROL, at + control.below(), &counts.below)?;
            self.fixed.port.write(WindowId::CONTROL, at + control.total(), &counts.total)?;
        }
        Ok(())
    }

    fn publication_of(&self, member: u32, words: usize, into: &mut Vec<u32>) -> Result<(), Error> {
        let at = self.control().publication(self.setting.parity);
        into.resize(words, 0);
        self.fixed.port.read(member, WindowId::CONTROL, at, into)?;
        let bins = words - self.paths().staged_ranks() as usize;
        let theirs: u64 = into[..bins].iter().map(|&count| u64::from(count)).sum();
        let mine = self.control().max_entries();
        if theirs > mine {
            let (call, kind, what) = (self.calls.number(), CallKind::Dispatch, "number of entries");
            let (rank, peer) = (self.paths().me(), member);
            return Err(CallError::Disagree { call, kind, what, rank, peer, mine, theirs }.into());
        }
        Ok(())
    }

    /// Whether every rank has room for what lands there, and where that is.
    ///
    /// # Errors
    /// [`MemoryError::OutOfSpace`], the same on every rank.
    fn room(&self, mine: Tag, numbers: &mut Numbers) -> Result<(), Error> {
        let Numbers { sizes, landing, free, .. } = numbers;
        landing.clear();
        free.clear();
        for (rank, (&rows, &required)) in (0..).zip(sizes.rows.iter().zip(&sizes.required)) {
            let tag = if rank == self.paths().me() { mine } else { self.tag_of(rank)? };
            let staged = sizes.staged_at(rank);
            let asked = self.fixed.extent_bytes(mine.kind, rows, staged);
            if asked > tag.handle || required.max(staged) == u32::MAX {
                return Err(self.out_of_space(rank, asked, tag.handle));
            }
            landing.push(tag.base);
            free.push(tag.handle);
        }
        Ok(())
    }

    /// Pools are equally large everywhere, so a peer's error can be told as it sees it itself.
    pub fn out_of_space(&self, rank: u32, asked: u64, free: u64) -> Error {
        self.fixed.room.lacks(rank, asked, free)
    }

    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let me = self.paths().me();
        (0..self.paths().ranks()).filter(move |&peer| peer != me)
    }
}
