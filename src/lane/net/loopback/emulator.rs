//! Loopback connections that emulate a slower link.
//!
//! Overlap is worth measuring where transfers cost time and no core. Between emulated nodes of one
//! machine they cost the opposite: a copy, done at once by a core. Here bytes still move at once,
//! but a signal behind them becomes visible only when a link of a given bandwidth and latency would
//! have brought it. No thread polls for that: a timer wakes the receiver's progress thread.
//!
//! ```text
//!   sender     put 1 MB      signal, due = when the link has sent all so far + latency
//!                 |             |
//!   receiver   written at once  held ........ timer: seen
//! ```

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use crate::config::EmulatedLink;
use crate::error::LaneError;
use crate::lane::clock::now;
use crate::lane::net::record::Record;
use crate::lane::net::system;

const SECOND: u64 = 1_000_000_000;

/// The link that all wires of a rank send through.
#[derive(Debug)]
pub struct LinkEmulator {
    pace: EmulatedLink,
    /// When it has sent all that it was given.
    free: AtomicU64,
}

impl LinkEmulator {
    /// A link that has sent nothing.
    pub fn new(pace: EmulatedLink) -> Self {
        LinkEmulator { pace, free: AtomicU64::new(0) }
    }

    /// Gives it so many bytes more.
    pub fn send(&self, bytes: u64) {
        let took = u128::from(bytes) * u128::from(SECOND) / u128::from(self.pace.bytes_per_second.get());
        let took = u64::try_from(took).unwrap_or(u64::MAX);
        let later = |free: u64| Some(free.max(now()).saturating_add(took));
        let _ = self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later);
    }

    /// When the bytes so far arrive.
    pub fn arrival(&self) -> u64 {
        let latency = u64::try_from(self.pace.latency.as_nanos()).unwrap_or(u64::MAX);
        self.free.load(Ordering::Relaxed).max(now()).saturating_add(latency)
    }
}

/// Signals that have come too early.
#[derive(Debug)]
pub struct DelayedSignals {
    /// Readable when the first of them is due.
    timer: Arc<OwnedFd>,
    signals: VecDeque<DelayedSignal>,
}

/// A signal, when it is due, and where it lay in the ring.
#[derive(Clone, Copy, Debug)]
pub struct DelayedSignal {
    pub record: Record,
    pub due: u64,
    pub at: u64,
}

impl DelayedSignals {
    /// None so far.
    ///
    /// # Errors
    /// [`LaneError::System`].
    pub fn new() -> Result<Self, LaneError> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags).map_err(system("timerfd_create"))?;
        Ok(DelayedSignals { timer: Arc::new(timer), signals: VecDeque::new() })
    }

    /// Readable when a signal is due.
    pub fn timer(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.timer)
    }

    /// Keeps a signal. They are due in the order in which they come.
    pub fn keep(&mut self, early: DelayedSignal) {
        self.signals.push_back(early);
        if self.signals.len() == 1 {
            self.set();
        }
    }

    /// The next signal that is due.
    pub fn take(&mut self) -> Option<DelayedSignal> {
        if self.signals.front()?.due > now() {
            return None;
        }
        let early = self.signals.pop_front();
        self.set();
        early
    }

    /// Where the first lay in the ring.
    pub fn first(&self) -> Option<u64> {
        self.signals.front().map(|early| early.at)
    }

    /// Whether the first is due.
    pub fn is_due(&self) -> bool {
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
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_is_sent_is_due_when_the_link_has_sent_it() {
        let pace = EmulatedLink {
            bytes_per_second: NonZeroU64::new(1000).unwrap(),
            latency: Duration::from_secs(5),
        };
        let link = LinkEmulator::new(pace);
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
