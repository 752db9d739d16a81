//! What the network cards were asked to do during a measurement, from the first wire to the report.

use serde::{Deserialize, Serialize};
use sidelane::Error;
use sidelane::world::RailCounters;

use super::layer::Layer;
use super::tensor::Number;

/// Counted by the lane, and forecast from its calls; a node's ranks together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cards {
    /// Per node: what was done.
    pub done: Vec<RailCounters>,
    /// Per node: what was to be done.
    pub forecast: Vec<RailCounters>,
    /// Whether requests, packets and bytes are as forecast. Doorbells are more where a queue was full.
    pub exact: bool,
}

impl Cards {
    /// Of all ranks; none where the rails are no cards. Collective: all that was sent has landed.
    pub fn of<E: Number>(layer: &Layer<'_, E>) -> Result<Option<Self>, Error> {
        let world = &layer.world;
        let own = [world.rail_counters(), world.rail_forecast()];
        let blob = serde_json::to_vec(&own).expect("numbers are always JSON");
        let count = world.nodes().nodes() as usize;
        let [mut done, mut forecast] =
            [vec![RailCounters::default(); count], vec![RailCounters::default(); count]];
        for (blob, rank) in layer.group.gather(&blob)?.iter().zip(0..) {
            let [of_rank, told] = serde_json::from_slice::<[RailCounters; 2]>(blob).unwrap_or_default();
            let node = world.nodes().node_of(rank) as usize;
            done[node] = [done[node], of_rank].into_iter().sum();
            forecast[node] = [forecast[node], told].into_iter().sum();
        }
        let same = |(done, told): (&RailCounters, &RailCounters)| {
            let exact = |c: &RailCounters| (c.requests, c.packets, c.bytes, c.copied);
            exact(done) == exact(told) && done.doorbells == done.completions
        };
        let exact = done.iter().zip(&forecast).all(same);
        let any = done.iter().any(|done| done.requests > 0);
        Ok(any.then_some(Cards { done, forecast, exact }))
    }

    /// For the table.
    pub fn text(&self) -> String {
        let sum: RailCounters = self.done.iter().copied().sum();
        let verdict = if self.exact { "as forecast" } else { "NOT AS FORECAST" };
        let RailCounters { requests, doorbells, packets, .. } = sum;
        format!("{requests} work requests, {doorbells} doorbells, {packets} packets, {verdict}")
    }
}
