//! Steps, one after another: the same for ranks that are there and for one process that plays them.

use std::ops::Range;

use crate::batches::Batches;
use crate::error::{Error, Result};
use crate::model::Pass;
use crate::optimizer::AdamW;
use crate::record::Decisions;
use crate::settings::Settings;
use crate::weights::Weights;

/// How the ranks of a run come to a step's gradients.
pub trait Ranks {
    /// Which experts of a layer are here.
    fn own_experts(&self) -> Range<usize>;

    /// Mean loss and gradients of a step, added over all ranks, of experts over those that have
    /// them.
    ///
    /// # Errors
    /// Those of the model and of the sums.
    fn learn(&mut self, state: &State, batches: &Batches, step: usize) -> Result<Pass>;

    /// Mean loss of the held-out windows, and the last router's decisions for their tokens.
    ///
    /// # Errors
    /// Those of the model and of the sums.
    fn judge(&mut self, state: &State, batches: &Batches) -> Result<(f32, Decisions)>;

    /// Whether this rank writes the state that all have alike.
    fn writes_dense(&self) -> bool;

    /// Whether this rank writes down its experts, which others may have, too.
    fn writes_experts(&self) -> bool;

    /// The settings from a step on, if they are others than before it.
    ///
    /// # Errors
    /// Those of the layers.
    fn change(&mut self, step: usize) -> Result<Option<Settings>> {
        let _ = step;
        Ok(None)
    }

    /// Has a trainer go on after an error, without ranks that were lost. Collective among those
    /// that are left.
    ///
    /// # Errors
    /// The error, if it cannot.
    fn recover(trainer: &mut Trainer<Self>, error: Error) -> Result<()>
    where
        Self: Sized,
    {
        let _ = trainer;
        Err(error)
    }

    /// Has spares take the places of ranks that are missing: whether the ranks are others now.
    /// Collective, between two steps.
    ///
    /// # Errors
    /// Those of a world that fails meanwhile.
    fn grow(trainer: &mut Trainer<Self>) -> Result<bool>
    where
        Self: Sized,
    {
        let _ = trainer;
        Ok(false)
    }

    /// What each rank says, by rank. Collective.
    ///
    /// # Errors
    /// If one does not come.
    fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// The result of this rank, if all ranks have one: a rank that fails ends all, and none waits
    /// for it. Collective.
    ///
    /// # Errors
    /// Its own error; [`Error::Elsewhere`] with that of the first rank that has one; and if a rank
    /// does not come.
    fn agree<T>(&self, own: Result<T>) -> Result<T> {
        agree_by(own, |said| self.gather(said))
    }
}

/// As [`Ranks::agree`], of ranks that gather so.
///
/// # Errors
/// As there.
pub(crate) fn agree_by<T>(own: Result<T>, gather: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>>) -> Result<T> {
    let said = own.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let all = gather(said.as_bytes())?;
    let own = own?;
    match all.iter().position(|said| !said.is_empty()) {
        Some(rank) => Err(Error::Elsewhere { rank, said: String::from_utf8_lossy(&all[rank]).into_owned() }),
        None => Ok(own),
    }
}

/// Weights, and what their optimizer keeps.
#[derive(Clone, Debug, PartialEq)]
pub struct Learned {
    /// The weights.
    pub weights: Weights,
    /// Their means.
    pub adam: AdamW,
}

/// All that a rank has learned.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// State that is equal on all ranks.
    pub dense: Learned,
    /// The experts of this rank, layer by layer.
    pub experts: Learned,
}

/// What came of a run so far.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct History {
    /// Mean loss of each step, before its change of the weights; nats per token.
    pub losses: Vec<f32>,
    /// After how many steps the held-out windows were looked at, and their mean loss.
    pub held: Vec<(usize, f32)>,
}

/// One run, as a rank has it.
pub struct Trainer<R> {
    /// Settings of the run.
    pub settings: Settings,
    /// Its ranks.
    pub ranks: R,
    /// Its text.
    pub batches: Batches,
    /// Learned state.
    pub state: State,
    /// What came of it.
    pub history: History,
}

