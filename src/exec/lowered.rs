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
//! are single ones: a batch cannot be captured. What crosses to other nodes is not the stream's ([`Crossed`](super::Crossed)).

use std::sync::Arc;

use super::Enqueued;
use crate::device::{Context, CopyBatch, MemoryOperations, Range, Stream, Version};
use crate::error::{DeviceError, Error, LaneError};
use crate::schedule::stream::{PeerCopy, Piece, StreamProgram, WordOp};
use crate::schedule::{Place, WindowId};

/// Where the windows of a group lie, as one rank's device reaches them. Ranks are positions in the group.
pub trait PeerWindows {
    /// The window of slots of a rank, if it is of this node.
    fn slots(&self, rank: u32) -> Option<&Range>;

    /// The window of flags of a rank, if it is of this node.
    fn flags(&self, rank: u32) -> Option<&Range>;

    /// Whether a rank's device is this rank's.
    fn same_device(&self, rank: u32) -> bool;

    /// The host's twin of this rank's slots, where what crosses goes by it.
    fn twin(&self) -> Option<&Range> {
        None
    }

    /// Flags of this rank that speak of `of` and that a card writes, in memory of the device; else all are with
    /// [`flags`](Self::flags).
    fn flags_of_card(&self, _of: u32) -> Option<&Range> {
        None
    }
}

/// A program, lowered for one device.
#[derive(Debug)]
pub struct Lowered {
    start: Vec<Step>,
    finish: Vec<Step>,
    counts: Enqueued,
}

#[derive(Debug)]
enum Step {
    /// Targets and sources; and the same copies as a batch, if the driver has such.
    Copies(Vec<(Range, Range)>, Option<CopyBatch>),
    Words(MemoryOperations),
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
        let mut lowering = Lowering { context, me, windows, counts: Enqueued::default() };
        let start = lowering.steps(&program.start())?;
        let finish = lowering.steps(&program.finish())?;
        Ok(Lowered { start, finish, counts: lowering.counts })
    }

    /// Enqueues the copies, and the signals behind them.
    ///
    /// # Errors
    /// [`DeviceError`]; what was enqueued before stays so.
    pub fn send(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        self.start.iter_mut().try_for_each(|step| step.enqueue(stream))
    }

    /// Enqueues the waits for all peers, and sets the words back.
    ///
    /// # Errors
    /// As [`Lowered::send`].
    pub fn receive(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        self.finish.iter_mut().try_for_each(|step| step.enqueue(stream))
    }

    /// What both together ask of a stream that is not captured.
    pub fn counts(&self) -> Enqueued {
        self.counts
    }
}

impl Step {
    fn enqueue(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        match self {
            Step::Words(list) => stream.operate(list),
            Step::Copies(_, Some(batch)) if !stream.is_capturing()? => stream.copy_batch(batch),
            Step::Copies(copies, _) => copies
                .iter()
                .try_for_each(|(to, from)| stream.copy(to.span(0, to.len())?, from.span(0, from.len())?)),
        }
    }
}

/// Of what lies on another node.
const NOWHERE: DeviceError = DeviceError::NoEngine { operation: "reach other nodes" };

/// One lowering, under way.
struct Lowering<'a> {
    context: &'a Arc<Context>,
    me: u32,
    windows: &'a dyn PeerWindows,
    counts: Enqueued,
}

impl Lowering<'_> {
    fn steps(&mut self, pieces: &[Piece]) -> Result<Vec<Step>, Error> {
        pieces.iter().map(|piece| self.step(piece)).collect()
    }

    fn step(&mut self, piece: &Piece) -> Result<Step, Error> {
        match piece {
            Piece::Copies(copies) => self.copies(copies),
            Piece::Words(words) => {
                let mut list = MemoryOperations::with_capacity(self.context, words.len());
                words.iter().try_for_each(|&word| self.word(&mut list, word))?;
                self.counts.memory_operations += words.len() as u64;
                Ok(Step::Words(list))
            }
        }
    }

    fn copies(&mut self, copies: &[PeerCopy]) -> Result<Step, Error> {
        let batched = self.context.driver().version() >= Version::BATCHED_COPIES;
        let mut batch = batched.then(|| CopyBatch::with_capacity(self.context, copies.len()));
        let mut list = Vec::with_capacity(copies.len());
        for &PeerCopy { to: rank, span } in copies {
            let (offset, len) = (span.from_offset, span.len);
            let Place::Window { owner, window } = span.from else {
                return Err(LaneError::SourceBounds { offset, len, size: 0 }.into());
            };
            let from = self.window(owner, window)?.part(offset, len)?;
            let to = self.window(rank, span.to)?.part(span.to_offset, len)?;
            if let Some(batch) = &mut batch {
                batch.push(to.span(0, len)?, from.span(0, len)?)?;
            }
            match (window, span.to) {
                (WindowId::TWIN, _) => self.counts.in_bytes += len,
                (_, WindowId::TWIN) => self.counts.out_bytes += len,
                _ => {
                    self.counts.bytes += len;
                    let by_sms = !batched && self.windows.same_device(rank);
                    self.counts.copies_by_sms += u64::from(by_sms);
                }
            }
            list.push((to, from));
        }
        let copies = list.len() as u64;
        self.counts.copies += copies;
        match batched {
            true => self.counts.batches += copies.div_ceil(CopyBatch::AT_ONCE as u64),
            false => self.counts.single_copies += copies,
        }
        Ok(Step::Copies(list, batch))
    }

    fn word(&self, list: &mut MemoryOperations, word: WordOp) -> Result<(), DeviceError> {
        let of_card = |of| self.windows.flags_of_card(of);
        match word {
            WordOp::Write { at, of, offset, value } => {
                let of_card = of_card(of).filter(|_| at == self.me);
                let flags = of_card.or_else(|| self.windows.flags(at)).ok_or(NOWHERE)?;
                list.write::<u32>(flags.word(offset)?, value as u32)
            }
            WordOp::Wait { of, offset, value } => match of_card(of) {
                Some(flags) => list.wait_for_card::<u32>(flags.word(offset)?, value as u32),
                None => {
                    let flags = self.windows.flags(self.me).ok_or(NOWHERE)?;
                    list.wait::<u32>(flags.word(offset)?, value as u32)
                }
            },
        }
    }

    fn window(&self, rank: u32, window: WindowId) -> Result<&Range, DeviceError> {
        let window = match window {
            WindowId::TWIN => self.windows.twin().filter(|_| rank == self.me),
            _ => self.windows.slots(rank),
        };
        window.ok_or(NOWHERE)
    }
}
