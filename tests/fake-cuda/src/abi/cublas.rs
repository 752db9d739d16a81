//! The functions of `libcublas.so` for products of matrices.
//!
//! A handle takes no product before it has a stream, because the null stream would be a surprise.
//! One without a workspace of the caller's allocates in its first product, and waits for the whole
//! context then. So does the first product of a process that loads kernels lazily.

use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::context::here;
use super::pointers::{In, Out};
use crate::capture;
use crate::code::{Code, Result};
use crate::counters::{COUNTERS, add};
use crate::driver::{Context, settings};
use crate::kernels::Launch;
use crate::memory::Engine;
use crate::product::{Kind, Order, Product};
use crate::stream::Stream;
use crate::table::Table;
use crate::work::Work;
use crate::{host_call, lock};

/// A status other than success, by the numbers of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Status(c_int);

impl Status {
    const NOT_INITIALIZED: Status = Status(1);
    const INVALID_VALUE: Status = Status(7);
    const EXECUTION_FAILED: Status = Status(13);
    const NOT_SUPPORTED: Status = Status(15);
}

/// What the driver refuses fails for cuBLAS, which keeps the reason to itself.
impl From<Code> for Status {
    fn from(code: Code) -> Status {
        match code {
            Code::INVALID_HANDLE | Code::NOT_INITIALIZED => Status::NOT_INITIALIZED,
            Code::INVALID_VALUE => Status::INVALID_VALUE,
            _ => Status::EXECUTION_FAILED,
        }
    }
}

type Answer<T = ()> = std::result::Result<T, Status>;

static HANDLES: Table<Handle> = Table::new();

/// Devices whose products fail.
static BROKEN: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

/// The first version with products of several shapes in one call.
const GROUPED_SINCE: c_int = 120_500;

/// `CUBLAS_COMPUTE_32F` and `CUBLAS_COMPUTE_32F_FAST_TF32`.
const SUMS_IN_F32: c_int = 68;
const FACTORS_IN_TF32: c_int = 77;

/// `CUBLAS_DEFAULT_MATH` and `CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION`.
const REDUCED_SUMS: c_int = 0;
const NO_REDUCED_SUMS: c_int = 16;

/// Alignment of a workspace, and bytes that a product writes there.
const ALIGNMENT: u64 = 256;
const SCRATCH: u64 = 4096;

struct Handle {
    context: usize,
    device: usize,
    stream: Mutex<Option<Arc<Stream>>>,
    workspace: Mutex<Option<(u64, u64)>>,
    /// Whether parts of sums may be rounded to the type of their result.
    reduced: AtomicBool,
    loaded: AtomicBool,
}

/// Products of cuBLAS on this device fail from now on.
pub fn break_device(device: usize) {
    BROKEN.lock().unwrap().insert(device);
}

fn answer(f: impl FnOnce() -> Answer) -> c_int {
    let called = || {
        host_call::outside()?;
        lock::pass();
        f()
    };
    called().map_or_else(|status| status.0, |()| 0)
}

fn handle(number: usize) -> Answer<Arc<Handle>> {
    HANDLES.get(number).map_err(|_| Status::NOT_INITIALIZED)
}

