//! A rank fails alone in a pass, while ranks of other pipelines wait for it in the same stage: all
//! hear of it, wherever in the pass it fails, and the next step works.

use std::time::Duration;

use sidelane::bootstrap::Timeouts;
use sidelane::collective::Communicator;
use sidelane::error::{CallError, CallKind, Error, PlanError};
use sidelane_parallel::pipeline::{
    Compute, OptimizedStage, Pass, Pipeline, Plan, PostValidation, Schedule, Stage, Step, Update, WarmUp,
    dual_pipe,
};
use sidelane_parallel::{Mesh, PipelineError};

use crate::pipelines::options;
use crate::ranks::on_ranks;

const STAGES: u32 = 2;
/// Ranks with the same stage, of which each two share a group.
const PEERS: u32 = 4;
const MICROBATCHES: u32 = 4;

/// The groups whose ranks a pass sums over, in turn: 0 is of tensor parallelism, 1 of context
/// parallelism.
fn calls(pass: Pass) -> &'static [usize] {
    match pass {
        Pass::Forward => &[0, 1, 0],
        Pass::Backward => &[1, 0, 0],
        Pass::BackwardInput => &[1, 0],
        Pass::BackwardWeight => &[0],
    }
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
enum LayerError {
    #[error("planted")]
    Planted,
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
}

/// Adds a weight and takes sums, so that each value depends on all ranks before it.
struct Layers {
    groups: [Communicator; 2],
    weight: f32,
    /// The pass that fails before one of its calls, or behind the last.
    fails: Option<(Compute, usize)>,
    gradient: f32,
    made: Vec<u32>,
}

impl Layers {
    fn pass(&mut self, compute: Compute, x: f32) -> Result<f32, LayerError> {
        let (mut x, calls) = ([x + self.weight], calls(compute.pass));
        for nth in 0..=calls.len() {
            if self.fails == Some((compute, nth)) {
                self.refuse_calls(calls[nth..].iter().copied());
                return Err(LayerError::Planted);
            }
            let Some(&group) = calls.get(nth) else { break };
            if let Err(error) = self.groups[group].all_reduce(&mut x) {
                self.refuse_calls(calls[nth..].iter().copied().filter(|of| *of != group));
                return Err(PipelineError::from(error).into());
            }
            x[0] *= 0.25;
        }
        self.gradient += x[0];
        self.made.push(x[0].to_bits());
        Ok(x[0])
    }

    /// The first call of each group.
    fn refuse_calls(&mut self, calls: impl Iterator<Item = usize>) {
        let mut told = [false; 2];
        for group in calls {
            if !std::mem::replace(&mut told[group], true) {
                self.groups[group].refuse(CallKind::AllReduce, PlanError::RefusedHere.into());
            }
        }
    }
}

impl Stage for Layers {
    type Error = LayerError;

