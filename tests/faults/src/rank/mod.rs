//! A rank: a process that takes assignments in worlds and runs their phases, as its parent says.
//!
//! ```text
//!   stdin  ── reader ──► Mark: a goal for the steps of the main thread
//!                   └──► other commands ──► main: join, run, rebuild ──► stdout
//! ```

mod phases;
mod tensors;

use std::io::{Write, stdin, stdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use crate::error::{About, Result};
use crate::ffi;
use crate::protocol::{Command, Report};
use phases::Rank;

/// Steps of this rank, and the step that the parent waits for.
#[derive(Debug)]
pub struct Progress {
    steps: AtomicU64,
    goal: AtomicU64,
}

impl Progress {
    fn new() -> Self {
        Progress { steps: AtomicU64::new(0), goal: AtomicU64::new(u64::MAX) }
    }

    fn mark(&self, more: u64) {
        self.goal.store(self.steps.load(Ordering::SeqCst) + more, Ordering::SeqCst);
    }

    /// Forgets a mark of an earlier phase.
    pub fn clear(&self) {
        self.goal.store(u64::MAX, Ordering::SeqCst);
    }

    /// Counts a step. True if it is the one that the parent waits for.
    pub fn step(&self) -> bool {
        let steps = self.steps.fetch_add(1, Ordering::SeqCst) + 1;
        let goal = self.goal.load(Ordering::SeqCst);
        // A new mark that comes between the two is not lost: its goal is another.
        steps >= goal
            && self.goal.compare_exchange(goal, u64::MAX, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }
}

/// Serves the parent until it closes standard input.
///
/// # Errors
/// [`Error::System`](crate::error::Error::System) where signals cannot be handled.
pub fn serve() -> Result<()> {
    ffi::let_signals_interrupt().of_call("sigaction")?;
    let progress = Arc::new(Progress::new());
    let (give, commands) = channel();
    let reader = Arc::clone(&progress);
    thread::Builder::new().name("reader".to_owned()).spawn(move || read(&reader, &give)).of_call("clone")?;
    say(&Report::Started);
    obey(Rank::new(progress), &commands);
    Ok(())
}

fn read(progress: &Progress, give: &Sender<Command>) {
    for line in stdin().lines().map_while(std::result::Result::ok) {
        match serde_json::from_str(&line).expect("the parent speaks this protocol") {
            Command::Mark(more) => progress.mark(more),
            command => {
                if give.send(command).is_err() {
                    break;
                }
            }
        }
    }
    // Without a parent no step has a purpose.
    std::process::exit(0);
}

fn obey(mut rank: Rank, commands: &Receiver<Command>) {
    for command in commands {
        let report = match command {
            Command::Assign { assignment, join } => rank.assign(assignment, join),
            Command::Run { phase, steps } => rank.run(phase, steps),
            Command::Rebuild { at_least } => rank.rebuild(at_least),
            Command::Leave => rank.leave(),
            Command::Mark(_) => continue,
        };
        say(&report);
    }
}

/// Reports to the parent; one that is gone needs no reports.
pub fn say(report: &Report) {
    let line = serde_json::to_string(report).expect("a report is JSON");
    let mut out = stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
