//! Halves of dispatch and combine: start, compute, finish.
//!
//! ```text
//!   start    the layer leaves its cell and moves in here, with the first half that borrows it
//!   between  calls on the layer (and, in a combine, on the handle) say that it is underway
//!   finish   the second half; the layer goes back to its cell
//! ```
//!
//! Rust's halves borrow the layer. C has nowhere to keep a borrow, so owner and borrower live in
//! one cell. When the cell is dropped, finished or not, the leased objects go back.

use std::sync::Arc;

use self_cell::{MutBorrow, self_cell};
use sidelane::device::Context;
use sidelane::ep::{ExpertRows, Handle as Layout, TensorMut};
use sidelane::error::CallKind;
use sidelane::{Dtype, Error, ExpertParallel};

use super::combine::Outputs;
use super::dispatch::{Results, input};
use super::memory::Out;
use super::objects::{Ep, Handle, Output, PendingCombine, PendingDispatch, Rows};
use super::tensor::{Chosen, Routing, Source, Target, Tensor};
use super::{border, close, get, give, retract};
use crate::fault::Fault;
use crate::handles::{ExclusiveCell, Kind, Lease};
use crate::{Status, refuse};

struct Dispatching {
    ep: Lease<ExpertParallel>,
    x: Source<'static>,
    chosen: Chosen<'static>,
}

type StartedDispatch<'a> = Option<sidelane::ep::PendingDispatch<'a>>;

self_cell!(
    struct DispatchCell {
        owner: MutBorrow<Dispatching>,
        #[not_covariant]
        dependent: StartedDispatch,
    }
);

/// A dispatch between its halves.
pub struct DispatchUnderway(DispatchCell);

struct Combining {
    ep: Lease<ExpertParallel>,
    layout: Lease<Layout>,
}

type StartedCombine<'a> = Option<sidelane::ep::PendingCombine<'a>>;

self_cell!(
    struct CombineCell {
        owner: MutBorrow<Combining>,
        #[not_covariant]
        dependent: StartedCombine,
    }
);

/// A combine between its halves.
pub struct CombineUnderway {
    cell: CombineCell,
    context: Option<Arc<Context>>,
    sums: (u64, u64),
}

/// First half of sidelane_ep_dispatch(): announces memory and publishes counts, and does not wait.
/// Until it is finished the layer takes no other call. On the host, what this rank does for other
/// nodes is done in a thread of its own; on a device the dispatch is enqueued.
///
/// Input that the library refuses is reported by the second half, on all ranks. In slots on a
/// device it is refused here, and the other ranks hear of it from their streams
/// (sidelane_ep_synchronize()).
///
/// The caller guarantees: as sidelane_ep_dispatch(), and `x` and the arrays of `routing` stay as
/// they are until the dispatch is finished or closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_dispatch_start(
    ep: *mut Ep,
    x: *const Tensor,
    routing: *const Routing,
    pending: *mut *mut PendingDispatch,
) -> Status {
    border(|| {
        let layer = get(ep)?;
        let mut ep = ExclusiveCell::lease(&layer.cell)?;
        // SAFETY: as the caller promised; nothing of it is used once the cell is gone.
        let arguments = unsafe {
            Out::new("pending", pending)
                .map_err(Fault::from)
                .and_then(|out| Ok((out, input(&layer, x, routing)?)))
        };
        let (out, (x, chosen)) =
            arguments.map_err(|fault| refuse::call(&mut ep, CallKind::Dispatch, None, fault))?;
        let owned = MutBorrow::new(Dispatching { ep, x, chosen });
        let cell = DispatchCell::try_new(owned, |owned| {
            let Dispatching { ep, x, chosen } = owned.borrow_mut();
            ep.start_dispatch(x.lend(), chosen.lend()).map(Some)
        })?;
        give(ExclusiveCell::new(Kind::PendingDispatch, DispatchUnderway(cell)), out)
    })
}

/// Second half of a dispatch. The host waits for the counts of all ranks, moves the rows, and waits
/// for its own rows. A device waits for the counts alone, and in fixed slots not at all: rows are
/// there for later operations on the stream. Collective. `pending` is consumed.
///
/// The caller guarantees: `rows` and `handle` are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_dispatch_finish(
    pending: *mut PendingDispatch,
    rows: *mut *mut Rows,
    handle: *mut *mut Handle,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let results = unsafe { Results::new(rows, handle) };
        end(pending, results, |started| started.finish())
    })
}

