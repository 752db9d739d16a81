//! Column and row parallel layers, forward and backward, against whole layers in one process.

use half::bf16;
use sidelane::error::{CallError, PlanError};
use sidelane::{Error, World};
use sidelane_parallel::tensor::{
    Activations, ColumnParallelLinear, LinearShape, RowParallelLinear, cut_columns, cut_rows, gather_columns,
};

use crate::ranks::{on_ranks, random_seed, tiny};
use crate::tensors::{
    Elements, WORLDS, bits, bits_of, columns, communicator, counting_communicator, differing, elements,
    is_product, rounded, summed, tensor, times_transposed, transposed, transposed_times,
};

const TOKENS: usize = 12;
const INPUTS: usize = 48;
const OUTPUTS: usize = 72;
const SHAPE: LinearShape = LinearShape { inputs: INPUTS, outputs: OUTPUTS };
const WAYS: [Activations; 2] = [Activations::Replicated, Activations::SequenceParallel];

/// A whole layer, with its inputs and the gradients of its outputs, which are values of elements.
struct Whole {
    x: Vec<f32>,
    weight: Vec<f32>,
    /// The weights as products see them.
    factors: Vec<f32>,
    bias: Option<Vec<f32>>,
    of_y: Vec<f32>,
}

impl Whole {
    fn new<E: Elements>(seed: u64, with_bias: bool) -> Whole {
        let bias = with_bias.then(|| tensor(seed, 2, OUTPUTS));
        let (x, weight) = (tensor(seed, 0, TOKENS * INPUTS), tensor(seed, 1, OUTPUTS * INPUTS));
        let of_y = rounded::<E>(&tensor(seed, 3, TOKENS * OUTPUTS));
        Whole { x: rounded::<E>(&x), factors: rounded::<E>(&weight), weight, bias, of_y }
    }

    fn biased(&self, y: Vec<f32>) -> Vec<f32> {
        let Some(bias) = &self.bias else { return y };
        y.iter().enumerate().map(|(at, y)| y + bias[at % OUTPUTS]).collect()
    }

    /// By ascending token.
    fn of_bias(&self) -> Vec<f32> {
        summed(self.of_y.chunks_exact(OUTPUTS).map(<[f32]>::to_vec))
    }
}

/// This rank's tokens, if each has a part of them.
fn tokens(way: Activations, world: &World, of: &[f32], width: usize) -> Vec<f32> {
    match way {
        Activations::Replicated => of.to_vec(),
        Activations::SequenceParallel => cut_rows(of, width, (world.rank(), world.size())).unwrap().to_vec(),
    }
}

/// Sums of partial results of ranks, as they travel: each rounded, and their sum again.
fn reduced<E: Elements>(parts: impl Iterator<Item = Vec<f32>>) -> Vec<f32> {
    rounded::<E>(&summed(parts.map(|part| rounded::<E>(&part))))
}

fn cases<E: Elements>(seed: u64, body: impl Fn(World, Activations, &Whole) + Sync) {
    for with_bias in [false, true] {
        let whole = Whole::new::<E>(seed, with_bias);
        for way in WAYS {
            for nodes in WORLDS {
                on_ranks(nodes, &tiny(), |world| body(world, way, &whole));
            }
        }
    }
}

