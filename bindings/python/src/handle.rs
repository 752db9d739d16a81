//! Received rows, and handles: what a dispatch leaves to the calls that follow it.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;
use sidelane::Dtype;
use sidelane::device::DeviceRange;
use sidelane::ep::{ExpertRows, Report, RowIndex};

use crate::calls::Instance;
use crate::device::Place;
use crate::errors::{Wrong, raise};
use crate::lending::LendingCell;
use crate::tensor::{Element, Kind, Memory, Outputs, Tensor};
use crate::wait::{self, Interrupt};
use crate::world::OpenWorld;

/// What is the same for all rows of an `ExpertParallel`.
#[derive(Clone)]
pub struct Shape {
    /// Elements of a row that returns.
    pub hidden: usize,
    /// Their type.
    pub dtype: Dtype,
    /// Whether the caller has said it.
    pub dtype_given: bool,
    /// Elements and type of a row that is dispatched: others if it is a record.
    pub sent: (usize, Dtype),
    /// Choices per token.
    pub top_k: usize,
    /// What goes with a row has a column per choice.
    pub rank_major: bool,
    /// Ranks, and rows of a slot, where slots of a device are fixed.
    pub slots: Option<[usize; 2]>,
    /// Where rows lie.
    pub place: Place,
}

impl Shape {
    /// A tensor in memory of received rows, which keeps all of them.
    fn part(
        &self,
        rows: &Arc<ExpertRows>,
        range: &DeviceRange,
        (shape, element): (&[usize], Element),
    ) -> Tensor {
        let (address, bytes) = (range.address() as usize, range.len() as usize);
        let memory = Memory::at(address, bytes, Box::new(Arc::clone(rows)), Some(&self.place));
        Tensor::new(memory, shape, element)
    }

    /// A part of each slot, `[ranks, ..]`, where slots of a device are fixed.
    fn slots(&self, rows: &Arc<ExpertRows>, part: Part) -> PyResult<Option<Tensor>> {
        let (Some([ranks, tokens]), Some(slot)) = (self.slots, rows.slots()) else { return Ok(None) };
        let (offset, shape, element) = match part {
            Part::Used => (0, &[ranks][..], Element::I32),
            Part::Experts => (slot.experts_at(), &[ranks, tokens, self.top_k][..], Element::I32),
            Part::Weights => (slot.weights_at(), &[ranks, tokens, self.top_k][..], Element::F32),
            Part::Rows => (slot.rows_at(), &[ranks, tokens, self.hidden][..], self.dtype.into()),
        };
        let range = rows.range().map_err(raise)?;
        let range = range.part(offset, range.len() - offset).map_err(raise)?;
        let tensor = self.part(rows, &range, (shape, element));
        Ok(Some(tensor.apart(slot.bytes() as usize / element.size())))
    }

    /// The same for one dispatch, whose memory has users of its own.
    fn anew(&self) -> Self {
        Shape { place: self.place.anew(), ..self.clone() }
    }

    /// Received rows as a tensor; on a device, with what keeps them.
    fn rows_of(&self, rows: ExpertRows, row: (usize, Dtype)) -> PyResult<(Tensor, Option<Arc<ExpertRows>>)> {
        if self.place.on().is_none() {
            return Ok((tensor_of(rows, row, &self.place)?, None));
        }
        let (range, rows) = (rows.range().map_err(raise)?, Arc::new(rows));
        let tensor = match self.slots(&rows, Part::Rows)? {
            Some(tensor) => tensor,
            None => self.part(&rows, &range, (&[rows.len() as usize, row.0], row.1.into())),
        };
        Ok((tensor, Some(rows)))
    }
}

/// Parts of a slot.
#[derive(Clone, Copy)]
enum Part {
    Used,
    Experts,
    Weights,
    Rows,
}

/// Rows received on the host as a tensor.
pub fn tensor_of(rows: ExpertRows, (columns, dtype): (usize, Dtype), place: &Place) -> PyResult<Tensor> {
    let (shape, bytes) = ([rows.len() as usize, columns], rows.rows::<u8>().map_err(raise)?);
    let (address, bytes) = (bytes.as_ptr() as usize, bytes.len());
    Ok(Tensor::new(Memory::at(address, bytes, Box::new(rows), Some(place)), &shape, dtype.into()))
}

