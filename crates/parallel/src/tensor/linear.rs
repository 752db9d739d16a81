//! Linear layers, `y = x W' + b`, cut over the ranks of a group.
//!
//! ```text
//!                          forward                           backward
//!   ColumnParallelLinear   x = gather(x)                     dx = reduce(dy W)     dW = dy' x     db = sum of dy
//!                          y = x W' + b
//!   RowParallelLinear      y = reduce(x W') + b              dy = gather(dy)
//!                                                            dx = dy W             dW = dy' x     db = sum of dy
//! ```
//!
//! With sequence parallel activations a pass may go in token chunks, so that products compute next
//! to transfers ([`overlap`](super::overlap)). `forward` and `backward` take one chunk, and overlap
//! nothing. Replicated activations are computed and summed whole.
//!
//! The bias of a row parallel layer is not cut: it is added once, after the sum. Its gradient is
//! made of the gradients of all tokens, so all ranks have the same and no rank sends it.

use std::borrow::Cow;
use std::marker::PhantomData;

use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::error::{CallKind, PlanError};
use sidelane::overlap::{HostExecutor, TokenChunks};
use sidelane::rows::{Matrix, product};

use super::activations::{Activations, refuse};
use super::overlap::{LinearPass, Pass, Rows, first_call};
use crate::check::{Settings, agreed, at_least_one, digest_of, has_ranks, has_shape, part_of, rows_of};
use crate::float::Float;

/// A plan has a few steps for each chunk, and a chunk pays with hundreds of tokens.
const MOST_CHUNKS: u32 = 1024;

/// Sizes of a whole linear layer, before it is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LinearShape {
    /// Elements of an input row.
    pub inputs: usize,
    /// Elements of an output row.
    pub outputs: usize,
}

/// Gradients of a linear layer, in the shapes of what they are of.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearGradients<E = f32> {
    /// Of the input rows.
    pub input: Vec<E>,
    /// Of this rank's weights.
    pub weight: Vec<f32>,
    /// Of the bias, if there is one: this rank's part if the layer is column parallel.
    pub bias: Option<Vec<f32>>,
}

/// Rows of all tokens of a block, of which the gradients of a rank's weights are made.
///
/// A zero bubble pipeline needs the gradients of inputs first. Those of weights wait, and move
/// nothing when their pass comes ([`weights`](DelayedWeights::weights)).
#[derive(Clone, Debug)]
pub struct DelayedWeights<E = f32> {
    x: Vec<E>,
    of_output: Vec<E>,
    inputs: usize,
    outputs: usize,
    bias: bool,
}

impl<E: Float> DelayedWeights<E> {
    /// Gradients of the weights and of the bias, if there is one: as
    /// [`LinearGradients`] has them, to the bit.
    pub fn weights(&self) -> (Vec<f32>, Option<Vec<f32>>) {
        let (x, of_output) = (E::widened(&self.x), E::widened(&self.of_output));
        of_weights(&x, &of_output, (self.inputs, self.outputs), self.bias)
    }

    /// Bytes that wait.
    pub fn bytes(&self) -> u64 {
        (size_of_val(&self.x[..]) + size_of_val(&self.of_output[..])) as u64
    }
}

/// `dy' x`, and the sum of the rows of `dy`, by ascending token.
fn of_weights(x: &[f32], of_output: &[f32], (inputs, outputs): (usize, usize), bias: bool) -> OfWeights {
    let rows = x.len() / inputs;
    let mut weight = vec![0.0; outputs * inputs];
    let transposed = Matrix::new(of_output, rows, outputs).transposed();
    product(&mut weight, transposed, Matrix::new(x, rows, inputs), false);
    let bias = bias.then(|| {
        let mut sum = vec![0.0; outputs];
        for row in of_output.chunks_exact(outputs) {
            sum.iter_mut().zip(row).for_each(|(sum, of)| *sum += of);
        }
        sum
    });
    (weight, bias)
}

/// Gradients of a rank's weights and bias.
type OfWeights = (Vec<f32>, Option<Vec<f32>>);

/// How weights are cut.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cut {
    /// In a column parallel layer. The bias is cut with them.
    Rows,
    /// In a row parallel layer. All ranks have the bias.
    Columns,
}

