//! A planner in the process against one in a helper process, while the caller launches kernels.
//!
//! A planned exchange has its planner in the process: its calls of the driver take the locks of the context that the caller's
//! take, too. A process of its own has its own context, and a GPU that takes turns between two. Which of them costs less is
//! asked of a planner in small: it hears a bell, has a batch of copies made, and has a word written behind them.
//!
//! ```text
//!   caller's stream     bell 1 | wait 1 | bell 2 | wait 2 | ... | kernels, launched one by one while it waits
//!   planner             hears 1: batch of copies, ring 1 | hears 2 ...   a thread here, or a helper process
//! ```
//!
//! Launches go on the stream that waits, as a caller's do that runs ahead. If they hold up the
//! planner whom that stream waits for, nothing goes on: then a watch lets the stream go by a word
//! of the host, and the row is wrong.

mod helper;
mod serve;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Instant;

use helper::Helper;
use serve::{BELL, COPIES, COPY, Planner, RING, ROWS, TOUCHED, WORDS};
use sidelane::device::{Allocation, AuditKernels, Context, Driver, MemoryOperations, Reservation, Stream};
use sidelane::error::DeviceError;
use sidelane::memory::SharedPinned;

use super::check::{About, Checks};
use super::driver::stream;
use super::memory::{Random, finish, same, write};
use super::row::State;
use super::task::Task;
use super::timer::Timer;
use crate::error::{CliError, failed};

pub use helper::main as help;

/// Bells of a list.
const TURNS: u32 = 60;
/// Launches of a round.
const LAUNCHES: usize = 300;

const OPEN: Option<&str> = Some("the same where copies go to other GPUs");

/// Where the planner is.
#[derive(Clone, Copy, PartialEq)]
enum Where {
    Nowhere,
    Here,
    Helper,
}

impl Where {
    fn words(self) -> &'static str {
        match self {
            Where::Nowhere => "no planner beside",
            Where::Here => "a planner in the process",
            Where::Helper => "a planner in a helper process",
        }
    }
}

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let context = Driver::open()?.context(task.device)?;
    let mut bench = Bench::new(task, &context)?;
    bench.launches(checks, Where::Nowhere)?;
    bench.beside_thread(checks)?;
    if !context.facts().several_processes {
        let about =
            About { what: Where::Helper.words(), shows: "nothing: the row above stands alone", open: None };
        let found = "the GPU's compute mode allows one process at a time (nvidia-smi -c DEFAULT)".to_owned();
        return checks.tell(about, State::Skipped, found, None);
    }
    bench.beside_helper(checks)
}

struct Bench<'a> {
    task: &'a Task,
    stand_in: bool,
    timer: Timer,
    kernels: AuditKernels,
    context: Arc<Context>,
    /// What planners copy, and what it holds.
    rows: Arc<Allocation>,
    expected: Vec<u8>,
    /// Words and where rows go.
    shared: SharedPinned,
    calls: Stream,
    /// Bells rung so far.
    rung: u32,
}

impl<'a> Bench<'a> {
    fn new(task: &'a Task, context: &Arc<Context>) -> Result<Self, CliError> {
        let calls = stream(context)?;
        let rows = Allocation::new(context, ROWS)?;
        let expected = Random(7).bytes(ROWS as usize);
        let there = Reservation::new(context, 1, rows.bytes())?.map(0, &rows, &[context.device()])?;
        write(&calls, &there.part(0, ROWS)?, &expected)?;
        Ok(Bench {
            task,
            stand_in: context.driver().is_stand_in(),
            timer: Timer::new(context, task.patience())?,
            kernels: AuditKernels::load(context)?,
            context: context.clone(),
            rows,
            expected,
            shared: SharedPinned::new(context, WORDS + ROWS)?,
            calls,
            rung: 0,
        })
    }

    fn beside_thread(&mut self, checks: &mut Checks) -> Result<(), CliError> {
        let mut planner = Planner::new(&self.context, &self.rows, self.shared.memory(), self.rung)?;
        let over = AtomicBool::new(false);
        let (told, served) = std::thread::scope(|scope| {
            let thread = scope.spawn(|| planner.serve(|| over.load(Ordering::Acquire)));
            let told = self.turns(checks, Where::Here);
            over.store(true, Ordering::Release);
            let panicked = || failed!("the planner panicked");
            (told, thread.join().map_err(|_| panicked()))
        });
        served??;
        told
    }

    fn beside_helper(&mut self, checks: &mut Checks) -> Result<(), CliError> {
        let helper = Helper::start(self.task, &self.rows, &self.shared, self.rung)?;
        let told = self.turns(checks, Where::Helper);
        let ended = helper.end();
        told.and(ended)
    }

