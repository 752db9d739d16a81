//! Steps of a pipeline without a meeting between them, which are validated behind the last one.
//!
//! An optimizer that clips gradients by their norm, or leaves out those that are not finite, needs
//! the gradients of all stages. So stages would meet behind each step, and the bubble that zero
//! bubble has filled would come back. Instead each stage decides by its own gradients, and all
//! compare the decisions later:
//!
//! ```text
//!   with meetings      step 0 | meet | step 1 | meet | step 2 | meet
//!   post-validated     step 0   step 1   step 2 | meet                   all decisions were right
//!                      step 0   step 1   step 2 | meet   back to the copy, steps with meetings
//! ```
//!
//! A decision is right if the gradients of the rank alone give that of all: as long as all are
//! finite and their norm is within the limit. Then steps have the results of steps with meetings,
//! to the bit. If any decision of any rank was wrong, or any layers failed, all ranks go back to
//! copies of their parameters and optimizer states, and repeat the steps with meetings. A copy
//! costs memory, where the inverse of a step would cost roundings.
//!
//! Other pipelines of the model, those of tensor and data parallelism, take part in each meeting,
//! so all ranks go back or none does.
//!
//! **Bits.** Sums of squares are `f64`, by ascending rank from +0.

use sidelane::Group;
use sidelane::collective::Communicator;
use sidelane::digest::Digest;
use sidelane::error::{Error, PlanError};

use super::plan::{Pass, Plan, Step};
use super::run::{BackwardCall, ForwardCall, Pipeline, Stage, verdicts};
use crate::check::agree;
use crate::error::{PipelineError, SettingError};
use crate::float::Float;

/// The use that an optimizer makes of the gradients of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Update {
    /// It leaves them out: they are not finite.
    Skip,
    /// It multiplies them: by the limit over their norm if the norm is above the limit, else by 1.
    Scale(f32),
}

impl Update {
    /// By the sum of the squares of all gradients.
    pub fn of(square_sum: f64, limit: f32) -> Update {
        let (norm, limit) = (square_sum.sqrt(), f64::from(limit));
        match norm {
            norm if !norm.is_finite() => Update::Skip,
            norm if norm > limit => Update::Scale((limit / norm) as f32),
            _ => Update::Scale(1.0),
        }
    }
}

/// A stage that updates its parameters behind the passes of a step, and can go back.
///
/// A step ends behind its last pass and the messages of that pass. There all stages may meet, so
/// [`square_sum`](OptimizedStage::square_sum) may first take means over data parallel ranks, and
/// add gradients of weights that two stages hold ([`TiedWeights`](crate::tensor::TiedWeights), and
/// both pieces of DualPipe).
pub trait OptimizedStage<E: Float = f32>: Stage<E> {
    /// A copy of parameters and optimizer states.
    type Kept;

    /// Sum of the squares of the gradients that count on this rank, at the end of a step. Each
    /// gradient of the model counts on one rank of all: tied weights on one of their stages,
    /// weights that tensor or data parallel ranks hold alike on one of those.
    ///
    /// # Errors
    /// Those of the layers.
    fn square_sum(&mut self) -> Result<f64, Self::Error>;

    /// Comes in place of [`square_sum`](OptimizedStage::square_sum) if this stage has failed, or
    /// has heard of one that has: refuses the calls in which `square_sum` meets other ranks, so
    /// that none waits ([`Communicator::refuse`]). A stage that meets none there need not have it.
    fn refuse_sum(&mut self) {}

    /// Updates the parameters, and forgets the gradients.
    ///
    /// # Errors
    /// Those of the layers.
    fn update(&mut self, update: Update) -> Result<(), Self::Error>;

    /// A copy of parameters and optimizer states.
    fn keep(&self) -> Self::Kept;

    /// Takes the copy back, and forgets gradients and activations.
    fn restore(&mut self, kept: &Self::Kept);
}

