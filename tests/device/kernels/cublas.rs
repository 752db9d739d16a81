//! Products of cuBLAS, whose sums have an order of their own: equal where sums are exact, and
//! otherwise within the bound of any order.

use std::time::Duration;

use fake_cuda::FakeDriver;
use half::bf16;
use sidelane::Dtype;
use sidelane::device::{
    Bf16Product, Blas, Columns, CudaGraph, GroupSegments, LayerKernels, MatmulArgs, MatmulShape, wheels,
};
use sidelane::error::DeviceError;
use sidelane_testkit::device::kernels::products::{Bound, Case, Way};

use super::buffer::Buffer;
use super::{Device, with_kernels_each};
use crate::apart::Settings;
use crate::rows_common::Random;

/// Both orders of sums that the fake has, with and without grouped calls.
const RUNS: [Settings<'static>; 4] = [
    &[("SIDELANE_FAKE_CUDA_SEED", "0")],
    &[("SIDELANE_FAKE_CUDA_SEED", "1")],
    &[("SIDELANE_FAKE_CUDA_SEED", "0"), ("SIDELANE_FAKE_CUDA_CUBLAS", "120400")],
    &[("SIDELANE_FAKE_CUDA_SEED", "1"), ("SIDELANE_FAKE_CUDA_CUBLAS", "120400")],
];

fn load(device: &Device) -> (Blas, LayerKernels) {
    let wheels = wheels::folders(true, Vec::new);
    (Blas::load(&device.stream, &wheels).unwrap(), LayerKernels::load(&device.context).unwrap())
}

/// The largest error of some random products, each of whose elements is within its bound.
fn within(device: &Device, ways: &[Way], bound: Bound, value: impl Fn(&mut Random) -> f32) -> f64 {
    let ((blas, kernels), mut random) = (load(device), Random(7));
    let mut off = 0.0_f64;
    for &way in ways.iter().cycle().take(60) {
        let case = Case::any(&mut random, &value);
        // Sums without a term are f32.
        let depth = matches!(case.shape, MatmulShape::Depth { .. });
        let way = if depth && way == Way::Bf16(Dtype::Bf16) { Way::Bf16(Dtype::F32) } else { way };
        off = off.max(case.check(&device.bench(), (&blas, &kernels), way, bound).unwrap().off);
    }
    off
}

const EXACT: Bound = Bound { roundings: 1, lost: 0.0 };

#[test]
fn products_of_cublas_are_within_the_bound_of_their_sums() {
    let test = "kernels::cublas::products_of_cublas_are_within_the_bound_of_their_sums";
    with_kernels_each(test, &RUNS, |device| {
        within(device, &[Way::F32], EXACT, Random::unit);
    });
}

#[test]
fn products_in_tf32_are_within_the_bound_of_their_factors() {
    let test = "kernels::cublas::products_in_tf32_are_within_the_bound_of_their_factors";
    with_kernels_each(test, &RUNS, |device| {
        let rounded = Bound { lost: f64::powi(2.0, -10), ..EXACT };
        let off = within(device, &[Way::Tf32], rounded, Random::unit);
        assert!(off > f64::powi(2.0, -12), "factors were rounded");
    });
}

#[test]
fn products_in_bf16_are_within_the_bound_of_their_sums() {
    let test = "kernels::cublas::products_in_bf16_are_within_the_bound_of_their_sums";
    with_kernels_each(test, &RUNS, |device| {
        let ways = [Dtype::Bf16, Dtype::F32].map(Way::Bf16);
        within(device, &ways, EXACT, |random| bf16::from_f32(random.unit()).to_f32());
    });
}

#[test]
fn products_of_whole_numbers_are_to_the_bit_those_of_our_kernel() {
    let test = "kernels::cublas::products_of_whole_numbers_are_to_the_bit_those_of_our_kernel";
    with_kernels_each(test, &RUNS, |device| {
        let (blas, kernels) = load(device);
        let mut random = Random(8);
        let bench = device.bench();
        for _ in 0..40 {
            let case = Case::any(&mut random, |random| random.below(17) as f32 - 8.0);
            let ours = case.put(&bench, Way::F32).unwrap();
            kernels.matmul(&device.stream, &case.args(&ours).unwrap()).unwrap();
            let expected = bench.read(&ours.out).unwrap();
            for way in [Way::F32, Way::Tf32] {
                let operands = case.put(&bench, way).unwrap();
                way.multiply(&blas, &kernels, case.args(&operands).unwrap()).unwrap();
                assert!(
                    bench.read(&operands.out).unwrap() == expected,
                    "{way:?} {:?} {:?}",
                    case.shape,
                    case.rows
                );
            }
        }
    });
}

