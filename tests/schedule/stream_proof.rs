//! Slots on streams are proved: every rank, constants that are reset, microbatches that interleave,
//! queues that streams share.

use sidelane_core::error::{CallKind, PlanError};
use sidelane_core::schedule::Op;
use sidelane_core::schedule::stream_program::RowPath;
use sidelane_core::topology::NodeMap;
use sidelane_verify::mutate::{Change, Mutation, mutations};
use sidelane_verify::prove::{ProofFailure, ends, prove};
use sidelane_verify::random_check::check;
use sidelane_verify::unroll::StreamCall::{self, Combine, Dispatch, Release};
use sidelane_verify::unroll::{Refusals, RefusedCall, StreamBug, StreamScenario, Streams, UnrolledProgram};

use crate::replays::{replays, slots, thrice};

fn unroll(ranks: u32, streams: Streams, calls: &[StreamCall], seeded: Option<StreamBug>) -> UnrolledProgram {
    UnrolledProgram::of_streams(&StreamScenario {
        slots: slots(ranks),
        streams,
        across: None,
        calls,
        refuses: None,
        seeded,
        planted: None,
    })
    .unwrap()
}

#[test]
fn every_replay_of_every_group_is_proved() {
    for ranks in (1..=8).chain([16, 64]) {
        for (streams, (name, calls)) in Streams::ALL.into_iter().flat_map(|s| replays().map(move |c| (s, c)))
        {
            let unrolled = unroll(ranks, streams, &calls, None);
            let title = format!("{ranks} ranks, {streams:?}, {name}");
            let proof = prove(&unrolled).unwrap_or_else(|fault| panic!("{title}: {fault}"));
            println!("{title:>40}: {:>7} operations, {:>9} pairs", proof.operations, proof.pairs);
            // A put, a signal, a wait and a reset word for each peer, without the puts of a
            // release.
            let peers = (ranks * (ranks - 1)) as usize;
            let releases = calls.iter().filter(|call| matches!(call, Release(_))).count();
            let events = if streams == Streams::Aside { 4 * calls.len() * ranks as usize } else { 0 };
            assert!(proof.operations >= calls.len() * 4 * peers, "{title}");
            assert!(proof.operations <= calls.len() * 4 * peers + events, "{title}");
            assert!(ranks == 1 || releases == calls.len() || proof.pairs > 20 * peers as u64, "{title}");
        }
    }
}

/// Ranks by node.
const SHAPES: [&[u32]; 5] = [&[0, 1], &[0, 0, 1], &[0, 0, 1, 1], &[0, 1, 0, 2, 1], &[0, 0, 0, 1, 1, 1, 1, 1]];
const WAYS: [RowPath; 2] = [RowPath::GpuDirect, RowPath::HostStaged];

fn unroll_across(
    labels: &[u32],
    way: RowPath,
    streams: Streams,
    calls: &[StreamCall],
    seeded: Option<StreamBug>,
) -> UnrolledProgram {
    let (nodes, slots) = (NodeMap::from_labels(labels), slots(labels.len() as u32));
    UnrolledProgram::of_streams(&StreamScenario {
        slots,
        streams,
        across: Some((&nodes, way)),
        calls,
        refuses: None,
        seeded,
        planted: None,
    })
    .unwrap()
}

/// Every shape, way, and choice of streams.
fn across() -> impl Iterator<Item = (&'static [u32], RowPath, Streams)> {
    let shapes = SHAPES.into_iter().flat_map(|shape| WAYS.map(|way| (shape, way)));
    shapes.flat_map(|(shape, way)| Streams::ALL.map(|streams| (shape, way, streams)))
}

#[test]
fn every_replay_across_nodes_is_proved_direct_and_host_staged() {
    for (labels, way, streams) in across() {
        for (name, calls) in replays() {
            let unrolled = unroll_across(labels, way, streams, &calls, None);
            let title = format!("{labels:?}, {way:?}, {streams:?}, {name}");
            let proof = prove(&unrolled).unwrap_or_else(|fault| panic!("{title}: {fault}"));
            println!("{title:>64}: {:>7} operations, {:>9} pairs", proof.operations, proof.pairs);
            let near = prove(&unroll(labels.len() as u32, streams, &calls, None)).unwrap();
            // Each rank sets, sees and resets a request flag in each call. On the host-staged path
            // each peer adds a put in, a put out, an awaited word and a raised one, and no words of
            // nets are bytes.
            let ranks = labels.len();
            let far = labels.iter().map(|a| labels.iter().filter(|b| a != *b).count()).sum::<usize>();
            let per_call = 3 * ranks + if way == RowPath::HostStaged { 4 * far } else { 0 };
            assert_eq!(proof.operations, near.operations + calls.len() * per_call, "{title}");
            assert!(proof.pairs > near.pairs, "{title}");
        }
    }
}

