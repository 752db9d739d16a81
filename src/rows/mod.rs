//! The vector loops: copying, gathering and summing rows, and their way to fp8 and back.
//!
//! On a machine without a GPU these loops *are* the lane: a dispatch is a [`RowKernels::gather`]
//! into the windows of other processes, a combine a [`RowKernels::grouped_sum`] over rows that lie
//! there. Both must run at the speed of memory, so each loop is written once, generic over sixteen
//! lanes, and compiled for each instruction set.
//!
//! ```text
//!   Simd::from_env()?  ->  Rows::new(simd)  ->  gather, sums ...     one branch per call,
//!   (detected once)        (a Copy value)             |              none per row
//!                                        portable   avx2   avx512
//! ```
//!
//! **Bits.** Every set gives the same bits. Sums are taken in `f32`, in the order of the rows, from
//! +0; a product is rounded before it is added; nothing is fused and denormals are kept; one
//! rounding to nearest even when the result is stored, and one of each partial sum where these
//! travel in bf16; any NaN is stored as the one quiet NaN (`0x7fc00000`, `0x7fc0`, `0x7e00`). This
//! requires the thread's floating-point mode that Rust assumes: round to nearest, no flushing.
//!
//! **Pointers.** All loops take raw pointers, because the memory is shared with other processes: a
//! reference would promise the compiler exclusivity that no process can guarantee. The schedule's
//! signals and write grants order the accesses; a streaming store is covered by a signal only after
//! [`RowKernels::fence`].

#![allow(
    unsafe_code,
    reason = "vector intrinsics and raw pointers into shared memory are the purpose of this module"
)]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod fp8;
mod portable;
mod product;
mod sum;
mod transfer;
mod vector;

pub use product::{Matrix, product};
pub use sum::{GroupedSum, SumOutput};
pub use vector::{Arithmetic, SIMD_VARIABLE, Simd};
use vector::{Kernel, Set};

use crate::dtype::{Fp8RowShape, rows_of};
use crate::error::PlanError;

/// How results are written. Neither is always right:
///
/// ```text
///   targets of all ranks of the node     < last-level cache        about equal     > 1.5 x
///   time until written                   cached, 1 to 1.4 x        streaming       streaming, 1.4 x faster
///   time until written and read          cached, 2 x faster        cached          streaming
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stores {
    /// Ordinary stores: the target lands in the cache, where its reader finds it.
    Cached,
    /// Non-temporal stores: the target goes to memory without being read first. Needs
    /// [`RowKernels::fence`] before a signal. The portable set stores ordinarily; the sums do so
    /// too where `out` is not aligned to 64 bytes.
    Streaming,
}

impl Stores {
    /// For `bytes` that the ranks of a node write together. Streaming once they are a good part of
    /// the cache: each line is then written without being read first. Fewer bytes stay in the
    /// cache, where they are read next.
    pub fn of(bytes: u64, cache: u64) -> Self {
        if bytes > cache / 4 { Stores::Streaming } else { Stores::Cached }
    }
}

/// From so many bytes on a copy is worth the call of a vector loop.
const SHORT: usize = 4 * vector::LINE;

/// The loops of one instruction set. A small value: keep a copy wherever rows are moved.
///
/// # Contract
///
/// The same for every method that takes pointers, besides what its own `Safety` section says:
///
/// * Sources are readable and initialized, targets are writable, for the whole call. A length of
///   zero accesses no memory, and allows any pointer.
/// * No one writes the sources meanwhile, and no one reads or writes the targets. Sources and
///   targets of one call do not overlap; sources may overlap each other.
/// * No pointer needs an alignment.
///
/// A loop cannot check pointers, in any build. Where lengths contradict each other, a method
/// asserts in debug builds only, and documents it: in release builds this is unchecked undefined
/// behavior. The methods that take slices are safe and check their lengths in every build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowKernels {
    simd: Simd,
}

impl RowKernels {
    /// The loops of this set.
    pub const fn new(simd: Simd) -> RowKernels {
        RowKernels { simd }
    }

    /// The set in use.
    pub const fn simd(&self) -> Simd {
        self.simd
    }

    /// Copies `len` bytes, as one run.
    ///
    /// # Safety
    ///
    /// The [contract](RowKernels#contract), for `len` bytes at `src` and at `dst`. Nothing is
    /// asserted.
    #[inline]
    pub unsafe fn copy(&self, dst: *mut u8, src: *const u8, len: usize, stores: Stores) {
        // SAFETY: the caller answers for the pointers.
        unsafe {
            match len {
                0..SHORT => dst.copy_from_nonoverlapping(src, len),
                _ => self.run(transfer::Span { dst, src, len, stores }),
            }
        }
    }

