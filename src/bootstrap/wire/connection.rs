//! A TCP connection that carries messages and never blocks, and the frames on its stream of bytes.
//!
//! ```text
//!   | length: u32 | body: length bytes |      little endian; the length is bounded before a byte is kept
//!
//!   Message --Writer--> frame ==stream==> Inbox: whole frames --Reader--> Message
//! ```
//!
//! All code here reads bytes that a stranger may have written: it trusts no length, and never
//! panics.

use std::io::{self, ErrorKind, Read};
use std::net::{IpAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::message::{EncodedAnswer, Message};
use super::outbox::Outbox;
use crate::bootstrap::wait::poll_until;

/// Bytes read in one turn, so that one loud peer does not starve the others.
const GULP: usize = 1 << 20;
/// Bytes that an empty buffer keeps for the next message: a rank has few large ones.
const KEPT: usize = 4 << 10;

/// One end of a connection. Errors and the end of the stream look the same to its user: closed.
#[derive(Debug)]
pub struct MessageConnection {
    stream: TcpStream,
    inbox: Inbox,
    outbox: Outbox,
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
            outbox: Outbox::default(),
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

    /// Queues encoded messages.
    pub fn send_frame(&mut self, frame: &[u8]) {
        if !self.closed {
            self.outbox.push(frame);
        }
    }

    /// Queues an encoded message that goes to other peers, too.
    pub fn share_frame(&mut self, frame: &Arc<[u8]>) {
        if !self.closed {
            self.outbox.share(frame);
        }
    }

    /// Queues the answer to a request, which may be that to the requests of other peers.
    pub fn answer(&mut self, ticket: u64, answer: &EncodedAnswer) {
        if !self.closed {
            answer.queue(ticket, &mut self.outbox);
        }
    }

    /// Whether everything queued has been handed to the system.
    pub fn is_flushed(&self) -> bool {
        self.outbox.is_empty()
    }

    /// Bytes that are queued and not handed to the system yet.
    pub fn queued(&self) -> usize {
        self.outbox.len()
    }

    /// Sends what can be sent now.
    pub fn flush(&mut self) {
        let refuses = |error: io::Error| error.kind() != ErrorKind::WouldBlock;
        // Bytes that the other side wrote before it closed are still to be read: reading will find
        // the end.
        if self.closed || self.outbox.write_to(&mut self.stream).is_err_and(refuses) {
            self.outbox.clear();
        }
    }

    /// Bytes of memory that its buffers take.
    #[cfg(test)]
    pub fn held_bytes(&self) -> usize {
        Outbox::held(std::slice::from_ref(&self.outbox)) + self.inbox.bytes.capacity()
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
/// Longest frame between authenticated ranks.
pub const MAX_FRAME: usize = 64 << 20;
/// Longest frame of an unauthenticated peer.
pub(super) const MAX_GREETING: usize = 4 << 10;

/// Bytes that no correct peer sends.
#[derive(Debug, PartialEq, Eq)]
pub struct Malformed;

/// Collects bytes as they come and gives out whole frames.
#[derive(Debug)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
    start: usize,
    limit: usize,
}

impl Inbox {
    /// An inbox that takes frames of at most `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Inbox { bytes: Vec::new(), start: 0, limit }
    }

    /// Bytes of the longest frame.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// From now on frames may be this long.
    pub(super) fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Whether everything that came was given out.
    pub(super) fn is_empty(&self) -> bool {
        self.start == self.bytes.len()
    }

    /// Adds bytes as they came.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The body of the next whole frame, if it is here.
    pub(super) fn next(&mut self) -> Result<Option<&[u8]>, Malformed> {
        let Some((head, _)) = self.bytes[self.start..].split_first_chunk::<4>() else {
            self.compact();
            return Ok(None);
        };
        let length = u32::from_le_bytes(*head) as usize;
        if length > self.limit {
            return Err(Malformed);
        }
        let body = self.start + 4;
        if self.bytes.len() < body + length {
            self.compact();
            return Ok(None);
        }
        self.start = body + length;
        Ok(Some(&self.bytes[body..body + length]))
    }

    /// Drops the consumed bytes. It runs when a frame is incomplete, so once per read and not once
    /// per frame.
    fn compact(&mut self) {
        self.bytes.drain(..self.start);
        self.start = 0;
        if self.bytes.is_empty() {
            self.bytes.shrink_to(KEPT);
        }
    }
}

/// Writes a frame.
pub struct Writer(Vec<u8>);

impl Writer {
    /// A frame with an empty body.
    pub fn new() -> Self {
        Writer(vec![0; 4])
    }

    pub fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(super) fn u16(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }

    pub fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    pub fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    pub fn array(&mut self, value: &[u8]) {
        self.0.extend_from_slice(value);
    }

    /// Bytes with their length before them.
    pub fn bytes(&mut self, value: &[u8]) {
        self.u32(value.len() as u32);
        self.array(value);
    }

    /// The bytes that were written, without a length in front.
    pub(super) fn body(&self) -> &[u8] {
        &self.0[4..]
    }

    /// The frame, with its length in front.
    pub fn finish(self) -> Vec<u8> {
        self.finish_before(0)
    }

    /// The beginning of a frame that so many bytes follow.
    pub(super) fn finish_before(mut self, rest: usize) -> Vec<u8> {
        let length = (self.0.len() - 4 + rest) as u32;
        self.0[..4].copy_from_slice(&length.to_le_bytes());
        self.0
    }
}

/// Reads a body.
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub fn new(body: &'a [u8]) -> Self {
        Reader(body)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed)?;
        self.0 = rest;
        Ok(*head)
    }

    pub fn u8(&mut self) -> Result<u8, Malformed> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(super) fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }

    pub fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    /// Bytes with their length before them.
    pub fn bytes(&mut self) -> Result<&'a [u8], Malformed> {
        let length = self.u32()? as usize;
        let (head, rest) = self.0.split_at_checked(length).ok_or(Malformed)?;
        self.0 = rest;
        Ok(head)
    }

    /// Text with its length before it.
    pub fn text(&mut self) -> Result<String, Malformed> {
        std::str::from_utf8(self.bytes()?).map(str::to_owned).map_err(|_| Malformed)
    }

    /// A list of at most as many elements as there are bytes left: a lying count allocates nothing.
    pub fn list<T>(
        &mut self,
        mut element: impl FnMut(&mut Self) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, Malformed> {
        let count = self.u32()? as usize;
        if count > self.0.len() {
            return Err(Malformed);
        }
        (0..count).map(|_| element(self)).collect()
    }

    /// The end: nothing may be left over.
    pub fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(body: &[u8]) -> Vec<u8> {
        let mut writer = Writer::new();
        writer.array(body);
        writer.finish()
    }

    proptest! {
        #[test]
        fn frames_come_out_whole_however_the_stream_is_cut(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..50), 1..8),
            cut in 1usize..40,
        ) {
            let stream: Vec<u8> = bodies.iter().flat_map(|body| frame(body)).collect();
            let mut inbox = Inbox::new(MAX_GREETING);
            let mut seen = Vec::new();
            for piece in stream.chunks(cut) {
                inbox.push(piece);
                while let Some(body) = inbox.next().unwrap() {
                    seen.push(body.to_vec());
                }
            }
            prop_assert_eq!(seen, bodies);
        }
    }

    #[test]
    fn a_frame_beyond_the_limit_is_refused_by_its_header_alone() {
        let mut inbox = Inbox::new(MAX_GREETING);
        inbox.push(&(MAX_GREETING as u32 + 1).to_le_bytes());
        assert_eq!(inbox.next(), Err(Malformed));
        let mut inbox = Inbox::new(MAX_GREETING);
        inbox.push(&(MAX_GREETING as u32).to_le_bytes());
        assert_eq!(inbox.next(), Ok(None));
    }

    #[test]
    fn a_lying_count_is_refused_before_anything_is_allocated() {
        let body = u32::MAX.to_le_bytes();
        assert_eq!(Reader::new(&body).list(|reader| reader.u8()), Err(Malformed));
        assert_eq!(Reader::new(&body).bytes(), Err(Malformed));
    }
}
