//! What ranks must have alike: compared when an instance is built.

use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::error::{CallError, CallKind};

use super::error::DataError;
use super::layout::{Cut, Layout};
use super::pass::Pass;

/// FNV-1a, for values that ranks and readers compare.
#[derive(Clone, Copy, Debug)]
pub(super) struct Digest(pub u64);

impl Default for Digest {
    fn default() -> Self {
        Digest(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    pub fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    pub fn of(numbers: impl IntoIterator<Item = u64>) -> u64 {
        let mut digest = Digest::default();
        numbers.into_iter().for_each(|number| digest.add(&number.to_le_bytes()));
        digest.0
    }
}

/// Compares settings between all ranks. A rank whose own cannot be used says so to the others.
pub(super) fn agree(
    group: &mut Communicator,
    settings: Result<Vec<(&'static str, u64)>, DataError>,
) -> Result<(), DataError> {
    let settings = match settings {
        Ok(settings) => settings,
        Err(error) => return Err(Pass::new(group, vec![CallKind::AllGather]).refuse(error)),
    };
    let mine: Vec<u8> = settings.iter().flat_map(|(_, value)| value.to_le_bytes()).collect();
    let mut all = vec![0; mine.len() * group.size() as usize];
    group.all_gather(&mine, &mut all)?;
    let rank = group.rank();
    for (peer, theirs) in (0..).zip(all.chunks_exact(mine.len())) {
        for (&(what, mine), theirs) in settings.iter().zip(theirs.as_chunks::<8>().0) {
            let theirs = u64::from_le_bytes(*theirs);
            if mine != theirs {
                return Err(Error::from(CallError::ConfigsDiffer { what, rank, peer, mine, theirs }).into());
            }
        }
    }
    Ok(())
}

/// The rank and the size of a group, which later calls must come with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Member {
    pub rank: u32,
    pub ranks: u32,
}

impl Member {
    pub fn of(group: &Communicator) -> Member {
        Member { rank: group.rank(), ranks: group.size() }
    }

    pub fn check(self, group: &Communicator) -> Result<(), DataError> {
        let seen = Member::of(group);
        if seen == self {
            return Ok(());
        }
        let (rank, ranks, seen_rank, seen_ranks) = (self.rank, self.ranks, seen.rank, seen.ranks);
        Err(DataError::OtherGroup { rank, ranks, seen_rank, seen_ranks })
    }

    pub fn cut(self, layout: &Layout) -> Cut {
        Cut::new(layout, self.rank, self.ranks)
    }
}
