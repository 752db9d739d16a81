//! Modules and kernels: the PTX says which there are, a library built for the CPU runs them.
//!
//! For an entry `NAME` the library (`SIDELANE_FAKE_CUDA_KERNELS`) exports
//! `void NAME_launch(unsigned grid[3], unsigned block[3], void **params)`, where `params` is as in
//! `cuLaunchKernel`.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use libloading::Library;

use crate::activity;
use crate::code::{Code, Result};
use crate::counters::COUNTERS;
use crate::driver::{Context, settings};
use crate::memory::Engine;
use crate::table::{Table, fresh};
use crate::{lock, ptx};

pub static MODULES: Table<Module> = Table::new();
pub static FUNCTIONS: Table<Function> = Table::new();

/// Threads of a block, at most.
const THREADS: u32 = 1024;

/// Dynamic shared memory of a block: without asking, and at most.
const SHARED: (u32, u32) = (48 << 10, 227 << 10);

type Run = unsafe extern "C" fn(*const u32, *const u32, *mut *mut c_void);

/// A loaded module.
pub struct Module {
    pub functions: BTreeMap<String, usize>,
}

/// A kernel of a module.
pub struct Function {
    name: &'static CStr,
    pub module: usize,
    /// Bytes of each parameter.
    sizes: Vec<usize>,
    /// None: the library has no such kernel.
    run: Option<Run>,
    loaded: AtomicBool,
    /// Bytes of dynamic shared memory that a launch may ask for.
    pub shared: AtomicU32,
}

/// The work of a kernel of the fake's own.
type OwnKernel = dyn Fn(&Engine) -> Result<()> + Send + Sync;

/// One launch: everything it needs, as it was at the call.
#[derive(Clone)]
pub struct Launch {
    name: &'static CStr,
    body: Body,
}

#[derive(Clone)]
enum Body {
    /// A kernel of the library. Its accesses are not looked up.
    Built {
        run: Run,
        grid: [u32; 3],
        block: [u32; 3],
        /// In words of 16 bytes, as aligned as any parameter may be.
        parameters: Arc<Vec<Vec<u128>>>,
    },
    /// A kernel of a library that the fake has itself.
    Own(Arc<OwnKernel>),
}

/// Loads PTX. Where calls take the driver's lock, this one waits with it for all work of the
/// context.
pub fn load(context: &Context, text: &str) -> Result<usize> {
    let settings = settings()?;
    if settings.locks {
        lock::hold(|| context.synchronize())?;
    }
    let module = ptx::contents(text)?;
    if module.version > ptx::newest(settings.version) {
        return Err(Code::UNSUPPORTED_PTX_VERSION);
    }
    let library = library()?;
    let handle = fresh();
    let mut functions = BTreeMap::new();
    for (name, sizes) in &module.entries {
        let symbol = format!("{name}_launch\0");
        // SAFETY: the library promises this type for this name.
        let run =
            library.and_then(|library| unsafe { library.get::<Run>(symbol.as_bytes()) }.ok().map(|run| *run));
        let loaded = AtomicBool::new(settings.eager);
        let shared = AtomicU32::new(SHARED.0);
        let function = Function {
            name: activity::lasting(name),
            module: handle,
            sizes: sizes.clone(),
            run,
            loaded,
            shared,
        };
        functions.insert(name.clone(), FUNCTIONS.insert(Arc::new(function)));
    }
    MODULES.insert_at(handle, Arc::new(Module { functions }));
    Ok(handle)
}

/// Ends a module and its functions.
pub fn unload(handle: usize) -> Result<()> {
    let module = MODULES.remove(handle)?;
    module.functions.values().try_for_each(|&function| FUNCTIONS.remove(function).map(|_| ()))
}

/// The kernels' library, loaded once; none where the environment names none.
fn library() -> Result<Option<&'static Library>> {
    static LIBRARY: OnceLock<Result<Option<Library>>> = OnceLock::new();
    let path = settings()?.kernels.as_ref();
    let open = |path| {
        // SAFETY: a library of kernels, built for this; its constructors do nothing.
        unsafe { Library::new(path) }.map_err(|error| {
            eprintln!("fake libcuda: SIDELANE_FAKE_CUDA_KERNELS: {error}");
            Code::SHARED_OBJECT_INIT_FAILED
        })
    };
    LIBRARY.get_or_init(|| path.map(open).transpose()).as_ref().map(Option::as_ref).map_err(|code| *code)
}

