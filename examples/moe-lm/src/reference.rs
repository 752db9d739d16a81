//! One process that plays all ranks of a run, one after another, with nothing between them.
//!
//! ```text
//!   rank 0: its windows, forward and backward     gradients = 0 + those of rank 0
//!   rank 1: its windows, forward and backward     gradients =   .. + those of rank 1      as ranks add theirs: from +0, by
//!   ..                                                                                    ascending rank, in f32
//! ```
//!
//! Each has a layer with all experts, so no row moves. Gradients of experts are one product over
//! the rows of all ranks that share them (`InTurn`), by rank and token: so the layer sums rows that
//! come from other ranks.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use sidelane::World;
use sidelane::layer::{ExpertError, Experts, GradientOrder, GroupedSwiGlu, Saved, Segments};

use crate::batches::Batches;
use crate::error::Result;
use crate::model::{Model, Pass};
use crate::parallel::{Chunks, Device, Plan, layers};
use crate::record::Decisions;
use crate::settings::Settings;
use crate::trainer::{Learned, Ranks, State};

/// All ranks in turn.
pub struct Reference {
    settings: Settings,
    /// Later numbers of ranks, each with the step that it holds from, ascending.
    changes: Vec<(usize, usize)>,
    model: Model,
    world: World,
}

impl Reference {
    /// In a world of its own, which has one rank.
    ///
    /// # Errors
    /// Those of the layers.
    pub fn new(world: World, settings: &Settings) -> Result<Reference> {
        Ok(Reference { settings: *settings, changes: Vec::new(), model: model(&world, settings)?, world })
    }

    /// The same with other numbers of ranks from some steps on: `(step, ranks)`, ascending.
    ///
    /// # Errors
    /// Those of [`Settings::check`] for each number.
    pub fn changing(mut self, changes: &[(usize, usize)]) -> Result<Reference> {
        changes.iter().try_fold(self.settings, |settings, &(_, ranks)| {
            let settings = settings.on(ranks);
            settings.check().map(|()| settings)
        })?;
        self.changes = changes.to_vec();
        Ok(self)
    }

    fn windows(&self, rank: usize) -> Range<usize> {
        rank * self.settings.windows()..(rank + 1) * self.settings.windows()
    }
}

/// The model of a process that plays all ranks.
fn model(world: &World, settings: &Settings) -> Result<Model> {
    let (chunks, device) = (Chunks::Number(1), Device::Host);
    let plan = Plan { chunks, overlap: false, device, survives: false, killed_in: None };
    let in_turn = |experts| InTurn::new(experts, settings.expert_parallel);
    let layers = layers(&world.all()?, settings, plan, settings.shape.experts, in_turn)?;
    Ok(Model::new(settings.shape, layers)?)
}

impl Ranks for Reference {
    fn own_experts(&self) -> Range<usize> {
        0..self.settings.shape.experts
    }

    fn learn(&mut self, state: &State, batches: &Batches, step: usize) -> Result<Pass> {
        self.model.load(state)?;
        let zeros = |of: &Learned| vec![0.0; of.weights.values.len()];
        let mut sum = Pass { loss: 0.0, dense: zeros(&state.dense), experts: zeros(&state.experts) };
        for rank in 0..self.settings.ranks {
            let windows = batches.of_step(&self.settings, step, self.windows(rank));
            let pass = self.model.learn(&state.dense.weights, &windows, self.settings.tokens(), || {})?;
            sum.loss += pass.loss;
            add(&mut sum.dense, &pass.dense);
            add(&mut sum.experts, &pass.experts);
        }
        Ok(sum)
    }

    fn judge(&mut self, state: &State, batches: &Batches) -> Result<(f32, Decisions)> {
        self.model.load(state)?;
        let (mut loss, mut decisions) = (0.0, Decisions::default());
        let tokens = batches.held() * self.settings.shape.window;
        for batch in (0..batches.held()).step_by(self.settings.batch) {
            let mut of_batch = 0.0;
            for rank in 0..self.settings.ranks {
                let Range { start, end } = self.windows(rank);
                let windows = batches.of_held(batch + start..batch + end);
                let (own, decided) = self.model.judge(&state.dense.weights, &windows, tokens)?;
                of_batch += own;
                decisions.extend(decided);
            }
            loss += of_batch;
        }
        Ok((loss, decisions))
    }

