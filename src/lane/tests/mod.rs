//! One suite for all lanes, kept as data, and the driver that runs it.
//!
//! ```text
//!   SUITE: scenarios (operations of each rank, required results) --> two ranks over each lane
//!
//!   mod.rs        the suite; credits, and receivers that check incoming data
//!   nics.rs       NICs only: registered memory, keys, faults, late data
//!   requests.rs   work requests of puts and signals, counted and predicted
//!   stripes.rs    puts and signals over several queue pairs to one peer
//!   staging.rs    connections that share staging with those to other peers
//!   rebuilt.rs    a world built again while packets of the old one are on a real link
//! ```

#[cfg(test)]
mod nics;
mod rebuilt;
mod requests;
mod staging;
mod stripes;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use Act::*;
use Expect::*;
use rustix::event::EventfdFlags;

use super::flag::{WaitError, WaitLimits};
use super::net::{Fabric, NetConnection, RemoteAddress, SendBlocked, Settings, SignalMode};
use super::{Io, Lanes, LoopbackConnection, MappedWindow, PeerLane, Port, RowSource, WindowPart, ring_bytes};
use crate::bootstrap::Health;
use crate::config::{Config, EmulatedLink, NetChoice};
use crate::error::{Cause, Error, LaneError, MemoryError};
use crate::memory::{PeerMapping, Segment};
use crate::plan::RowRun;
use crate::rows::{RowKernels, Stores};
use crate::schedule::{Flag, Index, PutSource, SpanCopy, Tag, WindowId};
use crate::topology::Route;
use crate::{Options, World};

const DATA: WindowId = WindowId(0);
const FLAGS: WindowId = WindowId(1);
/// Bytes of the window that scenarios write to: several times what a ring holds.
const WINDOW: u64 = 5 << 20;

/// A name, the steps of both ranks, and how long they wait.
struct Scenario {
    name: &'static str,
    deadline: Duration,
    steps: &'static [Step],
}

/// Action of one of the two ranks on the other, and its required result.
#[derive(Clone, Copy)]
struct Step(u32, Act, Expect);

#[derive(Clone, Copy, Debug)]
enum Act {
    /// `len` bytes of pattern `seed` to `offset`.
    Put {
        offset: u64,
        len: u64,
        seed: u8,
    },
    /// Rows of pattern `seed`, by index, then rows of zeros, from byte 64 on.
    Rows {
        row_bytes: u64,
        index: &'static [u32],
        pad: u32,
        seed: u8,
    },
    /// A put of 10 bytes from the end of a source that has 9.
    Overread,
    /// To a rank that does not exist.
    PutNowhere,
    /// From a rank that does not exist.
    WaitNowhere,
    Signal(u64),
    /// With a tag that names this handle.
    Tagged(u64, u64),
    Wait(u64),
    Quiet,
    /// The bytes of a put are here.
    Sees {
        offset: u64,
        len: u64,
        seed: u8,
    },
    SeesRows {
        row_bytes: u64,
        index: &'static [u32],
        pad: u32,
        seed: u8,
    },
    /// Nothing was written here.
    Untouched {
        offset: u64,
        len: u64,
    },
    /// The tag of this value names this handle.
    TagIs(u64, u64),
    /// Both ranks are here: not over the lane.
    Meet,
    Cancel,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Expect {
    Fine,
    OutOfBounds,
    SourceBounds,
    NoLane,
    Cancelled,
    Late { awaited: u64, seen: u64 },
}

/// Byte `i` of a pattern: no two places and no two patterns look alike for long.
fn pattern(seed: u8, i: u64) -> u8 {
    (i.wrapping_mul(31) ^ (i >> 8) ^ (i >> 16).wrapping_mul(7)) as u8 ^ seed | 1
}

fn bytes(seed: u8, range: std::ops::Range<u64>) -> Vec<u8> {
    range.map(|i| pattern(seed, i)).collect()
}

/// One rank at work.
struct Actor<'a> {
    world: &'a World,
    port: Port,
    lane: &'static str,
    me: u32,
}

