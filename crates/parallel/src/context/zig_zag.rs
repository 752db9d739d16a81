//! Which tokens a rank has where attention is causal.
//!
//! A token sees earlier tokens only, so later tokens cost more. Twice as many pieces as ranks, one
//! from each end for each rank, make all ranks compute alike, as in Megatron:
//!
//! ```text
//!   4 ranks    piece of tokens    0    1    2    3    4    5    6    7
//!              rank               0    1    2    3    3    2    1    0
//! ```

use sidelane::error::PlanError;

use crate::check::{at_least_one, part_of, rows_of};

/// The two pieces of tokens of part `part` of `parts`, of twice as many pieces.
///
/// ```
/// use sidelane_parallel::context::zig_zag_pieces;
///
/// let pieces = (0..4).map(|rank| zig_zag_pieces((rank, 4)));
/// assert_eq!(pieces.collect::<Result<Vec<_>, _>>()?, [[0, 7], [1, 6], [2, 5], [3, 4]]);
/// # Ok::<(), sidelane::error::PlanError>(())
/// ```
///
/// # Errors
/// [`PlanError::BadParameter`] if `part` is not below `parts`.
pub fn zig_zag_pieces((part, parts): (u32, u32)) -> Result<[usize; 2], PlanError> {
    part_of("pieces", 2 * parts as usize, (part, parts))?;
    Ok(pieces(part as usize, parts as usize))
}

/// The tokens of part `part` of `parts`: the rows of its two pieces, one after the other.
///
/// ```
/// use sidelane_parallel::context::cut_zig_zag;
///
/// let positions = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];             // [8, 1]
/// assert_eq!(cut_zig_zag(&positions, 1, (0, 2))?, [0.0, 1.0, 6.0, 7.0]);
/// assert_eq!(cut_zig_zag(&positions, 1, (1, 2))?, [2.0, 3.0, 4.0, 5.0]);
/// # Ok::<(), sidelane::error::PlanError>(())
/// ```
///
/// # Errors
/// [`PlanError`] if tokens do not make equal pieces, or `part` is not below `parts`.
pub fn cut_zig_zag<T: Copy>(whole: &[T], columns: usize, part: (u32, u32)) -> Result<Vec<T>, PlanError> {
    at_least_one("columns", columns)?;
    let tokens = rows_of("tokens to cut", whole.len(), columns)?;
    let pieces = zig_zag_pieces(part)?;
    let own = part_of("tokens", tokens, part)?;
    let len = piece_tokens(own)? * columns;
    Ok(pieces.iter().flat_map(|piece| &whole[piece * len..][..len]).copied().collect())
}

/// Tokens of a piece of a rank with so many.
pub(super) fn piece_tokens(tokens: usize) -> Result<usize, PlanError> {
    if tokens.is_multiple_of(2) {
        return Ok(tokens / 2);
    }
    let (parameter, expected) = ("tokens of a rank", "an even number: it has two pieces");
    Err(PlanError::BadParameter { parameter, seen: tokens as u64, expected })
}

/// How many keys of a rank are not behind a token of another rank. Ranks have `tokens` each.
pub(super) fn visible(tokens: usize, ranks: usize, (of_rank, token): (usize, usize), from: usize) -> usize {
    let len = tokens / 2;
    let position = pieces(of_rank, ranks)[token / len] * len + token % len;
    let of_piece = |piece: usize| (position + 1).saturating_sub(piece * len).min(len);
    pieces(from, ranks).into_iter().map(of_piece).sum()
}

fn pieces(rank: usize, ranks: usize) -> [usize; 2] {
    [rank, 2 * ranks - 1 - rank]
}
