//! Unrolls rounds of collectives.
//!
//! ```text
//!   round     | enter | read tags | stage | ... | copy to the caller
//!   landed    | enter | read tags | land | the caller reads ... until the next round | enter
//! ```

use std::ops::Range;
use std::rc::Rc;

use sidelane_core::dtype::{Dtype, PartialDtype};
use sidelane_core::error::PlanError;
use sidelane_core::schedule::call_program::{Action, Work};
use sidelane_core::schedule::collective::{self, Copied, Program, RankView, Round, Rounds, Staging};
use sidelane_core::schedule::{Calls, ControlLayout, Flag, Op, Operands, TrackOp, WindowId};
use sidelane_core::topology::NodeMap;

use super::{
    ActorCall, Bytes, Effect, Effects, HostAccess, Role, StageRun, UnrolledOp, UnrolledProgram, numbered,
};
use crate::mutate::{CallChange, CallMutation};

/// The calls of a group, all ranks in the same order.
#[derive(Clone, Debug)]
pub struct CollectiveScenario<'a> {
    /// Which ranks share memory.
    pub nodes: &'a NodeMap,
    /// Where bytes lie.
    pub staging: Staging,
    /// The rounds.
    pub calls: &'a [CollectiveCall],
    /// A rule that is broken: `None`, except to see that `prove` notices.
    pub seeded: Option<CollectiveBug>,
    /// A bug in the steps of all rounds of a program, for the same reason.
    pub mutation: Option<(Program, CallMutation)>,
}

/// One round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectiveCall {
    /// All ranks carry a program out.
    Round {
        /// Which.
        program: Program,
        /// Bytes; of an all-to-all, of each rank for each.
        len: u64,
    },
    /// Rank 0 enters the first, all others the second: every rank leaves when it has read the tags.
    Mixed {
        /// Programs that rank 0 enters, and the others.
        programs: [Program; 2],
        /// Bytes, or as many as a program has places for.
        len: u64,
    },
}

/// Rules that could be broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectiveBug {
    /// Places are not doubled.
    OneHalf,
    /// Arrived bytes are copied to the caller a round late.
    CopyLate,
    /// Tags are read when the call is over.
    TagsLate,
    /// Bytes that land in place are put before all have entered.
    LandFirst,
    /// Bytes that landed in place are read when the next round has been entered.
    ReadOn,
}

impl CollectiveBug {
    /// All of them.
    pub const ALL: [CollectiveBug; 5] = [
        CollectiveBug::OneHalf,
        CollectiveBug::CopyLate,
        CollectiveBug::TagsLate,
        CollectiveBug::LandFirst,
        CollectiveBug::ReadOn,
    ];
}

/// A rank's tables in one round.
#[derive(Debug)]
struct RoundOperands {
    rounds: Rounds,
    me: u32,
    ranks: u32,
    step: usize,
    /// Bytes of an element, and of one of a partial sum.
    sizes: (u64, u64),
    call: u64,
}

impl Effects for RoundOperands {
    fn effects(&self, step: &UnrolledOp) -> Vec<Effect> {
        let operands = self.rounds.operands(self.step, self.call);
        match step.op {
            Op::Put { to, operand } => operands.puts(to, operand),
            Op::Signal { to, of, flag, level } => operands.tag(to, flag, level).map_or(Vec::new(), |_| {
                let at = ControlLayout::tag(of, flag, self.ranks, Calls::parity_of(self.call));
                vec![Effect::Tag(Bytes::new(to, WindowId::CONTROL, at, ControlLayout::TAG_BYTES))]
            }),
            Op::Reduce { operand } => {
                let partial = operands.row_bytes / self.sizes.0 * self.sizes.1;
                operands.sums(operand, (self.me, partial))
            }
            Op::PutRows { .. } | Op::Wait { .. } => Vec::new(),
        }
    }
}

/// Epoch of all unrolled programs.
pub(super) const EPOCH: u16 = 1;
/// Type of all elements.
const DTYPE: Dtype = Dtype::Bf16;

