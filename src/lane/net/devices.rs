//! Device memory on nets: whether a NIC accesses it directly, and why not.
//!
//! ```text
//!   driver gives a descriptor (dma-buf) -- NIC's library takes it  --> registered by descriptor
//!          | no                                 | no
//!          +------------------------------------+--> by address: a module of the kernel knows whose memory it is
//!                                                       | no
//!                                                       +--> a detour by memory of the host
//! ```

use std::sync::Arc;

use super::{RemoteAddress, SendBlocked};
use crate::device::{Context, DeviceRange};
use crate::lane::wait::WaitLimits;

/// A rank's memory on its device, and that of local peers, to be registered with its NICs.
#[derive(Debug)]
pub struct DeviceMemory {
    /// The device that reaches all of it.
    pub context: Arc<Context>,
    /// This rank's, to which peers may write.
    pub own: DeviceRange,
    /// Memory of local peers, as a source of puts, by position of its owner in the group.
    pub neighbours: Vec<(u32, DeviceRange)>,
    /// This rank's position in the group.
    pub rank: u32,
    /// Bytes at the start that hold flags.
    pub strict: u64,
}

/// How NICs address device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Registration {
    /// By a descriptor (dma-buf).
    DmaBuf,
    /// By its address, which a module of the kernel knows (nvidia-peermem); why not by a
    /// descriptor.
    Address(NoDmaBuf),
}

impl Registration {
    /// In a word.
    pub fn name(self) -> &'static str {
        match self {
            Registration::DmaBuf => "dma-buf",
            Registration::Address(_) => "address",
        }
    }
}

/// Why memory of a device was not registered by a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoDmaBuf {
    /// The driver hands out none of this device's memory.
    Driver,
    /// libibverbs is too old to take one.
    Library,
    /// The NIC's driver refused it.
    Card {
        /// Its answer.
        errno: i32,
    },
}

/// Why rows that cross go by memory of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoGpuDirect {
    /// This lane registers memory of the host alone.
    Lane(&'static str),
    /// Signals are messages to the processor (`SIDELANE_VERBS_SIGNAL=immediate`), which no device
    /// awaits.
    Messages,
    /// The NIC takes the device's memory neither by a descriptor nor by its address.
    Card {
        /// Why not by a descriptor.
        dma_buf: NoDmaBuf,
        /// Its answer for the address.
        errno: i32,
    },
    /// The device sees NICs' writes in no order, and its streams cannot wait until they have
    /// landed.
    Unordered,
    /// The device takes all streams from one hardware queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`): no
    /// operation could pass a stream that waits for a NIC's write, to end its wait.
    OneQueue,
    /// The device or the NIC of another rank (of the group) is the reason.
    Rank(u32),
}

impl NoGpuDirect {
    /// In a word or two: the lane's, if it is the reason.
    pub fn name(self) -> &'static str {
        match self {
            NoGpuDirect::Lane(lane) => lane,
            NoGpuDirect::Messages => "messages",
            NoGpuDirect::Card { .. } => "nic",
            NoGpuDirect::Unordered => "unordered",
            NoGpuDirect::OneQueue => "one queue",
            NoGpuDirect::Rank(_) => "another rank",
        }
    }
}

/// Registered memory that no processor reads: of a member of a region of this rank's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceAddress {
    /// Number of the region at this rank.
    pub region: u32,
    /// Owner of the memory, by position in the group.
    pub member: u32,
    /// First byte in it.
    pub offset: u64,
}

/// A rail that reads memory of devices.
pub trait DeviceRail {
    /// Writes bytes of a device's memory to the peer. They are read until
    /// [`NetConnection::settle`](super::NetConnection::settle) has returned.
    ///
    /// # Errors
    /// As [`NetConnection::put`](super::NetConnection::put).
    fn put_device(
        &self,
        to: RemoteAddress,
        from: DeviceAddress,
        len: u64,
        patience: WaitLimits<'_>,
    ) -> Result<(), SendBlocked>;
}
