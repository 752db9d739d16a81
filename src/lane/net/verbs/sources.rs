//! Registered memory of this process, as puts find it: by address, or as memory of a device.
//!
//! ```text
//!   by_address   | start, end, lkey | ...    ascending: the piece of an address is found by bisection
//!   members      region, member --> pieces, one behind the other
//! ```
//!
//! It owns nothing: a piece that is deregistered meanwhile has a key that the NIC refuses.

use std::collections::HashMap;

use super::ffi::ibv_sge;
use super::{MemoryRegion, Sge};
use crate::lane::net::DeviceAddress;

/// Registered bytes of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    address: u64,
    len: usize,
    lkey: u32,
}

impl Source {
    /// A piece of them.
    pub fn piece(&self, offset: usize, len: usize) -> Sge {
        debug_assert!(offset + len <= self.len);
        // The NIC refuses addresses outside the region.
        Sge(ibv_sge { addr: self.address + offset as u64, length: len as u32, lkey: self.lkey })
    }
}

/// A piece of memory, registered by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceRange {
    start: u64,
    end: u64,
    lkey: u32,
}

impl SourceRange {
    /// Of this region of the NIC.
    pub fn of(region: &MemoryRegion) -> Self {
        SourceRange { start: region.base(), end: region.base() + region.len(), lkey: region.lkey() }
    }

    fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Its place among all pieces, of which no two have one key.
    fn place(&self) -> (u64, u64, u32) {
        (self.start, self.end, self.lkey)
    }

    /// Its bytes from an address on, if all of them are inside.
    fn source(&self, address: u64, len: u64) -> Option<Source> {
        let inside = self.start <= address && address.checked_add(len)? <= self.end;
        inside.then_some(Source { address, len: len as usize, lkey: self.lkey })
    }
}

/// All of it that is registered with one NIC.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Pieces of each member of a region, by their numbers.
    members: HashMap<u32, HashMap<u32, Vec<SourceRange>>>,
    /// Each with the largest end of it and all before it: those may reach beyond it.
    by_address: Vec<(SourceRange, u64)>,
}

impl Sources {
    /// Adds what is registered of a region: pieces of each member.
    pub fn add(&mut self, region: u32, members: impl IntoIterator<Item = (u32, Vec<SourceRange>)>) {
        for (member, pieces) in members {
            for &piece in &pieces {
                let at = self.by_address.partition_point(|(other, _)| other.place() < piece.place());
                self.by_address.insert(at, (piece, 0));
                self.reach_from(at);
            }
            self.members.entry(region).or_default().insert(member, pieces);
        }
    }

    /// Takes a region out.
    pub fn remove(&mut self, region: u32) {
        for piece in self.members.remove(&region).iter().flat_map(HashMap::values).flatten() {
            if let Ok(at) = self.by_address.binary_search_by_key(&piece.place(), |(other, _)| other.place()) {
                self.by_address.remove(at);
                self.reach_from(at);
            }
        }
    }

    /// Computes how far pieces reach, from one on, until it is as before.
    fn reach_from(&mut self, first: usize) {
        let mut reach = first.checked_sub(1).map_or(0, |before| self.by_address[before].1);
        for (piece, known) in &mut self.by_address[first..] {
            reach = piece.end.max(reach);
            if std::mem::replace(known, reach) == reach {
                return;
            }
        }
    }

    /// Bytes of this process as the NIC may read them, if one piece holds them all.
    pub fn find(&self, bytes: &[u8]) -> Option<Source> {
        self.at(bytes.as_ptr().addr() as u64, bytes.len() as u64)
    }

    fn at(&self, address: u64, len: u64) -> Option<Source> {
        let before = self.by_address.partition_point(|(piece, _)| piece.start <= address);
        let reaching = self.by_address[..before].iter().rev().take_while(|(_, reach)| *reach > address);
        reaching.filter_map(|(piece, _)| piece.source(address, len)).next()
    }

