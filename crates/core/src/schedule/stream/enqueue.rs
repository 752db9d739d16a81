//! A program as a stream takes it: batches of copies, and lists of memory operations.
//!
//! A device has no order among the copies of a batch, so a flag is never one of them. The stream
//! completes a batch before it begins the list behind it, which it processes in order.

use super::{Slots, StreamProgram};
use crate::schedule::call::Part;
use crate::schedule::{Op, Operand, SpanCopy, TrackOp};

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
    /// Source and target, in windows of slots ([`Slots::WINDOW`]) and in this rank's twin.
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
        let Op::Put { to, slot } = *op else { return Vec::new() };
        let operands = self.operands();
        let (first, count) = match operands.table[slot.0 as usize] {
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
    use crate::schedule::call::SlotCall;
    use crate::schedule::stream::RowPath;
    use crate::schedule::{Flag, PutSource};
    use crate::topology::NodeMap;

    #[test]
    fn a_combine_is_one_batch_and_one_list() {
        let slots = Slots::new(3, 512, 256).unwrap();
        let program = StreamProgram::new(SlotCall::Combine, slots, 1).unwrap();
        let copy = |to| {
            let from = PutSource::Window { owner: 1, window: Slots::WINDOW };
            let (from_offset, to_offset) = (slots.partial(to), slots.home(1));
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
    fn on_the_detour_a_bell_rings_between_two_batches_and_a_third_is_the_last() {
        let nodes = NodeMap::from_labels(&[0, 0, 1, 1]);
        let program = StreamProgram::new(SlotCall::Dispatch, Slots::new(4, 512, 256).unwrap(), 0).unwrap();
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
