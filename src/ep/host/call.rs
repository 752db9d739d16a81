//! One call on the host: its state, and what each step of its program is to this rank.
//!
//! ```text
//!   EpState, RankPrograms     never change
//!   Workspace                 memory and counters that calls use again, one after the other
//!   Flight                    one call, from its first step to its last
//!   Lent                      tensors that the caller lends for one half
//!         |
//!   HostCall                  borrows all four; drive() asks it to perform each step
//! ```
//!
//! The order of steps stands in [`schedule::call_program`](crate::schedule::call_program), and
//! nowhere here.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_queue::ArrayQueue;

use super::host_results::{HostHandle, HostInput, Inner, RetainedBuffer, check_tensor};
use super::relay_thread::{HostRelay, RelayRunner};
use crate::ep::call_agreement::GroupCounts;
use crate::ep::relay::{CallPlan, RelayCall, RelayTask};
use crate::ep::report::LaneUse;
use crate::ep::state::EpState;
use crate::error::{CallError, CallKind, Error, MemoryError, PlanError};
use crate::exec::{HostStepper, StepExecutor, TransferCounts};
use crate::gate::Routing;
use crate::lane::{Io, Port};
use crate::memory::{Extent, Pool, ReleaseCheck};
use crate::plan::{
    Block, ExpertMap, InterNodeRows, Overflow, PlanContext, RelayPlan, RelaySorter, SortedRouting, Traffic,
};
use crate::rows::Stores;
use crate::schedule::call_program::{Part, RankPrograms, Role, StageId, StageOperands, StageTensor, Work};
use crate::schedule::{
    CallerTables, Calls, Flag, Operands, Refusal, RelayTables, ReturnParts, SumMemory, SumOperands, Tag,
    WindowId,
};
use crate::world::SymmetricRange;

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
pub(in crate::ep) struct CallTensors<'l> {
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

/// Handles whose memory is kept for the next dispatches.
const SPARE_HANDLES: usize = 64;

/// Called once all ranks have agreed on a call.
type OnAgreed = Box<dyn FnOnce() + Send + Sync>;

/// Memory that the calls of one instance use again.
pub(in crate::ep) struct Workspace {
    pub host: HostStepper,
    /// Does this rank's part for other nodes; there is none where there is only one.
    pub relay: Option<RelayRunner>,
    pub tables: CallerTables,
    pub sorted: SortedRouting,
    pub crossing: InterNodeRows,
    pub spans: RelaySorter,
    pub numbers: GroupCounts,
    /// The lanes, and how many ranks each reaches.
    pub lane_use: Arc<[LaneUse]>,
    /// Weight gradients.
    pub products: Vec<f32>,
    pub calls: Calls,
    pub release: Arc<dyn ReleaseCheck>,
    /// Number that distinguishes handles of different instances within this process.
    pub instance: u64,
    pub spare: Arc<ArrayQueue<Inner>>,
    /// Hears that the running call is agreed on.
    pub on_agreed: Option<OnAgreed>,
}

impl Workspace {
    pub fn new(fixed: &Arc<EpState>, range: SymmetricRange) -> Self {
        static INSTANCES: AtomicU64 = AtomicU64::new(0);
        let paths = fixed.paths();
        let readers = paths.local_peers().collect();
        Workspace {
            host: HostStepper::new(fixed.spec.dtype, fixed.shared.recorder.clone()),
            relay: paths.is_multi_node().then(|| Self::runner(fixed)),
            tables: CallerTables::new(paths, Block::CHUNKS),
            sorted: SortedRouting::default(),
            crossing: InterNodeRows::default(),
            spans: RelaySorter::default(),
            numbers: GroupCounts::new(fixed),
            lane_use: LaneUse::of(&fixed.lanes).into(),
            products: Vec::new(),
            calls: Calls::new(fixed.shared.hub.epoch()),
            release: Arc::new(Readers { port: Arc::clone(&fixed.port), readers, _range: range }),
            // Relaxed: numbers only differ.
            instance: INSTANCES.fetch_add(1, Ordering::Relaxed),
            spare: Arc::new(ArrayQueue::new(SPARE_HANDLES)),
            on_agreed: None,
        }
    }

