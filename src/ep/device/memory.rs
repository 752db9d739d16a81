//! Memory of an instance on a device: its layout, the same at every rank.
//!
//! ```text
//!   memory of the device   | words | zeros | maps | staging | packed metadata | context 0 | context 1 | ...  |  pool: rows and outputs |
//!   maps                   | bins of experts | locals | groups | places in sums | own experts |
//!   staging                packed rows of a dispatch, rows that return in a combine
//!   a context              | order | places | sums | sum places | weights | counts | own runs | metadata |
//!
//!   memory of the host     | words of context 0 | 1 | ... | words of no context | arrays |
//!   arrays                 | experts | weights | metadata | places | sums | sum places | counts | own runs | order | zeros |
//!                          | bin counts | faults | sums of a relay |
//!
//!   with several nodes: words of the device that NICs write, and one of
//!   host staging           | as memory of the device | outbox: rows on their way to other nodes |    where no NIC reaches it
//!   enqueuer's scratch     | index of arrivals | metadata of rows from other nodes |                    else, where engines relay
//! ```
//!
//! Calls take turns on the caller's stream, so one staging is enough, and a handle keeps
//! permutations and the weights of its rows.
//!
//! The pool has a file of its own: [`device_pool`](super::device_pool).

use crate::device::{ChoiceFault, RunArgs};
use crate::ep::builder::Spec;
use crate::error::{CallKind, PlanError};
use crate::plan::{RowBuffer, RowSizes};
use crate::schedule::{CallProperties, Payload};

/// Everything begins at multiples of this.
const GRAIN: u64 = 256;
/// More than any device has: sums of a few of these do not overflow.
const MOST: u64 = 1 << 56;
/// Bytes of a word that a stream and a thread share: nothing else is in its line.
const LINE: u64 = 64;
/// Bytes of the flags of a context.
const FLAGS: u64 = (StreamFlag::COUNT * LINE).next_multiple_of(GRAIN);

/// Words that a stream shares with its caller's thread, and with no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamFlag {
    /// The stream: how the last call ended; see [`Status`](crate::ep::Status).
    Status,
    /// The stream of copies: what is wrong with sums for other nodes. Nothing ever is, since the
    /// host has checked the headers that they follow.
    RelaySums,
}

impl StreamFlag {
    pub const COUNT: u64 = 2;
}

/// Sizes that all ranks have in common.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemoryShape {
    contexts: u32,
    ids: u64,
    bins: u64,
    ranks: u64,
    max_tokens: u64,
    top_k: u64,
    align: u64,
    /// Experts, and bins, that a rank may have: all, since they may all move there; rank-major
    /// there is one bin.
    experts: u64,
    segments: u64,
    /// Pairs of words of a row that a kernel lays apart.
    pairs: u64,
    /// Ranks sum a token's rows before they return.
    rank_sums: bool,
    /// Relays sum a token's rows of their node before they return.
    node_sums: bool,
    /// Combines multiply rows with their weights.
    weighted: bool,
    sizing: RowSizes,
    /// Rows that a rank may receive.
    most_rows: u64,
    /// Bytes of the pool at first, and to which it may grow.
    pool: u64,
    limit: u64,
    /// Where engines relay: most rows that a rank stages.
    staged: Option<u64>,
    /// Bytes of the words.
    words: u64,
}

/// A piece of memory: offset and length in bytes.
pub(super) type ByteRange = (u64, u64);

impl MemoryShape {
    /// Unit of a flag's value.
    pub const STEP: u64 = 64;

    /// `pool`: bytes at first, and to which it may grow; `staged`: where engines relay, most rows
    /// that a rank relays; `words`: bytes of flags that NICs may write.
    pub fn new(
        spec: &Spec,
        contexts: u32,
        (pool, limit): (u64, u64),
        staged: Option<u64>,
        words: u64,
    ) -> Self {
        let experts = spec.map.slots().into();
        MemoryShape {
            contexts,
            ids: spec.map.experts().into(),
            bins: spec.layout.first_bin(&spec.map, spec.map.ranks()).into(),
            ranks: spec.map.ranks().into(),
            max_tokens: spec.max_tokens.into(),
            top_k: spec.top_k.into(),
            align: spec.align.into(),
            experts,
            segments: spec.layout.most_bins(spec.map.slots()).into(),
            pairs: spec.metadata().pairs(spec.top_k).into(),
            rank_sums: spec.rank_sums,
            node_sums: spec.node_sums,
            weighted: spec.weighted,
            sizing: spec.sizing(CallKind::Dispatch, None),
            most_rows: spec.mode.budget().map_or(u64::MAX, u64::from),
            pool: pool.min(MOST),
            limit: limit.clamp(pool.min(MOST), MOST),
            staged,
            words,
        }
    }

