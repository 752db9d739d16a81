//! The enqueuer: does for a stream what the caller of an [`ExpertParallel`](crate::ExpertParallel)
//! on the host does.
//!
//! It serves one call after the other by the programs that the host steps, too: the same releases,
//! entries, counts and placement, the same judgment.
//! [`schedule::call_program`](crate::schedule::call_program) alone holds the order of steps. Those
//! of the caller's stream have a file of their own ([`caller_stream`](super::caller_stream)). Rows
//! go by the stream of copies ([`CopyEngineStepper`]). With several nodes the enqueuer plays this
//! rank's relay, too, at the places of launch order: own puts and signals, relayed rows, own waits.
//!
//! The caller's thread drives it, and waits for others in the second half of each call alone. So no
//! stream waits for a thread that has yet to call the driver. A dispatch has a file of its own; the
//! other calls are:
//!
//! ```text
//!   cached, gradient of combine
//!     caller's stream    pack, as the handle says | own rows  join | experts
//!     caller's thread    take, entry, all ranks': landings | posted
//!     stream of copies                     | rows to all ranks | landed -> peers
//!   combine, gradient of dispatch, weight gradients
//!     caller's stream    experts write | sums by rank | ready |      join | sum | ...
//!     caller's thread      entry, all ranks': bases | enqueue -.
//!     stream of copies                                 pull runs | read -> peers
//!   another expert map
//!     caller's stream    reached | ........................ | bins, groups of the new map | calls by it
//!     caller's thread    await, entry, all ranks': agreed     adopt: wait until they are written
//! ```
//!
//! **Along a handle** no rank counts, and the host hears nothing of the stream. It may run ahead,
//! because rows land in memory that is free when it says so: [`Session::take`] has seen that the
//! stream and its peers have read what lay there. Over several nodes it awaits its stream, since
//! the list of arrivals lies in memory of the host that earlier calls may still be reading.
//!
//! **Returns.** Copy engines cannot add. So each rank pulls the rows of its own tokens, run by
//! run, to where they lay packed when they went out. Then its stream adds them up, in the order of
//! the instance; outputs of the rank itself it reads where they were made. Where sums are by rank,
//! the stream of the experts' rank adds up a token's rows first. It is then that sum which returns,
//! and all sums from one rank are one run. Weight gradients return as rows of four bytes.

use std::ops::Range;
use std::sync::Arc;

use super::device_pool::Extent;
use super::dispatch_planner::Planner;
use super::enqueued_dispatch::WriteTarget;
use super::heap_growth::{HeapGrowth, NotGrown};
use super::session::Session;
use super::watchdog::Watch;
use crate::device::{ChoiceFault, DeviceRange, Event, Kernels, Stream};
use crate::dtype::Dtype;
use crate::ep::Status;
use crate::ep::call_agreement::{CallAgreement, GroupCounts};
use crate::ep::host::refusing;
use crate::ep::relay::{CallPlan, Relay, RelayCall, RelayTask};
use crate::ep::tensor::Chosen;
use crate::error::{CallError, CallKind, Error, MemoryError, PlanError};
use crate::exec::{CopyEngineStepper, Packed, StepExecutor, Until, drive};
use crate::plan::{
    Counts, DispatchLayout, ExpertMap, InterNodeRows, NodeSums, RankSums, ReceiveSizes, RelayPermutation,
    RelayPlan, RowRun, Segment, SortedRouting,
};
use crate::schedule::call_program::{
    CallMachine, Part, RankPrograms, Relays, Role, StageId, StageTensor, Work,
};
use crate::schedule::{CallProperties, CallerTables, Calls, Class, Operands, Refusal, ReturnParts, Tag};

/// The caller's stream, as the enqueuer knows it: events order the streams.
#[derive(Debug)]
pub(super) struct CallerStream {
    pub stream: Arc<Stream>,
    pub kernels: Arc<Kernels>,
    /// The stream has packed the rows of the call, or made what returns.
    pub packed: Event,
    /// The stream of copies has done the call.
    pub done: Event,
    /// Looks whether peers' words come in time.
    pub watch: Watch,
}

