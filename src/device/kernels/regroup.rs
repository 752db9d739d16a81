//! The launch of `cuda/regroup.cu`.

use super::operands::{Operands, VECTOR, WORD, bytes};
use super::{Kernels, THREADS};
use crate::device::launch::Grid;
use crate::device::range::{ByteSpan, Word};
use crate::device::stream::Stream;
use crate::error::DeviceError;

/// Blocks that run on an SM at once, and vectors that a thread moves at a time: `IN_FLIGHT` in the
/// source.
const BLOCKS_AT_WORK: u32 = 8;
const IN_FLIGHT: u64 = 4;

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
    /// The source of each row, `i32 [rows]`; -1 gives zeros, as pads are.
    pub index: ByteSpan<'a>,
    /// `[rows, row_bytes]`, at a multiple of 16 bytes.
    pub out: ByteSpan<'a>,
    /// Where a fault is written: a [`KernelFault`](crate::error::KernelFault).
    pub status: Word<'a, u32>,
}

/// `struct Regroup` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Parameters {
    out: u64,
    from: u64,
    index: u64,
    status: u64,
    row_bytes: u64,
    rows: u32,
    sources: u32,
}

impl Kernels {
    /// Enqueues the gathering of rows: `out[i] = from[index[i]]`. A grouped matrix product that
    /// takes a row index does not need this kernel.
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
        let parameters = Parameters {
            out: operands.span("out", regroup.out, bytes([rows.into(), row_bytes]), VECTOR)?,
            from: operands.span("from", regroup.from, bytes([sources.into(), row_bytes]), VECTOR)?,
            index: operands.span("index", regroup.index, bytes([rows.into(), WORD]), WORD)?,
            status: operands.word(regroup.status)?,
            row_bytes,
            rows,
            sources,
        };
        let needed = (u64::from(rows) * (row_bytes / VECTOR)).div_ceil(u64::from(THREADS) * IN_FLIGHT);
        let at_work = stream.context.facts().multiprocessors.saturating_mul(BLOCKS_AT_WORK).clamp(1, 1 << 16);
        let blocks = needed.clamp(1, at_work.into()) as u32;
        // SAFETY: the struct is the one of the source. The kernel stays inside the checked memory:
        // rows below `rows`, and every index is compared with `sources` before it is used.
        unsafe {
            self.regroup.launch_struct(stream, operands.held(), Grid::line(blocks, THREADS), &parameters)
        }
    }
}
