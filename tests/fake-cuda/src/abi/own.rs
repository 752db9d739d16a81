//! Functions of the fake only.

use super::pointers::Out;
use super::{cublas, virt};
use crate::cause;
use crate::counters::{COUNTERS, Counters};
use crate::driver;

/// What `sidelane_fake_cuda` answers: "lane".
pub const MAGIC: u32 = u32::from_be_bytes(*b"lane");

/// The existence of this function identifies the fake. Its result is `MAGIC`.
#[unsafe(no_mangle)]
extern "C" fn sidelane_fake_cuda() -> u32 {
    MAGIC
}

/// Work of the fake in this process so far.
#[unsafe(no_mangle)]
extern "C" fn sidelane_fake_cuda_counters(counters: Out<Counters>) {
    counters.offer(COUNTERS.read());
}

/// The host, a NIC or another process writes these bytes.
#[unsafe(no_mangle)]
extern "C" fn sidelane_fake_cuda_declare(at: u64, bytes: u64) {
    cause::declare(at, bytes);
}

/// The next call of this kind for this device is refused: 0 of memory that is created, 1 of memory
/// that is mapped, 2 of access that is granted. Of the last two, the device is the context's.
#[unsafe(no_mangle)]
extern "C" fn sidelane_fake_cuda_refuse_memory(device: u32, kind: u32) {
    virt::refuse(device as usize, kind);
}

/// Ends all waits of streams, now and later. Each context in which one ended answers
/// `CUDA_ERROR_LAUNCH_TIMEOUT`.
#[unsafe(no_mangle)]
extern "C" fn sidelane_fake_cuda_stop() {
    driver::stop();
}

/// Products of cuBLAS on this device fail from now on.
#[unsafe(no_mangle)]
extern "C" fn sidelane_fake_cuda_break_cublas(device: u32) {
    cublas::break_device(device as usize);
}
