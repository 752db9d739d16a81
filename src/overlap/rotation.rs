//! Compute in turns: chunks go round the compute streams, and not too many at once.

use super::{Graph, Node, NodeLabel, StreamId};
use crate::error::Error;

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
