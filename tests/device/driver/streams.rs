//! Streams, events, memory operations.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sidelane::device::{DeviceRange, Event, MemOpBatch, PinnedMemory, Stream};
use sidelane::error::DeviceError;

use super::{context, stream, until};

#[test]
fn a_wait_ends_when_another_device_writes_the_word() {
    let (one, other) = (context(0), context(1));
    let words = PinnedMemory::new(&one, 64).unwrap();
    let (waits, writes) = (stream(&one), stream(&other));
    waits.wait::<u64>(words.range().word(8).unwrap(), 5).unwrap();
    waits.write::<u32>(words.range().word(32).unwrap(), 77).unwrap();
    assert_eq!(waits.is_done(), Ok(false));
    writes.write::<u64>(words.range().word(8).unwrap(), 4).unwrap();
    writes.synchronize().unwrap();
    assert_eq!(waits.is_done(), Ok(false), "4 is not yet 5");
    writes.write::<u64>(words.range().word(8).unwrap(), 6).unwrap();
    waits.synchronize().unwrap();
    assert_eq!(words.word(8).unwrap().load(Ordering::Acquire), 6);
    assert_eq!(words.word(32).unwrap().load(Ordering::Acquire), 77, "the upper half is another word");
    assert_eq!(words.word(0).unwrap().load(Ordering::Acquire), 0);
}

#[test]
fn stream_wait_ends_on_host_write_and_compares_modulo_wrap() {
    let context = context(0);
    let words = PinnedMemory::new(&context, 8).unwrap();
    let stream = stream(&context);
    words.word(0).unwrap().store(u64::from(u32::MAX), Ordering::Release);
    // Two past the largest value: the host's word is not there yet.
    stream.wait::<u32>(words.range().word(0).unwrap(), 1).unwrap();
    assert_eq!(stream.is_done(), Ok(false));
    words.word(0).unwrap().store(1, Ordering::Release);
    until("the wait ends", || stream.is_done().unwrap());
}

#[test]
fn a_list_of_memory_operations_of_another_device_is_refused() {
    let (one, other) = (context(2), context(0));
    let words = PinnedMemory::new(&one, 16).unwrap();
    let mut list = MemOpBatch::with_capacity(&one, 1);
    list.write(words.range().word::<u64>(0).unwrap(), 1).unwrap();
    let refused = DeviceError::OtherDevice { what: "list of memory operations", found: 2, expected: 0 };
    assert_eq!(stream(&other).operate(&mut list), Err(refused));
}

#[test]
fn event_blocks_stream_of_other_device_until_reached() {
    let (one, other) = (context(0), context(1));
    let words = PinnedMemory::new(&one, 16).unwrap();
    let (first, second) = (stream(&one), stream(&other));
    let event = Event::new(&one).unwrap();
    first.wait::<u64>(words.range().word(0).unwrap(), 1).unwrap();
    event.record(&first).unwrap();
    second.wait_event(&event).unwrap();
    second.write::<u64>(words.range().word(8).unwrap(), 1).unwrap();
    assert_eq!(event.is_done(), Ok(false));
    assert_eq!(words.word(8).unwrap().load(Ordering::Acquire), 0);
    words.word(0).unwrap().store(1, Ordering::Release);
    event.synchronize().unwrap();
    assert_eq!(event.is_done(), Ok(true));
    second.synchronize().unwrap();
    assert_eq!(words.word(8).unwrap().load(Ordering::Acquire), 1);
}

