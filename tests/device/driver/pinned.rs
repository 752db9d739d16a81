//! Pinned memory of the host.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sidelane::device::PinnedMemory;
use sidelane::error::DeviceError;

use super::{context, fill, pattern, read, stream};

#[test]
fn new_pinned_memory_is_zero_and_read_back_as_written() {
    let context = context(0);
    let memory = PinnedMemory::new(&context, 1000).unwrap();
    let mut bytes = vec![1; 1000];
    memory.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, vec![0; 1000]);
    memory.write(10, &pattern(20, 2)).unwrap();
    assert_eq!(read(&stream(&context), &memory.range().part(10, 20).unwrap()), pattern(20, 2));
    // Words amid the bytes are written and read as such.
    for (offset, len) in [(10, 20), (16, 8), (17, 3), (24, 5), (29, 1)] {
        let mut part = vec![0; len];
        memory.read(offset, &mut part).unwrap();
        assert_eq!(part, pattern(20, 2)[offset - 10..][..len], "{len} bytes at {offset}");
    }
}

#[test]
fn accesses_outside_are_refused() {
    let memory = PinnedMemory::new(&context(0), 64).unwrap();
    let outside = |offset, len| Err(DeviceError::OutOfRange { offset, len, size: 64 });
    assert_eq!(memory.write(60, &[0; 5]), outside(60, 5));
    assert_eq!(memory.read(65, &mut []), outside(65, 0));
    assert_eq!(memory.word(57).map(|_| ()), outside(57, 8));
    assert!(matches!(memory.word(4), Err(DeviceError::Misaligned { align: 8, .. })));
}

#[test]
fn memory_that_is_there_is_pinned_where_it_lies_and_kept() {
    let context = context(0);
    let words: Arc<Vec<AtomicU64>> = Arc::new((0..1024).map(AtomicU64::new).collect());
    let first = NonNull::from(&words[0]).cast();
    // SAFETY: atomics, which live as long as the claim handed over.
    let memory = unsafe { PinnedMemory::register(&context, first, 8192, words.clone()) }.unwrap();
    assert_eq!(memory.word(8 * 77).unwrap().load(Ordering::Acquire), 77);
    let stream = stream(&context);
    stream.write::<u64>(memory.range().word(8 * 5).unwrap(), 555).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words[5].load(Ordering::Acquire), 555);
    fill(&stream, &memory.range().part(16, 8).unwrap(), &9_u64.to_ne_bytes());
    assert_eq!(words[2].load(Ordering::Acquire), 9);
    assert!(!memory.is_claimed(), "the stream was seen to be done");
    let range = memory.range().clone();
    assert!(memory.is_claimed());
    drop(memory);
    assert_eq!(Arc::strong_count(&words), 2, "a range is a claim");
    drop(range);
    assert_eq!(Arc::strong_count(&words), 1);
}
