//! From processes to the members of a world: the first rendezvous of a job.
//!
//! ```text
//!   ports to try  29501  29502  29503 ...
//!   rank 0        taken  BIND
//!   rank k        try    try ──► the handshake proves that this is the job
//! ```
//!
//! Rank 0 listens, the others look for it. A launcher's own store uses the master port, and other
//! jobs may use the ports after it, so no port is trusted: the handshake finds the right one. The
//! world begins when all ranks are here.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::gathering::Lineage;
use super::listener::{HandshakeQueue, patient};
use crate::bootstrap::health::{Health, Timeouts};
use crate::bootstrap::hub::{GatheringKind, HOST, Hub, HubConfig, Job, TcpHub, coordinate};
use crate::bootstrap::identity::Identity;
use crate::bootstrap::secret::{Secret, random};
use crate::bootstrap::threads::Thread;
use crate::bootstrap::wire::{
    Hello, Initiator, JoinRefusal, ListenAddress, Message, MessageConnection, PROTOCOL, RendezvousId, Roster,
    job_digest,
};
use crate::bootstrap::{failed, interrupted, system, wait};
use crate::error::{BootstrapError, Cause};

/// Bound of the challenge of one candidate: a stranger that accepts and stays silent costs this
/// much. A rank also looks beyond a job with another secret for so long.
pub(super) const GREETING: Duration = Duration::from_secs(2);
/// Bound of the query for another rank 0 at one port. A foreign process that stays silent delays
/// rank 0 by so long.
const HOST_QUERY: Duration = Duration::from_millis(500);
/// Pause between two rounds over the candidates.
pub(super) const PAUSE: Duration = Duration::from_millis(30);

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
    let job = job_of(identity, secret, timeouts)?;
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
                GatheringKind::First(JoinBarrier::new(identity.size)),
                until,
            )?;
            let membership = seek(identity, &job, rendezvous, Some(&hosted), until);
            let (membership, hosted) = attended(membership, hosted)?;
            (membership, Some(hosted))
        }
        _ => (seek(identity, &job, rendezvous, None, until)?, None),
    };
    Ok(Box::new(TcpHub::new(job, membership, hosted)?))
}

/// The job of this process, and what it proves to know of it.
pub(super) fn job_of(
    identity: &Identity,
    secret: Option<Secret>,
    timeouts: Timeouts,
) -> Result<Job, BootstrapError> {
    if secret.is_none() && !identity.is_local() && !identity.insecure {
        return Err(BootstrapError::NoSecret { address: identity.master_addr.clone() });
    }
    let secret = match secret {
        Some(secret) => secret,
        None if identity.insecure => Secret::none(),
        None => Secret::of_user()?,
    };
    Ok(Job { digest: job_digest(&identity.job), secret, timeouts, identity: identity.clone() })
}

/// A world that this rank hosts.
pub struct Hosted {
    /// Where its own rank reaches the coordinator.
    pub(super) address: SocketAddr,
    /// The health of this rank, which the coordinator ends if it dies.
    pub health: Arc<Health>,
    /// Set while the own rank needs the listener.
    pub released: Arc<AtomicBool>,
    /// Why the coordinator could not gather the ranks.
    failure: Arc<OnceLock<BootstrapError>>,
    pub coordinator: JoinHandle<()>,
}

/// Starts a coordinator.
pub(super) fn host(
    listener: TcpListener,
    job: &Job,
    rendezvous: RendezvousId,
    kind: GatheringKind,
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
    let (failure, released) = (Arc::<OnceLock<BootstrapError>>::default(), Arc::<AtomicBool>::default());
    let config = HubConfig {
        queue,
        kind,
        timeouts: job.timeouts,
        until,
        failure: Arc::clone(&failure),
        released: Arc::clone(&released),
    };
    let health = Arc::default();
    let thread = Thread::new("coordinator", HOST, &health);
    let life = thread.clone();
    let coordinator = thread.spawn(move || coordinate(config, &life));
    let coordinator = coordinator.map_err(|error| failed("thread spawn", &error))?;
    Ok(Hosted { address, health, released, failure, coordinator })
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
pub(super) fn bind(identity: &Identity) -> Result<TcpListener, BootstrapError> {
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
    matches!(shake_hands(&mut connection, initiator, until, ANSWER, &|| false), Some(Ok(())))
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
            hosted.failure.get().cloned().map_or(Ok(()), Err)?;
        }
        let candidates = hosted.map_or_else(|| candidates(identity, until), |hosted| vec![hosted.address]);
        let unknown = candidates.is_empty();
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
                Err(JoinError::Failed(error)) => {
                    let own = hosted.and_then(|hosted| hosted.failure.get().cloned());
                    return Err(own.unwrap_or(error));
                }
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
            let (master, waited) = (identity.master_addr.clone(), start.elapsed());
            if unknown && other_job.is_none() {
                return Err(BootstrapError::NoAddress { name: master, waited });
            }
            let address = format!("{master} (ports {})", list(&identity.ports));
            return Err(BootstrapError::NoRendezvous { address, waited, other_job });
        }
        wait::nap(PAUSE);
    }
}

