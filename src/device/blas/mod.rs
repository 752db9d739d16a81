//! cuBLAS, where it is installed: the products of real layers.
//!
//! ```text
//!   libcublas --loaded at run time--> BlasLibrary --handle of one stream, with its workspace--> Blas
//!                                                                                                 |
//!      rows of groups --gemms--> a product for each group --one grouped call, or a call for each--+
//! ```
//!
//! **No product waits for the device**, unless the host is 10,000 products ahead of it, or CUDA
//! loads kernels lazily and the product is the first to need one of cuBLAS's. The handle is made
//! once, and its workspace is memory of ours: cuBLAS would allocate its own in the first product,
//! and wait with the driver's lock.
//!
//! **Bits** are those of the library: the same for one release and one kind of device, but of no
//! known order. Atomics are off. Products in f32 are made in f32, unless the caller asks for TF32,
//! and sums of products in bf16 are rounded to bf16 once or not at all.
//!
//! **Layout.** cuBLAS counts along columns, where everything here lies along rows. A matrix along
//! rows is its transpose along columns. So each product is made as `out' = b' * a'`.

mod library;

use std::ffi::c_int;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use library::{BlasLibrary, Grouped, Handle};

use super::driver::Context;
use super::kernels::{LayerKernels, MatmulArgs, MatmulShape, Operands, VECTOR};
use super::pinned::PinnedMemory;
use super::range::{ByteSpan, DeviceRange};
use super::reservation::{Allocation, Reservation};
use super::stream::{Event, Stream};
use crate::dtype::Dtype;
use crate::error::DeviceError;

// Numbers of the header.
/// `CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION`: parts of a sum in bf16 are added in f32.
const SUMS_IN_F32: c_int = 16;
const NO_ATOMICS: c_int = 0;
const FACTORS_ON_HOST: c_int = 0;
const ANY_ALGORITHM: c_int = -1;

/// The first version, as `cublasGetVersion` says it, with products of several shapes in one call.
const GROUPED_SINCE: c_int = 120_500;

/// Bytes of workspace that NVIDIA recommends: from Hopper on, and before.
const WORKSPACE: [u64; 2] = [32 << 20, 4 << 20];

/// Name of these products in errors, as a kernel has one.
const KERNEL: &str = "product of cuBLAS";

/// cuBLAS on one stream.
#[derive(Debug)]
pub struct Blas {
    stream: Arc<Stream>,
    library: BlasLibrary,
    workspace: DeviceRange,
    grouped: Option<Grouped>,
    version: c_int,
    /// A handle is for one thread at a time.
    owned: Mutex<Owned>,
}

/// A handle, and addresses on their way to grouped calls.
#[derive(Debug)]
struct Owned {
    handle: RawHandle,
    pointers: Pointers,
}

/// A handle that is destroyed when it is dropped. That waits for the device.
#[derive(Debug)]
struct RawHandle {
    raw: Handle,
    context: Arc<Context>,
    destroy: unsafe extern "C" fn(Handle) -> library::Status,
}

// SAFETY: a handle may be used from any thread, by one at a time.
unsafe impl Send for RawHandle {}

impl Drop for RawHandle {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: made by this library, and used no more.
        let _ = unsafe { (self.destroy)(self.raw) };
    }
}

/// Element types that products take, by the header's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
enum Element {
    F32 = 0,
    Bf16 = 14,
}

impl Element {
    fn size(self) -> u64 {
        match self {
            Element::F32 => 4,
            Element::Bf16 => 2,
        }
    }
}

/// How factors enter a product whose sums are in f32, by the header's numbers of compute types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
enum Factors {
    /// As they are.
    Whole = 68,
    /// f32 factors lose all but 10 bits behind the leading one, and tensor cores multiply them.
    Tf32 = 77,
}

/// Types of a product's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Types {
    element: Element,
    out: Element,
    factors: Factors,
}

