//! Signals that come as messages: receives, their contents, and the credit for them.

use std::sync::Arc;

use super::block::Block;
use super::completion::{Done, Kind};
use super::sender::RECEIVE;
use super::signals::SignalReceiver;
use super::{QueuePair, ReceiveChain, Remote};
use crate::error::VerbsError;
use crate::lane::net::regions::Record;
use crate::lane::net::{Regions, RemoteAddress};

/// The receive queue of one rail.
pub struct Receiver {
    peer: u32,
    regions: Arc<Regions>,
    heard: SignalReceiver,
    chain: ReceiveChain,
    /// Receives that are kept posted, here and at the peer.
    own: u64,
    theirs: u64,
    /// Receives taken and posted again; the number that the peer knows; the place where it wants
    /// it.
    taken: u64,
    told: u64,
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
        regions: Arc<Regions>,
    ) -> Result<Self, VerbsError> {
        let mut chain = ReceiveChain::new(receives as usize, 1);
        for number in 0..u64::from(receives) {
            chain.receive(RECEIVE | number, [block.receive(number)?])?;
        }
        qp.post_receive(&mut chain)?;
        Ok(Receiver {
            peer: qp.peer(),
            regions,
            heard: SignalReceiver::default(),
            chain,
            own: receives.into(),
            theirs: 0,
            taken: 0,
            told: 0,
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
        let understood = match (done.kind, done.immediate) {
            (Kind::ReceiveImmediate, Some(immediate)) => self
                .heard
                .read(immediate)
                .is_some_and(|(word, growth)| self.regions.grow(word, growth).is_ok()),
            (Kind::Receive, None) if done.bytes == 64 => self.apply(block.received(number)),
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

    fn apply(&mut self, words: [u64; 8]) -> bool {
        let Some(record @ Record::Signal { region, offset, .. }) = Record::from_words(words) else {
            return false;
        };
        // SAFETY: a signal has no payload.
        let applied = unsafe { self.regions.apply(record, std::ptr::null()) }.is_ok();
        applied && self.heard.learn(words[7] as u32, RemoteAddress { region, offset })
    }

    fn batch(&self) -> u64 {
        (self.own / 4).max(1)
    }

    /// Number of taken signals that the peer should learn, if it does not know of many of them.
    pub fn to_grant(&self) -> Option<u64> {
        (self.taken - self.told >= self.batch()).then_some(self.taken)
    }

    /// Address at which the peer wants the number.
    pub fn grant_to(&self) -> Remote {
        self.grant_to
    }

    /// The number was sent.
    pub fn granted(&mut self, taken: u64) {
        self.told = taken;
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
