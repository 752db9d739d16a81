//! Checks of arguments: sizes that make equal parts, tensors of the right length, groups, and
//! settings that ranks must have alike.

use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::digest::Digest;
use sidelane::error::{CallError, CallKind, PlanError};

use crate::calls::Calls;

/// Settings of a rank: their names, and their values as numbers.
pub(crate) type Settings = Vec<(&'static str, u64)>;

/// Size of a part, of `count` in all.
pub(crate) fn part_of(
    parameter: &'static str,
    count: usize,
    (part, parts): (u32, u32),
) -> Result<usize, PlanError> {
    if part >= parts {
        let expected = "below the number of parts";
        return Err(PlanError::BadParameter { parameter: "part", seen: part.into(), expected });
    }
    if !count.is_multiple_of(parts as usize) {
        let expected = "a multiple of the ranks of the group";
        return Err(PlanError::BadParameter { parameter, seen: count as u64, expected });
    }
    Ok(count / parts as usize)
}

/// Checks a size to divide by.
pub(crate) fn at_least_one(parameter: &'static str, seen: usize) -> Result<(), PlanError> {
    if seen > 0 {
        return Ok(());
    }
    Err(PlanError::BadParameter { parameter, seen: 0, expected: "at least 1" })
}

/// The rows of a tensor of so many columns.
pub(crate) fn rows_of(what: &'static str, seen: usize, columns: usize) -> Result<usize, PlanError> {
    let rows = seen / columns;
    if rows * columns == seen { Ok(rows) } else { Err(PlanError::WrongShape { what, seen, rows, columns }) }
}

/// Checks that a tensor has this shape.
pub(crate) fn has_shape(
    what: &'static str,
    seen: usize,
    rows: usize,
    columns: usize,
) -> Result<(), PlanError> {
    if rows.checked_mul(columns) == Some(seen) {
        return Ok(());
    }
    Err(PlanError::WrongShape { what, seen, rows, columns })
}

/// Checks that a call comes with a group of the layer's size.
pub(crate) fn has_ranks(group: &Communicator, ranks: usize) -> Result<(), PlanError> {
    if group.size() as usize == ranks {
        return Ok(());
    }
    let (parameter, expected) = ("ranks of the group", "as many as this was made for");
    Err(PlanError::BadParameter { parameter, seen: group.size().into(), expected })
}

/// The rank and the size of a group, which later calls must come with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub rank: u32,
    pub ranks: u32,
}

impl Member {
    pub fn of(group: &Communicator) -> Member {
        Member { rank: group.rank(), ranks: group.size() }
    }

    /// Checks that a call comes with a group of this size, in which this rank has the same place.
    pub fn check(self, group: &Communicator) -> Result<(), PlanError> {
        has_ranks(group, self.ranks as usize)?;
        if group.rank() == self.rank {
            return Ok(());
        }
        let (parameter, expected) = ("rank in the group", "the rank that this was made for");
        Err(PlanError::BadParameter { parameter, seen: group.rank().into(), expected })
    }

    /// This rank and the number of ranks, to find its part by.
    pub fn part(self) -> (u32, u32) {
        (self.rank, self.ranks)
    }
}

/// Compares settings between all ranks of a group. Collective.
pub(crate) fn alike(group: &mut Communicator, settings: &[(&'static str, u64)]) -> Result<(), Error> {
    let mine: Vec<u8> = settings.iter().flat_map(|(_, value)| value.to_le_bytes()).collect();
    let mut all = vec![0; mine.len() * group.size() as usize];
    group.all_gather(&mine, &mut all)?;
    let rank = group.rank();
    for (peer, theirs) in (0..).zip(all.chunks_exact(mine.len())) {
        for (&(what, mine), theirs) in settings.iter().zip(theirs.as_chunks::<8>().0) {
            let theirs = u64::from_le_bytes(*theirs);
            if mine != theirs {
                return Err(CallError::ConfigsDiffer { what, rank, peer, mine, theirs }.into());
            }
        }
    }
    Ok(())
}

/// As [`alike`]. A rank whose own settings cannot be used says so to the others. Collective.
pub(crate) fn agree<E: From<Error>>(
    group: &mut Communicator,
    settings: Result<Settings, E>,
) -> Result<(), E> {
    match settings {
        Ok(settings) => Ok(alike(group, &settings)?),
        Err(error) => Err(Calls::new(group, vec![CallKind::AllGather]).refuse(error)),
    }
}

/// What a rank has made of its arguments, once all ranks have compared settings. Collective.
pub(crate) fn agreed<T>(
    group: &mut Communicator,
    made: Result<T, PlanError>,
    settings: impl FnOnce(&T) -> Settings,
) -> Result<T, Error> {
    let made = made.map_err(Error::from);
    let settings = made.as_ref().map(settings).map_err(Clone::clone);
    agree(group, settings).and(made)
}

/// A digest of numbers, which ranks compare.
pub(crate) fn digest(numbers: impl IntoIterator<Item = u64>) -> u64 {
    Digest::of(numbers.into_iter().flat_map(u64::to_le_bytes))
}

/// A digest of the bits of values.
pub(crate) fn digest_of(values: &[f32]) -> u64 {
    digest(values.iter().map(|value| value.to_bits().into()))
}
