//! `cuMemAlloc`: memory of a device at addresses of its own, which never leaves the process.

use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Arc;

use super::backing::Backing;
use super::map::{Kind, MAP, Region};
use crate::code::{Code, Result};

/// The page that mappings are made of.
const PAGE: u64 = 4096;

/// Memory of a device; only `bytes` of it are ever legal to touch.
pub fn allocate(device: usize, bytes: u64) -> Result<u64> {
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let whole = bytes.checked_next_multiple_of(PAGE).ok_or(Code::OUT_OF_MEMORY)?;
    let backing = Backing::create(device, whole, false, false)?;
    let raw = backing.descriptor().as_raw_fd();
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(ptr::null_mut(), whole as usize, protection, libc::MAP_SHARED, raw, 0) };
    if at == libc::MAP_FAILED {
        return Err(Code::OUT_OF_MEMORY);
    }
    let region = Region { bytes, kind: Kind::Device(Arc::new(backing)) };
    MAP.write().unwrap().regions.insert(at as u64, region);
    Ok(at as u64)
}

/// Gives it back.
pub fn release(start: u64) -> Result<()> {
    let mut map = MAP.write().unwrap();
    let Some(Region { kind: Kind::Device(backing), .. }) = map.regions.get(&start) else {
        return Err(Code::INVALID_VALUE);
    };
    let bytes = backing.bytes as usize;
    map.regions.remove(&start);
    // SAFETY: `allocate` mapped it, and it is known no longer.
    unsafe { libc::munmap(start as *mut _, bytes) };
    Ok(())
}
