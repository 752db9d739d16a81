//! The device room against the fake driver: copies as late as the rules allow, fresh memory
//! poisoned, anything outside of what is mapped refused.
#![allow(
    unsafe_code,
    reason = "kernels, a caller's streams and registered memory are unsafe to use by contract"
)]

mod audit;
mod copies;
mod heap;
mod lent;
mod lock_and_queue;
mod modules;
mod pinned;
mod probe;
mod streams;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sidelane::device::{Context, DeviceRange, Driver, PinnedMemory, Priority, Stream};
use sidelane_testkit::device::gpu::Gpu;

/// Where the fake driver lies.
fn library() -> PathBuf {
    fake_cuda::install().unwrap().join("libcuda.so.1")
}

fn driver() -> Driver {
    let driver = Driver::load(Some(&library())).unwrap();
    assert!(driver.is_fake(), "tests run without a GPU");
    driver
}

fn context(device: u32) -> Arc<Context> {
    driver().context(device).unwrap()
}

/// A device for checks of the test kit, on a machine that may be busy.
fn gpu(device: u32) -> Gpu {
    Gpu { patience: Duration::from_secs(60), ..Gpu::of(context(device), true) }
}

fn stream(context: &Arc<Context>) -> Stream {
    Stream::new(context, Priority::Highest).unwrap()
}

/// Polls until the condition holds, and panics if it does not.
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

/// Bytes that differ by place and by `salt`.
fn pattern(len: usize, salt: u64) -> Vec<u8> {
    (0..len as u64).map(|i| ((i + salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// Copies bytes to a range and waits.
fn fill(stream: &Stream, to: &DeviceRange, bytes: &[u8]) {
    let staging = PinnedMemory::new(&context(stream.device()), bytes.len()).unwrap();
    staging.write(0, bytes).unwrap();
    let len = bytes.len() as u64;
    stream.copy(to.span(0, len).unwrap(), staging.range().span(0, len).unwrap()).unwrap();
    stream.synchronize().unwrap();
}

/// Copies a range to the host and waits.
fn read(stream: &Stream, from: &DeviceRange) -> Vec<u8> {
    let staging = PinnedMemory::new(&context(stream.device()), from.len() as usize).unwrap();
    let whole = from.span(0, from.len()).unwrap();
    stream.copy(staging.range().span(0, from.len()).unwrap(), whole).unwrap();
    stream.synchronize().unwrap();
    let mut bytes = vec![0; from.len() as usize];
    staging.read(0, &mut bytes).unwrap();
    bytes
}
