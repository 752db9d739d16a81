//! The router: the input of a call in, a decision out.
//!
//! ```text
//!   GateInput --check--> per token: choices, scores (choose.rs) --> weights --> second choices --> capacity --> Decision
//! ```

use std::slice::ChunksExactMut;

use super::capacity::{CapacityAssigner, Chosen};
use super::config::conflict;
use super::route_token::{Row, Tokens, check_recorded, weigh};
use super::{
    Capacity, CapacityRule, DropPolicy, GateConfig, Noise, RngKey, Routing, ScoreFunction, Select, ensure,
    shape,
};
use crate::error::GateError;
use crate::with_methods;

/// One forward pass over the tokens of a rank. Only the logits must be given.
///
/// ```
/// use sidelane_core::gate::GateInput;
/// let call = GateInput::new(&[0.5, 1.0, -2.0, 0.0]).with_training(true);
/// assert!(call.bias.is_none());
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct GateInput<'a> {
    /// The router's logits, `[tokens, experts]`.
    pub logits: &'a [f32],
    /// `[experts]`, added to the scores for the choice alone.
    pub bias: Option<&'a [f32]>,
    /// `[tokens, experts]`: factors on the standard deviation of
    /// [`Noise::Normal`], 0 or more (Shazeer's noisy gate, whose deviations
    /// are learnt).
    pub noise_std: Option<&'a [f32]>,
    /// `[tokens]`: which tokens choose; the others are padding. All do where it is not given.
    pub token_mask: Option<&'a [bool]>,
    /// `[tokens, top_k]`: recorded choices, -1 for none. They replace the router's own choices;
    /// weights come from the scores of this call.
    pub replay: Option<&'a [i32]>,
    /// The largest number of rows that any rank needs for one expert, for a capacity that follows
    /// the need. All ranks must pass the same number.
    pub global_required: Option<u32>,
    /// Whether this is a training pass. Only then does the router add noise (unless its kind always
    /// applies), thin out second choices and balance choices.
    pub training: bool,
    /// Which random numbers.
    pub draw: RngKey,
}

impl<'a> GateInput<'a> {
    /// The pass over these logits, and nothing else.
    pub fn new(logits: &'a [f32]) -> Self {
        GateInput { logits, ..GateInput::default() }
    }

