//! One rank's end of the wire to one rank of another node.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::emulator::{DelayedSignal, DelayedSignals, LinkEmulator};
use super::ring::{Read, Ring};
use crate::bootstrap::Health;
use crate::error::{Cause, Error};
use crate::lane::RowSource;
use crate::lane::clock::now;
use crate::lane::net::record::{CHUNK, Record};
use crate::lane::net::{EMULATED, LOOPBACK, NetConnection, Regions, RemoteAddress, SendBlocked};
use crate::lane::wait::{self, WaitLimits};
use crate::memory::PeerMapping;
use crate::schedule::Tag;

/// The connection to one remote peer: puts and signals out, records in.
#[derive(Debug)]
pub struct LoopbackConnection {
    /// The peer's rank in the world.
    peer: u32,
    out: Mutex<Out>,
    inbound: Mutex<In>,
    regions: Arc<Regions>,
    /// Wakes the peer's progress thread.
    bell: OwnedFd,
    /// The emulated link, if any: then signals are delayed at both ends.
    paced: Option<Paced>,
    /// The segment both rings lie in.
    _wire: Arc<PeerMapping>,
}

#[derive(Debug)]
struct Paced {
    egress: Arc<LinkEmulator>,
    /// Readable when a signal that was held back is due.
    timer: Arc<OwnedFd>,
}

#[derive(Debug)]
struct Out {
    ring: Ring,
    head: u64,
    /// When the last signal is due.
    due: u64,
}

#[derive(Debug)]
struct In {
    ring: Ring,
    tail: u64,
    /// Signals that have come too early, on a paced wire.
    held: Option<DelayedSignals>,
}

impl LoopbackConnection {
    /// An end of the pair's segment. `lower` says which end: the lower rank sends on the first
    /// ring. Both ends are paced, or none.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`](crate::error::MemoryError::OutOfBounds) if the segment is too
    /// small, [`LaneError::System`](crate::error::LaneError::System) if there is no timer.
    pub fn new(
        peer: u32,
        lower: bool,
        wire: Arc<PeerMapping>,
        bell: OwnedFd,
        regions: Arc<Regions>,
        egress: Option<Arc<LinkEmulator>>,
    ) -> Result<Self, Error> {
        let first = wire.at(0, 0, Ring::STRIDE)?;
        let second = wire.at(0, Ring::STRIDE, Ring::STRIDE)?;
        let (out, inbound) = if lower { (first, second) } else { (second, first) };
        // SAFETY: both halves were checked against the mapping, which `_wire` keeps alive.
        let (out, inbound) = unsafe { (Ring::new(out), Ring::new(inbound)) };
        let held = egress.as_ref().map(|_| DelayedSignals::new()).transpose()?;
        let paced = egress.zip(held.as_ref()).map(|(egress, held)| Paced { egress, timer: held.timer() });
        Ok(LoopbackConnection {
            peer,
            out: Mutex::new(Out { ring: out, head: 0, due: 0 }),
            inbound: Mutex::new(In { ring: inbound, tail: 0, held }),
            regions,
            bell,
            paced,
            _wire: wire,
        })
    }
}

