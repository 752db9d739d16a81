//! Small examples, worked out by hand, one or more for each system.

use sidelane::gate::{
    Capacity, CapacityRule, Divisor, DropPolicy, Gate, GateConfig, GateInput, GroupScore, Normalize, Preset,
    ScoreFunction, Select,
};

use super::{plain, scores, ulps};

fn ln(x: f64) -> f32 {
    x.ln() as f32
}

/// Within an ulp or two, as logits are rounded logarithms.
fn near(seen: &[f32], expected: &[f64]) {
    assert_eq!(seen.len(), expected.len());
    for (&seen, &expected) in seen.iter().zip(expected) {
        assert!(ulps(seen, expected as f32) <= 4, "{seen}, not {expected}");
    }
}

#[test]
fn softmax_before_the_choice_leaves_weights_below_one() {
    let logits = [ln(1.0), ln(4.0), ln(3.0), ln(2.0)];
    let config = Preset::Olmoe.config(4, 2).unwrap();
    let mut gate = Gate::new(config.clone()).unwrap();
    let call = GateInput::new(&logits);
    let decision = gate.route(&call).unwrap();
    assert_eq!(decision.experts(), [1, 2]);
    near(decision.weights(), &[0.4, 0.3]);
    near(&scores(&config, &call), &[0.1, 0.4, 0.3, 0.2]);
    assert_eq!(decision.counts_after(), [0, 1, 1, 0]);
}

#[test]
fn softmax_of_the_chosen_sums_to_one_and_equals_a_normalized_softmax() {
    let logits = [ln(1.0), ln(4.0), ln(3.0), ln(2.0), ln(3.0), ln(1.0), ln(4.0), ln(5.0)];
    for preset in [Preset::Mixtral, Preset::Megatron, Preset::Qwen3] {
        let mut gate = Gate::new(preset.config(4, 2).unwrap()).unwrap();
        let decision = gate.route(&GateInput::new(&logits)).unwrap();
        assert_eq!(decision.experts(), [1, 2, 3, 2], "{preset}");
        near(decision.weights(), &[4.0 / 7.0, 3.0 / 7.0, 5.0 / 9.0, 4.0 / 9.0]);
    }
}

#[test]
fn megatron_top_1_is_a_softmax_of_all() {
    let mut gate = Gate::new(Preset::Megatron.config(2, 1).unwrap()).unwrap();
    let decision = gate.route(&GateInput::new(&[ln(1.0), ln(3.0)])).unwrap();
    assert_eq!(decision.experts(), [1]);
    near(decision.weights(), &[0.75]);
}

#[test]
fn sigmoid_with_a_bias_chooses_by_the_sum_and_weighs_without_it() {
    let config = plain(4, 2)
        .with_score(ScoreFunction::Sigmoid)
        .with_normalize(Normalize::BeforeDrop(Divisor::SumPlus(1e-20)));
    // Scores 0.75, 0.5, 0.25, 0.2.
    let logits = [ln(3.0), 0.0, ln(1.0 / 3.0), ln(0.25)];
    let mut gate = Gate::new(config.clone()).unwrap();
    let bias = [0.0, 0.0, 0.5, 0.0];
    let call = GateInput::new(&logits).with_bias(Some(&bias));
    let decision = gate.route(&call).unwrap();
    near(&scores(&config, &call), &[0.75, 0.5, 0.25, 0.2]);
    // 0.75 and 0.25 + 0.5.
    let mut chosen = decision.experts().to_vec();
    chosen.sort();
    assert_eq!(chosen, [0, 2]);
    let at = decision.experts().iter().position(|&id| id == 0).unwrap();
    near(&[decision.weights()[at], decision.weights()[1 - at]], &[0.75, 0.25]);
}

#[test]
fn a_single_sigmoid_is_not_normalized_and_scaling_comes_last() {
    let config = plain(2, 1)
        .with_score(ScoreFunction::Sigmoid)
        .with_normalize(Normalize::BeforeDrop(Divisor::SumPlus(1e-20)))
        .with_scaling(2.0);
    let decision = Gate::new(config).unwrap().route(&GateInput::new(&[0.0, -1.0])).unwrap().clone();
    assert_eq!((decision.experts(), decision.weights()), (&[0][..], &[1.0][..]));
}

