//! Configuration of a router, as data: every difference between training systems is a field.
//!
//! It exists so that one [`Gate`](super::Gate) serves all systems: their routers differ in values
//! here, not in code. [`GateConfig::check`] finds configurations that make no sense before the
//! first call, and a [`Preset`] is the configuration of a known system or model.
//!
//! ```text
//!   logits [T,E] --noise--> --score--> s [T,E] --(+ bias), groups--> choices [T,K] --normalize, scale--> weights [T,K]
//!                                                                         |
//!                                    capacity, drop, slots  <-------------+
//! ```

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::ensure;
use super::top_k::PLACES;
use crate::error::GateError;
use crate::with_methods;

/// A router. The arrays it works on: logits `[T, experts]`, choices `[T, top_k]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
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
    pub normalize: Normalize,
    /// Factor on all weights, above 0 (Megatron's `moe_router_topk_scaling_factor`, which ignores
    /// 0; DeepSeek's `routed_scaling_factor`).
    pub scaling: f32,
    /// Room per expert, and which choices are dropped; `None`: dropless.
    pub capacity: Option<Capacity>,
}

/// Function from logits to scores. Scores choose, and become the weights of the chosen experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
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
#[non_exhaustive]
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
#[non_exhaustive]
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
#[non_exhaustive]
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
#[non_exhaustive]
pub enum SecondExpertPolicy {
    /// All are kept.
    All,
    /// Kept with probability min(1, weight / threshold) (GShard: weights normalized, threshold
    /// 0.5).
    Random {
        /// Weight from which on it is always kept.
        threshold: f32,
    },
}

/// Whether and when the weights of a token are divided by their sum.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Normalize {
    /// Never.
    Never,
    /// Over all choices, before any is dropped.
    BeforeDrop(Divisor),
    /// Over the choices that are left.
    AfterDrop(Divisor),
}

/// Divisor of weights, never zero.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Divisor {
    /// Their sum plus this (Megatron: 1e-20; a top-1 weight stays as it is).
    SumPlus(f32),
    /// Their sum, or this if it is larger (DeepSpeed, Tutel: the epsilon of f32).
    SumAtLeast(f32),
}

/// Room per expert and local group of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Capacity {
    /// The formula.
    pub rule: CapacityRule,
    /// Never less than this; where it is taken, it is taken as it is, aligned or not.
    pub minimum: u32,
    /// Rounded up to a multiple of this; 1 for none.
    pub align: u32,
    /// Choices that are kept.
    pub drop_policy: DropPolicy,
    /// Local groups: equal consecutive parts of the tokens, each with a capacity of its own; 1 for
    /// all together.
    pub groups: u32,
    /// Whether every expert gets exactly `capacity` rows, the unused ones zero: drop-and-pad.
    pub pad: bool,
}

/// Formulas of capacity: S tokens of the group, E experts, K choices.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
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
#[non_exhaustive]
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
    /// As `FirstChoices`, but tokens come by falling highest score, before weights are normalized
    /// (Tutel's batch-prioritised routing).
    Priority,
    /// Drawn at random, also while evaluating. Slots in token order (DeepSpeed's random token
    /// selection).
    Random,
}

impl GateConfig {
    /// A softmax of all experts that drops nothing: each token chooses the best, and its weights
    /// are their scores. [`check`](GateConfig::check) says whether the numbers can be used.
    pub const fn new(experts: u32, top_k: u32) -> Self {
        GateConfig {
            experts,
            top_k,
            score: ScoreFunction::Softmax,
            select: Select::Best,
            noise: Noise::None,
            second: SecondExpertPolicy::All,
            normalize: Normalize::Never,
            scaling: 1.0,
            capacity: None,
        }
    }

    with_methods! {
        with_experts(experts: u32),
        with_top_k(top_k: u32),
        with_score(score: ScoreFunction),
        with_select(select: Select),
        with_noise(noise: Noise),
        with_second(second: SecondExpertPolicy),
        with_normalize(normalize: Normalize),
        with_scaling(scaling: f32),
        with_capacity(capacity: Option<Capacity>),
    }