    with_methods! {
        with_logits(logits: &'a [f32]),
        with_bias(bias: Option<&'a [f32]>),
        with_noise_std(noise_std: Option<&'a [f32]>),
        with_token_mask(token_mask: Option<&'a [bool]>),
        with_replay(replay: Option<&'a [i32]>),
        with_global_required(global_required: Option<u32>),
        with_training(training: bool),
        with_draw(draw: RngKey),
    }

    /// Checks all but the values of logits and recorded choices; returns the number of tokens.
    fn check(&self, config: &GateConfig) -> Result<u32, GateError> {
        let (experts, k) = (config.experts as usize, config.top_k as usize);
        let tokens = self.logits.len() / experts;
        shape("logits", self.logits.len(), tokens, experts)?;
        ensure(i32::try_from(tokens).is_ok(), "tokens", tokens as f64, "at most 2^31 - 1")?;
        if let Some(bias) = self.bias {
            shape("bias", bias.len(), experts, 1)?;
            values("bias", 1, bias, |value| value.is_finite())?;
            if config.score == ScoreFunction::SoftmaxOfChosen {
                conflict("bias", "softmax of the chosen", "there are no scores to add it to")?;
            }
            if matches!(config.select, Select::Sinkhorn { .. }) {
                conflict("bias", "Sinkhorn", "both balance")?;
            }
            if config.noise.samples() {
                conflict("bias", "Gumbel noise", "it samples by the logits alone")?;
            }
        }
        if let Some(deviation) = self.noise_std {
            shape("noise_std", deviation.len(), tokens, experts)?;
            values("noise_std", experts, deviation, |value| value.is_finite() && value >= 0.0)?;
            if !matches!(config.noise, Noise::Normal { .. }) {
                conflict("noise_std", "noise that is not normal", "it has no deviation")?;
            }
        }
        self.token_mask.map_or(Ok(()), |mask| shape("token_mask", mask.len(), tokens, 1))?;
        self.replay.map_or(Ok(()), |ids| shape("recorded choices", ids.len(), tokens, k))?;
        Ok(tokens as u32)
    }
}

fn values(
    what: &'static str,
    columns: usize,
    values: &[f32],
    right: impl Fn(f32) -> bool,
) -> Result<(), GateError> {
    let wrong = values.iter().enumerate().find(|&(_, &value)| !right(value));
    wrong.map_or(Ok(()), |(at, &seen)| {
        Err(GateError::BadElement { what, row: at / columns, column: at % columns, seen })
    })
}

/// The choices of all tokens of a call, before and after dropping. Arrays `[tokens, top_k]` are
/// row-major; a token's choices come best first.
///
/// It belongs to its [`Gate`](super::Gate), which fills it anew with each call.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Decision {
    top_k: u32,
    choices: Vec<i32>,
    experts: Vec<i32>,
    weights: Vec<f32>,
    slots: Vec<i32>,
    capacity: u32,
    required: u32,
    counts_before: Vec<u32>,
    counts_after: Vec<u32>,
}

impl Decision {
    /// Makes room for so many tokens. Old values are left where they are.
    fn make_room(&mut self, tokens: usize) {
        let choices = tokens * self.top_k as usize;
        self.choices.resize(choices, -1);
        self.experts.resize(choices, -1);
        self.weights.resize(choices, 0.0);
        self.slots.resize(choices, -1);
    }

    /// Number of tokens.
    pub fn tokens(&self) -> u32 {
        (self.experts.len() / self.top_k as usize) as u32
    }

    /// Choices per token.
    pub fn top_k(&self) -> u32 {
        self.top_k
    }

    /// Choices before dropping, `[tokens, top_k]`; -1 for tokens that do not count.
    pub fn choices(&self) -> &[i32] {
        &self.choices
    }

    /// Choices after dropping, `[tokens, top_k]`: expert ids, or -1.
    pub fn experts(&self) -> &[i32] {
        &self.experts
    }

    /// Weights of [`experts`](Self::experts), `[tokens, top_k]`; 0 where there is none.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Experts and weights, to dispatch by.
    pub fn routing(&self) -> Routing<'_> {
        Routing::borrowed(self.top_k, &self.experts, &self.weights)
    }

    /// Which choices were dropped, `[tokens, top_k]`.
    pub fn dropped(&self) -> impl ExactSizeIterator<Item = bool> + '_ {
        self.choices.iter().zip(&self.experts).map(|(choice, expert)| choice != expert)
    }

    /// Tokens that chose and have nothing left: combine gives them zeros.
    pub fn dropped_tokens(&self) -> impl Iterator<Item = u32> + '_ {
        let k = self.top_k as usize;
        let rows = self.choices.chunks_exact(k).zip(self.experts.chunks_exact(k));
        let lost = |(choices, experts): (&[i32], &[i32])| {
            choices.iter().any(|&id| id >= 0) && experts.iter().all(|&id| id < 0)
        };
        (0..).zip(rows).filter(move |&(_, row)| lost(row)).map(|(token, _)| token)
    }

    /// Place of each choice among the rows of its expert and local group, `[tokens, top_k]`, from 0
    /// without gaps; -1 where there is none.
    pub fn slots(&self) -> &[i32] {
        &self.slots
    }

    /// Rows per expert and local group: the capacity or, for a dropless gate, the need of the
    /// fullest expert.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The capacity that would have dropped nothing: the largest count of an expert in a local
    /// group.
    pub fn required(&self) -> u32 {
        self.required
    }

    /// Choices of each expert, `[experts]`, before any was dropped.
    pub fn counts_before(&self) -> &[u32] {
        &self.counts_before
    }

    /// Choices of each expert that are left, `[experts]`.
    pub fn counts_after(&self) -> &[u32] {
        &self.counts_after
    }
}

/// A router with its configuration and its memory: after the first call of a size nothing is
/// allocated.
///
/// ```
/// use sidelane_core::gate::{Gate, GateInput, Preset};
/// let mut gate = Gate::new(Preset::Mixtral.config(4, 2)?)?;
/// let decision = gate.route(&GateInput::new(&[0.0, 2.0, 1.0, 2.0]))?;
/// assert_eq!(decision.experts(), [1, 3]);
/// assert_eq!(decision.weights(), [0.5, 0.5]);
/// # Ok::<(), sidelane_core::error::GateError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Gate {
    config: GateConfig,
    decision: Decision,
    tokens: Tokens,
    /// Unrounded scores of the choices, `[tokens, top_k]`.
    chosen: Vec<f64>,
    /// Scores of the choices, rounded, `[tokens, top_k]`.
    worth: Vec<f32>,
    keeper: CapacityAssigner,
}

