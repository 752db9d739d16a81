//! From the members of a world and its spares to the members of the next one.
//!
//! ```text
//!   all       come ──► rank 0 listens at the job's ports: one whose settings differ is refused
//!   rank 0    addresses of the spares ──► all members take them into their roster
//!   all       rebuild: the roster of old members and spares is that of the next world
//!   all       build their parts of it ──► agree in the old world: all are in, or none
//!
//!   spare     each port of the job, again and again ──► the handshake proves that this is the job
//!             Settings ──► Refused: settings differ │ Admit { number, roster, addresses }
//!             comes to the rebuild of the old ranks, once ──► the larger world, or asks again
//! ```
//!
//! **Numbers.** A spare that is admitted gets the next number after those of all ranks that the job
//! has had. So its place in the next world is behind the old ranks, and no number names two ranks.
//!
//! **All or none.** The old world lives until all of its ranks have built their parts of the next
//! one, with every spare. Its own hub carries their verdicts, so all go on to the larger world, or
//! all stay. If one part is missing, members dismiss the spares, which ask again. One case is
//! neither: rank 0 dies while it delivers the verdicts. Some ranks then have the larger world,
//! which fails at once, and the others their old one, which has failed too. All of them rebuild.
//!
//! **Majorities.** A spare counts in no world of survivors before all old ranks have agreed on the
//! larger world. Until then the majority that excludes two worlds is that of the old world.
//!
//! **Liveness.** Spare and rank 0 send heartbeats to each other while rank 0 gathers spares. Then
//! rank 0 sends none: a spare is admitted within the liveness limit, or not by this growth. One
//! that has heard nothing for so long, for example because it is cut off, asks again.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::gathering::Lineage;
use super::join::{
    ANSWER, GREETING, Interrupt, JoinError, PAUSE, bind, candidates, explain, fail, job_of, list, listen_at,
    miss, resolve, shake_hands,
};
use super::listener::{AuthenticatedPeer, HandshakeQueue};
use super::rebuild::{Rebuild, Rebuilt, window};
use crate::bootstrap::health::{Health, Liveness, Timeouts};
use crate::bootstrap::hub::{HOST, Hub, Job, TcpHub};
use crate::bootstrap::identity::Identity;
use crate::bootstrap::secret::{Secret, random};
use crate::bootstrap::wait::{self, poll_until};
use crate::bootstrap::wire::{
    Admission, Hello, Initiator, JoinRefusal, ListenAddress, Message, MessageConnection, PROTOCOL,
    RendezvousId, Roster, Setting,
};
use crate::error::{BootstrapError, Cause, Error};

/// Rank 0 keeps listening this long after the first spare has come: one that waits asks again
/// within this time, unless a port that it tries is silent.
const MORE: Duration = Duration::from_millis(500);
/// Longest sleep: the world may fail meanwhile.
const SLICE: Duration = Duration::from_millis(50);
/// Longest deadline: longer ones end there.
pub(super) const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// Bound of the rebuild that takes spares in.
pub(super) fn limit(timeouts: &Timeouts) -> Duration {
    window(timeouts) * 2
}

/// The rendezvous of spares with rank 0 of a world. Its name is no other rendezvous's.
pub(super) fn rendezvous(job: &Job) -> RendezvousId {
    let job = Sha256::new().chain_update(b"sidelane spares ").chain_update(job.digest).finalize();
    RendezvousId { job: job.into(), size: u32::MAX, epoch: 0, host: HOST }
}

/// A growth in progress: the larger world has begun, or has not, and the old one lives.
#[must_use = "the other ranks wait for it"]
pub struct Growth<'a> {
    /// Where the spares listen.
    spares: Vec<SocketAddr>,
    /// The larger world, if it has begun for this rank.
    begun: Result<Rebuilt, BootstrapError>,
    /// A member of the larger world that did not come to it: its rank there.
    absent: Option<u32>,
    /// The last field: the larger world ends before the old one has its listener again.
    attempt: Attempt<'a>,
}

/// An attempt of the old world to grow. One that is dropped leaves that world as it was: no later
/// one has the spares, and the coordinator has the listener again.
struct Attempt<'a> {
    old: &'a TcpHub,
    /// Number of ranks that the job had before. Spares of this attempt have higher numbers.
    ranks: u32,
}

impl<'a> Attempt<'a> {
    fn of(old: &'a TcpHub) -> Self {
        Attempt { old, ranks: old.lineage.ranks() }
    }

