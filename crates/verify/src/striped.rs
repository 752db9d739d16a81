//! Proof of stripes by search: every order in which queues (queue pairs) may carry puts, signals
//! and ticks.
//!
//! ```text
//!   sender    data on queue q | signal     each tick at once or later, before the next signal
//!   queue     data in any order up to the next immediate; an immediate behind all before it
//!   queues    in any order among each other
//!   receiver  [`Arrivals`]
//! ```
//!
//! Shown for all sequences of a few operations: a signal is applied only when all data before it is
//! placed, signals are applied in order, and every run ends with all of them applied. This is the
//! contract of a lane that [`random_check`](crate::random_check) assumes. [`Bug`]s that must be
//! found show that the search can fail.

use std::collections::{HashSet, VecDeque};

use sidelane_core::stripes::Arrivals;

/// An operation of the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A stripe on this queue.
    Data(usize),
    /// A signal.
    Signal,
}

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// No signal is striped.
    NeverStriped,
    /// The receiver applies signals of the lead at once.
    LeadAlone,
    /// A tick passes the data of its queue.
    TickBeforeData,
    /// The receiver takes one tick of a queue for all signals.
    NotCumulative,
    /// After a striped signal, all say that they are striped.
    NotCleared,
    /// Ticks that are owed when the next signal comes are never sent.
    OwedForgotten,
    /// A signal is striped only if the last data before it was not the lead's.
    LastPutDecides,
    /// Only the first queue behind the lead ticks and is waited for.
    FirstQueueOnly,
}

impl Bug {
    /// All of them.
    pub const ALL: [Bug; 8] = [
        Bug::NeverStriped,
        Bug::LeadAlone,
        Bug::TickBeforeData,
        Bug::NotCumulative,
        Bug::NotCleared,
        Bug::OwedForgotten,
        Bug::LastPutDecides,
        Bug::FirstQueueOnly,
    ];
}

/// A broken promise of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The signal of this number was applied before data of this operation was placed.
    Early {
        /// Number of the signal.
        signal: usize,
        /// Place of the data among the operations.
        data: usize,
    },
    /// A signal was applied before one that was sent earlier.
    Passed {
        /// Its number.
        signal: usize,
    },
    /// Nothing moves any more, and only so many signals were applied.
    Stuck {
        /// How many.
        applied: usize,
    },
}

/// An entry that waits in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Entry {
    /// Data of the operation at this place.
    Data(usize),
    /// A signal: its number, and whether it is striped.
    Signal(usize, bool),
    Tick,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    /// Operations so far.
    at: usize,
    signals: usize,
    striped: bool,
    owed: Vec<usize>,
    queues: Vec<VecDeque<Entry>>,
    arrivals: Arrivals<usize>,
    /// A striped signal has come.
    waited: bool,
    /// Per operation: whether its data is placed.
    placed: Vec<bool>,
    applied: usize,
}

struct Search<'a> {
    operations: &'a [Operation],
    bug: Option<Bug>,
}

/// Runs a sequence over so many queues, in every order. Returns how many states there are.
///
/// # Errors
/// The first fault that is found.
pub fn explore(operations: &[Operation], queues: usize, bug: Option<Bug>) -> Result<usize, Fault> {
    let search = Search { operations, bug };
    let first = State {
        at: 0,
        signals: 0,
        striped: false,
        owed: vec![0; queues],
        queues: vec![VecDeque::new(); queues],
        arrivals: Arrivals::new(if bug == Some(Bug::FirstQueueOnly) { 2 } else { queues }),
        waited: false,
        placed: vec![false; operations.len()],
        applied: 0,
    };
    let (mut seen, mut open) = (HashSet::from([first.clone()]), vec![first]);
    while let Some(state) = open.pop() {
        let next = search.moves(&state)?;
        if next.is_empty() && state.applied < state.signals {
            return Err(Fault::Stuck { applied: state.applied });
        }
        open.extend(next.into_iter().filter(|state| seen.insert(state.clone())));
    }
    Ok(seen.len())
}

