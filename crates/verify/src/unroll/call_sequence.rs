//! Unrolls a scenario, call after call, in the place of the planners and the caller of every rank.
//!
//! ```text
//!   dispatch   | release | free offered, take extents, write publication | entry | read tags, counts; write headers | rows | caller reads rows
//!   cached     | release | free offered, take extents                    | entry | read tags                        | rows | caller reads rows
//!   return     caller writes chunk | release | free offered, take staging | entry | read tags | returned | sum | free staging, offer chunk
//!
//!   relay      | node entered | read tags, counts; write messages | counts sent | all entered | read messages, counts | agreed
//!              | headers | read headers or offers | ...
//! ```
//!
//! Between two calls it keeps its knowledge of each rank, of each handle, and of the group. Memory
//! comes from a small first-fit allocator, so that it is reused as soon as the rules allow: the
//! hard case.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use sidelane_core::error::{CallKind, PlanError};
use sidelane_core::gate::Routing;
use sidelane_core::plan::{
    Bins, Counts, DispatchLayout, ExpertMap, ReceiveMode, ReceiveSizes, RelayPlan, RowBuffer, RowSizes,
    Strategy,
};
use sidelane_core::schedule::call_program::{Engines, RankPrograms};
use sidelane_core::schedule::{
    CallerTables, Calls, ControlLayout, FillContext, Flag, Operands, RelayTables, ReturnParts, SumOperands,
    WindowId,
};
use sidelane_core::topology::{Paths, Route};

use super::{
    ActorCall, Assumed, Bytes, Call, ProofScenario, Role, SeededBug, StageRun, TokenPlace, UnrolledProgram,
    numbered,
};

pub(super) fn unroll(scenario: &ProofScenario) -> Result<UnrolledProgram, PlanError> {
    let ranks = scenario.nodes.ranks();
    if scenario.map.ranks() != ranks {
        return Err(bad(
            "ranks of the expert map",
            scenario.map.ranks() as usize,
            "as many as the nodes have",
        ));
    }
    match scenario.strategy {
        Strategy::AllToAll => Unroller::new(scenario).run(),
        Strategy::AllGather => {
            let map = ExpertMap::contiguous(ranks, ranks)?;
            let gathering = scenario.gathering(&map);
            Unroller { exchange: Some(Exchange::new(scenario)), ..Unroller::new(&gathering) }.run()
        }
        other => Err(bad("strategy", other as usize, "one whose programs are known here")),
    }
}

impl<'a> Unroller<'a> {
    fn run(mut self) -> Result<UnrolledProgram, PlanError> {
        for (number, call) in self.scenario.calls.iter().enumerate() {
            self.members.iter_mut().for_each(|member| member.calls.enter());
            let gathers = self.exchange.is_some();
            let sampled = match *call {
                Call::Dispatch { routing, keep } if gathers => self.gather(routing, keep, Until::End)?,
                Call::RefusedRegroup { routing } if gathers => self.gather(routing, false, Until::Counts)?,
                Call::RefusedDispatch { routing } => self.dispatch(routing, false, Until::Counts)?,
                _ if gathers => return Err(bad("call", number, "a dispatch, where rows are gathered")),
                Call::RefusedRegroup { .. } => {
                    return Err(bad("call", number, "one of an instance that gathers no rows"));
                }
                Call::Dispatch { routing, keep } => self.dispatch(routing, keep, Until::End)?,
                Call::Cached { handle } => self.cached(handle, Until::End)?,
                Call::RefusedCached { handle } => self.cached(handle, Until::Tags)?,
                Call::Return { handle, parts, copied } => self.ret(handle, parts, copied, Until::End)?,
                Call::RefusedReturn { handle } => {
                    self.ret(handle, ReturnParts { rows: true, weights: false }, false, Until::Tags)?
                }
                Call::Agree => self.agree(),
                Call::Mixed { routing, handle } => self.mixed(routing, handle)?,
            };
            self.add(sampled);
        }
        let actors = self.calls.first().map_or(0, Vec::len) as u32;
        let pool_bytes = self.members.iter().map(|member| member.pool.high).max().unwrap_or(0);
        let (ranks, control_bytes) = (self.scenario.nodes.ranks(), self.control.bytes());
        Ok(UnrolledProgram {
            ranks,
            actors,
            control_bytes,
            pool_bytes,
            calls: numbered(self.calls),
            assumed: self.assumed,
        })
    }

