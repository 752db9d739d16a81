//! Data parallelism, ZeRO-1, 2 and 3, against one process that does the same, to the bit.

use std::sync::atomic::{AtomicUsize, Ordering};

use half::bf16;
use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::error::{CallError, PlanError};
use sidelane::overlap::HostExecutor;
use sidelane_parallel::data::{
    Adam, Backward, CheckpointError, DataError, DataParallel, FullySharded, Layout, Sharding, Wire, WireDtype,
};

use crate::ranks::{on_ranks, random_seed, tiny};
use crate::tensors::{bits, communicator, counting_communicator, rounded, summed, tensor};

const WIDTH: usize = 7;
/// Scales, biases and a gain: no multiple of the ranks, so that layers are padded.
const LAYER: [usize; 3] = [WIDTH, WIDTH, 1];
const LAYERS: usize = 4;
const ELEMENTS: usize = LAYERS * (2 * WIDTH + 1);
const STEPS: usize = 3;
pub const ADAM: Adam =
    Adam { learning_rate: 0.05, beta1: 0.8, beta2: 0.95, epsilon: 1e-6, weight_decay: 0.25 };
pub const SHARDINGS: [Sharding; 3] = [Sharding::None, Sharding::OptimizerStates, Sharding::Gradients];
/// Nodes of the ranks.
pub const WORLDS: [&[u32]; 6] = [&[0], &[0, 0], &[0, 1], &[0, 0, 1], &[0, 0, 1, 1], &[0, 1, 2, 3]];

/// `y = (scale * x + bias) * gain`
fn forward(x: &[f32], weights: &[f32]) -> Vec<f32> {
    let (scale, rest) = weights.split_at(WIDTH);
    let value = |at: usize| (scale[at] * x[at] + rest[at]) * rest[WIDTH];
    (0..WIDTH).map(value).collect()
}

/// Gradients of the inputs, and of the weights in their order.
fn backward(x: &[f32], weights: &[f32], of_y: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let (scale, rest) = weights.split_at(WIDTH);
    let gain = rest[WIDTH];
    let of_bias: Vec<f32> = of_y.iter().map(|of| of * gain).collect();
    let of_gain = (0..WIDTH).map(|at| of_y[at] * (scale[at] * x[at] + rest[at])).sum::<f32>();
    let of_scale = (0..WIDTH).map(|at| of_bias[at] * x[at]);
    let of_weights = of_scale.chain(of_bias.iter().copied()).chain([of_gain]).collect();
    ((0..WIDTH).map(|at| of_bias[at] * scale[at]).collect(), of_weights)
}

/// Inputs and targets.
pub type Sample = (Vec<f32>, Vec<f32>);

/// A rank's sample of a step.
pub fn sample(seed: u64, rank: usize, step: usize) -> Sample {
    let values = tensor(seed, 1000 + (step * 64 + rank) as u64, 2 * WIDTH);
    (values[..WIDTH].to_vec(), values[WIDTH..].to_vec())
}

fn of_layer(parameters: &[f32], layer: usize) -> &[f32] {
    &parameters[layer * (2 * WIDTH + 1)..][..2 * WIDTH + 1]
}

/// Inputs of each layer, and the outputs.
fn activations(parameters: &[f32], x: Vec<f32>) -> Vec<Vec<f32>> {
    (0..LAYERS).fold(vec![x], |mut all, layer| {
        all.push(forward(&all[layer], of_layer(parameters, layer)));
        all
    })
}

fn difference(y: &[f32], target: &[f32]) -> Vec<f32> {
    y.iter().zip(target).map(|(y, target)| y - target).collect()
}

/// Gradients of all parameters, of one sample.
fn gradients(parameters: &[f32], (x, target): Sample) -> Vec<f32> {
    let values = activations(parameters, x);
    let mut of_y = difference(&values[LAYERS], &target);
    let mut all = vec![0.0; ELEMENTS];
    for layer in (0..LAYERS).rev() {
        let (of_x, of_weights) = backward(&values[layer], of_layer(parameters, layer), &of_y);
        all[layer * (2 * WIDTH + 1)..][..2 * WIDTH + 1].copy_from_slice(&of_weights);
        of_y = of_x;
    }
    all
}

/// Values behind the way between ranks.
fn moved(dtype: WireDtype, values: Vec<f32>) -> Vec<f32> {
    match dtype {
        WireDtype::F32 => values,
        WireDtype::Bf16 => rounded::<bf16>(&values),
    }
}

/// One process that trains on the samples of all ranks. The formulas are those of the pages.
#[derive(Clone)]
pub struct Reference {
    pub parameters: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
    steps: usize,
    learning_rate: f32,
    wire: Wire,
}

