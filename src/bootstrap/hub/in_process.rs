//! Ranks that are threads of one process: the same store, under a mutex instead of a coordinator.
//!
//! A thread is alive while it has a hub: a dropped hub has left; a hub dropped by an unwinding
//! thread is lost. Deadlines, cancel and rebuild are as between processes, so that a test with
//! threads tests the same behavior.

use std::collections::{BTreeSet, HashMap};
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use super::Hub;
use super::client::refused;
use super::kv_store::{Contribution, Delivery, Requester, Store};
use crate::bootstrap::health::{Health, Timeouts, lock};
use crate::bootstrap::interrupted;
use crate::bootstrap::rendezvous::{Gathering, Growth, PeerAuth, Step, window};
use crate::bootstrap::secret::Secret;
use crate::bootstrap::wait;
use crate::bootstrap::wire::{Answer, Roster, Setting, Survivor, job_digest};
use crate::error::{BootstrapError, Cause, LostReason};

/// The hubs of a world whose `n` ranks are threads of this process, in order of rank.
pub fn threads(n: u32, timeouts: Timeouts) -> Vec<Box<dyn Hub>> {
    let roster = Roster { epoch: 0, members: (0..n).collect() };
    let world = ThreadWorld::new(roster, timeouts, (0..n).map(|_| AtomicU32::new(0)).collect());
    (0..n).map(|rank| Box::new(ThreadHub::new(&world, rank)) as Box<dyn Hub>).collect()
}

/// State that the hubs of one epoch share.
struct ThreadWorld {
    roster: Roster,
    timeouts: Timeouts,
    /// Hubs of each rank of the first world, in all epochs.
    hubs: Arc<[AtomicU32]>,
    /// Drawn when it is first asked for: threads need none among themselves.
    secret: OnceLock<Secret>,
    healths: Vec<Arc<Health>>,
    tickets: AtomicU64,
    inner: Mutex<Inner>,
    changed: Condvar,
}

struct Inner {
    store: Store,
    answers: HashMap<u64, Answer>,
    gathering: Gathering,
    /// The failure of the world, if one of the hubs reported it. Set before any rank hears of it,
    /// so that the next action of the first to hear (it may leave) cannot overtake the news.
    dead: Option<Cause>,
    /// The next epoch, once the survivors have met.
    next: Option<Arc<ThreadWorld>>,
    /// Ranks of the first world that have a hub of the next epoch, or had one.
    entered: BTreeSet<u32>,
}

impl ThreadWorld {
    fn new(roster: Roster, timeouts: Timeouts, hubs: Arc<[AtomicU32]>) -> Arc<Self> {
        let size = roster.members.len() as u32;
        let healths: Vec<_> = (0..size).map(|_| Arc::new(Health::new())).collect();
        let inner = Inner {
            store: Store::new(size),
            answers: HashMap::new(),
            gathering: Gathering::new(None, window(&timeouts)),
            dead: None,
            next: None,
            entered: BTreeSet::new(),
        };
        let (tickets, inner, changed) = (AtomicU64::new(0), Mutex::new(inner), Condvar::new());
        let secret = OnceLock::new();
        let world =
            Arc::new(ThreadWorld { roster, timeouts, hubs, secret, healths, tickets, inner, changed });
        for health in &world.healths {
            let sleeper = Arc::downgrade(&world);
            health.on_failure(move |_| {
                if let Some(world) = sleeper.upgrade() {
                    // With the lock taken, no thread is between its check and its sleep.
                    drop(lock(&world.inner));
                    world.changed.notify_all();
                }
            });
        }
        world
    }

    fn deliver(&self, inner: &mut Inner, deliveries: Vec<Delivery>) {
        inner.answers.extend(deliveries.into_iter().map(|delivery| (delivery.ticket, delivery.answer)));
        self.changed.notify_all();
    }

    /// Ends the world for all ranks, with the same cause.
    fn fail(&self, cause: Cause) {
        let cause = lock(&self.inner).dead.get_or_insert(cause).clone();
        for health in &self.healths {
            health.fail(cause.clone());
        }
    }

    fn lose(&self, rank: u32) {
        self.healths.iter().for_each(|health| health.note_absent(rank));
        self.fail(Cause::Lost { rank, how: LostReason::Closed });
    }
}

struct ThreadHub {
    rank: u32,
    world: Arc<ThreadWorld>,
}

