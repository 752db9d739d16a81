//! Calls that go well.

use std::sync::mpsc;

use fake_cuda::FakeDriver;
use half::{bf16, f16};
use sidelane::device::Stream;
use sidelane::ep::{ExpertRows, Handle};
use sidelane::exec::EnqueueCounts;
use sidelane::gate::Routing;
use sidelane::plan::{ExpertMap, Overflow, ReceiveMode};
use sidelane::topology::Route;
use sidelane::{Element, World};

use super::disturbed::disturbed;
use super::rank::{Case, Input, Rank, call, target};
use super::{on_devices, on_drivers, on_settings, seeds};
use crate::devices::stream;
use crate::support::{To, on_ranks, small, tokens};

/// Runs something on each rank of a world, on a device of its own.
pub fn on_each(case: &Case, body: impl Fn(&mut Rank<bf16>, u64) + Sync) {
    on_each_of::<bf16>(case, body);
}

pub fn on_each_of<E: Element + Into<f32>>(case: &Case, body: impl Fn(&mut Rank<E>, u64) + Sync)
where
    f32: To<E>,
{
    // The host's rows and outputs, where they are longer than those of most tests.
    let rows = case.nodes.len() * case.max_tokens as usize * case.top_k as usize;
    let mut options = small();
    options.config.heap += (rows * case.hidden * size_of::<E>()) as u64;
    let ranks = || {
        on_ranks(&case.nodes, &options, |world: World| {
            let group = world.all().unwrap();
            body(&mut Rank::new(&group, case), group.rank().into());
        });
    };
    caused(ranks);
}

/// Runs something, and sees that no stream of a caller that enqueues was given a wait whose cause
/// was not enqueued yet: whatever calls of the driver wait for, it needs no other call.
fn caused(body: impl FnOnce()) {
    // The driver stays until it has been asked.
    let _driver = stream(0);
    let without = || FakeDriver::loaded().unwrap().counters().waits_without_cause;
    let before = without();
    body();
    assert_eq!(without() - before, 0, "waits without a cause");
}

/// A number of tokens for each seed, among them none.
pub fn some(case: &Case, seed: u64) -> u32 {
    (seed.wrapping_mul(0x9e37_79b9) >> 7) as u32 % (case.max_tokens + 1)
}

/// Rounds of random tokens, each rank with a number of its own.
pub fn rounds(case: &Case, rounds: u64, seed: u64) {
    on_each(case, |rank, me| {
        for seed in (seed * 1000..).take(rounds as usize).map(|round| round * 64 + me) {
            let count = some(case, seed);
            rank.round(&tokens(seed, count, case.hidden, case.top_k, case.map.experts()));
        }
    });
}

#[test]
fn one_rank_sees_what_the_host_sees() {
    on_devices("enqueued::calls::one_rank_sees_what_the_host_sees", 8, 1, || {
        rounds(&Case::new(1, 3, 2), 5, 1)
    });
}

#[test]
fn four_ranks_see_what_the_host_sees() {
    on_devices("enqueued::calls::four_ranks_see_what_the_host_sees", 8, 2, || {
        let replicated = ExpertMap::from_slots(5, &[vec![4, 0], vec![1], vec![2, 4, 3], vec![0]]).unwrap();
        for case in [
            Case::new(4, 6, 3),
            Case { align: 16, ..Case::new(4, 6, 3) },
            Case { map: replicated, ..Case::new(4, 6, 3) },
        ] {
            rounds(&case, 4, 2);
        }
    });
}

#[test]
fn other_types_are_summed_like_on_the_host() {
    on_devices("enqueued::calls::other_types_are_summed_like_on_the_host", 8, 3, || {
        let case = Case::new(2, 5, 4);
        on_each_of::<f32>(&case, |rank, me| rank.round(&tokens(me, 9, 16, 4, 5)));
        on_each_of::<f16>(&case, |rank, me| rank.round(&tokens(me, 9, 16, 4, 5)));
    });
}

