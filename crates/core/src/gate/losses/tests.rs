//! Against plain f64 with the standard library's functions; gradients against central differences
//! of it.

use super::*;
use crate::gate::{Gate, GateInput, Noise, Normalize, Preset, SecondExpertPolicy, Select};

const SCORES: [ScoreFunction; 4] = [
    ScoreFunction::Softmax,
    ScoreFunction::SoftmaxOfChosen,
    ScoreFunction::Sigmoid,
    ScoreFunction::SqrtSoftplus,
];

/// Logits from -4 to 4, all different.
fn logits(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i * 7919 % 1009) as f32 / 126.0 - 4.0).collect()
}

fn wide(logits: &[f32]) -> Vec<f64> {
    logits.iter().map(|&logit| f64::from(logit)).collect()
}

/// Scores of one token, not divided.
fn scores(score: ScoreFunction, logits: &[f64]) -> Vec<f64> {
    match score {
        ScoreFunction::Softmax | ScoreFunction::SoftmaxOfChosen => {
            let all: f64 = logits.iter().map(|x| x.exp()).sum();
            logits.iter().map(|x| x.exp() / all).collect()
        }
        ScoreFunction::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
        ScoreFunction::SqrtSoftplus => logits.iter().map(|x| x.exp().ln_1p().sqrt()).collect(),
    }
}

/// Whether `gradient` is the slope of `f` at `at`, to 1e-5 of the largest slope.
fn assert_slope(gradient: &[f32], at: &[f64], f: impl Fn(&[f64]) -> f64, what: &str) {
    let step = 1e-5;
    let slopes: Vec<f64> = (0..at.len())
        .map(|i| {
            let moved = |by: f64| {
                let mut x = at.to_vec();
                x[i] += by;
                f(&x)
            };
            (moved(step) - moved(-step)) / (2.0 * step)
        })
        .collect();
    let largest = slopes.iter().fold(0.0, |a: f64, b| a.max(b.abs()));
    assert!(largest > 1e-3, "{what}: nothing to compare");
    for (i, (&d, slope)) in gradient.iter().zip(&slopes).enumerate() {
        assert!((f64::from(d) - slope).abs() <= 1e-5 * largest, "{what}, element {i}: {d}, expected {slope}");
    }
}

fn assert_close(seen: f32, expected: f64, what: &str) {
    assert!(
        (f64::from(seen) - expected).abs() <= 1e-6 * expected.abs(),
        "{what}: {seen}, expected {expected}"
    );
}

const T: usize = 12;
const E: usize = 5;
const K: usize = 2;
/// Choices that are not the best.
const CHOICES: [i32; T * K] = [0, 3, 1, 2, 4, 0, 3, 4, 0, 1, 0, 2, 2, 4, 1, 0, 0, 4, 3, 1, 2, 0, 4, 1];
const USED: [bool; T] = [true, true, false, true, true, true, false, true, true, true, true, false];

fn input(logits: &[f32]) -> LossInput<'_> {
    let (experts, top_k) = (E as u32, K as u32);
    LossInput { logits, experts, top_k, choices: &CHOICES, token_mask: Some(&USED), totals: None }
}

fn part_of(parts: TokenGroups, token: usize) -> (usize, usize) {
    match parts {
        TokenGroups::Whole => (0, 1),
        TokenGroups::Consecutive(n) => (token / (T / n as usize), n as usize),
        TokenGroups::Interleaved(n) => (token % n as usize, n as usize),
    }
}

fn formula_of_counts(balance: &BalanceLoss, logits: &[f32]) -> Vec<Vec<f64>> {
    let mut counts = vec![vec![0.0; E]; part_of(balance.parts, 0).1];
    for t in (0..T).filter(|&t| USED[t]) {
        let mut best: Vec<usize> = (0..E).collect();
        best.sort_by(|&a, &b| logits[t * E + b].total_cmp(&logits[t * E + a]));
        let given = CHOICES[t * K..][..K].iter().map(|&id| id as usize);
        let chosen: Vec<usize> = match balance.map {
            CountedChoices::FirstChoices => given.take(1).collect(),
            CountedChoices::AllChoices => given.collect(),
            CountedChoices::Fresh => best[..K].to_vec(),
        };
        chosen.into_iter().for_each(|e| counts[part_of(balance.parts, t).0][e] += 1.0);
    }
    counts
}

