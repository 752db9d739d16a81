//! The small seam between the loops and the instruction sets.
//!
//! ```text
//!   transfer.rs  sum.rs  gradient.rs   the loops, once, generic over Vector
//!              |
//!           Vector                   16 lanes of f32, and one cache line of bytes
//!        /     |      \
//!  portable   avx2   avx512          [f32; 16]   two ymm   one zmm
//! ```
//!
//! Every set has the same 16 lanes, so the loops cut rows at the same columns and the fixed order
//! of a dot product follows by itself. An operation on lanes is one IEEE operation on each lane;
//! nothing here may fuse, flush or reorder, which is why all sets agree bit for bit.

/// Lanes of a vector.
pub(super) const LANES: usize = 16;

/// Bytes of a cache line: the unit of copying, and the alignment streaming stores ask for.
pub(super) const LINE: usize = 64;

/// Sixteen lanes of `f32` and one line of bytes in the registers of one instruction set.
///
/// # Safety
///
/// Every method requires that the CPU has the set. Pointers need no alignment, except the target of
/// a streaming store (`STREAM`), which is aligned to the stored size: 64 bytes for a line or `f32`
/// lanes, 32 bytes for two-byte lanes. Sources are readable and targets writable for as many bytes.
pub(super) trait Vector: Copy {
    /// The same value in every lane.
    unsafe fn splat(value: f32) -> Self;
    /// Lane by lane sum.
    unsafe fn add(self, other: Self) -> Self;
    /// Lane by lane product, rounded to `f32`.
    unsafe fn mul(self, other: Self) -> Self;
    /// NaN of any sign and payload becomes `0x7fc0_0000`; other lanes stay.
    unsafe fn canonical(self) -> Self;
    /// Rounds to bf16, to nearest even, and stays in `f32`. NaN lanes must be canonical: it is
    /// integer arithmetic.
    unsafe fn round_bf16(self) -> Self;

    /// Reads 64 bytes.
    unsafe fn load_f32(src: *const u8) -> Self;
    /// Reads 32 bytes.
    unsafe fn load_bf16(src: *const u8) -> Self;
    /// Reads 32 bytes.
    unsafe fn load_f16(src: *const u8) -> Self;

    /// Writes 64 bytes.
    unsafe fn store_f32<const STREAM: bool>(self, dst: *mut u8);
    /// Writes 32 bytes, rounded as by [`Vector::round_bf16`], with the same demand.
    unsafe fn store_bf16<const STREAM: bool>(self, dst: *mut u8);
    /// Writes 32 bytes, rounded to nearest even.
    unsafe fn store_f16<const STREAM: bool>(self, dst: *mut u8);

    /// Copies 64 bytes.
    unsafe fn copy_line<const STREAM: bool>(dst: *mut u8, src: *const u8);
    /// Writes 64 zero bytes.
    unsafe fn zero_line<const STREAM: bool>(dst: *mut u8);
    /// Asks for the line at an address, which need not be valid.
    unsafe fn prefetch(address: *const u8);
}

/// A loop that can be run on any set: its arguments in a struct, its body generic over [`Vector`].
pub(super) trait Kernel {
    /// Its result.
    type Output;

    /// Runs it.
    ///
    /// # Safety
    ///
    /// The CPU has the set of `V`, and the kernel's own demands on its pointers hold.
    /// Implementations are `inline(always)`, so that the body is compiled inside the function that
    /// enables the set.
    unsafe fn run<V: Vector>(self) -> Self::Output;
}
