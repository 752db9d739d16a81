//! Work that stands still while a stream waits: two questions that decide a design, each
//! case in a process of its own.
//!
//! ```text
//!   part locks, part queues            the process of a case
//!     start, CUDA_DEVICE_MAX_CONNECTIONS ---> streams, memory; one stream waits for a word of the host
//!              <---------------------------- ready
//!              <---------------------------- passes, or blocks: the bound of the case is over
//!     a process that says no more is ended:  the word is written, and all goes on
//!     that is an answer, too
//! ```
//!
//! Answers are findings. Neither is wrong: what they mean for streams that wait is said below the
//! table.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use super::report::{About, Answer, Checks};
use super::{Part, Process, Task};
use crate::command;
use crate::error::{CliError, failed};

/// Question to the process of a case.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Case {
    Lock(super::locks::Call),
    Queue(super::queues::Sharing),
}

/// Its answers, a line each.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Said {
    /// All is made, and a stream waits.
    Ready,
    Answer(Answer, String),
    Failed(String),
}

/// Bound for a process to be ready: it starts the driver and compiles kernels.
const START: Duration = Duration::from_secs(60);

/// Bound for the driver to leave a context, behind an answer.
const END: Duration = Duration::from_secs(5);

/// The process of a case. It speaks on standard output, and ends with whoever started it.
pub fn case(task: &Task) -> Result<(), CliError> {
    // A stream that waits keeps its process alive.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    let done = match task.case {
        Some(Case::Lock(call)) => super::locks::case(task, call),
        Some(Case::Queue(sharing)) => super::queues::case(task, sharing),
        None => Err(failed!("a case without a question")),
    };
    done.or_else(|error| say(&Said::Failed(error.to_string())))
}

pub fn say(said: &Said) -> Result<(), CliError> {
    command::print(&serde_json::to_string(said).expect("texts are always JSON"))
}

/// Asks one case, with so many hardware queues unless the caller has chosen, and tells its
/// row.
pub fn ask(
    task: &Task,
    checks: &mut Checks,
    about: About<'_>,
    case: Case,
    connections: Option<u32>,
) -> Result<(), CliError> {
    let task = Task { part: Part::Case, case: Some(case), ..*task };
    let connections =
        connections.map(|count| ("CUDA_DEVICE_MAX_CONNECTIONS".to_owned(), count.to_string().into()));
    let Process { mut child, lines } = Process::start(&task, connections)?;
    let heard = listen(&lines, task.case_bound());
    if !matches!(heard, Ok((Answer::Passes | Answer::Blocks, _))) || !ends(&lines, END) {
        let _ = child.kill();
    }
    let ended = child.wait().map_err(CliError::prepare("wait for a case"))?;
    match heard {
        Ok((answer, found)) => checks.answered(about, answer, found),
        Err(what) => checks.check(about, || Err(failed!("{what} ({ended})"))).map(drop),
    }
}

/// The answer of a process, or why it has none to give.
fn listen(hear: &Receiver<String>, bound: Duration) -> Result<(Answer, String), String> {
    match next(hear, START) {
        Ok(Said::Ready) => {}
        Ok(Said::Failed(why)) => return Err(why),
        Ok(said) => return Err(format!("it said {said:?} before it was ready")),
        Err(RecvTimeoutError::Timeout) => {
            return Err(format!("its process was not ready after {} s", START.as_secs()));
        }
        Err(RecvTimeoutError::Disconnected) => return Err("its process ended early".to_owned()),
    }
    // It has a bound of its own: who says nothing for twice as long stands still as a whole.
    match next(hear, 2 * bound + END) {
        Ok(Said::Answer(answer, found)) => Ok((answer, found)),
        Ok(Said::Failed(why)) => Err(why),
        Ok(Said::Ready) => Err("it was ready twice".to_owned()),
        Err(RecvTimeoutError::Timeout) => {
            let found = "BLOCKS: its process stood still as a whole, and was ended";
            Ok((Answer::Blocks, found.to_owned()))
        }
        Err(RecvTimeoutError::Disconnected) => Err("its process ended early".to_owned()),
    }
}

fn next(hear: &Receiver<String>, patience: Duration) -> Result<Said, RecvTimeoutError> {
    let line = hear.recv_timeout(patience)?;
    Ok(serde_json::from_str(&line).unwrap_or_else(|_| Said::Failed(format!("it said {line:?}"))))
}

/// Whether a process that has answered comes to its end.
fn ends(hear: &Receiver<String>, patience: Duration) -> bool {
    hear.recv_timeout(patience) == Err(RecvTimeoutError::Disconnected)
}

/// Whether something goes on, or stands still for as long as the bound.
pub struct Watch {
    bound: Duration,
    moved: Instant,
    seen: u64,
}

impl Watch {
    pub fn new(bound: Duration) -> Self {
        Watch { bound, moved: Instant::now(), seen: 0 }
    }

    /// The answer of a count that has come to `now`: enough of it, behind `enough`, passes.
    pub fn look(&mut self, now: u64, enough: bool) -> Option<Answer> {
        if now != self.seen {
            (self.seen, self.moved) = (now, Instant::now());
        }
        if enough {
            Some(Answer::Passes)
        } else {
            (self.moved.elapsed() > self.bound).then_some(Answer::Blocks)
        }
    }
}
