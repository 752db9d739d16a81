//! Worlds of threads, random routings, and the naive reference for dispatch and combine.
#![allow(dead_code, reason = "each test program uses a part of this")]

mod cases;
pub mod layer;
pub mod network;
pub mod processes;
mod ranks;

#[allow(unused_imports, reason = "each test program uses a part of this")]
pub use cases::{cases, sample};
#[allow(unused_imports, reason = "each test program uses a part of this")]
pub use ranks::{failed, on_ranks, random_seed, tiny};

use half::bf16;
use sidelane::Options;
use sidelane::config::Config;
use sidelane::plan::ExpertMap;
#[allow(unused_imports, reason = "each test program uses a part of this")]
pub use sidelane_verify::reference::{self, To, Tokens, tokens};

/// Options for small worlds. Making a world touches its pages, which is most of the work of a test
/// that moves a few rows.
pub fn small() -> Options {
    let config = Config::default().with_heap(1 << 20).with_symmetric(512 << 10);
    Options::default().with_config(config)
}

/// Options for worlds with long rows or many tokens.
pub fn medium() -> Options {
    let config = Config::default().with_heap(4 << 20).with_symmetric(2 << 20);
    Options::default().with_config(config)
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
