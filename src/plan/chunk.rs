//! Rows that are offered or brought home, and what goes with them, in one piece of memory.

/// A chunk: `rows` rows of `row_bytes` bytes, then, on a cache line of their own, `notes` words.
///
/// ```text
///   | row 0 | row 1 | ... | to 64 | note 0 | note 1 | ... | to 64 |
/// ```
///
/// ```
/// let chunk = sidelane::plan::Chunk { rows: 3, notes: 5, row_bytes: 48 };
/// assert_eq!((chunk.notes_at(), chunk.bytes()), (192, 256));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chunk {
    /// Rows.
    pub rows: u32,
    /// 32-bit words behind them.
    pub notes: u64,
    /// Bytes of one row.
    pub row_bytes: u64,
}

impl Chunk {
    /// From the start of the chunk to its words.
    pub fn notes_at(&self) -> u64 {
        (u64::from(self.rows) * self.row_bytes).next_multiple_of(64)
    }

    /// Where engines relay, behind what lands: as many arrivals as rows, then for each row which of them it is. From the start of
    /// the chunk to that index, and to its end.
    pub fn arrivals(&self) -> (u64, u64) {
        let rows = u64::from(self.rows);
        let index = self.bytes().saturating_add(rows.saturating_mul(self.row_bytes)).next_multiple_of(64);
        (index, index.saturating_add(rows * 4))
    }

    /// Size of the chunk.
    pub fn bytes(&self) -> u64 {
        (self.notes_at() + self.notes * 4).next_multiple_of(64)
    }
}
