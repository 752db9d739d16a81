//! What goes with rank-major rows: their choices.
//!
//! A rank's host knows how many rows come, and not what they chose: that lies beside the rows. So a
//! kernel behind their landing lays experts and weights apart, and counts the rows of each expert.

use super::common::Common;
use super::enqueuer::Enqueuer;
use super::shape::ByteRange;
use crate::device::{ChoiceArgs, Kernels, Stream};
use crate::ep::Status;
use crate::error::Error;

impl Enqueuer {
    /// Rows of the layout that a dispatch has just given a seat; none if it was refused.
    pub fn landed(&self, seat: u32) -> Option<u32> {
        let kept = &self.kept[seat as usize];
        (kept.number != 0 && kept.status == Status::OK).then_some(kept.layout.landed)
    }
}

impl Common {
    /// Where rows of local experts are counted: each number twice, without and with pads;
    /// rank-major once.
    pub fn counts(&self, seat: u32) -> ByteRange {
        let spec = &self.fixed.spec;
        let experts = spec.map.slots_of(self.fixed.lanes.rank).len() as u64;
        let each = if spec.layout.is_per_rank() { 8 } else { 16 };
        (self.shape.counts(seat).0, experts * each)
    }

    /// Enqueues that the choices of `rows` rows of a seat are laid apart, where a row stands for
    /// several.
    pub fn lay_choices_apart(
        &self,
        stream: &Stream,
        kernels: &Kernels,
        (seat, rows): (u32, u32),
    ) -> Result<(), Error> {
        let spec = &self.fixed.spec;
        if !spec.layout.is_per_rank() {
            return Ok(());
        }
        let [experts, weights] = self.shape.row_choices(seat);
        let args = ChoiceArgs {
            rows,
            top_k: spec.top_k,
            n_experts: spec.map.slots_of(self.fixed.lanes.rank).len() as u32,
            notes: self.span(self.shape.notes(seat))?,
            experts: self.span(experts)?,
            weights: self.span(weights)?,
            counts: self.span(self.counts(seat))?,
        };
        Ok(kernels.choices(stream, &args)?)
    }
}
