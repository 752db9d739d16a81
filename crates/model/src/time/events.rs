//! Lines at work, event by event.
//!
//! ```text
//!   Program: tasks of a rank's host --Hand--> tracks of its streams, engines and NIC --events--> marks of phases, busy times
//! ```
//!
//! Events are processed in order of time, and in order of creation where times are equal: the same
//! in every run. Nodes are equal and lie in a ring: all of them are simulated, or one that stands
//! for all.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use sidelane_core::schedule::Flag;

use super::hardware::{Place, at_rate};
use super::{Bottleneck, Executor, Hardware, Phase, PhaseTime, RankWork, Resource, Timing};

/// Work of one rank: the tasks of its host, and the requests to all its lines.
#[derive(Debug, Default)]
pub(super) struct Program {
    pub tasks: VecDeque<Task>,
    pub work: RankWork,
}

/// A word: the rank that reads it, and its name there.
type Word = (u32, Name);

/// Name of a word at its reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Name {
    /// A flag, and the rank that it speaks of.
    Flag(u32, Flag),
    /// A word or an event of the rank's own.
    Own(OwnWord),
}

/// Words and events by which the streams and the host of one rank order their work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum OwnWord {
    /// The caller's stream has come to the call: a word for the host.
    Called,
    /// Event: the caller's stream has come so far that the stream of copies may go on.
    Packed,
    /// Event: the stream of copies has done what the caller's stream needs next.
    Done,
    /// The stream of copies has followed the caller's: a word for the host.
    Marked,
}

impl OwnWord {
    /// Whether it is an event, which takes no memory operation.
    fn is_event(self) -> bool {
        matches!(self, OwnWord::Packed | OwnWord::Done)
    }
}

/// Something that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A line is free.
    Free(usize),
    /// A word is raised.
    Raise(Word, u64),
    /// A copy takes the link of its source and that of its target for `ns` each; its line is in it
    /// until `end` at least.
    Near { line: usize, from: u32, to: u32, ns: u64, end: u64 },
    /// Bytes of a rank reach another rank's NIC (on the host, a core), the last of them not before
    /// `end`.
    Far { from: u32, to: u32, ns: u64, end: u64 },
}

/// A line.
#[derive(Debug, Default)]
struct State {
    tasks: Tracks,
    /// In a task, or waiting.
    occupied: bool,
    /// Lines that wait for this one to have nothing to do.
    joined: Vec<usize>,
    /// Time in tasks, waits left out.
    busy: u64,
}

/// One side of a link or NIC, or a core: first come, first served.
#[derive(Clone, Copy, Debug, Default)]
struct Server {
    free: u64,
    busy: u64,
}

impl Server {
    /// Serves for this long, after all requests that came before `now`; returns the end. Called
    /// when the work is there, never ahead, since the server would idle until then.
    fn serve(&mut self, now: u64, ns: u64) -> u64 {
        self.free = self.free.max(now) + ns;
        self.busy += ns;
        self.free
    }
}

pub(super) struct Machine<'a> {
    hardware: &'a Hardware,
    ring: Ring,
    lines: Vec<State>,
    /// Lines of each rank.
    own: usize,
    /// Of each rank: out of it, and into it.
    links: [Vec<Server>; 2],
    nics: Vec<Server>,
    cores: Vec<Server>,
    /// Whether these are one for each rank.
    own_cores: bool,
    words: HashMap<Word, u64>,
    waiting: HashMap<Word, (usize, u64)>,
    /// When the last message of a rank to another is there: words do not overtake it.
    arrived: HashMap<(u32, u32), u64>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    made: u64,
    marks: Vec<Vec<(Phase, u64)>>,
    works: Vec<RankWork>,
}

/// Lines of each rank without its engines: host, stream of copies, caller's stream. The lines of
/// NICs come behind those of all ranks.
const WITHOUT_ENGINES: usize = 3;

