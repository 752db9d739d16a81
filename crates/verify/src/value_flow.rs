//! Flow of values between the steps of a call: a program is well formed if every step finds those
//! it needs.
//!
//! `prove` orders accesses to windows between ranks. Within a rank a step also needs values that
//! lie in no window: an agreement, a layout, operands. Here each step names the values that it
//! needs and gives, and each kind of call names those that it owes its caller. A program without
//! one of them is named before anything is unrolled.

use std::fmt;

use sidelane_core::schedule::call_program::{Action, CallProgram, CallStep, Part, Role, StageId, Work};

/// A value that one step of a rank gives to later ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Value {
    /// The choices are where they are sorted.
    Brought,
    /// The caller's stream has reached the call.
    Reached,
    /// The stream of copies goes on behind what the caller's has packed.
    Followed,
    /// Memory that nothing reads any more is free.
    Reclaimed,
    /// The heaps are as large as the call needs, or as they may be.
    Room,
    /// Streams of local peers await that this rank's has reached the call.
    Ready,
    /// The next work of this rank's stream waits until those of its local peers have reached the
    /// call.
    PeersReady,
    /// All that local peers move here is enqueued.
    Posted,
    /// The choices of this rank, sorted into bins.
    Choices,
    /// The tag of this rank's entry.
    Tag,
    /// This rank has entered.
    Entered,
    /// The tags of all ranks can be read.
    AllTags,
    /// All ranks found that the call goes on.
    Verdict,
    /// Sizes of what all ranks receive.
    Sizes,
    /// Where rows of this rank land.
    Landings,
    /// Operands of the stage that moves rows; of a round, those of all its stages.
    Operands,
    /// Rows lie where the stage reads them, but for those whose order is not known yet.
    Packed,
    /// The order of rows is on the device, and those that had to wait for it are packed.
    Ordered,
    /// The tables that kernels read beside the rows are on their way to the device.
    Tables,
    /// Own rows can be placed: their runs are on the device.
    OwnRuns,
    /// The call can no longer be refused; a waiting caller knows.
    Irrevocable,
    /// This rank's rows are out.
    Sent,
    /// Rows have landed here.
    Landed,
    /// Operands of the stage that brings in what landed elsewhere.
    BringInOperands,
    /// Rows that landed elsewhere are here.
    BroughtIn,
    /// Rows that relays return have landed here.
    Returned,
    /// Rows to sum lie in memory of this rank, behind each other.
    Pulled,
    /// The caller's stream goes on behind the call.
    Joined,
    /// Rows are in visible order.
    Regrouped,
    /// The sums of this rank's tokens are complete.
    Summed,
    /// The result of the call is in place: a handle, a chunk in the pool, an expert map.
    Settled,
    /// Metadata was read.
    Metadata,
    /// An offloaded relay is at work.
    RelayStarted,
    /// An offloaded relay has finished.
    RelayBack,
    /// The message to other nodes.
    Message,
    /// Other nodes have it.
    MessageSent,
    /// The rank knows that its relay has heard all nodes.
    Answered,
    /// Headers, or offers, of sources.
    Headers,
    /// Blocks of sources, as headers describe them.
    Blocks,
    /// Where the memory of this node's ranks begins.
    Bases,
    /// The tables of sums by node are on the device.
    SumTables,
    /// All that is relayed has moved.
    Relayed,
    /// The rank knows that its relay has finished.
    Done,
    /// Collective: this stage of the round is over.
    Stage(u8),
    /// Collective: the round's result for the caller is known.
    Due,
    /// Collective: the caller has the round's result.
    Copied,
}

/// A step, or the caller, misses a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingValue {
    /// The step; `None` where the call ends without a value that it owes.
    pub step: Option<CallStep>,
    /// The value.
    pub value: Value,
}

impl fmt::Display for MissingValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.step {
            Some(step) => write!(f, "{} comes before {:?}", step.action, self.value),
            None => write!(f, "the call ends without {:?}", self.value),
        }
    }
}

/// Checks each straight line of a program: every step finds the values that it needs. The call ends
/// with all values of `whole`, a well-formed program of the same call, and a call that is cut with
/// those that its tail owes.
///
/// # Errors
/// The first step that misses a value.
pub fn check(program: &CallProgram, whole: &CallProgram) -> Result<(), MissingValue> {
    check_line((program.steps(), whole.steps()), 0)?;
    for cut in whole.cuts() {
        // A program that never looks there is not cut there.
        let Some(same) = program.cut_at(whole.steps()[usize::from(cut.at)].action) else { continue };
        let (line, like): (Vec<_>, Vec<_>) =
            (program.line(Some(same)).collect(), whole.line(Some(cut)).collect());
        check_line((&line, &like), like.len() - cut.tail.len())?;
    }
    Ok(())
}

