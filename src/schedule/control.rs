//! Where things lie in the control window of one `ExpertParallel`: the same at every rank.
//!
//! ```text
//!   | flags: 3 kinds x R writers, a cache line each | publication 0 | publication 1 | mailbox (source, parity) ... |
//!
//!   publication, mailbox:  | header, 64 bytes | counts: u32 per expert slot | weights: f32 per entry |
//! ```
//!
//! ```text
//!   a flag's line:         | value: 8 bytes | sleepers: 8 | tag of even calls: 24 | tag of odd calls: 24 |   tags: entry only
//! ```
//!
//! A call that is refused ends at its entries, so a fast rank may signal its next entry while a slow one has yet to
//! read the last tag. With two tags in turn it cannot: by entry n + 2 everybody has signalled n + 1, and so has read n.
//!
//! A rank writes its *publication* once per dispatch; ranks that share its memory read it there, the others get it
//! put into their *mailbox*. Both are doubled by the parity of the call, for the reason of the tags: that is the
//! licence, and it costs nothing. ([`Calls`](super::Calls) says why it is not the parity of the dispatch.)

use super::{At, Flag, Place, SpanCopy, WindowId};

/// Bytes of a cache line: one flag word has it alone.
pub const LINE: u64 = 64;

/// Offsets in the control window, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Control {
    ranks: u64,
    slots: u64,
    max_entries: u64,
}

/// Number of words of a publication's header.
pub const HEADER_WORDS: usize = 8;

impl Control {
    /// For a group of `ranks`, `slots` expert slots, and at most `max_entries` (token, expert) entries a rank.
    pub fn new(ranks: u32, slots: u32, max_entries: u64) -> Self {
        Control { ranks: ranks.into(), slots: slots.into(), max_entries }
    }

    /// Size of the window.
    pub fn bytes(&self) -> u64 {
        self.mailbox(self.ranks as u32, 0)
    }

    /// The flag word of this kind that `writer` raises here.
    pub fn flag(writer: u32, flag: Flag, ranks: u32) -> u64 {
        (flag as u64 * u64::from(ranks) + u64::from(writer)) * LINE
    }

    /// First tag in a flag's line: behind the value and the count of its sleepers.
    pub const TAGS: u64 = 16;
    /// Bytes of one [`Tag`](super::Tag); a line holds two, by parity of the call.
    pub const TAG_BYTES: u64 = 24;

    /// The tag that comes with `writer`'s entry signal of a call of this parity.
    pub fn tag(writer: u32, ranks: u32, parity: u64) -> u64 {
        Self::flag(writer, Flag::Entry, ranks) + Self::TAGS + (parity & 1) * Self::TAG_BYTES
    }

    /// This rank's publication in calls of this parity.
    pub fn publication(&self, parity: u64) -> u64 {
        Flag::COUNT as u64 * self.ranks * LINE + (parity & 1) * self.block()
    }

    /// Where the publication of a remote source is put.
    pub fn mailbox(&self, source: u32, parity: u64) -> u64 {
        self.publication(0) + (2 * (1 + u64::from(source)) + (parity & 1)) * self.block()
    }

    /// In whose control window, and where, a rank finds the publication of `source`.
    pub fn published(&self, at: &At, source: u32, parity: u64) -> (u32, u64) {
        match at.near(source) {
            true => (source, self.publication(parity)),
            false => (at.me, self.mailbox(source, parity)),
        }
    }

    /// From the start of a publication to its counts.
    pub const COUNTS: u64 = HEADER_WORDS as u64 * 8;

    /// From the start of a publication to its weights.
    pub fn weights(&self) -> u64 {
        (Self::COUNTS + self.slots * 4).next_multiple_of(LINE)
    }

    /// Bytes of header and counts.
    pub fn head_bytes(&self) -> u64 {
        Self::COUNTS + self.slots * 4
    }

    /// Entries for which there is room.
    pub fn max_entries(&self) -> u64 {
        self.max_entries
    }

    /// The two spans that carry a publication to the mailbox of a remote rank: header and counts, and the weights
    /// of the `entries` entries from `first` on that go there.
    pub fn to_mailbox(&self, me: u32, parity: u64, first: u32, entries: u32) -> [SpanCopy; 2] {
        let (publication, mailbox) = (self.publication(parity), self.mailbox(me, parity));
        let span = |from_offset, to_offset, len| SpanCopy {
            from: Place::Own(WindowId::CONTROL),
            from_offset,
            to: WindowId::CONTROL,
            to_offset,
            len,
        };
        [
            span(publication, mailbox, self.head_bytes()),
            span(
                publication + self.weights() + u64::from(first) * 4,
                mailbox + self.weights(),
                u64::from(entries) * 4,
            ),
        ]
    }

    fn block(&self) -> u64 {
        (self.weights() + self.max_entries * 4).next_multiple_of(LINE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps() {
        let control = Control::new(3, 5, 7);
        let flags = Flag::ALL.map(|flag| Control::flag(2, flag, 3));
        assert_eq!(flags, [2 * 64, 5 * 64, 8 * 64]);
        assert_eq!([Control::tag(2, 3, 6), Control::tag(2, 3, 7)], [2 * 64 + 16, 2 * 64 + 40]);
        assert!(Control::tag(2, 3, 7) + Control::TAG_BYTES <= 3 * 64);
        let block = control.publication(1) - control.publication(0);
        assert_eq!(control.publication(0), 9 * 64);
        assert!(block >= control.weights() + 28);
        let mut starts = vec![control.publication(0), control.publication(1)];
        starts.extend((0..3).flat_map(|s| [control.mailbox(s, 0), control.mailbox(s, 1)]));
        assert!(starts.windows(2).all(|w| w[1] - w[0] == block));
        assert_eq!(control.bytes(), starts[7] + block);
    }
}
