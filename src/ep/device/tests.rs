//! Rows that cross straight: from memory of devices to memory of devices, by NICs that read and
//! write it. The driver is the fake of `tests/fake-cuda`; the NICs are not there either,
//! or those of two machines (`tests/testbed`).

use std::sync::Arc;

use fake_cuda::FakeDriver;
use half::bf16;
use sidelane_verify::mutate::{CallChange, CallMutation, plant};

use super::EnqueuedExchange;
use crate::config::NetChoice;
use crate::counting;
use crate::device::Stream;
use crate::dtype::PartialDtype;
use crate::ep::device::tests::devices::stream;
use crate::ep::device::tests::rank::{Case, Input, Rank};
use crate::ep::device::tests::support::{on_ranks, small, tokens};
use crate::error::CallKind;
use crate::lane::{Fabric, Settings, SignalMode};
use crate::plan::{ExpertMap, Overflow, ReceiveMode, RowLayout, SumOrder};
use crate::schedule::call_program::{Action, Part, Relays, StageId};
use crate::topology::Route;
use crate::world::{NicCounters, NoDmaBuf, NoGpuDirect, Registration};
use crate::{Group, Options, World};

mod counts;
mod footprints;
mod kernel_faults;
mod late_nics;
mod nic_allocations;

#[path = "../../../tests/device/apart.rs"]
pub(in crate::ep) mod apart;
#[path = "../../../tests/no_allocation/device_rounds.rs"]
mod device_rounds;
#[path = "../../../tests/device/devices.rs"]
pub(in crate::ep) mod devices;
#[path = "../../../tests/device/enqueued/disturbed.rs"]
mod disturbed;
#[path = "../../../tests/no_allocation/host_rounds.rs"]
mod host_rounds;
#[allow(dead_code, reason = "tests of other lanes use the rest")]
#[path = "../../../tests/device/enqueued/rank.rs"]
mod rank;
#[allow(dead_code, reason = "tests of other lanes use the rest")]
#[path = "../../../tests/device/enqueued/step.rs"]
mod step;
#[path = "../../../tests/support/mod.rs"]
pub(in crate::ep) mod support;

/// Runs the body on the fake driver, which sees what NICs write as said.
fn on_devices(test: &str, seed: u64, nic_writes: &str, body: impl FnOnce(Arc<Stream>)) {
    let (test, seed) = (format!("ep::device::tests::{test}"), seed.to_string());
    let variables = [("SIDELANE_FAKE_CUDA_SEED", &*seed), ("SIDELANE_FAKE_CUDA_NIC_WRITES", nic_writes)];
    // The driver stays until it has been asked what it did.
    apart::each_with_kernels(&test, &[&variables], || body(stream(0)));
}

/// Each rank of a world over NICs that signal like this, on a device of its own. The NICs place
/// writes in any order, unless signals are writes.
fn on_nics(case: &Case, signal: SignalMode, body: impl Fn(&mut Rank<bf16>, u64) + Sync) {
    on_nics_in_group(case, signal, |group, rank| body(rank, group.rank().into()));
}

/// The same, over NICs that read late: what is posted goes as it lies there many polls later,
/// unless signals are writes.
fn on_late_nics(case: &Case, signal: SignalMode, body: impl Fn(&mut Rank<bf16>, u64) + Sync) {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    fabric.read_late(32);
    on_fabric(&fabric, case, signal, |group, rank| body(rank, group.rank().into()));
}

/// The same, with the group of all ranks.
fn on_nics_in_group(case: &Case, signal: SignalMode, body: impl Fn(&Group, &mut Rank<bf16>) + Sync) {
    on_fabric(&Fabric::new(&["nic0", "nic1"]), case, signal, body);
}

/// The same, over the NICs of a fabric, which ranks take in turn.
fn on_fabric(
    fabric: &Fabric,
    case: &Case,
    signal: SignalMode,
    body: impl Fn(&Group, &mut Rank<bf16>) + Sync,
) {
    if signal != SignalMode::Write {
        fabric.shuffle();
        fabric.hold();
    }
    let settings = Settings { signal: Some(signal), ..Settings::default() };
    let fake_verbs = Some(fabric.ground(settings));
    let options = Options { net: NetChoice::Verbs, fake_verbs, forecast: true, ..small() };
    on_ranks(&case.nodes, &options, |world: World| {
        let group = world.all().unwrap();
        body(&group, &mut Rank::new(&group, case));
        group.gather(&[]).unwrap();
        let asked = |counters: NicCounters| (counters.requests, counters.packets, counters.bytes);
        assert_eq!(asked(world.nic_counters()), asked(world.nic_forecast()));
    });
    assert_eq!(fabric.leftovers(), (0, 0));
}

