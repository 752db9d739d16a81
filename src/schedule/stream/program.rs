//! What one rank enqueues: a stage, and operands that never change.

use super::Slots;
use crate::error::PlanError;
use crate::schedule::{Flag, Item, Level, Op, Operand, Operands, Place, Slot, SpanCopy, Stage};

/// A dispatch, combine or release of one rank, built once and enqueued as often as one likes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamProgram {
    stage: Stage,
    slots: Slots,
    table: Vec<Operand>,
    spans: Vec<SpanCopy>,
}

impl StreamProgram {
    /// Packed slots to their ranks: `send[d]` here to `receive[me]` at `d`.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] if the group has no rank `me`.
    pub fn dispatch(slots: Slots, me: u32) -> Result<Self, PlanError> {
        let put = |peer| span(me, slots.send(peer), slots.receive(me), slots.slot_bytes());
        Self::new("dispatch", slots, me, Flag::Landed, put)
    }

    /// Partial rows home: `partial[p]` here to `home[me]` at `p`. It says, too, that all slots have been read.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] if the group has no rank `me`.
    pub fn combine(slots: Slots, me: u32) -> Result<Self, PlanError> {
        let put = |peer| span(me, slots.partial(peer), slots.home(me), slots.home_bytes());
        Self::new("combine", slots, me, Flag::Home, put)
    }

    /// In place of a combine: says that all slots have been read, and brings nothing home.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] if the group has no rank `me`.
    pub fn release(slots: Slots, me: u32) -> Result<Self, PlanError> {
        let put = |peer| span(me, slots.partial(peer), slots.home(me), 0);
        Self::new("release", slots, me, Flag::Home, put)
    }

    fn new(
        name: &'static str,
        slots: Slots,
        me: u32,
        flag: Flag,
        put: impl Fn(u32) -> SpanCopy,
    ) -> Result<Self, PlanError> {
        let ranks = slots.ranks();
        if me >= ranks {
            let (parameter, expected) = ("rank", "one of the group");
            return Err(PlanError::BadParameter { parameter, seen: me.into(), expected });
        }
        // Rotated, so that no rank is everybody's first; waits are in the order in which peers come to this rank.
        let peers = || (1..ranks).map(|step| (me + step) % ranks);
        let comers = || peers().rev();
        let (mut table, mut spans) = (vec![Operand::Empty; ranks as usize], Vec::new());
        for (peer, span) in peers().map(|peer| (peer, put(peer))).filter(|(_, span)| span.len > 0) {
            table[peer as usize] = Operand::Spans { first: spans.len() as u32, count: 1 };
            spans.push(span);
        }
        let puts = peers().map(|peer| Op::Put { to: peer, slot: Slot(peer) });
        let signals = peers().map(|peer| Op::Signal { to: peer, of: me, flag, level: Level::Credit });
        let waits = comers().map(|peer| Op::Wait { from: peer, flag, level: Level::Credit });
        let resets = comers().map(|peer| Op::Signal { to: me, of: peer, flag, level: Level::Nothing });
        let items = puts.chain(signals).chain(waits).chain(resets).map(|op| Item { track: 0, op }).collect();
        Ok(StreamProgram { stage: Stage { name, items }, slots, table, spans })
    }

    /// The operations: puts, then signals, waits, and words set back. One stream is one track.
    pub fn stage(&self) -> &Stage {
        &self.stage
    }

    /// What the stage's operations move: the same in every call.
    pub fn operands(&self) -> Operands<'_> {
        Operands { table: &self.table, spans: &self.spans, ..Operands::default() }
    }

    /// Where slots and flags lie.
    pub fn slots(&self) -> &Slots {
        &self.slots
    }
}

/// `len` bytes of this rank's window of slots to a peer's.
fn span(me: u32, from_offset: u64, to_offset: u64, len: u64) -> SpanCopy {
    let from = Place::Window { owner: me, window: Slots::WINDOW };
    SpanCopy { from, from_offset, to: Slots::WINDOW, to_offset, len }
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
