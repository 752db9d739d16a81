//! The state of the driver in this process, and the contexts of its devices.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::code::{Code, Result};
use crate::queues::Queues;
use crate::settings::Settings;
use crate::stream::Stream;
use crate::table::{Table, fresh};

static SETTINGS: OnceLock<Settings> = OnceLock::new();
static CONTEXTS: Table<Context> = Table::new();
static PRIMARY: Mutex<Vec<Primary>> = Mutex::new(Vec::new());
static STOPPED: AtomicBool = AtomicBool::new(false);

/// A device's primary context and how often it was retained. A context that comes after a reset has
/// the handle of the one before, as the driver gives the same address again: only ids differ.
#[derive(Clone, Default)]
struct Primary {
    retained: usize,
    handle: Option<usize>,
    context: Option<Arc<Context>>,
}

/// `cuInit`.
pub fn start() -> Result<()> {
    if SETTINGS.get().is_none() {
        let settings = Settings::from_env().map_err(|text| {
            eprintln!("fake libcuda: {text}");
            Code::INVALID_VALUE
        })?;
        let mut primary = PRIMARY.lock().unwrap();
        if SETTINGS.get().is_none() {
            primary.resize(settings.devices, Primary::default());
            SETTINGS.get_or_init(|| settings);
        }
    }
    if settings()?.devices == 0 { Err(Code::NO_DEVICE) } else { Ok(()) }
}

/// The settings, once the driver is initialised.
pub fn settings() -> Result<&'static Settings> {
    SETTINGS.get().ok_or(Code::NOT_INITIALIZED)
}

/// The index of a device that exists.
pub fn device(ordinal: i32) -> Result<usize> {
    let devices = settings()?.devices;
    usize::try_from(ordinal).ok().filter(|&device| device < devices).ok_or(Code::INVALID_DEVICE)
}

/// Ends every wait of every stream, now and later: each context in which one ended answers
/// `LAUNCH_TIMEOUT`.
pub fn stop() {
    STOPPED.store(true, Ordering::Release);
}

/// Whether `stop` was called.
pub fn stopped() -> bool {
    STOPPED.load(Ordering::Acquire)
}

/// A device's context: its streams, the hardware queues they are folded on, and the error that
/// ended it.
pub struct Context {
    pub handle: usize,
    /// Never given twice.
    pub id: u64,
    pub device: usize,
    pub queues: Queues,
    /// The stream that host code calls null.
    pub null: Arc<Stream>,
    /// All streams, those of graphs included, the null stream excluded.
    pub streams: Mutex<Vec<Arc<Stream>>>,
    /// Devices whose plain allocations this context may reach.
    pub peers: Mutex<BTreeSet<usize>>,
    error: Arc<Sticky>,
}

/// The error that ended a context. It is never taken back: every later call answers with it.
#[derive(Default)]
pub struct Sticky(AtomicI32);

impl Sticky {
    /// Ends the context, unless something else ended it before.
    pub fn set(&self, code: Code) {
        let _ = self.0.compare_exchange(0, code.0, Ordering::AcqRel, Ordering::Acquire);
    }

    pub fn get(&self) -> Option<Code> {
        let number = self.0.load(Ordering::Acquire);
        (number != 0).then_some(Code(number))
    }
}

impl Context {
    fn new(settings: &Settings, device: usize, handle: usize) -> Arc<Context> {
        let error = Arc::new(Sticky::default());
        let queues = Queues::new(settings, device, &error);
        let null = Stream::legacy(handle, device, queues.first());
        let context = Arc::new(Context {
            handle,
            id: fresh() as u64,
            device,
            queues,
            null,
            streams: Mutex::default(),
            peers: Mutex::default(),
            error,
        });
        CONTEXTS.insert_at(handle, Arc::clone(&context));
        context
    }

    /// The context behind a handle.
    pub fn of(handle: usize) -> Result<Arc<Context>> {
        CONTEXTS.get(handle).map_err(|_| Code::INVALID_CONTEXT)
    }

    /// Answers with the error that ended this context, if one did.
    pub fn alive(&self) -> Result<()> {
        self.error.get().map_or(Ok(()), Err)
    }

    /// The null stream and all others.
    pub fn all_streams(&self) -> Vec<Arc<Stream>> {
        let mut streams = self.streams.lock().unwrap().clone();
        streams.push(Arc::clone(&self.null));
        streams
    }

    /// Waits until all that was enqueued so far is done.
    pub fn synchronize(&self) -> Result<()> {
        let streams = self.all_streams();
        for stream in &streams {
            stream.flush();
        }
        for stream in &streams {
            stream.drained();
        }
        self.alive()
    }
}

/// Retains a device's primary context and gives its handle.
pub fn retain(device: usize) -> Result<usize> {
    let settings = settings()?;
    let mut all = PRIMARY.lock().unwrap();
    let primary = &mut all[device];
    primary.retained += 1;
    let handle = *primary.handle.get_or_insert_with(fresh);
    Ok(primary.context.get_or_insert_with(|| Context::new(settings, device, handle)).handle)
}

/// Releases it; the last release ends it, with its streams and its error.
pub fn release(device: usize) -> Result<()> {
    let ended = {
        let mut all = PRIMARY.lock().unwrap();
        let primary = all.get_mut(device).filter(|p| p.retained > 0).ok_or(Code::INVALID_CONTEXT)?;
        primary.retained -= 1;
        if primary.retained == 0 { primary.context.take() } else { None }
    };
    if let Some(context) = ended {
        context.error.set(Code::CONTEXT_IS_DESTROYED);
        CONTEXTS.remove(context.handle)?;
        for stream in context.streams.lock().unwrap().drain(..) {
            stream.forget();
        }
        context.null.forget();
        context.queues.close();
    }
    Ok(())
}

/// The handle of a device's primary context, if it is retained.
pub fn active(device: usize) -> Option<usize> {
    PRIMARY.lock().unwrap()[device].context.as_ref().map(|context| context.handle)
}
