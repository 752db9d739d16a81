//! The accepting side: pending connections until they are authenticated, for the rendezvous and for
//! streams of the ranks' own.
//!
//! ```text
//!   listener ──► HandshakeQueue: Hello, Challenge, Proofs ──► AuthenticatedPeer (rank, connection)
//!                   └── silent or malformed: closed, and no other peer waits for it
//!
//!   one rank: PeerListener                   the other: PeerAuth::connect
//!     HandshakeQueue   ◄──── Hello { rank, epoch, expected rank } ────
//!                      ───── Challenge ─────►
//!                      ◄──── Proof ─────
//!                      ───── Proof ─────►
//!                      ───── Welcome ───►
//!                      ◄──── one byte ────   from here on the stream is the ranks' own
//! ```
//!
//! Strangers may connect as often as they like. A queue that is full closes a stranger's connection
//! for each new one ([`HandshakeQueue::make_room`]), so that a rank gets in within one round trip.
//!
//! The byte says that the other rank has not given up meanwhile: its wait for a Welcome is bounded,
//! and no wait comes after it. A stream without that byte is dropped.
//!
//! The handshake is that of the rendezvous, under a name that no rendezvous has, so its messages
//! prove nothing there. The connections of strangers, of other jobs and of earlier epochs are
//! closed, and no rank waits for them.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Resource, getrlimit};
use sha2::{Digest, Sha256};

use super::join::{ANSWER, shake_hands};
use crate::bootstrap::failed;
use crate::bootstrap::secret::{Secret, random};
use crate::bootstrap::wait::{self, poll_until};
use crate::bootstrap::wire::{
    Hello, Initiator, JoinRefusal, Message, MessageConnection, PROTOCOL, RendezvousId, Responder,
};
use crate::error::{BootstrapError, Cause, RefusedJoins};

/// Bound of one attempt to connect.
const CONNECT: Duration = Duration::from_secs(1);
/// Bound of one handshake: a stranger that accepts and stays silent costs this much.
const GREETING: Duration = Duration::from_secs(2);

/// Message of a welcomed rank that takes the stream.
const TAKEN: u8 = 1;

/// A rank's proof of identity for others of its world.
#[derive(Clone, Debug)]
pub struct PeerAuth {
    secret: Secret,
    rank: u32,
    /// Of streams of this world; `host` stands for no rank yet.
    rendezvous: RendezvousId,
    /// Where the rendezvous sees each rank.
    addresses: Vec<IpAddr>,
}

