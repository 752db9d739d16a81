//! Collectives are proved: every rank, every program, one after the other; seeded bugs are found,
//! or listed with the reason why they are harmless.

use sidelane_core::schedule::collective::{Program, RankView, Shape, Staging};
use sidelane_core::schedule::{Flag, FlagValue, Op};
use sidelane_core::topology::NodeMap;
use sidelane_verify::mutate::{Change, Mutation, mutations};
use sidelane_verify::prove::{AccessKind, MutantProver, ProofFailure, prove};
use sidelane_verify::random_check::check;
use sidelane_verify::unroll::{CollectiveBug, CollectiveCall, CollectiveScenario, UnrolledProgram};

/// Ranks by node.
const SHAPES: [&[u32]; 8] = [
    &[0],
    &[0; 2],
    &[0; 5],
    &[0, 1],
    &[0, 0, 1, 1],
    &[0, 1, 0, 2, 1],
    &[0, 0, 0, 1, 1, 1, 1, 1],
    &[0, 1, 2, 3],
];

pub fn programs(ranks: u32) -> Vec<Program> {
    let broadcast = |root, shape| Program::Broadcast { root, shape };
    let mut all = vec![Program::TwoShot { more: true }, Program::OneShot, Program::Ring, Program::AllToAll];
    all.extend([broadcast(0, Shape::Star), broadcast(ranks - 1, Shape::Chain), Program::AllGather]);
    all.extend([Program::ZeroCopy, Program::ReduceScatter]);
    all
}

/// A call of so many rounds: all but the last of them whole.
pub fn call(view: &RankView, program: Program, rounds: usize, last: u64) -> Vec<CollectiveCall> {
    let most = view.most(program);
    let mut calls = vec![CollectiveCall::Round { program, len: most }; rounds - 1];
    let program = if program.ends_in_the_next() { Program::TwoShot { more: false } } else { program };
    calls.push(CollectiveCall::Round { program, len: most.min(last) });
    calls
}

pub fn view_of(labels: &[u32], staging: Staging) -> RankView {
    RankView { nodes: NodeMap::from_labels(labels), me: 0, staging }
}

fn staging(ranks: usize) -> Staging {
    with_room(ranks, 128)
}

/// Slots of so many bytes, and room for parts that are larger and no whole lines.
pub fn with_room(ranks: usize, slot: u64) -> Staging {
    Staging::new(ranks as u32, ranks as u64 * slot).unwrap().with_room(ranks as u64 * (slot + 36)).unwrap()
}

fn unroll(labels: &[u32], calls: &[CollectiveCall], seeded: Option<CollectiveBug>) -> UnrolledProgram {
    let nodes = NodeMap::from_labels(labels);
    let scenario =
        CollectiveScenario { nodes: &nodes, staging: staging(labels.len()), calls, seeded, mutation: None };
    UnrolledProgram::of_collectives(&scenario).unwrap()
}

/// A program after itself and after every other, whole chunks and short ones; and ranks that make
/// two different calls.
fn rounds(labels: &[u32]) -> Vec<CollectiveCall> {
    let view = view_of(labels, staging(labels.len()));
    let round = |program, len| CollectiveCall::Round { program, len };
    let all = programs(view.ranks());
    let mut calls = Vec::new();
    for (&first, &then) in all.iter().flat_map(|first| all.iter().map(move |then| (first, then))) {
        // An all-reduce of two rounds, and of one.
        calls.extend(call(&view, first, 1 + usize::from(first.ends_in_the_next()), u64::MAX));
        calls.extend(call(&view, then, 1, 68));
    }
    for programs in [[0, 5], [4, 3], [4, 0], [1, 4], [3, 2], [6, 3], [0, 6], [7, 3], [0, 7]] {
        let programs = programs.map(|nth| all[nth]);
        calls.extend([64, u64::MAX].map(|len| CollectiveCall::Mixed { programs, len }));
    }
    calls.extend([round(Program::TwoShot { more: false }, 0), round(all[3], 4), round(all[2], 4)]);
    calls.extend([round(all[7], 0), round(all[7], 4)]);
    calls
}

#[test]
fn every_collective_behind_every_other_is_proved() {
    for labels in SHAPES {
        let unrolled = unroll(labels, &rounds(labels), None);
        let proof = prove(&unrolled).unwrap_or_else(|fault| panic!("{labels:?}: {fault}"));
        println!("{labels:?}: {} operations, {} pairs", proof.operations, proof.pairs);
        assert!(labels.len() == 1 || proof.pairs > 1000, "{labels:?}: {proof:?}");
    }
}