fn check_column_parallel_layer<E: Elements>(world: &World, way: Activations, whole: &Whole) {
    let (me, ranks) = (world.rank() as usize, world.size() as usize);
    let (part, own) = ((world.rank(), world.size()), OUTPUTS / ranks);
    let mut group = communicator(world);
    let weight = cut_rows(&whole.weight, INPUTS, part).unwrap().to_vec();
    let bias = whole.bias.as_ref().map(|bias| cut_rows(bias, 1, part).unwrap().to_vec());
    let layer = ColumnParallelLinear::new(&mut group, SHAPE, way, weight, bias).unwrap().with_rows::<E>();
    let x = elements::<E>(&tokens(way, world, &whole.x, INPUTS));

    let y = layer.forward(&mut group, &x).unwrap();
    let right = rounded::<E>(&whole.biased(times_transposed(&whole.x, &whole.factors, INPUTS)));
    assert_eq!(bits_of(&y), bits(&columns(&right, OUTPUTS, me * own, own)));

    assert_eq!(bits_of(&gather_columns(&mut group, &y, OUTPUTS).unwrap()), bits(&right));

    let of_y = cut_columns(&elements::<E>(&whole.of_y), OUTPUTS, part).unwrap();
    let gradients = layer.backward(&mut group, &x, &of_y).unwrap();
    // Gradients of inputs: parts of the outputs, by ascending rank.
    let parts = (0..ranks).map(|rank| {
        let of_y = columns(&whole.of_y, OUTPUTS, rank * own, own);
        let weight = &whole.factors[rank * own * INPUTS..][..own * INPUTS];
        times_transposed(&of_y, &transposed(weight, INPUTS), own)
    });
    let of_x = reduced::<E>(parts.clone());
    assert_eq!(bits_of(&gradients.input), bits(&tokens(way, world, &of_x, INPUTS)));
    let across = transposed(&whole.factors, INPUTS);
    is_product(&summed(parts), &whole.of_y, &across, OUTPUTS, |_| 0.0, OUTPUTS + ranks);
    // Gradients of weights need no sum over ranks.
    let of_weight = transposed_times(&whole.of_y, &whole.x, TOKENS);
    assert_eq!(bits(&gradients.weight), bits(cut_rows(&of_weight, INPUTS, part).unwrap()));
    let (across, along) = (transposed(&whole.of_y, OUTPUTS), transposed(&whole.x, INPUTS));
    is_product(&of_weight, &across, &along, TOKENS, |_| 0.0, TOKENS + 1);
    let of_bias = whole.of_bias()[me * own..][..own].to_vec();
    assert_eq!(gradients.bias, whole.bias.as_ref().map(|_| of_bias));
    let (input, delayed) = layer.backward_input(&mut group, &x, &of_y).unwrap();
    let (weight, bias) = delayed.weights();
    assert_eq!(bits_of(&input), bits_of(&gradients.input));
    assert_eq!((bits(&weight), bias), (bits(&gradients.weight), gradients.bias));
}

#[test]
fn column_parallel_layer_has_the_bits_of_the_whole_layer() {
    let seed = random_seed();
    cases::<f32>(seed, |world, way, whole| check_column_parallel_layer::<f32>(&world, way, whole));
    cases::<bf16>(seed, |world, way, whole| check_column_parallel_layer::<bf16>(&world, way, whole));
}

fn check_row_parallel_layer<E: Elements>(world: &World, way: Activations, whole: &Whole) {
    let (me, ranks) = (world.rank() as usize, world.size() as usize);
    let (part, own) = ((world.rank(), world.size()), INPUTS / ranks);
    let mut group = communicator(world);
    let weight = cut_columns(&whole.weight, INPUTS, part).unwrap();
    let layer = RowParallelLinear::new(&mut group, SHAPE, way, weight, whole.bias.clone()).unwrap();
    let layer = layer.with_rows::<E>();
    let x = cut_columns(&elements::<E>(&whole.x), INPUTS, part).unwrap();

    let y = layer.forward(&mut group, &x).unwrap();
    let parts = (0..ranks).map(|rank| {
        let of = |whole: &[f32]| columns(whole, INPUTS, rank * own, own);
        times_transposed(&of(&whole.x), &of(&whole.factors), own)
    });
    let right = rounded::<E>(&whole.biased(reduced::<E>(parts.clone())));
    assert_eq!(bits_of(&y), bits(&tokens(way, world, &right, OUTPUTS)));
    is_product(&summed(parts), &whole.x, &whole.factors, INPUTS, |_| 0.0, INPUTS + ranks);

    let of_y = elements::<E>(&tokens(way, world, &whole.of_y, OUTPUTS));
    let gradients = layer.backward(&mut group, &x, &of_y).unwrap();
    let of_x = times_transposed(&whole.of_y, &transposed(&whole.factors, INPUTS), OUTPUTS);
    assert_eq!(bits_of(&gradients.input), bits(&rounded::<E>(&columns(&of_x, INPUTS, me * own, own))));
    let of_whole_x = gather_columns(&mut group, &gradients.input, INPUTS).unwrap();
    assert_eq!(bits_of(&of_whole_x), bits(&rounded::<E>(&of_x)));
    let of_weight = transposed_times(&whole.of_y, &whole.x, TOKENS);
    assert_eq!(bits(&gradients.weight), bits(&cut_columns(&of_weight, INPUTS, part).unwrap()));
    // The bias is not cut, so its gradient is that of all tokens, on every rank.
    assert_eq!(gradients.bias, whole.bias.as_ref().map(|_| whole.of_bias()));
    let (input, delayed) = layer.backward_input(&mut group, &x, &of_y).unwrap();
    let (weight, bias) = delayed.weights();
    assert_eq!(bits_of(&input), bits_of(&gradients.input));
    assert_eq!((bits(&weight), bias), (bits(&gradients.weight), gradients.bias));
}

