//! Noise of the rest of a program beside calls: frees, loads and launches.

use std::panic::{UnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use sidelane::device::{Kernels, PermuteArgs, PinnedMemory, Priority, Stream};

use super::devices::{Memory, context};

/// Runs the body beside what the rest of a program may do on two devices: it takes memory and gives
/// it back, loads kernels and launches them for the first time. Each of these calls waits for the
/// device, and keeps all other threads' calls out meanwhile.
pub fn disturbed(devices: [u32; 2], body: impl FnOnce() + UnwindSafe) {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let over = &over;
        let noise = devices.map(|device| scope.spawn(move || disturb(device, over)));
        let done = catch_unwind(body);
        over.store(true, Ordering::Relaxed);
        noise.into_iter().for_each(|thread| thread.join().unwrap());
        done.unwrap_or_else(|panic| resume_unwind(panic));
    });
}

fn disturb(device: u32, over: &AtomicBool) {
    let context = context(device);
    while !over.load(Ordering::Relaxed) {
        let stream = Stream::new(&context, Priority::Normal).unwrap();
        let kernels = Kernels::load(&context).unwrap();
        let memory = Memory::new(&context, 64);
        let index = memory.fill(&stream, &[0_i32; 4]);
        let words = PinnedMemory::new(&context, 8).unwrap();
        let [from, out] =
            [Memory::new(&context, 64), Memory::new(&context, 64)].map(|memory| memory.part(64));
        kernels
            .regroup(
                &stream,
                &PermuteArgs {
                    row_bytes: 16,
                    sources: 4,
                    rows: 4,
                    from: from.span(0, 64).unwrap(),
                    index: index.span(0, 16).unwrap(),
                    out: out.span(0, 64).unwrap(),
                    runs: None,
                    status: words.range().word(0).unwrap(),
                },
            )
            .unwrap();
    }
}
