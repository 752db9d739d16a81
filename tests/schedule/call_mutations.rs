//! Bugs of the driver: every mutant of a call program is found, or is harmless for a reason.

use std::collections::{BTreeMap, BTreeSet};

use sidelane_core::error::CallKind;
use sidelane_core::plan::{Overflow, ReceiveMode, RowLayout, SumOrder};
use sidelane_core::schedule::call_program::{
    Action, CallProgram, CallStep, Engines, RankPrograms, Relays, StageId, Work,
};
use sidelane_core::schedule::collective::{Program, RankView, Shape};
use sidelane_core::topology::{Paths, Route};
use sidelane_verify::mutate::{CallChange, CallMutation, ProgramId, programs_of};
use sidelane_verify::prove::prove;
use sidelane_verify::unroll::{
    CollectiveCall, CollectiveScenario, ProofScenario, TokenPlace, UnrolledProgram,
};
use sidelane_verify::value_flow;

use crate::collective_proof::{call, programs as collectives, view_of, with_room};
use crate::groups::{CHUNKS, Group, gathering_rounds, rounds_of, ways};

const KINDS: [CallKind; 4] =
    [CallKind::Dispatch, CallKind::CachedDispatch, CallKind::Combine, CallKind::ExpertMap];

pub fn programs(group: &Group) -> RankPrograms {
    let paths = Paths::new(&group.nodes, group.route, 0);
    let (pxn, multi_node) = (group.route == Route::Pxn, paths.is_multi_node());
    let brings_in = group.pulls && multi_node && (pxn || !group.gpu_direct);
    let engines = Engines { pulls: group.pulls, brings_in, enqueues: group.enqueues };
    RankPrograms::new(paths, CHUNKS, group.order != SumOrder::Expert && pxn && multi_node, engines)
}

/// Reason why a mutant is unobservable.
fn harmless(
    mutation: &CallMutation,
    (kind, program): (CallKind, &CallProgram),
    group: &Group,
) -> Option<&'static str> {
    let (step, next) = mutation.steps(program);
    match mutation.change {
        CallChange::Drop => dropped(step, kind, group),
        CallChange::Swap => swapped(step, next?, kind, group),
        CallChange::GoOn { .. } if kind == CallKind::ExpertMap => Some("nothing moves in such calls"),
        // No byte shows that it has sums where others have an error. Where ranks disagree, rank 0
        // continues alone.
        CallChange::GoOn { rank: 1.. }
            if kind == CallKind::Combine && group.enqueues && !multi_node(group) =>
        {
            Some("what was offered is free when the streams of all ranks have come by")
        }
        CallChange::GoOn { .. } => None,
        CallChange::MoveRelay { .. } => None,
    }
}

fn multi_node(group: &Group) -> bool {
    Paths::new(&group.nodes, group.route, 0).is_multi_node()
}

fn dropped(step: CallStep, kind: CallKind, group: &Group) -> Option<&'static str> {
    let multi_node = multi_node(group);
    match step.action {
        Action::Run(StageId::Release, _) if kind != CallKind::Combine => {
            Some("who writes in a dispatch has heard the entry of every rank, sent after its last sum")
        }
        Action::Run(StageId::Release, _) if group.enqueues && multi_node => {
            Some("entries follow what the streams of all ranks have read")
        }
        Action::Compute(Work::Reclaim) => Some("the release has waited for all readers"),
        Action::Compute(Work::Describe) if !multi_node => {
            Some("there are no relays that would read a header")
        }
        _ => None,
    }
}

