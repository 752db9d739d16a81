//! Flags, and waits for them: poll, then serve the connections, then yield, then sleep. Every wait
//! ends.
//!
//! **A flag** is a word in a cache line of its own:
//!
//! ```text
//!   byte 0    value: epoch, number of the call, part of the call; one writer, only grows
//!   byte 8    number of threads that sleep on it
//!   byte 16   tag of even calls        kind and refusal, options | handle | base
//!   byte 40   tag of odd calls
//! ```
//!
//! The tag is written before the value and read after it. Two tags are enough: a writer can be one
//! call ahead of a reader, never two, because each call waits for the entry of every rank.
//!
//! **A wait** for its value:
//!
//! ```text
//!   poll     about a microsecond       the value arrives from a running rank within tens of nanoseconds
//!   pause    connections are served
//!   yield                              the awaited rank may need this core
//!   sleep    until woken, in slices    a failed world is noticed even if nothing wakes the sleeper
//! ```
//!
//! A thread that wakes next to threads that compute requests short time slices. Linux lets a thread
//! that computes finish its slice, some milliseconds, before a woken one runs. A woken thread with
//! shorter slices preempts it, as long as it has used no more than its share.
//!
//! ```text
//!   compute    |======================================|..            |===========|..|=====================|
//!                       ^ woken                       |--|                        ^ woken
//!   transfer                                          equal slices               |--|  shorter ones
//! ```
//!
//! A shorter slice gives a thread no more time in all, so every thread may request it. Linux before
//! 6.12 ignores the request.

use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::futex;
use rustix::time::{ClockId, clock_gettime};

use crate::bootstrap::wait::futex_for;
use crate::bootstrap::{Health, interrupted};
use crate::error::{Cause, Error, LaneError, LostReason};
use crate::memory::access;
use crate::schedule::{Calls, ControlLayout, Tag};
use crate::sync::flag::FlagWords;

/// View of one flag line in mapped memory.
#[derive(Clone, Copy, Debug)]
pub struct FlagLine<'a> {
    words: &'a [AtomicU64; 8],
}

impl<'a> FlagLine<'a> {
    /// A line at this address.
    ///
    /// # Safety
    /// 64 bytes, aligned to 8, mapped for `'a`, used as a flag line by every process that maps
    /// them.
    pub unsafe fn new(at: NonNull<u8>) -> Self {
        // SAFETY: by the contract above; atomics may be shared with other processes.
        FlagLine { words: unsafe { at.cast().as_ref() } }
    }

    /// The current value, with everything its writer did before.
    #[inline]
    pub fn value(self) -> u64 {
        self.flag().value()
    }

    /// Raises the value, tag first, and wakes its sleepers. For the word's only writer.
    #[inline]
    pub fn raise(self, value: u64, tag: Option<&Tag>) {
        if let Some(tag) = tag {
            for (word, value) in self.words[tag_at(value)..].iter().zip(tag.to_words()) {
                // The value's release, below, publishes it. Tags of two values in turn lie apart,
                // so a slow reader of the last tag does not see this one.
                word.store(value, Ordering::Relaxed);
            }
        }
        self.flag().raise(value, full_fence, || self.wake());
    }

    #[cold]
    fn wake(self) {
        let _ = futex::wake(self.low_half(), futex::Flags::empty(), u32::MAX >> 1);
    }

    /// The tag that came with this value.
    pub fn tag(self, value: u64) -> Tag {
        let at = tag_at(value);
        access::read(self.words[at].as_ptr().cast(), ControlLayout::TAG_BYTES);
        // Relaxed: the caller has loaded the value with acquire, and the tag lies behind it.
        Tag::from_words(std::array::from_fn(|i| self.words[at + i].load(Ordering::Relaxed)))
    }

    /// First byte of the tag that comes with this value.
    pub(super) fn tag_offset(value: u64) -> u64 {
        tag_at(value) as u64 * 8
    }

    /// Sleeps until the value is no longer `seen`, or for `slice`.
    pub fn sleep(self, seen: u64, slice: Duration) {
        self.flag().sleep(seen, || futex_for(self.low_half(), seen as u32, slice));
    }

    fn flag(self) -> FlagWords<'a> {
        FlagWords::new(&self.words[0], half(&self.words[1], 0))
    }

    /// A futex is 32 bits wide: the half that changes with every value.
    fn low_half(self) -> &'a AtomicU32 {
        half(&self.words[0], if cfg!(target_endian = "little") { 0 } else { 1 })
    }
}

