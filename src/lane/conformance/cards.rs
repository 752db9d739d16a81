//! Tests of the verbs lane only: bits and counts that agree, keys that expire, NICs that fall
//! silent or vanish. They run on NICs without hardware; `tests/testbed` runs the same lane over a
//! real connection.

use std::sync::Arc;
use std::time::Duration;

use half::bf16;

use crate::bootstrap::Timeouts;
use crate::config::{Config, NetChoice};
use crate::error::{Cause, CompletionStatus, Error, LaneError, VerbsError};
use crate::gate::{Pattern, synthetic};
use crate::lane::RailCounters;
use crate::lane::net::{Fabric, Settings, SignalMode};
use crate::plan::SumOrder;
use crate::topology::Route;
use crate::{ExpertParallel, Options, World};

pub(super) const SHORT: Duration = Duration::from_secs(20);

pub(super) fn options(fabric: &Arc<Fabric>, signal: SignalMode) -> Options {
    let settings = Settings { signal, ..Settings::default() };
    Options {
        config: Config { heap: 16 << 20, symmetric: 4 << 20, ..Config::default() },
        clocks: Timeouts { deadline: SHORT, ..Timeouts::default() },
        rail: NetChoice::Verbs,
        forecast: true,
        stand_in: Some(fabric.ground(settings)),
        ..Options::default()
    }
}

