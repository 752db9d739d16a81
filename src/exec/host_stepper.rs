//! The host stepper: one thread, launch order, one operation after another.
//!
//! Launch order puts a rank's own puts and signals before its waits, so stepping in it cannot
//! deadlock: it is the case of a single queue, which `prove` checks for every schedule. While a
//! wait lasts, it drives the net.

use std::ops::AddAssign;
use std::sync::Arc;
use std::time::Instant;

use super::{Event, Recorder};
use crate::dtype::Dtype;
use crate::error::Error;
use crate::lane::{Io, PeerLane, Port, RowSource, Scratch};
use crate::rows::{Arithmetic, RowKernels, Stores};
use crate::schedule::{Index, Op, Operand, Operands, PutSource, TrackOp, WindowId};

/// Counts of a host executor's moves since they were read last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct TransferCounts {
    /// Bytes of rows copied or put within the node, own rows included.
    pub intra_node_bytes: u64,
    /// Bytes of rows put to other nodes.
    pub inter_node_bytes: u64,
    /// Bytes of messages, headers, and what goes with the rows.
    pub control_bytes: u64,
    /// Rows copied, zeros included.
    pub rows: u64,
    /// Copies by which rows were moved: one for each row that was gathered, one for each span.
    /// Zeros are not copied.
    pub copies: u64,
    /// Signals raised.
    pub signals: u64,
    /// Bytes of the rows read by sums; a partial sum counts as a row.
    pub summed_bytes: u64,
}

/// Adds what was moved elsewhere.
impl AddAssign for TransferCounts {
    fn add_assign(&mut self, other: TransferCounts) {
        self.intra_node_bytes += other.intra_node_bytes;
        self.inter_node_bytes += other.inter_node_bytes;
        self.control_bytes += other.control_bytes;
        self.rows += other.rows;
        self.copies += other.copies;
        self.signals += other.signals;
        self.summed_bytes += other.summed_bytes;
    }
}

/// Steps schedules for one owner.
#[derive(Debug)]
pub struct HostStepper {
    dtype: Dtype,
    recorder: Option<Arc<Recorder>>,
    scratch: Scratch,
    moved: TransferCounts,
}

impl HostStepper {
    /// An executor for rows of this type. A recorder, if any, sees every operation.
    pub fn new(dtype: Dtype, recorder: Option<Arc<Recorder>>) -> Self {
        HostStepper { dtype, recorder, scratch: Scratch::default(), moved: TransferCounts::default() }
    }

    /// Goes on with rows of another type.
    pub(crate) fn retype(&mut self, dtype: Dtype) {
        self.dtype = dtype;
    }

    /// Counts of moves since the last call of this function.
    pub fn take_counts(&mut self) -> TransferCounts {
        std::mem::take(&mut self.moved)
    }

    /// Runs operations (a stage, or part of one) in order, to the end.
    ///
    /// # Errors
    /// Those of the lanes; the call is then incomplete and its world is to be cancelled.
    pub fn run(
        &mut self,
        port: &Port,
        items: &[TrackOp],
        operands: &Operands<'_>,
        io: &mut Io<'_>,
        stores: Stores,
    ) -> Result<(), Error> {
        for &item in items {
            self.step(port, item, operands, io, stores)?;
        }
        // Own rows and sums are followed by no signal that would order them.
        if stores == Stores::Streaming {
            RowKernels::fence();
        }
        port.settle()
    }

