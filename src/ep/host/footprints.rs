//! Compares accesses of planners and callers between stages with those that the proof orders.
//!
//! An unrolled program assumes a *footprint* for each planning step: the bytes of windows that it
//! reads and writes. Here real ranks make the calls of an unrolled program, with the same routings,
//! and record each access. Every access must lie in the footprint of its place in the program, and
//! every byte range of a footprint must be used. Pools are compared from the first byte that is
//! used there, because the time when a chunk is free depends on its readers.

use std::collections::BTreeMap;

use sidelane_verify::unroll::{Bytes, Call, ProofScenario, Relays, SeededBug, StageRun, UnrolledProgram};

use crate::ep::device::tests::support::{on_ranks, small};
use crate::ep::{CombineInput, ExpertParallel, ExpertRows, Handle, Tensor};
use crate::gate::Routing;
use crate::lane::Port;
use crate::memory::access;
use crate::memory::access::Event;
use crate::plan::{ExpertMap, Overflow, ReceiveMode, RowLayout, Strategy, SumOrder};
use crate::schedule::{ReturnParts, WindowId};
use crate::topology::{NodeMap, Route};
use crate::{Dtype, World};

const TOP_K: u32 = 2;
const HIDDEN: usize = 8;
const ROW_BYTES: u64 = 16;
const ROWS: ReturnParts = ReturnParts { rows: true, weights: false };
const BOTH: ReturnParts = ReturnParts { rows: true, weights: true };
/// Calls with rows that are kept and read late, with outputs in place and copied, and calls that a
/// rank refuses.
const CALLS: [Call; 9] = [
    Call::Dispatch { routing: 0, keep: true },
    Call::Cached { handle: 0 },
    Call::Return { handle: 0, parts: ROWS, copied: false },
    Call::RefusedCached { handle: 0 },
    Call::Dispatch { routing: 1, keep: true },
    Call::Return { handle: 1, parts: BOTH, copied: true },
    Call::RefusedReturn { handle: 1 },
    Call::Agree,
    Call::Dispatch { routing: 1, keep: false },
];
/// Dispatches by all-gather.
const GATHERED: [Call; 2] =
    [Call::Dispatch { routing: 0, keep: true }, Call::Dispatch { routing: 1, keep: true }];
/// Dispatches that exceed a budget.
const REFUSED: [Call; 2] = [Call::RefusedDispatch { routing: 0 }, Call::RefusedDispatch { routing: 1 }];

/// Settings of an instance, and where its ranks are.
#[derive(Clone, Copy, Debug)]
struct Case {
    nodes: &'static [u32],
    route: Route,
    layout: RowLayout,
    mode: ReceiveMode,
    order: SumOrder,
    strategy: Strategy,
}

/// Bytes of windows that were read (`false`) and written (`true`).
pub(in crate::ep) type Accesses = BTreeMap<(bool, u32, WindowId), Vec<(u64, u64)>>;

