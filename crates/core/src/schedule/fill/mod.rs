//! Fills a skeleton's operands from a layout. Pure, and without allocation once the tables have
//! grown.
//!
//! A real call (`ep`) and an unrolled one (`story`) fill their operands here, count with the same
//! [`Calls`](super::Calls), look into the same [`ControlLayout`] and follow
//! the same skeletons: so far, the proof covers the code that runs. The unrolled program models the
//! rest itself: when the planner and the caller touch memory, and which extent a pool gives. It
//! takes the lowest, the hardest case; a real pool may be kinder.

mod caller;
mod relay;

pub use caller::{CallerTables, ReturnParts};
pub use relay::RelayTables;

use super::{ControlLayout, Index, Operand, PutSource, WindowId};
use crate::plan::{RowBuffer, RowSizes};

/// Constants of all tables of one rank in one call.
#[derive(Clone, Copy, Debug)]
pub struct FillContext<'a> {
    /// This rank among its nodes.
    pub paths: crate::topology::Paths<'a>,
    /// Geometry of the control windows.
    pub control: &'a ControlLayout,
    /// Sizes of what moves.
    pub sizing: RowSizes,
    /// In how many parts a block goes to its relay.
    pub chunks: u8,
    /// Which of two publications, messages and headers the call takes.
    pub parity: u64,
    /// The window in which crossing rows land: the pool, or its
    /// [twin](crate::schedule::WindowId::HOST_STAGING) where the pool is device memory that no net
    /// reaches.
    pub far: WindowId,
    /// Where metadata lands at each rank, if not behind the rows.
    pub notes: Option<&'a [u64]>,
}

impl FillContext<'_> {
    /// What lands at a rank if so many rows do.
    pub fn landing(&self, rows: u32) -> RowBuffer {
        let landing = self.sizing.landing(rows);
        if self.notes.is_some() { landing.without_notes() } else { landing }
    }

    /// Where metadata lands at a rank whose rows, so many, land at `base`.
    pub fn notes_at(&self, rank: u32, base: u64, rows: u32) -> u64 {
        self.notes.map_or_else(|| base + self.landing(rows).notes_at(), |notes| notes[rank as usize])
    }
}

impl Operand {
    /// Stage "regroup" of rank `me`, behind an all-gather: copies `runs` runs of rows from where
    /// they were gathered to their places. Rows of no bytes stay.
    pub fn regroup(me: u32, runs: u32, row_bytes: u64, (from_offset, base): (u64, u64)) -> Operand {
        if row_bytes == 0 {
            return Operand::Empty;
        }
        let from = PutSource::Window { owner: me, window: WindowId::POOL };
        let (index, to) = (Index::Listed, WindowId::POOL);
        Operand::Rows { first: 0, count: runs, from, from_offset, index, to, base, row_bytes }
    }
}
