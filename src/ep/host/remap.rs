//! Another expert map, between steps.

use std::sync::Arc;

use super::exchange::HostExchange;
use super::flight::{Flight, Lent};
use crate::error::{CallError, CallKind, Error};
use crate::plan::ExpertMap;

impl HostExchange {
    /// Adopts another expert map, if all ranks bring the same and no handle is alive.
    pub fn set_expert_map(&mut self, map: Result<ExpertMap, Error>) -> Result<(), Error> {
        let map = map.and_then(|map| self.check_map(&map).map(|()| map));
        let (map, checked) = map.map_or_else(|error| (None, Err(error)), |map| (Some(map), Ok(())));
        let mut flight = Flight::new(CallKind::ExpertMap, checked);
        self.make(&mut flight, Lent { map, ..Lent::default() })
    }

    fn check_map(&self, map: &ExpertMap) -> Result<(), Error> {
        self.fixed.check_map(map)?;
        // Every handle has a share of the queue that its memory goes back to.
        match Arc::strong_count(&self.space.spare) - 1 {
            0 => Ok(()),
            count => Err(CallError::HandlesAlive { count }.into()),
        }
    }
}
