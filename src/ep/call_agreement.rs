//! Call agreement: compares the tags and counts that all ranks send on entry.
//!
//! ```text
//!   a local peer      its tag in its entry's line here, its counts in its publication there
//!   another node      one message from the rail peer there: the tags of its members, the sum of their counts
//! ```
//!
//! A rank and its offloaded relay read the same bytes and judge them by the same rules, so they
//! come to the same end without a word between them. So do all ranks.

use super::state::EpState;
use crate::error::{CallError, Cause, Error, MemoryError};
use crate::plan::{Counts, Overflow, ReceiveSizes};
use crate::schedule::call_program::Agreement;
use crate::schedule::{CallProperties, Calls, ControlLayout, FillContext, Flag, Refusal, Tag, WindowId};
use crate::topology::Paths;

/// The entries of all ranks into one call, as this rank reads them.
#[derive(Clone, Copy)]
pub(in crate::ep) struct CallAgreement<'a> {
    pub fixed: &'a EpState,
    pub setting: FillContext<'a>,
    pub calls: Calls,
    /// Per rank: the tag that it has said again, outside the lanes; none if no rank has.
    pub said: &'a [Tag],
}

/// Counts and sizes of all ranks, used again by all calls.
#[derive(Debug, Default)]
pub(in crate::ep) struct GroupCounts {
    pub counts: Counts,
    pub sizes: ReceiveSizes,
    /// Per rank: where rows land there.
    pub landing: Vec<u64>,
    /// Per rank: the bytes that it announced from there on.
    pub free: Vec<u64>,
    /// Of one rank or node.
    pub scratch: Vec<u32>,
}

impl GroupCounts {
    /// To be found in each call or, where slots are fixed, here for all calls.
    pub fn new(fixed: &EpState) -> Self {
        let (mut numbers, EpState { spec, bins, .. }) = (GroupCounts::default(), fixed);
        if let Some(slots) = spec.mode.slots() {
            numbers.counts.fix(bins, &fixed.paths(), slots, spec.max_tokens);
            numbers.sizes.fill(bins, spec.align, &numbers.counts.total, None);
        }
        numbers
    }
}

