//! One-sided windows.
//!
//! Puts to one peer are visible to it after a later signal from the same rank to the same peer;
//! nothing else is ordered. The callers agree on the permissions to write.

use std::ffi::c_void;
use std::os::fd::{BorrowedFd, OwnedFd};

use super::memory::{Out, slice, slice_mut};
use super::objects::{Group, Window};
use super::{border, close, get, give};
use crate::fault::{ArgumentError, Fault};
use crate::handles::{ExclusiveCell, Kind};
use crate::{Status, refuse};

/// Memory of `len` bytes at every member of a group, and a signal word per pair of members.
/// Collective.
///
/// The caller guarantees: `window` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_group_window(
    group: *mut Group,
    len: u64,
    window: *mut *mut Window,
) -> Status {
    border(|| {
        let group = get(group)?;
        // SAFETY: as the caller promised.
        let out = unsafe { Out::new("window", window) }.inspect_err(|_| refuse::window(&group, len))?;
        give(ExclusiveCell::new(Kind::Window, group.window(len)?), out)
    })
}

/// Makes the caller's own memory a window. `memory` is the descriptor of a memfd that is sealed
/// against shrinking (memfd_create(), ftruncate(), fcntl(F_ADD_SEALS, F_SEAL_SHRINK)), of one size
/// at all members. The call duplicates it: the caller keeps its descriptor and its mappings, which
/// show the peers' puts. Collective.
///
/// The caller guarantees: `window` is NULL or valid; `memory` is an open descriptor, or -1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_group_register(
    group: *mut Group,
    memory: i32,
    window: *mut *mut Window,
) -> Status {
    border(|| {
        let group = get(group)?;
        // SAFETY: as the caller promised.
        let arguments = unsafe {
            Out::new("window", window).map_err(Fault::from).and_then(|out| Ok((out, descriptor(memory)?)))
        };
        let (out, memory) = arguments.inspect_err(|_| refuse::register(&group))?;
        give(ExclusiveCell::new(Kind::Window, group.register(memory)?), out)
    })
}

/// # Safety
/// It is open, unless it is negative.
unsafe fn descriptor(memory: i32) -> Result<OwnedFd, ArgumentError> {
    let unusable = |_| ArgumentError::Descriptor { what: "memory", seen: memory };
    if memory < 0 {
        return Err(unusable(()));
    }
    // SAFETY: as the caller promised.
    unsafe { BorrowedFd::borrow_raw(memory) }.try_clone_to_owned().map_err(|_| unusable(()))
}

/// Writes `len` bytes to `offset` of the part of `peer`. When it returns, `src` may be changed; the
/// bytes may not have landed.
///
/// The caller guarantees: `src` is NULL or points to `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_window_put(
    window: *mut Window,
    peer: u32,
    offset: u64,
    src: *const c_void,
    len: u64,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let src = unsafe { slice("src", src.cast(), len) }?;
        get(window)?.lend(|window| Ok(window.put(peer, offset, src)?))
    })
}

/// Writes `len` bytes of this rank's own part, from `from` on, to `offset` of the part of `peer`.
/// Does not wait. The bytes may be read until sidelane_window_quiet() returns: what is written
/// there before that may arrive in their place.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_window_put_nbi(
    window: *mut Window,
    peer: u32,
    offset: u64,
    from: u64,
    len: u64,
) -> Status {
    border(|| get(window)?.lend(|window| Ok(window.put_nbi(peer, offset, from, len)?)))
}

/// As sidelane_window_put(), then sidelane_window_signal().
///
/// The caller guarantees: as sidelane_window_put().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_window_put_signal(
    window: *mut Window,
    peer: u32,
    offset: u64,
    src: *const c_void,
    len: u64,
    value: u64,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let src = unsafe { slice("src", src.cast(), len) }?;
        get(window)?.lend(|window| Ok(window.put_signal(peer, offset, src, value)?))
    })
}

/// Raises this rank's word at `peer` to `value`, after all earlier puts to it. Values must grow,
/// from 1 on.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_window_signal(window: *mut Window, peer: u32, value: u64) -> Status {
    border(|| get(window)?.lend(|window| Ok(window.signal(peer, value)?)))
}

/// Waits until the word that `peer` raises here is at least `value`: then all its earlier puts are
/// visible.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_window_wait(window: *mut Window, peer: u32, value: u64) -> Status {
    border(|| get(window)?.lend(|window| Ok(window.wait_until(peer, value)?)))
}

/// Returns when everything that this rank has put or signalled so far has landed.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_window_quiet(window: *mut Window) -> Status {
    border(|| get(window)?.lend(|window| Ok(window.quiet()?)))
}

/// Returns when all members have entered. Then their earlier puts have landed. Collective.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_window_barrier(window: *mut Window) -> Status {
    border(|| get(window)?.lend(|window| Ok(window.barrier()?)))
}

/// Copies `len` bytes of this rank's own part to `into`.
///
/// The caller guarantees: `into` is NULL, or `len` bytes may be written there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_window_read(
    window: *mut Window,
    offset: u64,
    into: *mut c_void,
    len: u64,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let into = unsafe { slice_mut("into", into.cast(), len) }?;
        get(window)?.lend(|window| Ok(window.read(offset, into)?))
    })
}

/// Copies `len` bytes to this rank's own part.
///
/// The caller guarantees: `from` is NULL or points to `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_window_write(
    window: *mut Window,
    offset: u64,
    from: *const c_void,
    len: u64,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let from = unsafe { slice("from", from.cast(), len) }?;
        get(window)?.lend(|window| Ok(window.write(offset, from)?))
    })
}

/// Closes the window. Its bytes at this rank are free then. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_window_close(window: *mut Window) -> Status {
    close(window)
}
