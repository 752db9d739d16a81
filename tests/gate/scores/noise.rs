//! Noise: when there is any, the same for the same draw, and distributed as it should be.

use sidelane::error::GateError;
use sidelane::gate::{
    Decision, Divisor, Gate, GateConfig, GateInput, Noise, Normalize, Preset, RngKey, ScoreFunction,
    SecondExpertPolicy,
};

use super::{numbers, plain, scores, ulps};

const DRAW: RngKey = RngKey::new(7, 3, 1);
const ALL: [Noise; 4] =
    [Noise::Gumbel, Noise::GumbelAfterFirst, Noise::Jitter { eps: 0.5 }, Noise::Normal { deviation: 1.0 }];

fn route(config: &GateConfig, logits: &[f32], training: bool, draw: RngKey) -> Decision {
    let mut gate = Gate::new(config.clone()).unwrap();
    gate.route(&GateInput::new(logits).with_training(training).with_draw(draw)).unwrap().clone()
}

#[test]
fn noise_is_drawn_while_training_and_that_of_second_choices_always() {
    let logits = numbers(1, 50 * 8);
    for noise in ALL {
        let config = plain(8, 3).with_noise(noise);
        let quiet = route(&plain(8, 3), &logits, true, DRAW);
        let (trained, evaluated) =
            (route(&config, &logits, true, DRAW), route(&config, &logits, false, DRAW));
        assert_ne!(trained.choices(), quiet.choices(), "{noise:?}");
        let same = if noise == Noise::GumbelAfterFirst { &trained } else { &quiet };
        assert_eq!(evaluated.choices(), same.choices(), "{noise:?}");
    }
}

#[test]
fn deepspeed_draws_while_evaluating_as_it_does_while_training() {
    let logits = numbers(4, 200 * 8);
    for preset in [Preset::DeepspeedTop1, Preset::DeepspeedTop2] {
        let config = preset.config(8, preset.fixed_top_k().unwrap()).unwrap();
        let (trained, evaluated) =
            (route(&config, &logits, true, DRAW), route(&config, &logits, false, DRAW));
        assert!(evaluated.dropped().any(|dropped| dropped));
        assert_eq!(evaluated.experts(), trained.experts(), "{preset}");
        let other = route(&config, &logits, false, DRAW.with_seed(8));
        assert_ne!(evaluated.experts(), other.experts(), "{preset}");
    }
}

#[test]
fn noisy_logits_are_those_by_which_is_chosen() {
    let logits = numbers(5, 50 * 8);
    for noise in [Noise::None, Noise::Gumbel, Noise::Jitter { eps: 0.5 }, Noise::Normal { deviation: 1.0 }] {
        let config = plain(8, 3).with_noise(noise);
        let call = GateInput::new(&logits).with_training(true).with_draw(DRAW);
        let mut noisy = vec![0.0; logits.len()];
        let mut gate = Gate::new(config.clone()).unwrap();
        gate.noisy_logits(&call, &mut noisy).unwrap();
        assert_eq!(noisy == logits, noise == Noise::None, "{noise:?}");
        let expected = route(&plain(8, 3), &noisy, false, DRAW);
        assert_eq!(route(&config, &logits, true, DRAW).choices(), expected.choices(), "{noise:?}");
    }
    let mut gate = Gate::new(plain(8, 3)).unwrap();
    let short = gate.noisy_logits(&GateInput::new(&logits), &mut [0.0; 8]);
    let error = GateError::WrongShape { what: "noisy logits", seen: 8, rows: 50, columns: 8 };
    assert_eq!(short, Err(error));
}

#[test]
fn a_draw_is_the_same_again_and_does_not_depend_on_the_number_of_tokens() {
    let logits = numbers(2, 50 * 8);
    for noise in ALL {
        let config = plain(8, 3).with_noise(noise);
        let all = route(&config, &logits, true, DRAW);
        let few = route(&config, &logits[..20 * 8], true, DRAW);
        assert_eq!(few.choices(), &all.choices()[..20 * 3], "{noise:?}");
        assert_eq!(few.weights(), &all.weights()[..20 * 3], "{noise:?}");
        for other in [DRAW.with_seed(8), DRAW.with_step(4), DRAW.with_rank(2)] {
            assert_ne!(route(&config, &logits, true, other).choices(), all.choices(), "{noise:?} {other:?}");
        }
    }
}

#[test]
fn gumbel_noise_moves_the_choice_and_not_the_weights() {
    let logits = numbers(3, 200 * 8);
    for (noise, kept) in [(Noise::Gumbel, 0), (Noise::GumbelAfterFirst, 1)] {
        let config = plain(8, 2).with_noise(noise);
        let decision = route(&config, &logits, true, DRAW);
        let quiet = route(&plain(8, 2), &logits, false, DRAW);
        let call = GateInput::new(&logits).with_training(true).with_draw(DRAW);
        let scores = scores(&config, &call);
        assert_eq!(scores, super::scores(&plain(8, 2), &call));
        for (token, ids) in decision.experts().chunks(2).enumerate() {
            assert_ne!(ids[0], ids[1]);
            for (k, &id) in ids.iter().enumerate() {
                assert_eq!(decision.weights()[token * 2 + k], scores[token * 8 + id as usize]);
            }
            assert!(kept == 0 || ids[0] == quiet.experts()[token * 2]);
        }
        assert_ne!(decision.experts(), quiet.experts());
    }
}

