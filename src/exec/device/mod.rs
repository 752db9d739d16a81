//! Executors for devices: rows go by copy engines, and flags by memory operations of a stream.
//!
//! | module | subject |
//! |---|---|
//! | `copy_engine_stepper` | a program with operands, put on a stream call by call |
//! | `lowered_program` | a stream program, lowered once: every address is a constant |
//! | `net_queue` | what of either crosses to other nodes, put by a thread of the host |
//! | `relay_sums` | sums of rows that relays return |

mod copy_engine_stepper;
mod lowered_program;
mod net_queue;
mod relay_sums;

pub(crate) use copy_engine_stepper::{
    Awaited, CopyEngineStepper, DeviceMap, LocalPeer, Packed, PackedMetadata,
};
pub use lowered_program::{Lowered, PeerWindows};
pub(crate) use net_queue::ProxyOps;
pub(crate) use relay_sums::RelaySums;

/// Work that was enqueued on a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct EnqueueCounts {
    /// Calls that enqueued a batch of copies.
    pub batches: u64,
    /// Copies, in batches or one by one.
    pub copies: u64,
    /// Bytes of rows and of what goes with them, zeros included.
    pub bytes: u64,
    /// Of these, bytes that stayed at this rank. Kernels move its own rows, and no copies.
    pub own_bytes: u64,
    /// Copies that were enqueued one by one: the driver has no batches, or the stream takes none.
    pub single_copies: u64,
    /// Copies within one device that SMs make: single ones, and before CUDA 13.1 those of batches,
    /// too.
    pub copies_by_sms: u64,
    /// Memory operations: writes and waits.
    pub memory_operations: u64,
    /// Kernels that summed rows for other nodes.
    pub relay_sums: u64,
    /// Bytes that left the device by memory of the host, on the way to other nodes; not among
    /// `bytes`.
    pub staged_out_bytes: u64,
    /// Bytes that came in by memory of the host, zeros included; not among `bytes`.
    pub staged_in_bytes: u64,
    /// Puts to other nodes: by the caller's thread, not by its stream.
    pub inter_node_puts: u64,
    /// Their bytes, headers and messages among them.
    pub inter_node_bytes: u64,
    /// Of the puts, those of rows that NICs read from memory of a device and wrote to that of
    /// another.
    pub gpu_direct_puts: u64,
    /// Their bytes.
    pub gpu_direct_bytes: u64,
    /// Signals to other nodes, likewise.
    pub inter_node_signals: u64,
}
