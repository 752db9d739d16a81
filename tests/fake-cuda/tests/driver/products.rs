//! Products of cuBLAS: in the order of their stream, and of no order that a caller could know.

use std::ffi::{c_int, c_void};
use std::ptr;

use libloading::Library;

use crate::common::*;
use crate::{cu, ok};

const INVALID_VALUE: c_int = 7;
const EXECUTION_FAILED: c_int = 13;
const NOT_SUPPORTED: c_int = 15;

const F32: c_int = 0;
const BF16: c_int = 14;
const SUMS_IN_F32: c_int = 68;
const FACTORS_IN_TF32: c_int = 77;

/// Modes: parts of sums may be rounded to the type of the result, or not.
const REDUCED_SUMS: c_int = 0;
const NO_REDUCED_SUMS: c_int = 16;

type Gemm = unsafe extern "C" fn(
    usize,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const f32,
    u64,
    c_int,
    c_int,
    u64,
    c_int,
    c_int,
    *const f32,
    u64,
    c_int,
    c_int,
    c_int,
    c_int,
) -> c_int;

type Grouped = unsafe extern "C" fn(
    usize,
    *const c_int,
    *const c_int,
    *const c_int,
    *const c_int,
    *const c_int,
    *const f32,
    u64,
    c_int,
    *const c_int,
    u64,
    c_int,
    *const c_int,
    *const f32,
    u64,
    c_int,
    *const c_int,
    c_int,
    *const c_int,
    c_int,
) -> c_int;

/// The library, and a handle that has neither stream nor workspace.
struct Blas {
    library: Library,
    handle: usize,
}

impl Blas {
    fn new() -> Blas {
        // SAFETY: the fake, whose constructors do nothing.
        let library = unsafe { Library::new("libcublas.so.12") }.unwrap();
        let mut handle = 0;
        // SAFETY: the function has this type, and fills the handle.
        let made = unsafe {
            library.get::<unsafe extern "C" fn(*mut usize) -> c_int>("cublasCreate_v2").unwrap()(&mut handle)
        };
        assert_eq!(made, 0);
        Blas { library, handle }
    }

    fn set_stream(&self, stream: sys::CUstream) -> c_int {
        type Set = unsafe extern "C" fn(usize, sys::CUstream) -> c_int;
        // SAFETY: the function has this type.
        unsafe { self.library.get::<Set>("cublasSetStream_v2").unwrap()(self.handle, stream) }
    }

    fn set_workspace(&self, at: u64, bytes: usize) -> c_int {
        type Set = unsafe extern "C" fn(usize, *mut c_void, usize) -> c_int;
        let at = ptr::with_exposed_provenance_mut(at as usize);
        // SAFETY: the function has this type, and checks the memory.
        unsafe { self.library.get::<Set>("cublasSetWorkspace_v2").unwrap()(self.handle, at, bytes) }
    }

    fn set_mode(&self, mode: c_int) -> c_int {
        type Set = unsafe extern "C" fn(usize, c_int) -> c_int;
        // SAFETY: the function has this type.
        unsafe { self.library.get::<Set>("cublasSetMathMode").unwrap()(self.handle, mode) }
    }

    /// `c [1] = a [1, k] * b [k, 1]`, from rows with this pitch.
    fn dot(&self, k: c_int, pitch: c_int, at: [u64; 3]) -> c_int {
        self.dot_of([F32; 3], SUMS_IN_F32, (k, pitch), at)
    }

    /// The same of these types.
    fn dot_of(
        &self,
        [x, y, z]: [c_int; 3],
        compute: c_int,
        (k, pitch): (c_int, c_int),
        [a, b, c]: [u64; 3],
    ) -> c_int {
        let (one, zero, of) = (1.0, 0.0, self.handle);
        // SAFETY: the function has this type. It checks the matrices; the factors are there.
        unsafe {
            let gemm = self.library.get::<Gemm>("cublasGemmEx").unwrap();
            gemm(of, 0, 0, 1, 1, k, &one, a, x, pitch, b, y, k, &zero, c, z, 1, compute, -1)
        }
    }

