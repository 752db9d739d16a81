//! Combine: rows back to their tokens, summed.
//!
//! A *return* is what combine and the gradient of dispatch have in common: every rank offers a chunk (rows, and one
//! `f32` per row behind them); readers of the same node pull from it, the parts for other nodes are put into staging
//! there; then each rank sums in its own order.

use std::sync::Arc;

use super::buffers::check_tensor;
use super::call::{Begun, Relaying, entry, options};
use super::handle::{Inner, Kept};
use super::relay::Errand;
use super::{Contribution, ExpertOutput, ExpertParallel, Handle};
use crate::dtype::Element;
use crate::error::{CallError, CallKind, Error, PlanError};
use crate::exec::Moved;
use crate::lane::Io;
use crate::memory::Extent;
use crate::rows::{Arithmetic, Stores};
use crate::schedule::{CallerTables, Parts, RelayTables, Tag};

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
    tag: Tag,
    ready: Result<Offer, Error>,
    relaying: Relaying,
}

/// What a rank brings into a return.
#[derive(Debug)]
struct Offer {
    chunk: Extent,
    /// The chunk is a copy: the caller still has the rows.
    copied: bool,
    staging: Extent,
}

/// A combine that was started: peers may read this rank's rows. Finish it before the next call; dropping it cancels
/// the world, because the other ranks cannot go on.
#[must_use = "the other ranks wait until this is finished"]
#[derive(Debug)]
pub struct PendingCombine<'a> {
    begun: Begun<'a>,
    handle: &'a Handle,
    started: StartedReturn,
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
        let mut out = vec![E::zeroed(); handle.tokens() as usize * self.fixed.spec.hidden];
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
        let checked = check_tensor(
            "combined tokens",
            out,
            handle.tokens(),
            (self.fixed.spec.hidden, self.fixed.spec.dtype),
        );
        let call = self.combine_call();
        let started = self.start_return(call, y.into(), None, handle, checked, false)?;
        let output = bytemuck::cast_slice_mut(out);
        self.finish_return(started, handle, Some(Io { output, ..Io::default() }))
    }

    /// First half of [`ExpertParallel::combine`]: offers this rank's rows, and does not wait for the others'. Until the
    /// second half, what this rank does for other nodes is done in a thread of its own.
    ///
    /// # Errors
    /// Those that end the world. Bad input is reported by the second half, on all ranks.
    pub fn start_combine<'a, 'b>(
        &'a mut self,
        y: impl Into<Contribution<'b>>,
        handle: &'a Handle,
    ) -> Result<PendingCombine<'a>, Error> {
        let call = self.combine_call();
        let started = self.start_return(call, y.into(), None, handle, Ok(()), true)?;
        Ok(PendingCombine { begun: Begun::new(self), handle, started })
    }

    pub(super) fn combine_call(&self) -> Return {
        let weighted = self.fixed.spec.weighted;
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
        away: bool,
    ) -> Result<StartedReturn, Error> {
        self.enter()?;
        let inner = handle.inner();
        let elsewhere = inner.keep_safe(y);
        let copied = elsewhere.is_some();
        let chunk = checked
            .and_then(|()| self.check_handle(inner))
            .and_then(|()| Ok(Arithmetic::try_from(self.fixed.spec.dtype).map(drop)?))
            .and_then(|()| self.chunk_of(elsewhere, row_weights, handle));
        let ready = chunk.and_then(|chunk| match self.take_home(inner) {
            Ok(staging) => Ok(Offer { chunk, copied, staging }),
            Err(error) => {
                inner.give_back(chunk, copied);
                Err(error)
            }
        });
        let tag = Tag { kind: call.kind, options: digest(&call), handle: inner.number, ..Tag::default() };
        let tag = entry(tag, &ready);
        self.tables.clear();
        match &ready {
            Ok(offer) => self.tables.offer(&self.fixed.paths(), tag, offer.chunk.offset()),
            Err(_) => self.tables.tags.fill(tag),
        }
        let skeletons = Arc::clone(&self.skeletons);
        self.run(skeletons.ret.entry.start(), None, &mut Io::default(), Stores::Cached)?;
        let home = CallerTables::home_bytes(&self.fixed.paths(), &inner.layout);
        let outbox = ready.as_ref().map_or(0, |offer| offer.staging.offset() + home);
        let relaying = self.relay(away, |calls| {
            let forward = inner.forward.clone().unwrap_or_default();
            let weighted = call.weighted && call.parts.rows;
            Errand { parts: call.parts, weighted, outbox, ..Errand::new(calls, call.kind, forward) }
        })?;
        Ok(StartedReturn { call, tag, ready, relaying })
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
                if dtype != self.fixed.spec.dtype {
                    return Err(
                        PlanError::WrongDtype { what, seen: dtype, expected: self.fixed.spec.dtype }.into()
                    );
                }
                if bytes.len() as u64 != u64::from(rows) * inner.row_bytes {
                    let seen = bytes.len() / dtype.size();
                    let (rows, columns) = (rows as usize, self.fixed.spec.hidden);
                    return Err(PlanError::WrongShape { what, seen, rows, columns }.into());
                }
                let mut output: ExpertOutput = handle.output()?;
                output.rows_mut::<u8>()?.copy_from_slice(bytes);
                inner.copied.store(inner.copied.load() + bytes.len() as u64);
                output
            }
        };
        if let Some(weights) = row_weights {
            output.weights_mut()?.copy_from_slice(weights);
        }
        Ok(output.extent)
    }

    /// One extent for the rows that relays bring home; `tables.bases` says where each goes. Behind them the sums wait that
    /// this rank brings to others.
    fn take_home(&mut self, inner: &Inner) -> Result<Extent, Error> {
        let meeting = self.fixed.meeting(self.calls, CallKind::Combine);
        let paths = self.fixed.paths();
        let home = CallerTables::home_bytes(&paths, &inner.layout);
        let forward = inner.forward.as_deref();
        let outbox = forward.map_or(0, |forward| RelayTables::outbox_bytes(&meeting.setting, forward));
        let staging = self.pool().take(home + outbox)?;
        self.tables.stage(&paths, &inner.layout, staging.offset());
        Ok(staging)
    }

    /// Second half of a return. Without `io` this rank sums nothing: its caller has no place for it, but does all that
    /// its peers wait for.
    pub(super) fn finish_return(
        &mut self,
        started: StartedReturn,
        handle: &Handle,
        io: Option<Io<'_>>,
    ) -> Result<(), Error> {
        let StartedReturn { call, tag, ready, mut relaying } = started;
        let inner = handle.inner();
        let skeletons = Arc::clone(&self.skeletons);
        self.meet(&mut relaying)?;
        self.run(skeletons.ret.entry.finish(), None, &mut Io::default(), Stores::Cached)?;
        let agreed = self.agree(tag, ready, |offer| inner.give_back(offer.chunk, offer.copied));
        let Offer { chunk, staging, .. } = match agreed {
            Ok(offer) => offer,
            Err(error) => {
                self.relayed(relaying);
                return Err(error);
            }
        };
        self.tell_agreed();
        let fixed = Arc::clone(&self.fixed);
        let meeting = fixed.meeting(self.calls, call.kind);
        self.tables.bases[fixed.lanes.rank as usize] = chunk.offset();
        for peer in fixed.paths().locals() {
            self.tables.bases[peer as usize] = meeting.tag_of(peer)?.base;
        }
        self.host.take_moved();
        self.carry(&mut relaying)?;
        self.run(&skeletons.ret.home.items, None, &mut Io::default(), Stores::Cached)?;
        let relayed = self.relayed(relaying).map_or(Moved::default(), |errand| errand.moved);
        let parts = if io.is_some() { call.parts } else { Parts::default() };
        self.tables.sum(&meeting.setting, &inner.layout, parts);
        let mut io = io.unwrap_or_default();
        let stores = self.stores(io.output.len() as u64);
        io.weights.fill(0.0);
        self.run_sum(&skeletons.ret.sum.items, Some(inner), call.weighted, &mut io, stores)?;
        let mut moved = self.host.take_moved();
        moved.add(relayed);
        inner.returned.store(moved);
        self.calls.returned();
        drop(staging);
        if call.keep {
            let licence = Arc::clone(&self.licence);
            inner.kept.put(Kept { extent: chunk, licence, value: self.calls.value() });
        } else {
            self.retire(chunk);
        }
        Ok(())
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
    /// As [`ExpertParallel::combine`]. That `out` is of a wrong shape or type is found too late to refuse the call: the
    /// other ranks get their sums, this one gets none, and the rows are used up.
    pub fn finish<E: Element>(self, out: &mut [E]) -> Result<(), Error> {
        let PendingCombine { mut begun, handle, started } = self;
        let ep = begun.finish();
        let checked =
            check_tensor("combined tokens", out, handle.tokens(), (ep.spec().hidden, ep.spec().dtype));
        let output = bytemuck::cast_slice_mut(out);
        let io = checked.is_ok().then(|| Io { output, ..Io::default() });
        ep.finish_return(started, handle, io)?;
        checked
    }
}
