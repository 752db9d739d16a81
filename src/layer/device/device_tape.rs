//! Tape of a forward pass on a device.

use super::chunk_rows::DeviceSegments;
use super::device_experts::{RoutedSaved, SharedSaved};
use super::device_memory::{DeviceTensor, span};
use crate::device::{ByteSpan, DeviceRange, GroupSegments};
use crate::ep::{ExpertRows, Handle};
use crate::error::DeviceError;
use crate::gate::Decision;
use crate::layer::router_step::Gated;

/// One forward pass of a [`DeviceMoeLayer`](super::DeviceMoeLayer), kept for its gradients. Several
/// may be alive ([`tapes`](super::DeviceMoeLayerBuilder::tapes)), and go backward in any order, the
/// same on all ranks.
///
/// Rows that are factors of products as they come stay in the receive pool until the tape is
/// consumed or dropped; others are kept widened, in memory of the layer.
#[derive(Debug)]
pub struct DeviceTape {
    pub(super) instance: u64,
    /// The tokens, f32 `[tokens, hidden]`.
    pub(super) x: DeviceTensor,
    /// The same as factors for the shared expert, if there is one and these are not f32.
    pub(super) x_factors: Option<DeviceTensor>,
    pub(super) gated: Gated,
    /// By which the device chose, f32 `[tokens, experts]`. None where the host did.
    pub(super) logits: Option<DeviceTensor>,
    pub(super) chunks: Vec<ChunkTape>,
    /// By the shared expert.
    pub(super) shared: Option<SharedSaved>,
}

/// A chunk that experts have gone through.
#[derive(Debug)]
pub(super) struct ChunkTape {
    pub received: Received,
    pub made: Made,
}

/// What came with a chunk's dispatch.
#[derive(Debug)]
pub(super) struct Received {
    pub handle: Handle,
    /// Routing weights of the rows, f32.
    pub weights: DeviceRange,
    /// Rows of each expert, then the same with pads, i64.
    pub counts: DeviceRange,
}

/// Rows that experts took from a chunk, and tensors that they kept for the gradients.
#[derive(Debug)]
pub(super) struct Made {
    pub rows: FactorRows,
    pub saved: RoutedSaved,
}

/// Rows as factors of products: where they lie if they are, else a copy.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "calls allocate nothing")]
pub(super) enum FactorRows {
    /// Received ones hold their memory.
    InPlace(DeviceRange, #[expect(dead_code, reason = "held, not read")] Option<ExpertRows>),
    Widened(DeviceTensor),
}

impl FactorRows {
    pub fn span(&self) -> Result<ByteSpan<'_>, DeviceError> {
        match self {
            FactorRows::InPlace(range, _) => span(range),
            FactorRows::Widened(buffer) => buffer.span(),
        }
    }
}

impl Received {
    /// Rows of these experts, as they take them.
    pub fn segments<'a>(&'a self, rows: &'a FactorRows) -> Result<DeviceSegments<'a>, DeviceError> {
        let counts = GroupSegments {
            table: span(&self.counts)?,
            rows: self.handle.tokens_per_expert(),
            padded: self.handle.padded_tokens_per_expert(),
        };
        Ok(DeviceSegments { rows: self.handle.rows(), values: rows.span()?, counts: Some(counts) })
    }
}

impl DeviceTape {
    /// The gate's decision for this rank's tokens. Its counts balance a bias
    /// ([`update_bias`](crate::gate::update_bias)).
    pub fn decision(&self) -> &Decision {
        &self.gated.decision
    }

    /// The balancing loss of this rank's tokens; 0 if there is none.
    pub fn balance_loss(&self) -> f32 {
        self.gated.balance
    }

    /// The loss on the size of logits; 0 if there is none.
    pub fn z_loss(&self) -> f32 {
        self.gated.z
    }
}
