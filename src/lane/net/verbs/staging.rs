//! Staging: registered memory for bytes that are not registered at their source. The connections of
//! a NIC share it.
//!
//! It is a pool of equal slots. A connection takes a slot when it has bytes to copy, and gives it
//! back once the NIC has read them. So an idle connection holds none, and the pool is as large for
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
//! posted. Others may hold bytes of writes that are still gathered. While a connection that holds
//! no slot waits, the pool is [short](Slots::is_short), and the progress thread posts what they
//! hold back.
//!
//! **No starvation.** Connections that hold no slot take one in the order in which they asked
//! ([`Slots`]), also where another connection of the same peer holds some. A connection takes one
//! more only while more slots are left than its peer may hold before, and more than a quarter of
//! the pool. The pool has two slots or more for each connection of a peer. So a peer that takes
//! nothing holds about half of the pool at most. Several of them leave the last quarter to
//! connections that hold no slot:
//!
//! ```text
//!   slots   | a a a a a a a a b b b b b b b b c c c c c c c c | d e f g h             |
//!             windows of peers that take nothing                their first slots       left to others
//! ```
//!
//! A wait that ends at its deadline is blamed on the peer that holds most slots.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{Access, Pinned, ProtectionDomain, Sge};
use crate::error::{Error, VerbsError};
use crate::sync::slots::{Slots, Ticket};

/// Alignment of staged data.
pub const ALIGN: u64 = 64;

/// The slots of a NIC.
#[derive(Debug)]
pub struct StagingPool {
    memory: Pinned,
    chunk: u64,
    slots: Slots,
    /// The rank (in the world) that each slot was taken for last, or [`FREE`].
    peers: Box<[AtomicU32]>,
    /// Slots that one connection may hold.
    most: usize,
    /// Connections of one peer, and slots for connections that hold none. Both are 0 if no other
    /// peer shares the pool.
    queues: u64,
    reserve: u64,
    /// Wakes the progress thread.
    wake_fd: Arc<OwnedFd>,
}

/// No rank.
const FREE: u32 = u32::MAX;

/// The size of a pool.
#[derive(Clone, Copy, Debug)]
pub struct PoolSize {
    /// Bytes of one write.
    pub chunk: u64,
    /// Bytes that one connection may have in flight.
    pub window: u64,
    /// Bytes at most, for all connections. But with several peers, there are always two slots for
    /// each connection of one of them.
    pub most: u64,
    /// Peers that there may be, and connections of each.
    pub peers: u64,
    pub queues: u64,
}

impl PoolSize {
    /// Bytes of a slot.
    fn slot(&self) -> u64 {
        2 * self.chunk.next_multiple_of(ALIGN)
    }

    /// Number of slots, and how many of them one connection may hold.
    fn slots(&self) -> (u64, u64) {
        let window = self.window.div_ceil(self.slot()).max(1);
        // Beside the windows of all peers, as much as one more: it is left to others.
        let (peers, least) = if self.peers > 1 { (self.peers + 1, 2 * self.queues) } else { (1, 1) };
        let wanted = window.saturating_mul(peers * self.queues);
        let slots = wanted.min(self.most / self.slot()).max(least);
        (slots, window.min(slots))
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
            peers: (0..slots).map(|_| AtomicU32::new(FREE)).collect(),
            most: most as usize,
            queues: if size.peers > 1 { size.queues } else { 0 },
            reserve: if size.peers > 1 { slots / 4 } else { 0 },
            wake_fd: Arc::clone(wake_fd),
        })
    }

    fn slot_bytes(&self) -> u64 {
        2 * self.chunk
    }

    /// The peer that holds most slots.
    fn busiest(&self) -> Option<u32> {
        let mut held = BTreeMap::<u32, u32>::new();
        // Relaxed: for an error about slots that have not moved for long.
        let peers = self.peers.iter().map(|peer| peer.load(Ordering::Relaxed));
        peers.filter(|&peer| peer != FREE).for_each(|peer| *held.entry(peer).or_default() += 1);
        held.into_iter().rev().max_by_key(|&(_, slots)| slots).map(|(peer, _)| peer)
    }
}

