//! The gate compared with Megatron-core, DeepSpeed and plain float64 formulas.
//!
//! `judge.py` draws cases, runs the oracles and records their answers. Answers to small cases lie
//! in `golden.jsonl`, so that no Python is needed here; `SIDELANE_GATE_CASES` names a file of a
//! whole run. README.md describes the files.

mod asked;
mod case;
mod compare;
mod draw;
mod losses;
mod table;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use sidelane::gate::{Capacity, CapacityRule, DropPolicy, Preset};

use case::{Head, Run};
use compare::Seen;

fn golden() -> Run {
    case::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gate/oracles/golden.jsonl"))
}

/// Compares all cases; the table, and what must not be.
fn judged(run: &Run) -> HashMap<Preset, Seen> {
    let mut seen: HashMap<Preset, Seen> = HashMap::new();
    for case in &run.cases {
        seen.entry(case.preset.parse().expect("a preset")).or_default().compare(case);
    }
    println!("{}", table::table(&run.head, &seen));
    let faults: Vec<&String> = seen.values().flat_map(|seen| &seen.faults).collect();
    let first = faults.iter().take(40).map(|fault| fault.as_str()).collect::<Vec<_>>().join("\n");
    assert!(faults.is_empty(), "{} faults:\n{first}", faults.len());
    seen
}

/// Nothing may pass because nothing was asked.
fn asked_enough(seen: &HashMap<Preset, Seen>, per_preset: u32) {
    for preset in Preset::ALL {
        let of = &seen[&preset];
        let cases: u32 = of.judges.values().sum();
        assert!(cases >= per_preset, "{preset}: {cases} cases");
        assert!(
            of.weights > u64::from(cases) && of.their_weights > 0 && of.losses > 0,
            "{preset}: nothing compared"
        );
        let drops = !matches!(preset, Preset::DeepseekV3 | Preset::Mixtral | Preset::Qwen3 | Preset::Olmoe);
        assert!(of.placed > 0 && (of.dropped > 0) == drops, "{preset}: {} dropped", of.dropped);
    }
}

#[test]
fn golden_answers_are_given_again() {
    let seen = judged(&golden());
    asked_enough(&seen, 16);
}

#[test]
fn a_whole_run_of_the_judges_is_answered_alike() {
    let Some(path) = std::env::var_os("SIDELANE_GATE_CASES").map(PathBuf::from) else {
        eprintln!("skipped: SIDELANE_GATE_CASES names no run of judge.py");
        return;
    };
    let run = case::read(&path);
    assert!(run.cases.len() >= 2000, "{} cases", run.cases.len());
    asked_enough(&judged(&run), 150);
}

#[test]
fn capacities_are_those_of_both_systems_where_their_precisions_differ() {
    let Head { capacities, .. } = golden().head;
    assert_eq!(capacities.len(), 360);
    let mut differ = 0;
    for (tokens, experts, factor, megatron, deepspeed) in capacities {
        let rows = |rule| {
            let capacity = Capacity::new(rule, DropPolicy::Score);
            capacity.rows(tokens, experts, 1, 0)
        };
        let ours = (rows(CapacityRule::CeilF64 { factor }), rows(CapacityRule::CeilF32 { factor }));
        assert_eq!(ours, (megatron, deepspeed), "{tokens} tokens, {experts} experts, factor {factor}");
        differ += u32::from(megatron != deepspeed);
    }
    assert!(differ >= 10, "{differ} differ");
}
