//! Memory that experts read and write, and tokens that NICs read in place.

use std::ffi::c_void;
use std::ptr::null;

use super::lent::pointer;
use super::memory::Out;
use super::objects::{Handle, Output, Rows, Tokens};
use super::versioned::{OutStruct, versioned};
use super::{border, close, get, give};
use crate::Status;
use crate::handles::{ExclusiveCell, Kind};

/// Received rows. The memory behind the pointers may be read and changed until the rows are closed.
/// On a device all pointers are device addresses, and the rows are there for operations that are
/// enqueued on the layer's stream behind the dispatch.
///
/// In fixed slots on a device, a slot of each rank, by rank, lies at `data`. A slot begins with its
/// header: uint32_t used rows, uint32_t tokens of the source; at `slot_experts_at` the local expert
/// of each row and choice, int32_t [max_tokens, top_k], -1 for those at other ranks; at
/// `slot_weights_at` their weights, float. At `slot_rows_at` the rows begin, [max_tokens, hidden].
/// Unused parts are zero, unused experts -1.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RowsInfo {
    /// sizeof(sidelane_rows_info_t).
    pub size: usize,
    /// The rows, without gaps. With fp8 each is a record: values first, then scales.
    pub data: *mut c_void,
    /// Number of rows, pads counted; with SIDELANE_GRAPHS_SLOTS, those of the budget; in fixed
    /// slots, those of all slots.
    pub rows: u64,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Exact sizes and budgets: routing weight of each row, [rows]; 0 for pads. Rank-major, of each
    /// row and choice, [rows, top_k].
    pub weights: *const f32,
    /// The same: rows of each local expert, then these with pads, [2, local experts]. Rank-major,
    /// rows that chose each, [local experts].
    pub counts: *const i64,
    /// The same: rows as they arrived, where engines relay (SIDELANE_ROUTE_PXN across nodes); else
    /// NULL.
    pub arrived: *const c_void,
    /// The same: for each row which of `arrived` it is, -1 for pads, [rows]; NULL as `arrived` is.
    pub index: *const i32,
    /// Fixed slots on a device: bytes of a slot; 0 elsewhere.
    pub slot_bytes: u64,
    /// Bytes from the start of a slot to its local experts.
    pub slot_experts_at: u64,
    /// Bytes from the start of a slot to its weights.
    pub slot_weights_at: u64,
    /// Bytes from the start of a slot to its rows.
    pub slot_rows_at: u64,
    /// Exact sizes, rank-major: the local expert of each row and choice, [rows, top_k]; -1 where
    /// there is none. NULL elsewhere.
    pub experts: *const i32,
}
versioned!(RowsInfo, "sidelane_rows_info_t", experts: *const i32, 32, 96);

/// What experts write. It may be written until the output is used up or closed.
///
/// In fixed slots on a device it is [ranks, max_tokens, hidden]: row i of rank r is what this
/// rank's experts make of row i of the slot of r, weighted and added up. Rows that a slot does not
/// use may be left as they are.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct OutputInfo {
    /// sizeof(sidelane_output_info_t).
    pub size: usize,
    /// The rows, without gaps; on a device, its address there. Their contents are undefined at
    /// first.
    pub data: *mut c_void,
    /// Number of rows, pads counted. What pad rows hold is never read.
    pub rows: u64,
    /// Bytes of a row.
    pub row_bytes: u64,
}
versioned!(OutputInfo, "sidelane_output_info_t", row_bytes: u64);

/// A buffer of tokens to dispatch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TokensInfo {
    /// sizeof(sidelane_tokens_info_t).
    pub size: usize,
    /// The rows, without gaps. Their contents are undefined at first.
    pub data: *mut c_void,
    /// Number of rows.
    pub rows: u64,
    /// Bytes of a row.
    pub row_bytes: u64,
}
versioned!(TokensInfo, "sidelane_tokens_info_t", row_bytes: u64);

/// Where bytes of the host lie, and how many.
fn place(bytes: &mut [u8]) -> (*mut c_void, u64) {
    (bytes.as_mut_ptr().cast(), bytes.len() as u64)
}

/// Number of rows, and bytes of each.
fn shape(bytes: u64, rows: u32) -> (u64, u64) {
    (rows.into(), bytes / u64::from(rows.max(1)))
}

/// Says where received rows lie.
///
/// The caller guarantees: `info` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_rows_info(rows: *mut Rows, info: *mut RowsInfo) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(info) }?;
        get(rows)?.lend(|received| {
            let (data, bytes) = match received.range() {
                Ok(range) => (pointer(&range), range.len()),
                Err(_) => place(received.rows_mut()?),
            };
            let (rows, row_bytes) = shape(bytes, received.len());
            let (arrivals, slots) = (received.arrivals(), received.slots());
            out.write(RowsInfo {
                size: 0,
                data,
                rows,
                row_bytes: slots.map_or(row_bytes, |slot| slot.row_bytes()),
                weights: received.weights().map_or(null(), |range| pointer(&range)),
                counts: received.counts().map_or(null(), |range| pointer(&range)),
                arrived: arrivals.map_or(null(), |(arrived, _)| pointer(arrived)),
                index: arrivals.map_or(null(), |(_, index)| pointer(index)),
                slot_bytes: slots.map_or(0, |slot| slot.bytes()),
                slot_experts_at: slots.map_or(0, |slot| slot.experts_at()),
                slot_weights_at: slots.map_or(0, |slot| slot.weights_at()),
                slot_rows_at: slots.map_or(0, |slot| slot.rows_at()),
                experts: received.experts().map_or(null(), |range| pointer(range)),
            });
            Ok(())
        })
    })
}

/// Closes rows: their memory goes back to the receive pool, and on a device to calls that are
/// enqueued later. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_rows_close(rows: *mut Rows) -> Status {
    close(rows)
}

/// A buffer of the received rows' shape that combine takes without a copy: experts write into it.
/// Local. On the host, after a combine that was refused, this is the buffer of that combine, as it
/// was.
///
/// The caller guarantees: `output` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_handle_output(handle: *mut Handle, output: *mut *mut Output) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { Out::new("output", output) }?;
        let buffer = get(handle)?.lend(|layout| Ok(layout.output()?))?;
        give(ExclusiveCell::new(Kind::Output, buffer), out)
    })
}

/// Says where experts are to write.
///
/// The caller guarantees: `info` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_output_info(output: *mut Output, info: *mut OutputInfo) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(info) }?;
        get(output)?.lend(|buffer| {
            let (data, bytes) = match buffer.range() {
                Ok(range) => (pointer(range), range.len()),
                Err(_) => place(buffer.rows_mut()?),
            };
            let (rows, row_bytes) = shape(bytes, buffer.len());
            out.write(OutputInfo { size: 0, data, rows, row_bytes });
            Ok(())
        })
    })
}

/// Closes an output that was not used up. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_output_close(output: *mut Output) -> Status {
    close(output)
}

/// Says where tokens are to be written.
///
/// The caller guarantees: `info` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_tokens_info(tokens: *mut Tokens, info: *mut TokensInfo) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(info) }?;
        get(tokens)?.lend(|buffer| {
            let count = buffer.len();
            let (data, bytes) = match buffer.range() {
                Ok(range) => (pointer(range), range.len()),
                Err(_) => place(buffer.rows_mut()?),
            };
            let (rows, row_bytes) = shape(bytes, count);
            out.write(TokensInfo { size: 0, data, rows, row_bytes });
            Ok(())
        })
    })
}

/// Closes a buffer of tokens. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_tokens_close(tokens: *mut Tokens) -> Status {
    close(tokens)
}
