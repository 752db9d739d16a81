//! Where the bytes of an operation come from and go to, besides windows: the caller's tensors, and
//! rows by index.

use crate::error::LaneError;
use crate::plan::RowRun;
use crate::schedule::Index;

/// The caller's tensors of one run: where [`PutSource::Input`](crate::schedule::PutSource::Input)
/// and [`PutSource::Notes`](crate::schedule::PutSource::Notes) read and a sum writes.
#[derive(Debug, Default)]
pub struct Io<'a> {
    /// Rows that are dispatched.
    pub input: &'a [u8],
    /// Metadata of each entry.
    pub notes: &'a [u8],
    /// Rows that are summed.
    pub output: &'a mut [u8],
    /// One `f32` per (token, choice) that returns.
    pub weights: &'a mut [f32],
}

/// Where the rows of a run come from.
#[derive(Clone, Copy, Debug)]
pub struct RowSource<'a> {
    /// The rows.
    pub bytes: &'a [u8],
    /// Bytes of one row.
    pub row_bytes: u64,
    /// Which rows, for all runs of a call.
    pub rows: &'a [u32],
    /// Whether runs use an index, or count consecutive rows.
    pub index: Index,
}

/// The rows of one run, known to lie in their source.
#[derive(Clone, Copy, Debug)]
pub(super) enum Checked<'a> {
    /// Scattered.
    Listed(&'a [u32]),
    /// One after another.
    Straight(&'a [u8]),
}

impl<'a> RowSource<'a> {
    /// The bytes of a row that [`RowSource::checked`] has seen.
    pub(super) fn row(&self, row: u32) -> &'a [u8] {
        let row_bytes = self.row_bytes as usize;
        &self.bytes[row as usize * row_bytes..][..row_bytes]
    }

    /// The rows of one run, all inside the source.
    pub(super) fn checked(&self, run: RowRun) -> Result<Checked<'a>, LaneError> {
        let (row_bytes, size) = (self.row_bytes, self.bytes.len() as u64);
        let bad = |row: u64| LaneError::SourceBounds {
            offset: row.saturating_mul(row_bytes),
            len: row_bytes,
            size,
        };
        let (first, count) = (run.first as usize, run.count as usize);
        if self.index == Index::Contiguous {
            let (start, len) =
                (first.saturating_mul(row_bytes as usize), count.saturating_mul(row_bytes as usize));
            let bytes = self.bytes.get(start..start.saturating_add(len));
            return Ok(Checked::Straight(bytes.ok_or_else(|| bad(first as u64))?));
        }
        let index =
            self.rows.get(first..first.saturating_add(count)).ok_or_else(|| bad(self.rows.len() as u64))?;
        match index.iter().max() {
            Some(&last) if (u64::from(last) + 1).saturating_mul(row_bytes) > size => Err(bad(last.into())),
            _ => Ok(Checked::Listed(index)),
        }
    }
}