const F32: Types = Types { element: Element::F32, out: Element::F32, factors: Factors::Whole };
const TF32: Types = Types { factors: Factors::Tf32, ..F32 };
const BF16: Types = Types { element: Element::Bf16, out: Element::Bf16, factors: Factors::Whole };

impl Types {
    /// Whether one call takes several shapes: cuBLAS lists no grouped product whose result is of
    /// another type than its factors.
    fn can_group(self) -> bool {
        self.element == self.out
    }

    /// Whether tensor cores multiply. Their grouped products may need columns at multiples of 16
    /// bytes; single ones choose an algorithm by their addresses.
    fn need_vectors(self) -> bool {
        self.factors == Factors::Tf32 || self.element == Element::Bf16
    }
}

/// A product of groups with factors of bf16, added up in f32.
#[derive(Clone, Copy, Debug)]
pub struct Bf16Product<'a> {
    /// The matrices, in elements.
    pub matmul: MatmulArgs<'a>,
    /// Which columns of `b` a [`MatmulShape::Depth`] multiplies; without them all.
    pub b_columns: Option<Columns>,
    /// Type of the result: bf16, or f32 for what is added up further.
    pub out: Dtype,
}

/// Some columns of a matrix, as many as a shape says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Columns {
    /// The first of them.
    pub first: u32,
    /// Elements of a row of the matrix.
    pub row: u32,
}

/// One product along columns: `c [m, n] = op(a) [m, k] * op(b) [k, n]`, perhaps added to `c`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gemm {
    /// Whether a and b lie as their transposes.
    pub transposed: [bool; 2],
    /// m, n and k.
    pub sides: [c_int; 3],
    /// Addresses of a, b and c.
    pub at: [u64; 3],
    /// Elements from a column to the next, of a, b and c.
    pub pitches: [c_int; 3],
}

impl Gemm {
    /// Whether all columns begin at multiples of 16 bytes, of matrices of one type.
    fn is_in_vectors(&self, element: Element) -> bool {
        let at = self.at.iter().all(|at| at.is_multiple_of(VECTOR));
        at && self.pitches.iter().all(|&pitch| (pitch as u64 * element.size()).is_multiple_of(VECTOR))
    }
}

impl Blas {
    /// cuBLAS for products on this stream: the library that `SIDELANE_CUBLAS_LIBRARY` names, else
    /// the one that the loader finds, else the first that loads of the wheels in these folders.
    /// Waits for the device.
    ///
    /// # Errors
    /// [`DeviceError::NoCublas`], [`DeviceError::MissingSymbol`], [`DeviceError::OutOfMemory`],
    /// [`DeviceError::Call`] with cuBLAS's status.
    pub fn load(stream: &Arc<Stream>, wheels: &[PathBuf]) -> Result<Self, DeviceError> {
        let (stream, context) = (Arc::clone(stream), stream.context());
        let (library, device) = (BlasLibrary::load(context.driver(), wheels)?, context.device());
        let functions = library.functions;
        let check = |call, status| library.check(call, device, status);
        let bytes = WORKSPACE[usize::from(context.facts().capability.0 < 9)];
        let allocation = Allocation::new(context, bytes)?;
        let workspace = Reservation::new(context, 1, allocation.bytes())?.map(0, &allocation, &[device])?;
        let pointers = Pointers::new(context)?;
        let entered = context.enter()?;
        let (mut raw, mut version) = (std::ptr::null_mut(), 0);
        // SAFETY: fills the handle, in the current context; destroyed when the value is dropped.
        check("cublasCreate", unsafe { (functions.cublasCreate_v2)(&raw mut raw) })?;
        let handle = RawHandle { raw, context: Arc::clone(context), destroy: functions.cublasDestroy_v2 };
        // SAFETY: handle and stream live, and the workspace lives longer. It is set behind the
        // stream, which would take it away again.
        unsafe {
            check("cublasGetVersion", (functions.cublasGetVersion_v2)(raw, &raw mut version))?;
            check("cublasSetStream", (functions.cublasSetStream_v2)(raw, stream.handle()))?;
            let (at, bytes) = (workspace.address(), workspace.len() as usize);
            check("cublasSetWorkspace", (functions.cublasSetWorkspace_v2)(raw, at, bytes))?;
            check("cublasSetMathMode", (functions.cublasSetMathMode)(raw, SUMS_IN_F32))?;
            check("cublasSetAtomicsMode", (functions.cublasSetAtomicsMode)(raw, NO_ATOMICS))?;
            check("cublasSetPointerMode", (functions.cublasSetPointerMode_v2)(raw, FACTORS_ON_HOST))?;
        }
        let grouped = (version >= GROUPED_SINCE).then(|| library.grouped()).transpose()?;
        let owned = Mutex::new(Owned { handle, pointers });
        drop(entered);
        Ok(Blas { stream, library, workspace, grouped, version, owned })
    }

