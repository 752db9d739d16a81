//! Memory that rows lie in: sizes of what moves, buffers of rows with their metadata, and slots of
//! fixed size.
//!
//! A buffer has the rows of one exact call. A *slot* has the rows from one rank to another where
//! nothing is counted, rank-major, in one piece of a size known before the call:
//!
//! ```text
//!   buffer   | row 0 | row 1 | ... | to 64 | metadata 0 | metadata 1 | ... | to 64 |
//!
//!   slot
//!   0      experts_at        weights_at         counts_at                 rows_at                    bytes
//!   | head | experts, i32    | weights, f32     | counts, | zero, to   | row 0 | row 1 | ... | 0 | 0 |
//!   |      | [max_tokens, K] | [max_tokens, K]  | if any  | whole rows |       rows, then zeros      |
//! ```
//!
//! Row `i` of a slot is a token of the source with an expert at the destination. It appears once,
//! however many of its experts are there. Its `experts[i]` are local numbers of the destination in
//! the order of its choices, -1 for those at other ranks, and `weights[i]` are their weights. Rows
//! are in token order. Unused parts are written, too: rows of zeros, experts of -1, weights of 0.
//! Parts of the header begin at multiples of 64 bytes.
//!
//! Where rows are expanded within a budget, every slot also has the number of rows of its source
//! for each bin of all ranks, `u32 [bins]`. All ranks then know which rows of all ranks find room.
//!
//! The header takes whole rows, so the consecutive slots of a rank are one tensor
//! `[ranks * slot_rows, row_bytes]`. There is a row for every token, so no row is ever dropped, and
//! a slot moves as one put of constant size: no rank counts before, so a captured graph can hold
//! it.

use crate::error::PlanError;

/// Bytes of a cache line. A flag word has one alone. Metadata, parts of headers and shares of a sum
/// begin at a multiple.
pub const LINE: u64 = 64;

/// A buffer: `rows` rows of `row_bytes` bytes, then, from the next cache line on, so many words of
/// metadata.
///
/// ```
/// let buffer = sidelane_core::plan::RowBuffer { rows: 3, metadata: 5, row_bytes: 48 };
/// assert_eq!((buffer.metadata_at(), buffer.bytes()), (192, 256));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowBuffer {
    /// Rows.
    pub rows: u32,
    /// 32-bit words behind them.
    pub metadata: u64,
    /// Bytes of one row.
    pub row_bytes: u64,
}

/// In whole cache lines. Saturates: a size beyond the limit fits nowhere.
fn lines(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(LINE).unwrap_or(u64::MAX - (LINE - 1))
}

impl RowBuffer {
    /// From the start of the buffer to its words.
    pub fn metadata_at(&self) -> u64 {
        lines(u64::from(self.rows).saturating_mul(self.row_bytes))
    }

    /// The rows alone.
    pub fn without_metadata(self) -> RowBuffer {
        RowBuffer { metadata: 0, ..self }
    }

    /// Where engines relay, behind the landing rows: as many arrivals as rows, then the arrival of
    /// each row. From the start of the buffer to that index, and to its end.
    pub fn arrivals(&self) -> (u64, u64) {
        let rows = u64::from(self.rows);
        let index = lines(self.bytes().saturating_add(rows.saturating_mul(self.row_bytes)));
        (index, index.saturating_add(rows * 4))
    }

    /// Where engines relay, behind the arrivals and their index: offset of the staged rows.
    pub fn staging(&self) -> u64 {
        lines(self.arrivals().1)
    }

    /// Size of the buffer.
    pub fn bytes(&self) -> u64 {
        lines(self.metadata_at().saturating_add(self.metadata.saturating_mul(4)))
    }
}

/// Sizes of what moves: the same in every call of one `ExpertParallel`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowSizes {
    /// Bytes of one row that is sent; 0 if only its metadata is.
    pub row_bytes: u64,
    /// Bytes of one returned row.
    pub return_bytes: u64,
    /// Words that go out with a row.
    pub words_out: u32,
    /// Words that return with a row: one per choice that it stands for.
    pub return_words: u32,
    /// Bytes of a partial sum, where relays sum.
    pub partial_bytes: Option<u64>,
    /// Rows that return are [sums by rank](super::RankSums).
    pub rank_sums: bool,
    /// Where engines pull rows that a relay sums: fewest bytes of a bin, on average, in a
    /// [chunk](super::PulledSums).
    pub pulled_bytes: u64,
}

impl RowSizes {
    /// Memory in which `rows` rows land.
    pub fn landing(&self, rows: u32) -> RowBuffer {
        RowBuffer { rows, metadata: u64::from(rows) * u64::from(self.words_out), row_bytes: self.row_bytes }
    }

