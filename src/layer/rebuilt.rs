//! A layer on another group, after a loss: settings, gate and weights stay, and experts move.
//!
//! ```text
//!   before    rank 0: 0 1 2      rank 1: 2 3 0      rank 2: 4 5 3         rank 1 is lost
//!   map       rank 0: 0 1 2                         rank 1: 4 5 3         replicas have all that it held, or
//!             rank 0: 0 1 2                         rank 1: 4 5 3 2       an expert moves: the caller has its weights
//! ```

use super::checked_experts::CheckedExperts;
use super::moe::Asked;
use super::{Experts, MoeLayer, MoeLayerBuilder};
use crate::error::{Error, ExpertKind, LayerError, PlanError};
use crate::plan::ExpertMap;
use crate::world::Group;

impl MoeLayer {
    /// The settings, the gate and the weights of this layer for another group: that of the
    /// survivors, once [`World::rebuild`](crate::World::rebuild) has gathered them. `map` says
    /// where the experts live there ([`ExpertMap::subset`] leaves out those of lost ranks that have
    /// replicas). An expert that was on this rank before keeps its weights. `weights` supplies
    /// those of each other expert that the map gives to this rank, in the order of
    /// [`Experts::with_weights`]: from a replica on another rank, say, or a checkpoint.
    ///
    /// Settings may change until [`build`](MoeLayerBuilder::build) makes the layer: with fewer
    /// ranks each may have more tokens. It has no tapes of this layer. Its errors are, besides its
    /// others, [`LayerError::NoWeights`] where `weights` supplies nothing,
    /// [`LayerError::Failed`] for experts that cannot be rebuilt, and
    /// [`PlanError::WrongShape`] for weights of another number: on this rank, and
    /// [`CallError::ConfigsDiffer`](crate::error::CallError) on the others.
    ///
    /// This layer stays as it is, in its failed world, so a rebuild that fails can be tried again.
    /// Drop it then: it holds the memory of that world.
    pub fn rebuilt<'g>(
        &self,
        group: &'g Group,
        map: ExpertMap,
        weights: impl FnMut(u32) -> Option<Vec<f32>>,
    ) -> MoeLayerBuilder<'g> {
        // A map of too few ranks is refused when the layer is built.
        let slots = if group.rank() < map.ranks() { map.slots_of(group.rank()) } else { 0..0 };
        let held: Vec<u32> = slots.map(|slot| map.expert_of(slot)).collect();
        let (experts, shared) =
            match self.moved(&held, weights).and_then(|experts| Ok((experts, self.same()?))) {
                Ok((experts, shared)) => (Ok(experts), shared),
                Err(error) => (Err(error), None),
            };
        let Asked { route, sum_order, align, slices, plan } = self.asked;
        MoeLayerBuilder {
            group,
            gate: self.gate.config().clone(),
            hidden: self.hidden,
            dtype: self.dtype,
            max_tokens: self.max_tokens,
            map: Some(map),
            route,
            sum_order,
            align,
            router: Some(self.router.clone()),
            experts,
            shared,
            losses: self.losses,
            slices,
            plan,
        }
    }

    /// These experts: those of this rank as they are, others with the weights that are given.
    fn moved(
        &self,
        experts: &[u32],
        mut given: impl FnMut(u32) -> Option<Vec<f32>>,
    ) -> Result<Box<dyn Experts>, Error> {
        let (map, rank) = (self.movers[0].expert_map(), self.movers[0].rank());
        let own = self.experts.weights();
        let mut each = own.len().checked_div(self.experts.count());
        let mut weights = Vec::new();
        for &expert in experts {
            let kept = map.slots_of(rank).position(|slot| map.expert_of(slot) == expert).zip(each);
            if let Some((nth, each)) = kept {
                weights.extend_from_slice(&own[nth * each..][..each]);
                continue;
            }
            let more = given(expert).ok_or(LayerError::NoWeights { expert })?;
            let (seen, columns) = (more.len(), *each.get_or_insert(more.len()));
            if seen != columns {
                let what = "weights of an expert";
                return Err(PlanError::WrongShape { what, seen, rows: 1, columns }.into());
            }
            weights.extend(more);
        }
        CheckedExperts { whose: ExpertKind::Routed, experts: &*self.experts }
            .with_weights(experts.len(), weights)
    }

    /// The shared expert again.
    fn same(&self) -> Result<Option<Box<dyn Experts>>, Error> {
        let shared =
            self.shared.as_deref().map(|experts| CheckedExperts { whose: ExpertKind::Shared, experts });
        shared.map(|shared| shared.with_weights(1, shared.experts.weights().to_vec())).transpose()
    }
}