    /// The same as a grouped call of one group, whose columns have this pitch. `tables` have the
    /// addresses.
    fn grouped_dot(
        &self,
        [x, y, z]: [c_int; 3],
        compute: c_int,
        (k, pitch): (c_int, c_int),
        [a, b, c]: [u64; 3],
    ) -> c_int {
        let (one, zero, side, op, depth, pitch) = ([1.0], [0.0], [1], [0], [k], [pitch]);
        let (one, zero, of) = (one.as_ptr(), zero.as_ptr(), self.handle);
        let (side, op, depth, pitch) = (side.as_ptr(), op.as_ptr(), depth.as_ptr(), pitch.as_ptr());
        // SAFETY: the function has this type. It checks the matrices; the lists are there.
        unsafe {
            let grouped = self.library.get::<Grouped>("cublasGemmGroupedBatchedEx").unwrap();
            grouped(
                of, op, op, side, side, depth, one, a, x, pitch, b, y, pitch, zero, c, z, pitch, 1, side,
                compute,
            )
        }
    }
}

/// Words of the device with these numbers.
fn numbers(values: &[f32], stream: sys::CUstream) -> u64 {
    let at = device_words(values.len());
    let (from, words) = host_words(values.len());
    words.iter_mut().zip(values).for_each(|(word, value)| *word = value.to_bits());
    ok!(cuMemcpyAsync(at, from, values.len() * 4, stream));
    at
}

#[test]
fn products_run_in_stream_order_with_sums_by_the_seed() {
    apart("products::products_run_in_stream_order_with_sums_by_the_seed", &seeds(4), || {
        let fake_driver = start(0);
        let (blas, stream) = (Blas::new(), stream());
        assert_eq!(blas.set_stream(stream), 0);
        let workspace = device_words(1024);
        assert_eq!(blas.set_workspace(workspace, 4096), 0);
        // From the first to the last this is 1, from the last to the first 0.
        let (a, b) = (numbers(&[1e8, -1e8, 1.0], stream), numbers(&[1.0; 3], stream));
        let (out, before) = (device_words(1), fake_driver.counters());
        assert_eq!(blas.dot(3, 1, [a, b, out]), 0);
        ok!(cuStreamSynchronize(stream));
        let exact = std::env::var("SIDELANE_FAKE_CUDA_SEED").unwrap().parse::<u64>().unwrap() % 2 == 1;
        assert_eq!(f32::from_bits(read_words(out, 1)[0]), if exact { 1.0 } else { 0.0 });
        let after = fake_driver.counters();
        assert_eq!((after.kernels - before.kernels, after.allocations), (1, before.allocations));
        assert_ne!(read_words(workspace, 1), [POISON], "the workspace is the library's");
    });
}

#[test]
fn handle_without_workspace_allocates_in_its_product() {
    apart("products::handle_without_workspace_allocates_in_its_product", &plainly(), || {
        let fake_driver = start(0);
        let (blas, stream) = (Blas::new(), stream());
        let workspace = device_words(1024);
        assert_eq!(blas.set_stream(stream), 0);
        assert_eq!(blas.set_workspace(workspace, 4096), 0);
        // It takes the workspace away.
        assert_eq!(blas.set_stream(stream), 0);
        let (a, b, out) = (numbers(&[1.0], stream), numbers(&[2.0], stream), device_words(1));
        let before = fake_driver.counters().allocations;
        assert_eq!(blas.dot(1, 1, [a, b, out]), 0);
        assert_eq!(fake_driver.counters().allocations - before, 1);
    });
}

