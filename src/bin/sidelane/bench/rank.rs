//! What every rank of a measurement does: check, time, check again; rank 0 reports.

use std::process::ExitCode;

use half::{bf16, f16};
use sidelane::dtype::Dtype;
use sidelane::ep::{ExpertRows, Handle, Yardstick};
use sidelane::rows::Stores;

use super::layer::Layer;
use super::passes::{Kind, Pair, Track, memcpy_gbps};
use super::recording::{EVENTS, record, write_trace};
use super::report::{Conditions, Lanes, Pass, Report, Volume};
use super::task::Task;
use super::tensor::Number;
use super::{clock::Laps, progress, table};
use crate::error::CliError;
use crate::output;

/// Runs this rank's part.
pub fn main(task: &Task) -> Result<ExitCode, CliError> {
    let report = match task.config.dtype {
        Dtype::F32 => run::<f32>(task),
        Dtype::F16 => run::<f16>(task),
        Dtype::Bf16 | Dtype::Bytes => run::<bf16>(task),
    }?;
    let Some(report) = report else { return Ok(ExitCode::SUCCESS) };
    output::print(&table::text(&report))?;
    if let Some(path) = &task.json {
        let failed = |source| CliError::Write { path: path.clone(), source };
        std::fs::write(path, report.json() + "\n").map_err(failed)?;
    }
    Ok(if report.verified { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The report, on rank 0.
fn run<E: Number>(task: &Task) -> Result<Option<Report>, CliError> {
    let mut layer: Layer<'_, E> =
        Layer::join(&task.config, task.sizes, if task.trace_out.is_some() { EVENTS } else { 0 })?;
    let (rows, handle) = layer.dispatch_and_check()?;
    let y = layer.experts(&rows)?;
    drop(rows);
    layer.combine_and_check(&y, &handle)?;
    if task.config.backward {
        layer.backward_and_check(&y, &handle)?;
    }
    // Once all are here, all have read what was offered, and the pool is empty. Then the output lies below the rows:
    // whenever these are dropped, the next dispatch lands in the same place.
    layer.group.gather(&[])?;
    let output = Layer::output(&y, &handle)?;
    let (rows, _) = layer.dispatch_and_check()?;
    let yardstick = layer.ep.yardstick(&layer.group, rows, output, &handle)?;
    let (passes, memcpy, rows) = time(&mut layer, yardstick, &handle)?;
    // The floor has written the same rows again and again: they must still be right.
    layer.check_rows(&rows.ok_or(CliError::Moved { rank: layer.world.rank() })?, &handle)?;
    layer.combine_and_check(&y, &handle)?;
    if let Some(path) = &task.trace_out {
        let timelines = record(&mut layer, &y)?;
        if layer.world.rank() == 0 {
            write_trace(path, layer.world.nodes(), &timelines)?;
        }
    }
    report(&layer, &passes, memcpy)
}

fn time<E: Number>(
    layer: &mut Layer<'_, E>,
    mut yardstick: Yardstick,
    handle: &Handle,
) -> Result<(Vec<Pair>, f64, Option<ExpertRows>), CliError> {
    let config = layer.config;
    let mut barrier = layer.group.window(0)?;
    let memcpy = memcpy_gbps(&layer.world, &layer.group, &mut barrier)?;
    let mut track = Track {
        ep: &mut layer.ep,
        barrier: &mut barrier,
        config,
        routing: &layer.routing,
        x: &layer.x,
        out: &mut layer.out,
        yardstick: &mut yardstick,
        stores: [Stores::Streaming, Stores::Cached],
        handle,
        moved: false,
    };
    track.choose_stores(&layer.group)?;
    let kinds = Kind::all(config.backward);
    let mut pairs = vec![Pair::default(); kinds.len()];
    let bar =
        if layer.world.rank() == 0 { progress::bar(config.rounds) } else { indicatif::ProgressBar::hidden() };
    for round in 0..config.rounds {
        track.round(kinds, &mut pairs, round % 2 == 1)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    track.barrier.barrier()?;
    let rows = if track.moved { None } else { track.yardstick.lend_rows() };
    Ok((pairs, memcpy, rows))
}

fn report<E: Number>(
    layer: &Layer<'_, E>,
    pairs: &[Pair],
    memcpy_gbps: f64,
) -> Result<Option<Report>, CliError> {
    let config = layer.config;
    let node_of: Vec<u32> = (0..config.ranks()).map(|rank| layer.world.nodes().node_of(rank)).collect();
    let expected = &layer.expected;
    let [landed, rail] = layer.sum([expected.len() as u64, expected.rows_over_rails(&node_of) as u64])?;
    let volume = Volume { landed: landed * config.row_bytes(), rail: rail * config.row_bytes() };
    let verdict = layer.verdict()?;
    let mut passes = Vec::new();
    for pair in pairs {
        let real = Laps::rounds_us(&layer.group.gather(pair.real.to_bytes())?);
        let floor = Laps::rounds_us(&layer.group.gather(pair.floor.to_bytes())?);
        passes.push(Pass::of_rounds(&real, &floor, volume));
    }
    if layer.world.rank() != 0 {
        return Ok(None);
    }
    let lane = |name: &str| layer.ep.lanes().iter().any(|used| used.lane == name).then(|| name.to_owned());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let huge_pages_granted = layer.world.pages().huge.is_some_and(|bytes| bytes > 0);
    Ok(Some(Report {
        config: Conditions { config: config.clone(), cores, huge_pages_granted },
        verified: verdict.verified,
        rows_verified: verdict.right,
        memcpy_gbps,
        lanes: Lanes { local: lane("shm"), rail: lane("loop") },
        dispatch: passes[0],
        combine: passes[1],
        dispatch_backward: passes.get(2).copied(),
        combine_backward: passes.get(3).copied(),
    }))
}
