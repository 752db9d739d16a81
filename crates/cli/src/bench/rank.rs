//! What every rank of a measurement does: check, time, check again; rank 0 reports.

use std::process::ExitCode;

use half::{bf16, f16};
use sidelane::Window;
use sidelane::dtype::Dtype;
use sidelane::ep::{Handle, Yardstick};
use sidelane::rows::Stores;

use super::cards::Cards;
use super::clock::Laps;
use super::crossing::Crossing;
use super::layer::Layer;
use super::passes::{Kind, Pair, Track, memcpy_gbps};
use super::peers::{Field, Folder};
use super::recording::{self, EVENTS, write_trace};
use super::report::{Conditions, First, Lanes, Pass, Report, Volume};
use super::task::Task;
use super::tensor::Number;
use crate::error::{CliError, wrong};
use crate::{command, machines};

/// Runs this rank's part.
pub fn main(task: &Task) -> Result<ExitCode, CliError> {
    let report = match task.config.dtype.element() {
        Dtype::F32 => run::<f32>(task),
        Dtype::F16 => run::<f16>(task),
        Dtype::Bf16 | Dtype::Bytes => run::<bf16>(task),
    }?;
    report.map_or(Ok(ExitCode::SUCCESS), |report| command::finish(&report, &task.json))
}

/// The report, on rank 0.
fn run<E: Number>(task: &Task) -> Result<Option<Report>, CliError> {
    let record = if task.trace_out.is_some() { EVENTS } else { 0 };
    let mut layer: Layer<'_, E> = Layer::join(&task.config, task.sizes, task.conditions()?, record)?;
    let (rows, handle) = layer.dispatch_and_check()?;
    let y = layer.experts(&rows)?;
    let received = if task.peers.is_some() { rows.rows::<u8>()?.to_vec() } else { Vec::new() };
    drop(rows);
    layer.combine_and_check(&y, &handle)?;
    let mut field = match &task.peers {
        Some(folder) => layer.challenge(&Folder::at(folder), &received, &y)?,
        None => Field::default(),
    };
    drop(received);
    if task.config.backward {
        layer.backward_and_check(&y, &handle)?;
    }
    // Once all are here, all have read what was offered, and the pool is empty. Then the output lies below the rows:
    // whenever these are dropped, the next dispatch lands in the same place.
    layer.group.gather(&[])?;
    let mut barrier = layer.group.window(0)?;
    let memcpy = memcpy_gbps(&layer, &mut barrier)?;
    let mut output = Layer::output(&y, &handle)?;
    let mut passes = Vec::new();
    for kinds in Kind::phases(task.config.backward) {
        let forward = kinds.contains(&Kind::Dispatch);
        let rows =
            if forward { layer.dispatch_and_check()?.0 } else { layer.gradients_and_check(&handle)? };
        let mut yardstick = layer.ep.yardstick(&layer.group, rows, output, &handle)?;
        passes.extend(time(&mut layer, &mut barrier, kinds, &mut yardstick, &mut field, &handle)?);
        let (Some(rows), Some(kept)) = (yardstick.lend_rows(), yardstick.lend_output()) else {
            return Err(moved(layer.world.rank()));
        };
        // The floor has written the same rows again and again: they must still be right.
        if forward {
            layer.check_rows(&rows, &handle)?;
        } else {
            layer.check_gradients(&rows)?;
        }
        output = kept;
    }
    drop(output);
    layer.combine_and_check(&y, &handle)?;
    if let Some(path) = &task.trace_out {
        let timelines = recording::record(&mut layer, &y)?;
        if layer.world.rank() == 0 {
            write_trace(path, layer.world.nodes(), &timelines)?;
        }
    }
    barrier.quiet()?;
    report(&layer, &handle, &passes, &field, memcpy)
}

