//! The send queue of one connection: requests that are gathered, queued, posted and completed, and
//! the registered memory that they use.
//!
//! ```text
//!   put --> gathered --> asked ------------> posted ------------> done
//!           one write       queue, pieces       flights: one per doorbell, with the bytes and the staging it frees
//! ```
//!
//! Requests wait in a queue of our own, so that no queue of the NIC can overflow: a post takes only
//! as many as fit, in requests and in bytes in flight. They are posted in batches, one doorbell
//! each, and only the last of a batch makes a completion. A batch is full at so many requests, or
//! at a chunk of bytes: then it is *due*, so that the NIC sends a chunk while the next is staged.
//!
//! **Gathering.** Puts with adjacent targets travel in one request. The last write is held back
//! until it is known to be complete: the next put or signal may travel with it.
//!
//! ```text
//!   put header | put_rows 7 2 9 | zero          at the peer      | header | 7 | 2 | 9 | 0 0 |
//!         \         |  |  |       |
//!       [ staged    in place     zeros ]        a request: at most a chunk of bytes, as many pieces as a NIC takes
//! ```
//!
//! A put to another place ends it, and so do a signal, which may travel with it, and a flush: all
//! of them calls. The progress of the NIC ends nothing, so the number of requests does not depend
//! on time. Only where other connections wait for staging that this one holds, the progress thread
//! ends a write that is gathered here.
//!
//! **Fences.** A fenced request waits in the queue until the NIC has completed all requests before
//! it, and so have those behind it. The completion of a write says that it is placed at the peer,
//! for any way of its packets. No flag of a request says as much: `IBV_SEND_FENCE` waits for
//! reads and atomics only.
//!
//! ```text
//!   asked    rows | rows | fenced word | signal
//!   posted   one doorbell  '- a second one, after the completion of the first
//! ```
//!
//! **Registered memory**: copied bytes of puts lie in slots of [`staging`](super::staging). Words
//! and records of signals lie in lines of the connection's [`block`](super::block). The grant to
//! the peer only grows, so it needs no line of its own: a NIC that reads it late reports more.
//!
//! **End.** What is not posted is dropped. Slots go back to the pool once the NIC has flushed what
//! is: until then it may read them.

use std::collections::VecDeque;

use super::block::{Block, LINES};
use super::staging::{ALIGN, Staged, Staging};
use super::{Flags, QueuePair, Remote, SendChain, Sge};
use crate::error::{Operation, VerbsError};
use crate::lane::net::Counters;

/// Limits of requests in flight.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Requests.
    pub requests: u64,
    /// Bytes; a single request may be larger.
    pub bytes: u64,
    /// Requests per doorbell.
    pub batch: usize,
    /// Bytes of a packet.
    pub mtu: u64,
}

/// The kind of a request, and what only this kind needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// RDMA write.
    Write,
    /// RDMA write with this immediate.
    Immediate(u32),
    /// Addition of this.
    Add(u64),
    /// Send.
    Send,
}

#[derive(Clone, Copy, Debug)]
struct Request {
    kind: Kind,
    to: Remote,
    pieces: usize,
    bytes: u64,
    /// What is free when it is done.
    frees: Frees,
    /// Its bytes, if they travel inside it.
    words: [u64; 3],
}

/// Registered memory that is free up to a position once requests are done.
#[derive(Clone, Copy, Debug, Default)]
struct Frees {
    staged: Option<u64>,
    lines: Option<u64>,
}

impl Frees {
    /// That of these requests, and of `later` ones.
    fn and(self, later: Frees) -> Frees {
        Frees { staged: later.staged.or(self.staged), lines: later.lines.or(self.lines) }
    }
}

#[derive(Clone, Copy, Debug)]
struct PostedBatch {
    /// Number of the request behind the last one.
    end: u64,
    bytes: u64,
    frees: Frees,
}

