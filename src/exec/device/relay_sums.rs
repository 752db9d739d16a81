//! Sums of rows that a relay returns: engines pull a chunk of the rows, and a kernel sums it.
//!
//! ```text
//!   stream of copies    tables | pull chunk 1 for s | kernel: its sums | mark | pull chunk 2 for s | kernel ..
//!   host                enqueues all that ahead ............ then sees the marks: NIC, or copies to the outbox
//! ```
//!
//! Rows of this rank are read where they lie. The tables say which rows make a sum, in its order.

use std::sync::Arc;

use super::copy_engine_stepper::CopyEngineStepper;
use crate::device::{DeviceRange, Kernels, OwnRows, SumChoices};
use crate::dtype::{Dtype, PartialDtype};
use crate::error::{DeviceError, Error};
use crate::schedule::{Operand, Operands};

/// Kernels of a rank's sums for other nodes.
#[derive(Debug)]
pub struct RelaySums {
    pub kernels: Arc<Kernels>,
    /// Elements of a row.
    pub columns: u32,
    /// Type of rows and sums.
    pub dtype: Dtype,
    /// Rows of a sum at most.
    pub top_k: u32,
    /// A word that is 0: where faults would be written.
    pub status: DeviceRange,
    /// Where in this rank's memory the tables of the running call lie: the rows of each sum, `i32
    /// [sums, top_k]`, and their weights, `f32`, if they have any.
    pub tables: (u64, Option<u64>),
    /// A sum is enqueued that no mark is behind.
    pub unmarked: bool,
}

impl CopyEngineStepper {
    /// One that sums for other nodes, too.
    pub fn summing(mut self, sums: RelaySums) -> Self {
        self.sums = Some(sums);
        self
    }

    /// Says where the tables of the next sums lie.
    pub fn sum_by(&mut self, tables: (u64, Option<u64>)) {
        if let Some(sums) = &mut self.sums {
            sums.tables = tables;
        }
    }

    /// Has a kernel sum rows behind all that is collected.
    pub(super) fn sum_pulled(&mut self, operand: Operand, operands: &Operands<'_>) -> Result<(), Error> {
        let Operand::SumPulled { first, count, pulled, entries, to } = operand else { return Ok(()) };
        self.cut()?;
        self.enqueue()?;
        let me = self.port.lanes().rank;
        let RelaySums { kernels, columns, dtype, top_k, status, tables, .. } =
            self.sums.as_ref().ok_or(DeviceError::NoEngine { operation: "add rows" })?;
        let memory = &Self::at(&self.ground, me)?.memory;
        let row_bytes = u64::from(*columns) * dtype.size() as u64;
        let rows = |at, rows: u32| memory.span(at, u64::from(rows) * row_bytes);
        let (words, skipped) = (u64::from(*top_k) * 4, u64::from(first) * u64::from(*top_k) * 4);
        let table = |at: u64| memory.span(at + skipped, u64::from(count) * words);
        let (own, count_of_own) = (operands.sum.bases[me as usize], operands.sum.chunks[me as usize].rows);
        kernels.sum_choices(
            &self.stream,
            &SumChoices {
                tokens: count,
                top_k: *top_k,
                columns: *columns,
                dtype: *dtype,
                // One group is rounded once, as it is written.
                wire: PartialDtype::F32,
                n_rows: entries,
                rows: rows(pulled, entries)?,
                own: Some(OwnRows { rows: rows(own, count_of_own)?, count: count_of_own }),
                index: table(tables.0)?,
                n_experts: *top_k,
                experts: None,
                weights: tables.1.map(table).transpose()?,
                group_of: None,
                status: status.word(0)?,
                out: rows(to, count)?,
            },
        )?;
        self.enqueued.relay_sums += 1;
        self.sums.iter_mut().for_each(|sums| sums.unmarked = true);
        Ok(())
    }

    /// Has the stream leave a mark behind the last sum, if there is a new one. What crosses from
    /// now on goes behind that.
    pub(super) fn tell_summed(&mut self) -> Result<(), Error> {
        if self.sums.as_mut().is_some_and(|sums| std::mem::take(&mut sums.unmarked)) {
            self.marks += 1;
            self.stream.write(Self::mark(&self.ground, &self.port)?, self.marks)?;
            self.enqueued.memory_operations += 1;
        }
        Ok(())
    }
}
