//! Another expert map, between steps.

use std::sync::Arc;

use super::ExpertParallel;
use super::call::entry;
use super::fixed::Fixed;
use super::meeting::Numbers;
use super::relay::Errand;
use crate::error::{CallError, CallKind, Error, PlanError};
use crate::lane::Io;
use crate::plan::{Bins, ExpertMap};
use crate::rows::Stores;
use crate::schedule::Tag;

impl ExpertParallel {
    /// Moves experts to other ranks: the dispatches that follow go by this map. What the ranks hold of the experts
    /// themselves is the caller's to move. Collective; no handle of the old map may be alive.
    ///
    /// # Errors
    /// On every rank, and the old map stays: [`PlanError::BadParameter`] if the map is of other ranks or experts, or has
    /// not as many slots; [`CallError::HandlesAlive`]; [`CallError::Disagree`] if ranks bring different maps.
    pub fn set_expert_map(&mut self, map: ExpertMap) -> Result<(), Error> {
        self.enter()?;
        let ready = self.check_map(&map);
        let (kind, handle) = (CallKind::ExpertMap, map.digest());
        let tag = entry(Tag { kind, handle, ..Tag::default() }, &ready);
        self.tables.clear();
        self.tables.tags.fill(tag);
        let skeletons = Arc::clone(&self.skeletons);
        self.run(skeletons.dispatch.entry.start(), None, &mut Io::default(), Stores::Cached)?;
        let mut relaying = self.relay(false, |calls| Errand::new(calls, kind, Arc::default()))?;
        self.meet(&mut relaying)?;
        self.run(skeletons.dispatch.entry.finish(), None, &mut Io::default(), Stores::Cached)?;
        self.agree(tag, ready, drop)?;
        self.relayed(relaying);
        self.adopt(map);
        Ok(())
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
        match Arc::strong_count(&self.spare) - 1 {
            0 => Ok(()),
            count => Err(CallError::HandlesAlive { count }.into()),
        }
    }

    fn adopt(&mut self, map: ExpertMap) {
        let Fixed { shared, lanes, port, control, spec, chunks, room, far, on_devices, .. } = &*self.fixed;
        let mut spec = spec.clone();
        spec.map = Arc::new(map);
        let bins = Bins::of_layout(spec.layout, &spec.map, spec.order, &lanes.nodes);
        let (control, chunks, room, far, on_devices) = (*control, *chunks, *room, *far, *on_devices);
        let (shared, lanes, port) = (Arc::clone(shared), Arc::clone(lanes), Arc::clone(port));
        self.fixed =
            Arc::new(Fixed { shared, lanes, port, control, spec, bins, chunks, room, far, on_devices });
        self.numbers = Numbers::new(&self.fixed);
        self.relay = self.relay.is_some().then(|| Self::seat(&self.fixed));
    }
}
