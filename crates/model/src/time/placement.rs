//! Placement for the time model: the layouts and blocks of the simulated ranks.

use sidelane_core::error::PlanError;
use sidelane_core::gate::Routing;
use sidelane_core::plan::{
    Bins, Block, Counts, DispatchLayout, ExpertMap, InterNodeRows, PlanContext, PulledSums, RankSums,
    ReceiveMode, ReceiveSizes, RelayPermutation, RelayPlan, RowLayout, RowMetadata, RowSizes, SortedRouting,
    SumOrder,
};
use sidelane_core::schedule::ControlLayout;
use sidelane_core::topology::{NodeMap, Paths, Route};

use super::call_tasks::Lowering;
use super::events::{Machine, Program, Ring};
use super::{Engines, Executor, Hardware, Timing};

/// A dispatch and its combine: the shape of the question.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    /// Number of nodes, of equal size; ranks are numbered node by node.
    pub nodes: u32,
    /// Where experts live: as many on each rank.
    pub map: &'a ExpertMap,
    /// Decisions of every rank; or of those of the first node, which then stands for all.
    pub routings: &'a [Routing<'a>],
    /// In which order ranks see their rows.
    pub layout: RowLayout,
    /// How rows cross.
    pub route: Route,
    /// Order of sums: under [`Route::Pxn`] relays sum, unless it is [`SumOrder::Expert`]. Devices
    /// that sum by [`SumOrder::Rank`] do so at the rank of the experts, if partial sums are as long
    /// as rows.
    pub order: SumOrder,
    /// In how many parts a block goes to its relay; `None`: as many as the library chooses.
    pub chunks: Option<u8>,
    /// Bytes of a row that is sent, and of a returned one.
    pub row_bytes: u64,
    /// Bytes of a returned row.
    pub return_bytes: u64,
    /// Bytes of a partial sum, as it crosses.
    pub partial_bytes: u64,
    /// Whether row metadata (weights, choices) moves with the rows; otherwise it comes with the
    /// counts.
    pub metadata: bool,
}

impl Case<'_> {
    /// Rows of the busiest rank. Where one node represents all, rank i of every node has the rows
    /// of all ranks i from the first node's tokens.
    pub fn busiest_rows(&self) -> u64 {
        let mut rows = vec![0; self.routings.len()];
        for (source, routing) in (0..).zip(self.routings) {
            let chosen = routing.experts().iter().filter_map(|&expert| u32::try_from(expert).ok());
            for slot in chosen.filter_map(|expert| self.map.slot_for(source, expert)) {
                rows[self.map.rank_of(slot) as usize % self.routings.len()] += 1;
            }
        }
        rows.into_iter().max().unwrap_or(0)
    }
}

/// A [`Case`], placed as its ranks would place it on a machine.
#[derive(Debug)]
pub struct Placed {
    pub(super) ring: Ring,
    pub(super) nodes: NodeMap,
    pub(super) route: Route,
    pub(super) bins: Bins,
    /// A rank has one row of a token, however many of its experts the token chose.
    pub(super) per_rank: bool,
    /// The device plans dispatches: the host counts, and lays out bins.
    pub(super) device_plans: bool,
    pub(super) sizing: RowSizes,
    pub(super) control: ControlLayout,
    pub(super) chunks: u8,
    pub(super) metadata: bool,
    pub(super) hardware: Hardware,
    pub(super) top_k: u32,
    /// Of each rank that decides: rows that it sends for each bin, then what relays need to know.
    words: Vec<Vec<u32>>,
    pub(super) ranks: Vec<Rank>,
}

/// Placement of one rank.
#[derive(Debug)]
pub(super) struct Rank {
    pub layout: DispatchLayout,
    pub forward: RelayPlan,
    pub counts: Counts,
    pub sizes: ReceiveSizes,
    /// Where engines relay: the first of the layout's runs to arrivals.
    pub arrivals: Option<u32>,
}

/// Rows that one rank sends, before any counts arrive.
struct SentRows {
    sorted: SortedRouting,
    crossing: InterNodeRows,
    words: Vec<u32>,
}

