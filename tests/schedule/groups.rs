//! Groups and scripts that the tests of schedules share.
#![allow(dead_code, reason = "each test program uses a part of this")]

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sidelane_core::gate::Routing;
use sidelane_core::plan::{ExpertMap, Overflow, ReceiveMode, RowLayout, Strategy, SumOrder};
use sidelane_core::schedule::ReturnParts;
use sidelane_core::topology::{NodeMap, Paths, Route};
use sidelane_verify::unroll::{Call, ProofScenario, Relays, SeededBug, TokenPlace, UnrolledProgram};

pub const ROWS: ReturnParts = ReturnParts { rows: true, weights: false };
pub const WEIGHTS: ReturnParts = ReturnParts { rows: false, weights: true };
pub const BOTH: ReturnParts = ReturnParts { rows: true, weights: true };

/// A group, its experts, and two sets of routings.
#[derive(Clone)]
pub struct Group {
    pub nodes: NodeMap,
    pub map: ExpertMap,
    pub align: u32,
    pub routings: Vec<Vec<Routing<'static>>>,
    pub route: Route,
    pub relays: Relays,
    pub layout: RowLayout,
    pub mode: ReceiveMode,
    pub order: SumOrder,
    pub spans: bool,
    pub gathers: bool,
    pub strategy: Strategy,
    pub pulls: bool,
    pub gpu_direct: bool,
    pub enqueues: bool,
    pub read_early: bool,
    pub host_plans: bool,
    pub tokens: TokenPlace,
}

/// In how many parts blocks go.
pub const CHUNKS: u8 = 2;

/// All ways in which a group can be run.
pub fn ways() -> impl Iterator<Item = (Route, Relays)> {
    Route::ALL.into_iter().flat_map(|route| Relays::ALL.map(|relays| (route, relays)))
}

/// All receive modes: also with a budget that drops some rows, and with the largest needed number
/// of slots.
pub fn placements() -> impl Iterator<Item = (RowLayout, ReceiveMode, SumOrder)> {
    let overflow = Overflow::Drop;
    let modes = [
        ReceiveMode::Exact,
        ReceiveMode::Budget { rows: 9, overflow },
        ReceiveMode::Slots { rows: 3, overflow },
    ];
    let layouts = RowLayout::ALL.into_iter().flat_map(move |layout| modes.map(|mode| (layout, mode)));
    layouts.flat_map(|(layout, mode)| SumOrder::ALL.map(|order| (layout, mode, order)))
}

/// Those in which relays may hand rows on in spans.
pub fn placements_in_spans() -> impl Iterator<Item = (RowLayout, ReceiveMode, SumOrder)> {
    placements().filter(|(layout, ..)| *layout == RowLayout::RankMajor)
}

impl Group {
    /// Two experts a rank; every rank sends rows to every other in set 0, some choices are dropped
    /// in set 1.
    pub fn new(labels: &[u32], align: u32, seed: u64) -> Self {
        Self::over(NodeMap::from_labels(labels), align, seed)
    }

    pub fn over(nodes: NodeMap, align: u32, seed: u64) -> Self {
        let ranks = nodes.ranks();
        let map = ExpertMap::contiguous(2 * ranks, ranks).unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let all = (0..ranks).map(|_| everywhere(2 * ranks)).collect();
        let some = (0..ranks).map(|_| scattered(2 * ranks, &mut rng)).collect();
        let (route, relays) = (Route::Direct, Relays::Thread);
        let (layout, mode, order) = Default::default();
        Group {
            nodes,
            map,
            align,
            routings: vec![all, some],
            route,
            relays,
            layout,
            mode,
            order,
            spans: false,
            gathers: false,
            strategy: Strategy::AllToAll,
            pulls: false,
            gpu_direct: false,
            enqueues: false,
            read_early: true,
            host_plans: false,
            tokens: TokenPlace::Elsewhere,
        }
    }

    /// Ranks of a sample send to all, all others only to the sample.
    pub fn sampled(labels: &[u32], sample: &[u32]) -> Self {
        let nodes = NodeMap::from_labels(labels);
        let ranks = nodes.ranks();
        let map = ExpertMap::contiguous(2 * ranks, ranks).unwrap();
        let routing = |rank: u32| match sample.contains(&rank) {
            true => everywhere(2 * ranks),
            false => {
                let ids: Vec<i32> = sample.iter().flat_map(|&s| [2 * s as i32, 2 * s as i32 + 1]).collect();
                Routing::new(2, ids, vec![0.5; 2 * sample.len()]).unwrap()
            }
        };
        let routings = vec![(0..ranks).map(routing).collect()];
        Group { nodes, map, routings, ..Group::new(&[0], 1, 0) }
    }

    /// In set 0 every token goes to all ranks: so each chunk of a block has rows for every rank in
    /// relay order, too. In set 1 some choices are dropped.
    pub fn dense(labels: &[u32], align: u32, seed: u64) -> Self {
        let group = Group::new(labels, align, seed);
        let ranks = group.nodes.ranks();
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let all = (0..ranks).map(|_| to_all(ranks, || true)).collect();
        let some = (0..ranks).map(|_| to_all(ranks, || rng.random_range(0..4) > 0)).collect();
        Group { routings: vec![all, some], ..group }
    }

