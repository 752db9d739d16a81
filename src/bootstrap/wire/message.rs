//! Messages of ranks to a coordinator, and its messages to them.
//!
//! ```text
//!   guest   Hello ──────────►                      host      (module `auth`)
//!           ◄────────── Challenge | Refused
//!           Proof ──────────►
//!           ◄────────── Proof | Refused
//!           ◄────────── Welcome | Refused               the first world, or a stream
//!           Survivor ──► ◄── Offer   Accept ──► ◄── Begin  | Refused    a rebuild
//!           Settings ──► ◄── Admit | Refused    Heartbeat both ways      a spare, until it is taken in
//!   rank    Set Get Gather Exchange Withdraw  Heartbeat  Dead  Bye ──►  coordinator
//!           ◄──  Answer                       Heartbeat  Dead  Left
//! ```

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::blobs::{Blobs, Column};
use super::connection::{Malformed, Reader, Writer};
use super::outbox::Outbox;
use crate::error::{Cause, LostReason, RefusedJoins};

/// Version of everything in this file, and of what ranks tell each other through the store.
pub const PROTOCOL: u32 = 8;

/// The joining rank, its purpose, and its own listening address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
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
    /// Port of the joining rank's listener.
    pub port: u16,
    pub nonce: [u8; 32],
}

/// A message.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    Hello(Hello),
    Challenge { version: u32, nonce: [u8; 32] },
    Proof([u8; 32]),
    Refused(JoinRefusal),
    Welcome { addresses: Vec<ListenAddress> },
    Survivor(Survivor),
    Offer(Roster),
    Accept { epoch: u16 },
    Begin { epoch: u16 },
    Settings(Vec<Setting>),
    Admit(Admission),
    Heartbeat,
    Set { ticket: u64, key: String, value: Vec<u8> },
    Get { ticket: u64, key: String },
    Gather { ticket: u64, key: String, index: u32, count: u32, blob: Vec<u8> },
    Exchange { ticket: u64, key: String, index: u32, blobs: Blobs },
    Withdraw { ticket: u64 },
    Answer { ticket: u64, answer: Answer },
    Dead(Cause),
    Left { rank: u32 },
    Bye,
}

impl Message {
    /// The frame of this message.
    pub fn encode(&self) -> Vec<u8> {
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
            Message::Welcome { addresses } => {
                w.u8(4);
                write_addresses(&mut w, addresses);
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
                w.u8(ANSWER);
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
            Message::Survivor(Survivor { roster, at_least, cut_off }) => {
                w.u8(14);
                write_roster(&mut w, roster);
                w.u32(*at_least);
                write_ranks(&mut w, cut_off);
            }
            Message::Offer(roster) => {
                w.u8(15);
                write_roster(&mut w, roster);
            }
            Message::Accept { epoch } => {
                w.u8(16);
                w.u16(*epoch);
            }
            Message::Begin { epoch } => {
                w.u8(17);
                w.u16(*epoch);
            }
            Message::Admit(Admission { rank, members, roster, addresses }) => {
                w.u8(18);
                w.u32(*rank);
                w.u32(*members);
                write_roster(&mut w, roster);
                write_addresses(&mut w, addresses);
            }
            Message::Exchange { ticket, key, index, blobs } => {
                w.u8(20);
                w.u64(*ticket);
                w.bytes(key.as_bytes());
                w.u32(*index);
                blobs.write(&mut w);
            }
            Message::Settings(settings) => {
                w.u8(19);
                w.u32(settings.len() as u32);
                settings.iter().for_each(|Setting { name, value }| {
                    w.bytes(name.as_bytes());
                    w.bytes(value.as_bytes());
                });
            }
        }
        w.finish()
    }

    /// The message of a frame's body.
    pub fn decode(body: &[u8]) -> Result<Message, Malformed> {
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
            4 => Message::Welcome { addresses: r.list(read_address)? },
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
            ANSWER => Message::Answer { ticket: r.u64()?, answer: read_answer(r)? },
            11 => Message::Dead(read_cause(r)?),
            12 => Message::Left { rank: r.u32()? },
            13 => Message::Bye,
            14 => Message::Survivor(Survivor {
                roster: read_roster(r)?,
                at_least: r.u32()?,
                cut_off: r.list(Reader::u32)?,
            }),
            15 => Message::Offer(read_roster(r)?),
            16 => Message::Accept { epoch: r.u16()? },
            17 => Message::Begin { epoch: r.u16()? },
            18 => Message::Admit(Admission {
                rank: r.u32()?,
                members: r.u32()?,
                roster: read_roster(r)?,
                addresses: r.list(read_address)?,
            }),
            19 => Message::Settings(r.list(|r| Ok(Setting { name: r.text()?, value: r.text()? }))?),
            20 => Message::Exchange {
                ticket: r.u64()?,
                key: r.text()?,
                index: r.u32()?,
                blobs: Blobs::read(r)?,
            },
            _ => return Err(Malformed),
        };
        reader.end()?;
        Ok(message)
    }
}

