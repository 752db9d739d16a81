//! The used part of CUPTI's header: the first fields of three records, a few numbers, and the
//! functions.
//!
//! A record grows at its end with each version, and has another name then. The declared fields lie
//! at the same place in all of them, from CUDA 12.1 on: `tests/cupti-abi` compares it with the
//! headers of several.

use std::ffi::{c_char, c_void};

/// Of a record that names a kernel.
pub const CONCURRENT_KERNEL: u32 = 10;
/// Of a record that names a copy.
pub const MEMCPY: u32 = 1;
/// Of a record that names a copy between contexts or devices.
pub const MEMCPY2: u32 = 22;

pub const SUCCESS: u32 = 0;
/// There is no further record in a buffer.
pub const MAX_LIMIT_REACHED: u32 = 12;
/// A flush also returns incomplete buffers.
pub const FLUSH_FORCED: u32 = 1;

/// Work for the SMs, and the driver's work for it.
pub const CHANNEL_COMPUTE: u32 = 1;
/// Work for a copy engine.
pub const CHANNEL_ASYNC_MEMCPY: u32 = 2;

/// The first version whose records are known to have all of these fields: that of CUDA 12.1.
pub const OLDEST: u32 = 18;

/// The beginning of `CUpti_ActivityKernel9` and its successors.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Kernel {
    pub kind: u32,
    unused_1: [u32; 3],
    pub start: u64,
    pub end: u64,
    unused_2: [u32; 18],
    /// CUPTI's own.
    pub name: *const c_char,
}

/// The beginning of `CUpti_ActivityMemcpy5` and its successors.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Memcpy {
    pub kind: u32,
    unused_1: u32,
    pub bytes: u64,
    pub start: u64,
    pub end: u64,
    unused_2: [u32; 12],
    pub channel_type: u32,
}

/// The beginning of `CUpti_ActivityMemcpyPtoP4` and its successors.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct MemcpyPtoP {
    pub kind: u32,
    unused_1: u32,
    pub bytes: u64,
    pub start: u64,
    pub end: u64,
    unused_2: [u32; 14],
    pub channel_type: u32,
}

/// CUPTI asks for a buffer: where it begins, its bytes, the most records (0: as many as fit).
pub type Request = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
/// CUPTI gives one back: two obsolete arguments, its address, its bytes, bytes of records.
pub type Complete = unsafe extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);

macro_rules! functions {
    ($( $name:ident($($arg:ty),*); )*) => {
        /// The functions, as the loader found them.
        #[allow(non_snake_case, reason = "the names of C, so that its manual applies")]
        pub struct Functions {
            $( pub $name: unsafe extern "C" fn($($arg),*) -> u32, )*
        }

        impl Functions {
            /// Gives the name of the first that is missing.
            ///
            /// # Safety
            /// The library is CUPTI, or a library with the same symbols of the same types, and is
            /// never unloaded.
            pub unsafe fn from(library: &libloading::Library) -> Result<Self, &'static str> {
                Ok(Functions {
                    $( $name: {
                        const SYMBOL: &str = stringify!($name);
                        // SAFETY: by the contract above the symbol is a function of this type.
                        *unsafe { library.get(SYMBOL) }.map_err(|_| SYMBOL)?
                    }, )*
                })
            }
        }
    };
}

functions! {
    cuptiGetVersion(*mut u32);
    cuptiGetResultString(u32, *mut *const c_char);
    cuptiActivityRegisterCallbacks(Request, Complete);
    cuptiActivityEnable(u32);
    cuptiActivityDisable(u32);
    cuptiActivityFlushAll(u32);
    cuptiActivityGetNumDroppedRecords(*mut c_void, u32, *mut usize);
    cuptiActivityGetNextRecord(*mut u8, usize, *mut *mut c_void);
}
