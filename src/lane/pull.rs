//! Reads the offers of peers: the sum of rows, and the fetch of weights.
//!
//! On a node the reader pulls: it adds up the rows in place, in the owners' pools, in one pass over
//! the bytes. (Pushing them and summing at the target moves every byte three times.)

use std::ops::Range;

use super::{Io, Port};
use crate::dtype::PartialDtype;
use crate::error::{Error, LaneError};
use crate::rows::{Arithmetic, GroupedSum, Stores, SumOutput};
use crate::schedule::{Operands, SumOperands, SumTarget, WindowId};

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
    /// Sums output rows `outputs` of the operands' sum into `to`.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`](crate::error::MemoryError::OutOfBounds) if a chunk or the
    /// target lies outside its pool, [`LaneError::SourceBounds`] if a term or the output does not
    /// fit the tables.
    pub fn sum_rows(
        &self,
        operands: &Operands<'_>,
        (outputs, to): (Range<u32>, SumTarget),
        dtype: Arithmetic,
        io: &mut Io<'_>,
        scratch: &mut Scratch,
        stores: Stores,
    ) -> Result<(), Error> {
        let (sum, row_bytes) = (&operands.sum, operands.row_bytes as usize);
        self.chunks(sum, scratch)?;
        let columns = row_bytes / dtype.size();
        let rows = outputs.len();
        let (first, stride) = match to {
            SumTarget::Output if rows * row_bytes != io.output.len() => {
                return Err(bounds(0, rows * row_bytes, io.output.len()).into());
            }
            SumTarget::Output => (io.output.as_mut_ptr(), row_bytes),
            SumTarget::Partials { window, offset } => {
                let stride = columns * sum.wire.size();
                let at = self.range(self.lanes().rank, window, offset, (rows * stride) as u64)?;
                (at.cast_mut(), stride)
            }
        };
        let all = sum.starts[outputs.start as usize] as usize..sum.starts[outputs.end as usize] as usize;
        self.point(sum, all.clone(), scratch)?;
        for (nth, output) in outputs.enumerate() {
            let terms = sum.starts[output as usize] as usize..sum.starts[output as usize + 1] as usize;
            // The next output's rows are fetched meanwhile.
            let next =
                sum.starts.get(output as usize + 2).map_or(terms.end, |&next| next as usize).min(all.end);
            let rows = &scratch.rows[terms.start - all.start..next.max(terms.end) - all.start];
            scratch.weights.clear();
            if !sum.weights.is_empty() {
                let choices = sum.choices[terms.clone()].iter();
                scratch.weights.extend(choices.map(|&choice| sum.weights[choice as usize]));
            }
            let weights = (!sum.weights.is_empty()).then_some(scratch.weights.as_slice());
            let plain = [terms.len() as u32];
            let (groups, wire) = match sum.groups {
                [] => (&plain[..], PartialDtype::F32),
                groups => {
                    let of = |at: usize| sum.group_starts[at] as usize;
                    (&groups[of(output as usize)..of(output as usize + 1)], sum.wire)
                }
            };
            // SAFETY: `rows` rows of `stride` bytes were checked or borrowed.
            let at = unsafe { first.add(nth * stride) };
            let (out, wire) = match to {
                SumTarget::Output => (SumOutput::Total(at), wire),
                SumTarget::Partials { .. } => (SumOutput::Partial(at), sum.wire),
            };
            // SAFETY: every row was checked, and so was the target; owners offered the rows in this
            // call and do not write them before they have this rank's word that it has read them.
            unsafe {
                self.lanes().rows.grouped_sum(GroupedSum {
                    dtype,
                    wire,
                    out,
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

    /// Fetches one `f32` per fetched term into `io.weights`, at the term's place among the caller's
    /// choices.
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
        self.chunks(sum, scratch)?;
        for (term, &place) in sum.fetched.iter().zip(sum.places) {
            let owner = term.owner as usize;
            let (chunk, places) = (&sum.chunks[owner], io.weights.len());
            let Some(to) = io.weights.get_mut(place as usize).filter(|_| u64::from(term.row) < chunk.notes)
            else {
                return Err(bounds(place as usize, 1, places).into());
            };
            let at = chunk.notes_at() as usize + term.row as usize * 4;
            // SAFETY: the words lie behind the rows inside the chunk that `chunks` checked; `row`
            // is below their number; unaligned reads need no more.
            *to = unsafe { scratch.chunks[owner].add(at).cast::<f32>().read_unaligned() };
        }
        Ok(())
    }

    /// Points at the rows of some terms.
    fn point(&self, sum: &SumOperands<'_>, terms: Range<usize>, scratch: &mut Scratch) -> Result<(), Error> {
        scratch.rows.clear();
        for term in &sum.terms[terms] {
            let chunk = &sum.chunks[term.owner as usize];
            if term.row >= chunk.rows {
                return Err(bounds(term.row as usize, 1, chunk.rows as usize).into());
            }
            let at = term.row as usize * chunk.row_bytes as usize;
            // SAFETY: inside the owner's chunk, which `chunks` checked as a whole.
            scratch.rows.push(unsafe { scratch.chunks[term.owner as usize].add(at) });
        }
        Ok(())
    }

    fn chunks(&self, sum: &SumOperands<'_>, scratch: &mut Scratch) -> Result<(), Error> {
        scratch.chunks.clear();
        for (owner, chunk) in sum.chunks.iter().enumerate() {
            let at = match chunk.bytes() {
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