    /// The running call is unrolled; the next one runs.
    pub(super) fn add(&mut self, sampled: Vec<SampledCall>) {
        let parts = self.parts(sampled);
        self.calls.push(parts);
        self.call += 1;
    }

    /// The parts of all actors in the running call.
    fn parts(&mut self, sampled: Vec<SampledCall>) -> Vec<ActorCall> {
        let (mut own, mut others, call) = (Vec::new(), Vec::new(), self.call);
        for (rank, sampled) in (0..).zip(sampled) {
            match sampled {
                SampledCall::Inside(kind, all) => {
                    // No relay is offloaded where callers' threads enqueue.
                    let beside: &[Role] = match self.scenario.enqueues {
                        true => &[Role::Caller, Role::Transfers],
                        false => &[Role::Relay],
                    };
                    for (scenes, &role) in all.into_iter().zip([Role::Own].iter().chain(beside)) {
                        let part = ActorCall { rank, role, call, kind, scenes };
                        if role == Role::Own { own.push(part) } else { others.push(part) }
                    }
                }
                SampledCall::Outside(assumed) => {
                    self.assumed.extend(assumed.written.into_iter().map(|bytes| Assumed { call, bytes }));
                    self.outside.extend(assumed.raised);
                }
            }
        }
        own.append(&mut others);
        for part in &mut own {
            part.scenes.iter_mut().for_each(|scene| scene.drop_assumed_waits(part.rank, &self.outside));
        }
        own
    }
}

/// Epoch of all unrolled programs.
const EPOCH: u16 = 1;
/// Handles that may be alive where metadata lies with them, and bytes of it: more than any scenario
/// here has.
const CONTEXTS: u64 = 8;
const NOTES: u64 = 1 << 14;
/// Bytes of packed rows, and of rows that return: more than any scenario here has.
const STAGING: u64 = 1 << 20;
/// Bytes that stand for a table. Kernels read all of it, or nothing.
pub(super) const TABLE: u64 = 64;
/// Bytes of the pool that an instance whose callers' threads enqueue keeps for itself: of metadata,
/// packed rows and their metadata, and tables. Calls take what lies behind.
pub(super) const KEPT: u64 = CONTEXTS * NOTES + 2 * STAGING + (1 + CONTEXTS) * Table::COUNT * TABLE;

/// A table that host and device share: in memory of the host, in memory of the device for each
/// handle, or in both.
#[derive(Clone, Copy)]
pub(super) enum Table {
    /// The choices, or their counts, where a stream brings them to the host.
    Choices,
    /// The order of rows: by it tokens are packed, and own rows placed.
    Order,
    /// Where the rows of choices are, the order of their sum, and how many rows each expert has.
    Sums,
    /// The runs of own rows.
    OwnRuns,
    /// The rows of each sum by node. On the device they lie behind these sums.
    NodeSums,
}

impl Table {
    const COUNT: u64 = 5;

    /// In faults.
    pub const fn name(self) -> &'static str {
        match self {
            Table::Choices => "choices",
            Table::Order => "order of rows",
            Table::Sums => "places of choices",
            Table::OwnRuns => "own runs",
            Table::NodeSums => "rows of sums",
        }
    }
}

pub(super) type Extent = Range<u64>;

/// How far a call gets.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Until {
    /// Ranks leave when they have read the tags.
    Tags,
    /// Ranks leave when they have read tags and counts.
    Counts,
    /// To the end.
    End,
}

