//! `PlannedExchange`: dispatch and combine of rows in memory of a device, planned beside its stream.
//!
//! Nothing here waits for the stream. A dispatch is enqueued; `finish` waits until all ranks have said how many rows they have,
//! without the GIL, and Ctrl-C ends it.

use std::sync::Arc;

use pyo3::prelude::*;
use sidelane::ep::planned::{self, PlannedBuilder, PlannedOutput};
use sidelane::plan::{Mode, Overflow};
use sidelane::{Dtype, ExpertParallel};

use crate::calls::first;
use crate::device::{OnStream, nowhere};
use crate::errors::raise;
use crate::input::Input;
use crate::parallel::{group_of, no_layer, placed};
use crate::planned_handle::{self, PlannedHandle};
use crate::settings;
use crate::slot::{Once, Slot, used_up};
use crate::tensor::{Element, Kind, Memory};
use crate::wait::{self, Interrupt};
use crate::world::Seat;

/// What outputs are called in errors.
const BUFFER: &str = "output buffer";

/// What is the same for all rows of an exchange.
#[derive(Clone)]
pub struct Shape {
    /// Elements of a row.
    pub hidden: usize,
    /// Their type.
    pub dtype: Dtype,
    /// Choices per token.
    pub top_k: usize,
    /// Where they lie.
    pub on: Arc<OnStream>,
}

/// What a combine brings.
enum Brought {
    /// The memory of an output buffer, which leaves it when the call is made.
    Buffer(Arc<Memory>),
    /// An output that a tensor was copied to.
    Copied(PlannedOutput),
}

/// MoE dispatch and combine over a group of ranks, on a stream of a GPU.
#[pyclass(frozen, module = "sidelane")]
pub struct PlannedExchange {
    seat: Arc<Seat>,
    slot: Arc<Slot<planned::PlannedExchange>>,
    shape: Shape,
    #[pyo3(get)]
    rank: u32,
    #[pyo3(get)]
    size: u32,
}

impl PlannedExchange {
    /// A collective call.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut planned::PlannedExchange) -> Result<T, sidelane::Error> + Send,
    ) -> PyResult<T> {
        self.seat.call(py, &self.slot, call)
    }

    /// Enters a dispatch in which this rank's input is refused: the others are told.
    fn refuse(&self, py: Python<'_>, error: PyErr) -> PyErr {
        let nowhere = nowhere();
        let tokens = planned::Tokens { x: &nowhere, experts: &nowhere, weights: &nowhere };
        first(py, self.call(py, |exchange| exchange.dispatch(tokens).map(drop)), error)
    }

    /// The same of a combine.
    fn refuse_combine(&self, py: Python<'_>, handle: &PlannedHandle, error: PyErr) -> PyErr {
        let refused = handle.slot.lend(|layout| self.call(py, |exchange| exchange.refuse_combine(layout)));
        first(py, refused, error)
    }

    /// The output that a tensor is, or one that it is copied to.
    fn brought(&self, y: &Input, handle: &PlannedHandle) -> PyResult<Brought> {
        if let Some(memory) = handle.outputs.find(y) {
            return if memory.is_owned() { Ok(Brought::Buffer(memory)) } else { Err(used_up(BUFFER)) };
        }
        let from = self.shape.on.range(y)?;
        let output = handle.slot.lend(|layout| layout.output().map_err(raise))?;
        let (to, len) = (output.rows(), from.len());
        y.rows(to.len() as usize / (self.shape.hidden * self.shape.dtype.size()), "rows")?;
        let copied = to.span(0, len).and_then(|to| self.shape.on.stream().copy(to, from.span(0, len)?));
        copied.map_err(raise)?;
        handle.count_copied(len);
        Ok(Brought::Copied(output))
    }
}