#[test]
fn timed_events_tell_the_time_between_them() {
    let context = context(0);
    let words = PinnedMemory::new(&context, 8).unwrap();
    let stream = stream(&context);
    let (start, end) = (Event::timed(&context).unwrap(), Event::timed(&context).unwrap());
    let refused = |code, name: &str| {
        let (call, name) = ("cuEventElapsedTime", name.to_owned());
        Err(DeviceError::Call { call, device: Some(0), code, name })
    };
    assert_eq!(end.since(&start), refused(400, "CUDA_ERROR_INVALID_HANDLE"), "never recorded");
    let before = Instant::now();
    start.record(&stream).unwrap();
    stream.wait::<u32>(words.range().word(0).unwrap(), 1).unwrap();
    end.record(&stream).unwrap();
    until("the first mark", || start.is_done().unwrap());
    assert_eq!(end.since(&start), refused(600, "CUDA_ERROR_NOT_READY"));
    let between = Instant::now();
    until("some time", || between.elapsed() >= Duration::from_millis(3));
    let least = between.elapsed();
    words.word(0).unwrap().store(1, Ordering::Release);
    stream.synchronize().unwrap();
    let (seen, most) = (end.since(&start).unwrap(), before.elapsed());
    // Milliseconds in 24 bits.
    let rounded = Duration::from_micros(1);
    assert!(least <= seen + rounded && seen <= most + rounded, "{least:?} {seen:?} {most:?}");
    assert_eq!(start.since(&end), Ok(Duration::ZERO), "backwards there is none");
    let untimed = Event::new(&context).unwrap();
    untimed.record(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(untimed.since(&start), refused(400, "CUDA_ERROR_INVALID_HANDLE"));
}

#[test]
fn a_stream_of_another_device_is_refused() {
    let (one, other) = (context(0), context(3));
    let stream = stream(&other);
    let refused = DeviceError::OtherDevice { what: "stream", found: 3, expected: 0 };
    assert_eq!(Event::new(&one).unwrap().record(&stream), Err(refused.clone()));
    // SAFETY: the stream lives.
    let borrowed = unsafe { Stream::borrow(&one, stream.handle()) };
    assert_eq!(borrowed.map(|_| ()), Err(refused));
}

#[test]
fn a_callers_stream_is_used_in_order_with_the_callers_work() {
    let context = context(0);
    let words = PinnedMemory::new(&context, 16).unwrap();
    let callers = stream(&context);
    callers.wait::<u64>(words.range().word(0).unwrap(), 1).unwrap();
    // SAFETY: the stream lives longer than what borrows it.
    let ours = unsafe { Stream::borrow(&context, callers.handle()) }.unwrap();
    ours.write::<u64>(words.range().word(8).unwrap(), 1).unwrap();
    assert_eq!(ours.is_done(), Ok(false));
    words.word(0).unwrap().store(1, Ordering::Release);
    ours.synchronize().unwrap();
    assert_eq!(words.word(8).unwrap().load(Ordering::Acquire), 1);
    // SAFETY: the default stream is always there.
    let default = unsafe { Stream::borrow(&context, std::ptr::null_mut()) }.unwrap();
    default.write::<u64>(words.range().word(8).unwrap(), 2).unwrap();
    default.synchronize().unwrap();
    assert_eq!(words.word(8).unwrap().load(Ordering::Acquire), 2);
}

#[test]
fn stream_dropped_before_its_work_ends_keeps_memory_mapped() {
    let (one, other) = (context(0), context(1));
    let words = PinnedMemory::new(&one, 24).unwrap();
    let keep = Arc::new(());
    // SAFETY: the memory is that of `words`, which lives until the streams have used it for the
    // last time.
    let part = unsafe { DeviceRange::of_caller(words.range().address(), 24, &[0, 1], keep.clone()) };
    let first = stream(&one);
    first.wait::<u64>(part.word(0).unwrap(), 1).unwrap();
    first.write::<u64>(part.word(16).unwrap(), 1).unwrap();
    assert_eq!(first.claims(), 1);
    let done = stream(&other);
    done.write::<u64>(part.word(8).unwrap(), 3).unwrap();
    done.synchronize().unwrap();
    assert_eq!(done.claims(), 0);
    drop((first, done, part));
    assert_eq!(Arc::strong_count(&keep), 2, "the claim of the stream that still waits");
    words.word(0).unwrap().store(1, Ordering::Release);
    until("its work is done all the same", || words.word(16).unwrap().load(Ordering::Acquire) == 1);
}
