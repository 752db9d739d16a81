//! Output layers with the weights of the embedding: on one rank, cut by vocabulary, and over the
//! stages of a pipeline, against one process.

use std::collections::HashMap;

use half::bf16;
use sidelane::World;
use sidelane::collective::Communicator;
use sidelane::error::{CallError, Error, PlanError};
use sidelane_parallel::pipeline::{Pass, Pipeline, Schedule, Stage};
use sidelane_parallel::tensor::{
    Activations, CrossEntropyTape, TiedWeights, VocabularyParallelCrossEntropy, VocabularyParallelEmbedding,
    cut_rows,
};
use sidelane_parallel::{Mesh, PipelineError};

use crate::ranks::{on_ranks, random_seed, tiny};
use crate::tensors::{
    Elements, WORLDS, bits, bits_of, columns, communicator, cross_entropy, differing, elements, rounded,
    summed, tensor, times_transposed, transposed, transposed_times,
};

const VOCABULARY: usize = 48;
const HIDDEN: usize = 20;
const TOKENS: usize = 12;
const MICROBATCHES: u32 = 4;
const STEPS: usize = 3;
const RATE: f32 = 0.1;
const WAYS: [Activations; 2] = [Activations::Replicated, Activations::SequenceParallel];

/// This rank's tokens, if each has a part of them.
fn own(way: Activations, group: &Communicator, of: &[f32]) -> Vec<f32> {
    match way {
        Activations::Replicated => of.to_vec(),
        Activations::SequenceParallel => cut_rows(of, HIDDEN, (group.rank(), group.size())).unwrap().to_vec(),
    }
}

/// Gradients of the inputs of an output layer that is cut over so many ranks, as they travel.
fn of_inputs<E: Elements>(of_logits: &[f32], factors: &[f32], ranks: usize) -> Vec<f32> {
    let own = VOCABULARY / ranks;
    let parts = (0..ranks).map(|rank| {
        let of_logits = columns(of_logits, VOCABULARY, rank * own, own);
        let factors = &factors[rank * own * HIDDEN..][..own * HIDDEN];
        rounded::<E>(&times_transposed(&of_logits, &transposed(factors, HIDDEN), own))
    });
    rounded::<E>(&summed(parts))
}

fn check_output_layer<E: Elements>(seed: u64) {
    let weight = tensor(seed, 0, VOCABULARY * HIDDEN);
    let factors = rounded::<E>(&weight);
    let x = rounded::<E>(&tensor(seed, 1, TOKENS * HIDDEN));
    let of_logits = rounded::<E>(&tensor(seed, 2, TOKENS * VOCABULARY));
    let logits = rounded::<E>(&times_transposed(&x, &factors, HIDDEN));
    let of_weight = transposed_times(&of_logits, &x, TOKENS);
    for way in WAYS {
        for nodes in WORLDS.into_iter().filter(|nodes| nodes.len() < 4) {
            let of_x = of_inputs::<E>(&of_logits, &factors, nodes.len());
            on_ranks(nodes, &tiny(), |world| {
                let mut group = communicator(&world);
                let part = (world.rank(), world.size());
                let (width, first) = (VOCABULARY / nodes.len(), VOCABULARY / nodes.len() * part.0 as usize);
                let rows = cut_rows(&weight, HIDDEN, part).unwrap().to_vec();
                let embedding =
                    VocabularyParallelEmbedding::new(&mut group, VOCABULARY, HIDDEN, way, rows).unwrap();
                let embedding = embedding.with_rows::<E>();
                let x = elements::<E>(&own(way, &group, &x));
                let got = embedding.output().forward(&mut group, &x).unwrap();
                assert_eq!(bits_of(&got), bits(&columns(&logits, VOCABULARY, first, width)));
                let of_logits = elements::<E>(&columns(&of_logits, VOCABULARY, first, width));
                let of = embedding.output().backward(&mut group, &x, &of_logits).unwrap();
                assert_eq!(bits_of(&of.input), bits(&own(way, &group, &of_x)), "{nodes:?} {way:?}");
                assert_eq!(bits(&of.weight), bits(cut_rows(&of_weight, HIDDEN, part).unwrap()));
                assert_eq!(of.bias, None);
            });
        }
    }
}

#[test]
fn output_layer_multiplies_by_the_rows_of_the_embedding() {
    let seed = random_seed();
    check_output_layer::<f32>(seed);
    check_output_layer::<bf16>(seed);
}

/// Ids of a microbatch, and the targets behind them.
fn batch(seed: u64, microbatch: u32) -> [Vec<u32>; 2] {
    let ids = |nth| {
        let values = tensor(seed, 10 + nth, TOKENS);
        values.iter().map(|value| ((value + 1.0) / 2.0 * VOCABULARY as f32) as u32 % 48).collect()
    };
    [ids(2 * u64::from(microbatch)), ids(2 * u64::from(microbatch) + 1)]
}