/// Values of bf16, in a type.
fn stored(device: &Device, dtype: Dtype, values: &[f32]) -> Buffer {
    match dtype {
        Dtype::Bf16 => {
            let halves: Vec<u16> = values.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
            Buffer::words(&device.context, &halves)
        }
        _ => Buffer::words(&device.context, values),
    }
}

#[test]
fn gradients_take_some_columns_of_a_matrix() {
    let test = "kernels::cublas::gradients_take_some_columns_of_a_matrix";
    with_kernels_each(test, &RUNS, |device| {
        let (blas, kernels) = load(device);
        let (rows, wide, columns, first) = ([3_i64, 0, 2], 7, 4, 3);
        let a = stored(device, Dtype::Bf16, &[2.0; 5 * 8]);
        let values: Vec<f32> = (0..5 * wide).map(|at| at as f32).collect();
        let b = stored(device, Dtype::Bf16, &values);
        let out = Buffer::words(&device.context, &[1.0_f32; 3 * 8 * 4]);
        let table = Buffer::words(&device.context, &[rows, rows].concat());
        let segments = GroupSegments { table: table.span(), rows: &rows, padded: &rows };
        let shape = MatmulShape::Depth { rows: 8, depth: 5, columns, apart: 8 * 4 };
        let (a, to) = (a.span(), out.span());
        let matmul = MatmulArgs { a, b: b.span(), out: to, shape, segments: Some(segments), add: false };
        let some = |first| Some(Columns { first, row: wide });
        let product = Bf16Product { matmul, b_columns: some(first), out: Dtype::F32 };
        blas.matmul_bf16(&kernels, &product).unwrap();
        device.stream.synchronize().unwrap();
        let sum = |rows: std::ops::Range<u32>, column: u32| -> f32 {
            rows.map(|row| 2.0 * (row * wide + first + column) as f32).sum()
        };
        let expected = |at: u32| match at / 32 {
            0 => sum(0..3, at % 4),
            1 => 0.0,
            _ => sum(3..5, at % 4),
        };
        assert_eq!(out.read::<f32>(), (0..96).map(expected).collect::<Vec<f32>>());
        let refused = |product: Bf16Product<'_>| blas.matmul_bf16(&kernels, &product).unwrap_err();
        for error in [
            refused(Bf16Product { b_columns: some(4), ..product }),
            refused(Bf16Product { b_columns: Some(Columns { first: 9, row: wide }), ..product }),
        ] {
            assert!(matches!(error, DeviceError::Shape { what: "columns of b", given: 4, .. }), "{error}");
        }
        let short = MatmulArgs { b: b.part(0, 69), ..matmul };
        let error = refused(Bf16Product { matmul: short, ..product });
        assert!(matches!(error, DeviceError::TooSmall { what: "b", given: 69, needed: 70, .. }), "{error}");
        let error = refused(Bf16Product { out: Dtype::F16, ..product });
        assert!(matches!(error, DeviceError::NoSum { out: Dtype::F16, .. }), "{error}");
        let shape = MatmulShape::Rows { rows: 5, depth: 0, columns, transposed: false, apart: 0 };
        let matmul = MatmulArgs { shape, segments: None, ..matmul };
        let error = refused(Bf16Product { matmul, b_columns: None, out: Dtype::Bf16 });
        assert!(matches!(error, DeviceError::Shape { what: "terms of a sum", given: 0, .. }), "{error}");
        let shape = MatmulShape::Rows { rows: 5, depth: 8, columns, transposed: false, apart: 0 };
        let matmul = MatmulArgs { shape, ..matmul };
        let error = refused(Bf16Product { matmul, b_columns: some(0), out: Dtype::F32 });
        assert!(matches!(error, DeviceError::Shape { what: "columns of b", given: 7, .. }), "{error}");
    });
}

