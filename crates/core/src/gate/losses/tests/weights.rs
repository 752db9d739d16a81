//! From weights back to logits.

use super::*;
use crate::gate::{Divisor, Gate, GateConfig, GateInput, Noise, Normalize, SecondExpertPolicy, Select};

/// Weights in f64, from the choices before and after dropping.
fn reference_weights(config: &GateConfig, x: &[f64], choices: &[i32], left: &[i32]) -> Vec<f64> {
    let mut weights = vec![0.0; choices.len()];
    for t in 0..choices.len() / K {
        let row = t * K..(t + 1) * K;
        let (choices, left) = (&choices[row.clone()], &left[row.clone()]);
        let x = &x[t * E..][..E];
        let mut own: Vec<f64> = if config.score == ScoreFunction::SoftmaxOfChosen {
            let few: Vec<f64> = choices.iter().filter(|&&id| id >= 0).map(|&id| x[id as usize]).collect();
            let mut few = scores(config.score, &few).into_iter();
            choices.iter().map(|&id| if id < 0 { 0.0 } else { few.next().unwrap() }).collect()
        } else {
            let all = scores(config.score, x);
            choices.iter().map(|&id| if id < 0 { 0.0 } else { all[id as usize] }).collect()
        };
        let (set, divisor) = match config.normalise {
            Normalize::Never => (choices, None),
            Normalize::BeforeDrop(divisor) => (choices, Some(divisor)),
            Normalize::AfterDrop(divisor) => (left, Some(divisor)),
        };
        let sum: f64 = own.iter().zip(set).filter(|&(_, &id)| id >= 0).map(|(score, _)| score).sum();
        let by = match divisor {
            None => 1.0,
            Some(Divisor::SumPlus(more)) => sum + f64::from(more),
            Some(Divisor::SumAtLeast(least)) => sum.max(f64::from(least)),
        };
        own.iter_mut().zip(left).for_each(|(own, &id)| {
            if id < 0 {
                *own = 0.0
            }
        });
        let own = own.into_iter().map(|own| own / by * f64::from(config.scaling));
        weights[row].iter_mut().zip(own).for_each(|(to, own)| *to = own);
    }
    weights
}

fn config(score: ScoreFunction, normalise: Normalize) -> GateConfig {
    GateConfig {
        experts: E as u32,
        top_k: K as u32,
        score,
        select: Select::Best,
        noise: Noise::None,
        second: SecondExpertPolicy::All,
        normalise,
        scaling: 2.5,
        capacity: None,
    }
}

#[test]
fn weights_lead_back_to_the_logits_from_which_they_were_made() {
    let logits = logits(T * E);
    // Sums lie below and above 0.5.
    let divisors = [Divisor::SumPlus(1e-20), Divisor::SumPlus(0.25), Divisor::SumAtLeast(0.5)];
    let normalised = divisors.into_iter().flat_map(|d| [Normalize::BeforeDrop(d), Normalize::AfterDrop(d)]);
    let d_weights: Vec<f32> = (0..T * K).map(|i| (i * 5 % 7) as f32 - 2.0).collect();
    for normalise in normalised.chain([Normalize::Never]) {
        for score in SCORES {
            let config = config(score, normalise);
            let what = format!("{score:?}, {normalise:?}");
            let call = GateInput { logits: &logits, token_mask: Some(&USED), ..GateInput::default() };
            let mut gate = Gate::new(config.clone()).unwrap();
            let decision = gate.route(&call).unwrap();
            let choices = decision.choices();
            let expected = reference_weights(&config, &wide(&logits), choices, choices);
            for (&weight, expected) in decision.weights().iter().zip(expected) {
                assert_close(weight, expected, &what);
            }

            let mut left = choices.to_vec();
            [0, 5, 8, 9, 21].into_iter().for_each(|dropped| left[dropped] = -1);
            let loss = |x: &[f64]| {
                let weights = reference_weights(&config, x, choices, &left);
                weights.iter().zip(&d_weights).map(|(weight, &d)| weight * f64::from(d)).sum()
            };
            let input = WeightsInput { logits: &logits, choices, experts: &left, d_weights: &d_weights };
            let mut gradient = vec![0.0; T * E];
            weights_backward(&config, &input, &mut gradient).unwrap();
            assert_slope(&gradient, &wide(&logits), loss, &what);
            for t in (0..T).filter(|&t| !USED[t] || t == 4) {
                assert_eq!(gradient[t * E..][..E], [0.0; E], "{what}: token {t} chose nothing");
            }
        }
    }
}

#[test]
fn the_weight_of_a_single_choice_moves_only_where_it_is_not_one() {
    let single = |score, normalise| {
        let config = GateConfig { top_k: 1, scaling: 1.0, ..config(score, normalise) };
        let input = WeightsInput { logits: &[0.0; E], choices: &[2], experts: &[2], d_weights: &[1.0] };
        let mut gradient = [0.0; E];
        weights_backward(&config, &input, &mut gradient).unwrap();
        gradient
    };
    let plus = Normalize::BeforeDrop(Divisor::SumPlus(1e-20));
    // Megatron leaves the weight of a single choice as it is.
    assert_eq!(single(ScoreFunction::Sigmoid, plus), [0.0, 0.0, 0.25, 0.0, 0.0]);
    assert_eq!(single(ScoreFunction::SoftmaxOfChosen, plus), [0.0; E]);
    assert_eq!(single(ScoreFunction::Sigmoid, Normalize::AfterDrop(Divisor::SumAtLeast(1e-6))), [0.0; E]);
}
