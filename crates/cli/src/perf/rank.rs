//! What every rank does: measure where it is one of the pair, and wait for the figures where it is not.

use std::process::ExitCode;

use sidelane::World;
use sidelane::topology::Route;

use super::args::Test;
use super::measure::{Found, Pair};
use super::report::{Conditions, End, PairReport, Report, RunReport};
use super::task::Task;
use super::{plot, turns};
use crate::error::CliError;
use crate::machines::Machines;
use crate::{command, machines, ranks};

/// Runs this rank's part.
pub fn main(task: &Task) -> Result<ExitCode, CliError> {
    let world = ranks::join(task.sizes(), task.conditions(), 0)?;
    let Some(report) = measure(task, &world)? else { return Ok(ExitCode::SUCCESS) };
    command::draw(&task.svg, || plot::draw(&report))?;
    command::finish(&report, &task.json)
}

/// The report, on rank 0.
fn measure(task: &Task, world: &World) -> Result<Option<Report>, CliError> {
    let group = world.all()?;
    let machines = Machines::of(&group)?;
    let bar = command::progress(world.rank(), (task.pairs.len() * task.runs.len()) as u64);
    let (mut pairs, mut absent) = (Vec::new(), None);
    for &ends in &task.pairs {
        let mut report = describe(world, ends);
        let copied = ["shm", "loop"].contains(&report.lane.as_str()) && task.test == Test::PutBw;
        let own = [ends.0, ends.1].contains(&world.rank());
        let mut pair = if own { Some(Pair::open(world, ends, task.most())?) } else { None };
        for &run in &task.runs {
            let found = pair.as_mut().map(|pair| pair.run(task.test, run, copied)).transpose()?;
            let found = found.map(|found| serde_json::to_vec(&found).expect("numbers are always JSON"));
            let all = group.gather(&found.unwrap_or_default())?;
            let told = |rank: u32| serde_json::from_slice(&all[rank as usize]).map_err(CliError::told);
            let (first, second): (Found, Found) = (told(ends.0)?, told(ends.1)?);
            let turns = match task.peers && absent.is_none() {
                true => turns::take(&group, pair.as_mut(), task.test, run)?,
                false => turns::Found::default(),
            };
            report.runs.push(RunReport { beside: turns.beside, ..RunReport::new(run, first, &second) });
            absent = turns.absent.or(absent);
            bar.inc(1);
        }
        pairs.push(report);
    }
    bar.finish_and_clear();
    let verified = pairs.iter().flat_map(|pair| &pair.runs).all(|run| run.verified);
    let config = Conditions {
        test: task.test,
        nodes: task.ranks_per_node.len(),
        ranks_per_node: task.ranks_per_node.clone(),
        machines: machines.count(),
        cores: machines::cores(),
        route: Route::Direct.name().to_owned(),
        matrix: task.matrix,
    };
    Ok((world.rank() == 0).then_some(Report { config, verified, pairs, absent }))
}

/// A pair without figures.
fn describe(world: &World, (from, to): (u32, u32)) -> PairReport {
    let nodes = world.nodes();
    let end = |rank| End { rank, node: nodes.node_of(rank) };
    let rail = if nodes.same_node(from, to) { None } else { machines::rail(world) };
    let (lane, lane_reason) = rail.map_or(("shm".into(), None), |(lane, reason)| (lane, Some(reason)));
    PairReport { from: end(from), to: end(to), lane, lane_reason, runs: Vec::new() }
}