impl<'a> Actor<'a> {
    fn new(
        world: &'a World,
        deadline: Duration,
    ) -> (Actor<'a>, [crate::world::SymmetricRange; 2], crate::Group) {
        let group = world.all().unwrap();
        let ranges = [WINDOW, 64 << 10].map(|len| group.take_symmetric(len).unwrap());
        let ready = group.lanes(Route::Direct).unwrap();
        let lanes = Lanes {
            rank: ready.rank,
            world_ranks: ready.world_ranks.clone(),
            route: Route::Direct,
            nodes: ready.nodes.clone(),
            reach: ready.reach.clone(),
            rows: ready.rows,
            health: Arc::clone(&ready.health),
            deadline,
            oversubscribed: true,
            silent: ready.silent,
        };
        let (me, lane) = (lanes.rank, lanes.reach[1 - lanes.rank as usize].name());
        let port = Port::new(Arc::new(lanes), ranges.iter().map(|range| range.window()).collect(), FLAGS);
        (Actor { world, port, lane, me }, ranges, group)
    }

    fn put(&self, to: u32, offset: u64, source: &[u8], len: u64) -> Result<(), Error> {
        let span = SpanCopy { from: PutSource::Input, from_offset: 0, to: DATA, to_offset: offset, len };
        self.port.put(to, &span, &Io { input: source, ..Io::default() }, Stores::Streaming)
    }

    fn read(&self, offset: u64, len: u64) -> Vec<u8> {
        let mut seen = vec![0; len as usize];
        self.port.read(self.me, DATA, offset, &mut seen).unwrap();
        seen
    }

    fn signal(&self, value: u64, tag: Option<&Tag>) -> Result<(), Error> {
        RowKernels::fence();
        self.port.signal(1 - self.me, (self.me, Flag::Landed), value, tag)
    }

    fn act(&self, act: Act, group: &crate::Group) -> Result<(), Error> {
        let peer = 1 - self.me;
        match act {
            Act::Put { offset, len, seed } => self.put(peer, offset, &bytes(seed, 0..len), len),
            Act::Overread => self.put(peer, 0, &[1; 9], 10),
            Act::PutNowhere => self.put(7, 0, &[1], 1),
            Act::WaitNowhere => self.port.wait(7, Flag::Landed, 1),
            Act::Rows { row_bytes, index, pad, seed } => {
                let source = bytes(seed, 0..row_bytes * 8);
                let rows = RowSource { bytes: &source, row_bytes, rows: index, index: Index::Listed };
                let run = RowRun { to_row: 0, first: 0, count: index.len() as u32, pad };
                self.port.put_run(peer, (DATA, 64), run, rows, Stores::Streaming)
            }
            Act::Signal(value) => self.signal(value, None),
            Act::Tagged(value, handle) => self.signal(value, Some(&Tag { handle, ..Tag::default() })),
            Act::Wait(value) => self.port.wait(peer, Flag::Landed, value),
            Act::Quiet => self.port.quiet(),
            Act::Sees { offset, len, seed } => {
                assert!(
                    self.read(offset, len) == bytes(seed, 0..len),
                    "other bytes than were put: {len} at {offset}"
                );
                Ok(())
            }
            Act::SeesRows { row_bytes, index, pad, seed } => {
                let rows = index.iter().map(|&row| u64::from(row) * row_bytes);
                let mut expected: Vec<u8> = rows.flat_map(|at| bytes(seed, at..at + row_bytes)).collect();
                expected.resize(expected.len() + pad as usize * row_bytes as usize, 0);
                assert!(self.read(64, expected.len() as u64) == expected, "rows of {row_bytes} bytes");
                Ok(())
            }
            Act::Untouched { offset, len } => {
                assert!(self.read(offset, len).iter().all(|&byte| byte == 0), "{len} bytes at {offset}");
                Ok(())
            }
            Act::TagIs(value, handle) => {
                assert_eq!(self.port.flag(peer, Flag::Landed)?.tag(value).handle, handle);
                Ok(())
            }
            Act::Meet => group.gather(&[]).map(drop),
            Act::Cancel => {
                self.world.cancel();
                Ok(())
            }
        }
    }