    /// Gathers rows: target row `i`, at `dst + i * row_bytes`, becomes source row `rows[i]`, at
    /// `src + rows[i] * row_bytes`. A source row may be named any number of times.
    ///
    /// Pass a whole run at once: while a row is copied, the next one is fetched. The pad rows
    /// behind a run are written with [`RowKernels::zero`].
    ///
    /// # Safety
    ///
    /// The [contract](RowKernels#contract), for `row_bytes` bytes at each source row named and
    /// `rows.len() * row_bytes` bytes at `dst`. Nothing is asserted: the number of rows of `src` is
    /// not known here.
    pub unsafe fn gather(
        &self,
        dst: *mut u8,
        src: *const u8,
        row_bytes: usize,
        rows: &[u32],
        stores: Stores,
    ) {
        // SAFETY: the caller answers for the pointers.
        unsafe { self.run(transfer::Gather { dst, src, row_bytes, rows, stores }) }
    }

    /// Writes `len` zero bytes.
    ///
    /// # Safety
    ///
    /// The [contract](RowKernels#contract), for `len` bytes at `dst`. Nothing is asserted.
    pub unsafe fn zero(&self, dst: *mut u8, len: usize, stores: Stores) {
        // SAFETY: the caller answers for the pointer.
        unsafe { self.run(transfer::Zero { dst, len, stores }) }
    }

    /// The sum of rows, by groups. For each column `c`
    ///
    /// ```text
    ///   group    = wire(+0 + weights[i] * rows[i][c] + ...)     f32, in order; a product is rounded, then added
    ///   out[c]   = round(+0 + group + group + ...)              f32, in order; one rounding, at the end
    /// ```
    ///
    /// Without weights the elements themselves are added. `wire` rounds to the [wire's
    /// type](GroupedSum::wire): not at all for `f32`. A group that was summed elsewhere takes part
    /// as one row of [`PARTIAL`](crate::dtype::PARTIAL) sums; the place of its summation does not
    /// change a bit of the result.
    ///
    /// One group of all rows is the plain sum; a group for each rank or node is combine with
    /// `order = rank` or `node`. No rows, no groups and empty groups give +0. Rows beyond the
    /// groups are not summed but prefetched, as rows of `dtype`: name those of the next sum there.
    ///
    /// # Safety
    ///
    /// The [contract](RowKernels#contract), for `columns` elements at each row and at `out`, of the
    /// types that [`GroupedSum`] names. The groups add up to at most `rows.len()` and
    /// `weights.len()`, and the wire carries `dtype`: debug builds assert all three.
    pub unsafe fn grouped_sum(&self, sum: GroupedSum<'_>) {
        debug_assert!(sum.wire.carries(sum.dtype.into()));
        debug_assert!(rows_of(sum.groups) <= sum.rows.len());
        debug_assert!(sum.weights.is_none_or(|weights| rows_of(sum.groups) <= weights.len()));
        // SAFETY: the caller answers for pointers, weights and groups.
        unsafe { self.run(sum) }
    }

    /// `<a, b>` over `columns` columns, in `f32` and in a fixed order: lane `j` of 16 adds the
    /// rounded products of columns `j`, `j + 16`, ... from +0; then lanes are folded by halves (8,
    /// 4, 2, 1). NaN is canonical. No columns give +0.
    ///
    /// # Safety
    ///
    /// The [contract](RowKernels#contract), for `columns` elements of `dtype` at `a` and at `b`,
    /// which may be the same. Nothing is asserted.
    pub unsafe fn dot(&self, dtype: Arithmetic, a: *const u8, b: *const u8, columns: usize) -> f32 {
        // SAFETY: the caller answers for the pointers.
        unsafe { self.run(sum::Dot { dtype, a, b, columns }) }
    }

    /// `row[c] = round(weight * row[c])` in place: the `f32` product, one rounding, canonical NaN.
    ///
    /// # Safety
    ///
    /// The [contract](RowKernels#contract), for `columns` elements of `dtype` at `row`, which is
    /// source and target at once. Nothing is asserted.
    pub unsafe fn scale(&self, dtype: Arithmetic, row: *mut u8, weight: f32, columns: usize) {
        // SAFETY: the caller answers for the pointer.
        unsafe { self.run(sum::Scale { dtype, row, weight, columns }) }
    }

