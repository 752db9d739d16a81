//! Puts and signals to other nodes, which a thread of the host makes for a stream, in order.
//!
//! A stream cannot use a net. So its thread does, behind the copies that bring rows to the host:
//!
//! ```text
//!   enqueuer   rows --copies--> outbox | mark |      NetQueue: behind each mark, puts and signals in order
//!   proxy      slots --copies--> staging | flag |    ProxyOps: lowered once, the same but for the call's number
//!   GPUDirect  rows lie packed | mark |              no copies: the NIC reads them on the device
//! ```
//!
//! **Sources.** A lane that copies what it is given (loopback, tcp), or that stages it in a ring of
//! its own, has read a source when the put returns. A NIC reads registered memory until the lane
//! has [settled](CopyEngineStepper::settle). The thread goes on meanwhile, and settles where a
//! source is about to be written again, or its owner gets it back:
//!
//! | a NIC reads | next writer | what settles before |
//! |---|---|---|
//! | packed rows, tokens as they lie | the caller's stream, behind the call | the end of the call |
//! | outputs of local peers, which a relay returns | their owners, behind this rank's "read" | that signal |
//! | this rank's outputs, which its relay returns | the caller's stream, behind the call | the end of the call |
//! | sums that its relay returns | streams of later calls | the end of the call |
//! | outbox | copies of the same call, when it is full; the next call | a full outbox; the end of the call |
//! | headers and messages in the control window | the call after the next: they are doubled | the end of the call |
//! | zeros | none | |
//!
//! Row metadata lies in memory that no NIC knows, so lanes copy it. What a relay passes on to its
//! node is read by engines alone, in order of the stream. So a relay serves others before its own
//! rows have left, and a combine pulls while those that its relay returns leave. Otherwise only the
//! lane waits for completions: for room in its ring, and before a fenced word. Requests that find
//! no room in a send queue are posted when this thread waits for anything, and between its calls of
//! the driver, since it serves all connections there. A proxy settles behind each call.

use std::collections::VecDeque;

use super::copy_engine_stepper::{CopyEngineStepper, NO_HOST_STAGING, Packed};
use crate::device::DeviceRange;
use crate::error::{DeviceError, Error};
use crate::exec::EnqueueCounts;
use crate::lane::{Io, Port, RowSource};
use crate::plan::RowRun;
use crate::rows::Stores;
use crate::schedule::stream_program::StreamProgram;
use crate::schedule::{
    ControlLayout, Flag, FlagValue, Index, Op, Operand, PutSource, SpanCopy, Tag, WindowId,
};

/// Puts and signals that are to cross.
#[derive(Debug, Default)]
pub struct NetQueue {
    /// In order.
    pub queue: VecDeque<QueuedOp>,
    /// Bytes of the outbox that are taken.
    pub used: u64,
    /// Something was put since the net was settled.
    pub unsettled: bool,
}

/// One step, and the mark that the stream leaves when what it needs is in the outbox.
#[derive(Debug)]
pub struct QueuedOp {
    /// The mark; what needs none has that of the step before.
    pub behind: u64,
    /// The step.
    pub step: NetOp,
}

/// An operation of the net.
#[derive(Clone, Copy, Debug)]
pub enum NetOp {
    /// A span of memory of the host: of the outbox, or of the control window.
    Span { to: u32, span: SpanCopy },
    /// A span of memory of a device of this node.
    GpuDirect { to: u32, span: SpanCopy },
    /// A word in memory of a device, behind rows that went there by GPUDirect.
    Word { to: u32, of: u32, flag: Flag, value: u64 },
    /// A run of rows, to a rank's window at a base; from `at` in the outbox.
    Rows { target: (u32, WindowId, u64), run: RowRun, at: u64, row_bytes: u64 },
    /// A run of metadata; or zeros alone.
    Metadata { target: (u32, WindowId, u64), run: RowRun, row_bytes: u64 },
    /// A signal behind all that.
    Signal { to: u32, of: u32, flag: Flag, value: u64, tag: Option<Tag> },
}