    /// The library that was loaded: a path, or the name that the loader was asked for.
    pub fn name(&self) -> &str {
        &self.library.name
    }

    /// Its version: 120500 is 12.5.0.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// The stream that products go on.
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// Enqueues a product of groups: one call for all of them, or one for each where cuBLAS is
    /// older than 12.5, and in a stream that is being captured. Empty sums are zeros, by a kernel
    /// of ours.
    ///
    /// # Errors
    /// [`DeviceError::TooSmall`], [`DeviceError::Misaligned`], [`DeviceError::NoAccess`],
    /// [`DeviceError::Shape`], [`DeviceError::OtherDevice`], [`DeviceError::Call`] with cuBLAS's
    /// status.
    pub fn matmul(&self, kernels: &LayerKernels, matmul: &MatmulArgs<'_>) -> Result<(), DeviceError> {
        self.products(kernels, matmul, (F32, None))
    }

    /// As [`matmul`](Self::matmul), by tensor cores in TF32: each factor keeps 10 bits behind its
    /// leading one. Numbers of bf16 and f16 have no more, so they lose nothing. Sums are in f32.
    /// Groups whose matrices do not lie at multiples of 16 bytes are a call each.
    ///
    /// # Errors
    /// As [`matmul`](Self::matmul).
    pub fn matmul_tf32(&self, kernels: &LayerKernels, matmul: &MatmulArgs<'_>) -> Result<(), DeviceError> {
        self.products(kernels, matmul, (TF32, None))
    }

    /// As [`matmul`](Self::matmul), of factors in bf16 by tensor cores: products are exact, sums
    /// are in f32, and a result of bf16 is rounded once. Groups are one call if the result is bf16
    /// and their matrices lie at multiples of 16 bytes, and otherwise a call each.
    ///
    /// # Errors
    /// As [`matmul`](Self::matmul); [`DeviceError::NoSum`] for a result of another type,
    /// [`DeviceError::Shape`] for a result of bf16 that is an empty sum, and for columns that a row
    /// does not have, or of another shape.
    pub fn matmul_bf16(&self, kernels: &LayerKernels, product: &Bf16Product<'_>) -> Result<(), DeviceError> {
        let Bf16Product { matmul, b_columns, out } = product;
        let out = match out {
            Dtype::Bf16 => Element::Bf16,
            Dtype::F32 => Element::F32,
            &out => return Err(DeviceError::NoSum { rows: Dtype::Bf16, out }),
        };
        let shape = |what, given: u32, expected| {
            Err(DeviceError::Shape { kernel: KERNEL, what, given: given.into(), expected })
        };
        match (matmul.shape, b_columns) {
            (MatmulShape::Rows { .. }, Some(of)) => {
                shape("columns of b", of.row, "all of them, unless along the depth")
            }
            (MatmulShape::Depth { columns, .. }, Some(of))
                if of.row.checked_sub(of.first) < Some(columns) =>
            {
                shape("columns of b", columns, "columns of a row")
            }
            _ => self.products(kernels, matmul, (Types { out, ..BF16 }, *b_columns)),
        }
    }

