//! Sums of the rows that came home.

use sidelane::device::{Addresses, SumArgs};
use sidelane::dtype::{Dtype, PARTIAL, PartialDtype};
use sidelane::error::{DeviceError, KernelFault};
use sidelane::plan::SlotShape;
use sidelane::rows::{Arithmetic, GroupedSum, RowKernels, Simd, Stores, SumOutput};

use super::buffer::{Buffer, POISON};
use super::world::Input;
use super::{Device, with_kernels};
use crate::rows_common::Random;
use crate::rows_common::values::{Terms, any_row};

/// Types of the rows and of the results.
const TYPES: [(Dtype, Dtype); 5] = [
    (Dtype::F32, Dtype::F32),
    (Dtype::Bf16, Dtype::Bf16),
    (Dtype::F16, Dtype::F16),
    (Dtype::F32, Dtype::Bf16),
    (Dtype::F32, Dtype::F16),
];

/// What came home to one rank.
struct Home {
    input: Input,
    columns: u32,
    types: (Dtype, Dtype),
    /// For each rank and row of its slot.
    rows: Vec<Vec<Vec<u8>>>,
    places: Vec<i32>,
    status: u32,
}

impl Home {
    /// Special values everywhere, so that the sums meet them in all combinations.
    fn any(random: &mut Random, input: Input, columns: u32, types: (Dtype, Dtype)) -> Self {
        let ranks = input.map.ranks();
        let kind = Arithmetic::try_from(types.0).unwrap();
        let rows = (0..ranks)
            .map(|_| (0..input.shape.max_tokens()).map(|_| any_row(random, kind, columns as usize)).collect())
            .collect();
        let places = input.places();
        Home { input, columns, types, rows, places, status: 0 }
    }

    /// What the device makes of it: the results, and the status word.
    fn sum(&self, device: &Device) -> (Vec<u8>, Option<KernelFault>) {
        let Device { context, stream, kernels } = device;
        let (shape, tokens) = (self.input.shape, self.input.tokens);
        let homes: Vec<Buffer> = self.rows.iter().map(|rows| Buffer::of(context, &rows.concat())).collect();
        let spans: Vec<_> = homes.iter().map(Buffer::span).collect();
        let table = Buffer::new(context, spans.len() as u64 * 8);
        let out = Buffer::new(context, u64::from(tokens * self.columns) * self.types.1.size() as u64);
        let places = Buffer::words(context, &self.places);
        let status = Buffer::words(context, &[self.status]);
        let sum = SumArgs {
            shape,
            tokens,
            columns: self.columns,
            rows: self.types.0,
            dtype: self.types.1,
            homes: &Addresses::new(stream, table.range(), &spans).unwrap(),
            places: places.span(),
            status: status.word(),
            out: out.span(),
        };
        kernels.sum(stream, &sum).unwrap();
        stream.synchronize().unwrap();
        (out.content(), KernelFault::of(status.read::<u32>()[0]))
    }

    /// The rows of a token, ranks ascending, and their groups: one of each rank.
    fn terms(&self, token: u32) -> (Vec<Vec<u8>>, Vec<u32>) {
        let ranks = self.rows.len();
        let places = &self.places[token as usize * ranks..][..ranks];
        let rows: Vec<_> = places
            .iter()
            .zip(&self.rows)
            .filter(|&(&place, _)| place >= 0)
            .map(|(&place, rows)| rows[place as usize].clone())
            .collect();
        let group = if self.types.0 == self.types.1 { 1 } else { PARTIAL };
        let groups = vec![group; rows.len()];
        (rows, groups)
    }

    /// The results by their definition.
    fn reference(&self) -> Vec<u8> {
        let dtype = Arithmetic::try_from(self.types.1).unwrap();
        let of = |token| {
            let (rows, groups) = self.terms(token);
            let terms = Terms { dtype, wire: PartialDtype::F32, rows: &rows, weights: None, groups: &groups };
            terms.sum(self.columns as usize, dtype)
        };
        (0..self.input.tokens).flat_map(of).collect()
    }

    /// The results of the loops of the host.
    fn of_rows(&self, loops: RowKernels, wire: PartialDtype) -> Vec<u8> {
        let dtype = Arithmetic::try_from(self.types.1).unwrap();
        let row_bytes = self.columns as usize * dtype.size();
        let mut out = vec![0; self.input.tokens as usize * row_bytes];
        for (token, out) in (0..).zip(out.chunks_exact_mut(row_bytes)) {
            let (kept, groups) = self.terms(token);
            let rows: Vec<*const u8> = kept.iter().map(|row| row.as_ptr()).collect();
            let sum = GroupedSum {
                dtype,
                wire,
                out: SumOutput::Total(out.as_mut_ptr()),
                rows: &rows,
                weights: None,
                groups: &groups,
                columns: self.columns as usize,
                stores: Stores::Cached,
            };
            // SAFETY: the rows live in `kept`, and `out` has room for one.
            unsafe { loops.grouped_sum(sum) }
        }
        out
    }
}

