//! Bugs of the driver: every mutant of a call program is found, or is harmless for a reason.

use std::collections::BTreeMap;

use sidelane::error::CallKind;
use sidelane::plan::{Mode, Order, Overflow, RowLayout};
use sidelane::schedule::call::{
    Action, CallChange, CallMutation, CallProgram, CallStep, Engines, Part, RankPrograms, Relays, StageId,
    Work,
};
use sidelane::schedule::prove::prove;
use sidelane::schedule::story::{Script, Story};
use sidelane::topology::{Paths, Route};

use crate::groups::{CHUNKS, Group, engine_rounds, rounds};

const KINDS: [CallKind; 4] =
    [CallKind::Dispatch, CallKind::CachedDispatch, CallKind::Combine, CallKind::ExpertMap];

fn programs(group: &Group) -> RankPrograms {
    let paths = Paths::new(&group.nodes, group.route, 0);
    let (pxn, rails) = (group.route == Route::Pxn, paths.rails());
    let brings_in = group.pulls && rails && (pxn || !group.straight);
    let engines = Engines { pulls: group.pulls, brings_in, fixed_outputs: fixed_outputs(group) };
    RankPrograms::new(paths, CHUNKS, group.order != Order::Expert && pxn && rails, engines)
}

/// Outputs have one place: a return waits until its readers have finished.
fn fixed_outputs(group: &Group) -> bool {
    group.pulls && group.mode.budget().is_some()
}

/// Why a mutant changes nothing that anybody could see.
fn harmless(mutation: &CallMutation, program: &CallProgram, group: &Group) -> Option<&'static str> {
    let (step, next) = mutation.steps(program);
    match mutation.change {
        CallChange::Drop => dropped(step, mutation, group),
        CallChange::Swap => swapped(step, next?, mutation, group),
        CallChange::GoOn { .. } if mutation.kind == CallKind::ExpertMap => {
            Some("nothing moves in such calls")
        }
        CallChange::GoOn { .. } => None,
    }
}

fn dropped(step: CallStep, mutation: &CallMutation, group: &Group) -> Option<&'static str> {
    let inline = group.relays == Relays::Inline;
    let rails = Paths::new(&group.nodes, group.route, 0).rails();
    match step.action {
        Action::Run(StageId::Release, _) if mutation.kind != CallKind::Combine => {
            Some("who writes in a dispatch has heard the entry of every rank, sent after its last sum")
        }
        Action::Run(StageId::Release, _) if fixed_outputs(group) => {
            Some("the last return has waited for its readers")
        }
        Action::Run(StageId::NodeEntered, _) if inline && group.nodes.nodes() == group.nodes.ranks() => {
            Some("alone on its node, it waits for itself")
        }
        Action::Run(StageId::AllEntered, _) if inline => {
            Some("its rank waits for the same in the same thread, before it judges")
        }
        Action::Run(StageId::Headers, _) if mutation.kind == CallKind::CachedDispatch => {
            Some("no header comes in such calls, and parts are awaited by themselves")
        }
        Action::Compute(Work::Describe) if !rails => Some("there are no relays that would read a header"),
        Action::Run(StageId::Entry | StageId::Offer, Part::Finish) if inline && rails => {
            Some("its relay has waited in the same thread")
        }
        _ => None,
    }
}

