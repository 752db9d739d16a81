//! Passes descriptors (memory, mostly) to the other ranks of a machine.
//!
//! ```text
//!   all ranks:  abstract Unix listener with a random name
//!   hub:        gather (name, nonce, links, descriptors for each)       all have all links: ranks that disagree
//!                                                                       find out before they connect
//!   pair i<j:   j connects to i, each proves that it was in the gather, both check the other's user
//!
//!   connector   hello (index, proof) ──►            acceptor
//!               ◄── proof
//!               descriptors, at most 253 a packet ◄──►
//! ```
//!
//! A [`Location`] decides which ranks are on one machine. Abstract names are visible to every user
//! of the machine, so a name proves nothing: the nonce does, which went through the hub alone. A
//! stranger's connection is closed, and no member waits for it.
//!
//! Sockets never block, and are of the packet kind: each receive is one packet, so descriptors and
//! bytes cannot be mixed up. They lack one guarantee: see [`until_the_end`].

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use hmac::Mac;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, accept_with, bind, connect, listen, recv,
    recvmsg, send, sendmsg, socket_with,
};

use super::hub::Hub;
use super::notice::{Notice, agree};
use super::wait::{nap, poll_until};
use super::wire::{Malformed, Reader, Writer, keyed};
use super::{failed, interrupted, system};
use crate::error::BootstrapError;

/// How often the health of the world is looked at, which is no descriptor to wait for.
const SLICE: Duration = Duration::from_millis(20);
/// The hub has news of a rank that is gone within this time.
const NEWS: Duration = Duration::from_secs(2);
/// Accepted connections that have said nothing yet: as many as ranks of a machine may connect at
/// once, and few enough for a process of 1,024 descriptors.
const MAX_SILENT: usize = 256;
/// Connections queued at a listener; the kernel lowers it to its own bound.
const BACKLOG: i32 = 4096;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// Exchanges descriptors among `members`, ranks of `hub` of which `members[me]` is this one.
/// Collective: all of them call it with the same key and the same members in the same order.
///
/// `offers(i)` are the descriptors for member `i`, or None if this pair is not linked; both sides
/// of a pair must agree. Returns what each member offered, empty where not linked. Linked members
/// must run on one machine, for one user.
pub fn exchange_fds<'fd>(
    hub: &dyn Hub,
    key: &str,
    members: &[u32],
    me: usize,
    offers: &dyn Fn(usize) -> Option<Vec<BorrowedFd<'fd>>>,
    deadline: Duration,
) -> Result<Vec<Vec<OwnedFd>>, BootstrapError> {
    let start = Instant::now();
    let offers: Vec<_> = (0..members.len()).map(|peer| offers(peer).filter(|_| peer != me)).collect();
    let listener = socket()?;
    let counts = offers.iter().map(|offer| offer.as_ref().map(|offer| offer.len() as u32));
    let notice = Notice::new(counts)?;
    bind(&listener, &notice.address()?).map_err(|errno| system("bind", errno))?;
    listen(&listener, BACKLOG).map_err(|errno| system("listen", errno))?;

    let blobs = hub.gather(key, me as u32, members.len() as u32, &notice.encode(), deadline)?;
    let notices = blobs.iter().zip(members).map(|(blob, rank)| {
        Notice::decode(blob, members.len())
            .map_err(|Malformed| BootstrapError::Malformed { peer: format!("rank {rank}") })
    });
    let notices: Vec<Notice> = notices.collect::<Result<_, _>>()?;
    agree(key, members, &notices)?;

    let exchange = ExchangeKey { key, epoch: hub.epoch() };
    let table = Table { hub, members, me, exchange, notices: &notices, offers: &offers, listener };
    table.run(start, deadline)
}

/// The exchange of one member, after all know their peers.
struct Table<'a, 'fd> {
    hub: &'a dyn Hub,
    members: &'a [u32],
    me: usize,
    exchange: ExchangeKey<'a>,
    notices: &'a [Notice],
    offers: &'a [Option<Vec<BorrowedFd<'fd>>>],
    listener: OwnedFd,
}

