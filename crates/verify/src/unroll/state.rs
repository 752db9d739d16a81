//! What an unroller knows between two calls: of each rank, of each handle, and of the group.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use sidelane_core::error::{CallKind, PlanError};
use sidelane_core::gate::Routing;
use sidelane_core::plan::{Bins, Counts, DispatchLayout, ReceiveSizes, RelayPlan, RowBuffer, RowSizes};
use sidelane_core::schedule::call::{Engines, RankPrograms};
use sidelane_core::schedule::{CallerTables, Calls, ControlLayout, FillContext, Flag, RelayTables, WindowId};
use sidelane_core::topology::{Paths, Route};

use super::filled::{FilledOperands, Tables};
use super::pool::Pool;
use super::{ActorCall, Assumed, Bytes, ProofScenario, SeededBug, StageRun};

/// Epoch of all stories.
const EPOCH: u16 = 1;
/// Handles that may be alive where metadata lies with them, and bytes of it: more than any scenario
/// here has.
const SEATS: u64 = 8;
const NOTES: u64 = 1 << 14;

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
    /// The one place of returned rows, where callers' threads enqueue.
    pub staging: Option<Extent>,
}

/// A dispatch that calls can follow.
#[derive(Clone)]
pub(super) struct Handle {
    pub call: usize,
    pub placed: Rc<Placed>,
    pub kept: Option<Vec<Extent>>,
}

pub(super) struct Unroller<'a> {
    pub(super) script: &'a ProofScenario<'a>,
    pub(super) bins: Bins,
    pub(super) control: ControlLayout,
    pub(super) sizing: RowSizes,
    pub(super) members: Vec<Member>,
    pub(super) handles: Vec<Handle>,
    /// The call that is unrolled next.
    pub(super) call: usize,
    /// Where metadata of each handle lands at each rank, where engines move rows of exact sizes.
    pub(super) notes: Vec<Vec<u64>>,
    /// The instance that this one gathers for.
    pub(super) exchange: Option<Exchange<'a>>,
    pub(super) calls: Vec<Vec<ActorCall>>,
    pub(super) outside: Raised,
    pub(super) assumed: Vec<Assumed>,
}

/// Where the rows of one dispatch go.
pub(super) struct Placed {
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
    /// What comes of it in the sample.
    Outside(AssumedEffects),
}

/// What an outsider does to ranks of the sample.
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
    pub script: &'a ProofScenario<'a>,
    pub bins: Bins,
    pub sizing: RowSizes,
}

impl<'a> Exchange<'a> {
    pub fn new(script: &'a ProofScenario<'a>) -> Self {
        let bins = Bins::of_layout(script.layout, script.map, script.order, script.nodes);
        Exchange { script, bins, sizing: sizing(script) }
    }
}

pub(super) fn bad(parameter: &'static str, seen: usize, expected: &'static str) -> PlanError {
    PlanError::BadParameter { parameter, seen: seen as u64, expected }
}

/// Sizes of what moves.
pub(super) fn sizing(script: &ProofScenario) -> RowSizes {
    let top_k = script.routings.iter().flatten().map(|routing| routing.top_k()).max().unwrap_or(1);
    let rails = Paths::new(script.nodes, script.route, 0).rails();
    let sums = script.order.has_partials() && script.route == Route::Pxn && rails;
    RowSizes {
        row_bytes: script.row_bytes,
        home_bytes: script.row_bytes,
        words_out: script.notes().words(top_k),
        words_home: script.layout.words_home(top_k),
        // As if rows were bf16 and partials f32.
        partial_bytes: sums.then_some(2 * script.row_bytes),
    }
}

