//! The clocks that bound every wait.

use std::time::Duration;

use crate::error::BootstrapError;

/// Time limits. *Liveness* finds processes that are gone or stopped, in two seconds; the *deadline*
/// ends waits for ranks that are alive but do not do their part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_moves_deadlines_and_is_checked() {
        let clocks = Timeouts::from_vars(&|name| (name == "SIDELANE_DEADLINE_MS").then(|| "1500".into()));
        assert_eq!(clocks, Ok(Timeouts { deadline: Duration::from_millis(1500), ..Timeouts::default() }));
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
}
