//! Enters a collective call only to refuse it.
//!
//! When the FFI boundary finds an invalid argument, the other ranks are in the call already, or
//! will be. So this rank enters it, too, and the library refuses it: all ranks get an error,
//! nothing moves, and the next call works. The caller gets the boundary's error.

use std::fs::File;

use sidelane::collective::Communicator;
use sidelane::ep::{Handle, RowCollective, RowPartition, Tensor, TensorMut};
use sidelane::error::{CallKind, Error, PlanError};
use sidelane::gate::Preset;
use sidelane::layer::{GroupedSwiGlu, MoeLayer};
use sidelane::{Dtype, ExpertParallel, Group};

use crate::fault::Fault;

/// A call of a layer, along a handle if there is one. Returns the caller's error: `fault`, or the
/// failure of the world meanwhile.
pub fn call(ep: &mut ExpertParallel, kind: CallKind, handle: Option<&Handle>, fault: Fault) -> Fault {
    told(ep.refuse(kind, handle, PlanError::RefusedHere.into()), fault)
}

/// A mask: one of no ranks. Returns the error for the caller, as [`call`].
pub fn mask(ep: &mut ExpertParallel, fault: Fault) -> Fault {
    match ep.mask(&[]) {
        Err(lost @ Error::World(_)) => lost.into(),
        _ => fault,
    }
}

/// A build: with settings that no rank can use.
pub fn build(group: &Group) {
    drop(ExpertParallel::builder(group).experts(0).build());
}

/// A whole layer: of an expert that no rank has.
pub fn moe(group: &Group) {
    let built = || -> Result<(), Error> {
        let no_experts = GroupedSwiGlu::new(0, 1, 1, Vec::new())?;
        MoeLayer::builder(group, Preset::Mixtral.config(1, 1)?, 0, no_experts).build().map(drop)
    };
    let _ = built();
}

/// A collective: of rows without elements.
pub fn collective(group: &Group) {
    drop(RowCollective::builder(group).build());
}

/// A communicator: of rounds without bytes.
pub fn communicator(group: &Group) {
    drop(Communicator::builder(group).chunk(0).build());
}

/// A call of a communicator. Returns the error for the caller, as [`call`].
pub fn communication(communicator: &mut Communicator, kind: CallKind, fault: Fault) -> Fault {
    told(communicator.refuse(kind, PlanError::RefusedHere.into()), fault)
}

fn told(said: Error, fault: Fault) -> Fault {
    match said {
        Error::Plan(PlanError::RefusedHere) => fault,
        other => other.into(),
    }
}

/// A window: of another size than the others ask for.
pub fn window(group: &Group, len: u64) {
    let _ = group.window(len ^ 1);
}

/// Memory of the caller's as a window: of something that is no memory.
pub fn register(group: &Group) {
    let _ = File::open("/dev/null").map(|nothing| group.register(nothing.into()));
}

/// A call of a collective, with elements that are not the rows'. Without shares no call along them
/// can be entered: then the others hear that this rank is in another one.
pub fn gathering(
    collective: &mut RowCollective,
    dtype: Dtype,
    shares: Option<&RowPartition>,
    call: Gathering,
) {
    let dtype = if dtype == Dtype::F32 { Dtype::Bf16 } else { Dtype::F32 };
    let wrong = Tensor::Host { bytes: &[], dtype };
    match (shares, call) {
        (Some(shares), Gathering::Along) => drop(collective.all_gather_cached(wrong, shares)),
        (Some(shares), Gathering::Sum) => {
            let none = TensorMut::Host { bytes: &mut [], dtype };
            drop(collective.reduce_scatter_into(wrong, shares, none));
        }
        _ => drop(collective.all_gather(wrong)),
    }
}

/// Which call of a collective.
#[derive(Clone, Copy, Debug)]
pub enum Gathering {
    All,
    Along,
    Sum,
}
