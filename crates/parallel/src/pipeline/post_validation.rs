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
//! A decision is right if the gradients of the stage alone give that of all stages: as long as all
//! are finite and their norm is within the limit. Then steps have the results of steps with
//! meetings, to the bit. If any decision of any stage was wrong, all stages go back to copies of
//! their parameters and optimizer states, and repeat the steps with meetings. A copy costs memory,
//! where the inverse of a step would cost roundings.
//!
//! **Bits.** Sums of squares are `f64`, by ascending stage from +0.

use sidelane::Group;
use sidelane::collective::Communicator;
use sidelane::digest::Digest;

use super::plan::{Pass, Plan};
use super::run::{BackwardCall, ForwardCall, Pipeline, Stage, first_of, verdicts};
use crate::check::alike;
use crate::error::{PipelineError, SettingError};
use crate::float::Float;

/// What an optimizer does with the gradients of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Update {
    /// It leaves them out: they are not finite.
    Skip,
    /// It multiplies them: by 1, or by the limit over their norm if that is larger.
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
/// With data parallelism, the ranks of a stage must give the same sums: those of means over all of
/// them. Weights that are tied over two stages count on one.
pub trait OptimizedStage<E: Float = f32>: Stage<E> {
    /// A copy of parameters and optimizer states.
    type Kept;

    /// Sum of the squares of this stage's gradients, behind the last pass of a step.
    ///
    /// # Errors
    /// Those of the layers.
    fn square_sum(&mut self) -> Result<f64, Self::Error>;

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
///         let mut pipeline = PostValidation::new(&world.all()?, &plan, 3, 1, f32::INFINITY)?;
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
    /// Of all steps, and of one.
    pipelines: [Pipeline<E>; 2],
    verdicts: Communicator,
}

impl<E: Float> PostValidation<E> {
    /// A pipeline that makes so many steps of a plan at a time ([`Plan::steps`]), with messages of
    /// so many elements. Gradients are clipped to a norm of `limit`, which may be infinite.
    /// Collective: ranks compare all that they give. It takes the windows of two pipelines.
    ///
    /// # Errors
    /// As [`Plan::steps`] and [`Pipeline::new`]; [`PipelineError::Setting`] for a limit that is not
    /// above 0.
    pub fn new(
        group: &Group,
        plan: &Plan,
        steps: u32,
        elements: usize,
        limit: f32,
    ) -> Result<PostValidation<E>, PipelineError> {
        let mut verdicts = verdicts(group)?;
        let plan_digest = ("plan of a step", Digest::of(format!("{plan:?}").bytes()));
        let limit_bits = ("bits of the limit", limit.to_bits().into());
        alike(&mut verdicts, &[plan_digest, ("steps at a time", steps.into()), limit_bits])?;
        // Alike on all ranks from here on, and so are their errors.
        if limit.is_nan() || limit <= 0.0 {
            let (setting, expected) = ("limit of the norm", "above 0");
            return Err(SettingError::OutOfRange { setting, seen: limit.into(), expected }.into());
        }
        let several = plan.steps(steps)?;
        let pipelines = [Pipeline::new(group, &several, elements)?, Pipeline::new(group, plan, elements)?];
        Ok(PostValidation { plan: plan.clone(), steps, limit, pipelines, verdicts })
    }

    /// Makes the steps, and returns what was done in each. Microbatch `i` of step `k` is number `k
    /// m + i`. Collective.
    ///
    /// # Errors
    /// As [`Pipeline::run`]. Then all stages have gone back to where they began.
    pub fn run<S: OptimizedStage<E>>(&mut self, layers: &mut S) -> Result<Vec<Update>, S::Error> {
        let kept = layers.keep();
        let made = match self.optimistic(layers) {
            Ok(None) => {
                layers.restore(&kept);
                self.with_meetings(layers)
            }
            Ok(Some(updates)) => Ok(updates),
            Err(error) => Err(error),
        };
        made.inspect_err(|_| layers.restore(&kept))
    }

    /// All steps, each with the decision of this stage. None if a decision of any stage was wrong.
    fn optimistic<S: OptimizedStage<E>>(&mut self, layers: &mut S) -> Result<Option<Vec<Update>>, S::Error> {
        let mut counted = Counted::new(&self.plan, self.verdicts.rank(), layers, 0, Some(self.limit));
        self.pipelines[0].run(&mut counted)?;
        let own = counted.sums;
        let all = self.gathered(&own)?;
        let limit = self.limit;
        let right = (0..own.len()).map(|step| {
            let of_stages = || all.chunks_exact(own.len()).map(|sums| sums[step]);
            let update = Update::of(sum(of_stages()), limit);
            of_stages().all(|sum| Update::of(sum, limit) == update).then_some(update)
        });
        Ok(right.collect())
    }

