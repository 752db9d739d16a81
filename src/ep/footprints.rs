//! Footprints of the steps of real calls, next to those that the proof orders.
//!
//! An unrolled program assumes a *footprint* for each planning step: the bytes of windows that it
//! reads and writes. Here real ranks make the calls of an unrolled program, with the same routings,
//! and record each access. Every access must lie in the footprint of its place in the program, and
//! every byte range of a footprint must be used. Pools are compared from the first byte that is
//! used there, because the time when a chunk is free depends on its readers.
//!
//! ```text
//!   ep/host/footprints.rs           hosts that call: all windows
//!   ep/device/tests/footprints.rs   hosts that enqueue for a device: control windows
//! ```

use std::collections::BTreeMap;

use sidelane_verify::unroll::{Bytes, Call, ProofScenario, Relays, SeededBug, StageRun, TokenPlace};

use crate::gate::Routing;
use crate::lane::Port;
use crate::memory::access::Event;
use crate::plan::{Block, ExpertMap, ReceiveMode, RowLayout, Strategy, SumOrder};
use crate::schedule::{ReturnParts, WindowId};
use crate::topology::{NodeMap, Route};

pub const TOP_K: u32 = 2;
pub const HIDDEN: usize = 8;
pub const ROWS: ReturnParts = ReturnParts { rows: true, weights: false };
/// Dispatches that exceed a budget.
pub const REFUSED: [Call; 2] = [Call::RefusedDispatch { routing: 0 }, Call::RefusedDispatch { routing: 1 }];
/// Bugs that change where hosts look and write.
pub const BUGS: [SeededBug; 4] =
    [SeededBug::OnePublication, SeededBug::OneMessage, SeededBug::OneHeader, SeededBug::OneTag];

