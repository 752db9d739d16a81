//! One rank: an instance in fixed slots, its input, and the memory of that.
//!
//! Ranks share the context of their GPU, and memory that is freed waits for all that the context does: for the streams of
//! peers that wait for this rank. So a rank makes its memory before the first call and keeps it until the last.

use std::sync::Arc;

use sidelane::device::{Context, Driver, PinnedMemory, Range, Stream};
use sidelane::ep::{Choices, ExpertOutput, ExpertParallelBuilder, ExpertRows, Handle, Tensor, TensorMut};
use sidelane::error::DeviceError;
use sidelane::plan::{Mode, Overflow, RowLayout, SlotShape};
use sidelane::{Dtype, ExpertParallel, Group, World};

use super::super::driver::stream;
use super::super::kernels::any;
use super::super::memory::{Random, content, whole};
use crate::error::CliError;

/// What all ranks have in common.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub ranks: u32,
    pub experts: u32,
    pub top_k: u32,
    pub hidden: u32,
    pub max_tokens: u32,
}

/// What one rank sends in one round.
pub struct Input {
    pub tokens: u32,
    pub rows: Vec<u8>,
    pub experts: Vec<i32>,
    pub weights: Vec<f32>,
}

impl Case {
    /// Special values and any others; about one choice in four is dropped, and no token names an expert twice.
    pub fn input(&self, dtype: Dtype, seed: u64, tokens: u32) -> Input {
        let mut random = Random(seed);
        let rows = (0..tokens * self.hidden).flat_map(|_| any(&mut random, dtype)).collect();
        let mut experts: Vec<i32> = Vec::new();
        for _ in 0..tokens {
            let first = experts.len();
            for _ in 0..self.top_k {
                let expert = (random.next() % u64::from(self.experts)) as i32;
                let dropped = random.next() & 3 == 0 || experts[first..].contains(&expert);
                experts.push(if dropped { -1 } else { expert });
            }
        }
        let weights = experts.iter().map(|_| (random.next() % 64) as f32 / 8.0 - 1.0).collect();
        Input { tokens, rows, experts, weights }
    }

    /// Any number of tokens.
    pub fn tokens(&self, seed: u64) -> u32 {
        (Random(seed ^ 0x7a).next() % u64::from(self.max_tokens + 1)) as u32
    }

    /// Settings of fixed slots, on the host or, with a stream, on a device.
    pub fn builder<'g>(&self, group: &'g Group) -> Result<ExpertParallelBuilder<'g>, sidelane::Error> {
        let mode = Mode::Slots { rows: self.max_tokens, overflow: Overflow::Error };
        let builder = ExpertParallel::builder(group)?.experts(self.experts).top_k(self.top_k);
        let builder = builder.hidden(self.hidden as usize).max_tokens(self.max_tokens);
        Ok(builder.mode(mode).layout(RowLayout::RankMajor))
    }

    /// A slot of these rows.
    fn slot(&self, dtype: Dtype) -> Result<SlotShape, sidelane::Error> {
        Ok(SlotShape::new(self.max_tokens, self.top_k, self.bytes(dtype, 1))?)
    }

    /// Bytes of so many rows.
    pub fn bytes(&self, dtype: Dtype, rows: u32) -> u64 {
        u64::from(rows) * u64::from(self.hidden) * dtype.size() as u64
    }
}

/// A rank on a device.
pub struct Rank {
    pub case: Case,
    pub dtype: Dtype,
    pub group: Group,
    pub context: Arc<Context>,
    pub ep: ExpertParallel,
    pub stream: Arc<Stream>,
    /// Through which memory of the device is read and written.
    staging: PinnedMemory,
}

impl Rank {
    pub fn new(case: Case, dtype: Dtype, world: &World, device: u32) -> Result<Self, CliError> {
        let group = world.all()?;
        let context = Driver::open().and_then(|driver| driver.context(device))?;
        let stream = Arc::new(stream(&context)?);
        let ep = case.builder(&group)?.dtype(dtype).on(&stream).build()?;
        let slots = u64::from(case.ranks) * case.slot(dtype)?.bytes();
        let staging = PinnedMemory::new(&context, slots as usize)?;
        Ok(Rank { case, dtype, group, context, ep, stream, staging })
    }

    /// Memory for the tensors of a call, with no tokens in it.
    pub fn tensors(&self) -> Result<Tensors, DeviceError> {
        let Case { max_tokens, top_k, .. } = self.case;
        let memory = |len: u64| PinnedMemory::new(&self.context, len as usize);
        let (choices, rows) = (u64::from(max_tokens * top_k) * 4, self.case.bytes(self.dtype, max_tokens));
        Ok(Tensors {
            case: self.case,
            dtype: self.dtype,
            tokens: 0,
            rows: memory(rows)?,
            experts: memory(choices)?,
            weights: memory(choices)?,
            out: memory(rows)?,
        })
    }

