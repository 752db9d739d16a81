//! Batches: no order among copies, and limits.

use crate::common::*;
use crate::{cu, ok};

const WORDS: usize = 256;

#[test]
fn copies_of_a_batch_run_in_any_order_and_in_pieces() {
    apart("batches::copies_of_a_batch_run_in_any_order_and_in_pieces", &seeds(3), || {
        start(0);
        let (ones, twos, to) = (device_words(WORDS), device_words(WORDS), device_words(WORDS));
        fill_words(ones, 1, WORDS);
        fill_words(twos, 2, WORDS);
        let stream = stream();
        let (mut first_last, mut second_last, mut torn) = (0, 0, 0);
        for _ in 0..64 {
            // Two copies to one place: which is last shows in every word.
            let both = [(to, ones, WORDS * 4), (to, twos, WORDS * 4)];
            assert_eq!(batch(&both, BESIDE, stream), CUresult::CUDA_SUCCESS);
            ok!(cuStreamSynchronize(stream));
            let words = read_words(to, WORDS);
            if words == [1; WORDS] {
                first_last += 1;
            } else if words == [2; WORDS] {
                second_last += 1;
            } else {
                torn += 1;
            }
        }
        assert!(first_last > 0 && second_last > 0 && torn > 0, "{first_last} {second_last} {torn}");
    });
}

#[test]
fn batches_of_one_stream_run_in_order() {
    apart("batches::batches_of_one_stream_run_in_order", &seeds(3), || {
        start(0);
        let (ones, twos, to) = (device_words(WORDS), device_words(WORDS), device_words(WORDS));
        fill_words(ones, 1, WORDS);
        fill_words(twos, 2, WORDS);
        let stream = stream();
        for _ in 0..64 {
            assert_eq!(batch(&[(to, ones, WORDS * 4)], BESIDE, stream), CUresult::CUDA_SUCCESS);
            assert_eq!(batch(&[(to, twos, WORDS * 4)], BESIDE, stream), CUresult::CUDA_SUCCESS);
            ok!(cuStreamSynchronize(stream));
            assert_eq!(read_words(to, WORDS), [2; WORDS]);
        }
    });
}

#[test]
fn a_batch_has_1_to_255_copies() {
    apart("batches::a_batch_has_1_to_255_copies", &plainly(), || {
        let fake_driver = start(0);
        let (a, b) = (device_words(WORDS), device_words(WORDS));
        let stream = stream();
        let of = |n: usize| (0..n as u64).map(|i| (b + 4 * i, a + 4 * i, 4)).collect::<Vec<_>>();
        assert_eq!(batch(&of(256), BESIDE, stream), CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(batch(&of(0), BESIDE, stream), CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(batch(&of(255), BESIDE, stream), CUresult::CUDA_SUCCESS);
        ok!(cuStreamSynchronize(stream));
        assert_eq!((fake_driver.counters().copies, fake_driver.counters().copy_batches), (255, 1));
    });
}

#[test]
fn a_batch_is_refused_where_it_makes_no_sense() {
    apart("batches::a_batch_is_refused_where_it_makes_no_sense", &plainly(), || {
        start(0);
        let (a, b) = (device_words(WORDS), device_words(WORDS));
        let stream = stream();
        let refused = CUresult::CUDA_ERROR_INVALID_VALUE;
        assert_eq!(batch(&[(b, a, 4)], BESIDE, NULL), refused, "the null stream");
        assert_eq!(batch(&[(b, a, 4), (b, a, 0)], BESIDE, stream), refused, "a copy of nothing");
        assert_eq!(batch(&[(b, a, 4)], CopyAttributes { order: 0, ..BESIDE }, stream), refused, "no order");
        assert_eq!(
            batch(&[(b, a, 4)], CopyAttributes { flags: 2, ..BESIDE }, stream),
            refused,
            "unknown flags"
        );
    });
}

#[test]
fn a_batch_has_1_to_255_memory_operations() {
    apart("batches::a_batch_has_1_to_255_memory_operations", &plainly(), || {
        let fake_driver = start(0);
        let words = device_words(WORDS);
        let stream = stream();
        let write = |index: u32| {
            let mut one = sys::CUstreamBatchMemOpParams { pad: [0; 6] };
            one.writeValue.operation = sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_32;
            one.writeValue.address = words + 4 * u64::from(index);
            one.writeValue.__bindgen_anon_1.value = index;
            one
        };
        let mut all: Vec<_> = (0..256).map(write).collect();
        let refused = CUresult::CUDA_ERROR_INVALID_VALUE;
        assert_eq!(cu!(cuStreamBatchMemOp_v2(stream, 256, all.as_mut_ptr(), 0)), refused);
        assert_eq!(cu!(cuStreamBatchMemOp_v2(stream, 0, all.as_mut_ptr(), 0)), refused);
        ok!(cuStreamBatchMemOp_v2(stream, 255, all.as_mut_ptr(), 0));
        ok!(cuStreamSynchronize(stream));
        let counted = fake_driver.counters();
        assert_eq!((counted.memory_operations, counted.memory_batches), (255, 1));
        let expected: Vec<u32> = (0..255).chain([POISON]).collect();
        assert_eq!(read_words(words, WORDS), expected);
    });
}
