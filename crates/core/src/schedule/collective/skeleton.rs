//! The order of puts, signals and waits: built once for each program.

use super::RankView;
use crate::error::CallKind;
use crate::schedule::call::{CallProgram, CallShape};
use crate::schedule::{Flag, FlagValue, Op, OperandId, Stage, TrackOp};

/// A collective, as all ranks carry it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Program {
    /// All-reduce of what fits a slot: every rank sums everything.
    OneShot,
    /// All-reduce: every rank sums its share, and all get the sums.
    TwoShot {
        /// Another round of the call follows, whose entry says that the sums have landed.
        more: bool,
    },
    /// All-reduce from rank to rank.
    Ring,
    /// One rank's bytes for all.
    Broadcast {
        /// The rank.
        root: u32,
        /// How they reach other nodes.
        shape: Shape,
    },
    /// Each rank has something for each.
    AllToAll,
    /// The same, directly to its place in each rank's result.
    ZeroCopy,
    /// Each rank has something for all.
    AllGather,
    /// Each rank sums what all ranks have for it.
    ReduceScatter,
}

impl Program {
    /// The call that it is a round of.
    pub fn kind(self) -> CallKind {
        match self {
            Program::OneShot | Program::TwoShot { .. } | Program::Ring => CallKind::AllReduce,
            Program::Broadcast { .. } => CallKind::Broadcast,
            Program::AllToAll | Program::ZeroCopy => CallKind::AllToAll,
            Program::AllGather => CallKind::AllGather,
            Program::ReduceScatter => CallKind::ReduceScatter,
        }
    }

    /// Whether its result for the caller has come only when the next round has been entered.
    pub fn ends_in_the_next(self) -> bool {
        self == Program::TwoShot { more: true }
    }
}

/// How a broadcast reaches the leaders of other nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shape {
    /// All from the root: few steps.
    Star,
    /// From leader to leader, in [parts](Shape::PARTS): each sends once.
    Chain,
}

impl Shape {
    /// Parts of a chunk on a chain.
    pub const PARTS: u8 = 8;

    /// Parts of a chunk.
    pub fn parts(self) -> u8 {
        if self == Shape::Star { 1 } else { Shape::PARTS }
    }
}

/// What of the caller's a stage reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tensor {
    /// Nothing.
    None,
    /// Reads all of it.
    Input,
    /// Writes sums to this rank's share.
    Sums,
    /// Reads this rank's share.
    Share,
}

/// A stage, and what of the caller's it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The operations.
    pub stage: Stage,
    /// Memory besides windows that they read or write.
    pub tensor: Tensor,
}

/// A rank's part of a collective. After the first stage all ranks compare their calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skeleton {
    /// The stages.
    pub steps: Vec<Step>,
    /// The steps of a round.
    pub call: CallProgram,
}

/// Which operand an operation takes.
pub(super) struct Slots;

impl Slots {
    /// Bytes for this rank's own offer.
    pub const OFFER: OperandId = OperandId(0);
    /// Bytes for this rank's own result.
    pub const RESULT: OperandId = OperandId(1);
    const FIRST: u32 = 2;

    /// Bytes for a rank on entry or, if they land in place, when all have entered.
    pub fn enter(to: u32) -> OperandId {
        OperandId(Self::FIRST + to)
    }

    /// Bytes for a rank after the sum; on a ring, in a step of the gathering.
    pub fn share(to: u32, ranks: u32) -> OperandId {
        OperandId(Self::FIRST + ranks + to)
    }

    /// On a ring, a step's sum.
    pub fn sum(step: u32, ranks: u32) -> OperandId {
        OperandId(Self::FIRST + 2 * ranks + step)
    }

    /// On a ring, the bytes of a step; of a broadcast, a part.
    pub fn part(step: u32, ranks: u32) -> OperandId {
        OperandId(Self::FIRST + 3 * ranks + step)
    }

    /// How many there are.
    pub fn count(ranks: u32) -> usize {
        (Self::FIRST + 3 * ranks + ranks.max(Shape::PARTS.into())) as usize
    }
}

/// Operations of one stage, as they come.
struct Ops(Vec<TrackOp>);

