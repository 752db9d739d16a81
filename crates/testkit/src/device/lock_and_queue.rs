//! Work that stands still while a stream waits: two questions that decide a design, each asked in a
//! process of its own. Answers are findings. Neither is wrong.
//!
//! The lock test: does a thread's copy pass while a stream waits, and another thread is in a call
//! of the driver beside it?
//!
//! ```text
//!   caller's stream     |== waits for a word of the host ===================================|
//!   a second thread         cuMemFree, cuModuleLoadData, cuMemFreeHost, or 4,000 launches there
//!   a third thread          batch of copies, word | batch of copies, word | ...      passes?
//! ```
//!
//! The third thread does what one does on whose copies the stream waits. If it is held up until the
//! stream goes on, that waits for ever.
//!
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

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use sidelane::device::{
    AuditKernels, CopyBatch, DeviceRange, LayerKernels, PinnedMemory, PlainMemory, Priority, Stream,
};
use sidelane::error::DeviceError;

use super::gpu::Gpu;
use super::whole;
use crate::TestError;

/// Whether something goes on while a stream waits, or while every multiprocessor is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// It goes on.
    Passes,
    /// It stands still.
    Blocks,
}

/// A question.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Case {
    /// Of the lock test.
    Lock(Call),
    /// Of the queue test.
    Queue(Sharing),
}

/// A call of the driver that a second thread is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Call {
    /// `cuMemFree`
    Free,
    /// `cuModuleLoadData`
    Load,
    /// `cuMemFreeHost`
    FreeHost,
    /// More launches than the queue of the stream that waits holds.
    Launches,
}

/// Hardware queues, and whether the other streams have another priority than the caller's.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Sharing {
    /// `CUDA_DEVICE_MAX_CONNECTIONS`, of which the process has so many.
    pub connections: u32,
    /// Whether the others have the highest.
    pub priorities: bool,
}

/// A word of the process of a case.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Said {
    /// All is made, and a stream waits.
    Ready,
    /// The result. The stream goes on behind it, if it can.
    Answer(Answer, String),
    /// The case could not be asked.
    Failed(String),
}

/// The GPU of a case, how long something may stand still, and who hears of it.
struct Asker<'a> {
    gpu: &'a Gpu,
    bound: Duration,
    say: &'a (dyn Fn(&Said) -> Result<(), TestError> + Sync),
}

impl Case {
    /// Asks it of this process, and tells that a stream waits, and then the answer. What has stood
    /// still for the bound blocks. Where a call never comes back this does not either.
    pub fn ask(
        self,
        gpu: &Gpu,
        bound: Duration,
        say: &(dyn Fn(&Said) -> Result<(), TestError> + Sync),
    ) -> Result<(), TestError> {
        let asker = Asker { gpu, bound, say };
        match self {
            Case::Lock(call) => lock_case(&asker, call),
            Case::Queue(sharing) => queue_case(&asker, sharing),
        }
    }
}

/// Words of the host, a line each: what the caller waits for, that it waits, and what others tell.
const GATE: u64 = 0;
const REACHED: u64 = 64;
const TOLD: [u64; 3] = [128, 192, 256];
const WORDS: usize = 320;

/// A stream that waits for the gate, and the words that others write meanwhile.
struct WaitingStream<'a> {
    asker: &'a Asker<'a>,
    caller: Stream,
    words: PinnedMemory,
}

impl<'a> WaitingStream<'a> {
    fn new(asker: &'a Asker<'a>) -> Result<Self, DeviceError> {
        let gpu = asker.gpu;
        let words = gpu.pinned(WORDS as u64)?;
        words.write(0, &[0; WORDS])?;
        Ok(WaitingStream { caller: gpu.stream()?, asker, words })
    }

    fn copy(&self, stream: &Stream, batch: &mut CopyBatch, at: u64, word: u64) -> Result<(), DeviceError> {
        match stream.takes_batches() {
            true => stream.copy_batch(batch)?,
            false => stream.copy_each(batch)?,
        }
        stream.write::<u64>(self.words.range().word(at)?, word)
    }

    fn seen(&self, at: u64) -> Result<u64, DeviceError> {
        Ok(self.words.word(at as usize)?.load(Ordering::Acquire))
    }

    /// Has the caller wait, with more behind its wait, and says so.
    fn wait(&self, behind: impl FnOnce(&Stream) -> Result<(), DeviceError>) -> Result<(), TestError> {
        self.caller.write::<u64>(self.words.range().word(REACHED)?, 1)?;
        self.caller.wait::<u32>(self.words.range().word(GATE)?, 1)?;
        behind(&self.caller)?;
        self.asker.gpu.until("a stream that comes to its wait", || Ok(self.seen(REACHED)? == 1))?;
        (self.asker.say)(&Said::Ready)
    }

