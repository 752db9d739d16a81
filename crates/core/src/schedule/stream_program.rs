//! Slots on a stream: a dispatch and a combine that a CUDA stream runs alone, and that a graph can
//! hold.
//!
//! Every rank has a fixed slot at every other, rank-major. No rank counts or plans, so every
//! address, every size and every flag value is a constant. Kernels do the arithmetic. The caller
//! runs the experts. The program of a call ([`SlotCall`]) states when the others run:
//!
//! ```text
//!   rank s                                               rank d
//!   pack: rows -> send[d], own rows -> receive[s]
//!   Put      send[d]  ---------------------------------> receive[s]         dispatch: one batch of copies,
//!   Signal   landed[s] = 1  ---------------------------> landed[s]            then one list of memory operations
//!   Wait     landed[p] >= 1, of every p
//!   Signal   own landed[p] = 0
//!   experts: receive[p] -> partial[p]
//!   Put      partial[d]  ------------------------------> returned[s]        combine: the same again
//!   Signal   returned[s] = 1  -------------------------> returned[s]
//!   Wait     returned[p] >= 1, of every p
//!   Signal   own returned[p] = 0
//!   sum: own partial[s], returned[p] -> tokens
//! ```
//!
//! Flags have a credit of one: a word is raised to 1, awaited, and reset by its owner. No other
//! words are needed: dispatch and combine alternate, so each signal grants the next write:
//!
//! ```text
//!   returned of p, heard by s  p's experts have read receive[s]      s may put its next rows there
//!                              p has set its landed[s] back          s may raise it again
//!   landed of p, heard by s    p has summed what lay in returned[s]  s may put its next partials there
//!                              p has set its returned[s] back        s may raise it again
//! ```
//!
//! Between nodes a stream moves nothing: a host thread does, at the stream's request
//! ([`StreamProgram::across`]).
//!
//! A dispatch that no combine follows is ended by a release: the combine without its puts. **A rank
//! that refuses** a dispatch says so in the heads of its slots, which are empty. It answers a
//! dispatch that it refuses, and where it refuses to combine, by a *refusal*: a release that puts
//! the number of the call, its mark, to each peer. Its words are those of a combine, so the others
//! do not wait. Their sums find the mark behind the words that they await. Where it refuses the
//! dispatch, it marks and signals at once, and waits before its next dispatch: to wait at once
//! would break the common order, because calls that peers make before they answer come behind.
//! Several microbatches may be in flight, each with windows and flags of its own. **All ranks
//! enqueue calls in the same order.** Streams may share a hardware queue, where a blocked wait
//! blocks later operations: two ranks that enqueue two dispatches in different orders then wait for
//! each other forever.
//!
//! **Across nodes.** Rows for other nodes leave the stream for a *proxy*, a host thread next to it:
//!
//! ```text
//!   rank s, stream          s, proxy                                      d, proxy            rank d, stream
//!   Signal flag = 1  -----> Wait flag >= 1
//!   (goes on)               Signal flag = 0
//!     GPUDirect             Put     send[d]  --NIC==wire==NIC-->    receive[s]
//!                           Signal  landed[s] = 1  ---------------> landed[s]                 Wait, Signal own landed[s] = 0
//!
//!   Put send[d] -> staging
//!   Signal flag = 1  -----> Wait, Signal flag = 0
//! host-staged               Put     staging  ------- net --------->  staging
//!                           Signal  block[s] = call  ------------>  block[s]   Wait block[s]
//!                                                                              Signal landed[s] = 1   Wait, Signal = 0
//!                                                                                                     Put staging -> receive[s]
//! ```
//!
//! A *request flag* is a word between a stream and its own proxy, a rank's own word: `landed[me]`
//! for a dispatch, `returned[me]` for a combine, `read[me]` for a release, `ready[me]` for a
//! refusal. Like all words of a stream it is a constant, so a graph can set it. Words that cross on
//! the host-staged path are those of nets, which grow: the proxies count.
//!
//! The grants of one node suffice, because a signal still says that its rows have landed, and so
//! that they have been read at their source: `returned[d]`, heard by `s`, says that `s` may pack
//! `send[d]`, and set the request flag, again.
//!
//! **On the stream.** A program goes to a stream as batches of copies and lists of memory
//! operations. A device has no order among the copies of a batch, so a flag is never one of them.
//! The stream completes a batch before it begins the list behind it, which it processes in order.

use super::call_program::{Part, SlotCall};
use super::{
    ControlLayout, Flag, FlagValue, Op, Operand, OperandId, Operands, PutSource, SpanCopy, Stage, TrackOp,
    WindowId,
};
use crate::error::PlanError;
use crate::topology::NodeMap;

