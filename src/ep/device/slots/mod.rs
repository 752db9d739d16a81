//! Instances in fixed slots on a CUDA stream: a program of constants that the stream carries out
//! alone.
//!
//! ```text
//!   caller's stream    pack  | copies, signals | waits |  experts  | check | copies, signals | waits |  sum
//!                     kernel   ---- no kernel ----      (caller's)   kernel  ---- no kernel ----      kernel
//!                            '---- dispatch ------------'            '----- combine ------------------------'
//! ```
//!
//! Each rank has a slot row for every token that another rank may send it
//! ([`SlotShape`](crate::plan::SlotShape)). So nothing is counted or dropped, no thread plans, and
//! sizes and addresses never change. Full slots move, whether used or not: for small batches this
//! costs less than an exchange of counts. A graph can hold both calls: their flags are constants,
//! and `schedule::stream_program` proves that this is safe.
//!
//! Between packed and landed rows there are copies by copy engines and memory operations of the
//! stream, and nothing else. Kernels run before and after, and [`Report`](crate::ep::Report) names
//! them.
//!
//! **Other nodes.** A *proxy*, one host thread for each instance, puts for the stream. The stream
//! sets a flag when slots are packed, and continues. If the NICs of all ranks read and write their
//! devices' memory, slots go from device to device. The receiving stream awaits a word behind them,
//! in device memory. Otherwise slots are staged in pinned host memory
//! ([`NoGpuDirect`](crate::world::NoGpuDirect) gives the reason): one batch of copies out before
//! the flag, one batch in behind the waits.
//!
//! **When the world fails**, all waits of streams are ended, and the status says that sums are
//! invalid. A stream that is made then writes the words in device memory. It must find a hardware
//! queue that no blocked stream holds, so a device with a single queue stages in the host. If all
//! queues are held, `synchronize` gives up and returns the cause.
//!
//! **A budget** ([`Graphs::Slots`](crate::ep::Graphs::Slots)). Kernels of `expansion` make
//! expert-major rows of the slots, as many as the budget holds, and fold outputs to one partial row
//! for each token and rank. Counts travel in the slots, so each rank drops the rows that the host
//! would.
//!
//! **Bad input** of one rank is refused on all ranks. The rank enters the call with empty slots,
//! whose heads say why, or answers a dispatch by a mark in place of rows. So `check` or `sum` of
//! each rank find it: no rank has rows, sums are zeros, and each rank's *verdict* of this call
//! names the rank.
//!
//! **Shared devices.** A stream waits for peers whose hosts may have enqueued nothing yet. If such
//! a host is in a driver call that waits until the device is idle, such as a free of memory, and
//! the waiting stream runs on the same device, neither goes on. So ranks that share a device keep
//! their tensors until all of them have finished.
//!
//! All ranks make the same calls in the same order. An instance has one dispatch in flight. For
//! more microbatches, make more instances, and enqueue their calls in the same order on all ranks.

mod expansion;
mod proxy;
mod slot_exchange;
mod slot_memory;
mod slot_results;
mod slot_setup;
#[cfg(test)]
mod tests;

pub(in crate::ep) use slot_exchange::{SlotCombine, SlotDispatch, SlotExchange};
pub(in crate::ep) use slot_results::{ExpandedRows, SlotHandle, SlotOutput, SlotRows};
#[cfg(test)]
pub(in crate::ep) use tests::between_two_machines;
