//! Halves of dispatch and combine: start, compute, finish.
//!
//! ```text
//!   start    the layer leaves its seat and moves in here, with the first half that borrows it
//!   between  calls on the layer (and, in a combine, on the handle) say that it is underway
//!   finish   the second half; the layer goes back to its seat
//! ```
//!
//! Rust's halves borrow the layer. C has nowhere to keep a borrow, so owner and borrower live in one cell. When the cell is
//! dropped, finished or not, what it leased goes back.

use self_cell::{MutBorrow, self_cell};
use sidelane::ExpertParallel;
use sidelane::ep::Handle as Layout;
use sidelane::gate;

use super::combine::Outputs;
use super::dispatch::{Results, input};
use super::memory::Out;
use super::objects::{Ep, Handle, Output, PendingCombine, PendingDispatch, Rows};
use super::tensor::{self, Routing, Source, Tensor, with_element};
use super::{border, close, get, give, retract};
use crate::fault::Fault;
use crate::handles::{Kind, Lease, Seat};
use crate::refuse::Call;
use crate::{Status, refuse};

struct Dispatching {
    ep: Lease<ExpertParallel>,
    x: Source<'static>,
    routing: gate::Routing<'static>,
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
    tokens: u64,
    hidden: u64,
}

// SAFETY: all of it may be sent but the reference to the layout, which must not be used in two threads at once. The layout
// lies in the same cell, and nobody else has a reference to it, so both always move together.
unsafe impl Send for CombineUnderway {}

/// First half of sidelane_ep_dispatch(): announces memory and publishes counts, and does not wait. Until it is finished the
/// layer takes no other call, and what this rank does for other nodes is done in a thread of its own.
///
/// Input that the library refuses is reported by the second half, on all ranks.
///
/// The caller's word: as sidelane_ep_dispatch(), and `x` and the arrays of `routing` stay as they are until the dispatch is
/// finished or closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_dispatch_start(
    ep: *mut Ep,
    x: *const Tensor,
    routing: *const Routing,
    pending: *mut *mut PendingDispatch,
) -> Status {
    border(|| {
        let layer = get(ep)?;
        let mut ep = Seat::lease(&layer.seat)?;
        // SAFETY: as the caller promised; nothing of it is used once the cell is gone.
        let arguments = unsafe {
            Out::new("pending", pending)
                .map_err(Fault::from)
                .and_then(|out| Ok((out, input(&layer, x, routing)?)))
        };
        let (out, (x, routing)) = arguments.inspect_err(|_| refuse::dispatch(&mut ep))?;
        let owned = MutBorrow::new(Dispatching { ep, x, routing });
        let cell = DispatchCell::try_new(owned, |owned| {
            let Dispatching { ep, x, routing } = owned.borrow_mut();
            with_element!(x.dtype, E => ep.start_dispatch(x.elements::<E>(), routing)).map(Some)
        })?;
        give(Seat::new(Kind::PendingDispatch, DispatchUnderway(cell)), out)
    })
}

/// Second half of a dispatch: waits for the counts of all, places, moves the rows, and waits for those that come here.
/// Collective. `pending` is used up.
///
/// The caller's word: `rows` and `handle` are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_dispatch_finish(
    pending: *mut PendingDispatch,
    rows: *mut *mut Rows,
    handle: *mut *mut Handle,
) -> Status {
    border(|| {
        let DispatchUnderway(mut cell) = retract(pending)?.take()?;
        // SAFETY: as the caller promised.
        let results = unsafe { Results::new(rows, handle) };
        let received = cell.with_dependent_mut(|_, started| started.take().map(|started| started.finish()));
        // The layer goes back; the others have what they wait for, whatever the results.
        drop(cell);
        received.map_or(Ok(()), |received| results?.give(received?))
    })
}

/// First half of sidelane_ep_combine(): offers this rank's rows, and does not wait for the others'. Until it is finished
/// layer and handle take no other call, and what this rank does for other nodes is done in a thread of its own.
///
/// The caller's word: as sidelane_ep_combine().
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
        let mut ep = Seat::lease(&layer.seat)?;
        let layout = get(handle).and_then(|handle| Seat::lease(&handle));
        let layout = layout.inspect_err(|_| refuse::along(&mut ep, layer.dtype, None, Call::Combine))?;
        let (tokens, hidden) = (layout.tokens().into(), layer.hidden);
        let arguments = || -> Result<_, Fault> {
            // SAFETY: as the caller promised.
            let (out, given) = unsafe {
                (Out::new("pending", pending)?, Outputs::read("rows", layer.landed(&layout), output, rows)?)
            };
            Ok((out, given.contribution()?))
        };
        let (out, y) =
            arguments().inspect_err(|_| refuse::along(&mut ep, layer.dtype, Some(&layout), Call::Combine))?;
        let cell = CombineCell::try_new(MutBorrow::new(Combining { ep, layout }), |owned| {
            let Combining { ep, layout } = owned.borrow_mut();
            ep.start_combine(y, layout).map(Some)
        })?;
        give(Seat::new(Kind::PendingCombine, CombineUnderway { cell, tokens, hidden }), out)
    })
}

/// Second half of a combine: waits until all ranks offer their rows, and sums into `out`, [tokens, hidden]. Collective.
/// `pending` is used up. If `out` cannot be used, the other ranks get their sums and this one gets none.
///
/// The caller's word: as sidelane_ep_combine().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_combine_finish(pending: *mut PendingCombine, out: *const Tensor) -> Status {
    border(|| {
        let CombineUnderway { mut cell, tokens, hidden } = retract(pending)?.take()?;
        // SAFETY: as the caller promised.
        let out = unsafe { tensor::Target::read("out", out, tokens, hidden) };
        cell.with_dependent_mut(|_, started| {
            let Some(started) = started.take() else { return Ok(()) };
            match out {
                Ok(mut out) => Ok(with_element!(out.dtype, E => started.finish(out.elements::<E>()))?),
                Err(fault) => {
                    // Too late to refuse: this rank does its part, and what it has no place for is left.
                    started.finish::<u8>(&mut []).ok();
                    Err(fault)
                }
            }
        })
    })
}

/// Closes a dispatch that will not be finished: the other ranks cannot go on, so the world ends. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_pending_dispatch_close(pending: *mut PendingDispatch) -> Status {
    close(pending)
}

/// Closes a combine that will not be finished: the other ranks cannot go on, so the world ends. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_pending_combine_close(pending: *mut PendingCombine) -> Status {
    close(pending)
}
