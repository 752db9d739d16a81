//! Registered memory of a NIC's connections: staging, which they share, and a block for each.
//!
//! *Staging* takes bytes that are not registered at their source, and the contents of signals. It
//! is a pool of equal slots. A connection takes a slot when it has bytes to copy, and gives it back
//! once the NIC has read them. So an idle connection holds none, and the pool is as large for
//! thousands of peers as for a few.
//!
//! ```text
//!   pool         | slot | slot | slot | slot | ...     free: a bit each
//!                    ^      ^             ^
//!   connections      a      a             b            filled from the front, given back from the front
//!
//!   slot         | chunk to be filled | chunk to be filled |
//!                                     ^ a write begins here at the latest: all its bytes fit
//! ```
//!
//! **No deadlock.** A write takes a slot before its first byte, and never a second one. So a
//! connection that waits for a slot holds only bytes of writes that are complete, and these are
//! posted. Others may hold bytes of writes that are still gathered. While a connection waits, the
//! pool is [short](Slots::is_short), and the progress thread posts what they hold back.
//!
//! **No starvation.** Connections take slots in the order in which they asked ([`Slots`]). One
//! holds a quarter of the pool at most, where there are so many peers.
//!
//! A *block* is what a peer's NIC writes to, and what this NIC reads or writes without a copy. The
//! blocks of many peers are one registration. None is used twice, because a late write of a former
//! peer could land in it.
//!
//! ```text
//!   block   | granted: written by the peer | the peer's grant | old value of an addition | receives of 64 bytes |
//! ```

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Access, MemoryRegion, ProtectionDomain, Remote, Sge};
use crate::error::{Error, VerbsError};
use crate::lane::FlagLine;
use crate::memory::{PeerMapping, Segment};
use crate::sync::slots::{Slots, Ticket};

/// Alignment of staged data.
pub const ALIGN: u64 = 64;
/// Bytes of a receive: a record's header.
const RECEIVE_BYTES: u64 = 64;
const GRANTED: u64 = 0;
const GRANT: u64 = 64;
const OLD: u64 = 128;
const RECEIVES: u64 = 192;
/// Blocks of one registration.
const SLAB: u64 = 64;

/// Memory of this process that is registered with a NIC.
#[derive(Debug)]
struct Pinned {
    region: MemoryRegion,
    at: NonNull<u8>,
    _mapped: Arc<PeerMapping>,
}

// SAFETY: the pointer leads into a mapping that is kept with it; it belongs to no thread.
unsafe impl Send for Pinned {}
// SAFETY: as above. Each part of the memory has one user, who says how it is reached.
unsafe impl Sync for Pinned {}

impl Pinned {
    fn new(domain: &Arc<ProtectionDomain>, name: &str, len: u64, access: Access) -> Result<Self, Error> {
        let segment = Segment::create(name, len)?;
        let mapped = Arc::new(PeerMapping::new(&[Some(&segment)])?);
        let at = mapped.at(0, 0, len)?;
        // SAFETY: `_mapped` is dropped after the region. Peers write words only, as atomics. The
        // NIC writes old values, which are never read, and receives, which are read after their
        // completions only.
        let region = unsafe { MemoryRegion::register(domain, at, len as usize, access) }?;
        Ok(Pinned { region, at, _mapped: mapped })
    }
}

/// The slots of a NIC.
#[derive(Debug)]
pub struct StagingPool {
    memory: Pinned,
    chunk: u64,
    slots: Slots,
    /// Slots that one connection may hold.
    most: usize,
    /// Wakes the progress thread.
    wake_fd: Arc<OwnedFd>,
}

/// The size of a pool.
#[derive(Clone, Copy, Debug)]
pub struct PoolSize {
    /// Bytes of one write.
    pub chunk: u64,
    /// Bytes that one connection may have in flight.
    pub window: u64,
    /// Bytes at most, for all connections.
    pub most: u64,
    /// Connections that there may be.
    pub connections: u64,
}

impl PoolSize {
    /// Bytes of a slot.
    fn slot(&self) -> u64 {
        2 * self.chunk.next_multiple_of(ALIGN)
    }

