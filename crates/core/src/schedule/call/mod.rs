//! The call as data: the stages that a rank runs, its work between them, and the points where a
//! call may end early.
//!
//! ```text
//!   dispatch   sort  release  publish  announce  entry..  /  ..entry  AGREE  judge  ADMIT  place  describe  fill
//!              rows  report  metadata
//!   cached     release  take  entry..  /  ..entry  AGREE  landings  fill  rows
//!   return     release  offer  entry..  /  ..entry  AGREE  bases  home  fill  sum  retire
//!   remap      release  propose  entry  AGREE  adopt
//!   round      fill  entry  AGREE  /  copy out  further stages  end  copy out                  of a collective
//!   enqueued   dispatch: AWAIT STREAM  sort ..  rows..  posted  ..rows     return: ready..  /  Offer ..  ..ready  pull
//!              cached: take  entry .. rows..  posted  ..rows
//!   slots      pack  rows..  /  ..rows  check     partials  home..  /  ..home  sum     home (a release)
//!   relay      node entered  compose  counts sent  all entered  AGREE  judge  ADMIT  agreed
//!              headers  learn  fill  relay rows, or return rows  relay done
//! ```
//!
//! A [`CallProgram`] is a straight line of [`CallStep`]s. A driver is a loop over it: the host
//! stepper, the thread of an offloaded relay and the proof step the same [`CallMachine`], so the
//! proof also covers *when* planners touch memory.
//!
//! **Refusal is no branch.** A rank that refuses its input runs the same steps with empty operands
//! and sets a flag in its tag. Only [`Action::Agree`] and [`Action::Admit`] may cut a call short.
//! Both judge bytes that all ranks hold, so all ranks cut at the same step. A [`Cut`] names the
//! remaining steps; a program with n cuts is n + 1 straight lines.
//!
//! **Relays.** A rank's relay has steps of its own. [`CallProgram::weave`] splices them between the
//! rank's own signals and its own waits where one thread plays both; it then drops the relay's
//! verdict, which would repeat the rank's own. Where the relay is [offloaded](Relays::Thread), its
//! steps are a second program.

mod agree;
mod machine;
mod programs;
mod stage;

use std::fmt;

pub use agree::Agreement;
pub use machine::CallMachine;
pub use programs::{CallPrograms, CallShape, Engines, RankPrograms, Relays, SlotCall};
pub use stage::{Part, StageId, Stages};

/// Which of a rank's programs a step belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The rank's own.
    Own,
    /// That of its relay, which serves ranks of other nodes.
    Relay,
}

/// One step of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallStep {
    /// The program of the step.
    pub role: Role,
    /// The action.
    pub action: Action,
}

/// Action of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Runs the operations of a stage, or of one half of it.
    Run(StageId, Part),
    /// Runs a stage of a collective's skeleton, counted from 0: the entry.
    Round(u8),
    /// Plans or computes. Touches windows only where [`Work`] says so.
    Compute(Work),
    /// Compares the tags of all ranks. Cuts the call if a rank refuses or makes another call.
    Agree,
    /// Checks that every rank has room for its rows. Cuts the call if one has not.
    Admit,
}

