//! Threads that serve a stream, or end its waits, while the owner of the stream's memory leaves.
//!
//! A stream is a thread here. Loops of the library's threads, which sleep as the system does, are
//! said again in a few lines; what they decide by is the library's code.

use atomics::mutation::{Model, prove};
use atomics::sync::failure::Failure;
use atomics::sync::primitives::{Arc, AtomicU64, Ordering};
use atomics::sync::stream_use::{Drain, Request, StreamUse, is_shared};
use loom::thread;

use crate::machine::{DeviceWord, Memory};

/// Memory that a stream and the host share.
struct Shared {
    /// A request of the stream.
    request: AtomicU64,
    /// A word that the stream awaits.
    word: AtomicU64,
    rows: Memory,
}

impl Shared {
    fn new() -> Arc<Self> {
        let (request, word) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Shared { request, word, rows: Memory::new() })
    }
}

/// What a proxy and the owner of its exchange share.
struct Proxy {
    streams: StreamUse,
    memory: Arc<Shared>,
}

impl Proxy {
    /// Serves requests, each with the rows that the stream has written; returns how many.
    fn serve(&self) -> u64 {
        let mut served = 0;
        loop {
            // References of its own: one.
            let done = !self.streams.is_needed(|| is_shared(&self.memory, 1));
            let request = Request::new(&self.memory.request);
            if request.is_set() {
                request.clear();
                self.memory.rows.read();
                served += 1;
                // The peer hears of it, and the stream hears from the peer.
                self.memory.word.store(served, Ordering::Release);
            } else if done {
                return served;
            } else {
                thread::yield_now();
            }
        }
    }
}

/// A stream that requests so often, each time after it has heard of the last.
fn request(memory: Arc<Shared>, requests: u64) {
    for nth in 1..=requests {
        memory.rows.write();
        memory.request.store(1, Ordering::Release);
        while nth < requests && memory.word.load(Ordering::Acquire) < nth {
            thread::yield_now();
        }
    }
    drop(memory);
}

/// The owner enqueues work and is dropped while the stream runs.
fn enqueue_and_close(requests: u64) {
    let proxy = std::sync::Arc::new(Proxy { streams: StreamUse::default(), memory: Shared::new() });
    let serving = proxy.clone();
    let serving = thread::spawn(move || serving.serve());
    let memory = proxy.memory.clone();
    let stream = thread::spawn(move || request(memory, requests));
    proxy.streams.close();
    stream.join().unwrap();
    assert_eq!(serving.join().unwrap(), requests, "every request is served");
}

/// A value past each that a stream awaits.
const POISON: u64 = 1 << 30;

/// Words that a stream awaits, and the use that is made of them.
struct Words {
    drain: Drain,
    /// The word that is awaited: what is counted are claims of this rank.
    word: Arc<std::sync::Arc<DeviceWord>>,
}

/// The guard of these words, as an exchange holds it.
struct Guard {
    words: Arc<Words>,
    failure: std::sync::Arc<Failure<u32>>,
}

impl Guard {
    fn new(failure: &std::sync::Arc<Failure<u32>>) -> Self {
        let word = Arc::new(std::sync::Arc::new(DeviceWord::new()));
        let words = Arc::new(Words { drain: Drain::default(), word });
        let (watched, failed) = (Arc::downgrade(&words), std::sync::Arc::downgrade(failure));
        let watcher = move |_: &u32| {
            if let (Some(words), Some(failure)) = (watched.upgrade(), failed.upgrade()) {
                words.release();
                if words.drain.begin() {
                    drain(words, failure);
                }
            }
        };
        assert!(failure.watch(Box::new(watcher)).is_none(), "the world lives");
        Guard { words, failure: failure.clone() }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.words.drain.close(|| self.words.is_claimed()) {
            drain(self.words.clone(), self.failure.clone());
        }
    }
}

impl Words {
    fn is_claimed(&self) -> bool {
        is_shared(&self.word, 1)
    }

    fn release(&self) {
        self.word.set(POISON);
    }
}

/// Ends waits in a thread of its own.
fn drain(words: Arc<Words>, failure: std::sync::Arc<Failure<u32>>) {
    thread::spawn(move || {
        while words.drain.is_needed(|| words.is_claimed()) {
            if failure.status() != 0 {
                words.release();
            }
            thread::yield_now();
        }
    });
}

/// A world fails while the owner of a waiting stream leaves; a `late` signal undoes the poison.
fn fail_and_drop(late: bool) {
    let failure = std::sync::Arc::new(Failure::default());
    let guard = Guard::new(&failure);
    let (claim, peers) = (guard.words.word.clone(), std::sync::Arc::clone(&guard.words.word));
    let stream = thread::spawn(move || {
        claim.wait_for(POISON);
        drop(claim);
    });
    let failing = thread::spawn(move || {
        failure.fail(1, 1).iter().flatten().for_each(|watcher| watcher(&1));
        if late {
            peers.set(1);
        }
    });
    drop(guard);
    stream.join().unwrap();
    failing.join().unwrap();
}

#[test]
fn stream_of_an_owner_that_leaves_is_served_and_does_not_hang() {
    let models = [
        Model::new("one request", || enqueue_and_close(1)),
        Model::within("two requests", 2, || enqueue_and_close(2)),
        Model::within("a failing world", 2, || fail_and_drop(false)),
        Model::within("a late signal", 2, || fail_and_drop(true)),
    ];
    prove(&["src/sync/stream_use.rs"], &models);
}
