//! SwiGLU experts on a device: the products and sums of [`GroupedSwiGlu`], in its order.
//!
//! Rows of all experts lie one expert after another, with pads behind each. What the kernels make
//! of pads is undefined, and nothing reads it.

use super::memory::{DeviceTensor, HostStaging};
use super::products::Compute;
use crate::device::{ByteSpan, DeviceRange, GatherRun, GatherRuns, GroupSegments, MatmulArgs, MatmulShape};
use crate::error::{DeviceError, Error};
use crate::layer::{GradientOrder, GroupedSwiGlu};

/// Experts with their weights on the device.
#[derive(Debug)]
pub(super) struct DeviceSwiGlu {
    experts: u32,
    hidden: u32,
    ffn: u32,
    weights: DeviceRange,
}

/// Rows of all experts, f32 `[rows, hidden]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceSegments<'a> {
    pub rows: u32,
    pub values: ByteSpan<'a>,
    /// Rows of each expert; without them one expert has them all.
    pub counts: Option<GroupSegments<'a>>,
}

/// What a forward pass keeps of a chunk: `[rows, ffn]` each. After `rows_backward`, gradients.
#[derive(Debug)]
pub(super) struct DeviceSaved {
    gate: DeviceTensor,
    up: DeviceTensor,
}

/// What the gradients of weights need of a chunk besides its rows.
#[derive(Debug)]
pub(super) struct Differentials {
    saved: DeviceSaved,
    act: DeviceTensor,
}

/// A chunk for the gradients of weights: its rows, the gradients of its outputs, and what was kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceChunk<'a> {
    pub rows: ByteSpan<'a>,
    pub of_outputs: ByteSpan<'a>,
    pub kept: &'a Differentials,
}

/// The three matrices of an expert, in their order.
#[derive(Clone, Copy)]
enum Which {
    Gate,
    Up,
    Down,
}

/// The matrix that rows are multiplied with, and whether the result is added to the output.
#[derive(Clone, Copy)]
struct Factor {
    which: Which,
    transposed: bool,
    add: bool,
}

impl Which {
    /// The matrix itself.
    fn plain(self) -> Factor {
        Factor { which: self, transposed: false, add: false }
    }

    fn transposed(self) -> Factor {
        Factor { transposed: true, ..self.plain() }
    }
}

impl Factor {
    fn added(self) -> Factor {
        Factor { add: true, ..self }
    }
}

impl DeviceSwiGlu {
    pub fn new(compute: &Compute, host: &GroupedSwiGlu, staging: &mut HostStaging) -> Result<Self, Error> {
        let weights = compute.memory.alone(host.weights.len())?;
        staging.send(&compute.stream, &weights, &host.weights)?;
        let [experts, hidden, ffn] = [host.experts, host.hidden, host.ffn].map(|number| number as u32);
        Ok(DeviceSwiGlu { experts, hidden, ffn, weights })
    }

    /// All weights, f32, in the order of [`GroupedSwiGlu`].
    pub fn weights(&self) -> &DeviceRange {
        &self.weights
    }

    /// Outputs, f32 `[rows, hidden]`.
    pub fn forward(
        &self,
        on: &Compute,
        rows: DeviceSegments<'_>,
    ) -> Result<(DeviceTensor, DeviceSaved), Error> {
        let inner = || on.memory.words(rows.rows as usize * self.ffn as usize);
        let (gate, up, act) = (inner()?, inner()?, inner()?);
        self.product(on, rows, (rows.values, gate.span()?), Which::Gate.plain())?;
        self.product(on, rows, (rows.values, up.span()?), Which::Up.plain())?;
        let all = [gate.span()?, up.span()?, act.span()?];
        on.kernels.swiglu(&on.stream, self.inner(rows.rows), all)?;
        let outputs = on.memory.words(rows.rows as usize * self.hidden as usize)?;
        self.product(on, rows, (act.span()?, outputs.span()?), Which::Down.plain())?;
        Ok((outputs, DeviceSaved { gate, up }))
    }

    /// Gradients of the rows, f32 `[rows, hidden]`, from those of the outputs.
    pub fn rows_backward(
        &self,
        on: &Compute,
        rows: DeviceSegments<'_>,
        saved: DeviceSaved,
        of_outputs: ByteSpan<'_>,
    ) -> Result<(DeviceTensor, Differentials), Error> {
        let act = on.memory.words(rows.rows as usize * self.ffn as usize)?;
        let of_rows = on.memory.words(rows.rows as usize * self.hidden as usize)?;
        self.product(on, rows, (of_outputs, act.span()?), Which::Down.transposed())?;
        let all = [saved.gate.span()?, saved.up.span()?, act.span()?];
        on.kernels.swiglu_backward(&on.stream, self.inner(rows.rows), all)?;
        self.product(on, rows, (saved.gate.span()?, of_rows.span()?), Which::Gate.transposed())?;
        self.product(on, rows, (saved.up.span()?, of_rows.span()?), Which::Up.transposed().added())?;
        Ok((of_rows, Differentials { saved, act }))
    }

