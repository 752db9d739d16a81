//! Our kernels: the arithmetic and the gathering around transfers, which copy engines cannot do.
//!
//! ```text
//!   x, choices --pack--> a slot for each rank ==copy engines==> received slots --check, experts--> partial rows
//!                            places                                                                     ||
//!                               `------------------------> sum <-- slots <==copy engines=================
//! ```
//!
//! They are compute, not communication: optional, listed where used, and with the same output bits
//! as the loops of the module `rows`. The sources in `cuda/` are also built for the CPU, where
//! tests check that; docs/kernels.md has the rounding points.
//!
//! **Status words.** A kernel writes an error that it finds into a word that the caller names
//! ([`KernelFault`]); the first fault stays. A sum whose word is set writes zeros: a result of
//! invalid rows never looks valid.
//!
//! **Memory.** [`Operands`] compares the memory of a launch with its shapes, and claims it for its
//! stream. [`Addresses`] is a table of addresses in memory that kernels read.

mod expand;
mod layer;
mod routing;
mod rows;
mod sum;

use std::ffi::CStr;
use std::sync::{Arc, MutexGuard};

use expand::ExpandFunctions;
pub use expand::{Admit, Expand, Tally};
pub use layer::{
    AccumulateArgs, GatherRun, GatherRuns, GroupSegments, LayerKernels, MatmulArgs, MatmulShape, SwigluRows,
};
pub use routing::{Check, ChoiceArgs, ChoiceFault, CountArgs, GateArgs, PlaceArgs, PlanArgs, SortArgs};
use rows::RecordFunctions;
pub use rows::{Pack, PermuteArgs, RecordArgs, RunArgs};
pub use sum::{DotScale, FetchWeights, OwnRows, RankSumArgs, RefusalMarks, SumArgs, SumChoices};
use sum::{GradientFunctions, RankSumFunctions, SumChoicesFunctions, SumFunctions};

use super::driver::Context;
use super::module::{Function, Grid, Module};
use super::range::{ByteSpan, Claims, DeviceRange, Value, Word};
use super::stream::Stream;
use super::stream_operations::MemOpBatch;
use crate::error::DeviceError;
#[cfg(doc)]
use crate::error::KernelFault;

/// Made by `cuda/build.py`.
const PTX: &str = concat!(include_str!("../../../cuda/exchange.ptx"), "\0");

/// Threads of a block: `THREADS` in `cuda/shim.h`.
const THREADS: u32 = 256;

/// Blocks that a multiprocessor has at work, of kernels that move or add up rows.
const AT_WORK: u32 = 8;

/// Blocks that the device of a stream has at work, so many on each multiprocessor.
fn blocks_at_work(stream: &Stream, each: u32) -> u32 {
    stream.context.facts().multiprocessors.saturating_mul(each).clamp(1, 1 << 16)
}

/// Limit on the blocks of a launch, if there is one. Blocks go through the work in strides of their
/// grid, so no bit depends on it.
#[derive(Clone, Copy, Debug, Default)]
struct BlockLimit(Option<u32>);

impl BlockLimit {
    /// So many blocks along x and y, or as many of them as the limit lets run.
    fn grid(self, [x, y]: [u32; 2]) -> Grid {
        let most = self.0.unwrap_or(u32::MAX).max(1);
        let y = y.min(most);
        Grid { blocks: [x.min(most / y.max(1)), y, 1], ..Grid::line(1, THREADS) }
    }

    /// So many blocks in a line, or as many as the device has at work, and no more than the limit;
    /// one if there are none.
    fn line(self, stream: &Stream, blocks: u64, each: u32) -> Grid {
        self.grid([blocks.clamp(1, blocks_at_work(stream, each).into()) as u32, 1])
    }

    /// The same for so many threads of kernels that move rows.
    fn threads(self, stream: &Stream, threads: u64) -> Grid {
        self.line(stream, threads.div_ceil(THREADS.into()), AT_WORK)
    }
}

