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
//!
//! ```text
//!   shared memory of the host     | bell | ring | touched |   | rows ...
//! ```

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Instant;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use sidelane::device::{
    Allocation, AuditKernels, Context, CopyBatch, Driver, MemOpBatch, PinnedMemory, Reservation, Stream,
    Version,
};
use sidelane::error::DeviceError;
use sidelane::memory::SharedPinned;

use super::device::{Random, Timer, finish, same, stream, write};
use super::report::{About, Checks, STAND_IN, State};
use super::{Part, Task, spawn};
use crate::error::{CliError, failed};

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
        let about = About::new(Where::Helper.words(), "nothing: the row above stands alone");
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
        checks.measured(About::new(&what, self.shows(shows)).open(OPEN), &samples, found)
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
        let round = super::report::Time::of(&turns).p50_us;
        let beside = if place == Where::Nowhere { String::new() } else { format!(" and {TURNS} turns") };
        let found = format!("{LAUNCHES} launches{beside} in {round:.0} us");
        checks.measured(About::new(&what, self.shows(shows)), &samples, found)
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
        if self.stand_in { STAND_IN } else { shows }
    }
}

/// Bells, each with the wait for its ring.
fn bells(context: &Context, shared: &SharedPinned, rung: &mut u32) -> Result<MemOpBatch, DeviceError> {
    let mut list = MemOpBatch::with_capacity(context, 2 * TURNS as usize);
    let words = shared.memory().range();
    for _ in 0..TURNS {
        *rung = rung.wrapping_add(1);
        list.write(words.word::<u32>(BELL)?, *rung)?;
        list.wait(words.word::<u32>(RING)?, *rung)?;
    }
    Ok(list)
}

/// Where the words lie, a line each, and how much room they have.
const BELL: u64 = 0;
const RING: u64 = 64;
pub const TOUCHED: u64 = 128;
pub const WORDS: u64 = 4096;

/// Copies of a bell, and bytes of each.
pub const COPIES: u64 = 8;
pub const COPY: u64 = 16 << 10;
pub const ROWS: u64 = COPIES * COPY;

/// Looks at the bell between two looks whether it is over.
const LOOKS: u32 = 4096;

/// Hears the bell, copies, rings.
pub struct Planner {
    words: PinnedMemory,
    batch: CopyBatch,
    batched: bool,
    stream: Stream,
    served: u32,
}

impl Planner {
    /// One that has served so many bells.
    pub fn new(
        context: &Arc<Context>,
        rows: &Arc<Allocation>,
        shared: &PinnedMemory,
        served: u32,
    ) -> Result<Self, DeviceError> {
        let from = Reservation::new(context, 1, rows.bytes())?.map(0, rows, &[context.device()])?;
        let mut batch = CopyBatch::with_capacity(context, COPIES as usize);
        for at in (0..COPIES).map(|nth| nth * COPY) {
            batch.push(shared.range().span(WORDS + at, COPY)?, from.span(at, COPY)?)?;
        }
        let batched = context.driver().version() >= Version::BATCHED_COPIES;
        Ok(Planner { words: shared.clone(), batch, batched, stream: stream(context)?, served })
    }

    /// Serves bells until it is over.
    fn serve(&mut self, mut over: impl FnMut() -> bool) -> Result<(), DeviceError> {
        let mut looks = 0_u32;
        loop {
            let rung = self.words.word(BELL as usize)?.load(Ordering::Acquire) as u32;
            if rung != self.served {
                // The caller waits for each before it rings again.
                self.served = rung;
                if self.batched {
                    self.stream.copy_batch(&mut self.batch)?;
                } else {
                    self.stream.copy_each(&self.batch)?;
                }
                self.stream.write(self.words.range().word::<u32>(RING)?, rung)?;
                continue;
            }
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(LOOKS) {
                if over() {
                    return Ok(());
                }
                // A machine may have fewer processors than there are threads.
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }
}

/// What comes with the descriptors: bytes of the device's memory, and bells that were served.
const TOLD: usize = 12;

/// The process, seen by who asked for it.
pub struct Helper {
    process: Child,
    socket: UnixStream,
}

impl Helper {
    /// Starts one, and waits until it listens.
    pub fn start(
        task: &Task,
        rows: &Allocation,
        shared: &SharedPinned,
        served: u32,
    ) -> Result<Self, CliError> {
        let task = Task { part: Part::Helper, ..*task };
        let (socket, its) = UnixStream::pair().map_err(CliError::prepare("make a socket"))?;
        // Its other end is in the process alone.
        let process = spawn(&task, |command| {
            command.stdin(OwnedFd::from(its)).stdout(Stdio::null());
        })?;
        let mut helper = Helper { process, socket };
        let descriptor = rows.export()?;
        let mut words = [0; TOLD];
        words[..8].copy_from_slice(&rows.bytes().to_le_bytes());
        words[8..].copy_from_slice(&served.to_le_bytes());
        send(&helper.socket, &words, &[descriptor.as_fd(), shared.as_fd()])?;
        helper.socket.set_read_timeout(Some(task.patience())).map_err(CliError::prepare("bound a wait"))?;
        match helper.socket.read(&mut [0]) {
            Ok(1) => Ok(helper),
            _ => {
                let _ = helper.process.kill();
                Err(helper.end().err().unwrap_or_else(|| failed!("the helper said nothing")))
            }
        }
    }

    /// Has it end, and says how it did.
    pub fn end(mut self) -> Result<(), CliError> {
        drop(self.socket);
        let ended = self.process.wait().map_err(CliError::prepare("wait for the helper"))?;
        if ended.success() { Ok(()) } else { Err(failed!("the helper process: {ended}")) }
    }
}

/// The process itself. Its socket is its standard input.
pub fn main(task: &Task) -> Result<(), CliError> {
    let input =
        std::io::stdin().as_fd().try_clone_to_owned().map_err(CliError::prepare("keep the socket"))?;
    let mut socket = UnixStream::from(input);
    let mut words = [0; TOLD];
    let [rows, shared] = receive(&socket, &mut words)?;
    let [bytes, served] = [&words[..8], &words[8..]];
    let context = Driver::open()?.context(task.device)?;
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
    let rows = Allocation::import(&context, rows.as_fd(), number(bytes))?;
    let shared = SharedPinned::adopt(&context, shared)?;
    let mut planner = Planner::new(&context, &rows, shared.memory(), number(served) as u32)?;
    socket.write_all(&[1]).map_err(CliError::prepare("answer"))?;
    socket.set_nonblocking(true).map_err(CliError::prepare("look at the socket"))?;
    // Nothing is ever sent: the socket ends.
    Ok(planner.serve(|| matches!(socket.read(&mut [0]), Ok(0)))?)
}

fn send(socket: &UnixStream, words: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), CliError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(descriptors));
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(words)], &mut control, SendFlags::NOSIGNAL);
    sent.map(drop).map_err(|errno| CliError::prepare("hand over memory")(errno.into()))
}

fn receive(socket: &UnixStream, words: &mut [u8]) -> Result<[OwnedFd; 2], CliError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    rustix::net::recvmsg(socket, &mut [IoSliceMut::new(words)], &mut control, flags)
        .map_err(|errno| CliError::prepare("take memory over")(errno.into()))?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            descriptors.extend(some);
        }
    }
    <[OwnedFd; 2]>::try_from(descriptors)
        .map_err(|seen| failed!("the helper was given {} descriptors, not 2", seen.len()))
}
