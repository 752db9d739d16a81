//! The stepper of devices: rows go by copy engines, and what stands behind them by memory
//! operations of the same stream.
//!
//! It reads the same programs as the host stepper, in the same launch order. Where that moves bytes
//! and raises a flag, this one enqueues, and its thread runs ahead of the stream:
//!
//! ```text
//!   Put, PutRows           a copy for each span or run, collected
//!   PutRows input -> me    what is collected is enqueued, then a kernel of the caller's stream places own rows; their
//!                          metadata is placed already if it lies on the device
//!   Signal landed, read    a write of the stream, collected; both are enqueued before the next wait, and at the end:
//!          ready           copies in batches, then the writes
//!   Signal entry, posted   the host's store: what is collected is enqueued before it
//!   Wait read              the host looks at the word
//!   Wait landed, ready     the stream waits
//!   Signal, Wait ready     a mark of the stream behind a sum, and what crosses from now on goes behind that
//!     of a source
//!   Signal, Wait ready     the caller's stream writes the word, the host looks at it
//!     of this rank
//!   Wait entry, posted     the host's wait
//!
//!   to another node        a batch of copies to the outbox for each signal, and a mark behind it; before the next wait the
//!                          host puts on the net what stands before each mark that it has seen, and signals
//!     GPUDirect            no copies: the NIC reads rows where they lie packed, behind the mark that they do; it writes a
//!                          word behind them, which the stream awaits once the host has seen the flag
//! ```
//!
//! The thread returns before rows have landed, so its stream awaits them. Whatever a stream awaits
//! is enqueued already by then: the entry of a local peer comes behind its "ready", and
//! [`Posted`](Flag::Posted) before "landed". So no stream ever waits for a thread that has yet to
//! call the driver.
//!
//! A later signal is one behind more puts: what is collected may be enqueued together. Engines
//! cannot gather: rows lie packed. They cannot add: a kernel makes the [sums](super::relay_sums)
//! of a relay.
//!
//! **What crosses** keeps its order, so no signal overtakes a put, and goes when all copies between
//! local peers have been enqueued: those are in flight while this thread serves the net. It waits
//! for its own stream, which waits for what is enqueued already, and for credits, which the
//! peers' NICs give: for no other thread. It drives the net meanwhile. It does not wait until NICs
//! have read what crosses, except before "read" and where the [queue](super::net_queue) says.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use super::net_queue::{NetOp, NetQueue};
use super::relay_sums::RelaySums;
use crate::bootstrap::wait::nap;
use crate::device::{
    ByteSpan, Context, CopyBatch, DeviceRange, Event, MemOpBatch, PinnedMemory, Stream, Version, Word,
};
use crate::error::{DeviceError, Error};
use crate::exec::EnqueueCounts;
use crate::lane::Port;
use crate::schedule::{
    ControlLayout, Flag, Index, Line, Op, Operand, Operands, PutSource, SpanCopy, TrackOp, WindowId,
    copy_batches,
};
use crate::topology::Route;

/// Memory of the ranks, as one rank's device reaches it.
#[derive(Clone, Debug)]
pub struct DeviceMap {
    /// Per rank: what is its, if it is of this node.
    pub ranks: Vec<Option<LocalPeer>>,
    /// Zeros of this rank: as many as the longest pad of rows has.
    pub zeros: DeviceRange,
    /// Zeros in memory of the host for pads of metadata: those of own rows are then no copy within
    /// the device, either.
    pub note_zeros: DeviceRange,
    /// Host staging of this rank's memory, where there are other nodes, and the piece of it from
    /// which rows leave: first byte and length.
    pub host_staging: Option<(DeviceRange, (u64, u64))>,
    /// This rank's words in memory of its device, a line for each flag, where NICs reach that:
    /// rows then cross by GPUDirect.
    pub words: Option<DeviceRange>,
}

/// Memory and words of a rank of this node.
#[derive(Clone, Debug)]
pub struct LocalPeer {
    /// The window that programs call the pool.
    pub memory: DeviceRange,
    /// Flag lines that streams write.
    pub words: PinnedMemory,
    /// Whether its device is this rank's.
    pub same_device: bool,
}

