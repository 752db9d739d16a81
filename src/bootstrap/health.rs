//! Watching: whether all ranks are alive, and the cause of the world's failure if one is not.
//!
//! ```text
//!   a peer falls silent      Liveness      ┐
//!   the launcher is gone     LauncherWatch ┼──►  Health    one word that every wait polls, one cause
//!   a connection ends        (hub)         ┘
//!   bounds of every wait     Timeouts
//!   the user interrupts      interruptible
//! ```
//!
//! **Health.** All waits of the library poll [`Health`] between two polls of their own flag, so a
//! poll must cost one load. The word is sticky and the first cause wins: a failing world produces
//! many secondary failures, and only the first one is the reason.
//!
//! **Liveness** finds ranks that have been silent for too long. It is a state machine without a
//! clock, which gets the time from its caller. A stopped process that wakes up finds every clock
//! far ahead. Its own sleep must not count as the others' silence, so time in which the observer
//! did not look is no silence.
//!
//! ```text
//!   heard(k) ──► last[k] = now            expired(now): now - last[k] >= limit  ──► k is silent
//!   looked ... gap ... looked             the observer slept: the gap does not count
//! ```
//!
//! **Launcher.** A launcher keeps the write end of a pipe, and its ranks inherit the read end. In
//! every kind of death, the kernel closes the write end, and each rank reads the end of the stream
//! at once. The inherited number itself stays as it is: open, and not closed on exec. A change
//! would have to trust the number to be a descriptor without another owner. That is unsafe code,
//! and this module has none; the number is only a claim of the environment. So programs that a rank
//! starts inherit the read end, too. That is harmless: they hold no write end, so the stream still
//! ends with the launcher.
//!
//! **Interrupts.** A program that embeds the library may learn of its user's interrupt (Ctrl-C)
//! only by a check in the waiting thread. So the thread registers its check, and long waits run it
//! now and then:
//!
//! ```text
//!   interruptible(ask, || ep.dispatch(..))
//!        wait: pause, yield, sleep --ask()?--> sleep --ask()?--> true: the wait ends with LaneError::Interrupted
//! ```
//!
//! A collective call that ends this way ends the world, since its peers cannot continue;
//! [`Window::wait_until`](crate::Window::wait_until) may be called again. Threads without a check,
//! such as those of relays, run none.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::OFlags;
use rustix::io::Errno;
use sidelane_core::with_methods;

use super::failed;
use super::identity::LauncherPipe;
use crate::error::{BootstrapError, Cause};
use crate::sync::failure::Failure;

/// The health of a world, as this rank sees it.
#[derive(Default)]
pub struct Health {
    failure: Failure<Cause>,
    absent: Mutex<BTreeSet<u32>>,
}

impl Health {
    /// A living world.
    pub fn new() -> Self {
        Health::default()
    }

    /// The status word: 0 while the world is healthy. Otherwise the low byte is the kind of the
    /// cause, the bits above it the rank the cause names.
    #[inline]
    pub fn status(&self) -> u32 {
        self.failure.status()
    }

    /// Why the world is dead.
    pub fn cause(&self) -> Option<Cause> {
        self.failure.cause().cloned()
    }

    /// Fails with the cause if the world is dead. One load while it lives.
    #[inline]
    pub fn check(&self) -> Result<(), Cause> {
        self.failure.cause().map_or(Ok(()), |cause| Err(cause.clone()))
    }

    /// Declares the world dead for this rank. False if it was dead already: the first cause stays.
    pub fn fail(&self, cause: Cause) -> bool {
        let Some(watchers) = self.failure.fail(word(&cause), cause) else { return false };
        if let Some(cause) = self.failure.cause() {
            // The panic of one may not keep others from hearing.
            watchers.iter().for_each(|watcher| {
                let heard = catch_unwind(AssertUnwindSafe(|| watcher(cause)));
                if heard.is_err() {
                    tracing::error!(%cause, "a watcher of the world's health panicked");
                }
            });
        }
        true
    }

    /// Calls `watcher` once when the world fails; at once if it has failed. For threads that sleep
    /// on events which a failed world will never deliver.
    pub fn on_failure(&self, watcher: impl Fn(&Cause) + Send + Sync + 'static) {
        if let Some(watcher) = self.failure.watch(Box::new(watcher))
            && let Some(cause) = self.failure.cause()
        {
            watcher(cause);
        }
    }

