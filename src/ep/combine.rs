//! Combine: rows back to their tokens, summed.
//!
//! A *return* is what combine and the gradient of dispatch have in common: every rank offers a chunk (rows, and one
//! `f32` per row behind them); readers of the same node pull from it, the parts for other nodes are put into staging
//! there; then each rank sums in its own order.

use std::sync::Arc;

use super::buffers::check_tensor;
use super::call::{ENTRY, HOME, SUM, options};
use super::handle::{Inner, Kept};
use super::{Contribution, ExpertOutput, ExpertParallel, Handle};
use crate::dtype::Element;
use crate::error::{CallError, CallKind, Error, PlanError};
use crate::lane::Io;
use crate::memory::Extent;
use crate::rows::{Arithmetic, Stores};
use crate::schedule::{At, Parts, Tag, chunk_bytes};

/// A return that all ranks have entered, or will.
#[derive(Debug)]
pub(super) struct Return {
    pub kind: CallKind,
    pub parts: Parts,
    pub weighted: bool,
    /// Keep the chunk in the handle afterwards.
    pub keep: bool,
}

/// What the first half leaves to the second.
#[derive(Debug)]
pub(super) struct StartedReturn {
    call: Return,
    chunk: Option<Extent>,
    /// The chunk is a copy: the caller still has the rows.
    copied: bool,
    staging: Option<Extent>,
    tag: Tag,
    refused: Option<Error>,
}

/// A combine that was started: peers may read this rank's rows. Finish it before the next call; dropping it cancels
/// the world, because the other ranks cannot go on.
#[must_use = "the other ranks wait until this is finished"]
#[derive(Debug)]
pub struct PendingCombine<'a> {
    ep: &'a mut ExpertParallel,
    handle: &'a Handle,
    started: Option<StartedReturn>,
}

