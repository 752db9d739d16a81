//! The loopback lane: the interface of a NIC, between emulated nodes of one machine.
//!
//! A NIC offers one-sided operations: the sender names a region, an offset and bytes, and the
//! receiver's processor takes no part. Here the connection is one shared segment per pair of ranks,
//! and the receiving NIC is a thread of the receiver. Nothing else of the other node is mapped, so
//! a schedule that relies on loads from another node cannot work here by accident. The lower rank
//! of a pair creates the segment and passes its descriptor.
//!
//! ```text
//!   rank a                    segment of the pair (a, b)                        rank b
//!   put              --records-->  | ring a->b: head, tail, flags, records |  --> progress thread:
//!   progress thread  <--records--  | ring b->a: head, tail, flags, records |      checks, regions of b
//!
//!   ring     line 0   head: bytes ever written      line 2   whether the consumer sleeps until woken
//!            line 1   tail: bytes ever consumed     line 3   done: consumed, all signals seen (emulated)
//!                                                   line 4   capacity bytes of records
//!   record   | header: 64 bytes | payload, padded to 64 |
//! ```
//!
//! Positions count bytes since the beginning and never wrap; their remainder is the place. A record
//! never straddles the end: a *skip* fills the rest. *Credits*: a sender never writes past the
//! receiver's tail. While it waits for credit it receives its own records, so two ranks that fill
//! each other's rings cannot block each other.
//!
//! **Emulated links.** Overlap is worth measuring where transfers cost time and no core. Between
//! emulated nodes they cost the opposite: a copy, done at once by a core. With a [`LinkEmulator`]
//! bytes still move at once. A signal behind them becomes visible only when a link of a given
//! bandwidth and latency would have delivered it. A timer wakes the receiver's progress thread.
//!
//! ```text
//!   sender     put 1 MB      signal, due = when the link has sent all so far + latency
//!                 |             |
//!   receiver   written at once  held ........ timer: seen
//! ```

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use super::regions::{CHUNK, HEADER, Record};
use super::{
    ConnectionEnd, ConnectionOffer, EMULATED, LOOPBACK, NetConnection, NetTransport, Regions, RemoteAddress,
    SendBlocked, system,
};
use crate::bootstrap::wait::nap;
use crate::bootstrap::{FatalLock, Health};
use crate::config::EmulatedLink;
use crate::error::{Cause, Error, LaneError};
use crate::lane::flag::{WaitLimits, now};
use crate::lane::{FlagLine, RowSource, flag};
use crate::memory::{PeerMapping, Segment};
use crate::schedule::Tag;
use crate::sync::wake_request::WakeRequest;

/// Opens the loopback connections of one rank.
#[derive(Debug)]
pub struct LoopbackTransport {
    rank: u32,
    health: Arc<Health>,
    regions: Arc<Regions>,
    /// Wakes this rank's progress thread.
    wake_fd: OwnedFd,
    /// The emulated link, if any.
    link: Option<Arc<LinkEmulator>>,
}

impl LoopbackTransport {
    /// The transport of a rank of the world, over an emulated link if there is one. Peers wake the
    /// rank by this descriptor.
    pub fn new(
        (rank, health): (u32, &Arc<Health>),
        regions: Arc<Regions>,
        wake_fd: OwnedFd,
        link: Option<Arc<LinkEmulator>>,
    ) -> Self {
        LoopbackTransport { rank, health: Arc::clone(health), regions, wake_fd, link }
    }
}

impl NetTransport for LoopbackTransport {
    fn lane(&self) -> &'static str {
        if self.link.is_some() { EMULATED } else { LOOPBACK }
    }

    fn passes_descriptors(&self) -> bool {
        true
    }

    fn open(&self, peer: u32) -> Result<Box<dyn ConnectionEnd + '_>, Error> {
        let create = || Segment::create("sidelane-ring", ring_bytes());
        let made = (self.rank < peer).then(create).transpose()?;
        Ok(Box::new(LoopbackEnd { transport: self, peer, made }))
    }
}