#[unsafe(no_mangle)]
extern "C" fn cublasCreate_v2(out: Out<usize>) -> c_int {
    answer(|| {
        let context = here().map_err(|_| Status::NOT_INITIALIZED)?;
        capture::unsafe_call()?;
        add(&COUNTERS.allocations, 1);
        lock::hold(|| context.synchronize())?;
        let handle = Handle {
            context: context.handle,
            device: context.device,
            stream: Mutex::default(),
            workspace: Mutex::default(),
            reduced: AtomicBool::new(true),
            loaded: AtomicBool::new(settings()?.eager),
        };
        Ok(out.put(HANDLES.insert(Arc::new(handle)))?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cublasDestroy_v2(number: usize) -> c_int {
    answer(|| {
        let handle = HANDLES.remove(number).map_err(|_| Status::NOT_INITIALIZED)?;
        capture::unsafe_call()?;
        Ok(lock::hold(|| Context::of(handle.context)?.synchronize())?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetVersion_v2(_handle: usize, version: Out<c_int>) -> c_int {
    answer(|| Ok(version.put(settings()?.cublas)?))
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetStatusName(status: c_uint) -> *const c_char {
    let name: &CStr = match status {
        0 => c"CUBLAS_STATUS_SUCCESS",
        1 => c"CUBLAS_STATUS_NOT_INITIALIZED",
        7 => c"CUBLAS_STATUS_INVALID_VALUE",
        13 => c"CUBLAS_STATUS_EXECUTION_FAILED",
        15 => c"CUBLAS_STATUS_NOT_SUPPORTED",
        _ => c"CUBLAS_STATUS_UNKNOWN",
    };
    name.as_ptr()
}

/// Takes the workspace away, too.
#[unsafe(no_mangle)]
extern "C" fn cublasSetStream_v2(number: usize, stream: usize) -> c_int {
    answer(|| {
        let handle = handle(number)?;
        let stream = Stream::own(stream, &*Context::of(handle.context)?)?;
        *handle.stream.lock().unwrap() = Some(stream);
        *handle.workspace.lock().unwrap() = None;
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cublasSetWorkspace_v2(number: usize, at: u64, bytes: usize) -> c_int {
    answer(|| {
        let handle = handle(number)?;
        let engine = Engine { context: handle.context, device: handle.device, pageable: false };
        let there = bytes > 0 && engine.word(at, bytes, true, || ()).is_ok();
        if !there || !at.is_multiple_of(ALIGNMENT) {
            return Err(Status::INVALID_VALUE);
        }
        *handle.workspace.lock().unwrap() = Some((at, bytes as u64));
        Ok(())
    })
}

/// A mode of which the fake has the first alone.
fn set(number: usize, mode: c_int) -> c_int {
    answer(|| {
        handle(number)?;
        if mode == 0 { Ok(()) } else { Err(Status::NOT_SUPPORTED) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cublasSetMathMode(number: usize, mode: c_int) -> c_int {
    answer(|| {
        let handle = handle(number)?;
        if ![REDUCED_SUMS, NO_REDUCED_SUMS].contains(&mode) {
            return Err(Status::NOT_SUPPORTED);
        }
        handle.reduced.store(mode == REDUCED_SUMS, Ordering::Release);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cublasSetAtomicsMode(number: usize, mode: c_int) -> c_int {
    set(number, mode)
}

#[unsafe(no_mangle)]
extern "C" fn cublasSetPointerMode_v2(number: usize, mode: c_int) -> c_int {
    set(number, mode)
}

/// A matrix of a product as callers describe it: type and pitch.
type Described = (c_int, c_int);

/// The calls that take a product: a grouped one lists no result of another type than its factors.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    One,
    Grouped,
}

/// The product without its addresses, if all of it makes sense. Nobody promises sums without a
/// term.
fn product(
    (handle, call): (&Handle, Call),
    ops: [c_int; 2],
    sides: [c_int; 3],
    matrices: [Described; 3],
    factors: [In<f32>; 2],
    compute: c_int,
) -> Answer<Product> {
    let kinds = matrices.map(|(kind, _)| Kind::of(kind));
    let [Some(a), Some(b), Some(c)] = kinds else { return Err(Status::NOT_SUPPORTED) };
    let tf32 = compute == FACTORS_IN_TF32;
    let known = compute == SUMS_IN_F32 || (tf32 && a == Kind::F32);
    let result = c == a || (c == Kind::F32 && call == Call::One);
    if !known || a != b || !result {
        return Err(Status::NOT_SUPPORTED);
    }
    let [m, n, k] = sides;
    let transposed = ops.map(|op| op == 1);
    let least = [if transposed[0] { k } else { m }, if transposed[1] { n } else { k }, m];
    let short = matrices.iter().zip(least).any(|(&(_, pitch), least)| pitch < least.max(1));
    if ops.iter().any(|op| !(0..=1).contains(op)) || m < 0 || n < 0 || k < 1 || short {
        return Err(Status::INVALID_VALUE);
    }
    let [alpha, beta] = factors.map(|factor| factor.get());
    Ok(Product {
        transposed,
        sides: sides.map(|side| side as usize),
        at: [0; 3],
        pitches: matrices.map(|(_, pitch)| pitch as usize),
        kinds: [a, b, c],
        alpha: alpha?,
        beta: beta?,
        tf32,
        reduced: handle.reduced.load(Ordering::Acquire),
        order: if settings()?.seed.is_multiple_of(2) { Order::Backward } else { Order::Exact },
    })
}

impl Handle {
    /// Enqueues a kernel. The workspace is lost to it.
    fn launch(
        &self,
        name: &'static CStr,
        run: impl Fn(&Engine) -> Result<()> + Send + Sync + 'static,
    ) -> Answer {
        let context = here()?;
        let stream = self.stream.lock().unwrap().clone().ok_or(Status::INVALID_VALUE)?;
        if context.handle != self.context || BROKEN.lock().unwrap().contains(&self.device) {
            return Err(Status::EXECUTION_FAILED);
        }
        if !self.loaded.swap(true, Ordering::AcqRel) {
            lock::hold(|| context.synchronize())?;
        }
        let workspace = *self.workspace.lock().unwrap();
        if workspace.is_none() {
            capture::unsafe_call()?;
            add(&COUNTERS.allocations, 1);
            lock::hold(|| context.synchronize())?;
        }
        let run = move |engine: &Engine| {
            if let Some((at, bytes)) = workspace {
                engine.write(at, &vec![0xcb; bytes.min(SCRATCH) as usize])?;
            }
            run(engine)
        };
        Ok(stream.submit(Work::Kernel(Launch::own(name, run)))?)
    }
}

#[unsafe(no_mangle)]
extern "C" fn cublasGemmEx(
    number: usize,
    op_a: c_int,
    op_b: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: In<f32>,
    a: u64,
    a_kind: c_int,
    a_pitch: c_int,
    b: u64,
    b_kind: c_int,
    b_pitch: c_int,
    beta: In<f32>,
    c: u64,
    c_kind: c_int,
    c_pitch: c_int,
    compute: c_int,
    _algorithm: c_int,
) -> c_int {
    answer(|| {
        let handle = handle(number)?;
        let matrices = [(a_kind, a_pitch), (b_kind, b_pitch), (c_kind, c_pitch)];
        let product =
            product((&handle, Call::One), [op_a, op_b], [m, n, k], matrices, [alpha, beta], compute)?;
        if product.is_empty() {
            return Ok(());
        }
        let product = product.placed([a, b, c]).ok_or(Status::INVALID_VALUE)?;
        handle.launch(c"fake_gemm", move |engine| product.run(engine))
    })
}

/// Lists of the host are read now, those of the device when the stream comes to it.
#[unsafe(no_mangle)]
extern "C" fn cublasGemmGroupedBatchedEx(
    number: usize,
    op_a: In<c_int>,
    op_b: In<c_int>,
    m: In<c_int>,
    n: In<c_int>,
    k: In<c_int>,
    alpha: In<f32>,
    a: u64,
    a_kind: c_int,
    a_pitch: In<c_int>,
    b: u64,
    b_kind: c_int,
    b_pitch: In<c_int>,
    beta: In<f32>,
    c: u64,
    c_kind: c_int,
    c_pitch: In<c_int>,
    groups: c_int,
    members: In<c_int>,
    compute: c_int,
) -> c_int {
    answer(|| {
        let handle = handle(number)?;
        if settings()?.cublas < GROUPED_SINCE {
            return Err(Status::NOT_SUPPORTED);
        }
        let groups = usize::try_from(groups).map_err(|_| Status::INVALID_VALUE)?;
        let lists = [&op_a, &op_b, &m, &n, &k, &a_pitch, &b_pitch, &c_pitch, &members];
        let lists = lists.map(|list| list.all(groups));
        let [op_a, op_b, m, n, k, a_pitch, b_pitch, c_pitch, members] = lists;
        let (op_a, op_b, m, n, k, members) = (op_a?, op_b?, m?, n?, k?, members?);
        let (a_pitch, b_pitch, c_pitch) = (a_pitch?, b_pitch?, c_pitch?);
        let (alphas, betas) = (alpha.all(groups)?, beta.all(groups)?);
        let mut products = Vec::new();
        for group in 0..groups {
            let matrices = [(a_kind, a_pitch[group]), (b_kind, b_pitch[group]), (c_kind, c_pitch[group])];
            let factors = [In::of(&alphas[group]), In::of(&betas[group])];
            let sides = [m[group], n[group], k[group]];
            let ops = [op_a[group], op_b[group]];
            let one = product((&handle, Call::Grouped), ops, sides, matrices, factors, compute)?;
            let count = usize::try_from(members[group]).map_err(|_| Status::INVALID_VALUE)?;
            products.extend(std::iter::repeat_n(one, count));
        }
        if products.is_empty() {
            return Ok(());
        }
        if [a, b, c].iter().any(|&table| table == 0 || !table.is_multiple_of(8)) {
            return Err(Status::INVALID_VALUE);
        }
        handle.launch(c"fake_grouped_gemm", move |engine| {
            let read = |table: u64| -> Result<Vec<u64>> {
                let bytes = engine.snapshot(table, products.len() * 8)?;
                Ok(bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect())
            };
            let (a, b, c) = (read(a)?, read(b)?, read(c)?);
            // Groups go in no order; the last first is one.
            for (nth, product) in products.iter().enumerate().rev().filter(|(_, one)| !one.is_empty()) {
                let placed = product.placed_in_group([a[nth], b[nth], c[nth]]);
                placed.ok_or(Code::ILLEGAL_ADDRESS)?.run(engine)?;
            }
            Ok(())
        })
    })
}
