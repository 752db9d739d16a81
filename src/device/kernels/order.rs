//! The launch of `cuda/order.cu`.

use super::operands::{Operands, WORD, bytes};
use super::{Kernels, THREADS};
use crate::device::launch::Grid;
use crate::device::range::ByteSpan;
use crate::device::stream::Stream;
use crate::error::DeviceError;

/// Inputs and outputs of [`Kernels::order`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct SortArgs<'a> {
    /// Chosen experts, `i32 [choices]`; -1 is dropped.
    pub experts: ByteSpan<'a>,
    /// Number of choices: tokens times `top_k`, at least one.
    pub choices: u32,
    /// Choices of a token.
    pub top_k: u32,
    /// The bin of each expert, `i32 [n_experts]`.
    pub bin_of: ByteSpan<'a>,
    /// Number of experts.
    pub n_experts: u32,
    /// Number of bins.
    pub bins: u32,
    /// A token has one row in a bin, however many of its choices are there.
    pub once: bool,
    /// The token of each row, `i32 [choices]`: by bin, then token; -1 behind the last.
    pub order: ByteSpan<'a>,
}

/// `struct Order` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Parameters {
    experts: u64,
    bin_of: u64,
    order: u64,
    choices: u32,
    top_k: u32,
    n_experts: u32,
    once: u32,
}

impl Kernels {
    /// Enqueues the sorting of choices by bin, as [`SortedRouting`](crate::plan::SortedRouting)
    /// numbers entries. Invalid experts count as dropped.
    ///
    /// # Errors
    /// [`DeviceError::TooSmall`], [`DeviceError::Shape`], [`DeviceError::Misaligned`],
    /// [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn order(&self, stream: &Stream, order: &SortArgs<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "order";
        let SortArgs { choices, top_k, n_experts, bins, .. } = *order;
        let refuse = |what, given: u32, expected| {
            Err(DeviceError::Shape { kernel: KERNEL, what, given: given.into(), expected })
        };
        // Four passes of a block's threads are added to the checked range.
        if !(1..1 << 31).contains(&choices) {
            return refuse("choices", choices, "between 1 and 2^31 - 1");
        }
        if top_k == 0 {
            return refuse("top_k", top_k, "at least 1");
        }
        if !(1..=i32::MAX as u32).contains(&n_experts) {
            return refuse("n_experts", n_experts, "between 1 and 2^31 - 1");
        }
        let list = bytes([choices.into(), WORD]);
        let mut operands = Operands::of(KERNEL, stream);
        let parameters = Parameters {
            experts: operands.span("experts", order.experts, list, WORD)?,
            bin_of: operands.span("bin_of", order.bin_of, bytes([n_experts.into(), WORD]), WORD)?,
            order: operands.span("order", order.order, list, WORD)?,
            choices,
            top_k,
            n_experts,
            once: order.once.into(),
        };
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // choices below `choices`, experts are compared before they are used, and no more rows are
        // written than there are choices.
        unsafe { self.order.launch_struct(stream, operands.held(), Grid::line(bins, THREADS), &parameters) }
    }
}
