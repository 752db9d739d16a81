//! Where the bytes of collectives lie in the window of each rank.
//!
//! ```text
//!   | of even rounds: offer   | result  | outbox               | landing of each rank | of odd rounds: ... | pair: 2 slots of each rank | room |
//!                     a chunk   a chunk   a slot for each step   a slot each
//! ```
//!
//! On entry, other ranks write to landings alone. So a root's offer may extend over its result and
//! outbox, whatever the others call.
//!
//! Results land in place in the *room*, part behind part. It is as large as requested, and there is
//! one for all rounds.

use std::ops::Range;

use crate::error::PlanError;

/// Shares and slots begin at multiples of this many bytes.
const LINE: u64 = 64;
/// Chunks in a window: four of each parity, and two slots of each rank.
const CHUNKS: u64 = 10;

/// Geometry of a window: the same at every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Staging {
    ranks: u32,
    slot: u64,
    room: u64,
}

impl Staging {
    /// For this number of ranks, with chunks of at most `chunk` bytes, and no room for results that
    /// land in place.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] if that is less than 128 bytes a rank, or a window is larger
    /// than 64 bits can say.
    pub fn new(ranks: u32, chunk: u64) -> Result<Self, PlanError> {
        let bad = |expected| PlanError::BadParameter { parameter: "chunk", seen: chunk, expected };
        let slot = chunk / u64::from(ranks.max(1)) / LINE * LINE;
        if slot < 2 * LINE {
            return Err(bad("at least 128 bytes for each rank"));
        }
        if chunk.checked_mul(CHUNKS).is_none() {
            return Err(bad("a window of ten chunks in 64 bits"));
        }
        Ok(Staging { ranks, slot, room: 0 })
    }

    /// With room for results of this many bytes, rounded up to a whole line.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] if a window is then larger than 64 bits can say.
    pub fn with_room(self, bytes: u64) -> Result<Self, PlanError> {
        let room = bytes.checked_next_multiple_of(LINE);
        match room.filter(|&room| self.in_place(0, 0).checked_add(room).is_some()) {
            Some(room) => Ok(Staging { room, ..self }),
            None => {
                let expected = "what a window in 64 bits has room for";
                Err(PlanError::BadParameter { parameter: "landing", seen: bytes, expected })
            }
        }
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// The most bytes that a rank has for another in a round, or in a part of a message.
    pub fn slot(&self) -> u64 {
        self.slot
    }

    /// The most bytes of a round.
    pub fn chunk(&self) -> u64 {
        self.slot * u64::from(self.ranks)
    }

    /// The most bytes of a round whose partial sums may be twice as wide as its elements.
    pub fn half_chunk(&self) -> u64 {
        self.slot / 2 / LINE * LINE * u64::from(self.ranks)
    }

    /// The most bytes of a round in which one rank alone has something: its offer extends over
    /// result and outbox.
    pub fn wide_offer(&self) -> u64 {
        3 * self.chunk()
    }

    /// The bytes that a rank sums of `len`: equal shares of whole lines, of which the last may be
    /// shorter, or empty.
    pub fn share(&self, len: u64, rank: u32) -> Range<u64> {
        let width = len.div_ceil(self.ranks.into()).next_multiple_of(LINE);
        let at = |nth: u32| (width * u64::from(nth)).min(len);
        at(rank)..at(rank + 1)
    }

    /// Size of the window.
    pub fn bytes(&self) -> u64 {
        CHUNKS * self.chunk() + self.room
    }

    /// Bytes of results that land in place.
    pub fn room(&self) -> u64 {
        self.room
    }

    /// Where the part of a rank lands in place, if all have so many bytes.
    pub fn in_place(&self, of: u32, part: u64) -> u64 {
        CHUNKS * self.chunk() + u64::from(of) * part
    }

    fn half(&self, parity: u64) -> u64 {
        (parity & 1) * 4 * self.chunk()
    }

    /// Bytes that a rank has for all.
    pub fn offer(&self, parity: u64) -> u64 {
        self.half(parity)
    }

    /// Bytes that a rank puts here; on a ring, those of step `of`.
    pub fn landing(&self, of: u32, parity: u64) -> u64 {
        self.half(parity) + 3 * self.chunk() + u64::from(of) * self.slot
    }

    /// Sums, each share at its place.
    pub fn result(&self, parity: u64) -> u64 {
        self.half(parity) + self.chunk()
    }

    /// A partial sum on its way, of a step of a ring.
    pub fn outbox(&self, step: u32, parity: u64) -> u64 {
        self.half(parity) + 2 * self.chunk() + u64::from(step) * self.slot
    }

    /// Where parts of messages from a rank land, in turn.
    pub fn pair(&self, of: u32, parity: u64) -> u64 {
        2 * self.half(1) + (2 * u64::from(of) + (parity & 1)) * self.slot
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps_and_shares_make_the_whole() {
        let staging = Staging::new(3, 1000).unwrap().with_room(100).unwrap();
        assert_eq!((staging.slot(), staging.chunk()), (320, 960));
        let of_half = |p| {
            let landings = (0..3).map(move |of| (staging.landing(of, p), 320));
            let outbox = (0..3).map(move |of| (staging.outbox(of, p), 320));
            assert_eq!(staging.offer(p) + staging.wide_offer(), staging.landing(0, p));
            [(staging.offer(p), 960), (staging.result(p), 960)].into_iter().chain(outbox).chain(landings)
        };
        let pairs = (0..3).flat_map(|of| [0, 1].map(|p| (staging.pair(of, p), 320)));
        let all: Vec<(u64, u64)> = of_half(0).chain(of_half(1)).chain(pairs).collect();
        assert!(all.windows(2).all(|at| at[0].0 + at[0].1 == at[1].0), "{all:?}");
        assert_eq!(all.last().unwrap().0 + 320, staging.in_place(0, 30));
        assert_eq!((staging.in_place(3, 30), staging.room()), (staging.in_place(0, 30) + 90, 128));
        assert_eq!(staging.in_place(0, 30) + 128, staging.bytes());
        for len in [0, 4, 64, 200, 704, 960] {
            let shares: Vec<_> = (0..3).map(|rank| staging.share(len, rank)).collect();
            assert_eq!((shares[0].start, shares[2].end), (0, len));
            assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(shares.iter().all(|share| share.end - share.start <= staging.slot()));
        }
        assert!(matches!(Staging::new(3, 383), Err(PlanError::BadParameter { seen: 383, .. })));
        for bytes in [u64::MAX, u64::MAX - 100, u64::MAX - 9600] {
            let error = staging.with_room(bytes).unwrap_err();
            assert!(
                matches!(error, PlanError::BadParameter { parameter: "landing", seen, .. } if seen == bytes)
            );
        }
    }
}
