//! An open NIC: its abilities, its ports, and its events.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

use super::Library;
use super::errno;
use super::ffi::{
    IBV_ATOMIC_NONE, IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL, IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_QP_FATAL,
    IBV_EVENT_QP_REQ_ERR, ibv_async_element, ibv_async_event, ibv_context, ibv_device, ibv_device_attr,
    ibv_port_attr,
};
use super::port::Port;
use crate::error::VerbsError;

/// An open NIC.
#[derive(Debug)]
pub struct Context {
    raw: NonNull<ibv_context>,
    card: String,
    attributes: Attributes,
    library: Arc<Library>,
}

// SAFETY: libibverbs locks its contexts itself; none belongs to a thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Abilities of a NIC that the lane uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Pieces of memory in one work request.
    pub sges: u32,
    /// Work requests in one queue.
    pub requests: u32,
    /// Completions in one completion queue.
    pub completions: u32,
    /// Whether it has fetch-add.
    pub atomics: bool,
    /// Atomics that a queue pair may have in flight.
    pub atomics_out: u8,
    /// Atomics from its peer that a queue pair keeps answers for.
    pub atomics_in: u8,
    /// Ports, numbered from 1.
    pub ports: u8,
}

impl Context {
    /// Opens a NIC by its name.
    ///
    /// # Errors
    /// [`VerbsError::NoCard`], [`VerbsError::NoSuchCard`], [`VerbsError::Open`],
    /// [`VerbsError::Call`].
    pub fn open(library: &Arc<Library>, card: &str) -> Result<Arc<Self>, VerbsError> {
        let list = List::new(library)?;
        let named = list.iter().find(|&device| list.name(device) == card);
        let Some(device) = named else {
            let present = list.iter().map(|device| list.name(device)).collect();
            return Err(VerbsError::NoSuchCard { card: card.to_owned(), present });
        };
        let failed = |errno| VerbsError::Open { card: card.to_owned(), errno };
        // SAFETY: the device is of the list, which is still there.
        let raw = errno::object(unsafe { (library.functions.open_device)(device) }).map_err(failed)?;
        let (card, library) = (card.to_owned(), Arc::clone(library));
        let mut context = Context { raw, card, attributes: Attributes::NONE, library };
        // News are looked for, never waited for.
        let fd = context.as_fd();
        let unblocked = fcntl_getfl(fd).and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK));
        unblocked.map_err(|e| context.failed("fcntl", e.raw_os_error()))?;
        context.attributes = context.query()?;
        Ok(Arc::new(context))
    }

    /// The names of all NICs, in the library's order.
    ///
    /// # Errors
    /// [`VerbsError::NoCard`], [`VerbsError::Call`].
    pub fn names(library: &Arc<Library>) -> Result<Vec<String>, VerbsError> {
        let list = List::new(library)?;
        Ok(list.iter().map(|device| list.name(device)).collect())
    }

    /// The NIC's name.
    pub fn card(&self) -> &str {
        &self.card
    }

    /// Abilities of the NIC.
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// The state of a port.
    ///
    /// # Errors
    /// [`VerbsError::NoSuchPort`], [`VerbsError::Call`].
    pub fn port(&self, number: u8) -> Result<Port, VerbsError> {
        let ports = self.attributes.ports;
        if !(1..=ports).contains(&number) {
            return Err(VerbsError::NoSuchPort { card: self.card.clone(), port: number, ports });
        }
        // SAFETY: all zero is a value of this plain structure.
        let mut attr: ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open; the structure is as the call expects it.
        let answer = unsafe { (self.functions().query_port)(self.raw.as_ptr(), number, &mut attr) };
        errno::status(answer).map_err(|errno| self.failed("ibv_query_port", errno))?;
        Ok(Port::of(number, &attr))
    }

    /// Reads the NIC's events; to be called now and then, or when [`as_fd`](AsFd::as_fd) is
    /// readable.
    ///
    /// # Errors
    /// [`VerbsError::CardLost`], [`VerbsError::QueuePairLost`], [`VerbsError::QueueOverflow`]. A
    /// port that goes down is traced only: it may come back before retries end, and if not, work
    /// requests fail.
    pub fn check(&self) -> Result<(), VerbsError> {
        loop {
            let mut event = ibv_async_event { element: ibv_async_element { port_num: 0 }, event_type: 0 };
            // SAFETY: the context is open; the structure is as the call expects it.
            let answer = unsafe { (self.functions().get_async_event)(self.raw.as_ptr(), &mut event) };
            if let Err(errno) = errno::status(answer) {
                let nothing = [Errno::AGAIN, Errno::INTR].map(Errno::raw_os_error).contains(&errno);
                return if nothing { Ok(()) } else { Err(self.failed("ibv_get_async_event", errno)) };
            }
            let news = self.judge(&event);
            // SAFETY: the event just came; its object cannot be destroyed before this.
            unsafe { (self.functions().ack_async_event)(&mut event) };
            news?;
        }
    }

    fn judge(&self, event: &ibv_async_event) -> Result<(), VerbsError> {
        let card = self.card.clone();
        let lost = |event_of: &ibv_async_event, event| {
            // SAFETY: this kind of event is about a queue pair, which lives until the event is
            // acknowledged.
            let queue_pair = unsafe { (*event_of.element.qp).qp_num };
            VerbsError::QueuePairLost { card: card.clone(), queue_pair, event }
        };
        Err(match event.event_type {
            IBV_EVENT_DEVICE_FATAL => VerbsError::CardLost { card },
            IBV_EVENT_CQ_ERR => VerbsError::QueueOverflow { card },
            IBV_EVENT_QP_FATAL => lost(event, "the NIC reports a fatal error of it"),
            IBV_EVENT_QP_REQ_ERR => lost(event, "the peer sent an invalid request"),
            IBV_EVENT_QP_ACCESS_ERR => lost(event, "the peer aimed outside what is registered"),
            kind => {
                tracing::warn!(card, event = kind, "event of a NIC");
                return Ok(());
            }
        })
    }

    fn query(&self) -> Result<Attributes, VerbsError> {
        // SAFETY: all zero is a value of this plain structure.
        let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open; the structure is as the call expects it.
        let answer = unsafe { (self.functions().query_device)(self.raw.as_ptr(), &mut attr) };
        errno::status(answer).map_err(|errno| self.failed("ibv_query_device", errno))?;
        Ok(Attributes::of(&attr))
    }

    pub(super) fn failed(&self, call: &'static str, errno: i32) -> VerbsError {
        VerbsError::Call { card: self.card.clone(), call, errno }
    }

    pub(super) fn functions(&self) -> &super::library::Functions {
        &self.library.functions
    }

    pub(super) fn raw(&self) -> *mut ibv_context {
        self.raw.as_ptr()
    }
}

