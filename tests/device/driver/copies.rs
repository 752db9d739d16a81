//! Copies, single and in batches.

use std::ffi::c_void;

use sidelane::device::{Allocation, Context, CopyBatch, DeviceRange, PinnedMemory, Reservation};
use sidelane::error::DeviceError;
use std::sync::Arc;

use super::{context, fill, library, pattern, read, stream};

/// Memory of a device, for the devices named.
pub fn memory(context: &Arc<Context>, bytes: u64, devices: &[u32]) -> DeviceRange {
    let allocation = Allocation::new(context, bytes).unwrap();
    let reservation = Reservation::new(context, 1, allocation.bytes()).unwrap();
    reservation.map(0, &allocation, devices).unwrap().part(0, bytes).unwrap()
}

/// Moves blocks to other places on a peer, in batches, and looks at every byte. No multiple of 7:
/// the places differ.
pub fn scatter(count: u64) {
    const BLOCK: u64 = 96;
    assert!(!count.is_multiple_of(7));
    let (one, other) = (context(0), context(1));
    let from = memory(&one, count * BLOCK, &[0]);
    let to = memory(&other, count * BLOCK, &[0, 1]);
    let stream = stream(&one);
    let bytes = pattern(from.len() as usize, 3);
    fill(&stream, &from, &bytes);
    let place = |block: u64| (block * 7 + 5) % count;
    let mut batch = CopyBatch::with_capacity(&one, count as usize);
    for block in 0..count {
        let target = to.span(place(block) * BLOCK, BLOCK).unwrap();
        batch.push(target, from.span(block * BLOCK, BLOCK).unwrap()).unwrap();
    }
    batch.push(to.span(0, 0).unwrap(), from.span(9, 0).unwrap()).unwrap();
    assert_eq!(batch.len() as u64, count, "a copy of nothing is none");
    stream.copy_batch(&mut batch).unwrap();
    stream.synchronize().unwrap();
    let landed = read(&stream, &to);
    for block in 0..count {
        let part = |at: u64| (at * BLOCK) as usize..((at + 1) * BLOCK) as usize;
        assert_eq!(landed[part(place(block))], bytes[part(block)], "block {block}");
    }
}

#[test]
fn batches_of_any_length_land_to_the_bit() {
    for count in [1, 255, 256, 1024] {
        scatter(count);
    }
}

#[test]
fn a_copy_moves_its_bytes_and_no_others() {
    let context = context(0);
    let range = memory(&context, 4096, &[0]);
    let stream = stream(&context);
    let (base, new) = (pattern(4096, 0), pattern(100, 9));
    fill(&stream, &range, &base);
    fill(&stream, &range.part(1000, 100).unwrap(), &new);
    let seen = read(&stream, &range);
    assert_eq!(seen[..1000], base[..1000]);
    assert_eq!(seen[1000..1100], new[..]);
    assert_eq!(seen[1100..], base[1100..]);
}

#[test]
fn copies_that_cannot_be_are_refused_before_they_are_enqueued() {
    let (one, other) = (context(0), context(1));
    let range = memory(&one, 4096, &[0]);
    let words = PinnedMemory::new(&one, 64).unwrap();
    let (mine, theirs) = (stream(&one), stream(&other));
    let (to, from) = (range.span(0, 64).unwrap(), words.range().span(0, 64).unwrap());
    let lengths = DeviceError::Lengths { to: 64, from: 32 };
    assert_eq!(mine.copy(to, words.range().span(0, 32).unwrap()), Err(lengths));
    let access = DeviceError::NoAccess { device: 1, address: range.address() };
    assert_eq!(theirs.copy(to, from), Err(access.clone()));
    assert_eq!(theirs.write::<u64>(range.word(8).unwrap(), 1), Err(access.clone()));
    assert_eq!(CopyBatch::with_capacity(&other, 1).push(to, from), Err(access));
    let mut batch = CopyBatch::with_capacity(&one, 1);
    batch.push(to, from).unwrap();
    let device = DeviceError::OtherDevice { what: "batch of copies", found: 0, expected: 1 };
    assert_eq!(theirs.copy_batch(&mut batch), Err(device));
    assert_eq!((mine.claims(), theirs.claims()), (0, 0));
}

#[test]
fn capture_takes_single_copies_and_survives_refused_batches() {
    type Begin = unsafe extern "C" fn(*mut c_void, u32) -> u32;
    type End = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> u32;
    /// Others of this process may go on as they like.
    const RELAXED: u32 = 2;
    let context = context(0);
    let range = memory(&context, 4096, &[0]);
    let words = PinnedMemory::new(&context, 64).unwrap();
    let stream = stream(&context);
    let (to, from) = (range.span(0, 64).unwrap(), words.range().span(0, 64).unwrap());
    let mut batch = CopyBatch::with_capacity(&context, 1);
    batch.push(to, from).unwrap();
    // SAFETY: the driver's library, and functions of the driver with these types.
    let driver = unsafe { libloading::Library::new(library()) }.unwrap();
    // SAFETY: as above.
    let (begin, end) = unsafe {
        (
            driver.get::<Begin>("cuStreamBeginCapture_v2").unwrap(),
            driver.get::<End>("cuStreamEndCapture").unwrap(),
        )
    };
    // These calls, unlike the library's, need a current context.
    let _current = super::modules::Current::of(0, &driver);
    // SAFETY: the stream lives.
    assert_eq!(unsafe { begin(stream.handle(), RELAXED) }, 0);
    assert_eq!(stream.is_capturing(), Ok(true));
    assert_eq!(stream.copy_batch(&mut batch), Err(DeviceError::Capturing { call: "cuMemcpyBatchAsync" }));
    stream.copy(to, from).unwrap();
    stream.write::<u64>(words.range().word(8).unwrap(), 1).unwrap();
    let mut graph = std::ptr::null_mut();
    // SAFETY: the stream lives; fills the handle.
    assert_eq!(unsafe { end(stream.handle(), &raw mut graph) }, 0, "the capture is whole");
    assert!(!graph.is_null());
    assert_eq!(stream.is_capturing(), Ok(false));
}