impl ThreadHub {
    fn new(world: &Arc<ThreadWorld>, rank: u32) -> Self {
        let hub = ThreadHub { rank, world: Arc::clone(world) };
        // Relaxed: a count. The drop that makes it 0 takes the world's lock before it wakes.
        world.hubs[hub.first() as usize].fetch_add(1, Ordering::Relaxed);
        hub
    }

    /// This rank in the first world.
    fn first(&self) -> u32 {
        self.world.roster.members[self.rank as usize]
    }

    /// The newest world that this rank has entered: it comes back from those in between, which have
    /// failed for it.
    fn newest(&self) -> Arc<ThreadWorld> {
        let (first, mut world) = (self.first(), Arc::clone(&self.world));
        loop {
            let inner = lock(&world.inner);
            let next = inner.next.clone().filter(|_| inner.entered.contains(&first));
            drop(inner);
            match next {
                Some(next) => world = next,
                None => return world,
            }
        }
    }

    /// Enters the world that follows, or hears that it has gone on without this rank.
    fn enter(&self, next: &Arc<ThreadWorld>) -> Result<(Box<dyn Hub>, Vec<u32>), BootstrapError> {
        let Roster { epoch, members } = &next.roster;
        let Ok(rank) = members.binary_search(&self.first()) else {
            return Err(Cause::Evicted { rank: self.rank, epoch: *epoch }.into());
        };
        let before = &self.world.roster.members;
        let previous = members.iter().filter_map(|first| before.binary_search(first).ok());
        let previous = previous.map(|place| place as u32).collect();
        Ok((Box::new(ThreadHub::new(next, rank as u32)), previous))
    }

    fn request(
        &self,
        step: &str,
        deadline: Duration,
        ask: impl FnOnce(&mut Store, Requester) -> Vec<Delivery>,
    ) -> Result<Answer, BootstrapError> {
        let world = &*self.world;
        // Relaxed: tickets only differ.
        let caller = Requester { rank: self.rank, ticket: world.tickets.fetch_add(1, Ordering::Relaxed) };
        let until = Instant::now() + deadline;
        let mut inner = lock(&world.inner);
        self.health().check()?;
        let deliveries = ask(&mut inner.store, caller);
        world.deliver(&mut inner, deliveries);
        loop {
            if let Some(answer) = inner.answers.remove(&caller.ticket) {
                return Ok(answer);
            }
            self.health().check()?;
            if let Some(cause) = &inner.dead {
                return Err(cause.clone().into());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let deliveries = inner.store.withdraw(caller);
                world.deliver(&mut inner, deliveries);
                continue;
            }
            drop(wait::on(&world.changed, inner, left));
            // Asked without the lock: the answer may take a while.
            let asked = interrupted();
            inner = lock(&world.inner);
            if asked {
                let deliveries = inner.store.withdraw(caller);
                world.deliver(&mut inner, deliveries);
                inner.answers.remove(&caller.ticket);
                return Err(BootstrapError::Interrupted { step: step.to_owned() });
            }
        }
    }
}

impl ThreadHub {
    /// Takes part in a step.
    fn contribute(
        &self,
        key: &str,
        index: u32,
        count: u32,
        contribution: Contribution,
        deadline: Duration,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let start = Instant::now();
        let ask =
            |store: &mut Store, caller| store.gather(caller, key.to_owned(), index, count, contribution);
        match self.request(key, deadline, ask)? {
            Answer::Gathered(blobs) => Ok(Arc::unwrap_or_clone(blobs)),
            Answer::Exchanged(column) => Ok(column.to_vec()),
            other => Err(refused(self.health(), other, key, start.elapsed())),
        }
    }
}

