//! Dispatch and combine in a graph: captured once, replayed with other tokens each time.

use sidelane::device::{CudaGraph, PinnedMemory};

use super::rank::{Case, Rank, content, on_ranks, options};
use super::replays::replays;
use super::{on_each, on_fake_driver};

#[test]
fn a_graph_of_a_whole_layer_is_replayed_with_other_tokens() {
    let case = Case { ranks: 3, experts: 7, top_k: 2, hidden: 16, max_tokens: 4 };
    let seeds = |seed, queues| [("SIDELANE_FAKE_CUDA_SEED", seed), ("CUDA_DEVICE_MAX_CONNECTIONS", queues)];
    let runs = [seeds("0", "8"), seeds("1", "1")];
    on_each(
        "slots::graphs::a_graph_of_a_whole_layer_is_replayed_with_other_tokens",
        &[&runs[0], &runs[1]],
        || {
            on_ranks(case.ranks, &options(), |world| replays(Rank::new(case, world)));
        },
    );
}

#[test]
fn refused_capture_leaves_no_graph_and_a_usable_stream() {
    let case = Case { ranks: 1, experts: 1, top_k: 1, hidden: 8, max_tokens: 1 };
    on_fake_driver("slots::graphs::refused_capture_leaves_no_graph_and_a_usable_stream", || {
        on_ranks(1, &options(), |world| {
            let rank = Rank::new(case, world);
            let refused = CudaGraph::capture(&rank.stream, || Ok(rank.stream.synchronize()?));
            assert!(matches!(refused, Err(sidelane::Error::Device(_))), "{refused:?}");
            let word = PinnedMemory::new(&rank.context, 8).unwrap();
            rank.stream.write::<u64>(word.range().word(0).unwrap(), 5).unwrap();
            rank.stream.synchronize().unwrap();
            assert_eq!(content(&word)[0], 5);
        });
    });
}
