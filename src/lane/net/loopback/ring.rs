//! One direction of a pair: a ring of records with one producer and one consumer, perhaps in two
//! processes.
//!
//! ```text
//!   line 0   head: bytes ever written        line 2   bell: the consumer sleeps until woken
//!   line 1   tail: bytes ever consumed       line 3   done: consumed, all signals seen (emulated)
//!                                            line 4   capacity bytes of records
//!
//!   record   | header: 64 bytes | payload, padded to 64 |
//! ```
//!
//! Positions count bytes since the beginning and never wrap; their remainder is the place. A record
//! never straddles the end: a *skip* fills the rest.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::lane::FlagLine;
use crate::lane::net::record::{CHUNK, HEADER, Record};

/// Bytes of records in flight in one direction.
const CAPACITY: usize = 1 << 20;
const DATA: usize = 256;
/// Bytes of the segment of a pair: two rings.
pub const fn ring_bytes() -> u64 {
    2 * (DATA + CAPACITY) as u64
}

/// The word of a header that records leave to the ring: when a signal is due.
const DUE: usize = 7;

/// A record as its consumer finds it.
#[derive(Clone, Copy, Debug)]
pub struct Read {
    pub record: Record,
    /// When it may be seen (0: at once).
    pub due: u64,
    pub payload: *const u8,
    /// Where the next record begins.
    pub next: u64,
}

/// View of one ring in mapped memory. Its owner keeps the mapping alive.
#[derive(Clone, Copy, Debug)]
pub struct Ring {
    at: NonNull<u8>,
}

// SAFETY: a ring is shared memory whose protocol (one producer, one consumer, published by release
// stores) is what makes it usable from several threads and processes; `Link` keeps each end behind
// a lock.
unsafe impl Send for Ring {}

impl Ring {
    /// The ring at `at`.
    ///
    /// # Safety
    /// Half of [`ring_bytes`], aligned to 64, mapped as long as the ring is used.
    pub unsafe fn new(at: NonNull<u8>) -> Self {
        Ring { at }
    }

    /// Bytes from the first ring of a pair to the second.
    pub const STRIDE: u64 = ring_bytes() / 2;

    /// The producer's position.
    pub fn head(&self) -> FlagLine<'_> {
        // SAFETY: line 0 of a mapped ring.
        unsafe { FlagLine::new(self.at) }
    }

    /// The consumer's position.
    pub fn tail(&self) -> FlagLine<'_> {
        // SAFETY: line 1 of a mapped ring.
        unsafe { FlagLine::new(self.at.add(64)) }
    }

    /// The position up to which signals have been delivered, too: kept where they may be held back.
    pub fn done(&self) -> FlagLine<'_> {
        // SAFETY: line 3 of a mapped ring.
        unsafe { FlagLine::new(self.at.add(192)) }
    }

    fn bell(&self) -> &AtomicU32 {
        // SAFETY: line 2 of a mapped ring, used as an atomic by both sides.
        unsafe { self.at.add(128).cast().as_ref() }
    }

    /// Consumer: asks to be woken. Look at the ring once more afterwards.
    pub fn arm(&self) {
        self.bell().store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Producer, after publishing: whether the consumer sleeps and must be woken now.
    pub fn should_ring(&self) -> bool {
        fence(Ordering::SeqCst);
        self.bell().load(Ordering::Relaxed) != 0 && self.bell().swap(0, Ordering::SeqCst) != 0
    }

    /// Bytes a record of this payload takes.
    pub fn footprint(payload: usize) -> u64 {
        (HEADER + payload.next_multiple_of(64)) as u64
    }

    /// Bytes of padding before a record of `bytes` that is to begin at `head`.
    pub fn skip(head: u64, bytes: u64) -> u64 {
        let left = CAPACITY as u64 - head % CAPACITY as u64;
        if left < bytes { left } else { 0 }
    }

    /// The tail that must be reached before bytes up to `end` may be written.
    pub fn needed_tail(end: u64) -> u64 {
        end.saturating_sub(CAPACITY as u64)
    }

    /// Producer: writes a record at `head` that is due at a time (0: at once), and returns where
    /// its payload goes.
    pub fn write(&self, head: u64, record: Record, due: u64) -> *mut u8 {
        let at = self.data(head);
        let mut words = record.to_words();
        words[DUE] = due;
        // SAFETY: the producer has credit for the record, which does not straddle the end; headers
        // are aligned to 64.
        unsafe { at.cast::<[u64; 8]>().write(words) };
        // SAFETY: the payload follows its header inside the ring.
        unsafe { at.add(HEADER) }
    }

    /// Consumer: the record at `tail`. `None` if it makes no sense with `available` bytes
    /// published.
    pub fn read(&self, tail: u64, available: u64) -> Option<Read> {
        let at = self.data(tail);
        // SAFETY: a published record begins here: aligned, inside the ring.
        let words = unsafe { at.cast::<[u64; 8]>().read() };
        let record = Record::from_words(words)?;
        let bytes = match record {
            Record::Skip { len } => len,
            _ if record.payload() > CHUNK => return None,
            _ => Ring::footprint(record.payload()),
        };
        let fits = bytes <= available && bytes > 0 && Ring::skip(tail, bytes) == 0;
        // SAFETY: inside the ring, as checked where it is called.
        let payload = || unsafe { at.add(HEADER) }.cast_const();
        fits.then(|| Read { record, due: words[DUE], payload: payload(), next: tail + bytes })
    }

    fn data(&self, position: u64) -> *mut u8 {
        let offset = (position % CAPACITY as u64) as usize / 64 * 64;
        // SAFETY: DATA + offset is inside the mapped ring.
        unsafe { self.at.as_ptr().add(DATA + offset) }
    }
}
