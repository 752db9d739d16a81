//! One schedule, several interpreters.
//!
//! A dispatch or a combine is a *program*: operations in ordered tracks, grouped in stages. It is
//! built once (the skeleton: signals and their order; [`Caller`] builds a rank's own part,
//! [`Relay`] its work for others), filled per call (the [`Operands`]: which bytes), and read by
//! independent interpreters:
//!
//! ```text
//!                    skeleton (built once)  +  operands (per call)
//!                                 |
//!          +----------------+-----+----------+------------------+---------------+
//!          |                |                |                  |               |
//!     exec::stepper      prove             check               time         recorder
//!     moves bytes    no deadlock, no    random visibility   a model of      timeline
//!                    race, each byte    within the lanes'   engines, links
//!                    written once       contract            and NICs
//! ```
//!
//! Because a schedule has no branches and every flag word is monotone with one writer, no operation
//! can disable another. One greedy run therefore decides deadlock-freedom for every interleaving,
//! and the happens-before order is unique: so `prove` is a proof rather than a sample.
//!
//! The operation set stays this small. A new feature is a new plan, not a new operation.

mod call_properties;
mod call_tables;
mod call_tags;
mod control_window;
mod op;
mod operands;
mod skeleton;
mod work;

pub mod call_program;
pub mod collective;
pub mod stream_program;

pub use crate::plan::LINE;
pub use call_properties::{CallProperties, Class, Payload};
pub use call_tables::{CallerTables, FillContext, RelayTables, ReturnParts, SumMemory};
pub use call_tags::{Refusal, Tag};
pub use control_window::{Calls, ControlLayout};
pub use op::{Flag, FlagValue, Line, Op, OperandId, Stage, TrackOp};
pub use operands::{
    Bytes, Effect, Index, MAX_BATCH, Operand, Operands, PutSource, SpanCopy, SumOperands, SumTarget,
    WindowId, copy_batches,
};
pub use skeleton::{Caller, Relay, RelaySums};