impl PeerAuth {
    pub(in crate::bootstrap) fn new(
        secret: Secret,
        job: [u8; 32],
        rank: u32,
        epoch: u16,
        addresses: Vec<IpAddr>,
    ) -> Self {
        let job = Sha256::new().chain_update(b"sidelane streams ").chain_update(job).finalize().into();
        let rendezvous = RendezvousId { job, size: addresses.len() as u32, epoch, host: rank };
        PeerAuth { secret, rank, rendezvous, addresses }
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// The address at which the rendezvous sees a rank.
    pub fn seen_at(&self, rank: u32) -> Option<IpAddr> {
        self.addresses.get(rank as usize).copied()
    }

    /// Whether all ranks meet through this machine's loopback interface.
    pub fn is_local(&self) -> bool {
        self.addresses.iter().all(IpAddr::is_loopback)
    }

    /// Lets other ranks of this world in at a listener.
    ///
    /// # Errors
    /// [`BootstrapError::System`].
    pub fn receive(&self, listener: TcpListener) -> Result<PeerListener, BootstrapError> {
        let listener = patient(listener).map_err(|error| failed("listen", &error))?;
        let queue = HandshakeQueue::new(listener, self.secret.clone(), self.rendezvous);
        Ok(PeerListener { queue, welcomed: Vec::new(), here: BTreeMap::new() })
    }

    /// Connects to a rank of this world that listens at an address. The stream does not block.
    /// `stop` ends it early.
    ///
    /// # Errors
    /// [`BootstrapError::System`] if there is no listener, [`BootstrapError::NoRendezvous`] if no
    /// answer comes, [`BootstrapError::WrongSecret`] or [`BootstrapError::Malformed`] if it is
    /// another process, [`Cause::Evicted`] if the world is in another epoch.
    pub fn connect(
        &self,
        host: u32,
        address: SocketAddr,
        stop: &dyn Fn() -> bool,
    ) -> Result<TcpStream, BootstrapError> {
        let mut stream = self.greet(host, address, stop)?;
        stream.write_all(&[TAKEN]).map_err(|error| failed("send", &error))?;
        Ok(stream)
    }

    /// Connects, and is welcomed.
    fn greet(
        &self,
        host: u32,
        address: SocketAddr,
        stop: &dyn Fn() -> bool,
    ) -> Result<TcpStream, BootstrapError> {
        let peer = || address.to_string();
        let stream = wait::connect(address, CONNECT).map_err(|error| failed("connect", &error))?;
        let mut connection = MessageConnection::new(stream).map_err(|error| failed("fcntl", &error))?;
        let RendezvousId { job, size, epoch, .. } = self.rendezvous;
        let nonce = random()?;
        let hello = Hello { version: PROTOCOL, job, rank: self.rank, size, epoch, host, port: 0, nonce };
        let initiator = Initiator::new(self.secret.clone(), hello);
        let since = Instant::now();
        let until = since + GREETING;
        let silent = || {
            let (address, waited) = (peer(), since.elapsed());
            BootstrapError::NoRendezvous { address, waited, other_job: None }
        };
        let malformed = || BootstrapError::Malformed { peer: peer() };
        let greeted = shake_hands(&mut connection, initiator, until, ANSWER, stop).ok_or_else(silent)?;
        greeted.map_err(|refusal| self.explain(refusal, peer()))?;
        match connection.await_message(until, stop).ok_or_else(silent)? {
            Message::Welcome { .. } => connection.into_stream().ok_or_else(malformed),
            Message::Refused(refusal) => Err(self.explain(refusal, peer())),
            _ => Err(malformed()),
        }
    }

    fn explain(&self, refusal: JoinRefusal, peer: String) -> BootstrapError {
        let rank = self.rank;
        match refusal {
            JoinRefusal::Version(seen) => BootstrapError::Version { peer, seen, expected: PROTOCOL },
            JoinRefusal::WrongSecret => BootstrapError::WrongSecret { peer },
            JoinRefusal::Evicted(epoch) => BootstrapError::World(Cause::Evicted { rank, epoch }),
            JoinRefusal::Rank => BootstrapError::RankRefused { rank, size: self.rendezvous.size },
            JoinRefusal::Size(expected) => {
                BootstrapError::JobSizesDiffer { rank, seen: self.rendezvous.size, expected }
            }
            JoinRefusal::OtherJob
            | JoinRefusal::Missing { .. }
            | JoinRefusal::Setting { .. }
            | JoinRefusal::Malformed => BootstrapError::Malformed { peer },
        }
    }
}

/// Where ranks of a world come in.
#[derive(Debug)]
pub struct PeerListener {
    queue: HandshakeQueue,
    /// Ranks that were let in, and have not taken their streams yet.
    welcomed: Vec<(u32, TcpStream)>,
    /// Ranks that have come, and have not been requested yet.
    here: BTreeMap<u32, TcpStream>,
}

impl PeerListener {
    /// Serves pending connections until a rank has come or until a deadline. Its stream does not
    /// block.
    ///
    /// # Errors
    /// [`BootstrapError::System`].
    pub fn accept(&mut self, rank: u32, until: Instant) -> Result<Option<TcpStream>, BootstrapError> {
        loop {
            let now = Instant::now();
            for arrival in self.queue.turn(now) {
                let (from, mut connection) = (arrival.hello.rank, arrival.connection);
                connection.send(&Message::Welcome { addresses: Vec::new() });
                connection.flush();
                self.welcomed.extend(connection.into_stream().map(|stream| (from, stream)));
            }
            self.hear();
            let stream = self.here.remove(&rank);
            if stream.is_some() || now >= until {
                return Ok(stream);
            }
            let next = self.queue.next().into_iter().fold(until, Instant::min);
            let welcomed = self.welcomed.iter().map(|(_, stream)| PollFd::new(stream, PollFlags::IN));
            poll_until(&mut self.queue.poll_fds().chain(welcomed).collect::<Vec<_>>(), next)?;
        }
    }

    /// A welcomed rank takes its stream, or has given it up. Bytes behind the one byte are left for
    /// the stream's user.
    fn hear(&mut self) {
        for (from, mut stream) in std::mem::take(&mut self.welcomed) {
            let mut byte = [0];
            match stream.read(&mut byte) {
                Ok(1) if byte == [TAKEN] => drop(self.here.insert(from, stream)),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    self.welcomed.push((from, stream));
                }
                _ => {}
            }
        }
    }
}