/// Accesses before each stage, in the order of stages. A second half is a stage of its own only if
/// something happens between the halves.
pub(in crate::ep) type Places = Vec<(&'static str, Accesses)>;

fn add(accesses: &mut Accesses, write: bool, Bytes { owner, window, range }: Bytes) {
    if !range.is_empty() {
        accesses.entry((write, owner, window)).or_default().push((range.start, range.end));
    }
}

pub(in crate::ep) fn push(places: &mut Places, name: &'static str, accesses: Accesses) {
    if accesses.is_empty() && places.last().is_some_and(|(last, _)| *last == name) {
        return;
    }
    places.push((name, accesses));
}

/// The footprints of a rank's scenes.
pub(in crate::ep) fn expected(scenes: &[StageRun], places: &mut Places) {
    for scene in scenes {
        let mut accesses = Accesses::new();
        scene.touches.iter().for_each(|touch| add(&mut accesses, touch.write, touch.bytes.clone()));
        push(places, scene.name, accesses);
    }
}

/// Accesses of a thread, by addresses in the windows of these ports.
pub(in crate::ep) fn seen(events: Vec<Event>, ports: &[&Port]) -> Places {
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
pub(in crate::ep) fn difference(expected: &Places, seen: &Places) -> Option<String> {
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
pub(in crate::ep) fn routings(ranks: u32) -> Vec<Vec<Routing<'static>>> {
    let (ranks, experts) = (ranks as i32, 2 * ranks as i32);
    let routing = |rank: i32, dropped: i32| {
        let id = |at: i32| if (at + rank) % 5 < dropped { -1 } else { at % experts };
        let ids = (0..experts).flat_map(|token| [id(token), id(token + 3)]).collect::<Vec<i32>>();
        let weights = vec![0.5; ids.len()];
        Routing::new(TOP_K, ids, weights).unwrap()
    };
    [0, 1].map(|dropped| (0..ranks).map(|rank| routing(rank, dropped)).collect()).into()
}

impl Case {
    fn map(&self) -> ExpertMap {
        let ranks = self.nodes.len() as u32;
        ExpertMap::contiguous(2 * ranks, ranks).unwrap()
    }

    fn unroll(
        &self,
        routings: &[Vec<Routing<'static>>],
        calls: &[Call],
        seeded: Option<SeededBug>,
    ) -> UnrolledProgram {
        let Case { route, layout, mode, order, strategy, .. } = *self;
        UnrolledProgram::unroll(&ProofScenario {
            nodes: &NodeMap::from_labels(self.nodes),
            route,
            chunks: crate::plan::Block::CHUNKS,
            relays: Relays::Inline,
            map: &self.map(),
            align: 1,
            order,
            layout,
            spans: false,
            gathers: false,
            strategy,
            pulls: false,
            gpu_direct: false,
            enqueues: false,
            read_early: false,
            mode,
            row_bytes: ROW_BYTES,
            routings,
            calls,
            sample: None,
            seeded,
            mutation: None,
        })
        .unwrap()
    }

    /// Makes the calls at a rank; what it did in each.
    fn make(&self, world: &World, routings: &[Vec<Routing<'static>>], calls: &[Call]) -> Vec<Places> {
        let Case { route, layout, mode, order, strategy, .. } = *self;
        let group = world.all().unwrap();
        let (me, tokens) = (group.rank() as usize, 2 * group.size());
        let builder = ExpertParallel::builder(&group).expert_map(self.map()).top_k(TOP_K).hidden(HIDDEN);
        let builder = builder.dtype(Dtype::Bf16).max_tokens(tokens).route(route).layout(layout);
        let mut ep = builder.mode(mode).sum_order(order).strategy(strategy).build().unwrap();
        let x = vec![half::bf16::ONE; tokens as usize * HIDDEN];
        let mut handles: Vec<(Option<ExpertRows>, Handle)> = Vec::new();
        let mut all = Vec::new();
        for call in calls {
            access::begin();
            match *call {
                Call::Dispatch { routing, keep } => {
                    let (rows, handle) = ep.dispatch(&x, &routings[routing][me]).unwrap();
                    rows.rows::<u8>().unwrap();
                    handles.push((keep.then_some(rows), handle));
                }
                Call::Cached { handle } => {
                    ep.dispatch_cached(&x, &handles[handle].1).unwrap().rows::<u8>().unwrap();
                }
                Call::Return { handle, parts, copied } => {
                    let (rows, handle) = &mut handles[handle];
                    let rows = rows.take();
                    if let Some(rows) = &rows {
                        rows.rows::<u8>().unwrap();
                    }
                    drop(rows);
                    let landed = handle.rows() as usize;
                    let copy = vec![half::bf16::ONE; landed * HIDDEN];
                    let y: CombineInput<'_> = match copied {
                        true => Tensor::from(&copy).into(),
                        false => {
                            let mut output = handle.output().unwrap();
                            output.rows_mut::<u8>().unwrap().fill(0);
                            output.into()
                        }
                    };
                    let ones = vec![1.0; handle.row_weights().len()];
                    if parts.weights {
                        ep.dispatch_backward::<half::bf16>(y, Some(&ones), handle).map(drop).unwrap();
                    } else {
                        ep.combine::<half::bf16>(y, handle).unwrap();
                    }
                }
                Call::RefusedDispatch { routing } => {
                    ep.dispatch(&x, &routings[routing][me]).unwrap_err();
                }
                // One rank brings a tensor of another shape.
                Call::RefusedCached { handle } => {
                    let x = if me == 0 { &x[..HIDDEN] } else { &x[..] };
                    ep.dispatch_cached(x, &handles[handle].1).unwrap_err();
                }
                Call::RefusedReturn { handle } => {
                    let mut output = handles[handle].1.output().unwrap();
                    output.rows_mut::<u8>().unwrap().fill(0);
                    let y: CombineInput<'_> =
                        if me == 0 { Tensor::from(&x[..HIDDEN]).into() } else { output.into() };
                    ep.combine::<half::bf16>(y, &handles[handle].1).unwrap_err();
                }
                Call::Agree => {
                    handles.clear();
                    ep.set_expert_map(self.map()).unwrap();
                }
                _ => unreachable!("not in the lists"),
            }
            let events = access::take();
            let host = ep.host(crate::ep::Feature::Floor).unwrap();
            let gathers = host.gather.as_ref().map(|gather| &*gather.engine.fixed.port);
            let ports: Vec<&Port> = gathers.into_iter().chain([&*host.fixed.port]).collect();
            all.push(seen(events, &ports));
        }
        group.gather(&[]).unwrap();
        all
    }

    /// Makes the calls and compares the accesses of ranks with the unrolled program. Returns the
    /// first difference.
    fn compare(&self, calls: &[Call], seeded: Option<SeededBug>) -> Option<String> {
        let routings = routings(self.nodes.len() as u32);
        let unrolled = self.unroll(&routings, calls, seeded);
        let each = unrolled.calls.len() / calls.len();
        let made = on_ranks(self.nodes, &small(), |world| self.make(&world, &routings, calls));
        let mut all = made
            .iter()
            .enumerate()
            .flat_map(|(rank, made)| made.iter().enumerate().map(move |nth| (rank, nth)));
        all.find_map(|(rank, (nth, seen))| {
            let mut expected = Places::new();
            for call in &unrolled.calls[nth * each..][..each] {
                // A call that another follows at once is not the caller's.
                expected.pop_if(|(name, accesses)| *name == "end" && accesses.is_empty());
                self::expected(&call[rank].scenes, &mut expected);
            }
            let difference = difference(&expected, seen)?;
            Some(format!("{self:?}: rank {rank}, {:?}: {difference}", calls[nth]))
        })
    }

    fn check(&self, calls: &[Call]) {
        assert_eq!(self.compare(calls, None), None);
    }
}

const CASE: Case = Case {
    nodes: &[0, 0, 0],
    route: Route::Direct,
    layout: RowLayout::ExpertMajor,
    mode: ReceiveMode::Exact,
    order: SumOrder::Expert,
    strategy: Strategy::AllToAll,
};

#[test]
fn steps_access_what_the_proof_assumes() {
    for (nodes, route) in [
        (&[0, 0, 0][..], Route::Direct),
        (&[0, 1, 0, 1], Route::Direct),
        (&[0, 0, 1, 1], Route::Pxn),
        (&[0, 0, 1, 2], Route::Pxn),
    ] {
        for layout in RowLayout::ALL {
            let overflow = Overflow::Drop;
            for mode in [
                ReceiveMode::Exact,
                ReceiveMode::Budget { rows: 9, overflow },
                ReceiveMode::Slots { rows: 3, overflow },
            ] {
                Case { nodes, route, layout, mode, ..CASE }.check(&CALLS);
            }
        }
        Case { nodes, route, order: SumOrder::Node, ..CASE }.check(&CALLS);
        Case { nodes, route, mode: ReceiveMode::Budget { rows: 1, overflow: Overflow::Error }, ..CASE }
            .check(&REFUSED);
        Case { nodes, route, strategy: Strategy::AllGather, ..CASE }.check(&GATHERED);
    }
}

#[test]
fn program_of_another_enqueuer_differs() {
    let case = Case { nodes: &[0, 0, 1, 1], route: Route::Pxn, ..CASE };
    for seeded in [SeededBug::OnePublication, SeededBug::OneMessage, SeededBug::OneHeader, SeededBug::OneTag]
    {
        assert!(case.compare(&CALLS, Some(seeded)).is_some(), "{seeded:?}");
    }
}
