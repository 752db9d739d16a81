//! Streams: what is enqueued, how far it is, and where it goes while a capture is on.

use std::sync::{Arc, Condvar, Mutex};

use crate::capture::Place;
use crate::code::{Code, Result};
use crate::counters::{COUNTERS, add};
use crate::driver::Context;
use crate::memory::Engine;
use crate::queue::Queue;
use crate::table::{Table, fresh};
use crate::work::{Mark, Work};

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
    queue: Arc<Queue>,
    progress: Mutex<Progress>,
    moved: Condvar,
}

#[derive(Default)]
struct Progress {
    enqueued: u64,
    finished: u64,
}

impl Stream {
    fn with(
        context: usize,
        device: usize,
        queue: Arc<Queue>,
        flags: u32,
        priority: i32,
        legacy: bool,
    ) -> Stream {
        Stream {
            handle: fresh(),
            context,
            device,
            flags,
            priority,
            capture: Mutex::default(),
            legacy,
            queue,
            progress: Mutex::default(),
            moved: Condvar::new(),
        }
    }

    /// The null stream of a context that is being made.
    pub fn legacy(context: usize, device: usize, queue: Arc<Queue>) -> Arc<Stream> {
        Arc::new(Stream::with(context, device, queue, 0, 0, true))
    }

    /// A stream that only graphs use.
    pub fn inner(context: &Context) -> Arc<Stream> {
        let queue = context.next_queue();
        let stream = Stream::with(context.handle, context.device, queue, NON_BLOCKING, 0, false);
        let stream = Arc::new(stream);
        context.streams.lock().unwrap().push(Arc::clone(&stream));
        stream
    }

    /// A stream for host code.
    pub fn create(context: &Context, flags: u32, priority: i32) -> Arc<Stream> {
        let priority = priority.clamp(PRIORITIES.1, PRIORITIES.0);
        let queue = context.next_queue();
        let stream = Arc::new(Stream::with(context.handle, context.device, queue, flags, priority, false));
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

    /// Ends the handle; what is enqueued still runs.
    pub fn destroy(&self) -> Result<()> {
        STREAMS.remove(self.handle)?;
        if let Ok(context) = Context::of(self.context) {
            context.streams.lock().unwrap().retain(|other| other.handle != self.handle);
        }
        Ok(())
    }

    /// Ends the handle and the queue with the context.
    pub fn forget(&self) {
        // Streams of graphs and null streams have no handle that host code knows.
        let _ = STREAMS.remove(self.handle);
        self.queue.close();
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

    /// Enqueues work whatever happens around it.
    pub fn push(self: &Arc<Self>, work: Work) {
        self.progress.lock().unwrap().enqueued += 1;
        self.queue.push(Arc::clone(self), work);
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
            self.push(Work::Flush);
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
