//! Events of NICs: what they report beside the completions of requests, and whom it concerns.
//!
//! ```text
//!   port down ------------> up again within the grace: NICs send again, and nothing is lost
//!                      '--> not, and the NIC says so when it is asked: Nic { by: this rank }
//!   table of addresses ---> traced once if the rank's own address has changed
//!   LID, keys, manager ---> traced by name: what the subnet manager changed
//!   queue pair lost ------> by its peer: Connection { rank: its peer, by: this rank }
//!                      '--> otherwise: Nic { by: this rank }
//!   NIC lost, overflow ---> all connections of the NIC: Nic { by: this rank }
//!   any other ------------> traced
//! ```
//!
//! A thread of its own reads them: the progress thread may be busy for long. It takes no lock of a
//! connection, because a rank that waits holds one until it sees that the world has failed. So a
//! connection keeps the error of an event beside its state.
//!
//! **Flaps.** A port that goes down for some seconds is no fault: its NIC and those of its peers
//! resend until retries end, which takes longer than the grace by default. So the rank whose port
//! it is ends the world first, and names itself. Its peers could only name a connection. The event
//! of a port that is up again may be missing. So the NIC is asked before a port counts as lost.

use std::net::Ipv6Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

use super::Context;
use super::connection::Connection;
use super::ffi::{
    IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL, IBV_EVENT_GID_CHANGE, IBV_EVENT_LID_CHANGE,
    IBV_EVENT_PKEY_CHANGE, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, IBV_EVENT_QP_ACCESS_ERR,
    IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_SM_CHANGE, ibv_async_element, ibv_async_event,
};
use super::library::check_status;
use super::nic::{Nic, Sysfs};
use crate::bootstrap::wait::{LONGEST, epoll_for, join};
use crate::bootstrap::{Health, Thread, turn};
use crate::error::{Cause, LaneError, VerbsError};
use crate::lane::net::system;

