//! Pipeline schedules as plans: for each stage a list of passes and messages.
//!
//! A stage of a pipeline holds some layers. With `v` model chunks it holds `v` pieces of the model,
//! of which piece `c` of stage `s` is the virtual stage `c p + s`. A step cuts its batch into
//! microbatches. [`Schedule::plan`] makes the plan by two numbers a stage: forward passes before
//! the first backward pass, and backward passes before the first gradient of weights.
//!
//! ```text
//!   stage s of p, m microbatches        warm-up                   delay of W    bubble            held microbatches
//!   GPipe                               m                         -             (p-1)(F+B+W)      m
//!   1F1B                                p-s-1                     -             (p-1)(F+B+W)      p-s
//!   interleaved, Megatron's warm-up     2(p-s-1) + (v-1) p        -             (p-1)(F+B+W)      2(p-s-1) + (v-1) p + 1 chunks
//!   interleaved, least warm-up          p-s-1 + (v-1) p           -             (p-1)(F+B+W)      p-s + (v-1) p chunks
//!   ZB-H1, m >= p                       p-s-1                     s             (p-1)(F+B-W)      p
//!   ZB-H2, m >= 2p-1                    2(p-s-1)                  2s            (p-1)(F+B-2W)     2p-1
//!   DualPipe, m >= 2p, F = B                                                    (p/2-1)(O+B-2W)   p+1 of two pieces
//! ```
//!
//! `F`, `B` and `W` are the times of one model chunk: forward, gradients of inputs, gradients of
//! weights. So the bubble of an interleaved schedule is that of 1F1B divided by `v`. The formulas
//! of zero bubble hold for `W <= F`, and that of ZB-H2 does not fall below 0. They count the idle
//! time between the first and the last pass of a stage, because the next step of a stage begins
//! without waiting for the others. To make that safe, zero bubble checks the gradient norm after
//! the optimizer's step, and takes the step back if it must. [`dual_pipe`] sends microbatches from
//! both ends and pairs passes, which take `O` together.
//!
//! [`Plan::prove`] shows that a plan makes each pass once, with what it needs, and that its
//! messages never deadlock. [`Plan::time`] replays it with costs. Both take the number of messages
//! that a receiver holds before it asks for them:
//!
//! ```text
//!   stage 0    F0 {send F0} F1 {send F1, receive B0} B0       0 unread: a send waits for its receive
//!   stage 1       {receive F0} F0 B0 {send B0, receive F1}    1 unread: a send waits for the receive before
//! ```
//!
//! GPipe, 1F1B and ZB-H1 need none. ZB-H2, DualPipe and Megatron's warm-up need one. The least
//! warm-up needs `p / 2`, because the last stage runs ahead of the first.
//!
//! A [`Pipeline`] carries out a plan: it calls the layers of a rank ([`Stage`]), and sends and
//! receives by communicators. Passes that overlap are one call of the layers. Stages meet behind a
//! run, which may have several steps ([`Plan::steps`], [`PostValidation`]).

mod dual_pipe;
mod plan;
mod plan_replay;
mod plan_times;
mod post_validation;
mod prove;
mod run;
mod schedules;
mod turns;

pub use dual_pipe::dual_pipe;
pub use plan::{Compute, Direction, Pass, Plan, Route, Shape, Step, Tensor, Transfer};
pub use plan_times::{Costs, Span, Timeline};
pub use post_validation::{OptimizedStage, PostValidation, Update};
pub use prove::{Peak, Proof};
pub use run::{BackwardCall, ForwardCall, Pipeline, Stage};
pub use schedules::{Schedule, WarmUp};
#[doc(hidden)]
pub use turns::messages_in_turn;