/// State that one rank keeps from call to call.
#[derive(Clone)]
pub(super) struct Member {
    pub calls: Calls,
    /// Dispatches alone: see [`SeededBug::CountDispatches`].
    pub dispatches: u64,
    pub pool: Pool,
    /// Memory that peers may be reading or, where callers' threads enqueue, that their streams may
    /// be using.
    pub offered: Vec<Extent>,
    /// The one place of packed and of returned rows, where callers' threads enqueue.
    pub staging: Extent,
    /// There also: the one place of the metadata of packed rows.
    pub packed_metadata: Extent,
    /// There also: the one place of tables of the host, and behind it those of each handle on the
    /// device.
    pub tables: Extent,
}

/// A dispatch that calls can follow.
#[derive(Clone)]
pub(super) struct Handle {
    pub call: usize,
    pub placed: Rc<RowPlaces>,
    pub kept: Option<Vec<Extent>>,
}

pub(super) struct Unroller<'a> {
    pub(super) scenario: &'a ProofScenario<'a>,
    pub(super) bins: Bins,
    pub(super) control: ControlLayout,
    pub(super) sizing: RowSizes,
    pub(super) members: Vec<Member>,
    pub(super) handles: Vec<Handle>,
    /// The call that is unrolled next.
    pub(super) call: usize,
    /// Where metadata of each handle lands at each rank, where engines move rows of exact sizes.
    pub(super) metadata: Vec<Vec<u64>>,
    /// The instance that this one gathers for.
    pub(super) exchange: Option<Exchange<'a>>,
    pub(super) calls: Vec<Vec<ActorCall>>,
    pub(super) outside: Raised,
    pub(super) assumed: Vec<Assumed>,
}

/// Where the rows of one dispatch go.
pub(super) struct RowPlaces {
    pub layouts: Vec<Rc<DispatchLayout>>,
    pub forwards: Vec<Rc<RelayPlan>>,
    /// Where engines relay, per rank: the first of its layout's runs to arrivals.
    pub arrivals: Vec<u32>,
    /// Counts of all ranks, as one rank sees them.
    pub numbers: (Counts, ReceiveSizes),
}

/// Work of one rank in one call, as far as it is unrolled.
pub(super) enum SampledCall {
    /// The scenes of its actors.
    Inside(CallKind, Vec<Vec<StageRun>>),
    /// Its effects in the sample.
    Outside(AssumedEffects),
}

/// Effects of an outsider on ranks of the sample.
#[derive(Default)]
pub(super) struct AssumedEffects {
    /// Words that it raises, and to what.
    pub raised: Vec<(Word, u64)>,
    pub written: Vec<Bytes>,
}

/// A flag word: its rank, the rank that it speaks of, its kind.
pub(super) type Word = (u32, u32, Flag);

/// To what outsiders have raised words of the sample.
pub(super) type Raised = HashMap<Word, u64>;

/// The instance that another gathers for.
pub(super) struct Exchange<'a> {
    pub scenario: &'a ProofScenario<'a>,
    pub bins: Bins,
    pub sizing: RowSizes,
}

impl<'a> Exchange<'a> {
    pub fn new(scenario: &'a ProofScenario<'a>) -> Self {
        let bins = Bins::of_layout(scenario.layout, scenario.map, scenario.order, scenario.nodes);
        Exchange { scenario, bins, sizing: sizing(scenario) }
    }
}

pub(super) fn bad(parameter: &'static str, seen: usize, expected: &'static str) -> PlanError {
    PlanError::BadParameter { parameter, seen: seen as u64, expected }
}