/// A word that the stream awaits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// Of whom it speaks.
    pub from: u32,
    /// Its kind.
    pub flag: Flag,
    /// The value.
    pub value: u64,
}

/// Where one call's rows and metadata lie, and how own rows go to their places.
#[derive(Clone, Copy)]
pub struct Packed<'a> {
    /// Rows.
    pub rows: &'a DeviceRange,
    /// Their first byte in this rank's memory.
    pub at: u64,
    /// Notes.
    pub metadata: PackedMetadata<'a>,
    /// Enqueues the kernel of the caller's stream that places own rows.
    pub place_own: &'a dyn Fn() -> Result<(), Error>,
}

impl fmt::Debug for Packed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Packed { rows, at, metadata, .. } = self;
        let mut packed = f.debug_struct("Packed");
        packed.field("rows", rows).field("at", at).field("metadata", metadata).finish_non_exhaustive()
    }
}

/// Where the metadata of one call lie.
#[derive(Clone, Copy, Debug)]
pub enum PackedMetadata<'a> {
    /// In memory of the host, as engines and as NICs read it.
    Host(&'a DeviceRange, &'a [u8]),
    /// In memory of the device, where there is one node. A kernel of the caller's stream places
    /// those of own rows.
    Device(&'a DeviceRange),
}

impl<'a> PackedMetadata<'a> {
    fn memory(self) -> &'a DeviceRange {
        match self {
            PackedMetadata::Host(memory, _) | PackedMetadata::Device(memory) => memory,
        }
    }

    fn on_device(self) -> bool {
        matches!(self, PackedMetadata::Device(_))
    }

    /// Bytes that NICs read.
    pub(super) fn of_host(self) -> &'a [u8] {
        match self {
            PackedMetadata::Host(_, bytes) => bytes,
            PackedMetadata::Device(_) => &[],
        }
    }
}

/// Steps programs for one owner, on a stream of its own.
#[derive(Debug)]
pub struct CopyEngineStepper {
    pub(super) port: Arc<Port>,
    pub(super) ground: DeviceMap,
    pub(super) stream: Stream,
    /// Sums for other nodes, if it makes any.
    pub(super) sums: Option<RelaySums>,
    pub(super) batched: bool,
    /// Engines make the copies of batches also within one device.
    hinted: bool,
    /// Collected: waits, the copies behind them, and what tells of these.
    waits: MemOpBatch,
    /// Words of these waits, since the last mark.
    awaited: Vec<Awaited>,
    copies: CopyBatch,
    /// Copies of metadata, which go behind those of rows: a link that is busy with long rows would
    /// keep the next ones from theirs.
    metadata: CopyBatch,
    operations: MemOpBatch,
    /// Copies to the outbox, collected.
    pub(super) leaving: CopyBatch,
    pub(super) outbox: NetQueue,
    /// Marks that the stream was asked to leave, each a number.
    pub(super) marks: u64,
    pub(super) enqueued: EnqueueCounts,
}

/// Looks at a word between two questions to the driver whether the stream has failed.
const LOOKS: u32 = 4096;

/// Nothing crosses where there is one node.
pub(super) const NO_HOST_STAGING: DeviceError = DeviceError::NoEngine { operation: "cross to other nodes" };

impl CopyEngineStepper {
    /// An executor on this stream. Its lists grow with the first calls, and never again.
    pub fn new(context: &Arc<Context>, port: Arc<Port>, ground: DeviceMap, stream: Stream) -> Self {
        CopyEngineStepper {
            port,
            ground,
            batched: stream.takes_batches(),
            stream,
            sums: None,
            hinted: context.driver().version() >= Version::OVERLAP_HINT,
            waits: MemOpBatch::with_capacity(context, 0),
            awaited: Vec::new(),
            copies: CopyBatch::with_capacity(context, 0),
            metadata: CopyBatch::with_capacity(context, 0),
            operations: MemOpBatch::with_capacity(context, 0),
            leaving: CopyBatch::with_capacity(context, 0),
            outbox: NetQueue::default(),
            marks: 0,
            enqueued: EnqueueCounts::default(),
        }
    }

