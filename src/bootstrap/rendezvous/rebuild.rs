//! From the survivors of a world to the members of the next one.
//!
//! ```text
//!   rank 2    asks 0 to join: refused, gone │ hosts ──► Gathering ──► offers, begins
//!   rank 3    asks 0 to join: refused, gone │ asks 2 ──► Survivor ──► Accept ──► Begin
//!   rank 5    asks 0 to join: refused, gone │ asks 2: silent │ asks 3 ...
//! ```
//!
//! **Who hosts.** Each survivor sends a join request to those below it, the lowest first, and hosts
//! if none of them answers. A refused connection says that a rank is gone. One that is silent may
//! be about to come, and is waited for. What fails is tried again until the deadline. So a lost
//! packet, a coordinator that is about to end, or a crowd of requests cost a moment, and no rank.
//!
//! **While it hosts**, a rank looks for those that have not come. One below that answers is the
//! better host: the rank goes there, and so do its guests. One above may say that a world has gone
//! on without this rank.
//!
//! **Liveness.** Host and guests send heartbeats to each other from the first moment: the world
//! that they come from may have no coordinator any more.
//!
//! **Partitions.** A network failure that splits a world in two can make two worlds, since ranks
//! cannot distinguish a split from a death. A program that must exclude this wants a world of more
//! than half of the ranks: of such worlds there is one (see [`super::gathering`]).
//!
//! **Cuts that change.** A rank that waits at its host looks again at the ranks that it did not
//! reach. Once one answers, the host hears of it. So a cut that heals leaves no rank out of a world
//! that has not been offered, and does not keep a world below the ranks that it needs. A cut that
//! comes after the look breaks the next world while it is built. The next rebuild then looks at
//! all ranks.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::gathering::{Gathering, Lineage};
use super::join::{Hosted, Interrupt, Membership, host, shake_hands};
use crate::bootstrap::health::{Liveness, Timeouts, lock};
use crate::bootstrap::hub::{GatheringKind, Hub, Job, TcpHub};
use crate::bootstrap::secret::random;
use crate::bootstrap::wire::{
    Hello, Initiator, JoinRefusal, Message, MessageConnection, PROTOCOL, RendezvousId, Roster, Survivor,
};
use crate::bootstrap::{failed, wait};
use crate::error::{BootstrapError, Cause};

/// Bound of one attempt to connect. A lost packet costs this much, and the next attempt sends one.
const CONNECT: Duration = Duration::from_millis(250);
/// Looks at each of the others before a rank alone gives them up.
const LOOKS_ALONE: usize = 4;
/// Pause between two attempts, and between two looks.
const PAUSE: Duration = Duration::from_millis(30);

/// How long a survivor waits for a host that does not come.
fn patience(timeouts: &Timeouts) -> Duration {
    timeouts.liveness * 2
}

/// How long a gathering waits for survivors that do not come. They may have waited elsewhere first.
pub fn window(timeouts: &Timeouts) -> Duration {
    patience(timeouts) + timeouts.liveness / 2
}

/// State shared by a hosting rank and its coordinator, about ranks that have not come.
#[derive(Debug, Default)]
pub struct Search {
    /// Ranks that may come have numbers below this.
    pub ranks: u32,
    /// Ranks that are not waited for.
    gone: Mutex<BTreeSet<u32>>,
    here: Mutex<BTreeSet<u32>>,
    /// The host's own answer is awaited.
    offering: AtomicBool,
    /// The host has given up.
    over: AtomicBool,
}

impl Search {
    fn new(ranks: u32) -> Arc<Self> {
        Arc::new(Search { ranks, ..Search::default() })
    }

    pub fn gone(&self) -> BTreeSet<u32> {
        lock(&self.gone).clone()
    }

    /// A rank is gone: it refuses connections, or has fallen silent.
    pub fn give_up(&self, rank: u32) {
        lock(&self.gone).insert(rank);
    }

    pub fn is_over(&self) -> bool {
        // Relaxed: the searching thread looks again before each step, and reads nothing by it.
        self.over.load(Ordering::Relaxed)
    }