fn formula_of_loss(balance: &BalanceLoss, counts: &[Vec<f64>], logits: &[f64]) -> f64 {
    let parts = counts.len() as f64;
    let used = USED.iter().filter(|&&used| used).count() as f64;
    let n = if balance.unused == PaddingTokens::LeftOut { used } else { T as f64 } / parts;
    let choices = if balance.share == CountDivisor::OfTokens { 1.0 } else { K as f64 };
    let mut loss = 0.0;
    for t in (0..T).filter(|&t| USED[t] || balance.unused == PaddingTokens::Shared) {
        let scores = scores(balance.score, &logits[t * E..][..E]);
        let sum: f64 = scores.iter().sum();
        for e in 0..E {
            let count = counts[part_of(balance.parts, t).0][e];
            loss += count / (choices * n) * scores[e] / sum / n;
        }
    }
    f64::from(balance.coefficient) * E as f64 * loss / parts
}

#[test]
fn every_balance_agrees_with_its_formula_and_its_slope() {
    let logits = logits(T * E);
    for score in SCORES {
        for map in [CountedChoices::FirstChoices, CountedChoices::AllChoices, CountedChoices::Fresh] {
            for share in [CountDivisor::OfTokens, CountDivisor::OfChoices] {
                for unused in [PaddingTokens::LeftOut, PaddingTokens::Zero, PaddingTokens::Shared] {
                    for parts in
                        [TokenGroups::Whole, TokenGroups::Consecutive(3), TokenGroups::Interleaved(4)]
                    {
                        let balance = BalanceLoss { coefficient: 0.75, score, map, share, unused, parts };
                        let what = format!("{balance:?}");
                        let counts = formula_of_counts(&balance, &logits);
                        let mut own = vec![0.0; counts.len() * E];
                        balance.counts(&input(&logits), &mut own).unwrap();
                        assert_eq!(own, counts.concat(), "{what}");
                        let mut gradient = vec![0.0; T * E];
                        let loss = balance.loss(&input(&logits), Some(&mut gradient)).unwrap();
                        let formula = |x: &[f64]| formula_of_loss(&balance, &counts, x);
                        assert_close(loss, formula(&wide(&logits)), &what);
                        assert_slope(&gradient, &wide(&logits), formula, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn even_scores_cost_one_or_as_many_as_there_are_choices() {
    let even = [1.5; T * E];
    for preset in Preset::ALL {
        let balance = BalanceLoss { coefficient: 0.5, ..BalanceLoss::of(preset) };
        let loss = balance.loss(&LossInput { token_mask: None, ..input(&even) }, None).unwrap();
        let choices = if balance.map == CountedChoices::AllChoices && balance.share == CountDivisor::OfTokens
        {
            2.0
        } else {
            1.0
        };
        assert_close(loss, 0.5 * choices, preset.name());
    }
}

#[test]
fn padding_tokens_count_in_loss_as_in_their_system() {
    let zero = [0.0; 4];
    let input = LossInput { logits: &zero, experts: 2, top_k: 1, choices: &[0, -1], ..LossInput::default() };
    let input = LossInput { token_mask: Some(&[true, false]), ..input };
    let of_first = 0.5;
    for (unused, loss, of_second) in [
        (PaddingTokens::LeftOut, 1.0, 0.0),
        (PaddingTokens::Zero, 0.25, 0.0),
        (PaddingTokens::Shared, 0.5, 0.125),
    ] {
        let balance = BalanceLoss { unused, ..BalanceLoss::of(Preset::Switch) };
        let mut gradient = [0.0; 4];
        assert_eq!(balance.loss(&input, Some(&mut gradient)), Ok(loss));
        let first = if unused == PaddingTokens::LeftOut { of_first } else { of_first / 4.0 };
        assert_eq!(gradient, [first, -first, of_second, -of_second], "{unused:?}");
    }
}

#[test]
fn losses_of_ranks_that_share_their_counts_add_up_to_the_whole() {
    let logits = logits(T * E);
    for preset in [Preset::Megatron, Preset::DeepseekV3, Preset::DeepspeedTop1] {
        let balance = BalanceLoss::of(preset);
        let whole = input(&logits);
        let mut gradient = vec![0.0; T * E];
        let loss = balance.loss(&whole, Some(&mut gradient)).unwrap();
        let mut counts = [0.0; E];
        let rank = |r: usize| LossInput {
            logits: &logits[r * T / 2 * E..][..T / 2 * E],
            choices: &CHOICES[r * T / 2 * K..][..T / 2 * K],
            token_mask: Some(&USED[r * T / 2..][..T / 2]),
            ..whole
        };
        (0..2).for_each(|r| balance.counts(&rank(r), &mut counts).unwrap());
        let tokens = if balance.unused == PaddingTokens::LeftOut { 9.0 } else { 12.0 };
        let totals = Some(Totals { counts: &counts, tokens });
        let mut parts = vec![0.0; T * E];
        let own: Vec<f32> = parts
            .chunks_mut(T / 2 * E)
            .enumerate()
            .map(|(r, gradient)| balance.loss(&LossInput { totals, ..rank(r) }, Some(gradient)).unwrap())
            .collect();
        assert!(own.iter().all(|&own| own > 0.1 * loss));
        assert_close(own.iter().sum(), loss.into(), preset.name());
        assert_eq!(parts, gradient);
    }
}

#[test]
fn gradients_are_added_and_losses_without_tokens_are_nothing() {
    let logits = logits(T * E);
    let balance = BalanceLoss::of(Preset::Megatron);
    let (mut once, mut twice) = (vec![0.0; T * E], vec![0.0; T * E]);
    balance.loss(&input(&logits), Some(&mut once)).unwrap();
    z_loss(0.5, &logits, E as u32, None, Some(&mut twice)).unwrap();
    let z = twice.clone();
    balance.loss(&input(&logits), Some(&mut twice)).unwrap();
    assert!(twice.iter().zip(z.iter().zip(&once)).all(|(sum, (a, b))| *sum == a + b));

    let none = LossInput { token_mask: Some(&[false; T]), ..input(&logits) };
    let mut untouched = [0.0; T * E];
    for preset in Preset::ALL {
        assert_eq!(BalanceLoss::of(preset).loss(&none, Some(&mut untouched)), Ok(0.0));
        let empty = LossInput { experts: 5, top_k: 2, ..LossInput::default() };
        assert_eq!(BalanceLoss::of(preset).loss(&empty, None), Ok(0.0));
    }
    assert_eq!(z_loss(1.0, &logits, E as u32, none.token_mask, Some(&mut untouched)), Ok(0.0));
    assert_eq!(untouched, [0.0; T * E]);
}

#[test]
fn the_z_loss_agrees_with_its_formula_and_its_slope() {
    let logits = logits(T * E);
    for used in [None, Some(&USED[..])] {
        let counts = |t: &usize| used.is_none_or(|used| used[*t]);
        let formula = |x: &[f64]| {
            let z = |t: usize| x[t * E..][..E].iter().map(|x| x.exp()).sum::<f64>().ln();
            let n = (0..T).filter(counts).count() as f64;
            0.25 * (0..T).filter(counts).map(|t| z(t) * z(t)).sum::<f64>() / n
        };
        let mut gradient = vec![0.0; T * E];
        let loss = z_loss(0.25, &logits, E as u32, used, Some(&mut gradient)).unwrap();
        assert_close(loss, formula(&wide(&logits)), "z");
        assert_slope(&gradient, &wide(&logits), formula, "z");
    }
    // Where e^x is beyond f64.
    let loss = z_loss(1.0, &[1e4, -1e4, 1e4, 1e4], 2, None, None).unwrap();
    assert_close(loss, (1e8 + (1e4 + 2f64.ln()).powi(2)) / 2.0, "large");
}

#[test]
fn bad_input_is_named_and_the_gradient_left_alone() {
    let fine = logits(T * E);
    let balance = BalanceLoss::of(Preset::Switch);
    let mut gradient = vec![0.5; T * E];
    let mut fails =
        |balance: BalanceLoss, input: LossInput<'_>| balance.loss(&input, Some(&mut gradient)).unwrap_err();
    let mut bad = fine.clone();
    bad[2 * E + 3] = f32::NEG_INFINITY;
    let error = fails(balance, input(&bad));
    assert_eq!(error, GateError::NotFinite { token: 2, expert: 3, seen: f32::NEG_INFINITY });
    let mut ids = CHOICES;
    ids[5] = E as i32;
    let error = fails(balance, LossInput { choices: &ids, ..input(&fine) });
    assert_eq!(error, GateError::BadChoice { token: 2, k: 1, expert: 5, experts: 5 });
    let number = |error| match error {
        GateError::BadNumber { parameter, .. } => parameter,
        other => panic!("{other}"),
    };
    assert_eq!(
        number(fails(BalanceLoss { parts: TokenGroups::Interleaved(5), ..balance }, input(&fine))),
        "parts"
    );
    assert_eq!(
        number(fails(BalanceLoss { parts: TokenGroups::Consecutive(0), ..balance }, input(&fine))),
        "parts"
    );
    // As many parts as there are numbers, which no memory holds.
    for parts in [TokenGroups::Interleaved(u32::MAX), TokenGroups::Consecutive(u32::MAX)] {
        let balance = BalanceLoss { parts, ..balance };
        assert_eq!(number(fails(balance, input(&fine))), "parts");
        assert_eq!(balance.loss(&LossInput { choices: &[], token_mask: None, ..input(&[]) }, None), Ok(0.0));
    }
    assert_eq!(number(fails(BalanceLoss { coefficient: f32::NAN, ..balance }, input(&fine))), "coefficient");
    assert_eq!(number(fails(balance, LossInput { top_k: 6, ..input(&fine) })), "top_k");
    assert_eq!(number(fails(balance, LossInput { experts: 0, ..input(&fine) })), "experts");
    let totals = Some(Totals { counts: &[1.0; E], tokens: f64::INFINITY });
    assert_eq!(number(fails(balance, LossInput { totals, ..input(&fine) })), "total tokens");
    let shape = |error| match error {
        GateError::WrongShape { what, .. } => what,
        other => panic!("{other}"),
    };
    assert_eq!(shape(fails(balance, LossInput { logits: &fine[1..], ..input(&fine) })), "logits");
    assert_eq!(shape(fails(balance, LossInput { choices: &CHOICES[2..], ..input(&fine) })), "choices");
    assert_eq!(
        shape(fails(balance, LossInput { token_mask: Some(&USED[1..]), ..input(&fine) })),
        "token_mask"
    );
    let totals = Some(Totals { counts: &[1.0; E + 1], tokens: 9.0 });
    assert_eq!(shape(fails(balance, LossInput { totals, ..input(&fine) })), "total counts");
    assert!(gradient.iter().all(|&d| d == 0.5));
    assert_eq!(shape(z_loss(1.0, &fine, E as u32, None, Some(&mut gradient[1..])).unwrap_err()), "gradient");
}

const NOISE: f32 = 1.5 * E as f32;

fn importance<'a>(logits: &'a [f32], noisy: &'a [f32], choices: &'a [i32]) -> ImportanceInput<'a> {
    ImportanceInput { logits, noisy: Some(noisy), experts: E as u32, top_k: K as u32, choices, noise: NOISE }
}

/// The load-importance loss of tokens whose noise is `noise`.
fn formula_of_importance(x: &[f64], noise: &[f64], choices: &[i32]) -> f64 {
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
        let formula = |x: &[f64]| formula_of_importance(x, &noise, &choices);
        let mut gradient = vec![0.0; T * E];
        let loss = importance_loss(0.75, &input, Some(&mut gradient)).unwrap();
        assert_close(loss, formula(&wide(&logits)), "importance");
        assert_slope(&gradient, &wide(&logits), formula, "importance");
        let mut twice = gradient.clone();
        importance_loss(0.75, &input, Some(&mut twice)).unwrap();
        assert!(twice.iter().zip(&gradient).all(|(two, one)| *two == one + one));
    }
}

#[test]
fn importance_loss_equals_value_computed_by_python() {
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
fn unusable_importance_loss_input_is_named() {
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

/// Weights in f64, from the choices before and after dropping.
fn formula_of_weights(config: &GateConfig, x: &[f64], choices: &[i32], left: &[i32]) -> Vec<f64> {
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
        let (set, divisor) = match config.normalize {
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

fn config(score: ScoreFunction, normalize: Normalize) -> GateConfig {
    GateConfig {
        experts: E as u32,
        top_k: K as u32,
        score,
        select: Select::Best,
        noise: Noise::None,
        second: SecondExpertPolicy::All,
        normalize,
        scaling: 2.5,
        capacity: None,
    }
}

#[test]
fn weights_lead_back_to_the_logits_from_which_they_were_made() {
    let logits = logits(T * E);
    // Sums lie below and above 0.5.
    let divisors = [Divisor::SumPlus(1e-20), Divisor::SumPlus(0.25), Divisor::SumAtLeast(0.5)];
    let normalized = divisors.into_iter().flat_map(|d| [Normalize::BeforeDrop(d), Normalize::AfterDrop(d)]);
    let d_weights: Vec<f32> = (0..T * K).map(|i| (i * 5 % 7) as f32 - 2.0).collect();
    for normalize in normalized.chain([Normalize::Never]) {
        for score in SCORES {
            let config = config(score, normalize);
            let what = format!("{score:?}, {normalize:?}");
            let call = GateInput { logits: &logits, token_mask: Some(&USED), ..GateInput::default() };
            let mut gate = Gate::new(config.clone()).unwrap();
            let decision = gate.route(&call).unwrap();
            let choices = decision.choices();
            let expected = formula_of_weights(&config, &wide(&logits), choices, choices);
            for (&weight, expected) in decision.weights().iter().zip(expected) {
                assert_close(weight, expected, &what);
            }

            let mut left = choices.to_vec();
            [0, 5, 8, 9, 21].into_iter().for_each(|dropped| left[dropped] = -1);
            let loss = |x: &[f64]| {
                let weights = formula_of_weights(&config, x, choices, &left);
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
    let single = |score, normalize| {
        let config = GateConfig { top_k: 1, scaling: 1.0, ..config(score, normalize) };
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

#[test]
fn a_count_equal_to_the_mean_moves_nothing() {
    let mut bias = [0.25, -0.5, 1.0, 0.0];
    update_bias(&mut bias, &[3, 3, 3, 3], 0.125).unwrap();
    assert_eq!(bias, [0.25, -0.5, 1.0, 0.0]);
    // No f64 tells this mean from the counts.
    let large = 1 << 60;
    update_bias(&mut bias, &[large + 1, large, large, large], 0.125).unwrap();
    assert_eq!(bias, [0.125, -0.375, 1.125, 0.125]);
}

#[test]
fn wrong_lengths_and_rates_are_refused() {
    let mut bias = [0.0; 2];
    let wrong = GateError::WrongShape { what: "counts", seen: 3, rows: 2, columns: 1 };
    assert_eq!(update_bias(&mut bias, &[1, 2, 3], 0.1), Err(wrong));
    for rate in [-0.1, f32::NAN, f32::INFINITY] {
        assert!(matches!(update_bias(&mut bias, &[1, 2], rate), Err(GateError::BadNumber { .. })));
    }
    assert_eq!(bias, [0.0; 2]);
}
