//! The graph: work, its place, its dependencies, and how the work of a node ended.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

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
pub(super) struct Entry<'a, G> {
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
    pub(super) entries: Vec<Entry<'a, G>>,
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
        self.entries.push(Entry { place, after, body: Box::new(body) });
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
