//! A process that outlives the launcher, however that ends, and leaves no rank behind.
//!
//! Ranks that joined a world notice the end of their launcher by a pipe, and report why they end.
//! Other programs do not. The guard reads from the launcher: "done" once all ranks have ended, or
//! an end of input if the launcher is killed. Then the processes of its ranks may end by themselves
//! for as long as after a failure, and those that still run are killed.
//!
//! The guard finds them by `SIDELANE_LAUNCHER_PID` in their environment, which their children
//! inherit. So no rank is unguarded between its start and a message about it: the input ends only
//! when the launcher is gone and the last rank that it started runs its own program, because both
//! hold the other end until then.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::LaunchArgs;
use crate::command_frame::Command as _;
use crate::error::CliError;
use crate::ranks;

/// The launcher's end. Dropped when all ranks have ended, or are killed.
pub struct Guard {
    process: Child,
    input: Option<ChildStdin>,
}

const DONE: &str = "done";

impl Guard {
    /// Starts the process, for ranks that may run on for `grace`.
    pub fn start(grace: Duration) -> Result<Self, CliError> {
        let command = ranks::again(LaunchArgs::NAME, &(grace, std::process::id()))?;
        let mut guard = Command::new(&command[0]);
        guard.args(&command[1..]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // A launcher may be a rank of another launcher, whose guard must not kill this process.
        guard.env_remove("SIDELANE_LAUNCHER_PID");
        // Ctrl-C at a terminal is for the launcher.
        let process = guard.process_group(0).spawn();
        let mut process = process.map_err(CliError::prepare("start the guard of the ranks"))?;
        let input = process.stdin.take();
        Ok(Guard { process, input })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(mut input) = self.input.take() {
            // A guard that has ended needs no message.
            let _ = input.write_all(DONE.as_bytes());
        }
        // Fails only for a child that was reaped already.
        let _ = self.process.wait();
    }
}

pub fn watch(task: &str) -> Result<ExitCode, CliError> {
    let (grace, launcher): (Duration, u32) = ranks::task(task)?;
    let mut said = String::new();
    io::stdin().read_to_string(&mut said).map_err(CliError::prepare("read what the launcher tells"))?;
    if said == DONE {
        return Ok(ExitCode::SUCCESS);
    }
    let until = Instant::now() + grace;
    loop {
        let processes = started_by(launcher);
        if processes.is_empty() {
            return Ok(ExitCode::SUCCESS);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            for process in &processes {
                // One that ended meanwhile needs no signal.
                let _ = pidfd_send_signal(process, Signal::KILL);
            }
            // A process may start another before it is killed, so the guard looks again.
            await_all(&processes, Duration::from_secs(1))?;
        } else {
            await_all(&processes, left)?;
        }
    }
}

/// Running processes that have this launcher in their environment. Descriptors name them, so that
/// no later process of the same number is mistaken for one.
fn started_by(launcher: u32) -> Vec<OwnedFd> {
    let variable = format!("SIDELANE_LAUNCHER_PID={launcher}");
    let is_rank = |pid: Pid| {
        let environment = fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|entry| entry == variable.as_bytes())
    };
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let pids = numbers.filter_map(Pid::from_raw);
    // The descriptor first: then the environment is that of this very process.
    let open = pids.filter_map(|pid| Some((pid, pidfd_open(pid, PidfdFlags::empty()).ok()?)));
    open.filter(|(pid, _)| is_rank(*pid)).map(|(_, process)| process).collect()
}

/// Waits until one of the processes after another has ended, at most so long in all.
fn await_all(processes: &[OwnedFd], patience: Duration) -> Result<(), CliError> {
    let until = Instant::now() + patience;
    for process in processes {
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now()));
        let left = left.map_err(io::Error::other).map_err(CliError::prepare("wait for ranks"))?;
        match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&left)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(CliError::prepare("wait for ranks")(error.into())),
        }
    }
    Ok(())
}
