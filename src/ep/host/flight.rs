//! State of one call from its first step to its last, and the tensors that the caller lends it.
//!
//! An instance has three parts. What never changes is its [`EpState`](super::super::fixed::EpState)
//! state and its programs; what calls use again, one after the other, is its
//! [`Workspace`](super::workspace::Workspace); the rest is a `Flight`.

use super::buffers::HostInput;
use super::handle::{HostHandle, Inner};
use crate::ep::relay::RelayTask;
use crate::error::{CallKind, Error, PlanError};
use crate::gate::Routing;
use crate::lane::Io;
use crate::memory::Extent;
use crate::plan::ExpertMap;
use crate::rows::Stores;
use crate::schedule::{ReturnParts, Tag};

/// Bits of the options digest.
pub(super) mod options {
    /// Rows are summed.
    pub const ROWS: u32 = 1;
    /// One `f32` per row returns.
    pub const WEIGHTS: u32 = 2;
    /// Rows are multiplied with routing weights.
    pub const WEIGHTED: u32 = 4;
}

/// One call in flight.
#[derive(Debug)]
pub(in crate::ep) struct Flight {
    /// The relay works in a thread of its own: the caller may be away between the halves.
    pub offloaded: bool,
    /// The tag of this rank's entry.
    pub tag: Tag,
    /// Why this rank refuses the call; its tag says that it does.
    pub refused: Option<Error>,
    /// Dispatch: the most bytes that it announces.
    pub most: u64,
    /// Dispatch: the extent keeps all that was announced, for rows that move once more.
    pub keeps_room: bool,
    /// Dispatch: where rows land here.
    pub landing: Option<Extent>,
    /// Dispatch: the handle that it makes.
    pub made: Inner,
    /// Return: what this rank brings.
    pub offer: Option<Offer>,
    /// Return: what moves.
    pub parts: ReturnParts,
    /// Return: rows are multiplied with routing weights where they are summed.
    pub weighted: bool,
    /// Return: the chunk stays in the handle.
    pub keeps_chunk: bool,
    /// The relay's part of this call; absent while another thread has it, and where there is one
    /// node. Its blocks are those of the handle that the call makes or follows.
    pub task: Option<RelayTask>,
    /// How rows are stored.
    pub stores: Stores,
}

/// Memory that a rank offers in a return.
#[derive(Debug)]
pub(in crate::ep) struct Offer {
    pub chunk: Chunk,
    pub staging: Extent,
}

/// Rows that a rank offers.
#[derive(Debug)]
pub(in crate::ep) enum Chunk {
    /// The caller's buffer: a refused call gives it back.
    Output(Extent),
    /// A copy: the caller still has the rows.
    Copy(Extent),
    /// The output that the handle keeps, at this offset in the pool.
    Kept(u64),
}

impl Chunk {
    /// Where it begins in the pool.
    pub fn offset(&self) -> u64 {
        match self {
            Chunk::Output(extent) | Chunk::Copy(extent) => extent.offset(),
            Chunk::Kept(offset) => *offset,
        }
    }
}

impl Flight {
    /// A call of this kind, unless what the caller brings was refused.
    pub fn new(kind: CallKind, checked: Result<(), Error>) -> Self {
        Flight {
            offloaded: false,
            tag: Tag { kind, ..Tag::default() },
            refused: checked.err(),
            most: 0,
            keeps_room: false,
            landing: None,
            made: Inner::default(),
            offer: None,
            parts: ReturnParts::default(),
            weighted: false,
            keeps_chunk: false,
            task: None,
            stores: Stores::Cached,
        }
    }

    /// A return of these parts.
    pub fn returning(kind: CallKind, parts: ReturnParts, weighted: bool) -> Self {
        let bit = |on: bool, bit: u32| if on { bit } else { 0 };
        let options = bit(parts.rows, options::ROWS)
            | bit(parts.weights, options::WEIGHTS)
            | bit(weighted, options::WEIGHTED);
        let call = Flight::new(kind, Ok(()));
        Flight { tag: Tag { options, ..call.tag }, parts, weighted, keeps_chunk: weighted, ..call }
    }

    /// Refuses the call, unless something did before.
    pub fn refuse(&mut self, checked: Result<(), Error>) {
        if let (None, Err(error)) = (&self.refused, checked) {
            self.refused = Some(error);
        }
    }

    /// The extent in which rows landed.
    ///
    /// # Errors
    /// [`PlanError::RefusedHere`] where none did.
    pub fn landed(&mut self) -> Result<Extent, Error> {
        self.landing.take().ok_or_else(|| PlanError::RefusedHere.into())
    }

    pub fn kind(&self) -> CallKind {
        self.tag.kind
    }
}

/// Tensors and settings that the caller lends for one half of a call.
#[derive(Default)]
pub(in crate::ep) struct Lent<'l> {
    /// Dispatch: the tokens' choices.
    pub routing: Option<&'l Routing<'l>>,
    /// Gathers without choices: how many tokens there are.
    pub tokens: u32,
    /// The tensor that goes out.
    pub input: &'l [u8],
    /// The handle that the call follows.
    pub handle: Option<&'l HostHandle>,
    /// Return: this rank's rows.
    pub rows: Option<HostInput<'l>>,
    /// Return: one weight per row.
    pub row_weights: Option<&'l [f32]>,
    /// Return: the tensors that come in. Absent, this rank sums nothing: its caller has no place
    /// for it.
    pub output: Option<Io<'l>>,
    /// The new expert map.
    pub map: Option<ExpertMap>,
}