/// A fence of all orders. On x86-64 the compiler makes a locked instruction of one, during which
/// readers of the line that was just written have to wait: between distant cores that was a quarter
/// of a signal's way.
#[inline]
fn full_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 CPU has SSE2.
    unsafe {
        std::arch::x86_64::_mm_mfence()
    }
    // Elsewhere the compiler's own is the machine's.
    #[cfg(not(target_arch = "x86_64"))]
    std::sync::atomic::fence(Ordering::SeqCst);
}

fn tag_at(value: u64) -> usize {
    ((ControlLayout::TAGS + Calls::parity_of(value) * ControlLayout::TAG_BYTES) / 8) as usize
}

fn half(word: &AtomicU64, index: usize) -> &AtomicU32 {
    // SAFETY: an aligned 8-byte word holds two aligned 4-byte words; both views are atomic.
    unsafe { &*(word.as_ptr().cast::<AtomicU32>().add(index)) }
}

/// Looks at the flag alone, for about a microsecond, with a pause between them: without it the line
/// is asked for again while its writer still needs it. Where ranks share cores, the awaited one may
/// need this one.
const LOOKS: u32 = 32;
const LOOKS_OVERSUBSCRIBED: u32 = 2;
/// Bounds of the three steps. Where ranks share cores, pausing only keeps the awaited one from
/// running.
const PAUSES: u32 = 50;
const PAUSES_OVERSUBSCRIBED: u32 = 4;
const YIELDS: u32 = 400;
/// If nothing wakes a thread that sleeps on a flag, it sleeps only after some milliseconds.
const YIELDS_SILENT: u32 = 20_000;
/// The longest time between two checks of a waiter whether the world is alive.
const SLICE: Duration = Duration::from_millis(10);
/// The longest sleep, if nothing wakes a thread that sleeps on a flag.
pub(super) const SLEEP_INTERVAL: Duration = Duration::from_micros(50);
/// The longest time between two polls of a waiter that is awake. A longer gap is a stop of this
/// process, which no other rank caused, so it does not count as waiting.
const STRIDE: Duration = Duration::from_millis(500);

thread_local! {
    static BESIDE_COMPUTE: Cell<bool> = const { Cell::new(false) };
}

/// From now on this thread sleeps where it would pause and yield, and preempts others when it
/// wakes. Next to threads that compute on the same cores, a thread that yields runs again only
/// after their slices, some milliseconds.
pub fn yield_to_compute() {
    BESIDE_COMPUTE.set(true);
    request_short_timeslice();
}

/// Whether this thread is one of those.
pub(super) fn is_beside_compute() -> bool {
    BESIDE_COMPUTE.get()
}

/// How long to wait, and what ends it early.
#[derive(Clone, Copy, Debug)]
pub struct WaitLimits<'a> {
    /// Ends the wait when the world has failed.
    pub health: &'a Health,
    /// Whether this machine has fewer cores than ranks.
    pub oversubscribed: bool,
    /// The rank (of the world) that is awaited: ends the wait when it has left.
    pub awaited: u32,
    /// Ends the wait when the awaited rank is alive but silent for so long.
    pub deadline: Duration,
    /// Whether signals arrive that wake no thread.
    pub silent: bool,
}

/// Why a wait ended without its value.
#[derive(Clone, Debug, PartialEq)]
pub enum WaitError {
    /// The world failed.
    Dead(Cause),
    /// The deadline passed.
    Late {
        /// Time waited.
        waited: Duration,
    },
    /// The user of this thread wants to stop.
    Asked,
}

/// A wait that ended without its value: its place and its progress, for the error.
#[derive(Debug)]
pub(super) struct WaitProgress {
    /// The rank that waited.
    pub rank: u32,
    /// The rank that was awaited.
    pub peer: u32,
    /// Name of the lane.
    pub lane: &'static str,
    /// Number of the flag; `u32::MAX` for credit.
    pub flag: u32,
    /// Value that was awaited.
    pub awaited: u64,
    /// Value last seen.
    pub seen: u64,
}

