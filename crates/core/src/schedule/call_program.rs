//! The call as data: the stages that a rank runs, its work between them, and the points where a
//! call may end early.
//!
//! ```text
//!   dispatch   sort  release  publish  announce  entry..  /  ..entry  AGREE  judge  ADMIT  place  describe  fill
//!              rows  report  metadata
//!   cached     release  take  entry..  /  ..entry  AGREE  landings  fill  rows
//!   return     release  offer  entry..  /  ..entry  AGREE  bases  returned  fill  sum  retire
//!   remap      release  propose  entry  AGREE  adopt
//!   round      fill  entry  AGREE  /  copy out  further stages  end  copy out                  of a collective
//!   enqueued   dispatch   bring  reached..  pack  /  ..reached  sort  release  reclaim ..  judge  grow  ADMIT ..
//!                         pack placed  follow  fill  send tables  place own  rows..  posted  ..rows  join  report ..
//!              cached     pack  follow  reclaim  /  take  entry ..  grow  AGREE ..  rows..  posted  ..rows  join
//!              return     reclaim  partials  follow  ready..  /  offer ..  ..ready  pull  returned  pull rest  join
//!                         sum
//!   slots      pack  rows..  /  ..rows  check     partials  returned..  /  ..returned  sum     returned (a release)
//!   relay      node entered  compose  counts sent  all entered  AGREE  judge  ADMIT  agreed
//!              headers  learn  fill  relay rows, or return rows  relay done
//! ```
//!
//! A [`CallProgram`] is a straight line of [`CallStep`]s, which a [`CallMachine`] steps through.
//! The driver of all executors is a loop over that machine. So are the lines that the proof and the
//! time model walk ([`CallProgram::line`]). The proof therefore also covers *when* planners touch
//! memory.
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

use std::fmt;

use super::call_properties::{CallProperties, Class};
pub use super::call_tags::Agreement;
pub use super::op::Part;
use super::skeleton::RelaySums;
pub use super::skeleton::{StageId, StageOperands, StageTensor, Stages};
pub use super::work::Work;
use crate::error::CallKind;
use crate::topology::Paths;

use Action::{Admit, Agree, Compute, Run};
use Part::{Finish, Start, Whole};

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

impl CallStep {
    fn own(action: Action) -> Self {
        CallStep { role: Role::Own, action }
    }

    fn relay(action: Action) -> Self {
        CallStep { role: Role::Relay, action }
    }
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

    /// One of the straight lines that this program is: the steps of a machine that nothing refuses,
    /// or that the step of a cut refuses.
    pub fn line<'p>(&'p self, cut: Option<&'p Cut>) -> impl Iterator<Item = CallStep> + 'p {
        let (mut machine, refuses) = (CallMachine::default(), cut.map(|cut| cut.at));
        std::iter::from_fn(move || {
            let step = machine.next(self)?;
            match machine.cut.is_none() && refuses == Some(machine.at) {
                true => machine.refused(self),
                false => machine.done(),
            }
            Some(step)
        })
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

/// Where the relay of a rank runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relays {
    /// In the caller's thread, at the places that the launch order gives.
    Inline,
    /// In a thread of its own.
    Thread,
}

impl Relays {
    /// Both.
    pub const ALL: [Relays; 2] = [Relays::Inline, Relays::Thread];
}

/// Properties of an instance that its programs depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallShape {
    /// There are other nodes: ranks have relays.
    pub multi_node: bool,
    /// Where relays run.
    pub relays: Relays,
    /// Stages that copy engines need, where they move rows.
    pub engines: Engines,
    /// Relays sum what they return by kernels, which read tables.
    pub node_sums: bool,
}

/// Stages of their own that copy engines need. On the host there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Engines {
    /// Return: they pull rows to where a kernel sums them, since they cannot add.
    pub pulls: bool,
    /// Dispatch: they bring in what crossed, which landed elsewhere.
    pub brings_in: bool,
    /// The caller's thread enqueues, and may run ahead of its stream. A dispatch waits until that
    /// has [reached](StageId::Reached) it, since it needs the choices. So does a return where
    /// relays write to this rank's memory. Elsewhere streams signal each other that they are
    /// [`Ready`](StageId::Ready).
    pub enqueues: bool,
}

