//! Plans: placement, receive modes, traffic, and relay order.

mod modes;
mod properties;
mod relay_order;
#[path = "../support/mod.rs"]
mod support;
mod traffic;

use proptest::test_runner::{Config, RngSeed};

use crate::support::random_seed;

/// So many random cases, other ones in each run: the test's output names the seed of a repetition.
/// A run of all worlds takes three times as many more.
fn random_cases(cases: u32) -> Config {
    let cases = support::cases([cases, 3 * cases], 0).into_iter().sum();
    let rng_seed = RngSeed::Fixed(random_seed());
    Config { cases, failure_persistence: None, rng_seed, ..Config::default() }
}
