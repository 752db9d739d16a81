//! The device enqueuer: a stream program becomes copies and memory operations of a CUDA stream.
//!
//! What a static program moves is known before its first call, so it is lowered once and enqueued as often as one likes:
//!
//! ```text
//!   program   Put Put Put | Signal Signal Signal | Wait Wait Wait Reset Reset Reset
//!   stream    one batch     one list               one list
//!             ------- send -------                 ----------- receive -----------
//! ```
//!
//! Copies of a batch run in any order, so a flag is never one of them. While a stream is captured into a graph the copies
//! are single ones: a batch cannot be captured.

use std::sync::Arc;

use crate::device::{Context, CopyBatch, MemoryOperations, Range, Stream, Version};
use crate::error::{DeviceError, Error, LaneError};
use crate::schedule::Place;
use crate::schedule::stream::{StreamProgram, WordOp};

/// Where the windows of a group lie, as one rank's device reaches them. Ranks are positions in the group.
pub trait Ground {
    /// The window of slots of a rank.
    fn slots(&self, rank: u32) -> &Range;

    /// The window of flags of a rank.
    fn flags(&self, rank: u32) -> &Range;
}

/// What one call of a program asks of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Enqueued {
    /// Copies by copy engines.
    pub copies: u64,
    /// Whether they are handed over in batches, as far as a stream is not captured.
    pub batched: bool,
    /// Bytes that they move.
    pub bytes: u64,
    /// Memory operations: signals, waits, words set back.
    pub memory_operations: u64,
}

/// A program, lowered for one device.
#[derive(Debug)]
pub struct Device {
    /// Targets and sources.
    copies: Vec<(Range, Range)>,
    /// The same copies; none where the driver has no batches.
    batch: Option<CopyBatch>,
    signals: MemoryOperations,
    waits: MemoryOperations,
}

impl Device {
    /// Lowers the program of rank `me`.
    ///
    /// # Errors
    /// [`DeviceError`] for what the device does not reach.
    pub fn lower(
        context: &Arc<Context>,
        program: &StreamProgram,
        me: u32,
        ground: &dyn Ground,
    ) -> Result<Self, Error> {
        let batched = context.driver().version() >= Version::BATCHED_COPIES;
        let mut device = Device {
            copies: Vec::new(),
            batch: batched.then(|| CopyBatch::with_capacity(context, program.copies().count())),
            signals: MemoryOperations::with_capacity(context, 0),
            waits: MemoryOperations::with_capacity(context, 0),
        };
        for copy in program.copies() {
            let span = copy.span;
            let Place::Window { owner, .. } = span.from else {
                let (offset, len) = (span.from_offset, span.len);
                return Err(LaneError::SourceBounds { offset, len, size: 0 }.into());
            };
            let from = ground.slots(owner).part(span.from_offset, span.len)?;
            let to = ground.slots(copy.to).part(span.to_offset, span.len)?;
            if let Some(batch) = &mut device.batch {
                batch.push(to.span(0, span.len)?, from.span(0, span.len)?)?;
            }
            device.copies.push((to, from));
        }
        for operation in program.words() {
            match operation {
                WordOp::Write { at, offset, value } => {
                    // Words are set back behind the waits.
                    let list = if device.waits.is_empty() { &mut device.signals } else { &mut device.waits };
                    list.write::<u32>(ground.flags(at).word(offset)?, value as u32)?;
                }
                WordOp::Wait { offset, value } => {
                    device.waits.wait::<u32>(ground.flags(me).word(offset)?, value as u32)?;
                }
            }
        }
        Ok(device)
    }

    /// Enqueues the copies, and the signals behind them.
    ///
    /// # Errors
    /// [`DeviceError`]; what was enqueued before stays so.
    pub fn send(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        match &mut self.batch {
            Some(batch) if !stream.is_capturing()? => stream.copy_batch(batch)?,
            _ => {
                for (to, from) in &self.copies {
                    stream.copy(to.span(0, to.len())?, from.span(0, from.len())?)?;
                }
            }
        }
        stream.operate(&mut self.signals)
    }

    /// Enqueues the waits for all peers, and sets the words back.
    ///
    /// # Errors
    /// As [`Device::send`].
    pub fn receive(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        stream.operate(&mut self.waits)
    }

    /// What both together ask of a stream.
    pub fn counts(&self) -> Enqueued {
        Enqueued {
            copies: self.copies.len() as u64,
            batched: self.batch.is_some(),
            bytes: self.copies.iter().map(|(to, _)| to.len()).sum(),
            memory_operations: (self.signals.len() + self.waits.len()) as u64,
        }
    }
}