impl NetOp {
    /// Puts or signals.
    pub fn perform(self, port: &Port, metadata: &[u8], done: &mut EnqueueCounts) -> Result<(), Error> {
        match self {
            NetOp::Span { to, span } | NetOp::GpuDirect { to, span } => {
                port.put(to, &span, &Io::default(), Stores::Cached)?;
            }
            NetOp::Word { to, of, flag, value } => port.write_word(to, (WindowId::POOL, of, flag), value)?,
            NetOp::Rows { target, run, at, row_bytes } => {
                let outbox = PutSource::Window { owner: port.lanes().rank, window: WindowId::HOST_STAGING };
                let len = u64::from(run.count) * row_bytes;
                let bytes = port.source(outbox, at, Some(len), &Io::default())?;
                put_run(port, target, run, (bytes, row_bytes))?;
            }
            NetOp::Metadata { target, run, row_bytes } => put_run(port, target, run, (metadata, row_bytes))?,
            NetOp::Signal { to, of, flag, value, tag } => {
                port.signal(to, (of, flag), value, tag.as_ref())?;
            }
        }
        self.count(done);
        Ok(())
    }

    /// Counts it.
    pub fn count(&self, done: &mut EnqueueCounts) {
        let bytes = match *self {
            NetOp::Signal { .. } => {
                done.inter_node_signals += 1;
                return;
            }
            NetOp::Span { span, .. } => span.len,
            NetOp::GpuDirect { span, .. } => {
                done.gpu_direct_puts += 1;
                done.gpu_direct_bytes += span.len;
                span.len
            }
            NetOp::Word { value, .. } => size_of_val(&value) as u64,
            NetOp::Rows { run, row_bytes, .. } | NetOp::Metadata { run, row_bytes, .. } => {
                u64::from(run.count + run.pad) * row_bytes
            }
        };
        done.inter_node_puts += 1;
        done.inter_node_bytes += bytes;
    }
}

fn put_run(
    port: &Port,
    (to, window, base): (u32, WindowId, u64),
    run: RowRun,
    (bytes, row_bytes): (&[u8], u64),
) -> Result<(), Error> {
    let source = RowSource { bytes, row_bytes, rows: &[], index: Index::Contiguous };
    port.put_run(to, (window, base), run, source, Stores::Cached)
}

impl CopyEngineStepper {
    /// From memory of this node to host staging of another, by the outbox; as much at once as that
    /// holds.
    pub(super) fn put_across(
        &mut self,
        to: u32,
        owner: u32,
        span: &SpanCopy,
        packed: Option<Packed<'_>>,
    ) -> Result<(), Error> {
        let mut done = 0;
        while done < span.len {
            let (at, len) = self.room(span.len - done, 1, packed)?;
            let source = Self::at(&self.ground, owner)?.memory.span(span.from_offset + done, len)?;
            let host_staging = self.ground.host_staging.as_ref().ok_or(NO_HOST_STAGING)?;
            self.leaving.push(host_staging.0.span(at, len)?, source)?;
            self.enqueued.staged_out_bytes += len;
            let from = PutSource::Window { owner: self.port.lanes().rank, window: WindowId::HOST_STAGING };
            let to_offset = span.to_offset + done;
            let span = SpanCopy { from, from_offset: at, to: span.to, to_offset, len };
            self.leave(NetOp::Span { to, span }, packed)?;
            done += len;
        }
        Ok(())
    }

    /// Rows of a run to host staging of another node, by the outbox.
    pub(super) fn rows_across(
        &mut self,
        target: (u32, WindowId, u64),
        (source, from): (&DeviceRange, u64),
        (run, row_bytes): (RowRun, u64),
        packed: Option<Packed<'_>>,
    ) -> Result<(), Error> {
        let mut done = 0;
        loop {
            let left = run.count - done;
            let (at, len) = self.room(u64::from(left) * row_bytes, row_bytes, packed)?;
            let host_staging = self.ground.host_staging.as_ref().ok_or(NO_HOST_STAGING)?;
            let rows = source.span(from + u64::from(run.first + done) * row_bytes, len)?;
            self.leaving.push(host_staging.0.span(at, len)?, rows)?;
            self.enqueued.staged_out_bytes += len;
            let count = (len / row_bytes) as u32;
            let pad = if count == left { run.pad } else { 0 };
            let piece = RowRun { to_row: run.to_row + done, first: 0, count, pad };
            self.leave(NetOp::Rows { target, run: piece, at, row_bytes }, packed)?;
            done += count;
            if done == run.count {
                return Ok(());
            }
        }
    }

