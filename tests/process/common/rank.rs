//! A rank: joins the world of its environment and runs its commands.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;

use sidelane::bootstrap::{Identity, Secret, panic_in};
use sidelane::collective::Communicator;
use sidelane::plan::Strategy;
use sidelane::topology::Route;
use sidelane::{Error, ExpertParallel, Options, World};

use super::reference::Round;
use super::{Command, Failure, LONG, Memory, Report, Thread};

/// Set in processes that a [`Job`](super::job::Job) started.
pub const MARK: &str = "SIDELANE_TEST_RANK";
/// Names the route of a rank's layers; direct if it is not set.
pub const ROUTE: &str = "SIDELANE_TEST_ROUTE";
/// Names the strategy of a rank's layers; exchange if it is not set.
pub const STRATEGY: &str = "SIDELANE_TEST_STRATEGY";
/// Set in a process that is no rank before a world takes it in.
pub const SPARE: &str = "SIDELANE_TEST_SPARE";
/// Set in a spare that dies as soon as it is in a world as this rank, before the world is built.
pub const DIES_AS: &str = "SIDELANE_TEST_DIES_AS";
/// Rounds after which a looping rank says that it runs.
const WARM: u64 = 3;

/// Serves the job that started this process.
pub fn serve() {
    let mut talk = Talk::new();
    let joined = match std::env::var_os(SPARE) {
        None => World::from_env(),
        Some(_) => spare(),
    };
    match joined {
        Ok(world) => Rank { talk, world, ep: None, rounds: 0, way: (route(), strategy()) }.obey(),
        Err(error) => talk.say(&Report::Failed(error.into())),
    }
}

fn spare() -> Result<World, Error> {
    if let Some(rank) = std::env::var(DIES_AS).ok().and_then(|rank| rank.parse().ok()) {
        std::panic::set_hook(Box::new(|_| std::process::abort()));
        panic_in(&Thread::Link.of(rank));
    }
    World::spare(&Identity::from_env()?, Secret::from_env()?, Options::from_env()?, LONG)
}

fn route() -> Route {
    let name = std::env::var(ROUTE).unwrap_or_default();
    Route::ALL.into_iter().find(|route| route.name() == name).unwrap_or_default()
}

fn strategy() -> Strategy {
    let name = std::env::var(STRATEGY).unwrap_or_default();
    Strategy::ALL.into_iter().find(|strategy| strategy.name() == name).unwrap_or_default()
}

/// A rank's end of the line to its job.
pub struct Talk {
    commands: BufReader<UnixStream>,
    reports: UnixStream,
}

impl Talk {
    /// The connection to the job that started the process.
    pub fn new() -> Talk {
        let stdin = std::io::stdin().as_fd().try_clone_to_owned().expect("stdin");
        let reports = UnixStream::from(stdin);
        Talk { commands: BufReader::new(reports.try_clone().expect("a second handle")), reports }
    }

    /// The next command; a job that is gone has no more use for its ranks.
    pub fn hear(&mut self) -> Command {
        let mut line = String::new();
        match self.commands.read_line(&mut line) {
            Ok(read) if read > 0 => serde_json::from_str(&line).expect("a command"),
            _ => Command::End,
        }
    }

    /// Reports to the job.
    pub fn say(&mut self, report: &Report) {
        let line = serde_json::to_string(report).expect("a report is JSON");
        writeln!(self.reports, "{line}").expect("the job listens");
    }
}

struct Rank {
    talk: Talk,
    world: World,
    ep: Option<ExpertParallel>,
    rounds: u64,
    way: (Route, Strategy),
}

