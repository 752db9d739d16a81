//! Sums of a token's rows at the rank of their experts.

use sidelane::device::RankSumArgs;
use sidelane::dtype::{Dtype, PartialDtype};
use sidelane::error::DeviceError;
use sidelane::rows::Arithmetic;

use super::buffer::{Buffer, POISON};
use super::{Device, with_kernels};
use crate::rows_common::Random;
use crate::rows_common::values::{Terms, any_f32, any_row};

/// Rows of one rank: by expert, then by the sum that they are part of.
struct Received {
    dtype: Arithmetic,
    columns: usize,
    sums: usize,
    rows: Vec<Vec<u8>>,
    numbers: Vec<i32>,
    /// Of each expert, without and with pads.
    counts: Vec<i64>,
    /// Experts as their rows are added up.
    order: Vec<u32>,
    weights: Option<Vec<f32>>,
}

impl Received {
    /// About one in three experts has a row of each sum; each expert's rows are padded to a
    /// multiple of three.
    fn any(
        random: &mut Random,
        (sums, experts, columns): (usize, usize, usize),
        (dtype, weighted): (Arithmetic, bool),
    ) -> Self {
        let (mut numbers, mut used, mut padded) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..experts {
            let first = numbers.len();
            numbers.extend((0..sums as i32).filter(|_| random.next().is_multiple_of(3)));
            used.push((numbers.len() - first) as i64);
            numbers.resize(first + (numbers.len() - first).next_multiple_of(3), -1);
            padded.push((numbers.len() - first) as i64);
        }
        let rows = numbers.iter().map(|_| any_row(random, dtype, columns)).collect();
        let weights = weighted.then(|| numbers.iter().map(|_| any_f32(random)).collect());
        let mut order: Vec<u32> = (0..experts as u32).collect();
        for last in (1..experts).rev() {
            order.swap(last, random.next() as usize % (last + 1));
        }
        Received { dtype, columns, sums, rows, numbers, counts: [used, padded].concat(), order, weights }
    }

    fn sum(&self, Device { context, stream, kernels }: &Device) -> Vec<u8> {
        let (rows, numbers) =
            (Buffer::of(context, &self.rows.concat()), Buffer::words(context, &self.numbers));
        let counts = Buffer::words(context, &self.counts);
        let order = Buffer::words(context, &self.order);
        let weights = self.weights.as_ref().map(|weights| Buffer::words(context, weights));
        let out = Buffer::new(context, (self.sums * self.columns * self.dtype.size()) as u64);
        let sums = RankSumArgs {
            sums: self.sums as u32,
            columns: self.columns as u32,
            dtype: self.dtype.into(),
            n_rows: self.rows.len() as u32,
            rows: rows.span(),
            numbers: numbers.span(),
            n_experts: self.counts.len() as u32 / 2,
            counts: counts.span(),
            order: order.span(),
            weights: weights.as_ref().map(Buffer::span),
            out: out.span(),
        };
        kernels.rank_sums(stream, &sums).unwrap();
        stream.synchronize().unwrap();
        out.content()
    }

    /// By definition; what no row is part of stays as it was.
    fn reference(&self) -> Vec<u8> {
        let row_bytes = self.columns * self.dtype.size();
        let padded = &self.counts[self.order.len()..];
        let begin = |expert: u32| padded[..expert as usize].iter().sum::<i64>() as usize;
        let rows_of = |&expert: &u32| begin(expert)..begin(expert + 1);
        let in_order: Vec<usize> = self.order.iter().flat_map(rows_of).collect();
        let of_sum = |sum| {
            let at: Vec<usize> = in_order.iter().copied().filter(|&row| self.numbers[row] == sum).collect();
            if at.is_empty() {
                return vec![POISON; row_bytes];
            }
            let rows: Vec<Vec<u8>> = at.iter().map(|&row| self.rows[row].clone()).collect();
            let weights: Option<Vec<f32>> =
                self.weights.as_ref().map(|weights| at.iter().map(|&row| weights[row]).collect());
            let terms = Terms {
                dtype: self.dtype,
                wire: PartialDtype::F32,
                rows: &rows,
                weights: weights.as_deref(),
                groups: &[rows.len() as u32],
            };
            terms.sum(self.columns, self.dtype)
        };
        (0..self.sums as i32).flat_map(of_sum).collect()
    }
}

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
                    assert!(received.sum(device) == received.reference(), "{what}");
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
