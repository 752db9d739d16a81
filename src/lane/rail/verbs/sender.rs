//! The send queue of one rail: what is asked for, what the card has, what is done.
//!
//! ```text
//!   asked ------------> posted ------------> done
//!      queue, pieces       flights: one per doorbell, with the bytes and the staging it frees
//! ```
//!
//! Requests wait in a queue of our own, so that nothing the card holds can overflow: a post takes no more than there is
//! room for, in requests and in bytes under way. They are posted in batches, one doorbell each, and only the last of a
//! batch makes a completion. While nothing says that it is urgent, the last request is held back: the signal that comes
//! next may travel with it.

use std::collections::VecDeque;

use super::block::{Block, Staged};
use super::{Flags, QueuePair, Remote, SendChain, Sge};
use crate::error::{Operation, VerbsError};
use crate::lane::rail::Counters;

/// What may be under way.
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
    pub fn new(qp: QueuePair, block: Block, chain: SendChain, limits: Limits) -> Self {
        Sender {
            qp,
            block,
            counters: Counters::default(),
            chain,
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

    /// Asks for a request whose pieces lie in registered memory of others: they are read until it is done.
    pub fn ask(&mut self, kind: Kind, to: Remote, pieces: impl IntoIterator<Item = Sge>) {
        self.push(kind, to, pieces, None);
        self.in_place = self.asked;
    }

    /// Asks for a request whose bytes have been staged.
    pub fn ask_staged(&mut self, kind: Kind, to: Remote, staged: &Staged) {
        self.push(kind, to, [staged.piece], Some(staged.until));
    }

    /// Asks for a request of bytes that never change.
    pub fn ask_constant(&mut self, kind: Kind, to: Remote, pieces: impl IntoIterator<Item = Sge>) {
        self.push(kind, to, pieces, None);
    }

    /// Asks for a write of words that travel inside the request. `false` if the card does not take so many.
    pub fn ask_inside(&mut self, to: Remote, words: &[u64]) -> bool {
        let mut inside = [0; 3];
        let Some(place) = inside.get_mut(..words.len()) else { return false };
        if size_of_val(words) > self.chain.caps().inline {
            return false;
        }
        place.copy_from_slice(words);
        let bytes = size_of_val(words) as u64;
        self.queue.push_back(Request {
            kind: Kind::Write,
            to,
            pieces: 0,
            bytes,
            staged: None,
            words: inside,
        });
        self.asked += 1;
        true
    }

    fn push(&mut self, kind: Kind, to: Remote, pieces: impl IntoIterator<Item = Sge>, staged: Option<u64>) {
        let first = self.pieces.len();
        self.pieces.extend(pieces);
        let bytes = self.pieces.range(first..).map(|piece| u64::from(piece.len())).sum();
        let pieces = self.pieces.len() - first;
        self.queue.push_back(Request { kind, to, pieces, bytes, staged, words: [0; 3] });
        self.asked += 1;
    }

    /// Makes the last write take this immediate along, if it has not been posted. Returns whether it does.
    pub fn take_along(&mut self, immediate: u32) -> bool {
        match self.queue.back_mut() {
            Some(last) if last.kind == Kind::Write && last.pieces > 0 => {
                last.kind = Kind::Immediate(immediate);
                true
            }
            _ => false,
        }
    }

    /// Everything so far is to be posted as soon as there is room.
    pub fn hurry(&mut self) {
        self.due = self.asked;
    }

    /// Posts what is due and what fills a batch, as far as there is room. Returns whether it posted anything.
    ///
    /// # Errors
    /// [`VerbsError::Post`].
    pub fn post(&mut self) -> Result<bool, VerbsError> {
        let mut any = false;
        loop {
            let due = self.due.saturating_sub(self.posted) as usize;
            let ready = match due {
                0 if self.queue.len() > self.limits.batch => self.limits.batch,
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

    /// The card has done a request, and so all before it.
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

    /// Forgets what has not been posted: there is nobody to send it to.
    pub fn abandon(&mut self) {
        self.queue.clear();
        self.pieces.clear();
        self.flights.clear();
        self.posted = self.asked;
        self.done = self.asked;
        self.under_way = 0;
    }

    /// Whether memory of others is read no more.
    pub fn is_settled(&self) -> bool {
        self.posted == self.asked && self.done >= self.in_place
    }

    /// Whether everything has landed.
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

/// What the request of this number asked for.
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
