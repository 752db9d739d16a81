//! Losses on a router's logits, and the gradient from the weights of choices to the logits.
//!
//! ```text
//!   logits --+--> scores --> choices, weights --> exchange, experts --> loss of the model
//!            |       |                 |                                        |
//!            |       +--> BalanceLoss  +<------- d weight [T,K] ----------------+
//!            |              |          | weights_backward
//!            +--> z_loss, importance_loss
//!                    |      |          |
//!                    +------+----------+--> d logit [T,E]: all of them add to one array
//! ```
//!
//! Sums are taken in f64, in the order of tokens and experts, and rounded once: results repeat bit
//! for bit. Further divisors of a system (ranks that share a loss, micro-batches) belong into the
//! coefficient.

mod balance;
mod gradient;
mod importance;
mod weights;
mod z;

pub use balance::{BalanceLoss, CountDivisor, CountedChoices, LossInput, PaddingTokens, TokenGroups, Totals};
pub use importance::{ImportanceInput, importance_loss};
pub use weights::{WeightsInput, weights_backward};
pub use z::z_loss;

use crate::error::GateError;

/// Whether `what` has `rows` rows of `columns` elements.
fn shape(what: &'static str, seen: usize, rows: usize, columns: usize) -> Result<(), GateError> {
    if seen == rows * columns { Ok(()) } else { Err(GateError::WrongShape { what, seen, rows, columns }) }
}

/// The number of rows of finite logits.
fn rows_of(logits: &[f32], experts: usize) -> Result<usize, GateError> {
    if experts == 0 {
        return Err(GateError::BadNumber { parameter: "experts", seen: 0.0, expected: "at least 1" });
    }
    let tokens = logits.len() / experts;
    shape("logits", logits.len(), tokens, experts)?;
    let bad = logits.iter().position(|logit| !logit.is_finite());
    bad.map_or(Ok(tokens), |at| {
        let (token, expert) = ((at / experts) as u32, (at % experts) as u32);
        Err(GateError::NotFinite { token, expert, seen: logits[at] })
    })
}

/// Whether all ids are experts, or -1.
fn known(ids: &[i32], top_k: usize, experts: usize) -> Result<(), GateError> {
    let bad = ids.iter().position(|&id| id != -1 && usize::try_from(id).map_or(true, |id| id >= experts));
    bad.map_or(Ok(()), |at| {
        let (token, k) = ((at / top_k) as u32, (at % top_k) as u32);
        Err(GateError::BadChoice { token, k, expert: ids[at], experts: experts as u32 })
    })
}

fn finite(parameter: &'static str, seen: f32) -> Result<(), GateError> {
    let expected = "finite";
    if seen.is_finite() {
        Ok(())
    } else {
        Err(GateError::BadNumber { parameter, seen: seen.into(), expected })
    }
}

#[cfg(test)]
mod tests;
