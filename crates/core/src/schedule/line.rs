//! The actor of an operation where copy engines move rows: the host, or the stream that it enqueues
//! on.

use super::{Flag, Op};
use crate::topology::{Paths, Route};

/// What performs an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// The host: tags, counts, and all that crosses to other nodes.
    Host,
    /// A stream of the device: copies within the node, and the flags that announce them.
    Stream,
}

impl Op {
    /// The actor of the operation at the rank of these paths, if its host runs ahead of its stream.
    pub fn line(&self, paths: Paths<'_>) -> Line {
        let here = |rank: u32| rank == paths.me() || paths.same_node(rank);
        let streams = match *self {
            Op::Put { to, .. } | Op::PutRows { to, .. } => here(to),
            Op::Signal { to, flag: Flag::Landed | Flag::Read | Flag::Ready, .. } => here(to),
            // A relay of this node, or the net, announces rows of other nodes.
            Op::Wait { from, flag: Flag::Landed | Flag::Ready, .. } => {
                here(from) || paths.route() == Route::Pxn
            }
            Op::Signal { .. } | Op::Wait { .. } => false,
            Op::Reduce { .. } => true,
        };
        if streams { Line::Stream } else { Line::Host }
    }
}
