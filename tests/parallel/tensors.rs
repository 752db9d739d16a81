//! Random tensors, their elements, and references in one process.

use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sidelane::collective::Communicator;
use sidelane::error::CallError;
use sidelane::rows::{Matrix, product};
use sidelane::{Error, World};
use sidelane_parallel::Float;

/// Nodes of the ranks: alone, on one node, on two, and not a power of two.
pub const WORLDS: [&[u32]; 4] = [&[0], &[0, 0, 0], &[0, 1], &[0, 0, 1, 1]];

/// Rounds of two kilobytes, so that tensors take many.
pub fn communicator(world: &World) -> Communicator {
    Communicator::builder(&world.all().unwrap()).chunk(2048).one_shot_bytes(256).build().unwrap()
}

/// Sums of small tensors are in a share of each rank, too, as those of large ones.
pub fn counting_communicator(world: &World) -> Communicator {
    Communicator::builder(&world.all().unwrap()).chunk(8 << 10).one_shot_bytes(0).build().unwrap()
}

/// The same on all ranks: values in -1..1.
pub fn tensor(seed: u64, nth: u64, len: usize) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(nth);
    (0..len).map(|_| rng.random::<f32>() * 2.0 - 1.0).collect()
}

pub fn bits(of: &[f32]) -> Vec<u32> {
    of.iter().map(|value| value.to_bits()).collect()
}

/// Elements of rows, and the values of them that references compute with.
pub trait Elements: Float {
    const NAME: &str;

    /// By which share of its size a value of `f32` is off at most when it becomes an element.
    const ROUNDING: f64;

    /// The nearest element, the even one of two.
    fn nearest(value: f32) -> Self;

    fn value(self) -> f32;

    fn from_bits(bits: u64) -> Self;

    fn to_bits(self) -> u64;
}

impl Elements for f32 {
    const NAME: &str = "f32";
    const ROUNDING: f64 = 0.0;

    fn nearest(value: f32) -> f32 {
        value
    }

    fn value(self) -> f32 {
        self
    }

    fn from_bits(bits: u64) -> f32 {
        f32::from_bits(bits as u32)
    }

    fn to_bits(self) -> u64 {
        self.to_bits().into()
    }
}

impl Elements for bf16 {
    const NAME: &str = "bf16";
    const ROUNDING: f64 = 1.0 / 256.0;

    fn nearest(value: f32) -> bf16 {
        let (upper, lower) = (value.to_bits() >> 16, value.to_bits() & 0xffff);
        let up = lower > 0x8000 || (lower == 0x8000 && upper % 2 == 1);
        bf16::from_bits((upper + u32::from(up)) as u16)
    }

    fn value(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    fn from_bits(bits: u64) -> bf16 {
        bf16::from_bits(bits as u16)
    }

    fn to_bits(self) -> u64 {
        self.to_bits().into()
    }
}

/// The nearest elements.
pub fn elements<E: Elements>(of: &[f32]) -> Vec<E> {
    of.iter().map(|&value| E::nearest(value)).collect()
}

pub fn values<E: Elements>(of: &[E]) -> Vec<f32> {
    of.iter().map(|element| element.value()).collect()
}

/// Values of the nearest elements.
pub fn rounded<E: Elements>(of: &[f32]) -> Vec<f32> {
    values(&elements::<E>(of))
}

/// Bits of the values of elements.
pub fn bits_of<E: Elements>(of: &[E]) -> Vec<u32> {
    bits(&values(of))
}

/// Columns of a matrix.
pub fn columns(of: &[f32], width: usize, from: usize, count: usize) -> Vec<f32> {
    of.chunks_exact(width).flat_map(|row| row[from..from + count].to_vec()).collect()
}

/// `a b'`, `[rows, columns]`, in `f32`.
pub fn times_transposed(a: &[f32], b: &[f32], depth: usize) -> Vec<f32> {
    let (rows, columns) = (a.len() / depth, b.len() / depth);
    let mut out = vec![0.0; rows * columns];
    product(&mut out, Matrix::new(a, rows, depth), Matrix::new(b, columns, depth).transposed(), false);
    out
}

/// `a' b`, of matrices of so many rows, in `f32`.
pub fn transposed_times(a: &[f32], b: &[f32], rows: usize) -> Vec<f32> {
    let (height, width) = (a.len() / rows, b.len() / rows);
    let mut out = vec![0.0; height * width];
    product(&mut out, Matrix::new(a, rows, height).transposed(), Matrix::new(b, rows, width), false);
    out
}

/// The transpose of `[rows, width]`.
pub fn transposed(of: &[f32], width: usize) -> Vec<f32> {
    (0..width).flat_map(|column| of.iter().skip(column).step_by(width).copied()).collect()
}

/// Loss of a token whose logits are in parts of `own` on each rank, and the gradient of its logits.
/// Sums are those of a rank, and then by ascending rank.
pub fn cross_entropy(logits: &[f32], own: usize, target: usize) -> (f32, Vec<f32>) {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f32> = logits.iter().map(|logit| libm::expf(logit - largest)).collect();
    let sum = summed(powers.chunks_exact(own).map(|part| vec![part.iter().sum()]))[0];
    let hit = |id| if id == target { 1.0 } else { 0.0 };
    let gradient = powers.iter().enumerate().map(|(id, power)| power / sum - hit(id)).collect();
    (libm::logf(sum) - (logits[target] - largest), gradient)
}

/// The setting in which ranks differ, of an error that says so.
pub fn differing(error: Error) -> &'static str {
    match error {
        Error::Call(CallError::ConfigsDiffer { what, .. }) => what,
        error => panic!("{error}"),
    }
}

/// Sums of equal tensors in their order, from +0.
pub fn summed(parts: impl IntoIterator<Item = Vec<f32>>) -> Vec<f32> {
    let add = |sum: Option<Vec<f32>>, part: Vec<f32>| {
        let sum = sum.unwrap_or_else(|| vec![0.0; part.len()]);
        Some(sum.iter().zip(part).map(|(sum, part)| sum + part).collect())
    };
    parts.into_iter().fold(None, add).unwrap()
}

/// Checks a product against its formula. A sum of `terms` terms in any order, each rounded, is off
/// by at most `terms` roundings of the sum of their sizes.
pub fn is_product(
    got: &[f32],
    a: &[f32],
    b: &[f32],
    depth: usize,
    bias: impl Fn(usize) -> f32,
    terms: usize,
) {
    let columns = b.len() / depth;
    assert_eq!(got.len(), a.len() / depth * columns);
    for (at, &got) in got.iter().enumerate() {
        let (row, column) = (at / columns, at % columns);
        let term = |k: usize| f64::from(a[row * depth + k]) * f64::from(b[column * depth + k]);
        let bias = f64::from(bias(column));
        let (mut sum, mut size) = (bias, bias.abs());
        for k in 0..depth {
            (sum, size) = (sum + term(k), size + term(k).abs());
        }
        let bound = size * (terms + 1) as f64 * f64::from(f32::EPSILON) / 2.0 * 1.01;
        assert!((f64::from(got) - sum).abs() <= bound, "{got} is not {sum}, by {bound}");
    }
}
