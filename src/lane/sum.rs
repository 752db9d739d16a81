//! Reading what peers offer: the sum of rows, and the fetch of weights.
//!
//! On a node the reader pulls: it adds up the rows where they lie, in the owners' pools, in one pass over the bytes.
//! (Pushing them home and summing there moves every byte three times.)

use super::{Io, Port};
use crate::dtype::Wire;
use crate::error::{Error, LaneError};
use crate::rows::{Arithmetic, GroupedSum, Out, Stores};
use crate::schedule::{Operands, Sum, WindowId, chunk_bytes};

/// Pointers to the rows of a sum. Kept from call to call.
#[derive(Debug, Default)]
pub struct Scratch {
    chunks: Vec<*const u8>,
    rows: Vec<*const u8>,
    weights: Vec<f32>,
}

// SAFETY: the pointers are rebuilt by every call and mean nothing between calls.
unsafe impl Send for Scratch {}

impl Port {
    /// Sums the terms of every output row into `io.output`.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`](crate::error::MemoryError::OutOfBounds) if a chunk lies outside its pool,
    /// [`LaneError::SourceBounds`] if a term or the output does not fit the tables.
    pub fn sum_rows(
        &self,
        operands: &Operands<'_>,
        dtype: Arithmetic,
        io: &mut Io<'_>,
        scratch: &mut Scratch,
        stores: Stores,
    ) -> Result<(), Error> {
        let (sum, row_bytes) = (&operands.sum, operands.row_bytes as usize);
        self.chunks(sum, operands.row_bytes, scratch)?;
        let columns = row_bytes / dtype.size();
        let outputs = sum.starts.len().saturating_sub(1);
        if outputs * row_bytes != io.output.len() {
            return Err(bounds(0, outputs * row_bytes, io.output.len()).into());
        }
        self.point(sum, row_bytes, scratch)?;
        for (token, out) in io.output.chunks_exact_mut(row_bytes.max(1)).enumerate() {
            let (first, last) = (sum.starts[token] as usize, sum.starts[token + 1] as usize);
            // The next token's rows are fetched meanwhile.
            let next = sum.starts.get(token + 2).map_or(last, |&next| next as usize);
            let rows = &scratch.rows[first..next];
            scratch.weights.clear();
            if !sum.weights.is_empty() {
                let choices = sum.choices[first..last].iter();
                scratch.weights.extend(choices.map(|&choice| sum.weights[choice as usize]));
            }
            let weights = (!sum.weights.is_empty()).then_some(scratch.weights.as_slice());
            let all = [(last - first) as u32];
            let groups = match sum.groups {
                [] => &all[..],
                groups => &groups[sum.group_starts[token] as usize..sum.group_starts[token + 1] as usize],
            };
            // SAFETY: every row was checked; `out` is a slice of one row; owners offered the rows in this call and do
            // not write them before they have this rank's word that it has read them.
            unsafe {
                self.lanes().rows.grouped_sum(GroupedSum {
                    dtype,
                    wire: Wire::F32,
                    out: Out::Total(out.as_mut_ptr()),
                    rows,
                    weights,
                    groups,
                    columns,
                    stores,
                });
            }
        }
        Ok(())
    }

    /// Fetches one `f32` per term into `io.weights`, at the term's place among the caller's choices.
    ///
    /// # Errors
    /// As [`Port::sum_rows`].
    pub fn fetch_weights(
        &self,
        operands: &Operands<'_>,
        io: &mut Io<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), Error> {
        let sum = &operands.sum;
        self.chunks(sum, operands.row_bytes, scratch)?;
        for (term, &choice) in sum.terms.iter().zip(sum.choices) {
            let owner = term.owner as usize;
            let (rows, places) = (sum.chunk_rows[owner], io.weights.len());
            let Some(place) = io.weights.get_mut(choice as usize).filter(|_| term.row < rows) else {
                return Err(bounds(choice as usize, 1, places).into());
            };
            let behind = (sum.weights_base(owner, operands.row_bytes) - sum.bases[owner]) as usize;
            // SAFETY: the weights lie behind the rows inside the chunk that `chunks` checked; `row` is below their
            // number; unaligned reads ask for nothing else.
            *place = unsafe {
                scratch.chunks[owner].add(behind + term.row as usize * 4).cast::<f32>().read_unaligned()
            };
        }
        Ok(())
    }

    /// Points at the row of every term.
    fn point(&self, sum: &Sum<'_>, row_bytes: usize, scratch: &mut Scratch) -> Result<(), Error> {
        scratch.rows.clear();
        for term in sum.terms {
            let owner = term.owner as usize;
            if term.row >= sum.chunk_rows[owner] {
                return Err(bounds(term.row as usize, 1, sum.chunk_rows[owner] as usize).into());
            }
            // SAFETY: inside the owner's chunk, which `chunks` checked as a whole.
            scratch.rows.push(unsafe { scratch.chunks[owner].add(term.row as usize * row_bytes) });
        }
        Ok(())
    }

    fn chunks(&self, sum: &Sum<'_>, row_bytes: u64, scratch: &mut Scratch) -> Result<(), Error> {
        scratch.chunks.clear();
        for owner in 0..sum.bases.len() {
            let len = match sum.chunk_rows[owner] {
                0 => 0,
                rows => chunk_bytes(rows, row_bytes),
            };
            let at = match len {
                0 => std::ptr::null(),
                len => self.range(sum.held_by[owner], WindowId::POOL, sum.bases[owner], len)?,
            };
            scratch.chunks.push(at);
        }
        Ok(())
    }
}

fn bounds(offset: usize, len: usize, size: usize) -> LaneError {
    LaneError::SourceBounds { offset: offset as u64, len: len as u64, size: size as u64 }
}
