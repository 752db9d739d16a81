//! The vector loops: copying, gathering and summing rows.
//!
//! On a machine without a GPU these loops *are* the lane: a dispatch is a [`Rows::gather`] into the windows of
//! other processes, a combine a [`Rows::sum`] over rows that lie there. Both run at the speed of memory or not
//! at all, so each loop is written once, generic over sixteen lanes, and compiled for each instruction set.
//!
//! ```text
//!   Simd::from_env()?  ->  Rows::new(simd)  ->  gather / sum / ...   one branch per call,
//!   (detected once)        (a Copy value)             |              none per row
//!                                        portable   avx2   avx512
//! ```
//!
//! **Bits.** Every set gives the same bits. Sums are taken in `f32`, in the order of the rows, from +0; a product
//! is rounded before it is added; nothing is fused and denormals are kept; one rounding to nearest even when
//! the result is stored; any NaN is stored as the one quiet NaN (`0x7fc00000`, `0x7fc0`, `0x7e00`). This takes
//! the thread's floating-point mode to be the one Rust assumes: round to nearest, no flushing.
//!
//! **Pointers.** Everything takes raw pointers, because the memory is shared with other processes: a reference
//! to it would promise the compiler what nobody can keep. Who may touch which bytes when is the business of
//! the schedule's signals and licences; a streaming store is covered by a signal only after [`Rows::fence`].
//
// Vector intrinsics and raw pointers into shared memory are what this room is for.
#![allow(unsafe_code)]

mod format;
mod gradient;
mod portable;
mod simd;
mod sum;
mod transfer;
mod vector;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

pub use format::Arithmetic;
pub use simd::{SIMD_VARIABLE, Simd};

use simd::Set;
use vector::Kernel;

/// In a list of source rows: no source row, the target row is zeros (a pad row).
pub const ZERO_ROW: u32 = u32::MAX;

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
    /// Non-temporal stores: the target goes to memory without being read first. Needs [`Rows::fence`] before a
    /// signal. The portable set stores ordinarily; the sums do so too where `out` is not aligned to 64 bytes.
    Streaming,
}

/// The loops of one instruction set. A small value: keep a copy wherever rows are moved.
///
/// Row pointers, `dst`, `src` and `out` need no alignment unless a method says so. Sources and targets of one
/// call must not overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    simd: Simd,
}

impl Rows {
    /// The loops of this set.
    pub const fn new(simd: Simd) -> Rows {
        Rows { simd }
    }

    /// The set in use.
    pub const fn simd(&self) -> Simd {
        self.simd
    }

    /// Copies `len` bytes, as one run.
    ///
    /// # Safety
    ///
    /// `len` bytes are readable at `src` and writable at `dst`; nobody else writes either meanwhile.
    pub unsafe fn copy(&self, dst: *mut u8, src: *const u8, len: usize, stores: Stores) {
        // SAFETY: the caller answers for the pointers.
        unsafe { self.run(transfer::Span { dst, src, len, stores }) }
    }

    /// Gathers rows: target row `i`, at `dst + i * row_bytes`, becomes source row `rows[i]`, at
    /// `src + rows[i] * row_bytes`, or zeros for [`ZERO_ROW`].
    ///
    /// Pass a whole run at once: while a row is copied, the next one is fetched.
    ///
    /// # Safety
    ///
    /// `rows.len() * row_bytes` bytes are writable at `dst`, `row_bytes` readable at each source row named;
    /// nobody else writes them meanwhile.
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
    /// `len` bytes are writable at `dst`; nobody else uses them meanwhile.
    pub unsafe fn zero(&self, dst: *mut u8, len: usize, stores: Stores) {
        // SAFETY: the caller answers for the pointer.
        unsafe { self.run(transfer::Zero { dst, len, stores }) }
    }

    /// `out[c] = round(+0 + rows[0][c] + rows[1][c] + ...)` for `columns` columns; +0 where there are no rows.
    ///
    /// # Safety
    ///
    /// `columns` elements of `dtype` are readable at each of `rows` and writable at `out`; nobody else writes
    /// them meanwhile.
    pub unsafe fn sum(
        &self,
        dtype: Arithmetic,
        out: *mut u8,
        rows: &[*const u8],
        columns: usize,
        stores: Stores,
    ) {
        // SAFETY: the caller answers for the pointers; one group covers all rows.
        unsafe { self.grouped_sum(dtype, out, rows, None, &[rows.len() as u32], columns, stores) }
    }

