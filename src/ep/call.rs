//! What all calls share: entering together, and agreeing before anything moves.

use std::sync::Arc;

use super::ExpertParallel;
use super::handle::Inner;
use crate::error::{CallError, Error, MemoryError};
use crate::lane::Io;
use crate::rows::Stores;
use crate::schedule::{Flag, Item, Operands, Refusal, Sum, Tag};

/// Bits of the options digest.
pub(super) mod options {
    /// Rows are summed.
    pub const ROWS: u32 = 1;
    /// One `f32` per row comes home.
    pub const WEIGHTS: u32 = 2;
    /// Rows are multiplied with routing weights.
    pub const WEIGHTED: u32 = 4;
}

/// Stages of the skeletons.
pub(super) const LICENCE: usize = 0;
pub(super) const ENTRY: usize = 1;
pub(super) const ROWS: usize = 2;
pub(super) const HOME: usize = 2;
pub(super) const SUM: usize = 3;

impl ExpertParallel {
    /// Counts the call, and waits until peers have read what this rank offered last.
    pub(super) fn enter(&mut self) -> Result<(), Error> {
        self.shared.hub.health().check()?;
        self.calls += 1;
        let skeletons = Arc::clone(&self.skeletons);
        self.run(&skeletons.ret.stages[LICENCE].items, None, &mut Io::default(), Stores::Cached)
    }

    /// The tag of a refusal.
    pub(super) fn refuse(tag: Tag, error: &Error) -> Tag {
        match *error {
            Error::Memory(MemoryError::OutOfSpace { asked, free, .. }) => {
                Tag { refusal: Refusal::Space, handle: asked, base: free, ..tag }
            }
            _ => Tag { refusal: Refusal::Input, ..tag },
        }
    }

    /// Compares what all ranks entered; on return everybody makes the same call and nobody refuses.
    ///
    /// # Errors
    /// What this rank itself refused (`own`), [`CallError::KindsDiffer`], [`CallError::Disagree`],
    /// [`CallError::PeerRefused`], [`MemoryError::OutOfSpace`] of a peer. Lowest rank first; other calls before
    /// refusals.
    pub(super) fn agree(&self, mine: Tag, own: Option<Error>) -> Result<(), Error> {
        let (call, rank) = (self.calls & (u64::MAX >> 16), self.rank());
        let mut refused = None;
        for peer in (0..self.size()).filter(|&peer| peer != rank) {
            let tag = self.tag_of(peer)?;
            if tag.kind != mine.kind {
                return Err(
                    CallError::KindsDiffer { call, rank, peer, mine: mine.kind, theirs: tag.kind }.into()
                );
            }
            match tag.refusal {
                Refusal::Input if refused.is_none() => {
                    refused = Some(CallError::PeerRefused { call, peer }.into());
                }
                Refusal::Space if refused.is_none() => {
                    refused = Some(self.out_of_space(peer, tag.handle, tag.base));
                }
                Refusal::None if mine.refusal == Refusal::None => {
                    for (what, mine, theirs) in [
                        ("options", u64::from(mine.options), u64::from(tag.options)),
                        ("handle", mine.handle, tag.handle),
                    ] {
                        if mine != theirs {
                            let kind = tag.kind;
                            return Err(
                                CallError::Disagree { call, kind, what, rank, peer, mine, theirs }.into()
                            );
                        }
                    }
                }
                _ => {}
            }
        }
        let own = own.map(|error| match error {
            // The pool knows its rank in the world; errors of calls name positions in the group.
            Error::Memory(MemoryError::OutOfSpace { asked, free, .. }) => {
                self.out_of_space(rank, asked, free)
            }
            other => other,
        });
        own.or(refused).map_or(Ok(()), Err)
    }

    /// What a peer said when it entered the running call.
    pub(super) fn tag_of(&self, peer: u32) -> Result<Tag, MemoryError> {
        Ok(self.port.flag(peer, Flag::Entry)?.tag(self.calls))
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
            call: self.calls,
            last_return: self.last_return,
            runs: handle.map_or(&[], |h| &h.layout.runs),
            rows: handle.map_or(&[], |h| &h.layout.rows),
            sum: handle.map_or(Sum::default(), |h| h.sum(&tables.bases, weighted)),
        };
        let result = self.host.run(&self.port, items, &operands, io, stores);
        result.map_err(|error| self.fail(error))
    }
}