/// The kernels, loaded for one device.
#[derive(Clone, Debug)]
pub struct Kernels {
    sort_choices: Function,
    plan_choices: Function,
    place_choices: Function,
    pack: Function,
    check: Function,
    choices: Function,
    pack_fp8: Function,
    sums: SumFunctions,
    sums_of_choices: SumChoicesFunctions,
    sums_by_rank: RankSumFunctions,
    records: RecordFunctions,
    regroup: Function,
    counts: Function,
    gradients: GradientFunctions,
    expansion: ExpandFunctions,
    limit: BlockLimit,
}

impl Kernels {
    /// Has the driver compile them. It needs a driver for CUDA 12.5 or later, and a device of
    /// compute capability 8.0 or later.
    ///
    /// # Errors
    /// [`DeviceError::Module`], [`DeviceError::NoFunction`], [`DeviceError::TooOld`],
    /// [`DeviceError::Call`].
    pub fn load(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let text = CStr::from_bytes_with_nul(PTX.as_bytes()).unwrap_or_default();
        let module = Module::load(context, "sidelane", text)?;
        Ok(Kernels {
            sort_choices: module.function(c"sort_choices")?,
            plan_choices: module.function(c"plan_choices")?,
            place_choices: module.function(c"place_choices")?,
            pack: module.function(c"pack")?,
            check: module.function(c"check")?,
            choices: module.function(c"choices")?,
            pack_fp8: module.function(c"pack_fp8")?,
            sums: SumFunctions::of(&module)?,
            sums_of_choices: SumChoicesFunctions::of(&module)?,
            sums_by_rank: RankSumFunctions::of(&module)?,
            records: RecordFunctions::of(&module)?,
            regroup: module.function(c"regroup")?,
            counts: module.function(c"counts")?,
            gradients: GradientFunctions::of(&module)?,
            expansion: ExpandFunctions::of(&module)?,
            limit: BlockLimit::default(),
        })
    }

    /// The same kernels, of which a launch has at most so many blocks, one at least, and so takes
    /// no more multiprocessors. Blocks then go through more of the work, and no bit changes.
    pub fn max_blocks(self, blocks: Option<u32>) -> Self {
        Kernels { limit: BlockLimit(blocks), ..self }
    }
}

/// Vectors that kernels read and write.
pub(super) const VECTOR: u64 = 16;
/// Words that kernels read and write.
const WORD: u64 = 4;

/// Checks the operands of one launch, one after the other, and gives the addresses.
pub(super) struct Operands<'a> {
    kernel: &'static str,
    device: u32,
    held: MutexGuard<'a, Claims>,
}

impl<'a> Operands<'a> {
    pub fn of(kernel: &'static str, stream: &'a Stream) -> Self {
        Operands { kernel, device: stream.device(), held: stream.held() }
    }

    /// Memory for `needed` bytes at a multiple of `align`.
    pub fn span(
        &mut self,
        what: &'static str,
        span: ByteSpan<'_>,
        needed: Option<u64>,
        align: u64,
    ) -> Result<u64, DeviceError> {
        span.range.check_reach(self.device)?;
        self.large_enough(what, span.len, needed)?;
        if !span.address.is_multiple_of(align) {
            return Err(DeviceError::Misaligned { what, value: span.address, align });
        }
        self.held.add(span.range.keep());
        Ok(span.address)
    }

    /// As [`span`](Self::span), or 0 for none.
    pub fn optional(
        &mut self,
        what: &'static str,
        span: Option<ByteSpan<'_>>,
        needed: Option<u64>,
        align: u64,
    ) -> Result<u64, DeviceError> {
        span.map_or(Ok(0), |span| self.span(what, span, needed, align))
    }

    /// A word.
    pub fn word<T: Value>(&mut self, word: Word<'_, T>) -> Result<u64, DeviceError> {
        word.range.check_reach(self.device)?;
        self.held.add(word.range.keep());
        Ok(word.address)
    }

