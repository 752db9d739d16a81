//! Plans one rank's part again and again, as a call does: tables are used again, and nothing is allocated.

use std::hint::black_box;
use std::time::{Duration, Instant};

use sidelane::error::PlanError;
use sidelane::gate::{Pattern, synthetic};
use sidelane::plan::{
    Bins, Counts, Crossing, ExpertMap, Forward, Frame, Layout, Mode, Notes, Order, RowLayout, Sizes, Sizing,
    Sorted,
};
use sidelane::topology::{NodeMap, Paths, Route};
use sidelane_core::schedule::{CallerTables, Control, RelayTables, Setting, WindowId};

/// A group, and what rank 0 of it plans.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    pub tokens: u32,
    pub top_k: u32,
    pub experts: u32,
    pub ranks: u32,
    pub per_node: u32,
    pub route: Route,
    pub layout: RowLayout,
}

/// Times in microseconds, the middle of all rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// A rank's own routing by bin.
    pub sort: f64,
    /// Counts of everybody added up, and the layout.
    pub place: f64,
    /// Operands of the rank's own program.
    pub fill: f64,
    /// What it hands on, if blocks of its sources are like its own: runs and operands.
    pub relay: f64,
    /// What all these tables hold.
    pub bytes: u64,
}

impl Cost {
    /// All that a rank does for itself.
    pub fn together(&self) -> f64 {
        self.sort + self.place + self.fill
    }
}

const CHUNKS: u8 = 4;
/// Of a row of 7168 bf16.
const ROW: u64 = 14_336;

/// Measures so many rounds.
///
/// # Errors
/// Sizes that cannot be planned.
pub fn measure(shape: &Shape, rounds: u32) -> Result<Cost, PlanError> {
    let &Shape { tokens, top_k, experts, ranks, per_node, route, layout } = shape;
    let map = ExpertMap::contiguous(experts, ranks)?;
    let nodes = NodeMap::from_labels(&(0..ranks).map(|rank| rank / per_node).collect::<Vec<_>>());
    let routing = synthetic(Pattern::Uniform, experts, top_k, tokens, 0, 0)?;
    let (bins, paths) = (Bins::of_layout(layout, &map, Order::Expert, &nodes), Paths::new(&nodes, route, 0));
    let notes = Notes::of(layout, Mode::Eager, false);
    let sizing = Sizing {
        row_bytes: ROW,
        home_bytes: ROW,
        words_out: notes.words(top_k),
        words_home: 1,
        partial_bytes: None,
    };
    let frame = Frame { bins: &bins, paths, align: 1, chunks: CHUNKS, sizing, mode: Mode::Eager };
    let control = Control::new(&paths, &bins, u64::from(tokens * top_k), sizing.note_bytes());
    let (chunks, far) = (CHUNKS, WindowId::POOL);
    let setting = Setting { paths, control: &control, sizing, chunks, parity: 0, far, fixed_rows: None };
    let (mut sorted, mut crossing, mut words) = (Sorted::default(), Crossing::default(), Vec::new());
    let (mut counts, mut sizes, mut layout) = (Counts::default(), Sizes::default(), Layout::default());
    let (mut forward, mut own) = (Forward::default(), CallerTables::new(paths, CHUNKS));
    let mut relayed = RelayTables::new(paths, CHUNKS);
    let mut laps: [Vec<Duration>; 4] = Default::default();
    for _ in 0..rounds {
        let begin = Instant::now();
        sorted.fill(&map, &bins, notes, 0, black_box(&routing))?;
        crossing.fill(&bins, &paths, &sorted);
        words.clone_from(&sorted.counts);
        crossing.staged(&paths, &mut words);
        laps[0].push(begin.elapsed());

        let begin = Instant::now();
        counts.clear(words.len() as u32);
        // What a rank adds up: its neighbours' counts, and a message of each other node.
        (0..per_node).for_each(|source| counts.add(0, source, &words));
        (1..nodes.nodes()).for_each(|_| counts.add_node(&[], black_box(&words)));
        sizes.fill(&bins, 1, &counts.total, None);
        layout.fill(&frame, (&sorted, &crossing), top_k, &counts, &sizes);
        laps[1].push(begin.elapsed());

        let begin = Instant::now();
        own.rows(&setting, black_box(&layout), true);
        laps[2].push(begin.elapsed());

        let blocks: Vec<_> = paths.sources().zip(layout.blocks.iter().cloned()).collect();
        let mut blocks = blocks.into_iter();
        let begin = Instant::now();
        if paths.rails() {
            forward.know(&frame, false, |_, _| blocks.next().map(|(_, block)| block).unwrap_or_default());
            relayed.forward(&setting, black_box(&forward), true);
        }
        laps[3].push(begin.elapsed());
    }
    let [sort, place, fill, relay] = laps.map(middle);
    let held = [sorted.held(), crossing.held(), counts.held(), layout.held(), own.held()];
    Ok(Cost { sort, place, fill, relay, bytes: held.iter().sum::<usize>() as u64 })
}

fn middle(mut laps: Vec<Duration>) -> f64 {
    laps.sort_unstable();
    laps[laps.len() / 2].as_secs_f64() * 1e6
}
