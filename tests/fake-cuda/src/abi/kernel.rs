//! Modules, kernels, launches.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::context::here;
use super::pointers::{In, Out};
use super::{call, local};
use crate::capture;
use crate::code::{Code, Result};
use crate::driver::settings;
use crate::kernels::{self, FUNCTIONS, MODULES};
use crate::stream::Stream;
use crate::work::Work;

fn text(at: In<c_char>) -> Result<String> {
    if at.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: not null, so the caller vouches for a C string.
    let text = unsafe { CStr::from_ptr(at.raw()) };
    Ok(text.to_str().map_err(|_| Code::INVALID_PTX)?.to_owned())
}

/// The image must be PTX, as a C string.
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoadData(module: Out<usize>, image: In<c_char>) -> c_int {
    call(|| {
        let context = here()?;
        capture::unsafe_call()?;
        module.put(kernels::load(&context, &text(image)?)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoadDataEx(
    module: Out<usize>,
    image: In<c_char>,
    _count: c_uint,
    _options: *const c_uint,
    _values: *const *const c_void,
) -> c_int {
    cuModuleLoadData(module, image)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(module: usize) -> c_int {
    call(|| kernels::unload(module))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleGetFunction(function: Out<usize>, module: usize, name: In<c_char>) -> c_int {
    call(|| function.put(MODULES.get(module)?.function(&text(name)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleGetFunctionCount(count: Out<c_uint>, module: usize) -> c_int {
    call(|| count.put(MODULES.get(module)?.functions.len() as c_uint))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleGetLoadingMode(mode: Out<c_uint>) -> c_int {
    local(|| mode.put(if settings()?.eager { 1 } else { 2 }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncLoad(function: usize) -> c_int {
    call(|| FUNCTIONS.get(function)?.make_ready(&*here()?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncGetModule(module: Out<usize>, function: usize) -> c_int {
    call(|| module.put(FUNCTIONS.get(function)?.module))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncGetParamInfo(
    function: usize,
    index: usize,
    offset: Out<usize>,
    size: Out<usize>,
) -> c_int {
    call(|| {
        let place = FUNCTIONS.get(function)?.parameter(index).ok_or(Code::INVALID_VALUE)?;
        offset.put(place.start)?;
        size.offer(place.len());
        Ok(())
    })
}

const SHARED: c_uint = 8;

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncGetAttribute(value: Out<c_int>, attribute: c_uint, function: usize) -> c_int {
    call(|| {
        let function = FUNCTIONS.get(function)?;
        value.put(match attribute {
            0 => 1024,
            1..=3 => 0,
            4 => 32,
            5 | 6 => 90,
            SHARED => function.shared.load(std::sync::atomic::Ordering::Relaxed) as c_int,
            _ => return Err(Code::NOT_SUPPORTED),
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(function: usize, attribute: c_uint, value: c_int) -> c_int {
    call(|| {
        let function = FUNCTIONS.get(function)?;
        let value = c_uint::try_from(value).map_err(|_| Code::INVALID_VALUE)?;
        if attribute == SHARED { function.allow_shared(value) } else { Err(Code::NOT_SUPPORTED) }
    })
}

/// An SM has 2048 threads, 32 blocks, and 228 KiB of shared memory, 1 KiB of which each block takes
/// for itself.
#[unsafe(no_mangle)]
pub extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: Out<c_int>,
    function: usize,
    threads: c_int,
    shared: usize,
) -> c_int {
    call(|| {
        let allowed = FUNCTIONS.get(function)?.shared.load(std::sync::atomic::Ordering::Relaxed);
        let threads = usize::try_from(threads).ok().filter(|threads| (1..=1024).contains(threads));
        let by_threads = 2048 / threads.ok_or(Code::INVALID_VALUE)?.next_multiple_of(32);
        let by_shared = (228 << 10) / (shared + (1 << 10));
        let fits = if shared > allowed as usize { 0 } else { by_threads.min(by_shared).min(32) };
        blocks.put(fits as c_int)
    })
}

struct Shape {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: usize,
}

fn launch(function: usize, shape: Shape, parameters: In<*const c_void>, extra: In<c_void>) -> Result<()> {
    let context = here()?;
    let stream = Stream::own(shape.stream, &context)?;
    let function = FUNCTIONS.get(function)?;
    if !extra.is_null() {
        return Err(Code::NOT_SUPPORTED);
    }
    // SAFETY: the caller of the driver vouches for the parameters.
    let launch = unsafe { function.launch(shape.grid, shape.block, shape.shared, parameters.raw()) }?;
    function.make_ready(&context)?;
    stream.submit(Work::Kernel(launch))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernel(
    function: usize,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared: c_uint,
    stream: usize,
    parameters: In<*const c_void>,
    extra: In<c_void>,
) -> c_int {
    let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
    call(|| launch(function, Shape { grid, block, shared, stream }, parameters, extra))
}

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: usize,
    attributes: *const c_void,
    count: c_uint,
}

/// Without launch attributes: no clusters, no cooperation.
#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernelEx(
    config: In<Config>,
    function: usize,
    parameters: In<*const c_void>,
    extra: In<c_void>,
) -> c_int {
    call(|| {
        let Config { grid, block, shared, stream, count, .. } = config.get()?;
        if count != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        launch(function, Shape { grid, block, shared, stream }, parameters, extra)
    })
}
