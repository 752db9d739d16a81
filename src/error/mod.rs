//! Every error of the library: one enum per layer, data in fields, no strings glued together.
//!
//! This module does not depend on others, so each of them can name its faults without knowing the
//! modules above.
//!
//! | enum | raised by |
//! |---|---|
//! | [`BootstrapError`] | rendezvous, authentication, environment, descriptors |
//! | [`Cause`] | the reason why a world is dead: it ends every wait |
//! | [`MemoryError`] | heap, pool, windows |
//! | [`SimdError`] | an instruction set that was forced and is missing |
//! | [`DeviceError`] | GPUs: the driver, memory, streams, modules |
//! | [`LaneError`] | puts, signals and waits |
//! | [`VerbsError`] | NICs: the library, devices, work requests |
//! | [`GateError`] | bad input of a router |
//! | [`PlanError`] | routing and placement: bad input of a call |
//! | [`CallError`] | dispatch and combine as collective calls |
//! | [`LayerError`] | experts, and layers made of them |
//! | [`OverlapError`] | compute and transfers that run concurrently |

mod bootstrap;
mod device;
mod lane;
mod layer;
mod memory;

pub use sidelane_core::error::{CallError, CallKind, GateError, PlanError};

pub use bootstrap::{BootstrapError, Cause, LostReason, RefusedJoins};
pub use device::{DeviceError, KernelFault};
pub use lane::{CompletionStatus, LaneError, Operation, VerbsError};
pub use layer::{ExpertKind, ExpertPass, LayerError, NodeInfo, NodeLabel, OverlapError, StreamId};
pub use memory::MemoryError;

/// Any error of the library.
#[derive(Debug, Clone, PartialEq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum Error {
    /// Meeting the other ranks failed.
    #[error(transparent)]
    Bootstrap(BootstrapError),
    /// The world is dead until it is rebuilt.
    #[error(transparent)]
    World(#[from] Cause),
    /// Memory could not be had, or an address lies outside its window.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// An instruction set was forced that cannot be used.
    #[error(transparent)]
    Simd(#[from] SimdError),
    /// A GPU could not be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Bytes or signals could not be moved, or did not come.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// The input of a router is wrong.
    #[error(transparent)]
    Gate(#[from] GateError),
    /// The input of a call is wrong.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Ranks disagree about a call, or a call is used wrongly.
    #[error(transparent)]
    Call(#[from] CallError),
    /// Work that ran concurrently with other work failed.
    #[error(transparent)]
    Overlap(#[from] OverlapError),
    /// Experts did not do their part, or a layer is used wrongly.
    #[error(transparent)]
    Layer(#[from] LayerError),
}

impl From<BootstrapError> for Error {
    /// A world that fails while it is set up has failed: the cause is the same as later on.
    fn from(error: BootstrapError) -> Self {
        match error {
            BootstrapError::World(cause) => Error::World(cause),
            error => Error::Bootstrap(error),
        }
    }
}

impl From<VerbsError> for Error {
    fn from(error: VerbsError) -> Self {
        Error::Lane(error.into())
    }
}

/// Result with the library's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An instruction set was asked for by name and cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum SimdError {
    /// No set has this name.
    #[error("no instruction set is called {name:?}: portable, avx2 and avx512 are")]
    Unknown {
        /// The name as given.
        name: String,
    },
    /// The set exists, but not on this CPU.
    #[error("the instruction set {name} was asked for, but this CPU lacks {needs}")]
    Missing {
        /// The set.
        name: &'static str,
        /// The CPU features it needs.
        needs: &'static str,
    },
}

/// The loader's words on a library that it cannot load. They begin with its name, which the error
/// has already.
pub(crate) fn of_loader(library: &str, error: &libloading::Error) -> String {
    let words = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    let reason = words.strip_prefix(library).and_then(|rest| rest.strip_prefix(": "));
    reason.map_or_else(|| words.clone(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn world_that_fails_while_it_is_set_up_is_a_failed_world() {
        let cause = Cause::Lost { rank: 3, how: LostReason::Closed };
        assert_eq!(Error::from(BootstrapError::World(cause.clone())), Error::World(cause));
    }
}
