//! Computations of a call between its stages, on the host and for a device alike.
//!
//! ```text
//!   state       settings, lanes, windows: never changes
//!   agreement   tags and counts of all ranks  ->  is it one call, and is there room?
//!   relay       headers of the sources  ->  what this rank copies for its node
//!   metadata    words behind the rows  ->  weights, experts, counts, order
//! ```

mod agreement;
mod metadata;
mod relay;
mod state;

pub(super) use agreement::GroupCounts;
pub(super) use metadata::ReceivedMetadata;
pub use metadata::{RowIndex, Strided};
pub(super) use relay::{CallPlan, Relay, RelayCall, RelayTask};
pub(super) use state::{CHUNKS, EpState, ReceiveMemory, RowMemory};
