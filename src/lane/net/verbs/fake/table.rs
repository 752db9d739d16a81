//! The C functions of the fake libibverbs: devices, memory, completion queues, queue pairs,
//! requests.
//!
//! Each finds the fabric behind its object, and reports errors as libibverbs does.
//!
//! ```text
//!   get_device_list    no argument: one function per fabric, by its slot 0 to 31 --> Weak<Fabric>
//!   open_device        Open | raw: ibv_context | number | NIC | fabric |      callers hold a pointer to `raw`
//!   all others         object --> its ibv_context --> Open --> State of the fabric, locked
//!   post, poll         by the operations of the ibv_context --> execute
//! ```

use std::ffi::{c_char, c_int, c_void};
use std::mem::zeroed;
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::{Channel, Device, Fabric, Job, Locked, Opened, Pair, Queue, Region};
use crate::bootstrap::locks;
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
    nic: usize,
    fabric: Arc<Fabric>,
}

fn open<'a>(context: *mut ibv_context) -> &'a Open {
    // SAFETY: every context of this library is an `Open` until it is closed.
    unsafe { &*context.cast() }
}

fn state<'a>(context: *mut ibv_context) -> Locked<'a> {
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
fn event_fd() -> c_int {
    eventfd(0, EventfdFlags::SEMAPHORE | EventfdFlags::CLOEXEC).map_or(-1, IntoRawFd::into_raw_fd)
}

/// Takes one event, or says that there is none.
fn take_event(fd: c_int) -> Result<(), Errno> {
    // SAFETY: a descriptor of an object that is alive.
    rustix::io::read(unsafe { BorrowedFd::borrow_raw(fd) }, &mut [0; 8]).map(drop)
}

fn close(fd: c_int) {
    // SAFETY: made by `event_fd`, and closed once.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
}

unsafe extern "C" fn devices<const SLOT: usize>(len: *mut c_int) -> *mut *mut ibv_device {
    let fabric = FABRICS.lock().unwrap_or_else(PoisonError::into_inner)[SLOT].clone();
    let Some(fabric) = fabric.and_then(|fabric| fabric.upgrade()) else { return null(Errno::NOSYS) };
    let state = fabric.state();
    let present = fabric.devices.iter().filter(|device| !state.nics[device.nic].gone);
    let mut list: Vec<*mut ibv_device> = present.map(|d| ptr::from_ref(d).cast_mut().cast()).collect();
    // SAFETY: the caller's number.
    unsafe { *len = list.len() as c_int };
    list.push(ptr::null_mut());
    Box::into_raw(list.into_boxed_slice()).cast()
}

unsafe extern "C" fn free_device_list(list: *mut *mut ibv_device) {
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

unsafe extern "C" fn get_device_name(at: *mut ibv_device) -> *const c_char {
    device(at).name.as_ptr()
}

unsafe extern "C" fn open_device(at: *mut ibv_device) -> *mut ibv_context {
    let Device { fabric, nic, .. } = device(at);
    let Some(fabric) = fabric.upgrade() else { return null(Errno::NODEV) };
    // SAFETY: null pointers and absent functions are values of this structure.
    let mut raw: ibv_context = unsafe { zeroed() };
    raw.device = at;
    raw.ops.poll_cq = Some(poll_cq);
    raw.ops.req_notify_cq = Some(req_notify_cq);
    raw.ops.post_send = Some(post_send);
    raw.ops.post_recv = Some(post_recv);
    raw.async_fd = event_fd();
    let number = {
        let mut state = fabric.state();
        let number = state.number();
        let opened = Opened { nic: *nic, fd: raw.async_fd, news: Default::default() };
        state.contexts.insert(number, opened);
        number
    };
    Box::into_raw(Box::new(Open { raw, number, nic: *nic, fabric })).cast()
}

unsafe extern "C" fn close_device(context: *mut ibv_context) -> c_int {
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

unsafe extern "C" fn query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    let (state, nic) = (state(context), open(context).nic);
    // SAFETY: the caller's structure.
    let attr = unsafe { &mut *attr };
    (attr.max_sge, attr.max_qp_wr, attr.max_cqe) = (state.nics[nic].sges as c_int, 4096, 1 << 16);
    (attr.max_mr_size, attr.phys_port_cnt) = (1 << 40, state.nics[nic].wired);
    (attr.max_qp_rd_atom, attr.max_qp_init_rd_atom) = (16, 16);
    (attr.vendor_id, attr.vendor_part_id) = state.nics[nic].vendor;
    attr.atomic_cap = if state.nics[nic].atomics { 1 } else { IBV_ATOMIC_NONE };
    0
}

unsafe extern "C" fn query_port(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int {
    // SAFETY: the caller's structure.
    let attr = unsafe { &mut *attr };
    let nic = &mut state(context).nics[open(context).nic];
    nic.statistics.locked_queries += locks::held();
    if !(1..=nic.wired).contains(&port) {
        return Errno::INVAL.raw_os_error();
    }
    if nic.gone {
        return Errno::IO.raw_os_error();
    }
    (attr.state, attr.active_mtu) = (if port == nic.wired { nic.port } else { nic.others }, nic.mtu);
    (attr.max_mtu, attr.link_layer, attr.lid) = (IBV_MTU_4096, nic.link, nic.lid);
    attr.flags = if nic.needs_global_header { IBV_QPF_GRH_REQUIRED } else { 0 };
    0
}

unsafe extern "C" fn get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    let Open { raw, number, .. } = open(context);
    if let Err(errno) = take_event(raw.async_fd) {
        return minus(errno);
    }
    let news = state(context).contexts.get_mut(number).and_then(|opened| opened.news.pop_front());
    let Some((kind, object)) = news else { return minus(Errno::AGAIN) };
    let element = ibv_async_element { qp: ptr::with_exposed_provenance_mut(object) };
    // SAFETY: the caller's structure.
    unsafe { *event = ibv_async_event { element, event_type: kind } };
    0
}

unsafe extern "C" fn ack_async_event(_: *mut ibv_async_event) {}

unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    let mut state = state(context);
    let handle = state.number();
    state.domains.insert(handle, open(context).number);
    Box::into_raw(Box::new(ibv_pd { context, handle }))
}

unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
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
    let nic = state.contexts[&open(context).number].nic;
    let refuses = &mut state.nics[nic].refuses;
    if *refuses > 0 {
        *refuses -= 1;
        return null(Errno::FAULT);
    }
    let nic_of = |region: &Region| state.contexts[&state.domains[&region.domain]].nic;
    let locked: u64 = state.regions.values().filter(|region| nic_of(region) == nic).map(|r| r.len).sum();
    if locked.saturating_add(len as u64) > state.nics[nic].lockable {
        return null(Errno::NOMEM);
    }
    let key = state.number();
    state.regions.insert(key, Region { domain, base, at, len: len as u64, access, mapped });
    let addr = ptr::with_exposed_provenance_mut(at);
    Box::into_raw(Box::new(ibv_mr { context, pd, addr, length: len, handle: key, lkey: key, rkey: key }))
}