    /// Ranks known to be lost or to have left, ascending.
    pub fn absent(&self) -> Vec<u32> {
        lock(&self.absent).iter().copied().collect()
    }

    /// Whether a rank is known to be lost or to have left. A rank that leaves does not fail the
    /// world: waits for that rank query this.
    pub fn is_absent(&self, rank: u32) -> bool {
        lock(&self.absent).contains(&rank)
    }

    /// Notes that a rank is lost or has left.
    pub(super) fn note_absent(&self, rank: u32) {
        lock(&self.absent).insert(rank);
    }
}

impl fmt::Debug for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Health")
            .field("cause", &self.failure.cause())
            .field("absent", &self.absent())
            .finish()
    }
}

/// Encoding of a cause in the status word: kind in the low byte, rank above.
fn word(cause: &Cause) -> u32 {
    let (kind, rank) = match *cause {
        Cause::Lost { rank, .. } => (1, rank),
        Cause::LauncherGone { .. } => (2, 0),
        Cause::Evicted { rank, .. } => (3, rank),
        Cause::Stalled { rank, .. } => (4, rank),
        Cause::Cancelled { by } => (5, by),
        Cause::Protocol { rank } => (6, rank),
        Cause::Connection { rank, .. } => (7, rank),
        Cause::Nic { by } => (8, by),
        Cause::Panicked { by, .. } => (9, by),
    };
    kind | rank << 8
}

/// A lock that survives a panicking holder: the state behind the mutexes of this module is
/// consistent after each statement.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Silence of a set of peers.
#[derive(Debug)]
pub(super) struct Liveness {
    limit: Duration,
    /// Longest time between two looks of an observer that is awake.
    stride: Duration,
    looked: Instant,
    last: Vec<Option<Instant>>,
}

impl Liveness {
    /// Watches `peers` peers, all heard `now`. An observer that is awake looks at least every
    /// `heartbeat`.
    pub(super) fn new(peers: usize, heartbeat: Duration, limit: Duration, now: Instant) -> Self {
        Liveness { limit, stride: heartbeat * 2, looked: now, last: vec![Some(now); peers] }
    }

    /// Something came from this peer.
    pub(super) fn heard(&mut self, peer: usize, now: Instant) {
        if let Some(Some(last)) = self.last.get_mut(peer) {
            *last = (*last).max(now);
        }
    }

    /// This peer is watched from now on.
    pub(super) fn watch(&mut self, peer: usize, now: Instant) {
        if let Some(last) = self.last.get_mut(peer) {
            *last = Some(now);
        }
    }

    /// This peer is not watched any more.
    pub(super) fn forget(&mut self, peer: usize) {
        if let Some(last) = self.last.get_mut(peer) {
            *last = None;
        }
    }

    /// Checks all peers, after the observer has read all pending messages. Returns the silent peers
    /// and the length of their silence; each is returned once.
    pub(super) fn expired(&mut self, now: Instant) -> Vec<(usize, Duration)> {
        let gap = now.saturating_duration_since(self.looked);
        self.looked = now;
        // Counts only the time beyond the stride: an observer that is merely slow must still notice
        // silence.
        let slept = gap.saturating_sub(self.stride);
        let mut silent = Vec::new();
        for (peer, slot) in self.last.iter_mut().enumerate() {
            let Some(last) = slot else { continue };
            *last = (*last + slept).min(now);
            let silence = now.saturating_duration_since(*last);
            if silence >= self.limit {
                silent.push((peer, silence));
                *slot = None;
            }
        }
        silent
    }

    /// When the next peer will have been silent for too long, if nothing comes.
    pub(super) fn next(&self) -> Option<Instant> {
        self.last.iter().flatten().min().map(|last| *last + self.limit)
    }
}

/// The read end of the launcher's pipe.
#[derive(Debug)]
pub(super) struct LauncherWatch {
    pipe: File,
    pid: u32,
}

