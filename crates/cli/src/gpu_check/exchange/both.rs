//! The same calls on the GPU and on the host, compared.

use half::bf16;
use sidelane::device::Graph;
use sidelane::ep::{ExpertRows, Report};
use sidelane::gate::Routing;
use sidelane::plan::Order;
use sidelane::{Dtype, Element, ExpertParallel, World};

use super::super::kernels::any;
use super::super::memory::{Random, same};
use super::super::task::Task;
use super::rank::{Case, Input, Rank, experts_copy};
use crate::error::{CliError, failed};
use crate::table::volume;

/// What the host makes of an input.
struct Answer {
    /// Slot by slot: rows, experts, weights.
    rows: Vec<u8>,
    experts: Vec<i32>,
    weights: Vec<f32>,
    out: Vec<u8>,
}

/// The host's side of a rank.
struct Host(ExpertParallel);

impl Host {
    fn new(rank: &Rank) -> Result<Self, CliError> {
        Ok(Host(rank.case.builder(&rank.group)?.dtype(rank.dtype).order(Order::Rank).build()?))
    }

    /// A dispatch and a combine, with these partial rows, or with the rows themselves.
    fn answer<E: Element>(
        &mut self,
        case: Case,
        input: &Input,
        partials: Option<&[u8]>,
    ) -> Result<Answer, CliError> {
        let x: Vec<E> = bytemuck::pod_collect_to_vec(&input.rows);
        let routing = Routing::new(case.top_k, input.experts.as_slice(), input.weights.as_slice())
            .map_err(sidelane::Error::from)?;
        let (rows, handle) = self.0.dispatch(&x, &routing)?;
        let seen = bytemuck::cast_slice::<E, u8>(rows.rows()?).to_vec();
        let (experts, weights) = (handle.row_experts().to_vec(), handle.row_weights().to_vec());
        let mut y = handle.output()?;
        let target = y.rows_mut::<E>()?;
        bytemuck::cast_slice_mut::<E, u8>(target).copy_from_slice(partials.unwrap_or(&seen));
        let out: Vec<E> = self.0.combine(y, &handle)?;
        Ok(Answer { rows: seen, experts, weights, out: bytemuck::cast_slice(&out).to_vec() })
    }
}

/// Plain calls, any partial rows.
pub fn plain<E: Element>(task: &Task, case: Case, world: &World) -> Result<String, CliError> {
    let mut rank = Rank::new(case, E::DTYPE, world, task.device)?;
    let mut host = Host::new(&rank)?;
    let mut tensors = rank.tensors()?;
    let me = rank.ep.rank();
    let rounds: u64 = task.few(6, 4);
    let (mut compared, mut report) = (0, Report::default());
    for round in 1..=rounds {
        let seed = round << 8 | u64::from(me);
        let input = case.input(E::DTYPE, seed, case.tokens(seed));
        let mut random = Random(seed ^ 1 << 40);
        let elements = case.ranks * case.max_tokens * case.hidden;
        let partials: Vec<u8> = (0..elements).flat_map(|_| any(&mut random, E::DTYPE)).collect();
        let answer = host.answer::<E>(case, &input, Some(&partials))?;

        tensors.put(&input)?;
        let call = tensors.call()?;
        let (rows, handle) = call.dispatch(&mut rank.ep)?;
        let received = rank.received(&rows)?;
        compare(&rank, &rows, &received, &answer)?;
        let y = rank.leave(&handle, &partials)?;
        call.combine(&mut rank.ep, y, &handle)?;
        rank.ep.synchronize()?;
        same(format!("sums at rank {me}"), &tensors.sums()?[..answer.out.len()], &answer.out)?;
        compared += (received.len() + answer.out.len()) as u64;
        report = handle.report()?;
    }
    Ok(format!(
        "{rounds} rounds, {} compared at each rank; {} copies ({}) and {} operations a dispatch",
        volume(compared),
        report.enqueued.copies,
        if report.enqueued.batches > 0 { "one batch" } else { "single" },
        report.enqueued.memory_operations
    ))
}

