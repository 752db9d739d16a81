//! Expert-parallel layers: building them, and what does not move rows.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use sidelane::device::{Context, Stream as Borrowed};
use sidelane::ep::{ExpertParallelBuilder, Handle as Layout, Place};
use sidelane::error::CallKind;
use sidelane::{Dtype, ExpertParallel};

use super::memory::{Out, apart, flags, short_name, slice_mut};
use super::objects::{Ep, Group, Stream, Tokens};
use super::stream::let_go;
use super::tensor::{ExpertMap, Source, Target, Tensor};
use super::versioned::{OutStruct, read, versioned};
use super::{border, get, give, retract};
use crate::fault::{ArgumentError, Fault};
use crate::handles::{ExclusiveCell, Kind};
use crate::words::{SIDELANE_PLACE_DEVICE, SIDELANE_PLACE_HOST};
use crate::{Status, refuse, words};

/// An `ExpertParallel`, and what the FFI boundary needs to know of it.
#[derive(Debug)]
pub struct Layer {
    pub(super) cell: Arc<ExclusiveCell<ExpertParallel>>,
    /// Of the device of its rows; none on the host.
    pub(super) context: Option<Arc<Context>>,
    /// Of rows that are combined, and of dispatched ones that are no records.
    pub(super) dtype: Dtype,
    pub(super) hidden: u64,
    /// Columns of a dispatched row: `hidden`, or bytes of a record.
    pub(super) sent: u64,
    pub(super) top_k: u64,
    /// Numbers that go with a row: rank-major, one for each choice of its token.
    pub(super) numbers: u64,
    pub(super) weighted: bool,
}

/// Settings of a layer: all ranks must pass the same. 0 is the default of every field but
/// `experts`, `top_k` and `hidden`. A layer on a device refuses settings that it does not have, by
/// name.
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
    pub sum_order: u32,
    /// Type of partial sums: SIDELANE_PARTIAL_...
    pub partial_dtype: u32,
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
    /// 1: dispatch sends records of e4m3 values and scales, which sidelane_ep_quantize() makes.
    pub fp8: u32,
    /// 1: relays copy rows in few large copies (rank-major over pxn).
    pub coalesce_relays: u32,
    /// Device, calls that the caller finishes: dispatches that may be alive at once. Default: 64.
    pub max_in_flight: u32,
    /// Rows lie on the device of this stream, and calls go on the stream. NULL: rows lie on the
    /// host.
    pub stream: *mut Stream,
    /// Device, likewise: bytes of the device's memory in which dispatches receive and experts
    /// write. In a group of several nodes whose NICs do not reach the device, as much host memory
    /// is pinned, too. 0: as much as two dispatches of `max_tokens` take with their outputs, each
    /// with half as many rows again as even routing brings. A small instance takes more, up to
    /// 256 MiB.
    pub device_heap: u64,
    /// Device, a budget: whether CUDA graphs may hold the calls, SIDELANE_GRAPHS_... Slots are for
    /// SIDELANE_ORDER_RANK and SIDELANE_ROUTE_DIRECT, and move `max_tokens` rows to each rank in
    /// every call. Calls in fixed slots can always be captured.
    pub graphs: u32,
    /// Device: blocks of each kernel, at most, so that work on other streams keeps its
    /// multiprocessors meanwhile. No bit depends on it. 0: as many as the device has at work.
    pub max_blocks: u32,
    /// Device, a group of one node: bytes to which its memory may grow where a dispatch lacks room.
    /// 0: what two dispatches of any routing take, at most 4 times the default of `device_heap`;
    /// memory whose size is set does not grow.
    pub device_heap_limit: u64,
}
versioned!(EpOptions, "sidelane_ep_options_t", device_heap_limit: u64, 80, 96, 104);

/// Description of a layer.
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
    /// With fp8: bytes of a record, which are the columns of dispatched rows; 0 otherwise.
    pub record_bytes: u64,
    /// With fp8: where in a record the scales begin, in bytes.
    pub record_scales_offset: u64,
    /// Device: the stream of its calls, as the caller named it.
    pub cuda_stream: *mut c_void,
    /// Where its rows lie: SIDELANE_PLACE_...
    pub place: u32,
    /// Device: its number.
    pub device: u32,
    /// Executor of its calls: "host-stepper", "enqueuer" or "constant-program".
    pub executor: [c_char; 24],
}
versioned!(EpInfo, "sidelane_ep_info_t", executor: [c_char; 24], 56);

impl Layer {
    /// Shape of rows that are returned: number of landed rows, and their elements. On a device the
    /// library alone knows how many there are.
    pub(super) fn landed(&self, layout: &Layout) -> (Option<u64>, u64) {
        (self.context.is_none().then(|| layout.rows().into()), self.hidden)
    }
}