/// Times the calls of one phase.
fn time<E: Number>(
    layer: &mut Layer<'_, E>,
    barrier: &mut Window,
    kinds: &[Kind],
    yardstick: &mut Yardstick,
    field: &mut Field,
    handle: &Handle,
) -> Result<Vec<Pair>, CliError> {
    let config = layer.config;
    let mut track = Track {
        ep: &mut layer.ep,
        barrier,
        machines: &layer.machines,
        config,
        routing: &layer.routing,
        tokens: &layer.tokens,
        out: &mut layer.out,
        yardstick,
        field,
        stores: [Stores::Streaming, Stores::Cached],
        handle,
        moved: false,
    };
    track.choose_stores(&layer.group, kinds)?;
    let mut pairs = vec![Pair::default(); kinds.len()];
    let bar = command::progress(layer.world.rank(), config.rounds.into());
    for round in 0..config.rounds {
        track.round(kinds, &mut pairs, round % 2 == 1)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    track.barrier.barrier()?;
    if track.moved { Err(moved(layer.world.rank())) } else { Ok(pairs) }
}

/// Whether this rank has moved in a dispatch what it had planned; if not, says so.
fn moved_as_planned(rank: u32, report: &sidelane::ep::Report) -> bool {
    let (moved, traffic) = (report.moved, report.traffic);
    let near = traffic.put.own + traffic.put.local + traffic.handed_on + traffic.regrouped;
    let planned = [near, traffic.put.rail].map(|rows| rows * traffic.row_bytes);
    let seen = [moved.local_bytes, moved.rail_bytes];
    if seen != planned {
        eprintln!("sidelane: rank {rank} moved {seen:?} bytes on its node and over rails, not {planned:?}");
    }
    let (copies, planned_copies) = (report.relayed.copies, traffic.copies);
    if copies != planned_copies {
        eprintln!("sidelane: rank {rank} handed rows on in {copies} copies, not {planned_copies}");
    }
    seen == planned && copies == planned_copies
}

/// Real and floor were not measured in the same memory.
fn moved(rank: u32) -> CliError {
    wrong!(
        "rank {rank}: a timed call did not land where its floor writes: its share of the floor would mean nothing"
    )
}

fn report<E: Number>(
    layer: &Layer<'_, E>,
    handle: &Handle,
    pairs: &[Pair],
    field: &Field,
    memcpy_gbps: f64,
) -> Result<Option<Report>, CliError> {
    let config = layer.config;
    let (dispatched, combined) = (handle.report()?, handle.returned()?);
    let found = [
        u64::from(!moved_as_planned(layer.world.rank(), &dispatched)),
        layer.expected.len() as u64,
        dispatched.moved.rail_bytes,
        combined.moved.rail_bytes,
        handle.dropped().iter().filter(|&&dropped| dropped).count() as u64,
    ];
    let [strays, landed, rail, returned, dropped_choices] = layer.sum(found)?;
    let words = Crossing::words(&dispatched.traffic, layer.expected.crossing_choices());
    let crossing = Crossing::new(config, layer.sum(words)?);
    let came_home = crossing.combine_bytes(config);
    let verdict = layer.verdict()?;
    let (mut passes, mut rounds) = (Vec::new(), Vec::new());
    for (kind, pair) in Kind::phases(config.backward).iter().flatten().zip(pairs) {
        let row_bytes = if *kind == Kind::Dispatch { config.sent_bytes() } else { config.row_bytes() };
        let volume = Volume {
            landed: landed * row_bytes,
            rail: match kind {
                Kind::Dispatch => rail,
                Kind::CombineBackward => crossing.rows * row_bytes,
                Kind::Combine | Kind::DispatchBackward => returned,
            },
            rail_logical: crossing.expert_rows * row_bytes,
        };
        let real = Laps::rounds_us(&layer.group.gather(pair.real.to_bytes())?, &layer.machines);
        let floor = Laps::rounds_us(&layer.group.gather(pair.floor.to_bytes())?, &layer.machines);
        passes.push(Pass::of_rounds(&real, &floor, volume));
        rounds.push(real);
    }
    let first = |laps: &Laps| -> Result<f64, CliError> {
        Ok(Laps::rounds_us(&layer.group.gather(laps.to_bytes())?, &layer.machines)[0])
    };
    let first = First { dispatch_us: first(&layer.dispatches)?, combine_us: first(&layer.combines)? };
    let cards = Cards::of(layer)?;
    if layer.world.rank() != 0 {
        return Ok(None);
    }
    if returned != came_home {
        eprintln!("sidelane: a combine moved {returned} bytes over rails, not {came_home}");
    }
    let local = layer.ep.lanes().iter().any(|used| used.lane == "shm").then(|| "shm".to_owned());
    let (rail, rail_reason) = machines::rail(&layer.world).unzip();
    let exact = cards.as_ref().is_none_or(|cards| cards.exact);
    let machines = layer.machines.count();
    let cores = machines::cores();
    let huge_pages_granted = layer.world.pages().huge.is_some_and(|bytes| bytes > 0);
    Ok(Some(Report {
        config: Conditions { config: config.clone(), machines, cores, huge_pages_granted },
        verified: verdict.verified && strays == 0 && returned == came_home && exact,
        rows_verified: verdict.right,
        required_rows: handle.required_rows().iter().copied().max().unwrap_or(0),
        dropped_choices,
        memcpy_gbps,
        first,
        lanes: Lanes { local, rail, rail_reason },
        cards,
        crossing,
        dispatch: passes[0],
        combine: passes[1],
        dispatch_backward: passes.get(2).copied(),
        combine_backward: passes.get(3).copied(),
        peers: field.report([&rounds[0], &rounds[1]]),
    }))
}
