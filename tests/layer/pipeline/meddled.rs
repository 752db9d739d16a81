//! Experts with whose calls somebody meddles.

use sidelane::error::Pass;
use sidelane::layer::{Chunk, Experts, Failure, GroupedSwiGlu, RowOrder, Saved, Segments};

/// What is done before a call of experts, and what becomes of its outputs or gradients.
pub trait Meddler: Send + Sync {
    fn before(&self, _: Pass) -> Result<(), Failure> {
        Ok(())
    }

    fn after(&self, _: Pass, values: Vec<f32>) -> Result<Vec<f32>, Failure> {
        Ok(values)
    }
}

/// These experts, and who meddles.
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

    fn forward(&self, rows: Segments<'_>) -> Result<(Vec<f32>, Saved), Failure> {
        self.by.before(Pass::Forward)?;
        let (outputs, saved) = self.inner.forward(rows)?;
        Ok((self.by.after(Pass::Forward, outputs)?, saved))
    }

    fn rows_backward(
        &self,
        rows: Segments<'_>,
        saved: &mut Saved,
        of_outputs: Vec<f32>,
    ) -> Result<Vec<f32>, Failure> {
        self.by.before(Pass::RowsBackward)?;
        self.by.after(Pass::RowsBackward, self.inner.rows_backward(rows, saved, of_outputs)?)
    }

    fn weights_backward(&self, chunks: &[Chunk<'_>], order: &RowOrder) -> Result<Vec<f32>, Failure> {
        self.by.before(Pass::WeightsBackward)?;
        self.by.after(Pass::WeightsBackward, self.inner.weights_backward(chunks, order)?)
    }

    fn weights(&self) -> &[f32] {
        self.inner.weights()
    }

    fn weights_mut(&mut self) -> &mut [f32] {
        self.inner.weights_mut()
    }
}