/// Two steps that neither need each other nor touch the same bytes may come in either order.
fn swapped(first: CallStep, second: CallStep, kind: CallKind, group: &Group) -> Option<&'static str> {
    use Action::{Agree, Compute, Run};
    match (first.action, second.action) {
        // The chunk is filled amid the call, before its readers of the last one have finished.
        (Run(StageId::Release, _), Compute(Work::Offer)) if !group.enqueues => None,
        (Run(StageId::Reached, _), Compute(Work::Pack)) | (Compute(Work::Pack), Run(StageId::Reached, _)) => {
            Some("copies go on behind what is packed, and the host needs none of it")
        }
        (Compute(Work::Follow), Run(StageId::Reached, _))
        | (Run(StageId::Reached, _), Compute(Work::Follow)) => Some("copies begin later"),
        (Run(StageId::Reached, _), Run(StageId::Release, _)) => Some("the host waits for both"),
        (Compute(Work::Grow), Agree) => Some("a rank that lacks memory refuses, and nothing moves"),
        (Compute(Work::Join), Compute(Work::Report))
        | (Compute(Work::TellAgreed), Compute(Work::PackPlaced))
        | (Compute(Work::Follow), Compute(Work::Reclaim)) => {
            Some("one is the host's, the other orders streams")
        }
        (Compute(Work::Adopt), Compute(Work::Join)) => Some("the stream of copies reads no expert map"),
        (Compute(Work::Follow), Compute(Work::FillRows)) => Some("copies need both, and are enqueued later"),
        (Compute(Work::SendTables), Compute(Work::PlaceOwn)) => {
            Some("two streams bring tables of their own, and kernels read them later")
        }
        (Compute(Work::Follow), Compute(Work::SendTables)) => {
            Some("the host has awaited the caller's stream, which reads tables of earlier calls")
        }
        (Compute(Work::Report), Compute(Work::Metadata)) => {
            Some("one counts what has moved, the other reads what came with it")
        }
        (Compute(Work::Metadata), Compute(Work::Regroup)) => Some("kernels touch different bytes"),
        (Run(StageId::RelayDone, _), Run(StageId::Posted, _)) => {
            Some("what the relay moves is enqueued by then")
        }
        (Run(StageId::Release, _), Compute(_)) | (Compute(_), Run(StageId::Release, _)) => {
            Some("memory is taken later, or was free before")
        }
        (Run(..), Compute(Work::JoinRelay)) => Some("the stage waits for the same relay"),
        (Compute(Work::FillPull), Run(StageId::Headers, _))
        | (Run(StageId::RelayDone, _), Run(StageId::Pull, _)) => {
            Some("engines pull from this node, and the relay works for others")
        }
        (Run(StageId::Pull, _), Run(StageId::Returned, _)) => Some("engines begin later"),
        (Run(StageId::Returned | StageId::Ready, _), Compute(_))
        | (Compute(Work::Bases), Run(StageId::Returned, _)) => {
            Some("one fills tags or operands, the other has words of streams or relays alone")
        }
        (Compute(Work::Bases), Run(..)) => Some("tags are doubled: they stay until the call after next"),
        (Run(StageId::Agreed, _), Run(StageId::Headers, _)) if kind == CallKind::Combine => {
            Some("offers come with entries, before any verdict")
        }
        (Compute(Work::Publish), Compute(Work::Announce))
        | (Compute(Work::Reclaim), Compute(Work::Publish | Work::Propose | Work::Offer))
        | (Compute(Work::Describe), Compute(Work::TellAgreed))
        | (Compute(Work::TellAgreed), Compute(Work::FillRows | Work::Landings | Work::Bases))
        | (Compute(Work::JoinRelay), Compute(Work::FillSum))
        | (Compute(Work::Bases), Compute(Work::Judge)) => Some("neither needs the other"),
        (Agree, Compute(Work::Bases | Work::JoinRelay)) => Some("the verdict needs tags alone"),
        _ => None,
    }
}

#[derive(Default)]
struct Tally {
    mutants: usize,
    by_flow: usize,
    by_proof: usize,
    harmless: usize,
    example: String,
}