impl Reference {
    pub fn new(seed: u64) -> Reference {
        let parameters = tensor(seed, 0, ELEMENTS);
        let zeros = || vec![0.0; ELEMENTS];
        let (steps, learning_rate, wire) = (0, ADAM.learning_rate, Wire::default());
        Reference { first: zeros(), second: zeros(), parameters, steps, learning_rate, wire }
    }

    pub fn with_wire(self, wire: Wire) -> Reference {
        Reference { wire, ..self }
    }

    /// Parameters as passes compute with them.
    pub fn seen(&self) -> Vec<f32> {
        moved(self.wire.parameters, self.parameters.clone())
    }

    pub fn step(&mut self, seed: u64, ranks: usize) {
        let samples = (0..ranks).map(|rank| vec![sample(seed, rank, self.steps)]);
        self.step_by(samples.collect());
    }

    /// A step by samples that are first summed within each list. Sums of lists travel, and so does
    /// theirs.
    pub fn step_by(&mut self, samples: Vec<Vec<Sample>>) {
        let count = samples.iter().map(Vec::len).sum::<usize>() as f32;
        let (seen, travel) = (self.seen(), |sums| moved(self.wire.gradients, sums));
        let of_list = |list: Vec<Sample>| summed(list.into_iter().map(|sample| gradients(&seen, sample)));
        let of_all = travel(summed(samples.into_iter().map(|list| travel(of_list(list)))));
        self.steps += 1;
        let left = |beta: f32| (1.0 - libm::pow(beta.into(), self.steps as f64)) as f32;
        for (at, sum) in of_all.into_iter().enumerate() {
            let mean = sum / count;
            self.first[at] = ADAM.beta1 * self.first[at] + (1.0 - ADAM.beta1) * mean;
            self.second[at] = ADAM.beta2 * self.second[at] + (1.0 - ADAM.beta2) * (mean * mean);
            let root = (self.second[at] / left(ADAM.beta2)).sqrt();
            let change = self.first[at] / left(ADAM.beta1);
            self.parameters[at] *= 1.0 - self.learning_rate * ADAM.weight_decay;
            self.parameters[at] -= self.learning_rate * change / (root + ADAM.epsilon);
        }
    }

    fn after(seed: u64, ranks: usize, steps: usize) -> Reference {
        (0..steps).fold(Reference::new(seed), |mut reference, _| {
            reference.step(seed, ranks);
            reference
        })
    }
}

fn layers() -> Layout {
    Layout::layers(&[LAYER; LAYERS]).unwrap()
}

fn data_parallel(group: &mut Communicator, layout: Layout, sharding: Sharding, seed: u64) -> DataParallel {
    DataParallel::new(group, layout, sharding, tensor(seed, 0, ELEMENTS), ADAM).unwrap()
}

fn fully_sharded(group: &mut Communicator, prefetch: usize, seed: u64) -> FullySharded {
    FullySharded::new(group, layers(), prefetch, &tensor(seed, 0, ELEMENTS), ADAM).unwrap()
}

/// Gives the gradients of a step, in an order of the parameters.
fn give(
    pass: &mut Backward<'_>,
    layout: &Layout,
    sample: Sample,
    order: impl Iterator<Item = usize>,
) -> Result<(), DataError> {
    let whole: Vec<f32> =
        (0..layout.parameters()).flat_map(|nth| pass.parameter(nth).unwrap().to_vec()).collect();
    let all = gradients(&whole, sample);
    order.into_iter().try_for_each(|nth| pass.gradient(nth, &all[layout.place(nth)?]))
}

/// A model of either kind, in training.
pub enum Model {
    Whole(DataParallel, Layout),
    Sharded(FullySharded),
}

impl Model {
    /// The `nth` way to train: three that keep parameters whole, and one that does not.
    pub fn new(group: &mut Communicator, nth: usize, seed: u64) -> Model {
        match SHARDINGS.get(nth) {
            Some(&sharding) => {
                let layout = Layout::buckets(&[LAYER; LAYERS].concat(), 4 * (10 + nth)).unwrap();
                Model::Whole(data_parallel(group, layout.clone(), sharding, seed), layout)
            }
            None => Model::Sharded(fully_sharded(group, 1, seed)),
        }
    }

    pub fn with_wire(self, wire: Wire) -> Model {
        match self {
            Model::Whole(model, layout) => Model::Whole(model.with_wire(wire), layout),
            Model::Sharded(model) => Model::Sharded(model.with_wire(wire)),
        }
    }

    pub fn train(&mut self, group: &mut Communicator, executor: &HostExecutor<'_>, seed: u64, step: usize) {
        self.backward(group, executor, seed, step).unwrap();
        self.step(group).unwrap();
    }

    fn set_learning_rate(&mut self, learning_rate: f32) -> Result<(), DataError> {
        match self {
            Model::Whole(model, _) => model.set_learning_rate(learning_rate),
            Model::Sharded(model) => model.set_learning_rate(learning_rate),
        }
    }