/// Time limit of an authentication.
const AUTHENTICATION: Duration = Duration::from_secs(5);
/// Pending handshakes at a time, where the process may have enough descriptors.
const MAX_PENDING: usize = 1024;
/// Connections accepted between two looks at all pending ones. A quarter of the queue or less, so
/// that no connection makes room for another before it was read from.
const ACCEPTED_AT_ONCE: usize = 64;
/// Connections that the system holds for a listener until they are accepted: as many as ranks of a
/// large world that connect at once. The system lowers it to its own bound.
const BACKLOG: i32 = 16384;
/// Pause after the system had no descriptor left for a handshake.
const REST: Duration = Duration::from_millis(100);

/// A listener that does not block, with the longest queue that the system grants. The standard
/// library asks for 128 connections.
pub(super) fn patient(listener: TcpListener) -> io::Result<TcpListener> {
    rustix::net::listen(&listener, BACKLOG)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

#[derive(Debug)]
struct PendingHandshake {
    from: IpAddr,
    connection: MessageConnection,
    responder: Responder,
    until: Instant,
}

/// An authenticated rank of this job.
#[derive(Debug)]
pub(in crate::bootstrap) struct AuthenticatedPeer {
    pub hello: Hello,
    pub connection: MessageConnection,
}

impl AuthenticatedPeer {
    /// Closes the connection. Queued bytes are sent; a reason that does not fit the socket's buffer
    /// is lost.
    pub(in crate::bootstrap) fn refuse(mut self, refusal: JoinRefusal) {
        self.connection.send(&Message::Refused(refusal));
        self.connection.flush();
    }
}

/// A listener and its pending handshakes.
#[derive(Debug)]
pub(in crate::bootstrap) struct HandshakeQueue {
    listener: TcpListener,
    secret: Secret,
    rendezvous: RendezvousId,
    /// In order of arrival.
    pending: Vec<PendingHandshake>,
    max_pending: usize,
    rests_until: Option<Instant>,
    /// The first of the failures to accept since the last success.
    exhausted: Option<(Instant, BootstrapError)>,
    refusals: Refusals,
}

impl HandshakeQueue {
    /// Connections come through a listener that does not block.
    pub(super) fn new(listener: TcpListener, secret: Secret, rendezvous: RendezvousId) -> Self {
        // Strangers take a quarter of the process's descriptors at most. The others are for ranks.
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let max_pending = MAX_PENDING.min((descriptors / 4) as usize).max(1);
        HandshakeQueue {
            listener,
            secret,
            rendezvous,
            pending: Vec::new(),
            max_pending,
            rests_until: None,
            exhausted: None,
            refusals: Refusals::default(),
        }
    }

    /// The reason if the system has let this process accept no connection for so long.
    pub(in crate::bootstrap) fn exhausted_for(
        &self,
        limit: Duration,
        now: Instant,
    ) -> Option<BootstrapError> {
        let (since, error) = self.exhausted.as_ref()?;
        (now >= *since + limit).then(|| error.clone())
    }

    /// Joins with another secret.
    pub(in crate::bootstrap) fn refused_joins(&self) -> Option<RefusedJoins> {
        self.refusals.wrong_secret
    }

    pub(in crate::bootstrap) fn rendezvous(&self) -> &RendezvousId {
        &self.rendezvous
    }

    /// Events to wait for.
    pub(in crate::bootstrap) fn poll_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        let open = self.rests_until.is_none();
        let listener = open.then(|| PollFd::new(&self.listener, PollFlags::IN));
        listener.into_iter().chain(self.pending.iter().map(|handshake| handshake.connection.poll_fd()))
    }

    /// When to look even if nothing comes.
    pub(in crate::bootstrap) fn next(&self) -> Option<Instant> {
        self.pending.iter().map(|handshake| handshake.until).chain(self.rests_until).min()
    }

    /// Advances the pending handshakes by one step. Returns the authenticated peers.
    pub(in crate::bootstrap) fn turn(&mut self, now: Instant) -> Vec<AuthenticatedPeer> {
        self.rests_until = self.rests_until.filter(|&until| now < until);
        if self.rests_until.is_none() {
            self.accept(now);
        }
        let mut arrivals = Vec::new();
        for handshake in std::mem::take(&mut self.pending) {
            let from = handshake.from;
            match handshake.step(now) {
                Next::Stays(handshake) => self.pending.push(handshake),
                Next::Arrives(arrival) => arrivals.push(arrival),
                Next::Refused(refusal) => {
                    if let Some(joins) = self.refusals.count(from, &refusal, now) {
                        tracing::warn!(joins, last = %from, ?refusal, "joins refused at the rendezvous");
                    }
                }
                Next::Leaves => {}
            }
        }
        arrivals
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPTED_AT_ONCE.min(self.max_pending.div_ceil(4)) {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    self.exhausted = None;
                    let (Ok(connection), Ok(nonce)) = (MessageConnection::new(stream), random()) else {
                        continue;
                    };
                    if self.pending.len() >= self.max_pending {
                        self.make_room();
                    }
                    let responder = Responder::new(self.secret.clone(), self.rendezvous, nonce);
                    let (from, until) = (from.ip().to_canonical(), now + AUTHENTICATION);
                    self.pending.push(PendingHandshake { from, connection, responder, until });
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.exhausted = None;
                    return;
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept at the rendezvous");
                    self.exhausted.get_or_insert_with(|| (now, failed("accept", &error)));
                    self.rests_until = Some(now + REST);
                    return;
                }
            }
        }
    }

    /// Closes a pending connection: of those from the address that has most, the oldest that has
    /// said nothing, or else the oldest. A rank speaks at once, so silent strangers go before it,
    /// and no address can fill the queue for the others.
    fn make_room(&mut self) {
        let mut held: HashMap<IpAddr, usize> = HashMap::new();
        for handshake in &self.pending {
            *held.entry(handshake.from).or_default() += 1;
        }
        let most = held.values().max().copied();
        let of_crowd = |handshake: &PendingHandshake| held.get(&handshake.from).copied() == most;
        let silent = |handshake: &PendingHandshake| of_crowd(handshake) && !handshake.responder.challenged();
        let oldest = self.pending.iter().position(silent).or_else(|| self.pending.iter().position(of_crowd));
        oldest.map(|oldest| self.pending.remove(oldest));
    }
}