/// Geometry of two symmetric windows: slots, and flags.
///
/// ```text
///   slots   | * | receive[source] | send[destination] | returned[peer] | partial[source] | mark[peer] |    R of each
///               |         slot_bytes each             |         return_bytes each          |  16 each   |    * what is kept free
///   flags   | words of Control::flag, a cache line each |
/// ```
///
/// A kernel indexes all of them by rank. So each has a place for the rank itself, though two of
/// them stay empty: own rows are packed straight to `receive[me]`, own partial rows are summed in
/// `partial[me]`. A rank's own mark is what it puts to the others.
///
/// ```
/// use sidelane_core::schedule::stream_program::Slots;
///
/// let slots = Slots::new(8, 128 * 7168 * 2, 128 * 7168 * 2)?;
/// assert_eq!(slots.send(1) - slots.send(0), 128 * 7168 * 2);
/// assert_eq!(slots.bytes(), 4 * 8 * 128 * 7168 * 2 + 256);
/// # Ok::<(), sidelane_core::error::PlanError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    first: u64,
    ranks: u32,
    slot_bytes: u64,
    return_bytes: u64,
}

impl Slots {
    /// Where slots and partial rows lie.
    pub const WINDOW: WindowId = WindowId::POOL;
    /// Where flags lie.
    pub const FLAGS: WindowId = WindowId::CONTROL;
    /// Bytes of a mark: the number of a call, and as many zeros.
    pub const MARK_BYTES: u64 = 16;
    /// Each of the five begins at a multiple of so many bytes, as all device memory does.
    pub const ALIGN: u64 = 256;

    /// For a group of `ranks` ranks: `slot_bytes` for all rows that one rank sends another, with
    /// their metadata, and `return_bytes` for the returned partial rows.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] for no ranks, for sizes that are no multiple of 16 bytes, or
    /// beyond 64 bits together.
    pub fn new(ranks: u32, slot_bytes: u64, return_bytes: u64) -> Result<Self, PlanError> {
        let bad = |parameter, seen, expected| Err(PlanError::BadParameter { parameter, seen, expected });
        if ranks == 0 {
            return bad("ranks", 0, "1 or more");
        }
        for (parameter, bytes) in [("slot bytes", slot_bytes), ("return bytes", return_bytes)] {
            let total =
                bytes.checked_next_multiple_of(Self::ALIGN).and_then(|b| b.checked_mul(4 * u64::from(ranks)));
            if !bytes.is_multiple_of(16) || total.is_none() {
                return bad(parameter, bytes, "a multiple of 16 that memory can hold for all ranks");
            }
        }
        Ok(Slots { first: 0, ranks, slot_bytes, return_bytes })
    }

    /// The same, behind room for the flag words: NICs that write rows to device memory raise flags
    /// there, too.
    pub fn behind_words(self) -> Self {
        Slots { first: self.flag_bytes().next_multiple_of(Self::ALIGN), ..self }
    }

    /// Bytes that are kept free at the start.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Bytes of one slot.
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Bytes of the returned rows of one slot.
    pub fn return_bytes(&self) -> u64 {
        self.return_bytes
    }

    /// Where rows of `source` land.
    pub fn receive(&self, source: u32) -> u64 {
        self.first + u64::from(source) * self.slot_bytes
    }

    /// Where rows for `destination` are packed.
    pub fn send(&self, destination: u32) -> u64 {
        self.all(self.slot_bytes) + self.receive(destination)
    }

    /// Where partial rows of `peer` return.
    pub fn returned(&self, peer: u32) -> u64 {
        self.first + 2 * self.all(self.slot_bytes) + u64::from(peer) * self.return_bytes
    }

    /// Where experts leave partial rows for `source`.
    pub fn partial(&self, source: u32) -> u64 {
        self.all(self.return_bytes) + self.returned(source)
    }

    /// Where `peer` leaves the number of the last call that it refused.
    pub fn mark(&self, peer: u32) -> u64 {
        let marks = self.first + 2 * self.all(self.slot_bytes) + 2 * self.all(self.return_bytes);
        marks + u64::from(peer) * Self::MARK_BYTES
    }

    /// Size of the window of slots.
    pub fn bytes(&self) -> u64 {
        self.mark(0) + self.all(Self::MARK_BYTES)
    }

    /// The flag word of this kind that speaks of a rank, in the window of flags. 8 bytes, of which
    /// a device may use 4.
    pub fn flag(&self, of: u32, flag: Flag) -> u64 {
        ControlLayout::flag(of, flag, self.ranks)
    }

