//! Expert-parallel layers: building them, and what does not move rows.

use std::sync::Arc;

use sidelane::{Dtype, ExpertParallel};

use super::memory::{Out, apart, structure};
use super::objects::{Ep, Group, Tokens};
use super::tensor::{ExpertMap, Source, Target, Tensor, reserved, with_element};
use super::versioned::{OutStruct, read, versioned};
use super::{border, close, get, give};
use crate::fault::{ArgumentError, Fault};
use crate::handles::{Kind, Seat};
use crate::{Status, refuse, words};

/// An `ExpertParallel`, and what the border has to know of it.
#[derive(Debug)]
pub struct Layer {
    pub(super) seat: Arc<Seat<ExpertParallel>>,
    /// Of rows that are combined, and of dispatched ones that are no records.
    pub(super) dtype: Dtype,
    pub(super) hidden: u64,
    /// Columns of a dispatched row: `hidden`, or bytes of a record.
    pub(super) sent: u64,
    pub(super) top_k: u64,
    pub(super) weighted: bool,
}

/// Settings of a layer: all ranks must choose alike. 0 is the default of everything but `experts`, `top_k` and `hidden`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EpOptions {
    /// sizeof(sidelane_ep_options_t).
    pub size: usize,
    /// Number of experts. 0 if there is an expert map.
    pub experts: u32,
    /// Choices per token.
    pub top_k: u32,
    /// Elements of a row, which must be a multiple of 16 bytes.
    pub hidden: u32,
    /// Their type: SIDELANE_DTYPE_...
    pub dtype: u32,
    /// Order in which a token's rows are summed: SIDELANE_ORDER_...
    pub order: u32,
    /// Type of partial sums: SIDELANE_WIRE_...
    pub wire: u32,
    /// How rows reach other nodes: SIDELANE_ROUTE_...
    pub route: u32,
    /// How received rows lie: SIDELANE_LAYOUT_...
    pub layout: u32,
    /// How receive memory is sized: SIDELANE_MODE_...
    pub mode: u32,
    /// Rows of the budget, or slots.
    pub mode_rows: u32,
    /// What becomes of rows without room: SIDELANE_OVERFLOW_...
    pub overflow: u32,
    /// How rows go out: SIDELANE_STRATEGY_...
    pub strategy: u32,
    /// Each expert's rows start at and are padded to a multiple of this. Default: 1.
    pub align: u32,
    /// The most tokens of a rank in one call. Default: 4096.
    pub max_tokens: u32,
    /// 1: combine multiplies each row with its routing weight.
    pub weighted: u32,
    /// 1: dispatch sends records of e4m3 values and scales, which sidelane_ep_quantise() makes.
    pub fp8: u32,
    /// 1: relays hand on in few large copies (rank-major over pxn).
    pub spans: u32,
    /// 0.
    pub reserved: u32,
}
versioned!(EpOptions, "sidelane_ep_options_t", reserved: u32);

/// What a layer is.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EpInfo {
    /// sizeof(sidelane_ep_info_t).
    pub size: usize,
    /// This rank's position in the group.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Number of experts.
    pub experts: u32,
    /// Experts of this rank, replicas counted each.
    pub local_experts: u32,
    /// Choices per token.
    pub top_k: u32,
    /// Elements of a row that is combined.
    pub hidden: u32,
    /// Their type.
    pub dtype: u32,
    /// With fp8: scales of a record; 0 otherwise.
    pub record_scales: u32,
    /// With fp8: bytes of a record, which are the columns of what is dispatched; 0 otherwise.
    pub record_bytes: u64,
    /// With fp8: where in a record the scales begin, in bytes.
    pub record_scales_offset: u64,
}
versioned!(EpInfo, "sidelane_ep_info_t", record_scales_offset: u64);

impl Layer {
    /// Rows that landed, and their elements when they go home.
    pub(super) fn landed(&self, layout: &sidelane::ep::Handle) -> (u64, u64) {
        (layout.rows().into(), self.hidden)
    }
}

impl EpOptions {
    pub(super) fn apply<'g>(
        &self,
        builder: sidelane::ep::ExpertParallelBuilder<'g>,
    ) -> Result<sidelane::ep::ExpertParallelBuilder<'g>, Fault> {
        reserved("reserved field of the options", self.reserved)?;
        let mut builder = builder
            .experts(self.experts)
            .top_k(self.top_k)
            .hidden(self.hidden as usize)
            .dtype(words::dtype(self.dtype)?)
            .order(words::order(self.order)?)
            .wire(words::wire(self.wire)?)
            .route(words::route(self.route)?)
            .layout(words::layout(self.layout)?)
            .mode(words::mode(self.mode, self.mode_rows, self.overflow)?)
            .strategy(words::strategy(self.strategy)?)
            .weighted(words::switch("weighted", self.weighted)?)
            .fp8(words::switch("fp8", self.fp8)?)
            .spans(words::switch("spans", self.spans)?);
        if self.align > 0 {
            builder = builder.align(self.align);
        }
        if self.max_tokens > 0 {
            builder = builder.max_tokens(self.max_tokens);
        }
        Ok(builder)
    }
}

