//! Input that is refused, room that is not there, ranks that are lost: streams go on, and everybody
//! is told why.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use half::bf16;
use sidelane::device::{CudaGraph, PinnedMemory};
use sidelane::ep::Status;
use sidelane::error::{CallError, CallKind, Cause, DeviceError, LaneError, MemoryError, PlanError};
use sidelane::gate::Routing;
use sidelane::plan::{Overflow, ReceiveMode, RowLayout};
use sidelane::topology::Route;
use sidelane::{Error, Options};

use super::on_devices;
use super::rank::{Case, Input, Rank, call, target};
use crate::devices::{Memory, break_device, stream};
use crate::support::{cases, failed, on_ranks, small, tokens};

/// Longer than anything takes that works.
const LONG: Duration = Duration::from_secs(60);

fn input(me: u32) -> Input<bf16> {
    tokens(me.into(), 5, 16, 2, 4)
}

/// Exact sizes, and at most a budget.
const MODES: [ReceiveMode; 2] =
    [ReceiveMode::Exact, ReceiveMode::Budget { rows: 40, overflow: Overflow::Error }];

/// Waits until a rank's stream has come through all that was enqueued.
fn drained(rank: &Rank<bf16>) {
    let since = Instant::now();
    while rank.stream.is_done() == Ok(false) {
        assert!(since.elapsed() < LONG, "the stream of rank {} hangs", rank.planned.rank());
        std::thread::yield_now();
    }
}

#[test]
fn wrong_choice_is_refused_by_name_on_all_ranks_streams_go_on() {
    on_devices("enqueued::faults::wrong_choice_is_refused_by_name_on_all_ranks_streams_go_on", 8, 1, || {
        for (mode, nodes) in MODES.into_iter().flat_map(|mode| [[0, 0, 1], [0; 3]].map(|nodes| (mode, nodes)))
        {
            for layout in RowLayout::ALL {
                wrong_choice(&Case { mode, layout, ..Case::across(&nodes, 4, 2) });
            }
        }
    });
}

fn wrong_choice(case: &Case) {
    on_ranks(&case.nodes, &small(), |world| {
        let group = world.all().unwrap();
        let mut rank = Rank::<bf16>::new(&group, case);
        rank.round(&input(world.rank()));
        for (choices, weight, fault) in [
            ([0, 4], 0.5, PlanError::ExpertOutOfRange { token: 2, k: 1, expert: 4, experts: 4 }),
            ([0, -2], 0.5, PlanError::ExpertOutOfRange { token: 2, k: 1, expert: -2, experts: 4 }),
            ([3, 3], 0.5, PlanError::ExpertTwice { token: 2, expert: 3 }),
            ([3, 3], f32::NAN, PlanError::NanWeight { token: 2, k: 1 }),
        ] {
            let mut bad = input(world.rank());
            if world.rank() == 1 {
                // A later one is not named.
                bad.ids[4..6].copy_from_slice(&choices);
                (bad.weights[5], bad.ids[8]) = (weight, 77);
            }
            let refused = rank.dispatch(&bad).map(drop).unwrap_err();
            match world.rank() {
                1 => assert_eq!(refused, fault.into()),
                _ => assert!(
                    matches!(refused, Error::Call(CallError::PeerRefused { peer: 1, .. })),
                    "{refused}"
                ),
            }
            drained(&rank);
            rank.round(&input(world.rank()));
        }
    });
}

#[test]
fn a_tensor_of_another_shape_is_refused_on_all_ranks() {
    on_devices("enqueued::faults::a_tensor_of_another_shape_is_refused_on_all_ranks", 8, 2, || {
        MODES.into_iter().for_each(another_shape);
    });
}

