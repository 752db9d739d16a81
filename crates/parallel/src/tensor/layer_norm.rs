//! Layer norm of the tokens of a rank, between the blocks of tensor parallel layers.
//!
//! ```text
//!   forward    mean     = sum of x / n                inverse  = 1 / sqrt(sum of (x - mean)^2 / n + epsilon)
//!              normal   = (x - mean) inverse          y        = normal scale + bias
//!
//!   backward   d        = dy scale
//!              dx       = inverse ((d - sum of d / n) - normal (sum of d normal / n))
//!              dscale   = sum over tokens of dy normal                dbias    = sum over tokens of dy
//! ```
//!
//! A row needs no other row, so ranks normalise their own tokens and no rank sends any. Scale and
//! bias are whole on each rank. With sequence parallel activations each rank has tokens of its own,
//! and the gradients of scale and bias are summed over the ranks.
//!
//! **Bits.** Sums are from +0: those of a row by ascending element, those over tokens by ascending
//! token of a rank, and then by ascending rank.

use std::marker::PhantomData;

use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::error::{CallKind, PlanError};

use super::activations::{Activations, refuse};
use crate::check::{agreed, at_least_one, digest_of, has_ranks, has_shape, rows_of};
use crate::float::Float;

/// Layer norm whose scale and bias each rank has.
///
/// ```
/// use sidelane::{World, collective::Communicator};
/// use sidelane_parallel::tensor::{Activations, LayerNorm};
///
/// let ranks = World::threads(2)?.into_iter().map(|world| {
///     std::thread::spawn(move || -> sidelane::Result<()> {
///         let mut group = Communicator::builder(&world.all()?).build()?;
///         let norm = LayerNorm::new(&mut group, Activations::SequenceParallel, 0.0, vec![1.0; 2], vec![5.0; 2])?;
///         let x = [[1.0, 3.0], [4.0, 0.0]][world.rank() as usize];               // a token of each rank
///         assert_eq!(norm.forward(&x)?, [[4.0, 6.0], [6.0, 4.0]][world.rank() as usize]);
///         let of = norm.backward(&mut group, &x, &[1.0, 2.0])?;
///         assert_eq!((of.scale, of.bias), (vec![0.0; 2], vec![2.0, 4.0]));       // of both tokens
///         Ok(())
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     rank.join().unwrap()?;
/// }
/// # Ok::<(), sidelane::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct LayerNorm<E = f32> {
    ranks: usize,
    activations: Activations,
    epsilon: f32,
    scale: Vec<f32>,
    bias: Vec<f32>,
    rows: PhantomData<E>,
}

/// Gradients of a layer norm, in the shapes of what they are of.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerNormGradients<E = f32> {
    /// Of this rank's rows.
    pub input: Vec<E>,
    /// Of the scale, from the tokens of all ranks.
    pub scale: Vec<f32>,
    /// Of the bias, from the tokens of all ranks.
    pub bias: Vec<f32>,
}

/// Mean and inverse deviation, by which a row is normalised.
struct Normal {
    mean: f32,
    inverse: f32,
}

impl Normal {
    fn of(row: &[f32], epsilon: f32) -> Normal {
        let elements = row.len() as f32;
        let mean = row.iter().fold(0.0, |sum, x| sum + x) / elements;
        let squares = row.iter().fold(0.0, |sum, x| sum + (x - mean) * (x - mean));
        Normal { mean, inverse: 1.0 / (squares / elements + epsilon).sqrt() }
    }

    fn apply(&self, x: f32) -> f32 {
        (x - self.mean) * self.inverse
    }
}

impl LayerNorm {
    /// Layer norm of rows of `scale.len()` elements. `epsilon` is added to the variance. `scale`
    /// and `bias` are the same on all ranks. Collective: ranks compare all that they give.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] for rows without elements, [`PlanError::WrongShape`] for a bias
    /// of another length, and [`PeerRefused`](sidelane::error::CallError::PeerRefused) on the other
    /// ranks; [`ConfigsDiffer`](sidelane::error::CallError::ConfigsDiffer).
    pub fn new(
        group: &mut Communicator,
        activations: Activations,
        epsilon: f32,
        scale: Vec<f32>,
        bias: Vec<f32>,
    ) -> Result<Self, Error> {
        let ranks = group.size() as usize;
        let made = at_least_one("elements of a row", scale.len())
            .and_then(|()| has_shape("bias", bias.len(), 1, scale.len()))
            .map(|()| LayerNorm { ranks, activations, epsilon, scale, bias, rows: PhantomData });
        agreed(group, made, |norm| {
            vec![
                ("elements of a row", norm.scale.len() as u64),
                ("sequence parallel activations", norm.activations.is_sequence_parallel().into()),
                ("bits of epsilon", norm.epsilon.to_bits().into()),
                ("digest of the scale", digest_of(&norm.scale)),
                ("digest of the bias", digest_of(&norm.bias)),
            ]
        })
    }
}

