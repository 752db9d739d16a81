//! Signals that come as messages: receives, their contents, and the credit for them.
//!
//! A signal that is a write needs no state. An addition must know the value of the word. An
//! immediate of 32 bits must stand for a word and its value:
//!
//! ```text
//!   first signal of a word   a record of 64 bytes: the word, its value, and a number for the word
//!   later signals            | number of the word: 12 bits | striped: 1 bit | growth of its value: 19 bits |
//!   tick of a queue          0, on a queue pair that is not the lead
//! ```
//!
//! [`SignalSender`] numbers the words, [`SignalReceiver`] looks them up. The queue pairs to one
//! peer share an [`Inbox`], in which a *striped* signal waits for the ticks of the others
//! ([`Arrivals`]).

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidelane_core::stripes::Arrivals;

use super::block::Block;
use super::sender::RECEIVE;
use super::work::{Done, Kind};
use super::{QueuePair, ReceiveChain, Remote};
use crate::error::VerbsError;
use crate::lane::net::regions::Record;
use crate::lane::net::{Regions, RemoteAddress};

/// Signals of a peer over all its queue pairs, in the order in which they are to be applied.
#[derive(Debug)]
pub struct Inbox {
    regions: Arc<Regions>,
    waiting: Mutex<Waiting>,
    /// Signals that were applied. A report may lag behind it, so no order is needed.
    applied: AtomicU64,
}

#[derive(Debug)]
struct Waiting {
    numbers: SignalReceiver,
    arrivals: Arrivals<Signal>,
}

/// A signal as it came.
#[derive(Debug)]
enum Signal {
    /// The number of its word, and its growth.
    Named(u32),
    /// Everything about it.
    Record([u64; 8]),
}

impl Inbox {
    /// For signals of one queue pair.
    pub fn new(regions: Arc<Regions>) -> Self {
        let waiting = Waiting { numbers: SignalReceiver::default(), arrivals: Arrivals::new(1) };
        Inbox { regions, waiting: Mutex::new(waiting), applied: AtomicU64::new(0) }
    }

    /// For signals of so many queue pairs. Call it before any of them can receive.
    pub fn join(&self, queues: usize) {
        self.waiting().arrivals = Arrivals::new(queues);
    }

    /// A signal has come on the lead. `false` if no correct peer sends that.
    fn lead(&self, signal: Signal) -> bool {
        let striped = match &signal {
            Signal::Named(immediate) => immediate & STRIPED != 0,
            Signal::Record(words) => words[7] & STRIPED_RECORD != 0,
        };
        let mut waiting = self.waiting();
        if striped && waiting.arrivals.queues() == 1 {
            return false;
        }
        waiting.arrivals.lead(signal, striped);
        self.apply(&mut waiting)
    }

    /// A tick has come on another queue pair. `false` if no correct peer sends that.
    fn tick(&self, queue: usize) -> bool {
        let mut waiting = self.waiting();
        waiting.arrivals.tick(queue) && self.apply(&mut waiting)
    }

    /// Applies all signals that wait for nothing more.
    fn apply(&self, waiting: &mut Waiting) -> bool {
        let Waiting { numbers, arrivals } = waiting;
        while let Some(signal) = arrivals.pop() {
            let understood = match signal {
                Signal::Named(immediate) => numbers
                    .read(immediate)
                    .is_some_and(|(word, growth)| self.regions.grow(word, growth).is_ok()),
                Signal::Record(words) => self.raise(words, numbers),
            };
            if !understood {
                return false;
            }
            // Relaxed: reports may lag behind.
            self.applied.fetch_add(1, Ordering::Relaxed);
        }
        true
    }

