//! From processes to the members of a world: the first rendezvous of a job, and the next after a
//! loss.
//!
//! ```text
//!   ports to try  29501  29502  29503 ...        epoch e      0 ✗    1      2      3
//!   rank 0        taken  BIND                    epoch e+1           0 ◄─── 1 ◄─── 2
//!   rank k        try    try ──► the handshake proves that this is the job
//! ```
//!
//! **First.** Rank 0 listens, the others look for it. A launcher's own store uses the master port,
//! and other jobs may use the ports after it, so no port is trusted: the handshake finds the right
//! one.
//!
//! **Again.** Each rank has had a listener since it joined. The lowest rank not known lost hosts,
//! and the old order is kept. The old world's connections stay open meanwhile, so a rank that dies
//! during the rebuild is noticed. A world that a network failure splits in two can become two
//! worlds of the same epoch: ranks cannot distinguish a split from a death. A program that must
//! exclude this compares the size of the new world with the size that it needs.
//!
//! **Beginning.** [`JoinBarrier`] decides when the world begins. It is a state machine without
//! sockets, which gets the time from its caller. The window is for ranks that died unnoticed. It
//! opens with the second arrival: a rank alone never concludes that it is the only one left.
//!
//! ```text
//!   first      begins when all `size` ranks are here
//!   rebuild    begins when all ranks not known absent are here, or a short window after the second came
//! ```

use std::cell::Cell;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::listener::{HandshakeQueue, patient};
use crate::bootstrap::hub::{HOST, Hub, HubConfig, Job, TcpHub, coordinate};
use crate::bootstrap::identity::Identity;
use crate::bootstrap::secret::{Secret, random};
use crate::bootstrap::thread::Thread;
use crate::bootstrap::watch::{Health, Timeouts};
use crate::bootstrap::wire::{
    Hello, Initiator, JoinRefusal, ListenAddress, Message, MessageConnection, PROTOCOL, RendezvousId,
    job_digest,
};
use crate::bootstrap::{failed, interrupted, wait};
use crate::error::{BootstrapError, Cause};

/// Bound of the challenge of one candidate: a stranger that accepts and stays silent costs this
/// much. A rank also looks beyond a job with another secret for so long.
const GREETING: Duration = Duration::from_secs(2);
/// Bound of the query for another rank 0 at one port. A foreign process that stays silent delays
/// rank 0 by so long.
const HOST_QUERY: Duration = Duration::from_millis(500);
/// Pause between two rounds over the candidates.
const PAUSE: Duration = Duration::from_millis(30);

/// Meets the other ranks of the job over TCP.
///
/// Without a secret only loopback addresses are used, and the key of this user, so that processes
/// of other users are refused; unless the identity does without (`SIDELANE_INSECURE=1`).
pub fn connect(
    identity: &Identity,
    secret: Option<Secret>,
    timeouts: Timeouts,
) -> Result<Box<dyn Hub>, BootstrapError> {
    let until = Instant::now() + timeouts.rendezvous;
    if secret.is_none() && !identity.is_local() && !identity.insecure {
        return Err(BootstrapError::NoSecret { address: identity.master_addr.clone() });
    }
    let secret = match secret {
        Some(secret) => secret,
        None if identity.insecure => Secret::none(),
        None => Secret::of_user()?,
    };
    let job = Job { digest: job_digest(&identity.job), secret, timeouts, launcher: identity.launcher_pipe };
    let rendezvous = RendezvousId { job: job.digest, size: identity.size, epoch: 0, host: HOST };
    let (membership, hosted) = match identity.rank {
        HOST => {
            let listener = bind(identity)?;
            if has_other_host(identity, &job.secret, rendezvous, &listener) {
                let (rank, size) = (HOST, identity.size);
                return Err(BootstrapError::RankRefused { rank, size });
            }
            let hosted = host(
                listener,
                &job,
                rendezvous,
                JoinBarrier::first(identity.size),
                Box::new(Vec::new),
                until,
            )?;
            let membership = seek(identity, &job, rendezvous, Some(&hosted), until);
            let (membership, hosted) = attended(membership, hosted)?;
            (membership, Some(hosted))
        }
        _ => (seek(identity, &job, rendezvous, None, until)?, None),
    };
    Ok(Box::new(TcpHub::new(job, 0, membership, hosted)?))
}

