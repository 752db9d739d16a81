//! The schedules that run are proved: for groups of every shape, over consecutive calls, with memory reused as soon as
//! the rules allow.

mod groups;

use std::collections::BTreeSet;
use std::time::Instant;

use groups::{Group, ROWS, copy, dispatch, placements, placements_in_spans, ret, rounds, ways};
use sidelane::plan::Order;
use sidelane::schedule::check::check;
use sidelane::schedule::prove::{Fault, Proof, prove};
use sidelane::schedule::story::{Call, Relays, Script, Slip, Story};
use sidelane::schedule::{Flag, Level, Op};
use sidelane::topology::{NodeMap, Paths, Route};

fn proved(name: &str, story: &Story) -> Proof {
    let start = Instant::now();
    let proof = prove(story).unwrap_or_else(|fault| panic!("{name}: {fault}"));
    println!(
        "{name:>27}: {:>7} operations, {:>7} accesses, {:>7} pairs, {:.0?}",
        proof.operations,
        proof.accesses,
        proof.pairs,
        start.elapsed()
    );
    assert_eq!(proof.operations, story.operations());
    proof
}

fn titled(name: &str, (route, relays): (Route, Relays)) -> String {
    format!("{name}, {} {relays:?}", route.name())
}

#[test]
fn every_shape_of_group_is_proved() {
    let shapes: [(&str, &[u32]); 12] = [
        ("1", &[0]),
        ("1 x 2", &[0, 0]),
        ("2 x 1", &[0, 1]),
        ("1 x 3", &[0, 0, 0]),
        ("1 x 4", &[0; 4]),
        ("2 x 2", &[0, 0, 1, 1]),
        ("interleaved", &[0, 1, 0, 1]),
        ("3 + 1", &[0, 0, 0, 1]),
        ("4 x 1", &[0, 1, 2, 3]),
        ("1 x 8", &[0; 8]),
        ("3 + 5", &[0, 0, 0, 1, 1, 1, 1, 1]),
        ("8, mixed", &[0, 1, 2, 0, 1, 0, 0, 1]),
    ];
    for (name, labels) in shapes {
        for (seed, way) in (1..).zip(ways()) {
            let group = Group::new(labels, 1 + 3 * (seed as u32 % 2), seed).run(way);
            let name = titled(name, way);
            let proof = proved(&name, &group.tell(&rounds(), None));
            assert!(proof.pairs > 20, "{name}: memory is reused, so accesses meet");
        }
    }
}

#[test]
fn every_placement_is_proved_and_run_at_random() {
    let shapes: [(&str, &[u32]); 3] =
        [("2 x 2", &[0, 0, 1, 1]), ("3 + 1", &[0, 0, 1, 0]), ("1 x 3", &[0, 0, 0])];
    for (name, labels) in shapes {
        for (way, placement) in ways().flat_map(|way| placements().map(move |placement| (way, placement))) {
            let group = Group::new(labels, 2, 5).run(way).placed(placement);
            let story = group.tell(&rounds(), None);
            let name = format!("{} {placement:?}", titled(name, way));
            proved(&name, &story);
            check(&story, 0..3).unwrap_or_else(|fault| panic!("{name}: {fault}"));
        }
    }
}

#[test]
fn spans_are_proved_and_run_at_random_in_every_mode_and_order() {
    let shapes: [(&str, &[u32]); 4] = [
        ("2 x 2", &[0, 0, 1, 1]),
        ("3 + 1", &[0, 0, 1, 0]),
        ("3 + 5", &[0, 0, 0, 1, 1, 1, 1, 1]),
        ("3, mixed", &[0, 1, 2, 0, 1]),
    ];
    for (name, labels) in shapes {
        for (relays, placed) in Relays::ALL.iter().flat_map(|r| placements_in_spans().map(move |p| (*r, p))) {
            let group = Group::new(labels, 2, 5).in_spans(relays, placed);
            let story = group.tell(&rounds(), None);
            let name = format!("{name} in spans, {relays:?} {placed:?}");
            proved(&name, &story);
            check(&story, 0..2).unwrap_or_else(|fault| panic!("{name}: {fault}"));
        }
    }
}

