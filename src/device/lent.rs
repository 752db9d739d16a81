//! Tensors of a caller: foreign addresses, and the driver's report on them.
//!
//! A pointer of another library is the one argument that a kernel would use unchecked. So before it
//! becomes a [`DeviceRange`], the driver is asked for its owner. Host memory that is not pinned,
//! and memory of another device, are refused with a reason; a kernel would fault, and with it the
//! whole context.

use std::ffi::c_int;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;

use super::call;
use super::context::Context;
use super::range::{Claim, DeviceRange, Reach};
use crate::error::DeviceError;

/// Kinds of memory, as the driver numbers them; 0 is none that it knows.
const HOST: u32 = 1;
const DEVICE: u32 = 2;

impl DeviceRange {
    /// Memory of a caller for kernels and copies of this device: the device's own, or pinned host
    /// memory. `what` is its name in errors. Streams keep no claim on it.
    ///
    /// # Safety
    /// It stays there until everything that is enqueued with the range is done.
    ///
    /// # Errors
    /// [`DeviceError::UnknownMemory`], [`DeviceError::OtherMemory`], [`DeviceError::Call`].
    pub unsafe fn from_raw(
        context: &Arc<Context>,
        what: &'static str,
        address: u64,
        len: u64,
    ) -> Result<DeviceRange, DeviceError> {
        let device = context.device();
        let unknown = DeviceError::UnknownMemory { what, address, device };
        if len > 0 {
            let last = address.checked_add(len - 1).ok_or_else(|| unknown.clone())?;
            for byte in [address, last] {
                match context.owner_of_memory(byte)? {
                    (HOST, _) => {}
                    (DEVICE, found) if found == device => {}
                    (DEVICE, found) => {
                        return Err(DeviceError::OtherMemory { what, address, found, expected: device });
                    }
                    _ => return Err(unknown),
                }
            }
        }
        // Streams hold each claim once. All foreign memory shares one claim, which keeps nothing
        // alive.
        static NOTHING: OnceLock<Claim> = OnceLock::new();
        let keep = NOTHING.get_or_init(|| Arc::new(()));
        Ok(DeviceRange::new(Arc::clone(keep), Reach::Devices([device].into()), address, len))
    }
}

impl Context {
    /// The kind of memory at an address, and the device it is of.
    fn owner_of_memory(&self, address: u64) -> Result<(u32, u32), DeviceError> {
        use sys::CUpointer_attribute_enum as Attribute;
        let mut which =
            [Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL];
        let (mut kind, mut device): (u32, c_int) = (0, -1);
        let mut answers = [(&raw mut kind).cast(), (&raw mut device).cast()];
        let _entered = self.enter()?;
        // SAFETY: fills as many numbers as requested, of these types; it reads no byte of the
        // memory.
        unsafe {
            let (which, answers) = (which.as_mut_ptr(), answers.as_mut_ptr());
            call!(self.library(), Some(self.device()), cuPointerGetAttributes(2, which, answers, address))
        }?;
        Ok((kind, u32::try_from(device).unwrap_or(u32::MAX)))
    }
}