/// Groups of ones: `rows` of each, times a matrix of its own.
struct Ones {
    a: Buffer,
    b: Buffer,
    out: Buffer,
    table: Buffer,
    rows: Vec<i64>,
}

impl Ones {
    fn new(device: &Device, rows: &[i64]) -> Ones {
        let words = |count| Buffer::words(&device.context, &vec![1.0_f32; count]);
        let all = 2 * rows.iter().sum::<i64>() as usize;
        let table = Buffer::words(&device.context, &[rows, rows].concat());
        Ones { a: words(all), b: words(4 * rows.len()), out: words(all), table, rows: rows.to_vec() }
    }

    fn args(&self) -> MatmulArgs<'_> {
        let rows = self.rows.iter().sum::<i64>() as u32;
        let shape = MatmulShape::Rows { rows, depth: 2, columns: 2, transposed: false, apart: 4 };
        let segments = GroupSegments { table: self.table.span(), rows: &self.rows, padded: &self.rows };
        let (a, b, out) = (self.a.span(), self.b.span(), self.out.span());
        MatmulArgs { a, b, out, shape, segments: Some(segments), add: true }
    }
}

#[test]
fn groups_are_one_call_where_the_library_has_it() {
    let test = "kernels::cublas::groups_are_one_call_where_the_library_has_it";
    let of = |version| [("SIDELANE_FAKE_CUDA_CUBLAS", version)];
    with_kernels_each(test, &[&of("120500"), &of("120499")], |device| {
        let (blas, kernels) = load(device);
        let (fake_driver, ones) = (FakeDriver::loaded().unwrap(), Ones::new(device, &[1, 0, 2, 0, 3]));
        let before = fake_driver.counters().kernels;
        blas.matmul(&kernels, &ones.args()).unwrap();
        device.stream.synchronize().unwrap();
        let expected = if blas.version() >= 120_500 { 1 } else { 3 };
        assert_eq!(fake_driver.counters().kernels - before, expected, "empty groups have no call");
    });
}

#[test]
fn addresses_of_groups_stay_until_the_stream_has_read_them() {
    let test = "kernels::cublas::addresses_of_groups_stay_until_the_stream_has_read_them";
    with_kernels_each(test, &[&[]], |device| {
        let (blas, kernels) = load(device);
        // Tables of 24 KB, of which ten wait at a time. Three do not divide that: another product's
        // addresses would come to lie where the stream has yet to read.
        let cases = [1, 2, 3].map(|rows| Ones::new(device, &vec![rows; 1000]));
        let gate = Buffer::words(&device.context, &[0_u64]);
        device.stream.wait(gate.word::<u64>(), 1).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(300));
                gate.write(0, &1_u64.to_ne_bytes());
            });
            for _ in 0..20 {
                cases.iter().for_each(|ones| blas.matmul(&kernels, &ones.args()).unwrap());
            }
        });
        device.stream.synchronize().unwrap();
        for ones in &cases {
            assert!(ones.out.read::<f32>().iter().all(|&sum| sum == 41.0));
        }
    });
}

#[test]
fn captured_products_are_made_at_each_launch() {
    let test = "kernels::cublas::captured_products_are_made_at_each_launch";
    with_kernels_each(test, &[&[]], |device| {
        let (blas, kernels) = load(device);
        let ones = Ones::new(device, &[3, 0, 2]);
        let graph = CudaGraph::capture(&device.stream, || blas.matmul(&kernels, &ones.args())).unwrap();
        (0..3).for_each(|_| graph.launch(&device.stream).unwrap());
        device.stream.synchronize().unwrap();
        assert_eq!(ones.out.read::<f32>(), [7.0; 10]);
    });
}

