//! What a rank plans for its own part of a dispatch, step by step, to be timed.
//!
//! ```text
//!   sort    own routing by bin                           before counts are exchanged
//!   place   counts of all, and the layout that follows
//!   fill    operands of the own program
//!   relay   runs and operands of what it relays, if blocks of its sources are like its own
//! ```

use std::hint::black_box;
use std::time::Instant;

use sidelane::error::PlanError;
use sidelane::gate::{Pattern, Routing, synthetic};
use sidelane::plan::{
    Bins, Block, Counts, DispatchLayout, ExpertMap, InterNodeRows, PlanContext, PulledSums, ReceiveMode,
    ReceiveSizes, RelayPlan, RowLayout, RowMetadata, RowSizes, SortedRouting, SumOrder,
};
use sidelane::topology::{NodeMap, Paths, Route};
use sidelane_core::schedule::{CallerTables, ControlLayout, FillContext, RelayTables, WindowId};

use super::stats::median;

/// A group, and what rank 0 of it plans.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Source of the decisions.
    pub pattern: Pattern,
    /// Of the rank.
    pub tokens: u32,
    /// Choices of each.
    pub top_k: u32,
    /// Of all ranks.
    pub experts: u32,
    /// Of the group.
    pub ranks: u32,
    /// Ranks of a node.
    pub per_node: u32,
    /// Of rows to other nodes.
    pub route: Route,
    /// Order of received rows.
    pub layout: RowLayout,
}

const CHUNKS: u8 = Block::CHUNKS;
/// Of a row of 7168 bf16.
const ROW: u64 = 14_336;

/// Plans of rank 0. Each step needs those before it.
pub struct Planning {
    shape: Shape,
    map: ExpertMap,
    nodes: NodeMap,
    routing: Routing<'static>,
    bins: Bins,
    metadata: RowMetadata,
    sizing: RowSizes,
    control: ControlLayout,
    sorted: SortedRouting,
    crossing: InterNodeRows,
    counts: Counts,
    sizes: ReceiveSizes,
    layout: DispatchLayout,
    forward: RelayPlan,
    own: CallerTables,
    relayed: RelayTables,
}

impl Planning {
    /// Of a group.
    ///
    /// # Errors
    /// Sizes that cannot be planned.
    pub fn new(shape: Shape) -> Result<Self, PlanError> {
        let Shape { pattern, tokens, top_k, experts, ranks, per_node, route, layout } = shape;
        let map = ExpertMap::contiguous(experts, ranks)?;
        let nodes = NodeMap::from_labels(&(0..ranks).map(|rank| rank / per_node).collect::<Vec<_>>());
        let bins = Bins::of_layout(layout, &map, SumOrder::Expert, &nodes);
        let metadata = RowMetadata::of(layout, ReceiveMode::Exact, false);
        let sizing = RowSizes {
            row_bytes: ROW,
            return_bytes: ROW,
            words_out: metadata.words(top_k),
            return_words: 1,
            partial_bytes: None,
            rank_sums: false,
            pulled_bytes: PulledSums::CHUNK_BYTES,
        };
        let paths = Paths::new(&nodes, route, 0);
        Ok(Planning {
            shape,
            routing: synthetic(pattern, experts, top_k, tokens, 0, 0)?,
            control: ControlLayout::new(&paths, &bins, u64::from(tokens * top_k), sizing.metadata_bytes()),
            sorted: SortedRouting::default(),
            crossing: InterNodeRows::default(),
            counts: Counts::default(),
            sizes: ReceiveSizes::default(),
            layout: DispatchLayout::default(),
            forward: RelayPlan::default(),
            own: CallerTables::new(paths, CHUNKS),
            relayed: RelayTables::new(paths, CHUNKS),
            map,
            nodes,
            bins,
            metadata,
            sizing,
        })
    }

    /// Sorts the rank's own routing, and gives the counts that it tells others.
    ///
    /// # Errors
    /// A routing that cannot be placed.
    pub fn sort(&mut self) -> Result<Vec<u32>, PlanError> {
        let paths = Paths::new(&self.nodes, self.shape.route, 0);
        self.sorted.fill(&self.map, &self.bins, self.metadata, 0, black_box(&self.routing))?;
        self.crossing.fill(&self.bins, &paths, &self.sorted);
        let mut words = self.sorted.counts.clone();
        self.crossing.staged(&paths, &mut words);
        Ok(words)
    }

