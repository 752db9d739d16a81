//! The parts that messages are made of, as bytes.

use std::{net::IpAddr, sync::Arc, time::Duration};

use super::frame::{Malformed, Reader, Writer};
use crate::error::{Cause, LostReason};

/// The answer to a request to the store.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::bootstrap) enum Answer {
    /// The value is set.
    Done,
    /// The value of a key.
    Value(Arc<Vec<u8>>),
    /// The blobs of all participants.
    Gathered(Arc<Vec<Vec<u8>>>),
    /// A participant gave up: these had not come.
    Missing(Vec<u32>),
    /// A rank left, so the step cannot be completed.
    Left(u32),
    /// Participants disagree about the step.
    Disagree { rank: u32, seen: String, expected: String },
    /// The blobs together, this many bytes, are too large for one answer.
    TooLarge(u64),
}

/// Where a rank listens. No address means: on the machine of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::bootstrap) struct ListenAddress {
    pub ip: Option<IpAddr>,
    pub port: u16,
}

/// Reason why a guest is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::bootstrap) enum JoinRefusal {
    /// The host speaks this version.
    Version(u32),
    /// The host belongs to another job, or is not the rank that the guest expects.
    OtherJob,
    /// The proof is wrong.
    WrongSecret,
    /// The rank is out of range or taken, or sizes differ.
    Rank,
    /// The world went on without this rank and is in this epoch.
    Evicted(u16),
    /// The meeting was given up: these ranks did not come.
    Missing(Vec<u32>),
    /// Not a message of this protocol.
    Malformed,
}

pub(super) fn write_ranks(w: &mut Writer, ranks: &[u32]) {
    w.u32(ranks.len() as u32);
    ranks.iter().for_each(|&rank| w.u32(rank));
}

pub(super) fn write_door(w: &mut Writer, door: &ListenAddress) {
    match door.ip {
        None => w.u8(0),
        Some(IpAddr::V4(ip)) => {
            w.u8(4);
            w.array(&ip.octets());
        }
        Some(IpAddr::V6(ip)) => {
            w.u8(6);
            w.array(&ip.octets());
        }
    }
    w.u16(door.port);
}

pub(super) fn read_door(r: &mut Reader) -> Result<ListenAddress, Malformed> {
    let ip = match r.u8()? {
        0 => None,
        4 => Some(IpAddr::from(r.array::<4>()?)),
        6 => Some(IpAddr::from(r.array::<16>()?)),
        _ => return Err(Malformed),
    };
    Ok(ListenAddress { ip, port: r.u16()? })
}

pub(super) fn write_refusal(w: &mut Writer, refusal: &JoinRefusal) {
    match refusal {
        JoinRefusal::Version(version) => {
            w.u8(0);
            w.u32(*version);
        }
        JoinRefusal::OtherJob => w.u8(1),
        JoinRefusal::WrongSecret => w.u8(2),
        JoinRefusal::Rank => w.u8(3),
        JoinRefusal::Evicted(epoch) => {
            w.u8(4);
            w.u16(*epoch);
        }
        JoinRefusal::Missing(ranks) => {
            w.u8(5);
            write_ranks(w, ranks);
        }
        JoinRefusal::Malformed => w.u8(6),
    }
}

pub(super) fn read_refusal(r: &mut Reader) -> Result<JoinRefusal, Malformed> {
    Ok(match r.u8()? {
        0 => JoinRefusal::Version(r.u32()?),
        1 => JoinRefusal::OtherJob,
        2 => JoinRefusal::WrongSecret,
        3 => JoinRefusal::Rank,
        4 => JoinRefusal::Evicted(r.u16()?),
        5 => JoinRefusal::Missing(r.list(Reader::u32)?),
        6 => JoinRefusal::Malformed,
        _ => return Err(Malformed),
    })
}

pub(super) fn write_answer(w: &mut Writer, answer: &Answer) {
    match answer {
        Answer::Done => w.u8(0),
        Answer::Value(value) => {
            w.u8(1);
            w.bytes(value);
        }
        Answer::Gathered(blobs) => {
            w.u8(2);
            w.u32(blobs.len() as u32);
            blobs.iter().for_each(|blob| w.bytes(blob));
        }
        Answer::Missing(ranks) => {
            w.u8(3);
            write_ranks(w, ranks);
        }
        Answer::Left(rank) => {
            w.u8(4);
            w.u32(*rank);
        }
        Answer::Disagree { rank, seen, expected } => {
            w.u8(5);
            w.u32(*rank);
            w.bytes(seen.as_bytes());
            w.bytes(expected.as_bytes());
        }
        Answer::TooLarge(bytes) => {
            w.u8(6);
            w.u64(*bytes);
        }
    }
}

pub(super) fn read_answer(r: &mut Reader) -> Result<Answer, Malformed> {
    Ok(match r.u8()? {
        0 => Answer::Done,
        1 => Answer::Value(Arc::new(r.bytes()?.to_vec())),
        2 => Answer::Gathered(Arc::new(r.list(|r| r.bytes().map(<[u8]>::to_vec))?)),
        3 => Answer::Missing(r.list(Reader::u32)?),
        4 => Answer::Left(r.u32()?),
        5 => Answer::Disagree { rank: r.u32()?, seen: r.text()?, expected: r.text()? },
        6 => Answer::TooLarge(r.u64()?),
        _ => return Err(Malformed),
    })
}

pub(super) fn write_cause(w: &mut Writer, cause: &Cause) {
    match *cause {
        Cause::Lost { rank, how: LostReason::Closed } => {
            w.u8(0);
            w.u32(rank);
        }
        Cause::Lost { rank, how: LostReason::Silent(time) } => {
            w.u8(1);
            w.u32(rank);
            w.u64(millis(time));
        }
        Cause::LauncherGone { pid } => {
            w.u8(2);
            w.u32(pid);
        }
        Cause::Evicted { rank, epoch } => {
            w.u8(3);
            w.u32(rank);
            w.u16(epoch);
        }
        Cause::Stalled { rank, by, waited } => {
            w.u8(4);
            w.u32(rank);
            w.u32(by);
            w.u64(millis(waited));
        }
        Cause::Cancelled { by } => {
            w.u8(5);
            w.u32(by);
        }
        Cause::Protocol { rank } => {
            w.u8(6);
            w.u32(rank);
        }
        Cause::Connection { rank, by } => {
            w.u8(7);
            w.u32(rank);
            w.u32(by);
        }
        Cause::Nic { by } => {
            w.u8(8);
            w.u32(by);
        }
    }
}

pub(super) fn read_cause(r: &mut Reader) -> Result<Cause, Malformed> {
    Ok(match r.u8()? {
        0 => Cause::Lost { rank: r.u32()?, how: LostReason::Closed },
        1 => Cause::Lost { rank: r.u32()?, how: LostReason::Silent(Duration::from_millis(r.u64()?)) },
        2 => Cause::LauncherGone { pid: r.u32()? },
        3 => Cause::Evicted { rank: r.u32()?, epoch: r.u16()? },
        4 => Cause::Stalled { rank: r.u32()?, by: r.u32()?, waited: Duration::from_millis(r.u64()?) },
        5 => Cause::Cancelled { by: r.u32()? },
        6 => Cause::Protocol { rank: r.u32()? },
        7 => Cause::Connection { rank: r.u32()?, by: r.u32()? },
        8 => Cause::Nic { by: r.u32()? },
        _ => return Err(Malformed),
    })
}

fn millis(time: Duration) -> u64 {
    time.as_millis().try_into().unwrap_or(u64::MAX)
}