    fn verdict(&self, result: Result<(), Error>) -> Expect {
        match result {
            Ok(()) => Expect::Fine,
            Err(Error::Memory(MemoryError::OutOfBounds { .. })) => Expect::OutOfBounds,
            Err(Error::Lane(LaneError::SourceBounds { offset: 0, len: 10, size: 9 })) => Expect::SourceBounds,
            Err(Error::Lane(LaneError::NoLane { rank, peer: 7, .. })) if rank == self.me => Expect::NoLane,
            Err(Error::World(Cause::Cancelled { by })) if by == 1 - self.me => Expect::Cancelled,
            Err(Error::Lane(LaneError::Deadline { rank, peer, lane, flag, awaited, seen, .. }))
                if (rank, peer, lane, flag) == (self.me, 1 - self.me, self.lane, Flag::Landed as u32) =>
            {
                Expect::Late { awaited, seen }
            }
            Err(error) => panic!("rank {} over {}: {error:?}", self.me, self.lane),
        }
    }
}

/// A lane, and worlds of two ranks that it joins.
const LANES: [(&str, [u32; 2], NetChoice); 4] = [
    ("shm", [0, 0], NetChoice::Auto),
    ("loopback", [0, 1], NetChoice::Auto),
    ("emulated", [0, 1], NetChoice::Auto),
    ("tcp", [0, 1], NetChoice::Tcp),
];

/// Options for worlds with room for that window.
fn small() -> Options {
    let config = Config { heap: 8 << 20, symmetric: 6 << 20, ..Config::default() };
    Options { config, ..Options::default() }
}

/// For worlds that a lane joins: the emulated link holds back what its short deadlines can spare.
fn options_of(lane: &str, net: NetChoice) -> Options {
    let emulated_link = (lane == "emulated").then(|| EmulatedLink::parse("1G/100").unwrap());
    Options { net, emulated_link, ..small() }
}

fn run(scenario: &Scenario, nodes: [u32; 2], options: &Options) {
    let worlds = World::threads_with(&nodes, options).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> =
            worlds.into_iter().map(|world| scope.spawn(move || play(scenario, &world))).collect();
        let ends: Vec<_> = ranks.into_iter().map(|rank| rank.join()).collect();
        // Of a scope that joins by itself, no test would learn which step went wrong.
        if let Some(panic) = ends.into_iter().find_map(Result::err) {
            resume_unwind(panic);
        }
    });
}

/// One rank's part of a scenario.
fn play(scenario: &Scenario, world: &World) {
    let (actor, _ranges, group) = Actor::new(world, scenario.deadline);
    let mine = scenario.steps.iter().filter(|step| step.0 == actor.me);
    for (number, Step(_, act, expected)) in mine.enumerate() {
        let place = (scenario.name, actor.lane, actor.me, number, act);
        assert_eq!(actor.verdict(actor.act(*act, &group)), *expected, "{place:?}");
    }
    // No rank leaves while the other still reads.
    let _ = group.gather(&[]);
}

/// The suite between two processes, and so between two machines: as `tests/testbed` starts it on
/// both.
#[test]
#[ignore = "needs two processes that find each other by the environment"]
fn the_lane_between_two_machines_conforms() {
    let lane = std::env::var("SIDELANE_NET").expect("the lane that is asked for");
    let config = small().config;
    let mut world = World::from_env_with(Options { config, ..Options::from_env().unwrap() }).unwrap();
    for scenario in SUITE {
        assert_eq!((world.size(), world.net().unwrap().lane), (2, lane.as_str()));
        play(scenario, &world);
        if world.health().check().is_err() {
            world = world.rebuild(scenario.deadline, 1).unwrap();
        }
    }
}

fn conforms(lane: &str) {
    let (_, nodes, net) = LANES.into_iter().find(|(name, ..)| *name == lane).unwrap();
    SUITE.iter().for_each(|scenario| run(scenario, nodes, &options_of(lane, net)));
}

#[test]
fn the_shm_lane_conforms() {
    conforms("shm");
}

#[test]
fn the_loop_lane_conforms() {
    conforms("loopback");
}

#[test]
fn the_emulated_link_conforms() {
    conforms("emulated");
}

/// Worlds over NICs without hardware that signal like this.
fn over(fabric: &Fabric, signal: Option<SignalMode>) -> Options {
    let settings = Settings { signal, ..Settings::default() };
    Options { net: NetChoice::Verbs, fake_verbs: Some(fabric.ground(settings)), ..small() }
}

