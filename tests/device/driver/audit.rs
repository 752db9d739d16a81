//! What `gpu-check` audits with: the hold, and the list by CUPTI.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fake_cuda::all_kernels;
use sidelane::device::{
    Activity, ActivityKind, AuditKernels, Channel, Context, CopyBatch, Cupti, PinnedMemory, Stream,
};
use sidelane::error::DeviceError;
use sidelane_testkit::TestError;
use sidelane_testkit::device::copied_dispatch::{Dispatch, Peers, RANKS, all_done};
use sidelane_testkit::device::driver::{CHECKS, Streams};
use sidelane_testkit::device::hold::Held;

use super::copies::memory;
use super::{context, driver, gpu, stream, until};
use crate::apart::{apart, each};

#[test]
fn hold_occupies_every_multiprocessor_until_released_or_dropped() {
    apart(
        "driver::audit::hold_occupies_every_multiprocessor_until_released_or_dropped",
        &[("SIDELANE_FAKE_CUDA_KERNELS", all_kernels().unwrap().to_str().unwrap())],
        || {
            let context = context(0);
            let audit = AuditKernels::load(&context).unwrap();
            let (holder, other) = (stream(&context), stream(&context));
            let hold = audit.hold().unwrap();
            // Eight blocks of 256 threads are all that a multiprocessor runs.
            assert_eq!(hold.blocks(), 8 * context.facts().multiprocessors);
            assert_eq!(hold.running(), 0, "not taken yet");
            let gpu = gpu(0);
            let held = Held::new(&gpu, &audit).unwrap();
            for _ in 0..3 {
                // Freed behind the hold: a call that waits for the context would wait for it.
                let word = PinnedMemory::new(&context, 8).unwrap();
                let beside = held.during(&gpu, || {
                    // Work of another stream comes and goes.
                    audit.touch(&other, word.range().word(0)?)?;
                    gpu.finish(&other, "a kernel beside it")?;
                    Ok::<_, TestError>(word.word(0)?.load(Ordering::Acquire))
                });
                assert_eq!(beside.unwrap(), 1);
            }
            hold.take(&holder).unwrap();
            drop(hold);
            until("a hold that is dropped ends", || holder.is_done().unwrap());
            let elsewhere = stream(&super::context(1));
            let refused = audit.hold().unwrap().take(&elsewhere);
            assert!(matches!(refused, Err(DeviceError::NoAccess { device: 1, .. })), "{refused:?}");
        },
    );
}

#[test]
fn every_needed_driver_function_passes_its_gpu_check() {
    apart(
        "driver::audit::every_needed_driver_function_passes_its_gpu_check",
        &[("SIDELANE_FAKE_CUDA_KERNELS", all_kernels().unwrap().to_str().unwrap())],
        || {
            let streams = Streams::new(gpu(2)).unwrap();
            for check in CHECKS {
                check.run(&streams).unwrap_or_else(|error| panic!("{}: {error}", check.what));
            }
        },
    );
}

#[test]
fn stream_dispatch_lands_exact_bits_at_both_kinds_of_peers() {
    let gpu = gpu(0);
    let (staging, ranks) = (stream(&gpu.context), gpu.streams(RANKS as usize).unwrap());
    for peers in Peers::ALL {
        for bytes in [64, 16 << 10] {
            let mut dispatch = Dispatch::packed(&gpu, &staging, peers, bytes).unwrap();
            dispatch.check(&gpu, &staging).unwrap_err();
            dispatch.enqueue(&ranks).unwrap();
            gpu.until("a dispatch", || all_done(&ranks)).unwrap();
            dispatch.check(&gpu, &staging).unwrap();
            // A copy to each of the others, and for each a signal and a wait at least.
            let (copies, operations) = dispatch.counts();
            let pairs = u64::from(RANKS * (RANKS - 1));
            assert!(copies == pairs && operations >= 2 * pairs, "{copies} {operations}");
        }
    }
}

/// What a list has, without times, which must be in order.
fn done(cupti: &Cupti) -> Vec<ActivityKind> {
    let all = cupti.recorded().unwrap();
    for Activity { start, end, .. } in &all {
        assert!(0 < *start && start <= end, "{all:?}");
    }
    assert!(all.is_sorted_by_key(|activity| activity.start));
    all.into_iter().map(|activity| activity.did).collect()
}

fn touch(audit: &AuditKernels, context: &Arc<Context>, stream: &Stream, times: usize) {
    let word = PinnedMemory::new(context, 8).unwrap();
    for _ in 0..times {
        audit.touch(stream, word.range().word(0).unwrap()).unwrap();
    }
    stream.synchronize().unwrap();
}

