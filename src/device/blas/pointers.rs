//! Addresses of matrices on their way to the device, where grouped products read them.

use std::sync::Arc;

use super::Gemm;
use crate::device::allocation::Allocation;
use crate::device::context::Context;
use crate::device::pinned::PinnedMemory;
use crate::device::range::DeviceRange;
use crate::device::reservation::Reservation;
use crate::device::stream::{Event, Stream};
use crate::error::DeviceError;

/// Bytes of one half of the pinned memory, and of the table.
const HALF: usize = 256 << 10;

/// Products of one call, at most.
pub const MOST: usize = HALF / 24;

/// Two halves of pinned memory, used in turn, and one table on the device: what writes the table
/// goes in the same stream as what reads it.
#[derive(Debug)]
pub struct Pointers {
    pinned: PinnedMemory,
    table: DeviceRange,
    used: usize,
    /// Behind the last copy out of each half.
    marks: [Event; 2],
}

impl Pointers {
    pub fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let allocation = Allocation::new(context, HALF as u64)?;
        let place = Reservation::new(context, 1, allocation.bytes())?;
        let table = place.map(0, &allocation, &[context.device()])?;
        let marks = [Event::new(context)?, Event::new(context)?];
        Ok(Pointers { pinned: PinnedMemory::new(context, 2 * HALF)?, table, used: 0, marks })
    }

    /// Has the stream write the addresses of at most [`MOST`] products to the table, and returns
    /// where they begin: all of a, all of b, all of c.
    pub fn send(&mut self, stream: &Stream, all: &[Gemm]) -> Result<u64, DeviceError> {
        let addresses: Vec<u64> =
            (0..3).flat_map(|matrix| all.iter().map(move |gemm| gemm.at[matrix])).collect();
        let bytes: &[u8] = bytemuck::cast_slice(&addresses);
        if self.used % HALF + bytes.len() > HALF {
            let half = self.used / HALF;
            self.marks[half].record(stream)?;
            // Its copies are long done, unless the host is that far ahead of the stream.
            self.marks[1 - half].synchronize()?;
            self.used = (1 - half) * HALF;
        }
        self.pinned.write(self.used, bytes)?;
        let len = bytes.len() as u64;
        stream.copy(self.table.span(0, len)?, self.pinned.range().span(self.used as u64, len)?)?;
        self.used += bytes.len();
        Ok(self.table.address())
    }
}
