//! The first meeting of a job: rank 0 listens, the others look for it.
//!
//! ```text
//!   ports to try  29501  29502  29503 ...
//!   rank 0        taken  BIND
//!   rank k        knock  knock ──► its handshake proves that this is the job
//! ```
//!
//! A launcher's own store sits on the master port, and other jobs may sit on the ports after it, so
//! no port is trusted: the handshake finds the right one.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    handshake_queue::HandshakeQueue,
    join::{JoinError, JoinRequest, Membership},
    join_barrier::JoinBarrier,
};
use crate::{
    bootstrap::{
        hub::{HOST, Hub, HubConfig, Job, TcpHub, coordinate},
        identity::{Identity, Secret},
        os::failed,
        watch::Timeouts,
        wire::{JoinRefusal, PROTOCOL, RendezvousId, job_digest},
    },
    error::{BootstrapError, Cause},
};

/// Bound of the challenge of one candidate: a stranger that accepts and stays silent costs this
/// much. A rank also looks beyond a job with another secret for so long.
const GREETING: Duration = Duration::from_secs(2);
/// Pause between two rounds over the candidates.
const PAUSE: Duration = Duration::from_millis(30);

/// Meets the other ranks of the job over TCP.
///
/// Without a secret only loopback addresses are used, and the key of this user, so that processes
/// of other users are refused; unless the identity does without (`SIDELANE_INSECURE=1`).
pub fn connect(
    identity: &Identity,
    secret: Option<Secret>,
    clocks: Timeouts,
) -> Result<Box<dyn Hub>, BootstrapError> {
    let until = Instant::now() + clocks.rendezvous;
    if secret.is_none() && !identity.is_local() && !identity.insecure {
        return Err(BootstrapError::NoSecret { address: identity.master_addr.clone() });
    }
    let secret = match secret {
        Some(secret) => secret,
        None if identity.insecure => Secret::none(),
        None => Secret::of_user()?,
    };
    let job = Job { digest: job_digest(&identity.job), secret, clocks, launcher: identity.launcher_pipe };
    let meeting = RendezvousId { job: job.digest, size: identity.size, epoch: 0, host: HOST };
    let (seat, coordinator) = match identity.rank {
        HOST => {
            let listener = bind(identity)?;
            let (address, coordinator) =
                host(listener, &job, meeting, JoinBarrier::first(identity.size), Box::new(Vec::new), until)?;
            let seat = seek(identity, &job, meeting, &[address], until);
            let (seat, coordinator) = attended(seat, coordinator)?;
            (seat, Some(coordinator))
        }
        _ => (seek(identity, &job, meeting, &[], until)?, None),
    };
    Ok(Box::new(TcpHub::new(job, 0, seat, coordinator)?))
}

/// Starts a coordinator. Returns the address at which its own rank reaches it.
pub(super) fn host(
    listener: TcpListener,
    job: &Job,
    meeting: RendezvousId,
    barrier: JoinBarrier,
    absent: Box<dyn Fn() -> Vec<u32> + Send>,
    until: Instant,
) -> Result<(SocketAddr, JoinHandle<()>), BootstrapError> {
    let mut address = listener.local_addr().map_err(|error| failed("getsockname", &error))?;
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    let queue = HandshakeQueue::new(listener, job.secret.clone(), meeting);
    let setting = HubConfig { queue, barrier, absent, clocks: job.clocks, until };
    let thread = thread::Builder::new().name("sidelane coordinator".to_owned());
    let thread = thread.spawn(move || coordinate(setting));
    Ok((address, thread.map_err(|error| failed("thread spawn", &error))?))
}

/// A host that cannot join waits for its coordinator, which still has messages for the others: the
/// process may end next.
pub(super) fn attended<E>(
    seat: Result<Membership, E>,
    coordinator: JoinHandle<()>,
) -> Result<(Membership, JoinHandle<()>), E> {
    match seat {
        Ok(seat) => Ok((seat, coordinator)),
        Err(error) => {
            // A thread that panicked has said so already.
            let _ = coordinator.join();
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
            let listener = TcpListener::bind((ip, port)).and_then(|listener| {
                listener.set_nonblocking(true)?;
                Ok(listener)
            });
            match listener {
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

/// Knocks at the candidates in turn until one is the right one. `known` skips the search.
fn seek(
    identity: &Identity,
    job: &Job,
    meeting: RendezvousId,
    known: &[SocketAddr],
    until: Instant,
) -> Result<Membership, BootstrapError> {
    let start = Instant::now();
    // A job that holds one of the ports and has another secret may be another user's, with the same
    // name.
    let mut foreign = None;
    loop {
        let candidates = if known.is_empty() { candidates(identity) } else { known.to_vec() };
        for address in candidates {
            let now = Instant::now();
            let knock = JoinRequest {
                secret: &job.secret,
                meeting,
                rank: identity.rank,
                beyond_loopback: !identity.is_local(),
                greeted_until: until.min(now + GREETING),
                until,
                stop: &|| false,
            };
            match knock.at(address) {
                Ok(seat) => return Ok(seat),
                Err(JoinError::Nobody) => {}
                Err(JoinError::Failed(error)) => return Err(error),
                Err(JoinError::Refused(JoinRefusal::WrongSecret)) => {
                    foreign.get_or_insert((Instant::now(), address));
                }
                Err(JoinError::Refused(refusal)) => return Err(explain(refusal, identity, address, start)),
            }
        }
        if let Some((since, address)) = foreign
            && since.elapsed() > GREETING
        {
            return Err(explain(JoinRefusal::WrongSecret, identity, address, start));
        }
        if Instant::now() + PAUSE >= until {
            let address = format!("{} (ports {})", identity.master_addr, list(&identity.ports));
            return Err(BootstrapError::NoRendezvous { address, waited: start.elapsed() });
        }
        thread::sleep(PAUSE);
    }
}

/// Every address of the master with every port; resolved anew each round, since names appear late.
fn candidates(identity: &Identity) -> Vec<SocketAddr> {
    let ips: Vec<IpAddr> = match identity.is_local() {
        true => vec![identity.loopback()],
        false => {
            let found = (identity.master_addr.as_str(), 0).to_socket_addrs();
            found.map(|found| found.map(|address| address.ip()).collect()).unwrap_or_default()
        }
    };
    identity.ports.iter().flat_map(|&port| ips.iter().map(move |&ip| SocketAddr::new(ip, port))).collect()
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
        JoinRefusal::Missing(missing) => {
            BootstrapError::Deadline { step: "rendezvous".to_owned(), missing, waited: start.elapsed() }
        }
        JoinRefusal::OtherJob | JoinRefusal::Malformed => BootstrapError::Malformed { peer },
    }
}
