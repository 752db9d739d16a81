//! Instances of exact sizes, or of what a budget holds, on a CUDA stream: the host lays out each
//! call.
//!
//! The *enqueuer* hears from the caller's stream what was routed, exchanges counts with the other
//! ranks, places the rows and has copy engines move them. No kernel runs between packed and landed
//! rows. The caller's thread drives it.
//!
//! ```text
//!   caller's stream    ids to the host | flag | order, pack | ........ join | experts | ready .. join | sum
//!   caller's thread    start           finish: plan, as the host does      combine: bases
//!   stream of copies                                  | rows to all ranks            | rows return
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `setup`, `exchange`, `along`, `enqueue`, `handle` | how an instance is made; what its caller calls, enqueues and holds |
//! | `enqueuer`, `call`, `dispatch`, `cached`, `combine` | steps of the programs of [`schedule`](crate::schedule), with the engine of [`exec`](crate::exec) |
//! | `pack`, `in_place` | how rows are packed, and when they need not be |
//! | `choices` | what goes with rank-major rows |
//! | `remap` | another expert map |
//! | `arrivals` | further work of the enqueuer where copy engines relay |
//! | `watch` | deadlines for what streams await |
//! | `shape`, `space`, `seat`, `common` | memory layout, free memory, and what all of them share |
//!
//! The caller's thread enqueues in the second half of a call, and whatever a stream waits for is
//! enqueued by then. So no stream waits for a thread that has yet to call the driver.
//! [`CopyEngineStepper`](crate::exec::CopyEngineStepper) has the order. Calls take turns on the
//! caller's stream, so handles share one staging memory.
//!
//! **A budget.** Rows are packed as they were chosen; the layout then leaves out those that find no
//! room, as on the host. A CUDA graph replays a call when no thread of the caller's is there: the
//! constant program of [`slots`](super::slots) serves it.
//!
//! **Other nodes.** If the NICs of all ranks read and write their devices' memory
//! ([`Registration`](crate::world::Registration)), rows go from device to device. Otherwise they
//! are staged in pinned memory of the host on both sides, and
//! [`NoGpuDirect`](crate::world::NoGpuDirect) gives the reason. The enqueuer posts the puts and
//! does this rank's part as a relay. This table counts the copies of a row, by engines (`e`), by
//! NICs (`r`) and by kernels (`k`):
//!
//! | route | own node | other node, dispatch | other node, combine | floor |
//! |---|---|---|---|---|
//! | direct | e | r | r | bytes by the NIC's bandwidth |
//! | pxn | e k | r e k, `r` once per token and node | r, from the rank that has it | the same, of fewer bytes |
//! | direct, host-staged | e | e r e | e r e | bytes by the NIC's bandwidth, or twice by the bus |
//! | pxn, host-staged | e k | e r e k, `e r` once per token and node | e r e, the first `e` to the relay's outbox | the same, of fewer bytes |
//!
//! From device to device, a NIC reads packed rows after the stream has marked them. A flag in
//! memory of the host may overtake rows in memory of the device. So NICs write a word behind the
//! rows into the device's memory, and the stream awaits that word. Host-staged copies out are one
//! batch for each signal to another node. Under `direct`, copies in are one for each stretch of
//! visible rows that no local peer interrupts. Under `pxn` they are the runs of a block in relay
//! order, and a kernel puts what arrived into visible order.
//! [`EnqueueCounts`](crate::exec::EnqueueCounts) counts all of them.

mod along;
mod arrivals;
mod cached;
mod call;
mod choices;
mod combine;
mod common;
mod dispatch;
mod enqueue;
mod enqueuer;
mod exchange;
mod handle;
mod in_place;
mod pack;
mod remap;
mod seat;
mod setup;
mod shape;
mod space;
#[cfg(test)]
pub(in crate::ep) mod tests;
mod watch;

pub(in crate::ep) use exchange::{PlannedCombine, PlannedExchange};
pub(in crate::ep) use handle::{PlannedDispatch, PlannedHandle, PlannedOutput, PlannedRows};
pub(in crate::ep) use in_place::PlannedTokens;
pub(in crate::ep) use setup::PlannedSettings;

/// A flag's value, less one, that says: my caller's input was refused. No number of tokens is so
/// large, and no place.
const REFUSED: u32 = u32::MAX - 1;
