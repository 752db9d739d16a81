//! The timed order is the order that runs.

use std::cell::RefCell;

use sidelane::exec::Timeline;
use sidelane::layer::{Input, Times, backward_times, forward_times};
use sidelane::overlap::NodeInfo;

use super::case::{Case, Cut, WHOLE, tensors};
use crate::support::{on_ranks, small};

/// Stream, work and chunk.
type Node = (String, String, u32);

/// In the order in which nodes ended.
fn carried_out(timeline: Timeline) -> Vec<Node> {
    timeline.spans.into_iter().map(|span| (span.stream, span.name, span.chunk)).collect()
}

/// In the order of the queries for their time: a nanosecond each.
fn asked(times: impl Fn(&dyn Fn(NodeInfo) -> u64) -> Times) -> (Vec<Node>, Times) {
    let asked = RefCell::default();
    let cost = |at: NodeInfo| {
        let NodeInfo { work, stream, .. } = at;
        let mut asked: std::cell::RefMut<'_, Vec<Node>> = RefCell::borrow_mut(&asked);
        asked.push((stream.to_string(), work.name.to_owned(), work.chunk));
        1
    };
    let times = times(&cost);
    (asked.into_inner(), times)
}

#[test]
fn nodes_are_timed_in_the_order_in_which_a_layer_carries_them_out() {
    for chunks in [1, 3, 7] {
        let case = Case::new(&[0, 0], &[9, 14], Cut { chunks, transfers: 1, ..WHOLE });
        let options = small().with_record(4096);
        let seen = on_ranks(&case.nodes, &options, |world| {
            let rank = world.rank() as usize;
            let mut layer = case.layer::<f32>(&world);
            let recorder = world.recorder().unwrap();
            let [x, _, of_out] = tensors::<f32>(rank, case.tokens[rank]);
            recorder.take();
            let (_, tape) = layer.forward(&Input::new(&x)).unwrap();
            let forward = carried_out(recorder.take());
            layer.backward(tape, &of_out).unwrap();
            [forward, carried_out(recorder.take())]
        });
        let (forward, of_forward) = asked(|cost| forward_times(chunks, cost));
        let (backward, of_backward) = asked(|cost| backward_times(chunks, cost));
        assert_eq!((of_forward.in_turn, of_backward.in_turn), (forward.len() as u64, backward.len() as u64));
        for [forward_of_rank, backward_of_rank] in seen {
            assert_eq!(forward_of_rank, forward);
            assert_eq!(backward_of_rank, backward);
        }
    }
}
