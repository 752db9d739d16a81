//! Progress thread: serves a rank's connections while the rank computes.
//!
//! ```text
//!   news --> progress all --> news? --yes--> again
//!                              | no, for some rounds
//!                              +--> take all events --> arm all connections --> sleep
//! ```
//!
//! Connections of one NIC share a descriptor. So the thread takes all events before it arms the
//! first connection. An event that comes later stays, and ends the sleep.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

use super::{Counters, NetConnection, Regions, system};
use crate::bootstrap::wait::{epoll_for, join};
use crate::bootstrap::{Health, Thread, turn};
use crate::error::{Cause, LaneError};
use crate::lane::flag;

/// The thread that receives for a rank, and sends what still waits for credit, while the rank does
/// other things. A waiting rank serves its connections by itself.
#[derive(Debug)]
pub struct ProgressThread {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The part of a progress thread that other threads use, too.
#[derive(Debug)]
pub(super) struct Shared {
    connections: RwLock<Connections>,
    regions: Arc<Regions>,
    health: Arc<Health>,
    wake_fd: OwnedFd,
    /// The thread's event descriptor, and those of connections that have their own.
    poll_set: OwnedFd,
    stop: AtomicBool,
    /// Threads that wait for what comes here share their cores with threads that compute.
    beside_compute: AtomicBool,
    idle_rounds: u32,
}

/// Connections that the thread serves.
#[derive(Debug, Default)]
struct Connections {
    all: Vec<Arc<dyn NetConnection>>,
    /// One of those that share a descriptor: it takes the events of all.
    waking: Vec<Arc<dyn NetConnection>>,
}

/// Rounds without news after which the thread sleeps. If ranks share cores, a waiting rank receives
/// by itself, and a polling thread only keeps others from running.
const IDLE_ROUNDS: u32 = 64;
const IDLE_ROUNDS_OVERSUBSCRIBED: u32 = 1;

/// The longest sleep: a world that dies without a record does not leave the thread behind.
const SLICE: Duration = Duration::from_millis(100);

/// How long peers may take for what this rank sent last, when it leaves.
const LINGER: Duration = Duration::from_millis(500);

impl ProgressThread {
    /// Starts the thread. It sleeps until there are connections and events; on an `oversubscribed`
    /// machine, with fewer cores than ranks and their progress threads, sooner than on others.
    ///
    /// # Errors
    /// [`LaneError::System`].
    pub fn start(rank: u32, health: Arc<Health>, oversubscribed: bool) -> Result<Self, LaneError> {
        let shared = Arc::new(Shared::new(health, oversubscribed)?);
        let (receiver, thread) = (Arc::clone(&shared), Thread::new("net", rank, &shared.health));
        let life = thread.clone();
        let thread = thread.spawn(move || {
            // NICs of a failed world must not read memory that others get.
            if let Err(cause) = life.attempt(|| receiver.run()) {
                receiver.end(&cause);
            }
        });
        let thread =
            thread.map_err(|e| LaneError::System { call: "clone", errno: e.raw_os_error().unwrap_or(0) })?;
        Ok(ProgressThread { shared, thread: Some(thread) })
    }

    /// Memory that peers may write to.
    pub fn regions(&self) -> &Arc<Regions> {
        &self.shared.regions
    }

    /// A descriptor by which others wake this thread.
    ///
    /// # Errors
    /// [`LaneError::System`].
    pub fn event_fd(&self) -> Result<OwnedFd, LaneError> {
        rustix::io::fcntl_dupfd_cloexec(&self.shared.wake_fd, 0).map_err(system("fcntl(F_DUPFD_CLOEXEC)"))
    }

    /// Serves one more connection.
    ///
    /// # Errors
    /// [`LaneError::System`].
    pub fn attach(&self, connection: Arc<dyn NetConnection>) -> Result<(), LaneError> {
        self.shared.attach(connection)
    }

    /// The connection to a rank of the world, if there is one.
    pub fn connection_to(&self, peer: u32) -> Option<Arc<dyn NetConnection>> {
        self.shared.connections().all.iter().find(|connection| connection.peer() == peer).cloned()
    }

    /// Receives from all connections. A thread next to compute sleeps without events until the NIC
    /// signals one: from now on the NIC interrupts.
    pub fn progress(&self) {
        if flag::is_beside_compute() {
            // A wish about time alone: the progress thread may see it a round later.
            self.shared.beside_compute.store(true, Ordering::Relaxed);
        }
        self.shared.progress();
    }

    /// The end of all connections of a failed world.
    pub fn stop(&self, cause: &Cause) {
        self.shared.end(cause);
    }