/// A send queue. Requests have numbers, in the order in which they are asked for.
pub struct Sender {
    pub qp: QueuePair,
    pub block: Block,
    /// Dropped after the queue pair, which reads it.
    pub staging: Staging,
    pub counters: Counters,
    chain: SendChain,
    gather: Gather,
    queue: VecDeque<Request>,
    pieces: VecDeque<Sge>,
    flights: VecDeque<PostedBatch>,
    limits: Limits,
    asked: u64,
    posted: u64,
    done: u64,
    /// Requests below this number are to be posted as soon as there is room.
    due: u64,
    /// Bytes of those that are not due yet.
    held: u64,
    /// Requests from this number on read no memory but our own.
    in_place: u64,
    /// Requests from this number on are behind the last report of taken signals.
    grants: u64,
    in_flight: u64,
    /// Lines ever taken, and ever free again.
    lines: u64,
    lines_read: u64,
    /// Requests that the NIC is done with, in success or not.
    seen: u64,
    /// After the end: requests that were posted before.
    ends: Option<u64>,
    /// Numbers of requests that are posted after the completion of all before them.
    fences: VecDeque<u64>,
}

/// Numbers of receives have this bit.
pub const RECEIVE: u64 = 1 << 63;

impl Sender {
    /// An empty queue.
    pub fn new(
        qp: QueuePair,
        (block, staging): (Block, Staging),
        chain: SendChain,
        limits: Limits,
        bounds: Bounds,
    ) -> Self {
        // As long as a NIC keeps up they do not grow: what waits depends on time.
        let requests = limits.requests as usize;
        Sender {
            qp,
            block,
            staging,
            counters: Counters::default(),
            chain,
            gather: Gather::new(bounds),
            queue: VecDeque::with_capacity(requests),
            pieces: VecDeque::with_capacity(limits.batch * bounds.pieces),
            flights: VecDeque::with_capacity(requests),
            limits,
            asked: 0,
            posted: 0,
            done: 0,
            due: 0,
            held: 0,
            in_place: 0,
            grants: 0,
            in_flight: 0,
            lines: 0,
            lines_read: 0,
            seen: 0,
            ends: None,
            fences: VecDeque::new(),
        }
    }

    /// Room for at least `least` bytes at `to`, which are copied first or not: in the write that is
    /// being gathered, if they lie behind it, or else in a new one.
    pub fn room(&mut self, to: Remote, least: u64, staged: bool) -> RequestSpace {
        let fits = |room: &RequestSpace| room.pieces > 0 && room.bytes >= least;
        self.gather.room(to, staged).filter(fits).unwrap_or_else(|| {
            self.close();
            self.gather.bounds.room()
        })
    }

    /// Writes pieces to `to`, for which [`Sender::room`] has said that there is room.
    pub fn write(&mut self, to: Remote, pieces: impl IntoIterator<Item = Sge>, kept: PieceSource) {
        self.gather.add(to, pieces, kept);
    }

    /// Room for `len` bytes that are copied, for a piece of the write that is being gathered, for
    /// which [`Sender::room`] has said that there is room. `None` if there is no staging yet.
    ///
    /// # Errors
    /// As [`Staging::stage`].
    pub fn stage(&mut self, len: u32) -> Result<Option<Staged>, VerbsError> {
        let begins = self.gather.staged() == 0;
        self.staging.stage(len, begins)
    }

    /// A line for a word or a record, for [`Sender::ask_line`]. `None` if the NIC has yet to read
    /// all of them.
    ///
    /// # Errors
    /// [`VerbsError::OutOfRegion`] if it is too short.
    pub fn line(&mut self, len: u32) -> Result<Option<Staged>, VerbsError> {
        if self.lines - self.lines_read == LINES {
            return Ok(None);
        }
        let line = self.block.line(self.lines, len)?;
        self.lines = line.until;
        Ok(Some(line))
    }

    /// Whether other connections wait for staging that this one holds.
    pub fn is_wanted(&self) -> bool {
        self.staging.is_wanted()
    }

    /// Nothing more travels with the write that is being gathered, if there is one, unless as
    /// `kind`.
    fn close_as(&mut self, kind: Kind) -> bool {
        let Gather { to, bytes, until, in_place, .. } = self.gather;
        let pieces = self.gather.pieces.len();
        if pieces == 0 {
            return false;
        }
        self.pieces.extend(self.gather.pieces.drain(..));
        let frees = Frees { staged: until, lines: None };
        self.push(Request { kind, to, pieces, bytes, frees, words: [0; 3] });
        if in_place {
            self.in_place = self.asked;
        }
        true
    }