/// A pipeline that makes several steps and then validates them.
///
/// ```
/// use sidelane::World;
/// use sidelane_parallel::PipelineError;
/// use sidelane_parallel::pipeline::{OptimizedStage, Pass, PostValidation, Schedule, Stage, Update};
///
/// /// Adds its weight. The loss is the last sum.
/// struct Add {
///     stage: u32,
///     weight: f32,
///     gradient: f32,
/// }
///
/// impl Stage for Add {
///     type Error = PipelineError;
///
///     fn forward(&mut self, _: u32, _: u32, x: Option<&[f32]>) -> Result<Option<Vec<f32>>, PipelineError> {
///         Ok(Some(vec![x.map_or(0.0, |x| x[0]) + self.weight]))
///     }
///
///     fn backward(
///         &mut self, _: Pass, microbatch: u32, _: u32, of: Option<&[f32]>,
///     ) -> Result<Option<Vec<f32>>, PipelineError> {
///         let of = of.map_or(1.0, |of| of[0]);
///         // Something is wrong on one stage, in the second of three steps.
///         self.gradient += if (self.stage, microbatch) == (0, 3) { f32::NAN } else { of };
///         Ok(Some(vec![of]))
///     }
/// }
///
/// impl OptimizedStage for Add {
///     type Kept = f32;
///
///     fn square_sum(&mut self) -> Result<f64, PipelineError> {
///         Ok(f64::from(self.gradient).powi(2))
///     }
///
///     fn update(&mut self, update: Update) -> Result<(), PipelineError> {
///         if let Update::Scale(scale) = update {
///             self.weight -= scale * self.gradient;
///         }
///         self.gradient = 0.0;
///         Ok(())
///     }
///
///     fn keep(&self) -> f32 {
///         self.weight
///     }
///
///     fn restore(&mut self, kept: &f32) {
///         (self.weight, self.gradient) = (*kept, 0.0);
///     }
/// }
///
/// let ranks = World::threads(2)?.into_iter().map(|world| {
///     std::thread::spawn(move || -> Result<(Vec<Update>, f32), PipelineError> {
///         let plan = Schedule::OneFOneB.plan(2, 2)?;                       // two microbatches a step
///         let all = world.all()?;                                          // one pipeline of all ranks
///         let mut pipeline = PostValidation::new([&all, &all], &plan, 3, 1, f32::INFINITY)?;
///         let mut layers = Add { stage: world.rank(), weight: 1.0, gradient: 0.0 };
///         Ok((pipeline.run(&mut layers)?, layers.weight))
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     let (updates, weight) = rank.join().unwrap().unwrap();
///     assert_eq!(updates, [Update::Scale(1.0), Update::Skip, Update::Scale(1.0)]);
///     assert_eq!(weight, 1.0 - 2.0 - 2.0);                                 // the other stage went back
/// }
/// # Ok::<(), sidelane::Error>(())
/// ```
#[derive(Debug)]
pub struct PostValidation<E = f32> {
    plan: Plan,
    steps: u32,
    limit: f32,
    stage: u32,
    /// Of all steps, and of one.
    pipelines: [Pipeline<E>; 2],
    /// Of all ranks.
    verdicts: Communicator,
}

impl<E: Float> PostValidation<E> {
    /// A pipeline that makes so many steps of a plan at a time ([`Plan::steps`]), with messages of
    /// so many elements. Gradients are clipped to a norm of `limit`, which may be infinite. `all`
    /// has the ranks of each pipeline of the model, which decide together, and `stages` those of
    /// this one. Collective over `all`, whose ranks compare all other arguments. It takes the
    /// windows of two pipelines.
    ///
    /// # Errors
    /// As [`Plan::steps`] and [`Pipeline::new`]; [`PipelineError::Setting`] for a limit that is not
    /// above 0; [`PlanError::BadParameter`] if `all` has not each rank of `stages`.
    pub fn new(
        [all, stages]: [&Group; 2],
        plan: &Plan,
        steps: u32,
        elements: usize,
        limit: f32,
    ) -> Result<PostValidation<E>, PipelineError> {
        let (mut verdicts, stage) = (verdicts(all)?, stages.rank());
        let settings = has_all(all, stages).map(|()| {
            vec![
                ("plan of a step", Digest::of(format!("{plan:?}").bytes())),
                ("steps at a time", steps.into()),
                ("bits of the limit", limit.to_bits().into()),
            ]
        });
        agree(&mut verdicts, settings)?;
        // Alike on all ranks from here on, and so are their errors.
        if limit.is_nan() || limit <= 0.0 {
            let (setting, expected) = ("limit of the norm", "above 0");
            return Err(SettingError::OutOfRange { setting, seen: limit.into(), expected }.into());
        }
        let several = plan.steps(steps)?;
        let new = |plan| Pipeline::new(stages, plan, elements);
        let pipelines = new(&several).and_then(|several| Ok([several, new(plan)?]));
        let failed = meet(&mut verdicts, pipelines.as_ref().err().map(|_| stage), &[])?.failed;
        let (plan, pipelines) = (plan.clone(), pipelines?);
        match failed {
            Some(stage) => Err(PipelineError::Elsewhere { stage }),
            None => Ok(PostValidation { plan, steps, limit, stage, pipelines, verdicts }),
        }
    }

