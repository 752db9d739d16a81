//! A TCP connection that carries messages and never blocks.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{IpAddr, TcpStream},
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags};

use super::{
    frame::{Inbox, MAX_FRAME, MAX_GREETING},
    message::Message,
};
use crate::bootstrap::wait::poll_until;

/// Bytes read in one turn, so that one loud peer does not starve the others.
const GULP: usize = 1 << 20;

/// One end of a connection. Errors and the end of the stream look the same to its user: closed.
#[derive(Debug)]
pub struct MessageConnection {
    stream: TcpStream,
    inbox: Inbox,
    outbox: Vec<u8>,
    sent: usize,
    closed: bool,
}

impl MessageConnection {
    /// Frames are small until [`MessageConnection::trust`].
    pub fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(MessageConnection {
            stream,
            inbox: Inbox::new(MAX_GREETING),
            outbox: Vec::new(),
            sent: 0,
            closed: false,
        })
    }

    /// The other side is authenticated: it may send long frames.
    pub fn trust(&mut self) {
        self.inbox.set_limit(MAX_FRAME);
    }

    /// The stream itself, for bytes other than messages. None if it has ended or a part of a
    /// message is still in flight.
    pub fn into_stream(self) -> Option<TcpStream> {
        (!self.closed && self.is_flushed() && self.inbox.is_empty()).then_some(self.stream)
    }

    /// The address of the other side.
    pub fn peer(&self) -> Option<IpAddr> {
        self.stream.peer_addr().ok().map(|address| address.ip().to_canonical())
    }

    /// Queues a message; [`MessageConnection::flush`] sends it.
    pub fn send(&mut self, message: &Message) {
        self.send_frame(&message.encode());
    }

    /// Queues an encoded message.
    pub fn send_frame(&mut self, frame: &[u8]) {
        if !self.closed {
            self.outbox.extend_from_slice(frame);
        }
    }

    /// Whether everything queued has been handed to the system.
    pub fn is_flushed(&self) -> bool {
        self.sent == self.outbox.len()
    }

    /// Sends what can be sent now.
    pub fn flush(&mut self) {
        while !self.closed && !self.is_flushed() {
            match self.stream.write(&self.outbox[self.sent..]) {
                Ok(written) => self.sent += written,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // Bytes that the other side wrote before it closed are still to be read: reading
                // will find the end.
                Err(_) => break,
            }
        }
        self.outbox.clear();
        self.sent = 0;
    }

    /// Reads what has come. Call [`MessageConnection::next`] until it is empty before asking
    /// whether this is closed.
    pub fn fill(&mut self) {
        let mut chunk = [0; 16 << 10];
        let mut taken = 0;
        // A stranger gets no more memory than its longest frame, and a chunk.
        let gulp = GULP.min(self.inbox.limit());
        while !self.closed && taken < gulp {
            match self.stream.read(&mut chunk) {
                Ok(0) => self.closed = true,
                Ok(read) => {
                    self.inbox.push(&chunk[..read]);
                    taken += read;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => self.closed = true,
            }
        }
    }

    /// The next message that has come. A malformed one closes the connection.
    pub fn next(&mut self) -> Option<Message> {
        match self.inbox.next().and_then(|body| body.map(Message::decode).transpose()) {
            Ok(message) => message,
            Err(_) => {
                self.inbox = Inbox::new(0);
                self.closed = true;
                None
            }
        }
    }

    /// Whether nothing more will come.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Events to wait for: input, and room for output if some is queued.
    pub fn poll_fd(&self) -> PollFd<'_> {
        let output = if self.is_flushed() { PollFlags::empty() } else { PollFlags::OUT };
        PollFd::new(&self.stream, PollFlags::IN | output)
    }

    /// Waits for the next message until a deadline or until `stop` returns true. None: it did not
    /// come.
    pub fn await_message(&mut self, until: Instant, stop: &dyn Fn() -> bool) -> Option<Message> {
        loop {
            self.flush();
            self.fill();
            if let Some(message) = self.next() {
                return Some(message);
            }
            let now = Instant::now();
            if self.closed || now >= until || stop() {
                return None;
            }
            // `stop` is not a descriptor, so it is looked at in slices.
            let slice = until.min(now + Duration::from_millis(20));
            if poll_until(&mut [self.poll_fd()], slice).is_err() {
                return None;
            }
        }
    }
}

impl AsFd for MessageConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