impl<'a> Machine<'a> {
    pub fn new(ring: Ring, hardware: &'a Hardware) -> Self {
        let ranks = ring.simulated() as usize;
        let nics = (ring.simulated() / ring.members * per_node(ring, hardware)) as usize;
        // One engine for all peers is the stream's own line.
        let engines = if hardware.engines.switched { 0 } else { ring.members as usize };
        let own = WITHOUT_ENGINES + engines;
        let own_cores = hardware.executor == Executor::Host && hardware.host.cores == 0;
        let cores = if own_cores { ranks } else { hardware.host.cores as usize };
        Machine {
            hardware,
            ring,
            lines: std::iter::repeat_with(State::default).take(ranks * own + nics).collect(),
            own,
            links: [vec![Server::default(); ranks], vec![Server::default(); ranks]],
            nics: vec![Server::default(); nics],
            cores: vec![Server::default(); cores],
            own_cores,
            words: HashMap::new(),
            waiting: HashMap::new(),
            arrived: HashMap::new(),
            events: BinaryHeap::new(),
            made: 0,
            marks: vec![Vec::new(); ranks],
            works: vec![RankWork::default(); ranks],
        }
    }

    /// Adds work to a rank.
    pub fn load(&mut self, rank: u32, program: Program) {
        self.works[rank as usize] = program.work;
        let line = self.line(rank, Line::Host);
        let tasks = &mut self.lines[line].tasks;
        program.tasks.into_iter().for_each(|task| tasks.push((rank, rank), task));
        self.lines[line].occupied = true;
        self.at(0, Event::Free(line));
    }

    /// Plays to the end.
    pub fn run(mut self) -> Timing {
        while let Some(Reverse((now, _, event))) = self.events.pop() {
            match event {
                Event::Free(line) => self.step(line, now),
                Event::Raise(word, value) => self.raise(now, word, value),
                Event::Near { line, from, to, ns, end } => {
                    let [out, into] = &mut self.links;
                    let sent = out[from as usize].serve(now, ns);
                    let end = end.max(sent).max(into[to as usize].serve(now, ns));
                    self.free_at(line, end, end - now);
                }
                Event::Far { from, to, ns, end } => self.receive(now, (from, to), ns, end),
            }
        }
        assert!(self.waiting.is_empty(), "a proved schedule ends: {:?}", self.waiting);
        self.timing()
    }

    fn raise(&mut self, now: u64, word: Word, value: u64) {
        let seen = self.words.entry(word).or_default();
        *seen = value.max(*seen);
        if let Some(&(line, _)) = self.waiting.get(&word).filter(|(_, wanted)| *wanted <= value) {
            self.waiting.remove(&word);
            self.step(line, now);
        }
    }

    /// Runs the next tasks of a line, until it is occupied or has no task.
    fn step(&mut self, line: usize, now: u64) {
        while let Some((me, task)) = self.lines[line].tasks.pop() {
            match task {
                Task::Mark(phase) => self.marks[me as usize].push((phase, now)),
                Task::Hand(to, task) => {
                    let waiter = match (to, &*task) {
                        (Line::Nic, Task::Send { to, .. } | Task::Signal { to, .. }) => *to,
                        _ => me,
                    };
                    let to = self.line(me, to);
                    self.lines[to].tasks.push((me, waiter), *task);
                    if !std::mem::replace(&mut self.lines[to].occupied, true) {
                        self.at(now, Event::Free(to));
                    }
                }
                Task::Join(other) => {
                    let other = self.line(me, other);
                    if self.lines[other].occupied {
                        self.lines[other].joined.push(line);
                        return;
                    }
                }
                Task::Wait { of, flag, value } => {
                    if !self.sees(line, (me, Name::Flag(of, flag)), value) {
                        self.lines[line].tasks.put_back((me, me), task);
                        return;
                    }
                    return self.occupy(line, now, me, self.per_word(line));
                }
                Task::Hear(word, value) => {
                    if !self.sees(line, (me, Name::Own(word)), value) {
                        self.lines[line].tasks.put_back((me, me), task);
                        return;
                    }
                    let ns = if word.is_event() { 0 } else { self.per_word(line) };
                    return self.occupy(line, now, me, ns);
                }
                Task::Tell(word, value) => {
                    let (ns, latency) = match word.is_event() {
                        true => (0, 0),
                        false => (self.per_word(line), self.hardware.link.latency),
                    };
                    self.at(now + ns + latency, Event::Raise((me, Name::Own(word)), value));
                    return self.occupy(line, now, me, ns);
                }
                Task::Busy(ns) => return self.occupy(line, now, me, ns),
                Task::Copy { place, from, to, copies, bytes } => {
                    return self.copy(line, now, (me, place), (from, to), (copies, bytes));
                }
                Task::Send { to, messages, bytes, rest } => {
                    return self.send(line, now, (me, to), messages, (bytes, rest));
                }
                Task::Signal { to, of, flag, value } => {
                    return self.signal(line, now, me, (to, of, flag), value);
                }
            }
        }
        self.lines[line].occupied = false;
        for joined in std::mem::take(&mut self.lines[line].joined) {
            self.at(now, Event::Free(joined));
        }
    }

