//! Events: marks in a stream that others can wait for.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;

use super::call;
use super::context::Context;
use super::functions::Code;
use super::stream::Stream;
use crate::error::DeviceError;

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
