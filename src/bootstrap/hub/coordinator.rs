//! The thread of rank 0: it gathers the ranks of a world, then serves the store and watches over
//! them.
//!
//! ```text
//!              ┌─────────────────── coordinator ───────────────────────────┐
//!   strangers ─┤ HandshakeQueue ──► Assembly ──► members: Store, Liveness    ├─ rank 0 (same process), rank 1 ...
//!              └──────────────────────────────────────────────────────────────┘
//!
//!   first    HandshakeQueue ──► JoinBarrier: all are here ──► Welcome
//!   again    HandshakeQueue ──► Survivor ──► Gathering: Offer, Accept ──► Begin
//! ```
//!
//! Answers wait in a queue and are written a few at a time, to ranks that have taken all before. So
//! an exchange of all ranks neither keeps the coordinator from heartbeats nor fills its memory with
//! copies.
//!
//! ```text
//!   turn     read ──► Store ──► answers: | 0 | 1 | 2 | ... | ──► as many bytes as a turn sends ──► heartbeat
//! ```
//!
//! It lives as long as the connection of its own rank. So it ends with a rank 0 that dies, and all
//! ranks see the end of a stream. If it ends while it gathers, the ranks that have come hear of it,
//! and those that come soon. After a clean leave of its own rank it lingers for the others.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::PollFd;

use super::HOST;
use super::kv_store::{Contribution, Delivery, Requester, Store};
use crate::bootstrap::health::{Liveness, Timeouts};
use crate::bootstrap::rendezvous::{AuthenticatedPeer, Gathering, HandshakeQueue, JoinBarrier, Search, Step};
use crate::bootstrap::threads::{Thread, turn};
use crate::bootstrap::wait::poll_until;
use crate::bootstrap::wire::{
    Answer, EncodedAnswer, JoinRefusal, ListenAddress, Message, MessageConnection, Roster,
};
use crate::error::{BootstrapError, Cause, LostReason};

/// Bytes of answers that are written in one turn, or one answer more.
const TURN: usize = 1 << 20;
/// Bytes that may wait for ranks that take them slowly, or one answer more.
const QUEUED: usize = 64 << 20;

/// How long a coordinator whose own rank has left stays for the others.
const LINGER: Duration = Duration::from_secs(2);

/// Gathers the ranks, then serves them until its own rank is gone. Should the thread die, the ranks
/// that it has gathered hear of it.
pub fn coordinate(config: HubConfig, life: &Thread) {
    let (timeouts, failure, released) =
        (config.timeouts, Arc::clone(&config.failure), Arc::clone(&config.released));
    let mut assembly = Assembly::new(config);
    let served = match life.attempt(|| assembly.assemble()) {
        Ok(Ok(Some(assembled))) => {
            let mut coordinator = Coordinator::new(timeouts, Some(assembly.queue), released, assembled);
            life.attempt(|| coordinator.serve()).unwrap_or_else(|cause| coordinator.part(cause))
        }
        Ok(Err(error)) => {
            // Set first: the own rank looks for it once it is sent away.
            failure.get_or_init(|| error.clone());
            assembly.give_up(&Cause::Cancelled { by: HOST }).and(Err(error))
        }
        Ok(Ok(None)) => Ok(()),
        Err(cause) => assembly.part(&cause),
    };
    if let Err(error) = served {
        tracing::error!(%error, "the coordinator ends");
    }
}

/// How a member stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MemberState {
    Here,
    Left,
    Lost,
}

struct Member {
    /// Its rank in the first world.
    first: u32,
    connection: MessageConnection,
    state: MemberState,
}

impl Member {
    /// Whether it has taken all that was sent to it.
    fn takes_more(&self) -> bool {
        self.connection.is_flushed() || self.connection.is_closed()
    }
}

struct Coordinator {
    /// Late ranks come here. None once the world is over: the next one needs the listener.
    queue: Option<HandshakeQueue>,
    /// Set while the own rank needs the listener.
    released: Arc<AtomicBool>,
    timeouts: Timeouts,
    epoch: u16,
    members: Vec<Member>,
    store: Store,
    /// Answers that are not written yet.
    answers: VecDeque<Delivery>,
    encoder: AnswerEncoder,
    liveness: Liveness,
    beat: Instant,
    lingers_until: Option<Instant>,
    evicted: bool,
}

