//! Layer norm on a rank's share of the tokens, against one that has all of them.

use half::bf16;
use sidelane::Error;
use sidelane::error::{CallError, PlanError};
use sidelane_parallel::tensor::{Activations, LayerNorm, cut_rows};

use crate::ranks::{on_ranks, random_seed, tiny};
use crate::tensors::{
    Elements, WORLDS, bits, bits_of, communicator, counting_communicator, differing, elements, rounded,
    summed, tensor,
};

const TOKENS: usize = 24;
const WIDTH: usize = 20;
const EPSILON: f32 = 1e-5;

/// A layer norm of all tokens, and the gradients of its outputs.
struct Whole {
    x: Vec<f32>,
    scale: Vec<f32>,
    bias: Vec<f32>,
    of_output: Vec<f32>,
}

impl Whole {
    fn new<E: Elements>(seed: u64) -> Whole {
        let [x, of_output] = [0, 1].map(|nth| rounded::<E>(&tensor(seed, nth, TOKENS * WIDTH)));
        Whole { x, scale: tensor(seed, 2, WIDTH), bias: tensor(seed, 3, WIDTH), of_output }
    }

    /// A row's elements less their mean, times what makes their variance 1, and that factor.
    fn normal(row: &[f32]) -> (Vec<f32>, f32) {
        let count = row.len() as f32;
        let mean = by_element(row.to_vec()) / count;
        let squares = row.iter().map(|x| (x - mean) * (x - mean)).collect();
        let inverse = 1.0 / (by_element(squares) / count + EPSILON).sqrt();
        (row.iter().map(|x| (x - mean) * inverse).collect(), inverse)
    }

    fn outputs(&self) -> Vec<f32> {
        let row = |row: &[f32]| -> Vec<f32> {
            let normal = Self::normal(row).0.into_iter().zip(self.scale.iter().zip(&self.bias));
            normal.map(|(normal, (scale, bias))| normal * scale + bias).collect()
        };
        self.x.chunks_exact(WIDTH).flat_map(row).collect()
    }

    /// Gradients of the rows, and by row those of the scale and of the bias.
    fn gradients(&self) -> (Vec<f32>, Vec<Vec<f32>>, Vec<Vec<f32>>) {
        let (mut of_x, mut of_scale, mut of_bias) = (Vec::new(), Vec::new(), Vec::new());
        for (row, of) in self.x.chunks_exact(WIDTH).zip(self.of_output.chunks_exact(WIDTH)) {
            let ((normal, inverse), count) = (Self::normal(row), row.len() as f32);
            let times = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).collect::<Vec<_>>();
            of_scale.push(times(of, &normal));
            of_bias.push(of.to_vec());
            let of_normal = times(of, &self.scale);
            let mean = by_element(of_normal.clone()) / count;
            let slope = by_element(times(&of_normal, &normal)) / count;
            let pairs = of_normal.iter().zip(&normal);
            of_x.extend(pairs.map(|(of, normal)| inverse * ((of - mean) - normal * slope)));
        }
        (of_x, of_scale, of_bias)
    }
}

/// From +0, by ascending element.
fn by_element(of: Vec<f32>) -> f32 {
    summed(of.into_iter().map(|value| vec![value]))[0]
}

fn check<E: Elements>(seed: u64) {
    let whole = Whole::new::<E>(seed);
    let (of_x, of_scale, of_bias) = whole.gradients();
    for way in [Activations::Replicated, Activations::SequenceParallel] {
        for nodes in WORLDS {
            // Tokens of a rank, and ranks whose gradients are summed.
            let (own, parts) = match way {
                Activations::Replicated => (TOKENS, 1),
                Activations::SequenceParallel => (TOKENS / nodes.len(), nodes.len()),
            };
            let over_ranks = |of: &[Vec<f32>]| {
                let of_rank = |rows: &[Vec<f32>]| summed(rows.iter().cloned());
                if parts == 1 { of_rank(of) } else { summed(of.chunks_exact(own).map(of_rank)) }
            };
            let (of_scale, of_bias) = (over_ranks(&of_scale), over_ranks(&of_bias));
            on_ranks(nodes, &tiny(), |world| {
                let mut group = communicator(&world);
                let part = (world.rank() % parts as u32, parts as u32);
                let cut = |of: &[f32]| cut_rows(of, WIDTH, part).unwrap().to_vec();
                let (scale, bias) = (whole.scale.clone(), whole.bias.clone());
                let norm = LayerNorm::new(&mut group, way, EPSILON, scale, bias).unwrap().with_rows::<E>();
                let (x, of_output) = (elements::<E>(&cut(&whole.x)), elements::<E>(&cut(&whole.of_output)));
                let case = format!("{nodes:?} {way:?} {}", E::NAME);
                let y = norm.forward(&x).unwrap();
                assert_eq!(bits_of(&y), bits(&rounded::<E>(&cut(&whole.outputs()))), "{case}");
                let of = norm.backward(&mut group, &x, &of_output).unwrap();
                assert_eq!(bits_of(&of.input), bits(&rounded::<E>(&cut(&of_x))), "{case}");
                assert_eq!(bits(&of.scale), bits(&of_scale), "{case}");
                assert_eq!(bits(&of.bias), bits(&of_bias), "{case}");
            });
        }
    }
}

