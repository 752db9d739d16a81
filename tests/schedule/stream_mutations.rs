//! Slots on streams with one bug planted: `prove` finds every one, unless it breaks none of the
//! rules by which the schedule works.

use std::collections::BTreeMap;

use sidelane_core::error::CallKind;
use sidelane_core::schedule::call_program::{Action, SlotCall, Work};
use sidelane_core::schedule::stream_program::RowPath;
use sidelane_core::schedule::{FlagValue, Op, TrackOp};
use sidelane_core::topology::NodeMap;
use sidelane_verify::mutate::{CallChange, CallMutation};
use sidelane_verify::mutate::{Change, Mutation, mutations};
use sidelane_verify::prove::{MutantProver, prove};
use sidelane_verify::random_check::check;
use sidelane_verify::unroll::StreamCall::{self, Combine, Dispatch, Release};
use sidelane_verify::unroll::{Refusals, RefusedCall, StreamScenario, Streams, UnrolledOp, UnrolledProgram};
use sidelane_verify::value_flow;

use crate::replays::{slots, thrice};

/// Operation of a rank with a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Act {
    Put,
    Signal,
    Wait,
    SetBack,
}

/// The two stages of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum When {
    Dispatch,
    Combine,
}

/// One operation of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Which {
    when: When,
    act: Act,
    peer: u32,
}

fn which(when: When, op: Op) -> Which {
    let (act, peer) = match op {
        Op::Put { to, .. } => (Act::Put, to),
        Op::Signal { of, level: FlagValue::Reset, .. } => (Act::SetBack, of),
        Op::Signal { to, .. } => (Act::Signal, to),
        Op::Wait { from, .. } => (Act::Wait, from),
        Op::PutRows { .. } | Op::Reduce { .. } => panic!("streams have none: {op:?}"),
    };
    Which { when, act, peer }
}

/// Why one operation must come before another with the same peer. All other orders are free: two
/// copies of a batch, two words of two peers. A wait before own signals is free, too, since only
/// one rank is stricter then, and no rank waits for it in turn.
fn rule(first: Which, then: Which) -> Option<&'static str> {
    use Act::{Put, SetBack, Signal, Wait};
    match ((first.when, first.act), (then.when, then.act)) {
        ((a, Put), (b, Signal)) if a == b => Some("a signal says that what was put has landed"),
        ((a, Wait), (b, SetBack)) if a == b => Some("a word is set back when it has been seen"),
        ((When::Dispatch, SetBack), (When::Combine, Signal)) => {
            Some("who hears that its slot is read raises that word again")
        }
        ((When::Dispatch, Signal), (When::Combine, Wait)) => Some("nothing returns before it was sent"),
        _ => None,
    }
}

/// A replay of one rank: the operations of a dispatch, `None` for the experts, those of the
/// combine.
type Replay<T> = Vec<Option<T>>;

/// The first rule that a replay breaks.
fn broken(replay: &Replay<Which>) -> Option<&'static str> {
    let experts = replay.iter().position(Option::is_none)?;
    for (at, one) in replay.iter().enumerate().filter_map(|(at, one)| one.map(|one| (at, one))) {
        match (one.when, one.act) {
            (When::Dispatch, Act::Wait) if at > experts => return Some("experts read what has landed"),
            (When::Combine, Act::Signal) if at < experts => return Some("it is the experts who have read"),
            _ => {}
        }
        let later = replay[at..].iter().flatten().filter(|later| later.peer == one.peer);
        if let Some(why) = later.filter_map(|&later| rule(later, one)).next() {
            return Some(why);
        }
    }
    None
}

fn taken<T: Clone>(replay: &Replay<T>, from: usize, to: usize) -> Replay<T> {
    let mut moved = replay.clone();
    let one = moved.remove(from);
    moved.insert(to, one);
    moved
}

/// The unrolled program with one operation of a rank moved, in every replay.
fn moved(unrolled: &UnrolledProgram, rank: u32, from: usize, to: usize) -> UnrolledProgram {
    let mut unrolled = unrolled.clone();
    for first in (0..unrolled.calls.len()).step_by(2) {
        let steps =
            |call: usize| unrolled.calls[call][rank as usize].scenes[0].steps.iter().copied().map(Some);
        let replay: Replay<UnrolledOp> = steps(first).chain([None]).chain(steps(first + 1)).collect();
        let moved = taken(&replay, from, to);
        let stages = moved.split(Option::is_none).map(|steps| steps.iter().copied().flatten().collect());
        for (call, steps) in (first..).zip(stages) {
            unrolled.part_mut(call, rank).scenes[0].steps = steps;
        }
    }
    unrolled
}