impl<'fd> Table<'_, 'fd> {
    fn run(self, start: Instant, deadline: Duration) -> Result<Vec<Vec<OwnedFd>>, BootstrapError> {
        let linked = |peer: &usize| self.offers[*peer].is_some();
        let mut to_call: Vec<usize> = (0..self.me).filter(linked).collect();
        let mut to_come: Vec<usize> = (self.me + 1..self.members.len()).filter(linked).collect();
        let mut unknown: Vec<OwnedFd> = Vec::new();
        let mut pairs: Vec<PeerExchange<'fd>> = Vec::new();
        let mut reached = BTreeSet::new();
        let mut results: Vec<Vec<OwnedFd>> = self.members.iter().map(|_| Vec::new()).collect();
        loop {
            let mut refused = Vec::new();
            for peer in to_call {
                match self.call(peer, &reached)? {
                    Some(pair) => pairs.push(pair),
                    None => refused.push(peer),
                }
            }
            to_call = refused;
            let shortage = if to_come.is_empty() { None } else { self.accept(&mut unknown)? };
            for connection in std::mem::take(&mut unknown) {
                self.receive_hello(connection, &mut to_come, &mut pairs, &mut unknown)?;
            }
            // The connections left have said nothing. The longest silent makes room.
            let kept = MAX_SILENT.min(unknown.len().saturating_sub(shortage.is_some().into()));
            unknown.drain(..unknown.len() - kept);
            for mut pair in std::mem::take(&mut pairs) {
                match pair.step()? {
                    Progress::Done => results[pair.peer] = pair.received,
                    Progress::Waiting => pairs.push(pair),
                    // A member that is short of descriptors has made room, and has it again later.
                    Progress::Gone if pair.expects.is_some() => {
                        reached.insert(pair.peer);
                        to_call.push(pair.peer);
                    }
                    Progress::Gone => return Err(self.gone(pair.peer)),
                }
            }
            if to_call.is_empty() && to_come.is_empty() && pairs.is_empty() {
                return Ok(results);
            }
            self.hub.health().check()?;
            if interrupted() {
                return Err(BootstrapError::Interrupted { step: self.exchange.key.to_owned() });
            }
            let now = Instant::now();
            if now >= start + deadline {
                if let Some(errno) = shortage {
                    return Err(system("accept", errno));
                }
                let open = to_call.iter().chain(&to_come).copied().chain(pairs.iter().map(|pair| pair.peer));
                let mut missing: Vec<u32> = open.map(|peer| peer as u32).collect();
                missing.sort_unstable();
                let (step, waited) = (self.exchange.key.to_owned(), now - start);
                return Err(BootstrapError::Deadline { step, missing, waited, refused: None });
            }
            let mut fds: Vec<PollFd<'_>> = pairs.iter().filter_map(PeerExchange::poll_fd).collect();
            // Short of descriptors, the next slice tries again.
            if !to_come.is_empty() && shortage.is_none() {
                fds.push(PollFd::new(&self.listener, PollFlags::IN));
            }
            fds.extend(unknown.iter().map(|connection| PollFd::new(connection, PollFlags::IN)));
            poll_until(&mut fds, (start + deadline).min(now + SLICE))?;
        }
    }

    /// Connects to a member of lower index, which may have been reached before. None: its queue is
    /// full, try again.
    fn call(
        &self,
        peer: usize,
        reached: &BTreeSet<usize>,
    ) -> Result<Option<PeerExchange<'fd>>, BootstrapError> {
        let socket = socket()?;
        match connect(&socket, &self.notices[peer].address()?) {
            Ok(()) => {}
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(Errno::CONNREFUSED) if reached.contains(&peer) => return Err(self.gone(peer)),
            // The name is known but has no listener: there is no such process in this place.
            Err(Errno::CONNREFUSED) => {
                self.hub.health().check()?;
                return Err(BootstrapError::Unreachable {
                    me: self.members[self.me],
                    rank: self.members[peer],
                });
            }
            Err(errno) => return Err(system("connect", errno)),
        }
        check_user(&socket)?;
        let greeting = self.exchange.hello(&self.notices[peer].nonce, self.me, peer);
        let expects = self.exchange.hello(&self.notices[self.me].nonce, peer, self.me);
        Ok(Some(self.pair(peer, socket, greeting, Some(expects))))
    }

    /// Accepts connections of this user's processes. Others are closed before a byte is read.
    /// Returns the error, if the system is short of descriptors or memory for more.
    fn accept(&self, unknown: &mut Vec<OwnedFd>) -> Result<Option<Errno>, BootstrapError> {
        for _ in 0..MAX_SILENT {
            match accept_with(&self.listener, FLAGS) {
                Ok(connection) if check_user(&connection).is_ok() => unknown.push(connection),
                Ok(_) => tracing::warn!("another user connected to the exchange of descriptors"),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => break,
                Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                    return Ok(Some(errno));
                }
                Err(errno) => return Err(system("accept", errno)),
            }
        }
        Ok(None)
    }

    /// Reads from new connections: an awaited member becomes a pair, a stranger's connection is
    /// closed.
    fn receive_hello(
        &self,
        connection: OwnedFd,
        to_come: &mut Vec<usize>,
        pairs: &mut Vec<PeerExchange<'fd>>,
        unknown: &mut Vec<OwnedFd>,
    ) -> Result<(), BootstrapError> {
        let hello = match receive(&connection)? {
            Packet::Bytes(hello) => hello,
            Packet::Gone => return Ok(()),
            Packet::Later => {
                unknown.push(connection);
                return Ok(());
            }
        };
        let caller = self.exchange.caller(&hello, &self.notices[self.me].nonce, self.me);
        let Some(at) = caller.and_then(|caller| to_come.iter().position(|&peer| peer == caller)) else {
            tracing::warn!("a stranger connected to the exchange of descriptors");
            return Ok(());
        };
        let peer = to_come.swap_remove(at);
        let greeting = self.exchange.hello(&self.notices[peer].nonce, self.me, peer);
        pairs.push(self.pair(peer, connection, greeting, None));
        Ok(())
    }

    fn pair(
        &self,
        peer: usize,
        socket: OwnedFd,
        greeting: Vec<u8>,
        expects: Option<Vec<u8>>,
    ) -> PeerExchange<'fd> {
        let offer = self.offers[peer].as_deref().unwrap_or_default();
        let awaited = self.notices[peer].offers(self.me).unwrap_or(0) as usize;
        PeerExchange::new(peer, socket, greeting, expects, offer, awaited)
    }

    /// A member that hung up leaves the world, or has heard why the world fails. The hub says which
    /// in a moment: the first reason, where the end of a conversation is only a consequence.
    fn gone(&self, peer: usize) -> BootstrapError {
        let (rank, health, until) = (self.members[peer], self.hub.health(), Instant::now() + NEWS);
        while health.check().is_ok() && !health.is_absent(rank) && !interrupted() && Instant::now() < until {
            nap(SLICE);
        }
        match health.check() {
            Err(cause) => cause.into(),
            Ok(()) => BootstrapError::Left { rank, step: self.exchange.key.to_owned() },
        }
    }
}

