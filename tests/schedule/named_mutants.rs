//! The bugs of a driver that its design names: each with the failure that `prove` reports, and with
//! the two operations or accesses that are then in the wrong order.
//!
//! | bug | planted as |
//! |---|---|
//! | a step is dropped | [`CallChange::Drop`] |
//! | two steps change places | [`CallChange::Swap`] |
//! | agreement is skipped | a dropped `Agree` |
//! | a credit comes early | `read` before the sums that it vouches for |
//! | a part of a relay moves | [`CallChange::MoveRelay`] |
//! | a refused rank goes on | [`CallChange::GoOn`] |
//! | `read` before `returned` | swapped steps, and the signal alone |
//! | `Ready` before a credit of staging | no such credit: see below |
//! | an offer overtakes blocks of an earlier call | [`Change::Overtake`] |
//! | memory of an unfinished call is used again | [`SeededBug::TakeUnread`], [`InstanceBug::ShareMemory`], [`InstanceBug::ShareRows`] |
//! | two instances cross | [`InstanceBug::Crossed`] |
//! | streams of a rank go on without each other | a dropped `Follow` or `Join`, a late `PackPlaced`, no wait for the order of rows |
//!
//! **No credit of staging.** Calls take turns on the stream, so one staging area serves all of
//! them, and no `Ready` waits for a credit of it. On one node the rank's own stream alone writes
//! there. What is left of the rule has the rows of that name: a rank is not ready before its
//! outputs are written, and offers its staging to relays only when its stream has come to the call.
//!
//! Nothing is found by the flow of values here: rows skip [`sidelane_verify::value_flow`], which
//! would stop at some of them earlier.

use std::collections::BTreeSet;

use sidelane_core::error::CallKind;
use sidelane_core::gate::Routing;
use sidelane_core::plan::ExpertMap;
use sidelane_core::schedule::call_program::{Action, CallProgram, Part, Relays, StageId, Work};
use sidelane_core::schedule::{Flag, Op};
use sidelane_core::topology::Route;
use sidelane_verify::mutate::{
    CallChange, CallMutation, Change, Mutation, ProgramId, mutations, programs_of,
};
use sidelane_verify::prove::{AccessKind, OpRef, ProofFailure, prove};
use sidelane_verify::unroll::{
    Call, InstanceBug, InstanceScenario, ProofScenario, SeededBug, StageRun, Streams, TokenPlace, Turn,
    UnrolledOp, UnrolledProgram,
};

use crate::call_mutations::programs;
use crate::groups::{Group, ROWS, dispatch, enqueued_rounds, ret, rounds_of};

use Action::{Agree, Compute, Run};
use Part::{Finish, Whole};

const DROPPED: &str = "a step is dropped";
const SWAPPED: &str = "two steps change places";
const UNAGREED: &str = "agreement is skipped";
const EARLY_CREDIT: &str = "a credit comes early";
const MOVED_RELAY: &str = "a part of a relay moves";
const GOES_ON: &str = "a refused rank goes on";
const READ_BEFORE_RETURNED: &str = "`read` before `returned`";
const READY_BEFORE_A_CREDIT: &str = "`Ready` before a credit of staging";
const OVERTAKEN: &str = "an offer overtakes blocks of an earlier call";
const USED_AGAIN: &str = "memory of an unfinished call is used again";
const CROSSED: &str = "two instances cross";
const UNORDERED: &str = "streams of a rank go on without each other";

/// All of them.
const NAMES: [&str; 12] = [
    DROPPED,
    SWAPPED,
    UNAGREED,
    EARLY_CREDIT,
    MOVED_RELAY,
    GOES_ON,
    READ_BEFORE_RETURNED,
    READY_BEFORE_A_CREDIT,
    OVERTAKEN,
    USED_AGAIN,
    CROSSED,
    UNORDERED,
];