impl EpOptions {
    fn apply<'g>(
        &self,
        builder: ExpertParallelBuilder<'g>,
        stream: Option<&Arc<Borrowed>>,
    ) -> Result<ExpertParallelBuilder<'g>, Fault> {
        let mut builder = builder
            .experts(self.experts)
            .top_k(self.top_k)
            .hidden(self.hidden as usize)
            .dtype(words::dtype(self.dtype)?)
            .sum_order(words::sum_order(self.sum_order)?)
            .partial_dtype(words::partial_dtype(self.partial_dtype)?)
            .route(words::route(self.route)?)
            .layout(words::layout(self.layout)?)
            .mode(words::mode(self.mode, self.mode_rows, self.overflow)?)
            .graphs(words::graphs(self.graphs)?)
            .strategy(words::strategy(self.strategy)?)
            .weighted(words::switch("weighted", self.weighted)?)
            .fp8(words::switch("fp8", self.fp8)?)
            .coalesce_relays(words::switch("coalesce_relays", self.coalesce_relays)?);
        if self.align > 0 {
            builder = builder.align(self.align);
        }
        if self.max_tokens > 0 {
            builder = builder.max_tokens(self.max_tokens);
        }
        if self.max_in_flight > 0 {
            builder = builder.max_in_flight(self.max_in_flight);
        }
        if self.device_heap > 0 {
            builder = builder.device_heap(self.device_heap);
        }
        if self.device_heap_limit > 0 {
            builder = builder.device_heap_limit(self.device_heap_limit);
        }
        if self.max_blocks > 0 {
            builder = builder.max_blocks(self.max_blocks);
        }
        Ok(stream.into_iter().fold(builder, ExpertParallelBuilder::on))
    }
}

/// Builds a layer on a group. Collective. `expert_map` may be NULL: experts in contiguous blocks.
///
/// With a stream in the options, rows lie on its device. Mode and graphs choose what carries the
/// calls out:
///
///   SIDELANE_MODE_EXACT, _BUDGET   the caller's thread enqueues: expert-major rows
///   SIDELANE_MODE_BUDGET with      a constant program: expert-major rows, sums by rank
///     SIDELANE_GRAPHS_SLOTS
///   SIDELANE_MODE_SLOTS            a constant program: rank-major rows, sums by rank, `mode_rows`
///                                  equal to `max_tokens`
///
/// The caller guarantees: pointers are NULL or valid; `options` is as large as its size says.
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
            let stream = (!options.stream.is_null()).then(|| get(options.stream)).transpose()?;
            let builder = options.apply(ExpertParallel::builder(&group), stream.as_ref())?;
            let builder = map.map_or(builder.clone(), |map| builder.expert_map(map));
            Ok((out, options, stream, builder))
        };
        let (out, options, stream, builder) = arguments().inspect_err(|_| refuse::build(&group))?;
        stream.iter().for_each(|stream| let_go(stream));
        let ep = builder.build()?;
        let hidden = ep.hidden() as u64;
        let sent = ep.record().map_or(hidden, |shape| shape.bytes() as u64);
        let top_k: u64 = ep.top_k().into();
        let numbers = words::layout(options.layout)?.return_words(ep.top_k()).into();
        let (dtype, weighted) = (words::dtype(options.dtype)?, options.weighted == 1);
        let context = stream.map(|stream| Arc::clone(stream.context()));
        let cell = Arc::new(ExclusiveCell::new(Kind::Ep, ep));
        give(Layer { cell, context, dtype, hidden, sent, top_k, numbers, weighted }, out)
    })
}

/// Describes a layer.
///
/// The caller guarantees: `info` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_info(ep: *mut Ep, info: *mut EpInfo) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(info) }?;
        let layer = get(ep)?;
        layer.cell.lend(|ep| {
            let (map, record) = (ep.expert_map(), ep.record());
            let (place, device) = match ep.place() {
                Place::Host => (SIDELANE_PLACE_HOST, 0),
                Place::Device(device) => (SIDELANE_PLACE_DEVICE, device),
                _ => (words::UNNUMBERED, 0),
            };
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
                cuda_stream: ep.stream().map_or(std::ptr::null_mut(), |stream| stream.handle()),
                place,
                device,
                executor: short_name(ep.executor().name()),
            });
            Ok(())
        })
    })
}

