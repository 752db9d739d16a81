//! Memory operations: a stream writes a word, or waits until a word is written.
//!
//! A write comes after all earlier work of the stream, for every observer, other devices and the
//! host included. A wait ends when the word is at or past the value, counted in a circle: a
//! generation may wrap. It has no deadline, and the driver does not know what it waits for.

use cudarc::driver::sys;
use cudarc::driver::sys::CUstreamBatchMemOpType_enum as Kind;

use super::call;
use super::context::Context;
use super::probe::WriteOrder;
use super::range::{Claims, Value, Word};
use super::stream::Stream;
use crate::error::DeviceError;
use crate::schedule::MAX_BATCH;

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
    pub fn wait_for_card<T: Value>(&self, word: Word<'_, T>, value: T) -> Result<(), DeviceError> {
        self.wait_as(word, value, card_wait(&self.context)?)
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
    card_wait: Result<u32, DeviceError>,
    operations: Vec<sys::CUstreamBatchMemOpParams>,
    held: Claims,
}

impl MemOpBatch {
    /// An empty list, with room for so many.
    pub fn with_capacity(context: &Context, count: usize) -> Self {
        let wide = context.facts().wide_memory_operations;
        let (device, operations) = (context.device(), Vec::with_capacity(count));
        let card_wait = card_wait(context);
        MemOpBatch { device, wide, card_wait, operations, held: Claims::default() }
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

    /// Adds a wait for a word that a NIC writes: see [`Stream::wait_for_card`].
    ///
    /// # Errors
    /// As [`MemOpBatch::wait`]; [`DeviceError::Unsupported`] if the device does not see NICs'
    /// writes in order.
    pub fn wait_for_card<T: Value>(&mut self, word: Word<'_, T>, value: T) -> Result<(), DeviceError> {
        let how = self.card_wait.clone()?;
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
fn card_wait(context: &Context) -> Result<u32, DeviceError> {
    let facts = context.facts();
    if facts.write_order != WriteOrder::None {
        return Ok(AT_OR_PAST);
    }
    context.require(facts.flush_remote_writes, "order of what network cards write")?;
    Ok(AT_OR_PAST | FLUSHED)
}

fn is_wide<T: Value>(context: &Context) -> Result<bool, DeviceError> {
    let wide = size_of::<T>() == 8;
    context.require(!wide || context.facts().wide_memory_operations, WIDE)?;
    Ok(wide)
}
