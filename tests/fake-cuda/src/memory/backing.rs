//! Device memory is a memfd: other processes map it by a descriptor, as they would a real export.
//!
//! The device of the bytes, which an importer must know, too, is in the memfd's name.

use std::ffi::CString;
use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Mutex;

use crate::code::{Code, Result};
use crate::driver::settings;

/// Repeated contents of fresh memory: not a number in f32, nor in the upper half as bf16; no small
/// index.
pub const POISON: u32 = 0x7fed_face;

const NAME: &str = "sidelane-fake";

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
        backing.poison().map_err(|_| Code::OUT_OF_MEMORY)?;
        Ok(backing)
    }

    /// Fills the file. Written, not stored to a mapping: that would be a page fault for each page,
    /// most of which no test touches.
    fn poison(&self) -> io::Result<()> {
        static WORDS: [[u8; 4]; 1 << 16] = [POISON.to_ne_bytes(); 1 << 16];
        let words = WORDS.as_flattened();
        let mut file = fs::File::from(self.descriptor.try_clone()?);
        let mut left = self.bytes;
        while left > 0 {
            let piece = left.min(words.len() as u64);
            file.write_all(&words[..piece as usize])?;
            left -= piece;
        }
        Ok(())
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
