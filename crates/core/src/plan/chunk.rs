//! Rows that are offered or returned, and their metadata, in one piece of memory.

/// A chunk: `rows` rows of `row_bytes` bytes, then, from the next cache line on, `notes` words of
/// metadata.
///
/// ```text
///   | row 0 | row 1 | ... | to 64 | note 0 | note 1 | ... | to 64 |
/// ```
///
/// ```
/// let chunk = sidelane_core::plan::RowBuffer { rows: 3, notes: 5, row_bytes: 48 };
/// assert_eq!((chunk.notes_at(), chunk.bytes()), (192, 256));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowBuffer {
    /// Rows.
    pub rows: u32,
    /// 32-bit words behind them.
    pub notes: u64,
    /// Bytes of one row.
    pub row_bytes: u64,
}

/// In whole lines. Saturates: a size beyond the limit fits nowhere.
fn lines(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(64).unwrap_or(u64::MAX - 63)
}

impl RowBuffer {
    /// From the start of the chunk to its words.
    pub fn notes_at(&self) -> u64 {
        lines(u64::from(self.rows).saturating_mul(self.row_bytes))
    }

    /// The rows alone.
    pub fn without_notes(self) -> RowBuffer {
        RowBuffer { notes: 0, ..self }
    }

    /// Where engines relay, behind the landing rows: as many arrivals as rows, then the arrival of
    /// each row. From the start of the chunk to that index, and to its end.
    pub fn arrivals(&self) -> (u64, u64) {
        let rows = u64::from(self.rows);
        let index = lines(self.bytes().saturating_add(rows.saturating_mul(self.row_bytes)));
        (index, index.saturating_add(rows * 4))
    }

    /// Where engines relay, behind the arrivals and their index: offset of the staged rows.
    pub fn staging(&self) -> u64 {
        lines(self.arrivals().1)
    }

    /// Size of the chunk.
    pub fn bytes(&self) -> u64 {
        lines(self.notes_at().saturating_add(self.notes.saturating_mul(4)))
    }
}
