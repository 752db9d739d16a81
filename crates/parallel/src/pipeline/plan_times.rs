//! Times of a plan with given costs.

use std::fmt::{self, Write};

use super::plan::{Compute, Pass, Plan, Step};
use super::plan_replay::replay;
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
    /// Of a forward pass and a whole backward pass that overlap.
    pub overlap: u64,
    /// From the send of a message to its arrival. The sender computes meanwhile.
    pub transfer: u64,
}

impl Costs {
    /// Costs of passes that gain nothing by overlap, with messages that take no time.
    pub fn new(forward: u64, backward_input: u64, backward_weight: u64) -> Costs {
        let overlap = forward.saturating_add(backward_input).saturating_add(backward_weight);
        Costs { forward, backward_input, backward_weight, overlap, transfer: 0 }
    }

    /// Cost of a step. Recomputation repeats a forward pass before each backward pass.
    pub(super) fn of(&self, step: &Step, recompute: bool) -> u64 {
        let again = |pass| match pass {
            Pass::Backward | Pass::BackwardInput if recompute => self.forward,
            _ => 0,
        };
        let of = |pass| match pass {
            Pass::Forward => self.forward,
            Pass::Backward => self.backward_input.saturating_add(self.backward_weight),
            Pass::BackwardInput => self.backward_input,
            Pass::BackwardWeight => self.backward_weight,
        };
        match step {
            Step::Compute(compute) => again(compute.pass).saturating_add(of(compute.pass)),
            Step::Overlap { backward, .. } => {
                let missing = of(Pass::Backward).saturating_sub(of(backward.pass));
                again(backward.pass).saturating_add(self.overlap.saturating_sub(missing))
            }
            Step::Transfer(_) => 0,
        }
    }
}

/// A pass with its times. Passes that overlap have the same.
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
/// let timeline = Schedule::ZeroBubbleH1.plan(2, 3)?.time(1, Costs::new(1, 1, 1))?;
/// assert_eq!(timeline.to_string(), "\
/// 0 | F0 F1    B0 W0 F2 B1 W1 B2 W2
/// 1 |    F0 B0 F1 B1 W0 F2 B2 W1 W2
/// ");
/// # Ok::<(), sidelane_parallel::PipelineError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeline {
    stages: Vec<Vec<Span>>,
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
    /// Passes of each stage, in order.
    pub fn stages(&self) -> &[Vec<Span>] {
        &self.stages
    }

    /// From the begin of the first pass of any stage to the end of the last.
    pub fn time(&self) -> u64 {
        let ends = self.stages.iter().flatten().map(|span| span.end);
        ends.max().unwrap_or(0) - self.stages.iter().flatten().map(|span| span.begin).min().unwrap_or(0)
    }

    /// Idle time of the stage that idles most, between its first pass and its last. If the next
    /// step of a stage need not wait for the other stages, this is what a step loses.
    pub fn bubble(&self) -> u64 {
        let idle = |(stage, spans): (usize, &Vec<Span>)| {
            let (first, last) = (spans.first()?, spans.last()?);
            Some(last.end - first.begin - self.busy(stage))
        };
        self.stages.iter().enumerate().filter_map(idle).max().unwrap_or(0)
    }

    /// Time that a stage computes.
    pub fn busy(&self, stage: usize) -> u64 {
        let mut end = 0;
        let spans = self.stages.get(stage).into_iter().flatten();
        let times = spans.map(|span| {
            let time = span.end - span.begin.max(end);
            end = span.end;
            time
        });
        times.sum()
    }
}

/// Columns of a drawn line, at most.
const MOST_COLUMNS: u64 = 1 << 16;

/// A line for each stage, with columns for each unit of time: the largest that divides all times.
/// `F`, `B` and `W` are forward passes, backward passes and gradients of weights, with their
/// microbatch and, if there are more than one, their model chunk as a letter. Passes that overlap
/// stand together. What needs more than 65,536 columns is not drawn.
impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let chunks = self.stages.iter().flatten().any(|span| span.compute.model_chunk > 0);
        let mut stages: Vec<Vec<Cell>> = self.stages.iter().map(|spans| cells(spans, chunks)).collect();
        let times = stages.iter().flatten().flat_map(|cell| [cell.begin, cell.end]);
        let common = times.fold(0, greatest_common_divisor).max(1);
        stages.iter_mut().flatten().for_each(|cell| {
            (cell.begin, cell.end) = (cell.begin / common, cell.end / common);
        });
        let widths = stages.iter().flatten().map(|cell| {
            let units = (cell.end - cell.begin).max(1);
            (cell.label.len() as u64 + 1).div_ceil(units)
        });
        let unit = widths.max().unwrap_or(0);
        let last = stages.iter().flatten().map(|cell| cell.end).max().unwrap_or(0);
        if last.saturating_mul(unit) > MOST_COLUMNS {
            return writeln!(f, "{} stages, {last} units of time: too long to draw", stages.len());
        }
        let margin = stages.len().saturating_sub(1).to_string().len();
        for (stage, cells) in stages.iter().enumerate() {
            write!(f, "{stage:margin$} |")?;
            let mut column = 0;
            for Cell { label, begin, end } in cells {
                fill(f, ' ', &mut column, begin.saturating_mul(unit).saturating_add(1))?;
                write!(f, "{label}")?;
                column += label.len() as u64;
                if end - begin > 1 {
                    fill(f, '-', &mut column, end.saturating_mul(unit))?;
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Passes that overlap, or one.
struct Cell {
    label: String,
    begin: u64,
    end: u64,
}

fn cells(spans: &[Span], chunks: bool) -> Vec<Cell> {
    let label = |span: &Span| {
        let Compute { pass, microbatch, model_chunk } = span.compute;
        let pass = match pass {
            Pass::Forward => 'F',
            Pass::Backward | Pass::BackwardInput => 'B',
            Pass::BackwardWeight => 'W',
        };
        let letter = chunks.then(|| char::from(b'a' + (model_chunk % 26) as u8));
        format!("{pass}{microbatch}{}", letter.map(String::from).unwrap_or_default())
    };
    let together = spans.chunk_by(|a, b| (a.begin, a.end) == (b.begin, b.end));
    let cell =
        |of: &[Span]| Cell { label: of.iter().map(label).collect(), begin: of[0].begin, end: of[0].end };
    together.map(cell).collect()
}

/// Writes a character up to a column.
fn fill(f: &mut fmt::Formatter<'_>, with: char, column: &mut u64, to: u64) -> fmt::Result {
    while *column < to {
        f.write_char(with)?;
        *column += 1;
    }
    Ok(())
}