#[pymethods]
impl PlannedExchange {
    /// Collective: all ranks of the group choose alike, but for device and stream.
    #[new]
    #[pyo3(signature = (
        group, *, experts=None, top_k=1, hidden, dtype=None, expert_map=None, route="direct", align=1,
        max_tokens=4096, budget=None, overflow="error", seats=2, pool=256 << 20, device=None, stream=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords are its builder")]
    fn new(
        py: Python<'_>,
        group: &Bound<'_, PyAny>,
        experts: Option<u32>,
        top_k: u32,
        hidden: usize,
        dtype: Option<&Bound<'_, PyAny>>,
        expert_map: Option<Vec<Vec<u32>>>,
        route: &str,
        align: u32,
        max_tokens: u32,
        budget: Option<u32>,
        overflow: &str,
        seats: u32,
        pool: u64,
        device: Option<u32>,
        stream: Option<usize>,
    ) -> PyResult<Self> {
        let group = group_of(group)?;
        let (seat, members) = (group.get().seat(), group.get().get()?);
        let blank = ExpertParallel::builder(&members).map_err(raise)?;
        let set = || -> PyResult<(PlannedBuilder<'_>, Shape)> {
            let dtype = dtype.map_or(Ok(Dtype::Bf16), settings::dtype)?;
            let overflow: Overflow = settings::word("overflow", overflow)?;
            let mode = budget.map_or(Mode::Eager, |rows| Mode::Budget { rows, overflow });
            let builder = blank
                .clone()
                .top_k(top_k)
                .hidden(hidden)
                .dtype(dtype)
                .route(settings::word("route", route)?)
                .align(align)
                .max_tokens(max_tokens)
                .mode(mode);
            let builder = placed(builder, experts, expert_map.as_deref())?;
            let on = OnStream::open(py, device, stream)?;
            let shape = Shape { hidden, dtype, top_k: top_k as usize, on: Arc::clone(&on) };
            let builder = planned::PlannedExchange::builder(builder, Arc::clone(on.stream()));
            Ok((builder.seats(seats).pool(pool), shape))
        };
        let (slot, shape) =
            seat.build(py, "PlannedExchange", set(), || no_layer(&members), PlannedBuilder::build)?;
        let (rank, size) = (members.rank(), members.size());
        Ok(PlannedExchange { seat: Arc::clone(seat), slot, shape, rank, size })
    }

    #[getter]
    fn hidden(&self) -> usize {
        self.shape.hidden
    }

    #[getter]
    fn top_k(&self) -> usize {
        self.shape.top_k
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        Element::from(self.shape.dtype).name()
    }

    /// The number of its device.
    #[getter]
    fn device(&self) -> u32 {
        self.shape.on.device()
    }

    /// The handle of its stream.
    #[getter]
    fn stream(&self) -> usize {
        self.shape.on.handle()
    }

    /// Enqueues a dispatch: `x` [tokens, hidden], `experts` int32 and `weights` float32 [tokens, top_k], on the device.
    fn start_dispatch(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        experts: &Bound<'_, PyAny>,
        weights: &Bound<'_, PyAny>,
    ) -> PyResult<PlannedDispatch> {
        let on = &self.shape.on;
        let kind = Kind::of(x);
        let Shape { hidden, dtype, top_k, .. } = self.shape;
        let sent = match on.tokens([x, experts, weights], (hidden, dtype), top_k) {
            Ok(sent) => sent,
            Err(error) => return Err(self.refuse(py, error)),
        };
        let dispatch = self.call(py, |exchange| {
            let [x, experts, weights] = &sent.ranges;
            let dispatch = exchange.dispatch(planned::Tokens { x, experts, weights });
            on.keep(sent.inputs)?;
            dispatch
        })?;
        let (seat, shape) = (Arc::clone(&self.seat), self.shape.clone());
        Ok(PlannedDispatch { seat, shape, kind, dispatch: Once::new("dispatch", dispatch) })
    }