impl Hub for ThreadHub {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.world.roster.members.len() as u32
    }

    fn epoch(&self) -> u16 {
        self.world.roster.epoch
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<(), BootstrapError> {
        let (start, deadline) = (Instant::now(), self.world.timeouts.deadline);
        match self
            .request(key, deadline, |store, caller| store.set(caller, key.to_owned(), value.to_vec()))?
        {
            Answer::Done => Ok(()),
            other => Err(refused(self.health(), other, key, start.elapsed())),
        }
    }

    fn get(&self, key: &str, deadline: Duration) -> Result<Vec<u8>, BootstrapError> {
        let start = Instant::now();
        match self.request(key, deadline, |store, caller| store.get(caller, key.to_owned()))? {
            Answer::Value(value) => Ok(Arc::unwrap_or_clone(value)),
            other => Err(refused(self.health(), other, key, start.elapsed())),
        }
    }

    fn gather(
        &self,
        key: &str,
        index: u32,
        count: u32,
        blob: &[u8],
        deadline: Duration,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        self.contribute(key, index, count, Contribution::ForAll(blob.to_vec()), deadline)
    }

    fn exchange(
        &self,
        key: &str,
        index: u32,
        blobs: Vec<Vec<u8>>,
        deadline: Duration,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let (count, blobs) = (blobs.len() as u32, blobs.into_iter().collect());
        self.contribute(key, index, count, Contribution::ForEach(blobs), deadline)
    }

    fn health(&self) -> &Arc<Health> {
        &self.world.healths[self.rank as usize]
    }

    fn cancel(&self, cause: Cause) {
        self.world.fail(cause);
    }

    fn rebuild(&self, deadline: Duration, at_least: u32) -> Result<(Box<dyn Hub>, Vec<u32>), BootstrapError> {
        match self.health().check() {
            Err(cause @ (Cause::Evicted { .. } | Cause::LauncherGone { .. })) => return Err(cause.into()),
            Err(_) => {}
            Ok(()) => self.cancel(Cause::Cancelled { by: self.rank }),
        }
        let (first, world, at_least) = (self.first(), self.newest(), at_least.max(1));
        let start = Instant::now();
        let until = start + deadline;
        let mut inner = lock(&world.inner);
        let survivor = Survivor { roster: world.roster.clone(), at_least, cut_off: Vec::new() };
        inner.gathering.join(first, survivor, start);
        world.changed.notify_all();
        loop {
            let now = Instant::now();
            // Relaxed: a count that falls to 0 behind this look takes the lock, and wakes this
            // thread.
            let hubs = world.hubs.iter().map(|hubs| hubs.load(Ordering::Relaxed));
            let gone = hubs.zip(0..).filter_map(|(hubs, rank)| (hubs == 0).then_some(rank)).collect();
            if inner.next.is_none()
                && let Step::Offer(roster) = inner.gathering.step(&gone, now)
            {
                // Under the lock all agree at once.
                inner.next = Some(ThreadWorld::new(roster, world.timeouts, Arc::clone(&world.hubs)));
                world.changed.notify_all();
            }
            if let Some(next) = inner.next.clone() {
                inner.entered.insert(first);
                drop(inner);
                return self.enter(&next);
            }
            if now >= until {
                inner.gathering.part(first, now);
                let (epoch, waited) = (world.roster.epoch, now - start);
                return Err(BootstrapError::RebuildFailed { epoch, at_least, waited });
            }
            let closes = inner.gathering.closes().filter(|&closes| closes > now);
            let left = closes.into_iter().fold(until, Instant::min) - now;
            drop(wait::on(&world.changed, inner, left));
            let asked = interrupted();
            inner = lock(&world.inner);
            if asked {
                inner.gathering.part(first, now);
                return Err(BootstrapError::Interrupted { step: "rebuild".to_owned() });
            }
        }
    }

    fn grow(&self, _: Duration, _: &[Setting]) -> Result<Growth<'_>, BootstrapError> {
        // No process joins the threads of another.
        Err(BootstrapError::NoSpare { waited: Duration::ZERO })
    }

    fn pass(&self) -> Result<PeerAuth, BootstrapError> {
        let ThreadWorld { secret, roster: Roster { epoch, members }, .. } = &*self.world;
        let drawn = match secret.get() {
            Some(drawn) => drawn,
            None => {
                let drawn = Secret::random()?;
                secret.get_or_init(|| drawn)
            }
        };
        let addresses = vec![Ipv4Addr::LOCALHOST.into(); members.len()];
        Ok(PeerAuth::new(drawn.clone(), job_digest("threads"), self.rank, *epoch, addresses))
    }

    fn abandon(self: Box<Self>) {
        self.world.lose(self.rank);
    }
}

impl Drop for ThreadHub {
    fn drop(&mut self) {
        // Relaxed: a look that misses it is woken below.
        self.world.hubs[self.first() as usize].fetch_sub(1, Ordering::Relaxed);
        // With the lock taken, no thread is between its check and its sleep.
        drop(lock(&self.world.inner));
        self.world.changed.notify_all();
        let absent = self.health().is_absent(self.rank);
        if absent {
            return;
        }
        if thread::panicking() {
            return self.world.lose(self.rank);
        }
        self.world.healths.iter().for_each(|health| health.note_absent(self.rank));
        let mut inner = lock(&self.world.inner);
        if inner.dead.is_none() {
            let deliveries = inner.store.leave(self.rank);
            self.world.deliver(&mut inner, deliveries);
        }
    }
}