    /// Number of slots, and how many of them one connection may hold.
    fn slots(&self) -> (u64, u64) {
        let window = self.window.div_ceil(self.slot()).max(1);
        let wanted = window.saturating_mul(self.connections.max(1));
        let slots = wanted.min((self.most / self.slot()).max(1));
        (slots, window.min((slots / self.connections.clamp(1, 4)).max(1)))
    }
}

impl StagingPool {
    /// Registers a pool with a NIC.
    ///
    /// # Errors
    /// [`MemoryError`](crate::error::MemoryError), [`VerbsError::Register`].
    pub fn new(
        domain: &Arc<ProtectionDomain>,
        size: PoolSize,
        wake_fd: &Arc<OwnedFd>,
    ) -> Result<Self, Error> {
        let (slots, most) = size.slots();
        let memory = Pinned::new(domain, "sidelane-staging", slots * size.slot(), Access::empty())?;
        Ok(StagingPool {
            memory,
            chunk: size.chunk.next_multiple_of(ALIGN),
            slots: Slots::new(slots),
            most: most as usize,
            wake_fd: Arc::clone(wake_fd),
        })
    }

    fn slot_bytes(&self) -> u64 {
        2 * self.chunk
    }
}

/// Bytes of a slot, to be filled before they are sent.
pub struct Staged {
    /// Where they go.
    pub at: *mut u8,
    /// The piece that is to be sent.
    pub piece: Sge,
    /// Position for [`Staging::read_until`] when they have been read.
    pub until: u64,
}

/// The slots of one connection.
#[derive(Debug)]
pub struct Staging {
    pool: Arc<StagingPool>,
    /// Oldest first, each with the position behind its last bytes.
    held: VecDeque<(u64, u64)>,
    /// Bytes of the newest slot that are taken.
    taken: u64,
    /// Bytes ever staged, and ever read.
    head: u64,
    tail: u64,
    ticket: Ticket,
}

impl Staging {
    /// Of a connection that has staged nothing.
    pub fn new(pool: Arc<StagingPool>) -> Self {
        let held = VecDeque::with_capacity(pool.most);
        Staging { pool, held, taken: 0, head: 0, tail: 0, ticket: Ticket::default() }
    }

    /// Room for `len` bytes that lie together. If they begin a write, there is room behind them for
    /// all that it may stage. `None` if there is none yet.
    ///
    /// # Errors
    /// [`VerbsError::OutOfRegion`] if there can never be.
    pub fn stage(&mut self, len: u32, begins: bool) -> Result<Option<Staged>, VerbsError> {
        let (bytes, slot_bytes) = (u64::from(len).next_multiple_of(ALIGN), self.pool.slot_bytes());
        let least = if begins { bytes.max(self.pool.chunk) } else { bytes };
        if self.held.is_empty() || self.taken + least > slot_bytes {
            if least > slot_bytes {
                return Err(VerbsError::OutOfRegion { offset: 0, len: len.into(), size: slot_bytes });
            }
            if self.held.len() == self.pool.most {
                return Ok(None);
            }
            let Some(slot) = self.pool.slots.take(&mut self.ticket) else { return Ok(None) };
            self.held.push_back((slot, self.head));
            self.taken = 0;
        }
        let Some((slot, until)) = self.held.back_mut() else { return Ok(None) };
        let offset = *slot * slot_bytes + self.taken;
        let piece = self.pool.memory.region.sge(offset, len)?;
        self.taken += bytes;
        self.head += bytes;
        *until = self.head;
        // SAFETY: the piece is inside the pool.
        let at = unsafe { self.pool.memory.at.as_ptr().add(offset as usize) };
        Ok(Some(Staged { at, piece, until: self.head }))
    }

    /// Bytes up to here have been read by the NIC.
    pub fn read_until(&mut self, until: u64) {
        self.tail = until;
        while let Some(&(slot, _)) = self.held.front().filter(|(_, end)| *end <= self.tail) {
            self.held.pop_front();
            self.pool.slots.give_back(slot);
        }
    }

