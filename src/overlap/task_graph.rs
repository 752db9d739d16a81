//! The graph: work, its place, its dependencies, values between nodes, and how long it would take.
//!
//! ```text
//!   Graph::add(stream, label, after, body) --> Node         launch order is the order of adding
//!
//!   entries    | 0: transfer 0 | 1: compute 0 | 2: transfer 0 | ..      Executor::run moves them out
//!                    ^               |   after: [0]       |
//!                    |   Handoff     |                    |   after: [1.halfway()]
//!                    +--- value ---->+<-------------------+
//!
//!   executors   HostExecutor  threads     CudaExecutor  CUDA streams     GraphTimer  given times, no node runs
//! ```

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, TryLockError};

use super::{NodeInfo, NodeLabel, StreamId};
use crate::bootstrap::caught;
use crate::error::{Error, OverlapError};

/// Something that carries a graph out.
pub trait Executor {
    /// Argument of a node when it runs.
    type Context;

    /// Carries it out; see [`Graph::run`].
    ///
    /// # Errors
    /// As [`Graph::run`].
    fn run(&self, graph: Graph<'_, Self::Context>) -> Result<(), OverlapError>;
}

/// A node of a graph, for those that are to wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    graph: u64,
    edge: Edge,
}

impl Node {
    /// The same, for nodes that wait only until it is halfway
    /// ([`Run::halfway`](super::Run::halfway)). If it does not report that, they wait until its
    /// end.
    pub fn halfway(self) -> Node {
        Node { edge: Edge { halfway: true, ..self.edge }, ..self }
    }
}

/// An earlier node that one waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Edge {
    pub node: usize,
    /// It is enough if that is halfway.
    pub halfway: bool,
}

/// The work of a node, as [`Graph::add`] takes it.
pub type Body<'a, G> = Box<dyn FnOnce(&G) -> Result<(), Error> + Send + 'a>;

/// A node as executors see it.
pub(super) struct GraphEntry<'a, G> {
    pub place: NodeInfo,
    /// Earlier nodes of other streams. Those of its own need no edge.
    pub after: Vec<Edge>,
    pub body: Body<'a, G>,
}

/// Work in launch order, which borrows its data. `G` is what the [`Executor`] gives to nodes.
///
/// ```
/// use sidelane::overlap::{Graph, Handoff, HostExecutor, NodeLabel, StreamId};
///
/// let (arrived, mut sum) = (Handoff::empty(), 0);
/// let mut graph = Graph::new();
/// let there = graph.add(StreamId::Transfer(0), NodeLabel::new("fetch", 0), &[], |_| arrived.put(vec![1, 2, 3]));
/// graph.add(StreamId::Compute(0), NodeLabel::new("sum", 0), &[there], |_| {
///     sum = arrived.take()?.iter().sum();
///     Ok(())
/// });
/// graph.run(&HostExecutor::new())?;
/// assert_eq!(sum, 6);
/// # Ok::<(), sidelane::Error>(())
/// ```
pub struct Graph<'a, G> {
    number: u64,
    pub(super) entries: Vec<GraphEntry<'a, G>>,
    foreign: Option<NodeInfo>,
}

impl<G> Default for Graph<'_, G> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'a, G> Graph<'a, G> {
    /// Nothing to do.
    pub fn new() -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        // Relaxed: numbers only differ.
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        Graph { number, entries: Vec::new(), foreign: None }
    }

    /// Adds a node behind all others in launch order. It begins when the node before it on its
    /// stream and all nodes of `after` have ended, or are [halfway](Node::halfway) where the edge
    /// says so. A node of another graph in `after` makes [`run`](Self::run) refuse the graph.
    pub fn add(
        &mut self,
        stream: StreamId,
        work: NodeLabel,
        after: &[Node],
        body: impl FnOnce(&G) -> Result<(), Error> + Send + 'a,
    ) -> Node {
        let place = NodeInfo { work, stream };
        if after.iter().any(|node| node.graph != self.number) {
            self.foreign.get_or_insert(place);
        }
        let other = |edge: &Edge| self.entries.get(edge.node).is_some_and(|e| e.place.stream != stream);
        let after = after.iter().map(|node| node.edge).filter(other).collect();
        let edge = Edge { node: self.entries.len(), halfway: false };
        let node = Node { graph: self.number, edge };
        self.entries.push(GraphEntry { place, after, body: Box::new(body) });
        node
    }

    /// How many nodes there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no work.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The nodes in launch order.
    pub fn places(&self) -> impl Iterator<Item = NodeInfo> {
        self.entries.iter().map(|entry| entry.place)
    }

    /// Carries all of it out.
    ///
    /// # Errors
    /// [`OverlapError`]: the first node that failed. No further node was begun then; all that had
    /// begun have ended.
    pub fn run(self, executor: &impl Executor<Context = G>) -> Result<(), OverlapError> {
        match self.foreign {
            Some(at) => Err(OverlapError::ForeignNode { at }),
            None => executor.run(self),
        }
    }
}

