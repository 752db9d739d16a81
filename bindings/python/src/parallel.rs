//! `ExpertParallel`: its settings and its calls, with tensors of other libraries.

use std::sync::Arc;

use pyo3::prelude::*;
use sidelane::Dtype;
use sidelane::ep::ExpertParallelBuilder;
use sidelane::plan::{ExpertMap, Mode, Overflow, RowLayout};

use crate::calls::{Rows, Tokens, first, other_routing, typed, typed_mut, typed_rows, unusable};
use crate::errors::raise;
use crate::handle::{Handle, Shape};
use crate::input::Input;
use crate::pending::{PendingCombine, PendingDispatch};
use crate::settings;
use crate::slot::Slot;
use crate::tensor::{Element, Kind, Tensor};
use crate::world::{Group, Seat, World};

/// MoE dispatch and combine over a group of ranks.
#[pyclass(frozen, module = "sidelane")]
pub struct ExpertParallel {
    pub(crate) seat: Arc<Seat>,
    pub(crate) slot: Arc<Slot<sidelane::ExpertParallel>>,
    pub(crate) shape: Shape,
    /// Elements and type of a row that is dispatched: others than those of `shape` if it is a record.
    pub(crate) sent: (usize, Dtype),
    #[pyo3(get)]
    rank: u32,
    #[pyo3(get)]
    size: u32,
    #[pyo3(get)]
    weighted: bool,
}

