//! Polls the sockets of a rank: one system call for all of them.
//!
//! A rank that waits serves each of its connections again and again. Polling every socket would
//! cost a system call each time, so one call covers a whole round.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

use crate::error::LaneError;
use crate::lane::net::system;

/// The sockets of a rank.
#[derive(Debug)]
pub struct Poller {
    set: OwnedFd,
    /// How often they were looked at.
    looks: AtomicU64,
    rung: RwLock<Vec<Arc<AtomicBool>>>,
}

/// One of them.
#[derive(Debug)]
pub struct PolledSocket {
    number: u64,
    rung: Arc<AtomicBool>,
    /// The last poll that its owner knows of.
    seen: AtomicU64,
}

/// Sockets found ready in one poll; the system offers the others first the next time.
const AT_ONCE: usize = 16;

impl Poller {
    /// # Errors
    /// [`LaneError::System`].
    pub fn new() -> Result<Self, LaneError> {
        let set = epoll::create(CreateFlags::CLOEXEC).map_err(system("epoll_create"))?;
        Ok(Poller { set, looks: AtomicU64::new(0), rung: RwLock::default() })
    }

    /// Listens to one more socket, until it is closed or removed.
    ///
    /// # Errors
    /// [`LaneError::System`].
    pub fn add(&self, socket: impl AsFd) -> Result<PolledSocket, LaneError> {
        let mut all = self.rung.write().unwrap_or_else(PoisonError::into_inner);
        let bell = PolledSocket { number: all.len() as u64, rung: Arc::default(), seen: AtomicU64::new(0) };
        let data = EventData::new_u64(bell.number);
        epoll::add(&self.set, socket, data, EventFlags::IN).map_err(system("epoll_ctl"))?;
        all.push(Arc::clone(&bell.rung));
        Ok(bell)
    }

    /// Whether to ring when there is room to send, too.
    pub fn ring_for_room(&self, socket: impl AsFd, bell: &PolledSocket, room: bool) {
        let more = if room { EventFlags::OUT } else { EventFlags::empty() };
        // Fails only for a socket that was removed.
        let _ = epoll::modify(&self.set, socket, EventData::new_u64(bell.number), EventFlags::IN | more);
    }

    /// No longer listens to a socket.
    pub fn remove(&self, socket: impl AsFd) {
        let _ = epoll::delete(&self.set, socket);
    }

    /// Whether a socket has news. Polls all of them, if no thread has since its owner last asked.
    pub fn rang(&self, bell: &PolledSocket) -> bool {
        if bell.seen.load(Ordering::Relaxed) == self.looks.load(Ordering::Relaxed) {
            self.look();
        }
        bell.seen.store(self.looks.load(Ordering::Relaxed), Ordering::Relaxed);
        bell.rung.load(Ordering::Relaxed) && bell.rung.swap(false, Ordering::Acquire)
    }

    fn look(&self) {
        self.looks.fetch_add(1, Ordering::Relaxed);
        let mut events = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; AT_ONCE];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let ready = epoll::wait(&self.set, &mut events[..], Some(&now)).unwrap_or(0);
        if ready > 0 {
            let all = self.rung.read().unwrap_or_else(PoisonError::into_inner);
            for event in &events[..ready] {
                if let Some(rung) = all.get(event.data.u64() as usize) {
                    rung.store(true, Ordering::Release);
                }
            }
        }
    }
}

impl AsFd for Poller {
    /// Readable when one of the sockets has news.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}
