//! Streams of the caller's, and what is lent on their devices.
//!
//! ```text
//!   producer's stream   makes x ---.                                        .--> uses rows        consumer's stream
//!                                   \  __dlpack__(stream=ours)             /  __dlpack__(stream=theirs)
//!   exchange's stream                '-> dispatch ......... rows there ---'
//! ```
//!
//! DLPack's rule: whoever lends sees to it that the tensor is there for what the borrower's stream is given next. So tensors may
//! be made and used on any streams; those of the exchange's own wait for nothing. What is borrowed is given back when the stream
//! has come past its last use: an event behind each call says so.

#![allow(unsafe_code, reason = "addresses and streams of other libraries are used by contract")]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use sidelane::Dtype;
use sidelane::device::{Driver, Event, Range, Stream};
use sidelane::error::DeviceError;

use crate::dlpack::Lent;
use crate::errors::raise;
use crate::input::Input;
use crate::settings;
use crate::slot::Maker;
use crate::tensor::Element;

/// As DLPack has them: the legacy default stream, and none.
const LEGACY: usize = 1;
const NO_STREAM: isize = -1;

/// What a dispatch sends: tensors that are lent, and their memory.
pub struct Sent {
    pub inputs: [Input; 3],
    pub ranges: [Range; 3],
}

/// The stream of an exchange, and what it still uses.
pub struct OnStream {
    maker: Maker,
    stream: Arc<Stream>,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    /// Until a mark has been reached.
    used: VecDeque<(Event, Vec<Lent>)>,
    /// What graphs use.
    captured: Vec<Lent>,
}

impl OnStream {
    /// The stream with this handle on this device; what is not said is torch's current one.
    ///
    /// # Errors
    /// `InputError` where nobody says which, `DeviceError`.
    pub fn open(py: Python<'_>, device: Option<u32>, stream: Option<usize>) -> PyResult<Arc<Self>> {
        let (device, stream) = match (device, stream) {
            (Some(device), Some(stream)) => (device, stream),
            (device, stream) => {
                let (now, current) = of_torch(py, device)?;
                (now, stream.unwrap_or(current))
            }
        };
        let opened = py.detach(|| {
            let context = Driver::open()?.context(device)?;
            let handle = std::ptr::with_exposed_provenance_mut(stream);
            // SAFETY: a stream that the caller says there is, and keeps as long as the exchange.
            unsafe { Stream::borrow(&context, handle) }
        });
        let stream = Arc::new(opened.map_err(raise)?);
        Ok(Arc::new(OnStream { maker: Maker::here(), stream, kept: Mutex::default() }))
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

    /// Borrows a tensor, which is there for what this stream is given next.
    ///
    /// # Errors
    /// `InputError`.
    pub fn borrow(&self, object: &Bound<'_, PyAny>, what: &'static str) -> PyResult<Input> {
        Input::on_device(object, what, self.device(), self.handle().max(LEGACY))
    }

    /// A tensor's memory, to be used before [`OnStream::keep`] is told of it.
    ///
    /// # Errors
    /// `DeviceError` where its library says what the driver does not.
    pub fn range(&self, input: &Input) -> PyResult<Range> {
        let (address, len) = input.place();
        let address = if len == 0 { 0 } else { address as u64 };
        // SAFETY: lent; `keep` holds it until the stream has come past.
        unsafe { Range::lent(self.stream.context(), input.what(), address, len as u64) }.map_err(raise)
    }

    /// Borrows what a dispatch sends: `x`, experts and weights.
    ///
    /// # Errors
    /// As [`OnStream::borrow`] and [`OnStream::range`].
    pub fn tokens(
        &self,
        [x, experts, weights]: [&Bound<'_, PyAny>; 3],
        (hidden, dtype): (usize, Dtype),
        top_k: usize,
    ) -> PyResult<Sent> {
        let inputs = [
            self.borrow(x, "x")?.columns(hidden)?.of(dtype.into())?,
            self.borrow(experts, "experts")?.columns(top_k)?.of(Element::I32)?,
            self.borrow(weights, "weights")?.columns(top_k)?.of(Element::F32)?,
        ];
        let [x, experts, weights] = &inputs;
        Ok(Sent { ranges: [self.range(x)?, self.range(experts)?, self.range(weights)?], inputs })
    }

    /// Keeps what the stream was just given until it has come past. A graph may come back to it: that is kept for good.
    pub fn keep(&self, inputs: impl IntoIterator<Item = Input>) -> Result<(), DeviceError> {
        let lent: Vec<Lent> = inputs.into_iter().map(Input::into_lent).collect();
        let mut marked = None;
        if !self.stream.is_capturing()? {
            let event = Event::new(self.stream.context())?;
            event.record(&self.stream)?;
            marked = Some(event);
        }
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
        Ok(())
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
        if consumer == self.handle().max(LEGACY) {
            return Ok(());
        }
        let handle = if consumer == LEGACY { 0 } else { consumer };
        let order = || {
            let context = self.stream.context();
            // SAFETY: a stream of the consumer's, who is in a call that names it.
            let theirs = unsafe { Stream::borrow(context, std::ptr::with_exposed_provenance_mut(handle)) }?;
            let event = Event::new(context)?;
            event.record(&self.stream)?;
            theirs.wait_event(&event)
        };
        order().map_err(|error| {
            PyBufferError::new_err(format!("stream {consumer} cannot wait for this memory's: {error}"))
        })
    }
}

impl Drop for OnStream {
    /// Everything that was made on it is gone: waits for the stream, so that nobody keeps what it used. Streams of a dead world drain, too.
    fn drop(&mut self) {
        let kept = std::mem::take(self.kept.get_mut().unwrap_or_else(PoisonError::into_inner));
        let idle = || self.stream.is_capturing() == Ok(false) && self.stream.synchronize().is_ok();
        // Others of this process may have to do something before the stream is.
        let wait = || Python::try_attach(|py| py.detach(idle)).unwrap_or_else(idle);
        let past = self.maker.is_here() && wait();
        if !past {
            // What a broken device still uses, or that of a parent's process, is nobody's to give back here.
            std::mem::forget(kept);
        }
    }
}

/// A byte that no device may touch. As a tensor it is refused, whatever is expected: rows are multiples of 16 bytes.
pub fn nowhere() -> Range {
    // SAFETY: no device reaches it, so no stream takes it.
    unsafe { Range::of_caller(0, 1, &[], Arc::new(())) }
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
