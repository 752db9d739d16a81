//! Dispatch and combine in slots.
//!
//! Each goes on the stream that it is given, which the caller puts in order where there are several. What is refused is not
//! enqueued, and can be made again: nobody is told, as peers' streams wait for the call that comes.

use std::sync::Arc;

use sidelane::ep::StreamTokens;
use sidelane::error::{DeviceError, PlanError};

use super::lent::{self, Sent};
use super::objects::{Slots, Stream};
use super::slots::SlotsLayer;
use super::tensor::{Routing, Tensor};
use super::{Opaque, border, get};
use crate::Status;
use crate::fault::Fault;

/// A stream of the exchange's device: with another the world would end.
fn stream_of(layer: &SlotsLayer, stream: *mut Stream) -> Result<Arc<<Stream as Opaque>::Object>, Fault> {
    let stream = get(stream)?;
    let (found, expected) = (stream.device(), layer.context.device());
    if found != expected {
        return Err(DeviceError::OtherDevice { what: "stream", found, expected }.into());
    }
    Ok(stream)
}

/// First half of a dispatch in slots: packs, and sends. Collective; nobody waits. `x` is [tokens, hidden], and `routing` has
/// its arrays, in memory of the device. It may be captured into a graph. A call that is refused can be made again.
///
/// The caller's word: pointers are NULL or valid; tensors and arrays are as large as they say, and stay there, as they are, until
/// the stream has come past.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_slots_dispatch_start(
    slots: *mut Slots,
    stream: *mut Stream,
    x: *const Tensor,
    routing: *const Routing,
) -> Status {
    border(|| {
        let layer = get(slots)?;
        let stream = stream_of(&layer, stream)?;
        // SAFETY: as the caller promised.
        let sent = unsafe {
            let shape = (layer.hidden, layer.top_k);
            Sent::read(&layer.context, (x, routing), shape, layer.dtype)
        }?;
        layer.seat.lend(|exchange| {
            let max = exchange.shape().max_tokens();
            let tokens = u32::try_from(sent.tokens).unwrap_or(u32::MAX);
            if tokens > max {
                return Err(PlanError::TooManyTokens { tokens, max }.into());
            }
            let tokens = StreamTokens {
                count: tokens,
                rows: sent.x.span(0, sent.x.len())?,
                experts: sent.experts.span(0, sent.experts.len())?,
                weights: sent.weights.span(0, sent.weights.len())?,
            };
            exchange.held.start_dispatch(&stream, &tokens)?;
            exchange.tokens = sent.tokens;
            Ok(())
        })
    })
}

/// Second half: the stream waits for the rows of all ranks. What is enqueued afterwards finds the slots.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_slots_dispatch_finish(slots: *mut Slots, stream: *mut Stream) -> Status {
    border(|| {
        let layer = get(slots)?;
        let stream = stream_of(&layer, stream)?;
        layer.seat.lend(|exchange| Ok(exchange.held.finish_dispatch(&stream)?))
    })
}

/// First half of a combine in slots: sends the partial rows home. Collective; nobody waits.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_slots_combine_start(slots: *mut Slots, stream: *mut Stream) -> Status {
    border(|| {
        let layer = get(slots)?;
        let stream = stream_of(&layer, stream)?;
        layer.seat.lend(|exchange| Ok(exchange.held.start_combine(&stream)?))
    })
}

/// Second half: the stream waits for them, and sums those of each token, by rank, ascending, into `out`, [tokens, hidden] in
/// memory of the device.
///
/// The caller's word: as sidelane_slots_dispatch_start().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_slots_combine_finish(
    slots: *mut Slots,
    stream: *mut Stream,
    out: *const Tensor,
) -> Status {
    border(|| {
        let layer = get(slots)?;
        let stream = stream_of(&layer, stream)?;
        layer.seat.lend(|exchange| {
            let shape = (exchange.tokens, layer.hidden);
            // SAFETY: as the caller promised.
            let out = unsafe { lent::tensor(&layer.context, "out", out, shape, layer.dtype) }?;
            Ok(exchange.held.finish_combine(&stream, out.span(0, out.len())?)?)
        })
    })
}

/// Instead of a combine: what was received has been read, and nothing comes home. Collective.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_slots_release(slots: *mut Slots, stream: *mut Stream) -> Status {
    border(|| {
        let layer = get(slots)?;
        let stream = stream_of(&layer, stream)?;
        layer.seat.lend(|exchange| Ok(exchange.held.release(&stream)?))
    })
}

/// Waits until everything in the stream is done, and says how it went. If a rank that lives is silent for longer than the world's
/// deadline, the world ends.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_slots_synchronize(slots: *mut Slots, stream: *mut Stream) -> Status {
    border(|| {
        let layer = get(slots)?;
        let stream = stream_of(&layer, stream)?;
        layer.seat.lend(|exchange| Ok(exchange.synchronize(&stream)?))
    })
}

/// Whether all is well, without waiting: SIDELANE_OK, the world's cause of death, or what a kernel has found.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_slots_status(slots: *mut Slots) -> Status {
    border(|| get(slots)?.seat.lend(|exchange| Ok(exchange.status()?)))
}
