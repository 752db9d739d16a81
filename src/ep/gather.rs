//! Dispatch by all-gather: every token to every rank with its choices, then each rank's own rows to their places.
//!
//! ```text
//!   all-gather   x, choices, weights  ==>  | rows of rank 0 | rows of rank 1 | ... |  choices of all
//!   place        from everybody's choices, what the counts of an exchange would have said: and the same layout
//!   regroup      gathered rows  -->  rows of my experts
//! ```
//!
//! The all-gather is a dispatch by an engine of its own, which is built so that every row goes to every rank. As all ranks
//! know all choices, each finds the layout of an exchange by itself, that of its relays included; so whatever follows the
//! handle is what follows an exchange, and needs no other code. In particular combine: it is the reduce-scatter of what each
//! rank made, with the zeros left out of ranks that made nothing of a token.

use std::ops::Range;

use super::ExpertParallel;
use super::builder::Spec;
use super::dispatch::Opened;
use super::handle::Inner;
use crate::dtype::Wire;
use crate::error::{CallKind, Cause, Error};
use crate::gate::Routing;
use crate::lane::Io;
use crate::memory::Extent;
use crate::plan::{
    Block, Everyone, ExpertMap, Frame, Known, Mode, Order, Regroup, RowLayout, Strategy, Traffic,
};
use crate::schedule::{Index, Item, Op, Operand, Operands, Place, Slot, WindowId};
use crate::world::Group;

/// What a dispatch by all-gather needs beside the instance that it is for.
pub(super) struct Gather {
    /// Gathers.
    pub engine: ExpertParallel,
    everyone: Everyone,
    regroup: Regroup,
    /// Gathered rows of each rank.
    sources: Vec<Range<u32>>,
    ids: Vec<i32>,
    weights: Vec<f32>,
    /// Per rank: its block for this rank's relay.
    blocks: Vec<Option<Block>>,
    /// Per rank: the weights that go with it.
    block_weights: Vec<Vec<f32>>,
}

impl Gather {
    /// For an instance of these settings. Collective.
    pub fn new(group: &Group, of: &Spec) -> Result<Self, Error> {
        let (hidden, dtype) = of.sent(CallKind::Dispatch);
        let spec = Spec {
            hidden,
            dtype,
            gathers: true,
            strategy: Strategy::Exchange,
            map: std::sync::Arc::new(ExpertMap::contiguous(group.size(), group.size())?),
            order: Order::Expert,
            wire: Wire::F32,
            align: 1,
            weighted: false,
            layout: RowLayout::ExpertMajor,
            mode: Mode::Eager,
            record: None,
            ..of.clone()
        };
        let ranks = group.size() as usize;
        Ok(Gather {
            engine: ExpertParallel::new(group, spec)?,
            everyone: Everyone::default(),
            regroup: Regroup::default(),
            sources: Vec::new(),
            ids: Vec::new(),
            weights: Vec::new(),
            blocks: vec![None; ranks],
            block_weights: vec![Vec::new(); ranks],
        })
    }

    /// First half, for a routing that was `checked`; the rows that are kept take `most` bytes at most.
    pub fn open(
        &mut self,
        kind: CallKind,
        checked: Result<(), Error>,
        routing: &Routing,
        most: u64,
        away: bool,
    ) -> Result<Opened, Error> {
        let (me, engine) = (self.engine.rank(), &mut self.engine);
        if checked.is_ok() {
            let bins = &engine.fixed.bins;
            engine.sorted.fill_gathered(bins, me, routing.tokens(), Some(routing));
        }
        let most = engine.fixed.most_bytes(kind, &engine.numbers.sizes).saturating_add(most);
        engine.open(kind, checked, most, away)
    }