/// Kind of the message that is an answer.
const ANSWER: u8 = 10;

/// An answer as bytes, which all that get it share.
#[derive(Clone, Debug)]
pub struct EncodedAnswer(Arc<[u8]>);

impl EncodedAnswer {
    pub fn new(answer: &Answer) -> Self {
        let mut w = Writer::new();
        write_answer(&mut w, answer);
        EncodedAnswer(w.body().into())
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Queues the frame of [`Message::Answer`].
    pub fn queue(&self, ticket: u64, outbox: &mut Outbox) {
        let mut w = Writer::new();
        w.u8(ANSWER);
        w.u64(ticket);
        outbox.push(&w.finish_before(self.0.len()));
        outbox.share(&self.0);
    }
}

/// The answer to a request to the store.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// The value is set.
    Done,
    /// The value of a key.
    Value(Arc<Vec<u8>>),
    /// The blobs of all participants.
    Gathered(Arc<Vec<Vec<u8>>>),
    /// The blobs for one rank, taken from what each participant brought: sent as `Gathered`.
    Exchanged(Column),
    /// A participant gave up: these had not come.
    Missing(Vec<u32>),
    /// A rank left, so the step cannot be completed.
    Left(u32),
    /// Participants disagree about the step.
    Disagree { rank: u32, seen: String, expected: String },
    /// The blobs together, this many bytes, are too large for one answer.
    TooLarge(u64),
}

impl Answer {
    /// Whether this is the very answer that another rank gets.
    pub fn is_same(&self, other: &Answer) -> bool {
        matches!((self, other), (Answer::Gathered(a), Answer::Gathered(b)) if Arc::ptr_eq(a, b))
    }
}

/// An epoch and its members, by their ranks in the first world, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roster {
    pub epoch: u16,
    pub members: Vec<u32>,
}

impl Roster {
    pub fn has(&self, rank: u32) -> bool {
        self.members.binary_search(&rank).is_ok()
    }
}

/// A rank that comes to a rebuild.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survivor {
    /// The newest world that it has agreed to.
    pub roster: Roster,
    /// The fewest ranks of a world that it wants.
    pub at_least: u32,
    /// Ranks that it does not reach.
    pub cut_off: Vec<u32>,
}

/// Where a rank listens. No address means: on the machine of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenAddress {
    pub ip: Option<IpAddr>,
    pub port: u16,
}

impl ListenAddress {
    /// Addresses to gather from a rank.
    pub fn to_bytes(addresses: &[ListenAddress]) -> Vec<u8> {
        let mut writer = Writer::new();
        write_addresses(&mut writer, addresses);
        writer.finish()
    }

    /// Addresses that a rank has gathered.
    pub fn from_bytes(bytes: &[u8]) -> Result<Vec<ListenAddress>, Malformed> {
        let mut outer = Reader::new(bytes);
        let mut reader = Reader::new(outer.bytes()?);
        outer.end()?;
        let addresses = reader.list(read_address)?;
        reader.end()?;
        Ok(addresses)
    }
}

/// A setting that all ranks of a world share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Its variable, or its field in the options.
    pub name: String,
    /// Its value in words.
    pub value: String,
}

/// A spare's place among the ranks of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admission {
    /// Its number.
    pub rank: u32,
    /// Ranks of the world that takes it in: so many of the roster, its first ones.
    pub members: u32,
    /// Those ranks and all spares. From here on this is the newest world that each has agreed to.
    pub roster: Roster,
    /// Where each rank that the job has had listens.
    pub addresses: Vec<ListenAddress>,
}

/// Reason why a guest is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JoinRefusal {
    /// The host speaks this version.
    Version(u32),
    /// The host belongs to another job, or is not the rank that the guest expects.
    OtherJob,
    /// The proof is wrong.
    WrongSecret,
    /// The rank is out of range or taken.
    Rank,
    /// The job of the host has this many ranks.
    Size(u32),
    /// A spare has another value of this setting than the ranks.
    Setting { name: String, seen: String, expected: String },
    /// The world went on without this rank and is in this epoch.
    Evicted(u16),
    /// The meeting was given up: these ranks did not come. Others came with another secret.
    Missing { ranks: Vec<u32>, refused: Option<RefusedJoins> },
    /// Not a message of this protocol.
    Malformed,
}