impl LauncherWatch {
    /// Opens the inherited end again, through `/proc`: the number alone is a claim of the
    /// environment, and this turns it into a descriptor of our own or an error.
    pub(super) fn open(pipe: LauncherPipe) -> Result<Self, BootstrapError> {
        let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC).bits() as i32;
        let path = format!("/proc/self/fd/{}", pipe.fd);
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path);
        let pipe_end = file.map_err(|error| failed("open of SIDELANE_LAUNCHER_FD", &error))?;
        // Another kind of file may never end, or end at once.
        if !pipe_end.metadata().is_ok_and(|facts| facts.file_type().is_fifo()) {
            let (name, expected) = ("SIDELANE_LAUNCHER_FD", "a pipe to the launcher");
            return Err(BootstrapError::BadVariable { name, value: pipe.fd.to_string(), expected });
        }
        Ok(LauncherWatch { pipe: pipe_end, pid: pipe.pid })
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    pub(super) fn poll_fd(&self) -> PollFd<'_> {
        PollFd::new(&self.pipe, PollFlags::IN)
    }

    /// Whether the stream has ended. Bytes from the launcher are read and ignored.
    pub(super) fn is_gone(&self) -> bool {
        let mut buffer = [0; 64];
        loop {
            match rustix::io::read(&self.pipe, &mut buffer) {
                Ok(0) => return true,
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return false,
                Err(_) => return true,
            }
        }
    }
}

/// Time limits. *Liveness* finds processes that are gone or stopped, in two seconds; the *deadline*
/// ends waits for ranks that are alive but do not do their part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Timeouts {
    /// Time between two heartbeats of a rank.
    pub heartbeat: Duration,
    /// Silence after which a rank is lost. With one more scheduling delay a stopped rank is named
    /// in 2 s.
    pub liveness: Duration,
    /// Default bound of a wait for a living rank.
    pub deadline: Duration,
    /// Bound of meeting the other ranks.
    pub rendezvous: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts {
            heartbeat: Duration::from_millis(250),
            liveness: Duration::from_millis(1750),
            deadline: Duration::from_secs(600),
            rendezvous: Duration::from_secs(60),
        }
    }
}

impl Timeouts {
    with_methods! {
        with_heartbeat(heartbeat: Duration),
        with_liveness(liveness: Duration),
        with_deadline(deadline: Duration),
        with_rendezvous(rendezvous: Duration),
    }

