//! The order of both passes: one for the step that runs and for the one that is only timed.
//!
//! A transfer is on the link for a part of its time only. Before, ranks exchange counts, and rows
//! are packed; afterwards they are placed or summed; and all ranks wait for the latest. One
//! transfer after another would leave the link idle meanwhile. So chunks rotate among several
//! streams, each with an [`ExpertParallel`](crate::ExpertParallel) of its own:
//!
//! ```text
//!   one at a time   transfer 0   |m0|==========|m1|==========|m2|==========|        m ranks agree, rows are packed
//!                                                                                  = rows on the link
//!   two             transfer 0   |m0|==========|  |m2|==========|
//!                   transfer 1        |m1|========....|  |m3|========....|         . waits for the link
//!
//!   link            --------------|============================================
//! ```
//!
//! **Ranks agree in launch order.** A transfer begins when all ranks have agreed on the one before
//! it, on any stream. So a refused transfer is refused before any rank has begun a
//! later one, and all earlier ones complete: all ranks have made the same calls, and the next step
//! works.

use std::collections::VecDeque;

use super::pass_order;
use crate::error::{Error, NodeInfo, NodeLabel, StreamId};
use crate::overlap::{Graph, GraphTimer, Node, RoundRobin};

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
    let mut combines = Vec::with_capacity(chunks);
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
        combines.push(transfers.add(&mut graph, work("combine", chunk), &made, combine));
    }
    for (chunk, combine) in combines.into_iter().enumerate() {
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

/// Puts transfers on streams: those of chunk `c` on stream `c` modulo how many there are.
#[derive(Debug)]
pub(super) struct Transfers {
    streams: u32,
    last: Option<Node>,
}

impl Transfers {
    /// So many at once; 0 counts as 1.
    pub fn new(streams: u32) -> Self {
        Transfers { streams: streams.max(1), last: None }
    }

    /// Adds a node to the graph, which is [halfway](Node::halfway) when all ranks have agreed on
    /// it; `after` as in [`Graph::add`].
    pub fn add<'a, G>(
        &mut self,
        graph: &mut Graph<'a, G>,
        work: NodeLabel,
        after: &[Node],
        body: impl FnOnce(&G) -> Result<(), Error> + Send + 'a,
    ) -> Node {
        let stream = StreamId::Transfer(work.chunk % self.streams);
        let after: Vec<Node> = after.iter().copied().chain(self.last.map(Node::halfway)).collect();
        let node = graph.add(stream, work, &after, body);
        self.last = Some(node);
        node
    }
}

/// How long one pass of a layer would take, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// With transfers concurrent with compute.
    pub overlapped: u64,
    /// One piece of work after another.
    pub in_turn: u64,
}

/// Time of a forward pass of this many chunks on one compute stream, with one transfer in flight at
/// a time, if each node took the time that `cost` returns: `dispatch`, `combine`, `experts` and
/// `sum` of a chunk, and the `shared expert`. It is called in launch order.
///
/// ```
/// use sidelane::layer::forward_times;
/// use sidelane::overlap::NodeInfo;
///
/// // Experts that take as long as both transfers: all of these hide but the first and the last.
/// let cost = |at: NodeInfo| match at.work.name {
///     "dispatch" | "combine" => 5,
///     "experts" => 10,
///     _ => 0,
/// };
/// let times = forward_times(16, cost);
/// assert_eq!(times.overlapped, 5 + 16 * 10 + 5);
/// assert_eq!(times.in_turn, 16 * (5 + 10 + 5));
/// ```
pub fn forward_times(chunks: u32, cost: impl Fn(NodeInfo) -> u64) -> Times {
    timed(pass_order::forward(&Timed, whole(chunks), RoundRobin::new(1, 1)), cost)
}

/// The same of a backward pass: `gradient of combine`, `gradient of rows` and
/// `gradient of dispatch` of a chunk, the `counts of sources`, `gradient of weights`,
/// `gradient of shared rows` and `gradient of shared weights`.
///
/// ```
/// use sidelane::layer::backward_times;
/// use sidelane::overlap::NodeInfo;
///
/// // Gradients of weights run next to the last returns.
/// let cost = |at: NodeInfo| match at.work.name {
///     "gradient of combine" | "gradient of rows" | "gradient of dispatch" => 10,
///     "gradient of weights" => 40,
///     _ => 0,
/// };
/// let times = backward_times(4, cost);
/// assert_eq!(times.overlapped, 10 + 4 * 10 + 40);
/// assert_eq!(times.in_turn, 3 * 4 * 10 + 40);
/// ```
pub fn backward_times(chunks: u32, cost: impl Fn(NodeInfo) -> u64) -> Times {
    timed(pass_order::backward(&Timed, whole(chunks), RoundRobin::new(1, 1)), cost)
}

/// All experts of a chunk at once, and one transfer after another, since the given times assume
/// that each has the links to itself.
fn whole(chunks: u32) -> ChunkCounts {
    ChunkCounts { chunks: chunks as usize, groups: 1, transfers: 1 }
}

fn timed(graph: Graph<'_, ()>, cost: impl Fn(NodeInfo) -> u64) -> Times {
    let forecast = GraphTimer::new(cost);
    match graph.run(&forecast) {
        Ok(()) => {
            let in_turn = forecast.spans().iter().map(|span| span.end - span.begin).sum();
            Times { overlapped: forecast.ns(), in_turn }
        }
        Err(error) => unreachable!("nothing of it can fail: {error}"),
    }
}

/// Nothing is carried out.
struct Timed;

impl ForwardOps<()> for Timed {
    fn dispatch(&self, _: usize, (): &()) -> Result<(), Error> {
        Ok(())
    }
    fn shared(&self) -> Result<(), Error> {
        Ok(())
    }
    fn experts(&self, _: usize, _: usize) -> Result<(), Error> {
        Ok(())
    }
    fn combine(&self, _: usize, (): &()) -> Result<(), Error> {
        Ok(())
    }
    fn sum(&self, _: usize) -> Result<(), Error> {
        Ok(())
    }
}

impl BackwardOps<()> for Timed {
    fn combine(&self, _: usize, (): &()) -> Result<(), Error> {
        Ok(())
    }
    fn sources(&self, (): &()) -> Result<(), Error> {
        Ok(())
    }
    fn shared(&self) -> Result<(), Error> {
        Ok(())
    }
    fn experts(&self, _: usize, _: usize) -> Result<(), Error> {
        Ok(())
    }
    fn dispatch(&self, _: usize, (): &()) -> Result<(), Error> {
        Ok(())
    }
    fn weights(&self) -> Result<(), Error> {
        Ok(())
    }
    fn shared_weights(&self) -> Result<(), Error> {
        Ok(())
    }
}