/// An event of a NIC.
#[derive(Clone, Debug, PartialEq)]
pub enum News {
    /// A port carries traffic no more.
    PortDown(u8),
    /// It does again.
    PortUp(u8),
    /// An entry of a port's table of addresses has changed.
    Addresses(u8),
    /// The subnet manager has changed something of a port: what, in words.
    Subnet(u8, &'static str),
    /// A queue pair is lost by what its peer sent: its number, and why.
    QueuePair(u32, &'static str),
    /// A queue pair is lost by a fault of the NIC: its number, and why.
    OwnQueuePair(u32, &'static str),
    /// All of the NIC is lost.
    Nic(VerbsError),
    /// Any other, by its number in libibverbs.
    Other(u32),
}

impl Context {
    /// The next event of the NIC, if there is one. Does not wait.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn news(&self) -> Result<Option<News>, VerbsError> {
        let mut event = ibv_async_event { element: ibv_async_element { port_num: 0 }, event_type: 0 };
        // SAFETY: the context is open; the structure is as the call expects it.
        let answer = unsafe { (self.functions().get_async_event)(self.raw(), &mut event) };
        if let Err(errno) = check_status(answer) {
            let nothing = [Errno::AGAIN, Errno::INTR].map(Errno::raw_os_error).contains(&errno);
            return if nothing { Ok(None) } else { Err(self.failed("ibv_get_async_event", errno)) };
        }
        let news = self.explain(&event);
        // SAFETY: the event just came; its object cannot be destroyed before this.
        unsafe { (self.functions().ack_async_event)(&mut event) };
        Ok(Some(news))
    }

    fn explain(&self, event: &ibv_async_event) -> News {
        let nic = || self.name().to_owned();
        // SAFETY: called for events of queue pairs, each of which lives until its event is
        // acknowledged.
        let number = || unsafe { (*event.element.qp).qp_num };
        // SAFETY: called for events of ports.
        let port = || unsafe { event.element.port_num } as u8;
        match event.event_type {
            IBV_EVENT_DEVICE_FATAL => News::Nic(VerbsError::NicLost { nic: nic() }),
            IBV_EVENT_CQ_ERR => News::Nic(VerbsError::QueueOverflow { nic: nic() }),
            IBV_EVENT_QP_FATAL => News::OwnQueuePair(number(), "the NIC reports a fatal error of it"),
            IBV_EVENT_QP_REQ_ERR => News::QueuePair(number(), "the peer sent an invalid request"),
            IBV_EVENT_QP_ACCESS_ERR => News::QueuePair(number(), "the peer aimed outside what is registered"),
            IBV_EVENT_PORT_ERR => News::PortDown(port()),
            IBV_EVENT_PORT_ACTIVE => News::PortUp(port()),
            IBV_EVENT_GID_CHANGE => News::Addresses(port()),
            IBV_EVENT_LID_CHANGE => News::Subnet(port(), "its LID has changed"),
            IBV_EVENT_PKEY_CHANGE => News::Subnet(port(), "its table of partition keys has changed"),
            IBV_EVENT_SM_CHANGE => News::Subnet(port(), "its subnet has another manager"),
            kind => News::Other(kind),
        }
    }
}

/// The thread that reads the events of a rank's NICs.
#[derive(Debug)]
pub struct EventThread {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    rank: u32,
    nics: Vec<WatchedNic>,
    /// How long a port may be down.
    grace: Duration,
    health: Arc<Health>,
    wake_fd: OwnedFd,
    /// The thread's own descriptor, and those of the NICs.
    poll_set: OwnedFd,
    /// The tables of addresses.
    sysfs: Sysfs,
    stop: AtomicBool,
}

/// A NIC, and the connections over it.
#[derive(Debug)]
struct WatchedNic {
    context: Arc<Context>,
    port: u8,
    /// The address, and its place in the port's table.
    gid: (u8, Ipv6Addr),
    connections: Mutex<Vec<Weak<Connection>>>,
}

impl EventThread {
    /// Starts it for the NICs of a rank and its first connection, as [`attach`](Self::attach) takes
    /// it.
    ///
    /// # Errors
    /// [`LaneError::System`].
    pub fn start<'a>(
        rank: u32,
        nics: impl Iterator<Item = &'a Nic>,
        sysfs: &Sysfs,
        grace: Duration,
        health: &Arc<Health>,
        first: (usize, &Arc<Connection>),
    ) -> Result<Self, LaneError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake_fd = rustix::event::eventfd(0, flags).map_err(system("eventfd"))?;
        let poll_set = epoll::create(CreateFlags::CLOEXEC).map_err(system("epoll_create"))?;
        let (nics, health, stop) =
            (nics.map(WatchedNic::new).collect(), Arc::clone(health), AtomicBool::new(false));
        let shared =
            Arc::new(Shared { rank, nics, grace, health, wake_fd, poll_set, sysfs: sysfs.clone(), stop });
        let contexts = shared.nics.iter().map(|nic| nic.context.as_fd());
        for fd in contexts.chain([shared.wake_fd.as_fd()]) {
            epoll::add(&shared.poll_set, fd, EventData::new_u64(0), EventFlags::IN)
                .map_err(system("epoll_ctl"))?;
        }
        // Before the thread reads what the NICs have told since they were opened.
        shared.attach(first);
        let reader = Arc::clone(&shared);
        let thread = Thread::new("nics", rank, &shared.health).spawn(move || reader.run());
        let thread =
            thread.map_err(|e| LaneError::System { call: "clone", errno: e.raw_os_error().unwrap_or(0) })?;
        Ok(EventThread { shared, thread: Some(thread) })
    }

    /// Blames a connection over a NIC, by its number, for what the NIC reports of its queue pair.
    pub fn attach(&self, to: (usize, &Arc<Connection>)) {
        self.shared.attach(to);
    }
}

impl Drop for EventThread {
    fn drop(&mut self) {
        // Before the wake-up, or the thread would sleep one more slice.
        self.shared.stop.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.shared.wake_fd, &1u64.to_ne_bytes());
        // This thread itself may be the last to drop a world, when it has found a fault.
        if let Some(thread) = self.thread.take().filter(|t| t.thread().id() != std::thread::current().id()) {
            join(thread);
        }
    }
}

impl WatchedNic {
    fn new(nic: &Nic) -> Self {
        let (context, path) = (Arc::clone(&nic.context), &nic.path);
        let (port, gid) = (path.port, (path.gid_index, path.gid));
        WatchedNic { context, port, gid, connections: Mutex::default() }
    }

    fn connections(&self) -> std::sync::MutexGuard<'_, Vec<Weak<Connection>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connections that are still there.
    fn living(&self) -> Vec<Arc<Connection>> {
        self.connections().iter().filter_map(Weak::upgrade).collect()
    }
}

/// State of a NIC, as its events tell it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    /// When the grace of its port ends; none while the port is up.
    outage: Option<Instant>,
    /// The address at its place of the port's table; none if that is empty.
    gid: Option<Ipv6Addr>,
}

impl Seen {
    fn new(nic: &WatchedNic) -> Self {
        Seen { outage: None, gid: Some(nic.gid.1) }
    }
}

impl Shared {
    fn attach(&self, (nic, connection): (usize, &Arc<Connection>)) {
        let mut connections = self.nics[nic].connections();
        connections.retain(|connection| connection.strong_count() > 0);
        connections.push(Arc::downgrade(connection));
    }

