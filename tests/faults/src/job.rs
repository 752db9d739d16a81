//! Ranks as processes: this program starts itself once per rank, and talks to each over pipes.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command as Program, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use crate::cell::Lane;
use crate::error::{About, Error, Result};
use crate::processes::master_port;
use crate::protocol::{Assignment, Command, DEADLINE, RENDEZVOUS, Report};
use crate::wire::Wire;

/// Ranks start within this time, on a machine with other work.
const START: Duration = Duration::from_secs(60);
/// Lines of a rank's standard error that a report shows.
const SHOWN: usize = 12;

/// What came of a rank.
#[derive(Clone, Debug)]
pub enum News {
    /// It said this.
    Said(Report),
    /// It ended.
    Ended,
}

/// News, with the rank and the time.
#[derive(Clone, Debug)]
pub struct Heard {
    /// Number of the process.
    pub from: usize,
    /// What came.
    pub news: News,
    /// When it came.
    pub at: Instant,
}

struct Process {
    child: Child,
    stdin: ChildStdin,
    stderr: File,
    node: u32,
}

/// Processes that are ranks. Dropping them kills them.
pub struct Job {
    /// By number. No number is used twice.
    processes: BTreeMap<usize, Process>,
    started: usize,
    heard: Receiver<Heard>,
    tell: Sender<Heard>,
    wire: Option<Arc<Wire>>,
    liveness: Duration,
}

impl Job {
    /// A process for each of these nodes, which are machines if there is a wire. All wait for
    /// commands. A rank of theirs is lost if it is silent for as long as `liveness`.
    ///
    /// # Errors
    /// [`Error::NotReady`], [`Error::System`].
    pub fn start(nodes: &[u32], wire: Option<Arc<Wire>>, liveness: Duration) -> Result<Job> {
        let (tell, heard) = channel();
        let mut job = Job { processes: BTreeMap::new(), started: 0, heard, tell, wire, liveness };
        for &node in nodes {
            job.add(node)?;
        }
        job.expect(0..nodes.len(), "start", |report| matches!(report, Report::Started))?;
        Ok(job)
    }

    fn add(&mut self, node: u32) -> Result<usize> {
        let number = self.started;
        let process = self.spawn(number, node)?;
        self.started += 1;
        self.processes.insert(number, process);
        Ok(number)
    }

    /// Starts a process in place of another one, on its node. Returns the number of the new one.
    ///
    /// # Errors
    /// As [`Job::start`].
    pub fn replace(&mut self, number: usize) -> Result<usize> {
        let node = self.processes[&number].node;
        if let Some(before) = self.processes.remove(&number) {
            end(before);
        }
        let number = self.add(node)?;
        self.expect([number], "start", |report| matches!(report, Report::Started))?;
        Ok(number)
    }

    fn spawn(&self, number: usize, node: u32) -> Result<Process> {
        let here = std::env::current_exe().of_call("current_exe")?;
        let mut program = match &self.wire {
            Some(wire) => wire.run(node, &here),
            None => Program::new(Path::new(&here)),
        };
        // Settings of this program's caller are not those of the ranks.
        let foreign = std::env::vars_os().map(|(name, _)| name);
        for name in foreign.filter(|name| name.to_string_lossy().starts_with("SIDELANE_")) {
            program.env_remove(name);
        }
        let stderr = tempfile::tempfile().of_call("tempfile")?;
        let mut child = program
            .arg("rank")
            .env("SIDELANE_SECRET", "a secret of this run alone")
            .env("SIDELANE_NODE", node.to_string())
            .env("SIDELANE_HEAP", "8M")
            .env("SIDELANE_SYMMETRIC", "4M")
            .env("SIDELANE_RENDEZVOUS_MS", RENDEZVOUS.as_millis().to_string())
            .env("SIDELANE_LIVENESS_MS", self.liveness.as_millis().to_string())
            .env("SIDELANE_DEADLINE_MS", DEADLINE.as_millis().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr.try_clone().of_call("dup")?)
            .spawn()
            .of_call("spawn")?;
        let stdin = child.stdin.take().expect("it is piped");
        let lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        let tell = self.tell.clone();
        thread::spawn(move || {
            let said =
                lines.map_while(std::result::Result::ok).filter_map(|line| serde_json::from_str(&line).ok());
            // No receiver is left when the job is dropped.
            for news in said.map(News::Said).chain([News::Ended]) {
                let _ = tell.send(Heard { from: number, news, at: Instant::now() });
            }
        });
        Ok(Process { child, stdin, stderr, node })
    }