fn socket() -> Result<OwnedFd, BootstrapError> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)
        .map_err(|errno| system("socket", errno))
}

/// Descriptors that the kernel passes in one packet.
const PER_PACKET: usize = 253;

/// Knowledge of both sides of a pair: the exchange, sender and receiver.
#[derive(Clone, Copy)]
struct ExchangeKey<'a> {
    key: &'a str,
    epoch: u16,
}

impl ExchangeKey<'_> {
    /// Proof of the member `from` for the member `to`, which drew the nonce and sent it over the
    /// hub.
    fn mac(&self, nonce: &[u8; 32], from: usize, to: usize) -> impl Mac {
        let mut mac = keyed(nonce);
        mac.update(b"sidelane descriptors ");
        mac.update(&self.epoch.to_le_bytes());
        mac.update(&(from as u64).to_le_bytes());
        mac.update(&(to as u64).to_le_bytes());
        mac.update(self.key.as_bytes());
        mac
    }

    /// The first packet of the member `from`.
    fn hello(&self, nonce: &[u8; 32], from: usize, to: usize) -> Vec<u8> {
        let mut packet = (from as u32).to_le_bytes().to_vec();
        packet.extend(self.mac(nonce, from, to).finalize().into_bytes());
        packet
    }

    /// The member that says this hello to the member `to`, if it is proved.
    fn caller(&self, packet: &[u8], nonce: &[u8; 32], to: usize) -> Option<usize> {
        let (index, proof) = packet.split_first_chunk::<4>()?;
        let from = u32::from_le_bytes(*index) as usize;
        self.mac(nonce, from, to).verify_slice(proof).ok().map(|()| from)
    }
}

/// Result of a step that does not block.
#[derive(Debug, PartialEq, Eq)]
enum Packet {
    /// Bytes.
    Bytes(Vec<u8>),
    /// Nothing yet.
    Later,
    /// The other side is gone.
    Gone,
}