    /// The gradient of the weights, over all chunks of a step, into `out`.
    pub fn weights_backward(
        &self,
        on: &Compute,
        chunks: &[DeviceChunk<'_>],
        order: &GradientOrder,
        (staging, out): (&mut HostStaging, &DeviceRange),
    ) -> Result<(), Error> {
        let gathered = Gathered::new(on, self.experts, chunks.len(), order, staging)?;
        let product = |which, (a, rows): (&Rows<'_>, u32), (b, columns): (&Rows<'_>, u32)| {
            let (offset, len) = self.matrices(which)?;
            let shape = MatmulShape::Depth { rows, depth: gathered.rows, columns, apart: self.apart() };
            let segments = Some(gathered.segments()?);
            let (a, b, out) = (a.span()?, b.span()?, out.span(offset, len)?);
            on.expert_product(&MatmulArgs { a, b, out, shape, segments, add: false })
        };
        let x = gathered.rows(on, chunks.iter().map(|chunk| Ok(chunk.rows)), self.hidden)?;
        let of_gate = gathered.rows(on, chunks.iter().map(|chunk| chunk.kept.saved.gate.span()), self.ffn)?;
        product(Which::Gate, (&x, self.hidden), (&of_gate, self.ffn))?;
        let of_up = gathered.rows(on, chunks.iter().map(|chunk| chunk.kept.saved.up.span()), self.ffn)?;
        product(Which::Up, (&x, self.hidden), (&of_up, self.ffn))?;
        let act = gathered.rows(on, chunks.iter().map(|chunk| chunk.kept.act.span()), self.ffn)?;
        let of_outputs = gathered.rows(on, chunks.iter().map(|chunk| Ok(chunk.of_outputs)), self.hidden)?;
        product(Which::Down, (&act, self.ffn), (&of_outputs, self.hidden))?;
        Ok(())
    }

    /// Rows times a matrix of their expert, or its transpose.
    fn product(
        &self,
        on: &Compute,
        rows: DeviceSegments<'_>,
        (a, out): (ByteSpan<'_>, ByteSpan<'_>),
        Factor { which, transposed, add }: Factor,
    ) -> Result<(), DeviceError> {
        let (taken, made) = match which {
            Which::Gate | Which::Up => (self.hidden, self.ffn),
            Which::Down => (self.ffn, self.hidden),
        };
        let (depth, columns) = if transposed { (made, taken) } else { (taken, made) };
        let (offset, len) = self.matrices(which)?;
        let b = self.weights.span(offset, len)?;
        let shape = MatmulShape::Rows { rows: rows.rows, depth, columns, transposed, apart: self.apart() };
        on.expert_product(&MatmulArgs { a, b, out, shape, segments: rows.counts, add })
    }

    /// Where a matrix of the first expert begins among the weights, in bytes, and how many bytes
    /// there are from it to the end.
    fn matrices(&self, which: Which) -> Result<(u64, u64), DeviceError> {
        let offset = which as u64 * self.apart() / 3 * 4;
        let all = self.weights.len();
        Ok((offset.min(all), all.saturating_sub(offset)))
    }

    /// Elements from a matrix of one expert to that of the next.
    fn apart(&self) -> u64 {
        3 * u64::from(self.hidden) * u64::from(self.ffn)
    }

    fn inner(&self, rows: u32) -> u64 {
        u64::from(rows) * u64::from(self.ffn)
    }
}

/// Rows of a run, at most: a block moves a run, and many blocks keep the memory busy.
const ROWS_OF_A_RUN: u32 = 16;

/// Rows of all chunks in the order of the gradients' sums, without pads.
struct Gathered {
    rows: u32,
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
enum Rows<'a> {
    InPlace(ByteSpan<'a>),
    Gathered(DeviceTensor),
}

impl Rows<'_> {
    fn span(&self) -> Result<ByteSpan<'_>, DeviceError> {
        match self {
            Rows::InPlace(span) => Ok(*span),
            Rows::Gathered(tensor) => tensor.span(),
        }
    }
}

impl Gathered {
    fn new(
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

    fn segments(&self) -> Result<GroupSegments<'_>, DeviceError> {
        Ok(GroupSegments { table: self.table_of_counts.span()?, rows: &self.counts, padded: &self.counts })
    }

    /// One matrix of those of the chunks.
    fn rows<'a>(
        &self,
        on: &Compute,
        parts: impl Iterator<Item = Result<ByteSpan<'a>, DeviceError>>,
        columns: u32,
    ) -> Result<Rows<'a>, DeviceError> {
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        if let (true, Some(&first)) = (self.in_place, parts.first()) {
            return Ok(Rows::InPlace(first));
        }
        let out = on.memory.words(self.rows as usize * columns as usize)?;
        on.kernels.gather(&on.stream, (&self.runs, columns), &parts, self.table.range(), out.span()?)?;
        Ok(Rows::Gathered(out))
    }
}
