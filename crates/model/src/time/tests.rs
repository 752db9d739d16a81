use std::collections::VecDeque;

use proptest::prelude::*;
use sidelane_core::error::PlanError;
use sidelane_core::gate::{Pattern, Routing, synthetic};
use sidelane_core::plan::{ExpertMap, RowLayout, SlotShape, SumOrder};
use sidelane_core::schedule::Flag;
use sidelane_core::topology::Route;

use super::events::{Line, Machine, Program, Ring, Task};
use super::*;

fn h100() -> Hardware {
    "h100-cx7".parse().unwrap()
}

/// The host of one machine, in round figures.
fn host() -> Hardware {
    let figures = r#"{
        "name": "host", "executor": "host",
        "engines": {
            "peer": [{"from_bytes": 0, "per_copy": 50, "rate": 10000}],
            "own": [{"from_bytes": 0, "per_copy": 50, "rate": 10000}],
            "host": [{"from_bytes": 0, "per_copy": 50, "rate": 10000}],
            "per_batch": 0, "per_word": 0, "per_list": 0, "per_call": 0, "enqueue_copy": 0,
            "enqueue_word": 0, "switched": true
        },
        "link": {"rate": 10000, "load_rate": 8000, "latency": 100},
        "nic": {"per_node": 0, "rate": 8000, "per_message": 100, "message_bytes": 65536, "latency": 100},
        "compute": {"rate": 8000, "launch": 0, "sort": 0},
        "host": {"cores": 2, "signal": 50, "latency": 100, "sort": 10000, "place": 5000, "per_bin": 2000}
    }"#;
    serde_json::from_str(figures).unwrap()
}

/// The group of a case, and its decisions.
struct Group {
    nodes: u32,
    /// Metadata moves with rows.
    metadata: bool,
    map: ExpertMap,
    routings: Vec<Routing<'static>>,
}

/// All ranks draw, or the first node does.
fn group((nodes, members): (u32, u32), tokens: u32, whole: bool) -> Group {
    let (experts, ranks) = (4 * nodes * members, nodes * members);
    let drawn = if whole { ranks } else { members };
    let draw = |rank| synthetic(Pattern::Uniform, experts, 8, tokens, 5, rank).unwrap();
    Group {
        nodes,
        metadata: true,
        map: ExpertMap::contiguous(experts, ranks).unwrap(),
        routings: (0..drawn).map(draw).collect(),
    }
}

fn case(group: &Group, layout: RowLayout, route: Route, order: SumOrder) -> Case<'_> {
    Case {
        nodes: group.nodes,
        map: &group.map,
        routings: &group.routings,
        layout,
        route,
        order,
        chunks: None,
        row_bytes: 4096,
        return_bytes: 4096,
        partial_bytes: 8192,
        metadata: group.metadata,
    }
}

/// All variants of a group, on both executors where the host can run it: dispatch, combine and its
/// gradient.
fn timed(group: &Group, change: impl Fn(Hardware) -> Hardware) -> Vec<(String, Timing)> {
    let mut all = Vec::new();
    let whole = group.routings.len() as u32 == group.map.ranks();
    for hardware in [change(h100()), change(host())].into_iter().take(if whole { 2 } else { 1 }) {
        for (layout, route) in RowLayout::ALL.into_iter().flat_map(|l| Route::ALL.map(|r| (l, r))) {
            for order in SumOrder::ALL {
                let placed = Placed::new(&case(group, layout, route, order), &hardware).unwrap();
                let title = format!("{} {} {} {}", hardware.name, layout.name(), route.name(), order.name());
                all.push((format!("dispatch {title}"), placed.dispatch()));
                all.push((format!("combine {title}"), placed.combine()));
                all.push((format!("gradient of combine {title}"), placed.combine_backward()));
            }
        }
    }
    all
}

