//! Bad input, each kind with its error.

use sidelane::error::GateError;
use sidelane::gate::{
    Capacity, CapacityRule, Divisor, DropPolicy, Gate, GateConfig, GateInput, GroupScore, Noise, Normalize,
    Preset, ScoreFunction, SecondExpertPolicy, Select,
};

use super::plain;

fn parameter(config: GateConfig) -> &'static str {
    match Gate::new(config).unwrap_err() {
        GateError::BadNumber { parameter, .. } => parameter,
        other => panic!("{other}"),
    }
}

#[test]
fn numbers_that_cannot_be_used_are_named() {
    assert_eq!(parameter(plain(0, 1)), "experts");
    assert_eq!(parameter(plain((1 << 20) + 1, 1)), "experts");
    assert_eq!(parameter(plain(4, 0)), "top_k");
    assert_eq!(parameter(plain(4, 5)), "top_k");
    for scaling in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert_eq!(parameter(plain(4, 1).with_scaling(scaling)), "scaling");
    }
    for tolerance in [0.0, -1e-4, f32::NAN] {
        let select = Select::Sinkhorn { tolerance };
        assert_eq!(parameter(plain(4, 1).with_select(select)), "tolerance");
    }
    for eps in [-0.1, 1.1, f32::NAN] {
        assert_eq!(parameter(plain(4, 1).with_noise(Noise::Jitter { eps })), "eps");
    }
    for deviation in [-0.1, f32::NAN, f32::INFINITY] {
        assert_eq!(parameter(plain(4, 1).with_noise(Noise::Normal { deviation })), "deviation");
    }
    for threshold in [0.0, -0.5, f32::NAN] {
        assert_eq!(parameter(plain(4, 2).with_second(SecondExpertPolicy::Random { threshold })), "threshold");
    }
    assert_eq!(parameter(plain(4, 3).with_second(SecondExpertPolicy::Random { threshold: 0.5 })), "top_k");
    let divided = |divisor| plain(4, 2).with_normalize(Normalize::AfterDrop(divisor));
    assert_eq!(parameter(divided(Divisor::SumPlus(-1.0))), "sum plus");
    assert_eq!(parameter(divided(Divisor::SumAtLeast(0.0))), "sum at least");
    let capacity = |factor| Capacity::new(CapacityRule::CeilF64 { factor }, DropPolicy::Score);
    for factor in [0.0, -1.0, f64::NAN] {
        assert_eq!(parameter(plain(4, 2).with_capacity(Some(capacity(factor)))), "capacity factor");
    }
}

#[test]
fn groups_must_fit_the_experts_and_the_choices() {
    let of = |experts, top_k, count, kept, by| {
        parameter(plain(experts, top_k).with_select(Select::Groups { count, kept, by }))
    };
    assert_eq!(of(8, 2, 0, 1, GroupScore::Best), "groups");
    assert_eq!(of(8, 2, 3, 1, GroupScore::Best), "groups");
    assert_eq!(of(8, 2, 16, 1, GroupScore::Best), "groups");
    assert_eq!(of(8, 2, 4, 0, GroupScore::Best), "kept groups");
    assert_eq!(of(8, 2, 4, 5, GroupScore::Best), "kept groups");
    assert_eq!(of(8, 5, 4, 2, GroupScore::Best), "top_k");
    assert_eq!(of(8, 2, 4, 2, GroupScore::SumOfBest(0)), "best of a group");
    assert_eq!(of(8, 2, 4, 2, GroupScore::SumOfBest(3)), "best of a group");
}

#[test]
fn settings_that_exclude_each_other_are_named() {
    let conflict = |config| matches!(Gate::new(config), Err(GateError::Conflict { .. }));
    let sinkhorn = Select::Sinkhorn { tolerance: 1e-4 };
    let groups = Select::Groups { count: 2, kept: 1, by: GroupScore::Best };
    for noise in [Noise::Gumbel, Noise::GumbelAfterFirst] {
        assert!(conflict(plain(4, 1).with_noise(noise).with_select(sinkhorn)));
        assert!(conflict(plain(4, 1).with_noise(noise).with_select(groups)));
        for score in [ScoreFunction::Sigmoid, ScoreFunction::SqrtSoftplus] {
            assert!(conflict(plain(4, 1).with_noise(noise).with_score(score)));
        }
        assert!(!conflict(plain(4, 1).with_noise(noise).with_score(ScoreFunction::SoftmaxOfChosen)));
    }
    assert!(conflict(plain(4, 1).with_noise(Noise::Jitter { eps: 0.1 }).with_select(sinkhorn)));
}

