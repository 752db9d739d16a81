//! Collectives as data: the order of puts, signals and waits, built once for each program, and the
//! operands of one round.
//!
//! ```text
//!   Program --RankView::skeleton--> steps: stages of operations  +  Rounds::fill: addresses of a round  --> executors
//!                                                                   Copied: bytes to the caller at the end
//! ```
//!
//! Nothing is allocated once the tables have grown.

use std::ops::Range;

use super::RankView;
use crate::dtype::{Dtype, PARTIAL, PartialDtype};
use crate::error::CallKind;
use crate::plan::{RowBuffer, Summand};
use crate::schedule::call_program::{CallProgram, CallShape};
use crate::schedule::{
    Flag, FlagValue, Op, Operand, OperandId, Operands, PutSource, SpanCopy, Stage, SumOperands, SumTarget,
    Tag, TrackOp, WindowId,
};

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

/// Tensor of the caller that a stage reads or writes.
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
struct OperandIds;

impl OperandIds {
    /// Bytes for this rank's own offer.
    const OFFER: OperandId = OperandId(0);
    /// Bytes for this rank's own result.
    const RESULT: OperandId = OperandId(1);
    const FIRST: u32 = 2;

    /// Bytes for a rank on entry or, if they land in place, when all have entered.
    fn enter(to: u32) -> OperandId {
        OperandId(Self::FIRST + to)
    }

    /// Bytes for a rank after the sum; on a ring, in a step of the gathering.
    fn share(to: u32, ranks: u32) -> OperandId {
        OperandId(Self::FIRST + ranks + to)
    }

    /// On a ring, a step's sum.
    fn sum(step: u32, ranks: u32) -> OperandId {
        OperandId(Self::FIRST + 2 * ranks + step)
    }

    /// On a ring, the bytes of a step; of a broadcast, a part.
    fn part(step: u32, ranks: u32) -> OperandId {
        OperandId(Self::FIRST + 3 * ranks + step)
    }

    /// How many there are.
    fn count(ranks: u32) -> usize {
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

    fn put(self, to: u32, operand: OperandId) -> Self {
        self.add(Op::Put { to, operand })
    }

    fn reduce(self, operand: OperandId) -> Self {
        self.add(Op::Reduce { operand })
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
                let ops = Ops::new().each(self.peers(), |ops, to| ops.put(to, OperandIds::enter(to)));
                vec![self.entered(ops)]
            }
            Program::ZeroCopy => {
                let near = self.peers().filter(|&peer| self.near(peer));
                // Nets carry while this rank copies.
                let order = self.far().chain(near).chain([self.me]);
                let puts = Ops::new().each(order, |ops, to| ops.put(to, OperandIds::enter(to)));
                vec![self.entered(Ops::new()), self.landed_by_all(puts).step("land", Tensor::Input)]
            }
            Program::AllGather => vec![self.offered()],
            Program::ReduceScatter => {
                let own = Ops::new().put(self.me, OperandIds::OFFER);
                let puts = own.each(self.peers(), |ops, to| ops.put(to, OperandIds::enter(to)));
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
        let own = Ops::new().put(self.me, OperandIds::OFFER);
        self.entered(own.each(self.far(), |ops, to| ops.put(to, OperandIds::enter(to))))
    }

    fn summed(&self) -> Step {
        Ops::new().reduce(OperandIds::sum(0, self.ranks())).step("sum", Tensor::Sums)
    }

    fn shared(&self) -> Ops {
        let ranks = self.ranks();
        let own = Ops::new().put(self.me, OperandIds::RESULT);
        own.each(self.far(), |ops, to| ops.put(to, OperandIds::share(to, ranks)))
    }

    /// Signals all others that these puts have landed, and waits for their signals.
    fn landed_by_all(&self, puts: Ops) -> Ops {
        let (flag, level) = (Flag::Landed, FlagValue::Call);
        puts.each(self.peers(), |ops, to| ops.signal((to, self.me), flag, level))
            .each(self.peers(), |ops, from| ops.wait(from, flag, level))
    }

    fn ring(&self) -> Vec<Step> {
        let (me, ranks, next, from) = (self.me, self.ranks(), self.next(), self.before(1));
        let mut steps = vec![self.entered(Ops::new().put(me, OperandIds::OFFER))];
        let landed = |ops: Ops, step: u32| match step {
            0 => ops,
            step => ops.wait(from, Flag::Landed, FlagValue::Part(step as u8)),
        };
        for step in 0..ranks - 1 {
            let ops = landed(Ops::new(), step)
                .reduce(OperandIds::sum(step, ranks))
                .put(next, OperandIds::part(step, ranks));
            let ops = ops.signal((next, me), Flag::Landed, FlagValue::Part(step as u8 + 1));
            steps.push(ops.step("step", Tensor::None));
        }
        steps.push(
            landed(Ops::new(), ranks - 1).reduce(OperandIds::sum(ranks - 1, ranks)).step("sum", Tensor::Sums),
        );
        let mut gather = Ops::new().put(me, OperandIds::RESULT);
        for step in 0..ranks - 1 {
            if step > 0 {
                gather = gather.wait(from, Flag::Returned, FlagValue::Part(step as u8));
            }
            gather = gather.put(next, OperandIds::share(step, ranks));
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
        let own = if me == root { Ops::new().put(me, OperandIds::OFFER) } else { Ops::new() };
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
                    let operand = OperandIds::part(u32::from(part) - 1, self.ranks());
                    ops = ops.each(children.iter().copied(), |ops, to| ops.put(to, operand));
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
        vec![enter, ops.step("relay", Tensor::None)]
    }

    /// Of this rank's node among those of [`RankView::leaders`].
    fn place(&self, root: u32) -> u32 {
        let nodes = self.nodes.nodes();
        (self.nodes.node_of(self.me) + nodes - self.nodes.node_of(root)) % nodes
    }
}

/// One round of a call.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    /// Program that all ranks run.
    pub program: Program,
    /// Which of two places it takes.
    pub parity: u64,
    /// First byte in the caller's tensor.
    pub at: u64,
    /// Bytes of this round: at most [`RankView::most`]. Of what lands in place, of each part.
    pub len: u64,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Type of the partial sums on a ring.
    pub wire: PartialDtype,
}

/// A copy from a window to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// Owner of the window: this rank or a local peer.
    pub owner: u32,
    /// First byte there.
    pub offset: u64,
    /// First byte in the caller's tensor.
    pub at: u64,
    /// Bytes.
    pub len: u64,
}