    /// Whether all of it can be counted: no sum or product of what follows is beyond 64 bits.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] for more bytes than any device has.
    pub fn check(&self) -> Result<(), PlanError> {
        let staged = u128::from(self.staged.unwrap_or(0));
        let rows = staged + u128::from(self.entries() + self.align + self.ids + self.bins + self.experts);
        // A row, its metadata and its numbers, all of them a few times.
        let bytes = 4 * u128::from(self.longest_row() + self.sizing.metadata_bytes() + 8 + GRAIN);
        let metadata =
            u128::from(self.all_metadata_bytes()) + u128::from(2 * self.row_choice_bytes() + GRAIN);
        let all = rows.saturating_mul(bytes).saturating_add(metadata);
        let all = all.saturating_mul(u128::from(self.contexts) + 2);
        if all <= MOST.into() {
            return Ok(());
        }
        Err(PlanError::BadParameter {
            parameter: "bytes of the exchange",
            seen: u64::try_from(all).unwrap_or(u64::MAX),
            expected: "what a device may have: fewer contexts, tokens or choices, or shorter rows",
        })
    }

    pub fn contexts(&self) -> u32 {
        self.contexts
    }

    /// Sets of words: one for each context, and one for combines that a rank refuses because it has
    /// no context for them.
    pub fn word_sets(&self) -> u32 {
        self.contexts + 1
    }

    /// The set of words without a context.
    pub fn no_context(&self) -> u32 {
        self.contexts
    }

    /// Choices of a rank, at most; and so its rows.
    pub fn entries(&self) -> u64 {
        self.max_tokens * self.top_k
    }

    /// Bytes of one row that goes out in a call of this kind: of a record, where a dispatch makes
    /// them.
    pub fn row_bytes(&self, kind: CallKind) -> u64 {
        match CallProperties::of(kind).payload {
            Payload::Tokens => self.sizing.row_bytes,
            _ => self.sizing.return_bytes,
        }
    }

    /// Bytes of the longest row that goes out or returns: weights do as rows, too.
    fn longest_row(&self) -> u64 {
        self.sizing.row_bytes.max(self.sizing.return_bytes).max(self.sizing.of_weights().return_bytes)
    }

    /// Memory of so many rows that land in a call of this kind. Metadata lies with the handle.
    pub fn landing(&self, kind: CallKind, rows: u32) -> RowBuffer {
        RowBuffer { rows, metadata: 0, row_bytes: self.row_bytes(kind) }
    }

    /// Bytes in which so many rows of a dispatch land, with the most that a rank may stage.
    pub fn landing_bytes(&self, rows: u32) -> u64 {
        let landing = self.landing(CallKind::Dispatch, rows);
        match self.staged {
            Some(staged) => landing.staging().saturating_add(staged.saturating_mul(self.sizing.row_bytes)),
            None => landing.bytes(),
        }
    }

    /// Whether ranks sum a token's rows before they return.
    pub fn sums_by_rank(&self) -> bool {
        self.rank_sums
    }

    /// Sums that a relay makes of the rows of its node, at most: one for each row that it stages.
    fn most_node_sums(&self) -> u64 {
        if self.node_sums { self.staged.unwrap_or(0) } else { 0 }
    }

    /// Bytes in which a relay sums so many rows of local peers, if relays sum.
    pub fn node_sum_bytes(&self, rows: u32) -> u64 {
        let pulled = if self.node_sums { u64::from(rows) } else { 0 };
        let (row_bytes, tables) = (self.sizing.return_bytes, 2 * self.top_k * 4);
        let sums = self.most_node_sums().saturating_mul(row_bytes.saturating_add(tables));
        pulled.saturating_mul(row_bytes).saturating_add(sums)
    }

    /// Bytes that a handle of so many rows may ask of the pool once these have landed: an output
    /// and, where ranks sum, its sums.
    pub fn bytes_behind(&self, rows: u32) -> u64 {
        self.offer(rows).bytes().saturating_mul(1 + u64::from(self.rank_sums))
    }

    /// Whether engines relay.
    pub fn arrives(&self) -> bool {
        self.staged.is_some()
    }

