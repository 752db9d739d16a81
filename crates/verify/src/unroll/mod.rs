//! An *unrolled program*: the operations of a whole group over consecutive calls, built from the
//! functions that the real calls use.
//!
//! ```text
//!   scenario: nodes, route, experts, routings, calls
//!      |  Sorted, Counts, Layout, Forward, Caller, Relay, Calls, fill     the same code as in a real call
//!      v
//!   calls[call][actor] = scenes:   touches | steps  ->  touches | steps  -> ...  -> touches
//!                                  ^ planner, caller     ^ a join of all tracks lies between two scenes
//! ```
//!
//! *Touches* are the reads and writes of the planner and the caller in the windows between two
//! stages. No executor runs them, but the write grants protect them, so `prove` orders them like
//! any other access.
//!
//! A scenario of dispatches by all-gather unrolls the calls of the instance that gathers. Behind
//! each one every rank copies its own rows to their places. That copy is a call of its own here.
//!
//! An *actor* runs by itself. It is a rank or, where its relay is [offloaded](Relays::Thread), the
//! rank's own program or its relay's, which interact only through flags. Of a rank whose host runs
//! ahead of a device, actors are the host, the caller's stream and the stream of copies. Slots on
//! [streams](StreamScenario) have unrolled programs of their own kind, where an actor is a stream.

mod call_sequence;
mod collective;
mod dispatch_actor;
mod host_access;
mod instances;
mod messages;
mod return_actor;
mod slot_streams;
mod stage_runs;

use std::fmt;
use std::rc::Rc;

use call_sequence::FilledOperands;
use sidelane_core::error::{CallKind, PlanError};
use sidelane_core::gate::Routing;
use sidelane_core::plan::{ExpertMap, ReceiveMode, RowLayout, RowMetadata, Strategy, SumOrder};
use sidelane_core::schedule::stream_program::Slots;
use sidelane_core::schedule::{ControlLayout, FlagValue, Op, Operands, ReturnParts, TrackOp, WindowId};
use sidelane_core::topology::{NodeMap, Route};

use crate::mutate::{CallMutation, ProgramId};

pub use collective::{CollectiveBug, CollectiveCall, CollectiveScenario};
pub use instances::{InstanceBug, InstanceScenario, Turn};
pub use messages::{MessageBug, MessageCall, MessageScenario};
pub use sidelane_core::schedule::call_program::Relays;
pub use sidelane_core::schedule::{Bytes, Effect};
pub use slot_streams::{Refusals, RefusedCall, StreamBug, StreamCall, StreamScenario, Streams};

