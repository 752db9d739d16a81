//! The table of features from C: each cell that says "no" is refused by name on all ranks, and no
//! other is that C asks for.

mod common;

use std::path::Path;

use common::{Linked, PACKAGE, compiled, launch, succeeded, with_devices};
use sidelane::ep::{CallExecutor, Feature};
use sidelane::plan::{Overflow, ReceiveMode};

const HOST: &str = "host-stepper";
const ENQUEUER: &str = "enqueuer";
const SLOTS: &str = "constant-program, slots";
const BUDGET: &str = "constant-program, budget";

/// Whether C has no way to ask a column for a feature.
fn is_not_asked(feature: Feature, column: &str) -> bool {
    match feature {
        // C has neither.
        Feature::Priority | Feature::Floor => true,
        // Another mode serves the settings.
        Feature::ScarceSlots => column != SLOTS,
        Feature::Budget => column == SLOTS,
        // Rank-major rows have no such sums in any place.
        Feature::OrderExpert | Feature::AllGather | Feature::WeightedCombine => column == SLOTS,
        _ => false,
    }
}

/// The feature that is named: of several, the first that is missing.
fn named(feature: Feature, column: &str) -> Feature {
    match (feature, column) {
        (Feature::Spans, SLOTS) => Feature::Relays,
        (Feature::Spans, BUDGET) => Feature::RankMajor,
        _ => feature,
    }
}

#[test]
fn each_missing_feature_is_refused_by_name_on_all_ranks() {
    let source = Path::new(PACKAGE).join("tests/features.c");
    let program = compiled(&source, "features", Linked::WithDriver);
    let mut job = launch(1, 2);
    let out = succeeded(&with_devices(&mut job).arg(&program).output().expect("it starts"), "features");
    let split = |line: &'_ str| line.split('|').map(str::to_owned).collect::<Vec<_>>();
    // The launcher has lines of its own.
    let lines: Vec<_> = out.lines().map(split).filter(|line| line.len() == 4).collect();
    let slots = ReceiveMode::Slots { rows: 1, overflow: Overflow::Error };
    let budget = ReceiveMode::Budget { rows: 1, overflow: Overflow::Error };
    for (column, executor, mode) in [
        (HOST, CallExecutor::HostStepper, ReceiveMode::Exact),
        (ENQUEUER, CallExecutor::Enqueuer, ReceiveMode::Exact),
        (SLOTS, CallExecutor::ConstantProgram, slots),
        (BUDGET, CallExecutor::ConstantProgram, budget),
    ] {
        let place = if column == HOST { "the host" } else { "a device" };
        for feature in Feature::ALL {
            let (name, known) = (feature.name(), named(feature, column).name());
            let words = format!("not available on {place} ({}): {known}", executor.name());
            for rank in ["0", "1"] {
                let asked = lines.iter().filter(|line| line[..3] == [rank, column, name]);
                let told: Vec<&String> = asked.map(|line| &line[3]).collect();
                if feature.is_served_in(executor, mode) {
                    assert!(told.iter().all(|told| *told == "served"), "{name}, {column}: {told:?}");
                    continue;
                }
                let refused = !told.is_empty() && told.iter().all(|told| told.contains(&words));
                assert_eq!(refused, !is_not_asked(feature, column), "{name}, {column}: {told:?}");
            }
        }
    }
}