impl ExpertParallel {
    /// Brings expert outputs back to their tokens and sums them: `[tokens, hidden]`, for a new `Vec`. Collective.
    ///
    /// `y` is the buffer of [`Handle::output`], which is used in place, or any slice of rows, which is copied once.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch`], and [`CallError::ForeignHandle`]. After an error that leaves the world usable,
    /// [`Handle::output`] gives the buffer back.
    pub fn combine<'a, E: Element>(
        &mut self,
        y: impl Into<Contribution<'a>>,
        handle: &Handle,
    ) -> Result<Vec<E>, Error> {
        let mut out = vec![E::zeroed(); handle.tokens() as usize * self.spec.hidden];
        self.combine_into(y, handle, &mut out)?;
        Ok(out)
    }

    /// As [`ExpertParallel::combine`], into a tensor of the caller's.
    ///
    /// # Errors
    /// As [`ExpertParallel::combine`].
    pub fn combine_into<'a, E: Element>(
        &mut self,
        y: impl Into<Contribution<'a>>,
        handle: &Handle,
        out: &mut [E],
    ) -> Result<(), Error> {
        let checked =
            check_tensor("combined tokens", out, handle.tokens(), (self.spec.hidden, self.spec.dtype));
        let call = self.combine_call();
        let started = self.start_return(call, y.into(), None, handle, checked)?;
        self.finish_return(started, handle, bytemuck::cast_slice_mut(out), &mut [])
    }

    /// First half of [`ExpertParallel::combine`]: offers this rank's rows, and does not wait for the others'.
    ///
    /// # Errors
    /// Those that end the world. Bad input is reported by the second half, on all ranks.
    pub fn start_combine<'a, 'b>(
        &'a mut self,
        y: impl Into<Contribution<'b>>,
        handle: &'a Handle,
    ) -> Result<PendingCombine<'a>, Error> {
        let call = self.combine_call();
        let started = Some(self.start_return(call, y.into(), None, handle, Ok(()))?);
        Ok(PendingCombine { ep: self, handle, started })
    }

    fn combine_call(&self) -> Return {
        let weighted = self.spec.weighted;
        Return {
            kind: CallKind::Combine,
            parts: Parts { rows: true, weights: false },
            weighted,
            keep: weighted,
        }
    }

    pub(super) fn start_return(
        &mut self,
        call: Return,
        y: Contribution<'_>,
        row_weights: Option<&[f32]>,
        handle: &Handle,
        checked: Result<(), Error>,
    ) -> Result<StartedReturn, Error> {
        self.enter()?;
        let inner = handle.inner();
        let elsewhere = inner.keep_safe(y);
        let copied = elsewhere.is_some();
        let chunk = checked
            .and_then(|()| self.check_handle(inner))
            .and_then(|()| Ok(Arithmetic::try_from(self.spec.dtype).map(drop)?))
            .and_then(|()| self.chunk_of(elsewhere, row_weights, handle));
        let ready = chunk.and_then(|chunk| match self.take_staging(inner) {
            Ok(staging) => Ok((chunk, staging)),
            Err(error) => {
                inner.give_back(Some(chunk), copied);
                Err(error)
            }
        });
        let mut tag = Tag { kind: call.kind, options: digest(&call), handle: inner.number, ..Tag::default() };
        let (chunk, staging, refused) = match ready {
            Ok((chunk, staging)) => (Some(chunk), Some(staging), None),
            Err(error) => (None, None, Some(error)),
        };
        if let Some(error) = &refused {
            tag = Self::refuse(tag, error);
        }
        self.tables.clear();
        self.tables.tags.fill(tag);
        if let Some(chunk) = &chunk {
            for peer in 0..self.size() {
                let local = self.lanes.nodes.same_node(self.lanes.rank, peer);
                let base = if local { chunk.offset() } else { self.tables.bases[peer as usize] };
                self.tables.tags[peer as usize].base = base;
            }
        }
        let skeletons = Arc::clone(&self.skeletons);
        self.run(skeletons.ret.stages[ENTRY].halves().0, None, &mut Io::default(), Stores::Cached)?;
        Ok(StartedReturn { call, chunk, copied, staging, tag, refused })
    }

    /// The chunk this rank offers: the caller's buffer, which the handle keeps safe, or a copy of rows elsewhere.
    fn chunk_of(
        &mut self,
        elsewhere: Option<Contribution<'_>>,
        row_weights: Option<&[f32]>,
        handle: &Handle,
    ) -> Result<Extent, Error> {
        let inner = handle.inner();
        let rows = inner.layout.landed;
        let mut output = match elsewhere {
            None => handle.output()?,
            Some(Contribution::Output(output)) if output.instance != self.instance => {
                return Err(
                    CallError::ForeignHandle { seen: output.instance, expected: self.instance }.into()
                );
            }
            Some(Contribution::Output(output)) => {
                let (seen, expected) = (output.number, inner.number);
                return Err(CallError::WrongOutput { seen, expected }.into());
            }
            Some(Contribution::Elsewhere { bytes, dtype }) => {
                let what = "expert outputs";
                if dtype != self.spec.dtype {
                    return Err(PlanError::WrongDtype { what, seen: dtype, expected: self.spec.dtype }.into());
                }
                if bytes.len() as u64 != u64::from(rows) * inner.row_bytes {
                    let seen = bytes.len() / dtype.size();
                    let (rows, columns) = (rows as usize, self.spec.hidden);
                    return Err(PlanError::WrongShape { what, seen, rows, columns }.into());
                }
                let mut output: ExpertOutput = handle.output()?;
                output.rows_mut::<u8>()?.copy_from_slice(bytes);
                inner.copied.set(inner.copied.get() + bytes.len() as u64);
                output
            }
        };
        if let Some(weights) = row_weights {
            output.weights_mut()?.copy_from_slice(weights);
        }
        Ok(output.extent)
    }

    /// One extent for the chunks that ranks of other nodes put here; `tables.bases` says where each goes.
    fn take_staging(&mut self, inner: &Inner) -> Result<Extent, Error> {
        let at = At { nodes: &self.lanes.nodes, me: self.lanes.rank };
        let size = |rank: u32| chunk_bytes(inner.layout.chunk_rows[rank as usize], inner.row_bytes);
        let staging = self.shared.heap.pool().take(at.remote().map(size).sum())?;
        let mut next = staging.offset();
        for rank in at.remote() {
            self.tables.bases[rank as usize] = next;
            next += size(rank);
        }
        Ok(staging)
    }

    pub(super) fn finish_return(
        &mut self,
        started: StartedReturn,
        handle: &Handle,
        out: &mut [u8],
        weights_out: &mut [f32],
    ) -> Result<(), Error> {
        let StartedReturn { call, chunk, copied, staging, tag, refused } = started;
        let inner = handle.inner();
        let skeletons = Arc::clone(&self.skeletons);
        self.run(skeletons.ret.stages[ENTRY].halves().1, None, &mut Io::default(), Stores::Cached)?;
        if let Err(error) = self.agree(tag, refused) {
            inner.give_back(chunk, copied);
            return Err(error);
        }
        let Some(chunk) = chunk else {
            return Err(CallError::PeerRefused { call: self.calls, peer: self.rank() }.into());
        };
        for peer in 0..self.size() {
            let base = if peer == self.rank() { chunk.offset() } else { self.tag_of(peer)?.base };
            if self.lanes.nodes.same_node(self.lanes.rank, peer) {
                self.tables.bases[peer as usize] = base;
            } else {
                self.landing[peer as usize] = base;
            }
        }
        let at = At { nodes: &self.lanes.nodes, me: self.lanes.rank };
        self.tables.home(&at, &inner.layout, inner.row_bytes, chunk.offset(), &self.landing, call.parts);
        self.tables.sum(&at, call.parts);
        self.run(&skeletons.ret.stages[HOME].items, None, &mut Io::default(), Stores::Cached)?;
        let stores = self.stores(out.len() as u64);
        weights_out.fill(0.0);
        let mut io = Io { output: out, weights: weights_out, ..Io::default() };
        self.run_sum(&skeletons.ret.stages[SUM].items, Some(inner), call.weighted, &mut io, stores)?;
        self.last_return = self.calls;
        drop(staging);
        if call.keep {
            let licence = Arc::clone(&self.licence);
            inner.kept.replace(Some(Kept { extent: chunk, licence, value: self.calls }));
        } else {
            self.retire(chunk);
        }
        Ok(())
    }

    /// Ends the world: a call that was started is not going to be finished.
    pub(super) fn abandon(&self) {
        self.shared.hub.cancel(crate::error::Cause::Cancelled { by: self.shared.hub.rank() });
    }
}

