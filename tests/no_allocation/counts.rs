//! The counter itself counts what it should, and its waits end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::counting::{Meeting, OF_LIBRARY, WATCHED, allocations, turn, until_others_sleep};

#[test]
fn the_counter_counts() {
    let before = allocations();
    let held = std::hint::black_box(vec![1u8; 100]);
    assert_eq!(allocations() - before, 1);
    drop(held);
}

/// Only threads whose name says that they take part in calls count as the library's.
#[test]
fn the_counter_knows_the_threads_of_calls() {
    let _turn = turn();
    WATCHED.store(true, Ordering::Relaxed);
    let counted = |name: &str| {
        let thread = std::thread::Builder::new().name(name.to_owned());
        let allocate = || {
            let before = OF_LIBRARY.load(Ordering::Relaxed);
            drop(std::hint::black_box(vec![1u8; 100]));
            OF_LIBRARY.load(Ordering::Relaxed) - before
        };
        thread.spawn(allocate).unwrap().join().unwrap()
    };
    assert_eq!(
        ["sidelane-relay-0", "sidelane-link-0", "sidelane-coord-0", "main"].map(counted),
        [1, 0, 0, 0]
    );
    WATCHED.store(false, Ordering::Relaxed);
}

/// A rank that fails before it meets the others ends their wait, and a thread that never sleeps
/// that for sleep.
#[test]
fn waits_for_ranks_and_threads_end() {
    let _turn = turn();
    let fails = |wait: &(dyn Fn() + Sync)| {
        let ended = std::thread::scope(|scope| scope.spawn(wait).join());
        assert!(ended.is_err(), "a wait that nothing ends");
    };
    fails(&|| _ = Meeting::new(2).wait_for(Duration::ZERO));
    // This thread runs.
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        fails(&|| until_others_sleep(Duration::ZERO));
        stop.store(true, Ordering::Relaxed);
    });
}
