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

mod flag;
mod floor_copies;
mod lanes;
mod net;
mod port;
#[cfg(test)]
mod tests;

pub use flag::FlagLine;
pub use flag::{now, yield_to_compute};
pub use floor_copies::{Floor, Moves, RAW};
pub use lanes::{COPY_ENGINE, Lanes, PeerLane};
pub use net::{
    ConnectionEnd, ConnectionOffer, Counters as NicCounters, DeviceMemory, LOOPBACK, LinkEmulator,
    LoopbackTransport, NetConnection, NetTransport, NicSurvey, NoDmaBuf, NoGpuDirect, ProgressThread, Region,
    Registration, RemoteAddress, Setup, TcpTransport, VerbsEnvironment, VerbsTransport, is_copied,
};
#[cfg(test)]
pub use net::{Fabric, LoopbackConnection, Settings, SignalMode, ring_bytes};
pub use port::{Io, MappedWindow, Port, RowSource, Scratch, WindowPart, flush};