    /// Room for one of each rank.
    fn all(&self, bytes: u64) -> u64 {
        (u64::from(self.ranks) * bytes).next_multiple_of(Self::ALIGN)
    }

    /// Size of the window of flags. They begin as zeros.
    pub fn flag_bytes(&self) -> u64 {
        ControlLayout::flag_bytes(self.ranks)
    }
}

/// A dispatch, combine, release or refusal of one rank, built once and enqueued as often as one
/// likes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamProgram {
    call: SlotCall,
    me: u32,
    stage: Stage,
    proxied: Option<ProxyProgram>,
    slots: Slots,
    table: Vec<Operand>,
    spans: Vec<SpanCopy>,
}

impl SlotCall {
    fn name(self) -> &'static str {
        match self {
            SlotCall::Dispatch => "dispatch",
            SlotCall::Combine => "combine",
            SlotCall::Release => "release",
            SlotCall::Refusal => "refusal",
        }
    }

    /// Which words peers raise, await and set back.
    pub fn flag(self) -> Flag {
        if self == SlotCall::Dispatch { Flag::Landed } else { Flag::Returned }
    }

    /// A rank's put to another: from its window of slots to the other's.
    fn span(self, slots: &Slots, from: u32, to: u32) -> SpanCopy {
        let (from_offset, to_offset, len) = match self {
            SlotCall::Dispatch => (slots.send(to), slots.receive(from), slots.slot_bytes()),
            SlotCall::Combine => (slots.partial(to), slots.returned(from), slots.return_bytes()),
            SlotCall::Release => (slots.partial(to), slots.returned(from), 0),
            SlotCall::Refusal => (slots.mark(from), slots.mark(from), Slots::MARK_BYTES),
        };
        let source = PutSource::Window { owner: from, window: Slots::WINDOW };
        SpanCopy { from: source, from_offset, to: Slots::WINDOW, to_offset, len }
    }
}

impl StreamProgram {
    /// Operations that rank `me` enqueues for a call. A dispatch moves `send[d]` here to
    /// `receive[me]` at `d`, a combine `partial[p]` here to `returned[me]` at `p`, and a refusal
    /// `mark[me]` to the same place at each. All but a dispatch say, too, that all slots have been
    /// read.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] if the group has no rank `me`.
    pub fn new(call: SlotCall, slots: Slots, me: u32) -> Result<Self, PlanError> {
        let (ranks, flag) = (slots.ranks(), call.flag());
        if me >= ranks {
            let (parameter, expected) = ("rank", "one of the group");
            return Err(PlanError::BadParameter { parameter, seen: me.into(), expected });
        }
        // Rotated, so that ranks do not all begin with the same one; waits are in the order in
        // which peers come to this rank.
        let peers = || (1..ranks).map(|step| (me + step) % ranks);
        let comers = || peers().rev();
        let (mut table, mut spans) = (vec![Operand::Empty; ranks as usize], Vec::new());
        let all = peers().map(|peer| (peer, call.span(&slots, me, peer)));
        for (peer, span) in all.filter(|(_, span)| span.len > 0) {
            table[peer as usize] = Operand::Spans { first: spans.len() as u32, count: 1 };
            spans.push(span);
        }
        let puts = peers().map(|peer| Op::Put { to: peer, operand: OperandId(peer) });
        let signals = peers().map(|peer| Op::Signal { to: peer, of: me, flag, level: FlagValue::Credit });
        let waits = comers().map(|peer| Op::Wait { from: peer, flag, level: FlagValue::Credit });
        let resets = comers().map(|peer| Op::Signal { to: me, of: peer, flag, level: FlagValue::Reset });
        let items =
            puts.chain(signals).chain(waits).chain(resets).map(|op| TrackOp { track: 0, op }).collect();
        let stage = Stage { name: call.name(), items };
        Ok(StreamProgram { call, me, stage, proxied: None, slots, table, spans })
    }

    /// The operations: puts, then signals, waits, and words set back. One stream is one track.
    pub fn stage(&self) -> &Stage {
        &self.stage
    }

    /// The host's part of it, with several nodes.
    pub fn proxied(&self) -> Option<&ProxyProgram> {
        self.proxied.as_ref()
    }

    /// Bytes that the stages' operations move: the same in every call.
    pub fn operands(&self) -> Operands<'_> {
        Operands { table: &self.table, spans: &self.spans, ..Operands::default() }
    }

    /// Where slots and flags lie.
    pub fn slots(&self) -> &Slots {
        &self.slots
    }
}

