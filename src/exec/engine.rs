//! The planner's stepper: rows go by copy engines, and what stands behind them by memory operations of the same stream.
//!
//! It reads the same programs as the host stepper, in the same launch order. Where that moves bytes and raises a flag, this
//! one enqueues; waits are the host's, because then they have deadlines and end when the world dies:
//!
//! ```text
//!   Put, PutRows           a copy for each span or run, collected
//!   Signal landed, read    a write of the stream, collected          both enqueued before the next wait, and at the end:
//!                                                                    copies in one batch, then the writes
//!   Signal entry           the host's store: nothing is enqueued before it
//!   Wait landed, read      the host looks at words that streams write
//!   Wait entry             the host's wait
//! ```
//!
//! A later signal is one behind more puts: what is collected may be enqueued together. Engines cannot gather: rows lie
//! packed. They cannot add: a sum is refused.

use std::sync::Arc;

use crate::device::{Context, CopyBatch, MemoryOperations, PinnedMemory, Range, Span, Stream, Version, Word};
use crate::error::{DeviceError, Error};
use crate::lane::Port;
use crate::schedule::{Control, Flag, Index, Item, Op, Operand, Operands, Place, WindowId};

/// What a stream was asked to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Enqueued {
    /// Calls that enqueued a batch of copies.
    pub batches: u64,
    /// Copies, in batches or one by one.
    pub copies: u64,
    /// Bytes of rows and of what goes with them, zeros included.
    pub bytes: u64,
    /// Of these, bytes that stayed at this rank.
    pub own_bytes: u64,
    /// Copies that were enqueued one by one, because the driver has no batches.
    pub single_copies: u64,
    /// Of these, copies within one device: SMs move them.
    pub copies_by_sms: u64,
    /// Memory operations: writes and waits.
    pub memory_operations: u64,
}

/// What lies where, as one rank's device reaches it.
#[derive(Clone, Debug)]
pub struct Ground {
    /// Per rank: the window that programs call the pool.
    pub memory: Vec<Range>,
    /// Per rank: flag lines that streams write.
    pub words: Vec<PinnedMemory>,
    /// Per rank: whether its device is this rank's.
    pub same_device: Vec<bool>,
    /// Zeros of this rank: as many as the longest pad has.
    pub zeros: Range,
}

/// Where one call's rows and notes lie.
#[derive(Clone, Copy, Debug)]
pub struct Packed<'a> {
    /// Rows.
    pub rows: &'a Range,
    /// Notes.
    pub notes: &'a Range,
}

/// Steps programs for one owner, on a stream of its own.
#[derive(Debug)]
pub struct Engine {
    port: Arc<Port>,
    ground: Ground,
    stream: Stream,
    batched: bool,
    copies: CopyBatch,
    operations: MemoryOperations,
    enqueued: Enqueued,
}

/// Looks at a word between two questions to the driver whether the stream has failed.
const LOOKS: u32 = 4096;

impl Engine {
    /// An executor on this stream. Its lists grow with the first calls, and never again.
    pub fn new(context: &Arc<Context>, port: Arc<Port>, ground: Ground, stream: Stream) -> Self {
        Engine {
            port,
            ground,
            stream,
            batched: context.driver().version() >= Version::BATCHED_COPIES,
            copies: CopyBatch::with_capacity(context, 0),
            operations: MemoryOperations::with_capacity(context, 0),
            enqueued: Enqueued::default(),
        }
    }

    /// What has been enqueued since the last call of this function.
    pub fn take_enqueued(&mut self) -> Enqueued {
        std::mem::take(&mut self.enqueued)
    }

    /// Runs operations in order; what they move may still be under way afterwards.
    ///
    /// # Errors
    /// Whatever device and lanes report; the call is then incomplete and its world is to be cancelled.
    pub fn run(
        &mut self,
        items: &[Item],
        operands: &Operands<'_>,
        packed: Option<Packed<'_>>,
    ) -> Result<(), Error> {
        items.iter().try_for_each(|item| self.step(&item.op, operands, packed))?;
        Ok(self.enqueue()?)
    }

    fn step(&mut self, op: &Op, operands: &Operands<'_>, packed: Option<Packed<'_>>) -> Result<(), Error> {
        match *op {
            Op::Put { to, slot } => self.put(to, operands.table[slot.0 as usize], operands),
            Op::PutRows { to, slot } => self.put_rows(to, operands.table[slot.0 as usize], operands, packed),
            Op::Signal { to, of, flag: flag @ (Flag::Landed | Flag::Read), level } => {
                let at = Control::flag(of, flag, self.ranks());
                let word = self.ground.words[to as usize].range().word::<u64>(at)?;
                Ok(self.operations.write(word, operands.value(level))?)
            }
            Op::Signal { to, of, flag, level } => {
                self.enqueue()?;
                self.port.signal(to, (of, flag), operands.value(level), operands.tag(to, flag, level))
            }
            Op::Wait { from, flag: flag @ (Flag::Landed | Flag::Read), level } => {
                self.enqueue()?;
                self.wait((from, flag), operands.value(level))
            }
            Op::Wait { from, flag, level } => {
                self.enqueue()?;
                self.port.wait(from, flag, operands.value(level))
            }
            Op::Reduce { .. } => Err(DeviceError::NoEngine { operation: "add rows" }.into()),
        }
    }

