//! Modules and launches: kernels from PTX, which the driver's compiler makes for the device.
//!
//! ```text
//!   PTX --Module::load--> Module --function(name)--> Function --launch(stream, grid, parameters)
//!                                                       `-- parameters are compared with the kernel's own list
//! ```
//!
//! Instances share a module that their context has already: the driver compiles PTX for seconds
//! where its own cache has nothing.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use cudarc::driver::sys;
use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
use sys::CUjit_option_enum::{CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};

use super::call;
use super::driver::Context;
use super::libcuda::{Code, Library, Version, too_old};
use super::range::{ByteSpan, Claim, Claims, Value, Word};
use super::stream::Stream;
use crate::error::DeviceError;

/// Room for the compiler's message.
const LOG: usize = 16 << 10;

/// A loaded module.
#[derive(Debug)]
pub struct Module {
    pub(super) context: Arc<Context>,
    name: String,
    raw: sys::CUmodule,
}

// SAFETY: a module may be used from any thread, by several at once; the driver locks.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// Modules by the number of their context and their name.
type Loaded = HashMap<(u64, &'static str), Weak<Module>>;

static LOADED: LazyLock<Mutex<Loaded>> = LazyLock::new(Mutex::default);

impl Module {
    /// Compiles PTX for the device, unless a module of this name is there. A name stands for one
    /// text: to compare half a megabyte would take longer than all else that an instance loads.
    ///
    /// # Errors
    /// [`DeviceError::Module`] with the compiler's message, [`DeviceError::Call`].
    pub fn load(context: &Arc<Context>, name: &'static str, ptx: &CStr) -> Result<Arc<Self>, DeviceError> {
        let key = (context.id(), name);
        let loaded = || LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = loaded().get(&key).and_then(Weak::upgrade) {
            return Ok(module);
        }
        // Without the lock: the driver may wait for streams, and these for threads that load, too.
        let module = Self::compile(context, name, ptx)?;
        let mut loaded = loaded();
        loaded.retain(|_, module| module.strong_count() > 0);
        loaded.insert(key, Arc::downgrade(&module));
        Ok(module)
    }

    fn compile(context: &Arc<Context>, name: &str, ptx: &CStr) -> Result<Arc<Self>, DeviceError> {
        let library = context.library();
        let _entered = context.enter()?;
        let mut log = vec![0_u8; LOG];
        let mut options = [CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let count = options.len() as c_uint;
        // The size stands in the place of a pointer.
        let mut values = [log.as_mut_ptr().cast::<c_void>(), std::ptr::without_provenance_mut(LOG - 1)];
        let mut raw = std::ptr::null_mut();
        // SAFETY: a text with a zero byte at its end, and as many values as options; fills the
        // handle, and the log up to the size, so that its last byte stays zero. Unloaded when the
        // value is dropped.
        let code = unsafe {
            let (options, values) = (options.as_mut_ptr(), values.as_mut_ptr());
            (library.functions.cuModuleLoadDataEx)(&raw mut raw, ptx.as_ptr().cast(), count, options, values)
        };
        let name = name.to_owned();
        if code != Code::SUCCESS {
            let said = CStr::from_bytes_until_nul(&log).map(CStr::to_string_lossy).unwrap_or_default();
            let (device, log) = (context.device(), said.trim_end().to_owned());
            return Err(DeviceError::Module {
                device,
                module: name,
                code: code.0,
                name: library.name_of(code),
                log,
            });
        }
        Ok(Arc::new(Module { context: context.clone(), name, raw }))
    }

    /// One of its kernels.
    ///
    /// # Errors
    /// [`DeviceError::NoFunction`], [`DeviceError::TooOld`], [`DeviceError::Call`].
    pub fn function(self: &Arc<Self>, name: &CStr) -> Result<Function, DeviceError> {
        let (library, device) = (self.context.library(), Some(self.context.device()));
        let _entered = self.context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a name with a zero byte at its end; fills the handle, which lives as long as the
        // module.
        let code = unsafe { (library.functions.cuModuleGetFunction)(&raw mut raw, self.raw, name.as_ptr()) };
        let name = name.to_string_lossy().into_owned();
        if code == Code::NOT_FOUND {
            return Err(DeviceError::NoFunction { module: self.name.clone(), function: name });
        }
        library.check("cuModuleGetFunction", device, code)?;
        load_now(library, device, raw)?;
        let mut threads = 0;
        // SAFETY: fills the number.
        unsafe {
            let attribute = CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
            call!(library, device, cuFuncGetAttribute(&raw mut threads, attribute, raw))
        }?;
        let parameters = parameters(library, device, raw)?;
        let most_threads = u64::try_from(threads).unwrap_or(0);
        Ok(Function { module: self.clone(), name, raw, most_threads, parameters })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: loaded here; functions hold this value, and so do streams until a check finds
        // them done.
        let _ = unsafe { (self.context.library().functions.cuModuleUnload)(self.raw) };
    }
}

/// A kernel.
#[derive(Clone, Debug)]
pub struct Function {
    pub(super) module: Arc<Module>,
    pub(super) name: String,
    pub(super) raw: sys::CUfunction,
    /// Threads of a block, as its registers allow.
    pub(super) most_threads: u64,
    /// Bytes of each of its parameters.
    pub(super) parameters: Vec<u64>,
}

impl Function {
    /// How many blocks of so many threads and bytes of shared memory a multiprocessor runs at once.
    ///
    /// # Errors
    /// [`DeviceError::Call`].
    pub fn blocks_at_once(&self, threads: u32, shared: u32) -> Result<u32, DeviceError> {
        let context = &self.module.context;
        let _entered = context.enter()?;
        let mut blocks = 0;
        // SAFETY: fills the number; the function lives as long as its module.
        unsafe {
            let (threads, shared) = (threads as c_int, shared as usize);
            call!(
                context.library(),
                Some(context.device()),
                cuOccupancyMaxActiveBlocksPerMultiprocessor(&raw mut blocks, self.raw, threads, shared)
            )
        }?;
        Ok(u32::try_from(blocks).unwrap_or(0))
    }
}

// SAFETY: a function may be used from any thread, by several at once; the driver locks.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

type FunctionLoad = unsafe extern "C" fn(sys::CUfunction) -> Code;

const _: unsafe fn(sys::CUfunction) -> sys::CUresult = sys::cuFuncLoad;

/// Has a function loaded. Where the driver loads lazily, its first launch would do that, and wait
/// for all streams of the context.
fn load_now(library: &Library, device: Option<u32>, function: sys::CUfunction) -> Result<(), DeviceError> {
    let needed = Version::FUNCTIONS;
    let address = library.address(c"cuFuncLoad", needed);
    let address = address.ok_or_else(|| too_old("loading a kernel", library.version, needed))?;
    // SAFETY: the driver was asked for the function of this name and version, which has this type.
    let load = unsafe { std::mem::transmute::<*mut c_void, FunctionLoad>(address) };
    // SAFETY: the function lives as long as its module.
    library.check("cuFuncLoad", device, unsafe { load(function) })
}

type ParameterInfo = unsafe extern "C" fn(sys::CUfunction, usize, *mut usize, *mut usize) -> Code;

const _: unsafe fn(sys::CUfunction, usize, *mut usize, *mut usize) -> sys::CUresult = sys::cuFuncGetParamInfo;

/// Asks for one parameter after the other until there is none.
fn parameters(
    library: &Library,
    device: Option<u32>,
    function: sys::CUfunction,
) -> Result<Vec<u64>, DeviceError> {
    const NAME: &CStr = c"cuFuncGetParamInfo";
    let needed = Version::FUNCTIONS;
    let address = library.address(NAME, needed);
    let address =
        address.ok_or_else(|| too_old("checking the parameters of a kernel", library.version, needed))?;
    // SAFETY: the driver was asked for the function of this name and version, which has this type.
    let info = unsafe { std::mem::transmute::<*mut c_void, ParameterInfo>(address) };
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: fills the numbers.
        let code = unsafe { info(function, sizes.len(), &raw mut offset, &raw mut size) };
        if code == Code::INVALID_VALUE {
            return Ok(sizes);
        }
        library.check("cuFuncGetParamInfo", device, code)?;
        sizes.push(size as u64);
    }
}

// The log is bytes to us and characters to the driver.
const _: () = assert!(size_of::<c_char>() == 1);

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks along x, y and z.
    pub blocks: [u32; 3],
    /// Threads of a block along x, y and z.
    pub threads: [u32; 3],
    /// Bytes of dynamic shared memory of a block, in addition to the kernel's static ones.
    pub shared: u32,
}

