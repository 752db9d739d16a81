//! `ExpertParallel` on this GPU with exact sizes or a budget, against the same calls on the host:
//! all that a caller sees of them.

use std::sync::Arc;

use half::bf16;
use sidelane::device::{DeviceRange, Driver, Graph, PinnedMemory, Stream};
use sidelane::ep::{ExpertRows, Graphs, Handle, Status};
use sidelane::plan::{Overflow, ReceiveMode, SumOrder};
use sidelane::{Dtype, ExpertParallel, Group, World};

use super::Task;
use super::device::{allocate, equal, finish, same, stream, whole};
use super::exchange::{Answer, Call, Case, Host, Input, experts_copy};
use crate::error::CliError;
use crate::table::volume;

/// Sizes are known when they are needed, and no earlier.
pub const EAGER: ReceiveMode = ReceiveMode::Exact;

/// So many rows as half of a rank's choices: some are dropped.
pub fn half(case: Case) -> ReceiveMode {
    ReceiveMode::Budget { rows: (case.max_tokens * case.top_k / 2).max(1), overflow: Overflow::Drop }
}

/// A rank with an instance on the device and one on the host. All memory of a rank is made before
/// its first call: see
/// [`Rank`](super::exchange::Rank).
struct Both<'t> {
    task: &'t Task,
    case: Case,
    host: Host,
    ep: ExpertParallel,
    stream: Arc<Stream>,
    x: DeviceRange,
    experts: DeviceRange,
    weights: DeviceRange,
    out: DeviceRange,
    /// Through which memory of the device is written and read.
    staging: PinnedMemory,
    group: Group,
}

impl<'t> Both<'t> {
    fn new(
        task: &'t Task,
        case: Case,
        (mode, graphs): (ReceiveMode, Graphs),
        world: &World,
    ) -> Result<Self, CliError> {
        let group = world.all()?;
        let context = Driver::open()?.context(task.device)?;
        let stream = Arc::new(stream(&context)?);
        let order = if graphs == Graphs::Off { SumOrder::Expert } else { SumOrder::Rank };
        let settings = || Ok::<_, CliError>(case.builder(&group, mode)?.dtype(Dtype::Bf16).sum_order(order));
        let host = Host(settings()?.build()?);
        // Rows of two calls, each with more than a rank's share of all choices.
        let choices = case.max_tokens * case.top_k;
        let pool = 6 * (case.bytes(Dtype::Bf16, choices) + u64::from(choices) * 64 + (1 << 16));
        let ep = settings()?.on(&stream);
        let ep = match graphs {
            Graphs::Off => ep.device_heap(pool),
            graphs => ep.graphs(graphs),
        };
        let ep = ep.build()?;
        let (tokens, choices) = (case.bytes(Dtype::Bf16, case.max_tokens), u64::from(choices) * 4);
        Ok(Both {
            task,
            case,
            host,
            ep,
            x: allocate(&context, tokens)?,
            experts: allocate(&context, choices)?,
            weights: allocate(&context, choices)?,
            out: allocate(&context, tokens)?,
            staging: PinnedMemory::new(&context, pool as usize)?,
            stream,
            group,
        })
    }

    /// Writes a tensor of the device.
    fn put(&self, to: &DeviceRange, bytes: &[u8]) -> Result<DeviceRange, CliError> {
        let to = to.part(0, bytes.len() as u64)?;
        self.staging.write(0, bytes)?;
        self.stream.copy(whole(&to)?, self.staging.range().span(0, to.len())?)?;
        finish(&self.stream, "a copy to the device", self.task.patience())?;
        Ok(to)
    }

    /// Reads memory of the device, once the stream has come so far.
    fn get(&self, from: &DeviceRange, bytes: usize) -> Result<Vec<u8>, CliError> {
        let len = bytes as u64;
        self.stream.copy(self.staging.range().span(0, len)?, from.span(0, len)?)?;
        finish(&self.stream, "a planned call", self.task.patience())?;
        let mut seen = vec![0; bytes];
        self.staging.read(0, &mut seen)?;
        Ok(seen)
    }

