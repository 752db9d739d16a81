//! The thread of rank 0 that serves the store and watches over the ranks.
//!
//! ```text
//!              ┌─────────────────── coordinator ───────────────────────────┐
//!   strangers ─┤ HandshakeQueue ──► JoinBarrier ──► members: Store, Liveness ├─ rank 0 (same process), rank 1 ...
//!              └──────────────────────────────────────────────────────────────┘
//! ```
//!
//! It lives as long as the connection of its own rank. So it ends with a rank 0 that dies, and all
//! ranks see the end of a stream. After a clean leave of its own rank it lingers for the others.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use rustix::event::PollFd;

use super::store::{Delivery, Requester, Store};
use crate::bootstrap::rendezvous::{AuthenticatedPeer, HandshakeQueue, JoinBarrier};
use crate::bootstrap::thread::{Thread, turn};
use crate::bootstrap::wait::poll_until;
use crate::bootstrap::watch::{Liveness, Timeouts};
use crate::bootstrap::wire::{JoinRefusal, ListenAddress, Message, MessageConnection};
use crate::error::{BootstrapError, Cause, LostReason};

/// How long a coordinator whose own rank has left stays for the others.
const LINGER: Duration = Duration::from_secs(2);
/// How long the ranks may take for the last message of a coordinator that dies.
const FINAL_SEND: Duration = Duration::from_millis(500);

/// Inputs of a coordinator.
pub struct HubConfig {
    pub queue: HandshakeQueue,
    pub barrier: JoinBarrier,
    /// Ranks known absent, asked again and again.
    pub absent: Box<dyn Fn() -> Vec<u32> + Send>,
    pub timeouts: Timeouts,
    /// Bound of waiting for the own rank to come.
    pub until: Instant,
}

/// Gathers the ranks, then serves them until its own rank is gone. Should the thread die, the ranks
/// that it has gathered hear of it.
pub fn coordinate(mut config: HubConfig, life: &Thread) {
    let served = match life.attempt(|| assemble(&mut config)) {
        Ok(Ok(Some(admitted))) => {
            let mut coordinator = Coordinator::new(config.queue, config.timeouts, admitted);
            life.attempt(|| coordinator.serve()).unwrap_or_else(|cause| coordinator.part(cause))
        }
        Ok(Err(error)) => Err(error),
        Ok(Ok(None)) | Err(_) => Ok(()),
    };
    if let Err(error) = served {
        tracing::error!(%error, "the coordinator ends");
    }
}

/// A member and its rank before this meeting.
struct Admitted {
    old: u32,
    connection: MessageConnection,
}

/// Waits until the meeting may begin and welcomes its members. None if it was given up.
fn assemble(config: &mut HubConfig) -> Result<Option<Vec<Admitted>>, BootstrapError> {
    let HubConfig { queue, barrier, absent, until, .. } = config;
    let host = queue.rendezvous().host;
    let mut here: BTreeMap<u32, AuthenticatedPeer> = BTreeMap::new();
    loop {
        let now = Instant::now();
        if let Some(members) = barrier.members(&absent(), now).filter(|members| members.contains(&host)) {
            return Ok(Some(welcome(members, here)));
        }
        if now >= *until && !here.contains_key(&host) {
            return Ok(None);
        }
        // Ranks may become absent without an event on any of these descriptors: hence the slice.
        let slice = now + Duration::from_millis(50);
        let next = queue.next().into_iter().chain(barrier.closes()).fold(slice, Instant::min);
        let connections = here.values().map(|arrival| arrival.connection.poll_fd());
        poll_until(&mut queue.poll_fds().chain(connections).collect::<Vec<_>>(), next)?;

        let now = Instant::now();
        for arrival in queue.turn(now) {
            let rank = arrival.hello.rank;
            if absent().contains(&rank) {
                let epoch = queue.rendezvous().epoch;
                arrival.refuse(JoinRefusal::Evicted(epoch));
            } else if barrier.join(rank, now) {
                here.insert(rank, arrival);
            } else {
                arrival.refuse(JoinRefusal::Rank);
            }
        }
        for rank in here.keys().copied().collect::<Vec<_>>() {
            let Some(arrival) = here.get_mut(&rank) else { continue };
            arrival.connection.flush();
            arrival.connection.fill();
            let gives_up = matches!(arrival.connection.next(), Some(Message::Withdraw { .. }));
            if !gives_up && !arrival.connection.is_closed() {
                continue;
            }
            let (ranks, refused) = (barrier.missing(&absent()), queue.refused_joins());
            let missing = JoinRefusal::Missing { ranks, refused };
            if rank == host || (gives_up && barrier.needs_all()) {
                here.into_values().for_each(|arrival| arrival.refuse(missing.clone()));
                return Ok(None);
            }
            barrier.part(rank);
            if let Some(arrival) = here.remove(&rank) {
                arrival.refuse(missing);
            }
        }
    }
}

/// Numbers the members in their old order and sends each the list of members and their addresses.
fn welcome(members: Vec<u32>, mut here: BTreeMap<u32, AuthenticatedPeer>) -> Vec<Admitted> {
    let addresses: Vec<ListenAddress> = members
        .iter()
        .filter_map(|old| here.get(old))
        .map(|arrival| ListenAddress {
            // An address of this machine alone means nothing elsewhere.
            ip: arrival.connection.peer().filter(|ip: &IpAddr| !ip.is_loopback()),
            port: arrival.hello.port,
        })
        .collect();
    let mut admitted = Vec::new();
    for (rank, old) in (0u32..).zip(&members) {
        if let Some(mut arrival) = here.remove(old) {
            let addresses = addresses.clone();
            arrival.connection.send(&Message::Welcome { rank, members: members.clone(), addresses });
            admitted.push(Admitted { old: *old, connection: arrival.connection });
        }
    }
    admitted
}