/// Findings about all mutants of some programs.
#[derive(Default)]
struct Findings {
    tallies: BTreeMap<&'static str, Tally>,
    /// Per reason: mutants that do no harm.
    harmless: BTreeMap<&'static str, BTreeSet<String>>,
    wrong: Vec<String>,
}

impl Findings {
    /// Finds all mutants of a program. `unroll` unrolls one, `harmless` returns why it is harmless.
    fn look(
        &mut self,
        (name, program, ranks): (&str, &CallProgram, u32),
        unroll: impl Fn(CallMutation) -> UnrolledProgram,
        harmless: impl Fn(&CallMutation) -> Option<&'static str>,
    ) {
        value_flow::check(program, program).unwrap_or_else(|lacking| panic!("{lacking}: {program}"));
        for mutation in CallMutation::all(program, ranks) {
            let class = match (mutation.change, mutation.cut) {
                (CallChange::Drop, None) => "a step is dropped",
                (CallChange::Drop, Some(_)) => "a step of a cut is dropped",
                (CallChange::Swap, None) => "two steps change places",
                (CallChange::Swap, Some(_)) => "two of a cut change places",
                (CallChange::GoOn { .. }, _) => "a refused rank goes on",
                (CallChange::MoveRelay { .. }, _) => "a relay's part moves",
            };
            let tally = self.tallies.entry(class).or_default();
            tally.mutants += 1;
            let (step, next) = mutation.steps(program);
            let next = next.map_or(String::new(), |next| next.action.to_string());
            let mutant = format!("{name} {:?}: {} | {next}", mutation.change, step.action);
            if let Err(lacking) = value_flow::check(&mutation.plant(program), program) {
                tally.by_flow += 1;
                tally.example = format!("{mutant}: {lacking}");
                continue;
            }
            match (prove(&unroll(mutation)), harmless(&mutation)) {
                (Ok(_), Some(reason)) => {
                    tally.harmless += 1;
                    self.harmless.entry(reason).or_default().insert(mutant);
                }
                (Err(fault), None) => {
                    tally.by_proof += 1;
                    tally.example = format!("{mutant}: {fault}");
                }
                (Ok(_), None) => self.wrong.push(format!("not found: {mutant}")),
                (Err(fault), Some(reason)) => {
                    self.wrong.push(format!("not harmless ({reason}): {mutant}: {fault}"))
                }
            }
        }
    }

    /// Nothing is wrong: each mutant was found, or does no harm.
    fn check(self, title: &str) {
        println!("{title:<28} mutants  by flow  by proof  harmless");
        for (class, Tally { mutants, by_flow, by_proof, harmless, example }) in &self.tallies {
            println!("{class:<28} {mutants:>7} {by_flow:>8} {by_proof:>9} {harmless:>9}  {example}");
        }
        for (reason, mutants) in &self.harmless {
            println!("  {reason}: {mutants:?}");
        }
        assert_eq!(self.wrong, Vec::<String>::new(), "{title}");
    }
}

fn all_found(labels: &[u32], way: (Route, Relays)) {
    all_of_group_found(Group::new(labels, 1, 5).run(way));
}

fn all_of_group_found(group: Group) {
    let title = format!("{} nodes {:?} {:?}", group.nodes.nodes(), group.route, group.relays);
    let calls = rounds_of(&group);
    let (programs, ranks) = (programs(&group), group.nodes.ranks());
    let mut findings = Findings::default();
    // Engines that do not run ahead make no dispatch along a known layout.
    let planned = group.pulls && !group.enqueues;
    let made = |kind: &CallKind| !(planned && *kind == CallKind::CachedDispatch);
    for kind in KINDS.into_iter().filter(made) {
        for (id, program) in programs_of(&programs, kind, group.relays) {
            let unroll = |mutation| {
                let scenario =
                    ProofScenario { mutation: Some((id, mutation)), ..group.scenario(&calls, None) };
                UnrolledProgram::unroll(&scenario).expect("a scenario that can be unrolled")
            };
            let name = format!("{id:?}");
            findings.look((&name, program, ranks), unroll, |mutation| {
                harmless(mutation, (kind, program), &group)
            });
        }
    }
    findings.check(&title);
}

