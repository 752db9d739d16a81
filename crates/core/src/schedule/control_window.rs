//! The control window of one `ExpertParallel`, the same at every rank, and the count of calls that
//! chooses between its places.
//!
//! ```text
//!   | flags: 7 kinds x R words, a cache line each | publication | messages in (node) | messages out (receiver)
//!                                                 | headers in (source) | headers out (relay) |
//!
//!   a flag's line   | value: 8 bytes | sleepers: 8 | tag of even calls: 24 | tag of odd calls: 24 |
//!   publication     | word per bin, and per rank that stages: u32 |
//!   message         | tag per member of the node | below: u32 per word | total: u32 per word |
//!   header          | rows, entries, first row: u32, 64 bytes | landed rows per rank served | its sums per rank served
//!                   | segment per bin served | row of each entry: u32 | metadata of each entry |
//! ```
//!
//! A rank writes its *publication* once per dispatch, and local peers read it there. A *message*
//! carries this node's counts to a rank of another node; a *header* describes the contents of a
//! block to a relay. All are doubled by the parity of the call: this grants the write at no cost. A
//! refused call ends at its entries, so a fast rank may signal its next entry while a slow one has
//! yet to read the last tag. A relay in a thread of its own may send the next call's message while
//! a rank has yet to read the last one. With two places in turn neither overwrites the other: by
//! entry n + 2 all ranks have entered n + 1, and so have read n. ([`Calls`] explains why
//! it is not the parity of the dispatch.)

use super::Flag;
use crate::plan::{Bins, LINE, Segment};
use crate::topology::{Paths, Route};

/// Offsets in the control window, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlLayout {
    ranks: u64,
    /// Words of a publication.
    words: u64,
    /// Most members of a node.
    members: u64,
    nodes: u64,
    /// The most ranks that one rank sends counts to, relays for, and has as relays.
    receivers: u64,
    sources: u64,
    relays: u64,
    /// Most ranks that one relay serves.
    served: u64,
    /// Bytes of a rank's sums in a header; 0 where rows return as they are.
    sums_bytes: u64,
    /// Most bins: all there are, so that experts may move to other ranks.
    served_bins: u64,
    /// Entries of a block that is relayed; none on the direct route.
    block_entries: u64,
    max_entries: u64,
    metadata_bytes: u64,
}

impl ControlLayout {
    /// For the group of these paths (of any of its ranks), these bins, and at most `max_entries`
    /// entries a rank, with `metadata_bytes` bytes of metadata each.
    pub fn new(paths: &Paths, bins: &Bins, max_entries: u64, metadata_bytes: u64) -> Self {
        let nodes = paths.nodes();
        let most = |of: &dyn Fn(Paths) -> usize| {
            (0..paths.ranks()).map(|rank| of(paths.of(rank))).max().unwrap_or(0) as u64
        };
        ControlLayout {
            ranks: paths.ranks().into(),
            words: u64::from(bins.count() + paths.staged_ranks()),
            members: (0..nodes.nodes()).map(|node| nodes.members(node).len()).max().unwrap_or(0) as u64,
            nodes: if paths.is_multi_node() { nodes.nodes().into() } else { 0 },
            receivers: most(&|p| p.count_receivers().count()),
            sources: most(&|p| p.sources().count()),
            relays: most(&|p| p.relays().count()),
            served: most(&|p| p.served_by(p.me()).len()),
            sums_bytes: 0,
            served_bins: bins.count().into(),
            block_entries: if paths.route() == Route::Pxn { max_entries } else { 0 },
            max_entries,
            metadata_bytes,
        }
    }

    /// The same where headers say which [sums by rank](crate::plan::RankSums) return.
    pub fn with_rank_sums(self, sums: bool) -> Self {
        ControlLayout { sums_bytes: if sums { size_of::<Segment>() as u64 } else { 0 }, ..self }
    }

    /// Size of the window.
    pub fn bytes(&self) -> u64 {
        self.header_out(self.relays as u32, 0)
    }

    /// Bytes of all flag words of a group.
    pub fn flag_bytes(ranks: u32) -> u64 {
        Flag::COUNT as u64 * u64::from(ranks) * LINE
    }

    /// The flag word of this kind that speaks of a rank.
    pub fn flag(of: u32, flag: Flag, ranks: u32) -> u64 {
        (flag as u64 * u64::from(ranks) + u64::from(of)) * LINE
    }