impl Learned {
    /// Before the first step.
    pub fn new(weights: Weights) -> Learned {
        Learned { adam: AdamW::new(weights.values.len()), weights }
    }

    /// Changes the weights by their gradient.
    pub fn step(&mut self, gradient: &[f32], step: usize, rate: f32) {
        self.adam.step(&mut self.weights.values, gradient, step, rate);
    }

    /// Weights, their means, and the means of their squares.
    pub fn vectors(&self) -> [&[f32]; 3] {
        [&self.weights.values, &self.adam.first, &self.adam.second]
    }

    /// The same, to be changed.
    pub fn vectors_mut(&mut self) -> [&mut [f32]; 3] {
        [&mut self.weights.values, &mut self.adam.first, &mut self.adam.second]
    }

    /// All that was learned of an expert.
    pub fn of_expert(&self, expert: usize) -> Vec<f32> {
        let ranges = self.weights.ranges_of(expert);
        let of_vector = |vector: &[f32]| -> Vec<f32> {
            ranges.iter().flat_map(|range| &vector[range.clone()]).copied().collect()
        };
        self.vectors().map(of_vector).concat()
    }

    /// Takes the first of these values for [those of an expert](Self::of_expert), and says how many
    /// they are.
    pub fn set_expert(&mut self, expert: usize, values: &[f32]) -> usize {
        let ranges = self.weights.ranges_of(expert);
        let mut taken = 0;
        for vector in self.vectors_mut() {
            for range in &ranges {
                vector[range.clone()].copy_from_slice(&values[taken..][..range.len()]);
                taken += range.len();
            }
        }
        taken
    }
}

impl State {
    /// Before the first step.
    pub fn new(settings: &Settings, own_experts: Range<usize>) -> State {
        let (dense, experts) = (Weights::dense(settings), Weights::experts(settings, own_experts));
        State { dense: Learned::new(dense), experts: Learned::new(experts) }
    }
}

impl<R: Ranks> Trainer<R> {
    /// Before the first step.
    pub fn new(settings: Settings, ranks: R, batches: Batches) -> Trainer<R> {
        let state = State::new(&settings, ranks.own_experts());
        Trainer { settings, ranks, batches, state, history: History::default() }
    }

    /// Steps that were made.
    pub fn steps(&self) -> usize {
        self.history.losses.len()
    }

    /// Changes ranks, if the run does so now.
    fn change(&mut self) -> Result<()> {
        if let Some(settings) = self.ranks.change(self.steps())? {
            self.settings = settings;
        }
        Ok(())
    }

    /// One step: its mean loss. Nothing is learned from one that is not finite.
    ///
    /// # Errors
    /// As [`Ranks::learn`]; [`Error::NotFinite`], which all ranks come to.
    pub fn step(&mut self) -> Result<f32> {
        self.change()?;
        let step = self.steps();
        let pass = self.ranks.learn(&self.state, &self.batches, step)?;
        finite("the loss of the next step", pass.loss, step)?;
        let rate = self.settings.rate_at(step);
        self.state.dense.step(&pass.dense, step, rate);
        self.state.experts.step(&pass.experts, step, rate);
        self.history.losses.push(pass.loss);
        Ok(pass.loss)
    }

    /// Looks at the windows that are held out.
    ///
    /// # Errors
    /// As [`Ranks::judge`]; [`Error::NotFinite`].
    pub fn judge(&mut self) -> Result<Decisions> {
        self.change()?;
        let (loss, decisions) = self.ranks.judge(&self.state, &self.batches)?;
        let steps = self.steps();
        finite("the loss on held-out tokens", loss, steps)?;
        self.history.held.retain(|&(seen, _)| seen != steps);
        self.history.held.push((steps, loss));
        Ok(decisions)
    }
}

fn finite(what: &'static str, loss: f32, steps: usize) -> Result<()> {
    if loss.is_finite() { Ok(()) } else { Err(Error::NotFinite { what, loss, steps }) }
}
