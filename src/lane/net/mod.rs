//! Nets: lanes between nodes, where no memory is mapped and bytes must be sent.
//!
//! | lane | between | transport |
//! |---|---|---|
//! | verbs | machines with RDMA NICs | queue pairs: writes from registered memory to registered memory |
//! | loopback | "nodes" of one machine | a ring of records that only the pair has mapped, with credits |
//! | emulated | the same, for measurements | the same, but signals come when a slower link would deliver them |
//! | tcp | any machines | records on an authenticated connection |
//!
//! A [`Port`](super::Port) sees one interface: a [`NetConnection`] per peer takes puts to (region,
//! offset) of the peer, and signals that become visible after them. The [`ProgressThread`] serves
//! all connections of a rank while the rank computes.
//!
//! ```text
//!   NetTransport --open(peer)--> ConnectionEnd --offers through the rendezvous--> connect --> NetConnection
//!        | register(region) --------- description --------> import_region of each peer
//! ```
//!
//! A NIC may read and write memory of a device (GPUDirect). A [`NoGpuDirect`] says why not:
//!
//! ```text
//!   driver gives a descriptor (dma-buf) -- NIC's library takes it  --> registered by descriptor
//!          | no                                 | no
//!          +------------------------------------+--> by address: a module of the kernel knows its owner
//!                                                       | no
//!                                                       +--> host staging
//! ```

mod loopback;
mod progress_thread;
mod regions;
mod tcp;
mod verbs;

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

pub use loopback::{LinkEmulator, LoopbackTransport};
#[cfg(test)]
pub use loopback::{LoopbackConnection, ring_bytes};
pub use progress_thread::ProgressThread;
pub use regions::{Region, Regions};
pub use tcp::TcpTransport;
#[cfg(test)]
pub use verbs::{Fabric, Settings, SignalMode};
pub use verbs::{NicSurvey, Setup, VerbsEnvironment, VerbsTransport};

use super::RowSource;
use super::flag::{WaitError, WaitLimits};
use crate::bootstrap::Health;
use crate::device::{Context, DeviceRange};
use crate::error::{Cause, Error, LaneError};
use crate::schedule::Tag;

/// Names of the lanes between "nodes" of one machine: as fast as it copies, and as slow as a link
/// ([`EmulatedLink`]).
///
/// [`EmulatedLink`]: crate::config::EmulatedLink
pub const LOOPBACK: &str = "loopback";
/// See [`LOOPBACK`].
pub const EMULATED: &str = "emulated";

/// Whether a lane joins nodes of one machine, so that the cores copy its bytes.
pub fn is_copied(lane: &str) -> bool {
    [LOOPBACK, EMULATED].contains(&lane)
}

/// Where bytes go: a place in a peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteAddress {
    /// Number of the region at the peer.
    pub region: u32,
    /// First byte in it.
    pub offset: u64,
}

impl RemoteAddress {
    /// The place `len` bytes further on.
    pub fn behind(self, len: u64) -> RemoteAddress {
        RemoteAddress { offset: self.offset + len, ..self }
    }
}

/// Blocked send: the wait for credit or completion ended early.
#[derive(Clone, Debug, PartialEq)]
pub struct SendBlocked {
    /// Position in the sent bytes that had to be free or done.
    pub awaited: u64,
    /// Position reached.
    pub seen: u64,
    /// Why the wait ended.
    pub why: WaitError,
}

/// Offer of the peer's end of a connection, as it arrived. An empty offer says that the end could
/// not be opened.
#[derive(Debug, Default)]
pub struct ConnectionOffer {
    /// Bytes, which go through the rendezvous.
    pub bytes: Vec<u8>,
    /// Descriptors, of lanes that pass them.
    pub descriptors: Vec<OwnedFd>,
}

impl ConnectionOffer {
    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty() && self.descriptors.is_empty()
    }
}

impl From<Vec<u8>> for ConnectionOffer {
    fn from(bytes: Vec<u8>) -> Self {
        ConnectionOffer { bytes, descriptors: Vec::new() }
    }
}

/// Opens the connections of a rank: the same steps for every lane between nodes.
pub trait NetTransport: fmt::Debug + Send + Sync {
    /// Name of the lane.
    fn lane(&self) -> &'static str;

    /// Whether offers are descriptors, which go between processes of one machine, and not bytes.
    fn passes_descriptors(&self) -> bool {
        false
    }

    /// Opens this rank's end of the connection to a rank of the world.
    ///
    /// # Errors
    /// Of the lane, if it cannot be opened.
    fn open(&self, peer: u32) -> Result<Box<dyn ConnectionEnd + '_>, Error>;

    /// Lets peers write to a region. Returns the description that they need
    /// ([`NetConnection::import_region`]).
    ///
    /// # Errors
    /// Of the lane, if the memory cannot be registered.
    fn register(&self, _number: u32, _region: &Region) -> Result<Vec<u8>, Error> {
        // Records name regions by number; the receiver writes.
        Ok(Vec::new())
    }

