//! NICs: libibverbs behind a safe, typed interface.
//!
//! The NIC reads and writes memory that was registered for it. The processor posts requests and
//! polls completions. Everything is loaded at run time: without the library or a NIC there is a
//! typed error, never a panic.
//!
//! ```text
//!   Settings, Sysfs --> Nic: a NIC of this rank, open, and the address of its queue pairs
//!
//!   Library --> Context --+--> ProtectionDomain --+--> MemoryRegion --> Sge, Remote
//!   (table of  (an open   |                       +--> QueuePair <-- SendChain, ReceiveChain
//!   functions)  NIC)      +--> CompletionQueue -------^    |
//!                                |                         +--> Endpoint: to the peer and back
//!                                +--> Completion: done, or the reason
//! ```
//!
//! The lane is built on it. An [`VerbsTransport`] is all NICs of a rank. A connection joins each
//! pair of ranks. It bounds the requests in flight, and its requests can be predicted. With several
//! queue pairs a `StripedConnection` spreads puts over as many connections.
//!
//! ```text
//!   VerbsTransport --+--> NicMemory    a NIC and the memory registered with it: keys for peers
//!                    +--> StagingPool  slots of a NIC for bytes that are copied, shared by connections
//!                    +--> EventThread  ports that go down, queue pairs that are lost
//!                    +--> Connection
//!                           +--> Sender     requests: gathered, queued, posted, done; slots, a Block
//!                           +--> Receiver   signals that come as messages
//!                           +--> Forecast   prediction of the requests
//! ```
//!
//! Each object keeps those alive that it was made from, so any order of drops is right. A call that
//! fails during a drop is traced, because no caller could act on it.
//!
//! The module `library` gives the reason for own declarations instead of a crate for verbs.

mod block;
mod connection;
mod depth;
mod events;
#[cfg(test)]
mod fake;
mod ffi;
mod forecast;
mod library;
mod memory;
mod nic;
mod order;
mod queue_pair;
mod reach;
mod receiver;
mod registration;
mod sender;
mod settings;
mod staging;
mod striped;
#[cfg(test)]
mod tests;
mod transport;
mod work;

#[cfg(test)]
pub use fake::Fabric;
pub use library::{Context, Library};
pub use memory::{Access, MemoryRegion, Pinned, ProtectionDomain, Remote, Sge};
#[cfg(test)]
pub use nic::{Mtu, Nic};
pub use nic::{NicSurvey, Sysfs};
pub use queue_pair::{Caps, Endpoint, Path, QueuePair, Queues};
pub use settings::{Settings, SignalMode};
pub use transport::{Setup, VerbsEnvironment, VerbsTransport};
pub use work::{ChainCaps, Flags, ReceiveChain, SendChain};
pub use work::{Completion, CompletionChannel, CompletionQueue};
#[cfg(test)]
pub use work::{Done, Failed, Kind};