    fn runner(fixed: &Arc<EpState>) -> RelayRunner {
        let host = HostStepper::new(fixed.spec.dtype, fixed.shared.recorder.clone());
        RelayRunner::new(HostRelay::new(fixed, host))
    }

    /// Goes on with other fixed state.
    pub fn adopt(&mut self, fixed: &Arc<EpState>) {
        self.numbers = GroupCounts::new(fixed);
        self.relay = self.relay.is_some().then(|| Self::runner(fixed));
    }

    /// Waits until an offloaded relay has finished; what it brings back.
    pub fn join_relay(&mut self) -> Option<(RelayTask, Arc<RelayPlan>)> {
        self.relay.as_mut()?.join()
    }

    /// Memory of an old handle, or new memory.
    pub fn spare_handle(&self) -> Inner {
        self.spare.pop().unwrap_or_default()
    }

    pub fn handle_of(&self, inner: Inner, pool: &Arc<Pool>) -> HostHandle {
        HostHandle::new(inner, Arc::clone(pool), Arc::clone(&self.spare), Arc::clone(&self.lane_use))
    }

    /// Gives a chunk that peers were offered in the running call back to the pool, once they have
    /// read it.
    pub fn retire(&self, chunk: Extent, pool: &Pool) {
        pool.retire(chunk, &self.release, self.calls.value());
    }
}

/// The words by which local peers say that they have read what this rank offered.
struct Readers {
    port: Arc<Port>,
    readers: Vec<u32>,
    /// The control window outlives the instance until its last readers have finished.
    _range: SymmetricRange,
}

impl ReleaseCheck for Readers {
    fn is_released(&self, value: u64) -> bool {
        let lanes = self.port.lanes();
        // A rank that has left reads nothing any more, and signals nothing.
        let gone = |reader: u32| lanes.health.is_absent(lanes.world_ranks[reader as usize]);
        let read = |reader| self.port.flag(reader, Flag::Read).is_ok_and(|flag| flag.value() >= value);
        self.readers.iter().all(|&reader| read(reader) || gone(reader))
    }
}

/// A call amid its steps: the instance it is made on, what it owns, and what the caller lends it
/// for this half.
pub(super) struct HostCall<'e, 'l> {
    pub fixed: &'e mut Arc<EpState>,
    pub programs: &'e Arc<RankPrograms>,
    pub space: &'e mut Workspace,
    pub flight: &'e mut Flight,
    pub lent: CallTensors<'l>,
}

impl StepExecutor for HostCall<'_, '_> {
    fn run(&mut self, role: Role, stage: StageId, part: Part) -> Result<(), Error> {
        match role {
            Role::Own => self.run_own(stage, part),
            Role::Relay => self.run_relay(stage),
        }
    }

    fn compute(&mut self, role: Role, work: Work) -> Result<(), Error> {
        if role == Role::Relay {
            return self.with_relay(|relay| relay.compute(Role::Relay, work));
        }
        match work {
            Work::Sort => self.sort(),
            Work::Publish => self.publish()?,
            Work::Announce => self.announce(),
            Work::Take => self.take(),
            Work::Offer => self.offer(),
            Work::Propose => self.propose(),
            Work::StartRelay => self.start_relay()?,
            Work::Judge => {
                let agreement = self.fixed.agreement(self.space.calls, self.flight.kind());
                agreement.judge(&mut self.space.numbers)?;
            }
            Work::Place => self.place(),
            Work::Describe => {
                let layout = &self.flight.made.layout;
                self.fixed.describe_blocks(self.space.calls, layout, &self.space.sorted)?;
            }
            Work::TellAgreed => {
                if let Some(agreed) = self.space.on_agreed.take() {
                    agreed();
                }
            }
            Work::Landings => self.landings()?,
            Work::Bases => self.bases()?,
            Work::FillRows => self.fill_rows(),
            Work::FillSum => self.fill_sum(),
            Work::JoinRelay => self.join_relay(),
            Work::Report => self.report(),
            Work::Metadata => self.metadata()?,
            Work::Retire => self.retire(),
            Work::Adopt => self.adopt(),
            _ => return Err(CallError::unknown_step(self.flight.kind(), &work).into()),
        }
        Ok(())
    }