    /// Lets peers write to memory of a device, and NICs read it. Returns the description that peers
    /// need, and how it was registered.
    ///
    /// # Errors
    /// The reason why it cannot be.
    fn register_device(&self, _: u32, _: &DeviceMemory) -> Result<(Vec<u8>, Registration), NoGpuDirect> {
        Err(NoGpuDirect::Lane(self.lane()))
    }

    /// The end of that.
    fn deregister(&self, _number: u32) {}

    /// Message of this rank to all before the lane is agreed on, for [`NetTransport::compare`].
    fn announcement(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Whether the lane joins all ranks on different nodes, by the announcements of all.
    ///
    /// # Errors
    /// The first rank that it does not join to another, and why: the same on all ranks.
    fn compare(&self, _announced: &[&[u8]]) -> Result<(), (u32, Error)> {
        Ok(())
    }

    /// Descriptions of the hardware that connections use, for reports: a line per NIC.
    fn describe(&self) -> Vec<String> {
        Vec::new()
    }

    /// How signals travel, and the reason, for reports; none where a lane has one way only.
    fn signals(&self) -> Option<String> {
        None
    }
}

/// This rank's end of a connection that is not joined yet. Dropped, it gives back all that it took.
pub trait ConnectionEnd {
    /// Bytes that the peer needs to join the ends.
    fn bytes(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Descriptors that it needs, of lanes that pass them.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    /// Joins the two ends, now that the peer has offered its own. Collective over the pair.
    ///
    /// # Errors
    /// Of the lane, if the peer cannot be reached or its offer is invalid.
    fn connect(self: Box<Self>, offered: ConnectionOffer) -> Result<Arc<dyn NetConnection>, Error>;
}

/// One rank's end of the way to one rank of another node.
///
/// A signal is visible at the peer only after all earlier puts of the connection have landed, and
/// after all earlier signals. Nothing else is ordered: a put may land after puts of later calls.
/// Callers have checked that targets lie in their windows.
pub trait NetConnection: fmt::Debug + Send + Sync {
    /// Name of the lane.
    fn lane(&self) -> &'static str;

    /// The peer's rank in the world.
    fn peer(&self) -> u32;

