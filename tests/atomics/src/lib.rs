//! The library's protocols between threads, on loom's atomics: its own files, compiled once more.
//!
//! ```text
//!   src/sync/*.rs ──► sidelane          on std's atomics
//!                └──► this package      on those of `sync::primitives` here, which are loom's:
//!                                       a `Mutation` can weaken each order and fence
//! ```
//!
//! loom runs a model in all interleavings of its threads, and lets a load return each value that
//! the memory model of C++20 allows. So what a model asserts holds on every machine, as far as the
//! model goes. loom treats an access of order `SeqCst` as `AcqRel`: the protocols have fences
//! instead, which it knows.

mod bootstrap;
mod error;
pub mod memory;
pub mod mutation;
pub mod sync;