/// How rows cross between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowPath {
    /// From memory of a device to memory of a device, and so do the words behind them.
    GpuDirect,
    /// Through host staging at both.
    HostStaged,
}

/// The proxy's part of one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyProgram {
    /// The stream's request flag: among the words that speak of the rank itself.
    pub request: Flag,
    /// Waits for the request flag, and resets it.
    pub heard: Stage,
    /// Then: puts and signals, a track for each peer.
    pub out: Stage,
    /// Concurrent with all that, on the host-staged path: signals the stream which rows have come,
    /// a track for each peer.
    pub back: Stage,
}

/// The word by which a net says that its rows have landed in host staging.
const BLOCK: Flag = Flag::Block;

impl StreamProgram {
    /// The same in a group of several nodes: the proxy moves the rows for other nodes. Unchanged if
    /// there is one node.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] if there are nodes for another number of ranks.
    pub fn across(mut self, nodes: &NodeMap, way: RowPath) -> Result<Self, PlanError> {
        let (me, ranks, flag) = (self.me, self.slots.ranks(), self.call.flag());
        if nodes.ranks() != ranks {
            let (parameter, expected) = ("ranks of the nodes", "the size of the group");
            return Err(PlanError::BadParameter { parameter, seen: nodes.ranks().into(), expected });
        }
        let far = |peer: u32| !nodes.same_node(me, peer);
        let peers: Vec<u32> = (1..ranks).map(|step| (me + step) % ranks).filter(|&peer| far(peer)).collect();
        if peers.is_empty() {
            return Ok(self);
        }
        let staged = way == RowPath::HostStaged;
        let (mut leave, mut enter) = (Vec::new(), Vec::new());
        if staged {
            self.table.resize(3 * ranks as usize, Operand::Empty);
            for &peer in &peers {
                self.stage_rows(peer);
            }
            leave.extend(peers.iter().map(|peer| Op::Put { to: me, operand: OperandId(ranks + peer) }));
            enter.extend(
                peers.iter().rev().map(|peer| Op::Put { to: me, operand: OperandId(2 * ranks + peer) }),
            );
        }
        let request = match self.call {
            SlotCall::Dispatch => Flag::Landed,
            SlotCall::Combine => Flag::Returned,
            SlotCall::Release => Flag::Read,
            SlotCall::Refusal => Flag::Ready,
        };
        let word = |to, of, flag, level| Op::Signal { to, of, flag, level };
        let requests = word(me, me, request, FlagValue::Credit);
        // The longest transfers begin first.
        let stays = |op: &Op| !matches!(*op, Op::Put { to, .. } | Op::Signal { to, .. } if far(to));
        let near = self.stage.items.iter().map(|item| item.op).filter(stays);
        let ops = leave.into_iter().chain([requests]).chain(near).chain(enter);
        self.stage.items = ops.map(|op| TrackOp { track: 0, op }).collect();

        let stage = |name, items| Stage { name, items };
        let hears = [
            Op::Wait { from: me, flag: request, level: FlagValue::Credit },
            word(me, me, request, FlagValue::Reset),
        ];
        let of_peer = |peer, ops: [Op; 2]| ops.map(|op| TrackOp { track: peer, op });
        let out = peers.iter().flat_map(|&peer| {
            let (raised, level) = if staged { (BLOCK, FlagValue::Call) } else { (flag, FlagValue::Credit) };
            of_peer(peer, [Op::Put { to: peer, operand: OperandId(peer) }, word(peer, me, raised, level)])
        });
        let back = peers.iter().rev().filter(|_| staged).flat_map(|&peer| {
            let came = Op::Wait { from: peer, flag: BLOCK, level: FlagValue::Call };
            of_peer(peer, [came, word(me, peer, flag, FlagValue::Credit)])
        });
        self.proxied = Some(ProxyProgram {
            request,
            heard: stage("request", hears.map(|op| TrackOp { track: 0, op }).to_vec()),
            out: stage("out", out.collect()),
            back: stage("back", back.collect()),
        });
        Ok(self)
    }