/// State of a context between its calls.
#[derive(Debug, Default)]
pub(super) struct ContextState {
    pub layout: DispatchLayout,
    /// The blocks that this rank's relay copies along it.
    pub forward: RelayPlan,
    /// In a return: memory in which the relay sums.
    pub node_sums: Option<Extent>,
    /// If tokens may be sent without packing: the first of the layout's runs by token.
    pub in_place: Option<u32>,
    /// Runs of the layout by which own rows are placed, and their rows, pads counted.
    pub own: (Range<u32>, u32),
    /// Where engines relay: what all ranks count, the layout's first run to arrivals, and the
    /// arrival of each visible row.
    pub numbers: (Counts, ReceiveSizes),
    pub first_run: u32,
    pub index: Vec<i32>,
    /// The number of the dispatch that made it; 0 if there is none that landed.
    pub number: u64,
    /// How that dispatch ended.
    pub status: Status,
}

impl ContextState {
    /// Adds the layout's runs as they lie among the tokens, if each is a run of tokens. `token_of`
    /// is that of a packed row.
    pub fn find_in_place(&mut self, token_of: impl Fn(u32) -> u32) {
        let runs = &mut self.layout.runs;
        let before = runs.len();
        self.in_place = Some(before as u32);
        for at in 0..before {
            let run = runs[at];
            let first = if run.count > 0 { token_of(run.first) } else { 0 };
            if (1..run.count).any(|row| token_of(run.first + row) != first + row) {
                runs.truncate(before);
                self.in_place = None;
                return;
            }
            runs.push(RowRun { first, ..run });
        }
    }
}

/// One rank's enqueuer.
#[derive(Debug)]
pub(super) struct Enqueuer {
    pub common: Arc<Session>,
    pub caller: CallerStream,
    pub engine: CopyEngineStepper,
    /// Does this rank's part for other nodes, in this thread; there is none where there is only
    /// one.
    pub relay: Option<Relay>,
    pub calls: Calls,
    pub tables: CallerTables,
    pub sorted: SortedRouting,
    pub crossing: InterNodeRows,
    pub arrivals: RelayPermutation,
    pub rank_sums: RankSums,
    pub node_sums: NodeSums,
    pub numbers: GroupCounts,
    pub kept: Vec<ContextState>,
    /// How the pool grows, if it may.
    pub growth: Option<HeapGrowth>,
    /// Per rank: where metadata of the call's rows lands.
    pub metadata_at: Vec<u64>,
    pub scratch: Scratch,
}

/// Used again by all calls.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub experts: Vec<u32>,
    pub weights: Vec<u32>,
    /// Where the device plans: rows of each bin, and what is wrong.
    pub bin_counts: Vec<u32>,
    pub faults: Vec<ChoiceFault>,
    /// Per bin: its first row as rows lie packed.
    pub starts: Vec<u32>,
    /// Metadata of each packed row.
    pub metadata: Vec<u32>,
    /// Per choice: its packed row, and the place of its bin in the order of the sum.
    pub places: Vec<i32>,
    pub sums: Vec<i32>,
    /// Per choice: the row of its rank's sum, if that is its to add.
    pub sum_places: Vec<i32>,
    /// The rows of each sum of a relay, and their weights.
    pub relay_index: Vec<i32>,
    pub relay_weights: Vec<f32>,
    pub counts: Vec<i64>,
    /// The runs of own rows, as kernels read them.
    pub own_runs: Vec<u32>,
    /// Rows that came from other nodes: first row, and how many.
    pub landed: Vec<(u32, u32)>,
    /// Words of a header.
    pub header: Header,
}

/// A header's part for this rank.
#[derive(Debug, Default)]
pub(super) struct Header {
    pub segments: Vec<Segment>,
    pub listed: Vec<u32>,
    /// Metadata of these rows.
    pub weights: Vec<u32>,
    /// Zeros.
    pub pads: Vec<u32>,
    /// Counts of a local peer.
    pub counted: Vec<u32>,
}

impl Enqueuer {
    /// Enters the next call.
    ///
    /// # Errors
    /// The cause of a failed world.
    pub fn enter(&mut self) -> Result<CallMachine, Error> {
        self.common.fixed.shared.hub.health().check()?;
        // No earlier call may use memory that is given back from now on.
        self.common.space.count();
        self.calls.enter();
        Ok(CallMachine::default())
    }

