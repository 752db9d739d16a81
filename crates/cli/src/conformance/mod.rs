//! `sidelane conformance`: the table of features by executor, made by running it.
//!
//! ```text
//!   suite (data) x ways --> Task --Job--> ranks 0 .. 5: build, call, compare | next case ...
//!        ^                                   | a line a case
//!        +---- cases that are left <---------+--> table, JSON, exit status
//! ```
//!
//! The library's own table, [`Feature`], says what must be equal and what must be refused. What is
//! equal is so to the bit with the naive reference, which shares no code with placement.

mod case;
mod difference;
mod place;
mod player;
mod rank;
mod report;
mod suite;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use sidelane::device::{Driver, Probe};
use sidelane::ep::Feature;

pub use self::case::{Call, Case, Setting, Way};
pub use self::place::{Device, Memory};
pub use self::player::{Player, experts_copy};
use self::rank::{Line, Outcome, Run, Task, judged};
pub use self::report::Finding;
use self::report::Report;
use self::suite::{RANKS_PER_NODE, SUITE};
use crate::command::{self, Command};
use crate::device::{VARIABLES, missing, one_process};
use crate::error::{CliError, failed};
use crate::options::one_of;
use crate::ranks;

const EXAMPLES: &str = "\
Example:
  sidelane conformance --place host --only gradients --json conformance.json";

