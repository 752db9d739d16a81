//! An allocator over the device heap of an instance, for libraries that take one.
//!
//! ```text
//!   torch.cuda.MemPool --bytes, device--> serving: one allocator per device --> a piece of the pool
//!                      --address, stream-> live: the pieces of all allocators --> free behind the stream
//! ```
//!
//! Such a library knows functions and no objects. So this process has two tables: which allocator
//! serves a device, and which pieces are alive. A piece outlives its allocator and the world: it
//! keeps the device's memory mapped, and is freed by its address alone.
//!
//! **Tokens** in such a piece are in this rank's memory, as those of a token buffer are. So a
//! dispatch sends them as they lie where it can. **Outputs** of experts are copied all the same:
//! peers read them after the combine has returned, and no stream of this rank waits for that. Only
//! an output buffer, which the combine takes over, is safe from what its caller enqueues next.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::device_pool::Extent;
use super::session::Session;
use crate::device::{Context, DeviceRange, Event, Stream};
use crate::ep::{CallExecutor, Feature};
use crate::error::{DeviceError, Error, MemoryError};

/// Addresses are multiples of this: a library that asks for large pieces cuts them into blocks that
/// are, as those of `cudaMalloc`.
const ALIGN: u64 = 512;

/// Allocators, by device: one each.
static SERVING: Mutex<Vec<(u32, Weak<Serving>)>> = Mutex::new(Vec::new());
/// Pieces that are allocated, by address.
static LIVE: Mutex<BTreeMap<u64, AllocatedRange>> = Mutex::new(BTreeMap::new());

/// Allocates memory of the device heap of an instance on a device. It is for libraries that take an
/// allocator: `torch.cuda.MemPool` calls [`alloc_on`](Self::alloc_on) and [`free`](Self::free)
/// through the bindings.
///
/// NICs and copy engines know the memory. Tokens that lie in it go to other ranks as they lie where
/// those of a [`TokenBuffer`](crate::ep::TokenBuffer) would. The host plans a dispatch of such
/// tokens; the device plans the others, as without an allocator. Outputs of experts that lie in it
/// are copied once by a combine, as from elsewhere: peers read outputs until some time after the
/// combine, and their caller may write to them before.
///
/// While it lives it serves its device: no other one can be made for that. It keeps the memory and
/// the world of its instance. Once it is dropped it allocates nothing more, and what it allocated
/// stays as it is until it is freed.
#[derive(Debug)]
pub struct HeapAllocator(Arc<Serving>);

#[derive(Debug)]
struct Serving {
    session: Arc<Session>,
    context: Arc<Context>,
    /// Why an allocation was refused last.
    refused: Mutex<Option<Error>>,
}

/// Memory that is allocated.
#[derive(Debug)]
struct AllocatedRange {
    device: u32,
    range: DeviceRange,
    extent: Extent,
    /// Calls of the instance that are enqueued.
    served: Arc<AtomicU64>,
}

impl HeapAllocator {
    /// Over the heap of this instance on a device.
    ///
    /// # Errors
    /// [`MemoryError::AllocatorTaken`].
    pub(super) fn serve(session: &Arc<Session>, context: &Arc<Context>) -> Result<Self, Error> {
        let device = context.device();
        let mut serving = lock(&SERVING);
        serving.retain(|(_, other)| other.strong_count() > 0);
        if serving.iter().any(|&(other, _)| other == device) {
            return Err(MemoryError::AllocatorTaken { device }.into());
        }
        let (session, context) = (Arc::clone(session), Arc::clone(context));
        let made = Arc::new(Serving { session, context, refused: Mutex::default() });
        serving.push((device, Arc::downgrade(&made)));
        Ok(HeapAllocator(made))
    }

    /// The number of its device.
    pub fn device(&self) -> u32 {
        self.0.context.device()
    }

    /// Why it refused an allocation last, if it did: libraries that allocate by it may not say.
    pub fn refused(&self) -> Option<Error> {
        lock(&self.0.refused).clone()
    }

    /// Allocates `bytes` bytes at a multiple of 512. Their contents are undefined. They are the
    /// caller's until [`HeapAllocator::free`]. Where only memory that streams and peers have yet to
    /// leave is large enough, waits for these as long as the world's deadline.
    ///
    /// # Errors
    /// [`MemoryError::OutOfSpace`], which says to raise `device_heap`; the cause of a failed world.
    pub fn alloc(&self, bytes: u64) -> Result<DeviceRange, Error> {
        let allocated = self.0.alloc(bytes);
        if let Err(error) = &allocated {
            lock(&self.0.refused).replace(error.clone());
        }
        allocated
    }

    /// As [`HeapAllocator::alloc`], by the allocator that serves a device.
    ///
    /// # Errors
    /// As [`HeapAllocator::alloc`]; [`MemoryError::NoAllocator`].
    pub fn alloc_on(device: u32, bytes: u64) -> Result<DeviceRange, Error> {
        let serving = {
            let all = lock(&SERVING);
            all.iter().find(|&&(other, _)| other == device).and_then(|(_, serving)| serving.upgrade())
        };
        serving.map(HeapAllocator).ok_or(MemoryError::NoAllocator { device })?.alloc(bytes)
    }

    /// Frees memory by its first address, whether or not its allocator and its world are still
    /// there. It is used again once `stream` has done all that it was given so far; a call of its
    /// instance that is between its halves keeps it, too. Work of other streams must be done, or
    /// `stream` must wait for it.
    ///
    /// # Errors
    /// The memory stays as it is, and may be freed again:
    /// [`MemoryError::NotAllocated`]; [`DeviceError::OtherDevice`] for a stream of another device;
    /// where no event can mark the stream, since it is captured or broken,
    /// [`PlanError::NotAvailable`](crate::error::PlanError) or another [`DeviceError`].
    pub fn free(address: u64, stream: &Stream) -> Result<(), Error> {
        let unknown = MemoryError::NotAllocated { address };
        let expected = lock(&LIVE).get(&address).map(|piece| piece.device).ok_or_else(|| unknown.clone())?;
        let found = stream.device();
        if found != expected {
            let what = "stream behind which memory is freed";
            return Err(DeviceError::OtherDevice { what, found, expected }.into());
        }
        // Not under the lock: calls of the driver may wait for other threads, which allocate.
        let event = stream.context().driver().beside_captures(|| mark(stream))?;
        let AllocatedRange { range, extent, served, .. } = lock(&LIVE).remove(&address).ok_or(unknown)?;
        extent.give_behind(event, range, served.load(Ordering::Relaxed));
        Ok(())
    }
}

impl Serving {
    fn alloc(&self, bytes: u64) -> Result<DeviceRange, Error> {
        let Serving { session, context, .. } = self;
        session.fixed.shared.hub.health().check()?;
        let bytes = bytes.max(1);
        let patience = Some(session.fixed.lanes.deadline);
        // It asks events, which a capture in this thread must not see.
        let extent = context.driver().beside_captures(|| session.take_within(bytes, ALIGN, patience))?;
        let range = session.piece((extent.offset(), bytes))?;
        let served = Arc::clone(&session.served);
        let piece = AllocatedRange { device: context.device(), range: range.clone(), extent, served };
        lock(&LIVE).insert(range.address(), piece);
        Ok(range)
    }
}

/// A mark behind all that a stream was given so far.
fn mark(stream: &Stream) -> Result<Event, Error> {
    if stream.is_capturing()? {
        Feature::Capture.require(CallExecutor::Enqueuer)?;
    }
    let event = Event::new(stream.context())?;
    event.record(stream)?;
    Ok(event)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