#[test]
fn gumbel_noise_samples_the_softmax() {
    let tokens = 20_000;
    let row = [5f32, 3.0, 2.0].map(f32::ln);
    let logits = row.repeat(tokens);
    let decision = route(&plain(3, 1).with_noise(Noise::Gumbel), &logits, true, DRAW);
    let shares = decision.counts_before().iter().map(|&count| f64::from(count) / tokens as f64);
    for (share, expected) in shares.zip([0.5, 0.3, 0.2]) {
        // Five standard deviations.
        assert!((share - expected).abs() < 5.0 * (0.25 / tokens as f64).sqrt(), "{share}, not {expected}");
    }
    // The second, of those that are left, once the first is known.
    let after = route(&plain(3, 2).with_noise(Noise::GumbelAfterFirst), &logits, true, DRAW);
    let seconds = after.choices().chunks(2).filter(|ids| ids[1] == 1).count();
    assert!(after.choices().chunks(2).all(|ids| ids[0] == 0));
    assert!((seconds as f64 / tokens as f64 - 0.6).abs() < 5.0 * (0.25 / tokens as f64).sqrt());
}

/// Noise on `tokens` equal logits: their sigmoids are the weights, and are turned back.
fn noisy_logits(noise: Noise, logit: f32, deviation: Option<&[f32]>, tokens: usize) -> Vec<f64> {
    let config = plain(1, 1).with_noise(noise).with_score(ScoreFunction::Sigmoid);
    let logits = vec![logit; tokens];
    let call = GateInput::new(&logits).with_noise_std(deviation).with_training(true).with_draw(DRAW);
    let decision = Gate::new(config).unwrap().route(&call).unwrap().clone();
    decision.weights().iter().map(|&weight| (f64::from(weight) / (1.0 - f64::from(weight))).ln()).collect()
}

#[test]
fn jitter_is_a_factor_within_eps() {
    let logits = noisy_logits(Noise::Jitter { eps: 0.25 }, -4.0, None, 2000);
    let (least, most) = logits.iter().fold((0f64, -9f64), |(a, b), &x| (a.min(x), b.max(x)));
    assert!(least >= -5.0 - 1e-5 && most <= -3.0 + 1e-5, "{least} {most}");
    assert!(least < -4.9 && most > -3.1, "{least} {most}");
    let mean = logits.iter().sum::<f64>() / 2000.0;
    assert!((mean + 4.0).abs() < 0.1, "{mean}");
}

#[test]
fn normal_noise_has_its_deviation_times_that_of_each_logit() {
    let tokens = 4000;
    for (own, expected) in [(None, 0.5), (Some(0.5), 0.25), (Some(0.0), 0.0)] {
        let own = own.map(|own| vec![own; tokens]);
        let logits = noisy_logits(Noise::Normal { deviation: 0.5 }, -1.0, own.as_deref(), tokens);
        let mean = logits.iter().sum::<f64>() / tokens as f64;
        let deviation = (logits.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / tokens as f64).sqrt();
        assert!((mean + 1.0).abs() < 5.0 * 0.5 / (tokens as f64).sqrt(), "{mean}");
        assert!((deviation - expected).abs() < 0.05, "{deviation}, not {expected}");
    }
}

#[test]
fn noise_leaves_the_largest_logits_finite() {
    for noise in ALL {
        let config = plain(2, 2).with_noise(noise);
        let decision = route(&config, &[f32::MAX, f32::MIN], true, DRAW);
        assert!(decision.weights().iter().all(|weight| weight.is_finite()), "{noise:?}");
    }
}

#[test]
fn second_choices_are_thinned_out_by_their_weight() {
    let tokens = 10_000;
    let logits = [8f32, 2.0, 1.0].map(f32::ln).repeat(tokens);
    let config = plain(3, 2)
        .with_second(SecondExpertPolicy::Random { threshold: 0.5 })
        .with_normalise(Normalize::BeforeDrop(Divisor::SumPlus(0.0)));
    let thinned = route(&config, &logits, true, DRAW);
    let left = thinned.experts().chunks(2).filter(|ids| ids[1] == 1).count();
    // The weight is 0.2: twice that are kept.
    assert!((left as f64 / tokens as f64 - 0.4).abs() < 5.0 * (0.25 / tokens as f64).sqrt(), "{left}");
    assert!(thinned.experts().chunks(2).all(|ids| ids[0] == 0));
    assert_eq!(thinned.counts_before(), [tokens as u32, tokens as u32, 0]);
    assert_eq!(thinned.counts_after(), [tokens as u32, left as u32, 0]);
    assert_eq!(thinned.required(), tokens as u32);
    for (ids, weights) in thinned.experts().chunks(2).zip(thinned.weights().chunks(2)) {
        assert!(ulps(weights[0], 0.8) <= 2 && (ids[1] < 0) == (weights[1] == 0.0));
    }
    assert!(route(&config, &logits, false, DRAW).dropped().all(|dropped| !dropped));
    // A weight of one half is always kept.
    let even = route(&config, &[0.0; 3].repeat(tokens), true, DRAW);
    assert!(even.dropped().all(|dropped| !dropped));
}
