//! Copies: one at a time, or a batch at once.
//!
//! A batch is handed over faster, by calls that grow ([`copy_batches`]): engines begin early. From
//! CUDA 13.1 on ([`Version::OVERLAP_HINT`]) its copies go by an engine also where source and target
//! lie on one device; before, SMs make these. Copies of a batch run **in any order**: a flag is
//! never one of them, but a memory operation after it. Neither a stream that is being captured nor
//! the legacy default stream takes a batch; both take single copies.

use super::call;
use super::context::Context;
use super::libcuda::{BatchCopy, Code, CopyAttributes, Version, too_old};
use super::range::{ByteSpan, Claims};
use super::stream::Stream;
use crate::error::DeviceError;
use crate::schedule::copy_batches;

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
