//! Memory of one device: of a pipeline stage that has most, which its ranks cut.
//!
//! | | parameters | gradients | states of the optimizer | in flight |
//! |---|---|---|---|---|
//! | plain | P | P | P | |
//! | ZeRO-1 | P | P | P / R | |
//! | ZeRO-2 | P | P / R; P with several microbatches | P / R | |
//! | ZeRO-3 | P / R | P / R | P / R | two layers: one, and the next one |
//!
//! `P` is cut by `tp`, or for experts by `ep`, and `R` is `dp x cp`, or for experts `edp`. The
//! table is that of `sidelane_parallel::data`, whose bytes are counted.

use serde::Serialize;

use super::mesh::{Mesh, Zero};
use super::transformer::{LayerParameters, Transformer};

/// Bytes of an element, by its purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Precision {
    /// Its name.
    pub name: &'static str,
    /// Of a parameter, held and gathered.
    pub parameter_bytes: u64,
    /// Of a gradient that is held.
    pub gradient_bytes: u64,
    /// Of a gradient that is reduced.
    pub sent_gradient_bytes: u64,
    /// Of the optimizer, for each parameter.
    pub state_bytes: u64,
    /// Of an activation.
    pub activation_bytes: u64,
}

impl Precision {
    /// Megatron's default in bf16: gradients in f32, and an f32 copy of parameters with the two
    /// moments of Adam.
    pub const MIXED: Precision = Precision {
        name: "mixed",
        parameter_bytes: 2,
        gradient_bytes: 4,
        sent_gradient_bytes: 4,
        state_bytes: 12,
        activation_bytes: 2,
    };
    /// That of the scaling book, 10 bytes a parameter: bf16 with two moments in f32. Gradients in
    /// bf16 are used as they come, and not held.
    pub const BOOK: Precision = Precision {
        name: "book",
        parameter_bytes: 2,
        gradient_bytes: 0,
        sent_gradient_bytes: 2,
        state_bytes: 8,
        activation_bytes: 2,
    };
    /// That of `sidelane_parallel`: all in f32.
    pub const F32: Precision = Precision {
        name: "f32",
        parameter_bytes: 4,
        gradient_bytes: 4,
        sent_gradient_bytes: 4,
        state_bytes: 8,
        activation_bytes: 4,
    };

    /// All of them.
    pub const ALL: [Precision; 3] = [Precision::MIXED, Precision::BOOK, Precision::F32];

    /// Bytes that plain data parallelism holds for a parameter.
    pub const fn held_bytes(&self) -> u64 {
        self.parameter_bytes + self.gradient_bytes + self.state_bytes
    }
}

/// The pipeline stage that has most: as many layers as any, with experts if they can have them, and
/// one end of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stage {
    pub dense_layers: u32,
    pub expert_layers: u32,
    pub dense: LayerParameters,
    pub expert: LayerParameters,
    /// Embedding, output layer, or both where there is one stage.
    pub ends: u64,
}

impl Stage {
    pub fn of(model: &Transformer, pp: u32) -> Self {
        let layers = model.layers.div_ceil(pp);
        let expert_layers = layers.min(model.expert_layers());
        let ends = if pp == 1 && !model.tied { 2 } else { 1 };
        Stage {
            dense_layers: layers - expert_layers,
            expert_layers,
            dense: model.dense_layer().unwrap_or_default(),
            expert: model.expert_layer().unwrap_or_default(),
            ends: ends * model.embedding_parameters(),
        }
    }

    /// Parameters that tensor parallelism cuts.
    pub fn common(&self) -> u64 {
        self.sum(|layer| layer.common) + self.ends
    }

    /// Parameters of routed experts.
    pub fn experts(&self) -> u64 {
        self.sum(|layer| layer.experts)
    }

    /// Of the layers, what one token multiplies with.
    pub fn active(&self) -> u64 {
        self.sum(|layer| layer.common + layer.chosen)
    }

    fn sum(&self, of: impl Fn(&LayerParameters) -> u64) -> u64 {
        u64::from(self.dense_layers) * of(&self.dense) + u64::from(self.expert_layers) * of(&self.expert)
    }
}

/// Bytes of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Parameters.
    pub parameters_bytes: u64,
    /// Gradients.
    pub gradients_bytes: u64,
    /// States of the optimizer.
    pub states_bytes: u64,
    /// Layers that ZeRO-3 has gathered.
    pub in_flight_bytes: u64,
    /// Activations kept for the backward pass, of all microbatches in flight.
    pub activations_bytes: u64,
}

