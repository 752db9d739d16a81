//! Calls that were started and are to be finished: relays go on in between.
//!
//! The library's pending call borrows all that it works on, so the object owns these together: the
//! `ExpertParallel`, the tensors, the handle. They go back when the call is finished, or dropped,
//! which cancels the world.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use self_cell::{MutBorrow, self_cell};
use sidelane::ep::{ExpertRows, PendingCombine as StartedCombine, PendingDispatch as StartedDispatch};

use crate::calls::{Brought, Instance, Tokens};
use crate::errors::Wrong;
use crate::handle::Handle;
use crate::lending::Maker;
use crate::tensor::Kind;
use crate::wait::{self, Interrupt};

/// What a started dispatch works on.
struct Sent {
    ep: MutBorrow<sidelane::ExpertParallel>,
    tokens: Tokens,
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
}

type Combining<'a> = Option<StartedCombine<'a>>;

self_cell!(
    struct CombineCell {
        owner: Returned,
        #[not_covariant]
        dependent: Combining,
    }
);

/// A started call, and what of Python's it was made on.
struct Started<C> {
    maker: Maker,
    instance: Instance,
    kind: Kind,
    cell: Mutex<Option<C>>,
}

impl<C> Started<C> {
    fn new(instance: Instance, kind: Kind, cell: C) -> Self {
        Started { maker: Maker::here(), instance, kind, cell: Mutex::new(Some(cell)) }
    }

    /// The call, for its second half, with its world.
    fn take(&self) -> PyResult<(C, Arc<sidelane::World>)> {
        self.maker.check("pending call")?;
        let world = self.instance.open_world.world()?;
        Ok((self.left().ok_or_else(used_up)?, world))
    }

    /// The call, if it is not finished.
    fn left(&self) -> Option<C> {
        let here = self.maker.is_here();
        here.then(|| self.cell.lock().unwrap_or_else(PoisonError::into_inner).take()).flatten()
    }
}

impl<C> Drop for Started<C> {
    fn drop(&mut self) {
        // Only a forked process has anything left here: it is the parent's.
        std::mem::forget(self.cell.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}

fn used_up() -> PyErr {
    Wrong::Closed.error("UsedUp", "this pending call was finished before", &[])
}

/// The second half of a dispatch.
type Finish = fn(StartedDispatch<'_>) -> Result<(ExpertRows, sidelane::ep::Handle), sidelane::Error>;

/// A dispatch whose counts are on their way. Dropped before it is finished, it cancels the world.
#[pyclass(frozen, module = "sidelane")]
pub struct PendingDispatch(Started<DispatchCell>);

impl PendingDispatch {
    /// Starts one.
    pub fn start(py: Python<'_>, instance: &Instance, tokens: Tokens) -> PyResult<Self> {
        let (instance, kind) = (instance.clone(), tokens.kind);
        let world = instance.open_world.world()?;
        let owner = Sent { ep: MutBorrow::new(instance.cell.take()?), tokens };
        wait::call(py, &world, Interrupt::Cancels, || {
            let started = DispatchCell::try_new_or_recover(owner, |Sent { ep, tokens }| {
                let started = ep.borrow_mut().start_dispatch(tokens.x.tensor(), tokens.chosen.choices());
                // Also where it was refused: something may have been enqueued.
                instance.shape.place.keep(tokens.inputs());
                started.map(Some)
            });
            match started {
                // Whole before the call ends: if a signal's handler raises, its drop puts back what
                // it has.
                Ok(cell) => Ok(PendingDispatch(Started::new(instance, kind, cell))),
                Err((owner, error)) => {
                    instance.cell.put_back(owner.ep.into_inner());
                    Err(error)
                }
            }
        })
    }

    fn end<'py>(&self, py: Python<'py>, finish: Finish) -> PyResult<(Bound<'py, PyAny>, Handle)> {
        let Started { instance, kind, .. } = &self.0;
        let (mut cell, world) = self.0.take()?;
        let done = wait::call(py, &world, Interrupt::Cancels, || {
            let done = cell.with_dependent_mut(|_, started| started.take().map(finish)).transpose();
            // The second half places own rows and, over relays, packs.
            instance.shape.place.keep(cell.borrow_owner().tokens.inputs());
            done
        });
        instance.cell.put_back(cell.into_owner().ep.into_inner());
        instance.received(py, done?.ok_or_else(used_up)?, *kind)
    }
}

#[pymethods]
impl PendingDispatch {
    /// Second half: the rows of this rank's experts, and a handle. On a device it waits for sizes,
    /// not for rows.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Handle)> {
        self.end(py, |started| started.finish())
    }

    /// Second half with sizes that stay on the device: nothing waits.
    fn finish_async<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Handle)> {
        self.end(py, |started| started.finish_async())
    }
}