/// Run every feature between processes of this machine, compare all bits with a naive reference,
/// and print the table of features by place
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct ConformanceArgs {
    /// Place of the rows [default: host, and device where there is a driver]
    #[arg(long, value_name = "PLACE", value_enum)]
    pub place: Option<PlaceArg>,

    /// Run the cases of this feature alone, by its name in the table; repeat it for several
    #[arg(long, value_name = "FEATURE", value_parser = one_of(Feature::ALL, Feature::name))]
    pub only: Vec<Feature>,

    /// Draws tokens and routing
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Value of `--place`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlaceArg {
    Host,
    Device,
}

/// A run, the executor that served it, and what came of it.
type Judged = (Run, String, Outcome);

impl Command for ConformanceArgs {
    const NAME: &'static str = "conformance";

    fn run(self) -> Result<ExitCode, CliError> {
        command::claim(&self.json)?;
        let device = match self.place {
            Some(PlaceArg::Host) => None,
            Some(PlaceArg::Device) => Some(Ok(probe()?)),
            None => Some(probe().map_err(|error| error.to_string())),
        };
        let has_device = matches!(device, Some(Ok(_)));
        let places = |way: &Way| match way.is_on_device() {
            true => has_device,
            false => self.place != Some(PlaceArg::Device),
        };
        let asked = |run: &Run| self.only.is_empty() || self.only.contains(&run.case().feature);
        let runs = Way::ALL.into_iter().filter(places).flat_map(runs_of).filter(asked).collect();
        let task = Task { runs, seed: self.seed, device: None, has_bar: true, folder: PathBuf::new() };
        let judged = run_all(task)?;
        command::finish(&Report::new(&self, device, &judged), &self.json)
    }

    fn rank(task: &str) -> Result<ExitCode, CliError> {
        rank::main(&ranks::task(task)?)
    }
}

/// All cases of the suite that go this way.
fn runs_of(way: Way) -> impl Iterator<Item = Run> {
    let cases = SUITE.iter().enumerate().filter(move |(_, case)| case.goes(way));
    cases.map(move |(case, _)| Run { case, way })
}

/// Runs the suite on this device, or the first case of each feature, and says what came of each
/// feature.
pub fn on_device(device: u32, quick: bool) -> Result<Vec<Finding>, CliError> {
    let first = |runs: Vec<Run>| {
        let features = Feature::ALL.into_iter();
        features
            .filter_map(|feature| runs.iter().copied().find(|run| run.case().feature == feature))
            .collect()
    };
    let ways = Way::ALL.into_iter().filter(|way| way.is_on_device()).map(|way| runs_of(way).collect());
    let runs: Vec<Run> = ways.flat_map(|runs: Vec<Run>| if quick { first(runs) } else { runs }).collect();
    let task = Task { runs, seed: 0, device: Some(device), has_bar: false, folder: PathBuf::new() };
    Ok(Finding::of(&run_all(task)?))
}

/// The driver, if it is there and processes may share its devices.
fn probe() -> Result<Probe, CliError> {
    let driver = Driver::open()?;
    match one_process(&driver, 0)? {
        Some(reason) => Err(failed!("{reason}")),
        None => Ok(driver.probe()?),
    }
}

/// Milliseconds after which a rank that waits for others gives up, unless it was said.
const DEADLINE: (&str, &str) = ("SIDELANE_DEADLINE_MS", "120000");

/// Runs all of a task, in folders of its own; what ends a job costs one run.
fn run_all(mut task: Task) -> Result<Vec<Judged>, CliError> {
    let mut done = Vec::new();
    while !task.runs.is_empty() {
        let folder = tempfile::Builder::new().prefix("sidelane-conformance-").tempdir();
        let folder = folder.map_err(CliError::prepare("make a folder for what ranks see"))?;
        task.folder = folder.path().to_owned();
        let env = missing([DEADLINE].into_iter().chain(VARIABLES));
        let code = ranks::job(ConformanceArgs::NAME, &RANKS_PER_NODE, &task, env)?.run()?.exit_code();
        if [130, 143].contains(&code) {
            return Err(failed!("stopped"));
        }
        let ranks = 0..RANKS_PER_NODE.iter().sum();
        let lines =
            ranks.map(|rank| rank::read(folder.path(), rank)).collect::<Result<Option<Vec<_>>, _>>()?;
        let lines = lines.ok_or_else(|| failed!("the ranks did not come so far as to begin"))?;
        let judged = finished(&task.runs, &lines);
        if judged.is_empty() {
            return Err(failed!("the ranks ended with status {code} and ran no case"));
        }
        task.runs.drain(..judged.len());
        done.extend(judged);
    }
    Ok(done)
}

/// The runs that a job has finished, by the lines of its ranks, and the one that ended it.
fn finished(runs: &[Run], lines: &[Vec<Line>]) -> Vec<Judged> {
    let mut done: Vec<Judged> = Vec::new();
    for &run in runs {
        let of_rank = |&rank: &u32| lines[rank as usize].iter().find(|line| line.run == run).cloned();
        let said: Vec<Option<Line>> = run.case().group.iter().map(of_rank).collect();
        // The run that was wrong has ended the job, and not one that no rank has begun.
        let unbegun = said.iter().all(Option::is_none);
        if unbegun && matches!(done.last(), Some((.., Outcome::Wrong(_)))) {
            break;
        }
        let ended = said.iter().any(Option::is_none);
        let (executor, outcome) = judged(run, &said);
        done.push((run, executor, outcome));
        if ended {
            break;
        }
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNS: [Run; 3] = [run(0), run(2), run(3)];

    const fn run(case: usize) -> Run {
        Run { case, way: Way::Host }
    }

    /// The lines of all ranks of the job: the outcomes of the first runs.
    fn lines(outcomes: &[Outcome], silent: Option<u32>) -> Vec<Vec<Line>> {
        let of_rank = |rank: u32| {
            let took_part = RUNS.iter().zip(outcomes).filter(|(run, _)| run.case().group.contains(&rank));
            let last = RUNS[outcomes.len() - 1];
            let said = took_part.filter(|(run, _)| silent != Some(rank) || **run != last);
            let line = |(run, outcome): (&Run, &Outcome)| Line {
                run: *run,
                executor: "host-stepper".to_owned(),
                outcome: outcome.clone(),
            };
            said.map(line).collect()
        };
        (0..6).map(of_rank).collect()
    }

    #[test]
    fn run_that_ends_a_job_is_wrong_and_the_next_is_left() {
        let wrong = Outcome::Wrong(Vec::new());
        let said = |outcomes: &[Outcome], silent| {
            let done = finished(&RUNS, &lines(outcomes, silent));
            done.into_iter().map(|(.., outcome)| matches!(outcome, Outcome::Equal)).collect::<Vec<_>>()
        };
        let equal = [Outcome::Equal, Outcome::Equal, Outcome::Equal];
        assert_eq!(said(&equal, None), [true; 3]);
        assert_eq!(said(&equal[..2], Some(1)), [true, false], "rank 1 has ended");
        assert_eq!(said(&equal[..1], None), [true, false], "all ranks have ended in the second");
        assert_eq!(said(&[Outcome::Equal, wrong], None), [true, false], "nobody has begun the third");
    }
}
