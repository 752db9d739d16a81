//! libibverbs, loaded at run time, and the NICs that are opened with it.
//!
//! ```text
//!   Library: a table of functions --open(name)--> Context: attributes, ports, events
//! ```
//!
//! Loaded, not linked, so that one build runs on machines with and without NICs, as NCCL and UCX
//! do. A crate that links would make the library a condition of starting: `rdma-sys` (0.3.0) links
//! and needs the system's headers to build. The published `ibverbs` (0.9.2) links too, and lacks
//! the operations of this lane: it has sends and receives, but neither RDMA write nor immediates
//! nor atomics, and gives no access to the queue pair below.
//!
//! The table is plain function pointers, so a test can fill it with functions of its own.
//!
//! **Forks.** `ibv_fork_init` is not called. It matters where a process forks while private memory
//! is registered, on kernels before 5.12: the parent's next write then goes to a fresh copy of the
//! page, and the NIC still reads the old one. The heap is shared memory, which is never copied; the
//! library itself never forks. A program that does so with registered buffers of its own, on such a
//! kernel, sets `RDMAV_FORK_SAFE=1`, which libibverbs reads itself. A call here would remove the
//! pages of those buffers from the children, including other data on the same pages.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

use super::ffi::{
    IBV_ATOMIC_NONE, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr,
    ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr,
};
use super::nic::Port;
use super::order::PlacementOrder;
use crate::error::{VerbsError, of_loader};

/// Default name for the dynamic loader.
const USUAL: &str = "libibverbs.so.1";

