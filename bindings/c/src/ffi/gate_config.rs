//! Configuration of a router, as numbers: each field of Rust's `GateConfig`, flattened.

use std::ffi::c_char;

use sidelane::gate::{
    Capacity, CapacityRule, Divisor, DropPolicy, GateConfig, GroupScore, Noise, Normalize, Preset,
    ScoreFunction, SecondExpertPolicy, Select,
};

use super::border;
use super::memory::text;
use super::versioned::{OutStruct, versioned};
use crate::Status;
use crate::fault::{ArgumentError, Fault};
use crate::words::{UNNUMBERED, choice, number, switch};

/// Softmax over all experts, then the choice.
pub const SIDELANE_SCORE_SOFTMAX: u32 = 0;
/// The choice by logits, then softmax over the chosen.
pub const SIDELANE_SCORE_SOFTMAX_OF_CHOSEN: u32 = 1;
/// Logistic function of each logit.
pub const SIDELANE_SCORE_SIGMOID: u32 = 2;
/// Square root of softplus of each logit.
pub const SIDELANE_SCORE_SQRT_SOFTPLUS: u32 = 3;

/// A token chooses the best of all experts.
pub const SIDELANE_SELECT_BEST: u32 = 0;
/// The best of the best groups: `groups`, `groups_kept`, `group_best`.
pub const SIDELANE_SELECT_GROUPS: u32 = 1;
/// The best after Sinkhorn's balancing: `tolerance`.
pub const SIDELANE_SELECT_SINKHORN: u32 = 2;

/// No noise.
pub const SIDELANE_NOISE_NONE: u32 = 0;
/// Gumbel noise on all logits for the choice alone.
pub const SIDELANE_NOISE_GUMBEL: u32 = 1;
/// The first choice is the best; the others are sampled among what is left.
pub const SIDELANE_NOISE_GUMBEL_AFTER_FIRST: u32 = 2;
/// Logits times a factor drawn from 1 - `noise_size` to 1 + `noise_size`.
pub const SIDELANE_NOISE_JITTER: u32 = 3;
/// Normal noise with a standard deviation of `noise_size`.
pub const SIDELANE_NOISE_NORMAL: u32 = 4;

/// Weights are not divided by their sum.
pub const SIDELANE_NORMALIZE_NEVER: u32 = 0;
/// Over all choices, before any is dropped.
pub const SIDELANE_NORMALIZE_BEFORE_DROP: u32 = 1;
/// Over the choices that are left.
pub const SIDELANE_NORMALIZE_AFTER_DROP: u32 = 2;

/// Weights are divided by their sum plus `divisor_value`.
pub const SIDELANE_DIVISOR_SUM_PLUS: u32 = 0;
/// Weights are divided by their sum, or by `divisor_value` if that is larger.
pub const SIDELANE_DIVISOR_SUM_AT_LEAST: u32 = 1;

/// Dropless.
pub const SIDELANE_CAPACITY_NONE: u32 = 0;
/// ceil(S * K / E * factor) in f64 (Megatron).
pub const SIDELANE_CAPACITY_CEIL_F64: u32 = 1;
/// ceil((S / E) * (factor * K)) in f32 (DeepSpeed).
pub const SIDELANE_CAPACITY_CEIL_F32: u32 = 2;
/// trunc(S * factor / E) (GShard, Switch).
pub const SIDELANE_CAPACITY_TRUNC: u32 = 3;
/// K * trunc(factor * ceil(S / E)); 0: as needed; below 0: as needed, but at most that of its
/// absolute value (Tutel).
pub const SIDELANE_CAPACITY_TUTEL: u32 = 4;
/// `capacity_rows`.
pub const SIDELANE_CAPACITY_ROWS: u32 = 5;
/// As many as the fullest expert needs.
pub const SIDELANE_CAPACITY_NEEDED: u32 = 6;

/// The highest weights are kept.
pub const SIDELANE_DROP_SCORE: u32 = 0;
/// The first tokens are kept.
pub const SIDELANE_DROP_POSITION: u32 = 1;
/// All first choices in token order, then all second ones.
pub const SIDELANE_DROP_FIRST_CHOICES: u32 = 2;
/// As SIDELANE_DROP_FIRST_CHOICES, but tokens come by falling highest score.
pub const SIDELANE_DROP_PRIORITY: u32 = 3;
/// Drawn at random.
pub const SIDELANE_DROP_RANDOM: u32 = 4;