    /// Second half: the rows of the experts of `ep`, and their layout.
    pub fn land(
        &mut self,
        ep: &mut ExpertParallel,
        opened: Opened,
        x: &[u8],
    ) -> Result<(Extent, Inner), Error> {
        let (top_k, kind) = (ep.spec().top_k, opened.kind());
        let (mut extent, gathered) = self.engine.land(opened, x, top_k, true)?;
        let chunk = self.engine.fixed.sizing(kind).landing(gathered.layout.landed);
        let words = extent.slice::<u32>(chunk.notes_at(), chunk.notes as usize)?;
        let known = self.sort(ep, words);
        known.map_err(|cause| ep.fail(cause.into()))?;
        let rows = self.admit(ep, kind, chunk.bytes())?;
        extent.trim(chunk.bytes() + rows);
        let (from, to) = extent.split(chunk.bytes());
        let inner = self.place(ep, kind, &gathered)?;
        let landed = self.copy(ep, kind, (&from, to), inner);
        // What was gathered is nobody's any more, and neither is its layout.
        let _ = self.engine.spare.push(gathered);
        landed
    }

    /// Sorts everybody's choices. They were checked where they come from, so what is wrong with them now came on the way.
    fn sort(&mut self, ep: &ExpertParallel, words: &[u32]) -> Result<(), Cause> {
        let (fixed, top_k) = (&ep.fixed, ep.spec().top_k as usize);
        let notes = words.chunks_exact(1 + 2 * top_k);
        let broken = |rank: u32| Cause::Protocol { rank: fixed.lanes.world_ranks[rank as usize] };
        self.sources.clear();
        let mut first = 0;
        for rank in 0..ep.size() {
            let end = first + notes.clone().skip(first).take_while(|note| note[0] == rank + 1).count();
            self.sources.push(first as u32..end as u32);
            first = end;
        }
        if first != notes.len() {
            return Err(broken(ep.rank()));
        }
        let Gather { everyone, sources, ids, weights, .. } = self;
        everyone.sort(&fixed.frame(), ep.spec().top_k, |rank, sorted| {
            let Range { start, end } = sources[rank as usize].clone();
            ids.clear();
            weights.clear();
            for note in notes.clone().skip(start as usize).take((end - start) as usize) {
                let (experts, of_them) = note[1..].split_at(top_k);
                ids.extend(experts.iter().map(|&id| (id as i32).wrapping_sub(1)));
                weights.extend(of_them.iter().map(|&word| f32::from_bits(word)));
            }
            let routing = Routing::new(top_k as u32, &ids[..], &weights[..]).map_err(|_| broken(rank))?;
            let sorted = sorted.fill(&fixed.spec.map, &fixed.bins, fixed.spec.notes(), rank, &routing);
            sorted.map_err(|_| broken(rank))
        })
    }

    /// Whether every rank may have its rows, and has room for them behind what it gathered, `behind` bytes. All ranks find
    /// the same. Returns the bytes of this rank's rows.
    fn admit(&self, ep: &ExpertParallel, kind: CallKind, behind: u64) -> Result<u64, Error> {
        let (sizing, sizes) = (ep.fixed.sizing(kind), self.everyone.sizes());
        let meeting = ep.fixed.meeting(self.engine.calls, kind);
        meeting.within_budget(sizes)?;
        for ((rank, &rows), &free) in (0..).zip(&sizes.rows).zip(&self.engine.numbers.free) {
            let asked = behind.saturating_add(sizing.landing(rows).bytes());
            if asked > free || sizes.required[rank as usize] == u32::MAX {
                return Err(meeting.out_of_space(rank, asked, free));
            }
        }
        Ok(sizing.landing(sizes.rows[ep.rank() as usize]).bytes())
    }

