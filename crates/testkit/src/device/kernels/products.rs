//! Products of cuBLAS, whose sums have an order of their own: within the bound of any order.
//!
//! A sum of `k` products of f32 in any order, each term and each sum rounded, differs from the
//! exact one by at most `n u / (1 - n u)` times the sum of absolute values, with `n = k` and
//! `u = 2^-24` (Higham, Accuracy and Stability of Numerical Algorithms, 3.1). What is added to a
//! result counts as one more term. A result that is rounded to bf16 loses `2^-8` of itself more.

use half::bf16;
use sidelane::Dtype;
use sidelane::device::{Bf16Product, Blas, GroupSegments, LayerKernels, MatmulArgs, MatmulShape};
use sidelane::error::DeviceError;

use crate::TestError;
use crate::device::gpu::{Bench, Guarded};
use crate::values::Random;

/// How products are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// In f32.
    F32,
    /// With factors rounded to TF32.
    Tf32,
    /// With factors of bf16 and a result of this type.
    Bf16(Dtype),
}

impl Way {
    /// Every way.
    pub const ALL: [Way; 4] = [Way::F32, Way::Tf32, Way::Bf16(Dtype::Bf16), Way::Bf16(Dtype::F32)];

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Way::F32 => "f32",
            Way::Tf32 => "TF32",
            Way::Bf16(Dtype::F32) => "bf16 to f32",
            Way::Bf16(_) => "bf16",
        }
    }

    /// Type of the factors.
    pub fn factors(self) -> Dtype {
        if matches!(self, Way::Bf16(_)) { Dtype::Bf16 } else { Dtype::F32 }
    }

    /// Type of the result.
    pub fn out(self) -> Dtype {
        if let Way::Bf16(out) = self { out } else { Dtype::F32 }
    }

    /// Enqueues a product whose operands have these types.
    pub fn multiply(
        self,
        blas: &Blas,
        kernels: &LayerKernels,
        matmul: MatmulArgs<'_>,
    ) -> Result<(), DeviceError> {
        match self {
            Way::F32 => blas.matmul(kernels, &matmul),
            Way::Tf32 => blas.matmul_tf32(kernels, &matmul),
            Way::Bf16(out) => blas.matmul_bf16(kernels, &Bf16Product { matmul, b_columns: None, out }),
        }
    }
}

/// How far a product may be off.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// Roundings of a term: two where hardware may cut off what it adds.
    pub roundings: u32,
    /// The part of itself that a factor loses.
    pub lost: f64,
}

/// Sums of a product that were compared.
#[derive(Clone, Copy, Debug, Default)]
pub struct Found {
    /// How many.
    pub sums: usize,
    /// The largest error, as a part of the sum of the absolute terms.
    pub off: f64,
}

/// Elements between the matrices of one group and those of the next.
const GAP: usize = 5;

/// A product of groups, and its operands.
#[derive(Clone, Debug)]
pub struct Case {
    /// Of all groups.
    pub shape: MatmulShape,
    /// Whether the product is added to what lies there.
    pub add: bool,
    /// Rows of each group.
    pub rows: Vec<i64>,
    /// The same with pads.
    pub padded: Vec<i64>,
    /// Factors, then what lies where the product goes.
    pub host: [Vec<f32>; 3],
}

/// Operands of a case on the device.
pub struct Operands {
    factors: [Guarded; 2],
    /// Place of the product.
    pub out: Guarded,
    table: Guarded,
}

/// One element of a result.
struct Element {
    at: usize,
    terms: usize,
    sum: f64,
    size: f64,
}

impl Case {
    /// A random one, of the values that `value` gives.
    pub fn any(random: &mut Random, value: impl Fn(&mut Random) -> f32) -> Case {
        let mut pick = |from: &[usize]| from[random.below(from.len() as u32) as usize];
        let (inner, columns) = (pick(&[1, 2, 3, 16, 40, 513]), pick(&[1, 2, 3, 8, 17, 65]));
        let (groups, add, transposed) = (pick(&[1, 2, 5]), pick(&[0, 1]) == 1, pick(&[0, 1]) == 1);
        let along_depth = pick(&[0, 1]) == 1;
        let rows: Vec<i64> = (0..groups).map(|_| pick(&[0, 1, 3, 64, 65, 130]) as i64).collect();
        let padded: Vec<i64> = rows.iter().map(|&rows| rows + i64::from(random.below(3))).collect();
        let (all, columns) = (padded.iter().sum::<i64>() as u32, columns as u32);
        let apart = (inner * columns as usize + GAP) as u64;
        let shape = match along_depth {
            true => MatmulShape::Depth { rows: inner as u32, depth: all, columns, apart },
            false => MatmulShape::Rows { rows: all, depth: inner as u32, columns, transposed, apart },
        };
        Case::of(random, value, shape, add, [rows, padded])
    }

    /// Rows of experts times their matrices, of numbers that bf16 holds. Some experts have fewer
    /// rows.
    pub fn of_experts(random: &mut Random, experts: u32, rows: u32, depth: u32, columns: u32) -> Case {
        let used = (0..experts).map(|_| i64::from(random.below(rows + 1))).collect();
        let apart = u64::from(depth) * u64::from(columns);
        let shape = MatmulShape::Rows { rows: experts * rows, depth, columns, transposed: false, apart };
        let value = |random: &mut Random| bf16::from_f32(random.unit()).to_f32();
        Case::of(random, value, shape, false, [used, vec![i64::from(rows); experts as usize]])
    }

