//! From the members of a world and its spares to the members of the next one.
//!
//! ```text
//!   spare     asks at the job's ports, again and again ──► Admit { number, roster, addresses }
//!   rank 0    listens there ──► addresses of the spares ──► all members take them into their roster
//!   all       rebuild: the roster of old members and spares is that of the next world
//! ```
//!
//! **Numbers.** A spare that is admitted gets the next number after those of all ranks that the job
//! has had. So its place in the next world is behind the old ranks, and no number names two ranks.
//!
//! **All or none.** The next world begins only with every member and every spare. If one is
//! missing, the attempt fails. The spare then waits for another world to take it in, and the
//! members rebuild without it. So a spare never counts in a world of survivors that it was not a
//! member of.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::join::{
    ANSWER, GREETING, Interrupt, JoinError, PAUSE, bind, candidates, explain, fail, job_of, list, listen_at,
    miss, resolve, shake_hands,
};
use super::lineage::Lineage;
use super::listener::{AuthenticatedPeer, HandshakeQueue};
use super::rebuild::{Rebuild, Rebuilt, may_rebuild, window};
use crate::bootstrap::health::Timeouts;
use crate::bootstrap::hub::{HOST, Hub, Job, TcpHub};
use crate::bootstrap::identity::Identity;
use crate::bootstrap::secret::{Secret, random};
use crate::bootstrap::wait::{self, poll_until};
use crate::bootstrap::wire::{
    Admission, Hello, Initiator, JoinRefusal, ListenAddress, Message, MessageConnection, PROTOCOL,
    RendezvousId, Roster,
};
use crate::error::BootstrapError;

/// Rank 0 keeps listening this long after the first spare has come: one that waits asks again
/// within this time, unless a port that it tries is silent.
const MORE: Duration = Duration::from_millis(500);
/// Longest sleep: the world may fail meanwhile.
const SLICE: Duration = Duration::from_millis(50);
/// Bound of one attempt to connect.
const CONNECT: Duration = Duration::from_secs(1);
/// Longest deadline: longer ones end there.
const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// Bound of the rebuild that takes spares in.
fn limit(timeouts: &Timeouts) -> Duration {
    window(timeouts) * 2
}

/// The rendezvous of spares with rank 0 of a world. Its name is no other rendezvous's.
fn rendezvous(job: &Job) -> RendezvousId {
    let job = Sha256::new().chain_update(b"sidelane spares ").chain_update(job.digest).finalize();
    RendezvousId { job: job.into(), size: u32::MAX, epoch: 0, host: HOST }
}

/// Takes in the spares that ask. Collective among all ranks of a world that lives.
pub fn grow(old: &TcpHub, deadline: Duration) -> Result<Rebuilt, BootstrapError> {
    let start = Instant::now();
    old.health().check()?;
    let came = match old.rank {
        HOST => gather(old, start + deadline.min(YEAR)),
        _ => Ok(Vec::new()),
    };
    // A host that fails still tells the others, who would wait for it.
    let addresses: Vec<ListenAddress> = came.iter().flatten().map(listens_at).collect();
    let (rank, size, patience) = (old.rank, old.size(), deadline.saturating_add(old.job.timeouts.deadline));
    let said = old.gather("grow/spares", rank, size, &ListenAddress::to_bytes(&addresses), patience)?;
    let spares = came?;
    let host = old.lineage.address(old.roster.members[HOST as usize]).ip();
    let malformed = || BootstrapError::Malformed { peer: format!("rank {HOST}") };
    let addresses = ListenAddress::from_bytes(&said[HOST as usize]).map_err(|_| malformed())?;
    if addresses.is_empty() {
        return Err(BootstrapError::NoSpare { waited: start.elapsed() });
    }
    let addresses: Vec<SocketAddr> = addresses.iter().map(|address| resolve(address, host)).collect();
    // A rank that did not hear of spares in a growth that failed knows fewer numbers than others.
    let known = old.lineage.ranks().to_le_bytes();
    let known = old.gather("grow/numbers", rank, size, &known, old.job.timeouts.deadline)?;
    let number = |(from, bytes): (u32, &Vec<u8>)| match bytes.as_slice().try_into() {
        Ok(bytes) => Ok(u32::from_le_bytes(bytes)),
        Err(_) => Err(BootstrapError::Malformed { peer: format!("rank {from}") }),
    };
    let known = (0..).zip(&known).map(number).collect::<Result<Vec<u32>, _>>()?;
    let first = known.into_iter().max().unwrap_or_default();
    let roster = old.lineage.admit(&old.roster, first, &addresses);
    let admission =
        |number| Admission { rank: number, members: size, roster: roster.clone(), addresses: all(old) };
    // No rank rebuilds before all ranks know the spares.
    old.barrier("grow/admitted", rank, size, old.job.timeouts.deadline)?;
    for (number, mut spare) in (first..).zip(spares) {
        spare.connection.send(&Message::Admit(admission(number)));
        spare.connection.flush();
    }
    let at_least = roster.members.len() as u32;
    may_rebuild(old)?;
    Rebuild::of_member(old, Instant::now() + limit(&old.job.timeouts), at_least).run(start)
}

