//! What a dispatch beside a stream leaves to the calls that follow it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use sidelane::device::Range;
use sidelane::ep::planned::{PlannedHandle as Layout, PlannedReport, PlannedRows};
use sidelane::exec::Enqueued;
use sidelane::world::{Detour, Registration};

use crate::errors::raise;
use crate::planned::Shape;
use crate::slot::Slot;
use crate::tensor::{Element, Kind, Memory, Outputs, Tensor};
use crate::wait::{self, Interrupt};
use crate::world::Seat;

/// The placement of one dispatch.
#[pyclass(frozen, module = "sidelane")]
pub struct PlannedHandle {
    seat: Arc<Seat>,
    /// Lent to calls along it.
    pub slot: Slot<Layout>,
    shape: Shape,
    kind: Kind,
    /// What was received, as long as somebody has it.
    received: Weak<PlannedRows>,
    /// Output buffers that Python has.
    pub outputs: Outputs,
    copied: AtomicU64,
    #[pyo3(get)]
    rows: usize,
    #[pyo3(get)]
    tokens: usize,
}

/// Rows as a tensor, and the handle of their dispatch.
pub fn give<'py>(
    py: Python<'py>,
    rows: PlannedRows,
    layout: Layout,
    seat: &Arc<Seat>,
    shape: &Shape,
    kind: Kind,
) -> PyResult<(Bound<'py, PyAny>, PlannedHandle)> {
    let received = Arc::new(rows);
    let (count, tokens) = (layout.len() as usize, layout.tokens() as usize);
    let range = received.rows().map_err(raise)?;
    let shown = range.len() as usize / (shape.hidden * shape.dtype.size());
    let rows = lent(&range, &received, &[shown, shape.hidden], shape.dtype.into(), shape);
    let handle = PlannedHandle {
        seat: Arc::clone(seat),
        slot: Slot::new("handle", layout),
        shape: shape.clone(),
        kind,
        received: Arc::downgrade(&received),
        outputs: Outputs::default(),
        copied: AtomicU64::new(0),
        rows: count,
        tokens,
    };
    Ok((kind.give(py, rows)?, handle))
}

/// Memory of received rows, which keeps all of them.
fn lent(
    range: &Range,
    received: &Arc<PlannedRows>,
    sizes: &[usize],
    element: Element,
    shape: &Shape,
) -> Tensor {
    let owner = Box::new(Arc::clone(received));
    let memory = Memory::at(range.address() as usize, range.len() as usize, owner, None);
    Tensor::new(memory, sizes, element).on(&shape.on)
}

impl PlannedHandle {
    /// That so many bytes of expert outputs were copied.
    pub fn count_copied(&self, bytes: u64) {
        self.copied.fetch_add(bytes, Ordering::Relaxed);
    }

    fn received(&self) -> PyResult<Arc<PlannedRows>> {
        self.seat.world()?;
        self.received.upgrade().ok_or_else(|| {
            let message =
                "the rows of this dispatch are gone, and what came with them: ask while you have them";
            crate::errors::Wrong::Closed.error("RowsGone", message, &[])
        })
    }
}

#[pymethods]
impl PlannedHandle {
    /// Rows of each expert of this rank; empty if the dispatch was not finished.
    #[getter]
    fn tokens_per_expert(&self) -> PyResult<Vec<i64>> {
        self.slot.lend(|layout| Ok(layout.tokens_per_expert().to_vec()))
    }

    /// The same, pads counted.
    #[getter]
    fn padded_tokens_per_expert(&self) -> PyResult<Vec<i64>> {
        self.slot.lend(|layout| Ok(layout.padded_tokens_per_expert().to_vec()))
    }

    /// Rows that each rank needed.
    #[getter]
    fn required_rows(&self) -> PyResult<Vec<u32>> {
        self.slot.lend(|layout| Ok(layout.required_rows().to_vec()))
    }

    /// Which of this rank's choices, one token after another, were dropped for want of room.
    #[getter]
    fn dropped(&self) -> PyResult<Vec<bool>> {
        self.slot.lend(|layout| Ok(layout.dropped().to_vec()))
    }

