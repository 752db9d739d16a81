//! The vector loops, by instruction set: rows into a target that fits the cache or does not.
//!
//! One thread; what two processes reach together depends on the memory, not on these loops alone.

#![allow(unsafe_code, reason = "the loops take raw pointers; the benchmark owns what they point to")]

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use sidelane::dtype::{Fp8RowShape, PartialDtype};
use sidelane::rows::{Arithmetic, GroupedSum, RowKernels, Simd, Stores, SumOutput};

const MIB: usize = 1 << 20;

/// Memory as aligned as a window, touched so that no fault is timed.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

fn touched(bytes: usize) -> Vec<Line> {
    vec![Line([1; 64]); bytes / 64]
}

/// Row numbers in an order the hardware cannot guess.
fn scattered(count: usize, of: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |i| i.wrapping_mul(0x9e37_79b1) >> 3).map(move |i| i % of)
}

fn gather(criterion: &mut Criterion) {
    let source = touched(2 * MIB);
    for row_bytes in [4096, 14336] {
        for target_mib in [2, 64] {
            let mut target = touched(target_mib * MIB);
            let count = target_mib * MIB / row_bytes;
            let rows: Vec<u32> = scattered(count, 2 * MIB / row_bytes).map(|row| row as u32).collect();
            let mut group = criterion.benchmark_group(format!("gather/{row_bytes} B to {target_mib} MiB"));
            group.throughput(Throughput::Bytes((count * row_bytes) as u64));
            for loops in Simd::available().map(RowKernels::new) {
                for stores in [Stores::Cached, Stores::Streaming] {
                    let id = BenchmarkId::new(loops.simd().name(), format!("{stores:?}"));
                    group.bench_function(id, |bencher| {
                        bencher.iter(|| {
                            // SAFETY: every row named lies in the source, and all of them fit the
                            // target.
                            unsafe {
                                let (dst, src) = (target.as_mut_ptr().cast(), source.as_ptr().cast());
                                loops.gather(dst, src, row_bytes, &rows, stores);
                            }
                            RowKernels::fence();
                        });
                    });
                }
            }
        }
    }
}

fn sum(criterion: &mut Criterion) {
    const ROWS: usize = 8;
    const COLUMNS: usize = 2048;
    const TOKENS: usize = 512;
    const KINDS: [(&str, &[u32], PartialDtype); 3] = [
        ("plain", &[8], PartialDtype::F32),
        ("by pairs", &[2; 4], PartialDtype::F32),
        ("by pairs, bf16", &[2; 4], PartialDtype::Bf16),
    ];
    for pool_mib in [2, 64] {
        let pool = touched(pool_mib * MIB);
        let mut out = touched(TOKENS * COLUMNS * 2);
        let base: *const u8 = pool.as_ptr().cast();
        let rows: Vec<_> = scattered(TOKENS * ROWS, pool_mib * MIB / (COLUMNS * 2))
            .map(|row| base.wrapping_add(row * COLUMNS * 2))
            .collect();
        let mut group = criterion.benchmark_group(format!("sum/8 x 2048 bf16 of {pool_mib} MiB"));
        group.throughput(Throughput::Bytes((TOKENS * ROWS * COLUMNS * 2) as u64));
        for loops in Simd::available().map(RowKernels::new) {
            for (kind, groups, wire) in KINDS {
                group.bench_function(BenchmarkId::new(loops.simd().name(), kind), |bencher| {
                    bencher.iter(|| {
                        for (token, rows) in rows.chunks_exact(ROWS).enumerate() {
                            // SAFETY: every row lies in the pool, every token in the target.
                            unsafe {
                                let out = out.as_mut_ptr().cast::<u8>().add(token * COLUMNS * 2);
                                loops.grouped_sum(GroupedSum {
                                    dtype: Arithmetic::Bf16,
                                    wire,
                                    out: SumOutput::Total(out),
                                    rows,
                                    weights: None,
                                    groups,
                                    columns: COLUMNS,
                                    stores: Stores::Cached,
                                });
                            }
                        }
                    });
                });
            }
        }
    }
}

fn records(criterion: &mut Criterion) {
    const ROWS: usize = 128;
    let (dtype, shape) = (Arithmetic::Bf16, Fp8RowShape::new(2048));
    let bytes = ROWS * shape.hidden() * dtype.size();
    let (mut rows, mut records) = (vec![0; bytes], vec![0; ROWS * shape.bytes()]);
    for (i, element) in rows.chunks_exact_mut(2).enumerate() {
        element.copy_from_slice(&(i as u16 ^ 0x3f80).to_ne_bytes());
    }
    let mut group = criterion.benchmark_group("records/128 x 2048 bf16");
    group.throughput(Throughput::Bytes(bytes as u64));
    for loops in Simd::available().map(RowKernels::new) {
        group.bench_function(BenchmarkId::new(loops.simd().name(), "quantize"), |bencher| {
            bencher.iter(|| loops.quantize(dtype, shape, &rows, &mut records));
        });
        group.bench_function(BenchmarkId::new(loops.simd().name(), "dequantize"), |bencher| {
            bencher.iter(|| loops.dequantize(dtype, shape, &records, &mut rows));
        });
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(300));
    targets = gather, sum, records
}
criterion_main!(benches);