#[test]
fn products_that_make_no_sense_are_refused() {
    apart("products::products_that_make_no_sense_are_refused", &plainly(), || {
        let fake_driver = start(0);
        let (blas, stream) = (Blas::new(), stream());
        let (a, b, out) = (numbers(&[1.0; 4], stream), numbers(&[2.0; 4], stream), device_words(1));
        assert_eq!(blas.dot(2, 1, [a, b, out]), INVALID_VALUE, "no stream");
        assert_eq!(blas.set_stream(stream), 0);
        let workspace = device_words(2048);
        assert_eq!(blas.set_workspace(workspace + 4, 4096), INVALID_VALUE);
        assert_eq!(blas.set_workspace(4096, 4096), INVALID_VALUE, "no memory");
        assert_eq!(blas.set_workspace(workspace, 4096), 0);
        for (k, pitch, at) in
            [(0, 1, [a, b, out]), (2, 0, [a, b, out]), (2, 1, [a + 2, b, out]), (2, 1, [0, b, out])]
        {
            assert_eq!(blas.dot(k, pitch, at), INVALID_VALUE, "{k} {pitch} {at:?}");
        }
        fake_driver.break_cublas(0);
        assert_eq!(blas.dot(2, 1, [a, b, out]), EXECUTION_FAILED);
        ok!(cuStreamSynchronize(stream));
    });
}

