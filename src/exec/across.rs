//! What crosses, as the enqueuer's stepper sees to it: straight, or by the outbox, in order.

use super::engine::{CopyEngineStepper, NO_TWIN, Packed};
use super::outbox::{NetOp, QueuedOp};
use crate::device::DeviceRange;
use crate::error::{DeviceError, Error};
use crate::plan::RowRun;
use crate::schedule::{ControlLayout, Flag, FlagValue, PutSource, SpanCopy, WindowId};

impl CopyEngineStepper {
    /// From memory of this node to the twin of another, by the outbox; as much at once as that
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
            let twin = self.ground.twin.as_ref().ok_or(NO_TWIN)?;
            self.leaving.push(twin.0.span(at, len)?, source)?;
            self.enqueued.staged_out_bytes += len;
            let from = PutSource::Window { owner: self.port.lanes().rank, window: WindowId::HOST_STAGING };
            let to_offset = span.to_offset + done;
            let span = SpanCopy { from, from_offset: at, to: span.to, to_offset, len };
            self.leave(NetOp::Span { to, span }, packed)?;
            done += len;
        }
        Ok(())
    }

    /// Rows of a run to the twin of another node, by the outbox.
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
            let twin = self.ground.twin.as_ref().ok_or(NO_TWIN)?;
            let rows = source.span(from + u64::from(run.first + done) * row_bytes, len)?;
            self.leaving.push(twin.0.span(at, len)?, rows)?;
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

    /// Whether rows come before such a flag of another node, from card to device.
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
            self.stream.wait_for_card(words.word(at)?, value)?;
            self.enqueued.memory_operations += 1;
        }
        Ok(())
    }

    /// Rows of a run that lie packed from byte `at` of this rank's memory on, and the zeros behind
    /// them, to the memory of another node.
    pub(super) fn rows_straight(
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
            self.leave_later(NetOp::Straight { to, span });
        }
        if run.pad > 0 {
            let pad = RowRun { to_row: run.to_row + run.count, first: 0, count: 0, pad: run.pad };
            self.leave_later(NetOp::Notes { target: (to, window, base), run: pad, row_bytes });
        }
    }

    /// Room in the outbox for `len` bytes, or as many as there are, in whole pieces of `grain`:
    /// first byte in the twin, and length. Waits until all that is in there is gone if there is
    /// none.
    fn room(&mut self, len: u64, grain: u64, packed: Option<Packed<'_>>) -> Result<(u64, u64), Error> {
        let (start, size) = self.ground.twin.as_ref().ok_or(NO_TWIN)?.1;
        if size < grain {
            return Err(DeviceError::OutOfRange { offset: start, len: grain, size }.into());
        }
        if len > 0 && size - self.outbox.used < grain {
            self.drain(packed)?;
        }
        let at = self.outbox.used;
        let len = len.min((size - at) / grain * grain);
        self.outbox.used += len;
        Ok((start + at, len))
    }

    /// What crosses next. At once, if nothing is before it and it needs no copy.
    pub(super) fn leave(&mut self, step: NetOp, packed: Option<Packed<'_>>) -> Result<(), Error> {
        if self.outbox.queue.is_empty() && self.leaving.is_empty() {
            return self.perform(step, packed);
        }
        let behind = self.marks + u64::from(!self.leaving.is_empty());
        self.outbox.queue.push_back(QueuedOp { behind, step });
        Ok(())
    }

    /// The same, of what a card reads on the device: when the stream has left the last mark, all
    /// that was to come before is there.
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

    /// Puts and signals all that is to cross, as soon as it is in the outbox, which is empty
    /// afterwards.
    pub(super) fn drain(&mut self, packed: Option<Packed<'_>>) -> Result<(), Error> {
        self.cut()?;
        while let Some(QueuedOp { behind, step }) = self.outbox.queue.pop_front() {
            self.reached(behind)?;
            // Of a dead world's stream marks say nothing: whoever ends its waits lets it pass.
            self.port.lanes().health.check()?;
            self.perform(step, packed)?;
        }
        // Cards read where rows lie.
        if std::mem::take(&mut self.outbox.unsettled) {
            self.port.settle()?;
        }
        self.outbox.used = 0;
        Ok(())
    }

    fn perform(&mut self, step: NetOp, packed: Option<Packed<'_>>) -> Result<(), Error> {
        let notes = packed.map_or(&[][..], |packed| packed.notes_of_host);
        self.outbox.unsettled = true;
        step.perform(&self.port, notes, &mut self.enqueued)
    }
}
