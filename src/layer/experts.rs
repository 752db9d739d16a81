//! Experts of a layer: the interface that callers implement, the order in which gradients of
//! weights are summed, and the checks of what experts return, since their code is foreign.
//!
//! Rows of a chunk lie by (expert, source rank, token). Chunks are consecutive tokens of each
//! source, so the rows of one expert, put together as below, are by (source rank, token) again, as
//! without chunks:
//!
//! ```text
//!   chunk 0   | e0: s0 s0 s1 | e1: s1 |          chunk 1   | e0: s0 s1 | e1: s0 s1 |
//!
//!   order     e0:  s0 s0 (0)   s0 (1)   s1 (0)   s1 (1)         e1:  s0 (1)   s1 (0)   s1 (1)
//! ```

use std::any::Any;

use super::GroupedSwiGlu;
use crate::error::{Error, ExpertKind, ExpertPass, LayerError};

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

/// Values that experts keep from a forward pass for the gradients.
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
    /// The reason why it is impossible.
    fn forward(&self, rows: Segments<'_>) -> Result<(Vec<f32>, Saved), ExpertError>;

    /// Gradients of the rows, `[rows, hidden]`, from those of the outputs; `saved` keeps the values
    /// that the gradient of the weights needs.
    ///
    /// # Errors
    /// The reason why it is impossible.
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
    /// The reason why it is impossible.
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
    /// The reason why it is impossible.
    fn with_weights(&self, count: usize, weights: Vec<f32>) -> Result<Box<dyn Experts>, ExpertError> {
        let values = weights.len();
        Err(format!("nothing makes {count} experts of {values} weights of these: with_weights").into())
    }

    /// All weights, in an order of the experts' own.
    fn weights(&self) -> &[f32];

    /// All weights, to be changed between steps.
    fn weights_mut(&mut self) -> &mut [f32];
}
/// Consecutive rows of one expert and one source in one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SourceRun {
    pub chunk: usize,
    pub first: usize,
    pub rows: usize,
}

/// All rows of a step in the order (expert, source rank, token).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GradientOrder {
    runs: Vec<Vec<SourceRun>>,
}

impl GradientOrder {
    /// From the numbers of rows of each source for each expert in each chunk,
    /// `[chunks, sources, experts]`, and the lengths of the experts' segments with pads, per chunk.
    ///
    /// # Panics
    /// If a chunk has fewer sources or experts than the first.
    pub fn new(counts: &[Vec<Vec<u32>>], padded: &[&[i64]]) -> GradientOrder {
        let experts = padded.first().map_or(0, |padded| padded.len());
        let sources = counts.first().map_or(0, Vec::len);
        let mut runs = vec![Vec::new(); experts];
        let mut segments = vec![0; counts.len()];
        for (expert, runs) in runs.iter_mut().enumerate() {
            let mut next = segments.clone();
            for source in 0..sources {
                for (chunk, counts) in counts.iter().enumerate() {
                    let rows = counts[source][expert] as usize;
                    if rows > 0 {
                        runs.push(SourceRun { chunk, first: next[chunk], rows });
                        next[chunk] += rows;
                    }
                }
            }
            segments.iter_mut().zip(padded).for_each(|(first, padded)| *first += padded[expert] as usize);
        }
        GradientOrder { runs }
    }

    /// All rows in one segment, as they lie: of experts that take all tokens.
    pub(super) fn whole(rows: usize) -> GradientOrder {
        GradientOrder { runs: vec![vec![SourceRun { chunk: 0, first: 0, rows }]] }
    }

    /// Runs of an expert, in order.
    pub(super) fn runs(&self, expert: usize) -> impl Iterator<Item = SourceRun> + '_ {
        self.runs[expert].iter().copied()
    }

    /// Rows of an expert, of all chunks.
    pub fn rows(&self, expert: usize) -> usize {
        self.runs[expert].iter().map(|run| run.rows).sum()
    }

    /// The rows of an expert in order, `[rows, columns]`, from those of the chunks,
    /// `[rows, columns]` each.
    pub fn gather<'a>(
        &self,
        expert: usize,
        columns: usize,
        of_chunk: impl Fn(usize) -> &'a [f32],
    ) -> Vec<f32> {
        let mut gathered = Vec::with_capacity(self.rows(expert) * columns);
        for run in &self.runs[expert] {
            gathered.extend_from_slice(&of_chunk(run.chunk)[run.first * columns..][..run.rows * columns]);
        }
        gathered
    }
}

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
    fn rows_of_chunks_come_in_the_order_of_source_and_token() {
        // The picture above; expert 0 is padded to 4 rows in chunk 0.
        let counts = [vec![vec![2, 0], vec![1, 1]], vec![vec![1, 1], vec![1, 1]]];
        let order = GradientOrder::new(&counts, &[&[4, 1], &[2, 2]]);
        let rows = [vec![0.0, 1.0, 4.0, -1.0, 8.0], vec![2.0, 5.0, 6.0, 9.0]];
        assert_eq!(order.gather(0, 1, |chunk| &rows[chunk]), [0.0, 1.0, 2.0, 4.0, 5.0]);
        assert_eq!(order.gather(1, 1, |chunk| &rows[chunk]), [6.0, 8.0, 9.0]);
        assert_eq!((order.rows(0), order.rows(1)), (5, 3));
    }

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
