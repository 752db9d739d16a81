//! Steps without a meeting between them: they take the time that they should, and have the results
//! of steps with meetings, whichever rank has gradients that are not finite or too large.

use std::collections::HashMap;

use sidelane::collective::Communicator;
use sidelane::error::{CallError, CallKind, Error, PlanError};
use sidelane::{Group, World};
use sidelane_parallel::pipeline::{
    Costs, OptimizedStage, Pass, Plan, PostValidation, Route, Schedule, Shape, Stage, Update, WarmUp,
    dual_pipe,
};
use sidelane_parallel::tensor::TiedWeights;
use sidelane_parallel::{Mesh, PipelineError, SettingError};

use crate::naive_pipeline;
use crate::pipelines::options;
use crate::ranks::on_ranks;
use crate::tensors::{bits, summed, tensor};

const STAGES: u32 = 4;
const MICROBATCHES: u32 = 8;
const STEPS: u32 = 3;
const WIDTH: usize = 3;
const RATE: f32 = 0.05;

/// Parameters of a piece of the model, and their momentum.
#[derive(Clone, Debug, PartialEq)]
struct Parameters {
    weight: Vec<f32>,
    momentum: Vec<f32>,
}

impl Parameters {
    fn new(piece: u32) -> Parameters {
        let weight = tensor(1, piece.into(), WIDTH).iter().map(|value| 1.0 + value / 8.0).collect();
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

/// A model and its run.
#[derive(Clone, Copy, Debug)]
struct Case {
    shape: Shape,
    /// Whether the first and the last piece have the same weights.
    tied: bool,
    /// Where a gradient is not a number: the stage, the model chunk, and the microbatch of the run.
    poison: Option<(u32, u32, u32)>,
    limit: f32,
}

impl Case {
    fn new(shape: Shape) -> Case {
        Case { shape, tied: false, poison: None, limit: f32::INFINITY }
    }

    fn both_ways(&self) -> bool {
        self.shape.route == Route::BothWays
    }

    /// The piece of the model that a model chunk is.
    fn piece(&self, stage: u32, model_chunk: u32) -> u32 {
        match (self.both_ways(), model_chunk) {
            (true, 1) => self.shape.stages - 1 - stage,
            _ => model_chunk * self.shape.stages + stage,
        }
    }

    fn pieces(&self) -> u32 {
        self.shape.stages * if self.both_ways() { 1 } else { self.shape.model_chunks }
    }

    fn parameters(&self, piece: u32) -> Parameters {
        Parameters::new(if self.tied && piece + 1 == self.pieces() { 0 } else { piece })
    }

    /// Model chunks of a stage whose weights another stage holds too, by ascending piece.
    fn shared(&self, stage: u32) -> &'static [usize] {
        match (self.tied, self.both_ways()) {
            (false, true) if stage < self.shape.stages / 2 => &[0, 1],
            (false, true) => &[1, 0],
            (true, false) if stage == 0 => &[0],
            (true, false) if stage + 1 == self.shape.stages => match self.shape.model_chunks {
                1 => &[0],
                _ => &[1],
            },
            _ => &[],
        }
    }

    /// Whether gradients of a model chunk count on this stage.
    fn counts(&self, stage: u32, model_chunk: usize) -> bool {
        match self.both_ways() {
            true => model_chunk == 0,
            false => stage == 0 || !self.shared(stage).contains(&model_chunk),
        }
    }
}

/// `y = x weight`, by element. The loss is half the square of the last outputs.
struct Layers {
    case: Case,
    stage: u32,
    /// The pass that fails.
    fails: Option<(Pass, u32)>,
    /// The other stage with the same weights.
    shared: Option<(Communicator, TiedWeights)>,
    /// By model chunk.
    parameters: Vec<Parameters>,
    gradient: Vec<Vec<f32>>,
    /// By microbatch and model chunk.
    inputs: HashMap<(u32, u32), Vec<f32>>,
    of_outputs: HashMap<(u32, u32), Vec<f32>>,
    gradients: HashMap<(u32, u32), Vec<f32>>,
    forward_passes: usize,
}

fn times(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a * b).collect()
}