    /// The coordinator's state.
    pub fn publish(&self, here: BTreeSet<u32>, offering: bool) {
        *lock(&self.here) = here;
        // Relaxed: it only keeps a patient rank waiting. The members are under the lock above.
        self.offering.store(offering, Ordering::Relaxed);
    }
}

/// How an attempt to get into a world ended.
enum RejoinError {
    /// There is no such process any more.
    Gone,
    /// Nothing came, or a "not now".
    Silent,
    /// The host was reached, and lost or left again: all ranks look anew.
    Again,
    /// The others went on without this rank.
    Evicted(u16),
    /// This side failed.
    Failed(BootstrapError),
}

/// Where a hub went, and for each of its ranks the rank in the old world.
pub type Rebuilt = (Box<dyn Hub>, Vec<u32>);

/// Meets the survivors in a later epoch.
pub fn rebuild(old: &TcpHub, deadline: Duration, at_least: u32) -> Result<Rebuilt, BootstrapError> {
    let (start, at_least) = (Instant::now(), at_least.max(1));
    may_rebuild(old)?;
    let rebuild = Rebuild::of_survivor(old, start + deadline, at_least);
    rebuild.cut_off.replace(rebuild.unreached(old.health().cause()));
    rebuild.run(start)
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

/// The rendezvous of survivors with one of them. Its name is no other rendezvous's.
fn rendezvous(job: &Job, host: u32) -> RendezvousId {
    let job = Sha256::new().chain_update(b"sidelane survivors ").chain_update(job.digest).finalize();
    // Of any size: ranks of the same world may have heard of more spares or fewer.
    RendezvousId { job: job.into(), size: u32::MAX, epoch: 0, host }
}

/// A rank that looks for the others: a survivor, or a rank or spare of a world that grows.
pub struct Rebuild<'a> {
    job: &'a Job,
    lineage: &'a Arc<Lineage>,
    /// The world before.
    before: &'a Roster,
    /// This rank's name in errors: its rank in the world before.
    rank: u32,
    timeouts: &'a Timeouts,
    until: Instant,
    at_least: u32,
    /// The next world begins with all ranks or not at all: it grows.
    with_all: bool,
    /// A rank without which the world that this one hosted could not begin.
    absent: Cell<Option<u32>>,
    /// Ranks that this one does not reach.
    cut_off: RefCell<Vec<u32>>,
    /// Hosts that fell silent. They may only have been slow.
    suspects: RefCell<BTreeSet<u32>>,
    interrupt: Interrupt,
}

impl<'a> Rebuild<'a> {
    /// That of a survivor of a world.
    fn of_survivor(old: &'a TcpHub, until: Instant, at_least: u32) -> Self {
        let before = (&old.roster, old.rank);
        Rebuild::new(&old.job, &old.lineage, before, until, at_least)
    }

