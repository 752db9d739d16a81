//! Memory of a caller's: what the driver says of an address before a kernel sees it.

use sidelane::device::{DeviceRange, PinnedMemory, Stream};
use sidelane::error::DeviceError;

use super::copies::memory;
use super::{context, fill, pattern, stream};

/// Nothing is lent here that is not there until the streams are done.
fn lent(device: u32, address: u64, len: u64) -> Result<DeviceRange, DeviceError> {
    // SAFETY: as above.
    unsafe { DeviceRange::from_raw(&context(device), "x", address, len) }
}

#[test]
fn lent_device_and_pinned_memory_can_be_copied() {
    let context = context(0);
    let (stream, bytes) = (stream(&context), pattern(4096, 3));
    let (mine, pinned) = (memory(&context, 4096, &[0]), PinnedMemory::new(&context, 4096).unwrap());
    fill(&stream, &mine, &bytes);
    let from = lent(0, mine.address(), 4096).unwrap();
    let to = lent(0, pinned.range().address(), 4096).unwrap();
    stream.copy(to.span(0, 4096).unwrap(), from.span(0, 4096).unwrap()).unwrap();
    stream.copy(to.span(0, 16).unwrap(), from.span(16, 16).unwrap()).unwrap();
    assert_eq!(stream.claims(), 1, "all that is lent is one claim");
    stream.synchronize().unwrap();
    let mut seen = vec![0; 4096];
    pinned.read(0, &mut seen).unwrap();
    assert_eq!((&seen[..16], &seen[16..]), (&bytes[16..32], &bytes[16..]));
}

#[test]
fn memory_unknown_to_driver_or_of_other_device_is_refused() {
    let (what, theirs) = ("x", memory(&context(1), 4096, &[1]));
    let host = [0_u8; 64];
    let address = host.as_ptr().addr() as u64;
    let unknown = |address| DeviceError::UnknownMemory { what, address, device: 0 };
    assert_eq!(lent(0, address, 64).unwrap_err(), unknown(address));
    assert_eq!(lent(0, u64::MAX, 2).unwrap_err(), unknown(u64::MAX), "no end");
    let address = theirs.address();
    let other = DeviceError::OtherMemory { what, address, found: 1, expected: 0 };
    assert_eq!(lent(0, address, 4096).unwrap_err(), other);
    assert_eq!(lent(1, address, 4096).unwrap().len(), 4096);
    assert!(lent(0, 0, 0).unwrap().is_empty(), "where there is nothing, the address means nothing");
}

#[test]
fn a_stream_that_is_another_one_in_each_thread_is_refused() {
    let per_thread = std::ptr::without_provenance_mut(2);
    // SAFETY: the handle of the thread's own default stream is always there.
    let refused = unsafe { Stream::borrow(&context(0), per_thread) };
    assert_eq!(refused.map(drop), Err(DeviceError::PerThreadStream));
}