impl Grid {
    /// So many blocks of so many threads, in a line.
    pub fn line(blocks: u32, threads: u32) -> Self {
        Grid { blocks: [blocks, 1, 1], threads: [threads, 1, 1], shared: 0 }
    }
}

/// The parameters of a launch, in their order.
#[derive(Debug)]
pub struct Parameters {
    device: u32,
    /// Values one behind the other, each at the start of eight bytes.
    words: Vec<u64>,
    /// First word and size of each value.
    values: Vec<(usize, usize)>,
    held: Claims,
}

impl Parameters {
    /// None yet.
    pub fn new(context: &Context) -> Self {
        Parameters {
            device: context.device(),
            words: Vec::new(),
            values: Vec::new(),
            held: Claims::default(),
        }
    }

    /// Adds a value: a number, or a struct that the kernel takes as it lies in memory.
    pub fn value<T: bytemuck::NoUninit>(mut self, value: T) -> Self {
        let bytes = bytemuck::bytes_of(&value);
        let first = self.words.len();
        self.words.resize(first + bytes.len().div_ceil(8), 0);
        bytemuck::cast_slice_mut::<u64, u8>(&mut self.words[first..])[..bytes.len()].copy_from_slice(bytes);
        self.values.push((first, bytes.len()));
        self
    }

    /// Adds the address of bytes that the kernel reads or writes.
    ///
    /// # Errors
    /// [`DeviceError::NoAccess`].
    pub fn span(mut self, span: ByteSpan<'_>) -> Result<Self, DeviceError> {
        span.range.check_reach(self.device)?;
        self.held.add(span.range.keep());
        Ok(self.value(span.address))
    }

