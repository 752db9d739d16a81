//! Partial sums: where one was taken changes no bit of the total.

#![allow(unsafe_code, reason = "the loops take raw pointers; the tests own what they point to")]

use crate::common::values::{Terms, any_f32, any_row, load, wire_type};
use crate::common::{Guarded, Random, carried, misalignment, stores};
use half::bf16;
use proptest::prelude::*;
use sidelane::dtype::{PARTIAL, PartialDtype};
use sidelane::rows::{Arithmetic, GroupedSum, RowKernels, Simd, Stores, SumOutput};

/// Runs a sum over rows of `columns` elements; its result begins at `at` bytes from an aligned
/// address.
fn run(
    loops: RowKernels,
    terms: &Terms<'_>,
    columns: usize,
    out: Arithmetic,
    at: usize,
    stores: Stores,
) -> Vec<u8> {
    let mut target = Guarded::new(columns * out.size(), at);
    let mut sources: Vec<_> = terms.rows.iter().map(|row| Guarded::holding(row, at / 3)).collect();
    let rows: Vec<_> = sources.iter_mut().map(|row| row.ptr().cast_const()).collect();
    let sum = GroupedSum {
        dtype: terms.dtype,
        wire: terms.wire,
        out: if out == terms.dtype {
            SumOutput::Total(target.ptr())
        } else {
            SumOutput::Partial(target.ptr())
        },
        rows: &rows,
        weights: terms.weights,
        groups: terms.groups,
        columns,
        stores,
    };
    // SAFETY: rows and target have as many columns; an `out` of another type than the rows has the
    // wire's type.
    unsafe { loops.grouped_sum(sum) };
    target.content().to_vec()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn a_partial_that_came_gives_the_bits_of_one_taken_here(
        (dtype, wire) in carried(),
        (stores, at) in (stores(), misalignment()),
        groups in prop::collection::vec((0u32..=4, any::<bool>()), 0..=6),
        columns in 0usize..=200,
        weighted: bool,
        seed: u64,
    ) {
        let mut random = Random(seed);
        let lengths: Vec<_> = groups.iter().map(|&(len, _)| len).collect();
        let count = lengths.iter().sum::<u32>() as usize;
        let rows: Vec<_> = (0..count).map(|_| any_row(&mut random, dtype, columns)).collect();
        let weights: Vec<_> = (0..count).map(|_| any_f32(&mut random)).collect();
        let weights = weighted.then_some(&weights[..]);
        let here = Terms { dtype, wire, rows: &rows, weights, groups: &lengths };
        for loops in Simd::available().map(RowKernels::new) {
            let (mut split_rows, mut split_weights, mut split) = (Vec::new(), Vec::new(), Vec::new());
            let mut first = 0;
            for &(len, travels) in &groups {
                let range = first..first + len as usize;
                first = range.end;
                let rows = &rows[range.clone()];
                let weights = weights.map(|weights| &weights[range]);
                if travels {
                    let group = Terms { dtype, wire, rows, weights, groups: &[len] };
                    split_rows.push(run(loops, &group, columns, wire_type(wire), at, stores));
                    split_weights.push(any_f32(&mut random));
                    split.push(PARTIAL);
                } else {
                    split_rows.extend_from_slice(rows);
                    split_weights.extend_from_slice(weights.unwrap_or_default());
                    split.push(len);
                }
            }
            let weights = weighted.then_some(&split_weights[..]);
            let there = Terms { dtype, wire, rows: &split_rows, weights, groups: &split };
            prop_assert_eq!(
                run(loops, &there, columns, dtype, at, stores),
                run(loops, &here, columns, dtype, at, stores),
                "{}", loops.simd()
            );
        }
    }

    /// So a rank that sums partials in bf16 may also take them for rows.
    #[test]
    fn a_partial_in_bf16_is_a_group_of_one_row(
        partials in prop::collection::vec(any::<bool>(), 0..=6), columns in 0usize..=200, seed: u64,
    ) {
        let mut random = Random(seed);
        let rows: Vec<_> = partials.iter().map(|_| any_row(&mut random, Arithmetic::Bf16, columns)).collect();
        let groups: Vec<_> = partials.iter().map(|&partial| if partial { PARTIAL } else { 1 }).collect();
        let (dtype, wire) = (Arithmetic::Bf16, PartialDtype::Bf16);
        let marked = Terms { dtype, wire, rows: &rows, weights: None, groups: &groups };
        let ones = vec![1; groups.len()];
        let unmarked = Terms { groups: &ones, ..marked };
        for loops in Simd::available().map(RowKernels::new) {
            prop_assert_eq!(
                run(loops, &marked, columns, dtype, 0, Stores::Cached),
                run(loops, &unmarked, columns, dtype, 0, Stores::Cached),
                "{}", loops.simd()
            );
        }
    }
}

/// Every upper half of an `f32`, with the lower halves at which rounding changes: as it is, and
/// with the upper half subtracted again, which leaves only the rounding's addition.
#[test]
fn partial_rounds_to_nearest_bf16_with_ties_to_even() {
    let rows = [bf16::ONE; 2].map(|one| one.to_ne_bytes().to_vec());
    for upper in 0..=u16::MAX {
        let exact = f32::from_bits(u32::from(upper) << 16);
        for lower in [0x0000, 0x0001, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let weights = [f32::from_bits(exact.to_bits() | lower), -exact];
            for groups in [&[1][..], &[1, 1]] {
                let (dtype, wire) = (Arithmetic::Bf16, PartialDtype::Bf16);
                let terms = Terms { dtype, wire, rows: &rows, weights: Some(&weights), groups };
                let expected = terms.sum(1, dtype);
                for loops in Simd::available().map(RowKernels::new) {
                    let sum = run(loops, &terms, 1, dtype, 0, Stores::Cached);
                    assert_eq!(sum, expected, "{:#x}, {}", weights[0].to_bits(), loops.simd());
                }
            }
        }
    }
}

#[test]
fn a_partial_that_vanishes_below_zero_leaves_total_plus_zero() {
    // The smallest bf16, times 2^-10: an f32 that rounds to -0 in bf16.
    let rows = [0x8001u16.to_ne_bytes().to_vec()];
    let weights = [1.0 / 1024.0];
    for loops in Simd::available().map(RowKernels::new) {
        let terms = Terms {
            dtype: Arithmetic::Bf16,
            wire: PartialDtype::Bf16,
            rows: &rows,
            weights: Some(&weights),
            groups: &[1],
        };
        assert_eq!(run(loops, &terms, 1, Arithmetic::Bf16, 0, Stores::Cached), [0, 0], "{}", loops.simd());
    }
}

/// The point of the choice of a wire: what `f32` keeps, bf16 rounds away, and nothing but that.
#[test]
fn the_wire_decides_what_a_partial_keeps() {
    let rows = [256.0, 1.0, -256.0].map(|x| bf16::from_f32(x).to_ne_bytes().to_vec());
    for (wire, expected) in [(PartialDtype::F32, 1.0), (PartialDtype::Bf16, 0.0)] {
        for loops in Simd::available().map(RowKernels::new) {
            let terms = Terms { dtype: Arithmetic::Bf16, wire, rows: &rows, weights: None, groups: &[2, 1] };
            let sum = run(loops, &terms, 1, Arithmetic::Bf16, 0, Stores::Cached);
            assert_eq!(load(Arithmetic::Bf16, &sum, 0), expected, "{wire}, {}", loops.simd());
        }
    }
}