#[test]
fn driver_mutants_on_one_node_are_found() {
    all_found(&[0; 4], (Route::Direct, Relays::Inline));
}

#[test]
fn driver_mutants_with_inlined_relays_are_found() {
    Route::ALL.into_iter().for_each(|route| all_found(&[0, 0, 1, 1], (route, Relays::Inline)));
}

#[test]
fn driver_mutants_with_offloaded_relays_are_found() {
    Route::ALL.into_iter().for_each(|route| all_found(&[0, 0, 1, 1], (route, Relays::Thread)));
}

#[test]
fn driver_mutants_of_callers_that_run_ahead_are_found() {
    let direct = (Route::Direct, Relays::Inline);
    all_of_group_found(Group::new(&[0; 4], 4, 5).run(direct).enqueuing());
    let two_nodes = Group::new(&[0, 0, 1, 1], 4, 5).run(direct).enqueuing();
    all_of_group_found(two_nodes.clone());
    all_of_group_found(Group { read_early: false, ..two_nodes });
    all_of_group_found(Group::dense(&[0, 0, 1, 1], 4, 5).run((Route::Pxn, Relays::Inline)).enqueuing());
    all_of_group_found(Group { gpu_direct: true, ..Group::new(&[0, 0, 1, 1], 4, 5).run(direct).enqueuing() });
    let by_rank = (RowLayout::ExpertMajor, ReceiveMode::Exact, SumOrder::Rank);
    all_of_group_found(Group::new(&[0; 4], 4, 5).run(direct).enqueuing().placed(by_rank));
    let by_node = (RowLayout::ExpertMajor, ReceiveMode::Exact, SumOrder::Node);
    let relays = Group::dense(&[0, 0, 1, 1], 4, 5).run((Route::Pxn, Relays::Inline)).enqueuing();
    all_of_group_found(relays.clone().placed(by_node));
    all_of_group_found(Group { host_plans: true, ..Group::new(&[0; 4], 4, 5).run(direct).enqueuing() });
    for tokens in [TokenPlace::InRuns, TokenPlace::Scattered] {
        for group in [relays.clone(), Group::new(&[0; 4], 4, 5).run(direct).enqueuing()] {
            all_of_group_found(group.of_tokens(tokens));
        }
    }
}

#[test]
fn driver_mutants_of_copy_engines_are_found() {
    all_of_group_found(Group::new(&[0, 0, 1, 1], 4, 5).run((Route::Direct, Relays::Inline)).pulling());
    all_of_group_found(Group::dense(&[0, 0, 1, 1], 4, 5).run((Route::Pxn, Relays::Inline)).pulling());
    all_of_group_found(Group::new(&[0, 0, 1, 1], 4, 5).run((Route::Direct, Relays::Inline)).straight());
    let budget = ReceiveMode::Budget { rows: 60, overflow: Overflow::Drop };
    let within = (RowLayout::ExpertMajor, budget, SumOrder::Expert);
    all_of_group_found(
        Group::new(&[0; 4], 4, 5).run((Route::Direct, Relays::Inline)).enqueuing().placed(within),
    );
}

#[test]
fn driver_mutants_behind_an_all_gather_are_found() {
    let calls = gathering_rounds();
    for way in ways() {
        let group = Group::new(&[0, 0, 1, 1], 4, 5).run(way).by_all_gather();
        let unroll = |mutation| {
            let mutation = Some((ProgramId::Regroup, mutation));
            let scenario = ProofScenario { mutation, ..group.scenario(&calls, None) };
            UnrolledProgram::unroll(&scenario).expect("a scenario that can be unrolled")
        };
        let (programs, mut findings) = (programs(&group), Findings::default());
        findings.look(("Regroup", &programs.regroup, 4), unroll, |mutation| match mutation.change {
            CallChange::GoOn { .. } => Some("it copies within its own memory, and its next call is the same"),
            _ => None,
        });
        findings.check(&format!("by all-gather, {way:?}"));
    }
}

