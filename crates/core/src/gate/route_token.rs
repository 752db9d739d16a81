//! One token: from its logits to its choices and their scores.
//!
//! ```text
//!   logits -> noise -> scores ------------------> scores of the chosen
//!      |         |        + bias                       ^
//!      v         v        v                            |
//!      keys: one of them, or Sinkhorn's -> choices ----+     (or recorded ones)
//! ```
//!
//! Only a softmax of all needs the scores of all experts. Other scores are computed for the chosen
//! experts, and for all on request. A token's experts are compared by these keys:
//!
//! | keys | where |
//! |---|---|
//! | logits, with their noise | scores would be compared alone: their order is that of the exact scores, and no two of them become equal by rounding |
//! | scores, plus bias | with a bias, or in groups |
//! | Sinkhorn's | while it balances |
//!
//! Computing scores in f64 takes longer than all else. Many sigmoids have to be compared and few
//! are chosen, so rough ones are compared first:
//!
//! ```text
//!   rough keys, off by at most e
//!       |    are the kept groups more than their sums' errors above the others, and the chosen experts more than 2e?
//!       +-- yes --> these are chosen by exact keys, too; the exact keys of the few put them in order
//!       +-- no ---> exact keys of all
//! ```
//!
//! Either way the choice is that of the exact keys.
//!
//! Sinkhorn's balancing finds factors for tokens and experts, in turn, until all tokens and all
//! experts weigh the same:
//!
//! ```text
//!   cost = e^logits [T,E];  to begin with, every expert's factor is 1
//!   factor of a token  = 1 / T / (sum over experts: factor * cost + 1e-8)
//!   factor of an expert = 1 / E / (sum over tokens: factor * cost + 1e-8)     until it changes by <= tolerance, on average
//!   keys = cost * factor of the token * factor of the expert
//! ```
//!
//! All in f64. It ends after [`ROUNDS`] in any case and uses the result so far: the choice needs an
//! order, not a fixed point.
//!
//! **Scores** are made in f64 and rounded once, so they are the nearest f32 but for a rare last
//! bit. Weights come from the unrounded scores.
//!
//! ```text
//!   logits [E] --begin--> parts [E] --last step--> scores [E] --of the chosen--> [K] --/ divisor, * scaling--> weights [K]
//! ```

use super::math::{LOGISTIC_ERROR, exp_each, largest, ln_1p, logistic_each, sum};
use super::top_k::{Selector, TopK};
use super::{Divisor, GateConfig, GateInput, Noise, Normalize, ScoreFunction, Select, ensure, math};
use crate::error::GateError;

/// Decides for one token after another; keeps its memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Tokens {
    /// Scores but for their last step, `[experts]`.
    parts: Vec<f64>,
    /// `[experts]`.
    noisy: Vec<f32>,
    /// Logits of the chosen.
    few: Vec<f32>,
    first: TopK,
    chooser: Chooser,
}

/// The decision for one token.
pub(super) struct Row<'a> {
    /// `[top_k]`.
    pub(super) ids: &'a mut [i32],
    /// Unrounded scores of the choices, `[top_k]`.
    pub(super) chosen: &'a mut [f64],
}

impl Tokens {
    /// To be called before the first token of a call.
    pub(super) fn begin(&mut self, config: &GateConfig, call: &GateInput<'_>) -> Result<(), GateError> {
        self.make_room(config);
        self.chooser.begin(config, call)
    }

    pub(super) fn make_room(&mut self, config: &GateConfig) {
        let experts = config.experts as usize;
        self.parts.resize(experts, 0.0);
        self.noisy.resize(experts, 0.0);
    }

