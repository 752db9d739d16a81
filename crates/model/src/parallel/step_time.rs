//! Time of a step on a mesh, part by part.
//!
//! ```text
//!   a microbatch, on one device of the stage that has most        forward                backward
//!     compute    products at the peak                             2 P tokens             4 P tokens, 6 P if all is recomputed
//!     tensor     each block, per token of the group               2 gathers of D         2 gathers of D
//!     context    ring attention: keys, values to the next rank    (cp-1) KV              2 (cp-1) KV + KV
//!     expert     dispatch and combine, by the time model          both                   both gradients
//!     sends      activations to the next stage                    D / tp                 D / tp
//!   once a step, or (*) in each microbatch
//!     data       plain                                            -                      2 s W
//!                ZeRO-1                                           s W                    2 s W
//!                ZeRO-2                                           s W                    s W
//!                ZeRO-3                                           s W *                  2 s W *
//!     update     the optimizer reads and writes its states at the rate of the memory
//!     bubble     (pp-1) / microbatches of all that comes in each microbatch
//! ```
//!
//! `s = (R-1)/R` of a group of `R` ranks. Data parallel bytes are those of `sidelane_parallel`,
//! whose communicators count. ZeRO-1 and 2 gather parameters next to the following forward pass.
//! Over several nodes a gather has two legs, which run at the same time: each rank gets its part of
//! the other nodes by its NIC, and all parts of its node by links.
//!
//! Left out: latencies of collectives, norms, softmax, the loss, and stages that are smaller than
//! others.

use serde::Serialize;

use super::device_rates::{Devices, Fabric};
use super::dispatch::LayerTransfers;
use super::memory::{Precision, Stage};
use super::mesh::{Mesh, Span, Zero};
use super::search::Question;

/// Transfers that run while the device computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Overlap {
    /// None: all parts one after another.
    None,
    /// Those of data parallelism, next to the compute. The next layer needs all others.
    Data,
    /// All, as the rooflines of the scaling book have it.
    All,
}

impl Overlap {
    /// All of them.
    pub const ALL: [Overlap; 3] = [Overlap::None, Overlap::Data, Overlap::All];

    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Overlap::None => "none",
            Overlap::Data => "data",
            Overlap::All => "all",
        }
    }
}

/// Part that takes longer than the compute of its pass, by the largest factor. A pipeline has both
/// passes: its bubble and its sends are held against the compute of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// None does: products bind.
    Compute,
    /// Gathers of parameters, sums of gradients: too few tokens per device.
    Data,
    /// Activations of cut layers: too many ways for their width.
    Tensor,
    /// Keys and values of other ranks.
    Context,
    /// Dispatch and combine.
    Expert,
    /// Idle stages, or activations between them: too few microbatches.
    Pipeline,
}

impl Bound {
    /// All of them.
    pub const ALL: [Bound; 6] =
        [Bound::Compute, Bound::Data, Bound::Tensor, Bound::Context, Bound::Expert, Bound::Pipeline];

    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Bound::Compute => "compute",
            Bound::Data => "data",
            Bound::Tensor => "tensor",
            Bound::Context => "context",
            Bound::Expert => "expert",
            Bound::Pipeline => "pipeline",
        }
    }
}

/// Bytes that one device receives in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Received {
    /// For data parallelism.
    pub data_bytes: f64,
    /// For tensor parallelism.
    pub tensor_bytes: f64,
    /// For context parallelism.
    pub context_bytes: f64,
    /// By dispatches and combines, or sent by them, as the time model counts them.
    pub expert_bytes: f64,
    /// From other pipeline stages.
    pub sends_bytes: f64,
}

/// Seconds of all forward passes of a step, or of all backward passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Pass {
    /// Products at the peak.
    pub compute_s: f64,
    /// Transfers of data parallelism.
    pub data_s: f64,
    /// Transfers of tensor parallelism.
    pub tensor_s: f64,
    /// Transfers of context parallelism.
    pub context_s: f64,
    /// Dispatch and combine.
    pub expert_s: f64,
    /// Activations between pipeline stages.
    pub sends_s: f64,
    /// Of the compute, that which data parallel transfers can overlap with.
    pub window_s: f64,
}