    /// Makes the steps, and returns what was done in each. Microbatch `i` of step `k` is number `k
    /// m + i`. Collective over the ranks of all pipelines.
    ///
    /// # Errors
    /// As [`Pipeline::run`], of a step with meetings. [`PipelineError::Elsewhere`] may name a stage
    /// of another pipeline. Then all stages have gone back to where they began.
    pub fn run<S: OptimizedStage<E>>(&mut self, layers: &mut S) -> Result<Vec<Update>, S::Error> {
        let kept = layers.keep();
        let made = match self.optimistic(layers) {
            Ok(None) => {
                layers.restore(&kept);
                (0..self.steps).map(|step| self.step(step, layers)).collect()
            }
            Ok(Some(updates)) => Ok(updates),
            Err(error) => Err(error.into()),
        };
        made.inspect_err(|_| layers.restore(&kept))
    }

    /// All steps, each with the decision of this rank. None if the decision of any rank was wrong,
    /// or if any layers have failed: a wrong decision may be the reason.
    fn optimistic<S: OptimizedStage<E>>(
        &mut self,
        layers: &mut S,
    ) -> Result<Option<Vec<Update>>, PipelineError> {
        let (limit, steps) = (self.limit, self.steps as usize);
        let (made, own) = sums(&mut self.pipelines[0], self.steps, layers, 0, Some(limit));
        let met = meet(&mut self.verdicts, made.err().map(|_| self.stage), &own)?;
        if met.failed.is_some() {
            return Ok(None);
        }
        let right = (0..steps).map(|step| {
            let of_ranks = || met.sums.chunks_exact(steps).map(|sums| sums[step]);
            let update = Update::of(sum(of_ranks()), limit);
            of_ranks().all(|sum| Update::of(sum, limit) == update).then_some(update)
        });
        Ok(right.collect())
    }

    /// A step with the decision of all ranks.
    fn step<S: OptimizedStage<E>>(&mut self, step: u32, layers: &mut S) -> Result<Update, S::Error> {
        let first = step * self.plan.shape().microbatches;
        let (made, own) = sums(&mut self.pipelines[1], 1, layers, first, None);
        let update = Update::of(sum(self.all_made(made, &own)?), self.limit);
        let updated = layers.update(update);
        self.all_made(updated, &[])?;
        Ok(update)
    }

    /// Sums of all ranks, by ascending rank, if none has failed.
    fn all_made<F: From<PipelineError>>(&mut self, made: Result<(), F>, own: &[f64]) -> Result<Vec<f64>, F> {
        let failed = made.as_ref().err().map(|_| self.stage);
        let met = meet(&mut self.verdicts, failed, own).map_err(PipelineError::from)?;
        made?;
        met.failed.map_or(Ok(met.sums), |stage| Err(PipelineError::Elsewhere { stage }.into()))
    }
}