/// A world that this rank hosts.
pub struct Hosted {
    /// Where its own rank reaches the coordinator.
    pub(super) address: SocketAddr,
    /// The health of this rank, which the coordinator ends if it dies.
    pub health: Arc<Health>,
    pub coordinator: JoinHandle<()>,
}

/// Starts a coordinator.
pub(super) fn host(
    listener: TcpListener,
    job: &Job,
    rendezvous: RendezvousId,
    barrier: JoinBarrier,
    absent: Box<dyn Fn() -> Vec<u32> + Send>,
    until: Instant,
) -> Result<Hosted, BootstrapError> {
    let mut address = listener.local_addr().map_err(|error| failed("getsockname", &error))?;
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    let queue = HandshakeQueue::new(listener, job.secret.clone(), rendezvous);
    let config = HubConfig { queue, barrier, absent, timeouts: job.timeouts, until };
    let health = Arc::default();
    let thread = Thread::new("coordinator", HOST, &health);
    let life = thread.clone();
    let coordinator = thread.spawn(move || coordinate(config, &life));
    let coordinator = coordinator.map_err(|error| failed("thread spawn", &error))?;
    Ok(Hosted { address, health, coordinator })
}

/// A host that cannot join waits for its coordinator, which still has messages for the others: the
/// process may end next.
fn attended<E>(membership: Result<Membership, E>, hosted: Hosted) -> Result<(Membership, Hosted), E> {
    match membership {
        Ok(membership) => Ok((membership, hosted)),
        Err(error) => {
            wait::join(hosted.coordinator);
            Err(error)
        }
    }
}

/// Binds the first free port.
fn bind(identity: &Identity) -> Result<TcpListener, BootstrapError> {
    let ips: Vec<IpAddr> = match identity.is_local() {
        true => vec![identity.loopback()],
        false => vec![Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()],
    };
    let mut refused = None;
    for &ip in &ips {
        for &port in &identity.ports {
            match TcpListener::bind((ip, port)).and_then(patient) {
                Ok(listener) => return Ok(listener),
                Err(error) => refused = Some((port, error)),
            }
        }
    }
    Err(match (identity.ports.first(), refused) {
        (Some(&first), Some((last, error))) => {
            BootstrapError::NoPort { first, last, errno: error.raw_os_error().unwrap_or_default() }
        }
        _ => BootstrapError::MissingVariable { name: "SIDELANE_PORT", hint: "a port that rank 0 can use" },
    })
}

/// Whether another process of this machine is rank 0 of this job. It took a port before ours.
///
/// Without this query two processes of rank 0 both wait for ranks that join the other one.
fn has_other_host(
    identity: &Identity,
    secret: &Secret,
    rendezvous: RendezvousId,
    listener: &TcpListener,
) -> bool {
    let own = listener.local_addr().map_or(0, |address| address.port());
    let mut taken = identity.ports.iter().take_while(|&&port| port != own);
    taken.any(|&port| hosts(SocketAddr::new(identity.loopback(), port), secret, rendezvous))
}

/// Whether the host of this rendezvous answers at an address. It proves itself to a rank that does
/// not exist, so the query takes no rank's place.
fn hosts(address: SocketAddr, secret: &Secret, rendezvous: RendezvousId) -> bool {
    let until = Instant::now() + HOST_QUERY;
    let Ok(nonce) = random() else { return false };
    let Ok(stream) = wait::connect(address, HOST_QUERY) else { return false };
    let Ok(mut connection) = MessageConnection::new(stream) else { return false };
    let RendezvousId { job, size, epoch, host } = rendezvous;
    let hello = Hello { version: PROTOCOL, job, rank: size, size, epoch, host, port: 0, nonce };
    let initiator = Initiator::new(secret.clone(), hello);
    matches!(shake_hands(&mut connection, initiator, until, &|| false), Some(Ok(())))
}