    fn products(
        &self,
        kernels: &LayerKernels,
        matmul: &MatmulArgs<'_>,
        (types, b_columns): (Types, Option<Columns>),
    ) -> Result<(), DeviceError> {
        let Gemms { all, empty } = Gemms::of(matmul, types, b_columns)?;
        if types.out != Element::F32 && !empty.is_empty() {
            let (what, expected) = ("terms of a sum", "at least one, for a result of bf16");
            return Err(DeviceError::Shape { kernel: KERNEL, what, given: 0, expected });
        }
        for (offset, [rows, columns]) in empty {
            let out = ByteSpan {
                address: matmul.out.address + offset,
                len: matmul.out.len.saturating_sub(offset),
                ..matmul.out
            };
            let shape = MatmulShape::Depth { rows, depth: 0, columns, apart: 0 };
            let (a, b) = (out, out);
            kernels.matmul(&self.stream, &MatmulArgs { a, b, out, shape, segments: None, add: false })?;
        }
        // For the whole call: a handle serves one thread at a time, and the table of addresses is
        // written anew for each.
        let mut owned = self.owned.lock().unwrap_or_else(PoisonError::into_inner);
        let in_vectors = || all.iter().all(|gemm| gemm.is_in_vectors(types.element));
        let fits = types.can_group() && (!types.need_vectors() || in_vectors());
        let grouped = self.grouped.filter(|_| fits && (2..=MOST).contains(&all.len()));
        let table = match grouped {
            // A graph would read the addresses again that its capture saw.
            Some(grouped) if !self.stream.is_capturing()? => {
                Some((grouped, owned.pointers.send(&self.stream, &all)?))
            }
            _ => None,
        };
        let [a, b, out] = needed(matmul, types, b_columns);
        let mut operands = Operands::of(KERNEL, &self.stream);
        operands.span("a", matmul.a, a, types.element.size())?;
        operands.span("b", matmul.b, b, types.element.size())?;
        operands.span("out", matmul.out, out, types.out.size())?;
        operands.span("workspace", self.workspace.span(0, self.workspace.len())?, Some(0), VECTOR)?;
        let _held = operands.held();
        match table {
            Some((grouped, table)) => self.grouped(&owned.handle, grouped, &all, table, (types, matmul.add)),
            None => all.iter().try_for_each(|gemm| self.call(&owned.handle, gemm, (types, matmul.add))),
        }
    }

    /// Enqueues one product of matrices in bf16.
    ///
    /// # Safety
    /// The stream holds the memory of the matrices.
    pub(super) unsafe fn gemm_bf16(&self, gemm: &Gemm) -> Result<(), DeviceError> {
        let owned = self.owned.lock().unwrap_or_else(PoisonError::into_inner);
        self.call(&owned.handle, gemm, (BF16, false))
    }

    /// One product, whose memory is held.
    fn call(&self, handle: &RawHandle, gemm: &Gemm, (types, add): (Types, bool)) -> Result<(), DeviceError> {
        let Gemm { transposed: [op_a, op_b], sides: [m, n, k], at: [a, b, c], pitches } = *gemm;
        let ([lda, ldb, ldc], kind) = (pitches, types.element as c_int);
        let (one, beta) = (1.0_f32, if add { 1.0_f32 } else { 0.0 });
        let _entered = handle.context.enter()?;
        // SAFETY: the handle lives. The matrices were checked and stay until the stream is done.
        // The factors are read during the call.
        let status = unsafe {
            (self.library.functions.cublasGemmEx)(
                handle.raw,
                op_a.into(),
                op_b.into(),
                m,
                n,
                k,
                &raw const one,
                a,
                kind,
                lda,
                b,
                kind,
                ldb,
                &raw const beta,
                c,
                types.out as c_int,
                ldc,
                types.factors as c_int,
                ANY_ALGORITHM,
            )
        };
        self.library.check("cublasGemmEx", self.stream.device(), status)
    }

