//! Recorded choices.

use sidelane::error::GateError;
use sidelane::gate::{Gate, GateInput, Preset};

#[test]
fn recorded_choices_are_kept_and_weighed_by_this_call() {
    let logits = [1.0, 2.0, 3.0, 4.0, 4.0, 3.0, 2.0, 1.0];
    for preset in Preset::ALL {
        let k = preset.fixed_top_k().unwrap_or(2);
        let Ok(mut config) = preset.config(4, k) else { continue };
        config.capacity = None;
        let mut gate = Gate::new(config).unwrap();
        let recorded = gate.route(&GateInput::new(&logits)).unwrap().clone();
        let call = GateInput::new(&logits).with_replay(Some(recorded.choices()));
        let again = gate.route(&call).unwrap();
        assert_eq!((again.experts(), again.weights()), (recorded.experts(), recorded.weights()), "{preset}");
    }
}

#[test]
fn a_recorded_choice_may_be_missing_and_the_order_stays() {
    let mut gate = Gate::new(Preset::Mixtral.config(3, 2).unwrap()).unwrap();
    let call = GateInput::new(&[5.0, 1.0, 1.0, 5.0, 1.0, 1.0]).with_replay(Some(&[-1, 2, 2, 1]));
    let decision = gate.route(&call).unwrap();
    assert_eq!(decision.experts(), [-1, 2, 2, 1]);
    assert_eq!(decision.weights(), [0.0, 1.0, 0.5, 0.5]);
    assert_eq!(decision.dropped().filter(|&dropped| dropped).count(), 0);
}

#[test]
fn choices_that_cannot_be_are_named() {
    let mut gate = Gate::new(Preset::Qwen3.config(3, 2).unwrap()).unwrap();
    for (ids, k, expert) in [([0, 3], 1, 3), ([-2, 0], 0, -2), ([1, 1], 1, 1)] {
        let recorded = [0, 1, ids[0], ids[1]];
        let call = GateInput::new(&[0.0; 6]).with_replay(Some(&recorded));
        let error = GateError::BadReplay { token: 1, k, expert, experts: 3 };
        assert_eq!(gate.route(&call).unwrap_err(), error);
    }
    assert_eq!(gate.route(&GateInput::new(&[0.0; 6])).unwrap().experts(), [0, 1, 0, 1]);
}