/// Tries the candidates in turn until one is the right one. A rank that hosts need not search.
fn seek(
    identity: &Identity,
    job: &Job,
    rendezvous: RendezvousId,
    hosted: Option<&Hosted>,
    until: Instant,
) -> Result<Membership, BootstrapError> {
    let start = Instant::now();
    // A job that holds one of the ports and has another secret may be another user's, with the same
    // name.
    let mut foreign = None;
    let mut other_job = None;
    let interrupt = Interrupt::default();
    loop {
        interrupt.check("rendezvous")?;
        if let Some(hosted) = hosted {
            hosted.health.check()?;
        }
        let candidates = hosted.map_or_else(|| candidates(identity, until), |hosted| vec![hosted.address]);
        for address in candidates {
            let now = Instant::now();
            let request = JoinRequest {
                secret: &job.secret,
                rendezvous,
                rank: identity.rank,
                beyond_loopback: !identity.is_local(),
                greeted_until: until.min(now + GREETING),
                until,
                stop: &|| interrupt.came() || hosted.is_some_and(|hosted| hosted.health.check().is_err()),
            };
            let outcome = request.at(address);
            if outcome.is_err() {
                interrupt.check("rendezvous")?;
            }
            match outcome {
                Ok(membership) => return Ok(membership),
                Err(JoinError::Unreachable) => {}
                Err(JoinError::Failed(error)) => return Err(error),
                Err(JoinError::Refused(JoinRefusal::OtherJob)) => other_job = Some(address.to_string()),
                Err(JoinError::Refused(JoinRefusal::WrongSecret)) => {
                    foreign.get_or_insert((Instant::now(), address));
                }
                Err(JoinError::Refused(refusal)) => return Err(explain(refusal, identity, address, start)),
            }
        }
        let over = Instant::now() + PAUSE >= until;
        if let Some((since, address)) = foreign
            && (over || since.elapsed() > GREETING)
        {
            return Err(explain(JoinRefusal::WrongSecret, identity, address, start));
        }
        if over {
            let address = format!("{} (ports {})", identity.master_addr, list(&identity.ports));
            return Err(BootstrapError::NoRendezvous { address, waited: start.elapsed(), other_job });
        }
        wait::nap(PAUSE);
    }
}

/// Every address of the master with every port; resolved anew each round, since names appear late.
fn candidates(identity: &Identity, until: Instant) -> Vec<SocketAddr> {
    let ips: Vec<IpAddr> = match identity.is_local() {
        true => vec![identity.loopback()],
        false => wait::resolve(&identity.master_addr, until),
    };
    identity.ports.iter().flat_map(|&port| ips.iter().map(move |&ip| SocketAddr::new(ip, port))).collect()
}

/// The wish of a thread's user to stop. A check may say so only once.
#[derive(Default)]
struct Interrupt(Cell<bool>);

impl Interrupt {
    fn came(&self) -> bool {
        self.0.set(self.0.get() || interrupted());
        self.0.get()
    }

    fn check(&self, step: &str) -> Result<(), BootstrapError> {
        if self.came() { Err(BootstrapError::Interrupted { step: step.to_owned() }) } else { Ok(()) }
    }
}

fn list(ports: &[u16]) -> String {
    match ports {
        [first, .., last] => format!("{first} to {last}"),
        [port] => port.to_string(),
        [] => "none".to_owned(),
    }
}

fn explain(refusal: JoinRefusal, identity: &Identity, address: SocketAddr, start: Instant) -> BootstrapError {
    let peer = address.to_string();
    let (rank, size) = (identity.rank, identity.size);
    match refusal {
        JoinRefusal::Version(seen) => BootstrapError::Version { peer, seen, expected: PROTOCOL },
        JoinRefusal::WrongSecret => BootstrapError::WrongSecret { peer },
        JoinRefusal::Rank => BootstrapError::RankRefused { rank, size },
        JoinRefusal::Evicted(epoch) => BootstrapError::World(Cause::Evicted { rank, epoch }),
        JoinRefusal::Missing { ranks: missing, refused } => {
            let (step, waited) = ("rendezvous".to_owned(), start.elapsed());
            BootstrapError::Deadline { step, missing, waited, refused }
        }
        JoinRefusal::OtherJob | JoinRefusal::Malformed => BootstrapError::Malformed { peer },
    }
}

/// Bound of one attempt to connect.
const CONNECT: Duration = Duration::from_secs(1);
/// Bound of the proof of a host that has challenged.
const ANSWER: Duration = Duration::from_secs(5);
/// Bound of the query for missing ranks.
const FINAL_QUERY: Duration = Duration::from_secs(1);

