//! Streams of the caller's, and what is lent on their devices.
//!
//! ```text
//!   producer's stream   makes x ---.                                        .--> uses rows        consumer's stream
//!                                   \  __dlpack__(stream=ours)             /  __dlpack__(stream=theirs)
//!   instance's stream                '-> dispatch ......... rows there ---'
//! ```
//!
//! DLPack's rule: whoever lends sees to it that the tensor is there for what the borrower's stream
//! is given next. So tensors may be made and used on any streams; those of the instance's own wait
//! for nothing. What is borrowed is given back when the stream has passed its last use: an event
//! behind each call says so.

#![allow(unsafe_code, reason = "addresses and streams of other libraries are used by contract")]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sidelane::device::{DeviceRange, Driver, Event, Stream};
use sidelane::error::DeviceError;
use sidelane::memory::Pool;

use crate::dlpack::Lent;
use crate::errors::raise;
use crate::input::Input;
use crate::settings;
use crate::slot::Maker;
use crate::tensor::{Element, Memory, Tensor};

/// As DLPack has them: the legacy default stream, and none.
const LEGACY: usize = 1;
const NO_STREAM: isize = -1;

/// Where an instance has its rows, with what keeps memory there.
#[derive(Clone)]
pub enum Place {
    /// In the receive pool.
    Host(Arc<Pool>),
    /// On the device of this stream.
    Device(Arc<OnStream>),
}

impl Place {
    /// The stream, on a device.
    pub fn on(&self) -> Option<&Arc<OnStream>> {
        match self {
            Place::Host(_) => None,
            Place::Device(on) => Some(on),
        }
    }

    /// The pool, on the host.
    pub fn pool(&self) -> Option<Arc<Pool>> {
        match self {
            Place::Host(pool) => Some(Arc::clone(pool)),
            Place::Device(_) => None,
        }
    }

    /// Borrows a tensor of this place.
    ///
    /// # Errors
    /// As [`Input::borrow`].
    pub fn borrow(&self, object: &Bound<'_, PyAny>, what: &'static str) -> PyResult<Input> {
        Input::borrow(object, what, self.on().map(Arc::as_ref))
    }

    /// Keeps inputs of a call that was just enqueued. On the host calls are over when they return.
    pub fn keep<'i>(&self, inputs: impl IntoIterator<Item = &'i Input>) {
        if let Place::Device(on) = self {
            on.keep(inputs.into_iter().filter_map(Input::kept).collect());
        }
    }

    /// A tensor in memory of this place.
    pub fn tensor(&self, memory: Arc<Memory>, shape: &[usize], element: Element) -> Tensor {
        let tensor = Tensor::new(memory, shape, element);
        self.on().into_iter().fold(tensor, Tensor::on)
    }
}

/// The stream of an instance, and tensors that it still uses.
pub struct OnStream {
    maker: Maker,
    stream: Arc<Stream>,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    /// Until a mark has been reached.
    used: VecDeque<(Event, Vec<Arc<Lent>>)>,
    /// For good: graphs may come back to it.
    captured: Vec<Arc<Lent>>,
}

impl OnStream {
    /// The stream that settings name, if they name one: `device` is a number, or as torch writes
    /// it. What is left out is torch's current one.
    ///
    /// # Errors
    /// `InputError` where nobody says which, `DeviceError`.
    pub fn open(
        py: Python<'_>,
        device: Option<&Bound<'_, PyAny>>,
        stream: Option<usize>,
    ) -> PyResult<Option<Arc<Self>>> {
        let (device, stream) = match (device.map(settings::device).transpose()?.flatten(), stream) {
            (None, None) if device.is_none() => return Ok(None),
            (Some(device), Some(stream)) => (device, stream),
            (device, stream) => {
                let (now, current) = of_torch(py, device)?;
                (now, stream.unwrap_or(current))
            }
        };
        let opened = py.detach(|| {
            let context = Driver::open()?.context(device)?;
            let handle = std::ptr::with_exposed_provenance_mut(stream);
            // SAFETY: a stream that the caller says there is, and keeps as long as the instance.
            unsafe { Stream::borrow(&context, handle) }
        });
        let stream = Arc::new(opened.map_err(raise)?);
        Ok(Some(Arc::new(OnStream { maker: Maker::here(), stream, kept: Mutex::default() })))
    }

    /// The stream.
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// The number of its device.
    pub fn device(&self) -> u32 {
        self.stream.device()
    }

    /// Its handle, as torch has it.
    pub fn handle(&self) -> usize {
        self.stream.handle().addr()
    }

    /// Its number in DLPack.
    pub fn dlpack_stream(&self) -> usize {
        self.handle().max(LEGACY)
    }