unsafe extern "C" fn reg_mr(pd: *mut ibv_pd, at: *mut c_void, len: usize, access: c_int) -> *mut ibv_mr {
    if access as u32 & IBV_ACCESS_RELAXED_ORDERING != 0 {
        return null(Errno::INVAL);
    }
    let at = at.expose_provenance();
    register(pd, at, len, at as u64, access as u32, false)
}

unsafe extern "C" fn reg_mr_iova2(
    pd: *mut ibv_pd,
    at: *mut c_void,
    len: usize,
    iova: u64,
    access: u32,
) -> *mut ibv_mr {
    register(pd, at.expose_provenance(), len, iova, access, false)
}

unsafe extern "C" fn reg_dmabuf_mr(
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

unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
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

unsafe extern "C" fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    let (fd, nic) = (event_fd(), open(context).nic);
    state(context).channels.insert(fd, Channel { nic, events: Default::default() });
    Box::into_raw(Box::new(ibv_comp_channel { context, fd, refcnt: 0 }))
}

unsafe extern "C" fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: made by `create_comp_channel`.
    let &ibv_comp_channel { context, fd, .. } = unsafe { &*channel };
    let answer = {
        let mut state = state(context);
        let free = !state.queues.values().any(|queue| queue.fd == Some(fd));
        state.destroy(free, |state| state.channels.remove(&fd))
    };
    if answer == 0 {
        close(fd);
    }
    // SAFETY: as above.
    unsafe { freed(channel, answer) }
}

unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    entries: c_int,
    tag: *mut c_void,
    channel: *mut ibv_comp_channel,
    _vector: c_int,
) -> *mut ibv_cq {
    if entries < 1 {
        return null(Errno::INVAL);
    }
    // SAFETY: made by `create_comp_channel`, or null.
    let fd = unsafe { channel.as_ref() }.map(|channel| channel.fd);
    let (mut state, &Open { number, nic, .. }) = (state(context), open(context));
    let handle = state.number();
    let object = Box::into_raw(Box::new(ibv_cq { context, channel, cq_context: tag, handle, cqe: entries }));
    let queue = Queue {
        context: number,
        nic,
        capacity: entries as usize,
        ready: Default::default(),
        polls: 0,
        fd,
        armed: false,
        told: false,
        unacknowledged: 0,
        object: object.expose_provenance(),
    };
    state.queues.insert(handle, queue);
    object
}

unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: made by `create_cq`.
    let &ibv_cq { context, handle, .. } = unsafe { &*cq };
    let answer = {
        let mut state = state(context);
        let used = state.pairs.values().any(|pair| pair.send == handle || pair.receive == handle);
        // The real call would wait for ever.
        let unacknowledged = state.queues.get(&handle).is_some_and(|queue| queue.unacknowledged > 0);
        let queue = state.destroy(!used && !unacknowledged, |state| state.queues.remove(&handle));
        let events = state.channels.iter_mut().flat_map(|(&fd, channel)| {
            let before = channel.events.len();
            channel.events.retain(|&told| queue != 0 || told != handle);
            std::iter::repeat_n(fd, before - channel.events.len())
        });
        events.for_each(|fd| _ = take_event(fd));
        queue
    };
    // SAFETY: as above.
    unsafe { freed(cq, answer) }
}

unsafe extern "C" fn get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    tag: *mut *mut c_void,
) -> c_int {
    // SAFETY: made by `create_comp_channel`.
    let &ibv_comp_channel { context, fd, .. } = unsafe { &*channel };
    let mut state = state(context);
    if let Err(errno) = take_event(fd) {
        return minus(errno);
    }
    let told = state.channels.get_mut(&fd).and_then(|channel| channel.events.pop_front());
    let Some(queue) = told.and_then(|handle| state.queues.get_mut(&handle)) else {
        return minus(Errno::AGAIN);
    };
    (queue.told, queue.unacknowledged) = (false, queue.unacknowledged + 1);
    // SAFETY: the caller's places.
    unsafe { (*cq, *tag) = (ptr::with_exposed_provenance_mut(queue.object), ptr::null_mut()) };
    0
}

unsafe extern "C" fn ack_cq_events(cq: *mut ibv_cq, events: u32) {
    // SAFETY: made by `create_cq`.
    let &ibv_cq { context, handle, .. } = unsafe { &*cq };
    if let Some(queue) = state(context).queues.get_mut(&handle) {
        queue.unacknowledged -= events;
    }
}

unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, _: c_int) -> c_int {
    // SAFETY: made by `create_cq`.
    let &ibv_cq { context, handle, .. } = unsafe { &*cq };
    state(context).queues.get_mut(&handle).map_or(Errno::INVAL.raw_os_error(), |queue| {
        queue.armed = !queue.told;
        0
    })
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: made by `create_cq`.
    let &ibv_cq { context, handle, .. } = unsafe { &*cq };
    let mut state = state(context);
    if state.held {
        let requests = state.executes(handle);
        let of = |(&number, pair): (&u32, &Pair)| (pair.send == handle).then_some(number);
        let pairs: Vec<u32> = state.pairs.iter().filter_map(of).collect();
        for pair in pairs {
            (0..requests).for_each(|_| _ = state.step(pair));
        }
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

unsafe extern "C" fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: made by `alloc_pd`; the caller's structure, with queues made by `create_cq`.
    let (&ibv_pd { context, handle: domain }, attr) = unsafe { (&*pd, &mut *attr) };
    // SAFETY: as above.
    let (send, receive) = unsafe { ((*attr.send_cq).handle, (*attr.recv_cq).handle) };
    let (mut state, nic) = (state(context), open(context).nic);
    let (limits, cap) = (&state.nics[nic], attr.cap);
    let sges = cap.max_send_sge.max(cap.max_recv_sge);
    if cap.max_inline_data > limits.inline || sges > limits.sges || attr.qp_type != IBV_QPT_RC {
        return null(Errno::INVAL);
    }
    let number = state.number();
    let object = Box::into_raw(Box::new(ibv_qp {
        context,
        qp_context: attr.qp_context,
        pd,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        handle: number,
        qp_num: number,
        state: 0,
        qp_type: attr.qp_type,
    }));
    let pair = Pair {
        nic,
        domain,
        send,
        receive,
        cap,
        state: 0,
        peer: 0,
        peer_nic: None,
        pkey: 0,
        rnr_retries: 0,
        jobs: Default::default(),
        receives: Default::default(),
        used: 0,
        unsignaled: 0,
        held_back: false,
        object: object.expose_provenance(),
    };
    state.pairs.insert(number, pair);
    object
}

unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    /// Attributes that the standard requires in each step.
    const INIT: c_int = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    const RTR: c_int = IBV_QP_STATE
        | IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;
    /// May come along: until then, the key is that of the step before.
    const RTR_PKEY: c_int = RTR | IBV_QP_PKEY_INDEX;
    const RTS: c_int = IBV_QP_STATE
        | IBV_QP_SQ_PSN
        | IBV_QP_TIMEOUT
        | IBV_QP_RETRY_CNT
        | IBV_QP_RNR_RETRY
        | IBV_QP_MAX_QP_RD_ATOMIC;
    // SAFETY: made by `create_qp`; the caller's structure.
    let (&ibv_qp { context, qp_num, .. }, attr) = unsafe { (&*qp, &*attr) };
    let mut state = state(context);
    let from = open(context).nic;
    let pkey = state.nics[from].pkeys.get(&attr.pkey_index).copied().filter(|&key| key & 0x7fff != 0);
    let (there, wired) = (state.destination(from, &attr.ah_attr), state.nics[from].wired);
    let pair = state.pair(qp_num);
    match (pair.state, attr.qp_state, mask) {
        (0, IBV_QPS_INIT, INIT) if attr.port_num == wired => match pkey {
            Some(key) => pair.pkey = key,
            None => return Errno::INVAL.raw_os_error(),
        },
        (IBV_QPS_INIT, IBV_QPS_RTR, RTR | RTR_PKEY) if attr.ah_attr.port_num == wired => {
            match (there, pkey) {
                (Err(errno), _) => return errno.raw_os_error(),
                (_, None) if mask == RTR_PKEY => return Errno::INVAL.raw_os_error(),
                (Ok(nic), key) => {
                    (pair.peer, pair.peer_nic) = (attr.dest_qp_num, nic);
                    pair.pkey = key.filter(|_| mask == RTR_PKEY).unwrap_or(pair.pkey);
                }
            }
        }
        (IBV_QPS_RTR, IBV_QPS_RTS, RTS) => pair.rnr_retries = attr.rnr_retry,
        (_, IBV_QPS_ERR, IBV_QP_STATE) => {
            state.fail(qp_num);
            return 0;
        }
        _ => return Errno::INVAL.raw_os_error(),
    }
    pair.state = attr.qp_state;
    let peer = pair.peer;
    if !state.held {
        state.run(peer);
    }
    0
}

unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: made by `create_qp`.
    let &ibv_qp { context, qp_num, .. } = unsafe { &*qp };
    let answer = state(context).destroy(true, |state| state.pairs.remove(&qp_num));
    // SAFETY: as above.
    unsafe { freed(qp, answer) }
}

unsafe fn pieces(list: *mut ibv_sge, len: c_int) -> Vec<ibv_sge> {
    // SAFETY: the caller's list.
    (0..len as usize).map(|at| unsafe { *list.add(at) }).collect()
}

