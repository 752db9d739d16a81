//! Tape of a forward pass for the backward pass.

use super::f32_rows::F32Rows;
use super::groups::{Group, groups};
use super::router_step::Routed;
use super::{Saved, Segments};
use crate::ep::Handle;
use crate::error::Error;
use crate::gate::Decision;

/// One forward pass, kept for its gradients. Several may be alive, and go backward in any order,
/// the same on all ranks.
///
/// Rows of f32 stay in the receive pool until the tape is consumed or dropped; others are kept
/// widened, outside of it.
#[derive(Debug)]
pub struct Tape {
    pub(super) instance: u64,
    /// The router's part.
    pub(super) routed: Routed,
    pub(super) chunks: Vec<ChunkTape>,
    pub(super) shared: Option<SavedShared>,
}

/// A chunk that experts have gone through.
pub(super) struct ChunkTape {
    pub landed: ReceivedChunk,
    /// Of each of its groups.
    pub made: Vec<GroupOutputs>,
}

/// Outputs of a group of experts for a chunk.
pub(super) struct GroupOutputs {
    /// `[rows, hidden]`, before it was weighted.
    pub outputs: Vec<f32>,
    pub saved: Saved,
}

/// What came of a chunk's dispatch.
#[derive(Debug)]
pub(super) struct ReceivedChunk {
    pub rows: F32Rows,
    pub handle: Handle,
    pub groups: Vec<Group>,
}

/// Values that the shared expert saved.
pub(super) struct SavedShared(pub Saved);

impl ReceivedChunk {
    /// For so many groups of experts at most.
    pub fn new(rows: F32Rows, handle: Handle, most: u32) -> Self {
        let groups = groups(handle.tokens_per_expert(), handle.padded_tokens_per_expert(), most);
        ReceivedChunk { rows, handle, groups }
    }

    /// As a group of experts sees it.
    pub fn segments<'a>(&'a self, group: &'a Group, hidden: usize) -> Result<Segments<'a>, Error> {
        Ok(group.segments(self.rows.values()?, hidden))
    }
}

impl Tape {
    /// The gate's decision for this rank's tokens. Its counts balance a bias
    /// ([`update_bias`](crate::gate::update_bias)).
    pub fn decision(&self) -> &Decision {
        &self.routed.gated.decision
    }

    /// The balancing loss of this rank's tokens; 0 if there is none.
    pub fn balance_loss(&self) -> f32 {
        self.routed.gated.balance
    }

    /// The loss on the size of logits; 0 if there is none.
    pub fn z_loss(&self) -> f32 {
        self.routed.gated.z
    }
}

impl std::fmt::Debug for ChunkTape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kept").field("landed", &self.landed).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for SavedShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SavedShared")
    }
}
