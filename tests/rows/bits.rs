//! Every instruction set against a scalar reference, bit for bit, with guard bytes around every
//! target.

#![allow(unsafe_code, reason = "the loops take raw pointers; the tests own what they point to")]

use std::ptr;

use crate::common::values::{SPECIAL_F32, Terms, any_f32, any_row, canonical, load, store, wire_type};
use crate::common::{Guarded, Random, carried, misalignment, stores};
use proptest::prelude::*;
use sidelane::dtype::{PARTIAL, PartialDtype};
use sidelane::rows::{Arithmetic, GroupedSum, RowKernels, Simd, Stores, SumOutput};

fn dtypes() -> impl Strategy<Value = Arithmetic> {
    prop::sample::select(&Arithmetic::ALL[..])
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn every_set_sums_like_the_scalar_reference(
        (dtype, wire) in carried(),
        (stores, at) in (stores(), misalignment()),
        groups in prop::collection::vec(prop_oneof![3 => 0u32..=8, 1 => Just(PARTIAL)], 0..=5),
        columns in 0usize..=200,
        weighted: bool,
        partial: bool,
        seed: u64,
    ) {
        let mut random = Random(seed);
        let mut rows = Vec::new();
        for &group in &groups {
            match group {
                PARTIAL => rows.push(any_row(&mut random, wire_type(wire), columns)),
                _ => rows.extend((0..group).map(|_| any_row(&mut random, dtype, columns))),
            }
        }
        let weights: Vec<_> = rows.iter().map(|_| any_f32(&mut random)).collect();
        let weights = weighted.then_some(&weights[..]);
        let result = if partial { wire_type(wire) } else { dtype };
        let terms = Terms { dtype, wire, rows: &rows, weights, groups: &groups };
        let expected = terms.sum(columns, result);
        let mut sources: Vec<_> = rows.iter().map(|row| Guarded::holding(row, random.next() as usize)).collect();
        let mut pointers: Vec<_> = sources.iter_mut().map(|row| row.ptr().cast_const()).collect();
        // Rows of a next sum, which may only be fetched.
        pointers.extend([0, 1, usize::MAX].map(ptr::without_provenance));
        for loops in Simd::available().map(RowKernels::new) {
            let mut target = Guarded::new(columns * result.size(), at);
            let out = if partial { SumOutput::Partial(target.ptr()) } else { SumOutput::Total(target.ptr()) };
            let (rows, groups) = (&pointers[..], &groups[..]);
            // SAFETY: rows and target have the lengths said.
            unsafe { loops.grouped_sum(GroupedSum { dtype, wire, out, rows, weights, groups, columns, stores }) };
            prop_assert_eq!(target.content(), &expected[..], "{}", loops.simd());
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
        for rows in Simd::available().map(RowKernels::new) {
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
        for rows in Simd::available().map(RowKernels::new) {
            let mut scaled = Guarded::holding(&row, at);
            // SAFETY: the row has `columns` elements.
            unsafe { rows.scale(dtype, scaled.ptr(), weight, columns) };
            prop_assert_eq!(scaled.content(), &expected[..], "{}", rows.simd());
        }
    }
}

/// All 65,536 values of a two-byte type, each added to and multiplied with values that make it
/// round, tie, overflow and vanish.
#[test]
fn every_two_byte_value_and_special_one_sum_to_reference_bits() {
    let columns = 1 << 16;
    for dtype in [Arithmetic::Bf16, Arithmetic::F16] {
        let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
        for special in SPECIAL_F32.map(f32::from_bits) {
            let mut one = Vec::new();
            store(dtype, special, &mut one);
            let rows = [every.clone(), one.repeat(columns)];
            let pointers = [rows[0].as_ptr(), rows[1].as_ptr()];
            for weights in [None, Some(&[special, 1.0][..])] {
                let (wire, groups) = (PartialDtype::F32, &[2][..]);
                let expected = Terms { dtype, wire, rows: &rows, weights, groups }.sum(columns, dtype);
                for loops in Simd::available().map(RowKernels::new) {
                    let mut out = Guarded::new(columns * 2, 0);
                    // SAFETY: rows and target have `columns` elements.
                    unsafe {
                        loops.grouped_sum(GroupedSum {
                            dtype,
                            wire,
                            out: SumOutput::Total(out.ptr()),
                            rows: &pointers,
                            weights,
                            groups,
                            columns,
                            stores: Stores::Streaming,
                        });
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
    rows: RowKernels,
    dtype: Arithmetic,
    values: &[[u8; N]],
    weights: Option<&[f32]>,
) -> [u8; N] {
    let (mut out, all) = ([0xff; N], [values.len() as u32]);
    let sources: Vec<_> = values.iter().map(|value| value.as_ptr()).collect();
    assert_eq!(N, dtype.size());
    let sum = GroupedSum {
        dtype,
        wire: PartialDtype::F32,
        out: SumOutput::Total(out.as_mut_ptr()),
        rows: &sources,
        weights,
        groups: &all,
        columns: 1,
        stores: Stores::Cached,
    };
    // SAFETY: one column on both sides, and as many weights as rows.
    unsafe { rows.grouped_sum(sum) };
    out
}

#[test]
fn a_denormal_bf16_survives_a_sum() {
    let denormal = 0x0040u16.to_ne_bytes();
    for rows in Simd::available().map(RowKernels::new) {
        assert_eq!(sum_of(rows, Arithmetic::Bf16, &[denormal], None), denormal, "{}", rows.simd());
    }
}

#[test]
fn a_sum_of_no_rows_and_of_minus_zeros_is_plus_zero() {
    let minus = (-0f32).to_ne_bytes();
    for rows in Simd::available().map(RowKernels::new) {
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
    for rows in Simd::available().map(RowKernels::new) {
        let sum = sum_of(rows, Arithmetic::F32, &values, Some(&[1.0, x]));
        assert_eq!(f32::from_ne_bytes(sum), rounded, "{}", rows.simd());
    }
}
