//! Moving bytes, with every byte of every range checked first.

use std::io::{Error, ErrorKind};
use std::ptr;

use super::map::{MAP, Map, Reach, Reacher};
use crate::code::{Code, Result};
use crate::driver::Context;

/// What moves bytes for one device.
#[derive(Clone, Copy)]
pub struct Engine {
    pub context: usize,
    pub device: usize,
    /// Whether it may also move pageable memory of the host, through the driver's own buffers.
    pub pageable: bool,
}

impl Engine {
    fn reach(&self, map: &Map, at: u64, bytes: usize, write: bool) -> Result<Reach> {
        let end = at.checked_add(bytes as u64).ok_or(Code::ILLEGAL_ADDRESS)?;
        let peers = |owner| {
            let context = Context::of(self.context);
            context.is_ok_and(|context| context.peers.lock().unwrap().contains(&owner))
        };
        let reach = map.reach(at..end, &Reacher { device: self.device, peers: &peers }, write)?;
        if reach == Reach::Unknown && !self.pageable { Err(Code::ILLEGAL_ADDRESS) } else { Ok(reach) }
    }

    /// Whether the driver does not know a range: pageable host memory, if it is memory at all.
    pub fn is_pageable(&self, at: u64, bytes: usize) -> bool {
        let everything = Engine { pageable: true, ..*self };
        everything.reach(&MAP.read().unwrap(), at, bytes, false) == Ok(Reach::Unknown)
    }

    /// Copies from one range to the other.
    pub fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        let map = MAP.read().unwrap();
        let read = self.reach(&map, from, bytes, false)?;
        let written = self.reach(&map, to, bytes, true)?;
        match (written, read) {
            (Reach::Direct, Reach::Direct) => {
                // SAFETY: both ranges are mapped as a whole, and stay so while the map is held.
                unsafe { ptr::copy(from as *const u8, to as *mut u8, bytes) };
                Ok(())
            }
            (Reach::Direct, Reach::Unknown) => foreign(libc::process_vm_readv, to, from, bytes),
            (Reach::Unknown, _) => foreign(libc::process_vm_writev, from, to, bytes),
        }
    }

    /// Reads a range now, for a copy that lands later.
    pub fn snapshot(&self, from: u64, bytes: usize) -> Result<Vec<u8>> {
        let map = MAP.read().unwrap();
        let mut kept = vec![0u8; bytes];
        match self.reach(&map, from, bytes, false)? {
            // SAFETY: the range is mapped as a whole, and stays so while the map is held.
            Reach::Direct => unsafe { ptr::copy(from as *const u8, kept.as_mut_ptr(), bytes) },
            Reach::Unknown => foreign(libc::process_vm_readv, kept.as_mut_ptr() as u64, from, bytes)?,
        }
        Ok(kept)
    }

    /// Writes bytes that the driver holds.
    pub fn write(&self, to: u64, bytes: &[u8]) -> Result<()> {
        let map = MAP.read().unwrap();
        match self.reach(&map, to, bytes.len(), true)? {
            // SAFETY: the range is mapped as a whole, and stays so while the map is held.
            Reach::Direct => unsafe { ptr::copy(bytes.as_ptr(), to as *mut u8, bytes.len()) },
            Reach::Unknown => foreign(libc::process_vm_writev, bytes.as_ptr() as u64, to, bytes.len())?,
        }
        Ok(())
    }

    /// Runs `f`, which reads or changes a word, while the word is known to be mapped and reachable.
    pub fn word<T>(&self, at: u64, bytes: usize, write: bool, f: impl FnOnce() -> T) -> Result<T> {
        let map = MAP.read().unwrap();
        self.reach(&map, at, bytes, write)?;
        Ok(f())
    }
}

type Transfer = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> isize;

/// Moves bytes between mapped memory and unknown memory: the kernel returns an error instead of
/// faulting.
fn foreign(transfer: Transfer, known: u64, unknown: u64, bytes: usize) -> Result<()> {
    let span = |at: u64| libc::iovec { iov_base: at as *mut _, iov_len: bytes };
    let (known, unknown) = (span(known), span(unknown));
    loop {
        // SAFETY: the known range is mapped; the kernel checks the other, which is in this very
        // process.
        let moved = unsafe { transfer(libc::getpid(), &known, 1, &unknown, 1, 0) };
        if moved == bytes as isize {
            return Ok(());
        }
        if moved >= 0 || Error::last_os_error().kind() != ErrorKind::Interrupted {
            return Err(Code::ILLEGAL_ADDRESS);
        }
    }
}