/// The placement of one dispatch.
#[pyclass(frozen, module = "sidelane")]
pub struct Handle {
    open_world: Arc<OpenWorld>,
    /// Lent to calls along it.
    pub cell: LendingCell<sidelane::ep::Handle>,
    shape: Shape,
    kind: Kind,
    /// Rows that landed on a device last, while a user holds them; slots stay in place.
    received: Mutex<Weak<ExpertRows>>,
    _slots: Option<Arc<ExpertRows>>,
    /// Output buffers that Python has.
    pub outputs: Outputs,
    #[pyo3(get)]
    rows: usize,
    #[pyo3(get)]
    pub tokens: usize,
}

impl Instance {
    /// A handle of a layout that was made for tokens of this kind.
    pub fn layout(&self, handle: sidelane::ep::Handle, kind: Kind) -> Handle {
        self.handle((handle, None), kind, self.shape.anew())
    }

    fn handle(
        &self,
        (handle, rows): (sidelane::ep::Handle, Option<&Arc<ExpertRows>>),
        kind: Kind,
        shape: Shape,
    ) -> Handle {
        Handle {
            open_world: Arc::clone(&self.open_world),
            rows: handle.rows() as usize,
            tokens: handle.tokens() as usize,
            cell: LendingCell::new("handle", handle),
            kind,
            received: Mutex::new(rows.map(Arc::downgrade).unwrap_or_default()),
            _slots: shape.slots.and(rows.cloned()),
            shape,
            outputs: Outputs::default(),
        }
    }

    /// What came of a dispatch, as Python sees it.
    pub fn received<'py>(
        &self,
        py: Python<'py>,
        (rows, handle): (ExpertRows, sidelane::ep::Handle),
        kind: Kind,
    ) -> PyResult<(Bound<'py, PyAny>, Handle)> {
        let shape = self.shape.anew();
        let (tensor, rows) = shape.rows_of(rows, shape.sent)?;
        Ok((kind.give(py, tensor)?, self.handle((handle, rows.as_ref()), kind, shape)))
    }

    /// Rows that landed along a handle, of so many elements of this type.
    pub fn received_along<'py>(
        &self,
        py: Python<'py>,
        (rows, handle): (ExpertRows, &Handle),
        kind: Kind,
        row: (usize, Dtype),
    ) -> PyResult<Bound<'py, PyAny>> {
        let (tensor, rows) = handle.shape.rows_of(rows, row)?;
        if let Some(rows) = rows {
            *handle.received.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&rows);
        }
        kind.give(py, tensor)
    }
}

impl Handle {
    /// What came with the rows, on a device.
    fn on_device<'py>(
        &self,
        py: Python<'py>,
        ask: impl FnOnce(&Shape, &Arc<ExpertRows>) -> PyResult<Option<Tensor>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        if self.shape.place.on().is_none() {
            return Ok(None);
        }
        self.open_world.world()?;
        let received = self.received.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        let received = received.ok_or_else(|| {
            let message =
                "the rows of this dispatch are gone, and what came with them: ask while you have them";
            Wrong::Closed.error("RowsGone", message, &[])
        })?;
        ask(&self.shape, &received)?.map(|tensor| self.kind.give(py, tensor)).transpose()
    }

    /// Something that the host knows.
    fn ask<'py, T>(
        &self,
        py: Python<'py>,
        ask: impl FnOnce(&sidelane::ep::Handle) -> T,
        give: impl FnOnce(T) -> Tensor,
    ) -> PyResult<Bound<'py, PyAny>> {
        let said = self.cell.lend(|handle| Ok(ask(handle)))?;
        self.kind.give(py, give(said))
    }

    /// A report.
    fn told<'py>(
        &self,
        py: Python<'py>,
        ask: impl FnOnce(&sidelane::ep::Handle) -> Result<Report, sidelane::Error>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let report = self.cell.lend(|handle| ask(handle).map_err(raise))?;
        Ok(pythonize::pythonize(py, &report)?)
    }
}

#[pymethods]
impl Handle {
    /// Rows of each expert of this rank; empty where sizes stay on a device, and rank-major there.
    #[getter]
    fn tokens_per_expert(&self) -> PyResult<Vec<i64>> {
        self.cell.lend(|handle| Ok(handle.tokens_per_expert().to_vec()))
    }

