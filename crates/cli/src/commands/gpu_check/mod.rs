//! `sidelane gpu-check`: what can be known about one GPU, found out on it.
//!
//! The program alone is enough: kernels are inside, libraries are loaded at run time, nothing is
//! built. Each part runs in a process of its own, which tells its rows one by one; a part that
//! hangs or dies costs its own rows and no others.
//!
//! ```text
//!   gpu-check --+-- part driver          streams, events, memory operations, batches, mapped memory, modules
//!               +-- part kernels         against their definitions, to the bit
//!               +-- part locks           calls of the driver that wait, beside a stream that waits
//!               +-- part queues          copies of other streams beside a stream that waits
//!               +-- part processes       ranks as processes on this GPU, against a naive reference
//!               +-- part conformance     every feature on this GPU, against a naive reference
//!               +-- part costs           copies, memory operations, graphs, slots
//!               +-- part rates           our kernels alone, in bytes of memory a second
//!               +-- part audit           transfers while a kernel holds every multiprocessor
//!               +-- part activity        every kernel between packed and landed, by CUPTI's list
//!               +-- part exchange        ranks as threads, against a naive reference
//!               +-- part interference    matrix products alone, beside copy engines, beside a copying kernel
//!               +-- part blocks          matrix products beside our own kernels, by the limit on their blocks
//!                      | rows, a line of JSON each
//!                      v
//!                   table, JSON, verdict
//! ```
//!
//! A row says what was asked, what was found, what that shows, and what only several GPUs could
//! show. On the fake driver everything runs and no time means anything.

mod activity;
mod audit;
mod calibrate_device;
mod costs;
mod expert_parallel;
mod interference;
mod kernels;
mod lock_and_queue_processes;
mod packages;
mod rates;
mod report;

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use report::{About, Checks, Report, Row, State};
use serde::{Deserialize, Serialize};
use sidelane::device::{Driver, Version};
use sidelane::error::DeviceError;
use sidelane_testkit::device::driver::{CHECKS, Streams};
use sidelane_testkit::device::gpu::Gpu;
use sidelane_testkit::device::lock_and_queue::Case;

use crate::command_frame::{self, Command as _};
use crate::commands::doctor::{self, Level};
use crate::error::CliError;
use crate::options::{JsonFile, up_to, word};
use crate::ranks::{self, VARIABLES, missing};

/// The driver, if it is there, new enough, and has the device.
fn probe(device: u32) -> Result<sidelane::device::Probe, DeviceError> {
    let driver = Driver::open()?;
    let (version, needed) = (driver.version(), Version::MAPPED_FLAGS);
    if version < needed {
        let (version, needed) = (version.to_string(), needed.to_string());
        return Err(DeviceError::TooOld { feature: "gpu-check", version, needed });
    }
    driver.device(device)?;
    driver.probe()
}

const EXAMPLES: &str = "\
Examples:
  scp target/release/sidelane gpu-machine:      # the program is all it takes
  ssh gpu-machine ./sidelane gpu-check --json gpu-check.json
  sidelane gpu-check --quick --minutes 10       # the first ten minutes
  sidelane gpu-check --part locks,queues        # two parts alone";

/// Check what one GPU does for Sidelane, audit that transfers need no SM, and measure what they
/// cost
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct GpuCheckArgs {
    /// The device, in the driver's order
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: u32,

    /// Fewer rounds and smaller exchanges: a minute in place of several
    #[arg(long)]
    pub quick: bool,

    /// Run these parts alone; several by commas, or by the option again [default: all, in this
    /// order]
    #[arg(long = "part", value_name = "NAME", value_delimiter = ',', value_enum)]
    pub parts: Vec<Part>,

    /// Begin no part behind so many minutes, and end the one that runs: what is left is skipped
    #[arg(long, value_name = "N", value_parser = up_to(1440.0))]
    pub minutes: Option<f64>,

    /// Seconds that one case of the parts locks and queues may stand still before it counts as held
    /// up
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub case_seconds: u64,

    /// Rows and columns of the matrix products, a multiple of 128 [default: 8192, or what half of
    /// the free memory holds]
    #[arg(long, value_name = "N", value_parser = size)]
    pub size: Option<u32>,

    #[command(flatten)]
    pub report: JsonFile,

    /// Write the figures of this GPU for `simulate --hardware`: from the parts costs and rates
    #[arg(long, value_name = "FILE")]
    pub calibrate: Option<PathBuf>,
}

