//! Random graphs: what runs when, and that results do not depend on it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, OnceLock};

use proptest::prelude::*;
use sidelane::overlap::{Graph, HostExecutor, Node, NodeLabel, RoundRobin, Run, StreamId};

/// A node of a random graph: its stream, and earlier nodes that it reads.
type Shape = Vec<(StreamId, Vec<usize>)>;

fn shapes() -> impl Strategy<Value = Shape> {
    let stream = prop_oneof![(0..4u32).prop_map(StreamId::Compute), (0..3u32).prop_map(StreamId::Transfer)];
    let node = (stream, prop::collection::vec(any::<prop::sample::Index>(), 0..4));
    prop::collection::vec(node, 0..40).prop_map(|nodes| {
        let nodes = nodes.into_iter().enumerate();
        nodes
            .map(|(at, (stream, after))| {
                let mut after: Vec<usize> = match at {
                    0 => Vec::new(),
                    _ => after.iter().map(|index| index.index(at)).collect(),
                };
                after.sort_unstable();
                after.dedup();
                (stream, after)
            })
            .collect()
    })
}

/// When a node began and ended, by a clock that counts both.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Ran {
    times: usize,
    began: usize,
    ended: usize,
}

/// Runs the shape: each node makes a value of its own number and of those that it reads, in their
/// order.
fn run(shape: &Shape, executor: &HostExecutor<'_>) -> (Vec<u64>, Vec<Ran>) {
    let clock = AtomicUsize::new(0);
    let values: Vec<OnceLock<u64>> = vec![OnceLock::new(); shape.len()];
    let mut ran = vec![Ran::default(); shape.len()];
    let mut graph = Graph::new();
    let mut nodes: Vec<Node> = Vec::new();
    for (at, ((stream, after), ran)) in shape.iter().zip(&mut ran).enumerate() {
        let edges: Vec<Node> = after.iter().map(|&before| nodes[before]).collect();
        let (clock, values) = (&clock, &values);
        nodes.push(graph.add(*stream, NodeLabel::new("mix", at as u32), &edges, move |_| {
            ran.times += 1;
            ran.began = clock.fetch_add(1, Ordering::SeqCst);
            let mut value = at as u64 + 1;
            for &before in after {
                value =
                    value.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ values[before].get().expect("it has ended");
            }
            values[at].set(value).expect("it runs once");
            ran.ended = clock.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }));
    }
    graph.run(executor).unwrap();
    (values.into_iter().map(|value| value.into_inner().unwrap()).collect(), ran)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn every_node_runs_once_after_its_edges_and_its_stream_and_to_the_same_bits(shape in shapes()) {
        let (serial, in_order) = run(&shape, &HostExecutor::new().overlap(false));
        let (beside, ran) = run(&shape, &HostExecutor::new());
        prop_assert_eq!(serial, beside);
        for (at, ran) in in_order.iter().enumerate() {
            prop_assert_eq!(*ran, Ran { times: 1, began: 2 * at, ended: 2 * at + 1 }, "launch order");
        }
        for (at, (stream, after)) in shape.iter().enumerate() {
            prop_assert_eq!(ran[at].times, 1);
            let own = (0..at).filter(|&before| shape[before].0 == *stream);
            for before in own.chain(after.iter().copied()) {
                prop_assert!(ran[before].ended < ran[at].began, "{} before {}", before, at);
            }
        }
    }
}

/// Two nodes, of which the second waits for half of the first, and the first for `second` to have
/// begun; whether both ran.
fn halves(
    executor: HostExecutor<'_>,
    first: impl FnOnce(&Run, &Condvar, &Mutex<bool>) -> bool + Send,
) -> [bool; 2] {
    let (begun, changed, mut both) = (Mutex::new(false), Condvar::new(), [false; 2]);
    let [one, other] = &mut both;
    let mut graph = Graph::new();
    let before = graph.add(StreamId::Transfer(0), NodeLabel::new("dispatch", 0), &[], |run| {
        *one = first(run, &changed, &begun);
        Ok(())
    });
    graph.add(StreamId::Transfer(1), NodeLabel::new("dispatch", 1), &[before.halfway()], |_| {
        *begun.lock().unwrap() = true;
        changed.notify_all();
        *other = true;
        Ok(())
    });
    graph.run(&executor).unwrap();
    both
}