#[test]
fn replays_across_nodes_run_at_random() {
    for (labels, way, streams) in across().filter(|(labels, ..)| labels.len() <= 4) {
        for (name, calls) in replays() {
            let unrolled = unroll_across(labels, way, streams, &calls, None);
            check(&unrolled, 0..3)
                .unwrap_or_else(|fault| panic!("{labels:?}, {way:?}, {streams:?}, {name}: {fault}"));
        }
    }
}

#[test]
fn every_slip_of_a_caller_across_nodes_is_found() {
    for (labels, way, streams) in across().filter(|(labels, ..)| labels.len() <= 5) {
        for seeded in StreamBug::ALL {
            let seen = prove(&unroll_across(labels, way, streams, &calls_for(seeded), Some(seeded)));
            // A NIC reads rows packed on a second stream, too, as do copies of a stream aside.
            let packed_ahead = seeded == StreamBug::PackAhead && way == RowPath::GpuDirect;
            // Rows that come only through host staging are brought in behind all the rank's reads
            // until then.
            let alone = labels.iter().enumerate().all(|(at, node)| !labels[..at].contains(node));
            let in_turn = alone && way == RowPath::HostStaged;
            let read_late = in_turn && matches!(seeded, StreamBug::KeepSlots | StreamBug::SumLate);
            let found = applies(seeded, streams) && !read_late || packed_ahead;
            assert_eq!(seen.is_err(), found, "{labels:?} {way:?} {streams:?} {seeded:?}: {seen:?}");
        }
    }
}

#[test]
fn replays_run_at_random_on_words_that_are_really_set_back() {
    for ranks in 1..=4 {
        for (streams, (name, calls)) in Streams::ALL.into_iter().flat_map(|s| replays().map(move |c| (s, c)))
        {
            let unrolled = unroll(ranks, streams, &calls, None);
            check(&unrolled, 0..30)
                .unwrap_or_else(|fault| panic!("{ranks} ranks, {streams:?}, {name}: {fault}"));
        }
    }
}

/// Whether a caller can make this seeded at all.
fn applies(seeded: StreamBug, streams: Streams) -> bool {
    match seeded {
        StreamBug::PackAhead | StreamBug::NotReady | StreamBug::NotArrived => streams == Streams::Aside,
        _ => true,
    }
}

/// Calls in which it matters.
fn calls_for(seeded: StreamBug) -> Vec<StreamCall> {
    match seeded {
        StreamBug::Share => thrice(&[Dispatch(0), Dispatch(1), Combine(0), Combine(1)]),
        StreamBug::Unreleased => vec![Dispatch(0), Dispatch(0), Combine(0)],
        _ => thrice(&[Dispatch(0), Combine(0)]),
    }
}

#[test]
fn every_slip_of_a_caller_is_found() {
    for (ranks, streams) in [2, 3, 5, 8].into_iter().flat_map(|r| Streams::ALL.map(move |s| (r, s))) {
        for seeded in StreamBug::ALL {
            let seen = prove(&unroll(ranks, streams, &calls_for(seeded), Some(seeded)));
            assert_eq!(seen.is_err(), applies(seeded, streams), "{ranks} {streams:?} {seeded:?}: {seen:?}");
            if let (Err(fault), 3) = (seen, ranks) {
                println!("{streams:?} {seeded:?}: {fault}");
            }
        }
    }
}

#[test]
fn a_word_that_is_set_back_too_late_is_lost_in_some_random_run() {
    // The proof speaks of numbers, and words of 0 and 1 do the same: a signal that is overwritten
    // is awaited forever.
    let calls = calls_for(StreamBug::BackLate);
    let fault = check(&unroll(3, Streams::One, &calls, Some(StreamBug::BackLate)), 0..200).unwrap_err();
    assert!(matches!(fault, ProofFailure::Deadlock { seen: 0, .. }), "{fault}");
    // And one that still stands ends a wait too early.
    let calls = calls_for(StreamBug::NeverBack);
    let fault = check(&unroll(3, Streams::One, &calls, Some(StreamBug::NeverBack)), 0..200).unwrap_err();
    assert!(matches!(fault, ProofFailure::Differs { .. }), "{fault}");
}

