//! Connections: messages between ranks, and their bytes.
//!
//! ```text
//!   auth         proves that both sides know the secret: messages in, messages out
//!   message      the messages, and their parts as bytes
//!   blobs        many blobs of a message in one buffer
//!   connection   a TCP stream that never blocks; frames: bytes, with a length that is not believed
//!   outbox       bytes on their way; peers share those that all of them get
//! ```
//!
//! This module does not know what messages are for.

mod auth;
mod blobs;
mod connection;
mod message;
mod outbox;

pub(super) use auth::{Initiator, RendezvousId, Responder, job_digest, keyed};
pub(super) use blobs::{Blobs, Column};
pub(super) use connection::{MAX_FRAME, Malformed, MessageConnection, Reader, Writer};
pub use message::Setting;
pub(super) use message::{
    Admission, Answer, EncodedAnswer, Hello, JoinRefusal, ListenAddress, Message, PROTOCOL, Roster, Survivor,
};
#[cfg(test)]
pub(super) use outbox::Outbox;
