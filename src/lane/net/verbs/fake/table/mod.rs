//! The C functions. Each finds the fabric behind its object, and reports errors as libibverbs does.

mod completion;
mod device;
mod memory;
mod queue_pair;
mod work;

use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use self::{completion::*, device::*, memory::*, queue_pair::*, work::*};
use super::Fabric;
use super::state::State;
use crate::lane::net::verbs::ffi::*;
use crate::lane::net::verbs::library::Functions;

/// `ibv_get_device_list` has no argument that leads to a fabric: each fabric has a function of its
/// own.
const SLOTS: usize = 32;
static FABRICS: Mutex<[Option<Weak<Fabric>>; SLOTS]> = Mutex::new([const { None }; SLOTS]);

type List = unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device;

macro_rules! lists {
    ($($slot:literal)*) => { [$(devices::<$slot>),*] };
}
const LISTS: [List; SLOTS] =
    lists!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31);

/// Takes a free slot.
pub fn enrol(fabric: &Weak<Fabric>) -> usize {
    let mut fabrics = FABRICS.lock().unwrap_or_else(PoisonError::into_inner);
    let free = fabrics.iter().position(Option::is_none).expect("at most 32 fabrics at once");
    fabrics[free] = Some(fabric.clone());
    free
}

/// Gives it back.
pub fn leave(slot: usize) {
    FABRICS.lock().unwrap_or_else(PoisonError::into_inner)[slot] = None;
}

pub fn functions(slot: usize) -> Functions {
    Functions {
        get_device_list: LISTS[slot],
        free_device_list,
        get_device_name,
        open_device,
        close_device,
        query_device,
        query_port,
        get_async_event,
        ack_async_event,
        alloc_pd,
        dealloc_pd,
        reg_mr,
        dereg_mr,
        create_comp_channel,
        destroy_comp_channel,
        create_cq,
        destroy_cq,
        get_cq_event,
        ack_cq_events,
        create_qp,
        modify_qp,
        destroy_qp,
        reg_mr_iova2: Some(reg_mr_iova2),
        reg_dmabuf_mr: Some(reg_dmabuf_mr),
    }
}

/// Target of `ibv_context` pointers.
#[repr(C)]
struct Open {
    raw: ibv_context,
    number: u32,
    card: usize,
    fabric: Arc<Fabric>,
}

fn open<'a>(context: *mut ibv_context) -> &'a Open {
    // SAFETY: every context of this library is an `Open` until it is closed.
    unsafe { &*context.cast() }
}

fn state<'a>(context: *mut ibv_context) -> MutexGuard<'a, State> {
    open(context).fabric.state()
}

fn null<T>(errno: Errno) -> *mut T {
    errno::set_errno(errno::Errno(errno.raw_os_error()));
    ptr::null_mut()
}

fn minus(errno: Errno) -> c_int {
    null::<c_void>(errno);
    -1
}

/// Frees an object if it was destroyed.
unsafe fn freed<T>(object: *mut T, answer: c_int) -> c_int {
    if answer == 0 {
        // SAFETY: made by `Box::into_raw` in this file, and destroyed once.
        drop(unsafe { Box::from_raw(object) });
    }
    answer
}

/// A descriptor that counts events.
fn bell() -> c_int {
    eventfd(0, EventfdFlags::SEMAPHORE | EventfdFlags::CLOEXEC).map_or(-1, IntoRawFd::into_raw_fd)
}

/// Takes one event, or says that there is none.
fn heard(fd: c_int) -> Result<(), Errno> {
    // SAFETY: a descriptor of an object that is alive.
    rustix::io::read(unsafe { BorrowedFd::borrow_raw(fd) }, &mut [0; 8]).map(drop)
}

fn close(fd: c_int) {
    // SAFETY: made by `bell`, and closed once.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
}