/// Every address of the master with every port; resolved anew each round, since names appear late.
pub(super) fn candidates(identity: &Identity, until: Instant) -> Vec<SocketAddr> {
    let ips: Vec<IpAddr> = match identity.is_local() {
        true => vec![identity.loopback()],
        false => wait::resolve(&identity.master_addr, until),
    };
    identity.ports.iter().flat_map(|&port| ips.iter().map(move |&ip| SocketAddr::new(ip, port))).collect()
}

/// The wish of a thread's user to stop. A check may say so only once.
#[derive(Default)]
pub(super) struct Interrupt(Cell<bool>);

impl Interrupt {
    pub(super) fn came(&self) -> bool {
        self.0.set(self.0.get() || interrupted());
        self.0.get()
    }

    pub(super) fn check(&self, step: &str) -> Result<(), BootstrapError> {
        if self.came() { Err(BootstrapError::Interrupted { step: step.to_owned() }) } else { Ok(()) }
    }
}

pub(super) fn list(ports: &[u16]) -> String {
    match ports {
        [first, .., last] => format!("{first} to {last}"),
        [port] => port.to_string(),
        [] => "none".to_owned(),
    }
}

pub(super) fn explain(
    refusal: JoinRefusal,
    identity: &Identity,
    address: SocketAddr,
    start: Instant,
) -> BootstrapError {
    let peer = address.to_string();
    let (rank, size) = (identity.rank, identity.size);
    match refusal {
        JoinRefusal::Version(seen) => BootstrapError::Version { peer, seen, expected: PROTOCOL },
        JoinRefusal::WrongSecret => BootstrapError::WrongSecret { peer },
        JoinRefusal::Rank => BootstrapError::RankRefused { rank, size },
        JoinRefusal::Size(expected) => BootstrapError::JobSizesDiffer { rank, seen: size, expected },
        JoinRefusal::Setting { name, seen, expected } => {
            BootstrapError::SettingsDiffer { setting: name, seen, expected }
        }
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
pub(super) const ANSWER: Duration = Duration::from_secs(5);
/// Bound of the query for missing ranks.
const FINAL_QUERY: Duration = Duration::from_secs(1);

/// A place in a world.
pub struct Membership {
    pub connection: MessageConnection,
    /// The world, of which this rank is a member.
    pub roster: Roster,
    pub lineage: Arc<Lineage>,
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
        let stream = wait::connect(address, limit).map_err(|error| match Errno::from_io_error(&error) {
            // No other candidate can be reached either.
            Some(Errno::MFILE) => JoinError::Failed(system("socket", Errno::MFILE)),
            _ => JoinError::Unreachable,
        })?;
        let local = stream.local_addr().map_err(|_| JoinError::Unreachable)?.ip();
        let mut connection = MessageConnection::new(stream).map_err(|_| JoinError::Unreachable)?;
        let listener = listen_at(local, self.beyond_loopback)?;
        let port = listener.local_addr().map_err(fail("getsockname"))?.port();

        let RendezvousId { job, size, epoch, host } = self.rendezvous;
        let nonce = random().map_err(JoinError::Failed)?;
        let hello = Hello { version: PROTOCOL, job, rank: self.rank, size, epoch, host, port, nonce };
        let initiator = Initiator::new(self.secret.clone(), hello);
        let greeted = shake_hands(&mut connection, initiator, self.greeted_until, ANSWER, self.stop);
        greeted.ok_or(JoinError::Unreachable)?.map_err(miss)?;
        let verdict = connection.await_message(self.until, self.stop).or_else(|| {
            connection.send(&Message::Withdraw { ticket: 0 });
            connection.await_message(Instant::now() + FINAL_QUERY, &|| false)
        });
        match verdict.ok_or(JoinError::Unreachable)? {
            Message::Refused(refusal) => Err(miss(refusal)),
            Message::Welcome { addresses } if addresses.len() == size as usize => {
                let addresses = addresses.iter().map(|listens| resolve(listens, address.ip())).collect();
                let lineage = Arc::new(Lineage::new(self.rank, addresses, listener));
                Ok(Membership { connection, roster: lineage.accepted(), lineage })
            }
            // The coordinator has died, and rank 0 lives.
            Message::Dead(cause) => Err(JoinError::Failed(cause.into())),
            _ => Err(JoinError::Refused(JoinRefusal::Malformed)),
        }
    }
}

/// The listener at which a rank would host a rebuild, and whether other machines must reach it.
pub(super) fn listen_at(local: IpAddr, beyond_loopback: bool) -> Result<TcpListener, JoinError> {
    let ip = match (local, beyond_loopback && local.is_loopback()) {
        // The host's own machine is reached by its loopback address here, but not from elsewhere.
        (IpAddr::V4(_), true) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        (IpAddr::V6(_), true) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        (local, false) => local,
    };
    TcpListener::bind((ip, 0)).and_then(patient).map_err(fail("bind"))
}

/// The guest's part of the handshake. None if the host is silent: it challenges by a point in time,
/// and proves itself so long after it.
pub(super) fn shake_hands(
    connection: &mut MessageConnection,
    mut guest: Initiator,
    greeted_until: Instant,
    answers_within: Duration,
    stop: &dyn Fn() -> bool,
) -> Option<Result<(), JoinRefusal>> {
    connection.send(&guest.hello());
    let challenge = connection.await_message(greeted_until, stop)?;
    let proof = match guest.answer(challenge) {
        Ok(proof) => proof,
        Err(refusal) => return Some(Err(refusal)),
    };
    connection.send(&proof);
    let answer = connection.await_message(Instant::now() + answers_within, stop)?;
    let known = guest.verify(answer);
    if known.is_ok() {
        connection.trust();
    }
    Some(known)
}

/// Another protocol: not the wanted host.
pub(super) fn miss(refusal: JoinRefusal) -> JoinError {
    match refusal {
        JoinRefusal::Malformed => JoinError::Unreachable,
        refusal => JoinError::Refused(refusal),
    }
}

pub(super) fn fail(call: &'static str) -> impl Fn(std::io::Error) -> JoinError {
    move |error| JoinError::Failed(failed(call, &error))
}

/// The address of a rank. One without an IP address is on the machine of the host.
pub(super) fn resolve(address: &ListenAddress, host: IpAddr) -> SocketAddr {
    SocketAddr::new(address.ip.unwrap_or(host), address.port)
}

/// The first rendezvous of the ranks of a job.
#[derive(Debug)]
pub struct JoinBarrier {
    size: u32,
    here: BTreeSet<u32>,
}

impl JoinBarrier {
    pub(super) fn new(size: u32) -> Self {
        JoinBarrier { size, here: BTreeSet::new() }
    }

    /// A rank comes. False if it is here already or not of this world.
    pub fn join(&mut self, rank: u32) -> bool {
        rank < self.size && self.here.insert(rank)
    }

    /// A rank goes away before the rendezvous ends.
    pub fn part(&mut self, rank: u32) {
        self.here.remove(&rank);
    }

    /// The ranks that have not come.
    pub fn missing(&self) -> Vec<u32> {
        (0..self.size).filter(|rank| !self.here.contains(rank)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_rendezvous_waits_for_all_ranks() {
        let mut barrier = JoinBarrier::new(3);
        assert!(barrier.join(2) && barrier.join(0));
        assert!(!barrier.join(2), "taken");
        assert!(!barrier.join(3), "out of range");
        assert_eq!(barrier.missing(), [1]);
        barrier.part(2);
        assert!(barrier.join(1) && barrier.join(2) && barrier.missing().is_empty());
    }
}