    /// Whether rows come before such a flag of another node, from NIC to device.
    pub(super) fn guards(&self, flag: Flag, level: FlagValue) -> bool {
        let rows =
            matches!((flag, level), (Flag::Block, FlagValue::Part(_)) | (Flag::Landed | Flag::Returned, _));
        rows && self.ground.words.is_some()
    }

    /// Has the stream await the word behind rows whose flag the host has seen: that flag may have
    /// overtaken them.
    pub(super) fn see(&mut self, (from, flag): (u32, Flag), value: u64) -> Result<(), Error> {
        let at = ControlLayout::flag(from, flag, self.ranks());
        if let Some(words) = &self.ground.words {
            self.stream.wait_for_nic(words.word(at)?, value)?;
            self.enqueued.memory_operations += 1;
        }
        Ok(())
    }

    /// Rows of a run that lie packed from byte `at` of this rank's memory on, and the zeros behind
    /// them, to the memory of another node.
    pub(super) fn rows_gpu_direct(
        &mut self,
        (to, window, base): (u32, WindowId, u64),
        at: u64,
        (run, row_bytes): (RowRun, u64),
    ) {
        let from = PutSource::Window { owner: self.port.lanes().rank, window: WindowId::POOL };
        let [first, to_row, len] = [run.first, run.to_row, run.count].map(|rows| u64::from(rows) * row_bytes);
        let (from_offset, to_offset) = (at + first, base + to_row);
        if len > 0 {
            let span = SpanCopy { from, from_offset, to: window, to_offset, len };
            self.leave_later(NetOp::GpuDirect { to, span });
        }
        if run.pad > 0 {
            let pad = RowRun { to_row: run.to_row + run.count, first: 0, count: 0, pad: run.pad };
            self.leave_later(NetOp::Metadata { target: (to, window, base), run: pad, row_bytes });
        }
    }

    /// Room in the outbox for `len` bytes, or as many as there are, in whole pieces of `grain`:
    /// first byte in host staging, and length. Waits until all that is in there is gone if there is
    /// none.
    fn room(&mut self, len: u64, grain: u64, packed: Option<Packed<'_>>) -> Result<(u64, u64), Error> {
        let (start, size) = self.ground.host_staging.as_ref().ok_or(NO_HOST_STAGING)?.1;
        if size < grain {
            return Err(DeviceError::OutOfRange { offset: start, len: grain, size }.into());
        }
        if len > 0 && size - self.outbox.used < grain {
            self.drain(packed)?;
            self.settle()?;
        }
        let at = self.outbox.used;
        let len = len.min((size - at) / grain * grain);
        self.outbox.used += len;
        Ok((start + at, len))
    }

    /// Adds the next operation. Performs it at once, if none is before it and it needs no copy.
    pub(super) fn leave(&mut self, step: NetOp, packed: Option<Packed<'_>>) -> Result<(), Error> {
        if self.outbox.queue.is_empty() && self.leaving.is_empty() {
            return self.perform(step, packed);
        }
        let behind = self.marks + u64::from(!self.leaving.is_empty());
        self.outbox.queue.push_back(QueuedOp { behind, step });
        Ok(())
    }

    /// The same, of rows that a NIC reads on the device: when the stream has left the last mark,
    /// all that was to come before is there.
    pub(super) fn leave_later(&mut self, step: NetOp) {
        self.outbox.queue.push_back(QueuedOp { behind: self.marks, step });
    }

