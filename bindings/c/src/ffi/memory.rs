//! Pointers of the caller's, as Rust sees memory.
//!
//! Each function checks a pointer as far as possible: it is not null, it is aligned, and its length
//! is possible. The caller guarantees that the memory exists and that no other thread writes to it
//! meanwhile: each function documents this.

use std::ffi::{CStr, c_char};
use std::ops::Range;
use std::ptr::NonNull;

use crate::fault::{ArgumentError, Fault};

/// Where a result goes.
pub struct Out<T>(NonNull<T>);

impl<T> Out<T> {
    /// # Safety
    /// Unless `at` is null or misaligned, a `T` may be written there until this is dropped.
    pub unsafe fn new(what: &'static str, at: *mut T) -> Result<Out<T>, ArgumentError> {
        aligned(what, at).map(Out)
    }

    /// Writes the result.
    pub fn write(self, value: T) {
        // SAFETY: it is aligned, and `new` was promised that a T may be written there.
        unsafe { self.0.write(value) }
    }
}

/// `len` elements to read.
///
/// # Safety
/// Unless `at` is null or misaligned: `len` elements of `T` lie there, and no one writes to them
/// during `'a`.
pub unsafe fn slice<'a, T>(what: &'static str, at: *const T, len: u64) -> Result<&'a [T], ArgumentError> {
    let Some((at, len)) = extent(what, at.cast_mut(), len)? else { return Ok(&[]) };
    // SAFETY: not null, aligned, of a size that memory can have; the rest is the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(at.as_ptr(), len) })
}

/// `len` elements to write.
///
/// # Safety
/// As [`slice`], and no one else reads or writes them during `'a`.
pub unsafe fn slice_mut<'a, T>(
    what: &'static str,
    at: *mut T,
    len: u64,
) -> Result<&'a mut [T], ArgumentError> {
    let Some((at, len)) = extent(what, at, len)? else { return Ok(&mut []) };
    // SAFETY: as in `slice`, and alone, as the caller promised.
    Ok(unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), len) })
}

/// As [`slice`]; null is none.
///
/// # Safety
/// As [`slice`].
pub unsafe fn optional<'a, T>(
    what: &'static str,
    at: *const T,
    len: u64,
) -> Result<Option<&'a [T]>, ArgumentError> {
    // SAFETY: as the caller promised.
    if at.is_null() { Ok(None) } else { unsafe { slice(what, at, len) }.map(Some) }
}

/// `len` flags to read, bytes of 0 and 1.
///
/// # Safety
/// As [`slice`].
pub unsafe fn flags<'a>(what: &'static str, at: *const u8, len: u64) -> Result<&'a [bool], ArgumentError> {
    // SAFETY: as the caller promised.
    let bytes = unsafe { slice(what, at, len) }?;
    bytemuck::checked::try_cast_slice(bytes).map_err(|_| {
        let seen = bytes.iter().find(|&&byte| byte > 1).copied().unwrap_or_default().into();
        ArgumentError::Value { what, seen, expected: "0 or 1" }
    })
}

/// As [`flags`]; null is none.
///
/// # Safety
/// As [`slice`].
pub unsafe fn optional_flags<'a>(
    what: &'static str,
    at: *const u8,
    len: u64,
) -> Result<Option<&'a [bool]>, ArgumentError> {
    // SAFETY: as the caller promised.
    if at.is_null() { Ok(None) } else { unsafe { flags(what, at, len) }.map(Some) }
}

/// A struct of the caller's; nothing if there is none.
///
/// # Safety
/// Unless `at` is null or misaligned, a `T` lies there.
pub unsafe fn structure<T: Copy>(what: &'static str, at: *const T) -> Result<T, ArgumentError> {
    let at = aligned(what, at.cast_mut())?;
    // SAFETY: aligned, and as the caller promised.
    Ok(unsafe { at.read() })
}

