//! The soak: random worlds, layers, faults and rebuilds in a row, in processes that live on.
//!
//! ```text
//!   round   two to four of the processes, in random order: join ── phases ── fault ── rebuild ── leave
//!   after   of each process that has lived from the first round: resident memory, descriptors, threads
//! ```
//!
//! A process that a fault ends is replaced. The others must not grow.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::process::Pid;
use serde::Serialize;

use crate::cell::{self, Fault, Lane, Phase};
use crate::error::{About, Error, Result};
use crate::inject::{self, Machine};
use crate::job::Job;
use crate::protocol::LIVENESS;
use crate::trial::{Strike, Trial};

/// Version of the JSON.
const SCHEMA: u32 = 1;
/// Nodes of the processes.
const NODES: [u32; 4] = [0, 0, 1, 1];
/// The place of the process that faults may end. The others live as long as the soak.
const MORTAL: usize = 3;
/// Rounds before the first count: caches and arenas fill.
const WARM: u64 = 10;
/// Time between two lines of counts.
const EVERY: Duration = Duration::from_secs(60);
/// Bytes of resident memory that a process may gain: of allocators, not of the library.
const GAIN: u64 = 6 << 20;

const PHASES: [Phase; 6] =
    [Phase::Build, Phase::Dispatch, Phase::Relay, Phase::Combine, Phase::Gradients, Phase::Collectives];
const FAULTS: [Fault; 6] =
    [Fault::Sigkill, Fault::Sigstop, Fault::Emfile, Fault::NoThread, Fault::Memory, Fault::Eintr];

/// How long, and from which round on.
#[derive(Args)]
pub struct Soak {
    /// Minutes
    #[arg(default_value_t = 60.0)]
    minutes: f64,
    /// Begin with the round of this seed, which a round that failed names; each further round has
    /// the next one [default: another one in each run]
    #[arg(long, value_name = "SEED")]
    from: Option<u64>,
    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What a process holds between two rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Usage {
    resident_bytes: u64,
    descriptors: usize,
    threads: usize,
}

impl Usage {
    fn of(process: Pid) -> Result<Usage> {
        let path = format!("/proc/{}/status", process.as_raw_nonzero());
        let status = fs::read_to_string(&path).of_file(path)?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
        let [descriptors, threads] =
            [inject::entries(process, "fd")?.len(), inject::entries(process, "task")?.len()];
        Ok(Usage { resident_bytes: kib.unwrap_or_default() << 10, descriptors, threads })
    }

    fn grew(&self, first: &Usage) -> bool {
        self.descriptors != first.descriptors
            || self.threads != first.threads
            || self.resident_bytes > first.resident_bytes + GAIN
    }
}

/// Everything about a soak.
#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    /// That of the first round.
    seed: u64,
    minutes: f64,
    rounds: u64,
    struck: u64,
    named: u64,
    rebuilt: u64,
    replaced: u64,
    /// Of each process that has lived from the start: after the warm rounds, and at the end.
    processes: Vec<[Usage; 2]>,
    wrong: Option<String>,
}

impl Soak {
    /// Runs it. True if all was right and nothing has grown.
    ///
    /// # Errors
    /// [`Error`](crate::error::Error) where the machine does not let it run.
    pub fn run(&self) -> Result<bool> {
        let seed = self.from.unwrap_or_else(cell::fresh_seed);
        println!("seed {seed}: --from {seed} repeats all choices");
        let mut crew = Crew {
            job: Job::start(&NODES, None, LIVENESS)?,
            places: (0..NODES.len()).collect(),
            machine: Machine::probe(),
            report: Report {
                schema: SCHEMA,
                seed,
                minutes: self.minutes,
                rounds: 0,
                struck: 0,
                named: 0,
                rebuilt: 0,
                replaced: 0,
                processes: Vec::new(),
                wrong: None,
            },
        };
        let (began, mut said) = (Instant::now(), Instant::now());
        let (mut first, mut last) = (Vec::new(), Vec::new());
        while began.elapsed().as_secs_f64() < self.minutes * 60.0 || crew.report.rounds <= WARM {
            if let Err(wrong) = crew.round()? {
                crew.report.wrong = Some(wrong);
                break;
            }
            last = crew.usage()?;
            if crew.report.rounds == WARM {
                first.clone_from(&last);
            }
            if first.iter().zip(&last).any(|(first, last)| last.grew(first)) {
                break;
            }
            if said.elapsed() > EVERY || crew.report.rounds == WARM {
                said = Instant::now();
                println!(
                    "{:4.0} min, round {:5}: {}",
                    began.elapsed().as_secs_f64() / 60.0,
                    crew.report.rounds,
                    text(&last)
                );
            }
        }
        let mut report = crew.report;
        report.processes = first.iter().zip(&last).map(|(first, last)| [*first, *last]).collect();
        let grown = report.processes.iter().any(|[first, last]| last.grew(first));
        println!(
            "{} rounds, {} struck by a fault, {} named, {} rebuilt, {} processes replaced",
            report.rounds, report.struck, report.named, report.rebuilt, report.replaced
        );
        println!("after round {WARM}: {}\nat the end:     {}", text(&first), text(&last));
        match &report.wrong {
            Some(wrong) => println!("WRONG: {wrong}"),
            None if grown => println!("WRONG: a process has grown"),
            None => println!("right: no hang, no wrong bit, nothing has grown"),
        }
        if let Some(path) = &self.json {
            let json = serde_json::to_string_pretty(&report).expect("a report is JSON");
            fs::write(path, json + "\n").of_file(path.display().to_string())?;
        }
        Ok(report.wrong.is_none() && !grown)
    }
}

