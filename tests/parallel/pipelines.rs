//! A pipeline over ranks computes the gradients of one process, and its stages fail together.

use std::collections::HashMap;

use half::bf16;
use sidelane::Options;
use sidelane::config::Config;
use sidelane::error::{CallError, Error, MemoryError, PlanError};
use sidelane_parallel::PipelineError;
use sidelane_parallel::pipeline::{Compute, Pass, Pipeline, Plan, Schedule, Shape, Stage, WarmUp, dual_pipe};

use crate::naive_pipeline::{self, Weights, mixed};
use crate::ranks::on_ranks;
use crate::tensors::Elements;

const NODES: &[u32] = &[0, 0, 1, 1];

/// The layers of the naive pipeline: a number that depends on all passes before it, in the first
/// elements of a message and copies of it behind them.
struct Mixing {
    shape: Shape,
    stage: u32,
    elements: usize,
    inputs: HashMap<(u32, u32), u64>,
    gradients: HashMap<(u32, u32), u64>,
    weights: Weights,
    /// The pass that fails, or makes a tensor of another length.
    fails: Option<(Compute, Fault)>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Error,
    Length,
}

#[derive(Debug, PartialEq, thiserror::Error)]
enum LayerError {
    #[error("{0} fails")]
    Planted(Compute),
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
}

impl Mixing {
    fn new(shape: Shape, stage: u32, elements: usize) -> Mixing {
        let (inputs, gradients, weights) = Default::default();
        Mixing { shape, stage, elements, inputs, gradients, weights, fails: None }
    }

    fn message<E: Elements>(&self, of: u64, compute: Compute) -> Result<Option<Vec<E>>, LayerError> {
        let longer = match self.fails {
            Some((fails, Fault::Error)) if fails == compute => return Err(LayerError::Planted(compute)),
            Some((fails, Fault::Length)) if fails == compute => 1,
            _ => 0,
        };
        let pieces: Vec<E> = (0..pieces::<E>()).map(|nth| E::from_bits(of >> (nth * bits::<E>()))).collect();
        Ok(Some(pieces.into_iter().cycle().take(self.elements + longer).collect()))
    }

    fn value<E: Elements>(&self, message: &[E]) -> u64 {
        let pieces: Vec<_> = message.iter().map(|piece| piece.to_bits()).collect();
        let (value, copies) = pieces.split_at(self::pieces::<E>());
        assert!(pieces.len() == self.elements && copies.iter().zip(&pieces).all(|(one, first)| one == first));
        value.iter().rev().fold(0, |value, piece| value << bits::<E>() | piece)
    }
}

fn bits<E>() -> usize {
    8 * size_of::<E>()
}

/// Elements that carry a number.
fn pieces<E>() -> usize {
    size_of::<u64>() / size_of::<E>()
}

impl<E: Elements> Stage<E> for Mixing {
    type Error = LayerError;

    fn forward(
        &mut self,
        microbatch: u32,
        model_chunk: u32,
        inputs: Option<&[E]>,
    ) -> Result<Option<Vec<E>>, LayerError> {
        let input = inputs.map_or(u64::from(microbatch) + 1, |inputs| self.value(inputs));
        assert!(self.inputs.insert((microbatch, model_chunk), input).is_none());
        let output = mixed(input, u64::from(self.stage * self.shape.model_chunks + model_chunk));
        self.message(output, Compute { pass: Pass::Forward, microbatch, model_chunk })
    }

    fn backward(
        &mut self,
        pass: Pass,
        microbatch: u32,
        model_chunk: u32,
        gradient: Option<&[E]>,
    ) -> Result<Option<Vec<E>>, LayerError> {
        let key = (microbatch, model_chunk);
        let input = self.inputs[&key];
        if pass != Pass::BackwardWeight {
            let output = mixed(input, u64::from(self.stage * self.shape.model_chunks + model_chunk));
            let gradient = gradient.map_or(mixed(output, 7), |gradient| self.value(gradient));
            assert!(self.gradients.insert(key, gradient).is_none());
        }
        let gradient = self.gradients[&key];
        if pass != Pass::BackwardInput {
            self.weights.entry(key).or_default().push(mixed(input, gradient));
        }
        self.message(mixed(gradient, input), Compute { pass, microbatch, model_chunk })
    }
}

