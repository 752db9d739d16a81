//! One rank's end of the wire to one rank of another node.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use super::card::Regions;
use super::ring::{CHUNK, Record, Ring};
use crate::error::{Cause, MemoryError};
use crate::lane::RowSource;
use crate::lane::wait::{self, Interrupted, Patience};
use crate::memory::Mapped;

/// The connection to one remote partner: puts and signals out, records in.
#[derive(Debug)]
pub struct Link {
    /// The partner's rank in the world.
    peer: u32,
    out: Mutex<Out>,
    inbound: Mutex<In>,
    regions: Arc<Regions>,
    /// Wakes the partner's card.
    bell: OwnedFd,
    /// The segment both rings lie in.
    _wire: Arc<Mapped>,
}

#[derive(Debug)]
struct Out {
    ring: Ring,
    head: u64,
}

#[derive(Debug)]
struct In {
    ring: Ring,
    tail: u64,
}

impl Link {
    /// An end of the pair's segment. `lower` says which end: the lower rank sends on the first ring.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`] if the segment is too small.
    pub fn new(
        peer: u32,
        lower: bool,
        wire: Arc<Mapped>,
        bell: OwnedFd,
        regions: Arc<Regions>,
    ) -> Result<Self, MemoryError> {
        let first = wire.at(0, 0, Ring::STRIDE)?;
        let second = wire.at(0, Ring::STRIDE, Ring::STRIDE)?;
        let (out, inbound) = if lower { (first, second) } else { (second, first) };
        // SAFETY: both halves were checked against the mapping, which `_wire` keeps alive.
        let (out, inbound) = unsafe { (Ring::new(out), Ring::new(inbound)) };
        Ok(Link {
            peer,
            out: Mutex::new(Out { ring: out, head: 0 }),
            inbound: Mutex::new(In { ring: inbound, tail: 0 }),
            regions,
            bell,
            _wire: wire,
        })
    }

    /// The partner's rank in the world.
    pub fn peer(&self) -> u32 {
        self.peer
    }

    /// Writes bytes to (`region`, `offset`) of the partner.
    ///
    /// # Errors
    /// The credit awaited and last seen, and why the wait for it ended.
    pub fn put(
        &self,
        region: u32,
        offset: u64,
        bytes: &[u8],
        patience: Patience<'_>,
    ) -> Result<(), NoCredit> {
        let mut out = self.lock_out();
        for (index, chunk) in bytes.chunks(CHUNK).enumerate() {
            let offset = offset + (index * CHUNK) as u64;
            let record = Record::Put { region, offset, len: chunk.len() as u64 };
            // SAFETY: `send` gives room for `chunk.len()` bytes that nobody else uses before they are published.
            self.send(&mut out, record, chunk.len(), patience, |to| unsafe {
                std::ptr::copy_nonoverlapping(chunk.as_ptr(), to, chunk.len());
            })?;
        }
        Ok(())
    }

    /// Writes rows, gathered by index, to (region, offset) of the partner. The caller has checked that they lie in the
    /// source.
    ///
    /// # Errors
    /// As [`Link::put`].
    pub fn put_rows(
        &self,
        (region, mut offset): (u32, u64),
        rows: &[u32],
        source: RowSource<'_>,
        patience: Patience<'_>,
    ) -> Result<(), NoCredit> {
        let row_bytes = source.row_bytes as usize;
        let row_at = |row: u32| &source.bytes[row as usize * row_bytes..][..row_bytes];
        for group in rows.chunks((CHUNK / row_bytes).max(1)) {
            let len = group.len() * row_bytes;
            if len > CHUNK {
                self.put(region, offset, row_at(group[0]), patience)?;
            } else {
                let record = Record::Put { region, offset, len: len as u64 };
                self.send(&mut self.lock_out(), record, len, patience, |mut to| {
                    for row in group.iter().map(|&row| row_at(row)) {
                        // SAFETY: `send` gives room for `len` bytes: one row after another fills them.
                        unsafe {
                            std::ptr::copy_nonoverlapping(row.as_ptr(), to, row_bytes);
                            to = to.add(row_bytes);
                        }
                    }
                })?;
            }
            offset += len as u64;
        }
        Ok(())
    }

