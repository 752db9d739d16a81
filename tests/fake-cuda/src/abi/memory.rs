//! Memory of devices and pinned memory of the host.

use std::ffi::{c_int, c_uint};

use super::call;
use super::context::here;
use super::pointers::Out;
use crate::capture;
use crate::code::{Code, Result};
use crate::counters::{COUNTERS, add};
use crate::driver::settings;
use crate::lock;
use crate::memory::{self, Kind, MAP};

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAlloc_v2(at: Out<u64>, bytes: usize) -> c_int {
    call(|| {
        let context = here()?;
        capture::unsafe_call()?;
        add(&COUNTERS.allocations, 1);
        at.put(memory::allocate(context.device, bytes as u64)?)
    })
}

/// Waits for all work of the context, as drivers do.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(at: u64) -> c_int {
    call(|| {
        let context = here()?;
        capture::unsafe_call()?;
        lock::hold(|| context.synchronize())?;
        if at == 0 { Ok(()) } else { memory::release(at) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) -> c_int {
    call(|| {
        free.put(memory::free(here()?.device)? as usize)?;
        total.put(settings()?.memory as usize)
    })
}

fn pin(at: Out<u64>, bytes: usize) -> Result<()> {
    here()?;
    capture::unsafe_call()?;
    add(&COUNTERS.allocations, 1);
    at.put(memory::pin(bytes as u64)?)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostAlloc(at: Out<u64>, bytes: usize, flags: c_uint) -> c_int {
    call(|| if flags & !7 == 0 { pin(at, bytes) } else { Err(Code::INVALID_VALUE) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocHost_v2(at: Out<u64>, bytes: usize) -> c_int {
    call(|| pin(at, bytes))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(at: u64) -> c_int {
    call(|| {
        let context = here()?;
        capture::unsafe_call()?;
        lock::hold(|| context.synchronize())?;
        memory::unpin(at)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(at: u64, bytes: usize, flags: c_uint) -> c_int {
    call(|| {
        here()?;
        capture::unsafe_call()?;
        if flags & !0xf == 0 { memory::register(at, bytes as u64) } else { Err(Code::INVALID_VALUE) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(at: u64) -> c_int {
    call(|| {
        here()?;
        memory::unregister(at)
    })
}

fn is_host(at: u64) -> Result<()> {
    here()?;
    let map = MAP.read().unwrap();
    let region = map.at(at).ok_or(Code::INVALID_VALUE)?.1;
    if matches!(region.kind, Kind::Pinned | Kind::Registered) { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostGetDevicePointer_v2(device: Out<u64>, host: u64, _flags: c_uint) -> c_int {
    call(|| {
        is_host(host)?;
        device.put(host)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostGetFlags(flags: Out<c_uint>, host: u64) -> c_int {
    call(|| {
        is_host(host)?;
        // Portable, and mapped: so it is for all of it.
        flags.put(3)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAddressRange_v2(start: Out<u64>, bytes: Out<usize>, at: u64) -> c_int {
    call(|| {
        here()?;
        let map = MAP.read().unwrap();
        let (from, region) = map.at(at).ok_or(Code::NOT_FOUND)?;
        start.offer(from);
        bytes.offer(region.bytes as usize);
        Ok(())
    })
}

/// NICs' writes into device memory are plain memory here, and visible at once.
#[unsafe(no_mangle)]
pub extern "C" fn cuFlushGPUDirectRDMAWrites(_target: c_uint, _scope: c_uint) -> c_int {
    call(|| {
        here()?;
        add(&COUNTERS.flushes, 1);
        Ok(())
    })
}
