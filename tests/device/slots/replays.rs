//! A layer in a graph, captured once and replayed with other tokens each time.

use std::sync::Arc;

use sidelane::device::CudaGraph;

use super::packed::Input;
use super::rank::{Case, Rank, content, copied_back};

/// What a rank sends in a round, with as many tokens as there may be. A graph has a constant number
/// of tokens: those that are not used choose nobody.
pub fn full(case: Case, round: u64, rank: u32) -> Input {
    let mut input = case.input(round, rank);
    let choices = (case.max_tokens * case.top_k) as usize;
    input.x.resize(case.bytes(case.max_tokens) as usize, 0);
    input.experts.resize(choices, -1);
    input.weights.resize(choices, 0.0);
    input.tokens = case.max_tokens;
    input
}

/// Replays it between plain rounds; all sums are compared.
pub fn replays(mut rank: Rank) {
    let (case, me) = (rank.case, rank.me());
    let full = |round| full(case, round, me);
    let mut tensors = rank.tensors(&full(0));
    // An ordinary round first: graphs and plain calls take turns with the same words.
    rank.layer(&tensors).unwrap();
    rank.ep.synchronize().unwrap();

    let out = tensors.out.clone();
    let stream = Arc::clone(&rank.stream);
    let layer = CudaGraph::capture(&stream, || rank.layer(&tensors).map(drop)).unwrap();
    for round in 1..=12 {
        let input = full(round);
        tensors = tensors.with(&input);
        layer.launch(&rank.stream).unwrap();
        rank.ep.synchronize().unwrap();
        assert_eq!(content(&out), copied_back(case, &input), "replay {round} at {me}");
    }
    // Several under way at once: the last one stays.
    (0..5).for_each(|_| layer.launch(&rank.stream).unwrap());
    rank.ep.synchronize().unwrap();
    assert_eq!(content(&out), copied_back(case, &full(12)));
    // And back to plain calls.
    let last = full(99);
    let tensors = rank.tensors(&last);
    rank.layer(&tensors).unwrap();
    rank.ep.synchronize().unwrap();
    assert_eq!(content(&tensors.out), copied_back(case, &last));
}
