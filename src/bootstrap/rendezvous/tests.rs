//! A rendezvous whose guests are connections that the test drives by hand, so that a rank can fall
//! silent and wake up.

use std::{
    collections::VecDeque,
    io::Write,
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Barrier,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::join::{JoinBarrier, JoinError, JoinRequest, Membership, host};
use super::listener::{HandshakeQueue, patient};
use crate::{
    bootstrap::{
        health::Timeouts,
        hub::{self, HubConfig, Job, coordinate},
        identity::Identity,
        panic_in,
        secret::Secret,
        threads::Thread,
        wire::{Hello, Initiator, Message, MessageConnection, PROTOCOL, RendezvousId, job_digest},
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

/// A rendezvous that a coordinator of this process holds.
struct TestHost {
    rendezvous: RendezvousId,
    secret: Secret,
    address: SocketAddr,
}

impl TestHost {
    fn new(size: u32, secret: Secret, timeouts: Timeouts) -> Self {
        let rendezvous = RendezvousId { job: job_digest("test"), size, epoch: 3, host: 0 };
        let identity = Identity::new(0, 1);
        let job = Job { digest: rendezvous.job, secret: secret.clone(), timeouts, identity };
        let listener = TcpListener::bind("127.0.0.1:0").and_then(patient).unwrap();
        let (meeting, until) =
            (hub::GatheringKind::First(JoinBarrier::new(size)), Instant::now() + timeouts.rendezvous);
        let hosted = host(listener, &job, rendezvous, meeting, until).unwrap();
        TestHost { rendezvous, secret, address: hosted.address }
    }

    fn join(&self, rank: u32) -> Membership {
        self.try_join(rank).ok().expect("a membership")
    }

    fn try_join(&self, rank: u32) -> Result<Membership, JoinError> {
        let until = Instant::now() + LONG;
        let request = JoinRequest {
            secret: &self.secret,
            rendezvous: self.rendezvous,
            rank,
            beyond_loopback: false,
            greeted_until: until,
            until,
            stop: &|| false,
        };
        request.at(self.address)
    }
}

/// A world of hand-driven ranks.
fn memberships(size: u32) -> Vec<Membership> {
    let meeting = &TestHost::new(size, Secret::none(), TIMEOUTS);
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..size).map(|rank| scope.spawn(move || meeting.join(rank))).collect();
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
#[cfg_attr(not(debug_assertions), ignore = "threads obey orders to panic in builds with assertions alone")]
fn coordinator_death_in_first_rendezvous_is_named_at_each_rank() {
    let rendezvous = RendezvousId { job: job_digest("doomed"), size: 3, epoch: 0, host: 0 };
    let listener = TcpListener::bind("127.0.0.1:0").and_then(patient).unwrap();
    let meeting = TestHost { rendezvous, secret: Secret::none(), address: listener.local_addr().unwrap() };
    let queue = HandshakeQueue::new(listener, Secret::none(), rendezvous);
    let (barrier, until) = (JoinBarrier::new(3), Instant::now() + LONG);
    let (kind, failure, released) = (hub::GatheringKind::First(barrier), Arc::default(), Arc::default());
    let config = HubConfig { queue, kind, timeouts: TIMEOUTS, until, failure, released };
    // No other test has a thread of this name.
    let life = Thread::new("coordinator", 77, &Arc::default());
    let name = "sidelane-coordinator-77".to_owned();
    let cause = Cause::Panicked { by: 77, thread: name.clone(), message: "told to".to_owned() };
    thread::scope(|scope| {
        let early = scope.spawn(|| meeting.try_join(1));
        let (own, body) = (life.clone(), life.clone());
        let coordinator = own.spawn(move || coordinate(config, &body)).unwrap();
        panic_in(&name);
        let late = scope.spawn(|| meeting.try_join(2));
        for rank in [early, late] {
            let Err(JoinError::Failed(error)) = rank.join().unwrap() else { panic!("it is dead") };
            assert_eq!(error, cause.clone().into());
        }
        coordinator.join().unwrap();
    });
}

#[test]
fn silent_rank_is_named_to_others_and_informed_on_waking() {
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

/// An attempt of a stranger that does not know the secret.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Attack {
    WrongSecret,
    NoProof,
    /// The proof that a rank once gave to another challenge, with its greeting.
    Replay,
    /// The greeting of a rank of another job.
    OtherJob,
    ProofBeforeHello,
    Garbled,
    Oversized,
    /// Connects, and says nothing.
    HalfOpen,
    /// Says less than a greeting.
    Slow,
}

const ATTACKS: [Attack; 9] = [
    Attack::WrongSecret,
    Attack::NoProof,
    Attack::Replay,
    Attack::OtherJob,
    Attack::ProofBeforeHello,
    Attack::Garbled,
    Attack::Oversized,
    Attack::HalfOpen,
    Attack::Slow,
];

impl Attack {
    /// Tries it as rank 2. Returns whether the host took the stranger for a rank, and a connection
    /// that stays open.
    fn at(self, meeting: &TestHost, nth: u8) -> (bool, Option<TcpStream>) {
        let RendezvousId { job, size, epoch, host } = meeting.rendezvous;
        let hello = Hello { version: PROTOCOL, job, rank: 2, size, epoch, host, port: 9, nonce: [nth; 32] };
        let recorded = {
            let mut rank = Initiator::new(meeting.secret.clone(), hello.clone());
            rank.answer(Message::Challenge { version: PROTOCOL, nonce: [nth; 32] }).unwrap()
        };
        let mut stream = TcpStream::connect(meeting.address).unwrap();
        let garbage: Vec<u8> = (0..200).map(|at: u8| at.wrapping_mul(nth | 1)).collect();
        let bytes = Message::Hello(hello.clone()).encode();
        let said = match self {
            Attack::HalfOpen => return (false, Some(stream)),
            Attack::Slow => {
                stream.write_all(&bytes[..bytes.len() / 2]).unwrap();
                return (false, Some(stream));
            }
            Attack::Garbled => garbage,
            Attack::Oversized => [&u32::MAX.to_le_bytes()[..], &garbage].concat(),
            Attack::ProofBeforeHello => recorded.encode(),
            Attack::OtherJob => Message::Hello(Hello { job: [nth; 32], ..hello.clone() }).encode(),
            Attack::WrongSecret | Attack::NoProof | Attack::Replay => bytes,
        };
        // The host may close while this side still writes.
        let _ = stream.write_all(&said);
        let mut connection = MessageConnection::new(stream).unwrap();
        let until = Instant::now() + LONG;
        if matches!(self, Attack::WrongSecret | Attack::NoProof | Attack::Replay) {
            // A full queue closes strangers early.
            let Some(challenge) = connection.await_message(until, &|| false) else { return (false, None) };
            let mut guess = Initiator::new(Secret::from_bytes([nth; 32]), hello);
            match self {
                Attack::NoProof => return (false, None),
                Attack::Replay => connection.send(&recorded),
                _ => connection.send(&guess.answer(challenge).unwrap()),
            }
        }
        while let Some(answer) = connection.await_message(until, &|| false) {
            if !matches!(answer, Message::Refused(_)) {
                return (true, None);
            }
        }
        assert!(connection.is_closed(), "{self:?}: the host neither answers nor closes");
        (false, None)
    }
}

#[test]
fn ten_thousand_hostile_joins_let_nobody_in_and_the_job_meets() {
    const THREADS: usize = 4;
    const EACH: usize = 2500;
    /// Connections that a thread keeps open.
    const OPEN: usize = 50;
    // A busy machine is no silent rank.
    let timeouts = Timeouts { liveness: LONG, rendezvous: 3 * LONG, ..TIMEOUTS };
    let meeting = &TestHost::new(3, Secret::random().unwrap(), timeouts);
    let halfway = &Barrier::new(THREADS + 1);
    let joins = &AtomicUsize::new(0);
    // Relaxed: counts alone, printed.
    let count = || joins.load(Ordering::Relaxed);
    let let_in = thread::scope(|scope| {
        let join_and_gather = |rank| {
            let mut membership = meeting.join(rank);
            let (key, blob) = ("all".to_owned(), vec![rank as u8]);
            membership.connection.send(&Message::Gather { ticket: 1, key, index: rank, count: 3, blob });
            let heard = listen(&mut membership);
            assert!(matches!(heard, Some(Message::Answer { ticket: 1, .. })), "rank {rank}: {heard:?}");
            membership
        };
        let mut ranks: Vec<_> = (0..2).map(|rank| scope.spawn(move || join_and_gather(rank))).collect();
        let attackers: Vec<_> = (0..THREADS)
            .map(|thread| {
                scope.spawn(move || {
                    let mut open = VecDeque::new();
                    let mut let_in = 0;
                    for nth in 0..EACH {
                        if nth == EACH / 2 {
                            halfway.wait();
                        }
                        let attack = ATTACKS[nth % ATTACKS.len()];
                        let (in_now, connection) = attack.at(meeting, (nth + thread) as u8);
                        let_in += usize::from(in_now);
                        joins.fetch_add(1, Ordering::Relaxed);
                        open.extend(connection);
                        open.drain(..open.len().saturating_sub(OPEN));
                    }
                    let_in
                })
            })
            .collect();
        // The world begins among strangers.
        halfway.wait();
        let (began, before) = (Instant::now(), count());
        ranks.push(scope.spawn(move || join_and_gather(2)));
        // The host lives as long as its ranks.
        let _world: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        let (met, among) = (began.elapsed(), count() - before);
        println!("met in {met:?} among {:.0} hostile joins a second", among as f64 / met.as_secs_f64());
        attackers.into_iter().map(|attacker| attacker.join().unwrap()).sum::<usize>()
    });
    println!("{let_in} of {} hostile joins were let in", THREADS * EACH);
    assert_eq!(let_in, 0);
}
