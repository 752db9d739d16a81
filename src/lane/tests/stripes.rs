//! Puts and signals striped over several queue pairs to one peer, on one NIC or on two.
//!
//! No test waits for a time. Where a signal must not come, its queue pairs have executed all that
//! they may, and both ranks have taken it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::nics::{SHORT, on_ranks, options, round_trip};
use super::{SUITE, patient, run, small};
use crate::config::NetChoice;
use crate::error::{Cause, Error, LaneError, VerbsError};
use crate::lane::flag::WaitLimits;
use crate::lane::net::{Fabric, NetConnection, RemoteAddress, Settings, SignalMode};
use crate::lane::{Lanes, MappedWindow, NicCounters, PeerLane};
use crate::plan::SumOrder;
use crate::schedule::Tag;
use crate::topology::Route;
use crate::{Options, World};

const CHUNK: u64 = 4096;
/// Signals of a queue pair that may be on the way.
const RECEIVES: u64 = 256;
/// Bytes of the window: lines of flags, then data.
const WINDOW: u64 = 256 << 10;
const DATA: u64 = 4096;

fn settings(queue_pairs: u8) -> Settings {
    Settings { queue_pairs, chunk: CHUNK, ..Settings::default() }
}

fn striped(fabric: &Arc<Fabric>, settings: Settings) -> Options {
    Options { fake_verbs: Some(fabric.ground(settings)), ..options(fabric, None) }
}

/// Both NICs for each rank, which takes one by itself.
fn both(settings: Settings) -> Settings {
    Settings { nics: ["nic0", "nic1"].map(str::to_owned).to_vec(), ..settings }
}

/// A rank of two, the window that both have, and the lanes of a group.
struct Rank<'a> {
    group: &'a crate::Group,
    lanes: &'a Lanes,
    window: &'a MappedWindow,
    me: u32,
}

impl Rank<'_> {
    fn connection(&self) -> &dyn NetConnection {
        let PeerLane::Net(connection) = &self.lanes.reach[1 - self.me as usize] else {
            panic!("over a connection")
        };
        connection.as_ref()
    }

    fn limits(&self) -> WaitLimits<'_> {
        self.lanes.limits_of(1 - self.me)
    }

    fn to(&self, offset: u64) -> RemoteAddress {
        self.window.target(1 - self.me, offset, 1).unwrap()
    }

    fn put(&self, offset: u64, len: u64, byte: u8) {
        self.connection().put(self.to(offset), &vec![byte; len as usize], self.limits()).unwrap();
    }

    fn signal(&self, line: u64, value: u64, tag: Option<Tag>) {
        self.connection().signal(self.to(line * 64), value, tag, self.limits()).unwrap();
    }

    fn meet(&self) {
        self.group.gather(&[]).unwrap();
    }

    fn read(&self, offset: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        let at = self.window.parts[self.me as usize].offset + offset;
        self.window.mapped.read(self.me, at, &mut bytes).unwrap();
        bytes
    }

    fn flag(&self, line: u64) -> u64 {
        u64::from_ne_bytes(self.read(line * 64, 8).try_into().unwrap())
    }

    fn wait(&self, line: u64, value: u64) {
        let until = Instant::now() + SHORT;
        while self.flag(line) < value {
            assert!(Instant::now() < until, "{} instead of {value}", self.flag(line));
            self.lanes.progress();
        }
    }

    /// All that may be executed and taken is.
    fn exhaust(&self) {
        self.meet();
        (0..1000).for_each(|_| self.lanes.progress());
        self.meet();
    }
}

