//! Another expert map, between steps.

use std::sync::Arc;

use super::exchange::HostExchange;
use super::flight::{Flight, Lent};
use crate::error::{CallError, CallKind, Error, PlanError};
use crate::exec::Until;
use crate::plan::ExpertMap;

impl HostExchange {
    /// Adopts another expert map, if all ranks bring the same and no handle is alive.
    pub fn set_expert_map(&mut self, map: Result<ExpertMap, Error>) -> Result<(), Error> {
        let map = map.and_then(|map| self.check_map(&map).map(|()| map));
        let (map, checked) = map.map_or_else(|error| (None, Err(error)), |map| (Some(map), Ok(())));
        let mut flight = Flight::new(CallKind::ExpertMap, checked);
        self.enter(&mut flight, Lent { map, ..Lent::default() }, Until::End)
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
