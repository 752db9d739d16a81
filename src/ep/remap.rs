//! Another expert map, between steps.

use std::sync::Arc;

use super::ExpertParallel;
use super::flight::{Flight, Lent};
use crate::error::{CallError, CallKind, Error, PlanError};
use crate::exec::Until;
use crate::plan::ExpertMap;

impl ExpertParallel {
    /// Moves experts to other ranks: the dispatches that follow go by this map. What the ranks hold of the experts
    /// themselves is the caller's to move. Collective; no handle of the old map may be alive.
    ///
    /// # Errors
    /// On every rank, and the old map stays: [`PlanError::BadParameter`] if the map is of other ranks or experts, or has
    /// not as many slots; [`CallError::HandlesAlive`]; [`CallError::Disagree`] if ranks bring different maps.
    pub fn set_expert_map(&mut self, map: ExpertMap) -> Result<(), Error> {
        let mut flight = Flight::new(CallKind::ExpertMap, self.check_map(&map));
        self.enter(&mut flight, Lent { map: Some(map), ..Lent::default() }, Until::End)
    }

    fn check_map(&self, map: &ExpertMap) -> Result<(), Error> {
        let old = &self.fixed.spec.map;
        let pairs = [
            ("ranks of the expert map", map.ranks(), old.ranks(), "the size of the group"),
            ("experts of the expert map", map.experts(), old.experts(), "as many as before"),
            ("slots of the expert map", map.slots(), old.slots(), "as many as before"),
        ];
        for (parameter, seen, before, expected) in pairs {
            if seen != before {
                return Err(PlanError::BadParameter { parameter, seen: seen.into(), expected }.into());
            }
        }
        // Every handle has a share of the queue that its memory goes back to.
        match Arc::strong_count(&self.space.spare) - 1 {
            0 => Ok(()),
            count => Err(CallError::HandlesAlive { count }.into()),
        }
    }
}
