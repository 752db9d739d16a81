//! One pair of ranks that pass descriptors to each other: a conversation over a Unix socket that
//! never blocks.
//!
//! ```text
//!   connector   hello (index, proof) ──►            acceptor
//!               ◄── proof
//!               descriptors, at most 253 a packet ◄──►
//! ```
//!
//! Sockets are of the packet kind: each receive is one packet, so descriptors and bytes cannot be
//! mixed up. They lack one guarantee: see [`until_the_end`].

use std::{
    collections::VecDeque,
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{BorrowedFd, OwnedFd},
};

use hmac::Mac;
use rustix::{
    event::{PollFd, PollFlags},
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recv, recvmsg, send, sendmsg, sockopt::socket_peercred,
    },
};

use crate::{
    bootstrap::{os::system, wire::keyed},
    error::BootstrapError,
};

/// Descriptors that the kernel passes in one packet.
const PER_PACKET: usize = 253;

/// Knowledge of both sides of a pair: the exchange, sender and receiver.
#[derive(Clone, Copy)]
pub(super) struct Exchange<'a> {
    pub key: &'a str,
    pub epoch: u16,
}

impl Exchange<'_> {
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
    pub(super) fn hello(&self, nonce: &[u8; 32], from: usize, to: usize) -> Vec<u8> {
        let mut packet = (from as u32).to_le_bytes().to_vec();
        packet.extend(self.mac(nonce, from, to).finalize().into_bytes());
        packet
    }

    /// The member that says this hello to the member `to`, if it is proved.
    pub(super) fn caller(&self, packet: &[u8], nonce: &[u8; 32], to: usize) -> Option<usize> {
        let (index, proof) = packet.split_first_chunk::<4>()?;
        let from = u32::from_le_bytes(*index) as usize;
        self.mac(nonce, from, to).verify_slice(proof).ok().map(|()| from)
    }
}

/// What came of a step that does not block.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Packet {
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
pub(super) fn receive(socket: &OwnedFd) -> Result<Packet, BootstrapError> {
    let mut buffer = [0; 64];
    match until_the_end(|| recv(socket, &mut buffer, RecvFlags::DONTWAIT)) {
        Ok((0, _)) | Err(Errno::CONNRESET) => Ok(Packet::Gone),
        Ok((length, _)) => Ok(Packet::Bytes(buffer[..length].to_vec())),
        Err(Errno::AGAIN | Errno::INTR) => Ok(Packet::Later),
        Err(errno) => Err(system("recv", errno)),
    }
}

/// The process at the other end must belong to our user.
pub(super) fn check_user(socket: &OwnedFd) -> Result<(), BootstrapError> {
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
pub(super) enum Progress {
    /// Everything was sent and received.
    Done,
    /// Not yet.
    Waiting,
    /// The other side went away before that.
    Gone,
}

/// A conversation with one linked member.
#[derive(Debug)]
pub(super) struct Pair<'fd> {
    /// Index of the member.
    pub peer: usize,
    pub received: Vec<OwnedFd>,
    socket: OwnedFd,
    greeting: Option<Vec<u8>>,
    /// The packet that the other side has to say first, where it has not.
    expects: Option<Vec<u8>>,
    offer: VecDeque<BorrowedFd<'fd>>,
    awaited: usize,
}

impl<'fd> Pair<'fd> {
    /// Sends `greeting`, receives `expects` if it is not empty, and only then sends `offer` and
    /// takes `awaited` descriptors.
    pub(super) fn new(
        peer: usize,
        socket: OwnedFd,
        greeting: Vec<u8>,
        expects: Option<Vec<u8>>,
        offer: &[BorrowedFd<'fd>],
        awaited: usize,
    ) -> Self {
        let offer = offer.iter().copied().collect();
        Pair { peer, received: Vec::new(), socket, greeting: Some(greeting), expects, offer, awaited }
    }

    /// Event to wait for. None at the end.
    pub(super) fn poll_fd(&self) -> Option<PollFd<'_>> {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, self.expects.is_some() || self.received.len() < self.awaited);
        let may_offer = self.expects.is_none() && !self.offer.is_empty();
        flags.set(PollFlags::OUT, self.greeting.is_some() || may_offer);
        (!flags.is_empty()).then(|| PollFd::new(&self.socket, flags))
    }

    /// Goes on as far as it can without waiting.
    pub(super) fn step(&mut self) -> Result<Progress, BootstrapError> {
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

#[cfg(test)]
mod tests {
    use std::{
        os::fd::AsFd,
        sync::mpsc::{Receiver, channel},
        thread,
    };

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    /// One side of a conversation in which each member offers its standard input; its result.
    fn converse(peer: usize, socket: OwnedFd) -> Result<Progress, BootstrapError> {
        let stdin = std::io::stdin();
        let (greeting, expects) = (vec![1 - peer as u8], Some(vec![peer as u8]));
        let mut pair = Pair::new(peer, socket, greeting, expects, &[stdin.as_fd()], 1);
        loop {
            match pair.step()? {
                Progress::Waiting => {}
                end => return Ok(end),
            }
        }
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
}