    /// Whether it holds slots, and other connections wait for some.
    pub fn is_wanted(&self) -> bool {
        !self.held.is_empty() && self.pool.slots.is_short()
    }

    /// If this connection waits for a slot, the progress thread is to free some of others: it posts
    /// what they hold back, and takes their completions.
    pub fn ask_for_slots(&self) {
        if self.ticket.waits() {
            let _ = rustix::io::write(&*self.pool.wake_fd, &1u64.to_ne_bytes());
        }
    }

    /// This connection waits for a slot no more.
    pub fn ask_no_more(&mut self) {
        self.pool.slots.give_up(&mut self.ticket);
    }

    /// Gives all back. The NIC must have stopped reading them.
    pub fn clear(&mut self) {
        self.read_until(self.head);
        self.ask_no_more();
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.clear();
    }
}

/// The blocks of a NIC's connections.
#[derive(Debug)]
pub struct Blocks {
    domain: Arc<ProtectionDomain>,
    receives: u64,
    /// Blocks of one registration.
    slab: u64,
    /// The newest registration, and how many of its blocks are used.
    newest: Mutex<Option<(Arc<Pinned>, u64)>>,
}

impl Blocks {
    /// Blocks with so many receives, for at most so many connections.
    pub fn new(domain: &Arc<ProtectionDomain>, receives: u64, connections: u64) -> Self {
        let slab = connections.clamp(1, SLAB);
        Blocks { domain: Arc::clone(domain), receives, slab, newest: Mutex::default() }
    }

    /// A block that no connection has had.
    ///
    /// # Errors
    /// [`MemoryError`](crate::error::MemoryError), [`VerbsError::Register`].
    pub fn take(&self) -> Result<Block, Error> {
        let len = RECEIVES + self.receives * RECEIVE_BYTES;
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let (memory, used) = match &mut *newest {
            Some((memory, used)) if *used < self.slab => (memory, used),
            full => {
                let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
                let memory = Pinned::new(&self.domain, "sidelane-blocks", self.slab * len, access)?;
                let (memory, used) = full.insert((Arc::new(memory), 0));
                (memory, used)
            }
        };
        *used += 1;
        Ok(Block { memory: Arc::clone(memory), start: (*used - 1) * len, receives: self.receives })
    }
}

/// The block of one connection.
#[derive(Debug)]
pub struct Block {
    memory: Arc<Pinned>,
    /// Its first byte.
    start: u64,
    receives: u64,
}

impl Block {
    /// Where the peer writes how many signals it has taken.
    pub fn granted_at(&self) -> Remote {
        let Pinned { region, .. } = &*self.memory;
        Remote { addr: region.base() + self.start + GRANTED, rkey: region.rkey() }
    }

    /// How many signals the peer has taken.
    pub fn granted(&self) -> u64 {
        self.line(GRANTED).value()
    }

    /// The grant to the peer: so many of its signals were taken.
    pub fn grant(&self, taken: u64) -> Result<Sge, VerbsError> {
        self.line(GRANT).raise(taken, None);
        self.piece(GRANT, 8)
    }

    /// Where an addition leaves the old value.
    pub fn old(&self) -> Result<Sge, VerbsError> {
        self.piece(OLD, 8)
    }

    /// The memory of a receive.
    pub fn receive(&self, number: u64) -> Result<Sge, VerbsError> {
        self.piece(self.receive_at(number), RECEIVE_BYTES as u32)
    }

    /// Contents of a receive. Its completion must have been seen.
    pub fn received(&self, number: u64) -> [u64; 8] {
        let at = self.at(self.receive_at(number));
        // SAFETY: inside the block, aligned to 8; the NIC writes it before the completion and not
        // again before it is posted.
        unsafe { at.cast::<[u64; 8]>().read_volatile() }
    }

    fn receive_at(&self, number: u64) -> u64 {
        RECEIVES + number % self.receives * RECEIVE_BYTES
    }

    fn piece(&self, offset: u64, len: u32) -> Result<Sge, VerbsError> {
        self.memory.region.sge(self.start + offset, len)
    }

