//! Errors of the lanes, and of the NICs below one: the library, devices, and a NIC's report of a
//! failed work request.

use std::io;
use std::net::Ipv6Addr;
use std::time::Duration;

use rustix::io::Errno;

use super::BootstrapError;

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

/// A NIC is unusable, or did not do what it was asked to.
#[derive(Debug, Clone, PartialEq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum VerbsError {
    /// libibverbs is not there.
    #[error(
        "cannot load {library}: {reason} (install libibverbs1 and ibverbs-providers, elsewhere rdma-core, or set SIDELANE_IBVERBS_LIBRARY to its path)"
    )]
    NoLibrary {
        /// The library to load.
        library: String,
        /// Message of the loader.
        reason: String,
    },
    /// The loaded library is not libibverbs.
    #[error("{library} has no {symbol}: it is not libibverbs 1.1 or newer")]
    MissingSymbol {
        /// The loaded library.
        library: String,
        /// The missing symbol.
        symbol: &'static str,
    },
    /// This libibverbs is too old for something that was asked for.
    #[error(
        "{feature} needs {symbol}, which this libibverbs does not have: install rdma-core {since} or newer"
    )]
    TooOld {
        /// The requested feature.
        feature: &'static str,
        /// The missing symbol.
        symbol: &'static str,
        /// The first version that has it.
        since: &'static str,
    },
    /// No NIC.
    #[error(
        "no RDMA NIC on this machine (if there is one: load its driver and ib_uverbs; in a container pass --device=/dev/infiniband)"
    )]
    NoNic,
    /// None of several NICs and ports is usable.
    #[error("none of several NICs and ports is usable: {}", list(refused))]
    NoUsableNic {
        /// Why each is not, by NIC and port.
        refused: Vec<VerbsError>,
    },
    /// A NIC is of a network that the lane does not know.
    #[error("NIC {nic} speaks {network}: the lane needs InfiniBand or RoCE")]
    OtherNetwork {
        /// The NIC.
        nic: String,
        /// Its network.
        network: &'static str,
    },
    /// A named NIC does not exist.
    #[error("no NIC {nic} (SIDELANE_VERBS_NICS): this machine has {present:?}")]
    NoSuchNic {
        /// Its name.
        nic: String,
        /// The existing NICs.
        present: Vec<String>,
    },
    /// A NIC cannot be opened.
    #[error("cannot open NIC {nic}: {}{}", text(*errno), open_advice(*errno))]
    Open {
        /// The NIC.
        nic: String,
        /// The errno.
        errno: i32,
    },
    /// A NIC has no port of this number.
    #[error("NIC {nic} has no port {port} (SIDELANE_VERBS_PORT): its ports are 1 to {ports}")]
    NoSuchPort {
        /// The NIC.
        nic: String,
        /// The port.
        port: u8,
        /// How many it has.
        ports: u8,
    },
    /// No port of a NIC, or not the requested one, carries traffic.
    #[error(
        "NIC {nic}, port {port} is {state} (check the cable, the switch and, for InfiniBand, that a subnet manager runs)"
    )]
    PortDown {
        /// The NIC.
        nic: String,
        /// The port; the first one if none was asked for.
        port: u8,
        /// Its state.
        state: &'static str,
    },
    /// A port has no address that routers know.
    #[error(
        "NIC {nic}, port {port} has no GID that can route: give its network interface an IPv4 or IPv6 address, so that RoCE v2 has one"
    )]
    NoGid {
        /// The NIC.
        nic: String,
        /// The port.
        port: u8,
    },
    /// The GID that was asked for is empty.
    #[error("NIC {nic}, port {port} has no GID of index {index} (SIDELANE_VERBS_GID_INDEX)")]
    NoSuchGid {
        /// The NIC.
        nic: String,
        /// The port.
        port: u8,
        /// Its place in the table.
        index: u8,
    },
    /// No GID lies in the subnets that were asked for.
    #[error("NIC {nic}, port {port} has no GID in a subnet of SIDELANE_VERBS_SUBNETS")]
    NoGidInSubnets {
        /// The NIC.
        nic: String,
        /// The port.
        port: u8,
    },
    /// The partition key that was asked for is empty.
    #[error("NIC {nic}, port {port} has no partition key of index {index} (SIDELANE_VERBS_PKEY_INDEX)")]
    NoSuchPkey {
        /// The NIC.
        nic: String,
        /// The port.
        port: u8,
        /// Its place in the table.
        index: u16,
    },
    /// A port is a member of no partition.
    #[error("NIC {nic}, port {port} is a member of no partition: let the subnet manager make it one")]
    NoPartition {
        /// The NIC.
        nic: String,
        /// The port.
        port: u8,
    },
    /// Two ranks share no partition, or both are limited members of all that they share.
    #[error(
        "NIC {nic} has partition keys {}, the NIC of rank {peer} has {}: packets do not pass (two ports need keys of one partition, at least one of them with the first bit set; SIDELANE_VERBS_PKEY_INDEX leaves one)",
        keys(mine),
        keys(theirs)
    )]
    PartitionsDiffer {
        /// This rank's NIC.
        nic: String,
        /// The peer (in the world).
        peer: u32,
        /// Our keys.
        mine: Vec<u16>,
        /// The peer's keys.
        theirs: Vec<u16>,
    },
    /// Two ranks have unequal numbers of NICs.
    #[error(
        "this rank has {mine} NICs, rank {peer} has {theirs}: a pair of ranks uses NICs of one number (SIDELANE_VERBS_NICS names as many on each)"
    )]
    NicCountsDiffer {
        /// The peer (in the world).
        peer: u32,
        /// How many this rank has.
        mine: usize,
        /// How many the peer has.
        theirs: usize,
    },
    /// More queue pairs to a peer than there can be, or none.
    #[error("a peer has 1 to 8 queue pairs, not {asked} (Options::with_queue_pairs)")]
    QueuePairs {
        /// How many were asked for.
        asked: u8,
    },
    /// Several queue pairs to a peer, and signals that NICs write.
    #[error(
        "SIDELANE_VERBS_SIGNAL is {signal}, and SIDELANE_VERBS_QUEUE_PAIRS more than 1: what a NIC writes on one queue pair says nothing about the others (immediate does)"
    )]
    StripesNeedImmediates {
        /// The requested way.
        signal: &'static str,
    },
    /// Packets were asked for that are larger than the port sends now.
    #[error(
        "NIC {nic}, port {port} sends packets of {active} bytes now, SIDELANE_VERBS_MTU asks for {asked}"
    )]
    MtuTooLarge {
        /// The NIC.
        nic: String,
        /// The port.
        port: u8,
        /// Bytes asked for.
        asked: u32,
        /// Bytes of its active MTU.
        active: u32,
    },
    /// Memory cannot be registered.
    #[error("NIC {nic} cannot register {bytes} bytes: {}{}", text(*errno), register_advice(*errno))]
    Register {
        /// The NIC.
        nic: String,
        /// How many bytes.
        bytes: u64,
        /// The errno.
        errno: i32,
    },
    /// A piece that is not inside its registered region.
    #[error("{len} bytes at {offset} are outside a registered region of {size}")]
    OutOfRegion {
        /// First byte.
        offset: u64,
        /// Length of the piece.
        len: u64,
        /// Size of the region.
        size: u64,
    },
    /// A peer's description of its queue pair has another version.
    #[error("rank {peer} speaks version {seen} of the verbs lane, this rank {expected}: build both alike")]
    EndpointVersion {
        /// The peer (in the world).
        peer: u32,
        /// Its version.
        seen: u8,
        /// Ours.
        expected: u8,
    },
    /// A peer's description of its queue pair has a wrong length.
    #[error("rank {peer} described its queue pair in {seen} bytes, expected {expected}")]
    EndpointLength {
        /// The peer (in the world).
        peer: u32,
        /// Bytes that came.
        seen: usize,
        /// Bytes of a description.
        expected: usize,
    },
    /// A peer's description of its queue pair holds an impossible value.
    #[error("rank {peer} described its queue pair with {field} = {value:#x}, which cannot be")]
    EndpointField {
        /// The peer (in the world).
        peer: u32,
        /// The wrong field.
        field: &'static str,
        /// Its value.
        value: u32,
    },
    /// One end is InfiniBand, the other Ethernet.
    #[error("NIC {nic} cannot talk to the NIC of rank {peer}: one is InfiniBand, the other Ethernet")]
    LinkLayers {
        /// This rank's NIC.
        nic: String,
        /// The peer (in the world).
        peer: u32,
    },
    /// There is no route from our address to the peer's.
    #[error(
        "NIC {nic}: no route from GID {gid} to GID {remote} of rank {peer}: {} (both NICs must be in networks that reach each other; choose others with SIDELANE_VERBS_NICS or SIDELANE_VERBS_GID_INDEX)",
        text(*errno)
    )]
    NoRoute {
        /// This rank's NIC.
        nic: String,
        /// The peer (in the world).
        peer: u32,
        /// Our address.
        gid: Ipv6Addr,
        /// The peer's address.
        remote: Ipv6Addr,
        /// The errno.
        errno: i32,
    },
    /// Fetch-add was requested, and a NIC has none.
    #[error("NIC {nic} has no fetch-add: choose another SIDELANE_VERBS_SIGNAL")]
    NoAtomics {
        /// The NIC.
        nic: String,
    },
    /// Two ranks signal in different ways.
    #[error(
        "rank {peer} signals by {theirs}, this rank by {mine}: set SIDELANE_VERBS_SIGNAL alike on all ranks"
    )]
    SignalsDiffer {
        /// The peer (in the world).
        peer: u32,
        /// Our way.
        mine: &'static str,
        /// Its way.
        theirs: &'static str,
    },
    /// A peer's description of a region is invalid.
    #[error("rank {peer} sent invalid keys of its region {region}")]
    Keys {
        /// The peer (in the world).
        peer: u32,
        /// The region.
        region: u32,
    },
    /// A peer has sent no key for a place.
    #[error("rank {peer} has sent no key for byte {offset} of its region {region}")]
    NoKey {
        /// The peer (in the world).
        peer: u32,
        /// The region.
        region: u32,
        /// The byte.
        offset: u64,
    },
    /// A peer sent a message that no correct peer sends.
    #[error("rank {peer} sent a message that no correct rank sends")]
    Message {
        /// The peer (in the world).
        peer: u32,
    },
    /// A request is larger than its chain was made for.
    #[error("{asked} {what} requested, the chain holds {limit}")]
    ChainLimit {
        /// Resource that exceeds its limit.
        what: &'static str,
        /// How many were asked for.
        asked: usize,
        /// How many there may be.
        limit: usize,
    },
    /// A NIC refused work requests.
    #[error(
        "NIC {nic}, queue pair {queue_pair} to rank {peer}: {call} took {taken} work requests, then refused: {}{}",
        text(*errno),
        post_advice(*errno)
    )]
    Post {
        /// The NIC.
        nic: String,
        /// Its queue pair.
        queue_pair: u32,
        /// The peer (in the world).
        peer: u32,
        /// Which queue.
        call: &'static str,
        /// Work requests taken before.
        taken: usize,
        /// The errno.
        errno: i32,
    },
    /// A work request failed.
    #[error(
        "NIC {nic}, queue pair {queue_pair} to rank {peer}: {operation} failed: {status} (vendor error {vendor:#x})"
    )]
    Completion {
        /// The NIC.
        nic: String,
        /// Its queue pair.
        queue_pair: u32,
        /// The peer (in the world).
        peer: u32,
        /// The failed operation, by the number of the work request.
        operation: Operation,
        /// Why.
        status: CompletionStatus,
        /// The vendor's error code.
        vendor: u32,
    },
    /// A queue pair went into its error state without a work request of this side.
    #[error("NIC {nic}, queue pair {queue_pair} to rank {peer}: {event}")]
    QueuePairLost {
        /// The NIC.
        nic: String,
        /// Its queue pair.
        queue_pair: u32,
        /// The peer (in the world).
        peer: u32,
        /// Event that the NIC reported.
        event: &'static str,
    },
    /// More completions came than the completion queue holds.
    #[error("NIC {nic}: a completion queue overflowed")]
    QueueOverflow {
        /// The NIC.
        nic: String,
    },
    /// A NIC is gone.
    #[error("NIC {nic} is gone: its driver reports a fatal error (see dmesg)")]
    NicLost {
        /// The NIC.
        nic: String,
    },
    /// Another call failed.
    #[error("NIC {nic}: {call} failed: {}", text(*errno))]
    Call {
        /// The NIC.
        nic: String,
        /// The call.
        call: &'static str,
        /// Its errno.
        errno: i32,
    },
}