    /// Rows to and from a peer go through host staging; behind the rows of a combine, the mark that
    /// the peer leaves there if it refuses. What a peer sends to a rank that refuses stays there.
    fn stage_rows(&mut self, peer: u32) {
        let (me, ranks) = (self.me, self.slots.ranks());
        let Operand::Spans { first, count: 1 } = self.table[peer as usize] else { return };
        let crosses = &mut self.spans[first as usize];
        let SpanCopy { from, from_offset, len, .. } = *crosses;
        let staging = PutSource::Window { owner: me, window: WindowId::HOST_STAGING };
        *crosses = SpanCopy { from: staging, to: WindowId::HOST_STAGING, ..*crosses };
        let leaves = SpanCopy { from, from_offset, to: WindowId::HOST_STAGING, to_offset: from_offset, len };
        let enters = |call: SlotCall| {
            let SpanCopy { to_offset: at, len, .. } = call.span(&self.slots, peer, me);
            SpanCopy { from: staging, from_offset: at, to: Slots::WINDOW, to_offset: at, len }
        };
        let entering = match self.call {
            SlotCall::Refusal => Vec::new(),
            SlotCall::Combine => vec![enters(SlotCall::Combine), enters(SlotCall::Refusal)],
            call => vec![enters(call)],
        };
        // A mark leaves once for all peers.
        let leaving = if self.spans.contains(&leaves) { Vec::new() } else { vec![leaves] };
        for (slot, spans) in [(ranks + peer, leaving), (2 * ranks + peer, entering)] {
            let (first, count) = (self.spans.len() as u32, spans.len() as u32);
            self.table[slot as usize] =
                if count == 0 { Operand::Empty } else { Operand::Spans { first, count } };
            self.spans.extend(spans);
        }
    }
}

/// Operations that a stream takes at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Copies, which may run in any order.
    Copies(Vec<PeerCopy>),
    /// Memory operations, which run in this order.
    Words(Vec<WordOp>),
}

/// One copy of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCopy {
    /// The rank of the target: a peer, or this rank if its host staging is one of the two.
    pub to: u32,
    /// Source and target, in windows of slots ([`Slots::WINDOW`]) and in this rank's host staging.
    pub span: SpanCopy,
}

/// One memory operation, on a word in a window of flags ([`Slots::FLAGS`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordOp {
    /// Writes a word, behind everything that the stream did before.
    Write {
        /// The rank of the flag: a peer, or this rank.
        at: u32,
        /// The rank that the word speaks of.
        of: u32,
        /// First byte.
        offset: u64,
        /// The value.
        value: u64,
    },
    /// Waits until a word of this rank is at least so much.
    Wait {
        /// The rank that the word speaks of.
        of: u32,
        /// First byte.
        offset: u64,
        /// The value.
        value: u64,
    },
}