/// Scenarios that wait long. A held NIC sends only while its rank polls, so it may be late for a
/// short deadline.
fn patient() -> impl Iterator<Item = &'static Scenario> {
    SUITE.iter().filter(|scenario| scenario.deadline == LONG)
}

/// The suite over NICs without hardware, which execute at once, or only when their sender polls.
fn verbs(signal: SignalMode) {
    let fabric = Fabric::new(&["nic0"]);
    let options = over(&fabric, Some(signal));
    SUITE.iter().for_each(|scenario| run(scenario, [0, 1], &options));
    fabric.hold();
    patient().for_each(|scenario| run(scenario, [0, 1], &options));
    assert_eq!(fabric.leftovers(), (0, 0));
}

#[test]
fn the_verbs_lane_conforms_when_it_signals_by_writes() {
    verbs(SignalMode::Write);
}

#[test]
fn the_verbs_lane_conforms_when_it_signals_by_additions() {
    verbs(SignalMode::FetchAdd);
}

#[test]
fn the_verbs_lane_conforms_when_it_signals_by_immediates() {
    verbs(SignalMode::Immediate);
}

#[test]
fn verbs_lane_conforms_in_any_write_order_without_write_signals() {
    // By addition, by immediate, and as NICs that are not known to keep an order are used.
    for signal in [Some(SignalMode::FetchAdd), Some(SignalMode::Immediate), None] {
        println!("signals by {signal:?}");
        let fabric = Fabric::new(&["nic0", "nic1"]);
        let options = over(&fabric, signal);
        fabric.shuffle();
        SUITE.iter().for_each(|scenario| run(scenario, [0, 1], &options));
        fabric.hold();
        patient().for_each(|scenario| run(scenario, [0, 1], &options));
        assert_eq!(fabric.leftovers(), (0, 0));
    }
}

#[test]
fn write_signals_break_order_if_overtaken_write_lands_late() {
    let failed_step = |signal| {
        let fabric = Fabric::new(&["nic0", "nic1"]);
        fabric.hold();
        fabric.last_first();
        let options = over(&fabric, signal);
        let panic = catch_unwind(AssertUnwindSafe(|| run(&SUITE[0], [0, 1], &options))).err()?;
        Some(panic.downcast::<String>().map_or_else(|_| "no text".to_owned(), |text| *text))
    };
    assert!(SUITE[0].name.starts_with("order: a signal comes after all earlier puts"));
    let failed = failed_step(Some(SignalMode::Write)).expect("the flag overtakes what was put before it");
    assert!(failed.contains("other bytes than were put"), "{failed}");
    for signal in [Some(SignalMode::FetchAdd), Some(SignalMode::Immediate), None] {
        assert_eq!(failed_step(signal), None, "signals by {signal:?}");
    }
}

#[test]
fn the_tcp_lane_conforms() {
    conforms("tcp");
}

#[test]
fn all_lanes_are_in_the_suite() {
    for (name, nodes, net) in LANES {
        let worlds = World::threads_with(&nodes, &options_of(name, net)).unwrap();
        std::thread::scope(|scope| {
            for world in worlds {
                scope.spawn(move || {
                    let lanes = world.all().unwrap().lanes(Route::Direct).unwrap();
                    assert_eq!(lanes.reach[1 - world.rank() as usize].name(), name);
                    assert!(matches!(lanes.reach[world.rank() as usize], PeerLane::Own));
                });
            }
        });
    }
}

/// Longer than any scenario takes.
const LONG: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

