//! The protocols of the library as models for loom. Each test proves one protocol, and that it
//! needs each of its orders.

#![allow(
    clippy::arc_with_non_send_sync,
    reason = "loom runs the threads of a model in one thread of the system"
)]

mod failure;
mod flag;
mod machine;
mod owed_answers;
mod pool;
mod slots;
mod stream_use;
mod wake_request;
