//! Modules from PTX, and launches of a kernel that is built for the CPU.

use std::ffi::{CStr, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use sidelane::device::{Context, Grid, Module, Parameters, PinnedMemory, Stream};
use sidelane::error::DeviceError;

use super::context;
use crate::apart::apart;

const PTX: &CStr = c".version 8.5
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 words, .param .u32 factor, .param .align 4 .b8 three[12]) { ret; }
";

/// Multiplies each word and adds the last of three.
const SOURCE: &str = "void scale_launch(unsigned grid[3], unsigned block[3], void **params) {
    unsigned *words = *(unsigned **)params[0], factor = *(unsigned *)params[1];
    unsigned *three = (unsigned *)params[2];
    for (unsigned i = 0; i < grid[0] * block[0]; i++) words[i] = words[i] * factor + three[2];
}";

/// A folder that goes when it is dropped.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Builds the kernel and gives its library, which goes with the folder: each test of this process
/// has one of its own.
fn kernels(of: &str) -> (Folder, String) {
    let folder = Folder(std::env::temp_dir().join(format!("sidelane-kernels-{}-{of}", std::process::id())));
    std::fs::create_dir_all(&folder.0).unwrap();
    let (source, library) = (folder.0.join("kernels.c"), folder.0.join("kernels.so"));
    std::fs::write(&source, SOURCE).unwrap();
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).status();
    assert!(built.unwrap().success());
    let library = library.to_str().unwrap().to_owned();
    (folder, library)
}

#[test]
fn a_kernel_gets_the_parameters_that_it_takes_and_no_others() {
    let (_folder, library) = kernels("parameters");
    apart(
        "driver::modules::a_kernel_gets_the_parameters_that_it_takes_and_no_others",
        &[("SIDELANE_FAKE_CUDA_KERNELS", &library)],
        || {
            let context = context(0);
            let stream = super::stream(&context);
            let scale = Module::load(&context, "pack", PTX).unwrap().function(c"scale").unwrap();
            let words = PinnedMemory::new(&context, 64 * 4).unwrap();
            let bytes: Vec<u8> = (0..64_u32).flat_map(u32::to_ne_bytes).collect();
            words.write(0, &bytes).unwrap();
            let span = words.range().span(0, 256).unwrap();
            let two = || Parameters::new(&context).span(span).unwrap().value(3_u32);
            // SAFETY: 64 words, a factor, and three words.
            unsafe { scale.launch(&stream, Grid::line(2, 32), &two().value([0_u32, 0, 5])) }.unwrap();
            stream.synchronize().unwrap();
            let mut seen = vec![0; 256];
            words.read(0, &mut seen).unwrap();
            assert_eq!(seen, (0..64_u32).flat_map(|i| (i * 3 + 5).to_ne_bytes()).collect::<Vec<_>>());

            let wrong = |index, given, taken| {
                Err(DeviceError::Parameters { function: "scale".into(), index, given, taken })
            };
            // SAFETY: refused, all of them.
            let launch = |grid, list: Parameters| unsafe { scale.launch(&stream, grid, &list) };
            let line = Grid::line(2, 32);
            assert_eq!(launch(line, two()), wrong(2, None, Some(12)));
            assert_eq!(launch(line, two().value([0_u32; 2])), wrong(2, Some(8), Some(12)));
            assert_eq!(launch(line, two().value([0_u32; 3]).value(1_u8)), wrong(3, Some(1), None));
            assert_eq!(launch(line, Parameters::new(&context).value(1_u32)), wrong(0, Some(4), Some(8)));
            for (grid, what, asked) in [
                (Grid::line(0, 32), "blocks along x", 0),
                (Grid::line(1, 0), "threads of a block", 0),
                (Grid { threads: [512, 3, 1], ..line }, "threads of a block", 1536),
            ] {
                let Err(DeviceError::Launch { what: said, asked: seen, .. }) =
                    launch(grid, two().value([0_u32; 3]))
                else {
                    panic!("{grid:?}")
                };
                assert_eq!((said, seen), (what, asked));
            }
            let other = super::stream(&super::context(1));
            // SAFETY: refused.
            let seen = unsafe { scale.launch(&other, line, &two().value([0_u32; 3])) };
            assert_eq!(seen, Err(DeviceError::OtherDevice { what: "stream", found: 1, expected: 0 }));
        },
    );
}

