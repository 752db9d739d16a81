//! What a layer asks of its experts.

use std::any::Any;

use super::RowOrder;

/// The rows of all experts of one rank, `[rows, hidden]`: expert after expert, each with pads behind where the layer aligns.
#[derive(Clone, Copy, Debug)]
pub struct Segments<'a> {
    /// The rows, pads (zeros) counted.
    pub rows: &'a [f32],
    /// Elements of a row.
    pub hidden: usize,
    /// Rows of each expert.
    pub counts: &'a [i64],
    /// The same with pads: how long each expert's segment is.
    pub padded: &'a [i64],
}

impl Segments<'_> {
    /// Number of rows, pads counted.
    pub fn len(&self) -> usize {
        self.rows.len() / self.hidden.max(1)
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Number of rows that the segments add up to, if each has room for its expert's.
    pub(super) fn total(&self) -> Option<usize> {
        self.counts.iter().zip(self.padded).try_fold(0usize, |total, (&count, &padded)| {
            let fits = (0..=padded).contains(&count);
            total.checked_add(usize::try_from(padded).ok().filter(|_| fits)?)
        })
    }

    /// Per expert, where its rows are among all: pads left out.
    pub fn ranges(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        self.counts.iter().zip(self.padded).scan(0, |first, (&count, &padded)| {
            let start = *first;
            *first += padded as usize;
            Some(start..start + count as usize)
        })
    }
}

/// What experts keep from a forward pass for the gradients.
pub type Saved = Box<dyn Any + Send + Sync>;

/// Why experts cannot do what they are asked for.
pub type ExpertError = Box<dyn std::error::Error + Send + Sync>;

/// What one call of [`forward`](Experts::forward) had, for the gradient of the weights.
#[derive(Clone, Copy, Debug)]
pub struct SavedChunk<'a> {
    /// The rows.
    pub rows: Segments<'a>,
    /// What the experts saved.
    pub saved: &'a Saved,
}

/// The experts of one rank, as a layer uses them.
///
/// A layer may cut its tokens into chunks, and their rows by groups of experts, where those of other groups have none: `forward` and
/// `rows_backward` are called once per group of a chunk, `weights_backward` once for
/// all, after them. So that results do not depend on how tokens are cut, an output row must be made of its own row and the weights
/// alone, in whatever company it comes; and the gradient of the weights be summed in the order that [`RowOrder`] gives.
/// [`GroupedSwiGlu`](super::GroupedSwiGlu) does it so.
///
/// Outputs are not weighted: the layer multiplies them with the routing weights. Calls come from several threads, one after another; those of
/// `forward` and of `rows_backward` for different chunks or groups several at once, where a layer is to have
/// [several at it](super::MoeLayerBuilder::streams). A call that fails, panics or returns another number of values ends the
/// world: an [`Error`](crate::Error) that it gives stays that, others become a [`LayerError`](crate::error::LayerError).
pub trait Experts: Send + Sync {
    /// How many experts there are.
    fn count(&self) -> usize;

    /// Elements of a row that they take and give. A layer of another width is not built.
    fn hidden(&self) -> usize;

    /// Outputs, `[rows, hidden]`, and what the gradients need besides the rows, which the layer keeps. What pad rows become is
    /// never read.
    ///
    /// # Errors
    /// Whatever makes it impossible.
    fn forward(&self, rows: Segments<'_>) -> Result<(Vec<f32>, Saved), ExpertError>;

    /// Gradients of the rows, `[rows, hidden]`, from those of the outputs; `saved` keeps what the gradient of the weights needs.
    ///
    /// # Errors
    /// Whatever makes it impossible.
    fn rows_backward(
        &self,
        rows: Segments<'_>,
        saved: &mut Saved,
        of_outputs: Vec<f32>,
    ) -> Result<Vec<f32>, ExpertError>;

    /// The gradient of the weights, as long as [`weights`](Experts::weights), over all chunks of a step.
    ///
    /// # Errors
    /// Whatever makes it impossible.
    fn weights_backward(&self, chunks: &[SavedChunk<'_>], order: &RowOrder) -> Result<Vec<f32>, ExpertError>;

    /// All weights, in an order of the experts' own.
    fn weights(&self) -> &[f32];

    /// All weights, to be changed between steps.
    fn weights_mut(&mut self) -> &mut [f32];
}