    /// The larger world has begun with all its members.
    fn succeed(self) {
        self.old.cancel(Cause::Cancelled { by: self.old.rank });
        std::mem::forget(self);
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        self.old.lineage.dismiss(self.ranks, self.old.roster.epoch);
        self.old.release_listener(false);
    }
}

/// Takes in the spares that ask. Collective among all ranks of a world that lives.
pub fn grow<'a>(
    old: &'a TcpHub,
    deadline: Duration,
    settings: &[Setting],
) -> Result<Growth<'a>, BootstrapError> {
    let (rank, size, timeouts) = (old.rank, old.size(), &old.job.timeouts);
    let deadline = deadline.min(YEAR);
    old.health().check()?;
    // From here on no rank keeps the spares waiting.
    old.barrier("grow/here", rank, size, timeouts.deadline)?;
    let (start, attempt) = (Instant::now(), Attempt::of(old));
    let came = match rank {
        HOST => gather(old, settings, start + deadline),
        _ => Ok(Vec::new()),
    };
    // A host that fails still tells the others, who would wait for it.
    let addresses: Vec<ListenAddress> = came.iter().flatten().map(listens_at).collect();
    let patience = deadline.saturating_add(timeouts.deadline);
    let said = old.gather("grow/spares", rank, size, &ListenAddress::to_bytes(&addresses), patience)?;
    let spares = came?;
    let host = old.lineage.address(old.roster.members[HOST as usize]).ip();
    let malformed = |rank| BootstrapError::Malformed { peer: format!("rank {rank}") };
    let addresses = ListenAddress::from_bytes(&said[HOST as usize]).map_err(|_| malformed(HOST))?;
    if addresses.is_empty() {
        return Err(BootstrapError::NoSpare { waited: start.elapsed() });
    }
    let addresses: Vec<SocketAddr> = addresses.iter().map(|address| resolve(address, host)).collect();
    // A rank that did not hear of spares in a growth that failed knows fewer numbers than others.
    let known = old.lineage.ranks().to_le_bytes();
    let known = old.gather("grow/numbers", rank, size, &known, timeouts.deadline)?;
    let number = |(from, bytes): (u32, &Vec<u8>)| match bytes.as_slice().try_into() {
        Ok(bytes) => Ok(u32::from_le_bytes(bytes)),
        Err(_) => Err(malformed(from)),
    };
    let known = (0..).zip(&known).map(number).collect::<Result<Vec<u32>, _>>()?;
    let first = known.into_iter().max().unwrap_or_default();
    let roster = old.lineage.admit(&old.roster.members, first, &addresses);
    // The coordinator lets go of the listener before it completes the next step.
    old.release_listener(true);
    // No rank rebuilds before all ranks know the spares.
    old.barrier("grow/admitted", rank, size, timeouts.deadline)?;
    for (number, mut spare) in (first..).zip(spares) {
        let (roster, addresses) = (roster.clone(), all(old));
        let admission = Admission { rank: number, members: size, roster, addresses };
        spare.connection.send(&Message::Admit(admission));
        spare.connection.flush();
    }
    let until = Instant::now() + limit(timeouts);
    let rebuild = Rebuild::with_all(&old.job, &old.lineage, (&old.roster, rank), until);
    let begun = rebuild.attempt().and_then(|begun| begun.ok_or(BootstrapError::NotGrown { rank }));
    let absent = rebuild.absent().and_then(|absent| roster.members.binary_search(&absent).ok());
    Ok(Growth { spares: addresses, begun, absent: absent.map(|place| place as u32), attempt })
}

