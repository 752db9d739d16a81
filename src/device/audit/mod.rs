//! Audits and timings of a GPU: kernels that hold SMs, copy, and compute, concurrently with which
//! rows must move.
//!
//! ```text
//!   hold      | every multiprocessor, until the host ends it |      work that completes meanwhile needed none of them
//!   copy      copies by multiprocessors                             the baseline for the cost of others' copies
//!   product   a matrix product, ours or cuBLAS's                    the others
//!   plain     memory whose freeing waits for the device             the effect of a waiting stream on other threads
//!   cupti     the work of the device, listed by NVIDIA's library    only launched work, at best
//! ```
//!
//! A module of its own: only `sidelane gpu-check` loads it. It shows facts about one GPU, once; no
//! part of the library depends on it. Each launch names its source in `cuda/`.
//!
//! All resources of a block exist before it is launched. Calls that wait for the whole context
//! (freeing memory, loading modules) would wait for a hold, too, which waits for the host.

mod cupti;

use std::ffi::{CStr, c_int};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver::sys;

pub use cupti::{Activity, ActivityKind, Channel, Cupti};

use super::blas::{Blas, Gemm};
use super::call;
use super::driver::Context;
use super::module::{Function, Grid, Module, Parameters};
use super::pinned::PinnedMemory;
use super::range::{ByteSpan, DeviceRange, Word};
use super::reservation::{Allocation, Reservation};
use super::stream::Stream;
use crate::error::DeviceError;

/// Made by `cuda/build.py`.
const PTX: &str = concat!(include_str!("../../../cuda/audit.ptx"), "\0");

/// Threads of a block: `THREADS` in `cuda/shim.h`.
const THREADS: u32 = 256;

/// The kernels, loaded for one device.
#[derive(Clone, Debug)]
pub struct AuditKernels {
    context: Arc<Context>,
    hold: Function,
    touch: Function,
    copy: Function,
    product: Function,
}

impl AuditKernels {
    /// Has the driver compile them. It needs a driver for CUDA 12.5 or later, and a device of
    /// compute capability 8.0 or later.
    ///
    /// # Errors
    /// [`DeviceError::Module`], [`DeviceError::NoFunction`], [`DeviceError::TooOld`],
    /// [`DeviceError::Call`].
    pub fn load(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let text = CStr::from_bytes_with_nul(PTX.as_bytes()).unwrap_or_default();
        let module = Module::load(context, "sidelane-audit", text)?;
        Ok(AuditKernels {
            context: context.clone(),
            hold: module.function(c"hold")?,
            touch: module.function(c"touch")?,
            copy: module.function(c"copy")?,
            product: module.function(c"product")?,
        })
    }
}

/// A hold on every multiprocessor of a device. It ends when it is released, or dropped.
#[derive(Debug)]
pub struct SmHold {
    function: Function,
    /// Whether all may end, then a word for each block: whether it runs.
    words: PinnedMemory,
    /// Whether all may end, for the blocks that do not look at the host.
    ended: DeviceRange,
    blocks: u32,
}

impl AuditKernels {
    /// A hold to be [taken](SmHold::take): blocks that have every thread of every multiprocessor.
    /// All shared memory would not do: a kernel of the driver's own may need none, not even what a
    /// block of a program takes for itself.
    ///
    /// # Errors
    /// [`DeviceError::Shape`] if a multiprocessor runs more or fewer such blocks than its threads
    /// say; [`DeviceError::OutOfMemory`], [`DeviceError::Call`].
    pub fn hold(&self) -> Result<SmHold, DeviceError> {
        let facts = self.context.facts();
        let each = (facts.multiprocessor_threads / THREADS).max(1);
        let at_once = self.hold.blocks_at_once(THREADS, 0)?;
        if at_once != each {
            let what = "blocks that a multiprocessor runs at once";
            let expected = "as many as have all its threads";
            return Err(DeviceError::Shape { kernel: "hold", what, given: at_once.into(), expected });
        }
        let blocks = facts.multiprocessors * each;
        let words = PinnedMemory::new(&self.context, 8 * (blocks as usize + 1))?;
        let allocation = Allocation::new(&self.context, 8)?;
        let reservation = Reservation::new(&self.context, 1, allocation.bytes())?;
        let ended = reservation.map(0, &allocation, &[self.context.device()])?;
        Ok(SmHold { function: self.hold.clone(), words, ended, blocks })
    }

    /// Enqueues the smallest kernel there is: it writes 1 to the word.
    ///
    /// # Errors
    /// [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn touch(&self, stream: &Stream, word: Word<'_, u64>) -> Result<(), DeviceError> {
        let parameters = Parameters::new(&self.context).word(word)?;
        // SAFETY: the kernel takes the address of one word.
        unsafe { self.touch.launch(stream, Grid::line(1, 32), &parameters) }
    }
}

