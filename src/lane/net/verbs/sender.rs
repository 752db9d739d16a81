//! The send queue of one connection: queued, posted and completed requests.
//!
//! ```text
//!   put --> gathered --> asked ------------> posted ------------> done
//!           one write       queue, pieces       flights: one per doorbell, with the bytes and the staging it frees
//! ```
//!
//! Requests wait in a queue of our own, so that no queue of the NIC can overflow: a post takes only
//! as many as fit, in requests and in bytes in flight. They are posted in batches, one doorbell
//! each, and only the last of a batch makes a completion. The last write is held back until it is
//! known to be complete: the next put or signal may travel with it ([`Gather`]).

use std::collections::VecDeque;

use super::block::{Block, Staged};
use super::gather::{Bounds, Gather, PieceSource, RequestSpace};
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
    /// Staging up to here is free when it is done.
    staged: Option<u64>,
    /// Its bytes, if they travel inside it.
    words: [u64; 3],
}

#[derive(Clone, Copy, Debug)]
struct Flight {
    /// Number of the request behind the last one.
    end: u64,
    bytes: u64,
    staged: Option<u64>,
}

/// A send queue. Requests have numbers, in the order in which they are asked for.
pub struct Sender {
    pub qp: QueuePair,
    pub block: Block,
    pub counters: Counters,
    chain: SendChain,
    gather: Gather,
    queue: VecDeque<Request>,
    pieces: VecDeque<Sge>,
    flights: VecDeque<Flight>,
    limits: Limits,
    asked: u64,
    posted: u64,
    done: u64,
    /// Requests below this number are to be posted as soon as there is room.
    due: u64,
    /// Requests from this number on read no memory but our own.
    in_place: u64,
    under_way: u64,
}

/// Numbers of receives have this bit.
pub const RECEIVE: u64 = 1 << 63;

impl Sender {
    /// An empty queue.
    pub fn new(qp: QueuePair, block: Block, chain: SendChain, limits: Limits, bounds: Bounds) -> Self {
        Sender {
            qp,
            block,
            counters: Counters::default(),
            chain,
            gather: Gather::new(bounds),
            queue: VecDeque::new(),
            pieces: VecDeque::new(),
            flights: VecDeque::new(),
            limits,
            asked: 0,
            posted: 0,
            done: 0,
            due: 0,
            in_place: 0,
            under_way: 0,
        }
    }

    /// Room for at least `least` bytes at `to`, which are copied first or not: in the write that is
    /// being gathered, if they lie behind it, or else in a new one.
    pub fn room(&mut self, to: Remote, least: u64, staged: bool) -> RequestSpace {
        let fits = |room: &RequestSpace| room.pieces > 0 && room.bytes >= least;
        self.gather.room(to, staged).filter(fits).unwrap_or_else(|| {
            self.close();
            self.gather.bounds.room(staged)
        })
    }

    /// Room of an empty write.
    pub fn bounds(&self) -> Bounds {
        self.gather.bounds
    }

    /// Writes pieces to `to`, for which [`Sender::room`] has said that there is room.
    pub fn write(&mut self, to: Remote, pieces: impl IntoIterator<Item = Sge>, kept: PieceSource) {
        self.gather.add(to, pieces, kept);
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
        self.push(Request { kind, to, pieces, bytes, staged: until, words: [0; 3] });
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

    /// Ends the write that is being gathered, if there is one, with this immediate. Returns whether
    /// there is.
    pub fn take_along(&mut self, immediate: u32) -> bool {
        self.close_as(Kind::Immediate(immediate))
    }

    /// Asks for a request without bytes of others, behind everything so far.
    pub fn ask(&mut self, kind: Kind, to: Remote) {
        self.close();
        self.push(Request { kind, to, pieces: 0, bytes: 0, staged: None, words: [0; 3] });
    }

    /// Asks for a request whose bytes have been staged, behind everything so far.
    pub fn ask_staged(&mut self, kind: Kind, to: Remote, staged: &Staged) {
        self.close();
        self.pieces.push_back(staged.piece);
        let bytes = staged.piece.len().into();
        self.push(Request { kind, to, pieces: 1, bytes, staged: Some(staged.until), words: [0; 3] });
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
        self.push(Request { kind: Kind::Write, to, pieces: 0, bytes, staged: None, words: inside });
        true
    }

    /// Reports to the peer at once how many of its signals were taken. This may overtake a write
    /// that is being gathered: the report says nothing about it, and the peer does not expect it at
    /// a given time.
    pub fn grant(&mut self, to: Remote, taken: u64) -> Result<(), VerbsError> {
        let piece = self.block.grant(taken)?;
        self.pieces.push_back(piece);
        let bytes = piece.len().into();
        self.push(Request { kind: Kind::Write, to, pieces: 1, bytes, staged: None, words: [0; 3] });
        self.post_soon();
        Ok(())
    }

    fn push(&mut self, request: Request) {
        self.queue.push_back(request);
        self.asked += 1;
    }

    /// All requests so far are to be posted as soon as there is room; a write that is being
    /// gathered may go on.
    pub fn post_soon(&mut self) {
        self.due = self.asked;
    }

    /// Everything so far is to be posted as soon as there is room.
    pub fn hurry(&mut self) {
        self.close();
        self.post_soon();
    }

    /// Posts due requests and full batches, as far as there is room. Returns whether it posted any.
    ///
    /// # Errors
    /// [`VerbsError::Post`].
    pub fn post(&mut self) -> Result<bool, VerbsError> {
        let mut any = false;
        loop {
            let due = self.due.saturating_sub(self.posted) as usize;
            let ready = match due {
                0 if self.queue.len() >= self.limits.batch => self.limits.batch,
                due => due.min(self.limits.batch),
            };
            let room = (self.limits.requests - (self.posted - self.done)) as usize;
            if !self.ring(ready.min(room))? {
                return Ok(any);
            }
            any = true;
        }
    }

    /// Posts up to `most` requests with one doorbell.
    fn ring(&mut self, most: usize) -> Result<bool, VerbsError> {
        let (mut count, mut bytes, mut packets, mut staged) = (0, 0, 0, None);
        for request in self.queue.iter().take(most) {
            let under_way = self.under_way + bytes;
            if under_way > 0 && under_way + request.bytes > self.limits.bytes {
                break;
            }
            (count, bytes) = (count + 1, bytes + request.bytes);
            packets += request.bytes.div_ceil(self.limits.mtu).max(1);
            staged = request.staged.or(staged);
        }
        for nth in 0..count {
            let Some(request) = self.queue.pop_front() else { break };
            let flags = if nth + 1 == count { Flags::SIGNALLED } else { Flags::empty() };
            self.chain(request, flags)?;
            self.posted += 1;
        }
        if count == 0 {
            return Ok(false);
        }
        self.qp.post_send(&mut self.chain)?;
        self.under_way += bytes;
        self.flights.push_back(Flight { end: self.posted, bytes, staged });
        self.counters.requests += count as u64;
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
        while let Some(&Flight { bytes, staged, .. }) = self.flights.front().filter(|f| f.end <= self.done) {
            self.flights.pop_front();
            self.under_way -= bytes;
            if let Some(until) = staged {
                self.block.staged_until(until);
            }
        }
    }

    /// Drops requests that have not been posted: their peer is gone.
    pub fn abandon(&mut self) {
        self.gather.pieces.clear();
        self.queue.clear();
        self.pieces.clear();
        self.flights.clear();
        self.posted = self.asked;
        self.done = self.asked;
        self.under_way = 0;
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
