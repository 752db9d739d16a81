//! Threads that take a slot, write to it, and give it back.

use std::sync::Arc;

use atomics::mutation::{Model, prove};
use atomics::sync::slots::{Slots, Ticket};
use loom::thread;

use crate::machine::Memory;

/// Slots, and what lies there.
struct Pool {
    slots: Slots,
    memory: Vec<Memory>,
}

impl Pool {
    fn new(count: u64) -> Arc<Self> {
        Arc::new(Pool { slots: Slots::new(count), memory: (0..count).map(|_| Memory::new()).collect() })
    }

    fn use_one(&self) {
        let mut ticket = Ticket::default();
        let slot = loop {
            match self.slots.take(&mut ticket, 0) {
                Some(slot) => break slot,
                None => thread::yield_now(),
            }
        };
        self.memory[slot as usize].write();
        self.slots.give_back(slot);
    }
}

/// So many threads for so many slots, and one of them asks no more after its first attempt.
fn share(slots: u64, takers: usize, gives_up: bool) {
    let pool = Pool::new(slots);
    let taking: Vec<_> = (1..takers)
        .map(|_| {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.use_one())
        })
        .collect();
    if gives_up {
        let mut ticket = Ticket::default();
        match pool.slots.take(&mut ticket, 0) {
            Some(slot) => pool.slots.give_back(slot),
            None => pool.slots.give_up(&mut ticket),
        }
    } else {
        pool.use_one();
    }
    taking.into_iter().for_each(|taker| taker.join().unwrap());
    assert!(!pool.slots.is_short());
    // All are free again.
    let all = (0..slots).filter_map(|_| pool.slots.take(&mut Ticket::default(), 0)).count();
    assert_eq!(all as u64, slots);
}

/// Two threads take a slot each, and one more if one is left to the other then.
fn leave_one() {
    let pool = Pool::new(3);
    let hoard = |pool: &Pool| {
        let take = |spared| pool.slots.take(&mut Ticket::default(), spared);
        assert!(take(0).is_some(), "one is left");
        u64::from(take(1).is_some())
    };
    let other = {
        let pool = Arc::clone(&pool);
        thread::spawn(move || hoard(&pool))
    };
    let more = hoard(&pool) + other.join().unwrap();
    assert!(more <= 1, "{more} of one");
    assert!(!pool.slots.is_short());
}

#[test]
fn slot_has_one_holder_at_a_time() {
    let models = [
        Model::new("two threads, one slot", || share(1, 2, false)),
        Model::new("one of them gives up", || share(1, 2, true)),
        Model::within("three threads, two slots", 2, || share(2, 3, false)),
        Model::new("two threads leave a slot", leave_one),
    ];
    prove(&["src/sync/slots.rs"], &models);
}