/// Registered bytes, to be filled before they are sent.
pub struct Staged {
    /// Where they go.
    pub at: *mut u8,
    /// The piece that is to be sent.
    pub piece: Sge,
    /// The position behind them: everything before it is free once the NIC has read them.
    pub until: u64,
}

/// The slots of one connection.
#[derive(Debug)]
pub struct Staging {
    pool: Arc<StagingPool>,
    /// The rank (in the world) at the other end.
    peer: u32,
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
    pub fn new(pool: Arc<StagingPool>, peer: u32) -> Self {
        let held = VecDeque::with_capacity(pool.most);
        Staging { pool, peer, held, taken: 0, head: 0, tail: 0, ticket: Ticket::default() }
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
            let spared = self.spared();
            let Some(slot) = self.pool.slots.take(&mut self.ticket, spared) else { return Ok(None) };
            // Relaxed, as below: for errors alone.
            self.pool.peers[slot as usize].store(self.peer, Ordering::Relaxed);
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

    /// Slots that it leaves to others when it takes one more.
    fn spared(&self) -> u64 {
        match self.held.len() as u64 {
            0 => 0,
            // Each connection of the peer may hold as many.
            held => (held * self.pool.queues).max(self.pool.reserve),
        }
    }

    /// Bytes up to here have been read by the NIC.
    pub fn read_until(&mut self, until: u64) {
        self.tail = until;
        while let Some(&(slot, _)) = self.held.front().filter(|(_, end)| *end <= self.tail) {
            self.held.pop_front();
            // Before others may hold it.
            self.pool.peers[slot as usize].store(FREE, Ordering::Relaxed);
            self.pool.slots.give_back(slot);
        }
    }

    /// Whether it holds slots, and other connections wait for some.
    pub fn is_wanted(&self) -> bool {
        !self.held.is_empty() && self.pool.slots.is_short()
    }

    /// Whether it waits for slots of others: it holds none itself.
    pub fn waits_for_others(&self) -> bool {
        self.held.is_empty() && self.ticket.waits()
    }

    /// The peer whose slots it waits for, as far as can be told.
    pub fn awaited_peer(&self) -> Option<u32> {
        self.pool.busiest().filter(|_| self.waits_for_others())
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::lane::net::verbs::Settings;
    use crate::lane::net::verbs::fake::Fabric;

    const CHUNK: u64 = 4096;

    fn made(size: PoolSize) -> StagingPool {
        let nic = Fabric::new(&["a"]).nic("a", &Settings::default());
        let domain = ProtectionDomain::create(&nic.context).unwrap();
        let wake_fd = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        StagingPool::new(&domain, size, &wake_fd).unwrap()
    }

    /// A pool of so many slots, of which a connection may hold `most`. None is left to others.
    fn pool(slots: u64, most: u64) -> Arc<StagingPool> {
        let bytes = slots * 2 * CHUNK;
        let pool = made(PoolSize { chunk: CHUNK, window: bytes, most: bytes, peers: 1, queues: 1 });
        Arc::new(StagingPool { most: most as usize, ..pool })
    }

    /// Of peers 0, 1, 2 ...
    fn stagings<const N: usize>(pool: &Arc<StagingPool>) -> [Staging; N] {
        std::array::from_fn(|peer| Staging::new(Arc::clone(pool), peer as u32))
    }

    /// Stages a write of a chunk. Returns where it ends, if there was room.
    fn fill(staging: &mut Staging) -> Option<u64> {
        staging.stage(CHUNK as u32, true).unwrap().map(|staged| staged.until)
    }

    #[test]
    fn pool_grows_with_peers_up_to_its_limit() {
        let of = |(peers, queues), window: u64, most: u64| {
            PoolSize { chunk: 256 << 10, window, most, peers, queues }.slots()
        };
        let usual = |peers| of((peers, 1), 4 << 20, 16 << 20);
        assert_eq!([0, 1, 2, 3, 1023].map(usual), [(8, 8), (8, 8), (24, 8), (32, 8), (32, 8)]);
        assert_eq!([1, 2].map(|peers| of((peers, 2), 4 << 20, 64 << 20)), [(16, 8), (48, 8)]);
        // A larger window takes no more: what is sent in place fills it.
        assert_eq!([1, 4].map(|peers| of((peers, 1), u64::MAX, 16 << 20)), [(32, 32), (32, 32)]);
        // One slot is enough for a connection of one peer, two for those of many.
        assert_eq!([1, 2].map(|peers| of((peers, 1), 1, 1)), [(1, 1), (2, 1)]);
        assert_eq!([1, 2].map(|peers| of((peers, 8), 1, 8 * (512 << 10))), [(8, 1), (16, 1)]);
    }

    /// Takes as many slots as it can. Returns how many it holds then.
    fn fill_up(staging: &mut Staging) -> u64 {
        while fill(staging).is_some() {}
        staging.held.len() as u64
    }

    #[test]
    fn peers_that_take_nothing_leave_slots_to_others() {
        let one_peer = [(2, 1), (3, 1), (32, 1), (32, 8), (32, 3), (8, 8), (2, 8), (9, 4)];
        let cases = one_peer.map(|(slots, queues)| (slots, 1, queues)).into_iter().chain([(32, 8, 1)]);
        for (slots, stalled, queues) in cases {
            let bytes = slots * 2 * CHUNK;
            let window = bytes / 4;
            let pool = Arc::new(made(PoolSize { chunk: CHUNK, window, most: bytes, peers: 1000, queues }));
            let case = format!("{stalled} of {slots} slots, {queues} queues");
            let ends = (0..stalled).flat_map(|peer| (0..queues).map(move |_| peer));
            let mut held: Vec<_> = ends.map(|peer| Staging::new(Arc::clone(&pool), peer)).collect();
            // Queues of one peer take turns, peers come one after the other.
            for peer in held.chunks_mut(queues as usize) {
                while peer.iter_mut().filter_map(fill).count() > 0 {}
            }
            let taken: usize = held.iter().map(|staging| staging.held.len()).sum();
            let most = (pool.peers.len() as u64 + queues) / 2;
            assert!(stalled > 1 || taken as u64 <= most, "{case}: {taken} are about half at most");
            let [mut other, mut another] = [2000, 2001].map(|peer| Staging::new(Arc::clone(&pool), peer));
            for round in 0..100 {
                for staging in [&mut other, &mut another] {
                    let until = fill(staging).unwrap_or_else(|| panic!("{case}: round {round} gets no slot"));
                    staging.read_until(until);
                }
            }
            assert_eq!(pool.busiest(), Some(0), "{case}");
        }
    }

    #[test]
    fn peer_that_holds_most_slots_is_blamed_for_a_wait() {
        let pool = pool(3, 2);
        let [mut a, mut b, mut c] = stagings(&pool);
        assert_eq!([&mut b, &mut c].map(|staging| staging.awaited_peer()), [None, None]);
        assert_eq!((fill_up(&mut a), fill_up(&mut b)), (2, 1));
        assert_eq!(fill(&mut c), None);
        assert_eq!(c.awaited_peer(), Some(0));
        // One that holds slots waits for its own peer.
        assert_eq!((a.awaited_peer(), b.awaited_peer()), (None, None));
        a.clear();
        assert!(fill(&mut c).is_some());
        assert_eq!(c.awaited_peer(), None);
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
                    let mut staging = Staging::new(Arc::clone(pool), thread as u32);
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
}
