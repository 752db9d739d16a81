//! Access to words in device memory past the streams that wait for them.
//!
//! The host does not write to a device's memory. Work that it enqueues on a stream may lie behind
//! the very wait that it should end: a device serves all streams from few queues, each strictly in
//! order. So streams are made until one is not blocked, since each takes the next queue. Only the
//! end of a world and the search for a late rank use this; no call does.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::device::{Context, DeviceRange, PinnedMemory, Priority, Stream};
use crate::ep::device::guard::POISON;
use crate::error::DeviceError;

/// As many as a device has queues at most.
const TRIES: usize = 32;
/// A stream that is not done for so long is held up.
const SILENT: Duration = Duration::from_millis(200);

/// The words that cards write for one rank.
#[derive(Debug)]
pub(super) struct BypassStream {
    context: Arc<Context>,
    words: DeviceRange,
    /// Where they lie.
    awaited: Vec<u64>,
    copy: PinnedMemory,
    tried: Mutex<Tried>,
    /// The last time no stream got past.
    stuck: AtomicBool,
}

#[derive(Debug, Default)]
struct Tried {
    /// Not held up when it was last used.
    free: Option<Stream>,
    /// Blocked streams, [`TRIES`] at most: then nothing is tried until one of them has finished.
    /// They are freed when they have.
    behind: Vec<Stream>,
}

impl BypassStream {
    /// The words at these places, which are cleared.
    pub fn new(context: &Arc<Context>, words: &DeviceRange, awaited: Vec<u64>) -> Result<Self, DeviceError> {
        let copy = PinnedMemory::new(context, words.len() as usize)?;
        let aside = BypassStream {
            context: Arc::clone(context),
            words: words.clone(),
            awaited,
            copy,
            tried: Mutex::default(),
            stuck: AtomicBool::new(false),
        };
        let stream = Stream::new(context, Priority::Normal)?;
        aside.copy.write(0, &vec![0; aside.copy.len()])?;
        stream.copy(words.span(0, words.len())?, aside.copy.range().span(0, words.len())?)?;
        stream.synchronize()?;
        Ok(aside)
    }

    /// Ends all waits for them.
    pub fn release(&self) {
        self.run(|stream| {
            self.awaited.iter().try_for_each(|&at| stream.write::<u32>(self.words.word(at)?, POISON as u32))
        });
    }

    /// Whether all streams that were made are held up, so that waits go on.
    pub fn is_stuck(&self) -> bool {
        self.stuck.load(Ordering::Acquire)
    }

    /// Their values, in the order of their places, if the device says.
    pub fn values(&self) -> Option<Vec<u64>> {
        let len = self.words.len();
        let read = self.run(|stream| stream.copy(self.copy.range().span(0, len)?, self.words.span(0, len)?));
        let value = |&at: &u64| {
            let mut word = [0; 4];
            self.copy.read(at as usize, &mut word).ok()?;
            Some(u32::from_le_bytes(word).into())
        };
        if read { self.awaited.iter().map(value).collect() } else { None }
    }

    /// Has a stream do something, and waits until it is done. Whether it was.
    fn run(&self, enqueue: impl Fn(&Stream) -> Result<(), DeviceError>) -> bool {
        // Whoever captures meanwhile would have looks at these streams refused.
        self.context.driver().beside_captures(|| self.try_streams(enqueue))
    }

    fn try_streams(&self, enqueue: impl Fn(&Stream) -> Result<(), DeviceError>) -> bool {
        let Tried { free, behind } = &mut *self.tried.lock().unwrap_or_else(PoisonError::into_inner);
        behind.retain(|stream| stream.is_done() != Ok(true));
        for _ in behind.len()..TRIES {
            let new = || Stream::new(&self.context, Priority::Highest).ok();
            let Some(stream) = free.take().or_else(new) else { return false };
            if enqueue(&stream).is_err() {
                return false;
            }
            let since = Instant::now();
            while since.elapsed() < SILENT {
                match stream.is_done() {
                    Ok(true) => {
                        *free = Some(stream);
                        self.stuck.store(false, Ordering::Release);
                        return true;
                    }
                    Ok(false) => std::thread::yield_now(),
                    Err(_) => return false,
                }
            }
            behind.push(stream);
        }
        self.stuck.store(true, Ordering::Release);
        false
    }
}
