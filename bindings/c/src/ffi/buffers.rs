//! What experts read and write, and tokens that cards read in place.

use std::ffi::c_void;

use super::memory::Out;
use super::objects::{Handle, Output, Rows, Tokens};
use super::versioned::{OutStruct, versioned};
use super::{border, close, get, give};
use crate::Status;
use crate::handles::{Kind, Seat};

/// Received rows. What it points to may be read and changed until the rows are closed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RowsInfo {
    /// sizeof(sidelane_rows_info_t).
    pub size: usize,
    /// The rows, without gaps. With fp8 each is a record: values first, then scales.
    pub data: *mut c_void,
    /// Number of rows, pads counted.
    pub rows: u64,
    /// Bytes of a row.
    pub row_bytes: u64,
}
versioned!(RowsInfo, "sidelane_rows_info_t", row_bytes: u64);

/// What experts write. It may be written until the output is used up or closed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct OutputInfo {
    /// sizeof(sidelane_output_info_t).
    pub size: usize,
    /// The rows, without gaps. Their contents are undefined at first.
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

/// Where so many bytes lie, and how many each of the rows has.
fn place(bytes: &mut [u8], rows: u32) -> (*mut c_void, u64, u64) {
    let row_bytes = bytes.len() as u64 / u64::from(rows.max(1));
    (bytes.as_mut_ptr().cast(), rows.into(), row_bytes)
}

/// Says where received rows lie.
///
/// The caller's word: `info` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_rows_info(rows: *mut Rows, info: *mut RowsInfo) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(info) }?;
        get(rows)?.lend(|received| {
            let count = received.len();
            let (data, rows, row_bytes) = place(received.rows_mut()?, count);
            out.write(RowsInfo { size: 0, data, rows, row_bytes });
            Ok(())
        })
    })
}

/// Closes rows: they go back to the receive pool. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_rows_close(rows: *mut Rows) -> Status {
    close(rows)
}

/// A buffer of the received rows' shape that combine takes without a copy: experts write into it. Local. After a combine that
/// was refused, this is the buffer of that combine, as it was.
///
/// The caller's word: `output` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_handle_output(handle: *mut Handle, output: *mut *mut Output) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { Out::new("output", output) }?;
        let buffer = get(handle)?.lend(|layout| Ok(layout.output()?))?;
        give(Seat::new(Kind::Output, buffer), out)
    })
}

/// Says where experts are to write.
///
/// The caller's word: `info` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_output_info(output: *mut Output, info: *mut OutputInfo) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(info) }?;
        get(output)?.lend(|buffer| {
            let count = buffer.len();
            let (data, rows, row_bytes) = place(buffer.rows_mut()?, count);
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
/// The caller's word: `info` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_tokens_info(tokens: *mut Tokens, info: *mut TokensInfo) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(info) }?;
        get(tokens)?.lend(|buffer| {
            let count = buffer.len();
            let (data, rows, row_bytes) = place(buffer.rows_mut()?, count);
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