    /// Gradients of a rank's sample of a step.
    fn backward(
        &mut self,
        group: &mut Communicator,
        executor: &HostExecutor<'_>,
        seed: u64,
        step: usize,
    ) -> Result<(), DataError> {
        let sample = sample(seed, group.rank() as usize, step);
        self.microbatch(group, executor, sample, true)
    }

    /// Gradients of a sample, perhaps the last one of a step.
    pub fn microbatch(
        &mut self,
        group: &mut Communicator,
        executor: &HostExecutor<'_>,
        sample: Sample,
        is_last: bool,
    ) -> Result<(), DataError> {
        match self {
            Model::Whole(model, layout) => {
                let order = (0..layout.parameters()).rev();
                let body = |pass: &mut Backward<'_>| give(pass, layout, sample, order);
                if is_last { model.backward(group, executor, body) } else { model.accumulate(body) }
            }
            Model::Sharded(model) => {
                let (x, target) = sample;
                let mut values = vec![x];
                model.forward(group, executor, |layer, weights| {
                    values.push(forward(&values[layer], weights));
                    Ok(())
                })?;
                let mut of_y = difference(&values[LAYERS], &target);
                let body = |layer: usize, weights: &[f32], gradient: &mut [f32]| {
                    let (of_x, of_weights) = backward(&values[layer], weights, &of_y);
                    gradient.copy_from_slice(&of_weights);
                    of_y = of_x;
                    Ok(())
                };
                match is_last {
                    true => model.backward(group, executor, body),
                    false => model.accumulate(group, executor, body),
                }
            }
        }
    }

    /// Begins a backward pass in another group than before.
    fn fail_in(&mut self, group: &mut Communicator) {
        let executor = HostExecutor::new();
        let error = match self {
            Model::Whole(model, _) => model.backward(group, &executor, |_| Ok(())),
            Model::Sharded(model) => model.backward(group, &executor, |_, _, _| Ok(())),
        };
        error.unwrap_err();
    }

    pub fn step(&mut self, group: &mut Communicator) -> Result<(), DataError> {
        match self {
            Model::Whole(model, _) => model.step(group),
            Model::Sharded(model) => model.step(group),
        }
    }

    pub fn parameters(&self, group: &mut Communicator) -> Vec<f32> {
        match self {
            Model::Whole(model, _) => model.parameters().to_vec(),
            Model::Sharded(model) => model.gather(group).unwrap(),
        }
    }

    pub fn save(&self) -> Vec<u8> {
        let mut shard = Vec::new();
        match self {
            Model::Whole(model, _) => model.save(&mut shard).unwrap(),
            Model::Sharded(model) => model.save(&mut shard).unwrap(),
        }
        shard
    }

    pub fn load(&mut self, group: &mut Communicator, shards: &[Vec<u8>]) -> Result<(), DataError> {
        let shards = shards.iter().map(Vec::as_slice);
        match self {
            Model::Whole(model, _) => model.load(group, shards),
            Model::Sharded(model) => model.load(group, shards),
        }
    }
}

#[test]
fn every_strategy_has_the_bits_of_one_process() {
    let seed = random_seed();
    for nodes in WORLDS {
        let right = Reference::after(seed, nodes.len(), STEPS).parameters;
        assert_ne!(bits(&right), bits(&tensor(seed, 0, ELEMENTS)));
        for way in 0..4 {
            for overlap in [false, true] {
                let executor = HostExecutor::new().overlap(overlap);
                on_ranks(nodes, &tiny(), |world| {
                    let mut group = communicator(&world);
                    let mut model = Model::new(&mut group, way, seed);
                    (0..STEPS).for_each(|step| model.train(&mut group, &executor, seed, step));
                    assert_eq!(bits(&model.parameters(&mut group)), bits(&right), "{nodes:?}, way {way}");
                });
            }
        }
    }
}

#[test]
fn bucket_size_and_gradient_order_never_change_bits() {
    let seed = random_seed();
    let sizes = [LAYER; LAYERS].concat();
    let right = Reference::after(seed, 3, 1).parameters;
    for bucket_bytes in [0, 4, 32, 100, 1 << 20] {
        for sharding in SHARDINGS {
            on_ranks(&[0, 0, 1], &tiny(), |world| {
                let mut group = communicator(&world);
                let layout = Layout::buckets(&sizes, bucket_bytes).unwrap();
                let mut model = data_parallel(&mut group, layout.clone(), sharding, seed);
                // Each rank has another order.
                let (me, count) = (world.rank() as usize, sizes.len());
                let order = (0..count).map(|nth| (nth * 5 + me) % count);
                let sample = sample(seed, me, 0);
                model
                    .backward(&mut group, &HostExecutor::new(), |pass| give(pass, &layout, sample, order))
                    .unwrap();
                model.step(&mut group).unwrap();
                assert_eq!(bits(model.parameters()), bits(&right), "{bucket_bytes} {sharding:?}");
            });
        }
    }
}