    fn raise(&self, words: [u64; 8], numbers: &mut SignalReceiver) -> bool {
        let Some(record @ Record::Signal { region, offset, .. }) = Record::from_words(words) else {
            return false;
        };
        let Ok(number) = u32::try_from(words[7] & !STRIPED_RECORD) else { return false };
        // SAFETY: a signal has no payload.
        let applied = unsafe { self.regions.apply(record, std::ptr::null()) }.is_ok();
        applied && numbers.bind(number, RemoteAddress { region, offset })
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The receive queue of one connection.
pub struct Receiver {
    peer: u32,
    inbox: Arc<Inbox>,
    /// Which of the queue pairs to the peer it is; 0 is the lead.
    queue: usize,
    chain: ReceiveChain,
    /// Receives that are kept posted, here and at the peer.
    own: u64,
    theirs: u64,
    /// Receives taken and posted again; the number that the peer knows; the place where it wants
    /// it.
    taken: u64,
    reported: u64,
    grant_to: Remote,
    /// Signals sent to the peer.
    signals: u64,
}

impl Receiver {
    /// Posts so many receives; none where signals are not messages.
    ///
    /// # Errors
    /// [`VerbsError::Post`].
    pub fn new(
        qp: &QueuePair,
        block: &Block,
        receives: u32,
        (inbox, queue): (Arc<Inbox>, usize),
    ) -> Result<Self, VerbsError> {
        let mut chain = ReceiveChain::new(receives as usize, 1);
        for number in 0..u64::from(receives) {
            chain.receive(RECEIVE | number, [block.receive(number)?])?;
        }
        qp.post_receive(&mut chain)?;
        Ok(Receiver {
            peer: qp.peer(),
            inbox,
            queue,
            chain,
            own: receives.into(),
            theirs: 0,
            taken: 0,
            reported: 0,
            grant_to: Remote { addr: 0, rkey: 0 },
            signals: 0,
        })
    }

    /// Receives that are kept posted.
    pub fn posted(&self) -> u32 {
        self.own as u32
    }

    /// The peer keeps so many receives, and wants the count of its taken signals at this address.
    pub fn joined(&mut self, receives: u32, grant_to: Remote) {
        (self.theirs, self.grant_to) = (receives.into(), grant_to);
    }

    /// Takes the contents of a receive, and posts it again.
    ///
    /// # Errors
    /// [`VerbsError::Message`] if no correct peer sends it, [`VerbsError::Post`].
    pub fn take(&mut self, number: u64, done: Done, block: &Block, qp: &QueuePair) -> Result<(), VerbsError> {
        let message = VerbsError::Message { peer: self.peer };
        let understood = match (self.queue, done.kind, done.immediate) {
            (0, Kind::ReceiveImmediate, Some(immediate)) => self.inbox.lead(Signal::Named(immediate)),
            (0, Kind::Receive, None) if done.bytes == 64 => {
                self.inbox.lead(Signal::Record(block.received(number)))
            }
            (queue @ 1.., Kind::ReceiveImmediate, Some(0)) => self.inbox.tick(queue),
            _ => false,
        };
        if !understood {
            return Err(message);
        }
        self.chain.receive(RECEIVE | number, [block.receive(number)?])?;
        if self.chain.len() as u64 >= self.batch() {
            self.taken += self.chain.len() as u64;
            qp.post_receive(&mut self.chain)?;
        }
        Ok(())
    }

    fn batch(&self) -> u64 {
        (self.own / 4).max(1)
    }

    /// Number of taken signals that the peer should learn, if it does not know of many of them.
    pub fn to_grant(&self) -> Option<u64> {
        // Signals that wait for ticks are held here: their number is bounded by the receives.
        let applied = if self.queue == 0 { self.inbox.applied.load(Ordering::Relaxed) } else { u64::MAX };
        let taken = self.taken.min(applied);
        (taken - self.reported >= self.batch()).then_some(taken)
    }

    /// Address at which the peer wants the number.
    pub fn grant_to(&self) -> Remote {
        self.grant_to
    }

    /// The number was sent.
    pub fn granted(&mut self, taken: u64) {
        self.reported = taken;
    }

    /// Whether the peer has a receive for one more signal, after it reported so many as taken.
    pub fn may_signal(&self, granted: u64) -> bool {
        self.signals < granted + self.theirs
    }

    /// One more signal is sent.
    pub fn signals(&mut self) {
        self.signals += 1;
    }
}

impl std::fmt::Debug for Receiver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Receiver").field("taken", &self.taken).field("signals", &self.signals).finish()
    }
}

/// Words that have a number.
const WORDS: usize = 1 << 12;
/// Growth that fits next to a number.
const GROWTH: u64 = 1 << 19;
/// Bit of an immediate that is a striped signal.
pub const STRIPED: u32 = 1 << 19;
/// The same bit of the last word of a record, which holds the number of the word.
pub const STRIPED_RECORD: u64 = 1 << 32;

/// The sender's side: what each word was raised to last.
#[derive(Debug, Default)]
pub struct SignalSender {
    last: HashMap<(u32, u64), SignalWord>,
    numbers: u32,
}

#[derive(Clone, Copy, Debug)]
struct SignalWord {
    value: u64,
    number: Option<u32>,
}

impl SignalSender {
    /// By how much a word is to grow.
    pub fn growth(&mut self, to: RemoteAddress, value: u64) -> u64 {
        let word = self.last.entry((to.region, to.offset)).or_insert(SignalWord { value: 0, number: None });
        value.wrapping_sub(std::mem::replace(&mut word.value, value))
    }

