//! The routing of a measurement that names none: what a trained router decided, token by token.
//!
//! A pattern draws every token for itself. A router reads text: neighbouring tokens want the same experts, and no law
//! says how busy an expert is. `data/README.md` tells how the recording was made, and its figures.

/// The recording, as [`Recorded`](sidelane::gate::Recorded) reads it. Part of the program, which so needs no file.
pub const TEXT: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/routing.jsonl"));

/// Its experts, and the default of all routing.
pub const EXPERTS: u32 = 64;

/// Its choices per token, and the default of all routing.
pub const TOP_K: u32 = 8;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use sidelane::gate::{Recorded, Routing};
    use sidelane::plan::ExpertMap;

    use super::*;

    const PAGE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/README.md"));
    const TOKENS: u32 = 4096;
    const RANKS: u32 = 8;
    const NODES: u32 = 2;

    fn all() -> Routing<'static> {
        Recorded::parse(TEXT).unwrap().routing(0, TOKENS).unwrap()
    }

    #[test]
    fn every_rank_of_the_main_job_replays_tokens_of_its_own() {
        let recorded = Recorded::parse(TEXT).unwrap();
        assert_eq!((recorded.experts(), recorded.top_k()), (Some(EXPERTS), TOP_K));
        assert_eq!(recorded.tokens(), TOKENS as usize);
    }

    #[test]
    fn nothing_is_dropped_and_weights_fall_and_sum_to_one() {
        let routing = all();
        assert!(routing.experts().iter().all(|&id| id >= 0));
        for weights in routing.weights().chunks(TOP_K as usize) {
            assert!(weights.iter().all(|&w| w > 0.0) && weights.is_sorted_by(|a, b| a >= b), "{weights:?}");
            // Written with four digits: each of the eight may be half a unit off.
            let sum: i32 = weights.iter().map(|w| (w * 1e4).round() as i32).sum();
            assert!((9996..=10004).contains(&sum), "{weights:?}");
        }
    }

    /// Choices of each of `parts` equal blocks of experts, by their mean; ascending.
    fn loads(routing: &Routing<'_>, parts: u32) -> Vec<f64> {
        let mut choices = vec![0u32; parts as usize];
        for &id in routing.experts() {
            choices[(id as u32 / (EXPERTS / parts)) as usize] += 1;
        }
        choices.sort_unstable();
        let mean = f64::from(TOKENS * TOP_K) / f64::from(parts);
        choices.into_iter().map(|choices| f64::from(choices) / mean).collect()
    }

    /// On how many nodes of `ranks` ranks each the experts of a token lie, on average.
    fn reached(routing: &Routing<'_>, ranks: u32) -> f64 {
        let map = ExpertMap::contiguous(EXPERTS, RANKS).unwrap();
        let node = |&id: &i32| map.rank_of(map.slot_for(0, id as u32)) / ranks;
        let nodes = |token| routing.experts_of(token).iter().map(node).collect::<BTreeSet<_>>().len();
        (0..TOKENS).map(nodes).sum::<usize>() as f64 / f64::from(TOKENS)
    }

    /// How many of its experts a token shares with the one before, on average.
    fn kept(routing: &Routing<'_>) -> f64 {
        let shared = |token: u32| {
            let before = routing.experts_of(token - 1);
            routing.experts_of(token).iter().filter(|id| before.contains(id)).count()
        };
        (1..TOKENS).map(shared).sum::<usize>() as f64 / f64::from(TOKENS - 1)
    }

    #[test]
    fn its_page_states_how_uneven_it_is_and_what_a_token_reaches() {
        let routing = all();
        let (experts, ranks) = (loads(&routing, EXPERTS), loads(&routing, RANKS));
        let shares = experts.iter().map(|load| load / f64::from(EXPERTS)).filter(|&share| share > 0.0);
        let entropy = -shares.map(|share| share * share.ln()).sum::<f64>() / f64::from(EXPERTS).ln();
        for (what, figure) in [
            ("busiest expert, of the mean", experts[EXPERTS as usize - 1]),
            ("quietest expert, of the mean", experts[0]),
            ("entropy of the experts' shares, of log 64", entropy),
            ("busiest of 8 ranks, of the mean", ranks[RANKS as usize - 1]),
            ("quietest of 8 ranks, of the mean", ranks[0]),
            ("ranks of 8 that a token reaches", reached(&routing, 1)),
            ("nodes of 2 that a token reaches", reached(&routing, RANKS / NODES)),
            ("experts of 8 that a token shares with the one before", kept(&routing)),
        ] {
            let stated = format!("| {what} | {figure:.2} |");
            assert!(PAGE.contains(&stated), "the page does not say: {stated}");
        }
    }
}
