//! AVX2 with F16C: sixteen lanes, or one line, in two registers.

use std::arch::x86_64::*;

use super::vector::{Kernel, Vector};

#[derive(Clone, Copy)]
struct Avx2(__m256, __m256);

/// Runs a kernel on this set.
///
/// # Safety
///
/// The CPU has AVX2 and F16C, and the kernel's demands on its pointers hold.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: this function enables the set; the caller answers for the pointers.
    unsafe { kernel.run::<Avx2>() }
}

impl Vector for Avx2 {
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller answers for the CPU features.
        unsafe { Avx2(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller answers for the CPU features.
        unsafe { Avx2(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)) }
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: the caller answers for the CPU features.
        unsafe { Avx2(_mm256_mul_ps(self.0, other.0), _mm256_mul_ps(self.1, other.1)) }
    }

    #[inline(always)]
    unsafe fn canonical(self) -> Self {
        // SAFETY: the caller answers for the CPU features.
        unsafe { Avx2(canonical(self.0), canonical(self.1)) }
    }

    #[inline(always)]
    unsafe fn round_bf16(self) -> Self {
        // SAFETY: the caller answers for the CPU features.
        unsafe { Avx2(round_bf16(self.0), round_bf16(self.1)) }
    }

    #[inline(always)]
    unsafe fn load_f32(src: *const u8) -> Self {
        // SAFETY: the caller answers for the CPU features and 64 bytes.
        unsafe { Avx2(_mm256_loadu_ps(src.cast()), _mm256_loadu_ps(src.add(32).cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(src: *const u8) -> Self {
        // SAFETY: the caller answers for the CPU features and 32 bytes.
        unsafe { Avx2(load_bf16(src), load_bf16(src.add(16))) }
    }

    #[inline(always)]
    unsafe fn load_f16(src: *const u8) -> Self {
        // SAFETY: the caller answers for the CPU features and 32 bytes.
        unsafe {
            let (low, high) = (_mm_loadu_si128(src.cast()), _mm_loadu_si128(src.add(16).cast()));
            Avx2(_mm256_cvtph_ps(low), _mm256_cvtph_ps(high))
        }
    }

    #[inline(always)]
    unsafe fn store_f32<const STREAM: bool>(self, dst: *mut u8) {
        // SAFETY: the caller answers for the CPU features, 64 bytes and their alignment.
        unsafe {
            store::<STREAM>(_mm256_castps_si256(self.0), dst);
            store::<STREAM>(_mm256_castps_si256(self.1), dst.add(32));
        }
    }

    #[inline(always)]
    unsafe fn store_bf16<const STREAM: bool>(self, dst: *mut u8) {
        // SAFETY: the caller answers for the CPU features, 32 bytes and their alignment.
        unsafe {
            // The pack works within 128-bit halves: its quarters come out as 0 2 1 3.
            let packed = _mm256_packus_epi32(upper(round_bf16(self.0)), upper(round_bf16(self.1)));
            store::<STREAM>(_mm256_permute4x64_epi64::<0b11_01_10_00>(packed), dst);
        }
    }

    #[inline(always)]
    unsafe fn store_f16<const STREAM: bool>(self, dst: *mut u8) {
        // SAFETY: the caller answers for the CPU features, 32 bytes and their alignment.
        unsafe {
            let low = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0);
            let high = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1);
            store::<STREAM>(_mm256_set_m128i(high, low), dst);
        }
    }

    #[inline(always)]
    unsafe fn copy_line<const STREAM: bool>(dst: *mut u8, src: *const u8) {
        // SAFETY: the caller guarantees the CPU features, 64 bytes on both sides and the alignment.
        unsafe {
            let (low, high) = (_mm256_loadu_si256(src.cast()), _mm256_loadu_si256(src.add(32).cast()));
            store::<STREAM>(low, dst);
            store::<STREAM>(high, dst.add(32));
        }
    }

    #[inline(always)]
    unsafe fn zero_line<const STREAM: bool>(dst: *mut u8) {
        // SAFETY: the caller answers for the CPU features, 64 bytes and their alignment.
        unsafe {
            store::<STREAM>(_mm256_setzero_si256(), dst);
            store::<STREAM>(_mm256_setzero_si256(), dst.add(32));
        }
    }

    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}

/// NaN lanes become `0x7fc0_0000`.
///
/// # Safety
///
/// The CPU has AVX2.
#[inline(always)]
unsafe fn canonical(lanes: __m256) -> __m256 {
    // SAFETY: as the caller's.
    unsafe {
        let nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc0_0000));
        _mm256_blendv_ps(lanes, nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(lanes, lanes))
    }
}

/// Reads 16 bytes: eight bf16, each the upper half of its `f32`.
///
/// # Safety
///
/// The CPU has AVX2; `src` is readable.
#[inline(always)]
unsafe fn load_bf16(src: *const u8) -> __m256 {
    // SAFETY: as the caller's.
    unsafe {
        let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(src.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
    }
}

/// The upper halves of the lanes, in their lower halves.
///
/// # Safety
///
/// The CPU has AVX2.
#[inline(always)]
unsafe fn upper(lanes: __m256) -> __m256i {
    // SAFETY: as the caller's.
    unsafe { _mm256_srli_epi32::<16>(_mm256_castps_si256(lanes)) }
}

/// Rounds to nearest even: half a unit less one is added, one more where the unit's bit is odd.
///
/// # Safety
///
/// The CPU has AVX2. NaN lanes are canonical.
#[inline(always)]
unsafe fn round_bf16(lanes: __m256) -> __m256 {
    // SAFETY: as the caller's.
    unsafe {
        let bits = _mm256_castps_si256(lanes);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        _mm256_castsi256_ps(_mm256_and_si256(rounded, _mm256_set1_epi32(0xffff_0000u32 as i32)))
    }
}

/// Writes 32 bytes.
///
/// # Safety
///
/// The CPU has AVX2; `dst` is writable, and aligned to 32 bytes if `STREAM`.
#[inline(always)]
unsafe fn store<const STREAM: bool>(half: __m256i, dst: *mut u8) {
    // SAFETY: as the caller's.
    unsafe {
        match STREAM {
            true => _mm256_stream_si256(dst.cast(), half),
            false => _mm256_storeu_si256(dst.cast(), half),
        }
    }
}