/// A router, as data. Begin with a preset (sidelane_gate_preset()) and change what differs.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterConfig {
    /// sizeof(sidelane_gate_config_t).
    pub size: usize,
    /// Experts, at most 2^20.
    pub experts: u32,
    /// Choices per token.
    pub top_k: u32,
    /// From logits to scores: SIDELANE_SCORE_...
    pub score: u32,
    /// Which experts a token chooses: SIDELANE_SELECT_...
    pub select: u32,
    /// Groups of experts / groups experts.
    pub groups: u32,
    /// Groups that are kept.
    pub groups_kept: u32,
    /// A group is worth the sum of its best so many; 0: its best.
    pub group_best: u32,
    /// Of Sinkhorn: mean change at which the iteration ends.
    pub tolerance: f32,
    /// Noise on the logits: SIDELANE_NOISE_...
    pub noise: u32,
    /// Its size.
    pub noise_size: f32,
    /// Above 0: a second choice is kept with probability min(1, weight / this) while training.
    pub second_threshold: f32,
    /// When weights are divided by their sum: SIDELANE_NORMALIZE_...
    pub normalize: u32,
    /// By what: SIDELANE_DIVISOR_...
    pub divisor: u32,
    /// And with which number.
    pub divisor_value: f32,
    /// Factor on all weights, above 0.
    pub scaling: f32,
    /// Room per expert: SIDELANE_CAPACITY_...
    pub capacity: u32,
    /// Capacity factor.
    pub capacity_factor: f64,
    /// Rows, for SIDELANE_CAPACITY_ROWS.
    pub capacity_rows: u32,
    /// Never less than this.
    pub capacity_minimum: u32,
    /// Rounded up to a multiple of this; 1 for none.
    pub capacity_align: u32,
    /// Local groups: equal parts of the tokens with a capacity each; 1 for all together.
    pub capacity_groups: u32,
    /// Choices that a full expert keeps: SIDELANE_DROP_...
    pub drop_policy: u32,
    /// 1: every expert gets exactly its capacity in rows, unused ones zero.
    pub pad: u32,
}
versioned!(RouterConfig, "sidelane_gate_config_t", pad: u32);

/// The router of a system or model: megatron, deepspeed_top1, deepspeed_top2, deepspeed_topk,
/// gshard, switch, tutel, deepseek_v3, mixtral, qwen3, olmoe.
///
/// The caller guarantees: `preset` is NULL or a text; `config` is NULL, or as large as its size
/// says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_gate_preset(
    preset: *const c_char,
    experts: u32,
    top_k: u32,
    config: *mut RouterConfig,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let (out, preset) = unsafe { (OutStruct::new(config)?, text("preset", preset)?) };
        let preset: Preset = preset.parse().map_err(ArgumentError::from)?;
        out.write((&preset.config(experts, top_k)?).into());
        Ok(())
    })
}

pub(super) const SCORES: [(u32, ScoreFunction); 4] = [
    (SIDELANE_SCORE_SOFTMAX, ScoreFunction::Softmax),
    (SIDELANE_SCORE_SOFTMAX_OF_CHOSEN, ScoreFunction::SoftmaxOfChosen),
    (SIDELANE_SCORE_SIGMOID, ScoreFunction::Sigmoid),
    (SIDELANE_SCORE_SQRT_SOFTPLUS, ScoreFunction::SqrtSoftplus),
];

const DROP_POLICIES: [(u32, DropPolicy); 5] = [
    (SIDELANE_DROP_SCORE, DropPolicy::Score),
    (SIDELANE_DROP_POSITION, DropPolicy::Position),
    (SIDELANE_DROP_FIRST_CHOICES, DropPolicy::FirstChoices),
    (SIDELANE_DROP_PRIORITY, DropPolicy::Priority),
    (SIDELANE_DROP_RANDOM, DropPolicy::Random),
];

impl TryFrom<&RouterConfig> for GateConfig {
    type Error = Fault;