/// What was received, slot by slot.
fn compare(rank: &Rank, rows: &ExpertRows, received: &[u8], answer: &Answer) -> Result<(), CliError> {
    let Some(shape) = rows.slots() else {
        return Err(failed!("rows of fixed slots have no slots"));
    };
    let (case, me) = (rank.case, rank.ep.rank());
    let (rows, choices) =
        (case.bytes(rank.dtype, case.max_tokens) as usize, (case.max_tokens * case.top_k) as usize);
    for (source, slot) in received.chunks_exact(shape.bytes() as usize).enumerate() {
        let at = |offset: u64, len: usize| &slot[offset as usize..][..len];
        let from = format!("from rank {source} at rank {me}");
        let experts = bytemuck::cast_slice(&answer.experts[source * choices..][..choices]);
        let weights = bytemuck::cast_slice(&answer.weights[source * choices..][..choices]);
        same(format!("rows {from}"), at(shape.rows_at(), rows), &answer.rows[source * rows..][..rows])?;
        same(format!("choices {from}"), at(shape.experts_at(), choices * 4), experts)?;
        same(format!("weights {from}"), at(shape.weights_at(), choices * 4), weights)?;
    }
    Ok(())
}

/// A layer that was captured once, replayed with other tokens.
pub fn graph(task: &Task, case: Case, world: &World) -> Result<String, CliError> {
    let mut rank = Rank::new(case, Dtype::Bf16, world, task.device)?;
    let mut host = Host::new(&rank)?;
    let me = u64::from(rank.ep.rank());
    // A graph has a constant number of tokens.
    let input = |round: u64| case.input(Dtype::Bf16, round << 8 | me, case.max_tokens);
    let mut tensors = rank.tensors()?;
    tensors.put(&input(0))?;
    let layer = {
        let (Rank { ep, stream, .. }, call) = (&mut rank, tensors.call()?);
        Graph::capture(stream, || call.layer(ep, stream))?
    };
    let rounds = task.few(10, 5);
    for round in 1..=rounds {
        let input = input(round);
        let answer = host.answer::<bf16>(case, &input, None)?;
        tensors.put(&input)?;
        layer.launch(&rank.stream)?;
        rank.ep.synchronize()?;
        same(format!("launch {round} at rank {me}"), &tensors.sums()?, &answer.out)?;
    }
    Ok(format!("{rounds} launches; a graph's copies on one GPU are single ones, which its SMs do"))
}

/// Two instances, of which one starts a dispatch before the other has enqueued its combine.
pub fn turns(task: &Task, case: Case, world: &World) -> Result<String, CliError> {
    let mut rank = Rank::new(case, Dtype::Bf16, world, task.device)?;
    let mut other = case.builder(&rank.group)?.on(&rank.stream).build()?;
    let mut host = Host::new(&rank)?;
    let (mut first, mut second) = (rank.tensors()?, rank.tensors()?);
    let me = u64::from(rank.ep.rank());
    let rounds = task.few(10, 5);
    for round in 0..rounds {
        let seeds = [round << 8 | me, 1 << 32 | round << 8 | me];
        let inputs = seeds.map(|seed| case.input(Dtype::Bf16, seed, case.tokens(seed)));
        first.put(&inputs[0])?;
        second.put(&inputs[1])?;
        let Rank { ep, stream, .. } = &mut rank;
        let calls = [first.call()?, second.call()?];
        let (rows, handle) = calls[0].dispatch(ep)?;
        let y = experts_copy(stream, &rows, &handle)?;
        let (x, choices) = calls[1].input();
        let started = other.start_dispatch(x, choices)?;
        calls[0].combine(ep, y, &handle)?;
        let (rows, handle) = started.finish()?;
        let y = experts_copy(stream, &rows, &handle)?;
        calls[1].combine(&mut other, y, &handle)?;
        ep.synchronize()?;
        other.check()?;
        for (input, tensors) in inputs.iter().zip([&first, &second]) {
            let answer = host.answer::<bf16>(case, input, None)?;
            let seen = tensors.sums()?;
            same(format!("round {round} at rank {me}"), &seen[..answer.out.len()], &answer.out)?;
        }
    }
    Ok(format!("{rounds} rounds of two, one begun before the other ends"))
}