impl CallShape {
    /// Dispatch and `prepare`: counts first, then rows.
    pub fn dispatch(&self) -> CallProgram {
        let own = [
            Compute(Work::Bring),
            Run(StageId::Reached, Start),
            Compute(Work::Pack),
            Run(StageId::Reached, Finish),
            Compute(Work::Sort),
            Run(StageId::Release, Whole),
            Compute(Work::Reclaim),
            Compute(Work::Publish),
            Compute(Work::Announce),
            Run(StageId::Entry, Start),
            Compute(Work::StartRelay),
            Run(StageId::Entry, Finish),
            Agree,
            Compute(Work::Judge),
            Compute(Work::Grow),
            Admit,
            Compute(Work::Place),
            Compute(Work::Describe),
            Compute(Work::TellAgreed),
            Compute(Work::PackPlaced),
            Compute(Work::Follow),
            Compute(Work::FillRows),
            Compute(Work::SendTables),
            Compute(Work::PlaceOwn),
            Run(StageId::Rows, Start),
            Run(StageId::Posted, Whole),
            Run(StageId::Rows, Finish),
            Compute(Work::FillBringIn),
            Run(StageId::BringIn, Whole),
            Compute(Work::JoinRelay),
            Compute(Work::Join),
            Compute(Work::Report),
            Compute(Work::Metadata),
            Compute(Work::Regroup),
        ];
        let cut = [Work::Follow, Work::SendTables, Work::Join].map(Compute);
        let own = self.own(&own, &cut);
        self.with_relay(own, Class::Dispatch, (Run(StageId::Entry, Finish), Some(self.moves())))
    }

    /// Dispatch along a known layout, and the gradient of combine.
    pub fn cached(&self) -> CallProgram {
        let mut own = vec![Compute(Work::Pack)];
        // A host that runs ahead allocates memory without readers. Over the net it lists arrivals
        // in separate memory, which earlier calls may still read.
        own.extend(self.heard(&[Compute(Work::Follow)]));
        own.extend([
            Compute(Work::Reclaim),
            Compute(Work::Take),
            Run(StageId::Entry, Start),
            Compute(Work::StartRelay),
            Run(StageId::Entry, Finish),
            Compute(Work::Grow),
            Agree,
            Compute(Work::TellAgreed),
            Compute(Work::Landings),
            Compute(Work::FillRows),
            Run(StageId::Rows, Start),
            Run(StageId::Posted, Whole),
            Run(StageId::Rows, Finish),
            Compute(Work::FillBringIn),
            Run(StageId::BringIn, Whole),
            Compute(Work::JoinRelay),
            Compute(Work::Join),
            Compute(Work::Regroup),
        ]);
        let own = self.own(&own, &[Compute(Work::Join)]);
        self.with_relay(own, Class::Cached, (Run(StageId::Entry, Finish), Some(self.moves())))
    }

    /// The step of a dispatch before which a relay passes rows on.
    fn moves(&self) -> Action {
        if self.engines.enqueues { Run(StageId::Posted, Whole) } else { Run(StageId::Rows, Finish) }
    }

    /// Combine, the gradient of dispatch, and the return of weight gradients.
    pub fn ret(&self) -> CallProgram {
        let mut own = vec![Compute(Work::Reclaim), Compute(Work::Partials)];
        // A host that runs ahead frees nothing in a return, and its readers are ready when they
        // have read.
        own.extend(self.heard(&[Compute(Work::Follow), Run(StageId::Ready, Start)]));
        // Over the net it has heard of all readers by now.
        own.extend(self.multi_node.then_some(Compute(Work::Reclaim)));
        own.extend([
            Compute(Work::Offer),
            Run(StageId::Offer, Start),
            Compute(Work::StartRelay),
            Run(StageId::Offer, Finish),
            Agree,
            Compute(Work::TellAgreed),
            Compute(Work::Bases),
        ]);
        let (returned, join) = (Run(StageId::Returned, Whole), Compute(Work::JoinRelay));
        own.extend(match self.engines.pulls {
            // The host reads rows where they lie, when all that relays return has landed.
            false => [returned, join, Compute(Work::FillSum), Run(StageId::Sum, Whole)].to_vec(),
            // Engines pull from local peers while relays return the rest.
            true => vec![
                Run(StageId::Ready, Finish),
                Compute(Work::FillPull),
                Run(StageId::Pull, Whole),
                returned,
                join,
                Run(StageId::PullRest, Whole),
                Compute(Work::Join),
                Compute(Work::Sum),
            ],
        });
        own.push(Compute(Work::Retire));
        let own = self.own(&own, &[Compute(Work::Join), Compute(Work::Sum)]);
        let first = if self.engines.pulls { StageId::Pull } else { StageId::Returned };
        self.with_relay(own, Class::Return, (Run(StageId::Offer, Finish), Some(Run(first, Whole))))
    }