/// Nodes and routes of groups of ranks.
pub fn groups() -> [(&'static [u32], Route); 4] {
    [
        (&[0, 0, 0], Route::Direct),
        (&[0, 1, 0, 1], Route::Direct),
        (&[0, 0, 1, 1], Route::Pxn),
        (&[0, 0, 1, 2], Route::Pxn),
    ]
}

/// Bytes of windows that were read (`false`) and written (`true`).
pub type Accesses = BTreeMap<(bool, u32, WindowId), Vec<(u64, u64)>>;

/// Accesses before each stage, in the order of stages. A second half is a stage of its own only if
/// something happens between the halves.
pub type Places = Vec<(&'static str, Accesses)>;

fn add(accesses: &mut Accesses, write: bool, Bytes { owner, window, range }: Bytes) {
    if !range.is_empty() {
        accesses.entry((write, owner, window)).or_default().push((range.start, range.end));
    }
}

pub fn push(places: &mut Places, name: &'static str, accesses: Accesses) {
    if accesses.is_empty() && places.last().is_some_and(|(last, _)| *last == name) {
        return;
    }
    places.push((name, accesses));
}

/// The footprints of a rank's scenes.
pub fn expected(scenes: &[StageRun], places: &mut Places) {
    for scene in scenes {
        let mut accesses = Accesses::new();
        scene.touches.iter().for_each(|touch| add(&mut accesses, touch.write, touch.bytes.clone()));
        push(places, scene.name, accesses);
    }
}

/// Accesses of a thread, by addresses in the windows of these ports.
pub fn seen(events: Vec<Event>, ports: &[&Port]) -> Places {
    let (mut places, mut accesses, mut inside) = (Places::new(), Accesses::new(), false);
    for event in events {
        match event {
            Event::Stage { name, begins } => {
                inside = begins;
                if begins {
                    push(&mut places, name, std::mem::take(&mut accesses));
                }
            }
            Event::Access { at, len, write } if !inside => {
                let located = ports.iter().find_map(|port| port.locate(at, len));
                let (owner, window, offset) = located.expect("bytes of a window");
                add(&mut accesses, write, Bytes { owner, window, range: offset..offset + len });
            }
            Event::Access { .. } => {}
        }
    }
    push(&mut places, "end", accesses);
    places
}

/// Joins ranges that overlap or touch.
fn joined(ranges: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut ranges = ranges.to_vec();
    ranges.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (start, end) in ranges {
        match joined.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => joined.push((start, end)),
        }
    }
    joined
}

/// Ranges of a pool, from the first byte on; those of other windows as they are.
fn from_first(window: WindowId, ranges: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let first = if window == WindowId::POOL { ranges.iter().map(|range| range.0).min() } else { None };
    let first = first.unwrap_or(0);
    ranges.iter().map(|(start, end)| (start - first, end - first)).collect()
}

/// Difference between the recorded accesses and the assumed ones.
pub fn difference(expected: &Places, seen: &Places) -> Option<String> {
    let names = |places: &Places| places.iter().map(|(name, _)| *name).collect::<Vec<_>>();
    if names(expected) != names(seen) {
        return Some(format!("stages {:?}, seen {:?}", names(expected), names(seen)));
    }
    for ((name, expected), (_, seen)) in expected.iter().zip(seen) {
        let ranges = |of: &Accesses, what: &(bool, u32, WindowId)| {
            of.get(what).map_or_else(Vec::new, |ranges| from_first(what.2, ranges))
        };
        for what in seen.keys() {
            let (allowed, ranges) = (joined(&ranges(expected, what)), ranges(seen, what));
            let outside = ranges
                .iter()
                .find(|(start, end)| !allowed.iter().any(|(from, to)| from <= start && end <= to));
            if let Some(range) = outside {
                return Some(format!("before {name}, {what:?}: {range:?} is not in {allowed:?}"));
            }
        }
        // Callers may read all that landed as long as they keep it; these read rows alone.
        for what in expected.keys().filter(|_| *name != "release") {
            // Bytes that are borrowed to be written may be read, too.
            let borrowed =
                [*what, (true, what.1, what.2)].map(|what| seen.get(&what).cloned().unwrap_or_default());
            let (used, ranges) = (from_first(what.2, &borrowed.concat()), ranges(expected, what));
            let unused =
                ranges.iter().find(|(start, end)| !used.iter().any(|(from, to)| from < end && start < to));
            if let Some(range) = unused {
                return Some(format!("before {name}, {what:?}: nothing uses {range:?}, seen {used:?}"));
            }
        }
    }
    None
}

/// Routings of this many ranks, by set and rank. In set 0 every rank sends to all; in set 1 some
/// choices are dropped.
pub fn routings(ranks: u32) -> Vec<Vec<Routing<'static>>> {
    let (ranks, experts) = (ranks as i32, 2 * ranks as i32);
    let routing = |rank: i32, dropped: i32| {
        let id = |at: i32| if (at + rank) % 5 < dropped { -1 } else { at % experts };
        let ids = (0..experts).flat_map(|token| [id(token), id(token + 3)]).collect::<Vec<i32>>();
        let weights = vec![0.5; ids.len()];
        Routing::new(TOP_K, ids, weights).unwrap()
    };
    [0, 1].map(|dropped| (0..ranks).map(|rank| routing(rank, dropped)).collect()).into()
}

/// Calls of hosts, in rows of `HIDDEN` bf16. Hosts that enqueue change what is different with them.
pub fn scenario<'a>(
    (nodes, map): (&'a NodeMap, &'a ExpertMap),
    (routings, calls): (&'a [Vec<Routing<'static>>], &'a [Call]),
    seeded: Option<SeededBug>,
) -> ProofScenario<'a> {
    ProofScenario {
        nodes,
        route: Route::Direct,
        chunks: Block::CHUNKS,
        relays: Relays::Inline,
        map,
        align: 1,
        order: SumOrder::Expert,
        layout: RowLayout::ExpertMajor,
        spans: false,
        gathers: false,
        strategy: Strategy::AllToAll,
        pulls: false,
        gpu_direct: false,
        enqueues: false,
        read_early: false,
        host_plans: false,
        tokens: TokenPlace::Elsewhere,
        mode: ReceiveMode::Exact,
        row_bytes: 2 * HIDDEN as u64,
        routings,
        calls,
        sample: None,
        seeded,
        mutation: None,
    }
}
