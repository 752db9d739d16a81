//! Meshes of parallel strategies for a model on hardware: memory, bytes and time, by rooflines.
//!
//! ```text
//!   Transformer   a configuration --> parameters, operations of a token
//!   Devices       a hardware file --> C operations, W bytes a second     Rules: the scaling book's limits
//!        |
//!   Question      tokens, devices --> every Mesh: pp x dp x cp x tp, ep, ZeRO, microbatches
//!        |
//!   Memory, Step  of each mesh; dispatch and combine by the time model --> Found: the fastest that fit
//! ```
//!
//! A step's time is a bound from below: products at the peak, bytes at their rates, no latency. It
//! ranks meshes, and says which part binds. Constants have a source in their documentation, or the
//! word *assumed*.

mod device_rates;
mod dispatch;
mod memory;
mod mesh;
mod misfit;
mod rules;
mod search;
mod step_time;
#[cfg(test)]
mod tests;
mod transformer;

pub use device_rates::{Devices, Fabric, NoPeaks};
pub use memory::{Memory, Precision};
pub use mesh::{Mesh, Shape, Zero};
pub use misfit::Misfit;
pub use rules::{Mixed, Rules, least_data_tokens, least_node_tokens, most_tensor_ways, training_seconds};
pub use search::{Candidate, Fixed, FoundMeshes, Question, SearchError};
pub use step_time::{Bound, Overlap, Pass, Received, Step};
pub use transformer::{Attention, ConfigError, Experts, Transformer, UnknownModel};