/// The part of a layer that a rank holds, and its products.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub inputs: usize,
    pub outputs: usize,
    pub ranks: usize,
    pub activations: Activations,
    pub weight: Vec<f32>,
    pub bias: Option<Vec<f32>>,
}

impl Part {
    fn checked(self) -> Result<Part, PlanError> {
        at_least_one("inputs", self.inputs)?;
        at_least_one("outputs", self.outputs)?;
        has_shape("weights", self.weight.len(), self.outputs, self.inputs)?;
        self.bias.as_ref().map_or(Ok(()), |bias| has_shape("bias", bias.len(), 1, self.outputs))?;
        Ok(self)
    }

    /// Settings that ranks must have alike.
    fn settings(&self, cut: Cut, shape: LinearShape) -> Settings {
        let whole_bias = self.bias.as_deref().filter(|_| cut == Cut::Columns);
        vec![
            ("column parallel layer", (cut == Cut::Rows).into()),
            ("inputs", shape.inputs as u64),
            ("outputs", shape.outputs as u64),
            ("sequence parallel activations", self.activations.is_sequence_parallel().into()),
            ("bias", self.bias.is_some().into()),
            ("digest of the bias", whole_bias.map_or(0, digest_of)),
        ]
    }

    /// The weights as factors of products with rows of these elements.
    fn weight<E: Float>(&self) -> Cow<'_, [f32]> {
        E::factors(&self.weight)
    }

    /// `y = x W'`, and a bias.
    fn outputs<E: Float>(&self, x: &[E], weight: &[f32], bias: Option<&[f32]>, y: &mut [E]) {
        let x = E::widened(x);
        let x = Matrix::new(&x, x.len() / self.inputs, self.inputs);
        let weight = Matrix::new(weight, self.outputs, self.inputs);
        E::in_f32(y, |y| {
            product(y, x, weight.transposed(), false);
            self.add(bias, y);
        });
    }

    /// `y + b`
    fn add(&self, bias: Option<&[f32]>, y: &mut [f32]) {
        if let Some(bias) = bias {
            for row in y.chunks_exact_mut(self.outputs) {
                row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
            }
        }
    }

    /// `dx = dy W`
    fn of_input<E: Float>(&self, of_output: &[E], weight: &[f32], of_input: &mut [E]) {
        let of_output = E::widened(of_output);
        let of_output = Matrix::new(&of_output, of_output.len() / self.outputs, self.outputs);
        let weight = Matrix::new(weight, self.outputs, self.inputs);
        E::in_f32(of_input, |of_input| product(of_input, of_output, weight, false));
    }

    /// Gradients of weights, from rows of all tokens.
    fn of_weights<E: Float>(&self, x: &[E], of_output: &[E]) -> OfWeights {
        let sizes = (self.inputs, self.outputs);
        of_weights(&E::widened(x), &E::widened(of_output), sizes, self.bias.is_some())
    }

    fn delayed<E: Float>(&self, x: Vec<E>, of_output: Vec<E>) -> DelayedWeights<E> {
        let Part { inputs, outputs, .. } = *self;
        DelayedWeights { x, of_output, inputs, outputs, bias: self.bias.is_some() }
    }

    /// Checks that a call comes with a group of the layer's size, and with chunks that a plan can
    /// have.
    fn callable(&self, group: &Communicator, chunks: TokenChunks) -> Result<(), PlanError> {
        has_ranks(group, self.ranks)?;
        if chunks.count() > MOST_CHUNKS {
            let (parameter, seen) = ("token chunks", chunks.count().into());
            return Err(PlanError::BadParameter { parameter, seen, expected: "at most 1024" });
        }
        Ok(())
    }

    /// The call that a pass begins with, if any.
    fn first_call(&self, pass: LinearPass, chunks: TokenChunks) -> Option<CallKind> {
        match self.activations {
            Activations::Replicated => pass.reduces().then_some(CallKind::AllReduce),
            Activations::SequenceParallel => first_call(pass, chunks),
        }
    }
}

/// One chunk, and nothing next to anything.
fn whole() -> (TokenChunks, HostExecutor<'static>) {
    (TokenChunks::new(1), HostExecutor::new().overlap(false))
}