    /// Routing weight of each row, `[rows]` on the device; 0 for pads.
    #[getter]
    fn row_weights<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let received = self.received()?;
        let range = received.weights().map_err(raise)?;
        let count = range.len() as usize / 4;
        self.kind.give(py, lent(&range, &received, &[count], Element::F32, &self.shape))
    }

    /// Rows of each expert of this rank, then the same with pads: int64 `[2, experts]` on the device.
    #[getter]
    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let received = self.received()?;
        let range = received.counts().clone();
        let experts = range.len() as usize / 16;
        self.kind.give(py, lent(&range, &received, &[2, experts], Element::I64, &self.shape))
    }

    /// Where engines relay: rows as they arrived, and for each row which of them it is, int32 `[rows]`, -1 of pads.
    #[getter]
    fn index<'py>(&self, py: Python<'py>) -> PyResult<Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)>> {
        let received = self.received()?;
        let Some((arrived, index)) = received.index() else { return Ok(None) };
        let (hidden, dtype) = (self.shape.hidden, self.shape.dtype);
        let rows = arrived.len() as usize / (hidden * dtype.size());
        let entries = index.len() as usize / 4;
        let arrived = lent(arrived, &received, &[rows, hidden], dtype.into(), &self.shape);
        let index = lent(index, &received, &[entries], Element::I32, &self.shape);
        Ok(Some((self.kind.give(py, arrived)?, self.kind.give(py, index)?)))
    }

    /// Bytes that combines along this handle have copied because rows did not lie in an output buffer.
    #[getter]
    fn copied_bytes(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }

    /// A buffer `[rows, hidden]` that a combine takes without a copy. Its contents are undefined.
    fn output<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let output = self.slot.lend(|layout| layout.output().map_err(raise))?;
        let (address, len) = (output.rows().address() as usize, output.rows().len() as usize);
        let (hidden, dtype) = (self.shape.hidden, self.shape.dtype);
        let memory = self.outputs.add(Memory::at(address, len, Box::new(output), None));
        let tensor = Tensor::new(memory, &[len / (hidden * dtype.size()), hidden], dtype.into());
        self.kind.give(py, tensor.on(&self.shape.on))
    }

    /// How the last call of this dispatch or its combines ended: 0 is well. Sure once the stream has come past.
    #[getter]
    fn status(&self) -> PyResult<u32> {
        self.slot.lend(|layout| Ok(layout.status_now().0))
    }

    /// The same for kernels: the address of a word of 32 bits, as the device reaches it.
    #[getter]
    fn status_address(&self) -> PyResult<u64> {
        self.slot.lend(|layout| Ok(layout.status().map_err(raise)?.address()))
    }

    /// How the bytes of the dispatch went. Waits until its rows have landed; Ctrl-C ends the wait, not the world.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let world = self.seat.world()?;
        let said = self.slot.lend(|layout| wait::call(py, &world, Interrupt::Ends, || layout.report()))?;
        report(py, &said)
    }

    fn __repr__(&self) -> String {
        format!("sidelane.PlannedHandle(tokens={}, rows={})", self.tokens, self.rows)
    }
}

/// A report as a dictionary.
pub fn report<'py>(py: Python<'py>, said: &PlannedReport) -> PyResult<Bound<'py, PyAny>> {
    let report = PyDict::new(py);
    let lanes: Vec<_> = said.lanes.iter().map(|used| (used.lane, used.ranks)).collect();
    report.set_item("lanes", lanes)?;
    report.set_item("detour", said.detour.map(Detour::name))?;
    report.set_item("registration", said.registration.map(Registration::name))?;
    report.set_item("enqueued", enqueued(py, said.enqueued)?)?;
    report.set_item("kernels", said.kernels.to_vec())?;
    Ok(report.into_any())
}

/// What a stream was asked to do, as a dictionary.
pub fn enqueued(py: Python<'_>, work: Enqueued) -> PyResult<Bound<'_, PyDict>> {
    let report = PyDict::new(py);
    for (name, count) in [
        ("batches", work.batches),
        ("copies", work.copies),
        ("bytes", work.bytes),
        ("own_bytes", work.own_bytes),
        ("single_copies", work.single_copies),
        ("copies_by_sms", work.copies_by_sms),
        ("memory_operations", work.memory_operations),
        ("out_bytes", work.out_bytes),
        ("in_bytes", work.in_bytes),
        ("rail_puts", work.rail_puts),
        ("rail_bytes", work.rail_bytes),
        ("rail_signals", work.rail_signals),
        ("straight_puts", work.straight_puts),
        ("straight_bytes", work.straight_bytes),
    ] {
        report.set_item(name, count)?;
    }
    Ok(report)
}
