//! `ExpertParallel`: its settings and its calls, with tensors of other libraries.
//!
//! Every call takes the same steps. The stream that torch has at the call is followed before its
//! memory is looked at, and tensors are kept until that stream is done with them:
//!
//! ```text
//!   torch, numpy --+-- stream of the caller --follow--> stream of the instance
//!                  |                                            |
//!                  +-- borrow: shape, dtype, place ----> library's call, without the interpreter
//!                            |                                  |
//!                            | wrong                            | keep the tensors
//!                            v                                  v
//!                      refuse: enter the call empty      rows, sums: as the caller's kind of tensor
//! ```
//!
//! [`Instance`] has these steps for all calls; here each call names its tensors and their shapes.

use std::sync::Arc;

use pyo3::prelude::*;
use sidelane::Dtype;
use sidelane::ep::{ExpertParallelBuilder, Feature};
use sidelane::error::{CallKind, PlanError};
use sidelane::plan::{ExpertMap, Overflow, ReceiveMode, RowLayout};

use crate::calls::{Instance, Sums};
use crate::device::{Lender, OnStream, Place};
use crate::errors::raise;
use crate::handle::{Handle, Shape};
use crate::heap::HeapAllocator;
use crate::input::{Input, Rows};
use crate::pending::{PendingCombine, PendingDispatch};
use crate::settings;
use crate::tensor::{Element, Kind, Memory, Tensor, extent_of_tokens};
use crate::wait::{self, Interrupt};
use crate::world::{Group, World};

/// MoE dispatch and combine over a group of ranks, on the host or on a stream of a GPU.
#[pyclass(frozen, weakref, module = "sidelane")]
pub struct ExpertParallel {
    instance: Instance,
    /// Where its rows lie: "host", or "cuda:" and a number.
    #[pyo3(get)]
    place: String,
    /// Number of its device.
    #[pyo3(get)]
    device: Option<u32>,
    /// Executor of its calls.
    #[pyo3(get)]
    executor: &'static str,
    #[pyo3(get)]
    hidden: usize,
    #[pyo3(get)]
    top_k: u32,
    #[pyo3(get)]
    dtype: &'static str,
    #[pyo3(get)]
    rank: u32,
    #[pyo3(get)]
    size: u32,
    #[pyo3(get)]
    weighted: bool,
}

