//! Checks of arguments: sizes that make equal parts, and tensors of the right length.

use sidelane::collective::Communicator;
use sidelane::error::PlanError;

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
    let (parameter, expected) = ("ranks of the group", "as many as the layer was cut for");
    Err(PlanError::BadParameter { parameter, seen: group.size().into(), expected })
}
