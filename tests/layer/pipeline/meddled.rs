//! Experts with modified calls.

use sidelane::error::ExpertPass;
use sidelane::layer::{ExpertError, Experts, GradientOrder, GroupedSwiGlu, Saved, Segments};

/// Actions before a call of experts, and changes of its outputs or gradients.
pub trait Meddler: Send + Sync {
    fn before(&self, _: ExpertPass) -> Result<(), ExpertError> {
        Ok(())
    }

    fn after(&self, _: ExpertPass, values: Vec<f32>) -> Result<Vec<f32>, ExpertError> {
        Ok(values)
    }
}

/// These experts, and their modification.
pub struct Meddled<M> {
    pub inner: GroupedSwiGlu,
    pub by: M,
}

impl<M: Meddler> Experts for Meddled<M> {
    fn count(&self) -> usize {
        self.inner.count()
    }

    fn hidden(&self) -> usize {
        self.inner.hidden()
    }

    fn forward(&self, rows: Segments<'_>) -> Result<(Vec<f32>, Saved), ExpertError> {
        self.by.before(ExpertPass::Forward)?;
        let (outputs, saved) = self.inner.forward(rows)?;
        Ok((self.by.after(ExpertPass::Forward, outputs)?, saved))
    }

    fn rows_backward(
        &self,
        rows: Segments<'_>,
        saved: &mut Saved,
        of_outputs: Vec<f32>,
    ) -> Result<Vec<f32>, ExpertError> {
        self.by.before(ExpertPass::RowsBackward)?;
        self.by.after(ExpertPass::RowsBackward, self.inner.rows_backward(rows, saved, of_outputs)?)
    }

    fn weights_backward(
        &self,
        chunks: &[(Segments<'_>, &Saved)],
        order: &GradientOrder,
    ) -> Result<Vec<f32>, ExpertError> {
        self.by.before(ExpertPass::WeightsBackward)?;
        self.by.after(ExpertPass::WeightsBackward, self.inner.weights_backward(chunks, order)?)
    }

    fn weights(&self) -> &[f32] {
        self.inner.weights()
    }

    fn weights_mut(&mut self) -> &mut [f32] {
        self.inner.weights_mut()
    }
}
