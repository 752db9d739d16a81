//! One layer, as every rank builds it, and the results of a step.

use half::{bf16, f16};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sidelane::gate::{BalanceLoss, GateConfig, Preset};
use sidelane::layer::{Gradients, GroupedSwiGlu, Input, MoeLayer, MoeLayerBuilder};
use sidelane::plan::ExpertMap;
use sidelane::topology::Route;
use sidelane::{Element, World};

use crate::support::{To, on_ranks, small};

pub const HIDDEN: usize = 8;
pub const FFN: usize = 12;
pub const EXPERTS: u32 = 5;
pub const TOP_K: u32 = 2;
pub const COEFFICIENT: f32 = 0.05;
pub const Z: f32 = 0.02;

/// How a step is cut and carried out; results must not know.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    pub chunks: u32,
    pub groups: u32,
    pub transfers: u32,
    pub overlap: bool,
    pub streams: u32,
    pub at_once: u32,
    pub align: u32,
}

pub const WHOLE: Cut =
    Cut { chunks: 1, groups: 1, transfers: 2, overlap: false, streams: 1, at_once: 1, align: 1 };

#[derive(Clone, Debug)]
pub struct Case {
    /// Rank r is on node `nodes[r]`, and has `tokens[r]` tokens.
    pub nodes: Vec<u32>,
    pub tokens: Vec<usize>,
    pub map: ExpertMap,
    pub route: Route,
    pub gate: GateConfig,
    /// Whether there are losses on the logits.
    pub losses: bool,
    pub cut: Cut,
}

/// A rank's results of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen<E> {
    pub out: Vec<E>,
    pub gradients: Gradients<E>,
    pub losses: [f32; 2],
}

pub trait Real: Element + Into<f32> + PartialEq + std::fmt::Debug {}
impl Real for f32 {}
impl Real for bf16 {}
impl Real for f16 {}

pub fn values(seed: u64, count: usize, size: f32) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| (rng.random::<f32>() * 2.0 - 1.0) * size).collect()
}

pub fn rounded<E>(values: Vec<f32>) -> Vec<E>
where
    f32: To<E>,
{
    values.into_iter().map(To::to).collect()
}

/// Softmax of all, the best two, divided by their sum.
pub fn gate() -> GateConfig {
    Preset::Qwen3.config(EXPERTS, TOP_K).unwrap()
}

pub fn balance() -> BalanceLoss {
    BalanceLoss::of(Preset::Qwen3).with_coefficient(COEFFICIENT)
}

pub fn router() -> Vec<f32> {
    values(1, HIDDEN * EXPERTS as usize, 1.5)
}

/// Of one expert.
pub fn weights_of(expert: u32) -> Vec<f32> {
    values(100 + u64::from(expert), GroupedSwiGlu::values(1, HIDDEN, FFN), 0.6)
}

pub fn swiglu(experts: impl IntoIterator<Item = u32>) -> GroupedSwiGlu {
    let weights: Vec<Vec<f32>> = experts.into_iter().map(weights_of).collect();
    GroupedSwiGlu::new(weights.len(), HIDDEN, FFN, weights.concat()).unwrap()
}

/// That all tokens pass.
pub const SHARED: u32 = 50;

/// Tokens, residual, and the gradient of the output, of one rank.
pub fn tensors<E>(rank: usize, tokens: usize) -> [Vec<E>; 3]
where
    f32: To<E>,
{
    [10, 11, 12].map(|seed| rounded(values(seed * 1000 + rank as u64, tokens * HIDDEN, 1.0)))
}

impl Case {
    pub fn new(nodes: &[u32], tokens: &[usize], cut: Cut) -> Case {
        let map = ExpertMap::contiguous(EXPERTS, nodes.len() as u32).unwrap();
        let (nodes, tokens) = (nodes.to_vec(), tokens.to_vec());
        Case { nodes, tokens, map, route: Route::Direct, gate: gate(), losses: true, cut }
    }

    /// The experts of a rank.
    pub fn held(&self, rank: u32) -> Vec<u32> {
        self.map.slots_of(rank).map(|slot| self.map.expert_of(slot)).collect()
    }

    pub fn layer<E: Element>(&self, world: &World) -> MoeLayer {
        let group = world.all().unwrap();
        let experts = swiglu(self.held(world.rank()));
        let builder = MoeLayer::builder(&group, self.gate.clone(), HIDDEN, experts).dtype(E::DTYPE);
        self.cut(builder).build().unwrap()
    }

    pub fn cut<'g>(&self, builder: MoeLayerBuilder<'g>) -> MoeLayerBuilder<'g> {
        let Cut { chunks, groups, transfers, overlap, streams, at_once, align } = self.cut;
        let builder = if self.losses { builder.balance(balance()).z_loss(Z) } else { builder };
        builder
            .router(router())
            .shared(swiglu([SHARED]))
            .expert_map(self.map.clone())
            .route(self.route)
            .max_tokens(64)
            .chunks(chunks)
            .expert_groups(groups)
            .transfers(transfers)
            .overlap(overlap)
            .streams(streams, at_once)
            .align(align)
    }

    /// One step on all ranks.
    pub fn step<E: Real>(&self) -> Vec<Seen<E>>
    where
        f32: To<E>,
    {
        on_ranks(&self.nodes, &small(), |world| {
            let rank = world.rank() as usize;
            let [x, residual, of_out] = tensors::<E>(rank, self.tokens[rank]);
            let mut layer = self.layer::<E>(&world);
            let seen = step(&mut layer, &x, &residual, &of_out);
            drop(layer);
            world.all().unwrap().gather(&[]).unwrap();
            assert_eq!(world.pool().report().used, 0, "what was kept is given back");
            seen
        })
    }
}

pub fn step<E: Real>(layer: &mut MoeLayer, x: &[E], residual: &[E], of_out: &[E]) -> Seen<E> {
    let input = Input::new(x).with_residual(Some(residual));
    let (out, tape) = layer.forward(&input).unwrap();
    let losses = [tape.balance_loss(), tape.z_loss()];
    let gradients = layer.backward(tape, of_out).unwrap();
    Seen { out, gradients, losses }
}