    /// First tag in a flag's line: behind the value and the count of its sleepers.
    pub const TAGS: u64 = 16;
    /// Bytes of one [`Tag`](super::Tag); a line holds two, by parity of the call.
    pub const TAG_BYTES: u64 = 24;

    /// The tag that comes with a flag of a call of this parity.
    pub fn tag(of: u32, flag: Flag, ranks: u32, parity: u64) -> u64 {
        Self::flag(of, flag, ranks) + Self::TAGS + (parity & 1) * Self::TAG_BYTES
    }

    /// This rank's publication in calls of this parity.
    pub fn publication(&self, parity: u64) -> u64 {
        Self::flag_bytes(self.ranks as u32) + (parity & 1) * lines(self.words * 4)
    }

    /// Where the message of a node is put.
    pub fn message_in(&self, node: u32, parity: u64) -> u64 {
        self.publication(0) + 2 * lines(self.words * 4) + self.nth(node, parity, self.message_bytes())
    }

    /// Where a rank composes its message to the `place`th rank that it sends counts to
    /// ([`Paths::place_of_receiver`]).
    pub fn message_out(&self, place: u32, parity: u64) -> u64 {
        self.message_in(self.nodes as u32, 0) + self.nth(place, parity, self.message_bytes())
    }

    /// Where the header of a relay's source is put ([`Paths::place_at`]).
    pub fn header_in(&self, place: u32, parity: u64) -> u64 {
        self.message_out(self.receivers as u32, 0) + self.nth(place, parity, self.header_bytes())
    }

    /// Where a rank composes the header for its `nth` relay.
    pub fn header_out(&self, nth: u32, parity: u64) -> u64 {
        self.header_in(self.sources as u32, 0) + self.nth(nth, parity, self.header_bytes())
    }

    /// Words of a publication: a count per bin, and per rank that stages.
    pub fn words(&self) -> u32 {
        self.words as u32
    }

    /// In a message, behind the tags of the members in order: sums over those that precede the
    /// receiving rank.
    pub fn below(&self) -> u64 {
        lines(self.members * Self::TAG_BYTES)
    }

    /// In a message: sums over all members.
    pub fn total(&self) -> u64 {
        self.below() + self.words * 4
    }

    /// Size of a message that counts, and of one that does not.
    pub fn message_len(&self, counts: bool) -> u64 {
        if counts { self.total() + self.words * 4 } else { self.below() }
    }

    /// In a header: landed rows per rank served.
    pub const LANDED: u64 = LINE;

    /// In a header: the sums of the ranks served, if there are any.
    pub fn rank_sums(&self) -> u64 {
        Self::LANDED + self.served * 4
    }

    /// In a header: the segments of the bins served.
    pub fn segments(&self) -> u64 {
        self.rank_sums() + self.served * self.sums_bytes
    }

    /// In a header: the row of each entry.
    pub fn index(&self) -> u64 {
        lines(self.segments() + self.served_bins * 12)
    }

    /// In a header of `entries` entries: the metadata of each.
    pub fn metadata(&self, entries: u32) -> u64 {
        lines(self.index() + u64::from(entries) * 4)
    }

    /// Size of a header: with `entries` entries, or, on the direct route, without them.
    pub fn header_len(&self, entries: u32) -> u64 {
        match self.block_entries {
            0 => self.index(),
            _ => self.metadata(entries) + u64::from(entries) * self.metadata_bytes,
        }
    }

    /// Entries for which there is room.
    pub fn max_entries(&self) -> u64 {
        self.max_entries
    }

    /// Bytes that go with each entry.
    pub fn metadata_bytes(&self) -> u64 {
        self.metadata_bytes
    }

    fn message_bytes(&self) -> u64 {
        lines(self.message_len(true))
    }

    fn header_bytes(&self) -> u64 {
        lines(self.header_len(self.block_entries as u32))
    }

    fn nth(&self, n: u32, parity: u64, bytes: u64) -> u64 {
        (2 * u64::from(n) + (parity & 1)) * bytes
    }
}

/// Rounded up to whole cache lines.
fn lines(bytes: u64) -> u64 {
    bytes.next_multiple_of(LINE)
}