    /// [`RowKernels::dot`] of two rows in this process's own memory. Safe in every build: of rows
    /// of different lengths, the columns that both have count; bytes that are no whole element are
    /// ignored.
    pub fn dot_rows(&self, dtype: Arithmetic, a: &[u8], b: &[u8]) -> f32 {
        let columns = a.len().min(b.len()) / dtype.size();
        // SAFETY: both slices hold `columns` elements.
        unsafe { self.dot(dtype, a.as_ptr(), b.as_ptr(), columns) }
    }

    /// [`RowKernels::scale`] of a row in this process's own memory. Safe in every build: bytes that
    /// are no whole element stay as they are.
    pub fn scale_row(&self, dtype: Arithmetic, row: &mut [u8], weight: f32) {
        // SAFETY: the slice holds that many elements and is borrowed exclusively.
        unsafe { self.scale(dtype, row.as_mut_ptr(), weight, row.len() / dtype.size()) }
    }

    /// Rows of `dtype` to fp8 records: e4m3 with an `f32` scale for each block of 128 values, laid
    /// out as `shape` says.
    ///
    /// ```text
    ///   scale  =  max(amax / 448, 2^-126)       amax: the largest |x| of the block that is finite
    ///   code   =  e4m3(x * (1 / scale))         f32, f32, then the nearest code, ties to even
    /// ```
    ///
    /// NaN and infinities become NaN (`0x7f`). Bytes of a record that hold neither code nor scale
    /// become zero.
    ///
    /// # Errors
    ///
    /// [`PlanError::WrongShape`] if `rows` is not `[n, hidden]` or `records` not
    /// `[n, shape.bytes()]`: then nothing is written.
    pub fn quantize(
        &self,
        dtype: Arithmetic,
        shape: Fp8RowShape,
        rows: &[u8],
        records: &mut [u8],
    ) -> Result<(), PlanError> {
        check_records(dtype, shape, rows.len(), records.len())?;
        // SAFETY: the kernel reads and writes within the slices.
        unsafe { self.run(fp8::Quantize { dtype, shape, rows, records }) };
        Ok(())
    }

    /// Fp8 records back to rows of `dtype`: the `f32` product of code and scale, one rounding,
    /// canonical NaN.
    ///
    /// # Errors
    ///
    /// As [`RowKernels::quantize`].
    pub fn dequantize(
        &self,
        dtype: Arithmetic,
        shape: Fp8RowShape,
        records: &[u8],
        rows: &mut [u8],
    ) -> Result<(), PlanError> {
        check_records(dtype, shape, rows.len(), records.len())?;
        // SAFETY: the kernel reads and writes within the slices.
        unsafe { self.run(fp8::Dequantize { dtype, shape, records, rows }) };
        Ok(())
    }

    /// Orders streaming stores of this thread before its next stores, above all a signal. Needed
    /// once after any number of calls with [`Stores::Streaming`], and by the thread that made them.
    pub fn fence() {
        // Streaming stores are weakly ordered even on x86-64: a later ordinary store may pass them,
        // and a release store is such a one there.
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every x86-64 CPU has SSE.
        unsafe {
            std::arch::x86_64::_mm_sfence()
        }
        // The portable set has no streaming stores; the signal's own release would do.
        #[cfg(not(target_arch = "x86_64"))]
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// Runs a kernel on the set in use.
    ///
    /// # Safety
    ///
    /// The kernel's demands hold.
    #[inline(always)]
    unsafe fn run<K: Kernel>(&self, kernel: K) -> K::Output {
        // SAFETY: a `Simd` exists only for sets the CPU has; the caller answers for the kernel.
        unsafe {
            match self.simd.0 {
                Set::Portable => portable::enter(kernel),
                #[cfg(target_arch = "x86_64")]
                Set::Avx2 => avx2::enter(kernel),
                #[cfg(target_arch = "x86_64")]
                Set::Avx512 => avx512::enter(kernel),
            }
        }
    }
}

/// Whether bytes of rows and of records are those of as many of each.
fn check_records(
    dtype: Arithmetic,
    shape: Fp8RowShape,
    rows: usize,
    records: usize,
) -> Result<(), PlanError> {
    let (columns, size) = (shape.hidden(), dtype.size());
    let count = rows / (columns * size).max(1);
    if count * columns * size != rows {
        return Err(PlanError::WrongShape { what: "rows", seen: rows / size, rows: count, columns });
    }
    if count * shape.bytes() != records {
        let columns = shape.bytes();
        return Err(PlanError::WrongShape { what: "records", seen: records, rows: count, columns });
    }
    Ok(())
}