/// Rounds of random tokens, all of which go straight; bytes that did.
fn rounds(rank: &mut Rank<bf16>, rounds: u64, seed: u64) -> u64 {
    let Case { max_tokens, hidden, top_k, .. } = rank.case;
    let (experts, mut straight) = (rank.case.map.experts(), 0);
    for seed in (seed..).step_by(64).take(rounds as usize) {
        let count = (seed.wrapping_mul(0x9e37_79b9) >> 7) as u32 % (max_tokens + 1);
        rank.round(&tokens(seed, count, hidden, top_k, experts));
        for report in &rank.reports {
            assert_eq!(report.host_staged, None);
            assert_eq!(report.registration, Some(Registration::Address(NoDmaBuf::Driver)));
            assert_eq!(report.enqueued.staged_out_bytes, 0);
            straight += report.enqueued.gpu_direct_bytes;
        }
    }
    straight
}

#[test]
fn rows_go_from_device_to_device_as_on_the_host_to_the_bit() {
    on_devices("rows_go_from_device_to_device_as_on_the_host_to_the_bit", 1, "ordered", |_| {
        let replicated = ExpertMap::from_slots(5, &[vec![4, 0], vec![1], vec![2, 4, 3], vec![0]]).unwrap();
        for (route, signal) in [
            (Route::Direct, SignalMode::Write),
            (Route::Pxn, SignalMode::Write),
            (Route::Pxn, SignalMode::FetchAdd),
            (Route::Direct, SignalMode::Immediate),
            (Route::Pxn, SignalMode::Immediate),
        ] {
            let case = Case { route, ..Case::across(&[0, 0, 1, 1], 6, 3) };
            let uneven = Case { hidden: 8, align: 2, route, ..Case::across(&[0, 1, 2, 0, 1], 11, 3) };
            for case in [Case { align: 16, ..case.clone() }, Case { map: replicated.clone(), ..case }, uneven]
            {
                on_nics(&case, signal, |rank, me| assert!(rounds(rank, 5, me) > 0));
            }
        }
    });
}

#[test]
fn steps_of_training_go_from_device_to_device_as_on_the_host() {
    on_devices("steps_of_training_go_from_device_to_device_as_on_the_host", 7, "ordered", |_| {
        for (route, weighted) in Route::ALL.into_iter().flat_map(|route| [(route, false), (route, true)]) {
            let case = Case::across(&[0, 1, 2, 0, 1], 11, 3);
            let case = Case { hidden: 8, align: 2, max_in_flight: 3, route, weighted, ..case };
            on_nics(&case, SignalMode::Write, |rank, me| {
                for round in 0..3 {
                    let seed = |nth: u64| 64 * round + 8 * nth + me;
                    rank.steps([(seed(0), 1 + (seed(0) % 9) as u32), (seed(1), 12)]);
                }
            });
        }
    });
}

#[test]
fn records_go_from_device_to_device_as_on_the_host() {
    on_devices("records_go_from_device_to_device_as_on_the_host", 8, "ordered", |_| {
        for route in Route::ALL {
            let case =
                Case { hidden: 136, align: 2, fp8: true, route, ..Case::across(&[0, 1, 2, 0, 1], 11, 3) };
            let case = Case { max_in_flight: 3, ..case };
            on_nics(&case, SignalMode::Write, |rank, me| {
                for round in 0..3 {
                    rank.step_in_records(64 * round + me, 1 + ((round + me) % 9) as u32);
                }
            });
        }
    });
}

