//! Kernels that a GPU is audited with.

use half::bf16;
use sidelane::device::{AuditKernels, Product};
use sidelane::error::DeviceError;

use crate::TestError;
use crate::device::gpu::{Bench, same};
use crate::values::Random;

/// A copy by a kernel of so many bytes, a multiple of 16, with at most so many blocks.
pub fn copy(bench: &Bench, audit: &AuditKernels, bytes: u64, most: Option<u32>) -> Result<(), TestError> {
    let bytes = Random(bytes).bytes(bytes);
    let (from, to) = (bench.put(&bytes)?, bench.room(bytes.len() as u64)?);
    audit.copy(&bench.stream, to.span()?, from.span()?, most)?;
    same("a copy", &bench.read(&to)?, &bytes)
}

/// A product of so many rows and columns: of whole numbers from -8 to 8, whose sums `f32` holds
/// exactly, and some of them bf16 not.
pub fn product(
    bench: &Bench,
    size: u32,
    enqueue: impl FnOnce(&Product<'_>) -> Result<(), DeviceError>,
) -> Result<(), TestError> {
    let (mut random, n) = (Random(size.into()), size as usize);
    let mut matrix = || (0..n * n).map(|_| random.below(17) as f32 - 8.0).collect::<Vec<f32>>();
    let (a, b) = (matrix(), matrix());
    let halves = |matrix: &[f32]| matrix.iter().map(|&value| bf16::from_f32(value)).collect::<Vec<bf16>>();
    let (a_there, b_there) = (bench.put(&halves(&a))?, bench.put(&halves(&b))?);
    let out = bench.room(Product::bytes(size))?;
    enqueue(&Product { size, a: a_there.span()?, b: b_there.span()?, out: out.span()? })?;
    let mut expected = Vec::with_capacity(n * n);
    for row in a.chunks_exact(n) {
        for column in b.chunks_exact(n) {
            expected.push(row.iter().zip(column).map(|(a, b)| a * b).sum::<f32>());
        }
    }
    same("a product", &bench.read(&out)?, &halves(&expected))
}
