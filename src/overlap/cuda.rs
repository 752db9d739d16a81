//! Streams of a device: the caller's thread enqueues the graph, in launch order, and waits for
//! nothing.
//!
//! ```text
//!   caller's stream    --*-------------------wait--g0--*------ ... --------wait--   compute 0
//!                         \                  /          \                  /
//!   transfer 0             wait--d0--*------*--d1--*     wait--c0-- ... --*
//!
//!   * a mark is recorded     wait: an edge to a node of another stream
//! ```
//!
//! **Hardware queues** take streams in turn, and what waits at the head of one holds up all behind
//! it. All that a node waits for was enqueued before it, on any queue, so a graph ends on any
//! number of queues. Between ranks that holds as well if all launch what waits for each other in
//! the same order.
//!
//! **Captured**, the same calls make a graph: a stream takes part in a capture from its first wait
//! for a mark of the captured stream on, and at the end the caller's stream joins all of them and
//! holds the memory that they use. Marks are recorded anew in each run; a wait means the last
//! record before it, so those of earlier runs, and of graphs, are not disturbed.
//!
//! **Calls of an instance on a device** go on its own stream. One in fixed slots can be a node on
//! any stream: the node first gives it the stream
//! ([`ExpertParallel::set_stream`](crate::ExpertParallel::set_stream)).
//!
//! **Errors** of a node are those of enqueueing. Operations enqueued before one are joined
//! nevertheless, so that the caller's stream stays in order, and a capture can be ended. There is
//! no time limit here: [`ExpertParallel::synchronize`](crate::ExpertParallel::synchronize) checks
//! whether a stream ends.

use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use super::task_graph::GraphEntry;
use super::task_graph::run_body;
use super::{Executor, Graph, NodeInfo, StreamId as Name};
use crate::device::{Context, Event, Priority, Stream};
use crate::error::{DeviceError, OverlapError};

/// Streams of a device for graphs, in addition to the caller's.
#[derive(Debug)]
pub struct StreamPool {
    context: Arc<Context>,
    /// Those behind compute 0, which is the caller's.
    compute: Vec<Arc<Stream>>,
    transfer: Vec<Arc<Stream>>,
    /// One enqueued graph uses them all.
    marks: Mutex<Vec<Event>>,
}

impl StreamPool {
    /// `compute` streams that compute, the caller's counted, and `transfer` that move bytes, with
    /// this priority: transfers are short to launch and long to run, and with the highest one they
    /// do not queue behind products.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    pub fn new(
        context: &Arc<Context>,
        compute: u32,
        transfer: u32,
        priority: Priority,
    ) -> Result<Self, DeviceError> {
        let make = |count: u32, priority| -> Result<Vec<_>, _> {
            (0..count).map(|_| Stream::new(context, priority).map(Arc::new)).collect()
        };
        Ok(StreamPool {
            context: Arc::clone(context),
            compute: make(compute.saturating_sub(1), Priority::Normal)?,
            transfer: make(transfer, priority)?,
            marks: Mutex::default(),
        })
    }

    /// A stream that moves bytes, for objects that are built for one.
    pub(crate) fn transfer(&self, index: usize) -> Option<&Arc<Stream>> {
        self.transfer.get(index)
    }
}

/// Carries graphs out on CUDA streams. A node is given the stream to enqueue on:
/// [`Compute(0)`](Name::Compute) is the caller's, which waits for all others at the end.
#[derive(Clone, Copy, Debug)]
pub struct CudaExecutor<'s> {
    pool: &'s StreamPool,
    caller: &'s Arc<Stream>,
    overlap: bool,
}

impl<'s> CudaExecutor<'s> {
    /// In addition to a caller's stream of the same device. A pool serves one graph at a time:
    /// others wait while it is enqueued, and their nodes queue behind its nodes on the pool's
    /// streams.
    pub fn new(pool: &'s StreamPool, caller: &'s Arc<Stream>) -> Self {
        CudaExecutor { pool, caller, overlap: true }
    }

    /// Without overlap, all goes into the caller's stream, in launch order: to the same bits.
    pub fn overlap(self, overlap: bool) -> Self {
        CudaExecutor { overlap, ..self }
    }

    /// Where a node goes.
    fn stream(&self, name: Name) -> Option<&'s Arc<Stream>> {
        let named = match name {
            Name::Compute(0) => Some(self.caller),
            Name::Compute(index) => self.pool.compute.get(index as usize - 1),
            Name::Transfer(index) => self.pool.transfer.get(index as usize),
        };
        if self.overlap { named } else { named.and(Some(self.caller)) }
    }
}

