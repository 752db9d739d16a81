//! Input that is refused, room that is not there, ranks that are lost: streams go on, and everybody is told why.

use std::time::{Duration, Instant};

use half::bf16;
use sidelane::ep::planned::{PlannedExchange, Status, Tokens};
use sidelane::error::{CallError, Cause, DeviceError, MemoryError, PlanError};
use sidelane::gate::Routing;
use sidelane::plan::{Mode, Overflow};
use sidelane::topology::Route;
use sidelane::{Error, Options};

use super::on_devices;
use super::rank::{Case, Input, Rank, stream};
use crate::support::{on_ranks, small, tokens};

/// Longer than anything takes that works.
const LONG: Duration = Duration::from_secs(60);

fn input(me: u32) -> Input<bf16> {
    tokens(me.into(), 5, 16, 2, 4)
}

/// Waits until a rank's stream has come through all that was enqueued.
fn drained(rank: &Rank<bf16>) {
    let since = Instant::now();
    while rank.stream.is_done() == Ok(false) {
        assert!(since.elapsed() < LONG, "the stream of rank {} hangs", rank.planned.rank());
        std::thread::yield_now();
    }
}

#[test]
fn an_expert_that_is_none_is_refused_on_all_ranks_and_streams_go_on() {
    on_devices(
        "planned::faults::an_expert_that_is_none_is_refused_on_all_ranks_and_streams_go_on",
        8,
        1,
        || {
            on_ranks(&[0, 0, 1], &small(), |world| {
                let group = world.all().unwrap();
                let mut rank = Rank::<bf16>::new(&group, &Case::across(&[0, 0, 1], 4, 2));
                rank.round(&input(world.rank()));
                for (id, fault) in [
                    (4, PlanError::ExpertOutOfRange { token: 2, k: 1, expert: 4, experts: 4 }),
                    (-2, PlanError::ExpertOutOfRange { token: 2, k: 1, expert: -2, experts: 4 }),
                ] {
                    let mut bad = input(world.rank());
                    if world.rank() == 1 {
                        bad.ids[5] = id;
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
        },
    );
}

#[test]
fn a_tensor_of_another_shape_is_refused_on_all_ranks() {
    on_devices("planned::faults::a_tensor_of_another_shape_is_refused_on_all_ranks", 8, 2, || {
        on_ranks(&[0; 2], &small(), |world| {
            let group = world.all().unwrap();
            let mut rank = Rank::<bf16>::new(&group, &Case::new(2, 4, 2));
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
                    assert!(
                        matches!(refused, Error::Call(CallError::PeerRefused { peer: 0, .. })),
                        "{refused}"
                    );
                }
            }
            // A target of another shape is found when rows are on their way: nobody gets sums.
            let (_, handle) = rank.dispatch(&input(world.rank())).unwrap();
            let columns = if world.rank() == 1 { 15 } else { 16 };
            let out = rank.out.part(5 * columns * 2);
            let y = handle.output().unwrap();
            let refused = rank.planned.combine(y, &handle, &out).unwrap().finish().unwrap_err();
            match world.rank() {
                1 => assert!(matches!(refused, Error::Plan(PlanError::WrongShape { .. })), "{refused}"),
                _ => {
                    assert!(
                        matches!(refused, Error::Call(CallError::PeerRefused { peer: 1, .. })),
                        "{refused}"
                    );
                }
            }
            drained(&rank);
            if world.rank() == 0 {
                let stream = rank.stream.clone();
                assert_eq!(
                    rank.rows.read::<u16>(&stream, &out),
                    [0; 80],
                    "sums of a refused combine are zeros"
                );
                assert_eq!(handle.status_now(), Status::PEER_REFUSED);
            }
            drop(handle);
            rank.round(&input(world.rank()));
        });
    });
}

#[test]
fn over_budget_every_rank_gets_the_error_that_the_host_gives() {
    on_devices("planned::faults::over_budget_every_rank_gets_the_error_that_the_host_gives", 8, 3, || {
        let mode = Mode::Budget { rows: 6, overflow: Overflow::Error };
        on_ranks(&[0; 3], &small(), |world| {
            let group = world.all().unwrap();
            let mut rank = Rank::<bf16>::new(&group, &Case { mode, ..Case::new(3, 4, 2) });
            let mine = input(world.rank());
            let routing = Routing::new(2, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
            let expected = rank.host.dispatch(&mine.x, &routing).map(drop).unwrap_err();
            assert!(matches!(expected, Error::Call(CallError::OverBudget { budget: 6, .. })), "{expected}");
            assert_eq!(rank.dispatch(&mine).map(drop).unwrap_err(), expected);
            drained(&rank);
        });
    });
}

#[test]
fn without_room_every_rank_gets_the_same_error() {
    on_devices("planned::faults::without_room_every_rank_gets_the_same_error", 8, 4, || {
        on_ranks(&[0; 2], &small(), |world| {
            let group = world.all().unwrap();
            let mut rank = Rank::<bf16>::with(&group, &Case::new(2, 4, 2), |builder| builder.pool(256));
            let refused = rank.dispatch(&input(world.rank())).map(drop).unwrap_err();
            let space = "pool of the exchange";
            assert!(
                matches!(refused, Error::Memory(MemoryError::OutOfSpace { free: 256, total: 256, space: seen, .. }) if seen == space),
                "{refused}"
            );
            drained(&rank);
        });
    });
}

#[test]
fn more_dispatches_than_seats_are_not_made() {
    on_devices("planned::faults::more_dispatches_than_seats_are_not_made", 8, 5, || {
        on_ranks(&[0; 2], &small(), |world| {
            let group = world.all().unwrap();
            let mut rank = Rank::<bf16>::new(&group, &Case { seats: 1, ..Case::new(2, 4, 2) });
            let alive = rank.dispatch(&input(world.rank())).unwrap();
            let refused = rank.dispatch(&input(world.rank())).map(drop).unwrap_err();
            assert_eq!(refused, CallError::NoSeat { seats: 1 }.into());
            drop(alive);
            rank.round(&input(world.rank()));
        });
    });
}

#[test]
fn where_all_streams_share_one_hardware_queue_the_exchange_is_refused() {
    on_devices(
        "planned::faults::where_all_streams_share_one_hardware_queue_the_exchange_is_refused",
        1,
        6,
        || {
            on_ranks(&[0; 2], &small(), |world| {
                let group = world.all().unwrap();
                let stream = stream(world.rank());
                let case = Case::new(2, 4, 2);
                let built = PlannedExchange::builder(case.settings::<bf16>(&group), stream).build();
                let refused = built.map(drop).unwrap_err();
                let expected = DeviceError::SharedQueue { device: world.rank(), tried: 4 };
                assert_eq!(refused, expected.into());
            });
        },
    );
}

#[test]
fn more_memory_than_can_be_counted_is_refused_on_all_ranks() {
    on_devices("planned::faults::more_memory_than_can_be_counted_is_refused_on_all_ranks", 8, 20, || {
        on_ranks(&[0, 1], &small(), |world| {
            let group = world.all().unwrap();
            let settings = Case::new(2, 4, 2).settings::<bf16>(&group).max_tokens(1 << 28);
            let built = PlannedExchange::builder(settings, stream(world.rank())).seats(u32::MAX).build();
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
    (nodes, route): ([u32; 3], Route),
    options: &Options,
    body: impl Fn(&mut Rank<bf16>, bool) + Sync,
) {
    on_ranks(&nodes, options, |world| {
        let group = world.all().unwrap();
        let mut rank = Rank::<bf16>::new(&group, &Case { route, ..Case::across(&nodes, 4, 2) });
        rank.round(&input(world.rank()));
        body(&mut rank, world.rank() == 1);
        if world.rank() == 1 {
            // Lives until the others have found out.
            let since = Instant::now();
            while world.health().check().is_ok() {
                assert!(since.elapsed() < LONG, "nobody noticed");
                std::thread::yield_now();
            }
        }
    });
}

#[test]
fn a_cancelled_world_ends_all_waits_of_streams() {
    on_devices("planned::faults::a_cancelled_world_ends_all_waits_of_streams", 8, 7, || {
        WAYS.into_iter().for_each(cancelled);
    });
}

fn cancelled((nodes, route): ([u32; 3], Route)) {
    let all = std::sync::Barrier::new(nodes.len());
    on_ranks(&nodes, &small(), |world| {
        let group = world.all().unwrap();
        let mut rank = Rank::<bf16>::new(&group, &Case { route, ..Case::across(&nodes, 4, 2) });
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
        let mine = input(world.rank());
        let stream = rank.stream.clone();
        let experts = rank.experts.fill(&stream, &mine.ids);
        let refused = rank.planned.dispatch(Tokens { x: &experts, experts: &experts, weights: &experts });
        assert_eq!(refused.map(drop).unwrap_err(), cause.into(), "new calls are refused");
    });
}

#[test]
fn a_rank_that_makes_no_call_is_named_after_the_deadline() {
    on_devices("planned::faults::a_rank_that_makes_no_call_is_named_after_the_deadline", 8, 8, || {
        let mut options = small();
        for way in WAYS {
            // Who waits for a relay waits an eighth longer than the relay does: as long as ranks may begin apart.
            options.clocks.deadline = Duration::from_secs(if way.1 == Route::Pxn { 12 } else { 3 });
            ended_by(way, &options, |rank, absent| {
                if absent {
                    return;
                }
                let me = rank.planned.rank();
                let refused = rank.dispatch(&input(me)).map(drop).unwrap_err();
                let Error::World(Cause::Stalled { rank: 1, by, .. }) = refused else { panic!("{refused}") };
                assert!(by != 1);
                drained(rank);
            });
        }
    });
}
