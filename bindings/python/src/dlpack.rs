//! DLPack: tensors of other libraries in, memory of ours out, without a copy.
//!
//! A capsule holds a *managed tensor*: a description, and a function that ends the lending. Its
//! name says whether somebody has taken it already:
//!
//! ```text
//!   producer                                   consumer
//!   capsule "dltensor"           ------------> renames it to "used_dltensor", keeps the managed tensor,
//!   destructor: ends the lending,              and calls its deleter when done
//!   unless the name says used
//! ```
//!
//! Version 1 of the protocol has names with `_versioned`, and a flag for memory that must not be
//! written; both are spoken.

#![allow(unsafe_code, reason = "the protocol is one of raw pointers in capsules")]

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

const PLAIN: &CStr = c"dltensor";
const PLAIN_USED: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";

/// Memory of the host.
pub const CPU: i32 = 1;
/// Memory of a device of CUDA.
pub const CUDA: i32 = 2;
/// Memory of the host that is pinned for CUDA.
pub const CUDA_HOST: i32 = 3;
const READ_ONLY: u64 = 1;
/// The version that is spoken.
const VERSION: Version = Version { major: 1, minor: 0 };

/// Type of an element.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElementType {
    /// Integer, float, bfloat, bool ...
    pub code: u8,
    /// Width.
    pub bits: u8,
    /// 1, unless it is a vector.
    pub lanes: u16,
}