impl command_frame::Command for GpuCheckArgs {
    const NAME: &'static str = "gpu-check";

    fn run(self) -> Result<ExitCode, CliError> {
        command_frame::claim(&self.report.json, &self.calibrate)?;
        let probe = probe(self.device)?;
        let asked = |part: &Part| self.parts.is_empty() || self.parts.contains(part);
        let chosen: Vec<Part> = Part::value_variants().iter().copied().filter(asked).collect();
        if self.calibrate.is_some() {
            calibrate_device::require_parts(&chosen)?;
        }
        let rows = run_parts(&Task::of(&self), &chosen, self.minutes)?;
        let report = Report::new(&self, &probe, rows);
        let status = command_frame::finish(&report, &self.report.json)?;
        if self.calibrate.is_some() {
            let hardware = calibrate_device::hardware(&report)?;
            command_frame::draw(&self.calibrate, || command_frame::pretty(&hardware) + "\n")?;
        }
        Ok(status)
    }

    /// Runs one part, or one rank of one, and tells its rows.
    fn rank(task: &str) -> Result<ExitCode, CliError> {
        let task: Task = ranks::task(task)?;
        let mut checks = Checks::new(task.part);
        let done = match task.part {
            Part::Driver => driver(&task, &mut checks),
            Part::Kernels => kernels::run(&task, &mut checks),
            Part::Locks => lock_and_queue_processes::locks(&task, &mut checks),
            Part::Queues => lock_and_queue_processes::queues(&task, &mut checks),
            Part::Case => lock_and_queue_processes::case(&task),
            Part::Exchange => expert_parallel::threads(&task, &mut checks),
            Part::Processes => expert_parallel::processes(&task, &mut checks),
            Part::Rank => expert_parallel::rank(&task, &mut checks),
            Part::Conformance => expert_parallel::conformance(&task, &mut checks),
            Part::Audit => audit::run(&task, &mut checks),
            Part::Activity => activity::run(&task, &mut checks),
            Part::Interference => interference::transfers(&task, &mut checks),
            Part::Blocks => interference::kernels(&task, &mut checks),
            Part::Costs => costs::run(&task, &mut checks),
            Part::Rates => rates::run(&task, &mut checks),
        };
        if let Err(error) = done {
            checks.tell(About::new("to its end", UNFINISHED), State::Wrong, error.to_string())?;
        }
        Ok(if checks.wrong { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }
}

/// The driver: its version and abilities, and its functions.
fn driver(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let driver = Driver::open()?;
    for finding in doctor::cuda_findings(&driver.probe()?) {
        let state = if finding.level == Level::Warn { State::Wrong } else { State::Right };
        checks.tell(About::new(&finding.what, finding.meaning), state, finding.found)?;
    }
    let streams = Streams::new(task.gpu()?)?;
    for check in CHECKS {
        let about = About::new(check.what, check.shows).open(check.open);
        if check.needs.map_or(Ok(true), |needs| checks.has(about, driver.version(), needs))? {
            checks.check(about, || Ok(check.run(&streams)?))?;
        }
    }
    Ok(())
}

fn size(text: &str) -> Result<u32, String> {
    let size: u32 = text.parse().map_err(|_| "not a number".to_owned())?;
    if size == 0 || size > 1 << 16 || !size.is_multiple_of(sidelane::device::TILE) {
        return Err("not a multiple of 128 up to 65536".to_owned());
    }
    Ok(size)
}

/// The parts, in their order: first what a short time on a GPU is for, and processes before
/// threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    Driver,
    Kernels,
    Locks,
    Queues,
    /// A process that the two parts before start for each question.
    #[value(skip)]
    Case,
    Processes,
    /// A rank that the part before starts.
    #[value(skip)]
    Rank,
    Conformance,
    Costs,
    Rates,
    Audit,
    Activity,
    Exchange,
    Interference,
    Blocks,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Task {
    pub part: Part,
    pub device: u32,
    pub quick: bool,
    pub size: Option<u32>,
    /// Longest time of one case of the lock test or the queue test, in seconds.
    pub case_seconds: u64,
    pub case: Option<Case>,
}

impl Task {
    pub fn of(args: &GpuCheckArgs) -> Task {
        let GpuCheckArgs { device, quick, size, case_seconds, .. } = *args;
        Task { part: Part::Driver, device, quick, size, case_seconds, case: None }
    }

    pub fn case_bound(&self) -> Duration {
        Duration::from_secs(self.case_seconds)
    }

    pub fn few<T>(&self, all: T, quick: T) -> T {
        if self.quick { quick } else { all }
    }

    pub fn gpu(&self) -> Result<Gpu, DeviceError> {
        Gpu::open(self.device, self.quick)
    }
}

/// A part that says nothing for so long is stuck: every row has shorter deadlines of its own.
const SILENCE: Duration = Duration::from_secs(300);

fn run_parts(task: &Task, parts: &[Part], minutes: Option<f64>) -> Result<Vec<Row>, CliError> {
    let bar = command_frame::progress(0, parts.len() as u64);
    let end = minutes.map(|minutes| Instant::now() + Duration::from_secs_f64(minutes * 60.0));
    let mut rows = Vec::new();
    for &part in parts {
        bar.set_message(word(&part));
        bar.tick();
        if end.is_some_and(|end| Instant::now() >= end) {
            rows.push(left_out(part, "all of it", "nothing of this part was run"));
        } else {
            rows.extend(one(&Task { part, ..*task }, end)?);
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(rows)
}

/// The rows of one part, and how it ended if not well.
fn one(task: &Task, end: Option<Instant>) -> Result<Vec<Row>, CliError> {
    let mut process = Process::start(task, missing(VARIABLES))?;
    let mut rows = Vec::new();
    let stuck = loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        match process.lines.recv_timeout(left.map_or(SILENCE, |left| left.min(SILENCE))) {
            Ok(line) => rows.push(serde_json::from_str::<Row>(&line).map_err(CliError::told)?),
            Err(RecvTimeoutError::Disconnected) => break None,
            Err(RecvTimeoutError::Timeout) => {
                let _ = process.child.kill();
                let found = format!("said nothing for {} s, and was killed", SILENCE.as_secs());
                break Some(match left {
                    Some(left) if left < SILENCE => left_out(task.part, "to its end", UNFINISHED),
                    _ => unfinished(task.part, found),
                });
            }
        }
    };
    let ended = process.child.wait().map_err(CliError::prepare("wait for a part"))?;
    let well = ended.success() || rows.iter().any(|row| row.state == State::Wrong);
    let early = || (!well).then(|| unfinished(task.part, format!("its process ended early: {ended}")));
    rows.extend(stuck.or_else(early));
    Ok(rows)
}

const UNFINISHED: &str = "the rest of this part was not run";

/// A process of this program that does a task, and tells lines on its standard output.
pub struct Process {
    pub child: Child,
    pub lines: Receiver<String>,
}

impl Process {
    pub fn start(
        task: &Task,
        variables: impl IntoIterator<Item = (String, OsString)>,
    ) -> Result<Self, CliError> {
        let line = ranks::again(GpuCheckArgs::NAME, task)?;
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).envs(variables).stdin(Stdio::null()).stdout(Stdio::piped());
        let child = command.spawn();
        let mut child =
            child.map_err(|source| CliError::Spawn { rank: 0, program: line[0].clone(), source })?;
        let out = child.stdout.take().expect("standard output is a pipe");
        let (told, lines) = mpsc::channel();
        // Ends with the pipe.
        std::thread::spawn(move || {
            let all = BufReader::new(out).lines().map_while(Result::ok);
            all.map(|line| told.send(line)).take_while(Result::is_ok).for_each(drop);
        });
        Ok(Process { child, lines })
    }
}

fn unfinished(part: Part, found: String) -> Row {
    Row::new(part, State::Wrong, "to its end", found, UNFINISHED)
}

fn left_out(part: Part, what: &str, shows: &str) -> Row {
    let found = "skipped: no time left (--minutes)".to_owned();
    Row::new(part, State::Skipped, what, found, shows)
}
