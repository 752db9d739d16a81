//! Sums of choices that have a row each, in all three orders.

use sidelane::device::{OwnRows, SumChoices};
use sidelane::dtype::{Dtype, PartialDtype};
use sidelane::error::DeviceError;
use sidelane::error::KernelFault;
use sidelane::rows::{Arithmetic, GroupedSum, RowKernels, Simd, Stores, SumOutput};

use super::buffer::{Buffer, POISON};
use super::{Device, with_kernels};
use crate::rows_common::Random;
use crate::rows_common::values::{Terms, any_f32, any_row};

/// Choices of one rank's tokens, and the rows that returned for them.
#[derive(Clone)]
struct Choices {
    dtype: Arithmetic,
    wire: PartialDtype,
    tokens: usize,
    top_k: usize,
    columns: usize,
    rows: Vec<Vec<u8>>,
    index: Vec<i32>,
    experts: Vec<i32>,
    weights: Option<Vec<f32>>,
    /// Of each expert.
    group_of: Vec<i32>,
    grouped: bool,
    status: u32,
}

impl Choices {
    /// Special values everywhere; some choices have no expert, some no row.
    fn any(random: &mut Random, (tokens, top_k, columns): (usize, usize, usize), experts: usize) -> Self {
        let mut up_to = |most: usize| (random.next() % most as u64) as i32;
        let n_rows = (tokens * top_k).min(50) + 1;
        let index = (0..tokens * top_k).map(|_| up_to(n_rows + 3).min(n_rows as i32) - 1).collect();
        let ids = (0..tokens * top_k).map(|_| up_to(experts + 1) - 1).collect();
        let group_of = (0..experts).map(|_| up_to(4)).collect();
        let dtype = Arithmetic::F32;
        let rows = vec![Vec::new(); n_rows];
        Choices {
            dtype,
            wire: PartialDtype::F32,
            tokens,
            top_k,
            columns,
            rows,
            index,
            experts: ids,
            weights: None,
            group_of,
            grouped: false,
            status: 0,
        }
    }

    fn of_type(&self, random: &mut Random, dtype: Arithmetic, wire: PartialDtype) -> Self {
        let rows = self.rows.iter().map(|_| any_row(random, dtype, self.columns)).collect();
        Choices { dtype, wire, rows, ..self.clone() }
    }

    /// What the device makes of them: the results, and the status.
    fn sum(&self, device: &Device) -> (Vec<u8>, Option<KernelFault>) {
        let Device { context, stream, kernels } = device;
        // Rows of which some lie elsewhere: no bit depends on it.
        let (others, own) = self.rows.split_at(self.rows.len() - self.rows.len() / 3);
        let (rows, own_rows) = (Buffer::of(context, &others.concat()), Buffer::of(context, &own.concat()));
        let own = OwnRows { rows: own_rows.span(), count: own.len() as u32 };
        let out = Buffer::new(context, (self.tokens * self.columns * self.dtype.size()) as u64);
        let (index, experts) = (Buffer::words(context, &self.index), Buffer::words(context, &self.experts));
        let weights = self.weights.as_ref().map(|weights| Buffer::words(context, weights));
        let group_of = Buffer::words(context, &self.group_of);
        let status = Buffer::words(context, &[self.status]);
        let sum = SumChoices {
            tokens: self.tokens as u32,
            top_k: self.top_k as u32,
            columns: self.columns as u32,
            dtype: self.dtype.into(),
            wire: self.wire,
            n_rows: others.len() as u32,
            rows: rows.span(),
            own: Some(own),
            index: index.span(),
            n_experts: self.group_of.len() as u32,
            experts: Some(experts.span()),
            weights: weights.as_ref().map(Buffer::span),
            group_of: self.grouped.then(|| group_of.span()),
            status: status.word(),
            out: out.span(),
        };
        kernels.sum_choices(stream, &sum).unwrap();
        stream.synchronize().unwrap();
        (out.content(), KernelFault::of(status.read::<u32>()[0]))
    }

    /// A token's choices in the order of their sum.
    fn ordered(&self, token: usize) -> Vec<usize> {
        let choices = token * self.top_k..(token + 1) * self.top_k;
        let mut ordered: Vec<usize> =
            choices.filter(|&c| self.experts[c] >= 0 && self.index[c] >= 0).collect();
        ordered.sort_by_key(|&c| (self.group(c), self.experts[c]));
        ordered
    }

    fn group(&self, choice: usize) -> i32 {
        if self.grouped { self.group_of[self.experts[choice] as usize] } else { 0 }
    }