fn plans(stages: u32, microbatches: u32) -> Vec<Plan> {
    let interleaved = |model_chunks, warm_up| Schedule::Interleaved { model_chunks, warm_up };
    let schedules = [
        Schedule::GPipe,
        Schedule::OneFOneB,
        interleaved(2, WarmUp::Megatron),
        interleaved(2, WarmUp::Least),
        interleaved(4, WarmUp::Least),
        Schedule::ZeroBubbleH1,
        Schedule::ZeroBubbleH2,
    ];
    let plans = schedules.into_iter().map(|schedule| schedule.plan(stages, microbatches).unwrap());
    // It needs an even number of stages, and two microbatches for each.
    let both_ways = stages.is_multiple_of(2).then(|| dual_pipe(stages, microbatches).unwrap());
    plans.chain(both_ways).collect()
}

/// Room for windows of many communicators.
pub fn options() -> Options {
    let config = Config::default().with_heap(16 << 20).with_symmetric(12 << 20);
    Options::default().with_config(config)
}

/// Gradients of weights of two steps on each rank.
fn train<E: Elements>(nodes: &[u32], plan: &Plan, elements: usize) -> Vec<[Weights; 2]> {
    on_ranks(nodes, &options(), |world| {
        let mut pipeline = Pipeline::<E>::new(&world.all().unwrap(), plan, elements).unwrap();
        [(); 2].map(|()| {
            let mut layers = Mixing::new(plan.shape(), world.rank(), elements);
            pipeline.run(&mut layers).unwrap();
            layers.weights
        })
    })
}

#[test]
fn every_schedule_gives_the_gradients_of_one_process() {
    check_schedules::<f32>();
    check_schedules::<bf16>();
}

fn check_schedules<E: Elements>() {
    for nodes in [&[0][..], &[0, 0], NODES] {
        let stages = nodes.len() as u32;
        let mut cases: Vec<_> = plans(stages, 2 * stages.max(2)).into_iter().map(|plan| (plan, 4)).collect();
        // Longer than the two slots that a receiver holds unread.
        let long = [Schedule::GPipe, Schedule::OneFOneB].map(|schedule| schedule.plan(stages, 3).unwrap());
        cases.extend(long.map(|plan| (plan, 100_000)));
        for (plan, elements) in cases {
            let right = naive_pipeline::run(&plan).unwrap();
            for (stage, [first, second]) in train::<E>(nodes, &plan, elements).iter().enumerate() {
                assert!(*first == right[stage] && *second == right[stage], "{:?}, {stage}", plan.shape());
            }
        }
    }
}

#[test]
fn stages_hear_which_one_has_failed_and_make_the_next_step() {
    let interleaved = |model_chunks| Schedule::Interleaved { model_chunks, warm_up: WarmUp::Least };
    // All passes; several communicators of a pair in turn; messages of several slots; both kinds of
    // messages in one direction.
    failures(&[0, 0, 1, 1], &Schedule::ZeroBubbleH1.plan(4, 6).unwrap(), 2, 1);
    failures(&[0, 0, 1, 1], &interleaved(4).plan(4, 4).unwrap(), 2, 5);
    failures(&[0, 1, 1], &Schedule::OneFOneB.plan(3, 3).unwrap(), 100_000, 3);
    failures(&[0, 1], &interleaved(2).plan(2, 4).unwrap(), 2, 3);
}

/// Steps that fail in every so many passes of every stage, and a good one behind them.
fn failures(nodes: &[u32], plan: &Plan, elements: usize, every: usize) {
    let (right, shape) = (naive_pipeline::run(plan).unwrap(), plan.shape());
    on_ranks(nodes, &options(), |world| {
        let stage = world.rank();
        let mut pipeline = Pipeline::<f32>::new(&world.all().unwrap(), plan, elements).unwrap();
        let passes = (0..shape.stages).flat_map(|stage| plan.passes(stage).map(move |pass| (stage, pass)));
        for (failing, compute) in passes.step_by(every) {
            // Only a tensor that another pass needs can have a wrong length.
            let made = match compute.pass {
                Pass::Forward => shape.after(failing, compute.model_chunk),
                Pass::Backward | Pass::BackwardInput => shape.before(failing, compute.model_chunk),
                Pass::BackwardWeight => None,
            };
            let faults = [Some(Fault::Error), made.map(|_| Fault::Length)];
            for fault in faults.into_iter().flatten() {
                let mut layers = Mixing::new(shape, stage, elements);
                layers.fails = (stage == failing).then_some((compute, fault));
                let error = pipeline.run(&mut layers).unwrap_err();
                let expected = match fault {
                    _ if stage != failing => PipelineError::Elsewhere { stage: failing }.into(),
                    Fault::Error => LayerError::Planted(compute),
                    Fault::Length => {
                        let (seen, expected) = (elements + 1, elements);
                        PipelineError::Length { stage, compute, seen, expected }.into()
                    }
                };
                assert_eq!(error, expected);
            }
        }
        let mut layers = Mixing::new(shape, stage, elements);
        pipeline.run(&mut layers).unwrap();
        assert_eq!(layers.weights, right[stage as usize]);
    });
}

