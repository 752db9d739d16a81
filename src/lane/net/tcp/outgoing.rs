//! Sending: what has been handed to the socket, and what still has to be before anything else.

use std::io::IoSlice;
use std::net::TcpStream;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};

/// Longest payload of a record: the most that a sender must keep when it gives up in the middle of
/// one.
pub const LONGEST: usize = 1 << 20;
/// Most pieces of a record, the header counted.
pub const PIECES: usize = 256;

/// One direction of a connection.
#[derive(Debug, Default)]
pub struct Outgoing {
    /// Bytes that the socket has taken.
    pub sent: u64,
    /// Unsent rest of records that have begun.
    outbox: Vec<u8>,
    /// Bytes of the outbox that it has.
    gone: usize,
    /// Number of the last question whether everything has landed.
    pub asked: u64,
    /// Whether the poller reports room to send.
    pub rings_for_room: bool,
    /// How sending failed: nothing is sent any more.
    pub failed: Option<Errno>,
}

impl Outgoing {
    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.outbox.len() == self.gone
    }

    /// Bytes that wait.
    pub fn waiting(&self) -> usize {
        self.outbox.len() - self.gone
    }

    /// Whether something waits that the socket will take once it has room.
    pub fn wants_room(&self) -> bool {
        !self.is_empty() && self.failed.is_none()
    }

    /// Bytes that go before anything that comes later.
    pub fn keep(&mut self, bytes: &[u8]) {
        self.outbox.extend_from_slice(bytes);
    }

    /// Sends what waits. Returns whether nothing waits any more.
    pub fn empty(&mut self, socket: &TcpStream) -> bool {
        while !self.is_empty() {
            let outbox = std::mem::take(&mut self.outbox);
            let sent = self.offer(socket, &[IoSlice::new(&outbox[self.gone..])]);
            self.outbox = outbox;
            match sent {
                0 => return false,
                sent => self.gone += sent,
            }
        }
        self.outbox.clear();
        self.gone = 0;
        true
    }

    /// Hands bytes to the socket. Returns how many it took; none, too, if it takes nothing any
    /// more.
    pub fn offer(&mut self, socket: &TcpStream, pieces: &[IoSlice<'_>]) -> usize {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        while self.failed.is_none() {
            match rustix::net::sendmsg(socket, pieces, &mut SendAncillaryBuffer::default(), flags) {
                Ok(sent) => {
                    self.sent += sent as u64;
                    return sent;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return 0,
                // The peer's earlier bytes are still to be read: reading will find the end.
                Err(errno) => self.failed = Some(errno),
            }
        }
        0
    }
}
