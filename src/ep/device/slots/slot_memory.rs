//! Layout of a rank's memory on the device in fixed slots, tables for its kernels, and the memory
//! of peers that its device reaches.

use crate::device::{Addresses, ByteSpan, DeviceRange, Pack, PinnedMemory, Stream};
use crate::error::{DeviceError, Error, PlanError};
use crate::exec::PeerWindows;
use crate::plan::{ExpertMap, SlotShape};
use crate::schedule::stream_program::Slots;
use crate::world::Member;

/// The device window of an exchange: the slots, which peers reach, and behind them memory of this
/// rank's kernels.
///
/// ```text
///   | words that NICs raise | slots | rank of each expert | local number | slots to pack | rows to sum | place of each token | counter | dropped choices | expansion |
/// ```
///
/// Words exist if there are other nodes, and an expansion within a budget.
#[derive(Clone, Copy, Debug)]
pub(super) struct WindowLayout {
    slots: Slots,
    ranks: u64,
    experts: u64,
    max_tokens: u64,
    choices: u64,
    /// Bytes of an expansion.
    expansion: u64,
}

impl WindowLayout {
    /// For slots of this shape, and partial rows of `partial_row` bytes; on several nodes or one;
    /// with so many bytes of an expansion.
    pub fn new(
        ranks: u32,
        experts: u32,
        shape: SlotShape,
        (partial_row, several): (u64, bool),
        expansion: u64,
    ) -> Result<Self, PlanError> {
        let max_tokens = u64::from(shape.max_tokens());
        let slots = Slots::new(ranks, shape.bytes(), max_tokens * partial_row)?;
        let slots = if several { slots.behind_words() } else { slots };
        let (ranks, choices) = (ranks.into(), max_tokens * u64::from(shape.top_k()));
        Ok(WindowLayout { slots, ranks, experts: experts.into(), max_tokens, choices, expansion })
    }

    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// `i32 [experts]`.
    pub fn rank_of(&self) -> (u64, u64) {
        (self.slots.bytes(), self.experts * 4)
    }

    /// `i32 [experts]`.
    pub fn local_of(&self) -> (u64, u64) {
        after(self.rank_of(), self.experts * 4)
    }

    /// Addresses, `u64 [ranks]`: where each rank's slot is packed.
    pub fn packed_at(&self) -> (u64, u64) {
        after(self.local_of(), self.ranks * 8)
    }

    /// Addresses, `u64 [ranks]`: where each rank's partial rows are summed from.
    pub fn summed_from(&self) -> (u64, u64) {
        after(self.packed_at(), self.ranks * 8)
    }

    /// `i32 [max_tokens, ranks]`.
    pub fn rows(&self) -> (u64, u64) {
        after(self.summed_from(), self.max_tokens * self.ranks * 4)
    }

    /// The number of calls, and what else a mark has: `u64 [2]`.
    pub fn counter(&self) -> (u64, u64) {
        after(self.rows(), Slots::MARK_BYTES)
    }

    /// Marks of ranks that refuse a call, `u64 [ranks, 2]`.
    pub fn marks(&self) -> (u64, u64) {
        (self.slots.mark(0), self.ranks * Slots::MARK_BYTES)
    }

    /// `u8 [max_tokens, top_k]`.
    pub fn dropped(&self) -> (u64, u64) {
        after(self.counter(), self.choices)
    }

    /// Memory of an expansion.
    pub fn expansion(&self) -> (u64, u64) {
        after(self.dropped(), self.expansion)
    }

    /// Bytes of the window.
    pub fn bytes(&self) -> u64 {
        after(self.expansion(), 0).0
    }

    /// In the words: the status, behind the flags.
    pub fn status(&self) -> u64 {
        self.slots.flag_bytes()
    }

    /// In the words: the status of the last call alone, its verdict, and in the upper half of 64
    /// bits the number of the call.
    pub fn verdict(&self) -> u64 {
        self.status() + 64
    }

    /// Bytes of the words.
    pub fn word_bytes(&self) -> u64 {
        self.verdict() + 64
    }

    /// A piece of a window.
    pub fn part(memory: &DeviceRange, (offset, len): (u64, u64)) -> Result<DeviceRange, DeviceError> {
        memory.part(offset, len)
    }
}

/// Behind a piece, as aligned as slots are.
fn after((offset, len): (u64, u64), next: u64) -> (u64, u64) {
    ((offset + len).next_multiple_of(Slots::ALIGN), next)
}

