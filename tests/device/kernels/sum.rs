//! Sums of the rows that returned.

use sidelane::device::{Addresses, RefusalMarks, SumArgs};
use sidelane::dtype::{Dtype, PartialDtype};
use sidelane::error::{DeviceError, KernelFault};
use sidelane::plan::SlotShape;
use sidelane::rows::{Arithmetic, GroupedSum, RowKernels, Simd, Stores, SumOutput};
use sidelane_testkit::device::kernels::sums::{ReturnedRows, TYPES};

use super::buffer::{Buffer, POISON};
use super::world::Input;
use super::{Device, with_kernels};
use crate::rows_common::Random;

/// Rows that return to the rank of this input.
fn rows_back(random: &mut Random, input: &Input, columns: u32, types: (Dtype, Dtype)) -> ReturnedRows {
    let size = (input.tokens, input.map.ranks(), columns);
    ReturnedRows::any(random, input.shape, size, input.places(), types).unwrap()
}

/// The results of the loops of the host.
fn of_rows(rows_back: &ReturnedRows, loops: RowKernels, wire: PartialDtype) -> Vec<u8> {
    let dtype = Arithmetic::try_from(rows_back.types.1).unwrap();
    let row_bytes = rows_back.columns as usize * dtype.size();
    let mut out = vec![0; rows_back.tokens as usize * row_bytes];
    for (token, out) in (0..).zip(out.chunks_exact_mut(row_bytes)) {
        let (kept, groups) = rows_back.terms(token);
        let rows: Vec<*const u8> = kept.iter().map(|row| row.as_ptr()).collect();
        let sum = GroupedSum {
            dtype,
            wire,
            out: SumOutput::Total(out.as_mut_ptr()),
            rows: &rows,
            weights: None,
            groups: &groups,
            columns: rows_back.columns as usize,
            stores: Stores::Cached,
        };
        // SAFETY: the rows live in `kept`, and `out` has room for one.
        unsafe { loops.grouped_sum(sum) }
    }
    out
}

#[test]
fn slot_sums_have_bits_of_reference_and_host_loops() {
    with_kernels("kernels::sum::slot_sums_have_bits_of_reference_and_host_loops", |device| {
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
                let rows_back = rows_back(&mut random, &input, columns, types);
                let what = format!("{types:?}, {tokens} tokens of {ranks} ranks, {columns} columns");
                rows_back.check(&device.bench()).unwrap_or_else(|error| panic!("{what}: {error}"));
                let expected = rows_back.reference().unwrap();
                for simd in Simd::available() {
                    for wire in PartialDtype::ALL {
                        let partials = types.0 != types.1 && wire != PartialDtype::F32;
                        if wire.carries(types.1) && !partials {
                            assert!(
                                expected == of_rows(&rows_back, RowKernels::new(simd), wire),
                                "{what}, {simd:?}, {wire}"
                            );
                        }
                    }
                }
            }
        }
    });
}

#[test]
fn a_token_whose_choices_were_all_dropped_gets_zeros() {
    with_kernels("kernels::sum::a_token_whose_choices_were_all_dropped_gets_zeros", |device| {
        let shape = SlotShape::new(3, 2, 16).unwrap();
        for types in TYPES {
            let mut input = Input::any(&mut Random(5), shape, (4, 2), 0, 3);
            input.experts = vec![-1; 6];
            let rows_back = rows_back(&mut Random(6), &input, 24, types);
            let zeros = vec![0; 3 * 24 * types.1.size()];
            assert_eq!(rows_back.sum(&device.bench()).unwrap(), (zeros, None));
        }
    });
}

/// Rows that would give sums other than zero.
fn believable() -> ReturnedRows {
    let shape = SlotShape::new(6, 2, 16).unwrap();
    let input = Input::any(&mut Random(7), shape, (40, 40), 0, 6);
    rows_back(&mut Random(8), &input, 32, (Dtype::Bf16, Dtype::Bf16))
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
            let mut rows_back = believable();
            rows_back.status = word;
            assert_eq!(rows_back.sum(&device.bench()).unwrap(), (zeros.clone(), Some(expected)));
        }
    });
}

/// This call. A mark of one whose lower half is the same is none of it.
const CALL: u64 = (3 << 32) + 7;