    /// Work enqueued since the last call of this function.
    pub fn take_enqueued(&mut self) -> EnqueueCounts {
        std::mem::take(&mut self.enqueued)
    }

    /// Runs operations in order; what they move may still be in flight afterwards, and NICs may
    /// still read it: see [`CopyEngineStepper::settle`].
    ///
    /// # Errors
    /// Those of the device and the lanes; the call is then incomplete and its world is to be
    /// cancelled.
    pub fn run(
        &mut self,
        items: &[TrackOp],
        operands: &Operands<'_>,
        packed: Option<Packed<'_>>,
    ) -> Result<(), Error> {
        items.iter().try_for_each(|item| self.step(&item.op, operands, packed))?;
        self.flush(packed)
    }

    fn step(&mut self, op: &Op, operands: &Operands<'_>, packed: Option<Packed<'_>>) -> Result<(), Error> {
        match *op {
            Op::Put { to, operand } => self.put(to, operands.table[operand.0 as usize], operands, packed),
            Op::PutRows { to, operand } => {
                self.put_rows(to, operands.table[operand.0 as usize], operands, packed)
            }
            Op::Signal { to, of, flag, level } if self.near(to).is_none() => {
                let (value, tag) = (operands.value(level), operands.tag(to, flag, level).copied());
                if self.guards(flag, level) {
                    self.leave(NetOp::Word { to, of, flag, value }, packed)?;
                }
                self.leave(NetOp::Signal { to, of, flag, value, tag }, packed)?;
                self.cut()
            }
            Op::Signal { of, flag: Flag::Ready, .. } if self.near(of).is_none() => self.tell_summed(),
            Op::Signal { to, of, flag: flag @ (Flag::Landed | Flag::Read | Flag::Ready), level } => {
                if op.frees_sources() && self.outbox.unsettled {
                    self.flush(packed)?;
                    self.settle()?;
                }
                let at = ControlLayout::flag(of, flag, self.ranks());
                let word = Self::at(&self.ground, to)?.words.range().word::<u64>(at)?;
                Ok(self.operations.write(word, operands.value(level))?)
            }
            Op::Signal { to, of, flag, level } => {
                self.flush(packed)?;
                self.port.signal(to, (of, flag), operands.value(level), operands.tag(to, flag, level))
            }
            Op::Wait { from, flag: flag @ (Flag::Landed | Flag::Ready), level }
                if op.line(self.port.lanes().paths()) == Line::Stream =>
            {
                self.stream_waits((from, flag), operands.value(level), packed)
            }
            // Rows that cross are queued behind the mark that says so.
            Op::Wait { from, flag: Flag::Ready, .. } if self.near(from).is_none() => Ok(()),
            Op::Wait { from, flag: flag @ Flag::Ready, level } => {
                let word = self.word_here((from, flag))?;
                self.port.lanes().wait_for_stream(word, operands.value(level), self.look())
            }
            Op::Wait { from, flag: flag @ (Flag::Landed | Flag::Read), level } if self.by_word(from) => {
                self.flush(packed)?;
                self.wait((from, flag), operands.value(level))
            }
            Op::Wait { from, flag, level } => {
                self.flush(packed)?;
                self.port.wait(from, flag, operands.value(level))?;
                if self.near(from).is_none() && self.guards(flag, level) {
                    self.see((from, flag), operands.value(level))?;
                }
                Ok(())
            }
            Op::Reduce { operand } => self.sum_pulled(operands.table[operand.0 as usize], operands),
        }
    }

    /// Has the stream wait for a word that the stream of rank `from` writes here.
    fn stream_waits(
        &mut self,
        (from, flag): (u32, Flag),
        value: u64,
        packed: Option<Packed<'_>>,
    ) -> Result<(), Error> {
        // Consecutive waits are one list.
        if !self.copies.is_empty() || !self.metadata.is_empty() || !self.operations.is_empty() {
            self.flush(packed)?;
        }
        let lanes = self.port.lanes();
        let at = ControlLayout::flag(from, flag, lanes.ranks());
        let word = Self::at(&self.ground, lanes.rank)?.words.range().word::<u64>(at)?;
        self.waits.wait(word, value)?;
        self.awaited.push(Awaited { from, flag, value });
        Ok(())
    }

