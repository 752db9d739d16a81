//! Tensor parallel layers: each rank of a group holds a part of the weights.
//!
//! ```text
//!   x [T, in]                      W [out, in] by columns of y = x W', or by rows of W'
//!
//!            ColumnParallelLinear                    RowParallelLinear
//!   rank 0   y[:, 0..out/2]  = x W[0..out/2]'        y = sum over ranks of x[:, part] W[:, part]'  (+ bias)
//!   rank 1   y[:, out/2..]   = x W[out/2..]'         x[:, part] is what a column parallel layer made
//! ```
//!
//! A column parallel layer, an activation function and a row parallel layer make a block that
//! communicates at its borders alone. Between blocks activations lie in one of two ways
//! ([`Activations`]), and two operators lead into a block and out of it. Each is the gradient of
//! the other, Megatron's `f` and `g`:
//!
//! ```text
//!                              gather: into a block          reduce: out of a block
//!   Replicated                 nothing                       all-reduce
//!   SequenceParallel           all-gather of tokens          reduce-scatter of tokens
//!   backward                   reduce                        gather
//! ```
//!
//! An all-reduce is a reduce-scatter and an all-gather, so both ways send the same bytes forward.
//! With sequence parallelism a rank holds `T / ranks` tokens between blocks. Backward it gathers
//! the inputs of a column parallel layer once more, so that no rank keeps them.
//!
//! [`LayerNorm`] and [`Dropout`] stand between blocks, and compute a rank's share of the tokens.
//! The one sums the gradients of its scale and bias over the ranks, the other makes the choices of
//! the whole tensor.
//!
//! An output layer may have the weights of the embedding
//! ([`VocabularyParallelEmbedding::output`]), also where the two are on different stages of a
//! pipeline ([`TiedWeights`]). [`gather_columns`] and [`cut_columns`] lead from cut rows to whole
//! ones and back.
//!
//! [`overlap`] has the plans by which sequence parallel layers compute next to their transfers.
//!
//! **Bits.** Sums over ranks are by ascending rank from +0
//! ([`AllReduceAlgorithm::Direct`](sidelane::collective::AllReduceAlgorithm)), and products sum by
//! ascending depth. So a column parallel layer has the bits of the whole layer, from two columns of
//! a rank on. A row parallel layer has the bits of the sum of its parts' products, whichever way
//! activations lie. Gradients of weights have the bits of the whole layer's, where a rank has more
//! than 256 of them.
//!
//! **Rows.** Rows are `f32`, or bf16 where a layer is made
//! [`with_rows`](ColumnParallelLinear::with_rows) of it. Then factors of products, rows and their
//! gradients are bf16, each rounded once from sums in `f32`. Weights and their gradients stay
//! `f32`.
//!
//! **Errors.** Ranks compare settings when they make a layer with a group. A rank whose arguments
//! are wrong says so to the others before anything moves, if the call communicates: they get
//! [`PeerRefused`](sidelane::error::CallError::PeerRefused), and the next call works.

mod activations;
mod cross_entropy;
mod cut;
mod dropout;
mod embedding;
mod layer_norm;
mod linear;
pub mod overlap;
mod tied;

pub use activations::Activations;
pub use cross_entropy::{CrossEntropyTape, VocabularyParallelCrossEntropy};
pub use cut::{cut_columns, cut_rows, gather_columns};
pub use dropout::Dropout;
pub use embedding::VocabularyParallelEmbedding;
pub use layer_norm::{LayerNorm, LayerNormGradients};
pub use linear::{ColumnParallelLinear, DelayedWeights, LinearGradients, LinearShape, RowParallelLinear};
pub use tied::TiedWeights;