/// Memory for kernels.
pub(super) struct Tables {
    /// The rank that this one uses for each expert, and the number of the expert there.
    pub rank_of: DeviceRange,
    pub local_of: DeviceRange,
    /// Which choices are dropped.
    pub dropped: DeviceRange,
    /// Where slots are packed to: one's own directly to where it is received.
    pub packed_at: Addresses,
    /// Where partial rows are summed from: one's own where its experts leave them.
    pub summed_from: Addresses,
}

impl Tables {
    /// Writes them, and waits until they are there.
    pub fn fill(
        places: &WindowLayout,
        memory: &DeviceRange,
        map: &ExpertMap,
        me: u32,
        stream: &Stream,
    ) -> Result<Tables, Error> {
        let [rank_of, local_of, dropped] =
            [places.rank_of(), places.local_of(), places.dropped()].map(|at| WindowLayout::part(memory, at));
        let (rank_of, local_of, dropped) = (rank_of?, local_of?, dropped?);
        write_map((&rank_of, &local_of), map, me, stream)?;
        let slots = places.slots();
        let pick = |own: u64, other: &dyn Fn(u32) -> u64, len| -> Result<Vec<ByteSpan<'_>>, DeviceError> {
            let at = |rank| memory.span(if rank == me { own } else { other(rank) }, len);
            (0..slots.ranks()).map(at).collect()
        };
        let packed_at = pick(slots.receive(me), &|rank| slots.send(rank), slots.slot_bytes())?;
        let summed_from = pick(slots.partial(me), &|rank| slots.returned(rank), slots.return_bytes())?;
        let packed_at = Addresses::new(stream, &WindowLayout::part(memory, places.packed_at())?, &packed_at)?;
        let summed_from =
            Addresses::new(stream, &WindowLayout::part(memory, places.summed_from())?, &summed_from)?;
        let [marks, counter] = [places.marks(), places.counter()].map(|at| WindowLayout::part(memory, at));
        let zero = |words: DeviceRange| write(stream, &words, &vec![0; (words.len() / 4) as usize]);
        let _staged = [zero(marks?)?, zero(counter?)?];
        stream.synchronize()?;
        Ok(Tables { rank_of, local_of, dropped, packed_at, summed_from })
    }
}

/// Writes the rank that this one uses for each expert, and the number of the expert there; waits
/// until they are there.
pub(super) fn write_map(
    (rank_of, local_of): (&DeviceRange, &DeviceRange),
    map: &ExpertMap,
    me: u32,
    stream: &Stream,
) -> Result<(), Error> {
    let place = |expert| match map.slot_for(me, expert) {
        Some(slot) => (map.rank_of(slot), slot - map.slots_of(map.rank_of(slot)).start),
        None => (Pack::MASKED as u32, 0),
    };
    let (ranks, locals): (Vec<u32>, Vec<u32>) = (0..map.experts()).map(place).unzip();
    let _staged = [write(stream, rank_of, &ranks)?, write(stream, local_of, &locals)?];
    Ok(stream.synchronize()?)
}

/// Copies words to the device. Their source lives until the stream has been waited for.
pub(super) fn write(stream: &Stream, to: &DeviceRange, words: &[u32]) -> Result<PinnedMemory, DeviceError> {
    let bytes: &[u8] = bytemuck::cast_slice(words);
    let staged = PinnedMemory::new(stream.context(), bytes.len())?;
    staged.write(0, bytes)?;
    stream.copy(to.span(0, to.len())?, staged.range().span(0, to.len())?)?;
    Ok(staged)
}

/// Memory that this rank's device reaches.
#[derive(Debug)]
pub(super) struct Windows {
    /// Per rank: none of those of other nodes.
    pub members: Vec<Option<Member>>,
    /// Ranks of other nodes.
    pub far: Vec<u32>,
    /// Words by which these speak, where NICs raise them in memory of the device.
    pub nic_words: Option<DeviceRange>,
    /// Host staging, where rows cross by that.
    pub host_staging: Option<DeviceRange>,
}

impl Windows {
    fn member(&self, rank: u32) -> Option<&Member> {
        self.members.get(rank as usize)?.as_ref()
    }
}

impl PeerWindows for Windows {
    fn slots(&self, rank: u32) -> Option<&DeviceRange> {
        Some(&self.member(rank)?.memory)
    }

    fn flags(&self, rank: u32) -> Option<&DeviceRange> {
        Some(self.member(rank)?.words.range())
    }

    fn same_device(&self, rank: u32) -> bool {
        self.member(rank).is_some_and(|member| member.same_device)
    }

    fn host_staging(&self) -> Option<&DeviceRange> {
        self.host_staging.as_ref()
    }

    fn nic_flags(&self, of: u32) -> Option<&DeviceRange> {
        self.nic_words.as_ref().filter(|_| self.far.contains(&of))
    }
}