fn write_ranks(w: &mut Writer, ranks: &[u32]) {
    w.u32(ranks.len() as u32);
    ranks.iter().for_each(|&rank| w.u32(rank));
}

fn write_roster(w: &mut Writer, roster: &Roster) {
    w.u16(roster.epoch);
    write_ranks(w, &roster.members);
}

/// Members are in ascending order, or this is none of our rosters.
fn read_roster(r: &mut Reader) -> Result<Roster, Malformed> {
    let roster = Roster { epoch: r.u16()?, members: r.list(Reader::u32)? };
    if roster.members.is_sorted_by(|a, b| a < b) { Ok(roster) } else { Err(Malformed) }
}

fn write_ip(w: &mut Writer, ip: Option<IpAddr>) {
    match ip {
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
}

fn read_ip(r: &mut Reader) -> Result<Option<IpAddr>, Malformed> {
    Ok(match r.u8()? {
        0 => None,
        4 => Some(IpAddr::from(r.array::<4>()?)),
        6 => Some(IpAddr::from(r.array::<16>()?)),
        _ => return Err(Malformed),
    })
}

fn write_address(w: &mut Writer, address: &ListenAddress) {
    write_ip(w, address.ip);
    w.u16(address.port);
}

fn write_addresses(w: &mut Writer, addresses: &[ListenAddress]) {
    w.u32(addresses.len() as u32);
    addresses.iter().for_each(|address| write_address(w, address));
}

fn read_address(r: &mut Reader) -> Result<ListenAddress, Malformed> {
    Ok(ListenAddress { ip: read_ip(r)?, port: r.u16()? })
}

fn write_refused(w: &mut Writer, refused: &Option<RefusedJoins>) {
    write_ip(w, refused.map(|refused| refused.last));
    if let Some(RefusedJoins { joins, .. }) = refused {
        w.u32(*joins);
    }
}

fn read_refused(r: &mut Reader) -> Result<Option<RefusedJoins>, Malformed> {
    let last = read_ip(r)?;
    last.map(|last| Ok(RefusedJoins { joins: r.u32()?, last })).transpose()
}

fn write_refusal(w: &mut Writer, refusal: &JoinRefusal) {
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
        JoinRefusal::Missing { ranks, refused } => {
            w.u8(5);
            write_ranks(w, ranks);
            write_refused(w, refused);
        }
        JoinRefusal::Malformed => w.u8(6),
        JoinRefusal::Size(size) => {
            w.u8(7);
            w.u32(*size);
        }
        JoinRefusal::Setting { name, seen, expected } => {
            w.u8(8);
            [name, seen, expected].into_iter().for_each(|text| w.bytes(text.as_bytes()));
        }
    }
}

fn read_refusal(r: &mut Reader) -> Result<JoinRefusal, Malformed> {
    Ok(match r.u8()? {
        0 => JoinRefusal::Version(r.u32()?),
        1 => JoinRefusal::OtherJob,
        2 => JoinRefusal::WrongSecret,
        3 => JoinRefusal::Rank,
        4 => JoinRefusal::Evicted(r.u16()?),
        5 => JoinRefusal::Missing { ranks: r.list(Reader::u32)?, refused: read_refused(r)? },
        6 => JoinRefusal::Malformed,
        7 => JoinRefusal::Size(r.u32()?),
        8 => JoinRefusal::Setting { name: r.text()?, seen: r.text()?, expected: r.text()? },
        _ => return Err(Malformed),
    })
}

fn write_answer(w: &mut Writer, answer: &Answer) {
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
        Answer::Exchanged(column) => {
            w.u8(2);
            column.write(w);
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

fn read_answer(r: &mut Reader) -> Result<Answer, Malformed> {
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

fn write_cause(w: &mut Writer, cause: &Cause) {
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
        Cause::Panicked { by, ref thread, ref message } => {
            w.u8(9);
            w.u32(by);
            w.bytes(thread.as_bytes());
            w.bytes(message.as_bytes());
        }
    }
}

fn read_cause(r: &mut Reader) -> Result<Cause, Malformed> {
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
        9 => Cause::Panicked { by: r.u32()?, thread: r.text()?, message: r.text()? },
        _ => return Err(Malformed),
    })
}

