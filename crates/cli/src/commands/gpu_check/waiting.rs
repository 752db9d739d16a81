//! Work that stands still while a stream waits: two questions that decide a design, each case in a
//! process of its own.
//!
//! ```text
//!   part locks, part queues            the process of a case
//!     start, CUDA_DEVICE_MAX_CONNECTIONS ---> streams, memory; one stream waits for a word of the host
//!              <---------------------------- ready
//!              <---------------------------- passes, or blocks: the bound of the case is over
//!     a process that says no more is ended:  the word is written, and all goes on
//!     that is an answer, too
//! ```
//!
//! Answers are findings. Neither is wrong: what they mean for streams that wait is said below the
//! table.
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
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use sidelane::device::{
    AuditKernels, CopyBatch, DeviceRange, LayerKernels, PinnedMemory, PlainMemory, Priority, Stream,
};
use sidelane::error::DeviceError;
use sidelane_testkit::device::whole;

use super::gpu::Gpu;
use super::report::{About, Answer, Checks};
use super::{Part, Process, Task};
use crate::command;
use crate::error::{CliError, failed};

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Case {
    Lock(Call),
    Queue(Sharing),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Call {
    Free,
    Load,
    FreeHost,
    Launches,
}

/// Hardware queues, and whether the other streams have another priority than the caller's.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Sharing {
    connections: u32,
    priorities: bool,
}

pub fn locks(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    for (call, name) in [
        (Call::Free, "cuMemFree"),
        (Call::Load, "cuModuleLoadData"),
        (Call::FreeHost, "cuMemFreeHost"),
        (Call::Launches, "4,000 launches on the stream that waits"),
    ] {
        let about = About::new(
            name,
            "whether another thread's batch of copies and word pass beside it while a stream waits",
        );
        ask(task, checks, about, Case::Lock(call))?;
    }
    Ok(())
}

pub fn queues(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    for (connections, priorities) in [1, 8, 32].into_iter().flat_map(|count| [(count, false), (count, true)])
    {
        let others = if priorities { "of the highest priority" } else { "of the same priority" };
        let what = format!("connections {connections}, other streams {others}");
        let about = About::new(
            &what,
            "whether copies of other streams pass one that waits, with a copy to the host behind its wait",
        );
        ask(task, checks, about, Case::Queue(Sharing { connections, priorities }))?;
    }
    Ok(())
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Said {
    /// All is made, and a stream waits.
    Ready,
    Answer(Answer, String),
    Failed(String),
}

/// Bound for a process to be ready: it starts the driver and compiles kernels.
const START: Duration = Duration::from_secs(60);

/// Bound for the driver to leave a context, behind an answer.
const END: Duration = Duration::from_secs(5);

/// Asks one case and tells its row. The queue test says how many hardware queues there are.
fn ask(task: &Task, checks: &mut Checks, about: About<'_>, case: Case) -> Result<(), CliError> {
    let task = Task { part: Part::Case, case: Some(case), ..*task };
    let variable = |count: u32| ("CUDA_DEVICE_MAX_CONNECTIONS".to_owned(), count.to_string().into());
    let connections = match case {
        Case::Lock(_) => None,
        Case::Queue(Sharing { connections, .. }) => Some(variable(connections)),
    };
    let Process { mut child, lines } = Process::start(&task, connections)?;
    let heard = listen(&lines, task.case_bound());
    if heard.is_err() || lines.recv_timeout(END) != Err(RecvTimeoutError::Disconnected) {
        let _ = child.kill();
    }
    let ended = child.wait().map_err(CliError::prepare("wait for a case"))?;
    match heard {
        Ok((answer, found)) => checks.answered(about, answer, found),
        Err(what) => checks.check(about, || Err(failed!("{what} ({ended})"))).map(drop),
    }
}

fn listen(hear: &Receiver<String>, bound: Duration) -> Result<(Answer, String), String> {
    match next(hear, START)? {
        Some(Said::Ready) => {}
        Some(said) => return Err(format!("it said {said:?} before it was ready")),
        None => return Err(format!("its process was not ready after {} s", START.as_secs())),
    }
    // It has a bound of its own: who says nothing for twice as long stands still as a whole.
    match next(hear, 2 * bound + END)? {
        Some(Said::Answer(answer, found)) => Ok((answer, found)),
        Some(said) => Err(format!("it said {said:?} where its answer should be")),
        None => Ok((Answer::Blocks, "BLOCKS: its process stood still as a whole, and was ended".to_owned())),
    }
}

/// The next line, if it comes in time.
fn next(hear: &Receiver<String>, patience: Duration) -> Result<Option<Said>, String> {
    match hear.recv_timeout(patience) {
        Ok(line) => match serde_json::from_str(&line) {
            Ok(Said::Failed(why)) => Err(why),
            Ok(said) => Ok(Some(said)),
            Err(_) => Err(format!("it said {line:?}")),
        },
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => Err("its process ended early".to_owned()),
    }
}

/// The process of a case. It reports on standard output, and ends with the process that started it.
pub fn case(task: &Task) -> Result<(), CliError> {
    // A stream that waits keeps its process alive.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    let done = match task.case {
        Some(Case::Lock(call)) => lock_case(task, call),
        Some(Case::Queue(sharing)) => queue_case(task, sharing),
        None => Err(failed!("a case without a question")),
    };
    done.or_else(|error| say(&Said::Failed(error.to_string())))
}

