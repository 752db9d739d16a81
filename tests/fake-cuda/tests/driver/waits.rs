//! Memory operations: conditions, order over thousands of rounds, queues that block.

use std::time::{Duration, Instant};

use crate::common::*;
use crate::{cu, ok};

const WORDS: usize = 512;

#[test]
fn two_streams_hand_data_to_and_fro_by_words() {
    apart("waits::two_streams_hand_data_to_and_fro_by_words", &seeds(2), || {
        start(0);
        let rounds = 2000u32;
        let (source, words) = host_words(WORDS);
        let (result, landed) = host_words(WORDS);
        let (middle, flag, ack) = (device_words(WORDS), device_words(1), device_words(2));
        fill_words(flag, 0, 1);
        fill_words(ack, 0, 1);
        let (there, back) = (stream(), stream());
        for round in 1..=rounds {
            words.iter_mut().zip(0..).for_each(|(word, i)| *word = round * 1000 + i);
            assert_eq!(batch(&[(middle, source, WORDS * 4)], BESIDE, there), CUresult::CUDA_SUCCESS);
            ok!(cuStreamWriteValue32_v2(there, flag, round, 0));
            ok!(cuStreamWaitValue32_v2(back, flag, round, 0));
            assert_eq!(batch(&[(result, middle, WORDS * 4)], BESIDE, back), CUresult::CUDA_SUCCESS);
            ok!(cuStreamWriteValue64_v2(back, ack, round.into(), 0));
            ok!(cuStreamSynchronize(back));
            assert!(landed.iter().zip(0..).all(|(&word, i)| word == round * 1000 + i), "round {round}");
        }
    });
}

#[test]
fn a_wait_ends_when_its_condition_holds_and_not_before() {
    apart("waits::a_wait_ends_when_its_condition_holds_and_not_before", &plainly(), || {
        start(0);
        let (at, words) = host_words(2);
        let stream = stream();
        // Flags of the wait, its value, words that do not end it, one that does.
        let cases: [(u32, u32, &[u32], u32); 5] = [
            (0, 5, &[4, 5u32.wrapping_sub(1 << 31)], 6),
            (0, u32::MAX, &[u32::MAX - 1], 3),
            (1, 5, &[4, 6], 5),
            (2, 0b110, &[0, 0b1001], 0b100),
            (3, !0b100, &[0b100, u32::MAX], 0b011),
        ];
        for (flags, value, others, last) in cases {
            let mut set = |word: u32| {
                // SAFETY: the word exists; a stream reads it meanwhile.
                unsafe { words.as_mut_ptr().write_volatile(word) }
            };
            set(others[0]);
            ok!(cuStreamWaitValue32_v2(stream, at, value, flags));
            for &other in others {
                set(other);
                let look = Instant::now();
                while look.elapsed() < Duration::from_millis(5) {
                    assert_eq!(
                        cu!(cuStreamQuery(stream)),
                        CUresult::CUDA_ERROR_NOT_READY,
                        "{flags} {other:#x}"
                    );
                }
            }
            set(last);
            ok!(cuStreamSynchronize(stream));
        }
    });
}

/// One stream waits for a word that the next one in line writes.
fn wait_before_write() -> (sys::CUstream, sys::CUstream) {
    let (word, _) = host_words(1);
    let (waits, writes) = (stream(), stream());
    ok!(cuStreamWaitValue32_v2(waits, word, 1, 0));
    ok!(cuStreamWriteValue32_v2(writes, word, 1, 0));
    (waits, writes)
}

fn queues(n: u32) -> [Settings<'static>; 1] {
    [vec![("CUDA_DEVICE_MAX_CONNECTIONS", n.to_string())]]
}

#[test]
fn on_one_queue_a_wait_blocks_the_write_behind_it() {
    apart("waits::on_one_queue_a_wait_blocks_the_write_behind_it", &queues(1), || {
        let fake_driver = start(0);
        let (waits, writes) = wait_before_write();
        let deadline = Instant::now() + Duration::from_millis(200);
        while Instant::now() < deadline {
            assert_eq!(cu!(cuStreamQuery(writes)), CUresult::CUDA_ERROR_NOT_READY);
        }
        fake_driver.stop();
        assert_eq!(cu!(cuStreamSynchronize(writes)), CUresult::CUDA_ERROR_LAUNCH_TIMEOUT);
        assert_eq!(cu!(cuStreamSynchronize(waits)), CUresult::CUDA_ERROR_LAUNCH_TIMEOUT);
    });
}

#[test]
fn on_two_queues_it_does_not() {
    apart("waits::on_two_queues_it_does_not", &queues(2), || {
        start(0);
        let (waits, writes) = wait_before_write();
        ok!(cuStreamSynchronize(waits));
        ok!(cuStreamSynchronize(writes));
    });
}

#[test]
fn on_two_queues_the_third_stream_stands_behind_the_first() {
    apart("waits::on_two_queues_the_third_stream_stands_behind_the_first", &queues(2), || {
        let fake_driver = start(0);
        let (word, _) = host_words(1);
        let (first, second, third) = (stream(), stream(), stream());
        ok!(cuStreamWaitValue32_v2(first, word, 1, 0));
        ok!(cuStreamWriteValue32_v2(third, word, 1, 0));
        ok!(cuStreamSynchronize(second));
        let deadline = Instant::now() + Duration::from_millis(100);
        while Instant::now() < deadline {
            assert_eq!(cu!(cuStreamQuery(third)), CUresult::CUDA_ERROR_NOT_READY);
        }
        fake_driver.stop();
        assert_eq!(cu!(cuCtxSynchronize()), CUresult::CUDA_ERROR_LAUNCH_TIMEOUT);
    });
}

#[test]
fn words_must_lie_straight_and_flushes_are_not_supported() {
    apart("waits::words_must_lie_straight_and_flushes_are_not_supported", &plainly(), || {
        start(0);
        let (at, _) = host_words(4);
        let stream = stream();
        let crooked = CUresult::CUDA_ERROR_INVALID_VALUE;
        assert_eq!(cu!(cuStreamWriteValue32_v2(stream, at + 2, 1, 0)), crooked);
        assert_eq!(cu!(cuStreamWriteValue64_v2(stream, at + 4, 1, 0)), crooked);
        assert_eq!(cu!(cuStreamWaitValue64_v2(stream, at + 4, 1, 0)), crooked);
        let flush = cu!(cuStreamWaitValue32_v2(stream, at, 0, 1 << 30));
        assert_eq!(flush, CUresult::CUDA_ERROR_NOT_SUPPORTED);
    });
}