    /// Serves a call of this kind along the layout of a context, with as many tokens `x`, which are
    /// packed unless they go as they lie. `refused` is why this rank cannot make it.
    ///
    /// # Errors
    /// Those that end the world. A refusal is returned, and otherwise where rows land.
    pub fn cached(
        &mut self,
        programs: &RankPrograms,
        mut machine: CallMachine,
        (kind, context): (CallKind, u32),
        (tokens, x, refused): (u32, Option<(DeviceRange, Dtype)>, Option<Error>),
    ) -> Result<Result<Extent, Error>, Error> {
        let mut call = DeviceCall { tokens, x, refused, ..DeviceCall::new(self, programs, kind, context) };
        let refusal = call.drive(&mut machine, Until::End)?;
        let landing = call.landing.take().and_then(|landing| landing.extent);
        self.engine.take_enqueued();
        Ok(match (refusal, landing) {
            (None, Some(mut extent)) => {
                // Staged memory is free again, for calls that are enqueued later.
                drop(self.common.trim(kind, &mut extent, &self.kept[context as usize].layout));
                Ok(extent)
            }
            (refusal, _) => Err(refusal.unwrap_or_else(|| PlanError::RefusedHere.into())),
        })
    }

    /// Serves a return of this kind for a context, of outputs that lie at byte `base` of this
    /// rank's memory. What comes goes to `out`, of so many tokens.
    ///
    /// # Errors
    /// Those that end the world. A refusal is told, and returned.
    pub fn ret(
        &mut self,
        programs: &RankPrograms,
        mut machine: CallMachine,
        (kind, context): (CallKind, u32),
        (base, options): (Option<u64>, u32),
        (tokens, out): (u32, Option<&DeviceRange>),
    ) -> Result<Option<Error>, Error> {
        let number = self.kept[context as usize].number;
        let call = DeviceCall::new(self, programs, kind, context);
        let mut call = DeviceCall { base, tokens, out, ..call };
        call.tag.options = options;
        call.refused = match (base, number) {
            (None, _) => Some(PlanError::RefusedHere.into()),
            (_, 0) => {
                Some(CallError::NotKept { missing: "the layout of a dispatch that was refused" }.into())
            }
            _ => None,
        };
        let refused = call.drive(&mut machine, Until::End)?;
        // Free for calls that are enqueued later.
        self.kept[context as usize].node_sums = None;
        let enqueued = self.engine.take_enqueued();
        self.common.contexts[context as usize].tell(|told| {
            told.combined = enqueued;
            told.combine_refused = refused.clone();
            told.returns += 1;
        });
        Ok(refused)
    }

    /// Serves the proposal of a map. `refused` is why this rank has none.
    ///
    /// # Errors
    /// Those that end the world. A refusal is returned.
    pub fn remap(
        &mut self,
        programs: &RankPrograms,
        mut machine: CallMachine,
        kind: CallKind,
        (map, refused): (Option<ExpertMap>, Option<Error>),
    ) -> Result<Option<Error>, Error> {
        let context = self.common.shape.no_context();
        let call = DeviceCall::new(self, programs, kind, context);
        let refusal = DeviceCall { map, refused, ..call }.drive(&mut machine, Until::End)?;
        self.engine.take_enqueued();
        Ok(refusal)
    }
}

/// Outputs of a rank's experts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outputs<'a> {
    pub rows: &'a DeviceRange,
    pub len: u32,
    /// Where in this rank's memory what returns of them begins.
    pub base: u64,
}

/// A call amid its steps.
pub(super) struct DeviceCall<'p> {
    pub enqueuer: &'p mut Enqueuer,
    pub programs: &'p RankPrograms,
    pub context: u32,
    /// Number of tokens.
    pub tokens: u32,
    /// Planner of a call that places rows, and choices that go to it.
    pub planner: Planner,
    pub chosen: Option<Chosen<'p>>,
    /// The tokens. Those for other ranks go as they lie, or are packed, now or when it is known
    /// how.
    pub x: Option<(DeviceRange, Dtype)>,
    /// Return: outputs of this rank; where what returns of them begins, in sums of its own if it
    /// has made some; and where what comes goes.
    pub outputs: Option<Outputs<'p>>,
    pub base: Option<u64>,
    pub sums: Option<Extent>,
    pub out: Option<&'p DeviceRange>,
    /// The tag of this rank's entry.
    pub tag: Tag,
    /// Per rank: the tag that it has said again, since the pool has grown.
    pub said: Vec<Tag>,
    /// The heap was to grow for this call, and has not.
    pub ungrown: Option<NotGrown>,
    /// Why this rank refuses the call; its tag says that it does.
    pub refused: Option<Error>,
    /// How the call has ended, if it was refused.
    pub ended: Status,
    /// Dispatch: where rows land.
    pub landing: Option<WriteTarget>,
    /// Memory behind what landed, which is this rank's until the call is over.
    pub staging: Option<Extent>,
    /// Another expert map, that this rank proposes.
    pub map: Option<ExpertMap>,
    /// The relay's part of this call.
    pub task: Option<RelayTask>,
}

