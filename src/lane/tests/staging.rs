//! Connections to several peers that share less staging than they need at once.
//!
//! ```text
//!   rank 0    put to 1, 2, 3, ... of bytes that are not registered    slots of the pool: two, or a few
//!   others    wait for their flag, and compare the bytes
//! ```

use std::sync::Arc;
use std::time::Duration;

use super::nics::{SHORT, on_ranks, options};
use crate::Options;
use crate::error::Cause;
use crate::lane::flag::{WaitError, WaitLimits};
use crate::lane::net::{Fabric, NetConnection, RemoteAddress, Settings, SignalMode};
use crate::lane::{Lanes, MappedWindow, NicCounters, PeerLane};
use crate::topology::Route;

const CHUNK: u64 = 4096;
const SLOT: u64 = 2 * CHUNK;
/// Bytes of the window: a line for a flag, then data.
const WINDOW: u64 = 128 << 10;
const DATA: u64 = 4096;

/// Ranks whose staging has so many slots.
fn scarce(fabric: &Arc<Fabric>, slots: u64, signal: SignalMode) -> Options {
    let settings =
        Settings { chunk: CHUNK, staging: slots * SLOT, signal: Some(signal), ..Settings::default() };
    Options { fake_verbs: Some(fabric.ground(settings)), ..options(fabric, None) }
}

/// Rank 0, which sends, or one of the others.
struct Rank<'a> {
    lanes: &'a Lanes,
    window: &'a MappedWindow,
    me: u32,
}

impl Rank<'_> {
    fn connection(&self, peer: u32) -> &dyn NetConnection {
        let PeerLane::Net(connection) = &self.lanes.reach[peer as usize] else { panic!("over a connection") };
        connection.as_ref()
    }

    fn limits(&self, peer: u32) -> WaitLimits<'_> {
        self.lanes.limits_of(peer)
    }

    fn to(&self, peer: u32, offset: u64) -> RemoteAddress {
        self.window.target(peer, offset, 1).unwrap()
    }

    fn put(&self, peer: u32, offset: u64, len: u64) {
        let bytes = vec![peer as u8; len as usize];
        self.connection(peer).put(self.to(peer, DATA + offset), &bytes, self.limits(peer)).unwrap();
    }

    fn signal(&self, peer: u32, value: u64) {
        self.connection(peer).signal(self.to(peer, 0), value, None, self.limits(peer)).unwrap();
    }

    fn read(&self, offset: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        let at = self.window.parts[self.me as usize].offset + offset;
        self.window.mapped.read(self.me, at, &mut bytes).unwrap();
        bytes
    }

    /// Waits for the flag. The first `len` bytes of data must be here then.
    fn takes(&self, value: u64, len: u64) {
        let until = std::time::Instant::now() + SHORT;
        while u64::from_ne_bytes(self.read(0, 8).try_into().unwrap()) < value {
            assert!(std::time::Instant::now() < until, "rank {} is not told {value}", self.me);
            self.lanes.progress();
        }
        assert!(self.read(DATA, len).iter().all(|&byte| byte == self.me as u8), "rank {}", self.me);
    }
}

/// How much of what a rank asked for was sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sent {
    All,
    Some,
}

