//! The yardstick: the bytes of a call moved by bare loops, nothing else.
//!
//! No counts, no placement, no flags, no checks per call: addresses are resolved once, then each run is gathered and
//! each token summed. What a dispatch or combine takes beyond this is the library's own cost. Rows for ranks whose
//! memory is not mapped are written to scratch of this rank: each byte is still read and written once.

use std::sync::Arc;

use super::Port;
use crate::dtype::Wire;
use crate::error::{Error, LaneError};
use crate::plan::{Layout, RowRun};
use crate::rows::{Arithmetic, GroupedSum, Out, Rows, Stores};
use crate::schedule::{Sum, WindowId, chunk_bytes};

/// A call's moves, ready to run. It keeps the port alive whose windows it holds addresses of; whoever runs it must hold
/// the extents it was built from exclusively.
#[derive(Debug)]
pub struct Floor {
    _port: Arc<Port>,
    /// What is read and written in place of other nodes' memory.
    _scratch: Vec<[u64; 8]>,
    kernels: Rows,
    row_bytes: usize,
    input_rows: usize,
    runs: Vec<FloorRun>,
    rows: Vec<u32>,
    terms: Vec<*const u8>,
    starts: Vec<u32>,
    groups: Vec<u32>,
    group_starts: Vec<u32>,
}

#[derive(Debug)]
struct FloorRun {
    to: *mut u8,
    first: usize,
    count: usize,
    pad: usize,
}

// SAFETY: the pointers lead into mappings that belong to no thread.
unsafe impl Send for Floor {}

impl Port {
    /// The moves of a dispatch along `layout` to `landing` (per rank, first byte in its pool), and of a sum of the chunks
    /// at `sum.bases` in their owners' pools.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`](crate::error::MemoryError) if any of it lies outside its window.
    pub fn floor(
        self: &Arc<Self>,
        layout: &Layout,
        row_bytes: u64,
        landing: &[u64],
        sum: &Sum<'_>,
    ) -> Result<Floor, Error> {
        let lanes = self.lanes();
        let near = |peer: u32| lanes.nodes.same_node(lanes.rank, peer);
        let spilled = |run: &RowRun| u64::from(run.count + run.pad) * row_bytes;
        let runs_to = |peer: u32| {
            let range = layout.runs_to(peer);
            layout.runs[range.start as usize..range.end as usize].iter().map(move |run| (peer, run))
        };
        let far_bytes: u64 =
            (0..lanes.ranks()).filter(|&p| !near(p)).flat_map(runs_to).map(|(_, run)| spilled(run)).sum();
        let chunk = |owner: usize| chunk_bytes(sum.chunk_rows[owner], row_bytes);
        let chunk_bytes: u64 = (0..sum.bases.len()).filter(|&o| !near(o as u32)).map(chunk).sum();
        let mut scratch = vec![[0u64; 8]; (far_bytes + chunk_bytes).div_ceil(64) as usize];
        let (base, mut spilt) = (scratch.as_mut_ptr().cast::<u8>(), 0);
        let mut spill = |bytes: u64| {
            spilt += bytes as usize;
            // SAFETY: the scratch was sized for all runs and chunks of other nodes, one after another.
            unsafe { base.add(spilt - bytes as usize) }
        };
        let mut runs = Vec::new();
        for (peer, run) in (0..lanes.ranks()).flat_map(runs_to) {
            let rows = &layout.rows[run.first as usize..][..run.count as usize];
            if let Some(&row) = rows.iter().find(|&&row| row >= layout.tokens) {
                let (offset, len, size) = (row.into(), 1, layout.tokens.into());
                return Err(LaneError::SourceBounds { offset, len, size }.into());
            }
            let to = if near(peer) {
                let offset = landing[peer as usize] + u64::from(run.to_row) * row_bytes;
                self.range(peer, WindowId::POOL, offset, spilled(run))?.cast_mut()
            } else {
                spill(spilled(run))
            };
            runs.push(FloorRun {
                to,
                first: run.first as usize,
                count: run.count as usize,
                pad: run.pad as usize,
            });
        }
        let mut chunks = Vec::new();
        for owner in 0..sum.bases.len() {
            chunks.push(if near(owner as u32) {
                self.range(owner as u32, WindowId::POOL, sum.bases[owner], chunk(owner))?
            } else {
                spill(chunk(owner)).cast_const()
            });
        }
        let mut terms = Vec::new();
        for term in sum.terms {
            let owner = term.owner as usize;
            if term.row >= sum.chunk_rows[owner] {
                let (offset, len, size) = (term.row.into(), 1, sum.chunk_rows[owner].into());
                return Err(LaneError::SourceBounds { offset, len, size }.into());
            }
            // SAFETY: the whole chunk was checked, and the row lies inside it.
            terms.push(unsafe { chunks[owner].add(term.row as usize * row_bytes as usize) });
        }
        Ok(Floor {
            _port: Arc::clone(self),
            _scratch: scratch,
            kernels: lanes.rows,
            row_bytes: row_bytes as usize,
            input_rows: layout.tokens as usize,
            runs,
            rows: layout.rows.clone(),
            terms,
            starts: sum.starts.to_vec(),
            groups: sum.groups.to_vec(),
            group_starts: sum.group_starts.to_vec(),
        })
    }
}

impl Floor {
    /// Gathers all runs from `input`, `[tokens, row]`. A shorter input moves nothing.
    pub fn dispatch(&self, input: &[u8], stores: Stores) {
        if input.len() < self.input_rows * self.row_bytes {
            return;
        }
        for run in &self.runs {
            // SAFETY: targets and row indices were checked when this was built; `input` holds all tokens.
            unsafe {
                self.kernels.gather(
                    run.to,
                    input.as_ptr(),
                    self.row_bytes,
                    &self.rows[run.first..run.first + run.count],
                    stores,
                );
                self.kernels.zero(run.to.add(run.count * self.row_bytes), run.pad * self.row_bytes, stores);
            }
        }
        Rows::fence();
    }

    /// Sums all tokens into `output`, `[tokens, row]`. A shorter output is left as it is.
    pub fn combine(&self, dtype: Arithmetic, output: &mut [u8], stores: Stores) {
        if output.len() < self.input_rows * self.row_bytes {
            return;
        }
        for (token, out) in output.chunks_exact_mut(self.row_bytes).enumerate().take(self.input_rows) {
            let (first, last) = (self.starts[token], self.starts[token + 1]);
            let next = self.starts.get(token + 2).copied().unwrap_or(last);
            let rows = &self.terms[first as usize..next as usize];
            let all = [last - first];
            let groups = match self.groups[..] {
                [] => &all[..],
                _ => &self.groups[self.group_starts[token] as usize..self.group_starts[token + 1] as usize],
            };
            let columns = self.row_bytes / dtype.size();
            // SAFETY: terms were checked when this was built; `out` is one row.
            unsafe {
                self.kernels.grouped_sum(GroupedSum {
                    dtype,
                    wire: Wire::F32,
                    out: Out::Total(out.as_mut_ptr()),
                    rows,
                    weights: None,
                    groups,
                    columns,
                    stores,
                });
            }
        }
        Rows::fence();
    }
}
