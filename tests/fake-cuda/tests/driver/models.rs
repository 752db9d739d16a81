//! Models of what drivers do behind their manual: each switch, off and on.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::*;
use crate::kernels::{function, launch, library, module};
use crate::{cu, ok};

const WORDS: usize = 64;

/// What has not moved for so long is held up; what has gone on for so long is not.
const LONG: Duration = Duration::from_secs(1);

/// One run with a switch off, and one with it on.
fn off_and_on(name: &'static str, on: &str, usual: Vec<(&'static str, String)>) -> [Settings<'static>; 2] {
    ["0", on].map(|value| [&usual[..], &[(name, value.to_owned())]].concat())
}

/// Whether a switch is on in this run.
fn is_on(name: &str) -> bool {
    std::env::var(name).is_ok_and(|value| value != "0")
}

/// Sets a word that streams wait for.
fn set(word: &mut u32) {
    // SAFETY: the word exists; streams read it meanwhile.
    unsafe { std::ptr::from_mut(word).write_volatile(1) }
}

/// Whether a loop keeps running for as long as it takes to tell.
fn goes_on(count: &AtomicU64) -> bool {
    let (since, mut seen) = (Instant::now(), count.load(Ordering::Acquire));
    let mut moved = Instant::now();
    loop {
        let now = count.load(Ordering::Acquire);
        if now != seen {
            (seen, moved) = (now, Instant::now());
        }
        if moved.elapsed() > LONG {
            return false;
        }
        if since.elapsed() > 2 * LONG {
            return true;
        }
        thread::yield_now();
    }
}

/// Whether another thread's copies pass, while `call` waits for a stream that waits for the host.
fn others_pass_beside(call: impl FnOnce(sys::CUstream) + Send) -> bool {
    let (at, words) = host_words(2);
    let (target, waits, other) = (device_words(2), stream(), stream());
    ok!(cuStreamWaitValue32_v2(waits, at, 1, 0));
    let (calling, over, copies) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
    // Handles are numbers.
    let (waits, other) = (waits.addr(), other.addr());
    let stream = std::ptr::without_provenance_mut::<sys::CUstream_st>;
    let release = &mut words[0];
    let passed = thread::scope(|scope| {
        scope.spawn(|| {
            use_device(0);
            calling.store(true, Ordering::Release);
            call(stream(waits));
        });
        until(|| calling.load(Ordering::Acquire));
        scope.spawn(|| {
            use_device(0);
            while !over.load(Ordering::Acquire) {
                ok!(cuMemcpyHtoDAsync_v2(target, (at + 4) as *const _, 4, stream(other)));
                ok!(cuStreamSynchronize(stream(other)));
                copies.fetch_add(1, Ordering::Release);
            }
        });
        let passed = goes_on(&copies);
        over.store(true, Ordering::Release);
        set(release);
        passed
    });
    ok!(cuCtxSynchronize());
    passed
}

const LOCKS: &str = "SIDELANE_FAKE_CUDA_LOCKS";

#[test]
fn freed_memory_holds_the_lock_until_the_device_is_drained() {
    let runs = off_and_on(LOCKS, "1", vec![]);
    apart("models::freed_memory_holds_the_lock_until_the_device_is_drained", &runs, || {
        start(0);
        let memory = device_words(WORDS);
        assert_ne!(others_pass_beside(|_| ok!(cuMemFree_v2(memory))), is_on(LOCKS));
        let (pinned, _) = host_words(WORDS);
        assert_ne!(others_pass_beside(|_| ok!(cuMemFreeHost(pinned as *mut _))), is_on(LOCKS));
    });
}