/// Time of one task on one line of the first of two ranks, on a node or on two.
fn alone(nodes: u32, task: Task, line: Line) -> u64 {
    let hardware = h100();
    let ring = Ring { nodes, members: 2 / nodes, whole: true };
    let mut machine = Machine::new(ring, &hardware);
    let wait = Task::Wait { of: 0, flag: Flag::Landed, value: 1 };
    let signal = Task::Signal { to: 1, of: 0, flag: Flag::Landed, value: 1 };
    let hand = |task| Task::Hand(line, Box::new(task));
    let program = |tasks: Vec<Task>| Program { tasks: tasks.into(), ..Program::default() };
    machine.load(0, program(vec![hand(task), hand(signal), Task::Join(line), Task::Mark(Phase::Move)]));
    machine.load(1, program(vec![wait, Task::Mark(Phase::Move)]));
    machine.run().ns
}

#[test]
fn a_single_copy_takes_its_price_or_its_bytes_and_the_latency() {
    let Hardware { engines, link, nic, host, .. } = h100();
    let copy = |bytes| Task::Copy { place: Place::Peer, from: 0, to: 1, copies: 1, bytes };
    let word = engines.per_word + link.latency + host.signal;
    let step = engines.peer[0];
    // The price overlaps with the bytes of a long copy.
    assert_eq!(alone(1, copy(38_000_000), Line::Stream), 38_000_000_000 / step.rate + word);
    assert_eq!(alone(1, copy(16), Line::Stream), step.per_copy + word);
    let message = Task::Send { to: 1, messages: 3, bytes: 47_000_000, rest: 0 };
    let word = nic.per_message + nic.latency + host.signal;
    // The word's own message overlaps with nothing: it queues behind the bytes on the NIC.
    assert_eq!(alone(2, message, Line::Nic), 3 * nic.per_message + 1_000_000 + word);
}

/// Time until all of these copies have been made, each by the stream of the rank that comes first.
fn together(hardware: &Hardware, copies: &[(u32, u32, u32)], bytes: u64) -> u64 {
    let mut machine = Machine::new(Ring { nodes: 1, members: 4, whole: true }, hardware);
    for me in 0..4 {
        let mut tasks = VecDeque::new();
        for &(_, from, to) in copies.iter().filter(|(by, ..)| *by == me) {
            let mut copy = Task::Copy { place: Place::Peer, from, to, copies: 1, bytes };
            if !hardware.engines.switched {
                let peer = if to == me { from } else { to };
                copy = Task::Hand(Line::Engine(peer), Box::new(copy));
            }
            tasks.push_back(Task::Hand(Line::Stream, Box::new(copy)));
        }
        tasks.push_back(Task::Join(Line::Stream));
        let engines = if hardware.engines.switched { 0 } else { 4 };
        tasks.extend((0..engines).map(|nth| Task::Join(Line::Engine(nth))));
        tasks.push_back(Task::Mark(Phase::Move));
        machine.load(me, Program { tasks, ..Program::default() });
    }
    machine.run().ns
}

#[test]
fn copies_share_link_of_their_target_and_of_their_source() {
    let (hardware, bytes) = (h100(), 3_800_000);
    let one = together(&hardware, &[(0, 0, 3)], bytes);
    assert_eq!(one, 10_000);
    // Pushed to one rank; pulled from one rank; between four.
    assert_eq!(together(&hardware, &[(0, 0, 3), (1, 1, 3)], bytes), 2 * one);
    assert_eq!(together(&hardware, &[(0, 3, 0), (1, 3, 1)], bytes), 2 * one);
    assert_eq!(together(&hardware, &[(0, 0, 1), (2, 3, 2)], bytes), one);
}

#[test]
fn switched_peers_share_one_engine_others_have_one_each() {
    let (mut hardware, bytes) = (h100(), 16);
    let copies = [(0, 0, 1), (0, 0, 2), (0, 0, 3)];
    let price = hardware.engines.peer[0].per_copy;
    assert_eq!(together(&hardware, &copies, bytes), 3 * price);
    hardware.engines.switched = false;
    // They leave by one link, where 16 bytes take a nanosecond.
    assert_eq!(together(&hardware, &copies, bytes), price);
    assert_eq!(together(&hardware, &copies, 3_800_000), 30_000);
}

