//! Instances on the host: every feature, stepped in the caller's thread.
//!
//! ```text
//!   start    release: peers have read what I offered last; announce free memory; publish counts; signal
//!   finish   all counts are here: check that all ranks make the same call, place, put rows, wait for mine
//! ```
//!
//! A relay, where there are other nodes, does its part in between: inline, or in a thread of its
//! own while the caller is away between the two halves.

mod backward;
mod buffers;
mod call;
mod combine;
mod dispatch;
mod exchange;
mod flight;
#[cfg(test)]
mod footprints;
mod gather;
mod handle;
mod offload;
mod prepare;
mod refuse;
mod remap;
mod workspace;

use crate::dtype::Dtype;
use crate::error::Error;

pub(super) use buffers::{HostInput, HostOutput, HostRows, check_tensor, elements};
pub(super) use call::refusing;
pub(super) use combine::HostCombine;
pub(super) use dispatch::HostDispatch;
pub(super) use exchange::HostExchange;
pub(super) use flight::{Flight, Lent};
pub(super) use handle::{HostHandle, Inner};
pub(super) use offload::CancelOnPanic;

/// A tensor that a call reads, unless it was refused before the call.
type Source<'a> = Result<(&'a [u8], Dtype), Error>;
/// The same of one that it writes.
type Target<'a> = Result<(&'a mut [u8], Dtype), Error>;
