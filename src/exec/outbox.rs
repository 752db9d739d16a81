//! What a planner's stepper has yet to put on rails: rows that copy engines bring to the host's
//! memory, and what comes between and behind them, in order.

use std::collections::VecDeque;

use super::Enqueued;
use crate::error::Error;
use crate::lane::{Io, Port, RowSource};
use crate::plan::RowRun;
use crate::rows::Stores;
use crate::schedule::{Control, Flag, Index, Place, SpanCopy, Tag, WindowId};

/// What is to cross.
#[derive(Debug, Default)]
pub struct Outbox {
    /// In order.
    pub queue: VecDeque<Leaving>,
    /// Bytes of the outbox that are taken.
    pub used: u64,
    /// Something was put since the rails were settled.
    pub unsettled: bool,
}

/// One step, and the mark that the stream leaves when what it needs is in the outbox.
#[derive(Debug)]
pub struct Leaving {
    /// The mark; what needs none has that of the step before.
    pub behind: u64,
    /// The step.
    pub step: Step,
}

/// What a rail is asked.
#[derive(Clone, Copy, Debug)]
pub enum Step {
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

impl Step {
    /// Puts or signals.
    pub fn perform(self, port: &Port, notes: &[u8], done: &mut Enqueued) -> Result<(), Error> {
        match self {
            Step::Span { to, span } | Step::Straight { to, span } => {
                port.put(to, &span, &Io::default(), Stores::Cached)?;
            }
            Step::Word { to, of, flag, value } => {
                let (word, to_offset) = (value.to_le_bytes(), Control::flag(of, flag, port.lanes().ranks()));
                let (from, len) = (Place::Input, word.len() as u64);
                let span = SpanCopy { from, from_offset: 0, to: WindowId::POOL, to_offset, len };
                port.put(to, &span, &Io { input: &word, ..Io::default() }, Stores::Cached)?;
            }
            Step::Rows { target, run, at, row_bytes } => {
                let outbox = Place::Window { owner: port.lanes().rank, window: WindowId::TWIN };
                let len = u64::from(run.count) * row_bytes;
                let bytes = port.source(outbox, at, Some(len), &Io::default())?;
                put_run(port, target, run, (bytes, row_bytes))?;
            }
            Step::Notes { target, run, row_bytes } => put_run(port, target, run, (notes, row_bytes))?,
            Step::Signal { to, of, flag, value, tag } => {
                port.signal(to, (of, flag), value, tag.as_ref())?;
            }
        }
        self.count(done);
        Ok(())
    }

    /// Counts it.
    pub fn count(&self, done: &mut Enqueued) {
        let bytes = match *self {
            Step::Signal { .. } => {
                done.rail_signals += 1;
                return;
            }
            Step::Span { span, .. } => span.len,
            Step::Straight { span, .. } => {
                done.straight_puts += 1;
                done.straight_bytes += span.len;
                span.len
            }
            Step::Word { value, .. } => size_of_val(&value) as u64,
            Step::Rows { run, row_bytes, .. } | Step::Notes { run, row_bytes, .. } => {
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
    let source = RowSource { bytes, row_bytes, rows: &[], index: Index::Straight };
    port.put_run(to, (window, base), run, source, Stores::Cached)
}