/// Losses of each step, and the weights behind the last.
type Trained = (Vec<f32>, Vec<f32>);

/// Training in one process, with sums as `tensor` ranks have them.
fn reference(seed: u64, tensor_ranks: usize) -> Trained {
    let mut weight = tensor(seed, 0, VOCABULARY * HIDDEN);
    let losses = (0..STEPS).map(|_| {
        let (mut of_lookups, mut of_outputs) = (vec![0.0; weight.len()], vec![0.0; weight.len()]);
        let mut loss = 0.0;
        for microbatch in 0..MICROBATCHES {
            let [ids, targets] = batch(seed, microbatch);
            let x: Vec<f32> = ids
                .iter()
                .flat_map(|&id| weight[id as usize * HIDDEN..][..HIDDEN].iter().map(|value| 0.0 + value))
                .collect();
            let logits = times_transposed(&x, &weight, HIDDEN);
            let tokens = logits.chunks_exact(VOCABULARY).zip(targets);
            let (losses, of_logits): (Vec<_>, Vec<_>) = tokens
                .map(|(logits, target)| cross_entropy(logits, VOCABULARY / tensor_ranks, target as usize))
                .unzip();
            loss = losses.iter().fold(loss, |loss, of| loss + of);
            let of_logits = of_logits.concat();
            add(&mut of_outputs, &transposed_times(&of_logits, &x, TOKENS));
            let mut of_lookup = vec![0.0; weight.len()];
            let of_x = of_inputs::<f32>(&of_logits, &weight, tensor_ranks);
            for (&id, of) in ids.iter().zip(of_x.chunks_exact(HIDDEN)) {
                add(&mut of_lookup[id as usize * HIDDEN..][..HIDDEN], of);
            }
            add(&mut of_lookups, &of_lookup);
        }
        let gradient = summed([of_lookups, of_outputs]);
        weight.iter_mut().zip(gradient).for_each(|(weight, of)| *weight -= RATE * of);
        loss
    });
    let losses = losses.collect();
    (losses, weight)
}

fn add(sum: &mut [f32], of: &[f32]) {
    sum.iter_mut().zip(of).for_each(|(sum, of)| *sum += of);
}

/// Rows of a rank, as the embedding on the first stage and as the output layer on the last. Stages
/// between pass everything on.
struct Model {
    seed: u64,
    tensor: Communicator,
    embedding: VocabularyParallelEmbedding,
    is_first: bool,
    is_last: bool,
    of_lookups: Vec<f32>,
    of_outputs: Vec<f32>,
    tapes: HashMap<u32, (Vec<f32>, CrossEntropyTape)>,
    loss: f32,
}

impl Stage for Model {
    type Error = PipelineError;

