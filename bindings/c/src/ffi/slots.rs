//! Exchanges in slots, which streams carry out alone: building them.

use std::ffi::c_void;
use std::sync::Arc;

use sidelane::Dtype;
use sidelane::device::Context;
use sidelane::ep::StreamExchange;

use super::memory::Out;
use super::objects::{Group, Slots, Stream};
use super::planned_dispatch::at;
use super::stream::let_go;
use super::tensor::{ExpertMap, reserved};
use super::versioned::{OutStruct, read, versioned};
use super::{border, close, get, give};
use crate::fault::Fault;
use crate::handles::{Kind, Seat};
use crate::{Status, refuse, words};

/// A `StreamExchange`, and what the border has to know of it.
#[derive(Debug)]
pub struct SlotsLayer {
    pub(super) seat: Seat<Exchange>,
    pub(super) context: Arc<Context>,
    pub(super) dtype: Dtype,
    pub(super) hidden: u64,
    pub(super) top_k: u32,
}

/// The exchange, and the tokens of the dispatch that waits for its combine.
#[derive(Debug)]
pub struct Exchange {
    pub(super) held: StreamExchange,
    pub(super) tokens: u64,
}

impl std::ops::Deref for Exchange {
    type Target = StreamExchange;

    fn deref(&self) -> &StreamExchange {
        &self.held
    }
}

/// Settings of an exchange in slots: all ranks must choose alike. 0 is the default of `dtype` and `max_tokens`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SlotsOptions {
    /// sizeof(sidelane_slots_options_t).
    pub size: usize,
    /// Number of experts. 0 if there is an expert map.
    pub experts: u32,
    /// Choices per token.
    pub top_k: u32,
    /// Elements of a row, which must be a multiple of 16 bytes.
    pub hidden: u32,
    /// Their type: SIDELANE_DTYPE_...
    pub dtype: u32,
    /// The most tokens of a rank in one call: so many rows move to each rank in each call. Default: 128.
    pub max_tokens: u32,
    /// 0.
    pub reserved: u32,
}
versioned!(SlotsOptions, "sidelane_slots_options_t", reserved: u32);

/// Where things lie, the same in every call. All pointers are the device's.
///
/// A slot begins with its header: uint32_t rows that are used, uint32_t tokens of the source; at `experts_at` local experts of each row,
/// int32_t [max_tokens, top_k], -1 for those that are elsewhere; at `weights_at` weights beside them, float; at `rows_at` the rows. What
/// is not used is zero, experts -1.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SlotsInfo {
    /// sizeof(sidelane_slots_info_t).
    pub size: usize,
    /// This rank's position in the group.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// The most tokens of a rank.
    pub max_tokens: u32,
    /// Rows of a slot, those of its header counted.
    pub slot_rows: u32,
    /// What was received: a slot of each rank, by rank. As a tensor [ranks * slot_rows, hidden].
    pub received: *const c_void,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// Where in a slot the local experts begin.
    pub experts_at: u64,
    /// Where in a slot the weights begin.
    pub weights_at: u64,
    /// Where in a slot the rows begin.
    pub rows_at: u64,
    /// Where experts leave their partial rows, [ranks, max_tokens, hidden]: row i of rank r is what this rank's experts make of row i of
    /// the slot of r, weighted and added up. Rows that a slot does not use may be left as they are.
    pub partials: *mut c_void,
    /// Bytes of the partial rows of a rank.
    pub partial_bytes: u64,
    /// A word that is 0 while all is well, for kernels.
    pub status: *const u32,
}
versioned!(SlotsInfo, "sidelane_slots_info_t", status: *const u32);

/// Builds an exchange in slots on the device of `stream`. Collective. `expert_map` may be
/// NULL. Kernels must be loaded early: set CUDA_MODULE_LOADING=EAGER before the program starts.
///
/// The caller's word: pointers are NULL or valid; `options` is as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_slots_build(
    group: *mut Group,
    options: *const SlotsOptions,
    expert_map: *const ExpertMap,
    stream: *mut Stream,
    slots: *mut *mut Slots,
) -> Status {
    border(|| {
        let group = get(group)?;
        let arguments = || -> Result<_, Fault> {
            // SAFETY: as the caller promised.
            let (out, options, map) =
                unsafe { (Out::new("slots", slots)?, read(options)?, ExpertMap::read(expert_map)?) };
            reserved("reserved field of the options", options.reserved)?;
            Ok((out, options, map, words::dtype(options.dtype)?, get(stream)?))
        };
        let (out, options, map, dtype, stream) = arguments().inspect_err(|_| refuse::build(&group))?;
        let_go(&stream);
        let context = stream.context();
        let SlotsOptions { experts, top_k, hidden, max_tokens, .. } = options;
        let mut builder = StreamExchange::builder(&group, context).experts(experts).top_k(top_k);
        builder = builder.hidden(hidden).dtype(dtype);
        if max_tokens > 0 {
            builder = builder.max_tokens(max_tokens);
        }
        if let Some(map) = map {
            builder = builder.expert_map(map);
        }
        let seat = Seat::new(Kind::Slots, Exchange { held: builder.build()?, tokens: 0 });
        let context = Arc::clone(context);
        give(SlotsLayer { seat, context, dtype, hidden: hidden.into(), top_k }, out)
    })
}

/// Says where things lie.
///
/// The caller's word: `info` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_slots_info(slots: *mut Slots, info: *mut SlotsInfo) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(info) }?;
        let layer = get(slots)?;
        layer.seat.lend(|exchange| {
            let (shape, partials) = (exchange.shape(), exchange.partials()?);
            out.write(SlotsInfo {
                size: 0,
                rank: exchange.rank(),
                ranks: exchange.size(),
                max_tokens: shape.max_tokens(),
                slot_rows: shape.slot_rows(),
                received: at(exchange.received().address()),
                slot_bytes: shape.bytes(),
                experts_at: shape.experts_at(),
                weights_at: shape.weights_at(),
                rows_at: shape.rows_at(),
                partials: at(partials.address()),
                partial_bytes: partials.len() / u64::from(exchange.size()),
                status: at(exchange.status_word()?.address()),
            });
            Ok(())
        })
    })
}

/// Closes the exchange, when the host has enqueued its last call. Graphs that hold its calls are not to be launched again. NULL
/// is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_slots_close(slots: *mut Slots) -> Status {
    close(slots)
}
