//! Structs that may grow: their first field is their size, and fields are only ever appended.
//!
//! ```text
//!   caller older   | size | a | b |            read: c is 0, its default       written: c is left out
//!   library        | size | a | b | c |
//!   caller newer   | size | a | b | c | d |    read: refused unless d is 0     written: d is 0
//! ```
//!
//! A size that no version has is refused, whatever it is: it was not set, or it is not the size.

use std::mem::MaybeUninit;

use crate::fault::ArgumentError;

/// No struct will ever be larger.
const MOST: usize = 4096;

/// A struct whose first field is its size.
///
/// # Safety
/// It is `repr(C)`, begins with a `usize`, every bit pattern of it is a value, and it has no
/// padding at its end.
pub unsafe trait Versioned: Copy {
    /// Its name in C.
    const NAME: &str;
    /// The size of each version that there was, ascending; the last is today's.
    const SIZES: &[usize];
}

/// Name in C, last field and its type: the current struct ends with it. The sizes of earlier
/// versions, if there were any.
macro_rules! versioned {
    ($type:ident, $name:literal, $last:ident: $last_type:ty $(, $earlier:literal)*) => {
        const _: () = assert!(
            std::mem::offset_of!($type, size) == 0
                && std::mem::offset_of!($type, $last) + size_of::<$last_type>() == size_of::<$type>()
        );
        // SAFETY: all its fields are numbers or pointers; the assertion holds the rest.
        unsafe impl $crate::ffi::versioned::Versioned for $type {
            const NAME: &str = $name;
            const SIZES: &[usize] = &[$($earlier,)* size_of::<$type>()];
        }
    };
}
pub(super) use versioned;

/// Reads a struct of the caller's.
///
/// # Safety
/// Unless `at` is null or misaligned, as many bytes lie there as its first field says, if these are
/// at most 4096.
pub unsafe fn read<T: Versioned>(at: *const T) -> Result<T, ArgumentError> {
    // SAFETY: as the caller promised.
    let size = unsafe { said_size(at) }?;
    let known = size.min(size_of::<T>());
    // SAFETY: so many bytes are there, as the caller promised; all of them are numbers.
    let bytes = unsafe { std::slice::from_raw_parts(at.cast::<u8>(), size) };
    if let Some(set) = bytes[known..].iter().position(|&byte| byte != 0) {
        return Err(ArgumentError::Unknown { name: T::NAME, at: known + set, known });
    }
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: `known` bytes fit both; every bit pattern is a value of T.
    unsafe {
        value.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), known);
        Ok(value.assume_init())
    }
}

/// Where a struct of the library's goes, in the size that the caller gave it.
pub struct OutStruct<T> {
    at: *mut T,
    size: usize,
}

impl<T: Versioned> OutStruct<T> {
    /// # Safety
    /// As [`read`], and so many bytes may be written there until this is dropped.
    pub unsafe fn new(at: *mut T) -> Result<OutStruct<T>, ArgumentError> {
        // SAFETY: as the caller promised.
        let size = unsafe { said_size(at) }?;
        Ok(OutStruct { at, size })
    }

    /// Writes the fields that the caller's version knows, and zeros behind those that this one
    /// knows. The size stays the caller's.
    pub fn write(self, value: T) {
        let (skip, known) = (size_of::<usize>(), self.size.min(size_of::<T>()));
        // SAFETY: `new` was promised `size` bytes; T is at least as large as its first field.
        unsafe {
            let (from, to) = ((&raw const value).cast::<u8>(), self.at.cast::<u8>());
            to.add(skip).copy_from_nonoverlapping(from.add(skip), known - skip);
            to.add(known).write_bytes(0, self.size - known);
        }
    }
}

/// The size in the first field, if a version has it or may have it.
///
/// # Safety
/// Unless `at` is null or misaligned, a size lies there.
unsafe fn said_size<T: Versioned>(at: *const T) -> Result<usize, ArgumentError> {
    let what = T::NAME;
    if at.is_null() {
        return Err(ArgumentError::Null { what });
    }
    if !at.is_aligned() {
        return Err(ArgumentError::Misaligned { what, address: at.addr(), align: align_of::<T>() });
    }
    // SAFETY: not null, aligned, and as the caller promised.
    let seen = unsafe { at.cast::<usize>().read() };
    let expected = size_of::<T>();
    match T::SIZES.contains(&seen) || (expected < seen && seen <= MOST && seen.is_multiple_of(4)) {
        true => Ok(seen),
        false => Err(ArgumentError::Size { name: T::NAME, seen, expected }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Old {
        size: usize,
        a: u32,
        b: u32,
    }
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct New {
        size: usize,
        a: u32,
        b: u32,
        c: u64,
    }
    versioned!(Old, "old_t", b: u32);
    versioned!(New, "new_t", c: u64, 16);

    const OLD: Old = Old { size: 16, a: 1, b: 2 };
    const NEW: New = New { size: 24, a: 1, b: 2, c: 3 };

    fn read_as<T: Versioned, F>(from: &F) -> Result<T, ArgumentError> {
        // SAFETY: each struct says its own size, or one that is refused.
        unsafe { read((&raw const *from).cast()) }
    }

    #[test]
    fn older_struct_gets_defaults_newer_with_unknown_is_refused() {
        assert_eq!(read_as::<New, _>(&OLD), Ok(New { size: 16, a: 1, b: 2, c: 0 }));
        assert_eq!(read_as::<Old, _>(&New { c: 0, ..NEW }), Ok(Old { size: 24, a: 1, b: 2 }));
        let unknown = ArgumentError::Unknown { name: "old_t", at: 16, known: 16 };
        assert_eq!(read_as::<Old, _>(&NEW), Err(unknown));
    }

    #[test]
    fn sizes_that_no_version_has_are_refused() {
        for seen in [0, 1, 8, 15, 17, 20, 25, 4097, 4100, usize::MAX, 1 << 40] {
            let refused = Err(ArgumentError::Size { name: "new_t", seen, expected: 24 });
            assert_eq!(read_as::<New, _>(&New { size: seen, ..NEW }), refused, "{seen}");
        }
    }

    #[test]
    fn out_struct_write_ends_at_size_that_caller_gave() {
        let mut bytes = [0xff_u8; 40];
        let write = |bytes: &mut [u8; 40], size: usize| {
            bytes.fill(0xff);
            let at = bytes.as_mut_ptr();
            let at = at.wrapping_add(at.align_offset(8));
            // SAFETY: 32 aligned bytes are there.
            unsafe {
                at.cast::<usize>().write(size);
                OutStruct::new(at.cast::<New>()).unwrap().write(NEW);
                std::slice::from_raw_parts(at, 32).to_vec()
            }
        };
        let words = |bytes: &[u8]| -> Vec<u64> {
            bytes.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect()
        };
        let ab = 1 | 2 << 32;
        assert_eq!(words(&write(&mut bytes, 16)), [16, ab, u64::MAX, u64::MAX]);
        assert_eq!(words(&write(&mut bytes, 24)), [24, ab, 3, u64::MAX]);
        assert_eq!(words(&write(&mut bytes, 32)), [32, ab, 3, 0]);
    }
}
