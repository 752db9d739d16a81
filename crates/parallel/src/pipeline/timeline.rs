//! Times of a plan with given costs.

use std::fmt;

use super::plan::{Compute, Pass, Plan};
use super::replay::replay;
use crate::error::PipelineError;

/// Costs of passes over one model chunk and one microbatch, in any unit of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Costs {
    /// Of a forward pass.
    pub forward: u64,
    /// Of gradients of inputs.
    pub backward_input: u64,
    /// Of gradients of weights.
    pub backward_weight: u64,
    /// From the send of a message to its arrival. The sender computes meanwhile.
    pub transfer: u64,
}

/// A pass with its times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The pass.
    pub compute: Compute,
    /// Its begin.
    pub begin: u64,
    /// Its end.
    pub end: u64,
}

/// When each stage makes its passes.
///
/// ```
/// use sidelane_parallel::pipeline::{Costs, Schedule};
///
/// let costs = Costs { forward: 1, backward_input: 1, backward_weight: 1, transfer: 0 };
/// let timeline = Schedule::ZeroBubbleH1.plan(2, 3)?.time(1, costs)?;
/// assert_eq!(timeline.to_string(), "\
/// 0 | F0 F1    B0 W0 F2 B1 W1 B2 W2
/// 1 |    F0 B0 F1 B1 W0 F2 B2 W1 W2
/// ");
/// # Ok::<(), sidelane_parallel::PipelineError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeline {
    /// Passes of each stage.
    pub stages: Vec<Vec<Span>>,
}

impl Plan {
    /// Replays the plan with these costs. A stage holds up to `unread` messages of a channel that
    /// it has not asked for; then their sender waits.
    ///
    /// # Errors
    /// [`PipelineError::Deadlock`], [`PipelineError::Mismatch`]. This looks at messages alone: ask
    /// [`Plan::prove`] about a plan of your own first.
    pub fn time(&self, unread: u32, costs: Costs) -> Result<Timeline, PipelineError> {
        Ok(Timeline { stages: replay(self, unread, costs)? })
    }
}

impl Timeline {
    /// From the begin of the first pass of any stage to the end of the last.
    pub fn time(&self) -> u64 {
        let ends = self.stages.iter().flatten().map(|span| span.end);
        ends.max().unwrap_or(0) - self.stages.iter().flatten().map(|span| span.begin).min().unwrap_or(0)
    }

    /// Idle time of the stage that idles most, between its first pass and its last. If the next
    /// step of a stage need not wait for the other stages, this is what a step loses.
    pub fn bubble(&self) -> u64 {
        let idle = |spans: &Vec<Span>| {
            let busy: u64 = spans.iter().map(|span| span.end - span.begin).sum();
            let (first, last) = (spans.first()?, spans.last()?);
            Some(last.end - first.begin - busy)
        };
        self.stages.iter().filter_map(idle).max().unwrap_or(0)
    }
}

/// A line for each stage, with a column for each unit of time. `F`, `B` and `W` are forward
/// passes, backward passes and gradients of weights, with their microbatch and, if there are more
/// than one, their model chunk as a letter.
impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let chunks = self.stages.iter().flatten().any(|span| span.compute.model_chunk > 0);
        let label = |compute: Compute| {
            let pass = match compute.pass {
                Pass::Forward => 'F',
                Pass::Backward | Pass::BackwardInput => 'B',
                Pass::BackwardWeight => 'W',
            };
            let letter = char::from(b'a' + (compute.model_chunk % 26) as u8);
            let letter = if chunks { letter.to_string() } else { String::new() };
            format!("{pass}{}{letter}", compute.microbatch)
        };
        let labels = self.stages.iter().flatten().map(|span| label(span.compute).len());
        let column = labels.max().unwrap_or(0) + 1;
        let margin = self.stages.len().saturating_sub(1).to_string().len();
        for (stage, spans) in self.stages.iter().enumerate() {
            let mut line = format!("{stage:margin$} |");
            for Span { compute, begin, end } in spans {
                let at = |time: u64| margin + 3 + time as usize * column;
                line = format!("{line:0$}{1}", at(*begin), label(*compute));
                if end - begin > 1 {
                    line = format!("{line:-<0$}", at(*end) - 1);
                }
            }
            writeln!(f, "{line}")?;
        }
        Ok(())
    }
}
