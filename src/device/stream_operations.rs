//! What a stream does without a kernel: it copies, writes words, and waits for words.
//!
//! ```text
//!   stream   copy | copy, copy, copy: a batch, in any order | write: flag 7 | wait: word >= 7 | copy ..
//!                                                              behind all    |
//!                                                              earlier work  `-- no deadline
//! ```
//!
//! **A batch of copies** is handed over faster, by calls that grow ([`copy_batches`]): engines
//! begin early. From CUDA 13.1 on ([`Version::OVERLAP_HINT`]) its copies go by an engine also where
//! source and target lie on one device; before, SMs make these. Copies of a batch run **in any
//! order**: a flag is never one of them, but a memory operation after it. Neither a stream that is
//! being captured nor the legacy default stream takes a batch; both take single copies.
//!
//! **A memory operation** writes a word, or waits until a word is written. A write comes after all
//! earlier work of the stream, for every observer, other devices and the host included. A wait ends
//! when the word is at or past the value, counted in a circle: a generation may wrap. It has no
//! deadline, and the driver does not know what it waits for.

use cudarc::driver::sys;
use cudarc::driver::sys::CUstreamBatchMemOpType_enum as Kind;

use super::call;
use super::driver::Context;
use super::libcuda::{BatchCopy, Code, CopyAttributes, Version, too_old};
use super::probe::WriteOrder;
use super::range::{ByteSpan, Claims, Value, Word};
use super::stream::Stream;
use crate::error::DeviceError;
use crate::schedule::{MAX_BATCH, copy_batches};

const CALL: &str = "cuMemcpyBatchAsync";

impl Stream {
    /// Enqueues a copy between any memory that its device may reach.
    ///
    /// # Errors
    /// [`DeviceError::Lengths`], [`DeviceError::NoAccess`], [`DeviceError::Call`].
    #[doc(hidden)]
    pub fn copy(&self, to: ByteSpan<'_>, from: ByteSpan<'_>) -> Result<(), DeviceError> {
        let Some(len) = length(to, from)? else { return Ok(()) };
        let _held = self.hold(&[to.range, from.range])?;
        let (library, device) = (self.library(), Some(self.device()));
        let _entered = self.context.enter()?;
        // SAFETY: bytes that the device may use, and that stay until the stream is done.
        unsafe { call!(library, device, cuMemcpyAsync(to.address, from.address, len, self.raw)) }
    }

    /// Whether this stream takes batches of copies while it is not captured: the driver has them,
    /// and this is not the legacy default stream, for which the driver refuses them.
    pub fn takes_batches(&self) -> bool {
        self.library().batch.is_some() && !self.is_legacy()
    }

    /// Enqueues a batch of copies, by a call for each of [`copy_batches`]. The driver refuses it
    /// for the legacy default stream: see [`takes_batches`](Self::takes_batches).
    ///
    /// # Errors
    /// [`DeviceError::TooOld`], [`DeviceError::Capturing`], [`DeviceError::OtherDevice`] for a
    /// batch of another device, [`DeviceError::Batch`], [`DeviceError::Call`].
    #[doc(hidden)]
    pub fn copy_batch(&self, batch: &mut CopyBatch) -> Result<(), DeviceError> {
        let library = self.library();
        let Some(function) = library.batch else {
            return Err(too_old("a batch of copies", library.version, Version::BATCHED_COPIES));
        };
        if batch.device != self.device() {
            let (found, expected) = (batch.device, self.device());
            return Err(DeviceError::OtherDevice { what: "batch of copies", found, expected });
        }
        // The driver would refuse it, and spoil the capture.
        if self.is_capturing()? {
            return Err(DeviceError::Capturing { call: CALL });
        }
        let mut held = self.held();
        held.add_all(&batch.held);
        let _entered = self.context.enter()?;
        let mut done = 0;
        for count in copy_batches(batch.len()) {
            let mut failed = usize::MAX;
            let part = done..done + count;
            let to = batch.targets[part.clone()].as_mut_ptr();
            let from = batch.sources[part.clone()].as_mut_ptr();
            let sizes = batch.sizes[part].as_mut_ptr();
            let (mut attributes, mut first) = (CopyAttributes::BESIDE_COMPUTE, 0);
            let (attributes, first) = (&raw mut attributes, &raw mut first);
            // SAFETY: lists of `count` entries of bytes that the device may use, and that stay
            // until the stream is done; the driver reads the lists and the one set of attributes
            // during the call.
            let code = unsafe {
                match function {
                    BatchCopy::First(copy) => {
                        copy(to, from, sizes, count, attributes, first, 1, &raw mut failed, self.raw)
                    }
                    BatchCopy::Second(copy) => copy(to, from, sizes, count, attributes, first, 1, self.raw),
                }
            };
            if code != Code::SUCCESS {
                let copy = (failed < count).then(|| done + failed);
                let (device, name) = (self.device(), library.name_of(code));
                return Err(DeviceError::Batch { call: CALL, device, copy, code: code.0, name });
            }
            done += count;
        }
        Ok(())
    }

