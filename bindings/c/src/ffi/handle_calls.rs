//! Calls along the layout of a handle.

use sidelane::ExpertParallel;
use sidelane::ep::Handle as Layout;
use sidelane::error::CallKind;

use super::ep::Layer;
use super::get;
use super::objects::{Ep, Handle};
use crate::fault::Fault;
use crate::refuse;

/// Reads arguments and makes the call with them. If they or the handle cannot be used, this rank
/// refuses the call, which the others may be in.
pub(super) fn along<A>(
    (ep, handle, kind): (*mut Ep, *mut Handle, CallKind),
    read: impl FnOnce(&Layer, &Layout) -> Result<A, Fault>,
    make: impl FnOnce(&mut ExpertParallel, &Layout, A) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let (layer, cell) = (get(ep)?, get(handle));
    layer.cell.lend(|ep| {
        let cell = cell.map_err(|fault| refuse::call(ep, kind, None, fault))?;
        cell.lend(|layout| {
            let arguments =
                read(&layer, layout).map_err(|fault| refuse::call(ep, kind, Some(layout), fault))?;
            make(ep, layout, arguments)
        })
    })
}