impl Rank {
    fn obey(mut self) {
        let mut report = Ok(self.joined());
        loop {
            self.talk.say(&report.unwrap_or_else(Report::Failed));
            report = match self.talk.hear() {
                Command::Rounds(rounds) => self.rounds(rounds).map_err(Failure::from),
                Command::Loop => self.run().map_err(Failure::from),
                Command::AllReduceForever => self.all_reduce().map_err(Failure::from),
                Command::LandForever => self.land().map_err(Failure::from),
                Command::StartRound => self.in_halves().map_err(Failure::from),
                Command::FinishRound => Err(Failure::Other("no round was started".into())),
                Command::HoldStream | Command::FreeMeanwhile => {
                    Err(Failure::Other("no stream is here".into()))
                }
                Command::LastRound => return self.end_with_a_round(),
                Command::AwaitDeath => Err(self.await_death()),
                Command::Rebuild => self.go_on_in(|world| world.rebuild(LONG, 1)).map_err(Failure::from),
                Command::Grow => self.go_on_in(|world| world.grow(LONG)).map_err(Failure::from),
                Command::ListMemory => Ok(Report::Memory(memory())),
                Command::NameRail => Ok(self.name_rail()),
                Command::ResetWires => Ok(Report::Reset(reset_wires())),
                Command::Scribble => Ok(Report::Scribbled(scribble())),
                Command::Panic => panic!("told to"),
                Command::Doom(thread) => {
                    panic_in(&thread.of(self.world.rank()));
                    Ok(Report::Doomed)
                }
                Command::End => return,
            };
        }
    }

    fn joined(&self) -> Report {
        let world = &self.world;
        let previous = world.previous_ranks().to_vec();
        Report::Joined { rank: world.rank(), size: world.size(), epoch: world.epoch(), previous }
    }

    fn rounds(&mut self, rounds: u32) -> Result<Report, Error> {
        let rows = (0..rounds).map(|_| self.round(None)).sum::<Result<u64, Error>>()?;
        Ok(Report::Verified { rounds, rows })
    }

    fn run(&mut self) -> Result<Report, Error> {
        for round in 1.. {
            self.round(None)?;
            if round == WARM {
                self.talk.say(&Report::Running);
            }
        }
        unreachable!("only an error ends the loop")
    }

    fn all_reduce(&mut self) -> Result<Report, Error> {
        const ELEMENTS: usize = 1 << 20;
        let mut communicator = Communicator::builder(&self.world.all()?).chunk(16 << 10).build()?;
        let sum = (1..=self.world.size()).sum::<u32>() as f32;
        for call in 1.. {
            let mut data = vec![1.0 + self.world.rank() as f32; ELEMENTS];
            communicator.all_reduce(&mut data)?;
            assert!(data.iter().all(|&element| element == sum), "call {call}");
            if call == WARM {
                self.talk.say(&Report::Running);
            }
        }
        unreachable!("only an error ends the loop")
    }

    fn land(&mut self) -> Result<Report, Error> {
        const PART: usize = 32 << 10;
        let ranks = self.world.size() as usize;
        let bytes = (4 * PART * ranks) as u64;
        let mut communicator =
            Communicator::builder(&self.world.all()?).chunk(16 << 10).zero_copy_bytes(bytes).build()?;
        for call in 1.. {
            let of = |rank: u32| (100 * call + u64::from(rank)) as f32;
            let mine = vec![of(self.world.rank()); PART * ranks];
            let landed = communicator.all_to_all_zero_copy(&mine)?;
            for (part, from) in landed.chunks_exact(PART).zip(0..) {
                assert!(part.iter().all(|&element| element == of(from)), "call {call}");
            }
            if call == WARM {
                self.talk.say(&Report::Running);
            }
        }
        unreachable!("only an error ends the loop")
    }

    /// A round that stops after its first half until the job continues it.
    fn in_halves(&mut self) -> Result<Report, Error> {
        let rows = self.round(Some(|talk| {
            talk.say(&Report::Halfway);
            assert_eq!(talk.hear(), Command::FinishRound);
            talk.say(&Report::Finishing);
        }))?;
        Ok(Report::Verified { rounds: 1, rows })
    }

    fn end_with_a_round(mut self) {
        let report = self.rounds(1).map_err(Failure::from).unwrap_or_else(Report::Failed);
        let Rank { mut talk, world, ep, .. } = self;
        drop((ep, world));
        talk.say(&report);
    }

