//! Combine beside a stream.

use super::enqueued::{PlannedReport, planned_report};
use super::lent;
use super::memory::Out;
use super::objects::{Planned, PlannedCombine, PlannedHandle, PlannedOutput};
use super::tensor::Tensor;
use super::versioned::OutStruct;
use super::{border, close, get, give, retract};
use crate::handles::{Kind, Seat};
use crate::{Status, refuse};

/// Enqueues that expert outputs come back to their tokens and are summed into `out`, [tokens, hidden] in memory of the device.
/// Collective; nobody waits. `output` is used up, whatever becomes of the call. `out` is there for what is enqueued on the exchange's
/// stream afterwards.
///
/// `combine` may be NULL: there is no need to finish it, and what is wrong with this rank's own arguments is then said here. A combine
/// that was refused leaves zeros where `out` has room for them, and says why in the handle's status.
///
/// The caller's word: pointers are NULL or valid; `out` is as large as it says, and stays there until the stream has come
/// past.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_planned_combine(
    planned: *mut Planned,
    output: *mut PlannedOutput,
    handle: *mut PlannedHandle,
    out: *const Tensor,
    combine: *mut *mut PlannedCombine,
) -> Status {
    border(|| {
        let layer = get(planned)?;
        let (seat, y) = (get(handle), retract(output).and_then(|output| output.take()));
        layer.seat.lend(|exchange| {
            let seat = match seat {
                Ok(seat) => seat,
                Err(fault) => {
                    // It may hold the seat that the refusal needs.
                    drop(y);
                    refuse::planned_dispatch(exchange, &lent::nowhere());
                    return Err(fault);
                }
            };
            seat.lend(|layout| {
                let layout = layout.held();
                let shape = (layout.tokens().into(), layer.hidden);
                // SAFETY: as the caller promised.
                let sums = unsafe { lent::tensor(&layer.context, "out", out, shape, layer.dtype) };
                // SAFETY: as the caller promised.
                let wanted = (!combine.is_null()).then(|| unsafe { Out::new("combine", combine) });
                let arguments = sums.and_then(|sums| Ok((sums, wanted.transpose()?)));
                let brought = y.and_then(|y| Ok((y.into_held(), arguments?)));
                let (y, (sums, wanted)) = match brought {
                    Ok(brought) => brought,
                    Err(fault) => {
                        exchange.refuse_combine(layout).ok();
                        return Err(fault);
                    }
                };
                let enqueued = exchange.combine(y, layout, &sums)?;
                match wanted {
                    Some(out) => give(Seat::new(Kind::PlannedCombine, enqueued), out),
                    None => Ok(enqueued.accepted().map(drop)?),
                }
            })
        })
    })
}

/// Waits until the rows are home, though not for their sums, and says how their bytes went. `combine` is used up. To be asked
/// before another combine of the same dispatch is enqueued.
///
/// The caller's word: `report` is NULL (then nothing is said), or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_planned_combine_finish(
    combine: *mut PlannedCombine,
    report: *mut PlannedReport,
) -> Status {
    border(|| {
        let enqueued = retract(combine)?.take()?;
        // SAFETY: as the caller promised.
        let out = (!report.is_null()).then(|| unsafe { OutStruct::new(report) }).transpose();
        let said = enqueued.finish()?;
        if let Some(out) = out? {
            out.write(planned_report(&said));
        }
        Ok(())
    })
}

/// Closes a combine that nobody asks about. The sums are made all the same. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_planned_combine_close(combine: *mut PlannedCombine) -> Status {
    close(combine)
}