impl Growth<'_> {
    /// Builds this rank's part of the larger world, and returns it once all old ranks have theirs.
    /// That ends the old world. Otherwise it lives, without the spares.
    ///
    /// # Errors
    /// [`BootstrapError::SpareLost`] on all ranks if a spare is the reason. If a rank is, its own
    /// reason there, and [`BootstrapError::NotGrown`], which names it, on the others. The cause
    /// that ends the old world, if it has failed.
    pub fn complete<T>(self, build: impl FnOnce(Rebuilt) -> Result<T, Error>) -> Result<T, Error> {
        let Growth { spares, begun, absent, attempt } = self;
        let old = attempt.old;
        let (rank, size, timeouts) = (old.rank, old.size(), &old.job.timeouts);
        let health = begun.as_ref().ok().map(|(next, _)| Arc::clone(next.health()));
        let built = begun.map_err(Error::from).and_then(build);
        let named = |error| {
            let known = absent.or_else(|| culprit(health.as_deref()?));
            known.unwrap_or(if is_of_others(error) { u32::MAX } else { rank })
        };
        let said = built.as_ref().err().map_or_else(Vec::new, |error| named(error).to_le_bytes().to_vec());
        let patience = limit(timeouts) + timeouts.rendezvous + timeouts.deadline;
        let verdicts = old.gather("grow/built", rank, size, &said, patience)?;
        let Some(out) = reason(&verdicts, size + spares.len() as u32) else {
            attempt.succeed();
            return built;
        };
        if let Some(&address) = out.checked_sub(size).and_then(|spare| spares.get(spare as usize)) {
            return Err(BootstrapError::SpareLost { rank: out, address }.into());
        }
        // A larger world that is abandoned has ended, too. What it died of is not the old one's.
        old.health().check()?;
        match built {
            Err(own) if !is_of_others(&own) => Err(own),
            _ => Err(BootstrapError::NotGrown { rank: out }.into()),
        }
    }
}

/// Whether a rank that did not get its part of the larger world only heard of another's reason.
fn is_of_others(error: &Error) -> bool {
    use BootstrapError::{Left, NotGrown};
    matches!(error, Error::World(_) | Error::Bootstrap(Left { .. } | NotGrown { .. }))
}

/// The member that is the reason why a larger world does not begin: a spare, if an old rank names
/// one, else an old rank that names itself, else one that others name, else the first that is out.
/// None if all are in.
fn reason(verdicts: &[Vec<u8>], members: u32) -> Option<u32> {
    let size = verdicts.len() as u32;
    let named = |said: &[u8]| said.try_into().map_or(u32::MAX, u32::from_le_bytes);
    let out = (0..).zip(verdicts).filter(|(_, said)| !said.is_empty());
    let out: Vec<(u32, u32)> = out.map(|(from, said)| (from, named(said))).collect();
    let spare = out.iter().find(|(_, named)| (size..members).contains(named));
    let own = || out.iter().find(|(from, named)| from == named);
    let rank = || out.iter().find(|(_, named)| *named < size);
    let named = spare.or_else(own).or_else(rank).map(|&(_, named)| named);
    named.or_else(|| out.first().map(|&(from, _)| from))
}

/// The rank that ended a world.
fn culprit(health: &Health) -> Option<u32> {
    match health.cause()? {
        Cause::Lost { rank, .. } | Cause::Stalled { rank, .. } | Cause::Protocol { rank } => Some(rank),
        Cause::Cancelled { by } | Cause::Nic { by } | Cause::Panicked { by, .. } => Some(by),
        // Of both ends the one that is behind: a spare, if one is.
        Cause::Connection { rank, by } => Some(rank.max(by)),
        Cause::LauncherGone { .. } | Cause::Evicted { .. } => None,
    }
}

/// Where a spare listens.
fn listens_at(spare: &AuthenticatedPeer) -> ListenAddress {
    let ip = spare.connection.peer().filter(|ip: &IpAddr| !ip.is_loopback());
    ListenAddress { ip, port: spare.hello.port }
}

/// A spare that asks.
struct Candidate {
    peer: AuthenticatedPeer,
    liveness: Liveness,
    /// It has the settings of the ranks.
    fits: bool,
}

impl Candidate {
    fn new(peer: AuthenticatedPeer, timeouts: &Timeouts, now: Instant) -> Self {
        Candidate {
            peer,
            liveness: Liveness::new(1, timeouts.heartbeat, timeouts.liveness, now),
            fits: false,
        }
    }

    /// Serves its connection. None if it goes away, or is refused.
    fn turn(mut self, settings: &[Setting], now: Instant) -> Option<Self> {
        self.peer.connection.flush();
        self.peer.connection.fill();
        while let Some(message) = self.peer.connection.next() {
            self.liveness.heard(0, now);
            match message {
                Message::Heartbeat => {}
                Message::Settings(theirs) => match difference(settings, &theirs) {
                    None => self.fits = true,
                    Some(refusal) => {
                        tracing::warn!(?refusal, "a spare with other settings is refused");
                        self.peer.refuse(refusal);
                        return None;
                    }
                },
                _ => return None,
            }
        }
        let stays = !self.peer.connection.is_closed() && self.liveness.expired(now).is_empty();
        stays.then_some(self)
    }
}

