//! Which cases a test runs.
#![allow(dead_code, reason = "each test program uses a part of this")]

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, RandomState};

/// Cases that a test runs whose cases take long: all if `SIDELANE_TEST_WORLDS` is `all`, else one.
pub fn cases<T>(all: impl IntoIterator<Item = T>, most_demanding: usize) -> Vec<T> {
    let mut all = all.into_iter();
    match runs_all() {
        true => all.collect(),
        false => all.nth(most_demanding).into_iter().collect(),
    }
}

/// One in so many of these cases, drawn anew in each run, and one at least; all if
/// `SIDELANE_TEST_WORLDS` is `all`.
pub fn sample<T>(all: impl IntoIterator<Item = T>, one_in: usize) -> Vec<T> {
    let mut all: Vec<(usize, T)> = all.into_iter().enumerate().collect();
    if !runs_all() {
        let seed = random_seed();
        let by_chance = |nth: usize| BuildHasherDefault::<DefaultHasher>::default().hash_one((seed, nth));
        let count = all.len().div_ceil(one_in);
        all.sort_by_key(|&(nth, _)| by_chance(nth));
        all.truncate(count);
        all.sort_by_key(|&(nth, _)| nth);
    }
    all.into_iter().map(|(_, case)| case).collect()
}

/// Whether tests run all of their cases.
fn runs_all() -> bool {
    match std::env::var("SIDELANE_TEST_WORLDS").as_deref() {
        Ok("all") => true,
        Ok(other) => panic!("SIDELANE_TEST_WORLDS is {other:?}, and only `all` is known"),
        Err(_) => false,
    }
}

/// Seed of random cases, another one in each run: the test's output names the one to repeat.
pub fn random_seed() -> u64 {
    const SEED: &str = "SIDELANE_TEST_SEED";
    let given = std::env::var(SEED).ok().map(|seed| seed.parse().expect("a seed is a number"));
    let seed = given.unwrap_or_else(|| RandomState::new().hash_one(SEED));
    println!("{SEED}={seed} repeats these cases");
    seed
}
