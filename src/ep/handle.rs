//! Results that outlive a call: the layout of a dispatch, and calls between their halves.
//!
//! ```text
//!   start_dispatch --> PendingDispatch --finish--> rows, Handle --+
//!   start_combine(handle) --> PendingCombine --finish--> sums  <--+
//! ```
//!
//! The other ranks wait for the second half of every call that was started. So a started call that
//! is dropped before it is finished cancels the world, in either place.

use std::sync::Arc;

use super::device::{EnqueuedCombine, EnqueuedDispatch, EnqueuedExchange, EnqueuedHandle};
use super::host::{HostCombine, HostDispatch, HostHandle};
use super::rows::{OutputAt, RowsAt};
use super::tensor::{Side, TensorMut, wrong_place};
use super::{ExpertOutput, ExpertRows, Report, RowIndex, Status};
use crate::device::{DeviceRange, Stream};
use crate::ep::device::slots::{SlotCombine, SlotDispatch, SlotExchange, SlotHandle};
use crate::error::{CallError, Cause, Error, PlanError};
use crate::world::WorldState;

/// The placement of one dispatch. Combine, cached dispatch and the gradients follow it; several may
/// be alive.
#[derive(Debug)]
pub struct Handle(pub(super) HandleAt);

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "calls allocate nothing")]
pub(super) enum HandleAt {
    Host(HostHandle),
    Enqueued(EnqueuedHandle),
    Slots(SlotHandle),
}

impl Handle {
    /// Rows of each local expert; rank-major, rows that chose it. Empty where sizes stay on the
    /// device, and rank-major on a device: see [`ExpertRows::counts`](super::ExpertRows::counts).
    pub fn tokens_per_expert(&self) -> &[i64] {
        match &self.0 {
            HandleAt::Host(handle) => &handle.inner().received.tokens_per_expert,
            HandleAt::Enqueued(handle) => handle.tokens_per_expert(),
            HandleAt::Slots(_) => &[],
        }
    }

    /// Rows of each local expert, pads and unused slots counted: the segments of the row buffer.
    /// Rank-major there is one segment, the whole. Empty where sizes stay on the device.
    pub fn padded_tokens_per_expert(&self) -> &[i64] {
        match &self.0 {
            HandleAt::Host(handle) => &handle.inner().layout.padded_per_bin,
            HandleAt::Enqueued(handle) => handle.padded_tokens_per_expert(),
            HandleAt::Slots(_) => &[],
        }
    }

    /// Host: routing weight of each received row, `[rows]`; 0 for pad rows. Rank-major, of each row
    /// and choice, `[rows, top_k]`; 0 where another rank has the choice. Empty on a device: see
    /// [`ExpertRows::weights`](super::ExpertRows::weights).
    pub fn row_weights(&self) -> &[f32] {
        self.host().map_or(&[], |handle| &handle.inner().received.weights)
    }

    /// Host, rank-major: the local expert of each row and choice, `[rows, top_k]`; -1 where there
    /// is none. Empty otherwise; on a device see
    /// [`ExpertRows::experts`](super::ExpertRows::experts).
    pub fn row_experts(&self) -> &[i32] {
        self.host().map_or(&[], |handle| &handle.inner().received.experts)
    }

    /// Host: where rows lie if not in visible order, as
    /// [`ExpertRows::index`](super::ExpertRows::index): of the rows of every call along this
    /// handle, and of what goes with them.
    pub fn index(&self) -> Option<&RowIndex> {
        self.host()?.inner().received.index.as_deref()
    }

    /// Which of this rank's choices, `[tokens, top_k]`, were dropped, for want of room or because a
    /// mask leaves no rank for them ([`ExpertParallel::mask`](crate::ExpertParallel::mask)): they
    /// count as -1. Empty where sizes stay on the device.
    pub fn dropped(&self) -> &[bool] {
        match &self.0 {
            HandleAt::Host(handle) => &handle.inner().dropped,
            HandleAt::Enqueued(handle) => handle.dropped(),
            HandleAt::Slots(_) => &[],
        }
    }