    /// All products in one call. `table` has the addresses, all of a, all of b, all of c.
    fn grouped(
        &self,
        handle: &RawHandle,
        grouped: Grouped,
        all: &[Gemm],
        table: u64,
        (types, add): (Types, bool),
    ) -> Result<(), DeviceError> {
        let of = |value: fn(&Gemm) -> c_int| all.iter().map(value).collect::<Vec<c_int>>();
        let (op_a, op_b) = (of(|gemm| gemm.transposed[0].into()), of(|gemm| gemm.transposed[1].into()));
        let (m, n, k) = (of(|gemm| gemm.sides[0]), of(|gemm| gemm.sides[1]), of(|gemm| gemm.sides[2]));
        let (lda, ldb, ldc) =
            (of(|gemm| gemm.pitches[0]), of(|gemm| gemm.pitches[1]), of(|gemm| gemm.pitches[2]));
        let (ones, members) = (vec![1.0_f32; all.len()], vec![1; all.len()]);
        let betas = vec![if add { 1.0_f32 } else { 0.0 }; all.len()];
        let (list, kind) = (8 * all.len() as u64, types.element as c_int);
        let _entered = handle.context.enter()?;
        // SAFETY: as for one product. The lists have an entry for each group and are read during
        // the call; the addresses are read when the stream comes to it.
        let status = unsafe {
            grouped(
                handle.raw,
                op_a.as_ptr(),
                op_b.as_ptr(),
                m.as_ptr(),
                n.as_ptr(),
                k.as_ptr(),
                ones.as_ptr(),
                table,
                kind,
                lda.as_ptr(),
                table + list,
                kind,
                ldb.as_ptr(),
                betas.as_ptr(),
                table + 2 * list,
                types.out as c_int,
                ldc.as_ptr(),
                all.len() as c_int,
                members.as_ptr(),
                types.factors as c_int,
            )
        };
        self.library.check("cublasGemmGroupedBatchedEx", self.stream.device(), status)
    }
}

/// The products of those groups that have rows, and where sums without a term go.
#[derive(Debug, Default)]
struct Gemms {
    all: Vec<Gemm>,
    /// Bytes from the result's begin, and rows and columns, of matrices that are to be zeros.
    empty: Vec<(u64, [u32; 2])>,
}

/// Bytes that a, b and the result must have, if they can be counted.
fn needed(matmul: &MatmulArgs<'_>, types: Types, b_columns: Option<Columns>) -> [Option<u64>; 3] {
    let [a, b, out] = matmul.elements();
    let b = match (matmul.shape, b_columns) {
        (MatmulShape::Depth { depth, .. }, Some(of)) => Some(u64::from(depth) * u64::from(of.row)),
        _ => b,
    };
    let (element, out_size) = (types.element.size(), types.out.size());
    [(a, element), (b, element), (out, out_size)].map(|(count, size)| count?.checked_mul(size))
}

