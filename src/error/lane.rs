//! Errors of the lanes.

use std::time::Duration;

use super::{BootstrapError, VerbsError};

/// Advice where no connection came about.
const REACH: &str = "can these addresses be reached (SIDELANE_TCP_ADDRESS)?";

/// Bytes or signals could not be moved, or did not come.
#[derive(Debug, Clone, PartialEq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum LaneError {
    /// A wait passed its deadline while the peer is alive.
    #[error(
        "rank {rank}: {lane} lane, flag {flag} of rank {peer}: awaited {awaited:#x}, last seen {seen:#x} after {} ms",
        waited.as_millis()
    )]
    Deadline {
        /// This rank (in its group).
        rank: u32,
        /// The writer of the flag.
        peer: u32,
        /// The lane it writes over.
        lane: &'static str,
        /// Which of its flags.
        flag: u32,
        /// Value awaited: epoch in the high 16 bits, generation below.
        awaited: u64,
        /// Value last seen.
        seen: u64,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The waiting thread's user asked to stop
    /// ([`interruptible`](crate::bootstrap::interruptible)).
    #[error("rank {rank}: the wait for rank {peer} was interrupted by its caller")]
    Interrupted {
        /// This rank (in its group).
        rank: u32,
        /// The rank that was awaited.
        peer: u32,
    },
    /// A lane that was asked for is missing.
    #[error("no lane from rank {rank} to rank {peer}: {missing}")]
    NoLane {
        /// This rank.
        rank: u32,
        /// The peer.
        peer: u32,
        /// The missing part.
        missing: &'static str,
    },
    /// Another rank cannot use the lane that was chosen.
    #[error("rank {rank} cannot use the {lane} lane: {reason}")]
    PeerUnsupported {
        /// The rank (in the world).
        rank: u32,
        /// The lane.
        lane: &'static str,
        /// Its message.
        reason: String,
    },
    /// A slower link was to be emulated (`SIDELANE_EMULATED_LINK`) on connections that have a
    /// latency of their own.
    #[error(
        "rank {rank}: SIDELANE_EMULATED_LINK is for connections within one machine (the loopback lane), which does not join these nodes"
    )]
    NoLinkEmulation {
        /// This rank.
        rank: u32,
    },
    /// Two ranks did not get a connection to each other.
    #[error(
        "no {lane} connection between rank {rank} and rank {peer} at {addresses:?} within {} ms: {}",
        waited.as_millis(),
        reason.as_ref().map_or_else(|| REACH.to_owned(), |reason| format!("{reason}; {REACH}"))
    )]
    NoConnection {
        /// This rank (in the world).
        rank: u32,
        /// The other.
        peer: u32,
        /// The lane.
        lane: &'static str,
        /// Where the one with the lower rank listens.
        addresses: Vec<std::net::SocketAddr>,
        /// How long it was tried.
        waited: Duration,
        /// Why the rank that connects was not let in, as far as it knows.
        reason: Option<Box<BootstrapError>>,
    },
    /// A wire broke although its other end is not known to be gone.
    #[error(
        "rank {rank}: the {lane} connection to rank {peer} broke: {}",
        if *errno == 0 { "the other end closed it".to_owned() } else { std::io::Error::from_raw_os_error(*errno).to_string() }
    )]
    Wire {
        /// This rank (in the world).
        rank: u32,
        /// The rank at the other end.
        peer: u32,
        /// The lane.
        lane: &'static str,
        /// The errno of its socket; 0 if the other end closed it.
        errno: i32,
    },
    /// Ranks ask for different lanes.
    #[error(
        "rank {rank} asks for the {mine} lane between nodes, rank {peer} for {theirs}: set SIDELANE_NET alike"
    )]
    ChoicesDiffer {
        /// This rank (in the world).
        rank: u32,
        /// The other.
        peer: u32,
        /// Choice of this rank.
        mine: &'static str,
        /// The other rank's choice.
        theirs: &'static str,
    },
    /// The source of a put is not as long as the operand says.
    #[error("a put reads {len} bytes at {offset} of a source of {size}")]
    SourceBounds {
        /// First byte read.
        offset: u64,
        /// Bytes read.
        len: u64,
        /// Bytes there.
        size: u64,
    },
    /// A NIC failed.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// A system call failed.
    #[error("{call} failed: {}", std::io::Error::from_raw_os_error(*errno))]
    System {
        /// The call.
        call: &'static str,
        /// Its errno.
        errno: i32,
    },
}