/// A text that ends with a zero byte.
///
/// # Safety
/// Unless `at` is null, such a text lies there, and no one writes to it during `'a`.
pub unsafe fn text<'a>(what: &'static str, at: *const c_char) -> Result<&'a str, ArgumentError> {
    if at.is_null() {
        return Err(ArgumentError::Null { what });
    }
    // SAFETY: as the caller promised.
    unsafe { CStr::from_ptr(at) }.to_str().map_err(|_| ArgumentError::NotText { what })
}

/// A short text in a field of a struct: it always ends with a zero byte.
pub fn short_name<const SIZE: usize>(text: &str) -> [c_char; SIZE] {
    let mut field = [0; SIZE];
    for (to, &from) in field[..SIZE - 1].iter_mut().zip(text.as_bytes()) {
        *to = from as c_char;
    }
    field
}

/// Checks that written memory lies apart from read memory. Both are given by name and addresses.
pub fn apart(read: (&'static str, Range<usize>), written: (&'static str, Range<usize>)) -> Result<(), Fault> {
    let ((one, a), (other, b)) = (read, written);
    if a.is_empty() || b.is_empty() || a.end <= b.start || b.end <= a.start {
        return Ok(());
    }
    Err(ArgumentError::Overlap { one, other }.into())
}

/// Where a slice lies.
pub fn addresses<T>(slice: &[T]) -> Range<usize> {
    let start = slice.as_ptr().addr();
    start..start + size_of_val(slice)
}

fn aligned<T>(what: &'static str, at: *mut T) -> Result<NonNull<T>, ArgumentError> {
    let at = NonNull::new(at).ok_or(ArgumentError::Null { what })?;
    if at.is_aligned() {
        return Ok(at);
    }
    Err(ArgumentError::Misaligned { what, address: at.addr().get(), align: align_of::<T>() })
}

/// An extent of memory, if it is not empty.
fn extent<T>(what: &'static str, at: *mut T, len: u64) -> Result<Option<(NonNull<T>, usize)>, ArgumentError> {
    if len == 0 {
        return Ok(None);
    }
    let at = aligned(what, at)?;
    let too_large = ArgumentError::TooLarge { what, rows: len, columns: 1 };
    let count = usize::try_from(len).map_err(|_| too_large.clone())?;
    let bytes = count.checked_mul(size_of::<T>()).filter(|&bytes| isize::try_from(bytes).is_ok());
    let end = bytes.and_then(|bytes| at.addr().get().checked_add(bytes));
    end.map(|_| Some((at, count))).ok_or(too_large)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_misaligned_and_endless_memory_is_refused_by_name() {
        let numbers = [0_u32; 4];
        let at = numbers.as_ptr();
        // SAFETY: every slice is made of existing memory; anything else is refused before it is
        // read.
        unsafe {
            assert_eq!(slice("x", at, 4), Ok(&numbers[..]));
            assert_eq!(slice::<u32>("x", std::ptr::null(), 0), Ok(&[][..]));
            assert_eq!(slice::<u32>("x", std::ptr::null(), 1), Err(ArgumentError::Null { what: "x" }));
            let odd = at.byte_add(1);
            let (address, align) = (odd.addr(), 4);
            assert_eq!(slice("x", odd, 1), Err(ArgumentError::Misaligned { what: "x", address, align }));
            for rows in [u64::MAX, 1 << 62, isize::MAX as u64 / 4 + 1] {
                assert_eq!(
                    slice("x", at, rows),
                    Err(ArgumentError::TooLarge { what: "x", rows, columns: 1 })
                );
            }
        }
    }

    #[test]
    fn neighbors_do_not_overlap_and_a_shared_byte_does() {
        let bytes = [0_u8; 8];
        let apart = |a, b| apart(("a", addresses(a)), ("b", addresses(b)));
        assert_eq!(apart(&bytes[..4], &bytes[4..]), Ok(()));
        assert_eq!(apart(&bytes[..0], &bytes[..]), Ok(()));
        let overlap = ArgumentError::Overlap { one: "a", other: "b" };
        assert_eq!(apart(&bytes[..5], &bytes[4..]), Err(overlap.into()));
    }
}
