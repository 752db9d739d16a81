//! Calls that were started and are to be finished: relays go on in between.
//!
//! The library's pending call borrows all that it works on, so the object owns these together: the `ExpertParallel`, the
//! tensors, the handle. They go back when the call is finished, or dropped, which cancels the world.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use self_cell::{MutBorrow, self_cell};
use sidelane::Dtype;
use sidelane::ep::{PendingCombine as StartedCombine, PendingDispatch as StartedDispatch};
use sidelane::gate::Routing;

use crate::calls::{Brought, Tokens, contribution, rows_of, typed, with_buffer};
use crate::errors::{Wrong, raise};
use crate::handle::{Handle, Shape};
use crate::input::Input;
use crate::parallel::ExpertParallel;
use crate::slot::{Maker, Slot};
use crate::tensor::{Kind, Tensor};
use crate::wait::{self, Interrupt};
use crate::world::Seat;

/// What a started dispatch works on.
struct Sent {
    ep: MutBorrow<sidelane::ExpertParallel>,
    x: Input,
    routing: Routing<'static>,
}

type Dispatching<'a> = Option<StartedDispatch<'a>>;

self_cell!(
    struct DispatchCell {
        owner: Sent,
        #[not_covariant]
        dependent: Dispatching,
    }
);

/// What a started combine works on.
struct Returned {
    ep: MutBorrow<sidelane::ExpertParallel>,
    handle: sidelane::ep::Handle,
    tokens: usize,
}

type Combining<'a> = Option<StartedCombine<'a>>;

self_cell!(
    struct CombineCell {
        owner: Returned,
        #[not_covariant]
        dependent: Combining,
    }
);

/// What a pending call has of the object that it was made on.
struct Home {
    maker: Maker,
    seat: Arc<Seat>,
    slot: Arc<Slot<sidelane::ExpertParallel>>,
    shape: Shape,
    kind: Kind,
}

impl Home {
    fn of(ep: &ExpertParallel, kind: Kind) -> Self {
        let (seat, slot, shape) = ep.parts();
        Home {
            maker: Maker::here(),
            seat: Arc::clone(seat),
            slot: Arc::clone(slot),
            shape: shape.clone(),
            kind,
        }
    }
}

/// Takes a started call, once.
fn take<T>(cell: &Mutex<Option<T>>) -> PyResult<T> {
    cell.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or_else(used_up)
}

fn used_up() -> PyErr {
    Wrong::Closed.error("UsedUp", "this pending call was finished before", &[])
}

/// A dispatch whose counts are on their way. Dropped before it is finished, it cancels the world.
#[pyclass(frozen, module = "sidelane")]
pub struct PendingDispatch {
    home: Home,
    sent: (usize, Dtype),
    cell: Mutex<Option<DispatchCell>>,
}

impl PendingDispatch {
    /// Starts one.
    pub fn start(py: Python<'_>, ep: &ExpertParallel, tokens: Tokens) -> PyResult<Self> {
        let Tokens { x, dtype, routing, kind } = tokens;
        let home = Home::of(ep, kind);
        let world = home.seat.world()?;
        let owner = Sent { ep: MutBorrow::new(home.slot.take()?), x, routing };
        let started = wait::call(py, &world, Interrupt::Cancels, || {
            Ok(DispatchCell::try_new_or_recover(owner, |Sent { ep, x, routing }| {
                let ep = ep.borrow_mut();
                typed!(dtype, E => match x.slice::<E>() {
                    Ok(x) => ep.start_dispatch::<E>(x, routing).map(Some).map_err(raise),
                    Err(error) => Err(error),
                })
            }))
        });
        match started? {
            Ok(cell) => Ok(PendingDispatch { home, sent: ep.sent(), cell: Mutex::new(Some(cell)) }),
            Err((owner, error)) => {
                home.slot.put_back(owner.ep.into_inner());
                Err(error)
            }
        }
    }
}