/// The rank of the coordinator's own process.
const OWN: usize = HOST as usize;

impl Coordinator {
    fn new(
        timeouts: Timeouts,
        queue: Option<HandshakeQueue>,
        released: Arc<AtomicBool>,
        assembled: Assembled,
    ) -> Self {
        let now = Instant::now();
        let Assembled { epoch, members } = assembled;
        let members: Vec<_> = members
            .into_iter()
            .map(|(first, connection)| Member { first, connection, state: MemberState::Here })
            .collect();
        Coordinator {
            queue,
            released,
            timeouts,
            epoch,
            store: Store::new(members.len() as u32),
            answers: VecDeque::new(),
            encoder: AnswerEncoder::default(),
            liveness: Liveness::new(members.len(), timeouts.heartbeat, timeouts.liveness, now),
            members,
            beat: now,
            lingers_until: None,
            evicted: false,
        }
    }

    fn serve(&mut self) -> Result<(), BootstrapError> {
        loop {
            turn();
            let ready = self.wait()?;
            // In later epochs the listener is the rank's own, which gives it back.
            if self.epoch == 0 && self.is_released() {
                self.queue = None;
            }
            let now = Instant::now();
            // Reads all pending messages before the clock declares a member lost.
            for rank in ready {
                self.read(rank, now);
            }
            for rank in 0..self.members.len() {
                if self.members[rank].state == MemberState::Here && self.members[rank].connection.is_closed()
                {
                    self.lose(rank, LostReason::Closed);
                }
            }
            for (rank, silence) in self.liveness.expired(now) {
                self.lose(rank, LostReason::Silent(silence));
            }
            if now >= self.beat {
                self.beat = now + self.timeouts.heartbeat;
                self.broadcast(&Message::Heartbeat, None);
            }
            self.hand_out(TURN);
            let released = self.is_released();
            let queue = self.queue.as_mut().filter(|_| !released);
            for arrival in queue.map(|queue| queue.turn(now)).unwrap_or_default() {
                let taken = self.members.iter().any(|member| member.first == arrival.hello.rank);
                arrival.refuse(if taken { JoinRefusal::Rank } else { JoinRefusal::Evicted(self.epoch) });
            }
            self.members.iter_mut().for_each(|member| member.connection.flush());
            if self.is_over(now) {
                return Ok(());
            }
        }
    }

    /// Sends all ranks its last message.
    fn part(&mut self, cause: Cause) -> Result<(), BootstrapError> {
        self.hand_out(TURN);
        self.broadcast(&Message::Dead(cause), None);
        flush(self.members.iter_mut().map(|member| &mut member.connection).collect())
    }