pub(super) fn unroll(scenario: &CollectiveScenario) -> Result<UnrolledProgram, PlanError> {
    let ranks = scenario.nodes.ranks();
    if scenario.staging.ranks() != ranks {
        let (parameter, expected) = ("ranks", "as many as there are places for");
        return Err(PlanError::BadParameter { parameter, seen: ranks.into(), expected });
    }
    let mut ranks_unrolled: Vec<RankUnroller> = (0..ranks)
        .map(|me| {
            let view = RankView { nodes: scenario.nodes.clone(), me, staging: scenario.staging };
            let calls = Calls::new(EPOCH);
            let none = Vec::new;
            let (seeded, mutation) = (scenario.seeded, scenario.mutation);
            RankUnroller { view, seeded, mutation, calls, late: none(), later: none(), lent: none() }
        })
        .collect();
    let calls = scenario.calls.iter().enumerate();
    let calls =
        calls.map(|(number, call)| ranks_unrolled.iter_mut().map(|rank| rank.part(number, call)).collect());
    let calls = calls.collect::<Result<_, PlanError>>()?;
    Ok(UnrolledProgram {
        ranks,
        actors: ranks,
        control_bytes: ControlLayout::flag_bytes(ranks),
        pool_bytes: scenario.staging.bytes(),
        calls: numbered(calls),
        assumed: Vec::new(),
    })
}

struct RankUnroller {
    view: RankView,
    seeded: Option<CollectiveBug>,
    mutation: Option<(Program, CallMutation)>,
    calls: Calls,
    /// Accesses when the next round has been entered, and the one behind it.
    late: Vec<HostAccess>,
    later: Vec<HostAccess>,
    /// Bytes that the caller reads in place until it enters the next round.
    lent: Vec<HostAccess>,
}