    fn try_from(flat: &RouterConfig) -> Result<GateConfig, Fault> {
        let by = if flat.group_best == 0 { GroupScore::Best } else { GroupScore::SumOfBest(flat.group_best) };
        let selects = [
            (SIDELANE_SELECT_BEST, Select::Best),
            (SIDELANE_SELECT_GROUPS, Select::Groups { count: flat.groups, kept: flat.groups_kept, by }),
            (SIDELANE_SELECT_SINKHORN, Select::Sinkhorn { tolerance: flat.tolerance }),
        ];
        let size = flat.noise_size;
        let noises = [
            (SIDELANE_NOISE_NONE, Noise::None),
            (SIDELANE_NOISE_GUMBEL, Noise::Gumbel),
            (SIDELANE_NOISE_GUMBEL_AFTER_FIRST, Noise::GumbelAfterFirst),
            (SIDELANE_NOISE_JITTER, Noise::Jitter { eps: size }),
            (SIDELANE_NOISE_NORMAL, Noise::Normal { deviation: size }),
        ];
        let value = flat.divisor_value;
        let divisors = [
            (SIDELANE_DIVISOR_SUM_PLUS, Divisor::SumPlus(value)),
            (SIDELANE_DIVISOR_SUM_AT_LEAST, Divisor::SumAtLeast(value)),
        ];
        let divisor = choice("divisor", flat.divisor, &divisors, "a number of SIDELANE_DIVISOR_...")?;
        let normalizes = [
            (SIDELANE_NORMALIZE_NEVER, Normalize::Never),
            (SIDELANE_NORMALIZE_BEFORE_DROP, Normalize::BeforeDrop(divisor)),
            (SIDELANE_NORMALIZE_AFTER_DROP, Normalize::AfterDrop(divisor)),
        ];
        let second = match flat.second_threshold {
            0.0 => SecondExpertPolicy::All,
            threshold => SecondExpertPolicy::Random { threshold },
        };
        Ok(GateConfig::new(flat.experts, flat.top_k)
            .with_score(choice("score", flat.score, &SCORES, "a number of SIDELANE_SCORE_...")?)
            .with_select(choice("select", flat.select, &selects, "a number of SIDELANE_SELECT_...")?)
            .with_noise(choice("noise", flat.noise, &noises, "a number of SIDELANE_NOISE_...")?)
            .with_second(second)
            .with_normalize(choice(
                "normalize",
                flat.normalize,
                &normalizes,
                "a number of SIDELANE_NORMALIZE_...",
            )?)
            .with_scaling(flat.scaling)
            .with_capacity(flat.room()?))
    }
}

impl RouterConfig {
    fn room(&self) -> Result<Option<Capacity>, Fault> {
        let factor = self.capacity_factor;
        let rules = [
            (SIDELANE_CAPACITY_NONE, None),
            (SIDELANE_CAPACITY_CEIL_F64, Some(CapacityRule::CeilF64 { factor })),
            (SIDELANE_CAPACITY_CEIL_F32, Some(CapacityRule::CeilF32 { factor })),
            (SIDELANE_CAPACITY_TRUNC, Some(CapacityRule::Trunc { factor })),
            (SIDELANE_CAPACITY_TUTEL, Some(CapacityRule::Tutel { factor })),
            (SIDELANE_CAPACITY_ROWS, Some(CapacityRule::Rows { rows: self.capacity_rows })),
            (SIDELANE_CAPACITY_NEEDED, Some(CapacityRule::Needed)),
        ];
        let rule = choice("capacity", self.capacity, &rules, "a number of SIDELANE_CAPACITY_...")?;
        let drop_policy =
            choice("drop_policy", self.drop_policy, &DROP_POLICIES, "a number of SIDELANE_DROP_...")?;
        let pad = switch("pad", self.pad)?;
        let (minimum, align, groups) = (self.capacity_minimum, self.capacity_align, self.capacity_groups);
        Ok(rule.map(|rule| {
            let capacity = Capacity::new(rule, drop_policy).with_minimum(minimum).with_align(align);
            capacity.with_groups(groups).with_pad(pad)
        }))
    }
}

