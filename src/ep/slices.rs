//! Token slicing: the ranks of a tensor-parallel group have the same tokens, and each sends only
//! its part of them.
//!
//! ```text
//!   [E, C, M]  --drop_tokens-->  [E, C/TP, M]  --exchange, experts, exchange-->  [E, C/TP, M]  --gather_tokens-->  [E, C, M]
//! ```
//!
//! DeepSpeed does the same before and after the exchange of an expert-parallel group
//! (`drop_tokens`, `gather_tokens`): 1/TP of the data crosses there, and the rest goes between
//! local peers. Each is the other's gradient.

use super::host::check_tensor;
use super::{ExpertRows, RowCollective, RowPartition};
use crate::dtype::{Dtype, Element};
use crate::error::{Error, PlanError};
use crate::world::Group;

/// Slices of a buffer `[experts, capacity, columns]` along its second dimension, over a group.
///
/// ```
/// use sidelane::{Dtype, World, ep::TokenSlices};
///
/// let world = World::threads(1)?.remove(0);
/// let mut slices = TokenSlices::new(&world.all()?, [2, 3, 4], Dtype::F32)?;
/// let buffer: Vec<f32> = (0..24).map(|at| at as f32).collect();
/// let slice = slices.drop_tokens(&buffer)?;                 // alone, a rank keeps everything
/// assert_eq!(slices.gather_tokens(&slice)?.rows::<f32>()?, buffer);
/// # Ok::<(), sidelane::Error>(())
/// ```
#[derive(Debug)]
pub struct TokenSlices {
    gather: RowCollective,
    shares: RowPartition,
    /// Of the slice: experts, tokens of each, columns.
    slice: [usize; 3],
    dtype: Dtype,
    rank: usize,
    ranks: usize,
}

impl TokenSlices {
    /// For a buffer `[experts, capacity, columns]`, equal on all ranks of the group. Collective.
    ///
    /// # Errors
    /// On every rank: [`PlanError::BadParameter`] if the capacity is not a multiple of the size of
    /// the group, or a row not one of 16 bytes;
    /// [`CallError::ConfigsDiffer`](crate::error::CallError) if ranks have other shapes.
    pub fn new(group: &Group, [experts, capacity, columns]: [u32; 3], dtype: Dtype) -> Result<Self, Error> {
        let ranks = group.size();
        let rows = experts.saturating_mul(capacity / ranks);
        let builder = RowCollective::builder(group).columns(columns as usize).dtype(dtype);
        let mut gather = builder.segments(experts).max_rows(rows).build()?;
        if !capacity.is_multiple_of(ranks) {
            let (parameter, expected) = ("capacity", "a multiple of the size of the tensor-parallel group");
            return Err(PlanError::BadParameter { parameter, seen: capacity.into(), expected }.into());
        }
        let shares = gather.shares(&vec![rows; ranks as usize])?;
        let slice = [experts as usize, (capacity / ranks) as usize, columns as usize];
        Ok(TokenSlices { gather, shares, slice, dtype, rank: group.rank() as usize, ranks: ranks as usize })
    }

    /// This rank's slice, `[experts, capacity / ranks, columns]`, of the buffer. Not collective:
    /// nothing moves.
    ///
    /// # Errors
    /// [`PlanError::WrongShape`], [`PlanError::WrongDtype`].
    pub fn drop_tokens<E: Element>(&self, buffer: &[E]) -> Result<Vec<E>, Error> {
        let [experts, tokens, columns] = self.slice;
        let all = experts * tokens * self.ranks;
        let buffer_bytes = (bytemuck::cast_slice(buffer), E::DTYPE);
        check_tensor("buffer", buffer_bytes, all as u32, (columns, self.dtype))?;
        let part = tokens * columns;
        if part == 0 {
            return Ok(Vec::new());
        }
        let parts = buffer.chunks_exact(part).skip(self.rank).step_by(self.ranks);
        Ok(parts.flatten().copied().collect())
    }

    /// The buffer, `[experts, capacity, columns]`, from the slices of all ranks. Collective.
    ///
    /// # Errors
    /// As [`RowCollective::all_gather_cached`].
    pub fn gather_tokens<E: Element>(&mut self, slice: &[E]) -> Result<ExpertRows, Error> {
        self.gather.all_gather_cached(slice, &self.shares)
    }
}
