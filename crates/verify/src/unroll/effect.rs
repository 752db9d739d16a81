//! Effect of one operation on the windows.

use std::fmt;

use sidelane_core::schedule::{Bytes, ControlLayout, Effect, Op, WindowId};

use super::filled::FilledOperands;
use super::{StageRun, UnrolledOp};

/// Operands of the slots of a scene.
pub(super) trait Effects: fmt::Debug {
    /// Effect of a step, besides raising or awaiting a flag that grows.
    fn effects(&self, step: &UnrolledOp) -> Vec<Effect>;

    /// The call that wrote what puts read from windows; `None`: their own.
    fn sources_of(&self) -> Option<usize> {
        None
    }
}

impl StageRun {
    /// What `step` does, besides raising or awaiting a flag that grows.
    pub fn effects(&self, step: &UnrolledOp) -> Vec<Effect> {
        self.filled.effects(step)
    }

    /// The call that wrote what puts read from windows; `None`: their own.
    pub fn sources_of(&self) -> Option<usize> {
        self.filled.sources_of()
    }
}

impl Effects for FilledOperands {
    fn effects(&self, step: &UnrolledOp) -> Vec<Effect> {
        let operands = self.operands();
        match step.op {
            Op::Put { to, slot } | Op::PutRows { to, slot } => operands.puts(to, slot),
            Op::Signal { to, of, flag, level } => {
                let at = ControlLayout::tag(of, flag, self.ranks, self.tag_parity);
                let tag = operands.tag(to, flag, level);
                tag.map(|_| Effect::Tag(Bytes::new(to, WindowId::CONTROL, at, ControlLayout::TAG_BYTES)))
                    .into_iter()
                    .collect()
            }
            Op::Reduce { slot } => operands.sums(slot, (self.rank, self.partial_bytes)),
            Op::Wait { .. } => Vec::new(),
        }
    }

    fn sources_of(&self) -> Option<usize> {
        self.sources_of
    }
}
