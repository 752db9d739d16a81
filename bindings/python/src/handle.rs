//! Handles: what a dispatch leaves to the calls that follow it.

use std::sync::Arc;

use pyo3::prelude::*;
use sidelane::Dtype;
use sidelane::memory::Pool;

use crate::errors::raise;
use crate::slot::Slot;
use crate::tensor::{Element, Kind, Outputs, Tensor};

/// What is the same for all rows of an `ExpertParallel`.
#[derive(Clone)]
pub struct Shape {
    /// Elements of a row that comes home.
    pub hidden: usize,
    /// Their type.
    pub dtype: Dtype,
    /// Choices per token.
    pub top_k: usize,
    /// What goes with a row has a column per choice.
    pub rank_major: bool,
    /// Where rows lie.
    pub pool: Arc<Pool>,
}

/// The placement of one dispatch.
#[pyclass(frozen, module = "sidelane")]
pub struct Handle {
    /// Lent to calls along it.
    pub slot: Slot<sidelane::ep::Handle>,
    shape: Shape,
    kind: Kind,
    /// Output buffers that Python has.
    pub outputs: Outputs,
    #[pyo3(get)]
    rows: usize,
    #[pyo3(get)]
    tokens: usize,
}

impl Handle {
    /// Of a dispatch whose tokens were of this kind.
    pub fn new(handle: sidelane::ep::Handle, shape: Shape, kind: Kind) -> Self {
        let (rows, tokens) = (handle.rows() as usize, handle.tokens() as usize);
        Handle { slot: Slot::new("handle", handle), shape, kind, outputs: Outputs::default(), rows, tokens }
    }

    fn ask<'py, T>(
        &self,
        py: Python<'py>,
        ask: impl FnOnce(&sidelane::ep::Handle) -> T,
        give: impl FnOnce(T) -> Tensor,
    ) -> PyResult<Bound<'py, PyAny>> {
        let said = self.slot.lend(|handle| Ok(ask(handle)))?;
        self.kind.give(py, give(said))
    }
}

#[pymethods]
impl Handle {
    /// Rows of each expert of this rank.
    #[getter]
    fn tokens_per_expert(&self) -> PyResult<Vec<i64>> {
        self.slot.lend(|handle| Ok(handle.tokens_per_expert().to_vec()))
    }

    /// The same, pads counted.
    #[getter]
    fn padded_tokens_per_expert(&self) -> PyResult<Vec<i64>> {
        self.slot.lend(|handle| Ok(handle.padded_tokens_per_expert().to_vec()))
    }

    /// Rows that each rank needed.
    #[getter]
    fn required_rows(&self) -> PyResult<Vec<u32>> {
        self.slot.lend(|handle| Ok(handle.required_rows().to_vec()))
    }

    /// Routing weight of each row `[rows]`; rank-major `[rows, top_k]`.
    #[getter]
    fn row_weights<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let columns = if self.shape.rank_major { &[self.rows, self.shape.top_k][..] } else { &[self.rows] };
        self.ask(
            py,
            |handle| handle.row_weights().to_vec(),
            |values| Tensor::of(values, columns, Element::F32),
        )
    }

    /// Rank-major: the local expert of each row and choice, `[rows, top_k]`; otherwise empty.
    #[getter]
    fn row_experts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let give = |values: Vec<i32>| {
            let rows = values.len() / self.shape.top_k;
            Tensor::of(values, &[rows, self.shape.top_k], Element::I32)
        };
        self.ask(py, |handle| handle.row_experts().to_vec(), give)
    }

    /// Which choices were dropped for want of room, `[tokens, top_k]`.
    #[getter]
    fn dropped<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let (tokens, top_k) = (self.tokens, self.shape.top_k);
        let give = |mut values: Vec<bool>| {
            values.resize(tokens * top_k, false);
            Tensor::of(values, &[tokens, top_k], Element::Bool)
        };
        self.ask(py, |handle| handle.dropped().to_vec(), give)
    }

    /// Where rows lie that were handed on in spans, `[rows]`: row v in visible order lies at index[v].
    #[getter]
    fn index<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let landing = self.slot.lend(|handle| {
            Ok(handle
                .index()
                .map(|index| index.landing().iter().map(|&row| i64::from(row)).collect::<Vec<_>>()))
        })?;
        let give = |rows: Vec<i64>| {
            let len = rows.len();
            self.kind.give(py, Tensor::of(rows, &[len], Element::I64))
        };
        landing.map(give).transpose()
    }

    /// Bytes that calls along this handle have copied because rows did not lie in an output buffer.
    #[getter]
    fn copied_bytes(&self) -> PyResult<u64> {
        self.slot.lend(|handle| Ok(handle.copied_bytes()))
    }

    /// A buffer `[rows, hidden]` that a combine takes without a copy. Its contents are undefined.
    fn output<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let output = self.slot.lend(|handle| handle.output().map_err(raise))?;
        let memory = self.outputs.of_host(output, &self.shape.pool)?;
        self.kind.give(py, Tensor::new(memory, &[self.rows, self.shape.hidden], self.shape.dtype.into()))
    }

    /// How the bytes of the dispatch went, as planned and as moved.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let report = self.slot.lend(|handle| Ok(handle.report().clone()))?;
        Ok(pythonize::pythonize(py, &report)?)
    }

    fn __repr__(&self) -> String {
        format!("sidelane.Handle(tokens={}, rows={})", self.tokens, self.rows)
    }
}
