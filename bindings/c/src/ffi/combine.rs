//! Combine: rows back to their tokens, summed.

use sidelane::ep::Contribution;

use super::along::along;
use super::memory::apart;
use super::objects::{Ep, Handle, Output};
use super::tensor::{self, Source, Tensor, with_element};
use super::{TABLE, retract};
use crate::Status;
use crate::fault::{ArgumentError, Fault};
use crate::refuse::Call;

/// Brings expert outputs back to their tokens and sums them into `out`, [tokens, hidden]. Collective.
///
/// Either `output`, the buffer of sidelane_handle_output(), which peers read in place and which is used up, or `rows`, a
/// tensor [rows, hidden] anywhere, which is copied once; the other is NULL. If an argument cannot be used, `output` stays
/// open. After any other error that leaves the world alive, sidelane_handle_output() gives its buffer again, as it was.
///
/// The caller's word: pointers are NULL or valid; tensors are as large as they say, and nobody else uses them meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_combine(
    ep: *mut Ep,
    output: *mut Output,
    rows: *const Tensor,
    handle: *mut Handle,
    out: *const Tensor,
) -> Status {
    along(
        (ep, handle, Call::Combine),
        |layer, layout| {
            // SAFETY: as the caller promised.
            let given = unsafe { Outputs::read("rows", layer.landed(layout), output, rows) }?;
            // SAFETY: as the caller promised.
            let out = unsafe { tensor::Target::read("out", out, layout.tokens().into(), layer.hidden) }?;
            given.apart_from("out", out.bytes())?;
            Ok((given.contribution()?, out))
        },
        |ep, layout, (y, mut out)| {
            Ok(with_element!(out.dtype, E => ep.combine_into(y, layout, out.elements::<E>()))?)
        },
    )
}

/// What the caller brings to a combine or a gradient.
pub(super) struct Outputs<'a> {
    output: *mut Output,
    rows: Option<Source<'a>>,
    what: &'static str,
}

impl<'a> Outputs<'a> {
    /// An output, or `count` rows of `columns` elements.
    ///
    /// # Safety
    /// As [`Source::read`].
    pub(super) unsafe fn read(
        what: &'static str,
        (count, columns): (u64, u64),
        output: *mut Output,
        rows: *const Tensor,
    ) -> Result<Outputs<'a>, Fault> {
        let rows = match (output.is_null(), rows.is_null()) {
            (false, true) => {
                // Whatever else is wrong, a handle that cannot be used is found before the output is used up.
                TABLE.get::<<Output as super::objects::Opaque>::Object>(output.addr() as u64)?;
                None
            }
            // SAFETY: as the caller promised.
            (true, false) => Some(unsafe { Source::read(what, rows, count, columns) }?),
            (none, _) => {
                let expected = "one of the two, and the other NULL";
                let seen = if none { 0 } else { 2 };
                return Err(ArgumentError::Value {
                    what: "number of outputs and tensors given",
                    seen,
                    expected,
                }
                .into());
            }
        };
        Ok(Outputs { output, rows, what })
    }

    /// That what is written lies apart from it.
    pub(super) fn apart_from<T>(&self, what: &'static str, written: &[T]) -> Result<(), Fault> {
        let read = self.rows.as_ref().map_or(&[][..], Source::bytes);
        apart((self.what, read), (what, written))
    }

    /// As the library takes it: from here on an output is used up.
    pub(super) fn contribution(self) -> Result<Contribution<'a>, Fault> {
        match self.rows {
            Some(rows) => Ok(Contribution::Elsewhere { bytes: rows.bytes(), dtype: rows.dtype }),
            None => Ok(Contribution::Output(retract(self.output)?.take()?)),
        }
    }
}
