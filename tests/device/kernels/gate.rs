//! The gate on a device decides what the host's does, to the bit.

use sidelane::device::{GateArgs, LayerKernels};
use sidelane::error::DeviceError;
use sidelane::gate::{
    Divisor, GateConfig, GateInput, GroupScore, Noise, Normalize, Preset, ScoreFunction, SecondExpertPolicy,
    Select,
};
use sidelane_testkit::device::kernels::gate;

use super::buffer::Buffer;
use super::{Device, with_kernels};
use crate::rows_common::Random;

/// Gates whose kinds of scores, choices and weights differ.
fn gates() -> Vec<GateConfig> {
    let preset = |preset: Preset, experts, top_k| preset.config(experts, top_k).unwrap();
    let base = preset(Preset::Olmoe, 24, 5);
    let groups = |count, kept, by| Select::Groups { count, kept, by };
    let (more, least) = (Divisor::SumPlus(1e-20), Divisor::SumAtLeast(f32::EPSILON));
    vec![
        preset(Preset::Megatron, 8, 2),
        preset(Preset::Megatron, 9, 1),
        preset(Preset::Mixtral, 70, 64),
        preset(Preset::Qwen3, 128, 8),
        preset(Preset::Qwen3, 3, 1),
        preset(Preset::Olmoe, 33, 33),
        preset(Preset::DeepseekV3, 256, 8),
        preset(Preset::DeepseekV3, 1024, 8),
        base.clone().with_select(groups(4, 2, GroupScore::Best)).with_normalise(Normalize::AfterDrop(more)),
        base.clone().with_select(groups(1, 1, GroupScore::SumOfBest(3))).with_scaling(0.3),
        base.clone().with_select(groups(6, 3, GroupScore::SumOfBest(4))).with_score(ScoreFunction::Sigmoid),
        base.clone()
            .with_select(groups(3, 2, GroupScore::SumOfBest(2)))
            .with_score(ScoreFunction::SoftmaxOfChosen)
            .with_normalise(Normalize::BeforeDrop(least)),
        base.with_score(ScoreFunction::Sigmoid).with_normalise(Normalize::BeforeDrop(least)).with_top_k(1),
    ]
}

/// Logits with many that are equal, zeros of both signs, and extremes.
fn logits(random: &mut Random, count: usize) -> Vec<f32> {
    let any = |random: &mut Random| match random.next() % 16 {
        0 => 0.0,
        1 => -0.0,
        2..=4 => (random.next() % 5) as f32 - 2.0,
        5 => [f32::MAX, f32::MIN, 1e-40, -800.0, 90.0][random.next() as usize % 5],
        _ => (random.next() >> 40) as f32 / (1 << 20) as f32 - 8.0,
    };
    (0..count).map(|_| any(random)).collect()
}

#[test]
fn choices_and_weights_are_those_of_the_host() {
    with_kernels("kernels::gate::choices_and_weights_are_those_of_the_host", |device| {
        let (mut random, kernels) = (Random(5), LayerKernels::load(&device.context).unwrap());
        for (case, config) in gates().into_iter().enumerate() {
            let experts = config.experts as usize;
            for (tokens, limit) in [(0, None), (1, Some(1)), (19, Some(3)), (19, None)] {
                let logits = logits(&mut random, tokens * experts);
                let with_bias = random.next() % 2 == 0 && config.score != ScoreFunction::SoftmaxOfChosen;
                let bias: Vec<f32> = (0..experts).map(|_| (random.next() % 7) as f32 / 8.0 - 0.4).collect();
                let used: Vec<bool> = (0..tokens).map(|_| !random.next().is_multiple_of(5)).collect();
                let (bias, used) = (with_bias.then_some(&bias[..]), (case % 2 == 0).then_some(&used[..]));
                let call = GateInput::new(&logits).with_bias(bias).with_token_mask(used);
                gate::check(&device.bench(), &kernels.clone().max_blocks(limit), &config, &call)
                    .unwrap_or_else(|error| panic!("{config:?}, {tokens} tokens: {error}"));
            }
        }
    });
}

#[test]
fn logits_that_are_not_finite_are_reported_and_choose_nothing() {
    let test = "kernels::gate::logits_that_are_not_finite_are_reported_and_choose_nothing";
    with_kernels(test, |Device { context, stream, .. }| {
        let kernels = LayerKernels::load(context).unwrap();
        let config = Preset::Mixtral.config(4, 2).unwrap();
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let logits = Buffer::words(context, &[0.0, 1.0, 2.0, 3.0, 1.0, 2.0, bad, 4.0]);
            let (ids, weights) = (Buffer::new(context, 16), Buffer::new(context, 16));
            let status = Buffer::words(context, &[0_u32]);
            let (logits, experts) = (logits.span(), ids.span());
            let (weights, status_word) = (weights.span(), status.word());
            let args =
                GateArgs { tokens: 2, logits, bias: None, used: None, experts, weights, status: status_word };
            kernels.gate(stream, &config, &args).unwrap();
            stream.synchronize().unwrap();
            assert_eq!((ids.read::<i32>(), status.read::<u32>()), (vec![3, 2, -1, -1], vec![1]));
        }
    });
}

#[test]
fn gate_without_a_kernel_is_refused_by_name() {
    with_kernels(
        "kernels::gate::gate_without_a_kernel_is_refused_by_name",
        |Device { context, stream, .. }| {
            let kernels = LayerKernels::load(context).unwrap();
            let base = Preset::Olmoe.config(8, 2).unwrap();
            for (config, lacks) in [
                (base.clone().with_score(ScoreFunction::SqrtSoftplus), "scores by the root of softplus"),
                (base.clone().with_select(Select::Sinkhorn { tolerance: 0.1 }), "Sinkhorn's balancing"),
                (base.clone().with_noise(Noise::Gumbel), "noise"),
                (
                    base.clone().with_second(SecondExpertPolicy::Random { threshold: 0.5 }),
                    "second choices that are thinned out",
                ),
                (Preset::Switch.config(8, 1).unwrap(), "a capacity"),
                (base.clone().with_experts(1025), "more than 1024 experts"),
                (base.with_experts(100).with_top_k(65), "more than 64 choices"),
            ] {
                assert_eq!(LayerKernels::gate_lacks(&config), Some(lacks));
                let memory = Buffer::words(context, &[0_u32; 4]);
                let args = GateArgs {
                    tokens: 0,
                    logits: memory.span(),
                    bias: None,
                    used: None,
                    experts: memory.span(),
                    weights: memory.span(),
                    status: memory.word(),
                };
                let refused = kernels.gate(stream, &config, &args).unwrap_err();
                assert!(
                    matches!(refused, DeviceError::Shape { kernel: "gate", what, .. } if what == lacks),
                    "{refused}"
                );
            }
        },
    );
}
