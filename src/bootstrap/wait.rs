//! Waits: the one module that blocks a thread. Every wait ends.
//!
//! ```text
//!   nap, park, on, poll_for, epoll_for, ..     sleeps of the system: each is bounded, their callers ask in a loop
//!   connect, resolve                           the network: each has a deadline
//!   join                                       threads that were told to end
//!   Polling                                    conditions without a wake-up: a stream, memory that peers read
//! ```
//!
//! A wait has an owner, which says what it waits for, and three ways out: the deadline of the
//! owner, the failure of the world, and the interrupt of the thread's user. A sleep of this module
//! returns before [`LONGEST`] has passed, so its caller looks at all three at least so often. A
//! test of this repository walks the sources, and finds other calls that block. Waits for the flags
//! of other ranks have a ladder of their own, `lane::flag`, whose last step is one of these sleeps.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU32;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Condvar, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::epoll::Event;
use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;
use rustix::thread::futex as kernel;

use super::health::{EVERY, Health, has_interrupt_check, interrupted};
use crate::error::{BootstrapError, Cause};

/// The longest sleep between two questions of a waiter.
pub const LONGEST: Duration = Duration::from_secs(1);

/// The longest sleep of this thread: shorter if it has a user to ask.
fn slice(limit: Duration) -> Duration {
    limit.min(if has_interrupt_check() { EVERY } else { LONGEST })
}

/// Sleeps until a descriptor is ready or the time has come. Being interrupted counts as ready.
///
/// # Errors
/// [`BootstrapError::System`].
pub fn poll_until(fds: &mut [PollFd<'_>], until: Instant) -> Result<(), BootstrapError> {
    // Rounded up to a millisecond, so that a wait does not end just before its time, again and
    // again.
    let left = slice(until.saturating_duration_since(Instant::now())) + Duration::from_micros(999);
    let left = Duration::from_millis(left.as_millis().try_into().unwrap_or(u64::MAX));
    poll_for(fds, left).map_err(|errno| super::system("poll", errno))
}

/// Sleeps until a descriptor is ready, for `limit` at most. Being interrupted counts as ready.
///
/// # Errors
/// That of `poll`.
pub fn poll_for(fds: &mut [PollFd<'_>], limit: Duration) -> Result<(), Errno> {
    match poll(fds, Some(&timespec(limit))) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// Sleeps until a set of descriptors has events, for `limit` at most. Returns how many it has.
pub fn epoll_for(set: impl AsFd, events: &mut [Event], limit: Duration) -> usize {
    rustix::event::epoll::wait(set, events, Some(&timespec(limit))).unwrap_or(0)
}

/// Sleeps until `word` is no longer `seen` and its writer wakes the sleepers, for `limit` at most.
pub fn futex_for(word: &AtomicU32, seen: u32, limit: Duration) {
    let limit = kernel::Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    let _ = kernel::wait(word, kernel::Flags::empty(), seen, Some(&limit));
}

fn timespec(limit: Duration) -> Timespec {
    let limit = limit.min(LONGEST);
    Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() }
}

/// Sleeps.
pub fn nap(limit: Duration) {
    std::thread::sleep(slice(limit));
}

/// Sleeps until another thread unparks this one.
pub fn park(limit: Duration) {
    std::thread::park_timeout(slice(limit));
}

/// Sleeps until a condition may have changed.
pub fn on<'a, T>(changed: &Condvar, state: MutexGuard<'a, T>, limit: Duration) -> MutexGuard<'a, T> {
    changed.wait_timeout(state, slice(limit)).unwrap_or_else(PoisonError::into_inner).0
}

/// How long a thread that was told to end may take for it.
const PATIENCE: Duration = Duration::from_secs(10);

/// Waits for the end of a thread that was told to end. All its own waits end, so this does soon; a
/// thread that hangs in the system is left behind.
pub fn join(thread: JoinHandle<()>) {
    let since = Instant::now();
    while !thread.is_finished() {
        if since.elapsed() > PATIENCE {
            let name = thread.thread().name().unwrap_or_default();
            tracing::warn!(thread = name, "a thread that was told to end is left behind");
            return;
        }
        std::thread::park_timeout(Duration::from_micros(50));
    }
    // A panic was recorded by the thread itself.
    let _ = thread.join();
}

/// Connects, unless that takes too long.
///
/// # Errors
/// That of `connect`.
pub fn connect(address: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    TcpStream::connect_timeout(&address, limit)
}

