//! Streams: queues of a device, made here or borrowed from a caller.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;

use super::call;
use super::context::{Context, Owner};
use super::event::Event;
use super::functions::Code;
use super::library::Library;
use super::range::{Claims, DeviceRange};
use crate::error::DeviceError;

/// How urgent the work of a stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Priority {
    /// Before other streams, as far as the device can.
    Highest,
    /// As streams are by default.
    Normal,
}

/// Neither waits for the legacy default stream nor is waited for by it (`CU_STREAM_NON_BLOCKING`).
const NON_BLOCKING: u32 = 1;

/// The second name of the legacy default stream (`CU_STREAM_LEGACY`); the first is null.
const LEGACY: usize = 1;

/// The handle of the calling thread's own default stream (`CU_STREAM_PER_THREAD`).
const PER_THREAD: usize = 2;

/// A stream. Its operations run in order; enqueueing does not wait for them.
///
/// It holds claims on the memory it uses until [`is_done`](Self::is_done) or
/// [`synchronize`](Self::synchronize) finds it done. It does not track captured graphs: the code
/// that replays a graph keeps the ranges.
#[derive(Debug)]
pub struct Stream {
    pub(super) context: Arc<Context>,
    pub(super) raw: sys::CUstream,
    own: bool,
    held: Mutex<Claims>,
}

