//! Products of a layer's experts by cuBLAS, in f32, in TF32 and with factors of bf16: right within
//! the bounds of their roundings, and how fast.
//!
//! All of them multiply the same numbers, which bf16 holds: no product loses anything by its
//! factors. What differs is the order of a sum, and how its result is rounded.

use std::sync::Arc;

use half::bf16;
use rand::RngExt;
use sidelane::Dtype;
use sidelane::device::{
    Bf16Product, Blas, DeviceRange, GroupSegments, LayerKernels, MatmulArgs, MatmulShape, Stream,
};
use sidelane::error::DeviceError;
use sidelane_testkit::device::whole;

use super::gpu::{self, Gpu, random, random_elements, write};
use crate::error::{CliError, wrong};

/// How products are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    F32,
    Tf32,
    /// With a result in bf16, and in f32.
    Bf16(Dtype),
}

pub const WAYS: [Way; 4] = [Way::F32, Way::Tf32, Way::Bf16(Dtype::Bf16), Way::Bf16(Dtype::F32)];

/// Experts, rows of each, and the sizes of their matrices.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub experts: u32,
    pub rows: u32,
    pub depth: u32,
    pub columns: u32,
}

/// Rows of experts and their matrices, in both types.
pub struct ExpertProducts<'a> {
    gpu: &'a Gpu,
    sizes: Sizes,
    blas: Blas,
    kernels: LayerKernels,
    stream: Arc<Stream>,
    /// Rows, then matrices: f32, then bf16.
    factors: [[DeviceRange; 2]; 2],
    out: DeviceRange,
    /// The result of a gradient of matrices.
    of_matrices: DeviceRange,
    segments: Vec<i64>,
    table: DeviceRange,
}

impl Way {
    pub fn name(self) -> &'static str {
        match self {
            Way::F32 => "f32",
            Way::Tf32 => "TF32",
            Way::Bf16(Dtype::F32) => "bf16 to f32",
            Way::Bf16(_) => "bf16",
        }
    }

    fn out(self) -> Dtype {
        match self {
            Way::F32 | Way::Tf32 => Dtype::F32,
            Way::Bf16(out) => out,
        }
    }
}

impl Sizes {
    fn all_rows(self) -> u32 {
        self.experts * self.rows
    }

    /// Floating-point operations of a product of all rows.
    pub fn operations(self) -> f64 {
        2.0 * f64::from(self.all_rows()) * f64::from(self.depth) * f64::from(self.columns)
    }

    pub fn describe(self) -> String {
        let Sizes { experts, rows, depth, columns } = self;
        format!("{experts} x [{rows}, {depth}] [{depth}, {columns}]")
    }
}

impl<'a> ExpertProducts<'a> {
    /// None where there is no cuBLAS.
    pub fn new(gpu: &'a Gpu, sizes: Sizes) -> Result<Option<Self>, CliError> {
        let stream = Arc::new(gpu.stream()?);
        let Ok(blas) = Blas::load(&stream, &gpu::packages(gpu.context.driver())) else { return Ok(None) };
        let of_rows = u64::from(sizes.all_rows()) * u64::from(sizes.depth);
        let of_matrices = u64::from(sizes.experts) * u64::from(sizes.depth) * u64::from(sizes.columns);
        let both = |seed, count: u64| -> Result<[DeviceRange; 2], CliError> {
            let both = [gpu.memory(count * 4)?, gpu.memory(count * 2)?];
            // The same numbers again and again: more take long to draw, and change no rate.
            let narrow = random_elements(seed, count.min(1 << 22));
            let wide: Vec<u8> = narrow.chunks_exact(2).flat_map(|half| [0, 0, half[0], half[1]]).collect();
            for (range, bytes) in both.iter().zip([&wide, &narrow]) {
                for at in (0..range.len()).step_by(bytes.len()) {
                    let len = (range.len() - at).min(bytes.len() as u64);
                    write(&stream, &range.part(at, len)?, &bytes[..len as usize])?;
                }
            }
            Ok(both)
        };
        let ([rows, half_rows], [matrices, half_matrices]) = (both(31, of_rows)?, both(32, of_matrices)?);
        // Some experts have fewer rows, where the sizes are small.
        let mut random = random(33);
        let segment = |_| match sizes.rows < 512 {
            true => random.random_range(0..=i64::from(sizes.rows)),
            false => i64::from(sizes.rows),
        };
        let segments: Vec<i64> = (0..sizes.experts).map(segment).collect();
        let padded = vec![i64::from(sizes.rows); sizes.experts as usize];
        Ok(Some(ExpertProducts {
            kernels: LayerKernels::load(&gpu.context)?,
            factors: [[rows, matrices], [half_rows, half_matrices]],
            out: gpu.memory(u64::from(sizes.all_rows()) * u64::from(sizes.columns) * 4)?,
            of_matrices: gpu.memory(of_matrices * 4)?,
            table: gpu.put(&stream, &[segments.as_slice(), &padded].concat())?,
            segments: [segments, padded].concat(),
            gpu,
            sizes,
            blas,
            stream,
        }))
    }

    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    pub fn name(&self) -> &str {
        self.blas.name()
    }