/// The sums and the two halves of the verdict of a rank where these ranks left marks of a call.
/// `before` is the verdict as it was, and `lasting` what is wrong with all calls.
fn marked(
    device: &Device,
    rows_back: &ReturnedRows,
    marks: &[(usize, u64)],
    rank: u32,
    (before, lasting): (u32, u32),
) -> (Vec<u8>, [u32; 2]) {
    let Device { context, stream, kernels } = device;
    let rows = Buffer::of(context, &rows_back.rows.concat().concat());
    let each = rows.range().len() / rows_back.rows.len() as u64;
    let spans: Vec<_> = (0..rows_back.rows.len() as u64).map(|rank| rows.part(rank * each, each)).collect();
    let table = Buffer::new(context, spans.len() as u64 * 8);
    let mut words = vec![[CALL - 1, CALL]; spans.len()];
    marks.iter().for_each(|&(rank, call)| words[rank][0] = call);
    let (marks, counter) = (Buffer::words(context, &words.concat()), Buffer::words(context, &[CALL]));
    let verdict = Buffer::words(context, &[before, CALL as u32]);
    let (lasting, places) = (Buffer::words(context, &[lasting]), Buffer::words(context, &rows_back.places));
    let out = Buffer::new(context, u64::from(rows_back.tokens) * 64);
    let sum = SumArgs {
        shape: rows_back.shape,
        tokens: rows_back.tokens,
        columns: rows_back.columns,
        rows: rows_back.types.0,
        dtype: rows_back.types.1,
        returned_rows: &Addresses::new(stream, table.range(), &spans).unwrap(),
        places: places.span(),
        status: verdict.word(),
        marks: Some(RefusalMarks {
            marks: marks.span(),
            counter: counter.word(),
            rank,
            verdict: verdict.word(),
            lasting: lasting.word(),
        }),
        out: out.span(),
    };
    kernels.sum(stream, &sum).unwrap();
    stream.synchronize().unwrap();
    (out.content(), verdict.read().try_into().unwrap())
}

#[test]
fn marks_of_this_call_give_zeros_and_name_lowest_or_own_rank() {
    with_kernels("kernels::sum::marks_of_this_call_give_zeros_and_name_lowest_or_own_rank", |device| {
        let (rows_back, number) = (believable(), CALL as u32);
        let (sums, zeros) = (rows_back.reference().unwrap(), vec![0; 6 * 64]);
        let by = |rank: u32| 8 | rank << 8;
        for other in [&[][..], &[(7, CALL - (1 << 32))], &[(0, CALL + 1), (39, CALL + (1 << 32))]] {
            assert_eq!(marked(device, &rows_back, other, 0, (0, 0)), (sums.clone(), [0, number]));
        }
        let both = [(31, CALL), (7, CALL)];
        for (rank, named) in [(0, 7), (7, 7), (31, 31), (39, 7)] {
            assert_eq!(marked(device, &rows_back, &both, rank, (0, 0)), (zeros.clone(), [by(named), number]));
        }
        // What was wrong before stays, and what is wrong with all calls is stronger.
        let (over, dead) = (7 | 2 << 8, 1 << 16);
        assert_eq!(marked(device, &rows_back, &both, 0, (over, 0)), (zeros.clone(), [over, number]));
        assert_eq!(marked(device, &rows_back, &both, 0, (0, dead)), (zeros.clone(), [dead, number]));
        assert_eq!(marked(device, &rows_back, &both, 31, (dead, dead)), (zeros, [dead, number]));
        // A rank that refuses sums nothing.
        let none = ReturnedRows { tokens: 0, places: Vec::new(), ..rows_back };
        assert_eq!(marked(device, &none, &both, 31, (0, 0)), (Vec::new(), [by(31), number]));
        assert_eq!(marked(device, &none, &both, 31, (0, dead)), (Vec::new(), [dead, number]));
    });
}

#[test]
fn place_outside_slot_yields_zeros_for_its_token_and_status() {
    with_kernels("kernels::sum::place_outside_slot_yields_zeros_for_its_token_and_status", |device| {
        let good = believable();
        let row_bytes = 64;
        for place in [6, i32::MAX, -2] {
            let mut rows_back = believable();
            rows_back.places[4 * 40 + 33] = place;
            let (seen, status) = rows_back.sum(&device.bench()).unwrap();
            assert_eq!(status, Some(KernelFault::PlaceOutOfRange { token: 4 }));
            assert_eq!(seen[4 * row_bytes..5 * row_bytes], [0; 64]);
            assert_eq!(seen[..4 * row_bytes], good.reference().unwrap()[..4 * row_bytes]);
        }
    });
}

#[test]
fn sum_refuses_types_without_kernel_and_memory_too_small() {
    with_kernels("kernels::sum::sum_refuses_types_without_kernel_and_memory_too_small", |device| {
        let Device { context, stream, kernels } = device;
        let shape = SlotShape::new(4, 2, 32).unwrap();
        let (memory, table) = (Buffer::new(context, 4096), Buffer::new(context, 16));
        let returned_rows = |len| {
            Addresses::new(stream, table.range(), &[memory.part(0, len), memory.part(64, len)]).unwrap()
        };
        let (large, small) = (returned_rows(64), returned_rows(63));
        let good = SumArgs {
            shape,
            tokens: 4,
            columns: 8,
            rows: Dtype::Bf16,
            dtype: Dtype::Bf16,
            returned_rows: &large,
            places: memory.part(256, 32),
            status: memory.range().word(296).unwrap(),
            marks: None,
            out: memory.part(2048, 64),
        };
        for (rows, out) in
            [(Dtype::Bf16, Dtype::F32), (Dtype::F16, Dtype::Bf16), (Dtype::Bytes, Dtype::Bytes)]
        {
            let refused = kernels.sum(stream, &SumArgs { rows, dtype: out, ..good });
            assert_eq!(refused, Err(DeviceError::NoSum { rows, out }));
        }
        for (sum, what, given, needed) in [
            (SumArgs { returned_rows: &small, ..good }, "returned_rows", 63, 64),
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
    });
}