#[test]
fn mapped_memory_holds_the_lock_until_the_device_is_drained() {
    let runs = off_and_on(LOCKS, "1", vec![]);
    apart("models::mapped_memory_holds_the_lock_until_the_device_is_drained", &runs, || {
        start(0);
        let reserved = made(|out| ok!(cuMemAddressReserve(out, GRANULARITY, 0, 0, 0)));
        let handle = made(|out| ok!(cuMemCreate(out, GRANULARITY, &properties(0, true), 0)));
        let map = |_| ok!(cuMemMap(reserved, GRANULARITY, 0, handle, 0));
        assert_ne!(others_pass_beside(map), is_on(LOCKS));
        let write = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        assert_ne!(others_pass_beside(|_| grant(reserved, GRANULARITY, 0, write)), is_on(LOCKS));
    });
}

#[test]
fn loaded_code_holds_the_lock_until_the_device_is_drained() {
    let runs = off_and_on(LOCKS, "1", library("locks"));
    apart("models::loaded_code_holds_the_lock_until_the_device_is_drained", &runs, || {
        start(0);
        let words = device_words(WORDS);
        let scale = function(module(), c"scale").addr();
        let first = move |waits| launch(std::ptr::without_provenance_mut(scale), words, 1, waits);
        assert_ne!(others_pass_beside(first), is_on(LOCKS), "a kernel's first launch");
        assert_ne!(others_pass_beside(|_| _ = module()), is_on(LOCKS), "a module");
    });
}

const ROOM: &str = "SIDELANE_FAKE_CUDA_LAUNCH_QUEUE";

/// Enqueues writes behind a wait, from another thread; how many are taken before that has to wait,
/// if it has to.
fn taken_behind_a_wait(writes: u64) -> Option<u64> {
    let (at, words) = host_words(2);
    let waits = stream();
    ok!(cuStreamWaitValue32_v2(waits, at, 1, 0));
    let (waits, taken) = (waits.addr(), AtomicU64::new(0));
    let stream = std::ptr::without_provenance_mut::<sys::CUstream_st>;
    let release = &mut words[0];
    let full = thread::scope(|scope| {
        scope.spawn(|| {
            use_device(0);
            for value in 0..writes {
                ok!(cuStreamWriteValue32_v2(stream(waits), at + 4, value as u32, 0));
                taken.fetch_add(1, Ordering::Release);
            }
        });
        let since = Instant::now();
        while taken.load(Ordering::Acquire) < writes && since.elapsed() < LONG {
            thread::yield_now();
        }
        let full = Some(taken.load(Ordering::Acquire)).filter(|&taken| taken < writes);
        set(release);
        full
    });
    ok!(cuStreamSynchronize(stream(waits)));
    assert_eq!(taken.load(Ordering::Acquire), writes);
    full
}