fn say(said: &Said) -> Result<(), CliError> {
    command::print(&serde_json::to_string(said).expect("texts are always JSON"))
}

/// Words of the host, a line each: what the caller waits for, that it waits, and what others tell.
const GATE: u64 = 0;
const REACHED: u64 = 64;
const TOLD: [u64; 3] = [128, 192, 256];
const WORDS: usize = 320;

/// A stream that waits for the gate, and the words that others write meanwhile.
struct Held {
    gpu: Gpu,
    caller: Stream,
    words: PinnedMemory,
}

impl Held {
    fn new(task: &Task) -> Result<Self, DeviceError> {
        let gpu = Gpu::open(task)?;
        let words = gpu.pinned(WORDS as u64)?;
        words.write(0, &[0; WORDS])?;
        Ok(Held { caller: gpu.stream()?, gpu, words })
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
    fn wait(&self, behind: impl FnOnce(&Stream) -> Result<(), DeviceError>) -> Result<(), CliError> {
        self.caller.write::<u64>(self.words.range().word(REACHED)?, 1)?;
        self.caller.wait::<u32>(self.words.range().word(GATE)?, 1)?;
        behind(&self.caller)?;
        self.gpu.until("a stream that comes to its wait", || Ok(self.seen(REACHED)? == 1))?;
        say(&Said::Ready)
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

fn joined(thread: ScopedJoinHandle<'_, Result<(), DeviceError>>) -> Result<(), CliError> {
    Ok(thread.join().map_err(|_| failed!("a thread panicked"))??)
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

fn lock_case(task: &Task, call: Call) -> Result<(), CliError> {
    let held = Held::new(task)?;
    let (gpu, context) = (&held.gpu, &held.gpu.context);
    let kernels = AuditKernels::load(context)?;
    let needs = match call {
        Call::Free => Needs::Plain(PlainMemory::new(context, 1 << 20)?),
        Call::FreeHost => Needs::Pinned(gpu.pinned(1 << 20)?),
        Call::Load | Call::Launches => Needs::Nothing,
    };
    let rows = gpu.memory(COPIES * COPY)?;
    let home = gpu.pinned(COPIES * COPY)?;
    let (other, mut batch) =
        (Stream::new(context, Priority::Highest)?, CopyBatch::with_capacity(context, COPIES as usize));
    for at in (0..COPIES).map(|nth| nth * COPY) {
        batch.push(home.range().span(at, COPY)?, rows.span(at, COPY)?)?;
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
        let (bound, start, mut behind) = (task.case_bound(), Instant::now(), None);
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
            say(&Said::Answer(answer, found))?;
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

fn queue_case(task: &Task, sharing: Sharing) -> Result<(), CliError> {
    let held = Held::new(task)?;
    let (gpu, context) = (&held.gpu, &held.gpu.context);
    let priority = if sharing.priorities { Priority::Highest } else { Priority::Normal };
    let others = (0..WAYS.len()).map(|_| Stream::new(context, priority)).collect::<Result<Vec<_>, _>>()?;
    let (rows, elsewhere) = (gpu.memory(BYTES)?, gpu.memory(BYTES)?);
    let (home, out, back) = (gpu.pinned(BYTES)?, gpu.pinned(BYTES)?, gpu.pinned(BYTES)?);
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
    held.wait(|caller| caller.copy(whole(home.range())?, whole(&rows)?))?;

    let (bound, mut landed) = (task.case_bound(), [false; 3]);
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
        let said = answer.map_err(CliError::from).and_then(|answer| match answer {
            Some(answer) => say(&Said::Answer(answer, queue_found(answer, &landed, bound.as_secs()))),
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