fn unroll(ranks: u32, calls: &[StreamCall]) -> UnrolledProgram {
    UnrolledProgram::of_streams(&StreamScenario {
        slots: slots(ranks),
        streams: Streams::One,
        across: None,
        calls,
        refuses: None,
        seeded: None,
        planted: None,
    })
    .unwrap()
}

/// Mutants of one class: how many, how many of them were found, and how.
#[derive(Default)]
struct Tally {
    mutants: usize,
    found: usize,
    example: String,
}

fn report(title: &str, tallies: &BTreeMap<String, Tally>) {
    println!("{title:<58} mutants  found");
    for (class, Tally { mutants, found, example }) in tallies {
        println!("  {class:<56} {mutants:>7} {found:>6}   {example}");
    }
}

/// Every operation of every rank, moved to every other place of its replay.
fn every_move(ranks: u32, answer: StreamCall) {
    let unrolled = unroll(ranks, &thrice(&[Dispatch(0), answer]));
    let prover = MutantProver::new(&unrolled);
    prover.prove(&unrolled).expect("the real schedule has no fault");
    let mut tallies: BTreeMap<String, Tally> = BTreeMap::new();
    for rank in 0..ranks {
        let stage = |call: usize, when| {
            let steps = &unrolled.calls[call][rank as usize].scenes[0].steps;
            steps.iter().map(move |step| Some(which(when, step.op)))
        };
        let replay: Replay<Which> =
            stage(0, When::Dispatch).chain([None]).chain(stage(1, When::Combine)).collect();
        assert_eq!(broken(&replay), None);
        for (from, to) in (0..replay.len()).flat_map(|from| (0..replay.len()).map(move |to| (from, to))) {
            let (Some(one), after) = (replay[from], taken(&replay, from, to)) else { continue };
            let in_dispatch = after.iter().take_while(|one| one.is_some()).any(|other| *other == Some(one));
            // The bytes of a put are those of its stage.
            if from == to || one.act == Act::Put && in_dispatch != (one.when == When::Dispatch) {
                continue;
            }
            // Puts of a release move nothing, and nothing need follow them.
            let moves =
                |one: Which| !matches!((answer, one.when, one.act), (Release(_), When::Combine, Act::Put));
            let why = broken(&after.into_iter().filter(|one| one.is_none_or(moves)).collect());
            let tally = tallies.entry(why.unwrap_or("no rule is broken").into()).or_default();
            tally.mutants += 1;
            let mutant = moved(&unrolled, rank, from, to);
            let seen = prover.prove(&mutant);
            assert!(ranks > 2 || seen == prove(&mutant), "{one:?} from {from} to {to}: {seen:?}");
            assert_eq!(seen.is_err(), why.is_some(), "{one:?} from {from} to {to}: {why:?}, {seen:?}");
            match seen {
                Err(fault) => (tally.found, tally.example) = (tally.found + 1, fault.to_string()),
                // Words of 0 and 1 agree.
                Ok(_) => assert!(check(&mutant, 0..2).is_ok(), "{one:?} from {from} to {to}"),
            }
        }
    }
    report(&format!("{ranks} ranks, {answer:?}: moved"), &tallies);
}

#[test]
fn every_move_that_breaks_a_rule_is_found_and_no_other() {
    for ranks in 2..=4 {
        every_move(ranks, Combine(0));
        every_move(ranks, Release(0));
    }
}