    /// `len` bytes of a device's memory as the NIC may read them, if one piece holds them all.
    pub fn find_device(&self, from: DeviceAddress, len: u64) -> Option<Source> {
        let DeviceAddress { region, member, offset } = from;
        let mut start = 0;
        self.members.get(&region)?.get(&member)?.iter().find_map(|piece| {
            let inside = offset.checked_sub(start)?;
            start += piece.len();
            piece.source(piece.start.checked_add(inside)?, len)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn piece(start: u64, len: u64, lkey: u32) -> SourceRange {
        SourceRange { start, end: start + len, lkey }
    }

    /// Two members of region 1, and one of region 2.
    fn sources() -> Sources {
        let mut sources = Sources::default();
        sources.add(1, [(0, vec![piece(1000, 64, 1), piece(1064, 936, 2)]), (1, vec![piece(5000, 100, 3)])]);
        sources.add(2, [(0, vec![piece(3000, 10, 4)])]);
        sources
    }

    #[test]
    fn bytes_are_found_in_the_one_piece_that_holds_them() {
        let sources = sources();
        let key = |address, len| sources.at(address, len).map(|source| source.lkey);
        assert_eq!([key(1000, 64), key(1064, 1), key(1999, 1), key(5099, 1)], [1, 2, 2, 3].map(Some));
        assert_eq!(sources.at(3002, 8), Some(Source { address: 3002, len: 8, lkey: 4 }));
        for (address, len) in [(999, 1), (1063, 2), (1999, 2), (3002, 9), (5100, 1), (0, 9000), (u64::MAX, 8)]
        {
            assert_eq!(key(address, len), None, "{address}, {len}");
        }
    }

    #[test]
    fn memory_of_a_device_is_found_by_its_place_in_the_region() {
        let sources = sources();
        let at = |region, member, offset, len| {
            sources.find_device(DeviceAddress { region, member, offset }, len).map(|source| source.address)
        };
        assert_eq!([at(1, 0, 8, 8), at(1, 0, 64, 936), at(1, 1, 99, 1)], [1008, 1064, 5099].map(Some));
        for (region, member, offset, len) in
            [(1, 0, 60, 8), (1, 0, 1000, 1), (1, 2, 0, 1), (3, 0, 0, 1), (2, 0, u64::MAX, 1)]
        {
            assert_eq!(at(region, member, offset, len), None, "{region} {member} {offset} {len}");
        }
    }

    #[test]
    fn a_region_that_was_taken_out_is_found_no_more() {
        let mut sources = sources();
        sources.remove(1);
        assert_eq!((sources.at(1000, 1), sources.at(3000, 1).map(|source| source.lkey)), (None, Some(4)));
    }

    proptest! {
        #[test]
        fn lookup_in_overlapping_pieces_finds_all_that_scan_finds(
            regions in prop::collection::vec(prop::collection::vec((0..200u64, 1..80u64), 0..6), 1..5),
            gone in prop::collection::vec(any::<bool>(), 5),
            asked in prop::collection::vec((0..300u64, 1..40u64), 20),
        ) {
            let (mut sources, mut keys) = (Sources::default(), 0..);
            let mut left = Vec::new();
            for (number, places) in (0..).zip(&regions) {
                let pieces = places.iter().map(|&(start, len)| piece(start, len, keys.next().unwrap()));
                let pieces: Vec<_> = pieces.collect();
                sources.add(number, [(0, pieces.clone())]);
                left.push((number, pieces));
            }
            for (number, _) in left.extract_if(.., |(number, _)| gone[*number as usize]) {
                sources.remove(number);
            }
            let mut fresh = Sources::default();
            left.iter().for_each(|(number, pieces)| fresh.add(*number, [(0, pieces.clone())]));
            prop_assert_eq!(&sources.by_address, &fresh.by_address);
            let left: Vec<SourceRange> = left.into_iter().flat_map(|(_, pieces)| pieces).collect();
            for (address, len) in asked {
                let scanned = left.iter().any(|piece| piece.source(address, len).is_some());
                prop_assert_eq!(sources.at(address, len).is_some(), scanned, "{}, {}", address, len);
            }
        }
    }
}