impl Ops {
    fn new() -> Self {
        Ops(Vec::new())
    }

    fn add(mut self, op: Op) -> Self {
        self.0.push(TrackOp { track: 0, op });
        self
    }

    fn put(self, to: u32, slot: OperandId) -> Self {
        self.add(Op::Put { to, slot })
    }

    fn reduce(self, slot: OperandId) -> Self {
        self.add(Op::Reduce { slot })
    }

    fn signal(self, (to, of): (u32, u32), flag: Flag, level: FlagValue) -> Self {
        self.add(Op::Signal { to, of, flag, level })
    }

    fn wait(self, from: u32, flag: Flag, level: FlagValue) -> Self {
        self.add(Op::Wait { from, flag, level })
    }

    fn each(self, peers: impl Iterator<Item = u32>, add: impl Fn(Self, u32) -> Self) -> Self {
        peers.fold(self, add)
    }

    fn share(self) -> Step {
        self.step("share", Tensor::Share)
    }

    fn step(self, name: &'static str, tensor: Tensor) -> Step {
        Step { stage: Stage { name, items: self.0 }, tensor }
    }
}

impl RankView {
    /// The most bytes of a round: of those that a rank has for all, or for each.
    pub fn most(&self, program: Program) -> u64 {
        match program {
            Program::OneShot | Program::AllToAll | Program::ReduceScatter => self.staging.slot(),
            Program::ZeroCopy => self.staging.room() / u64::from(self.ranks()),
            // Ranks of other nodes have a slot each.
            Program::AllGather if self.nodes.nodes() > 1 => self.staging.slot(),
            Program::TwoShot { .. } | Program::AllGather => self.staging.chunk(),
            Program::Ring => self.staging.half_chunk(),
            Program::Broadcast { .. } => self.staging.wide_offer(),
        }
    }

    /// This rank's part of a program.
    pub fn skeleton(&self, program: Program) -> Skeleton {
        let steps = match program {
            Program::OneShot => vec![self.offered(), self.summed()],
            Program::TwoShot { more: true } => vec![self.offered(), self.summed(), self.shared().share()],
            Program::TwoShot { more: false } => {
                vec![self.offered(), self.summed(), self.landed_by_all(self.shared()).share()]
            }
            Program::Ring => self.ring(),
            Program::Broadcast { root, shape } => self.broadcast(root, shape),
            Program::AllToAll => {
                let ops = Ops::new().each(self.peers(), |ops, to| ops.put(to, Slots::enter(to)));
                vec![self.entered(ops)]
            }
            Program::ZeroCopy => {
                let near = self.peers().filter(|&peer| self.near(peer));
                // Wires carry while this rank copies.
                let order = self.far().chain(near).chain([self.me]);
                let puts = Ops::new().each(order, |ops, to| ops.put(to, Slots::enter(to)));
                vec![self.entered(Ops::new()), self.landed_by_all(puts).step("land", Tensor::Input)]
            }
            Program::AllGather => vec![self.offered()],
            Program::ReduceScatter => {
                let own = Ops::new().put(self.me, Slots::OFFER);
                let puts = own.each(self.peers(), |ops, to| ops.put(to, Slots::enter(to)));
                vec![self.entered(puts), self.summed()]
            }
        };
        let call = CallShape::round(steps.len() as u8, program.ends_in_the_next());
        Skeleton { steps, call }
    }

    /// Signals this rank's entry to all others, behind its puts, and waits for theirs.
    fn entered(&self, puts: Ops) -> Step {
        let (flag, level) = (Flag::Entry, FlagValue::Call);
        puts.each(self.peers(), |ops, to| ops.signal((to, self.me), flag, level))
            .each(self.peers(), |ops, from| ops.wait(from, flag, level))
            .step("enter", Tensor::Input)
    }

    fn offered(&self) -> Step {
        let own = Ops::new().put(self.me, Slots::OFFER);
        self.entered(own.each(self.far(), |ops, to| ops.put(to, Slots::enter(to))))
    }

    fn summed(&self) -> Step {
        Ops::new().reduce(Slots::sum(0, self.ranks())).step("sum", Tensor::Sums)
    }