#[test]
fn two_ranks_go_on_for_hundreds_of_rounds_on_two_queues() {
    on_devices("enqueued::calls::two_ranks_go_on_for_hundreds_of_rounds_on_two_queues", 2, 4, || {
        rounds(&Case { hidden: 8, max_tokens: 6, ..Case::new(2, 3, 2) }, 300, 4);
    });
}

#[test]
fn one_hardware_queue_is_enough_for_exact_sizes() {
    on_devices("enqueued::calls::one_hardware_queue_is_enough_for_exact_sizes", 1, 4, || {
        let small = |nodes: &[u32], route| {
            let case = Case::across(nodes, 3, 2);
            Case { hidden: 8, max_tokens: 6, route, ..case }
        };
        rounds(&small(&[0; 3], Route::Direct), 100, 4);
        rounds(&small(&[0, 0, 1], Route::Pxn), 50, 5);
        // All ranks share one device, and so one queue.
        let case = small(&[0; 3], Route::Direct);
        caused(|| {
            on_ranks(&case.nodes, &crate::support::small(), |world: World| {
                let group = world.all().unwrap();
                let mut rank = Rank::<bf16>::on_stream(&group, &case, stream(0), |builder| builder);
                for round in 0..50 {
                    let seed = 64 * round + u64::from(group.rank());
                    rank.round(&tokens(seed, some(&case, seed), case.hidden, case.top_k, 3));
                }
            });
        });
    });
}

#[test]
fn exact_sizes_go_on_while_other_threads_free_load_and_launch() {
    let locks = ("SIDELANE_FAKE_CUDA_LOCKS", "1");
    let full = ("SIDELANE_FAKE_CUDA_LAUNCH_QUEUE", "24");
    let lazy = ("CUDA_MODULE_LOADING", "LAZY");
    let copies = ("SIDELANE_FAKE_CUDA_COPY_QUEUES", "1");
    for (queues, settings) in
        [(1, [locks, full, lazy]), (8, [locks, full, lazy]), (32, [locks, copies, lazy])]
    {
        on_settings(
            "enqueued::calls::exact_sizes_go_on_while_other_threads_free_load_and_launch",
            &[&settings],
            (queues, 12),
            &|| {
                let case = Case { hidden: 8, max_tokens: 6, ..Case::new(3, 4, 2) };
                disturbed([0, 1], || rounds(&case, 40, 6));
            },
        );
    }
}

#[test]
fn eight_ranks_go_on_for_many_rounds() {
    on_devices("enqueued::calls::eight_ranks_go_on_for_many_rounds", 8, 5, || {
        rounds(&Case { hidden: 8, max_tokens: 6, align: 4, ..Case::new(8, 8, 3) }, 25, 5);
    });
}

#[test]
fn no_seed_of_the_driver_is_seen() {
    for seed in seeds(12) {
        on_devices("enqueued::calls::no_seed_of_the_driver_is_seen", 3 + seed as u32 % 3, seed, || {
            let seed = std::env::var("SIDELANE_FAKE_CUDA_SEED").unwrap().parse().unwrap();
            rounds(&Case { align: 2, ..Case::new(3, 4, 2) }, 8, seed);
        });
    }
}

#[test]
fn beyond_a_budget_the_same_rows_are_dropped_as_on_the_host() {
    on_devices("enqueued::calls::beyond_a_budget_the_same_rows_are_dropped_as_on_the_host", 8, 6, || {
        for (rows, align) in [(7, 1), (24, 8), (0, 1)] {
            let mode = ReceiveMode::Budget { rows, overflow: Overflow::Drop };
            rounds(&Case { mode, align, ..Case::new(3, 5, 3) }, 6, rows.into());
        }
    });
}

