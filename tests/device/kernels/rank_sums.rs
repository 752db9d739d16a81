//! Sums of a token's rows at the rank of their experts.

use sidelane::device::RankSumArgs;
use sidelane::dtype::Dtype;
use sidelane::error::DeviceError;
use sidelane::rows::Arithmetic;
use sidelane_testkit::device::kernels::rank_sums::Received;

use super::buffer::{Buffer, POISON};
use super::{Device, with_kernels};
use crate::rows_common::Random;

#[test]
fn sums_of_a_rank_are_those_of_the_reference_to_the_bit() {
    let test = "kernels::rank_sums::sums_of_a_rank_are_those_of_the_reference_to_the_bit";
    with_kernels(test, |device| {
        let mut random = Random(0x5a17_2b19);
        for shape in [(1, 1, 8), (37, 5, 40), (6, 300, 16), (4, 9, 4104), (3, 0, 8), (0, 2, 8)] {
            for dtype in [Arithmetic::F32, Arithmetic::Bf16] {
                for weighted in [false, true] {
                    let received = Received::any(&mut random, shape, (dtype, weighted));
                    let what = format!("{shape:?}, {dtype:?}, weighted {weighted}");
                    received.check(&device.bench()).unwrap_or_else(|error| panic!("{what}: {error}"));
                }
            }
        }
    });
}

#[test]
fn types_and_memory_that_do_not_fit_are_refused_by_name() {
    let test = "kernels::rank_sums::types_and_memory_that_do_not_fit_are_refused_by_name";
    with_kernels(test, |Device { context, stream, kernels }| {
        let memory = Buffer::new(context, 1024);
        let good = RankSumArgs {
            sums: 2,
            columns: 8,
            dtype: Dtype::Bf16,
            n_rows: 5,
            rows: memory.part(0, 80),
            numbers: memory.part(128, 20),
            n_experts: 3,
            counts: memory.part(192, 48),
            order: memory.part(304, 12),
            weights: Some(memory.part(256, 20)),
            out: memory.part(512, 32),
        };
        for (sums, what, given, needed) in [
            (RankSumArgs { rows: memory.part(0, 79), ..good }, "rows", 79, 80),
            (RankSumArgs { numbers: memory.part(128, 19), ..good }, "numbers", 19, 20),
            (RankSumArgs { counts: memory.part(192, 47), ..good }, "counts", 47, 48),
            (RankSumArgs { order: memory.part(304, 11), ..good }, "order", 11, 12),
            (RankSumArgs { weights: Some(memory.part(256, 19)), ..good }, "weights", 19, 20),
            (RankSumArgs { out: memory.part(512, 31), ..good }, "out", 31, 32),
        ] {
            let expected = DeviceError::TooSmall { kernel: "rank_sums", what, given, needed };
            assert_eq!(kernels.rank_sums(stream, &sums), Err(expected));
        }
        for dtype in [Dtype::F16, Dtype::Bytes] {
            let refused = kernels.rank_sums(stream, &RankSumArgs { dtype, ..good });
            assert_eq!(refused, Err(DeviceError::NoSum { rows: dtype, out: dtype }));
        }
        let refused = kernels.rank_sums(stream, &RankSumArgs { sums: 1 << 31, ..good });
        assert!(matches!(refused, Err(DeviceError::Shape { what: "sums", .. })));
        stream.synchronize().unwrap();
        assert!(memory.content().iter().all(|&byte| byte == POISON), "nothing was launched");
    });
}