    fn forward(
        &mut self,
        microbatch: u32,
        model_chunk: u32,
        x: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>, LayerError> {
        let compute = Compute { pass: Pass::Forward, microbatch, model_chunk };
        Ok(Some(vec![self.pass(compute, x.map_or(microbatch as f32, |x| x[0]))?]))
    }

    fn backward(
        &mut self,
        pass: Pass,
        microbatch: u32,
        model_chunk: u32,
        of: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>, LayerError> {
        let compute = Compute { pass, microbatch, model_chunk };
        Ok(Some(vec![self.pass(compute, of.map_or(1.0, |of| of[0]))?]))
    }

    fn refuse(&mut self, step: &Step) {
        step.passes().for_each(|of| self.refuse_calls(calls(of.pass).iter().copied()));
    }
}

impl OptimizedStage for Layers {
    type Kept = f32;

    fn square_sum(&mut self) -> Result<f64, LayerError> {
        Ok(f64::from(self.gradient).powi(2))
    }

    fn update(&mut self, update: Update) -> Result<(), LayerError> {
        if let Update::Scale(scale) = update {
            self.weight -= scale * self.gradient / 64.0;
        }
        self.gradient = 0.0;
        Ok(())
    }

    fn keep(&self) -> f32 {
        self.weight
    }

    fn restore(&mut self, kept: &f32) {
        (self.weight, self.gradient) = (*kept, 0.0);
        self.made.clear();
    }
}

/// Runs something on each rank, with its layers and the group of its stages.
fn on_mesh<T: Send>(body: impl Fn(sidelane::World, Layers, sidelane::Group) -> T + Sync) -> Vec<T> {
    let mesh = Mesh::new(STAGES * PEERS, [("pp", STAGES), ("cp", 2), ("tp", 2)]).unwrap();
    // A rank that waits in vain ends the world, and the test.
    let options = options().with_timeouts(Timeouts::default().with_deadline(Duration::from_secs(60)));
    on_ranks(&[0, 0, 0, 0, 1, 1, 1, 1], &options, |world| {
        let [stages, tensor, context] = ["pp", "tp", "cp"].map(|of| mesh.world_group(&world, &[of]).unwrap());
        let groups = [&tensor, &context].map(|of| Communicator::builder(of).chunk(2048).build().unwrap());
        let (weight, fails, gradient, made) = (world.rank() as f32 / 8.0, None, 0.0, Vec::new());
        body(world, Layers { groups, weight, fails, gradient, made }, stages)
    })
}

/// Each pass of a stage, with each place in it where it may fail.
fn places(plan: &Plan, stage: u32) -> Vec<(Compute, usize)> {
    plan.passes(stage).flat_map(|of| (0..=calls(of.pass).len()).map(move |nth| (of, nth))).collect()
}

/// Whether a stage calls one of these groups behind a place.
fn calls_later(plan: &Plan, stage: u32, (compute, nth): (Compute, usize), group: usize) -> bool {
    let later = plan.passes(stage).skip_while(|of| *of != compute).skip(1);
    calls(compute.pass)[nth..].contains(&group) || later.into_iter().any(|of| calls(of.pass).contains(&group))
}

#[test]
fn peers_of_a_rank_that_fails_alone_in_any_place_of_any_pass_hear_of_it() {
    let interleaved = Schedule::Interleaved { model_chunks: 2, warm_up: WarmUp::Least };
    let schedules = [Schedule::OneFOneB, Schedule::ZeroBubbleH1, interleaved];
    let plans = schedules.map(|schedule| schedule.plan(STAGES, MICROBATCHES).unwrap());
    for plan in plans.into_iter().chain([dual_pipe(STAGES, MICROBATCHES).unwrap()]) {
        on_mesh(|world, mut layers, stages| {
            let (rank, stage) = (world.rank(), stages.rank());
            let mut pipeline = Pipeline::<f32>::new(&stages, &plan, 1).unwrap();
            pipeline.run(&mut layers).unwrap();
            let right = std::mem::take(&mut layers.made);
            for failing_stage in 0..STAGES {
                for (nth, place) in places(&plan, failing_stage).into_iter().enumerate() {
                    let failing = failing_stage * PEERS + nth as u32 % PEERS;
                    layers.fails = (rank == failing).then_some(place);
                    let made = pipeline.run(&mut layers);
                    let peers = rank / PEERS == failing / PEERS;
                    let tensor = peers && rank ^ failing == 1 && calls_later(&plan, stage, place, 0);
                    let context = peers && rank ^ failing == 2 && calls_later(&plan, stage, place, 1);
                    match made {
                        Err(LayerError::Planted) => assert_eq!(rank, failing),
                        Err(LayerError::Pipeline(PipelineError::Elsewhere { .. })) => {}
                        Err(LayerError::Pipeline(PipelineError::Sidelane(Error::Call(
                            CallError::PeerRefused { .. },
                        )))) => assert_ne!(rank, failing),
                        Err(error) => panic!("{rank}: {error}"),
                        Ok(()) => {
                            let same_pipeline = rank % PEERS == failing % PEERS;
                            assert!(!same_pipeline && !tensor && !context, "{rank}, {place:?} of {failing}");
                        }
                    }
                    layers.made.clear();
                }
            }
            layers.fails = None;
            pipeline.run(&mut layers).unwrap();
            assert_eq!(layers.made, right, "{rank}");
        });
    }
}

/// Steps that are validated later go on without a meeting between the pipelines.
#[test]
fn all_pipelines_go_back_whichever_rank_fails_in_any_pass_of_several_steps() {
    let plan = Schedule::ZeroBubbleH1.plan(STAGES, 2).unwrap();
    let several = plan.steps(2).unwrap();
    let right = on_mesh(|world, mut layers, stages| {
        let all = world.all().unwrap();
        let mut pipeline = PostValidation::new([&all, &stages], &plan, 2, 1, f32::INFINITY).unwrap();
        pipeline.run(&mut layers).unwrap();
        layers.weight
    });
    let seen = on_mesh(|world, mut layers, stages| {
        let (rank, all, start) = (world.rank(), world.all().unwrap(), layers.weight);
        let mut pipeline = PostValidation::new([&all, &stages], &plan, 2, 1, f32::INFINITY).unwrap();
        for stage in 0..STAGES {
            for (nth, place) in places(&several, stage).into_iter().enumerate() {
                let failing = stage * PEERS + nth as u32 % PEERS;
                layers.fails = (rank == failing).then_some(place);
                let error = pipeline.run(&mut layers).unwrap_err();
                assert_eq!(error == LayerError::Planted, rank == failing, "{rank}: {error}");
                assert_eq!(layers.weight, start);
            }
        }
        layers.fails = None;
        pipeline.run(&mut layers).unwrap();
        layers.weight
    });
    assert_eq!(seen, right);
}