    /// A new expert map: ranks agree, and nothing moves.
    pub fn remap(&self) -> CallProgram {
        let own = [
            Run(StageId::Reached, Start),
            Run(StageId::Reached, Finish),
            Run(StageId::Release, Whole),
            Compute(Work::Reclaim),
            Compute(Work::Propose),
            Run(StageId::Entry, Start),
            Compute(Work::StartRelay),
            Run(StageId::Entry, Finish),
            Agree,
            Compute(Work::JoinRelay),
            Compute(Work::Adopt),
            Compute(Work::Join),
        ];
        let own = self.own(&own, &[Compute(Work::Join)]);
        self.with_relay(own, Class::Remap, (Run(StageId::Entry, Finish), None))
    }

    /// Steps behind a dispatch by all-gather, at each rank alone: the layout of an exchange, and
    /// rows at their places.
    pub fn regroup(&self) -> CallProgram {
        let own = [
            Compute(Work::SortAll),
            Admit,
            Compute(Work::PlaceAll),
            Run(StageId::Regroup, Whole),
            Compute(Work::Metadata),
        ];
        program(own.map(CallStep::own).into(), 0, &[])
    }

    /// The program of an offloaded relay in calls of this class.
    fn relay(&self, class: Class) -> CallProgram {
        let fill_rows = [Compute(Work::FillRelay), Run(StageId::RelayRows, Whole)];
        match class {
            Class::Dispatch => {
                let [fill, rows] = fill_rows;
                relay(&[Compute(Work::Judge), Admit], &[Compute(Work::Learn), fill, rows])
            }
            Class::Cached => relay(&[], &fill_rows),
            Class::Return => {
                let (fill, rows) = (Compute(Work::FillReturn), Run(StageId::ReturnRows, Whole));
                match self.node_sums {
                    true => relay(&[], &[fill, Compute(Work::SendNodeSums), rows]),
                    false => relay(&[], &[fill, rows]),
                }
            }
            Class::Remap => relay(&[], &[]),
        }
    }

    /// A round of a collective with this number of stages. The caller's part of a round may be
    /// copied out only when the next round has been entered.
    pub fn round(stages: u8, ends_in_the_next: bool) -> CallProgram {
        let mut actions = vec![Compute(Work::FillRound), Action::Round(0), Agree];
        let half = actions.len();
        actions.push(Compute(Work::CopyOut));
        actions.extend((1..stages).map(Action::Round));
        actions.push(Compute(Work::EndRound));
        if !ends_in_the_next {
            actions.push(Compute(Work::CopyOut));
        }
        program(actions.into_iter().map(CallStep::own).collect(), half, &[])
    }

    /// Steps `between` a stream's word that it has reached the call and the host's wait for it;
    /// then the release. A host that runs ahead on one node neither waits nor releases.
    fn heard(&self, between: &[Action]) -> Vec<Action> {
        let waits = |action| self.multi_node.then_some(action);
        let releases = self.multi_node || !self.engines.enqueues;
        let begin = waits(Run(StageId::Reached, Start)).into_iter().chain(between.iter().copied());
        let end = waits(Run(StageId::Reached, Finish)).into_iter();
        begin.chain(end).chain(releases.then_some(Run(StageId::Release, Whole))).collect()
    }