/// How a member stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MemberState {
    Here,
    Left,
    Lost,
}

struct Member {
    old: u32,
    connection: MessageConnection,
    state: MemberState,
}

struct Coordinator {
    queue: HandshakeQueue,
    timeouts: Timeouts,
    members: Vec<Member>,
    host: usize,
    store: Store,
    liveness: Liveness,
    beat: Instant,
    lingers_until: Option<Instant>,
    evicted: bool,
}

impl Coordinator {
    fn new(queue: HandshakeQueue, timeouts: Timeouts, admitted: Vec<Admitted>) -> Self {
        let now = Instant::now();
        let host = queue.rendezvous().host;
        let members: Vec<_> = admitted
            .into_iter()
            .map(|Admitted { old, connection }| Member { old, connection, state: MemberState::Here })
            .collect();
        Coordinator {
            queue,
            timeouts,
            host: members.iter().position(|member| member.old == host).unwrap_or(0),
            store: Store::new(members.len() as u32),
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
            for arrival in self.queue.turn(now) {
                let taken = self.members.iter().any(|member| member.old == arrival.hello.rank);
                let epoch = self.queue.rendezvous().epoch;
                arrival.refuse(if taken { JoinRefusal::Rank } else { JoinRefusal::Evicted(epoch) });
            }
            self.members.iter_mut().for_each(|member| member.connection.flush());
            if self.is_over(now) {
                return Ok(());
            }
        }
    }

    /// Sends all ranks its last message.
    fn part(&mut self, cause: Cause) -> Result<(), BootstrapError> {
        self.broadcast(&Message::Dead(cause), None);
        let until = Instant::now() + FINAL_SEND;
        loop {
            let waiting = self.members.iter_mut().filter_map(|member| {
                member.connection.flush();
                let open = !member.connection.is_flushed() && !member.connection.is_closed();
                open.then(|| member.connection.poll_fd())
            });
            let mut waiting: Vec<_> = waiting.collect();
            if waiting.is_empty() || Instant::now() >= until {
                return Ok(());
            }
            poll_until(&mut waiting, until)?;
        }
    }

    /// Waits for an event. Returns the members whose connection has a message.
    fn wait(&self) -> Result<Vec<usize>, BootstrapError> {
        let next = [self.liveness.next(), self.queue.next(), self.lingers_until];
        let next = next.into_iter().flatten().fold(self.beat, Instant::min);
        let open = |(_, member): &(usize, &Member)| !member.connection.is_closed();
        let ranks: Vec<usize> = self.members.iter().enumerate().filter(open).map(|(rank, _)| rank).collect();
        let connections = ranks.iter().map(|&rank| self.members[rank].connection.poll_fd());
        let mut fds: Vec<PollFd<'_>> = connections.chain(self.queue.poll_fds()).collect();
        poll_until(&mut fds, next)?;
        Ok(ranks.iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty()).map(|(&rank, _)| rank).collect())
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
                self.store.gather(Requester { rank, ticket }, key, index, count, blob)
            }
            Message::Withdraw { ticket } => self.store.withdraw(Requester { rank, ticket }),
            // The others went on while this process was stopped.
            Message::Dead(cause @ Cause::Evicted { rank, .. }) if rank as usize == self.host => {
                self.evicted = true;
                self.members[self.host].connection.send(&Message::Dead(cause));
                return;
            }
            Message::Dead(cause) => return self.broadcast(&Message::Dead(cause), Some(from)),
            Message::Bye => {
                self.members[from].state = MemberState::Left;
                self.liveness.forget(from);
                self.broadcast(&Message::Left { rank }, None);
                if from == self.host {
                    self.lingers_until = Some(Instant::now() + LINGER);
                }
                self.store.leave(rank)
            }
            // No correct rank sends this: it is treated like a broken connection.
            _ => return self.lose(from, LostReason::Closed),
        };
        self.deliver(deliveries);
    }

    fn deliver(&mut self, deliveries: Vec<Delivery>) {
        for Delivery { rank, ticket, answer } in deliveries {
            let member = &mut self.members[rank as usize];
            if member.state == MemberState::Here {
                member.connection.send(&Message::Answer { ticket, answer });
            }
        }
    }

    /// A rank is gone: all others get a message at once, and so does the rank itself, should it
    /// wake up.
    fn lose(&mut self, rank: usize, how: LostReason) {
        let epoch = self.queue.rendezvous().epoch;
        let member = &mut self.members[rank];
        member.state = MemberState::Lost;
        member.connection.send(&Message::Dead(Cause::Evicted { rank: rank as u32, epoch }));
        self.liveness.forget(rank);
        self.broadcast(&Message::Dead(Cause::Lost { rank: rank as u32, how }), None);
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
        match self.members[self.host].state {
            MemberState::Here => self.evicted,
            MemberState::Lost => true,
            MemberState::Left => alone || self.lingers_until.is_some_and(|until| now >= until),
        }
    }
}
