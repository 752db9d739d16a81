//! Fp8 records of every instruction set against a reference that searches all codes.

use crate::common::Random;
use crate::common::values::{any_f32, any_row, load, store};
use half::{bf16, f16};
use proptest::prelude::*;
use sidelane::dtype::Fp8RowShape;
use sidelane::error::PlanError;
use sidelane::rows::{Arithmetic, RowKernels, Simd};

/// The value of a code: sign, four bits of exponent, three of mantissa; the last code of each sign
/// is NaN.
fn value(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 8.0 * 2f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The nearest of all codes with the sign of `x`, of two that are as near the even one; NaN where
/// `x` is not finite.
fn nearest(x: f32) -> u8 {
    if !x.is_finite() {
        return 0x7f;
    }
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let distance = |code: &u8| (f64::from(x) - f64::from(value(*code))).abs();
    let codes = sign..sign + 0x7f;
    codes.min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))).unwrap()
}

/// One record, as its definition reads.
fn reference_record(dtype: Arithmetic, shape: Fp8RowShape, row: &[u8]) -> Vec<u8> {
    let mut record = vec![0; shape.bytes()];
    let values: Vec<_> = (0..shape.hidden()).map(|column| load(dtype, row, column)).collect();
    for (b, block) in values.chunks(128).enumerate() {
        let amax = block.iter().filter(|x| x.is_finite()).fold(0f32, |amax, x| amax.max(x.abs()));
        let scale = (amax / 448.0).max(2f32.powi(-126));
        for (i, x) in block.iter().enumerate() {
            record[b * 128 + i] = nearest(x * (1.0 / scale));
        }
        record[shape.scales_offset() + b * 4..][..4].copy_from_slice(&scale.to_ne_bytes());
    }
    record
}

fn quantized(loops: RowKernels, dtype: Arithmetic, shape: Fp8RowShape, rows: &[u8]) -> Vec<u8> {
    let count = rows.len() / (shape.hidden() * dtype.size()).max(1);
    let mut records = vec![0xa5; count * shape.bytes()];
    loops.quantize(dtype, shape, rows, &mut records).unwrap();
    records
}

/// The record of one row of `f32`, by every set, which agree.
fn record(values: &[f32]) -> Vec<u8> {
    let row: Vec<u8> = values.iter().flat_map(|x| x.to_ne_bytes()).collect();
    let shape = Fp8RowShape::new(values.len() as u32);
    let records =
        Simd::available().map(|simd| quantized(RowKernels::new(simd), Arithmetic::F32, shape, &row));
    let mut records: Vec<_> = records.collect();
    records.dedup();
    assert_eq!(records.len(), 1, "the sets differ");
    records.remove(0)
}

fn scale_of(record: &[u8], hidden: u32, block: usize) -> f32 {
    load(Arithmetic::F32, &record[Fp8RowShape::new(hidden).scales_offset()..], block)
}

fn dtypes() -> impl Strategy<Value = Arithmetic> {
    prop::sample::select(&Arithmetic::ALL[..])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn every_set_quantizes_like_the_reference(
        dtype in dtypes(), count in 0usize..=3, hidden in 0u32..=400, seed: u64,
    ) {
        let (mut random, shape) = (Random(seed), Fp8RowShape::new(hidden));
        let rows: Vec<_> = (0..count).map(|_| any_row(&mut random, dtype, shape.hidden())).collect();
        let expected: Vec<_> = rows.iter().flat_map(|row| reference_record(dtype, shape, row)).collect();
        for loops in Simd::available().map(RowKernels::new) {
            prop_assert_eq!(&quantized(loops, dtype, shape, &rows.concat()), &expected, "{}", loops.simd());
        }
    }

    #[test]
    fn every_set_dequantizes_like_the_reference(
        dtype in dtypes(), count in 0usize..=3, hidden in 0u32..=400, seed: u64,
    ) {
        let (mut random, shape) = (Random(seed), Fp8RowShape::new(hidden));
        let (mut records, mut expected) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let mut record: Vec<_> = (0..shape.bytes()).map(|_| random.next() as u8).collect();
            for block in 0..shape.scales() {
                let scale = any_f32(&mut random).to_ne_bytes();
                record[shape.scales_offset() + block * 4..][..4].copy_from_slice(&scale);
            }
            for column in 0..shape.hidden() {
                let scale = scale_of(&record, hidden, column / 128);
                store(dtype, value(record[column]) * scale, &mut expected);
            }
            records.extend(record);
        }
        for loops in Simd::available().map(RowKernels::new) {
            let mut rows = vec![0xa5; count * shape.hidden() * dtype.size()];
            loops.dequantize(dtype, shape, &records, &mut rows).unwrap();
            prop_assert_eq!(&rows, &expected, "{}", loops.simd());
        }
    }

    /// Three bits of mantissa: half a step is a sixteenth of the value, or of the smallest value
    /// that has all three.
    #[test]
    fn a_value_comes_back_within_half_a_step(seed: u64, exponent in -100i32..=100) {
        let mut random = Random(seed);
        let range = 2f32.powi(exponent);
        let values: Vec<_> = (0..128).map(|_| (random.next() as i32) as f32 / 2f32.powi(31) * range).collect();
        let record = record(&values);
        let scale = scale_of(&record, 128, 0);
        for (&x, &code) in values.iter().zip(&record) {
            let error = (value(code) * scale - x).abs();
            let half_a_step = x.abs().max(scale / 64.0) / 16.0;
            prop_assert!(error <= half_a_step * 1.0001, "{x:e} came back as {:e}", value(code) * scale);
        }
    }
}

