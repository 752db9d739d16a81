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
    AccumulateArgs, GatherRun, GatherRuns, GroupSegments, LayerKernels, MatmulArgs, MatmulShape,
};
pub use routing::{Check, ChoiceArgs, CountArgs, SortArgs};
use rows::RecordFunctions;
pub use rows::{Pack, PermuteArgs, RecordArgs};
pub use sum::{DotScale, FetchWeights, SumArgs, SumChoices};
use sum::{GradientFunctions, SumChoicesFunctions, SumFunctions};

use super::context::Context;
use super::flags::MemOpBatch;
use super::module::{Function, Module};
use super::range::{ByteSpan, Claims, DeviceRange, Value, Word};
use super::stream::Stream;
use crate::error::DeviceError;
#[cfg(doc)]
use crate::error::KernelFault;

/// Made by `cuda/build.py`.
const PTX: &str = concat!(include_str!("../../../cuda/kernels.ptx"), "\0");

/// Threads of a block: `THREADS` in `cuda/shim.h`.
const THREADS: u32 = 256;

/// Blocks that a multiprocessor has at work.
const BLOCKS_AT_WORK: u32 = 8;

/// Blocks that the device of a stream has at work.
fn blocks_at_work(stream: &Stream) -> u32 {
    stream.context.facts().multiprocessors.saturating_mul(BLOCKS_AT_WORK).clamp(1, 1 << 16)
}

/// The kernels, loaded for one device.
#[derive(Clone, Debug)]
pub struct Kernels {
    order: Function,
    pack: Function,
    check: Function,
    choices: Function,
    pack_fp8: Function,
    sums: SumFunctions,
    sums_of_choices: SumChoicesFunctions,
    records: RecordFunctions,
    regroup: Function,
    counts: Function,
    gradients: GradientFunctions,
    expansion: ExpandFunctions,
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
            order: module.function(c"order")?,
            pack: module.function(c"pack")?,
            check: module.function(c"check")?,
            choices: module.function(c"choices")?,
            pack_fp8: module.function(c"pack_fp8")?,
            sums: SumFunctions::of(&module)?,
            sums_of_choices: SumChoicesFunctions::of(&module)?,
            records: RecordFunctions::of(&module)?,
            regroup: module.function(c"regroup")?,
            counts: module.function(c"counts")?,
            gradients: GradientFunctions::of(&module)?,
            expansion: ExpandFunctions::of(&module)?,
        })
    }
}

/// Vectors that kernels read and write.
const VECTOR: u64 = 16;
/// Words that kernels read and write.
pub(super) const WORD: u64 = 4;

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