// SAFETY: a stream may be used from any thread, by several at once; the driver locks.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream of its own, which the default stream does not hold up.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    pub fn new(context: &Arc<Context>, priority: Priority) -> Result<Self, DeviceError> {
        let number = match priority {
            Priority::Highest => context.highest_priority()?,
            Priority::Normal => 0,
        };
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: fills the handle; destroyed when the value is dropped.
        unsafe {
            let (library, device) = (context.library(), Some(context.device()));
            call!(library, device, cuStreamCreateWithPriority(&raw mut raw, NON_BLOCKING, number))
        }?;
        Ok(Stream { context: context.clone(), raw, own: true, held: Mutex::default() })
    }

    /// A stream of the caller, such as torch's `current_stream().cuda_stream`; null is the legacy
    /// default stream.
    ///
    /// # Safety
    /// The handle stays valid until the value is dropped.
    ///
    /// # Errors
    /// [`DeviceError::OtherDevice`], [`DeviceError::OtherContext`],
    /// [`DeviceError::PerThreadStream`], [`DeviceError::Call`].
    pub unsafe fn borrow(context: &Arc<Context>, handle: *mut c_void) -> Result<Self, DeviceError> {
        if handle.addr() == PER_THREAD {
            return Err(DeviceError::PerThreadStream);
        }
        let raw: sys::CUstream = handle.cast();
        match context.owner_of(raw)? {
            Owner::This => Ok(Stream { context: context.clone(), raw, own: false, held: Mutex::default() }),
            Owner::SameDevice => Err(DeviceError::OtherContext { device: context.device() }),
            Owner::Device(found) => {
                Err(DeviceError::OtherDevice { what: "stream", found, expected: context.device() })
            }
        }
    }

    /// The number of its device.
    pub fn device(&self) -> u32 {
        self.context.device()
    }

    /// The context it belongs to.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Refuses a context that is not this stream's, be it of the same device.
    pub(crate) fn require_context(&self, context: &Context) -> Result<(), DeviceError> {
        let (found, expected) = (self.device(), context.device());
        if found != expected {
            return Err(DeviceError::OtherDevice { what: "stream", found, expected });
        }
        if self.context.is_same(context) { Ok(()) } else { Err(DeviceError::OtherContext { device: found }) }
    }

    /// Its handle, for other users of the driver.
    pub fn handle(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// Whether this is the legacy default stream of its context.
    pub fn is_legacy(&self) -> bool {
        self.raw.addr() <= LEGACY
    }

    /// Whether all enqueued operations are done. Must not be called for a stream that is being
    /// captured.
    ///
    /// # Errors
    /// [`DeviceError::Call`], also for the failure of something that was enqueued.
    pub fn is_done(&self) -> Result<bool, DeviceError> {
        let mut held = self.held();
        let _entered = self.context.enter()?;
        // SAFETY: the stream lives.
        let code = unsafe { (self.library().functions.cuStreamQuery)(self.raw) };
        if code == Code::NOT_READY {
            return Ok(false);
        }
        self.library().check("cuStreamQuery", Some(self.device()), code)?;
        held.clear();
        Ok(true)
    }

    /// Blocks until all enqueued operations are done. There is no deadline: a stream that waits for
    /// a flag waits until the flag is written.
    ///
    /// # Errors
    /// [`DeviceError::Call`], also for the failure of something that was enqueued.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        // Others may enqueue more meanwhile, and claim what that needs.
        let mut before = std::mem::take(&mut *self.held());
        let entered = self.context.enter();
        // SAFETY: the stream lives.
        let synchronized = entered.and_then(|_entered| unsafe {
            call!(self.library(), Some(self.device()), cuStreamSynchronize(self.raw))
        });
        if synchronized.is_err() {
            self.held().add_all(&before);
        }
        before.clear();
        synchronized
    }

    /// Whether new operations go into a graph.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    pub fn is_capturing(&self) -> Result<bool, DeviceError> {
        let _entered = self.context.enter()?;
        let mut status = 0_u32;
        // SAFETY: fills the number; it is an enum in the header, and read as a number here.
        unsafe {
            let status = (&raw mut status).cast();
            call!(self.library(), Some(self.device()), cuStreamIsCapturing(self.raw, status))
        }?;
        Ok(status != 0)
    }

    /// Later operations wait for those before the event's record, on whatever device.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    pub fn wait_event(&self, event: &Event) -> Result<(), DeviceError> {
        let _entered = self.context.enter()?;
        // SAFETY: both live; the driver keeps what it needs of the event.
        unsafe { call!(self.library(), Some(self.device()), cuStreamWaitEvent(self.raw, event.raw, 0)) }
    }

    /// Later operations wait for all current ones of `other`, by the mark `at`. This stream takes
    /// over the claims of the other and drops them when it is done; a graph that it captures holds
    /// them.
    ///
    /// # Errors
    /// As [`Event::record`] and [`wait_event`](Self::wait_event).
    pub fn join(&self, other: &Stream, at: &Event) -> Result<(), DeviceError> {
        let claims = {
            let mut held = other.held();
            at.record(other)?;
            std::mem::take(&mut *held)
        };
        let mut held = self.held();
        held.add_all(&claims);
        self.wait_event(at)
    }

    /// How many claims on memory the stream holds since it was last seen to be done.
    pub fn claims(&self) -> usize {
        self.held().len()
    }

    pub(super) fn library(&self) -> &Library {
        self.context.library()
    }

    /// The memory of these ranges stays until a check finds the stream done. Refuses memory that
    /// its device cannot reach. The caller keeps the guard until the work is enqueued: a check of
    /// an idle stream would drop the claims meanwhile.
    pub(super) fn hold(&self, ranges: &[&DeviceRange]) -> Result<MutexGuard<'_, Claims>, DeviceError> {
        ranges.iter().try_for_each(|range| range.check_reach(self.device()))?;
        let mut held = self.held();
        ranges.iter().for_each(|range| held.add(range.keep()));
        Ok(held)
    }

    pub(super) fn held(&self) -> MutexGuard<'_, Claims> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // A question to a stream that is being captured would spoil the capture.
        let idle = || self.is_capturing() == Ok(false) && self.is_done() == Ok(true);
        if self.claims() > 0 && !idle() {
            tracing::warn!(
                device = self.device(),
                "a stream went before its work was done: its memory stays"
            );
            self.held().leak();
        }
        if self.own {
            let _entered = self.context.enter();
            // SAFETY: made here; the driver finishes the enqueued operations and then frees it.
            let _ = unsafe { (self.library().functions.cuStreamDestroy_v2)(self.raw) };
        }
    }
}
