//! Losses and their gradients, fed the exact choices.

use sidelane::error::GateError;
use sidelane::gate::{
    BalanceLoss, CountDivisor, CountedChoices, LossInput, PaddingTokens, Preset, ScoreFunction, TokenGroups,
    Totals, z_loss,
};

use super::asked;
use super::case::{Case, Loss, Lost};
use super::compare::{Seen, relative};
use super::draw;

/// Largest relative distance of a loss; of an element of a gradient, in units of the largest.
const LOSS: f64 = 1e-6;

impl Seen {
    /// A loss and its gradient, compared with the formula and the system.
    pub fn compare_loss(&mut self, case: &Case, loss: &Loss) {
        let mut gradient = vec![0.0; case.elements()];
        let ours = match ours(case, loss, &mut gradient) {
            Ok(ours) => f64::from(ours),
            Err(error) => return self.faults.push(format!("{}: {error}", case.name())),
        };
        self.losses += 1;
        for (judge, expected) in [("formula", Some(loss.exact)), (&case.judge, loss.theirs)] {
            let Some(expected) = expected else { continue };
            let far = relative(ours, expected);
            self.worst_loss = self.worst_loss.max(far);
            let fault = || format!("{}: {:?} {ours:e}, {judge} {expected:e}", case.name(), loss.kind);
            self.expect(far <= LOSS, fault);
        }
        // Where experts are loaded alike a gradient cancels: its parts are as large as the loss of
        // a token.
        let per_token = loss.exact / f64::from(case.tokens);
        for (judge, expected) in [("formula", &loss.gradient), (&case.judge, &loss.their_gradient)] {
            let Some(expected) = expected else { continue };
            let largest = expected.iter().fold(per_token, |largest, d| largest.max(d.abs().into()));
            let far = |(ours, expected): (&f32, &f32)| f64::from((ours - expected).abs()) / largest;
            let far = std::iter::zip(&gradient, expected).map(far).fold(0.0, f64::max);
            self.worst_gradient = self.worst_gradient.max(far);
            let fault = || format!("{}: gradient of {:?} {far:e} from {judge}", case.name(), loss.kind);
            self.expect(far <= LOSS && gradient.len() == expected.len(), fault);
        }
    }
}

fn ours(case: &Case, loss: &Loss, gradient: &mut [f32]) -> Result<f32, GateError> {
    let logits = draw::logits(case);
    let coefficient = loss.coefficient as f32;
    if loss.kind == Lost::Z {
        return z_loss(coefficient, &logits, case.experts, None, Some(gradient));
    }
    let used = draw::used(case);
    let input = LossInput {
        logits: &logits,
        experts: case.experts,
        top_k: case.top_k,
        choices: &case.exact.answer.ids,
        token_mask: used.as_deref(),
        totals: None,
    };
    let preset: Preset = case.preset.parse().expect("a preset");
    let balance = BalanceLoss::of(preset).with_coefficient(coefficient);
    let local = case.capacity.and_then(|room| room.local_groups).unwrap_or(1);
    let balance = match loss.kind {
        Lost::Balance => balance.with_parts(TokenGroups::Consecutive(local)),
        // Their own loss: where choices are free of bias, groups and replay, it is Megatron's times
        // the choices.
        Lost::Aux if preset != Preset::Megatron => balance.with_coefficient(coefficient / case.top_k as f32),
        kind => balance
            .with_score(match asked::config(case).score {
                ScoreFunction::SoftmaxOfChosen => ScoreFunction::Softmax,
                score => score,
            })
            .with_map(CountedChoices::Fresh)
            .with_share(CountDivisor::OfChoices)
            .with_unused(PaddingTokens::LeftOut)
            .with_parts(if kind == Lost::SeqAux {
                TokenGroups::Interleaved(loss.sequences)
            } else {
                TokenGroups::Whole
            }),
    };
    if loss.kind != Lost::GlobalAux {
        return balance.loss(&input, Some(gradient));
    }
    let mut counts = vec![0.0; case.experts as usize];
    balance.counts(&LossInput { logits: &draw::earlier(case), ..input }, &mut counts)?;
    balance.counts(&input, &mut counts)?;
    counts.iter_mut().for_each(|count| *count /= 2.0);
    let totals = Some(Totals { counts: &counts, tokens: case.tokens.into() });
    balance.loss(&LossInput { totals, ..input }, Some(gradient))
}
