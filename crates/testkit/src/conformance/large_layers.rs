//! The layer of a large model between ranks of one device: cases next to those of the suite, as
//! many as one GPU can hold.
//!
//! Ranks as threads share the context of their GPU, and memory that is freed waits for all that the
//! context does: for the streams of peers that wait for this rank. So a rank makes its memory
//! before the first call and keeps it until the last.

use half::bf16;
use sidelane::dtype::with_element;
use sidelane::ep::Feature;
use sidelane::plan::Overflow;
use sidelane::{Dtype, World};
use sidelane_verify::reference::{self, Real};

use crate::TestError;
use crate::conformance::case::{Call, Case, Setting, Way};
use crate::conformance::rank_calls::{RankCalls, experts_copy};
use crate::conformance::tensors::{Device, Memory};
use crate::difference::Difference;
use crate::ep_settings::Settings;
use crate::machines::Machines;
use crate::timing::stats::Laps;

/// Four layers.
const LAYERS: &[Call] = &[
    Call::Dispatch,
    Call::Combine(0),
    Call::Forget,
    Call::Dispatch,
    Call::Combine(0),
    Call::Forget,
    Call::Dispatch,
    Call::Combine(0),
    Call::Forget,
    Call::Dispatch,
    Call::Combine(0),
];

/// A layer that is captured once, and launched with several inputs.
const GRAPH: &[Call] = &[Call::Capture];

/// The layer of a large model.
const LARGE: Case = Case {
    feature: Feature::RankMajor,
    name: "a large layer",
    group: &[],
    second: &[],
    experts: 64,
    top_k: 8,
    hidden: 7168,
    tokens: &[128, 0, 77, 128, 31],
    dtype: Dtype::Bf16,
    settings: &[],
    calls: LAYERS,
    ways: &Way::ALL,
};
const SMALL: Case = Case { experts: 16, top_k: 4, hidden: 40, tokens: &[9, 0, 5, 9, 2], ..LARGE };

/// So many rows as half of a rank's choices: some are dropped.
const HALF: &[Setting] = &[Setting::Budget(512, Overflow::Drop)];
const SMALL_HALF: &[Setting] = &[Setting::Budget(18, Overflow::Drop)];

/// A case of all ranks of a world.
#[derive(Clone, Copy, Debug)]
pub struct LayerCase {
    case: Case,
    way: Way,
    /// Whether each rank has two instances, whose calls take turns.
    two: bool,
}