/// A linear layer of which each rank makes a part of the outputs.
///
/// ```
/// use sidelane::{World, collective::Communicator};
/// use sidelane_parallel::tensor::{Activations, ColumnParallelLinear, LinearShape, RowParallelLinear};
///
/// let ranks = World::threads(2)?.into_iter().map(|world| {
///     std::thread::spawn(move || -> sidelane::Result<()> {
///         let mut group = Communicator::builder(&world.all()?).build()?;
///         let (up, down) = (LinearShape { inputs: 2, outputs: 4 }, LinearShape { inputs: 4, outputs: 2 });
///         let up = ColumnParallelLinear::new(&mut group, up, Activations::Replicated, vec![0.5; 4], None)?;
///         let down =
///             RowParallelLinear::new(&mut group, down, Activations::Replicated, vec![1.0; 4], Some(vec![0.0, 1.0]))?;
///         let x = [1.0, 3.0];                                  // one token, on both ranks
///         let h = up.forward(&mut group, &x)?;                 // two of four values on each
///         assert_eq!(h, [2.0, 2.0]);
///         assert_eq!(down.forward(&mut group, &h)?, [8.0, 9.0]);
///         let of_h = down.backward(&mut group, &h, &[1.0, 1.0])?;
///         let of_x = up.backward(&mut group, &x, &of_h.input)?;
///         assert_eq!(of_x.input, [4.0, 4.0]);
///         Ok(())
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     rank.join().unwrap()?;
/// }
/// # Ok::<(), sidelane::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ColumnParallelLinear<E = f32>(pub(super) Part, pub(super) PhantomData<E>);

impl ColumnParallelLinear {
    /// This rank's part: `weight` is `[outputs / ranks, inputs]`, `bias` `[outputs / ranks]`. See
    /// [`cut_rows`](super::cut_rows). Collective: ranks compare shapes and activations.
    ///
    /// # Errors
    /// [`PlanError::WrongShape`] for weights of another length, [`PlanError::BadParameter`] if the
    /// outputs do not make equal parts, and
    /// [`PeerRefused`](sidelane::error::CallError::PeerRefused) on the other ranks;
    /// [`ConfigsDiffer`](sidelane::error::CallError::ConfigsDiffer).
    pub fn new(
        group: &mut Communicator,
        shape: LinearShape,
        activations: Activations,
        weight: Vec<f32>,
        bias: Option<Vec<f32>>,
    ) -> Result<Self, Error> {
        let LinearShape { inputs, outputs } = shape;
        let ranks = group.size() as usize;
        let part = part_of("outputs", outputs, (group.rank(), group.size()))
            .and_then(|outputs| Part { inputs, outputs, ranks, activations, weight, bias }.checked());
        let part = agreed(group, part, |part| part.settings(Cut::Rows, shape))?;
        Ok(ColumnParallelLinear(part, PhantomData))
    }
}

impl<E: Float> ColumnParallelLinear<E> {
    /// The same layer for rows of other elements: `with_rows::<bf16>()`. Weights stay `f32`, and
    /// are rounded where a product takes them.
    pub fn with_rows<F: Float>(self) -> ColumnParallelLinear<F> {
        ColumnParallelLinear(self.0, PhantomData)
    }

    /// This rank's outputs of all tokens, `[T, outputs / ranks]`. `x` is `[T, inputs]`, or this
    /// rank's tokens of it. Collective if activations are sequence parallel.
    ///
    /// # Errors
    /// [`PlanError`] for arguments that do not fit; as [`Communicator::all_gather`].
    pub fn forward(&self, group: &mut Communicator, x: &[E]) -> Result<Vec<E>, Error> {
        let (chunks, executor) = whole();
        self.forward_in_chunks(group, x, chunks, &executor)
    }