    /// The same, and its sizes: the rows of this rank's experts, and a handle.
    fn dispatch<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        experts: &Bound<'py, PyAny>,
        weights: &Bound<'py, PyAny>,
    ) -> PyResult<(Bound<'py, PyAny>, PlannedHandle)> {
        self.start_dispatch(py, x, experts, weights)?.finish(py)
    }

    /// Enqueues a combine: `out` [tokens, hidden] is there for what is enqueued next. `y` is `handle.output()`, used in place, or
    /// any tensor of the device, copied once.
    fn start_combine(
        &self,
        py: Python<'_>,
        y: &Bound<'_, PyAny>,
        handle: &PlannedHandle,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<PlannedCombine> {
        let on = &self.shape.on;
        let (hidden, element) = (self.shape.hidden, self.shape.dtype.into());
        let wide = |object: &Bound<'_, PyAny>, what: &'static str| {
            on.borrow(object, what)?.columns(hidden)?.of(element)
        };
        let brought = wide(y, "y").and_then(|y| Ok((self.brought(&y, handle)?, y)));
        let (brought, y) = match brought {
            Ok(brought) => brought,
            Err(error) => return Err(self.refuse_combine(py, handle, error)),
        };
        let sums = wide(out, "out").and_then(Input::writable).and_then(|out| Ok((on.range(&out)?, out)));
        let (range, out) = match sums {
            Ok(sums) => sums,
            Err(error) => return Err(self.refuse_combine(py, handle, error)),
        };
        let combine = handle.slot.lend(|layout| {
            self.call(py, |exchange| {
                let output = match brought {
                    Brought::Buffer(memory) => memory.take::<PlannedOutput>(),
                    Brought::Copied(output) => Some(output),
                };
                // Another thread may have brought it meanwhile.
                let Some(output) = output else { return exchange.refuse_combine(layout).map(|_| None) };
                let combine = exchange.combine(output, layout, &range);
                on.keep([y, out])?;
                combine.map(Some)
            })
        })?;
        let combine = Once::new("combine", combine.ok_or_else(|| used_up(BUFFER))?);
        Ok(PlannedCombine { seat: Arc::clone(&self.seat), combine })
    }

    /// The same, of which nobody will ask how it went: gives `out`.
    fn combine<'py>(
        &self,
        py: Python<'py>,
        y: &Bound<'py, PyAny>,
        handle: &PlannedHandle,
        out: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let started = self.start_combine(py, y, handle, out)?;
        started.combine.take()?.accepted().map_err(raise)?;
        Ok(out.clone())
    }

    fn __repr__(&self) -> String {
        let Shape { hidden, top_k, on, .. } = &self.shape;
        let (rank, size, device) = (self.rank, self.size, on.device());
        format!(
            "sidelane.PlannedExchange(rank={rank}, size={size}, top_k={top_k}, hidden={hidden}, device=cuda:{device})"
        )
    }
}

/// A dispatch that is enqueued.
#[pyclass(frozen, module = "sidelane")]
pub struct PlannedDispatch {
    seat: Arc<Seat>,
    shape: Shape,
    kind: Kind,
    dispatch: Once<planned::PlannedDispatch>,
}

#[pymethods]
impl PlannedDispatch {
    /// Waits until all ranks have said how many rows they have: not for the rows.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, PlannedHandle)> {
        let world = self.seat.world()?;
        let dispatch = self.dispatch.take()?;
        let (rows, layout) = wait::call(py, &world, Interrupt::Cancels, || dispatch.finish())?;
        planned_handle::give(py, rows, layout, &self.seat, &self.shape, self.kind)
    }

    /// With a budget: goes on without waiting. Sizes stand on the device.
    fn unfinished<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, PlannedHandle)> {
        self.seat.world()?;
        let (rows, layout) = self.dispatch.take()?.unfinished().map_err(raise)?;
        planned_handle::give(py, rows, layout, &self.seat, &self.shape, self.kind)
    }
}

/// A combine that is enqueued.
#[pyclass(frozen, module = "sidelane")]
pub struct PlannedCombine {
    seat: Arc<Seat>,
    combine: Once<planned::PlannedCombine>,
}

#[pymethods]
impl PlannedCombine {
    /// Waits until the rows are home, though not for their sums, and says how their bytes went.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let world = self.seat.world()?;
        let combine = self.combine.take()?;
        let report = wait::call(py, &world, Interrupt::Cancels, || combine.finish())?;
        planned_handle::report(py, &report)
    }
}
