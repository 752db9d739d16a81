//! Copies, gathers and zero fills of every instruction set, with guard bytes around every target.

#![allow(unsafe_code, reason = "the loops take raw pointers; the tests own what they point to")]

use crate::common::{Guarded, Random, misalignment, stores};
use proptest::prelude::*;
use sidelane::rows::{RowKernels, Simd};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn a_gather_writes_each_row_and_nothing_around_it(
        row_bytes in 0usize..=1100,
        rows in prop::collection::vec(0u32..7, 0..=12),
        (stores, at, from) in (stores(), misalignment(), 0usize..64),
        seed: u64,
    ) {
        let mut random = Random(seed);
        let source: Vec<u8> = (0..7 * row_bytes).map(|_| random.next() as u8).collect();
        let expected: Vec<u8> = rows
            .iter()
            .flat_map(|&row| &source[row as usize * row_bytes..][..row_bytes])
            .copied()
            .collect();
        let mut source = Guarded::holding(&source, from);
        for loops in Simd::available().map(RowKernels::new) {
            let mut target = Guarded::new(rows.len() * row_bytes, at);
            // SAFETY: seven source rows, and a target of as many rows as are named.
            unsafe { loops.gather(target.ptr(), source.ptr(), row_bytes, &rows, stores) };
            RowKernels::fence();
            prop_assert_eq!(target.content(), &expected[..], "{}", loops.simd());
        }
    }

    #[test]
    fn copy_and_zero_write_their_bytes_and_nothing_around_them(
        len in 0usize..=700, (stores, at, from) in (stores(), 0usize..64, 0usize..64), seed: u64,
    ) {
        let mut random = Random(seed);
        let content: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        let mut source = Guarded::holding(&content, from);
        for rows in Simd::available().map(RowKernels::new) {
            let mut target = Guarded::new(len, at);
            // SAFETY: `len` bytes on both sides.
            unsafe { rows.copy(target.ptr(), source.ptr(), len, stores) };
            RowKernels::fence();
            prop_assert_eq!(target.content(), &content[..], "{}", rows.simd());
            // SAFETY: `len` bytes.
            unsafe { rows.zero(target.ptr(), len, stores) };
            RowKernels::fence();
            prop_assert_eq!(target.content(), &vec![0; len][..], "{}", rows.simd());
        }
    }
}
