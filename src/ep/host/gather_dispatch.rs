//! Dispatch by all-gather: every token to every rank with its choices, then each rank's own rows to
//! their places.
//!
//! ```text
//!   all-gather   x, choices, weights  ==>  | rows of rank 0 | rows of rank 1 | ... |  choices of all
//!   place        from everybody's choices, what the counts of an exchange would have said: and the same layout
//!   regroup      gathered rows  -->  rows of my experts
//! ```
//!
//! The all-gather is a dispatch by an engine of its own, which is built so that every row goes to
//! every rank. All ranks know all choices, so each computes the layout of an exchange by itself,
//! with that of its relays. So calls along the handle are those of an exchange and need no other
//! code. In particular, combine is the reduce-scatter of the outputs of each rank, without the
//! zeros of ranks that have no expert of a token.

use std::ops::Range;
use std::sync::Arc;

use super::call::{Flight, Workspace};
use super::host_exchange::HostExchange;
use super::host_results::Inner;
use crate::dtype::PartialDtype;
use crate::ep::builder::Spec;
use crate::ep::state::EpState;
use crate::error::{CallError, CallKind, Cause, Error};
use crate::exec::{StepExecutor, Until, drive};
use crate::gate::Routing;
use crate::lane::Io;
use crate::memory::Extent;
use crate::plan::{
    Block, ExpertMap, GroupRouting, LocalPermutation, PlanContext, RankRouting, ReceiveMode, RowLayout,
    Strategy, SumOrder, Traffic,
};
use crate::schedule::call_program::{CallMachine, Part, RankPrograms, Role, StageId, Work};
use crate::schedule::{Operand, Operands};
use crate::world::Group;

