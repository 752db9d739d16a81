//! Another expert map, between calls.
//!
//! ```text
//!   caller's stream    reached | ........................ | bins, groups of the new map | calls by it
//!   caller's thread    await, entry, everybody's: agreed    adopt: wait until they are written
//! ```

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::call::DeviceCall;
use super::common::Common;
use super::enqueuer::{CallerStream, Enqueuer};
use super::exchange::PlannedExchange;
use super::setup::write_map;
use super::shape::StreamFlag;
use crate::ep::Status;
use crate::ep::agreement::GroupCounts;
use crate::ep::relay::Relay;
use crate::error::{CallError, CallKind, Error};
use crate::exec::Until;
use crate::plan::ExpertMap;
use crate::schedule::Tag;
use crate::schedule::call::{CallMachine, RankPrograms};

impl PlannedExchange {
    /// Where experts live.
    pub fn expert_map(&self) -> &ExpertMap {
        &self.common.fixed.spec.map
    }

    /// Adopts another expert map, if all ranks bring the same and no handle is alive.
    ///
    /// # Errors
    /// As [`ExpertParallel::set_expert_map`](crate::ExpertParallel::set_expert_map).
    pub fn set_expert_map(&mut self, map: Result<ExpertMap, Error>) -> Result<(), Error> {
        self.refuse_capture()?;
        self.common.fixed.shared.hub.health().check()?;
        let map = map.and_then(|map| self.check_map(&map).map(|()| map));
        let (map, refused) = map.map_or_else(|error| (None, Some(error)), |map| (Some(map), None));
        let seat = self.common.shape.seatless();
        self.common.space.count();
        let reached = self.common.word(seat, StreamFlag::Combine).and_then(|word| self.stream.write(word, 1));
        reached.map_err(|error| self.common.fixed.fail(error.into()))?;
        let machine = self.start(CallKind::ExpertMap, seat)?;
        let agreed = self.enqueuer.remap(&self.programs, machine, map, refused);
        let refusal = agreed.map_err(|error| self.common.fixed.fail(error))?;
        self.common.served.fetch_add(1, Ordering::Relaxed);
        self.common = Arc::clone(&self.enqueuer.common);
        refusal.map_or(Ok(()), Err)
    }

    fn check_map(&self, map: &ExpertMap) -> Result<(), Error> {
        self.common.fixed.check_map(map)?;
        match self.common.handles.load(Ordering::Relaxed) as usize {
            0 => Ok(()),
            count => Err(CallError::HandlesAlive { count }.into()),
        }
    }
}

impl Enqueuer {
    /// Serves the proposal of a map. `refused` is why this rank has none.
    ///
    /// # Errors
    /// Those that end the world. A refusal is returned.
    fn remap(
        &mut self,
        programs: &RankPrograms,
        mut machine: CallMachine,
        map: Option<ExpertMap>,
        refused: Option<Error>,
    ) -> Result<Option<Error>, Error> {
        let seat = self.common.shape.seatless();
        let call = DeviceCall::new(self, programs, CallKind::ExpertMap, seat);
        let refusal = DeviceCall { map, refused, ..call }.drive(&mut machine, Until::End)?;
        self.answer(seat, refusal.as_ref().map_or(Status::OK, Status::of))?;
        self.engine.take_enqueued();
        Ok(refusal)
    }
}

impl DeviceCall<'_> {
    /// Says which map this rank brings.
    pub fn propose(&mut self) {
        let handle = self.map.as_ref().map_or(0, ExpertMap::digest);
        self.say(Tag { handle, ..self.tag });
    }

    /// Goes by the new map from now on. Rows of the old one stay where they are.
    pub fn adopt(&mut self) -> Result<(), Error> {
        let Enqueuer { common, caller, numbers, relay, .. } = &mut *self.enqueuer;
        let (Some(map), CallerStream { stream, .. }) = (self.map.take(), caller) else { return Ok(()) };
        let fixed = Arc::new(common.fixed.with_map(map));
        write_map(stream.context(), stream, common, &fixed)?;
        *numbers = GroupCounts::new(&fixed);
        *relay = relay.is_some().then(|| Relay::new(Arc::clone(&fixed)));
        *common = Arc::new(Common { fixed, ..Common::clone(common) });
        Ok(())
    }
}