    /// Writes zeros to (region, offset) of the partner.
    ///
    /// # Errors
    /// As [`Link::put`].
    pub fn zero(
        &self,
        (region, offset): (u32, u64),
        len: u64,
        patience: Patience<'_>,
    ) -> Result<(), NoCredit> {
        self.send(&mut self.lock_out(), Record::Zero { region, offset, len }, 0, patience, |_| ())
    }

    /// Returns when the partner has taken everything that was sent.
    ///
    /// # Errors
    /// As [`Link::put`].
    pub fn flush(&self, patience: Patience<'_>) -> Result<(), NoCredit> {
        let (ring, awaited) = {
            let out = self.lock_out();
            (out.ring, out.head)
        };
        wait::until(ring.tail(), awaited, patience, || {
            self.drain(patience.health);
        })
        .map_err(|(seen, why)| NoCredit { awaited, seen, why })
    }

    /// Raises a flag of the partner, after everything put before.
    ///
    /// # Errors
    /// As [`Link::put`].
    pub fn signal(
        &self,
        region: u32,
        offset: u64,
        value: u64,
        tag: Option<crate::schedule::Tag>,
        patience: Patience<'_>,
    ) -> Result<(), NoCredit> {
        let record = Record::Signal { region, offset, value, tag };
        self.send(&mut self.lock_out(), record, 0, patience, |_| ())
    }

    /// Receives whatever has come, unless another thread is doing so. Returns whether anything had.
    pub fn drain(&self, health: &crate::bootstrap::Health) -> bool {
        let Ok(mut inbound) = self.inbound.try_lock() else { return false };
        let In { ring, tail } = &mut *inbound;
        let head = ring.head().value();
        let any = head != *tail;
        while *tail != head {
            let Some((record, payload, next)) = ring.read(*tail, head.wrapping_sub(*tail)) else {
                health.fail(Cause::Protocol { rank: self.peer });
                return any;
            };
            // SAFETY: a published record: its payload stays until the tail moves past it.
            if unsafe { self.regions.apply(record, payload) }.is_err() {
                health.fail(Cause::Protocol { rank: self.peer });
                return any;
            }
            *tail = next;
            ring.tail().raise(next, None);
        }
        any
    }

    /// Asks the partner to wake this rank's card with its next record. Returns whether something is there already.
    pub(super) fn arm(&self) -> bool {
        let inbound = self.inbound.lock().unwrap_or_else(PoisonError::into_inner);
        inbound.ring.arm();
        inbound.ring.head().value() != inbound.tail
    }

    fn send(
        &self,
        out: &mut Out,
        record: Record,
        payload: usize,
        patience: Patience<'_>,
        fill: impl FnOnce(*mut u8),
    ) -> Result<(), NoCredit> {
        let bytes = Ring::footprint(payload);
        let skip = Ring::skip(out.head, bytes);
        let begin = out.head + skip;
        let needed = Ring::needed_tail(begin + bytes);
        wait::until(out.ring.tail(), needed, patience, || {
            self.drain(patience.health);
        })
        .map_err(|(seen, why)| NoCredit { awaited: needed, seen, why })?;
        if skip > 0 {
            out.ring.write(out.head, Record::Skip { len: skip });
        }
        fill(out.ring.write(begin, record));
        out.head = begin + bytes;
        out.ring.head().raise(out.head, None);
        if out.ring.should_ring() {
            // A full counter means that the card has been woken already.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
        Ok(())
    }

    fn lock_out(&self) -> std::sync::MutexGuard<'_, Out> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The partner's card does not take what it is sent.
#[derive(Clone, Debug, PartialEq)]
pub struct NoCredit {
    /// Ring position that had to be free.
    pub awaited: u64,
    /// Position the partner has reached.
    pub seen: u64,
    /// Why the wait ended.
    pub why: Interrupted,
}