impl Module {
    /// The kernel of a name: there must be code to run for it.
    pub fn function(&self, name: &str) -> Result<usize> {
        let handle = *self.functions.get(name).ok_or(Code::NOT_FOUND)?;
        let function = FUNCTIONS.get(handle)?;
        if function.run.is_some() { Ok(handle) } else { Err(Code::NOT_FOUND) }
    }
}

impl Function {
    /// Loads it if necessary: a late load waits for all work of the context, and hangs if that work
    /// waits for this kernel.
    pub fn make_ready(&self, context: &Context) -> Result<()> {
        if self.loaded.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        lock::hold(|| context.synchronize())
    }

    /// Where a parameter lies in the block that real kernels read them from: each at a multiple of
    /// its own size, of eight bytes at most.
    pub fn parameter(&self, index: usize) -> Option<Range<usize>> {
        let mut end = 0;
        let places = self.sizes.iter().map(|&size| {
            let start = usize::next_multiple_of(end, size.next_power_of_two().min(8));
            end = start + size;
            start..end
        });
        places.take(index + 1).nth(index)
    }

    /// Allows launches to ask for more shared memory.
    pub fn allow_shared(&self, bytes: u32) -> Result<()> {
        if bytes > SHARED.1 {
            return Err(Code::INVALID_VALUE);
        }
        self.shared.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// A launch with a copy of the parameters.
    ///
    /// # Safety
    ///
    /// `parameters` points to one pointer for each parameter of the kernel, to as many bytes as
    /// that has.
    pub unsafe fn launch(
        &self,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        parameters: *const *const c_void,
    ) -> Result<Launch> {
        let threads = block.iter().try_fold(1u32, |all, &side| all.checked_mul(side));
        let shape = grid.iter().all(|&side| side > 0) && threads.is_some_and(|t| (1..=THREADS).contains(&t));
        let fits = shape && shared <= self.shared.load(Ordering::Relaxed);
        if !fits || (parameters.is_null() && !self.sizes.is_empty()) {
            return Err(Code::INVALID_VALUE);
        }
        let kept = self.sizes.iter().enumerate().map(|(index, &size)| {
            // SAFETY: the caller vouches for the pointers and sizes.
            aligned(unsafe { std::slice::from_raw_parts((*parameters.add(index)).cast::<u8>(), size) })
        });
        let parameters = Arc::new(kept.collect());
        let body = Body::Built { run: self.run.ok_or(Code::NOT_FOUND)?, grid, block, parameters };
        Ok(Launch { name: self.name, body })
    }
}

impl Launch {
    /// A kernel of the fake's own, which looks up what it reads and writes.
    pub fn own(name: &'static CStr, run: impl Fn(&Engine) -> Result<()> + Send + Sync + 'static) -> Launch {
        Launch { name, body: Body::Own(Arc::new(run)) }
    }

    /// Runs the kernel to its end, on this thread.
    pub fn run(&self, engine: &Engine) -> Result<()> {
        let start = activity::now();
        match &self.body {
            Body::Built { run, grid, block, parameters } => {
                let blocks = grid.iter().map(|&side| u64::from(side)).product();
                COUNTERS.most_blocks.fetch_max(blocks, Ordering::Relaxed);
                let mut kept = Vec::clone(parameters);
                let mut pointers: Vec<*mut c_void> =
                    kept.iter_mut().map(|words| words.as_mut_ptr().cast()).collect();
                // SAFETY: the library promises this type; the parameters are as the entry declares
                // them.
                unsafe { run(grid.as_ptr(), block.as_ptr(), pointers.as_mut_ptr()) };
            }
            Body::Own(run) => run(engine)?,
        }
        activity::kernel(self.name, start);
        Ok(())
    }
}

fn aligned(bytes: &[u8]) -> Vec<u128> {
    let word = |chunk: &[u8]| {
        let mut word = [0; 16];
        word[..chunk.len()].copy_from_slice(chunk);
        u128::from_ne_bytes(word)
    };
    bytes.chunks(16).map(word).collect()
}
