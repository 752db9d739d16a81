//! The launch of `cuda/pack.cu`.

use super::operands::{Operands, VECTOR, WORD, bytes};
use super::{Addresses, Kernels, THREADS};
use crate::device::launch::Grid;
use crate::device::module::Function;
use crate::device::range::{ByteSpan, Word};
use crate::device::stream::Stream;
use crate::dtype::Fp8RowShape;
use crate::error::DeviceError;
use crate::plan::SlotShape;

const KERNEL: &str = "pack";

/// Rows of a slot that one block writes, at most: `PART_ROWS` in the source.
const PART_ROWS: u32 = 512;

/// Inputs and outputs of [`Kernels::pack`] and [`Kernels::pack_fp8`]. Memory may be larger than the
/// sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct Pack<'a> {
    /// The shape of every slot.
    pub shape: SlotShape,
    /// Tokens of this call, at most those of the shape.
    pub tokens: u32,
    /// Rows, `[tokens, row_bytes]` or, to fp8, `bf16 [tokens, hidden]`, at a multiple of 16 bytes.
    pub x: ByteSpan<'a>,
    /// Choices, `i32 [tokens, top_k]`; -1 is dropped.
    pub experts: ByteSpan<'a>,
    /// Routing weights, `f32 [tokens, top_k]`.
    pub weights: ByteSpan<'a>,
    /// Number of experts.
    pub n_experts: u32,
    /// The rank that this one uses for each expert, `i32 [n_experts]`.
    pub rank_of: ByteSpan<'a>,
    /// The number of each expert at that rank, `i32 [n_experts]`.
    pub local_of: ByteSpan<'a>,
    /// Target of the slot for each rank: the own slot goes directly to where it is received.
    pub slots: &'a Addresses,
    /// The row that a token has in the slot for a rank, `i32 [tokens, ranks]`, or -1: for
    /// [`Kernels::sum`].
    pub places: ByteSpan<'a>,
    /// Calls so far: the launch adds one, and the new value goes into each header.
    pub counter: Word<'a, u64>,
    /// Where a fault is written: a [`KernelFault`](crate::error::KernelFault).
    pub status: Word<'a, u32>,
    /// Goes into each header.
    pub digest: u64,
}

/// `struct Pack` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Parameters {
    x: u64,
    experts: u64,
    weights: u64,
    rank_of: u64,
    local_of: u64,
    slots: u64,
    places: u64,
    counter: u64,
    status: u64,
    digest: u64,
    row_bytes: u64,
    weights_at: u64,
    rows_at: u64,
    tokens: u32,
    max_tokens: u32,
    top_k: u32,
    n_experts: u32,
    ranks: u32,
    hidden: u32,
}

impl Kernels {
    /// Enqueues the packing of this rank's rows into slots, in one launch: rows in token order, one
    /// for each rank that a token chose; headers; zeros in the unused parts. Sources and targets
    /// must not overlap.
    ///
    /// # Errors
    /// [`DeviceError::TooSmall`], [`DeviceError::Shape`], [`DeviceError::Misaligned`],
    /// [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn pack(&self, stream: &Stream, pack: &Pack<'_>) -> Result<(), DeviceError> {
        self.pack_rows(stream, pack, &self.pack, pack.shape.row_bytes(), 0)
    }

    /// As [`pack`](Self::pack), but a row of a slot is the [record](Fp8RowShape) of one: e4m3, with
    /// a scale for each block of 128 values, as `Rows::quantise` makes it. `x` is
    /// `bf16 [tokens, hidden]`.
    ///
    /// # Errors
    /// As [`pack`](Self::pack). [`DeviceError::Shape`] also if the rows of the shape are not the
    /// records of `hidden` values, or these not whole vectors of 16 bytes.
    pub fn pack_fp8(&self, stream: &Stream, pack: &Pack<'_>, hidden: u32) -> Result<(), DeviceError> {
        let refuse =
            |what, given, expected| Err(DeviceError::Shape { kernel: KERNEL, what, given, expected });
        if !hidden.is_multiple_of(8) || !(1..1 << 28).contains(&hidden) {
            return refuse("hidden", hidden.into(), "a multiple of 8 below 2^28");
        }
        if pack.shape.row_bytes() != Fp8RowShape::new(hidden).bytes() as u64 {
            return refuse("row_bytes", pack.shape.row_bytes(), "those of a record");
        }
        self.pack_rows(stream, pack, &self.pack_fp8, u64::from(hidden) * 2, hidden)
    }

    /// `row_bytes` is that of `x`.
    fn pack_rows(
        &self,
        stream: &Stream,
        pack: &Pack<'_>,
        function: &Function,
        row_bytes: u64,
        hidden: u32,
    ) -> Result<(), DeviceError> {
        let (shape, ranks) = (pack.shape, pack.slots.count);
        let refuse =
            |what, given, expected| Err(DeviceError::Shape { kernel: KERNEL, what, given, expected });
        if pack.tokens > shape.max_tokens() {
            return refuse("tokens", pack.tokens.into(), "at most the tokens of a slot");
        }
        if shape.row_bytes() >= 1 << 32 {
            return refuse("row_bytes", shape.row_bytes(), "less than 2^32");
        }
        if !(1..=i32::MAX as u32).contains(&pack.n_experts) {
            return refuse("n_experts", pack.n_experts.into(), "between 1 and 2^31 - 1");
        }
        let (tokens, top_k) = (u64::from(pack.tokens), u64::from(shape.top_k()));
        let choices = bytes([tokens, top_k, WORD]);
        let map = bytes([pack.n_experts.into(), WORD]);
        let mut operands = Operands::of(KERNEL, stream);
        let parameters = Parameters {
            x: operands.span("x", pack.x, bytes([tokens, row_bytes]), VECTOR)?,
            experts: operands.span("experts", pack.experts, choices, WORD)?,
            weights: operands.span("weights", pack.weights, choices, WORD)?,
            rank_of: operands.span("rank_of", pack.rank_of, map, WORD)?,
            local_of: operands.span("local_of", pack.local_of, map, WORD)?,
            slots: operands.addresses("slots", pack.slots, Some(shape.bytes()))?,
            places: operands.span("places", pack.places, bytes([tokens, ranks.into(), WORD]), WORD)?,
            counter: operands.word(pack.counter)?,
            status: operands.word(pack.status)?,
            digest: pack.digest,
            row_bytes: shape.row_bytes(),
            weights_at: shape.weights_at(),
            rows_at: shape.rows_at(),
            tokens: pack.tokens,
            max_tokens: shape.max_tokens(),
            top_k: shape.top_k(),
            n_experts: pack.n_experts,
            ranks,
            hidden,
        };
        // Two blocks for each multiprocessor, or as many as needed for parts that a block can hold.
        let blocks = stream.context.facts().multiprocessors.saturating_mul(2);
        let parts =
            blocks.div_ceil(ranks).min(shape.max_tokens()).max(shape.max_tokens().div_ceil(PART_ROWS));
        let grid = Grid { blocks: [parts, ranks, 1], ..Grid::line(1, THREADS) };
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // tokens below `tokens`, rows below `max_tokens`, experts below `n_experts`, ranks below
        // `ranks`, and every id is compared before it is used.
        unsafe { function.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}