#[test]
fn every_rank_of_sixty_four_is_proved() {
    let half = |rank: u32| rank % 7;
    for labels in
        [vec![0; 64], (0..64).map(half).collect::<Vec<u32>>(), (0..64).map(|rank| rank / 8).collect()]
    {
        let staging = staging(64);
        for program in programs(64) {
            let unrolled = unroll(&labels, &call(&view_of(&labels, staging), program, 3, u64::MAX), None);
            let proof = prove(&unrolled).unwrap_or_else(|fault| panic!("{labels:?} {program:?}: {fault}"));
            assert!(proof.operations > 64 * 63, "{program:?}");
        }
    }
}

/// Parts are counted in eight bits: 256 ranks are the most that a ring may have.
#[test]
fn ring_of_256_ranks_counts_all_its_parts() {
    let nodes = NodeMap::from_labels(&[0; 256]);
    let ring = RankView { nodes, me: 255, staging: staging(256) }.skeleton(Program::Ring);
    for (step, flag) in [("sum", Flag::Landed), ("gather", Flag::Returned)] {
        let step = ring.steps.iter().find(|known| known.stage.name == step).unwrap();
        let mut ops = step.stage.items.iter().map(|item| item.op);
        let last = Op::Wait { from: 254, flag, level: FlagValue::Part(255) };
        assert!(ops.any(|op| op == last), "{step:?}");
    }
}

#[test]
fn collectives_run_at_random() {
    for labels in SHAPES.into_iter().filter(|labels| labels.len() <= 5) {
        let unrolled = unroll(labels, &rounds(labels)[..24], None);
        check(&unrolled, 0..4).unwrap_or_else(|fault| panic!("{labels:?}: {fault}"));
    }
}

#[test]
fn every_broken_rule_of_places_is_found() {
    for labels in [&[0, 0, 1, 1][..], &[0; 3], &[0, 1]] {
        for seeded in CollectiveBug::ALL {
            let seen = prove(&unroll(labels, &rounds(labels), Some(seeded)));
            assert!(seen.is_err(), "{labels:?} {seeded:?}");
        }
    }
}

/// Copies after the entry of the next round must not wait for the round after it.
#[test]
fn sums_that_are_copied_two_entries_late_are_found() {
    for labels in [&[0, 0, 1, 1][..], &[0; 3], &[0, 1]] {
        let calls =
            call(&view_of(labels, staging(labels.len())), Program::TwoShot { more: true }, 4, u64::MAX);
        prove(&unroll(labels, &calls, None)).unwrap_or_else(|fault| panic!("{labels:?}: {fault}"));
        assert!(prove(&unroll(labels, &calls, Some(CollectiveBug::CopyLate))).is_err(), "{labels:?}");
    }
}

/// In-place results are the caller's until it enters again: a put before that entry, or a later
/// read, is reported with both accesses.
#[test]
fn results_landed_in_place_are_lent_only_until_next_entry() {
    for labels in SHAPES.into_iter().filter(|labels| labels.len() > 1) {
        let calls = call(&view_of(labels, staging(labels.len())), Program::ZeroCopy, 3, u64::MAX);
        for seeded in [CollectiveBug::LandFirst, CollectiveBug::ReadOn] {
            let fault = prove(&unroll(labels, &calls, Some(seeded))).unwrap_err();
            let ProofFailure::Race { a, b, .. } = fault else { panic!("{labels:?} {seeded:?}: {fault}") };
            assert_eq!(a.rank.min(b.rank), 0, "{labels:?} {seeded:?}");
            let mut what = [a.what, b.what];
            what.sort_by_key(|what| matches!(what, AccessKind::Reads(_)));
            let names_both =
                matches!(what, [AccessKind::Op(Op::Put { .. }, _), AccessKind::Reads("what has landed")]);
            assert!(names_both, "{labels:?} {seeded:?}: {what:?}");
        }
    }
}

/// Whether a rank's put on entry is for `to`.
fn is_for(program: Program, nodes: &NodeMap, me: u32, to: u32) -> bool {
    match program {
        Program::Ring | Program::ZeroCopy => false,
        Program::Broadcast { root, .. } => me == root && nodes.same_node(me, to),
        Program::OneShot | Program::TwoShot { .. } => true,
        Program::AllToAll | Program::AllGather | Program::ReduceScatter => true,
    }
}

/// Whether `to` hands nothing on, and so waits for the last part of a broadcast alone.
fn is_last(program: Program, nodes: &NodeMap, to: u32) -> bool {
    let Program::Broadcast { root, .. } = program else { return false };
    let all = nodes.nodes();
    nodes.rail_peer(root, (nodes.node_of(root) + all - 1) % all) == to
}

