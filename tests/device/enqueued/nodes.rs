//! Calls across nodes: rows cross by memory of the host, and come out as on the host, to the bit.

use std::sync::Barrier;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fake_cuda::FakeDriver;
use half::bf16;
use sidelane::device::PinnedMemory;
use sidelane::exec::EnqueueCounts;
use sidelane::plan::{ExpertMap, Overflow, ReceiveMode};
use sidelane::topology::Route;
use sidelane::world::NoGpuDirect;

use super::calls::{on_each, rounds, some, three};
use super::disturbed::disturbed;
use super::rank::{Case, Input, Rank};
use super::{on_devices, on_drivers, on_settings, seeds};
use crate::devices::stream;
use crate::support::{on_ranks, small, tokens};

/// Hardware queues of a device.
const QUEUES: usize = 8;
/// Longer than anything takes that works.
const LONG: Duration = Duration::from_secs(20);

/// Two and two, three and five, and nodes whose ranks are anywhere.
const SHAPES: [&[u32]; 3] = [&[0, 0, 1, 1], &[0, 0, 0, 1, 1, 1, 1, 1], &[0, 1, 2, 0, 1]];

#[test]
fn two_nodes_of_two_see_what_the_host_sees() {
    on_devices("enqueued::nodes::two_nodes_of_two_see_what_the_host_sees", 8, 1, || {
        let replicated = ExpertMap::from_slots(5, &[vec![4, 0], vec![1], vec![2, 4, 3], vec![0]]).unwrap();
        for route in Route::ALL {
            let case = Case { route, ..Case::across(SHAPES[0], 6, 3) };
            for case in
                [case.clone(), Case { align: 16, ..case.clone() }, Case { map: replicated.clone(), ..case }]
            {
                rounds(&case, 4, 2);
            }
        }
    });
}

#[test]
fn uneven_and_interleaved_nodes_see_what_the_host_sees() {
    on_devices("enqueued::nodes::uneven_and_interleaved_nodes_see_what_the_host_sees", 8, 2, || {
        for (route, shape) in
            Route::ALL.into_iter().flat_map(|route| SHAPES[1..].iter().map(move |s| (route, s)))
        {
            let case = Case { hidden: 8, max_tokens: 7, align: 2, ..Case::across(shape, 11, 3) };
            rounds(&Case { route, ..case }, 6, 3);
        }
    });
}

#[test]
fn nodes_go_on_for_hundreds_of_rounds_on_two_queues() {
    on_devices("enqueued::nodes::nodes_go_on_for_hundreds_of_rounds_on_two_queues", 2, 4, || {
        rounds(&Case { hidden: 8, max_tokens: 6, ..Case::across(&[0, 1], 3, 2) }, 300, 4);
    });
}

#[test]
fn relays_of_engines_go_on_for_hundreds_of_rounds() {
    on_devices("enqueued::nodes::relays_of_engines_go_on_for_hundreds_of_rounds", 3, 5, || {
        let case = Case { hidden: 8, max_tokens: 6, ..Case::across(&[0, 0, 1], 5, 3) };
        rounds(&Case { route: Route::Pxn, ..case }, 200, 5);
    });
}

#[test]
fn nodes_go_on_while_other_threads_free_load_and_launch() {
    let test = "enqueued::nodes::nodes_go_on_while_other_threads_free_load_and_launch";
    let with = |more| [("SIDELANE_FAKE_CUDA_LOCKS", "1"), ("CUDA_MODULE_LOADING", "LAZY"), more];
    let full = with(("SIDELANE_FAKE_CUDA_LAUNCH_QUEUE", "24"));
    let copies = with(("SIDELANE_FAKE_CUDA_COPY_QUEUES", "1"));
    let priorities = with(("SIDELANE_FAKE_CUDA_PRIORITY_QUEUES", "1"));
    on_settings(test, &[&full, &copies, &priorities], (8, 14), &|| {
        for route in Route::ALL {
            let case = Case { hidden: 8, max_tokens: 6, route, ..Case::across(SHAPES[0], 6, 2) };
            // One device of each node.
            disturbed([0, 2], || rounds(&case, 12, 8));
        }
    });
}