impl<G> fmt::Debug for Graph<'_, G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.places()).finish()
    }
}

/// Puts nodes on compute streams in turn, and lets each wait for the one `at_once` before it: "GEMM
/// i waits for GEMM i - 2".
///
/// ```text
///   3 streams, 2 at once      compute 0   |-- g0 --|  |-- g3 --|
///                             compute 1     |-- g1 --|  |-- g4 --|
///                             compute 2             |-- g2 --|
///                                                   ^ waits for g0, although its stream is free
/// ```
///
/// Two at once hide each other's beginning and end; more would only take cores, or SMs, from the
/// nodes that others wait for. With as many streams as may run at once, the streams themselves are
/// the bound.
#[derive(Debug)]
pub struct RoundRobin {
    streams: u32,
    nodes: Vec<Node>,
    at_once: usize,
}

impl RoundRobin {
    /// Over `streams` compute streams, `at_once` nodes at a time; 0 counts as 1.
    pub fn new(streams: u32, at_once: u32) -> Self {
        RoundRobin { streams: streams.max(1), nodes: Vec::new(), at_once: at_once.max(1) as usize }
    }

    /// The stream of the next node.
    pub fn stream(&self) -> StreamId {
        StreamId::Compute((self.nodes.len() % self.streams as usize) as u32)
    }

    /// Adds a node to the graph, on the next stream; `after` as in [`Graph::add`].
    pub fn add<'a, G>(
        &mut self,
        graph: &mut Graph<'a, G>,
        work: NodeLabel,
        after: &[Node],
        body: impl FnOnce(&G) -> Result<(), Error> + Send + 'a,
    ) -> Node {
        let before = self.nodes.len().checked_sub(self.at_once).map(|index| self.nodes[index]);
        let after: Vec<Node> = after.iter().copied().chain(before).collect();
        let node = graph.add(self.stream(), work, &after, body);
        self.nodes.push(node);
        node
    }
}

/// Why a node went wrong.
pub enum NodeError {
    Failed(Error),
    Panicked(String),
}

impl NodeError {
    /// As the error of a run.
    pub fn at(self, at: NodeInfo, not_begun: usize) -> OverlapError {
        match self {
            NodeError::Failed(error) => OverlapError::Failed { at, error: Box::new(error), not_begun },
            NodeError::Panicked(message) => OverlapError::Panicked { at, message, not_begun },
        }
    }
}

/// Runs the work. A panic ends here: streams have other nodes to wait for, and half-written results
/// are never used.
pub fn run_body<G>(body: Body<'_, G>, ground: &G) -> Result<(), NodeError> {
    caught(|| body(ground)).map_err(NodeError::Panicked)?.map_err(NodeError::Failed)
}

/// A value that passes from node to node along edges.
///
/// Rust lets no two nodes borrow a value that one of them changes, since it does not see the edges
/// between them. A handoff allows it and checks it: concurrent access is an error, since then no
/// edge orders the nodes. A value that several nodes read at once belongs in a
/// [`OnceLock`](std::sync::OnceLock).
#[derive(Debug, Default)]
pub struct Handoff<T>(Mutex<Option<T>>);

impl<T> Handoff<T> {
    /// With nothing in it yet.
    pub const fn empty() -> Self {
        Handoff(Mutex::new(None))
    }

    /// With a value in it that several nodes use in turn, such as the layer that runs their
    /// transfers.
    pub const fn new(value: T) -> Self {
        Handoff(Mutex::new(Some(value)))
    }

    /// Leaves a value, in place of the present one.
    ///
    /// # Errors
    /// [`OverlapError::HandoffInUse`].
    pub fn put(&self, value: T) -> Result<(), Error> {
        self.at(|place| {
            *place = Some(value);
            Ok(())
        })
    }

    /// Takes the value away.
    ///
    /// # Errors
    /// [`OverlapError::HandoffEmpty`], [`OverlapError::HandoffInUse`].
    pub fn take(&self) -> Result<T, Error> {
        self.at(|place| Ok(place.take().ok_or(OverlapError::HandoffEmpty)?))
    }

    /// Works on the value where it is.
    ///
    /// # Errors
    /// [`OverlapError::HandoffEmpty`], [`OverlapError::HandoffInUse`], and what `work` answers.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> Result<R, Error>) -> Result<R, Error> {
        self.at(|place| work(place.as_mut().ok_or(OverlapError::HandoffEmpty)?))
    }

    /// The value that is left at the end.
    pub fn into_inner(self) -> Option<T> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn at<R>(&self, work: impl FnOnce(&mut Option<T>) -> Result<R, Error>) -> Result<R, Error> {
        match self.0.try_lock() {
            Ok(mut place) => work(&mut place),
            // The run has reported the panic that poisoned this.
            Err(TryLockError::Poisoned(place)) => work(&mut place.into_inner()),
            Err(TryLockError::WouldBlock) => Err(OverlapError::HandoffInUse.into()),
        }
    }
}

