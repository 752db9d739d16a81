//! A *story*: what a whole group does over consecutive calls, unrolled from the functions that the real calls use.
//!
//! ```text
//!   script: nodes, experts, routings, calls
//!      |  Sorted, Counts, Layout, Direct, Calls, Tables   the same code as in a real call
//!      v
//!   story[call][rank] = scenes:   touches | steps  ->  touches | steps  -> ...  -> touches
//!                                 ^ planner, caller     ^ a join of all tracks lies between two scenes
//! ```
//!
//! *Touches* are what the planner and the caller read and write in the windows between two stages. No executor runs
//! them, but they are what the licences are for, so `prove` orders them like any other access.

mod calls;
mod effect;
mod pool;
mod tell;
mod touch;

use std::ops::Range;
use std::rc::Rc;

use super::{Calls, Control, Op, Operands, Parts, Sum, Tables, WindowId};
use crate::error::{CallKind, PlanError};
use crate::gate::Routing;
use crate::plan::{ExpertMap, Layout, Order};
use crate::topology::NodeMap;

pub use effect::Effect;

/// What a group is to do.
#[derive(Clone, Debug)]
pub struct Script<'a> {
    /// Which ranks share memory.
    pub nodes: &'a NodeMap,
    /// Where experts live.
    pub map: &'a ExpertMap,
    /// Segments start at multiples of this many rows.
    pub align: u32,
    /// Order of sums.
    pub order: Order,
    /// Bytes of one row: a multiple of 16.
    pub row_bytes: u64,
    /// Routings that dispatches choose from: `[set][rank]`.
    pub routings: &'a [Vec<Routing<'a>>],
    /// The calls.
    pub calls: &'a [Call],
    /// A rule that whoever plans breaks: `None`, except to see that `prove` notices.
    pub slip: Option<Slip>,
}

/// One call of the group. Handles are numbered by the dispatches that were not refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Dispatch with counts.
    Dispatch {
        /// Which set of routings.
        routing: usize,
        /// Whether the caller keeps the rows and reads them again at the handle's next return.
        keep: bool,
    },
    /// Dispatch along a known layout (gradient of a combine).
    Cached {
        /// The handle.
        handle: usize,
    },
    /// Rows back to their tokens (combine, gradient of dispatch).
    Return {
        /// The handle.
        handle: usize,
        /// What comes home.
        parts: Parts,
        /// Whether the rows are a tensor of the caller that is copied into the pool during the call.
        copied: bool,
    },
    /// A dispatch whose input some rank refuses: every rank leaves when it has read the publications.
    RefusedDispatch {
        /// Which set of routings.
        routing: usize,
    },
    /// A return whose input some rank refuses: every rank leaves when it has read the tags.
    RefusedReturn {
        /// The handle.
        handle: usize,
    },
    /// Ranks disagree: rank 0 enters a return, the others a dispatch. Every rank leaves when it has read the tags.
    Mixed {
        /// Which set of routings.
        routing: usize,
        /// The handle; its rows are not kept.
        handle: usize,
    },
}

/// Rules of memory that a planner could break. The schedule's own mutations are in [`mutate`](super::mutate).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slip {
    /// The chunk of a return is free again when the return ends, not when its readers have said so.
    FreeBeforeAck,
    /// The announced extent is taken from rows that the caller still holds.
    AnnounceHeld,
    /// Publications and mailboxes are not doubled.
    OnePublication,
    /// Publications and mailboxes are doubled by the parity of the dispatch, which ranks that made another call do not
    /// count.
    CountDispatches,
    /// Tags are not doubled.
    OneTag,
}

impl Slip {
    /// All slips.
    pub const ALL: [Slip; 5] =
        [Slip::FreeBeforeAck, Slip::AnnounceHeld, Slip::OnePublication, Slip::CountDispatches, Slip::OneTag];
}

/// Bytes of a rank's window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bytes {
    /// Whose window.
    pub owner: u32,
    /// Which window.
    pub window: WindowId,
    /// Which bytes.
    pub range: Range<u64>,
}

/// A read or write by the planner or the caller, between two stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Touch {
    /// What is read or written.
    pub what: &'static str,
    /// Where.
    pub bytes: Bytes,
    /// Whether it is written.
    pub write: bool,
    /// For a read: the call whose bytes it must see.
    pub of: usize,
}

/// One operation, its generation resolved to a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its track.
    pub track: u32,
    /// The operation.
    pub op: Op,
    /// Value of a Signal or Wait; 0 for others.
    pub value: u64,
}

/// A stage, with what happens before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scene {
    /// Name of the stage; "end" after the last.
    pub name: &'static str,
    /// What planner and caller do first, in this order.
    pub touches: Vec<Touch>,
    /// The operations, in launch order.
    pub steps: Vec<Step>,
}

/// What one rank does in one call.
#[derive(Clone, Debug)]
pub struct Part {
    /// The rank.
    pub rank: u32,
    /// Position of the call in the story.
    pub call: usize,
    /// What the rank calls.
    pub kind: CallKind,
    /// The stages, and a last scene without operations.
    pub scenes: Vec<Scene>,
    calls: Calls,
    row_bytes: u64,
    /// Where entry signals of this call leave their tag: its number, unless a slip says otherwise.
    tag_parity: u64,
    tables: Tables,
    layout: Rc<Layout>,
}

/// A script, unrolled.
#[derive(Clone, Debug)]
pub struct Story {
    /// Number of ranks.
    pub ranks: u32,
    /// Geometry of the control windows.
    pub control: Control,
    /// Bytes of the largest pool.
    pub pool_bytes: u64,
    /// `calls[call][rank]`.
    pub calls: Vec<Vec<Part>>,
}

impl Story {
    /// Unrolls a script.
    ///
    /// # Errors
    /// A routing that cannot be placed; [`PlanError::BadParameter`] for a handle or a set of routings that does not
    /// exist, or if nodes and experts are of groups of different size.
    pub fn tell(script: &Script) -> Result<Story, PlanError> {
        tell::tell(script)
    }

    /// Number of operations.
    pub fn operations(&self) -> usize {
        self.calls.iter().flatten().flat_map(|part| &part.scenes).map(|scene| scene.steps.len()).sum()
    }

    /// The parts of one rank, call after call.
    pub fn parts_of(&self, rank: u32) -> impl Iterator<Item = &Part> {
        self.calls.iter().map(move |call| &call[rank as usize])
    }
}

impl Part {
    /// The operands, as an executor would see them.
    pub fn operands(&self) -> Operands<'_> {
        let layout = &*self.layout;
        Operands {
            table: &self.tables.table,
            spans: &self.tables.spans,
            runs: &layout.runs,
            rows: &layout.rows,
            row_bytes: self.row_bytes,
            sum: Sum {
                terms: &layout.terms,
                starts: &layout.term_starts,
                choices: &layout.choices,
                groups: &layout.groups,
                group_starts: &layout.group_starts,
                held_by: &layout.held_by,
                bases: &self.tables.bases,
                chunk_rows: &layout.chunk_rows,
                weights: &[],
            },
            tags: &self.tables.tags,
            call: self.calls.value(),
            last_return: self.calls.last_return(),
        }
    }
}