/// The tables of one rank's rounds.
#[derive(Clone, Debug, Default)]
pub struct Rounds {
    table: Vec<Operand>,
    spans: Vec<SpanCopy>,
    /// Tag that each peer is sent on entry.
    pub tags: Vec<Tag>,
    /// All-to-all, reduce-scatter: bytes of the caller's tensor that go to each rank in this round,
    /// at most a slot; without an entry, none.
    pub sends: Vec<Range<u64>>,
    terms: Vec<Summand>,
    starts: Vec<u32>,
    groups: Vec<u32>,
    group_starts: Vec<u32>,
    chunks: Vec<RowBuffer>,
    held_by: Vec<u32>,
    bases: Vec<u64>,
    wire: PartialDtype,
    /// Bytes of each sum.
    sums: Vec<u64>,
    /// This rank's share of the caller's tensor: where sums go.
    pub share: Range<u64>,
    /// Copies at the end.
    pub copies: Vec<Copied>,
    /// Copies when the next round has been entered: see [`Program::ends_in_the_next`].
    pub due: Vec<Copied>,
}

impl Rounds {
    /// For the ranks of a group.
    pub fn new(ranks: u32) -> Self {
        Rounds {
            table: vec![Operand::Empty; OperandIds::count(ranks)],
            tags: vec![Tag::default(); ranks as usize],
            ..Rounds::default()
        }
    }