/// A step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Step {
    /// All of it.
    pub step_s: f64,
    /// Forward passes.
    pub forward: Pass,
    /// Backward passes.
    pub backward: Pass,
    /// Idle pipeline stages.
    pub bubble_s: f64,
    /// The optimizer.
    pub update_s: f64,
    /// The part that binds.
    pub bound: Bound,
    /// Bytes.
    pub received: Received,
}

/// Seconds on links and on NICs, at the same time.
#[derive(Clone, Copy, Debug, Default)]
struct Wires {
    bytes: f64,
    link_s: f64,
    nic_s: f64,
}

impl Wires {
    fn seconds(self) -> f64 {
        self.link_s.max(self.nic_s)
    }

    fn times(self, factor: f64) -> Wires {
        let Wires { bytes, link_s, nic_s } = self;
        Wires { bytes: factor * bytes, link_s: factor * link_s, nic_s: factor * nic_s }
    }

    fn and(self, other: Wires) -> Wires {
        Wires {
            bytes: self.bytes + other.bytes,
            link_s: self.link_s + other.link_s,
            nic_s: self.nic_s + other.nic_s,
        }
    }
}

/// An all-gather of so many bytes in all, or a reduce-scatter.
fn gather(devices: &Devices, group: Span, axes: u32, bytes: f64) -> Wires {
    let [size, local, nodes] = [group.size, group.local, group.nodes()].map(f64::from);
    Wires {
        bytes: bytes * (size - 1.0) / size,
        link_s: bytes * (local - 1.0) / local / (devices.link_rate * f64::from(axes)),
        nic_s: bytes / local * (nodes - 1.0) / nodes / devices.nic_rate,
    }
}

/// Bytes to the next rank of a ring: one rank of a node sends them to another node.
fn shift(devices: &Devices, group: Span, bytes: f64) -> Wires {
    match (group.size, group.nodes()) {
        (1, _) => Wires::default(),
        (_, 1) => Wires { bytes, link_s: bytes / devices.link_rate, nic_s: 0.0 },
        _ => Wires { bytes, link_s: 0.0, nic_s: bytes / devices.nic_rate },
    }
}

/// Transfers of a pass.
#[derive(Clone, Copy, Debug, Default)]
struct Transfers {
    data: Wires,
    tensor: Wires,
    context: Wires,
    sends: Wires,
    expert_s: f64,
    /// Experts' transfers leave the node.
    expert_crosses: bool,
}

impl Transfers {
    /// Seconds if all run at once. Groups of a torus have wires of their own; behind a switch they
    /// share a device's link.
    fn at_once(&self, fabric: Fabric) -> f64 {
        let Transfers { data, tensor, context, sends, expert_s, expert_crosses } = *self;
        let all = [data, tensor, context, sends];
        match fabric {
            Fabric::Torus { .. } => all.map(Wires::seconds).into_iter().fold(expert_s, f64::max),
            Fabric::Switch => {
                let mut sum = all.into_iter().fold(Wires::default(), Wires::and);
                *(if expert_crosses { &mut sum.nic_s } else { &mut sum.link_s }) += expert_s;
                sum.seconds()
            }
        }
    }

    fn pass(&self, compute_s: f64, window_s: f64) -> Pass {
        Pass {
            compute_s,
            data_s: self.data.seconds(),
            tensor_s: self.tensor.seconds(),
            context_s: self.context.seconds(),
            expert_s: self.expert_s,
            sends_s: self.sends.seconds(),
            window_s,
        }
    }
}

impl Pass {
    /// Compute, and what the next layer needs.
    fn in_turn_s(&self) -> f64 {
        self.compute_s + self.tensor_s + self.context_s + self.expert_s + self.sends_s
    }

    /// Data parallel transfers that last longer than the compute next to them.
    pub fn exposed_data_s(&self) -> f64 {
        (self.data_s - self.window_s).max(0.0)
    }

    /// Transfers by the compute of the pass.
    fn ratios(&self) -> [(f64, Bound); 4] {
        let compute = self.compute_s;
        [
            (self.data_s / compute, Bound::Data),
            (self.tensor_s / compute, Bound::Tensor),
            (self.context_s / compute, Bound::Context),
            (self.expert_s / compute, Bound::Expert),
        ]
    }
}