    fn agree(&mut self, _: Role) -> Result<(), Error> {
        let (calls, tag) = (self.space.calls, self.flight.tag);
        let refused = self.flight.refused.take();
        let verdict = self.fixed.agreement(calls, tag.kind).agree(tag, refused);
        self.unless_refused(verdict)
    }

    fn admit(&mut self, _: Role) -> Result<(), Error> {
        let agreement = self.fixed.agreement(self.space.calls, self.flight.kind());
        let verdict = agreement.check_space(self.flight.tag, &mut self.space.numbers);
        self.unless_refused(verdict)
    }
}

impl HostCall<'_, '_> {
    /// Gives back what this rank brought into a call that is refused.
    fn unless_refused(&mut self, verdict: Result<(), Error>) -> Result<(), Error> {
        if verdict.is_err() {
            self.flight.landing = None;
            if let (Some(offer), Some(handle)) = (self.flight.offer.take(), self.lent.handle) {
                handle.inner().give_back_chunk(offer.chunk);
            }
        }
        verdict
    }

    fn run_own(&mut self, stage: StageId, part: Part) -> Result<(), Error> {
        let Workspace { host, tables, sorted, calls, .. } = &mut *self.space;
        let inner = self.lent.handle.map_or(&self.flight.made, |handle| handle.inner());
        let (mut io, mut layout, mut stores) = (Io::default(), None, Stores::Cached);
        let tensor = stage.tensor();
        if tensor != StageTensor::None {
            (layout, stores) = (Some(inner), self.flight.stores);
        }
        match tensor {
            StageTensor::Rows if part == Part::Start => {
                io = Io { input: self.lent.input, metadata: bytemuck::cast_slice(&sorted.metadata), ..io };
            }
            StageTensor::Sums => io = self.lent.output.take().unwrap_or_default(),
            StageTensor::Rows | StageTensor::None => {}
        }
        let weighted = self.flight.weighted;
        let operands = Operands {
            runs: layout.map_or(&[], |inner| &inner.layout.runs),
            rows: layout.map_or(&[], |inner| &inner.layout.rows),
            sum: layout.map_or(SumOperands::default(), |inner| inner.sum(&tables.bases, weighted)),
            ..tables.operands(*calls, self.fixed.spec.row_bytes())
        };
        host.run(&self.fixed.port, self.programs.stages.items(stage, part), &operands, &mut io, stores)
    }

    fn run_relay(&mut self, stage: StageId) -> Result<(), Error> {
        self.with_relay(|relay| relay.run(Role::Relay, stage, Part::Whole))?;
        let moved = self.take_relayed();
        // Rows are what counts, and not the messages before them.
        if let (StageOperands::Relayed, Some(task)) = (stage.operands(), &mut self.flight.task) {
            task.moved += moved;
        }
        Ok(())
    }

    /// Counts of what the relay has moved here since the last call of this function.
    fn take_relayed(&mut self) -> TransferCounts {
        let relay = self.space.relay.as_mut().and_then(|relay| relay.here());
        relay.map_or(TransferCounts::default(), |relay| relay.take_counts())
    }

