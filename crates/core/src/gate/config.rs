//! Configuration of a router, as data: every difference between training systems is a field.
//!
//! ```text
//!   logits [T,E] --noise--> --score--> s [T,E] --(+ bias), groups--> choices [T,K] --normalise, scale--> weights [T,K]
//!                                                                         |
//!                                    capacity, drop, slots  <-------------+
//! ```

use serde::{Deserialize, Serialize};

/// A router. The arrays it works on: logits `[T, experts]`, choices `[T, top_k]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GateConfig {
    /// Experts, at most 2^20.
    pub experts: u32,
    /// Choices per token.
    pub top_k: u32,
    /// From logits to scores.
    pub score: ScoreFunction,
    /// Which experts a token chooses.
    pub select: Select,
    /// Noise on the logits.
    pub noise: Noise,
    /// How a second choice is thinned out.
    pub second: SecondExpertPolicy,
    /// Whether the weights of a token are divided by their sum.
    pub normalise: Normalize,
    /// Factor on all weights, above 0 (Megatron's `moe_router_topk_scaling_factor`, which ignores
    /// 0; DeepSeek's `routed_scaling_factor`).
    pub scaling: f32,
    /// Room per expert, and which choices are dropped; `None`: dropless.
    pub capacity: Option<Capacity>,
}

/// Function from logits to scores. Scores choose, and become the weights of the chosen experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScoreFunction {
    /// Softmax over all experts, then the choice.
    Softmax,
    /// The choice by logits, then softmax over the chosen.
    SoftmaxOfChosen,
    /// Logistic function of each logit.
    Sigmoid,
    /// Square root of softplus of each logit.
    SqrtSoftplus,
}

/// Which experts a token chooses: always by falling score (plus bias, where there is one); of equal
/// ones, the first. Scores are compared exactly where they stand alone, and in f32 with a bias or
/// in groups.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Select {
    /// The best of all.
    Best,
    /// The best of the best groups (DeepSeek's node-limited routing).
    Groups {
        /// Groups of `experts / count` experts.
        count: u32,
        /// Groups that are kept.
        kept: u32,
        /// Score of a group.
        by: GroupScore,
    },
    /// The best after Sinkhorn's balancing of tokens against experts; while not training, the best.
    /// Weights come from the scores as otherwise (Megatron: sigmoid for top-1, softmax otherwise).
    Sinkhorn {
        /// Mean change of the experts' factors at which the iteration ends.
        tolerance: f32,
    },
}

/// Score of a group of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// The sum of its best so many (Megatron: `top_k / kept`; DeepSeek-V3: 2).
    SumOfBest(u32),
    /// Its best (DeepSeek-V2).
    Best,
}

/// Noise, while training alone unless it says otherwise. Jitter of the router's *input* is a
/// separate function, applied before the logits are computed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Noise {
    /// None.
    None,
    /// Gumbel noise on all logits for the choice alone: experts are sampled, weights are those of
    /// the clean logits (DeepSpeed top-1 `RSample`).
    Gumbel,
    /// The first choice is the best; the others are sampled with Gumbel noise among what is left,
    /// also while evaluating (DeepSpeed top-2; GShard `sampling`).
    GumbelAfterFirst,
    /// Logits times a factor drawn from 1 - eps to 1 + eps (Switch as in FastMoE).
    Jitter {
        /// Largest relative change.
        eps: f32,
    },
    /// Normal noise added to the logits, for choice and weights (Tutel: `gate_noise / experts`;
    /// where the caller brings a standard deviation per logit, times that: Shazeer's noisy gate).
    Normal {
        /// Standard deviation.
        deviation: f32,
    },
}

/// How a token's second choice, of two, is thinned out while training, before the capacity applies.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SecondExpertPolicy {
    /// All are kept.
    All,
    /// Kept with probability min(1, weight / threshold) (GShard: weights normalised, threshold
    /// 0.5).
    Random {
        /// Weight from which on it is always kept.
        threshold: f32,
    },
}

/// Whether and when the weights of a token are divided by their sum.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Normalize {
    /// Never.
    Never,
    /// Over all choices, before any is dropped.
    BeforeDrop(Divisor),
    /// Over the choices that are left.
    AfterDrop(Divisor),
}

/// What weights are divided by, so that nothing is divided by zero.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Divisor {
    /// Their sum plus this (Megatron: 1e-20; a top-1 weight stays as it is).
    SumPlus(f32),
    /// Their sum, or this if it is larger (DeepSpeed, Tutel: the epsilon of f32).
    SumAtLeast(f32),
}

/// Room per expert and local group of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    /// The formula.
    pub rule: CapacityRule,
    /// Never less than this; where it is taken, it is taken as it is, aligned or not.
    pub minimum: u32,
    /// Rounded up to a multiple of this; 1 for none.
    pub align: u32,
    /// Choices that are kept.
    pub keep: DropPolicy,
    /// Local groups: equal consecutive parts of the tokens, each with a capacity of its own; 1 for
    /// all together.
    pub groups: u32,
    /// Whether every expert gets exactly `capacity` rows, the unused ones zero: drop-and-pad.
    pub pad: bool,
}

/// Formulas of capacity: S tokens of the group, E experts, K choices.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CapacityRule {
    /// `ceil(S * K / E * factor)` in f64 (Megatron).
    CeilF64 {
        /// Capacity factor.
        factor: f64,
    },
    /// `ceil((S / E) * (factor * K))` in f32 (DeepSpeed).
    CeilF32 {
        /// Capacity factor.
        factor: f64,
    },
    /// `trunc(S * factor / E)` (GShard, Switch: the factor includes the choices).
    Trunc {
        /// Capacity factor.
        factor: f64,
    },
    /// `K * trunc(factor * ceil(S / E))`; 0: as many as needed; below 0: as many as needed, but at
    /// most that of its absolute value (Tutel).
    Tutel {
        /// Capacity factor.
        factor: f64,
    },
    /// So many.
    Rows {
        /// Rows.
        rows: u32,
    },
    /// As many as the fullest expert needs: nothing is dropped. The largest need of other ranks can
    /// be given with the call (DeepSpeed `drop_tokens=False`).
    Needed,
}

/// Choices that are kept where an expert is full. Slots are numbered without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DropPolicy {
    /// The highest weights, before dropping; of equal ones, the first token. Slots in token order
    /// (Megatron and DeepSpeed `probs`).
    Score,
    /// The first tokens, whichever choice it is. Slots in token order (Megatron and DeepSpeed
    /// `position`).
    Position,
    /// All first choices in token order, then all second ones. Slots in that order (DeepSpeed
    /// top-2, GShard, Tutel).
    FirstChoices,
    /// As `FirstChoices`, but tokens come by falling highest score, before weights are normalised
    /// (Tutel's batch-prioritised routing).
    Priority,
    /// Drawn at random, also while evaluating. Slots in token order (DeepSpeed's random token
    /// selection).
    Random,
}
