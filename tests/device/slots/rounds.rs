//! Many rounds that are enqueued without waiting for any of them: releases and words set back have
//! to hold by themselves.

use std::sync::{Arc, Mutex};

use fake_cuda::FakeDriver;
use sidelane::device::{Priority, Stream, Version};
use sidelane::ep::{ExpertParallelBuilder, Tensor};
use sidelane::error::PlanError;
use sidelane::exec::EnqueueCounts;
use sidelane::overlap::{CudaExecutor, Graph, NodeLabel, StreamId as Name, StreamPool};
use sidelane::{Dtype, Error, World};

use super::rank::{
    Case, Rank, call, combine, content, copied_back, dispatch, experts_copy, on_nodes, on_ranks, options,
};
use super::{on_each, on_fake_driver};
use crate::enqueued::blocks::with_each_limit;
use crate::support::cases;

/// So many rounds under way at once, with tensors of their own.
const UNDER_WAY: usize = 20;

fn many_rounds(test: &str, queues: &str, case: Case, number: u64) {
    let run = |seed| [("SIDELANE_FAKE_CUDA_SEED", seed), ("CUDA_DEVICE_MAX_CONNECTIONS", queues)];
    let runs = ["0", "1", "2"].map(run);
    on_each(test, &runs.each_ref().map(|run| &run[..]), || {
        on_ranks(case.ranks, &options(), |world| _ = Rank::new(case, world).rounds(0..number, UNDER_WAY));
    });
}

#[test]
fn rounds_hold_on_one_hardware_queue() {
    let case = Case { ranks: 4, experts: 8, top_k: 2, hidden: 16, max_tokens: 3 };
    many_rounds("slots::rounds::rounds_hold_on_one_hardware_queue", "1", case, 100);
}

#[test]
fn rounds_hold_on_eight_hardware_queues() {
    let case = Case { ranks: 3, experts: 5, top_k: 3, hidden: 24, max_tokens: 4 };
    many_rounds("slots::rounds::rounds_hold_on_eight_hardware_queues", "8", case, 100);
}

#[test]
fn two_instances_take_turns_in_any_common_order() {
    let test = "slots::rounds::two_instances_take_turns_in_any_common_order";
    let case = Case { ranks: 3, experts: 6, top_k: 2, hidden: 8, max_tokens: 3 };
    let runs = ["1", "2"].map(|queues| [("CUDA_DEVICE_MAX_CONNECTIONS", queues)]);
    on_each(test, &runs.each_ref().map(|run| &run[..]), || {
        on_ranks(case.ranks, &options(), |world| {
            let mut rank = Rank::new(case, world);
            let mut other = case.builder(&rank.group).on(&rank.stream).build().unwrap();
            for round in 0..20 {
                let inputs = [round, round + 1000].map(|round| case.input(round, rank.me()));
                let [a, b] = [&inputs[0], &inputs[1]].map(|input| rank.tensors(input));
                let (rows, first) = dispatch(&mut rank.ep, &a).unwrap();
                experts_copy(&rank.stream, &rows, &first).unwrap();
                let ranges = b.ranges();
                let (x, choices) = call(&ranges);
                let started = other.start_dispatch(x, choices).unwrap();
                if round % 2 == 0 {
                    combine(&mut rank.ep, &first, &a).unwrap();
                }
                let (rows, second) = started.finish().unwrap();
                experts_copy(&rank.stream, &rows, &second).unwrap();
                combine(&mut other, &second, &b).unwrap();
                if round % 2 == 1 {
                    combine(&mut rank.ep, &first, &a).unwrap();
                }
                // Both are on one stream.
                rank.ep.synchronize().unwrap();
                for (input, tensors) in inputs.iter().zip([&a, &b]) {
                    let expected = copied_back(case, input);
                    assert_eq!(content(&tensors.out)[..expected.len()], expected);
                }
            }
        });
    });
}

#[test]
fn refusals_keep_the_common_order_of_two_instances_on_one_stream() {
    let test = "slots::rounds::refusals_keep_the_common_order_of_two_instances_on_one_stream";
    let runs = ["1", "2"].map(|queues| [("CUDA_DEVICE_MAX_CONNECTIONS", queues)]);
    on_each(test, &runs.each_ref().map(|run| &run[..]), || {
        for nodes in [[0, 0, 0], [0, 0, 1]] {
            on_nodes(&nodes, &options(), refusals_of_two_instances);
        }
    });
}

