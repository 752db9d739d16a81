//! Sinkhorn's balancing, against the iteration written down plainly.

use sidelane::error::GateError;
use sidelane::gate::{Decision, Gate, GateConfig, GateInput, ScoreFunction, Select};

use super::{numbers, plain};

fn config(experts: u32, top_k: u32) -> GateConfig {
    let score = if top_k == 1 { ScoreFunction::Sigmoid } else { ScoreFunction::Softmax };
    plain(experts, top_k).with_select(Select::Sinkhorn { tolerance: 1e-4 }).with_score(score)
}

fn route(config: GateConfig, logits: &[f32], training: bool, used: Option<&[bool]>) -> Decision {
    let call = GateInput::new(logits).with_training(training).with_token_mask(used);
    Gate::new(config).unwrap().route(&call).unwrap().clone()
}

fn balanced(logits: &[f32], experts: usize) -> Vec<f64> {
    let cost: Vec<f64> = logits.iter().map(|&x| f64::from(x).exp()).collect();
    let tokens = logits.len() / experts;
    let (mut d0, mut d1) = (vec![1.0; tokens], vec![1.0; experts]);
    loop {
        for t in 0..tokens {
            let sum: f64 = (0..experts).map(|e| d1[e] * cost[t * experts + e]).sum();
            d0[t] = 1.0 / tokens as f64 / (sum + 1e-8);
        }
        let mut change = 0.0;
        for e in 0..experts {
            let sum: f64 = (0..tokens).map(|t| d0[t] * cost[t * experts + e]).sum();
            let next = 1.0 / experts as f64 / (sum + 1e-8);
            change += (d1[e] - next).abs() / experts as f64;
            d1[e] = next;
        }
        if change <= 1e-4 {
            return (0..logits.len()).map(|i| cost[i] * d0[i / experts] * d1[i % experts]).collect();
        }
    }
}

#[test]
fn choices_are_those_of_the_plain_iteration() {
    for (seed, tokens, experts, k) in [(1, 64, 8, 1), (2, 200, 16, 2), (3, 33, 5, 5)] {
        let logits: Vec<f32> = numbers(seed, tokens * experts).iter().map(|x| x * 4.0).collect();
        let decision = route(config(experts as u32, k), &logits, true, None);
        let keys = balanced(&logits, experts);
        for (token, ids) in decision.choices().chunks(k as usize).enumerate() {
            let row = &keys[token * experts..][..experts];
            let mut order: Vec<i32> = (0..experts as i32).collect();
            order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
            assert_eq!(ids, &order[..k as usize], "token {token}");
        }
    }
}

#[test]
fn it_balances_where_all_want_the_same() {
    // All prefer expert 0, each second token a little less.
    let logits: Vec<f32> = (0..100).flat_map(|t| [3.0 - (t % 2) as f32, 0.0]).collect();
    let trained = route(config(2, 1), &logits, true, None);
    assert_eq!(trained.counts_before(), [50, 50]);
    assert_eq!(route(config(2, 1), &logits, false, None).counts_before(), [100, 0], "only while training");
    // Weights are the scores of the logits as they are.
    let plain = route(config(2, 2), &logits, false, None);
    assert_eq!(trained.weights().len(), 100);
    assert!(trained.weights().iter().all(|&score| (0.0..=1.0).contains(&score)));
    assert!(plain.weights().chunks(2).all(|w| (w[0] + w[1] - 1.0).abs() < 1e-6));
}

#[test]
fn padding_has_no_part_in_the_balance() {
    let (tokens, experts) = (40, 4);
    let logits = numbers(5, tokens * experts);
    let mut padded = logits.clone();
    padded.extend((0..20 * experts).map(|i| if i % experts == 0 { 50.0 } else { 0.0 }));
    let used: Vec<bool> = (0..60).map(|token| token < tokens).collect();
    let alone = route(config(experts as u32, 2), &logits, true, None);
    let among = route(config(experts as u32, 2), &padded, true, Some(&used));
    assert_eq!(&among.choices()[..tokens * 2], alone.choices());
    assert!(among.choices()[tokens * 2..].iter().all(|&id| id == -1));
}

#[test]
fn logits_whose_exponential_is_too_large_are_refused() {
    let call = GateInput::new(&[0.0, 88.5]).with_training(true);
    let error = Gate::new(config(2, 1)).unwrap().route(&call).unwrap_err();
    assert!(matches!(error, GateError::BadNumber { parameter: "logit", seen: 88.5, .. }), "{error}");
    assert_eq!(route(config(2, 1), &[], true, None).tokens(), 0);
}
