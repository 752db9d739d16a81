//! What the least certain figures decide, as the [model](sidelane_model::time::Assumption)
//! concludes.

use sidelane_model::time::Outcome;

use crate::table::{self, time_ns};

/// A line for each.
pub fn text(outcomes: &[Outcome]) -> String {
    let table = table::of(
        outcomes,
        &[
            ("sensitivity", &|one| one.assumption.clone()),
            ("fastest dispatch", &|one| one.dispatch.variant.clone()),
            ("time", &|one| time_ns(one.dispatch.ns)),
            ("bottleneck", &|one| one.dispatch.bottleneck.name().to_owned()),
            ("fastest combine", &|one| one.combine.variant.clone()),
            ("time", &|one| time_ns(one.combine.ns)),
            ("bottleneck", &|one| one.combine.bottleneck.name().to_owned()),
            ("flips", &|one| if one.flips.is_empty() { "none".to_owned() } else { one.flips.join("; ") }),
        ],
    );
    format!(
        "{table}\n\nEach line changes one price and leaves the others as given. A flip is a conclusion that is another then."
    )
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;

    #[test]
    fn each_price_has_its_conclusions_and_flips_are_differences() {
        let line = "--nodes 1 --ranks-per-node 4 --tokens 64 --hidden 128 --seed 7";
        let outcomes = report(line).sensitivity;
        let prices: Vec<_> = outcomes.iter().map(|one| (one.copy_us, one.word_us)).collect();
        assert_eq!(prices, [(0.6, 0.63), (0.6, 0.63), (2.3, 0.63), (0.6, 0.1), (0.6, 0.5)]);
        let [given, same, dear_copies, cheap_words, ..] = &outcomes[..] else { panic!("{outcomes:?}") };
        assert_eq!((&given.dispatch, &given.combine), (&same.dispatch, &same.combine));
        assert!(given.flips.is_empty() && same.flips.is_empty());
        assert!(dear_copies.dispatch.ns > given.dispatch.ns && cheap_words.dispatch.ns < given.dispatch.ns);
        for one in &outcomes {
            let moved = one.dispatch.variant != given.dispatch.variant
                || one.combine.variant != given.combine.variant
                || one.dispatch.bottleneck != given.dispatch.bottleneck
                || one.combine.bottleneck != given.combine.bottleneck;
            assert_eq!(moved, !one.flips.is_empty(), "{one:?}");
        }
    }

    #[test]
    fn slots_have_conclusions_too() {
        let report = report("--mode slots --nodes 1 --ranks-per-node 4 --tokens 8 --hidden 128");
        assert!(report.sensitivity.iter().all(|one| one.dispatch.variant == "slots"));
        assert_eq!(report.sensitivity.len(), 5);
    }
}
