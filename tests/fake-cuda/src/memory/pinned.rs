//! Memory of the host that devices reach: allocated so, or registered later.

use std::ptr;

use super::backing::POISON;
use super::map::{Kind, MAP, Region};
use super::place;
use crate::cause;
use crate::code::{Code, Result};

const PAGE: u64 = 4096;

/// Pinned memory, at the same address for host and devices.
pub fn pin(bytes: u64) -> Result<u64> {
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(ptr::null_mut(), bytes as usize, protection, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(Code::OUT_OF_MEMORY);
    }
    // SAFETY: the mapping above, in whole words, as pages are.
    unsafe { poison(at.cast(), bytes) };
    MAP.write().unwrap().regions.insert(at as u64, Region { bytes, kind: Kind::Pinned });
    Ok(at as u64)
}

/// Gives pinned memory back.
pub fn unpin(start: u64) -> Result<()> {
    let mut map = MAP.write().unwrap();
    let Some(Region { kind: Kind::Pinned, bytes }) = map.regions.get(&start) else {
        return Err(Code::INVALID_VALUE);
    };
    let bytes = *bytes;
    map.regions.remove(&start);
    drop(map);
    cause::forget(start..start + bytes);
    // SAFETY: `pin` mapped it, and it is known no longer.
    unsafe { libc::munmap(start as *mut _, bytes as usize) };
    Ok(())
}

/// Lets devices reach memory that host code has.
pub fn register(start: u64, bytes: u64) -> Result<()> {
    let end = start.checked_add(bytes).filter(|_| start > 0 && bytes > 0).ok_or(Code::INVALID_VALUE)?;
    let page = start / PAGE * PAGE;
    // SAFETY: it reads no byte; an answer other than zero says that a page of the range is not
    // mapped.
    if unsafe { libc::msync(page as *mut _, (end - page) as usize, libc::MS_ASYNC) } != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let mut map = MAP.write().unwrap();
    if map.overlaps(&(start..end)) {
        return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
    }
    place::remember(start);
    map.regions.insert(start, Region { bytes, kind: Kind::Registered });
    Ok(())
}

/// Takes that back; the memory stays the host's.
pub fn unregister(start: u64) -> Result<()> {
    let mut map = MAP.write().unwrap();
    let Some(&Region { kind: Kind::Registered, bytes }) = map.regions.get(&start) else {
        return Err(Code::HOST_MEMORY_NOT_REGISTERED);
    };
    map.regions.remove(&start);
    place::forget(start);
    drop(map);
    cause::forget(start..start + bytes);
    Ok(())
}

/// Fills fresh memory.
///
/// # Safety
///
/// At the address are as many bytes, in whole words.
unsafe fn poison(at: *mut u32, bytes: u64) {
    for index in 0..bytes.div_ceil(4) as usize {
        // SAFETY: the caller vouches for the range.
        unsafe { at.add(index).write(POISON) };
    }
}