    /// As [`forward`](Self::forward), to the same bits: gathers token chunks next to the products
    /// of others, if activations are sequence parallel. All ranks give the same number of chunks.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); [`PlanError::BadParameter`] for more than 1,024 chunks;
    /// [`ConfigsDiffer`](sidelane::error::CallError::ConfigsDiffer) if ranks have different numbers
    /// of tokens or chunks; [`OverlapError`](sidelane::error::OverlapError).
    pub fn forward_in_chunks(
        &self,
        group: &mut Communicator,
        x: &[E],
        chunks: TokenChunks,
        executor: &HostExecutor<'_>,
    ) -> Result<Vec<E>, Error> {
        let (part, pass) = (&self.0, LinearPass::ColumnForward);
        let checked = part.callable(group, chunks).and_then(|()| rows_of("inputs", x.len(), part.inputs));
        let tokens = match checked {
            Ok(tokens) => tokens,
            Err(error) => return Err(refuse(group, part.first_call(pass, chunks), error)),
        };
        let (weight, bias) = (part.weight::<E>(), part.bias.as_deref());
        match part.activations {
            Activations::Replicated => {
                let mut y = vec![E::zeroed(); tokens * part.outputs];
                part.outputs(x, &weight, bias, &mut y);
                Ok(y)
            }
            Activations::SequenceParallel => {
                let pass = Pass {
                    pass,
                    own: Rows { values: x, width: part.inputs },
                    all: Rows::NONE,
                    width: part.outputs,
                    multiply: &|x, y| part.outputs(x, &weight, bias, y),
                    weights: &|_| (),
                };
                Ok(pass.run(group, tokens, chunks, executor)?.0)
            }
        }
    }

