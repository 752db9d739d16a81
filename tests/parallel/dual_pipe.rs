//! DualPipe over layers of experts: a pair is one call, and moves rows of one pass next to the
//! compute of the other, to the bits of passes one after another.

use std::collections::HashMap;
use std::time::Duration;

use sidelane::bootstrap::Timeouts;
use sidelane::config::Config;
use sidelane::error::{CallKind, PlanError};
use sidelane::gate::Preset;
use sidelane::layer::{GroupedSwiGlu, Input, MoeLayer, Tape};
use sidelane::{Element, Options, World};
use sidelane_parallel::pipeline::{
    BackwardCall, Compute, ForwardCall, Pass, Pipeline, Stage, Step, dual_pipe,
};
use sidelane_parallel::{Mesh, PipelineError};

use crate::ranks::on_ranks;
use crate::tensors::{bits, tensor};

const HIDDEN: usize = 8;
const FFN: usize = 12;
const EXPERTS: u32 = 4;
const TOKENS: usize = 6;
/// Of both ways together.
const MICROBATCHES: u32 = 8;

/// A layer of experts for each way, over the ranks of a stage. The loss is half the square of the
/// last outputs.
struct Layers {
    /// By model chunk.
    layers: [MoeLayer; 2],
    together: bool,
    rank: u32,
    /// The forward pass behind which this rank fails.
    fails: Option<(u32, u32)>,
    pairs: usize,
    /// By microbatch and model chunk: tapes and outputs, and then gradients of experts.
    tapes: HashMap<(u32, u32), (Tape, Vec<f32>)>,
    gradients: HashMap<(u32, u32), Vec<u32>>,
}

impl Layers {
    fn new(world: &World, mesh: &Mesh, stages: u32, together: bool) -> Layers {
        let stage = mesh.position(world.rank(), "pp").unwrap();
        let group = mesh.world_group(world, &["ep"]).unwrap();
        // Microbatches of the second way pass the stages in the other order.
        let layers = [stage, stages - 1 - stage].map(|piece| {
            let seed = u64::from(piece);
            let own = (EXPERTS / group.size()) as usize;
            let each = GroupedSwiGlu::values(1, HIDDEN, FFN);
            let weights = tensor(seed, 1, EXPERTS as usize * each);
            let held = weights[group.rank() as usize * own * each..][..own * each].to_vec();
            let experts = GroupedSwiGlu::new(own, HIDDEN, FFN, held).unwrap();
            let gate = Preset::Qwen3.config(EXPERTS, 2).unwrap();
            let builder = MoeLayer::builder(&group, gate, HIDDEN, experts).max_tokens(TOKENS as u32);
            builder.dtype(f32::DTYPE).router(tensor(seed, 2, HIDDEN * EXPERTS as usize)).build().unwrap()
        });
        let (tapes, gradients) = Default::default();
        Layers { layers, together, rank: world.rank(), fails: None, pairs: 0, tapes, gradients }
    }

    /// Inputs of the first virtual stage are this rank's own.
    fn inputs(&self, microbatch: u32, model_chunk: u32, inputs: Option<&[f32]>) -> Vec<f32> {
        let seed = u64::from(microbatch * 2 + model_chunk);
        inputs.map_or_else(|| tensor(seed, 100 + u64::from(self.rank % 2), TOKENS * HIDDEN), <[f32]>::to_vec)
    }

    fn may_fail(&self, of: (u32, u32)) -> Result<(), PipelineError> {
        if self.fails == Some(of) { Err(PipelineError::None { what: "layer" }) } else { Ok(()) }
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
        let x = self.inputs(microbatch, model_chunk, inputs);
        let (out, tape) = self.layers[model_chunk as usize].forward(&Input::new(&x))?;
        self.tapes.insert((microbatch, model_chunk), (tape, out.clone()));
        self.may_fail((microbatch, model_chunk))?;
        Ok(Some(out))
    }