    /// Whether an immediate can say this.
    pub fn fits(&self, to: RemoteAddress, value: u64) -> bool {
        let word = self.last.get(&(to.region, to.offset));
        word.is_some_and(|word| word.number.is_some() && value.wrapping_sub(word.value) < GROWTH)
    }

    /// The immediate that says this; none if it must be said at length, in a record that carries
    /// the number of the word.
    pub fn immediate(&mut self, to: RemoteAddress, value: u64) -> Result<u32, u32> {
        let numbers = self.numbers as usize;
        let word = self.last.entry((to.region, to.offset)).or_insert(SignalWord { value: 0, number: None });
        let growth = value.wrapping_sub(std::mem::replace(&mut word.value, value));
        match word.number {
            Some(number) if growth < GROWTH => Ok(number << 20 | growth as u32),
            Some(number) => Err(number),
            None if numbers < WORDS => {
                word.number = Some(self.numbers);
                self.numbers += 1;
                Err(self.numbers - 1)
            }
            None => Err(SignalReceiver::NONE),
        }
    }

    /// A word was raised by a record that says everything.
    pub fn record(&mut self, to: RemoteAddress, value: u64) -> u32 {
        self.immediate(to, value).map_or_else(|number| number, |immediate| immediate >> 20)
    }

    /// The words in these bytes were cleared by their owner.
    pub fn cleared(&mut self, from: RemoteAddress, len: u64) {
        for (&(region, offset), word) in &mut self.last {
            if region == from.region && (from.offset..from.offset + len).contains(&offset) {
                word.value = 0;
            }
        }
    }
}

/// The receiver's side: which word has which number.
#[derive(Debug, Default)]
struct SignalReceiver {
    words: Vec<Option<RemoteAddress>>,
}

impl SignalReceiver {
    /// In place of a number, where they have run out.
    const NONE: u32 = u32::MAX;

    /// A word has this number from now on. `false` if no correct peer sends that.
    fn bind(&mut self, number: u32, word: RemoteAddress) -> bool {
        if number == SignalReceiver::NONE {
            return true;
        }
        let at = number as usize;
        if at >= WORDS || at > self.words.len() {
            return false;
        }
        if at == self.words.len() {
            self.words.push(None);
        }
        self.words[at] = Some(word);
        true
    }

    /// The word of an immediate, and by how much it has grown.
    fn read(&self, immediate: u32) -> Option<(RemoteAddress, u64)> {
        let word = self.words.get((immediate >> 20) as usize).copied().flatten()?;
        Some((word, u64::from(immediate) % GROWTH))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(offset: u64) -> RemoteAddress {
        RemoteAddress { region: 0, offset }
    }

    #[test]
    fn a_word_is_named_at_length_once_and_by_its_number_then() {
        let (mut sent, mut received) = (SignalSender::default(), SignalReceiver::default());
        let mut value = 0;
        for (to, next) in [
            (word(64), 7),
            (word(128), 1 << 40),
            (word(64), 9),
            (word(64), 10 + (1 << 19)),
            (word(64), 20 + (1 << 19)),
        ] {
            let (seen, expected) = match sent.immediate(to, next) {
                Ok(immediate) => {
                    let (at, growth) = received.read(immediate).unwrap();
                    ((at, value + growth), (to, next))
                }
                Err(number) => {
                    assert!(received.bind(number, to));
                    ((to, next), (to, next))
                }
            };
            assert_eq!(seen, expected);
            if to == word(64) {
                value = next;
            }
        }
        assert_eq!(sent.immediate(word(128), (1 << 40) + 5), Ok(1 << 20 | 5));
    }

    #[test]
    fn words_beyond_the_numbers_are_always_named_at_length() {
        let mut sent = SignalSender::default();
        for at in 0..WORDS as u64 {
            assert_eq!(sent.immediate(word(at * 64), 1), Err(at as u32));
        }
        assert_eq!(sent.immediate(word(1 << 40), 1), Err(SignalReceiver::NONE));
        assert_eq!(sent.immediate(word(1 << 40), 2), Err(SignalReceiver::NONE));
        assert!(SignalReceiver::default().bind(SignalReceiver::NONE, word(0)));
    }

    #[test]
    fn number_out_of_order_is_refused() {
        let mut received = SignalReceiver::default();
        assert!(!received.bind(1, word(0)), "the first number is 0");
        assert!(!received.bind(WORDS as u32, word(0)));
        assert_eq!(received.read(5 << 20), None);
    }

    #[test]
    fn a_cleared_word_grows_from_zero_again() {
        let mut sent = SignalSender::default();
        assert_eq!((sent.growth(word(64), 100), sent.growth(word(64), 105)), (100, 5));
        sent.cleared(word(0), 128);
        assert_eq!(sent.growth(word(64), 3), 3);
    }
}