/// One end of a connection that is not joined yet.
struct LoopbackEnd<'a> {
    transport: &'a LoopbackTransport,
    peer: u32,
    /// The segment of the pair, at its lower rank.
    made: Option<Segment>,
}

impl ConnectionEnd for LoopbackEnd<'_> {
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let segment = self.made.as_ref().map(AsFd::as_fd);
        [self.transport.wake_fd.as_fd()].into_iter().chain(segment).collect()
    }

    fn connect(self: Box<Self>, offered: ConnectionOffer) -> Result<Arc<dyn NetConnection>, Error> {
        let LoopbackEnd { transport, peer, made } = *self;
        let &LoopbackTransport { rank, ref health, ref regions, ref link, .. } = transport;
        let mut theirs = offered.descriptors.into_iter();
        let missing = |missing| LaneError::NoLane { rank, peer, missing };
        let wake_fd = theirs.next().ok_or_else(|| missing("the event descriptor of the peer"))?;
        let segment = match made {
            Some(made) => made,
            None => Segment::adopt(theirs.next().ok_or_else(|| missing("the segment of the pair"))?, peer)?,
        };
        let mapped = Arc::new(PeerMapping::new(&[Some(&segment)])?);
        let (regions, link) = (Arc::clone(regions), link.clone());
        Ok(Arc::new(LoopbackConnection::new((rank, peer), health, mapped, wake_fd, regions, link)?))
    }
}

/// The connection to one remote peer: puts and signals out, records in.
#[derive(Debug)]
pub struct LoopbackConnection {
    /// The peer's rank in the world.
    peer: u32,
    out: FatalLock<Out>,
    inbound: FatalLock<In>,
    regions: Arc<Regions>,
    /// Wakes the peer's progress thread.
    wake_fd: OwnedFd,
    /// The emulated link, if any: then signals are delayed at both ends.
    emulated: Option<Emulated>,
    /// The segment both rings lie in.
    _segment: Arc<PeerMapping>,
}

#[derive(Debug)]
struct Emulated {
    link: Arc<LinkEmulator>,
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
    /// Signals that have come too early, over an emulated link.
    held: Option<DelayedSignals>,
}

impl LoopbackConnection {
    /// The end of a rank of a pair, in the pair's segment: the lower rank sends on the first ring.
    /// Both ends emulate a link, or none does.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`](crate::error::MemoryError::OutOfBounds) if the segment is too
    /// small, [`LaneError::System`] if there is no timer.
    pub fn new(
        (rank, peer): (u32, u32),
        health: &Arc<Health>,
        segment: Arc<PeerMapping>,
        wake_fd: OwnedFd,
        regions: Arc<Regions>,
        link: Option<Arc<LinkEmulator>>,
    ) -> Result<Self, Error> {
        let first = segment.at(0, 0, Ring::STRIDE)?;
        let second = segment.at(0, Ring::STRIDE, Ring::STRIDE)?;
        let (out, inbound) = if rank < peer { (first, second) } else { (second, first) };
        // SAFETY: both halves were checked against the mapping, which `_segment` keeps alive.
        let (out, inbound) = unsafe { (Ring::new(out), Ring::new(inbound)) };
        let held = link.as_ref().map(|_| DelayedSignals::new()).transpose()?;
        let emulated = link.zip(held.as_ref()).map(|(link, held)| Emulated { link, timer: held.timer() });
        Ok(LoopbackConnection {
            peer,
            out: FatalLock::new(Out { ring: out, head: 0, due: 0 }, rank, health),
            inbound: FatalLock::new(In { ring: inbound, tail: 0, held }, rank, health),
            regions,
            wake_fd,
            emulated,
            _segment: segment,
        })
    }
}