fn another_shape(mode: ReceiveMode) {
    on_ranks(&[0; 2], &small(), |world| {
        let group = world.all().unwrap();
        let mut rank = Rank::<bf16>::new(&group, &Case { mode, ..Case::new(2, 4, 2) });
        let mut bad = input(world.rank());
        if world.rank() == 0 {
            bad.x.truncate(4 * 16);
        }
        let refused = rank.dispatch(&bad).map(drop).unwrap_err();
        match world.rank() {
            0 => assert!(
                matches!(refused, Error::Plan(PlanError::WrongShape { what: "tokens", seen: 64, .. })),
                "{refused}"
            ),
            _ => {
                assert!(matches!(refused, Error::Call(CallError::PeerRefused { peer: 0, .. })), "{refused}");
            }
        }
        // A target of another shape refuses the combine: nobody gets sums.
        let (_, handle) = rank.dispatch(&input(world.rank())).unwrap();
        let columns = if world.rank() == 1 { 15 } else { 16 };
        let out = rank.out.part(5 * columns * 2);
        let y = handle.output().unwrap();
        let called = rank.planned.combine_into(y, &handle, target::<bf16>(&out));
        let refused = handle.return_report().unwrap_err();
        assert_eq!(called.err(), Some(refused.clone()));
        match world.rank() {
            1 => assert!(matches!(refused, Error::Plan(PlanError::WrongShape { .. })), "{refused}"),
            _ => {
                assert!(matches!(refused, Error::Call(CallError::PeerRefused { peer: 1, .. })), "{refused}");
            }
        }
        drained(&rank);
        if world.rank() == 0 {
            let stream = rank.stream.clone();
            assert_eq!(rank.rows.read::<u16>(&stream, &out), [0; 80], "sums of a refused combine are zeros");
            assert_eq!(handle.status_now(), Status::PEER_REFUSED);
        }
        drop(handle);
        rank.round(&input(world.rank()));
    });
}

#[test]
fn tensors_beyond_reach_of_device_are_refused_on_all_ranks() {
    let test = "enqueued::faults::tensors_beyond_reach_of_device_are_refused_on_all_ranks";
    on_devices(test, 8, 37, || {
        on_ranks(&[0; 2], &small(), |world| {
            let group = world.all().unwrap();
            let mut rank = Rank::<bf16>::new(&group, &Case::new(2, 4, 2));
            let elsewhere = Memory::new(stream(2).context(), 4096);
            let given = input(world.rank());
            let [x, experts, weights] = rank.put(&given);
            for at in 0..3 {
                let mut tensors = [x.clone(), experts.clone(), weights.clone()];
                if world.rank() == 0 {
                    tensors[at] = elsewhere.part(tensors[at].len());
                }
                let (x, choices) = call::<bf16>(&tensors);
                let refused = rank.planned.dispatch(x, choices).map(drop).unwrap_err();
                assert_unreached(&refused, world.rank(), 0);
            }
            let (_, handle) = rank.dispatch(&given).unwrap();
            let out = rank.out.part(x.len());
            let out = if world.rank() == 1 { elsewhere.part(x.len()) } else { out };
            let y = handle.output().unwrap();
            let refused = rank.planned.combine_into(y, &handle, target::<bf16>(&out)).unwrap_err();
            assert_unreached(&refused, world.rank(), 1);
            drop(handle);
            rank.round(&given);
        });
    });
}

fn assert_unreached(refused: &Error, rank: u32, culprit: u32) {
    match refused {
        Error::Device(DeviceError::NoAccess { .. }) => assert_eq!(rank, culprit),
        Error::Call(CallError::PeerRefused { peer, .. }) => {
            assert_eq!((rank != culprit, *peer), (true, culprit))
        }
        refused => panic!("rank {rank}: {refused}"),
    }
}