    /// Own steps: the second half begins behind the last thing that needs no other rank. A host
    /// that runs ahead goes through those of `cut` where the call is refused.
    fn own(&self, actions: &[Action], cut: &[Action]) -> CallProgram {
        let Engines { pulls, brings_in, enqueues } = self.engines;
        let offloaded = self.multi_node && self.relays == Relays::Thread;
        let wanted = |action: &&Action| match action {
            Compute(Work::StartRelay | Work::JoinRelay) => offloaded,
            Compute(Work::FillBringIn | Work::Regroup) | Run(StageId::BringIn, _) => brings_in,
            Compute(Work::Bring | Work::Pack | Work::PackPlaced | Work::Partials) => enqueues,
            Compute(Work::Follow | Work::SendTables | Work::PlaceOwn | Work::Join) => enqueues,
            Compute(Work::Reclaim | Work::Grow) | Run(StageId::Reached | StageId::Posted, _) => enqueues,
            Run(StageId::Ready, _) => enqueues && !self.multi_node,
            Compute(Work::Sum) => pulls,
            _ => true,
        };
        let steps: Vec<_> = actions.iter().filter(wanted).copied().map(CallStep::own).collect();
        let ends_start = |step: &CallStep| match step.action {
            // The stream is still on its way to the call: the work of the caller's thread begins
            // with the second half.
            Compute(Work::Reclaim | Work::Follow) | Run(StageId::Ready | StageId::Reached, Start) => false,
            Compute(work) if enqueues => !work.is_of_stream(),
            action => enqueues || matches!(action, Run(_, Finish)),
        };
        let half = steps.iter().position(ends_start).unwrap_or(0);
        let tail: Vec<_> = match (enqueues, offloaded) {
            (true, _) => cut.iter().filter(wanted).copied().map(CallStep::own).collect(),
            (false, true) => vec![CallStep::own(Compute(Work::JoinRelay))],
            (false, false) => Vec::new(),
        };
        program(steps, half, &tail)
    }

    /// With the steps of an inlined relay, at these places of the rank's own.
    fn with_relay(&self, own: CallProgram, class: Class, places: (Action, Option<Action>)) -> CallProgram {
        match (self.multi_node, self.relays) {
            (true, Relays::Inline) => own.weave(self.relay(class), places),
            _ => own,
        }
    }
}

/// Calls in fixed slots, without counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotCall {
    /// Packed slots to their ranks.
    Dispatch,
    /// Partial rows return.
    Combine,
    /// Replaces a combine: nothing returns.
    Release,
    /// Replaces a combine or a release at a rank that refuses it: a mark goes to each peer, and no
    /// rows.
    Refusal,
}

impl SlotCall {
    /// All of them.
    pub const ALL: [SlotCall; 4] =
        [SlotCall::Dispatch, SlotCall::Combine, SlotCall::Release, SlotCall::Refusal];

    /// The steps. All operands are constants, so there is nothing to fill and nothing to agree on.
    pub fn program(self) -> CallProgram {
        let own: &[Action] = match self {
            SlotCall::Dispatch => &[
                Compute(Work::Pack),
                Run(StageId::Rows, Start),
                Run(StageId::Rows, Finish),
                Compute(Work::Check),
            ],
            SlotCall::Combine => &[
                Compute(Work::Partials),
                Run(StageId::Returned, Start),
                Run(StageId::Returned, Finish),
                Compute(Work::Sum),
            ],
            SlotCall::Release => &[Run(StageId::Returned, Whole)],
            SlotCall::Refusal => {
                &[Compute(Work::Partials), Run(StageId::Returned, Start), Run(StageId::Returned, Finish)]
            }
        };
        let half = own.iter().position(|action| matches!(action, Run(_, Finish)));
        program(own.iter().copied().map(CallStep::own).collect(), half.unwrap_or(0), &[])
    }

    /// The kind of call that it is to callers.
    pub fn kind(self) -> CallKind {
        if self == SlotCall::Dispatch { CallKind::Dispatch } else { CallKind::Combine }
    }
}

/// The programs of one rank, or of its relay, by kind of call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallPrograms {
    all: [CallProgram; 4],
}

impl CallPrograms {
    /// A rank's own.
    pub fn own(shape: CallShape) -> Self {
        CallPrograms { all: [shape.dispatch(), shape.cached(), shape.ret(), shape.remap()] }
    }

    /// Those of its relay, where that is not woven in.
    pub fn relay(shape: CallShape) -> Self {
        CallPrograms { all: Class::ALL.map(|class| shape.relay(class)) }
    }

    /// The program of calls of this kind.
    pub fn of(&self, kind: CallKind) -> &CallProgram {
        &self.all[CallProperties::of(kind).class as usize]
    }
}