/// Where a spare listens.
fn listens_at(spare: &AuthenticatedPeer) -> ListenAddress {
    let ip = spare.connection.peer().filter(|ip: &IpAddr| !ip.is_loopback());
    ListenAddress { ip, port: spare.hello.port }
}

/// The spares that ask until a point in time: none, or those of a short while.
fn gather(old: &TcpHub, until: Instant) -> Result<Vec<AuthenticatedPeer>, BootstrapError> {
    let interrupt = Interrupt::default();
    let listener = loop {
        match bind(&old.job.identity) {
            Ok(listener) => break listener,
            Err(error) if Instant::now() >= until => return Err(error),
            // The coordinator of the first world holds the job's only port.
            Err(_) => old.release_port(),
        }
        interrupt.check("grow")?;
        old.health().check()?;
        wait::nap(PAUSE);
    };
    let mut queue = HandshakeQueue::new(listener, old.job.secret.clone(), rendezvous(&old.job));
    let (mut spares, mut until) = (Vec::<AuthenticatedPeer>::new(), until);
    loop {
        interrupt.check("grow")?;
        old.health().check()?;
        let now = Instant::now();
        for spare in queue.turn(now) {
            if spares.is_empty() {
                until = now + MORE;
            }
            spares.push(spare);
        }
        for spare in &mut spares {
            spare.connection.flush();
            spare.connection.fill();
        }
        spares.retain(|spare| !spare.connection.is_closed());
        if now >= until {
            return Ok(spares);
        }
        let next = queue.next().into_iter().fold(until.min(now + SLICE), Instant::min);
        let connections = spares.iter().map(|spare| spare.connection.poll_fd());
        poll_until(&mut queue.poll_fds().chain(connections).collect::<Vec<_>>(), next)?;
    }
}

/// Where all ranks listen that the job has had.
fn all(old: &TcpHub) -> Vec<ListenAddress> {
    let addresses = (0..old.lineage.ranks()).map(|rank| old.lineage.address(rank));
    let listens = |address: SocketAddr| ListenAddress {
        ip: Some(address.ip()).filter(|ip| !ip.is_loopback()),
        port: address.port(),
    };
    addresses.map(listens).collect()
}