/// State of a dispatch by all-gather, beyond that of the instance it serves.
pub(in crate::ep) struct Gather {
    /// Gathers.
    pub engine: HostExchange,
    everyone: GroupRouting,
    regroup: LocalPermutation,
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
            strategy: Strategy::AllToAll,
            map: Arc::new(ExpertMap::contiguous(group.size(), group.size())?),
            sum_order: SumOrder::default(),
            partial_dtype: PartialDtype::F32,
            align: 1,
            weighted: false,
            layout: RowLayout::default(),
            mode: ReceiveMode::Exact,
            record: None,
            ..of.clone()
        };
        let ranks = group.size() as usize;
        Ok(Gather {
            engine: HostExchange::new(group, spec)?,
            everyone: GroupRouting::default(),
            regroup: LocalPermutation::default(),
            sources: Vec::new(),
            ids: Vec::new(),
            weights: Vec::new(),
            blocks: vec![None; ranks],
            block_weights: vec![Vec::new(); ranks],
        })
    }

    /// Steps after the gathering dispatch of an instance: its rows, and their layout as an exchange
    /// would have made it.
    ///
    /// # Errors
    /// The same on every rank: [`CallError`],
    /// [`MemoryError`](crate::error::MemoryError). Those that end the world.
    pub fn regroup(
        &mut self,
        fixed: &EpState,
        programs: &RankPrograms,
        space: &mut Workspace,
        (flight, weights): (&mut Flight, &[f32]),
    ) -> Result<(), Error> {
        let kind = flight.kind();
        let Some(extent) = &mut flight.landing else { return Ok(()) };
        let gathered = std::mem::replace(&mut flight.made, space.spare_handle());
        let chunk = self.engine.fixed.sizing(kind).landing(gathered.layout.landed);
        let mut call = Regrouping {
            gather: &mut *self,
            fixed,
            programs,
            space,
            kind,
            weights,
            gathered: &gathered,
            behind: chunk.bytes(),
            words: (chunk.metadata_at(), chunk.metadata as usize),
            extent: &mut *extent,
            made: &mut flight.made,
        };
        let driven = drive(&mut CallMachine::default(), &programs.regroup, &mut call, Until::End);
        // The gathered rows and their layout have served.
        let _ = self.engine.space.spare.push(gathered);
        if let Some(refusal) = driven.map_err(|error| fixed.fail(error))? {
            flight.landing = None;
            return Err(refusal);
        }
        extent.skip(chunk.bytes());
        Ok(())
    }

    /// Sorts the choices of all ranks. Their senders checked them, so an error found here arose in
    /// transit.
    fn sort(&mut self, fixed: &EpState, words: &[u32]) -> Result<(), Cause> {
        let top_k = fixed.spec.top_k as usize;
        let metadata = words.chunks_exact(1 + 2 * top_k);
        let broken = |rank: u32| Cause::Protocol { rank: fixed.lanes.world_ranks[rank as usize] };
        self.sources.clear();
        let mut first = 0;
        for rank in 0..fixed.lanes.ranks() {
            let end = first + metadata.clone().skip(first).take_while(|words| words[0] == rank + 1).count();
            self.sources.push(first as u32..end as u32);
            first = end;
        }
        if first != metadata.len() {
            return Err(broken(fixed.lanes.rank));
        }
        let Gather { everyone, sources, ids, weights, .. } = self;
        everyone.sort(&fixed.frame(), fixed.spec.top_k, |rank, sorted| {
            let Range { start, end } = sources[rank as usize].clone();
            ids.clear();
            weights.clear();
            for words in metadata.clone().skip(start as usize).take((end - start) as usize) {
                let (experts, of_them) = words[1..].split_at(top_k);
                ids.extend(experts.iter().map(|&id| (id as i32).wrapping_sub(1)));
                weights.extend(of_them.iter().map(|&word| f32::from_bits(word)));
            }
            let routing = Routing::new(top_k as u32, &ids[..], &weights[..]).map_err(|_| broken(rank))?;
            let sorted = sorted.fill(&fixed.spec.map, &fixed.bins, fixed.spec.metadata(), rank, &routing);
            sorted.map_err(|_| broken(rank))
        })
    }

    /// Whether every rank may have its rows, and has room for them behind what it gathered,
    /// `behind` bytes. All ranks find the same. Returns the bytes of this rank's rows.
    fn admit(&self, fixed: &EpState, kind: CallKind, behind: u64) -> Result<u64, Error> {
        let (sizing, sizes) = (fixed.sizing(kind), self.everyone.sizes());
        let agreement = fixed.agreement(self.engine.space.calls, kind);
        agreement.within_budget(sizes)?;
        for ((rank, &rows), &free) in (0..).zip(&sizes.rows).zip(&self.engine.space.numbers.free) {
            let asked = behind.saturating_add(sizing.landing(rows).bytes());
            if asked > free || sizes.required[rank as usize] == u32::MAX {
                return Err(agreement.out_of_space(rank, asked, free));
            }
        }
        Ok(sizing.landing(sizes.rows[fixed.lanes.rank as usize]).bytes())
    }

    /// The layout that an exchange would have had, and what this rank copies.
    fn place(
        &mut self,
        fixed: &EpState,
        space: &mut Workspace,
        kind: CallKind,
        (inner, gathered, weights): (&mut Inner, &Inner, &[f32]),
    ) {
        let (sizing, me, top_k) = (fixed.sizing(kind), fixed.lanes.rank, fixed.spec.top_k);
        let frame = PlanContext { sizing, ..fixed.frame() };
        let Gather { everyone, regroup, sources, blocks, block_weights, .. } = self;
        inner.required.clone_from(&everyone.sizes().required);
        let words = frame.sizing.words_out as usize;
        regroup.clear();
        everyone.each(&frame, (top_k, fixed.spec.max_tokens), |of, known, scratch| {
            let rank = of.paths.me();
            regroup.add(of, &known, me, sources[rank as usize].start);
            let RankRouting { sorted, crossing, counts, sizes } = known;
            let own = (&*sorted, &*crossing);
            if rank == me {
                inner.layout.fill(of, own, top_k, counts, sizes);
                inner.dropped.clone_from(&sorted.dropped);
                inner.dropped_weight = sorted.dropped_weight(weights);
            }
            let nth = of.paths.relays().position(|relay| relay == me);
            blocks[rank as usize] = nth.map(|nth| scratch.block(of, own, (counts, sizes), nth));
            let of_block = &mut block_weights[rank as usize];
            of_block.clear();
            for bins in of.paths.served_by(me).iter().map(|&served| of.bins.of(served)) {
                of_block
                    .extend(sorted.metadata_of(bins).iter().step_by(words).map(|&word| f32::from_bits(word)));
            }
        });
        if frame.paths.is_multi_node() {
            let forward = Arc::make_mut(inner.forward.get_or_insert_default());
            forward.know(&frame, fixed.partial_bytes().is_some(), |source, _| {
                blocks[source as usize].take().unwrap_or_default()
            });
            if fixed.spec.weighted && fixed.partial_bytes().is_some() {
                let sources = frame.paths.sources();
                forward.weights.extend(sources.flat_map(|source| &block_weights[source as usize]));
            }
        }
        inner.offer = frame.sizing.offer(inner.layout.landed);
        inner.name(&fixed.spec, (space.instance, self.engine.space.calls.number()));
        inner.moves = gathered.moves;
        let (forward, own) = (inner.forward.as_deref(), everyone.sorted(me));
        let wanted = Traffic::count(&frame, own, &inner.layout, forward, &mut space.numbers.scratch);
        let traffic = &mut inner.moves.traffic;
        (traffic.logical, traffic.combine_row_bytes) = (wanted.logical, wanted.combine_row_bytes);
        (traffic.remote_ranks, traffic.remote_nodes) = (wanted.remote_ranks, wanted.remote_nodes);
        traffic.regrouped = regroup.runs.iter().map(|run| u64::from(run.count) + u64::from(run.pad)).sum();
    }
}