impl Search<'_> {
    /// The states behind one.
    fn moves(&self, state: &State) -> Result<Vec<State>, Fault> {
        let mut next = Vec::new();
        next.extend(self.send(state));
        for queue in 0..state.queues.len() {
            next.extend(self.pay(state, queue));
            let run = state.queues[queue].iter().take_while(|entry| matches!(entry, Entry::Data(_))).count();
            // Data before the next immediate in any order, or the immediate itself.
            for at in 0..run.max(usize::from(!state.queues[queue].is_empty())) {
                next.push(self.carry(state, queue, at)?);
            }
        }
        Ok(next)
    }

    /// The sender's next operation.
    fn send(&self, state: &State) -> Option<State> {
        let operation = *self.operations.get(state.at)?;
        let mut next = state.clone();
        next.at += 1;
        match operation {
            Operation::Data(queue) => {
                next.queues[queue].push_back(Entry::Data(state.at));
                let forgets = self.bug == Some(Bug::LastPutDecides);
                next.striped = queue > 0 || (state.striped && !forgets);
            }
            Operation::Signal => {
                if self.bug == Some(Bug::OwedForgotten) {
                    next.owed.fill(0);
                }
                if next.owed.iter().any(|&owed| owed > 0) {
                    return None;
                }
                let striped = state.striped && self.bug != Some(Bug::NeverStriped);
                next.queues[0].push_back(Entry::Signal(state.signals, striped));
                next.signals += 1;
                let tick = striped && (self.bug != Some(Bug::NotCleared) || self.has_stripes(state));
                let last = if self.bug == Some(Bug::FirstQueueOnly) { 2 } else { next.owed.len() };
                next.owed[1..last].iter_mut().for_each(|owed| *owed += usize::from(tick));
                next.striped = self.bug == Some(Bug::NotCleared) && striped;
            }
        }
        Some(next)
    }

    /// Whether any queue but the lead has got data since the last signal.
    fn has_stripes(&self, state: &State) -> bool {
        let last = self.operations[..state.at].iter().rposition(|&op| op == Operation::Signal);
        self.operations[last.map_or(0, |at| at + 1)..state.at]
            .iter()
            .any(|op| matches!(op, Operation::Data(1..)))
    }

    /// A tick that a queue owes.
    fn pay(&self, state: &State, queue: usize) -> Option<State> {
        let mut next = state.clone();
        next.owed[queue] = state.owed[queue].checked_sub(1)?;
        match self.bug {
            Some(Bug::TickBeforeData) => next.queues[queue].push_front(Entry::Tick),
            _ => next.queues[queue].push_back(Entry::Tick),
        }
        Some(next)
    }

    /// Lets the entry at a place of a queue arrive.
    fn carry(&self, state: &State, queue: usize, at: usize) -> Result<State, Fault> {
        let mut next = state.clone();
        match next.queues[queue].remove(at) {
            Some(Entry::Data(operation)) => next.placed[operation] = true,
            Some(Entry::Signal(signal, striped)) => {
                let waits = match self.bug {
                    Some(Bug::LeadAlone) => false,
                    Some(Bug::NotCumulative) => striped && !state.waited,
                    _ => striped,
                };
                next.waited |= striped;
                next.arrivals.lead(signal, waits);
            }
            Some(Entry::Tick) => _ = next.arrivals.tick(queue),
            None => {}
        }
        while let Some(signal) = next.arrivals.pop() {
            self.apply(&mut next, signal)?;
        }
        Ok(next)
    }

    fn apply(&self, state: &mut State, signal: usize) -> Result<(), Fault> {
        if signal != state.applied {
            return Err(Fault::Passed { signal });
        }
        state.applied += 1;
        let signals = self.operations.iter().enumerate().filter(|(_, op)| **op == Operation::Signal);
        let before = signals.map(|(at, _)| at).nth(signal).unwrap_or(0);
        let late = (0..before).find(|&at| self.operations[at] != Operation::Signal && !state.placed[at]);
        late.map_or(Ok(()), |data| Err(Fault::Early { signal, data }))
    }
}
