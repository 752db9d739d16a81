//! The launches of `cuda/records.cu`: rows become records in fp8.

use std::sync::Arc;

use super::operands::{Operands, VECTOR, WORD, bytes};
use super::{Kernels, THREADS};
use crate::device::launch::Grid;
use crate::device::module::{Function, Module};
use crate::device::range::{ByteSpan, Word};
use crate::device::stream::Stream;
use crate::dtype::{Dtype, Fp8RowShape};
use crate::error::DeviceError;

/// Blocks that a multiprocessor has at work, and vectors that a thread has on their way: `AT_ONCE`
/// in the source.
const BLOCKS_AT_WORK: u32 = 8;
const AT_ONCE: u64 = 4;

/// What [`Kernels::records`] reads and writes. Memory may be larger than what is named here.
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
    /// record.
    pub index: Option<ByteSpan<'a>>,
    /// `[rows, record]`, at a multiple of 16 bytes.
    pub out: ByteSpan<'a>,
    /// Where a fault is written: a [`KernelFault`](crate::error::KernelFault).
    pub status: Word<'a, u32>,
}

/// `struct Records` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Parameters {
    out: u64,
    from: u64,
    index: u64,
    status: u64,
    rows: u32,
    sources: u32,
    hidden: u32,
    record_bytes: u32,
}

/// A kernel for each type.
#[derive(Clone, Debug)]
pub(super) struct Functions {
    f32: Function,
    bf16: Function,
    f16: Function,
}

impl Functions {
    pub fn of(module: &Arc<Module>) -> Result<Self, DeviceError> {
        Ok(Functions {
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
            Dtype::Bytes => Err(DeviceError::NoSum { rows: dtype, out: dtype }),
        }
    }

    /// Enqueues that rows become [records](Fp8RowShape), as
    /// [`RowKernels::quantise`](crate::rows::RowKernels::quantise) makes them: `out[i]` of
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
            Dtype::Bytes => return Err(DeviceError::NoSum { rows: dtype, out: dtype }),
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
        let parameters = Parameters {
            out: operands.span("out", records.out, bytes([rows.into(), record_bytes]), VECTOR)?,
            from: operands.span("from", records.from, bytes([sources.into(), row_bytes]), VECTOR)?,
            index: operands.optional("index", records.index, bytes([rows.into(), WORD]), WORD)?,
            status: operands.word(records.status)?,
            rows,
            sources,
            hidden,
            record_bytes: record_bytes as u32,
        };
        let vectors = u64::from(rows) * (shape.scales() * Fp8RowShape::BLOCK * dtype.size()) as u64 / VECTOR;
        let at_work = stream.context.facts().multiprocessors.saturating_mul(BLOCKS_AT_WORK).clamp(1, 1 << 16);
        let blocks = vectors.div_ceil(u64::from(THREADS) * AT_ONCE).clamp(1, at_work.into()) as u32;
        // SAFETY: the struct is the one of the source. The kernel stays inside of what was checked:
        // records below `rows`, each of `record_bytes`, values below `hidden`, and every index is
        // compared with `sources` before it is used.
        unsafe { function.launch_struct(stream, operands.held(), Grid::line(blocks, THREADS), &parameters) }
    }
}
