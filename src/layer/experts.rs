//! Interface of a layer to its experts.

use std::any::Any;

use super::{GradientOrder, GroupedSwiGlu};

/// The rows of all experts of one rank, `[rows, hidden]`: expert after expert, each with pads
/// behind where the layer aligns.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
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

impl<'a> Segments<'a> {
    /// Rows of `hidden` elements, so many of each expert, without and with pads.
    pub const fn new(rows: &'a [f32], hidden: usize, counts: &'a [i64], padded: &'a [i64]) -> Self {
        Segments { rows, hidden, counts, padded }
    }

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

/// Reason why experts failed.
pub type ExpertError = Box<dyn std::error::Error + Send + Sync>;

/// The experts of one rank, as a layer uses them.
///
/// A layer may cut its tokens into chunks, and their rows by groups of experts; experts of other
/// groups have no rows then: `forward` and `rows_backward` are called once per group of a chunk,
/// `weights_backward` once for all, after them. Results must not depend on the cuts. So an output
/// row must depend on its own row and the weights alone, whichever rows come with it, and the
/// gradient of the weights must be summed in the order of [`GradientOrder`].
/// [`GroupedSwiGlu`](super::GroupedSwiGlu) does it so.
///
/// Outputs are not weighted: the layer multiplies them with the routing weights. Calls come from
/// several threads, one after another; those of `forward` and of `rows_backward` for different
/// chunks or groups also concurrently, if a layer has [several
/// streams](super::MoeLayerBuilder::streams). A call that fails, panics or returns another number
/// of values ends the world: an [`Error`](crate::Error) stays one, other errors become a
/// [`LayerError`](crate::error::LayerError).
pub trait Experts: Send + Sync {
    /// How many experts there are.
    fn count(&self) -> usize;

    /// Elements of a row that they take and give. A layer of another width is not built.
    fn hidden(&self) -> usize;

    /// Outputs, `[rows, hidden]`, and the values that the gradients need besides the rows, which
    /// the layer keeps. Outputs of pad rows are never read.
    ///
    /// # Errors
    /// Whatever makes it impossible.
    fn forward(&self, rows: Segments<'_>) -> Result<(Vec<f32>, Saved), ExpertError>;

    /// Gradients of the rows, `[rows, hidden]`, from those of the outputs; `saved` keeps the values
    /// that the gradient of the weights needs.
    ///
    /// # Errors
    /// Whatever makes it impossible.
    fn rows_backward(
        &self,
        rows: Segments<'_>,
        saved: &mut Saved,
        of_outputs: Vec<f32>,
    ) -> Result<Vec<f32>, ExpertError>;

    /// The gradient of the weights, as long as [`weights`](Experts::weights), over all chunks of a
    /// step: per call of [`forward`](Experts::forward) its rows, and the values that it and
    /// [`rows_backward`](Experts::rows_backward) saved.
    ///
    /// # Errors
    /// Whatever makes it impossible.
    fn weights_backward(
        &self,
        chunks: &[(Segments<'_>, &Saved)],
        order: &GradientOrder,
    ) -> Result<Vec<f32>, ExpertError>;

    /// These experts, if they are SwiGLU: a [layer on a device](super::DeviceMoeLayer) has kernels
    /// for no others. Default: they are not.
    fn as_swiglu(&self) -> Option<&GroupedSwiGlu> {
        None
    }

    /// Experts of the same kind and width, so many, with these weights: those of one expert after
    /// those of another, in the order and number that each has in [`weights`](Experts::weights).
    /// For [`MoeLayer::rebuilt`](super::MoeLayer::rebuilt). Default: they cannot be made.
    ///
    /// # Errors
    /// Whatever makes it impossible.
    fn with_weights(&self, count: usize, weights: Vec<f32>) -> Result<Box<dyn Experts>, ExpertError> {
        let values = weights.len();
        Err(format!("nothing makes {count} experts of {values} weights of these: with_weights").into())
    }

    /// All weights, in an order of the experts' own.
    fn weights(&self) -> &[f32];

    /// All weights, to be changed between steps.
    fn weights_mut(&mut self) -> &mut [f32];
}