/// Sizes of what moves.
pub(super) fn sizing(scenario: &ProofScenario) -> RowSizes {
    let top_k = scenario.routings.iter().flatten().map(|routing| routing.top_k()).max().unwrap_or(1);
    let multi_node = Paths::new(scenario.nodes, scenario.route, 0).is_multi_node();
    let rank_sums = scenario.rank_sums();
    let summed = if scenario.pulls { scenario.node_sums() } else { scenario.order.has_partials() };
    let sums = summed && scenario.route == Route::Pxn && multi_node;
    // As if rows were bf16 and partials f32; those of devices have the type of rows.
    let partial_bytes = if scenario.enqueues { scenario.row_bytes } else { 2 * scenario.row_bytes };
    RowSizes {
        row_bytes: scenario.row_bytes,
        return_bytes: scenario.row_bytes,
        words_out: scenario.metadata().words(top_k),
        return_words: scenario.layout.return_words(top_k),
        partial_bytes: sums.then_some(partial_bytes),
        rank_sums,
        pulled_bytes: scenario.row_bytes,
    }
}

impl<'a> Unroller<'a> {
    pub(super) fn new(scenario: &'a ProofScenario<'a>) -> Self {
        let routings = || scenario.routings.iter().flatten();
        let entries = |routing: &Routing| match scenario.gathers {
            true => routing.tokens() as usize * scenario.nodes.ranks() as usize,
            false => routing.experts().len(),
        };
        let entries = routings().map(entries).max().unwrap_or(0);
        let bins = Bins::of_layout(scenario.layout, scenario.map, scenario.order, scenario.nodes);
        let (paths, sizing) = (Paths::new(scenario.nodes, scenario.route, 0), sizing(scenario));
        Unroller {
            scenario,
            control: ControlLayout::new(&paths, &bins, entries as u64, sizing.metadata_bytes())
                .with_rank_sums(sizing.rank_sums),
            bins,
            sizing,
            members: vec![Member::new(scenario.enqueues); scenario.nodes.ranks() as usize],
            handles: Vec::new(),
            metadata: (0..CONTEXTS).map(|context| scenario.metadata_of(context)).collect(),
            call: 0,
            exchange: None,
            calls: Vec::new(),
            outside: Raised::new(),
            assumed: Vec::new(),
        }
    }

    pub(super) fn filled(&self, rank: u32, tables: Tables) -> Rc<FilledOperands> {
        self.filled_from(None, rank, tables)
    }

    /// With sources in windows that an earlier call wrote.
    pub(super) fn filled_from(
        &self,
        sources_of: Option<usize>,
        rank: u32,
        tables: Tables,
    ) -> Rc<FilledOperands> {
        let (ranks, calls) = (self.scenario.nodes.ranks(), self.members[rank as usize].calls);
        let partial_bytes = self.sizing.partial_bytes.unwrap_or(0);
        let tag_parity = self.tag_parity(rank);
        Rc::new(FilledOperands { rank, ranks, calls, tag_parity, partial_bytes, sources_of, tables })
    }

    /// The programs of a rank.
    pub(super) fn programs(&self, me: u32) -> RankPrograms {
        let shape = Engines {
            pulls: self.scenario.pulls,
            brings_in: self.brings_in(),
            enqueues: self.scenario.enqueues,
        };
        let sums = self.sizing.partial_bytes.is_some();
        RankPrograms::new(self.paths(me), self.scenario.chunks, sums, shape)
    }

    /// Whether copy engines bring in what landed elsewhere.
    pub(super) fn brings_in(&self) -> bool {
        let multi_node = self.paths(0).is_multi_node();
        self.scenario.pulls && multi_node && (self.arrives() || !self.scenario.gpu_direct)
    }

    /// Empty tables of both.
    pub(super) fn tables(&self, me: u32) -> (CallerTables, RelayTables) {
        let (paths, chunks) = (self.paths(me), self.scenario.chunks);
        (CallerTables::new(paths, chunks), RelayTables::new(paths, chunks))
    }