    /// Memory of a tensor that is lent. [`OnStream::keep`] takes the loan once the memory is in
    /// use.
    ///
    /// # Errors
    /// `DeviceError` where its library says what the driver does not.
    pub fn range(&self, what: &'static str, address: usize, bytes: usize) -> PyResult<DeviceRange> {
        let address = if bytes == 0 { 0 } else { address as u64 };
        // SAFETY: lent; `keep` holds it until the stream has passed its use.
        unsafe { DeviceRange::from_raw(self.stream.context(), what, address, bytes as u64) }.map_err(raise)
    }

    /// Keeps what the stream was just given until it has passed that. What a graph may come back to
    /// is kept for good, as is what no event can mark.
    fn keep(&self, lent: Vec<Arc<Lent>>) {
        let captured = self.stream.is_capturing() != Ok(false);
        let marked = if captured { None } else { self.mark().ok() };
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut past = Vec::new();
        match marked {
            Some(event) => {
                while kept.used.front().is_some_and(|(event, _)| event.is_done() == Ok(true)) {
                    past.extend(kept.used.pop_front());
                }
                kept.used.push_back((event, lent));
            }
            None => kept.captured.extend(lent),
        }
        // Whoever gives back may want the interpreter, and with it whoever waits for the lock.
        drop(kept);
        drop(past);
    }

    /// An event behind what the stream was given so far.
    fn mark(&self) -> Result<Event, DeviceError> {
        let event = Event::new(self.stream.context())?;
        event.record(&self.stream)?;
        Ok(event)
    }

    /// Has a consumer's stream, by DLPack's number, wait for what this one was given so far.
    pub fn before(&self, consumer: Option<isize>) -> PyResult<()> {
        let consumer = match consumer {
            Some(NO_STREAM) => return Ok(()),
            None => LEGACY,
            Some(number) => usize::try_from(number)
                .ok()
                .filter(|&number| number > 0)
                .ok_or_else(|| PyBufferError::new_err(format!("{number} is no stream of CUDA")))?,
        };
        if consumer == self.dlpack_stream() {
            return Ok(());
        }
        let handle = if consumer == LEGACY { 0 } else { consumer };
        let order = || {
            let theirs = std::ptr::with_exposed_provenance_mut(handle);
            // SAFETY: a stream of the consumer's, who is in a call that names it.
            unsafe { Stream::borrow(self.stream.context(), theirs) }?.wait_event(&self.mark()?)
        };
        order().map_err(|error| {
            PyBufferError::new_err(format!("stream {consumer} cannot wait for this memory's: {error}"))
        })
    }
}

impl OnStream {
    /// An uninitialized tensor of torch's on this device.
    ///
    /// # Errors
    /// Those of torch.
    pub fn torch_empty<'py>(
        &self,
        py: Python<'py>,
        shape: [usize; 2],
        element: Element,
    ) -> PyResult<Bound<'py, PyAny>> {
        let torch = py.import("torch")?;
        let named = PyDict::new(py);
        named.set_item("dtype", torch.getattr(element.name())?)?;
        named.set_item("device", format!("cuda:{}", self.device()))?;
        torch.call_method("empty", (shape,), Some(&named))
    }

    /// Has torch's current stream wait for what this one was given so far.
    ///
    /// # Errors
    /// Those of torch, and as [`OnStream::before`].
    pub fn before_torch(&self, py: Python<'_>) -> PyResult<()> {
        let (_, current) = of_torch(py, Some(self.device()))?;
        self.before(Some(current.max(LEGACY) as isize))
    }
}

impl Drop for OnStream {
    /// Everything that was made on it is gone: waits for the stream, so that nobody keeps what it
    /// used. Streams of a dead world drain, too.
    fn drop(&mut self) {
        let kept = std::mem::take(self.kept.get_mut().unwrap_or_else(PoisonError::into_inner));
        let idle = || self.stream.is_capturing() == Ok(false) && self.stream.synchronize().is_ok();
        // Others of this process may have to do something before the stream is.
        let wait = || Python::try_attach(|py| py.detach(idle)).unwrap_or_else(idle);
        let past = self.maker.is_here() && wait();
        if !past {
            // What a broken device still uses, or that of a parent's process, is nobody's to give
            // back here.
            std::mem::forget(kept);
        }
    }
}

/// The device and the stream that torch uses now.
fn of_torch(py: Python<'_>, device: Option<u32>) -> PyResult<(u32, usize)> {
    let modules = py.import("sys")?.getattr("modules")?;
    let cuda = match modules.get_item("torch") {
        Ok(torch) => torch.getattr("cuda")?,
        Err(_) => return Err(settings::wrong("stream", "needed, and device, unless torch uses a GPU")),
    };
    if !cuda.call_method0("is_available")?.extract::<bool>()? {
        return Err(settings::wrong("stream", "needed, and device: torch sees no GPU"));
    }
    let device = match device {
        Some(device) => device,
        None => cuda.call_method0("current_device")?.extract()?,
    };
    let stream = cuda.call_method1("current_stream", (device,))?;
    Ok((device, stream.getattr("cuda_stream")?.extract()?))
}
