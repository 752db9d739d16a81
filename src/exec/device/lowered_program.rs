//! Stream programs, lowered: each becomes copies and memory operations of a CUDA stream.
//!
//! All moves of a stream program are known before its first call, so it is lowered once and
//! enqueued any number of times:
//!
//! ```text
//!   program   Put Put Put | Signal Signal Signal | Wait Wait Wait Reset Reset Reset
//!   stream    one batch     one list               one list
//!             ------ start -------                 ------------ finish -----------
//! ```
//!
//! Copies of a batch run in any order, so a flag is never one of them. While a stream is captured
//! into a graph, and on the legacy default stream, the copies are single ones: the driver takes no
//! batch there. A proxy puts what crosses to other nodes ([`ProxyOps`](crate::exec::ProxyOps)).

use std::sync::Arc;

use crate::device::{Context, CopyBatch, DeviceRange, MemOpBatch, Stream, Version};
use crate::error::{DeviceError, Error, LaneError};
use crate::exec::EnqueueCounts;
use crate::schedule::call_program::Part;
use crate::schedule::stream_program::{PeerCopy, Piece, StreamProgram, WordOp};
use crate::schedule::{PutSource, WindowId, copy_batches};

/// Where the windows of a group lie, as one rank's device reaches them. Ranks are positions in the
/// group.
pub trait PeerWindows {
    /// The window of slots of a rank, if it is of this node.
    fn slots(&self, rank: u32) -> Option<&DeviceRange>;

    /// The window of flags of a rank, if it is of this node.
    fn flags(&self, rank: u32) -> Option<&DeviceRange>;

    /// Whether a rank's device is this rank's.
    fn same_device(&self, rank: u32) -> bool;

    /// Host staging of this rank's slots, where rows cross by it.
    fn host_staging(&self) -> Option<&DeviceRange> {
        None
    }

    /// Flags of this rank that speak of `of` and that a NIC writes, in memory of the device; else
    /// all are with [`flags`](Self::flags).
    fn nic_flags(&self, _of: u32) -> Option<&DeviceRange> {
        None
    }
}

/// A program, lowered for one device.
#[derive(Debug)]
pub struct Lowered {
    steps: Vec<Step>,
    /// The first of the second half.
    half: usize,
    /// Of the stream, without how its copies were enqueued.
    counts: EnqueueCounts,
    /// Engines make the copies of batches also within one device.
    hinted: bool,
}

#[derive(Debug)]
enum Step {
    Copies(Copies),
    Words(MemOpBatch),
}

/// Copies that are enqueued together.
#[derive(Debug)]
struct Copies {
    /// Targets and sources.
    list: Vec<(DeviceRange, DeviceRange)>,
    /// The same as a batch, if the driver has such.
    batch: Option<CopyBatch>,
    /// Those within one device.
    within: u64,
    /// Whether they went one by one the last time; before the first time, whether they have to.
    singly: bool,
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
        let mut lowering = Lowering { context, me, windows, counts: EnqueueCounts::default() };
        let mut steps = lowering.steps(&program.pieces(Part::Start))?;
        let half = steps.len();
        steps.extend(lowering.steps(&program.pieces(Part::Finish))?);
        let hinted = context.driver().version() >= Version::OVERLAP_HINT;
        Ok(Lowered { steps, half, counts: lowering.counts, hinted })
    }

    /// Enqueues one half, or both. The first is copies, and the signals behind them. The second
    /// waits for all peers, and sets the words back.
    ///
    /// # Errors
    /// [`DeviceError`]; what was enqueued before stays so.
    pub fn enqueue(&mut self, part: Part, stream: &Stream) -> Result<(), DeviceError> {
        let steps = match part {
            Part::Whole => &mut self.steps[..],
            Part::Start => &mut self.steps[..self.half],
            Part::Finish => &mut self.steps[self.half..],
        };
        steps.iter_mut().try_for_each(|step| step.enqueue(stream))
    }

    /// Work of both halves the last time; before the first time, their work
    /// of a stream that takes batches.
    pub fn counts(&self) -> EnqueueCounts {
        self.with_copies(self.counts)
    }

    /// `counts` with copies as this program enqueued them the last time: in batches or one by one,
    /// by engines or by SMs.
    pub(crate) fn with_copies(&self, mut counts: EnqueueCounts) -> EnqueueCounts {
        (counts.batches, counts.single_copies, counts.copies_by_sms) = (0, 0, 0);
        for step in &self.steps {
            let Step::Copies(copies) = step else { continue };
            let count = copies.list.len();
            match copies.singly {
                true => counts.single_copies += count as u64,
                false => counts.batches += copy_batches(count).count() as u64,
            }
            counts.copies_by_sms += if copies.singly || !self.hinted { copies.within } else { 0 };
        }
        counts
    }
}

