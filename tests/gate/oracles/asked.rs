//! From a case, in the words of the system that is its oracle, to our configuration: a preset, and
//! its changes.

use sidelane::error::GateError;
use sidelane::gate::{
    Capacity, CapacityRule, Decision, Divisor, DropPolicy, Gate, GateConfig, GateInput, GroupScore, Noise,
    Normalize, Preset, ScoreFunction, Select,
};

use super::case::{Case, Noised, Room, Scored};
use super::draw;

/// Our configuration of a case. Noise is none: both sides are given the same numbers instead.
pub fn config(case: &Case) -> GateConfig {
    let preset: Preset = case.preset.parse().expect("a preset");
    let mut config = preset.config(case.experts, case.top_k).expect("a configuration");
    config.noise = Noise::None;
    if let Some(score) = case.score {
        let divided = matches!(score, Scored::Sigmoid | Scored::SqrtSoftplus) && !case.sinkhorn;
        config.normalize =
            if divided { Normalize::BeforeDrop(Divisor::SumPlus(1e-20)) } else { Normalize::Never };
        config.score = match score {
            Scored::Softmax => ScoreFunction::Softmax,
            Scored::SoftmaxOfChosen => ScoreFunction::SoftmaxOfChosen,
            Scored::Sigmoid => ScoreFunction::Sigmoid,
            Scored::SqrtSoftplus => ScoreFunction::SqrtSoftplus,
        };
    }
    if let Some(scaling) = case.scaling {
        config.scaling = scaling;
    }
    if let Some((count, kept, best)) = case.groups {
        config.select = Select::Groups { count, kept, by: GroupScore::SumOfBest(best) };
    }
    if case.sinkhorn {
        config.select = Select::Sinkhorn { tolerance: 1e-4 };
    }
    if let Some(room) = case.capacity {
        config.capacity = Some(capacity(&room, config.capacity));
    }
    config
}

/// Megatron's preset is dropless: what its capacity is like stands here.
fn capacity(room: &Room, preset: Option<Capacity>) -> Capacity {
    let megatron = CapacityRule::CeilF64 { factor: room.factor };
    let preset = preset.unwrap_or(Capacity::new(megatron, room.keep).with_pad(room.pad));
    let rule = match preset.rule {
        _ if room.needed => CapacityRule::Needed,
        CapacityRule::CeilF32 { .. } => CapacityRule::CeilF32 { factor: room.factor },
        CapacityRule::Trunc { .. } => CapacityRule::Trunc { factor: room.factor },
        CapacityRule::Tutel { .. } => CapacityRule::Tutel { factor: room.factor },
        _ => megatron,
    };
    preset
        .with_rule(rule)
        .with_minimum(room.minimum)
        .with_align(room.align.unwrap_or(preset.align))
        .with_drop_policy(room.keep)
        .with_groups(room.local_groups.unwrap_or(1))
}

/// Capacity for given choices: random policies get the drawn numbers, of which the highest are
/// kept.
pub fn placed_by(case: &Case) -> Capacity {
    let dropless = Capacity::new(CapacityRule::Needed, DropPolicy::Position);
    let capacity = config(case).capacity.unwrap_or(dropless);
    let keep =
        if capacity.drop_policy == DropPolicy::Random { DropPolicy::Score } else { capacity.drop_policy };
    capacity.with_drop_policy(keep)
}

/// Runs our gate, and passes its decision to `read`.
///
/// Where choices are sampled, a gate without noise chooses the best by the noisy logits, and its
/// choices are replayed on the clean ones.
pub fn route<T>(case: &Case, read: impl FnOnce(&Decision) -> T) -> Result<T, GateError> {
    let config = config(case);
    let (logits, bias, used, mut replay) =
        (draw::logits(case), draw::bias(case), draw::used(case), draw::replay(case));
    let used = used.as_deref();
    if let Some(noise) = case.noise {
        let mut noisy = draw::noisy(case);
        if noise == Noised::AfterFirst {
            let mut gate = Gate::new(config.clone().with_capacity(None))?;
            let first = gate.route(&GateInput::new(&logits).with_token_mask(used))?;
            let rows = noisy.chunks_exact_mut(case.experts as usize);
            for (row, ids) in rows.zip(first.choices().chunks_exact(case.top_k as usize)) {
                row[ids[0] as usize] = f32::MAX;
            }
        }
        let sampler = config
            .clone()
            .with_score(ScoreFunction::SoftmaxOfChosen)
            .with_normalize(Normalize::Never)
            .with_capacity(None);
        let mut gate = Gate::new(sampler)?;
        replay = Some(gate.route(&GateInput::new(&noisy).with_token_mask(used))?.choices().to_vec());
    }
    let mut gate = Gate::new(config)?;
    let call = GateInput::new(&logits)
        .with_bias(bias.as_deref())
        .with_token_mask(used)
        .with_replay(replay.as_deref())
        .with_training(case.training);
    gate.route(&call).map(read)
}
