//! The queue test: does a stream that waits, with a copy to the host behind its wait, hold up
//! copies of other streams?
//!
//! ```text
//!   caller's stream   |== waits for a word of the host ==| copy to the host
//!   three others        copy to the GPU, word    copy to the host, word    copy on the GPU, word       pass?
//! ```
//!
//! A GPU takes the work of all streams from a few queues, each in order, and has queues for copies
//! beside them. Which streams share one is the driver's: `CUDA_DEVICE_MAX_CONNECTIONS` says how
//! many there are, and priorities may have their own.

use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use sidelane::device::{CopyBatch, DeviceRange, Driver, PinnedMemory, Priority, Stream};
use sidelane::error::DeviceError;

use super::Task;
use super::blocking::{Case, Said, Watch, ask, say};
use super::report::{About, Answer, Checks};
use crate::device::{allocate, stream, until, whole};
use crate::error::{CliError, failed};

/// Hardware queues, and whether the other streams have another priority than the caller's.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Sharing {
    connections: u32,
    priorities: bool,
}

const CONNECTIONS: [u32; 3] = [1, 8, 32];

const BYTES: u64 = 64 << 10;

/// Words, a line each: what the caller waits for, that it waits, and one for each direction.
const GATE: u64 = 0;
const REACHED: u64 = 64;
const LANDED: [u64; 3] = [128, 192, 256];
const WORDS: usize = 320;

/// Copies of other streams.
const WAYS: [&str; 3] = ["to the GPU", "to the host", "on the GPU"];

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    for connections in CONNECTIONS {
        for priorities in [false, true] {
            let others = if priorities { "of the highest priority" } else { "of the same priority" };
            let what = format!("connections {connections}, other streams {others}");
            let about = About::new(
                &what,
                "whether copies of other streams pass one that waits, with a copy to the host behind its wait",
            );
            let sharing = Sharing { connections, priorities };
            ask(task, checks, about, Case::Queue(sharing), Some(connections))?;
        }
    }
    Ok(())
}

/// The process of one case.
pub fn case(task: &Task, sharing: Sharing) -> Result<(), CliError> {
    let context = Driver::open()?.context(task.device)?;
    let words = PinnedMemory::new(&context, WORDS)?;
    words.write(0, &[0; WORDS])?;
    let caller = stream(&context)?;
    let priority = if sharing.priorities { Priority::Highest } else { Priority::Normal };
    let others = (0..WAYS.len()).map(|_| Stream::new(&context, priority)).collect::<Result<Vec<_>, _>>()?;
    let (rows, elsewhere) = (allocate(&context, BYTES)?, allocate(&context, BYTES)?);
    let pinned = || PinnedMemory::new(&context, BYTES as usize);
    let (home, out, back) = (pinned()?, pinned()?, pinned()?);
    // To the GPU the first half, on the GPU the second: no two write the same bytes.
    let half = BYTES / 2;
    let ways: [(&DeviceRange, &DeviceRange, u64); 3] =
        [(&elsewhere, out.range(), 0), (back.range(), &rows, 0), (&elsewhere, &rows, half)];
    let mut batches = Vec::new();
    for (to, from, at) in ways {
        let mut batch = CopyBatch::with_capacity(&context, 1);
        batch.push(to.span(at, half)?, from.span(at, half)?)?;
        batches.push(batch);
    }
    caller.write::<u64>(words.range().word(REACHED)?, 1)?;
    caller.wait::<u32>(words.range().word(GATE)?, 1)?;
    caller.copy(whole(home.range())?, whole(&rows)?)?;
    let seen =
        |at: u64| -> Result<bool, DeviceError> { Ok(words.word(at as usize)?.load(Ordering::Acquire) != 0) };
    until("a stream that comes to its wait", task.patience(), || seen(REACHED))?;
    say(&Said::Ready)?;

    let bound = task.case_bound();
    let answered = std::thread::scope(|scope| {
        // A call that is held up tells no less than a copy that is.
        let enqueue = scope.spawn(|| {
            for ((other, batch), at) in others.iter().zip(&mut batches).zip(LANDED) {
                copy(other, batch)?;
                other.write::<u64>(words.range().word(at)?, 1)?;
            }
            Ok::<(), DeviceError>(())
        });
        let mut watch = Watch::new(bound);
        let answered = loop {
            let landed = match LANDED.iter().map(|&at| seen(at)).collect::<Result<Vec<_>, _>>() {
                Ok(landed) => landed,
                Err(error) => break Err(CliError::from(error)),
            };
            let count = landed.iter().filter(|&&landed| landed).count();
            if let Some(answer) = watch.look(count as u64, count == WAYS.len()) {
                break say(&Said::Answer(answer, found(answer, &landed, bound.as_secs())));
            }
            std::thread::yield_now();
        };
        // The host's word: no call of the driver.
        words.word(GATE as usize)?.store(1, Ordering::Release);
        let enqueued = enqueue.join().map_err(|_| failed!("a thread panicked"))?;
        enqueued?;
        answered
    });
    answered?;
    for stream in others.iter().chain([&caller]) {
        until("streams that were let go", task.patience(), || stream.is_done())?;
    }
    Ok(())
}

fn copy(stream: &Stream, batch: &mut CopyBatch) -> Result<(), DeviceError> {
    if stream.takes_batches() { stream.copy_batch(batch) } else { stream.copy_each(batch) }
}

fn found(answer: Answer, landed: &[bool], bound: u64) -> String {
    let of = |wanted: bool| -> String {
        let ways = WAYS.iter().zip(landed).filter(|&(_, &landed)| landed == wanted);
        ways.map(|(way, _)| *way).collect::<Vec<_>>().join(", ")
    };
    match answer {
        Answer::Passes => format!("passes: copies {}", of(true)),
        Answer::Blocks if landed.iter().any(|&landed| landed) => {
            format!("BLOCKS: no copy {} in {bound} s; copies {} pass", of(false), of(true))
        }
        Answer::Blocks => format!("BLOCKS: no copy {} in {bound} s", of(false)),
    }
}
