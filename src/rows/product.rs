//! Matrix products, of which a row has the same bits next to any other rows.
//!
//! The arithmetic is that of the crate `gemm`. A product there takes other paths, with other bits,
//! where a matrix has few rows, few elements, or a depth that is cut into blocks by the number of
//! its rows. None of that may change the bits: tokens of a layer come in chunks of any size. So a
//! product is computed in slices of its depth, each of one block, and of not too few rows:
//!
//! ```text
//!   out [m, n]  =  a[:, 0..512] b[0..512, :]  +  a[:, 512..1024] b[512..1024, :]  +  ..        fused multiply-adds, by rising depth
//!                     m < 2, or m n <= 256: rows of zeros are put below
//! ```
//!
//! A slice of one or two goes on with the sum before it, and there each product is rounded.
//!
//! Bits do depend on the machine: on whether it has fused multiply-add. Where it has, those of the
//! kernel `matmul` on a GPU are the same for two columns and more.

use gemm_common::Parallelism;

/// Depth up to which `gemm` makes one block of any product.
const DEPTH: usize = 512;
/// Elements of a result up to which `gemm` sums across its lanes.
const FEW: usize = 16 * 16;

/// A matrix of rows that lie one after another, or the transpose of one.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    transposed: bool,
}

impl<'a> Matrix<'a> {
    /// `[rows, columns]`.
    ///
    /// # Panics
    /// If there are not `rows * columns` values.
    pub fn new(values: &'a [f32], rows: usize, columns: usize) -> Matrix<'a> {
        assert_eq!(values.len(), rows * columns, "values of a matrix [{rows}, {columns}]");
        Matrix { values, rows, columns, transposed: false }
    }

    /// Its transpose, where it lies.
    pub fn transposed(self) -> Matrix<'a> {
        Matrix { rows: self.columns, columns: self.rows, transposed: !self.transposed, ..self }
    }

    /// How far apart two rows are, and two columns.
    fn strides(&self) -> (usize, usize) {
        if self.transposed { (1, self.rows) } else { (self.columns, 1) }
    }
}

/// `out = a b`, or `out += a b` if it is to `add`; `out` is `[rows of a, columns of b]`. Each
/// element is summed by rising depth, so a row of `out` depends on its row of `a` and on `b` alone,
/// as long as `a` is not a transpose.
///
/// ```
/// use sidelane::rows::{Matrix, product};
/// let (a, b, mut out) = ([1.0, 2.0, 3.0, 4.0], [1.0, 0.0, 1.0, 1.0], [0.0; 4]);
/// product(&mut out, Matrix::new(&a, 2, 2), Matrix::new(&b, 2, 2).transposed(), false);
/// assert_eq!(out, [1.0, 3.0, 3.0, 7.0]);
/// ```
///
/// # Panics
/// If the shapes do not fit each other.
pub fn product(out: &mut [f32], a: Matrix<'_>, b: Matrix<'_>, add: bool) {
    let (rows, depth, columns) = (a.rows, a.columns, b.columns);
    assert_eq!((depth, rows * columns), (b.rows, out.len()), "shapes of a product");
    let least = (FEW / columns.max(1) + 1).max(2);
    if rows >= least || a.transposed {
        return slices(out, a, b, add);
    }
    let mut padded = vec![0.0; least * depth];
    padded[..a.values.len()].copy_from_slice(a.values);
    let mut of_padded = vec![0.0; least * columns];
    of_padded[..out.len()].copy_from_slice(out);
    slices(&mut of_padded, Matrix::new(&padded, least, depth), b, add);
    out.copy_from_slice(&of_padded[..out.len()]);
}