/// Waits as a spare until a world of the job takes this process in.
pub fn spare(
    identity: &Identity,
    secret: Option<Secret>,
    timeouts: Timeouts,
    deadline: Duration,
) -> Result<Rebuilt, BootstrapError> {
    let (start, until) = (Instant::now(), Instant::now() + deadline.min(YEAR));
    let job = job_of(identity, secret, timeouts)?;
    let interrupt = Interrupt::default();
    let mut foreign = None;
    loop {
        for address in candidates(identity, until) {
            interrupt.check("spare")?;
            match ask(&job, address, until, &interrupt) {
                Ok((lineage, before)) => {
                    if let Some(rebuilt) = enter(&job, lineage, &before)? {
                        return Ok(rebuilt);
                    }
                }
                Err(JoinError::Unreachable | JoinError::Refused(JoinRefusal::OtherJob)) => {}
                Err(JoinError::Failed(error)) => return Err(error),
                Err(JoinError::Refused(JoinRefusal::WrongSecret)) => {
                    foreign.get_or_insert((Instant::now(), address));
                }
                Err(JoinError::Refused(refusal)) => return Err(explain(refusal, identity, address, start)),
            }
        }
        interrupt.check("spare")?;
        let over = Instant::now() + PAUSE >= until;
        if let Some((since, address)) = foreign
            && (over || since.elapsed() > GREETING)
        {
            return Err(explain(JoinRefusal::WrongSecret, identity, address, start));
        }
        if over {
            let address = format!("{} (ports {})", identity.master_addr, list(&identity.ports));
            return Err(BootstrapError::NotTakenIn { address, waited: start.elapsed() });
        }
        wait::nap(PAUSE);
    }
}

/// Asks at an address, and waits there to be admitted.
fn ask(
    job: &Job,
    address: SocketAddr,
    until: Instant,
    interrupt: &Interrupt,
) -> Result<(Lineage, Roster), JoinError> {
    let left = until.saturating_duration_since(Instant::now()).min(CONNECT).max(Duration::from_millis(1));
    let stream = wait::connect(address, left).map_err(|_| JoinError::Unreachable)?;
    let local = stream.local_addr().map_err(|_| JoinError::Unreachable)?.ip();
    let mut connection = MessageConnection::new(stream).map_err(|_| JoinError::Unreachable)?;
    let listener = listen_at(local, !job.identity.is_local())?;
    let port = listener.local_addr().map_err(fail("getsockname"))?.port();
    let RendezvousId { job: digest, size, epoch, host } = rendezvous(job);
    let nonce = random().map_err(JoinError::Failed)?;
    let hello = Hello { version: PROTOCOL, job: digest, rank: 0, size, epoch, host, port, nonce };
    let initiator = Initiator::new(job.secret.clone(), hello);
    let (stop, greeted_until) = (|| interrupt.came(), until.min(Instant::now() + GREETING));
    let greeted = shake_hands(&mut connection, initiator, greeted_until, ANSWER, &stop);
    greeted.ok_or(JoinError::Unreachable)?.map_err(miss)?;
    match connection.await_message(until, &stop).ok_or(JoinError::Unreachable)? {
        Message::Admit(Admission { rank, members, roster, addresses })
            if roster.has(rank)
                && (members as usize) < roster.members.len()
                && roster.members.iter().all(|&member| (member as usize) < addresses.len()) =>
        {
            let before = roster.members[..members as usize].to_vec();
            let before = Roster { epoch: roster.epoch, members: before };
            let addresses = addresses.iter().map(|listens| resolve(listens, address.ip())).collect();
            Ok((Lineage::admitted(rank, addresses, listener, roster), before))
        }
        Message::Refused(refusal) => Err(miss(refusal)),
        _ => Err(JoinError::Unreachable),
    }
}

/// One attempt to get into the next world with the members of the one before it. None if it does
/// not begin.
fn enter(job: &Job, lineage: Lineage, before: &Roster) -> Result<Option<Rebuilt>, BootstrapError> {
    let (until, at_least) = (Instant::now() + limit(&job.timeouts), lineage.accepted().members.len());
    let (rank, lineage) = (lineage.rank, Arc::new(lineage));
    Rebuild::new(job, &lineage, (before, rank), until, at_least as u32).attempt()
}