/// The choices of a round: all of them come from its seed.
#[derive(Debug)]
struct Round {
    seed: u64,
    /// Places of the processes that make a world, in order of rank.
    order: Vec<usize>,
    lane: Lane,
    plan: Vec<(Phase, u64)>,
    strike: Option<Strike>,
}

impl Round {
    fn draw(seed: u64, machine: &Machine) -> Round {
        let rng = &mut ChaCha8Rng::seed_from_u64(seed);
        let mut order: Vec<usize> = (0..NODES.len()).collect();
        order.shuffle(rng);
        order.truncate(rng.random_range(2..=NODES.len()));
        let several = order.iter().any(|&place| NODES[place] != NODES[order[0]]);
        let lanes = if several { &[Lane::Loopback, Lane::Tcp][..] } else { &[Lane::Shm] };
        let lane = lanes.choose(rng).copied().unwrap_or(Lane::Shm);
        let phases: Vec<Phase> =
            PHASES.into_iter().filter(|&phase| several || phase != Phase::Relay).collect();
        let plan = (0..rng.random_range(1..=3))
            .filter_map(|_| Some((*phases.choose(rng)?, rng.random_range(1..=30))))
            .collect();
        let mortal = order.iter().position(|&place| place == MORTAL);
        let faults = FAULTS.into_iter().filter(|&fault| machine.why_not(fault).is_none());
        let faults =
            faults.filter(|fault| mortal.is_some() || !matches!(fault, Fault::Sigkill | Fault::Memory));
        let fault = faults.collect::<Vec<_>>().choose(rng).copied().filter(|_| rng.random_range(0..4) > 0);
        let phase = phases.choose(rng).copied().unwrap_or(Phase::Dispatch);
        let strike = fault.map(|fault| {
            let ends = matches!(fault, Fault::Sigkill | Fault::Sigstop | Fault::Memory);
            let victim = match fault {
                Fault::Sigkill | Fault::Memory => mortal.unwrap_or_default(),
                _ => rng.random_range(0..order.len()),
            };
            let pause = Duration::from_micros(rng.random_range(0..20_000));
            let steps = (!ends || fault == Fault::Memory).then(|| phase.steps() * 4);
            Strike { fault, phase, victim, pause, steps }
        });
        Round { seed, order, lane, plan, strike }
    }
}

/// The processes, and what has happened to them.
struct Crew {
    job: Job,
    /// The process at each place.
    places: Vec<usize>,
    machine: Machine,
    report: Report,
}

impl Crew {
    fn usage(&self) -> Result<Vec<Usage>> {
        (0..MORTAL).map(|place| Usage::of(self.job.pid(self.places[place]))).collect()
    }

    /// One world: its phases, a fault, a rebuild.
    fn round(&mut self) -> Result<std::result::Result<(), String>> {
        let nth = self.report.rounds;
        let round = Round::draw(self.report.seed.wrapping_add(nth), &self.machine);
        let Round { seed, order, lane, strike, .. } = &round;
        let described = format!("round {nth}, {order:?} over {}, {strike:?}, seed {seed}", lane.name());
        // Ranks that do not come to a phase after earlier faults are what a soak looks for.
        let seen = match self.world(round) {
            Err(error @ Error::NotReady { .. }) => Err(error.to_string()),
            seen => seen?,
        };
        self.report.rounds += 1;
        Ok(seen.map_err(|wrong| format!("{described}: {wrong}")))
    }

    fn world(&mut self, round: Round) -> Result<std::result::Result<(), String>> {
        let Round { order, lane, plan, strike, .. } = round;
        let processes: Vec<usize> = order.iter().map(|&place| self.places[place]).collect();
        let mut trial = Trial::assign(&mut self.job, processes.clone(), lane, true)?;
        for (phase, steps) in plan {
            if let Err(wrong) = trial.steps(phase, steps) {
                return Ok(Err(wrong));
            }
        }
        let mut ended = None;
        if let Some(strike) = strike {
            let judged = match trial.strike(&strike, &self.machine)? {
                Ok(judged) => judged,
                Err(wrong) => return Ok(Err(wrong)),
            };
            self.report.struck += 1;
            self.report.named += u64::from(judged.named.is_some());
            self.report.rebuilt += u64::from(judged.note.contains("rebuilt"));
            ended = judged.ended.then_some(strike.victim);
        }
        if let Err(wrong) = trial.leave(ended) {
            return Ok(Err(wrong));
        }
        if let Some(rank) = ended {
            self.places[MORTAL] = self.job.replace(processes[rank])?;
            self.report.replaced += 1;
        }
        Ok(Ok(()))
    }
}

fn text(usages: &[Usage]) -> String {
    let one = |usage: &Usage| {
        let mib = usage.resident_bytes as f64 / f64::from(1 << 20);
        format!("{mib:.1} MiB {} fds {} threads", usage.descriptors, usage.threads)
    };
    usages.iter().map(one).collect::<Vec<_>>().join(" | ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_is_repeated_from_its_seed_and_no_other() {
        let machine = Machine::probe();
        let drawn = |seed| format!("{:?}", Round::draw(seed, &machine));
        for seed in [0, 712, u64::MAX] {
            assert_eq!(drawn(seed), drawn(seed));
            let choices = |seed: u64| drawn(seed).replace(&format!("seed: {seed},"), "");
            assert_ne!(choices(seed), choices(seed.wrapping_add(1)));
        }
    }
}