const SUITE: &[Scenario] = &[
    Scenario {
        name: "order: a signal comes after all earlier puts, of any length and alignment",
        deadline: LONG,
        steps: &[
            Step(0, Put { offset: 0, len: 1, seed: 1 }, Fine),
            Step(0, Put { offset: 1, len: 63, seed: 2 }, Fine),
            Step(0, Put { offset: 64, len: 0, seed: 3 }, Fine),
            Step(0, Put { offset: 67, len: 65, seed: 4 }, Fine),
            Step(0, Put { offset: 1000, len: 65_535, seed: 5 }, Fine),
            Step(0, Put { offset: 70_001, len: 65_537, seed: 6 }, Fine),
            Step(0, Signal(1), Fine),
            Step(1, Wait(1), Fine),
            Step(1, Sees { offset: 0, len: 1, seed: 1 }, Fine),
            Step(1, Sees { offset: 1, len: 63, seed: 2 }, Fine),
            Step(1, Untouched { offset: 64, len: 3 }, Fine),
            Step(1, Sees { offset: 67, len: 65, seed: 4 }, Fine),
            Step(1, Untouched { offset: 132, len: 868 }, Fine),
            Step(1, Sees { offset: 1000, len: 65_535, seed: 5 }, Fine),
            Step(1, Sees { offset: 70_001, len: 65_537, seed: 6 }, Fine),
            Step(1, Untouched { offset: 135_538, len: 1000 }, Fine),
        ],
    },
    Scenario {
        name: "order: puts larger than what can be in flight, one generation after another",
        deadline: LONG,
        steps: &[
            Step(0, Put { offset: 5, len: 3 * MIB + 1, seed: 1 }, Fine),
            Step(0, Signal(1), Fine),
            Step(1, Wait(1), Fine),
            Step(1, Sees { offset: 5, len: 3 * MIB + 1, seed: 1 }, Fine),
            Step(1, Signal(1), Fine),
            Step(0, Wait(1), Fine),
            Step(0, Put { offset: 5, len: 3 * MIB + 1, seed: 2 }, Fine),
            Step(0, Put { offset: 4 * MIB, len: MIB, seed: 3 }, Fine),
            Step(0, Signal(2), Fine),
            Step(1, Wait(2), Fine),
            Step(1, Sees { offset: 5, len: 3 * MIB + 1, seed: 2 }, Fine),
            Step(1, Sees { offset: 4 * MIB, len: MIB, seed: 3 }, Fine),
        ],
    },
    Scenario {
        name: "order: rows by index, with rows of zeros behind them",
        deadline: LONG,
        steps: &[
            // Without an answer it could land after the rows.
            Step(0, Put { offset: 0, len: 4 * MIB, seed: 9 }, Fine),
            Step(0, Signal(1), Fine),
            Step(1, Wait(1), Fine),
            Step(1, Signal(1), Fine),
            Step(0, Wait(1), Fine),
            Step(0, Rows { row_bytes: 16, index: &[7, 0, 0, 3], pad: 5, seed: 1 }, Fine),
            Step(0, Signal(2), Fine),
            Step(1, Wait(2), Fine),
            Step(1, SeesRows { row_bytes: 16, index: &[7, 0, 0, 3], pad: 5, seed: 1 }, Fine),
            Step(1, Signal(2), Fine),
            Step(0, Wait(2), Fine),
            Step(0, Rows { row_bytes: 48 << 10, index: &[5, 1, 2, 2, 6], pad: 3, seed: 2 }, Fine),
            Step(0, Signal(3), Fine),
            Step(1, Wait(3), Fine),
            Step(1, SeesRows { row_bytes: 48 << 10, index: &[5, 1, 2, 2, 6], pad: 3, seed: 2 }, Fine),
            Step(1, Signal(3), Fine),
            Step(0, Wait(3), Fine),
            Step(0, Rows { row_bytes: 300_016, index: &[4, 4, 0, 7], pad: 9, seed: 3 }, Fine),
            Step(0, Rows { row_bytes: 300_016, index: &[], pad: 0, seed: 3 }, Fine),
            Step(0, Signal(4), Fine),
            Step(1, Wait(4), Fine),
            Step(1, SeesRows { row_bytes: 300_016, index: &[4, 4, 0, 7], pad: 9, seed: 3 }, Fine),
        ],
    },
    Scenario {
        name: "bounds: refused before anything is posted",
        deadline: LONG,
        steps: &[
            Step(0, Put { offset: WINDOW - 99, len: 100, seed: 1 }, OutOfBounds),
            Step(0, Put { offset: WINDOW + 1, len: 0, seed: 1 }, OutOfBounds),
            Step(0, Put { offset: u64::MAX, len: 2, seed: 1 }, OutOfBounds),
            Step(0, Rows { row_bytes: MIB, index: &[0, 1, 2, 3, 4], pad: 0, seed: 1 }, OutOfBounds),
            Step(0, Rows { row_bytes: MIB, index: &[0, 1], pad: 3, seed: 1 }, OutOfBounds),
            Step(0, Overread, SourceBounds),
            Step(0, PutNowhere, NoLane),
            Step(0, WaitNowhere, NoLane),
            Step(0, Put { offset: WINDOW - 100, len: 100, seed: 2 }, Fine),
            Step(0, Put { offset: WINDOW, len: 0, seed: 2 }, Fine),
            Step(0, Signal(1), Fine),
            Step(1, Wait(1), Fine),
            Step(1, Untouched { offset: 0, len: WINDOW - 100 }, Fine),
            Step(1, Sees { offset: WINDOW - 100, len: 100, seed: 2 }, Fine),
        ],
    },
    Scenario {
        name: "generations: two tags by parity, and values that were passed long ago",
        deadline: LONG,
        steps: &[
            Step(0, Tagged(1 << 8, 101), Fine),
            Step(1, Wait(1 << 8), Fine),
            Step(1, TagIs(1 << 8, 101), Fine),
            Step(1, Signal(1 << 8), Fine),
            Step(0, Wait(1 << 8), Fine),
            Step(0, Tagged(2 << 8, 102), Fine),
            Step(1, Wait(2 << 8), Fine),
            Step(1, TagIs(2 << 8, 102), Fine),
            Step(1, TagIs(1 << 8, 101), Fine),
            Step(1, Signal(2 << 8), Fine),
            Step(0, Wait(2 << 8), Fine),
            Step(0, Tagged(3 << 8, 103), Fine),
            Step(0, Signal(1 << 48), Fine),
            Step(1, Wait(1 << 8), Fine),
            Step(1, Wait(1 << 48), Fine),
            Step(1, Wait(3 << 8), Fine),
            Step(1, TagIs(3 << 8, 103), Fine),
            Step(1, TagIs(1 << 48, 102), Fine),
        ],
    },
    Scenario {
        name: "credit: two ranks that fill each other's way do not block",
        deadline: LONG,
        steps: &[
            Step(0, Put { offset: 0, len: 4 * MIB, seed: 1 }, Fine),
            Step(1, Put { offset: 0, len: 4 * MIB, seed: 2 }, Fine),
            Step(0, Signal(1), Fine),
            Step(1, Signal(1), Fine),
            Step(0, Wait(1), Fine),
            Step(1, Wait(1), Fine),
            Step(0, Sees { offset: 0, len: 4 * MIB, seed: 2 }, Fine),
            Step(1, Sees { offset: 0, len: 4 * MIB, seed: 1 }, Fine),
        ],
    },
    Scenario {
        name: "quiet: puts have landed, without a signal and though no rank waits for them",
        deadline: LONG,
        steps: &[
            Step(0, Put { offset: 3, len: 2 * MIB, seed: 1 }, Fine),
            Step(0, Quiet, Fine),
            Step(0, Meet, Fine),
            Step(1, Meet, Fine),
            Step(1, Sees { offset: 3, len: 2 * MIB, seed: 1 }, Fine),
        ],
    },
    Scenario {
        name: "cancel: a failed world ends waits with its cause, and what came before it stays",
        deadline: LONG,
        steps: &[
            Step(0, Put { offset: 0, len: 1000, seed: 1 }, Fine),
            Step(0, Signal(1), Fine),
            Step(1, Wait(1), Fine),
            Step(1, Meet, Fine),
            Step(0, Meet, Fine),
            Step(0, Cancel, Fine),
            Step(1, Wait(2), Cancelled),
            Step(1, Wait(1), Fine),
            Step(1, Sees { offset: 0, len: 1000, seed: 1 }, Fine),
        ],
    },
    Scenario {
        name: "deadline: a live but silent peer is named, with the value awaited and the value seen",
        deadline: Duration::from_millis(30),
        steps: &[
            Step(0, Signal(2), Fine),
            Step(0, Meet, Fine),
            Step(1, Meet, Fine),
            Step(1, Wait(2), Fine),
            Step(1, Wait(5), Late { awaited: 5, seen: 2 }),
            Step(1, Meet, Fine),
            Step(0, Meet, Fine),
        ],
    },
];