/// Two steps that neither need each other nor touch the same bytes may come in either order.
fn swapped(
    first: CallStep,
    second: CallStep,
    mutation: &CallMutation,
    group: &Group,
) -> Option<&'static str> {
    use Action::{Agree, Compute, Run};
    match (first.action, second.action) {
        (Agree, Compute(Work::Judge)) => None,
        // The chunk is filled amid the call, before its readers of the last one have finished.
        (Run(StageId::Release, _), Compute(Work::Offer)) if !fixed_outputs(group) => None,
        (Run(StageId::AllRead, _), Compute(Work::Retire)) => {
            Some("both end the call, and neither needs the other")
        }
        (Run(StageId::Release, _), Compute(_)) | (Compute(_), Run(StageId::Release, _)) => {
            Some("memory is taken later, or was free before")
        }
        (Run(..), Compute(Work::JoinRelay)) => Some("the stage waits for the same relay"),
        (Compute(Work::FillPull), Run(StageId::Headers, _))
        | (Run(StageId::RelayDone, _), Run(StageId::Pull, _)) => {
            Some("engines pull from this node, and the relay works for others")
        }
        (Run(StageId::Pull, _), Run(StageId::Home, _)) => Some("engines begin later"),
        (Run(StageId::Home, _), Compute(_)) | (Compute(Work::Bases), Run(StageId::Home, _)) => {
            Some("one fills operands, the other waits")
        }
        (Compute(Work::Bases), Run(..)) => Some("tags are doubled: they stay until the call after next"),
        (Run(StageId::Agreed, _), Run(StageId::Headers, _)) if mutation.kind == CallKind::Combine => {
            Some("offers come with entries, before any verdict")
        }
        (Compute(Work::Publish), Compute(Work::Announce))
        | (Compute(Work::Describe), Compute(Work::TellAgreed))
        | (Compute(Work::TellAgreed), Compute(Work::FillRows | Work::Landings | Work::Bases))
        | (Compute(Work::Report), Compute(Work::Metadata))
        | (Compute(Work::JoinRelay), Compute(Work::FillSum))
        | (Compute(Work::Bases), Compute(Work::Judge)) => Some("both plan, and neither needs the other"),
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

fn survivors(title: &str, group: &Group) -> Vec<String> {
    let calls = if group.pulls { engine_rounds() } else { rounds() };
    let programs = programs(group);
    let (mut tallies, mut wrong): (BTreeMap<&str, Tally>, Vec<String>) = (BTreeMap::new(), Vec::new());
    // No engine makes a dispatch along a known layout.
    let made = |kind: &CallKind| !(group.pulls && *kind == CallKind::CachedDispatch);
    for kind in KINDS.into_iter().filter(made) {
        for (_, program) in programs.of(kind, group.relays) {
            program.check(program).unwrap_or_else(|lacking| panic!("{lacking}: {program}"));
        }
        for mutation in CallMutation::all(&programs, kind, group.relays, group.nodes.ranks()) {
            let all = programs.of(kind, group.relays);
            let (_, program) = all.into_iter().find(|(role, _)| *role == mutation.role).expect("the program");
            let tally = tallies
                .entry(match mutation.change {
                    CallChange::Drop => "a step is dropped",
                    CallChange::Swap => "two steps change places",
                    CallChange::GoOn { .. } => "a refused rank goes on",
                })
                .or_default();
            tally.mutants += 1;
            let (step, next) = mutation.steps(program);
            let next = next.map_or(String::new(), |next| next.action.to_string());
            let mutant =
                format!("{kind:?} {:?} {:?}: {} | {next}", mutation.role, mutation.change, step.action);
            if let Err(lacking) = mutation.plant(program).check(program) {
                tally.by_flow += 1;
                tally.example = format!("{mutant}: {lacking}");
                continue;
            }
            let script = Script { mutation: Some(mutation), ..group.script(&calls, None) };
            let story = Story::tell(&script).expect("a script that can be unrolled");
            match (prove(&story), harmless(&mutation, program, group)) {
                (Ok(_), Some(_)) => tally.harmless += 1,
                (Err(fault), None) => {
                    tally.by_proof += 1;
                    tally.example = format!("{mutant}: {fault}");
                }
                (Ok(_), None) => wrong.push(format!("not found: {mutant}")),
                (Err(fault), Some(reason)) => {
                    wrong.push(format!("not harmless ({reason}): {mutant}: {fault}"))
                }
            }
        }
    }
    println!("{title:<28} mutants  by flow  by proof  harmless");
    for (class, Tally { mutants, by_flow, by_proof, harmless, example }) in &tallies {
        println!("{class:<28} {mutants:>7} {by_flow:>8} {by_proof:>9} {harmless:>9}  {example}");
    }
    wrong
}

fn all_found(labels: &[u32], way: (Route, Relays)) {
    all_of_group_found(Group::new(labels, 1, 5).run(way));
}

fn all_of_group_found(group: Group) {
    let title = format!("{} nodes {:?} {:?}", group.nodes.nodes(), group.route, group.relays);
    assert_eq!(survivors(&title, &group), Vec::<String>::new());
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
fn driver_mutants_of_copy_engines_are_found() {
    all_of_group_found(Group::new(&[0, 0, 1, 1], 4, 5).run((Route::Direct, Relays::Inline)).pulling());
    all_of_group_found(Group::dense(&[0, 0, 1, 1], 4, 5).run((Route::Pxn, Relays::Inline)).pulling());
    all_of_group_found(Group::new(&[0, 0, 1, 1], 4, 5).run((Route::Direct, Relays::Inline)).straight());
    let budget = Mode::Budget { rows: 60, overflow: Overflow::Drop };
    let within = (RowLayout::ExpertMajor, budget, Order::Expert);
    all_of_group_found(
        Group::new(&[0; 4], 4, 5).run((Route::Direct, Relays::Inline)).pulling().placed(within),
    );
}
