//! Launches of kernels that move rows: `cuda/pack.cu`, `regroup.cu` and `records.cu`.
//!
//! ```text
//!   pack      x, choices --> a slot for each rank, in bf16 or as fp8 records
//!   regroup   rows --index, runs--> rows
//!   records   rows --index, runs--> fp8 records
//! ```

use std::sync::Arc;

use super::{Addresses, Kernels, Operands, VECTOR, WORD, blocks_at_work, bytes};
use crate::device::module::{Function, Module};
use crate::device::range::{ByteSpan, Word};
use crate::device::stream::Stream;
use crate::dtype::{Dtype, Fp8RowShape};
use crate::error::DeviceError;
use crate::plan::{RowRun, SlotShape};

const PACK: &str = "pack";

/// Rows of a slot that a block writes at a time, at most: `PART_ROWS` in the source.
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
    /// The rank that this one uses for each expert, `i32 [n_experts]`; [`Pack::MASKED`] drops its
    /// choices.
    pub rank_of: ByteSpan<'a>,
    /// The number of each expert at that rank, `i32 [n_experts]`.
    pub local_of: ByteSpan<'a>,
    /// Target of the slot for each rank: the own slot goes directly to where it is received.
    pub slots: &'a Addresses,
    /// The row that a token has in the slot for a rank, `i32 [tokens, ranks]`, or -1: for
    /// [`Kernels::sum`].
    pub places: ByteSpan<'a>,
    /// Whether each choice is dropped because its expert is masked, `u8 [tokens, top_k]`.
    pub dropped: ByteSpan<'a>,
    /// Calls so far: the launch adds one, and the new value goes into each header.
    pub counter: Word<'a, u64>,
    /// Goes into each header.
    pub digest: u64,
    /// Why the host refuses the call, as the word of a [`KernelFault`](crate::error::KernelFault);
    /// 0 if it does not. It goes into each header or, if it is 0, the fault that the launch finds.
    pub refused: u32,
}

impl Pack<'_> {
    /// In place of the rank of an expert that a mask leaves none: `MASKED` in the source.
    pub const MASKED: i32 = -2;
}

/// `struct Pack` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct PackParameters {
    x: u64,
    experts: u64,
    weights: u64,
    rank_of: u64,
    local_of: u64,
    slots: u64,
    places: u64,
    dropped: u64,
    counter: u64,
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
    parts: u32,
    refused: u32,
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
    /// a scale for each block of 128 values, as `Rows::quantize` makes it. `x` is
    /// `bf16 [tokens, hidden]`.
    ///
    /// # Errors
    /// As [`pack`](Self::pack). [`DeviceError::Shape`] also if the rows of the shape are not the
    /// records of `hidden` values, or these not whole vectors of 16 bytes.
    pub fn pack_fp8(&self, stream: &Stream, pack: &Pack<'_>, hidden: u32) -> Result<(), DeviceError> {
        let refuse = |what, given, expected| Err(DeviceError::Shape { kernel: PACK, what, given, expected });
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
        let refuse = |what, given, expected| Err(DeviceError::Shape { kernel: PACK, what, given, expected });
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
        // Two blocks for each multiprocessor, or as many as the limit lets run. No part has more
        // rows than a block can hold.
        let blocks = blocks_at_work(stream, 2).min(self.limit.0.unwrap_or(u32::MAX));
        let parts =
            blocks.div_ceil(ranks).min(shape.max_tokens()).max(shape.max_tokens().div_ceil(PART_ROWS));
        let mut operands = Operands::of(PACK, stream);
        let parameters = PackParameters {
            x: operands.span("x", pack.x, bytes([tokens, row_bytes]), VECTOR)?,
            experts: operands.span("experts", pack.experts, choices, WORD)?,
            weights: operands.span("weights", pack.weights, choices, WORD)?,
            rank_of: operands.span("rank_of", pack.rank_of, map, WORD)?,
            local_of: operands.span("local_of", pack.local_of, map, WORD)?,
            slots: operands.addresses("slots", pack.slots, Some(shape.bytes()))?,
            places: operands.span("places", pack.places, bytes([tokens, ranks.into(), WORD]), WORD)?,
            dropped: operands.span("dropped", pack.dropped, bytes([tokens, top_k, 1]), 1)?,
            counter: operands.word(pack.counter)?,
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
            parts,
            refused: pack.refused,
        };
        let grid = self.limit.grid([parts, ranks]);
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // tokens below `tokens`, rows below `max_tokens`, experts below `n_experts`, ranks below
        // `ranks`, and every id is compared before it is used.
        unsafe { function.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}

/// Vectors that a thread moves at a time: `IN_FLIGHT` in the source.
const IN_FLIGHT: u64 = 4;

/// Runs of a list of rows: which entries of an index are wanted, and where their rows go. Memory
/// may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct RunArgs<'a> {
    /// The runs, as [`RunArgs::lay_out`] writes them.
    pub runs: ByteSpan<'a>,
    /// Number of runs.
    pub count: u32,
    /// Entries of the index.
    pub entries: u32,
    /// Rows of the output, among which those of the list go.
    pub places: u32,
}