fn text(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

fn list(errors: &[VerbsError]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn keys(pkeys: &[u16]) -> String {
    pkeys.iter().map(|key| format!("{key:#06x}")).collect::<Vec<_>>().join(", ")
}

fn open_advice(errno: i32) -> &'static str {
    match Errno::from_raw_os_error(errno) {
        Errno::ACCESS | Errno::PERM => {
            " (this user may not open /dev/infiniband/uverbs*: join the group that may, often rdma)"
        }
        Errno::NOENT | Errno::NODEV | Errno::NXIO => {
            " (no /dev/infiniband/uverbs* for it: modprobe ib_uverbs; in a container pass --device=/dev/infiniband)"
        }
        _ => "",
    }
}

fn register_advice(errno: i32) -> &'static str {
    match Errno::from_raw_os_error(errno) {
        Errno::NOMEM | Errno::AGAIN | Errno::PERM => {
            " (registered memory is locked: raise the memlock limit, ulimit -l unlimited; in a container --ulimit memlock=-1)"
        }
        Errno::OPNOTSUPP => " (the NIC or its driver cannot register this kind of memory)",
        _ => "",
    }
}

fn post_advice(errno: i32) -> &'static str {
    match Errno::from_raw_os_error(errno) {
        Errno::NOMEM => " (the queue is full)",
        Errno::IO | Errno::NODEV => " (the NIC is gone: see dmesg)",
        _ => "",
    }
}