#[test]
fn gradient_of_a_batch_is_the_mean_of_those_of_its_halves() {
    // A linear model of 64 samples of small whole numbers: no sum rounds.
    let value = |nth: usize| (nth * 37 % 11) as f32 - 5.0;
    let gradient = |of: std::ops::Range<usize>| -> Vec<f32> {
        let count = of.len() as f32;
        let sum = of.fold([0.0; 4], |mut sum: [f32; 4], sample| {
            let x = [0, 1, 2, 3].map(|at| value(4 * sample + at));
            let error = x.iter().sum::<f32>() - value(sample);
            sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += error * x);
            sum
        });
        sum.map(|sum| sum / count).to_vec()
    };
    let adam = Adam { learning_rate: 1.0, beta1: 0.0, beta2: 0.0, epsilon: 1.0, weight_decay: 0.0 };
    // Without decay a step is g / (|g| + 1), which tells each mean from others.
    let step = |of: &f32| 1.0 - of / ((of * of).sqrt() + 1.0);
    let right: Vec<f32> = gradient(0..64).iter().map(step).collect();
    for sharding in SHARDINGS {
        on_ranks(&[0, 1], &tiny(), |world| {
            let mut group = communicator(&world);
            let layout = Layout::buckets(&[4], 64).unwrap();
            let mut model = DataParallel::new(&mut group, layout, sharding, vec![1.0; 4], adam).unwrap();
            let half = gradient(32 * world.rank() as usize..32 * (world.rank() as usize + 1));
            model.backward(&mut group, &HostExecutor::new(), |pass| pass.gradient(0, &half)).unwrap();
            model.step(&mut group).unwrap();
            assert_eq!(bits(model.parameters()), bits(&right));
        });
    }
}

#[test]
fn ranks_send_and_hold_what_the_table_says() {
    const LAYER_ELEMENTS: usize = 1536;
    let sizes = [LAYER_ELEMENTS; 3];
    let of_layer = 4 * LAYER_ELEMENTS as u64;
    let whole = 3 * of_layer;
    for nodes in [&[0, 1][..], &[0, 1, 2], &[0, 1, 2, 3]] {
        let ranks = nodes.len() as u64;
        // Each rank is alone on its node, so all that it puts crosses to another.
        let share = whole / ranks * (ranks - 1);
        // A step compares the steps so far, the microbatches and its size, of eight bytes each.
        let compared = 24 * (ranks - 1);
        let executor = HostExecutor::new().overlap(false);
        let (before, behind) = (vec![1.0; 3 * LAYER_ELEMENTS], [1.0; LAYER_ELEMENTS]);
        for (sharding, of_backward, of_step, gradients, states) in [
            (Sharding::None, 2 * share, 0, whole, 2 * whole),
            (Sharding::OptimizerStates, 2 * share, share, whole, 2 * whole / ranks),
            (Sharding::Gradients, share, share, whole / ranks, 2 * whole / ranks),
        ] {
            on_ranks(nodes, &tiny(), |world| {
                let mut group = counting_communicator(&world);
                let layout = Layout::buckets(&sizes, of_layer as usize).unwrap();
                let mut model =
                    DataParallel::new(&mut group, layout, sharding, before.clone(), ADAM).unwrap();
                group.take_counts();
                model
                    .backward(&mut group, &executor, |pass| {
                        (0..3).rev().try_for_each(|nth| pass.gradient(nth, &behind))
                    })
                    .unwrap();
                assert_eq!(group.take_counts().inter_node_bytes, of_backward, "{sharding:?} {ranks}");
                let held = model.memory_usage();
                assert_eq!((held.parameters_bytes, held.gradients_bytes), (whole, gradients));
                assert_eq!((held.states_bytes, held.buffers_peak_bytes), (states, whole));
                model.step(&mut group).unwrap();
                let sent = group.take_counts().inter_node_bytes;
                assert_eq!(sent, of_step + compared, "{sharding:?} {ranks}");
                assert_eq!(model.memory_usage().gradients_bytes, 0);
            });
        }
        for prefetch in 0..3 {
            on_ranks(nodes, &tiny(), |world| {
                let mut group = counting_communicator(&world);
                let layout = Layout::layers(&[[LAYER_ELEMENTS]; 3]).unwrap();
                let mut model = FullySharded::new(&mut group, layout, prefetch, &before, ADAM).unwrap();
                group.take_counts();
                model.forward(&mut group, &executor, |_, _| Ok(())).unwrap();
                assert_eq!(group.take_counts().inter_node_bytes, share);
                let gathered = of_layer * (1 + prefetch as u64);
                assert_eq!(model.memory_usage().buffers_peak_bytes, gathered);
                model
                    .backward(&mut group, &executor, |_, _, gradient| {
                        gradient.copy_from_slice(&behind);
                        Ok(())
                    })
                    .unwrap();
                assert_eq!(group.take_counts().inter_node_bytes, 2 * share);
                let held = model.memory_usage();
                assert_eq!((held.parameters_bytes, held.gradients_bytes), (whole / ranks, whole / ranks));
                let buffers = gathered + of_layer;
                assert_eq!((held.states_bytes, held.buffers_peak_bytes), (2 * whole / ranks, buffers));
                model.step(&mut group).unwrap();
                assert_eq!(group.take_counts().inter_node_bytes, compared);
                assert_eq!(model.memory_usage().gradients_bytes, 0);
            });
        }
    }
}