    fn run(&self) {
        let mut seen: Vec<Seen> = self.nics.iter().map(Seen::new).collect();
        // Acquire: what the owner did before it stopped this thread is visible in the last turn.
        while !self.stop.load(Ordering::Acquire) && self.health.check().is_ok() {
            turn();
            self.read(&mut seen);
            let now = Instant::now();
            self.expire(&mut seen, now);
            let next = seen.iter().filter_map(|nic| nic.outage).min();
            let mut events = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 8];
            let limit = next.map_or(LONGEST, |until| until.saturating_duration_since(now));
            epoll_for(&self.poll_set, &mut events, limit);
        }
    }

    /// Reads all events.
    fn read(&self, seen: &mut [Seen]) {
        for (nic, seen) in self.nics.iter().zip(seen) {
            loop {
                match nic.context.news() {
                    Ok(None) => break,
                    Ok(Some(news)) => self.take(nic, seen, news, Instant::now()),
                    Err(error) => return self.lose(nic, error),
                }
            }
        }
    }

    fn take(&self, nic: &WatchedNic, seen: &mut Seen, news: News, now: Instant) {
        let name = nic.context.name();
        match news {
            News::PortDown(port) if port == nic.port => {
                tracing::warn!(nic = name, port, grace = ?self.grace, "a port is down, perhaps for a moment");
                // A port that is reported again is no longer down for that.
                seen.outage.get_or_insert(now + self.grace);
            }
            News::PortUp(port) if port == nic.port => {
                tracing::info!(nic = name, port, "a port is up again");
                seen.outage = None;
            }
            News::Addresses(port) if port == nic.port => {
                // There is such an event for each entry of the table.
                let gid = self.sysfs.gid(name, port, nic.gid.0);
                if gid != seen.gid {
                    let (own, now) = (nic.gid.1, gid.unwrap_or(Ipv6Addr::UNSPECIFIED));
                    tracing::warn!(nic = name, port, %own, %now, "the address of a port has changed");
                    seen.gid = gid;
                }
            }
            News::Subnet(port, what) if port == nic.port => {
                tracing::warn!(nic = name, port, "a port: {what}");
            }
            News::QueuePair(number, event) => self.lose_queue_pair(nic, (number, event), true),
            News::OwnQueuePair(number, event) => self.lose_queue_pair(nic, (number, event), false),
            News::Nic(error) => self.lose(nic, error),
            other => tracing::warn!(nic = name, event = ?other, "event of a NIC"),
        }
    }

    /// Ends the world if the grace of a port is over, and the port is still down.
    fn expire(&self, seen: &mut [Seen], now: Instant) {
        let over = |(_, seen): &(&WatchedNic, &mut Seen)| seen.outage.is_some_and(|until| until <= now);
        for (nic, seen) in self.nics.iter().zip(seen).filter(over) {
            match nic.context.port(nic.port).and_then(|port| port.active(nic.context.name())) {
                Ok(_) => {
                    tracing::warn!(nic = nic.context.name(), "a port is up again, and no event told it");
                    seen.outage = None;
                }
                Err(error) => self.lose(nic, error),
            }
        }
    }

    /// A NIC fails, whichever peers are at the other ends.
    fn lose(&self, nic: &WatchedNic, error: VerbsError) {
        tracing::error!(rank = self.rank, %error, "a NIC failed");
        nic.living().iter().for_each(|connection| connection.report(error.clone()));
        self.health.fail(Cause::Nic { by: self.rank });
    }

    /// One queue pair fails, `by_peer` or by this rank's NIC. If its peer has left in peace,
    /// nothing did.
    fn lose_queue_pair(&self, nic: &WatchedNic, (queue_pair, event): (u32, &'static str), by_peer: bool) {
        let name = nic.context.name();
        let living = nic.living();
        let Some(connection) = living.iter().find(|known| known.queue_pair() == queue_pair) else {
            return tracing::warn!(nic = name, queue_pair, event, "event of a queue pair that is gone");
        };
        let (nic, peer) = (name.to_owned(), connection.peer_rank());
        if self.health.is_absent(peer) {
            return tracing::debug!(nic, queue_pair, event, "event of a queue pair whose peer has left");
        }
        let error = VerbsError::QueuePairLost { nic, queue_pair, peer, event };
        tracing::error!(rank = self.rank, %error, "a connection failed");
        connection.report(error);
        self.health.fail(match by_peer {
            true => Cause::Connection { rank: peer, by: self.rank },
            false => Cause::Nic { by: self.rank },
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::net::verbs::Settings;
    use crate::lane::net::verbs::fake::Fabric;
    use crate::lane::net::verbs::ffi::IBV_PORT_ACTIVE;

    const GRACE: Duration = Duration::from_secs(5);

    fn shared(fabric: &Arc<Fabric>) -> (Shared, [Seen; 1]) {
        let nics = vec![WatchedNic::new(&fabric.nic("a", &Settings::default()))];
        let wake_fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let poll_set = epoll::create(CreateFlags::CLOEXEC).unwrap();
        let (health, sysfs, stop) = (Arc::default(), fabric.sysfs().clone(), AtomicBool::new(false));
        let seen = [Seen::new(&nics[0])];
        (Shared { rank: 3, nics, grace: GRACE, health, wake_fd, poll_set, sysfs, stop }, seen)
    }

    #[test]
    fn a_port_that_comes_back_within_the_grace_is_no_fault() {
        let fabric = Fabric::new(&["a"]);
        let (shared, mut seen) = shared(&fabric);
        fabric.port_down("a");
        shared.read(&mut seen);
        let until = seen[0].outage.unwrap();
        shared.expire(&mut seen, until - Duration::from_nanos(1));
        fabric.port_up("a");
        shared.read(&mut seen);
        assert_eq!(seen[0].outage, None);
        shared.expire(&mut seen, until + GRACE);
        assert_eq!(shared.health.check(), Ok(()));
    }

    #[test]
    fn port_down_past_grace_blames_its_own_rank() {
        let fabric = Fabric::new(&["a"]);
        let (shared, mut seen) = shared(&fabric);
        let before = Instant::now();
        fabric.port_down("a");
        shared.read(&mut seen);
        let until = seen[0].outage.unwrap();
        assert!(until >= before + GRACE);
        // Reported once more, it does not get more time.
        fabric.port_down("a");
        shared.read(&mut seen);
        assert_eq!(seen[0].outage, Some(until));
        shared.expire(&mut seen, until);
        assert_eq!(shared.health.check(), Err(Cause::Nic { by: 3 }));
    }

    #[test]
    fn a_port_that_is_up_again_without_an_event_is_no_fault() {
        let fabric = Fabric::new(&["a"]);
        let (shared, mut seen) = shared(&fabric);
        fabric.port_down("a");
        shared.read(&mut seen);
        let until = seen[0].outage.unwrap();
        fabric.change("a", |nic| (nic.silent, nic.port) = (false, IBV_PORT_ACTIVE));
        shared.expire(&mut seen, until);
        assert_eq!((seen[0].outage, shared.health.check()), (None, Ok(())));
        // It may go down again.
        fabric.port_down("a");
        shared.read(&mut seen);
        let until = seen[0].outage.unwrap();
        shared.expire(&mut seen, until);
        assert_eq!(shared.health.check(), Err(Cause::Nic { by: 3 }));
    }

    #[test]
    fn change_of_own_address_is_noticed_and_of_others_ignored() {
        let fabric = Fabric::new(&["a"]);
        let (shared, mut seen) = shared(&fabric);
        let mut after = |index: u8, gid: &str| {
            fabric.address("a", index, gid, "eth0");
            fabric.tell("a", IBV_EVENT_GID_CHANGE, 1);
            shared.read(&mut seen);
            seen[0].gid.unwrap().to_string()
        };
        assert_eq!(after(2, "::ffff:10.0.0.9"), "::ffff:10.0.0.1");
        assert_eq!(after(1, "::ffff:10.0.0.7"), "::ffff:10.0.0.7");
        assert_eq!(shared.health.check(), Ok(()));
    }

    #[test]
    fn what_a_subnet_manager_changes_is_named() {
        let fabric = Fabric::new(&["a"]);
        let nic = fabric.nic("a", &Settings::default());
        for (kind, what) in [
            (IBV_EVENT_LID_CHANGE, "its LID has changed"),
            (IBV_EVENT_PKEY_CHANGE, "its table of partition keys has changed"),
            (IBV_EVENT_SM_CHANGE, "its subnet has another manager"),
        ] {
            fabric.tell("a", kind, 1);
            assert_eq!(nic.context.news(), Ok(Some(News::Subnet(1, what))));
        }
    }

    #[test]
    fn another_port_and_other_events_are_traced_alone() {
        let fabric = Fabric::new(&["a"]);
        let (shared, mut seen) = shared(&fabric);
        let (before, nic) = (seen.clone(), &shared.nics[0]);
        for news in [
            News::PortDown(2),
            News::Addresses(2),
            News::Subnet(1, "another"),
            News::Other(16),
            News::QueuePair(7, "gone"),
            News::OwnQueuePair(7, "gone"),
        ] {
            shared.take(nic, &mut seen[0], news, Instant::now());
        }
        assert_eq!((seen, shared.health.check()), (before, Ok(())));
    }
}
