//! Every single bug planted in the real schedules is found, or is listed here with the reason why it is none.

mod groups;

use std::collections::BTreeMap;

use groups::{Group, rounds};
use sidelane::error::CallKind;
use sidelane::schedule::check::check;
use sidelane::schedule::mutate::{Change, Mutation, mutations};
use sidelane::schedule::prove::{Fault, prove};
use sidelane::schedule::story::Slip;
use sidelane::schedule::{Flag, Op};

/// Why a mutation changes nothing that anybody can see; `None` if it must be found.
fn harmless(mutation: &Mutation) -> Option<&'static str> {
    match (mutation.item.op, mutation.change, mutation.other) {
        (Op::Reduce { .. }, Change::Swap, Some(Op::Reduce { .. })) => Some("two reads in either order"),
        (Op::Signal { to: a, .. }, Change::Swap, Some(Op::Signal { to: b, .. })) if a != b => {
            Some("two words of two ranks, each still behind what it guards")
        }
        (Op::Signal { .. }, Change::Swap, Some(Op::Wait { .. })) => {
            Some("one rank alone waits first: stricter, and nobody waits for it in turn")
        }
        (Op::Wait { flag: Flag::Read, .. }, ..) if mutation.kind != CallKind::Combine => {
            Some("whoever writes in a dispatch has heard the entry of every rank, sent after its last sum")
        }
        _ => None,
    }
}

fn name(fault: &Fault) -> &'static str {
    match fault {
        Fault::Deadlock { .. } => "deadlock",
        Fault::Race { .. } => "race",
        Fault::Unwritten { .. } => "unwritten",
        Fault::WrittenTwice { .. } => "twice",
        Fault::Overwritten { .. } => "overwritten",
        Fault::TwoWriters { .. } => "two writers",
        Fault::NotMonotone { .. } => "not monotone",
        Fault::Differs { .. } => "differs",
    }
}

fn class(mutation: &Mutation) -> String {
    let op = match mutation.item.op {
        Op::Put { .. } => "put".into(),
        Op::PutRows { .. } => "put rows".into(),
        Op::Signal { flag, .. } => format!("signal {}", flag.name()),
        Op::Wait { flag, .. } => format!("wait {}", flag.name()),
        Op::Reduce { .. } => "reduce".into(),
    };
    format!("{op:14} {:?}", mutation.change)
}

/// What became of the mutants of one class.
#[derive(Default)]
struct Tally {
    mutants: usize,
    found: BTreeMap<&'static str, usize>,
    harmless: usize,
    example: String,
}

fn survivors(labels: &[u32]) -> Vec<String> {
    let group = Group::new(labels, 4, 5);
    let story = group.tell(&rounds(), None);
    prove(&story).expect("the real schedule has no fault");
    let mut tallies: BTreeMap<String, Tally> = BTreeMap::new();
    let mut wrong = Vec::new();
    for mutation in mutations(&story) {
        let tally = tallies.entry(class(&mutation)).or_default();
        tally.mutants += 1;
        match (prove(&mutation.plant(&story)), harmless(&mutation)) {
            (Ok(_), Some(_)) => tally.harmless += 1,
            (Err(fault), None) => {
                *tally.found.entry(name(&fault)).or_default() += 1;
                tally.example = fault.to_string();
            }
            (Ok(_), None) => wrong.push(format!("not found: {mutation:?}")),
            (Err(fault), Some(reason)) => {
                wrong.push(format!("not harmless ({reason}): {mutation:?}: {fault}"))
            }
        }
    }
    println!("{:<27} mutants  found  harmless", format!("{labels:?}"));
    for (class, tally) in &tallies {
        let found: usize = tally.found.values().sum();
        println!("{class:<27} {:>7} {found:>6} {:>9}  {:?}", tally.mutants, tally.harmless, tally.found);
    }
    let sum = |of: fn(&Tally) -> usize| tallies.values().map(of).sum::<usize>();
    let (all, found, harmless) = (sum(|t| t.mutants), sum(|t| t.found.values().sum()), sum(|t| t.harmless));
    println!("{:<27} {all:>7} {found:>6} {harmless:>9}", "all");
    println!("for example:");
    for (class, tally) in tallies.iter().filter(|(_, tally)| !tally.example.is_empty()) {
        println!("  {class:<27} {}", tally.example);
    }
    assert!(found > 500, "the skeletons were mutated");
    wrong
}

#[test]
fn every_mutant_of_two_nodes_of_two_is_found() {
    assert_eq!(survivors(&[0, 0, 1, 1]), Vec::<String>::new());
}

#[test]
fn every_mutant_of_one_node_of_four_is_found() {
    assert_eq!(survivors(&[0; 4]), Vec::<String>::new());
}

#[test]
fn harmless_mutants_change_no_outcome() {
    let group = Group::new(&[0, 0, 1, 1], 4, 5);
    let story = group.tell(&rounds(), None);
    let harmless: Vec<Mutation> =
        mutations(&story).into_iter().filter(|mutation| harmless(mutation).is_some()).collect();
    assert!(harmless.len() > 100);
    for mutation in harmless {
        check(&mutation.plant(&story), 0..4).unwrap_or_else(|fault| panic!("{mutation:?}: {fault}"));
    }
}

#[test]
fn every_broken_rule_of_memory_is_found() {
    for labels in [[0, 0, 1, 1], [0; 4]] {
        let group = Group::new(&labels, 4, 5);
        for slip in Slip::ALL {
            let fault = prove(&group.tell(&rounds(), Some(slip))).expect_err("a broken rule is found");
            println!("{labels:?} {slip:?}: {fault}");
        }
    }
}