    /// Closes the write that is being gathered. Call it before staging data that does not travel
    /// with it, because a wait for room may be a wait for this very write.
    pub fn close(&mut self) {
        self.close_as(Kind::Write);
    }

    /// Ends the write that is being gathered. If it is small, this immediate travels with it.
    /// Returns whether it does.
    pub fn take_along(&mut self, immediate: u32) -> bool {
        if self.gather.bytes <= ALONG {
            return self.close_as(Kind::Immediate(immediate));
        }
        self.close();
        false
    }

    /// Later requests wait for the completion of all earlier ones, which are due now.
    pub fn fence(&mut self) {
        self.hurry();
        self.fences.push_back(self.asked);
    }

    /// Asks for a request without bytes of others, behind everything so far.
    pub fn ask(&mut self, kind: Kind, to: Remote) {
        self.close();
        self.push(Request { kind, to, pieces: 0, bytes: 0, frees: Frees::default(), words: [0; 3] });
    }

    /// Asks for a request whose bytes lie in a line, behind everything so far.
    pub fn ask_line(&mut self, kind: Kind, to: Remote, line: &Staged) {
        self.close();
        self.pieces.push_back(line.piece);
        let bytes = line.piece.len().into();
        let frees = Frees { staged: None, lines: Some(line.until) };
        self.push(Request { kind, to, pieces: 1, bytes, frees, words: [0; 3] });
    }

    /// Asks for a write of words that travel inside the request, behind everything so far. `false`
    /// if the NIC does not take this many.
    pub fn ask_inside(&mut self, to: Remote, words: &[u64]) -> bool {
        let mut inside = [0; 3];
        let Some(place) = inside.get_mut(..words.len()) else { return false };
        if size_of_val(words) > self.chain.caps().inline {
            return false;
        }
        place.copy_from_slice(words);
        self.close();
        let bytes = size_of_val(words) as u64;
        self.push(Request {
            kind: Kind::Write,
            to,
            pieces: 0,
            bytes,
            frees: Frees::default(),
            words: inside,
        });
        true
    }

    /// Whether a report of taken signals may go out: not before the last one is placed. Two in
    /// flight could be placed in the wrong order, and then the count at the peer would shrink.
    pub fn may_grant(&self) -> bool {
        self.done >= self.grants
    }

    /// Reports to the peer at once how many of its signals were taken. This may overtake a write
    /// that is being gathered: the report says nothing about it, and the peer does not expect it at
    /// a given time.
    pub fn grant(&mut self, to: Remote, taken: u64) -> Result<(), VerbsError> {
        let piece = self.block.grant(taken)?;
        self.pieces.push_back(piece);
        let bytes = piece.len().into();
        self.push(Request {
            kind: Kind::Write,
            to,
            pieces: 1,
            bytes,
            frees: Frees::default(),
            words: [0; 3],
        });
        self.grants = self.asked;
        self.post_soon();
        Ok(())
    }

    fn push(&mut self, request: Request) {
        self.held += request.bytes;
        self.queue.push_back(request);
        self.asked += 1;
        if self.asked - self.due >= self.limits.batch as u64 || self.held >= self.gather.bounds.bytes {
            self.post_soon();
        }
    }

    /// All requests so far are to be posted as soon as there is room; a write that is being
    /// gathered may go on.
    pub fn post_soon(&mut self) {
        (self.due, self.held) = (self.asked, 0);
    }

    /// Everything so far is to be posted as soon as there is room.
    pub fn hurry(&mut self) {
        self.close();
        self.post_soon();
    }

    /// Posts due requests, as far as there is room. Returns whether it posted any.
    ///
    /// # Errors
    /// [`VerbsError::Post`].
    pub fn post(&mut self) -> Result<bool, VerbsError> {
        let mut any = false;
        loop {
            let due = (self.due - self.posted) as usize;
            let room = (self.limits.requests - (self.posted - self.done)) as usize;
            if !self.ring(due.min(self.limits.batch).min(room))? {
                return Ok(any);
            }
            any = true;
        }
    }

