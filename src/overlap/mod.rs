//! Overlap: compute and transfers of one rank, side by side.
//!
//! A [`Graph`] holds the work on each chunk, in *launch order*. Every node belongs to a
//! [`StreamId`], which runs its nodes in that order; edges name the nodes of other streams that
//! must have ended before. An [`Executor`] runs the graph:
//!
//! ```text
//!   launch order     d0  d1  g0  c0  d2  g1  c1  g2  c2          d dispatch, g experts, c combine, of chunks 0, 1, 2
//!
//!   transfer 0       |d0|-|d1|----|c0|-|d2|---|c1|-----|c2|
//!                        \    \   /       \   /    \   /
//!   compute 0             |--g0--|  |--g1--|  |--g2--|
//! ```
//!
//! | executor | streams are | events are |
//! |---|---|---|
//! | [`HostExecutor`] | threads that live as long as the run; one of them is the caller's | a condition that threads sleep on |
//! | [`CudaExecutor`] | CUDA streams; compute 0 is the caller's, which waits for the others at the end | marks that streams wait for |
//! | [`GraphTimer`] | what nodes are said to take | ends of nodes; nothing is carried out |
//! | host or CUDA, overlap off | the caller's thread, or stream, alone, in launch order | nothing to wait for |
//!
//! **Why no order can deadlock.** An edge points to a node that was added before, as only such a
//! node has a [`Node`] to name it by. So a single thread can run the whole graph in launch order.
//! And of the nodes that are not done yet, the first in launch order has no wait left, neither on
//! its own stream nor by an edge. So some node can always run. Between ranks the same holds if all
//! add their collective calls in one order to one stream, or each behind [half](Node::halfway) of
//! the one before, on any stream.
//!
//! **Halfway.** Some nodes complete early what others wait for: a transfer that all ranks have
//! agreed on only has to move its rows. It reports that ([`Run::halfway`]), and an edge may wait
//! for just that ([`Node::halfway`]).
//!
//! **Same bits.** Nodes run once, after the nodes that their edges name. If edges order all their
//! reads and writes, which [`Handoff`]s check, results do not depend on the streams, or on whether
//! there are any.
//!
//! **Why no sender is blocked.** A chunk's rows land in an extent of their receiver's pool, which
//! is that chunk's alone from its announcement until [`ExpertRows`](crate::ep::ExpertRows) of it
//! are dropped. So a sender of chunk 1 waits for its receiver to make that call, never for the
//! experts to finish chunk 0. Launch order bounds the memory: as many dispatches as are in front of
//! a combine are in flight; `d0 d1 g0 c0 d2` holds two chunks at most, if the experts of each drop
//! its rows.

mod chunks;
mod cuda;
mod host;
mod one_f_one_b;
mod task_graph;

pub use crate::error::{NodeInfo, NodeLabel, StreamId};
pub use chunks::{ChunkRule, TokenChunks};
pub use cuda::{CudaExecutor, StreamPool};
pub use host::{HostExecutor, Run};
pub use one_f_one_b::{Direction, LayerOp, LayerStep, Passes};
pub use task_graph::{Body, Executor, Graph, Handoff, Node};

// For the program and the tests of this repository: no promises are made about it.
#[doc(hidden)]
pub use chunks::{CallCost, expert_groups};
#[doc(hidden)]
pub use task_graph::{GraphTimer, NodeTime, RoundRobin};