#[test]
fn wrong_plans_and_sizes_are_refused_on_every_rank() {
    let plan = |microbatches| Schedule::OneFOneB.plan(4, microbatches).unwrap();
    let refused = |of: &(dyn Fn(u32) -> (Plan, usize) + Sync)| {
        on_ranks(NODES, &options(), |world| {
            let (plan, elements) = of(world.rank());
            let group = world.all().unwrap();
            let error = Pipeline::<f32>::new(&group, &plan, elements).unwrap_err();
            Pipeline::<f32>::new(&group, &Schedule::GPipe.plan(4, 2).unwrap(), 2).unwrap();
            error
        })
    };
    for (rank, error) in (0..).zip(refused(&|rank| (plan(4 + rank / 2), 2))) {
        let PipelineError::Sidelane(Error::Call(CallError::ConfigsDiffer { what, rank: seen, .. })) = error
        else {
            panic!("{error}")
        };
        assert_eq!((what, seen), ("plan of the pipeline", rank));
    }
    for error in refused(&|rank| (plan(4), 2 + rank as usize / 3)) {
        assert!(
            matches!(&error, PipelineError::Sidelane(Error::Call(CallError::ConfigsDiffer { what, .. }))
            if *what == "elements of a message"),
            "{error}"
        );
    }
    let other = Schedule::OneFOneB.plan(3, 4).unwrap();
    for (rank, error) in (0..).zip(refused(&|rank| (if rank == 2 { other.clone() } else { plan(4) }, 2))) {
        match error {
            PipelineError::Ranks { ranks: 4, stages: 3 } => assert_eq!(rank, 2),
            PipelineError::Sidelane(Error::Call(CallError::PeerRefused { peer: 2, .. })) => {
                assert_ne!(rank, 2)
            }
            error => panic!("{rank}: {error}"),
        }
    }
    for error in refused(&|_| (plan(4), 0)) {
        let PipelineError::Sidelane(Error::Plan(PlanError::BadParameter { parameter, seen, .. })) = error
        else {
            panic!("{error}")
        };
        assert_eq!((parameter, seen), ("elements of a message", 0));
    }
    // Its slots must hold a message.
    let deep = Schedule::ZeroBubbleH2.plan(4, 8).unwrap();
    for error in refused(&|_| (deep.clone(), 1 << 24)) {
        assert!(
            matches!(error, PipelineError::Sidelane(Error::Memory(MemoryError::OutOfSpace { .. }))),
            "{error}"
        );
    }
    for error in refused(&|_| (deep.clone(), usize::MAX)) {
        assert!(
            matches!(
                error,
                PipelineError::Sidelane(Error::Plan(PlanError::BadParameter { parameter: "chunk", .. }))
            ),
            "{error}"
        );
    }
}

#[test]
fn stages_with_messages_of_different_elements_are_refused_on_every_rank() {
    let plan = Schedule::OneFOneB.plan(2, 4).unwrap();
    on_ranks(&[0, 0], &options(), |world| {
        let (group, rank, peer) = (world.all().unwrap(), world.rank(), 1 - world.rank());
        let error = match rank {
            0 => Pipeline::<f32>::new(&group, &plan, 2).map(drop),
            _ => Pipeline::<bf16>::new(&group, &plan, 2).map(drop),
        };
        let (what, mine, theirs) = ("bytes of an element", [4, 2][rank as usize], [2, 4][rank as usize]);
        let differ = CallError::ConfigsDiffer { what, rank, peer, mine, theirs };
        assert_eq!(error, Err(PipelineError::Sidelane(differ.into())));
    });
}

/// Bytes that each of two stages sends in a step, to another node.
fn sent<E: Elements>(plan: &Plan, elements: usize) -> Vec<u64> {
    on_ranks(&[0, 1], &options(), |world| {
        let mut pipeline = Pipeline::<E>::new(&world.all().unwrap(), plan, elements).unwrap();
        pipeline.take_counts();
        pipeline.run(&mut Mixing::new(plan.shape(), world.rank(), elements)).unwrap();
        pipeline.take_counts().inter_node_bytes
    })
}

#[test]
fn stages_send_a_message_for_each_microbatch_and_half_its_bytes_in_bf16() {
    let plan = Schedule::OneFOneB.plan(2, 6).unwrap();
    assert_eq!(sent::<f32>(&plan, 64), [6 * 64 * 4 + 1; 2]);
    assert_eq!(sent::<bf16>(&plan, 64), [6 * 64 * 2 + 1; 2]);
}
