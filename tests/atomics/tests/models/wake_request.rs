//! A progress thread that asks to be woken, and the sender that fills its ring.

use std::sync::Arc;

use atomics::mutation::{Model, prove};
use atomics::sync::flag::FlagWords;
use atomics::sync::primitives::{AtomicU32, AtomicU64, full_fence};
use atomics::sync::wake_request::WakeRequest;
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;

use crate::flag::Line;
use crate::machine::{EventFd, Memory};

const RECORDS: u64 = 2;

/// A ring of a connection, and the event descriptor of the thread that empties it.
struct Ring {
    head: AtomicU64,
    sleepers: AtomicU32,
    records: [Memory; RECORDS as usize],
    request: WakeRequest,
    event: EventFd,
}

impl Ring {
    fn new() -> Arc<Self> {
        let (head, sleepers) = (AtomicU64::new(0), AtomicU32::new(0));
        let records = std::array::from_fn(|_| Memory::new());
        Arc::new(Ring { head, sleepers, records, request: WakeRequest::default(), event: EventFd::new() })
    }

    fn head(&self) -> FlagWords<'_> {
        FlagWords::new(&self.head, &self.sleepers)
    }

    fn send(&self, at: u64) {
        self.records[at as usize].write();
        self.head().raise(at + 1, full_fence, || unreachable!("no thread sleeps on the head"));
        if self.request.take() {
            self.event.post();
        }
    }

    /// Receives from `tail` on, as the progress thread does that has been idle for long.
    fn receive(&self, mut tail: u64, until: u64) {
        while tail < until {
            let head = self.head().value();
            if head == tail {
                self.request.arm();
                if self.head().value() == tail {
                    self.event.wait();
                }
            }
            while tail < head {
                self.records[tail as usize].read();
                tail += 1;
            }
        }
    }
}

fn send_and_receive(records: u64) {
    let ring = Ring::new();
    let sender = Arc::clone(&ring);
    let sender = thread::spawn(move || (0..records).for_each(|at| sender.send(at)));
    ring.receive(0, records);
    sender.join().unwrap();
}

/// The receiving end of a rank: a progress thread and a thread that waits both serve it.
struct Receiver {
    ring: Arc<Ring>,
    tail: Mutex<u64>,
    awaited: Arc<Line>,
    stop: AtomicBool,
}

impl Receiver {
    /// Receives what is there, unless the other thread is doing so.
    fn progress(&self) -> bool {
        let Ok(mut tail) = self.tail.try_lock() else { return false };
        let head = self.ring.head().value();
        let any = *tail < head;
        while *tail < head {
            self.ring.records[*tail as usize].read();
            *tail += 1;
            self.awaited.raise(*tail);
        }
        any
    }

    /// Asks to be woken; whether there is news already.
    fn arm(&self) -> bool {
        let tail = self.tail.lock().unwrap();
        self.ring.request.arm();
        self.ring.head().value() != *tail
    }

    /// The work of the progress thread.
    fn run(&self) {
        while !self.stop.load(Ordering::Acquire) {
            if !self.progress() && !self.arm() {
                self.ring.event.wait();
            }
        }
    }
}

/// A thread waits for a signal, and serves the ring once before it sleeps.
fn wait_beside_progress_thread() {
    let (ring, awaited) = (Ring::new(), Line::new());
    let (tail, stop) = (Mutex::new(0), AtomicBool::new(false));
    let receiver = Arc::new(Receiver { ring: Arc::clone(&ring), tail, awaited, stop });
    let sender = thread::spawn(move || ring.send(0));
    let progress = Arc::clone(&receiver);
    let progress = thread::spawn(move || progress.run());
    receiver.progress();
    receiver.awaited.wait_for(1);
    receiver.stop.store(true, Ordering::Release);
    receiver.ring.event.post();
    progress.join().unwrap();
    sender.join().unwrap();
}

#[test]
fn armed_thread_is_woken_by_the_next_record() {
    let models = [
        Model::new("one record", || send_and_receive(1)),
        Model::within("two records", 4, || send_and_receive(RECORDS)),
        Model::within("a waiter beside the thread", 3, wait_beside_progress_thread),
    ];
    prove(&["src/sync/wake_request.rs", "src/sync/flag.rs", "primitives.rs"], &models);
}