fn slices(out: &mut [f32], a: Matrix<'_>, b: Matrix<'_>, add: bool) {
    if !add {
        out.fill(0.0);
    }
    let (m, n, ([am, ak], [bk, bn])) = (a.rows, b.columns, (signed(a.strides()), signed(b.strides())));
    let product = gemm_f32::gemm::f32::get_gemm_fn();
    for first in (0..a.columns).step_by(DEPTH) {
        let depth = DEPTH.min(a.columns - first);
        let a = a.values.as_ptr().wrapping_add(first * a.strides().1);
        let b = b.values.as_ptr().wrapping_add(first * b.strides().0);
        // `gemm` computes columns: so it gets the transpose of the whole product. SAFETY: `product`
        // has checked the shapes, `Matrix::new` that the values are there: row, column and depth
        // below `n`, `m` and `depth` stay within `b`, `a` and `out` by these strides. `out` is
        // borrowed exclusively.
        unsafe {
            product(
                n,
                m,
                depth,
                out.as_mut_ptr(),
                n as isize,
                1,
                true,
                b,
                bk,
                bn,
                a,
                am,
                ak,
                1.0,
                1.0,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    }
}

fn signed((rows, columns): (usize, usize)) -> [isize; 2] {
    [rows as isize, columns as isize]
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    fn values(rng: &mut ChaCha8Rng, count: usize) -> Vec<f32> {
        (0..count).map(|_| rng.random::<f32>() * 2.0 - 1.0).collect()
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn a_row_has_the_same_bits_in_any_company() {
        let mut rng = ChaCha8Rng::seed_from_u64(9);
        let mut alone = 0;
        for case in 0..120 {
            let pick = |rng: &mut ChaCha8Rng, from: &[usize]| from[rng.next_u32() as usize % from.len()];
            let columns = pick(&mut rng, &[1, 2, 3, 8, 17, 40, 64, 65, 130, 300]);
            let depth = pick(&mut rng, &[1, 2, 3, 16, 40, 511, 512, 513, 514, 1030, 1500]);
            let rows = pick(&mut rng, &[1, 2, 5, 16, 33, 63, 64, 65, 66, 129, 200]);
            let (a, b) = (values(&mut rng, rows * depth), values(&mut rng, depth * columns));
            let transposed = case % 2 == 0;
            let b = if transposed {
                Matrix::new(&b, columns, depth).transposed()
            } else {
                Matrix::new(&b, depth, columns)
            };
            let start = values(&mut rng, rows * columns);
            let add = case % 3 == 0;
            let mut whole = start.clone();
            product(&mut whole, Matrix::new(&a, rows, depth), b, add);
            let mut parts = start;
            let mut first = 0;
            while first < rows {
                let count = match rng.next_u32() % 4 {
                    0 => 1,
                    1 => 2,
                    _ => 1 + rng.next_u32() as usize % 80,
                };
                let count = count.min(rows - first);
                alone += usize::from(count == 1);
                let a = Matrix::new(&a[first * depth..][..count * depth], count, depth);
                product(&mut parts[first * columns..][..count * columns], a, b, add);
                first += count;
            }
            assert_eq!(
                bits(&parts),
                bits(&whole),
                "[{rows}, {depth}] [{depth}, {columns}], {transposed}, {add}"
            );
        }
        assert!(alone > 50);
    }

    #[test]
    fn products_are_those_of_the_formula() {
        let mut rng = ChaCha8Rng::seed_from_u64(10);
        for (rows, depth, columns) in [(1, 4, 8), (3, 700, 5), (70, 33, 66), (4, 0, 4), (0, 4, 4), (5, 9, 1)]
        {
            let (a, b) = (values(&mut rng, rows * depth), values(&mut rng, depth * columns));
            let turned = |from: &[f32], rows: usize, columns: usize| -> Vec<f32> {
                (0..rows * columns).map(|at| from[at % rows * columns + at / rows]).collect()
            };
            let (a_turned, b_turned) = (turned(&a, rows, depth), turned(&b, depth, columns));
            let whole = [Matrix::new(&a, rows, depth), Matrix::new(&a_turned, depth, rows).transposed()];
            let right =
                [Matrix::new(&b, depth, columns), Matrix::new(&b_turned, columns, depth).transposed()];
            for (a_of, b_of) in whole.into_iter().flat_map(|a| right.map(|b| (a, b))) {
                let mut out = vec![f32::NAN; rows * columns];
                product(&mut out, a_of, b_of, false);
                for (at, &got) in out.iter().enumerate() {
                    let (row, column) = (at / columns, at % columns);
                    let term = |k| f64::from(a[row * depth + k]) * f64::from(b[k * columns + column]);
                    let sum: f64 = (0..depth).map(term).sum();
                    let size: f64 = (0..depth).map(|k| term(k).abs()).sum();
                    assert!((f64::from(got) - sum).abs() <= size * 2e-5, "{got} is not {sum}");
                }
            }
        }
    }
}
