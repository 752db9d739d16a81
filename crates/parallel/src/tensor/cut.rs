//! Parts of whole weights and rows, for ranks that read them from one file.

use sidelane::error::PlanError;

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

/// Part `part` of `parts` of the columns of a matrix. So row parallel layers are cut.
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
