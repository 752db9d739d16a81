//! Mixture-of-experts dispatch and combine that leave the GPU's multiprocessors to the experts.
//!
//! Each rank of a job sends its tokens to the ranks of their experts, runs its own experts, and
//! gets the sums back. Rows move by copy engines within a node and by NICs between nodes; without a
//! GPU, by shared memory. The bits of a result do not depend on the machine, the lane or the route.
//!
//! # Should I use this?
//!
//! - **Yes**, to train or serve MoE layers over the processes of one machine or of several, on
//!   CPUs, or to try on one GPU what copy engines leave free. You want the same bits on every
//!   machine, an error that names a lost rank on all others, and no dependency on MPI, NCCL or a
//!   CUDA toolkit.
//! - **Not yet**, for production on GPUs: this code has run on single GPUs, and never over NVLink.
//! - **No**, if one process holds all experts: a grouped product needs no dispatch. Nor for other
//!   systems than Linux, or for an interface that stays as it is: version 0.1.0 is not published.
//!
//! # Three examples
//!
//! Threads are the ranks of these examples. In a job of processes each rank calls
//! [`World::from_env`], which knows `sidelane launch`, torchrun, srun and mpirun.
//!
//! Dispatch and combine, with experts that double their rows:
//!
//! ```
//! use sidelane::{Dtype, ExpertParallel, World, gate::Routing};
//!
//! fn rank(world: &World) -> sidelane::Result<()> {
//!     let mut ep = ExpertParallel::builder(&world.all()?)             // once for a layer
//!         .experts(4).top_k(2).hidden(8).dtype(Dtype::F32).build()?;
//!     let x = [1.5_f32; 3 * 8];                                       // [tokens, hidden]
//!     let routing = Routing::new(2, vec![0, 3, 1, 2, 3, 0], vec![0.5; 6])?;
//!     let (rows, handle) = ep.dispatch(&x, &routing)?;                // rows of my experts
//!     let mut y = handle.output()?;
//!     for (y, x) in y.rows_mut::<f32>()?.iter_mut().zip(rows.rows::<f32>()?) {
//!         *y = 2.0 * x;
//!     }
//!     let out: Vec<f32> = ep.combine(y, &handle)?;                    // each token's two rows, summed
//!     assert_eq!(out, [6.0; 3 * 8]);
//!     Ok(())
//! }
//!
//! let worlds = World::threads(2)?;
//! std::thread::scope(|scope| {
//!     let ranks: Vec<_> = worlds.iter().map(|world| scope.spawn(|| rank(world))).collect();
//!     ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
//! })?;
//! # Ok::<(), sidelane::Error>(())
//! ```
//!
//! A communicator for the rest of a step:
//!
//! ```
//! use sidelane::{World, collective::Communicator};
//!
//! # let worlds = World::threads(2)?;
//! # std::thread::scope(|scope| {
//! #     let ranks: Vec<_> = worlds.iter().map(|world| scope.spawn(|| rank(world))).collect();
//! #     ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
//! # })?;
//! fn rank(world: &World) -> sidelane::Result<()> {
//!     let mut ranks = Communicator::builder(&world.all()?).build()?;
//!     let mut gradients = [world.rank() as f32, 1.0];
//!     ranks.all_reduce(&mut gradients)?;
//!     assert_eq!(gradients, [1.0, 2.0]);
//!     Ok(())
//! }
//! # Ok::<(), sidelane::Error>(())
//! ```
//!
//! A whole layer, with a gate and experts, forward and backward. It cuts its tokens into two
//! chunks: one moves while experts work on the other.
//!
//! ```
//! use sidelane::gate::Preset;
//! use sidelane::layer::{GroupedSwiGlu, Input, MoeLayer};
//! use sidelane::{Dtype, World};
//!
//! # let worlds = World::threads(2)?;
//! # std::thread::scope(|scope| {
//! #     let ranks: Vec<_> = worlds.iter().map(|world| scope.spawn(|| rank(world))).collect();
//! #     ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
//! # })?;
//! fn rank(world: &World) -> sidelane::Result<()> {
//!     let (hidden, ffn) = (8, 16);
//!     let weights = vec![0.125; GroupedSwiGlu::values(2, hidden, ffn)];    // 2 of 4 experts are here
//!     let experts = GroupedSwiGlu::new(2, hidden, ffn, weights)?;
//!     let mut layer = MoeLayer::builder(&world.all()?, Preset::Mixtral.config(4, 2)?, hidden, experts)
//!         .dtype(Dtype::F32).chunks(2).build()?;
//!     let (out, tape) = layer.forward(&Input::new(&[0.5_f32; 6 * 8]))?;
//!     let gradients = layer.backward(tape, &vec![1.0; out.len()])?;        // of x, router and experts
//!     assert_eq!(gradients.experts.len(), layer.experts().weights().len());
//!     Ok(())
//! }
//! # Ok::<(), sidelane::Error>(())
//! ```
//!
//! # Themes
//!
//! | to | see |
//! |---|---|
//! | join a job, survive the loss of a rank, take in spares | [`World`], [`Options`], [`bootstrap`], [`config`] |
//! | choose ranks, write to their memory | [`Group`], [`Window`] |
//! | dispatch and combine, and their gradients | [`ExpertParallel`], [`ep::Handle`], [`ep::ExpertRows`] |
//! | place experts, size memory, order sums | [`plan`], [`topology`], [`dtype`] |
//! | route tokens as Megatron, DeepSpeed, DeepSeek-V3 or Mixtral do | [`gate`] |
//! | run a whole MoE layer | [`layer::MoeLayer`], [`layer::DeviceMoeLayer`] |
//! | run transfers beside compute, two microbatches at once | [`overlap`] |
//! | reduce, gather, scatter and send besides | [`collective::Communicator`], [`ep::RowCollective`] |
//! | work on a CUDA stream, hold calls in graphs | [`device`], [`ep::Graphs`] |
//! | see how the bytes of a call went | [`ep::Report`], [`exec::Timeline`] |
//! | know which executor serves a feature | [`ep::Feature`], [`ep::CallExecutor`] |
//! | tell errors apart | [`error`] |
//!
//! The pages in `docs` go on from here: first steps, Rust, C, Python and Megatron-core, the design,
//! and measurements.

// Unit tests share files with those in `tests`, which name the library.
#[cfg(test)]
#[path = "../tests/no_allocation/counting.rs"]
mod counting;
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
