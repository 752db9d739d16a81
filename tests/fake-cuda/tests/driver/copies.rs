//! Copies: to the bit where the program is right, late where it is not.

use crate::common::*;
use crate::{cu, ok};

const WORDS: usize = 4096;
const ROUNDS: u32 = 50;

/// Rounds that a program with a fault may take until the fault shows.
const MANY_ROUNDS: u32 = 20_000;

#[test]
fn ordered_copies_land_to_the_bit() {
    apart("copies::ordered_copies_land_to_the_bit", &seeds(4), || {
        let fake_driver = start(0);
        let (a, b) = (device_words(WORDS), device_words(WORDS));
        let (host, words) = host_words(WORDS);
        words.iter_mut().zip(0..).for_each(|(word, value)| *word = value);
        let stream = stream();
        ok!(cuMemcpyHtoDAsync_v2(a, host as *const _, WORDS * 4, stream));
        let half = WORDS * 2;
        let halves = [(b, a, half), (b + half as u64, a + half as u64, half)];
        assert_eq!(batch(&halves, BESIDE, stream), CUresult::CUDA_SUCCESS);
        ok!(cuStreamSynchronize(stream));
        assert_eq!(read_words(b, WORDS), (0..WORDS as u32).collect::<Vec<_>>());
        let counted = fake_driver.counters();
        // Those of the batch: its wish to overlap counts from CUDA 13.1 on.
        assert_eq!((counted.copies, counted.copy_batches, counted.copies_by_sms), (4, 1, 2));
        assert_eq!(counted.copied_bytes, 3 * WORDS as u64 * 4);
    });
}

/// Whether a reader in another stream got other bytes than the copied ones in one of this many
/// rounds.
fn reads_stale(rounds: u32, order: impl Fn(sys::CUstream, sys::CUstream)) -> bool {
    let (a, b, c) = (device_words(WORDS), device_words(WORDS), device_words(WORDS));
    let (writer, reader) = (stream(), stream());
    let stale = |round: u32| {
        fill_words(a, round, WORDS);
        ok!(cuMemcpyDtoDAsync_v2(b, a, WORDS * 4, writer));
        order(writer, reader);
        ok!(cuMemcpyDtoDAsync_v2(c, b, WORDS * 4, reader));
        ok!(cuStreamSynchronize(reader));
        let wrong = read_words(c, WORDS) != vec![round; WORDS];
        ok!(cuStreamSynchronize(writer));
        wrong
    };
    (1..=rounds).any(stale)
}

#[test]
fn a_reader_that_forgot_the_event_reads_old_bytes() {
    apart("copies::a_reader_that_forgot_the_event_reads_old_bytes", &seeds(3), || {
        start(0);
        assert!(reads_stale(MANY_ROUNDS, |_, _| {}));
    });
}

#[test]
fn a_reader_behind_the_event_never_does() {
    apart("copies::a_reader_behind_the_event_never_does", &seeds(3), || {
        start(0);
        let event = event();
        let stale = reads_stale(ROUNDS, |writer, reader| {
            ok!(cuEventRecord(event, writer));
            ok!(cuStreamWaitEvent(reader, event, 0));
        });
        assert!(!stale);
    });
}

/// The writer signals the reader by a word; `flags` of the write are 0, or 1 for no barrier before
/// it.
fn told_by_a_word(rounds: u32, flags: u32) -> bool {
    let word = device_words(1);
    fill_words(word, 0, 1);
    let round = std::cell::Cell::new(0);
    reads_stale(rounds, |writer, reader| {
        round.set(round.get() + 1);
        ok!(cuStreamWriteValue32_v2(writer, word, round.get(), flags));
        ok!(cuStreamWaitValue32_v2(reader, word, round.get(), 0));
    })
}

#[test]
fn a_word_is_seen_after_the_copies_before_it() {
    apart("copies::a_word_is_seen_after_the_copies_before_it", &seeds(3), || {
        start(0);
        assert!(!told_by_a_word(ROUNDS, 0));
    });
}

#[test]
fn a_word_without_a_barrier_overtakes_copies() {
    apart("copies::a_word_without_a_barrier_overtakes_copies", &seeds(3), || {
        start(0);
        assert!(told_by_a_word(MANY_ROUNDS, 1));
    });
}

#[test]
fn a_source_that_is_used_again_too_early_shows() {
    apart("copies::a_source_that_is_used_again_too_early_shows", &seeds(3), || {
        start(0);
        let to = device_words(1);
        let (from, source) = host_words(1);
        let stream = stream();
        let spoiled = |order, rounds: u32| {
            let attributes = CopyAttributes { order, ..BESIDE };
            let wrong = |round: u32| {
                source[0] = round;
                assert_eq!(batch(&[(to, from, 4)], attributes, stream), CUresult::CUDA_SUCCESS);
                source[0] = u32::MAX;
                ok!(cuStreamSynchronize(stream));
                read_words(to, 1) != [round]
            };
            (1..=rounds).any(wrong)
        };
        const IN_STREAM_ORDER: u32 = 1;
        const DURING_THE_CALL: u32 = 2;
        let mut spoiled = spoiled;
        assert!(spoiled(IN_STREAM_ORDER, MANY_ROUNDS));
        assert!(!spoiled(DURING_THE_CALL, ROUNDS));
    });
}

#[test]
fn a_copy_that_nothing_needs_runs_in_the_end() {
    apart("copies::a_copy_that_nothing_needs_runs_in_the_end", &seeds(3), || {
        start(0);
        let (from, _) = host_words(1);
        let to = device_words(1);
        let stream = stream();
        ok!(cuMemcpyHtoDAsync_v2(to, from as *const _, 4, stream));
        until(|| cu!(cuStreamQuery(stream)) == CUresult::CUDA_SUCCESS);
        assert_eq!(read_words(to, 1), [0]);
    });
}

#[test]
fn copies_that_sms_would_run_are_counted() {
    let runs = ["12080", "13000", "13010"].map(|version| vec![("SIDELANE_FAKE_CUDA_DRIVER", version.into())]);
    apart("copies::copies_that_sms_would_run_are_counted", &runs, || {
        let fake_driver = start(0);
        // Before CUDA 13.1 the wish of a batch counts for nothing.
        let batched = u64::from(made(|out| ok!(cuDriverGetVersion(out))) < 13010);
        let (a, b) = (device_words(WORDS), device_words(WORDS));
        let (host, _) = host_words(WORDS);
        use_device(1);
        let elsewhere = device_words(WORDS);
        let one = use_device(1);
        let zero = use_device(0);
        ok!(cuCtxEnablePeerAccess(one, 0));
        let stream = stream();
        let by_sms = || {
            ok!(cuStreamSynchronize(stream));
            fake_driver.counters().copies_by_sms
        };
        assert_eq!(batch(&[(b, a, WORDS * 4)], BESIDE, stream), CUresult::CUDA_SUCCESS);
        ok!(cuMemcpyAsync(host, a, WORDS * 4, stream));
        ok!(cuMemcpyPeerAsync(elsewhere, one, a, zero, WORDS * 4, stream));
        assert_eq!(by_sms(), batched);
        ok!(cuMemcpyDtoDAsync_v2(b, a, WORDS * 4, stream));
        assert_eq!(by_sms(), batched + 1);
        let plain = CopyAttributes { flags: 0, ..BESIDE };
        assert_eq!(batch(&[(b, a, 4), (b + 4, a + 4, 4)], plain, stream), CUresult::CUDA_SUCCESS);
        assert_eq!(by_sms(), batched + 3);
    });
}