impl Drop for PendingDispatch {
    fn drop(&mut self) {
        if let Some(cell) = self.0.left() {
            self.0.instance.cell.put_back(cell.into_owner().ep.into_inner());
        }
    }
}

/// A combine whose rows peers may read. Dropped before it is finished, it cancels the world.
#[pyclass(frozen, module = "sidelane")]
pub struct PendingCombine {
    started: Started<CombineCell>,
    handle: Py<Handle>,
}

impl PendingCombine {
    /// Starts one.
    pub fn start(
        py: Python<'_>,
        instance: &Instance,
        brought: Brought,
        handle: Py<Handle>,
        kind: Kind,
    ) -> PyResult<Self> {
        let (instance, cell) = (instance.clone(), &handle.get().cell);
        let world = instance.open_world.world()?;
        let held = cell.take()?;
        let taken = match instance.cell.take() {
            Ok(taken) => taken,
            Err(error) => {
                cell.put_back(held);
                return Err(error);
            }
        };
        let owner = Returned { ep: MutBorrow::new(taken), handle: held };
        wait::call(py, &world, Interrupt::Cancels, || {
            let started = CombineCell::try_new_or_recover(owner, |Returned { ep, handle }| {
                let ep = ep.borrow_mut();
                let started = brought.lend(|| handle.output(), |rows| ep.start_combine(rows, handle));
                instance.shape.place.keep([&brought.rows.input]);
                started.map(Some)
            });
            match started {
                // Whole before the call ends: if a signal's handler raises, its drop puts back what
                // it has.
                Ok(cell) => Ok(PendingCombine { started: Started::new(instance, kind, cell), handle }),
                Err((owner, error)) => {
                    handle.get().cell.put_back(owner.handle);
                    instance.cell.put_back(owner.ep.into_inner());
                    Err(error)
                }
            }
        })
    }

    fn put_back(&self, cell: CombineCell) {
        let Returned { ep, handle } = cell.into_owner();
        self.handle.get().cell.put_back(handle);
        self.started.instance.cell.put_back(ep.into_inner());
    }
}

#[pymethods]
impl PendingCombine {
    /// Second half: sums of the rows of each token, [tokens, hidden], in `out` if it is given. A
    /// device needs it, but for tensors of torch.
    #[pyo3(signature = (out=None))]
    fn finish<'py>(&self, py: Python<'py>, out: Option<&Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
        let Started { maker, instance, kind, .. } = &self.started;
        maker.check("pending call")?;
        // Before the call is used up: it may be finished with another tensor.
        let mut sums = instance.sums(py, (self.handle.get().tokens, *kind), out)?;
        let (mut cell, world) = self.started.take()?;
        let target = sums.tensor_mut();
        let done = wait::call(py, &world, Interrupt::Cancels, || {
            cell.with_dependent_mut(|_, started| started.take().map(|started| started.finish(target)))
                .transpose()
        });
        self.put_back(cell);
        instance.shape.place.keep(sums.input());
        done?;
        sums.give(py)
    }
}

impl Drop for PendingCombine {
    fn drop(&mut self) {
        if let Some(cell) = self.started.left() {
            self.put_back(cell);
        }
    }
}