/// Reason why a mutant is unobservable; `None` if it must be found.
fn harmless(mutation: &Mutation, moves: bool, program: Program, nodes: &NodeMap) -> Option<&'static str> {
    let Mutation { rank: me, item, other, change, .. } = *mutation;
    let last = last_part(program, nodes.ranks());
    let is_own = |op| matches!(op, Op::Put { to, .. } if to == me);
    let entry_alone =
        |op| matches!(op, Op::Signal { to, flag: Flag::Entry, .. } if !is_for(program, nodes, me, to));
    match (change, item.op, other) {
        (_, Op::Put { .. }, _) if !moves => Some("it moves nothing"),
        (Change::Swap, op, Some(next)) => match (op, next) {
            (op, next) if keeps_own(program) && [op, next].into_iter().any(is_own) => {
                Some("this rank alone reads what it puts to itself, when the stage is over")
            }
            (Op::Put { to: a, .. }, Op::Put { .. }) if a != me => Some("two puts in either order"),
            (Op::Put { to: a, .. }, Op::Signal { to: b, .. }) if a != b && a != me => {
                Some("the signal is for another rank than the bytes")
            }
            (Op::Put { .. }, signal) if entry_alone(signal) => {
                Some("what was put on entering is not for that rank")
            }
            (Op::Put { .. }, Op::Signal { to, level: FlagValue::Part(part), .. })
                if part < last && is_last(program, nodes, to) =>
            {
                Some("that rank waits for the last part alone")
            }
            (Op::Signal { to: a, .. }, Op::Signal { to: b, .. }) if a != b => Some("two words of two ranks"),
            (Op::Signal { .. }, Op::Put { .. }) => Some("the signal is later"),
            (Op::Signal { .. }, Op::Wait { .. }) => {
                Some("one rank alone waits first: stricter, and nobody waits for it in turn")
            }
            (Op::Wait { .. }, Op::Wait { .. }) => Some("two waits in either order"),
            _ => None,
        },
        (Change::First | Change::Retrack, op, _) if entry_alone(op) => {
            Some("what was put on entering is not for that rank")
        }
        (Change::First, Op::Signal { to, level: FlagValue::Part(1), .. }, _)
            if last > 1 && is_last(program, nodes, to) =>
        {
            Some("that rank waits for the last part alone")
        }
        (Change::Drop, Op::Signal { level: FlagValue::Part(part), .. }, _) if part < last => {
            Some("the next part says it too")
        }
        (Change::Raise, Op::Signal { level: FlagValue::Part(part), .. }, _) if part == last => {
            Some("nobody waits for a part behind the last")
        }
        (Change::Lower, Op::Signal { level: FlagValue::Part(1), .. }, _) if last > 1 => {
            Some("the next part says it too")
        }
        (Change::Lower, Op::Wait { level: FlagValue::Part(1), .. }, _) => {
            Some("no call says anything before its first part")
        }
        _ => None,
    }
}

/// Whether a rank's put to itself is read by this rank alone.
fn keeps_own(program: Program) -> bool {
    matches!(program, Program::ZeroCopy | Program::ReduceScatter)
}

/// Parts that a program counts.
fn last_part(program: Program, ranks: u32) -> u8 {
    match program {
        Program::Ring => (ranks - 1) as u8,
        Program::Broadcast { shape, .. } => shape.parts(),
        _ => 0,
    }
}

/// Number of found mutants, and unexpected results.
fn survivors(labels: &[u32], program: Program) -> (usize, Vec<String>) {
    // Enough for each part of a broadcast to have bytes.
    let staging = with_room(labels.len(), 512);
    let nodes = NodeMap::from_labels(labels);
    let calls = call(&view_of(labels, staging), program, 4, u64::MAX);
    let scenario = CollectiveScenario { nodes: &nodes, staging, calls: &calls, seeded: None, mutation: None };
    let unrolled = UnrolledProgram::of_collectives(&scenario).unwrap();
    let prover = MutantProver::new(&unrolled);
    prover.prove(&unrolled).expect("the real program has no fault");
    let (mut found, mut wrong) = (0, Vec::new());
    for mutation in mutations(&unrolled) {
        match (
            prover.prove(&mutation.plant(&unrolled)),
            harmless(&mutation, mutation.moves(&unrolled), program, &nodes),
        ) {
            (Err(_), None) => found += 1,
            (Ok(_), None) => wrong.push(format!("not found: {mutation:?}")),
            (Err(fault), Some(why)) => wrong.push(format!("not harmless ({why}): {mutation:?}: {fault}")),
            (Ok(_), Some(_)) => {}
        }
    }
    (found, wrong)
}

#[test]
fn every_mutant_of_a_collective_is_found() {
    for labels in [&[0, 0, 1, 1][..], &[0; 3], &[0, 1, 2, 2]] {
        for program in programs(labels.len() as u32) {
            let (found, wrong) = survivors(labels, program);
            println!("{labels:?} {program:?}: {found} found");
            assert_eq!(wrong, Vec::<String>::new(), "{labels:?} {program:?}");
            assert!(found > 20, "{labels:?} {program:?}");
        }
    }
}
