//! Streams: enqueued work, its progress, and its target while a capture is on.

use std::sync::{Arc, Condvar, Mutex};

use crate::capture::Place;
use crate::cause;
use crate::code::{Code, Result};
use crate::counters::{COUNTERS, add};
use crate::driver::Context;
use crate::memory::Engine;
use crate::queue::Queue;
use crate::queues::{DIRECTIONS, Direction, Own};
use crate::table::{Table, fresh};
use crate::work::{Copies, Late, Mark, Work};

static STREAMS: Table<Stream> = Table::new();

/// `CU_STREAM_NON_BLOCKING`: the stream does not wait for the null stream, nor that for it.
pub const NON_BLOCKING: u32 = 1;

/// Priorities that streams can have, lowest and highest.
pub const PRIORITIES: (i32, i32) = (0, -5);

pub struct Stream {
    pub handle: usize,
    /// Its context's handle.
    pub context: usize,
    pub device: usize,
    pub flags: u32,
    pub priority: i32,
    /// Where it is in a capture, while one is on.
    pub capture: Mutex<Option<Place>>,
    legacy: bool,
    queues: Own,
    /// The queue that its last work went to.
    last: Mutex<Arc<Queue>>,
    progress: Mutex<Progress>,
    moved: Condvar,
}

#[derive(Default)]
struct Progress {
    enqueued: u64,
    finished: u64,
}

impl Stream {
    fn with(context: usize, device: usize, queues: Own, flags: u32, priority: i32, legacy: bool) -> Stream {
        Stream {
            handle: fresh(),
            context,
            device,
            flags,
            priority,
            capture: Mutex::default(),
            legacy,
            last: Mutex::new(Arc::clone(&queues.main)),
            queues,
            progress: Mutex::default(),
            moved: Condvar::new(),
        }
    }

    /// The null stream of a context that is being made.
    pub fn legacy(context: usize, device: usize, queues: Own) -> Arc<Stream> {
        Arc::new(Stream::with(context, device, queues, 0, 0, true))
    }

    /// A stream that only graphs use.
    pub fn inner(context: &Context) -> Arc<Stream> {
        let queues = context.queues.next(0);
        let stream = Stream::with(context.handle, context.device, queues, NON_BLOCKING, 0, false);
        let stream = Arc::new(stream);
        context.streams.lock().unwrap().push(Arc::clone(&stream));
        stream
    }

    /// A stream for host code.
    pub fn create(context: &Context, flags: u32, priority: i32) -> Arc<Stream> {
        let priority = priority.clamp(PRIORITIES.1, PRIORITIES.0);
        let queues = context.queues.next(priority);
        let stream = Arc::new(Stream::with(context.handle, context.device, queues, flags, priority, false));
        STREAMS.insert_at(stream.handle, Arc::clone(&stream));
        context.streams.lock().unwrap().push(Arc::clone(&stream));
        stream
    }

    /// The stream behind a handle; null, or 1, is the null stream of the current context.
    pub fn of(handle: usize, current: &Context) -> Result<Arc<Stream>> {
        if handle <= 1 { Ok(Arc::clone(&current.null)) } else { STREAMS.get(handle) }
    }

    /// As `of`, for work, which must go to a stream of the current context.
    pub fn own(handle: usize, current: &Context) -> Result<Arc<Stream>> {
        let stream = Stream::of(handle, current)?;
        if stream.context == current.handle { Ok(stream) } else { Err(Code::INVALID_HANDLE) }
    }

    /// Ends the handle; enqueued work still runs.
    pub fn destroy(&self) -> Result<()> {
        STREAMS.remove(self.handle)?;
        if let Ok(context) = Context::of(self.context) {
            context.streams.lock().unwrap().retain(|other| other.handle != self.handle);
        }
        Ok(())
    }

    /// Ends the handle with the context.
    pub fn forget(&self) {
        // Streams of graphs and null streams have no handle that host code knows.
        let _ = STREAMS.remove(self.handle);
    }

    /// Answers with the error that ended the stream's context, if one did.
    pub fn alive(&self) -> Result<()> {
        Context::of(self.context)?.alive()
    }

    pub fn is_capturing(&self) -> bool {
        self.capture.lock().unwrap().is_some()
    }

    pub fn is_legacy(&self) -> bool {
        self.legacy
    }

    pub fn engine(&self, pageable: bool) -> Engine {
        Engine { context: self.context, device: self.device, pageable }
    }

    /// Enqueues work, or adds it to the capture that the stream is in.
    pub fn submit(self: &Arc<Self>, work: Work) -> Result<()> {
        if let Some(place) = &*self.capture.lock().unwrap() {
            return place.work(work);
        }
        self.order_with_legacy()?;
        self.push(work);
        Ok(())
    }