    fn near(&self, rank: u32) -> Option<&LocalPeer> {
        self.ground.ranks.get(rank as usize)?.as_ref()
    }

    pub(super) fn at(ground: &DeviceMap, rank: u32) -> Result<&LocalPeer, DeviceError> {
        let nowhere = DeviceError::NoEngine { operation: "reach other nodes" };
        ground.ranks.get(rank as usize).and_then(Option::as_ref).ok_or(nowhere)
    }

    /// Whether a stream says that rows of a rank have landed: its own, or that of a relay of this
    /// node.
    fn by_word(&self, from: u32) -> bool {
        self.near(from).is_some() || self.port.lanes().route == Route::Pxn
    }

    fn put(
        &mut self,
        to: u32,
        operand: Operand,
        operands: &Operands<'_>,
        packed: Option<Packed<'_>>,
    ) -> Result<(), Error> {
        let Operand::Spans { first, count } = operand else { return Ok(()) };
        let me = self.port.lanes().rank;
        for span in &operands.spans[first as usize..(first + count) as usize] {
            match (span.from, span.to, self.near(to).is_some()) {
                (PutSource::Window { window: WindowId::CONTROL, .. }, _, false) => {
                    self.leave(NetOp::Span { to, span: *span }, packed)?;
                }
                (PutSource::Window { window: WindowId::POOL, .. }, _, false)
                    if self.ground.words.is_some() =>
                {
                    self.leave_later(NetOp::GpuDirect { to, span: *span });
                }
                (PutSource::Window { owner, window: WindowId::POOL }, _, false) => {
                    self.put_across(to, owner, span, packed)?;
                }
                (PutSource::Window { owner, window: WindowId::HOST_STAGING }, WindowId::POOL, true)
                    if owner == me =>
                {
                    self.bring_in(to, span)?;
                }
                (PutSource::Window { owner, window: WindowId::POOL }, WindowId::POOL, true) => {
                    let target = Self::at(&self.ground, to)?.memory.span(span.to_offset, span.len)?;
                    let source = Self::at(&self.ground, owner)?.memory.span(span.from_offset, span.len)?;
                    self.copies.push(target, source)?;
                    // One of the two is this rank.
                    self.count(if to == me { owner } else { to }, span.len, true);
                }
                _ => return Err(DeviceError::NoEngine { operation: "move memory of the host" }.into()),
            }
        }
        Ok(())
    }

