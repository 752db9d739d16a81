//! Work of every rank: measure as one of the pair, or else wait for the figures.
//!
//! With `--baselines` it takes turns with the same put over UCX: `ucx_perftest -t ucp_put_lat`, two
//! processes of this machine, for one run at a time. It times half a round trip of a put whose last
//! byte the other side polls; ours has a signal of its own behind the put, which may fall asleep.
//! Runs of both take turns, so that a busy moment of the machine meets both.

use std::io::{self, Read};
use std::mem::take;
use std::net::TcpListener;
use std::process::{Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, poll};
use sidelane::topology::Route;
use sidelane::{Group, World};
use sidelane_testkit::machines::{self, Machines};

use super::measure::RankPair;
use super::report::{self, BaselineReport, End, PairReport, Report, RunReport, RunSettings};
use super::{PutBenchArgs, Run, Task, Test};
use crate::baselines::{Unavailable, start};
use crate::command_frame::{self, Command as _};
use crate::error::{CliError, failed};
use crate::ranks::{self, Assignment};

pub fn main(Assignment { task, files }: &Assignment<Task>) -> Result<ExitCode, CliError> {
    let world = ranks::join(PutBenchArgs::NAME, task, task.sizes(), 0)?;
    let Some(report) = measure(task, &world)? else { return Ok(ExitCode::SUCCESS) };
    command_frame::draw(&files.svg, || report::draw(&report))?;
    command_frame::finish(&report, &files.json)
}

fn measure(task: &Task, world: &World) -> Result<Option<Report>, CliError> {
    let group = world.all()?;
    let machines = Machines::of(&group)?;
    let bar = command_frame::progress(world.rank(), (task.pairs.len() * task.runs.len()) as u64);
    let (mut pairs, mut absent) = (Vec::new(), None);
    for &ends in &task.pairs {
        let mut report = describe(world, ends);
        let copied = ["shm", "loopback"].contains(&report.lane.as_str()) && task.test == Test::PutBw;
        let own = [ends.0, ends.1].contains(&world.rank());
        let mut pair = if own { Some(RankPair::open(world, ends, task.most())?) } else { None };
        for &run in &task.runs {
            let found = pair.as_mut().map(|pair| pair.run(task.test, run, copied)).transpose()?;
            let mut all = ranks::tell_all(&group, &found.unwrap_or_default())?;
            let (first, second) = (take(&mut all[ends.0 as usize]), take(&mut all[ends.1 as usize]));
            let turns = match task.baselines && absent.is_none() {
                true => take_turns(&group, pair.as_mut(), task.test, run)?,
                false => SizeResults::default(),
            };
            report.runs.push(RunReport { baseline: turns.baseline, ..RunReport::new(run, first, &second) });
            absent = turns.absent.or(absent);
            bar.inc(1);
        }
        pairs.push(report);
    }
    bar.finish_and_clear();
    let verified = pairs.iter().flat_map(|pair| &pair.runs).all(|run| run.verified);
    let config = RunSettings {
        test: task.test,
        nodes: task.ranks_per_node.len(),
        ranks_per_node: task.ranks_per_node.clone(),
        hosts: machines.hosts(),
        route: Route::Direct.name().to_owned(),
        matrix: task.matrix,
    };
    Ok((world.rank() == 0).then_some(Report { config, verified, pairs, unavailable: absent }))
}

fn describe(world: &World, (from, to): (u32, u32)) -> PairReport {
    let nodes = world.nodes();
    let end = |rank| End { rank, node: nodes.node_of(rank) };
    let net = if nodes.same_node(from, to) { None } else { machines::net(world) };
    let (lane, lane_reason) = net.map_or(("shm".into(), None), |(lane, reason)| (lane, Some(reason)));
    PairReport { from: end(from), to: end(to), lane, lane_reason, runs: Vec::new() }
}

/// An odd number: its median is one of them.
const TURNS: usize = 9;

/// Results after turns of one size.
#[derive(Default)]
struct SizeResults {
    /// On rank 0.
    pub baseline: Option<BaselineReport>,
    /// Why there were none, on all ranks: later sizes skip it.
    pub absent: Option<Unavailable>,
}

