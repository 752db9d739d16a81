//! Where slots and flags lie in the windows of one microbatch: the same at every rank.

use crate::error::PlanError;
use crate::schedule::{ControlLayout, Flag, LINE, WindowId};

/// Geometry of two symmetric windows: slots, and flags.
///
/// ```text
///   slots   | * | receive[source] | send[destination] | home[peer] | partial[source] |    R of each
///               |         slot_bytes each             |       home_bytes each        |    * what is kept free
///   flags   | words of Control::flag, a cache line each |
/// ```
///
/// A kernel indexes all four by rank. So each has a place for the rank itself, though two of them
/// stay empty: own rows are packed straight to `receive[me]`, own partial rows are summed in
/// `partial[me]`.
///
/// ```
/// use sidelane_core::schedule::stream::Slots;
///
/// let slots = Slots::new(8, 128 * 7168 * 2, 128 * 7168 * 2)?;
/// assert_eq!(slots.send(1) - slots.send(0), 128 * 7168 * 2);
/// assert_eq!(slots.bytes(), 4 * 8 * 128 * 7168 * 2);
/// # Ok::<(), sidelane_core::error::PlanError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    first: u64,
    ranks: u32,
    slot_bytes: u64,
    home_bytes: u64,
}

impl Slots {
    /// Where slots and partial rows lie.
    pub const WINDOW: WindowId = WindowId::POOL;
    /// Where flags lie.
    pub const FLAGS: WindowId = WindowId::CONTROL;
    /// Each of the four begins at a multiple of so many bytes, as whatever a device allocates does.
    pub const ALIGN: u64 = 256;

    /// For a group of `ranks` ranks: `slot_bytes` for all rows that one rank sends another, with
    /// their metadata, and `home_bytes` for the returned partial rows.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] for no ranks, for sizes that are no multiple of 16 bytes, or
    /// beyond 64 bits together.
    pub fn new(ranks: u32, slot_bytes: u64, home_bytes: u64) -> Result<Self, PlanError> {
        let bad = |parameter, seen, expected| Err(PlanError::BadParameter { parameter, seen, expected });
        if ranks == 0 {
            return bad("ranks", 0, "1 or more");
        }
        for (parameter, bytes) in [("slot bytes", slot_bytes), ("home bytes", home_bytes)] {
            let total =
                bytes.checked_next_multiple_of(Self::ALIGN).and_then(|b| b.checked_mul(4 * u64::from(ranks)));
            if !bytes.is_multiple_of(16) || total.is_none() {
                return bad(parameter, bytes, "a multiple of 16 that memory can hold for all ranks");
            }
        }
        Ok(Slots { first: 0, ranks, slot_bytes, home_bytes })
    }

    /// The same, behind room for the flag words: NICs that write rows to device memory raise flags
    /// there, too.
    pub fn behind_words(self) -> Self {
        Slots { first: self.flag_bytes().next_multiple_of(Self::ALIGN), ..self }
    }

    /// Bytes that are kept free at the start.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Bytes of one slot.
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Bytes of the returned rows of one slot.
    pub fn home_bytes(&self) -> u64 {
        self.home_bytes
    }

    /// Where rows of `source` land.
    pub fn receive(&self, source: u32) -> u64 {
        self.first + u64::from(source) * self.slot_bytes
    }

    /// Where rows for `destination` are packed.
    pub fn send(&self, destination: u32) -> u64 {
        self.all(self.slot_bytes) + self.receive(destination)
    }

    /// Where partial rows of `peer` return.
    pub fn home(&self, peer: u32) -> u64 {
        self.first + 2 * self.all(self.slot_bytes) + u64::from(peer) * self.home_bytes
    }

    /// Where experts leave partial rows for `source`.
    pub fn partial(&self, source: u32) -> u64 {
        self.all(self.home_bytes) + self.home(source)
    }

    /// Size of the window of slots.
    pub fn bytes(&self) -> u64 {
        self.first + 2 * self.all(self.slot_bytes) + 2 * self.all(self.home_bytes)
    }

    /// The flag word of this kind that speaks of a rank, in the window of flags. 8 bytes, of which
    /// a device may use 4.
    pub fn flag(&self, of: u32, flag: Flag) -> u64 {
        ControlLayout::flag(of, flag, self.ranks)
    }

    /// Room for one of each rank.
    fn all(&self, bytes: u64) -> u64 {
        (u64::from(self.ranks) * bytes).next_multiple_of(Self::ALIGN)
    }

    /// Size of the window of flags. They begin as zeros.
    pub fn flag_bytes(&self) -> u64 {
        Flag::COUNT as u64 * u64::from(self.ranks) * LINE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps() {
        for (ranks, slot, home) in [(1, 16, 16), (3, 272, 512), (8, 4096, 16), (64, 0, 0)] {
            let slots = Slots::new(ranks, slot, home).unwrap();
            let slots = if ranks % 2 == 0 { slots.behind_words() } else { slots };
            assert!(slots.first() == 0 || slots.first() >= slots.flag_bytes());
            let all = |at: fn(&Slots, u32) -> u64, len| (0..ranks).map(move |rank| (at(&slots, rank), len));
            let mut pieces: Vec<(u64, u64)> =
                all(Slots::receive, slot).chain(all(Slots::send, slot)).collect();
            pieces.extend(all(Slots::home, home).chain(all(Slots::partial, home)));
            pieces.push((slots.bytes(), 0));
            for next in pieces.windows(2) {
                assert!(next[0].0 + next[0].1 <= next[1].0, "{next:?}");
            }
            let begin = [Slots::receive, Slots::send, Slots::home, Slots::partial].map(|at| at(&slots, 0));
            assert!(begin.iter().all(|at| at.is_multiple_of(Slots::ALIGN)), "{begin:?}");
            assert_eq!(slots.flag_bytes(), Flag::COUNT as u64 * 64 * u64::from(ranks));
            assert!(slots.flag(ranks - 1, Flag::Returned) < slots.flag_bytes());
        }
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        assert!(matches!(Slots::new(0, 16, 16), Err(PlanError::BadParameter { parameter: "ranks", .. })));
        assert!(matches!(
            Slots::new(2, 24, 16),
            Err(PlanError::BadParameter { parameter: "slot bytes", .. })
        ));
        assert!(matches!(Slots::new(2, 16, 8), Err(PlanError::BadParameter { parameter: "home bytes", .. })));
        assert!(Slots::new(64, u64::MAX - 15, 16).is_err() && Slots::new(64, 1 << 56, 16).is_err());
    }
}
