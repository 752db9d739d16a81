//! What handles, the exchange and whatever drives its calls share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::seat::DispatchContext;
use super::shape::{ByteRange, MemoryShape, StreamFlag};
use super::space::{DevicePool, Extent, Progress};
use crate::bootstrap::interrupted;
use crate::device::{ByteSpan, DeviceRange, Kernels, PermuteArgs, PinnedMemory, Stream, Word};
use crate::ep::fixed::EpState;
use crate::error::{CallKind, DeviceError, Error, PlanError};
use crate::exec::CopyEngineStepper;
use crate::plan::DispatchLayout;
use crate::schedule::{Calls, FillContext};
use crate::world::{NoGpuDirect, Registration};

/// What both know of an exchange. Copies share all that changes.
#[derive(Clone, Debug)]
pub(super) struct Common {
    /// Tells handles of different exchanges apart, within this process.
    pub instance: u64,
    pub fixed: Arc<EpState>,
    pub shape: MemoryShape,
    /// This rank's memory, as its device reaches it.
    pub memory: DeviceRange,
    /// Memory of the host that both and the device reach.
    pub host: PinnedMemory,
    pub seats: Arc<[DispatchContext]>,
    /// Handles that are alive.
    pub handles: Arc<AtomicU32>,
    pub space: Arc<DevicePool>,
    /// How far the stream has come.
    pub progress: Arc<Progress>,
    /// Why rows that cross go by memory of the host, if they do.
    pub detour: Option<NoGpuDirect>,
    /// How cards know the device's memory, if they do.
    pub registration: Option<Registration>,
    /// Calls that are enqueued.
    pub served: Arc<AtomicU64>,
}

impl Common {
    /// A flag, as the host sees it.
    pub fn flag(&self, seat: u32, flag: StreamFlag) -> Result<&AtomicU64, DeviceError> {
        self.host.word(self.shape.flag(seat, flag) as usize)
    }

    /// A flag, as streams see it.
    pub fn word(&self, seat: u32, flag: StreamFlag) -> Result<Word<'_, u32>, DeviceError> {
        self.host.range().word(self.shape.flag(seat, flag))
    }

    /// A piece of the device's memory.
    pub fn piece(&self, (offset, len): ByteRange) -> Result<DeviceRange, DeviceError> {
        self.memory.part(offset, len)
    }

    /// The same, for one call of the driver.
    pub fn span(&self, (offset, len): ByteRange) -> Result<ByteSpan<'_>, DeviceError> {
        self.memory.span(offset, len)
    }

    /// A piece of the host's memory, as the device sees it.
    pub fn host_piece(&self, (offset, len): ByteRange) -> Result<DeviceRange, DeviceError> {
        self.host.range().part(offset, len)
    }

    /// Collects a copy of the first `len` bytes of a piece of the host's memory to one of the
    /// device's.
    pub fn send(
        &self,
        engine: &mut CopyEngineStepper,
        (from, to): (ByteRange, ByteRange),
        len: u64,
    ) -> Result<(), Error> {
        let (from, to) = (self.host_piece(from)?, self.piece(to)?);
        Ok(engine.copy(to.span(0, len)?, from.span(0, len)?)?)
    }

    /// Enqueues that `rows` rows that landed at `base` in a call of this kind are put into visible
    /// order, where engines relay.
    pub fn regroup(
        &self,
        stream: &Stream,
        kernels: &Kernels,
        kind: CallKind,
        (seat, base, rows): (u32, u64, u32),
    ) -> Result<(), Error> {
        let (landing, row_bytes) = (self.shape.landing(kind, rows), self.shape.row_bytes(kind));
        if rows == 0 {
            return Ok(());
        }
        let (bytes, (index, end)) = (u64::from(rows) * row_bytes, landing.arrivals());
        let from = self.piece((base + landing.bytes(), bytes))?;
        let (out, index) = (self.piece((base, bytes))?, self.piece((base + index, end - index))?);
        Ok(kernels.regroup(
            stream,
            &PermuteArgs {
                row_bytes,
                sources: rows,
                rows,
                from: from.span(0, from.len())?,
                index: index.span(0, index.len())?,
                out: out.span(0, out.len())?,
                status: self.word(seat, StreamFlag::Status)?,
            },
        )?)
    }

    /// What is the same for all operands by which rows go out in a call of this kind, whose
    /// metadata lands at these places.
    pub fn rows_setting<'a>(&'a self, calls: Calls, kind: CallKind, notes: &'a [u64]) -> FillContext<'a> {
        let notes = self.fixed.enqueues.then_some(notes);
        FillContext { notes, ..self.fixed.agreement(calls, kind).setting }
    }

    /// Gives back what of an extent a call of this kind along a layout does not need. What is
    /// staged behind the rows is this rank's as long as the extent that is returned.
    pub fn trim(&self, kind: CallKind, extent: &mut Extent, layout: &DispatchLayout) -> Option<Extent> {
        let (chunk, staged) = (self.shape.landing(kind, layout.landed), u64::from(layout.staged));
        let (kept, used) = match (self.shape.arrives(), self.fixed.straight()) {
            (true, true) => (chunk.arrivals().1, chunk.staging() + staged * self.shape.row_bytes(kind)),
            (true, false) => (chunk.arrivals().1, 0),
            (false, _) => (chunk.bytes(), 0),
        };
        extent.trim(kept.max(used));
        (used > kept).then(|| extent.split(kept))
    }

    /// The stream leaves this mark when it has come to the call that runs.
    pub fn started(&self, mark: u64) {
        let call = self.served.load(Ordering::Relaxed) + 1;
        self.progress.started(mark, call);
    }

    /// Frees what the stream and all peers have read by now. Whether nothing is left to wait for.
    pub fn reclaim(&self) -> bool {
        let Ok((call, all)) = self.progress.seen() else { return true };
        call.into_iter().for_each(|call| self.space.reach(call));
        all
    }

    /// A piece of the pool. If there is none, and the stream has yet to read what was given back,
    /// waits until it has.
    ///
    /// # Errors
    /// [`MemoryError::OutOfSpace`](crate::error::MemoryError), the cause of a dead world,
    /// [`PlanError::Interrupted`].
    pub fn take(&self, bytes: u64) -> Result<Extent, Error> {
        loop {
            let all = self.reclaim();
            match self.space.take(bytes) {
                Ok(extent) => return Ok(extent),
                Err(free) if all => {
                    return Err(self.fixed.room.lacks(self.fixed.lanes.rank, bytes, free));
                }
                Err(_) => {}
            }
            self.fixed.shared.hub.health().check()?;
            if interrupted() {
                return Err(PlanError::Interrupted.into());
            }
            std::thread::yield_now();
        }
    }
}