    /// The same, pads counted.
    #[getter]
    fn padded_tokens_per_expert(&self) -> PyResult<Vec<i64>> {
        self.cell.lend(|handle| Ok(handle.padded_tokens_per_expert().to_vec()))
    }

    /// Rows that each rank needed.
    #[getter]
    fn required_rows(&self) -> PyResult<Vec<u32>> {
        self.cell.lend(|handle| Ok(handle.required_rows().to_vec()))
    }

    /// Routing weight of each row `[rows]`, 0 for pads; rank-major `[rows, top_k]`, in fixed slots
    /// of a device `[ranks, max_tokens, top_k]`.
    #[getter]
    fn row_weights<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let weights = self.on_device(py, |shape, rows| match shape.slots(rows, Part::Weights)? {
            Some(weights) => Ok(Some(weights)),
            None => {
                let (weights, len) = (rows.weights().map_err(raise)?, rows.len() as usize);
                let columns = if shape.rank_major { &[len, shape.top_k][..] } else { &[len] };
                Ok(Some(shape.part(rows, &weights, (columns, Element::F32))))
            }
        })?;
        if let Some(weights) = weights {
            return Ok(weights);
        }
        let columns = if self.shape.rank_major { &[self.rows, self.shape.top_k][..] } else { &[self.rows] };
        let give = |values| Tensor::of(values, columns, Element::F32);
        self.ask(py, |handle| handle.row_weights().to_vec(), give)
    }

    /// Rank-major: the local expert of each row and choice, `[rows, top_k]`, in fixed slots of a
    /// device `[ranks, max_tokens, top_k]`; otherwise empty.
    #[getter]
    fn row_experts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let experts = self.on_device(py, |shape, rows| match shape.slots(rows, Part::Experts)? {
            None if shape.rank_major => {
                let experts = rows.experts().map_err(raise)?;
                let columns = [rows.len() as usize, shape.top_k];
                Ok(Some(shape.part(rows, experts, (&columns, Element::I32))))
            }
            experts => Ok(experts),
        })?;
        if let Some(experts) = experts {
            return Ok(experts);
        }
        let give = |values: Vec<i32>| {
            let rows = values.len() / self.shape.top_k;
            Tensor::of(values, &[rows, self.shape.top_k], Element::I32)
        };
        self.ask(py, |handle| handle.row_experts().to_vec(), give)
    }

    /// In fixed slots of a device: the number of rows that each rank's slot uses, int32 `[ranks]`.
    #[getter]
    fn used<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.on_device(py, |shape, rows| shape.slots(rows, Part::Used))
    }

    /// On a device: rows of each expert of this rank, then the same with pads, int64 `[2,
    /// experts]`; rank-major, rows that chose each, int64 `[experts]`. None in fixed slots.
    #[getter]
    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.on_device(py, |shape, rows| {
            if shape.slots.is_some() {
                return Ok(None);
            }
            let counts = rows.counts().map_err(raise)?;
            let numbers = counts.len() as usize / 8;
            let columns = if shape.rank_major { &[numbers][..] } else { &[2, numbers / 2] };
            Ok(Some(shape.part(rows, &counts, (columns, Element::I64))))
        })
    }

    /// Which choices were dropped, for want of room or by a mask, `[tokens, top_k]`, on the host;
    /// `[0, top_k]` where sizes stay on a device.
    #[getter]
    fn dropped<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let top_k = self.shape.top_k;
        let ask = |handle: &sidelane::ep::Handle| {
            let mut dropped = handle.dropped().to_vec();
            let known = !handle.required_rows().is_empty();
            dropped.resize(if known { self.tokens * top_k } else { 0 }, false);
            dropped
        };
        let give = |values: Vec<bool>| {
            let tokens = values.len() / top_k;
            Tensor::of(values, &[tokens, top_k], Element::Bool)
        };
        self.ask(py, ask, give)
    }

    /// On a device, in slots or with graphs="slots": the same as the stream finds it, bool
    /// `[tokens, top_k]`. None elsewhere.
    #[getter]
    fn dropped_mask<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let mask = self.cell.lend(|handle| Ok(handle.dropped_mask().ok().cloned()))?;
        let Some(mask) = mask else { return Ok(None) };
        let columns = [self.tokens, self.shape.top_k];
        self.on_device(py, |shape, rows| Ok(Some(shape.part(rows, &mask, (&columns, Element::Bool)))))
    }

    /// Where rows lie, if not as they arrived, `[rows]`. On the host, after relays that copied
    /// spans: visible row v lies at index[v]. On a device where copy engines relay: visible row v
    /// is row index[v] of `arrived`, -1 for pads.
    #[getter]
    fn index<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let index = self.on_device(py, |shape, rows| {
            let index = rows.arrivals().map(|(_, index)| index);
            Ok(index.map(|index| shape.part(rows, index, (&[index.len() as usize / 4], Element::I32))))
        })?;
        if index.is_some() {
            return Ok(index);
        }
        let landing = self.cell.lend(|handle| {
            let landing = |index: &RowIndex| index.landing().iter().map(|&row| i64::from(row)).collect();
            Ok(handle.index().map(landing))
        })?;
        let give = |rows: Vec<i64>| {
            let len = rows.len();
            self.kind.give(py, Tensor::of(rows, &[len], Element::I64))
        };
        landing.map(give).transpose()
    }

    /// On a device where copy engines relay: rows as they arrived, `[.., hidden]` or `[..,
    /// record]`.
    #[getter]
    fn arrived<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.on_device(py, |shape, rows| {
            let Some((arrived, _)) = rows.arrivals() else { return Ok(None) };
            // Gradients along a layout are rows also where tokens are dispatched as records.
            let row_bytes = rows.range().map_err(raise)?.len() as usize / (rows.len() as usize).max(1);
            let sent = shape.sent.0 * shape.sent.1.size() == row_bytes;
            let (columns, dtype) = if sent { shape.sent } else { (shape.hidden, shape.dtype) };
            let arrivals = arrived.len() as usize / (columns * dtype.size());
            Ok(Some(shape.part(rows, arrived, (&[arrivals, columns], dtype.into()))))
        })
    }

    /// Bytes that calls along this handle have copied because rows did not lie in an output buffer.
    #[getter]
    fn copied_bytes(&self) -> PyResult<u64> {
        self.cell.lend(|handle| Ok(handle.copied_bytes()))
    }

    /// How the last call along this handle ended on a device: 0 is well. Final once the stream has
    /// passed it.
    #[getter]
    fn status(&self) -> PyResult<u32> {
        self.cell.lend(|handle| Ok(handle.status_now().0))
    }

    /// The same for kernels: the address of a word of 32 bits, as the device reaches it.
    #[getter]
    fn status_address(&self) -> PyResult<u64> {
        self.cell.lend(|handle| Ok(handle.status().map_err(raise)?.address()))
    }

    /// A buffer `[rows, hidden]`, in fixed slots of a device `[ranks, max_tokens, hidden]`, that a
    /// combine takes without a copy. Its contents are undefined.
    fn output<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        // On a device this may wait until the stream and peers have read earlier outputs.
        let output = self.cell.lend(|handle| match &self.shape.place {
            Place::Host(_) => handle.output().map_err(raise),
            Place::Device(_) => {
                wait::call(py, &*self.open_world.world()?, Interrupt::Ends, || handle.output())
            }
        })?;
        let Shape { hidden, dtype, place, .. } = &self.shape;
        let rows = output.len() as usize;
        let memory = self.outputs.add(output, place)?;
        let shape = match self.shape.slots {
            Some([ranks, tokens]) => &[ranks, tokens, *hidden][..],
            None => &[rows, *hidden],
        };
        self.kind.give(py, Tensor::new(memory, shape, (*dtype).into()))
    }

    /// Records that this stream uses memory of the handle: rows, what came with them, outputs.
    /// Streams that DLPack lends to are known without it. What is given back is written to again
    /// only behind what all of them were given before. On the host it records nothing.
    fn used_on(&self, stream: usize) {
        if let Some(lender) = self.shape.place.lender() {
            lender.used_on(stream);
        }
    }

    /// How the bytes of the dispatch went. On a device this waits until its rows have landed.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.told(py, sidelane::ep::Handle::report)
    }

    /// How the last combine along this handle went, or the last gradient that returned rows. On a
    /// device this waits until the rows are back, though not for their sums, and raises the refusal
    /// of that combine.
    fn return_report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.told(py, sidelane::ep::Handle::return_report)
    }

    fn __repr__(&self) -> String {
        format!("sidelane.Handle(tokens={}, rows={})", self.tokens, self.rows)
    }
}
