//! A stream for the planner that the caller's stream cannot hold up.
//!
//! A device takes the work of all streams from a few hardware queues, each strictly in order. While the caller's stream
//! waits for the planner, everything behind it in its queue waits too: were the planner's stream there, it would wait for
//! itself. Nobody says which queue a stream has, so it is tried:
//!
//! ```text
//!   caller's stream     wait until released           (at the head of its queue)
//!   planner's stream    write: here                   seen before the release: another queue
//! ```
//!
//! The write is a call of the driver while a stream waits. If another thread is in a call that
//! waits for that stream (memory that is freed, a module that is loaded), the driver may hold this
//! call up until the stream goes on. So a watch releases the stream after a while without a call of
//! the driver, and builds of one process make their trials one after the other.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::device::{Context, PinnedMemory, Priority, Stream};
use crate::error::DeviceError;

/// Streams take the queues in turn: if the second stands behind the caller's, too, there is one queue only.
const TRIES: u32 = 4;
/// A stream that is not heard for so long stands behind the caller's.
const SILENT: Duration = Duration::from_secs(1);

/// No other build of this process has a stream wait, loads kernels or frees memory for a trial,
/// until the guard is dropped.
pub(super) fn alone() -> MutexGuard<'static, ()> {
    static TRIAL: Mutex<()> = Mutex::new(());
    TRIAL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A new stream, of the highest priority, in another queue than `caller`'s. Waits until that is idle.
pub(super) fn from(context: &Arc<Context>, caller: &Stream) -> Result<Stream, DeviceError> {
    caller.synchronize()?;
    let words = PinnedMemory::new(context, 128)?;
    let mut behind = Vec::new();
    for _ in 0..TRIES {
        let stream = Stream::new(context, Priority::Highest)?;
        if is_apart(&words, caller, &stream)? {
            return Ok(stream);
        }
        // Kept meanwhile: its queue's turn is over.
        behind.push(stream);
    }
    Err(DeviceError::SharedQueue { device: context.device(), tried: TRIES })
}

fn is_apart(words: &PinnedMemory, caller: &Stream, stream: &Stream) -> Result<bool, DeviceError> {
    let (released, here) = (words.word(0)?, words.word(64)?);
    released.store(0, Ordering::Release);
    here.store(0, Ordering::Release);
    caller.wait(words.range().word::<u32>(0)?, 1)?;
    let (over, heard) = mpsc::channel::<()>();
    let apart = std::thread::scope(|scope| {
        let watch = move || {
            if heard.recv_timeout(SILENT) == Err(RecvTimeoutError::Timeout) {
                released.store(1, Ordering::Release);
            }
        };
        // Without a watch the trial is as good, but for a driver that holds the write up.
        let watched = std::thread::Builder::new().spawn_scoped(scope, watch).is_ok();
        let since = Instant::now();
        let enqueued = stream.write(words.range().word::<u32>(64)?, 1);
        let patient = || match watched {
            true => released.load(Ordering::Acquire) == 0,
            false => since.elapsed() < SILENT,
        };
        while enqueued.is_ok() && here.load(Ordering::Acquire) == 0 && patient() {
            std::thread::yield_now();
        }
        // What is seen behind the release shows nothing.
        let apart = here.load(Ordering::Acquire) != 0 && released.load(Ordering::Acquire) == 0;
        released.store(1, Ordering::Release);
        drop(over);
        enqueued.map(|()| apart)
    })?;
    caller.synchronize()?;
    stream.synchronize()?;
    Ok(apart)
}
