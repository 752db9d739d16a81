//! The parent's side: starts ranks, sends them commands, and waits for reports.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command as Program, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use rustix::process::{Pid, Signal, kill_process};
use sidelane::plan::Strategy;
use sidelane::topology::Route;

use super::rank::{DIES_AS, MARK, ROUTE, SPARE, STRATEGY};
use super::{Command, LONG, Report};
use crate::support::network::Network;
use crate::support::processes::master_port;

/// The test of this program that serves a job.
const RANK_TEST: &str = "rank_obeys_its_job";
/// Worlds of eight processes mostly wait, so a small machine runs a few of them at a time.
static FREE: (Mutex<u32>, Condvar) = (Mutex::new(4), Condvar::new());

/// A world's turn to run, given back when dropped.
struct Turn;

impl Turn {
    fn take() -> Turn {
        let (free, freed) = &FREE;
        let free = free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free = freed.wait_while(free, |free| *free == 0).unwrap_or_else(PoisonError::into_inner);
        *free -= 1;
        Turn
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (free, freed) = &FREE;
        *free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        freed.notify_one();
    }
}

/// How the ranks of a world are started.
pub struct Setup {
    size: u32,
    /// The node of each rank.
    nodes: Vec<u32>,
    ranks: Vec<u32>,
    /// The network that the nodes are machines of, if they are not all here.
    network: Option<Arc<Network>>,
    /// For one rank, or for all.
    vars: Vec<(Option<u32>, &'static str, String)>,
}

impl Setup {
    /// So many ranks on one node.
    pub fn new(size: u32) -> Setup {
        Setup {
            size,
            nodes: vec![0; size as usize],
            ranks: (0..size).collect(),
            network: None,
            vars: Vec::new(),
        }
    }

    /// A rank for each entry, on the node that it names.
    pub fn on(nodes: &[u32]) -> Setup {
        Setup { nodes: nodes.to_vec(), ..Setup::new(nodes.len() as u32) }
    }

    /// Spreads the ranks over nodes of equal size.
    pub fn nodes(self, nodes: u32) -> Setup {
        let per_node = self.size / nodes;
        Setup { nodes: (0..self.size).map(|rank| rank / per_node).collect(), ..self }
    }

    /// Each node is a machine of a network.
    pub fn across(self, network: &Arc<Network>) -> Setup {
        Setup { network: Some(Arc::clone(network)), ..self }
    }

    /// How rows reach other nodes.
    pub fn route(self, route: Route) -> Setup {
        self.var(ROUTE, route.name())
    }

    /// How rows of its layers reach the ranks of their experts.
    pub fn strategy(self, strategy: Strategy) -> Setup {
        self.var(STRATEGY, strategy.name())
    }

    /// Starts these ranks only.
    pub fn only(self, ranks: &[u32]) -> Setup {
        Setup { ranks: ranks.to_vec(), ..self }
    }

    /// One process more, which waits as a spare until the world takes it in.
    pub fn spare(mut self) -> Setup {
        let process = self.nodes.len() as u32;
        self.nodes.push(0);
        self.ranks.push(process);
        self.var_of(process, SPARE, 1).var_of(process, "RANK", 0).var_of(process, "LOCAL_RANK", 0)
    }

    /// One that dies as soon as a world takes it in, before the world is built.
    pub fn dying_spare(self) -> Setup {
        let process = self.nodes.len() as u32;
        let rank = self.size;
        self.spare().var_of(process, DIES_AS, rank)
    }

    /// Sets a variable for all ranks.
    pub fn var(mut self, name: &'static str, value: impl ToString) -> Setup {
        self.vars.push((None, name, value.to_string()));
        self
    }

    /// Sets a variable for one rank.
    pub fn var_of(mut self, rank: u32, name: &'static str, value: impl ToString) -> Setup {
        self.vars.push((Some(rank), name, value.to_string()));
        self
    }

    /// Starts the ranks and returns when each of them has joined the world.
    pub fn join(self) -> Job {
        let size = self.size;
        let mut job = self.start();
        for (rank, report) in job.hear(0..size) {
            let previous = (0..size).collect();
            assert_eq!(report.said, Report::Joined { rank, size, epoch: 0, previous });
        }
        job
    }

    /// Starts the ranks; their first report says whether they have joined.
    pub fn start(self) -> Job {
        let turn = Turn::take();
        let port = master_port();
        let (tell, heard) = channel();
        let ranks = self.ranks.iter().map(|&rank| (rank, self.spawn(rank, port, tell.clone()))).collect();
        Job { ranks, heard, _turn: turn }
    }

