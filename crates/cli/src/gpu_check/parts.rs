//! The parts, one after the other, each as a process: what hangs is ended, what dies is named, and the others go on.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::GpuCheckArgs;
use super::row::{Row, State};
use super::task::{Part, Task};
use crate::command::{self, Command as _};
use crate::error::CliError;
use crate::ranks;

/// A part that says nothing for so long is stuck: every row has shorter deadlines of its own.
const SILENCE: Duration = Duration::from_secs(300);

/// What parts need of the driver, unless it was said: kernels that are there before a stream waits, and queues enough that
/// ranks of one GPU do not wait behind each other.
const VARIABLES: [(&str, &str); 2] =
    [("CUDA_MODULE_LOADING", "EAGER"), ("CUDA_DEVICE_MAX_CONNECTIONS", "32")];

/// Runs these. What does not fit into so many minutes is left out.
pub fn run(task: &Task, parts: &[Part], minutes: Option<f64>) -> Result<Vec<Row>, CliError> {
    let bar = command::progress(0, parts.len() as u64);
    let end = minutes.map(|minutes| Instant::now() + Duration::from_secs_f64(minutes * 60.0));
    let mut rows = Vec::new();
    for &part in parts {
        bar.set_message(part.name());
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
    let missing = VARIABLES.into_iter().filter(|(name, _)| std::env::var_os(name).is_none());
    let mut process = Process::start(task, missing.map(|(name, value)| (name, value.to_owned())))?;
    let (mut rows, mut stuck) = (Vec::new(), None);
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        match process.lines.recv_timeout(left.map_or(SILENCE, |left| left.min(SILENCE))) {
            Ok(line) => rows.push(serde_json::from_str::<Row>(&line).map_err(CliError::told)?),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                let no_time = left.is_some_and(|left| left < SILENCE);
                stuck = Some(if no_time { Ended::Time } else { Ended::Silence });
                let _ = process.child.kill();
                break;
            }
        }
    }
    let ended = process.child.wait().map_err(CliError::prepare("wait for a part"))?;
    let wrong = rows.iter().any(|row| row.state == State::Wrong);
    match stuck {
        Some(Ended::Time) => rows.push(left_out(task.part, "to its end", UNFINISHED)),
        Some(Ended::Silence) => {
            let found = format!("said nothing for {} s, and was killed", SILENCE.as_secs());
            rows.push(unfinished(task.part, found));
        }
        None => {
            if !(ended.success() || wrong) {
                rows.push(unfinished(task.part, format!("its process ended early: {ended}")));
            }
        }
    }
    Ok(rows)
}

/// Why a part was ended.
enum Ended {
    /// The minutes that were given are over.
    Time,
    /// It said nothing for too long.
    Silence,
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
        variables: impl Iterator<Item = (&'static str, String)>,
    ) -> Result<Self, CliError> {
        let mut child = spawn(task, |command| {
            command.envs(variables).stdin(Stdio::null()).stdout(Stdio::piped());
        })?;
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

/// Starts this program for a task.
pub fn spawn(task: &Task, with: impl FnOnce(&mut Command)) -> Result<Child, CliError> {
    let line = ranks::again(GpuCheckArgs::NAME, task)?;
    let mut command = Command::new(&line[0]);
    with(command.args(&line[1..]));
    command.spawn().map_err(|source| CliError::Spawn { rank: 0, program: line[0].clone(), source })
}

/// A part that did not come to its end.
fn unfinished(part: Part, found: String) -> Row {
    let (what, shows) = ("to its end".to_owned(), UNFINISHED.to_owned());
    Row { part, what, state: State::Wrong, found, shows, open: None, time: None, answer: None }
}

/// Parts that no longer fit into the time.
fn left_out(part: Part, what: &str, shows: &str) -> Row {
    let found = "skipped: no time left (--minutes)".to_owned();
    let (what, shows) = (what.to_owned(), shows.to_owned());
    Row { part, what, state: State::Skipped, found, shows, open: None, time: None, answer: None }
}
