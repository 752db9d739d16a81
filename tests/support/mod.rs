//! Worlds of threads, random routings, and the naive reference for dispatch and combine.
#![allow(dead_code, reason = "each test program uses a part of this")]

mod cases;
pub mod layer;
pub mod network;
pub mod processes;

#[allow(unused_imports, reason = "each test program uses a part of this")]
pub use cases::cases;

use std::hash::{BuildHasher, RandomState};

use half::bf16;
use sidelane::config::Config;
use sidelane::plan::ExpertMap;
use sidelane::{Options, World};
#[allow(unused_imports, reason = "each test program uses a part of this")]
pub use sidelane_verify::reference::{self, To, Tokens, tokens};

/// Options for small worlds.
pub fn small() -> Options {
    let config = Config { heap: 4 << 20, symmetric: 2 << 20, ..Config::default() };
    Options { config, ..Options::default() }
}

/// Options for worlds that are many and hold a few rows.
pub fn tiny() -> Options {
    let config = Config { heap: 1 << 20, symmetric: 256 << 10, ..Config::default() };
    Options { config, ..Options::default() }
}

/// Runs `body` on every rank of a world of threads; rank r is on node `nodes[r]`. Results in order
/// of rank.
pub fn on_ranks<T: Send>(nodes: &[u32], options: &Options, body: impl Fn(World) -> T + Sync) -> Vec<T> {
    let worlds = World::threads_with(nodes, options).expect("a world of threads");
    std::thread::scope(|scope| {
        let ranks: Vec<_> = worlds.into_iter().map(|world| scope.spawn(|| body(world))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    })
}

/// Results of experts that change nothing: each token times its number of choices, summed from +0.
pub fn repeated(tokens: &Tokens<bf16>, top_k: u32, hidden: usize) -> Vec<bf16> {
    let chosen = tokens.ids.chunks_exact(top_k as usize).map(|ids| ids.iter().filter(|&&id| id >= 0).count());
    let rows = tokens.x.chunks_exact(hidden).zip(chosen);
    let sum = |x: &bf16, n| bf16::from_f32((0..n).fold(0.0, |sum, _| sum + x.to_f32()));
    rows.flat_map(|(row, n)| row.iter().map(move |x| sum(x, n))).collect()
}

/// Where a received row came from: (rank, token, choice); `None` is a pad row.
pub type Origin = Option<(usize, usize, usize)>;

/// The rows of every rank in visible order, found by sorting all (slot, source, token).
pub fn placement<E>(ranks: &[Tokens<E>], top_k: u32, map: &ExpertMap, align: u32) -> Vec<Vec<Origin>> {
    let mut rows: Vec<Vec<Origin>> = vec![Vec::new(); map.ranks() as usize];
    for slot in 0..map.slots() {
        let mut segment: Vec<Origin> = Vec::new();
        for (source, tokens) in ranks.iter().enumerate() {
            for (choice, &id) in tokens.ids.iter().enumerate() {
                if id >= 0 && map.slot_for(source as u32, id as u32) == Some(slot) {
                    segment.push(Some((source, choice / top_k as usize, choice)));
                }
            }
        }
        while !segment.len().is_multiple_of(align as usize) {
            segment.push(None);
        }
        rows[map.rank_of(slot) as usize].extend(segment);
    }
    rows
}

/// Seed of random cases, another one in each run: the test's output names the one to repeat.
pub fn random_seed() -> u64 {
    const SEED: &str = "SIDELANE_TEST_SEED";
    let given = std::env::var(SEED).ok().map(|seed| seed.parse().expect("a seed is a number"));
    let seed = given.unwrap_or_else(|| RandomState::new().hash_one(SEED));
    println!("{SEED}={seed} repeats these cases");
    seed
}
