//! Errors of the verbs lane: the library, the cards, and what a card says of a request.

use std::io;
use std::net::Ipv6Addr;

use rustix::io::Errno;

use super::{CompletionStatus, Operation};

/// A network card could not be used, or did not do what it was asked to.
#[derive(Debug, Clone, PartialEq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum VerbsError {
    /// libibverbs is not there.
    #[error(
        "cannot load {library}: {reason} (install libibverbs1 and ibverbs-providers, elsewhere rdma-core, or set SIDELANE_IBVERBS_LIBRARY to its path)"
    )]
    NoLibrary {
        /// What was to be loaded.
        library: String,
        /// What the loader says.
        reason: String,
    },
    /// What was loaded is not libibverbs.
    #[error("{library} has no {symbol}: it is not libibverbs 1.1 or newer")]
    MissingSymbol {
        /// What was loaded.
        library: String,
        /// What it lacks.
        symbol: &'static str,
    },
    /// This libibverbs is too old for something that was asked for.
    #[error(
        "{feature} needs {symbol}, which this libibverbs does not have: install rdma-core {since} or newer"
    )]
    TooOld {
        /// What was asked for.
        feature: &'static str,
        /// What is missing.
        symbol: &'static str,
        /// The first version that has it.
        since: &'static str,
    },
    /// No card.
    #[error(
        "no RDMA card on this machine (if there is one: load its driver and ib_uverbs; in a container pass --device=/dev/infiniband)"
    )]
    NoCard,
    /// A card that was named is not there.
    #[error("no card {card} (SIDELANE_VERBS_NICS): this machine has {present:?}")]
    NoSuchCard {
        /// Its name.
        card: String,
        /// The cards that are there.
        present: Vec<String>,
    },
    /// A card cannot be opened.
    #[error("cannot open card {card}: {}{}", text(*errno), open_advice(*errno))]
    Open {
        /// The card.
        card: String,
        /// The errno.
        errno: i32,
    },
    /// A card has no port of this number.
    #[error("card {card} has no port {port} (SIDELANE_VERBS_PORT): its ports are 1 to {ports}")]
    NoSuchPort {
        /// The card.
        card: String,
        /// The port.
        port: u8,
        /// How many it has.
        ports: u8,
    },
    /// No port of a card, or not the one asked for, carries traffic.
    #[error(
        "card {card}, port {port} is {state} (check the cable, the switch and, for InfiniBand, that a subnet manager runs)"
    )]
    PortDown {
        /// The card.
        card: String,
        /// The port; the first one if none was asked for.
        port: u8,
        /// Its state.
        state: &'static str,
    },
    /// A port has no address that routers know.
    #[error(
        "card {card}, port {port} has no GID that can route: give its network interface an IPv4 or IPv6 address, so that RoCE v2 has one"
    )]
    NoGid {
        /// The card.
        card: String,
        /// The port.
        port: u8,
    },
    /// The GID that was asked for is empty.
    #[error("card {card}, port {port} has no GID of index {index} (SIDELANE_VERBS_GID_INDEX)")]
    NoSuchGid {
        /// The card.
        card: String,
        /// The port.
        port: u8,
        /// Its place in the table.
        index: u8,
    },
    /// Packets were asked for that are larger than the port sends now.
    #[error(
        "card {card}, port {port} sends packets of {active} bytes now, SIDELANE_VERBS_MTU asks for {asked}"
    )]
    MtuTooLarge {
        /// The card.
        card: String,
        /// The port.
        port: u8,
        /// Bytes asked for.
        asked: u32,
        /// Bytes of its active MTU.
        active: u32,
    },
    /// Memory cannot be registered.
    #[error("card {card} cannot register {bytes} bytes: {}{}", text(*errno), register_advice(*errno))]
    Register {
        /// The card.
        card: String,
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
    /// A partner's description of its queue pair speaks another version.
    #[error("rank {peer} speaks version {seen} of the verbs lane, this rank {expected}: build both alike")]
    EndpointVersion {
        /// The partner (in the world).
        peer: u32,
        /// Its version.
        seen: u8,
        /// Ours.
        expected: u8,
    },
    /// A partner's description of its queue pair is no such thing.
    #[error("rank {peer} described its queue pair in {seen} bytes, expected {expected}")]
    EndpointLength {
        /// The partner (in the world).
        peer: u32,
        /// Bytes that came.
        seen: usize,
        /// Bytes of a description.
        expected: usize,
    },
    /// A partner's description of its queue pair holds a value that cannot be.
    #[error("rank {peer} described its queue pair with {field} = {value:#x}, which cannot be")]
    EndpointField {
        /// The partner (in the world).
        peer: u32,
        /// What is wrong.
        field: &'static str,
        /// Its value.
        value: u32,
    },
    /// One end is InfiniBand, the other Ethernet.
    #[error("card {card} cannot talk to the card of rank {peer}: one is InfiniBand, the other Ethernet")]
    LinkLayers {
        /// Our card.
        card: String,
        /// The partner (in the world).
        peer: u32,
    },
    /// There is no way from our address to the partner's.
    #[error(
        "card {card}: no route from GID {gid} to GID {remote} of rank {peer}: {} (both cards must be in networks that reach each other; choose others with SIDELANE_VERBS_NICS or SIDELANE_VERBS_GID_INDEX)",
        text(*errno)
    )]
    NoRoute {
        /// Our card.
        card: String,
        /// The partner (in the world).
        peer: u32,
        /// Our address.
        gid: Ipv6Addr,
        /// The partner's.
        remote: Ipv6Addr,
        /// The errno.
        errno: i32,
    },
    /// Fetch-add was asked for, and a card has none.
    #[error("card {card} has no fetch-add: choose another SIDELANE_VERBS_SIGNAL")]
    NoAtomics {
        /// The card.
        card: String,
    },
    /// Two ranks signal in different ways.
    #[error(
        "rank {peer} signals by {theirs}, this rank by {mine}: set SIDELANE_VERBS_SIGNAL alike on all ranks"
    )]
    SignalsDiffer {
        /// The partner (in the world).
        peer: u32,
        /// Our way.
        mine: &'static str,
        /// Its way.
        theirs: &'static str,
    },
    /// What a partner told of a region makes no sense.
    #[error("rank {peer} told keys of its region {region} that cannot be")]
    Keys {
        /// The partner (in the world).
        peer: u32,
        /// The region.
        region: u32,
    },
    /// A partner has told no key for a place.
    #[error("rank {peer} has told no key for byte {offset} of its region {region}")]
    NoKey {
        /// The partner (in the world).
        peer: u32,
        /// The region.
        region: u32,
        /// The byte.
        offset: u64,
    },
    /// A partner sent a message that no correct partner sends.
    #[error("rank {peer} sent a message that no correct rank sends")]
    Message {
        /// The partner (in the world).
        peer: u32,
    },
    /// A request is larger than its chain was made for.
    #[error("{asked} {what} asked, the chain was made for {limit}")]
    ChainLimit {
        /// What there is too much of.
        what: &'static str,
        /// How many were asked for.
        asked: usize,
        /// How many there may be.
        limit: usize,
    },
    /// A card refused work requests.
    #[error(
        "card {card}, queue pair {queue_pair} to rank {peer}: {call} took {taken} work requests, then refused: {}{}",
        text(*errno),
        post_advice(*errno)
    )]
    Post {
        /// The card.
        card: String,
        /// Its queue pair.
        queue_pair: u32,
        /// The partner (in the world).
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
        "card {card}, queue pair {queue_pair} to rank {peer}: {operation} failed: {status} (vendor error {vendor:#x})"
    )]
    Completion {
        /// The card.
        card: String,
        /// Its queue pair.
        queue_pair: u32,
        /// The partner (in the world).
        peer: u32,
        /// What failed, as the number of the work request tells.
        operation: Operation,
        /// Why.
        status: CompletionStatus,
        /// What the card's maker says about it.
        vendor: u32,
    },
    /// A queue pair went into its error state without a work request of this side.
    #[error("card {card}, queue pair {queue_pair}: {event}")]
    QueuePairLost {
        /// The card.
        card: String,
        /// Its queue pair.
        queue_pair: u32,
        /// What happened.
        event: &'static str,
    },
    /// More completions came than the completion queue holds.
    #[error("card {card}: a completion queue overflowed")]
    QueueOverflow {
        /// The card.
        card: String,
    },
    /// A card is gone.
    #[error("card {card} is gone: its driver reports a fatal error (see dmesg)")]
    CardLost {
        /// The card.
        card: String,
    },
    /// Another call failed.
    #[error("card {card}: {call} failed: {}", text(*errno))]
    Call {
        /// The card.
        card: String,
        /// The call.
        call: &'static str,
        /// Its errno.
        errno: i32,
    },
}

fn text(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
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
        Errno::OPNOTSUPP => " (the card or its driver cannot register this kind of memory)",
        _ => "",
    }
}

fn post_advice(errno: i32) -> &'static str {
    match Errno::from_raw_os_error(errno) {
        Errno::NOMEM => " (the queue is full)",
        Errno::IO | Errno::NODEV => " (the card is gone: see dmesg)",
        _ => "",
    }
}