    /// The defaults, with `SIDELANE_DEADLINE_MS`, `SIDELANE_RENDEZVOUS_MS` and
    /// `SIDELANE_LIVENESS_MS` if `lookup` has them. The last is for ranks with slow heartbeats: in
    /// a debugger, or under valgrind.
    pub fn from_vars(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Self, BootstrapError> {
        let defaults = Timeouts::default();
        Ok(Timeouts {
            deadline: millis(lookup, "SIDELANE_DEADLINE_MS", ANY)?.unwrap_or(defaults.deadline),
            rendezvous: millis(lookup, "SIDELANE_RENDEZVOUS_MS", ANY)?.unwrap_or(defaults.rendezvous),
            liveness: millis(lookup, "SIDELANE_LIVENESS_MS", FOUR_BEATS)?.unwrap_or(defaults.liveness),
            ..defaults
        })
    }

    /// [`Timeouts::from_vars`] with the environment of this process.
    pub fn from_env() -> Result<Self, BootstrapError> {
        Timeouts::from_vars(&|name| std::env::var(name).ok())
    }
}

const ANY: (u64, &str) = (1, "milliseconds, 1 to 86400000");
/// Silence of less than four heartbeats means nothing.
const FOUR_BEATS: (u64, &str) = (1000, "milliseconds, 1000 to 86400000");

fn millis(
    lookup: &dyn Fn(&str) -> Option<String>,
    name: &'static str,
    (least, expected): (u64, &'static str),
) -> Result<Option<Duration>, BootstrapError> {
    // A day bounds it, so that adding a clock to a point in time cannot overflow.
    const DAY: u64 = 24 * 3600 * 1000;
    let Some(value) = lookup(name) else { return Ok(None) };
    match value.trim().parse() {
        Ok(ms) if (least..=DAY).contains(&ms) => Ok(Some(Duration::from_millis(ms))),
        _ => Err(BootstrapError::BadVariable { name, value, expected }),
    }
}

/// The longest time between two checks, besides the length of a sleep.
pub(super) const EVERY: Duration = Duration::from_millis(20);

#[derive(Clone)]
struct InterruptCheck {
    ask: Rc<dyn Fn() -> bool>,
    asked: Instant,
}

thread_local! {
    static QUESTION: RefCell<Option<InterruptCheck>> = const { RefCell::new(None) };
}

/// Puts back the question of the caller's caller, whichever way the call ends.
struct Restore(Option<InterruptCheck>);

impl Drop for Restore {
    fn drop(&mut self) {
        QUESTION.replace(self.0.take());
    }
}

/// Runs a call whose waits in this thread end when `ask` requests it. Long waits call `ask` about
/// every 20 ms, short waits never.
pub fn interruptible<T>(ask: impl Fn() -> bool + 'static, call: impl FnOnce() -> T) -> T {
    let question = InterruptCheck { ask: Rc::new(ask), asked: Instant::now() };
    let _restore = Restore(QUESTION.replace(Some(question)));
    call()
}

/// Whether this thread has a check. Waits that do not poll must wake up now and then to run it.
pub(crate) fn has_interrupt_check() -> bool {
    QUESTION.with_borrow(Option::is_some)
}

/// Whether this thread's user wants to stop.
pub(crate) fn interrupted() -> bool {
    let due = QUESTION.with_borrow_mut(|question| {
        let question = question.as_mut()?;
        let now = Instant::now();
        let due = now.duration_since(question.asked) >= EVERY;
        due.then(|| {
            question.asked = now;
            Rc::clone(&question.ask)
        })
    });
    due.is_some_and(|ask| ask())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::os::fd::AsRawFd;
    use std::sync::{Arc, mpsc};

    use super::*;

    #[test]
    fn the_first_cause_stays() {
        let health = Health::new();
        assert_eq!((health.check(), health.status(), health.cause()), (Ok(()), 0, None));
        assert!(health.fail(Cause::Cancelled { by: 3 }));
        assert!(!health.fail(Cause::Protocol { rank: 1 }));
        assert_eq!(health.check(), Err(Cause::Cancelled { by: 3 }));
        assert_eq!(health.status(), 5 | 3 << 8);
    }

    #[test]
    fn watchers_hear_of_a_failure_before_and_after_it() {
        let health = Arc::new(Health::new());
        let (tell, heard) = mpsc::channel();
        let late = tell.clone();
        health.on_failure(move |cause| tell.send(cause.clone()).unwrap());
        assert!(heard.try_recv().is_err(), "nothing has happened yet");
        health.fail(Cause::Protocol { rank: 2 });
        health.on_failure(move |cause| late.send(cause.clone()).unwrap());
        assert_eq!(heard.iter().take(2).collect::<Vec<_>>(), vec![Cause::Protocol { rank: 2 }; 2]);
    }

    #[test]
    fn absence_alone_does_not_kill_a_world() {
        let health = Health::new();
        health.note_absent(4);
        health.note_absent(1);
        assert_eq!(health.absent(), [1, 4]);
        assert!(health.is_absent(4) && !health.is_absent(2));
        assert_eq!(health.check(), Ok(()));
    }

    const BEAT: Duration = Duration::from_millis(250);
    const LIMIT: Duration = Duration::from_millis(1750);

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_silent_peer_is_named_once_and_within_the_limit() {
        let start = Instant::now();
        let mut liveness = Liveness::new(3, BEAT, LIMIT, start);
        let mut named = Vec::new();
        for step in 1..=20 {
            let now = start + BEAT * step;
            liveness.heard(0, now);
            if step <= 4 {
                liveness.heard(1, now);
            }
            liveness.heard(2, now);
            named.extend(liveness.expired(now).into_iter().map(|(peer, silence)| (peer, silence, step)));
        }
        assert_eq!(named, [(1, LIMIT, 4 + 7)], "silent after step 4, named 1750 ms later");
    }

    #[test]
    fn a_sleeping_observer_blames_nobody_for_its_sleep() {
        let start = Instant::now();
        let mut liveness = Liveness::new(2, BEAT, LIMIT, start);
        assert_eq!(liveness.expired(start + BEAT), []);
        let woken = start + Duration::from_secs(60);
        assert_eq!(liveness.expired(woken), [], "the gap is no silence of others");
        // Awake again: a peer that stays silent is returned after the limit, less a stride and the
        // silence before the sleep.
        let mut named = Vec::new();
        for step in 1..=8 {
            let now = woken + BEAT * step;
            liveness.heard(0, now);
            named.extend(liveness.expired(now).into_iter().map(|(peer, _)| (peer, step)));
        }
        assert_eq!(named, [(1, 4)]);
    }

    #[test]
    fn a_slow_observer_still_notices_silence() {
        let start = Instant::now();
        let mut liveness = Liveness::new(1, BEAT, LIMIT, start);
        let named = (1..9).find(|&second| !liveness.expired(start + ms(1000) * second).is_empty());
        assert_eq!(named, Some(4), "half a second of silence is counted per look");
    }

    #[test]
    fn the_next_deadline_is_that_of_the_longest_silence() {
        let start = Instant::now();
        let mut liveness = Liveness::new(2, BEAT, LIMIT, start);
        liveness.heard(0, start + ms(100));
        assert_eq!(liveness.next(), Some(start + LIMIT));
        liveness.forget(1);
        assert_eq!(liveness.next(), Some(start + ms(100) + LIMIT));
        liveness.forget(0);
        assert_eq!(liveness.next(), None);
        liveness.heard(0, start + LIMIT * 9);
        assert_eq!(liveness.next(), None, "a forgotten peer stays forgotten");
        liveness.watch(0, start + LIMIT * 9);
        assert_eq!(liveness.next(), Some(start + LIMIT * 10));
    }

    #[test]
    fn the_end_of_the_pipe_is_the_end_of_the_launcher() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let launcher = LauncherWatch::open(LauncherPipe { fd: reader.as_raw_fd() as u32, pid: 7 }).unwrap();
        assert!(!launcher.is_gone());
        rustix::io::write(&writer, b"hello").unwrap();
        assert!(!launcher.is_gone(), "what it says does not matter");
        drop(writer);
        assert!(launcher.is_gone());
    }

    #[test]
    fn a_number_that_is_no_descriptor_is_an_error() {
        let seen = LauncherWatch::open(LauncherPipe { fd: 999_999, pid: 7 });
        assert!(matches!(seen, Err(BootstrapError::System { .. })), "{seen:?}");
    }

    #[test]
    fn the_environment_moves_deadlines_and_is_checked() {
        let timeouts = Timeouts::from_vars(&|name| (name == "SIDELANE_DEADLINE_MS").then(|| "1500".into()));
        assert_eq!(timeouts, Ok(Timeouts { deadline: Duration::from_millis(1500), ..Timeouts::default() }));
        for bad in ["0", "-1", "ten", "", "86400001"] {
            let seen = Timeouts::from_vars(&|name| (name == "SIDELANE_RENDEZVOUS_MS").then(|| bad.into()));
            assert!(
                matches!(seen, Err(BootstrapError::BadVariable { name: "SIDELANE_RENDEZVOUS_MS", .. })),
                "{bad:?}: {seen:?}"
            );
        }
        let patient = |text: &'static str| {
            Timeouts::from_vars(&|name| (name == "SIDELANE_LIVENESS_MS").then(|| text.into()))
                .map(|c| c.liveness)
        };
        assert_eq!(patient("60000"), Ok(Duration::from_secs(60)));
        assert!(matches!(
            patient("999"),
            Err(BootstrapError::BadVariable { name: "SIDELANE_LIVENESS_MS", .. })
        ));
    }

    fn poll_until_interrupted() {
        while !interrupted() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_question_is_asked_until_it_says_yes_and_forgotten_with_its_call() {
        let asked = Rc::new(Cell::new(0));
        let count = Rc::clone(&asked);
        interruptible(
            move || {
                count.set(count.get() + 1);
                count.get() == 3
            },
            poll_until_interrupted,
        );
        assert_eq!(asked.get(), 3);
        assert!(!interrupted());
        assert_eq!(Rc::strong_count(&asked), 1);
    }

    #[test]
    fn of_nested_calls_the_inner_one_is_asked() {
        interruptible(
            || true,
            || {
                interruptible(|| false, || assert!(!interrupted()));
                poll_until_interrupted();
            },
        );
    }
}
