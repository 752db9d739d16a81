//! Streams of the caller's, and what is lent on their devices.
//!
//! ```text
//!   producer's stream   makes x ---.                                        .--> uses rows        consumer's stream
//!                                   \  __dlpack__(stream=ours)             /  __dlpack__(stream=theirs)
//!   instance's stream                '-> dispatch ......... rows there ---'
//! ```
//!
//! DLPack's rule: the lender sees to it that the tensor is valid for what the borrower's stream
//! is given next. So tensors may be made and used on any streams; those of the instance's own wait
//! for nothing. What is borrowed is given back when the stream has passed its last use: an event
//! behind each call says so. What is lent ([`Lender`]) knows the streams that use it: when it comes
//! back, the instance's stream waits for what they were given so far.
//!
//! Calls go on torch's current stream, unless the caller has named one: the instance follows, and
//! the next stream comes behind the one before.

#![allow(unsafe_code, reason = "addresses and streams of other libraries are used by contract")]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sidelane::device::{Context, DeviceRange, Driver, Event, Stream};
use sidelane::ep::CallExecutor;
use sidelane::error::DeviceError;
use sidelane::memory::Pool;

use crate::dlpack::Lent;
use crate::errors::raise;
use crate::input::Input;
use crate::lending::Maker;
use crate::settings;
use crate::tensor::Element;

/// As DLPack has them: the legacy default stream, and none.
const LEGACY: usize = 1;
const NO_STREAM: isize = -1;

/// Where an instance has its rows, with what keeps memory there.
#[derive(Clone)]
pub enum Place {
    /// In the receive pool.
    Host(Arc<Pool>),
    /// On the device of a stream.
    Device(Lender),
}

impl Place {
    /// The stream, on a device.
    pub fn on(&self) -> Option<&Arc<OnStream>> {
        match self {
            Place::Host(_) => None,
            Place::Device(lender) => Some(&lender.on),
        }
    }

    /// The same place, for memory without users yet.
    pub fn anew(&self) -> Self {
        match self {
            Place::Host(_) => self.clone(),
            Place::Device(lender) => Place::Device(Lender::new(&lender.on)),
        }
    }

    /// The lender of its memory, on a device.
    pub fn lender(&self) -> Option<&Lender> {
        match self {
            Place::Host(_) => None,
            Place::Device(lender) => Some(lender),
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
        if let Place::Device(lender) = self {
            lender.on.keep(inputs.into_iter().filter_map(Input::kept).collect());
        }
    }
}

/// Lends memory of one dispatch: that of its rows, what came with them, and outputs.
#[derive(Clone)]
pub struct Lender {
    on: Arc<OnStream>,
    /// Streams that have used it, by DLPack's numbers.
    users: Arc<Mutex<Vec<usize>>>,
}

impl Lender {
    /// Lends memory of this stream's instance.
    pub fn new(on: &Arc<OnStream>) -> Self {
        Lender { on: Arc::clone(on), users: Arc::default() }
    }

    /// The number of the device.
    pub fn device(&self) -> u32 {
        self.on.device()
    }

    /// Has a consumer's stream, by DLPack's number, wait for what the memory holds.
    ///
    /// # Errors
    /// `BufferError` for what is no stream.
    pub fn lend(&self, consumer: Option<isize>) -> PyResult<()> {
        self.on.before(consumer)?;
        match consumer {
            Some(NO_STREAM) => {}
            consumer => self.used_on(consumer.map_or(LEGACY, |stream| stream.unsigned_abs())),
        }
        Ok(())
    }

    /// Records that a stream uses the memory.
    pub fn used_on(&self, stream: usize) {
        let (stream, mut users) = (stream.max(LEGACY), self.users());
        if !users.contains(&stream) {
            users.push(stream);
        }
    }

    /// Has what the instance's stream is given next wait for what users were given so far. A
    /// graph's memory has no other users.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn take_back(&self) -> Result<(), DeviceError> {
        let own = self.on.dlpack_stream();
        let users: Vec<_> = self.users().iter().copied().filter(|&user| user != own).collect();
        if users.is_empty() || self.on.stream().is_capturing()? {
            return Ok(());
        }
        let order = || users.iter().try_for_each(|&user| self.on.after(user));
        // The driver may wait for a stream that another thread of this process is to give
        // something.
        Python::try_attach(|py| py.detach(order)).unwrap_or_else(order)
    }

    fn users(&self) -> MutexGuard<'_, Vec<usize>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The stream of an instance, and tensors that it still uses.
pub struct OnStream {
    maker: Maker,
    context: Arc<Context>,
    stream: Mutex<Arc<Stream>>,
    /// Calls go on torch's current stream.
    follows: AtomicBool,
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
    /// `InputError` where it is not said which, `DeviceError`.
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
        let opened: Result<_, DeviceError> = py.detach(|| {
            let context = Driver::open()?.context(device)?;
            Ok((Self::borrow(&context, stream)?, context))
        });
        let (stream, context) = opened.map_err(raise)?;
        Ok(Some(Arc::new(OnStream {
            maker: Maker::here(),
            context,
            stream: Mutex::new(stream),
            follows: AtomicBool::new(false),
            kept: Mutex::default(),
        })))
    }

