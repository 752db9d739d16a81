//! The running ranks: start, look, signal, and never leave one behind.

use std::fmt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process_group};

use super::environment::{Meeting, Place};
use super::job::Job;
use super::tag::Taggers;
use crate::error::CliError;

/// A rank that has ended.
#[derive(Clone, Copy, Debug)]
pub struct End {
    pub place: Place,
    pub status: ExitStatus,
}

impl End {
    /// What a shell would report: the exit status, or 128 and the signal.
    pub fn code(&self) -> u8 {
        let code = self.status.code().or(self.status.signal().map(|signal| 128 + signal));
        code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (node {}) ", self.place.rank, self.place.node)?;
        match self.status.signal().map(|number| (number, signal_hook::low_level::signal_name(number))) {
            Some((_, Some(name))) => write!(f, "was ended by {name}"),
            Some((number, None)) => write!(f, "was ended by signal {number}"),
            None => write!(f, "exited with status {}", self.status.code().unwrap_or(1)),
        }
    }
}

/// Ranks that were started. Those still alive when this is dropped are killed.
///
/// Each rank leads a process group of its own: what a rank starts is signalled with it, and Ctrl-C at a terminal
/// reaches a rank once, through the launcher.
pub struct Ranks {
    running: Vec<(Place, Child)>,
}

impl Ranks {
    /// Starts all, or none.
    pub fn start(
        places: &[Place],
        meeting: &Meeting,
        Job { command, env, bind, .. }: &Job,
        taggers: Option<&Taggers>,
    ) -> Result<Self, CliError> {
        let mut ranks = Ranks { running: Vec::with_capacity(places.len()) };
        let (binder, here) = (bind.binder(), places.len() as u32);
        for (nth, &place) in (0..).zip(places) {
            let mut rank = Command::new(&command[0]);
            rank.args(&command[1..])
                .envs(meeting.variables(place))
                .envs(env.iter().map(|(name, value)| (name, value)))
                .stdin(Stdio::null())
                .stdout(if taggers.is_some() { Stdio::piped() } else { Stdio::inherit() })
                .stderr(if taggers.is_some() { Stdio::piped() } else { Stdio::inherit() })
                .process_group(0);
            let spawned = match &binder {
                Some(binder) => binder.start(nth, here, || rank.spawn()),
                None => rank.spawn(),
            };
            let mut child = spawned.map_err(|source| {
                let program = command[0].clone();
                CliError::Spawn { rank: place.rank, program, source }
            })?;
            if let Some(taggers) = taggers {
                taggers.follow(place.rank, &mut child);
            }
            ranks.running.push((place, child));
        }
        Ok(ranks)
    }

    /// Number of ranks that still run.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// The ranks that ended since the last look.
    pub fn ended(&mut self) -> Vec<End> {
        let mut ended = Vec::new();
        self.running.retain_mut(|(place, child)| match child.try_wait() {
            Ok(Some(status)) => {
                ended.push(End { place: *place, status });
                false
            }
            // An error would mean that somebody else reaped our child; nobody does.
            _ => true,
        });
        ended
    }

    /// Sends a signal to each running rank and to what it started.
    pub fn signal(&self, signal: Signal) {
        for (_, child) in &self.running {
            // Not yet reaped, so the number is still that of our child; a group that is gone is no error.
            if let Some(leader) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
                let _ = kill_process_group(leader, signal);
            }
        }
    }

    /// Kills what still runs and waits for it. Returns who it was.
    pub fn kill(&mut self) -> Vec<Place> {
        self.signal(Signal::KILL);
        self.running
            .drain(..)
            .map(|(place, mut child)| {
                // Fails only for a child that was reaped already.
                let _ = child.wait();
                place
            })
            .collect()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.kill();
    }
}
