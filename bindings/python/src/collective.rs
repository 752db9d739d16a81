//! All-gather and reduce-scatter of rows: each other's gradient.

use std::sync::Arc;

use pyo3::prelude::*;
use sidelane::Dtype;
use sidelane::dtype::PartialDtype;
use sidelane::ep::{RowCollective as Gathers, RowCollectiveBuilder, RowPartition as Layout, Tensor as Sent};

use crate::calls::{Brought, Sums, unusable};
use crate::device::Place;
use crate::errors::{first, raise};
use crate::expert_parallel::group_of;
use crate::handle::tensor_of;
use crate::input::Input;
use crate::lending::LendingCell;
use crate::settings;
use crate::tensor::{Kind, Outputs, Tensor};
use crate::world::OpenWorld;

/// What is the same for all rows.
#[derive(Clone)]
struct Shape {
    columns: usize,
    dtype: Dtype,
    /// Whether the caller has said it.
    dtype_given: bool,
    place: Place,
}

/// All-gather and reduce-scatter over a group of ranks.
#[pyclass(frozen, module = "sidelane")]
pub struct Collective {
    open_world: Arc<OpenWorld>,
    cell: Arc<LendingCell<Gathers>>,
    shape: Shape,
    #[pyo3(get)]
    rank: u32,
    #[pyo3(get)]
    size: u32,
}

/// How many rows each rank has.
#[pyclass(frozen, module = "sidelane")]
pub struct Shares {
    cell: LendingCell<Layout>,
    shape: Shape,
    kind: Kind,
    outputs: Outputs,
    #[pyo3(get)]
    counts: Vec<u32>,
    #[pyo3(get)]
    rows: u32,
}

impl Collective {
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Gathers) -> Result<T, sidelane::Error> + Send,
    ) -> PyResult<T> {
        self.open_world.call(py, &self.cell, call)
    }

    fn along<T: Send>(
        &self,
        py: Python<'_>,
        shares: &Shares,
        call: impl FnOnce(&mut Gathers, &Layout) -> Result<T, sidelane::Error> + Send,
    ) -> PyResult<T> {
        shares.cell.lend(|layout| self.call(py, |gathers| call(gathers, layout)))
    }

    /// Makes a call with this rank's rows; where they cannot be used, with none of a type that the
    /// library refuses, so that the others are told.
    fn with<T>(&self, rows: &Bound<'_, PyAny>, call: impl FnOnce(Sent<'_>) -> PyResult<T>) -> PyResult<T> {
        let Shape { columns, dtype, dtype_given, .. } = self.shape;
        let look = || {
            let rows = Input::new(rows, "rows")?.columns(columns)?.rows()?;
            rows.check_default(dtype, dtype_given)?;
            Ok(rows)
        };
        match look() {
            Ok(mine) => call(mine.tensor()),
            Err(error) => {
                let dtype = if dtype == Dtype::F32 { Dtype::Bf16 } else { Dtype::F32 };
                Err(first(rows.py(), call(Sent::Host { bytes: &[], dtype }), error))
            }
        }
    }

    fn shares_of(&self, layout: Layout, kind: Kind) -> Shares {
        let (counts, rows) = (layout.counts().to_vec(), layout.rows());
        let (cell, shape) = (LendingCell::new("shares", layout), self.shape.clone());
        Shares { cell, shape, kind, outputs: Outputs::default(), counts, rows }
    }

    fn all<'py>(
        &self,
        py: Python<'py>,
        rows: sidelane::ep::ExpertRows,
        kind: Kind,
    ) -> PyResult<Bound<'py, PyAny>> {
        let row = (self.shape.columns, self.shape.dtype);
        kind.give(py, tensor_of(rows, row, &self.shape.place)?)
    }
}