/// A place in a world.
pub struct Membership {
    pub connection: MessageConnection,
    pub rank: u32,
    /// For each rank of the new world, its rank before.
    pub members: Vec<u32>,
    /// Where each rank of the new world listens.
    pub addresses: Vec<SocketAddr>,
    /// Where this one does.
    pub listener: TcpListener,
}

/// Reason why a rank cannot join.
pub(super) enum JoinError {
    /// No process, another process, or a closed connection: try again or elsewhere.
    Unreachable,
    /// Of this job, and no.
    Refused(JoinRefusal),
    /// This side failed.
    Failed(BootstrapError),
}

/// The joining rank, and its waiting time.
pub(super) struct JoinRequest<'a> {
    pub secret: &'a Secret,
    pub rendezvous: RendezvousId,
    pub rank: u32,
    /// Whether other machines must reach the listener.
    pub beyond_loopback: bool,
    /// Bound of the host's challenge.
    pub greeted_until: Instant,
    /// Bound of the whole rendezvous.
    pub until: Instant,
    /// Whether to stop waiting for this host.
    pub stop: &'a dyn Fn() -> bool,
}

impl JoinRequest<'_> {
    /// Tries to join at an address.
    pub(super) fn at(&self, address: SocketAddr) -> Result<Membership, JoinError> {
        let limit = self.greeted_until.saturating_duration_since(Instant::now()).min(CONNECT);
        let limit = limit.max(Duration::from_millis(1));
        let stream = wait::connect(address, limit).map_err(|_| JoinError::Unreachable)?;
        let local = stream.local_addr().map_err(|_| JoinError::Unreachable)?.ip();
        let mut connection = MessageConnection::new(stream).map_err(|_| JoinError::Unreachable)?;
        let listener = self.listen(local)?;
        let port = listener.local_addr().map_err(fail("getsockname"))?.port();

        let RendezvousId { job, size, epoch, host } = self.rendezvous;
        let nonce = random().map_err(JoinError::Failed)?;
        let hello = Hello { version: PROTOCOL, job, rank: self.rank, size, epoch, host, port, nonce };
        let initiator = Initiator::new(self.secret.clone(), hello);
        let greeted = shake_hands(&mut connection, initiator, self.greeted_until, self.stop);
        greeted.ok_or(JoinError::Unreachable)?.map_err(miss)?;
        let verdict = connection.await_message(self.until, self.stop).or_else(|| {
            connection.send(&Message::Withdraw { ticket: 0 });
            connection.await_message(Instant::now() + FINAL_QUERY, &|| false)
        });
        match verdict.ok_or(JoinError::Unreachable)? {
            Message::Refused(refusal) => Err(miss(refusal)),
            Message::Welcome { rank, members, addresses } => {
                let mine = members.get(rank as usize) == Some(&self.rank);
                if !mine || members.len() != addresses.len() {
                    return Err(JoinError::Refused(JoinRefusal::Malformed));
                }
                let addresses = addresses.iter().map(|listens| resolve(listens, address.ip())).collect();
                Ok(Membership { connection, rank, members, addresses, listener })
            }
            _ => Err(JoinError::Refused(JoinRefusal::Malformed)),
        }
    }

    /// The listener at which this rank would host a rebuild.
    fn listen(&self, local: IpAddr) -> Result<TcpListener, JoinError> {
        let ip = match (local, self.beyond_loopback && local.is_loopback()) {
            // The host's own machine is reached by its loopback address here, but not from
            // elsewhere.
            (IpAddr::V4(_), true) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            (IpAddr::V6(_), true) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            (local, false) => local,
        };
        TcpListener::bind((ip, 0)).and_then(patient).map_err(fail("bind"))
    }
}

/// The guest's part of the handshake. None if the host is silent.
pub(super) fn shake_hands(
    connection: &mut MessageConnection,
    mut guest: Initiator,
    greeted_until: Instant,
    stop: &dyn Fn() -> bool,
) -> Option<Result<(), JoinRefusal>> {
    connection.send(&guest.hello());
    let challenge = connection.await_message(greeted_until, stop)?;
    let proof = match guest.answer(challenge) {
        Ok(proof) => proof,
        Err(refusal) => return Some(Err(refusal)),
    };
    connection.send(&proof);
    let answer = connection.await_message(Instant::now() + ANSWER, stop)?;
    let known = guest.verify(answer);
    if known.is_ok() {
        connection.trust();
    }
    Some(known)
}

