//! Every instruction set against a scalar reference, bit for bit, with guard bytes around every target.

// The loops take raw pointers; the tests own what they point to.
#![allow(unsafe_code)]

mod rows_common;

use half::{bf16, f16};
use proptest::prelude::*;
use rows_common::{Guarded, Random, misalignment, stores};
use sidelane::rows::{Arithmetic, Rows, Simd, Stores};

const SPECIAL_F32: [u32; 18] = [
    0x0000_0000,
    0x8000_0000,
    0x0000_0001,
    0x8000_0001,
    0x0040_0000,
    0x007f_ffff,
    0x0080_0000,
    0x3f80_0000,
    0x3f80_8000,
    0x3f81_8000,
    0x477f_f000,
    0x3300_0000,
    0x7f7f_ffff,
    0xff7f_ffff,
    0x7f80_0000,
    0xff80_0000,
    0x7f80_0001,
    0xffc0_1234,
];

/// Denormals, infinities, NaN of both kinds, zeros, extremes; any bits; values whose sums round and tie.
fn any_f32(random: &mut Random) -> f32 {
    let bits = random.next();
    match bits >> 60 {
        0..=2 => f32::from_bits(SPECIAL_F32[(bits % SPECIAL_F32.len() as u64) as usize]),
        3..=5 => f32::from_bits(bits as u32),
        _ => (bits as i32 >> (bits >> 40 & 31)) as f32 / 1024.0,
    }
}

/// The bytes of a row of such values, or of any bits of its type.
fn any_row(random: &mut Random, dtype: Arithmetic, columns: usize) -> Vec<u8> {
    let mut row = Vec::new();
    for _ in 0..columns {
        let any = random.next();
        match dtype {
            Arithmetic::F32 => row.extend(any_f32(random).to_ne_bytes()),
            _ if any & 7 == 0 => row.extend(((any >> 32) as u16).to_ne_bytes()),
            Arithmetic::Bf16 => row.extend(bf16::from_f32(any_f32(random)).to_ne_bytes()),
            Arithmetic::F16 => row.extend(f16::from_f32(any_f32(random)).to_ne_bytes()),
        }
    }
    row
}

fn canonical(x: f32) -> f32 {
    if x.is_nan() { f32::from_bits(0x7fc0_0000) } else { x }
}

fn load(dtype: Arithmetic, row: &[u8], column: usize) -> f32 {
    let element = &row[column * dtype.size()..][..dtype.size()];
    match dtype {
        Arithmetic::F32 => f32::from_ne_bytes(element.try_into().unwrap()),
        Arithmetic::Bf16 => bf16::from_ne_bytes(element.try_into().unwrap()).to_f32(),
        Arithmetic::F16 => f16::from_ne_bytes(element.try_into().unwrap()).to_f32(),
    }
}

fn store(dtype: Arithmetic, x: f32, into: &mut Vec<u8>) {
    match dtype {
        Arithmetic::F32 => into.extend(canonical(x).to_ne_bytes()),
        Arithmetic::Bf16 if x.is_nan() => into.extend(0x7fc0u16.to_ne_bytes()),
        Arithmetic::Bf16 => into.extend(bf16::from_f32(x).to_ne_bytes()),
        Arithmetic::F16 if x.is_nan() => into.extend(0x7e00u16.to_ne_bytes()),
        Arithmetic::F16 => into.extend(f16::from_f32(x).to_ne_bytes()),
    }
}

/// The sum as its definition reads: groups, then their partial sums, one column at a time.
fn reference_sum(
    dtype: Arithmetic,
    rows: &[Vec<u8>],
    weights: Option<&[f32]>,
    groups: &[u32],
    columns: usize,
) -> Vec<u8> {
    let mut out = Vec::new();
    for column in 0..columns {
        let (mut total, mut row) = (0f32, 0);
        for &count in groups {
            let mut partial = 0f32;
            for _ in 0..count {
                let x = load(dtype, &rows[row], column);
                partial += weights.map_or(x, |weights| weights[row] * x);
                row += 1;
            }
            total += partial;
        }
        store(dtype, total, &mut out);
    }
    out
}

fn reference_dot(dtype: Arithmetic, a: &[u8], b: &[u8], columns: usize) -> f32 {
    let mut lanes = [0f32; 16];
    for column in 0..columns {
        lanes[column % 16] += load(dtype, a, column) * load(dtype, b, column);
    }
    for half in [8, 4, 2, 1] {
        for j in 0..half {
            lanes[j] += lanes[j + half];
        }
    }
    canonical(lanes[0])
}