    /// `out[c] = round(+0 + weights[0] * rows[0][c] + ...)`, each product rounded to `f32` first.
    ///
    /// # Safety
    ///
    /// As [`sum`](Rows::sum); there are at least as many weights as rows.
    pub unsafe fn weighted_sum(
        &self,
        dtype: Arithmetic,
        out: *mut u8,
        rows: &[*const u8],
        weights: &[f32],
        columns: usize,
        stores: Stores,
    ) {
        // SAFETY: the caller answers for pointers and weights; one group covers all rows.
        unsafe { self.grouped_sum(dtype, out, rows, Some(weights), &[rows.len() as u32], columns, stores) }
    }

    /// Partial sums by group, then their sum: `groups` are the lengths of consecutive groups of `rows`. Each
    /// group is summed in `f32` from +0, as the other sums do; then the partial sums are added in order from
    /// +0. One rounding, at the end. Combine with `order = rank` is this, a group being the rows of a rank.
    ///
    /// # Safety
    ///
    /// As [`sum`](Rows::sum); the groups add up to at most `rows.len()`, and there are at least as many
    /// weights as rows.
    #[allow(
        clippy::too_many_arguments,
        reason = "the general form of the sums: each argument is one operand"
    )]
    pub unsafe fn grouped_sum(
        &self,
        dtype: Arithmetic,
        out: *mut u8,
        rows: &[*const u8],
        weights: Option<&[f32]>,
        groups: &[u32],
        columns: usize,
        stores: Stores,
    ) {
        debug_assert!(groups.iter().map(|&rows| rows as usize).sum::<usize>() <= rows.len());
        debug_assert!(weights.is_none_or(|weights| weights.len() >= rows.len()));
        // SAFETY: the caller answers for pointers, weights and groups.
        unsafe { self.run(sum::Sum { dtype, out, rows, weights, groups, columns, stores }) }
    }

    /// `<a, b>` over `columns` columns, in `f32` and in a fixed order: lane `j` of 16 adds the rounded products
    /// of columns `j`, `j + 16`, ... from +0; then lanes are folded by halves (8, 4, 2, 1). NaN is canonical.
    ///
    /// # Safety
    ///
    /// `columns` elements of `dtype` are readable at `a` and `b`; nobody writes them meanwhile.
    pub unsafe fn dot(&self, dtype: Arithmetic, a: *const u8, b: *const u8, columns: usize) -> f32 {
        // SAFETY: the caller answers for the pointers.
        unsafe { self.run(gradient::Dot { dtype, a, b, columns }) }
    }

    /// `row[c] = round(weight * row[c])` in place: the `f32` product, one rounding, canonical NaN.
    ///
    /// # Safety
    ///
    /// `columns` elements of `dtype` are readable and writable at `row`; nobody else uses them meanwhile.
    pub unsafe fn scale(&self, dtype: Arithmetic, row: *mut u8, weight: f32, columns: usize) {
        // SAFETY: the caller answers for the pointer.
        unsafe { self.run(gradient::Scale { dtype, row, weight, columns }) }
    }

    /// [`Rows::dot`] of two rows in this process's own memory, over the columns both have.
    pub fn dot_rows(&self, dtype: Arithmetic, a: &[u8], b: &[u8]) -> f32 {
        let columns = a.len().min(b.len()) / dtype.size();
        // SAFETY: both slices hold `columns` elements.
        unsafe { self.dot(dtype, a.as_ptr(), b.as_ptr(), columns) }
    }

    /// [`Rows::scale`] of a row in this process's own memory.
    pub fn scale_row(&self, dtype: Arithmetic, row: &mut [u8], weight: f32) {
        // SAFETY: the slice holds that many elements and is borrowed exclusively.
        unsafe { self.scale(dtype, row.as_mut_ptr(), weight, row.len() / dtype.size()) }
    }

    /// Orders streaming stores of this thread before whatever it stores next, a signal above all.
    pub fn fence() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every x86-64 CPU has SSE.
        unsafe {
            std::arch::x86_64::_mm_sfence()
        }
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
