//! Predicted time of a graph, from given times of its nodes: no node runs.

use std::cell::RefCell;
use std::collections::HashMap;

use super::{Executor, Graph, NodeInfo, StreamId};
use crate::error::OverlapError;

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
    use super::super::{NodeLabel, RoundRobin};
    use super::*;

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