impl<'p> DeviceCall<'p> {
    /// A call of this kind by the caller of a context.
    pub fn new(enqueuer: &'p mut Enqueuer, programs: &'p RankPrograms, kind: CallKind, context: u32) -> Self {
        DeviceCall {
            enqueuer,
            programs,
            context,
            tokens: 0,
            planner: Planner::default(),
            chosen: None,
            x: None,
            outputs: None,
            base: None,
            sums: None,
            out: None,
            tag: Tag { kind, context: context as u16, ..Tag::default() },
            said: Vec::new(),
            ungrown: None,
            refused: None,
            ended: Status::OK,
            landing: None,
            staging: None,
            map: None,
            task: None,
        }
    }

    /// Enters the call, and drives it to its half.
    ///
    /// # Errors
    /// Those that end the world, which has ended then.
    pub fn begin(&mut self) -> Result<CallMachine, Error> {
        let begun = self.enqueuer.enter().and_then(|mut machine| {
            self.drive(&mut machine, Until::Half)?;
            Ok(machine)
        });
        begun.map_err(|error| self.enqueuer.common.fixed.fail(error))
    }

    /// Drives the call that was entered; returns why it was refused, if it was.
    ///
    /// # Errors
    /// Those that end the world.
    pub fn drive(&mut self, machine: &mut CallMachine, until: Until) -> Result<Option<Error>, Error> {
        let program = self.programs.own(self.tag.kind, Relays::Inline);
        drive(machine, program, self, until)
    }

    /// Sets the tag that goes out with the entries: one that refuses, if this rank does.
    pub fn say(&mut self, tag: Tag) {
        self.tag = match &self.refused {
            None => tag,
            Some(error) => refusing(tag, error),
        };
        self.enqueuer.tables.clear();
        self.enqueuer.tables.tags.fill(self.tag);
    }

    /// If tokens go as they lie: where that is in this rank's memory, and the first of the runs by
    /// token.
    pub fn in_place(&self) -> Option<(u64, u32)> {
        let (x, dtype) = self.x.as_ref()?;
        let offset = self.enqueuer.common.lie_here(self.tag.kind, (x, *dtype))?;
        Some((offset, self.enqueuer.kept[self.context as usize].in_place?))
    }

    fn stage(&mut self, stage: StageId, part: Part) -> Result<(), Error> {
        if stage.is_of_caller() {
            return self.reached(part, self.programs.stages.items(stage, part));
        }
        let in_place = self.in_place();
        let (kind, planner) = (self.tag.kind, self.planner);
        let Enqueuer { engine, tables, kept, common, caller, calls, scratch, .. } = &mut *self.enqueuer;
        let items = self.programs.stages.items(stage, part);
        let kept = &kept[self.context as usize];
        let rows = stage.tensor() == StageTensor::Rows;
        let operands = Operands {
            runs: if rows { &kept.layout.runs } else { &[] },
            ..tables.operands(*calls, common.shape.row_bytes(kind))
        };
        if !rows || part == Part::Finish {
            return engine.run(items, &operands, None);
        }
        let staging = common.shape.staging();
        let (packed, metadata) = (common.piece(staging)?, planner.metadata(common)?);
        let (rows, at) = match (&self.x, in_place) {
            (Some((x, _)), Some((offset, _))) => (x, offset),
            _ => (&packed, staging.0),
        };
        let metadata = planner.packed_metadata(&metadata, scratch);
        let landing = tables.landing[common.fixed.lanes.rank as usize];
        let place_own = || {
            let Some((x, dtype)) = &self.x else { return Ok(()) };
            let (call, tokens) = ((kind, self.context), (self.tokens, x, *dtype));
            caller.place_own_rows(common, landing, kept, call, tokens)
        };
        engine.run(items, &operands, Some(Packed { rows, at, metadata, place_own: &place_own }))
    }

