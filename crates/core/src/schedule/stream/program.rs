//! Operations that one rank enqueues: a stage, and operands that never change.

use super::{ProxyProgram, Slots};
use crate::error::PlanError;
use crate::schedule::call::SlotCall;
use crate::schedule::{
    Flag, FlagValue, Op, Operand, OperandId, Operands, PutSource, SpanCopy, Stage, TrackOp,
};

/// A dispatch, combine or release of one rank, built once and enqueued as often as one likes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamProgram {
    pub(super) call: SlotCall,
    pub(super) me: u32,
    pub(super) stage: Stage,
    pub(super) proxied: Option<ProxyProgram>,
    pub(super) slots: Slots,
    pub(super) table: Vec<Operand>,
    pub(super) spans: Vec<SpanCopy>,
}

impl SlotCall {
    fn name(self) -> &'static str {
        match self {
            SlotCall::Dispatch => "dispatch",
            SlotCall::Combine => "combine",
            SlotCall::Release => "release",
        }
    }

    /// Which words peers raise, await and set back.
    pub fn flag(self) -> Flag {
        if self == SlotCall::Dispatch { Flag::Landed } else { Flag::Returned }
    }

    /// A rank's put to another: from its window of slots to the other's.
    pub(super) fn span(self, slots: &Slots, from: u32, to: u32) -> SpanCopy {
        let (from_offset, to_offset, len) = match self {
            SlotCall::Dispatch => (slots.send(to), slots.receive(from), slots.slot_bytes()),
            SlotCall::Combine => (slots.partial(to), slots.home(from), slots.home_bytes()),
            SlotCall::Release => (slots.partial(to), slots.home(from), 0),
        };
        let source = PutSource::Window { owner: from, window: Slots::WINDOW };
        SpanCopy { from: source, from_offset, to: Slots::WINDOW, to_offset, len }
    }
}

impl StreamProgram {
    /// Operations that rank `me` enqueues for a call. A dispatch moves `send[d]` here to
    /// `receive[me]` at `d`, and a combine `partial[p]` here to `home[me]` at `p`. A combine and a
    /// release say, too, that all slots have been read.
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
        let puts = peers().map(|peer| Op::Put { to: peer, slot: OperandId(peer) });
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

#[cfg(test)]
mod tests {
    use super::*;

    fn program(call: SlotCall, ranks: u32, me: u32) -> StreamProgram {
        StreamProgram::new(call, Slots::new(ranks, 512, 256).unwrap(), me).unwrap()
    }

    #[test]
    fn peers_come_rotated_and_every_word_that_is_awaited_is_set_back() {
        let program = program(SlotCall::Dispatch, 4, 1);
        let ops: Vec<Op> = program.stage.items.iter().map(|item| item.op).collect();
        let (flag, level) = (Flag::Landed, FlagValue::Credit);
        let expected = [2, 3, 0].map(|to| Op::Put { to, slot: OperandId(to) });
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
        assert!(operands.tag(1, Flag::Returned, FlagValue::Credit).is_none(), "a stream writes words alone");
    }

    #[test]
    fn a_release_signals_like_a_combine_and_moves_nothing() {
        let [combine, release] = [SlotCall::Combine, SlotCall::Release].map(|call| program(call, 3, 2));
        assert_eq!(combine.stage.items, release.stage.items);
        assert!(release.operands().table.iter().all(|operand| *operand == Operand::Empty));
        assert_eq!(combine.operands().spans.len(), 2);
    }

    #[test]
    fn a_rank_alone_has_nothing_to_do_and_one_outside_is_refused() {
        assert!(program(SlotCall::Dispatch, 1, 0).stage.items.is_empty());
        let outside = StreamProgram::new(SlotCall::Combine, Slots::new(2, 512, 256).unwrap(), 2);
        assert!(matches!(outside, Err(PlanError::BadParameter { seen: 2, .. })));
    }
}