    fn segments(&self) -> Result<GroupSegments<'_>, DeviceError> {
        let (rows, padded) = self.segments.split_at(self.sizes.experts as usize);
        Ok(GroupSegments { table: whole(&self.table)?, rows, padded })
    }

    /// Rows of each expert times its matrix.
    pub fn rows(&self, way: Way) -> Result<(), DeviceError> {
        let Sizes { depth, columns, .. } = self.sizes;
        let apart = u64::from(depth) * u64::from(columns);
        let (rows, transposed) = (self.sizes.all_rows(), false);
        let shape = MatmulShape::Rows { rows, depth, columns, transposed, apart };
        let [a, b] = self.factors_of(way);
        self.multiply(way, [a, b, &self.out], shape)
    }

    /// The gradient of the matrices: rows of each expert with themselves, as many columns of them.
    pub fn gradient(&self, way: Way) -> Result<(), DeviceError> {
        let Sizes { depth, columns, .. } = self.sizes;
        let apart = u64::from(depth) * u64::from(columns);
        let shape = MatmulShape::Depth { rows: depth, depth: self.sizes.all_rows(), columns, apart };
        let [a, _] = self.factors_of(way);
        self.multiply(way, [a, a, &self.of_matrices], shape)
    }

    fn factors_of(&self, way: Way) -> [&DeviceRange; 2] {
        let [wide, narrow] = &self.factors;
        if matches!(way, Way::Bf16(_)) { narrow.each_ref() } else { wide.each_ref() }
    }

    fn multiply(
        &self,
        way: Way,
        [a, b, out]: [&DeviceRange; 3],
        shape: MatmulShape,
    ) -> Result<(), DeviceError> {
        let (a, b, out, segments) = (whole(a)?, whole(b)?, whole(out)?, Some(self.segments()?));
        let matmul = MatmulArgs { a, b, out, shape, segments, add: false };
        match way {
            Way::F32 => self.blas.matmul(&self.kernels, &matmul),
            Way::Tf32 => self.blas.matmul_tf32(&self.kernels, &matmul),
            Way::Bf16(out) => {
                let product = Bf16Product { matmul, b_columns: None, out };
                self.blas.matmul_bf16(&self.kernels, &product)
            }
        }
    }

    /// The largest error of a product of rows, as a part of the sum of its terms' sizes, if all are
    /// within their bounds: with `u = 2^-24`, that of `2 k` roundings for a sum of `k` terms, since
    /// tensor cores may cut off what they add, and `2^-8` of a result that is rounded to bf16.
    pub fn check(&self, way: Way) -> Result<String, CliError> {
        self.rows(way)?;
        let [a, b] = self.factors[0].each_ref().map(|range| self.gpu.read(&self.stream, range));
        let (a, b, seen) = (words(&a?), words(&b?), self.gpu.read(&self.stream, &self.out)?);
        let seen = match way.out() {
            Dtype::F32 => words(&seen),
            _ => seen.chunks_exact(2).map(|half| bf16::from_ne_bytes([half[0], half[1]]).to_f32()).collect(),
        };
        let Sizes { experts, rows, depth, columns } = self.sizes;
        let [experts, rows, depth, columns] = [experts, rows, depth, columns].map(|size| size as usize);
        let n = 2.0 * depth as f64 * f64::powi(2.0, -24);
        let rounded = if way.out() == Dtype::F32 { 0.0 } else { f64::powi(2.0, -8) };
        let (mut largest, mut count) = (0.0_f64, 0);
        for expert in 0..experts {
            for row in expert * rows..expert * rows + self.segments[expert] as usize {
                for column in 0..columns {
                    let term = |d: usize| {
                        let right = b[(expert * depth + d) * columns + column];
                        f64::from(a[row * depth + d]) * f64::from(right)
                    };
                    let terms = (0..depth).map(term);
                    let (sum, size) =
                        terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                    let sums = n / (1.0 - n) * size;
                    let bound = sums + rounded * (f64::abs(sum) + sums);
                    let apart = (f64::from(seen[row * columns + column]) - sum).abs();
                    if apart > bound {
                        return Err(wrong!(
                            "row {row}, column {column}: {apart:e} from {sum}, not {bound:e}"
                        ));
                    }
                    largest = largest.max(apart / size.max(f64::MIN_POSITIVE));
                    count += 1;
                }
            }
        }
        let (told, by) = (self.sizes.describe(), self.name());
        Ok(format!("{count} sums of {depth}, off by {largest:.1e} of their terms at most; {told}, by {by}"))
    }
}

fn words(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|word| f32::from_ne_bytes([word[0], word[1], word[2], word[3]])).collect()
}