    /// Lets the caller go. The host's word: no call of the driver.
    fn open(&self) -> Result<(), DeviceError> {
        self.words.word(GATE as usize)?.store(1, Ordering::Release);
        Ok(())
    }
}

/// Whether something goes on, or stands still for as long as the bound: `look` gives how far it is,
/// and whether that is enough. None where it gives nothing.
fn watch(
    bound: Duration,
    mut look: impl FnMut() -> Result<Option<(u64, bool)>, DeviceError>,
) -> Result<Option<Answer>, DeviceError> {
    let (mut moved, mut seen) = (Instant::now(), 0);
    while let Some((now, enough)) = look()? {
        if now != seen {
            (seen, moved) = (now, Instant::now());
        }
        if enough {
            return Ok(Some(Answer::Passes));
        }
        if moved.elapsed() > bound {
            return Ok(Some(Answer::Blocks));
        }
        nap();
    }
    Ok(None)
}

/// Between two looks: short beside a copy, and long enough to leave the processor to others.
fn nap() {
    std::thread::sleep(Duration::from_micros(50));
}

fn joined(thread: ScopedJoinHandle<'_, Result<(), DeviceError>>) -> Result<(), TestError> {
    Ok(thread.join().map_err(|_| TestError::Wrong("a thread panicked".into()))??)
}

/// More than the launch queue of a stream holds.
const LAUNCHES: u64 = 4000;

/// Copies of a round and bytes of each, as of a small planned call.
const COPIES: u64 = 8;
const COPY: u64 = 16 << 10;

/// Rounds that must pass then.
const ROUNDS: u64 = 10;

const DONE: u64 = TOLD[0];
const TOUCHED: u64 = TOLD[1];

/// Resources of a call, made before any stream waits.
enum Needs {
    Plain(PlainMemory),
    Pinned(PinnedMemory),
    Nothing,
}

fn lock_case(asker: &Asker<'_>, call: Call) -> Result<(), TestError> {
    let held = WaitingStream::new(asker)?;
    let (gpu, context) = (asker.gpu, &asker.gpu.context);
    let kernels = AuditKernels::load(context)?;
    let needs = match call {
        Call::Free => Needs::Plain(PlainMemory::new(context, 1 << 20)?),
        Call::FreeHost => Needs::Pinned(gpu.pinned(1 << 20)?),
        Call::Load | Call::Launches => Needs::Nothing,
    };
    let rows = gpu.memory(COPIES * COPY)?;
    let host = gpu.pinned(COPIES * COPY)?;
    let (other, mut batch) =
        (Stream::new(context, Priority::Highest)?, CopyBatch::with_capacity(context, COPIES as usize));
    for at in (0..COPIES).map(|nth| nth * COPY) {
        batch.push(host.range().span(at, COPY)?, rows.span(at, COPY)?)?;
    }
    let [calling, returned, over] = [(); 3].map(|()| AtomicBool::new(false));
    // A batch of copies and a word behind it, until the host sees the word.
    let mut round = |number: u64| -> Result<(), DeviceError> {
        held.copy(&other, &mut batch, DONE, number)?;
        while held.seen(DONE)? != number && !over.load(Ordering::Acquire) {
            nap();
        }
        Ok(())
    };
    // Once before anything waits: all of it is loaded, and known to the driver.
    round(1)?;
    let touched = || held.words.range().word(TOUCHED);
    kernels.touch(&held.caller, touched()?)?;
    held.wait(|_| Ok(()))?;

    let (rounds, launches) = (AtomicU64::new(1), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let caller = scope.spawn(|| {
            calling.store(true, Ordering::Release);
            let called = match needs {
                Needs::Plain(memory) => memory.free(),
                Needs::Pinned(memory) => {
                    drop(memory);
                    Ok(())
                }
                // A module that is not there yet.
                Needs::Nothing if call == Call::Load => LayerKernels::load(context).map(drop),
                Needs::Nothing => (0..LAUNCHES).try_for_each(|_| {
                    kernels.touch(&held.caller, touched()?)?;
                    launches.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                }),
            };
            returned.store(true, Ordering::Release);
            called
        });
        let copying = scope.spawn(|| {
            while !calling.load(Ordering::Acquire) {
                nap();
            }
            while !over.load(Ordering::Acquire) {
                let next = rounds.load(Ordering::Relaxed) + 1;
                round(next)?;
                rounds.store(next, Ordering::Release);
            }
            Ok(())
        });
        let (bound, start, mut behind) = (asker.bound, Instant::now(), None);
        let answer = watch(bound, || {
            let now = rounds.load(Ordering::Acquire);
            // Rounds must go on behind the call's return, or behind the bound. Nothing tells when
            // the caller's thread comes to the driver's lock: earlier rounds show nothing.
            if returned.load(Ordering::Acquire) || start.elapsed() > bound {
                behind.get_or_insert(now);
            }
            // Slow rounds are rounds: the process that hears the answer waits twice the bound.
            let late = start.elapsed() > 2 * bound;
            let enough = behind.is_some_and(|then| now >= then + ROUNDS || late && now > then);
            Ok((enough || !copying.is_finished()).then_some((now, enough)))
        })?;
        if let Some(answer) = answer {
            let returned = returned.load(Ordering::Acquire);
            let (rounds, launches) = (rounds.load(Ordering::Acquire) - 1, launches.load(Ordering::Acquire));
            let found = lock_found(answer, call, returned, rounds, launches, bound.as_secs());
            (asker.say)(&Said::Answer(answer, found))?;
        }
        over.store(true, Ordering::Release);
        held.open()?;
        joined(copying).and(joined(caller))
    })
}

