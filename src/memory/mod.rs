//! Memory that other ranks can reach.
//!
//! Every rank owns one *heap*: a sealed memfd, registered once. The ranks of a node map each
//! other's heaps into one reservation of address space, so that addresses are computed:
//! `base + index * stride + offset`.
//!
//! ```text
//!   reservation of rank 1      | heap of 0        | heap of 1 (own)  | heap of 2        |
//!                              ^ base             ^ base + stride
//!   one heap                   | symmetric: control windows, callers' windows | pool: rows, outputs, staging |
//! ```
//!
//! *Symmetric* memory is allocated collectively, for flags and for arrays of equal size at every
//! rank. The *pool* is local: a rank announces free memory with its counts, others write there, and
//! it trims the extent to the exact size. So no rank reserves for the worst case, and ranks may
//! free in any order.
//!
//! This module maps and allocates; it never decides which rank may write. It checks every address
//! against the mapping before a pointer leaves it.

#![allow(unsafe_code, reason = "mapping memory and viewing it as typed slices cannot be said in safe Rust")]

pub(crate) mod access;
mod heap;
mod numa;
mod pool;

pub(crate) use heap::{Heap, HeapSizes, PeerMapping, Segment, SymmetricExtent, pin};
pub(crate) use pool::{Extents, ReleaseCheck};
pub use pool::{Pool, PoolReport};

// For the program and the tests of this repository: no promises are made about it.
#[doc(hidden)]
pub use heap::{PageReport, huge_pages_granted};
#[doc(hidden)]
pub use numa::Numa;
#[doc(hidden)]
pub use pool::Extent;
