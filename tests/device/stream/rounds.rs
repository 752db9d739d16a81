//! Many rounds that are enqueued without waiting for any of them: licences and words set back have to hold by themselves.

use sidelane::device::{Priority, Stream, Version};
use sidelane::exec::Enqueued;
use stand_in_cuda::StandIn;

use super::rank::{Case, Rank, content, copied_back, on_ranks, options};
use super::{on_each, on_stand_in};

/// So many rounds under way at once, with tensors of their own.
const UNDER_WAY: usize = 20;

fn many_rounds(test: &str, queues: &str, case: Case, number: u64) {
    let run = |seed| [("SIDELANE_STAND_IN_SEED", seed), ("CUDA_DEVICE_MAX_CONNECTIONS", queues)];
    let runs = ["0", "1", "2"].map(run);
    on_each(test, &runs.each_ref().map(|run| &run[..]), || {
        on_ranks(case.ranks, &options(), |world| Rank::new(case, world).rounds(0..number, UNDER_WAY));
    });
}

#[test]
fn rounds_hold_on_one_hardware_queue() {
    let case = Case { ranks: 4, experts: 8, top_k: 2, hidden: 16, max_tokens: 3 };
    many_rounds("stream::rounds::rounds_hold_on_one_hardware_queue", "1", case, 100);
}

#[test]
fn rounds_hold_on_eight_hardware_queues() {
    let case = Case { ranks: 3, experts: 5, top_k: 3, hidden: 24, max_tokens: 4 };
    many_rounds("stream::rounds::rounds_hold_on_eight_hardware_queues", "8", case, 100);
}

#[test]
fn two_exchanges_take_turns_in_any_order_that_is_the_same_everywhere() {
    let test = "stream::rounds::two_exchanges_take_turns_in_any_order_that_is_the_same_everywhere";
    let case = Case { ranks: 3, experts: 6, top_k: 2, hidden: 8, max_tokens: 3 };
    let runs = ["1", "2"].map(|queues| [("CUDA_DEVICE_MAX_CONNECTIONS", queues)]);
    on_each(test, &runs.each_ref().map(|run| &run[..]), || {
        on_ranks(case.ranks, &options(), |world| {
            let mut rank = Rank::new(case, world);
            let mut other = case.builder(&rank.group, &rank.context).build().unwrap();
            for round in 0..20 {
                let inputs = [round, round + 1000].map(|round| case.input(round, rank.me()));
                let [a, b] = [&inputs[0], &inputs[1]].map(|input| rank.tensors(input));
                rank.exchange.dispatch(&rank.stream, &a.tokens()).unwrap();
                rank.experts_copy();
                std::mem::swap(&mut rank.exchange, &mut other);
                rank.exchange.start_dispatch(&rank.stream, &b.tokens()).unwrap();
                if round % 2 == 0 {
                    other.combine(&rank.stream, a.out()).unwrap();
                }
                rank.exchange.finish_dispatch(&rank.stream).unwrap();
                rank.experts_copy();
                rank.exchange.combine(&rank.stream, b.out()).unwrap();
                if round % 2 == 1 {
                    other.combine(&rank.stream, a.out()).unwrap();
                }
                rank.exchange.synchronize(&rank.stream).unwrap();
                for (input, tensors) in inputs.iter().zip([&a, &b]) {
                    let expected = copied_back(case, input);
                    assert_eq!(content(&tensors.out)[..expected.len()], expected);
                }
            }
        });
    });
}

#[test]
fn batch_within_one_device_needs_sms_before_cuda_13_1() {
    let case = Case { ranks: 2, experts: 4, top_k: 2, hidden: 16, max_tokens: 3 };
    let drivers = ["12080", "13000", "13010"].map(|version| [("SIDELANE_STAND_IN_DRIVER", version)]);
    let test = "stream::rounds::batch_within_one_device_needs_sms_before_cuda_13_1";
    on_each(test, &[&drivers[0], &drivers[1], &drivers[2]], || {
        on_ranks(case.ranks, &options(), |world| {
            let mut rank = Rank::on_device(case, world, 0);
            let by_sms = u64::from(rank.context.driver().version() < Version(13010));
            assert_eq!(rank.exchange.report().same_device, 1);
            let me = rank.me();
            rank.group.gather(&[]).unwrap();
            let tensors = rank.tensors(&case.input(1, me));
            rank.exchange.dispatch(&rank.stream, &tensors.tokens()).unwrap();
            rank.exchange.synchronize(&rank.stream).unwrap();
            let Enqueued { batches, copies, copies_by_sms, .. } = rank.exchange.report().dispatch;
            assert_eq!((batches, copies, copies_by_sms), (1, 1, by_sms));
            rank.group.gather(&[]).unwrap();
            let seen = StandIn::loaded().unwrap().counters().copies_by_sms;
            assert_eq!(seen, u64::from(case.ranks) * by_sms, "reports of all ranks");
            rank.group.gather(&[]).unwrap();
        });
    });
}

#[test]
fn legacy_default_stream_takes_single_copies_and_reports_them() {
    let case = Case { ranks: 2, experts: 4, top_k: 2, hidden: 16, max_tokens: 3 };
    on_stand_in("stream::rounds::legacy_default_stream_takes_single_copies_and_reports_them", || {
        on_ranks(case.ranks, &options(), |world| {
            let mut rank = Rank::new(case, world);
            // Both names that it has: null, and CU_STREAM_LEGACY.
            for handle in [0, 1] {
                let handle = std::ptr::without_provenance_mut(handle);
                // SAFETY: the legacy default stream is there as long as its context.
                rank.stream = unsafe { Stream::borrow(&rank.context, handle) }.unwrap();
                rank.rounds(1..4, 2);
                let report = rank.exchange.report();
                for done in [report.dispatch, report.combine] {
                    assert_eq!((done.batches, done.single_copies, done.copies_by_sms), (0, 1, 0));
                }
            }
            // A stream of its own takes batches again.
            rank.stream = Stream::new(&rank.context, Priority::Usual).unwrap();
            rank.rounds(4..6, 1);
            let report = rank.exchange.report();
            assert_eq!((report.dispatch.batches, report.dispatch.single_copies), (1, 0));
            rank.group.gather(&[]).unwrap();
        });
    });
}
