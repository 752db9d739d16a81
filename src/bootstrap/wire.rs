//! A TCP connection that carries messages and never blocks.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{IpAddr, TcpStream},
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use super::{
    frame::{Inbox, MAX_FRAME, MAX_GREETING},
    message::Message,
};
use crate::error::BootstrapError;

/// Bytes read in one turn, so that one loud peer does not starve the others.
const GULP: usize = 1 << 20;

/// One end of a connection. Errors and the end of the stream look the same to its user: closed.
#[derive(Debug)]
pub(super) struct Wire {
    stream: TcpStream,
    inbox: Inbox,
    outbox: Vec<u8>,
    sent: usize,
    closed: bool,
}

impl Wire {
    /// Frames are small until [`Wire::trust`].
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Wire { stream, inbox: Inbox::new(MAX_GREETING), outbox: Vec::new(), sent: 0, closed: false })
    }

    /// The other side has proved who it is: it may send long frames.
    pub(super) fn trust(&mut self) {
        self.inbox.set_limit(MAX_FRAME);
    }

    /// The address of the other side.
    pub(super) fn peer(&self) -> Option<IpAddr> {
        self.stream.peer_addr().ok().map(|address| address.ip().to_canonical())
    }

    /// Queues a message; [`Wire::flush`] sends it.
    pub(super) fn send(&mut self, message: &Message) {
        self.send_frame(&message.encode());
    }

    /// Queues an encoded message.
    pub(super) fn send_frame(&mut self, frame: &[u8]) {
        if !self.closed {
            self.outbox.extend_from_slice(frame);
        }
    }

    /// Whether everything queued has been handed to the system.
    pub(super) fn is_flushed(&self) -> bool {
        self.sent == self.outbox.len()
    }

    /// Sends what can be sent now.
    pub(super) fn flush(&mut self) {
        while !self.closed && !self.is_flushed() {
            match self.stream.write(&self.outbox[self.sent..]) {
                Ok(written) => self.sent += written,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // What the other side wrote before it closed is still to be read: reading will find the end.
                Err(_) => break,
            }
        }
        self.outbox.clear();
        self.sent = 0;
    }

    /// Reads what has come. Call [`Wire::next`] until it is empty before asking whether this is closed.
    pub(super) fn fill(&mut self) {
        let mut chunk = [0; 16 << 10];
        let mut taken = 0;
        while !self.closed && taken < GULP {
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
    pub(super) fn next(&mut self) -> Option<Message> {
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
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// What to wait for: input, and room for output if some is queued.
    pub(super) fn poll_fd(&self) -> PollFd<'_> {
        let output = if self.is_flushed() { PollFlags::empty() } else { PollFlags::OUT };
        PollFd::new(&self.stream, PollFlags::IN | output)
    }

    /// Waits for the next message until a point in time or until `stop` says so. None: it did not come.
    pub(super) fn await_message(&mut self, until: Instant, stop: &dyn Fn() -> bool) -> Option<Message> {
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
            if wait(&mut [self.poll_fd()], slice).is_err() {
                return None;
            }
        }
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Waits until a descriptor is ready or the time has come. Being interrupted counts as ready.
pub(super) fn wait(fds: &mut [PollFd<'_>], until: Instant) -> Result<(), BootstrapError> {
    // Rounded up to a millisecond, so that a wait does not end just before its time, again and again.
    let left = until.saturating_duration_since(Instant::now()) + Duration::from_micros(999);
    let left = Duration::from_millis(left.as_millis().try_into().unwrap_or(u64::MAX));
    let left = Timespec::try_from(left).ok();
    match poll(fds, left.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(system("poll", errno)),
    }
}

/// The error of a system call.
pub(super) fn system(call: &'static str, errno: Errno) -> BootstrapError {
    BootstrapError::System { call, errno: errno.raw_os_error() }
}

/// The error of a call of the standard library.
pub(super) fn failed(call: &'static str, error: &io::Error) -> BootstrapError {
    BootstrapError::System { call, errno: error.raw_os_error().unwrap_or(Errno::IO.raw_os_error()) }
}
