//! Floor of a dispatch and its combine: the same bytes, moved by bare loops.

use super::{ExpertOutput, ExpertParallel, ExpertRows, Feature, Handle};
use crate::error::{BootstrapError, Error};
use crate::lane::{Floor, Moves, RAW, is_copied};
use crate::plan::RelayPlan;
use crate::rows::{Arithmetic, Stores};
use crate::world::{Group, SymmetricRange};

/// The bare moves of a dispatch and of the combine that belongs to it, and the memory they go to.
///
/// The memory can be lent to the real calls and taken back, so that both are measured in the very
/// same place: in a virtual machine, one stretch of memory may be a quarter faster than the next.
#[derive(Debug)]
pub struct FloorBench {
    floor: Floor,
    rows: BorrowedMemory<ExpertRows>,
    output: BorrowedMemory<ExpertOutput>,
    /// Memory that stands for other machines in the floor.
    _scratch: SymmetricRange,
}

/// Memory that belongs at an offset, and is there or lent.
#[derive(Debug)]
struct BorrowedMemory<T> {
    offset: u64,
    kept: Option<T>,
}

impl FloorBench {
    /// Moves the rows of `x`, `[tokens, hidden]` as bytes, to where the dispatch had put them, at
    /// this rank and its peers. A shorter input moves nothing, and neither does a floor whose
    /// rows are lent.
    pub fn dispatch(&mut self, x: &[u8], stores: Stores) {
        if self.rows.kept.is_some() {
            self.floor.dispatch(x, stores);
        }
    }

    /// Sums the rows of all ranks' outputs into `out`, `[tokens, hidden]` as bytes. A shorter `out`
    /// is left as it is, and so is any while the output is lent.
    pub fn combine(&mut self, dtype: Arithmetic, out: &mut [u8], stores: Stores) {
        if self.output.kept.is_some() {
            self.floor.combine(dtype, out, stores);
        }
    }

    /// Lends the rows: drop them, and a dispatch will land there.
    pub fn lend_rows(&mut self) -> Option<ExpertRows> {
        self.rows.kept.take()
    }

    /// Takes rows back. They are refused, and returned, if they lie elsewhere.
    ///
    /// # Errors
    /// The rows.
    #[allow(clippy::result_large_err, reason = "rows come back as they are: calls allocate nothing")]
    pub fn keep_rows(&mut self, rows: ExpertRows) -> Result<(), ExpertRows> {
        match rows.host().is_ok_and(|rows| rows.extent.offset() == self.rows.offset) {
            true => self.rows.kept = Some(rows),
            false => return Err(rows),
        }
        Ok(())
    }

    /// Lends the output: offer it to a combine.
    pub fn lend_output(&mut self) -> Option<ExpertOutput> {
        self.output.kept.take()
    }

    /// Takes an output back. It is refused, and returned, if it lies elsewhere.
    ///
    /// # Errors
    /// The output.
    pub fn keep_output(&mut self, output: ExpertOutput) -> Result<(), ExpertOutput> {
        match output.host().is_ok_and(|output| output.extent.offset() == self.output.offset) {
            true => self.output.kept = Some(output),
            false => return Err(output),
        }
        Ok(())
    }
}

impl ExpertParallel {
    /// The bare moves of a call that sent `rows` along `handle` (the dispatch that made it, or
    /// gradients of a combine), and of a combine of `output`. Collective over `group`, which must
    /// be the group this was built on. Rows that came by a relay are relayed again from their
    /// present places. On return from [`FloorBench::dispatch`] peers may still be writing, so
    /// follow it with a barrier.
    ///
    /// # Errors
    /// Those of an exchange of addresses.
    #[doc(hidden)]
    pub fn floor_bench(
        &self,
        group: &Group,
        rows: ExpertRows,
        output: ExpertOutput,
        handle: &Handle,
    ) -> Result<FloorBench, Error> {
        let ep = self.host(Feature::Floor)?;
        let inner = handle.on_host()?.inner();
        let (rows_at, output_at) = (rows.host()?, output.host()?);
        let (row_bytes, offsets) = (rows_at.row_bytes, [rows_at.extent.offset(), output_at.extent.offset()]);
        // Only what goes to other machines needs a place there; of it all ranks have the same idea.
        let away = group.shared.net.as_ref().is_some_and(|net| !is_copied(net.report.lane));
        let scratch = group.take_symmetric(if away { RAW } else { 0 })?;
        let (mut landing, mut bases) = (Vec::new(), Vec::new());
        for (blob, peer) in group.gather(bytemuck::cast_slice(&offsets))?.iter().zip(0..) {
            let [rows_at, output_at] = bytemuck::try_pod_read_unaligned::<[u64; 2]>(blob)
                .map_err(|_| BootstrapError::Malformed { peer: format!("rank {peer}") })?;
            landing.push(rows_at);
            bases.push(output_at);
        }
        let floor = ep.fixed.port.floor(&Moves {
            layout: &inner.layout,
            forward: inner.forward.as_deref().unwrap_or(&RelayPlan::default()),
            bins: &ep.fixed.bins,
            row_bytes,
            return_bytes: inner.row_bytes,
            partial_bytes: ep.fixed.partial_bytes(),
            landing: &landing,
            sum: inner.sum(&bases, false),
            scratch: &scratch.window(),
        })?;
        // No rank writes before all know which rows they relay.
        group.gather(&[])?;
        let rows = BorrowedMemory { offset: offsets[0], kept: Some(rows) };
        let output = BorrowedMemory { offset: offsets[1], kept: Some(output) };
        Ok(FloorBench { floor, rows, output, _scratch: scratch })
    }
}