#[pymethods]
impl ExpertParallel {
    /// Collective: all ranks of the group choose alike.
    #[new]
    #[pyo3(signature = (
        group, *, experts=None, top_k=1, hidden, dtype=None, expert_map=None, order="expert", wire="f32",
        layout="expert-major", route="direct", strategy="exchange", align=1, max_tokens=4096, weighted=false,
        spans=false, fp8=false, budget=None, slots=None, overflow="error"
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
        order: &str,
        wire: &str,
        layout: &str,
        route: &str,
        strategy: &str,
        align: u32,
        max_tokens: u32,
        weighted: bool,
        spans: bool,
        fp8: bool,
        budget: Option<u32>,
        slots: Option<u32>,
        overflow: &str,
    ) -> PyResult<Self> {
        let group = group_of(group)?;
        let (seat, members) = (group.get().seat(), group.get().get()?);
        let blank = sidelane::ExpertParallel::builder(&members).map_err(raise)?;
        let set = || -> PyResult<(ExpertParallelBuilder<'_>, (Dtype, bool))> {
            let dtype = dtype.map_or(Ok(Dtype::Bf16), settings::dtype)?;
            let rows: RowLayout = settings::word("layout", layout)?;
            let overflow: Overflow = settings::word("overflow", overflow)?;
            let mode = match (budget, slots) {
                (None, None) => Mode::Eager,
                (Some(rows), None) => Mode::Budget { rows, overflow },
                (None, Some(rows)) => Mode::Slots { rows, overflow },
                (Some(_), Some(_)) => return Err(settings::wrong("slots", "not with a budget")),
            };
            let builder = blank
                .clone()
                .top_k(top_k)
                .hidden(hidden)
                .dtype(dtype)
                .order(settings::word("order", order)?)
                .wire(settings::word("wire", wire)?)
                .layout(rows)
                .route(settings::word("route", route)?)
                .strategy(settings::word("strategy", strategy)?)
                .align(align)
                .max_tokens(max_tokens)
                .weighted(weighted)
                .spans(spans)
                .fp8(fp8)
                .mode(mode);
            Ok((placed(builder, experts, expert_map.as_deref())?, (dtype, rows == RowLayout::RankMajor)))
        };
        let (slot, (dtype, rank_major)) =
            seat.build(py, "ExpertParallel", set(), || no_layer(&members), ExpertParallelBuilder::build)?;
        let (pool, record) = slot.lend(|ep| Ok((Arc::clone(ep.pool()), ep.record())))?;
        let shape = Shape { hidden, dtype, top_k: top_k as usize, rank_major, pool };
        let sent = record.map_or((hidden, dtype), |record| (record.bytes(), Dtype::Bytes));
        let (rank, size) = (members.rank(), members.size());
        Ok(ExpertParallel { seat: Arc::clone(seat), slot, shape, sent, rank, size, weighted })
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

    /// Where values and scales lie in a row that is dispatched in fp8.
    #[getter]
    fn record(&self) -> PyResult<Option<(usize, usize, usize, usize)>> {
        self.slot.lend(|ep| {
            let parts = |record: sidelane::dtype::RecordShape| {
                (record.hidden(), record.scales_offset(), record.scales(), record.bytes())
            };
            Ok(ep.record().map(parts))
        })
    }

    /// The experts that each rank holds.
    #[getter]
    fn expert_map(&self) -> PyResult<Vec<Vec<u32>>> {
        self.slot.lend(|ep| {
            let map = ep.expert_map();
            let held = |rank| map.slots_of(rank).map(|slot| map.expert_of(slot)).collect();
            Ok((0..map.ranks()).map(held).collect())
        })
    }

    fn set_expert_map(&self, py: Python<'_>, held: Vec<Vec<u32>>) -> PyResult<()> {
        let experts = self.slot.lend(|ep| Ok(ep.expert_map().experts()))?;
        match map(Some(experts), &held) {
            Ok(map) => self.call(py, |ep| ep.set_expert_map(map)),
            Err(error) => {
                // A map of other experts is refused everywhere.
                let refused = self.call(py, |ep| ep.set_expert_map(ExpertMap::contiguous(experts + 1, 1)?));
                Err(first(py, refused, error))
            }
        }
    }

    /// `x` [tokens, hidden], `experts` and `weights` [tokens, top_k]: the rows of this rank's experts, and a handle.
    fn dispatch<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        experts: &Bound<'py, PyAny>,
        weights: &Bound<'py, PyAny>,
    ) -> PyResult<(Bound<'py, PyAny>, Handle)> {
        let Tokens { x, dtype, routing, kind } = match self.tokens(x, experts, weights) {
            Ok(tokens) => tokens,
            Err(error) => return Err(self.refuse(py, error)),
        };
        let (rows, handle) = typed!(dtype, E => {
            let x = x.slice::<E>()?;
            self.call(py, |ep| ep.dispatch::<E>(x, &routing))?
        });
        let handle = Handle::new(handle, self.shape.clone(), kind);
        Ok((self.rows(py, rows, kind, true)?, handle))
    }

    /// The layout of a dispatch, before its rows: `dispatch_cached` brings them.
    fn prepare(
        &self,
        py: Python<'_>,
        experts: &Bound<'_, PyAny>,
        weights: &Bound<'_, PyAny>,
    ) -> PyResult<Handle> {
        let handle = match self.routing(experts, weights) {
            Ok(routing) => self.call(py, |ep| ep.prepare(&routing))?,
            Err(error) => {
                let top_k = self.shape.top_k;
                let refused = self.call(py, |ep| ep.prepare(&other_routing(top_k)?).map(drop));
                return Err(first(py, refused, error));
            }
        };
        Ok(Handle::new(handle, self.shape.clone(), Kind::of(weights)))
    }

    /// First half of `dispatch`. `x` must not change before the second.
    fn start_dispatch(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        experts: &Bound<'_, PyAny>,
        weights: &Bound<'_, PyAny>,
    ) -> PyResult<PendingDispatch> {
        match self.tokens(x, experts, weights) {
            Ok(tokens) => PendingDispatch::start(py, self, tokens),
            Err(error) => Err(self.refuse(py, error)),
        }
    }

    /// `x` along the layout of an earlier dispatch: its rows.
    fn dispatch_cached<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        handle: &Handle,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (columns, sent) = self.sent;
        let rows = self.outward(py, handle, (x, "x", columns, sent), |ep, Rows { bytes, dtype }, handle| {
            typed!(dtype, E => ep.dispatch_cached::<E>(typed_rows(bytes), handle))
        })?;
        self.rows(py, rows, Kind::of(x), true)
    }

    /// Sums the rows of each token: [tokens, hidden]. `y` is `handle.output()`, used in place, or any tensor, copied once.
    #[pyo3(signature = (y, handle, out=None))]
    fn combine<'py>(
        &self,
        py: Python<'py>,
        y: &Bound<'py, PyAny>,
        handle: &Handle,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let brought = self.brought(y, handle, "y");
        if let Some(out) = out {
            let mut given = self.home(out);
            let (brought, mut given) = match given.as_mut() {
                Ok(given) => {
                    let dtype = given.dtype()?;
                    (brought, Some((given.slice_mut::<u8>()?, dtype)))
                }
                Err(_) => (given.map(drop).and(brought), None),
            };
            self.bring(py, handle, brought, |ep, y, handle| match &mut given {
                Some((out, dtype)) => typed!(*dtype, E => {
                    ep.combine_into::<E>(y, handle, typed_mut(out))
                }),
                None => ep.combine::<u8>(y, handle).map(drop),
            })?;
            return Ok(out.clone());
        }
        let tensor = typed!(self.shape.dtype, E => {
            let sums: Vec<E> = self.bring(py, handle, brought, |ep, y, handle| ep.combine::<E>(y, handle))?;
            self.sums(sums)
        });
        Kind::of(y).give(py, tensor)
    }

    /// First half of `combine`.
    fn start_combine(
        &self,
        py: Python<'_>,
        y: &Bound<'_, PyAny>,
        handle: Py<Handle>,
    ) -> PyResult<PendingCombine> {
        let brought = self.brought(y, handle.get(), "y");
        match brought {
            Ok(brought) => PendingCombine::start(py, self, brought, handle, Kind::of(y)),
            Err(error) => {
                let refused = self.along(py, handle.get(), |ep, handle| ep.combine::<u8>(unusable(), handle));
                Err(first(py, refused, error))
            }
        }
    }

    /// Gradient of `dispatch`: of tokens [tokens, hidden] and, if those of the row weights are given, of weights [tokens, top_k].
    #[pyo3(signature = (row_gradients, handle, row_weight_gradients=None))]
    fn dispatch_backward<'py>(
        &self,
        py: Python<'py>,
        row_gradients: &Bound<'py, PyAny>,
        handle: &Handle,
        row_weight_gradients: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyAny>, Option<Bound<'py, PyAny>>)> {
        let weights = row_weight_gradients
            .map(|weights| Input::new(weights, "row_weight_gradients").and_then(|w| w.of(Element::F32)))
            .transpose();
        let brought = self.brought(row_gradients, handle, "row_gradients");
        let (brought, weights) = match (brought, weights) {
            (brought, Ok(weights)) => (brought, weights),
            (_, Err(error)) => (Err(error), None),
        };
        let weights = weights.as_ref().map(Input::slice::<f32>).transpose()?;
        let kind = Kind::of(row_gradients);
        let (tokens, weights) = typed!(self.shape.dtype, E => {
            let (tokens, weights) = self.bring(py, handle, brought, |ep, rows, handle| {
                ep.dispatch_backward::<E>(rows, weights, handle)
            })?;
            (self.sums::<E>(tokens), weights)
        });
        let weights = weights.map(|weights| kind.give(py, self.choices(weights))).transpose()?;
        Ok((kind.give(py, tokens)?, weights))
    }

    /// Gradient of `combine`: of rows [rows, hidden] and, of a weighted one, of weights [tokens, top_k].
    fn combine_backward<'py>(
        &self,
        py: Python<'py>,
        gradients: &Bound<'py, PyAny>,
        handle: &Handle,
    ) -> PyResult<(Bound<'py, PyAny>, Option<Bound<'py, PyAny>>)> {
        let (kind, input) =
            (Kind::of(gradients), (gradients, "gradients", self.shape.hidden, self.shape.dtype));
        let (rows, weights) = self.outward(py, handle, input, |ep, Rows { bytes, dtype }, handle| {
            typed!(dtype, E => ep.combine_backward::<E>(typed_rows(bytes), handle))
        })?;
        let weights = weights.map(|weights| kind.give(py, self.choices(weights))).transpose()?;
        Ok((self.rows(py, rows, kind, false)?, weights))
    }

    /// Makes records of tokens for a dispatch in fp8: [tokens, record] of uint8.
    fn quantise<'py>(&self, py: Python<'py>, x: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let input = Input::new(x, "x")?.columns(self.shape.hidden)?;
        let dtype = input.dtype()?;
        let records = self.slot.lend(|ep| {
            let mut records = Vec::new();
            typed!(dtype, E => ep.quantise::<E>(input.slice::<E>()?, &mut records).map_err(raise)?);
            Ok(records)
        })?;
        let rows = records.len() / self.sent.0;
        Kind::of(x).give(py, Tensor::of(records, &[rows, self.sent.0], Element::U8))
    }

    /// The lanes of the group, and how many ranks each reaches.
    #[getter]
    fn lanes(&self) -> PyResult<Vec<(&'static str, u32)>> {
        self.slot.lend(|ep| Ok(ep.lanes().iter().map(|lane| (lane.lane, lane.ranks)).collect()))
    }

    fn __repr__(&self) -> String {
        let Shape { hidden, top_k, .. } = self.shape;
        format!(
            "sidelane.ExpertParallel(rank={}, size={}, top_k={top_k}, hidden={hidden})",
            self.rank, self.size
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

/// A layer that no rank can build: of tokens that choose nobody.
pub fn no_layer(members: &sidelane::Group) -> Result<(), sidelane::Error> {
    sidelane::ExpertParallel::builder(members)?.top_k(0).build().map(drop)
}

/// Says how many experts there are, and where.
pub fn placed<'g>(
    builder: ExpertParallelBuilder<'g>,
    experts: Option<u32>,
    held: Option<&[Vec<u32>]>,
) -> PyResult<ExpertParallelBuilder<'g>> {
    Ok(match map_of(experts, held)? {
        Some(map) => builder.expert_map(map),
        None => builder.experts(experts.unwrap_or_default()),
    })
}

/// The map, if it is not that of so many experts in contiguous blocks.
pub fn map_of(experts: Option<u32>, held: Option<&[Vec<u32>]>) -> PyResult<Option<ExpertMap>> {
    match (experts, held) {
        (experts, Some(held)) => map(experts, held).map(Some),
        (Some(_), None) => Ok(None),
        (None, None) => Err(settings::wrong("experts", "needed, unless there is an expert_map")),
    }
}

/// The map by the experts that each rank holds; as many experts as are named, unless it is said.
fn map(experts: Option<u32>, held: &[Vec<u32>]) -> PyResult<ExpertMap> {
    let named = held.iter().flatten().max().map_or(0, |&last| last.saturating_add(1));
    ExpertMap::from_slots(experts.unwrap_or(named), held).map_err(raise)
}
