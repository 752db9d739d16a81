//! What the enqueuer's stepper has yet to put on rails: rows that copy engines bring to the host's
//! memory, and what comes between and behind them, in order.

use std::collections::VecDeque;

use super::EnqueueCounts;
use crate::error::Error;
use crate::lane::{Io, Port, RowSource};
use crate::plan::RowRun;
use crate::rows::Stores;
use crate::schedule::{ControlLayout, Flag, Index, PutSource, SpanCopy, Tag, WindowId};

/// What is to cross.
#[derive(Debug, Default)]
pub struct NetQueue {
    /// In order.
    pub queue: VecDeque<QueuedOp>,
    /// Bytes of the outbox that are taken.
    pub used: u64,
    /// Something was put since the rails were settled.
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

/// What a rail is asked.
#[derive(Clone, Copy, Debug)]
pub enum NetOp {
    /// A span of memory of the host: of the outbox, or of the control window.
    Span { to: u32, span: SpanCopy },
    /// A span of memory of a device of this node.
    Straight { to: u32, span: SpanCopy },
    /// A word in memory of a device, behind what went there straight.
    Word { to: u32, of: u32, flag: Flag, value: u64 },
    /// A run of rows, to a rank's window at a base; from `at` in the outbox.
    Rows { target: (u32, WindowId, u64), run: RowRun, at: u64, row_bytes: u64 },
    /// A run of notes; or zeros alone.
    Notes { target: (u32, WindowId, u64), run: RowRun, row_bytes: u64 },
    /// A signal behind all that.
    Signal { to: u32, of: u32, flag: Flag, value: u64, tag: Option<Tag> },
}

impl NetOp {
    /// Puts or signals.
    pub fn perform(self, port: &Port, notes: &[u8], done: &mut EnqueueCounts) -> Result<(), Error> {
        match self {
            NetOp::Span { to, span } | NetOp::Straight { to, span } => {
                port.put(to, &span, &Io::default(), Stores::Cached)?;
            }
            NetOp::Word { to, of, flag, value } => {
                let (word, to_offset) =
                    (value.to_le_bytes(), ControlLayout::flag(of, flag, port.lanes().ranks()));
                let (from, len) = (PutSource::Input, word.len() as u64);
                let span = SpanCopy { from, from_offset: 0, to: WindowId::POOL, to_offset, len };
                port.put(to, &span, &Io { input: &word, ..Io::default() }, Stores::Cached)?;
            }
            NetOp::Rows { target, run, at, row_bytes } => {
                let outbox = PutSource::Window { owner: port.lanes().rank, window: WindowId::HOST_STAGING };
                let len = u64::from(run.count) * row_bytes;
                let bytes = port.source(outbox, at, Some(len), &Io::default())?;
                put_run(port, target, run, (bytes, row_bytes))?;
            }
            NetOp::Notes { target, run, row_bytes } => put_run(port, target, run, (notes, row_bytes))?,
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
                done.rail_signals += 1;
                return;
            }
            NetOp::Span { span, .. } => span.len,
            NetOp::Straight { span, .. } => {
                done.gpu_direct_puts += 1;
                done.straight_bytes += span.len;
                span.len
            }
            NetOp::Word { value, .. } => size_of_val(&value) as u64,
            NetOp::Rows { run, row_bytes, .. } | NetOp::Notes { run, row_bytes, .. } => {
                u64::from(run.count + run.pad) * row_bytes
            }
        };
        done.rail_puts += 1;
        done.rail_bytes += bytes;
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
