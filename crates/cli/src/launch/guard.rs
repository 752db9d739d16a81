//! A process that outlives the launcher, however that ends, and leaves no rank behind.
//!
//! Ranks that joined a world notice the end of their launcher by a pipe, and report why they end. Other programs do not. So
//! the launcher tells this process the number of each rank, and its end is the end of that input. Then the ranks may end by
//! themselves for as long as after a failure, and those that still run are killed with all that they started.
//!
//! ```text
//!   launcher --- "4711\n" ---> guard: a descriptor of process 4711, which no later process can be mistaken for
//! ```

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use super::LaunchArgs;
use crate::command::Command as _;
use crate::error::CliError;
use crate::ranks;

/// The launcher's end. Dropped when all ranks have ended, or are killed.
pub struct Guard {
    process: Child,
    input: Option<ChildStdin>,
}

impl Guard {
    /// Starts the process, for ranks that may run on for `grace`.
    pub fn start(grace: Duration) -> Result<Self, CliError> {
        let command = ranks::again(LaunchArgs::NAME, &grace)?;
        let mut guard = Command::new(&command[0]);
        guard.args(&command[1..]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // Ctrl-C at a terminal is for the launcher.
        let process = guard.process_group(0).spawn();
        let mut process = process.map_err(CliError::prepare("start the guard of the ranks"))?;
        let input = process.stdin.take();
        Ok(Guard { process, input })
    }

    /// Tells it of a rank.
    pub fn follow(&mut self, rank: &Child) -> Result<(), CliError> {
        let said = self.input.as_mut().map_or(Ok(()), |input| writeln!(input, "{}", rank.id()));
        said.map_err(CliError::prepare("tell the guard of a rank"))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.input.take());
        // Fails only for a child that was reaped already.
        let _ = self.process.wait();
    }
}

/// A rank, which leads a process group.
struct Rank {
    leader: Pid,
    process: OwnedFd,
}

/// The guard's life.
pub fn watch(task: &str) -> Result<ExitCode, CliError> {
    let grace: Duration = ranks::task(task)?;
    let mut ranks = Vec::new();
    for line in io::stdin().lines() {
        let line = line.map_err(CliError::prepare("read what the launcher tells"))?;
        let Some(leader) = line.parse().ok().and_then(Pid::from_raw) else { continue };
        // One that is gone already needs no guard.
        if let Ok(process) = pidfd_open(leader, PidfdFlags::empty()) {
            ranks.push(Rank { leader, process });
        }
    }
    let until = Instant::now() + grace;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let ended = ended(&ranks, left).map_err(CliError::prepare("wait for ranks"))?;
        let mut ended = ended.into_iter();
        ranks.retain(|_| !ended.next().unwrap_or(false));
        if ranks.is_empty() || left.is_zero() {
            break;
        }
    }
    for rank in &ranks {
        // Its leader runs, so the number is still that of its group.
        let _ = kill_process_group(rank.leader, Signal::KILL);
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits until a rank has ended, at most so long; says of each whether it has.
fn ended(ranks: &[Rank], patience: Duration) -> io::Result<Vec<bool>> {
    let mut polled: Vec<PollFd<'_>> =
        ranks.iter().map(|rank| PollFd::new(&rank.process, PollFlags::IN)).collect();
    let patience = Timespec::try_from(patience).map_err(io::Error::other)?;
    match poll(&mut polled, Some(&patience)) {
        Err(rustix::io::Errno::INTR) => {}
        polled => drop(polled?),
    }
    Ok(polled.iter().map(|rank| !rank.revents().is_empty()).collect())
}