    /// That of a rank of a world that takes spares in, or of one of the spares.
    pub fn with_all(
        job: &'a Job,
        lineage: &'a Arc<Lineage>,
        before: (&'a Roster, u32),
        until: Instant,
    ) -> Self {
        let all = lineage.accepted().members.len() as u32;
        Rebuild { with_all: true, ..Rebuild::new(job, lineage, before, until, all) }
    }

    /// That of a rank with this name which comes from a world, or to one.
    fn new(
        job: &'a Job,
        lineage: &'a Arc<Lineage>,
        (before, rank): (&'a Roster, u32),
        until: Instant,
        at_least: u32,
    ) -> Self {
        Rebuild {
            job,
            lineage,
            before,
            rank,
            timeouts: &job.timeouts,
            until,
            at_least,
            with_all: false,
            absent: Cell::default(),
            cut_off: RefCell::default(),
            suspects: RefCell::default(),
            interrupt: Interrupt::default(),
        }
    }

    /// Tries again until the deadline.
    fn run(&self, start: Instant) -> Result<Rebuilt, BootstrapError> {
        let (at_least, rank) = (self.at_least, self.rank);
        loop {
            self.interrupt.check("rebuild")?;
            match self.round() {
                Ok(rebuilt) => return Ok(rebuilt),
                Err(RejoinError::Evicted(epoch)) => return Err(Cause::Evicted { rank, epoch }.into()),
                Err(RejoinError::Failed(error)) => return Err(error),
                Err(RejoinError::Gone | RejoinError::Silent | RejoinError::Again) => {}
            }
            self.interrupt.check("rebuild")?;
            if Instant::now() >= self.until {
                let (epoch, waited) = (self.lineage.accepted().epoch, start.elapsed());
                return Err(BootstrapError::RebuildFailed { epoch, at_least, waited });
            }
            wait::nap(PAUSE);
        }
    }

    /// Tries once. None if the world does not begin with this rank.
    pub fn attempt(&self) -> Result<Option<Rebuilt>, BootstrapError> {
        match self.round() {
            Ok(rebuilt) => Ok(Some(rebuilt)),
            Err(RejoinError::Failed(error)) => Err(error),
            Err(RejoinError::Gone | RejoinError::Silent | RejoinError::Again | RejoinError::Evicted(_)) => {
                self.interrupt.check("rebuild").map(|()| None)
            }
        }
    }

    /// A rank that did not come to this one, after an attempt that failed.
    pub fn absent(&self) -> Option<u32> {
        self.absent.get()
    }

    /// Tries the ranks below this one in turn, then hosts.
    fn round(&self) -> Result<Rebuilt, RejoinError> {
        let roster = self.lineage.accepted();
        tracing::debug!(rank = self.lineage.rank, epoch = roster.epoch, "looks for the survivors");
        let mut quiet = Vec::new();
        // All of them have the same time to come. Later they are only asked.
        let come_until = Instant::now() + patience(self.timeouts);
        let below = roster.members.iter().take_while(|&&rank| rank < self.lineage.rank);
        for &candidate in below.filter(|&&rank| !self.lineage.is_lost(rank)) {
            let answers = match self.is_suspect(candidate) {
                true => self.look(candidate, &|| self.interrupt.came()),
                false => Ok(()),
            };
            match answers.and_then(|()| self.join_host(candidate, come_until)) {
                Err(RejoinError::Gone | RejoinError::Silent) => quiet.push(candidate),
                outcome => return outcome,
            }
        }
        self.lead(&roster, &quiet)
    }

    /// Whether a rank is known to be lost, or has fallen silent as a host.
    fn is_suspect(&self, rank: u32) -> bool {
        self.lineage.is_lost(rank) || self.suspects.borrow().contains(&rank)
    }

    /// Asks a rank to join until it answers, and waits there for the world to begin.
    fn join_host(&self, host: u32, come_until: Instant) -> Result<Rebuilt, RejoinError> {
        let asked_until = Instant::now() + self.timeouts.heartbeat * 4;
        let silent_until = self.until.min(come_until.max(asked_until));
        loop {
            let stop = || self.lineage.is_lost(host) || self.interrupt.came();
            match self.request_join(host, silent_until, &stop) {
                Ok(mut member) => match self.await_begin(&mut member) {
                    Err(RejoinError::Silent) => {}
                    begun => return self.enter(member, begun?, None),
                },
                Err(RejoinError::Silent) => {}
                Err(miss) => return Err(miss),
            }
            if stop() || Instant::now() >= silent_until {
                return Err(RejoinError::Silent);
            }
            wait::nap(PAUSE);
        }
    }

    /// Hosts the survivors and takes part, and looks for those that have not come. For some of them
    /// this rank has waited already.
    fn lead(&self, roster: &Roster, quiet: &[u32]) -> Result<Rebuilt, RejoinError> {
        let own = self.lineage.rank;
        let listener = self.lineage.listener.try_clone();
        let listener = listener.map_err(|error| RejoinError::Failed(failed("dup", &error)))?;
        let search = Search::new(self.lineage.ranks());
        let gathering = Gathering::new(Some(own), window(self.timeouts));
        let kind = GatheringKind::Again(gathering, Arc::clone(&search));
        let hosted = host(listener, self.job, rendezvous(self.job, own), kind, self.until);
        let hosted = hosted.map_err(RejoinError::Failed)?;
        tracing::debug!(rank = own, "hosts the survivors");
        let led = self.request_join_at(own, hosted.address, self.until, &|| self.interrupt.came());
        let led =
            led.and_then(|mut member| Ok((self.look_around(&mut member, roster, quiet, &search)?, member)));
        match led {
            Ok((begun, member)) => self.enter(member, begun, Some(hosted)),
            Err(miss) => {
                // The listener is needed again.
                search.over.store(true, Ordering::Relaxed);
                wait::join(hosted.coordinator);
                let (here, gone) = (lock(&search.here).clone(), search.gone());
                let absent = |is_absent: &dyn Fn(u32) -> bool| {
                    roster.members.iter().copied().find(|&rank| rank != own && is_absent(rank))
                };
                if !self.interrupt.came() {
                    let lost = absent(&|rank| gone.contains(&rank));
                    self.absent.set(lost.or_else(|| absent(&|rank| !here.contains(&rank))));
                }
                Err(miss)
            }
        }
    }

    /// Takes part in the gathering that this rank hosts, and looks for those that have not come.
    fn look_around(
        &self,
        member: &mut PendingMember,
        roster: &Roster,
        quiet: &[u32],
        search: &Search,
    ) -> Result<Roster, RejoinError> {
        let mut others: VecDeque<u32> = roster.members.iter().copied().collect();
        others.retain(|&rank| rank != self.lineage.rank);
        let (mut looks, alone_until) = (0, Instant::now() + patience(self.timeouts));
        // Relaxed: the flag only prolongs a wait.
        let is_busy = || search.offering.load(Ordering::Relaxed) || self.interrupt.came();
        loop {
            let here = lock(&search.here).clone();
            // Whether others are dead or this rank is out is hard to tell for a rank alone.
            let has_looked = looks >= LOOKS_ALONE * others.len() && Instant::now() >= alone_until;
            let knows = here.len() > 1 || has_looked;
            if knows {
                quiet.iter().for_each(|&rank| search.give_up(rank));
            }
            let gone = search.gone();
            let lacks = |rank: &u32| gone.contains(rank) && !here.contains(rank);
            let all_known = || others.iter().all(|rank| here.contains(rank) || gone.contains(rank));
            if self.with_all && all_known() && roster.members.iter().any(lacks) {
                return Err(RejoinError::Again);
            }
            let is_due = |rank: &u32| !here.contains(rank) && !gone.contains(rank) && self.is_suspect(*rank);
            let due = others.iter().position(is_due);
            let pause = if due.is_some() { Duration::ZERO } else { PAUSE };
            if let Some(end) = member.turn(self, Instant::now() + pause) {
                return end;
            }
            others.rotate_left(due.unwrap_or(0));
            let Some(other) = others.pop_front() else { continue };
            others.push_back(other);
            if is_busy() || here.contains(&other) {
                continue;
            }
            looks += 1;
            match self.look(other, &is_busy) {
                Err(RejoinError::Gone) => {
                    search.give_up(other);
                    others.pop_back();
                }
                Err(RejoinError::Silent) if knows && self.is_suspect(other) => search.give_up(other),
                Err(RejoinError::Silent) => {}
                // A better host: guests follow when they find this one gone.
                Ok(()) => {
                    self.lineage.note_found(other);
                    self.suspects.borrow_mut().remove(&other);
                    return Err(RejoinError::Again);
                }
                Err(miss) => return Err(miss),
            }
        }
    }

    /// Looks whether a rank that has not come is gone, has gone on, or is a better host. The host's
    /// own connection is not served meanwhile.
    fn look(&self, other: u32, stop: &dyn Fn() -> bool) -> Result<(), RejoinError> {
        let until = self.until.min(Instant::now() + self.timeouts.heartbeat * 2);
        let mut member = loop {
            match self.request_join(other, until, stop) {
                Err(RejoinError::Silent) if Instant::now() < until && !stop() => wait::nap(PAUSE),
                known => break known?,
            }
        };
        loop {
            match member.connection.await_message(until, stop) {
                Some(Message::Heartbeat) if other < self.lineage.rank => return Ok(()),
                Some(Message::Heartbeat) => member.introduce(self),
                Some(Message::Refused(JoinRefusal::Evicted(epoch))) => {
                    return Err(RejoinError::Evicted(epoch));
                }
                _ => return Err(RejoinError::Silent),
            }
        }
    }

    /// Connects to a rank, and proves who this is.
    fn request_join(
        &self,
        host: u32,
        until: Instant,
        stop: &dyn Fn() -> bool,
    ) -> Result<PendingMember, RejoinError> {
        self.request_join_at(host, self.lineage.address(host), until, stop)
    }

    fn request_join_at(
        &self,
        host: u32,
        address: SocketAddr,
        until: Instant,
        stop: &dyn Fn() -> bool,
    ) -> Result<PendingMember, RejoinError> {
        let stream = self.dial(address, until)?;
        tracing::debug!(rank = self.lineage.rank, host, "requests to join");
        let mut connection = MessageConnection::new(stream).map_err(|_| RejoinError::Silent)?;
        let RendezvousId { job, size, epoch, host } = rendezvous(self.job, host);
        let nonce = random().map_err(RejoinError::Failed)?;
        let hello =
            Hello { version: PROTOCOL, job, rank: self.lineage.rank, size, epoch, host, port: 0, nonce };
        let initiator = Initiator::new(self.job.secret.clone(), hello);
        match shake_hands(&mut connection, initiator, until, self.timeouts.liveness, stop) {
            Some(Ok(())) => {}
            Some(Err(_)) | None => return Err(RejoinError::Silent),
        }
        tracing::debug!(rank = self.lineage.rank, host, "is known");
        Ok(PendingMember::new(host, connection, self.timeouts))
    }

    fn dial(&self, address: SocketAddr, until: Instant) -> Result<TcpStream, RejoinError> {
        let left = until.saturating_duration_since(Instant::now()).min(CONNECT);
        wait::connect(address, left.max(Duration::from_millis(1))).map_err(|error| match error.kind() {
            ErrorKind::ConnectionRefused => RejoinError::Gone,
            _ => RejoinError::Silent,
        })
    }

    /// Waits at a host until the world begins.
    fn await_begin(&self, member: &mut PendingMember) -> Result<Roster, RejoinError> {
        loop {
            if let Some(end) = member.turn(self, self.until) {
                return end;
            }
        }
    }

    /// Becomes a member of a world that has begun.
    fn enter(
        &self,
        member: PendingMember,
        roster: Roster,
        hosted: Option<Hosted>,
    ) -> Result<Rebuilt, RejoinError> {
        let before = &self.before.members;
        let previous = roster.members.iter().filter_map(|rank| before.binary_search(rank).ok());
        let previous = previous.map(|place| place as u32).collect();
        let lineage = Arc::clone(self.lineage);
        let membership = Membership { connection: member.connection, roster, lineage };
        let hub = TcpHub::new(self.job.clone(), membership, hosted).map_err(RejoinError::Failed)?;
        tracing::debug!(rank = self.lineage.rank, epoch = hub.roster.epoch, "is in the next world");
        Ok((Box::new(hub), previous))
    }

    /// Ranks that this one does not reach, of those that it may be cut off from: the other end of a
    /// connection that broke, or all if a world failed while it was built.
    fn unreached(&self, cause: Option<Cause>) -> Vec<u32> {
        let (roster, own, members) = (self.lineage.accepted(), self.rank, &self.before.members);
        let suspects = match cause {
            _ if roster.epoch != self.before.epoch => roster.members,
            Some(Cause::Connection { rank, by }) if by == own => vec![members[rank as usize]],
            Some(Cause::Connection { rank, by }) if rank == own => vec![members[by as usize]],
            _ => return Vec::new(),
        };
        // Long enough for a dozen packets in a row to be lost.
        let until = self.until.min(Instant::now() + patience(self.timeouts));
        let mut unreached: Vec<u32> =
            suspects.into_iter().filter(|&rank| rank != self.lineage.rank).collect();
        while !unreached.is_empty() && Instant::now() < until && !self.interrupt.came() {
            unreached.retain(|&rank| !self.reaches(rank, until));
        }
        unreached
    }

    /// Whether a rank is there or gone, and not behind a cut.
    fn reaches(&self, rank: u32, until: Instant) -> bool {
        !matches!(self.dial(self.lineage.address(rank), until), Err(RejoinError::Silent))
    }

    /// Looks again at one of the ranks that this one did not reach. True if it answers now.
    fn finds_cut_healed(&self) -> bool {
        let Some(rank) = self.cut_off.borrow().first().copied() else { return false };
        let healed = self.reaches(rank, self.until);
        let mut cut_off = self.cut_off.borrow_mut();
        match healed {
            true => drop(cut_off.remove(0)),
            false => cut_off.rotate_left(1),
        }
        healed
    }
}

/// A place at a host, before the world begins.
struct PendingMember {
    host: u32,
    connection: MessageConnection,
    liveness: Liveness,
    heartbeat: Duration,
    beat: Instant,
    /// When to look again at ranks that this one did not reach.
    look: Instant,
    /// The host has answered.
    is_here: bool,
    offered: Option<Roster>,
}

impl PendingMember {
    fn new(host: u32, connection: MessageConnection, timeouts: &Timeouts) -> Self {
        let now = Instant::now();
        let liveness = Liveness::new(1, timeouts.heartbeat, timeouts.liveness, now);
        let (heartbeat, beat) = (timeouts.heartbeat, now + timeouts.heartbeat);
        let look = now + timeouts.liveness / 2;
        PendingMember { host, connection, liveness, heartbeat, beat, look, is_here: false, offered: None }
    }

    /// Serves the connection until a point in time. Returns the world that begins, or the end.
    fn turn(&mut self, rebuild: &Rebuild<'_>, until: Instant) -> Option<Result<Roster, RejoinError>> {
        loop {
            let now = Instant::now();
            if now >= self.beat {
                self.beat = now + self.heartbeat;
                self.connection.send(&Message::Heartbeat);
            }
            if now >= self.look && self.is_here && self.offered.is_none() {
                self.look = now + rebuild.timeouts.liveness / 2;
                if rebuild.finds_cut_healed() {
                    self.introduce(rebuild);
                }
            }
            let message = self.connection.await_message(until.min(self.beat), &|| rebuild.interrupt.came());
            let now = Instant::now();
            if message.is_some() {
                self.liveness.heard(0, now);
            }
            match message {
                Some(Message::Heartbeat) if self.is_here => {}
                Some(Message::Heartbeat) => self.introduce(rebuild),
                Some(Message::Offer(roster)) => {
                    if !rebuild.lineage.accept(&roster) {
                        return Some(Err(RejoinError::Again));
                    }
                    tracing::debug!(rank = rebuild.lineage.rank, epoch = roster.epoch, "agrees");
                    self.connection.send(&Message::Accept { epoch: roster.epoch });
                    self.offered = Some(roster);
                }
                Some(Message::Begin { epoch }) => {
                    let begun = self.offered.take().filter(|roster| roster.epoch == epoch);
                    return Some(begun.ok_or(RejoinError::Again));
                }
                Some(Message::Refused(JoinRefusal::Evicted(epoch))) => {
                    return Some(Err(RejoinError::Evicted(epoch)));
                }
                Some(_) => return Some(Err(self.lost())),
                None => {
                    let ends =
                        self.connection.is_closed() || now >= rebuild.until || rebuild.interrupt.came();
                    if !ends && !self.liveness.expired(now).is_empty() {
                        rebuild.suspects.borrow_mut().insert(self.host);
                        return Some(Err(self.lost()));
                    }
                    if ends {
                        return Some(Err(self.lost()));
                    }
                    if now >= until {
                        return None;
                    }
                }
            }
        }
    }

    /// The host gathers survivors, and hears what this one wants.
    fn introduce(&mut self, rebuild: &Rebuild<'_>) {
        self.is_here = true;
        let (roster, at_least) = (rebuild.lineage.accepted(), rebuild.at_least);
        tracing::debug!(rank = rebuild.lineage.rank, epoch = roster.epoch, "is let in");
        let cut_off = rebuild.cut_off.borrow().clone();
        self.connection.send(&Message::Survivor(Survivor { roster, at_least, cut_off }));
    }

    fn lost(&self) -> RejoinError {
        if self.is_here { RejoinError::Again } else { RejoinError::Silent }
    }
}