    /// Waits for an event. Returns the members whose connection has a message.
    fn wait(&self) -> Result<Vec<usize>, BootstrapError> {
        let queue = self.queue.as_ref().filter(|_| !self.is_released());
        let next = [self.liveness.next(), queue.and_then(HandshakeQueue::next), self.lingers_until];
        let next = next.into_iter().flatten().fold(self.beat, Instant::min);
        // A rank that has yet to take what was sent before wakes this thread when it has.
        let can_go_on = self.queued() < QUEUED
            && self.answers.iter().any(|answer| self.members[answer.rank as usize].takes_more());
        let next = if can_go_on { Instant::now() } else { next };
        let open = |(_, member): &(usize, &Member)| !member.connection.is_closed();
        let ranks: Vec<usize> = self.members.iter().enumerate().filter(open).map(|(rank, _)| rank).collect();
        let connections = ranks.iter().map(|&rank| self.members[rank].connection.poll_fd());
        let mut fds: Vec<PollFd<'_>> =
            connections.chain(queue.into_iter().flat_map(HandshakeQueue::poll_fds)).collect();
        poll_until(&mut fds, next)?;
        Ok(ranks.iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty()).map(|(&rank, _)| rank).collect())
    }

    /// Whether the own rank uses the listener.
    fn is_released(&self) -> bool {
        // Relaxed: nothing that the rank writes is read for it. A turn later is soon enough.
        self.released.load(Ordering::Relaxed)
    }

    fn read(&mut self, rank: usize, now: Instant) {
        self.members[rank].connection.fill();
        while let Some(message) = self.members[rank].connection.next() {
            // Messages of a lost rank are read and ignored, so that its connection ends cleanly.
            if self.members[rank].state == MemberState::Here {
                self.liveness.heard(rank, now);
                self.handle(rank, message);
            }
        }
    }

    fn handle(&mut self, from: usize, message: Message) {
        let rank = from as u32;
        let deliveries = match message {
            Message::Heartbeat => return,
            Message::Set { ticket, key, value } => self.store.set(Requester { rank, ticket }, key, value),
            Message::Get { ticket, key } => self.store.get(Requester { rank, ticket }, key),
            Message::Gather { ticket, key, index, count, blob } => {
                let blob = Contribution::ForAll(blob);
                self.store.gather(Requester { rank, ticket }, key, index, count, blob)
            }
            Message::Exchange { ticket, key, index, blobs } => {
                let (count, blobs) = (blobs.len() as u32, Contribution::ForEach(blobs));
                self.store.gather(Requester { rank, ticket }, key, index, count, blobs)
            }
            Message::Withdraw { ticket } => self.store.withdraw(Requester { rank, ticket }),
            // The others went on while this process was stopped.
            Message::Dead(cause @ Cause::Evicted { rank, .. }) if rank == HOST => {
                self.evicted = true;
                self.members[OWN].connection.send(&Message::Dead(cause));
                return;
            }
            Message::Dead(cause) => return self.fail(cause, Some(from)),
            Message::Bye => {
                self.hand_out(TURN);
                self.members[from].state = MemberState::Left;
                self.liveness.forget(from);
                self.broadcast(&Message::Left { rank }, None);
                if from == OWN {
                    self.queue = None;
                    self.lingers_until = Some(Instant::now() + LINGER);
                }
                self.store.leave(rank)
            }
            // No correct rank sends this: it is treated like a broken connection.
            _ => return self.lose(from, LostReason::Closed),
        };
        self.answers.extend(deliveries);
    }

    /// Bytes that ranks have yet to take.
    fn queued(&self) -> usize {
        self.members.iter().map(|member| member.connection.queued()).sum()
    }

    /// Writes answers for ranks that have taken all before: so many bytes, or one answer more. A
    /// message that comes next may overtake the others.
    fn hand_out(&mut self, most: usize) {
        let (mut sent, most) = (0, most.min(QUEUED.saturating_sub(self.queued())));
        for _ in 0..self.answers.len() {
            let Some(Delivery { rank, ticket, answer }) = self.answers.pop_front() else { return };
            let member = &mut self.members[rank as usize];
            if member.state != MemberState::Here {
                continue;
            }
            if sent >= most || !member.takes_more() {
                self.answers.push_back(Delivery { rank, ticket, answer });
                continue;
            }
            let answer = self.encoder.encode(answer);
            member.connection.answer(ticket, &answer);
            member.connection.flush();
            sent += answer.len();
        }
        if self.answers.is_empty() {
            self.encoder = AnswerEncoder::default();
        }
    }

    /// A rank is gone: all others get a message at once, and so does the rank itself, should it
    /// wake up.
    fn lose(&mut self, rank: usize, how: LostReason) {
        let epoch = self.epoch;
        self.hand_out(TURN);
        let member = &mut self.members[rank];
        member.state = MemberState::Lost;
        member.connection.send(&Message::Dead(Cause::Evicted { rank: rank as u32, epoch }));
        self.liveness.forget(rank);
        self.fail(Cause::Lost { rank: rank as u32, how }, None);
    }

    /// The world is over: late ranks belong to the next one.
    fn fail(&mut self, cause: Cause, except: Option<usize>) {
        self.hand_out(TURN);
        self.queue = None;
        self.broadcast(&Message::Dead(cause), except);
    }

    fn broadcast(&mut self, message: &Message, except: Option<usize>) {
        let frame = message.encode();
        for (rank, member) in self.members.iter_mut().enumerate() {
            if member.state == MemberState::Here && Some(rank) != except {
                member.connection.send_frame(&frame);
            }
        }
    }

    fn is_over(&self, now: Instant) -> bool {
        let alone = self.members.iter().all(|member| member.state != MemberState::Here);
        match self.members[OWN].state {
            MemberState::Here => self.evicted,
            MemberState::Lost => true,
            MemberState::Left => alone || self.lingers_until.is_some_and(|until| now >= until),
        }
    }
}

/// Makes bytes of answers. The ranks of a step that gathers get the same ones, which are held once.
#[derive(Default)]
struct AnswerEncoder(Option<(Answer, EncodedAnswer)>);