impl WaitProgress {
    /// The error of the wait. A connection's `fault` says more than the cause of a failed world.
    pub fn error(self, why: WaitError, fault: impl FnOnce() -> Option<LaneError>) -> Error {
        let WaitProgress { rank, peer, lane, flag, awaited, seen } = self;
        match why {
            WaitError::Dead(cause) => fault().map_or(cause.into(), Error::from),
            WaitError::Asked => LaneError::Interrupted { rank, peer }.into(),
            WaitError::Late { waited } => {
                LaneError::Deadline { rank, peer, lane, flag, awaited, seen, waited }.into()
            }
        }
    }
}

/// State of one wait: which step of the ladder it is on.
#[derive(Debug)]
pub struct Waiter<'a> {
    limits: WaitLimits<'a>,
    beside_compute: bool,
    turns: u32,
    waited: Duration,
    looked: Option<Instant>,
    absent: bool,
}

impl<'a> Waiter<'a> {
    /// A wait that has not begun to wait.
    pub fn new(limits: WaitLimits<'a>) -> Self {
        let beside_compute = BESIDE_COMPUTE.get();
        Waiter { limits, beside_compute, turns: 0, waited: Duration::ZERO, looked: None, absent: false }
    }

    /// One turn: returns at once while pausing, after a moment later on. `sleep` is called on the
    /// last step with the longest time to sleep, and should return early when there is news.
    ///
    /// # Errors
    /// [`WaitError`] if the world failed, the deadline passed, or the caller asks for it.
    pub fn turn(&mut self, sleep: impl FnOnce(Duration)) -> Result<(), WaitError> {
        self.turns = self.turns.saturating_add(1);
        let pauses = match self.limits.oversubscribed || self.beside_compute {
            true => PAUSES_OVERSUBSCRIBED,
            false => PAUSES,
        };
        if self.turns <= pauses {
            std::hint::spin_loop();
            return Ok(());
        }
        self.limits.health.check().map_err(WaitError::Dead)?;
        let yields = match (self.beside_compute, self.limits.silent) {
            (true, _) => 0,
            (false, true) => YIELDS_SILENT,
            (false, false) => YIELDS,
        };
        if self.turns <= pauses + yields {
            std::thread::yield_now();
            return Ok(());
        }
        // Its last signals before it left may still be in flight: poll once more.
        let absent = self.limits.health.is_absent(self.limits.awaited);
        if std::mem::replace(&mut self.absent, absent) {
            // Ranks leave after their world has failed: then the cause, which came first, is the
            // reason.
            self.limits.health.check().map_err(WaitError::Dead)?;
            return Err(WaitError::Dead(Cause::Lost { rank: self.limits.awaited, how: LostReason::Closed }));
        }
        let now = Instant::now();
        self.waited += now.duration_since(self.looked.replace(now).unwrap_or(now)).min(STRIDE);
        let waited = self.waited;
        if waited >= self.limits.deadline {
            return Err(WaitError::Late { waited });
        }
        if interrupted() {
            return Err(WaitError::Asked);
        }
        let slice = if self.limits.silent { SLEEP_INTERVAL } else { SLICE };
        sleep(slice.min(self.limits.deadline - waited));
        Ok(())
    }
}

/// Waits until a flag has at least `value`; `progress` is called on every turn.
///
/// # Errors
/// The value last seen, and [`WaitError`].
pub(super) fn until(
    flag: FlagLine<'_>,
    value: u64,
    limits: WaitLimits<'_>,
    progress: impl FnMut(),
) -> Result<(), (u64, WaitError)> {
    if poll_once(flag, value, limits.oversubscribed) {
        Ok(())
    } else {
        wait_slow(flag, value, limits, progress)
    }
}

/// The first step, before anything is asked of the world: whether a flag has at least `value` now
/// or in a moment.
#[inline]
pub(super) fn poll_once(flag: FlagLine<'_>, value: u64, oversubscribed: bool) -> bool {
    for _ in 0..if oversubscribed || BESIDE_COMPUTE.get() { LOOKS_OVERSUBSCRIBED } else { LOOKS } {
        if flag.value() >= value {
            return true;
        }
        std::hint::spin_loop();
    }
    false
}

/// The other steps of [`until`].
///
/// # Errors
/// As [`until`].
pub(super) fn wait_slow(
    flag: FlagLine<'_>,
    value: u64,
    limits: WaitLimits<'_>,
    mut progress: impl FnMut(),
) -> Result<(), (u64, WaitError)> {
    let mut waiter = Waiter::new(limits);
    loop {
        let seen = flag.value();
        if seen >= value {
            return Ok(());
        }
        progress();
        if let Err(why) = waiter.turn(|slice| flag.sleep(seen, slice)) {
            // A value that came with this very turn counts.
            let seen = flag.value();
            return if seen >= value { Ok(()) } else { Err((seen, why)) };
        }
    }
}

