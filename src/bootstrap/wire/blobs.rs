//! Many blobs in little memory, and a column of a table of them.
//!
//! ```text
//!   of rank 0   | for 0 | for 1 | for 2 |
//!   of rank 1   | for 0 | for 1 | for 2 |      the column of 1: the blobs that all have brought for it
//!   of rank 2   | for 0 | for 1 | for 2 |
//! ```
//!
//! An exchange among n ranks has n^2 blobs, all of them at rank 0. Those of one rank are alike:
//! they describe its NIC, and only a few numbers are those of a pair. So of blobs of one length the
//! first is kept, and of each the bytes at places where any differs:
//!
//! ```text
//!   for 0   | N I C | 7 | h e a p | 1 |          first    | N I C | 7 | h e a p | 1 |
//!   for 1   | N I C | 8 | h e a p | 3 |   ==>    places   3, 8
//!   for 2   | N I C | 9 | h e a p | 4 |          bytes    | 7 1 | 8 3 | 9 4 |
//! ```
//!
//! They come to rank 0 like that. The answers are columns, which are written out when they are
//! sent.

use std::sync::Arc;

use super::connection::{Malformed, Reader, Writer};

/// Blobs, by number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blobs(Kept);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kept {
    /// Those that are not empty have one length.
    Alike {
        /// The first of these.
        first: Vec<u8>,
        /// Places in it where any of them differs.
        places: Vec<u32>,
        /// The bytes there, of each blob.
        bytes: Vec<u8>,
        is_empty: Vec<bool>,
    },
    /// One behind the other, and where each ends.
    Whole { bytes: Vec<u8>, ends: Vec<u32> },
}

impl Blobs {
    /// These blobs, in whichever way takes less memory.
    fn new(blobs: &[&[u8]]) -> Self {
        let whole = blobs.iter().map(|blob| blob.len() + 4).sum();
        Blobs(alike(blobs).filter(|alike| alike.bytes() < whole).unwrap_or_else(|| {
            let mut bytes = Vec::with_capacity(whole - 4 * blobs.len());
            let mut end = |blob: &&[u8]| {
                bytes.extend_from_slice(blob);
                // A length that wraps is never read: the frame is too large to be sent.
                bytes.len() as u32
            };
            let ends = blobs.iter().map(&mut end).collect();
            Kept::Whole { bytes, ends }
        }))
    }

    /// How many.
    pub fn len(&self) -> usize {
        match &self.0 {
            Kept::Alike { is_empty, .. } => is_empty.len(),
            Kept::Whole { ends, .. } => ends.len(),
        }
    }

    /// Bytes of one of them; 0 if there is none of this number.
    pub fn len_of(&self, number: usize) -> usize {
        match &self.0 {
            Kept::Alike { first, is_empty, .. } if is_empty.get(number) == Some(&false) => first.len(),
            Kept::Alike { .. } => 0,
            Kept::Whole { ends, bytes } => range(ends, bytes, number).len(),
        }
    }

    /// One of them, which `into` may have to hold; empty if there is none of this number.
    fn get<'a>(&'a self, number: usize, into: &'a mut Vec<u8>) -> &'a [u8] {
        match &self.0 {
            Kept::Alike { first, places, bytes, .. } if self.len_of(number) > 0 => {
                into.clone_from(first);
                let differing = &bytes[number * places.len()..][..places.len()];
                places.iter().zip(differing).for_each(|(&place, &byte)| into[place as usize] = byte);
                into
            }
            Kept::Alike { .. } => &[],
            Kept::Whole { bytes, ends } => &bytes[range(ends, bytes, number)],
        }
    }

    /// As they are kept.
    pub(super) fn write(&self, w: &mut Writer) {
        let numbers = |w: &mut Writer, numbers: &[u32]| {
            w.u32(numbers.len() as u32);
            numbers.iter().for_each(|&number| w.u32(number));
        };
        match &self.0 {
            Kept::Alike { first, places, bytes, is_empty } => {
                w.u8(0);
                w.bytes(first);
                numbers(w, places);
                w.bytes(bytes);
                w.u32(is_empty.len() as u32);
                is_empty.iter().for_each(|&is_empty| w.u8(is_empty.into()));
            }
            Kept::Whole { bytes, ends } => {
                w.u8(1);
                w.bytes(bytes);
                numbers(w, ends);
            }
        }
    }

    pub(super) fn read(r: &mut Reader) -> Result<Self, Malformed> {
        let kept = match r.u8()? {
            0 => {
                let (first, places, bytes) = (r.bytes()?.to_vec(), r.list(Reader::u32)?, r.bytes()?.to_vec());
                let flag = |r: &mut Reader| match r.u8()? {
                    flag @ 0..=1 => Ok(flag == 1),
                    _ => Err(Malformed),
                };
                Kept::Alike { first, places, bytes, is_empty: r.list(flag)? }
            }
            1 => Kept::Whole { bytes: r.bytes()?.to_vec(), ends: r.list(Reader::u32)? },
            _ => return Err(Malformed),
        };
        if kept.is_valid() { Ok(Blobs(kept)) } else { Err(Malformed) }
    }

    /// Bytes of memory.
    #[cfg(test)]
    pub fn held_bytes(&self) -> usize {
        self.0.bytes()
    }
}

impl<B: AsRef<[u8]>> FromIterator<B> for Blobs {
    fn from_iter<I: IntoIterator<Item = B>>(all: I) -> Self {
        let all: Vec<B> = all.into_iter().collect();
        Blobs::new(&all.iter().map(AsRef::as_ref).collect::<Vec<_>>())
    }
}

