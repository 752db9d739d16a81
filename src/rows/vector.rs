//! The interface between the loops and the instruction sets, and the choice of a set.
//!
//! ```text
//!   transfer.rs  sum.rs  fp8.rs        the loops, once, generic over Vector
//!              |
//!           Vector                   16 lanes of f32, and one cache line of bytes
//!        /     |      \
//!  portable   avx2   avx512          [f32; 16]   two ymm   one zmm
//! ```
//!
//! Every set has the same 16 lanes, so the loops cut rows at the same columns and the fixed order
//! of a dot product follows by itself. An operation on lanes is one IEEE operation on each lane;
//! nothing here may fuse, flush or reorder, which is why all sets agree bit for bit.
//!
//! A set is chosen once, then carried as a value. A [`Simd`] cannot be built for a set the CPU
//! lacks, so a holder of one needs no further check, and the loops below it pay nothing for
//! detection. A forced set that is missing is an error, never a quiet fallback: a run that claims
//! to have tested `avx512` has.

use std::env;
use std::ffi::OsStr;

use crate::dtype::Dtype;
use crate::error::{PlanError, SimdError};

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

/// The environment variable that forces a set: `portable`, `avx2` or `avx512`. Unset or empty: the
/// best one.
pub const SIMD_VARIABLE: &str = "SIDELANE_SIMD";

/// An instruction set this CPU is known to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Simd(pub(super) Set);

/// The sets this build has loops for, worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Set {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Simd {
    /// Plain Rust: runs everywhere.
    pub const PORTABLE: Simd = Simd(Set::Portable);

    /// The sets this CPU has, worst first. Never empty: [`Simd::PORTABLE`] is always there.
    pub fn available() -> impl Iterator<Item = Simd> {
        Set::ALL.iter().copied().filter(|set| set.detected()).map(Simd)
    }

    /// The best set this CPU has.
    pub fn best() -> Simd {
        Simd::available().last().unwrap_or(Simd::PORTABLE)
    }

    /// The set with this name, if it exists and this CPU has it.
    pub fn named(name: &str) -> Result<Simd, SimdError> {
        if let Some(&set) = Set::ALL.iter().find(|set| set.name() == name) {
            return match set.detected() {
                true => Ok(Simd(set)),
                false => Err(SimdError::Missing { name: set.name(), needs: set.needs() }),
            };
        }
        // Sets of another architecture are missing here, not misspelt.
        match name {
            "avx2" => Err(SimdError::Missing { name: "avx2", needs: "x86-64" }),
            "avx512" => Err(SimdError::Missing { name: "avx512", needs: "x86-64" }),
            _ => Err(SimdError::Unknown { name: name.to_owned() }),
        }
    }

    /// The set that [`SIMD_VARIABLE`] forces, or the best one where it is unset or empty.
    pub fn from_env() -> Result<Simd, SimdError> {
        Simd::chosen(env::var_os(SIMD_VARIABLE).as_deref())
    }

    fn chosen(value: Option<&OsStr>) -> Result<Simd, SimdError> {
        match value {
            Some(name) if !name.is_empty() => Simd::named(&name.to_string_lossy()),
            _ => Ok(Simd::best()),
        }
    }

    /// The name used in the environment, on the command line and in reports.
    pub const fn name(self) -> &'static str {
        self.0.name()
    }
}

impl std::fmt::Display for Simd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Set {
    #[cfg(target_arch = "x86_64")]
    const ALL: &[Set] = &[Set::Portable, Set::Avx2, Set::Avx512];
    #[cfg(not(target_arch = "x86_64"))]
    const ALL: &[Set] = &[Set::Portable];

    const fn name(self) -> &'static str {
        match self {
            Set::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => "avx512",
        }
    }

    const fn needs(self) -> &'static str {
        match self {
            Set::Portable => "nothing",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "avx2 or f16c",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => "avx512f",
        }
    }

    fn detected(self) -> bool {
        match self {
            Set::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c"),
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => is_x86_feature_detected!("avx512f"),
        }
    }
}

/// An element type with arithmetic: every [`Dtype`] but [`Dtype::Bytes`], so that no loop sums
/// elements without arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
}

impl Arithmetic {
    /// Every type.
    pub const ALL: [Arithmetic; 3] = [Arithmetic::F32, Arithmetic::Bf16, Arithmetic::F16];

    /// Width of one element, in bytes.
    pub const fn size(self) -> usize {
        match self {
            Arithmetic::F32 => 4,
            Arithmetic::Bf16 | Arithmetic::F16 => 2,
        }
    }
}

impl TryFrom<Dtype> for Arithmetic {
    type Error = PlanError;

    fn try_from(dtype: Dtype) -> Result<Self, PlanError> {
        match dtype {
            Dtype::F32 => Ok(Arithmetic::F32),
            Dtype::Bf16 => Ok(Arithmetic::Bf16),
            Dtype::F16 => Ok(Arithmetic::F16),
            _ => Err(PlanError::NoArithmetic { dtype }),
        }
    }
}

impl From<Arithmetic> for Dtype {
    fn from(arithmetic: Arithmetic) -> Dtype {
        match arithmetic {
            Arithmetic::F32 => Dtype::F32,
            Arithmetic::Bf16 => Dtype::Bf16,
            Arithmetic::F16 => Dtype::F16,
        }
    }
}

/// An expression with the format of an element type: `with_format!(dtype, F => of::<F>())`.
macro_rules! with_format {
    ($dtype:expr, $format:ident => $with:expr) => {
        match $dtype {
            $crate::rows::vector::Arithmetic::F32 => {
                type $format = $crate::rows::vector::F32;
                $with
            }
            $crate::rows::vector::Arithmetic::Bf16 => {
                type $format = $crate::rows::vector::Bf16;
                $with
            }
            $crate::rows::vector::Arithmetic::F16 => {
                type $format = $crate::rows::vector::F16;
                $with
            }
        }
    };
}
pub(super) use with_format;

