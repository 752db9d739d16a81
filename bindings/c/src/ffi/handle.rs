//! The layout of a dispatch, as C reads it.

use super::lent::pointer;
use super::memory::Out;
use super::objects::Handle;
use super::versioned::{OutStruct, versioned};
use super::{border, close, get};
use crate::Status;

/// The layout of a dispatch. The host may read the memory behind the pointers, except `status` and
/// `dropped_mask`, until the handle is closed. Empty arrays have a count of 0, as have arrays whose
/// sizes stay on the device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct HandleInfo {
    /// sizeof(sidelane_handle_info_t).
    pub size: usize,
    /// Rows received, pads counted.
    pub rows: u64,
    /// Tokens that this rank dispatched.
    pub tokens: u64,
    /// Rows of each local expert, [local_experts]; rank-major, rows that chose it.
    pub tokens_per_expert: *const i64,
    /// Local experts.
    pub local_experts: u64,
    /// Rows of each segment, pads and unused slots counted, [segments].
    pub padded_tokens_per_expert: *const i64,
    /// Segments of the rows: one per local expert; rank-major, one.
    pub segments: u64,
    /// Host: routing weight of each row, [rows], 0 for pads; rank-major, of each row and choice,
    /// [rows, top_k].
    pub row_weights: *const f32,
    /// How many weights.
    pub row_weight_count: u64,
    /// Rank-major: the local expert of each row and choice, [rows, top_k], -1 where there is none.
    pub row_experts: *const i32,
    /// How many ids; 0 unless rank-major.
    pub row_expert_count: u64,
    /// In spans: for each row in visible order, where it lies, [index_count].
    pub index_landing: *const u32,
    /// In spans: for each row as it lies, which it is in visible order, [index_count].
    pub index_visible: *const u32,
    /// Rows of both indices; 0 where rows lie in visible order.
    pub index_count: u64,
    /// Which of this rank's choices were dropped for want of room (1), [tokens, top_k].
    pub dropped: *const u8,
    /// How many choices.
    pub dropped_count: u64,
    /// Rows that each rank needed, [ranks].
    pub required_rows: *const u32,
    /// Ranks.
    pub ranks: u64,
    /// Device: outcome of the last call along the handle at this rank, for kernels: a word of
    /// SIDELANE_CALL_..., written before the stream continues. In slots, values between
    /// SIDELANE_CALL_OK and SIDELANE_CALL_WORLD_FAILED are errors found by a kernel;
    /// sidelane_ep_check() returns them.
    pub status: *const u32,
    /// Device, in slots: as `dropped`, for streams, [tokens, top_k]; each dispatch writes it anew.
    /// NULL elsewhere.
    pub dropped_mask: *const u8,
}
versioned!(HandleInfo, "sidelane_handle_info_t", dropped_mask: *const u8, 144, 152);

/// Says how the rows of a dispatch lie.
///
/// The caller guarantees: `info` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_handle_info(handle: *mut Handle, info: *mut HandleInfo) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(info) }?;
        get(handle)?.lend(|layout| {
            let (landing, visible) =
                layout.index().map_or((&[][..], &[][..]), |i| (i.landing(), i.visible()));
            let (real, padded) = (layout.tokens_per_expert(), layout.padded_tokens_per_expert());
            let (weights, experts) = (layout.row_weights(), layout.row_experts());
            let (dropped, required) = (layout.dropped(), layout.required_rows());
            out.write(HandleInfo {
                size: 0,
                rows: layout.rows().into(),
                tokens: layout.tokens().into(),
                tokens_per_expert: real.as_ptr(),
                local_experts: real.len() as u64,
                padded_tokens_per_expert: padded.as_ptr(),
                segments: padded.len() as u64,
                row_weights: weights.as_ptr(),
                row_weight_count: weights.len() as u64,
                row_experts: experts.as_ptr(),
                row_expert_count: experts.len() as u64,
                index_landing: landing.as_ptr(),
                index_visible: visible.as_ptr(),
                index_count: landing.len() as u64,
                dropped: dropped.as_ptr().cast(),
                dropped_count: dropped.len() as u64,
                required_rows: required.as_ptr(),
                ranks: required.len() as u64,
                status: layout.status().map_or(std::ptr::null(), |word| pointer(&word)),
                dropped_mask: layout.dropped_mask().map_or(std::ptr::null(), |mask| pointer(mask)),
            });
            Ok(())
        })
    })
}

/// How the last call along the handle ended at this rank: the status word as the host sees it now.
/// It is final once the stream has passed the call. On the host it is SIDELANE_CALL_OK: calls
/// return their errors there.
///
/// The caller guarantees: `status` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_handle_status(handle: *mut Handle, status: *mut u32) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { Out::new("status", status) }?;
        get(handle)?.lend(|layout| {
            out.write(layout.status_now().0);
            Ok(())
        })
    })
}

/// Closes the handle. Rows and outputs of it that are open stay as they are. On a device the
/// dispatch is no longer in flight when handle, rows and outputs are closed. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_handle_close(handle: *mut Handle) -> Status {
    close(handle)
}
