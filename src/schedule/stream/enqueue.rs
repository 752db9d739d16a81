//! A program as a stream takes it: one batch of copies, then one list of memory operations.
//!
//! A device has no order among the copies of a batch, so a flag is never one of them. The stream has done the batch
//! before it begins the list, which it works through in order.

use super::{Slots, StreamProgram};
use crate::schedule::{Op, Operand, SpanCopy};

/// One copy of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCopy {
    /// At whom the target lies.
    pub to: u32,
    /// Source and target, both in windows of slots ([`Slots::WINDOW`]).
    pub span: SpanCopy,
}

/// One memory operation, on a word in a window of flags ([`Slots::FLAGS`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordOp {
    /// Writes a word, behind everything that the stream did before.
    Write {
        /// At whom: a peer, or this rank.
        at: u32,
        /// First byte.
        offset: u64,
        /// The value.
        value: u64,
    },
    /// Waits until a word of this rank is at least so much.
    Wait {
        /// First byte.
        offset: u64,
        /// The value.
        value: u64,
    },
}

impl StreamProgram {
    /// Comes first: copies, which may run in any order. None move no bytes.
    pub fn copies(&self) -> impl Iterator<Item = PeerCopy> {
        let operands = self.operands();
        let put = move |op| match op {
            Op::Put { to, slot } => Some((to, operands.table[slot.0 as usize])),
            _ => None,
        };
        let puts = self.stage().items.iter().filter_map(move |item| put(item.op));
        puts.flat_map(move |(to, operand)| {
            let (first, count) = match operand {
                Operand::Spans { first, count } => (first as usize, count as usize),
                _ => (0, 0),
            };
            operands.spans[first..][..count].iter().map(move |&span| PeerCopy { to, span })
        })
    }

    /// Comes second: memory operations, which run in this order.
    pub fn words(&self) -> impl Iterator<Item = WordOp> {
        let (slots, operands): (&Slots, _) = (self.slots(), self.operands());
        self.stage().items.iter().filter_map(move |item| match item.op {
            Op::Signal { to, of, flag, level } => {
                let (offset, value) = (slots.flag(of, flag), operands.value(level));
                Some(WordOp::Write { at: to, offset, value })
            }
            Op::Wait { from, flag, level } => {
                let (offset, value) = (slots.flag(from, flag), operands.value(level));
                Some(WordOp::Wait { offset, value })
            }
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{Flag, Place};

    #[test]
    fn a_combine_is_one_batch_and_one_list() {
        let slots = Slots::new(3, 512, 256).unwrap();
        let program = StreamProgram::combine(slots, 1).unwrap();
        let copies: Vec<PeerCopy> = program.copies().collect();
        let copy = |to| {
            let from = Place::Window { owner: 1, window: Slots::WINDOW };
            let (from_offset, to_offset) = (slots.partial(to), slots.home(1));
            PeerCopy { to, span: SpanCopy { from, from_offset, to: Slots::WINDOW, to_offset, len: 256 } }
        };
        assert_eq!(copies, [copy(2), copy(0)]);
        let [home0, home1, home2] = [0, 1, 2].map(|of| slots.flag(of, Flag::Home));
        let words: Vec<WordOp> = program.words().collect();
        assert_eq!(
            words,
            [
                WordOp::Write { at: 2, offset: home1, value: 1 },
                WordOp::Write { at: 0, offset: home1, value: 1 },
                WordOp::Wait { offset: home0, value: 1 },
                WordOp::Wait { offset: home2, value: 1 },
                WordOp::Write { at: 1, offset: home0, value: 0 },
                WordOp::Write { at: 1, offset: home2, value: 0 },
            ]
        );
    }

    #[test]
    fn a_release_is_a_list_alone() {
        let program = StreamProgram::release(Slots::new(4, 512, 256).unwrap(), 0).unwrap();
        assert_eq!((program.copies().count(), program.words().count()), (0, 9));
    }

    #[test]
    fn slots_of_no_bytes_are_not_copied_and_still_signalled() {
        let program = StreamProgram::dispatch(Slots::new(4, 0, 256).unwrap(), 0).unwrap();
        assert_eq!((program.copies().count(), program.words().count()), (0, 9));
    }
}