    /// Decides for one token.
    pub(super) fn decide(
        &mut self,
        config: &GateConfig,
        call: &GateInput<'_>,
        token: u32,
        row: Row<'_>,
    ) -> Result<(), GateError> {
        let (at, k) = (token as usize, config.top_k as usize);
        let logits = logits_of(config, call, token)?;
        let noise = self.add_noise(config, call, token, logits);
        let Tokens { parts, noisy, few, first, chooser } = self;
        if noise == Noise::GumbelAfterFirst {
            first.of(logits, 1).for_each(|first| noisy[first as usize] = f32::INFINITY);
        }
        let noisy = &noisy[..];
        let compared = if noise == Noise::None { logits } else { noisy };
        let weighed = if noise.on_weights() { noisy } else { logits };
        let last = (config.score == ScoreFunction::Softmax).then(|| config.score.begin(weighed, parts));

        let recorded = call.replay.map(|ids| &ids[at * k..][..k]);
        recorded.map_or(Ok(()), |recorded| check_recorded(token, recorded, config.experts))?;
        let mut by_keys = false;
        if call.token_mask.is_some_and(|mask| !mask[at]) {
            row.ids.fill(-1);
        } else if let Some(recorded) = recorded {
            row.ids.copy_from_slice(recorded);
        } else {
            by_keys = true;
            chooser.choose(config, call, at, Logits { compared, weighed, parts, last }, row.ids);
        }
        match last {
            Some(last) => {
                let score = |&id: &i32| usize::try_from(id).map_or(0.0, |id| last.of(parts[id]));
                row.chosen.iter_mut().zip(row.ids.iter()).for_each(|(to, id)| *to = score(id));
            }
            None => of_chosen(config.score, weighed, row.ids, few, row.chosen),
        }
        if by_keys {
            put_in_order(config, call, row.ids, row.chosen);
        }
        Ok(())
    }

    /// Scores of all experts for one token.
    pub(super) fn score(
        &mut self,
        config: &GateConfig,
        call: &GateInput<'_>,
        token: u32,
        scores: &mut [f32],
    ) -> Result<(), GateError> {
        let logits = logits_of(config, call, token)?;
        let noise = self.add_noise(config, call, token, logits);
        let weighed = if noise.on_weights() { &self.noisy } else { logits };
        config.score.begin(weighed, &mut self.parts).round(&self.parts, scores);
        Ok(())
    }

    /// Logits with their noise for one token.
    pub(super) fn noisy(
        &mut self,
        config: &GateConfig,
        call: &GateInput<'_>,
        token: u32,
        to: &mut [f32],
    ) -> Result<(), GateError> {
        let logits = logits_of(config, call, token)?;
        let noise = self.add_noise(config, call, token, logits);
        to.copy_from_slice(if noise == Noise::None { logits } else { &self.noisy });
        Ok(())
    }

    /// Makes the noisy logits, where there is noise, and says which.
    fn add_noise(&mut self, config: &GateConfig, call: &GateInput<'_>, token: u32, logits: &[f32]) -> Noise {
        let noise = config.noise.of_pass(call.training);
        if noise != Noise::None {
            let experts = config.experts as usize;
            let deviation = call.noise_std.map(|all| &all[token as usize * experts..][..experts]);
            noise.fill(call.draw, token, logits, deviation, &mut self.noisy);
        }
        noise
    }
}

/// The logits of a token, which are finite.
fn logits_of<'a>(config: &GateConfig, call: &GateInput<'a>, token: u32) -> Result<&'a [f32], GateError> {
    let experts = config.experts as usize;
    let logits = &call.logits[token as usize * experts..][..experts];
    finite(token, logits)?;
    Ok(logits)
}

fn finite(token: u32, logits: &[f32]) -> Result<(), GateError> {
    if math::finite(logits) {
        return Ok(());
    }
    let bad = (0..).zip(logits).find(|(_, logit)| !logit.is_finite());
    bad.map_or(Ok(()), |(expert, &seen)| Err(GateError::NotFinite { token, expert, seen }))
}

/// Chooses for one token after another; keeps its memory.
#[derive(Clone, Debug, Default)]
struct Chooser {
    /// Keys to compare, `[experts]`.
    keys: Vec<f32>,
    /// How much rough keys are off, at most.
    error: f32,
    selector: Selector,
    sinkhorn: Sinkhorn,
}

/// One token's logits and what has been made of them, `[experts]` each.
struct Logits<'a> {
    /// By which is chosen.
    compared: &'a [f32],
    /// From which weights are made.
    weighed: &'a [f32],
    /// Scores but for their last step; room for them where that is `None`.
    parts: &'a mut [f64],
    last: Option<Last>,
}