    pub(super) fn setting(&self, me: u32, parity: u64) -> FillContext<'_> {
        FillContext {
            paths: self.paths(me),
            control: &self.control,
            sizing: self.sizing,
            chunks: self.scenario.chunks,
            parity,
            far: if self.scenario.pulls && !self.scenario.gpu_direct {
                WindowId::HOST_STAGING
            } else {
                WindowId::POOL
            },
            metadata: None,
        }
    }

    /// The same for rows along the layout of a handle.
    pub(super) fn rows_setting(&self, me: u32, parity: u64, handle: usize) -> FillContext<'_> {
        let context = if self.scenario.has_own_contexts() { handle + me as usize } else { handle };
        let metadata = self.scenario.enqueues.then(|| &*self.metadata[context % CONTEXTS as usize]);
        FillContext { metadata, ..self.setting(me, parity) }
    }

    /// Memory in which so many rows land at a rank.
    pub(super) fn landing(&self, rows: u32) -> RowBuffer {
        let landing = self.sizing.landing(rows);
        if self.scenario.enqueues { landing.without_metadata() } else { landing }
    }

    /// Whether streams may be using memory that their hosts have given back.
    pub(super) fn reads_late(&self) -> bool {
        self.scenario.enqueues && self.scenario.seeded != Some(SeededBug::TakeUnread)
    }

    /// Whether the device plans dispatches: its counts are enough for the host.
    pub(super) fn plans_on_device(&self) -> bool {
        let ProofScenario { host_plans, tokens, mode, .. } = *self.scenario;
        mode == ReceiveMode::Exact
            && !host_plans
            && tokens == TokenPlace::Elsewhere
            && !self.sizing.rank_sums
            && !self.paths(0).is_multi_node()
    }

    /// Whether engines relay.
    pub(super) fn arrives(&self) -> bool {
        self.scenario.pulls && self.scenario.route == Route::Pxn && self.paths(0).is_multi_node()
    }

    pub(super) fn handle(&mut self, handle: usize) -> Result<&mut Handle, PlanError> {
        self.handles.get_mut(handle).ok_or(bad("handle", handle, "one of an earlier dispatch"))
    }

    pub(super) fn paths(&self, me: u32) -> Paths<'a> {
        Paths::new(self.scenario.nodes, self.scenario.route, me)
    }

    pub(super) fn ranks(&self) -> Range<u32> {
        0..self.scenario.nodes.ranks()
    }
}

impl ProofScenario<'_> {
    /// Whether a rank takes its own dispatch context for that of its peers.
    fn has_own_contexts(&self) -> bool {
        self.seeded == Some(SeededBug::OwnContext)
    }

    /// Where metadata lands at each rank, for handle `context`; with own contexts, where a rank of
    /// that context believes it does.
    fn metadata_of(&self, context: u64) -> Vec<u64> {
        // Ranks number their contexts apart.
        let shift = |rank: u32| if self.has_own_contexts() { 0 } else { u64::from(rank) };
        (0..self.nodes.ranks()).map(|rank| (context + shift(rank)) % CONTEXTS * NOTES).collect()
    }
}

impl Member {
    fn new(enqueues: bool) -> Self {
        let mut pool = Pool::default();
        let [mut staging, mut packed_metadata, mut tables] = [const { 0..0 }; 3];
        if enqueues {
            pool.take(CONTEXTS * NOTES);
            staging = pool.take(STAGING);
            packed_metadata = pool.take(STAGING);
            tables = pool.take((1 + CONTEXTS) * Table::COUNT * TABLE);
            debug_assert_eq!(tables.end, KEPT, "calls take what lies behind");
        }
        let (calls, offered) = (Calls::new(EPOCH), Vec::new());
        Member { calls, dispatches: 0, pool, offered, staging, packed_metadata, tables }
    }

    /// First byte and length of a table: of a handle, or as the host writes it.
    pub fn table(&self, table: Table, handle: Option<usize>) -> (u64, u64) {
        let context = handle.map_or(0, |handle| 1 + handle as u64 % CONTEXTS);
        (self.tables.start + (context * Table::COUNT + table as u64) * TABLE, TABLE)
    }

    /// The readers of the offered memory have confirmed, and the stream has passed: it is free.
    pub fn free_offered(&mut self) {
        for extent in std::mem::take(&mut self.offered) {
            self.pool.give(&extent);
        }
    }
}

