//! A whole MoE layer: gate, dispatch, experts, combine; forward and backward, with transfers
//! concurrent with the compute.
//!
//! ```text
//!   x [T,H] --+--> router x w --> Gate --> choices, weights                     residual [T,H]
//!             |                     |                                              |
//!             |         tokens in chunks, one after another                        |
//!             |          dispatch --> experts, times routing weight --> combine -->+--> out [T,H]
//!             |                                                                    |
//!             +--> shared expert: all tokens ------------------------------------->+
//! ```
//!
//! The same work is one [graph](crate::overlap) forward and one backward, with or without overlap:
//!
//! ```text
//!   forward    transfer   |d0| |d1| |d2| |c0| |c1| |c2|             d dispatch, c combine of chunks 0, 1, 2
//!              compute    |sh| |g0| |g1| |g2| |o0| |o1| |o2|        sh shared expert, g experts, o sums to the output
//!
//!   backward   transfer   |c0'| |c1'| |c2'| |n| |d0'| |d1'| |d2'|   c' gradient of combine, d' of dispatch; n counts of sources
//!              compute    |sh'| |g0'| |g1'| |g2'| |w|               g' gradients of rows, w of weights: beside what is left of d'; sh' both of the shared expert
//! ```
//!
//! Forward, dispatches are six chunks ahead of the combine that comes next (seven are in front of
//! the first); backward, all gradients of combine come first: the gradients of weights need their
//! rows anyway. All ranks agree on transfers in this order, and
//! [several](MoeLayerBuilder::transfers) agreed ones are in flight at once.
//! [`MoeLayer::combined_forward_backward`] puts both passes, of two microbatches, into one graph.
//!
//! Where several compute streams share a chunk, its experts are
//! [divided](MoeLayerBuilder::expert_groups): each group is a turn.
//!
//! **Bits** do not depend on chunks, groups, transfers at once, streams, or overlap: rows of
//! experts and of combine are independent, and weight gradients are summed in [one
//! order](GradientOrder). Sums are f32:
//!
//! | result | order, each from the left |
//! |---|---|
//! | a row that is combined | an expert's row times its routing weight, rounded to the element type |
//! | out | residual + combined + shared; combine sums by expert, as [`ExpertParallel::combine`](crate::ExpertParallel::combine), and rounds to the element type |
//! | gradient of a row | of the row times its weight through the expert, rounded to the element type before rows are summed to tokens |
//! | gradient of x | through experts (rounded to the element type) + shared expert + router |
//! | gradient of a routing weight | `<y, g>` over 16 lanes, as [`RowKernels::dot`](crate::rows::RowKernels::dot) |
//! | gradients of weights | one product over all rows, by source rank and token |
//!
//! The gradient of the residual is the output's, and is left to the caller. Gradients of the router
//! and of the shared expert are of this rank's tokens: a trainer adds those of its ranks. Those of
//! an expert are of all ranks' tokens. Those of a replica are of the ranks that use it: a trainer
//! adds those of an expert's replicas over their ranks.
//!
//! **Faults.** Input that one rank refuses is an error on every rank, no rows move, and the next
//! call works. Experts that fail, panic, give rows of another shape or exceed the deadline, and
//! lost peers, end the world: every rank has a typed error, no thread is left behind, and after
//! [`World::rebuild`](crate::World::rebuild) the layer continues as [`MoeLayer::rebuilt`]. A thread
//! cannot be ended from outside: experts that never return block their own rank. Its peers get
//! their error at the deadline, its own comes when the experts have returned.

mod backward;
mod device;
mod experts;
mod forward;
mod forward_backward;
mod moe;
mod pass_order;
mod router_step;
mod step;
mod swiglu;

pub use backward::Gradients;
pub use device::{
    DeviceGradients, DeviceMoeLayer, DeviceMoeLayerBuilder, DeviceTape, DeviceTensor, Products,
};
pub use experts::{ExpertError, Experts, GradientOrder, Saved, Segments};
pub use moe::{MoeLayer, MoeLayerBuilder};
pub use router_step::Input;
pub use step::Tape;
pub use swiglu::GroupedSwiGlu;
// For the program and the tests of this repository: no promises are made about it.
#[doc(hidden)]
pub use pass_order::{Times, backward_times, forward_times};
