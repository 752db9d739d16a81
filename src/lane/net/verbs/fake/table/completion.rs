//! Completion queues and their channels.

use std::ffi::{c_int, c_void};
use std::ptr;

use rustix::io::Errno;

use super::{Open, bell, close, freed, heard, minus, null, open, state};
use crate::lane::net::verbs::fake::state::{Pair, Queue};
use crate::lane::net::verbs::ffi::*;

pub unsafe extern "C" fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    Box::into_raw(Box::new(ibv_comp_channel { context, fd: bell(), refcnt: 0 }))
}

pub unsafe extern "C" fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: made by `create_comp_channel`.
    let &ibv_comp_channel { context, fd, .. } = unsafe { &*channel };
    let answer = {
        let mut state = state(context);
        let free = !state.queues.values().any(|queue| queue.fd == fd);
        state.destroy(free, |_| Some(()))
    };
    if answer == 0 {
        close(fd);
    }
    // SAFETY: as above.
    unsafe { freed(channel, answer) }
}

pub unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    entries: c_int,
    tag: *mut c_void,
    channel: *mut ibv_comp_channel,
    _vector: c_int,
) -> *mut ibv_cq {
    if entries < 1 {
        return null(Errno::INVAL);
    }
    // SAFETY: made by `create_comp_channel`.
    let fd = unsafe { (*channel).fd };
    let (mut state, &Open { number, card, .. }) = (state(context), open(context));
    let handle = state.number();
    let (capacity, ready) = (entries as usize, Default::default());
    state.queues.insert(handle, Queue { context: number, card, capacity, ready, fd, armed: false });
    Box::into_raw(Box::new(ibv_cq { context, channel, cq_context: tag, handle, cqe: entries }))
}

pub unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: made by `create_cq`.
    let &ibv_cq { context, handle, .. } = unsafe { &*cq };
    let answer = {
        let mut state = state(context);
        let free = !state.pairs.values().any(|pair| pair.send == handle || pair.receive == handle);
        state.destroy(free, |state| state.queues.remove(&handle))
    };
    // SAFETY: as above.
    unsafe { freed(cq, answer) }
}

pub unsafe extern "C" fn get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    tag: *mut *mut c_void,
) -> c_int {
    // SAFETY: made by `create_comp_channel`; the caller's places.
    unsafe {
        (*cq, *tag) = (ptr::null_mut(), ptr::null_mut());
        heard((*channel).fd).map_or_else(minus, |()| 0)
    }
}

pub unsafe extern "C" fn ack_cq_events(_: *mut ibv_cq, _: u32) {}

pub unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, _: c_int) -> c_int {
    // SAFETY: made by `create_cq`.
    let &ibv_cq { context, handle, .. } = unsafe { &*cq };
    state(context).queues.get_mut(&handle).map_or(Errno::INVAL.raw_os_error(), |queue| {
        queue.armed = true;
        0
    })
}

pub unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: made by `create_cq`.
    let &ibv_cq { context, handle, .. } = unsafe { &*cq };
    let mut state = state(context);
    if state.held {
        let of = |(&number, pair): (&u32, &Pair)| (pair.send == handle).then_some(number);
        let pairs: Vec<u32> = state.pairs.iter().filter_map(of).collect();
        pairs.into_iter().for_each(|pair| _ = state.step(pair));
    }
    let mut taken = 0;
    while taken < entries
        && let Some(next) = state.take(handle)
    {
        // SAFETY: the caller has so many places.
        unsafe { *wc.add(taken as usize) = next };
        taken += 1;
    }
    taken
}