/// Each refusal is about its own call: kernels of the one before have yet to run.
#[test]
fn refused_combine_leaves_the_sums_of_another_alone() {
    on_devices("enqueued::faults::refused_combine_leaves_the_sums_of_another_alone", 8, 25, || {
        on_ranks(&[0; 2], &small(), |world| {
            let group = world.all().unwrap();
            let mut rank = Rank::<bf16>::new(&group, &Case::new(2, 4, 2));
            let mine = input(world.rank());
            let stream = rank.stream.clone();
            for refused_first in [false, true] {
                let (rows, handle) = rank.dispatch(&mine).unwrap();
                let landed = rows.range().unwrap();
                let gate = PinnedMemory::new(stream.context(), 8).unwrap();
                let (good, bad) = (Memory::new(stream.context(), 160), Memory::new(stream.context(), 160));
                for out in [&good, &bad] {
                    out.fill(&stream, &[0xcb_u8; 160]);
                }
                stream.wait(gate.range().word::<u32>(0).unwrap(), 1).unwrap();
                let refuse = |rank: &mut Rank<bf16>| {
                    let columns = if world.rank() == 1 { 15 } else { 16 };
                    let out = bad.part(5 * columns * 2);
                    let y = handle.output().unwrap();
                    rank.planned.combine_into(y, &handle, target::<bf16>(&out)).unwrap_err();
                };
                if refused_first {
                    refuse(&mut rank);
                }
                let (y, len) = (handle.output().unwrap(), landed.len());
                stream.copy(y.range().unwrap().span(0, len).unwrap(), landed.span(0, len).unwrap()).unwrap();
                rank.planned.combine_into(y, &handle, target::<bf16>(&good.part(160))).unwrap();
                if !refused_first {
                    refuse(&mut rank);
                }
                gate.word(0).unwrap().store(1, Ordering::Release);
                let sums = good.read::<u16>(&stream, &good.part(160));
                assert!(sums.iter().all(|&sum| sum != 0xcbcb) && sums.iter().any(|&sum| sum != 0));
                if world.rank() == 0 {
                    assert_eq!(bad.read::<u16>(&stream, &bad.part(160)), [0; 80], "of the refused one");
                }
                // Experts that change nothing: each token came back from two of them.
                let twice = mine.x.iter().map(|x| bf16::from_f32(2.0 * x.to_f32()).to_bits());
                if mine.ids.iter().all(|&id| id >= 0) {
                    assert_eq!(sums, twice.collect::<Vec<_>>());
                }
            }
        });
    });
}

#[test]
fn captured_calls_of_exact_sizes_are_refused_here_alone() {
    on_devices("enqueued::faults::captured_calls_of_exact_sizes_are_refused_here_alone", 8, 26, || {
        on_ranks(&[0, 0, 1], &small(), |world| {
            let group = world.all().unwrap();
            let mut rank = Rank::<bf16>::new(&group, &Case::across(&[0, 0, 1], 4, 2));
            let mine = input(world.rank());
            let tensors = rank.put(&mine);
            let (_, handle) = rank.dispatch(&mine).unwrap();
            let (feature, executor) = ("sizes on the device, and capture", "enqueuer");
            let expected: Error = PlanError::NotAvailable { feature, place: "a device", executor }.into();
            let (stream, out) = (rank.stream.clone(), rank.out.part(160));
            CudaGraph::capture(&stream, || {
                let (x, choices) = call::<bf16>(&tensors);
                assert_eq!(rank.planned.dispatch(x, choices).map(drop).unwrap_err(), expected);
                let y = handle.output()?;
                assert_eq!(
                    rank.planned.combine_into(y, &handle, target::<bf16>(&out)).unwrap_err(),
                    expected
                );
                Ok::<(), Error>(())
            })
            .unwrap();
            drop(handle);
            rank.round(&mine);
        });
    });
}

/// Hosts agree and go on; a stream that does not come to its call is named by those that wait for
/// it.
#[test]
fn rank_whose_stream_hangs_is_named_after_the_deadline() {
    on_devices("enqueued::faults::rank_whose_stream_hangs_is_named_after_the_deadline", 8, 27, || {
        let mut options = small();
        options.timeouts.deadline = Duration::from_secs(2);
        on_ranks(&[0; 3], &options, |world| {
            let group = world.all().unwrap();
            let mut rank = Rank::<bf16>::new(&group, &Case::new(3, 4, 2));
            let (mine, stream) = (input(world.rank()), rank.stream.clone());
            let (_, handle) = rank.dispatch(&mine).unwrap();
            let gate = PinnedMemory::new(stream.context(), 8).unwrap();
            if world.rank() == 1 {
                stream.wait(gate.range().word::<u32>(0).unwrap(), 1).unwrap();
            }
            // The caller is calls ahead: the deadline is that of the first whose words are missing.
            let out = rank.out.part(160);
            for _ in 0..3 {
                let y = handle.output().unwrap();
                rank.planned.combine_into(y, &handle, target::<bf16>(&out)).unwrap();
            }
            let cause = failed(&world);
            assert!(matches!(cause, Cause::Stalled { rank: 1, by, .. } if by != 1), "{cause}");
            gate.word(0).unwrap().store(1, Ordering::Release);
            drained(&rank);
        });
    });
}