impl AnswerEncoder {
    fn encode(&mut self, answer: Answer) -> EncodedAnswer {
        let same = self.0.take().filter(|(last, _)| last.is_same(&answer));
        let (_, bytes) = self.0.insert(same.unwrap_or_else(|| {
            let bytes = EncodedAnswer::new(&answer);
            (answer, bytes)
        }));
        bytes.clone()
    }
}

/// Longest sleep: ranks become absent without an event on a descriptor.
const SLICE: Duration = Duration::from_millis(50);
/// How long the ranks may take for the last message of a coordinator that dies.
const FINAL_SEND: Duration = Duration::from_millis(500);
/// How long a coordinator that has died tells ranks that come.
const LINGER_AFTER_FAILURE: Duration = Duration::from_secs(2);

/// The ranks that are to meet.
pub enum GatheringKind {
    /// All ranks of a job.
    First(JoinBarrier),
    /// The survivors of a world.
    Again(Gathering, Arc<Search>),
}

/// Inputs of a coordinator.
pub struct HubConfig {
    pub queue: HandshakeQueue,
    pub kind: GatheringKind,
    pub timeouts: Timeouts,
    /// Bound of waiting for the own rank to come.
    pub until: Instant,
    /// Where the own rank finds the reason if the coordinator cannot gather the ranks.
    pub failure: Arc<OnceLock<BootstrapError>>,
    /// Set while the own rank needs the listener.
    pub released: Arc<AtomicBool>,
}

/// A world that begins.
pub struct Assembled {
    pub epoch: u16,
    /// By their ranks in the first world, ascending.
    pub members: Vec<(u32, MessageConnection)>,
}

/// A coordinator that gathers ranks.
pub struct Assembly {
    pub queue: HandshakeQueue,
    kind: GatheringKind,
    until: Instant,
    here: BTreeMap<u32, AuthenticatedPeer>,
    /// Whether the coordinator's own rank has come.
    own_came: bool,
    liveness: Liveness,
    timeouts: Timeouts,
    beat: Instant,
}

impl Assembly {
    pub fn new(config: HubConfig) -> Self {
        let HubConfig { queue, kind, timeouts, until, .. } = config;
        let now = Instant::now();
        let size = match &kind {
            GatheringKind::First(_) => queue.rendezvous().size as usize,
            GatheringKind::Again(_, search) => search.ranks as usize,
        };
        let mut liveness = Liveness::new(size, timeouts.heartbeat, timeouts.liveness, now);
        (0..size).for_each(|rank| liveness.forget(rank));
        let here = BTreeMap::new();
        Assembly { queue, kind, until, here, own_came: false, liveness, timeouts, beat: now }
    }

    /// Waits until the world begins. None if the rendezvous was given up.
    pub fn assemble(&mut self) -> Result<Option<Assembled>, BootstrapError> {
        loop {
            turn();
            let now = Instant::now();
            let begins = match self.kind {
                GatheringKind::First(_) => self.first(now),
                GatheringKind::Again(..) => self.again(now),
            };
            let own = self.queue.rendezvous().host;
            self.own_came |= self.here.contains_key(&own);
            if begins.is_some() || self.is_given_up(own, now) {
                return Ok(begins);
            }
            let exhausted = self.queue.exhausted_for(self.timeouts.liveness, now);
            if let Some(error) = exhausted.filter(|_| matches!(self.kind, GatheringKind::First(_))) {
                return Err(error);
            }
            self.here.values_mut().for_each(|peer| peer.connection.flush());
            self.await_event(now)?;
        }
    }

    fn is_given_up(&self, own: u32, now: Instant) -> bool {
        let over = matches!(&self.kind, GatheringKind::Again(_, search) if search.is_over());
        over || (!self.here.contains_key(&own) && (self.own_came || now >= self.until))
    }

    /// Waits for an event.
    fn await_event(&self, now: Instant) -> Result<(), BootstrapError> {
        let closes = match &self.kind {
            GatheringKind::First(_) => None,
            // After its end the window changes nothing.
            GatheringKind::Again(gathering, _) => gathering.closes().filter(|&closes| closes > now),
        };
        let next = [self.queue.next(), closes, self.liveness.next()];
        let next = next.into_iter().flatten().fold(now + SLICE, Instant::min);
        let connections = self.here.values().map(|peer| peer.connection.poll_fd());
        poll_until(&mut self.queue.poll_fds().chain(connections).collect::<Vec<_>>(), next)
    }