#[test]
fn no_seed_of_the_driver_is_seen_across_nodes() {
    for seed in seeds(8) {
        on_devices(
            "enqueued::nodes::no_seed_of_the_driver_is_seen_across_nodes",
            3 + seed as u32 % 3,
            seed,
            || {
                let seed = std::env::var("SIDELANE_FAKE_CUDA_SEED").unwrap().parse().unwrap();
                for route in Route::ALL {
                    rounds(&Case { align: 2, route, ..Case::across(&[0, 1, 0], 4, 2) }, 6, seed);
                }
            },
        );
    }
}

#[test]
fn beyond_a_budget_the_same_rows_are_dropped_across_nodes() {
    on_devices("enqueued::nodes::beyond_a_budget_the_same_rows_are_dropped_across_nodes", 8, 6, || {
        for (rows, align, route) in [
            (7, 1, Route::Direct),
            (24, 8, Route::Direct),
            (0, 1, Route::Direct),
            (7, 1, Route::Pxn),
            (24, 8, Route::Pxn),
            (0, 1, Route::Pxn),
        ] {
            let mode = ReceiveMode::Budget { rows, overflow: Overflow::Drop };
            rounds(&Case { mode, align, route, ..Case::across(SHAPES[0], 5, 3) }, 5, rows.into());
        }
    });
}