fn lock_found(answer: Answer, call: Call, returned: bool, rounds: u64, launches: u64, bound: u64) -> String {
    let itself = match (call, returned) {
        (Call::Launches, false) => format!("{launches} of {LAUNCHES} launches were taken, then they waited"),
        (Call::Launches, true) => format!("all {LAUNCHES} launches were taken"),
        (_, false) => "the call itself waits for the stream".to_owned(),
        (_, true) => "the call itself came back".to_owned(),
    };
    match answer {
        Answer::Passes => format!("passes: {rounds} rounds of another thread; {itself}"),
        Answer::Blocks => {
            format!("BLOCKS: another thread made {rounds} rounds, and none in {bound} s; {itself}")
        }
    }
}

const BYTES: u64 = 64 << 10;

const WAYS: [&str; 3] = ["to the GPU", "to the host", "on the GPU"];

fn queue_case(asker: &Asker<'_>, sharing: Sharing) -> Result<(), TestError> {
    let held = WaitingStream::new(asker)?;
    let (gpu, context) = (asker.gpu, &asker.gpu.context);
    let priority = if sharing.priorities { Priority::Highest } else { Priority::Normal };
    let others = (0..WAYS.len()).map(|_| Stream::new(context, priority)).collect::<Result<Vec<_>, _>>()?;
    let (rows, elsewhere) = (gpu.memory(BYTES)?, gpu.memory(BYTES)?);
    let (host, out, back) = (gpu.pinned(BYTES)?, gpu.pinned(BYTES)?, gpu.pinned(BYTES)?);
    // To the GPU the first half, on the GPU the second: no two write the same bytes.
    let half = BYTES / 2;
    let ways: [(&DeviceRange, &DeviceRange, u64); 3] =
        [(&elsewhere, out.range(), 0), (back.range(), &rows, 0), (&elsewhere, &rows, half)];
    let mut batches = Vec::new();
    for (to, from, at) in ways {
        let mut batch = CopyBatch::with_capacity(context, 1);
        batch.push(to.span(at, half)?, from.span(at, half)?)?;
        batches.push(batch);
    }
    held.wait(|caller| caller.copy(whole(host.range())?, whole(&rows)?))?;

    let (bound, mut landed) = (asker.bound, [false; 3]);
    std::thread::scope(|scope| {
        // A call that is held up tells no less than a copy that is.
        let enqueue = scope.spawn(|| {
            let copies = others.iter().zip(&mut batches).zip(TOLD);
            copies.into_iter().try_for_each(|((other, batch), at)| held.copy(other, batch, at, 1))
        });
        let answer = watch(bound, || {
            for (landed, at) in landed.iter_mut().zip(TOLD) {
                *landed = held.seen(at)? != 0;
            }
            let count = landed.iter().filter(|&&landed| landed).count();
            Ok(Some((count as u64, count == WAYS.len())))
        });
        let said = answer.map_err(TestError::from).and_then(|answer| match answer {
            Some(answer) => (asker.say)(&Said::Answer(answer, queue_found(answer, &landed, bound.as_secs()))),
            None => Ok(()),
        });
        held.open()?;
        joined(enqueue).and(said)
    })?;
    for stream in others.iter().chain([&held.caller]) {
        gpu.finish(stream, "streams that were let go")?;
    }
    Ok(())
}

fn queue_found(answer: Answer, landed: &[bool], bound: u64) -> String {
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