impl RankUnroller {
    fn part(&mut self, number: usize, call: &CollectiveCall) -> Result<ActorCall, PlanError> {
        let me = self.view.me;
        let (program, len, complete) = match *call {
            CollectiveCall::Round { program, len } => (program, len, true),
            CollectiveCall::Mixed { programs, len } => (programs[usize::from(me > 0)], len, false),
        };
        self.calls.enter();
        let most = self.view.most(program);
        let len = if complete { len } else { len.min(most) };
        if len > most {
            let (parameter, expected) = ("len", "what fits the places of a round");
            return Err(PlanError::BadParameter { parameter, seen: len, expected });
        }
        let sends: Vec<_> =
            (0..self.view.ranks()).map(|to| u64::from(to) * len..(u64::from(to) + 1) * len).collect();
        let parity = if self.seeded == Some(CollectiveBug::OneHalf) { 0 } else { self.calls.parity() };
        let round = Round { program, parity, at: 0, len, dtype: DTYPE, wire: PartialDtype::F32 };
        let mut rounds = Rounds::new(self.view.ranks());
        rounds.sends.clone_from(&sends);
        rounds.fill(&self.view, &round);
        for (from, bytes) in (0..).zip(&sends) {
            match program {
                Program::AllToAll if from != me => rounds.arrived(&self.view, parity, from, bytes.clone()),
                Program::AllGather => rounds.gathered(&self.view, parity, from, bytes.clone()),
                _ => {}
            }
        }
        let copies: Vec<HostAccess> = rounds.copies.iter().map(|copied| read(copied, number)).collect();
        let tags = self.tags(number);
        let filled = |step| {
            let sizes = (DTYPE.size() as u64, PartialDtype::F32.size() as u64);
            let (ranks, call) = (self.view.ranks(), self.calls.value());
            Rc::new(RoundOperands { rounds: rounds.clone(), me, ranks, step, sizes, call })
        };
        let collective::Skeleton { mut steps, mut call } = self.view.skeleton(program);
        let mut goes_on = false;
        if let Some((_, bug)) = self.mutation.filter(|(planted, _)| *planted == program) {
            call = bug.plant(&call);
            goes_on = bug.change == CallChange::GoOn { rank: me };
        }
        let complete = complete || goes_on;
        let mut touches = std::mem::take(&mut self.lent);
        let mut scenes = Vec::new();
        // The previous round's result for the caller.
        let mut due = std::mem::replace(&mut self.late, std::mem::take(&mut self.later));
        match self.seeded {
            Some(CollectiveBug::LandFirst) if program == Program::ZeroCopy => put_first(&mut steps),
            Some(CollectiveBug::ReadOn) => due.append(&mut touches),
            _ => {}
        }
        let cut = call.cut_at(Action::Agree).filter(|_| !complete);
        for step in call.line(cut) {
            match step.action {
                Action::Round(nth) => {
                    let (filled, stage) = (filled(nth.into()), &steps[usize::from(nth)].stage);
                    let value = filled.rounds.operands(nth.into(), filled.call).call;
                    let (name, touches) = (stage.name, std::mem::take(&mut touches));
                    let steps = stage.items.iter().map(|item| in_call(item, value)).collect();
                    scenes.push(StageRun { name, first: 0, settled: true, touches, steps, filled });
                }
                Action::Agree if self.seeded == Some(CollectiveBug::TagsLate) => {
                    self.late.extend(tags.iter().cloned());
                }
                Action::Agree => touches.extend(tags.iter().cloned()),
                Action::Compute(Work::CopyOut) => touches.append(&mut due),
                Action::Compute(Work::EndRound) => match self.seeded {
                    Some(CollectiveBug::CopyLate) if program.ends_in_the_next() => {
                        self.later.extend(copies.iter().cloned());
                    }
                    Some(CollectiveBug::CopyLate) => self.late.extend(copies.iter().cloned()),
                    _ => due.extend(copies.iter().cloned()),
                },
                _ => {}
            }
        }
        if complete {
            self.late.append(&mut due);
        }
        if program == Program::ZeroCopy && complete {
            let landed = self.landed(len, number);
            touches.push(landed.clone());
            self.lent.push(landed);
        }
        let (name, steps, filled) = ("end", Vec::new(), filled(0));
        scenes.push(StageRun { name, first: 0, settled: true, touches, steps, filled });
        Ok(ActorCall { rank: me, role: Role::Own, call: number, kind: program.kind(), scenes })
    }

    /// All parts, in place.
    fn landed(&self, part: u64, of: usize) -> HostAccess {
        let Range { start, end } = self.view.landed(part);
        let bytes = Bytes::new(self.view.me, WindowId::POOL, start, end - start);
        HostAccess { what: "what has landed", bytes, write: false, of }
    }

    /// Tags of all ranks on entry.
    fn tags(&self, of: usize) -> Vec<HostAccess> {
        let RankView { me, .. } = self.view;
        let ranks = self.view.ranks();
        let tag = |from| {
            let at = ControlLayout::tag(from, Flag::Entry, ranks, self.calls.parity());
            HostAccess {
                what: "tag",
                bytes: Bytes::new(me, WindowId::CONTROL, at, ControlLayout::TAG_BYTES),
                write: false,
                of,
            }
        };
        (0..ranks).filter(|&from| from != me).map(tag).collect()
    }
}

/// Everything that is put goes before the words and waits of the entry.
fn put_first(steps: &mut [collective::Step]) {
    if let [enter, land] = steps {
        let is_put = |item: &TrackOp| matches!(item.op, Op::Put { .. });
        enter.stage.items.splice(..0, land.stage.items.extract_if(.., |item| is_put(item)));
    }
}

/// The caller reads a copy.
pub(super) fn read(copied: &Copied, of: usize) -> HostAccess {
    let Copied { owner, offset, len, .. } = *copied;
    HostAccess {
        what: "what has come",
        bytes: Bytes::new(owner, WindowId::POOL, offset, len),
        write: false,
        of,
    }
}

/// An operation in a call of this value.
pub(super) fn in_call(item: &TrackOp, call: u64) -> UnrolledOp {
    UnrolledOp::of(item, &Operands { call, ..Operands::default() })
}