    fn of(
        random: &mut Random,
        value: impl Fn(&mut Random) -> f32,
        shape: MatmulShape,
        add: bool,
        [rows, padded]: [Vec<i64>; 2],
    ) -> Case {
        let groups = rows.len();
        let lens = match shape {
            MatmulShape::Rows { rows, depth, columns, apart, .. } => {
                [rows as usize * depth as usize, groups * apart as usize, rows as usize * columns as usize]
            }
            MatmulShape::Depth { rows, depth, columns, apart } => {
                [depth as usize * rows as usize, depth as usize * columns as usize, groups * apart as usize]
            }
        };
        let host = lens.map(|len| (0..len).map(|_| value(random)).collect());
        Case { shape, add, rows, padded, host }
    }

    /// Puts its operands on the device, for one way.
    pub fn put(&self, bench: &Bench, way: Way) -> Result<Operands, DeviceError> {
        let put = |dtype: Dtype, values: &[f32]| match dtype {
            Dtype::Bf16 => bench.put(&values.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>()),
            _ => bench.put(values),
        };
        let [a, b, out] = &self.host;
        let factors = [put(way.factors(), a)?, put(way.factors(), b)?];
        let table = bench.put(&[&self.rows[..], &self.padded].concat())?;
        Ok(Operands { factors, out: put(way.out(), out)?, table })
    }

    /// Arguments of the product of these operands.
    pub fn args<'a>(&'a self, operands: &'a Operands) -> Result<MatmulArgs<'a>, DeviceError> {
        let Operands { factors: [a, b], out, table } = operands;
        let segments = GroupSegments { table: table.span()?, rows: &self.rows, padded: &self.padded };
        let (a, b, out) = (a.span()?, b.span()?, out.span()?);
        Ok(MatmulArgs { a, b, out, shape: self.shape, segments: Some(segments), add: self.add })
    }

    /// Each element of a result: where it lies, its terms, and its sum in f64.
    fn elements(&self) -> Vec<Element> {
        let [a, b, start] = &self.host;
        let mut all = Vec::new();
        let mut push = |at: usize, terms: &mut dyn Iterator<Item = (usize, usize)>| {
            let first = if self.add { f64::from(start[at]) } else { 0.0 };
            let mut element = Element { at, terms: 0, sum: first, size: first.abs() };
            for (left, right) in terms {
                let product = f64::from(a[left]) * f64::from(b[right]);
                element.terms += 1;
                element.sum += product;
                element.size += product.abs();
            }
            all.push(element);
        };
        let mut first = 0;
        for (group, (&rows, &padded)) in self.rows.iter().zip(&self.padded).enumerate() {
            let rows = rows as usize;
            match self.shape {
                MatmulShape::Rows { depth, columns, transposed, apart, .. } => {
                    let (depth, columns, b) = (depth as usize, columns as usize, group * apart as usize);
                    for row in first..first + rows {
                        for column in 0..columns {
                            let right =
                                |d| if transposed { column * depth + d } else { d * columns + column };
                            let mut terms = (0..depth).map(|d| (row * depth + d, b + right(d)));
                            push(row * columns + column, &mut terms);
                        }
                    }
                }
                MatmulShape::Depth { rows: down, columns, apart, .. } => {
                    let (down, columns) = (down as usize, columns as usize);
                    for row in 0..down {
                        for column in 0..columns {
                            let term = |d: usize| (d * down + row, d * columns + column);
                            let at = group * apart as usize + row * columns + column;
                            push(at, &mut (first..first + rows).map(term));
                        }
                    }
                }
            }
            first += padded as usize;
        }
        all
    }

    /// Multiplies, and compares each element with its sum. What is no element stays.
    pub fn check(
        &self,
        bench: &Bench,
        (blas, kernels): (&Blas, &LayerKernels),
        way: Way,
        Bound { roundings, lost }: Bound,
    ) -> Result<Found, TestError> {
        let operands = self.put(bench, way)?;
        way.multiply(blas, kernels, self.args(&operands)?)?;
        let seen: Vec<f32> = match way.out() {
            Dtype::Bf16 => bench.words::<bf16>(&operands.out)?.into_iter().map(bf16::to_f32).collect(),
            _ => bench.words(&operands.out)?,
        };
        let (mut found, mut expected) = (Found::default(), self.host[2].clone());
        for Element { at, terms, sum, size } in self.elements() {
            let n = f64::from(roundings) * (terms + 1) as f64 * f64::powi(2.0, -24);
            // Terms grow by rounded factors, too.
            let of_factors = 2.0 * lost + lost * lost;
            let sums = (n / (1.0 - n) * (1.0 + of_factors) + of_factors) * size;
            let rounded = if way.out() == Dtype::Bf16 { f64::powi(2.0, -8) } else { 0.0 };
            let most = sums + rounded * (sum.abs() + sums);
            let (value, shape) = (f64::from(seen[at]), self.shape);
            if (value - sum).abs() > most {
                return Err(TestError::Wrong(format!(
                    "element {at} of {shape:?}: {value:e}, not {sum:e} within {most:e}"
                )));
            }
            found.off = found.off.max((value - sum).abs() / size.max(f64::MIN_POSITIVE));
            found.sums += 1;
            expected[at] = seen[at];
        }
        match expected == seen {
            true => Ok(found),
            false => Err(TestError::Wrong("memory that is no element of the result has changed".into())),
        }
    }
}