impl<E: Float> LayerNorm<E> {
    /// The same layer for rows of other elements: `with_rows::<bf16>()`. Scale, bias and their
    /// gradients stay `f32`.
    pub fn with_rows<F: Float>(self) -> LayerNorm<F> {
        let LayerNorm { ranks, activations, epsilon, scale, bias, .. } = self;
        LayerNorm { ranks, activations, epsilon, scale, bias, rows: PhantomData }
    }

    /// Outputs of this rank's rows, in their shape. Ranks need not talk.
    ///
    /// # Errors
    /// [`PlanError::WrongShape`] if `x` does not have whole rows.
    pub fn forward(&self, x: &[E]) -> Result<Vec<E>, PlanError> {
        rows_of("rows of a layer norm", x.len(), self.scale.len())?;
        let mut y = E::widened(x).into_owned();
        for row in y.chunks_exact_mut(self.scale.len()) {
            let normal = Normal::of(row, self.epsilon);
            for (x, (scale, bias)) in row.iter_mut().zip(self.scale.iter().zip(&self.bias)) {
                *x = normal.apply(*x) * scale + bias;
            }
        }
        Ok(E::rounded(y))
    }

    /// Gradients from those of the outputs, in their shape, and the same `x` as before. Collective
    /// if activations are sequence parallel.
    ///
    /// # Errors
    /// [`PlanError`] for arguments that do not fit; as [`Communicator::all_reduce`].
    pub fn backward(
        &self,
        group: &mut Communicator,
        x: &[E],
        of_output: &[E],
    ) -> Result<LayerNormGradients<E>, Error> {
        let width = self.scale.len();
        let sums = self.activations.is_sequence_parallel();
        let checked = has_ranks(group, self.ranks).and_then(|()| {
            let tokens = rows_of("rows of a layer norm", x.len(), width)?;
            has_shape("gradients of outputs", of_output.len(), tokens, width)
        });
        if let Err(error) = checked {
            return Err(refuse(group, sums.then_some(CallKind::AllReduce), error));
        }
        let (x, mut of_input) = (E::widened(x), E::widened(of_output).into_owned());
        // Of the scale, and of the bias behind it: one call sums both.
        let mut of_both = vec![0.0; 2 * width];
        for (row, of) in x.chunks_exact(width).zip(of_input.chunks_exact_mut(width)) {
            self.row_backward(row, of, &mut of_both);
        }
        if sums {
            group.all_reduce(&mut of_both)?;
        }
        let bias = of_both.split_off(width);
        Ok(LayerNormGradients { input: E::rounded(of_input), scale: of_both, bias })
    }

    /// Turns the gradients of a row's outputs into those of the row, and adds those of scale and
    /// bias.
    fn row_backward(&self, row: &[f32], of: &mut [f32], of_both: &mut [f32]) {
        let (normal, elements) = (Normal::of(row, self.epsilon), row.len() as f32);
        let (of_scale, of_bias) = of_both.split_at_mut(row.len());
        let (mut sum, mut product) = (0.0, 0.0);
        for (at, (&x, of)) in row.iter().zip(&mut *of).enumerate() {
            let y = normal.apply(x);
            of_scale[at] += *of * y;
            of_bias[at] += *of;
            *of *= self.scale[at];
            sum += *of;
            product += *of * y;
        }
        let (mean, slope) = (sum / elements, product / elements);
        for (&x, of) in row.iter().zip(of) {
            *of = normal.inverse * ((*of - mean) - normal.apply(x) * slope);
        }
    }

    /// The scale, the same on all ranks.
    pub fn scale_mut(&mut self) -> &mut [f32] {
        &mut self.scale
    }

    /// The bias, the same on all ranks.
    pub fn bias_mut(&mut self) -> &mut [f32] {
        &mut self.bias
    }
}