    fn forward(
        &mut self,
        microbatch: u32,
        _: u32,
        inputs: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>, PipelineError> {
        let [ids, targets] = batch(self.seed, microbatch);
        let x = match inputs {
            None => self.embedding.forward(&mut self.tensor, &ids)?,
            Some(inputs) => inputs.to_vec(),
        };
        if !self.is_last {
            return Ok(Some(x));
        }
        let logits = self.embedding.output().forward(&mut self.tensor, &x)?;
        let loss = VocabularyParallelCrossEntropy { vocabulary: VOCABULARY, ignore: None };
        let (losses, tape) = loss.forward(&mut self.tensor, &logits, &targets)?;
        self.loss = losses.iter().fold(self.loss, |loss, of| loss + of);
        self.tapes.insert(microbatch, (x, tape));
        Ok(None)
    }

    fn backward(
        &mut self,
        _: Pass,
        microbatch: u32,
        _: u32,
        gradient: Option<&[f32]>,
    ) -> Result<Option<Vec<f32>>, PipelineError> {
        let of_x = match gradient {
            Some(gradient) => gradient.to_vec(),
            None => {
                let (x, tape) = self.tapes.remove(&microbatch).unwrap();
                let loss = VocabularyParallelCrossEntropy { vocabulary: VOCABULARY, ignore: None };
                let of_logits = loss.backward(tape, &[1.0; TOKENS]).map_err(Error::from)?;
                let of = self.embedding.output().backward(&mut self.tensor, &x, &of_logits)?;
                add(&mut self.of_outputs, &of.weight);
                of.input
            }
        };
        if self.is_first {
            let [ids, _] = batch(self.seed, microbatch);
            add(&mut self.of_lookups, &self.embedding.backward(&mut self.tensor, &ids, &of_x)?);
        }
        Ok(Some(of_x))
    }
}

/// Losses and rows of a rank: losses are zeros but on the last stage.
fn train(world: &World, mesh: &Mesh, way: Activations, seed: u64) -> Trained {
    let of_tensor = mesh.world_group(world, &["tp"]).unwrap();
    let of_pipeline = mesh.world_group(world, &["pp"]).unwrap();
    let mut tensor_group = Communicator::builder(&of_tensor).chunk(2048).build().unwrap();
    let part = (tensor_group.rank(), tensor_group.size());
    let ends = mesh.world_ends(world, "pp").unwrap();
    let mut ends = ends.map(|ends| Communicator::builder(&ends).chunk(2048).build().unwrap());
    let whole = tensor(seed, 0, VOCABULARY * HIDDEN);
    let rows = cut_rows(&whole, HIDDEN, part).unwrap().to_vec();
    let tied = ends.as_mut().map(|ends| TiedWeights::new(ends, &rows).unwrap());
    let elements = rows.len();
    let embedding =
        VocabularyParallelEmbedding::new(&mut tensor_group, VOCABULARY, HIDDEN, way, rows).unwrap();
    let (stage, stages) = (of_pipeline.rank(), of_pipeline.size());
    let mut model = Model {
        seed,
        tensor: tensor_group,
        embedding,
        is_first: stage == 0,
        is_last: stage + 1 == stages,
        of_lookups: Vec::new(),
        of_outputs: Vec::new(),
        tapes: HashMap::new(),
        loss: 0.0,
    };
    let tokens = if way == Activations::Replicated { TOKENS } else { TOKENS / part.1 as usize };
    let plan = Schedule::OneFOneB.plan(stages, MICROBATCHES).unwrap();
    let mut pipeline = Pipeline::new(&of_pipeline, &plan, tokens * HIDDEN).unwrap();
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        model.loss = 0.0;
        (model.of_lookups, model.of_outputs) = (vec![0.0; elements], vec![0.0; elements]);
        pipeline.run(&mut model).unwrap();
        if let (Some(ends), Some(tied)) = (&mut ends, &tied) {
            let mut gradient = model.of_lookups.clone();
            add(&mut gradient, &model.of_outputs);
            tied.sum(ends, &mut gradient).unwrap();
            let rows = model.embedding.weight_mut();
            rows.iter_mut().zip(gradient).for_each(|(weight, of)| *weight -= RATE * of);
        }
        losses.push(model.loss);
    }
    (losses, model.embedding.weight_mut().to_vec())
}

#[test]
fn tied_weights_train_over_stages_as_in_one_process() {
    let seed = random_seed();
    for (stages, ranks) in [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (2, 3)] {
        let (losses, weight) = reference(seed, ranks);
        assert_ne!(losses[0], losses[STEPS - 1]);
        let nodes: Vec<u32> = (0..(stages * ranks) as u32).map(|rank| rank / 2).collect();
        let mesh = Mesh::new(nodes.len() as u32, [("pp", stages as u32), ("tp", ranks as u32)]).unwrap();
        for way in WAYS {
            let trained = on_ranks(&nodes, &tiny(), |world| train(&world, &mesh, way, seed));
            for (rank, (seen, rows)) in trained.into_iter().enumerate() {
                let (stage, part) = (rank / ranks, rank % ranks);
                let case = format!("stage {stage} of {stages}, part {part} of {ranks}, {way:?}");
                if stage + 1 == stages {
                    assert_eq!(bits(&seen), bits(&losses), "{case}");
                }
                if stage == 0 || stage + 1 == stages {
                    let right = cut_rows(&weight, HIDDEN, (part as u32, ranks as u32)).unwrap();
                    assert_eq!(bits(&rows), bits(right), "{case}");
                }
            }
        }
    }
}

#[test]
fn copies_that_differ_are_refused_on_both_stages() {
    on_ranks(&[0, 1], &tiny(), |world| {
        let mut ends = communicator(&world);
        let wrong = world.rank() == 1;
        let error = TiedWeights::new(&mut ends, if wrong { &[0.5, 1.0] } else { &[0.5, 2.0] }).unwrap_err();
        assert_eq!(differing(error), "digest of tied weights");
        let error = TiedWeights::new(&mut ends, if wrong { &[0.5] } else { &[0.5, 2.0] }).unwrap_err();
        assert_eq!(differing(error), "tied weights");

        let tied = TiedWeights::new(&mut ends, &[0.5, 2.0]).unwrap();
        let mut gradient = vec![1.0; if wrong { 3 } else { 2 }];
        match tied.sum(&mut ends, &mut gradient).unwrap_err() {
            Error::Plan(PlanError::WrongShape { what, .. }) => {
                assert!(wrong && what == "gradient of tied weights");
            }
            Error::Call(CallError::PeerRefused { peer: 1, .. }) => assert!(!wrong),
            error => panic!("{error}"),
        }
        let mut gradient = [1.0, if wrong { -1.0 } else { 2.0 }];
        tied.sum(&mut ends, &mut gradient).unwrap();
        assert_eq!(gradient, [2.0, 1.0]);
    });
}