    /// Checks all that can be known before a call; [`Gate::new`](super::Gate::new) does.
    ///
    /// # Errors
    /// [`GateError::BadNumber`] names the first number that cannot be used, [`GateError::Conflict`]
    /// two settings that exclude each other.
    pub fn check(&self) -> Result<(), GateError> {
        number("experts", self.experts, 1..=PLACES, "1 to 2^20")?;
        number("top_k", self.top_k, 1..=self.experts, "1 to the number of experts")?;
        above_zero("scaling", self.scaling)?;
        self.select.check(self)?;
        self.noise.check(self)?;
        if let SecondExpertPolicy::Random { threshold } = self.second {
            above_zero("threshold", threshold)?;
            number("top_k", self.top_k, 2..=2, "2 where second choices are thinned out")?;
        }
        if let Some(capacity) = &self.capacity {
            capacity.check()?;
        }
        match self.normalize {
            Normalize::BeforeDrop(divisor) | Normalize::AfterDrop(divisor) => divisor.check(),
            Normalize::Never => Ok(()),
        }
    }
}

impl Capacity {
    /// Room by this formula, as it is, for all tokens together.
    pub const fn new(rule: CapacityRule, drop_policy: DropPolicy) -> Self {
        Capacity { rule, minimum: 0, align: 1, drop_policy, groups: 1, pad: false }
    }

    with_methods! {
        with_rule(rule: CapacityRule),
        with_minimum(minimum: u32),
        with_align(align: u32),
        with_drop_policy(drop_policy: DropPolicy),
        with_groups(groups: u32),
        with_pad(pad: bool),
    }
}

impl Select {
    fn check(self, config: &GateConfig) -> Result<(), GateError> {
        match self {
            Select::Best => Ok(()),
            Select::Groups { count, kept, by } => {
                number("groups", count, 1..=config.experts, "1 to the number of experts")?;
                let divides = config.experts.is_multiple_of(count);
                ensure(divides, "groups", count.into(), "a divisor of the number of experts")?;
                let size = config.experts / count;
                number("kept groups", kept, 1..=count, "1 to the number of groups")?;
                number(
                    "top_k",
                    config.top_k,
                    1..=kept * size,
                    "at most the experts of the groups that are kept",
                )?;
                let GroupScore::SumOfBest(n) = by else { return Ok(()) };
                number("best of a group", n, 1..=size, "1 to the size of a group")
            }
            Select::Sinkhorn { tolerance } => above_zero("tolerance", tolerance),
        }
    }
}

impl Noise {
    fn check(self, config: &GateConfig) -> Result<(), GateError> {
        match self {
            Noise::Jitter { eps } => share("eps", eps)?,
            Noise::Normal { deviation } => at_least_zero("deviation", deviation)?,
            _ => {}
        }
        if self != Noise::None && matches!(config.select, Select::Sinkhorn { .. }) {
            return conflict("noise", "Sinkhorn", "the balancing takes the logits as they are");
        }
        if self.samples() && config.select != Select::Best {
            return conflict("Gumbel noise", "groups", "it samples from all experts");
        }
        if self.samples() && matches!(config.score, ScoreFunction::Sigmoid | ScoreFunction::SqrtSoftplus) {
            return conflict("Gumbel noise", "sigmoid or sqrt-softplus", "it samples from a softmax");
        }
        Ok(())
    }
}

impl Divisor {
    fn check(self) -> Result<(), GateError> {
        match self {
            Divisor::SumPlus(more) => at_least_zero("sum plus", more),
            Divisor::SumAtLeast(least) => above_zero("sum at least", least),
        }
    }
}

pub(super) fn conflict(one: &'static str, other: &'static str, why: &'static str) -> Result<(), GateError> {
    Err(GateError::Conflict { one, other, why })
}

/// A count within bounds.
fn number(
    parameter: &'static str,
    seen: u32,
    bounds: std::ops::RangeInclusive<u32>,
    expected: &'static str,
) -> Result<(), GateError> {
    ensure(bounds.contains(&seen), parameter, seen.into(), expected)
}

