//! Raising a flag that threads sleep on.

use std::sync::Arc;

use atomics::mutation::{Model, prove};
use atomics::sync::flag::FlagWords;
use atomics::sync::primitives::{AtomicU32, AtomicU64, Ordering, full_fence};
use loom::thread;

use crate::machine::Futex;

/// A flag line, as far as threads share it.
pub struct Line {
    value: AtomicU64,
    sleepers: AtomicU32,
    tag: AtomicU64,
    futex: Futex,
}

impl Line {
    pub fn new() -> Arc<Self> {
        let (value, sleepers, tag) = (AtomicU64::new(0), AtomicU32::new(0), AtomicU64::new(0));
        Arc::new(Line { value, sleepers, tag, futex: Futex::new() })
    }

    fn flag(&self) -> FlagWords<'_> {
        FlagWords::new(&self.value, &self.sleepers)
    }

    pub fn raise(&self, value: u64) {
        self.tag.store(10 * value, Ordering::Relaxed);
        self.flag().raise(value, full_fence, || self.futex.wake());
    }

    /// Waits as waiters of lanes do on their last step.
    pub fn wait_for(&self, value: u64) {
        loop {
            let seen = self.flag().value();
            if seen >= value {
                assert!(self.tag.load(Ordering::Relaxed) >= 10 * value, "the tag comes with the value");
                return;
            }
            self.flag().sleep(seen, || {
                self.futex.wait(|| self.value.load(Ordering::Relaxed) == seen);
            });
        }
    }
}

/// `waiters` threads await the last of `raises` values.
fn wait_and_raise(waiters: usize, raises: u64) {
    let line = Line::new();
    let waiting: Vec<_> = (0..waiters)
        .map(|_| {
            let line = Arc::clone(&line);
            thread::spawn(move || line.wait_for(raises))
        })
        .collect();
    (1..=raises).for_each(|value| line.raise(value));
    waiting.into_iter().for_each(|waiter| waiter.join().unwrap());
}

#[test]
fn raised_flag_wakes_every_sleeper_and_shows_its_tag() {
    let models = [
        Model::new("one waiter, one value", || wait_and_raise(1, 1)),
        Model::within("one waiter, two values", 4, || wait_and_raise(1, 2)),
        Model::within("two waiters", 3, || wait_and_raise(2, 1)),
    ];
    prove(&["src/sync/flag.rs", "primitives.rs"], &models);
}

#[test]
#[should_panic(expected = "no model needs these orders")]
fn order_that_no_model_needs_is_named() {
    prove(&["src/sync/flag.rs"], &[Model::new("a raise alone", || Line::new().raise(1))]);
}
