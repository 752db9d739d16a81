//! How long a pass would take: the graph of a step, with nothing carried out.

use super::pass_order::{self, BackwardOps, ChunkCounts, ForwardOps};
use crate::error::{Error, NodeInfo};
use crate::overlap::{Graph, GraphTimer, RoundRobin};

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
/// // Gradients of weights have the last ways home beside them.
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
