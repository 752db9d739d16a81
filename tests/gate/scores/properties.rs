//! Scores, weights and choices against f64, for any shape and scale.

use proptest::prelude::*;
use sidelane::gate::{Divisor, Gate, GateConfig, GateInput, GroupScore, Normalize, ScoreFunction, Select};

use super::{plain, scores, ulps};

fn scores_of(score: ScoreFunction, logits: &[f32]) -> Vec<f64> {
    let all = logits.iter().map(|&x| f64::from(x));
    match score {
        ScoreFunction::Softmax | ScoreFunction::SoftmaxOfChosen => {
            let top = all.clone().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = all.clone().map(|x| (x - top).exp()).sum();
            all.map(|x| (x - top).exp() / sum).collect()
        }
        ScoreFunction::Sigmoid => all.map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
        ScoreFunction::SqrtSoftplus => all.map(|x| (x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt()).collect(),
        other => unreachable!("{other:?}"),
    }
}

fn weights_of(config: &GateConfig, logits: &[f32], ids: &[i32]) -> Vec<f64> {
    let chosen: Vec<f64> = if config.score == ScoreFunction::SoftmaxOfChosen {
        scores_of(config.score, &ids.iter().map(|&id| logits[id as usize]).collect::<Vec<_>>())
    } else {
        let all = scores_of(config.score, logits);
        ids.iter().map(|&id| all[id as usize]).collect()
    };
    let sum: f64 = chosen.iter().sum();
    let divisor = match config.normalise {
        Normalize::Never => 1.0,
        Normalize::BeforeDrop(Divisor::SumPlus(_)) if ids.len() == 1 => 1.0,
        Normalize::BeforeDrop(Divisor::SumPlus(more)) | Normalize::AfterDrop(Divisor::SumPlus(more)) => {
            sum + f64::from(more)
        }
        Normalize::BeforeDrop(Divisor::SumAtLeast(least))
        | Normalize::AfterDrop(Divisor::SumAtLeast(least)) => sum.max(f64::from(least)),
        other => unreachable!("{other:?}"),
    };
    chosen.iter().map(|score| score / divisor * f64::from(config.scaling)).collect()
}

/// The best `k` by a stable sort.
fn best(keys: &[f32], k: usize) -> Vec<i32> {
    let mut order: Vec<i32> = (0..keys.len() as i32).collect();
    order.sort_by(|&a, &b| keys[b as usize].partial_cmp(&keys[a as usize]).unwrap());
    order.truncate(k);
    order
}

/// Choices of a token with these scores, plus bias.
fn choices(config: &GateConfig, mut keys: Vec<f32>) -> Vec<i32> {
    if let Select::Groups { count, kept, by } = config.select {
        let size = keys.len() / count as usize;
        let worth: Vec<f32> = keys
            .chunks(size)
            .map(|group| {
                let n = match by {
                    GroupScore::Best => 1,
                    GroupScore::SumOfBest(n) => n as usize,
                    other => unreachable!("{other:?}"),
                };
                best(group, n).iter().map(|&at| group[at as usize]).sum()
            })
            .collect();
        let kept = best(&worth, kept as usize);
        for (at, key) in keys.iter_mut().enumerate() {
            if !kept.contains(&((at / size) as i32)) {
                *key = f32::NEG_INFINITY;
            }
        }
    }
    best(&keys, config.top_k as usize)
}

fn normalise() -> impl Strategy<Value = Normalize> {
    prop_oneof![
        Just(Normalize::Never),
        Just(Normalize::BeforeDrop(Divisor::SumPlus(1e-20))),
        Just(Normalize::BeforeDrop(Divisor::SumPlus(0.0))),
        Just(Normalize::BeforeDrop(Divisor::SumAtLeast(f32::EPSILON))),
        Just(Normalize::AfterDrop(Divisor::SumAtLeast(f32::EPSILON))),
    ]
}

fn configs() -> impl Strategy<Value = GateConfig> {
    let score = prop_oneof![
        Just(ScoreFunction::Softmax),
        Just(ScoreFunction::SoftmaxOfChosen),
        Just(ScoreFunction::Sigmoid),
        Just(ScoreFunction::SqrtSoftplus),
    ];
    let best = (1u32..=256, 1u32..=8).prop_map(|(experts, k)| (experts, k.min(experts), Select::Best));
    let groups = (1u32..=8, 1u32..=32, 1u32..=8, 1u32..=8, 0u32..4).prop_map(|(count, size, kept, k, n)| {
        let kept = kept.min(count);
        let by = if n == 0 { GroupScore::Best } else { GroupScore::SumOfBest(n.min(size)) };
        (count * size, k.min(kept * size), Select::Groups { count, kept, by })
    });
    (score, prop_oneof![best, groups], normalise(), prop_oneof![Just(1.0f32), Just(2.5), 0.01f32..100.0])
        .prop_map(|(score, (experts, top_k, select), normalise, scaling)| {
            let config = plain(experts, top_k).with_score(score).with_select(select);
            config.with_normalise(normalise).with_scaling(scaling)
        })
}

/// A router and its logits: of any scale, with few different values or with many.
fn cases() -> impl Strategy<Value = (GateConfig, Vec<f32>)> {
    let scale = prop_oneof![Just(1e-3f32), Just(1.0), Just(10.0), Just(80.0), Just(300.0)];
    (configs(), 0usize..300, scale, any::<u64>(), any::<bool>()).prop_map(
        |(config, tokens, scale, seed, ties)| {
            let numbers = super::numbers(seed, tokens * config.experts as usize);
            let step = |x: f32| if ties { (x * 4.0).round() / 4.0 } else { x };
            (config, numbers.into_iter().map(|x| step(x) * scale).collect())
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn scores_and_weights_are_within_two_ulps_of_f64((config, logits) in cases()) {
        let (experts, k) = (config.experts as usize, config.top_k as usize);
        let mut gate = Gate::new(config.clone()).unwrap();
        let call = GateInput::new(&logits);
        let scores = scores(&config, &call);
        let decision = gate.route(&call).unwrap();
        prop_assert_eq!(decision.tokens() as usize, logits.len() / experts);
        for (token, logits) in logits.chunks(experts).enumerate() {
            let ids = &decision.experts()[token * k..][..k];
            for (&weight, expected) in decision.weights()[token * k..][..k].iter().zip(weights_of(&config, logits, ids)) {
                prop_assert!(ulps(weight, expected as f32) <= 2, "{weight:e}, not {expected:e}");
            }
            for (&score, expected) in scores[token * experts..][..experts].iter().zip(scores_of(config.score, logits)) {
                prop_assert!(ulps(score, expected as f32) <= 2, "{score:e}, not {expected:e}");
            }
        }
    }

    #[test]
    fn choices_are_the_best_in_falling_order_and_ties_go_to_the_first(
        (config, logits) in cases(), biased in any::<bool>(), seed in any::<u64>(),
    ) {
        let (experts, k) = (config.experts as usize, config.top_k as usize);
        let biased = biased && config.score != ScoreFunction::SoftmaxOfChosen;
        let bias = biased.then(|| super::numbers(seed, experts));
        let mut gate = Gate::new(config.clone()).unwrap();
        let call = GateInput::new(&logits).with_bias(bias.as_deref());
        let scores = scores(&config, &call);
        let decision = gate.route(&call).unwrap();
        for (token, logits) in logits.chunks(experts).enumerate() {
            let by_logits = config.score == ScoreFunction::SoftmaxOfChosen || config.select == Select::Best && !biased;
            let scores = &scores[token * experts..][..experts];
            let keys = match &bias {
                Some(bias) => scores.iter().zip(bias).map(|(score, bias)| score + bias).collect(),
                None if by_logits => logits.to_vec(),
                None => scores.to_vec(),
            };
            prop_assert_eq!(&decision.choices()[token * k..][..k], &choices(&config, keys)[..]);
        }
    }

    /// Keys that rough numbers cannot distinguish, among others: steps from a few ulps to a tenth,
    /// and biases of any size.
    #[test]
    fn keys_that_lie_close_together_are_compared_exactly(
        seed in any::<u64>(), steps in prop::collection::vec(-8i32..0, 1..20), size in 0usize..4, grouped in any::<bool>(),
    ) {
        let select = Select::Groups { count: 8, kept: 4, by: GroupScore::SumOfBest(2) };
        let select = if grouped { select } else { Select::Best };
        let config = plain(256, 8).with_score(ScoreFunction::Sigmoid).with_select(select);
        let steps = steps.iter().flat_map(|&step| [10f32.powi(step); 256]);
        let numbers = super::numbers(seed, steps.clone().count());
        let logits: Vec<f32> = steps.zip(numbers).map(|(step, x)| 1.0 + (x * 8.0).round() * step).collect();
        let bias: Vec<f32> =
            super::numbers(!seed, 256).iter().map(|x| (x * 4.0).round() * [0.0, 1e-6, 0.5, 1e5][size]).collect();
        let call = GateInput::new(&logits).with_bias(Some(&bias));
        let scores = scores(&config, &call);
        let mut gate = Gate::new(config.clone()).unwrap();
        let decision = gate.route(&call).unwrap();
        for (scores, chosen) in scores.chunks(256).zip(decision.choices().chunks(8)) {
            let keys = scores.iter().zip(&bias).map(|(score, bias)| score + bias).collect();
            prop_assert_eq!(chosen, &choices(&config, keys)[..]);
        }
    }

    #[test]
    fn a_token_is_decided_alike_in_any_company((config, logits) in cases(), seed in any::<u64>()) {
        let (experts, k) = (config.experts as usize, config.top_k as usize);
        let mut gate = Gate::new(config).unwrap();
        let all = gate.route(&GateInput::new(&logits)).unwrap().clone();
        if all.tokens() > 0 {
            let token = (seed % u64::from(all.tokens())) as usize;
            let call = GateInput::new(&logits[token * experts..][..experts]);
            let alone = gate.route(&call).unwrap();
            prop_assert_eq!(alone.experts(), &all.experts()[token * k..][..k]);
            let bits = |weights: &[f32]| weights.iter().map(|weight| weight.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(alone.weights()), bits(&all.weights()[token * k..][..k]));
        }
    }

    #[test]
    fn dropless_choices_all_have_places((config, logits) in cases()) {
        let mut gate = Gate::new(config.clone()).unwrap();
        let decision = gate.route(&GateInput::new(&logits).with_training(true)).unwrap();
        prop_assert!(decision.dropped().all(|dropped| !dropped));
        prop_assert_eq!(decision.dropped_tokens().count(), 0);
        prop_assert_eq!(decision.counts_before(), decision.counts_after());
        prop_assert_eq!(decision.counts_after().iter().sum::<u32>() as usize, decision.experts().len());
        let mut next = vec![0; config.experts as usize];
        for (&id, &slot) in decision.experts().iter().zip(decision.slots()) {
            prop_assert_eq!(slot, next[id as usize]);
            next[id as usize] += 1;
        }
        let fullest = next.into_iter().max().unwrap_or(0) as u32;
        prop_assert_eq!((decision.capacity(), decision.required()), (fullest, fullest));
    }
}