    /// Gradients from those of the outputs, `[T, outputs / ranks]`, and the same `x` as before. The
    /// gradient of `x` has the shape of `x`. Sequence parallel inputs are gathered again, so no
    /// rank keeps them. Collective.
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::forward`], and [`Communicator::reduce_scatter`].
    pub fn backward(
        &self,
        group: &mut Communicator,
        x: &[E],
        of_output: &[E],
    ) -> Result<LinearGradients<E>, Error> {
        let (chunks, executor) = whole();
        self.backward_in_chunks(group, x, of_output, chunks, &executor)
    }

    /// The gradients of `x` alone, and what those of weights are made of, to the bits of
    /// [`backward`](Self::backward). Collective.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_input(
        &self,
        group: &mut Communicator,
        x: &[E],
        of_output: &[E],
    ) -> Result<(Vec<E>, DelayedWeights<E>), Error> {
        let part = &self.0;
        if let Err(error) = self.checked(group, x, of_output, TokenChunks::new(1)) {
            let call = part.activations.gather_call().or(part.activations.reduce_call());
            return Err(refuse(group, call, error));
        }
        let x = part.activations.gather(group, x)?.into_owned();
        let mut of_input = vec![E::zeroed(); x.len()];
        part.of_input(of_output, &part.weight::<E>(), &mut of_input);
        let of_input = part.activations.reduce(group, of_input)?;
        Ok((of_input, part.delayed(x, of_output.to_vec())))
    }

    /// Tokens of a backward pass, as `x` has them.
    fn checked(
        &self,
        group: &Communicator,
        x: &[E],
        of_output: &[E],
        chunks: TokenChunks,
    ) -> Result<usize, PlanError> {
        let part = &self.0;
        part.callable(group, chunks)?;
        let tokens = rows_of("inputs", x.len(), part.inputs)?;
        let rows = part.activations.inside(tokens, part.ranks);
        has_shape("gradients of outputs", of_output.len(), rows, part.outputs)?;
        Ok(tokens)
    }

    /// As [`backward`](Self::backward), to the same bits: inputs are gathered next to the gradients
    /// of inputs, and these are reduced next to the gradients of weights.
    ///
    /// # Errors
    /// As [`backward`](Self::backward) and [`forward_in_chunks`](Self::forward_in_chunks).
    pub fn backward_in_chunks(
        &self,
        group: &mut Communicator,
        x: &[E],
        of_output: &[E],
        chunks: TokenChunks,
        executor: &HostExecutor<'_>,
    ) -> Result<LinearGradients<E>, Error> {
        let (part, pass) = (&self.0, LinearPass::ColumnBackward);
        let tokens = match self.checked(group, x, of_output, chunks) {
            Ok(tokens) => tokens,
            Err(error) => return Err(refuse(group, part.first_call(pass, chunks), error)),
        };
        let weight = part.weight::<E>();
        match part.activations {
            Activations::Replicated => {
                let mut of_input = vec![E::zeroed(); x.len()];
                part.of_input(of_output, &weight, &mut of_input);
                group.all_reduce(&mut of_input)?;
                let (weight, bias) = part.of_weights(x, of_output);
                Ok(LinearGradients { input: of_input, weight, bias })
            }
            Activations::SequenceParallel => {
                let pass = Pass {
                    pass,
                    own: Rows { values: x, width: part.inputs },
                    all: Rows { values: of_output, width: part.outputs },
                    width: part.inputs,
                    multiply: &|of_output, of_input| part.of_input(of_output, &weight, of_input),
                    weights: &|x| part.of_weights(x, of_output),
                };
                let (input, weights) = pass.run(group, tokens, chunks, executor)?;
                let (weight, bias) = weights.take()?;
                Ok(LinearGradients { input, weight, bias })
            }
        }
    }

    /// This rank's weights, `[outputs / ranks, inputs]`.
    pub fn weight_mut(&mut self) -> &mut [f32] {
        &mut self.0.weight
    }

    /// This rank's part of the bias.
    pub fn bias_mut(&mut self) -> Option<&mut [f32]> {
        self.0.bias.as_deref_mut()
    }
}

/// A linear layer of which each rank takes a part of the inputs. [`ColumnParallelLinear`] has an
/// example of both.
#[derive(Clone, Debug)]
pub struct RowParallelLinear<E = f32>(Part, PhantomData<E>);

impl RowParallelLinear {
    /// This rank's part: `weight` is `[outputs, inputs / ranks]`, see
    /// [`cut_columns`](super::cut_columns); `bias` is `[outputs]`, the same on all ranks.
    /// Collective: ranks compare shapes, activations and the bias.
    ///
    /// # Errors
    /// As [`ColumnParallelLinear::new`], for inputs that do not make equal parts.
    pub fn new(
        group: &mut Communicator,
        shape: LinearShape,
        activations: Activations,
        weight: Vec<f32>,
        bias: Option<Vec<f32>>,
    ) -> Result<Self, Error> {
        let LinearShape { inputs, outputs } = shape;
        let ranks = group.size() as usize;
        let part = part_of("inputs", inputs, (group.rank(), group.size()))
            .and_then(|inputs| Part { inputs, outputs, ranks, activations, weight, bias }.checked());
        let part = agreed(group, part, |part| part.settings(Cut::Columns, shape))?;
        Ok(RowParallelLinear(part, PhantomData))
    }
}

impl<E: Float> RowParallelLinear<E> {
    /// The same layer for rows of other elements: `with_rows::<bf16>()`. Weights stay `f32`, and
    /// are rounded where a product takes them.
    pub fn with_rows<F: Float>(self) -> RowParallelLinear<F> {
        RowParallelLinear(self.0, PhantomData)
    }

    /// Outputs, `[T, outputs]`, or this rank's tokens of them. `x` is this rank's part of the
    /// inputs of all tokens, `[T, inputs / ranks]`. Collective.
    ///
    /// # Errors
    /// [`PlanError`] for arguments that do not fit; as [`Communicator::all_reduce`] and
    /// [`Communicator::reduce_scatter`].
    pub fn forward(&self, group: &mut Communicator, x: &[E]) -> Result<Vec<E>, Error> {
        let (chunks, executor) = whole();
        self.forward_in_chunks(group, x, chunks, &executor)
    }

    /// As [`forward`](Self::forward), to the same bits: products of token chunks are summed over
    /// the ranks next to the products of others, if activations are sequence parallel. All ranks
    /// give the same number of chunks.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); [`PlanError::BadParameter`] for more than 1,024 chunks;
    /// [`ConfigsDiffer`](sidelane::error::CallError::ConfigsDiffer) if ranks have different numbers
    /// of tokens or chunks; [`OverlapError`](sidelane::error::OverlapError).
    pub fn forward_in_chunks(
        &self,
        group: &mut Communicator,
        x: &[E],
        chunks: TokenChunks,
        executor: &HostExecutor<'_>,
    ) -> Result<Vec<E>, Error> {
        let (part, pass) = (&self.0, LinearPass::RowForward);
        let checked = part
            .callable(group, chunks)
            .and_then(|()| part.activations.outside(rows_of("inputs", x.len(), part.inputs)?, part.ranks));
        let tokens = match checked {
            Ok(tokens) => tokens,
            Err(error) => return Err(refuse(group, part.first_call(pass, chunks), error)),
        };
        let weight = part.weight::<E>();
        let mut y = match part.activations {
            Activations::Replicated => {
                let mut y = vec![E::zeroed(); tokens * part.outputs];
                part.outputs(x, &weight, None, &mut y);
                group.all_reduce(&mut y)?;
                y
            }
            Activations::SequenceParallel => {
                let pass = Pass {
                    pass,
                    own: Rows::NONE,
                    all: Rows { values: x, width: part.inputs },
                    width: part.outputs,
                    multiply: &|x, y| part.outputs(x, &weight, None, y),
                    weights: &|_| (),
                };
                pass.run(group, tokens, chunks, executor)?.0
            }
        };
        if part.bias.is_some() {
            E::in_f32(&mut y, |y| part.add(part.bias.as_deref(), y));
        }
        Ok(y)
    }

    /// Gradients from those of the outputs, in their shape, and the same `x` as before. Collective
    /// if activations are sequence parallel.
    ///
    /// # Errors
    /// [`PlanError`] for arguments that do not fit; as [`Communicator::all_gather`].
    pub fn backward(
        &self,
        group: &mut Communicator,
        x: &[E],
        of_output: &[E],
    ) -> Result<LinearGradients<E>, Error> {
        let (chunks, executor) = whole();
        self.backward_in_chunks(group, x, of_output, chunks, &executor)
    }

    /// The gradients of `x` alone, and what those of weights are made of, to the bits of
    /// [`backward`](Self::backward). Collective if activations are sequence parallel.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn backward_input(
        &self,
        group: &mut Communicator,
        x: &[E],
        of_output: &[E],
    ) -> Result<(Vec<E>, DelayedWeights<E>), Error> {
        let part = &self.0;
        if let Err(error) = self.checked(group, x, of_output, TokenChunks::new(1)) {
            return Err(refuse(group, part.activations.gather_call(), error));
        }
        let of_output = part.activations.gather(group, of_output)?.into_owned();
        let mut of_input = vec![E::zeroed(); x.len()];
        part.of_input(&of_output, &part.weight::<E>(), &mut of_input);
        Ok((of_input, part.delayed(x.to_vec(), of_output)))
    }

    /// Tokens of a backward pass, as `of_output` has them.
    fn checked(
        &self,
        group: &Communicator,
        x: &[E],
        of_output: &[E],
        chunks: TokenChunks,
    ) -> Result<usize, PlanError> {
        let part = &self.0;
        part.callable(group, chunks)?;
        let tokens = part.activations.outside(rows_of("inputs", x.len(), part.inputs)?, part.ranks)?;
        has_shape("gradients of outputs", of_output.len(), tokens, part.outputs)?;
        Ok(tokens)
    }

    /// As [`backward`](Self::backward), to the same bits: gradients of outputs are gathered next to
    /// the gradients of inputs of other chunks.
    ///
    /// # Errors
    /// As [`backward`](Self::backward) and [`forward_in_chunks`](Self::forward_in_chunks).
    pub fn backward_in_chunks(
        &self,
        group: &mut Communicator,
        x: &[E],
        of_output: &[E],
        chunks: TokenChunks,
        executor: &HostExecutor<'_>,
    ) -> Result<LinearGradients<E>, Error> {
        let (part, pass) = (&self.0, LinearPass::RowBackward);
        let tokens = match self.checked(group, x, of_output, chunks) {
            Ok(tokens) => tokens,
            Err(error) => return Err(refuse(group, part.first_call(pass, chunks), error)),
        };
        let weight = part.weight::<E>();
        match part.activations {
            Activations::Replicated => {
                let mut input = vec![E::zeroed(); x.len()];
                part.of_input(of_output, &weight, &mut input);
                let (weight, bias) = part.of_weights(x, of_output);
                Ok(LinearGradients { input, weight, bias })
            }
            Activations::SequenceParallel => {
                let pass = Pass {
                    pass,
                    own: Rows { values: of_output, width: part.outputs },
                    all: Rows::NONE,
                    width: part.inputs,
                    multiply: &|of_output, of_input| part.of_input(of_output, &weight, of_input),
                    weights: &|of_output| part.of_weights(x, of_output),
                };
                let (input, weights) = pass.run(group, tokens, chunks, executor)?;
                let (weight, bias) = weights.take()?;
                Ok(LinearGradients { input, weight, bias })
            }
        }
    }

    /// This rank's weights, `[outputs, inputs / ranks]`.
    pub fn weight_mut(&mut self) -> &mut [f32] {
        &mut self.0.weight
    }

    /// The bias, the same on all ranks.
    pub fn bias_mut(&mut self) -> Option<&mut [f32]> {
        self.0.bias.as_deref_mut()
    }
}