    /// The results by their definition, and those of the host's loops, which agree.
    fn reference(&self) -> Vec<u8> {
        let mut all = Vec::new();
        for token in 0..self.tokens {
            let ordered = self.ordered(token);
            let rows: Vec<Vec<u8>> =
                ordered.iter().map(|&c| self.rows[self.index[c] as usize].clone()).collect();
            let weights: Option<Vec<f32>> =
                self.weights.as_ref().map(|weights| ordered.iter().map(|&c| weights[c]).collect());
            let groups: Vec<u32> = ordered
                .chunk_by(|&a, &b| self.group(a) == self.group(b))
                .map(|group| group.len() as u32)
                .collect();
            let terms = Terms {
                dtype: self.dtype,
                wire: self.wire,
                rows: &rows,
                weights: weights.as_deref(),
                groups: &groups,
            };
            let expected = terms.sum(self.columns, self.dtype);
            for simd in Simd::available() {
                let mut out = vec![0; expected.len()];
                let pointers: Vec<*const u8> = rows.iter().map(|row| row.as_ptr()).collect();
                let sum = GroupedSum {
                    dtype: self.dtype,
                    wire: self.wire,
                    out: SumOutput::Total(out.as_mut_ptr()),
                    rows: &pointers,
                    weights: weights.as_deref(),
                    groups: &groups,
                    columns: self.columns,
                    stores: Stores::Cached,
                };
                // SAFETY: the rows live, and `out` has room for one.
                unsafe { RowKernels::new(simd).grouped_sum(sum) };
                assert!(out == expected, "{simd:?}");
            }
            all.extend(expected);
        }
        all
    }
}

#[test]
fn choice_sums_in_all_orders_match_reference_and_host_bits() {
    with_kernels("kernels::sum_choices::choice_sums_in_all_orders_match_reference_and_host_bits", |device| {
        let mut random = Random(1);
        for (shape, experts) in
            [((1, 1, 8), 1), ((40, 8, 40), 16), ((3, 3, 4104), 200), ((5, 150, 16), 90), ((0, 2, 8), 4)]
        {
            let choices = Choices::any(&mut random, shape, experts);
            for (dtype, wire) in [
                (Arithmetic::F32, PartialDtype::F32),
                (Arithmetic::F16, PartialDtype::F32),
                (Arithmetic::Bf16, PartialDtype::F32),
                (Arithmetic::Bf16, PartialDtype::Bf16),
            ] {
                for (grouped, weighted) in [(false, false), (false, true), (true, false), (true, true)] {
                    let mut choices = choices.of_type(&mut random, dtype, wire);
                    choices.grouped = grouped;
                    choices.weights =
                        weighted.then(|| choices.index.iter().map(|_| any_f32(&mut random)).collect());
                    let (seen, status) = choices.sum(device);
                    let what =
                        format!("{shape:?}, {dtype:?} by {wire}, grouped {grouped}, weighted {weighted}");
                    assert_eq!(status, None, "{what}");
                    assert!(seen == choices.reference(), "{what}");
                }
            }
        }
    });
}

#[test]
fn choice_without_row_or_expert_yields_zero_token_and_status() {
    with_kernels(
        "kernels::sum_choices::choice_without_row_or_expert_yields_zero_token_and_status",
        |device| {
            let mut random = Random(5);
            let mut good = Choices::any(&mut random, (4, 3, 8), 6).of_type(
                &mut random,
                Arithmetic::F32,
                PartialDtype::F32,
            );
            good.experts = [0, 1, 2].repeat(4);
            good.index = (0..12).collect();
            good.grouped = true;
            let expected = good.reference();
            let zeros = vec![0; expected.len()];
            let row_bytes = 32;
            let check = |bad: Choices, status| {
                let (seen, found) = bad.sum(device);
                assert_eq!(found, Some(status));
                assert_eq!(seen[2 * row_bytes..3 * row_bytes], zeros[..row_bytes]);
                assert_eq!(seen[..2 * row_bytes], expected[..2 * row_bytes]);
            };
            for row in [13, -2, i32::MAX] {
                let mut bad = good.clone();
                bad.index[7] = row;
                check(bad, KernelFault::IndexOutOfRange { at: 2 });
            }
            for expert in [6, -2, i32::MIN] {
                let mut bad = good.clone();
                bad.experts[8] = expert;
                check(bad, KernelFault::ExpertOutOfRange { token: 2 });
            }
            let mut bad = good.clone();
            (bad.group_of[5], bad.experts[6]) = (-1, 5);
            check(bad, KernelFault::RankOutOfRange { token: 2 });

            let mut refused = good.clone();
            refused.status = 0x0203;
            assert_eq!(refused.sum(device), (zeros, Some(KernelFault::OtherCall { rank: 2 })));
        },
    );
}

