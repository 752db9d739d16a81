//! Tutel's load-importance loss.

use super::*;

const NOISE: f32 = 1.5 * E as f32;

fn importance<'a>(logits: &'a [f32], noisy: &'a [f32], choices: &'a [i32]) -> ImportanceInput<'a> {
    ImportanceInput { logits, noisy: Some(noisy), experts: E as u32, top_k: K as u32, choices, noise: NOISE }
}

/// The load-importance loss of tokens whose noise is `noise`.
fn reference_importance(x: &[f64], noise: &[f64], choices: &[i32]) -> f64 {
    let normal = |x: f64| 0.5 * libm::erfc(-x / 2f64.sqrt());
    let (mut importance, mut load) = (vec![0.0; E], vec![0.0; E]);
    for t in (0..T).filter(|t| choices[t * K + 1] >= 0) {
        let last = t * E + choices[t * K + 1] as usize;
        for (e, share) in scores(ScoreFunction::Softmax, &x[t * E..][..E]).into_iter().enumerate() {
            importance[e] += share;
            load[e] += normal((share - x[last] - noise[last]) * E as f64 / f64::from(NOISE));
        }
    }
    let uneven = |x: Vec<f64>| {
        let mean = x.iter().sum::<f64>() / E as f64;
        x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (E as f64 - 1.0) / (mean * mean + 1e-10)
    };
    0.75 * (uneven(importance) + uneven(load)) / 2.0
}

#[test]
fn the_importance_loss_agrees_with_its_formula_and_its_slope() {
    let logits = logits(T * E);
    let noise: Vec<f32> = (0..T * E).map(|i| (i * 31 % 17) as f32 / 16.0 - 0.5).collect();
    let noisy: Vec<f32> = logits.iter().zip(&noise).map(|(a, b)| a + b).collect();
    let noise: Vec<f64> = noisy.iter().zip(&logits).map(|(&a, &b)| f64::from(a) - f64::from(b)).collect();
    let mut padded = CHOICES;
    padded[6..8].fill(-1);
    for choices in [CHOICES, padded] {
        let input = importance(&logits, &noisy, &choices);
        let reference = |x: &[f64]| reference_importance(x, &noise, &choices);
        let mut gradient = vec![0.0; T * E];
        let loss = importance_loss(0.75, &input, Some(&mut gradient)).unwrap();
        assert_close(loss, reference(&wide(&logits)), "importance");
        assert_slope(&gradient, &wide(&logits), reference, "importance");
        let mut twice = gradient.clone();
        importance_loss(0.75, &input, Some(&mut twice)).unwrap();
        assert!(twice.iter().zip(&gradient).all(|(two, one)| *two == one + one));
    }
}

#[test]
fn the_importance_loss_has_the_value_that_was_worked_out_elsewhere() {
    // By Python's math.erf.
    let (logits, noisy) = ([1.0, 0.0, -1.0, 0.5, 2.0, 0.0], [1.25, -0.25, -1.0, 0.5, 1.5, 0.75]);
    let input =
        ImportanceInput { noisy: Some(&noisy), experts: 3, ..importance(&logits, &noisy, &[0, 1, 1, 2]) };
    let loss = importance_loss(1.0, &ImportanceInput { noise: 1.5, ..input }, None).unwrap();
    assert_close(loss, 0.22269803760785845, "importance");
    assert_eq!(
        importance_loss(1.0, &ImportanceInput { choices: &[-1; 4], noise: 1.5, ..input }, None),
        Ok(0.0)
    );
}

#[test]
fn what_the_importance_loss_cannot_use_is_named() {
    let fine = logits(T * E);
    let mut gradient = vec![0.5; T * E];
    let mut fails =
        |input: ImportanceInput<'_>| importance_loss(1.0, &input, Some(&mut gradient)).unwrap_err();
    let input = importance(&fine, &fine, &CHOICES);
    for (wrong, expected) in [
        (ImportanceInput { experts: 1, top_k: 1, ..input }, "experts"),
        (ImportanceInput { top_k: 6, ..input }, "top_k"),
        (ImportanceInput { noise: 0.0, ..input }, "noise"),
        (ImportanceInput { noise: f32::NAN, ..input }, "noise"),
    ] {
        assert!(matches!(fails(wrong), GateError::BadNumber { parameter, .. } if parameter == expected));
    }
    for (wrong, expected) in [
        (ImportanceInput { logits: &fine[1..], ..input }, "logits"),
        (ImportanceInput { noisy: Some(&fine[E..]), ..input }, "noisy logits"),
        (ImportanceInput { choices: &CHOICES[1..], ..input }, "choices"),
    ] {
        assert!(matches!(fails(wrong), GateError::WrongShape { what, .. } if what == expected));
    }
    let mut bad = CHOICES;
    bad[3] = E as i32;
    assert!(matches!(
        fails(ImportanceInput { choices: &bad, ..input }),
        GateError::BadChoice { token: 1, .. }
    ));
    assert!(gradient.iter().all(|&d| d == 0.5));
}