/// Runs of ours and of `ucx_perftest` in turn. Collective: the waiting side sleeps on a socket.
fn take_turns(
    all: &Group,
    mut pair: Option<&mut RankPair<'_>>,
    test: Test,
    run: Run,
) -> Result<SizeResults, CliError> {
    let (mut ours_us, mut theirs_us) = (Vec::new(), Vec::new());
    for _ in 0..TURNS {
        let mut absent = None;
        if all.rank() == 0 {
            match put_lat(run) {
                Ok(us) => theirs_us.push(us),
                Err(why) => absent = Some(Unavailable::new(NAME, &why, INSTALL)),
            }
        }
        let absent = ranks::tell_all(all, &absent)?.swap_remove(0);
        if absent.is_some() {
            return Ok(SizeResults { baseline: None, absent });
        }
        if let Some(pair) = &mut pair {
            ours_us.extend(pair.run(test, run, false)?.latency.map(|latency| latency.p50_us));
        }
    }
    let baseline = (all.rank() == 0).then(|| BaselineReport::new(NAME, ours_us, theirs_us));
    Ok(SizeResults { baseline, absent: None })
}

const NAME: &str = "ucx";
const INSTALL: &str = "apt install ucx-utils";

const PROGRAM: &str = "ucx_perftest";
const PATIENCE: Duration = Duration::from_secs(60);
/// The longest time until the other process listens.
const READY: Duration = Duration::from_secs(5);
/// Between two attempts to reach it.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// Between two looks whether a run has ended.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

/// Median of half a round trip, in microseconds.
fn put_lat(run: Run) -> Result<f64, CliError> {
    let failed = |source| failed!("cannot run {PROGRAM}: {source}");
    let port = free_port().map_err(failed)?.to_string();
    let mut silent = Command::new(PROGRAM);
    silent.args(["-p", &port]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut server = start(&mut silent)?;
    let begun = Instant::now();
    loop {
        let mut client = Command::new(PROGRAM);
        client.args(["-t", "ucp_put_lat", "-v", "-f", "-p", &port, "-s", &run.bytes.to_string()]);
        client.args(["-n", &run.iterations.to_string(), "-w", &run.warmup.to_string(), "localhost"]);
        let output = run_out(&mut client)?;
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        match (output.status.success(), median(&printed)) {
            (true, Some(us)) => return Ok(us),
            (true, None) => return Err(failed!("{PROGRAM} printed {printed:?}, where figures should be")),
            (false, _) => {
                let _ = poll(&mut [], Some(&PAUSE));
                // A connected server ends with its client; one that still runs may not have
                // listened yet.
                if matches!(server.0.try_wait(), Ok(None)) && begun.elapsed() < READY {
                    continue;
                }
                let text = String::from_utf8_lossy(&output.stderr);
                let last = text.lines().next_back().unwrap_or("nothing was said").to_owned();
                return Err(failed!("{PROGRAM} ended with {}: {last}", output.status));
            }
        }
    }
}

/// Runs a client to its end: its output fits into a pipe. A client that runs for too long is
/// killed.
fn run_out(client: &mut Command) -> Result<Output, CliError> {
    let failed = |source| failed!("cannot run {PROGRAM}: {source}");
    client.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let (mut running, begun) = (start(client)?, Instant::now());
    let status = loop {
        if let Some(status) = running.0.try_wait().map_err(failed)? {
            break status;
        }
        if begun.elapsed() >= PATIENCE {
            return Err(failed!("{PROGRAM} has not ended after {} s", PATIENCE.as_secs()));
        }
        let _ = poll(&mut [], Some(&LOOK));
    };
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let pipes = (running.0.stdout.take(), running.0.stderr.take());
    pipes.0.map_or(Ok(0), |mut pipe| pipe.read_to_end(&mut stdout)).map_err(failed)?;
    pipes.1.map_or(Ok(0), |mut pipe| pipe.read_to_end(&mut stderr)).map_err(failed)?;
    Ok(Output { status, stdout, stderr })
}

/// The second of the figures below their names, as `-v` has them.
fn median(printed: &str) -> Option<f64> {
    let mut lines = printed.lines().skip_while(|line| !line.starts_with("iterations,"));
    let (names, figures) = (lines.next()?, lines.next()?);
    let at = names.split(',').position(|name| name.contains("percentile_lat"))?;
    figures.split(',').nth(at)?.parse().ok()
}

/// A port without a listener a moment ago.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_found_by_its_name() {
        let printed = "iterations,50.0_percentile_lat,avg_lat,overall_lat\n100000,0.236,3.034,3.034\n";
        assert_eq!(median(printed), Some(0.236));
        assert_eq!(median(&format!("some warning\n{printed}")), Some(0.236));
        for other in ["", "iterations,avg\n1,2\n", "iterations,50.0_percentile_lat\n"] {
            assert_eq!(median(other), None, "{other:?}");
        }
    }
}