impl<'a> CallAgreement<'a> {
    fn paths(&self) -> Paths<'a> {
        self.setting.paths
    }

    fn control(&self) -> &'a ControlLayout {
        self.setting.control
    }

    /// The tag that a rank sent when it entered the call. A rank finds its own tag where it wrote
    /// it for its relay.
    pub fn tag_of(&self, rank: u32) -> Result<Tag, MemoryError> {
        let paths = self.paths();
        if let Some(&said) = self.said.get(rank as usize) {
            return Ok(said);
        }
        if rank == paths.me() {
            return Ok(self.fixed.port.flag(rank, Flag::Block)?.tag(self.calls.value()));
        }
        if paths.same_node(rank) {
            return Ok(self.fixed.port.flag(rank, Flag::Entry)?.tag(self.calls.value()));
        }
        let mut words = [0u64; 3];
        let place = u64::from(paths.nodes().index_in_node(rank)) * ControlLayout::TAG_BYTES;
        let at = self.message(paths.nodes().node_of(rank)) + place;
        self.fixed.port.read(paths.me(), WindowId::CONTROL, at, &mut words)?;
        Ok(Tag::from_words(words))
    }

    fn message(&self, node: u32) -> u64 {
        self.control().message_in(node, self.setting.parity)
    }

    /// Whether all ranks make the call that this rank enters as `mine`, and none refuses. `refused`
    /// is this rank's own reason to refuse it.
    ///
    /// # Errors
    /// [`CallError::KindsDiffer`], [`CallError::Disagree`]; else `refused`; else
    /// [`CallError::PeerRefused`] or [`MemoryError::OutOfSpace`] of the lowest rank that refused.
    pub fn agree(&self, mine: Tag, refused: Option<Error>) -> Result<(), Error> {
        let (me, said) = (self.paths().me(), |peer| Ok::<_, Error>(self.tag_of(peer)?));
        let (call, ranks) = (self.calls.number(), self.paths().ranks());
        let group = Agreement { call, rank: me, ranks, compared: CallProperties::of(mine.kind).compared };
        group.alike(mine, said)?;
        match refused {
            // The pool knows its rank in the world; errors of calls name positions in the group.
            Some(Error::Memory(MemoryError::OutOfSpace { asked, free, .. })) => {
                return Err(self.out_of_space(me, asked, free));
            }
            Some(own) => return Err(own),
            None => {}
        }
        match group.refusal(said)? {
            None => Ok(()),
            Some((peer, tag)) if tag.refusal == Refusal::Space => {
                Err(self.out_of_space(peer, tag.handle, tag.base))
            }
            Some((peer, _)) => Err(group.refused_by(peer).into()),
        }
    }

    /// Adds up what all ranks count: the sizes of all ranks.
    ///
    /// # Errors
    /// [`Cause::Protocol`] if a local peer counts more than it may. Only this node sees that, so it
    /// ends the world.
    pub fn judge(&self, numbers: &mut GroupCounts) -> Result<(), Error> {
        let EpState { spec, bins, .. } = self.fixed;
        if spec.mode.slots().is_none() {
            self.count(numbers)?;
            numbers.sizes.fill(bins, spec.align, &numbers.counts.total, spec.mode.budget());
        }
        Ok(())
    }

    /// Whether every rank has room for what it receives, and where it lands there. Afterwards
    /// [`judge`](CallAgreement::judge).
    ///
    /// # Errors
    /// The same on every rank: [`CallError::OverBudget`] or [`MemoryError::OutOfSpace`].
    pub fn check_space(&self, mine: Tag, numbers: &mut GroupCounts) -> Result<(), Error> {
        self.within_budget(&numbers.sizes)?;
        self.room(mine, numbers)
    }

    /// Whether no rank needs more than its budget, if that is an error.
    ///
    /// # Errors
    /// [`CallError::OverBudget`], the same on every rank.
    pub fn within_budget(&self, sizes: &ReceiveSizes) -> Result<(), Error> {
        let mode = self.fixed.spec.mode;
        if let (Some(budget), Overflow::Error) = (mode.budget(), mode.overflow())
            && let Some((rank, &required)) =
                (0..).zip(&sizes.required).find(|(_, required)| **required > budget)
        {
            return Err(CallError::OverBudget { call: self.calls.number(), rank, required, budget }.into());
        }
        Ok(())
    }

    /// Adds up what all ranks count, as this rank needs it. `scratch` is for one node's or rank's
    /// numbers.
    ///
    /// # Errors
    /// As [`CallAgreement::judge`].
    fn count(&self, GroupCounts { counts, scratch, .. }: &mut GroupCounts) -> Result<(), Error> {
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

    /// Adds up the counts of this node, as `source` of another node needs them, and composes the
    /// message for it.
    ///
    /// # Errors
    /// As [`CallAgreement::judge`].
    pub fn compose(&self, source: u32, numbers: Option<&mut GroupCounts>) -> Result<(), Error> {
        let (paths, control) = (self.paths(), self.control());
        let members = paths.nodes().members(paths.nodes().node_of(paths.me()));
        let at = control.message_out(paths.place_of_receiver(source), self.setting.parity);
        for (place, &member) in (0..).zip(members) {
            let tag = self.tag_of(member)?.to_words();
            let to = at + place * ControlLayout::TAG_BYTES;
            self.fixed.port.write(WindowId::CONTROL, to, &tag)?;
        }
        if let Some(GroupCounts { counts, scratch, .. }) = numbers {
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
        if theirs > self.control().max_entries() {
            return Err(Cause::Protocol { rank: self.fixed.lanes.world_ranks[member as usize] }.into());
        }
        Ok(())
    }

    /// Whether every rank has room for what lands there, and where that is.
    ///
    /// # Errors
    /// [`MemoryError::OutOfSpace`], the same on every rank.
    pub fn room(&self, mine: Tag, numbers: &mut GroupCounts) -> Result<(), Error> {
        let GroupCounts { sizes, landing, free, .. } = numbers;
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

    /// Pools are equally large everywhere, so each rank can state a peer's error as the peer sees
    /// it.
    pub fn out_of_space(&self, rank: u32, asked: u64, free: u64) -> Error {
        self.fixed.room.lacks(rank, asked, free)
    }
}
