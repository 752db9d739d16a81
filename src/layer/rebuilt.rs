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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::gate::{BalanceLoss, Preset};
    use crate::layer::moe::Plan;
    use crate::layer::router_step::Losses;
    use crate::layer::{GroupedSwiGlu, MoeLayer};
    use crate::overlap::ChunkRule;
    use crate::plan::SumOrder;
    use crate::topology::Route;
    use crate::{Dtype, World};

    /// Every setting by its name. A new one has no place here until it is named.
    fn settings(builder: &MoeLayerBuilder<'_>) -> Vec<(&'static str, String)> {
        fn text(value: &dyn std::fmt::Debug) -> String {
            format!("{value:?}")
        }
        // The group and the map are those of the caller.
        let MoeLayerBuilder {
            group: _,
            map: _,
            gate,
            hidden,
            dtype,
            max_tokens,
            route,
            sum_order,
            align,
            router,
            experts,
            shared,
            losses,
            slices,
            plan,
        } = builder;
        let Losses { balance, z } = losses;
        let Plan { chunks, groups, transfers, overlap, streams, at_once, deadline } = plan;
        vec![
            ("gate", text(gate)),
            ("hidden", text(hidden)),
            ("dtype", text(dtype)),
            ("max_tokens", text(max_tokens)),
            ("route", text(route)),
            ("sum_order", text(sum_order)),
            ("align", text(align)),
            ("router", text(router)),
            ("experts", text(&experts.as_ref().map(|experts| experts.weights().to_vec()))),
            ("shared", text(&shared.as_ref().map(|shared| shared.weights().to_vec()))),
            ("balance", text(balance)),
            ("z_loss", text(z)),
            ("slices", text(slices)),
            ("chunks", text(chunks)),
            ("expert_groups", text(groups)),
            ("transfers", text(transfers)),
            ("overlap", text(overlap)),
            ("streams", text(streams)),
            ("streams at once", text(at_once)),
            ("deadline", text(deadline)),
        ]
    }

    #[test]
    fn layer_keeps_every_setting_in_a_rebuild() {
        let world = World::threads(1).unwrap().remove(0);
        let group = world.all().unwrap();
        let experts = |count: usize, hidden: usize, value: f32| {
            let weights = vec![value; GroupedSwiGlu::values(count, hidden, 4)];
            GroupedSwiGlu::new(count, hidden, 4, weights).unwrap()
        };
        let gate = |top_k| Preset::Mixtral.config(4, top_k).unwrap();
        let plain = || MoeLayer::builder(&group, gate(1), 8, experts(4, 8, 0.5));
        let asked = || {
            let builder = MoeLayer::builder(&group, gate(2), 16, experts(4, 16, 0.25)).dtype(Dtype::F32);
            let builder =
                builder.router(vec![0.125; 64]).shared(experts(1, 16, 0.75)).align(4).max_tokens(32);
            let builder =
                builder.route(Route::Pxn).sum_order(SumOrder::Node).z_loss(0.5).chunks(4).transfers(3);
            let builder = builder.balance(BalanceLoss::of(Preset::Mixtral)).overlap(false).expert_groups(2);
            builder.streams(2, 2).deadline(Duration::from_secs(77))
        };
        let mut set = Vec::new();
        let rule = ChunkRule { call_bytes: 64, gemm_rows: 2, most: 2 };
        for is_cut_by_rule in [false, true] {
            let asked = || if is_cut_by_rule { asked().slices(rule) } else { asked() };
            let (before, default) = (settings(&asked()), settings(&plain()));
            set.extend(before.iter().zip(&default).filter(|(a, b)| a != b).map(|(a, _)| a.0));
            let layer = asked().build().unwrap();
            let map = ExpertMap::contiguous(4, 1).unwrap();
            assert_eq!(settings(&layer.rebuilt(&group, map, |_| None)), before);
        }
        let never: Vec<_> =
            settings(&plain()).into_iter().map(|(name, _)| name).filter(|name| !set.contains(name)).collect();
        assert_eq!(never, [""; 0], "this test asks for no value of theirs but the default");
    }
}
