//! Work that stands still while a stream waits: two questions that decide a design, each case in a
//! process of its own.
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
//!
//! The cases are those of the [test kit](sidelane_testkit::device::waiting).

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use rustix::process::Signal;
use sidelane_testkit::TestError;
use sidelane_testkit::device::lock_and_queue::{Answer, Call, Case, Said, Sharing};

use super::report::{About, Checks};
use super::{Part, Process, Task};
use crate::command_frame;
use crate::error::{CliError, failed};

pub fn locks(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    for (call, name) in [
        (Call::Free, "cuMemFree"),
        (Call::Load, "cuModuleLoadData"),
        (Call::FreeHost, "cuMemFreeHost"),
        (Call::Launches, "4,000 launches on the stream that waits"),
    ] {
        let about = About::new(
            name,
            "whether another thread's batch of copies and word pass beside it while a stream waits",
        );
        ask(task, checks, about, Case::Lock(call))?;
    }
    Ok(())
}

pub fn queues(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    for (connections, priorities) in [1, 8, 32].into_iter().flat_map(|count| [(count, false), (count, true)])
    {
        let others = if priorities { "of the highest priority" } else { "of the same priority" };
        let what = format!("connections {connections}, other streams {others}");
        let about = About::new(
            &what,
            "whether copies of other streams pass one that waits, with a copy to the host behind its wait",
        );
        ask(task, checks, about, Case::Queue(Sharing { connections, priorities }))?;
    }
    Ok(())
}

/// Bound for a process to be ready: it starts the driver and compiles kernels.
const START: Duration = Duration::from_secs(60);

/// Bound for the driver to leave a context, behind an answer.
const END: Duration = Duration::from_secs(5);

/// Asks one case and tells its row. The queue test says how many hardware queues there are.
fn ask(task: &Task, checks: &mut Checks, about: About<'_>, case: Case) -> Result<(), CliError> {
    let task = Task { part: Part::Case, case: Some(case), ..*task };
    let variable = |count: u32| ("CUDA_DEVICE_MAX_CONNECTIONS".to_owned(), count.to_string().into());
    let connections = match case {
        Case::Lock(_) => None,
        Case::Queue(Sharing { connections, .. }) => Some(variable(connections)),
    };
    let Process { mut child, lines } = Process::start(&task, connections)?;
    let heard = listen(&lines, task.case_bound());
    if heard.is_err() || lines.recv_timeout(END) != Err(RecvTimeoutError::Disconnected) {
        let _ = child.kill();
    }
    let ended = child.wait().map_err(CliError::prepare("wait for a case"))?;
    match heard {
        Ok((answer, found)) => checks.answered(about, answer, found),
        Err(what) => checks.check(about, || Err(failed!("{what} ({ended})"))).map(drop),
    }
}

fn listen(hear: &Receiver<String>, bound: Duration) -> Result<(Answer, String), String> {
    match next(hear, START)? {
        Some(Said::Ready) => {}
        Some(said) => return Err(format!("it said {said:?} before it was ready")),
        None => return Err(format!("its process was not ready after {} s", START.as_secs())),
    }
    // It has a bound of its own: who says nothing for twice as long stands still as a whole.
    match next(hear, 2 * bound + END)? {
        Some(Said::Answer(answer, found)) => Ok((answer, found)),
        Some(said) => Err(format!("it said {said:?} where its answer should be")),
        None => Ok((Answer::Blocks, "BLOCKS: its process stood still as a whole, and was ended".to_owned())),
    }
}

/// The next line, if it comes in time.
fn next(hear: &Receiver<String>, patience: Duration) -> Result<Option<Said>, String> {
    match hear.recv_timeout(patience) {
        Ok(line) => match serde_json::from_str(&line) {
            Ok(Said::Failed(why)) => Err(why),
            Ok(said) => Ok(Some(said)),
            Err(_) => Err(format!("it said {line:?}")),
        },
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => Err("its process ended early".to_owned()),
    }
}

/// The process of a case. It reports on standard output, and ends with the process that started it.
pub fn case(task: &Task) -> Result<(), CliError> {
    // A stream that waits keeps its process alive.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    let tell = |said: &Said| say(said).map_err(|error| TestError::Wrong(error.to_string()));
    let done = match task.case {
        Some(case) => Ok(case.ask(&task.gpu()?, task.case_bound(), &tell)?),
        None => Err(failed!("a case without a question")),
    };
    done.or_else(|error: CliError| say(&Said::Failed(error.to_string())))
}

fn say(said: &Said) -> Result<(), CliError> {
    command_frame::print(&serde_json::to_string(said).expect("texts are always JSON"))
}