#[test]
fn sums_are_those_of_the_reference_and_of_the_hosts_loops_to_the_bit() {
    with_kernels(
        "kernels::sum::sums_are_those_of_the_reference_and_of_the_hosts_loops_to_the_bit",
        |device| {
            let mut random = Random(1);
            // (max_tokens, tokens, top_k, experts, ranks, columns)
            for (max_tokens, tokens, top_k, experts, ranks, columns) in [
                (1, 1, 1, 1, 1, 8),
                (9, 9, 8, 4, 4, 16),
                (7, 5, 3, 7, 3, 2056),
                (40, 33, 8, 16, 8, 4104),
                (30, 30, 40, 80, 40, 64),
                (70, 70, 4, 65, 65, 8),
                (4, 0, 2, 4, 2, 8),
            ] {
                for types in TYPES {
                    let shape = SlotShape::new(max_tokens, top_k, 16).unwrap();
                    let input = Input::any(&mut random, shape, (experts, ranks), 0, tokens);
                    let home = Home::any(&mut random, input, columns, types);
                    let (seen, status) = home.sum(device);
                    let what = format!("{types:?}, {tokens} tokens of {ranks} ranks, {columns} columns");
                    assert_eq!(status, None, "{what}");
                    assert!(seen == home.reference(), "{what}");
                    for simd in Simd::available() {
                        for wire in PartialDtype::ALL {
                            let partials = types.0 != types.1 && wire != PartialDtype::F32;
                            if wire.carries(types.1) && !partials {
                                assert!(
                                    seen == home.of_rows(RowKernels::new(simd), wire),
                                    "{what}, {simd:?}, {wire}"
                                );
                            }
                        }
                    }
                }
            }
        },
    );
}

#[test]
fn a_token_whose_choices_were_all_dropped_gets_zeros() {
    with_kernels("kernels::sum::a_token_whose_choices_were_all_dropped_gets_zeros", |device| {
        let shape = SlotShape::new(3, 2, 16).unwrap();
        for types in TYPES {
            let mut input = Input::any(&mut Random(5), shape, (4, 2), 0, 3);
            input.experts = vec![-1; 6];
            let home = Home::any(&mut Random(6), input, 24, types);
            let zeros = vec![0; 3 * 24 * types.1.size()];
            assert_eq!(home.sum(device), (zeros, None));
        }
    });
}

/// Rows that would give sums other than zero.
fn believable() -> Home {
    let shape = SlotShape::new(6, 2, 16).unwrap();
    let input = Input::any(&mut Random(7), shape, (40, 40), 0, 6);
    Home::any(&mut Random(8), input, 32, (Dtype::Bf16, Dtype::Bf16))
}

#[test]
fn a_status_that_is_set_gives_zeros_and_stays() {
    with_kernels("kernels::sum::a_status_that_is_set_gives_zeros_and_stays", |device| {
        let zeros = vec![0; 6 * 64];
        for (word, expected) in [
            (1 | 77 << 8, KernelFault::ExpertOutOfRange { token: 77 }),
            (2 | 3 << 8, KernelFault::RankOutOfRange { token: 3 }),
            (0xff, KernelFault::Foreign { word: 0xff }),
        ] {
            let mut home = believable();
            home.status = word;
            assert_eq!(home.sum(device), (zeros.clone(), Some(expected)));
        }
    });
}

#[test]
fn a_place_outside_of_its_slot_gives_its_token_zeros_and_a_status() {
    with_kernels("kernels::sum::a_place_outside_of_its_slot_gives_its_token_zeros_and_a_status", |device| {
        let good = believable();
        let row_bytes = 64;
        for place in [6, i32::MAX, -2] {
            let mut home = believable();
            home.places[4 * 40 + 33] = place;
            let (seen, status) = home.sum(device);
            assert_eq!(status, Some(KernelFault::PlaceOutOfRange { token: 4 }));
            assert_eq!(seen[4 * row_bytes..5 * row_bytes], [0; 64]);
            assert_eq!(seen[..4 * row_bytes], good.reference()[..4 * row_bytes]);
        }
    });
}

#[test]
fn types_that_no_kernel_sums_and_memory_that_is_too_small_are_refused() {
    with_kernels(
        "kernels::sum::types_that_no_kernel_sums_and_memory_that_is_too_small_are_refused",
        |device| {
            let Device { context, stream, kernels } = device;
            let shape = SlotShape::new(4, 2, 32).unwrap();
            let (memory, table) = (Buffer::new(context, 4096), Buffer::new(context, 16));
            let homes = |len| {
                Addresses::new(stream, table.range(), &[memory.part(0, len), memory.part(64, len)]).unwrap()
            };
            let (large, small) = (homes(64), homes(63));
            let good = SumArgs {
                shape,
                tokens: 4,
                columns: 8,
                rows: Dtype::Bf16,
                dtype: Dtype::Bf16,
                homes: &large,
                places: memory.part(256, 32),
                status: memory.range().word(296).unwrap(),
                out: memory.part(2048, 64),
            };
            for (rows, out) in
                [(Dtype::Bf16, Dtype::F32), (Dtype::F16, Dtype::Bf16), (Dtype::Bytes, Dtype::Bytes)]
            {
                let refused = kernels.sum(stream, &SumArgs { rows, dtype: out, ..good });
                assert_eq!(refused, Err(DeviceError::NoSum { rows, out }));
            }
            for (sum, what, given, needed) in [
                (SumArgs { homes: &small, ..good }, "homes", 63, 64),
                (SumArgs { places: memory.part(256, 31), ..good }, "places", 31, 32),
                (SumArgs { out: memory.part(2048, 63), ..good }, "out", 63, 64),
            ] {
                let expected = DeviceError::TooSmall { kernel: "sum", what, given, needed };
                assert_eq!(kernels.sum(stream, &sum), Err(expected));
            }
            for (sum, what) in [
                (SumArgs { tokens: 5, ..good }, "tokens"),
                (SumArgs { columns: 9, ..good }, "columns"),
                (SumArgs { columns: 0, ..good }, "columns"),
            ] {
                let Err(DeviceError::Shape { what: said, .. }) = kernels.sum(stream, &sum) else {
                    panic!("{what}")
                };
                assert_eq!(said, what);
            }
            stream.synchronize().unwrap();
            assert!(memory.content().iter().all(|&byte| byte == POISON), "nothing was launched");
        },
    );
}