impl Step {
    /// Of a mesh, whose experts have such transfers in a layer of a microbatch.
    pub(super) fn of(question: &Question, mesh: &Mesh, experts: LayerTransfers) -> Self {
        let Question { model, devices, precision, recompute, overlap, .. } = question;
        let (shape, stage) = (&mesh.shape, Stage::of(model, mesh.shape.pp));
        let microbatches = f64::from(mesh.microbatches);
        let tokens = question.tokens as f64 / f64::from(shape.copies());
        let again = f64::from(u8::from(*recompute));

        let compute = forward_flops(question, &stage, mesh) * tokens / f64::from(shape.tp) / devices.flops;
        let [compute_f, compute_b] = [compute, compute * (2.0 + again)];
        let blocks = blocks(question, &stage);
        let experts = experts.times(f64::from(stage.expert_layers) * microbatches);

        let (data_axes, tensor_axes) = devices.axes(shape.copies() > 1, shape.tp > 1);
        let activation = model.hidden as f64 * precision.activation_bytes as f64;
        let tensor = gather(devices, shape.tensor(devices.per_node), tensor_axes, tokens * activation);
        let tensor = tensor.times(2.0 * blocks);
        let kv = model.kv_width() as f64 * precision.activation_bytes as f64 / kv_ways(question, shape.tp);
        let block = shift(devices, shape.context(devices.per_node), tokens * kv);
        let block = block.times(f64::from(stage.dense_layers + stage.expert_layers));
        let hops = f64::from(shape.cp) - 1.0;
        let sends =
            shift(devices, shape.neighbors(devices.per_node), tokens * activation / f64::from(shape.tp));
        let [data_f, data_b] = data(devices, precision, &stage, mesh, data_axes);
        let expert_crosses = shape.experts(devices.per_node).nodes() > 1;

        let forward = Transfers {
            data: data_f,
            tensor,
            context: block.times(hops),
            sends,
            expert_s: experts.forward_s,
            expert_crosses,
        };
        let backward = Transfers {
            data: data_b,
            tensor: tensor.times(1.0 + again),
            context: block.times(if shape.cp > 1 { (2.0 + again) * hops + 1.0 } else { 0.0 }),
            sends,
            expert_s: experts.backward_s + again * experts.forward_s,
            expert_crosses,
        };
        // Data parallel transfers of every microbatch overlap with all compute. Those of a step
        // overlap with the first forward pass, and with the last backward pass.
        let windows = if mesh.zero == Zero::Zero3 { 1.0 } else { microbatches };
        let passes =
            [forward.pass(compute_f, compute_f / windows), backward.pass(compute_b, compute_b / windows)];
        let idle = (f64::from(shape.pp) - 1.0) / microbatches;
        let in_turn: f64 = passes.iter().map(Pass::in_turn_s).sum();
        let (busy, bubble_s) = match overlap {
            Overlap::None => (in_turn + data_f.seconds() + data_b.seconds(), idle * in_turn),
            Overlap::Data => (in_turn + passes.iter().map(Pass::exposed_data_s).sum::<f64>(), idle * in_turn),
            Overlap::All => {
                let all = [(&forward, &passes[0]), (&backward, &passes[1])];
                let time = |(transfers, pass): (&Transfers, &Pass)| {
                    transfers.at_once(devices.fabric).max(pass.compute_s + pass.exposed_data_s())
                };
                let busy: f64 = all.map(time).into_iter().sum();
                let without = |(transfers, pass): (&Transfers, &Pass)| {
                    let others = Transfers { data: Wires::default(), ..*transfers };
                    others.at_once(devices.fabric).max(pass.compute_s)
                };
                (busy, idle * all.map(without).into_iter().sum::<f64>())
            }
        };
        let update_s = update_bytes(precision, &stage, mesh) / devices.memory_rate;
        let sum = |of: fn(&Pass) -> f64| passes.iter().map(of).sum::<f64>();
        let pipeline = (bubble_s + sum(|pass| pass.sends_s)) / sum(|pass| pass.compute_s);
        let ratios = passes.iter().flat_map(Pass::ratios).chain([(pipeline, Bound::Pipeline)]);
        let most = |most: (f64, Bound), next: (f64, Bound)| if next.0 > most.0 { next } else { most };
        let (_, bound) = ratios.fold((1.0, Bound::Compute), most);
        let both = |of: fn(&Transfers) -> Wires| of(&forward).bytes + of(&backward).bytes;
        let received = Received {
            data_bytes: both(|of| of.data),
            tensor_bytes: both(|of| of.tensor),
            context_bytes: both(|of| of.context),
            expert_bytes: (1.0 + again) * experts.forward_bytes + experts.backward_bytes,
            sends_bytes: both(|of| of.sends),
        };
        let [forward, backward] = passes;
        Step { step_s: busy + bubble_s + update_s, forward, backward, bubble_s, update_s, bound, received }
    }