impl Chooser {
    /// To be called before the first token of a call.
    fn begin(&mut self, config: &GateConfig, call: &GateInput<'_>) -> Result<(), GateError> {
        let experts = config.experts as usize;
        self.keys.resize(experts, 0.0);
        let largest = |bias: &[f32]| bias.iter().fold(0f32, |most, bias| most.max(bias.abs()));
        self.error = LOGISTIC_ERROR * (1.0 + call.bias.map_or(0.0, largest));
        if let Some(tolerance) = balanced(config, call) {
            for (token, logits) in (0..).zip(call.logits.chunks_exact(experts)) {
                finite(token, logits)?;
            }
            self.sinkhorn.balance(call.logits, experts, call.token_mask, tolerance)?;
        }
        Ok(())
    }

    /// Fills `ids` with a token's choices, best first. By rough keys, choices that lie close
    /// together may be out of order.
    fn choose(
        &mut self,
        config: &GateConfig,
        call: &GateInput<'_>,
        token: usize,
        logits: Logits<'_>,
        ids: &mut [i32],
    ) {
        if balanced(config, call).is_some() {
            self.sinkhorn.keys(token, &mut self.keys);
            self.selector.choose(config.select, &self.keys, 0.0, ids);
        } else if by_scores(config, call) {
            self.by_scores(config, call.bias, logits, ids);
        } else {
            self.selector.choose(config.select, logits.compared, 0.0, ids);
        }
    }

    fn by_scores(&mut self, config: &GateConfig, bias: Option<&[f32]>, logits: Logits<'_>, ids: &mut [i32]) {
        let Logits { weighed, parts, last, .. } = logits;
        if config.score == ScoreFunction::Sigmoid {
            logistic_each(weighed, &mut self.keys);
            add(bias, &mut self.keys);
            if self.selector.choose(config.select, &self.keys, self.error, ids) {
                return;
            }
        }
        let last = last.unwrap_or_else(|| config.score.begin(weighed, parts));
        last.round(parts, &mut self.keys);
        add(bias, &mut self.keys);
        self.selector.choose(config.select, &self.keys, 0.0, ids);
    }
}

/// Sorts choices by the exact keys of their `scores`, if scores chose them.
fn put_in_order(config: &GateConfig, call: &GateInput<'_>, ids: &mut [i32], scores: &mut [f64]) {
    if !by_scores(config, call) {
        return;
    }
    let key = |id: i32, score: f64| score as f32 + call.bias.map_or(0.0, |bias| bias[id as usize]);
    // Hardly ever is there anything to do.
    for end in 1..ids.len() {
        for at in (1..=end).rev() {
            let (one, other) = (key(ids[at - 1], scores[at - 1]), key(ids[at], scores[at]));
            if one > other || one == other && ids[at - 1] < ids[at] {
                break;
            }
            ids.swap(at - 1, at);
            scores.swap(at - 1, at);
        }
    }
}

fn by_scores(config: &GateConfig, call: &GateInput<'_>) -> bool {
    let groups = matches!(config.select, Select::Groups { .. });
    call.bias.is_some() || groups && config.score.before_choice()
}

fn add(bias: Option<&[f32]>, keys: &mut [f32]) {
    if let Some(bias) = bias {
        keys.iter_mut().zip(bias).for_each(|(key, bias)| *key += bias);
    }
}

/// The tolerance, where choices are balanced.
fn balanced(config: &GateConfig, call: &GateInput<'_>) -> Option<f32> {
    match config.select {
        Select::Sinkhorn { tolerance } if call.training && call.replay.is_none() => Some(tolerance),
        _ => None,
    }
}

/// Checks the recorded choices of one token.
pub(super) fn check_recorded(token: u32, ids: &[i32], experts: u32) -> Result<(), GateError> {
    for (k, &expert) in ids.iter().enumerate() {
        let known = expert == -1 || u32::try_from(expert).is_ok_and(|id| id < experts);
        if !known || expert >= 0 && ids[..k].contains(&expert) {
            return Err(GateError::BadReplay { token, k: k as u32, expert, experts });
        }
    }
    Ok(())
}

/// So many rounds at most. What balances at all has done so within some tens.
const ROUNDS: u32 = 1000;

