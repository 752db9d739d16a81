//! Dispatch and combine on a CUDA stream, planned beside it.
//!
//! The caller's thread enqueues and goes on. A *planner*, a thread of its own for each exchange, hears from the stream what
//! was routed, exchanges counts with the other planners, places, and has copy engines move the rows; then the stream goes on,
//! too. Sizes are exact, nobody blocks, and between packed and landed no kernel runs.
//!
//! ```text
//!   caller's thread    dispatch()  ...            finish(): sizes
//!   caller's stream    ids to the host | bell | sort, regroup | packed | wait | experts | bell | wait | sum
//!   planner                                plan, as the host does           bases
//!   planner's stream                            wait packed | rows to everybody       | rows home
//! ```
//!
//! | file | what |
//! |---|---|
//! | `exchange`, `tokens`, `enqueue` | what the caller calls, brings, and has put on its stream |
//! | `planner`, `dispatch`, `combine` | what the planner does of it: the programs of [`schedule`](crate::schedule), by [`exec`](crate::exec)'s engine |
//! | `arrivals` | what else the planner does where engines relay |
//! | `shape`, `space`, `seat` | where things lie, what is free, what the planner tells |
//! | `guard` | what ends the waits of streams when the world dies |
//! | `apart` | a stream that the caller's cannot hold up |
//!
//! **Constants.** Between a stream and its own planner there are *bells*: words of the host's memory that one side sets and
//! the other takes back. Generations, which grow, are the planners' alone. So what a stream does for a call never changes,
//! and with a budget of rows ([`Mode::Budget`](crate::plan::Mode)), where memory does not move either, it can be captured
//! into a graph and replayed, each time with other tokens.
//!
//! **Other nodes** are reached straight, if the cards of all ranks read and write their devices' memory
//! ([`Registration`](crate::world::Registration)): from where rows lie packed to where they are to lie, and home to where
//! they are summed. Else they go by memory of the host ([`Detour`](crate::world::Detour) says why): from the device to pinned memory, over
//! the rail, to pinned memory there, to the device. The planner is the proxy of the rails, and plays this rank's relay, too. How
//! often a row is copied, by engines `e` and rails `r`, in a dispatch and in a combine:
//!
//! | | own, same node | another node, a dispatch | home | floor |
//! |---|---|---|---|---|
//! | direct | e | r | r | the bytes by the rail's bandwidth |
//! | pxn | e k | r e k, `r` once for each token and node | r, from whoever has it | the same, of fewer bytes out |
//! | direct, detour | e | e r e | e r e | the bytes by the rail's bandwidth, or twice by the bus |
//! | pxn, detour | e k | e r e k, `e r` once for each token and node | e r e, the first from whoever has it to the relay's outbox | the same, of fewer bytes out |
//!
//! Straight, a card reads packed rows once the stream has said that they are. A flag in memory of the host may overtake rows
//! in memory of the device: so cards write a word behind them, there, which the stream awaits before anybody goes on with
//! them. On the detour, copies out are a batch for each signal that crosses, and under `direct` copies in are one for each stretch of
//! visible rows that no neighbour interrupts. Under `pxn` the relay's are the runs of a block in relay order, a few for each rank, cut by
//! chunks; and a kernel `k` puts what arrived into visible order ([`PlannedRows::index`] serves who needs none).
//! [`Enqueued`](crate::exec::Enqueued) counts all of them.
//!
//! **What is there**: expert-major, sums in order of experts, eager and budget. Rank-major rows, fp8, gradients and cached
//! dispatches are not.

mod apart;
mod arrivals;
mod builder;
mod call;
mod combine;
mod common;
mod dispatch;
mod enqueue;
mod exchange;
mod handle;
mod planner;
mod seat;
mod shape;
mod space;
mod status;
#[cfg(test)]
pub(in crate::ep) mod tests;
mod tokens;

pub use builder::PlannedBuilder;
pub use exchange::PlannedExchange;
pub use handle::{PlannedCombine, PlannedDispatch, PlannedHandle, PlannedOutput, PlannedReport, PlannedRows};
pub use status::Status;
pub use tokens::Tokens;

/// A bell's value, less one, that says: my caller's input was refused. No number of tokens is so large, and no place.
const REFUSED: u32 = u32::MAX - 1;
