//! Parts of whole weights and rows, and whole rows of the parts of all ranks.

use sidelane::collective::Communicator;
use sidelane::error::{CallKind, PlanError};
use sidelane::{Element, Error};

use super::activations::refuse;
use crate::check::{at_least_one, part_of, rows_of};

/// Part `part` of `parts` of the rows of a matrix, where it lies. So column parallel layers,
/// embeddings and biases are cut, and tokens for sequence parallel activations.
///
/// ```
/// use sidelane_parallel::tensor::{cut_columns, cut_rows};
///
/// let whole = [1.0, 2.0, 3.0, 4.0];                             // [2, 2]
/// assert_eq!(cut_rows(&whole, 2, (1, 2))?, [3.0, 4.0]);
/// assert_eq!(cut_columns(&whole, 2, (1, 2))?, [2.0, 4.0]);
/// # Ok::<(), sidelane::error::PlanError>(())
/// ```
///
/// # Errors
/// [`PlanError`] if the parts are not equal or `part` is none of them.
pub fn cut_rows<T>(whole: &[T], columns: usize, (part, parts): (u32, u32)) -> Result<&[T], PlanError> {
    at_least_one("columns", columns)?;
    let rows = rows_of("rows to cut", whole.len(), columns)?;
    let each = part_of("rows", rows, (part, parts))? * columns;
    Ok(&whole[part as usize * each..][..each])
}

/// Part `part` of `parts` of the columns of a matrix. So row parallel layers are cut, and whole
/// rows for them (Megatron's `input_is_parallel=False`). The gradient of [`gather_columns`].
///
/// # Errors
/// As [`cut_rows`].
pub fn cut_columns<T: Copy>(
    whole: &[T],
    columns: usize,
    (part, parts): (u32, u32),
) -> Result<Vec<T>, PlanError> {
    at_least_one("columns", columns)?;
    rows_of("rows to cut", whole.len(), columns)?;
    let each = part_of("columns", columns, (part, parts))?;
    let rows = whole.chunks_exact(columns);
    Ok(rows.flat_map(|row| &row[part as usize * each..][..each]).copied().collect())
}

/// Whole rows, `[T, columns]`, of which each rank has `[T, columns / ranks]`: of the outputs of a
/// column parallel layer (Megatron's `gather_output`). The gradient of [`cut_columns`]. Collective.
///
/// ```
/// use sidelane::{World, collective::Communicator};
/// use sidelane_parallel::tensor::{cut_columns, gather_columns};
///
/// let ranks = World::threads(2)?.into_iter().map(|world| {
///     std::thread::spawn(move || -> sidelane::Result<()> {
///         let mut group = Communicator::builder(&world.all()?).build()?;
///         let rows = [1.0, 2.0, 3.0, 4.0];                       // [2, 2]
///         let own = cut_columns(&rows, 2, (world.rank(), 2))?;
///         assert_eq!(own, [[1.0, 3.0], [2.0, 4.0]][world.rank() as usize]);
///         assert_eq!(gather_columns(&mut group, &own, 2)?, rows);
///         Ok(())
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     rank.join().unwrap()?;
/// }
/// # Ok::<(), sidelane::Error>(())
/// ```
///
/// # Errors
/// As [`cut_rows`] and [`Communicator::all_gather`].
pub fn gather_columns<E: Element>(
    group: &mut Communicator,
    own: &[E],
    columns: usize,
) -> Result<Vec<E>, Error> {
    let ranks = group.size() as usize;
    let checked = at_least_one("columns", columns).and_then(|()| {
        let each = part_of("columns", columns, (group.rank(), group.size()))?;
        Ok((each, rows_of("columns of a rank", own.len(), each)?))
    });
    let (each, rows) = checked.map_err(|error| refuse(group, Some(CallKind::AllGather), error))?;
    let mut parts = vec![E::zeroed(); ranks * own.len()];
    group.all_gather(own, &mut parts)?;
    let row =
        |row| (0..ranks).flat_map(move |rank| (rank * rows + row) * each..(rank * rows + row + 1) * each);
    Ok((0..rows).flat_map(row).map(|at| parts[at]).collect())
}
