//! Slots across nodes: rows for other nodes leave the stream for a *proxy*, a host thread next to
//! it.
//!
//! ```text
//!   rank s, stream          s, proxy                                      d, proxy            rank d, stream
//!   Signal bell = 1  -----> Wait bell >= 1
//!   (goes on)               Signal bell = 0
//!     straight              Put     send[d]  --NIC==wire==NIC-->    receive[s]
//!                           Signal  landed[s] = 1  ---------------> landed[s]                 Wait, Signal own landed[s] = 0
//!
//!   Put send[d] -> twin
//!   Signal bell = 1  -----> Wait, Signal bell = 0
//!     detour                Put     twin  ---------rail---------->  twin
//!                           Signal  block[s] = call  ------------>  block[s]   Wait block[s]
//!                                                                              Signal landed[s] = 1   Wait, Signal = 0
//!                                                                                                     Put twin -> receive[s]
//! ```
//!
//! A *request flag* is a word between a stream and its own proxy, a rank's own word: `landed[me]`
//! for a dispatch, `home[me]` for a combine, `read[me]` for a release. Like all words of a stream
//! it is a constant, so a graph can set it. Words that cross on the host-staged path are those of
//! nets, which grow: the proxies count.
//!
//! The grants of one node suffice, because a signal still says that its rows have landed, and so
//! that they have been read at their source: `home[d]`, heard by `s`, says that `s` may pack
//! `send[d]`, and set the request flag, again.

use super::{Slots, StreamProgram};
use crate::error::PlanError;
use crate::schedule::call::SlotCall;
use crate::schedule::{
    Flag, FlagValue, Op, Operand, OperandId, PutSource, SpanCopy, Stage, TrackOp, WindowId,
};
use crate::topology::NodeMap;

/// How rows cross between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowPath {
    /// From memory of a device to memory of a device, and so do the words behind them.
    GpuDirect,
    /// By the host's twins of both.
    HostStaged,
}

