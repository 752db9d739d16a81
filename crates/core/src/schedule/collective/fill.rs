//! The operands of one round, and the bytes that a rank copies to its caller at the end. Nothing is
//! allocated once the tables have grown.

use std::ops::Range;

use super::skeleton::Slots;
use super::{Program, RankView};
use crate::dtype::{Dtype, PARTIAL, PartialDtype};
use crate::plan::{RowBuffer, Summand};
use crate::schedule::{Operand, Operands, PutSource, SpanCopy, SumOperands, SumTarget, Tag, WindowId};

/// One round of a call.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    /// What all ranks do.
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
            table: vec![Operand::Empty; Slots::count(ranks)],
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
    pub fn fill(&mut self, seat: &RankView, round: &Round) {
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
            Program::OneShot => self.whole(seat, round),
            Program::TwoShot { .. } => self.direct(seat, round),
            Program::Ring => self.ring(seat, round),
            Program::Broadcast { root, shape } => self.broadcast(seat, round, root, shape.parts()),
            Program::AllToAll => self.all_to_all(seat, round),
            Program::ZeroCopy => self.landed(seat, round),
            Program::AllGather => self.all_gather(seat, round),
            Program::ReduceScatter => self.reduce_scatter(seat, round),
        }
    }

    /// The stages of the round are over: its result for the caller is due.
    pub fn end(&mut self) {
        self.due.append(&mut self.copies);
    }

    fn span(
        &mut self,
        slot: crate::schedule::OperandId,
        (from, from_offset): (PutSource, u64),
        to_offset: u64,
        len: u64,
    ) {
        self.table[slot.0 as usize] = Operand::Spans { first: self.spans.len() as u32, count: 1 };
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
        self.chunks.push(RowBuffer { rows: 1, notes: 0, row_bytes });
        self.held_by.push(holder);
        self.bases.push(base);
    }

    /// The sum of all terms since the last one.
    fn sum(&mut self, slot: crate::schedule::OperandId, bytes: u64, to: SumTarget) {
        let first = self.sums.len() as u32;
        self.table[slot.0 as usize] = Operand::SumRows { first, count: 1, to };
        self.starts.push(self.terms.len() as u32);
        self.sums.push(bytes);
    }

    fn offer(&mut self, seat: &RankView, round: &Round) {
        let to = seat.staging.offer(round.parity);
        self.span(Slots::OFFER, (PutSource::Input, round.at), to, round.len);
    }

    fn whole(&mut self, seat: &RankView, round: &Round) {
        let (staging, parity, len) = (&seat.staging, round.parity, round.len);
        self.offer(seat, round);
        for to in seat.far() {
            self.span(
                Slots::enter(to),
                own(seat, staging.offer(parity)),
                staging.landing(seat.me, parity),
                len,
            );
        }
        self.sum_of_all(seat, round, 0..len);
    }

    fn direct(&mut self, seat: &RankView, round: &Round) {
        let (staging, parity) = (&seat.staging, round.parity);
        let share = |of| staging.share(round.len, of);
        let (mine, ranks) = (share(seat.me), seat.ranks());
        self.offer(seat, round);
        for to in seat.far() {
            let Range { start, end } = share(to);
            let from = own(seat, staging.offer(parity) + start);
            self.span(Slots::enter(to), from, staging.landing(seat.me, parity), end - start);
        }
        self.sum_of_all(seat, round, mine.clone());
        let result = staging.result(parity) + mine.start;
        self.span(Slots::RESULT, (PutSource::Input, 0), result, mine.end - mine.start);
        for to in seat.far() {
            self.span(Slots::share(to, ranks), own(seat, result), result, mine.end - mine.start);
        }
        for of in seat.peers() {
            let Range { start, end } = share(of);
            self.copied(seat.holder(of), staging.result(parity) + start, (round.at + start, end - start));
        }
    }

    /// Of these bytes of the round, by ascending rank.
    fn sum_of_all(&mut self, seat: &RankView, round: &Round, bytes: Range<u64>) {
        let (staging, parity, len) = (&seat.staging, round.parity, bytes.end - bytes.start);
        for of in 0..seat.ranks() {
            let base = match seat.near(of) {
                true => staging.offer(parity) + bytes.start,
                false => staging.landing(of, parity),
            };
            self.term(seat.holder(of), base, len);
        }
        self.sum(Slots::sum(0, seat.ranks()), len, SumTarget::Output);
        self.share = round.at + bytes.start..round.at + bytes.end;
    }

    fn ring(&mut self, seat: &RankView, round: &Round) {
        let RankView { me, staging, .. } = seat;
        let (me, ranks, parity) = (*me, seat.ranks(), round.parity);
        let share = |of| staging.share(round.len, of);
        self.offer(seat, round);
        self.group_starts.push(0);
        for step in 0..ranks {
            let Range { start, end } = share(seat.before(1 + step));
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
            self.sum(Slots::sum(step, ranks), len, if step + 1 < ranks { outbox } else { SumTarget::Output });
            if step + 1 < ranks {
                let from = own(seat, staging.outbox(step, parity));
                self.span(Slots::part(step, ranks), from, staging.landing(step, parity), partial);
            }
        }
        let mine = share(me);
        self.share = round.at + mine.start..round.at + mine.end;
        self.span(
            Slots::RESULT,
            (PutSource::Input, 0),
            staging.result(parity) + mine.start,
            mine.end - mine.start,
        );
        for step in 0..ranks - 1 {
            let Range { start, end } = share(seat.before(step));
            let at = staging.result(parity) + start;
            self.span(Slots::share(step, ranks), own(seat, at), at, end - start);
        }
        for of in seat.peers() {
            let Range { start, end } = share(of);
            self.copied(me, staging.result(parity) + start, (round.at + start, end - start));
        }
    }

    fn broadcast(&mut self, seat: &RankView, round: &Round, root: u32, parts: u8) {
        let (offer, ranks) = (seat.staging.offer(round.parity), seat.ranks());
        if seat.me == root {
            self.offer(seat, round);
        }
        let width = round.len.div_ceil(parts.into()).next_multiple_of(64);
        for part in 0..u32::from(parts) {
            let [start, end] = [part, part + 1].map(|nth| (width * u64::from(nth)).min(round.len));
            self.span(Slots::part(part, ranks), own(seat, offer + start), offer + start, end - start);
        }
        if seat.me != root {
            let leader = seat.nodes.rail_peer(root, seat.nodes.node_of(seat.me));
            self.copied(leader, offer, (round.at, round.len));
        }
    }

    fn all_to_all(&mut self, seat: &RankView, round: &Round) {
        let landing = seat.staging.landing(seat.me, round.parity);
        for to in seat.peers() {
            let Range { start, end } = self.sends.get(to as usize).cloned().unwrap_or_default();
            self.span(Slots::enter(to), (PutSource::Input, start), landing, end - start);
        }
    }

    fn landed(&mut self, seat: &RankView, round: &Round) {
        let place = seat.staging.in_place(seat.me, round.len);
        for to in 0..seat.ranks() {
            let from = (PutSource::Input, u64::from(to) * round.len);
            self.span(Slots::enter(to), from, place, round.len);
        }
    }

    fn all_gather(&mut self, seat: &RankView, round: &Round) {
        self.offer(seat, round);
        for to in seat.far() {
            let offer = own(seat, seat.staging.offer(round.parity));
            self.span(Slots::enter(to), offer, seat.staging.landing(seat.me, round.parity), round.len);
        }
    }

    fn reduce_scatter(&mut self, seat: &RankView, round: &Round) {
        self.all_to_all(seat, round);
        let (offer, parity) = (seat.staging.offer(round.parity), round.parity);
        let Range { start, end } = self.sends.get(seat.me as usize).cloned().unwrap_or_default();
        self.span(Slots::OFFER, (PutSource::Input, start), offer, end - start);
        for of in 0..seat.ranks() {
            let base = if of == seat.me { offer } else { seat.staging.landing(of, parity) };
            self.term(seat.me, base, end - start);
        }
        self.sum(Slots::sum(0, seat.ranks()), end - start, SumTarget::Output);
        self.share = round.at..round.at + (end - start);
    }

    /// All-to-all: what has come from a rank in this round, for these bytes of the caller's tensor.
    pub fn arrived(&mut self, seat: &RankView, parity: u64, from: u32, bytes: Range<u64>) {
        self.copied(seat.me, seat.staging.landing(from, parity), (bytes.start, bytes.end - bytes.start));
    }

    /// All-gather: a rank's bytes for all others in this round, from these bytes of the caller's
    /// tensor.
    pub fn gathered(&mut self, seat: &RankView, parity: u64, from: u32, bytes: Range<u64>) {
        let at =
            if seat.near(from) { seat.staging.offer(parity) } else { seat.staging.landing(from, parity) };
        self.copied(seat.holder(from), at, (bytes.start, bytes.end - bytes.start));
    }
}

/// A place in this rank's own window.
fn own(seat: &RankView, offset: u64) -> (PutSource, u64) {
    (PutSource::Window { owner: seat.me, window: WindowId::POOL }, offset)
}