impl Placed {
    /// Places a case as the executor of a machine would.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] unless there is a routing for every rank or, where ranks do not
    /// share the cores of a host, for every rank of one node, nodes and ranks have the same share
    /// of ranks and experts, and rows are a multiple of 16 bytes; and every error of a routing or
    /// of the [`Hardware`](Hardware::check).
    pub fn new(case: &Case, hardware: &Hardware) -> Result<Self, PlanError> {
        hardware.check()?;
        let executor = hardware.executor;
        let ring = ring_of(case, hardware)?;
        let labels: Vec<u32> = (0..ring.ranks()).map(|rank| rank / ring.members).collect();
        let nodes = NodeMap::from_labels(&labels);
        let paths = Paths::new(&nodes, case.route, 0);
        let crosses = case.route == Route::Pxn && paths.is_multi_node();
        // Engines that relay copy runs to arrivals.
        let arrive = executor == Executor::Device && crosses;
        let bins = Bins::of_layout(case.layout, case.map, case.order, &nodes);
        let top_k = case.routings.iter().map(Routing::top_k).max().unwrap_or(1);
        let tokens = case.routings.iter().map(Routing::tokens).max().unwrap_or(0);
        // On a device each rank sums a token's rows first, or each relay those of its node, if that
        // makes no longer rows. Rank-major a rank has one row.
        let device = executor == Executor::Device;
        let summed = device && case.partial_bytes == case.return_bytes && top_k > 1;
        let by_rank = summed && case.order == SumOrder::Rank;
        let rank_sums = by_rank && !case.layout.is_per_rank() && case.map.ranks() > 1;
        let by_node = summed && case.order == SumOrder::Node;
        let sums = crosses && if device { by_node } else { case.order.has_partials() };
        let metadata = match rank_sums {
            true => RowMetadata::Summed,
            false => RowMetadata::of(case.layout, ReceiveMode::Exact, false),
        };
        let sizing = RowSizes {
            row_bytes: case.row_bytes,
            return_bytes: case.return_bytes,
            words_out: metadata.words(top_k),
            return_words: 1,
            partial_bytes: sums.then_some(case.partial_bytes),
            rank_sums,
            pulled_bytes: PulledSums::CHUNK_BYTES,
        };
        let choices = u64::from(tokens) * u64::from(top_k);
        let control =
            ControlLayout::new(&paths, &bins, choices, sizing.metadata_bytes()).with_rank_sums(rank_sums);
        let all_active = case.map.active().iter().all(|&active| active);
        let counts_suffice = !paths.is_multi_node() && all_active && !rank_sums;
        let mut placed = Placed {
            ring,
            nodes: nodes.clone(),
            route: case.route,
            bins,
            per_rank: case.layout.is_per_rank(),
            device_plans: executor == Executor::Device && counts_suffice,
            sizing,
            control,
            chunks: case.chunks.unwrap_or(match executor {
                Executor::Host => Block::CHUNKS,
                Executor::Device => Block::chunks_for_engines(u64::from(tokens) * case.row_bytes),
            }),
            metadata: case.metadata,
            hardware: hardware.clone(),
            top_k,
            words: Vec::new(),
            ranks: Vec::new(),
        };
        let mut own = placed.sorted(case, metadata)?;
        placed.words = own.iter_mut().map(|own| std::mem::take(&mut own.words)).collect();
        let lay_out = |(me, own)| placed.lay_out(me, own, arrive);
        let ranks = (0..).zip(&mut own).map(lay_out).collect();
        placed.ranks = ranks;
        for me in 0..ring.simulated() {
            placed.ranks[me as usize].forward = placed.forward(me, sums, arrive);
        }
        Ok(placed)
    }

    /// Has other engines make the copies of the same placement.
    ///
    /// # Errors
    /// As [`Hardware::check`]; nothing is changed then.
    pub fn set_engines(&mut self, engines: &Engines) -> Result<(), PlanError> {
        let hardware = Hardware { engines: engines.clone(), ..self.hardware.clone() };
        hardware.check()?;
        self.hardware = hardware;
        Ok(())
    }