/// All that one rank runs: its stages, and the programs that order them. It never changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankPrograms {
    /// The rank's stages and its relay's.
    pub stages: Stages,
    /// Programs of an offloaded relay.
    pub relay: CallPrograms,
    /// The rank's own program, with the one that it relays.
    inline: CallPrograms,
    /// The rank's own, without.
    offloaded: CallPrograms,
    /// Steps behind a dispatch by all-gather.
    pub regroup: CallProgram,
    /// There are relays.
    pub multi_node: bool,
}

impl RankPrograms {
    /// Of the rank of these paths. Blocks come in `chunks` parts; relays sum what they return if
    /// `sums`.
    pub fn new(paths: Paths<'_>, chunks: u8, sums: bool, engines: Engines) -> Self {
        let relay_sums = match (sums, engines.pulls) {
            (false, _) => RelaySums::None,
            (true, false) => RelaySums::InPlace,
            (true, true) => RelaySums::Pulled,
        };
        let (multi_node, node_sums) = (paths.is_multi_node(), relay_sums == RelaySums::Pulled);
        let shape = |relays| CallShape { multi_node, relays, engines, node_sums };
        RankPrograms {
            stages: Stages::new(paths, chunks, relay_sums),
            relay: CallPrograms::relay(shape(Relays::Thread)),
            inline: CallPrograms::own(shape(Relays::Inline)),
            offloaded: CallPrograms::own(shape(Relays::Thread)),
            regroup: shape(Relays::Inline).regroup(),
            multi_node,
        }
    }

    /// Replaces the rank's own program for calls of this kind, with its relay program.
    pub fn replace(&mut self, kind: CallKind, program: CallProgram) {
        self.inline.all[CallProperties::of(kind).class as usize] = program;
    }

    /// The rank's own program for calls of this kind.
    pub fn own(&self, kind: CallKind, relays: Relays) -> &CallProgram {
        match relays {
            Relays::Inline => self.inline.of(kind),
            Relays::Thread => self.offloaded.of(kind),
        }
    }
}

/// The steps of a relay: it hears all nodes, comes to the verdict of its own rank by itself, then
/// `moves`.
fn relay(judge: &[Action], moves: &[Action]) -> CallProgram {
    let mut actions = vec![
        Run(StageId::NodeEntered, Whole),
        Compute(Work::Compose),
        Run(StageId::CountsSent, Whole),
        Run(StageId::AllEntered, Whole),
        Agree,
        Compute(Work::Bases),
    ];
    actions.extend(judge);
    actions.push(Run(StageId::Agreed, Whole));
    let half = actions.len();
    if !moves.is_empty() {
        actions.push(Run(StageId::Headers, Whole));
        actions.extend(moves);
        actions.push(Run(StageId::RelayDone, Whole));
    }
    // A refused call ends here, too: the rank hears that its relay has heard all nodes.
    let agreed = CallStep::relay(Run(StageId::Agreed, Whole));
    program(actions.into_iter().map(CallStep::relay).collect(), half, &[agreed])
}

/// A program whose cuts leave the steps of `tail`.
fn program(steps: Vec<CallStep>, half: usize, tail: &[CallStep]) -> CallProgram {
    let cuts = |&at: &usize| matches!(steps[at].action, Agree | Admit);
    let cuts = (0..steps.len()).filter(cuts).map(|at| Cut { at: at as u16, tail: tail.into() });
    CallProgram { cuts: cuts.collect(), half: half as u16, steps: steps.into() }
}

impl CallProgram {
    /// Puts the steps of a relay between this rank's own signals and its own waits, for one thread
    /// that plays both.
    ///
    /// Inline extends the launch order of a stage (own puts and signals, relayed operations, own
    /// waits) to the whole call. The first half of the relay goes before the step that `hears`
    /// other ranks, the second before the one that `moves` rows here. Without such a step the call
    /// moves nothing, and the relay has no second half. The relay's agreement step is left out: the
    /// rank's own follows right behind the counts that the relay received.
    pub fn weave(&self, relay: CallProgram, (hears, moves): (Action, Option<Action>)) -> CallProgram {
        let heard_alone = |step: &&CallStep| !matches!(step.action, Agree | Admit | Compute(Work::Judge));
        let (heard, moved) = relay.steps.split_at(relay.half());
        let at = |action| self.steps.iter().position(|step| step.action == action);
        let end = self.steps.len();
        let (first, second) = (at(hears).unwrap_or(end), moves.and_then(at).unwrap_or(end));
        let heard: Vec<_> = heard.iter().filter(heard_alone).copied().collect();
        let steps = [&self.steps[..first], &heard, &self.steps[first..second], moved, &self.steps[second..]];
        program(steps.concat(), self.half(), self.cuts.first().map_or(&[], |cut| &cut.tail))
    }
}

