//! What distinguishes the kinds of calls, as data: the only table of kinds. Planners, drivers and
//! programs read a kind's row, so a new kind is a new row.

use crate::error::CallKind;

/// Kinds of calls that have one program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Counts are exchanged, from which a layout is made.
    Dispatch,
    /// Rows go out along a known layout.
    Cached,
    /// Rows or weights return along a known layout.
    Return,
    /// Ranks agree, and nothing moves.
    Remap,
}

impl Class {
    pub(super) const ALL: [Class; 4] = [Class::Dispatch, Class::Cached, Class::Return, Class::Remap];
}

/// The rows that a call moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// No rows.
    Nothing,
    /// Tokens, which a dispatch may send as records.
    Tokens,
    /// Rows of the instance's columns and type. In a return, weight gradients may go with them.
    Rows,
    /// Weight gradients alone.
    Weights,
}

/// Properties of a kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallProperties {
    /// Which program it runs, and how a rank enters it to refuse it.
    pub class: Class,
    /// The rows that it moves.
    pub payload: Payload,
    /// Where combines are weighted, rows are multiplied with their weights as they are summed.
    pub weighs: bool,
    /// Name of the value in the tags' `handle` that all ranks must have alike.
    pub compared: Option<&'static str>,
}

impl CallProperties {
    /// Of a kind of call. Kinds that are no calls of an exchange are like another expert map: ranks
    /// agree on them, and nothing moves.
    pub fn of(kind: CallKind) -> Self {
        let (class, payload, compared) = match kind {
            // Counted calls have no handle yet.
            CallKind::Dispatch => (Class::Dispatch, Payload::Tokens, None),
            CallKind::Prepare => (Class::Dispatch, Payload::Nothing, None),
            CallKind::CachedDispatch => (Class::Cached, Payload::Tokens, Some("handle")),
            CallKind::CombineBackward => (Class::Cached, Payload::Rows, Some("handle")),
            CallKind::Combine | CallKind::DispatchBackward => (Class::Return, Payload::Rows, Some("handle")),
            CallKind::ReturnWeights => (Class::Return, Payload::Weights, Some("handle")),
            // Maps are compared by their digest.
            CallKind::ExpertMap => (Class::Remap, Payload::Nothing, Some("expert map")),
            _ => (Class::Remap, Payload::Nothing, None),
        };
        CallProperties { class, payload, weighs: kind == CallKind::Combine, compared }
    }
}

impl CallKind {
    /// Whether counts are exchanged, from which a layout is made; other calls follow one.
    pub fn places(self) -> bool {
        CallProperties::of(self).class == Class::Dispatch
    }
}