#[test]
fn small_copies_cost_what_their_step_says() {
    let cliff: Hardware = "h100-cx7-cliff".parse().unwrap();
    let [below, above] = [28_671, 28_672].map(|bytes| cliff.engines.copy(Place::Host, bytes));
    assert_eq!((below, above), (28_671_000_u64.div_ceil(6_800), 28_672_000_u64.div_ceil(44_000)));
    assert_eq!(cliff.engines.copy(Place::Host, 16), cliff.engines.host[0].per_copy);
}

#[test]
fn every_known_machine_figure_has_source_or_is_assumed() {
    for name in Hardware::NAMES {
        let hardware: Hardware = name.parse().unwrap();
        hardware.check().unwrap();
        assert_eq!(hardware.name, name);
        for figure in hardware.figures() {
            let source = hardware.source_of(&figure).unwrap_or_else(|| panic!("{name}: {figure}"));
            let known = ["measured: ", "published: ", "assumed"].iter().any(|word| source.starts_with(word));
            assert!(known, "{name}: {figure}: {source}");
        }
        let figures = hardware.figures();
        for name in hardware.sources.iter().flat_map(|source| &source.figures) {
            let used = figures.iter().any(|figure| figure == name || figure.starts_with(&format!("{name}.")));
            assert!(used, "{name} names no figure");
        }
        assert!(hardware.assumed().contains(&"compute.launch".to_owned()));
    }
}

#[test]
fn a_core_of_its_own_sends_and_receives_beside_its_copies() {
    let mut hardware = host();
    hardware.host.cores = 0;
    let mut machine = Machine::new(Ring { nodes: 2, members: 1, whole: true }, &hardware);
    let send = |to| Task::Hand(Line::Nic, Box::new(Task::Send { to, messages: 1, bytes: 80_000, rest: 0 }));
    for me in 0..2 {
        let tasks = [send(1 - me), Task::Busy(1_000), Task::Join(Line::Nic), Task::Mark(Phase::Move)];
        machine.load(me, Program { tasks: tasks.into(), ..Program::default() });
    }
    // In: a price of 100 and 10 us of bytes, concurrent with 1 us of other work; out of the ring 10
    // us more, by the same core.
    assert_eq!(machine.run().bottleneck, Bottleneck { part: Resource::Host, ns: 1_000 + 10_100 + 10_000 });
}