/// One rank refuses: in one node, and between nodes in every way.
fn refused(
    labels: &[u32],
    way: Option<RowPath>,
    streams: Streams,
    calls: &[StreamCall],
    refuses: Refusals,
) -> UnrolledProgram {
    let nodes = NodeMap::from_labels(labels);
    UnrolledProgram::of_streams(&StreamScenario {
        slots: slots(labels.len() as u32),
        streams,
        across: way.map(|way| (&nodes, way)),
        calls,
        refuses: Some(refuses),
        seeded: None,
        planted: None,
    })
    .unwrap()
}

/// Groups in which a rank refuses.
fn refusing_groups() -> impl Iterator<Item = (&'static [u32], Option<RowPath>, Streams)> {
    let near = [(&[0, 0][..], None), (&[0; 4], None)];
    let far = SHAPES.into_iter().flat_map(|shape| WAYS.map(|way| (shape, Some(way))));
    let all = near.into_iter().chain(far);
    all.flat_map(|(labels, way)| Streams::ALL.map(|streams| (labels, way, streams)))
}

#[test]
fn refusals_in_every_replay_are_proved_by_one_rank_and_in_turn() {
    for (labels, way, streams) in refusing_groups() {
        for (name, calls) in replays() {
            for (refused_call, in_turn) in [
                (RefusedCall::Dispatch, false),
                (RefusedCall::Dispatch, true),
                (RefusedCall::Answer, false),
                (RefusedCall::Answer, true),
            ] {
                let refuses = Refusals { rank: 1, in_turn, refused: refused_call };
                let unrolled = refused(labels, way, streams, &calls, refuses);
                let title = format!("{labels:?}, {way:?}, {streams:?}, {name}, {refuses:?}");
                prove(&unrolled).unwrap_or_else(|fault| panic!("{title}: {fault}"));
                if labels.len() <= 4 {
                    check(&unrolled, 0..2).unwrap_or_else(|fault| panic!("{title}: {fault}"));
                }
            }
        }
    }
}

#[test]
fn a_refusal_among_combines_is_seen_by_all_and_its_bugs_are_found() {
    let each_end = refusing_groups().flat_map(|at| [(at, 0), (at, at.0.len() as u32 - 1)]);
    let both = [RefusedCall::Dispatch, RefusedCall::Answer];
    for (((labels, way, streams), refuses), refused_call) in
        each_end.flat_map(|at| both.map(|refused_call| (at, refused_call)))
    {
        let refusals = Refusals { rank: refuses, in_turn: false, refused: refused_call };
        let unrolled = refused(labels, way, streams, &thrice(&[Dispatch(0), Combine(0)]), refusals);
        let title = format!("{labels:?}, {way:?}, {streams:?}, {refusals:?}");
        prove(&unrolled).unwrap_or_else(|fault| panic!("{title}: {fault}"));
        if labels.len() > 3 {
            continue;
        }
        check(&unrolled, 0..3).unwrap_or_else(|fault| panic!("{title}: {fault}"));
        // The mark, its words, and what the rank itself awaits: none can be left out.
        // But behind what a refused dispatch leaves for the end, there is no call that could tell.
        let is_of_refusal = |mutation: &Mutation| {
            if refused_call == RefusedCall::Dispatch
                && mutation.stage == "refusal"
                && mutation.kind == CallKind::Combine
            {
                return false;
            }
            let by_proxy = mutation.rank == refuses && mutation.stage == "out";
            let puts = matches!(mutation.item.op, Op::Put { .. });
            let of_stage = mutation.stage == "refusal" && (!puts || mutation.moves(&unrolled));
            mutation.change == Change::Drop && (of_stage || by_proxy && puts)
        };
        let dropped: Vec<_> = mutations(&unrolled).into_iter().filter(is_of_refusal).collect();
        assert!(dropped.len() >= 4, "{title}: {}", dropped.len());
        for mutation in dropped {
            assert!(prove(&mutation.plant(&unrolled)).is_err(), "{title}: {mutation:?}");
        }
    }
}

