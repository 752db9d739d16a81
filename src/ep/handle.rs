//! The layout of one dispatch, kept for everything that follows it.

use super::buffers::OutputAt;
use super::device::planned::PlannedHandle;
use super::device::slots::SlotHandle;
use super::host::HostHandle;
use super::tensor::{Side, wrong_place};
use super::{ExpertOutput, Report, RowIndex, Status};
use crate::device::DeviceRange;
use crate::error::{CallError, Error};

/// The placement of one dispatch. Combine, cached dispatch and the gradients follow it; several may
/// be alive.
#[derive(Debug)]
pub struct Handle(pub(super) HandleAt);

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "calls on the host allocate nothing")]
pub(super) enum HandleAt {
    Host(HostHandle),
    Planned(PlannedHandle),
    Slots(SlotHandle),
}

impl Handle {
    /// Rows of each local expert; rank-major, rows that chose it. Empty where sizes stay on the
    /// device, and rank-major on a device: see [`ExpertRows::counts`](super::ExpertRows::counts).
    pub fn tokens_per_expert(&self) -> &[i64] {
        match &self.0 {
            HandleAt::Host(handle) => &handle.inner().received.tokens_per_expert,
            HandleAt::Planned(handle) => handle.tokens_per_expert(),
            HandleAt::Slots(_) => &[],
        }
    }

    /// Rows of each local expert, pads and unused slots counted: the segments of the row buffer.
    /// Rank-major there is one segment, the whole. Empty where sizes stay on the device.
    pub fn padded_tokens_per_expert(&self) -> &[i64] {
        match &self.0 {
            HandleAt::Host(handle) => &handle.inner().layout.padded_per_bin,
            HandleAt::Planned(handle) => handle.padded_tokens_per_expert(),
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

    /// Which of this rank's choices, `[tokens, top_k]`, were dropped for want of room: they count
    /// as -1. Empty where sizes stay on the device.
    pub fn dropped(&self) -> &[bool] {
        match &self.0 {
            HandleAt::Host(handle) => &handle.inner().dropped,
            HandleAt::Planned(handle) => handle.dropped(),
            HandleAt::Slots(_) => &[],
        }
    }

    /// Device, a budget with [`Graphs::Slots`](super::Graphs::Slots): the same for streams, `u8
    /// [tokens, top_k]`, 1 for a choice that was dropped. Each dispatch writes it anew; one that is
    /// refused drops none.
    ///
    /// # Errors
    /// [`PlanError::WrongPlace`](crate::error::PlanError) on the host; [`CallError::NotKept`] where
    /// the host knows of all choices, or none is dropped.
    pub fn dropped_mask(&self) -> Result<&DeviceRange, Error> {
        let missing = CallError::NotKept { missing: "a mask of dropped choices" };
        match &self.0 {
            HandleAt::Host(_) => Err(wrong_place("the mask of dropped choices", Side::Device)),
            HandleAt::Planned(_) => Err(missing.into()),
            HandleAt::Slots(handle) => Ok(handle.dropped().ok_or(missing)?),
        }
    }

    /// Rows that each rank needed, pads counted: more than its budget if rows were dropped; in
    /// fixed slots, all there are. The same at every rank. Empty where sizes stay on the device.
    pub fn required_rows(&self) -> &[u32] {
        match &self.0 {
            HandleAt::Host(handle) => &handle.inner().required,
            HandleAt::Planned(handle) => handle.required_rows(),
            HandleAt::Slots(_) => &[],
        }
    }

    /// Rows received, pads counted. 0 where sizes stay on the device.
    pub fn rows(&self) -> u32 {
        match &self.0 {
            HandleAt::Host(handle) => handle.inner().layout.landed,
            HandleAt::Planned(handle) => handle.rows(),
            HandleAt::Slots(_) => 0,
        }
    }

    /// Tokens dispatched by this rank.
    pub fn tokens(&self) -> u32 {
        match &self.0 {
            HandleAt::Host(handle) => handle.tokens(),
            HandleAt::Planned(handle) => handle.tokens(),
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
            HandleAt::Planned(handle) => OutputAt::Planned(handle.output()?),
            HandleAt::Slots(handle) => OutputAt::Slots(handle.output()),
        }))
    }

    /// Bytes that combines and gradients along this handle have copied, because their rows did not
    /// lie in the buffer of [`Handle::output`].
    pub fn copied_bytes(&self) -> u64 {
        match &self.0 {
            HandleAt::Host(handle) => handle.inner().copied.load(),
            HandleAt::Planned(handle) => handle.copied_bytes(),
            HandleAt::Slots(handle) => handle.copied_bytes(),
        }
    }

    /// How the bytes of the dispatch went. On the host, [`Report::traffic`] is as planned and
    /// [`Report::moved`] as counted while bytes moved. They agree to the byte:
    ///
    /// ```text
    ///   moved.rail_bytes    =   put.rail * row_bytes
    ///   moved.local_bytes   =   (put.own + put.local + handed_on + regrouped) * row_bytes
    ///   relayed.rows        =   handed_on                     relayed.copies   =   copies
    /// ```
    ///
    /// # Errors
    /// The reason of the world's failure.
    pub fn report(&self) -> Result<Report, Error> {
        match &self.0 {
            HandleAt::Host(handle) => Ok(handle.report()),
            HandleAt::Planned(handle) => handle.report(),
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
    pub fn returned(&self) -> Result<Report, Error> {
        match &self.0 {
            HandleAt::Host(handle) => Ok(handle.returned()),
            HandleAt::Planned(handle) => handle.returned(),
            HandleAt::Slots(handle) => Ok(handle.returned()),
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
            HandleAt::Planned(handle) => handle.status(),
            HandleAt::Slots(handle) => handle.status(),
        }
    }

    /// The status word as the host sees it now; on a device it is final once the stream has passed
    /// the call.
    pub fn status_now(&self) -> Status {
        match &self.0 {
            HandleAt::Host(_) => Status::OK,
            HandleAt::Planned(handle) => handle.status_now(),
            HandleAt::Slots(handle) => handle.status_now(),
        }
    }

    /// On a device, the number of its instance.
    pub(super) fn instance_on_device(&self) -> Option<u64> {
        match &self.0 {
            HandleAt::Host(_) => None,
            HandleAt::Planned(handle) => Some(handle.instance()),
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