/// A block with 448 has the scale 1: its codes are those of the values themselves.
#[test]
fn every_two_byte_value_up_to_448_gets_the_nearest_code() {
    let bits = 0..=u16::MAX;
    let halves = bits.clone().map(|bits| f16::from_bits(bits).to_f32());
    let values: Vec<_> = halves.chain(bits.map(|bits| bf16::from_bits(bits).to_f32())).collect();
    let small: Vec<_> = values.into_iter().filter(|x| x.abs() <= 448.0).collect();
    for values in small.chunks(127) {
        let record = record(&[&[448.0], values].concat());
        assert_eq!(scale_of(&record, values.len() as u32 + 1, 0), 1.0);
        for (&x, &code) in values.iter().zip(&record[1..]) {
            assert_eq!(code, nearest(x), "{x:e}");
        }
    }
}

#[test]
fn every_code_comes_back_as_itself_and_nan_as_the_canonical_one() {
    let shape = Fp8RowShape::new(256);
    let mut record: Vec<u8> = (0..=255).collect();
    record.extend([1f32; 2].into_iter().flat_map(f32::to_ne_bytes));
    record.resize(shape.bytes(), 0);
    for dtype in Arithmetic::ALL {
        for loops in Simd::available().map(RowKernels::new) {
            let mut row = vec![0; 256 * dtype.size()];
            loops.dequantize(dtype, shape, &record, &mut row).unwrap();
            let mut expected = Vec::new();
            (0..=255).for_each(|code| store(dtype, value(code), &mut expected));
            assert_eq!(row, expected, "{dtype:?}, {}", loops.simd());
        }
    }
}

#[test]
fn a_value_that_is_not_finite_becomes_nan_and_hurts_nobody_else() {
    let mut values = [1.0; 256];
    (values[3], values[5], values[9]) = (f32::INFINITY, f32::NEG_INFINITY, -f32::NAN);
    let record = record(&values);
    for (column, &code) in record[..256].iter().enumerate() {
        assert_eq!(code, if [3, 5, 9].contains(&column) { 0x7f } else { 0x7e }, "column {column}");
    }
    assert_eq!(scale_of(&record, 256, 0), 1.0 / 448.0);
}

#[test]
fn block_without_value_has_smallest_scale_and_keeps_zero_signs() {
    let record = record(&[0.0, -0.0, f32::from_bits(1), f32::NAN]);
    assert_eq!(record[..4], [0x00, 0x80, 0x00, 0x7f]);
    assert_eq!(scale_of(&record, 4, 0), f32::MIN_POSITIVE);
}

#[test]
fn the_largest_values_of_f32_have_a_scale_that_brings_them_back() {
    let record = record(&[f32::MAX, -f32::MAX, f32::MAX / 2.0]);
    assert_eq!(record[..3], [0x7e, 0xfe, 0x76]);
    assert_eq!(scale_of(&record, 3, 0), f32::MAX / 448.0);
}

#[test]
fn mismatched_record_lengths_are_refused_without_any_write() {
    let (loops, shape) = (RowKernels::new(Simd::best()), Fp8RowShape::new(128));
    let refused = [
        (257, 144, PlanError::WrongShape { what: "rows", seen: 128, rows: 1, columns: 128 }),
        (512, 144, PlanError::WrongShape { what: "records", seen: 144, rows: 2, columns: 144 }),
        (256, 145, PlanError::WrongShape { what: "records", seen: 145, rows: 1, columns: 144 }),
        (0, 144, PlanError::WrongShape { what: "records", seen: 144, rows: 0, columns: 144 }),
    ];
    for (rows, records, error) in refused {
        let (mut row, mut record) = (vec![1; rows], vec![2; records]);
        assert_eq!(loops.quantize(Arithmetic::Bf16, shape, &row, &mut record), Err(error.clone()));
        assert!(record.iter().all(|&byte| byte == 2));
        assert_eq!(loops.dequantize(Arithmetic::Bf16, shape, &record, &mut row), Err(error));
        assert!(row.iter().all(|&byte| byte == 1));
    }
}