impl Memory {
    /// Of a step of so many tokens.
    pub fn of(model: &Transformer, mesh: &Mesh, precision: &Precision, tokens: u64, recompute: bool) -> Self {
        let (stage, shape) = (Stage::of(model, mesh.shape.pp), &mesh.shape);
        let cut = |of: &dyn Fn(u64) -> u64, common: u64, experts: u64, shards: [u64; 2]| {
            of(common.div_ceil(u64::from(shape.tp)).div_ceil(shards[0]))
                + of(experts.div_ceil(u64::from(shape.ep)).div_ceil(shards[1]))
        };
        let whole = [1, 1];
        let copies = [shape.copies(), shape.expert_copies()].map(u64::from);
        let from = |least: Zero| if mesh.zero >= least { copies } else { whole };
        let all = |bytes: u64, shards| {
            cut(&|parameters| parameters * bytes, stage.common(), stage.experts(), shards)
        };
        let layer = |of: LayerParameters| {
            cut(&|parameters| parameters * precision.parameter_bytes, of.common, of.experts, whole)
        };
        let gathered = match mesh.zero {
            Zero::Zero3 => {
                let experts = stage.expert_layers.min(2);
                let dense = stage.dense_layers.min(2 - experts);
                u64::from(experts) * layer(stage.expert) + u64::from(dense) * layer(stage.dense)
            }
            _ => 0,
        };
        // ZeRO-2 adds up a device's own gradients until the last microbatch, and sends their sum.
        let gradients_cut = if mesh.microbatches > 1 { Zero::Zero3 } else { Zero::Zero2 };
        Memory {
            parameters_bytes: all(precision.parameter_bytes, from(Zero::Zero3)),
            gradients_bytes: all(precision.gradient_bytes, from(gradients_cut)),
            states_bytes: all(precision.state_bytes, from(Zero::Zero1)),
            in_flight_bytes: gathered,
            activations_bytes: activations(model, &stage, mesh, tokens, recompute)
                .saturating_mul(precision.activation_bytes),
        }
    }

    /// All of it.
    pub fn total_bytes(&self) -> u64 {
        let Memory { parameters_bytes, gradients_bytes, states_bytes, in_flight_bytes, activations_bytes } =
            self;
        [parameters_bytes, gradients_bytes, states_bytes, in_flight_bytes, activations_bytes]
            .into_iter()
            .fold(0, |sum: u64, &bytes| sum.saturating_add(bytes))
    }
}

/// Elements that a device keeps for the backward pass, as in the scaling book: inputs of a layer's
/// MLP and outputs of its first two products, `D + 2 F`. Attention is computed again, and logits
/// are left out. Tensor parallel ranks cut `F`. Rows of experts are those of the tokens that a rank
/// dispatches, with as many inputs as choices. Under full recomputation inputs alone are kept, and
/// one layer whole.
fn activations(model: &Transformer, stage: &Stage, mesh: &Mesh, tokens: u64, recompute: bool) -> u64 {
    let shape = &mesh.shape;
    let ranks = u64::from(shape.copies()) * u64::from(mesh.microbatches);
    let (tokens, tp) = (tokens.div_ceil(ranks), u64::from(shape.tp));
    let hidden = u64::from(model.hidden);
    let width = |ffn: u32| 2 * u64::from(ffn);
    let dense = model.ffn.map_or(0, |ffn| hidden + width(ffn).div_ceil(tp));
    let experts = model.experts.map_or(0, |experts| {
        let rows = u64::from(experts.top_k) * (hidden + width(experts.ffn));
        hidden + (rows + width(experts.shared_ffn)).div_ceil(tp)
    });
    let (dense_layers, expert_layers) = (u64::from(stage.dense_layers), u64::from(stage.expert_layers));
    // 1F1B: the first stage holds as many microbatches as there are stages.
    let in_flight = u64::from(shape.pp.min(mesh.microbatches));
    match recompute {
        false => tokens.saturating_mul(in_flight * (dense_layers * dense + expert_layers * experts)),
        true => {
            let whole = if expert_layers > 0 { experts } else { dense };
            tokens.saturating_mul(in_flight * (dense_layers + expert_layers) * hidden + whole)
        }
    }
}
