//! One rank: an exchange on a stream, what it sends, and where that lies.
//!
//! Ranks share the context of their GPU, and memory that is freed waits for all that the context does: for the streams of
//! peers that wait for this rank. So a rank makes its memory before the first call and keeps it until the last.

use std::sync::Arc;

use sidelane::device::{Context, Driver, PinnedMemory, Span, Stream};
use sidelane::ep::{StreamExchange, StreamExchangeBuilder, StreamTokens};
use sidelane::error::DeviceError;
use sidelane::{Dtype, Group, World};

use super::super::driver::stream;
use super::super::error::CheckError;
use super::super::kernels::any;
use super::super::memory::{Random, content, whole};

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

    pub fn builder<'g>(&self, group: &'g Group, context: &'g Arc<Context>) -> StreamExchangeBuilder<'g> {
        let builder = StreamExchange::builder(group, context).experts(self.experts).top_k(self.top_k);
        builder.hidden(self.hidden).max_tokens(self.max_tokens)
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
    pub exchange: StreamExchange,
    pub stream: Stream,
    /// Through which memory of the device is read and written.
    staging: PinnedMemory,
}

impl Rank {
    pub fn new(case: Case, dtype: Dtype, world: &World, device: u32) -> Result<Self, CheckError> {
        let group = world.all()?;
        let context = Driver::open().and_then(|driver| driver.context(device))?;
        let exchange = case.builder(&group, &context).dtype(dtype).build()?;
        let stream = stream(&context)?;
        let staging = PinnedMemory::new(&context, exchange.received().len() as usize)?;
        Ok(Rank { case, dtype, group, context, exchange, stream, staging })
    }

    /// Memory for the tensors of a call, with no tokens in it.
    pub fn tensors(&self) -> Result<Tensors, DeviceError> {
        let Case { max_tokens, top_k, .. } = self.case;
        let memory = |len: u64| PinnedMemory::new(&self.context, len as usize);
        let (choices, rows) = (u64::from(max_tokens * top_k) * 4, self.case.bytes(self.dtype, max_tokens));
        Ok(Tensors {
            count: 0,
            rows: memory(rows)?,
            experts: memory(choices)?,
            weights: memory(choices)?,
            out: memory(rows)?,
        })
    }

    /// What was received, once the stream has come so far.
    pub fn received(&self) -> Result<Vec<u8>, CheckError> {
        self.stream.copy(whole(self.staging.range())?, whole(self.exchange.received())?)?;
        self.exchange.synchronize(&self.stream)?;
        Ok(content(&self.staging)?)
    }

    /// Leaves partial rows, no more bytes than slots have, and waits until they are there.
    pub fn leave(&self, partials: &[u8]) -> Result<(), CheckError> {
        let (to, len) = (self.exchange.partials()?, partials.len() as u64);
        self.staging.write(0, partials)?;
        self.stream.copy(to.span(0, len)?, self.staging.range().span(0, len)?)?;
        Ok(self.exchange.synchronize(&self.stream)?)
    }
}

/// Experts whose partial rows are the rows that came. Nothing waits for the host.
pub fn experts_copy(exchange: &StreamExchange, stream: &Stream) -> Result<(), sidelane::Error> {
    let shape = exchange.shape();
    let (received, partials) = (exchange.received(), exchange.partials()?);
    let len = shape.bytes() - shape.rows_at();
    for source in 0..u64::from(exchange.size()) {
        let from = received.span(source * shape.bytes() + shape.rows_at(), len)?;
        stream.copy(partials.span(source * len, len)?, from)?;
    }
    Ok(())
}

/// Tensors of one call, which the host reads and writes, too.
pub struct Tensors {
    pub count: u32,
    pub rows: PinnedMemory,
    pub experts: PinnedMemory,
    pub weights: PinnedMemory,
    pub out: PinnedMemory,
}

impl Tensors {
    /// Writes an input.
    pub fn put(&mut self, input: &Input) -> Result<(), DeviceError> {
        self.rows.write(0, &input.rows)?;
        self.experts.write(0, bytemuck::cast_slice(&input.experts))?;
        self.weights.write(0, bytemuck::cast_slice(&input.weights))?;
        self.count = input.tokens;
        Ok(())
    }

    pub fn tokens(&self) -> Result<StreamTokens<'_>, DeviceError> {
        Ok(StreamTokens {
            count: self.count,
            rows: whole(self.rows.range())?,
            experts: whole(self.experts.range())?,
            weights: whole(self.weights.range())?,
        })
    }

    pub fn out(&self) -> Result<Span<'_>, DeviceError> {
        whole(self.out.range())
    }
}
