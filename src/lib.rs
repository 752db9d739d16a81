//! Sidelane: MoE expert-parallel dispatch and combine that run concurrently with the compute.
//!
//! Start at [`World`]: a job's ranks as one of them sees it. Build an [`ExpertParallel`] on a
//! [`Group`] of them, then `dispatch`, run your experts, and `combine`. [`Window`] is the one-sided
//! API underneath.
//!
//! The modules, from the lowest to the highest. The first four are pure, and come from
//! `sidelane-core`:
//!
//! | module | what is in it |
//! |---|---|
//! | [`error`], [`config`], [`dtype`], [`topology`] | common types |
//! | [`gate`] | router decisions: [`Routing`](gate::Routing), synthetic and recorded |
//! | [`plan`] | from routing and counts to placement; pure |
//! | [`bootstrap`] | meeting, authentication, liveness, descriptors, rebuild |
//! | [`device`] | CUDA: what the driver and its GPUs can do; memory, streams, memory operations, modules |
//! | [`memory`] | heaps, windows, the receive pool |
//! | [`rows`] | the vector loops; matrix products |
//! | `lane` (private) | shm, loop, verbs and tcp: how bytes and signals move |
//! | [`exec`] | the stepper, and timelines |
//! | [`world`] | worlds, groups, windows |
//! | [`collective`] | all-reduce, broadcast, all-to-all, messages |
//! | [`ep`] | dispatch, combine, gradients |
//! | [`overlap`] | chunks, streams, the order of compute and transfers |
//! | [`layer`] | a whole MoE layer: gate, dispatch, experts, combine, and their gradients |

// Unit tests share files with those in `tests`, which name the library.
#[cfg(test)]
extern crate self as sidelane;

pub mod bootstrap;
pub mod collective;
pub mod config;
pub mod device;
pub mod ep;
pub mod error;
pub mod exec;
mod lane;
pub mod layer;
#[doc(hidden)]
pub mod memory;
pub mod overlap;
// For the program and the tests of this repository: no promises are made about it.
#[doc(hidden)]
pub mod rows;
mod sync;
pub mod world;

// For the program of this repository: no promises are made about it.
#[doc(hidden)]
pub use lane::NicSurvey;

// For the crates of this repository: no promises are made about it.
#[doc(hidden)]
pub use sidelane_core::digest;
pub(crate) use sidelane_core::schedule;

/// Element types of rows and of partial sums.
pub mod dtype {
    #[doc(inline)]
    pub use sidelane_core::dtype::{Fp8RowShape, PartialDtype};

    #[doc(hidden)]
    pub use sidelane_core::dtype::*;
    #[doc(hidden)]
    pub use sidelane_core::with_element;
}

/// Router decisions, by the rules of Megatron, DeepSpeed, DeepSeek-V3, Mixtral and others. Losses
/// and synthetic routing are in `sidelane_core::gate`.
pub mod gate {
    #[doc(inline)]
    pub use sidelane_core::gate::{
        BalanceLoss, Capacity, CapacityRule, Decision, Divisor, DropPolicy, Gate, GateConfig, GateInput,
        GroupScore, Noise, Normalize, Preset, RngKey, Routing, ScoreFunction, SecondExpertPolicy, Select,
        TokenGroups,
    };

    #[doc(hidden)]
    pub use sidelane_core::gate::*;
}

/// Settings of a layer: expert maps, row layouts, receive modes, orders of sums; and its traffic.
pub mod plan {
    #[doc(inline)]
    pub use sidelane_core::plan::{
        ExpertMap, Overflow, ReceiveMode, RowLayout, RowsByDistance, Strategy, SumOrder, Traffic,
    };

    #[doc(hidden)]
    pub use sidelane_core::plan::*;
}

/// Nodes, and the way of rows between them.
pub mod topology {
    #[doc(inline)]
    pub use sidelane_core::topology::{NodeMap, Route};

    #[doc(hidden)]
    pub use sidelane_core::topology::*;
}

pub use dtype::{Dtype, Element};
pub use ep::ExpertParallel;
pub use error::{Error, Result};
pub use world::{Group, Options, Window, World};

/// The README's example compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// The code of the page for Rust runs.
#[cfg(doctest)]
#[doc = include_str!("../docs/from-rust.md")]
struct FromRust;
