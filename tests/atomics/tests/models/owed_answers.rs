//! A thread that receives the peer's question, and others that use the sending side meanwhile.

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

#[test]
fn question_that_meets_a_sender_is_answered() {
    let models = [
        Model::new("a sender amid its record", || ask_and_send(1, false)),
        Model::new("a sender that answers first", || ask_and_send(1, true)),
        Model::within("two senders", 2, || ask_and_send(2, true)),
    ];
    prove(&["src/sync/owed_answers.rs"], &models);
}