#[test]
fn presets_refuse_choices_that_their_system_does_not_know() {
    for preset in Preset::ALL {
        let Some(fixed) = preset.fixed_top_k() else { continue };
        assert!(preset.config(8, fixed).is_ok());
        for top_k in [1, 2, 3].into_iter().filter(|&top_k| top_k != fixed) {
            let error = preset.config(8, top_k).unwrap_err();
            assert!(matches!(error, GateError::BadNumber { parameter: "top_k", .. }), "{preset}: {error}");
        }
    }
    let error = Preset::DeepseekV3.config(60, 8).unwrap_err();
    assert!(matches!(error, GateError::BadNumber { parameter: "groups", seen: 8.0, .. }), "{error}");
}

#[test]
fn logits_that_are_not_finite_are_named() {
    for preset in [Preset::Mixtral, Preset::Qwen3, Preset::DeepseekV3] {
        let mut gate = Gate::new(preset.config(64, 8).unwrap()).unwrap();
        for seen in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for (token, expert) in [(0, 0), (1, 63), (2, 31)] {
                let mut logits = vec![0.5; 3 * 64];
                logits[token as usize * 64 + expert as usize] = seen;
                let error = gate.route(&GateInput::new(&logits)).unwrap_err();
                let GateError::NotFinite { token: t, expert: e, seen: s } = error else { panic!("{error}") };
                assert_eq!((t, e, s.to_bits()), (token, expert, seen.to_bits()));
            }
        }
        assert_eq!(gate.route(&GateInput::new(&[0.5; 64])).unwrap().tokens(), 1);
    }
}

#[test]
fn arrays_of_the_wrong_length_are_named() {
    let config = plain(4, 2).with_noise(Noise::Normal { deviation: 1.0 });
    let mut gate = Gate::new(config).unwrap();
    let logits = [0.0; 12];
    let right = GateInput::new(&logits);
    let calls = [
        ("logits", right.with_logits(&logits[..11])),
        ("bias", right.with_bias(Some(&[0.0; 5]))),
        ("noise_std", right.with_noise_std(Some(&[0.0; 11]))),
        ("token_mask", right.with_token_mask(Some(&[true; 4]))),
        ("recorded choices", right.with_replay(Some(&[0; 5]))),
    ];
    for (name, call) in calls {
        let error = gate.route(&call).unwrap_err();
        assert!(matches!(error, GateError::WrongShape { what, .. } if what == name), "{name}: {error}");
    }
    for (name, call) in [
        ("bias", right.with_bias(Some(&[0.0, 0.0, f32::NAN, 0.0]))),
        (
            "noise_std",
            right.with_noise_std(Some(&[0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])),
        ),
    ] {
        let error = gate.route(&call).unwrap_err();
        assert!(matches!(error, GateError::BadElement { what, .. } if what == name), "{name}: {error}");
    }
    assert!(gate.route(&right).is_ok());
}

#[test]
fn arrays_that_a_router_has_no_use_for_are_refused() {
    let bias = Some(&[0.0; 4][..]);
    for config in [
        plain(4, 2).with_score(ScoreFunction::SoftmaxOfChosen),
        plain(4, 2).with_select(Select::Sinkhorn { tolerance: 1e-4 }),
        plain(4, 1).with_noise(Noise::Gumbel),
    ] {
        let call = GateInput::new(&[0.0; 4]).with_bias(bias);
        let error = Gate::new(config).unwrap().route(&call).unwrap_err();
        assert!(matches!(error, GateError::Conflict { one: "bias", .. }), "{error}");
    }
    let call = GateInput::new(&[0.0; 4]).with_noise_std(bias);
    let error = Gate::new(plain(4, 2)).unwrap().route(&call).unwrap_err();
    assert!(matches!(error, GateError::Conflict { one: "noise_std", .. }), "{error}");
}
