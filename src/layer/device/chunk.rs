//! A chunk on its way through experts: its rows, and what gradients of weights need of it.

use super::device_memory::DeviceTensor;
use crate::device::{ByteSpan, GroupSegments};

/// Rows of all experts, `[rows, hidden]`, in the type of the products' factors.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceSegments<'a> {
    pub rows: u32,
    pub values: ByteSpan<'a>,
    /// Rows of each expert; without them one expert has them all.
    pub counts: Option<GroupSegments<'a>>,
}

/// Gradients of gate and up.
#[derive(Debug)]
pub(super) enum Inner {
    /// `[rows, ffn]` each.
    Apart([DeviceTensor; 2]),
    /// Side by side, `[rows, 2 * ffn]`.
    Joined(DeviceTensor),
}

/// Tensors of a chunk, besides its rows, that gradients of weights are made of.
#[derive(Debug)]
pub(super) struct Differentials {
    pub inner: Inner,
    pub act: DeviceTensor,
}

/// A chunk for the gradients of weights: its rows, the gradients of its outputs, and what was kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceChunk<'a> {
    pub rows: ByteSpan<'a>,
    pub of_outputs: ByteSpan<'a>,
    pub kept: &'a Differentials,
}

impl Inner {
    pub fn gate(&self) -> &DeviceTensor {
        match self {
            Inner::Apart([gate, _]) | Inner::Joined(gate) => gate,
        }
    }

    pub fn up(&self) -> &DeviceTensor {
        match self {
            Inner::Apart([_, up]) | Inner::Joined(up) => up,
        }
    }
}