unsafe fn job(wr: &ibv_send_wr) -> Job {
    // SAFETY: the request's own list, and the target that its opcode has.
    let (pieces, wr_to) = unsafe { (pieces(wr.sg_list, wr.num_sge), wr.wr) };
    let (addr, rkey, add) = match wr.opcode {
        // SAFETY: as above.
        IBV_WR_ATOMIC_FETCH_AND_ADD => unsafe {
            (wr_to.atomic.remote_addr, wr_to.atomic.rkey, wr_to.atomic.compare_add)
        },
        // SAFETY: as above.
        _ => unsafe { (wr_to.rdma.remote_addr, wr_to.rdma.rkey, 0) },
    };
    let inline = (wr.send_flags & IBV_SEND_INLINE != 0).then(|| {
        let mut bytes = Vec::new();
        for piece in &pieces {
            let at: *const u8 = ptr::with_exposed_provenance(piece.addr as usize);
            // SAFETY: what travels inside a request is readable when it is posted.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(at, piece.length as usize) });
        }
        bytes
    });
    let (wr_id, opcode, flags, immediate) = (wr.wr_id, wr.opcode, wr.send_flags, wr.imm_data);
    Job { wr_id, opcode, flags, immediate, addr, rkey, add, pieces, inline, not_ready: false, placed: false }
}

unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: made by `create_qp`.
    let &ibv_qp { context, qp_num, .. } = unsafe { &*qp };
    let (mut state, nic) = (state(context), open(context).nic);
    state.nics[nic].statistics.doorbells += 1;
    let gone = state.nics[nic].gone;
    let mut answer = 0;
    // SAFETY: a chain of requests that ends with a null.
    while let Some(request) = unsafe { wr.as_ref() } {
        // SAFETY: as above.
        let job = unsafe { job(request) };
        let inline = job.inline.as_ref().map_or(0, Vec::len);
        let pair = state.pair(qp_num);
        let refusal = match () {
            _ if gone => Some(Errno::IO),
            _ if !matches!(pair.state, IBV_QPS_RTS | IBV_QPS_ERR) => Some(Errno::INVAL),
            _ if job.pieces.len() > pair.cap.max_send_sge as usize => Some(Errno::INVAL),
            _ if inline > pair.cap.max_inline_data as usize => Some(Errno::INVAL),
            _ if pair.used == pair.cap.max_send_wr => Some(Errno::NOMEM),
            _ => None,
        };
        if let Some(errno) = refusal {
            // SAFETY: the caller's place.
            unsafe { *bad = wr };
            answer = errno.raw_os_error();
            break;
        }
        pair.used += 1;
        pair.jobs.push_back(job);
        state.nics[nic].statistics.requests += 1;
        wr = request.next;
    }
    let now = state.pair(qp_num).state;
    match now {
        IBV_QPS_ERR => state.fail(qp_num),
        _ if !state.held => state.run(qp_num),
        _ => {}
    }
    answer
}

unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: made by `create_qp`.
    let &ibv_qp { context, qp_num, .. } = unsafe { &*qp };
    let (mut state, nic) = (state(context), open(context).nic);
    let gone = state.nics[nic].gone;
    let mut answer = 0;
    // SAFETY: a chain of requests that ends with a null.
    while let Some(request) = unsafe { wr.as_ref() } {
        let pair = state.pair(qp_num);
        let refusal = match () {
            _ if gone => Some(Errno::IO),
            _ if pair.state == 0 || request.num_sge > pair.cap.max_recv_sge as c_int => Some(Errno::INVAL),
            _ if pair.receives.len() == pair.cap.max_recv_wr as usize => Some(Errno::NOMEM),
            _ => None,
        };
        if let Some(errno) = refusal {
            // SAFETY: the caller's place.
            unsafe { *bad = wr };
            answer = errno.raw_os_error();
            break;
        }
        // SAFETY: the request's own list.
        pair.receives.push_back((request.wr_id, unsafe { pieces(request.sg_list, request.num_sge) }));
        state.nics[nic].statistics.receives += 1;
        wr = request.next;
    }
    let (now, peer) = (state.pair(qp_num).state, state.pair(qp_num).peer);
    match now {
        IBV_QPS_ERR => state.fail(qp_num),
        _ if !state.held => state.run(peer),
        _ => {}
    }
    answer
}