#[test]
fn row_parallel_layer_has_the_bits_of_the_sum_by_rank() {
    let seed = random_seed();
    cases::<f32>(seed, |world, way, whole| check_row_parallel_layer::<f32>(&world, way, whole));
    cases::<bf16>(seed, |world, way, whole| check_row_parallel_layer::<bf16>(&world, way, whole));
}

/// Bytes that a rank alone on its node sends in each pass of both layers.
fn sent<E: Elements>(world: &World, way: Activations) -> [u64; 4] {
    let part = (world.rank(), world.size());
    let mut group = counting_communicator(world);
    let whole = Whole::new::<E>(1, false);
    let weight = cut_rows(&whole.weight, INPUTS, part).unwrap().to_vec();
    let column = ColumnParallelLinear::new(&mut group, SHAPE, way, weight, None).unwrap().with_rows::<E>();
    let weight = cut_columns(&whole.weight, INPUTS, part).unwrap();
    let row = RowParallelLinear::new(&mut group, SHAPE, way, weight, None).unwrap().with_rows::<E>();
    let (own_inputs, own_outputs) = (INPUTS / part.1 as usize, OUTPUTS / part.1 as usize);
    let (x, of_x) = (tokens(way, world, &whole.x, INPUTS), columns(&whole.of_y, OUTPUTS, 0, own_outputs));
    let (h, of_h) = (columns(&whole.x, INPUTS, 0, own_inputs), tokens(way, world, &whole.of_y, OUTPUTS));
    let [x, of_x, h, of_h] = [x, of_x, h, of_h].map(|of| elements::<E>(&of));
    group.take_counts();
    column.forward(&mut group, &x).unwrap();
    let column_forward = group.take_counts().inter_node_bytes;
    column.backward(&mut group, &x, &of_x).unwrap();
    let column_backward = group.take_counts().inter_node_bytes;
    row.forward(&mut group, &h).unwrap();
    let row_forward = group.take_counts().inter_node_bytes;
    row.backward(&mut group, &h, &of_h).unwrap();
    [column_forward, column_backward, row_forward, group.take_counts().inter_node_bytes]
}

#[test]
fn rows_of_bf16_send_half_the_bytes() {
    for nodes in [&[0, 1][..], &[0, 1, 2, 3]] {
        // Bytes of all tokens in f32, to other ranks.
        let of_rows = |width: usize| (4 * TOKENS * width * (nodes.len() - 1)) as u64;
        let (inputs, outputs) = (of_rows(INPUTS), of_rows(OUTPUTS));
        for (way, right) in [
            (Activations::Replicated, [0, 2 * inputs, 2 * outputs, 0]),
            (Activations::SequenceParallel, [inputs, 2 * inputs, outputs, outputs]),
        ] {
            let of_all = |sent: Vec<[u64; 4]>| [0, 1, 2, 3].map(|pass| sent.iter().map(|of| of[pass]).sum());
            let wide: [u64; 4] = of_all(on_ranks(nodes, &tiny(), |world| sent::<f32>(&world, way)));
            assert_eq!(wide, right, "{nodes:?} {way:?}");
            let narrow = of_all(on_ranks(nodes, &tiny(), |world| sent::<bf16>(&world, way)));
            assert_eq!(narrow, right.map(|bytes| bytes / 2), "{nodes:?} {way:?}");
        }
    }
}