/// The calls of a group.
#[derive(Clone, Debug)]
pub struct ProofScenario<'a> {
    /// Which ranks share memory.
    pub nodes: &'a NodeMap,
    /// How rows reach other nodes.
    pub route: Route,
    /// In how many parts a block goes to its relay.
    pub chunks: u8,
    /// Where relays run.
    pub relays: Relays,
    /// Where experts live.
    pub map: &'a ExpertMap,
    /// Segments start at multiples of this many rows.
    pub align: u32,
    /// Order of sums.
    pub order: SumOrder,
    /// In which order a rank sees its rows.
    pub layout: RowLayout,
    /// Rows cross in relay order, and relays copy them in spans: rank-major, over [`Route::Pxn`].
    pub spans: bool,
    /// Every row goes to every rank, in as many segments as a rank has experts. Of the routings
    /// only the number of tokens counts, and whether they travel along.
    pub gathers: bool,
    /// How dispatches go out. By all-gather, the calls are dispatches of an instance that gathers
    /// for the one of this scenario, and the copies of every rank behind each are a call of the
    /// unrolled program.
    pub strategy: Strategy,
    /// Copy engines move rows within nodes, and nets reach only the host staging of the pools.
    /// Engines also read the memory that a return offers; they cannot add, so the rows return
    /// first.
    pub pulls: bool,
    /// With `pulls`: nets reach the pools themselves, and the only host memory is the planners'
    /// scratch.
    pub gpu_direct: bool,
    /// With `pulls`: callers' threads enqueue, and run ahead of their streams. These are actors of
    /// their own.
    pub enqueues: bool,
    /// With `enqueues`, where there are several nodes: peers have read what the return before
    /// offered when a host looks for memory for the next one, so it takes the same again. Else it
    /// takes other memory, and has that of the return before when the release has waited for them.
    pub read_early: bool,
    /// With `enqueues`: the host plans dispatches also where the device could, as under a mask.
    pub host_plans: bool,
    /// With `enqueues`: where the tokens of dispatches lie.
    pub tokens: TokenPlace,
    /// How much a rank receives; what does not fit is dropped.
    pub mode: ReceiveMode,
    /// Bytes of one row: a multiple of 16.
    pub row_bytes: u64,
    /// Routings that dispatches choose from: `[set][rank]`.
    pub routings: &'a [Vec<Routing<'a>>],
    /// The calls.
    pub calls: &'a [Call],
    /// Ranks whose programs are unrolled; `None`: all ranks. The others are assumed to follow their
    /// programs: they put the bytes that their programs name, where and in the call in which they
    /// name them, and raise the flags that they are to raise. A wait for them gives no knowledge,
    /// so a proof of a sample holds in the group. Three whole nodes of equal ones show every kind
    /// of conflict: two accesses lie in the memory of one node, and are made by ranks of two others
    /// at most.
    pub sample: Option<&'a [u32]>,
    /// A rule that the planner breaks: `None`, except to see that `prove` notices.
    pub seeded: Option<SeededBug>,
    /// A bug in one of the programs of each rank, for the same reason.
    pub mutation: Option<(ProgramId, CallMutation)>,
}

impl<'s> ProofScenario<'s> {
    /// Row metadata.
    fn metadata(&self) -> RowMetadata {
        match (self.gathers, self.rank_sums()) {
            (true, _) => RowMetadata::Gathered,
            (_, true) => RowMetadata::Summed,
            _ => RowMetadata::of(self.layout, self.mode, self.spans),
        }
    }

    /// Whether streams sum a token's rows at each rank before they return.
    fn rank_sums(&self) -> bool {
        let rows = !self.gathers && !self.layout.is_per_rank();
        self.enqueues && rows && self.order == SumOrder::Rank
    }

    /// Whether relays sum by kernels what engines have pulled to them.
    fn node_sums(&self) -> bool {
        self.enqueues && !self.gathers && self.order == SumOrder::Node
    }

    /// The scenario of the instance that gathers for this one: an expert at each rank.
    fn gathering(&self, map: &'s ExpertMap) -> ProofScenario<'s> {
        ProofScenario {
            gathers: true,
            map,
            align: 1,
            order: SumOrder::default(),
            layout: RowLayout::default(),
            mode: ReceiveMode::Exact,
            spans: false,
            ..self.clone()
        }
    }
}

/// Where tokens lie whose dispatch a caller's thread enqueues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenPlace {
    /// Elsewhere than in the device heap: they are packed as soon as their order is known.
    #[default]
    Elsewhere,
    /// In the device heap, those for each place one behind the other: they go as they lie.
    InRuns,
    /// In the device heap, scattered. That is known when rows have places, and then they are
    /// packed.
    Scattered,
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
        /// Returned rows.
        parts: ReturnParts,
        /// Whether the rows are a tensor of the caller that is copied into the pool during the
        /// call.
        copied: bool,
    },
    /// A dispatch whose input some rank refuses: every rank leaves when it has read the counts of
    /// all.
    RefusedDispatch {
        /// Which set of routings.
        routing: usize,
    },
    /// A dispatch by all-gather without room for the rows of some rank: every rank leaves when it
    /// has sorted the choices of all.
    RefusedRegroup {
        /// Which set of routings.
        routing: usize,
    },
    /// A dispatch along a known layout whose input some rank refuses: every rank leaves when it has
    /// read the tags.
    RefusedCached {
        /// The handle.
        handle: usize,
    },
    /// A return whose input some rank refuses: every rank leaves when it has read the tags.
    RefusedReturn {
        /// The handle.
        handle: usize,
    },
    /// Ranks agree on something, and nothing moves.
    Agree,
    /// Ranks disagree: rank 0 enters a return, the others a dispatch. Every rank leaves when it has
    /// read the tags.
    Mixed {
        /// Which set of routings.
        routing: usize,
        /// The handle; its rows are not kept.
        handle: usize,
    },
}

