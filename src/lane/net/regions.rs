//! Regions that peers may write to, and the records by which a receiver writes for them.
//!
//! A lane whose receiver is a thread (loopback, tcp) sends records: a header of 64 bytes, and a
//! payload. The receiver checks each target against its region before it writes. A NIC needs no
//! records for puts; the verbs lane sends one as the long form of a signal.
//!
//! ```text
//!   header   | kind, region | offset | len (signal: has a tag) | value | tag (3 words) | the lane's own |
//!   region   number --> (mapping, member)     removed while bytes are in flight: they are dropped
//! ```

use std::ptr::NonNull;
use std::sync::{Arc, PoisonError, RwLock};

use super::RemoteAddress;
use crate::error::MemoryError;
use crate::lane::FlagLine;
use crate::memory::PeerMapping;
use crate::schedule::Tag;

/// Largest payload of a record.
pub const CHUNK: usize = 64 << 10;
/// Bytes of a record's header.
pub const HEADER: usize = 64;

/// Request of a record to the receiver.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Record {
    /// Write the payload of `len` bytes.
    Put {
        /// Region of the receiver.
        region: u32,
        /// First byte in it.
        offset: u64,
        /// Bytes of payload.
        len: u64,
    },
    /// Write `len` zeros.
    Zero {
        /// Region of the receiver.
        region: u32,
        /// First byte in it.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Raise a flag.
    Signal {
        /// Region of the receiver.
        region: u32,
        /// The flag line's first byte in it.
        offset: u64,
        /// Its new value.
        value: u64,
        /// Payload of a record.
        tag: Option<Tag>,
    },
    /// Say when everything so far has landed.
    Ask {
        /// Number of the question: they grow.
        mark: u64,
    },
    /// Everything before this question has landed.
    Answer {
        /// Its number.
        mark: u64,
    },
    /// Nothing: the rest of the ring up to its end.
    Skip {
        /// Bytes, this header counted.
        len: u64,
    },
}

impl Record {
    /// The header.
    pub fn to_words(self) -> [u64; 8] {
        let head = |kind: u64, region: u32| kind | u64::from(region) << 32;
        match self {
            Record::Put { region, offset, len } => [head(1, region), offset, len, 0, 0, 0, 0, 0],
            Record::Zero { region, offset, len } => [head(2, region), offset, len, 0, 0, 0, 0, 0],
            Record::Signal { region, offset, value, tag } => {
                let [a, b, c] = tag.unwrap_or_default().to_words();
                [head(3, region), offset, tag.is_some().into(), value, a, b, c, 0]
            }
            Record::Skip { len } => [head(4, 0), 0, len, 0, 0, 0, 0, 0],
            Record::Ask { mark } => [head(5, 0), 0, 0, mark, 0, 0, 0, 0],
            Record::Answer { mark } => [head(6, 0), 0, 0, mark, 0, 0, 0, 0],
        }
    }

    /// The request in a header, if the header is valid.
    pub fn from_words(w: [u64; 8]) -> Option<Record> {
        let (kind, region, offset, len) = (w[0] as u32, (w[0] >> 32) as u32, w[1], w[2]);
        Some(match kind {
            1 => Record::Put { region, offset, len },
            2 => Record::Zero { region, offset, len },
            3 => {
                let tag = (len != 0).then(|| Tag::from_words([w[4], w[5], w[6]]));
                Record::Signal { region, offset, value: w[3], tag }
            }
            4 => Record::Skip { len },
            5 => Record::Ask { mark: w[3] },
            6 => Record::Answer { mark: w[3] },
            _ => return None,
        })
    }

    /// The header as it goes to other machines.
    pub fn to_bytes(self) -> [u8; HEADER] {
        bytemuck::cast(self.to_words().map(u64::to_le))
    }

    /// The request in a header from another machine, if the header is valid.
    pub fn from_bytes(bytes: [u8; HEADER]) -> Option<Record> {
        Record::from_words(bytemuck::cast::<_, [u64; 8]>(bytes).map(u64::from_le))
    }

    /// The receiver's region that it is for, if any.
    fn region(self) -> Option<u32> {
        match self {
            Record::Put { region, .. } | Record::Zero { region, .. } | Record::Signal { region, .. } => {
                Some(region)
            }
            Record::Ask { .. } | Record::Answer { .. } | Record::Skip { .. } => None,
        }
    }

    /// Bytes of payload that follow the header.
    pub fn payload(self) -> usize {
        match self {
            Record::Put { len, .. } => len as usize,
            _ => 0,
        }
    }
}

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