    /// Memory that a rank offers in a return: as many rows as landed.
    pub fn offer(&self, rows: u32) -> RowBuffer {
        RowBuffer {
            rows,
            metadata: u64::from(rows) * u64::from(self.return_words),
            row_bytes: self.return_bytes,
        }
    }

    /// Memory that a block of `entries` entries returns: `rows` rows, or partials where relays sum.
    pub fn returned(&self, rows: u32, entries: u32) -> RowBuffer {
        let row_bytes = self.partial_bytes.unwrap_or(self.return_bytes);
        RowBuffer { rows, metadata: u64::from(entries) * u64::from(self.return_words), row_bytes }
    }

    /// The same in a return of weights alone by copy engines, which return them as rows.
    pub fn of_weights(self) -> RowSizes {
        let return_bytes = u64::from(self.return_words) * 4;
        RowSizes { return_bytes, return_words: 0, partial_bytes: None, rank_sums: false, ..self }
    }

    /// Bytes that go out with a row.
    pub fn metadata_bytes(&self) -> u64 {
        u64::from(self.words_out) * 4
    }

    /// Bytes in which `rows` rows can land and, behind them, `staged` rows can wait to be relayed.
    pub fn extent_bytes(&self, rows: u32, staged: u32) -> u64 {
        self.landing(rows).bytes().saturating_add(u64::from(staged) * self.row_bytes)
    }
}

/// The first 64 bytes of a slot, in the byte order of the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct SlotHead {
    /// Rows that are used.
    pub rows: u32,
    /// Tokens of the source, whether they have a row here or not.
    pub tokens: u32,
    /// Digest on which source and destination must agree before a row is believed.
    pub digest: u64,
    /// Which call of the source this is, counted from 1.
    pub call: u64,
    /// Why the source refuses the call, as a status word of its kernels; 0 if it does not.
    pub refused: u32,
    /// Zero.
    pub reserved: [u32; 9],
}

const _: () = assert!(size_of::<SlotHead>() == LINE as usize);

/// Where things lie in a slot; the same for all slots of a group.
///
/// ```
/// let shape = sidelane_core::plan::SlotShape::new(128, 8, 14336)?;
/// assert_eq!((shape.experts_at(), shape.weights_at(), shape.rows_at()), (64, 4160, 14336));
/// assert_eq!((shape.header_rows(), shape.slot_rows(), shape.bytes()), (1, 129, 129 * 14336));
/// # Ok::<(), sidelane_core::error::PlanError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotShape {
    max_tokens: u32,
    top_k: u32,
    row_bytes: u64,
    bins: u32,
    header_rows: u32,
}

impl SlotShape {
    /// Slots for sources of at most `max_tokens` tokens with `top_k` choices each, and rows of
    /// `row_bytes` bytes.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] for a zero, for rows that are no multiple of 16 bytes, and for
    /// slots of 2^31 choices or rows or 2^63 bytes.
    pub fn new(max_tokens: u32, top_k: u32, row_bytes: u64) -> Result<Self, PlanError> {
        let bad = |parameter, seen, expected| PlanError::BadParameter { parameter, seen, expected };
        let most = i32::MAX as u32;
        if !(1..=most).contains(&max_tokens) {
            return Err(bad("max_tokens", max_tokens.into(), "between 1 and 2^31 - 1"));
        }
        if top_k == 0 || top_k > most / max_tokens {
            return Err(bad("top_k", top_k.into(), "at least 1, and fewer than 2^31 choices in all"));
        }
        if row_bytes == 0 || !row_bytes.is_multiple_of(16) {
            return Err(bad("row_bytes", row_bytes, "a multiple of 16"));
        }
        SlotShape { max_tokens, top_k, row_bytes, bins: 0, header_rows: 0 }.sized()
    }

    /// The same slots with a count for each of so many bins.
    ///
    /// # Errors
    /// As [`SlotShape::new`].
    pub fn with_counts(self, bins: u32) -> Result<Self, PlanError> {
        SlotShape { bins, ..self }.sized()
    }

    /// Finds the rows of the header.
    fn sized(self) -> Result<Self, PlanError> {
        let bad = |parameter, seen, expected| PlanError::BadParameter { parameter, seen, expected };
        let (most, row_bytes) = (i32::MAX as u32, self.row_bytes);
        let header_rows = (self.counts_at() + u64::from(self.bins) * 4).div_ceil(row_bytes);
        let rows = header_rows + u64::from(self.max_tokens);
        if rows > most.into() {
            return Err(bad("rows of a slot", rows, "at most 2^31 - 1"));
        }
        if rows.checked_mul(row_bytes).is_none_or(|bytes| bytes > i64::MAX as u64) {
            return Err(bad("row_bytes", row_bytes, "slots of at most 2^63 - 1 bytes"));
        }
        Ok(SlotShape { header_rows: header_rows as u32, ..self })
    }