/// Rules of memory that a planner could break. The schedule's own mutations are in
/// [`mutate`](crate::mutate).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeededBug {
    /// The chunk of a return is free again when the return ends, not when its readers have said so.
    FreeBeforeAck,
    /// The announced extent is taken from rows that the caller still holds.
    AnnounceHeld,
    /// A host that runs ahead takes memory that its stream has yet to read.
    TakeUnread,
    /// A host that runs ahead takes its own dispatch context for that of its peers.
    OwnContext,
    /// A host that runs ahead gives peers the outputs back that its NIC may still be reading.
    ReadUnsettled,
    /// A host that runs ahead ends a call, behind which its caller writes where its NIC may still
    /// be reading.
    EndUnsettled,
    /// Room is asked for the rows that land, and not for the blocks that are taken behind them.
    StageUnasked,
    /// A relay takes the blocks of all its sources in one place.
    ShareStaging,
    /// All relays return rows to one place.
    ShareReturned,
    /// Sums wait to be sent where others return rows.
    ShareOutbox,
    /// A kernel makes sums by rank when peers may be pulling them already.
    SumLate,
    /// A kernel makes sums for other nodes over the rows that it adds up.
    SumOverRows,
    /// Publications are not doubled.
    OnePublication,
    /// Messages are not doubled.
    OneMessage,
    /// Headers are not doubled.
    OneHeader,
    /// Publications are doubled by the parity of the dispatch, which ranks with another call do not
    /// count.
    CountDispatches,
    /// Tags are not doubled.
    OneTag,
}

impl SeededBug {
    /// All of them.
    pub const ALL: [SeededBug; 17] = [
        SeededBug::FreeBeforeAck,
        SeededBug::AnnounceHeld,
        SeededBug::TakeUnread,
        SeededBug::OwnContext,
        SeededBug::ReadUnsettled,
        SeededBug::EndUnsettled,
        SeededBug::StageUnasked,
        SeededBug::ShareStaging,
        SeededBug::ShareReturned,
        SeededBug::ShareOutbox,
        SeededBug::SumLate,
        SeededBug::SumOverRows,
        SeededBug::OnePublication,
        SeededBug::OneMessage,
        SeededBug::OneHeader,
        SeededBug::CountDispatches,
        SeededBug::OneTag,
    ];
}

/// A read or write by the planner or the caller, between two stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAccess {
    /// Bytes that are read or written.
    pub what: &'static str,
    /// Where.
    pub bytes: Bytes,
    /// Whether it is written.
    pub write: bool,
    /// The call whose bytes are written, or must be seen.
    pub of: usize,
}

/// One operation, its generation resolved to a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnrolledOp {
    /// Number of the operation in its unrolled program, which it keeps in the mutants of that.
    pub id: u32,
    /// Its track.
    pub track: u32,
    /// Of which set of flags its word is: 0, but for microbatches on streams, for instances, and
    /// for words between a host and its streams.
    pub set: u32,
    /// The operation.
    pub op: Op,
    /// Value of a Signal or Wait, which tells its call from all others; 0 for other operations.
    pub value: u64,
}

impl UnrolledOp {
    /// An operation of a track in a call with these operands.
    fn of(item: &TrackOp, operands: &Operands) -> Self {
        let value = match item.op {
            Op::Signal { level, .. } | Op::Wait { level, .. } => operands.value(level),
            _ => 0,
        };
        UnrolledOp { id: 0, track: item.track, set: 0, op: item.op, value }
    }

    /// The value as the word itself sees it: a constant, where words do not grow.
    pub fn in_memory(&self) -> u64 {
        match self.op {
            Op::Signal { level: FlagValue::Reset, .. } => 0,
            Op::Signal { level: FlagValue::Credit, .. } | Op::Wait { level: FlagValue::Credit, .. } => 1,
            _ => self.value,
        }
    }

