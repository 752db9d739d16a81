//! Errors of heaps, pools and windows.

/// Memory could not be had, or an address lies outside its window.
#[derive(Debug, Clone, PartialEq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum MemoryError {
    /// The heap of a rank has no room left.
    #[error(
        "rank {rank}: {asked} bytes requested, largest free extent of the {space} is {free} of {total}: raise {setting}"
    )]
    OutOfSpace {
        /// Owner of the memory.
        rank: u32,
        /// Bytes asked for.
        asked: u64,
        /// Largest free extent, in bytes.
        free: u64,
        /// Size of the space, in bytes.
        total: u64,
        /// Which space: `"pool"`, `"symmetric heap"` or, of a communicator's window, `"landing"`.
        space: &'static str,
        /// The setting that raises it.
        setting: &'static str,
    },
    /// A device has less memory free than its ranks need. The same on every rank, before any memory
    /// is taken.
    #[error(
        "rank {rank}: its device has {free} bytes free, and {needed} are needed: lower device_heap, max_tokens or max_in_flight"
    )]
    DeviceFull {
        /// The first rank of such a device.
        rank: u32,
        /// Bytes that all ranks of the group on this device need, each in whole granules.
        needed: u64,
        /// Bytes that are free there.
        free: u64,
    },
    /// The device heap has no room left for the rows of a call, and could not grow. The same on
    /// every rank. Nothing moved, and the heap is as before.
    #[error(
        "rank {rank}: {asked} bytes requested of the device heap of {total}, and the device of rank {refused} has no {more} bytes more: free memory there, or set device_heap to have it from the start"
    )]
    HeapNotGrown {
        /// The first rank without room.
        rank: u32,
        /// Bytes asked for there.
        asked: u64,
        /// Size of the device heap, in bytes.
        total: u64,
        /// The first rank whose device has no more memory, or whose driver refused it.
        refused: u32,
        /// Bytes by which the heap was to grow at every rank.
        more: u64,
    },
    /// An access outside a window.
    #[error("offset {offset} + {len} bytes is outside the window of rank {peer} ({size} bytes)")]
    OutOfBounds {
        /// Owner of the window.
        peer: u32,
        /// First byte of the access.
        offset: u64,
        /// Length of the access.
        len: u64,
        /// Size of the window.
        size: u64,
    },
    /// Ranks asked for windows of different size.
    #[error(
        "collective allocation {call} differs: rank {rank} asked for {seen} bytes, rank {me} for {expected}"
    )]
    SizesDiffer {
        /// Number of the allocation on this group.
        call: u64,
        /// This rank.
        me: u32,
        /// The rank that differs.
        rank: u32,
        /// The requested size.
        seen: u64,
        /// Bytes that this rank asked for.
        expected: u64,
    },
    /// A shared segment can still be resized by its owner: an access could fault.
    #[error("the segment of rank {rank} is not sealed against {missing}")]
    NotSealed {
        /// Owner of the segment.
        rank: u32,
        /// The missing seal.
        missing: &'static str,
    },
    /// Another rank's memory cannot be registered; that rank has the reason.
    #[error("the memory of rank {rank} cannot be registered: see its own error")]
    NotUsable {
        /// Owner of the memory.
        rank: u32,
    },
    /// A segment has another size than its owner said.
    #[error("the segment of rank {rank} has {seen} bytes, {expected} were announced")]
    WrongSize {
        /// Owner of the segment.
        rank: u32,
        /// Size found.
        seen: u64,
        /// Size announced.
        expected: u64,
    },
    /// A buffer is not aligned as its element type asks.
    #[error("a buffer at address {address:#x} is not aligned to {align}")]
    Misaligned {
        /// Its address.
        address: usize,
        /// The alignment asked for.
        align: usize,
    },
    /// A second heap allocator for a device: one at a time serves it in a process.
    #[error("a heap allocator serves device {device} already: drop it before you make another")]
    AllocatorTaken {
        /// The device.
        device: u32,
    },
    /// No heap allocator serves a device: none was made, or it was dropped, or closed with its
    /// world.
    #[error(
        "no heap allocator serves device {device}: it was not made, or was dropped or closed with its world"
    )]
    NoAllocator {
        /// The device.
        device: u32,
    },
    /// Memory that no heap allocator gave out, or that was freed before.
    #[error("no heap allocator gave out memory at {address:#x}, or it was freed before")]
    NotAllocated {
        /// Its address.
        address: u64,
    },
    /// A system call failed.
    #[error("{call} of {bytes} bytes failed: {}", std::io::Error::from_raw_os_error(*errno))]
    System {
        /// The call.
        call: &'static str,
        /// Its size argument.
        bytes: u64,
        /// Its errno.
        errno: i32,
    },
}
