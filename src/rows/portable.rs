//! Plain Rust, for every CPU: sixteen lanes in an array. Streaming stores are ordinary ones here.

use half::{bf16, f16};

use super::vector::{Kernel, LANES, LINE, Vector};

#[derive(Clone, Copy)]
struct Portable([f32; LANES]);

/// Runs a kernel on this set.
///
/// # Safety
///
/// The kernel's demands on its pointers hold.
pub(super) unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: plain Rust needs no CPU feature; the caller answers for the pointers.
    unsafe { kernel.run::<Portable>() }
}

/// Reads one element per lane.
///
/// # Safety
///
/// `src` is readable for 16 elements.
#[inline(always)]
unsafe fn load<T: Copy>(src: *const u8, widen: impl Fn(T) -> f32) -> Portable {
    // SAFETY: the caller answers for 16 elements; the read asks for no alignment.
    let elements = unsafe { src.cast::<[T; LANES]>().read_unaligned() };
    Portable(elements.map(widen))
}

/// Writes one element per lane.
///
/// # Safety
///
/// `dst` is writable for 16 elements.
#[inline(always)]
unsafe fn store<T>(lanes: [f32; LANES], dst: *mut u8, round: impl Fn(f32) -> T) {
    // SAFETY: the caller answers for 16 elements; the write asks for no alignment.
    unsafe { dst.cast::<[T; LANES]>().write_unaligned(lanes.map(round)) }
}

impl Vector for Portable {
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Portable([value; LANES])
    }

    #[inline(always)]
    unsafe fn add(mut self, other: Self) -> Self {
        for (lane, other) in self.0.iter_mut().zip(other.0) {
            *lane += other;
        }
        self
    }

    #[inline(always)]
    unsafe fn mul(mut self, other: Self) -> Self {
        for (lane, other) in self.0.iter_mut().zip(other.0) {
            *lane *= other;
        }
        self
    }

    #[inline(always)]
    unsafe fn canonical(self) -> Self {
        Portable(self.0.map(|lane| if lane.is_nan() { f32::from_bits(0x7fc0_0000) } else { lane }))
    }

    #[inline(always)]
    unsafe fn round_bf16(self) -> Self {
        Portable(self.0.map(|lane| {
            let bits = lane.to_bits();
            f32::from_bits(bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
        }))
    }

    #[inline(always)]
    unsafe fn load_f32(src: *const u8) -> Self {
        // SAFETY: the caller answers for 64 bytes.
        unsafe { load(src, |element: f32| element) }
    }

    #[inline(always)]
    unsafe fn load_bf16(src: *const u8) -> Self {
        // SAFETY: the caller answers for 32 bytes.
        unsafe { load(src, bf16::to_f32) }
    }

    #[inline(always)]
    unsafe fn load_f16(src: *const u8) -> Self {
        // SAFETY: the caller answers for 32 bytes.
        unsafe { load(src, f16::to_f32) }
    }

    #[inline(always)]
    unsafe fn store_f32<const STREAM: bool>(self, dst: *mut u8) {
        // SAFETY: the caller answers for 64 bytes.
        unsafe { store(self.0, dst, |lane| lane) }
    }

    #[inline(always)]
    unsafe fn store_bf16<const STREAM: bool>(self, dst: *mut u8) {
        // SAFETY: the caller answers for 32 bytes.
        unsafe { store(self.round_bf16().0, dst, |lane| (lane.to_bits() >> 16) as u16) }
    }

    #[inline(always)]
    unsafe fn store_f16<const STREAM: bool>(self, dst: *mut u8) {
        // SAFETY: the caller answers for 32 bytes.
        unsafe { store(self.0, dst, f16::from_f32) }
    }

    #[inline(always)]
    unsafe fn copy_line<const STREAM: bool>(dst: *mut u8, src: *const u8) {
        // SAFETY: the caller answers for 64 bytes on both sides.
        unsafe { dst.copy_from_nonoverlapping(src, LINE) }
    }

    #[inline(always)]
    unsafe fn zero_line<const STREAM: bool>(dst: *mut u8) {
        // SAFETY: the caller answers for 64 bytes.
        unsafe { dst.write_bytes(0, LINE) }
    }

    #[inline(always)]
    unsafe fn prefetch(_address: *const u8) {}
}
