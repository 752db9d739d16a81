//! Routers of well-known systems and models, as data.

use std::fmt;
use std::str::FromStr;

use super::{
    Capacity, CapacityRule, Divisor, DropPolicy, GateConfig, GroupScore, Noise, Normalize, ScoreFunction,
    SecondExpertPolicy, Select, check,
};
use crate::error::GateError;

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
    /// DeepSpeed's `top2gating`: the second expert is sampled, weights are renormalised after
    /// dropping, at least 4 rows. `top_k` is 2. Like DeepSpeed, it samples also while evaluating;
    /// its `top2_2nd_expert_sampling=False` is no noise.
    DeepspeedTop2,
    /// DeepSpeed's `topkgating`: the highest scores are kept, weights are renormalised after
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
    /// Tutel's `top_k_routing`: weights normalised before dropping, first choices first, capacity
    /// factor 1.
    Tutel,
    /// DeepSeek-V3: sigmoid, bias for the choice, 4 of 8 groups by the sum of their best two,
    /// weights times 2.5, dropless.
    DeepseekV3,
    /// Mixtral: softmax of the chosen, dropless.
    Mixtral,
    /// Qwen3's MoE models: softmax of all, normalised (`norm_topk_prob`), dropless.
    Qwen3,
    /// OLMoE: softmax of all, not normalised, dropless.
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
            Some(1) => check::number("top_k", top_k, 1..=1, "1 for this preset")?,
            Some(_) => check::number("top_k", top_k, 2..=2, "2 for this preset")?,
            None => {}
        }
        let config = self.data(GateConfig {
            experts,
            top_k,
            score: ScoreFunction::Softmax,
            select: Select::Best,
            noise: Noise::None,
            second: SecondExpertPolicy::All,
            normalise: Normalize::Never,
            scaling: 1.0,
            capacity: None,
        });
        config.check()?;
        Ok(config)
    }

    /// What differs from a dropless softmax of all.
    fn data(self, all: GateConfig) -> GateConfig {
        let at_least = Divisor::SumAtLeast(f32::EPSILON);
        let rows = |rule, keep| Some(Capacity { rule, minimum: 0, align: 1, keep, groups: 1, pad: false });
        let four =
            |keep| rows(CapacityRule::CeilF32 { factor: 1.0 }, keep).map(|c| Capacity { minimum: 4, ..c });
        match self {
            Preset::Megatron if all.top_k == 1 => all,
            Preset::Megatron | Preset::Mixtral => GateConfig { score: ScoreFunction::SoftmaxOfChosen, ..all },
            Preset::DeepspeedTop1 => GateConfig { capacity: four(DropPolicy::Random), ..all },
            Preset::DeepspeedTop2 => GateConfig {
                noise: Noise::GumbelAfterFirst,
                normalise: Normalize::AfterDrop(at_least),
                capacity: four(DropPolicy::FirstChoices),
                ..all
            },
            Preset::DeepspeedTopk => GateConfig {
                normalise: Normalize::AfterDrop(at_least),
                capacity: four(DropPolicy::Score),
                ..all
            },
            Preset::Gshard => GateConfig {
                second: SecondExpertPolicy::Random { threshold: 0.5 },
                normalise: Normalize::BeforeDrop(Divisor::SumPlus(1e-9)),
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
                normalise: if all.top_k == 1 { Normalize::Never } else { Normalize::BeforeDrop(at_least) },
                capacity: rows(CapacityRule::Tutel { factor: 1.0 }, DropPolicy::FirstChoices),
                ..all
            },
            Preset::DeepseekV3 => GateConfig {
                score: ScoreFunction::Sigmoid,
                select: Select::Groups { count: 8, kept: 4, by: GroupScore::SumOfBest(2) },
                normalise: Normalize::BeforeDrop(Divisor::SumPlus(1e-20)),
                scaling: 2.5,
                ..all
            },
            // A single weight becomes 1, unlike Megatron's.
            Preset::Qwen3 => GateConfig { normalise: Normalize::BeforeDrop(at_least), ..all },
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