/// The addresses of a host; none if there is no answer in time, or this thread's user interrupts.
/// The system's resolver has no deadline, so a thread asks it, and may be left behind.
pub fn resolve(host: &str, until: Instant) -> Vec<IpAddr> {
    if let Ok(address) = host.parse() {
        return vec![address];
    }
    let (tell, heard) = channel();
    let name = host.to_owned();
    let asked = Builder::new().name("sidelane-resolve".into()).spawn(move || {
        let found = (name.as_str(), 0).to_socket_addrs();
        // A waiter that has given up does not receive it.
        let _ = tell.send(found.map(|found| found.map(|address| address.ip()).collect()));
    });
    while asked.is_ok() && !interrupted() {
        let left = until.saturating_duration_since(Instant::now());
        match heard.recv_timeout(slice(left)) {
            Ok(found) => return found.unwrap_or_default(),
            Err(RecvTimeoutError::Timeout) if !left.is_zero() => {}
            Err(_) => break,
        }
    }
    Vec::new()
}

/// Why a wait ended without what it waited for.
#[derive(Clone, Debug, PartialEq)]
pub enum Ended {
    /// The world failed.
    Failed(Cause),
    /// The deadline passed.
    Late,
    /// The user of this thread wants to stop.
    Asked,
}

/// Looks before the waiter sleeps between them.
const YIELDS: u32 = 400;
/// Sleep between two looks.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// A wait for a condition without a wake-up: the waiter looks again and again.
#[derive(Debug)]
pub struct Polling<'a> {
    health: &'a Health,
    until: Option<Instant>,
    turns: u32,
}

impl<'a> Polling<'a> {
    /// A wait that the failure of the world ends.
    pub fn new(health: &'a Health) -> Self {
        Polling { health, until: None, turns: 0 }
    }

    /// A wait that a deadline ends, too.
    pub fn within(health: &'a Health, deadline: Duration) -> Self {
        Polling { until: Some(Instant::now() + deadline), ..Polling::new(health) }
    }

    /// Between two looks.
    ///
    /// # Errors
    /// [`Ended`].
    pub fn turn(&mut self) -> Result<(), Ended> {
        self.health.check().map_err(Ended::Failed)?;
        self.rest()?;
        match self.until {
            Some(until) if Instant::now() >= until => Err(Ended::Late),
            _ => Ok(()),
        }
    }

    /// As [`turn`](Self::turn), for what a failed world ends by itself.
    ///
    /// # Errors
    /// [`Ended::Asked`].
    pub fn rest(&mut self) -> Result<(), Ended> {
        if interrupted() {
            return Err(Ended::Asked);
        }
        self.turns = self.turns.saturating_add(1);
        if self.turns <= YIELDS {
            std::thread::yield_now()
        } else {
            nap(POLL_INTERVAL)
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::bootstrap::interruptible;

    /// A point in time that no test reaches.
    fn far() -> Instant {
        Instant::now() + Duration::from_secs(3600)
    }

    #[test]
    fn polling_ends_by_failure_deadline_and_interrupt() {
        let health = Health::new();
        let end = |mut polling: Polling<'_>| loop {
            if let Err(why) = polling.turn() {
                return why;
            }
        };
        let short = Duration::from_millis(5);
        assert_eq!(end(Polling::within(&health, short)), Ended::Late);
        let asked = interruptible(|| true, || end(Polling::new(&health)));
        assert_eq!(asked, Ended::Asked);
        health.fail(Cause::Cancelled { by: 3 });
        assert_eq!(end(Polling::new(&health)), Ended::Failed(Cause::Cancelled { by: 3 }));
    }

    #[test]
    fn every_sleep_returns_for_a_user_to_be_asked() {
        let (state, changed) = (Mutex::new(()), Condvar::new());
        interruptible(
            || true,
            || {
                // None of these is woken: each returns to its caller, or the test hangs.
                nap(Duration::MAX);
                park(Duration::MAX);
                poll_until(&mut [], far()).unwrap();
                drop(on(&changed, state.lock().unwrap(), Duration::MAX));
                while !interrupted() {}
            },
        );
    }

    #[test]
    fn unresolved_host_has_no_address_number_needs_no_resolver() {
        assert_eq!(resolve("192.0.2.7", Instant::now()), [IpAddr::from([192, 0, 2, 7])]);
        assert!(resolve("name.invalid", Instant::now()).is_empty(), "no time to ask");
        let asked = interruptible(|| true, || resolve("name.invalid", far()));
        assert!(asked.is_empty());
    }

    #[test]
    fn join_returns_when_the_thread_has_ended() {
        let thread = Builder::new().spawn(|| nap(Duration::from_millis(5))).unwrap();
        join(thread);
    }
}
