//! The parent's side: starts ranks, ends or stops them, and says when the survivors have met.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::rank::{Fault, PART, Part};
use crate::bootstrap::common::LONG;
use crate::support::network::Network;
use crate::support::processes::master_port;

/// The test of this program that serves as a rank.
const RANK_TEST: &str = "bootstrap::survivors::rank_serves_its_job";
/// How often the parent looks whether a rank was stopped or killed.
const LOOK: Duration = Duration::from_millis(10);

/// A world as one of its members has reported it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct World {
    pub epoch: u16,
    /// Ranks of the first world.
    pub members: Vec<u32>,
}

#[derive(Debug)]
enum News {
    Joined,
    World(World),
    Evicted,
    Error(String),
}

/// What has become of a rank.
#[derive(Debug, Default)]
struct Seen {
    worlds: Vec<World>,
    errors: Vec<String>,
    evicted: bool,
}

/// The ranks of a world.
pub struct Job {
    ranks: Vec<Child>,
    heard: Receiver<(u32, News)>,
    seen: BTreeMap<u32, Seen>,
}

/// How a job is started.
#[derive(Clone, Default)]
pub struct Setup {
    pub size: u32,
    pub at_least: u32,
    pub faults: BTreeMap<u32, Fault>,
    /// Machines of the ranks; none if all run here.
    pub network: Option<Arc<Network>>,
}

impl Setup {
    /// Starts the ranks, and returns when they have met.
    pub fn join(&self) -> Job {
        let (tell, heard) = channel();
        let port = master_port();
        let ranks = (0..self.size).map(|rank| self.spawn(rank, port, tell.clone())).collect();
        let job = Job { ranks, heard, seen: (0..self.size).map(|rank| (rank, Seen::default())).collect() };
        for _ in 0..self.size {
            let (rank, news) = job.heard.recv_timeout(LONG).expect("all ranks join");
            assert!(matches!(news, News::Joined), "rank {rank}: {news:?}");
        }
        job
    }