/// All choices find room, in token order.
const DROPLESS: Capacity = Capacity {
    rule: CapacityRule::Needed,
    minimum: 0,
    align: 1,
    drop_policy: DropPolicy::Position,
    groups: 1,
    pad: false,
};

impl Gate {
    /// A router.
    ///
    /// # Errors
    /// Those of [`GateConfig::check`].
    pub fn new(config: GateConfig) -> Result<Gate, GateError> {
        config.check()?;
        let decision = Decision { top_k: config.top_k, ..Decision::default() };
        let (tokens, keeper) = (Tokens::default(), CapacityAssigner::default());
        Ok(Gate { config, decision, tokens, keeper, chosen: Vec::new(), worth: Vec::new() })
    }

    /// Configuration of the router.
    pub fn config(&self) -> &GateConfig {
        &self.config
    }

    /// Decides for all tokens of `call`.
    ///
    /// # Errors
    /// [`GateError::WrongShape`], [`GateError::NotFinite`], [`GateError::BadNumber`],
    /// [`GateError::Conflict`] and [`GateError::BadReplay`] name what is wrong with the call. Then
    /// the gate decides nothing, and the next call works.
    pub fn route(&mut self, call: &GateInput<'_>) -> Result<&Decision, GateError> {
        let Gate { config, decision, tokens, chosen, .. } = self;
        let count = call.check(config)?;
        let k = config.top_k as usize;
        decision.make_room(count as usize);
        chosen.resize(count as usize * k, 0.0);
        tokens.begin(config, call)?;
        for token in 0..count {
            let at = token as usize;
            let row = Row { ids: &mut decision.choices[at * k..][..k], chosen: &mut chosen[at * k..][..k] };
            tokens.decide(config, call, token, row)?;
        }
        self.drop(call)?;
        Ok(&self.decision)
    }

    /// Takes choices and weights, `[tokens, top_k]`, that something else has made by this
    /// configuration, such as a kernel, and places them. Nothing is dropped.
    ///
    /// ```
    /// # use sidelane_core::gate::{Gate, GateInput, Preset};
    /// let mut gate = Gate::new(Preset::Mixtral.config(4, 2)?)?;
    /// let decision = gate.accept(&[1, 3, -1, -1], &[0.75, 0.25, 0.0, 0.0])?;
    /// assert_eq!((decision.tokens(), decision.counts_after()), (2, &[0, 1, 0, 1][..]));
    /// # Ok::<(), sidelane_core::error::GateError>(())
    /// ```
    ///
    /// # Errors
    /// [`GateError::Conflict`] for a gate with a capacity, [`GateError::WrongShape`],
    /// [`GateError::BadReplay`] for choices that are no experts.
    pub fn accept(&mut self, choices: &[i32], weights: &[f32]) -> Result<&Decision, GateError> {
        let Gate { config, decision: of, keeper, .. } = self;
        let (experts, top_k, k) = (config.experts, config.top_k, config.top_k as usize);
        if config.capacity.is_some() {
            conflict("choices made elsewhere", "a capacity", "the gate alone knows which have room")?;
        }
        let tokens = choices.len() / k;
        shape("choices", choices.len(), tokens, k)?;
        shape("weights", weights.len(), tokens, k)?;
        (0..)
            .zip(choices.chunks_exact(k))
            .try_for_each(|(token, ids)| check_recorded(token, ids, experts))?;
        of.make_room(tokens);
        of.choices.copy_from_slice(choices);
        of.experts.copy_from_slice(choices);
        of.weights.copy_from_slice(weights);
        let chosen_by =
            Chosen { experts, top_k, ids: &mut of.experts, scores: weights, slots: &mut of.slots };
        let kept = keeper.keep(&DROPLESS, None, RngKey::default(), chosen_by)?;
        (of.capacity, of.required) = (kept.capacity, kept.required);
        count(&mut of.counts_before, experts, choices);
        count(&mut of.counts_after, experts, choices);
        Ok(&self.decision)
    }