    /// Enqueues the copies of a batch one by one, in its order.
    ///
    /// # Errors
    /// [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    #[doc(hidden)]
    pub fn copy_each(&self, batch: &CopyBatch) -> Result<(), DeviceError> {
        if batch.device != self.device() {
            let (found, expected) = (batch.device, self.device());
            return Err(DeviceError::OtherDevice { what: "batch of copies", found, expected });
        }
        let mut held = self.held();
        held.add_all(&batch.held);
        let (library, device) = (self.library(), Some(self.device()));
        let _entered = self.context.enter()?;
        for ((&to, &from), &len) in batch.targets.iter().zip(&batch.sources).zip(&batch.sizes) {
            // SAFETY: bytes that the device may use, and that stay until the stream is done.
            unsafe { call!(library, device, cuMemcpyAsync(to, from, len, self.raw)) }?;
        }
        Ok(())
    }
}

/// Copies for streams of one device, to be enqueued at once.
#[derive(Debug)]
pub struct CopyBatch {
    device: u32,
    targets: Vec<u64>,
    sources: Vec<u64>,
    sizes: Vec<usize>,
    held: Claims,
}

impl CopyBatch {
    /// An empty batch, with room for so many.
    pub fn with_capacity(context: &Context, count: usize) -> Self {
        CopyBatch {
            device: context.device(),
            targets: Vec::with_capacity(count),
            sources: Vec::with_capacity(count),
            sizes: Vec::with_capacity(count),
            held: Claims::default(),
        }
    }

    /// Takes the copies of another batch for the same device, which has none afterwards.
    pub fn append(&mut self, other: &mut CopyBatch) {
        self.targets.append(&mut other.targets);
        self.sources.append(&mut other.sources);
        self.sizes.append(&mut other.sizes);
        self.held.add_all(&other.held);
        other.clear();
    }

    /// Adds a copy. One of no bytes is none.
    ///
    /// # Errors
    /// [`DeviceError::Lengths`], [`DeviceError::NoAccess`].
    pub fn push(&mut self, to: ByteSpan<'_>, from: ByteSpan<'_>) -> Result<(), DeviceError> {
        let Some(len) = length(to, from)? else { return Ok(()) };
        for range in [to.range, from.range] {
            range.check_reach(self.device)?;
            self.held.add(range.keep());
        }
        self.targets.push(to.address);
        self.sources.push(from.address);
        self.sizes.push(len);
        Ok(())
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.sizes.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.sizes.is_empty()
    }

    /// Empties it; its room stays.
    pub fn clear(&mut self) {
        self.targets.clear();
        self.sources.clear();
        self.sizes.clear();
        self.held.clear();
    }
}

/// Bytes to copy; `None` if there are none.
fn length(to: ByteSpan<'_>, from: ByteSpan<'_>) -> Result<Option<usize>, DeviceError> {
    if to.len != from.len {
        return Err(DeviceError::Lengths { to: to.len, from: from.len });
    }
    // An address space holds the range.
    Ok(Some(to.len as usize).filter(|&len| len > 0))
}

/// `CU_STREAM_WAIT_VALUE_GEQ`.
const AT_OR_PAST: u32 = 0;
/// `CU_STREAM_WAIT_VALUE_FLUSH`: bytes that NICs wrote before the word are visible behind the wait.
const FLUSHED: u32 = 1 << 30;
/// `CU_STREAM_WRITE_VALUE_DEFAULT`: behind a fence for the whole system.
const FENCED: u32 = 0;