/// Changes of an operation besides moving it. All of them are found, if any bytes move at all.
fn every_change(ranks: u32, calls: &[StreamCall]) -> usize {
    let unrolled = unroll(ranks, calls);
    let prover = MutantProver::new(&unrolled);
    let mut tallies: BTreeMap<String, Tally> = BTreeMap::new();
    let changes = [Change::Drop, Change::DropWaits, Change::Retrack];
    for mutation in mutations(&unrolled).into_iter().filter(|mutation| changes.contains(&mutation.change)) {
        let when = if mutation.stage == "dispatch" { When::Dispatch } else { When::Combine };
        let Which { act, .. } = which(when, mutation.item.op);
        let harmless = match act {
            // A release moves nothing.
            Act::Put => !mutation.moves(&unrolled),
            // So its signals have nothing to follow but what lies before the stage.
            Act::Signal => mutation.stage == "release" && mutation.change == Change::Retrack,
            Act::Wait | Act::SetBack => false,
        };
        let tally = tallies.entry(format!("{when:?} {act:?}: {:?}", mutation.change)).or_default();
        tally.mutants += 1;
        let seen = prover.prove(&mutation.plant(&unrolled));
        assert_eq!(seen.is_ok(), harmless, "{mutation:?}: {seen:?}");
        if let Err(fault) = seen {
            (tally.found, tally.example) = (tally.found + 1, fault.to_string());
        }
    }
    report(&format!("{ranks} ranks: changed"), &tallies);
    tallies.values().map(|tally| tally.found).sum()
}

#[test]
fn everything_that_is_left_out_or_leaves_its_stream_is_found() {
    for ranks in 2..=4 {
        let ops = (ranks * (ranks - 1)) as usize;
        // Per peer and stage: each of four is left out, each of two signals goes elsewhere; and all
        // waits of a stage at once.
        let changed = every_change(ranks, &thrice(&[Dispatch(0), Combine(0)]));
        assert_eq!(changed, ops * 2 * 6 + 2 * ranks as usize);
        every_change(ranks, &thrice(&[Dispatch(0), Release(0)]));
        every_change(ranks, &thrice(&[Dispatch(0), Dispatch(1), Combine(1), Combine(0)]));
    }
}

/// Change of a mutant of slots across nodes: the actor of the operation, and the change.
fn class(mutation: &Mutation, nodes: &NodeMap) -> String {
    let peer = |to: u32| match to {
        to if to == mutation.rank => "own",
        to if nodes.same_node(to, mutation.rank) => "near",
        _ => "far",
    };
    let act = match mutation.item.op {
        Op::Put { to, .. } => format!("put {}", peer(to)),
        Op::Signal { to, of, level: FlagValue::Reset, .. } if to == of => "request back".into(),
        Op::Signal { of, level: FlagValue::Reset, .. } => format!("set back {}", peer(of)),
        Op::Signal { to, of, .. } if to == of => "request".into(),
        Op::Signal { to, of, .. } if to == mutation.rank => format!("notice of {}", peer(of)),
        Op::Signal { to, .. } => format!("signal {}", peer(to)),
        Op::Wait { from, level: FlagValue::Call, .. } => format!("wait net {}", peer(from)),
        Op::Wait { from, .. } if from == mutation.rank => "wait request".into(),
        Op::Wait { from, .. } => format!("wait {}", peer(from)),
        other => panic!("streams have none: {other:?}"),
    };
    format!("{} {act}: {:?}", mutation.stage, mutation.change)
}

/// Whether one operation of a track must come before the next.
fn bound(me: u32, ranks: u32, first: Op, then: Op) -> bool {
    match (first, then) {
        // Rows before the word, or the request flag, behind them.
        (Op::Put { to: a, .. }, Op::Signal { to: b, .. }) if a != me => a == b,
        (Op::Put { operand, .. }, Op::Signal { to, of, .. }) => operand.0 < 2 * ranks && to == me && of == me,
        // A word before the step that it allows: its reset, or its relaying.
        (Op::Wait { from, .. }, Op::Signal { to, of, .. }) => to == me && from == of,
        _ => false,
    }
}

/// Why a bug across nodes does no harm, if that is so.
fn harmless(mutation: &Mutation, way: RowPath, ranks: u32) -> Option<&'static str> {
    let Mutation { rank, kind, item: TrackOp { op, .. }, change, .. } = *mutation;
    let requests = matches!(op, Op::Signal { to, of, level: FlagValue::Credit, .. } if to == of);
    let of_rail = matches!(op, Op::Signal { level: FlagValue::Call, .. });
    match (change, mutation.other) {
        (Change::Swap, Some(next)) if !bound(rank, ranks, op, next) => Some("the order of the two is free"),
        (Change::Retrack, _) if requests && way == RowPath::GpuDirect => {
            Some("what the request follows was packed before the stage")
        }
        (Change::Drop, _) if of_rail && kind == CallKind::Dispatch => {
            Some("one word grows for both calls: the combine says it, too, behind the same rows")
        }
        _ => None,
    }
}