    /// A table of addresses, each with memory for `needed` bytes.
    pub fn addresses(
        &mut self,
        what: &'static str,
        addresses: &Addresses,
        needed: Option<u64>,
    ) -> Result<u64, DeviceError> {
        addresses.table.check_reach(self.device)?;
        self.large_enough(what, addresses.each, needed)?;
        self.held.add(addresses.table.keep());
        self.held.add_all(&addresses.named);
        Ok(addresses.table.address())
    }

    /// Claims for the launch.
    pub fn held(self) -> MutexGuard<'a, Claims> {
        self.held
    }

    /// `needed` is `None` for more bytes than can be counted.
    fn large_enough(&self, what: &'static str, given: u64, needed: Option<u64>) -> Result<(), DeviceError> {
        match needed {
            Some(needed) if needed <= given => Ok(()),
            _ => {
                let needed = needed.unwrap_or(u64::MAX);
                Err(DeviceError::TooSmall { kernel: self.kernel, what, given, needed })
            }
        }
    }
}

/// The bytes of an array, if they can be counted.
fn bytes<const N: usize>(factors: [u64; N]) -> Option<u64> {
    factors.into_iter().try_fold(1_u64, u64::checked_mul)
}

/// A table of addresses, one for each rank, in memory of the device: targets of packed slots, or of
/// returned rows.
///
/// It is written once; each clone holds the memory that it names.
#[derive(Debug)]
pub struct Addresses {
    table: DeviceRange,
    count: u32,
    /// Bytes that every address has.
    each: u64,
    /// Claims on the named memory.
    named: Claims,
}

impl Addresses {
    /// Has `stream` write the addresses of `spans` to `table`, eight bytes each. Later launches in
    /// the stream may use the table; other streams must be ordered after it. No one else may write
    /// to `table` while this value lives.
    ///
    /// # Errors
    /// [`DeviceError::TooSmall`] and [`DeviceError::Misaligned`] for the table,
    /// [`DeviceError::Misaligned`] for a span that is not at a multiple of 16 bytes,
    /// [`DeviceError::Shape`] for none or too many, [`DeviceError::NoAccess`],
    /// [`DeviceError::Call`].
    pub fn new(stream: &Stream, table: &DeviceRange, spans: &[ByteSpan<'_>]) -> Result<Self, DeviceError> {
        const KERNEL: &str = "table of addresses";
        let count = u32::try_from(spans.len()).ok().filter(|count| (1..1 << 16).contains(count));
        let given = spans.len() as u64;
        let shape =
            DeviceError::Shape { kernel: KERNEL, what: "addresses", given, expected: "between 1 and 65535" };
        let (count, needed) = (count.ok_or(shape)?, given * 8);
        if table.len() < needed {
            return Err(DeviceError::TooSmall {
                kernel: KERNEL,
                what: "its memory",
                given: table.len(),
                needed,
            });
        }
        let mut writes = MemOpBatch::with_capacity(&stream.context, spans.len() * 2);
        let mut named = Claims::default();
        for (offset, span) in (0..).step_by(8).zip(spans) {
            span.range.check_reach(stream.device())?;
            if !span.address.is_multiple_of(16) {
                let (what, align) = ("an address for kernels", 16);
                return Err(DeviceError::Misaligned { what, value: span.address, align });
            }
            named.add(span.range.keep());
            // Halves: not every device writes words of 64 bits.
            writes.write(table.word::<u32>(offset)?, span.address as u32)?;
            writes.write(table.word::<u32>(offset + 4)?, (span.address >> 32) as u32)?;
        }
        stream.operate(&mut writes)?;
        let table = table.part(0, needed)?;
        if !table.address().is_multiple_of(8) {
            let (what, align) = ("a table of addresses", 8);
            return Err(DeviceError::Misaligned { what, value: table.address(), align });
        }
        let each = spans.iter().map(|span| span.len).min().unwrap_or(0);
        Ok(Addresses { table, count, each, named })
    }

    /// How many there are.
    pub fn count(&self) -> u32 {
        self.count
    }
}
