//! Balance without a loss: experts that were chosen too often lose a little bias, the others gain
//! it.

use crate::error::GateError;

/// One step: `bias += rate * sign(mean(counts) - counts)`.
///
/// `bias` and `counts` are `[experts]`. Counts are those of a whole batch: the caller sums
/// [`counts_after`] over micro-batches and ranks, so that all ranks keep the same bias. As in
/// Megatron, they count the choices left after dropping, of used tokens, in training passes alone.
/// A pass that recomputes activations is not counted again.
///
/// [`counts_after`]: super::Decision::counts_after
///
/// ```
/// let mut bias = [0.0; 3];
/// sidelane_core::gate::update_bias(&mut bias, &[7, 4, 1], 1e-3)?;
/// assert_eq!(bias, [-1e-3, 0.0, 1e-3]);
/// # Ok::<(), sidelane_core::error::GateError>(())
/// ```
///
/// # Errors
/// [`GateError::WrongShape`] if the lengths differ, [`GateError::BadNumber`] if `rate` is negative
/// or not finite; the bias is left as it was.
pub fn update_bias(bias: &mut [f32], counts: &[u64], rate: f32) -> Result<(), GateError> {
    if bias.len() != counts.len() {
        let (seen, rows) = (counts.len(), bias.len());
        return Err(GateError::WrongShape { what: "counts", seen, rows, columns: 1 });
    }
    if !(rate.is_finite() && rate >= 0.0) {
        return Err(GateError::BadNumber { parameter: "rate", seen: rate.into(), expected: "0 or more" });
    }
    // Compared as integers, the mean is exact.
    let sum: u128 = counts.iter().map(|&count| u128::from(count)).sum();
    for (bias, &count) in bias.iter_mut().zip(counts) {
        *bias += match (u128::from(count) * counts.len() as u128).cmp(&sum) {
            std::cmp::Ordering::Less => rate,
            std::cmp::Ordering::Equal => 0.0,
            std::cmp::Ordering::Greater => -rate,
        };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_equal_to_the_mean_moves_nothing() {
        let mut bias = [0.25, -0.5, 1.0, 0.0];
        update_bias(&mut bias, &[3, 3, 3, 3], 0.125).unwrap();
        assert_eq!(bias, [0.25, -0.5, 1.0, 0.0]);
        // No f64 tells this mean from the counts.
        let large = 1 << 60;
        update_bias(&mut bias, &[large + 1, large, large, large], 0.125).unwrap();
        assert_eq!(bias, [0.125, -0.375, 1.125, 0.125]);
    }

    #[test]
    fn wrong_lengths_and_rates_are_refused() {
        let mut bias = [0.0; 2];
        let wrong = GateError::WrongShape { what: "counts", seen: 3, rows: 2, columns: 1 };
        assert_eq!(update_bias(&mut bias, &[1, 2, 3], 0.1), Err(wrong));
        for rate in [-0.1, f32::NAN, f32::INFINITY] {
            assert!(matches!(update_bias(&mut bias, &[1, 2], rate), Err(GateError::BadNumber { .. })));
        }
        assert_eq!(bias, [0.0; 2]);
    }
}