impl ElementType {
    /// As torch and numpy call it.
    pub fn name(self) -> String {
        let ElementType { code, bits, lanes } = self;
        let kind = match code {
            0 => "int",
            1 => "uint",
            2 => "float",
            4 => "bfloat",
            5 => "complex",
            6 => return "bool".to_owned(),
            _ => return format!("elements of DLPack type {code} with {bits} bits"),
        };
        if lanes == 1 { format!("{kind}{bits}") } else { format!("vectors of {lanes} {kind}{bits}") }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
struct Raw {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: ElementType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Plain {
    tensor: Raw,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Plain)>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Version {
    major: u32,
    minor: u32,
}

#[repr(C)]
struct Versioned {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: Raw,
}

enum Managed {
    Plain(NonNull<Plain>),
    Versioned(NonNull<Versioned>),
}

/// A tensor that another library lends.
pub struct Lent {
    managed: Managed,
}

// SAFETY: the description is never changed, and a deleter may be called from any thread (the
// protocol asks that of it).
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

impl Drop for Lent {
    fn drop(&mut self) {
        match self.managed {
            Managed::Plain(at) => {
                // SAFETY: taken from its capsule by us alone, and not used after this.
                if let Some(deleter) = unsafe { at.as_ref() }.deleter {
                    // SAFETY: the producer's own function, called once.
                    unsafe { deleter(at.as_ptr()) };
                }
            }
            Managed::Versioned(at) => {
                // SAFETY: as above.
                if let Some(deleter) = unsafe { at.as_ref() }.deleter {
                    // SAFETY: as above.
                    unsafe { deleter(at.as_ptr()) };
                }
            }
        }
    }
}

impl Lent {
    /// Takes the managed tensor out of a capsule.
    ///
    /// # Errors
    /// `BufferError` if it is no capsule of DLPack, or was taken before.
    pub fn take(capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        let object = capsule.as_ptr();
        let (name, used) = [(VERSIONED, VERSIONED_USED), (PLAIN, PLAIN_USED)]
            .into_iter()
            // SAFETY: asks any object, under the GIL, whether it is a capsule of this name.
            .find(|(name, _)| unsafe { ffi::PyCapsule_IsValid(object, name.as_ptr()) } == 1)
            .ok_or_else(|| PyBufferError::new_err("__dlpack__ gave no capsule of DLPack, or a used one"))?;
        // SAFETY: a valid capsule of this name.
        let at = NonNull::new(unsafe { ffi::PyCapsule_GetPointer(object, name.as_ptr()) })
            .ok_or_else(|| PyErr::fetch(capsule.py()))?;
        let managed = if name == PLAIN {
            Managed::Plain(at.cast())
        } else {
            let at = at.cast::<Versioned>();
            // SAFETY: a capsule of this name holds such a struct; its version stands first in all
            // of them.
            let major = unsafe { at.as_ref() }.version.major;
            if major != VERSION.major {
                return Err(PyBufferError::new_err(format!("DLPack version {major} is not spoken here")));
            }
            Managed::Versioned(at)
        };
        // SAFETY: a valid capsule; the name is static. From here on the managed tensor is ours.
        if unsafe { ffi::PyCapsule_SetName(object, used.as_ptr()) } != 0 {
            return Err(PyErr::fetch(capsule.py()));
        }
        Ok(Lent { managed })
    }

    fn raw(&self) -> &Raw {
        match &self.managed {
            // SAFETY: lives until the deleter is called, which is when this is dropped.
            Managed::Plain(at) => &unsafe { at.as_ref() }.tensor,
            // SAFETY: as above.
            Managed::Versioned(at) => &unsafe { at.as_ref() }.tensor,
        }
    }

    /// Whether it must not be written to.
    pub fn read_only(&self) -> bool {
        match &self.managed {
            Managed::Plain(_) => false,
            // SAFETY: as in `raw`.
            Managed::Versioned(at) => unsafe { at.as_ref() }.flags & READ_ONLY != 0,
        }
    }

    /// Kind and number of the device whose memory it lies in.
    pub fn device(&self) -> (i32, i32) {
        (self.raw().device.kind, self.raw().device.id)
    }

    /// Type of its elements.
    pub fn element(&self) -> ElementType {
        self.raw().dtype
    }

    /// Its sizes.
    pub fn shape(&self) -> &[i64] {
        numbers(self.raw().shape, self.raw().ndim)
    }

    /// Elements from one to the next, along each axis; empty if it is contiguous by declaration.
    pub fn strides(&self) -> &[i64] {
        numbers(self.raw().strides, self.raw().ndim)
    }

    /// Address of its first element.
    pub fn address(&self) -> usize {
        self.raw().data as usize + self.raw().byte_offset as usize
    }

    /// Its elements. `None` if the address is not aligned for them.
    ///
    /// The caller has seen that they lie in host memory, that `len` elements of this width follow
    /// each other, and sees to it that the lender writes nothing meanwhile.
    pub fn elements<T: bytemuck::Pod>(&self, len: usize) -> Option<&[T]> {
        let at = self.place::<T>(len)?;
        // SAFETY: aligned, and of plain data; the producer keeps them alive until the deleter is
        // called.
        Some(unsafe { std::slice::from_raw_parts(at, len) })
    }

    /// As [`Lent::elements`], to write to: what every array library lends is open to all who hold
    /// it.
    pub fn elements_mut<T: bytemuck::Pod>(&mut self, len: usize) -> Option<&mut [T]> {
        let at = self.place::<T>(len)?;
        // SAFETY: as in `elements`; borrowed from us exclusively.
        Some(unsafe { std::slice::from_raw_parts_mut(at, len) })
    }

    fn place<T>(&self, len: usize) -> Option<*mut T> {
        // Of no elements the address means nothing.
        let at = if len == 0 { NonNull::dangling().as_ptr() } else { self.address() as *mut T };
        (at.is_aligned() && !at.is_null()).then_some(at)
    }
}

fn numbers<'a>(at: *const i64, count: i32) -> &'a [i64] {
    if at.is_null() || count <= 0 {
        return &[];
    }
    // SAFETY: the producer describes `count` axes; the slice is handed out under a borrow of who
    // holds the tensor.
    unsafe { std::slice::from_raw_parts(at, count as usize) }
}

/// Memory to lend.
pub struct Lending {
    /// Address of the first element.
    pub address: usize,
    /// Sizes.
    pub shape: Vec<i64>,
    /// Elements from one to the next, along each axis.
    pub strides: Vec<i64>,
    /// Type of an element.
    pub element: ElementType,
    /// Kind and number of the device whose memory it is.
    pub device: (i32, i32),
}

/// A capsule that lends memory, and keeps what must live as long as somebody uses the tensor;
/// versioned if the consumer can read that.
pub fn lend<'py, K: Send + 'static>(
    py: Python<'py>,
    mut lending: Lending,
    keep: K,
    versioned: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let tensor = Raw {
        data: lending.address as *mut c_void,
        device: Device { kind: lending.device.0, id: lending.device.1 },
        ndim: lending.shape.len() as i32,
        dtype: lending.element,
        // Vectors do not move their elements when they are moved themselves.
        shape: lending.shape.as_mut_ptr(),
        strides: lending.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let context = Box::into_raw(Box::new((lending, keep))).cast();
    if versioned {
        let (deleter, flags) = (Some(end_versioned::<K> as _), 0);
        let managed = Box::new(Versioned { version: VERSION, context, deleter, flags, tensor });
        capsule(py, Box::into_raw(managed).cast(), VERSIONED, drop_versioned)
    } else {
        let managed = Box::new(Plain { tensor, context, deleter: Some(end_plain::<K> as _) });
        capsule(py, Box::into_raw(managed).cast(), PLAIN, drop_plain)
    }
}

fn capsule<'py>(
    py: Python<'py>,
    managed: *mut c_void,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: under the GIL; the name is static; an owned object or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(managed, name.as_ptr(), Some(destructor))) }
}

unsafe extern "C" fn end_plain<K>(at: *mut Plain) {
    // SAFETY: called once, by the consumer or the capsule, with what `lend` has made.
    let managed = unsafe { Box::from_raw(at) };
    // SAFETY: its context is the boxed lending of `lend`.
    drop(unsafe { Box::from_raw(managed.context.cast::<(Lending, K)>()) });
}

unsafe extern "C" fn end_versioned<K>(at: *mut Versioned) {
    // SAFETY: as in `end_plain`.
    let managed = unsafe { Box::from_raw(at) };
    // SAFETY: as in `end_plain`.
    drop(unsafe { Box::from_raw(managed.context.cast::<(Lending, K)>()) });
}

unsafe extern "C" fn drop_plain(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter calls this with the capsule, under the GIL; a used one has another
    // name.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, PLAIN.as_ptr()) == 1 {
            let at = ffi::PyCapsule_GetPointer(capsule, PLAIN.as_ptr()).cast::<Plain>();
            if let Some(deleter) = (*at).deleter {
                deleter(at);
            }
        }
    }
}

unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as in `drop_plain`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            let at = ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast::<Versioned>();
            if let Some(deleter) = (*at).deleter {
                deleter(at);
            }
        }
    }
}