/// A rank refuses a dispatch in each round, another one each time, while an instance of all ranks
/// makes a whole layer before the others combine.
fn refusals_of_two_instances(world: World) {
    let case = Case { ranks: 3, experts: 6, top_k: 2, hidden: 8, max_tokens: 3 };
    let mut rank = Rank::new(case, world);
    let mut other = case.builder(&rank.group).on(&rank.stream).build().unwrap();
    for round in 0..12 {
        let inputs = [round, round + 1000].map(|round| case.input(round, rank.me()));
        let [a, b] = [&inputs[0], &inputs[1]].map(|input| rank.tensors(input));
        let refuses = round as u32 / 2 % 3 == rank.me();
        let ranges = a.ranges();
        let (x, choices) = call(&ranges);
        let first = if refuses {
            let refused = rank.ep.dispatch(Tensor::device(&ranges[0], Dtype::F16), choices).map(drop);
            assert!(matches!(refused, Err(Error::Plan(PlanError::WrongDtype { .. }))), "{refused:?}");
            None
        } else {
            Some(rank.ep.dispatch(x, choices).unwrap().1)
        };
        // The stream of each rank comes so far before any rank answers.
        assert!(rank.ep.synchronize().is_err());
        rank.group.gather(&[]).unwrap();
        let (rows, second) = dispatch(&mut other, &b).unwrap();
        experts_copy(&rank.stream, &rows, &second).unwrap();
        combine(&mut other, &second, &b).unwrap();
        other.synchronize().unwrap();
        let expected = copied_back(case, &inputs[1]);
        assert_eq!(content(&b.out)[..expected.len()], expected);
        rank.group.gather(&[]).unwrap();
        match first {
            Some(first) if round % 3 == 0 => rank.ep.release(Some(&first)).unwrap(),
            Some(first) => combine(&mut rank.ep, &first, &a).unwrap(),
            None if round % 3 == 1 => rank.ep.release(None).unwrap(),
            None => {}
        }
        if round % 2 == 1 {
            rank.layer(&a).unwrap();
            rank.ep.synchronize().unwrap();
            let expected = copied_back(case, &inputs[0]);
            assert_eq!(content(&a.out)[..expected.len()], expected);
        }
    }
}

#[test]
fn batch_within_one_device_needs_sms_before_cuda_13_1() {
    let case = Case { ranks: 2, experts: 4, top_k: 2, hidden: 16, max_tokens: 3 };
    let drivers = ["12080", "13000", "13010"].map(|version| [("SIDELANE_FAKE_CUDA_DRIVER", version)]);
    let test = "slots::rounds::batch_within_one_device_needs_sms_before_cuda_13_1";
    on_each(test, &[&drivers[0], &drivers[1], &drivers[2]], || {
        on_ranks(case.ranks, &options(), |world| {
            let mut rank = Rank::on_device(case, world, 0);
            let by_sms = u64::from(rank.context.driver().version() < Version(13010));
            let me = rank.me();
            rank.group.gather(&[]).unwrap();
            let tensors = rank.tensors(&case.input(1, me));
            let (_, handle) = dispatch(&mut rank.ep, &tensors).unwrap();
            rank.ep.synchronize().unwrap();
            let report = handle.report().unwrap();
            assert_eq!(report.same_device, 1);
            let EnqueueCounts { batches, copies, copies_by_sms, .. } = report.enqueued;
            assert_eq!((batches, copies, copies_by_sms), (1, 1, by_sms));
            rank.group.gather(&[]).unwrap();
            let seen = FakeDriver::loaded().unwrap().counters().copies_by_sms;
            assert_eq!(seen, u64::from(case.ranks) * by_sms, "reports of all ranks");
            rank.group.gather(&[]).unwrap();
        });
    });
}

#[test]
fn limit_on_blocks_changes_no_bit_and_stands_in_reports() {
    let case = Case { ranks: 4, experts: 6, top_k: 3, hidden: 24, max_tokens: 40 };
    on_fake_driver("slots::rounds::limit_on_blocks_changes_no_bit_and_stands_in_reports", || {
        with_each_limit(|max_blocks| {
            on_ranks(case.ranks, &options(), |world| {
                let mut rank = Rank::new(case, world);
                let builder = case.builder(&rank.group).on(&rank.stream);
                let builder = max_blocks.into_iter().fold(builder, ExpertParallelBuilder::max_blocks);
                rank.ep = builder.build().unwrap();
                for report in rank.rounds(1..5, 2) {
                    assert_eq!(report.max_blocks, max_blocks);
                }
            });
        });
    });
}

