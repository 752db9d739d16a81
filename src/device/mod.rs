//! CUDA: abilities of the driver and its devices, and the few calls that Sidelane makes.
//!
//! ```text
//!   Driver ── probe: data, which `sidelane doctor` puts in words
//!     └── Context (a device's primary one)
//!           ├── Stream, Event       own, or a caller's
//!           ├── CudaGraph           the work of a stream, enqueued once, to be run again
//!           ├── Reservation         one range of addresses: base + member * stride + offset
//!           │     └── Range         a member's memory: made here, or imported by its descriptor; it may grow
//!           ├── PinnedMemory        of the host, with an address that devices know
//!           │     └── Range
//!           └── Module ── Function  from PTX
//!                 ├── Kernels       ours: packing and sums, which copy engines cannot do
//!                 └── AuditKernels  for `sidelane gpu-check`: they hold multiprocessors, and use them
//!
//!   Range ── span(offset, len) ── copies             Stream::copy, CopyBatch
//!         └─ word(offset)      ── memory operations  Stream::write, Stream::wait, MemoryOperations
//!         └─ dma_buf()         ── a descriptor that a NIC can register
//! ```
//!
//! **Checked before posted.** Addresses are types: a [`ByteSpan`] and a [`Word`] lie in their
//! [`DeviceRange`], a word is aligned, and a stream takes only what its device may reach. A stream
//! keeps the memory that it uses alive until a check has found it drained: running work never
//! accesses freed memory.
//!
//! **Loading.** `libcuda.so.1` at run time, never at build time, and no toolkit ever: without a
//! driver all other parts work, and [`Driver::open`] names the missing part. Of `cudarc` only the
//! `sys` types are used, with feature `cuda-12050`; newer functions come by `cuGetProcAddress`. Its
//! own loader and its `result` and `safe` layers are not used. They panic where a library or a
//! symbol is missing, have no memory operations, batches, mapped memory and dma-bufs, and record
//! events around each access to a buffer, which symmetric memory must not have. A program may use
//! `cudarc`, too, with the same `cuda-*` feature (two of them do not compile).
//!
//! **No panics**: an invalid answer of the driver is a [`DeviceError`](crate::error::DeviceError).

#![allow(unsafe_code, reason = "the driver is C")]

mod audit;
mod blas;
mod driver;
mod kernels;
mod libcuda;
mod module;
mod pinned;
mod probe;
mod range;
mod reservation;
mod stream;
mod stream_operations;
#[doc(hidden)]
pub mod wheels;

pub use driver::{Context, Driver};
pub use range::DeviceRange;
pub use stream::{CudaGraph, Event, Priority, Stream};

// For the program and the tests of this repository: no promises are made about it.
#[doc(hidden)]
pub use audit::{Activity, ActivityKind, AuditKernels, Channel, Cupti, PlainMemory, Product, SmHold, TILE};
#[doc(hidden)]
pub use blas::{Bf16Product, Blas, Columns};
#[doc(hidden)]
pub use kernels::{
    AccumulateArgs, Addresses, Admit, Check, ChoiceArgs, ChoiceFault, CountArgs, DotScale, Expand,
    FetchWeights, GateArgs, GatherRun, GatherRuns, GroupSegments, Kernels, LayerKernels, MatmulArgs,
    MatmulShape, OwnRows, Pack, PermuteArgs, PlaceArgs, PlanArgs, RankSumArgs, RecordArgs, RefusalMarks,
    RunArgs, SortArgs, SumArgs, SumChoices, SwigluRows, Tally,
};
#[doc(hidden)]
pub use libcuda::Version;
#[doc(hidden)]
pub use module::{Function, Grid, Module, Parameters};
#[doc(hidden)]
pub use pinned::PinnedMemory;
#[doc(hidden)]
pub use probe::{BatchedCopies, DeviceProperties, ModuleLoading, Probe, WriteOrder};
#[doc(hidden)]
pub use range::{ByteSpan, Value, Word};
#[doc(hidden)]
pub use reservation::{Allocation, DmaBuf, GrowingRange, MappedBehind, Reservation};
#[doc(hidden)]
pub use stream_operations::{CopyBatch, MemOpBatch};

/// Calls a function of the table and turns its code into a result. The caller writes `unsafe` and
/// its reason.
macro_rules! call {
    ($library:expr, $device:expr, $name:ident($($arg:expr),* $(,)?)) => {
        $library.check(stringify!($name), $device, ($library.functions.$name)($($arg),*))
    };
}
use call;