    /// Posts up to `most` requests with one doorbell.
    fn ring(&mut self, most: usize) -> Result<bool, VerbsError> {
        debug_assert!(self.fences.iter().all(|&fence| fence >= self.posted), "no fence is passed by");
        let fences = self.fences.iter().take_while(|&&fence| fence == self.posted).count();
        if fences > 0 && self.done < self.posted {
            return Ok(false);
        }
        // A batch ends before the next fence, also if that is the next request.
        let room = self.fences.get(fences).map_or(u64::MAX, |fence| fence - self.posted);
        let (mut count, mut bytes, mut packets, mut frees) = (0, 0, 0, Frees::default());
        for request in self.queue.iter().take(most.min(usize::try_from(room).unwrap_or(most))) {
            let in_flight = self.in_flight + bytes;
            if in_flight > 0 && in_flight + request.bytes > self.limits.bytes {
                break;
            }
            (count, bytes) = (count + 1, bytes + request.bytes);
            packets += request.bytes.div_ceil(self.limits.mtu).max(1);
            frees = frees.and(request.frees);
        }
        if count == 0 {
            return Ok(false);
        }
        self.fences.drain(..fences);
        for nth in 0..count {
            let Some(request) = self.queue.pop_front() else { break };
            let flags = if nth + 1 == count { Flags::SIGNALED } else { Flags::empty() };
            self.chain(request, flags)?;
            self.posted += 1;
        }
        self.qp.post_send(&mut self.chain)?;
        self.in_flight += bytes;
        self.flights.push_back(PostedBatch { end: self.posted, bytes, frees });
        self.counters.requests += count;
        self.counters.doorbells += 1;
        self.counters.packets += packets;
        self.counters.bytes += bytes;
        Ok(true)
    }

    fn chain(&mut self, request: Request, flags: Flags) -> Result<(), VerbsError> {
        let Request { kind, to, pieces, bytes, words, .. } = request;
        let id = self.posted << 2 | code(kind);
        let pieces = self.pieces.drain(..pieces);
        match kind {
            Kind::Write if pieces.len() == 0 && bytes > 0 => {
                drop(pieces);
                let inside = &bytemuck::bytes_of(&words)[..bytes as usize];
                self.chain.write_inline(id, inside, to, flags)
            }
            Kind::Write => self.chain.write(id, pieces, to, flags),
            Kind::Immediate(immediate) => self.chain.write_immediate(id, pieces, to, immediate, flags),
            Kind::Add(add) => self.chain.fetch_add(id, self.block.old()?, to, add, flags),
            Kind::Send => self.chain.send(id, pieces, flags),
        }
    }

    /// The NIC has completed a request, and so all earlier ones.
    pub fn complete(&mut self, id: u64) {
        self.done = self.done.max((id >> 2) + 1);
        self.counters.completions += 1;
        while let Some(&PostedBatch { bytes, frees, .. }) =
            self.flights.front().filter(|f| f.end <= self.done)
        {
            self.flights.pop_front();
            self.in_flight -= bytes;
            if let Some(until) = frees.staged {
                self.staging.read_until(until);
            }
            self.lines_read = frees.lines.unwrap_or(self.lines_read);
        }
        self.see(id);
    }

    /// The NIC is done with a request, in success or not, and so with all earlier ones.
    pub fn see(&mut self, id: u64) {
        self.seen = self.seen.max((id >> 2) + 1);
        if self.ends.is_some_and(|posted| self.seen >= posted) {
            self.staging.clear();
        }
    }

    /// Drops requests that have not been posted: their peer is gone. Nothing may be posted any
    /// more.
    pub fn abandon(&mut self) {
        let posted = *self.ends.get_or_insert(self.posted);
        if self.seen >= posted {
            self.staging.clear();
        }
        self.gather.pieces.clear();
        self.queue.clear();
        self.pieces.clear();
        self.flights.clear();
        self.fences.clear();
        self.post_soon();
        self.posted = self.asked;
        self.done = self.asked;
        self.in_flight = 0;
    }

    /// Whether everything asked for is in flight, and memory of others read no more.
    pub fn is_settled(&self) -> bool {
        self.posted == self.asked && self.done >= self.in_place
    }

    /// Whether everything asked for has landed.
    pub fn is_done(&self) -> bool {
        self.done == self.asked
    }

