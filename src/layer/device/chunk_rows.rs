//! Rows of chunks on their way through experts, and rows of all chunks in the order in which
//! gradients of weights are added up.

use super::device_memory::{DeviceTensor, HostStaging};
use super::expert_products::Compute;
use crate::device::{ByteSpan, GatherRun, GatherRuns, GroupSegments};
use crate::error::{DeviceError, Error};
use crate::layer::GradientOrder;

/// Rows of all experts, `[rows, hidden]`, in the type of the products' factors.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceSegments<'a> {
    pub rows: u32,
    pub values: ByteSpan<'a>,
    /// Rows of each expert; without them one expert has them all.
    pub counts: Option<GroupSegments<'a>>,
}

/// Gradients of gate and up.
#[derive(Debug)]
pub(super) enum Inner {
    /// `[rows, ffn]` each.
    Apart([DeviceTensor; 2]),
    /// Side by side, `[rows, 2 * ffn]`.
    Joined(DeviceTensor),
}

/// Tensors of a chunk, besides its rows, that gradients of weights are made of.
#[derive(Debug)]
pub(super) struct Differentials {
    pub inner: Inner,
    pub act: DeviceTensor,
}

/// A chunk for the gradients of weights: its rows, the gradients of its outputs, and what was kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceChunk<'a> {
    pub rows: ByteSpan<'a>,
    pub of_outputs: ByteSpan<'a>,
    pub kept: &'a Differentials,
}

impl Inner {
    pub fn gate(&self) -> &DeviceTensor {
        match self {
            Inner::Apart([gate, _]) | Inner::Joined(gate) => gate,
        }
    }

    pub fn up(&self) -> &DeviceTensor {
        match self {
            Inner::Apart([_, up]) | Inner::Joined(up) => up,
        }
    }
}

/// Rows of a run, at most: a block moves a run, and many blocks keep the memory busy.
const ROWS_OF_A_RUN: u32 = 16;

/// Rows of all chunks in the order of the gradients' sums, without pads.
pub(super) struct Gathered {
    pub rows: u32,
    runs: GatherRuns,
    _runs: DeviceTensor,
    /// Whether the rows of the first chunk lie so already, and are all.
    in_place: bool,
    /// Of each expert.
    counts: Vec<i64>,
    /// Twice the counts, as there are no pads.
    table_of_counts: DeviceTensor,
    /// Room for the addresses of as many matrices.
    table: DeviceTensor,
}

/// Rows for the gradients of weights: where a chunk has them, or copied together.
pub(super) enum Rows<'a> {
    InPlace(ByteSpan<'a>),
    Gathered(DeviceTensor),
}

impl Rows<'_> {
    pub fn span(&self) -> Result<ByteSpan<'_>, DeviceError> {
        match self {
            Rows::InPlace(span) => Ok(*span),
            Rows::Gathered(tensor) => tensor.span(),
        }
    }
}

impl Gathered {
    pub fn new(
        on: &Compute,
        experts: u32,
        chunks: usize,
        order: &GradientOrder,
        staging: &mut HostStaging,
    ) -> Result<Self, Error> {
        let (mut runs, mut rows) = (Vec::new(), 0);
        for run in (0..experts as usize).flat_map(|expert| order.runs(expert)) {
            let [matrix, first, count] = [run.chunk, run.first, run.rows].map(|number| number as u32);
            for at in (0..count).step_by(ROWS_OF_A_RUN as usize) {
                let part = ROWS_OF_A_RUN.min(count - at);
                runs.push(GatherRun { matrix, first: first + at, rows: part, to: rows + at });
            }
            rows += count;
        }
        let in_place = runs.iter().all(|run| run.matrix == 0 && run.first == run.to);
        if in_place {
            runs.clear();
        }
        let counts: Vec<i64> = (0..experts as usize).map(|expert| order.rows(expert) as i64).collect();
        let of_runs = on.memory.take(size_of_val(runs.as_slice()) as u64)?;
        let table_of_counts = on.memory.take(16 * u64::from(experts))?;
        staging.send(&on.stream, of_runs.range(), &runs)?;
        staging.send(&on.stream, table_of_counts.range(), &[counts.as_slice(), &counts].concat())?;
        let (table, listed) = (on.memory.take(8 * chunks as u64)?, GatherRuns::new(&runs, of_runs.range()));
        Ok(Gathered { rows, runs: listed, _runs: of_runs, in_place, counts, table_of_counts, table })
    }

    pub fn segments(&self) -> Result<GroupSegments<'_>, DeviceError> {
        Ok(GroupSegments { table: self.table_of_counts.span()?, rows: &self.counts, padded: &self.counts })
    }

    /// One matrix of those of the chunks, whose rows have so many bytes.
    pub fn rows<'a>(
        &self,
        on: &Compute,
        parts: impl Iterator<Item = Result<ByteSpan<'a>, DeviceError>>,
        row_bytes: u64,
    ) -> Result<Rows<'a>, DeviceError> {
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        if let (true, Some(&first)) = (self.in_place, parts.first()) {
            return Ok(Rows::InPlace(first));
        }
        let out = on.memory.take(u64::from(self.rows) * row_bytes)?;
        on.kernels.gather(&on.stream, (&self.runs, row_bytes), &parts, self.table.range(), out.span()?)?;
        Ok(Rows::Gathered(out))
    }
}