#[pymethods]
impl ExpertParallel {
    /// Collective: all ranks of the group choose alike, but for device, stream and max_blocks.
    #[new]
    #[pyo3(signature = (
        group, *, experts=None, top_k=1, hidden, dtype=None, expert_map=None, sum_order="expert", partial_dtype="f32",
        layout="expert-major", route="direct", strategy="all-to-all", align=1, max_tokens=4096, weighted=false,
        coalesce_relays=false, fp8=false, budget=None, slots=None, overflow="error", graphs="off", device=None,
        stream=None, max_in_flight=None, device_heap=None, device_heap_limit=None, max_blocks=None
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
        sum_order: &str,
        partial_dtype: &str,
        layout: &str,
        route: &str,
        strategy: &str,
        align: u32,
        max_tokens: u32,
        weighted: bool,
        coalesce_relays: bool,
        fp8: bool,
        budget: Option<u32>,
        slots: Option<u32>,
        overflow: &str,
        graphs: &str,
        device: Option<&Bound<'_, PyAny>>,
        stream: Option<usize>,
        max_in_flight: Option<u32>,
        device_heap: Option<u64>,
        device_heap_limit: Option<u64>,
        max_blocks: Option<u32>,
    ) -> PyResult<Self> {
        let group = group_of(group)?;
        let (open_world, members) = (group.get().open_world(), group.get().get()?);
        let (blank, dtype_given) = (sidelane::ExpertParallel::builder(&members), dtype.is_some());
        let set = || {
            let dtype = dtype.map_or(Ok(Dtype::Bf16), settings::dtype)?;
            let rows: RowLayout = settings::word("layout", layout)?;
            let overflow: Overflow = settings::word("overflow", overflow)?;
            let mode = match (budget, slots) {
                (None, None) => ReceiveMode::Exact,
                (Some(rows), None) => ReceiveMode::Budget { rows, overflow },
                (None, Some(rows)) => ReceiveMode::Slots { rows, overflow },
                (Some(_), Some(_)) => return Err(settings::wrong("slots", "not with a budget")),
            };
            let builder = blank
                .clone()
                .top_k(top_k)
                .hidden(hidden)
                .dtype(dtype)
                .sum_order(settings::word("sum_order", sum_order)?)
                .partial_dtype(settings::word("partial_dtype", partial_dtype)?)
                .layout(rows)
                .route(settings::word("route", route)?)
                .strategy(settings::word("strategy", strategy)?)
                .align(align)
                .max_tokens(max_tokens)
                .weighted(weighted)
                .coalesce_relays(coalesce_relays)
                .fp8(fp8)
                .mode(mode)
                .graphs(settings::word("graphs", graphs)?);
            let on = OnStream::open(py, device, stream)?;
            let builder = on.iter().fold(builder, |builder, on| builder.on(&on.stream()));
            let builder = max_in_flight.into_iter().fold(builder, ExpertParallelBuilder::max_in_flight);
            let builder = device_heap.into_iter().fold(builder, ExpertParallelBuilder::device_heap);
            let limit = device_heap_limit.into_iter();
            let builder = limit.fold(builder, ExpertParallelBuilder::device_heap_limit);
            let builder = max_blocks.into_iter().fold(builder, ExpertParallelBuilder::max_blocks);
            let builder = placed(builder, experts, expert_map.as_deref())?;
            Ok((builder, (dtype, rows == RowLayout::RankMajor, on)))
        };
        let (cell, (dtype, rank_major, on)) = open_world.build(
            py,
            "ExpertParallel",
            set(),
            || no_layer(&members),
            ExpertParallelBuilder::build,
        )?;
        let (pool, record, place, executor) = cell.lend(|ep| {
            Ok((Arc::clone(ep.pool()), ep.record(), ep.place().to_string(), ep.executor().name()))
        })?;
        let (rank, size) = (members.rank(), members.size());
        let device = on.as_ref().map(|on| on.device());
        on.iter().for_each(|on| on.follow_torch(stream.is_none()));
        let shape = Shape {
            hidden,
            dtype,
            dtype_given,
            sent: record.map_or((hidden, dtype), |record| (record.bytes(), Dtype::Bytes)),
            top_k: top_k as usize,
            rank_major,
            slots: device.and(slots).map(|_| [size as usize, max_tokens as usize]),
            place: on.map_or(Place::Host(pool), |on| Place::Device(Lender::new(&on))),
        };
        let (instance, dtype) =
            (Instance { open_world: Arc::clone(open_world), cell, shape }, Element::from(dtype).name());
        Ok(ExpertParallel { instance, place, device, executor, hidden, top_k, dtype, rank, size, weighted })
    }

    /// How rows lie.
    #[getter]
    fn layout(&self) -> &'static str {
        if self.instance.shape.rank_major { "rank-major" } else { "expert-major" }
    }

    /// Handle of the stream that calls went on last.
    #[getter]
    fn stream(&self) -> Option<usize> {
        self.instance.shape.place.on().map(|on| on.handle())
    }

    /// Calls go on this stream of the device from now on, and not on torch's current one, behind
    /// all work of the previous one.
    fn set_stream(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        let Some(on) = self.instance.shape.place.on() else {
            let (feature, executor) = (Feature::Streams.name(), self.executor);
            return Err(raise(PlanError::NotAvailable { feature, place: "the host", executor }));
        };
        self.instance.set_stream(py, on, stream)?;
        on.follow_torch(false);
        Ok(())
    }

    /// Where values and scales lie in a row that is dispatched in fp8.
    #[getter]
    fn record(&self) -> PyResult<Option<(usize, usize, usize, usize)>> {
        self.instance.cell.lend(|ep| {
            let parts = |record: sidelane::dtype::Fp8RowShape| {
                (record.hidden(), record.scales_offset(), record.scales(), record.bytes())
            };
            Ok(ep.record().map(parts))
        })
    }

    /// The experts that each rank holds.
    #[getter]
    fn expert_map(&self) -> PyResult<Vec<Vec<u32>>> {
        self.instance.cell.lend(|ep| {
            let map = ep.expert_map();
            let held = |rank| map.slots_of(rank).map(|slot| map.expert_of(slot)).collect();
            Ok((0..map.ranks()).map(held).collect())
        })
    }

    fn set_expert_map(&self, py: Python<'_>, held: Vec<Vec<u32>>) -> PyResult<()> {
        let experts = self.instance.cell.lend(|ep| Ok(ep.expert_map().experts()))?;
        match map(Some(experts), &held) {
            Ok(map) => self.instance.call(py, |ep| ep.set_expert_map(map)),
            Err(error) => Err(self.instance.refuse(py, CallKind::ExpertMap, None, error)),
        }
    }

    /// Per rank: whether it is active.
    #[getter]
    fn active(&self) -> PyResult<Vec<bool>> {
        self.instance.cell.lend(|ep| Ok(ep.active().to_vec()))
    }

    /// Masks ranks: a flag for each in a list or a tensor, true for an active one. Collective,
    /// masked ranks included.
    fn mask(&self, py: Python<'_>, active: &Bound<'_, PyAny>) -> PyResult<()> {
        let list = active.call_method0("tolist").unwrap_or_else(|_| active.clone());
        match list.extract::<Vec<bool>>() {
            Ok(active) => self.instance.call(py, |ep| ep.mask(&active)),
            Err(error) => {
                // A mask of no ranks is refused on all ranks: the others must not wait.
                let _ = self.instance.call(py, |ep| ep.mask(&[]));
                Err(error)
            }
        }
    }

    /// `x` [tokens, hidden], `experts` and `weights` [tokens, top_k]: the rows of this rank's
    /// experts, and a handle. In fixed slots of a device, rows are [ranks, max_tokens, hidden].
    fn dispatch<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        experts: &Bound<'py, PyAny>,
        weights: &Bound<'py, PyAny>,
    ) -> PyResult<(Bound<'py, PyAny>, Handle)> {
        let tokens = self.instance.tokens(py, [x, experts, weights])?;
        let done = self.instance.call(py, |ep| ep.dispatch(tokens.x.tensor(), tokens.chosen.choices()));
        self.instance.shape.place.keep(tokens.inputs());
        self.instance.received(py, done?, tokens.kind)
    }

    /// The layout of a dispatch, before its rows: `dispatch_cached` brings them.
    fn prepare(
        &self,
        py: Python<'_>,
        experts: &Bound<'_, PyAny>,
        weights: &Bound<'_, PyAny>,
    ) -> PyResult<Handle> {
        let chosen = self.instance.follow(py).and_then(|()| self.instance.chosen(experts, weights));
        let handle = match chosen {
            Ok(chosen) => {
                let done = self.instance.call(py, |ep| ep.prepare(chosen.choices()));
                self.instance.shape.place.keep(chosen.inputs());
                done?
            }
            Err(error) => return Err(self.instance.refuse(py, CallKind::Prepare, None, error)),
        };
        Ok(self.instance.layout(handle, Kind::of(weights)))
    }

    /// First half of `dispatch`. `x` must not change before the second.
    fn start_dispatch(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        experts: &Bound<'_, PyAny>,
        weights: &Bound<'_, PyAny>,
    ) -> PyResult<PendingDispatch> {
        PendingDispatch::start(py, &self.instance, self.instance.tokens(py, [x, experts, weights])?)
    }

    /// `x` along the layout of an earlier dispatch: its rows.
    fn dispatch_cached<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        handle: &Handle,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (sent, call) = (self.instance.shape.sent, (CallKind::CachedDispatch, handle));
        let tokens = match self.instance.follow(py).and_then(|()| self.instance.sent(x)) {
            Ok(tokens) => tokens,
            Err(error) => return Err(self.instance.refuse(py, call.0, Some(handle), error)),
        };
        let done = self
            .instance
            .along(py, call, Ok(&tokens), |ep, x, handle| ep.dispatch_cached(x.tensor(), handle));
        self.instance.shape.place.keep([&tokens.input]);
        self.instance.received_along(py, (done?, handle), Kind::of(x), sent)
    }

    /// Sums the rows of each token: [tokens, hidden]. `y` is `handle.output()`, used in place, or
    /// any tensor, copied once. A device needs `out`, but for tensors of torch, and the sums are
    /// there for what is enqueued next.
    #[pyo3(signature = (y, handle, out=None))]
    fn combine<'py>(
        &self,
        py: Python<'py>,
        y: &Bound<'py, PyAny>,
        handle: &Handle,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let tokens = (handle.tokens, Kind::of(y));
        let sums = self.instance.follow(py).and_then(|()| self.instance.sums(py, tokens, out));
        let (brought, mut sums) =
            match sums.and_then(|sums| Ok((self.instance.brought(y, handle, "y")?, sums))) {
                Ok(both) => both,
                Err(error) => return Err(self.instance.refuse(py, CallKind::Combine, Some(handle), error)),
            };
        let target = sums.tensor_mut();
        let done =
            self.instance.along(py, (CallKind::Combine, handle), Ok(&brought), |ep, brought, handle| {
                brought.lend(|| handle.output(), |rows| ep.combine_into(rows, handle, target))
            });
        self.instance.shape.place.keep(sums.input().into_iter().chain([&brought.rows.input]));
        done?;
        sums.give(py)
    }

    /// First half of `combine`.
    fn start_combine(
        &self,
        py: Python<'_>,
        y: &Bound<'_, PyAny>,
        handle: Py<Handle>,
    ) -> PyResult<PendingCombine> {
        let brought = self.instance.follow(py).and_then(|()| self.instance.brought(y, handle.get(), "y"));
        match brought {
            Ok(brought) => PendingCombine::start(py, &self.instance, brought, handle, Kind::of(y)),
            Err(error) => Err(self.instance.refuse(py, CallKind::Combine, Some(handle.get()), error)),
        }
    }

    /// Fixed slots of a device, instead of a combine: what was received has been read, and nothing
    /// returns. Without a handle, of the last dispatch.
    #[pyo3(signature = (handle=None))]
    fn release(&self, py: Python<'_>, handle: Option<&Handle>) -> PyResult<()> {
        self.instance.follow(py)?;
        match handle {
            Some(handle) => handle.cell.lend(|held| self.instance.call(py, |ep| ep.release(Some(held)))),
            None => self.instance.call(py, |ep| ep.release(None)),
        }
    }

    /// Waits until everything in the stream is done, and raises what went wrong. Ctrl-C cancels the
    /// world, which ends the stream's waits.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        let world = self.instance.open_world.world()?;
        self.instance.cell.lend(|ep| wait::meeting(py, || world.cancel(), move || ep.synchronize()))
    }

    /// Raises what is known to be wrong, without waiting.
    fn check(&self) -> PyResult<()> {
        self.instance.open_world.world()?;
        self.instance.cell.lend(|ep| ep.check().map_err(raise))
    }

    /// Gradient of `dispatch`: of tokens [tokens, hidden] and, if those of the row weights are
    /// given, of weights [tokens, top_k]. A device needs `out` and `weights_out`, but for tensors
    /// of torch.
    #[pyo3(signature = (row_gradients, handle, row_weight_gradients=None, out=None, weights_out=None))]
    fn dispatch_backward<'py>(
        &self,
        py: Python<'py>,
        row_gradients: &Bound<'py, PyAny>,
        handle: &Handle,
        row_weight_gradients: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
        weights_out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyAny>, Option<Bound<'py, PyAny>>)> {
        let (instance, call) = (&self.instance, (CallKind::DispatchBackward, handle));
        let tokens = (handle.tokens, Kind::of(row_gradients));
        let look = || {
            instance.follow(py)?;
            let what = "row_weight_gradients";
            let words = |given| instance.shape.place.borrow(given, what)?.of(Element::F32)?.rows();
            let weights = row_weight_gradients.map(words).transpose()?;
            let brought = instance.brought(row_gradients, handle, "row_gradients")?;
            let weight_sums =
                weights.is_some().then(|| instance.choices(py, tokens, weights_out)).transpose()?;
            Ok((brought, weights, instance.sums(py, tokens, out)?, weight_sums))
        };
        let (brought, weights, mut sums, mut weight_sums) =
            look().map_err(|error| instance.refuse(py, call.0, Some(handle), error))?;
        let (target, of_rows) = (sums.tensor_mut(), weights.as_ref().map(Rows::tensor));
        let of_choices = weight_sums.as_mut().map(Sums::tensor_mut);
        let done = instance.along(py, call, Ok(&brought), |ep, brought, handle| {
            let again = || handle.output();
            brought.lend(again, |rows| ep.dispatch_backward_into(rows, of_rows, handle, target, of_choices))
        });
        let given = weights.iter().map(|rows| &rows.input).chain([&brought.rows.input]);
        let written = sums.input().into_iter().chain(weight_sums.as_ref().and_then(Sums::input));
        instance.shape.place.keep(given.chain(written));
        done?;
        Ok((sums.give(py)?, weight_sums.map(|weight_sums| weight_sums.give(py)).transpose()?))
    }

    /// Gradient of `combine`: of rows [rows, hidden] and, of a weighted one, of weights [tokens,
    /// top_k], for which a device needs `weights_out`, but for tensors of torch.
    #[pyo3(signature = (gradients, handle, weights_out=None))]
    fn combine_backward<'py>(
        &self,
        py: Python<'py>,
        gradients: &Bound<'py, PyAny>,
        handle: &Handle,
        weights_out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyAny>, Option<Bound<'py, PyAny>>)> {
        let (instance, call) = (&self.instance, (CallKind::CombineBackward, handle));
        let Shape { hidden, dtype, .. } = instance.shape;
        let kind = Kind::of(gradients);
        let look = || {
            instance.follow(py)?;
            let tokens = instance.rows(gradients, "gradients", hidden)?;
            let wanted = || instance.choices(py, (handle.tokens, kind), weights_out);
            Ok((tokens, self.weighted.then(wanted).transpose()?))
        };
        let (tokens, mut weight_sums) =
            look().map_err(|error| instance.refuse(py, call.0, Some(handle), error))?;
        let of_choices = weight_sums.as_mut().map(Sums::tensor_mut);
        let done = instance.along(py, call, Ok(&tokens), |ep, gradients, handle| {
            ep.combine_backward_into(gradients.tensor(), handle, of_choices)
        });
        instance
            .shape
            .place
            .keep(weight_sums.as_ref().and_then(Sums::input).into_iter().chain([&tokens.input]));
        let rows = instance.received_along(py, (done?, handle), kind, (hidden, dtype))?;
        Ok((rows, weight_sums.map(|weight_sums| weight_sums.give(py)).transpose()?))
    }

    /// Makes records of tokens for a dispatch in fp8: [tokens, record] of uint8. A device needs
    /// `out`, but for tensors of torch, and the records are there for what is enqueued next.
    #[pyo3(signature = (x, out=None))]
    fn quantize<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (instance, columns) = (&self.instance, self.instance.shape.hidden);
        if instance.shape.place.on().is_some() || out.is_some() {
            instance.follow(py)?;
            let tokens = instance.rows(x, "x", columns)?;
            let mut records = instance.records(py, (tokens.input.len() / columns, Kind::of(x)), out)?;
            let target = records.tensor_mut();
            instance.cell.lend(|ep| ep.quantize_into(tokens.tensor(), target).map_err(raise))?;
            instance.shape.place.keep(records.input().into_iter().chain([&tokens.input]));
            return records.give(py);
        }
        let tokens = Input::new(x, "x")?.columns(columns)?.rows()?;
        let records = self.instance.cell.lend(|ep| {
            let mut records = Vec::new();
            ep.quantize(tokens.tensor(), &mut records).map_err(raise)?;
            Ok(records)
        })?;
        let rows = records.len() / self.instance.shape.sent.0;
        Kind::of(x).give(py, Tensor::of(records, &[rows, self.instance.shape.sent.0], Element::U8))
    }

    /// A buffer for tokens of a dispatch, [tokens, hidden] or, of records, [tokens, record]: where
    /// NICs and copy engines read them in place. Its contents are undefined.
    fn token_buffer(&self, py: Python<'_>, tokens: u32) -> PyResult<Tensor> {
        let Instance { open_world, cell, shape } = &self.instance;
        let Shape { sent: (columns, dtype), place, .. } = shape;
        let world = open_world.world()?;
        // On a device this may wait until the stream has read what was given back before.
        let mut buffer =
            cell.lend(|ep| wait::call(py, &world, Interrupt::Ends, move || ep.token_buffer(tokens)))?;
        let (address, bytes) = extent_of_tokens(&mut buffer).map_err(raise)?;
        let memory = Memory::at(address, bytes, Box::new(buffer), Some(&place.anew()));
        Ok(Tensor::new(memory, &[tokens as usize, *columns], (*dtype).into()))
    }

    /// An allocator over the device heap, for libraries that take its functions. One at a time
    /// serves a device in a process.
    fn heap_allocator(&self) -> PyResult<HeapAllocator> {
        HeapAllocator::of(&self.instance)
    }

    /// A pool of torch's over the device heap: what torch allocates in it lies in memory that NICs
    /// and copy engines know.
    fn mem_pool<'py>(this: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        this.py().import("sidelane.mem_pool")?.call_method1("mem_pool", (this,))
    }

    /// The lanes of the group, and how many ranks each reaches.
    #[getter]
    fn lanes(&self) -> PyResult<Vec<(&'static str, u32)>> {
        self.instance.cell.lend(|ep| Ok(ep.lanes().iter().map(|lane| (lane.lane, lane.ranks)).collect()))
    }

    fn __repr__(&self) -> String {
        let ExpertParallel { rank, size, top_k, hidden, place, .. } = self;
        format!(
            "sidelane.ExpertParallel(rank={rank}, size={size}, top_k={top_k}, hidden={hidden}, place={place})"
        )
    }
}