#[test]
fn layer_norm_has_the_bits_of_all_tokens_and_of_sums_by_rank() {
    let seed = random_seed();
    check::<f32>(seed);
    check::<bf16>(seed);
}

#[test]
fn gradients_of_a_layer_norm_are_differences_of_its_outputs() {
    let seed = random_seed();
    let whole = Whole::new::<f32>(seed);
    let (of_x, of_scale, of_bias) = whole.gradients();
    let loss = |x: &[f64], scale: &[f64], bias: &[f64]| -> f64 {
        let rows = x.chunks_exact(WIDTH).zip(whole.of_output.chunks_exact(WIDTH));
        let row = |(row, of): (&[f64], &[f32])| -> f64 {
            let mean = row.iter().sum::<f64>() / WIDTH as f64;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / WIDTH as f64;
            let normal = |x: f64| (x - mean) / (variance + f64::from(EPSILON)).sqrt();
            (0..WIDTH).map(|at| f64::from(of[at]) * (normal(row[at]) * scale[at] + bias[at])).sum()
        };
        rows.map(row).sum()
    };
    let tensors = [&whole.x, &whole.scale, &whole.bias]
        .map(|of| -> Vec<f64> { of.iter().map(|&value| value.into()).collect() });
    let gradients = [of_x, summed(of_scale), summed(of_bias)];
    for (nth, gradient) in gradients.iter().enumerate() {
        for at in (0..gradient.len()).step_by(7) {
            let moved = |by: f64| {
                let mut tensors = tensors.clone();
                tensors[nth][at] += by;
                loss(&tensors[0], &tensors[1], &tensors[2])
            };
            // Roundings of f32, and of the difference, are far below a wrong formula.
            let slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
            assert!((f64::from(gradient[at]) - slope).abs() < 1e-4, "{nth} {at}: {} {slope}", gradient[at]);
        }
    }
}

#[test]
fn ranks_send_gradients_of_scale_and_bias_alone() {
    on_ranks(&[0, 1], &tiny(), |world| {
        let mut group = counting_communicator(&world);
        let rows = vec![bf16::ONE; TOKENS / 2 * WIDTH];
        for (way, sent) in [(Activations::Replicated, 0), (Activations::SequenceParallel, 2 * WIDTH * 4)] {
            let norm = LayerNorm::new(&mut group, way, EPSILON, vec![1.0; WIDTH], vec![0.0; WIDTH]).unwrap();
            let norm = norm.with_rows::<bf16>();
            group.take_counts();
            norm.forward(&rows).unwrap();
            assert_eq!(group.take_counts().inter_node_bytes, 0);
            norm.backward(&mut group, &rows, &rows).unwrap();
            assert_eq!(group.take_counts().inter_node_bytes, sent as u64);
        }
    });
}

#[test]
fn wrong_rows_of_a_layer_norm_are_refused_on_all_ranks() {
    on_ranks(&[0, 1], &tiny(), |world| {
        let (mut group, wrong) = (communicator(&world), world.rank() == 0);
        let way = Activations::SequenceParallel;
        let error = LayerNorm::new(&mut group, way, EPSILON, vec![1.0; 2], vec![0.0; 3]).unwrap_err();
        let shape = PlanError::WrongShape { what: "bias", seen: 3, rows: 1, columns: 2 };
        assert_eq!(error, Error::Plan(shape));
        let error = LayerNorm::new(&mut group, way, EPSILON, vec![], vec![]).unwrap_err();
        let bad = |error: &_| matches!(error, PlanError::BadParameter { parameter: "elements of a row", .. });
        assert!(matches!(&error, Error::Plan(plan) if bad(plan)), "{error}");
        let epsilon = if wrong { EPSILON } else { 0.0 };
        let error = LayerNorm::new(&mut group, way, epsilon, vec![1.0; 2], vec![0.0; 2]).unwrap_err();
        assert_eq!(differing(error), "bits of epsilon");
        let bias = vec![if wrong { 0.0 } else { -0.0 }; 2];
        let error = LayerNorm::new(&mut group, way, EPSILON, vec![1.0; 2], bias).unwrap_err();
        assert_eq!(differing(error), "digest of the bias");
        let norm = LayerNorm::new(&mut group, way, EPSILON, vec![1.0; 2], vec![0.0; 2]).unwrap();
        let error = norm.forward(&[1.0; 3]).unwrap_err();
        assert!(matches!(error, PlanError::WrongShape { what: "rows of a layer norm", .. }), "{error}");
        let of_output: &[f32] = if wrong { &[1.0; 2] } else { &[1.0; 4] };
        match norm.backward(&mut group, &[1.0; 4], of_output).unwrap_err() {
            Error::Plan(PlanError::WrongShape { what, .. }) => {
                assert!(wrong && what == "gradients of outputs");
            }
            Error::Call(CallError::PeerRefused { peer: 0, .. }) => assert!(!wrong),
            error => panic!("{error}"),
        }
        assert_eq!(norm.backward(&mut group, &[1.0; 4], &[1.0; 4]).unwrap().bias, [4.0; 2]);
    });
}
