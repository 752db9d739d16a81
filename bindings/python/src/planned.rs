//! `PlannedExchange`: dispatch and combine of rows in memory of a device, planned beside its stream.
//!
//! Nothing here waits for the stream. A dispatch is enqueued; `finish` waits until all ranks have said how many rows they have,
//! without the GIL, and Ctrl-C ends it.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use sidelane::ep::planned::{self, PlannedBuilder, PlannedOutput};
use sidelane::plan::{Mode, Overflow};
use sidelane::{Dtype, ExpertParallel};

use crate::calls::first;
use crate::device::{OnStream, nowhere, used_up};
use crate::errors::raise;
use crate::input::Input;
use crate::parallel::{group_of, map};
use crate::planned_handle::{self, PlannedHandle};
use crate::settings;
use crate::slot::Slot;
use crate::tensor::{Element, Kind, Memory};
use crate::wait::{self, Interrupt};
use crate::world::Seat;

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
        let world = self.seat.world()?;
        self.slot.lend(|exchange| wait::call(py, &world, Interrupt::Cancels, || call(exchange)))
    }

    /// Enters a dispatch in which this rank's input is refused: the others are told.
    fn refuse(&self, py: Python<'_>, error: PyErr) -> PyErr {
        let nowhere = nowhere();
        let tokens = planned::Tokens { x: &nowhere, experts: &nowhere, weights: &nowhere };
        first(py, self.call(py, |exchange| exchange.dispatch(tokens).map(drop)), error)
    }

    /// The same of a combine, with whatever output there is.
    fn refuse_combine(
        &self,
        py: Python<'_>,
        y: Option<PlannedOutput>,
        handle: &PlannedHandle,
        error: PyErr,
    ) -> PyErr {
        let nowhere = nowhere();
        let refused = handle.slot.lend(|layout| {
            let y = y.map_or_else(|| layout.output(), Ok);
            self.call(py, |exchange| exchange.combine(y?, layout, &nowhere).map(drop))
        });
        first(py, refused, error)
    }

    /// The output that a tensor is, or one that it is copied to.
    fn brought(&self, y: &Input, handle: &PlannedHandle) -> PyResult<(PlannedOutput, Option<Arc<Memory>>)> {
        if let Some(memory) = handle.buffer_of(y) {
            let output = memory.take::<PlannedOutput>().ok_or_else(|| used_up("output buffer"))?;
            return Ok((output, Some(memory)));
        }
        let from = self.shape.on.range(y)?;
        let output = handle.slot.lend(|layout| layout.output().map_err(raise))?;
        let (to, len) = (output.rows(), from.len());
        y.rows(to.len() as usize / (self.shape.hidden * self.shape.dtype.size()), "rows")?;
        let copied = to.span(0, len).and_then(|to| self.shape.on.stream().copy(to, from.span(0, len)?));
        copied.map_err(raise)?;
        handle.count_copied(len);
        Ok((output, None))
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
            let builder = match (experts, expert_map) {
                (Some(experts), None) => builder.experts(experts),
                (experts, Some(held)) => builder.expert_map(map(experts, &held)?),
                (None, None) => {
                    return Err(settings::wrong("experts", "needed, unless there is an expert_map"));
                }
            };
            let on = OnStream::open(py, device, stream)?;
            let shape = Shape { hidden, dtype, top_k: top_k as usize, on: Arc::clone(&on) };
            let builder = planned::PlannedExchange::builder(builder, Arc::clone(on.stream()));
            Ok((builder.seats(seats).pool(pool), shape))
        };
        let (builder, shape) = match set() {
            Ok(set) => set,
            Err(error) => {
                // Refused by the library, so that the others are told.
                let refused = seat.meeting(py, || blank.clone().top_k(0).build());
                return Err(first(py, refused, error));
            }
        };
        let exchange = seat.meeting(py, || builder.build())?;
        let (rank, size) = (exchange.rank(), exchange.size());
        let slot = Arc::new(Slot::new("PlannedExchange", exchange));
        let child = Arc::downgrade(&slot);
        seat.adopt(child);
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
        let checked = || -> PyResult<_> {
            let x = on.borrow(x, "x")?.columns(self.shape.hidden)?.of(self.shape.dtype.into())?;
            let experts = on.borrow(experts, "experts")?.columns(self.shape.top_k)?.of(Element::I32)?;
            let weights = on.borrow(weights, "weights")?.columns(self.shape.top_k)?.of(Element::F32)?;
            let ranges = (on.range(&x)?, on.range(&experts)?, on.range(&weights)?);
            Ok(([x, experts, weights], ranges))
        };
        let (inputs, (x, experts, weights)) = match checked() {
            Ok(checked) => checked,
            Err(error) => return Err(self.refuse(py, error)),
        };
        let dispatch = self.call(py, |exchange| {
            let tokens = planned::Tokens { x: &x, experts: &experts, weights: &weights };
            let dispatch = exchange.dispatch(tokens);
            on.keep(inputs)?;
            dispatch
        })?;
        let (seat, shape) = (Arc::clone(&self.seat), self.shape.clone());
        Ok(PlannedDispatch { seat, shape, kind, dispatch: Mutex::new(Some(dispatch)) })
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
        let ((output, memory), y) = match brought {
            Ok(brought) => brought,
            Err(error) => return Err(self.refuse_combine(py, None, handle, error)),
        };
        let sums = wide(out, "out").and_then(Input::writable).and_then(|out| Ok((on.range(&out)?, out)));
        let (range, out) = match sums {
            Ok(sums) => sums,
            Err(error) => return Err(self.refuse_combine(py, Some(output), handle, error)),
        };
        let combine = handle.slot.lend(|layout| {
            self.call(py, |exchange| {
                let combine = exchange.combine(output, layout, &range);
                on.keep([y, out])?;
                combine
            })
        })?;
        // Whoever looks at the buffer once more looks at memory that is there.
        drop(memory);
        Ok(PlannedCombine { seat: Arc::clone(&self.seat), combine: Mutex::new(Some(combine)) })
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
        take(&started.combine, "combine")?.accepted().map_err(raise)?;
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