#[test]
fn rows_that_copy_engines_bring_home_are_proved_and_run_at_random() {
    let calls = [
        dispatch(0),
        dispatch(1),
        ret(0, ROWS),
        copy(1, ROWS),
        Call::RefusedDispatch { routing: 1 },
        dispatch(0),
        ret(2, ROWS),
        Call::RefusedReturn { handle: 2 },
        copy(2, ROWS),
        dispatch(1),
        Call::Mixed { routing: 0, handle: 2 },
        ret(3, ROWS),
        dispatch(0),
        ret(4, ROWS),
    ];
    let shapes: [(&str, &[u32]); 8] = [
        ("1", &[0]),
        ("1 x 2", &[0; 2]),
        ("1 x 3", &[0; 3]),
        ("1 x 8", &[0; 8]),
        ("2 x 2", &[0, 0, 1, 1]),
        ("3 x 1", &[0, 1, 2]),
        ("3 + 5", &[0, 0, 0, 1, 1, 1, 1, 1]),
        ("5, mixed", &[0, 1, 2, 0, 1]),
    ];
    for ((name, labels), route) in shapes.into_iter().flat_map(|shape| Route::ALL.map(|route| (shape, route)))
    {
        for (align, straight) in [(1, false), (4, false), (1, true), (4, true)] {
            let group = Group::new(labels, align, 5).run((route, Relays::Inline)).pulling();
            let group = if straight { group.straight() } else { group };
            let story = group.tell(&calls, None);
            let name = format!("{name} {} by engines, {align}, straight: {straight}", route.name());
            let proof = proved(&name, &story);
            assert!(proof.pairs > 20, "{name}: memory is reused, so accesses meet");
            check(&story, 0..3).unwrap_or_else(|fault| panic!("{name}: {fault}"));
        }
    }
}

#[test]
fn all_gather_and_reduce_scatter_are_proved_and_run_at_random() {
    let shapes: [(&str, &[u32]); 6] = [
        ("1 x 4", &[0; 4]),
        ("2 x 2", &[0, 0, 1, 1]),
        ("4 x 1", &[0, 1, 2, 3]),
        ("3 + 1", &[0, 0, 1, 0]),
        ("3 + 5", &[0, 0, 0, 1, 1, 1, 1, 1]),
        ("5, mixed", &[0, 1, 2, 0, 1]),
    ];
    for (name, labels) in shapes {
        for (way, order) in ways().flat_map(|way| Order::ALL.map(|order| (way, order))) {
            let group = Group::new(labels, 1, 5).gathering(way, order);
            let story = group.tell(&rounds(), None);
            let name = format!("{name} gathered, {order:?}, {}", titled("", way));
            let proof = proved(&name, &story);
            assert!(proof.pairs > 20, "{name}: memory is reused, so accesses meet");
            check(&story, 0..2).unwrap_or_else(|fault| panic!("{name}: {fault}"));
        }
    }
}