fn above_zero(parameter: &'static str, seen: f32) -> Result<(), GateError> {
    ensure(seen.is_finite() && seen > 0.0, parameter, seen.into(), "a finite number above 0")
}

fn at_least_zero(parameter: &'static str, seen: f32) -> Result<(), GateError> {
    ensure(seen.is_finite() && seen >= 0.0, parameter, seen.into(), "0 or more")
}

/// A number from 0 to 1.
pub(super) fn share(parameter: &'static str, seen: f32) -> Result<(), GateError> {
    ensure((0.0..=1.0).contains(&seen), parameter, seen.into(), "0 to 1")
}

/// A system or a model whose router is known. Settings of the system have its default values here;
/// change the [`GateConfig`] to set others.
///
/// ```
/// use sidelane_core::gate::{Gate, Preset};
/// let preset: Preset = "deepseek_v3".parse()?;
/// let mut config = preset.config(256, 8)?;
/// config.scaling = 1.0;
/// Gate::new(config)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Preset {
    /// Megatron-Core's `TopKRouter` by default: softmax of the chosen (top-1: of all), dropless.
    Megatron,
    /// DeepSpeed's `top1gating` as its `MoE` layer calls it: random token selection, also while
    /// evaluating, at least 4 rows. Its `use_rts=False` is [`DropPolicy::Position`]. `top_k` is 1.
    DeepspeedTop1,
    /// DeepSpeed's `top2gating`: the second expert is sampled, weights are renormalized after
    /// dropping, at least 4 rows. `top_k` is 2. Like DeepSpeed, it samples also while evaluating;
    /// its `top2_2nd_expert_sampling=False` is no noise.
    DeepspeedTop2,
    /// DeepSpeed's `topkgating`: the highest scores are kept, weights are renormalized after
    /// dropping, at least 4 rows.
    DeepspeedTopk,
    /// GShard's algorithm 1 (Lepikhin and others, 2020): the second expert is kept at random by its
    /// weight, twice the even share of rows, a multiple of 4 as in the authors' code. `top_k` is 2.
    /// One local group: set `capacity.groups`.
    Gshard,
    /// Switch Transformer (Fedus and others, 2021): one expert, a quarter more than the even share
    /// of rows. Its jitter of the input is [`jitter`](super::jitter()), with an eps of 0.01.
    /// `top_k` is 1.
    Switch,
    /// Tutel's `top_k_routing`: weights normalized before dropping, first choices first, capacity
    /// factor 1.
    Tutel,
    /// DeepSeek-V3: sigmoid, bias for the choice, 4 of 8 groups by the sum of their best two,
    /// weights times 2.5, dropless.
    DeepseekV3,
    /// Mixtral: softmax of the chosen, dropless.
    Mixtral,
    /// Qwen3's MoE models: softmax of all, normalized (`norm_topk_prob`), dropless.
    Qwen3,
    /// OLMoE: softmax of all, not normalized, dropless.
    Olmoe,
}

/// A name that no preset has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{seen}` is no preset: megatron, deepspeed_top1, deepspeed_top2, deepspeed_topk, gshard, switch, tutel, \
     deepseek_v3, mixtral, qwen3, olmoe"
)]
pub struct PresetError {
    /// The given text.
    pub seen: String,
}

impl Preset {
    /// All of them.
    pub const ALL: [Preset; 11] = [
        Preset::Megatron,
        Preset::DeepspeedTop1,
        Preset::DeepspeedTop2,
        Preset::DeepspeedTopk,
        Preset::Gshard,
        Preset::Switch,
        Preset::Tutel,
        Preset::DeepseekV3,
        Preset::Mixtral,
        Preset::Qwen3,
        Preset::Olmoe,
    ];