#[test]
fn hardware_that_would_divide_by_zero_is_refused_by_name() {
    let group = group((2, 1), 4, true);
    let case = case(&group, RowLayout::RankMajor, Route::Direct, SumOrder::Expert);
    let refused = |change: fn(&mut Hardware)| {
        let mut hardware = h100();
        change(&mut hardware);
        let of_slots = slots(8, SlotShape::new(4, 8, 4096).unwrap(), 4096, &hardware).unwrap_err();
        let placed = Placed::new(&case, &hardware).unwrap_err();
        match (of_slots, placed) {
            (
                PlanError::BadParameter { parameter, seen, .. },
                PlanError::BadParameter { parameter: same, .. },
            ) if parameter == same => (parameter, seen),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused(|h| h.nic.message_bytes = 0), ("nic.message_bytes", 0));
    assert_eq!(refused(|h| h.link.rate = 0), ("link.rate", 0));
    assert_eq!(refused(|h| h.compute.rate = 0), ("compute.rate", 0));
    assert_eq!(refused(|h| h.engines.own[0].per_copy = u64::MAX), ("engines.own", u64::MAX));
    assert_eq!(refused(|h| h.engines.host.clear()), ("engines.host", 0));
    assert_eq!(refused(|h| h.engines.peer[0].from_bytes = 1), ("engines.peer", 1));
    assert_eq!(refused(|h| h.host.cores = u32::MAX), ("host.cores", u64::from(u32::MAX)));
}

#[test]
fn every_way_ends_and_its_phases_add_up_above_the_roofline() {
    for shape in [(1, 4), (2, 2), (3, 2)] {
        let group = group(shape, 96, true);
        let alone = |mut hardware: Hardware| {
            hardware.host.cores = 0;
            hardware
        };
        for (title, timing) in timed(&group, |hardware| hardware).into_iter().chain(timed(&group, alone)) {
            assert_eq!(timing.phases.iter().map(|lap| lap.ns).sum::<u64>(), timing.ns, "{title}");
            assert!(
                timing.ns >= timing.roofline.ns && timing.roofline.ns > 0,
                "{shape:?} {title}: {timing:?}"
            );
            assert_eq!(timing.simulated_ranks, shape.0 * shape.1);
        }
    }
}

#[test]
fn the_same_case_takes_the_same_time() {
    let group = group((2, 3), 64, true);
    assert_eq!(timed(&group, |hardware| hardware), timed(&group, |hardware| hardware));
}

#[test]
fn one_node_that_stands_for_all_takes_as_long_as_all_simulated() {
    // Routing is drawn by chance, so the slowest of 32 ranks is slower than the slowest of 4.
    let (whole, one) = (group((8, 4), 512, true), group((8, 4), 512, false));
    for ((title, whole), (_, one)) in timed(&whole, |h| h).into_iter().zip(timed(&one, |h| h)) {
        let ratio = one.ns as f64 / whole.ns as f64;
        assert!((0.93..=1.01).contains(&ratio), "{title}: {} of {}", one.ns, whole.ns);
        assert_eq!((whole.simulated_ranks, one.simulated_ranks), (32, 4));
    }
}

#[test]
fn one_node_stands_exactly_for_others_that_decide_as_it_does() {
    // A rank between other nodes brings metadata in by one copy more than one of the first node.
    let one = Group { metadata: false, ..group((4, 2), 64, false) };
    let (each, experts) = (one.map.experts() as i32 / 4, one.map.experts() as i32);
    let turned = |rank: u32| {
        let (decided, by) = (&one.routings[rank as usize % 2], rank as i32 / 2 * each);
        let ids: Vec<i32> = decided.experts().iter().map(|id| (id + by) % experts).collect();
        Routing::new(8, ids, decided.weights().to_vec()).unwrap()
    };
    let routings = (0..8).map(turned).collect();
    let whole = Group { nodes: 4, metadata: false, map: one.map.clone(), routings };
    for ((title, whole), (_, one)) in timed(&whole, |h| h).into_iter().zip(timed(&one, |h| h)) {
        assert_eq!((whole.max, whole.roofline), (one.max, one.roofline), "{title}");
        assert_eq!(whole.ns, one.ns, "{title}");
    }
}

#[test]
fn bytes_to_peers_are_those_that_engines_are_counted_for() {
    use crate::CopyEngineWork;
    use sidelane_core::plan::{
        DispatchLayout, GroupRouting, PlanContext, RankRouting, ReceiveMode, RelayPlan,
    };
    use sidelane_core::schedule::{FillContext, WindowId};
    let group = group((2, 3), 80, true);
    for layout in RowLayout::ALL {
        let case = Case { metadata: false, ..case(&group, layout, Route::Direct, SumOrder::Expert) };
        let placed = Placed::new(&case, &h100()).unwrap();
        let frame = PlanContext { mode: ReceiveMode::Exact, ..placed.frame(0) };
        let metadata = sidelane_core::plan::RowMetadata::of(layout, ReceiveMode::Exact, false);
        let (mut everyone, mut work) = (GroupRouting::default(), Vec::new());
        let sort = |me: u32, sorted: &mut sidelane_core::plan::SortedRouting| {
            sorted.fill(&group.map, &placed.bins, metadata, me, &group.routings[me as usize])
        };
        everyone.sort(&frame, 8, sort).unwrap();
        everyone.each(&frame, (8, 80), |frame, RankRouting { sorted, crossing, counts, sizes }, _| {
            let mut layout = DispatchLayout::default();
            layout.fill(frame, (sorted, crossing), 8, counts, sizes);
            let (paths, control, sizing) = (frame.paths, &placed.control, placed.sizing);
            let setting = FillContext {
                paths,
                control,
                sizing,
                chunks: 4,
                parity: 0,
                far: WindowId::POOL,
                metadata: None,
            };
            work.push(CopyEngineWork::of_dispatch(&setting, &layout, &RelayPlan::default()));
        });
        let timing = placed.dispatch();
        let sum = |of: fn(&CopyEngineWork) -> u64| work.iter().map(of).sum::<u64>();
        assert_eq!(timing.total.intra_node_bytes, sum(|work| work.bytes), "{layout:?}");
        // Messages with counts, and headers, cross next to the rows.
        let beside = timing.total.inter_node_bytes - sum(|work| work.nic_bytes);
        assert!(beside > 0 && beside < timing.total.inter_node_bytes / 20, "{layout:?}: {beside}");
    }
}

#[test]
fn combine_gradient_is_timed_as_unplanned_dispatch_of_rows_only() {
    let group = group((2, 3), 256, true);
    for (layout, route) in RowLayout::ALL.into_iter().flat_map(|l| Route::ALL.map(|r| (l, r))) {
        let bare = Case { metadata: false, row_bytes: 2048, ..case(&group, layout, route, SumOrder::Expert) };
        let as_returned = Placed::new(&Case { row_bytes: bare.return_bytes, ..bare }, &h100()).unwrap();
        let (dispatch, gradient) =
            (as_returned.dispatch(), Placed::new(&bare, &h100()).unwrap().combine_backward());
        let title = format!("{layout:?} {route:?}: {dispatch:?} {gradient:?}");
        // The type in which rows went out makes no difference.
        assert_eq!(gradient, as_returned.combine_backward(), "{title}");
        let moved = |timing: &Timing| {
            [timing.total.intra_node_bytes, timing.total.self_bytes, timing.total.kernel_bytes]
        };
        assert_eq!(moved(&gradient), moved(&dispatch), "{title}");
        // Messages say that a node has entered, without counts.
        assert!(gradient.total.inter_node_bytes <= dispatch.total.inter_node_bytes, "{title}");
        let choices = 256 * 8;
        let host = h100().host;
        assert!(gradient.ns + (host.sort + host.place) * choices / 1000 / 2 < dispatch.ns, "{title}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn faster_links_and_nics_are_never_slower(by in 1..40u64, which in 0..5usize) {
        let group = group((2, 2), 48, true);
        let faster = |hardware: Hardware| {
            let mut h = hardware;
            match which {
                0 => h.engines.peer[0].rate += h.engines.peer[0].rate * by / 10,
                1 => h.link.rate += h.link.rate * by / 10,
                2 => h.nic.rate += h.nic.rate * by / 10,
                3 => h.compute.rate += h.compute.rate * by / 10,
                _ => h.engines.peer[0].per_copy = h.engines.peer[0].per_copy * 10 / (10 + by),
            }
            h
        };
        for ((title, slow), (_, fast)) in timed(&group, |h| h).into_iter().zip(timed(&group, faster)) {
            prop_assert!(fast.ns <= slow.ns, "{}: {} after {}", title, fast.ns, slow.ns);
        }
    }

    #[test]
    fn slots_grow_with_their_bytes(tokens in 1..200u32, more in 1..50u32) {
        let time = |tokens| slots(8, SlotShape::new(tokens, 8, 4096).unwrap(), 4096, &h100()).unwrap();
        let (few, many) = (time(tokens), time(tokens + more));
        prop_assert!(few.iter().zip(&many).all(|(few, many)| few.ns < many.ns));
    }
}

#[test]
fn one_node_stands_for_no_others_where_ranks_share_cores() {
    let one = group((2, 2), 16, false);
    let case = case(&one, RowLayout::ExpertMajor, Route::Pxn, SumOrder::Expert);
    let refused = Placed::new(&case, &host()).unwrap_err();
    assert!(matches!(refused, PlanError::BadParameter { parameter: "routings", seen: 2, .. }), "{refused}");
    let mut hardware = host();
    hardware.host.cores = 0;
    assert!(Placed::new(&case, &hardware).is_ok());
}