#[test]
fn unanswered_dispatch_and_return_without_dispatch_are_refused() {
    for calls in
        [&[Dispatch(0), Dispatch(0)][..], &[Dispatch(1), Combine(0)], &[Dispatch(0), Combine(0), Release(0)]]
    {
        let scenario = StreamScenario {
            slots: slots(2),
            streams: Streams::One,
            across: None,
            calls,
            refuses: None,
            seeded: None,
            planted: None,
        };
        let refused = UnrolledProgram::of_streams(&scenario).unwrap_err();
        let seen = calls.len() as u64 - 1;
        assert!(
            matches!(refused, PlanError::BadParameter { parameter: "call", seen: s, .. } if s == seen),
            "{refused}"
        );
    }
}

/// Every order of the calls of these microbatches in which each has its combine behind its
/// dispatch.
fn orders(microbatches: u32) -> Vec<Vec<StreamCall>> {
    let mut all = vec![Vec::new()];
    for of in 0..microbatches {
        let mut longer = Vec::new();
        for order in &all {
            for dispatch in 0..=order.len() {
                for combine in dispatch..=order.len() {
                    let mut order = order.clone();
                    order.insert(combine, Combine(of));
                    order.insert(dispatch, Dispatch(of));
                    longer.push(order);
                }
            }
        }
        all = longer;
    }
    all
}

/// Calls of an order that stand in each of so many queues.
fn queued(order: &[StreamCall], queues: u32) -> Vec<Vec<StreamCall>> {
    let on = |queue| order.iter().copied().filter(|call| call.microbatch() % queues == queue).collect();
    (0..queues).map(on).collect()
}

/// Runs every choice of an order per rank; returns how many ended.
fn every_choice(ranks: u32, microbatches: u32, queues: u32) -> (usize, usize) {
    let orders = orders(microbatches);
    let (all, mut ended) = (orders.len().pow(ranks), 0);
    for choice in 0..all {
        let nth = |rank: u32| choice / orders.len().pow(rank) % orders.len();
        let chosen: Vec<Vec<StreamCall>> = (0..ranks).map(|rank| orders[nth(rank)].clone()).collect();
        let alike = chosen.iter().all(|order| queued(order, queues) == queued(&chosen[0], queues));
        let seen = ends(&UnrolledProgram::of_queues(slots(ranks), &chosen).unwrap(), queues);
        assert_eq!(seen.is_ok(), alike, "{queues} queues, {chosen:?}: {seen:?}");
        ended += usize::from(alike);
    }
    (all, ended)
}

#[test]
fn ranks_end_exactly_if_each_queue_has_one_order_of_calls() {
    for (ranks, microbatches, queues) in
        [(2, 2, 1), (2, 2, 2), (3, 2, 1), (3, 2, 2), (2, 3, 1), (2, 3, 2), (2, 3, 3)]
    {
        let (all, ended) = every_choice(ranks, microbatches, queues);
        println!(
            "{ranks} ranks, {microbatches} microbatches, {queues} queues: {ended} of {all} choices of orders end"
        );
        assert!(ended > 0 && (ended < all || queues == microbatches));
    }
}

#[test]
fn two_dispatches_in_opposite_orders_deadlock_on_one_queue() {
    let orders = [[Dispatch(0), Dispatch(1)].to_vec(), [Dispatch(1), Dispatch(0)].to_vec()];
    let unrolled = UnrolledProgram::of_queues(slots(2), &orders).unwrap();
    let fault = ends(&unrolled, 1).unwrap_err();
    assert!(matches!(fault, ProofFailure::Deadlock { queues: 1, seen: 0, .. }), "{fault}");
    println!("{fault}");
    ends(&unrolled, 2).unwrap();
}

#[test]
fn one_order_ends_on_any_number_of_queues() {
    for ranks in (1..=8).chain([16, 64]) {
        for queues in (1..=8).chain([16, 64]) {
            for (name, calls) in replays() {
                let all = vec![calls; ranks as usize];
                let unrolled = UnrolledProgram::of_queues(slots(ranks), &all).unwrap();
                ends(&unrolled, queues).unwrap_or_else(|fault| panic!("{ranks} ranks, {name}: {fault}"));
            }
        }
    }
}

/// Of every wait: the queues of one rank need not be those of another.
#[test]
fn one_order_ends_whichever_streams_share_a_queue_at_each_rank() {
    for queues in 1..=3 {
        let mut unrolled =
            UnrolledProgram::of_queues(slots(5), &vec![replays().last().unwrap().1; 5]).unwrap();
        for part in unrolled.parts_mut() {
            let rank = part.rank;
            part.scenes[0]
                .steps
                .iter_mut()
                .for_each(|step| step.track = (step.track + rank) * (rank + 1) % 3);
        }
        ends(&unrolled, queues).unwrap();
    }
}