/// Operation of a work request. The sender knows it by the request's number: the NIC does not
/// report it on failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub enum Operation {
    /// RDMA write.
    Write,
    /// RDMA write that takes one of the peer's receives.
    WriteImmediate,
    /// Atomic addition.
    FetchAdd,
    /// Send.
    Send,
    /// Receive.
    Receive,
}

impl std::fmt::Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Operation::Write => "RDMA write",
            Operation::WriteImmediate => "RDMA write with immediate",
            Operation::FetchAdd => "fetch-add",
            Operation::Send => "send",
            Operation::Receive => "receive",
        })
    }
}

/// Why a work request failed: the statuses of libibverbs that a reliable connection can end with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum CompletionStatus {
    /// `IBV_WC_LOC_LEN_ERR`.
    #[error("local length error: the message does not fit what was posted")]
    LocalLength,
    /// `IBV_WC_LOC_QP_OP_ERR`.
    #[error("local queue pair operation error")]
    LocalOperation,
    /// `IBV_WC_LOC_PROT_ERR`.
    #[error("local protection error: the source is not registered for this NIC")]
    LocalProtection,
    /// `IBV_WC_WR_FLUSH_ERR`.
    #[error("flushed: the queue pair had failed before")]
    Flushed,
    /// `IBV_WC_BAD_RESP_ERR`.
    #[error("bad response")]
    BadResponse,
    /// `IBV_WC_LOC_ACCESS_ERR`.
    #[error("local access error")]
    LocalAccess,
    /// `IBV_WC_REM_INV_REQ_ERR`.
    #[error("remote invalid request: the peer's queue pair does not allow this operation")]
    RemoteRequest,
    /// `IBV_WC_REM_ACCESS_ERR`.
    #[error("remote access error: the target is outside the peer's region, or its key is no longer valid")]
    RemoteAccess,
    /// `IBV_WC_REM_OP_ERR`.
    #[error("remote operation error")]
    RemoteOperation,
    /// `IBV_WC_RETRY_EXC_ERR`.
    #[error(
        "retries exceeded: the peer's NIC does not answer (machine, cable or switch down, or its queue pair gone)"
    )]
    RetriesExceeded,
    /// `IBV_WC_RNR_RETRY_EXC_ERR`.
    #[error("receiver not ready: the peer has posted no receive")]
    ReceiverNotReady,
    /// `IBV_WC_REM_ABORT_ERR`.
    #[error("aborted by the peer")]
    RemoteAbort,
    /// `IBV_WC_FATAL_ERR`.
    #[error("fatal error of the NIC")]
    Fatal,
    /// `IBV_WC_RESP_TIMEOUT_ERR`.
    #[error("the response timed out")]
    ResponseTimeout,
    /// `IBV_WC_GENERAL_ERR`.
    #[error("general error of the NIC")]
    General,
    /// A status that is not of a reliable connection, or newer than this library.
    #[error("status {0}")]
    Other(u32),
}

impl CompletionStatus {
    /// Whether the peer, or the path to it, failed.
    pub fn is_remote(self) -> bool {
        use CompletionStatus as S;
        matches!(
            self,
            S::RemoteRequest
                | S::RemoteAccess
                | S::RemoteOperation
                | S::RetriesExceeded
                | S::ReceiverNotReady
                | S::RemoteAbort
                | S::BadResponse
                | S::ResponseTimeout
        )
    }
}
