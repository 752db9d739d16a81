//! Memory that a rank offers to readers, and takes again when they have finished.

use std::sync::Arc;

use atomics::memory::{ReleaseCheck, pool_of, retire};
use atomics::mutation::{Model, prove};
use atomics::sync::flag::FlagWords;
use atomics::sync::primitives::{AtomicU32, AtomicU64, full_fence};
use loom::thread;

use crate::machine::Memory;

const CALL: u64 = 3;

/// The words by which readers say that they have read.
struct Readers(Vec<(AtomicU64, AtomicU32)>);

impl Readers {
    fn flag(&self, reader: usize) -> FlagWords<'_> {
        let (value, sleepers) = &self.0[reader];
        FlagWords::new(value, sleepers)
    }
}

impl ReleaseCheck for Readers {
    fn is_released(&self, value: u64) -> bool {
        (0..self.0.len()).all(|reader| self.flag(reader).value() >= value)
    }
}

/// A rank gives offered memory back and takes it for something else while others still read it.
fn read_and_take_again(readers: usize) {
    let (pool, rows) = (pool_of(64), Arc::new(Memory::new()));
    let words = |_| (AtomicU64::new(CALL - 1), AtomicU32::new(0));
    let flags = Arc::new(Readers((0..readers).map(words).collect()));
    let reading: Vec<_> = (0..readers)
        .map(|reader| {
            let (flags, rows) = (Arc::clone(&flags), Arc::clone(&rows));
            thread::spawn(move || {
                rows.read();
                flags.flag(reader).raise(CALL, full_fence, || unreachable!("no thread sleeps on it"));
            })
        })
        .collect();
    let offered = pool.alloc(64).unwrap();
    retire(&pool, offered, &(flags as Arc<dyn ReleaseCheck>), CALL);
    let taken = pool.alloc(64).unwrap();
    rows.write();
    drop(taken);
    reading.into_iter().for_each(|reader| reader.join().unwrap());
    assert_eq!(pool.report().used, 0);
}

#[test]
fn offered_memory_is_written_again_only_after_it_was_read() {
    let models = [
        Model::new("one reader", || read_and_take_again(1)),
        Model::within("two readers", 4, || read_and_take_again(2)),
    ];
    prove(&["src/sync/flag.rs"], &models);
}