#[test]
fn dispatches_are_alive_side_by_side_across_nodes() {
    on_devices("enqueued::nodes::dispatches_are_alive_side_by_side_across_nodes", 8, 7, || {
        let modes = [ReceiveMode::Exact, ReceiveMode::Budget { rows: 200, overflow: Overflow::Error }];
        for (route, mode) in Route::ALL.into_iter().flat_map(|route| modes.map(|mode| (route, mode))) {
            let case = Case { max_in_flight: 3, mode, route, ..Case::across(&[0, 1, 1], 5, 3) };
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

#[test]
fn a_report_says_how_rows_crossed_and_by_how_many_copies() {
    let name = "enqueued::nodes::a_report_says_how_rows_crossed_and_by_how_many_copies";
    on_drivers(name, &["13010"], 8, 9, &|| {
        // The driver stays until it has been asked.
        let _driver = stream(0);
        let case = Case { align: 4, ..Case::across(&[0, 1], 4, 2) };
        on_each(&case, |rank, me| {
            let (rows, handle) = rank.dispatch(&three()).unwrap();
            let report = handle.report().unwrap();
            assert_eq!(report.kernels, ["sort_choices", "regroup", "regroup"]);
            let lanes: Vec<_> = report.lanes.iter().map(|used| (used.lane, used.ranks)).collect();
            assert_eq!(lanes, [("own", 1), ("loopback", 1)]);
            assert_eq!(report.host_staged, Some(NoGpuDirect::Lane("loopback")));
            // Experts 0 to 3 get 2, 1, 1 and 1 rows from each rank, of 32 bytes and a weight; the
            // last rank pads them to 4, 4, 4 and 4. Rank 0 has experts 0 and 1.
            let (rows_out, own, own_pads) = if me == 0 { (2, 3, 0) } else { (3, 2, 4) };
            let (rows_in, pads_in) = if me == 0 { (3, 2) } else { (2, 0) };
            let EnqueueCounts {
                staged_out_bytes: out_bytes, staged_in_bytes, bytes, own_bytes, copies, ..
            } = report.enqueued;
            // Weights cross from memory of the host, and come in with the rows, a copy for each
            // expert: its own rows lie between.
            assert_eq!((out_bytes, staged_in_bytes), (rows_out * 32, (rows_in + pads_in) * 36));
            assert_eq!((bytes, own_bytes), ((own + own_pads) * 36, (own + own_pads) * 36));
            let pads = if own_pads > 0 { 2 } else { 0 };
            assert_eq!(copies, 2 + (2 + pads) + 2 * 2 + 3, "out, own weights and pads, in, and lists");
            // Entry and message, header and its signal, rows and weights of two experts, landed.
            assert_eq!((report.enqueued.inter_node_signals, report.enqueued.inter_node_puts), (3, 6));
            assert_eq!(report.enqueued.copies_by_sms, 0);
            // The driver counts what streams have carried out.
            rank.stream.synchronize().unwrap();
            drop((rows, handle));
        });
        let counters = FakeDriver::loaded().unwrap().counters();
        assert_eq!((counters.copies_by_sms, counters.fills), (0, 0));
    });
}

/// Where rows cross, the caller's thread waits for the stream of copies before it serves the net.
#[test]
fn own_rows_are_placed_while_copy_stream_delays_net() {
    let test = "enqueued::nodes::own_rows_are_placed_while_copy_stream_delays_net";
    on_devices(test, QUEUES as u32, 11, || {
        let (case, counted) = (Case::across(&[0, 1], 4, 2), Barrier::new(2));
        on_ranks(&case.nodes, &small(), |world| {
            let (group, all) = (world.all().unwrap(), || FakeDriver::loaded().unwrap().counters().kernels);
            let mut rank = Rank::<bf16>::new(&group, &case);
            rank.round(&three());
            counted.wait();
            let before = all();
            counted.wait();
            if world.rank() == 1 {
                rank.dispatch(&three()).map(drop).unwrap();
                return rank.round(&three());
            }
            // Streams take hardware queues in turn: the last of these has that of the stream of
            // copies, which was made behind the caller's.
            let streams = [(); QUEUES].map(|()| stream(0));
            let gate = PinnedMemory::new(rank.stream.context(), 8).unwrap();
            streams[QUEUES - 1].wait(gate.range().word::<u32>(0).unwrap(), 1).unwrap();
            let seen = std::thread::scope(|scope| {
                let looks = scope.spawn(|| {
                    let since = Instant::now();
                    while all() - before < 6 && since.elapsed() < LONG {
                        std::thread::yield_now();
                    }
                    let seen = all() - before;
                    gate.word(0).unwrap().store(1, Ordering::Release);
                    seen
                });
                rank.dispatch(&three()).map(drop).unwrap();
                looks.join().unwrap()
            });
            assert_eq!(seen, 6, "each rank sorts, packs, and places own rows");
            rank.round(&three());
        });
    });
}

#[test]
fn over_relays_a_report_counts_a_token_once_for_each_node() {
    let name = "enqueued::nodes::over_relays_a_report_counts_a_token_once_for_each_node";
    on_drivers(name, &["13010"], 8, 10, &|| {
        // The driver stays until it has been asked.
        let _driver = stream(0);
        let case = Case { route: Route::Pxn, ..Case::across(SHAPES[0], 4, 4) };
        on_each(&case, |rank, me| {
            // Three tokens for all four ranks, and one for the ranks of the first node alone.
            let ids = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [0, 1, -1, -1]].concat();
            let x: Vec<bf16> = (0..64).map(|n| bf16::from_f32(n as f32 + me as f32)).collect();
            let (rows, handle) = rank.dispatch(&Input { x, ids, weights: vec![0.5; 16] }).unwrap();
            let report = handle.report().unwrap();
            assert_eq!(report.kernels, ["regroup", "regroup", "regroup"]);
            let lanes: Vec<_> = report.lanes.iter().map(|used| (used.lane, used.ranks)).collect();
            assert_eq!(lanes, [("own", 1), ("copy engine", 1), ("loopback", 1), ("relay", 1)]);
            assert_eq!(report.host_staged, Some(NoGpuDirect::Lane("loopback")));
            let first_node = me < 2;
            let (out, landed) = if first_node { (3, 16) } else { (4, 12) };
            let sent = report.enqueued;
            assert_eq!(sent.staged_out_bytes, out * 32, "each token once");
            // As a relay: of the block of one source, for two ranks; then weights of 2 sources, and
            // the index.
            let block = if first_node { 4 } else { 3 };
            assert_eq!(sent.staged_in_bytes, 2 * block * 32 + 2 * block * 4 + landed * 4);
            assert_eq!(u64::from(handle.rows()), landed);
            let (arrivals, index) = rows.arrivals().unwrap();
            assert_eq!((arrivals.len(), index.len()), (landed * 32, landed * 4));
            assert_eq!((sent.copies_by_sms, sent.single_copies), (0, 0));
            // The driver counts what streams have carried out.
            rank.stream.synchronize().unwrap();
            drop((rows, handle));
        });
        let counters = FakeDriver::loaded().unwrap().counters();
        assert_eq!((counters.copies_by_sms, counters.fills), (0, 0));
    });
}