/// `struct Hold` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Words {
    arrived: u64,
    go: u64,
    ended: u64,
}

impl SmHold {
    /// Enqueues it. It runs when [`running`](Self::running) returns as many as
    /// [`blocks`](Self::blocks). A hold that was taken before must have ended: its words are reset.
    ///
    /// # Errors
    /// [`DeviceError::NoAccess`] for a stream of another device, [`DeviceError::Call`].
    pub fn take(&self, stream: &Stream) -> Result<(), DeviceError> {
        for place in 0..=self.blocks as usize {
            // The launch, below, orders these stores before the first look of the blocks.
            self.words.word(place * 8)?.store(0, Ordering::Release);
        }
        let memory = self.words.range();
        let (go, arrived) = (memory.address(), memory.address() + 8);
        let words = Words { arrived, go, ended: self.ended.address() };
        stream.write::<u64>(self.ended.word(0)?, 0)?;
        let held = stream.hold(&[memory, &self.ended])?;
        let grid = Grid::line(self.blocks, THREADS);
        // SAFETY: the struct is the one of the source: a word that is read, behind it one for each
        // block, and one of the device.
        unsafe { self.function.launch_struct(stream, held, grid, &words) }
    }

    /// Blocks that it consists of: as many for each multiprocessor as have all its threads.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Blocks that run, or have run, since it was taken.
    pub fn running(&self) -> u32 {
        // Acquire: a block says so before it does anything else.
        let runs =
            |&place: &usize| self.words.word(place * 8).is_ok_and(|word| word.load(Ordering::Acquire) != 0);
        (1..=self.blocks as usize).filter(runs).count() as u32
    }

    /// Lets it end.
    pub fn release(&self) {
        if let Ok(word) = self.words.word(0) {
            // Blocks spin on this word. What the host has written before is there when they end.
            word.store(1, Ordering::Release);
        }
    }
}

impl Drop for SmHold {
    fn drop(&mut self) {
        self.release();
    }
}

/// Bytes that the kernel moves at once.
const VECTOR: u64 = 16;

/// Blocks that a multiprocessor has at work.
const BLOCKS_AT_WORK: u32 = 8;

/// `struct Copy` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct CopyOperands {
    to: u64,
    from: u64,
    vectors: u64,
}

impl AuditKernels {
    /// Enqueues a copy by multiprocessors, of whole vectors of 16 bytes that do not overlap: by as
    /// many blocks as fill all of them, or by at most so many.
    ///
    /// # Errors
    /// [`DeviceError::Lengths`], [`DeviceError::Misaligned`], [`DeviceError::NoAccess`],
    /// [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn copy(
        &self,
        stream: &Stream,
        to: ByteSpan<'_>,
        from: ByteSpan<'_>,
        max_blocks: Option<u32>,
    ) -> Result<(), DeviceError> {
        if to.len != from.len {
            return Err(DeviceError::Lengths { to: to.len, from: from.len });
        }
        for (what, value) in [("bytes", to.len), ("target", to.address), ("source", from.address)] {
            if !value.is_multiple_of(VECTOR) {
                return Err(DeviceError::Misaligned { what, value, align: VECTOR });
            }
        }
        let vectors = to.len / VECTOR;
        if vectors == 0 {
            return Ok(());
        }
        let at_work = self.context.facts().multiprocessors.saturating_mul(BLOCKS_AT_WORK);
        let most = max_blocks.unwrap_or(at_work).clamp(1, at_work);
        let blocks = vectors.div_ceil(THREADS.into()).min(most.into()) as u32;
        let operands = CopyOperands { to: to.address, from: from.address, vectors };
        let held = stream.hold(&[to.range, from.range])?;
        // SAFETY: the struct is the one of the source, and the kernel moves as many vectors as both
        // spans have.
        unsafe { self.copy.launch_struct(stream, held, Grid::line(blocks, THREADS), &operands) }
    }
}

/// Sizes of products are multiples of this: `TILE` in the source.
pub const TILE: u32 = 128;

/// `out = a * transposed b`, all `[size, size]` in bf16.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// Rows and columns of each: a multiple of [`TILE`].
    pub size: u32,
    /// The left one.
    pub a: ByteSpan<'a>,
    /// The right one, by columns.
    pub b: ByteSpan<'a>,
    /// The result.
    pub out: ByteSpan<'a>,
}