#[test]
fn types_and_memory_that_do_not_fit_are_refused_by_name() {
    with_kernels("kernels::sum_choices::types_and_memory_that_do_not_fit_are_refused_by_name", |device| {
        let Device { context, stream, kernels } = device;
        let memory = Buffer::new(context, 1024);
        let good = SumChoices {
            tokens: 2,
            top_k: 3,
            columns: 8,
            dtype: Dtype::Bf16,
            wire: PartialDtype::F32,
            n_rows: 5,
            rows: memory.part(0, 80),
            own: None,
            index: memory.part(128, 24),
            n_experts: 4,
            experts: Some(memory.part(192, 24)),
            weights: Some(memory.part(256, 24)),
            group_of: Some(memory.part(320, 16)),
            status: memory.range().word(384).unwrap(),
            out: memory.part(512, 32),
        };
        for (sum, what, given, needed) in [
            (SumChoices { rows: memory.part(0, 79), ..good }, "rows", 79, 80),
            (
                SumChoices { own: Some(OwnRows { rows: memory.part(0, 31), count: 2 }), ..good },
                "own rows",
                31,
                32,
            ),
            (SumChoices { index: memory.part(128, 23), ..good }, "index", 23, 24),
            (SumChoices { experts: Some(memory.part(192, 23)), ..good }, "experts", 23, 24),
            (SumChoices { weights: Some(memory.part(256, 23)), ..good }, "weights", 23, 24),
            (SumChoices { group_of: Some(memory.part(320, 15)), ..good }, "group_of", 15, 16),
            (SumChoices { out: memory.part(512, 31), ..good }, "out", 31, 32),
        ] {
            let expected = DeviceError::TooSmall { kernel: "sum_choices", what, given, needed };
            assert_eq!(kernels.sum_choices(stream, &sum), Err(expected));
        }
        for (dtype, wire) in [
            (Dtype::F16, PartialDtype::Bf16),
            (Dtype::F32, PartialDtype::Bf16),
            (Dtype::Bytes, PartialDtype::F32),
        ] {
            let refused = kernels.sum_choices(stream, &SumChoices { dtype, wire, ..good });
            assert!(matches!(refused, Err(DeviceError::NoSum { rows, .. }) if rows == dtype));
        }
        let refused = kernels.sum_choices(stream, &SumChoices { columns: 12, ..good });
        assert!(matches!(refused, Err(DeviceError::Shape { what: "columns", given: 12, .. })));
        stream.synchronize().unwrap();
        assert!(memory.content().iter().all(|&byte| byte == POISON), "nothing was launched");
    });
}

#[test]
fn listed_rows_are_summed_in_the_order_of_the_list() {
    with_kernels(
        "kernels::sum_choices::listed_rows_are_summed_in_the_order_of_the_list",
        |Device { context, stream, kernels }| {
            let mut random = Random(3);
            for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
                let kind = Arithmetic::try_from(dtype).unwrap();
                for (tokens, top_k, columns) in [(1, 1, 8), (9, 7, 24), (4, 5, 4104)] {
                    let rows: Vec<Vec<u8>> =
                        (0..20).map(|_| any_row(&mut random, kind, columns as usize)).collect();
                    let mut summands = Vec::new();
                    for _ in 0..tokens {
                        let used = random.next() as usize % (top_k as usize + 1);
                        let row = |at| if at < used { (random.next() % 20) as i32 } else { -1 };
                        summands.extend((0..top_k as usize).map(row));
                    }
                    let (all, list) =
                        (Buffer::of(context, &rows.concat()), Buffer::words(context, &summands));
                    let out = Buffer::new(context, u64::from(tokens * columns) * dtype.size() as u64);
                    let sum = |word: u32, n_rows| {
                        let status = Buffer::words(context, &[word, 0]);
                        let launch = SumChoices {
                            tokens,
                            top_k,
                            columns,
                            dtype,
                            wire: PartialDtype::F32,
                            n_rows,
                            rows: all.span(),
                            own: None,
                            index: list.span(),
                            n_experts: 0,
                            experts: None,
                            weights: None,
                            group_of: None,
                            status: status.word(),
                            out: out.span(),
                        };
                        kernels.sum_choices(stream, &launch).unwrap();
                        stream.synchronize().unwrap();
                        (out.content(), status.read::<u32>()[0])
                    };
                    let of = |list: &[i32]| {
                        let rows: Vec<Vec<u8>> = list
                            .iter()
                            .filter(|&&row| row >= 0)
                            .map(|&row| rows[row as usize].clone())
                            .collect();
                        let groups = [rows.len() as u32];
                        let terms = Terms {
                            dtype: kind,
                            wire: PartialDtype::F32,
                            rows: &rows,
                            weights: None,
                            groups: &groups,
                        };
                        terms.sum(columns as usize, kind)
                    };
                    let expected: Vec<u8> = summands.chunks_exact(top_k as usize).flat_map(of).collect();
                    assert_eq!(sum(0, 20), (expected, 0), "{dtype:?}, {tokens} tokens of {top_k}");
                    assert_eq!(sum(7, 20), (vec![0; out.content().len()], 7), "a status that is set");
                    let (_, word) = sum(0, 0);
                    let first = summands.chunks_exact(top_k as usize).position(|list| list[0] >= 0);
                    let said = KernelFault::of(word);
                    match first {
                        None => assert_eq!(said, None),
                        Some(_) => {
                            assert!(matches!(said, Some(KernelFault::IndexOutOfRange { .. })), "{said:?}")
                        }
                    }
                }
            }
        },
    );
}