    /// Counts of all connections so far.
    pub fn counters(&self) -> Counters {
        self.shared.connections().all.iter().map(|connection| connection.counters()).sum()
    }

    /// The predicted counts.
    pub fn forecast(&self) -> Counters {
        self.shared.connections().all.iter().map(|connection| connection.forecast()).sum()
    }
}

impl Drop for ProgressThread {
    fn drop(&mut self) {
        // Before the wake-up, or the thread would sleep one more slice.
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        // This thread itself may be the last to drop a world, when it has found a fault.
        if let Some(thread) = self.thread.take().filter(|t| t.thread().id() != std::thread::current().id()) {
            join(thread);
        }
        if self.shared.health.check().is_ok() && !std::thread::panicking() {
            let until = Instant::now() + LINGER;
            self.shared.connections().all.iter().for_each(|connection| connection.leave(until));
        }
    }
}

impl Shared {
    /// Serves nothing yet.
    ///
    /// # Errors
    /// [`LaneError::System`].
    pub(super) fn new(health: Arc<Health>, oversubscribed: bool) -> Result<Self, LaneError> {
        let wake_fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(system("eventfd"))?;
        let poll_set = epoll::create(CreateFlags::CLOEXEC).map_err(system("epoll_create"))?;
        epoll::add(&poll_set, &wake_fd, EventData::new_u64(0), EventFlags::IN)
            .map_err(system("epoll_ctl"))?;
        Ok(Shared {
            connections: RwLock::default(),
            regions: Arc::default(),
            health,
            wake_fd,
            poll_set,
            stop: AtomicBool::new(false),
            beside_compute: AtomicBool::new(false),
            idle_rounds: if oversubscribed { IDLE_ROUNDS_OVERSUBSCRIBED } else { IDLE_ROUNDS },
        })
    }

    /// As [`ProgressThread::attach`].
    ///
    /// # Errors
    /// [`LaneError::System`].
    pub(super) fn attach(&self, connection: Arc<dyn NetConnection>) -> Result<(), LaneError> {
        let mut is_new = false;
        for event_fd in connection.event_fds() {
            match epoll::add(&self.poll_set, event_fd, EventData::new_u64(1), EventFlags::IN) {
                Ok(()) => is_new = true,
                // Another connection has it, too.
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(system("epoll_ctl")(errno)),
            }
        }
        let mut connections = self.connections.write().unwrap_or_else(PoisonError::into_inner);
        connections.waking.extend(is_new.then(|| Arc::clone(&connection)));
        connections.all.push(connection);
        drop(connections);
        self.wake();
        Ok(())
    }

    fn run(&self) {
        let (mut idle, mut alone) = (0, true);
        // Acquire: what the owner did before it stopped this thread is visible in the last turn.
        while !self.stop.load(Ordering::Acquire) && self.health.check().is_ok() {
            turn();
            if alone && self.beside_compute.load(Ordering::Relaxed) {
                flag::request_short_timeslice();
                alone = false;
            }
            if self.progress() {
                idle = 0;
            } else if idle < self.idle_rounds {
                idle += 1;
                std::thread::yield_now();
            } else if !self.arm() {
                self.sleep(SLICE);
                idle = 0;
            }
        }
        if let Err(cause) = self.health.check() {
            self.end(&cause);
        }
    }

    fn end(&self, cause: &Cause) {
        self.connections().all.iter().for_each(|connection| connection.stop(cause));
    }

    /// Serves every connection: none starves behind a busy one.
    fn progress(&self) -> bool {
        let mut news = false;
        for connection in &self.connections().all {
            news |= connection.progress(&self.health);
        }
        news
    }

    /// Requests a wake-up from all connections. Returns whether there is news already.
    pub(super) fn arm(&self) -> bool {
        let connections = self.connections();
        connections.waking.iter().for_each(|connection| connection.take_events(&self.health));
        let mut news = false;
        for connection in &connections.all {
            news |= connection.arm(&self.health);
        }
        news
    }

    /// Sleeps until there is an event, for `limit` at most. Returns whether there is one.
    pub(super) fn sleep(&self, limit: Duration) -> bool {
        let mut events = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 8];
        let woken = epoll_for(&self.poll_set, &mut events, limit) > 0;
        let _ = rustix::io::read(&self.wake_fd, &mut [0u8; 8]);
        woken
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.wake_fd, &1u64.to_ne_bytes());
    }

    fn connections(&self) -> RwLockReadGuard<'_, Connections> {
        self.connections.read().unwrap_or_else(PoisonError::into_inner)
    }
}