#[test]
fn dispatches_are_alive_side_by_side() {
    on_devices("enqueued::calls::dispatches_are_alive_side_by_side", 8, 7, || {
        for mode in [ReceiveMode::Exact, ReceiveMode::Budget { rows: 200, overflow: Overflow::Error }] {
            let case = Case { max_in_flight: 3, mode, ..Case::new(3, 5, 3) };
            on_each(&case, |rank, me| {
                for round in 0..5 {
                    let input = |nth: u64| {
                        tokens(100 * round + 10 * nth + me, some(&case, round + nth + me), 16, 3, 5)
                    };
                    rank.all_in_flight(&[input(0), input(1), input(2)]);
                }
            });
        }
    });
}

/// Results go by the hand of another thread while their instance takes contexts for later calls.
#[test]
fn another_thread_may_drop_results() {
    on_devices("enqueued::calls::another_thread_may_drop_results", 8, 17, || {
        let case = Case { max_in_flight: 3, ..Case::new(3, 5, 3) };
        on_each(&case, |rank, me| {
            let ((give, given), (tell, told)) = (mpsc::channel(), mpsc::channel());
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    for result in given {
                        drop::<(ExpertRows, Handle)>(result);
                        tell.send(()).unwrap();
                    }
                });
                for round in 0..40 {
                    // Two results are on their way at most, and the third context is free.
                    if round > 2 {
                        told.recv().unwrap();
                    }
                    let input = tokens(64 * round + me, some(&case, round + me), 16, 3, 5);
                    let routing = Routing::new(3, &input.ids[..], &input.weights[..]).unwrap();
                    let (rows, handle) = rank.host.dispatch(&input.x, &routing).unwrap();
                    let expected: Vec<u8> = rows.to_vec().unwrap();
                    drop((rows, handle));
                    let (rows, handle) = rank.dispatch(&input).unwrap();
                    assert_eq!(rank.seen::<u8>(&rows.range().unwrap()), expected, "round {round}");
                    give.send((rows, handle)).unwrap();
                }
                drop(give);
            });
        });
    });
}

#[test]
fn host_runs_ahead_of_a_stream_that_waits() {
    on_devices("enqueued::calls::host_runs_ahead_of_a_stream_that_waits", 8, 13, || {
        let case = Case::new(3, 5, 3);
        on_ranks(&case.nodes, &small(), |world: World| {
            let group = world.all().unwrap();
            let me = u64::from(group.rank());
            Rank::<bf16>::new(&group, &case).combined_ahead(&tokens(me, 9, 16, 3, 5));
        });
    });
}

#[test]
fn combines_of_one_handle_have_memory_of_those_before_them() {
    on_devices("enqueued::calls::combines_of_one_handle_have_memory_of_those_before_them", 8, 14, || {
        let case = Case::new(3, 5, 3);
        on_ranks(&case.nodes, &small(), |world: World| {
            let group = world.all().unwrap();
            let me = u64::from(group.rank());
            // Rows of one dispatch, and two or three outputs of as many.
            let mut rank = Rank::<bf16>::with(&group, &case, |builder| builder.device_heap(12 << 10));
            rank.combined_often(&tokens(me, 9, 16, 3, 5), 100);
        });
    });
}

#[test]
fn many_handles_of_exact_sizes_share_one_staging() {
    on_devices("enqueued::calls::many_handles_of_exact_sizes_share_one_staging", 8, 12, || {
        let case = Case { max_in_flight: 16, ..Case::new(3, 5, 3) };
        on_each(&case, |rank, me| {
            let inputs: Vec<_> =
                (0..16).map(|nth| tokens(10 * nth + me, some(&case, nth + me), 16, 3, 5)).collect();
            rank.all_in_flight(&inputs);
        });
    });
}