#[test]
fn cupti_lists_kernels_and_copies_with_the_queue_that_took_them() {
    let cupti = fake_cuda::install().unwrap().join("libcupti.so.12");
    apart(
        "driver::audit::cupti_lists_kernels_and_copies_with_the_queue_that_took_them",
        &[
            ("SIDELANE_FAKE_CUDA_KERNELS", all_kernels().unwrap().to_str().unwrap()),
            // The wish of a batch counts from here on.
            ("SIDELANE_FAKE_CUDA_DRIVER", "13010"),
            ("SIDELANE_CUPTI_LIBRARY", cupti.to_str().unwrap()),
        ],
        || {
            let cupti = Cupti::open(&driver()).unwrap();
            assert!(cupti.name().ends_with("libcupti.so.12"));
            assert_eq!(cupti.version(), 23);
            let (one, other) = (context(0), context(1));
            let audit = AuditKernels::load(&one).unwrap();
            let stream = stream(&one);
            assert_eq!(done(&cupti), [], "nothing was done");

            let kernel = || ActivityKind::Kernel { name: "touch".into() };
            let copy = |bytes, channel| ActivityKind::Copy { bytes, channel };
            touch(&audit, &one, &stream, 1);
            assert_eq!(done(&cupti), [kernel()]);
            assert_eq!(done(&cupti), [], "told once");

            let host = PinnedMemory::new(&one, 64).unwrap();
            let (near, far) = (memory(&one, 128, &[0]), memory(&other, 64, &[0, 1]));
            let half = |at| near.span(at, 64).unwrap();
            stream.copy(half(0), host.range().span(0, 64).unwrap()).unwrap();
            stream.synchronize().unwrap();
            stream.copy(half(64), half(0)).unwrap();
            stream.synchronize().unwrap();
            stream.copy(far.span(0, 64).unwrap(), half(0)).unwrap();
            stream.synchronize().unwrap();
            let mut batch = CopyBatch::with_capacity(&one, 1);
            batch.push(near.span(64, 32).unwrap(), near.span(0, 32).unwrap()).unwrap();
            stream.copy_batch(&mut batch).unwrap();
            stream.synchronize().unwrap();
            let expected = [
                copy(64, Channel::CopyEngine),
                copy(64, Channel::Compute),
                copy(64, Channel::CopyEngine),
                copy(32, Channel::CopyEngine),
            ];
            assert_eq!(done(&cupti), expected, "from the host, within, between, within by a wish");

            // More than a buffer holds.
            touch(&audit, &one, &stream, 6000);
            assert_eq!(done(&cupti), vec![kernel(); 6000]);

            drop(cupti);
            touch(&audit, &one, &stream, 1);
            let again = Cupti::open(&driver()).unwrap();
            assert_eq!(done(&again), [], "nobody listened");
        },
    );
}

#[test]
fn cupti_with_unknown_records_is_refused_by_version() {
    let library = fake_cuda::install().unwrap().join("libcupti.so.12").to_str().unwrap().to_owned();
    apart(
        "driver::audit::cupti_with_unknown_records_is_refused_by_version",
        &[("SIDELANE_CUPTI_LIBRARY", &library), ("SIDELANE_FAKE_CUDA_CUPTI", "17")],
        || {
            let refused = DeviceError::OldCupti { library: library.clone(), version: 17, needed: 18 };
            assert_eq!(Cupti::open(&driver()).unwrap_err(), refused);
        },
    );
}

#[test]
fn without_cupti_it_is_said_what_is_missing() {
    each(
        "driver::audit::without_cupti_it_is_said_what_is_missing",
        &[
            &[("SIDELANE_CUPTI_LIBRARY", "/nonexistent/libcupti.so.12")],
            &[("SIDELANE_CUPTI_LIBRARY", "libc.so.6")],
            &[("SIDELANE_CUPTI_LIBRARY", "")],
        ],
        || {
            let error = Cupti::open(&driver()).unwrap_err();
            match std::env::var("SIDELANE_CUPTI_LIBRARY").unwrap().as_str() {
                "libc.so.6" => {
                    let (library, symbol) = ("libc.so.6".into(), "cuptiGetVersion");
                    assert_eq!(error, DeviceError::MissingSymbol { library, symbol });
                }
                path => {
                    let DeviceError::NoCupti { library, .. } = &error else { panic!("{error:?}") };
                    assert_eq!(library, if path.is_empty() { "libcupti" } else { path });
                    let said = error.to_string();
                    assert!(
                        said.starts_with("no CUPTI: ") && said.contains("SIDELANE_CUPTI_LIBRARY"),
                        "{said}"
                    );
                }
            }
        },
    );
}
