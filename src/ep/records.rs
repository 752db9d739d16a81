//! Rows in fp8, with their scales: one record each, so that both land with one copy.

use super::host::HostRows;
use crate::error::MemoryError;

/// A tensor `[rows, columns]` whose rows do not follow each other.
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a, T> {
    all: &'a [T],
    rows: usize,
    columns: usize,
    stride: usize,
}

impl<'a, T> Strided<'a, T> {
    /// Rows and columns.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    /// Elements from the start of one row to that of the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// From the first element of the first row on: what lies between rows included.
    pub fn as_slice(&self) -> &'a [T] {
        self.all
    }

    /// The rows, one after another.
    pub fn rows(&self) -> impl Iterator<Item = &'a [T]> + use<'a, T> {
        let columns = self.columns;
        self.all.chunks(self.stride.max(1)).take(self.rows).map(move |row| &row[..columns])
    }
}

impl HostRows {
    /// The e4m3 values of rows that came as records, `[rows, hidden]`. `None` if they came as they
    /// are.
    ///
    /// # Errors
    /// As [`ExpertRows::rows`](crate::ep::ExpertRows::rows).
    pub fn payload(&self) -> Result<Option<Strided<'_, u8>>, MemoryError> {
        let Some(shape) = self.record else { return Ok(None) };
        let (rows, columns) = (self.rows as usize, shape.hidden());
        let all = self.extent.slice::<u8>(0, rows * shape.bytes())?;
        Ok(Some(Strided { all, rows, columns, stride: shape.bytes() }))
    }

    /// Their scales, `[rows, hidden / 128]`: a value is its code times the scale of its block.
    ///
    /// # Errors
    /// As [`ExpertRows::rows`](crate::ep::ExpertRows::rows).
    pub fn scales(&self) -> Result<Option<Strided<'_, f32>>, MemoryError> {
        let Some(shape) = self.record else { return Ok(None) };
        let (rows, columns, stride) = (self.rows as usize, shape.scales(), shape.bytes() / 4);
        let all = self.extent.slice::<f32>(0, rows * stride)?;
        let all = all.get(shape.scales_offset() / 4..).unwrap_or_default();
        Ok(Some(Strided { all, rows, columns, stride }))
    }
}