    /// The layout that an exchange would have had, and what this rank copies.
    fn place(&mut self, ep: &mut ExpertParallel, kind: CallKind, gathered: &Inner) -> Result<Inner, Error> {
        let (fixed, me, top_k) = (std::sync::Arc::clone(&ep.fixed), ep.rank(), ep.spec().top_k);
        let (sizing, mut inner) = (fixed.sizing(kind), ep.spare_handle());
        let frame = Frame { sizing, ..fixed.frame() };
        let Gather { everyone, regroup, sources, blocks, block_weights, .. } = self;
        inner.required.clone_from(&everyone.sizes().required);
        let words = frame.sizing.words_out as usize;
        regroup.clear();
        everyone.each(&frame, (top_k, fixed.spec.max_tokens), |of, known, scratch| {
            let rank = of.paths.me();
            regroup.add(of, &known, me, sources[rank as usize].start);
            let Known { sorted, crossing, counts, sizes } = known;
            let own = (&*sorted, &*crossing);
            if rank == me {
                inner.layout.fill(of, own, top_k, counts, sizes);
                inner.dropped.clone_from(&sorted.dropped);
            }
            let nth = of.paths.relays().position(|relay| relay == me);
            blocks[rank as usize] = nth.map(|nth| scratch.block(of, own, (counts, sizes), nth));
            let weights = &mut block_weights[rank as usize];
            weights.clear();
            for bins in of.paths.served_by(me).iter().map(|&served| of.bins.of(served)) {
                weights.extend(sorted.notes_of(bins).iter().step_by(words).map(|&word| f32::from_bits(word)));
            }
        });
        if frame.paths.rails() {
            let forward = std::sync::Arc::make_mut(inner.forward.get_or_insert_default());
            forward.know(&frame, fixed.partial_bytes().is_some(), |source, _| {
                blocks[source as usize].take().unwrap_or_default()
            });
            if fixed.spec.weighted && fixed.partial_bytes().is_some() {
                let sources = frame.paths.sources();
                forward.weights.extend(sources.flat_map(|source| &block_weights[source as usize]));
            }
        }
        inner.offer = frame.sizing.offer(inner.layout.landed);
        ep.name(&mut inner, self.engine.calls.number());
        inner.report.clone_from(&gathered.report);
        let (forward, own) = (inner.forward.as_deref(), everyone.sorted(me));
        let wanted = Traffic::count(&frame, own, &inner.layout, forward, &mut ep.numbers.scratch);
        let Traffic { wanted, remote_ranks, remote_nodes, home_row_bytes, .. } = wanted;
        let regrouped = regroup.runs.iter().map(|run| u64::from(run.count) + u64::from(run.pad)).sum();
        let traffic = inner.report.traffic;
        inner.report.traffic =
            Traffic { wanted, remote_ranks, remote_nodes, home_row_bytes, regrouped, ..traffic };
        Ok(inner)
    }

    /// Copies this rank's rows to their places, by the operation that a dispatch does it with.
    fn copy(
        &self,
        ep: &mut ExpertParallel,
        kind: CallKind,
        (from, mut to): (&Extent, Extent),
        mut inner: Inner,
    ) -> Result<(Extent, Inner), Error> {
        let (me, sizing) = (ep.rank(), ep.fixed.sizing(kind));
        let Regroup { runs, rows, .. } = &self.regroup;
        let own = Operand::Rows {
            first: 0,
            count: runs.len() as u32,
            from: Place::Window { owner: me, window: WindowId::POOL },
            from_offset: from.offset(),
            index: Index::Listed,
            to: WindowId::POOL,
            base: to.offset(),
            row_bytes: sizing.row_bytes,
        };
        let own = if sizing.row_bytes > 0 { own } else { Operand::Empty };
        let operands = Operands { table: &[own], runs, rows, ..Operands::default() };
        let items = [Item { track: me, op: Op::PutRows { to: me, slot: Slot(0) } }];
        let stores = ep.stores(rows.len() as u64 * sizing.row_bytes);
        ep.host.take_moved();
        let copied = ep.host.run(&ep.fixed.port, &items, &operands, &mut Io::default(), stores);
        copied.map_err(|error| ep.fail(error))?;
        inner.report.moved.add(ep.host.take_moved());
        let landing = sizing.landing(inner.layout.landed);
        let notes = to.slice_mut::<u32>(landing.notes_at(), landing.notes as usize)?;
        self.regroup.write_notes(sizing.words_out as usize, notes);
        Ok((to, inner))
    }
}
