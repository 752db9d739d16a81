//! A coordinator before its world begins: it gathers the ranks.
//!
//! ```text
//!   first    HandshakeQueue ──► JoinBarrier: all are here ──► Welcome
//!   again    HandshakeQueue ──► Survivor ──► Gathering: Offer, Accept ──► Begin
//! ```
//!
//! Should its thread die here, the ranks that have come hear of it, and those that come soon.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::bootstrap::health::{Liveness, Timeouts};
use crate::bootstrap::rendezvous::{AuthenticatedPeer, Gathering, HandshakeQueue, JoinBarrier, Search, Step};
use crate::bootstrap::threads::turn;
use crate::bootstrap::wait::poll_until;
use crate::bootstrap::wire::{JoinRefusal, ListenAddress, Message, MessageConnection, Roster};
use crate::error::{BootstrapError, Cause};

/// Longest sleep: ranks become absent without an event on a descriptor.
const SLICE: Duration = Duration::from_millis(50);
/// How long the ranks may take for the last message of a coordinator that dies.
const FINAL_SEND: Duration = Duration::from_millis(500);
/// How long a coordinator that has died tells ranks that come.
const LINGER: Duration = Duration::from_secs(2);

/// The ranks that are to meet.
pub enum Meeting {
    /// All ranks of a job.
    First(JoinBarrier),
    /// The survivors of a world.
    Again(Gathering, Arc<Search>),
}

/// Inputs of a coordinator.
pub struct HubConfig {
    pub queue: HandshakeQueue,
    pub meeting: Meeting,
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
    meeting: Meeting,
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
        let HubConfig { queue, meeting, timeouts, until, .. } = config;
        let now = Instant::now();
        let size = match &meeting {
            Meeting::First(_) => queue.rendezvous().size as usize,
            Meeting::Again(_, search) => search.ranks as usize,
        };
        let mut liveness = Liveness::new(size, timeouts.heartbeat, timeouts.liveness, now);
        (0..size).for_each(|rank| liveness.forget(rank));
        let here = BTreeMap::new();
        Assembly { queue, meeting, until, here, own_came: false, liveness, timeouts, beat: now }
    }

    /// Waits until the world begins. None if the rendezvous was given up.
    pub fn assemble(&mut self) -> Result<Option<Assembled>, BootstrapError> {
        loop {
            turn();
            let now = Instant::now();
            let begins = match self.meeting {
                Meeting::First(_) => self.first(now),
                Meeting::Again(..) => self.again(now),
            };
            let own = self.queue.rendezvous().host;
            self.own_came |= self.here.contains_key(&own);
            if begins.is_some() || self.is_given_up(own, now) {
                return Ok(begins);
            }
            let exhausted = self.queue.exhausted_for(self.timeouts.liveness, now);
            if let Some(error) = exhausted.filter(|_| matches!(self.meeting, Meeting::First(_))) {
                return Err(error);
            }
            self.here.values_mut().for_each(|peer| peer.connection.flush());
            self.await_event(now)?;
        }
    }

    fn is_given_up(&self, own: u32, now: Instant) -> bool {
        let over = matches!(&self.meeting, Meeting::Again(_, search) if search.is_over());
        over || (!self.here.contains_key(&own) && (self.own_came || now >= self.until))
    }

    /// Waits for an event.
    fn await_event(&self, now: Instant) -> Result<(), BootstrapError> {
        let closes = match &self.meeting {
            Meeting::First(_) => None,
            // After its end the window changes nothing.
            Meeting::Again(gathering, _) => gathering.closes().filter(|&closes| closes > now),
        };
        let next = [self.queue.next(), closes, self.liveness.next()];
        let next = next.into_iter().flatten().fold(now + SLICE, Instant::min);
        let connections = self.here.values().map(|peer| peer.connection.poll_fd());
        poll_until(&mut self.queue.poll_fds().chain(connections).collect::<Vec<_>>(), next)
    }

    /// A turn of the first rendezvous.
    fn first(&mut self, now: Instant) -> Option<Assembled> {
        let Assembly { queue, meeting: Meeting::First(barrier), here, .. } = self else { return None };
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
        let welcome = Message::Welcome { addresses: addresses.collect() }.encode();
        self.here.values_mut().for_each(|peer| peer.connection.send_frame(&welcome));
        let here = std::mem::take(&mut self.here).into_iter();
        let members = here.map(|(rank, peer)| (rank, peer.connection)).collect();
        Assembled { epoch: self.queue.rendezvous().epoch, members }
    }

    /// A turn of the rendezvous of survivors.
    fn again(&mut self, now: Instant) -> Option<Assembled> {
        let Assembly { queue, meeting: Meeting::Again(gathering, search), here, liveness, .. } = self else {
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
        let message = match &step {
            Step::Begin(roster) => return Some(self.begin(roster)),
            Step::Offer(roster) => {
                tracing::debug!(rank = own, epoch = roster.epoch, members = ?roster.members, "offers a world");
                Some((Message::Offer(roster.clone()).encode(), roster.members.clone()))
            }
            Step::Wait if now >= self.beat => {
                self.beat = now + self.timeouts.heartbeat;
                Some((Message::Heartbeat.encode(), gathering.here().collect()))
            }
            Step::Wait => None,
        };
        for (rank, frame) in
            message.iter().flat_map(|(frame, ranks)| ranks.iter().map(move |rank| (rank, frame)))
        {
            if let Some(peer) = here.get_mut(rank) {
                peer.connection.send_frame(frame);
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
        let until = Instant::now() + LINGER;
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