/// Keeps a sum of nothing from being divided by.
const EPSILON: f64 = 1e-8;

/// The largest logit whose exponential is finite in f32.
const LARGEST: f64 = 88.0;

/// Balances; keeps its memory.
#[derive(Clone, Debug, Default)]
struct Sinkhorn {
    cost: Vec<f64>,
    /// Per token; 0 for those that do not count.
    tokens: Vec<f64>,
    experts: Vec<f64>,
    sums: Vec<f64>,
    products: Vec<f64>,
}

impl Sinkhorn {
    /// Finds the factors for finite `logits`, `[tokens, experts]`; tokens that are not in
    /// `token_mask` do not count.
    ///
    /// # Errors
    /// [`GateError::BadNumber`] if a logit is above 88.
    fn balance(
        &mut self,
        logits: &[f32],
        experts: usize,
        token_mask: Option<&[bool]>,
        tolerance: f32,
    ) -> Result<(), GateError> {
        let largest = f64::from(math::largest(logits));
        ensure(largest <= LARGEST, "logit", largest, "at most 88 for Sinkhorn's balancing")?;
        self.cost.resize(logits.len(), 0.0);
        exp_each(logits, |x| x, &mut self.cost);
        let counts = |token: usize| token_mask.is_none_or(|mask| mask[token]);
        self.tokens.clear();
        self.tokens.extend((0..logits.len() / experts).map(|token| f64::from(u8::from(counts(token)))));
        let share = 1.0 / sum(&self.tokens).max(1.0);
        for (list, value) in [(&mut self.experts, 1.0), (&mut self.sums, 0.0), (&mut self.products, 0.0)] {
            list.clear();
            list.resize(experts, value);
        }
        for _ in 0..ROUNDS {
            if self.round(share, &counts) <= f64::from(tolerance) {
                break;
            }
        }
        Ok(())
    }

    /// One round; how much the factors of the experts have changed, on average.
    fn round(&mut self, share: f64, counts: &impl Fn(usize) -> bool) -> f64 {
        let count = self.experts.len();
        self.sums.fill(0.0);
        for (token, (factor, cost)) in self.tokens.iter_mut().zip(self.cost.chunks_exact(count)).enumerate() {
            if counts(token) {
                let pairs = self.experts.iter().zip(cost);
                self.products.iter_mut().zip(pairs).for_each(|(to, (factor, cost))| *to = factor * cost);
                *factor = share / (sum(&self.products) + EPSILON);
                self.sums.iter_mut().zip(cost).for_each(|(sum, cost)| *sum += *factor * cost);
            }
        }
        let mut change = 0.0;
        for (factor, sum) in self.experts.iter_mut().zip(&self.sums) {
            let next = 1.0 / count as f64 / (sum + EPSILON);
            change += (*factor - next).abs();
            *factor = next;
        }
        change / count as f64
    }

    /// Keys by which token `token` chooses.
    fn keys(&self, token: usize, keys: &mut [f32]) {
        let cost = &self.cost[token * self.experts.len()..];
        for ((key, factor), cost) in keys.iter_mut().zip(&self.experts).zip(cost) {
            *key = (factor * cost * self.tokens[token]) as f32;
        }
    }
}

impl ScoreFunction {
    /// Whether scores are made of all experts; if not, of the chosen alone, after the choice.
    pub(super) fn before_choice(self) -> bool {
        self != ScoreFunction::SoftmaxOfChosen
    }

    /// Scores of all `logits`.
    pub(super) fn fill(self, logits: &[f32], scores: &mut [f64]) {
        let last = self.begin(logits, scores);
        scores.iter_mut().for_each(|score| *score = last.of(*score));
    }

