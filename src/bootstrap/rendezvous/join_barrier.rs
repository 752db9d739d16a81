//! The ranks that have come to a rendezvous, and when it may begin: a state machine without
//! sockets, which gets the time from its caller.
//!
//! ```text
//!   first meeting   begins when all `size` ranks are here
//!   rebuild         begins when everyone not known absent is here, or a short window after the second came
//! ```
//!
//! The window is for ranks that died unnoticed. It opens with the second arrival: a rank alone
//! never concludes that it is the only one left.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

/// The gathering of a world.
#[derive(Debug)]
pub(in crate::bootstrap) struct JoinBarrier {
    size: u32,
    window: Option<Duration>,
    here: BTreeSet<u32>,
    second: Option<Instant>,
}

impl JoinBarrier {
    /// The first meeting of `size` ranks.
    pub(super) fn first(size: u32) -> Self {
        JoinBarrier { size, window: None, here: BTreeSet::new(), second: None }
    }

    /// The survivors of a world of `size` ranks meet again.
    pub(in crate::bootstrap) fn again(size: u32, window: Duration) -> Self {
        JoinBarrier { window: Some(window), ..JoinBarrier::first(size) }
    }

    /// A rank comes. False if it is here already or not of this world.
    pub(in crate::bootstrap) fn join(&mut self, rank: u32, now: Instant) -> bool {
        let joined = rank < self.size && self.here.insert(rank);
        if joined && self.here.len() == 2 {
            self.second = Some(now);
        }
        joined
    }

    /// A rank goes away before the meeting began.
    pub(in crate::bootstrap) fn part(&mut self, rank: u32) {
        self.here.remove(&rank);
        if self.here.len() < 2 {
            self.second = None;
        }
    }

    /// Whether the rendezvous is over for all when one rank gives up: without that one it could
    /// never begin.
    pub(in crate::bootstrap) fn needs_all(&self) -> bool {
        self.window.is_none()
    }

    /// The ranks that have not come, without those known to be absent.
    pub(in crate::bootstrap) fn missing(&self, absent: &[u32]) -> Vec<u32> {
        (0..self.size).filter(|rank| !self.here.contains(rank) && !absent.contains(rank)).collect()
    }

    /// The members, ascending, if the meeting may begin.
    pub(in crate::bootstrap) fn members(&self, absent: &[u32], now: Instant) -> Option<Vec<u32>> {
        let all = match self.window {
            None => self.here.len() == self.size as usize,
            Some(_) => !self.here.is_empty() && self.missing(absent).is_empty(),
        };
        let closed = self.closes().is_some_and(|closes| now >= closes);
        (all || closed).then(|| self.here.iter().copied().collect())
    }

    /// When the window closes.
    pub(in crate::bootstrap) fn closes(&self) -> Option<Instant> {
        Some(self.second? + self.window?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_meeting_waits_for_everyone() {
        let now = Instant::now();
        let mut barrier = JoinBarrier::first(3);
        assert!(barrier.join(2, now) && barrier.join(0, now));
        assert!(!barrier.join(2, now), "taken");
        assert!(!barrier.join(3, now), "out of range");
        let later = now + Duration::from_secs(9999);
        assert_eq!(barrier.members(&[1], later), None, "even a rank known lost is waited for");
        assert_eq!(barrier.missing(&[]), [1]);
        assert!(barrier.join(1, now));
        assert_eq!(barrier.members(&[], now), Some(vec![0, 1, 2]));
    }

    #[test]
    fn a_rebuild_begins_with_everyone_not_known_absent() {
        let now = Instant::now();
        let mut barrier = JoinBarrier::again(4, Duration::from_secs(3));
        barrier.join(3, now);
        barrier.join(1, now);
        assert_eq!(barrier.members(&[2], now), None);
        assert_eq!(barrier.missing(&[2]), [0]);
        assert_eq!(barrier.members(&[2, 0], now), Some(vec![1, 3]));
    }

    #[test]
    fn the_window_opens_with_the_second_arrival() {
        let now = Instant::now();
        let window = Duration::from_secs(3);
        let mut barrier = JoinBarrier::again(4, window);
        barrier.join(1, now);
        let later = now + window * 9;
        assert_eq!(barrier.members(&[], later), None, "alone, it waits");
        barrier.join(2, later);
        assert_eq!(barrier.members(&[], later + window / 2), None);
        assert_eq!(barrier.members(&[], later + window), Some(vec![1, 2]));
        barrier.part(2);
        assert_eq!(barrier.members(&[], later + window), None, "alone again");
        assert_eq!(barrier.members(&[0, 2, 3], later), Some(vec![1]), "known to be the only one");
    }
}