/// Another protocol: not the wanted host.
fn miss(refusal: JoinRefusal) -> JoinError {
    match refusal {
        JoinRefusal::Malformed => JoinError::Unreachable,
        refusal => JoinError::Refused(refusal),
    }
}

fn fail(call: &'static str) -> impl Fn(std::io::Error) -> JoinError {
    move |error| JoinError::Failed(failed(call, &error))
}

/// A address without an address is on the machine of the host.
fn resolve(address: &ListenAddress, host: IpAddr) -> SocketAddr {
    SocketAddr::new(address.ip.unwrap_or(host), address.port)
}

/// The gathering of a world.
#[derive(Debug)]
pub struct JoinBarrier {
    size: u32,
    window: Option<Duration>,
    here: BTreeSet<u32>,
    second: Option<Instant>,
}

impl JoinBarrier {
    /// The first meeting of `size` ranks.
    pub(super) fn first(size: u32) -> Self {
        JoinBarrier { size, window: None, here: BTreeSet::new(), second: None }
    }

    /// The survivors of a world of `size` ranks meet again.
    pub fn again(size: u32, window: Duration) -> Self {
        JoinBarrier { window: Some(window), ..JoinBarrier::first(size) }
    }

    /// A rank comes. False if it is here already or not of this world.
    pub fn join(&mut self, rank: u32, now: Instant) -> bool {
        let joined = rank < self.size && self.here.insert(rank);
        if joined && self.here.len() == 2 {
            self.second = Some(now);
        }
        joined
    }

    /// A rank goes away before the meeting began.
    pub fn part(&mut self, rank: u32) {
        self.here.remove(&rank);
        if self.here.len() < 2 {
            self.second = None;
        }
    }

    /// Whether the rendezvous is over for all when one rank gives up: without that one it could
    /// never begin.
    pub fn needs_all(&self) -> bool {
        self.window.is_none()
    }

    /// The ranks that have not come, without those known to be absent.
    pub fn missing(&self, absent: &[u32]) -> Vec<u32> {
        (0..self.size).filter(|rank| !self.here.contains(rank) && !absent.contains(rank)).collect()
    }

    /// The members, ascending, if the meeting may begin.
    pub fn members(&self, absent: &[u32], now: Instant) -> Option<Vec<u32>> {
        let all = match self.window {
            None => self.here.len() == self.size as usize,
            Some(_) => !self.here.is_empty() && self.missing(absent).is_empty(),
        };
        let closed = self.closes().is_some_and(|closes| now >= closes);
        (all || closed).then(|| self.here.iter().copied().collect())
    }

    /// When the window closes.
    pub fn closes(&self) -> Option<Instant> {
        Some(self.second? + self.window?)
    }
}

/// Where a hub went, and where its ranks come from.
type Rebuilt = (Box<dyn Hub>, Vec<u32>);

/// Meets the survivors in the next epoch.
pub fn rebuild(old: &TcpHub, deadline: Duration) -> Result<Rebuilt, BootstrapError> {
    let start = Instant::now();
    let until = start + deadline;
    may_rebuild(old)?;
    let epoch = old.epoch.wrapping_add(1);
    let mut tried = Vec::new();
    let interrupt = Interrupt::default();
    loop {
        interrupt.check("rebuild")?;
        let absent = old.health().absent();
        let mut candidates = (0..old.size).filter(|rank| !absent.contains(rank) && !tried.contains(rank));
        let Some(candidate) = candidates.next() else {
            let (coordinator, waited) = (tried.first().copied().unwrap_or(old.rank), start.elapsed());
            return Err(BootstrapError::RebuildFailed { epoch, coordinator, waited });
        };
        // Leaves time for the next one, should this one never answer.
        let limit = until.saturating_duration_since(Instant::now());
        let limit = if candidates.next().is_some() { limit / 2 } else { limit };
        let rendezvous = RendezvousId { job: old.job.digest, size: old.size, epoch, host: candidate };
        let health = old.health().clone();
        let stop = || health.is_absent(candidate) || interrupt.came();
        let request = JoinRequest {
            secret: &old.job.secret,
            rendezvous,
            rank: old.rank,
            beyond_loopback: old.addresses.iter().any(|address| !address.ip().is_loopback()),
            greeted_until: Instant::now() + limit,
            until,
            stop: &stop,
        };
        let joined = if candidate == old.rank {
            lead(old, &request)
        } else {
            request
                .at(old.addresses[candidate as usize])
                .and_then(|membership| join_host(old, epoch, membership, None))
        };
        if joined.is_err() {
            interrupt.check("rebuild")?;
        }
        match joined {
            Ok(rebuilt) => return Ok(rebuilt),
            Err(JoinError::Failed(error)) => return Err(error),
            Err(JoinError::Refused(JoinRefusal::Evicted(epoch))) => {
                return Err(Cause::Evicted { rank: old.rank, epoch }.into());
            }
            Err(JoinError::Refused(JoinRefusal::Missing { .. })) => {
                let (coordinator, waited) = (candidate, start.elapsed());
                return Err(BootstrapError::RebuildFailed { epoch, coordinator, waited });
            }
            Err(JoinError::Unreachable | JoinError::Refused(_)) => tried.push(candidate),
        }
    }
}