impl Gemms {
    fn of(matmul: &MatmulArgs<'_>, types: Types, b_columns: Option<Columns>) -> Result<Self, DeviceError> {
        let (element, out_size) = (types.element.size(), types.out.size());
        let (a, b, out) = (matmul.a.address, matmul.b.address, matmul.out.address);
        let mut gemms = Gemms::default();
        for group in matmul.groups() {
            let (first, nth) = (u64::from(group.first), group.nth);
            match matmul.shape {
                MatmulShape::Rows { depth, columns, transposed, apart, .. } => {
                    let offset = first * u64::from(columns) * out_size;
                    if depth == 0 {
                        gemms.zeros(matmul, offset, [group.rows, columns]);
                        continue;
                    }
                    gemms.push(Gemm {
                        transposed: [transposed, false],
                        sides: [side(columns)?, side(group.rows)?, side(depth)?],
                        at: [b + nth * apart * element, a + first * u64::from(depth) * element, out + offset],
                        pitches: [
                            side(if transposed { depth } else { columns })?,
                            side(depth)?,
                            side(columns)?,
                        ],
                    });
                }
                MatmulShape::Depth { rows, columns, apart, .. } => {
                    let offset = nth * apart * out_size;
                    if group.rows == 0 {
                        gemms.zeros(matmul, offset, [rows, columns]);
                        continue;
                    }
                    let Columns { first: b_first, row: b_row } =
                        b_columns.unwrap_or(Columns { first: 0, row: columns });
                    let of_a = first * u64::from(rows) * element;
                    let of_b = (first * u64::from(b_row) + u64::from(b_first)) * element;
                    gemms.push(Gemm {
                        transposed: [false, true],
                        sides: [side(columns)?, side(rows)?, side(group.rows)?],
                        at: [b + of_b, a + of_a, out + offset],
                        pitches: [side(b_row)?, side(rows)?, side(columns)?],
                    });
                }
            }
        }
        Ok(gemms)
    }

    /// A product, unless its result has no element.
    fn push(&mut self, gemm: Gemm) {
        if gemm.sides.iter().all(|&side| side > 0) {
            self.all.push(gemm);
        }
    }

    /// An empty sum, unless it is added to the old values.
    fn zeros(&mut self, matmul: &MatmulArgs<'_>, offset: u64, sides: [u32; 2]) {
        if !matmul.add && sides.iter().all(|&side| side > 0) {
            self.empty.push((offset, sides));
        }
    }
}

fn side(number: u32) -> Result<c_int, DeviceError> {
    let (what, given, expected) = ("a side of a matrix", number.into(), "at most 2147483647");
    c_int::try_from(number).map_err(|_| DeviceError::Shape { kernel: KERNEL, what, given, expected })
}

/// Bytes of one half of the pinned memory, and of the table.
const HALF: usize = 256 << 10;

/// Products of one call, at most.
const MOST: usize = HALF / 24;

/// Two halves of pinned memory, used in turn, and one table on the device: what writes the table
/// goes in the same stream as what reads it.
#[derive(Debug)]
struct Pointers {
    pinned: PinnedMemory,
    table: DeviceRange,
    used: usize,
    /// Behind the last copy out of each half.
    marks: [Event; 2],
}

impl Pointers {
    fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let allocation = Allocation::new(context, HALF as u64)?;
        let place = Reservation::new(context, 1, allocation.bytes())?;
        let table = place.map(0, &allocation, &[context.device()])?;
        let marks = [Event::new(context)?, Event::new(context)?];
        Ok(Pointers { pinned: PinnedMemory::new(context, 2 * HALF)?, table, used: 0, marks })
    }

    /// Has the stream write the addresses of at most [`MOST`] products to the table, and returns
    /// where they begin: all of a, all of b, all of c.
    fn send(&mut self, stream: &Stream, all: &[Gemm]) -> Result<u64, DeviceError> {
        let addresses: Vec<u64> =
            (0..3).flat_map(|matrix| all.iter().map(move |gemm| gemm.at[matrix])).collect();
        let bytes: &[u8] = bytemuck::cast_slice(&addresses);
        if self.used % HALF + bytes.len() > HALF {
            let half = self.used / HALF;
            self.marks[half].record(stream)?;
            // Its copies are long done, unless the host is that far ahead of the stream.
            self.marks[1 - half].synchronize()?;
            self.used = (1 - half) * HALF;
        }
        self.pinned.write(self.used, bytes)?;
        let len = bytes.len() as u64;
        stream.copy(self.table.span(0, len)?, self.pinned.range().span(self.used as u64, len)?)?;
        self.used += bytes.len();
        Ok(self.table.address())
    }
}