    /// Has the relay perform a step.
    fn relay(&mut self, step: impl FnOnce(&mut RelayCall<'_, '_>) -> Result<(), Error>) -> Result<(), Error> {
        let (memory, weighted) = (self.sum_memory(), self.weighs());
        let Enqueuer { relay, engine, kept, calls, numbers, .. } = &mut *self.enqueuer;
        let Some(relay) = relay else { return Ok(()) };
        let (kind, programs) = (self.tag.kind, self.programs);
        let ContextState { forward, numbers: (counts, sizes), .. } = &mut kept[self.context as usize];
        let task = self.task.get_or_insert_with(|| {
            let parts = ReturnParts { rows: !kind.places(), weights: false };
            RelayTask { parts, memory, weighted, ..RelayTask::new(*calls, kind) }
        });
        let judged = if kind.places() { (&numbers.counts, &numbers.sizes) } else { (&*counts, &*sizes) };
        let run = &mut |items: &[_], operands: &Operands<'_>| engine.run(items, operands, None);
        step(&mut RelayCall {
            relay,
            programs,
            task,
            plan: CallPlan::Own(forward),
            judged: Some(judged),
            run,
        })
    }
}

impl StepExecutor for DeviceCall<'_> {
    fn run(&mut self, role: Role, stage: StageId, part: Part) -> Result<(), Error> {
        if role == Role::Relay {
            return self.relay(|relay| relay.run(role, stage, part));
        }
        self.stage(stage, part)
    }

    fn compute(&mut self, role: Role, work: Work) -> Result<(), Error> {
        if role == Role::Relay {
            return match work {
                Work::SendNodeSums => self.send_node_sums(),
                _ => self.relay(|relay| relay.compute(role, work)),
            };
        }
        match work {
            Work::Bring => self.bring()?,
            Work::Pack => self.pack()?,
            Work::PackPlaced => self.pack_placed()?,
            Work::Partials => self.partials()?,
            Work::Follow => self.follow()?,
            Work::Join => self.join_streams()?,
            Work::Metadata => self.lay_choices_apart()?,
            Work::Regroup => self.regroup()?,
            Work::Sum => self.sum()?,
            Work::Reclaim => drop(self.enqueuer.common.reclaim()),
            Work::Grow => self.grow()?,
            Work::Sort => self.sort(),
            Work::Publish => self.publish()?,
            Work::Announce => self.announce(),
            Work::Take => self.take()?,
            Work::Landings => self.landings()?,
            Work::Judge => {
                let Enqueuer { common, calls, numbers, .. } = &mut *self.enqueuer;
                common.fixed.agreement(*calls, self.tag.kind).judge(numbers)?;
            }
            Work::Place => self.place()?,
            Work::Describe => {
                let Enqueuer { common, calls, kept, sorted, .. } = &*self.enqueuer;
                common.fixed.describe_blocks(*calls, &kept[self.context as usize].layout, sorted)?;
            }
            Work::FillRows => self.fill_rows()?,
            Work::SendTables => self.send_tables()?,
            Work::PlaceOwn => self.place_own()?,
            Work::FillBringIn => self.fill_bring_in()?,
            Work::Offer => self.offer(),
            Work::Bases => self.bases()?,
            Work::FillPull => self.fill_pull(),
            Work::Propose => self.propose(),
            Work::Adopt => self.adopt()?,
            Work::Retire => {
                let Enqueuer { calls, common, .. } = &mut *self.enqueuer;
                calls.returned();
                common.progress.returned(calls.last_return());
            }
            // No thread waits for the verdict, and the handle is told where rows land before they
            // do.
            Work::TellAgreed | Work::Report => {}
            _ => return Err(CallError::unknown_step(self.tag.kind, &work).into()),
        }
        Ok(())
    }

    fn agree(&mut self, _: Role) -> Result<(), Error> {
        let refused = self.refused.take();
        self.agreement().agree(self.tag, refused).inspect_err(|error| self.refuse(error))
    }

    fn admit(&mut self, _: Role) -> Result<(), Error> {
        let DeviceCall { enqueuer, said, tag, ungrown, .. } = self;
        let Enqueuer { common, calls, numbers, .. } = &mut **enqueuer;
        let agreement = CallAgreement { said, ..common.fixed.agreement(*calls, tag.kind) };
        let admitted = agreement.check_space(*tag, numbers);
        let admitted =
            admitted.map_err(|lacks| ungrown.map_or(lacks.clone(), |refused| refused.error(lacks)));
        admitted.inspect_err(|error| self.refuse(error))
    }
}