#[test]
fn products_wait_for_nothing_and_allocate_nothing() {
    let test = "kernels::cublas::products_wait_for_nothing_and_allocate_nothing";
    let locks = [("SIDELANE_FAKE_CUDA_LOCKS", "1"), ("CUDA_MODULE_LOADING", "EAGER")];
    with_kernels_each(test, &[&locks], |device| {
        let (blas, kernels) = load(device);
        let (fake_driver, ones) = (FakeDriver::loaded().unwrap(), Ones::new(device, &[3, 0, 2]));
        // The stream stands before a wait that only a later call ends.
        let gate = Buffer::words(&device.context, &[0_u64]);
        device.stream.wait(gate.word::<u64>(), 1).unwrap();
        let before = fake_driver.counters();
        (0..3).for_each(|_| blas.matmul(&kernels, &ones.args()).unwrap());
        let after = fake_driver.counters();
        assert_eq!((after.host_waits, after.allocations), (before.host_waits, before.allocations));
        assert!(!device.stream.is_done().unwrap());
        gate.write(0, &1_u64.to_ne_bytes());
        device.stream.synchronize().unwrap();
        assert_eq!(ones.out.read::<f32>(), [7.0; 10]);
    });
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let test = "kernels::cublas::operands_that_do_not_fit_are_refused";
    with_kernels_each(test, &[&[]], |device| {
        let (blas, kernels) = load(device);
        let ones = Ones::new(device, &[3, 0, 2]);
        let args = ones.args();
        for (what, args) in [
            ("a", MatmulArgs { a: ones.a.part(0, 36), ..args }),
            ("b", MatmulArgs { b: ones.b.part(0, 44), ..args }),
            ("out", MatmulArgs { out: ones.out.part(0, 36), ..args }),
        ] {
            let refused = blas.matmul(&kernels, &args).unwrap_err();
            let expected = matches!(&refused, DeviceError::TooSmall { what: seen, .. } if *seen == what);
            assert!(expected, "{refused}");
        }
        let crooked = MatmulArgs { a: ones.a.part(2, 38), ..args };
        let crooked = MatmulArgs {
            shape: MatmulShape::Rows { rows: 4, depth: 2, columns: 2, transposed: false, apart: 4 },
            ..crooked
        };
        let refused = blas.matmul(&kernels, &crooked).unwrap_err();
        assert!(matches!(refused, DeviceError::Misaligned { what: "a", align: 4, .. }), "{refused}");
        assert_eq!(ones.out.read::<f32>(), [1.0; 10]);
    });
}

#[test]
fn failed_product_names_its_status() {
    let test = "kernels::cublas::failed_product_names_its_status";
    with_kernels_each(test, &[&[]], |device| {
        let (blas, kernels) = load(device);
        FakeDriver::loaded().unwrap().break_cublas(0);
        let one = Ones::new(device, &[3]);
        let several = Ones::new(device, &[3, 2]);
        for (ones, call) in [(one, "cublasGemmEx"), (several, "cublasGemmGroupedBatchedEx")] {
            let failed = blas.matmul(&kernels, &ones.args()).unwrap_err();
            let name = "CUBLAS_STATUS_EXECUTION_FAILED".to_owned();
            assert_eq!(failed, DeviceError::Call { call, device: Some(0), code: 13, name });
        }
        device.stream.synchronize().unwrap();
    });
}

#[test]
fn missing_library_is_named() {
    let test = "kernels::cublas::missing_library_is_named";
    let named = [("SIDELANE_CUBLAS_LIBRARY", "/nowhere/libcublas.so.12")];
    let other = [("SIDELANE_CUBLAS_LIBRARY", "libc.so.6")];
    let none = [("LD_LIBRARY_PATH", "/nowhere")];
    with_kernels_each(test, &[&named, &other, &none], |device| {
        let refused = Blas::load(&device.stream, &wheels::folders(true, Vec::new)).unwrap_err();
        let DeviceError::NoCublas { tried } = &refused else { panic!("{refused}") };
        let names: &[&str] = match std::env::var("SIDELANE_CUBLAS_LIBRARY").unwrap_or_default().as_str() {
            "" => &["libcublas.so.13", "libcublas.so.12", "libcublas.so.11"],
            "libc.so.6" => &["libc.so.6: it is not for this driver"],
            _ => &["/nowhere/libcublas.so.12"],
        };
        assert_eq!(tried.len(), names.len());
        assert!(tried.iter().zip(names).all(|(tried, name)| tried.contains(name)), "{refused}");
        assert!(refused.to_string().contains("SIDELANE_CUBLAS_LIBRARY"));
    });
}