/// Moves experts to other ranks: later dispatches use this map. The caller moves the experts'
/// weights. Collective; no handle of the layer may be open.
///
/// The caller guarantees: `expert_map` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_set_expert_map(ep: *mut Ep, expert_map: *const ExpertMap) -> Status {
    border(|| {
        let layer = get(ep)?;
        // SAFETY: as the caller promised.
        let map = unsafe { ExpertMap::read(expert_map) };
        let map = map.and_then(|map| Ok(map.ok_or(ArgumentError::Null { what: "expert_map" })?));
        layer.cell.lend(|ep| {
            let map = map.map_err(|fault| refuse::call(ep, CallKind::ExpertMap, None, fault))?;
            Ok(ep.set_expert_map(map)?)
        })
    })
}

/// Masks ranks, for maintenance or to drain them: a flag for each rank of the group, 1 for an
/// active one. In later dispatches a masked rank sends no rows and receives none. Choices of its
/// experts go to replicas at active ranks or are dropped. Collective, masked ranks included, which
/// live and make all calls with the others. No handle of the layer may be open; in fixed slots on a
/// device, no dispatch may wait for its combine. On a device the call waits for the stream, and
/// graphs that were captured before go by the new mask.
///
/// A mask that a rank cannot use is refused on all ranks, and the old one stays.
///
/// The caller guarantees: `active` is NULL, or has `ranks` flags.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_mask(ep: *mut Ep, active: *const u8, ranks: u32) -> Status {
    border(|| {
        let layer = get(ep)?;
        // SAFETY: as the caller promised.
        let active = unsafe { flags("active", active, ranks.into()) };
        layer.cell.lend(|ep| {
            let active = active.map_err(|fault| refuse::mask(ep, fault.into()))?;
            Ok(ep.mask(active)?)
        })
    })
}

/// Writes a flag for each rank of the group to `active`: 1 for an active rank. Local. `ranks` is
/// the number of ranks.
///
/// The caller guarantees: `active` is NULL, or has room for `ranks` flags.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_active(ep: *mut Ep, active: *mut u8, ranks: u32) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { slice_mut("active", active, ranks.into()) }?;
        get(ep)?.cell.lend(|ep| {
            let mask: &[u8] = bytemuck::cast_slice(ep.active());
            if out.len() != mask.len() {
                let expected = "the number of ranks of the group";
                return Err(ArgumentError::Value { what: "ranks", seen: ranks.into(), expected }.into());
            }
            out.copy_from_slice(mask);
            Ok(())
        })
    })
}

/// Quantizes tokens, [tokens, hidden], to records, [tokens, record_bytes] of SIDELANE_DTYPE_BYTES:
/// the rows that a layer with fp8 dispatches. Local. On a device they are there for what is
/// enqueued next.
///
/// The caller guarantees: pointers are NULL or valid; tensors are as large as they say, and no
/// other thread writes to them during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_quantize(
    ep: *mut Ep,
    tokens: *const Tensor,
    records: *const Tensor,
) -> Status {
    border(|| {
        let layer = get(ep)?;
        let (context, hidden) = (layer.context.as_ref(), layer.hidden);
        // SAFETY: as the caller promised.
        let tokens = unsafe { Source::read(context, "tokens", tokens, (None, hidden)) }?;
        let rows = tokens.addresses().len() / (tokens.dtype().size() * hidden as usize);
        // SAFETY: as the caller promised.
        let mut records = unsafe { Target::read(context, "records", records, (rows as u64, layer.sent)) }?;
        apart(("tokens", tokens.addresses()), ("records", records.addresses()))?;
        layer.cell.lend(|ep| Ok(ep.quantize_into(tokens.lend(), records.lend())?))
    })
}

/// A buffer of `count` rows to dispatch, which NICs read in place; a tensor may lie in it. Local.
///
/// The caller guarantees: `tokens` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_ep_tokens(ep: *mut Ep, count: u32, tokens: *mut *mut Tokens) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { Out::new("tokens", tokens) }?;
        let buffer = get(ep)?.cell.lend(|ep| Ok(ep.token_buffer(count)?))?;
        give(ExclusiveCell::new(Kind::Tokens, buffer), out)
    })
}

/// Closes the layer. Open rows, outputs and handles stay valid. Graphs that hold its calls must
/// have drained, and must not be launched again. Its memory is freed by a later build or close that
/// finds the stream idle. NULL is a no-op.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_ep_close(ep: *mut Ep) -> Status {
    border(|| {
        if ep.is_null() {
            return Ok(());
        }
        let layer = retract(ep)?;
        let stream = layer.cell.lend(|ep| Ok(ep.stream().cloned()));
        drop(layer);
        if let Ok(Some(stream)) = stream {
            let_go(&stream);
        }
        Ok(())
    })
}
