//! Tables of addresses in memory that kernels read.

use crate::device::flags::MemOpBatch;
use crate::device::range::{ByteSpan, Claims, DeviceRange};
use crate::device::stream::Stream;
use crate::error::DeviceError;

/// A table of addresses, one for each rank, in memory of the device: targets of packed slots, or of
/// returned rows.
///
/// It is written once; each clone holds the memory that it names.
#[derive(Debug)]
pub struct Addresses {
    pub(super) table: DeviceRange,
    pub(super) count: u32,
    /// Bytes that every address has.
    pub(super) each: u64,
    /// Claims on the named memory.
    pub(super) named: Claims,
}

impl Addresses {
    /// Has `stream` write the addresses of `spans` to `table`, eight bytes each. Later launches in
    /// the stream may use the table; other streams must be ordered after it. No one else may write
    /// to `table` while this value lives.
    ///
    /// # Errors
    /// [`DeviceError::TooSmall`] and [`DeviceError::Misaligned`] for the table,
    /// [`DeviceError::Misaligned`] for a span that is not at a multiple of 16 bytes,
    /// [`DeviceError::Shape`] for none or too many, [`DeviceError::NoAccess`],
    /// [`DeviceError::Call`].
    pub fn new(stream: &Stream, table: &DeviceRange, spans: &[ByteSpan<'_>]) -> Result<Self, DeviceError> {
        const KERNEL: &str = "table of addresses";
        let count = u32::try_from(spans.len()).ok().filter(|count| (1..1 << 16).contains(count));
        let given = spans.len() as u64;
        let shape =
            DeviceError::Shape { kernel: KERNEL, what: "addresses", given, expected: "between 1 and 65535" };
        let (count, needed) = (count.ok_or(shape)?, given * 8);
        if table.len() < needed {
            return Err(DeviceError::TooSmall {
                kernel: KERNEL,
                what: "its memory",
                given: table.len(),
                needed,
            });
        }
        let mut writes = MemOpBatch::with_capacity(&stream.context, spans.len() * 2);
        let mut named = Claims::default();
        for (offset, span) in (0..).step_by(8).zip(spans) {
            span.range.check_reach(stream.device())?;
            if !span.address.is_multiple_of(16) {
                let (what, align) = ("an address for kernels", 16);
                return Err(DeviceError::Misaligned { what, value: span.address, align });
            }
            named.add(span.range.keep());
            // Halves: not every device writes words of 64 bits.
            writes.write(table.word::<u32>(offset)?, span.address as u32)?;
            writes.write(table.word::<u32>(offset + 4)?, (span.address >> 32) as u32)?;
        }
        stream.operate(&mut writes)?;
        let table = table.part(0, needed)?;
        if !table.address().is_multiple_of(8) {
            let (what, align) = ("a table of addresses", 8);
            return Err(DeviceError::Misaligned { what, value: table.address(), align });
        }
        let each = spans.iter().map(|span| span.len).min().unwrap_or(0);
        Ok(Addresses { table, count, each, named })
    }

    /// How many there are.
    pub fn count(&self) -> u32 {
        self.count
    }
}
