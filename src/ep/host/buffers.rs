//! Rows that experts read and outputs that they write, in the receive pool of the host.

use std::sync::Arc;

use crate::dtype::{Dtype, Element, Fp8RowShape};
use crate::ep::RowIndex;
use crate::error::{Error, MemoryError};
use crate::memory::Extent;
use crate::plan::RowBuffer;

/// Received rows of an instance on the host.
#[derive(Debug)]
pub(in crate::ep) struct HostRows {
    pub extent: Extent,
    pub rows: u32,
    pub row_bytes: u64,
    pub record: Option<Fp8RowShape>,
    pub index: Option<Arc<RowIndex>>,
}

impl HostRows {
    pub fn rows<E: Element>(&self) -> Result<&[E], MemoryError> {
        self.extent.slice(0, elements::<E>(self.rows, self.row_bytes))
    }

    pub fn rows_mut<E: Element>(&mut self) -> Result<&mut [E], MemoryError> {
        self.extent.slice_mut(0, elements::<E>(self.rows, self.row_bytes))
    }
}

/// Output buffer of an instance on the host. It lies where peers can read it.
#[derive(Debug)]
pub(in crate::ep) struct HostOutput {
    pub extent: Extent,
    pub chunk: RowBuffer,
    pub number: u64,
    pub instance: u64,
}

impl HostOutput {
    pub fn rows_mut<E: Element>(&mut self) -> Result<&mut [E], MemoryError> {
        self.extent.slice_mut(0, elements::<E>(self.chunk.rows, self.chunk.row_bytes))
    }

    pub fn weights_mut(&mut self) -> Result<&mut [f32], MemoryError> {
        self.extent.slice_mut(self.chunk.notes_at(), self.chunk.notes as usize)
    }
}

/// Rows that a rank brings into a return.
#[derive(Debug)]
pub(in crate::ep) enum HostInput<'a> {
    /// The buffer of a handle, which is used in place.
    Output(HostOutput),
    /// The output of a weighted combine, which the handle keeps.
    Kept,
    /// Rows elsewhere, which are copied into a buffer first.
    Elsewhere { bytes: &'a [u8], dtype: Dtype },
}

/// Elements of so many rows.
pub(in crate::ep) fn elements<E: Element>(rows: u32, row_bytes: u64) -> usize {
    (u64::from(rows) * row_bytes) as usize / size_of::<E>()
}

/// Checks a tensor of the caller's: `rows` rows of so many elements of this type.
pub(in crate::ep) fn check_tensor(
    what: &'static str,
    (bytes, dtype): (&[u8], Dtype),
    rows: u32,
    (columns, expected): (usize, Dtype),
) -> Result<(), Error> {
    let shape = crate::ep::tensor::Shape { rows: rows.into(), columns, dtype: expected };
    shape.check(what, bytes.len() as u64, dtype)
}