/// One end of a connection whose other end no thread serves.
fn unserved() -> LoopbackConnection {
    let wire = Segment::create("sidelane-test", ring_bytes()).unwrap();
    let event_fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let mapped = Arc::new(PeerMapping::new(&[Some(&wire)]).unwrap());
    LoopbackConnection::new((0, 1), &Arc::default(), mapped, event_fd, Arc::default(), None).unwrap()
}

fn fill(health: &Health, deadline: Duration) -> SendBlocked {
    let limits = WaitLimits { health, oversubscribed: false, deadline, awaited: 1, silent: false };
    unserved().put(RemoteAddress { region: 0, offset: 0 }, &vec![1; 2 << 20], limits).unwrap_err()
}

#[test]
fn a_peer_that_takes_nothing_is_waited_for_until_the_deadline() {
    let late = fill(&Health::new(), Duration::from_millis(20));
    assert!(
        matches!(late.why, WaitError::Late { waited } if waited >= Duration::from_millis(20)),
        "{late:?}"
    );
    assert!(late.awaited > 0 && late.seen == 0, "{late:?}");
}

#[test]
fn a_dead_world_ends_the_wait_for_credit_with_its_cause() {
    let health = Health::new();
    let cause = Cause::Cancelled { by: 3 };
    std::thread::scope(|scope| {
        let filling = scope.spawn(|| fill(&health, Duration::from_secs(600)));
        let since = Instant::now();
        health.fail(cause.clone());
        assert_eq!(filling.join().unwrap().why, WaitError::Dead(cause));
        assert!(since.elapsed() < Duration::from_secs(2));
    });
}

