//! Device memory is a memfd: other processes map it by a descriptor, as they would a real export.
//!
//! The device of the bytes, which an importer must know, too, is in the memfd's name.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Mutex;

use crate::code::{Code, Result};
use crate::driver::settings;

/// Repeated contents of fresh memory: not a number in f32, nor in the upper half as bf16; no small
/// index.
const POISON: u32 = 0x7fed_face;

const NAME: &str = "sidelane-stand-in";

/// Fills fresh memory.
///
/// # Safety
///
/// At the address are as many bytes, in whole words.
pub unsafe fn poison(at: *mut u32, bytes: u64) {
    for index in 0..bytes.div_ceil(4) as usize {
        // SAFETY: the caller vouches for the range.
        unsafe { at.add(index).write(POISON) };
    }
}

/// Bytes held, per device.
static HELD: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Physical memory of a device.
pub struct Backing {
    pub bytes: u64,
    pub device: usize,
    /// It may leave the process as a descriptor.
    pub exportable: bool,
    /// It was asked for with `gpuDirectRDMACapable`.
    pub rdma: bool,
    /// Made here, so it counts against this process's share of the device.
    own: bool,
    /// Device and inode of the memfd: the same in every process.
    pub file: (u64, u64),
    descriptor: OwnedFd,
}

/// Bytes of a device that this process may still take.
pub fn free(device: usize) -> Result<u64> {
    let held = HELD.lock().unwrap().get(device).copied().unwrap_or(0);
    Ok(settings()?.memory.saturating_sub(held))
}

fn hold(device: usize, bytes: u64) -> Result<()> {
    let settings = settings()?;
    let mut held = HELD.lock().unwrap();
    held.resize(settings.devices, 0);
    let more = held[device].checked_add(bytes).filter(|&sum| sum <= settings.memory);
    held[device] = more.ok_or(Code::OUT_OF_MEMORY)?;
    Ok(())
}

impl Backing {
    /// Fresh memory, poisoned.
    pub fn create(device: usize, bytes: u64, exportable: bool, rdma: bool) -> Result<Backing> {
        hold(device, bytes)?;
        let name = CString::new(format!("{NAME}:{device}:{}", u8::from(rdma))).expect("no zero in it");
        // SAFETY: the name is a C string.
        let raw = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
        if raw < 0 {
            HELD.lock().unwrap()[device] -= bytes;
            return Err(Code::OUT_OF_MEMORY);
        }
        // SAFETY: the call made it, and no one else has it.
        let descriptor = unsafe { OwnedFd::from_raw_fd(raw) };
        let (_, file) = look(&descriptor).map_err(|_| Code::OUT_OF_MEMORY)?;
        let backing = Backing { bytes, device, exportable, rdma, own: true, file, descriptor };
        let length = libc::off_t::try_from(bytes).map_err(|_| Code::OUT_OF_MEMORY)?;
        // SAFETY: the descriptor is open.
        if unsafe { libc::ftruncate(raw, length) } != 0 {
            return Err(Code::OUT_OF_MEMORY);
        }
        let mapped = Mapped::new(&backing)?;
        // SAFETY: the mapping has as many bytes and starts at a page.
        unsafe { poison(mapped.at.cast(), bytes) };
        drop(mapped);
        Ok(backing)
    }

    /// Memory that another process exported.
    pub fn import(raw: RawFd) -> Result<Backing> {
        let name = fs::read_link(format!("/proc/self/fd/{raw}")).map_err(|_| Code::INVALID_VALUE)?;
        let name = name.to_string_lossy();
        let mut parts = name.trim_start_matches("/memfd:").trim_end_matches(" (deleted)").split(':');
        if parts.next() != Some(NAME) {
            return Err(Code::INVALID_VALUE);
        }
        let mut number = || parts.next().and_then(|part| part.parse().ok()).ok_or(Code::INVALID_VALUE);
        let (device, rdma): (usize, usize) = (number()?, number()?);
        // SAFETY: the link above shows it open; it is borrowed for this one call.
        let descriptor = unsafe { BorrowedFd::borrow_raw(raw) }.try_clone_to_owned();
        let descriptor = descriptor.map_err(|_| Code::INVALID_VALUE)?;
        let (bytes, file) = look(&descriptor).map_err(|_| Code::INVALID_VALUE)?;
        Ok(Backing { bytes, device, exportable: true, rdma: rdma == 1, own: false, file, descriptor })
    }

    /// A descriptor of its own for another process.
    pub fn export(&self) -> Result<OwnedFd> {
        self.descriptor.try_clone().map_err(|_| Code::OUT_OF_MEMORY)
    }

    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        if self.own {
            HELD.lock().unwrap()[self.device] -= self.bytes;
        }
    }
}

/// Bytes of a file, and which it is.
fn look(descriptor: &OwnedFd) -> io::Result<(u64, (u64, u64))> {
    let file = fs::metadata(format!("/proc/self/fd/{}", descriptor.as_raw_fd()))?;
    Ok((file.len(), (file.dev(), file.ino())))
}

/// A look at memory outside of the device's addresses, to fill it.
struct Mapped {
    at: *mut u8,
    bytes: usize,
}

impl Mapped {
    fn new(backing: &Backing) -> Result<Mapped> {
        let bytes = backing.bytes as usize;
        let raw = backing.descriptor.as_raw_fd();
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, libc::MAP_SHARED, raw, 0) };
        if at == libc::MAP_FAILED { Err(Code::OUT_OF_MEMORY) } else { Ok(Mapped { at: at.cast(), bytes }) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no pointer into it outlives it.
        unsafe { libc::munmap(self.at.cast(), self.bytes) };
    }
}