/// An element type at compile time. `lanes` below 16 is the end of a row: the lanes beyond it read
/// as +0 and are not written.
///
/// # Safety
///
/// Of every method: the CPU has the set of `V`; the pointer is good for `lanes` elements, and
/// aligned as [`Vector`] requires if `STREAM`. `STREAM` is for whole vectors only.
pub(super) trait Format {
    /// Bytes of an element.
    const BYTES: usize;

    /// Reads sixteen elements.
    unsafe fn load<V: Vector>(src: *const u8) -> V;

    /// Rounds and writes sixteen elements; NaN is canonical already.
    unsafe fn store<V: Vector, const STREAM: bool>(lanes: V, dst: *mut u8);

    /// Reads the first `lanes` elements.
    #[inline(always)]
    unsafe fn load_some<V: Vector>(src: *const u8, lanes: usize) -> V {
        let mut padded = [0u8; LINE];
        // SAFETY: the caller answers for `lanes` elements at `src`; 16 elements fit a line.
        unsafe {
            padded.as_mut_ptr().copy_from_nonoverlapping(src, lanes.min(LANES) * Self::BYTES);
            Self::load(padded.as_ptr())
        }
    }

    /// Makes NaN canonical, rounds, and writes the first `lanes` elements.
    #[inline(always)]
    unsafe fn store_some<V: Vector, const STREAM: bool>(vector: V, dst: *mut u8, lanes: usize) {
        // SAFETY: the caller answers for `lanes` elements at `dst`; 16 elements fit a line.
        unsafe {
            let vector = vector.canonical();
            if lanes >= LANES {
                return Self::store::<V, STREAM>(vector, dst);
            }
            let mut padded = [0u8; LINE];
            Self::store::<V, false>(vector, padded.as_mut_ptr());
            dst.copy_from_nonoverlapping(padded.as_ptr(), lanes * Self::BYTES);
        }
    }
}

/// [`Arithmetic::F32`] at compile time.
pub(super) struct F32;
/// [`Arithmetic::Bf16`] at compile time.
pub(super) struct Bf16;
/// [`Arithmetic::F16`] at compile time.
pub(super) struct F16;

/// A type in which partial sums travel.
///
/// # Safety
///
/// Of its method: the CPU has the set of `V`.
pub(super) trait WireFormat: Format {
    /// Rounds each lane to this type; which NaN a lane is does not matter.
    unsafe fn round<V: Vector>(lanes: V) -> V;
}

impl WireFormat for F32 {
    #[inline(always)]
    unsafe fn round<V: Vector>(lanes: V) -> V {
        lanes
    }
}

impl WireFormat for Bf16 {
    #[inline(always)]
    unsafe fn round<V: Vector>(lanes: V) -> V {
        // SAFETY: the caller answers for the set; NaN is canonical.
        unsafe { lanes.canonical().round_bf16() }
    }
}

macro_rules! format {
    ($format:ty, $bytes:literal, $load:ident, $store:ident) => {
        impl Format for $format {
            const BYTES: usize = $bytes;

            #[inline(always)]
            unsafe fn load<V: Vector>(src: *const u8) -> V {
                // SAFETY: the demands are the same.
                unsafe { V::$load(src) }
            }

            #[inline(always)]
            unsafe fn store<V: Vector, const STREAM: bool>(lanes: V, dst: *mut u8) {
                // SAFETY: the demands are the same.
                unsafe { lanes.$store::<STREAM>(dst) }
            }
        }
    };
}

format!(F32, 4, load_f32, store_f32);
format!(Bf16, 2, load_bf16, store_bf16);
format!(F16, 2, load_f16, store_f16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_available_set_is_found_by_its_name() {
        for simd in Simd::available() {
            assert_eq!(Simd::named(simd.name()), Ok(simd));
        }
    }

    #[test]
    fn an_unknown_name_is_an_error_that_repeats_it() {
        assert_eq!(Simd::named("sse9"), Err(SimdError::Unknown { name: "sse9".to_owned() }));
        assert_eq!(Simd::named("AVX2"), Err(SimdError::Unknown { name: "AVX2".to_owned() }));
    }

    #[test]
    fn a_set_the_cpu_lacks_is_an_error_not_a_fallback() {
        for name in ["avx2", "avx512"] {
            if Simd::available().all(|simd| simd.name() != name) {
                assert!(matches!(Simd::named(name), Err(SimdError::Missing { .. })));
            }
        }
    }

    #[test]
    fn the_variable_forces_a_set_and_its_absence_the_best() {
        assert_eq!(Simd::chosen(Some(OsStr::new("portable"))), Ok(Simd::PORTABLE));
        assert!(matches!(Simd::chosen(Some(OsStr::new("fast"))), Err(SimdError::Unknown { .. })));
        for absent in [None, Some(OsStr::new(""))] {
            assert_eq!(Simd::chosen(absent), Ok(Simd::best()));
        }
    }

    #[test]
    fn the_best_set_is_the_last_available_one() {
        assert_eq!(Some(Simd::best()), Simd::available().last());
    }

    /// Without this, a comparison of "all sets" could quietly compare the portable one with itself.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn a_cpu_with_avx512_offers_three_sets() {
        let names: Vec<_> = Simd::available().map(Simd::name).collect();
        if is_x86_feature_detected!("avx512f") {
            assert_eq!(names, ["portable", "avx2", "avx512"]);
        } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            assert_eq!(names, ["portable", "avx2"]);
        } else {
            assert_eq!(names, ["portable"]);
        }
    }
}
