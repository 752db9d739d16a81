//! A hardware queue: streams are folded on it, and it takes their work strictly in the order of
//! enqueueing.
//!
//! A wait at its head blocks all entries behind it, of every stream. Copies and fills do not run
//! when they reach the head: they stay behind until later work of *their* stream needs them, so a
//! reader of another stream that forgot an event, or a peer whose flag went out too early, sees old
//! bytes or poison. They do run in the end: when the queue is idle for a while, or blocked.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use crate::code::{Code, Result};
use crate::counters::{COUNTERS, add};
use crate::driver::{Sticky, stopped};
use crate::random::Chance;
use crate::stream::Stream;
use crate::work::{Late, MemoryOperation, Work};
use crate::{cause, host_call, late, lock, memory_operation};

/// Looks at an unmet condition before copies of other streams run after all.
const PATIENT: u32 = 64;

/// Looks before the queue's thread sleeps between two.
const AWAKE: u32 = 100;

/// The longest time that copies stay behind in an idle queue, in microseconds.
const IDLE: u64 = 2000;

/// Entries that pass before copies that stayed behind run even in a busy queue.
const PASSED: u32 = 256;

/// One in-order queue of a device.
pub struct Queue {
    line: Mutex<Line>,
    changed: Condvar,
    /// Its chance: seed, device, and its number there.
    chance: (u64, usize, usize),
    /// Entries that it holds before enqueueing threads wait; 0 for any number.
    room: usize,
    error: Arc<Sticky>,
}

#[derive(Default)]
struct Line {
    entries: VecDeque<(Arc<Stream>, Work)>,
    started: bool,
    closed: bool,
}

impl Queue {
    pub fn new(chance: (u64, usize, usize), room: usize, error: Arc<Sticky>) -> Arc<Queue> {
        let (line, changed) = Default::default();
        Arc::new(Queue { line, changed, chance, room, error })
    }

    /// Waits until there is room for one more, as a call does that enqueues into a full queue: with
    /// the driver's lock held.
    pub fn wait_for_room(&self) {
        if self.room == 0 || !self.is_full(&self.line.lock().unwrap()) {
            return;
        }
        lock::hold(|| {
            let mut line = self.line.lock().unwrap();
            while self.is_full(&line) {
                line = self.changed.wait(line).unwrap();
            }
        });
    }

    fn is_full(&self, line: &Line) -> bool {
        line.entries.len() >= self.room && !line.closed
    }

    /// Puts work at the end; the thread starts with the first.
    pub fn push(self: &Arc<Self>, stream: Arc<Stream>, work: Work) {
        let mut line = self.line.lock().unwrap();
        line.entries.push_back((stream, work));
        if !line.started {
            line.started = true;
            let queue = Arc::clone(self);
            let (seed, device, index) = self.chance;
            let chance = Chance::new(seed, device, index);
            thread::spawn(move || Runner { queue, chance, behind: Vec::new(), passed: 0 }.run());
        }
        self.changed.notify_all();
    }

    /// Ends the thread once all is taken.
    pub fn close(&self) {
        self.line.lock().unwrap().closed = true;
        self.changed.notify_all();
    }

    /// The next entry; none when nothing came in time, or nothing will.
    fn take(&self, patience: Option<Duration>) -> Next {
        let mut line = self.line.lock().unwrap();
        loop {
            if let Some((stream, work)) = line.entries.pop_front() {
                if self.room > 0 {
                    self.changed.notify_all();
                }
                return Next::Entry(stream, work);
            }
            if line.closed {
                return Next::End;
            }
            line = match patience {
                None => self.changed.wait(line).unwrap(),
                Some(time) => {
                    let (line, out) = self.changed.wait_timeout(line, time).unwrap();
                    if out.timed_out() && line.entries.is_empty() {
                        return Next::Idle;
                    }
                    line
                }
            };
        }
    }
}

enum Next {
    Entry(Arc<Stream>, Work),
    Idle,
    End,
}

/// The thread of a queue.
struct Runner {
    queue: Arc<Queue>,
    chance: Chance,
    /// Streams with copies or fills that stayed behind.
    behind: Vec<(Arc<Stream>, Vec<Late>)>,
    /// Entries taken since all had run.
    passed: u32,
}

