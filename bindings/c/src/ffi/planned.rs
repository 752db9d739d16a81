//! Exchanges that are planned beside a stream: building them.

use std::ffi::c_void;
use std::sync::Arc;

use sidelane::device::{Context, Stream as Borrowed};
use sidelane::ep::planned::PlannedExchange;
use sidelane::{Dtype, ExpertParallel};

use super::layer::EpOptions;
use super::memory::Out;
use super::objects::{Group, Planned, Stream};
use super::stream::let_go;
use super::tensor::ExpertMap;
use super::versioned::{OutStruct, read, versioned};
use super::{border, get, give, retract};
use crate::fault::Fault;
use crate::handles::{Kind, Seat};
use crate::{Status, refuse, words};

/// A `PlannedExchange`, and what the border has to know of it.
#[derive(Debug)]
pub struct PlannedLayer {
    pub(super) seat: Seat<PlannedExchange>,
    pub(super) context: Arc<Context>,
    pub(super) dtype: Dtype,
    pub(super) hidden: u64,
    pub(super) top_k: u32,
    ranks: (u32, u32),
    local_experts: u32,
    stream: Arc<Borrowed>,
}

/// Settings of an exchange that is planned beside a stream, beside those of a layer. All ranks must choose alike; 0 is the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PlannedOptions {
    /// sizeof(sidelane_planned_options_t).
    pub size: usize,
    /// Bytes of the device's memory in which eager dispatches receive and experts write. In a group of several nodes as much
    /// memory of the host is pinned beside it. Default: 256 MiB.
    pub pool: u64,
    /// Dispatches that may be alive at once: each has memory for all rows it may send. Default: 2.
    pub seats: u32,
    /// 0.
    pub reserved: u32,
}
versioned!(PlannedOptions, "sidelane_planned_options_t", reserved: u32);

/// What such an exchange is.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PlannedInfo {
    /// sizeof(sidelane_planned_info_t).
    pub size: usize,
    /// The stream of its calls, as the caller named it.
    pub cuda_stream: *mut c_void,
    /// Its device.
    pub device: u32,
    /// This rank's position in the group.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Experts of this rank, replicas counted each.
    pub local_experts: u32,
}
versioned!(PlannedInfo, "sidelane_planned_info_t", local_experts: u32);

/// Builds an exchange whose rows lie on a device and whose calls go on `stream`. Collective. `options` are those of a layer: expert-major, sums
/// by expert, eager or with a budget; anything else is refused. `expert_map` and `planned_options` may be NULL.
///
/// The stream must be idle, or come to be so by itself: it is tried. Kernels must be loaded early: set
/// CUDA_MODULE_LOADING=EAGER before the program starts.
///
/// The caller's word: pointers are NULL or valid; structs are as large as their sizes say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_planned_build(
    group: *mut Group,
    options: *const EpOptions,
    expert_map: *const ExpertMap,
    planned_options: *const PlannedOptions,
    stream: *mut Stream,
    planned: *mut *mut Planned,
) -> Status {
    border(|| {
        let group = get(group)?;
        let arguments = || -> Result<_, Fault> {
            // SAFETY: as the caller promised.
            let (out, options, map) =
                unsafe { (Out::new("planned", planned)?, read(options)?, ExpertMap::read(expert_map)?) };
            let stream = get(stream)?;
            let builder = options.apply(ExpertParallel::builder(&group)?)?;
            let builder = map.iter().fold(builder, |builder, map| builder.expert_map(map.clone()));
            let mut builder = PlannedExchange::builder(builder, Arc::clone(&stream));
            if !planned_options.is_null() {
                // SAFETY: as the caller promised.
                let more = unsafe { read(planned_options) }?;
                super::tensor::reserved("reserved field of the options", more.reserved)?;
                builder = if more.seats > 0 { builder.seats(more.seats) } else { builder };
                builder = if more.pool > 0 { builder.pool(more.pool) } else { builder };
            }
            Ok((out, options, map, stream, builder))
        };
        let (out, options, map, stream, builder) = arguments().inspect_err(|_| refuse::build(&group))?;
        let_go(&stream);
        let exchange = builder.build()?;
        let ranks = (exchange.rank(), exchange.size());
        let map = map.map_or_else(|| sidelane::plan::ExpertMap::contiguous(options.experts, ranks.1), Ok)?;
        let layer = PlannedLayer {
            seat: Seat::new(Kind::Planned, exchange),
            context: Arc::clone(stream.context()),
            dtype: words::dtype(options.dtype)?,
            hidden: options.hidden.into(),
            top_k: options.top_k,
            ranks,
            local_experts: map.slots_of(ranks.0).len() as u32,
            stream,
        };
        give(layer, out)
    })
}

/// Says what an exchange is.
///
/// The caller's word: `info` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_planned_info(planned: *mut Planned, info: *mut PlannedInfo) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(info) }?;
        let layer = get(planned)?;
        out.write(PlannedInfo {
            size: 0,
            cuda_stream: layer.stream.handle(),
            device: layer.context.device(),
            rank: layer.ranks.0,
            ranks: layer.ranks.1,
            local_experts: layer.local_experts,
        });
        Ok(())
    })
}

/// Closes the exchange: waits until what was enqueued is served. Graphs that hold its calls must have drained, and are not to
/// be launched again. Its memory is free as soon as the stream is idle in a later build or close. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_planned_close(planned: *mut Planned) -> Status {
    border(|| {
        if !planned.is_null() {
            let layer = retract(planned)?;
            let stream = Arc::clone(&layer.stream);
            drop(layer);
            let_go(&stream);
        }
        Ok(())
    })
}