    fn put(&mut self, to: u32, operand: Operand, operands: &Operands<'_>) -> Result<(), Error> {
        let Operand::Spans { first, count } = operand else { return Ok(()) };
        for span in &operands.spans[first as usize..(first + count) as usize] {
            let (Place::Window { owner, window: WindowId::POOL }, WindowId::POOL) = (span.from, span.to)
            else {
                return Err(DeviceError::NoEngine { operation: "move memory of the host" }.into());
            };
            let target = self.ground.memory[to as usize].span(span.to_offset, span.len)?;
            let source = self.ground.memory[owner as usize].span(span.from_offset, span.len)?;
            self.copies.push(target, source)?;
            // One of the two is this rank.
            let peer = if to == self.port.lanes().rank { owner } else { to };
            self.count(peer, span.len, true);
        }
        Ok(())
    }

    fn put_rows(
        &mut self,
        to: u32,
        operand: Operand,
        operands: &Operands<'_>,
        packed: Option<Packed<'_>>,
    ) -> Result<(), Error> {
        let Operand::Rows { first, count, from, from_offset, index, to: window, base, row_bytes } = operand
        else {
            return Ok(());
        };
        let source = match (from, packed) {
            (Place::Input, Some(packed)) => packed.rows,
            (Place::Notes, Some(packed)) => packed.notes,
            _ => return Err(DeviceError::NoEngine { operation: "move memory of the host" }.into()),
        };
        if (index, window) != (Index::Straight, WindowId::POOL) {
            return Err(DeviceError::NoEngine { operation: "gather rows" }.into());
        }
        for run in &operands.runs[first as usize..(first + count) as usize] {
            let memory = &self.ground.memory[to as usize];
            let [place, len, pad] = [run.to_row, run.count, run.pad].map(|rows| u64::from(rows) * row_bytes);
            let rows = source.span(from_offset + u64::from(run.first) * row_bytes, len)?;
            self.copies.push(memory.span(base + place, len)?, rows)?;
            self.copies.push(memory.span(base + place + len, pad)?, self.ground.zeros.span(0, pad)?)?;
            self.count(to, len, from == Place::Input);
            self.count(to, pad, true);
        }
        Ok(())
    }

    /// Counts a copy between this rank and another, or itself; `within`: from one device's memory to another's.
    fn count(&mut self, peer: u32, len: u64, within: bool) {
        let by_sms = !self.batched && within && len > 0 && self.ground.same_device[peer as usize];
        self.enqueued.copies_by_sms += u64::from(by_sms);
        self.enqueued.bytes += len;
        self.enqueued.own_bytes += if peer == self.port.lanes().rank { len } else { 0 };
    }

    /// What is collected from now on comes after a word of the host's memory is 1, which is taken back.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn take(&mut self, word: Word<'_, u32>) -> Result<(), DeviceError> {
        self.enqueue()?;
        self.operations.wait(word, 1)?;
        self.operations.write(word, 0)?;
        self.enqueue()
    }

    /// Collects one copy.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn copy(&mut self, to: Span<'_>, from: Span<'_>) -> Result<(), DeviceError> {
        self.copies.push(to, from)
    }

    /// Enqueues what is collected, and waits until the stream has done all of it: `value` is that of the running call.
    ///
    /// # Errors
    /// As [`Engine::run`].
    pub fn settle(&mut self, value: u64) -> Result<(), Error> {
        let me = self.port.lanes().rank;
        let at = Control::flag(me, Flag::Home, self.ranks());
        self.operations.write(self.ground.words[me as usize].range().word::<u64>(at)?, value)?;
        self.enqueue()?;
        self.wait((me, Flag::Home), value)
    }

    /// Looks at a word that a stream of rank `from` writes here, until it has the value.
    fn wait(&self, (from, flag): (u32, Flag), value: u64) -> Result<(), Error> {
        let lanes = self.port.lanes();
        let at = Control::flag(from, flag, self.ranks());
        let word = self.ground.words[lanes.rank as usize].word(at as usize)?;
        let mut looks = 0;
        lanes.wait_for_word(word, value, (from, flag), || {
            looks = (looks + 1) % LOOKS;
            // A stream that has failed writes nothing any more.
            if looks == 0 { self.stream.is_done().map(drop).map_err(Error::from) } else { Ok(()) }
        })
    }

    /// Copies first, as one batch where the driver has them; then what tells of them.
    fn enqueue(&mut self) -> Result<(), DeviceError> {
        let copies = self.copies.len() as u64;
        if copies > 0 {
            if self.batched {
                self.stream.copy_batch(&mut self.copies)?;
                self.enqueued.batches += copies.div_ceil(CopyBatch::AT_ONCE as u64);
            } else {
                self.stream.copy_each(&self.copies)?;
                self.enqueued.single_copies += copies;
            }
            self.enqueued.copies += copies;
            self.copies.clear();
        }
        if !self.operations.is_empty() {
            self.stream.operate(&mut self.operations)?;
            self.enqueued.memory_operations += self.operations.len() as u64;
            self.operations.clear();
        }
        Ok(())
    }

    fn ranks(&self) -> u32 {
        self.port.lanes().ranks()
    }
}