impl Runner {
    fn run(mut self) {
        loop {
            let patience = Duration::from_micros(1 + self.chance.below(IDLE));
            match self.queue.take((!self.behind.is_empty()).then_some(patience)) {
                Next::Idle => self.settle_all(),
                Next::End => return self.settle_all(),
                Next::Entry(stream, work) => {
                    self.perform(stream, work);
                    self.passed += 1;
                    if self.passed > PASSED {
                        self.settle_all();
                    }
                }
            }
        }
    }

    fn perform(&mut self, stream: Arc<Stream>, work: Work) {
        if self.chance.one_in(8) {
            thread::yield_now();
        }
        if let Work::Late(late) = work {
            return match self.behind.iter_mut().find(|(other, _)| Arc::ptr_eq(other, &stream)) {
                Some((_, all)) => all.push(late),
                None => self.behind.push((stream, vec![late])),
            };
        }
        let mark = if let Work::Record(mark) = &work { Some(Arc::clone(mark)) } else { None };
        if self.queue.error.get().is_none()
            && let Err(code) = self.execute(&stream, work)
        {
            self.queue.error.set(code);
        }
        // After an error no entry runs any more, but no thread may wait for it either.
        if self.queue.error.get().is_some() {
            self.settle(&stream);
        }
        if let Some(mark) = mark {
            mark.reach();
        }
        stream.finished(1);
    }

    fn execute(&mut self, stream: &Arc<Stream>, work: Work) -> Result<()> {
        match work {
            Work::Memory(operations) => self.memory(stream, &operations),
            Work::Await(mark) => {
                self.settle(stream);
                self.block(|| Ok(mark.is_reached()))
            }
            Work::Kernel(launch) => {
                self.settle(stream);
                add(&COUNTERS.kernels, 1);
                launch.run(&stream.engine(false))
            }
            Work::Host(call) => {
                self.settle(stream);
                add(&COUNTERS.host_functions, 1);
                host_call::run(call);
                Ok(())
            }
            Work::Record(_) | Work::Flush => {
                self.settle(stream);
                Ok(())
            }
            Work::Late(_) => unreachable!("it stays behind"),
        }
    }

    fn memory(&mut self, stream: &Arc<Stream>, operations: &[MemoryOperation]) -> Result<()> {
        let engine = stream.engine(false);
        for operation in operations {
            add(&COUNTERS.memory_operations, 1);
            match *operation {
                MemoryOperation::Write { at, value, width, fenced } => {
                    // Without a fence the value may go out before the copies that stand before it.
                    if fenced {
                        self.settle(stream);
                    }
                    memory_operation::write(&engine, at, value, width)?;
                    cause::performed(stream.handle, at);
                }
                MemoryOperation::Wait { at, value, width, until } => {
                    self.settle(stream);
                    self.block(|| {
                        let seen = memory_operation::read(&engine, at, width)?;
                        Ok(until.holds(seen, value, width))
                    })?;
                }
                MemoryOperation::Barrier => self.settle(stream),
            }
        }
        Ok(())
    }

    /// Blocks the queue until the condition holds.
    fn block(&mut self, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
        for look in 0u32.. {
            if holds()? {
                return Ok(());
            }
            if stopped() {
                return Err(Code::LAUNCH_TIMEOUT);
            }
            if let Some(code) = self.queue.error.get() {
                return Err(code);
            }
            if look == PATIENT {
                self.settle_all();
            }
            if look < AWAKE { thread::yield_now() } else { thread::sleep(Duration::from_micros(50)) }
        }
        unreachable!("the loop has no end")
    }

    /// Runs the deferred work of a stream.
    fn settle(&mut self, stream: &Arc<Stream>) {
        if let Some(index) = self.behind.iter().position(|(other, _)| Arc::ptr_eq(other, stream)) {
            let (stream, all) = self.behind.swap_remove(index);
            self.move_bytes(&stream, all);
        }
    }

    fn settle_all(&mut self) {
        self.passed = 0;
        self.chance.shuffle(&mut self.behind);
        for (stream, all) in std::mem::take(&mut self.behind) {
            self.move_bytes(&stream, all);
        }
    }

    fn move_bytes(&mut self, stream: &Stream, all: Vec<Late>) {
        for one in &all {
            if self.queue.error.get().is_none()
                && let Err(code) = late::run(one, stream, &mut self.chance)
            {
                self.queue.error.set(code);
            }
        }
        stream.finished(all.len() as u64);
    }
}
