//! Plans: the steps of a pass in launch order, and which steps each waits for.

use std::fmt;

use sidelane::error::CallKind;
use sidelane::overlap::{NodeLabel, StreamId, TokenChunks};

/// A pass of a sequence parallel linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinearPass {
    /// Inputs are gathered, and multiplied as they come.
    ColumnForward,
    /// Gradients of inputs are computed next to the gather of inputs, and reduced next to the
    /// gradients of weights.
    ColumnBackward,
    /// Outputs are reduced as they are computed.
    RowForward,
    /// Gradients of outputs are gathered, and multiplied as they come. Gradients of weights follow.
    RowBackward,
}

impl LinearPass {
    /// All of them.
    pub const ALL: [LinearPass; 4] = [
        LinearPass::ColumnForward,
        LinearPass::ColumnBackward,
        LinearPass::RowForward,
        LinearPass::RowBackward,
    ];

    pub(super) fn gathers(self) -> bool {
        self != LinearPass::RowForward
    }

    pub(in crate::tensor) fn reduces(self) -> bool {
        matches!(self, LinearPass::ColumnBackward | LinearPass::RowForward)
    }

    pub(super) fn has_weights(self) -> bool {
        matches!(self, LinearPass::ColumnBackward | LinearPass::RowBackward)
    }
}

/// Work of a step. Numbers are those of token chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// Ranks compare their tokens and chunks, so that all make the calls that follow.
    Compare,
    /// All-gather of the chunk of each rank.
    Gather(u32),
    /// Products of this rank's own tokens, which need no transfer.
    Own,
    /// Products of the chunk of each rank. Where rows are gathered first, [`Work::Own`] has those
    /// of this rank.
    Multiply(u32),
    /// Reduce-scatter of the products of a chunk.
    Reduce(u32),
    /// Gradients of weights, of all tokens.
    Weights,
}

impl Work {
    /// The stream that runs it.
    pub fn stream(self) -> StreamId {
        match self.call() {
            Some(_) => StreamId::Transfer(0),
            None => StreamId::Compute(0),
        }
    }

    /// The collective call that it is, if any.
    pub(super) fn call(self) -> Option<CallKind> {
        match self {
            Work::Compare | Work::Gather(_) => Some(CallKind::AllGather),
            Work::Reduce(_) => Some(CallKind::ReduceScatter),
            Work::Own | Work::Multiply(_) | Work::Weights => None,
        }
    }

    /// Its name and chunk, for timelines and errors.
    pub(super) fn label(self) -> NodeLabel {
        let (name, chunk) = match self {
            Work::Compare => ("compare", 0),
            Work::Gather(chunk) => ("gather", chunk),
            Work::Own => ("own", 0),
            Work::Multiply(chunk) => ("multiply", chunk),
            Work::Reduce(chunk) => ("reduce", chunk),
            Work::Weights => ("weights", 0),
        };
        NodeLabel::new(name, chunk)
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NodeLabel { name, chunk, .. } = self.label();
        match self {
            Work::Compare | Work::Own | Work::Weights => write!(f, "{name}"),
            Work::Gather(_) | Work::Multiply(_) | Work::Reduce(_) => write!(f, "{name} {chunk}"),
        }
    }
}

/// A step of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its work.
    pub work: Work,
    /// Positions of earlier steps of the other stream that must have ended before.
    pub after: Vec<usize>,
}

/// The steps of a pass, the same on all ranks.
///
/// ```
/// use sidelane::overlap::TokenChunks;
/// use sidelane_parallel::tensor::overlap::{LinearPass, Plan};
///
/// let plan = Plan::new(LinearPass::ColumnForward, TokenChunks::new(2));
/// plan.prove(8)?;
/// assert_eq!(plan.to_string(), "\
/// transfer 0 | compare, gather 0, gather 1
/// compute 0  | own, multiply 0 (gather 0), multiply 1 (gather 1)
/// ");
/// # Ok::<(), sidelane_parallel::OverlapPlanError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pass: LinearPass,
    chunks: TokenChunks,
    steps: Vec<Step>,
}

impl Plan {
    /// The plan of a pass. With one chunk nothing overlaps, but for the gradients of weights and
    /// the transfer next to them.
    pub fn new(pass: LinearPass, chunks: TokenChunks) -> Plan {
        let (mut steps, count) = (Vec::new(), chunks.count());
        let mut add = |work, after: &[usize]| {
            steps.push(Step { work, after: after.to_vec() });
            steps.len() - 1
        };
        if count > 1 {
            add(Work::Compare, &[]);
        }
        match pass {
            LinearPass::ColumnForward | LinearPass::RowBackward => {
                let mut gathered = add(Work::Gather(0), &[]);
                if count > 1 {
                    add(Work::Own, &[]);
                }
                for chunk in 0..count {
                    let needed = gathered;
                    if chunk + 1 < count {
                        gathered = add(Work::Gather(chunk + 1), &[]);
                    }
                    add(Work::Multiply(chunk), &[needed]);
                }
                if pass.has_weights() {
                    add(Work::Weights, &[gathered]);
                }
            }
            LinearPass::RowForward => {
                for chunk in 0..count {
                    let made = add(Work::Multiply(chunk), &[]);
                    add(Work::Reduce(chunk), &[made]);
                }
            }
            LinearPass::ColumnBackward => {
                let gathered = (0..count).fold(0, |_, chunk| add(Work::Gather(chunk), &[]));
                for chunk in 0..count {
                    let made = add(Work::Multiply(chunk), &[]);
                    add(Work::Reduce(chunk), &[made]);
                }
                add(Work::Weights, &[gathered]);
            }
        }
        Plan { pass, chunks, steps }
    }

    /// Steps of the caller's own. [`Plan::prove`] says whether they work.
    pub fn from_steps(pass: LinearPass, chunks: TokenChunks, steps: Vec<Step>) -> Plan {
        Plan { pass, chunks, steps }
    }

    /// The pass.
    pub fn pass(&self) -> LinearPass {
        self.pass
    }

    /// Chunks of each rank's tokens.
    pub fn chunks(&self) -> TokenChunks {
        self.chunks
    }

    /// The steps in launch order.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The collective calls of each rank in order.
    pub(super) fn calls(&self) -> Vec<CallKind> {
        self.steps.iter().filter_map(|step| step.work.call()).collect()
    }
}

/// The steps of each stream, and in brackets those that a step waits for.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, stream) in [("transfer 0", StreamId::Transfer(0)), ("compute 0", StreamId::Compute(0))] {
            write!(f, "{name:10} |")?;
            let own = self.steps.iter().filter(|step| step.work.stream() == stream);
            for (nth, Step { work, after }) in own.enumerate() {
                write!(f, "{} {work}", if nth > 0 { "," } else { "" })?;
                let after = after.iter().filter_map(|&at| self.steps.get(at));
                let needed: Vec<_> = after.map(|step| step.work.to_string()).collect();
                if !needed.is_empty() {
                    write!(f, " ({})", needed.join(", "))?;
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