impl RunArgs<'_> {
    /// Words of a run.
    pub const WORDS: usize = 4;

    /// Writes runs as kernels read them, and gives the rows of the list, pads counted.
    pub fn lay_out(runs: &[RowRun], words: &mut Vec<u32>) -> u32 {
        let mut begin = 0;
        words.clear();
        for &RowRun { to_row, first, count, pad } in runs {
            words.extend([begin, first, to_row, count]);
            begin += count + pad;
        }
        begin
    }
}

/// `struct RowRuns` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
pub(super) struct RunParameters {
    runs: u64,
    count: u32,
    entries: u32,
    places: u32,
    rows: u32,
}

impl RunParameters {
    /// Of a list of `rows` rows.
    pub fn of(
        operands: &mut Operands<'_>,
        kernel: &'static str,
        rows: u32,
        runs: Option<RunArgs<'_>>,
    ) -> Result<Self, DeviceError> {
        let Some(RunArgs { runs, count, entries, places }) = runs else {
            return Ok(RunParameters { runs: 0, count: 0, entries: rows, places: rows, rows });
        };
        if count == 0 {
            let expected = "at least one";
            return Err(DeviceError::Shape { kernel, what: "runs", given: 0, expected });
        }
        let runs = operands.span("runs", runs, bytes([count.into(), Self::RUN]), WORD)?;
        Ok(RunParameters { runs, count, entries, places, rows })
    }

    /// Bytes of a run.
    const RUN: u64 = RunArgs::WORDS as u64 * WORD;
}

/// Inputs and outputs of [`Kernels::regroup`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct PermuteArgs<'a> {
    /// Bytes of a row, a multiple of 16.
    pub row_bytes: u64,
    /// Rows that are there.
    pub sources: u32,
    /// Rows that are made.
    pub rows: u32,
    /// `[sources, row_bytes]`, at a multiple of 16 bytes.
    pub from: ByteSpan<'a>,
    /// The source of each row, `i32 [rows]`; -1 gives zeros, as pads are. With runs, `[entries]`.
    pub index: ByteSpan<'a>,
    /// `[rows, row_bytes]`, at a multiple of 16 bytes. With runs, `[places, row_bytes]`.
    pub out: ByteSpan<'a>,
    /// Which entries are wanted and where their rows go, if not all of them one after the other.
    pub runs: Option<RunArgs<'a>>,
    /// Where a fault is written: a [`KernelFault`](crate::error::KernelFault).
    pub status: Word<'a, u32>,
}

/// `struct Regroup` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct PermuteParameters {
    out: u64,
    from: u64,
    index: u64,
    status: u64,
    row_bytes: u64,
    list: RunParameters,
    sources: u32,
    unused: u32,
}

impl Kernels {
    /// Enqueues the gathering of rows: `out[i] = from[index[i]]`, or of those in runs alone, each
    /// to its place. A grouped matrix product that takes a row index does not need this kernel.
    ///
    /// # Errors
    /// [`DeviceError::TooSmall`], [`DeviceError::Shape`], [`DeviceError::Misaligned`],
    /// [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn regroup(&self, stream: &Stream, regroup: &PermuteArgs<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "regroup";
        let PermuteArgs { row_bytes, sources, rows, .. } = *regroup;
        let refuse =
            |what, given, expected| Err(DeviceError::Shape { kernel: KERNEL, what, given, expected });
        if row_bytes == 0 || !row_bytes.is_multiple_of(VECTOR) || row_bytes >= 1 << 32 {
            return refuse("row_bytes", row_bytes, "a multiple of 16 below 2^32");
        }
        for (what, given) in [("sources", sources), ("rows", rows)] {
            if given > i32::MAX as u32 {
                return refuse(what, given.into(), "less than 2^31");
            }
        }
        let mut operands = Operands::of(KERNEL, stream);
        let list = RunParameters::of(&mut operands, KERNEL, rows, regroup.runs)?;
        let parameters = PermuteParameters {
            out: operands.span("out", regroup.out, bytes([list.places.into(), row_bytes]), VECTOR)?,
            from: operands.span("from", regroup.from, bytes([sources.into(), row_bytes]), VECTOR)?,
            index: operands.span("index", regroup.index, bytes([list.entries.into(), WORD]), WORD)?,
            status: operands.word(regroup.status)?,
            row_bytes,
            list,
            sources,
            unused: 0,
        };
        let vectors = u64::from(rows) * (row_bytes / VECTOR);
        let grid = self.limit.threads(stream, vectors.div_ceil(IN_FLIGHT));
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // rows below `rows`, runs below `count`; every entry is compared with `entries`, every
        // place with `places` and every index with `sources` before it is used.
        unsafe { self.regroup.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}

/// Vectors that a thread has on their way: `AT_ONCE` in the source.
const AT_ONCE: u64 = 4;

/// Inputs and outputs of [`Kernels::records`]. Memory may be larger than the sizes named here.
#[derive(Clone, Copy, Debug)]
pub struct RecordArgs<'a> {
    /// Elements of a row, whole vectors of 16 bytes.
    pub hidden: u32,
    /// Their type.
    pub dtype: Dtype,
    /// Rows that are there.
    pub sources: u32,
    /// Records that are made.
    pub rows: u32,
    /// `[sources, hidden]`, at a multiple of 16 bytes.
    pub from: ByteSpan<'a>,
    /// The row of each record, `i32 [rows]`; -1 gives zeros. Without it each row becomes its own
    /// record. With runs, `[entries]`.
    pub index: Option<ByteSpan<'a>>,
    /// `[rows, record]`, at a multiple of 16 bytes. With runs, `[places, record]`.
    pub out: ByteSpan<'a>,
    /// Which entries are wanted and where their records go, if not all of them one after the other.
    pub runs: Option<RunArgs<'a>>,
    /// Where a fault is written: a [`KernelFault`](crate::error::KernelFault).
    pub status: Word<'a, u32>,
}