impl Kept {
    /// Whether all numbers lead into the bytes.
    fn is_valid(&self) -> bool {
        match self {
            Kept::Alike { first, places, bytes, is_empty } => {
                let inside = places.last().is_none_or(|&last| (last as usize) < first.len());
                let count = places.len().checked_mul(is_empty.len());
                inside && places.is_sorted_by(|a, b| a < b) && count == Some(bytes.len())
            }
            Kept::Whole { bytes, ends } => {
                ends.is_sorted() && ends.last().map_or(0, |&end| end as usize) == bytes.len()
            }
        }
    }

    /// Bytes of memory.
    fn bytes(&self) -> usize {
        match self {
            Kept::Alike { first, places, bytes, is_empty } => {
                first.len() + 4 * places.len() + bytes.len() + is_empty.len()
            }
            Kept::Whole { bytes, ends } => bytes.len() + 4 * ends.len(),
        }
    }
}

/// Blobs by their differences, if those that are not empty have one length.
fn alike(blobs: &[&[u8]]) -> Option<Kept> {
    let first = *blobs.iter().find(|blob| !blob.is_empty())?;
    let mut differs = vec![false; first.len()];
    for blob in blobs.iter().filter(|blob| !blob.is_empty()) {
        if blob.len() != first.len() {
            return None;
        }
        differs
            .iter_mut()
            .zip(*blob)
            .zip(first)
            .for_each(|((differs, byte), first)| *differs |= byte != first);
    }
    let places: Vec<u32> = (0..).zip(&differs).filter(|&(_, &differs)| differs).map(|(at, _)| at).collect();
    let mut bytes = Vec::with_capacity(blobs.len() * places.len());
    for blob in blobs {
        bytes.extend(places.iter().map(|&place| blob.get(place as usize).copied().unwrap_or_default()));
    }
    let is_empty = blobs.iter().map(|blob| blob.is_empty()).collect();
    Some(Kept::Alike { first: first.to_vec(), places, bytes, is_empty })
}

/// Where a blob lies among those that are kept whole.
fn range(ends: &[u32], bytes: &[u8], number: usize) -> std::ops::Range<usize> {
    let end = |number: usize| ends.get(number).map_or(bytes.len(), |&end| end as usize);
    number.checked_sub(1).map_or(0, end)..end(number)
}

/// The blobs of one number, of each of many.
#[derive(Clone, Debug, PartialEq)]
pub struct Column {
    pub of: Arc<[Blobs]>,
    pub number: usize,
}

impl Column {
    /// Bytes of its blobs.
    pub fn bytes(&self) -> usize {
        self.of.iter().map(|blobs| blobs.len_of(self.number)).sum()
    }

    /// The blobs, one of each.
    pub fn to_vec(&self) -> Vec<Vec<u8>> {
        self.of.iter().map(|blobs| blobs.get(self.number, &mut Vec::new()).to_vec()).collect()
    }

    /// As a list.
    pub(super) fn write(&self, w: &mut Writer) {
        w.u32(self.of.len() as u32);
        let mut buffer = Vec::new();
        self.of.iter().for_each(|blobs| w.bytes(blobs.get(self.number, &mut buffer)));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// All of them, each as long as it says.
    fn all(blobs: &Blobs) -> Vec<Vec<u8>> {
        let blob = |number| {
            let blob = blobs.get(number, &mut Vec::new()).to_vec();
            assert_eq!(blobs.len_of(number), blob.len());
            blob
        };
        (0..blobs.len()).map(blob).collect()
    }

    fn variants() -> impl Strategy<Value = Vec<Vec<u8>>> {
        let blob = prop_oneof![
            Just(Vec::new()),
            prop::collection::vec(prop::sample::select(vec![1u8, 2]), 5),
            prop::collection::vec(any::<u8>(), 0..9),
        ];
        prop::collection::vec(blob, 0..6)
    }

    proptest! {
        #[test]
        fn blobs_come_back_as_they_were(blobs in variants()) {
            let kept: Blobs = blobs.iter().collect();
            prop_assert_eq!(all(&kept), blobs);
            prop_assert_eq!(kept.len_of(kept.len()), 0);
            let mut w = Writer::new();
            kept.write(&mut w);
            let frame = w.finish();
            prop_assert_eq!(Blobs::read(&mut Reader::new(&frame[4..])), Ok(kept));
        }

        #[test]
        fn any_bytes_are_blobs_or_refused(bytes in prop::collection::vec(0..4u8, 0..60)) {
            if let Ok(blobs) = Blobs::read(&mut Reader::new(&bytes)) {
                all(&blobs);
            }
        }
    }

    #[test]
    fn alike_blobs_take_the_memory_of_their_differences() {
        let blob = |pair: u8| [&[7; 100][..], &[pair], &[8; 50], &[pair / 2]].concat();
        let blobs: Vec<_> = (0..100).map(|pair| if pair == 50 { Vec::new() } else { blob(pair) }).collect();
        let kept: Blobs = blobs.iter().collect();
        assert_eq!(kept.held_bytes(), 152 + 2 * 4 + 100 * 2 + 100);
        assert_eq!(all(&kept), blobs);
        // Where nothing is alike, they are kept whole.
        let random: Blobs = (0..4u8).map(|blob| [blob, blob + 10, blob + 20]).collect();
        assert_eq!(random.held_bytes(), 4 * (3 + 4));
    }
}