/// The first setting of the ranks that a spare has otherwise, or not at all.
fn difference(ours: &[Setting], theirs: &[Setting]) -> Option<JoinRefusal> {
    ours.iter().find(|setting| !theirs.contains(setting)).map(|Setting { name, value }| {
        let seen = theirs.iter().find(|other| other.name == *name);
        let seen = seen.map(|other| other.value.clone()).unwrap_or_default();
        JoinRefusal::Setting { name: name.clone(), seen, expected: value.clone() }
    })
}

/// The spares that ask until a point in time: none, or those of a short while.
fn gather(
    old: &TcpHub,
    settings: &[Setting],
    until: Instant,
) -> Result<Vec<AuthenticatedPeer>, BootstrapError> {
    let (interrupt, timeouts) = (Interrupt::default(), &old.job.timeouts);
    let listener = loop {
        match bind(&old.job.identity) {
            Ok(listener) => break listener,
            Err(error) if Instant::now() >= until => return Err(error),
            // The coordinator of the first world holds the job's only port.
            Err(_) => old.release_listener(true),
        }
        interrupt.check("grow")?;
        old.health().check()?;
        wait::nap(PAUSE);
    };
    let mut queue = HandshakeQueue::new(listener, old.job.secret.clone(), rendezvous(&old.job));
    let (mut spares, mut until, mut beat) = (Vec::<Candidate>::new(), until, Instant::now());
    loop {
        interrupt.check("grow")?;
        old.health().check()?;
        let now = Instant::now();
        spares.extend(queue.turn(now).into_iter().map(|peer| Candidate::new(peer, timeouts, now)));
        if now >= beat {
            beat = now + timeouts.heartbeat;
            spares.iter_mut().for_each(|spare| spare.peer.connection.send(&Message::Heartbeat));
        }
        let waited = spares.iter().any(|spare| spare.fits);
        spares = spares.into_iter().filter_map(|spare| spare.turn(settings, now)).collect();
        if !waited && spares.iter().any(|spare| spare.fits) {
            until = now + MORE;
        }
        if now >= until {
            return Ok(spares.into_iter().filter(|spare| spare.fits).map(|spare| spare.peer).collect());
        }
        let next = queue.next().into_iter().fold(until.min(now + SLICE), Instant::min);
        let connections = spares.iter().map(|spare| spare.peer.connection.poll_fd());
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

/// Bound of one attempt to connect.
const CONNECT: Duration = Duration::from_secs(1);

/// Waits as a spare until a world of the job takes this process in.
pub fn spare(
    identity: &Identity,
    secret: Option<Secret>,
    timeouts: Timeouts,
    settings: &[Setting],
    deadline: Duration,
) -> Result<Rebuilt, BootstrapError> {
    let (start, until) = (Instant::now(), Instant::now() + deadline.min(YEAR));
    let job = job_of(identity, secret, timeouts)?;
    let interrupt = Interrupt::default();
    let mut foreign = None;
    loop {
        for address in candidates(identity, until) {
            interrupt.check("spare")?;
            match ask(&job, address, settings, until, &interrupt) {
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
    settings: &[Setting],
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
    connection.send(&Message::Settings(settings.to_vec()));
    match await_verdict(&mut connection, &job.timeouts, until, &stop).ok_or(JoinError::Unreachable)? {
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

/// Rank 0's answer to a spare. None if rank 0 falls silent or goes away.
fn await_verdict(
    connection: &mut MessageConnection,
    timeouts: &Timeouts,
    until: Instant,
    stop: &dyn Fn() -> bool,
) -> Option<Message> {
    let mut beat = Instant::now();
    let mut liveness = Liveness::new(1, timeouts.heartbeat, timeouts.liveness, beat);
    loop {
        let now = Instant::now();
        if now >= beat {
            beat = now + timeouts.heartbeat;
            connection.send(&Message::Heartbeat);
        }
        let message = connection.await_message(until.min(beat), stop);
        let now = Instant::now();
        match message {
            Some(Message::Heartbeat) => liveness.heard(0, now),
            Some(verdict) => return Some(verdict),
            None if connection.is_closed() || now >= until || stop() => return None,
            None if !liveness.expired(now).is_empty() => return None,
            None => {}
        }
    }
}

/// One attempt to get into the next world with the members of the one before it. None if it does
/// not begin.
fn enter(job: &Job, lineage: Lineage, before: &Roster) -> Result<Option<Rebuilt>, BootstrapError> {
    let (until, rank, lineage) = (Instant::now() + limit(&job.timeouts), lineage.rank, Arc::new(lineage));
    Rebuild::with_all(job, &lineage, (before, rank), until).attempt()
}
