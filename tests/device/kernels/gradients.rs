//! Products and scaled rows are those of the host's loops, to the bit; what is fetched is what an
//! index names.

use sidelane::device::{DotScale, FetchWeights, OwnRows};
use sidelane::dtype::Dtype;
use sidelane::error::{DeviceError, KernelFault};
use sidelane::rows::{Arithmetic, RowKernels, Simd};

use super::buffer::{Buffer, POISON};
use super::{Device, with_kernels};
use crate::rows_common::Random;
use crate::rows_common::values::{any_f32, any_row};

#[test]
fn products_and_scaled_rows_are_those_of_the_hosts_loops() {
    let test = "kernels::gradients::products_and_scaled_rows_are_those_of_the_hosts_loops";
    with_kernels(test, |Device { context, stream, kernels }| {
        let mut random = Random(7);
        for dtype in [Arithmetic::F32, Arithmetic::F16, Arithmetic::Bf16] {
            for (rows, columns) in [(1, 8), (33, 40), (5, 4104), (700, 16), (0, 8)] {
                let row_bytes = columns * dtype.size();
                let mut row = || any_row(&mut random, dtype, columns);
                let y: Vec<u8> = (0..rows).flat_map(|_| row()).collect();
                let g: Vec<u8> = (0..rows).flat_map(|_| row()).collect();
                let weights: Vec<f32> = (0..rows).map(|_| any_f32(&mut random)).collect();
                let (of_y, of_g) = (Buffer::of(context, &y), Buffer::of(context, &g));
                let of_weights = Buffer::words(context, &weights);
                let products = Buffer::new(context, rows as u64 * 4);
                let dot = DotScale {
                    rows: rows as u32,
                    columns: columns as u32,
                    dtype: dtype.into(),
                    y: of_y.span(),
                    gradients: of_g.span(),
                    weights: of_weights.span(),
                    products: products.span(),
                };
                kernels.dot_scale(stream, &dot).unwrap();
                stream.synchronize().unwrap();
                for simd in Simd::available() {
                    let loops = RowKernels::new(simd);
                    let (mut expected, mut scaled) = (Vec::new(), g.clone());
                    let all = y.chunks_exact(row_bytes).zip(scaled.chunks_exact_mut(row_bytes)).zip(&weights);
                    for ((y, g), &weight) in all {
                        expected.extend(loops.dot_rows(dtype, y, g).to_bits().to_le_bytes());
                        loops.scale_row(dtype, g, weight);
                    }
                    let what = format!("{dtype:?}, {rows} rows of {columns}, {simd:?}");
                    assert!(products.content() == expected, "products of {what}");
                    assert!(of_g.content() == scaled, "rows of {what}");
                }
                assert!(of_y.content() == y);
            }
        }
    });
}

#[test]
fn choices_get_the_numbers_of_their_rows() {
    let test = "kernels::gradients::choices_get_the_numbers_of_their_rows";
    with_kernels(test, |Device { context, stream, kernels }| {
        let mut random = Random(8);
        let from: Vec<f32> = (0..60).map(|_| any_f32(&mut random)).collect();
        let index: Vec<i32> = (0..1000).map(|_| (random.next() % 21) as i32 - 1).collect();
        let fetched = |index: &[i32], words: u32, word: u32| {
            // Twenty rows, of which the last eight lie elsewhere.
            let (others, own) = from[..20 * words as usize].split_at(12 * words as usize);
            let (of_from, of_index) = (Buffer::words(context, others), Buffer::words(context, index));
            let of_own = Buffer::words(context, own);
            let (out, status) =
                (Buffer::new(context, index.len() as u64 * 4), Buffer::words(context, &[word, 0]));
            let fetch = FetchWeights {
                choices: index.len() as u32,
                n_rows: 12,
                words,
                from: of_from.span(),
                own: Some(OwnRows { rows: of_own.span(), count: 8 }),
                index: of_index.span(),
                status: status.word(),
                out: out.span(),
            };
            kernels.fetch_weights(stream, &fetch).unwrap();
            stream.synchronize().unwrap();
            (out.read::<u32>(), status.read::<u32>()[0])
        };
        for words in [1, 3] {
            let of = |(at, &row): (usize, &i32)| {
                usize::try_from(row).map_or(0, |row| from[row * words + at % words].to_bits())
            };
            let expected: Vec<u32> = index.iter().enumerate().map(of).collect();
            assert_eq!(fetched(&index, words as u32, 0), (expected, 0), "{words} words of a row");
        }
        assert_eq!(fetched(&index, 1, 7), (vec![0; 1000], 7), "a status that is set");
        for row in [20, -2] {
            let (seen, word) = fetched(&[row], 1, 0);
            assert_eq!(
                (seen, KernelFault::of(word)),
                (vec![0], Some(KernelFault::IndexOutOfRange { at: 0 }))
            );
        }
    });
}

#[test]
fn memory_that_is_too_small_is_refused_by_name() {
    let test = "kernels::gradients::memory_that_is_too_small_is_refused_by_name";
    with_kernels(test, |Device { context, stream, kernels }| {
        let memory = Buffer::new(context, 1024);
        let good = DotScale {
            rows: 3,
            columns: 8,
            dtype: Dtype::Bf16,
            y: memory.part(0, 48),
            gradients: memory.part(64, 48),
            weights: memory.part(128, 12),
            products: memory.part(192, 12),
        };
        for (dot, what, given, needed) in [
            (DotScale { y: memory.part(0, 47), ..good }, "y", 47, 48),
            (DotScale { gradients: memory.part(64, 47), ..good }, "gradients", 47, 48),
            (DotScale { weights: memory.part(128, 11), ..good }, "weights", 11, 12),
            (DotScale { products: memory.part(192, 11), ..good }, "products", 11, 12),
        ] {
            let expected = DeviceError::TooSmall { kernel: "dot_scale", what, given, needed };
            assert_eq!(kernels.dot_scale(stream, &dot), Err(expected));
        }
        let refused = kernels.dot_scale(stream, &DotScale { dtype: Dtype::Bytes, ..good });
        assert!(matches!(refused, Err(DeviceError::NoSum { rows: Dtype::Bytes, .. })));
        let refused = kernels.dot_scale(stream, &DotScale { columns: 12, ..good });
        assert!(matches!(refused, Err(DeviceError::Shape { what: "columns", given: 12, .. })));
        stream.synchronize().unwrap();
        assert!(memory.content().iter().all(|&byte| byte == POISON), "nothing was launched");
    });
}