/// The calls one rank has entered on one `ExpertParallel`.
///
/// ```
/// let mut calls = sidelane_core::schedule::Calls::new(3);
/// calls.enter();
/// calls.returned();
/// calls.enter();
/// assert_eq!((calls.number(), calls.value()), (2, 3 << 48 | 2 << 8));
/// assert_eq!((calls.parity(), calls.last_return()), (0, 3 << 48 | 1 << 8));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Calls {
    running: u64,
    last_return: u64,
}

/// Bits of a value that count the parts of a call. Above them: 40 bits for the number of the call,
/// 16 for the epoch.
const PART_BITS: u32 = 8;
const NUMBER_BITS: u32 = 40;

impl Calls {
    /// By how much the value of a call exceeds that of the call before.
    pub const STEP: u64 = 1 << PART_BITS;

    /// None yet, in a world of this epoch.
    pub fn new(epoch: u16) -> Self {
        Calls { running: u64::from(epoch) << (PART_BITS + NUMBER_BITS), last_return: 0 }
    }

    /// Enters the next call, regardless of its kind and its result.
    pub fn enter(&mut self) {
        self.running += Self::STEP;
    }

    /// The running call let peers read this rank's memory: they will confirm with its value.
    pub fn returned(&mut self) {
        self.last_return = self.running;
    }

    /// Value to which the running call raises its flags:
    /// [`FlagValue::Call`](super::FlagValue::Call).
    pub fn value(&self) -> u64 {
        self.running
    }

    /// Value to which peers raise their `Read` flags, once all that was offered is read:
    /// [`FlagValue::LastReturn`](super::FlagValue::LastReturn).
    pub fn last_return(&self) -> u64 {
        self.last_return
    }

    /// The number of the running call, from 1: the name of its handle, and of the call in errors.
    pub fn number(&self) -> u64 {
        self.running >> PART_BITS & (u64::MAX >> (u64::BITS - NUMBER_BITS))
    }

    /// Which of two tags, publications, messages and headers the running call takes.
    pub fn parity(&self) -> u64 {
        Self::parity_of(self.running)
    }

    /// The parity of the call that a flag was raised in.
    pub fn parity_of(value: u64) -> u64 {
        value >> PART_BITS & 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{ExpertMap, SumOrder};
    use crate::topology::NodeMap;

    #[test]
    fn nothing_overlaps() {
        let nodes = NodeMap::from_labels(&[0, 0, 0, 1, 1, 1, 1, 1]);
        let bins = Bins::experts(&ExpertMap::contiguous(20, 8).unwrap(), SumOrder::Expert, &nodes);
        for route in Route::ALL {
            let control = ControlLayout::new(&Paths::new(&nodes, route, 0), &bins, 7, 4);
            let flags = Flag::ALL.map(|flag| ControlLayout::flag(2, flag, 8));
            assert_eq!(flags, [2, 10, 18, 26, 34, 42, 50].map(|line| line * LINE));
            let tags = [0, 1].map(|parity| ControlLayout::tag(2, Flag::Block, 8, parity));
            assert_eq!(tags, [26 * 64 + 16, 26 * 64 + 40]);
            let both = |at: &dyn Fn(u64) -> u64| [at(0), at(1)];
            let (sources, relays) = if route == Route::Pxn { (2, 1) } else { (5, 5) };
            let mut starts = both(&|p| control.publication(p)).to_vec();
            starts.extend((0..2).flat_map(|n| both(&|p| control.message_in(n, p))));
            starts.extend((0..2).flat_map(|n| both(&|p| control.message_out(n, p))));
            starts.extend((0..sources).flat_map(|n| both(&|p| control.header_in(n, p))));
            starts.extend((0..relays).flat_map(|n| both(&|p| control.header_out(n, p))));
            starts.push(control.bytes());
            let entries = if route == Route::Pxn { 7 } else { 0 };
            let staged = if route == Route::Pxn { 8 } else { 0 };
            let mut sizes = vec![(20 + staged) * 4; 2];
            sizes.extend([control.message_len(true); 8]);
            sizes.extend(vec![control.header_len(entries); 2 * (sources + relays) as usize]);
            assert_eq!(starts.len(), sizes.len() + 1);
            for (at, size) in starts.windows(2).zip(sizes) {
                assert!(at[0] % LINE == 0 && at[0] + size <= at[1], "{route:?}: {at:?} {size}");
            }
        }
    }
}