impl From<&GateConfig> for RouterConfig {
    fn from(config: &GateConfig) -> RouterConfig {
        let (select, groups, groups_kept, group_best, tolerance) = match config.select {
            Select::Best => (SIDELANE_SELECT_BEST, 0, 0, 0, 0.0),
            Select::Groups { count, kept, by } => {
                let best = match by {
                    GroupScore::Best => 0,
                    GroupScore::SumOfBest(best) => best,
                    _ => UNNUMBERED,
                };
                (SIDELANE_SELECT_GROUPS, count, kept, best, 0.0)
            }
            Select::Sinkhorn { tolerance } => (SIDELANE_SELECT_SINKHORN, 0, 0, 0, tolerance),
            _ => (UNNUMBERED, 0, 0, 0, 0.0),
        };
        let (noise, noise_size) = match config.noise {
            Noise::None => (SIDELANE_NOISE_NONE, 0.0),
            Noise::Gumbel => (SIDELANE_NOISE_GUMBEL, 0.0),
            Noise::GumbelAfterFirst => (SIDELANE_NOISE_GUMBEL_AFTER_FIRST, 0.0),
            Noise::Jitter { eps } => (SIDELANE_NOISE_JITTER, eps),
            Noise::Normal { deviation } => (SIDELANE_NOISE_NORMAL, deviation),
            _ => (UNNUMBERED, 0.0),
        };
        let (normalize, by) = match config.normalize {
            Normalize::Never => (SIDELANE_NORMALIZE_NEVER, Divisor::SumPlus(0.0)),
            Normalize::BeforeDrop(by) => (SIDELANE_NORMALIZE_BEFORE_DROP, by),
            Normalize::AfterDrop(by) => (SIDELANE_NORMALIZE_AFTER_DROP, by),
            _ => (UNNUMBERED, Divisor::SumPlus(0.0)),
        };
        let (divisor, divisor_value) = match by {
            Divisor::SumPlus(value) => (SIDELANE_DIVISOR_SUM_PLUS, value),
            Divisor::SumAtLeast(value) => (SIDELANE_DIVISOR_SUM_AT_LEAST, value),
            _ => (UNNUMBERED, 0.0),
        };
        let (capacity, capacity_factor, capacity_rows) = match config.capacity.map(|capacity| capacity.rule) {
            None => (SIDELANE_CAPACITY_NONE, 0.0, 0),
            Some(CapacityRule::CeilF64 { factor }) => (SIDELANE_CAPACITY_CEIL_F64, factor, 0),
            Some(CapacityRule::CeilF32 { factor }) => (SIDELANE_CAPACITY_CEIL_F32, factor, 0),
            Some(CapacityRule::Trunc { factor }) => (SIDELANE_CAPACITY_TRUNC, factor, 0),
            Some(CapacityRule::Tutel { factor }) => (SIDELANE_CAPACITY_TUTEL, factor, 0),
            Some(CapacityRule::Rows { rows }) => (SIDELANE_CAPACITY_ROWS, 0.0, rows),
            Some(CapacityRule::Needed) => (SIDELANE_CAPACITY_NEEDED, 0.0, 0),
            Some(_) => (UNNUMBERED, 0.0, 0),
        };
        let room = config.capacity;
        RouterConfig {
            size: 0,
            experts: config.experts,
            top_k: config.top_k,
            score: number(&SCORES, &config.score),
            select,
            groups,
            groups_kept,
            group_best,
            tolerance,
            noise,
            noise_size,
            second_threshold: match config.second {
                SecondExpertPolicy::All => 0.0,
                SecondExpertPolicy::Random { threshold } => threshold,
                // No number: refused when it comes back.
                _ => f32::NAN,
            },
            normalize,
            divisor,
            divisor_value,
            scaling: config.scaling,
            capacity,
            capacity_factor,
            capacity_rows,
            capacity_minimum: room.map_or(0, |room| room.minimum),
            capacity_align: room.map_or(0, |room| room.align),
            capacity_groups: room.map_or(0, |room| room.groups),
            drop_policy: room.map_or(0, |room| number(&DROP_POLICIES, &room.drop_policy)),
            pad: room.map_or(0, |room| room.pad.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_comes_back_from_its_numbers_as_it_was() {
        for preset in Preset::ALL {
            let config = preset.config(16, preset.fixed_top_k().unwrap_or(4)).unwrap();
            let back = GateConfig::try_from(&RouterConfig::from(&config)).unwrap();
            assert_eq!(back, config, "{preset}");
        }
    }
}