    /// Whether it sets a word of its own rank back.
    pub fn sets_back(&self) -> bool {
        matches!(self.op, Op::Signal { level: FlagValue::Reset, .. })
    }
}

/// A stage, or half of one, with what happens before it.
#[derive(Clone, Debug)]
pub struct StageRun {
    /// Name of the stage; "end" after the last.
    pub name: &'static str,
    /// Position in the stage of the first operation.
    pub first: usize,
    /// Whether lanes have read, before it begins, what was put before. Else they may read on: until
    /// the next scene of this actor that is.
    pub settled: bool,
    /// Accesses of planner and caller before the operations, in this order.
    pub touches: Vec<HostAccess>,
    /// The operations, in launch order.
    pub steps: Vec<UnrolledOp>,
    filled: Rc<dyn Effects>,
}

/// Relation of an actor to its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The rank itself, with all steps that no other actor runs for it.
    Own,
    /// Its relayed operations, in a thread of their own.
    Relay,
    /// Its caller's stream, where another one has the transfers.
    Caller,
    /// Its transfers, on a stream of their own.
    Transfers,
}

/// Work of one actor in one call.
#[derive(Clone, Debug)]
pub struct ActorCall {
    /// The rank.
    pub rank: u32,
    /// The actor of the rank.
    pub role: Role,
    /// Position of the call in the unrolled program.
    pub call: usize,
    /// The rank's call.
    pub kind: CallKind,
    /// The stages, and a last scene without operations.
    pub scenes: Vec<StageRun>,
}

/// A scenario, unrolled.
#[derive(Clone, Debug)]
pub struct UnrolledProgram {
    /// Number of ranks of the group.
    pub ranks: u32,
    /// Number of actors: those of the unrolled ranks, then those of their relays, if these have
    /// threads, or of their streams. For unrolled streams: see [`Streams`].
    pub actors: u32,
    /// Bytes of the control windows.
    pub control_bytes: u64,
    /// Bytes of the largest pool.
    pub pool_bytes: u64,
    /// `calls[call][actor]`, shared with mutants.
    pub calls: Vec<Vec<Rc<ActorCall>>>,
    /// Writes of assumed ranks.
    pub assumed: Vec<Assumed>,
}

/// Bytes that a rank outside the sample is taken to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assumed {
    /// In which call.
    pub call: usize,
    /// Which bytes of a rank in the sample.
    pub bytes: Bytes,
}

impl UnrolledProgram {
    /// Unrolls a scenario.
    ///
    /// # Errors
    /// A routing that cannot be placed; [`PlanError::BadParameter`] for a handle or a set of
    /// routings that does not exist, or if nodes and experts are of groups of different size.
    pub fn unroll(scenario: &ProofScenario) -> Result<UnrolledProgram, PlanError> {
        call_sequence::unroll(scenario)
    }

    /// Unrolls a scenario of slots on streams.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] for a microbatch whose dispatch is not followed by a combine or
    /// release, and for nodes of another number of ranks.
    pub fn of_streams(scenario: &StreamScenario) -> Result<UnrolledProgram, PlanError> {
        slot_streams::unroll(scenario)
    }

    /// Unrolls rounds of collectives.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] for a round that does not fit its places, and for nodes of
    /// another number of ranks.
    pub fn of_collectives(scenario: &CollectiveScenario) -> Result<UnrolledProgram, PlanError> {
        collective::unroll(scenario)
    }

    /// Unrolls messages between ranks.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] unless there is a list of calls for each rank that has places.
    pub fn of_messages(scenario: &MessageScenario) -> Result<UnrolledProgram, PlanError> {
        messages::unroll(scenario)
    }

    /// Unrolls calls of several instances on one device.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] unless the turns make each call of each instance once, and split
    /// returns alone whose streams say that they are ready.
    pub fn of_instances(scenario: &InstanceScenario) -> Result<UnrolledProgram, PlanError> {
        instances::unroll(scenario)
    }