/// Repeats `ask` when it met the end of a conversation (0 bytes). Linux looks for a packet first
/// and for a closed peer second. So a peer that sends and closes in between is reported as gone,
/// with its last packet unread. Once it has closed no more packets can come, so the second answer
/// is final.
fn until_the_end<T>(mut ask: impl FnMut() -> Result<(usize, T), Errno>) -> Result<(usize, T), Errno> {
    match ask() {
        Ok((0, _)) => ask(),
        answer => answer,
    }
}

/// The next packet, any descriptors with it discarded by the kernel.
fn receive(socket: &OwnedFd) -> Result<Packet, BootstrapError> {
    let mut buffer = [0; 64];
    match until_the_end(|| recv(socket, &mut buffer, RecvFlags::DONTWAIT)) {
        Ok((0, _)) | Err(Errno::CONNRESET) => Ok(Packet::Gone),
        Ok((length, _)) => Ok(Packet::Bytes(buffer[..length].to_vec())),
        Err(Errno::AGAIN | Errno::INTR) => Ok(Packet::Later),
        Err(errno) => Err(system("recv", errno)),
    }
}

/// The process at the other end must belong to our user.
fn check_user(socket: &OwnedFd) -> Result<(), BootstrapError> {
    let credentials = socket_peercred(socket).map_err(|errno| system("getsockopt(SO_PEERCRED)", errno))?;
    let (seen, expected) = (credentials.uid.as_raw(), rustix::process::geteuid().as_raw());
    if seen == expected {
        return Ok(());
    }
    Err(BootstrapError::OtherUser {
        pid: credentials.pid.as_raw_nonzero().get().unsigned_abs(),
        seen,
        expected,
    })
}

/// How far a pair is.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    /// Everything was sent and received.
    Done,
    /// Not yet.
    Waiting,
    /// The other side went away before that.
    Gone,
}

/// A conversation with one linked member.
#[derive(Debug)]
struct PeerExchange<'fd> {
    /// Index of the member.
    peer: usize,
    received: Vec<OwnedFd>,
    socket: OwnedFd,
    greeting: Option<Vec<u8>>,
    /// The packet that the other side has to say first, where it has not.
    expects: Option<Vec<u8>>,
    offer: VecDeque<BorrowedFd<'fd>>,
    awaited: usize,
}

impl<'fd> PeerExchange<'fd> {
    /// Sends `greeting`, receives `expects` if it is not empty, and only then sends `offer` and
    /// takes `awaited` descriptors.
    fn new(
        peer: usize,
        socket: OwnedFd,
        greeting: Vec<u8>,
        expects: Option<Vec<u8>>,
        offer: &[BorrowedFd<'fd>],
        awaited: usize,
    ) -> Self {
        let offer = offer.iter().copied().collect();
        PeerExchange { peer, received: Vec::new(), socket, greeting: Some(greeting), expects, offer, awaited }
    }

    /// Event to wait for. None at the end.
    fn poll_fd(&self) -> Option<PollFd<'_>> {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, self.expects.is_some() || self.received.len() < self.awaited);
        let may_offer = self.expects.is_none() && !self.offer.is_empty();
        flags.set(PollFlags::OUT, self.greeting.is_some() || may_offer);
        (!flags.is_empty()).then(|| PollFd::new(&self.socket, flags))
    }

    /// Goes on as far as it can without waiting.
    fn step(&mut self) -> Result<Progress, BootstrapError> {
        if let Some(greeting) = &self.greeting {
            match send(&self.socket, greeting, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(_) => self.greeting = None,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(Progress::Waiting),
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(Progress::Gone),
                Err(errno) => return Err(system("send", errno)),
            }
        }
        if let Some(expected) = &self.expects {
            match receive(&self.socket)? {
                Packet::Later => return Ok(Progress::Waiting),
                Packet::Gone => return Ok(Progress::Gone),
                Packet::Bytes(seen) if seen == *expected => self.expects = None,
                Packet::Bytes(_) => return Err(self.malformed()),
            }
        }
        let sent = self.hand_over()?;
        let taken = self.take()?;
        if sent == Progress::Gone || taken == Progress::Gone {
            return Ok(Progress::Gone);
        }
        Ok(if sent == Progress::Done && taken == Progress::Done { Progress::Done } else { Progress::Waiting })
    }