    /// Has the relay, which is here, perform a step of this call.
    fn with_relay(
        &mut self,
        step: impl FnOnce(&mut RelayCall<'_, '_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if self.flight.task.is_none() {
            self.flight.task = Some(self.task());
        }
        let Flight { task, made, tag, .. } = &mut *self.flight;
        let relay = self.space.relay.as_mut().and_then(|relay| relay.here());
        let (Some(relay), Some(task)) = (relay, task) else { return Ok(()) };
        // A return without a handle is refused before its blocks matter.
        let none = RelayPlan::default();
        let plan = match tag.kind.places() {
            true => CallPlan::Own(Arc::make_mut(made.forward.get_or_insert_default())),
            false => CallPlan::Known(known(self.lent.handle).map_or(&none, |plan| plan)),
        };
        relay.step(self.programs, (task, plan), step)
    }

    /// The part of this rank's relay in this call.
    fn task(&self) -> RelayTask {
        let flight = &*self.flight;
        // Only a rank that offers has checked that the handle is one of this instance.
        let offer = flight.offer.as_ref().zip(self.lent.handle);
        let outbox = offer.map_or(0, |(offer, handle)| {
            let returned = CallerTables::return_bytes(&self.fixed.paths(), &handle.inner().layout);
            offer.staging.offset() + returned
        });
        RelayTask {
            parts: flight.parts,
            weighted: flight.weighted && flight.parts.rows,
            memory: SumMemory { outbox, pulled: None },
            stores: flight.stores,
            ..RelayTask::new(self.space.calls, flight.kind())
        }
    }

    fn start_relay(&mut self) -> Result<(), Error> {
        let task = self.task();
        let Some(relay) = &mut self.space.relay else { return Ok(()) };
        // The thread outlives every borrow of this call, so the relay's blocks go there and back.
        let plan = match self.flight.kind().places() {
            true => self.flight.made.forward.take(),
            false => known(self.lent.handle).cloned(),
        };
        relay.send((task, plan.unwrap_or_default()), self.fixed, self.programs)
    }

    fn join_relay(&mut self) {
        let Some((task, plan)) = self.space.join_relay() else { return };
        if task.kind.places() {
            self.flight.made.forward = Some(plan);
        }
        self.flight.task = Some(task);
    }

    /// Sets the tag that goes out with the entries: one that refuses, if this rank does.
    fn say(&mut self, tag: Tag) {
        self.flight.tag = match &self.flight.refused {
            None => tag,
            Some(error) => refusing(tag, error),
        };
        self.space.tables.clear();
        self.space.tables.tags.fill(self.flight.tag);
    }

    fn sort(&mut self) {
        let (fixed, sorted) = (&**self.fixed, &mut self.space.sorted);
        if self.flight.refused.is_none() {
            let (routing, tokens) = (self.lent.routing, self.lent.tokens);
            self.flight.refuse(match (fixed.spec.gathers, routing) {
                (false, Some(routing)) => sort(fixed, sorted, routing),
                _ => {
                    sorted.fill_gathered(&fixed.bins, fixed.lanes.rank, tokens, routing);
                    Ok(())
                }
            });
        }
        if self.flight.refused.is_some() {
            sorted.clear(&fixed.bins);
        }
        let row_bytes = fixed.sizing(self.flight.kind()).row_bytes;
        self.flight.stores = fixed.stores(sorted.entries() as u64 * row_bytes);
    }

    /// Publishes this rank's counts for every bin, and for every rank that relays. With fixed slots
    /// no rank reads them.
    fn publish(&mut self) -> Result<(), MemoryError> {
        let EpState { port, control, bins, spec, .. } = &**self.fixed;
        let Workspace { crossing, sorted, numbers, calls, .. } = &mut *self.space;
        let paths = self.fixed.paths();
        crossing.fill(bins, &paths, sorted);
        if spec.mode.slots().is_some() {
            return Ok(());
        }
        let words = &mut numbers.scratch;
        words.clone_from(&sorted.counts);
        crossing.staged(&paths, words);
        port.write(WindowId::CONTROL, control.publication(calls.parity()), words)
    }

    fn announce(&mut self) {
        let free = self.flight.refused.is_none().then(|| self.fixed.pool().announce(self.flight.most));
        let (base, handle) = free.as_ref().map_or((0, 0), |extent| (extent.offset(), extent.len()));
        self.flight.landing = free;
        self.flight.made = self.space.spare_handle();
        self.say(Tag { base, handle, ..self.flight.tag });
    }

    fn take(&mut self) {
        let (fixed, Some(handle)) = (&**self.fixed, self.lent.handle) else {
            return self.say(self.flight.tag);
        };
        let (inner, sizing) = (handle.inner(), fixed.sizing(self.flight.kind()));
        if self.flight.refused.is_none() {
            let bytes = sizing.extent_bytes(inner.layout.landed, inner.layout.staged);
            match fixed.pool().alloc(bytes) {
                Ok(extent) => self.flight.landing = Some(extent.announced()),
                Err(error) => self.flight.refuse(Err(error)),
            }
        }
        let base = self.flight.landing.as_ref().map_or(0, Extent::offset);
        self.flight.stores = fixed.stores(inner.layout.terms.len() as u64 * sizing.row_bytes);
        self.say(Tag { handle: inner.number, base, ..self.flight.tag });
    }

    fn offer(&mut self) {
        // Without a handle the call is refused, and its entry says so.
        let Some(handle) = self.lent.handle else { return self.say(self.flight.tag) };
        let inner = handle.inner();
        if let Some(rows) = self.lent.rows.take() {
            match &self.flight.refused {
                // The caller finds the buffer in the handle, for any result of the call.
                Some(_) => inner.give_back(rows),
                None => match self.brought(handle, rows) {
                    Ok(offer) => self.flight.offer = Some(offer),
                    Err(error) => self.flight.refused = Some(error),
                },
            }
        }
        self.say(Tag { handle: inner.number, ..self.flight.tag });
        if let Some(offer) = &self.flight.offer {
            let (paths, tables) = (self.fixed.paths(), &mut self.space.tables);
            tables.stage(&paths, &inner.layout, offer.staging.offset());
            tables.offer(&paths, self.flight.tag, offer.chunk.offset());
        }
    }

    /// Memory that this rank offers for the rows that the caller brings.
    fn brought(&self, handle: &HostHandle, rows: HostInput<'_>) -> Result<Offer, Error> {
        let chunk = self.chunk(handle, rows)?;
        match self.staging(handle.inner()) {
            Ok(staging) => Ok(Offer { chunk, staging }),
            Err(error) => {
                handle.inner().give_back_chunk(chunk);
                Err(error)
            }
        }
    }

    /// The caller's buffer, the output that the handle keeps, or a copy of rows elsewhere.
    fn chunk(&self, handle: &HostHandle, rows: HostInput<'_>) -> Result<Chunk, Error> {
        let (spec, inner) = (&self.fixed.spec, handle.inner());
        let (mut output, copied) = match rows {
            HostInput::Kept => return Ok(Chunk::Kept(inner.kept_output(|kept| kept.extent.offset())?)),
            HostInput::Output(output) if inner.owns(&output) => (output, false),
            HostInput::Output(output) if output.instance != self.space.instance => {
                let (seen, expected) = (output.instance, self.space.instance);
                return Err(CallError::ForeignHandle { seen, expected }.into());
            }
            HostInput::Output(output) => {
                let (seen, expected) = (output.number, inner.number);
                return Err(CallError::WrongOutput { seen, expected }.into());
            }
            HostInput::Elsewhere { bytes, dtype } => {
                check_tensor(
                    "expert outputs",
                    (bytes, dtype),
                    inner.layout.landed,
                    (spec.hidden, spec.dtype),
                )?;
                let mut output = handle.output()?;
                output.rows_mut::<u8>()?.copy_from_slice(bytes);
                inner.copied.store(inner.copied.load() + bytes.len() as u64);
                (output, true)
            }
        };
        if let Some(weights) = self.lent.row_weights {
            output.weights_mut()?.copy_from_slice(weights);
        }
        Ok(if copied { Chunk::Copy(output.extent) } else { Chunk::Output(output.extent) })
    }

    /// One extent for the rows that relays return. Behind them the sums wait that this rank returns
    /// to others.
    fn staging(&self, inner: &Inner) -> Result<Extent, Error> {
        let (fixed, paths) = (&**self.fixed, self.fixed.paths());
        let setting = fixed.agreement(self.space.calls, self.flight.kind()).setting;
        let returned = CallerTables::return_bytes(&paths, &inner.layout);
        let outbox =
            inner.forward.as_deref().map_or(0, |forward| RelayTables::outbox_bytes(&setting, forward));
        fixed.pool().alloc(returned + outbox)
    }

    fn propose(&mut self) {
        let handle = self.lent.map.as_ref().map_or(0, |map| map.digest());
        self.say(Tag { handle, ..self.flight.tag });
    }

    /// From the counts of all to this rank's layout.
    fn place(&mut self) {
        let (fixed, paths) = (&**self.fixed, self.fixed.paths());
        let Workspace { tables, sorted, crossing, spans, numbers, .. } = &mut *self.space;
        let GroupCounts { counts, sizes, landing, .. } = numbers;
        let of_routing = self.lent.routing.map(|routing| (routing.top_k(), routing.weights()));
        let (inner, (top_k, weights)) = (&mut self.flight.made, of_routing.unwrap_or_default());
        tables.landing.clone_from(landing);
        let clipped = fixed.spec.mode.budget().is_some();
        if clipped && sorted.keep(top_k, |bin| sizes.room(&fixed.bins, counts, bin)) {
            crossing.fill(&fixed.bins, &paths, sorted);
        }
        inner.required.clone_from(&sizes.required);
        inner.dropped.clone_from(&sorted.dropped);
        inner.dropped_weight = sorted.dropped_weight(weights);
        let frame = fixed.frame();
        if fixed.spec.coalesce_relays {
            spans.arrange(&frame, (sorted, crossing), counts, sizes);
        }
        inner.layout.fill(&frame, (sorted, crossing), top_k, counts, sizes);
        inner.offer = frame.sizing.offer(inner.layout.landed);
        if let (Some(landing), false) = (&mut self.flight.landing, self.flight.keeps_room) {
            // Before other calls hear that this one goes on: they find the room that it does not
            // need.
            let sizing = fixed.sizing(self.flight.tag.kind);
            landing.trim(sizing.extent_bytes(inner.layout.landed, inner.layout.staged));
        }
    }

    fn landings(&mut self) -> Result<(), Error> {
        let agreement = self.fixed.agreement(self.space.calls, self.flight.kind());
        for (peer, landing) in (0..).zip(&mut self.space.tables.landing) {
            let mine = peer == self.fixed.lanes.rank;
            *landing = if mine { self.flight.tag.base } else { agreement.tag_of(peer)?.base };
        }
        Ok(())
    }

    fn bases(&mut self) -> Result<(), Error> {
        let agreement = self.fixed.agreement(self.space.calls, self.flight.kind());
        let Workspace { tables, host, .. } = &mut *self.space;
        let chunk = self.flight.offer.as_ref().map_or(0, |offer| offer.chunk.offset());
        tables.bases[self.fixed.lanes.rank as usize] = chunk;
        for peer in self.fixed.paths().local_peers() {
            tables.bases[peer as usize] = agreement.tag_of(peer)?.base;
        }
        host.take_counts();
        Ok(())
    }

    fn fill_rows(&mut self) {
        let kind = self.flight.kind();
        let setting = self.fixed.agreement(self.space.calls, kind).setting;
        let inner = self.lent.handle.map_or(&self.flight.made, |handle| handle.inner());
        self.space.tables.rows(&setting, &inner.layout, kind.places());
        self.flight.stores = self.fixed.stores(inner.layout.terms.len() as u64 * setting.sizing.row_bytes);
        self.space.host.take_counts();
    }

    fn fill_sum(&mut self) {
        let Some(handle) = self.lent.handle else { return };
        let setting = self.fixed.agreement(self.space.calls, self.flight.kind()).setting;
        let output = self.lent.output.as_mut();
        let parts = if output.is_some() { self.flight.parts } else { ReturnParts::default() };
        self.flight.stores =
            self.fixed.stores(output.as_ref().map_or(0, |output| output.output.len() as u64));
        if let Some(output) = output {
            output.weights.fill(0.0);
        }
        self.space.tables.sum(&setting, &handle.inner().layout, parts);
    }

    fn report(&mut self) {
        let fixed = &**self.fixed;
        let Workspace { host, sorted, numbers, calls, instance, .. } = &mut *self.space;
        let (inner, sizing) = (&mut self.flight.made, fixed.sizing(self.flight.tag.kind));
        inner.moves.moved = host.take_counts();
        inner.moves.relayed = TransferCounts::default();
        if let Some(task) = self.flight.task.take() {
            inner.moves.moved += task.moved;
            inner.moves.relayed = task.moved;
        }
        if let (Some(landing), false) = (&mut self.flight.landing, self.flight.keeps_room) {
            landing.trim(sizing.landing(inner.layout.landed).bytes());
        }
        let (frame, forward) = (PlanContext { sizing, ..fixed.frame() }, inner.forward.as_deref());
        inner.moves.traffic = Traffic::count(&frame, sorted, &inner.layout, forward, &mut numbers.scratch);
        inner.name(&fixed.spec, (*instance, calls.number()));
    }

    fn metadata(&mut self) -> Result<(), MemoryError> {
        let Some(landing) = &self.flight.landing else { return Ok(()) };
        let made = &mut self.flight.made;
        let place = self.fixed.sizing(self.flight.tag.kind).landing(made.layout.landed);
        let words = landing.slice::<u32>(place.metadata_at(), place.metadata as usize)?;
        made.receive(self.fixed, words, self.lent.routing.map_or(&[], |routing| routing.weights()));
        Ok(())
    }

    fn retire(&mut self) {
        let (Some(handle), Some(offer)) = (self.lent.handle, self.flight.offer.take()) else { return };
        let (inner, Offer { chunk, staging }) = (handle.inner(), offer);
        let mut moved = self.space.host.take_counts();
        moved += self.flight.task.take().map_or(TransferCounts::default(), |task| task.moved);
        inner.returned.store(moved);
        self.space.calls.returned();
        drop(staging);
        let value = self.space.calls.value();
        match chunk {
            // Peers read it again: it is this call that they answer.
            Chunk::Kept(_) => inner.kept.lock().iter_mut().for_each(|kept| kept.value = value),
            Chunk::Output(extent) | Chunk::Copy(extent) if self.flight.keeps_chunk => {
                let release = Arc::clone(&self.space.release);
                inner.kept.put(RetainedBuffer { extent, release, value });
            }
            Chunk::Output(extent) | Chunk::Copy(extent) => self.space.retire(extent, self.fixed.pool()),
        }
    }

    fn adopt(&mut self) {
        let Some(map) = self.lent.map.take() else { return };
        *self.fixed = Arc::new(self.fixed.with_map(map));
        self.space.adopt(self.fixed);
    }
}

/// The blocks that a relay copies along a handle.
fn known(handle: Option<&HostHandle>) -> Option<&Arc<RelayPlan>> {
    handle.and_then(|handle| handle.inner().forward.as_ref())
}

/// Sorts choices into bins, and drops those that find no slot.
pub(super) fn sort(
    fixed: &EpState,
    sorted: &mut crate::plan::SortedRouting,
    routing: &Routing<'_>,
) -> Result<(), Error> {
    let spec = &fixed.spec;
    sorted.fill(&spec.map, &fixed.bins, spec.metadata(), fixed.lanes.rank, routing)?;
    if let Some(slots) = spec.mode.slots() {
        let full = (0..).zip(&sorted.counts).find(|(_, rows)| **rows > slots);
        if let (Some((bin, &rows)), Overflow::Error) = (full, spec.mode.overflow()) {
            return Err(PlanError::SlotsFull { bin, rows, slots }.into());
        }
        sorted.keep(spec.top_k, |_| slots);
    }
    Ok(())
}

/// The tag of a rank that refuses the call for this reason.
pub(in crate::ep) fn refusing(tag: Tag, error: &Error) -> Tag {
    match *error {
        Error::Memory(MemoryError::OutOfSpace { asked, free, .. }) => {
            Tag { refusal: Refusal::Space, handle: asked, base: free, ..tag }
        }
        _ => Tag { refusal: Refusal::Input, ..tag },
    }
}
