//! Domains and regions.

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::ptr;

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::{freed, null, open, state};
use crate::lane::net::verbs::fake::state::Region;
use crate::lane::net::verbs::ffi::*;

pub unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    let mut state = state(context);
    let handle = state.number();
    state.domains.insert(handle, open(context).number);
    Box::into_raw(Box::new(ibv_pd { context, handle }))
}

pub unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: made by `alloc_pd`.
    let ibv_pd { context, handle } = unsafe { ptr::read(pd) };
    let answer = {
        let mut state = state(context);
        let regions = state.regions.values().any(|region| region.domain == handle);
        let free = !regions && !state.pairs.values().any(|pair| pair.domain == handle);
        state.destroy(free, |state| state.domains.remove(&handle))
    };
    // SAFETY: as above.
    unsafe { freed(pd, answer) }
}

fn register(pd: *mut ibv_pd, at: usize, len: usize, base: u64, access: u32, mapped: bool) -> *mut ibv_mr {
    // SAFETY: made by `alloc_pd`.
    let &ibv_pd { context, handle: domain } = unsafe { &*pd };
    let remote = access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) != 0;
    if remote && access & IBV_ACCESS_LOCAL_WRITE == 0 {
        return null(Errno::INVAL);
    }
    let mut state = state(context);
    let card = state.contexts[&open(context).number].card;
    let refuses = &mut state.cards[card].refuses;
    if *refuses > 0 {
        *refuses -= 1;
        return null(Errno::FAULT);
    }
    let key = state.number();
    state.regions.insert(key, Region { domain, base, at, len: len as u64, access, mapped });
    let addr = ptr::with_exposed_provenance_mut(at);
    Box::into_raw(Box::new(ibv_mr { context, pd, addr, length: len, handle: key, lkey: key, rkey: key }))
}

pub unsafe extern "C" fn reg_mr(pd: *mut ibv_pd, at: *mut c_void, len: usize, access: c_int) -> *mut ibv_mr {
    if access as u32 & IBV_ACCESS_RELAXED_ORDERING != 0 {
        return null(Errno::INVAL);
    }
    let at = at.expose_provenance();
    register(pd, at, len, at as u64, access as u32, false)
}

pub unsafe extern "C" fn reg_mr_iova2(
    pd: *mut ibv_pd,
    at: *mut c_void,
    len: usize,
    iova: u64,
    access: u32,
) -> *mut ibv_mr {
    register(pd, at.expose_provenance(), len, iova, access, false)
}

pub unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    len: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: a fresh mapping of the caller's descriptor.
    let mapped = unsafe {
        let fd = BorrowedFd::borrow_raw(fd);
        rustix::mm::mmap(
            ptr::null_mut(),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            fd,
            offset,
        )
    };
    match mapped {
        Ok(at) => register(pd, at.expose_provenance(), len, iova, access as u32, true),
        Err(errno) => null(errno),
    }
}

pub unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: made by `register`.
    let &ibv_mr { context, lkey, addr, length, .. } = unsafe { &*mr };
    let region = state(context).regions.remove(&lkey);
    if region.is_some_and(|region| region.mapped) {
        // SAFETY: mapped for this region alone.
        let _ = unsafe { rustix::mm::munmap(addr, length) };
    }
    // SAFETY: as above.
    unsafe { freed(mr, 0) }
}
