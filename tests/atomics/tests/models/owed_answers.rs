//! A thread that receives the peer's question, and others that use the sending side meanwhile. A
//! thread that arms a queue of completions, and others that look at the queue meanwhile.

use std::sync::Arc;

use atomics::mutation::{Model, prove};
use atomics::sync::owed_answers::Answers;
use atomics::sync::primitives::{Mutex, MutexGuard};
use loom::thread;

use crate::machine::Memory;

/// A connection as far as its answers go: what the lock guards is the last one that was given.
struct Connection {
    answers: Answers,
    out: Mutex<u64>,
    landed: Memory,
}

impl Connection {
    fn new() -> Arc<Self> {
        Arc::new(Connection { answers: Answers::default(), out: Mutex::new(0), landed: Memory::new() })
    }

    fn answer(&self, out: &mut MutexGuard<'_, u64>) {
        if let Some(mark) = self.answers.take() {
            // The peer, or whoever it signals next, may read them.
            self.landed.read();
            **out = mark;
        }
    }

    fn tend(&self) {
        let serve = |out: &mut MutexGuard<'_, u64>| {
            self.answer(out);
            true
        };
        self.answers.tend(|| self.out.try_lock().ok(), serve);
    }

    fn receive(&self) {
        self.landed.write();
        self.answers.ask(1);
        self.tend();
    }

    /// Sends a record, as callers do: it gives the answer if it sees the question in time.
    fn send(&self, gives: bool) {
        let mut out = self.out.lock().unwrap();
        if gives {
            self.answer(&mut out);
        }
        drop(out);
        if self.answers.is_owed() {
            self.tend();
        }
    }
}

/// One thread receives a question while others send.
fn ask_and_send(senders: usize, gives: bool) {
    let connection = Connection::new();
    let sending: Vec<_> = (0..senders)
        .map(|_| {
            let connection = Arc::clone(&connection);
            thread::spawn(move || connection.send(gives))
        })
        .collect();
    connection.receive();
    sending.into_iter().for_each(|sender| sender.join().unwrap());
    assert_eq!(*connection.out.lock().unwrap(), 1, "the answer was given");
}

/// A queue of completions whose NIC leaves an event if it is armed. The lock's holder takes what
/// has come.
struct Queue {
    visits: Answers,
    lock: Mutex<()>,
    nic: Mutex<Nic>,
    /// The request to the NIC.
    request: Memory,
}

#[derive(Default)]
struct Nic {
    armed: bool,
    waiting: bool,
    event: bool,
}

impl Queue {
    fn complete(&self) {
        let mut nic = self.nic.lock().unwrap();
        nic.waiting = true;
        nic.event |= std::mem::take(&mut nic.armed);
    }

    /// Takes what has come. For the holder of the lock.
    fn serve(&self) {
        if self.visits.take().is_some() {
            self.request.read();
        }
        self.nic.lock().unwrap().waiting = false;
    }

    fn visit(&self) {
        let serve = |_: &mut MutexGuard<'_, ()>| {
            self.serve();
            true
        };
        self.visits.tend(|| self.lock.try_lock().ok(), serve);
    }

    /// As the thread that sleeps next does.
    fn arm(&self) {
        self.nic.lock().unwrap().armed = true;
        self.request.write();
        self.visits.ask_again();
        self.visit();
    }

    /// As callers do, some of which look at the queue.
    fn hold(&self, looks: bool) {
        let held = self.lock.lock().unwrap();
        if looks {
            self.serve();
        }
        drop(held);
        if self.visits.is_owed() {
            self.visit();
        }
    }
}

/// One thread arms the queue while another holds the lock, and a completion comes.
fn arm_and_hold(looks: bool) {
    let queue = Arc::new(Queue {
        visits: Answers::default(),
        lock: Mutex::new(()),
        nic: Mutex::new(Nic::default()),
        request: Memory::new(),
    });
    let (of_nic, of_caller) = (Arc::clone(&queue), Arc::clone(&queue));
    let others = [thread::spawn(move || of_nic.complete()), thread::spawn(move || of_caller.hold(looks))];
    queue.arm();
    others.into_iter().for_each(|other| other.join().unwrap());
    let nic = queue.nic.lock().unwrap();
    assert!(!nic.waiting || nic.event, "a completion that no thread takes wakes one");
}

#[test]
fn question_that_meets_a_sender_is_answered() {
    let models = [
        Model::new("a sender amid its record", || ask_and_send(1, false)),
        Model::new("a sender that answers first", || ask_and_send(1, true)),
        Model::within("two senders", 2, || ask_and_send(2, true)),
        Model::within("a queue that is armed amid a call", 3, || arm_and_hold(false)),
        Model::within("a call that looks at the queue", 3, || arm_and_hold(true)),
    ];
    prove(&["src/sync/owed_answers.rs"], &models);
}