    /// Scores of all `logits` but for the last step, which is returned.
    pub(super) fn begin(self, logits: &[f32], parts: &mut [f64]) -> Last {
        match self {
            ScoreFunction::Softmax | ScoreFunction::SoftmaxOfChosen => {
                let top = f64::from(largest(logits));
                exp_each(
                    logits,
                    #[inline(always)]
                    |x| x - top,
                    parts,
                );
                Last::Times(1.0 / sum(parts))
            }
            ScoreFunction::Sigmoid => {
                exp_each(
                    logits,
                    #[inline(always)]
                    |x| -x,
                    parts,
                );
                Last::Logistic
            }
            ScoreFunction::SqrtSoftplus => {
                exp_each(
                    logits,
                    #[inline(always)]
                    |x| -x.abs(),
                    parts,
                );
                for (part, &logit) in parts.iter_mut().zip(logits) {
                    // ln(1 + e^x), which is x and a rest for x above 0.
                    let positive = if logit > 0.0 { f64::from(logit) } else { 0.0 };
                    *part = (positive + ln_1p(*part)).sqrt();
                }
                Last::Times(1.0)
            }
        }
    }
}

/// The last step of scores: taken for all of them and rounded, and once more for the chosen.
#[derive(Clone, Copy, Debug)]
pub(super) enum Last {
    Times(f64),
    /// 1 / (1 + e).
    Logistic,
}

impl Last {
    #[inline(always)]
    pub(super) fn of(self, part: f64) -> f64 {
        match self {
            Last::Times(factor) => part * factor,
            Last::Logistic => 1.0 / (1.0 + part),
        }
    }

    pub(super) fn round(self, parts: &[f64], scores: &mut [f32]) {
        let pairs = scores.iter_mut().zip(parts);
        match self {
            Last::Times(_) => pairs.for_each(|(score, &part)| *score = self.of(part) as f32),
            Last::Logistic => pairs.for_each(|(score, &part)| *score = Last::Logistic.of(part) as f32),
        }
    }
}

/// Scores of one token's choices, made of their `logits` alone; ids of -1 have none.
pub(super) fn of_chosen(
    score: ScoreFunction,
    logits: &[f32],
    ids: &[i32],
    spare: &mut Vec<f32>,
    chosen: &mut [f64],
) {
    spare.clear();
    spare.extend(ids.iter().filter(|&&id| id >= 0).map(|&id| logits[id as usize]));
    let mut left = spare.len();
    score.fill(spare, &mut chosen[..left]);
    if left == ids.len() {
        return;
    }
    // From the back, so that none is overwritten before it has moved.
    for (k, &id) in ids.iter().enumerate().rev() {
        chosen[k] = if id < 0 {
            0.0
        } else {
            left -= 1;
            chosen[left]
        };
    }
}

impl Normalize {
    /// Divisor of weights before any is dropped.
    pub(super) fn before(self) -> Option<Divisor> {
        if let Normalize::BeforeDrop(divisor) = self { Some(divisor) } else { None }
    }

    /// Divisor of weights after some have been dropped.
    pub(super) fn after(self) -> Option<Divisor> {
        if let Normalize::AfterDrop(divisor) = self { Some(divisor) } else { None }
    }
}

impl Divisor {
    /// The divisor for the scores of those choices of a token that are not -1.
    pub(super) fn of(self, scores: &[f64], ids: &[i32]) -> f64 {
        let sum = scores.iter().zip(ids).filter(|&(_, &id)| id >= 0).map(|(score, _)| score).sum::<f64>();
        match self {
            Divisor::SumPlus(_) if ids.len() == 1 => 1.0,
            Divisor::SumPlus(more) => sum + f64::from(more),
            Divisor::SumAtLeast(least) => sum.max(f64::from(least)),
        }
    }
}

/// Weights of all choices, `[tokens, top_k]`: scores, divided by those of their token and scaled,
/// rounded once; 0 where the id is -1.
pub(super) fn weigh(
    divisor: Option<Divisor>,
    scaling: f32,
    top_k: usize,
    scores: &[f64],
    ids: &[i32],
    weights: &mut [f32],
) {
    let tokens = scores.chunks_exact(top_k).zip(ids.chunks_exact(top_k));
    for ((scores, ids), weights) in tokens.zip(weights.chunks_exact_mut(top_k)) {
        let divisor = divisor.map_or(1.0, |divisor| divisor.of(scores, ids));
        for ((weight, score), &id) in weights.iter_mut().zip(scores).zip(ids) {
            *weight = if id < 0 { 0.0 } else { (score / divisor * f64::from(scaling)) as f32 };
        }
    }
}