/// Slots, exact sizes, a budget that drops: of the large layer or, to be quick, a small one.
pub fn modes(quick: bool) -> [(&'static str, LayerCase); 3] {
    let (case, half) = if quick { (SMALL, SMALL_HALF) } else { (LARGE, HALF) };
    let budget = Case { settings: half, ..case };
    [("", case, Way::Slots), ("exact sizes, ", case, Way::Exact), ("a budget, ", budget, Way::Budget)]
        .map(|(what, case, way)| (what, LayerCase { case, way, two: false }))
}

/// All layers between threads: what it is, and the node of each rank.
pub fn all(quick: bool) -> Vec<(String, Vec<u32>, LayerCase)> {
    let [(_, slots), exact, budget] = modes(quick);
    let graph = |one: LayerCase| LayerCase { case: Case { calls: GRAPH, ..one.case }, ..one };
    let of = |dtype| LayerCase { case: Case { dtype, ..slots.case }, ..slots };
    let flat = |what: String, ranks: u32, layer| (what, vec![0; ranks as usize], layer);
    let nodes = |what: &str, layer| (what.to_owned(), vec![0, 0, 1, 1], layer);
    let mut all: Vec<_> = [2, 4, 8].map(|ranks| flat(format!("{ranks} ranks"), ranks, slots)).into();
    all.push(flat("4 ranks, f16".to_owned(), 4, of(Dtype::F16)));
    all.push(flat("4 ranks, f32".to_owned(), 4, of(Dtype::F32)));
    all.extend([2, 4, 8].map(|ranks| flat(format!("{ranks} ranks in a graph"), ranks, graph(slots))));
    all.push(nodes("2 + 2 ranks, between nodes by memory of the host", slots));
    all.push(nodes("2 + 2 ranks, the same in a graph", graph(slots)));
    all.push(flat("two layers in turns".to_owned(), 4, LayerCase { two: true, ..slots }));
    for ranks in [2, 4, 8] {
        all.extend([exact, budget].map(|(what, mode)| flat(format!("{what}{ranks} ranks"), ranks, mode)));
    }
    let held = graph(LayerCase { way: Way::Graphs, ..budget.1 });
    all.push(flat("a budget, 4 ranks in a graph".to_owned(), 4, held));
    all
}

/// The layer of slots that is timed: as many tokens at each rank.
pub fn timed(quick: bool) -> Case {
    let full = Case { tokens: &[128], ..LARGE };
    if quick { Case { hidden: 512, tokens: &[16], ..full } } else { full }
}

/// Memory of a rank for these settings: rows for all choices of a rank's tokens, and more.
fn memory(settings: &Settings) -> Memory {
    let row = (settings.case.hidden * settings.dtype.size() + 64) as u64;
    let tokens = u64::from(settings.max_tokens) * row + (1 << 12);
    let choices = tokens * u64::from(settings.case.top_k) + (1 << 20);
    Memory { tensors: 32 * tokens, staging: 4 * choices, heap: 8 * choices }
}

/// Microseconds of dispatch, of combine, and of a launch of a graph with both, in so many rounds of
/// one rank on a device.
pub fn rounds(case: Case, world: &World, device: u32, count: u32) -> Result<[Vec<f64>; 3], TestError> {
    let group = world.all()?;
    let settings = case.settings(Way::Slots, &vec![0; group.size() as usize])?;
    let device = Device::new(Some(device), world.rank(), memory(&settings))?;
    let mut calls = RankCalls::<bf16>::build(&settings, &group, Some(&device), (0, 0))?;
    let seed = u64::from(world.rank());
    let tokens = reference::tokens(seed, settings.max_tokens, settings.case.hidden, case.top_k, case.experts);
    let mut layer = calls.layer(&tokens)?;
    let (ep, stream) = (&mut calls.ep, &device.stream);
    let (machines, mut laps) = (Machines::of(&group)?, [(); 3].map(|()| Laps::default()));
    // The first round warms up.
    for _ in 0..=count {
        group.gather(&[])?;
        let (rows, handle) = laps[0].time(|| {
            let dispatched = layer.start(ep)?.finish()?;
            ep.synchronize()?;
            Ok::<_, TestError>(dispatched)
        })?;
        let y = experts_copy(stream, &rows, &handle)?;
        ep.synchronize()?;
        group.gather(&[])?;
        laps[1].time(|| {
            layer.combine(ep, y, &handle)?;
            Ok::<_, TestError>(ep.synchronize()?)
        })?;
    }
    let graph = layer.capture(ep, stream)?.0;
    for _ in 0..=count {
        group.gather(&[])?;
        laps[2].time(|| {
            graph.launch(stream)?;
            Ok::<_, TestError>(ep.synchronize()?)
        })?;
    }
    // Memory is given back when no rank waits for this one: all have told their laps by then.
    let [dispatch, combine, graph] = laps.map(|laps| laps.rounds(&group, &machines));
    Ok([dispatch?, combine?, graph?].map(|samples| samples[1..].to_vec()))
}

impl LayerCase {
    /// Makes the calls of one rank on this device: what was done, or the first difference.
    pub fn carry_out(
        self,
        nodes: &[u32],
        world: &World,
        device: u32,
    ) -> Result<Result<String, Difference>, TestError> {
        with_element!(self.case.dtype, E => calls::<E>(self, nodes, world, device))
    }
}

fn calls<E: Real>(
    LayerCase { case, way, two }: LayerCase,
    nodes: &[u32],
    world: &World,
    device: u32,
) -> Result<Result<String, Difference>, TestError> {
    let (group, settings) = (world.all()?, case.settings(way, nodes)?);
    let device = Device::new(Some(device), world.rank(), memory(&settings))?;
    let calls = |part| RankCalls::<E>::build(&settings, &group, Some(&device), (0, part));
    let (mut first, mut second) = (calls(0)?, if two { Some(calls(1)?) } else { None });
    let done = match (&mut second, case.calls) {
        (Some(second), _) => {
            (0..2).try_for_each(|_| first.around(second))?;
            "two layers of each, a dispatch begun before the other one's combine".to_owned()
        }
        (None, calls) => {
            calls.iter().try_for_each(|&call| first.carry_out(call))?;
            let graph = "a graph's copies on one GPU are single ones, which its SMs do";
            if calls == GRAPH { graph.to_owned() } else { first.last_dispatch()? }
        }
    };
    let instances = [Some(first), second];
    instances.iter().flatten().try_for_each(RankCalls::end)?;
    // Memory is given back when no rank waits for this one.
    group.gather(&[])?;
    Ok(instances.into_iter().flatten().flat_map(|calls| calls.found).next().map_or(Ok(done), Err))
}