    /// Device, in slots: the same for streams, `u8 [tokens, top_k]`, 1 for a choice that was
    /// dropped. Each dispatch writes it anew. One that a rank over its budget refuses drops none
    /// for want of room.
    ///
    /// # Errors
    /// [`PlanError::WrongPlace`](crate::error::PlanError) on the host; [`CallError::NotKept`] where
    /// the host knows of all choices.
    pub fn dropped_mask(&self) -> Result<&DeviceRange, Error> {
        match &self.0 {
            HandleAt::Host(_) => Err(wrong_place("the mask of dropped choices", Side::Device)),
            HandleAt::Enqueued(_) => Err(CallError::NotKept { missing: "a mask of dropped choices" }.into()),
            HandleAt::Slots(handle) => Ok(handle.dropped()),
        }
    }

    /// Rows that each rank needed, pads counted: more than its budget if rows were dropped; in
    /// fixed slots, all there are. The same at every rank. Empty where sizes stay on the device.
    pub fn required_rows(&self) -> &[u32] {
        match &self.0 {
            HandleAt::Host(handle) => &handle.inner().required,
            HandleAt::Enqueued(handle) => handle.required_rows(),
            HandleAt::Slots(_) => &[],
        }
    }

    /// Rows received, pads counted. 0 where sizes stay on the device.
    pub fn rows(&self) -> u32 {
        match &self.0 {
            HandleAt::Host(handle) => handle.inner().layout.landed,
            HandleAt::Enqueued(handle) => handle.rows(),
            HandleAt::Slots(_) => 0,
        }
    }

    /// Tokens dispatched by this rank.
    pub fn tokens(&self) -> u32 {
        match &self.0 {
            HandleAt::Host(handle) => handle.tokens(),
            HandleAt::Enqueued(handle) => handle.tokens(),
            HandleAt::Slots(handle) => handle.tokens(),
        }
    }

    /// A buffer of the received rows' shape that combine takes without a copy: experts write into
    /// it. Its contents are undefined. On the host, after a combine that was refused, this is the
    /// buffer of that combine, as it was.
    ///
    /// # Errors
    /// [`MemoryError::OutOfSpace`](crate::error::MemoryError).
    pub fn output(&self) -> Result<ExpertOutput, Error> {
        Ok(ExpertOutput(match &self.0 {
            HandleAt::Host(handle) => OutputAt::Host(handle.output()?),
            HandleAt::Enqueued(handle) => OutputAt::Enqueued(handle.output()?),
            HandleAt::Slots(handle) => OutputAt::Slots(handle.output()),
        }))
    }

    /// Bytes that combines and gradients along this handle have copied, because their rows did not
    /// lie in the buffer of [`Handle::output`].
    pub fn copied_bytes(&self) -> u64 {
        match &self.0 {
            HandleAt::Host(handle) => handle.inner().copied.load(),
            HandleAt::Enqueued(handle) => handle.copied_bytes(),
            HandleAt::Slots(handle) => handle.copied_bytes(),
        }
    }

    /// How the bytes of the dispatch went. On the host, [`Report::traffic`] is as planned and
    /// [`Report::moved`] as counted while bytes moved. They agree to the byte:
    ///
    /// ```text
    ///   moved.inter_node_bytes    =   put.remote * row_bytes
    ///   moved.local_bytes   =   (put.own + put.local + handed_on + regrouped) * row_bytes
    ///   relayed.rows        =   handed_on                     relayed.copies   =   copies
    /// ```
    ///
    /// # Errors
    /// The reason of the world's failure.
    pub fn report(&self) -> Result<Report, Error> {
        match &self.0 {
            HandleAt::Host(handle) => Ok(handle.report()),
            HandleAt::Enqueued(handle) => handle.report(),
            HandleAt::Slots(handle) => Ok(handle.report()),
        }
    }