    /// A turn of the first rendezvous.
    fn first(&mut self, now: Instant) -> Option<Assembled> {
        let Assembly { queue, kind: GatheringKind::First(barrier), here, .. } = self else { return None };
        for arrival in queue.turn(now) {
            let rank = arrival.hello.rank;
            if barrier.join(rank) {
                here.insert(rank, arrival);
            } else {
                arrival.refuse(JoinRefusal::Rank);
            }
        }
        let (mut parted, mut over) = (Vec::new(), false);
        for (&rank, peer) in here.iter_mut() {
            peer.connection.flush();
            peer.connection.fill();
            let gives_up = matches!(peer.connection.next(), Some(Message::Withdraw { .. }));
            // Without that rank, or its own, the world can never begin.
            over |= gives_up || (rank == queue.rendezvous().host && peer.connection.is_closed());
            parted.extend(peer.connection.is_closed().then_some(rank));
        }
        let missing = JoinRefusal::Missing { ranks: barrier.missing(), refused: queue.refused_joins() };
        if over {
            std::mem::take(here).into_values().for_each(|peer| peer.refuse(missing.clone()));
            return None;
        }
        for rank in parted {
            barrier.part(rank);
            here.remove(&rank);
        }
        barrier.missing().is_empty().then(|| self.welcome())
    }

    /// Tells each rank where the others listen.
    fn welcome(&mut self) -> Assembled {
        let addresses = self.here.values().map(|peer| ListenAddress {
            // An address of this machine alone means nothing elsewhere.
            ip: peer.connection.peer().filter(|ip: &IpAddr| !ip.is_loopback()),
            port: peer.hello.port,
        });
        let welcome = Message::Welcome { addresses: addresses.collect() }.encode().into();
        self.here.values_mut().for_each(|peer| peer.connection.share_frame(&welcome));
        let here = std::mem::take(&mut self.here).into_iter();
        let members = here.map(|(rank, peer)| (rank, peer.connection)).collect();
        Assembled { epoch: self.queue.rendezvous().epoch, members }
    }

    /// A turn of the rendezvous of survivors.
    fn again(&mut self, now: Instant) -> Option<Assembled> {
        let Assembly { queue, kind: GatheringKind::Again(gathering, search), here, liveness, .. } = self
        else {
            return None;
        };
        let own = queue.rendezvous().host;
        for mut arrival in queue.turn(now) {
            let rank = arrival.hello.rank;
            if rank >= search.ranks {
                arrival.refuse(JoinRefusal::Rank);
                continue;
            }
            arrival.connection.send(&Message::Heartbeat);
            // A rank that comes again has given its other connection up.
            gathering.part(rank, now);
            liveness.watch(rank as usize, now);
            here.insert(rank, arrival);
        }
        let mut leaving: Vec<(u32, Option<JoinRefusal>)> = Vec::new();
        for (&rank, peer) in here.iter_mut() {
            peer.connection.fill();
            while let Some(message) = peer.connection.next() {
                liveness.heard(rank as usize, now);
                match message {
                    Message::Heartbeat => {}
                    // It is a better host, and is only looking.
                    Message::Survivor(survivor) if rank < own => {
                        let evicted = gathering.evicts(rank, &survivor).map(JoinRefusal::Evicted);
                        leaving.push((rank, Some(evicted.unwrap_or(JoinRefusal::Rank))));
                    }
                    Message::Survivor(survivor) => {
                        let evicted = gathering.join(rank, survivor, now).into_iter();
                        leaving
                            .extend(evicted.map(|(rank, epoch)| (rank, Some(JoinRefusal::Evicted(epoch)))));
                    }
                    Message::Accept { epoch } => gathering.accept(rank, epoch),
                    _ => leaving.push((rank, None)),
                }
            }
            leaving.extend(peer.connection.is_closed().then_some((rank, None)));
        }
        for (rank, _) in liveness.expired(now) {
            search.give_up(rank as u32);
            leaving.push((rank as u32, None));
        }
        for (rank, refusal) in leaving {
            gathering.part(rank, now);
            liveness.forget(rank as usize);
            if let (Some(peer), Some(refusal)) = (here.remove(&rank), refusal) {
                peer.refuse(refusal);
            }
        }
        let step = gathering.step(&search.gone(), now);
        search.publish(gathering.here().collect(), gathering.is_offered());
        let message: Option<(Arc<[u8]>, Vec<u32>)> = match &step {
            Step::Begin(roster) => return Some(self.begin(roster)),
            Step::Offer(roster) => {
                tracing::debug!(rank = own, epoch = roster.epoch, members = ?roster.members, "offers a world");
                Some((Message::Offer(roster.clone()).encode().into(), roster.members.clone()))
            }
            Step::Wait if now >= self.beat => {
                self.beat = now + self.timeouts.heartbeat;
                Some((Message::Heartbeat.encode().into(), gathering.here().collect()))
            }
            Step::Wait => None,
        };
        for (rank, frame) in
            message.iter().flat_map(|(frame, ranks)| ranks.iter().map(move |rank| (rank, frame)))
        {
            if let Some(peer) = here.get_mut(rank) {
                peer.connection.share_frame(frame);
            }
        }
        None
    }