#[test]
fn sixty_four_ranks_are_proved_in_seconds() {
    let one: Vec<u32> = vec![0; 64];
    let eight: Vec<u32> = (0..64).map(|rank| rank / 8).collect();
    let three = groups::pairs(3);
    let away = Route::ALL.map(|route| (route, Relays::Away));
    let mut all = vec![("1 x 64", one, away[0], &three)];
    all.extend(away.map(|way| ("8 x 8", eight.clone(), way, &three)));
    let many = rounds();
    all.push(("8 x 8, all", eight, away[1], &many));
    for (name, labels, way, calls) in all {
        let group = Group::new(&labels, 1, 3).run(way);
        let name = titled(name, way);
        let start = Instant::now();
        let story = group.tell(calls, None);
        println!("{name:>27}: told in {:.0?}", start.elapsed());
        let proof = proved(&name, &story);
        assert!(proof.operations > 50_000, "every rank meets every other, three times there and back");
        assert!(start.elapsed().as_secs() < 60);
    }
    // Every layout, mode and order, on both routes.
    let labels: Vec<u32> = (0..64).map(|rank| rank / 8).collect();
    for (way, placement) in away.into_iter().flat_map(|way| placements().map(move |placed| (way, placed))) {
        let group = Group::new(&labels, 1, 3).run(way).placed(placement);
        proved(&format!("{} {placement:?}", titled("8 x 8", way)), &group.tell(&groups::pairs(2), None));
    }
    for placement in placements_in_spans() {
        let group = Group::new(&labels, 1, 3).in_spans(Relays::Away, placement);
        proved(&format!("8 x 8 in spans {placement:?}"), &group.tell(&groups::pairs(2), None));
    }
}

/// Three nodes of 128: two accesses that meet lie in the memory of one node, and are made by ranks of two others at most.
#[test]
fn a_sample_of_a_thousand_ranks_is_proved_in_seconds() {
    let labels: Vec<u32> = (0..1024).map(|rank| rank / 8).collect();
    let sample: Vec<u32> = [0, 1, 77].iter().flat_map(|node| 8 * node..8 * node + 8).collect();
    let calls = [dispatch(0), ret(0, ROWS), Call::Cached { handle: 0 }, copy(0, ROWS), dispatch(0)];
    for way in Route::ALL.map(|route| (route, Relays::Away)) {
        let (group, name) = (Group::sampled(&labels, &sample).run(way), titled("128 x 8", way));
        let start = Instant::now();
        let story = Story::tell(&Script { sample: Some(&sample), ..group.script(&calls, None) }).unwrap();
        println!("{name:>27}: told in {:.0?}", start.elapsed());
        assert_eq!((story.ranks, story.actors), (1024, 48));
        proved(&name, &story);
        assert!(start.elapsed().as_secs() < 60);
    }
}

#[test]
fn a_sample_finds_what_the_whole_finds() {
    let sample = [0, 1, 2, 3, 6, 7];
    for way in ways() {
        let group = Group::new(&[0, 0, 1, 1, 2, 2, 3, 3], 2, 3).run(way);
        for slip in Slip::ALL.map(Some).into_iter().chain([None]) {
            let whole = prove(&group.tell(&rounds(), slip));
            let story =
                Story::tell(&Script { sample: Some(&sample), ..group.script(&rounds(), slip) }).unwrap();
            assert!(!story.assumed.is_empty());
            let seen = prove(&story);
            assert_eq!(seen.is_err(), whole.is_err(), "{way:?} {slip:?}: {seen:?} {whole:?}");
        }
    }
}

#[test]
fn random_runs_see_what_the_run_in_order_sees() {
    for (name, labels, seeds) in [
        ("2 x 2", &[0, 0, 1, 1][..], 100),
        ("3 + 1", &[0, 0, 0, 1], 100),
        ("3 + 5", &[0, 0, 0, 1, 1, 1, 1, 1], 5),
    ] {
        for way in ways() {
            let (group, name) = (Group::new(labels, 2, 4).run(way), titled(name, way));
            let start = Instant::now();
            let checked = check(&group.tell(&rounds(), None), 0..seeds)
                .unwrap_or_else(|fault| panic!("{name}: {fault}"));
            println!(
                "{name:>27}: {} seeds, {} late deliveries, {:.0?}",
                checked.seeds,
                checked.deliveries,
                start.elapsed()
            );
            assert_eq!(checked.seeds, seeds);
            assert!(checked.deliveries > 1000 * seeds);
        }
    }
}