fn input(microbatch: u32, way: u32) -> Vec<f32> {
    tensor(2 + u64::from(way), microbatch.into(), WIDTH)
}

fn square_sum<'g>(of: impl Iterator<Item = &'g Vec<f32>>) -> f64 {
    of.flatten().map(|of| f64::from(*of) * f64::from(*of)).sum()
}

impl Layers {
    fn new(world: &World, case: Case) -> Layers {
        let (stage, stages) = (world.rank(), case.shape.stages);
        let (gradient, inputs, of_outputs, gradients) = Default::default();
        let chunks = 0..case.shape.model_chunks;
        let parameters: Vec<_> = chunks.map(|chunk| case.parameters(case.piece(stage, chunk))).collect();
        let shared = (!case.shared(stage).is_empty()).then(|| {
            let pair = [stage.min(stages - 1 - stage), stage.max(stages - 1 - stage)];
            let mut pair = Communicator::builder(&world.group(&pair).unwrap()).chunk(2048).build().unwrap();
            let weights = case.shared(stage).iter().map(|chunk| &parameters[*chunk].weight[..]);
            let tied = TiedWeights::new(&mut pair, &weights.collect::<Vec<_>>().concat()).unwrap();
            (pair, tied)
        });
        let (fails, forward_passes) = (None, 0);
        Layers {
            case,
            stage,
            fails,
            shared,
            parameters,
            gradient,
            inputs,
            of_outputs,
            gradients,
            forward_passes,
        }
    }

    fn may_fail(&self, pass: Pass, microbatch: u32) -> Result<(), PipelineError> {
        let fails = self.fails == Some((pass, microbatch));
        if fails { Err(PipelineError::None { what: "layer" }) } else { Ok(()) }
    }
}

impl Stage for Layers {
    type Error = PipelineError;