/// The shortest that Linux gives. What moves rows of a chunk takes little longer.
const TURN: Duration = Duration::from_micros(100);

/// From now on this thread has short turns, if it is scheduled as threads commonly are. Where that
/// cannot be had, it stays as it is.
pub fn request_short_timeslice() {
    if let Some(mut attributes) = attributes() {
        attributes.sched_runtime = TURN.as_nanos() as u64;
        // SAFETY: the attributes outlive the call, and say their size. 0 is this thread.
        let _ = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    }
}

/// How this thread is scheduled, if that is by turns.
fn attributes() -> Option<libc::sched_attr> {
    let size = size_of::<libc::sched_attr>() as u32;
    let mut attributes = libc::sched_attr {
        size,
        sched_policy: 0,
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: no more than `size` bytes are written, and all of them may have any value. 0 is this
    // thread.
    let got = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    let by_turns = [libc::SCHED_OTHER, libc::SCHED_BATCH].contains(&(attributes.sched_policy as i32));
    (got == 0 && by_turns).then_some(attributes)
}

/// Nanoseconds of the machine's monotonic clock, which all its processes share. A
/// [`Timeline`](crate::exec::Timeline)'s times are of it.
pub fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::bootstrap::{Timeouts, interruptible, threads};

    /// Waits for a rank that has left, and that raised its flag between this wait's look at the
    /// flag and its look at the absent, at the given turn.
    fn left_behind(turn: Option<u32>) -> Result<(), (u64, WaitError)> {
        let mut hubs = threads(2, Timeouts::default());
        drop(hubs.pop());
        let words: [AtomicU64; 8] = Default::default();
        // SAFETY: 64 bytes, aligned to 8, that outlive the line.
        let line = unsafe { FlagLine::new(std::ptr::NonNull::from(&words).cast()) };
        let deadline = Duration::from_secs(60);
        let mut turns = 0;
        let limits = WaitLimits {
            health: hubs[0].health(),
            oversubscribed: false,
            deadline,
            awaited: 1,
            silent: false,
        };
        until(line, 1, limits, || {
            turns += 1;
            if Some(turns) == turn {
                line.raise(1, None);
            }
        })
    }

    #[test]
    fn wait_ends_on_user_request_and_leaves_world_alive() {
        let hubs = threads(2, Timeouts::default());
        let words: [AtomicU64; 8] = Default::default();
        // SAFETY: 64 bytes, aligned to 8, that outlive the line.
        let line = unsafe { FlagLine::new(std::ptr::NonNull::from(&words).cast()) };
        let deadline = Duration::from_secs(60);
        let limits = WaitLimits {
            health: hubs[0].health(),
            oversubscribed: false,
            deadline,
            awaited: 1,
            silent: false,
        };
        let ended = interruptible(|| true, || until(line, 1, limits, || {}));
        assert_eq!(ended, Err((0, WaitError::Asked)));
        assert_eq!(hubs[0].health().check(), Ok(()));
    }

    #[test]
    fn signal_of_a_rank_that_left_counts() {
        assert_eq!(left_behind(Some(PAUSES + YIELDS + 1)), Ok(()));
    }

    #[test]
    fn a_rank_that_left_without_a_word_ends_the_wait() {
        let lost = Cause::Lost { rank: 1, how: LostReason::Closed };
        assert_eq!(left_behind(None), Err((0, WaitError::Dead(lost))));
    }

    /// Whether this kernel knows turns of a thread's own.
    fn known() -> bool {
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|n| n.parse::<u32>().ok());
        (numbers.next(), numbers.next()) >= (Some(6), Some(12))
    }

    #[test]
    fn turns_become_short_and_nothing_else_changes() {
        let before = attributes().expect("threads of tests have turns");
        request_short_timeslice();
        let after = attributes().expect("they still do");
        assert_eq!(
            (after.sched_policy, after.sched_flags, after.sched_nice, after.sched_priority),
            (before.sched_policy, before.sched_flags, before.sched_nice, before.sched_priority)
        );
        if known() {
            assert_eq!(after.sched_runtime, TURN.as_nanos() as u64);
        }
    }
}
