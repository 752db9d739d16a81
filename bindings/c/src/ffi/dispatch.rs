//! Dispatch: tokens to the ranks of their experts.

use sidelane::ep::{ExpertRows, Handle as Layout};
use sidelane::error::CallKind;

use super::ep::Layer;
use super::handle_calls::along;
use super::memory::Out;
use super::objects::{Ep, Handle, Rows};
use super::tensor::{Chosen, Routing, Source, Tensor};
use super::{border, get, give};
use crate::fault::Fault;
use crate::handles::{ExclusiveCell, Kind};
use crate::{Status, refuse};

/// Sends every token to the ranks of its experts, and receives the rows of this rank's experts.
/// Collective.
///
/// `x` is [tokens, hidden], of records with fp8 [tokens, record_bytes]. Both results are the
/// caller's to close.
///
/// On a device the call is enqueued, and the rows are there for later operations on the stream. The
/// call waits for the counts of all ranks, which give the sizes. In fixed slots it does not wait; a
/// refused call is not enqueued and can be made again.
///
/// The caller guarantees: pointers are NULL or valid; tensors and arrays are as large as they say,
/// and no other thread writes to them meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_dispatch(
    ep: *mut Ep,
    x: *const Tensor,
    routing: *const Routing,
    rows: *mut *mut Rows,
    handle: *mut *mut Handle,
) -> Status {
    border(|| {
        let layer = get(ep)?;
        // SAFETY: as the caller promised.
        let arguments =
            unsafe { Results::new(rows, handle).and_then(|r| Ok((r, input(&layer, x, routing)?))) };
        layer.cell.lend(|ep| {
            let (results, (x, chosen)) =
                arguments.map_err(|fault| refuse::call(ep, CallKind::Dispatch, None, fault))?;
            results.give(ep.dispatch(x.lend(), chosen.lend())?)
        })
    })
}

/// The layout of a dispatch, before its rows: how many come to each expert, and with which weights.
/// No row moves. Collective. sidelane_ep_dispatch_cached() brings rows along it, as often as there
/// are tokens for this routing, and takes the memory for them. The handle is the caller's to close.
///
/// The caller guarantees: as sidelane_ep_dispatch().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_prepare(
    ep: *mut Ep,
    routing: *const Routing,
    handle: *mut *mut Handle,
) -> Status {
    border(|| {
        let layer = get(ep)?;
        // SAFETY: as the caller promised.
        let arguments = unsafe {
            Out::new("handle", handle)
                .map_err(Fault::from)
                .and_then(|out| Ok((out, Routing::read(layer.context.as_ref(), routing, layer.top_k)?.0)))
        };
        layer.cell.lend(|ep| {
            let (out, chosen) =
                arguments.map_err(|fault| refuse::call(ep, CallKind::Prepare, None, fault))?;
            give(ExclusiveCell::new(Kind::Handle, ep.prepare(chosen.lend())?), out)
        })
    })
}

/// Sends tokens along the layout of an earlier dispatch: no ids, no counts. Collective. `x` has as
/// many tokens as that dispatch.
///
/// The caller guarantees: as sidelane_ep_dispatch().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_dispatch_cached(
    ep: *mut Ep,
    x: *const Tensor,
    handle: *mut Handle,
    rows: *mut *mut Rows,
) -> Status {
    let call = (ep, handle, CallKind::CachedDispatch);
    border(|| {
        along(
            call,
            |layer, layout| {
                let shape = (Some(layout.tokens().into()), layer.sent);
                // SAFETY: as the caller promised.
                unsafe { Ok((Out::new("rows", rows)?, Source::read(layer.context.as_ref(), "x", x, shape)?)) }
            },
            |ep, layout, (out, x)| {
                let received = ep.dispatch_cached(x.lend(), layout)?;
                give(ExclusiveCell::new(Kind::Rows, received), out)
            },
        )
    })
}

/// Input of a dispatch, and its destination.
///
/// # Safety
/// As [`Source::read`] and [`Routing::read`].
pub(super) unsafe fn input<'a>(
    layer: &Layer,
    x: *const Tensor,
    routing: *const Routing,
) -> Result<(Source<'a>, Chosen<'a>), Fault> {
    let context = layer.context.as_ref();
    // SAFETY: as the caller promised.
    let (chosen, tokens) = unsafe { Routing::read(context, routing, layer.top_k) }?;
    // SAFETY: as the caller promised.
    let x = unsafe { Source::read(context, "x", x, (Some(tokens), layer.sent)) }?;
    Ok((x, chosen))
}

/// Where the results of a dispatch go.
pub(super) struct Results {
    rows: Out<*mut Rows>,
    handle: Out<*mut Handle>,
}

impl Results {
    /// # Safety
    /// As [`Out::new`].
    pub(super) unsafe fn new(rows: *mut *mut Rows, handle: *mut *mut Handle) -> Result<Results, Fault> {
        // SAFETY: as the caller promised.
        Ok(unsafe { Results { rows: Out::new("rows", rows)?, handle: Out::new("handle", handle)? } })
    }

    pub(super) fn give(self, (rows, layout): (ExpertRows, Layout)) -> Result<(), Fault> {
        give(ExclusiveCell::new(Kind::Rows, rows), self.rows)?;
        give(ExclusiveCell::new(Kind::Handle, layout), self.handle)
    }
}