impl Step {
    fn enqueue(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        match self {
            Step::Words(list) => stream.operate(list),
            Step::Copies(copies) => copies.enqueue(stream),
        }
    }
}

impl Copies {
    fn enqueue(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        let batch = self.batch.as_mut().filter(|_| stream.takes_batches());
        self.singly = batch.is_none() || stream.is_capturing()?;
        match batch {
            Some(batch) if !self.singly => stream.copy_batch(batch),
            _ => self
                .list
                .iter()
                .try_for_each(|(to, from)| stream.copy(to.span(0, to.len())?, from.span(0, from.len())?)),
        }
    }
}

/// Of what lies on another node.
const NOWHERE: DeviceError = DeviceError::NoEngine { operation: "reach other nodes" };

/// One lowering, in progress.
struct Lowering<'a> {
    context: &'a Arc<Context>,
    me: u32,
    windows: &'a dyn PeerWindows,
    counts: EnqueueCounts,
}

impl Lowering<'_> {
    fn steps(&mut self, pieces: &[Piece]) -> Result<Vec<Step>, Error> {
        pieces.iter().map(|piece| self.step(piece)).collect()
    }

    fn step(&mut self, piece: &Piece) -> Result<Step, Error> {
        match piece {
            Piece::Copies(copies) => self.copies(copies),
            Piece::Words(words) => {
                let mut list = MemOpBatch::with_capacity(self.context, words.len());
                words.iter().try_for_each(|&word| self.word(&mut list, word))?;
                self.counts.memory_operations += words.len() as u64;
                Ok(Step::Words(list))
            }
        }
    }

    fn copies(&mut self, copies: &[PeerCopy]) -> Result<Step, Error> {
        let batched = self.context.driver().version() >= Version::BATCHED_COPIES;
        let mut batch = batched.then(|| CopyBatch::with_capacity(self.context, copies.len()));
        let (mut list, mut within) = (Vec::with_capacity(copies.len()), 0);
        for &PeerCopy { to: rank, span } in copies {
            let (offset, len) = (span.from_offset, span.len);
            let PutSource::Window { owner, window } = span.from else {
                return Err(LaneError::SourceBounds { offset, len, size: 0 }.into());
            };
            let from = self.window(owner, window)?.part(offset, len)?;
            let to = self.window(rank, span.to)?.part(span.to_offset, len)?;
            if let Some(batch) = &mut batch {
                batch.push(to.span(0, len)?, from.span(0, len)?)?;
            }
            match (window, span.to) {
                (WindowId::HOST_STAGING, _) => self.counts.staged_in_bytes += len,
                (_, WindowId::HOST_STAGING) => self.counts.staged_out_bytes += len,
                _ => {
                    self.counts.bytes += len;
                    within += u64::from(self.windows.same_device(rank));
                }
            }
            list.push((to, from));
        }
        self.counts.copies += list.len() as u64;
        Ok(Step::Copies(Copies { list, batch, within, singly: !batched }))
    }

    fn word(&self, list: &mut MemOpBatch, word: WordOp) -> Result<(), DeviceError> {
        let of_nic = |of| self.windows.nic_flags(of);
        match word {
            WordOp::Write { at, of, offset, value } => {
                let of_nic = of_nic(of).filter(|_| at == self.me);
                let flags = of_nic.or_else(|| self.windows.flags(at)).ok_or(NOWHERE)?;
                list.write::<u32>(flags.word(offset)?, value as u32)
            }
            WordOp::Wait { of, offset, value } => match of_nic(of) {
                Some(flags) => list.wait_for_nic::<u32>(flags.word(offset)?, value as u32),
                None => {
                    let flags = self.windows.flags(self.me).ok_or(NOWHERE)?;
                    list.wait::<u32>(flags.word(offset)?, value as u32)
                }
            },
        }
    }

    fn window(&self, rank: u32, window: WindowId) -> Result<&DeviceRange, DeviceError> {
        let window = match window {
            WindowId::HOST_STAGING => self.windows.host_staging().filter(|_| rank == self.me),
            _ => self.windows.slots(rank),
        };
        window.ok_or(NOWHERE)
    }
}
