//! Time slices of a thread that wakes next to threads that compute.
//!
//! Linux lets a thread that computes finish its slice, some milliseconds, before a woken one runs.
//! A woken thread that has requested shorter slices preempts it, as long as it has used no more
//! than its share.
//!
//! ```text
//!   compute    |======================================|..            |===========|..|=====================|
//!                       ^ woken                       |--|                        ^ woken
//!   transfer                                          turns alike                |--|  shorter ones
//! ```
//!
//! A shorter slice gives a thread no more time in all, so every thread may request it. Linux before
//! 6.12 ignores the request.

use std::time::Duration;

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

#[cfg(test)]
mod tests {
    use super::*;

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
