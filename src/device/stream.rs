//! Streams: queues of a device, made here or borrowed from a caller; their events and graphs.
//!
//! ```text
//!   stream a   work --record--> Event                    capture --> CudaGraph --launch--> any number of times
//!   stream b                      `--wait--> work
//! ```
//!
//! Addresses, sizes and values of flags are constants in a graph. So only operations that are the
//! same in every call can be captured.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::sys;
use sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;

use super::call;
use super::driver::{Context, Owner};
use super::libcuda::{Code, Library};
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
        let before = self.held().take();
        let entered = self.context.enter();
        // SAFETY: the stream lives.
        let synchronized = entered.and_then(|_entered| unsafe {
            call!(self.library(), Some(self.device()), cuStreamSynchronize(self.raw))
        });
        if synchronized.is_err() {
            self.held().add_all(&before);
        }
        self.drop_taken(before);
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

    /// Later operations wait for those before the event's record, on any device.
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
            // From before the event until the claims are taken: a claim that another thread adds in
            // between is of work that this stream does not wait for.
            let mut held = other.held();
            at.record(other)?;
            held.take()
        };
        // Until the wait is enqueued: before it this stream may look done, and a check would drop
        // the claims.
        let mut held = self.held();
        held.add_all(&claims);
        let waits = self.wait_event(at);
        drop(held);
        other.drop_taken(claims);
        waits
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

    /// Drops claims that were taken, with no lock held: owners of memory may do anything then.
    /// Later claims use their list again, so that a steady call allocates none.
    fn drop_taken(&self, mut taken: Claims) {
        taken.clear();
        self.held().reuse(taken);
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

/// Without time stamps, which would make it dearer (`CU_EVENT_DISABLE_TIMING`).
const NO_TIMING: u32 = 2;
/// With time stamps (`CU_EVENT_DEFAULT`).
const TIMING: u32 = 0;

/// A mark in a stream. Before it is recorded it counts as reached.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    pub(super) raw: sys::CUevent,
}

// SAFETY: an event may be used from any thread, by several at once; the driver locks.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// A new one.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    pub fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        Self::with(context, NO_TIMING)
    }

    /// One that keeps when it was reached.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    pub fn timed(context: &Arc<Context>) -> Result<Self, DeviceError> {
        Self::with(context, TIMING)
    }

    fn with(context: &Arc<Context>, flags: u32) -> Result<Self, DeviceError> {
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: fills the handle; destroyed when the value is dropped.
        unsafe { call!(context.library(), Some(context.device()), cuEventCreate(&raw mut raw, flags)) }?;
        Ok(Event { context: context.clone(), raw })
    }

    /// Marks where `stream` is now.
    ///
    /// # Errors
    /// [`DeviceError::OtherDevice`] for a stream of another device, [`DeviceError::Call`].
    pub fn record(&self, stream: &Stream) -> Result<(), DeviceError> {
        let (found, expected) = (stream.device(), self.context.device());
        if found != expected {
            return Err(DeviceError::OtherDevice { what: "stream", found, expected });
        }
        let _entered = self.context.enter()?;
        // SAFETY: both live.
        unsafe { call!(self.context.library(), Some(expected), cuEventRecord(self.raw, stream.raw)) }
    }

    /// Whether the mark has been reached.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    pub fn is_done(&self) -> Result<bool, DeviceError> {
        let _entered = self.context.enter()?;
        // SAFETY: the event lives.
        let code = unsafe { (self.context.library().functions.cuEventQuery)(self.raw) };
        if code == Code::NOT_READY {
            return Ok(false);
        }
        self.context.library().check("cuEventQuery", Some(self.context.device()), code)?;
        Ok(true)
    }

    /// Time from another mark to this one, by the device's clock. Both are [timed](Self::timed) and
    /// have been reached.
    ///
    /// # Errors
    /// [`DeviceError::Call`], also for marks that are not.
    pub fn since(&self, start: &Event) -> Result<Duration, DeviceError> {
        let _entered = self.context.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: fills the number; both live.
        unsafe {
            let (library, device) = (self.context.library(), Some(self.context.device()));
            call!(library, device, cuEventElapsedTime(&raw mut milliseconds, start.raw, self.raw))
        }?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default())
    }

    /// Blocks until the mark has been reached; there is no deadline.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        let _entered = self.context.enter()?;
        // SAFETY: the event lives.
        unsafe { call!(self.context.library(), Some(self.context.device()), cuEventSynchronize(self.raw)) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: made here; the driver keeps what waits for it.
        let _ = unsafe { (self.context.library().functions.cuEventDestroy_v2)(self.raw) };
    }
}

/// A graph that can be launched. It holds claims on the memory that it uses.
#[derive(Debug)]
pub struct CudaGraph {
    context: Arc<Context>,
    raw: sys::CUgraphExec,
    held: Claims,
}

// SAFETY: a graph may be used from any thread; the driver orders the launches of one graph.
unsafe impl Send for CudaGraph {}

impl CudaGraph {
    /// Captures the operations that `enqueue` enqueues in the stream, which does not run them. No
    /// other thread may enqueue there meanwhile.
    ///
    /// # Errors
    /// Errors of `enqueue`; [`DeviceError::Call`].
    pub fn capture<E: From<DeviceError>>(
        stream: &Stream,
        enqueue: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        let (library, device) = (stream.library(), Some(stream.device()));
        let _entered = stream.context.enter()?;
        // SAFETY: the stream lives.
        unsafe {
            let mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            call!(library, device, cuStreamBeginCapture_v2(stream.raw, mode))
        }?;
        let enqueued = enqueue();
        let mut graph = std::ptr::null_mut();
        // SAFETY: fills the handle, with null where the capture is spoiled; destroyed below.
        let ended = unsafe { call!(library, device, cuStreamEndCapture(stream.raw, &raw mut graph)) };
        let mut raw = std::ptr::null_mut();
        let made = match (&enqueued, &ended) {
            // SAFETY: fills the handle; destroyed when the value is dropped.
            (Ok(()), Ok(())) => unsafe {
                call!(library, device, cuGraphInstantiateWithFlags(&raw mut raw, graph, 0))
            },
            _ => Ok(()),
        };
        if !graph.is_null() {
            // SAFETY: handed out above; the instance does not need it.
            let _ = unsafe { (library.functions.cuGraphDestroy)(graph) };
        }
        enqueued?;
        ended.and(made)?;
        let mut held = Claims::default();
        held.add_all(&stream.held());
        Ok(CudaGraph { context: stream.context.clone(), raw, held })
    }

    /// Enqueues all of it.
    ///
    /// # Errors
    /// [`DeviceError::OtherDevice`] for a stream of another device, [`DeviceError::Call`].
    pub fn launch(&self, stream: &Stream) -> Result<(), DeviceError> {
        let (found, expected) = (stream.device(), self.context.device());
        if found != expected {
            return Err(DeviceError::OtherDevice { what: "stream", found, expected });
        }
        let mut held = stream.held();
        held.add_all(&self.held);
        let _entered = self.context.enter()?;
        // SAFETY: both live, and the stream holds the memory that the graph uses.
        unsafe { call!(self.context.library(), Some(expected), cuGraphLaunch(self.raw, stream.raw)) }
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: made here; the driver finishes running launches.
        let _ = unsafe { (self.context.library().functions.cuGraphExecDestroy)(self.raw) };
    }
}