/// A rank that has gathered the tokens of all, amid what follows.
struct Regrouping<'e> {
    gather: &'e mut Gather,
    fixed: &'e EpState,
    programs: &'e RankPrograms,
    space: &'e mut Workspace,
    kind: CallKind,
    weights: &'e [f32],
    gathered: &'e Inner,
    /// Bytes of what was gathered: this rank's rows go behind it.
    behind: u64,
    /// Where the choices of all lie, and how many words they are.
    words: (u64, usize),
    extent: &'e mut Extent,
    made: &'e mut Inner,
}

impl StepExecutor for Regrouping<'_> {
    fn run(&mut self, _: Role, stage: StageId, part: Part) -> Result<(), Error> {
        let (from, row_bytes) = (self.extent.offset(), self.fixed.sizing(self.kind).row_bytes);
        let LocalPermutation { runs, rows, .. } = &self.gather.regroup;
        let items = self.programs.stages.items(stage, part);
        let (me, places) = (self.fixed.lanes.rank, (from, from + self.behind));
        let table = &[Operand::regroup(me, runs.len() as u32, row_bytes, places)];
        let operands = Operands { table, runs, rows, ..Operands::default() };
        let stores = self.fixed.stores(rows.len() as u64 * row_bytes);
        let host = &mut self.space.host;
        host.take_counts();
        host.run(&self.fixed.port, items, &operands, &mut Io::default(), stores)?;
        self.made.moves.moved += host.take_counts();
        Ok(())
    }

    fn compute(&mut self, _: Role, work: Work) -> Result<(), Error> {
        let Regrouping { gather, fixed, space, kind, made, extent, .. } = self;
        match work {
            Work::SortAll => {
                let (at, count) = self.words;
                gather.sort(fixed, extent.slice::<u32>(at, count)?)?;
            }
            Work::PlaceAll => gather.place(fixed, space, *kind, (made, self.gathered, self.weights)),
            Work::Metadata => {
                let sizing = fixed.sizing(*kind);
                let landing = sizing.landing(made.layout.landed);
                let at = self.behind + landing.metadata_at();
                let words = extent.slice_mut::<u32>(at, landing.metadata as usize)?;
                gather.regroup.write_metadata(sizing.words_out as usize, words);
                made.receive(fixed, words, self.weights);
            }
            _ => return Err(CallError::unknown_step(*kind, &work).into()),
        }
        Ok(())
    }

    /// Ranks have agreed on the gathered data.
    fn agree(&mut self, _: Role) -> Result<(), Error> {
        Ok(())
    }

    fn admit(&mut self, _: Role) -> Result<(), Error> {
        let rows = self.gather.admit(self.fixed, self.kind, self.behind)?;
        self.extent.trim(self.behind + rows);
        Ok(())
    }
}
