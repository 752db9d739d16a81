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

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::device::{Context, PinnedMemory, Priority, Stream};
use crate::error::DeviceError;

/// Streams take the queues in turn: if the second stands behind the caller's, too, there is one queue only.
const TRIES: u32 = 4;
/// A stream that is not heard for so long stands behind the caller's.
const SILENT: Duration = Duration::from_secs(1);

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
    let enqueued = stream.write(words.range().word::<u32>(64)?, 1);
    let since = Instant::now();
    while enqueued.is_ok() && here.load(Ordering::Acquire) == 0 && since.elapsed() < SILENT {
        std::thread::yield_now();
    }
    let apart = here.load(Ordering::Acquire) != 0;
    released.store(1, Ordering::Release);
    enqueued?;
    caller.synchronize()?;
    stream.synchronize()?;
    Ok(apart)
}
