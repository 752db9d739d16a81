//! Why a world is dead.

use std::time::Duration;

/// How a rank was found to be gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub enum LostReason {
    /// Its connection closed: the process ended.
    Closed,
    /// Its connection is open, but no heartbeat came for this long.
    Silent(Duration),
}

impl std::fmt::Display for LostReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LostReason::Closed => f.write_str("its process ended, or left the world"),
            LostReason::Silent(time) => write!(f, "no heartbeat for {} ms", time.as_millis()),
        }
    }
}

/// The first failure of a world. It is sticky: every wait ends with it, and every new call is
/// refused with it, until a rebuild.
#[derive(Debug, Clone, PartialEq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum Cause {
    /// Another rank is gone.
    #[error("rank {rank} is lost: {how}")]
    Lost {
        /// The lost rank (in the world).
        rank: u32,
        /// How it was noticed.
        how: LostReason,
    },
    /// The launcher that started this job is gone.
    #[error("the launcher (process {pid}) is gone")]
    LauncherGone {
        /// Its process id.
        pid: u32,
    },
    /// The others declared this rank lost (it was stopped for too long) and went on without it.
    #[error("rank {rank} was declared lost in epoch {epoch}: the others continued without it")]
    Evicted {
        /// This rank.
        rank: u32,
        /// The epoch it was thrown out of.
        epoch: u16,
    },
    /// A rank is alive but did not do its part before the deadline.
    #[error("rank {by} waited {} ms for rank {rank}, which is alive but silent", waited.as_millis())]
    Stalled {
        /// The silent rank.
        rank: u32,
        /// The rank whose deadline passed first.
        by: u32,
        /// How long it waited.
        waited: Duration,
    },
    /// A rank called cancel on its world, or left the world while others were in a call.
    #[error("cancelled by rank {by}")]
    Cancelled {
        /// The rank that cancelled.
        by: u32,
    },
    /// A wire between two ranks broke, although both may live.
    #[error("the connection from rank {by} to rank {rank} broke")]
    Connection {
        /// The rank at its other end.
        rank: u32,
        /// The rank that noticed.
        by: u32,
    },
    /// The NIC of a rank failed, although the rank lives.
    #[error("the NIC of rank {by} failed")]
    Nic {
        /// The rank.
        by: u32,
    },
    /// A peer sent something over a lane that no correct peer sends.
    #[error("rank {rank} broke the lane's protocol")]
    Protocol {
        /// The offending rank.
        rank: u32,
    },
}
