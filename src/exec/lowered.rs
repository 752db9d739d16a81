//! Stream programs, lowered: each becomes copies and memory operations of a CUDA stream.
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

use super::Enqueued;
use crate::device::{Context, CopyBatch, MemoryOperations, Range, Stream, Version};
use crate::error::{DeviceError, Error, LaneError};
use crate::schedule::Place;
use crate::schedule::stream::{StreamProgram, WordOp};

/// Where the windows of a group lie, as one rank's device reaches them. Ranks are positions in the group.
pub trait PeerWindows {
    /// The window of slots of a rank.
    fn slots(&self, rank: u32) -> &Range;

    /// The window of flags of a rank.
    fn flags(&self, rank: u32) -> &Range;

    /// Whether a rank's device is this rank's.
    fn same_device(&self, rank: u32) -> bool;
}

/// A program, lowered for one device.
#[derive(Debug)]
pub struct Lowered {
    /// Targets and sources.
    copies: Vec<(Range, Range)>,
    /// The same copies; none where the driver has no batches.
    batch: Option<CopyBatch>,
    signals: MemoryOperations,
    waits: MemoryOperations,
    /// Copies to ranks on this rank's device.
    to_same_device: u64,
}

impl Lowered {
    /// Lowers the program of rank `me`.
    ///
    /// # Errors
    /// [`DeviceError`] for what the device does not reach.
    pub fn lower(
        context: &Arc<Context>,
        program: &StreamProgram,
        me: u32,
        windows: &dyn PeerWindows,
    ) -> Result<Self, Error> {
        let batched = context.driver().version() >= Version::BATCHED_COPIES;
        let mut lowered = Lowered {
            copies: Vec::new(),
            batch: batched.then(|| CopyBatch::with_capacity(context, program.copies().count())),
            signals: MemoryOperations::with_capacity(context, 0),
            waits: MemoryOperations::with_capacity(context, 0),
            to_same_device: 0,
        };
        for copy in program.copies() {
            let span = copy.span;
            let Place::Window { owner, .. } = span.from else {
                let (offset, len) = (span.from_offset, span.len);
                return Err(LaneError::SourceBounds { offset, len, size: 0 }.into());
            };
            let from = windows.slots(owner).part(span.from_offset, span.len)?;
            let to = windows.slots(copy.to).part(span.to_offset, span.len)?;
            if let Some(batch) = &mut lowered.batch {
                batch.push(to.span(0, span.len)?, from.span(0, span.len)?)?;
            }
            lowered.to_same_device += u64::from(windows.same_device(copy.to));
            lowered.copies.push((to, from));
        }
        for operation in program.words() {
            match operation {
                WordOp::Write { at, offset, value } => {
                    // Words are set back behind the waits.
                    let list =
                        if lowered.waits.is_empty() { &mut lowered.signals } else { &mut lowered.waits };
                    list.write::<u32>(windows.flags(at).word(offset)?, value as u32)?;
                }
                WordOp::Wait { offset, value } => {
                    lowered.waits.wait::<u32>(windows.flags(me).word(offset)?, value as u32)?;
                }
            }
        }
        Ok(lowered)
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
    /// As [`Lowered::send`].
    pub fn receive(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        stream.operate(&mut self.waits)
    }

    /// What both together ask of a stream that is not captured.
    pub fn counts(&self) -> Enqueued {
        let copies = self.copies.len() as u64;
        let single = if self.batch.is_some() { 0 } else { copies };
        Enqueued {
            batches: if self.batch.is_some() { copies.div_ceil(CopyBatch::AT_ONCE as u64) } else { 0 },
            copies,
            bytes: self.copies.iter().map(|(to, _)| to.len()).sum(),
            own_bytes: 0,
            single_copies: single,
            copies_by_sms: if self.batch.is_some() { 0 } else { self.to_same_device },
            memory_operations: (self.signals.len() + self.waits.len()) as u64,
            ..Enqueued::default()
        }
    }
}
