//! Dispatch and combine on a CUDA stream: enqueued, not waited for, and the same in every call.
//!
//! ```text
//!   caller's stream    pack  | copies, signals | waits |  experts  | check | copies, signals | waits |  sum
//!                     kernel   ---- no kernel ----      (caller's)   kernel  ---- no kernel ----      kernel
//!                            '---- dispatch ------------'            '----- combine ------------------------'
//! ```
//!
//! Rank-major slots ([`SlotShape`](crate::plan::SlotShape)): each rank has a place for every token that another
//! may send it, so nothing is counted, nothing is dropped, nobody plans, and sizes and addresses never change. What small
//! batches pay for it (full slots move, used or not) is less than a count exchange costs them; for large batches it is
//! not. A graph can hold both calls: their flags are constants (`schedule::stream` says why that is safe, and proves it).
//!
//! Between *packed* and *landed* there are copies by copy engines and memory operations of the stream, and nothing else.
//! What is computed lies before and behind, and [`StreamReport`] names it.
//!
//! **Other nodes** are reached by a *proxy*, a thread of the host for each exchange: the stream rings when slots are packed, and
//! goes on. If the cards of all ranks read and write their devices' memory, slots go straight from where they are packed to where
//! they are received, and a word behind them, into memory of the device, is what the stream there awaits. Else they go by pinned
//! memory of the host ([`Detour`](crate::world::Detour) says why): out by a batch of copies before the bell, over the rail, and in
//! by a batch behind the waits.
//!
//! **When the world dies** all waits of streams are ended, and the status says that sums are worth nothing. Words in memory of
//! the device are written for that by a stream made then, which must find a hardware queue that no blocked stream holds. So a
//! device with a single queue takes the detour, and where all are held, `synchronize` gives up: it returns the cause.
//!
//! All ranks make the same calls in the same order. An exchange has one dispatch under way; for more microbatches, make more
//! exchanges, and enqueue their calls in the same order on all ranks.

mod aside;
mod builder;
mod exchange;
mod late;
mod places;
mod proxy;
mod setup;
#[cfg(test)]
mod tests;
mod turn;

pub use builder::StreamExchangeBuilder;
pub use exchange::{StreamExchange, StreamReport, StreamTokens};
#[cfg(test)]
pub(in crate::ep) use tests::between_two_machines;
