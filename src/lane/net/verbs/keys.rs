//! Registered memory by place: this rank's own, and the descriptions of peers' memory.
//!
//! A region may be registered in pieces: flags and their tags strictly ordered, rows relaxed.
//!
//! ```text
//!   said   | pieces: u8 | start, len, address: u64 each, per piece | cards: u8 | rkey: u32 per piece and NIC |
//! ```

use std::collections::HashMap;

use super::{MemoryRegion, Remote};
use crate::error::{LaneError, VerbsError};
use crate::lane::net::RemoteAddress;

/// Length, address and key of each piece of a region, as one NIC knows them.
pub type RegionKeys = Vec<(u64, u64, u32)>;

/// A region of this rank, as one NIC knows it.
#[derive(Debug, Default)]
pub struct LocalRegion {
    /// In order, one behind the other.
    pub pieces: Vec<MemoryRegion>,
}

impl LocalRegion {
    /// Length, address and key of each piece.
    pub fn said(&self) -> RegionKeys {
        self.pieces.iter().map(|piece| (piece.len(), piece.base(), piece.rkey())).collect()
    }
}

/// Description of a region for peers: one entry per NIC, all with the same pieces.
pub fn say(cards: &[RegionKeys]) -> Vec<u8> {
    let pieces = cards.first().map_or(&[][..], Vec::as_slice);
    let mut said = vec![pieces.len() as u8];
    let mut start = 0;
    for &(len, base, _) in pieces {
        for word in [start, len, base] {
            said.extend(word.to_le_bytes());
        }
        start += len;
    }
    said.push(cards.len() as u8);
    said.extend(cards.iter().flatten().flat_map(|&(_, _, key)| key.to_le_bytes()));
    said
}

/// Regions of a peer, as registered with the NIC that this rank is connected to.
#[derive(Debug, Default)]
pub struct RemoteRegions {
    /// Number of the peer's NIC.
    card: u8,
    regions: HashMap<u32, Vec<Piece>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    start: u64,
    len: u64,
    to: Remote,
}

impl RemoteRegions {
    /// Of a peer's NIC of this number.
    pub fn of_card(card: u8) -> Self {
        RemoteRegions { card, regions: HashMap::new() }
    }

    /// Takes note of the peer's description of a region.
    ///
    /// # Errors
    /// [`VerbsError::Keys`] if it makes no sense.
    pub fn learn(&mut self, peer: u32, region: u32, said: &[u8]) -> Result<(), LaneError> {
        let pieces = parse(said, self.card).ok_or(VerbsError::Keys { peer, region })?;
        self.regions.insert(region, pieces);
        Ok(())
    }

    /// Where bytes of a region begin, and how many lie together from there on.
    pub fn find(&self, to: RemoteAddress) -> Option<(Remote, u64)> {
        let pieces = self.regions.get(&to.region)?;
        let piece =
            pieces.iter().find(|piece| (piece.start..piece.start + piece.len).contains(&to.offset))?;
        let inside = to.offset - piece.start;
        Some((Remote { addr: piece.to.addr + inside, rkey: piece.to.rkey }, piece.len - inside))
    }
}

fn parse(said: &[u8], card: u8) -> Option<Vec<Piece>> {
    let (&count, mut rest) = said.split_first()?;
    let mut word = || {
        let (head, tail) = rest.split_first_chunk::<8>()?;
        rest = tail;
        Some(u64::from_le_bytes(*head))
    };
    let mut pieces = Vec::new();
    for _ in 0..count {
        let (start, len, addr) = (word()?, word()?, word()?);
        start.checked_add(len)?;
        addr.checked_add(len)?;
        pieces.push(Piece { start, len, to: Remote { addr, rkey: 0 } });
    }
    let (&cards, keys) = rest.split_first()?;
    if card >= cards || keys.len() != usize::from(cards) * pieces.len() * 4 {
        return None;
    }
    let keys = keys.chunks_exact(4).skip(usize::from(card) * pieces.len());
    for (piece, key) in pieces.iter_mut().zip(keys) {
        piece.to.rkey = u32::from_le_bytes(key.try_into().ok()?);
    }
    Some(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said() -> Vec<u8> {
        let mut said = vec![2];
        for word in [0u64, 100, 4096, 100, 50, 9000] {
            said.extend(word.to_le_bytes());
        }
        said.push(2);
        said.extend([7u32, 8, 17, 18].into_iter().flat_map(u32::to_le_bytes));
        said
    }

    #[test]
    fn bytes_are_found_in_the_piece_that_holds_them_with_the_key_of_the_card() {
        let mut theirs = RemoteRegions::of_card(1);
        theirs.learn(3, 5, &said()).unwrap();
        let at = |offset| theirs.find(RemoteAddress { region: 5, offset });
        assert_eq!(at(0), Some((Remote { addr: 4096, rkey: 17 }, 100)));
        assert_eq!(at(99), Some((Remote { addr: 4195, rkey: 17 }, 1)));
        assert_eq!(at(100), Some((Remote { addr: 9000, rkey: 18 }, 50)));
        assert_eq!(at(150), None);
        assert_eq!(theirs.find(RemoteAddress { region: 4, offset: 0 }), None);
    }

    #[test]
    fn what_makes_no_sense_is_refused_and_names_the_rank() {
        let error = |said: &[u8], card| RemoteRegions::of_card(card).learn(3, 5, said).unwrap_err();
        let expected = LaneError::Verbs(VerbsError::Keys { peer: 3, region: 5 });
        assert_eq!(error(&said(), 2), expected, "no such card");
        for len in 0..said().len() {
            assert_eq!(error(&said()[..len], 0), expected, "{len} bytes");
        }
    }
}