/// Runs `body` on so many ranks, each on a node of its own. Requests must be as forecast, though
/// the calls wait for each other's staging; unless `body` returns that some were not sent.
fn on_nodes(ranks: u32, fabric: &Arc<Fabric>, options: &Options, body: impl Fn(&Rank<'_>) -> Sent + Sync) {
    on_ranks(&(0..ranks).collect::<Vec<_>>(), options, |world| {
        let group = world.all().unwrap();
        let lanes = group.lanes(Route::Direct).unwrap();
        let range = group.take_symmetric(WINDOW).unwrap();
        let rank = Rank { lanes: &lanes, window: &range.window(), me: world.rank() };
        group.gather(&[]).unwrap();
        let sent = body(&rank);
        group.gather(&[]).unwrap();
        // Doorbells depend on time where a sender waits.
        let asked = |counters: NicCounters| [counters.requests, counters.packets, counters.bytes];
        let [seen, expected] = [world.nic_counters(), world.nic_forecast()].map(asked);
        assert!(sent == Sent::Some || seen == expected, "rank {}: {seen:?}, not {expected:?}", rank.me);
        group.gather(&[]).unwrap();
    });
    assert_eq!(fabric.leftovers(), (0, 0));
}

#[test]
fn writes_held_back_for_other_peers_give_way_if_staging_is_short() {
    const PEERS: u32 = 6;
    for (signal, slots) in SignalMode::ALL.into_iter().flat_map(|signal| [2, 3].map(|n| (signal, n))) {
        let fabric = Fabric::new(&["nic0"]);
        on_nodes(1 + PEERS, &fabric, &scarce(&fabric, slots, signal), |rank| {
            for round in 1..=3 {
                if rank.me == 0 {
                    // More open writes than slots, and none ends with a call.
                    (1..=PEERS).for_each(|peer| rank.put(peer, 0, 100));
                    (1..=PEERS).for_each(|peer| rank.put(peer, 100, 3000));
                    (1..=PEERS).for_each(|peer| rank.signal(peer, round));
                } else {
                    rank.takes(round, 3100);
                }
            }
            Sent::All
        });
    }
}

#[test]
fn threads_that_send_to_different_peers_share_few_slots() {
    const PEERS: u32 = 3;
    for slots in [2, 3] {
        let fabric = Fabric::new(&["nic0"]);
        fabric.hold();
        fabric.shuffle();
        on_nodes(1 + PEERS, &fabric, &scarce(&fabric, slots, SignalMode::Immediate), |rank| {
            if rank.me > 0 {
                rank.takes(1, 20 * CHUNK + 100);
                return Sent::All;
            }
            std::thread::scope(|scope| {
                for peer in 1..=PEERS {
                    scope.spawn(move || {
                        // A write that is open, and one that must have a slot of its own.
                        rank.put(peer, 0, 100);
                        rank.put(peer, 100, 20 * CHUNK);
                        rank.signal(peer, 1);
                    });
                }
            });
            Sent::All
        });
    }
}

#[test]
fn peer_that_takes_nothing_leaves_staging_to_others() {
    const PEERS: u32 = 4;
    let fabric = Fabric::new(&["nic0", "nic1", "nic2", "nic3", "nic4"]);
    on_nodes(1 + PEERS, &fabric, &scarce(&fabric, 8, SignalMode::Immediate), |rank| {
        if rank.me > 0 {
            rank.takes(1, 20 * CHUNK);
            return Sent::All;
        }
        fabric.silence("nic1");
        let before = fabric.statistics("nic0").requests;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                rank.put(1, 0, 20 * CHUNK);
                rank.signal(1, 1);
            });
            // Half of the slots is as much as one peer gets: four, of two chunks each.
            while fabric.statistics("nic0").requests < before + 8 {
                std::thread::yield_now();
            }
            for peer in 2..=PEERS {
                rank.put(peer, 0, 20 * CHUNK);
                rank.signal(peer, 1);
                rank.connection(peer).flush(rank.limits(peer)).unwrap();
            }
            revive(&fabric, &["nic1"]);
        });
        Sent::All
    });
}

/// NICs that were silent answer again.
fn revive(fabric: &Fabric, nics: &[&str]) {
    nics.iter().for_each(|nic| fabric.change(nic, |nic| nic.silent = false));
    fabric.flush();
}

#[test]
fn peer_of_few_slots_leaves_one_to_others() {
    let fabric = Fabric::new(&["nic0", "nic1", "nic2"]);
    on_nodes(3, &fabric, &scarce(&fabric, 2, SignalMode::Immediate), |rank| {
        if rank.me > 0 {
            rank.takes(1, 20 * CHUNK);
            return Sent::All;
        }
        fabric.silence("nic1");
        let before = fabric.statistics("nic0").requests;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                rank.put(1, 0, 20 * CHUNK);
                rank.signal(1, 1);
            });
            while fabric.statistics("nic0").requests < before + 2 {
                std::thread::yield_now();
            }
            rank.put(2, 0, 20 * CHUNK);
            rank.signal(2, 1);
            rank.connection(2).flush(rank.limits(2)).unwrap();
            revive(&fabric, &["nic1"]);
        });
        Sent::All
    });
}

/// Ranks 1 and 2, whose NICs are silent, hold all slots of rank 0 while it runs `body`.
fn with_all_slots_held(signal: SignalMode, body: impl Fn(&Rank<'_>) -> Sent + Sync) {
    let fabric = Fabric::new(&["nic0", "nic1", "nic2", "nic3"]);
    // Words do not travel inside requests.
    fabric.change("nic0", |nic| nic.inline = 0);
    on_nodes(4, &fabric, &scarce(&fabric, 2, signal), |rank| {
        match rank.me {
            0 => {}
            3 => {
                rank.takes(1, 0);
                return Sent::All;
            }
            _ => {
                rank.takes(1, 100);
                return Sent::All;
            }
        }
        ["nic1", "nic2"].iter().for_each(|nic| fabric.silence(nic));
        for peer in 1..=2 {
            rank.put(peer, 0, 100);
            rank.signal(peer, 1);
        }
        let sent = body(rank);
        revive(&fabric, &["nic1", "nic2"]);
        sent
    });
}

#[test]
fn signal_waits_for_no_slot_that_another_peer_holds() {
    for signal in SignalMode::ALL {
        with_all_slots_held(signal, |rank| {
            rank.signal(3, 1);
            rank.connection(3).flush(rank.limits(3)).unwrap();
            Sent::All
        });
    }
}

#[test]
fn wait_for_slots_is_blamed_on_the_peer_that_holds_them() {
    with_all_slots_held(SignalMode::Immediate, |rank| {
        let limits = WaitLimits { deadline: Duration::from_millis(20), ..rank.limits(3) };
        let blocked = rank.connection(3).put(rank.to(3, DATA), &[3; 100], limits).unwrap_err();
        assert!(matches!(blocked.why, WaitError::Dead(Cause::Stalled { rank: 1, by: 0, .. })), "{blocked:?}");
        // The connection works on.
        rank.signal(3, 1);
        Sent::Some
    });
}
