//! What all calls share: entering together, and agreeing before anything moves.

use std::sync::Arc;

use super::ExpertParallel;
use super::handle::Inner;
use crate::error::{CallError, Cause, Error, MemoryError};
use crate::lane::{Io, Lanes};
use crate::rows::Stores;
use crate::schedule::{At, Flag, Item, Operands, Refusal, Sum, Tag};

/// Bits of the options digest.
pub(super) mod options {
    /// Rows are summed.
    pub const ROWS: u32 = 1;
    /// One `f32` per row comes home.
    pub const WEIGHTS: u32 = 2;
    /// Rows are multiplied with routing weights.
    pub const WEIGHTED: u32 = 4;
}

/// A call that was started, and that the other ranks wait for: dropped before it is finished, it ends the world.
#[derive(Debug)]
pub(super) struct Begun<'a> {
    ep: &'a mut ExpertParallel,
    finishing: bool,
}

impl<'a> Begun<'a> {
    pub fn new(ep: &'a mut ExpertParallel) -> Self {
        Begun { ep, finishing: false }
    }

    /// To make the second half.
    pub fn finish(&mut self) -> &mut ExpertParallel {
        self.finishing = true;
        self.ep
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if !self.finishing {
            let hub = &self.ep.shared.hub;
            hub.cancel(Cause::Cancelled { by: hub.rank() });
        }
    }
}

impl ExpertParallel {
    /// Counts the call, and waits until peers have read what this rank offered last: the first stage of every call.
    pub(super) fn enter(&mut self) -> Result<(), Error> {
        self.shared.hub.health().check()?;
        self.calls.enter();
        let skeletons = Arc::clone(&self.skeletons);
        self.run(&skeletons.ret.licence.items, None, &mut Io::default(), Stores::Cached)
    }

    /// The tag of a rank that is ready for the call, or of one that refuses.
    pub(super) fn entry<T>(tag: Tag, ready: &Result<T, Error>) -> Tag {
        match *ready {
            Ok(_) => tag,
            Err(Error::Memory(MemoryError::OutOfSpace { asked, free, .. })) => {
                Tag { refusal: Refusal::Space, handle: asked, base: free, ..tag }
            }
            Err(_) => Tag { refusal: Refusal::Input, ..tag },
        }
    }

    /// Compares what all ranks entered: what this rank got `ready` is used only if everybody makes the same call and
    /// nobody refuses; otherwise `take_back` has it.
    ///
    /// # Errors
    /// [`CallError::KindsDiffer`], [`CallError::Disagree`]; else what this rank itself refused; else
    /// [`CallError::PeerRefused`] or [`MemoryError::OutOfSpace`] of the lowest rank that refused.
    pub(super) fn agree<T>(
        &self,
        mine: Tag,
        ready: Result<T, Error>,
        take_back: impl FnOnce(T),
    ) -> Result<T, Error> {
        let alike = self.all_alike(mine);
        let ready = match ready {
            Ok(ready) => ready,
            Err(own) => return Err(alike.err().unwrap_or_else(|| self.in_group(own))),
        };
        match alike.and_then(|()| self.nobody_refuses()) {
            Ok(()) => Ok(ready),
            Err(error) => {
                take_back(ready);
                Err(error)
            }
        }
    }

    fn all_alike(&self, mine: Tag) -> Result<(), Error> {
        let (call, kind, rank) = (self.calls.number(), mine.kind, self.rank());
        for peer in self.peers() {
            let theirs = self.tag_of(peer)?;
            if theirs.kind != kind {
                let (mine, theirs) = (kind, theirs.kind);
                return Err(CallError::KindsDiffer { call, rank, peer, mine, theirs }.into());
            }
            if [mine.refusal, theirs.refusal] != [Refusal::None; 2] {
                continue;
            }
            for (what, mine, theirs) in [
                ("options", u64::from(mine.options), u64::from(theirs.options)),
                ("handle", mine.handle, theirs.handle),
            ] {
                if mine != theirs {
                    return Err(CallError::Disagree { call, kind, what, rank, peer, mine, theirs }.into());
                }
            }
        }
        Ok(())
    }

    fn nobody_refuses(&self) -> Result<(), Error> {
        for peer in self.peers() {
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

    /// The pool knows its rank in the world; errors of calls name positions in the group.
    fn in_group(&self, error: Error) -> Error {
        match error {
            Error::Memory(MemoryError::OutOfSpace { asked, free, .. }) => {
                self.out_of_space(self.rank(), asked, free)
            }
            other => other,
        }
    }

    fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        let rank = self.rank();
        (0..self.size()).filter(move |&peer| peer != rank)
    }

    /// This rank among its nodes. It borrows nothing of this, so that tables can be filled meanwhile.
    pub(super) fn at(lanes: &Lanes) -> At<'_> {
        At { nodes: &lanes.nodes, me: lanes.rank }
    }

    /// Where a rank said, when it entered the running call, that this one may write or read.
    pub(super) fn base_of(&self, rank: u32) -> Result<u64, MemoryError> {
        if rank == self.rank() {
            return Ok(self.tables.tags[rank as usize].base);
        }
        Ok(self.tag_of(rank)?.base)
    }

    /// What a peer said when it entered the running call.
    fn tag_of(&self, peer: u32) -> Result<Tag, MemoryError> {
        Ok(self.port.flag(peer, Flag::Entry)?.tag(self.calls.value()))
    }

    /// Pools are equally large everywhere, so a peer's error can be told as it sees it itself.
    pub(super) fn out_of_space(&self, rank: u32, asked: u64, free: u64) -> Error {
        let total = self.pool().total();
        MemoryError::OutOfSpace { rank, asked, free, total, space: "pool", setting: "SIDELANE_HEAP" }.into()
    }

    /// Runs operations of the running call, with the layout of a handle.
    pub(super) fn run(
        &mut self,
        items: &[Item],
        handle: Option<&Inner>,
        io: &mut Io<'_>,
        stores: Stores,
    ) -> Result<(), Error> {
        self.run_sum(items, handle, false, io, stores)
    }

    /// As [`ExpertParallel::run`]; sums multiply with the handle's routing weights if `weighted`.
    pub(super) fn run_sum(
        &mut self,
        items: &[Item],
        handle: Option<&Inner>,
        weighted: bool,
        io: &mut Io<'_>,
        stores: Stores,
    ) -> Result<(), Error> {
        let tables = &self.tables;
        let operands = Operands {
            table: &tables.table,
            spans: &tables.spans,
            tags: &tables.tags,
            row_bytes: self.spec.row_bytes(),
            call: self.calls.value(),
            last_return: self.calls.last_return(),
            runs: handle.map_or(&[], |h| &h.layout.runs),
            rows: handle.map_or(&[], |h| &h.layout.rows),
            sum: handle.map_or(Sum::default(), |h| h.sum(&tables.bases, weighted)),
        };
        let result = self.host.run(&self.port, items, &operands, io, stores);
        result.map_err(|error| self.fail(error))
    }
}
