//! A layer in a graph, captured once and replayed with other tokens each time.

use sidelane::device::Graph;

use super::rank::{Rank, content, copied_back};

/// Replays it between plain rounds; all sums are compared.
pub fn replays(mut rank: Rank) {
    let (case, me) = (rank.case, rank.me());
    // A graph has a constant number of tokens: those that are not used choose nobody.
    let full = |round| {
        let mut input = case.input(round, me);
        let choices = (case.max_tokens * case.top_k) as usize;
        input.x.resize(case.bytes(case.max_tokens) as usize, 0);
        input.experts.resize(choices, -1);
        input.weights.resize(choices, 0.0);
        input.tokens = case.max_tokens;
        input
    };
    let mut tensors = rank.tensors(&full(0));
    // An ordinary round first: graphs and plain calls take turns with the same words.
    rank.exchange.dispatch(&rank.stream, &tensors.tokens()).unwrap();
    rank.experts_copy();
    rank.exchange.combine(&rank.stream, tensors.out()).unwrap();
    rank.exchange.synchronize(&rank.stream).unwrap();

    let out = tensors.out.clone();
    let layer = Graph::capture(&rank.stream, || -> sidelane::Result<()> {
        rank.exchange.dispatch(&rank.stream, &tensors.tokens())?;
        let shape = rank.exchange.shape();
        let (received, partials) = (rank.exchange.received(), rank.exchange.partials()?);
        let len = shape.bytes() - shape.rows_at();
        for source in 0..u64::from(case.ranks) {
            let from = received.span(source * shape.bytes() + shape.rows_at(), len)?;
            rank.stream.copy(partials.span(source * len, len)?, from)?;
        }
        rank.exchange.combine(&rank.stream, tensors.out())
    });
    let layer = layer.unwrap();
    for round in 1..=12 {
        let input = full(round);
        tensors = tensors.with(&input);
        layer.launch(&rank.stream).unwrap();
        rank.exchange.synchronize(&rank.stream).unwrap();
        assert_eq!(content(&out), copied_back(case, &input), "replay {round} at {me}");
    }
    // Several under way at once: the last one stays.
    (0..5).for_each(|_| layer.launch(&rank.stream).unwrap());
    rank.exchange.synchronize(&rank.stream).unwrap();
    assert_eq!(content(&out), copied_back(case, &full(12)));
    // And back to plain calls.
    let last = full(99);
    let tensors = rank.tensors(&last);
    rank.exchange.dispatch(&rank.stream, &tensors.tokens()).unwrap();
    rank.experts_copy();
    rank.exchange.combine(&rank.stream, tensors.out()).unwrap();
    rank.exchange.synchronize(&rank.stream).unwrap();
    assert_eq!(content(&tensors.out), copied_back(case, &last));
}
