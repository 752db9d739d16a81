//! Errors of the pure part: one type per layer, with data in its fields.

use crate::dtype::Dtype;

/// Kind of a collective call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[repr(u8)]
#[non_exhaustive]
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
    /// Sum over all ranks, for one.
    Reduce = 16,
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
            CallKind::Reduce,
        ]
        .into_iter()
        .find(|&kind| kind as u8 == code)
        .unwrap_or(CallKind::Unknown)
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
        /// Name of the value that differs.
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
        /// Number of the call. In slots, where streams count calls and replays of graphs are some,
        /// that of the dispatch, modulo 2^32.
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
    #[error("{}", differ(what, [*rank, *peer], [*mine, *theirs]))]
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
    /// Handles of the old expert map or mask are alive.
    #[error("{count} handles of the old expert map or mask are alive: drop them first")]
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
        /// Name of the missing value.
        missing: &'static str,
    },
}

/// Two ranks have different values of a setting; or the peer cannot use its own, and knows why.
fn differ(what: &str, [rank, peer]: [u32; 2], [mine, theirs]: [u64; 2]) -> String {
    match what.strip_prefix("whether their ").and_then(|rest| rest.strip_suffix(" can be used (1: yes)")) {
        Some(subject) if theirs == 0 => {
            format!("the {subject} of rank {peer} cannot be used: its own error says why")
        }
        _ => format!(
            "rank {rank} and rank {peer} disagree about {what}: {} and {}",
            value(what, mine),
            value(what, theirs)
        ),
    }
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

/// Input that a gate refuses: a configuration, a call, or the arrays of one. Then the gate decides
/// nothing and writes nothing.
#[derive(Debug, Clone, PartialEq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum GateError {
    /// A logit that is not finite.
    #[error("token {token}, expert {expert}: the logit is {seen}")]
    NotFinite {
        /// The token.
        token: u32,
        /// The expert.
        expert: u32,
        /// The found value.
        seen: f32,
    },
    /// An array has the wrong number of elements.
    #[error("{what}: {seen} elements, expected {rows} x {columns}")]
    WrongShape {
        /// Which array.
        what: &'static str,
        /// Elements found.
        seen: usize,
        /// Rows expected.
        rows: usize,
        /// Elements per row.
        columns: usize,
    },
    /// A number that cannot be used.
    #[error("{parameter} = {seen}: {expected}")]
    BadNumber {
        /// The parameter.
        parameter: &'static str,
        /// Its value.
        seen: f64,
        /// Description of a right value.
        expected: &'static str,
    },
    /// Two settings that exclude each other.
    #[error("{one} and {other} cannot both be set: {why}")]
    Conflict {
        /// The first.
        one: &'static str,
        /// The second.
        other: &'static str,
        /// The reason.
        why: &'static str,
    },
    /// A recorded choice that cannot be replayed.
    #[error(
        "token {token}, choice {k}: expert {expert} was recorded, but there are 0..{experts}, and each at most once"
    )]
    BadReplay {
        /// The token.
        token: u32,
        /// Which of its choices.
        k: u32,
        /// The id found.
        expert: i32,
        /// Number of experts.
        experts: u32,
    },
    /// Rows of bytes, where numbers are needed.
    #[error("there is no arithmetic on rows of {dtype}")]
    NoArithmetic {
        /// The type.
        dtype: Dtype,
    },
    /// A choice of an expert that does not exist, or a second choice of the same one.
    #[error("token {token}, choice {k}: expert {expert} is not among 0..{experts}, or chosen twice")]
    BadChoice {
        /// The token.
        token: u32,
        /// Which of its choices.
        k: u32,
        /// The id found.
        expert: i32,
        /// Number of experts.
        experts: u32,
    },
    /// An element of an array that is not finite.
    #[error("{what}, row {row}, column {column}: {seen}")]
    BadElement {
        /// Which array.
        what: &'static str,
        /// The row.
        row: usize,
        /// The column.
        column: usize,
        /// The found value.
        seen: f32,
    },
}

