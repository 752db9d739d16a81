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
use crate::trial::{Judgment, Strike, Trial};

/// Version of the JSON.
const SCHEMA: u32 = 2;
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
    /// the next one. A seed makes the same round on machines that can make the same faults
    /// [default: another one in each run]
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
#[derive(Debug, Default, Serialize)]
struct Report {
    schema: u32,
    /// That of the first round.
    seed: u64,
    minutes: f64,
    /// Rounds that began.
    rounds: u64,
    struck: u64,
    named: u64,
    rebuilt: u64,
    replaced: u64,
    /// Of each process that has lived from the start: after the warm rounds, and at the end.
    processes: Vec<[Usage; 2]>,
    wrong: Option<String>,
    /// Why the machine did not let it go on.
    error: Option<String>,
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
            report: Report { schema: SCHEMA, seed, minutes: self.minutes, ..Report::default() },
        };
        let ended = crew.rounds();
        self.conclude(crew.report, ended)
    }

    /// Prints and writes what was seen, whatever has ended it.
    fn conclude(&self, mut report: Report, ended: Result<()>) -> Result<bool> {
        report.error = ended.as_ref().err().map(Error::to_string);
        println!(
            "{} rounds, {} struck by a fault, {} named, {} rebuilt, {} processes replaced",
            report.rounds, report.struck, report.named, report.rebuilt, report.replaced
        );
        let [first, last] = [0, 1].map(|end| text(report.processes.iter().map(|usages| usages[end])));
        println!("after round {WARM}: {first}\nat the end:     {last}");
        match (&report.wrong, &report.error) {
            (Some(wrong), _) => println!("WRONG: {wrong}"),
            (None, Some(_)) => println!("ended early"),
            (None, None) => println!("right: no hang, no wrong bit, nothing has grown"),
        }
        let json = self.json.as_ref().map(|path| {
            let json = serde_json::to_string_pretty(&report).expect("a report is JSON");
            fs::write(path, json + "\n").of_file(path.display().to_string())
        });
        ended.and(json.unwrap_or(Ok(())))?;
        Ok(report.wrong.is_none())
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

    /// Words that bring it back.
    fn described(&self, nth: u64) -> String {
        let Round { seed, order, lane, strike, .. } = self;
        format!("round {nth}, {order:?} over {}, {strike:?}, seed {seed}", lane.name())
    }
}

/// Gives what ended a round the words for it.
fn of_round<T>(described: String, seen: Result<Judgment<T>>) -> Result<Judgment<T>> {
    match seen {
        Ok(judged) => Ok(judged.map_err(|wrong| format!("{described}: {wrong}"))),
        // Ranks that do not come to a phase after earlier faults are what a soak looks for.
        Err(error @ Error::NotReady { .. }) => Ok(Err(format!("{described}: {error}"))),
        Err(error) => Err(Error::Round { round: described, source: Box::new(error) }),
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
    /// Rounds until the time is over, or one is wrong.
    fn rounds(&mut self) -> Result<()> {
        let (began, mut said) = (Instant::now(), Instant::now());
        while began.elapsed().as_secs_f64() < self.report.minutes * 60.0 || self.report.rounds <= WARM {
            match self.round()? {
                Ok(usages) if said.elapsed() > EVERY || self.report.rounds == WARM => {
                    said = Instant::now();
                    let minutes = began.elapsed().as_secs_f64() / 60.0;
                    println!("{minutes:4.0} min, round {:5}: {}", self.report.rounds, text(usages));
                }
                Ok(_) => {}
                Err(wrong) => {
                    self.report.wrong = Some(wrong);
                    break;
                }
            }
        }
        Ok(())
    }

    /// One round: a world, and what the processes hold behind it.
    fn round(&mut self) -> Result<Judgment<Vec<Usage>>> {
        let nth = self.report.rounds;
        self.report.rounds += 1;
        let round = Round::draw(self.report.seed.wrapping_add(nth), &self.machine);
        let described = round.described(nth);
        let seen = match self.world(round) {
            Ok(Ok(())) => self.count(),
            Ok(Err(wrong)) => Ok(Err(wrong)),
            Err(error) => Err(error),
        };
        of_round(described, seen)
    }

    /// What the processes hold, which may not be more than after the warm rounds.
    fn count(&mut self) -> Result<Judgment<Vec<Usage>>> {
        let of = |place: usize| Usage::of(self.job.pid(self.places[place]));
        let usages = (0..MORTAL).map(of).collect::<Result<Vec<_>>>()?;
        if self.report.rounds == WARM {
            self.report.processes = usages.iter().map(|&usage| [usage; 2]).collect();
        }
        self.report.processes.iter_mut().zip(&usages).for_each(|(process, &usage)| process[1] = usage);
        let grown = self.report.processes.iter().any(|[first, last]| last.grew(first));
        Ok(if grown { Err("a process has grown".to_owned()) } else { Ok(usages) })
    }

    /// One world: its phases, a fault, a rebuild.
    fn world(&mut self, round: Round) -> Result<Judgment<()>> {
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

fn text(usages: impl IntoIterator<Item = Usage>) -> String {
    let one = |Usage { resident_bytes, descriptors, threads }| {
        let mib = resident_bytes as f64 / f64::from(1 << 20);
        format!("{mib:.1} MiB {descriptors} fds {threads} threads")
    };
    usages.into_iter().map(one).collect::<Vec<_>>().join(" | ")
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

    /// An error of the machine's.
    fn refused() -> Error {
        Error::System { call: "fork", source: std::io::ErrorKind::OutOfMemory.into() }
    }

    #[test]
    fn whatever_ends_a_round_is_said_with_its_seed() {
        let not_ready = Error::NotReady { what: "nothing".to_owned() };
        for (seen, is_error) in
            [(Ok(Err("a bit".to_owned())), false), (Err(not_ready), false), (Err(refused()), true)]
        {
            let round = Round::draw(712, &Machine::probe());
            let seen: Result<Judgment<()>> = of_round(round.described(5), seen);
            assert_eq!(seen.is_err(), is_error);
            let said = seen.map_or_else(|error| error.to_string(), |judged| judged.unwrap_err());
            assert!(said.starts_with("round 5, [") && said.contains(", seed 712: "), "{said}");
        }
    }

    #[test]
    fn soak_that_ends_in_error_leaves_its_report() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let soak = Soak { minutes: 1.0, from: None, json: Some(path.to_path_buf()) };
        let report = Report { schema: SCHEMA, seed: 712, rounds: 3, ..Report::default() };
        let ended = soak.conclude(report, Err(refused())).unwrap_err();
        let json: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!((&json["seed"], &json["rounds"]), (&712.into(), &3.into()));
        assert_eq!(json["error"], ended.to_string());
    }
}
