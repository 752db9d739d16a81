//! Calls along the layout of a handle.

use sidelane::ExpertParallel;
use sidelane::ep::Handle as Layout;

use super::layer::Layer;
use super::objects::{Ep, Handle};
use super::{border, get};
use crate::fault::Fault;
use crate::refuse::Call;
use crate::{Status, refuse};

/// Reads arguments and makes the call with them. If they or the handle cannot be used, this rank refuses the call, which the
/// others may be in.
pub(super) fn along<A>(
    (ep, handle, call): (*mut Ep, *mut Handle, Call),
    read: impl FnOnce(&Layer, &Layout) -> Result<A, Fault>,
    make: impl FnOnce(&mut ExpertParallel, &Layout, A) -> Result<(), Fault>,
) -> Status {
    border(|| {
        let layer = get(ep)?;
        let seat = get(handle);
        layer.seat.lend(|ep| {
            let seat = seat.inspect_err(|_| refuse::along(ep, layer.dtype, None, call))?;
            seat.lend(|layout| {
                let arguments = read(&layer, layout)
                    .inspect_err(|_| refuse::along(ep, layer.dtype, Some(layout), call))?;
                make(ep, layout, arguments)
            })
        })
    })
}