fn dtypes() -> impl Strategy<Value = Arithmetic> {
    prop::sample::select(&Arithmetic::ALL[..])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn every_set_sums_like_the_scalar_reference(
        (dtype, stores, at) in (dtypes(), stores(), misalignment()),
        groups in prop::collection::vec(0u32..=8, 0..=5),
        columns in 0usize..=200,
        weighted: bool,
        seed: u64,
    ) {
        let mut random = Random(seed);
        let count: u32 = groups.iter().sum();
        let rows: Vec<_> = (0..count).map(|_| any_row(&mut random, dtype, columns)).collect();
        let weights: Vec<_> = (0..count).map(|_| any_f32(&mut random)).collect();
        let weights = weighted.then_some(&weights[..]);
        let mut sources: Vec<_> = rows.iter().map(|row| Guarded::holding(row, random.next() as usize)).collect();
        let pointers: Vec<_> = sources.iter_mut().map(|row| row.ptr().cast_const()).collect();
        let sums = [groups, vec![count]].map(|groups| {
            let expected = reference_sum(dtype, &rows, weights, &groups, columns);
            (groups, expected)
        });
        for rows in Simd::available().map(Rows::new) {
            for (groups, expected) in &sums {
                let mut out = Guarded::new(columns * dtype.size(), at);
                // SAFETY: rows and target have the lengths said.
                unsafe { rows.grouped_sum(dtype, out.ptr(), &pointers, weights, groups, columns, stores) };
                prop_assert_eq!(out.content(), &expected[..], "{} {:?}", rows.simd(), groups);
            }
        }
    }

    #[test]
    fn every_set_takes_the_dot_product_in_the_same_order(
        dtype in dtypes(), columns in 0usize..=200, at in 0usize..64, seed: u64,
    ) {
        let mut random = Random(seed);
        let (a, b) = (any_row(&mut random, dtype, columns), any_row(&mut random, dtype, columns));
        let expected = reference_dot(dtype, &a, &b, columns);
        let (mut a, mut b) = (Guarded::holding(&a, at), Guarded::holding(&b, at / 3));
        for rows in Simd::available().map(Rows::new) {
            // SAFETY: both rows have `columns` elements.
            let dot = unsafe { rows.dot(dtype, a.ptr(), b.ptr(), columns) };
            prop_assert_eq!(dot.to_bits(), expected.to_bits(), "{}", rows.simd());
        }
    }

    #[test]
    fn every_set_scales_like_the_scalar_reference(
        dtype in dtypes(), columns in 0usize..=200, at in 0usize..64, seed: u64,
    ) {
        let mut random = Random(seed);
        let (row, weight) = (any_row(&mut random, dtype, columns), any_f32(&mut random));
        let mut expected = Vec::new();
        (0..columns).for_each(|column| store(dtype, load(dtype, &row, column) * weight, &mut expected));
        for rows in Simd::available().map(Rows::new) {
            let mut scaled = Guarded::holding(&row, at);
            // SAFETY: the row has `columns` elements.
            unsafe { rows.scale(dtype, scaled.ptr(), weight, columns) };
            prop_assert_eq!(scaled.content(), &expected[..], "{}", rows.simd());
        }
    }
}

/// All 65,536 values of a two-byte type, each added to and multiplied with values that make it round, tie,
/// overflow and vanish.
#[test]
fn every_two_byte_value_sums_to_the_reference_bits_beside_special_ones() {
    let columns = 1 << 16;
    for dtype in [Arithmetic::Bf16, Arithmetic::F16] {
        let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
        for special in SPECIAL_F32.map(f32::from_bits) {
            let mut one = Vec::new();
            store(dtype, special, &mut one);
            let rows = [every.clone(), one.repeat(columns)];
            let pointers = [rows[0].as_ptr(), rows[1].as_ptr()];
            for weights in [None, Some(&[special, 1.0][..])] {
                let expected = reference_sum(dtype, &rows, weights, &[2], columns);
                for loops in Simd::available().map(Rows::new) {
                    let mut out = Guarded::new(columns * 2, 0);
                    // SAFETY: rows and target have `columns` elements.
                    unsafe {
                        loops.grouped_sum(
                            dtype,
                            out.ptr(),
                            &pointers,
                            weights,
                            &[2],
                            columns,
                            Stores::Streaming,
                        );
                    }
                    assert!(
                        out.content() == expected,
                        "{dtype:?} beside {special:e}, weights {weights:?}, {}",
                        loops.simd()
                    );
                }
            }
        }
    }
}

/// The plain sum of one column, as its bytes.
fn sum_of<const N: usize>(
    rows: Rows,
    dtype: Arithmetic,
    values: &[[u8; N]],
    weights: Option<&[f32]>,
) -> [u8; N] {
    let (mut out, all) = ([0xff; N], [values.len() as u32]);
    let sources: Vec<_> = values.iter().map(|value| value.as_ptr()).collect();
    assert_eq!(N, dtype.size());
    // SAFETY: one column on both sides, and as many weights as rows.
    unsafe { rows.grouped_sum(dtype, out.as_mut_ptr(), &sources, weights, &all, 1, Stores::Cached) };
    out
}

#[test]
fn a_denormal_bf16_survives_a_sum() {
    let denormal = 0x0040u16.to_ne_bytes();
    for rows in Simd::available().map(Rows::new) {
        assert_eq!(sum_of(rows, Arithmetic::Bf16, &[denormal], None), denormal, "{}", rows.simd());
    }
}

#[test]
fn a_sum_of_no_rows_and_of_minus_zeros_is_plus_zero() {
    let minus = (-0f32).to_ne_bytes();
    for rows in Simd::available().map(Rows::new) {
        for values in [&[][..], &[minus], &[minus, minus]] {
            assert_eq!(sum_of(rows, Arithmetic::F32, values, None), [0; 4], "{}", rows.simd());
        }
    }
}

#[test]
fn a_product_is_rounded_before_it_is_added() {
    // (1 + 2^-12)^2 - 1 differs between a fused and a rounded product.
    let x = 1.0 + 1.0 / 4096.0f32;
    let rounded = x * x - 1.0;
    assert_ne!(rounded, x.mul_add(x, -1.0));
    let values = [-1f32, x].map(f32::to_ne_bytes);
    for rows in Simd::available().map(Rows::new) {
        let sum = sum_of(rows, Arithmetic::F32, &values, Some(&[1.0, x]));
        assert_eq!(f32::from_ne_bytes(sum), rounded, "{}", rows.simd());
    }
}