    fn hand_over(&mut self) -> Result<Progress, BootstrapError> {
        while !self.offer.is_empty() {
            let some: Vec<_> = self.offer.iter().take(PER_PACKET).copied().collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PER_PACKET))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(&some));
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match sendmsg(&self.socket, &[IoSlice::new(&[0])], &mut control, flags) {
                Ok(_) => drop(self.offer.drain(..some.len())),
                // Too many descriptors in flight: there is room when others take theirs.
                Err(Errno::AGAIN | Errno::INTR | Errno::TOOMANYREFS) => return Ok(Progress::Waiting),
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(Progress::Gone),
                Err(errno) => return Err(system("sendmsg", errno)),
            }
        }
        Ok(Progress::Done)
    }

    fn take(&mut self) -> Result<Progress, BootstrapError> {
        while self.received.len() < self.awaited {
            let mut byte = [0];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PER_PACKET))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let how = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let mut ask = || recvmsg(&self.socket, &mut [IoSliceMut::new(&mut byte)], &mut control, how);
            let flags = match until_the_end(|| ask().map(|seen| (seen.bytes, seen.flags))) {
                Ok((0, _)) => return Ok(Progress::Gone),
                Ok((_, flags)) => flags,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(Progress::Waiting),
                Err(Errno::CONNRESET) => return Ok(Progress::Gone),
                Err(errno) => return Err(system("recvmsg", errno)),
            };
            let before = self.received.len();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                    self.received.extend(descriptors);
                }
            }
            // A table of descriptors that is full makes the kernel drop the rest without an error.
            if flags.contains(ReturnFlags::CTRUNC) {
                return Err(system("recvmsg", Errno::MFILE));
            }
            if self.received.len() == before || self.received.len() > self.awaited {
                return Err(self.malformed());
            }
        }
        Ok(Progress::Done)
    }

    fn malformed(&self) -> BootstrapError {
        BootstrapError::Malformed { peer: format!("member {} of the exchange of descriptors", self.peer) }
    }
}

/// The place of a process. Two processes share a *machine* if the same kernel runs them, in one
/// network namespace (through which descriptors are passed), for one user. They share a *node*
/// unless `SIDELANE_NODE` makes them act as different nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    boot: String,
    network: u64,
    user: u32,
    node: String,
}

impl Location {
    /// The place of this process. `SIDELANE_NODE` splits a machine into nodes: ranks with different
    /// values act as if they were on different machines, although descriptors can still be passed.
    pub fn here() -> Result<Self, BootstrapError> {
        Location::in_node(&std::env::var("SIDELANE_NODE").unwrap_or_default())
    }

    /// The place of this process, in the node of this name.
    pub fn in_node(node: &str) -> Result<Self, BootstrapError> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
        let boot = boot.map_err(|error| failed("read of boot_id", &error))?.trim_end().to_owned();
        let network = fs::metadata("/proc/self/ns/net").map_err(|error| failed("stat of ns/net", &error))?;
        let user = rustix::process::geteuid().as_raw();
        Ok(Location { boot, network: network.ino(), user, node: node.to_owned() })
    }

    /// The label to gather from all ranks.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        writer.bytes(self.boot.as_bytes());
        writer.u64(self.network);
        writer.u32(self.user);
        writer.bytes(self.node.as_bytes());
        writer.finish()
    }

    /// The place of rank `rank` from its label.
    pub fn from_bytes(rank: u32, label: &[u8]) -> Result<Self, BootstrapError> {
        parse(label).map_err(|Malformed| BootstrapError::Malformed { peer: format!("rank {rank}") })
    }

    /// Whether two places are on one machine, for any split into nodes.
    pub fn same_machine(&self, other: &Location) -> bool {
        (&self.boot, self.network, self.user) == (&other.boot, other.network, other.user)
    }

    /// Whether two places are in one node.
    pub fn same_node(&self, other: &Location) -> bool {
        self == other
    }
}