    /// Memory that a rank offers in a combine, for so many rows.
    pub fn offer(&self, rows: u32) -> RowBuffer {
        self.sizing.offer(rows)
    }

    /// Flags that NICs write behind rows.
    pub fn words(&self) -> ByteRange {
        (0, self.words)
    }

    pub fn zeros(&self) -> ByteRange {
        (behind(self.words()), round(self.align * self.longest_row()))
    }

    /// The bin of each expert, for this rank: `i32`.
    pub fn map(&self) -> ByteRange {
        (behind(self.zeros()), self.ids * 4)
    }

    /// The number of each expert at its rank: `i32`.
    pub fn locals(&self) -> ByteRange {
        (behind(self.map()), self.ids * 4)
    }

    /// The partial sum of each bin, by its place in the order of the sum: `i32`.
    pub fn groups(&self) -> ByteRange {
        (behind(self.locals()), self.bins * 4)
    }

    /// The place of each bin in the order of the sum: `i32`.
    pub fn places_in_sums(&self) -> ByteRange {
        (behind(self.groups()), self.bins * 4)
    }

    /// Where ranks sum a token's rows: local experts in the order of the sum, `u32`.
    pub fn own_experts(&self) -> ByteRange {
        (behind(self.places_in_sums()), if self.rank_sums { self.bins * 4 } else { 0 })
    }

    /// Rows that a call packs, or that return to it. All contexts share it.
    pub fn staging(&self) -> ByteRange {
        (behind(self.own_experts()), self.entries() * self.longest_row())
    }

    /// Metadata of rows that a call packs, where the device plans it. All contexts share it.
    pub fn packed_metadata(&self) -> ByteRange {
        (behind(self.staging()), self.entries() * self.sizing.metadata_bytes())
    }

    /// First byte of a context.
    fn context(&self, context: u32) -> u64 {
        behind(self.packed_metadata()) + u64::from(context) * self.context_bytes()
    }

    /// The token of each packed row, `i32`.
    pub fn order(&self, context: u32) -> ByteRange {
        (self.context(context), self.entries() * 4)
    }

    /// The row of each choice, `i32 [tokens, top_k]`, or -1: as rows lie packed or, behind all of
    /// those, the row of this rank's own output.
    pub fn places(&self, context: u32) -> ByteRange {
        (behind(self.order(context)), self.entries() * 4)
    }

    /// The place of each choice's bin in the order of the sum, `i32 [tokens, top_k]`, or -1.
    pub fn sums(&self, context: u32) -> ByteRange {
        (behind(self.places(context)), self.entries() * 4)
    }

    /// Where ranks sum a token's rows, or relays do: the row of the sum of each choice, `i32
    /// [tokens, top_k]`, for one choice of each token and rank or node, or -1. Choices of the
    /// rank's own node keep their [places](MemoryShape::places) where relays sum.
    pub fn sum_places(&self, context: u32) -> ByteRange {
        (behind(self.sums(context)), self.sum_place_bytes())
    }

    fn sum_place_bytes(&self) -> u64 {
        if self.rank_sums || self.node_sums { self.entries() * 4 } else { 0 }
    }

    /// Where combines are weighted: routing weights, `f32 [tokens, top_k]`.
    pub fn weights(&self, context: u32) -> ByteRange {
        (behind(self.sum_places(context)), self.weight_bytes())
    }

    fn weight_bytes(&self) -> u64 {
        if self.weighted { self.entries() * 4 } else { 0 }
    }

    /// Rows per local expert, then the same with pads: `i64 [2, experts]`. Rank-major, rows that
    /// chose each: `i64 [experts]`.
    pub fn counts(&self, context: u32) -> ByteRange {
        (behind(self.weights(context)), 2 * self.experts * 8)
    }

    /// The runs by which a kernel places this rank's own rows, as [`RunArgs::lay_out`] writes them.
    pub fn own_runs(&self, context: u32) -> ByteRange {
        (behind(self.counts(context)), self.own_run_bytes())
    }

    fn own_run_bytes(&self) -> u64 {
        self.segments * (RunArgs::WORDS * size_of::<u32>()) as u64
    }

    /// Metadata of each row that landed: the weight, `f32`, or words that a kernel lays apart.
    pub fn metadata(&self, context: u32) -> ByteRange {
        (behind(self.own_runs(context)), self.all_metadata_bytes())
    }

    fn all_metadata_bytes(&self) -> u64 {
        self.most_rows() * self.sizing.metadata_bytes()
    }

