//! Collectives: all-reduce, broadcast, all-to-all and messages between two ranks, as programs.
//!
//! A call goes in *rounds*, each of at most a chunk of bytes (of a broadcast three, as one rank
//! alone has any), so that staged bytes stay in the caches and memory is bounded. Every round
//! begins alike: each rank puts the bytes that it can, signals its entry to every other rank with a
//! tag that names its call, and waits for all of them. Only then does any rank read those bytes.
//!
//! ```text
//!   one-shot    enter: own vector -> own offer, other nodes' landings      | sum: all vectors                 small ones
//!   two-shot    enter: own chunk -> own offer, shares to other nodes       | sum: own share, where it lies
//!                                                                          | share: -> own result, other nodes' results
//!                                                                          | all signal, unless another round of it follows
//!   ring        enter: own chunk -> own offer | step: landed partial + own -> outbox -> next ... | sum: own share
//!                                             | gather: result -> next ...
//!   broadcast   enter: root's chunk -> its offer | relay: root's offer -> a leader per node (star), or from leader to leader
//!                                                in parts (chain)
//!   all-to-all  enter: to each rank its part -> a landing there
//!   zero-copy   enter: words alone | land: to each rank its part -> its place in the result there; words
//!   all-gather  enter: own chunk -> own offer, other nodes' landings
//! ```
//!
//! At the end, unless its result has landed in place, a rank copies the result to its caller
//! ([`Copied`]): from the memory of local peers, where these left it, and from its own, where ranks
//! of other nodes put it.
//!
//! In a two-shot call, the sums of a round other than the last are copied when the next round has
//! been entered: by then they have landed. They are written after an entry, unlike all other bytes,
//! so ranks may read them until the entry after the next.
//!
//! **Write grants.** All places are doubled by the parity of the round, and that is enough. A rank
//! that writes into the place of round n + 2 has heard all ranks enter n + 1, so all have read
//! their bytes of round n. [`ControlLayout`](super::ControlLayout) follows the same rule.
//!
//! Results that land in place have one *room*, which the caller reads until its next call of any
//! kind. So the entry is the write grant: a rank that puts has heard all ranks enter this very
//! call, so all have read the result of the last one.
//!
//! ```text
//!   rank 0   enter n | put -> 1, 2, word | all words | reads its result ........... | enter n + 1 | put -> 1, 2
//!   rank 1   enter n | put -> 0, 2, word | all words | reads its result .................................. | enter n + 1 | ...
//!                                                                                       0 may not put yet  ^
//! ```
//!
//! **Bits.** One-shot and two-shot calls add in `f32` by ascending rank from +0 and round once: the
//! same bits, wherever ranks are. A ring adds share `s` in the order s + 1, s + 2, ... s, and
//! rounds each partial to its [`PartialDtype`](crate::dtype::PartialDtype).
//!
//! **Messages** ([`MessageChannel`]) go in parts, and have flags, slots and numbers of their own,
//! independent of collectives:
//!
//! ```text
//!   sender                                                         receiver
//!   Wait     taken of part n - 2  (a slot is free)
//!   Put      part n  --------------------------------------------> slot n mod 2 of this sender
//!   Signal   block = n, tag: how many bytes the message has  ----> Wait  block >= n
//!                                                                  copy to the caller
//!   read  <------------------------------------------------------- Signal  read = n, and how many were refused
//! ```
//!
//! Each ordered pair of ranks has two slots at the receiver, and numbers its parts: so a pair's
//! messages match in the order of sending, and a sender is at most two parts ahead. A message of no
//! bytes has one part.
//!
//! **Staging.** The bytes of collectives lie in the window of each rank like this:
//!
//! ```text
//!   | of even rounds: offer   | result  | outbox               | landing of each rank | of odd rounds: ... | pair: 2 slots of each rank | room |
//!                     a chunk   a chunk   a slot for each step   a slot each
//! ```
//!
//! On entry, other ranks write to landings alone. So a root's offer may extend over its result and
//! outbox, while others make other calls.
//!
//! Results land in place in the *room*, part behind part. It is as large as requested, and there is
//! one for all rounds.

mod program;

use std::ops::Range;

