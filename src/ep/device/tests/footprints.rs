//! Compares accesses of callers' threads that enqueue for a device with those that the proof
//! orders: as for [hosts that call](crate::ep::footprints), in control windows.
//!
//! Of a rank's three lines in an unrolled program the host's is compared. Stages whose operations
//! are all on streams are none of it, and neither are the words between host and streams: accesses
//! before them count as those before the next stage that both name.

use std::sync::Arc;

use half::bf16;
use sidelane_verify::unroll::{Call, ProofScenario, Role, SeededBug, UnrolledProgram};

use super::on_devices;
use super::rank::{Case, Input, Rank, call, target};
use super::support::{on_ranks, small};
use crate::Dtype;
use crate::dtype::PartialDtype;
use crate::ep::footprints::{
    Accesses, BUGS, Places, REFUSED, ROWS, difference, expected, groups, push, routings, scenario, seen,
};
use crate::ep::{CombineInput, ExpertRows, Handle, Tensor};
use crate::gate::Routing;
use crate::lane::Port;
use crate::memory::access;
use crate::plan::{Overflow, ReceiveMode, RowLayout, SumOrder};
use crate::schedule::WindowId;
use crate::topology::{NodeMap, Route};

const CALLS: [Call; 9] = [
    Call::Dispatch { routing: 0, keep: false },
    Call::Cached { handle: 0 },
    Call::Return { handle: 0, parts: ROWS, copied: false },
    Call::RefusedCached { handle: 0 },
    Call::Dispatch { routing: 1, keep: false },
    Call::Return { handle: 1, parts: ROWS, copied: false },
    Call::RefusedReturn { handle: 1 },
    Call::Agree,
    Call::Dispatch { routing: 1, keep: false },
];

/// A case in which all ranks have as many tokens as they may.
fn case(nodes: &[u32], route: Route) -> Case {
    let ranks = nodes.len() as u32;
    Case { route, max_tokens: 2 * ranks, max_in_flight: 3, ..Case::across(nodes, 2 * ranks, 2) }
}