#[test]
fn product_outside_of_memory_ends_the_context() {
    apart("products::product_outside_of_memory_ends_the_context", &plainly(), || {
        start(0);
        let (blas, stream) = (Blas::new(), stream());
        assert_eq!(blas.set_stream(stream), 0);
        let (a, b) = (numbers(&[1.0; 4], stream), numbers(&[2.0; 4], stream));
        assert_eq!(blas.dot(4, 1, [a, b, 1 << 20]), 0);
        assert_eq!(cu!(cuStreamSynchronize(stream)), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(blas.dot(4, 1, [a, b, a]), EXECUTION_FAILED);
    });
}

/// Numbers of two bytes, in words.
fn halves(values: &[f32], stream: sys::CUstream) -> u64 {
    let half = |value: f32| value.to_bits() >> 16;
    let words: Vec<f32> =
        values.chunks(2).map(|two| f32::from_bits(half(two[0]) | half(two[1]) << 16)).collect();
    numbers(&words, stream)
}

/// A table on the device with one address.
fn table(address: u64, stream: sys::CUstream) -> u64 {
    let halves = [address as u32, (address >> 32) as u32].map(f32::from_bits);
    numbers(&halves, stream)
}

#[test]
fn results_of_another_type_than_the_factors_are_single_products() {
    let test = "products::results_of_another_type_than_the_factors_are_single_products";
    apart(test, &plainly(), || {
        start(0);
        let (blas, stream) = (Blas::new(), stream());
        assert_eq!(blas.set_stream(stream), 0);
        let (a, b, out) = (halves(&[1.0; 128], stream), halves(&[2.0; 16], stream), device_words(16));
        let tables = [a, b, out].map(|at| table(at, stream));
        for (kinds, compute, single, grouped) in [
            ([F32; 3], SUMS_IN_F32, 0, 0),
            ([F32; 3], FACTORS_IN_TF32, 0, 0),
            ([BF16; 3], SUMS_IN_F32, 0, 0),
            ([BF16, BF16, F32], SUMS_IN_F32, 0, NOT_SUPPORTED),
            ([F32, F32, BF16], SUMS_IN_F32, NOT_SUPPORTED, NOT_SUPPORTED),
            ([BF16, F32, F32], SUMS_IN_F32, NOT_SUPPORTED, NOT_SUPPORTED),
            ([BF16; 3], FACTORS_IN_TF32, NOT_SUPPORTED, NOT_SUPPORTED),
        ] {
            assert_eq!(blas.dot_of(kinds, compute, (8, 1), [a, b, out]), single, "{kinds:?} {compute}");
            assert_eq!(blas.grouped_dot(kinds, compute, (8, 8), tables), grouped, "{kinds:?} {compute}");
        }
        ok!(cuStreamSynchronize(stream));
        assert_eq!(blas.dot_of([BF16, BF16, F32], SUMS_IN_F32, (8, 1), [a, b, out]), 0);
        ok!(cuStreamSynchronize(stream));
        assert_eq!(f32::from_bits(read_words(out, 1)[0]), 16.0);
    });
}

#[test]
fn grouped_products_of_tensor_cores_take_columns_in_vectors() {
    let test = "products::grouped_products_of_tensor_cores_take_columns_in_vectors";
    let cases = [(BF16, SUMS_IN_F32, 7, 0), (BF16, SUMS_IN_F32, 8, 2), (F32, FACTORS_IN_TF32, 4, 4)];
    let runs: Vec<_> = (0..=cases.len()).map(|nth| vec![("SIDELANE_TEST_CASE", nth.to_string())]).collect();
    apart(test, &runs, || {
        start(0);
        let (blas, stream) = (Blas::new(), stream());
        assert_eq!(blas.set_stream(stream), 0);
        let (a, b, out) = (halves(&[1.0; 64], stream), halves(&[2.0; 64], stream), device_words(16));
        let nth: usize = std::env::var("SIDELANE_TEST_CASE").unwrap().parse().unwrap();
        // The last is the one that is right.
        let (kind, compute, pitch, more) = *cases.get(nth).unwrap_or(&(BF16, SUMS_IN_F32, 8, 0));
        let tables = [a + more, b, out].map(|at| table(at, stream));
        assert_eq!(blas.grouped_dot([kind; 3], compute, (4, pitch), tables), 0);
        let ended = cu!(cuStreamSynchronize(stream));
        let expected =
            if nth < cases.len() { CUresult::CUDA_ERROR_ILLEGAL_ADDRESS } else { CUresult::CUDA_SUCCESS };
        assert_eq!(ended, expected, "{kind} {compute} {pitch} {more}");
    });
}

#[test]
fn parts_of_sums_are_rounded_unless_the_mode_forbids_it() {
    apart("products::parts_of_sums_are_rounded_unless_the_mode_forbids_it", &plainly(), || {
        start(0);
        let (blas, stream) = (Blas::new(), stream());
        assert_eq!(blas.set_stream(stream), 0);
        // 257 is no number of bf16, 258 is.
        let (a, b) = (halves(&[256.0, 1.0, 0.0, 1.0], stream), halves(&[1.0; 4], stream));
        let out = device_words(1);
        for (mode, expected) in [(NO_REDUCED_SUMS, 258.0), (REDUCED_SUMS, 256.0)] {
            assert_eq!(blas.set_mode(mode), 0);
            assert_eq!(blas.dot_of([BF16; 3], SUMS_IN_F32, (4, 1), [a, b, out]), 0);
            ok!(cuStreamSynchronize(stream));
            assert_eq!(f32::from_bits(read_words(out, 1)[0] << 16), expected, "{mode}");
        }
        assert_eq!(blas.set_mode(3), NOT_SUPPORTED);
    });
}

#[test]
fn grouped_products_are_there_from_12_5_on() {
    let of = |version: &str| vec![("SIDELANE_FAKE_CUDA_CUBLAS", version.to_owned())];
    apart("products::grouped_products_are_there_from_12_5_on", &[of("120400"), of("120500")], || {
        start(0);
        let blas = Blas::new();
        let (none, factor) = ([0; 1].as_ptr(), [0.0; 1].as_ptr());
        // SAFETY: the function has this type, and reads no entry of lists for no groups.
        let answer = unsafe {
            let grouped = blas.library.get::<Grouped>("cublasGemmGroupedBatchedEx").unwrap();
            grouped(
                blas.handle,
                none,
                none,
                none,
                none,
                none,
                factor,
                0,
                F32,
                none,
                0,
                F32,
                none,
                factor,
                0,
                F32,
                none,
                0,
                none,
                SUMS_IN_F32,
            )
        };
        let new = std::env::var("SIDELANE_FAKE_CUDA_CUBLAS").unwrap() == "120500";
        assert_eq!(answer, if new { 0 } else { NOT_SUPPORTED });
    });
}