/// Runs `body` on every rank; a rank that panics ends its world, so that the others do not wait for
/// it.
pub(super) fn on_ranks<T: Send>(
    nodes: &[u32],
    options: &Options,
    body: impl Fn(World) -> T + Sync,
) -> Vec<T> {
    let worlds = World::threads_with(nodes, options).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = worlds.into_iter().map(|world| scope.spawn(|| body(world))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A round trip of random rows: what came out of the combine.
pub(super) fn round_trip(world: &World, route: Route, order: SumOrder) -> Result<Vec<bf16>, Error> {
    const HIDDEN: usize = 64;
    let mut ep = ExpertParallel::builder(&world.all()?)?
        .experts(13)
        .top_k(4)
        .hidden(HIDDEN)
        .route(route)
        .sum_order(order)
        .build()?;
    let routing = synthetic(Pattern::Uniform, 13, 4, 40, 7, world.rank())?;
    let x: Vec<bf16> =
        (0..40 * HIDDEN).map(|i| bf16::from_f32(((i * 37 + world.rank() as usize) % 97) as f32)).collect();
    let mut out = Vec::new();
    for _ in 0..3 {
        let (rows, handle) = ep.dispatch(&x, &routing)?;
        let mut y = handle.output()?;
        y.rows_mut::<bf16>()?.copy_from_slice(rows.rows::<bf16>()?);
        out = ep.combine::<bf16>(y, &handle)?;
    }
    Ok(out)
}

#[test]
fn a_round_over_cards_gives_the_bits_of_one_over_the_loop_lane() {
    for nodes in [&[0, 0, 1, 1][..], &[0, 1, 0, 1, 1]] {
        for (route, order) in Route::ALL.iter().flat_map(|route| SumOrder::ALL.map(|order| (*route, order))) {
            let looped = Options {
                rail: NetChoice::Loopback,
                stand_in: None,
                ..options(&Fabric::new(&["a"]), SignalMode::Write)
            };
            let expected = on_ranks(nodes, &looped, |world| round_trip(&world, route, order).unwrap());
            for signal in SignalMode::ALL {
                let fabric = Fabric::new(&["card0", "card1"]);
                fabric.hold();
                let seen = on_ranks(nodes, &options(&fabric, signal), |world| {
                    assert_eq!(world.net().unwrap().lane, "verbs");
                    let out = round_trip(&world, route, order).unwrap();
                    let (done, told) = (world.nic_counters(), world.nic_forecast());
                    let exact =
                        |counters: RailCounters| RailCounters { received: 0, completions: 0, ..counters };
                    assert_eq!(exact(done), exact(told), "{nodes:?}, {route:?}, {order:?}, {signal:?}");
                    assert!(done.requests > 0 || route == Route::Pxn);
                    out
                });
                assert!(seen == expected, "{nodes:?}, {route:?}, {order:?}, {signal:?}");
                assert_eq!(fabric.leftovers(), (0, 0));
            }
        }
    }
}

#[test]
fn rows_of_a_token_buffer_are_read_where_they_lie_and_all_others_copied_once() {
    const HIDDEN: usize = 1024;
    for route in Route::ALL {
        let fabric = Fabric::new(&["card0"]);
        let rail_bytes = on_ranks(&[0, 0, 1, 1], &options(&fabric, SignalMode::Write), |world| {
            let group = world.all().unwrap();
            let builder = ExpertParallel::builder(&group).unwrap().experts(8).top_k(4).hidden(HIDDEN);
            let mut ep = builder.route(route).build().unwrap();
            let routing = synthetic(Pattern::Uniform, 8, 4, 30, 7, world.rank()).unwrap();
            let elsewhere = vec![bf16::ONE; 30 * HIDDEN];
            let mut buffer = ep.token_buffer(30).unwrap();
            buffer.rows_mut::<bf16>().unwrap().copy_from_slice(&elsewhere);
            let mut copied = |x: &[bf16]| {
                let before = world.nic_counters();
                let (rows, handle) = ep.dispatch(x, &routing).unwrap();
                drop(rows);
                (handle.report().unwrap().moved.inter_node_bytes, (world.nic_counters() - before).copied)
            };
            let (bytes, all) = copied(&elsewhere);
            let (again, control) = copied(buffer.rows().unwrap());
            assert_eq!((again, all), (bytes, bytes + control), "rank {}, {route:?}", world.rank());
            bytes
        });
        assert!(rail_bytes.iter().all(|&bytes| bytes >= 20 * 2048), "{rail_bytes:?}");
    }
}

#[test]
fn a_card_that_falls_silent_ends_the_world_and_is_named_with_its_queue_pair_and_status() {
    for route in Route::ALL {
        let fabric = Fabric::new(&["card0", "card1"]);
        let errors = on_ranks(&[0, 0, 1, 1], &options(&fabric, SignalMode::Write), |world| {
            round_trip(&world, route, SumOrder::Expert).unwrap();
            world.all().unwrap().gather(&[]).unwrap();
            if world.rank() == 0 {
                fabric.silence("card1");
                // Retries end whenever there is something to retry.
                std::thread::scope(|scope| {
                    let health = world.health();
                    scope.spawn(|| {
                        while health.check().is_ok() {
                            fabric.give_up();
                            std::thread::yield_now();
                        }
                    });
                    round_trip(&world, route, SumOrder::Expert).unwrap_err()
                })
            } else {
                round_trip(&world, route, SumOrder::Expert).unwrap_err()
            }
        });
        let mut typed = 0;
        for (rank, error) in errors.iter().enumerate() {
            match error {
                Error::World(Cause::Connection { .. }) => {}
                Error::Lane(LaneError::Verbs(VerbsError::Completion { status, peer, .. })) => {
                    assert_eq!(*status, CompletionStatus::RetriesExceeded);
                    assert_ne!(*peer as usize / 2, rank / 2, "the peer is of another node");
                    typed += 1;
                }
                error => panic!("rank {rank}: {error:?}"),
            }
        }
        assert!(typed > 0, "who saw it says what it saw: {errors:?}");
    }
}

#[test]
fn a_card_that_vanishes_is_an_error_of_its_rank_and_ends_the_world_for_all() {
    let fabric = Fabric::new(&["card0", "card1"]);
    let errors = on_ranks(&[0, 1], &options(&fabric, SignalMode::Write), |world| {
        round_trip(&world, Route::Direct, SumOrder::Expert).unwrap();
        world.all().unwrap().gather(&[]).unwrap();
        if world.rank() == 0 {
            fabric.remove("card0");
        }
        round_trip(&world, Route::Direct, SumOrder::Expert).unwrap_err()
    });
    let own = matches!(
        &errors[0],
        Error::Lane(LaneError::Verbs(
            VerbsError::CardLost { .. }
                | VerbsError::Post { .. }
                | VerbsError::Call { .. }
                | VerbsError::Completion { .. }
        ))
    );
    assert!(own, "{errors:?}");
    assert!(
        matches!(&errors[1], Error::World(Cause::Nic { by: 0 } | Cause::Connection { rank: 0, .. })),
        "{errors:?}"
    );
}

#[test]
fn ranks_that_signal_differently_do_not_join() {
    let fabric = Fabric::new(&["card0"]);
    let ranks: Vec<_> = std::thread::scope(|scope| {
        let hubs = crate::bootstrap::threads(2, Timeouts::default()).into_iter();
        let ranks: Vec<_> = hubs
            .zip([SignalMode::Write, SignalMode::Immediate])
            .map(|(hub, signal)| {
                let options = options(&fabric, signal);
                scope.spawn(move || {
                    let node = hub.rank().to_string();
                    let world = World::of(hub, options, &node).unwrap();
                    world.all().unwrap().window(64).unwrap_err()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for (error, peer) in ranks.iter().zip([1, 0]) {
        let differ = matches!(error, Error::Lane(LaneError::Verbs(VerbsError::SignalsDiffer { peer: p, .. })) if *p == peer);
        assert!(differ, "{error:?}");
    }
}

#[test]
fn a_put_into_a_window_that_its_owner_has_given_up_meets_a_dead_key() {
    let fabric = Fabric::new(&["card0"]);
    let errors = on_ranks(&[0, 1], &options(&fabric, SignalMode::Write), |world| {
        let group = world.all().unwrap();
        let memory = crate::memory::Segment::create("sidelane-test", 1 << 16).unwrap();
        let fd = std::os::fd::AsFd::as_fd(&memory).try_clone_to_owned().unwrap();
        let mut window = group.register(fd).unwrap();
        window.put_signal(1 - world.rank(), 0, &[1; 100], 1).unwrap();
        window.wait_until(1 - world.rank(), 1).unwrap();
        if world.rank() == 1 {
            drop(window);
            group.gather(&[]).unwrap();
            // Until the other has put.
            return group.gather(&[]).map(drop);
        }
        group.gather(&[]).unwrap();
        window.put(1, 0, &[2; 100]).and_then(|()| window.quiet())
    });
    let dead_key = |error: &Error| {
        matches!(
            error,
            Error::Lane(LaneError::Verbs(VerbsError::Completion {
                status: CompletionStatus::RemoteAccess,
                peer: 1,
                ..
            }))
        )
    };
    assert!(errors[0].as_ref().is_err_and(dead_key), "{errors:?}");
    assert!(errors[1].is_err(), "{errors:?}");
}