    /// Tokens of a source, at most; rows of a slot, without the header.
    pub fn max_tokens(&self) -> u32 {
        self.max_tokens
    }

    /// Choices of a token.
    pub fn top_k(&self) -> u32 {
        self.top_k
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    /// Bins that are counted.
    pub fn bins(&self) -> u32 {
        self.bins
    }

    /// Rows that the header takes.
    pub fn header_rows(&self) -> u32 {
        self.header_rows
    }

    /// Rows of a slot, header included.
    pub fn slot_rows(&self) -> u32 {
        self.header_rows + self.max_tokens
    }

    /// From the start of a slot to its experts, `i32 [max_tokens, top_k]`.
    pub fn experts_at(&self) -> u64 {
        size_of::<SlotHead>() as u64
    }

    /// From the start of a slot to its weights, `f32 [max_tokens, top_k]`.
    pub fn weights_at(&self) -> u64 {
        (self.experts_at() + self.array_bytes()).next_multiple_of(LINE)
    }

    /// From the start of a slot to its counts, `u32 [bins]`, or to where they would be.
    pub fn counts_at(&self) -> u64 {
        match self.bins {
            0 => self.weights_at() + self.array_bytes(),
            _ => (self.weights_at() + self.array_bytes()).next_multiple_of(LINE),
        }
    }

    /// From the start of a slot to its first row.
    pub fn rows_at(&self) -> u64 {
        u64::from(self.header_rows) * self.row_bytes
    }

    /// Size of a slot.
    pub fn bytes(&self) -> u64 {
        u64::from(self.slot_rows()) * self.row_bytes
    }

    /// Bytes of the experts, and of the weights.
    fn array_bytes(&self) -> u64 {
        u64::from(self.max_tokens) * u64::from(self.top_k) * 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_of_a_slot_follow_each_other_and_waste_less_than_a_row(
            max_tokens in 1..5000_u32, top_k in 1..20_u32, vectors in 1..2000_u64, bins in 0..300_u32,
        ) {
            let shape = SlotShape::new(max_tokens, top_k, vectors * 16).unwrap().with_counts(bins).unwrap();
            let array = u64::from(max_tokens) * u64::from(top_k) * 4;
            prop_assert_eq!(shape.experts_at(), 64);
            prop_assert!(shape.weights_at() >= shape.experts_at() + array);
            prop_assert!(shape.weights_at() < shape.experts_at() + array + 64);
            prop_assert!(shape.counts_at() >= shape.weights_at() + array);
            prop_assert!(shape.counts_at() < shape.weights_at() + array + 64);
            let end = shape.counts_at() + u64::from(bins) * 4;
            prop_assert!(shape.rows_at() >= end && shape.rows_at() < end + shape.row_bytes());
            prop_assert_eq!(shape.rows_at(), u64::from(shape.header_rows()) * shape.row_bytes());
            prop_assert_eq!(shape.bytes(), shape.rows_at() + u64::from(max_tokens) * shape.row_bytes());
            prop_assert_eq!(shape.bytes(), u64::from(shape.slot_rows()) * shape.row_bytes());
            for at in [shape.experts_at(), shape.weights_at()] {
                prop_assert_eq!(at % 64, 0);
            }
        }
    }

    #[test]
    fn shapes_that_no_slot_can_have_are_refused_by_name() {
        for (max_tokens, top_k, row_bytes, parameter) in [
            (0, 8, 16, "max_tokens"),
            (1 << 31, 1, 16, "max_tokens"),
            (1, 0, 16, "top_k"),
            (1, u32::MAX, 16, "top_k"),
            (1, 1, 0, "row_bytes"),
            (1, 1, 24, "row_bytes"),
            (1 << 28, 8, 16, "top_k"),
            (i32::MAX as u32, i32::MAX as u32, 16, "top_k"),
            (i32::MAX as u32, 1, 16, "rows of a slot"),
            (1, 1, u64::MAX - 15, "row_bytes"),
            (3, 1, 1 << 61, "row_bytes"),
        ] {
            let Err(PlanError::BadParameter { parameter: seen, .. }) =
                SlotShape::new(max_tokens, top_k, row_bytes)
            else {
                panic!("{max_tokens} {top_k} {row_bytes}")
            };
            assert_eq!(seen, parameter);
        }
    }
}