    /// Enqueues the copies to the outbox, and a mark behind them.
    pub(super) fn cut(&mut self) -> Result<(), Error> {
        let copies = self.leaving.len() as u64;
        if copies > 0 {
            Self::copy_all(&self.stream, self.batched, &mut self.leaving, &mut self.enqueued)?;
            self.marks += 1;
            self.stream.write(Self::mark(&self.ground, &self.port)?, self.marks)?;
            self.enqueued.memory_operations += 1;
        }
        Ok(())
    }

    /// Puts and signals all that is to cross, as soon as it is in the outbox or lies packed. NICs
    /// may still read it afterwards: see [`CopyEngineStepper::settle`].
    ///
    /// # Errors
    /// As [`CopyEngineStepper::run`].
    pub(super) fn drain(&mut self, packed: Option<Packed<'_>>) -> Result<(), Error> {
        self.cut()?;
        while let Some(QueuedOp { behind, step }) = self.outbox.queue.pop_front() {
            self.reached(behind)?;
            // Marks of a failed world's stream say nothing: the thread that ends its waits passes
            // it.
            self.port.lanes().check()?;
            self.perform(step, packed)?;
        }
        Ok(())
    }

    /// Waits until NICs have read all that was put: its sources may be written again, and the
    /// outbox is empty.
    ///
    /// # Errors
    /// As [`CopyEngineStepper::run`].
    pub fn settle(&mut self) -> Result<(), Error> {
        if std::mem::take(&mut self.outbox.unsettled) {
            self.port.settle()?;
        }
        self.outbox.used = 0;
        Ok(())
    }

    fn perform(&mut self, step: NetOp, packed: Option<Packed<'_>>) -> Result<(), Error> {
        let metadata = packed.map_or(&[][..], |packed| packed.metadata.of_host());
        self.outbox.unsettled = true;
        step.perform(&self.port, metadata, &mut self.enqueued)
    }
}

/// Puts and signals to other nodes, in order.
#[derive(Debug)]
pub(crate) struct ProxyOps {
    steps: Vec<NetOp>,
}

impl ProxyOps {
    /// Those of a program; none if there is one node.
    pub fn of(program: &StreamProgram) -> Self {
        let operands = program.operands();
        let mut steps = Vec::new();
        for item in program.proxied().iter().flat_map(|proxied| &proxied.out.items) {
            match item.op {
                Op::Put { to, operand } => {
                    let Operand::Spans { first, count } = operands.table[operand.0 as usize] else {
                        continue;
                    };
                    let spans = &operands.spans[first as usize..][..count as usize];
                    steps.extend(spans.iter().map(|&span| match span.from {
                        PutSource::Window { window: WindowId::HOST_STAGING, .. } => NetOp::Span { to, span },
                        _ => NetOp::GpuDirect { to, span },
                    }));
                }
                Op::Signal { to, of, flag, level: level @ FlagValue::Credit } => {
                    steps.push(NetOp::Word { to, of, flag, value: operands.value(level) });
                }
                Op::Signal { to, of, flag, .. } => {
                    steps.push(NetOp::Signal { to, of, flag, value: 0, tag: None });
                }
                _ => {}
            }
        }
        ProxyOps { steps }
    }

    /// Puts and signals all of it in a call of this number. Returns when nothing is read here any
    /// more.
    ///
    /// # Errors
    /// Of the net, if a peer takes nothing; the cause of a failed world.
    pub fn perform(&self, port: &Port, call: u64) -> Result<(), Error> {
        let mut done = EnqueueCounts::default();
        for &step in &self.steps {
            let step = match step {
                NetOp::Signal { to, of, flag, tag, .. } => NetOp::Signal { to, of, flag, value: call, tag },
                other => other,
            };
            step.perform(port, &[], &mut done)?;
        }
        port.settle()
    }

    /// Work of one call on the net, added to its work on a stream.
    pub fn counts(&self, beside: EnqueueCounts) -> EnqueueCounts {
        self.steps.iter().fold(beside, |mut counts, step| {
            step.count(&mut counts);
            counts
        })
    }
}
