//! Connections: messages between ranks, and their bytes.
//!
//! ```text
//!   auth         proves that both sides know the secret: messages in, messages out
//!   message      the messages, and their parts as bytes
//!   blobs        many blobs of a message in one buffer
//!   frame        bytes, with a length that is not believed
//!   connection   a TCP stream that never blocks
//! ```
//!
//! This module does not know what messages are for.

mod auth;
mod blobs;
mod connection;
mod message;

pub(super) use auth::{Initiator, RendezvousId, Responder, job_digest, keyed};
pub(super) use blobs::{Blobs, Column};
pub(super) use connection::{MAX_FRAME, Malformed, MessageConnection, Reader, Writer};
pub use message::Setting;
pub(super) use message::{
    Admission, Answer, Hello, JoinRefusal, ListenAddress, Message, PROTOCOL, Roster, Survivor,
};
