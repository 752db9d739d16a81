//! Virtual memory management: addresses are reserved, memory is mapped into them, devices are
//! granted access.

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Arc;

use super::backing::Backing;
use super::map::{Kind, MAP, Region};
use crate::code::{Code, Result};
use crate::driver::settings;
use crate::table::Table;

/// What `cuMemCreate` and imports hand out.
pub static ALLOCATIONS: Table<Backing> = Table::new();

/// Access of one device to a range.
pub struct Access {
    pub device: usize,
    /// None: nothing any more.
    pub writes: Option<bool>,
}

fn whole(bytes: u64) -> Result<bool> {
    Ok(bytes > 0 && bytes.is_multiple_of(settings()?.granularity))
}

/// Fresh memory of a device.
pub fn create(device: usize, bytes: u64, exportable: bool, rdma: bool) -> Result<usize> {
    if !whole(bytes)? {
        return Err(Code::INVALID_VALUE);
    }
    Ok(ALLOCATIONS.insert(Arc::new(Backing::create(device, bytes, exportable, rdma)?)))
}

/// Addresses that nothing else will use; touching them before memory is mapped there is a fault.
pub fn address_reserve(bytes: u64, alignment: u64) -> Result<u64> {
    let alignment = alignment.max(settings()?.granularity);
    if !whole(bytes)? || !alignment.is_power_of_two() {
        return Err(Code::INVALID_VALUE);
    }
    let total = bytes.checked_add(alignment).ok_or(Code::INVALID_VALUE)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(ptr::null_mut(), total as usize, libc::PROT_NONE, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(Code::OUT_OF_MEMORY);
    }
    let raw = at as u64;
    let start = raw.next_multiple_of(alignment);
    let ends = [(raw, start - raw), (start + bytes, raw + total - start - bytes)];
    for (at, bytes) in ends.into_iter().filter(|&(_, bytes)| bytes > 0) {
        // SAFETY: the ends of the mapping above, which no one else knows.
        unsafe { libc::munmap(at as *mut _, bytes as usize) };
    }
    MAP.write().unwrap().reserved.insert(start, bytes);
    Ok(start)
}

/// Gives addresses back; nothing may be mapped in them.
pub fn address_free(start: u64, bytes: u64) -> Result<()> {
    let mut map = MAP.write().unwrap();
    if map.reserved.get(&start) != Some(&bytes) || map.overlaps(&(start..start + bytes)) {
        return Err(Code::INVALID_VALUE);
    }
    map.reserved.remove(&start);
    // SAFETY: reserved by `address_reserve`, and nothing is mapped there.
    unsafe { libc::munmap(start as *mut _, bytes as usize) };
    Ok(())
}

/// Puts memory at reserved addresses; no device reaches it before `grant`.
pub fn map_at(start: u64, bytes: u64, backing: Arc<Backing>) -> Result<()> {
    let mut map = MAP.write().unwrap();
    let range = start..start.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
    let fits = whole(bytes)? && start.is_multiple_of(settings()?.granularity) && bytes <= backing.bytes;
    if !fits || !map.is_reserved(&range) {
        return Err(Code::INVALID_VALUE);
    }
    if map.overlaps(&range) {
        return Err(Code::ALREADY_MAPPED);
    }
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    let raw = backing.descriptor().as_raw_fd();
    // SAFETY: the range is reserved by this module and free.
    let at = unsafe { libc::mmap(start as *mut _, bytes as usize, libc::PROT_NONE, flags, raw, 0) };
    if at == libc::MAP_FAILED {
        return Err(Code::OUT_OF_MEMORY);
    }
    map.regions.insert(start, Region { bytes, kind: Kind::Mapped { backing, access: BTreeMap::new() } });
    Ok(())
}

/// Takes memory away again. Work that is still enqueued finds nothing there.
pub fn unmap(start: u64, bytes: u64) -> Result<()> {
    let mut map = MAP.write().unwrap();
    let range = start..start.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
    let regions = map.exactly(&range)?;
    let mapped = |start| matches!(map.regions[start].kind, Kind::Mapped { .. });
    if regions.is_empty() || !regions.iter().all(mapped) {
        return Err(Code::INVALID_VALUE);
    }
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: whole regions that `map_at` made; the reservation stays.
    let at = unsafe { libc::mmap(start as *mut _, bytes as usize, libc::PROT_NONE, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(Code::OUT_OF_MEMORY);
    }
    for start in regions {
        map.regions.remove(&start);
    }
    Ok(())
}

/// Grants devices access to whole mapped regions, or takes it away.
pub fn grant(start: u64, bytes: u64, wishes: &[Access]) -> Result<()> {
    let settings = settings()?;
    let mut map = MAP.write().unwrap();
    let range = start..start.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
    let regions = map.exactly(&range)?;
    for start in &regions {
        let Kind::Mapped { backing, .. } = &map.regions[start].kind else {
            return Err(Code::INVALID_VALUE);
        };
        if wishes.iter().any(|wish| !settings.reaches(wish.device, backing.device)) {
            return Err(Code::INVALID_DEVICE);
        }
    }
    for start in regions {
        let region = map.regions.get_mut(&start).expect("found above");
        let Kind::Mapped { access, .. } = &mut region.kind else { unreachable!("seen above") };
        for wish in wishes {
            match wish.writes {
                Some(writes) => access.insert(wish.device, writes),
                None => access.remove(&wish.device),
            };
        }
        // Kernels run on the CPU at the device's addresses, so the process itself needs them too.
        let open = if access.is_empty() { libc::PROT_NONE } else { libc::PROT_READ | libc::PROT_WRITE };
        // SAFETY: a region that `map_at` made.
        unsafe { libc::mprotect(start as *mut _, region.bytes as usize, open) };
    }
    Ok(())
}

/// Access of a device to an address.
pub fn granted(device: usize, address: u64) -> Result<Option<bool>> {
    let map = MAP.read().unwrap();
    match map.at(address) {
        Some((_, Region { kind: Kind::Mapped { access, .. }, .. })) => Ok(access.get(&device).copied()),
        _ => Err(Code::INVALID_VALUE),
    }
}
