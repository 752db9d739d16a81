//! Enters a collective call only to refuse it.
//!
//! When the border cannot use an argument, the other ranks are in the call already, or will be. So this rank enters, too, with
//! something that the library refuses for certain: all ranks get an error, nothing moves, and the next call works. What the
//! caller is told is what the border found.

use half::bf16;
use sidelane::device::Range;
use sidelane::ep::planned::{PlannedExchange, PlannedHandle, PlannedOutput, Tokens};
use sidelane::ep::{Contribution, Handle};
use sidelane::gate::Routing;
use sidelane::plan::ExpertMap;
use sidelane::{Dtype, Element, ExpertParallel, Group};

/// A build: with settings that no rank can use.
pub fn build(group: &Group) {
    let _ = ExpertParallel::builder(group).map(|builder| builder.experts(0).build());
}

/// A window: of another size than the others ask for.
pub fn window(group: &Group, len: u64) {
    let _ = group.window(len ^ 1);
}

/// A dispatch: with one choice too many.
pub fn dispatch(ep: &mut ExpertParallel) {
    let too_many = ep.top_k().saturating_add(1);
    let _ = Routing::new(too_many, Vec::new(), Vec::new()).map(|routing| ep.dispatch::<f32>(&[], &routing));
}

/// A call along a handle, as `call` makes it with elements that are not the rows'. Without a handle no such call can be
/// entered: then the others hear that this rank is in another one.
pub fn along(ep: &mut ExpertParallel, dtype: Dtype, handle: Option<&Handle>, call: Call) {
    match (handle, dtype) {
        (None, _) => dispatch(ep),
        (Some(handle), Dtype::F32) => enter::<bf16>(ep, handle, call),
        (Some(handle), _) => enter::<f32>(ep, handle, call),
    }
}

/// Another expert map: of one rank more than there are.
pub fn expert_map(ep: &mut ExpertParallel) {
    let (experts, ranks) = (ep.expert_map().experts(), ep.size() + 1);
    let _ = ExpertMap::contiguous(experts, ranks).map(|map| ep.set_expert_map(map));
}

/// A dispatch beside a stream: of a tensor that no device may touch. Its seat is free again at once.
pub fn planned_dispatch(exchange: &mut PlannedExchange, nowhere: &Range) {
    drop(exchange.dispatch(Tokens { x: nowhere, experts: nowhere, weights: nowhere }));
}

/// A combine beside a stream: into such a tensor. What has no output to bring along takes one, or enters another call.
pub fn planned_combine(
    exchange: &mut PlannedExchange,
    y: Option<PlannedOutput>,
    handle: &PlannedHandle,
    nowhere: &Range,
) {
    match y.map_or_else(|| handle.output(), Ok) {
        Ok(y) => drop(exchange.combine(y, handle, nowhere)),
        Err(_) => planned_dispatch(exchange, nowhere),
    }
}

/// Which call.
#[derive(Clone, Copy, Debug)]
pub enum Call {
    Combine,
    DispatchBackward,
    CachedDispatch,
    CombineBackward,
}

fn enter<E: Element>(ep: &mut ExpertParallel, handle: &Handle, call: Call) {
    let wrong = Contribution::Elsewhere { bytes: &[], dtype: E::DTYPE };
    match call {
        Call::Combine => drop(ep.combine_into::<E>(wrong, handle, &mut [])),
        Call::DispatchBackward => {
            drop(ep.dispatch_backward_into::<E>(wrong, None, handle, &mut [], &mut []));
        }
        Call::CachedDispatch => drop(ep.dispatch_cached::<E>(&[], handle)),
        Call::CombineBackward => drop(ep.combine_backward::<E>(&[], handle)),
    }
}