const WIDE: &str = "memory operations on words of 64 bits";

impl Stream {
    /// Enqueues a write of `value`.
    ///
    /// # Errors
    /// [`DeviceError::NoAccess`], [`DeviceError::Unsupported`], [`DeviceError::Call`].
    #[doc(hidden)]
    pub fn write<T: Value>(&self, word: Word<'_, T>, value: T) -> Result<(), DeviceError> {
        let wide = is_wide::<T>(&self.context)?;
        let _held = self.hold(&[word.range])?;
        let (library, device) = (self.library(), Some(self.device()));
        let (address, value) = (word.address, value.into());
        let _entered = self.context.enter()?;
        // SAFETY: an aligned word that the device may write, and that stays until the stream is
        // done.
        unsafe {
            if wide {
                call!(library, device, cuStreamWriteValue64_v2(self.raw, address, value, FENCED))
            } else {
                call!(library, device, cuStreamWriteValue32_v2(self.raw, address, value as u32, FENCED))
            }
        }
    }

    /// Enqueues a wait for `value` or one past it.
    ///
    /// # Errors
    /// [`DeviceError::NoAccess`], [`DeviceError::Unsupported`], [`DeviceError::Call`].
    #[doc(hidden)]
    pub fn wait<T: Value>(&self, word: Word<'_, T>, value: T) -> Result<(), DeviceError> {
        self.wait_as(word, value, AT_OR_PAST)
    }

    /// Enqueues a wait for a word that a NIC writes into device memory after data: later operations
    /// see that data. Where the device does not see a NIC's writes in order, the wait makes them
    /// visible.
    ///
    /// # Errors
    /// As [`Stream::wait`]; [`DeviceError::Unsupported`] if the device can do neither.
    #[doc(hidden)]
    pub fn wait_for_nic<T: Value>(&self, word: Word<'_, T>, value: T) -> Result<(), DeviceError> {
        self.wait_as(word, value, nic_wait(&self.context)?)
    }

    fn wait_as<T: Value>(&self, word: Word<'_, T>, value: T, how: u32) -> Result<(), DeviceError> {
        let wide = is_wide::<T>(&self.context)?;
        let _held = self.hold(&[word.range])?;
        let (library, device) = (self.library(), Some(self.device()));
        let (address, value) = (word.address, value.into());
        let _entered = self.context.enter()?;
        // SAFETY: as for a write.
        unsafe {
            if wide {
                call!(library, device, cuStreamWaitValue64_v2(self.raw, address, value, how))
            } else {
                call!(library, device, cuStreamWaitValue32_v2(self.raw, address, value as u32, how))
            }
        }
    }

    /// Enqueues a list of operations, in its order, with one call for each 255.
    ///
    /// # Errors
    /// [`DeviceError::OtherDevice`] for a list of another device, [`DeviceError::Call`].
    #[doc(hidden)]
    pub fn operate(&self, list: &mut MemOpBatch) -> Result<(), DeviceError> {
        if list.device != self.device() {
            let (found, expected) = (list.device, self.device());
            return Err(DeviceError::OtherDevice { what: "list of memory operations", found, expected });
        }
        let mut held = self.held();
        held.add_all(&list.held);
        let _entered = self.context.enter()?;
        for part in list.operations.chunks_mut(MAX_BATCH) {
            let (first, count) = (part.as_mut_ptr(), part.len() as u32);
            // SAFETY: aligned words that the device may use, and that stay until the stream is
            // done; the driver reads the list during the call.
            unsafe {
                call!(self.library(), Some(self.device()), cuStreamBatchMemOp_v2(self.raw, count, first, 0))
            }?;
        }
        Ok(())
    }
}

/// A list of memory operations for streams of one device, to be enqueued as often as one likes.
pub struct MemOpBatch {
    device: u32,
    wide: bool,
    /// How it waits for a NIC's writes, if it can.
    nic_wait: Result<u32, DeviceError>,
    operations: Vec<sys::CUstreamBatchMemOpParams>,
    held: Claims,
}