/// Tables of one program, as an executor would see them, and where its signals go.
#[derive(Debug)]
pub(super) struct FilledOperands {
    pub rank: u32,
    pub ranks: u32,
    pub calls: Calls,
    /// Where signals of this call leave their tag: its number, unless a seeded says otherwise.
    pub tag_parity: u64,
    /// Bytes of a partial sum; 0 where relays do not sum.
    pub partial_bytes: u64,
    /// The call that wrote what puts read from windows; `None`: their own.
    pub sources_of: Option<usize>,
    pub tables: Tables,
}

#[derive(Debug)]
pub(super) enum Tables {
    Caller {
        tables: CallerTables,
        layout: Rc<DispatchLayout>,
        row_bytes: u64,
    },
    /// With the chunk that each rank offers, and the rank whose pool holds it: its own.
    Relay {
        tables: RelayTables,
        forward: Rc<RelayPlan>,
        chunks: Vec<RowBuffer>,
        held_by: Vec<u32>,
    },
}

impl FilledOperands {
    pub fn operands(&self) -> Operands<'_> {
        match &self.tables {
            Tables::Caller { tables, layout, row_bytes } => Operands {
                runs: &layout.runs,
                rows: &layout.rows,
                sum: SumOperands::of_layout(layout, &tables.bases),
                ..tables.operands(self.calls, *row_bytes)
            },
            Tables::Relay { tables, forward, chunks, held_by } => Operands {
                runs: &forward.runs,
                rows: &forward.rows,
                sum: SumOperands::of_partials(&forward.partials, &tables.bases, held_by, chunks),
                ..tables.operands(self.calls)
            },
        }
    }
}

/// The receive pool of one rank: the extents in use, ascending.
#[derive(Clone, Debug, Default)]
pub(super) struct Pool {
    used: Vec<Range<u64>>,
    /// End of the highest extent there ever was.
    pub high: u64,
}

impl Pool {
    /// The lowest gap of `bytes`. A real rank announces its largest free extent; the choice does
    /// not change the order of accesses, and the lowest gap is reused most.
    pub fn take(&mut self, bytes: u64) -> Range<u64> {
        let bytes = bytes.next_multiple_of(64);
        let mut start = 0;
        let mut at = 0;
        while at < self.used.len() && self.used[at].start < start + bytes {
            start = self.used[at].end;
            at += 1;
        }
        let extent = start..start + bytes;
        if bytes > 0 {
            self.used.insert(at, extent.clone());
        }
        self.high = self.high.max(extent.end);
        extent
    }

    /// Keeps `part` of an extent, in whole lines, and gives the rest back.
    pub fn keep(&mut self, extent: &Range<u64>, part: Range<u64>) -> Range<u64> {
        let kept = part.start..part.end.next_multiple_of(64);
        for used in self.used.iter_mut().filter(|used| *used == extent) {
            *used = kept.clone();
        }
        self.used.retain(|used| !used.is_empty());
        kept
    }

    /// Gives an extent back. One that was given back before stays so.
    pub fn give(&mut self, extent: &Range<u64>) {
        self.used.retain(|used| used != extent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_gap_that_fits_is_taken() {
        let mut pool = Pool::default();
        let (a, b, c) = (pool.take(64), pool.take(1), pool.take(100));
        assert_eq!((&a, &b, &c), (&(0..64), &(64..128), &(128..256)));
        pool.give(&a);
        assert_eq!(pool.take(65), 256..384, "too large for the gap");
        assert_eq!(pool.take(64), 0..64);
        pool.give(&b);
        pool.give(&c);
        assert_eq!(pool.take(192), 64..256);
        assert_eq!(pool.high, 384);
        let large = pool.take(128);
        assert_eq!(large, 384..512);
        assert_eq!(pool.keep(&large, 384..385), 384..448);
        assert_eq!(pool.take(64), 448..512);
        let large = pool.take(192);
        assert_eq!((&large, pool.keep(&large, 576..704)), (&(512..704), 576..704));
        assert_eq!(pool.take(64), 512..576);
    }
}
