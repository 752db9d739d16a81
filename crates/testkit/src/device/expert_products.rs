//! Products of a layer's experts by cuBLAS, in f32, in TF32 and with factors of bf16, to be timed.
//! All of them multiply the same numbers, which bf16 holds.

use std::path::PathBuf;
use std::sync::Arc;

use sidelane::Dtype;
use sidelane::device::{Blas, DeviceRange, GroupSegments, LayerKernels, MatmulArgs, MatmulShape, Stream};
use sidelane::error::DeviceError;

use super::gpu::{Gpu, write};
use super::kernel_work::elements;
use super::kernels::products::Way;
use super::whole;
use crate::TestError;
use crate::values::Random;

/// Experts, rows of each, and the sizes of their matrices.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Number of experts.
    pub experts: u32,
    /// Rows of each.
    pub rows: u32,
    /// Elements of a row, and rows of a matrix.
    pub depth: u32,
    /// Columns of a matrix.
    pub columns: u32,
}

/// Rows of experts and their matrices, in both types.
pub struct ExpertProducts {
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

impl Sizes {
    fn all_rows(self) -> u32 {
        self.experts * self.rows
    }

    /// Floating-point operations of a product of all rows.
    pub fn operations(self) -> f64 {
        2.0 * f64::from(self.all_rows()) * f64::from(self.depth) * f64::from(self.columns)
    }

    /// Shapes of the factors.
    pub fn describe(self) -> String {
        let Sizes { experts, rows, depth, columns } = self;
        format!("{experts} x [{rows}, {depth}] [{depth}, {columns}]")
    }
}

impl ExpertProducts {
    /// None where there is no cuBLAS, in these folders neither.
    ///
    /// # Errors
    /// Refusals of the device.
    pub fn new(gpu: &Gpu, sizes: Sizes, folders: &[PathBuf]) -> Result<Option<Self>, TestError> {
        let stream = Arc::new(gpu.stream()?);
        let Ok(blas) = Blas::load(&stream, folders) else { return Ok(None) };
        let of_rows = u64::from(sizes.all_rows()) * u64::from(sizes.depth);
        let of_matrices = u64::from(sizes.experts) * u64::from(sizes.depth) * u64::from(sizes.columns);
        let both = |seed, count: u64| -> Result<[DeviceRange; 2], TestError> {
            let both = [gpu.memory(count * 4)?, gpu.memory(count * 2)?];
            // The same numbers again and again: more take long to draw, and change no rate.
            let narrow = elements(&mut Random(seed), count.min(1 << 22));
            let wide: Vec<f32> = narrow.iter().map(|x| x.to_f32()).collect();
            let [wide, narrow]: [&[u8]; 2] = [bytemuck::cast_slice(&wide), bytemuck::cast_slice(&narrow)];
            for (range, bytes) in both.iter().zip([wide, narrow]) {
                for at in (0..range.len()).step_by(bytes.len()) {
                    let len = (range.len() - at).min(bytes.len() as u64);
                    write(&stream, &range.part(at, len)?, &bytes[..len as usize])?;
                }
            }
            Ok(both)
        };
        let ([rows, half_rows], [matrices, half_matrices]) = (both(31, of_rows)?, both(32, of_matrices)?);
        Ok(Some(ExpertProducts {
            kernels: LayerKernels::load(&gpu.context)?,
            factors: [[rows, matrices], [half_rows, half_matrices]],
            out: gpu.memory(u64::from(sizes.all_rows()) * u64::from(sizes.columns) * 4)?,
            of_matrices: gpu.memory(of_matrices * 4)?,
            table: gpu.put(&stream, &vec![i64::from(sizes.rows); 2 * sizes.experts as usize])?,
            segments: vec![i64::from(sizes.rows); sizes.experts as usize],
            sizes,
            blas,
            stream,
        }))
    }

    /// The stream of the products.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Name of cuBLAS.
    pub fn name(&self) -> &str {
        self.blas.name()
    }

    fn segments(&self) -> Result<GroupSegments<'_>, DeviceError> {
        let rows = &self.segments;
        Ok(GroupSegments { table: whole(&self.table)?, rows, padded: rows })
    }

    /// Rows of each expert times its matrix.
    ///
    /// # Errors
    /// Refusals of the device.
    pub fn rows(&self, way: Way) -> Result<(), DeviceError> {
        let Sizes { depth, columns, .. } = self.sizes;
        let apart = u64::from(depth) * u64::from(columns);
        let (rows, transposed) = (self.sizes.all_rows(), false);
        let shape = MatmulShape::Rows { rows, depth, columns, transposed, apart };
        let [a, b] = self.factors_of(way);
        self.multiply(way, [a, b, &self.out], shape)
    }

    /// The gradient of the matrices: rows of each expert with themselves, as many columns of them.
    ///
    /// # Errors
    /// Refusals of the device.
    pub fn gradient(&self, way: Way) -> Result<(), DeviceError> {
        let Sizes { depth, columns, .. } = self.sizes;
        let apart = u64::from(depth) * u64::from(columns);
        let shape = MatmulShape::Depth { rows: depth, depth: self.sizes.all_rows(), columns, apart };
        let [a, _] = self.factors_of(way);
        self.multiply(way, [a, a, &self.of_matrices], shape)
    }

    fn factors_of(&self, way: Way) -> [&DeviceRange; 2] {
        let [wide, narrow] = &self.factors;
        if way.factors() == Dtype::Bf16 { narrow.each_ref() } else { wide.each_ref() }
    }

    fn multiply(
        &self,
        way: Way,
        [a, b, out]: [&DeviceRange; 3],
        shape: MatmulShape,
    ) -> Result<(), DeviceError> {
        let (a, b, out, segments) = (whole(a)?, whole(b)?, whole(out)?, Some(self.segments()?));
        let matmul = MatmulArgs { a, b, out, shape, segments, add: false };
        way.multiply(&self.blas, &self.kernels, matmul)
    }
}
