//! Messages of ranks to a coordinator, and its messages to them.
//!
//! ```text
//!   guest   Hello ──────────►                      host      (module `auth`)
//!           ◄────────── Challenge | Refused
//!           Proof ──────────►
//!           ◄────────── Proof | Refused
//!           ◄────────── Welcome | Refused
//!   rank    Set Get Gather Withdraw  Heartbeat  Dead  Bye ──►  coordinator
//!           ◄──  Answer              Heartbeat  Dead  Left
//! ```

use super::{
    frame::{Malformed, Reader, Writer},
    parts::{
        Answer, JoinRefusal, ListenAddress, read_answer, read_cause, read_door, read_refusal, write_answer,
        write_cause, write_door, write_ranks, write_refusal,
    },
};
use crate::error::Cause;

/// Version of everything in this file.
pub(in crate::bootstrap) const PROTOCOL: u32 = 2;

/// The joining rank, its purpose, and its own listening address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::bootstrap) struct Hello {
    pub version: u32,
    /// Digest of the job's name.
    pub job: [u8; 32],
    /// Rank, and size of the world, before this meeting.
    pub rank: u32,
    pub size: u32,
    /// The epoch that is to begin.
    pub epoch: u16,
    /// The rank that the guest believes to be the host.
    pub host: u32,
    /// Port of the guest's standing listener.
    pub port: u16,
    pub nonce: [u8; 32],
}

/// A message.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::bootstrap) enum Message {
    Hello(Hello),
    Challenge { version: u32, nonce: [u8; 32] },
    Proof([u8; 32]),
    Refused(JoinRefusal),
    Welcome { rank: u32, members: Vec<u32>, doors: Vec<ListenAddress> },
    Heartbeat,
    Set { ticket: u64, key: String, value: Vec<u8> },
    Get { ticket: u64, key: String },
    Gather { ticket: u64, key: String, index: u32, count: u32, blob: Vec<u8> },
    Withdraw { ticket: u64 },
    Answer { ticket: u64, answer: Answer },
    Dead(Cause),
    Left { rank: u32 },
    Bye,
}

impl Message {
    /// The frame of this message.
    pub(in crate::bootstrap) fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        match self {
            Message::Hello(hello) => {
                w.u8(0);
                w.u32(hello.version);
                w.array(&hello.job);
                w.u32(hello.rank);
                w.u32(hello.size);
                w.u16(hello.epoch);
                w.u32(hello.host);
                w.u16(hello.port);
                w.array(&hello.nonce);
            }
            Message::Challenge { version, nonce } => {
                w.u8(1);
                w.u32(*version);
                w.array(nonce);
            }
            Message::Proof(proof) => {
                w.u8(2);
                w.array(proof);
            }
            Message::Refused(refusal) => {
                w.u8(3);
                write_refusal(&mut w, refusal);
            }
            Message::Welcome { rank, members, doors } => {
                w.u8(4);
                w.u32(*rank);
                write_ranks(&mut w, members);
                w.u32(doors.len() as u32);
                doors.iter().for_each(|door| write_door(&mut w, door));
            }
            Message::Heartbeat => w.u8(5),
            Message::Set { ticket, key, value } => {
                w.u8(6);
                w.u64(*ticket);
                w.bytes(key.as_bytes());
                w.bytes(value);
            }
            Message::Get { ticket, key } => {
                w.u8(7);
                w.u64(*ticket);
                w.bytes(key.as_bytes());
            }
            Message::Gather { ticket, key, index, count, blob } => {
                w.u8(8);
                w.u64(*ticket);
                w.bytes(key.as_bytes());
                w.u32(*index);
                w.u32(*count);
                w.bytes(blob);
            }
            Message::Withdraw { ticket } => {
                w.u8(9);
                w.u64(*ticket);
            }
            Message::Answer { ticket, answer } => {
                w.u8(10);
                w.u64(*ticket);
                write_answer(&mut w, answer);
            }
            Message::Dead(cause) => {
                w.u8(11);
                write_cause(&mut w, cause);
            }
            Message::Left { rank } => {
                w.u8(12);
                w.u32(*rank);
            }
            Message::Bye => w.u8(13),
        }
        w.finish()
    }

    /// The message of a frame's body.
    pub(super) fn decode(body: &[u8]) -> Result<Message, Malformed> {
        let mut reader = Reader::new(body);
        let r = &mut reader;
        let message = match r.u8()? {
            0 => Message::Hello(Hello {
                version: r.u32()?,
                job: r.array()?,
                rank: r.u32()?,
                size: r.u32()?,
                epoch: r.u16()?,
                host: r.u32()?,
                port: r.u16()?,
                nonce: r.array()?,
            }),
            1 => Message::Challenge { version: r.u32()?, nonce: r.array()? },
            2 => Message::Proof(r.array()?),
            3 => Message::Refused(read_refusal(r)?),
            4 => {
                Message::Welcome { rank: r.u32()?, members: r.list(Reader::u32)?, doors: r.list(read_door)? }
            }
            5 => Message::Heartbeat,
            6 => Message::Set { ticket: r.u64()?, key: r.text()?, value: r.bytes()?.to_vec() },
            7 => Message::Get { ticket: r.u64()?, key: r.text()? },
            8 => Message::Gather {
                ticket: r.u64()?,
                key: r.text()?,
                index: r.u32()?,
                count: r.u32()?,
                blob: r.bytes()?.to_vec(),
            },
            9 => Message::Withdraw { ticket: r.u64()? },
            10 => Message::Answer { ticket: r.u64()?, answer: read_answer(r)? },
            11 => Message::Dead(read_cause(r)?),
            12 => Message::Left { rank: r.u32()? },
            13 => Message::Bye,
            _ => return Err(Malformed),
        };
        reader.end()?;
        Ok(message)
    }
}

#[cfg(test)]
#[path = "message_tests.rs"]
mod tests;
