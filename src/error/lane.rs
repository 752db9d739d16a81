//! Errors of the lanes.

use std::time::Duration;

/// Bytes or signals could not be moved, or did not come.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
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
    /// A lane that was asked for is missing.
    #[error("no lane from rank {rank} to rank {peer}: {missing}")]
    NoLane {
        /// This rank.
        rank: u32,
        /// The peer.
        peer: u32,
        /// What is missing.
        missing: &'static str,
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
    /// A system call failed.
    #[error("{call} failed: {}", std::io::Error::from_raw_os_error(*errno))]
    System {
        /// The call.
        call: &'static str,
        /// Its errno.
        errno: i32,
    },
}
