//! Combine: rows back to their tokens, summed.

use std::ops::Range as Addresses;
use std::sync::Arc;

use sidelane::device::Context;
use sidelane::ep::{CombineInput, ExpertOutput};
use sidelane::error::CallKind;

use super::handle_calls::along;
use super::memory::apart;
use super::objects::{Ep, Handle, Opaque, Output};
use super::tensor::{Source, Target, Tensor};
use super::{TABLE, border, get, retract};
use crate::Status;
use crate::fault::{ArgumentError, Fault};

/// Returns expert outputs to their tokens and sums them into `out`, [tokens, hidden]. Collective.
///
/// Either `output`, the buffer of sidelane_handle_output(), which peers read in place and which is
/// used up, or `rows`, a tensor [rows, hidden] anywhere in the place of the layer, which is copied
/// once; the other is NULL. If an argument cannot be used, `output` stays open. After any other
/// error that leaves the world usable, sidelane_handle_output() on the host gives its buffer again,
/// as it was.
///
/// On a device the call is enqueued, and `out` is there for later operations on the stream. Errors
/// of this rank's own arguments are returned here; sidelane_handle_return_report() returns the
/// outcome on all ranks. A refused combine leaves zeros where `out` has room for them.
///
/// The caller guarantees: pointers are NULL or valid; tensors are as large as they say, and no
/// other thread uses them meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_combine(
    ep: *mut Ep,
    output: *mut Output,
    rows: *const Tensor,
    handle: *mut Handle,
    out: *const Tensor,
) -> Status {
    border(|| {
        along(
            (ep, handle, CallKind::Combine),
            |layer, layout| {
                let context = layer.context.as_ref();
                let shape = (layout.tokens().into(), layer.hidden);
                // SAFETY: as the caller promised.
                let given = unsafe { Outputs::read(context, "rows", layer.landed(layout), (output, rows)) }?;
                // SAFETY: as the caller promised.
                let out = unsafe { Target::read(context, "out", out, shape) }?;
                given.apart_from(("out", out.addresses()))?;
                Ok((given.used()?, out))
            },
            |ep, layout, (given, mut out)| Ok(given.with(|y| ep.combine_into(y, layout, out.lend()))?),
        )
    })
}

/// Fixed slots on a device, instead of a combine: the received rows have been read, and nothing
/// returns. NULL for `handle` is the last dispatch. Collective. Other layers refuse it by name:
/// their dispatches need no combine.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_ep_release(ep: *mut Ep, handle: *mut Handle) -> Status {
    border(|| {
        let layer = get(ep)?;
        if handle.is_null() {
            return layer.cell.lend(|ep| Ok(ep.release(None)?));
        }
        let cell = get(handle)?;
        layer.cell.lend(|ep| cell.lend(|layout| Ok(ep.release(Some(layout))?)))
    })
}

/// The caller's input of a combine or a gradient.
pub(super) struct Outputs<'a> {
    output: *mut Output,
    rows: Option<Source<'a>>,
    what: &'static str,
}

/// The same, once every argument is known to be usable.
pub(super) enum Given<'a> {
    Output(ExpertOutput),
    Rows(Source<'a>),
}

impl<'a> Outputs<'a> {
    /// An output, or rows of this shape.
    ///
    /// # Safety
    /// As [`Source::read`].
    pub(super) unsafe fn read(
        context: Option<&Arc<Context>>,
        what: &'static str,
        shape: (Option<u64>, u64),
        (output, rows): (*mut Output, *const Tensor),
    ) -> Result<Outputs<'a>, Fault> {
        let rows = match (output.is_null(), rows.is_null()) {
            (false, true) => {
                // Finds an unusable handle before the output is consumed, before any other error.
                TABLE.get::<<Output as Opaque>::Object>(output.addr() as u64)?;
                None
            }
            // SAFETY: as the caller promised.
            (true, false) => Some(unsafe { Source::read(context, what, rows, shape) }?),
            (none, _) => {
                let (what, expected) =
                    ("number of outputs and tensors given", "one of the two, and the other NULL");
                let seen = if none { 0 } else { 2 };
                return Err(ArgumentError::Value { what, seen, expected }.into());
            }
        };
        Ok(Outputs { output, rows, what })
    }

    /// Checks that written memory, given by name and addresses, lies apart from it.
    pub(super) fn apart_from(&self, written: (&'static str, Addresses<usize>)) -> Result<(), Fault> {
        apart((self.what, self.rows.as_ref().map_or(0..0, Source::addresses)), written)
    }

    /// From here on an output is used up.
    pub(super) fn used(self) -> Result<Given<'a>, Fault> {
        match self.rows {
            Some(rows) => Ok(Given::Rows(rows)),
            None => Ok(Given::Output(retract(self.output)?.take()?)),
        }
    }
}

impl Given<'_> {
    /// Makes a call with it.
    pub(super) fn with<R>(self, call: impl FnOnce(CombineInput<'_>) -> R) -> R {
        match self {
            Given::Output(output) => call(CombineInput::Output(output)),
            Given::Rows(rows) => call(CombineInput::Elsewhere(rows.lend())),
        }
    }
}