fn unroll(
    case: &Case,
    routings: &[Vec<Routing<'static>>],
    calls: &[Call],
    seeded: Option<SeededBug>,
) -> UnrolledProgram {
    let nodes = NodeMap::from_labels(&case.nodes);
    let Case { route, align, order, layout, mode, .. } = *case;
    let hosts = scenario((&nodes, &case.map), (routings, calls), seeded);
    let hosts = ProofScenario { pulls: true, enqueues: true, read_early: true, ..hosts };
    let row_bytes = (case.hidden * Dtype::Bf16.size()) as u64;
    let scenario = ProofScenario { route, align, order, layout, mode, row_bytes, ..hosts };
    UnrolledProgram::unroll(&scenario).unwrap()
}

/// Makes a call at a rank.
fn make(
    rank: &mut Rank<bf16>,
    handles: &mut Vec<Handle>,
    (asked, routing): (Call, Option<&Routing<'static>>),
) {
    let tokens = rank.case.max_tokens as usize;
    let x = vec![bf16::ONE; tokens * rank.case.hidden];
    let me = rank.planned.rank();
    let (whole, short) = (rank.lent(&x), rank.lent(&x[..rank.case.hidden]));
    let own = if me == 0 { &short } else { &whole };
    let dispatched = |rank: &mut Rank<bf16>| -> Result<(ExpertRows, Handle), _> {
        let routing = routing.expect("a dispatch has one");
        let (ids, weights) = (routing.experts().to_vec(), routing.weights().to_vec());
        let tensors = rank.put(&Input { x: x.clone(), ids, weights });
        let (x, choices) = call::<bf16>(&tensors);
        access::begin();
        rank.planned.dispatch(x, choices)
    };
    match asked {
        Call::Dispatch { .. } => {
            let (_, handle) = dispatched(rank).unwrap();
            handles.push(handle);
        }
        Call::RefusedDispatch { .. } => drop(dispatched(rank).unwrap_err()),
        Call::Cached { handle } => {
            access::begin();
            let x = Tensor::device(&whole, Dtype::Bf16);
            drop(rank.planned.dispatch_cached(x, &handles[handle]).unwrap());
        }
        // One rank brings a tensor of another shape.
        Call::RefusedCached { handle } => {
            access::begin();
            let x = Tensor::device(own, Dtype::Bf16);
            rank.planned.dispatch_cached(x, &handles[handle]).unwrap_err();
        }
        Call::Return { handle, .. } => {
            let (y, out) = (handles[handle].output().unwrap(), rank.out.part(whole.len()));
            access::begin();
            rank.planned.combine_into(y, &handles[handle], target::<bf16>(&out)).unwrap();
        }
        Call::RefusedReturn { handle } => {
            let (y, out) = (handles[handle].output().unwrap(), rank.out.part(whole.len()));
            let y: CombineInput<'_> =
                if me == 0 { Tensor::device(&short, Dtype::Bf16).into() } else { y.into() };
            access::begin();
            rank.planned.combine_into(y, &handles[handle], target::<bf16>(&out)).unwrap_err();
        }
        Call::Agree => {
            handles.clear();
            access::begin();
            rank.planned.set_expert_map(rank.case.map.clone()).unwrap();
        }
        _ => unreachable!("not in the lists"),
    }
}

/// The accesses to control windows, before stages of these names and the end.
fn of_control(places: &Places, named: &Places) -> Places {
    let (mut all, mut before) = (Places::new(), Accesses::new());
    for (name, accesses) in places {
        for (what, ranges) in accesses.iter().filter(|((_, _, window), _)| *window == WindowId::CONTROL) {
            before.entry(*what).or_default().extend(ranges);
        }
        if named.iter().any(|(other, _)| other == name) {
            push(&mut all, name, std::mem::take(&mut before));
        }
    }
    all
}

/// Makes the calls and compares the accesses of hosts with the unrolled program. Returns the first
/// difference.
fn compare(case: &Case, calls: &[Call], seeded: Option<SeededBug>) -> Option<String> {
    let routings = routings(case.nodes.len() as u32);
    let unrolled = unroll(case, &routings, calls, seeded);
    let made = on_ranks(&case.nodes, &small(), |world| {
        let group = world.all().unwrap();
        let (mut rank, mut handles) = (Rank::<bf16>::new(&group, case), Vec::new());
        let port: Arc<Port> = Arc::clone(&rank.planned.enqueued().unwrap().common().fixed.port);
        let mut all = Vec::new();
        for &asked in calls {
            let routing = match asked {
                Call::Dispatch { routing, .. } | Call::RefusedDispatch { routing } => {
                    Some(&routings[routing][group.rank() as usize])
                }
                _ => None,
            };
            make(&mut rank, &mut handles, (asked, routing));
            all.push(seen(access::take(), &[&*port]));
        }
        rank.stream.synchronize().unwrap();
        group.gather(&[]).unwrap();
        all
    });
    for (rank, made) in (0..).zip(&made) {
        for (nth, seen) in made.iter().enumerate() {
            let host = unrolled.calls[nth].iter().find(|part| (part.rank, part.role) == (rank, Role::Own));
            let mut places = Places::new();
            expected(&host.expect("every rank has a host").scenes, &mut places);
            let [places, seen] = [of_control(&places, seen), of_control(seen, &places)];
            if let Some(difference) = difference(&places, &seen) {
                return Some(format!("{case:?}: rank {rank}, {:?}: {difference}", calls[nth]));
            }
        }
    }
    None
}

#[test]
fn hosts_that_run_ahead_access_what_the_proof_assumes() {
    on_devices("footprints::hosts_that_run_ahead_access_what_the_proof_assumes", 31, "ordered", |_| {
        for (nodes, route) in groups() {
            for layout in RowLayout::ALL {
                assert_eq!(compare(&Case { layout, ..case(nodes, route) }, &CALLS, None), None);
            }
            for order in [SumOrder::Rank, SumOrder::Node] {
                // Ranks and relays sum before rows return if sums have the type of rows.
                let summing = Case { order, wire: PartialDtype::Bf16, ..case(nodes, route) };
                assert_eq!(compare(&summing, &CALLS, None), None);
            }
            let dropping = case(nodes, route).dropping(9);
            assert_eq!(compare(&dropping, &CALLS, None), None);
            let mode = ReceiveMode::Budget { rows: 1, overflow: Overflow::Error };
            assert_eq!(compare(&Case { mode, ..case(nodes, route) }, &REFUSED, None), None);
        }
    });
}

#[test]
fn footprints_of_another_enqueuer_differ() {
    on_devices("footprints::footprints_of_another_enqueuer_differ", 32, "ordered", |_| {
        let case = case(&[0, 0, 1, 1], Route::Pxn);
        for seeded in BUGS {
            assert!(compare(&case, &CALLS, Some(seeded)).is_some(), "{seeded:?}");
        }
    });
}
