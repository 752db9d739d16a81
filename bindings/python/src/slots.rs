//! `SlotsExchange`: dispatch and combine in fixed slots, which a stream carries out alone.
//!
//! Every address and size is the same in every call, so tensors may be asked for once. What a call refuses is not enqueued, and can be
//! made again: nobody is told, as peers' streams wait for the call that comes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use sidelane::Dtype;
use sidelane::device::Range;
use sidelane::ep::stream::StreamExchangeBuilder;
use sidelane::ep::{StreamExchange, StreamTokens};
use sidelane::error::PlanError;
use sidelane::plan::{ExpertMap, SlotShape};
use sidelane::world::{Detour, Registration};

use crate::device::OnStream;
use crate::errors::raise;
use crate::input::Input;
use crate::parallel::{group_of, map_of, no_layer};
use crate::planned_handle::enqueued;
use crate::settings;
use crate::slot::Slot;
use crate::tensor::{Element, Memory, Tensor};
use crate::wait::{self, Interrupt};
use crate::world::Seat;

/// MoE dispatch and combine in slots, on a stream of a GPU.
#[pyclass(frozen, module = "sidelane")]
pub struct SlotsExchange {
    seat: Arc<Seat>,
    slot: Arc<Slot<StreamExchange>>,
    on: Arc<OnStream>,
    dtype: Dtype,
    slots: SlotShape,
    received: Range,
    partials: Range,
    /// Of the dispatch that waits for its combine.
    tokens: AtomicUsize,
    #[pyo3(get)]
    rank: u32,
    #[pyo3(get)]
    size: u32,
    #[pyo3(get)]
    hidden: usize,
    #[pyo3(get)]
    top_k: usize,
}

impl SlotsExchange {
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut StreamExchange) -> Result<T, sidelane::Error> + Send,
    ) -> PyResult<T> {
        let world = self.seat.world()?;
        self.slot.lend(|exchange| wait::call(py, &world, Interrupt::Ends, || call(exchange)))
    }

    /// Something of each slot, from `offset` on: `[ranks, ..]`.
    fn of_slots(&self, offset: u64, shape: &[usize], element: Element) -> Tensor {
        let address = (self.received.address() + offset) as usize;
        let bytes = (self.received.len() - offset) as usize;
        let memory = Memory::at(address, bytes, Box::new(self.received.clone()), None);
        let tensor = Tensor::new(memory, shape, element).apart(self.slots.bytes() as usize / element.size());
        tensor.on(&self.on)
    }

    fn ranks_and_tokens(&self) -> (usize, usize) {
        (self.size as usize, self.slots.max_tokens() as usize)
    }
}

#[pymethods]
impl SlotsExchange {
    /// Collective: all ranks of the group choose alike, but for device and stream.
    #[new]
    #[pyo3(signature = (
        group, *, experts=None, top_k=1, hidden, dtype=None, expert_map=None, max_tokens=128, device=None, stream=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords are its builder")]
    fn new(
        py: Python<'_>,
        group: &Bound<'_, PyAny>,
        experts: Option<u32>,
        top_k: u32,
        hidden: u32,
        dtype: Option<&Bound<'_, PyAny>>,
        expert_map: Option<Vec<Vec<u32>>>,
        max_tokens: u32,
        device: Option<u32>,
        stream: Option<usize>,
    ) -> PyResult<Self> {
        let group = group_of(group)?;
        let (seat, members) = (group.get().seat(), group.get().get()?);
        let set = || -> PyResult<_> {
            let dtype = dtype.map_or(Ok(Dtype::Bf16), settings::dtype)?;
            let map = map_of(experts, expert_map.as_deref())?;
            let on = OnStream::open(py, device, stream)?;
            Ok(((dtype, map, Arc::clone(&on)), (dtype, on)))
        };
        let build = |(dtype, map, on): (Dtype, Option<ExpertMap>, Arc<OnStream>)| {
            let builder = StreamExchange::builder(&members, on.stream().context());
            let builder = builder.experts(experts.unwrap_or(0)).top_k(top_k).hidden(hidden);
            let builder = builder.dtype(dtype).max_tokens(max_tokens);
            map.into_iter().fold(builder, StreamExchangeBuilder::expert_map).build()
        };
        let (slot, (dtype, on)) = seat.build(py, "SlotsExchange", set(), || no_layer(&members), build)?;
        let (received, partials, slots) = slot.lend(|exchange| {
            Ok((exchange.received().clone(), exchange.partials().map_err(raise)?, exchange.shape()))
        })?;
        let (rank, size) = (members.rank(), members.size());
        let (seat, tokens) = (Arc::clone(seat), AtomicUsize::new(0));
        let (hidden, top_k) = (hidden as usize, top_k as usize);
        Ok(SlotsExchange {
            seat,
            slot,
            on,
            dtype,
            slots,
            received,
            partials,
            tokens,
            rank,
            size,
            hidden,
            top_k,
        })
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        Element::from(self.dtype).name()
    }

    #[getter]
    fn max_tokens(&self) -> u32 {
        self.slots.max_tokens()
    }

    /// The number of its device.
    #[getter]
    fn device(&self) -> u32 {
        self.on.device()
    }

    /// The handle of its stream.
    #[getter]
    fn stream(&self) -> usize {
        self.on.handle()
    }

    /// How many rows each rank's slot uses, int32 `[ranks]`.
    #[getter]
    fn used(&self) -> Tensor {
        self.of_slots(0, &[self.size as usize], Element::I32)
    }

    /// The rows of each rank's slot, `[ranks, max_tokens, hidden]`; zeros where they are not used.
    #[getter]
    fn rows(&self) -> Tensor {
        let (ranks, tokens) = self.ranks_and_tokens();
        self.of_slots(self.slots.rows_at(), &[ranks, tokens, self.hidden], self.dtype.into())
    }

