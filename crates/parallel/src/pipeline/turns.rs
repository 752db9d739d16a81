//! The communicators of two stages, which take their messages in turn.
//!
//! A communicator holds two messages unread in each direction, so a plan that needs more has
//! several. Where activations and gradients go in one direction, each kind has communicators of its
//! own: with `t` in turn the nth activation is in number `n mod t`, and the nth gradient in number
//! `t + n mod t`.

use std::collections::{HashMap, HashSet};

use super::plan::{Direction, Plan, Step, Tensor, Transfer};
use crate::error::PipelineError;

/// Messages of a pair that a communicator holds unread, if they have one part.
const HELD: u32 = 2;

/// The messages of a stage so far.
#[derive(Clone, Debug)]
pub(super) struct Turns {
    /// Kinds of messages that need communicators of their own.
    kinds: u32,
    /// Communicators that take the messages of a kind in turn.
    in_turn: u32,
    /// By side, tensor and peer.
    messages: HashMap<(Direction, Tensor, u32), u32>,
}

impl Turns {
    /// Before the first message of a plan of [single messages](Plan::one_by_one), of which a
    /// receiver holds so many unread.
    pub fn new(plan: &Plan, unread: u32) -> Turns {
        let sends = sends(plan);
        let both = |&(from, to, tensor): &(u32, u32, Tensor)| {
            tensor == Tensor::Activation && sends.contains(&(from, to, Tensor::Gradient))
        };
        let kinds = if sends.iter().any(both) { 2 } else { 1 };
        Turns { kinds, in_turn: unread.div_ceil(HELD).max(1), messages: HashMap::new() }
    }

    /// Communicators of two stages.
    pub fn communicators(&self) -> u32 {
        self.kinds * self.in_turn
    }

    /// The communicator of the next message.
    pub fn take(&mut self, message: &Transfer) -> u32 {
        let Transfer { direction, tensor, peer, .. } = *message;
        let nth = self.messages.entry((direction, tensor, peer)).or_default();
        let kind = if self.kinds > 1 { tensor as u32 } else { 0 };
        let turn = *nth % self.in_turn;
        *nth += 1;
        kind * self.in_turn + turn
    }
}

/// Sender, receiver and kind of the messages of a plan of single messages.
pub(super) fn sends(plan: &Plan) -> HashSet<(u32, u32, Tensor)> {
    let of_stage = |(stage, steps): (u32, &Vec<Step>)| {
        let sends = steps.iter().filter_map(message).filter(|of| of.direction == Direction::Send);
        sends.map(|of| (stage, of.peer, of.tensor)).collect::<Vec<_>>()
    };
    (0..).zip(plan.stages()).flat_map(of_stage).collect()
}

/// The message of a step.
fn message(step: &Step) -> Option<&Transfer> {
    match step {
        Step::Transfer(group) => group.first(),
        Step::Compute(_) | Step::Overlap { .. } => None,
    }
}

/// By stage, the messages of a pipeline in the order of its calls, each with its communicator of
/// those of both stages. A test proves that they never deadlock.
///
/// # Errors
/// As [`Plan::least_unread`].
#[doc(hidden)]
pub fn messages_in_turn(plan: &Plan) -> Result<Vec<Vec<(Transfer, u32)>>, PipelineError> {
    let plan = plan.one_by_one();
    let turns = Turns::new(&plan, plan.least_unread()?);
    let of_stage = |steps: &Vec<Step>| {
        let mut turns = turns.clone();
        steps.iter().filter_map(message).map(|of| (*of, turns.take(of))).collect()
    };
    Ok(plan.stages().iter().map(of_stage).collect())
}
