//! Devices and contexts.

use std::ffi::{c_char, c_int};
use std::mem::zeroed;
use std::ptr;
use std::sync::PoisonError;

use rustix::io::Errno;

use super::{
    FABRICS, Open, bell, close, freed, heard, minus, null, open, poll_cq, post_recv, post_send,
    req_notify_cq, state,
};
use crate::lane::net::verbs::fake::Device;
use crate::lane::net::verbs::fake::state::Opened;
use crate::lane::net::verbs::ffi::*;

pub unsafe extern "C" fn devices<const SLOT: usize>(len: *mut c_int) -> *mut *mut ibv_device {
    let fabric = FABRICS.lock().unwrap_or_else(PoisonError::into_inner)[SLOT].clone();
    let Some(fabric) = fabric.and_then(|fabric| fabric.upgrade()) else { return null(Errno::NOSYS) };
    let state = fabric.state();
    let present = fabric.devices.iter().filter(|device| !state.cards[device.card].gone);
    let mut list: Vec<*mut ibv_device> = present.map(|d| ptr::from_ref(d).cast_mut().cast()).collect();
    // SAFETY: the caller's number.
    unsafe { *len = list.len() as c_int };
    list.push(ptr::null_mut());
    Box::into_raw(list.into_boxed_slice()).cast()
}

pub unsafe extern "C" fn free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: a list of `devices`, which ends with a null.
    unsafe {
        let len = (0..).take_while(|&at| !(*list.add(at)).is_null()).count() + 1;
        drop(Box::from_raw(ptr::slice_from_raw_parts_mut(list, len)));
    }
}

fn device<'a>(device: *mut ibv_device) -> &'a Device {
    // SAFETY: every device of this library is a `Device` of a fabric that the caller keeps.
    unsafe { &*device.cast() }
}

pub unsafe extern "C" fn get_device_name(at: *mut ibv_device) -> *const c_char {
    device(at).name.as_ptr()
}

pub unsafe extern "C" fn open_device(at: *mut ibv_device) -> *mut ibv_context {
    let Device { fabric, card, .. } = device(at);
    let Some(fabric) = fabric.upgrade() else { return null(Errno::NODEV) };
    // SAFETY: null pointers and absent functions are values of this structure.
    let mut raw: ibv_context = unsafe { zeroed() };
    raw.device = at;
    raw.ops.poll_cq = Some(poll_cq);
    raw.ops.req_notify_cq = Some(req_notify_cq);
    raw.ops.post_send = Some(post_send);
    raw.ops.post_recv = Some(post_recv);
    raw.async_fd = bell();
    let number = {
        let mut state = fabric.state();
        let number = state.number();
        let opened = Opened { card: *card, fd: raw.async_fd, news: Default::default() };
        state.contexts.insert(number, opened);
        number
    };
    Box::into_raw(Box::new(Open { raw, number, card: *card, fabric })).cast()
}

pub unsafe extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    let &Open { number, ref raw, .. } = open(context);
    let answer = {
        let mut state = state(context);
        let queues = state.queues.values().any(|queue| queue.context == number);
        let free = !queues && !state.domains.values().any(|&of| of == number);
        state.destroy(free, |state| state.contexts.remove(&number))
    };
    if answer == 0 {
        close(raw.async_fd);
    }
    // SAFETY: this context, not used again.
    unsafe { freed(context.cast::<Open>(), answer) }
}

pub unsafe extern "C" fn query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    let (state, card) = (state(context), open(context).card);
    // SAFETY: the caller's structure.
    let attr = unsafe { &mut *attr };
    (attr.max_sge, attr.max_qp_wr, attr.max_cqe) = (state.cards[card].sges as c_int, 4096, 1 << 16);
    (attr.max_mr_size, attr.phys_port_cnt) = (1 << 40, 1);
    (attr.max_qp_rd_atom, attr.max_qp_init_rd_atom) = (16, 16);
    attr.atomic_cap = if state.cards[card].atomics { 1 } else { IBV_ATOMIC_NONE };
    0
}

pub unsafe extern "C" fn query_port(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int {
    if port != 1 {
        return Errno::INVAL.raw_os_error();
    }
    // SAFETY: the caller's structure.
    let attr = unsafe { &mut *attr };
    let card = &state(context).cards[open(context).card];
    (attr.state, attr.active_mtu) = (card.port, card.mtu);
    (attr.max_mtu, attr.link_layer) = (IBV_MTU_4096, IBV_LINK_LAYER_ETHERNET);
    0
}

pub unsafe extern "C" fn get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    let Open { raw, number, .. } = open(context);
    if let Err(errno) = heard(raw.async_fd) {
        return minus(errno);
    }
    let news = state(context).contexts.get_mut(number).and_then(|opened| opened.news.pop_front());
    let Some((kind, object)) = news else { return minus(Errno::AGAIN) };
    let element = ibv_async_element { qp: ptr::with_exposed_provenance_mut(object) };
    // SAFETY: the caller's structure.
    unsafe { *event = ibv_async_event { element, event_type: kind } };
    0
}

pub unsafe extern "C" fn ack_async_event(_: *mut ibv_async_event) {}