/// Runs `body` on two ranks that are connected by stripes.
fn pair<T: Send>(options: &Options, body: impl Fn(&Rank<'_>) -> T + Sync) -> Vec<T> {
    on_ranks(&[0, 1], options, |world| {
        let group = world.all().unwrap();
        let lanes = group.lanes(Route::Direct).unwrap();
        let range = group.take_symmetric(WINDOW).unwrap();
        let rank = Rank { group: &group, lanes: &lanes, window: &range.window(), me: world.rank() };
        rank.meet();
        let seen = body(&rank);
        rank.meet();
        seen
    })
}

#[test]
fn striped_lane_conforms_at_once_and_in_any_order() {
    for (queue_pairs, nics) in [(2, 1), (3, 1), (2, 2), (3, 2)] {
        println!("{queue_pairs} queue pairs, {nics} NICs");
        let fabric = Fabric::new(&["nic0", "nic1"]);
        let settings = Settings { chunk: 32 << 10, ..settings(queue_pairs) };
        let settings = if nics == 2 { both(settings) } else { settings };
        let fake_verbs = Some(fabric.ground(settings));
        let options = Options { net: NetChoice::Verbs, fake_verbs, ..small() };
        SUITE.iter().for_each(|scenario| run(scenario, [0, 1], &options));
        // One NIC is slower than the other, and each executes in an order of its own.
        fabric.change("nic1", |nic| nic.idle_polls = 3);
        fabric.hold();
        fabric.shuffle();
        fabric.stagger();
        patient().for_each(|scenario| run(scenario, [0, 1], &options));
        assert_eq!(fabric.leftovers(), (0, 0));
    }
}

#[test]
fn striped_round_gives_bits_of_loopback_and_counts_as_forecast() {
    for route in Route::ALL {
        let nodes = [0, 0, 1, 1];
        let fabric = Fabric::new(&["nic0", "nic1"]);
        let looped = Options { net: NetChoice::Loopback, fake_verbs: None, ..options(&fabric, None) };
        let round = |world: &World| round_trip(world, route, SumOrder::Expert).unwrap();
        let expected = on_ranks(&nodes, &looped, |world| round(&world));
        let seen = on_ranks(&nodes, &striped(&fabric, both(settings(3))), |world| {
            let out = round(&world);
            let (done, told) = (world.nic_counters(), world.nic_forecast());
            assert_eq!((done.requests, done.bytes), (told.requests, told.bytes), "{route:?}");
            assert_eq!((done.packets, done.copied), (told.packets, told.copied), "{route:?}");
            out
        });
        assert!(seen == expected, "{route:?}");
    }
}

#[test]
fn no_signal_passes_a_stripe_that_is_held_back() {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    pair(&striped(&fabric, settings(3)), |rank| {
        let mut value = 0;
        // The first signal of a word says more than the others, and so does one with a tag.
        for (queue, tag) in (0..3).flat_map(|queue| [None, Some(Tag::default())].map(|tag| (queue, tag))) {
            value += 1;
            if rank.me == 0 {
                fabric.hold_back("nic0", "nic1", queue);
                rank.put(DATA, 6 * CHUNK, value);
                // The last put decides nothing: it is the lead's.
                rank.put(DATA + 6 * CHUNK, 64, value);
                rank.signal(0, value.into(), tag);
            }
            rank.exhaust();
            if rank.me == 1 {
                assert_eq!(rank.flag(0), u64::from(value) - 1, "queue {queue}, {tag:?}");
            }
            rank.meet();
            if rank.me == 0 {
                fabric.let_go();
            } else {
                rank.wait(0, value.into());
                assert!(
                    rank.read(DATA, 6 * CHUNK).iter().all(|&byte| byte == value),
                    "queue {queue}, {tag:?}"
                );
            }
            rank.meet();
        }
    });
    assert_eq!(fabric.leftovers(), (0, 0));
}

#[test]
fn settling_posts_all_stripes_before_it_waits_for_one() {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    pair(&striped(&fabric, settings(2)), |rank| {
        if rank.me == 1 {
            return;
        }
        let own = &rank.window.bytes(0).unwrap()[DATA as usize..][..4 * CHUNK as usize];
        fabric.hold_back("nic0", "nic1", 0);
        let posted = || fabric.statistics("nic0").requests;
        let before = posted();
        // Read in place, two stripes for each queue pair. The last of each goes with the settling.
        rank.connection().put(rank.to(DATA), own, rank.limits()).unwrap();
        assert_eq!(posted() - before, 2);
        std::thread::scope(|scope| {
            scope.spawn(|| rank.connection().settle(rank.limits()).unwrap());
            let until = Instant::now() + SHORT;
            while posted() - before < 4 && Instant::now() < until {
                std::thread::yield_now();
            }
            let all = posted() - before;
            fabric.let_go();
            assert_eq!(all, 4, "while the lead is held back");
        });
    });
    assert_eq!(fabric.leftovers(), (0, 0));
}

#[test]
fn signal_of_small_put_waits_for_no_other_queue_pair() {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    pair(&striped(&fabric, settings(2)), |rank| {
        if rank.me == 0 {
            fabric.hold_back("nic0", "nic1", 1);
            rank.put(DATA, CHUNK / 4 - 1, 7);
            rank.signal(0, 1, None);
        } else {
            rank.wait(0, 1);
            assert!(rank.read(DATA, CHUNK / 4 - 1).iter().all(|&byte| byte == 7));
        }
    });
}

/// Requests and doorbells of rank 0 for a put of `len` bytes and a signal.
fn requests(fabric: &Arc<Fabric>, settings: Settings, len: usize) -> (u64, u64) {
    let counted = on_ranks(&[0, 1], &striped(fabric, settings), |world| {
        let group = world.all().unwrap();
        let mut window = group.window(1 << 20).unwrap();
        let mut counted = NicCounters::default();
        if world.rank() == 0 {
            // The first signal of a word is a request of its own.
            window.signal(1, 1).unwrap();
            window.quiet().unwrap();
            let before = world.nic_counters();
            window.put_signal(1, 0, &vec![7; len], 2).unwrap();
            window.quiet().unwrap();
            counted = world.nic_counters() - before;
            assert_eq!(world.nic_counters(), world.nic_forecast());
        } else {
            window.wait_until(0, 2).unwrap();
            let mut seen = vec![0; len];
            window.read(0, &mut seen).unwrap();
            assert!(seen.iter().all(|&byte| byte == 7));
        }
        group.gather(&[]).unwrap();
        (counted.requests, counted.doorbells)
    });
    counted[0]
}

#[test]
fn small_block_is_1_request_and_mebibyte_one_per_chunk_signal_and_tick() {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    let usual = |queue_pairs| Settings { queue_pairs, ..Settings::default() };
    assert_eq!(requests(&fabric, usual(2), 8 << 10), (1, 1));
    // Each queue has two chunks: the second leaves with the signal, or with the tick.
    assert_eq!(requests(&fabric, usual(2), 1 << 20), (4 + 1 + 1, 4));
    assert_eq!(requests(&fabric, usual(4), 1 << 20), (4 + 1 + 3, 4));
}

#[test]
fn stripes_follow_the_rates_of_nics() {
    const LEN: usize = 1 << 20;
    let fabric = Fabric::new(&["nic0", "nic1"]);
    fabric.write("class/infiniband/nic0/ports/1/rate", "100 Gb/sec (4X EDR)");
    fabric.write("class/infiniband/nic1/ports/1/rate", "400 Gb/sec (4X NDR)");
    let bytes = || ["nic0", "nic1"].map(|nic| fabric.statistics(nic).bytes);
    let before = bytes();
    requests(&fabric, both(settings(2)), LEN);
    let after = bytes();
    let [slow, fast] = [0, 1].map(|nic| after[nic] - before[nic]);
    // Beside the bytes: records of signals and grants.
    let near = |seen: u64, expected: usize| seen.abs_diff(expected as u64) <= CHUNK + 4096;
    assert!(near(slow, LEN / 5) && near(fast, LEN * 4 / 5), "{slow}, {fast}");
}

#[test]
fn no_more_signals_wait_for_ticks_than_there_are_receives() {
    const LAST: u64 = 600;
    let fabric = Fabric::new(&["nic0", "nic1"]);
    pair(&striped(&fabric, settings(2)), |rank| {
        if rank.me == 0 {
            fabric.hold_back("nic0", "nic1", 1);
            rank.put(DATA, 2 * CHUNK, 7);
            let short = WaitLimits { deadline: Duration::from_millis(20), ..rank.limits() };
            // The first is striped, and those behind it wait with it.
            let sent = |&value: &u64| rank.connection().signal(rank.to(0), value, None, short).is_ok();
            let signalled = (1..=LAST).take_while(sent).count() as u64;
            assert!(signalled <= RECEIVES, "{signalled} are not taken");
            rank.exhaust();
            rank.meet();
            fabric.let_go();
            (signalled + 1..=LAST).for_each(|value| rank.signal(0, value, None));
            assert_eq!(fabric.statistics("nic0").not_ready, 0);
        } else {
            rank.exhaust();
            assert_eq!(rank.flag(0), 0);
            rank.meet();
            rank.wait(0, LAST);
            assert!(rank.read(DATA, 2 * CHUNK).iter().all(|&byte| byte == 7));
        }
    });
    assert_eq!(fabric.leftovers(), (0, 0));
}

#[test]
fn tick_that_could_not_be_sent_goes_before_the_next_signal() {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    pair(&striped(&fabric, settings(2)), |rank| {
        let put = || rank.put(DATA, 2 * CHUNK, 7);
        if rank.me == 1 {
            // The second queue pair of rank 0 learns of no tick that was taken.
            fabric.hold_back("nic1", "nic0", 1);
        }
        rank.meet();
        for half in [1..=RECEIVES / 2, RECEIVES / 2 + 1..=RECEIVES] {
            if rank.me == 0 {
                half.for_each(|value| {
                    put();
                    rank.signal(0, value, None);
                });
            }
            rank.exhaust();
        }
        let last = RECEIVES + 2;
        if rank.me == 0 {
            put();
            let short = WaitLimits { deadline: Duration::from_millis(20), ..rank.limits() };
            rank.connection().signal(rank.to(0), last - 1, None, short).unwrap_err();
            fabric.let_go();
            put();
            rank.signal(0, last, None);
        } else {
            rank.wait(0, last);
        }
    });
    assert_eq!(fabric.leftovers(), (0, 0));
}

#[test]
fn puts_and_signals_of_two_threads_keep_their_order() {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    fabric.hold();
    fabric.shuffle();
    fabric.stagger();
    const LAST: u64 = 60;
    let data = |thread: u64| DATA + thread * 8 * CHUNK;
    pair(&striped(&fabric, settings(3)), |rank| {
        if rank.me == 0 {
            std::thread::scope(|scope| {
                for thread in 0..2 {
                    scope.spawn(move || {
                        for value in 1..=LAST {
                            rank.put(data(thread), 6 * CHUNK, value as u8);
                            rank.signal(thread, value, None);
                        }
                    });
                }
            });
            rank.connection().flush(rank.limits()).unwrap();
            return;
        }
        let until = Instant::now() + SHORT;
        let mut seen = [0; 2];
        while seen != [LAST; 2] {
            assert!(Instant::now() < until, "{seen:?}");
            rank.lanes.progress();
            for thread in 0..2 {
                let value = rank.flag(thread);
                // Bytes of later rounds may be here already.
                let least = rank.read(data(thread), 6 * CHUNK).into_iter().min();
                assert!(least >= Some(value as u8), "thread {thread}: {least:?} at {value}");
                seen[thread as usize] = value;
            }
        }
    });
}

#[test]
fn once_peer_has_device_memory_all_goes_over_the_lead() {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    pair(&striped(&fabric, settings(2)), |rank| {
        // A region of the peer's device, of no bytes.
        rank.connection().import_device_region(7, &[0, 1]).unwrap();
        if rank.me == 0 {
            fabric.hold_back("nic0", "nic1", 1);
            rank.put(DATA, 6 * CHUNK, 7);
            rank.connection().zero(rank.to(DATA + CHUNK), 2 * CHUNK, rank.limits()).unwrap();
            let devices = rank.connection().devices().unwrap();
            devices.write_word(rank.to(128), 5, rank.limits()).unwrap();
            rank.signal(0, 1, None);
        } else {
            rank.wait(0, 1);
            assert_eq!(rank.flag(2), 5);
            let seen = rank.read(DATA, 6 * CHUNK);
            let expected = |at: usize| if (1..3).contains(&(at / CHUNK as usize)) { 0 } else { 7 };
            assert!(seen.iter().enumerate().all(|(at, &byte)| byte == expected(at)));
        }
    });
}

#[test]
fn lost_queue_pair_behind_the_lead_is_blamed_on_its_peer() {
    let fabric = Fabric::new(&["nic0", "nic1", "nic2"]);
    let errors = on_ranks(&[0, 1, 2], &striped(&fabric, settings(2)), |world| {
        let mut window = world.all().unwrap().window(64).unwrap();
        window.barrier().unwrap();
        world.all().unwrap().gather(&[]).unwrap();
        if world.rank() == 0 {
            fabric.fail_queue_pair("nic0", "nic2", 1);
        }
        // Some may pass by what the peers had sent before.
        (0..).find_map(|_| window.barrier().err()).unwrap()
    });
    assert!(matches!(&errors[1], Error::World(Cause::Connection { rank: 2, by: 0 })), "{errors:?}");
}

#[test]
fn options_decide_about_queue_pairs_before_the_environment() {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    let options = |queue_pairs| striped(&fabric, settings(3)).with_queue_pairs(queue_pairs);
    for (asked, expected) in [(None, 3), (Some(1), 1), (Some(2), 2)] {
        pair(&options(asked), |rank| assert_eq!(rank.connection().event_fds().len(), expected));
    }
    for asked in [0, 9] {
        let error = World::threads_with(&[0, 1], &options(Some(asked))).unwrap_err();
        let refused = VerbsError::QueuePairs { asked };
        assert!(matches!(&error, Error::Lane(LaneError::Verbs(seen)) if *seen == refused), "{error:?}");
    }
}

#[test]
fn stripes_with_signals_that_nics_write_are_refused() {
    for signal in [SignalMode::Write, SignalMode::FetchAdd] {
        let fabric = Fabric::new(&["nic0", "nic1"]);
        let settings = Settings { signal: Some(signal), ..settings(2) };
        let error = World::threads_with(&[0, 1], &striped(&fabric, settings)).unwrap_err();
        let refused = VerbsError::StripesNeedImmediates { signal: signal.name() };
        assert!(matches!(&error, Error::Lane(LaneError::Verbs(seen)) if *seen == refused), "{error:?}");
    }
}