#[test]
fn memory_that_the_stream_has_yet_to_read_is_given_to_nobody() {
    on_devices("enqueued::calls::memory_that_the_stream_has_yet_to_read_is_given_to_nobody", 8, 10, || {
        let case = Case::new(2, 4, 2);
        on_ranks(&[0; 2], &small(), |world: World| {
            let group = world.all().unwrap();
            // Every token goes to expert 0 and to expert 2: a row at each rank. 24 rows of 32 bytes
            // with their weights take 896 bytes, outputs as many; 2 rows take 128 of the 256 that
            // are left.
            let mut rank = Rank::<bf16>::with(&group, &case, |builder| builder.device_heap(2 * 896 + 256));
            let input = |salt: u64, count: u32| Input {
                ids: [0, 2].repeat(count as usize),
                ..tokens(10 * salt + u64::from(group.rank()), count, 16, 2, 4)
            };
            for round in 0..4 {
                rank.dropped_early(&input(2 * round, 12), &input(2 * round + 1, 1));
            }
        });
    });
}

/// Three tokens: experts 0 to 3 get 2, 1, 1 and 1 rows of them.
pub fn three() -> Input<bf16> {
    let ids = [[0, 3], [1, 2], [0, -1]].concat();
    let x = (0..48).map(|n| bf16::from_f32(n as f32)).collect();
    Input { x, ids, weights: vec![0.5; 6] }
}

#[test]
fn ranks_of_one_device_are_built_while_the_driver_locks() {
    let settings = [("SIDELANE_FAKE_CUDA_LOCKS", "1")];
    on_settings(
        "enqueued::calls::ranks_of_one_device_are_built_while_the_driver_locks",
        &[&settings],
        (32, 3),
        &|| {
            let case = Case::new(4, 8, 2);
            on_ranks(&case.nodes, &small(), |world: World| {
                let group = world.all().unwrap();
                for _ in 0..4 {
                    let builder = case.settings::<bf16>(&group).on(&stream(0));
                    let planned = builder.device_heap(1 << 20).build().unwrap();
                    group.gather(&[]).unwrap();
                    drop(planned);
                }
            });
        },
    );
}

#[test]
fn caller_on_legacy_default_stream_sees_what_the_host_sees() {
    on_devices("enqueued::calls::caller_on_legacy_default_stream_sees_what_the_host_sees", 8, 9, || {
        let case = Case::new(3, 5, 3);
        on_ranks(&case.nodes, &small(), |world: World| {
            let group = world.all().unwrap();
            let me = u64::from(group.rank());
            let device = stream(group.rank());
            // SAFETY: the legacy default stream is there as long as its context.
            let legacy = unsafe { Stream::borrow(device.context(), std::ptr::null_mut()) }.unwrap();
            let mut rank = Rank::<bf16>::on_stream(&group, &case, legacy.into(), |builder| builder);
            for round in 0..4 {
                rank.round(&tokens(round * 8 + me, some(&case, round + me), 16, 3, 5));
            }
        });
    });
}

#[test]
fn engines_move_every_row_and_a_report_says_so() {
    let versions = ["12080", "13010"];
    on_drivers("enqueued::calls::engines_move_every_row_and_a_report_says_so", &versions, 8, 9, &|| {
        // The driver stays until it has been asked.
        let _driver = stream(0);
        let case = Case { align: 4, ..Case::new(2, 4, 2) };
        on_each(&case, |rank, me| {
            let (rows, handle) = rank.dispatch(&three()).unwrap();
            let report = handle.report().unwrap();
            assert_eq!(report.kernels, ["plan_choices", "place_choices", "regroup", "regroup"]);
            let lanes: Vec<_> = report.lanes.iter().map(|used| (used.lane, used.ranks)).collect();
            assert_eq!(lanes, [("own", 1), ("copy engine", 1)]);
            // Experts 0 to 3 get 2, 1, 1 and 1 rows from each rank, of 32 bytes and a weight, which
            // is copied apart. The last rank pads those of 1, 2 and 3, two rows each. Kernels
            // place own rows, their weights and their pads. Beside the copies go the counts.
            let (pads, own) = if me == 1 { (3, 2 + 4) } else { (0, 3) };
            let pads_of_peer = if me == 1 { 1 } else { 0 };
            let mut expected = EnqueueCounts::default();
            (expected.batches, expected.copies) = (1, 2 * (2 + pads_of_peer) + 1);
            (expected.bytes, expected.own_bytes) = ((5 + 2 * pads) * 36, own * 36);
            // A mark; that rows have landed, told and awaited.
            expected.memory_operations = 3;
            assert_eq!(report.enqueued, expected);
            // The driver counts what streams have carried out.
            rank.stream.synchronize().unwrap();
            drop((rows, handle));
        });
        let counters = FakeDriver::loaded().unwrap().counters();
        assert_eq!((counters.copies_by_sms, counters.fills), (0, 0));
    });
}

