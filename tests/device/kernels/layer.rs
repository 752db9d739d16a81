//! What a layer computes on a device is what it computes on the host, to the bit.

use half::{bf16, f16};
use sidelane::device::{
    AccumulateArgs, ByteSpan, GatherRun, GatherRuns, GroupSegments, LayerKernels, MatmulArgs, MatmulShape,
};
use sidelane::dtype::Dtype;
use sidelane::error::DeviceError;
use sidelane::rows::{Matrix, product};

use super::buffer::{Buffer, POISON};
use super::{Device, with_kernels};
use crate::rows_common::Random;

/// Numbers whose sums round.
fn some(random: &mut Random, count: usize) -> Vec<f32> {
    (0..count).map(|_| (random.next() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Sizes of segments: rows, and with pads.
fn segments(random: &mut Random, groups: usize) -> [Vec<i64>; 2] {
    let counts: Vec<i64> = (0..groups).map(|_| [0, 1, 3, 64, 65, 130][random.next() as usize % 6]).collect();
    let padded = counts.iter().map(|&count| count + (random.next() % 3) as i64).collect();
    [counts, padded]
}

#[test]
fn products_of_groups_are_those_of_the_host() {
    let test = "kernels::layer::products_of_groups_are_those_of_the_host";
    with_kernels(test, |Device { context, stream, .. }| {
        let (mut random, kernels) = (Random(3), LayerKernels::load(context).unwrap());
        for case in 0..60 {
            let mut pick = |from: &[usize]| from[random.next() as usize % from.len()];
            let columns = pick(&[2, 3, 8, 17, 64, 65, 130]);
            let depth = pick(&[0, 1, 2, 3, 16, 40, 512, 513, 514, 530, 1030]);
            let (groups, add, transposed) = (pick(&[1, 2, 5]), case % 3 == 0, case % 2 == 0);
            let kernels = kernels.clone().max_blocks(Some(pick(&[1, 3, 1000]) as u32));
            let [counts, padded] = segments(&mut random, groups);
            let rows: i64 = padded.iter().sum();
            // Matrices of the groups lie apart.
            let apart = depth * columns + 5;
            let (a, b) = (some(&mut random, rows as usize * depth), some(&mut random, groups * apart));
            let start = some(&mut random, rows as usize * columns);
            let (of_a, of_b) = (Buffer::words(context, &a), Buffer::words(context, &b));
            let (out, table) =
                (Buffer::words(context, &start), Buffer::words(context, &[&counts[..], &padded].concat()));
            let matmul = MatmulArgs {
                a: of_a.span(),
                b: of_b.span(),
                out: out.span(),
                shape: MatmulShape::Rows {
                    rows: rows as u32,
                    depth: depth as u32,
                    columns: columns as u32,
                    transposed,
                    apart: apart as u64,
                },
                segments: Some(GroupSegments { table: table.span(), rows: &counts, padded: &padded }),
                add,
            };
            kernels.matmul(stream, &matmul).unwrap();
            stream.synchronize().unwrap();
            let (mut expected, mut first) = (start, 0);
            for (group, (&count, &padded)) in counts.iter().zip(&padded).enumerate() {
                let count = count as usize;
                let b = &b[group * apart..][..depth * columns];
                let b = match transposed {
                    true => Matrix::new(b, columns, depth).transposed(),
                    false => Matrix::new(b, depth, columns),
                };
                let a = Matrix::new(&a[first * depth..][..count * depth], count, depth);
                product(&mut expected[first * columns..][..count * columns], a, b, add);
                first += padded as usize;
            }
            let what = format!("[{counts:?}, {depth}] [{depth}, {columns}], {transposed}, {add}");
            assert!(out.read::<u32>() == bits(&expected), "{what}");
        }
    });
}

#[test]
fn gradients_of_groups_are_those_of_the_host() {
    let test = "kernels::layer::gradients_of_groups_are_those_of_the_host";
    with_kernels(test, |Device { context, stream, .. }| {
        let (mut random, kernels) = (Random(4), LayerKernels::load(context).unwrap());
        for _ in 0..30 {
            let mut pick = |from: &[usize]| from[random.next() as usize % from.len()];
            let (rows, columns, groups) = (pick(&[2, 8, 17, 65]), pick(&[2, 12, 64, 130]), pick(&[1, 2, 5]));
            let kernels = kernels.clone().max_blocks(Some(pick(&[1, 3, 1000]) as u32));
            let [mut counts, mut padded] = segments(&mut random, groups);
            // Several slices, of which the last is short.
            counts[0] += 513;
            padded[0] += 513;
            let depth = padded.iter().sum::<i64>() as usize;
            let (a, b) = (some(&mut random, depth * rows), some(&mut random, depth * columns));
            let apart = rows * columns + 3;
            let (of_a, of_b) = (Buffer::words(context, &a), Buffer::words(context, &b));
            let start = some(&mut random, groups * apart);
            let (out, table) =
                (Buffer::words(context, &start), Buffer::words(context, &[&counts[..], &padded].concat()));
            let matmul = MatmulArgs {
                a: of_a.span(),
                b: of_b.span(),
                out: out.span(),
                shape: MatmulShape::Depth {
                    rows: rows as u32,
                    depth: depth as u32,
                    columns: columns as u32,
                    apart: apart as u64,
                },
                segments: Some(GroupSegments { table: table.span(), rows: &counts, padded: &padded }),
                add: false,
            };
            kernels.matmul(stream, &matmul).unwrap();
            stream.synchronize().unwrap();
            let (mut expected, mut first) = (start, 0);
            for (group, (&count, &padded)) in counts.iter().zip(&padded).enumerate() {
                let count = count as usize;
                let a = Matrix::new(&a[first * rows..][..count * rows], count, rows).transposed();
                let b = Matrix::new(&b[first * columns..][..count * columns], count, columns);
                product(&mut expected[group * apart..][..rows * columns], a, b, false);
                first += padded as usize;
            }
            assert!(out.read::<u32>() == bits(&expected), "{counts:?} [{rows}, {columns}]");
        }
    });
}

#[test]
fn segments_beyond_the_rows_are_cut() {
    let test = "kernels::layer::segments_beyond_the_rows_are_cut";
    with_kernels(test, |Device { context, stream, .. }| {
        let kernels = LayerKernels::load(context).unwrap();
        for lists in [[5_i64, 9, 5, 9], [-1, 3, -1, 3], [i64::MAX, 1, 3, 1]] {
            let (a, b) = (Buffer::words(context, &[1.0_f32; 8]), Buffer::words(context, &[1.0_f32; 32]));
            let (out, table) = (Buffer::new(context, 4 * 4 * 4), Buffer::words(context, &lists));
            let shape = MatmulShape::Rows { rows: 4, depth: 2, columns: 4, transposed: false, apart: 8 };
            let (rows, padded) = lists.split_at(2);
            let segments = Some(GroupSegments { table: table.span(), rows, padded });
            let matmul =
                MatmulArgs { a: a.span(), b: b.span(), out: out.span(), shape, segments, add: false };
            kernels.matmul(stream, &matmul).unwrap();
            stream.synchronize().unwrap();
            // Reads what lies around the result, too.
            assert_eq!(out.content().len(), 64);
        }
    });
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + libm::expf(-x))
}

#[test]
fn activations_and_their_gradients_are_those_of_the_host() {
    let test = "kernels::layer::activations_and_their_gradients_are_those_of_the_host";
    with_kernels(test, |Device { context, stream, .. }| {
        let (mut random, kernels) = (Random(5), LayerKernels::load(context).unwrap());
        let edges = [0.0, -0.0, 1e-40, -1e-40, 88.7, 88.8, -87.4, -88.8, -103.9, -104.1, 0.35, -1.05];
        let infinite = [f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN];
        let mut gate: Vec<f32> = edges.into_iter().chain(infinite).collect();
        // All exponents, and as many again where e^x is finite.
        gate.extend((0..60_000).map(|_| f32::from_bits(random.next() as u32)).filter(|x| !x.is_nan()));
        let close = some(&mut random, 60_000);
        gate.extend(close.iter().zip(some(&mut random, 60_000)).map(|(x, y)| x * 110.0 * y));
        let count = gate.len();
        let (up, of_act) = (some(&mut random, count), some(&mut random, count));
        let [g, u, made, act] =
            [&gate, &up, &up, &of_act].map(|values| Buffer::words(context, values.as_slice()));
        let count = count as u64;
        kernels.swiglu(stream, count, [g.span(), u.span(), made.span()]).unwrap();
        stream.synchronize().unwrap();
        let same = |seen: Vec<f32>, expected: &dyn Fn(usize) -> f32, what: &str| {
            for (at, seen) in seen.into_iter().enumerate() {
                let expected = expected(at);
                let same = seen.to_bits() == expected.to_bits() || seen.is_nan() && expected.is_nan();
                assert!(same, "{what} of {:e}: {seen:e}, expected {expected:e}", gate[at]);
            }
        };
        let forward = |at: usize| gate[at] * sigmoid(gate[at]) * up[at];
        same(made.read(), &forward, "activation");
        kernels.swiglu_backward(stream, count, [g.span(), u.span(), act.span()]).unwrap();
        stream.synchronize().unwrap();
        same(act.read(), &forward, "activation, again");
        let of_gate = |at: usize| {
            let (s, da) = (sigmoid(gate[at]), of_act[at]);
            let silu = gate[at] * s;
            da * up[at] * (s + silu * (1.0 - s))
        };
        same(g.read(), &of_gate, "gradient");
        same(u.read(), &|at| of_act[at] * (gate[at] * sigmoid(gate[at])), "gradient by up");
    });
}

/// Bytes of values in a type, and the values that they are.
fn rounded(dtype: Dtype, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let bytes: Vec<u8> = match dtype {
        Dtype::Bf16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    };
    let wide = bytes.chunks_exact(dtype.size()).map(|bytes| match (dtype, bytes) {
        (Dtype::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        (Dtype::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        (_, bytes) => f32::from_le_bytes(bytes.try_into().unwrap()),
    });
    (bytes.clone(), wide.collect())
}

#[test]
fn rows_are_widened_weighed_and_summed_with_one_rounding() {
    let test = "kernels::layer::rows_are_widened_weighed_and_summed_with_one_rounding";
    with_kernels(test, |Device { context, stream, .. }| {
        let (mut random, kernels) = (Random(6), LayerKernels::load(context).unwrap());
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            for (rows, columns) in [(1, 8), (33, 40), (5, 4104), (0, 8)] {
                let count = rows * columns;
                let [first, second, third, more] = [0; 4].map(|_| some(&mut random, count));
                let ((a, a_wide), (b, b_wide)) = (rounded(dtype, &first), rounded(dtype, &second));
                let (of_a, of_b) = (Buffer::of(context, &a), Buffer::of(context, &b));
                let wide = Buffer::new(context, count as u64 * 4);
                let refused = kernels.widen(stream, (count as u64, dtype), [of_a.span(), wide.span()]);
                stream.synchronize().unwrap();
                match dtype {
                    Dtype::F32 => assert!(matches!(refused, Err(DeviceError::NoSum { .. }))),
                    _ => assert!(wide.read::<u32>() == bits(&a_wide), "{dtype:?}, widened"),
                }
                let weights = some(&mut random, rows);
                let (of_rows, of_weights) =
                    (Buffer::words(context, &third), Buffer::words(context, &weights));
                let out = Buffer::new(context, a.len() as u64);
                for weight in [None, Some(of_weights.span())] {
                    let shape = ([rows as u32, columns as u32], dtype);
                    kernels.weigh(stream, shape, [of_rows.span(), out.span()], weight).unwrap();
                    stream.synchronize().unwrap();
                    let scale = |at: usize| weight.map_or(1.0, |_| weights[at / columns]);
                    let scaled: Vec<f32> = third.iter().enumerate().map(|(at, x)| scale(at) * x).collect();
                    assert!(out.content() == rounded(dtype, &scaled).0, "{dtype:?}, {rows} rows");
                }
                let of_more = Buffer::words(context, &more);
                for parts in 0..8 {
                    let has = |part: u32, span| (parts >> part & 1 == 1).then_some(span);
                    let sum = AccumulateArgs {
                        count: count as u64,
                        dtype,
                        rows: of_a.span(),
                        residual: has(0, of_b.span()),
                        more: [has(1, of_rows.span()), has(2, of_more.span())],
                        out: out.span(),
                    };
                    kernels.accumulate(stream, &sum).unwrap();
                    stream.synchronize().unwrap();
                    let mut expected = a_wide.clone();
                    for (part, values) in [&b_wide, &third, &more].into_iter().enumerate() {
                        if parts >> part & 1 == 1 {
                            expected.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
                        }
                    }
                    assert!(out.content() == rounded(dtype, &expected).0, "{dtype:?}, sum of {parts}");
                }
            }
        }
    });
}

#[test]
fn runs_are_gathered_from_all_matrices() {
    let test = "kernels::layer::runs_are_gathered_from_all_matrices";
    with_kernels(test, |Device { context, stream, .. }| {
        let kernels = LayerKernels::load(context).unwrap();
        // Runs at multiples of 16 bytes, which move in vectors, and others: words, and halves.
        for row in [20, 16, 1040, 10, 26] {
            let bytes = |seed, rows| -> Vec<u8> {
                let mut random = Random(seed);
                (0..rows * row).map(|_| random.next() as u8).collect()
            };
            let matrices = [bytes(7, 300), bytes(8, 40)];
            let of_matrices = matrices.each_ref().map(|values| Buffer::of(context, values));
            let spans: Vec<ByteSpan<'_>> = of_matrices.iter().map(Buffer::span).collect();
            let table = Buffer::new(context, 16);
            let run = |matrix, first, rows, to| GatherRun { matrix, first, rows, to };
            let runs = [run(0, 0, 2, 3), run(1, 39, 1, 0), run(0, 17, 283, 5), run(1, 0, 2, 1)];
            let of_runs = Buffer::words(context, &runs);
            let out = Buffer::new(context, 290 * row as u64);
            let listed = GatherRuns::new(&runs, of_runs.range());
            let gather = |row: u64, matrices: &[ByteSpan<'_>], out| {
                kernels.gather(stream, (&listed, row), matrices, table.range(), out)
            };
            gather(row as u64, &spans, out.span()).unwrap();
            for (matrices, out, what) in
                [(&spans[..1], out.span(), "matrices"), (&spans, out.part(0, 288 * row as u64 - 1), "out")]
            {
                let refused = gather(row as u64, matrices, out).unwrap_err();
                assert!(matches!(refused, DeviceError::TooSmall { what: seen, .. } if seen == what));
            }
            let refused = gather(9, &spans, out.span()).unwrap_err();
            assert!(matches!(refused, DeviceError::Shape { what: "bytes of a row", given: 9, .. }));
            stream.synchronize().unwrap();
            let mut expected = vec![POISON; 290 * row];
            for GatherRun { matrix, first, rows, to } in runs {
                let [first, rows, to] = [first, rows, to].map(|number| number as usize * row);
                let from = &matrices[matrix as usize][first..first + rows];
                expected[to..to + rows].copy_from_slice(from);
            }
            assert!(out.content() == expected, "rows of {row} bytes");
        }
    });
}

#[test]
fn memory_of_a_layer_that_is_too_small_is_refused_by_name() {
    let test = "kernels::layer::memory_of_a_layer_that_is_too_small_is_refused_by_name";
    with_kernels(test, |Device { context, stream, .. }| {
        let kernels = LayerKernels::load(context).unwrap();
        let memory = Buffer::new(context, 1024);
        let listed = |bytes| GroupSegments { table: memory.part(512, bytes), rows: &[0; 2], padded: &[0; 2] };
        let good = MatmulArgs {
            a: memory.part(0, 3 * 4 * 4),
            b: memory.part(64, (7 + 4 * 2) * 4),
            out: memory.part(256, 3 * 2 * 4),
            shape: MatmulShape::Rows { rows: 3, depth: 4, columns: 2, transposed: false, apart: 7 },
            segments: Some(listed(32)),
            add: false,
        };
        for (args, what, given, needed) in [
            (MatmulArgs { a: memory.part(0, 47), ..good }, "a", 47, 48),
            (MatmulArgs { b: memory.part(64, 59), ..good }, "b", 59, 60),
            (MatmulArgs { out: memory.part(256, 23), ..good }, "out", 23, 24),
            (MatmulArgs { segments: Some(listed(31)), ..good }, "segments", 31, 32),
        ] {
            let expected = DeviceError::TooSmall { kernel: "matmul", what, given, needed };
            assert_eq!(kernels.matmul(stream, &args), Err(expected));
        }
        let spans = [memory.part(0, 16), memory.part(16, 16), memory.part(32, 15)];
        let refused = kernels.swiglu(stream, 4, spans);
        assert!(matches!(refused, Err(DeviceError::TooSmall { what: "act", given: 15, needed: 16, .. })));
        let refused = kernels.weigh(stream, ([1, 6], Dtype::Bf16), [memory.span(), memory.span()], None);
        assert!(matches!(refused, Err(DeviceError::Shape { what: "columns", given: 6, .. })));
        stream.synchronize().unwrap();
        assert!(memory.content().iter().all(|&byte| byte == POISON), "nothing was launched");
    });
}
