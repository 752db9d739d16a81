//! A point in time by which something must have happened.

use std::time::{Duration, Instant};

/// A point in time by which something must have happened.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Instant);

impl Deadline {
    /// This long from now.
    pub fn after(time: Duration) -> Self {
        Self(Instant::now() + time)
    }

    /// The earlier of this one and `time` from now.
    pub fn within(self, time: Duration) -> Self {
        Self(self.0.min(Instant::now() + time))
    }

    /// The remaining time; `None` when it has passed.
    pub fn left(self) -> Option<Duration> {
        self.0.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_that_has_passed_leaves_nothing() {
        assert_eq!(Deadline::after(Duration::ZERO).left(), None);
    }

    #[test]
    fn within_only_ever_shortens() {
        let soon = Deadline::after(Duration::from_secs(10));
        assert!(soon.within(Duration::from_secs(100)).left().unwrap() <= Duration::from_secs(10));
        assert!(soon.within(Duration::from_secs(1)).left().unwrap() <= Duration::from_secs(1));
    }
}