#[test]
fn every_bug_across_nodes_is_found_or_does_no_harm() {
    for labels in [&[0, 0, 1, 1][..], &[0, 0, 0, 1, 1]] {
        every_bug_across(labels, RowPath::GpuDirect);
        every_bug_across(labels, RowPath::HostStaged);
    }
}

fn every_bug_across(labels: &[u32], way: RowPath) {
    let (nodes, ranks) = (NodeMap::from_labels(labels), labels.len() as u32);
    let (calls, across) = (thrice(&[Dispatch(0), Combine(0)]), Some((&nodes, way)));
    let scenario = StreamScenario {
        slots: slots(ranks),
        streams: Streams::One,
        across,
        calls: &calls,
        refuses: None,
        seeded: None,
        planted: None,
    };
    let unrolled = UnrolledProgram::of_streams(&scenario).unwrap();
    let prover = MutantProver::new(&unrolled);
    prover.prove(&unrolled).expect("the real schedule has no fault");
    let mut tallies: BTreeMap<String, Tally> = BTreeMap::new();
    for mutation in mutations(&unrolled) {
        let why = harmless(&mutation, way, ranks);
        let seen = prover.prove(&mutation.plant(&unrolled));
        assert_eq!(seen.is_ok(), why.is_some(), "{way:?} {mutation:?}: {why:?}, {seen:?}");
        let class =
            format!("{}{}", class(&mutation, &nodes), why.map_or("".into(), |why| format!(" ({why})")));
        let tally = tallies.entry(class).or_default();
        tally.mutants += 1;
        if let Err(fault) = seen {
            (tally.found, tally.example) = (tally.found + 1, fault.to_string());
        }
    }
    report(&format!("{labels:?} {way:?}: changed"), &tallies);
}

/// Reason why ranks do not see a bug of a driver: the rank itself misses a value.
fn unseen(
    call: SlotCall,
    mutation: &CallMutation,
    (step, next): (Action, Option<Action>),
) -> Option<&'static str> {
    let check = Action::Compute(Work::Check);
    match mutation.change {
        CallChange::Drop if step == check => Some("a check finds ranks that make another call"),
        CallChange::Swap if next == Some(check) => Some("it reads what experts read behind it"),
        CallChange::Drop if step == Action::Compute(Work::Sum) => Some("sums are the caller's"),
        CallChange::Swap if call == SlotCall::Refusal && matches!(step, Action::Run(..)) => {
            Some("one rank refuses, and the others signal before they wait")
        }
        _ => None,
    }
}

#[test]
fn driver_mutants_of_slots_are_found_by_flow_and_between_ranks() {
    let nodes = NodeMap::from_labels(&[0, 0, 1]);
    let groups = [None, Some((&nodes, RowPath::GpuDirect)), Some((&nodes, RowPath::HostStaged))];
    for call in SlotCall::ALL {
        let (program, answer) =
            (call.program(), if call == SlotCall::Release { Release(0) } else { Combine(0) });
        assert_eq!(value_flow::check(&program, &program), Ok(()));
        let mutations = CallMutation::all(&program, nodes.ranks());
        assert_eq!(mutations.len(), 2 * program.steps().len() - 1);
        for mutation in mutations {
            let (planted, (step, next)) = (mutation.plant(&program), mutation.steps(&program));
            let lacking = value_flow::check(&planted, &program).expect_err("the rank itself lacks a value");
            let unseen = unseen(call, &mutation, (step.action, next.map(|next| next.action)));
            println!("{call:?} {:?} {}: {lacking}; {unseen:?}", mutation.change, step.action);
            for across in groups {
                let unrolled = UnrolledProgram::of_streams(&StreamScenario {
                    slots: slots(nodes.ranks()),
                    streams: Streams::One,
                    across,
                    calls: &thrice(&[Dispatch(0), answer]),
                    refuses: (call == SlotCall::Refusal).then_some(Refusals {
                        rank: 1,
                        in_turn: false,
                        refused: RefusedCall::Answer,
                    }),
                    seeded: None,
                    planted: Some((call, &planted)),
                });
                let seen = prove(&unrolled.unwrap());
                assert_eq!(seen.is_ok(), unseen.is_some(), "{planted}: {unseen:?}, {seen:?}");
            }
        }
    }
}