/// One side of a pair: a stage, and the operation or access there.
type Side = (&'static str, String);

/// The variant of a failure, and the pair that it names. Of a deadlock: the wait, and the signal
/// that does not come.
fn found(unrolled: &UnrolledProgram) -> Result<(&'static str, Side, Side), String> {
    let side = |op: &OpRef| match op.what {
        AccessKind::Op(Op::Put { .. }, _) => (op.stage, "put".to_owned()),
        AccessKind::Op(Op::PutRows { .. }, _) => (op.stage, "put rows".to_owned()),
        AccessKind::Op(Op::Reduce { .. }, _) => (op.stage, "reduce".to_owned()),
        AccessKind::Op(Op::Signal { flag, .. }, _) => (op.stage, format!("signal {}", flag.name())),
        AccessKind::Op(Op::Wait { flag, .. }, _) => (op.stage, format!("wait {}", flag.name())),
        what => (op.stage, what.to_string()),
    };
    match prove(unrolled).map_err(|fault| (fault.to_string(), fault)) {
        Ok(_) => Err("no fault".into()),
        Err((_, ProofFailure::Deadlock { op, .. })) => {
            let signal = signal_of(unrolled, &op).ok_or("a wait that is not one")?;
            Ok(("Deadlock", side(&op), signal))
        }
        Err((_, ProofFailure::Race { a, b, .. })) => Ok(("Race", side(&a), side(&b))),
        Err((_, ProofFailure::Overwritten { writer, reader, .. })) => {
            Ok(("Overwritten", side(&writer), side(&reader)))
        }
        Err((_, ProofFailure::NotMonotone { a, b })) => Ok(("NotMonotone", side(&a), side(&b))),
        Err((fault, _)) => Err(fault),
    }
}

/// The signal that a wait misses: the first one of its word that has the value. Its rank waits for
/// something before it.
fn signal_of(unrolled: &UnrolledProgram, wait: &OpRef) -> Option<Side> {
    let AccessKind::Op(Op::Wait { from, flag, .. }, value) = wait.what else { return None };
    let part =
        unrolled.calls[wait.call].iter().find(|part| (part.rank, part.role) == (wait.rank, wait.role))?;
    let here = |scene: &&StageRun| scene.name == wait.stage && wait.index < scene.first + scene.steps.len();
    let scene = part.scenes.iter().find(here)?;
    let set = scene.steps[wait.index - scene.first].set;
    let raises = |step: &&UnrolledOp| {
        matches!(step.op, Op::Signal { to, of, flag: f, .. } if (to, of, f) == (wait.rank, from, flag))
            && (step.set, step.value >= value) == (set, true)
    };
    let mut scenes = unrolled.calls.iter().flatten().flat_map(|part| &part.scenes);
    let raised = scenes.find(|scene| scene.steps.iter().any(|step| raises(&step)));
    raised.map(|scene| (scene.name, format!("signal {}", flag.name())))
}

fn on_host(route: Route) -> Group {
    Group::new(&[0, 0, 1, 1], 1, 5).run((route, Relays::Inline))
}

fn on_one_node() -> Group {
    Group::new(&[0; 4], 4, 5).run((Route::Direct, Relays::Inline))
}

fn over_relays() -> Group {
    Group::dense(&[0, 0, 1, 1], 4, 5).run((Route::Pxn, Relays::Inline)).enqueuing()
}

/// Rank 0 sends its only token to rank 1, which is another node: so rows return to rank 0, which
/// has no outputs.
fn one_way() -> Group {
    let routings = vec![vec![
        Routing::new(1, vec![1], vec![0.5]).unwrap(),
        Routing::new(1, Vec::new(), Vec::new()).unwrap(),
    ]];
    let group = Group::new(&[0, 1], 1, 5).run((Route::Direct, Relays::Inline)).enqueuing();
    Group { map: ExpertMap::contiguous(2, 2).unwrap(), routings, gpu_direct: true, ..group }
}

fn planted(group: &Group, calls: &[Call], (kind, mutation): (CallKind, CallMutation)) -> UnrolledProgram {
    let mutation = Some((ProgramId::Own(kind), mutation));
    UnrolledProgram::unroll(&ProofScenario { mutation, ..group.scenario(calls, None) }).unwrap()
}

/// A rank's own program with a change of this step.
fn changed(group: &Group, kind: CallKind, action: Action, change: CallChange) -> UnrolledProgram {
    let programs = programs(group);
    let at = position(programs.own(kind, Relays::Inline), action) as u16;
    planted(group, &rounds_of(group), (kind, CallMutation { cut: None, at, change }))
}

fn position(program: &CallProgram, action: Action) -> usize {
    program.steps().iter().position(|step| step.action == action).expect("a step of the program")
}

/// The part of a relay that begins with `first`, behind another step of its rank.
fn relay_moved(group: &Group, kind: CallKind, first: StageId, behind: Action) -> UnrolledProgram {
    let programs = programs(group);
    let program = programs.own(kind, Relays::Inline);
    let at = position(program, Run(first, Whole));
    let part = program.steps()[at..].iter().take_while(|step| step.role == program.steps()[at].role).count();
    let behind = position(program, behind);
    let to = if behind < at { behind + 1 } else { behind + 1 - part } as u16;
    let mutation = CallMutation { cut: None, at: at as u16, change: CallChange::MoveRelay { to } };
    planted(group, &rounds_of(group), (kind, mutation))
}

/// A signal of the first rank in combines, changed.
fn signal(group: &Group, stage: &str, of: Flag, change: Change) -> UnrolledProgram {
    let unrolled = group.unroll(&rounds_of(group), None);
    let signals = |mutation: &Mutation| {
        matches!(mutation.item.op, Op::Signal { to, of: rank, flag, .. } if flag == of && to != rank)
            && (mutation.kind, mutation.stage) == (CallKind::Combine, stage)
    };
    let mutation = mutations(&unrolled).into_iter().find(signals).expect("a signal of the stage");
    Mutation { change, ..mutation }.plant(&unrolled)
}

/// A wait for another stream of the rank, or for its host, is left out of dispatches.
fn unawaited(group: &Group, stage: &str) -> UnrolledProgram {
    let unrolled = group.unroll(&rounds_of(group), None);
    let waits = |mutation: &Mutation| {
        matches!(mutation.item.op, Op::Wait { .. })
            && (mutation.kind, mutation.stage, mutation.change) == (CallKind::Dispatch, stage, Change::Drop)
    };
    mutations(&unrolled).iter().find(|mutation| waits(mutation)).expect("a wait").plant(&unrolled)
}

/// Dispatches and returns of two instances, of hosts or on one device.
fn two_instances(
    group: &Group,
    turns: &[Turn],
    streams: Streams,
    seeded: Option<InstanceBug>,
) -> UnrolledProgram {
    let calls = [dispatch(0), dispatch(1), ret(0, ROWS), ret(1, ROWS)];
    let instances = [(); 2].map(|()| group.unroll(&calls, None));
    let scenario = InstanceScenario { instances: &instances, turns, streams, seeded };
    UnrolledProgram::of_instances(&scenario).unwrap()
}

/// Whole calls in turn.
const IN_TURN: [Turn; 8] = {
    use Turn::Call;
    [Call(0), Call(1), Call(0), Call(1), Call(0), Call(1), Call(0), Call(1)]
};

/// Dispatches of both, then two returns that are between their halves at the same time: the first
/// to start is the first to finish, or the last.
const BETWEEN_HALVES: [Turn; 12] = {
    use Turn::{Call, Finish, Start};
    let [dispatches, in_turn, nested] = [
        [Call(0), Call(1), Call(0), Call(1)],
        [Start(0), Start(1), Finish(0), Finish(1)],
        [Start(1), Start(0), Finish(0), Finish(1)],
    ];
    let [[a, b, c, d], [e, f, g, h], [i, j, k, l]] = [dispatches, in_turn, nested];
    [a, b, c, d, e, f, g, h, i, j, k, l]
};

/// A bug by the name that it has in the design, and what it breaks.
struct Row {
    bug: &'static str,
    mutant: UnrolledProgram,
    failure: &'static str,
    pair: [(&'static str, &'static str); 2],
}

fn row(
    bug: &'static str,
    mutant: UnrolledProgram,
    failure: &'static str,
    first: (&'static str, &'static str),
    second: (&'static str, &'static str),
) -> Row {
    Row { bug, mutant, failure, pair: [first, second] }
}

fn of_steps() -> Vec<Row> {
    let (host, one_node, relays) = (on_host(Route::Pxn), on_one_node(), over_relays());
    let ahead = one_node.clone().enqueuing();
    let (dispatch, combine) = (CallKind::Dispatch, CallKind::Combine);
    let (drop, swap) = (CallChange::Drop, CallChange::Swap);
    vec![
        row(
            DROPPED,
            changed(&host, dispatch, Run(StageId::Headers, Whole), drop),
            "Race",
            ("rows", "put"),
            ("relay rows", "reads header"),
        ),
        row(
            DROPPED,
            changed(&ahead, combine, Run(StageId::Ready, Finish), drop),
            "Race",
            ("packed", "writes chunk"),
            ("pull", "put"),
        ),
        row(
            DROPPED,
            changed(&relays, dispatch, Run(StageId::Headers, Whole), drop),
            "Race",
            ("rows", "put"),
            ("relay rows", "reads header"),
        ),
        row(
            SWAPPED,
            changed(&ahead, combine, Compute(Work::Follow), swap),
            "Race",
            ("packed", "writes chunk"),
            ("pull", "put"),
        ),
        row(
            SWAPPED,
            changed(&one_node, combine, Compute(Work::Offer), swap),
            "Race",
            ("sum", "reduce"),
            ("offer", "writes chunk"),
        ),
        row(
            UNAGREED,
            changed(&one_node, combine, Agree, drop),
            "Race",
            ("release", "writes chunk"),
            ("sum", "reduce"),
        ),
        row(
            UNAGREED,
            changed(&host, dispatch, Agree, drop),
            "Deadlock",
            ("rows", "wait landed"),
            ("relay rows", "signal landed"),
        ),
        row(
            UNAGREED,
            changed(&ahead, combine, Agree, drop),
            "Deadlock",
            ("join", "wait posted"),
            ("join", "signal posted"),
        ),
        row(
            UNAGREED,
            changed(&relays, dispatch, Agree, drop),
            "Deadlock",
            ("posted", "wait posted"),
            ("posted", "signal posted"),
        ),
        row(
            MOVED_RELAY,
            relay_moved(&host, dispatch, StageId::NodeEntered, Run(StageId::Entry, Finish)),
            "Deadlock",
            ("entry", "wait entry"),
            ("counts sent", "signal entry"),
        ),
        row(
            MOVED_RELAY,
            relay_moved(&host, dispatch, StageId::Headers, Compute(Work::FillRows)),
            "Deadlock",
            ("headers", "wait block"),
            ("rows", "signal block"),
        ),
        row(
            MOVED_RELAY,
            relay_moved(&relays, dispatch, StageId::Headers, Run(StageId::Posted, Whole)),
            "Race",
            ("rows", "put"),
            ("enqueued", "reads header"),
        ),
        row(
            GOES_ON,
            changed(&one_node, combine, Agree, CallChange::GoOn { rank: 1 }),
            "Race",
            ("release", "writes chunk"),
            ("sum", "reduce"),
        ),
        row(
            GOES_ON,
            changed(&ahead, dispatch, Agree, CallChange::GoOn { rank: 1 }),
            "Deadlock",
            ("posted", "wait posted"),
            ("posted", "signal posted"),
        ),
        row(
            GOES_ON,
            changed(&relays, dispatch, Agree, CallChange::GoOn { rank: 1 }),
            "Deadlock",
            ("headers", "wait block"),
            ("rows", "signal block"),
        ),
        row(
            READ_BEFORE_RETURNED,
            changed(&relays, combine, Run(StageId::Returned, Whole), swap),
            "Race",
            ("return rows", "put"),
            ("pull rest", "put"),
        ),
    ]
}

fn of_credits_and_memory() -> Vec<Row> {
    let (host, one_node, relays) = (on_host(Route::Pxn), on_one_node(), over_relays());
    let ahead = one_node.clone().enqueuing();
    // Its relay has a thread of its own, which reads outputs while engines pull.
    let engines = Group::dense(&[0, 0, 1, 1], 4, 5).run((Route::Pxn, Relays::Thread)).pulling();
    let programs = programs(&one_way());
    let awaits = position(programs.own(CallKind::Combine, Relays::Inline), Run(StageId::Reached, Finish));
    let no_await = CallMutation { cut: None, at: awaits as u16, change: CallChange::Drop };
    let share = Some(InstanceBug::ShareMemory);
    let crossed = Some(InstanceBug::Crossed { rank: 1, turn: 4 });
    vec![
        row(
            EARLY_CREDIT,
            signal(&one_node, "sum", Flag::Read, Change::First),
            "Race",
            ("sum", "reduce"),
            ("offer", "writes chunk"),
        ),
        row(
            EARLY_CREDIT,
            signal(&relays, "pull rest", Flag::Read, Change::Before("pull")),
            "Race",
            ("pull", "put"),
            ("packed", "writes chunk"),
        ),
        row(
            READ_BEFORE_RETURNED,
            signal(&host, "sum", Flag::Read, Change::Before("returned")),
            "Race",
            ("sum", "reduce"),
            ("offer", "writes chunk"),
        ),
        row(
            READ_BEFORE_RETURNED,
            signal(&engines, "pull rest", Flag::Read, Change::Before("returned")),
            "Race",
            ("offer", "writes chunk"),
            ("return rows", "put"),
        ),
        row(
            READY_BEFORE_A_CREDIT,
            signal(&ahead, "ready", Flag::Ready, Change::Before("enqueued")),
            "Race",
            ("packed", "writes chunk"),
            ("pull", "put"),
        ),
        row(
            READY_BEFORE_A_CREDIT,
            planted(&one_way(), &[dispatch(0), ret(0, ROWS), ret(0, ROWS)], (CallKind::Combine, no_await)),
            "Race",
            ("return rows", "put"),
            ("end", "reads returned rows"),
        ),
        row(
            OVERTAKEN,
            signal(&relays, "offer", Flag::Block, Change::Overtake),
            "NotMonotone",
            ("rows", "signal block"),
            ("rows", "signal block"),
        ),
        row(
            OVERTAKEN,
            signal(&host, "offer", Flag::Block, Change::Overtake),
            "NotMonotone",
            ("rows", "signal block"),
            ("rows", "signal block"),
        ),
        row(
            USED_AGAIN,
            host.unroll(&rounds_of(&host), Some(SeededBug::FreeBeforeAck)),
            "Race",
            ("release", "writes chunk"),
            ("sum", "reduce"),
        ),
        row(
            USED_AGAIN,
            relays.unroll(&enqueued_rounds(), Some(SeededBug::ReadUnsettled)),
            "Race",
            ("packed", "writes chunk"),
            ("return rows", "put"),
        ),
        row(
            USED_AGAIN,
            ahead.unroll(&enqueued_rounds(), Some(SeededBug::TakeUnread)),
            "Race",
            ("end", "reads landed rows"),
            ("rows", "put rows"),
        ),
        row(
            USED_AGAIN,
            two_instances(&ahead, &BETWEEN_HALVES, Streams::One, share),
            "Race",
            ("pull", "put"),
            ("end", "reads returned rows"),
        ),
        row(
            USED_AGAIN,
            two_instances(&ahead, &IN_TURN, Streams::Each, share),
            "Race",
            ("rows", "put rows"),
            ("rows", "put rows"),
        ),
        row(
            USED_AGAIN,
            two_instances(&ahead, &BETWEEN_HALVES, Streams::One, Some(InstanceBug::ShareRows)),
            "Overwritten",
            ("packed", "writes chunk"),
            ("end", "reads own outputs"),
        ),
        row(
            CROSSED,
            two_instances(&ahead, &IN_TURN, Streams::One, crossed),
            "Deadlock",
            ("offer", "wait entry"),
            ("offer", "signal entry"),
        ),
        row(
            CROSSED,
            two_instances(&one_node, &IN_TURN, Streams::One, crossed),
            "Deadlock",
            ("offer", "wait entry"),
            ("offer", "signal entry"),
        ),
        row(
            CROSSED,
            two_instances(&host, &IN_TURN, Streams::One, crossed),
            "Deadlock",
            ("node entered", "wait entry"),
            ("offer", "signal entry"),
        ),
        row(
            CROSSED,
            two_instances(&relays, &IN_TURN, Streams::One, crossed),
            "Deadlock",
            ("node entered", "wait entry"),
            ("offer", "signal entry"),
        ),
    ]
}

fn of_streams() -> Vec<Row> {
    let group = on_one_node().enqueuing();
    let late =
        |group: &Group| self::changed(group, CallKind::Dispatch, Compute(Work::PackPlaced), CallChange::Swap);
    let changed = |kind, work| changed(&group, kind, Compute(work), CallChange::Drop);
    vec![
        row(UNORDERED, late(&over_relays()), "Race", ("packed", "writes packed rows"), ("rows", "put rows")),
        row(
            UNORDERED,
            late(&group.clone().of_tokens(TokenPlace::Scattered)),
            "Race",
            ("packed", "writes packed rows"),
            ("rows", "put rows"),
        ),
        row(
            UNORDERED,
            unawaited(&over_relays().of_tokens(TokenPlace::InRuns), "order"),
            "Race",
            ("rows", "reads order of rows"),
            ("order", "writes order of rows"),
        ),
        row(
            UNORDERED,
            changed(CallKind::Dispatch, Work::Follow),
            "Race",
            ("packed", "writes packed rows"),
            ("rows", "put rows"),
        ),
        row(
            UNORDERED,
            changed(CallKind::Combine, Work::Follow),
            "Race",
            ("pull", "put"),
            ("end", "reads returned rows"),
        ),
        row(
            UNORDERED,
            changed(CallKind::Dispatch, Work::Join),
            "Race",
            ("rows", "put rows"),
            ("end", "reads landed metadata"),
        ),
        row(
            UNORDERED,
            changed(CallKind::Combine, Work::Join),
            "Race",
            ("packed", "writes packed rows"),
            ("pull", "put"),
        ),
    ]
}

#[test]
fn every_lost_order_of_streams_is_found_by_proof_alone() {
    let one_node = on_one_node().enqueuing();
    let two_nodes = Group::new(&[0, 0, 1, 1], 4, 5).run((Route::Direct, Relays::Inline)).enqueuing();
    let groups = [one_node, two_nodes.clone(), Group { gpu_direct: true, ..two_nodes }, over_relays()];
    let places = [TokenPlace::Elsewhere, TokenPlace::InRuns, TokenPlace::Scattered];
    for group in groups.iter().flat_map(|group| places.map(|place| group.clone().of_tokens(place))) {
        let programs = programs(&group);
        for kind in [CallKind::Dispatch, CallKind::CachedDispatch, CallKind::Combine] {
            let steps = programs.own(kind, Relays::Inline).steps();
            let at = |action| steps.iter().position(|step| step.action == action);
            for work in [Work::Follow, Work::Join] {
                let seen = prove(&changed(&group, kind, Compute(work), CallChange::Drop));
                // The host awaits the caller's stream behind what that packs, then enqueues copies.
                let (packs, reached) = (at(Compute(Work::Pack)), at(Run(StageId::Reached, Part::Start)));
                let packs = packs.or(at(Compute(Work::Partials)));
                let packed = match (group.tokens, kind) {
                    // What goes as it lies was written before the call.
                    (TokenPlace::InRuns, CallKind::Dispatch) => at(Compute(Work::Bring)),
                    _ => packs,
                };
                let implied = work == Work::Follow && reached.is_some_and(|reached| packed < Some(reached));
                assert_eq!(seen.is_ok(), implied, "{:?} {kind:?} {work:?}: {seen:?}", group.route);
            }
        }
        let seen = prove(&changed(&group, CallKind::Dispatch, Compute(Work::PackPlaced), CallChange::Drop));
        // Over relays own rows need the order, also where the others go as they lie.
        let nothing = group.route == Route::Direct && !group.packs_later();
        assert_eq!(seen.is_ok(), nothing, "{:?} {:?}: {seen:?}", group.route, group.tokens);
    }
}

#[test]
fn every_named_bug_of_a_driver_breaks_the_pair_that_is_listed() {
    let rows = of_steps().into_iter().chain(of_credits_and_memory()).chain(of_streams());
    let rows: Vec<Row> = rows.collect();
    let named: BTreeSet<&str> = rows.iter().map(|row| row.bug).collect();
    assert_eq!(named, NAMES.into_iter().collect());
    let mut wrong = Vec::new();
    for Row { bug, mutant, failure, pair } in rows {
        let expected = (failure, pair.map(|(stage, what)| (stage, what.to_owned())));
        let seen = found(&mutant).map(|(failure, first, second)| (failure, [first, second]));
        println!("{bug:<60} {seen:?}");
        if seen.as_ref() != Ok(&expected) {
            wrong.push(format!("{bug}: {seen:?}, not {expected:?}"));
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
}

#[test]
fn calls_of_two_instances_are_proved_whole_and_in_halves() {
    let ahead = on_one_node().enqueuing();
    for streams in [Streams::One, Streams::Each] {
        for turns in [&IN_TURN[..], &BETWEEN_HALVES] {
            let proof = prove(&two_instances(&ahead, turns, streams, None));
            assert!(proof.as_ref().is_ok_and(|proof| proof.pairs > 1000), "{streams:?} {turns:?}: {proof:?}");
            // A start says that its stream is ready, and waits for no rank.
            let crossed = InstanceBug::Crossed { rank: 1, turn: 4 };
            let starts = matches!(turns[4], Turn::Start(_));
            let seen = prove(&two_instances(&ahead, turns, streams, Some(crossed)));
            assert_eq!(seen.is_ok(), starts, "{streams:?}");
        }
    }
    for group in [on_one_node(), on_host(Route::Pxn), over_relays()] {
        let seen = prove(&two_instances(&group, &IN_TURN, Streams::One, None));
        assert!(seen.is_ok(), "{:?}: {seen:?}", group.route);
    }
}

/// Why a relay's part does no harm at this place, if that is so.
fn harmless(program: &CallProgram, kind: CallKind, mutation: &CallMutation) -> Option<&'static str> {
    let CallChange::MoveRelay { to } = mutation.change else { return None };
    let (moved, to) = (mutation.plant(program), usize::from(to));
    let behind = moved.steps()[..to].last().map(|step| step.action);
    if moved.steps()[to].action != Run(StageId::Headers, Whole) {
        return None;
    }
    match kind {
        CallKind::Combine
            if position(&moved, Agree) < to && to < position(&moved, Run(StageId::Returned, Whole)) =>
        {
            Some("offers come with entries: it may begin anywhere between the verdict and the wait for it")
        }
        CallKind::CachedDispatch if behind == Some(Run(StageId::Posted, Whole)) => {
            Some("no header comes that peers read behind this word, and causes are the fake driver's")
        }
        _ => None,
    }
}

#[test]
fn every_move_of_a_part_of_a_relay_is_found_or_is_harmless() {
    let kinds = [CallKind::Dispatch, CallKind::CachedDispatch, CallKind::Combine];
    for group in [on_host(Route::Pxn), on_host(Route::Direct), over_relays()] {
        let (calls, programs) = (rounds_of(&group), programs(&group));
        for kind in kinds {
            let (_, program) = programs_of(&programs, kind, Relays::Inline)[0];
            let (mut moves, mut harms) = (0, 0);
            for mutation in CallMutation::of_relay(program) {
                let why = harmless(program, kind, &mutation);
                let seen = prove(&planted(&group, &calls, (kind, mutation)));
                let (step, _) = mutation.steps(program);
                assert_eq!(seen.is_ok(), why.is_some(), "{} {:?}: {seen:?}", step.action, mutation.change);
                moves += 1;
                harms += usize::from(seen.is_err());
            }
            println!("{:?} {kind:?}: {moves} moves, {harms} found", group.route);
            assert!(harms > 10);
        }
    }
}