    fn shared(&self) -> Ops {
        let ranks = self.ranks();
        let own = Ops::new().put(self.me, Slots::RESULT);
        own.each(self.far(), |ops, to| ops.put(to, Slots::share(to, ranks)))
    }

    /// Signals all others that these puts have landed, and waits for their signals.
    fn landed_by_all(&self, puts: Ops) -> Ops {
        let (flag, level) = (Flag::Landed, FlagValue::Call);
        puts.each(self.peers(), |ops, to| ops.signal((to, self.me), flag, level))
            .each(self.peers(), |ops, from| ops.wait(from, flag, level))
    }

    fn ring(&self) -> Vec<Step> {
        let (me, ranks, next, from) = (self.me, self.ranks(), self.next(), self.before(1));
        let mut steps = vec![self.entered(Ops::new().put(me, Slots::OFFER))];
        let landed = |ops: Ops, step: u32| match step {
            0 => ops,
            step => ops.wait(from, Flag::Landed, FlagValue::Part(step as u8)),
        };
        for step in 0..ranks - 1 {
            let ops =
                landed(Ops::new(), step).reduce(Slots::sum(step, ranks)).put(next, Slots::part(step, ranks));
            let ops = ops.signal((next, me), Flag::Landed, FlagValue::Part(step as u8 + 1));
            steps.push(ops.step("step", Tensor::None));
        }
        steps.push(
            landed(Ops::new(), ranks - 1).reduce(Slots::sum(ranks - 1, ranks)).step("sum", Tensor::Sums),
        );
        let mut gather = Ops::new().put(me, Slots::RESULT);
        for step in 0..ranks - 1 {
            if step > 0 {
                gather = gather.wait(from, Flag::Returned, FlagValue::Part(step as u8));
            }
            gather = gather.put(next, Slots::share(step, ranks));
            gather = gather.signal((next, me), Flag::Returned, FlagValue::Part(step as u8 + 1));
        }
        if ranks > 1 {
            gather = gather.wait(from, Flag::Returned, FlagValue::Part((ranks - 1) as u8));
        }
        steps.push(gather.step("gather", Tensor::Share));
        steps
    }

    fn broadcast(&self, root: u32, shape: Shape) -> Vec<Step> {
        let (me, leaders, parts) = (self.me, self.leaders(root), shape.parts());
        let own = if me == root { Ops::new().put(me, Slots::OFFER) } else { Ops::new() };
        let enter = self.entered(own);
        let flag = Flag::Landed;
        let leader = leaders[self.place(root) as usize];
        let mut ops = Ops::new();
        match leaders.iter().position(|&leader| leader == me) {
            // All local peers have heard the root.
            None if leader != root => ops = ops.wait(leader, flag, FlagValue::Call),
            None => {}
            Some(place) => {
                let parent = if shape == Shape::Star { 0 } else { place.saturating_sub(1) };
                let children = match shape {
                    Shape::Star if place == 0 => &leaders[1..],
                    Shape::Star => &[],
                    Shape::Chain => leaders.get(place + 1..place + 2).unwrap_or_default(),
                };
                // A rank that relays nothing waits for the last part alone.
                let first = if children.is_empty() { parts } else { 1 };
                for part in first..=parts {
                    if me != root {
                        ops = ops.wait(leaders[parent], flag, FlagValue::Part(part));
                    }
                    let slot = Slots::part(u32::from(part) - 1, self.ranks());
                    ops = ops.each(children.iter().copied(), |ops, to| ops.put(to, slot));
                    ops = ops.each(children.iter().copied(), |ops, to| {
                        ops.signal((to, me), flag, FlagValue::Part(part))
                    });
                }
                if me != root {
                    let members = self.peers().filter(|&peer| self.near(peer));
                    ops = ops.each(members, |ops, to| ops.signal((to, me), flag, FlagValue::Call));
                }
            }
        }
        vec![enter, ops.step("hand on", Tensor::None)]
    }

    /// Of this rank's node among those of [`RankView::leaders`].
    pub(super) fn place(&self, root: u32) -> u32 {
        let nodes = self.nodes.nodes();
        (self.nodes.node_of(self.me) + nodes - self.nodes.node_of(root)) % nodes
    }
}