/// The proxy's part of one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyProgram {
    /// The stream's request flag: among the words that speak of the rank itself.
    pub rings: Flag,
    /// Hears it, and takes it back.
    pub bell: Stage,
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
        let detour = way == RowPath::HostStaged;
        let (mut leave, mut enter) = (Vec::new(), Vec::new());
        if detour {
            self.table.resize(3 * ranks as usize, Operand::Empty);
            for &peer in &peers {
                self.turn_aside(peer);
            }
            leave.extend(peers.iter().map(|peer| Op::Put { to: me, slot: OperandId(ranks + peer) }));
            enter
                .extend(peers.iter().rev().map(|peer| Op::Put { to: me, slot: OperandId(2 * ranks + peer) }));
        }
        let bell = match self.call {
            SlotCall::Dispatch => Flag::Landed,
            SlotCall::Combine => Flag::Returned,
            SlotCall::Release => Flag::Read,
        };
        let word = |to, of, flag, level| Op::Signal { to, of, flag, level };
        let rings = word(me, me, bell, FlagValue::Credit);
        // What takes longest begins first.
        let stays = |op: &Op| !matches!(*op, Op::Put { to, .. } | Op::Signal { to, .. } if far(to));
        let near = self.stage.items.iter().map(|item| item.op).filter(stays);
        let ops = leave.into_iter().chain([rings]).chain(near).chain(enter);
        self.stage.items = ops.map(|op| TrackOp { track: 0, op }).collect();

        let stage = |name, items| Stage { name, items };
        let hears = [
            Op::Wait { from: me, flag: bell, level: FlagValue::Credit },
            word(me, me, bell, FlagValue::Reset),
        ];
        let of_peer = |peer, ops: [Op; 2]| ops.map(|op| TrackOp { track: peer, op });
        let out = peers.iter().flat_map(|&peer| {
            let (raised, level) = if detour { (BLOCK, FlagValue::Call) } else { (flag, FlagValue::Credit) };
            of_peer(peer, [Op::Put { to: peer, slot: OperandId(peer) }, word(peer, me, raised, level)])
        });
        let back = peers.iter().rev().filter(|_| detour).flat_map(|&peer| {
            let came = Op::Wait { from: peer, flag: BLOCK, level: FlagValue::Call };
            of_peer(peer, [came, word(me, peer, flag, FlagValue::Credit)])
        });
        self.proxied = Some(ProxyProgram {
            rings: bell,
            bell: stage("bell", hears.map(|op| TrackOp { track: 0, op }).to_vec()),
            out: stage("out", out.collect()),
            back: stage("back", back.collect()),
        });
        Ok(self)
    }

    /// Rows to and from a peer go through host staging.
    fn turn_aside(&mut self, peer: u32) {
        let (me, ranks) = (self.me, self.slots.ranks());
        let Operand::Spans { first, count: 1 } = self.table[peer as usize] else { return };
        let crosses = &mut self.spans[first as usize];
        let SpanCopy { from, from_offset, len, .. } = *crosses;
        let twin = PutSource::Window { owner: me, window: WindowId::HOST_STAGING };
        *crosses = SpanCopy { from: twin, to: WindowId::HOST_STAGING, ..*crosses };
        let leaves = SpanCopy { from, from_offset, to: WindowId::HOST_STAGING, to_offset: from_offset, len };
        let lands = self.call.span(&self.slots, peer, me).to_offset;
        let enters = SpanCopy { from: twin, from_offset: lands, to: Slots::WINDOW, to_offset: lands, len };
        for (slot, span) in [(ranks + peer, leaves), (2 * ranks + peer, enters)] {
            self.table[slot as usize] = Operand::Spans { first: self.spans.len() as u32, count: 1 };
            self.spans.push(span);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program of rank 1 of 2 + 1.
    fn program(way: RowPath, call: SlotCall) -> StreamProgram {
        let nodes = NodeMap::from_labels(&[0, 0, 1]);
        StreamProgram::new(call, Slots::new(3, 512, 256).unwrap(), 1).unwrap().across(&nodes, way).unwrap()
    }

    fn ops(stage: &Stage) -> Vec<(u32, Op)> {
        stage.items.iter().map(|item| (item.track, item.op)).collect()
    }

    fn raise(to: u32, of: u32, flag: Flag) -> Op {
        Op::Signal { to, of, flag, level: FlagValue::Credit }
    }

    #[test]
    fn a_bell_is_rung_before_anything_moves_within_the_node_and_all_words_are_awaited() {
        let program = program(RowPath::GpuDirect, SlotCall::Dispatch);
        let flag = Flag::Landed;
        let wait = |from| Op::Wait { from, flag, level: FlagValue::Credit };
        let back = |of| Op::Signal { to: 1, of, flag, level: FlagValue::Reset };
        let put = |to| Op::Put { to, slot: OperandId(to) };
        let stream = [raise(1, 1, flag), put(0), raise(0, 1, flag), wait(0), wait(2), back(0), back(2)];
        assert_eq!(ops(program.stage()), stream.map(|op| (0, op)));
        let proxied = program.proxied().unwrap();
        assert_eq!(ops(&proxied.bell), [wait(1), back(1)].map(|op| (0, op)));
        assert_eq!(ops(&proxied.out), [put(2), raise(2, 1, flag)].map(|op| (2, op)));
        assert!(proxied.back.items.is_empty());
    }

    #[test]
    fn on_the_detour_rows_wait_in_twins_and_words_that_cross_grow() {
        let program = program(RowPath::HostStaged, SlotCall::Combine);
        let stream = ops(program.stage());
        assert_eq!(
            stream[..2],
            [Op::Put { to: 1, slot: OperandId(5) }, raise(1, 1, Flag::Returned)].map(|op| (0, op))
        );
        assert_eq!(stream.last(), Some(&(0, Op::Put { to: 1, slot: OperandId(8) })));
        let proxied = program.proxied().unwrap();
        let grows = Op::Signal { to: 2, of: 1, flag: Flag::Block, level: FlagValue::Call };
        assert_eq!(ops(&proxied.out), [Op::Put { to: 2, slot: OperandId(2) }, grows].map(|op| (2, op)));
        let came = Op::Wait { from: 2, flag: Flag::Block, level: FlagValue::Call };
        assert_eq!(ops(&proxied.back), [came, raise(1, 2, Flag::Returned)].map(|op| (2, op)));
        let (operands, slots) = (program.operands(), program.slots());
        let span = |slot: usize| match operands.table[slot] {
            Operand::Spans { first, count: 1 } => operands.spans[first as usize],
            other => panic!("{other:?}"),
        };
        let window = |window| PutSource::Window { owner: 1, window };
        let (pool, twin) = (WindowId::POOL, WindowId::HOST_STAGING);
        let copy = |from, from_offset, to, to_offset| SpanCopy {
            from: window(from),
            from_offset,
            to,
            to_offset,
            len: 256,
        };
        assert_eq!(span(5), copy(pool, slots.partial(2), twin, slots.partial(2)));
        assert_eq!(span(2), copy(twin, slots.partial(2), twin, slots.home(1)));
        assert_eq!(span(8), copy(twin, slots.home(2), pool, slots.home(2)));
    }

    #[test]
    fn a_release_crosses_as_a_signal_with_a_bell_of_its_own() {
        for way in [RowPath::GpuDirect, RowPath::HostStaged] {
            let [combine, release] = [SlotCall::Combine, SlotCall::Release].map(|call| program(way, call));
            assert_eq!(combine.proxied().unwrap().out, release.proxied().unwrap().out);
            assert_eq!(
                release.proxied().unwrap().bell.items[0].op,
                Op::Wait { from: 1, flag: Flag::Read, level: FlagValue::Credit }
            );
            assert!(release.operands().table.iter().all(|operand| *operand == Operand::Empty));
        }
    }

    #[test]
    fn one_node_changes_nothing_and_nodes_of_others_are_refused() {
        let slots = Slots::new(3, 512, 256).unwrap();
        let program = StreamProgram::new(SlotCall::Dispatch, slots, 0).unwrap();
        let alone = program.clone().across(&NodeMap::from_labels(&[7, 7, 7]), RowPath::HostStaged).unwrap();
        assert_eq!(alone, program);
        let others = program.across(&NodeMap::from_labels(&[0, 1]), RowPath::GpuDirect);
        assert!(matches!(others, Err(PlanError::BadParameter { seen: 2, .. })));
    }
}
