//! Late data, and data from a NIC that fails: neither may touch present data or block other ranks.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::cards::{SHORT, on_ranks, options, round_trip};
use crate::World;
use crate::error::{Cause, Error};
use crate::lane::PeerLane;
use crate::lane::net::{Fabric, Settings, SignalMode};
use crate::lane::wait::WaitLimits;
use crate::memory::Segment;
use crate::plan::SumOrder;
use crate::schedule::Tag;
use crate::topology::Route;

#[test]
fn what_a_dead_world_had_under_way_is_counted_and_touches_nothing_of_the_next() {
    let fabric = Fabric::new(&["card0", "card1"]);
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
            0 => old.rebuild(SHORT).unwrap(),
            _ => {
                assert_eq!(window.wait_until(0, 1).unwrap_err(), Error::World(Cause::Cancelled { by: 0 }));
                let new = old.rebuild(SHORT).unwrap();
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
        let fabric = Fabric::new(&["card0", "card1"]);
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
fn all_cards_of_a_rank_are_used_under_pxn() {
    let fabric = Fabric::new(&["card0", "card1"]);
    let mut options = options(&fabric, SignalMode::Write);
    let cards = vec!["card0".to_owned(), "card1".to_owned()];
    options.stand_in = Some(fabric.ground(Settings { cards, ..Settings::default() }));
    on_ranks(&[0, 0, 1, 1, 2, 2, 3, 3], &options, |world| {
        round_trip(&world, Route::Pxn, SumOrder::Expert).unwrap();
    });
    let used = ["card0", "card1"].map(|card| fabric.statistics(card).requests);
    assert!(used.iter().all(|&requests| requests > 0), "{used:?}");
}

#[test]
fn a_card_that_vanishes_from_an_idle_rank_ends_the_world_of_the_others() {
    let fabric = Fabric::new(&["card0", "card1"]);
    let told = AtomicBool::new(false);
    let seen = on_ranks(&[0, 1], &options(&fabric, SignalMode::Write), |world| {
        let mut window = world.all().unwrap().window(64).unwrap();
        window.barrier().unwrap();
        world.all().unwrap().gather(&[]).unwrap();
        let until = Instant::now() + Duration::from_secs(5);
        if world.rank() == 0 {
            fabric.remove("card0");
            while world.health().check().is_ok() && Instant::now() < until {
                std::thread::yield_now();
            }
            let own = world.health().cause();
            while !told.load(Ordering::Acquire) && Instant::now() < until {
                std::thread::yield_now();
            }
            (own, Instant::now() < until)
        } else {
            let _ = window.wait_until(0, 100);
            told.store(true, Ordering::Release);
            (world.health().cause(), Instant::now() < until)
        }
    });
    assert!(seen.iter().all(|(_, in_time)| *in_time), "{seen:?}");
}

#[test]
fn a_card_that_vanishes_is_noticed_though_a_partner_has_left_in_peace() {
    let fabric = Fabric::new(&["card0", "card1", "card2"]);
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
        let until = Instant::now() + Duration::from_secs(5);
        if world.rank() == 0 {
            fabric.remove("card0");
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
        let fabric = Fabric::new(&["card0", "card1"]);
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
    let fabric = Fabric::new(&["card0", "card1"]);
    fabric.hold();
    let mut options = options(&fabric, SignalMode::Write);
    let settings = Settings { chunk: 1024, in_flight: 16384, ..Settings::default() };
    options.stand_in = Some(fabric.ground(settings));
    on_ranks(&[0, 1], &options, |world| {
        let group = world.all().unwrap();
        let lanes = group.lanes(Route::Direct).unwrap();
        let range = group.take_symmetric(3 << 20).unwrap();
        if world.rank() == 0 {
            let window = range.window();
            let PeerLane::Rail(rail) = &lanes.reach[1] else { panic!("over a wire") };
            let bytes = window.bytes(0).unwrap();
            let patience = lanes.patience(1);
            rail.put(window.target(1, 0, 3 << 20).unwrap(), bytes, patience).unwrap();
            let before = rail.counters().completions;
            let end = rail.flush(WaitLimits { deadline: Duration::from_millis(30), ..patience });
            let after = rail.counters().completions;
            assert!(end.is_ok(), "{end:?}, completions {before} -> {after}");
        }
        group.gather(&[]).unwrap();
    });
}

#[test]
fn a_signal_that_found_no_staging_can_be_made_up_for_by_the_next() {
    let fabric = Fabric::new(&["card0", "card1"]);
    let mut options = options(&fabric, SignalMode::Immediate);
    let settings =
        Settings { chunk: 4096, in_flight: 16384, signal: SignalMode::Immediate, ..Settings::default() };
    options.stand_in = Some(fabric.ground(settings));
    let seen = on_ranks(&[0, 1], &options, |world| {
        let group = world.all().unwrap();
        let lanes = group.lanes(Route::Direct).unwrap();
        let range = group.take_symmetric(64 << 10).unwrap();
        let window = range.window();
        if world.rank() == 0 {
            let PeerLane::Rail(rail) = &lanes.reach[1] else { panic!("over a wire") };
            let patience = lanes.patience(1);
            let line = window.target(1, 0, 64).unwrap();
            rail.signal(line, 1, None, patience).unwrap();
            rail.flush(patience).unwrap();
            fabric.silence("card1");
            let short = WaitLimits { deadline: Duration::from_millis(20), ..patience };
            let data = window.target(1, 4096, 16384).unwrap();
            for len in [12288, 4032, 64] {
                rail.put(data, &vec![1; len], short).unwrap();
            }
            let tag = Some(Tag::default());
            assert!(rail.signal(line, 2, tag, short).is_err());
            fabric.change("card1", |card| card.silent = false);
            fabric.flush();
            rail.signal(line, 3, None, patience).unwrap();
            rail.flush(patience).unwrap();
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
fn late_puts_of_a_rebuilt_world_do_not_land_in_memory_that_the_next_has_registered() {
    let fabric = Fabric::new(&["card0", "card1"]);
    let seen = on_ranks(&[0, 1], &options(&fabric, SignalMode::Write), |world| {
        let memory = Segment::create("sidelane-test", 1 << 16).unwrap();
        let fd = || memory.as_fd().try_clone_to_owned().unwrap();
        let mut old = world.all().unwrap().register(fd()).unwrap();
        old.barrier().unwrap();
        world.all().unwrap().gather(&[]).unwrap();
        if world.rank() == 0 {
            fabric.silence("card0");
            old.put(1, 0, &[9; 100]).unwrap();
            world.cancel();
        }
        while world.health().check().is_ok() {
            std::thread::yield_now();
        }
        let next = world.rebuild(Duration::from_secs(10)).unwrap();
        let group = next.all().unwrap();
        let new = group.register(fd()).unwrap();
        group.gather(&[]).unwrap();
        if world.rank() == 0 {
            fabric.change("card0", |card| card.silent = false);
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
fn an_ended_world_takes_no_more_bytes_of_a_source() {
    let fabric = Fabric::new(&["card0", "card1"]);
    let fabric = &fabric;
    let seen = on_ranks(&[0, 1], &options(fabric, SignalMode::Write), |world| {
        let group = world.all().unwrap();
        let lanes = group.lanes(Route::Direct).unwrap();
        let range = group.take_symmetric(1 << 16).unwrap();
        let window = range.window();
        let at = window.parts[world.rank() as usize];
        if world.rank() == 0 {
            let PeerLane::Rail(rail) = &lanes.reach[1] else { panic!("over a wire") };
            fabric.silence("card1");
            let target = window.target(1, 0, 4096).unwrap();
            rail.put(target, &window.bytes(0).unwrap()[..4096], lanes.patience(1)).unwrap();
        }
        group.gather(&[]).unwrap();
        if world.rank() == 1 {
            world.cancel();
        }
        while world.health().check().is_ok() {
            std::thread::yield_now();
        }
        if world.rank() == 0 {
            let PeerLane::Rail(rail) = &lanes.reach[1] else { panic!("over a wire") };
            rail.settle(lanes.patience(1)).unwrap_err();
            // The call has failed: the source is its owner's again.
            window.mapped.write(0, at.offset, &[7u8; 4096]).unwrap();
            fabric.change("card1", |card| card.silent = false);
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
