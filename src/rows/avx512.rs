//! AVX-512: sixteen lanes and one line are both exactly one register. Only AVX512F is needed.
//!
//! bf16 is rounded by integer arithmetic: the convert instruction of AVX512_BF16 flushes denormals.

use std::arch::x86_64::*;

use super::vector::{Kernel, Vector};

#[derive(Clone, Copy)]
struct Avx512(__m512);

/// Runs a kernel on this set.
///
/// # Safety
///
/// The CPU has AVX512F, and the kernel's demands on its pointers hold.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: this function enables the set; the caller answers for the pointers.
    unsafe { kernel.run::<Avx512>() }
}

impl Vector for Avx512 {
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller answers for the CPU feature.
        unsafe { Avx512(_mm512_set1_ps(value)) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller answers for the CPU feature.
        unsafe { Avx512(_mm512_add_ps(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: the caller answers for the CPU feature.
        unsafe { Avx512(_mm512_mul_ps(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn canonical(self) -> Self {
        // SAFETY: the caller answers for the CPU feature.
        unsafe {
            let nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc0_0000));
            let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
            Avx512(_mm512_mask_mov_ps(self.0, is_nan, nan))
        }
    }

    #[inline(always)]
    unsafe fn round_bf16(self) -> Self {
        // SAFETY: the caller answers for the CPU feature.
        unsafe {
            let bits = _mm512_castps_si512(self.0);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let upper = _mm512_and_si512(rounded, _mm512_set1_epi32(0xffff_0000u32 as i32));
            Avx512(_mm512_castsi512_ps(upper))
        }
    }

    #[inline(always)]
    unsafe fn load_f32(src: *const u8) -> Self {
        // SAFETY: the caller answers for the CPU feature and 64 bytes.
        unsafe { Avx512(_mm512_loadu_ps(src.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(src: *const u8) -> Self {
        // SAFETY: the caller answers for the CPU feature and 32 bytes.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(src.cast()));
            Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(src: *const u8) -> Self {
        // SAFETY: the caller answers for the CPU feature and 32 bytes.
        unsafe { Avx512(_mm512_cvtph_ps(_mm256_loadu_si256(src.cast()))) }
    }

    #[inline(always)]
    unsafe fn store_f32<const STREAM: bool>(self, dst: *mut u8) {
        // SAFETY: the caller answers for the CPU feature, 64 bytes and their alignment.
        unsafe {
            match STREAM {
                true => _mm512_stream_ps(dst.cast(), self.0),
                false => _mm512_storeu_ps(dst.cast(), self.0),
            }
        }
    }

    #[inline(always)]
    unsafe fn store_bf16<const STREAM: bool>(self, dst: *mut u8) {
        // SAFETY: the caller answers for the CPU feature, 32 bytes and their alignment.
        unsafe {
            let upper = _mm512_srli_epi32::<16>(_mm512_castps_si512(self.round_bf16().0));
            store_half::<STREAM>(_mm512_cvtepi32_epi16(upper), dst);
        }
    }

    #[inline(always)]
    unsafe fn store_f16<const STREAM: bool>(self, dst: *mut u8) {
        // SAFETY: the caller answers for the CPU feature, 32 bytes and their alignment.
        unsafe {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
            store_half::<STREAM>(_mm512_cvtps_ph::<NEAREST>(self.0), dst);
        }
    }

    #[inline(always)]
    unsafe fn copy_line<const STREAM: bool>(dst: *mut u8, src: *const u8) {
        // SAFETY: the caller answers for the CPU feature, 64 bytes on both sides and the alignment.
        unsafe { store_line::<STREAM>(_mm512_loadu_si512(src.cast()), dst) }
    }

    #[inline(always)]
    unsafe fn zero_line<const STREAM: bool>(dst: *mut u8) {
        // SAFETY: the caller answers for the CPU feature, 64 bytes and their alignment.
        unsafe { store_line::<STREAM>(_mm512_setzero_si512(), dst) }
    }

    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}

/// Writes 64 bytes.
///
/// # Safety
///
/// The CPU has AVX512F; `dst` is writable, and aligned to 64 bytes if `STREAM`.
#[inline(always)]
unsafe fn store_line<const STREAM: bool>(line: __m512i, dst: *mut u8) {
    // SAFETY: as the caller's.
    unsafe {
        match STREAM {
            true => _mm512_stream_si512(dst.cast(), line),
            false => _mm512_storeu_si512(dst.cast(), line),
        }
    }
}

/// Writes 32 bytes.
///
/// # Safety
///
/// The CPU has AVX512F; `dst` is writable, and aligned to 32 bytes if `STREAM`.
#[inline(always)]
unsafe fn store_half<const STREAM: bool>(half: __m256i, dst: *mut u8) {
    // SAFETY: as the caller's.
    unsafe {
        match STREAM {
            true => _mm256_stream_si256(dst.cast(), half),
            false => _mm256_storeu_si256(dst.cast(), half),
        }
    }
}