    /// Adds the address of a word that the kernel reads or writes.
    ///
    /// # Errors
    /// [`DeviceError::NoAccess`].
    pub fn word<T: Value>(mut self, word: Word<'_, T>) -> Result<Self, DeviceError> {
        word.range.check_reach(self.device)?;
        self.held.add(word.range.keep());
        Ok(self.value(word.address))
    }
}

impl Function {
    /// Enqueues a launch. Number and sizes of the parameters and the shape are compared with what
    /// the kernel and the device take.
    ///
    /// # Safety
    /// The parameters have the meaning that the caller assumes, and with them the kernel stays
    /// inside the given spans.
    ///
    /// # Errors
    /// [`DeviceError::Parameters`], [`DeviceError::Launch`], [`DeviceError::OtherDevice`],
    /// [`DeviceError::Call`].
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        grid: Grid,
        parameters: &Parameters,
    ) -> Result<(), DeviceError> {
        let found = parameters.device;
        let expected = self.module.context.device();
        if found != expected {
            return Err(DeviceError::OtherDevice { what: "list of parameters", found, expected });
        }
        let sizes = parameters.values.iter().map(|&(_, size)| size as u64);
        self.check_parameters(sizes)?;
        let address = |&(first, _): &(usize, usize)| std::ptr::from_ref(&parameters.words[first..]).cast();
        let mut pointers: Vec<*const c_void> = parameters.values.iter().map(address).collect();
        let mut held = stream.held();
        held.add_all(&parameters.held);
        // SAFETY: a pointer to each value, whose sizes were compared; the contract covers their
        // meaning.
        unsafe { self.enqueue(stream, held, grid, &mut pointers) }
    }

    /// Enqueues a launch of a kernel that takes one struct, without allocating. `held` is the
    /// stream's list, with claims on all memory that the struct names.
    ///
    /// # Safety
    /// As [`launch`](Self::launch), for the memory that the struct names.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub(super) unsafe fn launch_struct<T: bytemuck::NoUninit>(
        &self,
        stream: &Stream,
        held: MutexGuard<'_, Claims>,
        grid: Grid,
        parameters: &T,
    ) -> Result<(), DeviceError> {
        self.check_parameters(std::iter::once(size_of::<T>() as u64))?;
        let mut pointers = [std::ptr::from_ref(parameters).cast::<c_void>()];
        // SAFETY: a pointer to the one value, whose size was compared; the contract covers its
        // meaning.
        unsafe { self.enqueue(stream, held, grid, &mut pointers) }
    }

    /// # Safety
    /// There is a pointer for each parameter of the kernel, to a value of its size, and `held` has
    /// claims on all memory that the values name.
    unsafe fn enqueue(
        &self,
        stream: &Stream,
        mut held: MutexGuard<'_, Claims>,
        grid: Grid,
        pointers: &mut [*const c_void],
    ) -> Result<(), DeviceError> {
        let (found, expected) = (stream.device(), self.module.context.device());
        if found != expected {
            return Err(DeviceError::OtherDevice { what: "stream", found, expected });
        }
        self.check_shape(grid)?;
        let module: Claim = self.module.clone();
        held.add(&module);
        let (library, context) = (stream.library(), &self.module.context);
        let _entered = context.enter()?;
        let Grid { blocks: [bx, by, bz], threads: [tx, ty, tz], shared } = grid;
        let (values, none) = (pointers.as_mut_ptr().cast(), std::ptr::null_mut());
        // SAFETY: the driver copies the values during the call; the contract covers their meaning.
        unsafe {
            call!(
                library,
                Some(expected),
                cuLaunchKernel(self.raw, bx, by, bz, tx, ty, tz, shared, stream.raw, values, none)
            )
        }
    }

    /// Compares sizes of parameters with those that the kernel takes.
    fn check_parameters(&self, mut given: impl Iterator<Item = u64>) -> Result<(), DeviceError> {
        let mut taken = self.parameters.iter().copied();
        for index in 0.. {
            match (given.next(), taken.next()) {
                (None, None) => break,
                (given, taken) if given == taken => {}
                (given, taken) => {
                    let function = self.name.clone();
                    return Err(DeviceError::Parameters { function, index, given, taken });
                }
            }
        }
        Ok(())
    }

    fn check_shape(&self, grid: Grid) -> Result<(), DeviceError> {
        let facts = self.module.context.facts();
        let threads = grid.threads.iter().map(|&count| u64::from(count)).product();
        let block = [("threads of a block", threads, self.most_threads.min(u64::from(facts.block_threads)))];
        let names = ["blocks along x", "blocks along y", "blocks along z"];
        let blocks = names.into_iter().zip(grid.blocks).zip(facts.grid);
        let blocks = blocks.map(|((what, asked), limit)| (what, u64::from(asked), u64::from(limit)));
        for (what, asked, limit) in block.into_iter().chain(blocks) {
            if asked == 0 || asked > limit {
                return Err(DeviceError::Launch { function: self.name.clone(), what, asked, limit });
            }
        }
        Ok(())
    }
}