#[test]
fn who_waits_for_half_of_a_node_begins_while_that_is_at_it() {
    let seen = halves(HostExecutor::new(), |run, changed, begun| {
        run.halfway();
        *changed.wait_while(begun.lock().unwrap(), |begun| !*begun).unwrap()
    });
    assert_eq!(seen, [true, true]);
}

#[test]
fn a_node_that_does_not_say_it_is_halfway_is_waited_for_to_its_end() {
    let not_begun = |_: &Run, _: &Condvar, begun: &Mutex<bool>| !*begun.lock().unwrap();
    assert_eq!(halves(HostExecutor::new(), not_begun), [true, true]);
    // Nor does a node begin next to the rest of it on a single stream.
    let says = |run: &Run, _: &Condvar, begun: &Mutex<bool>| {
        run.halfway();
        !*begun.lock().unwrap()
    };
    assert_eq!(halves(HostExecutor::new().overlap(false), says), [true, true]);
}

/// Nodes that all wait until `together` of them run, and the most that ever ran at once.
fn rotate(streams: u32, at_once: u32, together: usize) -> usize {
    let (at_it, most) = (Mutex::new((0, 0)), Condvar::new());
    let mut graph = Graph::new();
    let mut rotation = RoundRobin::new(streams, at_once);
    for chunk in 0..12 {
        rotation.add(&mut graph, NodeLabel::new("experts", chunk), &[], |_| {
            let mut now = at_it.lock().unwrap();
            now.0 += 1;
            now.1 = now.0.max(now.1);
            most.notify_all();
            now = most.wait_while(now, |now| now.1 < together).unwrap();
            now.0 -= 1;
            Ok(())
        });
    }
    graph.run(&HostExecutor::new()).unwrap();
    at_it.into_inner().unwrap().1
}

#[test]
fn of_many_streams_as_many_compute_at_once_as_may_and_no_more() {
    assert_eq!(rotate(5, 2, 2), 2);
    assert_eq!(rotate(3, 3, 3), 3);
    assert_eq!(rotate(1, 4, 1), 1, "a stream does one at a time");
    assert_eq!(rotate(4, 1, 1), 1);
}

#[test]
fn chunks_go_round_the_compute_streams() {
    let mut graph = Graph::new();
    let mut rotation = RoundRobin::new(3, 2);
    for chunk in 0..5 {
        rotation.add(&mut graph, NodeLabel::new("experts", chunk), &[], |_| Ok(()));
    }
    let streams: Vec<StreamId> = graph.places().map(|place| place.stream).collect();
    assert_eq!(streams, [0, 1, 2, 0, 1].map(StreamId::Compute));
    graph.run(&HostExecutor::new()).unwrap();
}

#[test]
fn the_callers_thread_is_compute_0_or_else_the_first_stream() {
    let here = std::thread::current().id();
    for (streams, callers) in [
        ([StreamId::Transfer(0), StreamId::Compute(0)], [false, true]),
        ([StreamId::Transfer(0), StreamId::Compute(1)], [true, false]),
    ] {
        let mut seen = [None; 2];
        let mut graph = Graph::new();
        for (stream, seen) in streams.into_iter().zip(&mut seen) {
            graph.add(stream, NodeLabel::new("look", 0), &[], move |_| {
                *seen = Some(std::thread::current().id() == here);
                Ok(())
            });
        }
        graph.run(&HostExecutor::new()).unwrap();
        assert_eq!(seen, callers.map(Some));
    }
}