/// Runs `attack` at rank 0 with a port that has wrong windows of rank 1, on another node: its NIC
/// must refuse.
fn refused(attack: impl Fn(&Actor, Port) + Sync) {
    for net in [NetChoice::Loopback, NetChoice::Tcp] {
        refused_over(net, &attack);
    }
}

fn refused_over(net: NetChoice, attack: &(impl Fn(&Actor, Port) + Sync)) {
    let worlds = World::threads_with(&[0, 1], &Options { net, ..small() }).unwrap();
    std::thread::scope(|scope| {
        for world in worlds {
            scope.spawn(move || {
                let (actor, ranges, group) = Actor::new(&world, Duration::from_secs(60));
                if actor.me == 0 {
                    let mut windows: Vec<MappedWindow> = ranges.iter().map(|range| range.window()).collect();
                    for window in &mut windows {
                        window.parts[1] = WindowPart { len: u64::MAX / 2, ..window.parts[1] };
                    }
                    attack(&actor, Port::new(group.lanes(Route::Direct).unwrap(), windows, FLAGS));
                }
                let waited = if actor.me == 1 { actor.port.wait(0, Flag::Landed, 9) } else { Ok(()) };
                if actor.me == 1 {
                    assert_eq!(waited.unwrap_err(), Error::World(Cause::Protocol { rank: 0 }));
                }
                let _ = group.gather(&[]);
            });
        }
    });
}

#[test]
fn put_outside_region_ends_receivers_world_and_names_sender() {
    refused(|_, port| {
        let heap = small().config.heap;
        let span = SpanCopy { from: PutSource::Input, from_offset: 0, to: DATA, to_offset: heap, len: 100 };
        port.put(1, &span, &Io { input: &[1; 100], ..Io::default() }, Stores::Cached).unwrap();
        port.signal(1, (0, Flag::Landed), 9, None).unwrap();
    });
}

#[test]
fn a_put_to_a_region_that_is_not_there_is_refused_alike() {
    refused(|actor, _| {
        let crate::lane::PeerLane::Net(connection) = &actor.port.lanes().reach[1] else {
            panic!("over a connection")
        };
        connection
            .put(RemoteAddress { region: 77, offset: 0 }, &[1; 100], actor.port.lanes().limits_of(1))
            .unwrap();
    });
}

#[test]
fn a_signal_that_is_no_flag_line_is_refused_alike() {
    refused(|actor, _| {
        let crate::lane::PeerLane::Net(connection) = &actor.port.lanes().reach[1] else {
            panic!("over a connection")
        };
        connection
            .signal(RemoteAddress { region: 0, offset: 24 }, 1, None, actor.port.lanes().limits_of(1))
            .unwrap();
    });
}
