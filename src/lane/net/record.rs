//! Records to a receiver that writes for its peers: a header of 64 bytes, and a payload.
//!
//! ```text
//!   header   | kind, region | offset | len (signal: has a tag) | value | tag (3 words) | the wire's own |
//! ```

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
    pub fn region(self) -> Option<u32> {
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
