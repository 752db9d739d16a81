//! The order of both passes: one for the step that runs and for the one that is only timed.

use std::collections::VecDeque;

use super::transfers::Transfers;
use crate::error::{Error, NodeLabel, StreamId};
use crate::overlap::{Graph, RoundRobin};

/// Chunks of a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChunkCounts {
    pub chunks: usize,
    /// Groups of the experts of each chunk, at most: with fewer experts, the last groups are empty.
    pub groups: usize,
    /// In flight at once.
    pub transfers: u32,
}

/// Work of the nodes of a forward pass on a chunk. Transfers report when all ranks have agreed on
/// them.
pub(super) trait ForwardOps<G>: Sync {
    fn dispatch(&self, chunk: usize, run: &G) -> Result<(), Error>;
    fn shared(&self) -> Result<(), Error>;
    fn experts(&self, chunk: usize, group: usize) -> Result<(), Error>;
    fn combine(&self, chunk: usize, run: &G) -> Result<(), Error>;
    fn sum(&self, chunk: usize) -> Result<(), Error>;
}

/// The same of a backward pass, or to all chunks.
pub(super) trait BackwardOps<G>: Sync {
    fn combine(&self, chunk: usize, run: &G) -> Result<(), Error>;
    /// The choices of all ranks, and so the order of the rows that came by them.
    fn sources(&self, run: &G) -> Result<(), Error>;
    fn shared(&self) -> Result<(), Error>;
    fn experts(&self, chunk: usize, group: usize) -> Result<(), Error>;
    fn dispatch(&self, chunk: usize, run: &G) -> Result<(), Error>;
    fn weights(&self) -> Result<(), Error>;
    fn shared_weights(&self) -> Result<(), Error>;
}

/// Number of dispatches in front of the combine of the chunk that experts compute. Where transfers
/// take as long as experts, a late combine delays the transfers behind it. This many may be late
/// before experts run out of work.
const AHEAD: usize = 6;

/// Of all computation except routed experts.
const COMPUTE: StreamId = StreamId::Compute(0);

fn work(name: &'static str, chunk: usize) -> NodeLabel {
    NodeLabel { name, chunk: chunk as u32 }
}

/// Chunk by chunk, dispatches ahead. Sums come last, where they delay no experts: all but the last
/// run concurrently with the last combine.
pub(super) fn forward<'g, G, W: ForwardOps<G>>(
    step: &'g W,
    cut: ChunkCounts,
    mut turns: RoundRobin,
) -> Graph<'g, G> {
    let ChunkCounts { chunks, groups, transfers } = cut;
    let (mut graph, mut transfers) = (Graph::new(), Transfers::new(transfers));
    let dispatch = |graph: &mut Graph<'g, G>, transfers: &mut Transfers, chunk: usize| {
        transfers.add(graph, work("dispatch", chunk), &[], move |run| step.dispatch(chunk, run))
    };
    let mut landing = VecDeque::with_capacity(1 + AHEAD);
    landing.extend((0..chunks.min(AHEAD)).map(|chunk| dispatch(&mut graph, &mut transfers, chunk)));
    let beside = graph.add(COMPUTE, work("shared expert", 0), &[], |_| step.shared());
    let mut home = Vec::with_capacity(chunks);
    for chunk in 0..chunks {
        if chunk + AHEAD < chunks {
            landing.push_back(dispatch(&mut graph, &mut transfers, chunk + AHEAD));
        }
        let landed = landing.pop_front();
        let after = landed.as_slice();
        let group =
            |group| turns.add(&mut graph, work("experts", chunk), after, move |_| step.experts(chunk, group));
        let made: Vec<_> = (0..groups).map(group).collect();
        let combine = move |run: &G| step.combine(chunk, run);
        home.push(transfers.add(&mut graph, work("combine", chunk), &made, combine));
    }
    for (chunk, combine) in home.into_iter().enumerate() {
        graph.add(COMPUTE, work("sum", chunk), &[combine, beside], move |_| step.sum(chunk));
    }
    graph
}

/// Gradients of combine come first, so that no product waits for a return in front of its input.
/// Gradients of weights come last, since they need the rows of all chunks: they overlap with the
/// remaining returns.
pub(super) fn backward<'g, G, W: BackwardOps<G>>(
    step: &'g W,
    cut: ChunkCounts,
    mut turns: RoundRobin,
) -> Graph<'g, G> {
    let ChunkCounts { chunks, groups, transfers } = cut;
    let (mut graph, mut transfers) = (Graph::new(), Transfers::new(transfers));
    let combine = |chunk| {
        let combine = move |run: &G| step.combine(chunk, run);
        transfers.add(&mut graph, work("gradient of combine", chunk), &[], combine)
    };
    let landing: Vec<_> = (0..chunks).map(combine).collect();
    let sources = work("counts of sources", 0);
    let mut before_weights = vec![transfers.add(&mut graph, sources, &[], |run| step.sources(run))];
    let beside = graph.add(COMPUTE, work("gradient of shared rows", 0), &[], |_| step.shared());
    // Until the first gradients have come there is no other work.
    turns.add(&mut graph, work("gradient of shared weights", 0), &[beside], |_| step.shared_weights());
    for (chunk, landed) in landing.into_iter().enumerate() {
        let name = "gradient of rows";
        let group =
            |group| turns.add(&mut graph, work(name, chunk), &[landed], move |_| step.experts(chunk, group));
        let made: Vec<_> = (0..groups).map(group).collect();
        before_weights.extend_from_slice(&made);
        let name = "gradient of dispatch";
        transfers.add(&mut graph, work(name, chunk), &made, move |run| step.dispatch(chunk, run));
    }
    turns.add(&mut graph, work("gradient of weights", 0), &before_weights, |_| step.weights());
    graph
}