    /// Runs one operation. Inlined, so that nothing is left of the choice between them where the
    /// operation is a constant.
    ///
    /// # Errors
    /// As [`HostStepper::run`].
    #[inline(always)]
    pub fn step(
        &mut self,
        port: &Port,
        item: TrackOp,
        operands: &Operands<'_>,
        io: &mut Io<'_>,
        stores: Stores,
    ) -> Result<(), Error> {
        let start = self.recorder.as_ref().map(|_| Instant::now());
        let bytes = match item.op {
            Op::Put { to, operand } => {
                self.put(port, to, operands.table[operand.0 as usize], operands, io, stores)?
            }
            Op::PutRows { to, operand } => {
                self.put_rows(port, to, operands.table[operand.0 as usize], operands, io, stores)?
            }
            Op::Signal { to, of, flag, level } => {
                if stores == Stores::Streaming {
                    RowKernels::fence();
                }
                port.signal(to, (of, flag), operands.value(level), operands.tag(to, flag, level))?;
                self.moved.signals += 1;
                0
            }
            Op::Wait { from, flag, level } => {
                port.wait(from, flag, operands.value(level))?;
                0
            }
            Op::Reduce { operand } => {
                self.reduce(port, operands.table[operand.0 as usize], operands, io, stores)?
            }
        };
        if let (Some(recorder), Some(start)) = (&self.recorder, start) {
            recorder.record(Event::new(&item, bytes, start));
        }
        Ok(())
    }

    #[inline(always)]
    fn put(
        &mut self,
        port: &Port,
        to: u32,
        operand: Operand,
        operands: &Operands<'_>,
        io: &Io<'_>,
        stores: Stores,
    ) -> Result<u64, Error> {
        let Operand::Spans { first, count } = operand else { return Ok(0) };
        let mut bytes = 0;
        for span in &operands.spans[first as usize..(first + count) as usize] {
            port.put(to, span, io, stores)?;
            match span.to {
                WindowId::CONTROL => self.moved.control_bytes += span.len,
                _ => {
                    self.count(port, to, span.len);
                    self.moved.copies += u64::from(span.len > 0);
                }
            }
            bytes += span.len;
        }
        Ok(bytes)
    }

    fn put_rows(
        &mut self,
        port: &Port,
        to: u32,
        operand: Operand,
        operands: &Operands<'_>,
        io: &Io<'_>,
        stores: Stores,
    ) -> Result<u64, Error> {
        let Operand::Rows { first, count, from, from_offset, index, to: window, base, row_bytes } = operand
        else {
            return Ok(0);
        };
        if count == 0 {
            return Ok(0);
        }
        let bytes = port.source(from, from_offset, None, io)?;
        let source = RowSource { bytes, row_bytes, rows: operands.rows, index };
        let (mut rows, mut copies) = (0, 0);
        for &run in &operands.runs[first as usize..(first + count) as usize] {
            port.put_run(to, (window, base), run, source, stores)?;
            rows += u64::from(run.count) + u64::from(run.pad);
            copies += match index {
                Index::Contiguous => u64::from(run.count > 0),
                Index::Listed => u64::from(run.count),
            };
        }
        match from {
            // Metadata of rows counts as control data.
            PutSource::Metadata | PutSource::Window { window: WindowId::CONTROL, .. } => {
                self.moved.control_bytes += rows * row_bytes;
            }
            PutSource::Input | PutSource::Window { .. } => {
                self.moved.rows += rows;
                self.moved.copies += copies;
                self.count(port, to, rows * row_bytes);
            }
        }
        Ok(rows * row_bytes)
    }

    fn reduce(
        &mut self,
        port: &Port,
        operand: Operand,
        operands: &Operands<'_>,
        io: &mut Io<'_>,
        stores: Stores,
    ) -> Result<u64, Error> {
        let sum = &operands.sum;
        let bytes = match operand {
            Operand::SumRows { first, count, to } => {
                let dtype = Arithmetic::try_from(self.dtype)?;
                let outputs = first..first + count;
                let terms = sum.starts[outputs.end as usize] - sum.starts[first as usize];
                port.sum_rows(operands, (outputs, to), dtype, io, &mut self.scratch, stores)?;
                u64::from(terms) * operands.row_bytes
            }
            Operand::FetchWeights => {
                port.fetch_weights(operands, io, &mut self.scratch)?;
                sum.fetched.len() as u64 * 4
            }
            _ => 0,
        };
        self.moved.summed_bytes += bytes;
        Ok(bytes)
    }

    #[inline]
    fn count(&mut self, port: &Port, to: u32, bytes: u64) {
        match port.lanes().reach[to as usize] {
            PeerLane::Net(_) => self.moved.inter_node_bytes += bytes,
            _ => self.moved.intra_node_bytes += bytes,
        }
    }
}