/// Least time between two warnings about refused joins: strangers do not fill the log.
const WARNING_PAUSE: Duration = Duration::from_secs(10);

/// Refused joins, for warnings and for the error of ranks that wait in vain.
#[derive(Debug, Default)]
struct Refusals {
    joins: u32,
    wrong_secret: Option<RefusedJoins>,
    warned: Option<Instant>,
}

impl Refusals {
    /// Returns the number of refused joins if a warning is due.
    fn count(&mut self, from: IpAddr, refusal: &JoinRefusal, now: Instant) -> Option<u32> {
        self.joins = self.joins.saturating_add(1);
        if *refusal == JoinRefusal::WrongSecret {
            let joins = self.wrong_secret.map_or(0, |refused| refused.joins).saturating_add(1);
            self.wrong_secret = Some(RefusedJoins { joins, last: from });
        }
        let due = self.warned.is_none_or(|warned| now >= warned + WARNING_PAUSE);
        due.then(|| {
            self.warned = Some(now);
            self.joins
        })
    }
}

/// Outcome of a handshake.
enum Next {
    Stays(PendingHandshake),
    Arrives(AuthenticatedPeer),
    Refused(JoinRefusal),
    Leaves,
}

impl PendingHandshake {
    fn step(mut self, now: Instant) -> Next {
        self.connection.fill();
        while let Some(message) = self.connection.next() {
            if self.responder.challenged() {
                return self.verify(message);
            }
            match self.responder.challenge(message) {
                Ok(challenge) => self.connection.send(&challenge),
                Err(refusal) => return refuse(self.connection, refusal),
            }
        }
        self.connection.flush();
        if self.connection.is_closed() || now >= self.until { Next::Leaves } else { Next::Stays(self) }
    }

    fn verify(mut self, message: Message) -> Next {
        let (peer, proof) = match self.responder.verify(message) {
            Ok(known) => known,
            Err(refusal) => return refuse(self.connection, refusal),
        };
        self.connection.send(&proof);
        match peer.accept() {
            Ok(hello) => {
                self.connection.trust();
                Next::Arrives(AuthenticatedPeer { hello, connection: self.connection })
            }
            Err(refusal) => refuse(self.connection, refusal),
        }
    }
}