fn millis(time: Duration) -> u64 {
    time.as_millis().try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    use super::*;
    use crate::bootstrap::wire::connection::{Inbox, MAX_GREETING};

    fn causes() -> impl Strategy<Value = Cause> {
        let time = || any::<u32>().prop_map(|ms| Duration::from_millis(ms.into()));
        prop_oneof![
            any::<u32>().prop_map(|by| Cause::Nic { by }),
            any::<u32>().prop_map(|rank| Cause::Lost { rank, how: LostReason::Closed }),
            (any::<u32>(), time())
                .prop_map(|(rank, time)| Cause::Lost { rank, how: LostReason::Silent(time) }),
            any::<u32>().prop_map(|pid| Cause::LauncherGone { pid }),
            any::<(u32, u16)>().prop_map(|(rank, epoch)| Cause::Evicted { rank, epoch }),
            (any::<u32>(), any::<u32>(), time()).prop_map(|(rank, by, waited)| Cause::Stalled {
                rank,
                by,
                waited
            }),
            any::<u32>().prop_map(|by| Cause::Cancelled { by }),
            any::<u32>().prop_map(|rank| Cause::Protocol { rank }),
            (any::<u32>(), any::<u32>()).prop_map(|(rank, by)| Cause::Connection { rank, by }),
            (any::<u32>(), ".{0,9}", ".{0,9}").prop_map(|(by, thread, message)| Cause::Panicked {
                by,
                thread,
                message
            }),
        ]
    }

    fn refusals() -> impl Strategy<Value = JoinRefusal> {
        prop_oneof![
            any::<u32>().prop_map(JoinRefusal::Version),
            Just(JoinRefusal::OtherJob),
            Just(JoinRefusal::WrongSecret),
            Just(JoinRefusal::Rank),
            any::<u16>().prop_map(JoinRefusal::Evicted),
            (any::<Vec<u32>>(), any::<Option<(u32, IpAddr)>>()).prop_map(|(ranks, refused)| {
                let refused = refused.map(|(joins, last)| RefusedJoins { joins, last });
                JoinRefusal::Missing { ranks, refused }
            }),
            Just(JoinRefusal::Malformed),
            any::<u32>().prop_map(JoinRefusal::Size),
            (".{0,9}", ".{0,9}", ".{0,9}").prop_map(|(name, seen, expected)| JoinRefusal::Setting {
                name,
                seen,
                expected
            }),
        ]
    }

    fn blobs() -> impl Strategy<Value = Vec<Vec<u8>>> {
        prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..5)
    }

    fn answers() -> impl Strategy<Value = Answer> {
        prop_oneof![
            Just(Answer::Done),
            any::<Vec<u8>>().prop_map(|value| Answer::Value(Arc::new(value))),
            blobs().prop_map(|blobs| Answer::Gathered(Arc::new(blobs))),
            any::<Vec<u32>>().prop_map(Answer::Missing),
            any::<u32>().prop_map(Answer::Left),
            (any::<u32>(), ".{0,9}", ".{0,9}").prop_map(|(rank, seen, expected)| Answer::Disagree {
                rank,
                seen,
                expected
            }),
            any::<u64>().prop_map(Answer::TooLarge),
        ]
    }

    fn addresses() -> impl Strategy<Value = ListenAddress> {
        (any::<Option<IpAddr>>(), any::<u16>()).prop_map(|(ip, port)| ListenAddress { ip, port })
    }

    fn rosters() -> impl Strategy<Value = Roster> {
        (any::<u16>(), prop::collection::btree_set(any::<u32>(), 0..9))
            .prop_map(|(epoch, members)| Roster { epoch, members: members.into_iter().collect() })
    }

    fn hellos() -> impl Strategy<Value = Hello> {
        (any::<(u32, [u8; 32], u32, u32)>(), any::<(u16, u32, u16, [u8; 32])>()).prop_map(
            |((version, job, rank, size), (epoch, host, port, nonce))| Hello {
                version,
                job,
                rank,
                size,
                epoch,
                host,
                port,
                nonce,
            },
        )
    }

    fn messages() -> impl Strategy<Value = Message> {
        prop_oneof![
            hellos().prop_map(Message::Hello),
            any::<(u32, [u8; 32])>().prop_map(|(version, nonce)| Message::Challenge { version, nonce }),
            any::<[u8; 32]>().prop_map(Message::Proof),
            refusals().prop_map(Message::Refused),
            prop::collection::vec(addresses(), 0..5).prop_map(|addresses| Message::Welcome { addresses }),
            (rosters(), any::<u32>(), any::<Vec<u32>>()).prop_map(|(roster, at_least, cut_off)| {
                Message::Survivor(Survivor { roster, at_least, cut_off })
            }),
            rosters().prop_map(Message::Offer),
            any::<u16>().prop_map(|epoch| Message::Accept { epoch }),
            any::<u16>().prop_map(|epoch| Message::Begin { epoch }),
            (any::<u32>(), any::<u32>(), rosters(), prop::collection::vec(addresses(), 0..5)).prop_map(
                |(rank, members, roster, addresses)| {
                    Message::Admit(Admission { rank, members, roster, addresses })
                }
            ),
            prop::collection::vec((".{0,9}", ".{0,9}"), 0..5).prop_map(|settings| {
                let setting = |(name, value)| Setting { name, value };
                Message::Settings(settings.into_iter().map(setting).collect())
            }),
            Just(Message::Heartbeat),
            (any::<u64>(), ".{0,9}", any::<Vec<u8>>()).prop_map(|(ticket, key, value)| Message::Set {
                ticket,
                key,
                value
            }),
            (any::<u64>(), ".{0,9}").prop_map(|(ticket, key)| Message::Get { ticket, key }),
            (any::<u64>(), ".{0,9}", any::<u32>(), any::<u32>(), any::<Vec<u8>>()).prop_map(
                |(ticket, key, index, count, blob)| Message::Gather { ticket, key, index, count, blob }
            ),
            (any::<u64>(), ".{0,9}", any::<u32>(), blobs()).prop_map(|(ticket, key, index, blobs)| {
                Message::Exchange { ticket, key, index, blobs: blobs.iter().collect() }
            }),
            any::<u64>().prop_map(|ticket| Message::Withdraw { ticket }),
            (any::<u64>(), answers()).prop_map(|(ticket, answer)| Message::Answer { ticket, answer }),
            causes().prop_map(Message::Dead),
            any::<u32>().prop_map(|rank| Message::Left { rank }),
            Just(Message::Bye),
        ]
    }

    proptest! {
        #[test]
        fn shared_answer_has_the_frame_of_its_message(ticket in any::<u64>(), answer in answers()) {
            let (mut outbox, mut sent) = (Outbox::default(), Vec::new());
            EncodedAnswer::new(&answer).queue(ticket, &mut outbox);
            outbox.write_to(&mut sent).unwrap();
            prop_assert_eq!(sent, Message::Answer { ticket, answer }.encode());
        }
    }

    #[test]
    fn bytes_of_strangers_are_messages_or_refused() {
        let mut runner = TestRunner::deterministic();
        let frames: Vec<Vec<u8>> = (0..64)
            .map(|_| messages().new_tree(&mut runner).unwrap().current().encode())
            .filter(|frame| frame.len() < 200)
            .collect();
        fuzz::run("frames", &frames, |bytes| {
            let mut inbox = Inbox::new(MAX_GREETING);
            for piece in bytes.chunks(7) {
                inbox.push(piece);
                loop {
                    match inbox.next() {
                        // A message that decodes must encode to the same bytes.
                        Ok(Some(body)) => {
                            let message = Message::decode(body).map(|message| message.encode());
                            assert!(message.is_err() || message.is_ok_and(|frame| frame[4..] == *body));
                        }
                        Ok(None) => break,
                        Err(Malformed) => return,
                    }
                }
            }
        });
    }

    proptest! {
        #[test]
        fn every_message_comes_back_as_it_was(message in messages()) {
            let frame = message.encode();
            prop_assert_eq!(u32::from_le_bytes([frame[0], frame[1], frame[2], frame[3]]) as usize, frame.len() - 4);
            prop_assert_eq!(Message::decode(&frame[4..]), Ok(message));
        }

        #[test]
        fn a_cut_message_is_malformed_and_so_is_a_long_one(message in messages(), cut in any::<prop::sample::Index>()) {
            let frame = message.encode();
            let body = &frame[4..];
            prop_assert_eq!(Message::decode(&body[..cut.index(body.len())]), Err(Malformed));
            prop_assert_eq!(Message::decode(&[body, &[0]].concat()), Err(Malformed));
        }

        #[test]
        fn column_of_an_exchange_comes_as_what_was_gathered(
            table in prop::collection::vec(prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 3), 0..5),
            number in 0..3usize,
        ) {
            let of = table.iter().map(|blobs| blobs.iter().collect()).collect();
            let sent = Message::Answer { ticket: 7, answer: Answer::Exchanged(Column { of, number }) };
            let expected: Vec<_> = table.iter().map(|blobs| blobs[number].clone()).collect();
            let gathered = Message::Answer { ticket: 7, answer: Answer::Gathered(Arc::new(expected)) };
            prop_assert_eq!(Message::decode(&sent.encode()[4..]), Ok(gathered));
        }

        #[test]
        fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            // A message that decodes must encode to the same bytes.
            if let Ok(message) = Message::decode(&bytes) {
                prop_assert_eq!(&message.encode()[4..], &bytes[..]);
            }
        }
    }
}