    /// From this rank's host staging to memory of this node.
    fn bring_in(&mut self, to: u32, span: &SpanCopy) -> Result<(), Error> {
        let target = Self::at(&self.ground, to)?.memory.span(span.to_offset, span.len)?;
        let host_staging = self.ground.host_staging.as_ref().ok_or(NO_HOST_STAGING)?;
        self.copies.push(target, host_staging.0.span(span.from_offset, span.len)?)?;
        self.enqueued.staged_in_bytes += span.len;
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
        let me = self.port.lanes().rank;
        let source = match (from, packed, &self.ground.host_staging) {
            (PutSource::Input, Some(packed), _) => packed.rows.clone(),
            (PutSource::Metadata, Some(packed), _) => packed.metadata.memory().clone(),
            (PutSource::Window { owner, window: WindowId::HOST_STAGING }, _, Some(host_staging))
                if owner == me =>
            {
                host_staging.0.clone()
            }
            (PutSource::Window { owner, window: WindowId::POOL }, ..) if owner == me => {
                Self::at(&self.ground, me)?.memory.clone()
            }
            _ => return Err(DeviceError::NoEngine { operation: "move memory of the host" }.into()),
        };
        if index != Index::Contiguous {
            return Err(DeviceError::NoEngine { operation: "gather rows" }.into());
        }
        let of_rows = from != PutSource::Metadata;
        let on_device = of_rows || packed.is_some_and(|packed| packed.metadata.on_device());
        let placed = matches!(from, PutSource::Input | PutSource::Metadata) && on_device;
        if let (PutSource::Input, Some(packed)) = (from, packed.filter(|_| to == me)) {
            // Before the net is served, where this thread waits until rows that cross are packed.
            self.cut()?;
            self.enqueue()?;
            (packed.place_own)()?;
        }
        for run in &operands.runs[first as usize..(first + count) as usize] {
            if to == me && placed {
                self.own_rows(u64::from(run.count + run.pad) * row_bytes);
                continue;
            }
            if self.near(to).is_none() {
                let target = (to, window, base);
                match from {
                    PutSource::Metadata => {
                        self.leave(NetOp::Metadata { target, run: *run, row_bytes }, packed)?
                    }
                    PutSource::Input if self.ground.words.is_some() => {
                        let at = packed.map_or(0, |packed| packed.at) + from_offset;
                        self.rows_gpu_direct(target, at, (*run, row_bytes));
                    }
                    _ => self.rows_across(target, (&source, from_offset), (*run, row_bytes), packed)?,
                }
                continue;
            }
            let memory = &Self::at(&self.ground, to)?.memory;
            let [place, len, pad] = [run.to_row, run.count, run.pad].map(|rows| u64::from(rows) * row_bytes);
            let rows = source.span(from_offset + u64::from(run.first) * row_bytes, len)?;
            let zeros = if of_rows { &self.ground.zeros } else { &self.ground.note_zeros };
            let copies = if of_rows { &mut self.copies } else { &mut self.metadata };
            copies.push(memory.span(base + place, len)?, rows)?;
            copies.push(memory.span(base + place + len, pad)?, zeros.span(0, pad)?)?;
            match from {
                PutSource::Window { window: WindowId::HOST_STAGING, .. } => {
                    self.enqueued.staged_in_bytes += len
                }
                _ => self.count(to, len, on_device),
            }
            self.count(to, pad, of_rows);
        }
        Ok(())
    }

    /// Own rows or their metadata, pads counted, which a kernel of the caller's stream places.
    fn own_rows(&mut self, len: u64) {
        self.enqueued.bytes += len;
        self.enqueued.own_bytes += len;
    }

    /// Enqueues what is collected, then sees to what crosses.
    fn flush(&mut self, packed: Option<Packed<'_>>) -> Result<(), Error> {
        self.cut()?;
        self.enqueue()?;
        self.drain(packed)
    }

    /// Counts a copy between this rank and another, or itself; `within`: from one device's memory
    /// to another's.
    fn count(&mut self, peer: u32, len: u64, within: bool) {
        let same_device = self.near(peer).is_some_and(|near| near.same_device);
        let by_engine = self.batched && self.hinted;
        let by_sms = !by_engine && within && len > 0 && same_device;
        self.enqueued.copies_by_sms += u64::from(by_sms);
        self.enqueued.bytes += len;
        self.enqueued.own_bytes += if peer == self.port.lanes().rank { len } else { 0 };
    }