use super::{Calls, Flag, FlagValue, Op, OperandId, PutSource, SpanCopy, TrackOp, WindowId};
use crate::error::PlanError;
use crate::plan::LINE;
use crate::topology::NodeMap;

pub use program::{Copied, Program, Round, Rounds, Shape, Skeleton, Step, Tensor};

/// One rank among those of a collective.
#[derive(Clone, Debug)]
pub struct RankView {
    /// Which ranks share memory.
    pub nodes: NodeMap,
    /// This rank.
    pub me: u32,
    /// Placement of bytes, at every rank alike.
    pub staging: Staging,
}

impl RankView {
    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.nodes.ranks()
    }

    /// Where the parts of all ranks, of this many bytes each, have landed in place at the end of a
    /// call.
    pub fn landed(&self, part: u64) -> Range<u64> {
        self.staging.in_place(0, part)..self.staging.in_place(self.ranks(), part)
    }

    /// All others, rotated, so that ranks do not all begin with the same one.
    fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        let (me, ranks) = (self.me, self.ranks());
        (1..ranks).map(move |step| (me + step) % ranks)
    }

    /// The peers of other nodes.
    fn far(&self) -> impl Iterator<Item = u32> + use<'_> {
        self.peers().filter(|&peer| !self.near(peer))
    }

    fn near(&self, peer: u32) -> bool {
        self.nodes.same_node(self.me, peer)
    }

    /// The window in which this rank finds the bytes that a rank has for it.
    fn holder(&self, of: u32) -> u32 {
        if self.near(of) { of } else { self.me }
    }

    fn next(&self) -> u32 {
        (self.me + 1) % self.ranks()
    }

    fn before(&self, steps: u32) -> u32 {
        (self.me + self.ranks() - steps % self.ranks()) % self.ranks()
    }

    /// Of each node the rank that a root's chunk comes to, the root's node and the root itself
    /// first.
    fn leaders(&self, root: u32) -> Vec<u32> {
        let (nodes, first) = (self.nodes.nodes(), self.nodes.node_of(root));
        (0..nodes).map(|step| self.nodes.rail_peer(root, (first + step) % nodes)).collect()
    }
}

/// Chunks in a window: four of each parity, and two slots of each rank.
const CHUNKS: u64 = 10;

/// Geometry of a window: the same at every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Staging {
    ranks: u32,
    slot: u64,
    room: u64,
}

impl Staging {
    /// For this number of ranks, with chunks of at most `chunk` bytes, and no room for results that
    /// land in place.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] if that is less than 128 bytes a rank, or a window is larger
    /// than 64 bits can say.
    pub fn new(ranks: u32, chunk: u64) -> Result<Self, PlanError> {
        let bad = |expected| PlanError::BadParameter { parameter: "chunk", seen: chunk, expected };
        let slot = chunk / u64::from(ranks.max(1)) / LINE * LINE;
        if slot < 2 * LINE {
            return Err(bad("at least 128 bytes for each rank"));
        }
        if chunk.checked_mul(CHUNKS).is_none() {
            return Err(bad("a window of ten chunks in 64 bits"));
        }
        Ok(Staging { ranks, slot, room: 0 })
    }