/// Declares the table, and how it is filled: the symbol of a function is its name with `ibv_`
/// before it.
macro_rules! functions {
    (
        $(#[$about:meta])*
        needed { $( $name:ident: fn($($arg:ty),*) $(-> $out:ty)?; )* }
        newer { $( $(#[$new_about:meta])* $new:ident: fn($($new_arg:ty),*) -> $new_out:ty; )* }
    ) => {
        $(#[$about])*
        pub struct Functions {
            $( pub $name: unsafe extern "C" fn($($arg),*) $(-> $out)?, )*
            $( $(#[$new_about])* pub $new: Option<unsafe extern "C" fn($($new_arg),*) -> $new_out>, )*
        }

        impl Functions {
            /// # Safety
            /// The library is libibverbs, or something with the same symbols of the same types.
            unsafe fn from(library: &libloading::Library, name: &str) -> Result<Self, VerbsError> {
                let missing = |symbol| VerbsError::MissingSymbol { library: name.to_owned(), symbol };
                Ok(Functions {
                    $( $name: {
                        const SYMBOL: &str = concat!("ibv_", stringify!($name));
                        // SAFETY: by the contract above the symbol is a function of this type.
                        *unsafe { library.get(SYMBOL) }.map_err(|_| missing(SYMBOL))?
                    }, )*
                    $( $new: {
                        // SAFETY: as above.
                        unsafe { library.get(concat!("ibv_", stringify!($new))) }.ok().map(|symbol| *symbol)
                    }, )*
                })
            }
        }
    };
}

functions! {
    /// The functions of libibverbs that the lane calls; those that C inlines are in
    /// `ibv_context_ops`.
    needed {
        get_device_list: fn(*mut c_int) -> *mut *mut ibv_device;
        free_device_list: fn(*mut *mut ibv_device);
        get_device_name: fn(*mut ibv_device) -> *const c_char;
        open_device: fn(*mut ibv_device) -> *mut ibv_context;
        close_device: fn(*mut ibv_context) -> c_int;
        query_device: fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        query_port: fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        get_async_event: fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
        ack_async_event: fn(*mut ibv_async_event);
        alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd;
        dealloc_pd: fn(*mut ibv_pd) -> c_int;
        reg_mr: fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        dereg_mr: fn(*mut ibv_mr) -> c_int;
        create_comp_channel: fn(*mut ibv_context) -> *mut ibv_comp_channel;
        destroy_comp_channel: fn(*mut ibv_comp_channel) -> c_int;
        create_cq: fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        destroy_cq: fn(*mut ibv_cq) -> c_int;
        get_cq_event: fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        ack_cq_events: fn(*mut ibv_cq, u32);
        create_qp: fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        destroy_qp: fn(*mut ibv_qp) -> c_int;
    }
    newer {
        /// `reg_mr` that knows optional access flags.
        reg_mr_iova2: fn(*mut ibv_pd, *mut c_void, usize, u64, u32) -> *mut ibv_mr;
        /// Registers a dma-buf: memory of a device.
        reg_dmabuf_mr: fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
    }
}

/// libibverbs, or what stands in for it. Everything that was made with it keeps it loaded.
pub struct Library {
    functions: Functions,
    /// Unloaded last: the functions lie in it.
    _loaded: Option<libloading::Library>,
}

impl Library {
    /// Loads the library: the one that `path` names, or the system's.
    ///
    /// # Errors
    /// [`VerbsError::NoLibrary`], [`VerbsError::MissingSymbol`].
    pub fn load(path: Option<&Path>) -> Result<Arc<Self>, VerbsError> {
        let path = path.unwrap_or(Path::new(USUAL));
        let name = path.display().to_string();
        // SAFETY: this runs the library's initializers. A user who names another path is
        // responsible for that library, as with LD_LIBRARY_PATH; libibverbs' own only reads the
        // environment.
        let loaded = unsafe { libloading::Library::new(path) }.map_err(|error| {
            let reason = of_loader(&name, &error);
            VerbsError::NoLibrary { library: name.clone(), reason }
        })?;
        // SAFETY: as above; the types are those of libibverbs' headers, which `tests/verbs-abi`
        // compares.
        let functions = unsafe { Functions::from(&loaded, &name) }?;
        Ok(Arc::new(Library { functions, _loaded: Some(loaded) }))
    }

    /// A fake.
    #[cfg(test)]
    pub fn of(functions: Functions) -> Arc<Self> {
        Arc::new(Library { functions, _loaded: None })
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}

/// An open NIC.
#[derive(Debug)]
pub struct Context {
    raw: NonNull<ibv_context>,
    nic: String,
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
    completions: u32,
    /// Whether it has fetch-add.
    pub atomics: bool,
    /// Atomics that a queue pair may have in flight.
    pub atomics_out: u8,
    /// Atomics from its peer that a queue pair keeps answers for.
    pub atomics_in: u8,
    /// Ports, numbered from 1.
    pub ports: u8,
    /// Knowledge about the order in which it places writes.
    pub order: PlacementOrder,
}

impl Context {
    /// Opens a NIC by its name.
    ///
    /// # Errors
    /// [`VerbsError::NoNic`], [`VerbsError::NoSuchNic`], [`VerbsError::Open`],
    /// [`VerbsError::Call`].
    pub fn open(library: &Arc<Library>, nic: &str) -> Result<Arc<Self>, VerbsError> {
        let list = List::new(library)?;
        let named = list.iter().find(|&device| list.name(device) == nic);
        let Some(device) = named else {
            let present = list.iter().map(|device| list.name(device)).collect();
            return Err(VerbsError::NoSuchNic { nic: nic.to_owned(), present });
        };
        let failed = |errno| VerbsError::Open { nic: nic.to_owned(), errno };
        // SAFETY: the device is of the list, which is still there.
        let raw = check_object(unsafe { (library.functions.open_device)(device) }).map_err(failed)?;
        let (nic, library) = (nic.to_owned(), Arc::clone(library));
        let mut context = Context { raw, nic, attributes: Attributes::NONE, library };
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
    /// [`VerbsError::NoNic`], [`VerbsError::Call`].
    pub fn names(library: &Arc<Library>) -> Result<Vec<String>, VerbsError> {
        let list = List::new(library)?;
        Ok(list.iter().map(|device| list.name(device)).collect())
    }

    /// The NIC's name.
    pub fn name(&self) -> &str {
        &self.nic
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
            return Err(VerbsError::NoSuchPort { nic: self.nic.clone(), port: number, ports });
        }
        // SAFETY: all zero is a value of this plain structure.
        let mut attr: ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open; the structure is as the call expects it.
        let answer = unsafe { (self.functions().query_port)(self.raw.as_ptr(), number, &mut attr) };
        check_status(answer).map_err(|errno| self.failed("ibv_query_port", errno))?;
        Ok(Port::of(number, &attr))
    }

    fn query(&self) -> Result<Attributes, VerbsError> {
        // SAFETY: all zero is a value of this plain structure.
        let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open; the structure is as the call expects it.
        let answer = unsafe { (self.functions().query_device)(self.raw.as_ptr(), &mut attr) };
        check_status(answer).map_err(|errno| self.failed("ibv_query_device", errno))?;
        Ok(Attributes::of(&attr))
    }

    pub(super) fn failed(&self, call: &'static str, errno: i32) -> VerbsError {
        VerbsError::Call { nic: self.nic.clone(), call, errno }
    }

    pub(super) fn functions(&self) -> &Functions {
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
        trace_failure(&self.nic, "ibv_close_device", answer);
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
        order: PlacementOrder::Unknown,
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
            order: PlacementOrder::of(attr.vendor_id, attr.vendor_part_id),
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
        let devices = check_object(unsafe { (library.functions.get_device_list)(&mut len) });
        let devices = devices.map_err(|e| match Errno::from_raw_os_error(e) {
            // The kernel has no RDMA at all.
            Errno::NOSYS => VerbsError::NoNic,
            _ => VerbsError::Call { nic: "all".to_owned(), call: "ibv_get_device_list", errno: e },
        })?;
        let list = List { library, devices, len: len.try_into().unwrap_or(0) };
        if list.len == 0 { Err(VerbsError::NoNic) } else { Ok(list) }
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

/// The errno of this thread's last call.
fn last() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(Errno::IO.raw_os_error())
}

/// Calls that return an object, or nothing and set errno.
pub fn check_object<T>(returned: *mut T) -> Result<NonNull<T>, i32> {
    NonNull::new(returned).ok_or_else(last)
}

/// Calls that return 0, or an errno, or -1 and set errno: the manual pages promise one or the
/// other, drivers do both.
pub fn check_status(returned: c_int) -> Result<(), i32> {
    match returned {
        0 => Ok(()),
        errno @ 1.. => Err(errno),
        _ => Err(last()),
    }
}

/// Says that something could not be destroyed.
pub fn trace_failure(nic: &str, call: &str, answer: i32) {
    if let Err(errno) = check_status(answer) {
        tracing::warn!(nic, call, errno, "a NIC's object could not be destroyed");
    }
}
