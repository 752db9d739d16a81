//! The order in which the stages of a pipeline compute, send and receive: one forward, one backward
//! (1F1B).
//!
//! ```text
//!   4 stages, 6 microbatches          F: forward   B: backward   x: send and receive at once
//!
//!   stage 0   F0> F1> F2> F3x  B0  F4x  B1  F5x  B2   <B3   <B4   <B5
//!   stage 1    >F0> >F1> >F2x  B0x F3x  B1x F4x  B2x F5x  B3> <B4> <B5>
//!   stage 2         ...
//!   stage 3               >F0 B0x F1 B1x F2 B2x ...
//! ```
//!
//! A stage first goes ahead by as many microbatches as there are stages behind it, then takes one
//! forward and one backward in turn. It is Megatron's order: in between, each stage sends its
//! output *while* it receives the gradient of an earlier one ([`PipelineStep::ExchangeNext`]). Two
//! stages that first send and then receive would wait for each other forever as soon as a message
//! exceeds the unread space between them. In this order they never do.

use crate::error::PlanError;

/// The next step of a stage. Numbers are microbatches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PipelineStep {
    /// Receives the input of a microbatch from the stage before.
    ReceiveForward(u32),
    /// Computes forward.
    Forward(u32),
    /// Sends the output of a microbatch to the next stage.
    SendForward(u32),
    /// Receives the gradient of an output from the next stage.
    ReceiveBackward(u32),
    /// Computes backward.
    Backward(u32),
    /// Sends the gradient of an input to the stage before.
    SendBackward(u32),
    /// To the next stage an output, from it a gradient, at once.
    ExchangeNext {
        /// Microbatch of the output that is sent.
        send: u32,
        /// Microbatch of the gradient that is received.
        receive: u32,
    },
    /// To the stage before a gradient, from it an input, at once.
    ExchangePrevious {
        /// Microbatch of the gradient that is sent.
        send: u32,
        /// Microbatch of the input that is received.
        receive: u32,
    },
}

/// Microbatches of all stages together.
const MOST: u64 = 1 << 24;

/// The order of every stage.
///
/// ```
/// use sidelane_core::plan::{Pipeline, PipelineStep::*};
/// let pipeline = Pipeline::one_forward_one_backward(2, 2)?;
/// assert_eq!(pipeline.stage(0), [Forward(0), SendForward(0), Forward(1), ExchangeNext { send: 1, receive: 0 }, Backward(0),
///     ReceiveBackward(1), Backward(1)]);
/// assert_eq!(pipeline.stage(1), [ReceiveForward(0), Forward(0), Backward(0), ExchangePrevious { send: 0, receive: 1 },
///     Forward(1), Backward(1), SendBackward(1)]);
/// assert!(Pipeline::one_forward_one_backward(u32::MAX, 0).is_err());
/// # Ok::<(), sidelane_core::error::PlanError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pipeline {
    stages: Vec<Vec<PipelineStep>>,
}

impl Pipeline {
    /// So many microbatches through so many stages.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] without stages, and for more than 2^24 microbatches over all
    /// stages.
    pub fn one_forward_one_backward(stages: u32, microbatches: u32) -> Result<Self, PlanError> {
        if stages == 0 {
            let (parameter, expected) = ("stages", "at least 1");
            return Err(PlanError::BadParameter { parameter, seen: 0, expected });
        }
        if u64::from(stages) * u64::from(microbatches.max(1)) > MOST {
            let (parameter, seen) = ("microbatches", microbatches.into());
            let expected = "at most 2^24 over all stages";
            return Err(PlanError::BadParameter { parameter, seen, expected });
        }
        let order = |stage| {
            Order { first: stage == 0, last: stage + 1 == stages }.of(stages - 1 - stage, microbatches)
        };
        Ok(Pipeline { stages: (0..stages).map(order).collect() })
    }

    /// These orders, one for each stage. They may be bad ones, to show the deadlock that follows.
    pub fn of(stages: Vec<Vec<PipelineStep>>) -> Self {
        Pipeline { stages }
    }

    /// Number of stages.
    pub fn stages(&self) -> u32 {
        self.stages.len() as u32
    }

    /// The order of a stage; nothing for one that there is not.
    pub fn stage(&self, stage: u32) -> &[PipelineStep] {
        self.stages.get(stage as usize).map_or(&[], Vec::as_slice)
    }
}

/// The stages next to a stage.
struct Order {
    first: bool,
    last: bool,
}

impl Order {
    fn of(&self, behind: u32, microbatches: u32) -> Vec<PipelineStep> {
        use PipelineStep::{
            Backward, ExchangeNext, ExchangePrevious, Forward, ReceiveBackward, ReceiveForward, SendBackward,
            SendForward,
        };
        let ahead = behind.min(microbatches);
        let mut steps = Vec::new();
        let mut add = |there: bool, step| steps.extend(there.then_some(step));
        for forward in 0..ahead {
            add(!self.first, ReceiveForward(forward));
            add(true, Forward(forward));
            add(!self.last, SendForward(forward));
        }
        if ahead < microbatches {
            add(!self.first, ReceiveForward(ahead));
        }
        for forward in ahead..microbatches {
            let backward = forward - ahead;
            add(true, Forward(forward));
            add(!self.last, ExchangeNext { send: forward, receive: backward });
            add(true, Backward(backward));
            match forward + 1 < microbatches {
                true => add(!self.first, ExchangePrevious { send: backward, receive: forward + 1 }),
                false => add(!self.first, SendBackward(backward)),
            }
        }
        for backward in microbatches - ahead..microbatches {
            add(!self.last, ReceiveBackward(backward));
            add(true, Backward(backward));
            add(!self.first, SendBackward(backward));
        }
        steps
    }
}