/// When a node would run, in nanoseconds from the beginning of the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeTime {
    /// The node.
    pub at: NodeInfo,
    /// Its begin.
    pub begin: u64,
    /// Its end.
    pub end: u64,
}

/// Times graphs by what their nodes would take.
///
/// ```
/// use sidelane::overlap::{Graph, GraphTimer, NodeLabel, StreamId};
///
/// let mut graph: Graph<'_, ()> = Graph::new();
/// let nothing = |_: &()| Ok(());
/// for chunk in 0..3 {
///     let there = graph.add(StreamId::Transfer(0), NodeLabel::new("dispatch", chunk), &[], nothing);
///     graph.add(StreamId::Compute(0), NodeLabel::new("experts", chunk), &[there], nothing);
/// }
/// let forecast = GraphTimer::new(|at| if at.work.name == "dispatch" { 10 } else { 7 });
/// graph.run(&forecast)?;
/// assert_eq!(forecast.ns(), 3 * 10 + 7);
/// # Ok::<(), sidelane::error::OverlapError>(())
/// ```
#[derive(Debug)]
pub struct GraphTimer<F> {
    cost: F,
    spans: RefCell<Vec<NodeTime>>,
}

impl<F: Fn(NodeInfo) -> u64> GraphTimer<F> {
    /// By nanoseconds of each node.
    pub fn new(cost: F) -> Self {
        GraphTimer { cost, spans: RefCell::default() }
    }

    /// Of the graph that was run last, in launch order.
    pub fn spans(&self) -> Vec<NodeTime> {
        self.spans.borrow().clone()
    }

    /// When all of it has ended.
    pub fn ns(&self) -> u64 {
        self.spans.borrow().iter().map(|span| span.end).max().unwrap_or(0)
    }
}

impl<F: Fn(NodeInfo) -> u64> Executor for GraphTimer<F> {
    type Context = ();

    fn run(&self, graph: Graph<'_, ()>) -> Result<(), OverlapError> {
        let mut free: HashMap<StreamId, u64> = HashMap::new();
        let mut spans: Vec<NodeTime> = Vec::with_capacity(graph.len());
        // Launch order: a node comes after the nodes that it waits for.
        for entry in &graph.entries {
            let free = free.entry(entry.place.stream).or_default();
            let begin = entry.after.iter().map(|edge| spans[edge.node].end).fold(*free, u64::max);
            *free = begin.saturating_add((self.cost)(entry.place));
            spans.push(NodeTime { at: entry.place, begin, end: *free });
        }
        *self.spans.borrow_mut() = spans;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::overlap::{NodeLabel, RoundRobin};

    #[test]
    fn a_value_is_taken_once() {
        let handoff = Handoff::empty();
        let empty = Err(OverlapError::HandoffEmpty.into());
        assert_eq!(handoff.take(), empty);
        handoff.put(4).unwrap();
        handoff
            .with(|value| {
                *value += 1;
                Ok(())
            })
            .unwrap();
        assert_eq!(handoff.take(), Ok(5));
        assert_eq!(handoff.with(|value| Ok(*value)), empty);
        assert_eq!(handoff.into_inner(), None);
    }

    #[test]
    fn node_that_meets_another_gets_an_error() {
        let handoff = Handoff::new(1);
        let met = handoff.with(|_| handoff.take());
        assert_eq!(met, Err(OverlapError::HandoffInUse.into()));
        assert_eq!(handoff.take(), Ok(1));
    }

    fn nothing(_: &()) -> Result<(), crate::Error> {
        Ok(())
    }

    #[test]
    fn streams_go_on_beside_each_other_and_edges_hold() {
        let mut graph = Graph::new();
        let work = |name, chunk| NodeLabel { name, chunk };
        let mut turns = RoundRobin::new(2, 1);
        for chunk in 0..3 {
            let there = graph.add(StreamId::Transfer(0), work("d", chunk), &[], nothing);
            let made = turns.add(&mut graph, work("g", chunk), &[there], nothing);
            graph.add(StreamId::Transfer(1), work("c", chunk), &[made], nothing);
        }
        let forecast = GraphTimer::new(|at| match at.work.name {
            "d" => 4,
            "g" => 10,
            _ => 1,
        });
        graph.run(&forecast).unwrap();
        let seen: Vec<_> =
            forecast.spans().iter().map(|span| (span.at.work.name, span.begin, span.end)).collect();
        // One at a time, although there are two streams to compute on.
        let expected = [
            ("d", 0, 4),
            ("g", 4, 14),
            ("c", 14, 15),
            ("d", 4, 8),
            ("g", 14, 24),
            ("c", 24, 25),
            ("d", 8, 12),
            ("g", 24, 34),
            ("c", 34, 35),
        ];
        assert_eq!(seen, expected);
        assert_eq!(forecast.ns(), 35);
    }

    #[test]
    fn an_empty_graph_takes_no_time() {
        let forecast = GraphTimer::new(|_| 1);
        Graph::new().run(&forecast).unwrap();
        assert_eq!((forecast.ns(), forecast.spans()), (0, vec![]));
    }
}