fn digest(call: &Return) -> u32 {
    let bit = |on: bool, bit: u32| if on { bit } else { 0 };
    bit(call.parts.rows, options::ROWS)
        | bit(call.parts.weights, options::WEIGHTS)
        | bit(call.weighted, options::WEIGHTED)
}

impl PendingCombine<'_> {
    /// Second half: waits until all ranks offer their rows, and sums into `out`, `[tokens, hidden]`.
    ///
    /// # Errors
    /// As [`ExpertParallel::combine`]; but `out` of a wrong shape or type ends the world, as the other ranks have gone on.
    pub fn finish<E: Element>(mut self, out: &mut [E]) -> Result<(), Error> {
        let Some(started) = self.started.take() else {
            unreachable!("a combine is finished once: finish takes it")
        };
        let ep = &mut *self.ep;
        let checked =
            check_tensor("combined tokens", out, self.handle.tokens(), (ep.spec.hidden, ep.spec.dtype));
        if let Err(error) = checked {
            ep.abandon();
            return Err(error);
        }
        ep.finish_return(started, self.handle, bytemuck::cast_slice_mut(out), &mut [])
    }
}

impl Drop for PendingCombine<'_> {
    fn drop(&mut self) {
        if self.started.is_some() {
            self.ep.abandon();
        }
    }
}