/// Sizes for which a rank has more than 256 weights of each layer.
const HIDDEN: usize = 256;
const WIDTH: usize = 8;
const RATE: f32 = 1e-4;

/// `y = relu(x up' + a) down' + b`, whose loss is the sum of squares.
struct Block {
    x: Vec<f32>,
    up: Vec<f32>,
    down: Vec<f32>,
    biases: [Vec<f32>; 2],
}

fn learn(weights: &mut [f32], gradient: &[f32]) {
    weights.iter_mut().zip(gradient).for_each(|(weight, of)| *weight -= RATE * of);
}

fn relu(h: &[f32]) -> Vec<f32> {
    h.iter().map(|h| h.max(0.0)).collect()
}

/// Gradients of what `relu` took.
fn of_relu(of: &[f32], h: &[f32]) -> Vec<f32> {
    of.iter().zip(h).map(|(of, h)| if *h > 0.0 { *of } else { 0.0 }).collect()
}

fn squares(y: &[f32]) -> f32 {
    y.iter().map(|y| y * y).sum()
}

impl Block {
    fn new(seed: u64) -> Block {
        let (up, down) = (tensor(seed, 1, WIDTH * HIDDEN), tensor(seed, 2, WIDTH * HIDDEN));
        Block { x: tensor(seed, 0, 8 * WIDTH), up, down, biases: [vec![0.0; HIDDEN], vec![0.0; WIDTH]] }
    }

    /// Losses of steps in one process, with sums as these ranks have them.
    fn replay(mut self, ranks: usize, way: Activations) -> Vec<f32> {
        let own = HIDDEN / ranks;
        let steps = (0..8).map(|_| {
            let biased = |rows: Vec<f32>, bias: &[f32]| -> Vec<f32> {
                rows.iter().enumerate().map(|(at, row)| row + bias[at % bias.len()]).collect()
            };
            let h = relu(&biased(times_transposed(&self.x, &self.up, WIDTH), &self.biases[0]));
            let parts = (0..ranks).map(|rank| {
                let [h, down] = [&h, &self.down].map(|of| columns(of, HIDDEN, rank * own, own));
                times_transposed(&h, &down, own)
            });
            let y = biased(summed(parts), &self.biases[1]);
            let of_y: Vec<f32> = y.iter().map(|y| 2.0 * y).collect();
            let of_h = times_transposed(&of_y, &transposed(&self.down, HIDDEN), WIDTH);
            let of_h = of_relu(&of_h, &h);
            let rows = |of: &[f32], width| summed(of.chunks_exact(width).map(<[f32]>::to_vec));
            learn(&mut self.down, &transposed_times(&of_y, &h, 8));
            learn(&mut self.up, &transposed_times(&of_h, &self.x, 8));
            learn(&mut self.biases[0], &rows(&of_h, HIDDEN));
            learn(&mut self.biases[1], &rows(&of_y, WIDTH));
            match way {
                Activations::Replicated => squares(&y),
                Activations::SequenceParallel => {
                    summed(y.chunks_exact(y.len() / ranks).map(|y| vec![squares(y)]))[0]
                }
            }
        });
        steps.collect()
    }