/// Position of one rank in one call.
///
/// A pending call is a machine that stopped at the half of its program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallMachine {
    at: u16,
    /// Position in [`CallProgram::cuts`] of the cut that was taken.
    cut: Option<u16>,
}

impl CallMachine {
    /// The step to perform now; `None` when the call is over.
    pub fn next(&self, program: &CallProgram) -> Option<CallStep> {
        let steps = match self.cut {
            None => &program.steps,
            Some(cut) => &program.cuts.get(usize::from(cut))?.tail,
        };
        steps.get(usize::from(self.at)).copied()
    }

    /// The step was performed.
    pub fn done(&mut self) {
        self.at += 1;
    }

    /// The step found that the call is refused: what remains is the tail of its cut.
    pub fn refused(&mut self, program: &CallProgram) {
        let cut = program.cuts.iter().position(|cut| self.cut.is_none() && cut.at == self.at);
        // A step that is not a cut ends the call.
        *self = CallMachine { at: 0, cut: Some(cut.map_or(u16::MAX, |cut| cut as u16)) };
    }

    /// Whether the next step is the first of `finish`.
    pub fn at_half(&self, program: &CallProgram) -> bool {
        self.cut.is_none() && self.at == program.half
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    mod programs {
        use super::*;

        const INLINE: CallShape = CallShape {
            multi_node: true,
            relays: Relays::Inline,
            engines: Engines { pulls: false, brings_in: false, enqueues: false },
            node_sums: false,
        };

        #[test]
        fn programs_read_as_the_module_says() {
            let alone = CallShape { multi_node: false, ..INLINE };
            assert_eq!(
                alone.dispatch().to_string(),
                "Sort release Publish Announce entry.. / ..entry Agree! Judge Admit! Place Describe TellAgreed FillRows \
             rows.. ..rows Report Metadata"
            );
            assert_eq!(
                INLINE.ret().to_string(),
                "release Offer offer.. / [ node entered Compose counts sent all entered Bases agreed ] ..offer Agree! \
             TellAgreed Bases [ headers FillReturn return rows relay done ] returned FillSum sum Retire"
            );
            let engines = Engines { pulls: true, enqueues: true, ..Engines::default() };
            let enqueued = CallShape { multi_node: false, engines, ..INLINE };
            assert_eq!(
                enqueued.dispatch().to_string(),
                "Bring reached.. Pack / ..reached Sort release Reclaim Publish Announce entry.. ..entry Agree! Judge Grow \
             Admit! Place Describe TellAgreed PackPlaced Follow FillRows SendTables PlaceOwn rows.. posted \
             ..rows Join Report Metadata"
            );
            assert_eq!(
                enqueued.ret().to_string(),
                "Reclaim Partials Follow ready.. / Offer offer.. ..offer Agree! TellAgreed Bases ..ready FillPull pull returned \
             pull rest Join Sum Retire"
            );
            assert_eq!(
                enqueued.cached().to_string(),
                "Pack Follow Reclaim / Take entry.. ..entry Grow Agree! TellAgreed Landings FillRows rows.. posted ..rows Join"
            );
            assert_eq!(
                CallShape { engines, ..INLINE }.cached().to_string(),
                "Pack reached.. Follow / ..reached release Reclaim Take entry.. [ node entered Compose counts sent all entered \
             Bases agreed ] ..entry Grow Agree! TellAgreed Landings FillRows rows.. [ headers FillRelay relay rows relay done ] \
             posted ..rows Join"
            );
            let relaying =
                CallShape { engines: Engines { brings_in: true, ..engines }, node_sums: true, ..INLINE };
            assert_eq!(
                relaying.ret().to_string(),
                "Reclaim Partials reached.. Follow / ..reached release Reclaim Offer offer.. [ node entered Compose \
             counts sent all entered Bases agreed ] ..offer Agree! TellAgreed Bases FillPull [ headers FillReturn \
             SendNodeSums return rows relay done ] pull returned pull rest Join Sum Retire"
            );
            let last =
                |program: &CallProgram| program.to_string().split_once("..rows ").unwrap().1.to_owned();
            assert_eq!(last(&relaying.dispatch()), "FillBringIn bring in Join Report Metadata Regroup");
            let tails = [relaying.dispatch(), relaying.ret()].map(|program| program.cuts()[0].tail.to_vec());
            assert_eq!(
                tails,
                [&[Work::Follow, Work::SendTables, Work::Join][..], &[Work::Join, Work::Sum]]
                    .map(|tail| tail.iter().map(|&work| CallStep::own(Compute(work))).collect::<Vec<_>>())
            );
            let offloaded = CallShape { relays: Relays::Thread, ..INLINE };
            assert_eq!(
                CallShape::round(3, true).to_string(),
                "FillRound stage 0 Agree! / CopyOut stage 1 stage 2 EndRound"
            );
            assert_eq!(
                offloaded.remap().to_string(),
                "release Propose entry.. StartRelay / ..entry Agree! JoinRelay Adopt"
            );
            assert_eq!(
                CallPrograms::relay(INLINE).of(CallKind::Prepare).to_string(),
                "[ node entered Compose counts sent all entered Agree! Bases Judge Admit! agreed / headers Learn \
             FillRelay relay rows relay done ]"
            );
        }

        #[test]
        fn programs_of_slots_agree_on_nothing() {
            let lines = SlotCall::ALL.map(|call| call.program().to_string());
            assert_eq!(
                lines,
                [
                    "Pack rows.. / ..rows Check",
                    "Partials returned.. / ..returned Sum",
                    "returned",
                    "Partials returned.. / ..returned"
                ]
            );
            assert!(SlotCall::ALL.iter().all(|call| call.program().cuts().is_empty()));
        }

        #[test]
        fn one_thread_judges_a_call_once() {
            for program in &CallPrograms::own(INLINE).all {
                let agreements = program.steps().iter().filter(|step| step.action == Agree);
                assert_eq!(agreements.map(|step| step.role).collect::<Vec<_>>(), [Role::Own], "{program}");
            }
        }

        #[test]
        fn nothing_moves_before_all_cuts() {
            let moves = |step: &CallStep| {
                matches!(
                    step.action,
                    Run(StageId::Rows | StageId::RelayRows | StageId::ReturnRows | StageId::Sum, _)
                )
            };
            for relays in Relays::ALL {
                let shape = CallShape { relays, ..INLINE };
                let (own, relays) = (CallPrograms::own(shape), CallPrograms::relay(shape));
                for program in own.all.iter().chain(&relays.all) {
                    let first = program.steps().iter().position(moves).unwrap_or(program.steps().len());
                    assert!(program.cuts().iter().all(|cut| usize::from(cut.at) < first), "{program}");
                }
            }
        }
    }

    mod machine {
        use super::super::{CallShape, Engines, Relays};
        use super::*;

        #[test]
        fn every_straight_line_is_walked_of_a_program() {
            for relays in Relays::ALL {
                let shape =
                    CallShape { multi_node: true, relays, engines: Engines::default(), node_sums: false };
                let program = shape.dispatch();
                assert_eq!(program.line(None).collect::<Vec<_>>(), program.steps());
                assert_eq!(program.cuts().len(), 2);
                for cut in program.cuts() {
                    let kept = &program.steps()[..=usize::from(cut.at)];
                    assert_eq!(program.line(Some(cut)).collect::<Vec<_>>(), [kept, &cut.tail].concat());
                }
            }
        }

        #[test]
        fn calls_have_one_half() {
            let (relays, engines) = (Relays::Inline, Engines::default());
            let shape = CallShape { multi_node: false, relays, engines, node_sums: false };
            let program = shape.ret();
            let mut machine = CallMachine::default();
            let halves = std::iter::from_fn(|| {
                machine.next(&program)?;
                let half = machine.at_half(&program);
                machine.done();
                Some(half)
            });
            assert_eq!(halves.filter(|half| *half).count(), 1);
        }
    }
}
