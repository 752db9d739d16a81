//! Steps without a meeting between them: they take the time that they should, and have the results
//! of steps with meetings, whichever stage has gradients that are not finite or too large.

use std::collections::HashMap;

use sidelane::error::{CallError, Error};
use sidelane_parallel::pipeline::{
    Costs, OptimizedStage, Pass, Plan, PostValidation, Schedule, Stage, Update, WarmUp, dual_pipe,
};
use sidelane_parallel::{PipelineError, SettingError};

use crate::naive_pipeline;
use crate::pipelines::options;
use crate::ranks::on_ranks;
use crate::tensors::{bits, tensor};

const STAGES: u32 = 4;
const MICROBATCHES: u32 = 8;
const STEPS: u32 = 3;
const WIDTH: usize = 3;
const RATE: f32 = 0.05;

/// Parameters of a stage, and their momentum.
#[derive(Clone, Debug, PartialEq)]
struct Parameters {
    weight: Vec<f32>,
    momentum: Vec<f32>,
}

impl Parameters {
    fn new(stage: u32) -> Parameters {
        let weight = tensor(1, stage.into(), WIDTH).iter().map(|value| 1.0 + value / 8.0).collect();
        Parameters { weight, momentum: vec![0.0; WIDTH] }
    }

    fn update(&mut self, gradient: &[f32], update: Update) {
        let Update::Scale(scale) = update else { return };
        for (nth, of) in gradient.iter().enumerate() {
            self.momentum[nth] = 0.5 * self.momentum[nth] + scale * of;
            self.weight[nth] -= RATE * self.momentum[nth];
        }
    }
}

/// Where a gradient is not a number: the stage, and the microbatch of the run.
type Poison = Option<(u32, u32)>;

/// `y = x weight`, by element. The loss is half the square of the last outputs.
struct Layers {
    stage: u32,
    poison: Poison,
    /// A microbatch whose forward pass fails.
    fails: Option<u32>,
    parameters: Parameters,
    inputs: HashMap<u32, Vec<f32>>,
    of_outputs: HashMap<u32, Vec<f32>>,
    gradients: HashMap<u32, Vec<f32>>,
    forward_passes: usize,
}

fn times(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a * b).collect()
}

fn input(microbatch: u32) -> Vec<f32> {
    tensor(2, microbatch.into(), WIDTH)
}

/// By ascending microbatch, from +0.
fn summed<'g>(gradients: impl Iterator<Item = &'g Vec<f32>>) -> Vec<f32> {
    crate::tensors::summed(gradients.cloned())
}

fn square_sum(of: &[f32]) -> f64 {
    of.iter().map(|of| f64::from(*of) * f64::from(*of)).sum()
}

impl Layers {
    fn new(stage: u32, poison: Poison) -> Layers {
        let (inputs, of_outputs, gradients) = Default::default();
        let parameters = Parameters::new(stage);
        Layers { stage, poison, fails: None, parameters, inputs, of_outputs, gradients, forward_passes: 0 }
    }

    fn gradient(&self) -> Vec<f32> {
        let mut numbers: Vec<_> = self.gradients.keys().collect();
        numbers.sort_unstable();
        assert_eq!(numbers.len(), MICROBATCHES as usize);
        summed(numbers.into_iter().map(|number| &self.gradients[number]))
    }
}

impl Stage for Layers {
    type Error = PipelineError;