    /// Losses of the same steps on a rank.
    fn train(&self, world: &World, way: Activations) -> Vec<f32> {
        let (mut group, part) = (communicator(world), (world.rank(), world.size()));
        let shape = LinearShape { inputs: WIDTH, outputs: HIDDEN };
        let weight = cut_rows(&self.up, WIDTH, part).unwrap().to_vec();
        let bias = Some(vec![0.0; HIDDEN / part.1 as usize]);
        let mut up = ColumnParallelLinear::new(&mut group, shape, way, weight, bias).unwrap();
        let shape = LinearShape { inputs: HIDDEN, outputs: WIDTH };
        let (weight, bias) = (cut_columns(&self.down, HIDDEN, part).unwrap(), Some(vec![0.0; WIDTH]));
        let mut down = RowParallelLinear::new(&mut group, shape, way, weight, bias).unwrap();
        let x = tokens(way, world, &self.x, WIDTH);
        let steps = (0..8).map(|_| {
            let h = relu(&up.forward(&mut group, &x).unwrap());
            let y = down.forward(&mut group, &h).unwrap();
            let mut loss = [squares(&y)];
            if way == Activations::SequenceParallel {
                group.all_reduce(&mut loss).unwrap();
            }
            let of_y: Vec<_> = y.iter().map(|y| 2.0 * y).collect();
            let of_down = down.backward(&mut group, &h, &of_y).unwrap();
            let of_up = up.backward(&mut group, &x, &of_relu(&of_down.input, &h)).unwrap();
            learn(up.weight_mut(), &of_up.weight);
            learn(down.weight_mut(), &of_down.weight);
            learn(up.bias_mut().unwrap(), &of_up.bias.unwrap());
            learn(down.bias_mut().unwrap(), &of_down.bias.unwrap());
            loss[0]
        });
        steps.collect()
    }
}

#[test]
fn block_of_both_layers_trains_as_one_process_that_sums_by_rank() {
    let seed = random_seed();
    for (nodes, way) in
        WORLDS.into_iter().filter(|nodes| nodes.len() != 3).flat_map(|of| WAYS.map(|way| (of, way)))
    {
        let replayed = Block::new(seed).replay(nodes.len(), way);
        assert_ne!(replayed[0], replayed[7]);
        let block = Block::new(seed);
        for losses in on_ranks(nodes, &tiny(), |world| block.train(&world, way)) {
            assert_eq!(bits(&losses), bits(&replayed), "{nodes:?} {way:?}");
        }
    }
}

#[test]
fn wrong_input_is_refused_on_all_ranks_and_the_next_call_works() {
    on_ranks(&[0, 0, 1], &tiny(), |world| {
        let mut group = communicator(&world);
        let shape = LinearShape { inputs: 6, outputs: 2 };
        let [replicated, sequence] =
            WAYS.map(|way| RowParallelLinear::new(&mut group, shape, way, vec![1.0; 4], None).unwrap());
        let wrong = world.rank() == 1;

        let x = vec![1.0; if wrong { 5 } else { 6 }];
        let error = replicated.forward(&mut group, &x).unwrap_err();
        let right = if wrong {
            matches!(error, Error::Plan(PlanError::WrongShape { what: "inputs", seen: 5, .. }))
        } else {
            matches!(error, Error::Call(CallError::PeerRefused { peer: 1, .. }))
        };
        assert!(right, "{error}");
        assert_eq!(replicated.forward(&mut group, &[1.0; 6]).unwrap(), [6.0; 6]);

        // Four tokens are not a part for each of three ranks.
        let error = sequence.forward(&mut group, &[1.0; 8]).unwrap_err();
        let four = PlanError::BadParameter {
            parameter: "tokens",
            seen: 4,
            expected: "a multiple of the ranks of the group",
        };
        assert_eq!(error, Error::Plan(four));
        assert_eq!(sequence.forward(&mut group, &[1.0; 6]).unwrap(), [6.0; 2]);
        let of_y = vec![1.0; if wrong { 3 } else { 2 }];
        sequence.backward(&mut group, &[1.0; 6], &of_y).unwrap_err();
        sequence.backward_input(&mut group, &[1.0; 6], &of_y).unwrap_err();
        assert_eq!(sequence.backward(&mut group, &[1.0; 6], &[1.0; 2]).unwrap().weight, [3.0; 4]);
        let (_, delayed) = sequence.backward_input(&mut group, &[1.0; 6], &[1.0; 2]).unwrap();
        assert_eq!(delayed.weights().0, [3.0; 4]);

        let error = gather_columns(&mut group, &vec![1.0; if wrong { 3 } else { 4 }], 6).unwrap_err();
        let right = if wrong {
            matches!(error, Error::Plan(PlanError::WrongShape { what: "columns of a rank", seen: 3, .. }))
        } else {
            matches!(error, Error::Call(CallError::PeerRefused { peer: 1, .. }))
        };
        assert!(right, "{error}");
        assert_eq!(gather_columns(&mut group, &[1.0; 2], 3).unwrap(), [1.0; 6]);
    });
}

