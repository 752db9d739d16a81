//! Calls of experts, which are foreign code: their results are checked.

use super::{ExpertError, Experts, GradientOrder, Saved, Segments};
use crate::error::{Error, ExpertKind, ExpertPass, LayerError};

/// Experts, and their kind.
#[derive(Clone, Copy)]
pub(super) struct CheckedExperts<'e> {
    pub whose: ExpertKind,
    pub experts: &'e dyn Experts,
}

impl CheckedExperts<'_> {
    pub fn forward(self, rows: Segments<'_>) -> Result<(Vec<f32>, Saved), Error> {
        let (outputs, saved) = self.given(ExpertPass::Forward, self.experts.forward(rows))?;
        self.fits(ExpertPass::Forward, &outputs, (rows.len(), rows.hidden))?;
        Ok((outputs, saved))
    }

    pub fn rows_backward(
        self,
        rows: Segments<'_>,
        saved: &mut Saved,
        of_outputs: Vec<f32>,
    ) -> Result<Vec<f32>, Error> {
        let of_rows = self.experts.rows_backward(rows, saved, of_outputs);
        let of_rows = self.given(ExpertPass::RowsBackward, of_rows)?;
        self.fits(ExpertPass::RowsBackward, &of_rows, (rows.len(), rows.hidden))?;
        Ok(of_rows)
    }

    pub fn weights_backward(
        self,
        chunks: &[(Segments<'_>, &Saved)],
        order: &GradientOrder,
    ) -> Result<Vec<f32>, Error> {
        let of_weights = self.experts.weights_backward(chunks, order);
        let of_weights = self.given(ExpertPass::WeightsBackward, of_weights)?;
        self.fits(ExpertPass::WeightsBackward, &of_weights, (self.experts.weights().len(), 1))?;
        Ok(of_weights)
    }

    pub fn with_weights(self, count: usize, weights: Vec<f32>) -> Result<Box<dyn Experts>, Error> {
        self.given(ExpertPass::WithWeights, self.experts.with_weights(count, weights))
    }

    /// Errors of this library keep their type; of others, their messages and those of their sources
    /// are kept.
    fn given<T>(self, pass: ExpertPass, given: Result<T, ExpertError>) -> Result<T, Error> {
        given.map_err(|failure| {
            let failure = match failure.downcast::<Error>() {
                Ok(error) => return *error,
                Err(failure) => failure,
            };
            let failure = match failure.downcast::<LayerError>() {
                Ok(error) => return Error::Layer(*error),
                Err(failure) => failure,
            };
            LayerError::Failed { whose: self.whose, pass, reason: with_sources(&*failure) }.into()
        })
    }

    fn fits(self, pass: ExpertPass, values: &[f32], (rows, columns): (usize, usize)) -> Result<(), Error> {
        let (whose, seen) = (self.whose, values.len());
        if seen == rows * columns {
            return Ok(());
        }
        Err(LayerError::WrongShape { whose, pass, seen, rows, columns }.into())
    }
}

fn with_sources(error: &(dyn std::error::Error + 'static)) -> String {
    let errors = std::iter::successors(Some(error), |error| error.source());
    errors.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::PlanError;
    use crate::layer::GroupedSwiGlu;

    #[test]
    fn expert_errors_of_library_stay_and_others_keep_sources() {
        #[derive(Debug, thiserror::Error)]
        #[error("no luck")]
        struct NoLuck(#[source] std::fmt::Error);
        let experts = GroupedSwiGlu::new(0, 1, 1, Vec::new()).unwrap();
        let called = CheckedExperts { whose: ExpertKind::Shared, experts: &experts };
        let told = |failure: ExpertError| called.given::<()>(ExpertPass::Forward, Err(failure)).unwrap_err();
        let refused = Error::Plan(PlanError::RefusedHere);
        assert_eq!(told(Box::new(refused.clone())), refused);
        assert_eq!(told(Box::new(LayerError::ForeignSaved)), LayerError::ForeignSaved.into());
        let reason = format!("no luck: {}", std::fmt::Error);
        let (whose, pass) = (ExpertKind::Shared, ExpertPass::Forward);
        assert_eq!(
            told(Box::new(NoLuck(std::fmt::Error))),
            LayerError::Failed { whose, pass, reason }.into()
        );
    }
}
