//! A small mixture-of-experts language model that learns from real text, on ranks that are
//! processes.
//!
//! ```text
//!   text --> tokens --> windows of a step, by seed and number --> each rank its own
//!
//!   rank      embed --> [ attention --> MoE layer ] x layers --> head --> loss         candle, and Sidelane in it
//!                                        |    ^
//!                           rows to experts   rows back: over the ranks of one expert-parallel group
//!
//!   step      gradients of experts added over their replicas, of the rest over all ranks --> AdamW
//! ```
//!
//! The trained weights do not depend on the execution: overlap, chunks, and ranks as processes,
//! threads, or one process that runs them in turn ([`Reference`](reference::Reference)), give the
//! same bits.
//!
//! Over a [`mesh`], the same model is made of layers that cut matrices, windows and the layers
//! themselves over ranks, too.

pub mod attention;
pub mod batches;
pub mod checkpoint;
pub mod error;
pub mod growth;
pub mod layer;
mod members;
pub mod mesh;
pub mod model;
pub mod moe;
pub mod optimizer;
pub mod parallel;
pub mod plot;
pub mod record;
pub mod reference;
pub mod settings;
pub mod survival;
#[path = "../../../crates/cli/src/chart/svg.rs"]
mod svg;
pub mod text;
pub mod tokens;
pub mod trainer;
pub mod weights;