    fn forward(
        &mut self,
        microbatch: u32,
        model_chunk: u32,
        inputs: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>, PipelineError> {
        self.may_fail(Pass::Forward, microbatch)?;
        self.forward_passes += 1;
        let way = if self.case.both_ways() { model_chunk } else { 0 };
        let x = inputs.map_or_else(|| input(microbatch, way), <[f32]>::to_vec);
        let y = times(&x, &self.parameters[model_chunk as usize].weight);
        if self.case.shape.after(self.stage, model_chunk).is_none() {
            self.of_outputs.insert((microbatch, model_chunk), y.clone());
        }
        self.inputs.insert((microbatch, model_chunk), x);
        Ok(Some(y))
    }

    fn backward(
        &mut self,
        pass: Pass,
        microbatch: u32,
        model_chunk: u32,
        gradient: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>, PipelineError> {
        self.may_fail(pass, microbatch)?;
        let key = (microbatch, model_chunk);
        if let Some(gradient) = gradient {
            self.of_outputs.insert(key, gradient.to_vec());
        }
        if pass != Pass::BackwardInput {
            let mut gradient = times(&self.of_outputs[&key], &self.inputs[&key]);
            if self.case.poison == Some((self.stage, model_chunk, microbatch)) {
                gradient[1] = f32::NAN;
            }
            self.gradients.insert(key, gradient);
        }
        Ok(Some(times(&self.of_outputs[&key], &self.parameters[model_chunk as usize].weight)))
    }
}

impl OptimizedStage for Layers {
    type Kept = Vec<Parameters>;

    fn square_sum(&mut self) -> Result<f64, PipelineError> {
        let of_chunk = |chunk| {
            let mut own: Vec<_> = self.gradients.iter().filter(|of| of.0.1 == chunk).collect();
            own.sort_unstable_by_key(|of| of.0.0);
            assert_eq!(own.len(), self.case.shape.microbatches as usize);
            summed(own.into_iter().map(|of| of.1.clone()))
        };
        self.gradient = (0..self.case.shape.model_chunks).map(of_chunk).collect();
        if let Some((pair, tied)) = &mut self.shared {
            let chunks = self.case.shared(self.stage);
            let mut both = chunks.iter().flat_map(|chunk| self.gradient[*chunk].clone()).collect::<Vec<_>>();
            tied.sum(pair, &mut both).map_err(PipelineError::from)?;
            for (&chunk, sum) in chunks.iter().zip(both.chunks_exact(WIDTH)) {
                self.gradient[chunk] = sum.to_vec();
            }
        }
        let own = self.gradient.iter().enumerate().filter(|(chunk, _)| self.case.counts(self.stage, *chunk));
        Ok(square_sum(own.map(|(_, of)| of)))
    }

    fn refuse_sum(&mut self) {
        if let Some((pair, _)) = &mut self.shared {
            pair.refuse(CallKind::AllReduce, PlanError::RefusedHere.into());
        }
    }

    fn update(&mut self, update: Update) -> Result<(), PipelineError> {
        self.parameters.iter_mut().zip(&self.gradient).for_each(|(of, gradient)| of.update(gradient, update));
        self.gradients.clear();
        Ok(())
    }

    fn keep(&self) -> Vec<Parameters> {
        self.parameters.clone()
    }

    fn restore(&mut self, kept: &Vec<Parameters>) {
        self.parameters = kept.clone();
        for of in [&mut self.inputs, &mut self.of_outputs, &mut self.gradients] {
            of.clear();
        }
    }
}

/// Two runs in one process, which knows all gradients of a step before it updates any piece. By
/// stage, parameters of its model chunks.
fn reference(case: Case) -> (Vec<Vec<Parameters>>, Vec<Update>) {
    let Shape { stages, microbatches, model_chunks, .. } = case.shape;
    let mut pieces: Vec<_> = (0..case.pieces()).map(|piece| case.parameters(piece)).collect();
    let steps = (0..2 * STEPS).map(|step| {
        let poison = case.poison.filter(|_| step < STEPS);
        let poison = poison.map(|(stage, chunk, number)| (case.piece(stage, chunk) as usize, chunk, number));
        let of_way = |way: u32| {
            let mut gradients = vec![Vec::new(); pieces.len()];
            for number in step % STEPS * microbatches..(step % STEPS + 1) * microbatches {
                let mut x = vec![input(number, way)];
                pieces.iter().for_each(|piece| x.push(times(&x[x.len() - 1], &piece.weight)));
                let mut of = x.pop().unwrap();
                for piece in (0..pieces.len()).rev() {
                    let mut gradient = times(&of, &x[piece]);
                    let is_way = |chunk| !case.both_ways() || chunk == way;
                    if poison.is_some_and(|(of, chunk, nth)| (of, nth) == (piece, number) && is_way(chunk)) {
                        gradient[1] = f32::NAN;
                    }
                    gradients[piece].push(gradient);
                    of = times(&of, &pieces[piece].weight);
                }
            }
            gradients.into_iter().map(summed).collect::<Vec<_>>()
        };
        let mut gradients = of_way(0);
        if case.both_ways() {
            let other_way = of_way(1);
            for (piece, of) in gradients.iter_mut().enumerate() {
                let mut both = [of.clone(), other_way[piece].clone()];
                // By ascending stage.
                if piece >= other_way.len() / 2 {
                    both.reverse();
                }
                *of = summed(both);
            }
        }
        if case.tied {
            let last = gradients.len() - 1;
            gradients[0] = summed([gradients[0].clone(), gradients[last].clone()]);
            gradients[last] = gradients[0].clone();
        }
        let of_stages = (0..stages).map(|stage| {
            let chunks = (0..model_chunks).filter(|chunk| case.counts(stage, *chunk as usize));
            square_sum(chunks.map(|chunk| &gradients[case.piece(stage, chunk) as usize]))
        });
        let update = Update::of(of_stages.fold(0.0, |a, b| a + b), case.limit);
        pieces.iter_mut().zip(&gradients).for_each(|(piece, of)| piece.update(of, update));
        update
    });
    let updates = steps.collect();
    let of_stage =
        |stage| (0..model_chunks).map(|chunk| pieces[case.piece(stage, chunk) as usize].clone()).collect();
    ((0..stages).map(of_stage).collect(), updates)
}

/// A pipeline of all ranks.
fn post_validation(all: &Group, plan: &Plan, limit: f32) -> PostValidation {
    PostValidation::new([all, all], plan, STEPS, WIDTH, limit).unwrap()
}

/// Two runs against one process.
fn check_runs(plan: &Plan, case: Case) {
    let (right, updates) = reference(case);
    let skips = updates.iter().filter(|update| **update == Update::Skip).count();
    assert_eq!(skips, usize::from(case.poison.is_some()));
    let clips = updates.iter().any(|of| matches!(of, Update::Scale(scale) if *scale < 1.0));
    assert_eq!(clips, case.limit < f32::INFINITY, "{updates:?}");
    // Whether a decision of any stage is wrong in the first run.
    let wrong = case.poison.is_some() || clips;
    let trained = on_ranks(&[0, 0, 1, 1], &options(), |world| {
        let mut pipeline = post_validation(&world.all().unwrap(), plan, case.limit);
        let mut layers = Layers::new(&world, case);
        let mut updates = pipeline.run(&mut layers).unwrap();
        let first_run = layers.forward_passes;
        layers.case.poison = None;
        updates.extend(pipeline.run(&mut layers).unwrap());
        (layers.parameters, updates, first_run)
    });
    for ((parameters, seen, first_run), right) in trained.into_iter().zip(right) {
        let passes = (STEPS * case.shape.microbatches * case.shape.model_chunks) as usize;
        assert_eq!(first_run, if wrong { 2 * passes } else { passes }, "{case:?}");
        assert_eq!(seen, updates, "{case:?}");
        let all = |of: &[Parameters]| -> Vec<_> {
            of.iter().map(|of| [bits(&of.weight), bits(&of.momentum)]).collect()
        };
        assert_eq!(all(&parameters), all(&right), "{case:?}");
    }
}

#[test]
fn steps_that_are_validated_later_have_the_bits_of_steps_with_meetings() {
    let plans = plans(STAGES, MICROBATCHES);
    for (nth, plan) in plans.iter().enumerate() {
        let (case, step) = (Case::new(plan.shape()), plan.shape().microbatches);
        let last = (STAGES - 1, plan.shape().model_chunks - 1, 3 * step - 1);
        let poison = [(0, 0, 3), (2, 0, step + 1), last][nth % 3];
        check_runs(plan, case);
        check_runs(plan, Case { poison: Some(poison), ..case });
        check_runs(plan, Case { limit: 0.5, ..case });
        check_runs(plan, Case { limit: 0.5, poison: Some((1, 0, 2 * step)), ..case });
    }
}

/// The sum of both stages is taken between steps, and the last stage waits for the first.
#[test]
fn stages_with_tied_weights_meet_at_the_end_of_a_step_and_none_waits_for_ever() {
    for plan in plans(STAGES, MICROBATCHES) {
        let case = Case { tied: true, ..Case::new(plan.shape()) };
        if case.both_ways() {
            continue;
        }
        check_runs(&plan, case);
        check_runs(&plan, Case { poison: Some((3, plan.shape().model_chunks - 1, 9)), ..case });
    }
}

#[test]
fn stages_go_back_to_their_start_if_layers_fail_and_make_the_next_run() {
    let last = 3 * MICROBATCHES - 1;
    let cases = [
        (Schedule::ZeroBubbleH2, false, 2, (Pass::Forward, 2 * MICROBATCHES + 1)),
        // The stage at the other end waits in the sum of tied weights.
        (Schedule::OneFOneB, true, 0, (Pass::Backward, MICROBATCHES - 1)),
        (Schedule::ZeroBubbleH2, true, 3, (Pass::BackwardWeight, last)),
    ];
    for (schedule, tied, failing, fails) in cases {
        let plan = schedule.plan(STAGES, MICROBATCHES).unwrap();
        let case = Case { tied, ..Case::new(plan.shape()) };
        let (right, _) = reference(case);
        let trained = on_ranks(&[0, 0, 1, 1], &options(), |world| {
            let mut pipeline = post_validation(&world.all().unwrap(), &plan, f32::INFINITY);
            let mut layers = Layers::new(&world, case);
            layers.fails = (world.rank() == failing).then_some(fails);
            let error = pipeline.run(&mut layers).unwrap_err();
            match error {
                PipelineError::None { what: "layer" } => assert_eq!(world.rank(), failing),
                PipelineError::Sidelane(Error::Call(CallError::PeerRefused { .. })) => {
                    assert!(tied && world.rank() + failing == STAGES - 1);
                }
                // The first that has failed may be the one that was refused.
                PipelineError::Elsewhere { stage } => assert!(stage == failing || tied && stage == 0),
                error => panic!("{error}"),
            }
            assert_eq!(layers.parameters, [case.parameters(world.rank())]);
            layers.fails = None;
            pipeline.run(&mut layers).unwrap();
            pipeline.run(&mut layers).unwrap();
            layers.parameters
        });
        assert_eq!(trained, right);
    }
}

/// Adds the weights of a stage, which tensor parallel ranks hold a part of each. The loss is the
/// last sum.
struct Adding {
    stage: u32,
    weight: f32,
    gradient: f32,
    tensor: Communicator,
    /// Microbatch whose gradient is not a number.
    poison: Option<u32>,
    /// Microbatch whose backward pass fails.
    fails: Option<u32>,
    /// A weight that the layers cannot have.
    refused: Option<f32>,
    forward_passes: usize,
}

impl Stage for Adding {
    type Error = PipelineError;

    fn forward(&mut self, _: u32, _: u32, x: Option<&[f32]>) -> Result<Option<Vec<f32>>, PipelineError> {
        if self.refused == Some(self.weight) {
            return Err(PipelineError::None { what: "weight" });
        }
        self.forward_passes += 1;
        let mut weight = [self.weight];
        self.tensor.all_reduce(&mut weight).map_err(PipelineError::from)?;
        Ok(Some(vec![x.map_or(0.0, |x| x[0]) + weight[0]]))
    }

    fn backward(
        &mut self,
        _: Pass,
        microbatch: u32,
        _: u32,
        of: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>, PipelineError> {
        if self.fails == Some(microbatch) {
            return Err(PipelineError::None { what: "layer" });
        }
        let of = of.map_or(1.0, |of| of[0]);
        self.gradient += if self.poison == Some(microbatch) { f32::NAN } else { of };
        Ok(Some(vec![of]))
    }
}

impl OptimizedStage for Adding {
    type Kept = f32;

    fn square_sum(&mut self) -> Result<f64, PipelineError> {
        Ok(f64::from(self.gradient).powi(2))
    }

    fn update(&mut self, update: Update) -> Result<(), PipelineError> {
        if let Update::Scale(scale) = update {
            self.weight -= scale * self.gradient;
        }
        self.gradient = 0.0;
        Ok(())
    }

    fn keep(&self) -> f32 {
        self.weight
    }

    fn restore(&mut self, kept: &f32) {
        (self.weight, self.gradient) = (*kept, 0.0);
    }
}

/// Three steps of two microbatches on two stages of two tensor parallel ranks: their updates,
/// weight and forward passes.
type Added = (Result<Vec<Update>, PipelineError>, f32, usize);

fn added(limit: f32, change: impl Fn(u32, &mut Adding) + Sync) -> Vec<Added> {
    let mesh = Mesh::new(4, [("pp", 2), ("tp", 2)]).unwrap();
    let plan = Schedule::OneFOneB.plan(2, 2).unwrap();
    on_ranks(&[0, 0, 1, 1], &options(), |world| {
        let [stages, tensor] = ["pp", "tp"].map(|of| mesh.world_group(&world, &[of]).unwrap());
        let all = world.all().unwrap();
        let mut pipeline = PostValidation::new([&all, &stages], &plan, 3, 1, limit).unwrap();
        let tensor = Communicator::builder(&tensor).chunk(2048).build().unwrap();
        let (poison, fails, refused) = (None, None, None);
        let (stage, weight, gradient, forward_passes) = (stages.rank(), 1.0, 0.0, 0);
        let mut layers = Adding { stage, weight, gradient, tensor, poison, fails, refused, forward_passes };
        change(world.rank(), &mut layers);
        let made = pipeline.run(&mut layers);
        (made, layers.weight, layers.forward_passes)
    })
}

#[test]
fn pipelines_of_tensor_parallel_ranks_with_different_sums_decide_alike() {
    // Each rank has a gradient of 2 in a step, and all have a norm of 4.
    let one = Update::Scale(1.0);
    assert_eq!(added(4.0, |_, _| {}), vec![(Ok(vec![one; 3]), -5.0, 6); 4]);
    assert_eq!(added(2.0, |_, _| {}), vec![(Ok(vec![Update::Scale(0.5); 3]), -2.0, 12); 4]);
    for poisoned in 0..4 {
        let poison = |rank, layers: &mut Adding| layers.poison = (rank == poisoned).then_some(3);
        let right = (Ok(vec![one, Update::Skip, one]), -3.0, 12);
        assert_eq!(added(f32::INFINITY, poison), vec![right; 4], "{poisoned}");
    }
}

#[test]
fn all_pipelines_go_back_if_layers_of_one_fail() {
    // In the last pass of all.
    for (rank, (made, weight, _)) in (0..).zip(added(4.0, |rank, layers| {
        layers.fails = (rank == 1).then_some(5);
    })) {
        let expected = match rank {
            1 => PipelineError::None { what: "layer" },
            _ => PipelineError::Elsewhere { stage: 0 },
        };
        assert_eq!((made, weight), (Err(expected), 1.0));
    }
}

#[test]
fn layers_that_fail_for_a_wrong_decision_are_no_error() {
    // The last stage takes the step that all must skip, and has a weight that it cannot have.
    let one = Update::Scale(1.0);
    let seen = added(f32::INFINITY, |rank, layers| {
        layers.poison = (rank == 1).then_some(1);
        layers.refused = (layers.stage == 1).then_some(-3.0);
    });
    for (rank, (made, weight, passes)) in seen.into_iter().enumerate() {
        assert_eq!((made, weight), (Ok(vec![Update::Skip, one, one]), -3.0));
        assert!(rank < 2 || passes == 4 + 6, "{passes}");
    }
}

#[test]
fn updates_clip_above_the_limit_and_skip_what_is_not_finite() {
    assert_eq!(Update::of(25.0, 2.5), Update::Scale(0.5));
    assert_eq!(Update::of(6.25, 2.5), Update::Scale(1.0));
    assert_eq!(Update::of(0.0, 2.5), Update::Scale(1.0));
    assert_eq!(Update::of(25.0, f32::INFINITY), Update::Scale(1.0));
    for sum in [f64::INFINITY, f64::NAN] {
        assert_eq!([2.5, f32::INFINITY].map(|limit| Update::of(sum, limit)), [Update::Skip; 2]);
    }
}

#[test]
fn settings_of_post_validation_are_refused_on_all_stages() {
    let plan = Schedule::OneFOneB.plan(2, 2).unwrap();
    on_ranks(&[0, 1], &options(), |world| {
        let (group, rank) = (world.all().unwrap(), world.rank());
        let new = |plan: &Plan, steps, limit| {
            PostValidation::<f32>::new([&group, &group], plan, steps, 1, limit).map(drop).unwrap_err()
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
        // A pipeline that does not take part in the decision.
        let own = world.group(&[rank]).unwrap();
        match PostValidation::<f32>::new([&own, &group], &plan, 1, 1, 1.0).map(drop).unwrap_err() {
            PipelineError::Sidelane(Error::Plan(PlanError::BadParameter { parameter, seen, .. })) => {
                assert_eq!((parameter, seen), ("rank of the pipeline", u64::from(1 - rank)));
            }
            error => panic!("{error}"),
        }
        PostValidation::<f32>::new([&group, &group], &plan, 2, 1, 1.0).map(drop).unwrap();
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
