//! Calls between their two halves.
//!
//! The other ranks wait for the second half of every call that was started. So a started call that
//! is dropped before it is finished cancels the world, in either place.

use std::sync::Arc;

use super::buffers::RowsAt;
use super::device::planned::{PlannedCombine, PlannedDispatch, PlannedExchange};
use super::device::slots::{SlotCombine, SlotDispatch, SlotExchange};
use super::handle::HandleAt;
use super::host::{HostCombine, HostDispatch};
use super::tensor::TensorMut;
use super::{ExpertRows, Handle};
use crate::device::Stream;
use crate::error::{Cause, Error, PlanError};
use crate::world::WorldState;

/// A dispatch that was started: on the host, counts are on their way; on a device, choices are
/// on their way to the host. Finish it before the next call; dropping it cancels the world, because
/// the other ranks cannot go on.
#[must_use = "the other ranks wait until this is finished"]
#[derive(Debug)]
pub struct PendingDispatch<'a>(pub(super) DispatchAt<'a>);

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "calls on the host allocate nothing")]
pub(super) enum DispatchAt<'a> {
    Host(HostDispatch<'a>),
    Planned { started: PlannedDispatch, unfinished: Unfinished, ep: &'a mut PlannedExchange },
    Slots { started: SlotDispatch, unfinished: Unfinished, ep: &'a mut SlotExchange, stream: &'a Stream },
}

impl PendingDispatch<'_> {
    /// Second half. The host waits for the counts of all ranks, places, moves the rows, and waits
    /// for those that come here. A device waits for the counts alone: rows are there for what is
    /// enqueued next. In fixed slots nothing waits.
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch`](crate::ExpertParallel::dispatch). On a device, after those
    /// that leave the world usable, the stream goes on with no rows, and the status word says why.
    pub fn finish(self) -> Result<(ExpertRows, Handle), Error> {
        match self.0 {
            DispatchAt::Host(started) => {
                let (rows, handle) = started.finish()?;
                Ok((ExpertRows(RowsAt::Host(rows)), Handle(HandleAt::Host(handle))))
            }
            DispatchAt::Planned { started, unfinished, ep } => {
                unfinished.end();
                let (rows, handle) = ep.finish_dispatch(started)?;
                Ok((ExpertRows(RowsAt::Planned(Box::new(rows))), Handle(HandleAt::Planned(handle))))
            }
            DispatchAt::Slots { started, unfinished, ep, stream } => {
                unfinished.end();
                let (rows, handle) = ep.finish_dispatch(stream, started)?;
                Ok((ExpertRows(RowsAt::Slots(rows)), Handle(HandleAt::Slots(handle))))
            }
        }
    }

    /// Second half with sizes that stay on the device: nothing waits. With a budget and
    /// [`Graphs::Slots`](super::Graphs::Slots), the number of rows stands in
    /// [`ExpertRows::counts`], and [`Handle::status`] says whether they came. So the call can be
    /// captured into a graph.
    ///
    /// # Errors
    /// [`PlanError::NotAvailable`] on the host, and on a device for calls that the host finishes,
    /// where rows have no place before their number is known: the call is then finished as far as
    /// the other ranks see it.
    pub fn unfinished(self) -> Result<(ExpertRows, Handle), Error> {
        match self.0 {
            DispatchAt::Planned { started, unfinished, ep } => {
                unfinished.end();
                let (rows, handle) = ep.unfinished_dispatch(started)?;
                Ok((ExpertRows(RowsAt::Planned(Box::new(rows))), Handle(HandleAt::Planned(handle))))
            }
            DispatchAt::Slots { .. } => self.finish(),
            DispatchAt::Host(started) => {
                started.finish()?;
                super::Feature::Capture.require(super::CallExecutor::HostStepper)?;
                Err(PlanError::RefusedHere.into())
            }
        }
    }
}

/// A combine that was started: peers may read this rank's rows. Finish it before the next call;
/// dropping it cancels the world, because the other ranks cannot go on.
#[must_use = "the other ranks wait until this is finished"]
#[derive(Debug)]
pub struct PendingCombine<'a>(pub(super) CombineAt<'a>);

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "calls on the host allocate nothing")]
pub(super) enum CombineAt<'a> {
    Host(HostCombine<'a>),
    Planned {
        started: PlannedCombine,
        handle: &'a Handle,
        unfinished: Unfinished,
        ep: &'a mut PlannedExchange,
    },
    Slots {
        started: SlotCombine,
        handle: &'a Handle,
        unfinished: Unfinished,
        ep: &'a mut SlotExchange,
        stream: &'a Stream,
    },
}

impl PendingCombine<'_> {
    /// Second half, into `out`, `[tokens, hidden]`. The host waits until all ranks offer their
    /// rows, and sums. On a device the sums are there for what is enqueued next, and
    /// [`Handle::returned`] says how the call went.
    ///
    /// # Errors
    /// As [`ExpertParallel::combine`](crate::ExpertParallel::combine). That `out` cannot be used is
    /// found too late to refuse the call: the other ranks get their sums, this one gets none, and
    /// the rows are used up.
    pub fn finish<'o>(self, out: impl Into<TensorMut<'o>>) -> Result<(), Error> {
        let (out, what) = (out.into(), "combined tokens");
        match self.0 {
            CombineAt::Host(started) => started.finish(out.on_host(what)),
            CombineAt::Planned { started, handle, unfinished, ep } => {
                unfinished.end();
                let HandleAt::Planned(handle) = &handle.0 else { return Err(PlanError::RefusedHere.into()) };
                let out = out.on_device(what, ep.tokens_shape(handle.tokens()), ep.stream().device());
                let summed = ep.finish_combine(started, handle, out.as_ref().ok().copied());
                summed.and(out.map(drop))
            }
            CombineAt::Slots { started, handle, unfinished, ep, stream } => {
                unfinished.end();
                let HandleAt::Slots(handle) = &handle.0 else { return Err(PlanError::RefusedHere.into()) };
                ep.finish_combine(stream, started, handle, out)
            }
        }
    }
}

/// A started call on a device: dropped, it cancels the world.
#[derive(Debug)]
pub(super) struct Unfinished(Option<Arc<WorldState>>);

impl Unfinished {
    pub fn new(shared: &Arc<WorldState>) -> Self {
        Unfinished(Some(Arc::clone(shared)))
    }

    /// The second half is made.
    pub fn end(mut self) {
        self.0 = None;
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(shared) = self.0.take() {
            shared.hub.cancel(Cause::Cancelled { by: shared.hub.rank() });
        }
    }
}