    /// Rank-major: the local expert of each row and choice, `i32`; then their weights, `f32`. Where
    /// ranks sum a token's rows: the sum that each row is part of, and the weights.
    pub fn row_choices(&self, context: u32) -> [ByteRange; 2] {
        let experts = (behind(self.metadata(context)), self.row_choice_bytes());
        [experts, (behind(experts), self.row_choice_bytes())]
    }

    fn row_choice_bytes(&self) -> u64 {
        self.most_rows() * self.pairs * 4
    }

    pub fn pool(&self) -> ByteRange {
        (self.context(self.contexts), round(self.pool))
    }

    /// Size of the device's memory at first.
    pub fn device_bytes(&self) -> u64 {
        behind(self.pool())
    }

    /// Size to which the pool may grow.
    pub fn pool_limit(&self) -> u64 {
        round(self.limit)
    }

    /// Size to which the device's memory may grow.
    pub fn most_device_bytes(&self) -> u64 {
        self.pool().0 + self.pool_limit()
    }

    /// In host staging: from where rows leave. All that a rank dispatches fits.
    pub fn outbox(&self) -> ByteRange {
        (self.device_bytes(), round(self.entries() * self.longest_row()))
    }

    /// Bytes of host staging.
    pub fn host_staging_bytes(&self) -> u64 {
        behind(self.outbox())
    }

    /// In the enqueuer's scratch: where metadata begin, behind the index.
    pub fn scratch_metadata(&self) -> u64 {
        round(self.most_rows() * 4)
    }

    /// Bytes of the enqueuer's scratch.
    pub fn scratch_bytes(&self) -> u64 {
        self.scratch_metadata() + round(self.most_rows() * self.sizing.metadata_bytes())
    }

    /// Rows that any routing brings at most, or the budget; pads counted.
    pub fn any_rows(&self) -> u64 {
        let chosen = self.ranks.saturating_mul(self.max_tokens * self.top_k.min(self.segments));
        chosen.saturating_add(self.pad_rows()).min(self.most_rows)
    }

    /// Pads of a dispatch, at most.
    pub fn pad_rows(&self) -> u64 {
        self.segments.saturating_mul(self.align - 1)
    }

    /// Rows for which the pool has memory, once it has grown; memory of none cannot be pinned.
    fn most_rows(&self) -> u64 {
        // Of the pool as it is laid out: what is rounded up holds rows, too.
        self.any_rows().min(self.pool_limit() / self.sizing.row_bytes.max(1)).max(1)
    }

    /// Where a flag is in the host's memory.
    pub fn flag(&self, context: u32, flag: StreamFlag) -> u64 {
        u64::from(context) * FLAGS + flag as u64 * LINE
    }

    pub fn host_experts(&self) -> ByteRange {
        (u64::from(self.word_sets()) * FLAGS, self.entries() * 4)
    }

    pub fn host_weights(&self) -> ByteRange {
        (behind(self.host_experts()), self.entries() * 4)
    }

    pub fn host_metadata(&self) -> ByteRange {
        (behind(self.host_weights()), self.entries() * self.sizing.metadata_bytes())
    }

    pub fn host_places(&self) -> ByteRange {
        (behind(self.host_metadata()), self.entries() * 4)
    }

    pub fn host_sums(&self) -> ByteRange {
        (behind(self.host_places()), self.entries() * 4)
    }

    pub fn host_sum_places(&self) -> ByteRange {
        (behind(self.host_sums()), self.sum_place_bytes())
    }

    pub fn host_counts(&self) -> ByteRange {
        (behind(self.host_sum_places()), 2 * self.experts * 8)
    }

    pub fn host_own_runs(&self) -> ByteRange {
        (behind(self.host_counts()), self.own_run_bytes())
    }

    /// Where engines relay: the token of each packed row.
    pub fn host_order(&self) -> ByteRange {
        (behind(self.host_own_runs()), self.entries() * 4)
    }

    /// Zeros for pads of metadata.
    pub fn host_zeros(&self) -> ByteRange {
        (behind(self.host_order()), self.align * self.sizing.metadata_bytes())
    }

    /// Where the device plans: rows of each bin, `u32`.
    pub fn host_bin_counts(&self) -> ByteRange {
        (behind(self.host_zeros()), self.bins * 4)
    }