    /// All members have agreed: their world begins, without the others.
    fn begin(&mut self, roster: &Roster) -> Assembled {
        let (epoch, mut members) = (roster.epoch, Vec::new());
        tracing::debug!(epoch, "begins a world");
        for (rank, mut peer) in std::mem::take(&mut self.here) {
            if roster.has(rank) {
                peer.connection.send(&Message::Begin { epoch });
                members.push((rank, peer.connection));
            } else {
                peer.refuse(JoinRefusal::Evicted(epoch));
            }
        }
        Assembled { epoch, members }
    }

    /// Sends the ranks that have come its last message.
    pub fn give_up(&mut self, cause: &Cause) -> Result<(), BootstrapError> {
        self.here.values_mut().for_each(|peer| peer.connection.send(&Message::Dead(cause.clone())));
        flush(self.here.values_mut().map(|peer| &mut peer.connection).collect())
    }

    /// Sends the ranks that have come, and those that come soon, its last message.
    pub fn part(&mut self, cause: &Cause) -> Result<(), BootstrapError> {
        let mut told: Vec<MessageConnection> =
            std::mem::take(&mut self.here).into_values().map(|peer| peer.connection).collect();
        told.iter_mut().for_each(|connection| connection.send(&Message::Dead(cause.clone())));
        let until = Instant::now() + LINGER_AFTER_FAILURE;
        while Instant::now() < until {
            flush(told.iter_mut().collect())?;
            told.clear();
            let next = self.queue.next().into_iter().fold(until, Instant::min);
            poll_until(&mut self.queue.poll_fds().collect::<Vec<_>>(), next)?;
            for mut arrival in self.queue.turn(Instant::now()) {
                arrival.connection.send(&Message::Dead(cause.clone()));
                told.push(arrival.connection);
            }
        }
        flush(told.iter_mut().collect())
    }
}

