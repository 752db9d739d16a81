//! Stream capture: work is written down instead of enqueued.
//!
//! Each stream that takes part is a branch. Branches are tied by events, and a clock per branch
//! (how much of every branch is known to be before it) tells at the end whether all of them were
//! joined to the first.

use std::cell::Cell;
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use crate::code::{Code, Result};
use crate::stream::Stream;
use crate::table::fresh;
use crate::work::Work;

/// Captures that are on, in this process.
static ACTIVE: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());

thread_local! {
    /// Capture mode of this thread; `cuThreadExchangeStreamCaptureMode` changes it.
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// Calls that a capture forbids, and to which threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Global = 0,
    ThreadLocal = 1,
    Relaxed = 2,
}

impl Mode {
    pub fn of(number: u32) -> Result<Mode> {
        match number {
            0 => Ok(Mode::Global),
            1 => Ok(Mode::ThreadLocal),
            2 => Ok(Mode::Relaxed),
            _ => Err(Code::INVALID_VALUE),
        }
    }
}

/// One entry of a captured branch.
#[derive(Clone)]
pub enum Step {
    Work(Work),
    /// Marks are counted from 0 in each graph.
    Record(usize),
    Await(usize),
}

/// Result of a capture: all steps in the order of the calls, each with its branch.
#[derive(Default)]
pub struct Captured {
    pub steps: Vec<(usize, Step)>,
    pub branches: usize,
    pub marks: usize,
}

/// A capture that is on, or was.
pub struct Capture {
    pub id: u64,
    mode: Mode,
    thread: ThreadId,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    captured: Captured,
    streams: Vec<Arc<Stream>>,
    /// Per branch: how many steps of work of each branch come before its next.
    clocks: Vec<Vec<usize>>,
    /// The clocks of marks.
    marks: Vec<Vec<usize>>,
    invalid: bool,
    ended: bool,
}

/// A stream's place in a capture.
#[derive(Clone)]
pub struct Place {
    pub capture: Arc<Capture>,
    branch: usize,
}

/// Whether a stream is in a capture, and in one that is still good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    None = 0,
    Active = 1,
    Invalidated = 2,
}