/// Checks that a group has each rank of another.
fn has_all(all: &Group, stages: &Group) -> Result<(), PipelineError> {
    let Some(&rank) = stages.ranks().iter().find(|rank| !all.ranks().contains(rank)) else {
        return Ok(());
    };
    let (parameter, expected) = ("rank of the pipeline", "a rank of the group of all");
    Err(Error::from(PlanError::BadParameter { parameter, seen: rank.into(), expected }).into())
}

/// The answers of all ranks in a meeting.
struct Met {
    /// The first stage that has failed, by ascending rank.
    failed: Option<u32>,
    /// By ascending rank.
    sums: Vec<f64>,
}

/// Tells all ranks which stage has failed here, if it has, and the sums of this rank. Collective.
fn meet(verdicts: &mut Communicator, failed: Option<u32>, own: &[f64]) -> Result<Met, Error> {
    let failed = failed.map_or(0, |stage| 1 + u64::from(stage));
    let own: Vec<u64> = std::iter::once(failed).chain(own.iter().map(|sum| sum.to_bits())).collect();
    let mut all = vec![0; own.len() * size_of::<u64>() * verdicts.size() as usize];
    let bytes: Vec<u8> = own.iter().flat_map(|word| word.to_le_bytes()).collect();
    verdicts.all_gather(&bytes, &mut all)?;
    let words: Vec<u64> = all.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let of_ranks = words.chunks_exact(own.len());
    let failed = of_ranks.clone().find_map(|of| of[0].checked_sub(1)).map(|stage| stage as u32);
    Ok(Met { failed, sums: of_ranks.flat_map(|of| &of[1..]).map(|sum| f64::from_bits(*sum)).collect() })
}

/// From +0, in their order.
fn sum(of_ranks: impl IntoIterator<Item = f64>) -> f64 {
    of_ranks.into_iter().fold(0.0, |sum, of| sum + of)
}

/// Runs a pipeline of so many steps from a microbatch on. Returns the sum of squares of each step,
/// and zeros behind an error. This rank updates its parameters by its own sums if it decides, by a
/// limit of the norm.
fn sums<E: Float, S: OptimizedStage<E>>(
    pipeline: &mut Pipeline<E>,
    steps: u32,
    layers: &mut S,
    first: u32,
    decides: Option<f32>,
) -> (Result<(), S::Error>, Vec<f64>) {
    let mut sums = Vec::with_capacity(steps as usize);
    let made = pipeline.run_steps(&mut Numbered { layers, first }, steps, |of, stopped| {
        if stopped {
            of.layers.refuse_sum();
            return Ok(());
        }
        let sum = of.layers.square_sum()?;
        sums.push(sum);
        decides.map_or(Ok(()), |limit| of.layers.update(Update::of(sum, limit)))
    });
    sums.resize(steps as usize, 0.0);
    (made, sums)
}

/// A stage whose microbatches are numbered from another one on.
struct Numbered<'l, S> {
    layers: &'l mut S,
    first: u32,
}

impl<E: Float, S: Stage<E>> Stage<E> for Numbered<'_, S> {
    type Error = S::Error;

    fn forward(
        &mut self,
        microbatch: u32,
        model_chunk: u32,
        inputs: Option<&[E]>,
    ) -> Result<Option<Vec<E>>, S::Error> {
        self.layers.forward(self.first + microbatch, model_chunk, inputs)
    }

    fn backward(
        &mut self,
        pass: Pass,
        microbatch: u32,
        model_chunk: u32,
        gradient: Option<&[E]>,
    ) -> Result<Option<Vec<E>>, S::Error> {
        self.layers.backward(pass, self.first + microbatch, model_chunk, gradient)
    }

    fn forward_and_backward(
        &mut self,
        forward: ForwardCall<'_, E>,
        backward: BackwardCall<'_, E>,
    ) -> Result<[Option<Vec<E>>; 2], S::Error> {
        let forward = ForwardCall { microbatch: self.first + forward.microbatch, ..forward };
        let backward = BackwardCall { microbatch: self.first + backward.microbatch, ..backward };
        self.layers.forward_and_backward(forward, backward)
    }

    fn refuse(&mut self, step: &Step) {
        if let Some(step) = step.later(self.first) {
            self.layers.refuse(&step);
        }
    }
}