#[test]
fn full_launch_queue_holds_up_who_enqueues() {
    let runs = off_and_on(ROOM, "16", vec![]);
    apart("models::full_launch_queue_holds_up_who_enqueues", &runs, || {
        start(0);
        // The wait is taken from the queue, so it is no entry of it any more.
        let expected = is_on(ROOM).then_some(16..=17);
        match (taken_behind_a_wait(300), expected) {
            (None, None) => {}
            (Some(taken), Some(expected)) => assert!(expected.contains(&taken), "{taken}"),
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn caller_that_waits_for_queue_room_holds_lock() {
    let runs = off_and_on(LOCKS, "1", vec![(ROOM, "16".to_owned())]);
    apart("models::caller_that_waits_for_queue_room_holds_lock", &runs, || {
        start(0);
        let (word, _) = host_words(1);
        let many = |waits| {
            for value in 0..64 {
                ok!(cuStreamWriteValue32_v2(waits, word, value, 0));
            }
        };
        assert_ne!(others_pass_beside(many), is_on(LOCKS));
    });
}

const COPY_QUEUES: &str = "SIDELANE_FAKE_CUDA_COPY_QUEUES";

#[test]
fn copies_of_a_direction_share_a_queue_apart_from_compute() {
    let runs = off_and_on(COPY_QUEUES, "1", vec![]);
    apart("models::copies_of_a_direction_share_a_queue_apart_from_compute", &runs, || {
        let fake_driver = start(0);
        let (at, words) = host_words(8);
        let (one, other) = (device_words(1), device_words(1));
        let waits = stream();
        ok!(cuStreamWaitValue32_v2(waits, at, 1, 0));
        ok!(cuMemcpyDtoHAsync_v2((at + 4) as *mut _, one, 4, waits));
        let ways: [(u64, &dyn Fn(sys::CUstream)); 3] = [
            (8, &|stream| ok!(cuMemcpyHtoDAsync_v2(other, (at + 28) as *const _, 4, stream))),
            (12, &|stream| ok!(cuMemcpyDtoDAsync_v2(other, one, 4, stream))),
            (16, &|stream| ok!(cuMemcpyDtoHAsync_v2((at + 24) as *mut _, one, 4, stream))),
        ];
        for (word, copy) in ways {
            let stream = stream();
            copy(stream);
            ok!(cuStreamWriteValue32_v2(stream, at + word, 1, 0));
        }
        // SAFETY: the words are there; streams write them meanwhile.
        let seen = |word: usize| unsafe { words.as_ptr().add(word).read_volatile() };
        until(|| seen(2) == 1 && seen(3) == 1);
        let since = Instant::now();
        while seen(4) == 0 && since.elapsed() < LONG {
            thread::yield_now();
        }
        assert_eq!(
            seen(4) == 0,
            is_on(COPY_QUEUES),
            "a copy to the host behind the one of a stream that waits"
        );
        set(&mut words[0]);
        ok!(cuCtxSynchronize());
        assert_eq!(words[4], 1);
        assert_eq!(fake_driver.counters().copies, 4);
    });
}

#[test]
fn batch_over_queues_of_all_directions_lands_before_next_word() {
    let runs = [vec![(COPY_QUEUES, "2".to_owned())]];
    apart("models::batch_over_queues_of_all_directions_lands_before_next_word", &runs, || {
        start(0);
        let (a, b, c) = (device_words(WORDS), device_words(WORDS), device_words(WORDS));
        let (host, words) = host_words(2 * WORDS);
        let (writer, reader) = (stream(), stream());
        let (flag, bytes) = (device_words(1), WORDS * 4);
        fill_words(flag, 0, 1);
        for round in 1..200 {
            words[..WORDS].fill(round);
            fill_words(a, round, WORDS);
            fill_words(b, round + 7, WORDS);
            let all = [(c, host, bytes), (a, b, bytes)];
            assert_eq!(batch(&all, BESIDE, writer), CUresult::CUDA_SUCCESS);
            ok!(cuMemcpyDtoHAsync_v2((host + bytes as u64) as *mut _, a, bytes, writer));
            ok!(cuStreamWriteValue32_v2(writer, flag, round, 0));
            ok!(cuStreamWaitValue32_v2(reader, flag, round, 0));
            ok!(cuMemcpyDtoHAsync_v2(host as *mut _, c, bytes, reader));
            ok!(cuStreamSynchronize(reader));
            assert_eq!(words[..WORDS], [round; WORDS]);
            assert_eq!(words[WORDS..], [round + 7; WORDS]);
        }
    });
}

const PRIORITY_QUEUES: &str = "SIDELANE_FAKE_CUDA_PRIORITY_QUEUES";

#[test]
fn stream_of_other_priority_passes_if_priorities_have_queues() {
    let one = vec![("CUDA_DEVICE_MAX_CONNECTIONS", "1".to_owned())];
    let runs = off_and_on(PRIORITY_QUEUES, "1", one);
    apart("models::stream_of_other_priority_passes_if_priorities_have_queues", &runs, || {
        let fake_driver = start(0);
        let (word, _) = host_words(1);
        let (waits, urgent) = (stream(), made(|out| ok!(cuStreamCreateWithPriority(out, 1, -5))));
        ok!(cuStreamWaitValue32_v2(waits, word, 1, 0));
        ok!(cuStreamWriteValue32_v2(urgent, word, 1, 0));
        let since = Instant::now();
        while cu!(cuStreamQuery(waits)) != CUresult::CUDA_SUCCESS && since.elapsed() < LONG {
            thread::yield_now();
        }
        assert_eq!(cu!(cuStreamQuery(waits)) == CUresult::CUDA_SUCCESS, is_on(PRIORITY_QUEUES));
        fake_driver.stop();
    });
}

#[test]
fn words_in_memory_of_other_device_are_refused_from_cuda_13_1() {
    let runs = ["12080", "13000", "13010"].map(|version| vec![("SIDELANE_FAKE_CUDA_DRIVER", version.into())]);
    apart("models::words_in_memory_of_other_device_are_refused_from_cuda_13_1", &runs, || {
        start(0);
        let one = use_device(1);
        let theirs = device_words(1);
        use_device(0);
        ok!(cuCtxEnablePeerAccess(one, 0));
        let (own, (host, _), stream) = (device_words(1), host_words(1), stream());
        let refused = made(|out| ok!(cuDriverGetVersion(out))) >= 13010;
        let expected = if refused { CUresult::CUDA_ERROR_NOT_SUPPORTED } else { CUresult::CUDA_SUCCESS };
        assert_eq!(cu!(cuStreamWriteValue32_v2(stream, theirs, 1, 0)), expected);
        assert_eq!(cu!(cuStreamWaitValue32_v2(stream, theirs, 1, 0)), expected);
        ok!(cuStreamWriteValue32_v2(stream, own, 1, 0));
        ok!(cuStreamWriteValue32_v2(stream, host, 1, 0));
        ok!(cuStreamSynchronize(stream));
    });
}

#[test]
fn wait_is_without_a_cause_until_its_write_is_enqueued() {
    apart("models::wait_is_without_a_cause_until_its_write_is_enqueued", &plainly(), || {
        let fake_driver = start(0);
        let without = || fake_driver.counters().waits_without_cause;
        let (at, words) = host_words(4);
        let (waits, writes) = (stream(), stream());
        ok!(cuStreamWriteValue32_v2(writes, at, 1, 0));
        ok!(cuStreamWaitValue32_v2(waits, at, 1, 0));
        assert_eq!(without(), 0, "the write is enqueued");
        ok!(cuStreamWaitValue32_v2(waits, at + 4, 1, 0));
        assert_eq!(without(), 1, "the write is not");
        ok!(cuStreamWriteValue32_v2(writes, at + 4, 1, 0));
        fake_driver.written_elsewhere(at + 8, 4);
        ok!(cuStreamWaitValue32_v2(waits, at + 8, 1, 0));
        assert_eq!(without(), 1, "the host writes it");
        set(&mut words[2]);
        // The same memory at two addresses.
        let handle = made(|out| ok!(cuMemCreate(out, GRANULARITY, &properties(0, true), 0)));
        let (one, other) = (map_for(handle, GRANULARITY, 0), map_for(handle, GRANULARITY, 0));
        fill_words(one, 0, 1);
        ok!(cuStreamWriteValue32_v2(writes, one, 1, 0));
        ok!(cuStreamWaitValue32_v2(waits, other, 1, 0));
        assert_eq!(without(), 1);
        // Reset by the waiting stream: the next wait needs a write of its own.
        ok!(cuStreamWriteValue32_v2(waits, other, 0, 0));
        let reset = made(|out| ok!(cuEventCreate(out, 0)));
        ok!(cuEventRecord(reset, waits));
        ok!(cuStreamWaitValue32_v2(waits, other, 1, 0));
        assert_eq!(without(), 2);
        // Written before the reset, it would be lost, and the wait would never end.
        ok!(cuStreamWaitEvent(writes, reset, 0));
        ok!(cuStreamWriteValue32_v2(writes, one, 1, 0));
        ok!(cuCtxSynchronize());
    });
}