#[test]
fn rows_by_rank_go_from_device_to_device_as_on_the_host() {
    on_devices("rows_by_rank_go_from_device_to_device_as_on_the_host", 9, "ordered", |_| {
        for route in Route::ALL {
            let case = Case { align: 2, route, max_in_flight: 3, ..Case::across(&[0, 1, 2, 0, 1], 11, 4) };
            let case = Case { layout: RowLayout::RankMajor, order: SumOrder::Node, ..case };
            on_nics(&case, SignalMode::Write, |rank, me| {
                assert!(rounds(rank, 3, me) > 0);
                rank.steps([(me, 7), (me + 64, 11)]);
            });
        }
    });
}

#[test]
fn sums_of_ranks_go_from_device_to_device_as_on_the_host() {
    on_devices("sums_of_ranks_go_from_device_to_device_as_on_the_host", 12, "ordered", |_| {
        for (route, signal) in [
            (Route::Direct, SignalMode::Write),
            (Route::Pxn, SignalMode::Write),
            (Route::Pxn, SignalMode::Immediate),
        ] {
            let (order, wire) = (SumOrder::Rank, PartialDtype::Bf16);
            for weighted in [false, true] {
                let case = Case { order, wire, weighted, route, ..Case::across(&[0, 1, 2, 0, 1], 11, 4) };
                on_nics(&Case { max_in_flight: 3, ..case }, signal, |rank, me| {
                    assert!(rounds(rank, 3, me) > 0);
                    rank.steps([(me, 7), (me + 64, 11)]);
                });
            }
        }
    });
}

#[test]
fn tokens_in_a_buffer_go_from_device_to_device_as_they_lie() {
    on_devices("tokens_in_a_buffer_go_from_device_to_device_as_they_lie", 10, "ordered", |_| {
        for route in Route::ALL {
            let case = Case { route, max_in_flight: 3, ..Case::across(&[0, 0, 1, 1], 6, 1) };
            on_nics(&case, SignalMode::Write, |rank, me| {
                for round in 0..3 {
                    let input = rank.in_runs(64 * round + me, 3 + ((round + me) % 9) as u32);
                    rank.go_from_a_buffer(&input, true);
                }
            });
        }
    });
}

#[test]
fn no_seed_of_the_driver_is_seen_on_the_way() {
    let seeds = if std::env::var_os("SIDELANE_FAKE_CUDA_SEED").is_some() { 0..1 } else { 0..6 };
    for seed in seeds {
        on_devices("no_seed_of_the_driver_is_seen_on_the_way", seed, "ordered", |_| {
            for route in Route::ALL {
                let case = Case { align: 2, route, ..Case::across(&[0, 1, 0], 4, 2) };
                on_nics(&case, SignalMode::Write, |rank, me| _ = rounds(rank, 6, me));
            }
        });
    }
}

/// Locks of the driver and full launch queues, where rows go from device to device, and where they
/// are staged by the host.
#[test]
fn calls_over_nics_go_on_while_other_threads_free_and_load() {
    let test = "ep::device::tests::calls_over_nics_go_on_while_other_threads_free_and_load";
    let runs = [("8", "ordered"), ("8", "unordered"), ("32", "ordered")].map(|(queues, writes)| {
        [
            ("SIDELANE_FAKE_CUDA_SEED", "14"),
            ("SIDELANE_FAKE_CUDA_LOCKS", "1"),
            ("SIDELANE_FAKE_CUDA_LAUNCH_QUEUE", "24"),
            ("SIDELANE_FAKE_CUDA_NIC_WRITES", writes),
            ("CUDA_DEVICE_MAX_CONNECTIONS", queues),
            ("CUDA_MODULE_LOADING", "LAZY"),
        ]
    });
    apart::each_with_kernels(test, &[&runs[0], &runs[1], &runs[2]], || {
        for route in Route::ALL {
            let case = Case { hidden: 8, max_tokens: 6, route, ..Case::across(&[0, 0, 1, 1], 6, 2) };
            let case = Case { max_in_flight: 3, ..case };
            // One device of each node.
            disturbed::disturbed([0, 2], || {
                on_nics(&case, SignalMode::Write, |rank, me| {
                    for round in 0..8 {
                        let seed = 64 * round + me;
                        rank.round(&tokens(seed, 1 + (seed % 6) as u32, case.hidden, case.top_k, 6));
                        rank.steps([(seed, 3), (seed + 64, 5)]);
                    }
                });
            });
        }
    });
}