    /// A line of a rank is busy, on a core where those are counted.
    fn occupy(&mut self, line: usize, now: u64, me: u32, ns: u64) {
        let end = self.on_core(me, now, ns);
        self.free_at(line, end, ns);
    }

    /// When a core has worked for so long: the rank's own, or the first of all that is free.
    fn on_core(&mut self, rank: u32, now: u64, ns: u64) -> u64 {
        let core = match self.own_cores {
            true => self.cores.get_mut(rank as usize),
            false => self.cores.iter_mut().min_by_key(|core| core.free),
        };
        core.map_or(now + ns, |core| core.serve(now, ns))
    }

    /// Whether a word has this value; else the line waits for it.
    fn sees(&mut self, line: usize, word: Word, value: u64) -> bool {
        let seen = self.words.get(&word).is_some_and(|&seen| seen >= value);
        if !seen {
            self.waiting.insert(word, (line, value));
        }
        seen
    }

    fn copy(
        &mut self,
        line: usize,
        now: u64,
        (me, place): (u32, Place),
        (from, to): (u32, u32),
        (copies, bytes): (u64, u64),
    ) {
        let Hardware { engines, link, executor, .. } = self.hardware;
        if *executor == Executor::Host {
            let cost = engines.cost(place, bytes);
            return self.occupy(line, now, me, copies * cost.per_copy + at_rate(bytes, cost.rate));
        }
        let moves = engines.copy(place, bytes);
        if place != Place::Peer {
            return self.free_at(line, now + moves, moves);
        }
        let ((from, _), (to, _)) = (self.ring.represented_by(from), self.ring.represented_by(to));
        self.at(now, Event::Near { line, from, to, ns: at_rate(bytes, link.rate), end: now + moves });
    }

    fn send(
        &mut self,
        line: usize,
        now: u64,
        (me, to): (u32, u32),
        messages: u64,
        (bytes, rest): (u64, u64),
    ) {
        let nic = self.hardware.nic;
        // Pieces add up to the time of the whole.
        let moves = at_rate(bytes + rest, nic.rate) - at_rate(rest, nic.rate);
        let prices = messages * nic.per_message;
        // On the host one core copies into the ring and another out of it: there is nothing to copy
        // out before the ring has bytes.
        let (end, comes) = match self.hardware.executor {
            Executor::Host => {
                let end = self.on_core(me, now, prices + moves);
                (end, end)
            }
            Executor::Device => (now + prices + moves, now + prices),
        };
        // Before the line is free, so that a word behind these bytes knows when they are there.
        self.at(comes, Event::Far { from: me, to, ns: moves, end });
        self.free_at(line, end, prices + moves);
    }

    fn receive(&mut self, now: u64, (from, to): (u32, u32), ns: u64, end: u64) {
        let (model_rank, _) = self.ring.represented_by(to);
        let served = match self.hardware.executor {
            Executor::Host => self.on_core(model_rank, now, ns),
            Executor::Device => {
                let there = self.nic_of(model_rank);
                self.nics[there].serve(now, ns)
            }
        };
        let last = self.arrived.entry((from, to)).or_default();
        *last = end.max(served).max(*last);
    }

    fn signal(&mut self, line: usize, now: u64, me: u32, (to, of, flag): (u32, u32, Flag), value: u64) {
        let (model_rank, by) = self.ring.represented_by(to);
        let word = (model_rank, Name::Flag(self.ring.turned_back(of, by), flag));
        let Hardware { host, link, nic, .. } = self.hardware;
        let ns = self.per_word(line);
        let said = self.on_core(me, now, ns);
        let seen = match self.kind(line) {
            Line::Nic => said.max(self.arrived.get(&(me, to)).copied().unwrap_or(0)) + nic.latency,
            Line::Host => said + host.latency,
            Line::Stream | Line::Caller | Line::Engine(_) => said + link.latency,
        };
        self.at(seen, Event::Raise(word, value));
        self.free_at(line, said, ns);
    }

