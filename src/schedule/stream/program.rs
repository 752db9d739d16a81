//! What one rank enqueues: a stage, and operands that never change.

use super::{Proxied, Slots};
use crate::error::PlanError;
use crate::schedule::{Flag, Item, Level, Op, Operand, Operands, Place, Slot, SpanCopy, Stage};

/// A dispatch, combine or release of one rank, built once and enqueued as often as one likes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamProgram {
    pub(super) kind: Kind,
    pub(super) me: u32,
    pub(super) stage: Stage,
    pub(super) proxied: Option<Proxied>,
    pub(super) slots: Slots,
    pub(super) table: Vec<Operand>,
    pub(super) spans: Vec<SpanCopy>,
}

/// Which of the three it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Dispatch,
    Combine,
    Release,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Dispatch => "dispatch",
            Kind::Combine => "combine",
            Kind::Release => "release",
        }
    }

    /// Which words peers raise, await and set back.
    pub fn flag(self) -> Flag {
        if self == Kind::Dispatch { Flag::Landed } else { Flag::Home }
    }

    /// What a rank moves to another: from its window of slots to the other's.
    pub fn span(self, slots: &Slots, from: u32, to: u32) -> SpanCopy {
        let (from_offset, to_offset, len) = match self {
            Kind::Dispatch => (slots.send(to), slots.receive(from), slots.slot_bytes()),
            Kind::Combine => (slots.partial(to), slots.home(from), slots.home_bytes()),
            Kind::Release => (slots.partial(to), slots.home(from), 0),
        };
        let source = Place::Window { owner: from, window: Slots::WINDOW };
        SpanCopy { from: source, from_offset, to: Slots::WINDOW, to_offset, len }
    }
}

impl StreamProgram {
    /// Packed slots to their ranks: `send[d]` here to `receive[me]` at `d`.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] if the group has no rank `me`.
    pub fn dispatch(slots: Slots, me: u32) -> Result<Self, PlanError> {
        Self::new(Kind::Dispatch, slots, me)
    }

    /// Partial rows home: `partial[p]` here to `home[me]` at `p`. It says, too, that all slots have been read.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] if the group has no rank `me`.
    pub fn combine(slots: Slots, me: u32) -> Result<Self, PlanError> {
        Self::new(Kind::Combine, slots, me)
    }

    /// In place of a combine: says that all slots have been read, and brings nothing home.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] if the group has no rank `me`.
    pub fn release(slots: Slots, me: u32) -> Result<Self, PlanError> {
        Self::new(Kind::Release, slots, me)
    }

    fn new(kind: Kind, slots: Slots, me: u32) -> Result<Self, PlanError> {
        let (ranks, flag) = (slots.ranks(), kind.flag());
        if me >= ranks {
            let (parameter, expected) = ("rank", "one of the group");
            return Err(PlanError::BadParameter { parameter, seen: me.into(), expected });
        }
        // Rotated, so that no rank is everybody's first; waits are in the order in which peers come to this rank.
        let peers = || (1..ranks).map(|step| (me + step) % ranks);
        let comers = || peers().rev();
        let (mut table, mut spans) = (vec![Operand::Empty; ranks as usize], Vec::new());
        let all = peers().map(|peer| (peer, kind.span(&slots, me, peer)));
        for (peer, span) in all.filter(|(_, span)| span.len > 0) {
            table[peer as usize] = Operand::Spans { first: spans.len() as u32, count: 1 };
            spans.push(span);
        }
        let puts = peers().map(|peer| Op::Put { to: peer, slot: Slot(peer) });
        let signals = peers().map(|peer| Op::Signal { to: peer, of: me, flag, level: Level::Credit });
        let waits = comers().map(|peer| Op::Wait { from: peer, flag, level: Level::Credit });
        let resets = comers().map(|peer| Op::Signal { to: me, of: peer, flag, level: Level::Nothing });
        let items = puts.chain(signals).chain(waits).chain(resets).map(|op| Item { track: 0, op }).collect();
        let stage = Stage { name: kind.name(), items };
        Ok(StreamProgram { kind, me, stage, proxied: None, slots, table, spans })
    }

    /// The operations: puts, then signals, waits, and words set back. One stream is one track.
    pub fn stage(&self) -> &Stage {
        &self.stage
    }

    /// What the host does of it, where there are other nodes.
    pub fn proxied(&self) -> Option<&Proxied> {
        self.proxied.as_ref()
    }

    /// What the stages' operations move: the same in every call.
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

    fn slots(ranks: u32) -> Slots {
        Slots::new(ranks, 512, 256).unwrap()
    }

    #[test]
    fn peers_come_rotated_and_every_word_that_is_awaited_is_set_back() {
        let program = StreamProgram::dispatch(slots(4), 1).unwrap();
        let ops: Vec<Op> = program.stage.items.iter().map(|item| item.op).collect();
        let (flag, level) = (Flag::Landed, Level::Credit);
        let expected = [2, 3, 0].map(|to| Op::Put { to, slot: Slot(to) });
        assert_eq!(ops[..3], expected);
        assert_eq!(ops[3..6], [2, 3, 0].map(|to| Op::Signal { to, of: 1, flag, level }));
        assert_eq!(ops[6..9], [0, 3, 2].map(|from| Op::Wait { from, flag, level }));
        assert_eq!(ops[9..], [0, 3, 2].map(|of| Op::Signal { to: 1, of, flag, level: Level::Nothing }));
        assert_eq!((program.stage.start().len(), program.stage.finish().len()), (6, 6));
    }

    #[test]
    fn flags_are_constants() {
        let program = StreamProgram::combine(slots(3), 0).unwrap();
        let operands = program.operands();
        assert_eq!((operands.value(Level::Credit), operands.value(Level::Nothing)), (1, 0));
        assert!(operands.tag(1, Flag::Home, Level::Credit).is_none(), "a stream writes words alone");
    }

    #[test]
    fn a_release_signals_like_a_combine_and_moves_nothing() {
        let [combine, release] =
            [StreamProgram::combine, StreamProgram::release].map(|f| f(slots(3), 2).unwrap());
        assert_eq!(combine.stage.items, release.stage.items);
        assert!(release.operands().table.iter().all(|operand| *operand == Operand::Empty));
        assert_eq!(combine.operands().spans.len(), 2);
    }

    #[test]
    fn a_rank_alone_has_nothing_to_do_and_one_outside_is_refused() {
        assert!(StreamProgram::dispatch(slots(1), 0).unwrap().stage.items.is_empty());
        assert!(matches!(StreamProgram::combine(slots(2), 2), Err(PlanError::BadParameter { seen: 2, .. })));
    }
}