    /// The scores of all experts, `[tokens, experts]`, before bias and normalization. Where weights
    /// come from the chosen experts alone
    /// ([`ScoreFunction::SoftmaxOfChosen`](super::ScoreFunction::SoftmaxOfChosen)), the softmax of
    /// all. A decision needs few of them, so they are computed on request.
    ///
    /// ```
    /// # use sidelane_core::gate::{Gate, GateInput, Preset};
    /// let mut gate = Gate::new(Preset::Qwen3.config(2, 1)?)?;
    /// let mut scores = [0.0; 4];
    /// gate.scores(&GateInput::new(&[1.0, 1.0, 2.0, 2.0]), &mut scores)?;
    /// assert_eq!(scores, [0.5; 4]);
    /// # Ok::<(), sidelane_core::error::GateError>(())
    /// ```
    ///
    /// # Errors
    /// As [`route`](Gate::route), and [`GateError::WrongShape`] if `scores` has another size than
    /// the logits.
    pub fn scores(&mut self, call: &GateInput<'_>, scores: &mut [f32]) -> Result<(), GateError> {
        let Gate { config, tokens, .. } = self;
        let rows = rows("scores", config, call, scores)?;
        tokens.make_room(config);
        (0..).zip(rows).try_for_each(|(token, row)| tokens.score(config, call, token, row))
    }

    /// The logits of `call` with their noise, `[tokens, experts]`: the logits that choose experts
    /// and, if the noise enters the weights, give weights. Without noise they equal the logits.
    ///
    /// # Errors
    /// As [`route`](Gate::route), and [`GateError::WrongShape`] if `noisy` has another size than
    /// the logits.
    pub fn noisy_logits(&mut self, call: &GateInput<'_>, noisy: &mut [f32]) -> Result<(), GateError> {
        let Gate { config, tokens, .. } = self;
        let rows = rows("noisy logits", config, call, noisy)?;
        tokens.make_room(config);
        (0..).zip(rows).try_for_each(|(token, row)| tokens.noisy(config, call, token, row))
    }

    /// From all choices to those that are left, their weights, places and counts.
    fn drop(&mut self, call: &GateInput<'_>) -> Result<(), GateError> {
        let Gate { config, decision: of, chosen, keeper, worth, .. } = self;
        let (k, scaling, normalize) = (config.top_k as usize, config.scaling, config.normalize);
        weigh(normalize.before(), scaling, k, chosen, &of.choices, &mut of.weights);
        of.experts.copy_from_slice(&of.choices);
        if call.training {
            config.second.thin(call.draw, &of.weights, &mut of.experts);
        }
        let capacity = config.capacity.as_ref().unwrap_or(&DROPLESS);
        let worth = if capacity.drop_policy == DropPolicy::Priority {
            worth.clear();
            worth.extend(chosen.iter().map(|&score| score as f32));
            &worth[..]
        } else {
            &of.weights
        };
        let (experts, top_k) = (config.experts, config.top_k);
        let chosen_by = Chosen { experts, top_k, ids: &mut of.experts, scores: worth, slots: &mut of.slots };
        let kept = keeper.keep(capacity, call.global_required, call.draw, chosen_by)?;
        (of.capacity, of.required) = (kept.capacity, kept.required);
        if let Some(after) = normalize.after() {
            weigh(Some(after), scaling, k, chosen, &of.experts, &mut of.weights);
        }
        of.weights
            .iter_mut()
            .zip(&of.experts)
            .filter(|(_, id)| **id < 0)
            .for_each(|(weight, _)| *weight = 0.0);
        count(&mut of.counts_before, experts, &of.choices);
        count(&mut of.counts_after, experts, &of.experts);
        Ok(())
    }
}

/// The rows of an array that is `[tokens, experts]` for a call that is right.
fn rows<'a>(
    what: &'static str,
    config: &GateConfig,
    call: &GateInput<'_>,
    array: &'a mut [f32],
) -> Result<ChunksExactMut<'a, f32>, GateError> {
    let (rows, columns) = (call.check(config)? as usize, config.experts as usize);
    shape(what, array.len(), rows, columns)?;
    Ok(array.chunks_exact_mut(columns))
}

fn count(counts: &mut Vec<u32>, experts: u32, ids: &[i32]) {
    counts.clear();
    counts.resize(experts as usize, 0);
    ids.iter().filter_map(|&id| usize::try_from(id).ok()).for_each(|id| counts[id] += 1);
}