    /// The same group, placed in another way.
    pub fn placed(self, (layout, mode, order): (RowLayout, ReceiveMode, SumOrder)) -> Self {
        Group { layout, mode, order, ..self }
    }

    /// The same group, run in another way.
    pub fn run(self, (route, relays): (Route, Relays)) -> Self {
        Group { route, relays, ..self }
    }

    /// The same group, over relays that hand rows on in spans.
    pub fn in_spans(self, relays: Relays, placement: (RowLayout, ReceiveMode, SumOrder)) -> Self {
        Group { spans: true, ..self.run((Route::Pxn, relays)).placed(placement) }
    }

    /// The same group, in which every row goes to every rank, in two segments.
    pub fn gathering(self, (route, relays): (Route, Relays), order: SumOrder) -> Self {
        Group {
            gathers: true,
            ..self.run((route, relays)).placed((RowLayout::ExpertMajor, ReceiveMode::Exact, order))
        }
    }

    /// The same group, with dispatches by all-gather.
    pub fn by_all_gather(self) -> Self {
        Group { strategy: Strategy::AllGather, ..self }
    }

    /// The same group, with returns by copy engines.
    pub fn pulling(self) -> Self {
        Group { pulls: true, ..self }
    }

    /// The same group, with copy engines that callers' threads enqueue.
    pub fn enqueuing(self) -> Self {
        Group { enqueues: true, ..self.pulling() }
    }

    /// The same group, whose tokens lie elsewhere.
    pub fn of_tokens(self, tokens: TokenPlace) -> Self {
        Group { tokens, ..self }
    }

    /// Whether rows of a dispatch are packed when they have places, not before.
    pub fn packs_later(&self) -> bool {
        let relays = self.route == Route::Pxn && Paths::new(&self.nodes, self.route, 0).is_multi_node();
        match self.tokens {
            TokenPlace::Elsewhere => relays,
            TokenPlace::InRuns => false,
            TokenPlace::Scattered => true,
        }
    }

    /// The same group, with nets that reach the memory of the engines.
    pub fn straight(self) -> Self {
        Group { gpu_direct: true, ..self.pulling() }
    }

    pub fn scenario<'a>(&'a self, calls: &'a [Call], seeded: Option<SeededBug>) -> ProofScenario<'a> {
        ProofScenario {
            nodes: &self.nodes,
            route: self.route,
            chunks: CHUNKS,
            relays: self.relays,
            map: &self.map,
            align: self.align,
            layout: self.layout,
            spans: self.spans,
            gathers: self.gathers,
            strategy: self.strategy,
            pulls: self.pulls,
            gpu_direct: self.gpu_direct,
            enqueues: self.enqueues,
            read_early: self.read_early,
            host_plans: self.host_plans,
            tokens: self.tokens,
            mode: self.mode,
            order: self.order,
            row_bytes: 32,
            routings: &self.routings,
            calls,
            sample: None,
            seeded,
            mutation: None,
        }
    }

    pub fn unroll(&self, calls: &[Call], seeded: Option<SeededBug>) -> UnrolledProgram {
        UnrolledProgram::unroll(&self.scenario(calls, seeded)).unwrap()
    }
}

/// Token t goes to experts t and t + half, and again: each chunk of a block has rows for every
/// rank.
fn everywhere(experts: u32) -> Routing<'static> {
    let half = experts / 2;
    let tokens = u32::from(CHUNKS) * half;
    let ids: Vec<i32> = (0..tokens).map(|t| t % half).flat_map(|t| [t as i32, (t + half) as i32]).collect();
    let weights = vec![0.5; ids.len()];
    Routing::new(2, ids, weights).unwrap()
}

/// Two tokens for each chunk, each at an expert of every rank, unless that is dropped.
fn to_all(ranks: u32, mut keep: impl FnMut() -> bool) -> Routing<'static> {
    let tokens = 2 * u32::from(CHUNKS);
    let experts = (0..tokens).flat_map(|token| (0..ranks).map(move |rank| 2 * rank + token % 2));
    let ids: Vec<i32> = experts.map(|id| if keep() { id as i32 } else { -1 }).collect();
    let weights = vec![0.5; ids.len()];
    Routing::new(ranks, ids, weights).unwrap()
}

/// Up to four tokens at two random experts, some dropped.
fn scattered(experts: u32, rng: &mut ChaCha8Rng) -> Routing<'static> {
    let mut ids = Vec::new();
    for _ in 0..rng.random_range(0..5) {
        let first = rng.random_range(0..experts);
        let second = (first + rng.random_range(1..experts)) % experts;
        let drop = rng.random_range(0..4) == 0;
        ids.extend([first as i32, if drop { -1 } else { second as i32 }]);
    }
    let weights = vec![0.5; ids.len()];
    Routing::new(2, ids, weights).unwrap()
}