    /// Writes bytes to the peer. Bytes of this rank's own regions are read until
    /// [`NetConnection::settle`] has returned; all others may be changed as soon as this returns.
    ///
    /// # Errors
    /// [`SendBlocked`], if the peer takes nothing.
    fn put(&self, to: RemoteAddress, bytes: &[u8], limits: WaitLimits<'_>) -> Result<(), SendBlocked>;

    /// Writes rows, gathered by index, one after another. The caller has checked that they lie in
    /// the source.
    ///
    /// # Errors
    /// As [`NetConnection::put`].
    fn put_rows(
        &self,
        to: RemoteAddress,
        rows: &[u32],
        source: RowSource<'_>,
        limits: WaitLimits<'_>,
    ) -> Result<(), SendBlocked>;

    /// Its operations on memory of devices, if it has any.
    fn devices(&self) -> Option<&dyn DeviceConnection> {
        None
    }

    /// Writes zeros.
    ///
    /// # Errors
    /// As [`NetConnection::put`].
    fn zero(&self, to: RemoteAddress, len: u64, limits: WaitLimits<'_>) -> Result<(), SendBlocked>;

    /// Raises a flag line of the peer.
    ///
    /// # Errors
    /// As [`NetConnection::put`].
    fn signal(
        &self,
        to: RemoteAddress,
        value: u64,
        tag: Option<Tag>,
        limits: WaitLimits<'_>,
    ) -> Result<(), SendBlocked>;

    /// Posts everything so far, and returns whether the lane has finished reading it here.
    fn settled(&self) -> bool {
        true
    }

    /// Returns when everything so far is in flight and nothing of it is read here any more.
    ///
    /// # Errors
    /// As [`NetConnection::put`].
    fn settle(&self, _patience: WaitLimits<'_>) -> Result<(), SendBlocked> {
        Ok(())
    }

    /// Returns when everything so far has landed.
    ///
    /// # Errors
    /// As [`NetConnection::put`].
    fn flush(&self, limits: WaitLimits<'_>) -> Result<(), SendBlocked>;

    /// Takes what has come and sends what can be sent, without waiting. Returns whether there was
    /// anything to do.
    fn progress(&self, health: &Health) -> bool;

    /// Requests a wake-up for new work: by [`NetConnection::event_fds`], or by the peer through the
    /// event descriptor of the [`ProgressThread`]. Returns whether there is work already.
    fn arm(&self, health: &Health) -> bool;

    /// Descriptors that are readable when there is something to do. Connections may share them.
    fn event_fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    /// Takes the events that make its descriptors readable, those of other connections among them.
    /// Call it before any connection with these descriptors is armed: the event of one that is
    /// armed must wake a thread.
    fn take_events(&self, _health: &Health) {}

    /// Whether arriving signals wake a thread that sleeps on the flag. If not, flags must be
    /// polled.
    fn wakes(&self) -> bool {
        true
    }

    /// Records the peer's description of a region of its own.
    ///
    /// # Errors
    /// If that makes no sense.
    fn import_region(&self, _region: u32, _description: &[u8]) -> Result<(), LaneError> {
        Ok(())
    }

    /// The same for memory of the peer's device: words there are written by NICs.
    ///
    /// # Errors
    /// As [`NetConnection::import_region`].
    fn import_device_region(&self, region: u32, description: &[u8]) -> Result<(), LaneError> {
        self.import_region(region, description)
    }

    /// This rank sends nothing more to that region.
    fn forget_region(&self, _region: u32) {}

    /// The peer has cleared bytes of its own that flags may lie in.
    fn cleared(&self, _from: RemoteAddress, _len: u64) {}

    /// Counts so far; all 0 if nothing is counted.
    fn counters(&self) -> Counters {
        Counters::default()
    }

    /// Predicted counts, if it was set up to predict them ([`Setup`]).
    fn forecast(&self) -> Counters {
        Counters::default()
    }

    /// Ends the connection of a failed world: nothing more is sent, received or read here.
    fn stop(&self, _cause: &Cause) {}

    /// This rank leaves in peace: returns when everything so far has landed, or cannot, or at a
    /// point in time.
    fn leave(&self, _until: Instant) {}

    /// The error of this connection, if it knows more than that the world has failed.
    fn fault(&self) -> Option<LaneError> {
        None
    }
}

/// The error of a system call.
fn system(call: &'static str) -> impl Fn(rustix::io::Errno) -> LaneError {
    move |errno| LaneError::System { call, errno: errno.raw_os_error() }
}

/// A rank's memory on its device, and that of local peers, to be registered with its NICs.
#[derive(Debug)]
pub struct DeviceMemory {
    /// The device that reaches all of it.
    pub context: Arc<Context>,
    /// This rank's, to which peers may write.
    pub own: DeviceRange,
    /// Memory of local peers, as a source of puts, by position of its owner in the group.
    pub local_peers: Vec<(u32, DeviceRange)>,
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
    Nic {
        /// Its answer.
        errno: i32,
    },
}

/// Reason for host staging of rows between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoGpuDirect {
    /// This lane registers memory of the host alone.
    Lane(&'static str),
    /// The NIC takes the device's memory neither by a descriptor nor by its address.
    Nic {
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
            NoGpuDirect::Nic { .. } => "nic",
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

/// A connection that reads memory of devices.
pub trait DeviceConnection {
    /// Writes bytes of a device's memory to the peer. They are read until
    /// [`NetConnection::settle`] has returned.
    ///
    /// # Errors
    /// As [`NetConnection::put`].
    fn put_device(
        &self,
        to: RemoteAddress,
        from: DeviceAddress,
        len: u64,
        limits: WaitLimits<'_>,
    ) -> Result<(), SendBlocked>;

    /// Writes a word to the peer's device, behind everything so far: its device sees the word only
    /// after the bytes of all earlier puts.
    ///
    /// # Errors
    /// As [`NetConnection::put`].
    fn write_word(&self, to: RemoteAddress, value: u64, limits: WaitLimits<'_>) -> Result<(), SendBlocked>;
}

/// Counted since the connection was joined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Counters {
    /// Work requests posted to the send queue.
    pub requests: u64,
    /// Doorbells: notifications of the NIC about new requests.
    pub doorbells: u64,
    /// Completions of sends.
    pub completions: u64,
    /// Packets that the requests are cut into, acknowledgements not counted.
    pub packets: u64,
    /// Bytes that the requests carried.
    pub bytes: u64,
    /// Of these, bytes that were copied before the NIC read them.
    #[serde(rename = "copied_bytes")]
    pub copied: u64,
    /// Completions of receives.
    pub received: u64,
    /// Completions of failed requests: the first fault of a connection, and the requests in flight
    /// behind it. Late requests of a failed world end here.
    pub failed: u64,
}

impl std::iter::Sum for Counters {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Counters::default(), |sum, one| Counters {
            requests: sum.requests + one.requests,
            doorbells: sum.doorbells + one.doorbells,
            completions: sum.completions + one.completions,
            packets: sum.packets + one.packets,
            bytes: sum.bytes + one.bytes,
            copied: sum.copied + one.copied,
            received: sum.received + one.received,
            failed: sum.failed + one.failed,
        })
    }
}

impl std::ops::Sub for Counters {
    type Output = Counters;

    /// Counts since `earlier`.
    fn sub(self, earlier: Counters) -> Counters {
        Counters {
            requests: self.requests - earlier.requests,
            doorbells: self.doorbells - earlier.doorbells,
            completions: self.completions - earlier.completions,
            packets: self.packets - earlier.packets,
            bytes: self.bytes - earlier.bytes,
            copied: self.copied - earlier.copied,
            received: self.received - earlier.received,
            failed: self.failed - earlier.failed,
        }
    }
}