    /// Writes an input, and gives the tensors of its call.
    fn call(&self, input: &Input) -> Result<Call, CliError> {
        Ok(Call {
            x: self.put(&self.x, &input.rows)?,
            experts: self.put(&self.experts, bytemuck::cast_slice(&input.experts))?,
            weights: self.put(&self.weights, bytemuck::cast_slice(&input.weights))?,
            out: self.out.part(0, input.rows.len() as u64)?,
            dtype: Dtype::Bf16,
        })
    }

    /// One layer on both; bytes compared.
    fn round(&mut self, seed: u64) -> Result<u64, CliError> {
        let me = self.ep.rank();
        let input = self.case.input(Dtype::Bf16, seed, self.case.tokens(seed));
        let answer = self.host.answer::<bf16>(&input, Some(seed))?;

        let call = self.call(&input)?;
        let (rows, handle) = call.dispatch(&mut self.ep)?;
        self.compare(&answer, &rows, &handle)?;
        let y = handle.output()?;
        self.put(y.range()?, &answer.made)?;
        call.combine(&mut self.ep, y, &handle)?;
        handle.returned()?;
        same(format!("sums at rank {me}"), &self.get(&call.out, answer.out.len())?, &answer.out)?;
        equal(format!("the status at rank {me}"), handle.status_now().0.into(), Status::OK.0.into())?;
        Ok((answer.rows.len() + answer.out.len()) as u64)
    }

    fn compare(&self, answer: &Answer, rows: &ExpertRows, handle: &Handle) -> Result<(), CliError> {
        let me = self.ep.rank();
        let counts = [handle.tokens_per_expert(), handle.padded_tokens_per_expert()].concat();
        let host = bytemuck::cast_slice(&answer.counts);
        same(format!("counts told at rank {me}"), bytemuck::cast_slice(&counts), host)?;
        same(format!("counts at rank {me}"), &self.get(&rows.counts()?, host.len())?, host)?;
        let bytes = |dropped: &[bool]| dropped.iter().map(|&dropped| dropped.into()).collect::<Vec<u8>>();
        let (dropped, expected) = (bytes(handle.dropped()), bytes(&answer.dropped));
        same(format!("dropped choices at rank {me}"), &dropped, &expected)?;
        let weights = bytemuck::cast_slice(&answer.weights);
        same(format!("weights at rank {me}"), &self.get(&rows.weights()?, weights.len())?, weights)?;
        same(format!("rows at rank {me}"), &self.get(&rows.range()?, answer.rows.len())?, &answer.rows)
    }

    /// Nobody frees memory while others wait.
    fn end(self) -> Result<(), CliError> {
        self.group.gather(&[])?;
        Ok(())
    }
}

/// Calls of random tokens.
pub fn plain(task: &Task, case: Case, mode: ReceiveMode, world: &World) -> Result<String, CliError> {
    let mut both = Both::new(task, case, (mode, Graphs::Off), world)?;
    let me = u64::from(both.ep.rank());
    let rounds: u64 = task.few(6, 4);
    let mut compared = 0;
    for round in 1..=rounds {
        compared += both.round(round << 8 | me)?;
    }
    both.end()?;
    Ok(format!("{rounds} rounds, {} compared at this rank", volume(compared)))
}

/// A layer that was captured once, replayed with other tokens: its sizes stay on the device.
pub fn graph(task: &Task, case: Case, world: &World) -> Result<String, CliError> {
    let mut both = Both::new(task, case, (half(case), Graphs::Slots), world)?;
    let me = u64::from(both.ep.rank());
    let input = |round: u64| case.input(Dtype::Bf16, round << 8 | me, case.max_tokens);
    let call = both.call(&input(0))?;
    let (ep, stream) = (&mut both.ep, Arc::clone(&both.stream));
    let layer = Graph::capture(&stream, || -> sidelane::Result<()> {
        let (x, choices) = call.input();
        let (rows, handle) = ep.start_dispatch(x, choices)?.unfinished()?;
        let y = experts_copy(&stream, &rows, &handle)?;
        call.combine(ep, y, &handle)
    })?;
    let rounds = task.few(10, 5);
    for round in 1..=rounds {
        let input = input(round);
        let answer = both.host.answer::<bf16>(&input, None)?;
        both.call(&input)?;
        layer.launch(&both.stream)?;
        let seen = both.get(&both.out, answer.out.len())?;
        same(format!("launch {round} at rank {me}"), &seen, &answer.out)?;
    }
    both.end()?;
    Ok(format!("{rounds} launches, within a budget that drops"))
}