    /// Enqueues work whatever happens around it, in the queue that is its own. Waits where that is
    /// full.
    pub fn push(self: &Arc<Self>, work: Work) {
        if let Work::Memory(operations) = &work {
            cause::enqueued(self.handle, &self.engine(false), operations);
        }
        for (queue, work) in self.queued(work) {
            let queue = queue.unwrap_or_else(|| Arc::clone(&self.last.lock().unwrap()));
            // No other thread of the stream waits meanwhile.
            queue.wait_for_room();
            self.put(&queue, work);
        }
    }

    /// Work with the queue that it belongs to; none for work that may stand behind anything. Where
    /// copies have queues of their own a batch becomes one for each direction.
    fn queued(&self, work: Work) -> Vec<(Option<Arc<Queue>>, Work)> {
        let main = || Some(Arc::clone(&self.queues.main));
        match work {
            Work::Record(_) | Work::Await(_) | Work::Flush => vec![(None, work)],
            Work::Late(Late::Copies(copies)) if self.queues.copies.is_some() => {
                let directions: Vec<Direction> = copies.all.iter().map(Direction::of).collect();
                let of = |direction| {
                    let all = copies.all.iter().zip(&directions);
                    let all = all.filter(|&(_, &its)| its == direction).map(|(copy, _)| copy.clone());
                    Copies { all: all.collect(), pageable: copies.pageable }
                };
                let split = DIRECTIONS.map(|direction| (direction, of(direction))).into_iter();
                let split = split.filter(|(_, copies)| !copies.all.is_empty());
                let late = |copies| Work::Late(Late::Copies(Arc::new(copies)));
                let queue = |direction| Some(Arc::clone(self.queues.of(direction)));
                split.map(|(direction, copies)| (queue(direction), late(copies))).collect()
            }
            work => vec![(main(), work)],
        }
    }

    /// Enqueues work, full queue or not. What stands before it in the stream in another queue is
    /// awaited there.
    fn put(self: &Arc<Self>, queue: &Arc<Queue>, work: Work) {
        let mut last = self.last.lock().unwrap();
        if !Arc::ptr_eq(&last, queue) {
            let mark = Arc::new(Mark::default());
            self.progress.lock().unwrap().enqueued += 2;
            last.push(Arc::clone(self), Work::Record(Arc::clone(&mark)));
            queue.push(Arc::clone(self), Work::Await(mark));
            *last = Arc::clone(queue);
        }
        self.progress.lock().unwrap().enqueued += 1;
        queue.push(Arc::clone(self), work);
    }

    /// The null stream waits for all blocking streams, and they wait for it.
    fn order_with_legacy(self: &Arc<Self>) -> Result<()> {
        if self.flags & NON_BLOCKING != 0 {
            return Ok(());
        }
        let context = Context::of(self.context)?;
        let others = if self.legacy {
            let streams = context.streams.lock().unwrap();
            streams.iter().filter(|other| other.flags & NON_BLOCKING == 0).cloned().collect()
        } else {
            vec![Arc::clone(&context.null)]
        };
        for other in others {
            if let Some(place) = &*other.capture.lock().unwrap() {
                place.invalidate();
                return Err(Code::STREAM_CAPTURE_IMPLICIT);
            }
            if !other.is_done() {
                let mark = Arc::new(Mark::default());
                other.push(Work::Record(Arc::clone(&mark)));
                self.push(Work::Await(mark));
            }
        }
        Ok(())
    }

    /// Makes copies that stayed behind run.
    pub fn flush(self: &Arc<Self>) {
        if !self.is_done() {
            let last = Arc::clone(&self.last.lock().unwrap());
            self.put(&last, Work::Flush);
        }
    }

    /// Whether all that was enqueued is done.
    pub fn is_done(&self) -> bool {
        let progress = self.progress.lock().unwrap();
        progress.finished == progress.enqueued
    }

    /// Called by the queue.
    pub fn finished(&self, n: u64) {
        self.progress.lock().unwrap().finished += n;
        self.moved.notify_all();
    }

    /// Waits until all that was enqueued so far is done.
    pub fn drained(&self) {
        let mut progress = self.progress.lock().unwrap();
        let goal = progress.enqueued;
        while progress.finished < goal {
            progress = self.moved.wait(progress).unwrap();
        }
    }

    /// Waits, while this stream moves, until something holds that its queue makes true.
    pub fn until(&self, mut holds: impl FnMut() -> bool) {
        let mut progress = self.progress.lock().unwrap();
        while !holds() {
            progress = self.moved.wait(progress).unwrap();
        }
    }

    /// `cuStreamSynchronize`.
    pub fn synchronize(self: &Arc<Self>) {
        add(&COUNTERS.host_waits, 1);
        self.flush();
        self.drained();
    }
}