    fn backward(
        &mut self,
        pass: Pass,
        microbatch: u32,
        model_chunk: u32,
        gradient: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>, PipelineError> {
        // Both kinds of gradients at once: those of weights wait for nothing.
        if pass == Pass::BackwardWeight {
            return Ok(None);
        }
        let (tape, out) = self.tapes.remove(&(microbatch, model_chunk)).unwrap();
        let of = self.layers[model_chunk as usize].backward(tape, gradient.unwrap_or(&out))?;
        self.gradients.insert((microbatch, model_chunk), bits(&of.experts));
        Ok(Some(of.x))
    }

    fn forward_and_backward(
        &mut self,
        forward: ForwardCall<'_>,
        backward: BackwardCall<'_>,
    ) -> Result<[Option<Vec<f32>>; 2], PipelineError> {
        self.pairs += 1;
        let (ahead, back) =
            ((forward.microbatch, forward.model_chunk), (backward.microbatch, backward.model_chunk));
        assert_ne!(ahead.1, back.1, "a pair is of both ways");
        if !self.together {
            let outputs = self.forward(ahead.0, ahead.1, forward.inputs);
            let (pass, microbatch, model_chunk) = (backward.pass, back.0, back.1);
            let compute = Compute { pass, microbatch, model_chunk };
            let outputs = outputs.inspect_err(|_| self.refuse(&Step::Compute(compute)))?;
            return Ok([outputs, self.backward(backward.pass, back.0, back.1, backward.gradient)?]);
        }
        let x = self.inputs(ahead.0, ahead.1, forward.inputs);
        let (tape, out) = self.tapes.remove(&back).unwrap();
        let of_out = backward.gradient.unwrap_or(&out);
        let [first, second] = &mut self.layers;
        let (layer, other) = if ahead.1 == 0 { (first, second) } else { (second, first) };
        let (out, made, of) = layer.combined_with(&Input::new(&x), other, tape, of_out)?;
        self.tapes.insert(ahead, (made, out.clone()));
        self.gradients.insert(back, bits(&of.experts));
        self.may_fail(ahead)?;
        Ok([Some(out), Some(of.x)])
    }

    /// The first transfer of a pair is one of its backward pass.
    fn refuse(&mut self, step: &Step) {
        let pair = matches!(step, Step::Overlap { .. }) && self.together;
        for compute in step.passes() {
            let call = match compute.pass {
                Pass::Forward if pair => continue,
                Pass::Forward => CallKind::Dispatch,
                Pass::BackwardWeight => continue,
                Pass::Backward | Pass::BackwardInput => CallKind::CombineBackward,
            };
            self.layers[compute.model_chunk as usize].refuse(call, PlanError::RefusedHere.into());
        }
    }
}

#[test]
fn pairs_of_dual_pipe_are_one_call_and_change_no_bit() {
    let mesh = Mesh::new(4, [("pp", 2), ("ep", 2)]).unwrap();
    let plan = dual_pipe(2, MICROBATCHES).unwrap();
    let config = Config::default().with_heap(24 << 20).with_symmetric(16 << 20);
    let options = Options::default().with_config(config);
    let train = |together| {
        on_ranks(&[0, 0, 1, 1], &options, |world| {
            let group = mesh.world_group(&world, &["pp"]).unwrap();
            let mut pipeline = Pipeline::new(&group, &plan, TOKENS * HIDDEN).unwrap();
            let mut layers = Layers::new(&world, &mesh, 2, together);
            pipeline.run(&mut layers).unwrap();
            let steps = &plan.stages()[group.rank() as usize];
            let pairs = steps.iter().filter(|step| matches!(step, Step::Overlap { .. })).count();
            assert!(pairs > 0 && layers.pairs == pairs, "{pairs} pairs");
            assert_eq!(layers.gradients.len(), MICROBATCHES as usize);
            layers.gradients
        })
    };
    assert_eq!(train(true), train(false));
}

#[test]
fn rank_that_fails_alone_behind_its_rows_stops_both_pipelines_and_the_next_step_works() {
    let mesh = Mesh::new(4, [("pp", 2), ("ep", 2)]).unwrap();
    let plan = dual_pipe(2, MICROBATCHES).unwrap();
    let config = Config::default().with_heap(24 << 20).with_symmetric(16 << 20);
    // A rank that waits in vain ends the world, and the test.
    let timeouts = Timeouts::default().with_deadline(Duration::from_secs(60));
    let options = Options::default().with_config(config).with_timeouts(timeouts);
    for together in [true, false] {
        on_ranks(&[0, 0, 1, 1], &options, |world| {
            let group = mesh.world_group(&world, &["pp"]).unwrap();
            let mut pipeline = Pipeline::new(&group, &plan, TOKENS * HIDDEN).unwrap();
            let mut layers = Layers::new(&world, &mesh, 2, together);
            pipeline.run(&mut layers).unwrap();
            let right = std::mem::take(&mut layers.gradients);
            let forward: Vec<_> = plan.passes(0).filter(|of| of.pass == Pass::Forward).collect();
            for (nth, of) in forward.into_iter().enumerate() {
                let failing = nth as u32 % 4;
                let place = (of.microbatch, of.model_chunk);
                layers.fails = (world.rank() == failing).then_some(place);
                match pipeline.run(&mut layers).unwrap_err() {
                    PipelineError::None { what: "layer" } => assert_eq!(world.rank(), failing),
                    PipelineError::Elsewhere { .. } => {}
                    // Refused by a rank that has stopped.
                    error => assert_ne!(world.rank(), failing, "{error}"),
                }
                layers.tapes.clear();
            }
            layers.fails = None;
            pipeline.run(&mut layers).unwrap();
            assert!(layers.gradients == right);
        });
    }
}
