//! Dispatch beside a stream: what is enqueued, and what is known of it when its sizes are.

use std::ffi::c_void;

use sidelane::ep::planned::{
    PlannedDispatch as Started, PlannedHandle as Layout, PlannedRows as Received, Tokens,
};

use super::buffers::OutputInfo;
use super::lent::{Sent, nowhere};
use super::memory::Out;
use super::objects::{Planned, PlannedDispatch, PlannedHandle, PlannedOutput, PlannedRows};
use super::tensor::{Routing, Tensor};
use super::versioned::{OutStruct, versioned};
use super::{border, close, get, give, retract};
use crate::fault::Fault;
use crate::handles::{Kind, Seat};
use crate::{Status, refuse};

/// Rows that a dispatch brings, in memory of the device. They are there for what is enqueued on the exchange's stream behind the dispatch.
/// All pointers are the device's.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PlannedRowsInfo {
    /// sizeof(sidelane_planned_rows_info_t).
    pub size: usize,
    /// The rows, [rows, hidden], without gaps.
    pub data: *mut c_void,
    /// Number of rows, pads counted; with a budget, as many as that has.
    pub rows: u64,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Routing weight of each row, [rows]; 0 for pads.
    pub weights: *const f32,
    /// Rows of each local expert, then the same with pads: [2, local experts].
    pub counts: *const i64,
    /// Rows as they arrived, where engines relay (SIDELANE_ROUTE_PXN across nodes); else NULL.
    pub arrived: *const c_void,
    /// For each row which of `arrived` it is, -1 for pads, [rows]; NULL as `arrived` is.
    pub index: *const i32,
}
versioned!(PlannedRowsInfo, "sidelane_planned_rows_info_t", index: *const i32);

/// The placement of a dispatch. What it points to may be read until the handle is closed, by the host; but `status` is the
/// device's. After sidelane_planned_dispatch_unfinished() counts and sizes are not known here: 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PlannedHandleInfo {
    /// sizeof(sidelane_planned_handle_info_t).
    pub size: usize,
    /// Rows received, pads counted.
    pub rows: u64,
    /// Tokens that this rank dispatched.
    pub tokens: u64,
    /// Rows of each local expert, [local_experts].
    pub tokens_per_expert: *const i64,
    /// The same, pads counted: the segments of the rows, [local_experts].
    pub padded_tokens_per_expert: *const i64,
    /// Local experts.
    pub local_experts: u64,
    /// Which of this rank's choices were dropped for want of room (1), [tokens, top_k].
    pub dropped: *const u8,
    /// How many choices.
    pub dropped_count: u64,
    /// Rows that each rank needed, [ranks].
    pub required_rows: *const u32,
    /// Ranks.
    pub ranks: u64,
    /// How the last call of this dispatch or its combines ended, for kernels: a word of SIDELANE_PLANNED_...
    pub status: *const u32,
}
versioned!(PlannedHandleInfo, "sidelane_planned_handle_info_t", status: *const u32);

/// What was made of a dispatch, and the bytes of its rows.
#[derive(Debug)]
pub struct OfRows<T> {
    held: T,
    row_bytes: u64,
}

impl<T> OfRows<T> {
    /// Without the size.
    pub(super) fn into_held(self) -> T {
        self.held
    }

    /// As it is lent.
    pub(super) fn held(&self) -> &T {
        &self.held
    }
}

/// Enqueues that every token goes to the ranks of its experts, and that the rows of this rank's experts come. Collective;
/// nobody waits. What is enqueued on the exchange's stream afterwards finds the rows.
///
/// `x` is [tokens, hidden], and `routing` has its arrays, in memory of the device: they must stay there, and stay as they
/// are, until the stream has come past. With a budget the call may be captured into a graph.
///
/// The caller's word: pointers are NULL or valid; tensors and arrays are as large as they say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_planned_dispatch_start(
    planned: *mut Planned,
    x: *const Tensor,
    routing: *const Routing,
    dispatch: *mut *mut PlannedDispatch,
) -> Status {
    border(|| {
        let layer = get(planned)?;
        let arguments = || -> Result<_, Fault> {
            // SAFETY: as the caller promised.
            unsafe {
                let out = Out::new("dispatch", dispatch)?;
                let shape = (layer.hidden, layer.top_k);
                Ok((out, Sent::read(&layer.context, (x, routing), shape, layer.dtype)?))
            }
        };
        let arguments = arguments();
        layer.seat.lend(|exchange| {
            let (out, sent) = arguments.inspect_err(|_| refuse::planned_dispatch(exchange, &nowhere()))?;
            let Sent { x, experts, weights, .. } = &sent;
            let held = exchange.dispatch(Tokens { x, experts, weights })?;
            let row_bytes = layer.hidden * layer.dtype.size() as u64;
            give(Seat::new(Kind::PlannedDispatch, OfRows { held, row_bytes }), out)
        })
    })
}

/// Waits until all ranks have said how many rows they have: not for the rows. `dispatch` is used up. Both results are the
/// caller's to close.
///
/// The caller's word: `rows` and `handle` are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_planned_dispatch_finish(
    dispatch: *mut PlannedDispatch,
    rows: *mut *mut PlannedRows,
    handle: *mut *mut PlannedHandle,
) -> Status {
    // SAFETY: as the caller promised.
    border(|| ended(dispatch, unsafe { results(rows, handle) }, Started::finish))
}

