//! Kernels: PTX says which, a library built here runs them.

use std::env;
use std::ffi::{CStr, CString, c_void};
use std::fs;
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::common::*;
use crate::{cu, ok};

/// As compilers print it, less the code.
fn ptx(version: &str) -> CString {
    let text = format!(
        "//\n.version {version}\n.target sm_80\n.address_size 64\n\n\
         .visible .entry scale(\n\t.param .u64 scale_param_0,\n\t.param .u32 scale_param_1,\n\
         \t.param .align 4 .b8 scale_param_2[12]\n)\n{{\n\tret;\n}}\n\
         .visible .entry unknown()\n{{\n\tret;\n}}\n"
    );
    CString::new(text).unwrap()
}

/// Multiplies, adds the last of three words, and writes down the shape of the launch.
const SOURCE: &str = "void scale_launch(unsigned grid[3], unsigned block[3], void **params) {\n\
    unsigned *words = *(unsigned **)params[0];\n\
    unsigned factor = *(unsigned *)params[1];\n\
    unsigned *three = (unsigned *)params[2];\n\
    for (unsigned i = 0; i < grid[0] * block[0]; i++) words[i] = words[i] * factor + three[2];\n\
}\n";

/// Builds the kernels and gives the settings for runs with them.
pub fn library(name: &str) -> Vec<(&'static str, String)> {
    let folder = env::temp_dir().join(format!("fake-kernels-{}-{name}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let (source, built) = (folder.join("kernels.c"), folder.join("kernels.so"));
    fs::write(&source, SOURCE).unwrap();
    let done = Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&built).arg(&source).status();
    assert!(done.unwrap().success());
    vec![("SIDELANE_FAKE_CUDA_KERNELS", built.to_str().unwrap().to_owned())]
}

fn with(mut settings: Settings<'static>, name: &'static str, value: &str) -> [Settings<'static>; 1] {
    settings.push((name, value.to_owned()));
    [settings]
}

pub fn module() -> sys::CUmodule {
    made(|out| ok!(cuModuleLoadData(out, ptx("8.5").as_ptr().cast())))
}

pub fn function(module: sys::CUmodule, name: &CStr) -> sys::CUfunction {
    made(|out| ok!(cuModuleGetFunction(out, module, name.as_ptr())))
}

/// Launches `scale` for 64 words in blocks of 32.
pub fn launch(scale: sys::CUfunction, words: u64, factor: u32, stream: sys::CUstream) {
    let (mut words, mut factor, mut three) = (words, factor, [0u32, 0, 5]);
    let mut parameters: [*mut c_void; 3] =
        [(&raw mut words).cast(), (&raw mut factor).cast(), (&raw mut three).cast()];
    ok!(cuLaunchKernel(scale, 2, 1, 1, 32, 1, 1, 0, stream, parameters.as_mut_ptr(), ptr::null_mut()));
    // The launch has copied them.
    (words, factor, three) = (0, 0, [0; 3]);
    assert_eq!((words, factor, three), (0, 0, [0; 3]));
}

#[test]
fn a_kernel_runs_in_stream_order_with_its_parameters() {
    let settings = library("run");
    apart("kernels::a_kernel_runs_in_stream_order_with_its_parameters", &[settings], || {
        let fake_driver = start(0);
        let module = module();
        let scale = function(module, c"scale");
        let words = device_words(64);
        let stream = stream();
        ok!(cuMemsetD32Async(words, 3, 64, stream));
        launch(scale, words, 7, stream);
        launch(scale, words, 2, stream);
        ok!(cuStreamSynchronize(stream));
        assert_eq!(read_words(words, 64), [(3 * 7 + 5) * 2 + 5; 64]);
        assert_eq!(fake_driver.counters().kernels, 2);
        assert_eq!(made(|out| ok!(cuModuleGetFunctionCount(out, module))), 2);
    });
}

#[test]
fn kernels_and_shapes_that_cannot_be_are_refused() {
    let settings = with(library("refused"), "SIDELANE_FAKE_CUDA_DRIVER", "12050");
    apart("kernels::kernels_and_shapes_that_cannot_be_are_refused", &settings, || {
        start(0);
        let module = module();
        let missing = |name: &CStr| cu!(cuModuleGetFunction(&mut ptr::null_mut(), module, name.as_ptr()));
        assert_eq!(missing(c"absent"), CUresult::CUDA_ERROR_NOT_FOUND, "not in the PTX");
        assert_eq!(missing(c"unknown"), CUresult::CUDA_ERROR_NOT_FOUND, "not in the library");
        let load = |text: &CStr| cu!(cuModuleLoadData(&mut ptr::null_mut(), text.as_ptr().cast()));
        assert_eq!(load(&ptx("8.6")), CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "newer than the driver");
        assert_eq!(load(c"nonsense"), CUresult::CUDA_ERROR_INVALID_PTX);
        let scale = function(module, c"scale");
        let shape = |grid, block, shared| {
            let mut none = [ptr::null_mut(); 3];
            let stream = stream();
            cu!(cuLaunchKernel(
                scale,
                grid,
                1,
                1,
                block,
                1,
                1,
                shared,
                stream,
                none.as_mut_ptr(),
                ptr::null_mut()
            ))
        };
        let refused = CUresult::CUDA_ERROR_INVALID_VALUE;
        assert_eq!(shape(0, 32, 0), refused, "no blocks");
        assert_eq!(shape(1, 1025, 0), refused, "too many threads");
        assert_eq!(shape(1, 32, 49 << 10), refused, "more shared memory than was asked for");
    });
}

/// Launches a kernel while a stream waits, and returns whether the launch returned before the wait
/// ended.
fn launch_beside_a_wait() -> bool {
    start(0);
    let scale = function(module(), c"scale");
    let words = device_words(64);
    let (word, value) = host_words(1);
    let (waits, launches) = (stream(), stream());
    ok!(cuStreamWaitValue32_v2(waits, word, 1, 0));
    let ended = AtomicBool::new(false);
    let returned_before = thread::scope(|scope| {
        let releaser = scope.spawn(|| {
            thread::sleep(Duration::from_millis(100));
            ended.store(true, Ordering::SeqCst);
            value[0] = 1;
        });
        launch(scale, words, 1, launches);
        let returned_before = !ended.load(Ordering::SeqCst);
        releaser.join().unwrap();
        returned_before
    });
    ok!(cuCtxSynchronize());
    returned_before
}

#[test]
fn a_kernel_that_is_loaded_late_waits_for_the_whole_context() {
    let settings = with(library("lazy"), "CUDA_MODULE_LOADING", "LAZY");
    apart("kernels::a_kernel_that_is_loaded_late_waits_for_the_whole_context", &settings, || {
        assert!(!launch_beside_a_wait());
    });
}

#[test]
fn a_kernel_that_is_loaded_early_does_not() {
    let settings = with(library("eager"), "CUDA_MODULE_LOADING", "EAGER");
    apart("kernels::a_kernel_that_is_loaded_early_does_not", &settings, || {
        assert!(launch_beside_a_wait());
    });
}