fn take<T>(held: &Mutex<Option<T>>, what: &str) -> PyResult<T> {
    held.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or_else(|| used_up(what))
}

/// A dispatch that is enqueued.
#[pyclass(frozen, module = "sidelane")]
pub struct PlannedDispatch {
    seat: Arc<Seat>,
    shape: Shape,
    kind: Kind,
    dispatch: Mutex<Option<planned::PlannedDispatch>>,
}

#[pymethods]
impl PlannedDispatch {
    /// Waits until all ranks have said how many rows they have: not for the rows.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, PlannedHandle)> {
        let world = self.seat.world()?;
        let dispatch = take(&self.dispatch, "dispatch")?;
        let (rows, layout) = wait::call(py, &world, Interrupt::Cancels, || dispatch.finish())?;
        planned_handle::give(py, rows, layout, &self.shape, self.kind)
    }

    /// With a budget: goes on without waiting. Sizes stand on the device.
    fn unfinished<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, PlannedHandle)> {
        self.seat.world()?;
        let (rows, layout) = take(&self.dispatch, "dispatch")?.unfinished().map_err(raise)?;
        planned_handle::give(py, rows, layout, &self.shape, self.kind)
    }
}

/// A combine that is enqueued.
#[pyclass(frozen, module = "sidelane")]
pub struct PlannedCombine {
    seat: Arc<Seat>,
    combine: Mutex<Option<planned::PlannedCombine>>,
}

#[pymethods]
impl PlannedCombine {
    /// Waits until the rows are home, though not for their sums, and says how their bytes went.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let world = self.seat.world()?;
        let combine = take(&self.combine, "combine")?;
        let report = wait::call(py, &world, Interrupt::Cancels, || combine.finish())?;
        planned_handle::report(py, &report)
    }
}
