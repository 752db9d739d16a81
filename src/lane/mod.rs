//! Lanes: transports between two ranks, and the meaning of a signal on each.
//!
//! | lane | between | put | signal | wait |
//! |---|---|---|---|---|
//! | shm | ranks of a node | copy into the peer's mapped heap | a store, behind a fence after streaming stores; wakes counted waiters | poll, pause, yield, futex |
//! | loopback | "nodes" of one machine | records in a ring that only the pair has mapped, with credits | a record behind the puts | as shm |
//! | emulated | as loopback, to measure overlap | as loopback | as loopback, held until a slower link would deliver it | as shm |
//! | verbs | machines with RDMA NICs | RDMA write from registered memory, or from a copy | a write or an addition behind the puts, or a number that comes with the last one | polls, because nothing wakes it; by number: as shm |
//! | tcp | any machines | records on a connection, from their source to their target | a record behind the puts | as shm |
//! | copy engine | GPUs of a node | copies of a stream | a memory operation of the stream, behind the copies | polls, because nothing wakes it |
//!
//! A [`Port`] is an executor's view: the windows of one owner (an `ExpertParallel`, a caller's
//! window) and a lane to every rank of the group. The contract is the same for every lane. A signal
//! is visible only after all earlier puts of its track. Every access is checked against its window
//! before it is posted. Every wait ends, with the value or with a typed error.
//!
//! ```text
//!   exec --> Port --+-- same node  --> shm: PeerMapping (heaps of the node)
//!                   +-- other node --> NetConnection: loopback, verbs, tcp; ProgressThread serves all
//!
//!   port    windows of one owner: put, signal, wait     lanes   a lane to each rank of a group
//!   flag    a word and its tag, in one cache line       wait    poll, yield, sleep; every wait ends
//!   sum     sums over the offers of peers               floor   the same bytes in bare loops
//!   net     lanes between nodes
//! ```

#![allow(unsafe_code, reason = "stores into memory that other processes map cannot be said in safe Rust")]

#[cfg(test)]
mod conformance;
mod flag;
mod floor;
mod lanes;
mod net;
mod port;
mod sum;
mod wait;

pub use flag::FlagLine;
pub use floor::RAW;
pub use floor::{Floor, Moves};
pub use lanes::COPY_ENGINE;
pub use lanes::{Lanes, PeerLane};
pub use net::Counters as NicCounters;
pub use net::is_copied;
pub use net::{
    ConnectionEnd, ConnectionOffer, LOOPBACK, LinkEmulator, LoopbackTransport, NetConnection, NetTransport,
    ProgressThread, Region, RemoteAddress, Setup, TcpTransport, VerbsEnvironment, VerbsTransport,
};
pub use net::{DeviceMemory, NoDmaBuf, NoGpuDirect, Registration};
#[cfg(test)]
pub use net::{Fabric, LoopbackConnection, Settings, SignalMode, ring_bytes};
pub use port::Port;
pub use port::flush;
pub use port::{Io, RowSource};
pub use port::{MappedWindow, WindowPart};
pub use sum::Scratch;
pub use wait::now;
pub use wait::yield_to_compute;
