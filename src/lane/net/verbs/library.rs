//! libibverbs, loaded at run time: a table of its functions.
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

use std::error::Error;
use std::ffi::{c_char, c_int, c_void};
use std::path::Path;
use std::sync::Arc;

use super::ffi::{
    ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_mr, ibv_pd,
    ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr,
};
use crate::error::VerbsError;

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
    pub(super) functions: Functions,
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
        // SAFETY: this runs the library's initialisers. A user who names another path is
        // responsible for that library, as with LD_LIBRARY_PATH; libibverbs' own only reads the
        // environment.
        let loaded = unsafe { libloading::Library::new(path) }.map_err(|error| {
            // The loader's own words are in the source.
            let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
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
