//! The parts, one after the other, each as a process: what hangs is ended, what dies is named, and the others go on.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use super::row::{Row, State};
use super::task::{Part, Task};
use crate::error::CliError;
use crate::progress;

/// A part that says nothing for so long is stuck: every row has shorter deadlines of its own.
const SILENCE: Duration = Duration::from_secs(300);

/// What parts need of the driver, unless it was said: kernels that are there before a stream waits, and queues enough that
/// ranks of one GPU do not wait behind each other.
const VARIABLES: [(&str, &str); 2] =
    [("CUDA_MODULE_LOADING", "EAGER"), ("CUDA_DEVICE_MAX_CONNECTIONS", "32")];

/// Runs them all.
pub fn run(task: &Task) -> Result<Vec<Row>, CliError> {
    let bar = progress::bar(0, Part::ALL.len() as u64);
    let mut rows = Vec::new();
    for part in Part::ALL {
        bar.set_message(part.name());
        bar.tick();
        rows.extend(one(&Task { part, ..*task })?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(rows)
}

/// The rows of one part, and how it ended if not well.
fn one(task: &Task) -> Result<Vec<Row>, CliError> {
    let mut child = start(task)?;
    let out = child.stdout.take().expect("standard output is a pipe");
    let (told, hear) = mpsc::channel();
    // Ends with the pipe.
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            if told.send(line).is_err() {
                break;
            }
        }
    });
    let (mut rows, mut stuck) = (Vec::new(), false);
    loop {
        match hear.recv_timeout(SILENCE) {
            Ok(line) => rows.push(serde_json::from_str::<Row>(&line).map_err(CliError::Told)?),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                stuck = true;
                let _ = child.kill();
                break;
            }
        }
    }
    let ended = child.wait().map_err(|source| CliError::Prepare { what: "wait for a part", source })?;
    if !stuck {
        let _ = reader.join();
    }
    let wrong = rows.iter().any(|row| row.state == State::Wrong);
    if stuck || !(ended.success() || wrong) {
        rows.push(end(task.part, ended, stuck));
    }
    Ok(rows)
}

fn start(task: &Task) -> Result<Child, CliError> {
    let program = super::program()?;
    let json = serde_json::to_string(task).expect("numbers and names are always JSON");
    let missing = VARIABLES.into_iter().filter(|(name, _)| std::env::var_os(name).is_none());
    let mut command = Command::new(&program);
    command.arg("gpu-check-part").arg(json).envs(missing).stdin(Stdio::null()).stdout(Stdio::piped());
    command.spawn().map_err(|source| CliError::Spawn { rank: 0, program: program.into(), source })
}

/// A part that did not come to its end.
fn end(part: Part, ended: ExitStatus, stuck: bool) -> Row {
    let found = if stuck {
        format!("said nothing for {} s, and was killed", SILENCE.as_secs())
    } else {
        format!("its process ended early: {ended}")
    };
    Row {
        part,
        what: "to its end".to_owned(),
        state: State::Wrong,
        found,
        shows: "the rest of this part was not run".to_owned(),
        open: None,
        time: None,
    }
}
