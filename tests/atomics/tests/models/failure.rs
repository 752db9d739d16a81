//! Threads that declare a world dead, and those that watch it.

use std::sync::Arc;

use atomics::mutation::{Model, prove};
use atomics::sync::failure::Failure;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

/// Fails with a cause, as the health of a world does: watchers are called by the first.
fn fail(failure: &Failure<u32>, cause: u32) {
    let watchers = failure.fail(cause, cause);
    let seen = failure.cause().copied().expect("it has failed for this thread");
    assert_eq!(failure.status(), seen);
    watchers.iter().flatten().for_each(|watcher| watcher(&seen));
}

fn look(failure: &Failure<u32>) {
    let status = failure.status();
    if status != 0 {
        assert_eq!(failure.cause(), Some(&status), "the cause is there with the word");
    }
}

fn two_causes() {
    let failure = Arc::new(Failure::default());
    let other = Arc::clone(&failure);
    let other = thread::spawn(move || fail(&other, 2));
    fail(&failure, 1);
    other.join().unwrap();
    look(&failure);
}

fn cause_and_look() {
    let failure = Arc::new(Failure::default());
    let failing = Arc::clone(&failure);
    let failing = thread::spawn(move || fail(&failing, 1));
    look(&failure);
    failing.join().unwrap();
}

/// A watcher comes while `causes` threads fail.
fn watch(causes: u32) {
    let (failure, calls) = (Arc::new(Failure::default()), Arc::new(AtomicU32::new(0)));
    let failing: Vec<_> = (1..=causes)
        .map(|cause| {
            let failure = Arc::clone(&failure);
            thread::spawn(move || fail(&failure, cause))
        })
        .collect();
    let counted = Arc::clone(&calls);
    let watcher = Box::new(move |_: &u32| _ = counted.fetch_add(1, Ordering::Relaxed));
    if let Some(late) = failure.watch(watcher) {
        late(failure.cause().expect("a late watcher finds the cause"));
    }
    failing.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(calls.load(Ordering::Relaxed), 1, "each watcher is called once");
}

#[test]
fn failure_has_one_cause_and_each_watcher_hears_it_once() {
    let models = [
        Model::new("a look at a failing world", cause_and_look),
        Model::new("two causes", two_causes),
        Model::new("a watcher of one cause", || watch(1)),
        Model::within("a watcher of two causes", 2, || watch(2)),
    ];
    prove(&["src/sync/failure.rs"], &models);
}