    fn spawn(&self, rank: u32, port: u16, tell: Sender<(u32, News)>) -> Child {
        let here = std::env::current_exe().expect("this program");
        let (mut program, master) = match &self.network {
            None => (Command::new(here), "127.0.0.1".to_owned()),
            Some(network) => (network.run(rank, &here), Network::address(0)),
        };
        let job = format!("{} at {port}", std::process::id());
        let (size, at_least, fault) = (self.size, self.at_least, self.faults.get(&rank).copied());
        let part = Part { rank, size, job, master, port, at_least, fault };
        let mut child = program
            .args([RANK_TEST, "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env(PART, part.text())
            .env("SIDELANE_SECRET", "a secret of this test alone")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        thread::spawn(move || {
            // The harness prints lines of its own.
            for news in lines.map_while(Result::ok).filter_map(|line| parse(&line)) {
                if tell.send((rank, news)).is_err() {
                    return;
                }
            }
        });
        child
    }
}

fn parse(line: &str) -> Option<News> {
    // The harness prints the test's name before the first line.
    let line = line.strip_prefix(&format!("test {RANK_TEST} ... ")).unwrap_or(line);
    let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
    match kind {
        "joined" => Some(News::Joined),
        "evicted" => Some(News::Evicted),
        "error" => Some(News::Error(rest.to_owned())),
        "world" => {
            let (epoch, members) = rest.split_once(' ')?;
            let members = members.split(',').map(str::parse).collect::<Result<_, _>>().ok()?;
            Some(News::World(World { epoch: epoch.parse().ok()?, members }))
        }
        _ => None,
    }
}

impl Job {
    fn pid(&self, rank: u32) -> Pid {
        Pid::from_child(&self.ranks[rank as usize])
    }

    pub fn signal(&self, rank: u32, signal: Signal) {
        // It may have ended.
        let _ = kill_process(self.pid(rank), signal);
    }

    /// Has a rank of the first world report that its connection to another one broke.
    pub fn break_connection(&mut self, by: u32, rank: u32) {
        let line = self.ranks[by as usize].stdin.as_mut().expect("a pipe");
        writeln!(line, "broken {rank}").expect("the rank listens");
    }

    /// Whether a rank runs: it was neither killed nor stopped.
    fn runs(&self, rank: u32) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid(rank).as_raw_nonzero()));
        let state = stat.ok().and_then(|stat| stat.rsplit_once(") ")?.1.chars().next());
        !matches!(state, None | Some('T' | 'Z' | 'X'))
    }

    fn hear(&mut self, limit: Duration) {
        match self.heard.recv_timeout(limit) {
            Ok((rank, news)) => {
                let seen = self.seen.entry(rank).or_default();
                match news {
                    News::World(world) => seen.worlds.push(world),
                    News::Evicted => seen.evicted = true,
                    News::Error(error) => seen.errors.push(error),
                    News::Joined => {}
                }
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
    }

    /// Waits until all ranks that run are in one world, which has no others. Returns it.
    pub fn converge(&mut self) -> Result<World, String> {
        let all: Vec<u32> = self.seen.keys().copied().collect();
        let until = Instant::now() + 3 * LONG;
        while Instant::now() < until {
            let running: Vec<u32> = all.iter().copied().filter(|&rank| self.runs(rank)).collect();
            let newest = |rank: &u32| self.seen[rank].worlds.last();
            let world = running.first().and_then(newest).cloned();
            if let Some(world) = world.filter(|world| world.members == running)
                && running.iter().all(|rank| newest(rank) == Some(&world))
            {
                return Ok(world);
            }
            self.hear(LOOK);
        }
        Err(format!("the survivors did not meet: {:#?}", self.seen))
    }

    /// Listens for a while.
    pub fn hear_for(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            self.hear(LOOK);
        }
    }

    /// Waits until a rank has heard that it is out.
    pub fn hear_eviction(&mut self, rank: u32) -> Result<(), String> {
        let until = Instant::now() + LONG;
        while Instant::now() < until && !self.seen[&rank].evicted {
            self.hear(LOOK);
        }
        let seen = &self.seen[&rank];
        if seen.evicted { Ok(()) } else { Err(format!("rank {rank} does not know that it is out: {seen:?}")) }
    }

    /// Waits until each rank that runs is in one world of so many ranks, or knows that it is out.
    /// None if there can be no such world: too few are not out, or are members of the last one.
    pub fn settle(&mut self, at_least: u32) -> Result<Option<World>, String> {
        let all: Vec<u32> = self.seen.keys().copied().collect();
        let until = Instant::now() + 3 * LONG;
        while Instant::now() < until {
            let running = all.iter().copied().filter(|&rank| self.runs(rank) && !self.seen[&rank].evicted);
            let running: Vec<u32> = running.collect();
            let newest = |rank: &u32| self.seen[rank].worlds.last();
            if let Some(last) = all.iter().filter_map(newest).max() {
                let left = last.members.iter().filter(|rank| running.contains(rank)).count();
                if left < at_least as usize {
                    return Ok(None);
                }
            }
            if running.len() < at_least as usize {
                return Ok(None);
            }
            let world = running.first().and_then(newest).filter(|world| world.members == running).cloned();
            if let Some(world) = world.filter(|world| world.members.len() >= at_least as usize)
                && running.iter().all(|rank| newest(rank) == Some(&world))
            {
                return Ok(Some(world));
            }
            self.hear(LOOK);
        }
        Err(format!("the ranks did not settle: {:#?}", self.seen))
    }

    /// Each world that some rank was in must be followed by a part of it: no epoch has two worlds.
    pub fn check_succession(&self) -> Result<(), String> {
        let mut worlds: Vec<&World> = self.seen.values().flat_map(|seen| &seen.worlds).collect();
        worlds.sort();
        worlds.dedup();
        let follows = |two: &&[&World]| {
            two[0].epoch < two[1].epoch && two[1].members.iter().all(|rank| two[0].members.contains(rank))
        };
        let split = worlds.windows(2).find(|two| !follows(two));
        split.map_or(Ok(()), |two| Err(format!("a split: {two:?}")))
    }

    /// All errors of rebuilds that were followed by another rebuild.
    pub fn errors(&self) -> usize {
        self.seen.values().map(|seen| seen.errors.len()).sum()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}