    /// The local experts of each row, int32 `[ranks, max_tokens, top_k]`; -1 for those elsewhere.
    #[getter]
    fn row_experts(&self) -> Tensor {
        let (ranks, tokens) = self.ranks_and_tokens();
        self.of_slots(self.slots.experts_at(), &[ranks, tokens, self.top_k], Element::I32)
    }

    /// The routing weights beside them, `[ranks, max_tokens, top_k]`.
    #[getter]
    fn row_weights(&self) -> Tensor {
        let (ranks, tokens) = self.ranks_and_tokens();
        self.of_slots(self.slots.weights_at(), &[ranks, tokens, self.top_k], Element::F32)
    }

    /// Where experts leave their partial rows, `[ranks, max_tokens, hidden]`: what this rank's experts make of each row, weighted and
    /// added up.
    #[getter]
    fn partials(&self) -> Tensor {
        let (ranks, tokens) = self.ranks_and_tokens();
        let (address, bytes) = (self.partials.address() as usize, self.partials.len() as usize);
        let memory = Memory::at(address, bytes, Box::new(self.partials.clone()), None);
        let tensor = Tensor::new(memory, &[ranks, tokens, self.hidden], self.dtype.into());
        tensor.on(&self.on)
    }

    /// Enqueues a dispatch: behind it in the stream, slots are what all ranks sent.
    fn dispatch(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        experts: &Bound<'_, PyAny>,
        weights: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.start_dispatch(py, x, experts, weights)?;
        self.finish_dispatch(py)
    }

    /// First half: sends. What is enqueued before the second half runs meanwhile.
    fn start_dispatch(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        experts: &Bound<'_, PyAny>,
        weights: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let on = &self.on;
        let sent = on.tokens([x, experts, weights], (self.hidden, self.dtype), self.top_k)?;
        let [x, choices @ ..] = &sent.inputs;
        let (count, max) = (x.len() / self.hidden, self.slots.max_tokens());
        choices.iter().try_for_each(|choices| choices.rows(count, "tokens"))?;
        let tokens = u32::try_from(count).unwrap_or(u32::MAX);
        if tokens > max {
            return Err(raise(PlanError::TooManyTokens { tokens, max }));
        }
        self.call(py, |exchange| {
            let [rows, experts, weights] = &sent.ranges;
            let tokens = StreamTokens {
                count: tokens,
                rows: rows.span(0, rows.len())?,
                experts: experts.span(0, experts.len())?,
                weights: weights.span(0, weights.len())?,
            };
            let started = exchange.start_dispatch(on.stream(), &tokens);
            on.keep(sent.inputs)?;
            started
        })?;
        self.tokens.store(count, Ordering::Relaxed);
        Ok(())
    }

    /// Second half: the stream waits for the rows of all ranks.
    fn finish_dispatch(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |exchange| exchange.finish_dispatch(self.on.stream()))
    }

    /// Enqueues a combine: behind it in the stream, `out` [tokens, hidden] is the sum of each token's partial rows.
    fn combine<'py>(&self, py: Python<'py>, out: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        // Before anything is sent: what its library enqueues is behind what made the partial rows.
        let sums = self.sums(out)?;
        self.start_combine(py)?;
        self.sum(py, sums)?;
        Ok(out.clone())
    }

    /// First half: sends the partial rows home.
    fn start_combine(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |exchange| exchange.start_combine(self.on.stream()))
    }

    /// Second half.
    fn finish_combine<'py>(&self, py: Python<'py>, out: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let sums = self.sums(out)?;
        self.sum(py, sums)?;
        Ok(out.clone())
    }

    /// Instead of a combine: what was received has been read, and nothing comes home.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |exchange| exchange.release(self.on.stream()))
    }

    /// Waits until everything in the stream is done, and raises what went wrong.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        let world = self.seat.world()?;
        self.slot
            .lend(|exchange| wait::meeting(py, || world.cancel(), || exchange.synchronize(self.on.stream())))
    }

    /// Raises what is known to be wrong, without waiting.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |exchange| exchange.status())
    }

    /// What a dispatch and a combine ask of the stream.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let said = self.slot.lend(|exchange| Ok(exchange.report()))?;
        let report = PyDict::new(py);
        report.set_item("dispatch", enqueued(py, said.dispatch)?)?;
        report.set_item("combine", enqueued(py, said.combine)?)?;
        report.set_item("kernels", said.kernels)?;
        report.set_item("same_device", said.same_device)?;
        report.set_item("detour", said.detour.map(Detour::name))?;
        report.set_item("registration", said.registration.map(Registration::name))?;
        Ok(report)
    }

    fn __repr__(&self) -> String {
        let SlotsExchange { rank, size, top_k, hidden, on, .. } = self;
        let device = on.device();
        format!(
            "sidelane.SlotsExchange(rank={rank}, size={size}, top_k={top_k}, hidden={hidden}, device=cuda:{device})"
        )
    }
}

impl SlotsExchange {
    /// Where sums go.
    fn sums(&self, out: &Bound<'_, PyAny>) -> PyResult<(Input, Range)> {
        let out = self.on.borrow(out, "out")?.columns(self.hidden)?.of(self.dtype.into())?.writable()?;
        out.rows(self.tokens.load(Ordering::Relaxed), "tokens")?;
        let range = self.on.range(&out)?;
        Ok((out, range))
    }

    fn sum(&self, py: Python<'_>, (out, range): (Input, Range)) -> PyResult<()> {
        self.call(py, |exchange| {
            let summed = exchange.finish_combine(self.on.stream(), range.span(0, range.len())?);
            self.on.keep([out])?;
            summed
        })
    }
}