impl DeviceCall<'_> {
    /// The call is refused. Memory is free before the caller hears of it, and may enter the next
    /// call.
    fn refuse(&mut self, error: &Error) {
        self.landing = None;
        let (kind, context) = (self.tag.kind, self.context as usize);
        let Enqueuer { common, kept, .. } = &mut *self.enqueuer;
        self.ended = match CallProperties::of(kind).class {
            // As the dispatch was that made no layout for it.
            Class::Return if kept[context].number == 0 => kept[context].status,
            _ => Status::of(error),
        };
        if kind.places() {
            kept[context].number = 0;
            common.contexts[context].tell(|told| {
                told.extent = None;
                told.refused = Some(error.clone());
            });
        }
    }

    /// Takes memory of the size that the layout asks for, and says where it lies.
    pub fn take(&mut self) -> Result<(), Error> {
        let (common, kept) = (&self.enqueuer.common, &self.enqueuer.kept[self.context as usize]);
        if self.refused.is_none() {
            let (landed, staged) = (kept.layout.landed, kept.layout.staged);
            match common.take_in_call(common.fixed.extent_bytes(self.tag.kind, landed, staged)) {
                Ok(extent) => {
                    let (base, len) = (extent.offset(), extent.len());
                    self.landing = Some(WriteTarget { base, len, extent: Some(extent) });
                }
                Err(error @ Error::Memory(MemoryError::OutOfSpace { .. })) => self.refused = Some(error),
                Err(error) => return Err(error),
            }
        }
        let (base, handle) = (self.landing.as_ref().map_or(0, |landing| landing.base), kept.number);
        self.say(Tag { handle, base, ..self.tag });
        Ok(())
    }

    /// Reads where rows land at all ranks.
    pub fn landings(&mut self) -> Result<(), Error> {
        let Enqueuer { common, calls, tables, .. } = &mut *self.enqueuer;
        let agreement = CallAgreement { said: &self.said, ..common.fixed.agreement(*calls, self.tag.kind) };
        for (peer, landing) in (0..).zip(&mut tables.landing) {
            let mine = peer == common.fixed.lanes.rank;
            *landing = if mine { self.tag.base } else { agreement.tag_of(peer)?.base };
        }
        Ok(())
    }

    /// Says where outputs lie, to local peers, and to relays where this rank's rows have their
    /// place.
    pub fn offer(&mut self) {
        let handle = self.enqueuer.kept[self.context as usize].number;
        let base = self.base.unwrap_or_default();
        self.say(Tag { handle, base, ..self.tag });
        if self.tag.refusal == Refusal::None {
            let Enqueuer { common, calls, tables, kept, .. } = &mut *self.enqueuer;
            let (layout, staging) = (&kept[self.context as usize].layout, common.shape.staging().0);
            let setting = common.fixed.agreement(*calls, self.tag.kind).setting;
            tables.stage_rows(&setting, layout, staging);
            tables.offer(&common.fixed.paths(), self.tag, base);
        }
    }

    /// Reads where the outputs of this node's ranks lie.
    pub fn bases(&mut self) -> Result<(), MemoryError> {
        let Enqueuer { common, calls, tables, .. } = &mut *self.enqueuer;
        let agreement = common.fixed.agreement(*calls, self.tag.kind);
        tables.bases[common.fixed.lanes.rank as usize] = self.base.unwrap_or_default();
        for peer in common.fixed.paths().local_peers() {
            tables.bases[peer as usize] = agreement.tag_of(peer)?.base;
        }
        Ok(())
    }

    /// Fills the operands by which rows come here.
    pub fn fill_pull(&mut self) {
        let Enqueuer { common, calls, tables, kept, .. } = &mut *self.enqueuer;
        let (layout, staging) = (&kept[self.context as usize].layout, common.shape.staging().0);
        tables.pull(&common.fixed.agreement(*calls, self.tag.kind).setting, layout, staging);
    }

    /// Says which map this rank brings.
    pub fn propose(&mut self) {
        let handle = self.map.as_ref().map_or(0, ExpertMap::digest);
        self.say(Tag { handle, ..self.tag });
    }

    /// Goes by the new map from now on. Rows of the old one stay where they are.
    pub fn adopt(&mut self) -> Result<(), Error> {
        let Enqueuer { common, caller, numbers, relay, .. } = &mut *self.enqueuer;
        let (Some(map), CallerStream { stream, .. }) = (self.map.take(), caller) else { return Ok(()) };
        let fixed = Arc::new(common.fixed.with_map(map));
        common.write_map(stream.context(), stream, &fixed)?;
        *numbers = GroupCounts::new(&fixed);
        *relay = relay.is_some().then(|| Relay::new(Arc::clone(&fixed)));
        *common = Arc::new(Session { fixed, ..Session::clone(common) });
        Ok(())
    }
}