    /// Every other round is made in halves, and every round that something is to be done between.
    fn round(&mut self, between_halves: Option<fn(&mut Talk)>) -> Result<u64, Error> {
        let Rank { talk, world, ep, rounds, way } = self;
        let ep = match ep {
            Some(ep) => ep,
            None => ep.insert(Round::builder(world, *way)?),
        };
        *rounds += 1;
        let in_halves = between_halves.is_some() || rounds.is_multiple_of(2);
        world.pool().poison(0xff);
        let round = Round::new(world, *rounds % 4);
        let routing = round.routing();
        let landed = if in_halves {
            let started = ep.start_dispatch(round.x(), &routing)?;
            between_halves.into_iter().for_each(|act| act(talk));
            started.finish()?
        } else {
            ep.dispatch(round.x(), &routing)?
        };
        round.complete(ep, landed, in_halves)
    }

    fn name_rail(&self) -> Report {
        let net = self.world.net().map(|net| format!("{} ({})", net.lane, net.reason));
        Report::Net(net.unwrap_or_else(|| "none".to_owned()))
    }

    fn await_death(&self) -> Failure {
        let (tell, heard) = mpsc::channel();
        self.world.health().on_failure(move |cause| {
            // Only the first one is heard.
            let _ = tell.send(cause.clone());
        });
        heard.recv().expect("the world keeps its watchers").into()
    }

    fn go_on_in(&mut self, next: impl FnOnce(&World) -> Result<World, Error>) -> Result<Report, Error> {
        let next = next(&self.world)?;
        self.ep = None;
        self.rounds = 0;
        self.world = next;
        Ok(self.joined())
    }
}

/// A mapped range of one of the library's segments.
struct Range {
    start: u64,
    end: u64,
    inode: u64,
    name: String,
}

fn ranges() -> Vec<Range> {
    let maps = fs::read_to_string("/proc/self/maps").expect("the kernel tells what is mapped");
    let hex = |digits: &str| u64::from_str_radix(digits, 16).expect("an address");
    let range = |line: &str| {
        let (_, name) = line.split_once("/memfd:")?;
        let mut fields = line.split_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let inode = fields.nth(3)?.parse().ok()?;
        let name = name.split_whitespace().next()?.to_owned();
        Some(Range { start: hex(start), end: hex(end), inode, name })
    };
    maps.lines().filter_map(range).filter(|range| range.name.starts_with("sidelane")).collect()
}

fn memory() -> Memory {
    let ranges = ranges();
    let inodes = |name: &str| {
        let named = ranges.iter().filter(|range| range.name == name).map(|range| range.inode);
        named.collect::<BTreeSet<u64>>().into_iter().collect()
    };
    let known = ["sidelane-heap", "sidelane-ring"];
    let others = ranges.iter().map(|range| range.name.clone());
    let others = others.filter(|name| !known.contains(&name.as_str())).collect();
    Memory { heaps: inodes(known[0]), wires: inodes(known[1]), others, open: open() }
}

/// Descriptors of shared memory that this process holds.
fn open() -> Vec<String> {
    let fds = fs::read_dir("/proc/self/fd").expect("the kernel tells what is open").flatten();
    let targets = fds.filter_map(|fd| fs::read_link(fd.path()).ok());
    let names = targets.map(|target| target.to_string_lossy().into_owned());
    names.filter(|name| name.contains("memfd:sidelane")).collect()
}

/// The worst actions of a rank that does not know yet that the others continued without it.
fn scribble() -> u64 {
    let memory = OpenOptions::new().write(true).open("/proc/self/mem").expect("own memory can be written");
    let garbage = vec![0xa5; 1 << 20];
    let mut written = 0;
    for range in ranges() {
        for at in (range.start..range.end).step_by(garbage.len()) {
            let part = &garbage[..garbage.len().min((range.end - at) as usize)];
            memory.write_all_at(part, at).expect("a mapped range can be written");
            written += part.len() as u64;
        }
    }
    written
}

/// Resets this process's connections to ranks of other nodes. Returns how many there were.
fn reset_wires() -> u32 {
    let master = std::env::var("MASTER_PORT").expect("a job").parse().expect("a port");
    super::wires::reset(rustix::process::getpid(), master)
}