impl NetConnection for LoopbackConnection {
    fn lane(&self) -> &'static str {
        if self.paced.is_some() { EMULATED } else { LOOPBACK }
    }

    fn peer(&self) -> u32 {
        self.peer
    }

    fn put(&self, to: RemoteAddress, bytes: &[u8], patience: WaitLimits<'_>) -> Result<(), SendBlocked> {
        let mut out = self.lock_out();
        let mut to = to;
        for chunk in bytes.chunks(CHUNK) {
            let record = Record::Put { region: to.region, offset: to.offset, len: chunk.len() as u64 };
            // SAFETY: `send` gives room for `chunk.len()` bytes that no one else uses before they
            // are published.
            self.send(&mut out, record, chunk.len(), patience, |to| unsafe {
                std::ptr::copy_nonoverlapping(chunk.as_ptr(), to, chunk.len());
            })?;
            to = to.behind(chunk.len() as u64);
        }
        Ok(())
    }

    fn put_rows(
        &self,
        to: RemoteAddress,
        rows: &[u32],
        source: RowSource<'_>,
        patience: WaitLimits<'_>,
    ) -> Result<(), SendBlocked> {
        let mut to = to;
        let row_bytes = source.row_bytes as usize;
        for group in rows.chunks((CHUNK / row_bytes).max(1)) {
            let len = group.len() * row_bytes;
            if len > CHUNK {
                self.put(to, source.row(group[0]), patience)?;
            } else {
                let record = Record::Put { region: to.region, offset: to.offset, len: len as u64 };
                self.send(&mut self.lock_out(), record, len, patience, |mut to| {
                    for row in group.iter().map(|&row| source.row(row)) {
                        // SAFETY: `send` gives room for `len` bytes: one row after another fills
                        // them.
                        unsafe {
                            std::ptr::copy_nonoverlapping(row.as_ptr(), to, row_bytes);
                            to = to.add(row_bytes);
                        }
                    }
                })?;
            }
            to = to.behind(len as u64);
        }
        Ok(())
    }

    fn zero(&self, to: RemoteAddress, len: u64, patience: WaitLimits<'_>) -> Result<(), SendBlocked> {
        let record = Record::Zero { region: to.region, offset: to.offset, len };
        self.send(&mut self.lock_out(), record, 0, patience, |_| ())
    }

    fn signal(
        &self,
        to: RemoteAddress,
        value: u64,
        tag: Option<Tag>,
        patience: WaitLimits<'_>,
    ) -> Result<(), SendBlocked> {
        let record = Record::Signal { region: to.region, offset: to.offset, value, tag };
        self.send(&mut self.lock_out(), record, 0, patience, |_| ())
    }

    fn flush(&self, patience: WaitLimits<'_>) -> Result<(), SendBlocked> {
        let (ring, awaited) = {
            let out = self.lock_out();
            (out.ring, out.head)
        };
        let reached = if self.paced.is_some() { ring.done() } else { ring.tail() };
        wait::until(reached, awaited, patience, || {
            self.progress(patience.health);
        })
        .map_err(|(seen, why)| SendBlocked { awaited, seen, why })
    }

    /// Receives pending records, unless another thread is doing so.
    fn progress(&self, health: &Health) -> bool {
        let Ok(mut inbound) = self.inbound.try_lock() else { return false };
        let In { ring, tail, held } = &mut *inbound;
        let head = ring.head().value();
        let mut any = head != *tail;
        while *tail != head {
            let Some(Read { record, due, payload, next }) = ring.read(*tail, head.wrapping_sub(*tail)) else {
                health.fail(Cause::Protocol { rank: self.peer });
                return any;
            };
            match (&mut *held, record) {
                (Some(held), Record::Signal { .. }) => held.keep(DelayedSignal { record, due, at: *tail }),
                // SAFETY: a published record: its payload stays until the tail moves past it.
                _ => match unsafe { self.regions.apply(record, payload) } {
                    Ok(()) => {}
                    Err(_) => {
                        health.fail(Cause::Protocol { rank: self.peer });
                        return any;
                    }
                },
            }
            *tail = next;
            ring.tail().raise(next, None);
        }
        if let Some(held) = held {
            while let Some(early) = held.take() {
                any = true;
                // SAFETY: a signal has no payload.
                if unsafe { self.regions.apply(early.record, std::ptr::null()) }.is_err() {
                    health.fail(Cause::Protocol { rank: self.peer });
                    return any;
                }
            }
            ring.done().raise(held.first().unwrap_or(*tail), None);
        }
        any
    }

    /// Asks the peer to wake this rank's progress thread with its next record.
    fn arm(&self, _: &Health) -> bool {
        let inbound = self.inbound.lock().unwrap_or_else(PoisonError::into_inner);
        inbound.ring.arm();
        inbound.ring.head().value() != inbound.tail
            || inbound.held.as_ref().is_some_and(DelayedSignals::is_due)
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.paced.as_ref().map(|paced| paced.timer.as_fd())
    }

    /// The peer polls once more for records that a rank sent before it left. They must be due by
    /// then, unless the link is so slow that no rank waits for it.
    fn leave(&self, until: Instant) {
        let due = self.lock_out().due;
        let left = Duration::from_nanos(due.saturating_sub(now()));
        std::thread::sleep(left.min(until.saturating_duration_since(Instant::now())));
    }
}

impl LoopbackConnection {
    fn send(
        &self,
        out: &mut Out,
        record: Record,
        payload: usize,
        patience: WaitLimits<'_>,
        fill: impl FnOnce(*mut u8),
    ) -> Result<(), SendBlocked> {
        let bytes = Ring::footprint(payload);
        let skip = Ring::skip(out.head, bytes);
        let begin = out.head + skip;
        let needed = Ring::needed_tail(begin + bytes);
        wait::until(out.ring.tail(), needed, patience, || {
            self.progress(patience.health);
        })
        .map_err(|(seen, why)| SendBlocked { awaited: needed, seen, why })?;
        if skip > 0 {
            out.ring.write(out.head, Record::Skip { len: skip }, 0);
        }
        let due = self.pass(record);
        out.due = out.due.max(due);
        fill(out.ring.write(begin, record, due));
        out.head = begin + bytes;
        out.ring.head().raise(out.head, None);
        if out.ring.should_ring() {
            // A full counter means that the thread has been woken already.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
        Ok(())
    }

    /// Through the emulated link: when the following record is due.
    fn pass(&self, record: Record) -> u64 {
        let Some(Paced { egress, .. }) = &self.paced else { return 0 };
        match record {
            Record::Put { len, .. } | Record::Zero { len, .. } => egress.send(len),
            Record::Signal { .. } => return egress.arrival(),
            Record::Ask { .. } | Record::Answer { .. } | Record::Skip { .. } => {}
        }
        0
    }

    fn lock_out(&self) -> std::sync::MutexGuard<'_, Out> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
