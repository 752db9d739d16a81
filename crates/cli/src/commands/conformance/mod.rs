//! `sidelane conformance`: the table of features by executor, made by running it.
//!
//! ```text
//!   suite (data) x ways --> Task --Job--> ranks 0 .. 5: build, call, compare | next case ...
//!        ^                                   | a line a case
//!        +---- cases that are left <---------+--> table, JSON, exit status
//! ```
//!
//! The suite is [`sidelane_testkit`]'s. The library's own table, [`Feature`], says what must be
//! equal and what must be refused. A rank writes a line about each case that it took part in. What
//! ends the world ends the job, and another job runs the cases that are left.

mod report;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use indicatif::ProgressBar;
use serde::{Deserialize, Serialize};
use sidelane::device::{Driver, Probe};
use sidelane::ep::Feature;
use sidelane_testkit::conformance::case::Way;
use sidelane_testkit::conformance::case_run::{Line, MEMORY, Run};
use sidelane_testkit::conformance::outcomes::Finding;
use sidelane_testkit::conformance::suite::RANKS_PER_NODE;
use sidelane_testkit::conformance::tensors::Device;

use self::report::Report;
use crate::command_frame::{self, Command};
use crate::error::{CliError, failed};
use crate::options::JsonFile;
use crate::ranks::{self, Sizes, VARIABLES, missing, one_process};

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

    #[arg(long, value_name = "FEATURE", value_parser = feature, help = ONLY, long_help = features())]
    pub only: Vec<Feature>,

    /// Draws tokens and routing
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    #[command(flatten)]
    pub report: JsonFile,
}

const ONLY: &str = "Run the cases of this feature alone; repeat it for several";

/// Names of all features, a line for each: in one paragraph they cannot be read.
fn features() -> String {
    let names = Feature::ALL.map(|feature| format!("\n- {}", feature.name()));
    format!("{ONLY}. By its name in the table:{}", names.concat())
}

fn feature(name: &str) -> Result<Feature, &'static str> {
    let known = Feature::ALL.into_iter().find(|feature| feature.name() == name);
    known.ok_or("no feature of the table: conformance --help lists the names")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlaceArg {
    Host,
    Device,
}

impl Command for ConformanceArgs {
    const NAME: &'static str = "conformance";

    fn run(self) -> Result<ExitCode, CliError> {
        command_frame::claim(&self.report.json, [])?;
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
        let runs = Way::ALL.into_iter().filter(places).flat_map(Run::all).filter(asked).collect();
        let task = Task { runs, seed: self.seed, device: None, has_bar: true, folder: PathBuf::new() };
        let lines = run_all(task)?;
        command_frame::finish(&Report::new(&self, device, &lines), &self.report.json)
    }

    /// Plays the cases, one after another, each behind a barrier.
    fn rank(task: &str) -> Result<ExitCode, CliError> {
        let Task { runs, seed, device, has_bar, folder } = ranks::task(task)?;
        let world = ranks::join(Self::NAME, &(&runs, seed), SIZES, 0)?;
        let (rank, all) = (world.rank(), world.all()?);
        let on_device = runs.iter().any(|run| run.way.is_on_device());
        let device = on_device.then(|| Device::new(device, rank, MEMORY)).transpose()?;
        let unwritten = CliError::prepare("write what a rank has seen");
        let mut file = File::create(lines_of(&folder, rank)).map_err(&unwritten)?;
        let bar =
            if has_bar { command_frame::progress(rank, runs.len() as u64) } else { ProgressBar::hidden() };
        for run in runs {
            bar.set_message(run.case().feature.name());
            all.gather(&[])?;
            if run.case().group.contains(&rank) {
                let line = run.carry_out(seed, &world, device.as_ref());
                let text = serde_json::to_string(&line).expect("names and numbers are always JSON");
                file.write_all(format!("{text}\n").as_bytes()).map_err(&unwritten)?;
            }
            bar.inc(1);
        }
        bar.finish_and_clear();
        all.gather(&[])?;
        Ok(ExitCode::SUCCESS)
    }
}

const SIZES: Sizes = Sizes { heap: 32 << 20, symmetric: 16 << 20 };

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Task {
    runs: Vec<Run>,
    seed: u64,
    /// Device of all ranks; else they take those of the machine in turns.
    device: Option<u32>,
    has_bar: bool,
    folder: PathBuf,
}

fn lines_of(folder: &Path, rank: u32) -> PathBuf {
    folder.join(format!("rank-{rank}"))
}

/// The lines of a rank; nothing where it did not come so far.
fn read(folder: &Path, rank: u32) -> Result<Option<Vec<Line>>, CliError> {
    let Ok(text) = std::fs::read_to_string(lines_of(folder, rank)) else { return Ok(None) };
    let lines = text.lines().map(|line| serde_json::from_str(line).map_err(CliError::told));
    lines.collect::<Result<Vec<Line>, _>>().map(Some)
}

/// Runs the suite on this device, or the first case of each feature, and says what came of each
/// feature.
pub fn on_device(device: u32, quick: bool) -> Result<Vec<Finding>, CliError> {
    let ways = Way::ALL.into_iter().filter(|way| way.is_on_device());
    let runs = ways.flat_map(|way| if quick { Run::few(way) } else { Run::all(way).collect() }).collect();
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
fn run_all(mut task: Task) -> Result<Vec<Line>, CliError> {
    let mut done = Vec::new();
    while !task.runs.is_empty() {
        let folder = tempfile::Builder::new().prefix("sidelane-conformance-").tempdir();
        let folder = folder.map_err(CliError::prepare("make a folder for what ranks see"))?;
        task.folder = folder.path().to_owned();
        let env = missing([DEADLINE].into_iter().chain(VARIABLES));
        let code = ranks::job(ConformanceArgs::NAME, &RANKS_PER_NODE, &task, env)?.run()?;
        if [130, 143].contains(&code) {
            return Err(failed!("stopped"));
        }
        let ranks = 0..RANKS_PER_NODE.iter().sum();
        let lines = ranks.map(|rank| read(folder.path(), rank)).collect::<Result<Option<Vec<_>>, _>>()?;
        let lines = lines.ok_or_else(|| failed!("the ranks did not come so far as to begin"))?;
        let finished = Run::finished(&task.runs, &lines);
        if finished.is_empty() {
            return Err(failed!("the ranks ended with status {code} and ran no case"));
        }
        task.runs.drain(..finished.len());
        done.extend(finished);
    }
    Ok(done)
}