/// Some worlds are not rebuilt. One that lives is ended first, so that the others come too.
fn may_rebuild(old: &TcpHub) -> Result<(), BootstrapError> {
    match old.health().check() {
        Err(cause @ (Cause::LauncherGone { .. } | Cause::Evicted { .. })) => Err(cause.into()),
        Err(_) => Ok(()),
        Ok(()) => {
            old.cancel(Cause::Cancelled { by: old.rank });
            Ok(())
        }
    }
}

/// Hosts the meeting and takes part in it.
fn lead(old: &TcpHub, request: &JoinRequest<'_>) -> Result<Rebuilt, JoinError> {
    let listener = old.listener.try_clone().map_err(|error| JoinError::Failed(failed("dup", &error)))?;
    let barrier = JoinBarrier::again(old.size, old.job.timeouts.liveness * 2);
    let health = Arc::clone(old.health());
    let absent = Box::new(move || health.absent());
    let hosted = host(listener, &old.job, request.rendezvous, barrier, absent, request.until)
        .map_err(JoinError::Failed)?;
    let (membership, hosted) = attended(request.at(hosted.address), hosted)?;
    join_host(old, request.rendezvous.epoch, membership, Some(hosted))
}

fn join_host(
    old: &TcpHub,
    epoch: u16,
    membership: Membership,
    hosted: Option<Hosted>,
) -> Result<Rebuilt, JoinError> {
    let members = membership.members.clone();
    let hub = TcpHub::new(old.job.clone(), epoch, membership, hosted).map_err(JoinError::Failed)?;
    Ok((Box::new(hub), members))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_meeting_waits_for_everyone() {
        let now = Instant::now();
        let mut barrier = JoinBarrier::first(3);
        assert!(barrier.join(2, now) && barrier.join(0, now));
        assert!(!barrier.join(2, now), "taken");
        assert!(!barrier.join(3, now), "out of range");
        let later = now + Duration::from_secs(9999);
        assert_eq!(barrier.members(&[1], later), None, "even a rank known lost is waited for");
        assert_eq!(barrier.missing(&[]), [1]);
        assert!(barrier.join(1, now));
        assert_eq!(barrier.members(&[], now), Some(vec![0, 1, 2]));
    }

    #[test]
    fn a_rebuild_begins_with_everyone_not_known_absent() {
        let now = Instant::now();
        let mut barrier = JoinBarrier::again(4, Duration::from_secs(3));
        barrier.join(3, now);
        barrier.join(1, now);
        assert_eq!(barrier.members(&[2], now), None);
        assert_eq!(barrier.missing(&[2]), [0]);
        assert_eq!(barrier.members(&[2, 0], now), Some(vec![1, 3]));
    }

    #[test]
    fn the_window_opens_with_the_second_arrival() {
        let now = Instant::now();
        let window = Duration::from_secs(3);
        let mut barrier = JoinBarrier::again(4, window);
        barrier.join(1, now);
        let later = now + window * 9;
        assert_eq!(barrier.members(&[], later), None, "alone, it waits");
        barrier.join(2, later);
        assert_eq!(barrier.members(&[], later + window / 2), None);
        assert_eq!(barrier.members(&[], later + window), Some(vec![1, 2]));
        barrier.part(2);
        assert_eq!(barrier.members(&[], later + window), None, "alone again");
        assert_eq!(barrier.members(&[0, 2, 3], later), Some(vec![1]), "known to be the only one");
    }
}