/// Second half with sizes that stay on the device: nothing waits. With a budget and
/// SIDELANE_GRAPHS_SLOTS, the number of rows stands in sidelane_rows_info_t.counts, and the
/// handle's status word says whether they came. So the call can be captured into a graph. `pending`
/// is used up. Other layers but those in fixed slots have no such sizes: the call is then finished
/// as far as the other ranks see it, and refused here by name.
///
/// The caller guarantees: as sidelane_dispatch_finish().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_dispatch_unfinished(
    pending: *mut PendingDispatch,
    rows: *mut *mut Rows,
    handle: *mut *mut Handle,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let results = unsafe { Results::new(rows, handle) };
        end(pending, results, |started| started.unfinished())
    })
}

/// Uses a dispatch up, and gives what comes of it.
fn end(
    pending: *mut PendingDispatch,
    results: Result<Results, Fault>,
    half: impl FnOnce(sidelane::ep::PendingDispatch<'_>) -> Result<(ExpertRows, Layout), Error>,
) -> Result<(), Fault> {
    let DispatchUnderway(mut cell) = retract(pending)?.take()?;
    let received = cell.with_dependent_mut(|_, started| started.take().map(half));
    // Returns the layer. The other ranks have what they wait for, whatever the results.
    drop(cell);
    received.map_or(Ok(()), |received| results?.give(received?))
}

/// First half of sidelane_ep_combine(): offers this rank's rows, and does not wait for the others'.
/// Until it is finished layer and handle take no other call, and on the host what this rank does
/// for other nodes is done in a thread of its own.
///
/// The caller guarantees: as sidelane_ep_combine().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_combine_start(
    ep: *mut Ep,
    output: *mut Output,
    rows: *const Tensor,
    handle: *mut Handle,
    pending: *mut *mut PendingCombine,
) -> Status {
    border(|| {
        let layer = get(ep)?;
        let (mut ep, call) = (ExclusiveCell::lease(&layer.cell)?, CallKind::Combine);
        let layout = get(handle).and_then(|handle| ExclusiveCell::lease(&handle));
        let layout = layout.map_err(|fault| refuse::call(&mut ep, call, None, fault))?;
        let (context, sums) = (layer.context.clone(), (layout.tokens().into(), layer.hidden));
        let arguments = || -> Result<_, Fault> {
            // SAFETY: as the caller promised.
            let (out, given) = unsafe {
                let (shape, given) = (layer.landed(&layout), (output, rows));
                (Out::new("pending", pending)?, Outputs::read(context.as_ref(), "rows", shape, given)?)
            };
            Ok((out, given.used()?))
        };
        let (out, given) = arguments().map_err(|fault| refuse::call(&mut ep, call, Some(&layout), fault))?;
        let cell = CombineCell::try_new(MutBorrow::new(Combining { ep, layout }), |owned| {
            let Combining { ep, layout } = owned.borrow_mut();
            given.with(|y| ep.start_combine(y, layout)).map(Some)
        })?;
        give(ExclusiveCell::new(Kind::PendingCombine, CombineUnderway { cell, context, sums }), out)
    })
}

/// Second half of a combine, into `out`, [tokens, hidden]. The host waits until all ranks offer
/// their rows, and sums; on a device the sums are there for later operations on the stream.
/// Collective. `pending` is consumed. If `out` is invalid, the other ranks get their sums and this
/// one gets none.
///
/// The caller guarantees: as sidelane_ep_combine().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_combine_finish(pending: *mut PendingCombine, out: *const Tensor) -> Status {
    border(|| {
        let CombineUnderway { mut cell, context, sums } = retract(pending)?.take()?;
        // SAFETY: as the caller promised.
        let out = unsafe { Target::read(context.as_ref(), "out", out, sums) };
        cell.with_dependent_mut(|_, started| {
            let Some(started) = started.take() else { return Ok(()) };
            match out {
                Ok(mut out) => Ok(started.finish(out.lend())?),
                Err(fault) => {
                    // Too late to refuse: this rank does its part, and drops the sums that it has
                    // no place for.
                    started.finish(TensorMut::Host { bytes: &mut [], dtype: Dtype::Bytes }).ok();
                    Err(fault)
                }
            }
        })
    })
}

/// Closes a dispatch that will not be finished: the other ranks cannot go on, so the world ends,
/// whether rows lie on the host or on a device. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_pending_dispatch_close(pending: *mut PendingDispatch) -> Status {
    close(pending)
}

/// Closes a combine that will not be finished: the other ranks cannot go on, so the world ends,
/// whether rows lie on the host or on a device. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_pending_combine_close(pending: *mut PendingCombine) -> Status {
    close(pending)
}
