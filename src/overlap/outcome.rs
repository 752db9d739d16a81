//! How the work of a node ended.

use super::graph::Body;
use crate::bootstrap::caught;
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
    caught(|| body(ground)).map_err(NodeError::Panicked)?.map_err(NodeError::Failed)
}
