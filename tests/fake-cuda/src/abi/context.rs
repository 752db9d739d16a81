//! Contexts: the primary ones of devices, and which is current in a thread.

use std::cell::RefCell;
use std::ffi::{c_int, c_uint, c_ulonglong};
use std::sync::Arc;

use super::pointers::Out;
use super::{call, local};
use crate::capture;
use crate::code::{Code, Result};
use crate::counters::{COUNTERS, add};
use crate::driver::{self, Context, settings};
use crate::stream::PRIORITIES;

thread_local! {
    /// The last is current.
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The current context, whatever happened to it.
pub fn current() -> Result<Arc<Context>> {
    settings()?;
    let handle = STACK.with_borrow(|stack| stack.last().copied());
    Context::of(handle.filter(|&handle| handle != 0).ok_or(Code::INVALID_CONTEXT)?)
}

/// The current context, if no error ended it.
pub fn here() -> Result<Arc<Context>> {
    let context = current()?;
    context.alive()?;
    Ok(context)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(context: Out<usize>, device: c_int) -> c_int {
    call(|| context.put(driver::retain(driver::device(device)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int {
    call(|| driver::release(driver::device(device)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxGetState(device: c_int, flags: Out<c_uint>, active: Out<c_int>) -> c_int {
    call(|| {
        flags.put(0)?;
        active.put(c_int::from(driver::active(driver::device(device)?).is_some()))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: usize) -> c_int {
    local(|| {
        settings()?;
        if context != 0 {
            Context::of(context)?;
        }
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            stack.push(context);
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetCurrent(context: Out<usize>) -> c_int {
    local(|| {
        settings()?;
        context.put(STACK.with_borrow(|stack| stack.last().copied().unwrap_or(0)))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: usize) -> c_int {
    local(|| {
        Context::of(context)?;
        STACK.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPopCurrent_v2(context: Out<usize>) -> c_int {
    local(|| {
        let popped = STACK.with_borrow_mut(|stack| stack.pop());
        context.offer(popped.ok_or(Code::INVALID_CONTEXT)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetDevice(device: Out<c_int>) -> c_int {
    local(|| device.put(current()?.device as c_int))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetId(context: usize, id: Out<c_ulonglong>) -> c_int {
    local(|| {
        let context = if context == 0 { current()? } else { Context::of(context)? };
        id.put(context.id)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetFlags(flags: Out<c_uint>) -> c_int {
    local(|| {
        current()?;
        flags.put(0)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> c_int {
    call(|| {
        let context = here()?;
        capture::unsafe_call()?;
        if context.all_streams().iter().any(|stream| stream.is_capturing()) {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        add(&COUNTERS.host_waits, 1);
        context.synchronize()
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetStreamPriorityRange(lowest: Out<c_int>, highest: Out<c_int>) -> c_int {
    call(|| {
        current()?;
        lowest.offer(PRIORITIES.0);
        highest.offer(PRIORITIES.1);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxEnablePeerAccess(peer: usize, flags: c_uint) -> c_int {
    call(|| {
        let (context, peer) = (here()?, Context::of(peer)?);
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if context.device == peer.device {
            return Err(Code::INVALID_DEVICE);
        }
        if !settings()?.reaches(context.device, peer.device) {
            return Err(Code::PEER_ACCESS_UNSUPPORTED);
        }
        let fresh = context.peers.lock().unwrap().insert(peer.device);
        if fresh { Ok(()) } else { Err(Code::PEER_ACCESS_ALREADY_ENABLED) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxDisablePeerAccess(peer: usize) -> c_int {
    call(|| {
        let (context, peer) = (here()?, Context::of(peer)?);
        let was = context.peers.lock().unwrap().remove(&peer.device);
        if was { Ok(()) } else { Err(Code::PEER_ACCESS_NOT_ENABLED) }
    })
}