#[test]
fn overlap_holds_no_more_layers_than_prefetch_allows() {
    let seed = random_seed();
    for prefetch in [0, 1, 2, 9] {
        on_ranks(&[0, 0], &tiny(), |world| {
            let mut group = communicator(&world);
            let mut model = fully_sharded(&mut group, prefetch, seed);
            let seen = AtomicUsize::new(0);
            model
                .forward(&mut group, &HostExecutor::new(), |layer, _| {
                    assert_eq!(seen.fetch_add(1, Ordering::Relaxed), layer);
                    Ok(())
                })
                .unwrap();
            assert_eq!(seen.into_inner(), LAYERS);
            // A layer of 15 elements is padded to 16.
            let most = 64 * LAYERS.min(1 + prefetch) as u64;
            assert!((64..=most).contains(&model.memory_usage().buffers_peak_bytes));
            model.backward(&mut group, &HostExecutor::new(), |_, _, _| Ok(())).unwrap();
            assert!((128..=2 * most).contains(&model.memory_usage().buffers_peak_bytes));
        });
    }
}

pub fn is_refused_by(error: &DataError, peer: u32) -> bool {
    matches!(error, DataError::Call(Error::Call(CallError::PeerRefused { peer: by, .. })) if *by == peer)
}

#[test]
fn wrong_gradients_are_refused_on_all_ranks_next_pass_works() {
    let seed = random_seed();
    let sizes = [LAYER; LAYERS].concat();
    type Wrong = (fn(&mut Backward<'_>) -> Result<(), DataError>, DataError);
    let stop = || DataError::Call(PlanError::RefusedHere.into());
    let cases: [Wrong; 6] = [
        (
            |pass| pass.gradient(11, &[1.0]).and(pass.gradient(11, &[1.0])),
            DataError::GradientTwice { parameter: 11 },
        ),
        (|pass| pass.gradient(12, &[1.0]), DataError::UnknownParameter { parameter: 12, parameters: 12 }),
        (
            |pass| pass.parameter(usize::MAX).map(drop),
            DataError::UnknownParameter { parameter: usize::MAX, parameters: 12 },
        ),
        (
            |pass| pass.gradient(9, &[1.0; 6]),
            DataError::WrongLength { what: "gradient of parameter 9".to_owned(), seen: 6, expected: 7 },
        ),
        (
            |pass| pass.gradient(11, &[1.0]).and(pass.gradient(10, &[1.0; 7])),
            DataError::GradientMissing { parameter: 0 },
        ),
        (|_| Err(DataError::Call(PlanError::RefusedHere.into())), stop()),
    ];
    let right = Reference::after(seed, 3, 1).parameters;
    for sharding in SHARDINGS {
        for overlap in [false, true] {
            on_ranks(&[0, 0, 1], &tiny(), |world| {
                let mut group = communicator(&world);
                let executor = HostExecutor::new().overlap(overlap);
                let layout = Layout::buckets(&sizes, 32).unwrap();
                let mut model = data_parallel(&mut group, layout.clone(), sharding, seed);
                assert_eq!(model.step(&mut group), Err(DataError::NoGradients));
                let mine = sample(seed, world.rank() as usize, 0);
                let order = || (0..sizes.len()).rev();
                for (wrong, right) in &cases {
                    let error = match world.rank() {
                        1 => model.backward(&mut group, &executor, wrong),
                        _ => model.backward(&mut group, &executor, |pass| {
                            give(pass, &layout, mine.clone(), order())
                        }),
                    }
                    .unwrap_err();
                    match world.rank() {
                        1 => assert_eq!(error, *right),
                        _ => assert!(is_refused_by(&error, 1), "{error}"),
                    }
                    assert_eq!(model.memory_usage().gradients_bytes, 0);
                }
                model.backward(&mut group, &executor, |pass| give(pass, &layout, mine, order())).unwrap();
                model.step(&mut group).unwrap();
                assert_eq!(bits(model.parameters()), bits(&right));
            });
        }
    }
}

#[test]
fn step_without_gradients_on_a_rank_changes_nothing_on_any() {
    let seed = random_seed();
    let right = Reference::after(seed, 3, 1).parameters;
    for way in 0..4 {
        on_ranks(&[0, 0, 1], &tiny(), |world| {
            let mut group = communicator(&world);
            let alone = world.group(&[world.rank()]).unwrap();
            let mut alone = Communicator::builder(&alone).chunk(2048).build().unwrap();
            let (odd, executor) = (world.rank() == 1, HostExecutor::new());
            let mut model = Model::new(&mut group, way, seed);
            let before = (bits(&model.parameters(&mut group)), model.save());
            model.backward(&mut group, &executor, seed, 0).unwrap();
            if odd {
                // A pass in a wrong group forgets the gradients.
                model.fail_in(&mut alone);
            }
            let error = model.step(&mut group).unwrap_err();
            match odd {
                true => assert_eq!(error, DataError::NoGradients),
                false => assert!(is_refused_by(&error, 1), "{error}"),
            }
            assert_eq!((bits(&model.parameters(&mut group)), model.save()), before);
            model.train(&mut group, &executor, seed, 0);
            assert_eq!(bits(&model.parameters(&mut group)), bits(&right));
        });
    }
}

#[test]
fn layer_that_fails_on_a_rank_ends_the_pass_on_all() {
    let seed = random_seed();
    let stop = || DataError::Call(PlanError::RefusedHere.into());
    for overlap in [false, true] {
        for prefetch in [0, 1] {
            on_ranks(&[0, 0, 1], &tiny(), |world| {
                let mut group = communicator(&world);
                let executor = HostExecutor::new().overlap(overlap);
                let mut model = Model::Sharded(fully_sharded(&mut group, prefetch, seed));
                let Model::Sharded(sharded) = &mut model else { return };
                assert_eq!(sharded.step(&mut group), Err(DataError::NoGradients));
                let fails = |layer: usize| world.rank() == 2 && layer == 1;
                // Calls are left behind this layer in both passes.
                let result =
                    sharded.forward(
                        &mut group,
                        &executor,
                        |layer, _| if fails(layer) { Err(stop()) } else { Ok(()) },
                    );
                let check = |result: Result<(), DataError>| match world.rank() {
                    2 => assert_eq!(result, Err(stop())),
                    _ => assert!(is_refused_by(&result.unwrap_err(), 2)),
                };
                check(result);
                let result =
                    sharded.backward(
                        &mut group,
                        &executor,
                        |layer, _, _| {
                            if fails(layer) { Err(stop()) } else { Ok(()) }
                        },
                    );
                check(result);
                assert_eq!(sharded.step(&mut group), Err(DataError::NoGradients));
                (0..2).for_each(|step| model.train(&mut group, &executor, seed, step));
                let right = Reference::after(seed, 3, 2).parameters;
                assert_eq!(bits(&model.parameters(&mut group)), bits(&right));
            });
        }
    }
}

#[test]
fn panic_of_a_rank_ends_the_pass_on_all_and_the_next_works() {
    let seed = random_seed();
    for way in 0..4 {
        on_ranks(&[0, 0], &tiny(), |world| {
            let mut group = communicator(&world);
            let (executor, panics) = (HostExecutor::new(), world.rank() == 0);
            let mut model = Model::new(&mut group, way, seed);
            let result = match &mut model {
                Model::Whole(model, layout) => model.backward(&mut group, &executor, |pass| {
                    assert!(!panics, "as the test asks");
                    give(pass, layout, sample(seed, 1, 0), (0..12).rev())
                }),
                Model::Sharded(model) => model.backward(&mut group, &executor, |_, _, _| {
                    assert!(!panics, "as the test asks");
                    Ok(())
                }),
            };
            let error = result.unwrap_err();
            match panics {
                true => assert!(error.to_string().contains("as the test asks"), "{error}"),
                false => assert!(is_refused_by(&error, 0), "{error}"),
            }
            model.train(&mut group, &executor, seed, 0);
            let right = Reference::after(seed, 2, 1).parameters;
            assert_eq!(bits(&model.parameters(&mut group)), bits(&right));
        });
    }
}

#[test]
fn rate_may_change_between_steps_if_it_does_on_all_ranks() {
    let seed = random_seed();
    for way in 0..4 {
        on_ranks(&[0, 1], &tiny(), |world| {
            let (mut group, executor) = (communicator(&world), HostExecutor::new());
            let mut model = Model::new(&mut group, way, seed);
            let mut right = Reference::new(seed);
            for (step, rate) in [0.05, 0.5, 0.01].into_iter().enumerate() {
                model.set_learning_rate(rate).unwrap();
                model.train(&mut group, &executor, seed, step);
                right.learning_rate = rate;
                right.step(seed, 2);
            }
            assert_eq!(bits(&model.parameters(&mut group)), bits(&right.parameters));

            for rate in [f32::NAN, f32::INFINITY] {
                let refused = model.set_learning_rate(rate).unwrap_err();
                assert!(matches!(refused, DataError::BadSetting { setting: "learning_rate", .. }));
            }
            model.set_learning_rate(0.01 + world.rank() as f32).unwrap();
            model.backward(&mut group, &executor, seed, 3).unwrap();
            let error = model.step(&mut group);
            let DataError::Call(Error::Call(CallError::ConfigsDiffer { what, .. })) = error.unwrap_err()
            else {
                panic!("another error")
            };
            assert_eq!(what, "bits of the learning rate");
        });
    }
}

#[test]
fn settings_that_differ_are_named_and_wrong_ones_refused() {
    let seed = random_seed();
    on_ranks(&[0, 1], &tiny(), |world| {
        let mut group = communicator(&world);
        let odd = world.rank() == 1;
        let whole = || tensor(seed, 0, ELEMENTS);
        let rows = |bytes| Layout::buckets(&[LAYER; LAYERS].concat(), bytes).unwrap();
        let mut changed = whole();
        if odd {
            changed[ELEMENTS - 1] += 1.0;
        }
        let faster = Adam { learning_rate: if odd { 0.1 } else { 0.2 }, ..ADAM };
        let sharding = if odd { Sharding::Gradients } else { Sharding::OptimizerStates };
        let mut new = |layout: Layout, sharding, parameters: Vec<f32>, adam| {
            DataParallel::new(&mut group, layout, sharding, parameters, adam).map(drop).unwrap_err()
        };
        for (error, right) in [
            (new(rows(64), sharding, whole(), ADAM), "sharding"),
            (
                new(rows(if odd { 32 } else { 64 }), Sharding::None, whole(), ADAM),
                "digest of sizes and buckets",
            ),
            (new(rows(64), Sharding::None, whole(), faster), "digest of Adam's settings"),
            (new(rows(64), Sharding::None, changed, ADAM), "digest of the parameters"),
        ] {
            let named = matches!(
                &error,
                DataError::Call(Error::Call(CallError::ConfigsDiffer { what, .. })) if *what == right
            );
            assert!(named, "{error}");
        }
        let short = if odd { whole()[1..].to_vec() } else { whole() };
        let error = new(rows(64), Sharding::None, short, ADAM);
        let what = "parameters".to_owned();
        match odd {
            true => {
                assert_eq!(error, DataError::WrongLength { what, seen: ELEMENTS - 1, expected: ELEMENTS });
            }
            false => assert!(is_refused_by(&error, 1)),
        }
        let error = new(rows(64), Sharding::None, whole(), Adam { beta2: 1.0, ..ADAM });
        let expected = "at least 0 and below 1";
        assert_eq!(error, DataError::BadSetting { setting: "beta2", seen: 1.0, expected });

        let prefetch = world.rank() as usize;
        let error = FullySharded::new(&mut group, layers(), prefetch, &whole(), ADAM).map(drop).unwrap_err();
        assert!(error.to_string().ends_with("disagree about prefetch: 0 and 1") || odd, "{error}");

        // A communicator of fewer ranks.
        let mut model = fully_sharded(&mut group, 0, seed);
        let alone = world.group(&[world.rank()]).unwrap();
        let mut alone = Communicator::builder(&alone).chunk(2048).build().unwrap();
        let error = model.backward(&mut alone, &HostExecutor::new(), |_, _, _| Ok(())).unwrap_err();
        let (parameter, expected) = ("ranks of the group", "as many as this was made for");
        assert_eq!(error, DataError::Call(PlanError::BadParameter { parameter, seen: 1, expected }.into()));
    });
}

#[test]
fn layouts_fill_buckets_from_the_last_parameter() {
    let sizes = [10, 30, 20, 4, 1];
    let buckets = |bytes| Layout::buckets(&sizes, bytes).unwrap().bucket_parameters().to_vec();
    assert_eq!(buckets(100), [0..1, 1..2, 2..5]);
    assert_eq!(buckets(99), [0..1, 1..2, 2..3, 3..5]);
    assert_eq!(buckets(0), [0..1, 1..2, 2..3, 3..4, 4..5]);
    assert_eq!(buckets(usize::MAX), [0..5; 1]);
    let layout = Layout::layers(&[vec![10, 30], vec![20]]).unwrap();
    assert_eq!(layout.bucket_parameters(), [0..2, 2..3]);
    assert_eq!((layout.elements(), layout.place(1)), (60, Ok(10..40)));
    let unknown = DataError::UnknownParameter { parameter: 3, parameters: 3 };
    assert_eq!(layout.place(3), Err(unknown));
    let none = |what: &str| Err(DataError::NoParameters { what: what.to_owned() });
    assert_eq!(Layout::buckets(&[], 4), none("the layout"));
    assert_eq!(Layout::layers(&[vec![1], vec![]]), none("layer 1"));
    assert_eq!(Layout::buckets(&[1, 0], 4), Err(DataError::NoElements { parameter: 1 }));
    assert_eq!(Layout::buckets(&[1, usize::MAX], 4), Err(DataError::TooLarge { parameter: 1 }));
}

/// Trains some steps, and writes the shards of all ranks.
fn checkpoint(seed: u64, ranks: usize, way: usize, steps: usize) -> Vec<Vec<u8>> {
    on_ranks(&vec![0; ranks], &tiny(), |world| {
        let mut group = communicator(&world);
        let mut model = Model::new(&mut group, way, seed);
        (0..steps).for_each(|step| model.train(&mut group, &HostExecutor::new(), seed, step));
        model.save()
    })
}

#[test]
fn checkpoint_of_any_ranks_and_strategy_is_read_by_any_other() {
    let seed = random_seed();
    for (writers, way) in [(1, 0), (2, 1), (3, 2), (4, 3), (3, 0), (2, 3)] {
        let mut shards = checkpoint(seed, writers, way, 2);
        shards.reverse();
        let half = Reference::after(seed, writers, 2);
        for readers in 1..=4 {
            let mut right = half.clone();
            right.step(seed, readers);
            for other in 0..4 {
                on_ranks(&vec![0; readers], &tiny(), |world| {
                    let mut group = communicator(&world);
                    // Another start, which the checkpoint replaces.
                    let mut model = Model::new(&mut group, other, seed.wrapping_add(1));
                    model.load(&mut group, &shards).unwrap();
                    assert_eq!(bits(&model.parameters(&mut group)), bits(&half.parameters));
                    // States and steps are there, too.
                    model.train(&mut group, &HostExecutor::new(), seed, 2);
                    assert_eq!(bits(&model.parameters(&mut group)), bits(&right.parameters));
                });
            }
        }
    }
}

#[test]
fn damaged_checkpoints_are_refused_and_change_nothing() {
    let seed = random_seed();
    let shards = checkpoint(seed, 2, 3, 1);
    let later = checkpoint(seed, 2, 3, 2);
    let [first, second] = [&shards[0], &shards[1]];
    on_ranks(&[0], &tiny(), |world| {
        let mut group = communicator(&world);
        for way in 0..4 {
            let mut model = Model::new(&mut group, way, seed);
            let before = (bits(&model.parameters(&mut group)), model.save());
            let mut refused = |shards: &[Vec<u8>]| match model.load(&mut group, shards) {
                Err(DataError::Checkpoint(error)) => error,
                other => panic!("{other:?}"),
            };
            assert_eq!(refused(&[]), CheckpointError::Shards { seen: 0, ranks: 0 });
            assert_eq!(refused(&shards[1..]), CheckpointError::Shards { seen: 1, ranks: 2 });
            let twice = refused(&[first.clone(), first.clone()]);
            assert_eq!(twice, CheckpointError::NotOnce { element: 0, twice: true });
            let mixed = refused(&[first.clone(), later[1].clone()]);
            let (what, seen, expected) = ("steps", 2, 1);
            assert_eq!(mixed, CheckpointError::OtherCheckpoint { reader: 1, what, seen, expected });
            // Any byte changed, and any end.
            for at in (0..second.len()).step_by(if way == 3 { 1 } else { 13 }) {
                let mut changed = second.clone();
                changed[at] ^= 0x40;
                refused(&[first.clone(), changed]);
                let ended = refused(&[first.clone(), second[..at].to_vec()]);
                assert!(matches!(ended, CheckpointError::Io { shard: 1, .. }), "{ended}");
            }
            // Numbers that would ask for all memory.
            for number in 1..8 {
                let mut changed = second.clone();
                changed[8 * number..][..8].fill(0xff);
                refused(&[first.clone(), changed]);
            }
            // A run before the one before it; words are the magic, four numbers, and the runs.
            let mut changed = second.clone();
            changed[8 * 7..][..8].fill(0);
            let back = refused(&[first.clone(), changed]);
            assert_eq!(back, CheckpointError::BadRun { reader: 1, first: 0, len: 7 });
            let other = refused(&[vec![7; 64]]);
            assert_eq!(other, CheckpointError::NotAShard { reader: 0 });
            assert_eq!((bits(&model.parameters(&mut group)), model.save()), before);
            model.load(&mut group, &shards).unwrap();
        }
    });
}
