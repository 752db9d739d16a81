//! What one operation does to the windows, read from its operands.

use super::{Bytes, Part, Step};
use crate::schedule::{Control, Flag, Op, Operand, Operands, Place, Slot, WindowId};

/// A movement of bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Bytes from here (or from the call's input) to a window.
    Copy {
        /// Source in a window of this rank, of the same length; `None` for the call's input and for zeros.
        from: Option<Bytes>,
        /// Destination.
        to: Bytes,
    },
    /// The tag that comes with an entry signal.
    Tag(
        /// Where it is left.
        Bytes,
    ),
    /// Bytes of a window that flow into the call's output.
    Read(
        /// Where they lie.
        Bytes,
    ),
}

impl Part {
    /// What `step` does, besides raising or awaiting its flag.
    pub fn effects(&self, step: &Step) -> Vec<Effect> {
        let operands = self.operands();
        match step.op {
            Op::Put { to, slot } | Op::PutRows { to, slot } => puts(&operands, self.rank, to, slot),
            Op::Signal { to, flag: Flag::Entry, .. } => {
                let start = Control::tag(self.rank, self.layout.ranks(), self.tag_parity);
                vec![Effect::Tag(bytes(to, WindowId::CONTROL, start, Control::TAG_BYTES))]
            }
            Op::Reduce { slot } => reads(&operands, slot),
            Op::Signal { .. } | Op::Wait { .. } => Vec::new(),
        }
    }
}

pub(super) fn bytes(owner: u32, window: WindowId, start: u64, len: u64) -> Bytes {
    Bytes { owner, window, range: start..start + len }
}

fn puts(operands: &Operands, me: u32, to: u32, slot: Slot) -> Vec<Effect> {
    match operands.table[slot.0 as usize] {
        Operand::Spans { first, count } => operands.spans[first as usize..][..count as usize]
            .iter()
            .map(|span| Effect::Copy {
                from: match span.from {
                    Place::Input => None,
                    Place::Own(window) => Some(bytes(me, window, span.from_offset, span.len)),
                },
                to: bytes(to, span.to, span.to_offset, span.len),
            })
            .collect(),
        Operand::Rows { first, count, to: window, base } => operands.runs[first as usize..][..count as usize]
            .iter()
            .map(|run| {
                let start = base + u64::from(run.to_row) * operands.row_bytes;
                let len = u64::from(run.count + run.pad) * operands.row_bytes;
                Effect::Copy { from: None, to: bytes(to, window, start, len) }
            })
            .collect(),
        Operand::Empty | Operand::SumRows | Operand::FetchWeights => Vec::new(),
    }
}

/// What a sum reads, neighbours joined.
fn reads(operands: &Operands, slot: Slot) -> Vec<Effect> {
    let sum = &operands.sum;
    let (size, weights) = match operands.table[slot.0 as usize] {
        Operand::SumRows => (operands.row_bytes, false),
        Operand::FetchWeights => (4, true),
        _ => return Vec::new(),
    };
    let mut starts: Vec<(u32, u64)> = sum
        .terms
        .iter()
        .map(|term| {
            let owner = term.owner as usize;
            let base = if weights { sum.weights_base(owner, operands.row_bytes) } else { sum.bases[owner] };
            (sum.held_by[owner], base + u64::from(term.row) * size)
        })
        .collect();
    starts.sort_unstable();
    let mut reads: Vec<Bytes> = Vec::new();
    for (holder, start) in starts {
        match reads.last_mut() {
            Some(last) if last.owner == holder && last.range.end == start => last.range.end += size,
            _ => reads.push(bytes(holder, WindowId::POOL, start, size)),
        }
    }
    reads.into_iter().map(Effect::Read).collect()
}
