//! The receiving side: regions that partners may write to, and the thread that does it for them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags};

use super::Link;
use super::ring::Record;
use crate::bootstrap::Health;
use crate::error::{LaneError, MemoryError};
use crate::lane::FlagLine;
use crate::memory::Mapped;

/// Memory that partners may write to: one member of a mapping.
#[derive(Clone, Debug)]
pub struct Region {
    /// The mapping.
    pub mapped: Arc<Mapped>,
    /// Which member: this rank's own.
    pub member: u32,
}

/// All regions of a rank, by number. Region 0 is its heap.
#[derive(Debug, Default)]
pub struct Regions {
    table: RwLock<Vec<Option<Region>>>,
}

impl Regions {
    /// Registers a region; partners name it by the number returned.
    pub fn add(&self, region: Region) -> u32 {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        table.push(Some(region));
        table.len() as u32 - 1
    }

    /// From now on, what comes for this region is dropped: it was under way when its owner let go of it. Numbers are
    /// not used again.
    pub fn remove(&self, number: u32) {
        if let Some(slot) =
            self.table.write().unwrap_or_else(PoisonError::into_inner).get_mut(number as usize)
        {
            *slot = None;
        }
    }

    /// Does what a record asks.
    ///
    /// # Safety
    /// `payload` must be readable for the length of a `Put` record.
    pub(super) unsafe fn apply(&self, record: Record, payload: *const u8) -> Result<(), MemoryError> {
        // Held until the bytes are written: a region that is removed may be unmapped at once.
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let Some(number) = record.region() else { return Ok(()) };
        let Region { mapped, member } = match table.get(number as usize) {
            Some(Some(region)) => region,
            Some(None) => return Ok(()),
            None => return Err(MemoryError::OutOfBounds { peer: number, offset: 0, len: 0, size: 0 }),
        };
        match record {
            Record::Put { offset, len, .. } => {
                let to = mapped.at(*member, offset, len)?;
                // SAFETY: the target was checked against its region; the source by the caller.
                unsafe { std::ptr::copy_nonoverlapping(payload, to.as_ptr(), len as usize) };
            }
            Record::Zero { offset, len, .. } => {
                let to = mapped.at(*member, offset, len)?;
                // SAFETY: the target was checked against its region.
                unsafe { std::ptr::write_bytes(to.as_ptr(), 0, len as usize) };
            }
            Record::Signal { offset, value, tag, .. } => {
                let line = mapped.at(*member, offset, 64)?;
                if line.as_ptr().align_offset(64) != 0 {
                    return Err(MemoryError::Misaligned { address: line.as_ptr() as usize, align: 64 });
                }
                // SAFETY: an aligned line inside its region; the region table is locked, which keeps the mapping alive.
                unsafe { FlagLine::new(line) }.raise(value, tag.as_ref());
            }
            Record::Skip { .. } => {}
        }
        Ok(())
    }
}

/// The thread that receives for a rank while it does other things. A rank that waits receives by itself.
#[derive(Debug)]
pub struct Card {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    links: RwLock<Vec<Arc<Link>>>,
    regions: Arc<Regions>,
    health: Arc<Health>,
    bell: OwnedFd,
    stop: AtomicBool,
    idle_rounds: u32,
}

/// Rounds without news after which the card sleeps. Where ranks share cores, whoever waits receives by itself, and a card
/// that looks again and again only keeps others from running.
const IDLE_ROUNDS: u32 = 64;
const IDLE_ROUNDS_IN_A_CROWD: u32 = 1;

impl Card {
    /// Starts the thread. It sleeps until there are links and records; on a `crowded` machine, with fewer cores than
    /// ranks, sooner than on others.
    ///
    /// # Errors
    /// [`LaneError::System`].
    pub fn start(rank: u32, health: Arc<Health>, crowded: bool) -> Result<Self, LaneError> {
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| LaneError::System { call: "eventfd", errno: e.raw_os_error() })?;
        let shared = Arc::new(Shared {
            links: RwLock::default(),
            regions: Arc::default(),
            health,
            bell,
            stop: AtomicBool::new(false),
            idle_rounds: if crowded { IDLE_ROUNDS_IN_A_CROWD } else { IDLE_ROUNDS },
        });
        let receiver = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name(format!("sidelane-card-{rank}"))
            .spawn(move || receiver.run())
            .map_err(|e| LaneError::System { call: "clone", errno: e.raw_os_error().unwrap_or(0) })?;
        Ok(Card { shared, thread: Some(thread) })
    }

    /// What partners may write to.
    pub fn regions(&self) -> &Arc<Regions> {
        &self.shared.regions
    }

    /// The descriptor by which partners wake this card.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.shared.bell.as_fd()
    }

    /// Receives for one more link.
    pub fn attach(&self, link: Arc<Link>) {
        self.shared.links.write().unwrap_or_else(PoisonError::into_inner).push(link);
        self.shared.ring();
    }

    /// The link to a rank of the world, if there is one.
    pub fn link_to(&self, peer: u32) -> Option<Arc<Link>> {
        let links = self.shared.links.read().unwrap_or_else(PoisonError::into_inner);
        links.iter().find(|link| link.peer() == peer).cloned()
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.ring();
        // The card itself may be the last to let go of a world, when it has found a fault.
        if let Some(thread) = self.thread.take().filter(|t| t.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        let mut idle = 0;
        while !self.stop.load(Ordering::Acquire) && self.health.check().is_ok() {
            if self.drain() {
                idle = 0;
            } else if idle < self.idle_rounds {
                idle += 1;
                std::thread::yield_now();
            } else if !self.arm() {
                self.sleep();
                idle = 0;
            }
        }
    }

    /// Receives from every partner: none starves behind a busy one.
    fn drain(&self) -> bool {
        let mut news = false;
        for link in self.links().iter() {
            news |= link.drain(&self.health);
        }
        news
    }

    /// Asks all partners to ring. Returns whether there is news already.
    fn arm(&self) -> bool {
        let mut news = false;
        for link in self.links().iter() {
            news |= link.arm();
        }
        news
    }

    fn sleep(&self) {
        // Bounded, so that a world that dies without a record does not leave the thread behind.
        let slice = rustix::event::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        let _ = rustix::event::poll(&mut [PollFd::new(&self.bell, PollFlags::IN)], Some(&slice));
        let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
    }

    fn ring(&self) {
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    fn links(&self) -> std::sync::RwLockReadGuard<'_, Vec<Arc<Link>>> {
        self.links.read().unwrap_or_else(PoisonError::into_inner)
    }
}