impl Product<'_> {
    /// Bytes of each matrix of this size.
    pub fn bytes(size: u32) -> u64 {
        u64::from(size) * u64::from(size) * 2
    }

    /// Refuses sizes and memory that kernels cannot use; all addresses are multiples of 16 after
    /// that.
    fn check(&self) -> Result<[&DeviceRange; 3], DeviceError> {
        const KERNEL: &str = "product";
        let (size, needed) = (self.size, Self::bytes(self.size));
        if size == 0 || !size.is_multiple_of(TILE) || size > 1 << 16 {
            let (what, expected) = ("size", "a multiple of 128 up to 65536");
            return Err(DeviceError::Shape { kernel: KERNEL, what, given: size.into(), expected });
        }
        for (what, span) in [("a", self.a), ("b", self.b), ("out", self.out)] {
            if span.len < needed {
                return Err(DeviceError::TooSmall { kernel: KERNEL, what, given: span.len, needed });
            }
            if !span.address.is_multiple_of(16) {
                return Err(DeviceError::Misaligned { what, value: span.address, align: 16 });
            }
        }
        Ok([self.a.range, self.b.range, self.out.range])
    }
}

impl Blas {
    /// Enqueues a product by cuBLAS, with sums in f32.
    ///
    /// # Errors
    /// [`DeviceError::Shape`], [`DeviceError::TooSmall`], [`DeviceError::Misaligned`],
    /// [`DeviceError::NoAccess`], [`DeviceError::Call`] with cuBLAS's status.
    pub fn product(&self, product: &Product<'_>) -> Result<(), DeviceError> {
        let ranges = product.check()?;
        let _held = self.stream().hold(&ranges)?;
        let size = product.size as c_int;
        let gemm = Gemm {
            transposed: [true, false],
            sides: [size; 3],
            at: [product.b.address, product.a.address, product.out.address],
            pitches: [size; 3],
        };
        // SAFETY: the stream holds the matrices, of `size * size` elements, which were checked.
        unsafe { self.gemm_bf16(&gemm) }
    }
}

/// `struct Product` of the source.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct ProductOperands {
    a: u64,
    b: u64,
    out: u64,
    size: u32,
    unused: u32,
}

impl AuditKernels {
    /// Enqueues a product by our own kernel: tensor cores, `f32` sums in their order, one rounding.
    ///
    /// # Errors
    /// [`DeviceError::Shape`], [`DeviceError::TooSmall`], [`DeviceError::Misaligned`],
    /// [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub fn product(&self, stream: &Stream, product: &Product<'_>) -> Result<(), DeviceError> {
        let ranges = product.check()?;
        let Product { size, a, b, out } = *product;
        let operands = ProductOperands { a: a.address, b: b.address, out: out.address, size, unused: 0 };
        let held = stream.hold(&ranges)?;
        let grid = Grid { blocks: [size / TILE, size / TILE, 1], ..Grid::line(1, THREADS) };
        // SAFETY: the struct is the one of the source; the kernel stays inside of `size * size`
        // elements of each, which were checked.
        unsafe { self.product.launch_struct(stream, held, grid, &operands) }
    }
}

/// Memory by `cuMemAlloc`. Dropping it calls `cuMemFree`, which waits for all work of the device:
/// its purpose here.
#[derive(Debug)]
pub struct PlainMemory {
    context: Arc<Context>,
    address: sys::CUdeviceptr,
}

impl PlainMemory {
    /// Allocates so many bytes.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], [`DeviceError::Call`].
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<Self, DeviceError> {
        let _entered = context.enter()?;
        let mut address = 0;
        // SAFETY: fills the address; given back when the value is dropped.
        let code = unsafe { (context.library().functions.cuMemAlloc_v2)(&raw mut address, bytes as usize) };
        context.library().check_memory("cuMemAlloc", context.device(), bytes, code)?;
        Ok(PlainMemory { context: context.clone(), address })
    }

    /// Gives it back, and says how that went.
    ///
    /// # Errors
    /// [`DeviceError::Call`], also for the failure of something that was enqueued.
    pub fn free(mut self) -> Result<(), DeviceError> {
        let address = std::mem::take(&mut self.address);
        let _entered = self.context.enter()?;
        // SAFETY: allocated once, and forgotten by the value: no one else has the address.
        unsafe { call!(self.context.library(), Some(self.context.device()), cuMemFree_v2(address)) }
    }
}

impl Drop for PlainMemory {
    fn drop(&mut self) {
        if self.address != 0 {
            let _entered = self.context.enter();
            // SAFETY: allocated once; no one else has the address.
            let _ = unsafe { (self.context.library().functions.cuMemFree_v2)(self.address) };
        }
    }
}