    fn change(&mut self, step: usize) -> Result<Option<Settings>> {
        let due = self.changes.iter().take_while(|&&(from, _)| from <= step).count();
        let passed: Vec<_> = self.changes.drain(..due).collect();
        let settings = passed.iter().fold(self.settings, |settings, &(_, ranks)| settings.on(ranks));
        if settings == self.settings {
            return Ok(None);
        }
        self.model = model(&self.world, &settings)?;
        self.settings = settings;
        Ok(Some(settings))
    }

    fn writes_dense(&self) -> bool {
        true
    }

    fn writes_experts(&self) -> bool {
        true
    }

    fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        Ok(vec![own.to_vec()])
    }
}

fn add(sum: &mut [f32], part: &[f32]) {
    sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
}

/// Experts that serve the ranks of a group in turn. The gradient of their weights is that of all
/// ranks' rows together: the last rank has it, the others zeros.
pub(crate) struct InTurn {
    experts: GroupedSwiGlu,
    ranks: usize,
    came: Mutex<Vec<Came>>,
}

/// Inputs of a rank.
struct Came {
    rows: Vec<f32>,
    hidden: usize,
    counts: Vec<i64>,
    padded: Vec<i64>,
    saved: Saved,
}

impl Came {
    fn chunk(&self) -> (Segments<'_>, &Saved) {
        let Came { rows, hidden, counts, padded, saved } = self;
        (Segments::new(rows, *hidden, counts, padded), saved)
    }
}

/// Saved values of the experts, which a rank leaves at the end.
type Left = Mutex<Option<Saved>>;

impl InTurn {
    pub(crate) fn new(experts: GroupedSwiGlu, ranks: usize) -> InTurn {
        InTurn { experts, ranks, came: Mutex::default() }
    }
}

impl Experts for InTurn {
    fn count(&self) -> usize {
        self.experts.count()
    }

    fn hidden(&self) -> usize {
        self.experts.hidden()
    }

    fn forward(&self, rows: Segments<'_>) -> std::result::Result<(Vec<f32>, Saved), ExpertError> {
        let (out, saved) = self.experts.forward(rows)?;
        Ok((out, Box::new(Left::new(Some(saved)))))
    }

    fn rows_backward(
        &self,
        rows: Segments<'_>,
        saved: &mut Saved,
        of_outputs: Vec<f32>,
    ) -> std::result::Result<Vec<f32>, ExpertError> {
        let left = saved.downcast_mut::<Left>().and_then(|left| left.get_mut().ok()?.as_mut());
        self.experts.rows_backward(rows, left.ok_or("nothing was saved")?, of_outputs)
    }

    fn weights_backward(
        &self,
        chunks: &[(Segments<'_>, &Saved)],
        _: &GradientOrder,
    ) -> std::result::Result<Vec<f32>, ExpertError> {
        let mut came = self.came.lock().unwrap_or_else(PoisonError::into_inner);
        for (rows, saved) in chunks {
            let left = saved.downcast_ref::<Left>().ok_or("saved by others")?;
            let saved =
                left.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or("nothing was saved")?;
            let Segments { rows, hidden, counts, padded, .. } = *rows;
            let (rows, counts, padded) = (rows.to_vec(), counts.to_vec(), padded.to_vec());
            came.push(Came { rows, hidden, counts, padded, saved });
        }
        if came.len() < self.ranks {
            return Ok(vec![0.0; self.weights().len()]);
        }
        let came = std::mem::take(&mut *came);
        let chunks: Vec<(Segments<'_>, &Saved)> = came.iter().map(Came::chunk).collect();
        let of_expert = |&count: &i64| count as u32;
        let counts: Vec<_> =
            came.iter().map(|came| vec![came.counts.iter().map(of_expert).collect()]).collect();
        let padded: Vec<&[i64]> = came.iter().map(|came| &came.padded[..]).collect();
        self.experts.weights_backward(&chunks, &GradientOrder::new(&counts, &padded))
    }

    fn weights(&self) -> &[f32] {
        self.experts.weights()
    }

    fn weights_mut(&mut self) -> &mut [f32] {
        self.experts.weights_mut()
    }
}
