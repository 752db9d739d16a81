//! What every rank does: check, compare, time; rank 0 reports.

use std::process::ExitCode;

use sidelane::Window;

use super::operation::Test;
use super::report::{Beside, Conditions, Report, RunReport};
use super::rivals::Rivals;
use super::task::{Run, Task};
use crate::bench::Laps;
use crate::bench::peers::PeerPass;
use crate::error::CliError;
use crate::machines::{self, Machines};
use crate::{command, ranks};

/// Runs this rank's part.
pub fn main(task: &Task) -> Result<ExitCode, CliError> {
    let world = ranks::join(task.sizes(), task.conditions(), 0)?;
    let group = world.all()?;
    let machines = Machines::of(&group)?;
    let mut rivals = Rivals::open(&group, task)?;
    let mut barrier = group.window(0)?;
    let bar = command::progress(world.rank(), task.runs.len() as u64);
    let (mut verified, mut runs) = (true, Vec::new());
    for (nth, &run) in task.runs.iter().enumerate() {
        let mut test = Test::new(run.operation, (run.bytes / 4) as usize, &group)?;
        test.check()?;
        let right = group.gather(&[u8::from(test.is_right())])?;
        verified &= right.iter().all(|right| right == &[1]);
        let same = (0..rivals.count).map(|rival| rivals.same(&group, task, rival, nth, test.output()));
        let same = same.collect::<Result<Vec<bool>, CliError>>()?;
        let mut laps_us = vec![Vec::new(); rivals.count];
        let laps = time(&mut test, &mut barrier, (nth, run), &mut rivals, &mut laps_us)?;
        test.check()?;
        let right = group.gather(&[u8::from(test.is_right())])?;
        verified &= right.iter().all(|right| right == &[1]);
        let ours = Laps::rounds_us(&group.gather(laps.to_bytes())?, &machines);
        let beside = rivals.names().zip(same).zip(&laps_us).map(|(((name, version), same), theirs)| {
            let times = PeerPass::new(theirs, &ours);
            Beside { name, version, same, times }
        });
        runs.push(RunReport::new(run, &ours, beside.collect()));
        bar.inc(1);
    }
    bar.finish_and_clear();
    if world.rank() != 0 {
        return Ok(ExitCode::SUCCESS);
    }
    let config = Conditions {
        ranks_per_node: task.ranks_per_node.clone(),
        machines: machines.count(),
        cores: machines::cores(),
    };
    let report = Report { config, verified, runs, absent: std::mem::take(&mut rivals.absent) };
    command::finish(&report, &task.json)
}

/// Times rounds of ours and of others, in turn.
fn time(
    test: &mut Test,
    barrier: &mut Window,
    (nth, run): (usize, Run),
    rivals: &mut Rivals,
    laps_us: &mut [Vec<f64>],
) -> Result<Laps, CliError> {
    let mut laps = Laps::default();
    for _ in 0..run.rounds {
        test.reset();
        test.call()?;
        test.reset();
        barrier.barrier()?;
        laps.time(|| test.call())?;
        // Who is done must not take a core from who is not: others sleep then too.
        barrier.barrier()?;
        rivals.lap(nth, laps_us)?;
    }
    Ok(laps)
}