    /// With room for results of this many bytes, rounded up to a whole line.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] if a window is then larger than 64 bits can say.
    pub fn with_room(self, bytes: u64) -> Result<Self, PlanError> {
        let room = bytes.checked_next_multiple_of(LINE);
        match room.filter(|&room| self.in_place(0, 0).checked_add(room).is_some()) {
            Some(room) => Ok(Staging { room, ..self }),
            None => {
                let expected = "what a window in 64 bits has room for";
                Err(PlanError::BadParameter { parameter: "landing", seen: bytes, expected })
            }
        }
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// The most bytes that a rank has for another in a round, or in a part of a message.
    pub fn slot(&self) -> u64 {
        self.slot
    }

    /// The most bytes of a round.
    pub fn chunk(&self) -> u64 {
        self.slot * u64::from(self.ranks)
    }

    /// The most bytes of a round whose partial sums may be twice as wide as its elements.
    pub fn half_chunk(&self) -> u64 {
        self.slot / 2 / LINE * LINE * u64::from(self.ranks)
    }

    /// The most bytes of a round in which one rank alone has something: its offer extends over
    /// result and outbox.
    pub fn wide_offer(&self) -> u64 {
        3 * self.chunk()
    }

    /// The bytes that a rank sums of `len`: equal shares of whole lines, of which the last may be
    /// shorter, or empty.
    pub fn share(&self, len: u64, rank: u32) -> Range<u64> {
        let width = len.div_ceil(self.ranks.into()).next_multiple_of(LINE);
        let at = |nth: u32| (width * u64::from(nth)).min(len);
        at(rank)..at(rank + 1)
    }

    /// Size of the window.
    pub fn bytes(&self) -> u64 {
        CHUNKS * self.chunk() + self.room
    }

    /// Bytes of results that land in place.
    pub fn room(&self) -> u64 {
        self.room
    }

    /// Where the part of a rank lands in place, if all have so many bytes.
    pub fn in_place(&self, of: u32, part: u64) -> u64 {
        CHUNKS * self.chunk() + u64::from(of) * part
    }

    fn half(&self, parity: u64) -> u64 {
        (parity & 1) * 4 * self.chunk()
    }

    /// Bytes that a rank has for all.
    pub fn offer(&self, parity: u64) -> u64 {
        self.half(parity)
    }

    /// Bytes that a rank puts here; on a ring, those of step `of`.
    pub fn landing(&self, of: u32, parity: u64) -> u64 {
        self.half(parity) + 3 * self.chunk() + u64::from(of) * self.slot
    }

    /// Sums, each share at its place.
    pub fn result(&self, parity: u64) -> u64 {
        self.half(parity) + self.chunk()
    }

    /// A partial sum on its way, of a step of a ring.
    pub fn outbox(&self, step: u32, parity: u64) -> u64 {
        self.half(parity) + 2 * self.chunk() + u64::from(step) * self.slot
    }

    /// Where parts of messages from a rank land, in turn.
    pub fn pair(&self, of: u32, parity: u64) -> u64 {
        2 * self.half(1) + (2 * u64::from(of) + (parity & 1)) * self.slot
    }
}

/// Parts that a sender may be ahead.
const AHEAD: u64 = 2;

/// One direction between this rank and a peer: how many parts have passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageChannel {
    /// The other rank.
    pub peer: u32,
    parts: Calls,
    first: u64,
}

impl MessageChannel {
    /// None yet, in a world of this epoch.
    pub fn new(peer: u32, epoch: u16) -> Self {
        let parts = Calls::new(epoch);
        MessageChannel { peer, parts, first: parts.value() }
    }

    /// Goes on to the next part.
    pub fn advance(&mut self) {
        self.parts.enter();
    }

    /// The number of the running part, as flags have it.
    pub fn value(&self) -> u64 {
        self.parts.value()
    }

    /// The part whose slot the running part reuses, if there is one.
    pub fn freed(&self) -> Option<u64> {
        self.value().checked_sub(AHEAD * Calls::STEP).filter(|&value| value > self.first)
    }

    /// The part before the running one whose answer has not been heard, if there is one.
    pub fn last(&self) -> Option<u64> {
        Some(self.value()).filter(|&value| value > self.first)
    }

    /// Bytes of the message that its part `nth` has.
    pub fn part(view: &RankView, len: u64, nth: u64) -> Range<u64> {
        let slot = view.staging.slot();
        (nth * slot).min(len)..((nth + 1) * slot).min(len)
    }

    /// Number of parts of a message.
    pub fn parts(view: &RankView, len: u64) -> u64 {
        len.div_ceil(view.staging.slot()).max(1)
    }

    /// The sender's wait for the slot.
    pub fn free(&self) -> TrackOp {
        item(Op::Wait { from: self.peer, flag: Flag::Read, level: FlagValue::Call })
    }

    /// The sender's put, and its word.
    pub fn send(&self, view: &RankView) -> [TrackOp; 2] {
        let signal = Op::Signal { to: self.peer, of: view.me, flag: Flag::Block, level: FlagValue::Call };
        [item(Op::Put { to: self.peer, operand: OperandId(0) }), item(signal)]
    }