    /// Adds up counts, as if all ranks told the same, and lays out.
    pub fn place(&mut self, words: &[u32]) {
        let Planning { nodes, bins, sorted, crossing, counts, sizes, layout, .. } = self;
        let Shape { top_k, per_node, route, .. } = self.shape;
        let context = context(bins, Paths::new(nodes, route, 0), self.sizing);
        counts.clear(words.len() as u32);
        // Counts that a rank adds up: those of its local peers, and a message of each other node.
        (0..per_node).for_each(|source| counts.add(0, source, words));
        (1..nodes.nodes()).for_each(|_| counts.add_node(&[], black_box(words)));
        sizes.fill(bins, 1, &counts.total, None);
        layout.fill(&context, (sorted, crossing), top_k, counts, sizes);
    }

    /// Fills the operands of the rank's own program.
    pub fn fill(&mut self) {
        let paths = Paths::new(&self.nodes, self.shape.route, 0);
        self.own.rows(&setting(paths, &self.control, self.sizing), black_box(&self.layout), true);
    }

    /// Blocks of the sources that the rank relays for.
    pub fn blocks(&self) -> Vec<Block> {
        let sources = Paths::new(&self.nodes, self.shape.route, 0).sources();
        sources.zip(&self.layout.blocks).map(|(_, block)| block.clone()).collect()
    }

    /// Plans relayed rows, where there are several nodes.
    pub fn relay(&mut self, blocks: Vec<Block>) {
        let Planning { nodes, bins, control, forward, relayed, .. } = self;
        let paths = Paths::new(nodes, self.shape.route, 0);
        if !paths.is_multi_node() {
            return;
        }
        let mut blocks = blocks.into_iter();
        let context = context(bins, paths, self.sizing);
        forward.know(&context, false, |_, _| blocks.next().unwrap_or_default());
        relayed.forward(&setting(paths, control, self.sizing), black_box(forward), true);
    }

    /// Bytes that tables hold.
    pub fn memory_usage(&self) -> usize {
        self.sorted.memory_usage()
            + self.crossing.memory_usage()
            + self.counts.memory_usage()
            + self.layout.memory_usage()
            + self.own.memory_usage()
    }
}

/// Times in microseconds, the middle of all rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// A rank's own routing by bin.
    pub sort: f64,
    /// The sum of all ranks' counts, and the layout.
    pub place: f64,
    /// Operands of the rank's own program.
    pub fill: f64,
    /// Its relayed rows, if blocks of its sources are like its own: runs and operands.
    pub relay: f64,
    /// Memory of the tables.
    pub bytes: u64,
}

impl Cost {
    /// All that a rank does for itself.
    pub fn together(&self) -> f64 {
        self.sort + self.place + self.fill
    }
}

/// Measures so many rounds.
///
/// # Errors
/// Sizes that cannot be planned.
pub fn measure(shape: &Shape, rounds: u32) -> Result<Cost, PlanError> {
    let (mut planning, mut laps) = (Planning::new(*shape)?, [(); 4].map(|()| Vec::new()));
    for _ in 0..rounds {
        let mut lap = |step: usize, begin: Instant| laps[step].push(begin.elapsed().as_secs_f64() * 1e6);
        let begin = Instant::now();
        let words = planning.sort()?;
        lap(0, begin);
        let begin = Instant::now();
        planning.place(&words);
        lap(1, begin);
        let begin = Instant::now();
        planning.fill();
        lap(2, begin);
        let blocks = planning.blocks();
        let begin = Instant::now();
        planning.relay(blocks);
        lap(3, begin);
    }
    let [sort, place, fill, relay] = laps.map(|mut laps: Vec<f64>| median(&mut laps));
    Ok(Cost { sort, place, fill, relay, bytes: planning.memory_usage() as u64 })
}

fn context<'a>(bins: &'a Bins, paths: Paths<'a>, sizing: RowSizes) -> PlanContext<'a> {
    PlanContext { bins, paths, align: 1, chunks: CHUNKS, sizing, mode: ReceiveMode::Exact }
}

fn setting<'a>(paths: Paths<'a>, control: &'a ControlLayout, sizing: RowSizes) -> FillContext<'a> {
    let (chunks, far) = (CHUNKS, WindowId::POOL);
    FillContext { paths, control, sizing, chunks, parity: 0, far, metadata: None }
}