/// Planning or arithmetic of a rank between two stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// Waits until the caller's stream has reached the call: its memory is this call's from then
    /// on.
    AwaitStream,
    /// Sorts this rank's choices into bins. Reads the caller's routing.
    Sort,
    /// Writes this rank's counts per bin to its publication.
    Publish,
    /// Announces the largest free extent of the pool; the tag says where it lies.
    Announce,
    /// Takes an extent of the size that the handle knows.
    Take,
    /// Takes memory for rows that relays return, and offers the caller's chunk.
    Offer,
    /// Checks a new expert map.
    Propose,
    /// Gives an offloaded relay its program.
    StartRelay,
    /// Adds up the counts of all ranks. Reads publications of this node and messages of the others.
    Judge,
    /// Computes the layout, and clips what exceeds a budget.
    Place,
    /// Writes the headers of this rank's blocks.
    Describe,
    /// Cached dispatch: reads from tags where rows land at other ranks.
    Landings,
    /// Reads from tags where the chunks of this node's ranks begin.
    Bases,
    /// Tells a waiting caller that all ranks agreed: the call can no longer be refused.
    TellAgreed,
    /// Fills the operands of [`StageId::Rows`].
    FillRows,
    /// Fills the operands of [`StageId::BringIn`].
    FillBringIn,
    /// Fills the operands of [`StageId::Sum`].
    FillSum,
    /// Fills the operands of [`StageId::Pull`] and [`StageId::PullRest`].
    FillPull,
    /// Waits until an offloaded relay has finished.
    JoinRelay,
    /// Trims the extent to what landed, and fills the handle's report.
    Report,
    /// Reads the metadata that landed behind the rows.
    Metadata,
    /// Retires the chunk: the pool has it back when all readers have read it.
    Retire,
    /// Replaces the expert map.
    Adopt,
    /// Relay: adds up the counts of this node, and writes the messages to other nodes.
    Compose,
    /// Relay: reads the headers of its sources.
    Learn,
    /// Relay: fills the operands of [`StageId::RelayRows`].
    FillRelay,
    /// Relay: reads where its sources want their rows, and fills the operands of
    /// [`StageId::ReturnRows`].
    FillReturn,
    /// All-gather: sorts the choices of all ranks.
    SortAll,
    /// All-gather: computes the layouts of all ranks.
    PlaceAll,
    /// Collective: fills the operands of all stages of a round.
    FillRound,
    /// Collective: copies the part that is due to the caller's tensor.
    CopyOut,
    /// Collective: the round's result for the caller is due.
    EndRound,
    /// Slots: packs this rank's rows into a slot for each rank.
    Pack,
    /// Slots: compares the headers of landed slots with the expected ones.
    Check,
    /// Slots: brings the experts' partial rows to where they are sent from, if they lie elsewhere.
    Partials,
    /// Slots: sums the returned partial rows.
    Sum,
}

/// Where a call may end before its last step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The step that cuts: [`Action::Agree`] or [`Action::Admit`].
    pub at: u16,
    /// Steps that remain after it.
    pub tail: Box<[CallStep]>,
}

/// The steps of one kind of call at one rank: a straight line, with the points where it may be cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallProgram {
    steps: Box<[CallStep]>,
    half: u16,
    cuts: Box<[Cut]>,
}

impl CallProgram {
    /// A program of these steps, whose second half begins at `half`, with its cuts in the order of
    /// steps.
    pub fn new(steps: Vec<CallStep>, half: u16, cuts: Vec<Cut>) -> Self {
        CallProgram { steps: steps.into(), half, cuts: cuts.into() }
    }

    /// All steps, if nothing cuts the call.
    pub fn steps(&self) -> &[CallStep] {
        &self.steps
    }

    /// Index of the first step of `finish`.
    pub fn half(&self) -> usize {
        usize::from(self.half)
    }

    /// Where the call may be cut, in the order of steps.
    pub fn cuts(&self) -> &[Cut] {
        &self.cuts
    }

    /// One of the straight lines that this program is: uncut, or up to a step that cuts and then
    /// its tail.
    pub fn line<'p>(&'p self, cut: Option<&'p Cut>) -> impl Iterator<Item = CallStep> + 'p {
        let end = cut.map_or(self.steps.len(), |cut| usize::from(cut.at) + 1);
        let tail = cut.map_or(&[][..], |cut| &cut.tail);
        self.steps[..end].iter().chain(tail).copied()
    }

    /// The cut at the first step of this kind, if there is one.
    pub fn cut_at(&self, action: Action) -> Option<&Cut> {
        self.cuts.iter().find(|cut| self.steps[usize::from(cut.at)].action == action)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::Run(stage, Part::Whole) => write!(f, "{}", stage.name()),
            Action::Run(stage, Part::Start) => write!(f, "{}..", stage.name()),
            Action::Run(stage, Part::Finish) => write!(f, "..{}", stage.name()),
            Action::Round(nth) => write!(f, "stage {nth}"),
            Action::Compute(work) => write!(f, "{work:?}"),
            Action::Agree => f.write_str("Agree!"),
            Action::Admit => f.write_str("Admit!"),
        }
    }
}

/// The steps in one line: `/` stands before the first step of `finish`, brackets hold a relay's
/// steps, `!` marks a step that may cut.
impl fmt::Display for CallProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut relay = false;
        for (index, step) in self.steps.iter().enumerate() {
            let relays = step.role == Role::Relay;
            if std::mem::replace(&mut relay, relays) && !relays {
                f.write_str(" ]")?;
            }
            f.write_str(if index > 0 { " " } else { "" })?;
            if index == self.half() && index > 0 {
                f.write_str("/ ")?;
            }
            if relays && (index == 0 || self.steps[index - 1].role == Role::Own) {
                f.write_str("[ ")?;
            }
            write!(f, "{}", step.action)?;
        }
        f.write_str(if relay { " ]" } else { "" })
    }
}
