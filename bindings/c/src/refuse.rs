//! Enters a collective call only to refuse it.
//!
//! When the border cannot use an argument, the other ranks are in the call already, or will be. So this rank enters, too, with
//! something that the library refuses for certain: all ranks get an error, nothing moves, and the next call works. What the
//! caller is told is what the border found.

use std::fs::File;

use half::bf16;
use sidelane::device::Range;
use sidelane::ep::planned::{PlannedExchange, Tokens};
use sidelane::ep::{Collective, Contribution, Handle, Shares};
use sidelane::error::PlanError;
use sidelane::gate::Routing;
use sidelane::plan::ExpertMap;
use sidelane::{Dtype, Element, ExpertParallel, Group};

/// A build: with settings that no rank can use.
pub fn build(group: &Group) {
    let _ = ExpertParallel::builder(group).map(|builder| builder.experts(0).build());
}

/// A collective: of rows without elements.
pub fn collective(group: &Group) {
    drop(Collective::builder(group).build());
}

/// A window: of another size than the others ask for.
pub fn window(group: &Group, len: u64) {
    let _ = group.window(len ^ 1);
}

/// Memory of the caller's as a window: of something that is no memory.
pub fn register(group: &Group) {
    let _ = File::open("/dev/null").map(|nothing| group.register(nothing.into()));
}

/// A dispatch: with one choice too many.
pub fn dispatch(ep: &mut ExpertParallel) {
    let _ = too_many(ep).map(|routing| ep.dispatch::<f32>(&[], &routing).map(drop));
}

/// A prepare: likewise.
pub fn prepare(ep: &mut ExpertParallel) {
    let _ = too_many(ep).map(|routing| ep.prepare(&routing).map(drop));
}

fn too_many(ep: &ExpertParallel) -> Result<Routing<'static>, PlanError> {
    Routing::new(ep.top_k().saturating_add(1), Vec::new(), Vec::new())
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

/// A call of a collective, with elements that are not the rows'; without shares as [`along`].
pub fn gathering(collective: &mut Collective, dtype: Dtype, shares: Option<&Shares>, call: Gathering) {
    match dtype {
        Dtype::F32 => gather::<bf16>(collective, shares, call),
        _ => gather::<f32>(collective, shares, call),
    }
}

fn gather<E: Element>(collective: &mut Collective, shares: Option<&Shares>, call: Gathering) {
    let wrong = Contribution::Elsewhere { bytes: &[], dtype: E::DTYPE };
    match (shares, call) {
        (Some(shares), Gathering::Along) => drop(collective.all_gather_along::<E>(&[], shares)),
        (Some(shares), Gathering::Sum) => {
            drop(collective.reduce_scatter_into::<E>(wrong, shares, &mut []));
        }
        _ => drop(collective.all_gather::<E>(&[])),
    }
}

/// Which call of a collective.
#[derive(Clone, Copy, Debug)]
pub enum Gathering {
    All,
    Along,
    Sum,
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
