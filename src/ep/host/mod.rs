//! Instances on the host: every feature, stepped in the caller's thread.
//!
//! ```text
//!   start    release: peers have read what I offered last; announce free memory; publish counts; signal
//!   finish   all counts are here: check that all ranks make the same call, place, put rows, wait for mine
//! ```
//!
//! A relay, where there are other nodes, does its part in between: inline, or in a thread of its
//! own while the caller is away between the two halves.
//!
//! State is in three values: [`EpState`](super::state::EpState) and the programs never change, a
//! `Workspace` is what calls use one after the other, and a `Flight` is what one call owns.

mod call;
#[cfg(test)]
mod footprints;
mod gather_dispatch;
mod host_exchange;
mod host_results;
mod relay_thread;

use crate::dtype::Dtype;
use crate::error::Error;

pub(super) use call::{CallTensors, Flight, refusing};
pub(super) use host_exchange::{HostCombine, HostDispatch, HostExchange};
pub(super) use host_results::{HostHandle, HostInput, HostOutput, HostRows, Inner, check_tensor, elements};

/// A tensor that a call reads, unless it was refused before the call.
type InputTensor<'a> = Result<(&'a [u8], Dtype), Error>;
/// The same of one that it writes.
type OutputTensor<'a> = Result<(&'a mut [u8], Dtype), Error>;