    /// Share of the peak: operations that the model needs, by those that the devices could make.
    pub fn peak_share(&self, question: &Question) -> f64 {
        let model = &question.model;
        // The output layer multiplies, the embedding does not.
        let lookups = if model.tied { 0 } else { model.embedding_parameters() };
        let active = (model.active_parameters() - lookups) as f64;
        let layers = f64::from(model.layers);
        let per_token = 6.0 * active + 3.0 * layers * attention_flops(question);
        per_token * question.tokens as f64
            / (f64::from(question.count) * question.devices.flops * self.step_s)
    }
}

/// Scores and values of one token in a layer: causal, so half of the sequence on average.
fn attention_flops(question: &Question) -> f64 {
    question.model.flops_per_pair() as f64 * question.length() as f64 / 2.0
}

/// Operations of a forward pass for one token, in the stage that has most and its part of the
/// output layer.
fn forward_flops(question: &Question, stage: &Stage, mesh: &Mesh) -> f64 {
    let layers = f64::from(stage.dense_layers + stage.expert_layers);
    let output = question.model.embedding_parameters() as f64 / f64::from(mesh.shape.pp);
    2.0 * (stage.active() as f64 + output) + layers * attention_flops(question)
}

/// Blocks of a stage that tensor parallelism cuts: attention, and an MLP or a shared expert.
fn blocks(question: &Question, stage: &Stage) -> f64 {
    let shared = question.model.experts.is_some_and(|experts| experts.shared_ffn > 0);
    f64::from(2 * stage.dense_layers + (1 + u32::from(shared)) * stage.expert_layers)
}

/// Ways in which tensor parallel ranks cut keys and values: no head, and no latent row.
fn kv_ways(question: &Question, tp: u32) -> f64 {
    f64::from(question.model.kv_heads().min(tp))
}

/// Data parallel transfers of a step, forward and backward.
fn data(devices: &Devices, precision: &Precision, stage: &Stage, mesh: &Mesh, axes: u32) -> [Wires; 2] {
    let shape = &mesh.shape;
    let groups = [
        (stage.common() as f64 / f64::from(shape.tp), shape.data(devices.per_node)),
        (stage.experts() as f64 / f64::from(shape.ep), shape.expert_data(devices.per_node)),
    ];
    let all = |bytes: u64| {
        let each = groups.map(|(held, group)| gather(devices, group, axes, held * bytes as f64));
        each[0].and(each[1])
    };
    let (parameters, gradients) = (all(precision.parameter_bytes), all(precision.sent_gradient_bytes));
    let every = f64::from(mesh.microbatches);
    match mesh.zero {
        Zero::Plain => [Wires::default(), gradients.times(2.0)],
        Zero::Zero1 => [parameters, gradients.times(2.0)],
        Zero::Zero2 => [parameters, gradients],
        Zero::Zero3 => [parameters.times(every), parameters.and(gradients).times(every)],
    }
}

/// Bytes that the optimizer reads and writes: states and parameters both ways, gradients once.
fn update_bytes(precision: &Precision, stage: &Stage, mesh: &Mesh) -> f64 {
    let shape = &mesh.shape;
    let (copies, expert_copies) = match mesh.zero {
        Zero::Plain => (1, 1),
        _ => (shape.copies(), shape.expert_copies()),
    };
    let common = stage.common() as f64 / (f64::from(shape.tp) * f64::from(copies));
    let experts = stage.experts() as f64 / (f64::from(shape.ep) * f64::from(expert_copies));
    let bytes = 2 * (precision.state_bytes + precision.parameter_bytes) + precision.sent_gradient_bytes;
    (common + experts) * bytes as f64
}