    /// Report of the last combine along this handle, or of the last gradient that returned rows:
    /// the bytes that this rank returned to other nodes, and those that it read. Empty before the
    /// first.
    ///
    /// It reports the last call, so ask before another combine along the handle is enqueued.
    ///
    /// # Errors
    /// On a device, except in fixed slots: the refusal of that combine, on any rank; then its sums
    /// are zeros.
    pub fn return_report(&self) -> Result<Report, Error> {
        match &self.0 {
            HandleAt::Host(handle) => Ok(handle.return_report()),
            HandleAt::Enqueued(handle) => handle.return_report(),
            HandleAt::Slots(handle) => Ok(handle.return_report()),
        }
    }

    /// Device: how the last call along this handle ended at this rank, a [`Status`] of 32 bits for
    /// kernels. It is written before the stream goes on.
    ///
    /// # Errors
    /// [`PlanError::WrongPlace`](crate::error::PlanError) on the host, whose calls return their
    /// errors.
    pub fn status(&self) -> Result<DeviceRange, Error> {
        match &self.0 {
            HandleAt::Host(_) => Err(wrong_place("the status word", Side::Device)),
            HandleAt::Enqueued(handle) => handle.status(),
            HandleAt::Slots(handle) => handle.status(),
        }
    }

    /// The status word as the host sees it now; on a device it is final once the stream has passed
    /// the call.
    pub fn status_now(&self) -> Status {
        match &self.0 {
            HandleAt::Host(_) => Status::OK,
            HandleAt::Enqueued(handle) => handle.status_now(),
            HandleAt::Slots(handle) => handle.status_now(),
        }
    }

    /// On a device, the number of its instance.
    pub(super) fn instance_on_device(&self) -> Option<u64> {
        match &self.0 {
            HandleAt::Host(_) => None,
            HandleAt::Enqueued(handle) => Some(handle.instance()),
            HandleAt::Slots(handle) => Some(handle.instance()),
        }
    }

    /// The layout of an instance on the host.
    pub(super) fn host(&self) -> Option<&HostHandle> {
        match &self.0 {
            HandleAt::Host(handle) => Some(handle),
            _ => None,
        }
    }

    /// The same, or the refusal of a handle of the other place.
    pub(super) fn on_host(&self) -> Result<&HostHandle, Error> {
        self.host().ok_or_else(|| wrong_place("the handle", Side::Host))
    }
}

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
    Enqueued { started: EnqueuedDispatch, unfinished: Unfinished, ep: &'a mut EnqueuedExchange },
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
            DispatchAt::Enqueued { started, unfinished, ep } => {
                unfinished.end();
                let (rows, handle) = ep.finish_dispatch(started)?;
                Ok((ExpertRows(RowsAt::Enqueued(rows)), Handle(HandleAt::Enqueued(handle))))
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
    pub fn finish_async(self) -> Result<(ExpertRows, Handle), Error> {
        match self.0 {
            DispatchAt::Enqueued { started, unfinished, ep } => {
                unfinished.end();
                let (rows, handle) = ep.finish_dispatch_async(started)?;
                Ok((ExpertRows(RowsAt::Enqueued(rows)), Handle(HandleAt::Enqueued(handle))))
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
    Enqueued {
        started: EnqueuedCombine,
        handle: &'a Handle,
        unfinished: Unfinished,
        ep: &'a mut EnqueuedExchange,
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
    /// [`Handle::return_report`] says how the call went.
    ///
    /// # Errors
    /// As [`ExpertParallel::combine`](crate::ExpertParallel::combine). That `out` cannot be used is
    /// found too late to refuse the call: the other ranks get their sums, this one gets none, and
    /// the rows are used up.
    pub fn finish<'o>(self, out: impl Into<TensorMut<'o>>) -> Result<(), Error> {
        let (out, what) = (out.into(), "combined tokens");
        match self.0 {
            CombineAt::Host(started) => started.finish(out.on_host(what)),
            CombineAt::Enqueued { started, handle, unfinished, ep } => {
                unfinished.end();
                let HandleAt::Enqueued(handle) = &handle.0 else { return Err(PlanError::RefusedHere.into()) };
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