/// `struct Records` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct RecordParameters {
    out: u64,
    from: u64,
    index: u64,
    status: u64,
    list: RunParameters,
    sources: u32,
    hidden: u32,
    record_bytes: u32,
    unused: u32,
}

/// A kernel for each type.
#[derive(Clone, Debug)]
pub(super) struct RecordFunctions {
    f32: Function,
    bf16: Function,
    f16: Function,
}

impl RecordFunctions {
    pub fn of(module: &Arc<Module>) -> Result<Self, DeviceError> {
        Ok(RecordFunctions {
            f32: module.function(c"records_f32")?,
            bf16: module.function(c"records_bf16")?,
            f16: module.function(c"records_f16")?,
        })
    }
}

impl Kernels {
    /// Name of the kernel that makes records of rows of this type.
    ///
    /// # Errors
    /// [`DeviceError::NoSum`] for bytes.
    pub fn records_name(dtype: Dtype) -> Result<&'static str, DeviceError> {
        match dtype {
            Dtype::F32 => Ok("records_f32"),
            Dtype::Bf16 => Ok("records_bf16"),
            Dtype::F16 => Ok("records_f16"),
            _ => Err(DeviceError::NoSum { rows: dtype, out: dtype }),
        }
    }

    /// Enqueues that rows become [records](Fp8RowShape), as
    /// [`RowKernels::quantize`](crate::rows::RowKernels::quantize) makes them: `out[i]` of
    /// `from[index[i]]`.
    ///
    /// # Errors
    /// [`DeviceError::NoSum`], [`DeviceError::TooSmall`], [`DeviceError::Shape`],
    /// [`DeviceError::Misaligned`], [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`],
    /// [`DeviceError::Call`].
    pub fn records(&self, stream: &Stream, records: &RecordArgs<'_>) -> Result<(), DeviceError> {
        const KERNEL: &str = "records";
        let RecordArgs { hidden, dtype, sources, rows, .. } = *records;
        let refuse =
            |what, given, expected| Err(DeviceError::Shape { kernel: KERNEL, what, given, expected });
        let function = match dtype {
            Dtype::F32 => &self.records.f32,
            Dtype::Bf16 => &self.records.bf16,
            Dtype::F16 => &self.records.f16,
            _ => return Err(DeviceError::NoSum { rows: dtype, out: dtype }),
        };
        let row_bytes = u64::from(hidden) * dtype.size() as u64;
        if hidden == 0 || !row_bytes.is_multiple_of(VECTOR) || hidden >= 1 << 28 {
            return refuse("hidden", hidden.into(), "whole vectors of 16 bytes, and less than 2^28");
        }
        for (what, given) in [("sources", sources), ("rows", rows)] {
            if given > i32::MAX as u32 {
                return refuse(what, given.into(), "less than 2^31");
            }
        }
        let shape = Fp8RowShape::new(hidden);
        let record_bytes = shape.bytes() as u64;
        if records.index.is_none() && rows > sources {
            return refuse("rows", rows.into(), "at most the sources, where no index names them");
        }
        let mut operands = Operands::of(KERNEL, stream);
        let list = RunParameters::of(&mut operands, KERNEL, rows, records.runs)?;
        let entries = bytes([list.entries.into(), WORD]);
        let parameters = RecordParameters {
            out: operands.span("out", records.out, bytes([list.places.into(), record_bytes]), VECTOR)?,
            from: operands.span("from", records.from, bytes([sources.into(), row_bytes]), VECTOR)?,
            index: operands.optional("index", records.index, entries, WORD)?,
            status: operands.word(records.status)?,
            list,
            sources,
            hidden,
            record_bytes: record_bytes as u32,
            unused: 0,
        };
        let vectors = u64::from(rows) * (shape.scales() * Fp8RowShape::BLOCK * dtype.size()) as u64 / VECTOR;
        let grid = self.limit.threads(stream, vectors.div_ceil(AT_ONCE));
        // SAFETY: the struct is the one of the source. The kernel stays inside of what was checked:
        // records below `rows`, each of `record_bytes`, values below `hidden`, runs below `count`;
        // every entry is compared with `entries`, every place with `places` and every index with
        // `sources` before it is used.
        unsafe { function.launch_struct(stream, operands.held(), grid, &parameters) }
    }
}