#[test]
fn rank_alone_copies_no_row_within_its_device() {
    // SMs make all copies within a device of this driver.
    on_devices("enqueued::calls::rank_alone_copies_no_row_within_its_device", 8, 25, || {
        let _driver = stream(0);
        on_each(&Case { align: 4, ..Case::new(1, 4, 2) }, |rank, _| {
            let tensors = rank.put(&three());
            let (x, choices) = call::<bf16>(&tensors);
            let (rows, handle) = rank.planned.dispatch(x, choices).unwrap();
            let report = handle.report().unwrap();
            assert_eq!(report.kernels, ["plan_choices", "place_choices", "regroup"]);
            // Counts come from the host.
            assert_eq!((report.enqueued.copies, report.enqueued.copies_by_sms), (1, 0));
            assert_eq!(report.enqueued.own_bytes, 4 * 4 * 36);
            let (y, out) = (handle.output().unwrap(), rank.room(&three().x));
            rank.planned.combine_into(y, &handle, target::<bf16>(&out)).unwrap();
            assert_eq!(handle.return_report().unwrap().enqueued.copies, 0);
            let (x, _) = call::<bf16>(&tensors);
            let again = rank.planned.dispatch_cached(x, &handle).unwrap();
            let y = handle.output().unwrap();
            rank.planned.dispatch_backward_into(y, None, &handle, target::<bf16>(&out), None).unwrap();
            assert_eq!(handle.return_report().unwrap().enqueued.copies, 0);
            rank.stream.synchronize().unwrap();
            drop((rows, again, handle));
        });
        assert_eq!(FakeDriver::loaded().unwrap().counters().copies_by_sms, 0);
    });
}

#[test]
fn outputs_of_a_second_combine_wait_for_readers_of_the_first() {
    let name = "enqueued::calls::outputs_of_a_second_combine_wait_for_readers_of_the_first";
    on_devices(name, 8, 22, || {
        for mode in [ReceiveMode::Budget { rows: 200, overflow: Overflow::Error }, ReceiveMode::Exact] {
            let case = Case { mode, ..Case::new(3, 5, 3) };
            on_each(&case, |rank, me| {
                (0..20).for_each(|round| rank.combined_twice(&tokens(round * 8 + me, 9, 16, 3, 5)));
            });
        }
    });
}

#[test]
fn outputs_elsewhere_are_copied_and_counted() {
    on_devices("enqueued::calls::outputs_elsewhere_are_copied_and_counted", 8, 23, || {
        for mode in [ReceiveMode::Budget { rows: 60, overflow: Overflow::Error }, ReceiveMode::Exact] {
            let case = Case { mode, ..Case::new(3, 5, 3) };
            on_each(&case, |rank, me| rank.combined_from_elsewhere(&tokens(me, 9, 16, 3, 5)));
        }
    });
}

#[test]
fn halves_of_both_calls_see_what_the_host_sees() {
    on_devices("enqueued::calls::halves_of_both_calls_see_what_the_host_sees", 8, 24, || {
        on_each(&Case::new(3, 5, 3), |rank, me| {
            (0..5).for_each(|round| rank.halves(&tokens(round * 8 + me, 9, 16, 3, 5)));
        });
    });
}
