//! Element types that can be summed, and how sixteen of them enter and leave the lanes.

use super::vector::{LANES, LINE, Vector};
use crate::dtype::Dtype;
use crate::error::PlanError;

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
            $crate::rows::arithmetic::Arithmetic::F32 => {
                type $format = $crate::rows::arithmetic::F32;
                $with
            }
            $crate::rows::arithmetic::Arithmetic::Bf16 => {
                type $format = $crate::rows::arithmetic::Bf16;
                $with
            }
            $crate::rows::arithmetic::Arithmetic::F16 => {
                type $format = $crate::rows::arithmetic::F16;
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