#[test]
fn random_runs_see_the_difference_when_a_wait_is_missing() {
    let missing: [(Route, Relays, u32, Op); 3] = [
        (Route::Direct, Relays::Inline, 0, wait(2, Flag::Landed, Level::Call)),
        (Route::Pxn, Relays::Away, 1, wait(2, Flag::Landed, Level::Call)),
        (Route::Pxn, Relays::Away, 4, wait(2, Flag::Block, Level::Part(2))),
    ];
    for (route, relays, actor, wait) in missing {
        let group = Group::new(&[0, 0, 1, 1], 2, 4).run((route, relays));
        let mut story = group.tell(&rounds(), None);
        let steps = story.calls.iter_mut().flat_map(|call| &mut call[actor as usize].scenes);
        steps.for_each(|scene| scene.steps.retain(|step| step.op != wait));
        let fault = check(&story, 0..200).unwrap_err();
        println!("{} {relays:?}: {fault}", route.name());
        assert!(matches!(fault, Fault::Differs { .. }), "{fault}");
    }
}

fn wait(from: u32, flag: Flag, level: Level) -> Op {
    Op::Wait { from, flag, level }
}

/// What crosses from rank to rank: who signals whom which word.
fn signals(story: &Story, call: usize) -> Vec<(u32, u32, Flag)> {
    let mut all = Vec::new();
    for part in &story.calls[call] {
        for step in part.scenes.iter().flat_map(|scene| &scene.steps) {
            if let Op::Signal { to, flag, .. } = step.op
                && to != part.rank
            {
                all.push((part.rank, to, flag));
            }
        }
    }
    all
}

#[test]
fn a_rank_hears_once_of_every_neighbour_and_of_every_other_node() {
    let shapes: [&[u32]; 5] = [
        &[0, 0, 0, 0, 1, 1, 1, 1],
        &[0, 0, 0, 1, 1, 1, 1, 1],
        &[0, 1, 0, 1, 0, 1, 0, 1],
        &[0, 1, 2, 0, 1, 0, 0, 1],
        &[0; 8],
    ];
    for (labels, way) in shapes.iter().flat_map(|&labels| ways().map(move |way| (labels, way))) {
        for nodes in [NodeMap::from_labels(labels), NodeMap::from_labels(labels).subset(&[6, 1, 4, 3, 2])] {
            let group = Group::over(nodes, 1, 3).run(way);
            let story = group.tell(&[dispatch(0), Call::Cached { handle: 0 }, ret(0, ROWS)], None);
            for (call, rank) in (0..3).flat_map(|call| (0..story.ranks).map(move |rank| (call, rank))) {
                let heard =
                    signals(&story, call).iter().filter(|s| (s.1, s.2) == (rank, Flag::Entry)).count();
                let neighbours = group.nodes.members(group.nodes.node_of(rank)).len() - 1;
                assert_eq!(heard, neighbours + group.nodes.nodes() as usize - 1, "{labels:?} {way:?}");
            }
        }
    }
}

#[test]
fn nothing_crosses_but_on_wires() {
    let mixed = [0, 1, 2, 0, 1, 0, 0, 1];
    for (labels, way) in
        [mixed, [0, 0, 0, 1, 1, 1, 1, 1]].iter().flat_map(|l| ways().map(move |way| (l, way)))
    {
        let group = Group::new(labels, 1, 3).run(way);
        let story = group.tell(&rounds(), None);
        let (mut used, paths) = (BTreeSet::new(), Paths::new(&group.nodes, way.0, 0));
        for part in story.calls.iter().flatten() {
            for step in part.scenes.iter().flat_map(|scene| &scene.steps) {
                let (Op::Put { to, .. } | Op::PutRows { to, .. } | Op::Signal { to, .. }) = step.op else {
                    continue;
                };
                let from = paths.of(part.rank);
                if !from.near(to) {
                    assert!(from.wired(to), "{} {}: {} -> {to}", way.0.name(), part.rank, to);
                    used.insert((part.rank.min(to), part.rank.max(to)));
                }
            }
        }
        let pairs = (0..8).flat_map(|a| (0..a).map(move |b| (b, a)));
        let wires: BTreeSet<(u32, u32)> = pairs.filter(|&(a, b)| paths.of(a).wired(b)).collect();
        assert_eq!(used, wires, "each wire has its use");
    }
}