/// Checks a line like `whole`, whose steps from the one of this number on give the values that the
/// line owes.
fn check_line((line, whole): (&[CallStep], &[CallStep]), owes: usize) -> Result<(), MissingValue> {
    let given = flow(line, whole)?;
    let mut owed = flow(whole, whole)?;
    owed.retain(|value| whole[owes..].iter().any(|step| given_by(whole, step).contains(value)));
    match owed.into_iter().find(|value| !given.contains(value)) {
        Some((_, value)) => Err(MissingValue { step: None, value }),
        None => Ok(()),
    }
}

/// All values that are given, if each is there when a step needs it. A value that no step of
/// `whole` gives comes from outside: a handle has a layout, and the verdict of an inlined relay
/// is its rank's.
fn flow(line: &[CallStep], whole: &[CallStep]) -> Result<Vec<(Role, Value)>, MissingValue> {
    let gives = |value: &(Role, Value)| whole.iter().any(|step| given_by(whole, step).contains(value));
    let mut given = Vec::new();
    for &step in line {
        for need in needs(&step) {
            let need = match (need, gives(&need)) {
                (_, true) => need,
                ((Role::Relay, Value::Verdict), _) if gives(&(Role::Own, Value::Verdict)) => {
                    (Role::Own, Value::Verdict)
                }
                _ => continue,
            };
            if !given.contains(&need) {
                return Err(MissingValue { step: Some(step), value: need.1 });
            }
        }
        let due = given.contains(&(step.role, Value::Due));
        // Copies of an earlier round's result say nothing of this round.
        given.extend(given_by(whole, &step).into_iter().filter(|(_, value)| due || *value != Value::Copied));
    }
    Ok(given)
}

/// Values that a step of a line gives. The last cut of each role gives the verdict.
fn given_by(line: &[CallStep], step: &CallStep) -> Vec<(Role, Value)> {
    let mut cuts = line.iter().rev().filter(|other| matches!(other.action, Action::Agree | Action::Admit));
    let verdict = cuts.find(|other| other.role == step.role) == Some(step);
    let values = if verdict { vec![Value::Verdict] } else { gives(step.action) };
    values.into_iter().map(|value| (step.role, value)).collect()
}

fn gives(action: Action) -> Vec<Value> {
    use Value::*;
    let values: &[Value] = match action {
        // The first stage of a round is its entry.
        Action::Round(0) => &[AllTags, Stage(0)],
        Action::Round(nth) => &[Stage(nth)],
        Action::Run(StageId::Entry | StageId::Offer, Part::Start) => &[Entered],
        Action::Run(StageId::Entry | StageId::Offer, _) | Action::Run(StageId::AllEntered, _) => &[AllTags],
        Action::Run(StageId::Rows | StageId::Returned, Part::Start) => &[Sent],
        Action::Run(StageId::Rows | StageId::Regroup, _) => &[Landed],
        Action::Run(StageId::Posted, _) => &[Posted],
        Action::Run(StageId::Ready, Part::Start) => &[Ready],
        Action::Run(StageId::Ready, _) => &[PeersReady],
        Action::Run(StageId::BringIn, _) => &[BroughtIn],
        Action::Run(StageId::Returned, _) => &[Returned],
        Action::Run(StageId::Reached, Part::Finish) => &[Reached],
        Action::Run(StageId::PullRest, _) => &[Pulled],
        Action::Run(StageId::Sum, _) => &[Summed],
        Action::Run(StageId::CountsSent, _) => &[MessageSent],
        Action::Run(StageId::Agreed, _) => &[Answered],
        Action::Run(StageId::Headers, _) => &[Headers],
        Action::Run(StageId::RelayRows | StageId::ReturnRows, _) => &[Relayed],
        Action::Run(StageId::RelayDone, _) => &[Done],
        Action::Compute(work) => match work {
            Work::Bring => &[Brought],
            Work::Follow => &[Followed],
            Work::Reclaim => &[Reclaimed],
            Work::Grow => &[Room],
            Work::Join => &[Joined],
            Work::Regroup => &[Regrouped],
            Work::Sort => &[Choices],
            Work::Announce | Work::Take | Work::Offer | Work::Propose => &[Tag],
            Work::StartRelay => &[RelayStarted],
            Work::JoinRelay => &[RelayBack],
            Work::Judge => &[Sizes],
            Work::Place | Work::Landings => &[Landings],
            Work::Bases => &[Bases],
            Work::TellAgreed => &[Irrevocable],
            Work::FillRows | Work::FillSum | Work::FillPull | Work::FillRelay | Work::FillReturn => {
                &[Operands]
            }
            Work::SendTables => &[Tables],
            Work::PlaceOwn => &[OwnRuns],
            Work::FillBringIn => &[BringInOperands],
            Work::Report | Work::Retire | Work::Adopt | Work::Check => &[Settled],
            Work::Pack | Work::Partials => &[Packed],
            Work::PackPlaced => &[Ordered],
            Work::Sum => &[Summed],
            Work::Metadata => &[Metadata],
            Work::Compose => &[Message],
            Work::Learn => &[Blocks],
            Work::SendNodeSums => &[SumTables],
            Work::SortAll => &[Choices, Sizes],
            Work::PlaceAll => &[Landings, Operands],
            Work::FillRound => &[Operands],
            Work::EndRound => &[Due],
            Work::CopyOut => &[Copied],
            _ => &[],
        },
        _ => &[],
    };
    values.to_vec()
}

