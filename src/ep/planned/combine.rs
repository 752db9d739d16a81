//! A combine, as the planner serves it.
//!
//! ```text
//!   caller's stream    experts write | bell |        wait                                  | sum | ...
//!   planner              entry, everybody's: bases | enqueue ------------.            ring |
//!   its stream                                       pull runs | read -> peers
//! ```
//!
//! Copy engines cannot add. So each rank pulls the rows of its own tokens home, run by run, to where they lay packed when
//! they went out; then its stream adds them up, a token's rows in ascending order of experts.

use std::sync::Arc;

use super::REFUSED;
use super::planner::Planner;
use super::shape::{Bell, Shape};
use super::status::Status;
use crate::ep::relay::RelayTask;
use crate::error::{CallError, CallKind, Error, PlanError};
use crate::schedule::call::{Half, StageId};
use crate::schedule::{Refusal, Tag};

impl Planner {
    /// Serves a combine of a seat; outputs lie at `steps` steps in this rank's memory.
    ///
    /// # Errors
    /// Those that end the world. What is refused is told.
    pub fn combine(&mut self, seat: u32, steps: u32) -> Result<(), Error> {
        self.enter()?;
        let common = Arc::clone(&self.common);
        let number = self.kept[seat as usize].number;
        let ready: Result<(), Error> = match (steps, number) {
            (REFUSED, _) => Err(PlanError::RefusedHere.into()),
            (_, 0) => Err(CallError::NotKept { missing: "the layout of a dispatch that was refused" }.into()),
            _ => Ok(()),
        };
        let base = u64::from(steps) * Shape::STEP;
        let tag = Tag { kind: CallKind::Combine, options: seat, handle: number, base, ..Tag::default() };
        let tag = ready.as_ref().map_or_else(|error| tag.refusing(error), |()| tag);
        self.tables.clear();
        self.offer(seat, tag, base);
        self.stage(StageId::Offer, Half::Start, None, None)?;
        let mut forward = std::mem::take(&mut self.kept[seat as usize].forward);
        let mut task = self.relay_counts(CallKind::Combine, &mut forward)?;
        self.stage(StageId::Offer, Half::Finish, None, None)?;
        let agreed = common.fixed.agreement(self.calls, CallKind::Combine).agree(tag, ready.err());
        let (status, refused) = match agreed {
            Ok(()) => {
                self.pull(seat, base, &mut task)?;
                (Status::WELL, None)
            }
            Err(error) if number == 0 => (self.kept[seat as usize].status, Some(error)),
            Err(error) => (Status::of(&error), Some(error)),
        };
        self.kept[seat as usize].forward = task.map(|task| task.forward).unwrap_or_default();
        self.answer(seat, Bell::Combined, status)?;
        let enqueued = self.engine.take_enqueued();
        common.seats[seat as usize].tell(|told| {
            told.combined = enqueued;
            told.combine_refused = refused;
            told.home += 1;
        });
        Ok(())
    }

    /// Says where outputs lie, to neighbours, and to relays where this rank's rows have their place.
    fn offer(&mut self, seat: u32, tag: Tag, base: u64) {
        let (fixed, home) = (&self.common.fixed, self.common.shape.staging(seat).0);
        let (paths, layout) = (fixed.paths(), &self.kept[seat as usize].layout);
        match tag.refusal {
            Refusal::None => {
                let setting = fixed.agreement(self.calls, CallKind::Combine).setting;
                self.tables.stage_rows(&setting, layout, home);
                self.tables.offer(&paths, tag, base);
            }
            _ => self.tables.tags.fill(tag),
        }
    }

    /// Enqueues that rows come home, and that their owners are told; relays meanwhile.
    fn pull(&mut self, seat: u32, base: u64, task: &mut Option<RelayTask>) -> Result<(), Error> {
        let common = Arc::clone(&self.common);
        let agreement = common.fixed.agreement(self.calls, CallKind::Combine);
        self.tables.bases[common.fixed.lanes.rank as usize] = base;
        for peer in common.fixed.paths().locals() {
            self.tables.bases[peer as usize] = agreement.tag_of(peer)?.base;
        }
        self.relay_rows(task)?;
        let home = common.shape.staging(seat).0;
        self.tables.pull(&agreement.setting, &self.kept[seat as usize].layout, home);
        for stage in [StageId::Pull, StageId::Home, StageId::PullRest] {
            self.stage(stage, Half::Whole, None, None)?;
        }
        self.calls.returned();
        if common.shape.budget().is_some() {
            // Outputs have one place: experts may write the next ones there as soon as this call is over.
            self.stage(StageId::Release, Half::Whole, None, None)?;
        }
        Ok(())
    }
}