impl StreamProgram {
    /// One half of the stage, or both. Adjacent operations of one kind are together; a put of zero
    /// bytes is no copy.
    pub fn pieces(&self, part: Part) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for TrackOp { op, .. } in self.stage().part(part) {
            match (self.copies(op), self.word(op)) {
                (copies, _) if !copies.is_empty() => match pieces.last_mut() {
                    Some(Piece::Copies(list)) => list.extend(copies),
                    _ => pieces.push(Piece::Copies(copies)),
                },
                (_, Some(word)) => match pieces.last_mut() {
                    Some(Piece::Words(list)) => list.push(word),
                    _ => pieces.push(Piece::Words(vec![word])),
                },
                _ => {}
            }
        }
        pieces
    }

    /// Copies of one operation.
    pub fn copies(&self, op: &Op) -> Vec<PeerCopy> {
        let Op::Put { to, operand } = *op else { return Vec::new() };
        let operands = self.operands();
        let (first, count) = match operands.table[operand.0 as usize] {
            Operand::Spans { first, count } => (first as usize, count as usize),
            _ => (0, 0),
        };
        operands.spans[first..][..count].iter().map(|&span| PeerCopy { to, span }).collect()
    }

    fn word(&self, op: &Op) -> Option<WordOp> {
        let (slots, operands): (&Slots, _) = (self.slots(), self.operands());
        match *op {
            Op::Signal { to, of, flag, level } => {
                let (offset, value) = (slots.flag(of, flag), operands.value(level));
                Some(WordOp::Write { at: to, of, offset, value })
            }
            Op::Wait { from, flag, level } => {
                let (offset, value) = (slots.flag(from, flag), operands.value(level));
                Some(WordOp::Wait { of: from, offset, value })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    mod slots {
        use super::*;

        #[test]
        fn nothing_overlaps() {
            for (ranks, slot, returned) in [(1, 16, 16), (3, 272, 512), (8, 4096, 16), (64, 0, 0)] {
                let slots = Slots::new(ranks, slot, returned).unwrap();
                let slots = if ranks % 2 == 0 { slots.behind_words() } else { slots };
                assert!(slots.first() == 0 || slots.first() >= slots.flag_bytes());
                let all =
                    |at: fn(&Slots, u32) -> u64, len| (0..ranks).map(move |rank| (at(&slots, rank), len));
                let mut pieces: Vec<(u64, u64)> =
                    all(Slots::receive, slot).chain(all(Slots::send, slot)).collect();
                pieces.extend(all(Slots::returned, returned).chain(all(Slots::partial, returned)));
                pieces.push((slots.bytes(), 0));
                for next in pieces.windows(2) {
                    assert!(next[0].0 + next[0].1 <= next[1].0, "{next:?}");
                }
                let begin =
                    [Slots::receive, Slots::send, Slots::returned, Slots::partial].map(|at| at(&slots, 0));
                assert!(begin.iter().all(|at| at.is_multiple_of(Slots::ALIGN)), "{begin:?}");
                assert_eq!(slots.flag_bytes(), Flag::COUNT as u64 * 64 * u64::from(ranks));
                assert!(slots.flag(ranks - 1, Flag::Returned) < slots.flag_bytes());
            }
        }

        #[test]
        fn sizes_that_cannot_be_are_refused() {
            assert!(matches!(Slots::new(0, 16, 16), Err(PlanError::BadParameter { parameter: "ranks", .. })));
            assert!(matches!(
                Slots::new(2, 24, 16),
                Err(PlanError::BadParameter { parameter: "slot bytes", .. })
            ));
            assert!(matches!(
                Slots::new(2, 16, 8),
                Err(PlanError::BadParameter { parameter: "return bytes", .. })
            ));
            assert!(Slots::new(64, u64::MAX - 15, 16).is_err() && Slots::new(64, 1 << 56, 16).is_err());
        }
    }

    mod program {
        use super::*;

        fn program(call: SlotCall, ranks: u32, me: u32) -> StreamProgram {
            StreamProgram::new(call, Slots::new(ranks, 512, 256).unwrap(), me).unwrap()
        }

        #[test]
        fn peers_are_visited_rotated_and_awaited_words_are_reset() {
            let program = program(SlotCall::Dispatch, 4, 1);
            let ops: Vec<Op> = program.stage.items.iter().map(|item| item.op).collect();
            let (flag, level) = (Flag::Landed, FlagValue::Credit);
            let expected = [2, 3, 0].map(|to| Op::Put { to, operand: OperandId(to) });
            assert_eq!(ops[..3], expected);
            assert_eq!(ops[3..6], [2, 3, 0].map(|to| Op::Signal { to, of: 1, flag, level }));
            assert_eq!(ops[6..9], [0, 3, 2].map(|from| Op::Wait { from, flag, level }));
            assert_eq!(ops[9..], [0, 3, 2].map(|of| Op::Signal { to: 1, of, flag, level: FlagValue::Reset }));
            assert_eq!((program.stage.start().len(), program.stage.finish().len()), (6, 6));
        }

        #[test]
        fn flags_are_constants() {
            let program = program(SlotCall::Combine, 3, 0);
            let operands = program.operands();
            assert_eq!((operands.value(FlagValue::Credit), operands.value(FlagValue::Reset)), (1, 0));
            assert!(
                operands.tag(1, Flag::Returned, FlagValue::Credit).is_none(),
                "a stream writes words alone"
            );
        }

        #[test]
        fn a_release_signals_like_a_combine_and_moves_nothing() {
            let [combine, release] = [SlotCall::Combine, SlotCall::Release].map(|call| program(call, 3, 2));
            assert_eq!(combine.stage.items, release.stage.items);
            assert!(release.operands().table.iter().all(|operand| *operand == Operand::Empty));
            assert_eq!(combine.operands().spans.len(), 2);
        }

        #[test]
        fn a_refusal_signals_like_a_combine_and_moves_a_mark() {
            let [combine, refusal] = [SlotCall::Combine, SlotCall::Refusal].map(|call| program(call, 3, 2));
            assert_eq!(combine.stage.items, refusal.stage.items);
            let slots = refusal.slots;
            let marks = refusal.spans.iter().map(|span| (span.from_offset, span.to_offset, span.len));
            assert_eq!(marks.collect::<Vec<_>>(), [(slots.mark(2), slots.mark(2), 16); 2]);
        }

        #[test]
        fn a_rank_alone_has_nothing_to_do_and_one_outside_is_refused() {
            assert!(program(SlotCall::Dispatch, 1, 0).stage.items.is_empty());
            let outside = StreamProgram::new(SlotCall::Combine, Slots::new(2, 512, 256).unwrap(), 2);
            assert!(matches!(outside, Err(PlanError::BadParameter { seen: 2, .. })));
        }
    }

    mod across {
        use super::*;

        /// A program of rank 1 of 2 + 1.
        fn program(way: RowPath, call: SlotCall) -> StreamProgram {
            let nodes = NodeMap::from_labels(&[0, 0, 1]);
            StreamProgram::new(call, Slots::new(3, 512, 256).unwrap(), 1)
                .unwrap()
                .across(&nodes, way)
                .unwrap()
        }

        fn ops(stage: &Stage) -> Vec<(u32, Op)> {
            stage.items.iter().map(|item| (item.track, item.op)).collect()
        }

        fn raise(to: u32, of: u32, flag: Flag) -> Op {
            Op::Signal { to, of, flag, level: FlagValue::Credit }
        }

        #[test]
        fn request_is_set_before_copies_and_every_word_is_awaited() {
            let program = program(RowPath::GpuDirect, SlotCall::Dispatch);
            let flag = Flag::Landed;
            let wait = |from| Op::Wait { from, flag, level: FlagValue::Credit };
            let back = |of| Op::Signal { to: 1, of, flag, level: FlagValue::Reset };
            let put = |to| Op::Put { to, operand: OperandId(to) };
            let stream = [raise(1, 1, flag), put(0), raise(0, 1, flag), wait(0), wait(2), back(0), back(2)];
            assert_eq!(ops(program.stage()), stream.map(|op| (0, op)));
            let proxied = program.proxied().unwrap();
            assert_eq!(ops(&proxied.heard), [wait(1), back(1)].map(|op| (0, op)));
            assert_eq!(ops(&proxied.out), [put(2), raise(2, 1, flag)].map(|op| (2, op)));
            assert!(proxied.back.items.is_empty());
        }

        #[test]
        fn host_staged_rows_wait_in_staging_and_crossing_words_grow() {
            let program = program(RowPath::HostStaged, SlotCall::Combine);
            let stream = ops(program.stage());
            assert_eq!(
                stream[..2],
                [Op::Put { to: 1, operand: OperandId(5) }, raise(1, 1, Flag::Returned)].map(|op| (0, op))
            );
            assert_eq!(stream.last(), Some(&(0, Op::Put { to: 1, operand: OperandId(8) })));
            let proxied = program.proxied().unwrap();
            let grows = Op::Signal { to: 2, of: 1, flag: Flag::Block, level: FlagValue::Call };
            assert_eq!(
                ops(&proxied.out),
                [Op::Put { to: 2, operand: OperandId(2) }, grows].map(|op| (2, op))
            );
            let came = Op::Wait { from: 2, flag: Flag::Block, level: FlagValue::Call };
            assert_eq!(ops(&proxied.back), [came, raise(1, 2, Flag::Returned)].map(|op| (2, op)));
            let (operands, slots) = (program.operands(), program.slots());
            let spans = |slot: usize| match operands.table[slot] {
                Operand::Spans { first, count } => &operands.spans[first as usize..][..count as usize],
                other => panic!("{other:?}"),
            };
            let window = |window| PutSource::Window { owner: 1, window };
            let (pool, staging) = (WindowId::POOL, WindowId::HOST_STAGING);
            let copy = |from, from_offset, to, to_offset| SpanCopy {
                from: window(from),
                from_offset,
                to,
                to_offset,
                len: 256,
            };
            assert_eq!(spans(5), [copy(pool, slots.partial(2), staging, slots.partial(2))]);
            assert_eq!(spans(2), [copy(staging, slots.partial(2), staging, slots.returned(1))]);
            let mark = SpanCopy { len: 16, ..copy(staging, slots.mark(2), pool, slots.mark(2)) };
            assert_eq!(spans(8), [copy(staging, slots.returned(2), pool, slots.returned(2)), mark]);
        }

        #[test]
        fn refusal_crosses_as_a_mark_with_a_request_of_its_own() {
            for way in [RowPath::GpuDirect, RowPath::HostStaged] {
                let refusal = program(way, SlotCall::Refusal);
                assert_eq!(refusal.proxied().unwrap().request, Flag::Ready);
                // To one peer of the node, and to one of another or to and from staging.
                assert_eq!(refusal.spans.len(), if way == RowPath::HostStaged { 3 } else { 2 });
                assert!(refusal.spans.iter().all(|span| span.len == Slots::MARK_BYTES));
            }
        }

        #[test]
        fn release_crosses_as_a_signal_with_a_request_of_its_own() {
            for way in [RowPath::GpuDirect, RowPath::HostStaged] {
                let [combine, release] =
                    [SlotCall::Combine, SlotCall::Release].map(|call| program(way, call));
                assert_eq!(combine.proxied().unwrap().out, release.proxied().unwrap().out);
                assert_eq!(
                    release.proxied().unwrap().heard.items[0].op,
                    Op::Wait { from: 1, flag: Flag::Read, level: FlagValue::Credit }
                );
                assert!(release.operands().table.iter().all(|operand| *operand == Operand::Empty));
            }
        }

        #[test]
        fn one_node_changes_nothing_and_nodes_of_others_are_refused() {
            let slots = Slots::new(3, 512, 256).unwrap();
            let program = StreamProgram::new(SlotCall::Dispatch, slots, 0).unwrap();
            let alone =
                program.clone().across(&NodeMap::from_labels(&[7, 7, 7]), RowPath::HostStaged).unwrap();
            assert_eq!(alone, program);
            let others = program.across(&NodeMap::from_labels(&[0, 1]), RowPath::GpuDirect);
            assert!(matches!(others, Err(PlanError::BadParameter { seen: 2, .. })));
        }
    }

    mod enqueue {
        use super::*;
        use crate::schedule::call_program::SlotCall;
        use crate::schedule::stream_program::RowPath;
        use crate::schedule::{Flag, PutSource};
        use crate::topology::NodeMap;

        #[test]
        fn a_combine_is_one_batch_and_one_list() {
            let slots = Slots::new(3, 512, 256).unwrap();
            let program = StreamProgram::new(SlotCall::Combine, slots, 1).unwrap();
            let copy = |to| {
                let from = PutSource::Window { owner: 1, window: Slots::WINDOW };
                let (from_offset, to_offset) = (slots.partial(to), slots.returned(1));
                PeerCopy { to, span: SpanCopy { from, from_offset, to: Slots::WINDOW, to_offset, len: 256 } }
            };
            let [home0, home1, home2] = [0, 1, 2].map(|of| slots.flag(of, Flag::Returned));
            let signals = vec![
                WordOp::Write { at: 2, of: 1, offset: home1, value: 1 },
                WordOp::Write { at: 0, of: 1, offset: home1, value: 1 },
            ];
            assert_eq!(
                program.pieces(Part::Start),
                [Piece::Copies(vec![copy(2), copy(0)]), Piece::Words(signals)]
            );
            let rest = vec![
                WordOp::Wait { of: 0, offset: home0, value: 1 },
                WordOp::Wait { of: 2, offset: home2, value: 1 },
                WordOp::Write { at: 1, of: 0, offset: home0, value: 0 },
                WordOp::Write { at: 1, of: 2, offset: home2, value: 0 },
            ];
            assert_eq!(program.pieces(Part::Finish), [Piece::Words(rest)]);
        }

        /// Copies and words of all pieces, and how many pieces there are.
        fn counts(program: &StreamProgram) -> (usize, usize, usize) {
            let all = [program.pieces(Part::Start), program.pieces(Part::Finish)].concat();
            let count = |(copies, words), piece: &Piece| match piece {
                Piece::Copies(list) => (copies + list.len(), words),
                Piece::Words(list) => (copies, words + list.len()),
            };
            let (copies, words) = all.iter().fold((0, 0), count);
            (copies, words, all.len())
        }

        #[test]
        fn a_release_is_lists_alone() {
            let program = StreamProgram::new(SlotCall::Release, Slots::new(4, 512, 256).unwrap(), 0).unwrap();
            assert_eq!(counts(&program), (0, 9, 2));
        }

        #[test]
        fn slots_of_no_bytes_are_not_copied_and_still_signalled() {
            let program = StreamProgram::new(SlotCall::Dispatch, Slots::new(4, 0, 256).unwrap(), 0).unwrap();
            assert_eq!(counts(&program), (0, 9, 2));
        }

        #[test]
        fn host_staged_request_lies_between_two_batches_of_copies() {
            let nodes = NodeMap::from_labels(&[0, 0, 1, 1]);
            let program =
                StreamProgram::new(SlotCall::Dispatch, Slots::new(4, 512, 256).unwrap(), 0).unwrap();
            let program = program.across(&nodes, RowPath::HostStaged).unwrap();
            let size = |pieces: Vec<Piece>| -> Vec<(usize, usize)> {
                let of = |piece: &Piece| match piece {
                    Piece::Copies(list) => (list.len(), 0),
                    Piece::Words(list) => (0, list.len()),
                };
                pieces.iter().map(of).collect()
            };
            assert_eq!(size(program.pieces(Part::Start)), [(2, 0), (0, 1), (1, 0), (0, 1)]);
            assert_eq!(size(program.pieces(Part::Finish)), [(0, 6), (2, 0)]);
        }
    }
}
