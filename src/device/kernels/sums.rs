//! Common parts of both kinds of sums: blocks for tokens and parts of rows.

use super::THREADS;
use super::operands::VECTOR;
use crate::device::launch::Grid;
use crate::device::stream::Stream;
use crate::dtype::Dtype;
use crate::error::DeviceError;

/// Blocks that a multiprocessor has at work.
const BLOCKS_AT_WORK: u32 = 8;

/// Elements of a vector of 16 bytes.
fn elements(dtype: Dtype) -> u32 {
    (VECTOR / dtype.size() as u64) as u32
}

/// Refuses rows that are not whole vectors of results, or too long to count in.
pub(super) fn check_columns(kernel: &'static str, columns: u32, out: Dtype) -> Result<(), DeviceError> {
    if columns == 0 || !columns.is_multiple_of(elements(out)) || columns >= 1 << 30 {
        let expected = "whole vectors of 16 bytes, and less than 2^30";
        return Err(DeviceError::Shape { kernel, what: "columns", given: columns.into(), expected });
    }
    Ok(())
}

/// A block for each token and part of a row, or as many as the device runs at once; one if there
/// are no tokens.
pub(super) fn grid(stream: &Stream, tokens: u32, columns: u32, out: Dtype) -> Grid {
    let across = (columns / elements(out)).div_ceil(THREADS).clamp(1, 1 << 15);
    let at_work = stream.context.facts().multiprocessors.saturating_mul(BLOCKS_AT_WORK);
    let down = tokens.min(at_work.div_ceil(across)).max(1);
    Grid { blocks: [down, across, 1], ..Grid::line(1, THREADS) }
}
