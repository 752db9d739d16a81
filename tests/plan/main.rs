//! Plans: placement, receive modes, traffic, and relay order.

mod modes;
mod properties;
mod relay_order;
#[path = "../support/mod.rs"]
mod support;
mod traffic;

use std::hash::{BuildHasher, RandomState};

use proptest::test_runner::{Config, RngSeed};

/// Names the seed of a run that is to be repeated.
const SEED: &str = "SIDELANE_TEST_SEED";

/// So many random cases, other ones in each run: the test's output names the seed of a repetition.
fn random_cases(cases: u32) -> Config {
    let given = std::env::var(SEED).ok().map(|seed| seed.parse().expect("a seed is a number"));
    let seed = given.unwrap_or_else(|| RandomState::new().hash_one(cases));
    println!("{SEED}={seed} repeats these cases");
    Config { cases, failure_persistence: None, rng_seed: RngSeed::Fixed(seed), ..Config::default() }
}
