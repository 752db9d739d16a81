//! The yardstick of a dispatch and its combine: the same bytes, moved by bare loops.

use super::{ExpertOutput, ExpertParallel, ExpertRows, Handle};
use crate::error::{BootstrapError, Error};
use crate::lane::Floor;
use crate::memory::Extent;
use crate::rows::{Arithmetic, Stores};
use crate::schedule::{At, chunk_bytes};
use crate::world::Group;

/// The bare moves of a dispatch and of the combine that belongs to it, and the memory they go to.
#[derive(Debug)]
pub struct Yardstick {
    floor: Floor,
    rows: ExpertRows,
    output: ExpertOutput,
    _scratch: Extent,
}

impl Yardstick {
    /// Moves the rows of `x`, `[tokens, hidden]` as bytes, to where the dispatch had put them, at this rank and its peers.
    /// A shorter input moves nothing.
    pub fn dispatch(&mut self, x: &[u8], stores: Stores) {
        self.floor.dispatch(x, stores);
    }

    /// Sums the rows of all ranks' outputs into `out`, `[tokens, hidden]` as bytes. A shorter `out` is left as it is.
    pub fn combine(&mut self, dtype: Arithmetic, out: &mut [u8], stores: Stores) {
        self.floor.combine(dtype, out, stores);
    }

    /// Gives the rows and the output back.
    pub fn into_parts(self) -> (ExpertRows, ExpertOutput) {
        (self.rows, self.output)
    }
}

impl ExpertParallel {
    /// The bare moves of the dispatch that made `handle`, into `rows`, and of a combine of `output`. Collective over
    /// `group`, which must be the group this was built on; on return from [`Yardstick::dispatch`] peers may still be
    /// writing, so a barrier belongs behind it.
    ///
    /// # Errors
    /// Memory for what would go to other nodes; whatever ends an exchange of addresses.
    pub fn yardstick(
        &self,
        group: &Group,
        rows: ExpertRows,
        output: ExpertOutput,
        handle: &Handle,
    ) -> Result<Yardstick, Error> {
        let inner = handle.inner();
        let at = At { nodes: &self.lanes.nodes, me: self.lanes.rank };
        let remote_rows: u64 = at
            .remote()
            .flat_map(|peer| inner.layout.runs_to(peer))
            .map(|run| u64::from(inner.layout.runs[run as usize].count + inner.layout.runs[run as usize].pad))
            .sum();
        let chunks: u64 = at
            .remote()
            .map(|peer| chunk_bytes(inner.layout.chunk_rows[peer as usize], inner.row_bytes))
            .sum();
        let scratch = self.pool().take(remote_rows * inner.row_bytes + chunks)?;
        let (mut landing, mut bases) = (Vec::new(), Vec::new());
        let mut chunk = scratch.offset() + remote_rows * inner.row_bytes;
        for (blob, peer) in group
            .gather(bytemuck::cast_slice(&[rows.extent.offset(), output.extent.offset()]))?
            .iter()
            .zip(0..)
        {
            let [rows_at, output_at] = bytemuck::try_pod_read_unaligned::<[u64; 2]>(blob)
                .map_err(|_| BootstrapError::Malformed { peer: format!("rank {peer}") })?;
            landing.push(rows_at);
            if self.lanes.nodes.same_node(self.lanes.rank, peer) {
                bases.push(output_at);
            } else {
                bases.push(chunk);
                chunk += chunk_bytes(inner.layout.chunk_rows[peer as usize], inner.row_bytes);
            }
        }
        let sum = inner.sum(&bases, false);
        let floor = self.port.floor(&inner.layout, inner.row_bytes, &landing, scratch.offset(), &sum)?;
        Ok(Yardstick { floor, rows, output, _scratch: scratch })
    }
}