    /// All steps, each with the decision of all stages.
    fn with_meetings<S: OptimizedStage<E>>(&mut self, layers: &mut S) -> Result<Vec<Update>, S::Error> {
        (0..self.steps).map(|step| self.step(step, layers)).collect()
    }

    fn step<S: OptimizedStage<E>>(&mut self, step: u32, layers: &mut S) -> Result<Update, S::Error> {
        let first = step * self.plan.shape().microbatches;
        let mut counted = Counted::new(&self.plan, self.verdicts.rank(), layers, first, None);
        self.pipelines[1].run(&mut counted)?;
        let own = counted.sums;
        let update = Update::of(sum(self.gathered(&own)?), self.limit);
        let updated = layers.update(update);
        let failed = first_of(&mut self.verdicts, updated.is_err()).map_err(PipelineError::from)?;
        updated?;
        failed.map_or(Ok(update), |stage| Err(PipelineError::Elsewhere { stage }.into()))
    }

    /// Sums of all stages, by ascending stage.
    fn gathered(&mut self, own: &[f64]) -> Result<Vec<f64>, PipelineError> {
        let own: Vec<u8> = own.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        let mut all = vec![0; own.len() * self.verdicts.size() as usize];
        self.verdicts.all_gather(&own, &mut all)?;
        Ok(all.as_chunks::<8>().0.iter().map(|sum| f64::from_le_bytes(*sum)).collect())
    }
}

/// By ascending stage.
fn sum(of_stages: impl IntoIterator<Item = f64>) -> f64 {
    of_stages.into_iter().fold(0.0, |sum, of| sum + of)
}

/// A stage whose passes are counted, so that a step is known to have ended.
struct Counted<'l, S> {
    layers: &'l mut S,
    /// Passes of a step on this stage, and those that are left.
    passes: usize,
    left: usize,
    /// Number of the first microbatch.
    first: u32,
    /// Of the steps that have ended.
    sums: Vec<f64>,
    /// Limit of the norm, if this stage decides.
    decides: Option<f32>,
}

impl<'l, S> Counted<'l, S> {
    fn new(plan: &Plan, stage: u32, layers: &'l mut S, first: u32, decides: Option<f32>) -> Self {
        let passes = plan.passes(stage).count();
        Counted { layers, passes, left: passes, first, sums: Vec::new(), decides }
    }

    /// Ends a step behind its last pass.
    fn passed<E: Float>(&mut self, passes: usize) -> Result<(), S::Error>
    where
        S: OptimizedStage<E>,
    {
        self.left -= passes;
        if self.left > 0 {
            return Ok(());
        }
        self.left = self.passes;
        let sum = self.layers.square_sum()?;
        self.sums.push(sum);
        self.decides.map_or(Ok(()), |limit| self.layers.update(Update::of(sum, limit)))
    }
}

impl<E: Float, S: OptimizedStage<E>> Stage<E> for Counted<'_, S> {
    type Error = S::Error;

    fn forward(
        &mut self,
        microbatch: u32,
        model_chunk: u32,
        inputs: Option<&[E]>,
    ) -> Result<Option<Vec<E>>, S::Error> {
        let outputs = self.layers.forward(self.first + microbatch, model_chunk, inputs)?;
        self.passed(1).and(Ok(outputs))
    }

    fn backward(
        &mut self,
        pass: Pass,
        microbatch: u32,
        model_chunk: u32,
        gradient: Option<&[E]>,
    ) -> Result<Option<Vec<E>>, S::Error> {
        let of_inputs = self.layers.backward(pass, self.first + microbatch, model_chunk, gradient)?;
        self.passed(1).and(Ok(of_inputs))
    }

    fn forward_and_backward(
        &mut self,
        forward: ForwardCall<'_, E>,
        backward: BackwardCall<'_, E>,
    ) -> Result<[Option<Vec<E>>; 2], S::Error> {
        let forward = ForwardCall { microbatch: self.first + forward.microbatch, ..forward };
        let backward = BackwardCall { microbatch: self.first + backward.microbatch, ..backward };
        let made = self.layers.forward_and_backward(forward, backward)?;
        self.passed(2).and(Ok(made))
    }
}