/// Builds a layer on a group. Collective. `expert_map` may be NULL: experts in contiguous blocks.
///
/// The caller's word: pointers are NULL or valid; `options` is as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_build(
    group: *mut Group,
    options: *const EpOptions,
    expert_map: *const ExpertMap,
    ep: *mut *mut Ep,
) -> Status {
    border(|| {
        let group = get(group)?;
        let arguments = || -> Result<_, Fault> {
            // SAFETY: as the caller promised.
            let (out, options, map) =
                unsafe { (Out::new("ep", ep)?, read(options)?, ExpertMap::read(expert_map)?) };
            let builder = options.apply(ExpertParallel::builder(&group)?)?;
            let builder = map.map_or(builder.clone(), |map| builder.expert_map(map));
            Ok((out, options, builder))
        };
        let (out, options, builder) = arguments().inspect_err(|_| refuse::build(&group))?;
        let ep = builder.build()?;
        let hidden = ep.hidden() as u64;
        let (sent, top_k) = (ep.record().map_or(hidden, |shape| shape.bytes() as u64), ep.top_k().into());
        let (dtype, weighted) = (words::dtype(options.dtype)?, options.weighted == 1);
        give(Layer { seat: Arc::new(Seat::new(Kind::Ep, ep)), dtype, hidden, sent, top_k, weighted }, out)
    })
}

/// Says what a layer is.
///
/// The caller's word: `info` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_info(ep: *mut Ep, info: *mut EpInfo) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(info) }?;
        let layer = get(ep)?;
        layer.seat.lend(|ep| {
            let map = ep.expert_map();
            let record = ep.record();
            out.write(EpInfo {
                size: 0,
                rank: ep.rank(),
                ranks: ep.size(),
                experts: map.experts(),
                local_experts: map.slots_of(ep.rank()).len() as u32,
                top_k: ep.top_k(),
                hidden: ep.hidden() as u32,
                dtype: words::dtype_number(layer.dtype),
                record_scales: record.map_or(0, |shape| shape.scales() as u32),
                record_bytes: record.map_or(0, |shape| shape.bytes() as u64),
                record_scales_offset: record.map_or(0, |shape| shape.scales_offset() as u64),
            });
            Ok(())
        })
    })
}

/// Moves experts to other ranks: the dispatches that follow go by this map. What ranks hold of the experts is the caller's to
/// move. Collective; no handle of the layer may be open.
///
/// The caller's word: `expert_map` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_set_expert_map(ep: *mut Ep, expert_map: *const ExpertMap) -> Status {
    border(|| {
        let layer = get(ep)?;
        // SAFETY: as the caller promised.
        let map = unsafe { ExpertMap::read(expert_map) };
        let map = map.and_then(|map| Ok(map.ok_or(ArgumentError::Null { what: "expert_map" })?));
        layer.seat.lend(|ep| {
            let map = map.inspect_err(|_| refuse::expert_map(ep))?;
            Ok(ep.set_expert_map(map)?)
        })
    })
}

/// Makes records of tokens, [tokens, hidden] to [tokens, record_bytes] of SIDELANE_DTYPE_BYTES: what a layer with fp8
/// dispatches. Local.
///
/// The caller's word: pointers are NULL or valid; tensors are as large as they say, and nobody else writes to them meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_quantise(
    ep: *mut Ep,
    tokens: *const Tensor,
    records: *const Tensor,
) -> Status {
    border(|| {
        let layer = get(ep)?;
        // SAFETY: as the caller promised.
        let rows = unsafe { structure("tokens", tokens) }?.rows;
        // SAFETY: as the caller promised.
        let (tokens, mut records) = unsafe {
            (
                Source::read("tokens", tokens, rows, layer.hidden)?,
                Target::read("records", records, rows, layer.sent)?,
            )
        };
        apart(("tokens", tokens.bytes()), ("records", records.bytes()))?;
        layer.seat.lend(|ep| {
            let mut made = Vec::new();
            with_element!(tokens.dtype, E => ep.quantise(tokens.elements::<E>(), &mut made))?;
            records.fill("records", Dtype::Bytes, &made)
        })
    })
}

/// A buffer of `count` rows to dispatch that network cards read in place; a tensor may lie in it. Local.
///
/// The caller's word: `tokens` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_tokens(ep: *mut Ep, count: u32, tokens: *mut *mut Tokens) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { Out::new("tokens", tokens) }?;
        let buffer = get(ep)?.seat.lend(|ep| Ok(ep.token_buffer(count)?))?;
        give(Seat::new(Kind::Tokens, buffer), out)
    })
}

/// Closes the layer. Rows, outputs and handles that are open stay readable. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_ep_close(ep: *mut Ep) -> Status {
    close(ep)
}
