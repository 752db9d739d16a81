//! What experts read and write.

use std::sync::Arc;

use super::RowIndex;
use crate::dtype::{Dtype, Element, RecordShape};
use crate::error::{Error, MemoryError};
use crate::memory::Extent;
use crate::plan::Chunk;

/// Received rows, `[rows, hidden]`: expert-major (local expert, source rank, token), rank-major (source rank, token), in
/// [spans](super::ExpertParallelBuilder::spans) as the [`index`](ExpertRows::index) says. Pad rows and unused slots are
/// zero.
///
/// They lie in the receive pool and go back to it when this is dropped.
#[derive(Debug)]
pub struct ExpertRows {
    pub(super) extent: Extent,
    pub(super) rows: u32,
    pub(super) row_bytes: u64,
    pub(super) record: Option<RecordShape>,
    pub(super) index: Option<Arc<RowIndex>>,
}

impl ExpertRows {
    /// Number of rows, pads counted.
    pub fn len(&self) -> u32 {
        self.rows
    }

    /// Whether no row came.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// The rows, `[len, hidden]`.
    ///
    /// # Errors
    /// [`MemoryError::Misaligned`] cannot happen for rows of whole elements; it is reported rather than assumed away.
    pub fn rows<E: Element>(&self) -> Result<&[E], MemoryError> {
        self.extent.slice(0, elements::<E>(self.rows, self.row_bytes))
    }

    /// The rows, to change in place.
    ///
    /// # Errors
    /// As [`ExpertRows::rows`].
    pub fn rows_mut<E: Element>(&mut self) -> Result<&mut [E], MemoryError> {
        self.extent.slice_mut(0, elements::<E>(self.rows, self.row_bytes))
    }

    /// Where rows lie, if they were handed on in spans; else they lie in visible order. What goes with the rows, and what is
    /// combined or brought home along their handle, lies as they do.
    pub fn index(&self) -> Option<&RowIndex> {
        self.index.as_deref()
    }

    /// A copy outside the pool, for callers who want the pool's memory back at once.
    ///
    /// # Errors
    /// As [`ExpertRows::rows`].
    pub fn to_vec<E: Element>(&self) -> Result<Vec<E>, MemoryError> {
        self.rows::<E>().map(<[E]>::to_vec)
    }
}

/// Rows to be dispatched, `[tokens, hidden]`, in registered memory: network cards read them where they lie, while those of any
/// other memory are copied first. To ranks of the node it makes no difference.
///
/// ```
/// # use sidelane::{World, gate::Routing};
/// # let world = World::threads(1)?.remove(0);
/// let mut ep = sidelane::ExpertParallel::builder(&world.all()?)?.experts(2).top_k(1).hidden(8).build()?;
/// let mut x = ep.token_buffer(3)?;
/// x.rows_mut::<half::bf16>()?.fill(half::bf16::ONE);
/// let (rows, _) = ep.dispatch(x.rows::<half::bf16>()?, &Routing::new(1, vec![0, 1, 1], vec![1.0; 3])?)?;
/// assert_eq!(rows.len(), 3);
/// # Ok::<(), sidelane::Error>(())
/// ```
#[derive(Debug)]
pub struct TokenBuffer {
    pub(super) extent: Extent,
    pub(super) tokens: u32,
    pub(super) row_bytes: u64,
}

impl TokenBuffer {
    /// Number of tokens.
    pub fn len(&self) -> u32 {
        self.tokens
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// The rows, `[len, hidden]`; of fp8, `[len, record]`.
    ///
    /// # Errors
    /// As [`ExpertRows::rows`].
    pub fn rows<E: Element>(&self) -> Result<&[E], MemoryError> {
        self.extent.slice(0, elements::<E>(self.tokens, self.row_bytes))
    }

    /// The rows, to write to. Their contents are undefined at first.
    ///
    /// # Errors
    /// As [`ExpertRows::rows`].
    pub fn rows_mut<E: Element>(&mut self) -> Result<&mut [E], MemoryError> {
        self.extent.slice_mut(0, elements::<E>(self.tokens, self.row_bytes))
    }
}

/// What experts write: one row per received row, and, where a gradient asks for it, one `f32` per row behind them.
///
/// It lies where peers can read it, so combine copies nothing.
#[derive(Debug)]
pub struct ExpertOutput {
    pub(super) extent: Extent,
    chunk: Chunk,
    pub(super) number: u64,
    pub(super) instance: u64,
}

impl ExpertOutput {
    pub(super) fn new(extent: Extent, chunk: Chunk, number: u64, instance: u64) -> Self {
        ExpertOutput { extent, chunk, number, instance }
    }

    /// Number of rows, pads counted. What pad rows hold is never read.
    pub fn len(&self) -> u32 {
        self.chunk.rows
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.chunk.rows == 0
    }

    /// The rows, `[len, hidden]`, to write to.
    ///
    /// # Errors
    /// As [`ExpertRows::rows`].
    pub fn rows_mut<E: Element>(&mut self) -> Result<&mut [E], MemoryError> {
        self.extent.slice_mut(0, elements::<E>(self.chunk.rows, self.chunk.row_bytes))
    }

    /// One `f32` per row or, rank-major, per row and choice, to write to.
    ///
    /// # Errors
    /// As [`ExpertRows::rows`].
    pub fn weights_mut(&mut self) -> Result<&mut [f32], MemoryError> {
        self.extent.slice_mut(self.chunk.notes_at(), self.chunk.notes as usize)
    }
}

/// What a combine or a gradient is given: the output buffer of a handle, or any tensor, which is copied once.
#[derive(Debug)]
pub enum Contribution<'a> {
    /// The buffer of [`Handle::output`](super::Handle::output): nothing is copied.
    Output(ExpertOutput),
    /// Rows elsewhere: copied into a buffer first, and counted in [`Handle::copied_bytes`](super::Handle::copied_bytes).
    Elsewhere {
        /// The rows.
        bytes: &'a [u8],
        /// Their type.
        dtype: Dtype,
    },
}

impl From<ExpertOutput> for Contribution<'_> {
    fn from(output: ExpertOutput) -> Self {
        Contribution::Output(output)
    }
}

impl<'a, E: Element> From<&'a [E]> for Contribution<'a> {
    fn from(rows: &'a [E]) -> Self {
        Contribution::Elsewhere { bytes: bytemuck::cast_slice(rows), dtype: E::DTYPE }
    }
}

impl<'a, E: Element> From<&'a Vec<E>> for Contribution<'a> {
    fn from(rows: &'a Vec<E>) -> Self {
        rows.as_slice().into()
    }
}

fn elements<E: Element>(rows: u32, row_bytes: u64) -> usize {
    (u64::from(rows) * row_bytes) as usize / size_of::<E>()
}

/// Checks an input or output tensor of `rows` rows.
pub(super) fn check_tensor<E: Element>(
    what: &'static str,
    tensor: &[E],
    rows: u32,
    (hidden, dtype): (usize, Dtype),
) -> Result<(), Error> {
    use crate::error::PlanError;
    if E::DTYPE != dtype {
        return Err(PlanError::WrongDtype { what, seen: E::DTYPE, expected: dtype }.into());
    }
    if tensor.len() != rows as usize * hidden {
        let (seen, rows, columns) = (tensor.len(), rows as usize, hidden);
        return Err(PlanError::WrongShape { what, seen, rows, columns }.into());
    }
    Ok(())
}