    /// Operations that ranks enqueue on streams, each in an order of its own, one stream for each
    /// microbatch. Input for [`ends`](crate::prove::ends), since it names no moved bytes.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] if there are more orders than ranks.
    pub fn of_queues(slots: Slots, orders: &[Vec<StreamCall>]) -> Result<UnrolledProgram, PlanError> {
        slot_streams::fold(slots, orders)
    }

    /// Number of operations.
    pub fn operations(&self) -> usize {
        self.calls.iter().flatten().flat_map(|part| &part.scenes).map(|scene| scene.steps.len()).sum()
    }

    /// The parts of one actor, call after call.
    pub fn parts_of(&self, actor: u32) -> impl Iterator<Item = &ActorCall> {
        self.calls.iter().map(move |call| &*call[actor as usize])
    }

    /// The parts of all actors in all calls, to change them. Clones keep theirs.
    pub fn parts_mut(&mut self) -> impl Iterator<Item = &mut ActorCall> {
        self.calls.iter_mut().flatten().map(Rc::make_mut)
    }

    /// The part of an actor in a call, to change it. Clones keep theirs.
    pub fn part_mut(&mut self, call: usize, actor: u32) -> &mut ActorCall {
        Rc::make_mut(&mut self.calls[call][actor as usize])
    }
}

/// Numbers all operations of `calls[call][actor]`: actor by actor, each in its order.
fn numbered(mut calls: Vec<Vec<ActorCall>>) -> Vec<Vec<Rc<ActorCall>>> {
    let mut ids = 0..;
    for actor in 0..calls.first().map_or(0, Vec::len) {
        let scenes = calls.iter_mut().flat_map(|call| &mut call[actor].scenes);
        scenes.flat_map(|scene| &mut scene.steps).zip(&mut ids).for_each(|(step, id)| step.id = id);
    }
    calls.into_iter().map(|call| call.into_iter().map(Rc::new).collect()).collect()
}

/// Operands of a scene.
pub(super) trait Effects: fmt::Debug {
    /// Effect of a step, besides raising or awaiting a flag that grows.
    fn effects(&self, step: &UnrolledOp) -> Vec<Effect>;

    /// The call that wrote what puts read from windows; `None`: their own.
    fn sources_of(&self) -> Option<usize> {
        None
    }

    /// The call whose bytes puts write; `None`: that in which the actor runs them.
    fn targets_of(&self) -> Option<usize> {
        None
    }
}

impl StageRun {
    /// Effects of `step`, besides raising or awaiting a flag that grows.
    pub fn effects(&self, step: &UnrolledOp) -> Vec<Effect> {
        self.filled.effects(step)
    }

    /// The call that wrote what puts read from windows; `None`: their own.
    pub fn sources_of(&self) -> Option<usize> {
        self.filled.sources_of()
    }

    /// The call whose bytes puts write; `None`: that in which the actor runs them.
    pub fn targets_of(&self) -> Option<usize> {
        self.filled.targets_of()
    }

    /// Whether the operands of another stage are the very same.
    pub(crate) fn has_operands_of(&self, other: &StageRun) -> bool {
        Rc::ptr_eq(&self.filled, &other.filled)
    }
}

impl Effects for FilledOperands {
    fn effects(&self, step: &UnrolledOp) -> Vec<Effect> {
        let operands = self.operands();
        match step.op {
            Op::Put { to, operand } | Op::PutRows { to, operand } => operands.puts(to, operand),
            Op::Signal { to, of, flag, level } => {
                let at = ControlLayout::tag(of, flag, self.ranks, self.tag_parity);
                let tag = operands.tag(to, flag, level);
                tag.map(|_| Effect::Tag(Bytes::new(to, WindowId::CONTROL, at, ControlLayout::TAG_BYTES)))
                    .into_iter()
                    .collect()
            }
            Op::Reduce { operand } => operands.sums(operand, (self.rank, self.partial_bytes)),
            Op::Wait { .. } => Vec::new(),
        }
    }

    fn sources_of(&self) -> Option<usize> {
        self.sources_of
    }
}