/// With a budget: goes on without waiting. How many rows come stands on the device (sidelane_planned_rows_info_t.counts).
/// `dispatch` is used up.
///
/// The caller's word: as sidelane_planned_dispatch_finish().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_planned_dispatch_unfinished(
    dispatch: *mut PlannedDispatch,
    rows: *mut *mut PlannedRows,
    handle: *mut *mut PlannedHandle,
) -> Status {
    // SAFETY: as the caller promised.
    border(|| ended(dispatch, unsafe { results(rows, handle) }, Started::unfinished))
}

type Results = (Out<*mut PlannedRows>, Out<*mut PlannedHandle>);

/// # Safety
/// As [`Out::new`].
unsafe fn results(rows: *mut *mut PlannedRows, handle: *mut *mut PlannedHandle) -> Result<Results, Fault> {
    // SAFETY: as the caller promised.
    Ok(unsafe { (Out::new("rows", rows)?, Out::new("handle", handle)?) })
}

/// Uses a dispatch up, and gives what comes of it.
fn ended(
    dispatch: *mut PlannedDispatch,
    results: Result<Results, Fault>,
    end: impl FnOnce(Started) -> Result<(Received, Layout), sidelane::Error>,
) -> Result<(), Fault> {
    let OfRows { held, row_bytes } = retract(dispatch)?.take()?;
    let ((received, layout), (rows, handle)) = (end(held)?, results?);
    give(Seat::new(Kind::PlannedRows, OfRows { held: received, row_bytes }), rows)?;
    give(Seat::new(Kind::PlannedHandle, OfRows { held: layout, row_bytes }), handle)
}

/// Closes a dispatch that nobody asks about. Its rows come all the same. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_planned_dispatch_close(dispatch: *mut PlannedDispatch) -> Status {
    close(dispatch)
}

/// Says where the rows of a dispatch lie.
///
/// The caller's word: `info` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_planned_rows_info(
    rows: *mut PlannedRows,
    info: *mut PlannedRowsInfo,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(info) }?;
        get(rows)?.lend(|OfRows { held: received, row_bytes }| {
            let (data, weights) = (received.rows()?, received.weights()?);
            let index = received.index();
            out.write(PlannedRowsInfo {
                size: 0,
                data: at(data.address()),
                rows: data.len() / *row_bytes,
                row_bytes: *row_bytes,
                weights: at(weights.address()),
                counts: at(received.counts().address()),
                arrived: at(index.map_or(0, |(arrived, _)| arrived.address())),
                index: at(index.map_or(0, |(_, index)| index.address())),
            });
            Ok(())
        })
    })
}

/// Closes rows: their memory goes to calls that are enqueued later. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_planned_rows_close(rows: *mut PlannedRows) -> Status {
    close(rows)
}

/// Says how the rows of a dispatch lie.
///
/// The caller's word: `info` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_planned_handle_info(
    handle: *mut PlannedHandle,
    info: *mut PlannedHandleInfo,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(info) }?;
        get(handle)?.lend(|OfRows { held: layout, .. }| {
            let (real, padded) = (layout.tokens_per_expert(), layout.padded_tokens_per_expert());
            let (dropped, required) = (layout.dropped(), layout.required_rows());
            out.write(PlannedHandleInfo {
                size: 0,
                rows: layout.len().into(),
                tokens: layout.tokens().into(),
                tokens_per_expert: real.as_ptr(),
                padded_tokens_per_expert: padded.as_ptr(),
                local_experts: real.len() as u64,
                dropped: dropped.as_ptr().cast(),
                dropped_count: dropped.len() as u64,
                required_rows: required.as_ptr(),
                ranks: required.len() as u64,
                status: at(layout.status()?.address()),
            });
            Ok(())
        })
    })
}

/// How the last call of the dispatch or its combines ended, SIDELANE_PLANNED_...; sure once the stream has come past.
///
/// The caller's word: `status` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_planned_handle_status(
    handle: *mut PlannedHandle,
    status: *mut u32,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { Out::new("status", status) }?;
        get(handle)?.lend(|layout| {
            out.write(layout.held.status_now().0);
            Ok(())
        })
    })
}

/// A buffer of the rows' shape where peers can read it: experts write into it. Local.
///
/// The caller's word: `output` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_planned_handle_output(
    handle: *mut PlannedHandle,
    output: *mut *mut PlannedOutput,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { Out::new("output", output) }?;
        let buffer = get(handle)?.lend(|OfRows { held: layout, row_bytes }| {
            Ok(OfRows { held: layout.output()?, row_bytes: *row_bytes })
        })?;
        give(Seat::new(Kind::PlannedOutput, buffer), out)
    })
}

/// Closes the handle. Rows and outputs of it that are open stay as they are. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_planned_handle_close(handle: *mut PlannedHandle) -> Status {
    close(handle)
}

/// Says where experts are to write, in memory of the device.
///
/// The caller's word: `info` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_planned_output_info(
    output: *mut PlannedOutput,
    info: *mut OutputInfo,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(info) }?;
        get(output)?.lend(|OfRows { held: buffer, row_bytes }| {
            let (memory, row_bytes) = (buffer.rows(), *row_bytes);
            let rows = memory.len() / row_bytes;
            out.write(OutputInfo { size: 0, data: at(memory.address()), rows, row_bytes });
            Ok(())
        })
    })
}

/// Closes an output that was not used up. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_planned_output_close(output: *mut PlannedOutput) -> Status {
    close(output)
}

/// An address of the device's, as C has it.
pub(super) fn at<T>(address: u64) -> *mut T {
    std::ptr::without_provenance_mut(address as usize)
}