/// Reason why a mutant of the steps of a round is unobservable.
fn harmless_in_a_round(mutation: &CallMutation, program: Program, view: &RankView) -> Option<&'static str> {
    use Action::{Compute, Round};
    let (CallStep { action, .. }, next) = mutation.steps(&view.skeleton(program).call);
    match (mutation.change, action, next?.action) {
        (CallChange::Drop, Compute(Work::CopyOut), _) if !matches!(program, Program::TwoShot { .. }) => {
            Some("the round before has left nothing")
        }
        (CallChange::Swap, Compute(Work::CopyOut), Round(_) | Compute(Work::EndRound)) => {
            Some("nobody enters the next round before all stages of this one are over here")
        }
        (CallChange::Swap, Round(_), Compute(Work::EndRound)) => {
            Some("it names what is copied later, and touches nothing")
        }
        (CallChange::GoOn { rank }, ..) => {
            let Program::Broadcast { root, shape } = program else { return None };
            // Where ranks disagree, rank 0 makes another call than all others.
            let agree = |peer| (peer == 0) == (root == 0);
            match rank == root {
                true if reached(view, root, shape).all(agree) => {
                    Some("those that it puts to have made the same call")
                }
                false if view.nodes.same_node(root, rank) && agree(rank) => {
                    Some("its root has made the same call, and has put all that it reads")
                }
                _ => None,
            }
        }
        _ => None,
    }
}

/// Ranks of other nodes to which the root of a broadcast puts.
fn reached(view: &RankView, root: u32, shape: Shape) -> impl Iterator<Item = u32> {
    let (nodes, all) = (&view.nodes, view.nodes.nodes());
    let end = if shape == Shape::Star { all } else { all.min(2) };
    (1..end).map(move |next| nodes.rail_peer(root, (nodes.node_of(root) + next) % all))
}

#[test]
fn driver_mutants_of_collective_rounds_are_found() {
    for labels in [&[0, 0, 1, 1][..], &[0; 3], &[0, 1, 2, 2]] {
        let view = view_of(labels, with_room(labels.len(), 512));
        let all = collectives(view.ranks());
        let mut findings = Findings::default();
        for &planted in all.iter().chain(&[Program::TwoShot { more: false }]) {
            let calls = rounds_around(&view, planted, &all);
            let unroll = |mutation| {
                let (nodes, staging) = (&view.nodes, view.staging);
                let mutation = Some((planted, mutation));
                let scenario = CollectiveScenario { nodes, staging, calls: &calls, seeded: None, mutation };
                UnrolledProgram::of_collectives(&scenario).expect("a scenario that can be unrolled")
            };
            let program = &view.skeleton(planted).call;
            let name = format!("{planted:?}");
            findings.look((&name, program, view.ranks()), unroll, |mutation| {
                harmless_in_a_round(mutation, planted, &view)
            });
        }
        findings.check(&format!("{labels:?}, collectives"));
    }
}

/// Calls of a program, and rounds in which some ranks enter it and others enter another.
fn rounds_around(view: &RankView, program: Program, all: &[Program]) -> Vec<CollectiveCall> {
    let whole = match program {
        Program::TwoShot { .. } => Program::TwoShot { more: true },
        other => other,
    };
    let mut calls = call(view, whole, 4, u64::MAX);
    for other in all.iter().copied().filter(|other| other.kind() != program.kind()) {
        for programs in [[program, other], [other, program]] {
            calls.push(CollectiveCall::Mixed { programs, len: u64::MAX });
            calls.extend(call(view, whole, 2, 68));
        }
    }
    calls
}