/// Sends what is queued; connections that take nothing are given up soon.
pub fn flush(mut connections: Vec<&mut MessageConnection>) -> Result<(), BootstrapError> {
    let until = Instant::now() + FINAL_SEND;
    loop {
        connections.iter_mut().for_each(|connection| connection.flush());
        connections.retain(|connection| !connection.is_flushed() && !connection.is_closed());
        if connections.is_empty() || Instant::now() >= until {
            return Ok(());
        }
        poll_until(
            &mut connections.iter().map(|connection| connection.poll_fd()).collect::<Vec<_>>(),
            until,
        )?;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::bootstrap::Location;
    use crate::bootstrap::notice::Notice;
    use crate::bootstrap::wire::{Answer, Outbox, Reader};

    /// Steps of a world of nodes of 8 over tcp.
    const STEPS: usize = 6;

    /// The contribution of a rank to a step.
    type Said<'a> = &'a dyn Fn(u32) -> Vec<u8>;

    /// The bytes that rank 0 holds for each rank while they build a world, before any is read.
    fn outboxes(ranks: u32) -> Vec<Outbox> {
        let mut outboxes: Vec<Outbox> = (0..ranks).map(|_| Outbox::default()).collect();
        let addresses =
            vec![ListenAddress { ip: Some(IpAddr::from([10, 0, 0, 1])), port: 9 }; ranks as usize];
        let welcome = Message::Welcome { addresses }.encode().into();
        outboxes.iter_mut().for_each(|outbox| outbox.share(&welcome));
        let place = Location::in_node("").unwrap().to_bytes();
        let linked = |rank: u32, peer: u32| (rank / 8 == peer / 8 && rank != peer).then_some(1);
        let links = |rank| Notice::new((0..ranks).map(|peer| linked(rank, peer))).unwrap().encode();
        let steps: [(&str, Said<'_>); STEPS] = [
            ("world/place", &|_| place.clone()),
            ("world/conditions", &|_| vec![0; 32]),
            ("world/sizes", &|_| vec![0; 32]),
            ("world/heaps", &links),
            ("world/net", &|_| vec![0]),
            ("world/net/tcp", &|_| vec![0]),
        ];
        let (mut store, mut encoder) = (Store::new(ranks), AnswerEncoder::default());
        for ((step, said), ticket) in steps.into_iter().zip(0..) {
            for rank in 0..ranks {
                let (caller, blob) = (Requester { rank, ticket }, Contribution::ForAll(said(rank)));
                let deliveries = store.gather(caller, step.to_owned(), rank, ranks, blob);
                for Delivery { rank, ticket, answer } in deliveries {
                    encoder.encode(answer).queue(ticket, &mut outboxes[rank as usize]);
                }
            }
        }
        outboxes
    }

    #[test]
    fn bytes_in_rank_0_grow_with_ranks_and_not_their_square() {
        for ranks in [1024, 4096] {
            let outboxes = outboxes(ranks);
            let [all, one] = [&outboxes[..], &outboxes[..1]].map(Outbox::held);
            println!("{ranks} ranks: rank 0 holds {all} bytes, and sends {one} to each");
            // Each other rank adds a length and a ticket in each step.
            assert_eq!(all, one + (ranks as usize - 1) * STEPS * 13);
            assert!(one < 350 * ranks as usize, "{} bytes for each rank", one / ranks as usize);
        }
    }

    /// Ranks of the world.
    const RANKS: usize = 3;

    /// Messages of ranks: of each its sender, and its frame.
    fn script(messages: &[(u8, Message)]) -> Vec<u8> {
        messages.iter().flat_map(|(rank, message)| [&[*rank][..], &message.encode()].concat()).collect()
    }

    fn spoken(bytes: &[u8]) -> Vec<(usize, Message)> {
        let (mut reader, mut messages) = (Reader::new(bytes), Vec::new());
        while let (Ok(rank), Ok(body)) = (reader.u8(), reader.bytes()) {
            messages.extend(Message::decode(body).map(|message| (usize::from(rank) % RANKS, message)));
        }
        messages
    }

    /// The number of a request.
    fn ticket(message: &Message) -> Option<u64> {
        match message {
            Message::Set { ticket, .. }
            | Message::Get { ticket, .. }
            | Message::Gather { ticket, .. }
            | Message::Exchange { ticket, .. } => Some(*ticket),
            _ => None,
        }
    }

    fn stream() -> [TcpStream; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        theirs.set_nonblocking(true).unwrap();
        let both = [listener.accept().unwrap().0, theirs];
        // Closed at once: thousands of inputs would leave as many ports that nothing can use for a
        // minute.
        for end in &both {
            rustix::net::sockopt::set_socket_linger(end, Some(Duration::ZERO)).unwrap();
        }
        both
    }

    /// All that has come.
    fn drain(mut stream: &TcpStream) -> Vec<u8> {
        let mut bytes = Vec::new();
        // Ends as soon as nothing is there.
        let _ = stream.read_to_end(&mut bytes);
        bytes
    }

    /// The coordinator of so many ranks, and their ends.
    fn coordinator(ranks: usize) -> (Coordinator, Vec<TcpStream>) {
        let (ours, theirs): (Vec<_>, Vec<_>) = (0..ranks).map(|_| stream().into()).unzip();
        let members = ours.into_iter().map(|ours| MessageConnection::new(ours).unwrap());
        let assembled = Assembled { epoch: 0, members: (0..).zip(members).collect() };
        (Coordinator::new(Timeouts::default(), None, Arc::default(), assembled), theirs)
    }

    #[test]
    fn answers_of_an_exchange_are_written_a_few_at_a_time() {
        const BYTES: usize = 64 << 10;
        let (mut coordinator, streams) = coordinator(8);
        let ranks = streams.len();
        for rank in 0..ranks {
            let blobs = (0..ranks).map(|to| vec![(rank * ranks + to) as u8; BYTES]).collect();
            let exchange = Message::Exchange { ticket: 7, key: "a".into(), index: rank as u32, blobs };
            coordinator.handle(rank, exchange);
        }
        let held = |coordinator: &Coordinator| -> usize {
            coordinator.members.iter().map(|member| member.connection.held_bytes()).sum()
        };
        assert_eq!((coordinator.answers.len(), held(&coordinator)), (ranks, 0), "nothing is copied yet");
        let answer = |rank: usize| {
            let blobs = (0..ranks).map(|from| vec![(from * ranks + rank) as u8; BYTES]).collect();
            Message::Answer { ticket: 7, answer: Answer::Gathered(Arc::new(blobs)) }.encode()
        };
        let expected: Vec<Vec<u8>> = (0..ranks).map(answer).collect();
        let mut came: Vec<Vec<u8>> = vec![Vec::new(); ranks];
        let until = Instant::now() + Duration::from_secs(20);
        while came != expected {
            assert!(Instant::now() < until, "answers are missing");
            let before = coordinator.answers.len();
            coordinator.hand_out(TURN);
            let few = TURN / expected[0].len() + 1;
            assert!(before - coordinator.answers.len() <= few, "a turn writes few");
            coordinator.members.iter_mut().for_each(|member| member.connection.flush());
            for (came, stream) in came.iter_mut().zip(&streams) {
                came.extend(drain(stream));
            }
        }
        assert!(held(&coordinator) <= ranks * (4 << 10), "what was sent is not kept");
    }

    #[test]
    fn no_request_is_answered_twice_whatever_ranks_say() {
        let (key, blob) = ("a".to_owned(), vec![1, 2]);
        let set = |ticket| Message::Set { ticket, key: key.clone(), value: blob.clone() };
        let get = |ticket| Message::Get { ticket, key: key.clone() };
        let gather = |ticket, index, count| Message::Gather {
            ticket,
            key: key.clone(),
            index,
            count,
            blob: blob.clone(),
        };
        let exchange = |ticket, index| Message::Exchange {
            ticket,
            key: key.clone(),
            index,
            blobs: [&blob; 2].into_iter().collect(),
        };
        let dead = Message::Dead(Cause::Cancelled { by: 1 });
        let seeds = [
            script(&[(0, exchange(1, 0)), (1, exchange(1, 1)), (2, exchange(2, 0)), (0, gather(2, 1, 2))]),
            script(&[(0, get(1)), (1, set(1)), (2, get(1)), (0, Message::Heartbeat)]),
            script(&[(0, gather(1, 0, 3)), (1, gather(1, 1, 3)), (2, gather(1, 2, 3))]),
            script(&[(0, gather(1, 0, 3)), (1, gather(1, 1, 2)), (0, Message::Withdraw { ticket: 1 })]),
            script(&[(0, gather(1, 0, 2)), (1, Message::Bye), (2, Message::Bye), (0, Message::Bye)]),
            script(&[(0, get(1)), (1, dead), (2, Message::Accept { epoch: 1 })]),
        ];
        fuzz::run("coordinator", &seeds, |bytes| {
            // Bytes may come late, so no input shares a stream with another one.
            let (mut coordinator, streams) = coordinator(RANKS);
            let mut asked = HashMap::<(usize, u64), i32>::new();
            for (rank, message) in spoken(bytes) {
                if coordinator.members[rank].state == MemberState::Here {
                    if let Some(ticket) = ticket(&message) {
                        *asked.entry((rank, ticket)).or_default() += 1;
                    }
                    coordinator.handle(rank, message);
                }
            }
            coordinator.hand_out(TURN);
            coordinator.members.iter_mut().for_each(|member| member.connection.flush());
            let all_sent = coordinator.members.iter().all(|member| member.connection.is_flushed());
            for (rank, theirs) in streams.iter().enumerate() {
                let came = drain(theirs);
                let mut reader = Reader::new(&came);
                while let (true, Ok(body)) = (all_sent, reader.bytes()) {
                    if let Message::Answer { ticket, .. } = Message::decode(body).unwrap() {
                        let left = asked.entry((rank, ticket)).or_default();
                        *left -= 1;
                        assert!(*left >= 0, "rank {rank} has two answers to {ticket}");
                    }
                }
            }
        });
    }
}