#[test]
fn beyond_a_budget_the_same_rows_are_dropped_as_on_the_host() {
    on_devices("beyond_a_budget_the_same_rows_are_dropped_as_on_the_host", 3, "ordered", |_| {
        for (route, (rows, align)) in
            Route::ALL.into_iter().flat_map(|route| [(7, 1), (24, 8), (0, 1)].map(|budget| (route, budget)))
        {
            let mode = ReceiveMode::Budget { rows, overflow: Overflow::Drop };
            let case = Case { mode, align, route, ..Case::across(&[0, 0, 1, 1], 5, 3) };
            on_nics(&case, SignalMode::Write, |rank, me| _ = rounds(rank, 5, me));
        }
    });
}

#[test]
fn dispatches_are_alive_side_by_side() {
    on_devices("dispatches_are_alive_side_by_side", 4, "ordered", |_| {
        let budget = ReceiveMode::Budget { rows: 9, overflow: Overflow::Drop };
        let modes = [budget, ReceiveMode::Exact];
        let ways = Route::ALL.into_iter().flat_map(|route| modes.map(|mode| (route, mode)));
        for ((route, mode), signal) in ways.flat_map(|way| SignalMode::ALL.map(|signal| (way, signal))) {
            let case = Case { mode, route, max_in_flight: 3, ..Case::across(&[0, 0, 1, 1], 5, 3) };
            on_late_nics(&case, signal, |rank, me| {
                let input = |seed: u64| tokens(10 * seed + me, 12, 16, 3, 5);
                for round in 0..3 {
                    rank.all_in_flight(&[input(round), input(round + 7), input(round + 9)]);
                }
            });
        }
    });
}

/// Waits that streams were given before what ends them, in rounds on one node with this bug in
/// dispatches.
fn waits_without_cause(bug: Option<CallChange>) -> u64 {
    let case = Case { hidden: 8, max_tokens: 6, ..Case::new(3, 4, 2) };
    let without = || FakeDriver::loaded().map_or(0, |fake_driver| fake_driver.counters().waits_without_cause);
    let before = without();
    on_ranks(&case.nodes, &small(), |world: World| {
        let group = world.all().unwrap();
        let mut rank = Rank::<bf16>::new(&group, &case);
        let Some(EnqueuedExchange { programs, .. }) = rank.planned.enqueued() else {
            panic!("exact sizes are the enqueuer's")
        };
        let posted = Action::Run(StageId::Posted, Part::Whole);
        let program = programs.own(CallKind::Dispatch, Relays::Inline);
        let at = program.steps().iter().position(|step| step.action == posted).unwrap();
        if let Some(change) = bug {
            let bug = CallMutation { cut: None, at: at as u16, change };
            plant(programs, CallKind::Dispatch, bug);
        }
        for round in 0..40 {
            let seed = 64 * round + u64::from(group.rank());
            rank.round(&tokens(seed, 1 + (seed % 6) as u32, case.hidden, case.top_k, 4));
        }
    });
    without() - before
}

#[test]
fn cause_check_finds_dispatch_without_enqueued_step() {
    let test = "cause_check_finds_dispatch_without_enqueued_step";
    on_devices(test, 6, "ordered", |_| {
        assert_eq!(waits_without_cause(None), 0);
        assert_ne!(waits_without_cause(Some(CallChange::Drop)), 0, "a dropped step");
        assert_ne!(waits_without_cause(Some(CallChange::Swap)), 0, "a step behind the waits");
    });
}

