//! Ranks that are threads of one process: the same store, under a mutex instead of a coordinator.
//!
//! A thread is alive while its hub exists: a dropped hub has left; a hub dropped by an unwinding
//! thread is lost. Deadlines, cancel and rebuild are as between processes, so that a test with
//! threads tests the same behavior.

use std::{
    collections::HashMap,
    net::Ipv4Addr,
    sync::{
        Arc, Condvar, Mutex, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    Hub,
    client::refused,
    store::{Delivery, Requester, Store},
};
use crate::{
    bootstrap::{
        interrupted,
        rendezvous::{JoinBarrier, PeerAuth},
        secret::Secret,
        wait,
        watch::{Health, Timeouts, lock},
        wire::{Answer, job_digest},
    },
    error::{BootstrapError, Cause, LostReason},
};

/// The hubs of a world whose `n` ranks are threads of this process, in order of rank.
pub fn threads(n: u32, timeouts: Timeouts) -> Vec<Box<dyn Hub>> {
    let world = World::new(n, 0, timeouts);
    (0..n).map(|rank| Box::new(ThreadHub { rank, world: world.clone() }) as Box<dyn Hub>).collect()
}

/// State that the hubs of one epoch share.
struct World {
    size: u32,
    epoch: u16,
    timeouts: Timeouts,
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
    barrier: JoinBarrier,
    /// The failure of the world, if one of the hubs reported it. Set before any rank hears of it,
    /// so that the next action of the first to hear (it may leave) cannot overtake the news.
    dead: Option<Cause>,
    /// The next epoch and its members, once the survivors have met.
    next: Option<(Arc<World>, Vec<u32>)>,
}

impl World {
    fn new(size: u32, epoch: u16, timeouts: Timeouts) -> Arc<Self> {
        let healths: Vec<_> = (0..size).map(|_| Arc::new(Health::new())).collect();
        let barrier = JoinBarrier::again(size, timeouts.liveness * 2);
        let inner =
            Inner { store: Store::new(size), answers: HashMap::new(), barrier, dead: None, next: None };
        let (tickets, inner, changed) = (AtomicU64::new(0), Mutex::new(inner), Condvar::new());
        let world = Arc::new(World {
            size,
            epoch,
            timeouts,
            secret: OnceLock::new(),
            healths,
            tickets,
            inner,
            changed,
        });
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

    fn note_absent(&self, rank: u32) {
        self.healths.iter().for_each(|health| health.note_absent(rank));
    }

    fn lose(&self, rank: u32) {
        self.note_absent(rank);
        self.fail(Cause::Lost { rank, how: LostReason::Closed });
    }
}

struct ThreadHub {
    rank: u32,
    world: Arc<World>,
}

impl ThreadHub {
    fn request(
        &self,
        step: &str,
        deadline: Duration,
        ask: impl FnOnce(&mut Store, Requester) -> Vec<Delivery>,
    ) -> Result<Answer, BootstrapError> {
        let world = &*self.world;
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

impl Hub for ThreadHub {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.world.size
    }

    fn epoch(&self) -> u16 {
        self.world.epoch
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
        let start = Instant::now();
        let ask =
            |store: &mut Store, caller| store.gather(caller, key.to_owned(), index, count, blob.to_vec());
        match self.request(key, deadline, ask)? {
            Answer::Gathered(blobs) => Ok(Arc::unwrap_or_clone(blobs)),
            other => Err(refused(self.health(), other, key, start.elapsed())),
        }
    }

    fn health(&self) -> &Arc<Health> {
        &self.world.healths[self.rank as usize]
    }

    fn cancel(&self, cause: Cause) {
        self.world.fail(cause);
    }

    fn rebuild(&self, deadline: Duration) -> Result<(Box<dyn Hub>, Vec<u32>), BootstrapError> {
        match self.health().check() {
            Err(cause @ (Cause::Evicted { .. } | Cause::LauncherGone { .. })) => return Err(cause.into()),
            Err(_) => {}
            Ok(()) => self.cancel(Cause::Cancelled { by: self.rank }),
        }
        let world = &*self.world;
        let epoch = world.epoch.wrapping_add(1);
        let start = Instant::now();
        let until = start + deadline;
        let mut inner = lock(&world.inner);
        inner.barrier.join(self.rank, start);
        world.changed.notify_all();
        loop {
            let now = Instant::now();
            let absent = self.health().absent();
            if inner.next.is_none()
                && let Some(members) = inner.barrier.members(&absent, now)
            {
                inner.next = Some((World::new(members.len() as u32, epoch, world.timeouts), members));
                world.changed.notify_all();
            }
            if let Some((next, members)) = &inner.next {
                let Some(rank) = members.iter().position(|&old| old == self.rank) else {
                    return Err(Cause::Evicted { rank: self.rank, epoch }.into());
                };
                let hub = ThreadHub { rank: rank as u32, world: next.clone() };
                return Ok((Box::new(hub), members.clone()));
            }
            if now >= until {
                inner.barrier.part(self.rank);
                let coordinator = (0..world.size).find(|rank| !absent.contains(rank)).unwrap_or(self.rank);
                return Err(BootstrapError::RebuildFailed { epoch, coordinator, waited: now - start });
            }
            let left = inner.barrier.closes().into_iter().fold(until, Instant::min) - now;
            drop(wait::on(&world.changed, inner, left));
            let asked = interrupted();
            inner = lock(&world.inner);
            if asked {
                inner.barrier.part(self.rank);
                return Err(BootstrapError::Interrupted { step: "rebuild".to_owned() });
            }
        }
    }

    fn pass(&self) -> Result<PeerAuth, BootstrapError> {
        let World { secret, epoch, size, .. } = &*self.world;
        let drawn = match secret.get() {
            Some(drawn) => drawn,
            None => {
                let drawn = Secret::random()?;
                secret.get_or_init(|| drawn)
            }
        };
        let addresses = vec![Ipv4Addr::LOCALHOST.into(); *size as usize];
        Ok(PeerAuth::new(drawn.clone(), job_digest("threads"), self.rank, *epoch, addresses))
    }

    fn abandon(self: Box<Self>) {
        self.world.lose(self.rank);
    }
}

impl Drop for ThreadHub {
    fn drop(&mut self) {
        let absent = self.health().is_absent(self.rank);
        if absent {
            return;
        }
        if thread::panicking() {
            return self.world.lose(self.rank);
        }
        self.world.note_absent(self.rank);
        let mut inner = lock(&self.world.inner);
        if inner.dead.is_none() {
            let deliveries = inner.store.leave(self.rank);
            self.world.deliver(&mut inner, deliveries);
        }
    }
}