    /// Both rows of a planner, and that it has copied what it should.
    fn turns(&mut self, checks: &mut Checks, place: Where) -> Result<(), CliError> {
        let to = self.shared.memory();
        to.write(WORDS as usize, &vec![0; ROWS as usize])?;
        self.quiet(checks, place)?;
        let mut seen = vec![0; ROWS as usize];
        self.shared.memory().read(WORDS as usize, &mut seen)?;
        same(format!("rows copied by {}", place.words()), &seen, &self.expected)?;
        self.launches(checks, place)
    }

    /// From bell to ring, while nobody launches anything.
    fn quiet(&mut self, checks: &mut Checks, place: Where) -> Result<(), CliError> {
        let Bench { task, context, timer, calls, shared, rung, .. } = self;
        let rounds = (task.few(50, 4), TURNS as usize);
        let samples = timer.time(calls, rounds, || calls.operate(&mut bells(context, shared, rung)?))?.device;
        let what = format!("from bell to ring, {}", place.words());
        let shows =
            "the planner hears, a batch of copies, a word behind it: the least that a planned call waits";
        let found = format!("{COPIES} copies of {} KiB to the host a time", COPY >> 10);
        checks.measured(About { what: &what, shows: self.shows(shows), open: OPEN }, &samples, found)
    }

    /// Launches by the caller, while the planner has as much to do as it can.
    fn launches(&mut self, checks: &mut Checks, place: Where) -> Result<(), CliError> {
        let (mut samples, mut turns) = (Vec::new(), Vec::new());
        for round in 0..=self.task.few(20, 3) {
            let start = Instant::now();
            if place != Where::Nowhere {
                self.calls.operate(&mut bells(&self.context, &self.shared, &mut self.rung)?)?;
            }
            let times = self.watched(|| self.launch())?;
            if round > 0 {
                samples.extend(times);
            }
            finish(&self.calls, "planned calls", self.task.patience())?;
            if round > 0 {
                turns.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        let what = format!("a launch by the caller, {}", place.words());
        let shows = match place {
            Where::Nowhere => "what the next rows are compared with",
            _ => "whether the planner's calls of the driver hold up the caller's",
        };
        let round = super::row::Time::of(&turns).p50_us;
        let beside = if place == Where::Nowhere { String::new() } else { format!(" and {TURNS} turns") };
        let found = format!("{LAUNCHES} launches{beside} in {round:.0} us");
        checks.measured(About { what: &what, shows: self.shows(shows), open: None }, &samples, found)
    }

    /// Launches behind what the caller's stream waits for: microseconds of each call.
    fn launch(&self) -> Result<Vec<f64>, DeviceError> {
        let word = self.shared.memory().range().word::<u64>(TOUCHED)?;
        let launch = |_| {
            let before = Instant::now();
            self.kernels.touch(&self.calls, word)?;
            Ok(before.elapsed().as_secs_f64() * 1e6)
        };
        (0..LAUNCHES).map(launch).collect()
    }

    /// Runs something. If it does not come back in time, the stream that waits for the planner is
    /// let go, by a word of the host.
    fn watched<T>(&self, run: impl FnOnce() -> Result<T, DeviceError>) -> Result<T, CliError> {
        let ring = self.shared.memory().word(RING as usize)?;
        let (over, heard) = mpsc::channel::<()>();
        let patience = self.task.patience();
        let (done, late) = std::thread::scope(|scope| {
            let watch = scope.spawn(move || {
                let late = heard.recv_timeout(patience) == Err(RecvTimeoutError::Timeout);
                if late {
                    ring.store(self.rung.into(), Ordering::Release);
                }
                late
            });
            let done = run();
            drop(over);
            (done, watch.join().unwrap_or(true))
        });
        if late {
            let what = "launches on a stream that waits for a planner".to_owned();
            return Err(failed!("{what} did not end within {patience:?}"));
        }
        Ok(done?)
    }

    fn shows(&self, shows: &'static str) -> &'static str {
        if self.stand_in { "nothing: the stand-in's times are not a GPU's" } else { shows }
    }
}

/// Bells, each with the wait for its ring.
fn bells(context: &Context, shared: &SharedPinned, rung: &mut u32) -> Result<MemoryOperations, DeviceError> {
    let mut list = MemoryOperations::with_capacity(context, 2 * TURNS as usize);
    let words = shared.memory().range();
    for _ in 0..TURNS {
        *rung = rung.wrapping_add(1);
        list.write(words.word::<u32>(BELL)?, *rung)?;
        list.wait(words.word::<u32>(RING)?, *rung)?;
    }
    Ok(list)
}