    fn kind(&self, line: usize) -> Line {
        match line {
            _ if line >= self.works.len() * self.own => Line::Nic,
            _ => match line % self.own {
                0 => Line::Host,
                1 => Line::Stream,
                2 => Line::Caller,
                engine => Line::Engine((engine - WITHOUT_ENGINES) as u32),
            },
        }
    }

    /// The cost of a word for the line that raises it or finds it raised.
    fn per_word(&self, line: usize) -> u64 {
        match self.kind(line) {
            Line::Nic => self.hardware.nic.per_message,
            Line::Host => self.hardware.host.signal,
            Line::Stream | Line::Caller | Line::Engine(_) => self.hardware.engines.per_word,
        }
    }

    fn timing(self) -> Timing {
        let ranks = 0..self.works.len() as u32;
        let ended = |rank: &u32| self.marks[*rank as usize].last().map_or(0, |&(_, at)| at);
        let slowest = ranks.clone().max_by_key(|rank| (ended(rank), Reverse(*rank))).unwrap_or(0);
        let mut before = 0;
        let lap =
            |&(phase, at): &(Phase, u64)| PhaseTime { phase, ns: at - std::mem::replace(&mut before, at) };
        let phases: Vec<PhaseTime> = self.marks[slowest as usize].iter().map(lap).collect();
        let of =
            |line: Line| ranks.clone().map(|rank| self.lines[self.line(rank, line)].busy).max().unwrap_or(0);
        let served = |servers: &[Server]| servers.iter().map(|server| server.busy).max().unwrap_or(0);
        let host = if self.cores.is_empty() { of(Line::Host) } else { served(&self.cores) };
        let engines = (0..self.own - WITHOUT_ENGINES).map(|nth| of(Line::Engine(nth as u32))).max();
        let busy = |part| match part {
            Resource::Host => host,
            Resource::Engines => of(Line::Stream) + engines.unwrap_or(0),
            Resource::Link => served(&self.links[0]).max(served(&self.links[1])),
            Resource::NicOut => of(Line::Nic),
            Resource::NicIn => served(&self.nics),
            Resource::Compute => of(Line::Caller),
        };
        let parts = Resource::ALL.map(|part| (busy(part), part));
        let &(most, part) = parts.iter().rev().max_by_key(|(busy, _)| *busy).expect("there are parts");
        let nics = ranks.clone().map(|rank| self.nic_of(rank)).collect::<Vec<_>>();
        Timing {
            ns: phases.iter().map(|lap| lap.ns).sum(),
            bottleneck: Bottleneck { part, ns: most },
            roofline: Bottleneck::roofline(&self.works, &nics, self.hardware),
            max: self.works.iter().fold(RankWork::default(), |a, &b| a.each(b, u64::max)),
            total: self.works.iter().fold(RankWork::default(), |a, &b| a.each(b, |a, b| a + b)),
            simulated_ranks: self.works.len() as u32,
            phases,
        }
    }

    fn at(&mut self, time: u64, event: Event) {
        self.made += 1;
        self.events.push(Reverse((time, self.made, event)));
    }

    fn free_at(&mut self, line: usize, end: u64, ns: u64) {
        self.lines[line].busy += ns;
        self.at(end, Event::Free(line));
    }

    fn line(&self, rank: u32, line: Line) -> usize {
        match line {
            Line::Nic => self.works.len() * self.own + self.nic_of(rank),
            Line::Host => rank as usize * self.own,
            Line::Stream => rank as usize * self.own + 1,
            Line::Caller => rank as usize * self.own + 2,
            Line::Engine(nth) => rank as usize * self.own + WITHOUT_ENGINES + nth as usize,
        }
    }

    fn nic_of(&self, rank: u32) -> usize {
        let (node, index) = (rank / self.ring.members, rank % self.ring.members);
        let nics = per_node(self.ring, self.hardware);
        (node * nics + index * nics / self.ring.members) as usize
    }
}

/// NICs of a node.
fn per_node(ring: Ring, hardware: &Hardware) -> u32 {
    match hardware.nic.per_node {
        0 => ring.members,
        nics => nics.min(ring.members),
    }
}

/// A line of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Line {
    Host,
    /// Stream of copies, with the engine that serves all peers.
    Stream,
    /// The caller's stream: kernels.
    Caller,
    /// Where peers have engines of their own: that for a rank of the node.
    Engine(u32),
    Nic,
}