    /// As an executor sees them in a step of the round with this number.
    pub fn operands(&self, step: usize, call: u64) -> Operands<'_> {
        Operands {
            table: &self.table,
            spans: &self.spans,
            tags: &self.tags,
            row_bytes: self.sums.get(step.saturating_sub(1)).copied().unwrap_or(0),
            sum: SumOperands {
                terms: &self.terms,
                starts: &self.starts,
                groups: &self.groups,
                group_starts: &self.group_starts,
                wire: self.wire,
                held_by: &self.held_by,
                bases: &self.bases,
                chunks: &self.chunks,
                ..SumOperands::default()
            },
            call,
            ..Operands::default()
        }
    }

    /// Fills in a round of this rank.
    pub fn fill(&mut self, view: &RankView, round: &Round) {
        self.table.fill(Operand::Empty);
        self.spans.clear();
        self.terms.clear();
        self.starts.clear();
        self.starts.push(0);
        self.groups.clear();
        self.group_starts.clear();
        self.chunks.clear();
        self.held_by.clear();
        self.bases.clear();
        self.sums.clear();
        self.copies.clear();
        self.wire = round.wire;
        self.share = 0..0;
        match round.program {
            Program::OneShot => self.one_shot(view, round),
            Program::TwoShot { .. } => self.two_shot(view, round),
            Program::Ring => self.ring(view, round),
            Program::Broadcast { root, shape } => self.broadcast(view, round, root, shape.parts()),
            Program::AllToAll => self.all_to_all(view, round),
            Program::ZeroCopy => self.zero_copy(view, round),
            Program::AllGather => self.all_gather(view, round),
            Program::ReduceScatter => self.reduce_scatter(view, round),
        }
    }

    /// The stages of the round are over: its result for the caller is due.
    pub fn end(&mut self) {
        self.due.append(&mut self.copies);
    }

    fn span(&mut self, operand: OperandId, (from, from_offset): (PutSource, u64), to_offset: u64, len: u64) {
        self.table[operand.0 as usize] = Operand::Spans { first: self.spans.len() as u32, count: 1 };
        self.spans.push(SpanCopy { from, from_offset, to: WindowId::POOL, to_offset, len });
    }

    fn copied(&mut self, owner: u32, offset: u64, (at, len): (u64, u64)) {
        if len > 0 {
            self.copies.push(Copied { owner, offset, at, len });
        }
    }

    /// A row that is added, in bytes.
    fn term(&mut self, holder: u32, base: u64, row_bytes: u64) {
        self.terms.push(Summand { owner: self.chunks.len() as u32, row: 0 });
        self.chunks.push(RowBuffer { rows: 1, metadata: 0, row_bytes });
        self.held_by.push(holder);
        self.bases.push(base);
    }

    /// The sum of all terms since the last one.
    fn sum(&mut self, operand: OperandId, bytes: u64, to: SumTarget) {
        let first = self.sums.len() as u32;
        self.table[operand.0 as usize] = Operand::SumRows { first, count: 1, to };
        self.starts.push(self.terms.len() as u32);
        self.sums.push(bytes);
    }

    fn offer(&mut self, view: &RankView, round: &Round) {
        let to = view.staging.offer(round.parity);
        self.span(OperandIds::OFFER, (PutSource::Input, round.at), to, round.len);
    }

    fn one_shot(&mut self, view: &RankView, round: &Round) {
        let (staging, parity, len) = (&view.staging, round.parity, round.len);
        self.offer(view, round);
        for to in view.far() {
            self.span(
                OperandIds::enter(to),
                own(view, staging.offer(parity)),
                staging.landing(view.me, parity),
                len,
            );
        }
        self.sum_of_all(view, round, 0..len);
    }

    fn two_shot(&mut self, view: &RankView, round: &Round) {
        let (staging, parity) = (&view.staging, round.parity);
        let share = |of| staging.share(round.len, of);
        let (mine, ranks) = (share(view.me), view.ranks());
        self.offer(view, round);
        for to in view.far() {
            let Range { start, end } = share(to);
            let from = own(view, staging.offer(parity) + start);
            self.span(OperandIds::enter(to), from, staging.landing(view.me, parity), end - start);
        }
        self.sum_of_all(view, round, mine.clone());
        let result = staging.result(parity) + mine.start;
        self.span(OperandIds::RESULT, (PutSource::Input, 0), result, mine.end - mine.start);
        for to in view.far() {
            self.span(OperandIds::share(to, ranks), own(view, result), result, mine.end - mine.start);
        }
        for of in view.peers() {
            let Range { start, end } = share(of);
            self.copied(view.holder(of), staging.result(parity) + start, (round.at + start, end - start));
        }
    }

    /// Of these bytes of the round, by ascending rank.
    fn sum_of_all(&mut self, view: &RankView, round: &Round, bytes: Range<u64>) {
        let (staging, parity, len) = (&view.staging, round.parity, bytes.end - bytes.start);
        for of in 0..view.ranks() {
            let base = match view.near(of) {
                true => staging.offer(parity) + bytes.start,
                false => staging.landing(of, parity),
            };
            self.term(view.holder(of), base, len);
        }
        self.sum(OperandIds::sum(0, view.ranks()), len, SumTarget::Output);
        self.share = round.at + bytes.start..round.at + bytes.end;
    }

    fn ring(&mut self, view: &RankView, round: &Round) {
        let RankView { me, staging, .. } = view;
        let (me, ranks, parity) = (*me, view.ranks(), round.parity);
        let share = |of| staging.share(round.len, of);
        self.offer(view, round);
        self.group_starts.push(0);
        for step in 0..ranks {
            let Range { start, end } = share(view.before(1 + step));
            let len = end - start;
            let partial = len / round.dtype.size() as u64 * round.wire.size() as u64;
            if step > 0 {
                self.term(me, staging.landing(step - 1, parity), partial);
                self.groups.push(PARTIAL);
            }
            self.term(me, staging.offer(parity) + start, len);
            self.groups.push(1);
            self.group_starts.push(self.groups.len() as u32);
            let outbox = SumTarget::Partials { window: WindowId::POOL, offset: staging.outbox(step, parity) };
            self.sum(
                OperandIds::sum(step, ranks),
                len,
                if step + 1 < ranks { outbox } else { SumTarget::Output },
            );
            if step + 1 < ranks {
                let from = own(view, staging.outbox(step, parity));
                self.span(OperandIds::part(step, ranks), from, staging.landing(step, parity), partial);
            }
        }
        let mine = share(me);
        self.share = round.at + mine.start..round.at + mine.end;
        self.span(
            OperandIds::RESULT,
            (PutSource::Input, 0),
            staging.result(parity) + mine.start,
            mine.end - mine.start,
        );
        for step in 0..ranks - 1 {
            let Range { start, end } = share(view.before(step));
            let at = staging.result(parity) + start;
            self.span(OperandIds::share(step, ranks), own(view, at), at, end - start);
        }
        for of in view.peers() {
            let Range { start, end } = share(of);
            self.copied(me, staging.result(parity) + start, (round.at + start, end - start));
        }
    }

    fn broadcast(&mut self, view: &RankView, round: &Round, root: u32, parts: u8) {
        let (offer, ranks) = (view.staging.offer(round.parity), view.ranks());
        if view.me == root {
            self.offer(view, round);
        }
        let width = round.len.div_ceil(parts.into()).next_multiple_of(64);
        for part in 0..u32::from(parts) {
            let [start, end] = [part, part + 1].map(|nth| (width * u64::from(nth)).min(round.len));
            self.span(OperandIds::part(part, ranks), own(view, offer + start), offer + start, end - start);
        }
        if view.me != root {
            let leader = view.nodes.rail_peer(root, view.nodes.node_of(view.me));
            self.copied(leader, offer, (round.at, round.len));
        }
    }

    fn all_to_all(&mut self, view: &RankView, round: &Round) {
        let landing = view.staging.landing(view.me, round.parity);
        for to in view.peers() {
            let Range { start, end } = self.sends.get(to as usize).cloned().unwrap_or_default();
            self.span(OperandIds::enter(to), (PutSource::Input, start), landing, end - start);
        }
    }

    fn zero_copy(&mut self, view: &RankView, round: &Round) {
        let place = view.staging.in_place(view.me, round.len);
        for to in 0..view.ranks() {
            let from = (PutSource::Input, u64::from(to) * round.len);
            self.span(OperandIds::enter(to), from, place, round.len);
        }
    }

    fn all_gather(&mut self, view: &RankView, round: &Round) {
        self.offer(view, round);
        for to in view.far() {
            let offer = own(view, view.staging.offer(round.parity));
            self.span(OperandIds::enter(to), offer, view.staging.landing(view.me, round.parity), round.len);
        }
    }

    fn reduce_scatter(&mut self, view: &RankView, round: &Round) {
        self.all_to_all(view, round);
        let (offer, parity) = (view.staging.offer(round.parity), round.parity);
        let Range { start, end } = self.sends.get(view.me as usize).cloned().unwrap_or_default();
        self.span(OperandIds::OFFER, (PutSource::Input, start), offer, end - start);
        for of in 0..view.ranks() {
            let base = if of == view.me { offer } else { view.staging.landing(of, parity) };
            self.term(view.me, base, end - start);
        }
        self.sum(OperandIds::sum(0, view.ranks()), end - start, SumTarget::Output);
        self.share = round.at..round.at + (end - start);
    }

    /// All-to-all: what has come from a rank in this round, for these bytes of the caller's tensor.
    pub fn arrived(&mut self, view: &RankView, parity: u64, from: u32, bytes: Range<u64>) {
        self.copied(view.me, view.staging.landing(from, parity), (bytes.start, bytes.end - bytes.start));
    }

    /// All-gather: a rank's bytes for all others in this round, from these bytes of the caller's
    /// tensor.
    pub fn gathered(&mut self, view: &RankView, parity: u64, from: u32, bytes: Range<u64>) {
        let at =
            if view.near(from) { view.staging.offer(parity) } else { view.staging.landing(from, parity) };
        self.copied(view.holder(from), at, (bytes.start, bytes.end - bytes.start));
    }
}

/// A place in this rank's own window.
fn own(view: &RankView, offset: u64) -> (PutSource, u64) {
    (PutSource::Window { owner: view.me, window: WindowId::POOL }, offset)
}