    /// Assignments for all processes, in this order, in a new world.
    pub fn assignments(&self, order: &[usize], lane: Lane) -> Vec<Assignment> {
        let port = master_port();
        let nodes: Vec<u32> = order.iter().map(|number| self.processes[number].node).collect();
        let job = format!("faults {} at {port}", std::process::id());
        let assignment = |(rank, &node): (usize, &u32)| {
            let same = |nodes: &[u32]| nodes.iter().filter(|&&other| other == node).count() as u32;
            let (local_rank, local_size, master) = match &self.wire {
                Some(_) => (same(&nodes[..rank]), same(&nodes), Wire::address(nodes[0])),
                None => (rank as u32, nodes.len() as u32, "127.0.0.1".to_owned()),
            };
            let size = nodes.len() as u32;
            Assignment {
                rank: rank as u32,
                size,
                local_rank,
                local_size,
                job: job.clone(),
                master,
                port,
                lane,
            }
        };
        nodes.iter().enumerate().map(assignment).collect()
    }

    /// The silence after which a rank is lost.
    pub fn liveness(&self) -> Duration {
        self.liveness
    }

    /// The wire between its machines.
    pub fn wire(&self) -> Option<&Arc<Wire>> {
        self.wire.as_ref()
    }

    /// Id of a process.
    pub fn pid(&self, number: usize) -> Pid {
        Pid::from_child(&self.processes[&number].child)
    }

    /// Sends a command. A process that has ended does not hear it, and its end is heard.
    pub fn tell(&mut self, number: usize, command: &Command) {
        let line = serde_json::to_string(command).expect("a command is JSON");
        if let Some(process) = self.processes.get_mut(&number) {
            let _ = writeln!(process.stdin, "{line}");
        }
    }

    /// The next news; none before this time.
    pub fn next(&self, until: Instant) -> Option<Heard> {
        self.heard.recv_timeout(until.saturating_duration_since(Instant::now())).ok()
    }

    /// Waits for a report of each of these processes.
    ///
    /// # Errors
    /// [`Error::NotReady`] with the first other report, or with those that said nothing.
    pub fn expect(
        &mut self,
        processes: impl IntoIterator<Item = usize>,
        what: &str,
        is_it: impl Fn(&Report) -> bool,
    ) -> Result<()> {
        let mut left: Vec<usize> = processes.into_iter().collect();
        let until = Instant::now() + START;
        while !left.is_empty() {
            let Some(Heard { from, news, .. }) = self.next(until) else {
                return Err(Error::NotReady { what: format!("{what}: nothing from ranks {left:?}") });
            };
            match news {
                _ if !left.contains(&from) => {}
                News::Said(report) if is_it(&report) => left.retain(|&rank| rank != from),
                other => {
                    let words = self.last_words(from);
                    return Err(Error::NotReady { what: format!("{what}: rank {from}: {other:?} {words}") });
                }
            }
        }
        Ok(())
    }

    /// The end of a process's standard error.
    pub fn last_words(&mut self, number: usize) -> String {
        let mut words = String::new();
        if let Some(Process { stderr, .. }) = self.processes.get_mut(&number) {
            // What cannot be read is not shown.
            let _ = stderr.rewind().and_then(|()| stderr.read_to_string(&mut words));
        }
        let lines: Vec<&str> = words.lines().collect();
        lines[lines.len().saturating_sub(SHOWN)..].join("\n")
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        std::mem::take(&mut self.processes).into_values().for_each(end);
    }
}

/// Ends a process that may have ended already. A stopped one dies of this, too.
fn end(mut process: Process) {
    let _ = process.child.kill();
    let _ = process.child.wait();
}