    /// Where the device plans: a [`ChoiceFault`] of each share of the choices, one for each bin.
    pub fn host_faults(&self) -> ByteRange {
        (behind(self.host_bin_counts()), self.bins * size_of::<ChoiceFault>() as u64)
    }

    /// Where relays sum: the rows of each of their sums, `i32 [sums, top_k]`; then the weights of
    /// these, `f32`.
    pub fn host_relay_sums(&self) -> [ByteRange; 2] {
        let cells = self.most_node_sums().saturating_mul(self.top_k * 4);
        let index = (behind(self.host_faults()), cells);
        [index, (behind(index), if self.weighted { cells } else { 0 })]
    }

    /// Size of the host's memory.
    pub fn host_bytes(&self) -> u64 {
        behind(self.host_relay_sums()[1])
    }

    /// Bytes of a context, which each handle that is alive has.
    pub fn context_bytes(&self) -> u64 {
        let permutations = 3 * round(self.entries() * 4) + round(self.sum_place_bytes());
        let permutations = permutations + round(self.weight_bytes());
        let beside = round(self.all_metadata_bytes()) + 2 * round(self.row_choice_bytes());
        permutations + round(2 * self.experts * 8) + round(self.own_run_bytes()) + beside
    }
}

fn round(bytes: u64) -> u64 {
    bytes.next_multiple_of(GRAIN)
}

fn behind((offset, len): ByteRange) -> u64 {
    offset + round(len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::PulledSums;

    fn shape(contexts: u32, row_bytes: u64) -> MemoryShape {
        let (return_bytes, words_out, return_words, partial_bytes, rank_sums) =
            (row_bytes, 1, 0, None, false);
        let sizing = RowSizes {
            row_bytes,
            return_bytes,
            words_out,
            return_words,
            partial_bytes,
            rank_sums,
            pulled_bytes: PulledSums::CHUNK_BYTES,
        };
        MemoryShape {
            contexts,
            ids: 8,
            bins: 8,
            ranks: 4,
            max_tokens: 64,
            top_k: 4,
            align: 1,
            experts: 2,
            segments: 2,
            pairs: 0,
            rank_sums: false,
            node_sums: false,
            weighted: true,
            sizing,
            most_rows: u64::MAX,
            pool: 1 << 20,
            limit: 1 << 20,
            staged: None,
            words: 0,
        }
    }

    #[test]
    fn a_context_has_permutations_and_no_rows() {
        let grows = shape(3, 512).device_bytes() - shape(2, 512).device_bytes();
        assert_eq!(shape(3, 512).context_bytes(), grows, "memory grows by a context");
        // Four permutations of 64 tokens with 4 choices, and a word for each of at most 4 * 64 * 2
        // rows; between them the counts, and two runs of own rows.
        assert_eq!(shape(2, 512).context_bytes(), 4 * 64 * 4 * 4 + 256 + 256 + 512 * 4);
        assert_eq!(shape(2, 1024).context_bytes(), shape(2, 512).context_bytes());
    }

    #[test]
    fn within_a_budget_a_context_has_words_for_as_many_rows() {
        let budget = MemoryShape { most_rows: 128, ..shape(2, 512) };
        assert_eq!(shape(2, 512).metadata(0).1, 512 * 4);
        assert_eq!(budget.metadata(0).1, 128 * 4);
    }

    #[test]
    fn pieces_lie_behind_each_other() {
        let shape = shape(2, 512);
        let mut pieces = vec![shape.zeros(), shape.map(), shape.locals(), shape.groups()];
        pieces.extend([
            shape.places_in_sums(),
            shape.own_experts(),
            shape.staging(),
            shape.packed_metadata(),
        ]);
        for context in 0..2 {
            pieces.extend([shape.order(context), shape.places(context), shape.sums(context)]);
            pieces.extend([shape.weights(context), shape.counts(context), shape.own_runs(context)]);
            pieces.push(shape.metadata(context));
        }
        pieces.push(shape.pool());
        for next in pieces.windows(2) {
            assert!(next[0].0 + next[0].1 <= next[1].0, "{next:?}");
        }
    }

    #[test]
    fn host_arrays_lie_behind_the_words_of_all_contexts() {
        let shape = shape(3, 512);
        let (at, len) = shape.host_faults();
        assert!(at + len <= shape.host_bytes());
        assert!(shape.host_experts().0 >= shape.flag(shape.no_context(), StreamFlag::Status) + LINE);
        assert!(shape.flag(1, StreamFlag::Status) >= shape.flag(0, StreamFlag::Status) + LINE);
    }
}