    fn forward(
        &mut self,
        microbatch: u32,
        _: u32,
        inputs: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>, PipelineError> {
        if self.fails == Some(microbatch) {
            return Err(PipelineError::None { what: "layer" });
        }
        self.forward_passes += 1;
        let x = inputs.map_or_else(|| input(microbatch), <[f32]>::to_vec);
        let y = times(&x, &self.parameters.weight);
        if self.stage + 1 == STAGES {
            self.of_outputs.insert(microbatch, y.clone());
        }
        self.inputs.insert(microbatch, x);
        Ok(Some(y))
    }

    fn backward(
        &mut self,
        pass: Pass,
        microbatch: u32,
        _: u32,
        gradient: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>, PipelineError> {
        if let Some(gradient) = gradient {
            self.of_outputs.insert(microbatch, gradient.to_vec());
        }
        if pass != Pass::BackwardInput {
            let mut gradient = times(&self.of_outputs[&microbatch], &self.inputs[&microbatch]);
            if self.poison == Some((self.stage, microbatch)) {
                gradient[1] = f32::NAN;
            }
            self.gradients.insert(microbatch, gradient);
        }
        Ok(Some(times(&self.of_outputs[&microbatch], &self.parameters.weight)))
    }
}

impl OptimizedStage for Layers {
    type Kept = Parameters;

    fn square_sum(&mut self) -> Result<f64, PipelineError> {
        Ok(square_sum(&self.gradient()))
    }

    fn update(&mut self, update: Update) -> Result<(), PipelineError> {
        let gradient = self.gradient();
        self.parameters.update(&gradient, update);
        self.gradients.clear();
        Ok(())
    }

    fn keep(&self) -> Parameters {
        self.parameters.clone()
    }

    fn restore(&mut self, kept: &Parameters) {
        self.parameters = kept.clone();
        for of in [&mut self.inputs, &mut self.of_outputs, &mut self.gradients] {
            of.clear();
        }
    }
}

/// Two runs in one process, which knows all gradients of a step before it updates any stage.
fn reference(poison: Poison, limit: f32) -> (Vec<Parameters>, Vec<Update>) {
    let mut stages: Vec<_> = (0..STAGES).map(Parameters::new).collect();
    let steps = (0..2 * STEPS).map(|step| {
        let mut gradients = vec![Vec::new(); STAGES as usize];
        for number in step % STEPS * MICROBATCHES..(step % STEPS + 1) * MICROBATCHES {
            let mut x = vec![input(number)];
            stages.iter().for_each(|stage| x.push(times(&x[x.len() - 1], &stage.weight)));
            let mut of = x.pop().unwrap();
            for stage in (0..STAGES as usize).rev() {
                let mut gradient = times(&of, &x[stage]);
                if step < STEPS && poison == Some((stage as u32, number)) {
                    gradient[1] = f32::NAN;
                }
                gradients[stage].push(gradient);
                of = times(&of, &stages[stage].weight);
            }
        }
        let gradients: Vec<_> = gradients.iter().map(|of| summed(of.iter())).collect();
        let update = Update::of(gradients.iter().map(|of| square_sum(of)).fold(0.0, |a, b| a + b), limit);
        stages.iter_mut().zip(&gradients).for_each(|(stage, of)| stage.update(of, update));
        update
    });
    let updates = steps.collect();
    (stages, updates)
}

#[test]
fn steps_that_are_validated_later_have_the_bits_of_steps_with_meetings() {
    let infinite = f32::INFINITY;
    // Whether a decision of any stage is wrong in the first run.
    let cases = [
        (None, infinite, false),
        (Some((0, 3)), infinite, true),
        (Some((2, MICROBATCHES + 1)), infinite, true),
        (Some((3, 2 * MICROBATCHES + 7)), infinite, true),
        (None, 0.5, true),
        (Some((1, 2 * MICROBATCHES)), 0.5, true),
    ];
    let schedules = [Schedule::OneFOneB, Schedule::ZeroBubbleH1, Schedule::ZeroBubbleH2];
    for (nth, (poison, limit, wrong)) in cases.into_iter().enumerate() {
        let (right, updates) = reference(poison, limit);
        let skips = updates.iter().filter(|update| **update == Update::Skip).count();
        assert_eq!(skips, usize::from(poison.is_some()));
        let clips = updates.iter().any(|of| matches!(of, Update::Scale(scale) if *scale < 1.0));
        assert_eq!(clips, limit < infinite, "{updates:?}");
        let plan = schedules[nth % 3].plan(STAGES, MICROBATCHES).unwrap();
        let trained = on_ranks(&[0, 0, 1, 1], &options(), |world| {
            let group = world.all().unwrap();
            let mut pipeline = PostValidation::new(&group, &plan, STEPS, WIDTH, limit).unwrap();
            let mut layers = Layers::new(world.rank(), poison);
            let mut updates = pipeline.run(&mut layers).unwrap();
            let first_run = layers.forward_passes;
            layers.poison = None;
            updates.extend(pipeline.run(&mut layers).unwrap());
            (layers.parameters, updates, first_run)
        });
        for ((parameters, seen, first_run), right) in trained.into_iter().zip(right) {
            let passes = (STEPS * MICROBATCHES) as usize;
            assert_eq!(first_run, if wrong { 2 * passes } else { passes }, "{poison:?} {limit}");
            assert_eq!(seen, updates, "{poison:?} {limit}");
            let of = |of: &Parameters| [bits(&of.weight), bits(&of.momentum)];
            assert_eq!(of(&parameters), of(&right), "{poison:?} {limit}");
        }
    }
}

#[test]
fn stages_go_back_to_their_begin_if_layers_fail_and_make_the_next_run() {
    let plan = Schedule::ZeroBubbleH2.plan(STAGES, MICROBATCHES).unwrap();
    let (right, _) = reference(None, f32::INFINITY);
    let trained = on_ranks(&[0, 0, 1, 1], &options(), |world| {
        let group = world.all().unwrap();
        let mut pipeline = PostValidation::new(&group, &plan, STEPS, WIDTH, f32::INFINITY).unwrap();
        let mut layers = Layers::new(world.rank(), None);
        layers.fails = (world.rank() == 2).then_some(2 * MICROBATCHES + 1);
        let error = pipeline.run(&mut layers).unwrap_err();
        let expected = match world.rank() {
            2 => PipelineError::None { what: "layer" },
            _ => PipelineError::Elsewhere { stage: 2 },
        };
        assert_eq!((error, &layers.parameters), (expected, &Parameters::new(world.rank())));
        layers.fails = None;
        pipeline.run(&mut layers).unwrap();
        pipeline.run(&mut layers).unwrap();
        layers.parameters
    });
    assert_eq!(trained, right);
}

#[test]
fn settings_of_post_validation_are_refused_on_all_stages() {
    let plan = Schedule::OneFOneB.plan(2, 2).unwrap();
    on_ranks(&[0, 1], &options(), |world| {
        let (group, rank) = (world.all().unwrap(), world.rank());
        let new = |plan: &Plan, steps, limit| {
            PostValidation::<f32>::new(&group, plan, steps, 1, limit).map(drop).unwrap_err()
        };
        let differs = |error| match error {
            PipelineError::Sidelane(Error::Call(CallError::ConfigsDiffer { what, .. })) => what,
            error => panic!("{error}"),
        };
        assert_eq!(differs(new(&plan, 1 + rank, 1.0)), "steps at a time");
        assert_eq!(differs(new(&plan, 1, 1.0 + rank as f32)), "bits of the limit");
        let other = Schedule::OneFOneB.plan(2, 2 + rank).unwrap();
        assert_eq!(differs(new(&other, 1, 1.0)), "plan of a step");
        assert_eq!(new(&plan, 0, 1.0), PipelineError::None { what: "step" });
        assert!(matches!(new(&plan, u32::MAX, 1.0), PipelineError::TooMany { .. }));
        for limit in [0.0, -1.0, f32::NAN] {
            let error = new(&plan, 1, limit);
            assert!(matches!(error, PipelineError::Setting(SettingError::OutOfRange { .. })), "{error}");
        }
        PostValidation::<f32>::new(&group, &plan, 2, 1, 1.0).map(drop).unwrap();
    });
}

fn plans(stages: u32, microbatches: u32) -> Vec<Plan> {
    let interleaved = |warm_up| Schedule::Interleaved { model_chunks: 2, warm_up };
    let schedules = [
        Schedule::GPipe,
        Schedule::OneFOneB,
        interleaved(WarmUp::Megatron),
        interleaved(WarmUp::Least),
        Schedule::ZeroBubbleH1,
        Schedule::ZeroBubbleH2,
    ];
    let plans = schedules.into_iter().map(|schedule| schedule.plan(stages, microbatches).unwrap());
    plans.chain(dual_pipe(stages, microbatches)).collect()
}

#[test]
fn plans_of_several_steps_prove_and_compute_what_a_pipeline_must() {
    for (stages, microbatches) in [(1, 2), (2, 4), (4, 8), (8, 16)] {
        for plan in plans(stages, microbatches) {
            let several = plan.steps(3).unwrap();
            // Messages of a step may come while those of the last are not asked for.
            let unread = several.least_unread().unwrap();
            assert!(unread <= plan.least_unread().unwrap() + 1, "{:?}: {unread}", plan.shape());
            let (proof, of_one) = (several.prove(unread).unwrap(), plan.prove(unread).unwrap());
            assert_eq!((proof.passes, proof.messages), (3 * of_one.passes, 3 * of_one.messages));
            assert_eq!(proof.peaks, of_one.peaks, "{:?}", plan.shape());
            naive_pipeline::run(&several).unwrap();
            assert_eq!(plan.steps(1).unwrap(), plan);
            assert!(plan.clone().recompute(true).steps(2).unwrap().recomputes());
        }
    }
}

#[test]
fn steps_without_meetings_take_their_work_and_bubble_and_the_meeting_once() {
    for [f, b, w] in [[1, 1, 1], [2, 3, 1], [10, 12, 8], [9, 5, 8]] {
        let costs = Costs::new(f, b, w);
        for (p, m) in [(1, 4), (2, 4), (4, 8), (8, 16), (16, 64)] {
            for schedule in [Schedule::OneFOneB, Schedule::ZeroBubbleH1, Schedule::ZeroBubbleH2] {
                let plan = schedule.plan(p, m).unwrap();
                let time = |steps| plan.steps(steps).unwrap().time(u32::MAX, costs).unwrap().time();
                let one = plan.time(u32::MAX, costs).unwrap();
                let period = u64::from(m) * (f + b + w) + one.bubble();
                let meeting = one.time() - period;
                assert_eq!(time(1), period + meeting);
                assert_eq!(time(4), 4 * period + meeting, "{schedule:?} {p} {m} {costs:?}");
                let of_stage = match schedule {
                    Schedule::ZeroBubbleH1 => w.saturating_sub(b),
                    Schedule::ZeroBubbleH2 => f.min((2 * w).saturating_sub(b)),
                    _ => 0,
                };
                assert_eq!(meeting, u64::from(p - 1) * of_stage, "{schedule:?} {p} {m} {costs:?}");
            }
        }
    }
}