    /// Has all that is collected from now on come after a mark of another stream.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn follow(&mut self, mark: &Event) -> Result<(), DeviceError> {
        self.enqueue()?;
        self.stream.wait_event(mark)?;
        self.awaited.clear();
        self.marks += 1;
        self.operations.write(Self::mark(&self.ground, &self.port)?, self.marks)?;
        self.enqueue()
    }

    /// Words that the stream awaits since it followed another one, and the mark that it left there.
    /// None where another stream has gone on behind them: a call that only joins streams awaits
    /// none of the call before.
    pub fn awaited(&self) -> (u64, &[Awaited]) {
        (self.marks, &self.awaited)
    }

    /// Enqueues what is collected, and has another stream wait for all of it.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn precede(&mut self, other: &Stream, mark: &Event) -> Result<(), DeviceError> {
        self.enqueue()?;
        other.join(&self.stream, mark)?;
        self.awaited.clear();
        Ok(())
    }

    /// Collects one copy.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn copy(&mut self, to: ByteSpan<'_>, from: ByteSpan<'_>) -> Result<(), DeviceError> {
        self.copies.push(to, from)
    }

    /// Waits until the stream is done, but not for ever: for one whose waits somebody ends.
    pub fn await_queues(&self, patience: Duration) {
        let since = Instant::now();
        while self.stream.is_done() == Ok(false) && since.elapsed() < patience {
            nap(Duration::from_millis(1));
        }
    }

    /// The word in which the stream leaves its marks: this rank's own, which no program raises.
    pub(super) fn mark<'g>(ground: &'g DeviceMap, port: &Port) -> Result<Word<'g, u64>, DeviceError> {
        let lanes = port.lanes();
        let at = ControlLayout::flag(lanes.rank, Flag::Returned, lanes.ranks());
        Self::at(ground, lanes.rank)?.words.range().word(at)
    }

    /// Waits until the stream has left a mark.
    pub(super) fn reached(&self, mark: u64) -> Result<(), Error> {
        if mark == 0 { Ok(()) } else { self.wait((self.port.lanes().rank, Flag::Returned), mark) }
    }

    /// Looks at a word that a stream of rank `from` writes here, until it has the value.
    fn wait(&self, (from, flag): (u32, Flag), value: u64) -> Result<(), Error> {
        let word = self.word_here((from, flag))?;
        self.port.lanes().wait_for_word(word, value, (from, flag), self.look())
    }

    /// A word that a stream of rank `from` writes here.
    fn word_here(&self, (from, flag): (u32, Flag)) -> Result<&AtomicU64, DeviceError> {
        let at = ControlLayout::flag(from, flag, self.ranks());
        Self::at(&self.ground, self.port.lanes().rank)?.words.word(at as usize)
    }

    /// Asks the driver from time to time whether the stream has failed: then it writes nothing any
    /// more.
    fn look(&self) -> impl FnMut() -> Result<(), Error> {
        let mut looks = 0;
        move || {
            looks = (looks + 1) % LOOKS;
            if looks == 0 { self.stream.is_done().map(drop).map_err(Error::from) } else { Ok(()) }
        }
    }

    /// Has another stream of this rank raise the words of these operations, which are the rank's
    /// own.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn raise_on(
        &self,
        stream: &Stream,
        items: &[TrackOp],
        operands: &Operands<'_>,
    ) -> Result<(), DeviceError> {
        for item in items {
            if let Op::Signal { to, of, flag, level } = item.op {
                let at = ControlLayout::flag(of, flag, self.ranks());
                let word = Self::at(&self.ground, to)?.words.range().word::<u64>(at)?;
                stream.write(word, operands.value(level))?;
            }
        }
        Ok(())
    }

    /// Waits first; then copies, in batches where the driver has them, those of metadata last;
    /// then signals.
    pub(super) fn enqueue(&mut self) -> Result<(), DeviceError> {
        let copies = !self.copies.is_empty() || !self.metadata.is_empty();
        let enqueued = copies || !self.waits.is_empty() || !self.operations.is_empty();
        Self::operate(&self.stream, &mut self.waits, &mut self.enqueued)?;
        self.copies.append(&mut self.metadata);
        Self::copy_all(&self.stream, self.batched, &mut self.copies, &mut self.enqueued)?;
        Self::operate(&self.stream, &mut self.operations, &mut self.enqueued)?;
        if enqueued && self.outbox.unsettled {
            // Requests that had no room in a send queue go on. A host that waits serves them
            // itself.
            self.port.lanes().progress();
        }
        Ok(())
    }

    fn operate(
        stream: &Stream,
        list: &mut MemOpBatch,
        enqueued: &mut EnqueueCounts,
    ) -> Result<(), DeviceError> {
        if !list.is_empty() {
            stream.operate(list)?;
            enqueued.memory_operations += list.len() as u64;
            list.clear();
        }
        Ok(())
    }

    pub(super) fn copy_all(
        stream: &Stream,
        batched: bool,
        list: &mut CopyBatch,
        enqueued: &mut EnqueueCounts,
    ) -> Result<(), DeviceError> {
        let copies = list.len();
        if copies > 0 {
            if batched {
                stream.copy_batch(list)?;
                enqueued.batches += copy_batches(copies).count() as u64;
            } else {
                stream.copy_each(list)?;
                enqueued.single_copies += copies as u64;
            }
            enqueued.copies += copies as u64;
            list.clear();
        }
        Ok(())
    }

    pub(super) fn ranks(&self) -> u32 {
        self.port.lanes().ranks()
    }
}
