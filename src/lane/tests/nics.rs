//! Tests of the verbs lane only: bits and counts that agree, keys that expire, NICs that fall
//! silent or vanish. Late data, and data from a NIC that fails, neither touch present data nor
//! block other ranks.
//!
//! ```text
//!   world 1   puts --> NIC: held | silent | gone | port down | queue pair lost
//!               |                              `--> cause: named by all ranks, with the pair and the status
//!   world 2   puts, while requests of world 1 still execute: they meet keys that have expired
//! ```
//!
//! They run on NICs without hardware; `tests/testbed` runs the same lane over a real connection.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use half::bf16;

use crate::bootstrap::Timeouts;
use crate::config::{Config, NetChoice};
use crate::error::{Cause, CompletionStatus, Error, LaneError, VerbsError};
use crate::gate::{Pattern, synthetic};
use crate::lane::flag::WaitLimits;
use crate::lane::net::{Fabric, RemoteAddress, Settings, SignalMode};
use crate::lane::{NicCounters, PeerLane};
use crate::memory::Segment;
use crate::plan::SumOrder;
use crate::schedule::Tag;
use crate::topology::Route;
use crate::{ExpertParallel, Options, World};

pub(super) const SHORT: Duration = Duration::from_secs(20);

pub(super) fn options(fabric: &Arc<Fabric>, signal: impl Into<Option<SignalMode>>) -> Options {
    let settings = Settings { signal: signal.into(), ..Settings::default() };
    Options {
        config: Config { heap: 6 << 20, symmetric: 4 << 20, ..Config::default() },
        timeouts: Timeouts { deadline: SHORT, ..Timeouts::default() },
        net: NetChoice::Verbs,
        forecast: true,
        fake_verbs: Some(fabric.ground(settings)),
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
    let mut ep = ExpertParallel::builder(&world.all()?)
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
fn a_round_over_nics_gives_the_bits_of_one_over_the_loop_lane() {
    for nodes in [&[0, 0, 1, 1][..], &[0, 1, 0, 1, 1]] {
        for (route, order) in Route::ALL.iter().flat_map(|route| SumOrder::ALL.map(|order| (*route, order))) {
            let looped = Options {
                net: NetChoice::Loopback,
                fake_verbs: None,
                ..options(&Fabric::new(&["a"]), SignalMode::Write)
            };
            let expected = on_ranks(nodes, &looped, |world| round_trip(&world, route, order).unwrap());
            for signal in SignalMode::ALL {
                let fabric = Fabric::new(&["nic0", "nic1"]);
                fabric.hold();
                if signal != SignalMode::Write {
                    fabric.shuffle();
                }
                let seen = on_ranks(nodes, &options(&fabric, signal), |world| {
                    assert_eq!(world.net().unwrap().lane, "verbs");
                    let out = round_trip(&world, route, order).unwrap();
                    let (done, told) = (world.nic_counters(), world.nic_forecast());
                    let exact =
                        |counters: NicCounters| NicCounters { received: 0, completions: 0, ..counters };
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
fn token_buffer_rows_are_read_in_place_others_copied_once() {
    const HIDDEN: usize = 1024;
    for route in Route::ALL {
        let fabric = Fabric::new(&["nic0"]);
        let inter_node_bytes = on_ranks(&[0, 0, 1, 1], &options(&fabric, SignalMode::Write), |world| {
            let group = world.all().unwrap();
            let builder = ExpertParallel::builder(&group).experts(8).top_k(4).hidden(HIDDEN);
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
        assert!(inter_node_bytes.iter().all(|&bytes| bytes >= 20 * 2048), "{inter_node_bytes:?}");
    }
}

#[test]
fn silent_nic_ends_world_and_is_named_with_pair_and_status() {
    for route in Route::ALL {
        let fabric = Fabric::new(&["nic0", "nic1"]);
        let errors = on_ranks(&[0, 0, 1, 1], &options(&fabric, SignalMode::Write), |world| {
            round_trip(&world, route, SumOrder::Expert).unwrap();
            world.all().unwrap().gather(&[]).unwrap();
            if world.rank() == 0 {
                fabric.silence("nic1");
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
fn vanished_nic_is_error_of_its_rank_and_ends_world_for_all() {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    let errors = on_ranks(&[0, 1], &options(&fabric, SignalMode::Write), |world| {
        let mut window = world.all().unwrap().window(64).unwrap();
        window.barrier().unwrap();
        world.all().unwrap().gather(&[]).unwrap();
        if world.rank() == 0 {
            fabric.remove("nic0");
        }
        window.barrier().unwrap_err()
    });
    let own = matches!(
        &errors[0],
        Error::Lane(LaneError::Verbs(
            VerbsError::NicLost { .. }
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
fn a_port_that_is_down_for_a_moment_changes_no_bit() {
    for signal in SignalMode::ALL {
        let expected = on_ranks(&[0, 1], &options(&Fabric::new(&["nic0", "nic1"]), signal), |world| {
            round_trip(&world, Route::Direct, SumOrder::Expert).unwrap()
        });
        let fabric = Fabric::new(&["nic0", "nic1"]);
        let seen = on_ranks(&[0, 1], &options(&fabric, signal), |world| {
            round_trip(&world, Route::Direct, SumOrder::Expert).unwrap();
            world.all().unwrap().gather(&[]).unwrap();
            if world.rank() == 0 {
                fabric.port_down("nic0");
            }
            world.all().unwrap().gather(&[]).unwrap();
            let before = fabric.statistics("nic1").requests;
            world.all().unwrap().gather(&[]).unwrap();
            std::thread::scope(|scope| {
                if world.rank() == 1 {
                    // Up again once something waits for it.
                    scope.spawn(|| {
                        while fabric.statistics("nic1").requests == before && world.health().check().is_ok() {
                            std::thread::yield_now();
                        }
                        fabric.port_up("nic0");
                    });
                }
                round_trip(&world, Route::Direct, SumOrder::Expert).unwrap()
            })
        });
        assert!(seen == expected, "{signal:?}");
    }
}

#[test]
fn a_port_that_stays_down_is_blamed_on_its_rank_by_all() {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    let options = options(&fabric, SignalMode::Write);
    let settings =
        Settings { grace: Some(Duration::ZERO), signal: Some(SignalMode::Write), ..Settings::default() };
    let options = Options { fake_verbs: Some(fabric.ground(settings)), ..options };
    let errors = on_ranks(&[0, 1], &options, |world| {
        let mut window = world.all().unwrap().window(64).unwrap();
        window.barrier().unwrap();
        world.all().unwrap().gather(&[]).unwrap();
        if world.rank() == 0 {
            fabric.port_down("nic0");
        }
        // The event alone tells.
        while world.health().check().is_ok() {
            std::thread::yield_now();
        }
        window.barrier().unwrap_err()
    });
    let own = VerbsError::PortDown { nic: "nic0".into(), port: 1, state: "down" };
    assert!(matches!(&errors[0], Error::Lane(LaneError::Verbs(error)) if *error == own), "{errors:?}");
    assert!(matches!(&errors[1], Error::World(Cause::Nic { by: 0 })), "{errors:?}");
}

#[test]
fn a_lost_queue_pair_is_blamed_on_its_own_peer() {
    let fabric = Fabric::new(&["nic0", "nic1", "nic2"]);
    let errors = on_ranks(&[0, 1, 2], &options(&fabric, SignalMode::Write), |world| {
        let mut window = world.all().unwrap().window(64).unwrap();
        window.barrier().unwrap();
        world.all().unwrap().gather(&[]).unwrap();
        if world.rank() == 0 {
            fabric.lose_queue_pair("nic0", "nic2");
            // Nothing is asked of the queue pair, so the event alone tells.
            while world.health().check().is_ok() {
                std::thread::yield_now();
            }
        }
        window.barrier().unwrap_err()
    });
    let own = matches!(
        &errors[0],
        Error::Lane(LaneError::Verbs(VerbsError::QueuePairLost { nic, peer: 2, .. })) if nic == "nic0"
    );
    assert!(own, "{errors:?}");
    assert!(matches!(&errors[1], Error::World(Cause::Connection { rank: 2, by: 0 })), "{errors:?}");
}

#[test]
fn requests_of_lost_queue_pair_blame_peer_before_its_event() {
    let fabric = Fabric::new(&["nic0", "nic1", "nic2"]);
    let errors = on_ranks(&[0, 1, 2], &options(&fabric, SignalMode::Write), |world| {
        let mut window = world.all().unwrap().window(64).unwrap();
        window.barrier().unwrap();
        world.all().unwrap().gather(&[]).unwrap();
        if world.rank() == 0 {
            fabric.fail_queue_pair("nic0", "nic2", 0);
        }
        // One barrier may pass by what the peer had sent before.
        (0..).find_map(|_| window.barrier().err()).unwrap()
    });
    assert!(matches!(&errors[1], Error::World(Cause::Connection { rank: 2, by: 0 })), "{errors:?}");
    // The NIC was asked, and nothing waited for its answer.
    assert_eq!(fabric.statistics("nic0").locked_queries, 0);
}

#[test]
fn ranks_that_signal_differently_do_not_join() {
    let fabric = Fabric::new(&["nic0"]);
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
fn put_into_window_dropped_by_owner_meets_invalid_key() {
    let fabric = Fabric::new(&["nic0"]);
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

#[test]
fn late_requests_of_failed_world_are_counted_and_miss_next_one() {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    let late = on_ranks(&[0, 1], &options(&fabric, SignalMode::Write), |old| {
        let mut window = old.all().unwrap().window(4096).unwrap();
        window.barrier().unwrap();
        old.all().unwrap().gather(&[]).unwrap();
        if old.rank() == 0 {
            // Posted, and not yet on its way when the world ends.
            fabric.hold();
            window.put_signal(1, 0, &[0xee; 4096], 1).unwrap();
            old.cancel();
        }
        let new = match old.rank() {
            0 => old.rebuild(SHORT, 1).unwrap(),
            _ => {
                assert_eq!(window.wait_until(0, 1).unwrap_err(), Error::World(Cause::Cancelled { by: 0 }));
                let new = old.rebuild(SHORT, 1).unwrap();
                drop((window, old));
                new.all().unwrap().gather(&[]).unwrap();
                return finish(&new, None, &fabric);
            }
        };
        new.all().unwrap().gather(&[]).unwrap();
        finish(&new, Some(&old), &fabric)
    });
    assert_eq!(late, [Some(2), None], "the put and its signal");
}

/// The next world works and is clean; how many requests of the old one have failed, if this rank
/// still has it.
fn finish(new: &World, old: Option<&World>, fabric: &Fabric) -> Option<u64> {
    let group = new.all().unwrap();
    let mut window = group.window(4096).unwrap();
    if let Some(old) = old {
        // Now it leaves, and no peer answers: the put fails, and then the requests behind it.
        fabric.flush();
        let until = Instant::now() + SHORT;
        while old.nic_counters().failed < 2 {
            fabric.give_up();
            assert!(Instant::now() < until);
            std::thread::yield_now();
        }
    }
    group.gather(&[]).unwrap();
    let mut seen = vec![1; 4096];
    window.read(0, &mut seen).unwrap();
    assert!(seen.iter().all(|&byte| byte == 0));
    group.gather(&[]).unwrap();
    window.put_signal(1 - new.rank(), 8, b"new", 1).unwrap();
    window.wait_until(1 - new.rank(), 1).unwrap();
    window.barrier().unwrap();
    old.map(|old| old.nic_counters().failed)
}

#[test]
fn late_writes_of_a_dropped_window_do_not_land_in_the_next() {
    for signal in SignalMode::ALL {
        let fabric = Fabric::new(&["nic0", "nic1"]);
        fabric.hold();
        let dirty = on_ranks(&[0, 1], &options(&fabric, signal), |world| {
            let group = world.all().unwrap();
            let mut dirty = Vec::new();
            for _ in 0..20 {
                let mut window = group.window(64).unwrap();
                if world.rank() == 0 {
                    window.put_signal(1, 0, &[9; 8], 5).unwrap();
                }
                drop(window);
                let mut window = group.window(64).unwrap();
                group.gather(&[]).unwrap();
                if world.rank() == 0 {
                    window.signal(1, 1).unwrap();
                    window.quiet().unwrap();
                } else {
                    window.wait_until(0, 1).unwrap();
                    let mut seen = [0; 8];
                    window.read(0, &mut seen).unwrap();
                    dirty.push(seen[0]);
                }
                group.gather(&[]).unwrap();
            }
            dirty
        });
        assert_eq!(dirty[1], vec![0; 20], "{signal:?}");
    }
}

#[test]
fn all_nics_of_a_rank_are_used_under_pxn() {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    let mut options = options(&fabric, SignalMode::Write);
    let nics = vec!["nic0".to_owned(), "nic1".to_owned()];
    options.fake_verbs = Some(fabric.ground(Settings { nics, ..Settings::default() }));
    on_ranks(&[0, 0, 1, 1, 2, 2, 3, 3], &options, |world| {
        round_trip(&world, Route::Pxn, SumOrder::Expert).unwrap();
    });
    let used = ["nic0", "nic1"].map(|nic| fabric.statistics(nic).requests);
    assert!(used.iter().all(|&requests| requests > 0), "{used:?}");
}

#[test]
fn vanished_nic_of_idle_rank_ends_world_of_others() {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    let told = AtomicBool::new(false);
    let causes = on_ranks(&[0, 1], &options(&fabric, SignalMode::Write), |world| {
        let mut window = world.all().unwrap().window(64).unwrap();
        window.barrier().unwrap();
        world.all().unwrap().gather(&[]).unwrap();
        if world.rank() == 0 {
            fabric.remove("nic0");
            let until = Instant::now() + SHORT;
            while !told.load(Ordering::Acquire) {
                assert!(Instant::now() < until, "the other rank hears nothing");
                std::thread::yield_now();
            }
        } else {
            window.wait_until(0, 100).unwrap_err();
            told.store(true, Ordering::Release);
        }
        world.health().cause().unwrap()
    });
    for cause in causes {
        assert!(matches!(cause, Cause::Nic { by: 0 } | Cause::Connection { rank: 0, .. }), "{cause}");
    }
}

#[test]
fn vanished_nic_is_noticed_after_peer_left_normally() {
    let fabric = Fabric::new(&["nic0", "nic1", "nic2"]);
    let seen = on_ranks(&[0, 1, 2], &options(&fabric, SignalMode::Write), |world| {
        let mut window = world.all().unwrap().window(64).unwrap();
        window.barrier().unwrap();
        world.all().unwrap().gather(&[]).unwrap();
        if world.rank() == 1 {
            return None;
        }
        while !world.health().is_absent(1) {
            std::thread::yield_now();
        }
        let pair = world.group(&[0, 2]).unwrap();
        pair.gather(&[]).unwrap();
        let until = Instant::now() + SHORT;
        if world.rank() == 0 {
            fabric.remove("nic0");
            while world.health().check().is_ok() && Instant::now() < until {
                std::thread::yield_now();
            }
            pair.gather(&[]).ok();
            return Some(world.health().cause());
        }
        pair.gather(&[]).ok();
        None
    });
    assert!(seen[0].as_ref().unwrap().is_some(), "{seen:?}");
}

#[test]
fn flags_are_strict_whatever_the_size_of_the_symmetric_heap() {
    for signal in SignalMode::ALL {
        let fabric = Fabric::new(&["nic0", "nic1"]);
        let mut options = options(&fabric, signal);
        options.config.symmetric = 4096 + 100;
        let seen = on_ranks(&[0, 1], &options, |world| {
            let mut window = world.all().unwrap().window(4096 + 64)?;
            window.barrier()
        });
        assert!(seen.iter().all(Result::is_ok), "{signal:?}: {seen:?}");
    }
}

#[test]
fn a_flush_that_makes_progress_is_not_late() {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    fabric.hold();
    let mut options = options(&fabric, SignalMode::Write);
    let settings = Settings { chunk: 1024, in_flight: 16384, ..Settings::default() };
    options.fake_verbs = Some(fabric.ground(settings));
    on_ranks(&[0, 1], &options, |world| {
        let group = world.all().unwrap();
        let lanes = group.lanes(Route::Direct).unwrap();
        let range = group.take_symmetric(3 << 20).unwrap();
        if world.rank() == 0 {
            let window = range.window();
            let PeerLane::Net(connection) = &lanes.reach[1] else { panic!("over a connection") };
            let bytes = window.bytes(0).unwrap();
            let limits = lanes.limits_of(1);
            connection.put(window.target(1, 0, 3 << 20).unwrap(), bytes, limits).unwrap();
            let before = connection.counters().completions;
            // Each poll completes something, so no wait is ever long enough to count: no time is
            // too short.
            let end = connection.flush(WaitLimits { deadline: Duration::ZERO, ..limits });
            let after = connection.counters().completions;
            assert!(end.is_ok(), "{end:?}, completions {before} -> {after}");
        }
        group.gather(&[]).unwrap();
    });
}

#[test]
fn signal_without_staging_is_made_good_by_next_signal() {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    let mut options = options(&fabric, SignalMode::Immediate);
    let settings = Settings {
        chunk: 4096,
        in_flight: 16384,
        signal: Some(SignalMode::Immediate),
        ..Settings::default()
    };
    options.fake_verbs = Some(fabric.ground(settings));
    let seen = on_ranks(&[0, 1], &options, |world| {
        let group = world.all().unwrap();
        let lanes = group.lanes(Route::Direct).unwrap();
        let range = group.take_symmetric(64 << 10).unwrap();
        let window = range.window();
        if world.rank() == 0 {
            let PeerLane::Net(connection) = &lanes.reach[1] else { panic!("over a connection") };
            let limits = lanes.limits_of(1);
            let line = window.target(1, 0, 64).unwrap();
            connection.signal(line, 1, None, limits).unwrap();
            connection.flush(limits).unwrap();
            fabric.silence("nic1");
            let short = WaitLimits { deadline: Duration::from_millis(20), ..limits };
            let data = window.target(1, 4096, 16384).unwrap();
            for len in [12288, 4096] {
                connection.put(data, &vec![1; len], short).unwrap();
            }
            let tag = Some(Tag::default());
            assert!(connection.signal(line, 2, tag, short).is_err());
            fabric.change("nic1", |nic| nic.silent = false);
            fabric.flush();
            connection.signal(line, 3, None, limits).unwrap();
            connection.flush(limits).unwrap();
            group.gather(&[]).unwrap();
            return 3;
        }
        group.gather(&[]).unwrap();
        let mut seen = [0u64];
        let until = Instant::now() + Duration::from_secs(2);
        while seen[0] < 3 && Instant::now() < until {
            lanes.progress();
            window.mapped.read(1, window.parts[1].offset, &mut seen).unwrap();
        }
        seen[0]
    });
    assert_eq!(seen, [3, 3]);
}

#[test]
fn late_puts_of_old_world_miss_memory_registered_in_new_one() {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    let seen = on_ranks(&[0, 1], &options(&fabric, SignalMode::Write), |world| {
        let memory = Segment::create("sidelane-test", 1 << 16).unwrap();
        let fd = || memory.as_fd().try_clone_to_owned().unwrap();
        let mut old = world.all().unwrap().register(fd()).unwrap();
        old.barrier().unwrap();
        world.all().unwrap().gather(&[]).unwrap();
        if world.rank() == 0 {
            fabric.silence("nic0");
            old.put(1, 0, &[9; 100]).unwrap();
            world.cancel();
        }
        while world.health().check().is_ok() {
            std::thread::yield_now();
        }
        let next = world.rebuild(Duration::from_secs(10), 1).unwrap();
        let group = next.all().unwrap();
        let new = group.register(fd()).unwrap();
        group.gather(&[]).unwrap();
        if world.rank() == 0 {
            fabric.change("nic0", |nic| nic.silent = false);
            fabric.flush();
        }
        group.gather(&[]).unwrap();
        let mut seen = [0; 1];
        new.read(0, &mut seen).unwrap();
        group.gather(&[]).unwrap();
        seen[0]
    });
    assert_eq!(seen, [0, 0]);
}

#[test]
fn keys_of_a_peers_window_are_forgotten_with_own_window() {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    let faults = on_ranks(&[0, 1], &options(&fabric, SignalMode::Write), |world| {
        let group = world.all().unwrap();
        let memory = Segment::create("sidelane-test", 1 << 16).unwrap();
        let window = group.register(memory.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let lanes = group.lanes(Route::Direct).unwrap();
        group.gather(&[]).unwrap();
        if world.rank() == 1 {
            // The key itself is good until the world ends.
            group.gather(&[]).unwrap_err();
            return None;
        }
        let PeerLane::Net(connection) = &lanes.reach[1] else { panic!("over a connection") };
        // The heap is region 0.
        let put = || connection.put(RemoteAddress { region: 1, offset: 0 }, &[7; 8], lanes.limits_of(1));
        put().unwrap();
        connection.flush(lanes.limits_of(1)).unwrap();
        drop(window);
        put().unwrap_err();
        connection.fault()
    });
    let expected = VerbsError::NoKey { peer: 1, region: 1, offset: 0 };
    assert_eq!(faults, [Some(LaneError::Verbs(expected)), None]);
}

/// Rounds in which rank 1 saw a word in its memory before rows that rank 0 had put before it. The
/// second word waits in the queue together with the first, and the third follows it at once.
fn words_before_rows(fabric: &Arc<Fabric>, signal: SignalMode, rounds: u8) -> usize {
    const ROW: u64 = 4096;
    /// The place of each word, and of the rows before it.
    const WORDS: [(u64, &[u64]); 3] = [(0, &[1, 3, 5]), (6, &[7, 9, 11]), (12, &[])];
    const ROWS: u64 = 13;
    let seen = on_ranks(&[0, 1], &options(fabric, signal), |world| {
        let group = world.all().unwrap();
        let lanes = group.lanes(Route::Direct).unwrap();
        let range = group.take_symmetric(ROWS * ROW).unwrap();
        let window = range.window();
        let mut early = 0;
        for round in 1..=rounds {
            if world.rank() == 0 {
                let PeerLane::Net(connection) = &lanes.reach[1] else { panic!("over a connection") };
                let (limits, to) = (lanes.limits_of(1), |offset| window.target(1, offset, 1).unwrap());
                for (word, rows) in WORDS {
                    for row in rows {
                        connection.put(to(row * ROW), &vec![round; ROW as usize], limits).unwrap();
                    }
                    connection.devices().unwrap().write_word(to(word * ROW), round.into(), limits).unwrap();
                }
                connection.settle(limits).unwrap();
            } else {
                let read = |offset, into: &mut [u8]| {
                    window.mapped.read(1, window.parts[1].offset + offset, into).unwrap();
                };
                let (mut seen, mut ahead, until) = (0, false, Instant::now() + SHORT);
                while seen < WORDS.len() {
                    assert!(Instant::now() < until, "word {seen} of round {round} does not come");
                    lanes.progress();
                    let is_there = |&(word, _): &(u64, _)| {
                        let mut value = [0; 8];
                        read(word * ROW, &mut value);
                        u64::from_ne_bytes(value) == u64::from(round)
                    };
                    seen = WORDS.iter().rposition(is_there).map_or(0, |last| last + 1);
                    let mut memory = vec![0; (ROWS * ROW) as usize];
                    read(0, &mut memory);
                    let has_come =
                        |row: u64| memory[(row * ROW) as usize..][..ROW as usize] == [round; ROW as usize];
                    ahead |= WORDS[..seen].iter().any(|(_, rows)| !rows.iter().all(|&row| has_come(row)));
                }
                early += usize::from(ahead);
            }
            group.gather(&[]).unwrap();
        }
        if world.rank() == 0 {
            fabric.flush();
        }
        early
    });
    seen[1]
}

#[test]
fn device_word_overtakes_rows_only_if_signals_are_writes() {
    for signal in [SignalMode::FetchAdd, SignalMode::Immediate] {
        let fabric = Fabric::new(&["nic0", "nic1"]);
        fabric.hold();
        fabric.shuffle();
        assert_eq!(words_before_rows(&fabric, signal, 50), 0, "{signal:?}");
    }
    let fabric = Fabric::new(&["nic0", "nic1"]);
    fabric.hold();
    fabric.last_first();
    assert_eq!(words_before_rows(&fabric, SignalMode::Write, 1), 1);
}

#[test]
fn only_one_credit_grant_is_in_flight_at_a_time() {
    const RECEIVES: u64 = 256;
    let fabric = Fabric::new(&["nic0", "nic1"]);
    on_ranks(&[0, 1], &options(&fabric, SignalMode::Immediate), |world| {
        let group = world.all().unwrap();
        let mut window = group.window(64).unwrap();
        let last = 3 * RECEIVES;
        if world.rank() == 0 {
            group.gather(&[]).unwrap();
            (1..=RECEIVES).for_each(|value| window.signal(1, value).unwrap());
            group.gather(&[]).unwrap();
            // All but the first need credit.
            (RECEIVES + 1..=last).for_each(|value| window.signal(1, value).unwrap());
        } else {
            let posted = || fabric.statistics("nic1").requests;
            let before = posted();
            fabric.change("nic1", |nic| nic.mute = true);
            group.gather(&[]).unwrap();
            window.wait_until(0, RECEIVES).unwrap();
            let until = Instant::now() + SHORT;
            while posted() == before {
                assert!(Instant::now() < until, "nothing is granted");
                std::thread::yield_now();
            }
            assert_eq!(posted() - before, 1, "a grant for each quarter of the receives");
            fabric.change("nic1", |nic| nic.mute = false);
            fabric.flush();
            group.gather(&[]).unwrap();
            window.wait_until(0, last).unwrap();
        }
        group.gather(&[]).unwrap();
    });
}

#[test]
fn an_ended_world_takes_no_more_bytes_of_a_source() {
    let fabric = Fabric::new(&["nic0", "nic1"]);
    let fabric = &fabric;
    let seen = on_ranks(&[0, 1], &options(fabric, SignalMode::Write), |world| {
        let group = world.all().unwrap();
        let lanes = group.lanes(Route::Direct).unwrap();
        let range = group.take_symmetric(1 << 16).unwrap();
        let window = range.window();
        let at = window.parts[world.rank() as usize];
        if world.rank() == 0 {
            let PeerLane::Net(connection) = &lanes.reach[1] else { panic!("over a connection") };
            fabric.silence("nic1");
            let target = window.target(1, 0, 4096).unwrap();
            connection.put(target, &window.bytes(0).unwrap()[..4096], lanes.limits_of(1)).unwrap();
        }
        group.gather(&[]).unwrap();
        if world.rank() == 1 {
            world.cancel();
        }
        while world.health().check().is_ok() {
            std::thread::yield_now();
        }
        if world.rank() == 0 {
            let PeerLane::Net(connection) = &lanes.reach[1] else { panic!("over a connection") };
            connection.settle(lanes.limits_of(1)).unwrap_err();
            // The call has failed: the source is its owner's again.
            window.mapped.write(0, at.offset, &[7u8; 4096]).unwrap();
            fabric.change("nic1", |nic| nic.silent = false);
            fabric.flush();
            return 0;
        }
        let mut seen = [0u8];
        let until = Instant::now() + Duration::from_secs(1);
        while seen[0] == 0 && Instant::now() < until {
            window.mapped.read(1, at.offset, &mut seen).unwrap();
        }
        seen[0]
    });
    assert_eq!(seen, [0, 0]);
}