    fn line(&self, offset: u64) -> FlagLine<'_> {
        // SAFETY: one of the first lines of the block, aligned, used as an atomic word.
        unsafe { FlagLine::new(self.at(offset)) }
    }

    fn at(&self, offset: u64) -> NonNull<u8> {
        // SAFETY: a line of the block, or a receive.
        unsafe { self.memory.at.add((self.start + offset) as usize) }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::atomic::{AtomicU64, Ordering};

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::lane::net::verbs::Settings;
    use crate::lane::net::verbs::fake::Fabric;

    const CHUNK: u64 = 4096;

    /// A pool of so many slots, of which a connection may hold `most`.
    fn pool(slots: u64, most: u64) -> Arc<StagingPool> {
        let nic = Fabric::new(&["a"]).nic("a", &Settings::default());
        let domain = ProtectionDomain::create(&nic.context).unwrap();
        let wake_fd = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        let size =
            PoolSize { chunk: CHUNK, window: most * 2 * CHUNK, most: slots * 2 * CHUNK, connections: 64 };
        assert_eq!(size.slots().0, slots);
        let pool = StagingPool::new(&domain, size, &wake_fd).unwrap();
        Arc::new(StagingPool { most: most as usize, ..pool })
    }

    fn stagings<const N: usize>(pool: &Arc<StagingPool>) -> [Staging; N] {
        std::array::from_fn(|_| Staging::new(Arc::clone(pool)))
    }

    /// Stages a write of a chunk. Returns where it ends, if there was room.
    fn fill(staging: &mut Staging) -> Option<u64> {
        staging.stage(CHUNK as u32, true).unwrap().map(|staged| staged.until)
    }

    #[test]
    fn pool_grows_with_peers_up_to_its_limit() {
        let of = |connections, window: u64| {
            PoolSize { chunk: 256 << 10, window, most: 16 << 20, connections }.slots()
        };
        let usual = |connections| of(connections, 4 << 20);
        assert_eq!([0, 1, 2, 4, 1023].map(usual), [(8, 8), (8, 8), (16, 8), (32, 8), (32, 8)]);
        // A larger window takes no more: what is sent in place fills it.
        assert_eq!([1, 4].map(|connections| of(connections, u64::MAX)), [(32, 32), (32, 8)]);
        assert_eq!(of(1, 256 << 10), (1, 1));
    }

    #[test]
    fn slots_are_taken_in_order_of_first_request() {
        let pool = pool(2, 1);
        let [mut a, mut b, mut c, mut d] = stagings(&pool);
        for holder in [&mut a, &mut b] {
            assert_eq!((fill(holder), fill(holder), fill(holder)), (Some(CHUNK), Some(2 * CHUNK), None));
        }
        // The bound of each is no shortage.
        assert!(!pool.slots.is_short());
        assert_eq!([fill(&mut c), fill(&mut d)], [None, None]);
        assert!(pool.slots.is_short() && a.is_wanted() && !c.is_wanted());
        b.read_until(2 * CHUNK);
        assert_eq!(fill(&mut d), None, "it asked last");
        // The last holder too stands behind those that wait.
        assert_eq!(fill(&mut b), None);
        assert!(fill(&mut c).is_some());
        a.read_until(2 * CHUNK);
        assert!(fill(&mut d).is_some() && fill(&mut b).is_none());
        d.read_until(CHUNK);
        assert!(fill(&mut b).is_some() && !pool.slots.is_short());
    }

    #[test]
    fn waiter_that_gives_up_leaves_its_turn_and_no_slot_behind() {
        let pool = pool(1, 1);
        let [mut a, mut b, mut c] = stagings(&pool);
        assert!(fill(&mut a).is_some());
        assert_eq!([fill(&mut b), fill(&mut c)], [None, None]);
        c.ask_no_more();
        drop(b);
        assert!(!pool.slots.is_short());
        assert_eq!(fill(&mut c), None, "the slot is held");
        drop(a);
        assert!(fill(&mut c).is_some());
    }

    #[test]
    fn only_a_wait_for_slots_of_others_wakes_the_progress_thread() {
        let pool = pool(1, 1);
        let [mut a, mut b] = stagings(&pool);
        let woken = || rustix::io::read(&*pool.wake_fd, &mut [0; 8]).is_ok();
        assert!(fill(&mut a).is_some() && fill(&mut a).is_some() && fill(&mut a).is_none());
        a.ask_for_slots();
        assert!(!woken(), "it waits for what it holds itself");
        assert!(fill(&mut b).is_none());
        b.ask_for_slots();
        assert!(woken() && !woken());
    }

    #[test]
    fn connection_whose_bytes_were_read_holds_no_slot() {
        let pool = pool(1, 1);
        let [mut a, mut b] = stagings(&pool);
        let until = a.stage(64, false).unwrap().unwrap().until;
        assert_eq!(fill(&mut b), None);
        a.read_until(until);
        assert!(fill(&mut b).is_some());
    }

    #[test]
    fn a_write_has_room_in_its_slot_for_all_that_it_stages() {
        let pool = pool(2, 2);
        let [mut a] = stagings(&pool);
        let mut stage = |len, begins| a.stage(len, begins).unwrap().map(|staged| staged.at.addr());
        let first = stage(64, true).unwrap();
        // The rest of a chunk lies in the same slot, and a write that begins there has one too.
        assert_eq!(stage(4032, false), Some(first + 64));
        assert_eq!(stage(1, true), Some(first + 4096));
        // Behind that no write begins; but what does not go on may lie there.
        assert_eq!(stage(64, false), Some(first + 4160));
        let second = stage(64, true).unwrap();
        assert_ne!(second.abs_diff(first) % (2 * CHUNK as usize), 64);
        assert_eq!(second.abs_diff(first), 2 * CHUNK as usize);
        assert!(a.stage(3 * CHUNK as u32, false).is_err(), "there is never so much room");
    }

    #[test]
    fn no_slot_has_two_holders() {
        const ROUNDS: u64 = 2000;
        let pool = pool(3, 2);
        let holders: Vec<AtomicU64> = (0..3).map(|_| AtomicU64::new(0)).collect();
        let base = pool.memory.at.addr().get();
        std::thread::scope(|scope| {
            for thread in 1..=8 {
                let (pool, holders) = (&pool, &holders);
                scope.spawn(move || {
                    let mut staging = Staging::new(Arc::clone(pool));
                    for _ in 0..ROUNDS {
                        let staged = loop {
                            match staging.stage(2 * CHUNK as u32, false).unwrap() {
                                Some(staged) => break staged,
                                None => std::thread::yield_now(),
                            }
                        };
                        let holder = &holders[(staged.at.addr() - base) / (2 * CHUNK) as usize];
                        assert_eq!(holder.swap(thread, Ordering::Relaxed), 0);
                        assert_eq!(holder.swap(0, Ordering::Relaxed), thread);
                        staging.read_until(staged.until);
                    }
                });
            }
        });
        assert!(!pool.slots.is_short());
    }

    #[test]
    fn blocks_overlap_nowhere_and_are_used_once() {
        let fabric = Fabric::new(&["a"]);
        let nic = fabric.nic("a", &Settings::default());
        let domain = ProtectionDomain::create(&nic.context).unwrap();
        let blocks = Blocks::new(&domain, 2, 1000);
        let mut starts = HashSet::new();
        for _ in 0..2 * SLAB + 1 {
            let block = blocks.take().unwrap();
            let granted = block.granted_at();
            assert!(starts.insert((granted.addr, granted.rkey)), "a former block is used again");
            assert_eq!(block.granted(), 0);
        }
        // Those of the first two registrations are gone.
        assert_eq!(fabric.inventory("a").regions, 1);
        let mut starts: Vec<_> = starts.into_iter().collect();
        starts.sort_unstable_by_key(|&(addr, key)| (key, addr));
        let apart = |pair: &[(u64, u32)]| pair[0].1 != pair[1].1 || pair[1].0 - pair[0].0 == 192 + 2 * 64;
        assert!(starts.windows(2).all(apart));
    }
}