    /// Received slots, once the stream has come so far.
    pub fn received(&self, rows: &ExpertRows) -> Result<Vec<u8>, CliError> {
        self.stream.copy(whole(self.staging.range())?, whole(&rows.range()?)?)?;
        self.ep.synchronize()?;
        Ok(content(&self.staging)?)
    }

    /// Writes partial rows to a handle's output buffer, no more bytes than slots have, and waits until they are there.
    pub fn leave(&self, handle: &Handle, partials: &[u8]) -> Result<ExpertOutput, CliError> {
        let (y, len) = (handle.output()?, partials.len() as u64);
        self.staging.write(0, partials)?;
        self.stream.copy(y.range()?.span(0, len)?, self.staging.range().span(0, len)?)?;
        self.ep.synchronize()?;
        Ok(y)
    }
}

/// Enqueues experts whose partial rows are the rows that came. Nothing waits for the host.
pub fn experts_copy(
    stream: &Stream,
    rows: &ExpertRows,
    handle: &Handle,
) -> Result<ExpertOutput, sidelane::Error> {
    let (received, y) = (rows.range()?, handle.output()?);
    let Some(shape) = rows.slots() else {
        stream.copy(whole(y.range()?)?, whole(&received)?)?;
        return Ok(y);
    };
    let len = shape.bytes() - shape.rows_at();
    for source in 0..received.len() / shape.bytes() {
        let from = received.span(source * shape.bytes() + shape.rows_at(), len)?;
        stream.copy(y.range()?.span(source * len, len)?, from)?;
    }
    Ok(y)
}

/// Tensors of one call, which the host reads and writes, too.
pub struct Tensors {
    case: Case,
    dtype: Dtype,
    tokens: u32,
    rows: PinnedMemory,
    experts: PinnedMemory,
    weights: PinnedMemory,
    out: PinnedMemory,
}

impl Tensors {
    /// Writes an input.
    pub fn put(&mut self, input: &Input) -> Result<(), DeviceError> {
        self.rows.write(0, &input.rows)?;
        self.experts.write(0, bytemuck::cast_slice(&input.experts))?;
        self.weights.write(0, bytemuck::cast_slice(&input.weights))?;
        self.tokens = input.tokens;
        Ok(())
    }

    /// The tensors of as many tokens as were written last.
    pub fn call(&self) -> Result<Call, DeviceError> {
        let rows = self.case.bytes(self.dtype, self.tokens);
        let choices = u64::from(self.tokens * self.case.top_k) * 4;
        Ok(Call {
            x: self.rows.range().part(0, rows)?,
            experts: self.experts.range().part(0, choices)?,
            weights: self.weights.range().part(0, choices)?,
            out: self.out.range().part(0, rows)?,
            dtype: self.dtype,
        })
    }

    /// The sums, and whatever lies behind them.
    pub fn sums(&self) -> Result<Vec<u8>, DeviceError> {
        content(&self.out)
    }
}

/// Tensors of a dispatch and a combine.
pub struct Call {
    pub x: Range,
    pub experts: Range,
    pub weights: Range,
    pub out: Range,
    pub dtype: Dtype,
}

impl Call {
    /// The tokens and their choices.
    pub fn input(&self) -> (Tensor<'_>, Choices<'_>) {
        let Call { x, experts, weights, dtype, .. } = self;
        (Tensor::device(x, *dtype), Choices::Device { experts, weights })
    }

    /// Enqueues a dispatch.
    pub fn dispatch(&self, ep: &mut ExpertParallel) -> Result<(ExpertRows, Handle), sidelane::Error> {
        let (x, choices) = self.input();
        ep.dispatch(x, choices)
    }

    /// Enqueues a combine.
    pub fn combine(
        &self,
        ep: &mut ExpertParallel,
        y: ExpertOutput,
        handle: &Handle,
    ) -> Result<(), sidelane::Error> {
        ep.combine_into(y, handle, TensorMut::device(&self.out, self.dtype))
    }

    /// Enqueues a dispatch, experts that copy, and a combine.
    pub fn layer(&self, ep: &mut ExpertParallel, stream: &Stream) -> Result<(), sidelane::Error> {
        let (rows, handle) = self.dispatch(ep)?;
        let y = experts_copy(stream, &rows, &handle)?;
        self.combine(ep, y, &handle)
    }
}
