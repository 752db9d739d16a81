//! Tokens that engines and NICs read in place, without packing.
//!
//! They must lie in this rank's memory, and what goes to one place must be a run of tokens, too: as
//! where a sequence is cut into parts, or where each token goes to every rank. Then the runs of
//! packed rows have twins, by token, behind them:
//!
//! ```text
//!   runs of a layout     | packed rows 0..2 -> a | 2..5 -> b | tokens 4..6 -> a | 0..3 -> b |
//!                                                            ^ in_place: as many as before
//! ```
//!
//! Notes lie packed in any case, and rows that come home go where they would have lain packed.

use super::common::Common;
use super::enqueuer::Kept;
use super::exchange::PlannedExchange;
use super::space::Extent;
use crate::device::DeviceRange;
use crate::dtype::Dtype;
use crate::error::{CallKind, Error};
use crate::plan::RowRun;

/// Tokens in memory of the device that NICs reach.
#[derive(Debug)]
pub(in crate::ep) struct PlannedTokens {
    range: DeviceRange,
    _extent: Extent,
}

impl PlannedTokens {
    /// The rows.
    pub fn range(&self) -> &DeviceRange {
        &self.range
    }
}

impl PlannedExchange {
    /// Memory for so many tokens, as a dispatch sends them.
    ///
    /// # Errors
    /// As [`Common::take`].
    pub fn token_buffer(&self, tokens: u32) -> Result<PlannedTokens, Error> {
        let bytes = u64::from(tokens) * self.common.shape.row_bytes(CallKind::Dispatch);
        let extent = self.common.take(bytes)?;
        let range = self.common.piece((extent.offset(), bytes))?;
        Ok(PlannedTokens { range, _extent: extent })
    }
}

impl Common {
    /// Where in this rank's memory tokens of this type lie that a call of this kind may send as
    /// they are, if they do.
    pub fn lie_here(&self, kind: CallKind, (x, dtype): (&DeviceRange, Dtype)) -> Option<u64> {
        let offset = x.address().checked_sub(self.memory.address())?;
        let inside = offset.checked_add(x.len()).is_some_and(|end| end <= self.memory.len());
        (inside && self.sends_as_they_are(kind, dtype)).then_some(offset)
    }
}

impl Kept {
    /// Adds the twins of the layout's runs, if each is a run of tokens. `token_of` is that of a
    /// packed row.
    pub fn find_in_place(&mut self, token_of: impl Fn(u32) -> u32) {
        let runs = &mut self.layout.runs;
        let before = runs.len();
        self.in_place = Some(before as u32);
        for at in 0..before {
            let run = runs[at];
            let first = if run.count > 0 { token_of(run.first) } else { 0 };
            if (1..run.count).any(|row| token_of(run.first + row) != first + row) {
                runs.truncate(before);
                self.in_place = None;
                return;
            }
            runs.push(RowRun { first, ..run });
        }
    }
}
