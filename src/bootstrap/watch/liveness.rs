//! Finds ranks that have been silent for too long: a state machine without a clock, which gets the
//! time from its caller.
//!
//! ```text
//!   heard(k) ──► last[k] = now            expired(now): now - last[k] >= limit  ──► k is silent
//!   looked ... gap ... looked             the observer slept: the gap does not count
//! ```
//!
//! A stopped process that wakes up finds every clock far ahead. Its own sleep must not count as the
//! others' silence, so time in which the observer did not look is no silence.

use std::time::{Duration, Instant};

/// Silence of a set of peers.
#[derive(Debug)]
pub(in crate::bootstrap) struct Liveness {
    limit: Duration,
    /// Longest time between two looks of an observer that is awake.
    stride: Duration,
    looked: Instant,
    last: Vec<Option<Instant>>,
}

impl Liveness {
    /// Watches `peers` peers, all heard `now`. An observer that is awake looks at least every
    /// `heartbeat`.
    pub(in crate::bootstrap) fn new(
        peers: usize,
        heartbeat: Duration,
        limit: Duration,
        now: Instant,
    ) -> Self {
        Liveness { limit, stride: heartbeat * 2, looked: now, last: vec![Some(now); peers] }
    }

    /// Something came from this peer.
    pub(in crate::bootstrap) fn heard(&mut self, peer: usize, now: Instant) {
        if let Some(Some(last)) = self.last.get_mut(peer) {
            *last = (*last).max(now);
        }
    }

    /// This peer is not watched any more.
    pub(in crate::bootstrap) fn forget(&mut self, peer: usize) {
        if let Some(last) = self.last.get_mut(peer) {
            *last = None;
        }
    }

    /// Checks all peers, after the observer has read all pending messages. Returns the silent peers
    /// and the length of their silence; each is returned once.
    pub(in crate::bootstrap) fn expired(&mut self, now: Instant) -> Vec<(usize, Duration)> {
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
    pub(in crate::bootstrap) fn next(&self) -> Option<Instant> {
        self.last.iter().flatten().min().map(|last| *last + self.limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    }
}
