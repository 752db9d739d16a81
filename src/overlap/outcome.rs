//! How the work of a node ended.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::graph::Body;
use crate::error::{Error, NodeInfo, OverlapError};

/// Why a node went wrong.
pub enum NodeError {
    Failed(Error),
    Panicked(String),
}

impl NodeError {
    /// As the error of a run.
    pub fn at(self, at: NodeInfo, not_begun: usize) -> OverlapError {
        match self {
            NodeError::Failed(error) => OverlapError::Failed { at, error: Box::new(error), not_begun },
            NodeError::Panicked(message) => OverlapError::Panicked { at, message, not_begun },
        }
    }
}

/// Runs the work. A panic ends here: streams have other nodes to wait for, and half-written results
/// are never used.
pub fn of<G>(body: Body<'_, G>, ground: &G) -> Result<(), NodeError> {
    match catch_unwind(AssertUnwindSafe(|| body(ground))) {
        Ok(done) => done.map_err(NodeError::Failed),
        Err(panic) => Err(NodeError::Panicked(message(panic.as_ref()))),
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let said = panic.downcast_ref::<&str>().map(|said| (*said).to_owned());
    said.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}
