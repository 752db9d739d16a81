//! Ranks that disagree about a collective call.

use crate::dtype::Dtype;

/// What a rank was doing in a collective call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[repr(u8)]
pub enum CallKind {
    /// Dispatch with counts.
    Dispatch = 1,
    /// Dispatch along the layout of an earlier one.
    CachedDispatch = 2,
    /// Sum of rows back to their tokens.
    Combine = 3,
    /// Gradient of dispatch: sum of row gradients, weight gradients returned.
    DispatchBackward = 4,
    /// Gradient of a combine: gradients of tokens to rows.
    CombineBackward = 5,
    /// Second half of the gradient of a weighted combine: weight gradients returned.
    ReturnWeights = 6,
    /// Another expert map.
    ExpertMap = 7,
    /// Layout with counts, and no rows.
    Prepare = 8,
    /// Sum over all ranks, for all.
    AllReduce = 9,
    /// One rank's elements for all.
    Broadcast = 10,
    /// Elements of each rank for each.
    AllToAll = 11,
    /// A message to one rank.
    Send = 12,
    /// A message from one rank.
    Receive = 13,
    /// Elements of all ranks for all.
    AllGather = 14,
    /// Sum over all ranks, a part for each.
    ReduceScatter = 15,
    /// Something no call of this version says.
    Unknown = 0,
}

impl CallKind {
    /// The kind with this number.
    pub fn from_code(code: u8) -> CallKind {
        [
            CallKind::Dispatch,
            CallKind::CachedDispatch,
            CallKind::Combine,
            CallKind::DispatchBackward,
            CallKind::CombineBackward,
            CallKind::ReturnWeights,
            CallKind::ExpertMap,
            CallKind::Prepare,
            CallKind::AllReduce,
            CallKind::Broadcast,
            CallKind::AllToAll,
            CallKind::Send,
            CallKind::Receive,
            CallKind::AllGather,
            CallKind::ReduceScatter,
        ]
        .into_iter()
        .find(|&kind| kind as u8 == code)
        .unwrap_or(CallKind::Unknown)
    }

    /// Whether counts are exchanged, from which a layout is made; other calls follow one.
    pub fn places(self) -> bool {
        matches!(self, CallKind::Dispatch | CallKind::Prepare)
    }
}

/// A collective call is not the same on every rank, or is used wrongly.
#[derive(Debug, Clone, PartialEq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum CallError {
    /// Another rank is in another call.
    #[error("call {call}: rank {rank} is in {mine:?}, rank {peer} in {theirs:?}")]
    KindsDiffer {
        /// Number of the call on this `ExpertParallel`.
        call: u64,
        /// This rank.
        rank: u32,
        /// The other.
        peer: u32,
        /// The call of this rank.
        mine: CallKind,
        /// The call of the other rank.
        theirs: CallKind,
    },
    /// Another rank uses another handle, or other options of the same call.
    #[error(
        "call {call} ({kind:?}): rank {rank} and rank {peer} disagree about {what}: {} and {}",
        value(what, *mine),
        value(what, *theirs)
    )]
    Disagree {
        /// Number of the call.
        call: u64,
        /// Which call.
        kind: CallKind,
        /// What differs.
        what: &'static str,
        /// This rank.
        rank: u32,
        /// The other.
        peer: u32,
        /// This rank's value.
        mine: u64,
        /// The other's.
        theirs: u64,
    },
    /// A call's program has a step that its driver does not perform.
    #[error("{kind:?} has the step {step}, which its driver does not perform")]
    UnknownStep {
        /// Which call.
        kind: CallKind,
        /// The step.
        step: String,
    },
    /// Another rank's input was refused: nothing moved on any rank.
    #[error("call {call}: nothing moved, because the input of rank {peer} was refused there")]
    PeerRefused {
        /// Number of the call.
        call: u64,
        /// The rank whose input was refused.
        peer: u32,
    },
    /// A rank would receive more rows than its budget: nothing moved on any rank, and every rank
    /// gets this error.
    #[error("call {call}: rank {rank} needs {required} rows, its budget is {budget}")]
    OverBudget {
        /// Number of the call.
        call: u64,
        /// The first rank that needs more.
        rank: u32,
        /// Rows it needs, pads counted.
        required: u32,
        /// Rows it may have.
        budget: u32,
    },
    /// Ranks built the same `ExpertParallel` differently.
    #[error("rank {rank} and rank {peer} disagree about {what}: {} and {}", value(what, *mine), value(what, *theirs))]
    ConfigsDiffer {
        /// Which setting.
        what: &'static str,
        /// This rank.
        rank: u32,
        /// The other.
        peer: u32,
        /// This rank's value.
        mine: u64,
        /// The other's.
        theirs: u64,
    },
    /// A handle of another `ExpertParallel`.
    #[error("the handle belongs to another ExpertParallel (instance {seen}, this is {expected})")]
    ForeignHandle {
        /// The handle's owner.
        seen: u64,
        /// The callee.
        expected: u64,
    },
    /// Handles of the old expert map are alive.
    #[error("{count} handles of the old expert map are alive: drop them first")]
    HandlesAlive {
        /// How many on this rank.
        count: usize,
    },
    /// An output buffer of another handle of the same `ExpertParallel`.
    #[error("the output buffer belongs to the handle of call {seen}, not to that of call {expected}")]
    WrongOutput {
        /// The call that made the buffer's handle.
        seen: u64,
        /// The call that made the handle given.
        expected: u64,
    },
    /// A call of an instance in fixed slots on a device, which takes its calls in turns.
    #[error("{call} is not next: {expected} is")]
    OutOfTurn {
        /// The call that was made.
        call: &'static str,
        /// The call that is next.
        expected: &'static str,
    },
    /// As many dispatches are alive on a device as there is memory for.
    #[error(
        "{max} dispatches are in flight: drop rows, outputs and handles of an earlier one, or raise \
         max_in_flight"
    )]
    TooManyInFlight {
        /// How many may be.
        max: u32,
    },
    /// A rank expected other messages than this rank sent, of another length or type. It dropped
    /// them.
    #[error("rank {peer} refused {count} messages of rank {rank}: it expected others")]
    MessageRefused {
        /// This rank.
        rank: u32,
        /// The rank that refused.
        peer: u32,
        /// How many, since this rank heard of it last.
        count: u32,
    },
    /// A gradient was asked for that the forward call did not keep.
    #[error("{missing} was not kept by the forward call")]
    NotKept {
        /// What is missing.
        missing: &'static str,
    },
}

/// A value that ranks compare, as a reader knows it.
fn value(what: &str, value: u64) -> String {
    let all = [Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::Bytes];
    match all.into_iter().find(|&dtype| dtype as u64 == value) {
        Some(dtype) if ["dtype", "type of the elements"].contains(&what) => dtype.name().to_owned(),
        _ => value.to_string(),
    }
}

impl CallError {
    /// That a program of a call of this kind has a step that its driver does not perform.
    pub fn unknown_step(kind: CallKind, step: &impl std::fmt::Debug) -> CallError {
        CallError::UnknownStep { kind, step: format!("{step:?}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn element_types_that_differ_are_named() {
        let differ = |what| CallError::ConfigsDiffer { what, rank: 0, peer: 1, mine: 0, theirs: 1 };
        assert_eq!(differ("dtype").to_string(), "rank 0 and rank 1 disagree about dtype: f32 and bf16");
        assert_eq!(differ("align").to_string(), "rank 0 and rank 1 disagree about align: 0 and 1");
    }
}