#[test]
fn layers_that_do_not_make_equal_parts_are_refused() {
    on_ranks(&[0, 0], &tiny(), |world| {
        let mut group = communicator(&world);
        let mut new = |inputs, outputs, weights: usize, bias: Option<usize>| {
            let bias = bias.map(|bias| vec![0.0; bias]);
            let shape = LinearShape { inputs, outputs };
            ColumnParallelLinear::new(&mut group, shape, Activations::Replicated, vec![0.0; weights], bias)
                .map(drop)
        };
        assert_eq!(new(3, 4, 6, Some(2)), Ok(()));
        let bad = |parameter, seen, expected| {
            Err(Error::Plan(PlanError::BadParameter { parameter, seen, expected }))
        };
        assert_eq!(new(3, 5, 6, None), bad("outputs", 5, "a multiple of the ranks of the group"));
        assert_eq!(new(0, 4, 0, None), bad("inputs", 0, "at least 1"));
        assert_eq!(new(3, 0, 0, None), bad("outputs", 0, "at least 1"));
        let wrong =
            |what, seen, rows, columns| Err(Error::Plan(PlanError::WrongShape { what, seen, rows, columns }));
        assert_eq!(new(3, 4, 7, None), wrong("weights", 7, 2, 3));
        assert_eq!(new(3, 4, 6, Some(4)), wrong("bias", 4, 1, 2));
    });
}

#[test]
fn settings_that_differ_between_ranks_are_refused_on_all() {
    on_ranks(&[0, 1], &tiny(), |world| {
        let mut group = communicator(&world);
        let wrong = world.rank() == 1;
        let shape = LinearShape { inputs: 4, outputs: if wrong { 8 } else { 4 } };
        let weight = vec![1.0; 2 * shape.outputs];
        let error = ColumnParallelLinear::new(&mut group, shape, WAYS[0], weight, None).unwrap_err();
        assert_eq!(differing(error), "outputs");

        let shape = LinearShape { inputs: 4, outputs: 4 };
        let mut row =
            |way, bias| RowParallelLinear::new(&mut group, shape, way, vec![1.0; 8], bias).map(drop);
        let error = row(WAYS[usize::from(wrong)], None).unwrap_err();
        assert_eq!(differing(error), "sequence parallel activations");
        assert_eq!(differing(row(WAYS[0], wrong.then(|| vec![0.0; 4])).unwrap_err()), "bias");
        let of_rank = Some(vec![world.rank() as f32; 4]);
        assert_eq!(differing(row(WAYS[0], of_rank).unwrap_err()), "digest of the bias");

        // The bias of a column parallel layer is cut, so ranks have different ones.
        let of_rank = Some(vec![world.rank() as f32; 2]);
        ColumnParallelLinear::new(&mut group, shape, WAYS[0], vec![1.0; 8], of_rank).unwrap();
        let error = match wrong {
            true => ColumnParallelLinear::new(&mut group, shape, WAYS[0], vec![1.0; 8], None).unwrap_err(),
            false => RowParallelLinear::new(&mut group, shape, WAYS[0], vec![1.0; 8], None).unwrap_err(),
        };
        assert_eq!(differing(error), "column parallel layer");
    });
}