    /// Requests asked for, and done.
    pub fn progress(&self) -> (u64, u64) {
        (self.asked, self.done)
    }
}

impl std::fmt::Debug for Sender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (asked, posted, done) = (self.asked, self.posted, self.done);
        f.debug_struct("Sender").field("asked", &asked).field("posted", &posted).field("done", &done).finish()
    }
}

fn code(kind: Kind) -> u64 {
    match kind {
        Kind::Write => 0,
        Kind::Immediate(_) => 1,
        Kind::Add(_) => 2,
        Kind::Send => 3,
    }
}

/// The operation of the request with this number.
pub fn operation(id: u64) -> Operation {
    match id {
        receive if receive & RECEIVE != 0 => Operation::Receive,
        send => match send & 3 {
            0 => Operation::Write,
            1 => Operation::WriteImmediate,
            2 => Operation::FetchAdd,
            _ => Operation::Send,
        },
    }
}

/// The largest write, in bytes, that an immediate travels with. The packets of a write with
/// immediate all take one path, so a larger one goes without: over all paths.
pub const ALONG: u64 = 8 << 10;

/// Limits of one request.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Bytes, and bytes of staging.
    pub bytes: u64,
    /// Pieces.
    pub pieces: usize,
}

impl Bounds {
    /// Space in an empty request.
    fn room(&self) -> RequestSpace {
        RequestSpace { bytes: self.bytes, pieces: self.pieces }
    }
}

/// Remaining room of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestSpace {
    /// Bytes.
    pub bytes: u64,
    /// Pieces.
    pub pieces: usize,
}

/// Where pieces lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceSource {
    /// In memory of others, which the lane must report as free once it has read them.
    InPlace,
    /// In staging, which is free up to here once they have been read.
    Staged(u64),
    /// In memory that the NIC can always read.
    Always,
}

/// The write that is being gathered; none while it has no pieces.
struct Gather {
    bounds: Bounds,
    to: Remote,
    bytes: u64,
    pieces: Vec<Sge>,
    /// Bytes of staging that it holds, and up to where staging is free when it is done.
    staged: u64,
    until: Option<u64>,
    /// Whether it reads memory of others.
    in_place: bool,
}

impl Gather {
    /// Nothing yet.
    fn new(bounds: Bounds) -> Self {
        Gather {
            bounds,
            to: Remote { addr: 0, rkey: 0 },
            bytes: 0,
            pieces: Vec::with_capacity(bounds.pieces),
            staged: 0,
            until: None,
            in_place: false,
        }
    }

    /// Room for data to `to` in the gathered write; `None` if it is empty or ends elsewhere.
    fn room(&self, to: Remote, staged: bool) -> Option<RequestSpace> {
        let behind = Remote { addr: self.to.addr + self.bytes, rkey: self.to.rkey };
        if self.pieces.is_empty() || to != behind {
            return None;
        }
        let mut bytes = self.bounds.bytes - self.bytes;
        if staged {
            let left = self.bounds.bytes.saturating_sub(self.staged);
            bytes = bytes.min(left - left % ALIGN);
        }
        Some(RequestSpace { bytes, pieces: self.bounds.pieces - self.pieces.len() })
    }

    /// Bytes of staging that the write holds.
    fn staged(&self) -> u64 {
        if self.pieces.is_empty() { 0 } else { self.staged }
    }

    /// Pieces for `to`, for which there is room.
    fn add(&mut self, to: Remote, pieces: impl IntoIterator<Item = Sge>, kept: PieceSource) {
        if self.pieces.is_empty() {
            (self.to, self.bytes, self.staged, self.until, self.in_place) = (to, 0, 0, None, false);
        }
        let first = self.pieces.len();
        self.pieces.extend(pieces);
        let bytes: u64 = self.pieces[first..].iter().map(|piece| u64::from(piece.len())).sum();
        self.bytes += bytes;
        match kept {
            PieceSource::InPlace => self.in_place = true,
            PieceSource::Staged(until) => {
                self.staged += bytes.next_multiple_of(ALIGN);
                self.until = Some(until);
            }
            PieceSource::Always => {}
        }
    }
}
