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
const SUMS_IN_F32: c_int = 68;

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

    /// `c [1] = a [1, k] * b [k, 1]`, from rows with this pitch.
    fn dot(&self, k: c_int, pitch: c_int, [a, b, c]: [u64; 3]) -> c_int {
        let (one, zero) = (1.0, 0.0);
        // SAFETY: the function has this type. It checks the matrices; the factors are there.
        unsafe {
            let gemm = self.library.get::<Gemm>("cublasGemmEx").unwrap();
            let (x, y) = ((F32, pitch), (F32, k));
            gemm(
                self.handle,
                0,
                0,
                1,
                1,
                k,
                &one,
                a,
                x.0,
                x.1,
                b,
                y.0,
                y.1,
                &zero,
                c,
                F32,
                1,
                SUMS_IN_F32,
                -1,
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
        let stand_in = start(0);
        let (blas, stream) = (Blas::new(), stream());
        assert_eq!(blas.set_stream(stream), 0);
        let workspace = device_words(1024);
        assert_eq!(blas.set_workspace(workspace, 4096), 0);
        // From the first to the last this is 1, from the last to the first 0.
        let (a, b) = (numbers(&[1e8, -1e8, 1.0], stream), numbers(&[1.0; 3], stream));
        let (out, before) = (device_words(1), stand_in.counters());
        assert_eq!(blas.dot(3, 1, [a, b, out]), 0);
        ok!(cuStreamSynchronize(stream));
        let exact = std::env::var("SIDELANE_FAKE_CUDA_SEED").unwrap().parse::<u64>().unwrap() % 2 == 1;
        assert_eq!(f32::from_bits(read_words(out, 1)[0]), if exact { 1.0 } else { 0.0 });
        let after = stand_in.counters();
        assert_eq!((after.kernels - before.kernels, after.allocations), (1, before.allocations));
        assert_ne!(read_words(workspace, 1), [POISON], "the workspace is the library's");
    });
}

#[test]
fn handle_without_workspace_allocates_in_its_product() {
    apart("products::handle_without_workspace_allocates_in_its_product", &plainly(), || {
        let stand_in = start(0);
        let (blas, stream) = (Blas::new(), stream());
        let workspace = device_words(1024);
        assert_eq!(blas.set_stream(stream), 0);
        assert_eq!(blas.set_workspace(workspace, 4096), 0);
        // It takes the workspace away.
        assert_eq!(blas.set_stream(stream), 0);
        let (a, b, out) = (numbers(&[1.0], stream), numbers(&[2.0], stream), device_words(1));
        let before = stand_in.counters().allocations;
        assert_eq!(blas.dot(1, 1, [a, b, out]), 0);
        assert_eq!(stand_in.counters().allocations - before, 1);
    });
}

#[test]
fn products_that_make_no_sense_are_refused() {
    apart("products::products_that_make_no_sense_are_refused", &plainly(), || {
        let stand_in = start(0);
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
        stand_in.break_cublas(0);
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

#[test]
fn grouped_products_are_there_from_12_5_on() {
    let of = |version: &str| vec![("SIDELANE_FAKE_CUDA_CUBLAS", version.to_owned())];
    apart("products::grouped_products_are_there_from_12_5_on", &[of("120400"), of("120500")], || {
        start(0);
        let blas = Blas::new();
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
