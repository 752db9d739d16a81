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

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use sidelane::device::{
    AuditKernels, Context, CopyBatch, DeviceRange, Driver, PinnedMemory, PlainMemory, Priority, Stream,
};
use sidelane::error::DeviceError;

use super::Task;
use super::blocking::{Case, Said, Watch, ask, say};
use super::report::{About, Answer, Checks};
use crate::device::{allocate, stream, until};
use crate::error::{CliError, failed};

/// Call of the second thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Call {
    Free,
    Load,
    FreeHost,
    Launches,
}

const ALL: [(Call, &str); 4] = [
    (Call::Free, "cuMemFree"),
    (Call::Load, "cuModuleLoadData"),
    (Call::FreeHost, "cuMemFreeHost"),
    (Call::Launches, "4,000 launches on the stream that waits"),
];

/// More than the launch queue of a stream holds.
const LAUNCHES: u64 = 4000;

/// Copies of a round and bytes of each, as of a small planned call.
const COPIES: u64 = 8;
const COPY: u64 = 16 << 10;

/// Rounds that must pass at least.
const ROUNDS: u64 = 10;

/// The part of a case's bound in which rounds must go on, since the call may begin late.
const WINDOW: u32 = 4;

/// Words, a line each: what the caller waits for; that it waits; rounds; launches.
const GATE: u64 = 0;
const REACHED: u64 = 64;
const DONE: u64 = 128;
const TOUCHED: u64 = 192;
const WORDS: usize = 256;

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    for (call, name) in ALL {
        let about = About::new(
            name,
            "whether another thread's batch of copies and word pass beside it while a stream waits",
        );
        ask(task, checks, about, Case::Lock(call), None)?;
    }
    Ok(())
}

/// Resources of a call, made before any stream waits.
enum Needs {
    Plain(PlainMemory),
    Pinned(PinnedMemory),
    Nothing,
}

/// The process of one case.
pub fn case(task: &Task, call: Call) -> Result<(), CliError> {
    let context = Driver::open()?.context(task.device)?;
    let bench = Bench::new(&context)?;
    let needs = match call {
        Call::Free => Needs::Plain(PlainMemory::new(&context, 1 << 20)?),
        Call::FreeHost => Needs::Pinned(PinnedMemory::new(&context, 1 << 20)?),
        Call::Load | Call::Launches => Needs::Nothing,
    };
    // Once before anything waits: all of it is loaded, and known to the driver.
    let mut copier = Copier::new(&context)?;
    copier.round(&bench, 1, &AtomicBool::new(false))?;
    bench.kernels.touch(&bench.caller, bench.words.range().word(TOUCHED)?)?;
    bench.caller.write::<u64>(bench.words.range().word(REACHED)?, 1)?;
    bench.caller.wait::<u32>(bench.words.range().word(GATE)?, 1)?;
    until("a stream that comes to its wait", task.patience(), || bench.is(REACHED, 1))?;
    say(&Said::Ready)?;

    let [calling, returned, over] = [(); 3].map(|()| AtomicBool::new(false));
    let (rounds, launches) = (AtomicU64::new(1), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let caller = scope.spawn(|| {
            calling.store(true, Ordering::Release);
            let called = bench.call(call, needs, &launches);
            returned.store(true, Ordering::Release);
            called
        });
        let copying = scope.spawn(|| {
            while !calling.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            while !over.load(Ordering::Acquire) {
                let next = rounds.load(Ordering::Relaxed) + 1;
                copier.round(&bench, next, &over)?;
                rounds.store(next, Ordering::Release);
            }
            Ok::<(), DeviceError>(())
        });
        let (bound, start) = (task.case_bound(), Instant::now());
        let mut watch = Watch::new(bound);
        let mut behind = None;
        let answer = loop {
            let now = rounds.load(Ordering::Acquire);
            if returned.load(Ordering::Acquire) {
                behind.get_or_insert(now);
            }
            // Either the call came back, and rounds went on; or it did not, and they did for a good
            // while.
            let window = now > ROUNDS && start.elapsed() > bound / WINDOW;
            let enough = behind.map_or(window, |then| now >= then + ROUNDS);
            if copying.is_finished() && !enough {
                break None;
            }
            if let Some(answer) = watch.look(now, enough) {
                break Some(answer);
            }
            std::thread::yield_now();
        };
        if let Some(answer) = answer {
            let returned = returned.load(Ordering::Acquire);
            let (rounds, launches) = (rounds.load(Ordering::Acquire) - 1, launches.load(Ordering::Acquire));
            say(&Said::Answer(answer, found(answer, call, returned, rounds, launches, bound.as_secs())))?;
        }
        over.store(true, Ordering::Release);
        // The host's word: no call of the driver.
        bench.words.word(GATE as usize)?.store(1, Ordering::Release);
        let panicked = || failed!("a thread panicked");
        let copied = copying.join().map_err(|_| panicked())?;
        let called = caller.join().map_err(|_| panicked())?;
        copied?;
        called?;
        Ok(())
    })
}

fn found(answer: Answer, call: Call, returned: bool, rounds: u64, launches: u64, bound: u64) -> String {
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

/// Resources of all threads.
struct Bench {
    context: Arc<Context>,
    kernels: AuditKernels,
    caller: Stream,
    words: PinnedMemory,
}

impl Bench {
    fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let words = PinnedMemory::new(context, WORDS)?;
        words.write(0, &[0; WORDS])?;
        let kernels = AuditKernels::load(context)?;
        Ok(Bench { context: context.clone(), kernels, caller: stream(context)?, words })
    }

    fn is(&self, at: u64, value: u64) -> Result<bool, DeviceError> {
        Ok(self.words.word(at as usize)?.load(Ordering::Acquire) == value)
    }

    fn call(&self, call: Call, needs: Needs, launches: &AtomicU64) -> Result<(), DeviceError> {
        match needs {
            Needs::Plain(memory) => return memory.free(),
            Needs::Pinned(memory) => drop(memory),
            Needs::Nothing if call == Call::Load => drop(AuditKernels::load(&self.context)?),
            Needs::Nothing => {
                for _ in 0..LAUNCHES {
                    self.kernels.touch(&self.caller, self.words.range().word(TOUCHED)?)?;
                    launches.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }
}

/// The third thread's stream and batch.
struct Copier {
    stream: Stream,
    batch: CopyBatch,
    _rows: DeviceRange,
    _home: PinnedMemory,
}

impl Copier {
    fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let (rows, home) =
            (allocate(context, COPIES * COPY)?, PinnedMemory::new(context, (COPIES * COPY) as usize)?);
        let mut batch = CopyBatch::with_capacity(context, COPIES as usize);
        for at in (0..COPIES).map(|nth| nth * COPY) {
            batch.push(home.range().span(at, COPY)?, rows.span(at, COPY)?)?;
        }
        Ok(Copier { stream: Stream::new(context, Priority::Highest)?, batch, _rows: rows, _home: home })
    }

    /// A batch of copies and a word behind it, until the host sees the word.
    fn round(&mut self, bench: &Bench, number: u64, over: &AtomicBool) -> Result<(), DeviceError> {
        match self.stream.takes_batches() {
            true => self.stream.copy_batch(&mut self.batch)?,
            false => self.stream.copy_each(&self.batch)?,
        }
        self.stream.write::<u64>(bench.words.range().word(DONE)?, number)?;
        while !bench.is(DONE, number)? && !over.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        Ok(())
    }
}