impl<'a> Unroller<'a> {
    pub(super) fn new(script: &'a ProofScenario<'a>) -> Self {
        let routings = || script.routings.iter().flatten();
        let entries = |routing: &Routing| match script.gathers {
            true => routing.tokens() as usize * script.nodes.ranks() as usize,
            false => routing.experts().len(),
        };
        let entries = routings().map(entries).max().unwrap_or(0);
        let bins = Bins::of_layout(script.layout, script.map, script.order, script.nodes);
        let (paths, sizing) = (Paths::new(script.nodes, script.route, 0), sizing(script));
        Unroller {
            script,
            control: ControlLayout::new(&paths, &bins, entries as u64, sizing.note_bytes()),
            bins,
            sizing,
            members: vec![Member::new(script.enqueues); script.nodes.ranks() as usize],
            handles: Vec::new(),
            notes: (0..SEATS).map(|seat| script.notes_of(seat)).collect(),
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
        let (ranks, calls) = (self.script.nodes.ranks(), self.members[rank as usize].calls);
        let partial_bytes = self.sizing.partial_bytes.unwrap_or(0);
        let tag_parity = self.tag_parity(rank);
        Rc::new(FilledOperands { rank, ranks, calls, tag_parity, partial_bytes, sources_of, tables })
    }

    /// The programs of a rank.
    pub(super) fn programs(&self, me: u32) -> RankPrograms {
        let shape =
            Engines { pulls: self.script.pulls, brings_in: self.brings_in(), enqueues: self.script.enqueues };
        let sums = self.sizing.partial_bytes.is_some();
        RankPrograms::new(self.paths(me), self.script.chunks, sums, shape)
    }

    /// Whether copy engines bring in what landed elsewhere.
    pub(super) fn brings_in(&self) -> bool {
        let rails = self.paths(0).rails();
        self.script.pulls && rails && (self.arrives() || !self.script.straight)
    }

    /// Empty tables of both.
    pub(super) fn tables(&self, me: u32) -> (CallerTables, RelayTables) {
        let (paths, chunks) = (self.paths(me), self.script.chunks);
        (CallerTables::new(paths, chunks), RelayTables::new(paths, chunks))
    }

    pub(super) fn setting(&self, me: u32, parity: u64) -> FillContext<'_> {
        FillContext {
            paths: self.paths(me),
            control: &self.control,
            sizing: self.sizing,
            chunks: self.script.chunks,
            parity,
            far: if self.script.pulls && !self.script.straight {
                WindowId::HOST_STAGING
            } else {
                WindowId::POOL
            },
            notes: None,
        }
    }

    /// The same for rows along the layout of a handle.
    pub(super) fn rows_setting(&self, me: u32, parity: u64, handle: usize) -> FillContext<'_> {
        let context = if self.script.has_own_contexts() { handle + me as usize } else { handle };
        let notes = self.script.enqueues.then(|| &*self.notes[context % SEATS as usize]);
        FillContext { notes, ..self.setting(me, parity) }
    }

    /// What lands at a rank if so many rows do.
    pub(super) fn landing(&self, rows: u32) -> RowBuffer {
        let landing = self.sizing.landing(rows);
        if self.script.enqueues { landing.without_notes() } else { landing }
    }

    /// Whether streams may be using memory that their hosts have given back.
    pub(super) fn reads_late(&self) -> bool {
        self.script.enqueues && self.script.slip != Some(SeededBug::TakeUnread)
    }

    /// Whether engines relay.
    pub(super) fn arrives(&self) -> bool {
        self.script.pulls && self.script.route == Route::Pxn && self.paths(0).rails()
    }

    pub(super) fn handle(&mut self, handle: usize) -> Result<&mut Handle, PlanError> {
        self.handles.get_mut(handle).ok_or(bad("handle", handle, "one of an earlier dispatch"))
    }

    pub(super) fn paths(&self, me: u32) -> Paths<'a> {
        Paths::new(self.script.nodes, self.script.route, me)
    }

    pub(super) fn ranks(&self) -> Range<u32> {
        0..self.script.nodes.ranks()
    }
}

impl ProofScenario<'_> {
    /// Whether a rank takes its own dispatch context for that of its peers.
    fn has_own_contexts(&self) -> bool {
        self.slip == Some(SeededBug::OwnContext)
    }

    /// Where metadata lands at each rank, for handle `seat`; with own contexts, where a rank of
    /// that context believes it does.
    fn notes_of(&self, seat: u64) -> Vec<u64> {
        // Ranks number their contexts apart.
        let shift = |rank: u32| if self.has_own_contexts() { 0 } else { u64::from(rank) };
        (0..self.nodes.ranks()).map(|rank| (seat + shift(rank)) % SEATS * NOTES).collect()
    }
}

impl Member {
    fn new(enqueues: bool) -> Self {
        let mut pool = Pool::default();
        if enqueues {
            pool.take(SEATS * NOTES);
        }
        Member { calls: Calls::new(EPOCH), dispatches: 0, pool, offered: Vec::new(), staging: None }
    }

    /// The readers of the offered memory have confirmed, and the stream has passed: it is free.
    pub fn licensed(&mut self) {
        for extent in std::mem::take(&mut self.offered) {
            self.pool.give(&extent);
        }
    }
}
