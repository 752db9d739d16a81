//! Combine: rows back to their tokens, summed.
//!
//! A *return* is what combine and the gradient of dispatch have in common: every rank offers a chunk (rows, and one
//! `f32` per row behind them); readers of the same node pull from it, the parts for other nodes are put into staging
//! there; then each rank sums in its own order.

use super::buffers::check_tensor;
use super::flight::{Flight, Lent, UnfinishedCall};
use super::{Contribution, ExpertParallel, Handle};
use crate::dtype::Element;
use crate::error::{CallKind, Error};
use crate::exec::Until;
use crate::lane::Io;
use crate::schedule::Parts;

/// A combine that was started: peers may read this rank's rows. Finish it before the next call; dropping it cancels
/// the world, because the other ranks cannot go on.
#[must_use = "the other ranks wait until this is finished"]
#[derive(Debug)]
pub struct PendingCombine<'a> {
    unfinished: UnfinishedCall<'a>,
    handle: &'a Handle,
    flight: Flight,
}

impl ExpertParallel {
    /// Brings expert outputs back to their tokens and sums them: `[tokens, hidden]`, for a new `Vec`. Collective.
    ///
    /// `y` is the buffer of [`Handle::output`], which is used in place, or any slice of rows, which is copied once.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch`], and [`CallError::ForeignHandle`](crate::error::CallError). After an error that leaves the world usable,
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
        let mut flight = self.combining();
        flight.refuse(checked);
        let (rows, io) = (Some(y.into()), Io { output: bytemuck::cast_slice_mut(out), ..Io::default() });
        self.ret(&mut flight, Lent { handle: Some(handle), rows, output: Some(io), ..Lent::default() })
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
        let mut flight = Flight { offloaded: self.fixed.paths().rails(), ..self.combining() };
        flight.refuse(self.check_handle(handle));
        let lent = Lent { handle: Some(handle), rows: Some(y.into()), ..Lent::default() };
        self.enter(&mut flight, lent, Until::Half)?;
        Ok(PendingCombine { unfinished: UnfinishedCall::new(self), handle, flight })
    }

    /// A combine, as this instance makes it.
    pub(super) fn combining(&self) -> Flight {
        let parts = Parts { rows: true, weights: false };
        Flight::returning(CallKind::Combine, parts, self.fixed.spec.weighted)
    }

    /// Makes a return along the handle that is lent.
    pub(super) fn ret(&mut self, flight: &mut Flight, lent: Lent<'_>) -> Result<(), Error> {
        if let Some(handle) = lent.handle {
            flight.refuse(self.check_handle(handle));
        }
        self.enter(flight, lent, Until::End)
    }
}

impl PendingCombine<'_> {
    /// Second half: waits until all ranks offer their rows, and sums into `out`, `[tokens, hidden]`.
    ///
    /// # Errors
    /// As [`ExpertParallel::combine`]. That `out` is of a wrong shape or type is found too late to refuse the call: the
    /// other ranks get their sums, this one gets none, and the rows are used up.
    pub fn finish<E: Element>(self, out: &mut [E]) -> Result<(), Error> {
        let PendingCombine { mut unfinished, handle, mut flight } = self;
        let ep = unfinished.finish();
        let sent = (ep.spec().hidden, ep.spec().dtype);
        let checked = check_tensor("combined tokens", out, handle.tokens(), sent);
        let io = Io { output: bytemuck::cast_slice_mut(out), ..Io::default() };
        let output = checked.is_ok().then_some(io);
        ep.proceed(&mut flight, Lent { handle: Some(handle), output, ..Lent::default() }, Until::End)?;
        checked
    }
}
