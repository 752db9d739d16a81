//! The yardstick of a dispatch and its combine: see [`Floor`].

use super::{ExpertOutput, ExpertParallel, ExpertRows, Handle};
use crate::error::{BootstrapError, Error};
use crate::lane::Floor;
use crate::memory::Extent;
use crate::schedule::{At, chunk_bytes};
use crate::world::Group;

/// A [`Floor`] with the memory it needs for ranks of other nodes.
#[derive(Debug)]
pub struct Yardstick {
    /// The moves.
    pub floor: Floor,
    _scratch: Extent,
}

impl ExpertParallel {
    /// The bare moves of the dispatch that made `handle`, into `rows`, and of a combine of `output`. Collective over
    /// `group`, which must be the group this was built on. `rows`, `output` and `handle` must stay alive while it is
    /// used, and no call may use them meanwhile.
    ///
    /// # Errors
    /// Memory for what would go to other nodes; whatever ends an exchange of addresses.
    pub fn yardstick(
        &self,
        group: &Group,
        rows: &ExpertRows,
        output: &ExpertOutput,
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
        Ok(Yardstick { floor, _scratch: scratch })
    }
}
