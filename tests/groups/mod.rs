//! Groups and scripts that the tests of schedules share.
#![allow(dead_code)]

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sidelane::gate::Routing;
use sidelane::plan::{ExpertMap, Order};
use sidelane::schedule::Parts;
use sidelane::schedule::story::{Call, Script, Slip, Story};
use sidelane::topology::NodeMap;

pub const ROWS: Parts = Parts { rows: true, weights: false };
pub const BOTH: Parts = Parts { rows: true, weights: true };

/// A group, its experts, and two sets of routings.
pub struct Group {
    pub nodes: NodeMap,
    pub map: ExpertMap,
    pub align: u32,
    pub routings: Vec<Vec<Routing<'static>>>,
}

impl Group {
    /// Two experts a rank; every rank sends rows to every other in set 0, some choices are dropped in set 1.
    pub fn new(labels: &[u32], align: u32, seed: u64) -> Self {
        let nodes = NodeMap::from_labels(labels);
        let ranks = nodes.ranks();
        let map = ExpertMap::contiguous(2 * ranks, ranks).unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let all = (0..ranks).map(|_| everywhere(2 * ranks)).collect();
        let some = (0..ranks).map(|_| scattered(2 * ranks, &mut rng)).collect();
        Group { nodes, map, align, routings: vec![all, some] }
    }

    pub fn script<'a>(&'a self, calls: &'a [Call], slip: Option<Slip>) -> Script<'a> {
        Script {
            nodes: &self.nodes,
            map: &self.map,
            align: self.align,
            order: Order::Expert,
            row_bytes: 32,
            routings: &self.routings,
            calls,
            slip,
        }
    }

    pub fn tell(&self, calls: &[Call], slip: Option<Slip>) -> Story {
        Story::tell(&self.script(calls, slip)).unwrap()
    }
}

/// Half as many tokens as there are experts; token t goes to experts t and t + half.
fn everywhere(experts: u32) -> Routing<'static> {
    let half = experts / 2;
    let ids: Vec<i32> = (0..half).flat_map(|t| [t as i32, (t + half) as i32]).collect();
    let weights = vec![0.5; ids.len()];
    Routing::new(2, ids, weights).unwrap()
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

pub fn ret(handle: usize, parts: Parts) -> Call {
    Call::Return { handle, parts, copied: false }
}

/// A return that fills its chunk during the call.
pub fn copy(handle: usize, parts: Parts) -> Call {
    Call::Return { handle, parts, copied: true }
}

/// Dispatch and combine, `n` times.
pub fn pairs(n: usize) -> Vec<Call> {
    (0..n).flat_map(|round| [dispatch(0), ret(round, ROWS)]).collect()
}

/// Four rounds with all kinds of calls after all kinds, several handles alive, refusals, ranks that disagree,
/// and kept rows.
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
        ret(3, BOTH),
        Call::Cached { handle: 2 },
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
    ]
}