/// Each track in turn, peers rotated: what looks natural, and what hardware queues turn into a deadlock.
fn track_after_track(story: &mut Story) {
    let ranks = story.ranks;
    for part in story.calls.iter_mut().flatten() {
        let rank = part.rank;
        for scene in &mut part.scenes {
            scene.steps.sort_by_key(|step| (step.track + ranks - rank - 1) % ranks);
        }
    }
}

#[test]
fn launching_track_after_track_deadlocks_on_one_queue() {
    let group = Group::new(&[0; 8], 1, 3);
    let mut story = group.tell(&groups::pairs(2), None);
    track_after_track(&mut story);
    let fault = prove(&story).unwrap_err();
    println!("{fault}");
    assert!(matches!(fault, Fault::Deadlock { queues: 1, .. }), "{fault}");
}

#[test]
fn waiting_first_deadlocks_when_every_rank_does() {
    let group = Group::new(&[0, 0, 1, 1], 1, 3);
    let mut story = group.tell(&groups::pairs(2), None);
    for scene in story.calls.iter_mut().flatten().flat_map(|part| &mut part.scenes) {
        scene.steps.sort_by_key(|step| !matches!(step.op, Op::Wait { .. }));
    }
    assert!(matches!(prove(&story), Err(Fault::Deadlock { .. })));
}

#[test]
fn what_is_doubled_is_doubled_for_refused_calls() {
    let moves =
        |call: &Call| matches!(call, Call::Dispatch { .. } | Call::Cached { .. } | Call::Return { .. });
    let calls: Vec<Call> = rounds().into_iter().filter(moves).collect();
    for way in ways() {
        let group = Group::new(&[0, 0, 1, 1], 1, 3).run(way);
        for slip in [Slip::OneTag, Slip::OnePublication, Slip::OneMessage] {
            // A relay that is away goes on with the next call while its rank still reads the messages of the last.
            let ahead = slip == Slip::OneMessage && way.1 == Relays::Away;
            let seen = prove(&group.tell(&calls, Some(slip)));
            assert_eq!(seen.is_err(), ahead, "whoever moves rows has read tags and counts: {seen:?}");
            let fault = prove(&group.tell(&rounds(), Some(slip))).unwrap_err();
            assert!(matches!(fault, Fault::Race { .. }), "{fault}");
        }
    }
}

#[test]
fn calls_that_ranks_disagree_about_are_counted_by_all() {
    let mixed = Call::Mixed { routing: 1, handle: 0 };
    let calls = [dispatch(0), mixed, dispatch(1), ret(1, ROWS), mixed, mixed, ret(0, ROWS), dispatch(0)];
    let alike: Vec<Call> = calls.into_iter().filter(|&call| call != mixed).collect();
    for (labels, way) in [[0, 0, 1, 1], [0; 4]].iter().flat_map(|l| ways().map(move |way| (l, way))) {
        let group = Group::new(labels, 1, 3).run(way);
        let story = group.tell(&calls, None);
        proved("mixed", &story);
        check(&story, 0..30).unwrap_or_else(|fault| panic!("{labels:?}: {fault}"));

        // Once, publications took turns by the number of dispatches: right as long as all make the same calls.
        let slip = Some(Slip::CountDispatches);
        prove(&group.tell(&alike, slip)).expect("all count the same dispatches");
        let fault = prove(&group.tell(&calls, slip)).unwrap_err();
        println!("{labels:?} {way:?}: {fault}");
        assert!(matches!(fault, Fault::Unwritten { of: 2 | 7, .. }), "{fault}");
    }
}