#[test]
fn over_budget_every_rank_gets_the_error_that_the_host_gives() {
    on_devices("enqueued::faults::over_budget_every_rank_gets_the_error_that_the_host_gives", 8, 3, || {
        for (nodes, route) in [([0; 3], Route::Direct), ([0, 0, 1], Route::Direct), ([0, 0, 1], Route::Pxn)] {
            over_budget(Case { route, ..Case::across(&nodes, 4, 2) });
        }
    });
}

fn over_budget(case: Case) {
    let mode = ReceiveMode::Budget { rows: 6, overflow: Overflow::Error };
    on_ranks(&case.nodes, &small(), |world| {
        let group = world.all().unwrap();
        let mut rank = Rank::<bf16>::new(&group, &Case { mode, ..case.clone() });
        let mine = input(world.rank());
        let routing = Routing::new(2, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
        let expected = rank.host.dispatch(&mine.x, &routing).map(drop).unwrap_err();
        assert!(matches!(expected, Error::Call(CallError::OverBudget { budget: 6, .. })), "{expected}");
        assert_eq!(rank.dispatch(&mine).map(drop).unwrap_err(), expected);
        drained(&rank);
        assert_eq!(rank.dispatch(&few(world.rank())).map(drop), Ok(()));
    });
}

/// One token for each rank, which leaves all of them within that budget.
fn few(me: u32) -> Input<bf16> {
    Input { ids: vec![0, 3], ..tokens(me.into(), 1, 16, 2, 4) }
}

#[test]
fn without_room_every_rank_gets_the_same_error() {
    on_devices("enqueued::faults::without_room_every_rank_gets_the_same_error", 8, 4, || {
        on_ranks(&[0; 2], &small(), |world| {
            let group = world.all().unwrap();
            let mut rank =
                Rank::<bf16>::with(&group, &Case::new(2, 4, 2), |builder| builder.device_heap(256));
            let refused = rank.dispatch(&input(world.rank())).map(drop).unwrap_err();
            let space = "device heap";
            assert!(
                matches!(refused, Error::Memory(MemoryError::OutOfSpace { free: 256, total: 256, space: seen, .. }) if seen == space),
                "{refused}"
            );
            drained(&rank);
        });
    });
}

#[test]
fn dispatches_beyond_max_in_flight_are_refused_on_all_ranks() {
    on_devices("enqueued::faults::dispatches_beyond_max_in_flight_are_refused_on_all_ranks", 8, 5, || {
        on_ranks(&[0; 2], &small(), |world| {
            let group = world.all().unwrap();
            let mut rank = Rank::<bf16>::new(&group, &Case { max_in_flight: 1, ..Case::new(2, 4, 2) });
            let mut alive = Some(rank.dispatch(&input(world.rank())).unwrap());
            if world.rank() == 1 {
                alive = None;
            }
            let refused = rank.dispatch(&input(world.rank())).map(drop).unwrap_err();
            match world.rank() {
                0 => assert_eq!(refused, CallError::TooManyInFlight { max: 1 }.into()),
                _ => assert!(
                    matches!(refused, Error::Call(CallError::PeerRefused { peer: 0, .. })),
                    "{refused}"
                ),
            }
            drop(alive);
            rank.round(&input(world.rank()));
        });
    });
}

#[test]
fn more_memory_than_can_be_counted_is_refused_on_all_ranks() {
    on_devices("enqueued::faults::more_memory_than_can_be_counted_is_refused_on_all_ranks", 8, 20, || {
        on_ranks(&[0, 1], &small(), |world| {
            let group = world.all().unwrap();
            let settings = Case::new(2, 4, 2).settings::<bf16>(&group).hidden(1 << 12).max_tokens(1 << 28);
            let built = settings.on(&stream(world.rank())).max_in_flight(65_534).build();
            let refused = built.map(drop).unwrap_err();
            assert!(
                matches!(
                    refused,
                    Error::Plan(PlanError::BadParameter { parameter: "bytes of the exchange", .. })
                ),
                "{refused}"
            );
        });
    });
}

/// Nodes of three ranks, and how rows go between them.
const WAYS: [([u32; 3], Route); 4] =
    [([0; 3], Route::Direct), ([0, 1, 0], Route::Direct), ([0, 1, 0], Route::Pxn), ([0, 0, 1], Route::Pxn)];

/// What ends a dispatch that one rank does not make.
fn ended_by(
    ((nodes, route), mode): (([u32; 3], Route), ReceiveMode),
    options: &Options,
    body: impl Fn(&mut Rank<bf16>, bool) + Sync,
) {
    on_ranks(&nodes, options, |world| {
        let group = world.all().unwrap();
        let mut rank = Rank::<bf16>::new(&group, &Case { route, mode, ..Case::across(&nodes, 4, 2) });
        rank.round(&input(world.rank()));
        body(&mut rank, world.rank() == 1);
        if world.rank() == 1 {
            // Lives until the others have found out.
            failed(&world);
        }
    });
}

#[test]
fn a_cancelled_world_ends_all_waits_of_streams() {
    on_devices("enqueued::faults::a_cancelled_world_ends_all_waits_of_streams", 8, 7, || {
        MODES.into_iter().for_each(|mode| WAYS.into_iter().for_each(|way| cancelled(way, mode)));
    });
}

fn cancelled((nodes, route): ([u32; 3], Route), mode: ReceiveMode) {
    let all = std::sync::Barrier::new(nodes.len());
    on_ranks(&nodes, &small(), |world| {
        let group = world.all().unwrap();
        let mut rank = Rank::<bf16>::new(&group, &Case { route, mode, ..Case::across(&nodes, 4, 2) });
        rank.round(&input(world.rank()));
        // Nobody is still in the round when the world ends.
        all.wait();
        let cause = Cause::Cancelled { by: 1 };
        if world.rank() == 1 {
            world.cancel();
        } else {
            assert_eq!(rank.dispatch(&input(world.rank())).map(drop).unwrap_err(), cause.clone().into());
        }
        drained(&rank);
        let tensors = rank.put(&input(world.rank()));
        let (x, choices) = call::<bf16>(&tensors);
        let refused = rank.planned.dispatch(x, choices);
        assert_eq!(refused.map(drop).unwrap_err(), cause.into(), "new calls are refused");
    });
}

#[test]
fn failed_device_ends_world_when_its_rank_refuses_call() {
    let test = "enqueued::faults::failed_device_ends_world_when_its_rank_refuses_call";
    on_devices(test, 8, 41, || {
        let built = std::sync::Barrier::new(2);
        on_ranks(&[0; 2], &small(), |world| {
            let group = world.all().unwrap();
            let mut rank = Rank::<bf16>::new(&group, &Case::new(2, 4, 2));
            rank.round(&input(world.rank()));
            built.wait();
            if world.rank() == 0 {
                let refused = rank.dispatch(&input(0)).map(drop).unwrap_err();
                assert_eq!(refused, Cause::Cancelled { by: 1 }.into());
                return;
            }
            break_device(&rank.stream);
            let unfit = PlanError::RefusedHere.into();
            let refused = rank.planned.refuse(CallKind::Dispatch, None, unfit);
            assert!(matches!(refused, Error::Device(DeviceError::Call { .. })), "{refused}");
            assert_eq!(rank.planned.check(), Err(Cause::Cancelled { by: 1 }.into()));
        });
    });
}

#[test]
fn dropped_pending_calls_cancel_the_world() {
    on_devices("enqueued::faults::dropped_pending_calls_cancel_the_world", 8, 9, || {
        [false, true].into_iter().for_each(dropped);
    });
}

/// Rank 1 drops a call that it has started: a dispatch or a combine.
fn dropped(in_combine: bool) {
    let built = std::sync::Barrier::new(3);
    on_ranks(&[0, 0, 1], &small(), |world| {
        let group = world.all().unwrap();
        let mut rank = Rank::<bf16>::new(&group, &Case::across(&[0, 0, 1], 4, 2));
        built.wait();
        let (mine, cause) = (input(world.rank()), Error::World(Cause::Cancelled { by: 1 }));
        match world.rank() {
            1 if in_combine => {
                let (_, handle) = rank.dispatch(&mine).unwrap();
                drop(rank.planned.start_combine(handle.output().unwrap(), &handle).unwrap());
            }
            1 => {
                let tensors = rank.put(&mine);
                let (x, choices) = call::<bf16>(&tensors);
                drop(rank.planned.start_dispatch(x, choices).unwrap());
            }
            // The world may end before all of it is enqueued, or after it is done.
            _ => {
                let called = rank.dispatch(&mine).and_then(|(_, handle)| {
                    let (y, out) = (handle.output()?, rank.out.part((mine.x.len() * 2) as u64));
                    rank.planned.combine_into(y, &handle, target::<bf16>(&out))?;
                    handle.return_report()
                });
                assert!(called.is_ok() || called.as_ref() == Err(&cause), "{called:?}");
            }
        }
        failed(&world);
        assert_eq!(rank.planned.check(), Err(cause));
        drained(&rank);
    });
}

#[test]
fn a_rank_that_makes_no_call_is_named_after_the_deadline() {
    on_devices("enqueued::faults::a_rank_that_makes_no_call_is_named_after_the_deadline", 8, 8, || {
        let mut options = small();
        let budget = (WAYS[0], MODES[1]);
        let all = WAYS.map(|way| (way, ReceiveMode::Exact)).into_iter().chain([budget]);
        for (way, mode) in cases(all, 3) {
            // Who waits for a relay waits an eighth longer than the relay does: as long as ranks
            // may begin apart.
            options.timeouts.deadline = Duration::from_secs(if way.1 == Route::Pxn { 12 } else { 3 });
            ended_by((way, mode), &options, |rank, absent| {
                if absent {
                    return;
                }
                let me = rank.planned.rank();
                let refused = rank.dispatch(&input(me)).map(drop).unwrap_err();
                // Whoever notices it names the flag, too.
                match refused {
                    Error::World(Cause::Stalled { rank: 1, by, .. }) => assert!(by != 1),
                    Error::Lane(LaneError::Deadline { peer: 1, .. }) => {}
                    _ => panic!("{refused}"),
                }
                drained(rank);
            });
        }
    });
}

/// Calls of all instances of a rank have one order, the same at all ranks. Each rank here waits in
/// the call that the other makes second.
fn in_two_orders(call: impl Fn([&mut Rank<bf16>; 2], &Input<bf16>) -> [Error; 2] + Sync) {
    let mut options = small();
    options.timeouts.deadline = Duration::from_secs(3);
    for mode in MODES {
        on_ranks(&[0, 0], &options, |world| {
            let (group, case) = (world.all().unwrap(), Case { mode, ..Case::new(2, 4, 2) });
            let mut instances = [(); 2].map(|()| Rank::<bf16>::new(&group, &case));
            let input = input(world.rank());
            for rank in &mut instances {
                rank.round(&input);
            }
            if world.rank() == 1 {
                instances.reverse();
            }
            let [waits, late] = call(instances.each_mut(), &input);
            let other = 1 - world.rank();
            let stalled = |error: &Error| matches!(error, Error::World(Cause::Stalled { .. }));
            let named = matches!(waits, Error::Lane(LaneError::Deadline { peer, .. }) if peer == other);
            assert!(stalled(&waits) || named, "{waits}");
            assert!(stalled(&late), "{late}");
            instances.iter().for_each(drained);
        });
    }
}

#[test]
fn calls_of_two_instances_in_two_orders_are_named_and_end() {
    on_devices("enqueued::faults::calls_of_two_instances_in_two_orders_are_named_and_end", 8, 23, || {
        in_two_orders(|ranks, input| ranks.map(|rank| rank.dispatch(input).map(drop).unwrap_err()));
    });
}

/// Each thread of a rank has an instance. One waits in its call while the other is still to come.
#[test]
fn calls_of_two_threads_in_two_orders_are_named_and_end() {
    on_devices("enqueued::faults::calls_of_two_threads_in_two_orders_are_named_and_end", 8, 24, || {
        in_two_orders(|[first, second], input| {
            let (told, turn) = std::sync::mpsc::channel();
            std::thread::scope(|scope| {
                let second = scope.spawn(move || {
                    turn.recv().unwrap();
                    second.dispatch(input).map(drop).unwrap_err()
                });
                let first = scope.spawn(move || {
                    let waits = first.dispatch(input).map(drop).unwrap_err();
                    told.send(()).unwrap();
                    waits
                });
                [first, second].map(|thread| thread.join().unwrap())
            })
        });
    });
}
