//! Context parallelism: each rank of a group holds a part of the tokens, and attention sees all.
//!
//! ```text
//!   UlyssesAttention       all-to-all         local attention       all-to-all
//!     rank r has           tokens r, heads *  tokens *, heads r     tokens r, heads *
//!
//!   RingAttention          step 0             step 1                step 2
//!     rank r sees keys of  rank r             rank r - 1            rank r - 2           mod ranks
//! ```
//!
//! [`UlyssesAttention`] moves each token's queries, keys and values to the rank of their heads, and
//! the outputs back. It needs as many query heads as ranks, or a multiple.
//!
//! [`RingAttention`] leaves queries where they are. Blocks of keys and values travel from rank to
//! rank, and an online softmax takes them in that order. A block travels next to the attention of
//! the one before, if the caller gives an executor. Its ranks may be more than the heads. If
//! attention is causal, tokens lie in [`zig_zag_pieces`], so that all ranks compute alike.
//!
//! Both compute `softmax(q k' / sqrt(head_dim)) v` for each query head ([`AttentionShape`]), in
//! `f32`. Position embeddings, dropout and projections are the caller's.
//!
//! **Bits.** Sums start from +0, and nothing is fused:
//!
//! ```text
//!   dot products                      by ascending element of the head
//!   sum of powers, output             by ascending key of a block; then sums of blocks, in the order in which the
//!                                     rank sees them
//!   gradient of a query               by ascending key of a block, and blocks in that order
//!   gradient of a key, of a value     by ascending query, and of each by ascending query head; then sums of ranks,
//!                                     in the order in which the block visits them
//! ```
//!
//! Ulysses has one block, so it has the bits of attention in one process. Where ranks hold replicas
//! of a KV head, the gradients of the replicas are added by ascending rank from +0. Ring attention
//! differs from attention in one process by the roundings of corrections and of other orders, and
//! always in the same way: no bit depends on nodes or lanes.
//!
//! **Rows.** Rows are `f32`, or bf16 where attention is made
//! [`with_rows`](RingAttention::with_rows) of it. Then outputs and gradients are rounded before
//! they travel. Those of a block in a ring travel behind each rank, so each rank rounds them once.
//!
//! **Errors.** A rank whose arguments are wrong says so to the others before anything moves: they
//! get [`PeerRefused`](sidelane::error::CallError::PeerRefused), and the next call works.

mod attention;
mod ring;
mod shape;
mod ulysses;
mod visits;
mod zig_zag;

pub use ring::{RingAttention, RingTape, ring_order};
pub use shape::{AttentionGradients, AttentionShape};
pub use ulysses::{UlyssesAttention, UlyssesTape};
pub use zig_zag::{cut_zig_zag, zig_zag_pieces};