    /// The name, as it is parsed.
    pub const fn name(self) -> &'static str {
        match self {
            Preset::Megatron => "megatron",
            Preset::DeepspeedTop1 => "deepspeed_top1",
            Preset::DeepspeedTop2 => "deepspeed_top2",
            Preset::DeepspeedTopk => "deepspeed_topk",
            Preset::Gshard => "gshard",
            Preset::Switch => "switch",
            Preset::Tutel => "tutel",
            Preset::DeepseekV3 => "deepseek_v3",
            Preset::Mixtral => "mixtral",
            Preset::Qwen3 => "qwen3",
            Preset::Olmoe => "olmoe",
        }
    }

    /// Choices per token, where the system knows no other number.
    pub const fn fixed_top_k(self) -> Option<u32> {
        match self {
            Preset::DeepspeedTop1 | Preset::Switch => Some(1),
            Preset::DeepspeedTop2 | Preset::Gshard => Some(2),
            _ => None,
        }
    }

    /// The router for so many experts and choices per token.
    ///
    /// # Errors
    /// [`GateError::BadNumber`] if `top_k` is not the one that the system knows, and whatever
    /// [`GateConfig::check`] finds: DeepSeek-V3 needs a multiple of 8 experts, for example.
    pub fn config(self, experts: u32, top_k: u32) -> Result<GateConfig, GateError> {
        match self.fixed_top_k() {
            Some(1) => number("top_k", top_k, 1..=1, "1 for this preset")?,
            Some(_) => number("top_k", top_k, 2..=2, "2 for this preset")?,
            None => {}
        }
        let config = self.data(GateConfig::new(experts, top_k));
        config.check()?;
        Ok(config)
    }

    /// Differences from a dropless softmax of all.
    fn data(self, all: GateConfig) -> GateConfig {
        let at_least = Divisor::SumAtLeast(f32::EPSILON);
        let rows = |rule, keep| Some(Capacity::new(rule, keep));
        let four =
            |keep| rows(CapacityRule::CeilF32 { factor: 1.0 }, keep).map(|c| Capacity { minimum: 4, ..c });
        match self {
            Preset::Megatron if all.top_k == 1 => all,
            Preset::Megatron | Preset::Mixtral => GateConfig { score: ScoreFunction::SoftmaxOfChosen, ..all },
            Preset::DeepspeedTop1 => GateConfig { capacity: four(DropPolicy::Random), ..all },
            Preset::DeepspeedTop2 => GateConfig {
                noise: Noise::GumbelAfterFirst,
                normalize: Normalize::AfterDrop(at_least),
                capacity: four(DropPolicy::FirstChoices),
                ..all
            },
            Preset::DeepspeedTopk => GateConfig {
                normalize: Normalize::AfterDrop(at_least),
                capacity: four(DropPolicy::Score),
                ..all
            },
            Preset::Gshard => GateConfig {
                second: SecondExpertPolicy::Random { threshold: 0.5 },
                normalize: Normalize::BeforeDrop(Divisor::SumPlus(1e-9)),
                capacity: rows(CapacityRule::Trunc { factor: 2.0 }, DropPolicy::FirstChoices)
                    .map(|c| Capacity { align: 4, ..c }),
                ..all
            },
            Preset::Switch => GateConfig {
                capacity: rows(CapacityRule::Trunc { factor: 1.25 }, DropPolicy::Position),
                ..all
            },
            Preset::Tutel => GateConfig {
                // A single weight stays as it is.
                normalize: if all.top_k == 1 { Normalize::Never } else { Normalize::BeforeDrop(at_least) },
                capacity: rows(CapacityRule::Tutel { factor: 1.0 }, DropPolicy::FirstChoices),
                ..all
            },
            Preset::DeepseekV3 => GateConfig {
                score: ScoreFunction::Sigmoid,
                select: Select::Groups { count: 8, kept: 4, by: GroupScore::SumOfBest(2) },
                normalize: Normalize::BeforeDrop(Divisor::SumPlus(1e-20)),
                scaling: 2.5,
                ..all
            },
            // A single weight becomes 1, unlike Megatron's.
            Preset::Qwen3 => GateConfig { normalize: Normalize::BeforeDrop(at_least), ..all },
            Preset::Olmoe => all,
        }
    }
}

impl FromStr for Preset {
    type Err = PresetError;

    fn from_str(text: &str) -> Result<Self, PresetError> {
        let found = Preset::ALL.into_iter().find(|preset| preset.name() == text);
        found.ok_or_else(|| PresetError { seen: text.to_owned() })
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