#[test]
fn legacy_default_stream_takes_single_copies_and_reports_them() {
    let case = Case { ranks: 2, experts: 4, top_k: 2, hidden: 16, max_tokens: 3 };
    on_fake_driver("slots::rounds::legacy_default_stream_takes_single_copies_and_reports_them", || {
        on_ranks(case.ranks, &options(), |world| {
            let mut rank = Rank::new(case, world);
            // Both names that it has: null, and CU_STREAM_LEGACY.
            for handle in [0, 1] {
                let handle = std::ptr::without_provenance_mut(handle);
                // SAFETY: the legacy default stream is there as long as its context.
                rank.stream = Arc::new(unsafe { Stream::borrow(&rank.context, handle) }.unwrap());
                rank.ep.set_stream(&rank.stream).unwrap();
                for done in rank.rounds(1..4, 2).map(|report| report.enqueued) {
                    assert_eq!((done.batches, done.single_copies, done.copies_by_sms), (0, 1, 0));
                }
            }
            // A stream of its own takes batches again.
            rank.stream = Arc::new(Stream::new(&rank.context, Priority::Normal).unwrap());
            rank.ep.set_stream(&rank.stream).unwrap();
            let [sent, _] = rank.rounds(4..6, 1).map(|report| report.enqueued);
            assert_eq!((sent.batches, sent.single_copies), (1, 0));
            rank.group.gather(&[]).unwrap();
        });
    });
}

#[test]
fn calls_are_nodes_of_a_graph_on_several_streams() {
    let case = Case { ranks: 3, experts: 6, top_k: 2, hidden: 16, max_tokens: 4 };
    on_fake_driver("slots::rounds::calls_are_nodes_of_a_graph_on_several_streams", || {
        on_ranks(case.ranks, &options(), |world| {
            let mut rank = Rank::new(case, world);
            let pool = StreamPool::new(&rank.context, 1, 1, Priority::Highest).unwrap();
            let caller = Arc::clone(&rank.stream);
            for round in 0..6 {
                let input = case.input(round, rank.me());
                let tensors = rank.tensors(&input);
                let call = Mutex::new((&mut rank.ep, None));
                let work = |name| NodeLabel::new(name, 0);
                let mut graph = Graph::new();
                let sent = graph.add(Name::Transfer(0), work("dispatch"), &[], |stream: &Arc<Stream>| {
                    let (ep, landed) = &mut *call.lock().unwrap();
                    ep.set_stream(stream)?;
                    *landed = Some(dispatch(ep, &tensors)?);
                    Ok(())
                });
                let made = graph.add(Name::Compute(0), work("experts"), &[sent], |stream| {
                    let (_, landed) = &*call.lock().unwrap();
                    let (rows, handle) = landed.as_ref().unwrap();
                    experts_copy(stream, rows, handle)
                });
                graph.add(Name::Transfer(0), work("combine"), &[made], |stream| {
                    let (ep, landed) = &mut *call.lock().unwrap();
                    ep.set_stream(stream)?;
                    combine(ep, &landed.as_ref().unwrap().1, &tensors)
                });
                graph.run(&CudaExecutor::new(&pool, &caller)).unwrap();
                rank.ep.set_stream(&caller).unwrap();
                rank.ep.synchronize().unwrap();
                let expected = copied_back(case, &input);
                assert_eq!(content(&tensors.out)[..expected.len()], expected, "round {round}");
            }
        });
    });
}

/// Rounds that a rank makes on two streams in turn, each once it has seen that the other is done.
fn rounds_on_two_streams(mut rank: Rank, number: u64) {
    let mut next = Arc::new(Stream::new(&rank.context, Priority::Normal).unwrap());
    for round in 0..number {
        let input = rank.case.input(round, rank.me());
        let tensors = rank.tensors(&input);
        rank.layer(&tensors).unwrap();
        while !rank.stream.is_done().unwrap() {
            std::thread::yield_now();
        }
        let expected = copied_back(rank.case, &input);
        assert_eq!(content(&tensors.out)[..expected.len()], expected, "round {round}");
        std::mem::swap(&mut rank.stream, &mut next);
        rank.ep.set_stream(&rank.stream).unwrap();
    }
    rank.ep.synchronize().unwrap();
    rank.group.gather(&[]).unwrap();
}

#[test]
fn calls_go_on_with_another_stream_once_the_one_before_is_done() {
    let case = Case { ranks: 3, experts: 6, top_k: 2, hidden: 16, max_tokens: 4 };
    let test = "slots::rounds::calls_go_on_with_another_stream_once_the_one_before_is_done";
    let runs = ["1", "2", "8"].map(|queues| [("CUDA_DEVICE_MAX_CONNECTIONS", queues)]);
    on_each(test, &runs.each_ref().map(|run| &run[..]), || {
        // Rounds are alike: a hundred by default.
        for rounds in cases([100, 250], 0) {
            for nodes in [[0, 0, 0], [0, 1, 1]] {
                on_nodes(&nodes, &options(), |world| rounds_on_two_streams(Rank::new(case, world), rounds));
            }
        }
    });
}
