//! Tests of lanes with connections only: credits, and a receiver that checks incoming data.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;

use super::{Actor, DATA, FLAGS};
use crate::bootstrap::Health;
use crate::config::NetChoice;
use crate::error::{Cause, Error};
use crate::lane::Io;
use crate::lane::net::{NetConnection, RemoteAddress, SendBlocked};
use crate::lane::wait::{WaitError, WaitLimits};
use crate::lane::{LoopbackConnection, MappedWindow, Port, WindowPart, ring_bytes};
use crate::memory::{PeerMapping, Segment};
use crate::rows::Stores;
use crate::schedule::{Flag, PutSource, SpanCopy};
use crate::topology::Route;
use crate::{Options, World};

/// One end of a connection whose other end no thread serves.
fn unserved() -> LoopbackConnection {
    let wire = Segment::create("sidelane-test", ring_bytes()).unwrap();
    let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let mapped = Arc::new(PeerMapping::new(&[Some(&wire)]).unwrap());
    LoopbackConnection::new(1, true, mapped, bell, Arc::default(), None).unwrap()
}

fn fill(health: &Health, deadline: Duration) -> SendBlocked {
    let patience = WaitLimits { health, crowded: false, deadline, awaited: 1, silent: false };
    unserved().put(RemoteAddress { region: 0, offset: 0 }, &vec![1; 2 << 20], patience).unwrap_err()
}

#[test]
fn a_partner_that_takes_nothing_is_waited_for_until_the_deadline() {
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
    for rail in [NetChoice::Loopback, NetChoice::Tcp] {
        refused_over(rail, &attack);
    }
}

fn refused_over(rail: NetChoice, attack: &(impl Fn(&Actor, Port) + Sync)) {
    let worlds = World::threads_with(&[0, 1], &Options { rail, ..Options::default() }).unwrap();
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
fn a_put_outside_its_region_ends_the_receivers_world_and_names_the_sender() {
    refused(|_, port| {
        let heap = Options::default().config.heap;
        let span = SpanCopy { from: PutSource::Input, from_offset: 0, to: DATA, to_offset: heap, len: 100 };
        port.put(1, &span, &Io { input: &[1; 100], ..Io::default() }, Stores::Cached).unwrap();
        port.signal(1, (0, Flag::Landed), 9, None).unwrap();
    });
}

#[test]
fn a_put_to_a_region_that_is_not_there_is_refused_alike() {
    refused(|actor, _| {
        let crate::lane::PeerLane::Rail(rail) = &actor.port.lanes().reach[1] else { panic!("over the wire") };
        rail.put(RemoteAddress { region: 77, offset: 0 }, &[1; 100], actor.port.lanes().patience(1)).unwrap();
    });
}

#[test]
fn a_signal_that_is_no_flag_line_is_refused_alike() {
    refused(|actor, _| {
        let crate::lane::PeerLane::Rail(rail) = &actor.port.lanes().reach[1] else { panic!("over the wire") };
        rail.signal(RemoteAddress { region: 0, offset: 24 }, 1, None, actor.port.lanes().patience(1))
            .unwrap();
    });
}