#[test]
fn a_report_counts_what_went_straight() {
    on_devices("a_report_counts_what_went_straight", 5, "flushed", |_| {
        let case = Case { align: 4, ..Case::across(&[0, 1], 4, 2) };
        on_nics(&case, SignalMode::Write, |rank, me| {
            let ids = [[0, 3], [1, 2], [0, -1]].concat();
            let x: Vec<bf16> = (0..48).map(|n| bf16::from_f32(n as f32)).collect();
            rank.round(&Input { x, ids, weights: vec![0.5; 6] });
            let [out, back] = [&rank.reports[0].enqueued, &rank.reports[1].enqueued];
            // Experts 0 to 3 get 2, 1, 1 and 1 rows of 32 bytes from each rank: one put for each
            // expert.
            let (sent, brought) = if me == 0 { (2, 3) } else { (3, 2) };
            assert_eq!((out.gpu_direct_puts, out.gpu_direct_bytes), (2, sent * 32));
            assert_eq!((back.gpu_direct_puts, back.gpu_direct_bytes), (2, brought * 32));
            assert_eq!(
                (out.staged_out_bytes, out.staged_in_bytes, back.staged_out_bytes, back.staged_in_bytes),
                (0, 0, 0, 0)
            );
            // Entry and message, header and its signal, rows and weights of two experts, pads, and
            // a word.
            assert_eq!(out.inter_node_signals, 3);
        });
        // The words behind rows are awaited with a flush: one for each dispatch and combine of two
        // ranks.
        assert_eq!(FakeDriver::loaded().unwrap().counters().flushes, 4);
    });
}

#[test]
fn rows_are_staged_by_the_host_where_a_device_cannot_await_nics() {
    let name = "rows_are_staged_by_the_host_where_a_device_cannot_await_nics";
    on_devices(name, 6, "unordered", |_| {
        for signal in SignalMode::ALL {
            on_nics(&Case::across(&[0, 0, 1], 5, 3), signal, |rank, me| {
                rank.round(&tokens(me, 9, 16, 3, 5));
                let report = &rank.reports[0];
                let unordered = Some(NoGpuDirect::Unordered);
                assert_eq!((report.host_staged, report.registration), (unordered, None));
                assert_eq!(report.enqueued.gpu_direct_bytes, 0);
            });
        }
    });
}

#[test]
fn rank_alone_on_node_returns_more_rows_than_outbox_holds() {
    let name = "rank_alone_on_node_returns_more_rows_than_outbox_holds";
    on_devices(name, 13, "unordered", |_| {
        for (route, signal) in
            Route::ALL.into_iter().flat_map(|route| SignalMode::ALL.map(|signal| (route, signal)))
        {
            // All rows go to both experts of rank 0, whose outbox holds those of one rank.
            let case = Case { hidden: 256, route, ..Case::across(&[0, 1, 2, 3], 8, 2) };
            on_late_nics(&case, signal, |rank, me| {
                for round in 0..3 {
                    rank.round(&tokens(64 * round + me, case.max_tokens, case.hidden, case.top_k, 2));
                    let back = &rank.reports[1].enqueued;
                    let outbox = u64::from(case.max_tokens * case.top_k) * 2 * case.hidden as u64;
                    assert_eq!(back.staged_out_bytes > outbox, me == 0, "{back:?}");
                }
            });
        }
    });
}

/// Rounds of each way in `tests/testbed`.
const ROUNDS: u64 = 5;

/// One of the ranks of two machines, by enqueuers and in slots: as `tests/testbed` starts them.
#[test]
#[ignore = "needs four processes on two machines with NICs"]
fn rows_go_from_device_to_device_between_two_machines() {
    let mut options = Options { config: small().config, ..Options::from_env().unwrap() };
    // No rank dies here, and a machine that is emulated may be away for seconds.
    options.timeouts.liveness = std::time::Duration::from_secs(150);
    let world = World::from_env_with(options).unwrap();
    let (group, lane) = (world.all().unwrap(), world.net().unwrap().lane);
    assert_eq!((group.size(), lane), (4, "verbs"));
    let budget = ReceiveMode::Budget { rows: 40, overflow: Overflow::Drop };
    for (route, mode) in
        Route::ALL.into_iter().flat_map(|route| [(route, ReceiveMode::Exact), (route, budget)])
    {
        let case = Case { route, mode, align: 4, hidden: 256, ..Case::across(&[0, 0, 1, 1], 8, 3) };
        let mut rank = Rank::<bf16>::new(&group, &case);
        let bytes = rounds(&mut rank, ROUNDS, u64::from(group.rank()));
        let mode = if mode == ReceiveMode::Exact { "exact" } else { "budget" };
        println!("{} {mode}: {ROUNDS} rounds to the bit, {bytes} bytes straight", route.name());
        group.gather(&[]).unwrap();
    }
    let bytes = crate::ep::device::slots::between_two_machines(world, ROUNDS);
    println!("direct slots: {ROUNDS} rounds to the bit, {bytes} bytes straight");
}