pub fn dispatch(routing: usize) -> Call {
    Call::Dispatch { routing, keep: false }
}

pub fn ret(handle: usize, parts: ReturnParts) -> Call {
    Call::Return { handle, parts, copied: false }
}

/// A return that fills its chunk during the call.
pub fn copy(handle: usize, parts: ReturnParts) -> Call {
    Call::Return { handle, parts, copied: true }
}

/// Dispatch and combine, `n` times.
pub fn pairs(n: usize) -> Vec<Call> {
    (0..n).flat_map(|round| [dispatch(0), ret(round, ROWS)]).collect()
}

/// Those of the rounds that callers' threads can enqueue: rows and weights return in separate
/// calls, and no rows are kept.
pub fn enqueued_rounds() -> Vec<Call> {
    let made = rounds().into_iter().flat_map(|call| match call {
        Call::Dispatch { routing, .. } => vec![dispatch(routing)],
        Call::Return { handle, parts, copied } if parts == BOTH => {
            [ROWS, WEIGHTS].map(|parts| Call::Return { handle, parts, copied }).to_vec()
        }
        other => vec![other],
    });
    // Then rows land where a call in which nothing moves has freed those before, and at last rows
    // return from where those of the return before lay.
    let landed = [Call::Agree, dispatch(0), Call::Agree, Call::Cached { handle: 9 }];
    made.chain(landed).chain([ret(9, ROWS); 3]).collect()
}

/// The calls that a group makes in its way.
pub fn rounds_of(group: &Group) -> Vec<Call> {
    match (group.enqueues, group.pulls) {
        (true, _) => enqueued_rounds(),
        (_, true) => engine_rounds(),
        _ => rounds(),
    }
}

/// Those of the rounds that engines alone can run: no cached dispatches, only rows return, and none
/// are kept.
pub fn engine_rounds() -> Vec<Call> {
    let made = rounds().into_iter().filter(|call| !matches!(call, Call::Cached { .. }));
    let made = made.map(|call| match call {
        Call::Dispatch { routing, .. } => dispatch(routing),
        Call::Return { handle, copied, .. } => Call::Return { handle, parts: ROWS, copied },
        other => other,
    });
    made.collect()
}

/// Dispatches by all-gather: refused before and behind the gathering, and with rows that are kept.
pub fn gathering_rounds() -> Vec<Call> {
    vec![
        dispatch(0),
        dispatch(1),
        Call::RefusedRegroup { routing: 0 },
        dispatch(0),
        Call::RefusedDispatch { routing: 1 },
        Call::Dispatch { routing: 1, keep: true },
        dispatch(0),
        Call::RefusedRegroup { routing: 1 },
        Call::RefusedRegroup { routing: 0 },
        Call::Dispatch { routing: 0, keep: true },
        dispatch(1),
        dispatch(0),
        dispatch(0),
    ]
}

/// Four rounds with all kinds of calls after all kinds, several handles alive, refusals, ranks that
/// disagree, and kept rows.
pub fn rounds() -> Vec<Call> {
    vec![
        dispatch(0),
        dispatch(1),
        ret(0, ROWS),
        copy(1, ROWS),
        Call::Cached { handle: 0 },
        Call::Cached { handle: 1 },
        copy(0, BOTH),
        copy(1, BOTH),
        copy(0, BOTH),
        Call::Dispatch { routing: 0, keep: true },
        Call::RefusedDispatch { routing: 1 },
        dispatch(0),
        ret(2, ROWS),
        Call::RefusedReturn { handle: 3 },
        Call::RefusedReturn { handle: 3 },
        Call::RefusedReturn { handle: 2 },
        ret(3, BOTH),
        Call::Cached { handle: 2 },
        Call::RefusedCached { handle: 2 },
        Call::RefusedCached { handle: 3 },
        ret(2, BOTH),
        dispatch(1),
        Call::Mixed { routing: 0, handle: 4 },
        Call::RefusedDispatch { routing: 0 },
        Call::RefusedDispatch { routing: 1 },
        dispatch(0),
        copy(5, ROWS),
        dispatch(0),
        dispatch(0),
        copy(6, BOTH),
        copy(7, BOTH),
        copy(6, BOTH),
        Call::Cached { handle: 6 },
        Call::Cached { handle: 7 },
        Call::Mixed { routing: 1, handle: 7 },
        dispatch(1),
        ret(8, ROWS),
        Call::Cached { handle: 8 },
        dispatch(0),
        Call::Cached { handle: 9 },
        ret(9, BOTH),
        Call::Cached { handle: 9 },
        ret(9, WEIGHTS),
        ret(9, ROWS),
        Call::Dispatch { routing: 0, keep: true },
        Call::Dispatch { routing: 0, keep: true },
        Call::Agree,
        Call::Agree,
        ret(10, ROWS),
        dispatch(0),
        ret(11, ROWS),
        ret(12, ROWS),
    ]
}