#[test]
fn sqrt_softplus_is_what_its_name_says() {
    let config = plain(3, 3).with_score(ScoreFunction::SqrtSoftplus);
    // softplus(ln(e - 1)) is 1; of a large x it is x.
    let logits = [(std::f64::consts::E - 1.0).ln() as f32, 64.0, 0.0];
    let decision = Gate::new(config).unwrap().route(&GateInput::new(&logits)).unwrap().clone();
    assert_eq!(decision.experts(), [1, 0, 2]);
    near(decision.weights(), &[8.0, 1.0, std::f64::consts::LN_2.sqrt()]);
}

#[test]
fn groups_that_are_not_kept_are_not_chosen_from() {
    // Sigmoids rise with logits: group 1 has the best expert, groups 0 and 3 the best pairs.
    let logits = [2.0, 1.9, 9.0, -9.0, 0.0, 0.0, 3.0, 1.0];
    let groups = |by| Select::Groups { count: 4, kept: 2, by };
    for (by, expected) in [(GroupScore::SumOfBest(2), [6, 0, 1]), (GroupScore::Best, [2, 6, 7])] {
        let config = plain(8, 3).with_score(ScoreFunction::Sigmoid).with_select(groups(by));
        let decision = Gate::new(config).unwrap().route(&GateInput::new(&logits)).unwrap().clone();
        assert_eq!(decision.experts(), expected, "{by:?}");
    }
}

#[test]
fn deepseek_v3_scales_normalized_sigmoids() {
    let logits: Vec<f32> = (0..16).map(|expert| if expert < 4 { 0.0 } else { -40.0 }).collect();
    let mut gate = Gate::new(Preset::DeepseekV3.config(16, 4).unwrap()).unwrap();
    let decision = gate.route(&GateInput::new(&logits)).unwrap();
    assert_eq!((decision.experts(), decision.weights()), (&[0, 1, 2, 3][..], &[0.625; 4][..]));
}

#[test]
fn tokens_that_do_not_count_choose_nothing() {
    let mut gate = Gate::new(Preset::Mixtral.config(2, 2).unwrap()).unwrap();
    let used = [true, false, true];
    let call = GateInput::new(&[1.0, 1.0, 2.0, 2.0, 3.0, 3.0]).with_token_mask(Some(&used));
    let decision = gate.route(&call).unwrap();
    assert_eq!(decision.experts(), [0, 1, -1, -1, 0, 1]);
    assert_eq!(decision.weights(), [0.5, 0.5, 0.0, 0.0, 0.5, 0.5]);
    assert_eq!(decision.slots(), [0, 0, -1, -1, 1, 1]);
    assert_eq!(decision.counts_before(), [2, 2]);
    assert_eq!(decision.dropped_tokens().count(), 0, "they had chosen nothing");
}

/// Three tokens that all want expert 0 first and expert 1 second, room for two each.
fn crowded(normalize: Normalize, keep: DropPolicy) -> sidelane::gate::Decision {
    let capacity = Capacity::new(CapacityRule::Rows { rows: 2 }, keep);
    let config = plain(3, 2).with_normalize(normalize).with_capacity(Some(capacity));
    // Scores: 0.5 0.3 0.2; 0.6 0.1 0.3; 0.7 0.2 0.1.
    let logits = [5.0, 3.0, 2.0, 6.0, 1.0, 3.0, 7.0, 2.0, 1.0].map(ln);
    Gate::new(config).unwrap().route(&GateInput::new(&logits)).unwrap().clone()
}