fn needs(step: &CallStep) -> Vec<(Role, Value)> {
    use Value::*;
    let values: &[Value] = match step.action {
        Action::Round(0) => &[Operands],
        Action::Round(nth) => &[Verdict, Operands, Stage(nth - 1)],
        Action::Run(StageId::Entry | StageId::Offer, Part::Start) => &[Tag, Reached, Ready],
        Action::Run(StageId::Reached, Part::Start) => &[Brought],
        Action::Run(StageId::Entry | StageId::Offer, _) => &[Entered, RelayStarted],
        Action::Run(StageId::Rows, Part::Start) => &[Verdict, Operands, Packed, Ordered, Followed, OwnRuns],
        Action::Run(StageId::Ready, Part::Start) => &[Followed],
        Action::Run(StageId::Posted, _) => &[Sent],
        Action::Run(StageId::Rows, _) => &[Sent, Posted],
        Action::Run(StageId::Ready, Part::Finish) => &[Verdict],
        Action::Run(StageId::Returned, Part::Start) => &[Packed],
        Action::Run(StageId::Returned, Part::Finish) => &[Sent],
        Action::Run(StageId::BringIn, _) => &[BringInOperands],
        Action::Run(StageId::Returned, _) => &[Verdict],
        Action::Run(StageId::Sum | StageId::PullRest, _) => &[Verdict, Operands, Returned],
        Action::Run(StageId::Pull, _) => &[Verdict, Operands, PeersReady, Followed],
        Action::Run(StageId::Regroup, _) => &[Verdict, Operands],
        Action::Run(StageId::CountsSent, _) => &[Message],
        Action::Run(StageId::Agreed, _) => &[AllTags],
        Action::Run(StageId::Headers, _) => &[Verdict],
        Action::Run(StageId::RelayRows | StageId::ReturnRows, _) => &[Verdict, Operands, SumTables],
        Action::Run(StageId::RelayDone, _) => &[Relayed],
        Action::Agree => &[AllTags],
        Action::Admit => &[Sizes, Room],
        Action::Compute(work) => match work {
            Work::Sort => &[Reached],
            Work::Follow => &[Packed, Ordered],
            Work::Announce | Work::Take | Work::Partials => &[Reclaimed],
            Work::Grow => &[AllTags, Sizes],
            Work::PackPlaced | Work::PlaceOwn => &[Landings],
            // Weights for sums by node may overwrite those that tell the caller which choices were
            // dropped.
            Work::SendTables => &[Landings, Operands],
            Work::Join => &[Followed, Tables, Landed, BroughtIn, Pulled],
            Work::Regroup => &[Joined],
            Work::Publish => &[Choices],
            Work::StartRelay => &[Entered],
            Work::JoinRelay => &[RelayStarted],
            Work::Judge => &[AllTags],
            Work::Place => &[Choices, Sizes, Verdict],
            Work::Describe => &[Landings],
            Work::TellAgreed => &[Verdict],
            Work::Adopt => &[Verdict, RelayBack],
            Work::Landings => &[Verdict, Room],
            Work::Bases => &[AllTags],
            Work::FillRows => &[Landings],
            Work::FillSum | Work::FillPull => &[Bases],
            Work::FillBringIn => &[Landed],
            Work::Report => &[Landed, BroughtIn, RelayBack],
            Work::Metadata => &[Landed, BroughtIn, Joined],
            Work::Check => &[Landed],
            Work::Sum => &[Returned, Pulled, Joined],
            Work::Retire => &[Summed, Pulled, RelayBack],
            Work::Learn => &[Headers],
            Work::FillRelay => &[Blocks, Bases, Headers],
            Work::FillReturn => &[Headers, Bases],
            Work::SendNodeSums => &[Operands],
            Work::PlaceAll => &[Choices, Sizes, Verdict],
            Work::EndRound | Work::CopyOut => &[Verdict],
            _ => &[],
        },
        _ => &[],
    };
    values.iter().map(|&value| (step.role, value)).collect()
}
