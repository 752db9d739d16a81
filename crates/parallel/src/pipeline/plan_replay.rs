//! Replay of a plan: all stages go on as far as messages let them.
//!
//! A channel carries the messages of one kind from one stage to another. They match in order, as
//! those of a pair of ranks do in NCCL and in Sidelane: activations and gradients take a
//! communicator each. A stage only ever waits for counts that
//! grow, so the order in which this file moves the stages changes neither times nor deadlocks.
//!
//! ```text
//!   channel    sent      0 1 2 3 4        send k ends when    k < asked + unread
//!              asked     0 1 2            receive k ends when k < sent
//! ```

use std::collections::HashMap;

use super::plan::{Direction, Plan, Step, Tensor, Transfer};
use super::plan_times::{Costs, Span};
use crate::error::PipelineError;

/// Passes of each stage, with their times.
pub(super) fn replay(plan: &Plan, unread: u32, costs: Costs) -> Result<Vec<Vec<Span>>, PipelineError> {
    let stages = plan.stages().iter().map(|_| Stage::default()).collect();
    let mut replay = Replay { plan, unread: unread as usize, costs, stages, channels: HashMap::new() };
    let mut moved = true;
    while moved {
        moved = false;
        for stage in 0..plan.shape().stages {
            moved |= replay.go_on(stage)?;
        }
    }
    replay.end()
}

#[derive(Default)]
struct Stage {
    step: usize,
    time: u64,
    /// Positions in their channels of the messages that have begun.
    begun: Option<Vec<usize>>,
    spans: Vec<Span>,
}

/// Messages with the times at which a side came to them.
#[derive(Default)]
struct Channel {
    sent: Vec<(Transfer, u64)>,
    asked: Vec<(Transfer, u64)>,
}

struct Replay<'p> {
    plan: &'p Plan,
    unread: usize,
    costs: Costs,
    stages: Vec<Stage>,
    /// By sender, receiver and kind.
    channels: HashMap<(u32, u32, Tensor), Channel>,
}

impl Replay<'_> {
    /// Moves a stage as far as it goes. Returns whether others may go further for it.
    fn go_on(&mut self, stage: u32) -> Result<bool, PipelineError> {
        let steps = &self.plan.stages()[stage as usize];
        let mut moved = false;
        while let Some(step) = steps.get(self.stages[stage as usize].step) {
            match step {
                Step::Compute(_) | Step::Overlap { .. } => self.compute(stage, step),
                Step::Transfer(group) => {
                    moved |= self.begin(stage, group)?;
                    let Ok(end) = self.ended(stage, group) else { break };
                    let state = &mut self.stages[stage as usize];
                    (state.time, state.begun) = (end, None);
                }
            }
            self.stages[stage as usize].step += 1;
            moved = true;
        }
        Ok(moved)
    }

    fn compute(&mut self, stage: u32, step: &Step) {
        let cost = self.costs.of(step, self.plan.recomputes());
        let state = &mut self.stages[stage as usize];
        let (begin, end) = (state.time, state.time.saturating_add(cost));
        state.spans.extend(step.passes().map(|compute| Span { compute, begin, end }));
        state.time = end;
    }

    /// Begins the messages of a group, once. Returns whether it did.
    fn begin(&mut self, stage: u32, group: &[Transfer]) -> Result<bool, PipelineError> {
        let Stage { time, begun, .. } = &mut self.stages[stage as usize];
        if begun.is_some() {
            return Ok(false);
        }
        let mut positions = Vec::with_capacity(group.len());
        for transfer in group {
            let channel = self.channels.entry(key(stage, transfer)).or_default();
            let (own, other) = match transfer.direction {
                Direction::Send => (&mut channel.sent, &channel.asked),
                Direction::Receive => (&mut channel.asked, &channel.sent),
            };
            if let Some((theirs, _)) = other.get(own.len())
                && (theirs.microbatch, theirs.model_chunk) != (transfer.microbatch, transfer.model_chunk)
            {
                let (from, to, _) = key(stage, transfer);
                let (sent, received) = match transfer.direction {
                    Direction::Send => (*transfer, *theirs),
                    Direction::Receive => (*theirs, *transfer),
                };
                return Err(PipelineError::Mismatch { from, to, nth: own.len(), sent, received });
            }
            positions.push(own.len());
            own.push((*transfer, *time));
        }
        *begun = Some(positions);
        Ok(true)
    }

    /// When the messages of a group have ended, if all have; or the first that has not.
    fn ended(&self, stage: u32, group: &[Transfer]) -> Result<u64, Transfer> {
        let state = &self.stages[stage as usize];
        let begun = state.begun.iter().flatten();
        group.iter().zip(begun).try_fold(state.time, |end, (transfer, &nth)| {
            Ok(end.max(self.ended_at(stage, transfer, nth).ok_or(*transfer)?))
        })
    }

    fn ended_at(&self, stage: u32, transfer: &Transfer, nth: usize) -> Option<u64> {
        let channel = self.channels.get(&key(stage, transfer))?;
        match transfer.direction {
            Direction::Send if nth < self.unread => Some(0),
            Direction::Send => Some(channel.asked.get(nth - self.unread)?.1),
            Direction::Receive => Some(channel.sent.get(nth)?.1.saturating_add(self.costs.transfer)),
        }
    }

    fn end(self) -> Result<Vec<Vec<Span>>, PipelineError> {
        let mut waiting = Vec::new();
        for (stage, steps) in (0..).zip(self.plan.stages()) {
            if let Some(Step::Transfer(group)) = steps.get(self.stages[stage as usize].step) {
                waiting.extend(self.ended(stage, group).err().map(|transfer| (stage, transfer)));
            }
        }
        if waiting.is_empty() {
            return Ok(self.stages.into_iter().map(|stage| stage.spans).collect());
        }
        Err(PipelineError::Deadlock { waiting })
    }
}

/// The channel of a message, seen from one of its sides.
fn key(stage: u32, transfer: &Transfer) -> (u32, u32, Tensor) {
    match transfer.direction {
        Direction::Send => (stage, transfer.peer, transfer.tensor),
        Direction::Receive => (transfer.peer, stage, transfer.tensor),
    }
}
