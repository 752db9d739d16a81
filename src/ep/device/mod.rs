//! Instances on a device: rows in memory of a GPU, calls on a CUDA stream, and no kernel between
//! packed and landed rows.
//!
//! With exact sizes, or within a budget, the host lays out each call. The *enqueuer* hears from the
//! caller's stream how many rows its tokens have for each expert, exchanges counts with the other
//! ranks, places the rows and has copy engines move them. The caller's thread drives it:
//!
//! ```text
//!   caller's stream    plan choices | flag | pack | .......... join | experts | ready .. join | sum
//!   caller's thread    start          finish: counts, layout           combine: bases
//!   stream of copies                                  | rows to all ranks            | rows return
//! ```
//!
//! | module | subject |
//! |---|---|
//! | `enqueued_exchange`, `enqueued_backward`, `enqueued_results` | calls of an instance that the host lays out, and their results |
//! | `enqueuer`, `enqueued_dispatch` | stages of these calls, by the programs of [`schedule`](crate::schedule) |
//! | `enqueued_node_sums` | sums that relays make of the rows of their node |
//! | `dispatch_planner` | who plans a dispatch: the device where counts are enough for the host, else the host |
//! | `session`, `memory`, `enqueued_setup` | what never changes, the layout of memory, and how they are made |
//! | `device_pool`, `default_heap`, `heap_growth`, `enqueued_growth` | the pool of rows and outputs, its default size, and how it grows |
//! | `heap_allocator` | memory of the pool for allocators of other libraries |
//! | `slots` | fixed slots, or a budget that graphs hold: every address is a constant, so the stream carries a call out alone |
//! | `row_transport` | how rows cross between nodes: from device to device, or by pinned memory of the host |
//! | `watchdog` | what ends the waits of streams |
//!
//! The caller's thread enqueues in the second half of a call, and whatever a stream waits for is
//! enqueued by then. So no stream waits for a thread that has yet to call the driver.
//! [`CopyEngineStepper`](crate::exec::CopyEngineStepper) has the order. Calls take turns on the
//! caller's stream, so handles share one staging memory.
//!
//! **A budget.** Rows are packed as they were chosen; the layout then leaves out those that find no
//! room, as on the host. A CUDA graph replays a call when no thread of the caller's is there: the
//! constant program of [`slots`] serves it.
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

mod caller_stream;
mod default_heap;
mod device_pool;
mod dispatch_planner;
mod enqueued_backward;
mod enqueued_dispatch;
mod enqueued_exchange;
mod enqueued_growth;
mod enqueued_node_sums;
mod enqueued_results;
mod enqueued_setup;
mod enqueuer;
mod heap_allocator;
mod heap_growth;
mod memory;
mod row_transport;
mod session;
pub(super) mod slots;
#[cfg(test)]
pub(in crate::ep) mod tests;
mod watchdog;

use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) use default_heap::HeapLoad;
pub use device_pool::DeviceHeapReport;
pub(super) use enqueued_exchange::{EnqueuedCombine, EnqueuedExchange};
pub(super) use enqueued_results::{EnqueuedDispatch, EnqueuedHandle, EnqueuedOutput, EnqueuedRows};
pub(super) use enqueued_setup::EnqueuedSettings;
pub use heap_allocator::HeapAllocator;
pub(super) use session::EnqueuedTokens;

/// A number of tokens that says: my caller's input was refused. No tensor has so many.
const REFUSED: u32 = u32::MAX - 1;

/// Number of a new instance on a device. It distinguishes handles within this process.
fn next_instance() -> u64 {
    static INSTANCES: AtomicU64 = AtomicU64::new(0);
    INSTANCES.fetch_add(1, Ordering::Relaxed)
}