/// The input of a call is wrong. Every rank of the group gets an error for that call, nothing is
/// moved, and the world stays usable.
#[derive(Debug, Clone, PartialEq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum PlanError {
    /// An expert id that does not exist.
    #[error("token {token}, choice {k}: expert {expert} is out of range (0..{experts}, or -1 for dropped)")]
    ExpertOutOfRange {
        /// The token.
        token: u32,
        /// Which of its choices.
        k: u32,
        /// The id found.
        expert: i32,
        /// Number of experts.
        experts: u32,
    },
    /// A token names an expert twice.
    #[error("token {token} names expert {expert} twice")]
    ExpertTwice {
        /// The token.
        token: u32,
        /// The expert.
        expert: i32,
    },
    /// A routing weight that is not a number.
    #[error("token {token}, choice {k}: the weight is not a number")]
    NanWeight {
        /// The token.
        token: u32,
        /// Which of its choices.
        k: u32,
    },
    /// More tokens than the group was built for.
    #[error("{tokens} tokens, but max_tokens is {max}: raise it at the builder")]
    TooManyTokens {
        /// Tokens in the call.
        tokens: u32,
        /// The promise.
        max: u32,
    },
    /// More rows than there are slots for, and none may be dropped.
    #[error("{rows} rows for bin {bin}, but only {slots} slots: raise the slots, or let rows be dropped")]
    SlotsFull {
        /// The expert slot or, rank-major, the rank.
        bin: u32,
        /// Rows for it.
        rows: u32,
        /// Slots of each source in each bin.
        slots: u32,
    },
    /// A tensor has the wrong number of elements.
    #[error("{what}: {seen} elements, expected {rows} rows x {columns}")]
    WrongShape {
        /// Which tensor.
        what: &'static str,
        /// Elements found.
        seen: usize,
        /// Rows expected.
        rows: usize,
        /// Elements per row.
        columns: usize,
    },
    /// A tensor has the wrong element type.
    #[error("{what}: elements are {seen}, the group was built for {expected}")]
    WrongDtype {
        /// Which tensor.
        what: &'static str,
        /// Type found.
        seen: Dtype,
        /// Type expected.
        expected: Dtype,
    },
    /// A tensor, handle or query that belongs to the other kind of memory: host instead of device,
    /// or the reverse.
    #[error("{what}: of {seen}, expected of {expected}")]
    WrongPlace {
        /// The tensor, or the query.
        what: &'static str,
        /// Its place.
        seen: &'static str,
        /// The place it should be in.
        expected: &'static str,
    },
    /// A feature that instances of this place do not have yet.
    #[error("not available on {place} ({executor}): {feature}")]
    NotAvailable {
        /// The feature.
        feature: &'static str,
        /// The place of the instance.
        place: &'static str,
        /// The executor that serves its settings there.
        executor: &'static str,
    },
    /// Rows of this type cannot be summed.
    #[error("rows of type {dtype} can be dispatched but not summed")]
    NoArithmetic {
        /// The type.
        dtype: Dtype,
    },
    /// A parameter that cannot be used.
    #[error("{parameter} = {seen}: expected {expected}")]
    BadParameter {
        /// The parameter.
        parameter: &'static str,
        /// Its value.
        seen: u64,
        /// Description of a right value.
        expected: &'static str,
    },
    /// Another number of experts than the rank holds.
    #[error("rank {rank} holds {held} of the {experts} experts, and {given} were given")]
    ExpertsGiven {
        /// This rank.
        rank: u32,
        /// Experts that the caller gave.
        given: usize,
        /// Experts that the expert map has on this rank.
        held: usize,
        /// All experts.
        experts: u32,
    },
    /// This rank's caller gave something that was refused before the call was laid out.
    #[error("the input was refused where the call was made")]
    RefusedHere,
    /// A thread of an instance could not be started.
    #[error("no thread could be started that watches what a stream awaits")]
    NoWatch,
    /// A thread that waits for memory was asked to end (`bootstrap::interruptible`).
    #[error("the wait for memory was interrupted by its caller")]
    Interrupted,
    /// The expert map does not fit the group.
    #[error("expert map: {problem} (expert {expert}, rank {rank})")]
    BadMap {
        /// The reason.
        problem: &'static str,
        /// The expert.
        expert: u32,
        /// The rank.
        rank: u32,
    },
}

/// An expression, a result, with the Rust type of an element type: `with_element!(dtype, E =>
/// sum::<E>(rows))`. An element type that the caller's crate does not know is refused.
#[doc(hidden)]
#[macro_export]
macro_rules! with_element {
    ($dtype:expr, $element:ident => $with:expr) => {
        match $dtype {
            $crate::dtype::Dtype::F32 => {
                type $element = f32;
                $with
            }
            $crate::dtype::Dtype::Bf16 => {
                type $element = $crate::dtype::bf16;
                $with
            }
            $crate::dtype::Dtype::F16 => {
                type $element = $crate::dtype::f16;
                $with
            }
            $crate::dtype::Dtype::Bytes => {
                type $element = u8;
                $with
            }
            dtype => Err($crate::error::PlanError::NoArithmetic { dtype }.into()),
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn element_types_that_differ_are_named() {
        let differ = |what| CallError::ConfigsDiffer { what, rank: 0, peer: 1, mine: 0, theirs: 1 };
        assert_eq!(differ("dtype").to_string(), "rank 0 and rank 1 disagree about dtype: f32 and bf16");
        assert_eq!(differ("align").to_string(), "rank 0 and rank 1 disagree about align: 0 and 1");
        let (what, mine, theirs) = ("whether their settings can be used (1: yes)", 1, 0);
        assert_eq!(
            CallError::ConfigsDiffer { what, rank: 0, peer: 3, mine, theirs }.to_string(),
            "the settings of rank 3 cannot be used: its own error says why"
        );
    }

    #[test]
    fn unusable_parameter_says_what_is_expected() {
        let error = PlanError::BadParameter { parameter: "top_k", seen: 0, expected: "at least 1" };
        assert_eq!(error.to_string(), "top_k = 0: expected at least 1");
    }
}
