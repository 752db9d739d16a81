//! A return, as the enqueuer serves it: a combine, the gradient of a dispatch, or the return of
//! weight gradients.
//!
//! ```text
//!   caller's stream    experts write | ready |                     join | sum | ...
//!   caller's thread      entry, everybody's: bases | enqueue -.
//!   stream of copies                                 pull runs | read -> peers
//! ```
//!
//! Copy engines cannot add. So each rank pulls the rows of its own tokens home, run by run, to
//! where they lay packed when they went out; then its stream adds them up, in the order of the
//! instance. Weight gradients return as rows of four bytes.

use super::REFUSED;
use super::call::DeviceCall;
use super::enqueuer::Enqueuer;
use super::shape::MemoryShape;
use crate::ep::Status;
use crate::error::{CallError, CallKind, Error, MemoryError, PlanError};
use crate::exec::Until;
use crate::schedule::call::{CallMachine, RankPrograms};
use crate::schedule::{Refusal, Tag};

impl Enqueuer {
    /// Serves a return of this kind for a seat; outputs lie at `steps` steps in this rank's memory.
    ///
    /// # Errors
    /// Those that end the world. A refusal is told, and returned.
    pub fn ret(
        &mut self,
        programs: &RankPrograms,
        mut machine: CallMachine,
        (kind, seat): (CallKind, u32),
        (steps, options): (u32, u32),
    ) -> Result<Option<Error>, Error> {
        let number = self.kept[seat as usize].number;
        let mut call = DeviceCall::new(self, programs, kind, seat);
        call.tag.options = options;
        call.base = u64::from(steps) * MemoryShape::STEP;
        call.refused = match (steps, number) {
            (REFUSED, _) => Some(PlanError::RefusedHere.into()),
            (_, 0) => {
                Some(CallError::NotKept { missing: "the layout of a dispatch that was refused" }.into())
            }
            _ => None,
        };
        let refused = call.drive(&mut machine, Until::End)?;
        let status = match &refused {
            None => Status::OK,
            Some(_) if number == 0 => self.kept[seat as usize].status,
            Some(error) => Status::of(error),
        };
        self.answer(seat, status)?;
        let enqueued = self.engine.take_enqueued();
        self.common.seats[seat as usize].tell(|told| {
            told.combined = enqueued;
            told.combine_refused = refused.clone();
            told.home += 1;
        });
        Ok(refused)
    }
}

impl DeviceCall<'_> {
    /// Says where outputs lie, to local peers, and to relays where this rank's rows have their
    /// place.
    pub fn offer(&mut self) {
        let handle = self.enqueuer.kept[self.seat as usize].number;
        self.say(Tag { handle, base: self.base, ..self.tag });
        if self.tag.refusal == Refusal::None {
            let Enqueuer { common, calls, tables, kept, .. } = &mut *self.enqueuer;
            let (layout, home) = (&kept[self.seat as usize].layout, common.shape.staging().0);
            let setting = common.fixed.agreement(*calls, self.tag.kind).setting;
            tables.stage_rows(&setting, layout, home);
            tables.offer(&common.fixed.paths(), self.tag, self.base);
        }
    }

    /// Reads where the outputs of this node's ranks lie.
    pub fn bases(&mut self) -> Result<(), MemoryError> {
        let Enqueuer { common, calls, tables, .. } = &mut *self.enqueuer;
        let agreement = common.fixed.agreement(*calls, self.tag.kind);
        tables.bases[common.fixed.lanes.rank as usize] = self.base;
        for peer in common.fixed.paths().local_peers() {
            tables.bases[peer as usize] = agreement.tag_of(peer)?.base;
        }
        Ok(())
    }

    /// Fills the operands by which rows come here.
    pub fn fill_pull(&mut self) {
        let Enqueuer { common, calls, tables, kept, .. } = &mut *self.enqueuer;
        let (layout, home) = (&kept[self.seat as usize].layout, common.shape.staging().0);
        tables.pull(&common.fixed.agreement(*calls, self.tag.kind).setting, layout, home);
    }
}