#[pymethods]
impl Collective {
    /// Collective: all ranks of the group choose alike.
    #[new]
    #[pyo3(signature = (group, *, columns, dtype=None, segments=1, max_rows=4096, route="pxn", node_sums=None))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords are its builder")]
    fn new(
        py: Python<'_>,
        group: &Bound<'_, PyAny>,
        columns: usize,
        dtype: Option<&Bound<'_, PyAny>>,
        segments: u32,
        max_rows: u32,
        route: &str,
        node_sums: Option<&str>,
    ) -> PyResult<Self> {
        let group = group_of(group)?;
        let (open_world, members) = (group.get().open_world(), group.get().get()?);
        let dtype_given = dtype.is_some();
        let set = || -> PyResult<(RowCollectiveBuilder<'_>, Dtype)> {
            let dtype = dtype.map_or(Ok(Dtype::Bf16), settings::dtype)?;
            let builder = Gathers::builder(&members).columns(columns).dtype(dtype).segments(segments);
            let builder = builder.max_rows(max_rows).route(settings::word("route", route)?);
            let wire = node_sums.map(|wire| settings::word::<PartialDtype>("node_sums", wire)).transpose()?;
            Ok((wire.into_iter().fold(builder, RowCollectiveBuilder::node_sums), dtype))
        };
        let refuse = || Gathers::builder(&members).build().map(drop);
        let (cell, dtype) = open_world.build(py, "Collective", set(), refuse, RowCollectiveBuilder::build)?;
        let place = Place::Host(Arc::clone(open_world.world()?.pool()));
        let shape = Shape { columns, dtype, dtype_given, place };
        Ok(Collective {
            open_world: Arc::clone(open_world),
            cell,
            shape,
            rank: members.rank(),
            size: members.size(),
        })
    }

    /// Everybody's rows, by rank, from this rank's [rows, columns]; and how many each rank has.
    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        rows: &Bound<'py, PyAny>,
    ) -> PyResult<(Bound<'py, PyAny>, Shares)> {
        let kind = Kind::of(rows);
        let (all, layout) = self.with(rows, |rows| self.call(py, |gathers| gathers.all_gather(rows)))?;
        Ok((self.all(py, all, kind)?, self.shares_of(layout, kind)))
    }

    /// Shares that all ranks know beforehand. Local.
    fn shares(&self, counts: Vec<u32>) -> PyResult<Shares> {
        let layout = self.cell.lend(|gathers| gathers.shares(&counts).map_err(raise))?;
        Ok(self.shares_of(layout, Kind::Other))
    }

    /// Everybody's rows, where all know their shares.
    fn all_gather_along<'py>(
        &self,
        py: Python<'py>,
        rows: &Bound<'py, PyAny>,
        shares: &Shares,
    ) -> PyResult<Bound<'py, PyAny>> {
        let all = self.with(rows, |rows| {
            self.along(py, shares, |gathers, layout| gathers.all_gather_cached(rows, layout))
        })?;
        self.all(py, all, Kind::of(rows))
    }

    /// Sums over all ranks of this rank's rows. `rows` is `shares.output()`, used in place, or any
    /// tensor [rows of all, columns], copied once.
    fn reduce_scatter<'py>(
        &self,
        py: Python<'py>,
        rows: &Bound<'py, PyAny>,
        shares: &Shares,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Shape { columns, dtype, dtype_given, place } = &self.shape;
        let look = || {
            let brought = Brought::look(rows, "rows", (*columns, place), (&shares.outputs, "shares"))?;
            brought.rows.check_default(*dtype, *dtype_given)?;
            Ok(brought)
        };
        let brought = match look() {
            Ok(brought) => brought,
            Err(error) => {
                let refused = self.along(py, shares, |gathers, layout| {
                    gathers.reduce_scatter::<u8>(unusable(), layout).map(drop)
                });
                return Err(first(py, refused, error));
            }
        };
        let mine = shares.counts[self.rank as usize] as usize;
        let mut sums = Sums::new_on_host([mine, *columns], *dtype, Kind::of(rows));
        let target = sums.tensor_mut();
        self.along(py, shares, |gathers, layout| {
            brought.lend(|| layout.output(), |rows| gathers.reduce_scatter_into(rows, layout, target))
        })?;
        sums.give(py)
    }

    fn __repr__(&self) -> String {
        format!("sidelane.Collective(rank={}, size={}, columns={})", self.rank, self.size, self.shape.columns)
    }
}

#[pymethods]
impl Shares {
    /// A buffer [rows of all, columns] that a reduce-scatter takes without a copy. Its contents are
    /// undefined.
    fn output<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let output = self.cell.lend(|layout| layout.output().map_err(raise))?;
        let Shape { columns, dtype, place, .. } = &self.shape;
        let memory = self.outputs.add(output, place)?;
        self.kind.give(py, Tensor::new(memory, &[self.rows as usize, *columns], (*dtype).into()))
    }

    /// How the bytes of the all-gather went.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let report = self.cell.lend(|layout| layout.handle().report().map_err(raise))?;
        Ok(pythonize::pythonize(py, &report)?)
    }

    /// Bytes that reduce-scatters have copied because rows did not lie in an output buffer.
    #[getter]
    fn copied_bytes(&self) -> PyResult<u64> {
        self.cell.lend(|layout| Ok(layout.handle().copied_bytes()))
    }

    fn __repr__(&self) -> String {
        format!("sidelane.Shares(counts={:?})", self.counts)
    }
}