#[test]
fn multiprocessor_blocks_are_limited_by_threads_and_memory() {
    let (_folder, library) = kernels("blocks");
    apart(
        "driver::modules::multiprocessor_blocks_are_limited_by_threads_and_memory",
        &[("SIDELANE_FAKE_CUDA_KERNELS", &library)],
        || {
            let context = context(0);
            let scale = Module::load(&context, "pack", PTX).unwrap().function(c"scale").unwrap();
            // 2048 threads, 32 blocks, 228 KiB of which a block takes 1 for itself.
            for (threads, shared, blocks) in [(256, 0, 8), (1024, 0, 2), (32, 0, 32), (256, 48 << 10, 4)] {
                assert_eq!(scale.blocks_at_once(threads, shared), Ok(blocks), "{threads} {shared}");
            }
            assert_eq!(scale.blocks_at_once(256, 100 << 10), Ok(0), "nobody allowed so much");
            let refused = |call| {
                let name = "CUDA_ERROR_INVALID_VALUE".to_owned();
                DeviceError::Call { call, device: Some(0), code: 1, name }
            };
            assert_eq!(
                scale.blocks_at_once(0, 0),
                Err(refused("cuOccupancyMaxActiveBlocksPerMultiprocessor"))
            );
        },
    );
}

/// A primary context that is current for calls past the library, until it is dropped.
pub struct Current {
    device: i32,
    set: unsafe extern "C" fn(*mut c_void) -> u32,
    release: unsafe extern "C" fn(i32) -> u32,
}

impl Current {
    pub fn of(device: i32, driver: &libloading::Library) -> Self {
        type Retain = unsafe extern "C" fn(*mut *mut c_void, i32) -> u32;
        // SAFETY: functions of the driver with these types; the library is never unloaded.
        let (retain, set, release) = unsafe {
            (
                driver.get::<Retain>("cuDevicePrimaryCtxRetain").unwrap(),
                *driver.get("cuCtxSetCurrent").unwrap(),
                *driver.get("cuDevicePrimaryCtxRelease_v2").unwrap(),
            )
        };
        let current = Current { device, set, release };
        let mut found = std::ptr::null_mut();
        // SAFETY: fills the handle, which is released when the value is dropped.
        assert_eq!(unsafe { retain(&raw mut found, device) }, 0);
        // SAFETY: just retained.
        assert_eq!(unsafe { (current.set)(found) }, 0);
        current
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        // SAFETY: none may always be set; retained once.
        unsafe {
            (self.set)(std::ptr::null_mut());
            (self.release)(self.device);
        }
    }
}

#[test]
fn module_is_loaded_once_per_context_while_in_use() {
    let [first, again, elsewhere] = [0, 0, 1].map(context);
    let load = |context: &Arc<Context>, name| Module::load(context, name, PTX).unwrap();
    let module = load(&first, "once");
    assert!(Arc::ptr_eq(&module, &load(&first, "once")));
    assert!(Arc::ptr_eq(&module, &load(&again, "once")), "the same context, retained again");
    assert!(!Arc::ptr_eq(&module, &load(&elsewhere, "once")), "another context has its own");
    assert!(!Arc::ptr_eq(&module, &load(&first, "twice")), "another name is another module");
    let before = Arc::downgrade(&module);
    drop(module);
    assert!(before.upgrade().is_none());
    load(&first, "once");
}

#[test]
fn module_that_fails_to_compile_is_error_with_name_and_code() {
    let context = context(0);
    for (text, code) in [(c"this is no PTX", 218), (c".version 99.0\n.target sm_80\n", 222)] {
        let Err(error) = Module::load(&context, "broken", text) else { panic!("{text:?} loads") };
        let DeviceError::Module { device: 0, module, code: seen, name, .. } = &error else {
            panic!("{error:?}")
        };
        assert_eq!((module.as_str(), *seen), ("broken", code));
        assert!(name.starts_with("CUDA_ERROR_"), "{name}");
    }
}

#[test]
fn a_function_that_is_not_there_is_named() {
    let module = Module::load(&context(0), "pack", PTX).unwrap();
    let none = DeviceError::NoFunction { module: "pack".into(), function: "something".into() };
    assert_eq!(module.function(c"something").map(|_| ()), Err(none));
}

#[test]
fn a_threads_own_context_is_current_again_after_each_call() {
    // SAFETY: the driver's library.
    let driver = unsafe { libloading::Library::new(super::library()) }.unwrap();
    type Get = unsafe extern "C" fn(*mut *mut c_void) -> u32;
    // SAFETY: a function of the driver with this type.
    let get = unsafe { driver.get::<Get>("cuCtxGetCurrent") }.unwrap();
    let now = || {
        let mut current = std::ptr::null_mut();
        // SAFETY: fills the handle.
        assert_eq!(unsafe { get(&raw mut current) }, 0);
        current
    };
    let other = context(1);
    assert!(now().is_null());
    let current = Current::of(0, &driver);
    let before = now();
    assert!(!before.is_null());
    let stream: Stream = super::stream(&other);
    assert_eq!(stream.is_done(), Ok(true));
    drop(stream);
    assert_eq!(now(), before);
    drop(current);
}
