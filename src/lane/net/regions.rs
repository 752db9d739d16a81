//! Regions that peers may write to, and the writes that this rank does for them.

use std::ptr::NonNull;
use std::sync::{Arc, PoisonError, RwLock};

use super::RemoteAddress;
use super::record::Record;
use crate::error::MemoryError;
use crate::lane::FlagLine;
use crate::memory::PeerMapping;

/// Memory that peers may write to: one member of a mapping.
#[derive(Clone, Debug)]
pub struct Region {
    /// The mapping.
    pub mapped: Arc<PeerMapping>,
    /// Which member: this rank's own.
    pub member: u32,
}

/// All regions of a rank, by number. Region 0 is its heap.
#[derive(Debug, Default)]
pub struct Regions {
    table: RwLock<Vec<Option<Region>>>,
}

impl Regions {
    /// Registers a region; peers name it by the number returned.
    pub fn add(&self, region: Region) -> u32 {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        table.push(Some(region));
        table.len() as u32 - 1
    }

    /// A number for memory that only NICs write.
    pub fn reserve(&self) -> u32 {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        table.push(None);
        table.len() as u32 - 1
    }

    /// From now on, what comes for this region is dropped: it was in flight when its owner let go
    /// of it. Numbers are not used again.
    pub fn remove(&self, number: u32) {
        if let Some(slot) =
            self.table.write().unwrap_or_else(PoisonError::into_inner).get_mut(number as usize)
        {
            *slot = None;
        }
    }

    /// Performs the operation of a record.
    ///
    /// # Safety
    /// `payload` must be readable for the length of a `Put` record.
    pub(super) unsafe fn apply(&self, record: Record, payload: *const u8) -> Result<(), MemoryError> {
        let Some(number) = record.region() else { return Ok(()) };
        match record {
            Record::Put { offset, len, .. } => self.with(number, offset, len, |to| {
                if let Some(to) = to {
                    // SAFETY: the target was checked against its region; the source by the caller.
                    unsafe { std::ptr::copy_nonoverlapping(payload, to.as_ptr(), len as usize) };
                }
            }),
            Record::Zero { offset, len, .. } => self.with(number, offset, len, |to| {
                if let Some(to) = to {
                    // SAFETY: the target was checked against its region.
                    unsafe { std::ptr::write_bytes(to.as_ptr(), 0, len as usize) };
                }
            }),
            Record::Signal { offset, value, tag, .. } => self.with(number, offset, 64, |line| {
                let Some(line) = line else { return Ok(()) };
                if line.as_ptr().align_offset(64) != 0 {
                    return Err(MemoryError::Misaligned { address: line.as_ptr() as usize, align: 64 });
                }
                // SAFETY: an aligned line inside its region; the region table is locked, which
                // keeps the mapping alive.
                unsafe { FlagLine::new(line) }.raise(value, tag.as_ref());
                Ok(())
            })?,
            Record::Ask { .. } | Record::Answer { .. } | Record::Skip { .. } => Ok(()),
        }
    }

    /// Gives `act` the address of bytes of a region, or nothing if the region's owner has let go of
    /// it.
    pub(super) fn with<T>(
        &self,
        number: u32,
        offset: u64,
        len: u64,
        act: impl FnOnce(Option<NonNull<u8>>) -> T,
    ) -> Result<T, MemoryError> {
        // Held until it has acted: a region that is removed may be unmapped at once.
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        match table.get(number as usize) {
            Some(Some(Region { mapped, member })) => Ok(act(Some(mapped.at(*member, offset, len)?))),
            Some(None) => Ok(act(None)),
            None => Err(MemoryError::OutOfBounds { peer: number, offset, len, size: 0 }),
        }
    }

    /// Raises a flag line by so much.
    ///
    /// # Errors
    /// [`MemoryError`], if there is no such line.
    pub(super) fn grow(&self, word: RemoteAddress, growth: u64) -> Result<(), MemoryError> {
        let RemoteAddress { region, offset } = word;
        let value = {
            let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
            let Some(Some(Region { mapped, member })) = table.get(region as usize) else { return Ok(()) };
            let mut value = [0u64];
            mapped.read(*member, offset, &mut value)?;
            value[0]
        };
        let record = Record::Signal { region, offset, value: value.wrapping_add(growth), tag: None };
        // SAFETY: a signal has no payload.
        unsafe { self.apply(record, std::ptr::null()) }
    }
}