#[test]
fn by_position_the_last_is_dropped_and_weights_stay() {
    let decision = crowded(Normalize::Never, DropPolicy::Position);
    assert_eq!(decision.choices(), [0, 1, 0, 2, 0, 1]);
    assert_eq!(decision.experts(), [0, 1, 0, 2, -1, 1]);
    near(decision.weights(), &[0.5, 0.3, 0.6, 0.3, 0.0, 0.2]);
    assert_eq!(decision.slots(), [0, 0, 1, 0, -1, 1]);
    assert_eq!(decision.dropped().collect::<Vec<_>>(), [false, false, false, false, true, false]);
    assert_eq!((decision.counts_before(), decision.counts_after()), (&[3, 2, 1][..], &[2, 2, 1][..]));
    assert_eq!((decision.capacity(), decision.required()), (2, 3));
}

#[test]
fn weights_are_divided_before_or_after_dropping() {
    let divisor = Divisor::SumAtLeast(f32::EPSILON);
    let before = crowded(Normalize::BeforeDrop(divisor), DropPolicy::Score);
    // Normalized first choices: 0.625, 0.667, 0.778: the first token loses.
    assert_eq!(before.experts(), [-1, 1, 0, 2, 0, 1]);
    near(before.weights(), &[0.0, 0.375, 2.0 / 3.0, 1.0 / 3.0, 7.0 / 9.0, 2.0 / 9.0]);
    let after = crowded(Normalize::AfterDrop(divisor), DropPolicy::Score);
    assert_eq!(after.experts(), [-1, 1, 0, 2, 0, 1]);
    near(after.weights(), &[0.0, 1.0, 2.0 / 3.0, 1.0 / 3.0, 7.0 / 9.0, 2.0 / 9.0]);
}

#[test]
fn batch_priority_goes_by_scores_that_are_not_normalized() {
    // First choices: 0.5 of 0.95, 0.6 of 0.61; divided by their sums, the second would be far ahead
    // of the third, 0.7 of 1.
    let capacity = Capacity::new(CapacityRule::Rows { rows: 1 }, DropPolicy::Priority);
    let normalize = Normalize::BeforeDrop(Divisor::SumAtLeast(f32::EPSILON));
    let config = plain(4, 2).with_normalize(normalize).with_capacity(Some(capacity));
    let logits = [50.0, 45.0, 4.0, 1.0, 60.0, 1.0, 20.0, 19.0, 70.0, 29.0, 0.5, 0.5].map(ln);
    let decision = Gate::new(config).unwrap().route(&GateInput::new(&logits)).unwrap().clone();
    assert_eq!(decision.choices(), [0, 1, 0, 2, 0, 1]);
    assert_eq!(decision.experts(), [-1, -1, -1, 2, 0, 1]);
    assert_eq!(decision.dropped_tokens().collect::<Vec<_>>(), [0]);
    assert_eq!(decision.routing().experts_of(2), [0, 1]);
}

#[test]
fn presets_are_data_that_survives_json() {
    for preset in Preset::ALL {
        let config = preset.config(64, preset.fixed_top_k().unwrap_or(4)).unwrap();
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<GateConfig>(&text).unwrap(), config, "{text}");
        assert_eq!(preset.to_string().parse::<Preset>(), Ok(preset));
    }
    let error = "switsch".parse::<Preset>().unwrap_err();
    assert_eq!(error.seen, "switsch");
    assert!(Preset::ALL.iter().all(|preset| error.to_string().contains(preset.name())));
}

#[test]
fn presets_hold_what_their_systems_do() {
    let top2 = Preset::DeepspeedTop2.config(8, 2).unwrap().capacity.unwrap();
    assert_eq!(
        (top2.rows(64, 8, 2, 0), top2.rows(8, 8, 2, 0), top2.drop_policy),
        (16, 4, DropPolicy::FirstChoices)
    );
    let gshard = Preset::Gshard.config(8, 2).unwrap().capacity.unwrap();
    assert_eq!((gshard.rows(64, 8, 2, 0), gshard.rows(40, 8, 2, 0)), (16, 12));
    let switch = Preset::Switch.config(8, 1).unwrap().capacity.unwrap();
    assert_eq!(switch.rows(64, 8, 1, 0), 10);
    let tutel = Preset::Tutel.config(8, 2).unwrap().capacity.unwrap();
    assert_eq!(tutel.rows(60, 8, 2, 0), 16);
}