impl NetConnection for LoopbackConnection {
    fn lane(&self) -> &'static str {
        if self.emulated.is_some() { EMULATED } else { LOOPBACK }
    }

    fn peer(&self) -> u32 {
        self.peer
    }

    fn put(&self, to: RemoteAddress, bytes: &[u8], limits: WaitLimits<'_>) -> Result<(), SendBlocked> {
        let mut out = self.out.lock();
        let mut to = to;
        for chunk in bytes.chunks(CHUNK) {
            let record = Record::Put { region: to.region, offset: to.offset, len: chunk.len() as u64 };
            // SAFETY: `send` gives room for `chunk.len()` bytes that no one else uses before they
            // are published.
            self.send(&mut out, record, chunk.len(), limits, |to| unsafe {
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
        limits: WaitLimits<'_>,
    ) -> Result<(), SendBlocked> {
        let mut to = to;
        let row_bytes = source.row_bytes as usize;
        for group in rows.chunks((CHUNK / row_bytes).max(1)) {
            let len = group.len() * row_bytes;
            if len > CHUNK {
                self.put(to, source.row(group[0]), limits)?;
            } else {
                let record = Record::Put { region: to.region, offset: to.offset, len: len as u64 };
                self.send(&mut self.out.lock(), record, len, limits, |mut to| {
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

    fn zero(&self, to: RemoteAddress, len: u64, limits: WaitLimits<'_>) -> Result<(), SendBlocked> {
        let record = Record::Zero { region: to.region, offset: to.offset, len };
        self.send(&mut self.out.lock(), record, 0, limits, |_| ())
    }

    fn signal(
        &self,
        to: RemoteAddress,
        value: u64,
        tag: Option<Tag>,
        limits: WaitLimits<'_>,
    ) -> Result<(), SendBlocked> {
        let record = Record::Signal { region: to.region, offset: to.offset, value, tag };
        self.send(&mut self.out.lock(), record, 0, limits, |_| ())
    }

    fn flush(&self, limits: WaitLimits<'_>) -> Result<(), SendBlocked> {
        let (ring, awaited) = {
            let out = self.out.lock();
            (out.ring, out.head)
        };
        // Without the lock: other threads of this rank send while this one waits, and the peer may
        // need what they send before it reads on.
        let reached = if self.emulated.is_some() { ring.done() } else { ring.tail() };
        flag::until(reached, awaited, limits, || {
            self.progress(limits.health);
        })
        .map_err(|(seen, why)| SendBlocked { awaited, seen, why })
    }

    /// Receives pending records, unless another thread is doing so.
    fn progress(&self, health: &Health) -> bool {
        let Some(mut inbound) = self.inbound.try_lock() else { return false };
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
            // Gives the room back to the sender, behind the last read of the payload.
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
        let inbound = self.inbound.lock();
        // Before the look at the ring: a record in between wakes this thread.
        inbound.ring.wake_request().arm();
        inbound.ring.head().value() != inbound.tail
            || inbound.held.as_ref().is_some_and(DelayedSignals::is_due)
    }

    fn event_fds(&self) -> Vec<BorrowedFd<'_>> {
        self.emulated.iter().map(|emulated| emulated.timer.as_fd()).collect()
    }

    /// The peer polls once more for records that a rank sent before it left. They must be due by
    /// then, unless the link is so slow that no rank waits for it.
    fn leave(&self, until: Instant) {
        let due = self.out.lock().due;
        let left = Duration::from_nanos(due.saturating_sub(now()));
        nap(left.min(until.saturating_duration_since(Instant::now())));
    }
}

impl LoopbackConnection {
    fn send(
        &self,
        out: &mut Out,
        record: Record,
        payload: usize,
        limits: WaitLimits<'_>,
        fill: impl FnOnce(*mut u8),
    ) -> Result<(), SendBlocked> {
        let bytes = Ring::footprint(payload);
        let skip = Ring::skip(out.head, bytes);
        let begin = out.head + skip;
        let needed = Ring::needed_tail(begin + bytes);
        flag::until(out.ring.tail(), needed, limits, || {
            self.progress(limits.health);
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
        if out.ring.wake_request().take() {
            // A full counter means that the thread has been woken already.
            let _ = rustix::io::write(&self.wake_fd, &1u64.to_ne_bytes());
        }
        Ok(())
    }

    /// Through the emulated link: when the following record is due.
    fn pass(&self, record: Record) -> u64 {
        let Some(Emulated { link, .. }) = &self.emulated else { return 0 };
        match record {
            Record::Put { len, .. } | Record::Zero { len, .. } => link.send(len),
            Record::Signal { .. } => return link.arrival(),
            Record::Ask { .. } | Record::Answer { .. } | Record::Skip { .. } => {}
        }
        0
    }
}

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
struct Read {
    record: Record,
    /// When it may be seen (0: at once).
    due: u64,
    payload: *const u8,
    /// Where the next record begins.
    next: u64,
}

/// View of one ring in mapped memory. Its owner keeps the mapping alive.
#[derive(Clone, Copy, Debug)]
struct Ring {
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
    unsafe fn new(at: NonNull<u8>) -> Self {
        Ring { at }
    }

    /// Bytes from the first ring of a pair to the second.
    const STRIDE: u64 = ring_bytes() / 2;

    /// The producer's position.
    fn head(&self) -> FlagLine<'_> {
        // SAFETY: line 0 of a mapped ring.
        unsafe { FlagLine::new(self.at) }
    }

    /// The consumer's position.
    fn tail(&self) -> FlagLine<'_> {
        // SAFETY: line 1 of a mapped ring.
        unsafe { FlagLine::new(self.at.add(64)) }
    }

    /// The position up to which signals have been delivered, too: kept where they may be held back.
    fn done(&self) -> FlagLine<'_> {
        // SAFETY: line 3 of a mapped ring.
        unsafe { FlagLine::new(self.at.add(192)) }
    }

    /// The consumer's request to be woken.
    fn wake_request(&self) -> &WakeRequest {
        // SAFETY: line 2 of a mapped ring, used as a request by both sides.
        unsafe { self.at.add(128).cast().as_ref() }
    }

    /// Bytes a record of this payload takes.
    fn footprint(payload: usize) -> u64 {
        (HEADER + payload.next_multiple_of(64)) as u64
    }

    /// Bytes of padding before a record of `bytes` that is to begin at `head`.
    fn skip(head: u64, bytes: u64) -> u64 {
        let left = CAPACITY as u64 - head % CAPACITY as u64;
        if left < bytes { left } else { 0 }
    }

    /// The tail that must be reached before bytes up to `end` may be written.
    fn needed_tail(end: u64) -> u64 {
        end.saturating_sub(CAPACITY as u64)
    }

    /// Producer: writes a record at `head` that is due at a time (0: at once), and returns where
    /// its payload goes.
    fn write(&self, head: u64, record: Record, due: u64) -> *mut u8 {
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
    fn read(&self, tail: u64, available: u64) -> Option<Read> {
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

const SECOND: u64 = 1_000_000_000;

/// The link that all connections of a rank send through.
#[derive(Debug)]
pub struct LinkEmulator {
    link: EmulatedLink,
    /// When it has sent all that it was given.
    free: AtomicU64,
}

impl LinkEmulator {
    /// A link that has sent nothing.
    pub fn new(link: EmulatedLink) -> Self {
        LinkEmulator { link, free: AtomicU64::new(0) }
    }

    /// Gives it so many bytes more.
    fn send(&self, bytes: u64) {
        let took = u128::from(bytes) * u128::from(SECOND) / u128::from(self.link.bytes_per_second.get());
        let took = u64::try_from(took).unwrap_or(u64::MAX);
        let later = |free: u64| Some(free.max(now()).saturating_add(took));
        // Connections send at once, and each byte must count. The time orders no memory: what was
        // sent is published by the ring's flag.
        let _ = self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later);
    }

    /// When the bytes so far arrive.
    fn arrival(&self) -> u64 {
        let latency = u64::try_from(self.link.latency.as_nanos()).unwrap_or(u64::MAX);
        // Relaxed: a time alone. The ring's flag publishes the bytes.
        self.free.load(Ordering::Relaxed).max(now()).saturating_add(latency)
    }
}

/// Signals that have come too early.
#[derive(Debug)]
struct DelayedSignals {
    /// Readable when the first of them is due.
    timer: Arc<OwnedFd>,
    signals: VecDeque<DelayedSignal>,
}

/// A signal, when it is due, and where it lay in the ring.
#[derive(Clone, Copy, Debug)]
struct DelayedSignal {
    record: Record,
    due: u64,
    at: u64,
}

impl DelayedSignals {
    /// None so far.
    ///
    /// # Errors
    /// [`LaneError::System`].
    fn new() -> Result<Self, LaneError> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags).map_err(system("timerfd_create"))?;
        Ok(DelayedSignals { timer: Arc::new(timer), signals: VecDeque::new() })
    }

    /// Readable when a signal is due.
    fn timer(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.timer)
    }

    /// Keeps a signal. They are due in the order in which they come.
    fn keep(&mut self, early: DelayedSignal) {
        self.signals.push_back(early);
        if self.signals.len() == 1 {
            self.set();
        }
    }

    /// The next signal that is due.
    fn take(&mut self) -> Option<DelayedSignal> {
        if self.signals.front()?.due > now() {
            return None;
        }
        let early = self.signals.pop_front();
        self.set();
        early
    }

    /// Where the first lay in the ring.
    fn first(&self) -> Option<u64> {
        self.signals.front().map(|early| early.at)
    }

    /// Whether the first is due.
    fn is_due(&self) -> bool {
        self.signals.front().is_some_and(|early| early.due <= now())
    }

    /// Sets the timer to the first; zero stops it.
    fn set(&self) {
        let due = self.signals.front().map_or(0, |early| early.due.max(1));
        let it_value = Timespec { tv_sec: (due / SECOND) as i64, tv_nsec: (due % SECOND) as _ };
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        // It fails for a bad descriptor or a bad time only.
        let _ = timerfd_settime(
            &self.timer,
            TimerfdTimerFlags::ABSTIME,
            &Itimerspec { it_interval: never, it_value },
        );
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;

    #[test]
    fn signal_is_due_when_the_link_has_sent_all_before_it() {
        let link = EmulatedLink {
            bytes_per_second: NonZeroU64::new(1000).unwrap(),
            latency: Duration::from_secs(5),
        };
        let link = LinkEmulator::new(link);
        let begin = now();
        link.send(200_000);
        link.send(500);
        let first = link.arrival();
        // Longer than any delay of this thread: 200.5 seconds on the link, five of latency.
        assert!((begin + 205_500_000_000..=now() + 205_500_000_000).contains(&first));
        link.send(1000);
        assert_eq!(link.arrival(), first + SECOND);
    }

    #[test]
    fn signals_come_out_when_they_are_due_and_in_order() {
        let mut held = DelayedSignals::new().unwrap();
        let record = |mark| Record::Ask { mark };
        let begin = now();
        held.keep(DelayedSignal { record: record(1), due: begin, at: 64 });
        held.keep(DelayedSignal { record: record(2), due: begin, at: 128 });
        held.keep(DelayedSignal { record: record(3), due: u64::MAX, at: 192 });
        assert_eq!(held.first(), Some(64));
        assert_eq!(held.take().map(|early| early.record), Some(record(1)));
        assert!(held.is_due());
        assert_eq!(held.take().map(|early| early.record), Some(record(2)));
        assert!(!held.is_due() && held.take().is_none());
        assert_eq!(held.first(), Some(192));
    }
}