#[pymethods]
impl PendingDispatch {
    /// Second half: the rows of this rank's experts, and a handle.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Handle)> {
        self.home.maker.check("PendingDispatch")?;
        let world = self.home.seat.world()?;
        let mut cell = take(&self.cell)?;
        let done = wait::call(py, &world, Interrupt::Cancels, || {
            cell.with_dependent_mut(|_, started| started.take().map(StartedDispatch::finish)).transpose()
        });
        self.home.slot.put_back(cell.into_owner().ep.into_inner());
        let (rows, handle) = done?.ok_or_else(used_up)?;
        let handle = Handle::new(handle, self.home.shape.clone(), self.home.kind);
        Ok((rows_of(py, rows, self.home.kind, self.sent, &self.home.shape.pool)?, handle))
    }
}

impl Drop for PendingDispatch {
    fn drop(&mut self) {
        let cell = self.cell.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        match cell {
            Some(cell) if self.home.maker.is_here() => {
                self.home.slot.put_back(cell.into_owner().ep.into_inner())
            }
            forked => std::mem::forget(forked),
        }
    }
}

/// A combine whose rows peers may read. Dropped before it is finished, it cancels the world.
#[pyclass(frozen, module = "sidelane")]
pub struct PendingCombine {
    home: Home,
    handle: Py<Handle>,
    cell: Mutex<Option<CombineCell>>,
}

impl PendingCombine {
    /// Starts one.
    pub fn start(
        py: Python<'_>,
        ep: &ExpertParallel,
        brought: Brought,
        handle: Py<Handle>,
        kind: Kind,
    ) -> PyResult<Self> {
        let home = Home::of(ep, kind);
        let world = home.seat.world()?;
        let held = handle.get().slot.take()?;
        let taken = match home.slot.take() {
            Ok(taken) => taken,
            Err(error) => {
                handle.get().slot.put_back(held);
                return Err(error);
            }
        };
        let tokens = held.tokens() as usize;
        let owner = Returned { ep: MutBorrow::new(taken), handle: held, tokens };
        let started = wait::call(py, &world, Interrupt::Cancels, || {
            Ok(CombineCell::try_new_or_recover(owner, |Returned { ep, handle, .. }| {
                let ep = ep.borrow_mut();
                let started = match brought {
                    Brought::Elsewhere(rows) => ep.start_combine(contribution(&rows)?, handle),
                    Brought::Buffer(memory) => {
                        with_buffer(&memory, || handle.output(), |rows| ep.start_combine(rows, handle))
                    }
                };
                started.map(Some).map_err(raise)
            }))
        });
        match started? {
            Ok(cell) => Ok(PendingCombine { home, handle, cell: Mutex::new(Some(cell)) }),
            Err((owner, error)) => {
                handle.get().slot.put_back(owner.handle);
                home.slot.put_back(owner.ep.into_inner());
                Err(error)
            }
        }
    }
}

#[pymethods]
impl PendingCombine {
    /// Second half: sums of the rows of each token, [tokens, hidden].
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.home.maker.check("PendingCombine")?;
        let world = self.home.seat.world()?;
        let mut cell = take(&self.cell)?;
        let tensor = typed!(self.home.shape.dtype, E => {
            let mut out: Vec<E> = vec![bytemuck::Zeroable::zeroed(); cell.borrow_owner().tokens * self.home.shape.hidden];
            let done = wait::call(py, &world, Interrupt::Cancels, || {
                cell.with_dependent_mut(|_, started| started.take().map(|started| started.finish(&mut out))).transpose()
            });
            self.put_back(cell);
            done?;
            let rows = out.len() / self.home.shape.hidden;
            Tensor::of(out, &[rows, self.home.shape.hidden], self.home.shape.dtype.into())
        });
        self.home.kind.give(py, tensor)
    }
}

impl PendingCombine {
    fn put_back(&self, cell: CombineCell) {
        let Returned { ep, handle, .. } = cell.into_owner();
        self.handle.get().slot.put_back(handle);
        self.home.slot.put_back(ep.into_inner());
    }
}

impl Drop for PendingCombine {
    fn drop(&mut self) {
        let cell = self.cell.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        match cell {
            Some(cell) if self.home.maker.is_here() => self.put_back(cell),
            forked => std::mem::forget(forked),
        }
    }
}