/// One thing that a line does before the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// Is busy.
    Busy(u64),
    /// A copy of an engine; of a host: so many rows, one after the other.
    Copy { place: Place, from: u32, to: u32, copies: u64, bytes: u64 },
    /// Messages to a rank of another node; `rest` bytes of the same follow.
    Send { to: u32, messages: u64, bytes: u64, rest: u64 },
    /// Raises a word at `to`.
    Signal { to: u32, of: u32, flag: Flag, value: u64 },
    /// Waits for a word of its own rank.
    Wait { of: u32, flag: Flag, value: u64 },
    /// Writes a word of this rank's own, or records an event.
    Tell(OwnWord, u64),
    /// Waits for one.
    Hear(OwnWord, u64),
    /// Hands a task to another line of the rank, and goes on.
    Hand(Line, Box<Task>),
    /// Waits until another line of the rank has nothing to do.
    Join(Line),
    /// A phase is over.
    Mark(Phase),
}

/// Tasks of a line: in order of submission. A NIC takes turns among its connected peers as its
/// queue pairs do, a piece each.
#[derive(Debug, Default)]
struct Tracks {
    /// By rank and peer; all tasks of other lines are one.
    tracks: HashMap<(u32, u32), VecDeque<Task>>,
    turns: VecDeque<(u32, u32)>,
}

/// Bytes that a NIC sends to one peer before it turns to the next.
const PIECE: u64 = 256 << 10;

impl Tracks {
    pub fn push(&mut self, track: (u32, u32), task: Task) {
        let tasks = self.tracks.entry(track).or_default();
        if tasks.is_empty() {
            self.turns.push_back(track);
        }
        tasks.push_back(task);
    }

    /// The next task or piece of one, and its peer.
    pub fn pop(&mut self) -> Option<(u32, Task)> {
        let track = self.turns.pop_front()?;
        let tasks = self.tracks.get_mut(&track).expect("a turn is a track's");
        let task = match tasks.front_mut().expect("a track with a turn has a task") {
            Task::Send { to, messages, bytes, .. } if *bytes > PIECE => {
                // Its messages are as long as each other, as far as that goes.
                let sent = (*messages * PIECE / *bytes).min(*messages - 1);
                (*messages, *bytes) = (*messages - sent, *bytes - PIECE);
                Task::Send { to: *to, messages: sent, bytes: PIECE, rest: *bytes }
            }
            _ => tasks.pop_front().expect("as before"),
        };
        if !tasks.is_empty() {
            self.turns.push_back(track);
        }
        Some((track.0, task))
    }

    /// Puts back what has to wait.
    pub fn put_back(&mut self, track: (u32, u32), task: Task) {
        let tasks = self.tracks.entry(track).or_default();
        tasks.push_front(task);
        if tasks.len() == 1 {
            self.turns.push_front(track);
        }
    }
}

/// Nodes of equal size, ranks numbered node by node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ring {
    /// Number of nodes.
    pub nodes: u32,
    /// Ranks of each.
    pub members: u32,
    /// Whether every rank is simulated, or those of the first node alone.
    pub whole: bool,
}

impl Ring {
    /// Number of ranks of the group.
    pub fn ranks(&self) -> u32 {
        self.nodes * self.members
    }

    /// Number of ranks that are simulated.
    pub fn simulated(&self) -> u32 {
        if self.whole { self.ranks() } else { self.members }
    }

    /// The simulated rank that represents a rank, and the number of nodes by which the group is
    /// rotated for it.
    pub fn represented_by(&self, rank: u32) -> (u32, u32) {
        match self.whole {
            true => (rank, 0),
            false => (rank % self.members, rank / self.members),
        }
    }

    /// The rank that a rank becomes when the group is turned back by so many nodes.
    pub fn turned_back(&self, rank: u32, by: u32) -> u32 {
        (rank + self.ranks() - by * self.members) % self.ranks()
    }

    /// Indices of all ranks' equal shares of a table, as the rank that represents `rank` has them,
    /// `by` nodes further.
    pub fn turned<T: Copy>(&self, table: &[T], by: u32) -> impl Iterator<Item = T> {
        let shift = table.len() / self.nodes as usize * by as usize;
        let (last, first) = table.split_at(table.len() - shift);
        first.iter().chain(last).copied()
    }
}