/// The group that is meant: of a world, all of it.
pub fn group_of<'py>(group: &Bound<'py, PyAny>) -> PyResult<Bound<'py, Group>> {
    match group.cast::<World>() {
        Ok(world) => Bound::new(group.py(), world.get().all()?),
        Err(_) => Ok(group.cast::<Group>()?.clone()),
    }
}

/// A layer that no rank can build: of tokens that choose no expert.
fn no_layer(members: &sidelane::Group) -> Result<(), sidelane::Error> {
    sidelane::ExpertParallel::builder(members).top_k(0).build().map(drop)
}

/// Says how many experts there are, and where.
fn placed<'g>(
    builder: ExpertParallelBuilder<'g>,
    experts: Option<u32>,
    held: Option<&[Vec<u32>]>,
) -> PyResult<ExpertParallelBuilder<'g>> {
    match (experts, held) {
        (experts, Some(held)) => Ok(builder.expert_map(map(experts, held)?)),
        (Some(experts), None) => Ok(builder.experts(experts)),
        (None, None) => Err(settings::wrong("experts", "needed, unless there is an expert_map")),
    }
}

/// The map by the experts that each rank holds; as many experts as are named, unless it is said.
pub fn map(experts: Option<u32>, held: &[Vec<u32>]) -> PyResult<ExpertMap> {
    let named = held.iter().flatten().max().map_or(0, |&last| last.saturating_add(1));
    ExpertMap::from_slots(experts.unwrap_or(named), held).map_err(raise)
}
