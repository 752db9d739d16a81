//! Dispatch and combine in a graph: captured once, replayed with other tokens each time.

use sidelane::device::{Graph, PinnedMemory};

use super::rank::{Case, Rank, content, copied_back, on_ranks, options};
use super::{on_each, on_stand_in};

#[test]
fn a_graph_of_a_whole_layer_is_replayed_with_other_tokens() {
    let case = Case { ranks: 3, experts: 7, top_k: 2, hidden: 16, max_tokens: 4 };
    let seeds = |seed, queues| [("SIDELANE_STAND_IN_SEED", seed), ("CUDA_DEVICE_MAX_CONNECTIONS", queues)];
    let runs = [seeds("0", "8"), seeds("1", "1")];
    on_each("graphs::a_graph_of_a_whole_layer_is_replayed_with_other_tokens", &[&runs[0], &runs[1]], || {
        on_ranks(case.ranks, &options(), |world| replays(Rank::new(case, world)));
    });
}

fn replays(mut rank: Rank) {
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

#[test]
fn what_cannot_be_captured_leaves_no_graph_and_a_stream_that_goes_on() {
    let case = Case { ranks: 1, experts: 1, top_k: 1, hidden: 8, max_tokens: 1 };
    on_stand_in("graphs::what_cannot_be_captured_leaves_no_graph_and_a_stream_that_goes_on", || {
        on_ranks(1, &options(), |world| {
            let rank = Rank::new(case, world);
            let refused = Graph::capture(&rank.stream, || Ok(rank.stream.synchronize()?));
            assert!(matches!(refused, Err(sidelane::Error::Device(_))), "{refused:?}");
            let word = PinnedMemory::new(&rank.context, 8).unwrap();
            rank.stream.write::<u64>(word.range().word(0).unwrap(), 5).unwrap();
            rank.stream.synchronize().unwrap();
            assert_eq!(content(&word)[0], 5);
        });
    });
}
