//! One schedule, several interpreters.
//!
//! A dispatch or a combine is a *program*: operations in ordered tracks, grouped in stages. It is built once
//! (the skeleton, [`DispatchSkeleton`] or [`ReturnSkeleton`]: who signals whom, in which order), filled per call (the [`Operands`]: which bytes), and read
//! by interpreters that do not know each other:
//!
//! ```text
//!                    skeleton (built once)  +  operands (per call)
//!                                 |
//!          +----------------+-----+----------+------------------+
//!          |                |                |                  |
//!     exec::host         prove             check            recorder
//!     moves bytes    no deadlock, no    random visibility   timeline
//!                    race, each byte    within the lanes'
//!                    written once       contract
//! ```
//!
//! Because a schedule has no branches and every flag word is monotone with one writer, no operation can disable
//! another. One greedy run therefore decides deadlock-freedom for every interleaving, and the happens-before order
//! is unique: that is what makes `prove` a proof rather than a sample.
//!
//! The operation set stays this small. A new feature is a new plan, not a new operation.

mod calls;
mod control;
mod direct;
mod fill;
mod op;
mod operands;

pub mod check;
pub mod mutate;
pub mod prove;
pub mod story;

pub use calls::Calls;
pub use control::{Control, HEADER_WORDS, LINE};
pub use direct::{Direct, Route};
pub use fill::{At, Parts, Tables};
pub use op::{DispatchSkeleton, Flag, Item, Level, Op, ReturnSkeleton, Slot, Stage};
pub use operands::{
    Operand, Operands, Place, Refusal, SpanCopy, Sum, Tag, WindowId, chunk_bytes, chunk_weights_offset,
};