    /// Times a dispatch.
    pub fn dispatch(&self) -> Timing {
        self.timed(Lowering::dispatch)
    }

    /// Times a combine: rows back to their tokens. The gradient of a dispatch is the same; weight
    /// gradients return in a call of their own, with rows of a word for each weight.
    pub fn combine(&self) -> Timing {
        self.timed(Lowering::combine)
    }

    /// Times the gradient of a combine: those of tokens to the rows that were summed, along the
    /// layout of the dispatch, in rows as they return. Nothing is counted or placed.
    pub fn combine_backward(&self) -> Timing {
        self.timed(Lowering::combine_backward)
    }

    fn timed<'a>(&'a self, program: fn(Lowering<'a>) -> Program) -> Timing {
        let mut machine = Machine::new(self.ring, &self.hardware);
        for me in 0..self.ring.simulated() {
            machine.load(me, program(Lowering::new(self, me)));
        }
        machine.run()
    }

    pub(super) fn paths(&self, me: u32) -> Paths<'_> {
        Paths::new(&self.nodes, self.route, me)
    }

    pub(super) fn frame(&self, me: u32) -> PlanContext<'_> {
        let Placed { bins, chunks, sizing, .. } = self;
        let (paths, chunks, sizing) = (self.paths(me), *chunks, *sizing);
        PlanContext { bins, paths, align: 1, chunks, sizing, mode: ReceiveMode::Exact }
    }

    fn sorted(&self, case: &Case, metadata: RowMetadata) -> Result<Vec<SentRows>, PlanError> {
        let sort = |(me, routing): (u32, &Routing)| {
            let (mut sorted, mut crossing) = (SortedRouting::default(), InterNodeRows::default());
            sorted.fill(case.map, &self.bins, metadata, me, routing)?;
            crossing.fill(&self.bins, &self.paths(me), &sorted);
            let mut words = sorted.counts.clone();
            crossing.staged(&self.paths(me), &mut words);
            Ok(SentRows { sorted, crossing, words })
        };
        (0..).zip(case.routings).map(sort).collect()
    }

    fn lay_out(&self, me: u32, SentRows { sorted, crossing, .. }: &mut SentRows, arrive: bool) -> Rank {
        let frame = self.frame(me);
        let mut rank = Rank::empty();
        let (bins, mut turned) = (self.bins.count() as usize, Vec::new());
        rank.counts.clear(self.words[0].len() as u32);
        for source in 0..self.ring.ranks() {
            let (model_rank, by) = self.ring.represented_by(source);
            let (of_bins, staged) = self.words[model_rank as usize].split_at(bins);
            turned.clear();
            turned.extend(self.ring.turned(of_bins, by));
            turned.extend(self.ring.turned(staged, by));
            rank.counts.add(me, source, &turned);
        }
        rank.sizes.fill(&self.bins, 1, &rank.counts.total, None);
        let Rank { layout, counts, sizes, arrivals, .. } = &mut rank;
        let mut own = RelayPermutation::default();
        if arrive {
            own.arrange(&frame, sorted, crossing);
            own.pack(&frame, sorted, crossing);
        }
        let mut rank_sums = RankSums::default();
        if frame.sizing.rank_sums {
            rank_sums.number(&frame, sorted, self.top_k, (counts, sizes));
        }
        layout.fill(&frame, (&*sorted, &*crossing), self.top_k, counts, sizes);
        if frame.sizing.rank_sums {
            rank_sums.describe(&frame, layout);
        }
        if arrive {
            own.add_runs(&frame, sorted, layout, (counts, sizes));
            *arrivals = Some(own.first_run);
        } else if self.hardware.executor == Executor::Device {
            layout.pack(sorted, &sorted.starts);
        }
        rank
    }

    /// Knowledge of a rank's relay: the blocks of its sources, each as the rank that represents it
    /// has it.
    fn forward(&self, me: u32, sums: bool, arrive: bool) -> RelayPlan {
        let block = |source: u32, nth: usize| -> Block {
            let (model_rank, _) = self.ring.represented_by(source);
            self.ranks[model_rank as usize].layout.blocks[nth].clone()
        };
        let mut forward = RelayPlan::default();
        if arrive {
            let paths = self.paths(me);
            let nth = |source| paths.of(source).relays().take_while(|&relay| relay != me).count();
            forward.blocks = paths.sources().map(|source| block(source, nth(source))).collect();
            if sums {
                let PlanContext { chunks, sizing, .. } = self.frame(me);
                let most = PulledSums::most_chunks(chunks, paths);
                forward.fill_pulled(&self.bins, paths.served_by(me), most, &sizing);
            }
        } else {
            forward.know(&self.frame(me), sums, block);
        }
        forward
    }
}