impl Executor for CudaExecutor<'_> {
    type Context = Arc<Stream>;

    fn run(&self, graph: Graph<'_, Arc<Stream>>) -> Result<(), OverlapError> {
        let stream = |at: NodeInfo| self.stream(at.stream).ok_or(OverlapError::NoStream { at });
        let streams = graph.places().map(stream).collect::<Result<Vec<_>, _>>()?;
        let mut all = self.pool.marks.lock().unwrap_or_else(PoisonError::into_inner);
        let marks = EventPool { all: &mut all, used: 0, context: &self.pool.context };
        let mut launch = Launch { caller: self.caller, marks, beside: Vec::new() };
        let enqueued = launch.enqueue(graph.entries, &streams);
        let joined = launch.join();
        enqueued.and(joined)
    }
}

/// Marks of the pool, each used once in a run; more are made where there are too few.
struct EventPool<'m> {
    all: &'m mut Vec<Event>,
    used: usize,
    context: &'m Arc<Context>,
}

impl EventPool<'_> {
    /// The number of a mark that this run has not used.
    fn next(&mut self) -> Result<usize, DeviceError> {
        if self.used == self.all.len() {
            self.all.push(Event::new(self.context)?);
        }
        self.used += 1;
        Ok(self.used - 1)
    }

    fn record(&mut self, stream: &Stream) -> Result<usize, DeviceError> {
        let mark = self.next()?;
        self.all[mark].record(stream)?;
        Ok(mark)
    }
}

/// A graph on its way into streams.
struct Launch<'l> {
    caller: &'l Arc<Stream>,
    marks: EventPool<'l>,
    /// The used streams besides the caller's, each with its first node.
    beside: Vec<(&'l Arc<Stream>, NodeInfo)>,
}

impl<'l> Launch<'l> {
    fn enqueue(
        &mut self,
        entries: Vec<GraphEntry<'_, Arc<Stream>>>,
        streams: &[&'l Arc<Stream>],
    ) -> Result<(), OverlapError> {
        let mut awaited = vec![false; entries.len()];
        for (entry, &stream) in entries.iter().zip(streams) {
            let before = entry.after.iter().map(|edge| edge.node);
            before.for_each(|before| awaited[before] |= !ptr::eq(streams[before], stream));
        }
        // The other streams begin after the current work of the caller's stream.
        let first = entries.iter().zip(streams).find(|(_, stream)| !ptr::eq(**stream, self.caller));
        let begin = first.map(|(first, _)| {
            self.marks.record(self.caller).map_err(|error| failed(first.place, error, entries.len()))
        });
        let begin = begin.transpose()?;
        let mut ends = vec![None; entries.len()];
        let mut not_begun = entries.len();
        for (index, GraphEntry { place, after, body }) in entries.into_iter().enumerate() {
            let stream = streams[index];
            let enters = self.enters(stream, place);
            let waits =
                begin.filter(|_| enters).into_iter().chain(after.iter().filter_map(|edge| ends[edge.node]));
            for mark in waits {
                let waited = stream.wait_event(&self.marks.all[mark]);
                waited.map_err(|error| failed(place, error, not_begun))?;
            }
            not_begun -= 1;
            run_body(body, stream).map_err(|why| why.at(place, not_begun))?;
            if awaited[index] {
                let mark = self.marks.record(stream);
                ends[index] = Some(mark.map_err(|error| failed(place, error, not_begun))?);
            }
        }
        Ok(())
    }

    /// Whether a node is the first on a stream other than the caller's.
    fn enters(&mut self, stream: &'l Arc<Stream>, place: NodeInfo) -> bool {
        let known = ptr::eq(stream, self.caller) || self.beside.iter().any(|(one, _)| ptr::eq(*one, stream));
        if !known {
            self.beside.push((stream, place));
        }
        !known
    }

    /// The caller's stream waits for all others. The first error is the one to know.
    fn join(mut self) -> Result<(), OverlapError> {
        let mut joined = Ok(());
        for (stream, first) in self.beside {
            let mark = self.marks.next();
            let one = mark.and_then(|mark| self.caller.join(stream, &self.marks.all[mark]));
            joined = joined.and(one.map_err(|error| failed(first, error, 0)));
        }
        joined
    }
}

/// An edge that could not be enqueued.
fn failed(at: NodeInfo, error: DeviceError, not_begun: usize) -> OverlapError {
    OverlapError::Failed { at, error: Box::new(error.into()), not_begun }
}