impl MemOpBatch {
    /// An empty list, with room for so many.
    pub fn with_capacity(context: &Context, count: usize) -> Self {
        let wide = context.facts().wide_memory_operations;
        let (device, operations) = (context.device(), Vec::with_capacity(count));
        let nic_wait = nic_wait(context);
        MemOpBatch { device, wide, nic_wait, operations, held: Claims::default() }
    }

    /// Adds a write of `value`.
    ///
    /// # Errors
    /// [`DeviceError::NoAccess`], [`DeviceError::Unsupported`].
    pub fn write<T: Value>(&mut self, word: Word<'_, T>, value: T) -> Result<(), DeviceError> {
        type Params = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st;
        type Number = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st__bindgen_ty_1;
        let wide = self.admit(word)?;
        let value64: u64 = value.into();
        let number = if wide { Number { value64 } } else { Number { value: value64 as u32 } };
        let operation =
            if wide { Kind::CU_STREAM_MEM_OP_WRITE_VALUE_64 } else { Kind::CU_STREAM_MEM_OP_WRITE_VALUE_32 };
        let address = word.address;
        let params = Params { operation, address, __bindgen_anon_1: number, flags: FENCED, alias: 0 };
        let mut entry = sys::CUstreamBatchMemOpParams { pad: [0; 6] };
        entry.writeValue = params;
        self.operations.push(entry);
        Ok(())
    }

    /// Adds a wait for `value` or one past it.
    ///
    /// # Errors
    /// [`DeviceError::NoAccess`], [`DeviceError::Unsupported`].
    pub fn wait<T: Value>(&mut self, word: Word<'_, T>, value: T) -> Result<(), DeviceError> {
        self.wait_as(word, value, AT_OR_PAST)
    }

    /// Adds a wait for a word that a NIC writes: see [`Stream::wait_for_nic`].
    ///
    /// # Errors
    /// As [`MemOpBatch::wait`]; [`DeviceError::Unsupported`] if the device does not see NICs'
    /// writes in order.
    pub fn wait_for_nic<T: Value>(&mut self, word: Word<'_, T>, value: T) -> Result<(), DeviceError> {
        let how = self.nic_wait.clone()?;
        self.wait_as(word, value, how)
    }

    fn wait_as<T: Value>(&mut self, word: Word<'_, T>, value: T, flags: u32) -> Result<(), DeviceError> {
        type Params = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st;
        type Number = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st__bindgen_ty_1;
        let wide = self.admit(word)?;
        let value64: u64 = value.into();
        let number = if wide { Number { value64 } } else { Number { value: value64 as u32 } };
        let operation =
            if wide { Kind::CU_STREAM_MEM_OP_WAIT_VALUE_64 } else { Kind::CU_STREAM_MEM_OP_WAIT_VALUE_32 };
        let address = word.address;
        let params = Params { operation, address, __bindgen_anon_1: number, flags, alias: 0 };
        let mut entry = sys::CUstreamBatchMemOpParams { pad: [0; 6] };
        entry.waitValue = params;
        self.operations.push(entry);
        Ok(())
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Empties it; its room stays.
    pub fn clear(&mut self) {
        self.operations.clear();
        self.held.clear();
    }

    /// Whether it is a wide word, if the device may use it.
    fn admit<T: Value>(&mut self, word: Word<'_, T>) -> Result<bool, DeviceError> {
        let wide = size_of::<T>() == 8;
        if wide && !self.wide {
            return Err(DeviceError::Unsupported { device: self.device, feature: WIDE });
        }
        word.range.check_reach(self.device)?;
        self.held.add(word.range.keep());
        Ok(wide)
    }
}

impl std::fmt::Debug for MemOpBatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} memory operations for device {}", self.len(), self.device)
    }
}

/// How to wait for a word that a NIC writes, so that its earlier writes are visible behind the
/// wait.
fn nic_wait(context: &Context) -> Result<u32, DeviceError> {
    let facts = context.facts();
    if facts.write_order != WriteOrder::None {
        return Ok(AT_OR_PAST);
    }
    context.require(facts.flush_remote_writes, "order of what NICs write")?;
    Ok(AT_OR_PAST | FLUSHED)
}

fn is_wide<T: Value>(context: &Context) -> Result<bool, DeviceError> {
    let wide = size_of::<T>() == 8;
    context.require(!wide || context.facts().wide_memory_operations, WIDE)?;
    Ok(wide)
}