impl Placed {
    /// Rows of a rank that come from other nodes over relays: the first of each run, and how many.
    pub(super) fn landed_from_other_nodes(&self, me: u32) -> Vec<(u32, u32)> {
        let (paths, begin) = (self.paths(me), &self.ranks[me as usize].sizes.begin);
        let mut landed = Vec::new();
        for bin in self.bins.of(me) {
            let mut next = begin[bin as usize];
            for source in 0..self.ring.ranks() {
                let rows = self.sent(source, bin);
                if !paths.same_node(source) {
                    landed.push((next, rows));
                }
                next += rows;
            }
        }
        landed
    }

    /// Sums of tokens' rows that a rank makes.
    pub(super) fn rank_sums_at(&self, me: u32) -> u64 {
        let sums = |source: u32| {
            let (model_rank, by) = self.ring.represented_by(source);
            let rank_sums = &self.ranks[model_rank as usize].layout.rank_sums;
            u64::from(rank_sums[self.ring.turned_back(me, by) as usize].count)
        };
        (0..self.ring.ranks()).map(sums).sum()
    }

    /// Rows that a rank sends for a bin.
    fn sent(&self, source: u32, bin: u32) -> u32 {
        let ((model_rank, by), bins) = (self.ring.represented_by(source), self.bins.count());
        let turned_back = (bin + bins - bins / self.ring.nodes * by) % bins;
        self.words[model_rank as usize][turned_back as usize]
    }
}

impl Rank {
    fn empty() -> Self {
        Rank {
            layout: DispatchLayout::default(),
            forward: RelayPlan::default(),
            counts: Counts::default(),
            sizes: ReceiveSizes::default(),
            arrivals: None,
        }
    }
}

fn ring_of(case: &Case, hardware: &Hardware) -> Result<Ring, PlanError> {
    let bad =
        |parameter, seen: u32, expected| PlanError::BadParameter { parameter, seen: seen.into(), expected };
    let (ranks, given) = (case.map.ranks(), case.routings.len() as u32);
    if case.nodes == 0 || !ranks.is_multiple_of(case.nodes) {
        return Err(bad("nodes", case.nodes, "a number that divides that of the ranks"));
    }
    let members = ranks / case.nodes;
    if given != ranks && given != members {
        return Err(bad("routings", given, "one for every rank, or for every rank of a node"));
    }
    let even = |rank| case.map.slots_of(rank).len() == case.map.slots_of(0).len();
    let whole = given == ranks;
    if !whole && !(0..ranks).all(even) {
        return Err(bad("experts", case.map.slots(), "as many on each rank, where one node stands for all"));
    }
    if !whole && hardware.executor == Executor::Host && hardware.host.cores > 0 {
        return Err(bad("routings", given, "one for every rank, where ranks share cores"));
    }
    if case.chunks == Some(0) {
        return Err(bad("chunks", 0, "1 or more"));
    }
    let sizes = [("row bytes", case.row_bytes), ("return bytes", case.return_bytes)];
    if let Some(&(parameter, seen)) = sizes.iter().find(|(_, n)| *n == 0 || !n.is_multiple_of(16)) {
        return Err(PlanError::BadParameter { parameter, seen, expected: "a multiple of 16" });
    }
    Ok(Ring { nodes: case.nodes, members, whole })
}
