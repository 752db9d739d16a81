//! Memory of a layer: on its device, taken and given back in the order of one stream, and pinned on
//! the host, for what goes up and down.
//!
//! All kernels of a layer go on the caller's stream. So memory that the host gives back is free at
//! once: what is written there next is enqueued behind what reads it now. Memory that transfers use
//! on their own stream is given back when the caller's stream has been joined to that.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::{Allocation, ByteSpan, Context, DeviceRange, PinnedMemory, Reservation, Stream};
use crate::error::DeviceError;
use crate::memory::Extents;

/// Bytes of the first piece that is allocated. Each further one doubles the memory, up to
/// [`GROWTH`].
const FIRST: u64 = 1 << 20;

/// Bytes that a piece has at most, unless one tensor needs more.
const GROWTH: u64 = 256 << 20;

/// Bytes of pinned memory; larger tensors go up and down in pieces of this size.
const STAGING: usize = 4 << 20;

/// Memory of a device that grows with what a step needs, and stays. Weights are none of it: they
/// have [allocations](Self::alone) of their own.
#[derive(Debug)]
pub(super) struct LayerMemory {
    context: Arc<Context>,
    pieces: Mutex<Vec<(DeviceRange, Extents)>>,
}

/// Memory of a [`DeviceMoeLayer`](super::DeviceMoeLayer), for one tensor. When this is dropped, it
/// goes back to the layer, for what is enqueued next on its stream.
#[derive(Debug)]
pub struct DeviceTensor {
    memory: Arc<LayerMemory>,
    piece: usize,
    offset: u64,
    range: DeviceRange,
}

impl LayerMemory {
    pub fn new(context: &Arc<Context>) -> Arc<Self> {
        Arc::new(LayerMemory { context: Arc::clone(context), pieces: Mutex::default() })
    }

    /// So many bytes; their contents are undefined.
    pub fn take(self: &Arc<Self>, bytes: u64) -> Result<DeviceTensor, DeviceError> {
        let mut pieces = self.pieces();
        let fitting = pieces
            .iter_mut()
            .enumerate()
            .find_map(|(piece, (_, free))| Some((piece, free.alloc(bytes).ok()?)));
        let (piece, offset) = match fitting {
            Some(found) => found,
            None => {
                let all = pieces.iter().map(|(range, _)| range.len()).sum::<u64>();
                let range = self.grow(Extents::round(bytes), all.clamp(FIRST, GROWTH))?;
                let mut free = Extents::new(range.len());
                let too_much = |_| DeviceError::OutOfRange { offset: 0, len: bytes, size: range.len() };
                let offset = free.alloc(bytes).map_err(too_much)?;
                pieces.push((range, free));
                (pieces.len() - 1, offset)
            }
        };
        let range = pieces[piece].0.part(offset, bytes)?;
        Ok(DeviceTensor { memory: Arc::clone(self), piece, offset, range })
    }

    /// So many numbers of 32 bits.
    pub fn words(self: &Arc<Self>, count: usize) -> Result<DeviceTensor, DeviceError> {
        self.take(count as u64 * 4)
    }

    /// So many words of 32 bits in an allocation of their own, which goes with the last claim on
    /// it.
    pub fn alone(&self, count: usize) -> Result<DeviceRange, DeviceError> {
        let bytes = count as u64 * 4;
        self.allocate(bytes.max(1))?.part(0, bytes)
    }

    /// A piece of these bytes `wanted`, or of those needed if the device has no room for them.
    fn grow(&self, needed: u64, wanted: u64) -> Result<DeviceRange, DeviceError> {
        match self.allocate(needed.max(wanted)) {
            Err(DeviceError::OutOfMemory { .. }) if needed < wanted => self.allocate(needed),
            allocated => allocated,
        }
    }

    fn allocate(&self, bytes: u64) -> Result<DeviceRange, DeviceError> {
        let allocation = Allocation::new(&self.context, bytes)?;
        let place = Reservation::new(&self.context, 1, allocation.bytes())?;
        place.map(0, &allocation, &[self.context.device()])
    }

    fn pieces(&self) -> MutexGuard<'_, Vec<(DeviceRange, Extents)>> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceTensor {
    /// Where it lies.
    pub fn range(&self) -> &DeviceRange {
        &self.range
    }

    /// All of it.
    pub(super) fn span(&self) -> Result<ByteSpan<'_>, DeviceError> {
        span(&self.range)
    }
}

impl Drop for DeviceTensor {
    fn drop(&mut self) {
        self.memory.pieces()[self.piece].1.free(self.offset, self.range.len());
    }
}

/// All of a range.
pub(super) fn span(range: &DeviceRange) -> Result<ByteSpan<'_>, DeviceError> {
    range.span(0, range.len())
}

/// Bytes from an offset on; none if it is behind the end.
pub(super) fn from(range: &DeviceRange, offset: u64) -> Result<ByteSpan<'_>, DeviceError> {
    let offset = offset.min(range.len());
    range.span(offset, range.len() - offset)
}

/// Pinned memory of the host, used from front to end and again once the stream is idle.
///
/// It never grows: the driver waits for its context when pinned memory is freed, and another stream
/// may wait there for a call that this thread makes next.
#[derive(Debug)]
pub(super) struct StagingBuffer {
    pinned: PinnedMemory,
    used: usize,
}

impl StagingBuffer {
    pub fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        Ok(StagingBuffer { pinned: PinnedMemory::new(context, STAGING)?, used: 0 })
    }

    /// Has the stream write these values to the front of `to`. They may be dropped at once. Waits
    /// for the stream where they are larger than the staging's room.
    pub fn send<T: bytemuck::NoUninit>(
        &mut self,
        stream: &Stream,
        to: &DeviceRange,
        values: &[T],
    ) -> Result<(), DeviceError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        // Values that do not fit are refused before any of them is sent.
        to.span(0, bytes.len() as u64)?;
        for (piece, first) in bytes.chunks(STAGING).zip((0..).step_by(STAGING)) {
            let from = self.room(stream, piece.len())?;
            self.pinned.write(from, piece)?;
            let len = piece.len() as u64;
            stream.copy(to.span(first, len)?, self.pinned.range().span(from as u64, len)?)?;
        }
        Ok(())
    }

    /// What a range holds when the stream comes by: waits for the stream.
    pub fn receive<T: bytemuck::Pod>(
        &mut self,
        stream: &Stream,
        from: &DeviceRange,
    ) -> Result<Vec<T>, DeviceError> {
        let mut bytes = vec![0; from.len() as usize];
        // An empty tensor is waited for, too: callers hear of failed work then.
        if bytes.is_empty() {
            stream.synchronize()?;
        }
        for (piece, first) in bytes.chunks_mut(STAGING).zip((0..).step_by(STAGING)) {
            let (to, len) = (self.room(stream, piece.len())?, piece.len() as u64);
            stream.copy(self.pinned.range().span(to as u64, len)?, from.span(first, len)?)?;
            stream.synchronize()?;
            self.used = 0;
            self.pinned.read(to, piece)?;
        }
        Ok(bytemuck::pod_collect_to_vec(&bytes))
    }

    /// Where so many bytes, at most [`STAGING`], may be written: no copy of before reads them.
    fn room(&mut self, stream: &Stream, bytes: usize) -> Result<usize, DeviceError> {
        let bytes = bytes.next_multiple_of(16);
        if self.used + bytes > self.pinned.len() {
            stream.synchronize()?;
            self.used = 0;
        }
        self.used += bytes;
        Ok(self.used - bytes)
    }
}