    /// Bytes that the put moves.
    pub fn sent(&self, view: &RankView, bytes: Range<u64>) -> SpanCopy {
        SpanCopy {
            from: PutSource::Input,
            from_offset: bytes.start,
            to: WindowId::POOL,
            to_offset: view.staging.pair(view.me, self.parts.parity()),
            len: bytes.end - bytes.start,
        }
    }

    /// The receiver's wait.
    pub fn receive(&self) -> TrackOp {
        item(Op::Wait { from: self.peer, flag: Flag::Block, level: FlagValue::Call })
    }

    /// Bytes that the receiver copies.
    pub fn received(&self, view: &RankView, bytes: Range<u64>) -> Copied {
        let offset = view.staging.pair(self.peer, self.parts.parity());
        Copied { owner: view.me, offset, at: bytes.start, len: bytes.end - bytes.start }
    }

    /// The receiver's answer, which frees the slot, and carries the number of messages that it has
    /// refused so far, modulo 256.
    pub fn answer(&self, view: &RankView, refused: u8) -> TrackOp {
        let level = if refused > 0 { FlagValue::Part(refused) } else { FlagValue::Call };
        item(Op::Signal { to: self.peer, of: view.me, flag: Flag::Read, level })
    }
}

/// One part of two messages that pass each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessagePart {
    /// Whether it is of the message that this rank sends.
    pub sends: bool,
    /// Which part of its message.
    pub nth: u64,
}

impl MessagePart {
    /// The order in which a rank sends and receives these numbers of parts at once: in turn, so
    /// that no more parts lie unread between two ranks than there are slots.
    pub fn both(sends: u64, receives: u64) -> impl Iterator<Item = MessagePart> {
        (0..sends.max(receives)).flat_map(move |nth| Self::parts(nth, sends, receives).into_iter().flatten())
    }

    /// The `nth` parts of both messages, where they have so many.
    pub fn parts(nth: u64, sends: u64, receives: u64) -> [Option<MessagePart>; 2] {
        [(true, sends), (false, receives)]
            .map(|(sends, parts)| (nth < parts).then_some(MessagePart { sends, nth }))
    }
}

fn item(op: Op) -> TrackOp {
    TrackOp { track: 0, op }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps_and_shares_make_the_whole() {
        let staging = Staging::new(3, 1000).unwrap().with_room(100).unwrap();
        assert_eq!((staging.slot(), staging.chunk()), (320, 960));
        let of_half = |p| {
            let landings = (0..3).map(move |of| (staging.landing(of, p), 320));
            let outbox = (0..3).map(move |of| (staging.outbox(of, p), 320));
            assert_eq!(staging.offer(p) + staging.wide_offer(), staging.landing(0, p));
            [(staging.offer(p), 960), (staging.result(p), 960)].into_iter().chain(outbox).chain(landings)
        };
        let pairs = (0..3).flat_map(|of| [0, 1].map(|p| (staging.pair(of, p), 320)));
        let all: Vec<(u64, u64)> = of_half(0).chain(of_half(1)).chain(pairs).collect();
        assert!(all.windows(2).all(|at| at[0].0 + at[0].1 == at[1].0), "{all:?}");
        assert_eq!(all.last().unwrap().0 + 320, staging.in_place(0, 30));
        assert_eq!((staging.in_place(3, 30), staging.room()), (staging.in_place(0, 30) + 90, 128));
        assert_eq!(staging.in_place(0, 30) + 128, staging.bytes());
        for len in [0, 4, 64, 200, 704, 960] {
            let shares: Vec<_> = (0..3).map(|rank| staging.share(len, rank)).collect();
            assert_eq!((shares[0].start, shares[2].end), (0, len));
            assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(shares.iter().all(|share| share.end - share.start <= staging.slot()));
        }
        assert!(matches!(Staging::new(3, 383), Err(PlanError::BadParameter { seen: 383, .. })));
        for bytes in [u64::MAX, u64::MAX - 100, u64::MAX - 9600] {
            let error = staging.with_room(bytes).unwrap_err();
            assert!(
                matches!(error, PlanError::BadParameter { parameter: "landing", seen, .. } if seen == bytes)
            );
        }
    }
}
