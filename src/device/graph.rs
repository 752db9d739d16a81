//! Graphs: enqueued once, run any number of times.
//!
//! Addresses, sizes and values of flags are constants in a graph. So only operations that are the
//! same in every call can be captured.

use std::sync::Arc;

use cudarc::driver::sys;
use sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;

use super::call;
use super::context::Context;
use super::range::Claims;
use super::stream::Stream;
use crate::error::DeviceError;

/// A graph that can be launched. It holds claims on the memory that it uses.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    raw: sys::CUgraphExec,
    held: Claims,
}

// SAFETY: a graph may be used from any thread; the driver orders the launches of one graph.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures the operations that `enqueue` enqueues in the stream, which does not run them. No
    /// other thread may enqueue there meanwhile.
    ///
    /// # Errors
    /// What `enqueue` answers; [`DeviceError::Call`].
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
        Ok(Graph { context: stream.context.clone(), raw, held })
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

impl Drop for Graph {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: made here; the driver finishes running launches.
        let _ = unsafe { (self.context.library().functions.cuGraphExecDestroy)(self.raw) };
    }
}