    /// A stream of the caller's.
    fn borrow(context: &Arc<Context>, handle: usize) -> Result<Arc<Stream>, DeviceError> {
        let handle = std::ptr::with_exposed_provenance_mut(handle);
        // SAFETY: a stream that the caller says there is, and keeps as long as it is used.
        unsafe { Stream::borrow(context, handle) }.map(Arc::new)
    }

    /// The stream.
    pub fn stream(&self) -> Arc<Stream> {
        Arc::clone(&self.stream.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether calls go on torch's current stream from now on.
    pub fn follow_torch(&self, follows: bool) {
        self.follows.store(follows, Ordering::Relaxed);
    }

    /// The handle of torch's current stream, if calls go there and it is not the one of this.
    ///
    /// # Errors
    /// Those of torch.
    pub fn moved(&self, py: Python<'_>) -> PyResult<Option<usize>> {
        if !self.follows.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let (_, current) = of_torch(py, Some(self.device()))?;
        Ok((current != self.handle()).then_some(current))
    }

    /// Goes on with another stream, behind what this one was given so far.
    ///
    /// # Errors
    /// [`DeviceError`], and as [`sidelane::ExpertParallel::set_stream`].
    pub fn set_stream(
        &self,
        ep: &mut sidelane::ExpertParallel,
        handle: usize,
    ) -> Result<(), sidelane::Error> {
        let (next, before) = (Self::borrow(&self.context, handle)?, self.stream());
        // Exact sizes do this themselves. A graph knows nothing of streams outside of it.
        if ep.executor() == CallExecutor::ConstantProgram
            && !next.is_capturing()?
            && !before.is_capturing()?
        {
            next.wait_event(&self.mark()?)?;
        }
        ep.set_stream(&next)?;
        *self.stream.lock().unwrap_or_else(PoisonError::into_inner) = next;
        Ok(())
    }

    /// Whether the stream of this handle is being captured.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn is_captured(&self, handle: usize) -> Result<bool, DeviceError> {
        Self::borrow(&self.context, handle)?.is_capturing()
    }

    /// The number of its device.
    pub fn device(&self) -> u32 {
        self.context.device()
    }

    /// Its handle, as torch has it.
    pub fn handle(&self) -> usize {
        self.stream().handle().addr()
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
        unsafe { DeviceRange::from_raw(&self.context, what, address, bytes as u64) }.map_err(raise)
    }

    /// Keeps what the stream was just given until it has passed that. What a graph may come back to
    /// is kept for good, as is what no event can mark.
    fn keep(&self, lent: Vec<Arc<Lent>>) {
        let captured = self.stream().is_capturing() != Ok(false);
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
        // The thread that gives back may want the interpreter, as may one that waits for the lock.
        drop(kept);
        drop(past);
    }

    /// An event behind what the stream was given so far.
    fn mark(&self) -> Result<Event, DeviceError> {
        let event = Event::new(&self.context)?;
        event.record(&self.stream())?;
        Ok(event)
    }

    /// Waits for what another stream, by DLPack's number, was given so far.
    fn after(&self, user: usize) -> Result<(), DeviceError> {
        let event = Event::new(&self.context)?;
        event.record(&*Self::borrow(&self.context, handle_of(user))?)?;
        self.stream().wait_event(&event)
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
        let order = || Self::borrow(&self.context, handle_of(consumer))?.wait_event(&self.mark()?);
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
    /// Everything that was made on it is gone: waits for the stream, so that nothing keeps what it
    /// used. Streams of a failed world drain, too.
    fn drop(&mut self) {
        let kept = std::mem::take(self.kept.get_mut().unwrap_or_else(PoisonError::into_inner));
        let stream = self.stream();
        let idle = || stream.is_capturing() == Ok(false) && stream.synchronize().is_ok();
        // Others of this process may have to do something before the stream is.
        let wait = || Python::try_attach(|py| py.detach(idle)).unwrap_or_else(idle);
        let past = self.maker.is_here() && wait();
        if !past {
            // A broken device still uses this memory, or it is a parent's process's: it is not ours
            // to give back here.
            std::mem::forget(kept);
        }
    }
}

/// The handle of a stream that has this number in DLPack.
fn handle_of(number: usize) -> usize {
    if number == LEGACY { 0 } else { number }
}

/// Neither the settings nor torch say on which stream calls go.
fn no_stream(reason: &str) -> PyErr {
    let remedy = "import a torch with CUDA, or pass device= (a number) and stream= (a handle)";
    settings::wrong("stream", &format!("{reason}: {remedy}"))
}

/// The device and the stream that torch uses now.
fn of_torch(py: Python<'_>, device: Option<u32>) -> PyResult<(u32, usize)> {
    let modules = py.import("sys")?.getattr("modules")?;
    let cuda = match modules.get_item("torch") {
        Ok(torch) => torch.getattr("cuda")?,
        Err(_) => return Err(no_stream("torch is not imported")),
    };
    if !cuda.call_method0("is_available")?.extract::<bool>()? {
        return Err(no_stream("torch sees no GPU"));
    }
    let device = match device {
        Some(device) => device,
        None => cuda.call_method0("current_device")?.extract()?,
    };
    let stream = cuda.call_method1("current_stream", (device,))?;
    Ok((device, stream.getattr("cuda_stream")?.extract()?))
}