    fn spawn(&self, rank: u32, port: u16, tell: Sender<(u32, News)>) -> Process {
        let (line, theirs) = UnixStream::pair().expect("a socket pair");
        let stderr = rustix::fs::memfd_create("stderr", MemfdFlags::CLOEXEC).expect("a memfd");
        let stderr = File::from(stderr);
        let job = format!("{} at {port}", std::process::id());
        let (here, node) = (std::env::current_exe().expect("this program"), self.nodes[rank as usize]);
        let (mut program, master, local_size) = match &self.network {
            None => (Program::new(here), "127.0.0.1".to_owned(), self.size),
            Some(network) => {
                let local = self.nodes.iter().filter(|&&other| other == node).count();
                (network.run(node, &here), Network::address(0), local as u32)
            }
        };
        let local_rank = self.nodes[..rank as usize].iter().filter(|&&other| other == node).count() as u32;
        let local_rank = if self.network.is_some() { local_rank } else { rank };
        program
            .args([RANK_TEST, "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env(MARK, "1")
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", self.size.to_string())
            .env("LOCAL_RANK", local_rank.to_string())
            .env("LOCAL_WORLD_SIZE", local_size.to_string())
            .env("MASTER_ADDR", master)
            .env("MASTER_PORT", port.to_string())
            .env("SIDELANE_JOB", job)
            .env("SIDELANE_SECRET", "a secret of this test alone")
            .env("SIDELANE_NODE", node.to_string())
            .env("SIDELANE_HEAP", "4M")
            .env("SIDELANE_SYMMETRIC", "2M")
            .env("SIDELANE_RENDEZVOUS_MS", "60000")
            .env("SIDELANE_DEADLINE_MS", "60000")
            .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(stderr.try_clone().expect("a second handle"));
        let foreign = ["PORT", "LAUNCHER_FD", "SECRET_FILE", "SIMD", "NET", "TCP_ADDRESS"];
        for name in foreign.map(|name| format!("SIDELANE_{name}")) {
            program.env_remove(name);
        }
        for (whose, name, value) in &self.vars {
            if whose.is_none_or(|whose| whose == rank) {
                program.env(name, value);
            }
        }
        let child = program.spawn().expect("a process");
        // The program holds the other end of the line, which must end with the child.
        drop(program);
        let listener = line.try_clone().expect("a second handle");
        thread::spawn(move || listen(rank, listener, &tell));
        Process { child, line, stderr, said: VecDeque::new(), ended: false }
    }
}

/// Forwards a rank's reports, with their times, until it ends.
fn listen(rank: u32, line: UnixStream, tell: &Sender<(u32, News)>) {
    for line in BufReader::new(line).lines() {
        let Ok(report) = line.map_err(drop).and_then(|line| serde_json::from_str(&line).map_err(drop)) else {
            break;
        };
        if tell.send((rank, News::Said(Heard { said: report, at: Instant::now() }))).is_err() {
            return;
        }
    }
    // No receiver is left at the end of the test.
    let _ = tell.send((rank, News::Ended));
}

enum News {
    Said(Heard),
    Ended,
}

struct Process {
    child: Child,
    line: UnixStream,
    stderr: File,
    /// Reports that no test code has read yet.
    said: VecDeque<Heard>,
    ended: bool,
}

/// A report and when it came.
pub struct Heard {
    pub said: Report,
    pub at: Instant,
}

/// The ranks of a world, as processes. Dropping it kills them.
pub struct Job {
    ranks: BTreeMap<u32, Process>,
    heard: Receiver<(u32, News)>,
    _turn: Turn,
}

impl Job {
    /// Sends commands to ranks.
    pub fn tell(&mut self, ranks: impl IntoIterator<Item = u32>, command: Command) {
        let line = serde_json::to_string(&command).expect("a command is JSON");
        for rank in ranks {
            let told = writeln!(self.process(rank).line, "{line}");
            assert!(told.is_ok(), "rank {rank} is gone: {}", self.last_words(rank));
        }
    }

    /// The next report of each of these ranks. An end instead of one fails the test.
    pub fn hear(&mut self, ranks: impl IntoIterator<Item = u32>) -> BTreeMap<u32, Heard> {
        let until = Instant::now() + LONG;
        let mut reports = BTreeMap::new();
        for rank in ranks {
            let heard = loop {
                if let Some(heard) = self.process(rank).said.pop_front() {
                    break heard;
                }
                assert!(!self.process(rank).ended, "rank {rank} ended: {}", self.last_words(rank));
                assert!(self.listen(until), "nothing from rank {rank}: {}", self.last_words(rank));
            };
            reports.insert(rank, heard);
        }
        reports
    }

    /// The next report of a rank, if it has come.
    pub fn heard(&mut self, rank: u32) -> Option<Heard> {
        while self.listen(Instant::now()) {}
        self.process(rank).said.pop_front()
    }

    /// Demands that no rank says anything, or ends, for so long.
    pub fn demand_silence(&mut self, time: Duration) {
        assert!(!self.listen(Instant::now() + time), "somebody spoke");
    }

    /// Takes in one piece of news. False if there is none before a point in time.
    fn listen(&mut self, until: Instant) -> bool {
        let Ok((rank, news)) = self.heard.recv_timeout(until.saturating_duration_since(Instant::now()))
        else {
            return false;
        };
        match news {
            News::Said(heard) => self.process(rank).said.push_back(heard),
            News::Ended => self.process(rank).ended = true,
        }
        true
    }

    /// Demands the same report of each of these ranks within a time. Returns the longest it took.
    pub fn demand(
        &mut self,
        ranks: impl IntoIterator<Item = u32>,
        since: Instant,
        within: Duration,
        expected: &Report,
    ) -> Duration {
        let heard = self.hear(ranks).into_iter().map(|(rank, Heard { said, at })| {
            let took = at - since;
            assert_eq!(&said, expected, "rank {rank} after {took:?}");
            assert!(took <= within, "rank {rank} took {took:?}");
            took
        });
        heard.max().expect("at least one rank")
    }

    /// Rounds on these ranks, all rows of all of them right.
    pub fn verify(&mut self, ranks: impl IntoIterator<Item = u32> + Clone, rounds: u32) {
        self.tell(ranks.clone(), Command::Rounds(rounds));
        self.verified(ranks, rounds);
    }

    /// Ranks do the first half of a dispatch.
    pub fn start_round(&mut self, ranks: impl IntoIterator<Item = u32> + Clone) {
        self.tell(ranks.clone(), Command::StartRound);
        self.demand(ranks, Instant::now(), LONG, &Report::Halfway);
    }

    /// They go into its second half.
    pub fn finish_round(&mut self, ranks: impl IntoIterator<Item = u32> + Clone) {
        self.tell(ranks.clone(), Command::FinishRound);
        self.demand(ranks, Instant::now(), LONG, &Report::Finishing);
    }

    /// Demands that these ranks report rounds.
    pub fn verified(&mut self, ranks: impl IntoIterator<Item = u32>, rounds: u32) {
        let mut compared = 0;
        for (rank, Heard { said, .. }) in self.hear(ranks) {
            let Report::Verified { rounds: seen, rows } = said else { panic!("rank {rank}: {said:?}") };
            assert_eq!(seen, rounds, "rank {rank}");
            compared += rows;
        }
        assert!(compared > 0, "rounds that move nothing prove nothing");
    }

    /// Kills a rank, as the kernel would.
    pub fn kill(&mut self, rank: u32) -> Instant {
        self.signal(rank, Signal::KILL)
    }

    /// Kills a rank as soon as it builds another world: it has made the memory for it.
    pub fn kill_in_next_build(&mut self, rank: u32) -> Instant {
        let maps = format!("/proc/{}/maps", self.process(rank).child.id());
        let heaps = || {
            let maps = std::fs::read_to_string(&maps).expect("the rank runs");
            maps.lines().filter(|line| line.contains("memfd:sidelane-heap")).count()
        };
        let (before, until) = (heaps(), Instant::now() + LONG);
        while heaps() == before {
            assert!(Instant::now() < until, "rank {rank} builds no world: {}", self.last_words(rank));
        }
        self.kill(rank)
    }

    /// Stops a rank: all its threads stand still.
    pub fn stop(&mut self, rank: u32) -> Instant {
        self.signal(rank, Signal::STOP)
    }

    /// Lets a stopped rank go on.
    pub fn wake(&mut self, rank: u32) -> Instant {
        self.signal(rank, Signal::CONT)
    }

    fn signal(&mut self, rank: u32, signal: Signal) -> Instant {
        let pid = Pid::from_child(&self.process(rank).child);
        let now = Instant::now();
        kill_process(pid, signal).expect("the rank is our child");
        now
    }

    /// Lets these ranks end, and demands that they do so in peace.
    pub fn end(&mut self, ranks: impl IntoIterator<Item = u32> + Clone) {
        self.tell(ranks.clone(), Command::End);
        for rank in ranks {
            let code = self.ended(rank);
            assert_eq!(code, Some(0), "rank {rank}: {}", self.last_words(rank));
        }
    }

    /// Waits for the end of a rank, which must have no unread report. Returns its exit code; none
    /// if a signal ended it.
    pub fn ended(&mut self, rank: u32) -> Option<i32> {
        let until = Instant::now() + LONG;
        while !self.process(rank).ended {
            assert!(self.listen(until), "rank {rank} does not end: {}", self.last_words(rank));
        }
        let unheard: Vec<Report> = self.process(rank).said.drain(..).map(|heard| heard.said).collect();
        assert_eq!(unheard, [], "rank {rank}");
        self.process(rank).child.wait().expect("our child").code()
    }

    fn process(&mut self, rank: u32) -> &mut Process {
        self.ranks.get_mut(&rank).unwrap_or_else(|| panic!("rank {rank} was not started"))
    }

    fn last_words(&mut self, rank: u32) -> String {
        let mut words = String::new();
        let stderr = &mut self.process(rank).stderr;
        let read = stderr.rewind().and_then(|()| stderr.read_to_string(&mut words));
        read.map_or_else(|error| error.to_string(), |_| words)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for process in self.ranks.values_mut() {
            // It may have ended already; a stopped one dies of this too.
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}

/// Two nodes of four.
pub const TWO_BY_FOUR: [u32; 8] = [0, 0, 0, 0, 1, 1, 1, 1];
/// Nodes of three and five.
pub const THREE_AND_FIVE: [u32; 8] = [0, 0, 0, 1, 1, 1, 1, 1];

/// All ranks below `size` but one.
pub fn others(size: u32, one: u32) -> impl Iterator<Item = u32> + Clone {
    (0..size).filter(move |&rank| rank != one)
}