impl AsFd for Context {
    /// Readable when the NIC has events.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is open and owns this descriptor.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).async_fd) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: everything made in this context kept it alive, so nothing of it is left.
        let answer = unsafe { (self.functions().close_device)(self.raw.as_ptr()) };
        super::trace_failure(&self.card, "ibv_close_device", answer);
    }
}

impl Attributes {
    const NONE: Attributes = Attributes {
        sges: 0,
        requests: 0,
        completions: 0,
        atomics: false,
        atomics_out: 0,
        atomics_in: 0,
        ports: 0,
    };

    fn of(attr: &ibv_device_attr) -> Self {
        let count = |n: i32| u32::try_from(n).unwrap_or(0);
        let small = |n: i32| u8::try_from(n.max(0)).unwrap_or(u8::MAX);
        Attributes {
            sges: count(attr.max_sge),
            requests: count(attr.max_qp_wr),
            completions: count(attr.max_cqe),
            atomics: attr.atomic_cap != IBV_ATOMIC_NONE,
            atomics_out: small(attr.max_qp_init_rd_atom),
            atomics_in: small(attr.max_qp_rd_atom),
            ports: attr.phys_port_cnt,
        }
    }
}

/// The library's list of NICs.
struct List<'a> {
    library: &'a Library,
    devices: NonNull<*mut ibv_device>,
    len: usize,
}

impl<'a> List<'a> {
    fn new(library: &'a Library) -> Result<Self, VerbsError> {
        let mut len = 0;
        // SAFETY: the call fills the number in.
        let devices = errno::object(unsafe { (library.functions.get_device_list)(&mut len) });
        let devices = devices.map_err(|e| match Errno::from_raw_os_error(e) {
            // The kernel has no RDMA at all.
            Errno::NOSYS => VerbsError::NoCard,
            _ => VerbsError::Call { card: "all".to_owned(), call: "ibv_get_device_list", errno: e },
        })?;
        let list = List { library, devices, len: len.try_into().unwrap_or(0) };
        if list.len == 0 { Err(VerbsError::NoCard) } else { Ok(list) }
    }

    fn iter(&self) -> impl Iterator<Item = *mut ibv_device> + '_ {
        // SAFETY: the library gave a list of so many devices.
        (0..self.len).map(|at| unsafe { *self.devices.as_ptr().add(at) })
    }

    fn name(&self, device: *mut ibv_device) -> String {
        // SAFETY: the device is of this list; its name is a C string that lives as long.
        let name = unsafe { CStr::from_ptr((self.library.functions.get_device_name)(device)) };
        name.to_string_lossy().into_owned()
    }
}

impl Drop for List<'_> {
    fn drop(&mut self) {
        // SAFETY: the list came from this library and is not used again; a device that is open
        // outlives it.
        unsafe { (self.library.functions.free_device_list)(self.devices.as_ptr()) }
    }
}
