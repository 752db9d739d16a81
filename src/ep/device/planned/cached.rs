//! A dispatch along a known layout, or the gradient of a combine, as the enqueuer serves it.
//!
//! ```text
//!   caller's stream    pack, as the handle says | ......... join | experts
//!   caller's thread    take, entry, everybody's: landings | posted
//!   stream of copies                     | rows to all ranks | landed -> peers
//! ```
//!
//! The layout is the handle's: nobody counts, and the host hears nothing of the stream. It may run
//! ahead, because rows land in memory that is free when it says so:
//! [`Common::take`](super::common::Common::take) has seen that the stream and its peers have read
//! what lay there. Over several nodes it awaits its stream, since what arrives is listed in memory
//! of the host that calls before may still be reading.

use super::call::DeviceCall;
use super::dispatch::Landing;
use super::enqueuer::Enqueuer;
use super::space::Extent;
use crate::device::DeviceRange;
use crate::dtype::Dtype;
use crate::ep::Status;
use crate::error::{CallKind, Error, MemoryError, PlanError};
use crate::exec::Until;
use crate::schedule::Tag;
use crate::schedule::call::{CallMachine, RankPrograms};

impl Enqueuer {
    /// Serves a call of this kind along the layout of a seat, with tokens `x` that go as they lie,
    /// or packed ones. `refused` is why this rank cannot make it.
    ///
    /// # Errors
    /// Those that end the world. A refusal is returned, and otherwise where rows land.
    pub fn cached(
        &mut self,
        programs: &RankPrograms,
        mut machine: CallMachine,
        (kind, seat): (CallKind, u32),
        (x, refused): (Option<(DeviceRange, Dtype)>, Option<Error>),
    ) -> Result<Result<Extent, Error>, Error> {
        let mut call = DeviceCall { x, refused, ..DeviceCall::new(self, programs, kind, seat) };
        let refusal = call.drive(&mut machine, Until::End)?;
        let landing = call.landing.take().and_then(|landing| landing.extent);
        let status = refusal.as_ref().map_or(Status::OK, Status::of);
        self.answer(seat, status)?;
        self.engine.take_enqueued();
        Ok(match (refusal, landing) {
            (None, Some(mut extent)) => {
                // What was staged is free again, for calls that are enqueued later.
                drop(self.common.trim(kind, &mut extent, &self.kept[seat as usize].layout));
                Ok(extent)
            }
            (refusal, _) => Err(refusal.unwrap_or_else(|| PlanError::RefusedHere.into())),
        })
    }
}

impl DeviceCall<'_> {
    /// Takes memory of the size that the layout asks for, and says where it lies.
    pub fn take(&mut self) -> Result<(), Error> {
        let (common, kept) = (&self.enqueuer.common, &self.enqueuer.kept[self.seat as usize]);
        if self.refused.is_none() {
            let (landed, staged) = (kept.layout.landed, kept.layout.staged);
            match common.take(common.fixed.extent_bytes(self.tag.kind, landed, staged)) {
                Ok(extent) => {
                    let (base, len) = (extent.offset(), extent.len());
                    self.landing = Some(Landing { base, len, extent: Some(extent) });
                }
                Err(error @ Error::Memory(MemoryError::OutOfSpace { .. })) => self.refused = Some(error),
                Err(error) => return Err(error),
            }
        }
        let (base, handle) = (self.landing.as_ref().map_or(0, |landing| landing.base), kept.number);
        self.say(Tag { handle, base, ..self.tag });
        Ok(())
    }

    /// Reads where rows land at all ranks.
    pub fn landings(&mut self) -> Result<(), Error> {
        let Enqueuer { common, calls, tables, .. } = &mut *self.enqueuer;
        let agreement = common.fixed.agreement(*calls, self.tag.kind);
        for (peer, landing) in (0..).zip(&mut tables.landing) {
            let mine = peer == common.fixed.lanes.rank;
            *landing = if mine { self.tag.base } else { agreement.tag_of(peer)?.base };
        }
        Ok(())
    }
}