/// `cuStreamBeginCapture`.
pub fn begin(stream: &Arc<Stream>, mode: Mode) -> Result<()> {
    if stream.is_legacy() {
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    let mut place = stream.capture.lock().unwrap();
    if place.is_some() {
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    let id = fresh() as u64;
    let capture = Arc::new(Capture { id, mode, thread: thread::current().id(), state: Mutex::default() });
    ACTIVE.lock().unwrap().push(Arc::clone(&capture));
    *place = Some(capture.join(stream, None));
    Ok(())
}

/// `cuStreamEndCapture`.
pub fn end(stream: &Stream) -> Result<Captured> {
    let place = stream.capture.lock().unwrap().clone().ok_or(Code::STREAM_CAPTURE_UNMATCHED)?;
    let capture = &place.capture;
    if place.branch != 0 {
        place.invalidate();
        return Err(Code::STREAM_CAPTURE_UNMATCHED);
    }
    if capture.mode != Mode::Relaxed && capture.thread != thread::current().id() {
        return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
    }
    ACTIVE.lock().unwrap().retain(|other| other.id != capture.id);
    let (streams, result) = {
        let mut state = capture.state.lock().unwrap();
        state.ended = true;
        (std::mem::take(&mut state.streams), state.result())
    };
    for stream in streams {
        *stream.capture.lock().unwrap() = None;
    }
    result
}

/// Refuses a call that could get in the way of a capture, and spoils the captures that forbid it:
/// allocations, synchronous copies, waits and queries, module loading.
pub fn unsafe_call() -> Result<()> {
    let me = thread::current().id();
    let mine = MODE.get();
    let forbids = |capture: &&Arc<Capture>| match (mine, capture.mode) {
        (Mode::Relaxed, _) | (_, Mode::Relaxed) => false,
        (Mode::Global, Mode::Global) => true,
        _ => capture.thread == me,
    };
    let active = ACTIVE.lock().unwrap();
    let mut refused = Ok(());
    for capture in active.iter().filter(forbids) {
        capture.state.lock().unwrap().invalid = true;
        refused = Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    refused
}

/// Sets this thread's mode and gives the one before.
pub fn exchange_mode(mode: Mode) -> Mode {
    MODE.replace(mode)
}

impl Capture {
    fn join(self: &Arc<Self>, stream: &Arc<Stream>, clock: Option<Vec<usize>>) -> Place {
        let mut state = self.state.lock().unwrap();
        let branch = state.captured.branches;
        state.captured.branches += 1;
        state.streams.push(Arc::clone(stream));
        state.clocks.push(clock.unwrap_or_default());
        state.know(branch, &[]);
        Place { capture: Arc::clone(self), branch }
    }

    /// Lets a stream wait for a mark; one that is in no capture joins this one.
    pub fn wait(self: &Arc<Self>, stream: &Arc<Stream>, mark: usize) -> Result<()> {
        if self.state.lock().unwrap().ended {
            return Err(Code::INVALID_VALUE);
        }
        let mut place = stream.capture.lock().unwrap();
        if place.is_none() {
            if stream.is_legacy() {
                return Err(Code::STREAM_CAPTURE_IMPLICIT);
            }
            let clock = self.state.lock().unwrap().marks[mark].clone();
            *place = Some(self.join(stream, Some(clock)));
        }
        let place = place.as_ref().expect("set above");
        if place.capture.id != self.id {
            place.invalidate();
            self.state.lock().unwrap().invalid = true;
            return Err(Code::STREAM_CAPTURE_MERGE);
        }
        let mut state = place.open()?;
        let known = state.marks[mark].clone();
        state.know(place.branch, &known);
        state.captured.steps.push((place.branch, Step::Await(mark)));
        Ok(())
    }
}

impl Place {
    fn open(&self) -> Result<std::sync::MutexGuard<'_, State>> {
        let state = self.capture.state.lock().unwrap();
        if state.invalid { Err(Code::STREAM_CAPTURE_INVALIDATED) } else { Ok(state) }
    }

    /// Writes work down.
    pub fn work(&self, work: Work) -> Result<()> {
        let mut state = self.open()?;
        state.clocks[self.branch][self.branch] += 1;
        state.captured.steps.push((self.branch, Step::Work(work)));
        Ok(())
    }

    /// Writes an event down and gives its mark.
    pub fn record(&self) -> Result<usize> {
        let mut state = self.open()?;
        let mark = state.marks.len();
        let clock = state.clocks[self.branch].clone();
        state.marks.push(clock);
        state.captured.marks += 1;
        state.captured.steps.push((self.branch, Step::Record(mark)));
        Ok(mark)
    }

    /// Spoils the capture.
    pub fn invalidate(&self) {
        self.capture.state.lock().unwrap().invalid = true;
    }

    pub fn status(&self) -> Status {
        if self.open().is_ok() { Status::Active } else { Status::Invalidated }
    }
}

impl State {
    /// A branch learns of earlier work.
    fn know(&mut self, branch: usize, known: &[usize]) {
        let branches = self.captured.branches;
        for clock in &mut self.clocks {
            clock.resize(branches, 0);
        }
        for (mine, theirs) in self.clocks[branch].iter_mut().zip(known) {
            *mine = (*mine).max(*theirs);
        }
    }

    fn result(&mut self) -> Result<Captured> {
        if self.invalid {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        let joined = |branch: usize| self.clocks[0][branch] == self.clocks[branch][branch];
        if !(0..self.captured.branches).all(joined) {
            return Err(Code::STREAM_CAPTURE_UNJOINED);
        }
        Ok(std::mem::take(&mut self.captured))
    }
}