fn parse(label: &[u8]) -> Result<Location, Malformed> {
    let mut outer = Reader::new(label);
    let body = outer.bytes()?;
    outer.end()?;
    let mut r = Reader::new(body);
    let location = Location { boot: r.text()?, network: r.u64()?, user: r.u32()?, node: r.text()? };
    r.end()?;
    Ok(location)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::mpsc::{Receiver, channel};
    use std::thread;

    use rustix::net::socketpair;

    use super::*;
    use crate::bootstrap::Timeouts;
    use crate::bootstrap::hub::threads;

    /// One side of a conversation in which each member offers its standard input; its result. It
    /// looks without pause for about as long as the other side needs, if that runs. Beyond that it
    /// lets it run, which may need this core.
    fn converse(peer: usize, socket: OwnedFd) -> Result<Progress, BootstrapError> {
        let stdin = std::io::stdin();
        let (greeting, expects) = (vec![1 - peer as u8], Some(vec![peer as u8]));
        let mut pair = PeerExchange::new(peer, socket, greeting, expects, &[stdin.as_fd()], 1);
        for look in 1u32.. {
            match pair.step()? {
                Progress::Waiting if look.is_multiple_of(100) => thread::yield_now(),
                Progress::Waiting => {}
                end => return Ok(end),
            }
        }
        unreachable!("the loop has no end")
    }

    #[test]
    fn end_of_a_conversation_is_asked_for_twice() {
        // The peer sends and closes between the two looks of the kernel.
        let mut answers = [Ok((0, "gone")), Ok((5, "words"))].into_iter();
        assert_eq!(until_the_end(|| answers.next().unwrap()), Ok((5, "words")));
        let mut answers = [Ok((5, "words")), Ok((0, "gone")), Ok((0, "gone"))].into_iter();
        assert_eq!(until_the_end(|| answers.next().unwrap()), Ok((5, "words")));
        assert_eq!(until_the_end(|| answers.next().unwrap()), Ok((0, "gone")));
        assert_eq!(until_the_end(|| Err::<(usize, ()), _>(Errno::AGAIN)), Err(Errno::AGAIN));
    }

    #[test]
    fn the_last_words_of_a_side_that_closes_at_once_are_heard() {
        // Without the second look, one conversation in five thousand was lost.
        const CONVERSATIONS: usize = 20_000;
        let (give, others) = channel::<OwnedFd>();
        thread::scope(|scope| {
            scope.spawn(move || {
                let others: Receiver<OwnedFd> = others;
                for socket in others {
                    assert_eq!(converse(0, socket), Ok(Progress::Done));
                }
            });
            for _ in 0..CONVERSATIONS {
                let (here, there) =
                    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                        .unwrap();
                give.send(there).unwrap();
                assert_eq!(converse(1, here), Ok(Progress::Done));
            }
            drop(give);
        });
    }

    #[test]
    fn connection_closed_before_any_proof_is_made_again() {
        let within = Duration::from_secs(20);
        let mut hubs = threads(2, Timeouts::default());
        let (caller, host) = (hubs.remove(1), hubs.remove(0));
        thread::scope(|scope| {
            let called =
                scope.spawn(move || exchange_fds(&*caller, "again", &[0, 1], 1, &|_| Some(vec![]), within));
            let listener = socket().unwrap();
            let notice = Notice::new([None, Some(0)].into_iter()).unwrap();
            bind(&listener, &notice.address().unwrap()).unwrap();
            listen(&listener, BACKLOG).unwrap();
            let blobs = host.gather("again", 0, 2, &notice.encode(), within).unwrap();
            let notices: Vec<Notice> =
                blobs.iter().map(|blob| Notice::decode(blob, 2).ok().unwrap()).collect();
            // As one does that is short of descriptors.
            poll_until(&mut [PollFd::new(&listener, PollFlags::IN)], Instant::now() + within).unwrap();
            drop(accept_with(&listener, FLAGS).unwrap());
            let (exchange, offers) =
                (ExchangeKey { key: "again", epoch: host.epoch() }, [None, Some(vec![])]);
            let (members, notices) = (&[0, 1], &notices);
            let table = Table { hub: &*host, members, me: 0, exchange, notices, offers: &offers, listener };
            assert_eq!(table.run(Instant::now(), within).map(|fds| fds.len()), Ok(2));
            assert_eq!(called.join().unwrap().map(|fds| fds.len()), Ok(2));
        });
    }

    #[test]
    fn a_label_carries_the_place() {
        let here = Location::in_node("rack 7").unwrap();
        assert!(!here.boot.is_empty());
        assert_eq!(Location::from_bytes(3, &here.to_bytes()), Ok(here.clone()));
        let error = Location::from_bytes(3, &here.to_bytes()[1..]);
        assert_eq!(error, Err(BootstrapError::Malformed { peer: "rank 3".into() }));
    }

    #[test]
    fn a_machine_can_be_split_into_nodes() {
        let (a, b) = (Location::in_node("a").unwrap(), Location::in_node("b").unwrap());
        assert!(a.same_machine(&b) && !a.same_node(&b));
        assert!(a.same_node(&a.clone()));
        let elsewhere = Location { boot: "other".into(), ..a.clone() };
        assert!(!a.same_machine(&elsewhere));
    }
}
