//! Virtual memory management.

use std::collections::BTreeSet;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{IntoRawFd, RawFd};
use std::sync::{Arc, Mutex};

use super::call;
use super::context::here;
use super::pointers::{In, Out};
use crate::code::{Code, Result};
use crate::counters::{COUNTERS, add};
use crate::driver::{self, settings};
use crate::lock;
use crate::memory::{self, ALLOCATIONS, Access, Backing, MAP};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: c_uint = 1;

/// Calls of devices that are refused, once each.
static REFUSED: Mutex<BTreeSet<(usize, u32)>> = Mutex::new(BTreeSet::new());

const CREATE: u32 = 0;
const MAP_MEMORY: u32 = 1;
const SET_ACCESS: u32 = 2;

/// The next call of this kind for this device is refused.
pub fn refuse(device: usize, kind: u32) {
    REFUSED.lock().unwrap().insert((device, kind));
}

fn check_refused(device: usize, kind: u32) -> Result<()> {
    if REFUSED.lock().unwrap().remove(&(device, kind)) { Err(Code::OUT_OF_MEMORY) } else { Ok(()) }
}

/// A call that changes what a device's addresses mean. With locks on it waits for the context that
/// is current, as a driver may that has to change the tables of a device at work.
fn remap(kind: u32, change: impl FnOnce() -> Result<()>) -> Result<()> {
    let context = here().ok();
    if let Some(context) = context {
        if settings()?.locks {
            // What has failed on the device is no failure of this call.
            let _ = lock::hold(|| context.synchronize());
        }
        check_refused(context.device, kind)?;
    }
    add(&COUNTERS.mappings, 1);
    change()
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    kind: c_uint,
    id: c_int,
}

impl Location {
    fn device(self) -> Result<usize> {
        const DEVICE: c_uint = 1;
        if self.kind == DEVICE { driver::device(self.id) } else { Err(Code::NOT_SUPPORTED) }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Properties {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    metadata: *mut c_void,
    compression: u8,
    rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Wish {
    location: Location,
    flags: c_uint,
}

impl Properties {
    fn device(&self) -> Result<usize> {
        const PINNED: c_uint = 1;
        if self.kind != PINNED {
            return Err(Code::INVALID_VALUE);
        }
        if self.handle_types & !DESCRIPTOR != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        self.location.device()
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAllocationGranularity(
    bytes: Out<usize>,
    how: In<Properties>,
    _option: c_uint,
) -> c_int {
    call(|| {
        how.get()?.device()?;
        bytes.put(settings()?.granularity as usize)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemCreate(
    handle: Out<u64>,
    bytes: usize,
    how: In<Properties>,
    flags: c_ulonglong,
) -> c_int {
    call(|| {
        let how = how.get()?;
        let device = how.device()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        check_refused(device, CREATE)?;
        add(&COUNTERS.allocations, 1);
        let made = memory::create(device, bytes as u64, how.handle_types == DESCRIPTOR, how.rdma == 1)?;
        handle.put(made as u64)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemRelease(handle: u64) -> c_int {
    call(|| allocation(handle).and_then(|_| ALLOCATIONS.remove(handle as usize)).map(|_| ()))
}

fn allocation(handle: u64) -> Result<Arc<Backing>> {
    driver::settings()?;
    ALLOCATIONS.get(handle as usize).map_err(|_| Code::INVALID_VALUE)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressReserve(
    at: Out<u64>,
    bytes: usize,
    alignment: usize,
    _wish: u64,
    flags: c_ulonglong,
) -> c_int {
    call(|| {
        driver::settings()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        at.put(memory::address_reserve(bytes as u64, alignment as u64)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressFree(at: u64, bytes: usize) -> c_int {
    call(|| memory::address_free(at, bytes as u64))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemMap(at: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong) -> c_int {
    call(|| {
        if offset != 0 || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        remap(MAP_MEMORY, || memory::map_at(at, bytes as u64, allocation(handle)?))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemUnmap(at: u64, bytes: usize) -> c_int {
    call(|| memory::unmap(at, bytes as u64))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemSetAccess(at: u64, bytes: usize, wishes: In<Wish>, count: usize) -> c_int {
    call(|| {
        let access = |wish: Wish| {
            let writes = match wish.flags {
                0 => None,
                1 => Some(false),
                3 => Some(true),
                _ => return Err(Code::INVALID_VALUE),
            };
            Ok(Access { device: wish.location.device()?, writes })
        };
        let wishes = wishes.all(count)?.into_iter().map(access).collect::<Result<Vec<_>>>()?;
        remap(SET_ACCESS, || memory::grant(at, bytes as u64, &wishes))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAccess(flags: Out<c_ulonglong>, location: In<Location>, at: u64) -> c_int {
    call(|| {
        let granted = memory::granted(location.get()?.device()?, at)?;
        flags.put(match granted {
            None => 0,
            Some(false) => 1,
            Some(true) => 3,
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemExportToShareableHandle(
    out: Out<c_void>,
    handle: u64,
    kind: c_uint,
    flags: c_ulonglong,
) -> c_int {
    call(|| {
        let backing = allocation(handle)?;
        if kind != DESCRIPTOR || flags != 0 || !backing.exportable {
            return Err(Code::INVALID_VALUE);
        }
        out.cast::<RawFd>().put(backing.export()?.into_raw_fd())
    })
}

/// The descriptor is the pointer's value; it stays the caller's.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemImportFromShareableHandle(handle: Out<u64>, descriptor: usize, kind: c_uint) -> c_int {
    call(|| {
        driver::settings()?;
        let raw =
            RawFd::try_from(descriptor).ok().filter(|_| kind == DESCRIPTOR).ok_or(Code::INVALID_VALUE)?;
        let backing = Backing::import(raw)?;
        driver::device(backing.device as c_int)?;
        handle.put(ALLOCATIONS.insert(Arc::new(backing)) as u64)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAllocationPropertiesFromHandle(out: Out<Properties>, handle: u64) -> c_int {
    call(|| {
        let backing = allocation(handle)?;
        out.put(Properties {
            kind: 1,
            handle_types: if backing.exportable { DESCRIPTOR } else { 0 },
            location: Location { kind: 1, id: backing.device as c_int },
            metadata: std::ptr::null_mut(),
            compression: 0,
            rdma: u8::from(backing.rdma),
            usage: 0,
            reserved: [0; 4],
        })
    })
}

/// One more handle for the memory mapped at an address; it is released like the first.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemRetainAllocationHandle(handle: Out<u64>, at: u64) -> c_int {
    call(|| {
        driver::settings()?;
        let map = MAP.read().unwrap();
        let mapped = map.at(at).and_then(|(_, region)| region.kind.mapped()).ok_or(Code::INVALID_VALUE)?;
        handle.put(ALLOCATIONS.insert(Arc::clone(mapped)) as u64)
    })
}
