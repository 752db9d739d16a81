//! A rendezvous whose guests are connections that the test drives by hand, so that a rank can fall
//! silent and wake up.

use std::{
    net::TcpListener,
    thread,
    time::{Duration, Instant},
};

use super::join::{JoinBarrier, JoinRequest, Membership, host};
use crate::{
    bootstrap::{
        hub::Job,
        secret::Secret,
        watch::Timeouts,
        wire::{Message, RendezvousId, job_digest},
    },
    error::{Cause, LostReason},
};

const LONG: Duration = Duration::from_secs(20);
const TIMEOUTS: Timeouts = Timeouts {
    heartbeat: Duration::from_millis(40),
    liveness: Duration::from_millis(400),
    deadline: LONG,
    rendezvous: LONG,
};

/// A world of hand-driven ranks.
fn memberships(size: u32) -> Vec<Membership> {
    let rendezvous = RendezvousId { job: job_digest("test"), size, epoch: 3, host: 0 };
    let job = Job { digest: rendezvous.job, secret: Secret::none(), timeouts: TIMEOUTS, launcher: None };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let until = Instant::now() + LONG;
    let (address, _) =
        host(listener, &job, rendezvous, JoinBarrier::first(size), Box::new(Vec::new), until).unwrap();
    thread::scope(|scope| {
        let join = |rank| {
            let secret = &Secret::none();
            let (beyond_loopback, greeted_until) = (false, until);
            let request = JoinRequest {
                secret,
                rendezvous,
                rank,
                beyond_loopback,
                greeted_until,
                until,
                stop: &|| false,
            };
            request.at(address).ok().expect("a membership")
        };
        let ranks: Vec<_> = (0..size).map(|rank| scope.spawn(move || join(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The next message that is no heartbeat, while this side sends heartbeats. None at the end of the
/// stream.
fn listen(membership: &mut Membership) -> Option<Message> {
    let until = Instant::now() + LONG;
    while Instant::now() < until {
        membership.connection.send(&Message::Heartbeat);
        match membership.connection.await_message(Instant::now() + TIMEOUTS.heartbeat, &|| false) {
            Some(Message::Heartbeat) => {}
            Some(message) => return Some(message),
            None if membership.connection.is_closed() => return None,
            None => {}
        }
    }
    panic!("nothing came");
}

#[test]
fn a_silent_rank_is_named_to_the_others_and_told_when_it_wakes_up() {
    let mut memberships = memberships(3);
    let mut silent = memberships.remove(1);
    thread::scope(|scope| {
        for membership in &mut memberships {
            scope.spawn(move || {
                let Some(Message::Dead(Cause::Lost { rank: 1, how: LostReason::Silent(silence) })) =
                    listen(membership)
                else {
                    panic!("rank 1 should have been named");
                };
                assert!(silence >= TIMEOUTS.liveness, "{silence:?}");
            });
        }
    });
    let woken = listen(&mut silent);
    assert_eq!(woken, Some(Message::Dead(Cause::Evicted { rank: 1, epoch: 3 })));
}

#[test]
fn a_coordinator_that_was_given_up_tells_its_own_rank_and_ends() {
    let mut memberships = memberships(2);
    let evicted = Message::Dead(Cause::Evicted { rank: 0, epoch: 3 });
    memberships[1].connection.send(&evicted);
    memberships[1].connection.flush();
    assert_eq!(listen(&mut memberships[0]), Some(evicted));
    assert_eq!(listen(&mut memberships[0]), None, "the end of the stream");
}

#[test]
fn invalid_message_ends_the_membership() {
    let mut memberships = memberships(2);
    memberships[1].connection.send(&Message::Left { rank: 0 });
    memberships[1].connection.flush();
    let lost = Message::Dead(Cause::Lost { rank: 1, how: LostReason::Closed });
    assert_eq!(listen(&mut memberships[0]), Some(lost));
}