fn refuse(mut connection: MessageConnection, refusal: JoinRefusal) -> Next {
    connection.send(&Message::Refused(refusal.clone()));
    connection.flush();
    Next::Refused(refusal)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn pass(secret: &str, job: u8, rank: u32, epoch: u16) -> PeerAuth {
        PeerAuth::new(Secret::from_bytes(secret), [job; 32], rank, epoch, vec![LOCAL; 3])
    }

    /// Connects to the listener of rank 0 of job 7, epoch 4, whose secret is "s".
    fn connect(
        handshake: PeerAuth,
        looks_for: u32,
    ) -> (Result<TcpStream, BootstrapError>, Option<TcpStream>) {
        let listener = TcpListener::bind((LOCAL, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let mut listener = pass("s", 7, 0, 4).receive(listener).unwrap();
        // They are unauthenticated, and block no rank.
        let _silent = TcpStream::connect(address).unwrap();
        TcpStream::connect(address).unwrap().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| handshake.connect(looks_for, address, &|| false));
            let until = Instant::now() + Duration::from_secs(30);
            let mut seen = None;
            while seen.is_none() && !connecting.is_finished() && Instant::now() < until {
                let slice = Instant::now() + Duration::from_millis(10);
                seen = listener.accept(handshake.rank(), slice).unwrap();
            }
            (connecting.join().unwrap(), seen)
        })
    }

    #[test]
    fn ranks_of_a_world_find_each_other_among_strangers() {
        let (theirs, ours) = connect(pass("s", 7, 2, 4), 0);
        let (mut theirs, mut ours) = (theirs.unwrap(), ours.unwrap());
        theirs.set_nonblocking(false).unwrap();
        ours.write_all(b"hello").unwrap();
        let mut seen = [0; 5];
        theirs.read_exact(&mut seen).unwrap();
        assert_eq!(&seen, b"hello");
    }

    #[test]
    fn rank_that_left_during_welcome_can_connect_again() {
        let listener = TcpListener::bind((LOCAL, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let mut listener = pass("s", 7, 0, 4).receive(listener).unwrap();
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| {
                let handshake = pass("s", 7, 2, 4);
                drop(handshake.greet(0, address, &|| false).unwrap());
                let mut stream = handshake.connect(0, address, &|| false).unwrap();
                stream.write_all(b"hello").unwrap();
            });
            let until = Instant::now() + Duration::from_secs(30);
            let mut ours = listener.accept(2, until).unwrap().unwrap();
            connecting.join().unwrap();
            ours.set_nonblocking(false).unwrap();
            let mut seen = Vec::new();
            ours.read_to_end(&mut seen).unwrap();
            assert_eq!(seen, b"hello");
            assert!(listener.welcomed.is_empty(), "the first stream belongs to no rank");
        });
    }

    #[test]
    fn rank_gets_in_where_silent_strangers_fill_the_queue() {
        let listener = TcpListener::bind((LOCAL, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let mut reception = pass("s", 7, 0, 4).receive(listener).unwrap();
        reception.queue.max_pending = 4;
        let _silent: Vec<_> = (0..20).map(|_| TcpStream::connect(address).unwrap()).collect();
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| pass("s", 7, 2, 4).connect(0, address, &|| false));
            let until = Instant::now() + Duration::from_secs(30);
            assert!(reception.accept(2, until).unwrap().is_some());
            connecting.join().unwrap().unwrap();
        });
        assert!(reception.queue.pending.len() <= 4);
    }

    #[test]
    fn refused_joins_warn_once_in_ten_seconds() {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        let other: IpAddr = [10, 0, 0, 2].into();
        assert_eq!(refusals.count(LOCAL, &JoinRefusal::Malformed, now), Some(1));
        assert_eq!(refusals.wrong_secret, None, "a scanner is no rank");
        assert_eq!(refusals.count(LOCAL, &JoinRefusal::WrongSecret, now), None);
        assert_eq!(refusals.count(other, &JoinRefusal::WrongSecret, now + WARNING_PAUSE), Some(3));
        assert_eq!(refusals.wrong_secret, Some(RefusedJoins { joins: 2, last: other }));
    }

    #[test]
    fn rank_of_another_world_is_refused() {
        let refused = |handshake: PeerAuth, looks_for| {
            let (theirs, ours) = connect(handshake, looks_for);
            assert!(ours.is_none());
            theirs.unwrap_err()
        };
        let wrong = refused(pass("guessed", 7, 2, 4), 0);
        assert!(matches!(wrong, BootstrapError::WrongSecret { .. }), "{wrong}");
        let old = refused(pass("s", 7, 2, 3), 0);
        assert_eq!(old, BootstrapError::World(Cause::Evicted { rank: 2, epoch: 4 }));
        let other = refused(pass("s", 8, 2, 4), 0);
        assert!(matches!(other, BootstrapError::Malformed { .. }), "{other}");
        let elsewhere = refused(pass("s", 7, 2, 4), 1);
        assert!(matches!(elsewhere, BootstrapError::Malformed { .. }), "{elsewhere}");
        let beyond = refused(pass("s", 7, 3, 4), 0);
        assert_eq!(beyond, BootstrapError::RankRefused { rank: 3, size: 3 });
    }
}
