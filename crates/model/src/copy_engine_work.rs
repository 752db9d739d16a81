//! The requests of a call to the copy engines of a device: the steps of its program, counted.
//!
//! A copy engine neither gathers nor adds. So a kernel first packs rows of the call's own tensors
//! in the order in which they leave, and each run of them is one copy. Relayed rows lie in a block,
//! and each stretch of it is one copy. A stage goes to one stream in groups, each a batch of copies
//! and a list of memory operations behind it:
//!
//! ```text
//!   stage    Put a  Signal a  Put b  Signal b  Wait a  Wait b  Put c  Signal c
//!   stream   | batch: a b | list: signal a, signal b, wait a, wait b | batch: c | list: signal c |
//! ```
//!
//! Counted is what goes to other ranks. Left out are kernels, which also place own rows, and copies
//! that a dispatch makes beside: row metadata, tables from the host. [`time`](crate::time) counts
//! those, too.
//! NICs move rows to other nodes: of these only bytes are counted.

use std::ops::AddAssign;

use serde::Serialize;
use sidelane_core::error::{CallKind, PlanError};
use sidelane_core::gate::Routing;
use sidelane_core::plan::{
    Bins, Block, DispatchLayout, ExpertMap, GroupRouting, PlanContext, PulledSums, RankRouting, ReceiveMode,
    RelayPlan, RelaySorter, RowLayout, RowMetadata, RowSizes, SumOrder,
};
use sidelane_core::schedule::Effect;
use sidelane_core::schedule::call_program::{
    Action, Engines, RankPrograms, Relays, SlotCall, StageOperands, StageTensor,
};
use sidelane_core::schedule::stream_program::{Slots, StreamProgram};
use sidelane_core::schedule::{
    CallerTables, Calls, ControlLayout, FillContext, MAX_BATCH, Op, Operands, RelayTables, TrackOp, WindowId,
    copy_batches,
};
use sidelane_core::topology::{NodeMap, Paths, Route};

/// Requests of one rank to its engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CopyEngineWork {
    /// Copies to ranks of the same node, and to this rank itself of relayed rows.
    pub copies: u64,
    /// Bytes that these move.
    pub bytes: u64,
    /// Calls that enqueue them ([`copy_batches`]).
    pub batches: u64,
    /// Memory operations: words written and awaited.
    pub memory_ops: u64,
    /// Calls that enqueue these, of [`MAX_BATCH`] at most.
    pub memory_op_batches: u64,
    /// Bytes to other nodes.
    pub nic_bytes: u64,
}

/// A way of a dispatch, or of a call of slots, and what it asks of each rank's engines.
pub type NamedWork = (String, Vec<CopyEngineWork>);

/// Bytes of a slot's header, and of a choice in it.
const HEAD: u64 = 64;
const CHOICE: u64 = 8;

impl CopyEngineWork {
    /// Dispatch and combine of so many ranks of one node by slots of so many tokens, with rows of
    /// `row_bytes` to send and `return_bytes` to return.
    ///
    /// # Errors
    /// [`PlanError`] for sizes that no slots have.
    pub fn of_slots(
        ranks: u32,
        (tokens, top_k): (u32, u32),
        (row_bytes, return_bytes): (u64, u64),
    ) -> Result<Vec<NamedWork>, PlanError> {
        // Rows of all tokens and, in as many rows as it needs, a header of their choices.
        let header = HEAD + u64::from(tokens) * u64::from(top_k) * CHOICE;
        let slot_bytes = (header.div_ceil(row_bytes) + u64::from(tokens)) * row_bytes;
        let slots = Slots::new(ranks, slot_bytes, u64::from(tokens) * return_bytes)?;
        let calls = [("slots: dispatch", SlotCall::Dispatch), ("slots: combine", SlotCall::Combine)];
        let work =
            |call| (0..ranks).map(move |me| Ok(Self::of_stream(&StreamProgram::new(call, slots, me)?, me)));
        calls
            .map(|(name, call)| Ok((name.to_owned(), work(call).collect::<Result<_, PlanError>>()?)))
            .into_iter()
            .collect()
    }

    /// Every way of a dispatch of exact sizes: layouts, and routes with their blocks.
    ///
    /// # Errors
    /// [`PlanError`] for routings that cannot be placed.
    pub fn of_ways(dispatch: &RankDispatches<'_>) -> Result<Vec<NamedWork>, PlanError> {
        let several = dispatch.nodes.nodes() > 1;
        let mut ways = Vec::new();
        for layout in RowLayout::ALL {
            for (route, spans, how, is_there) in [
                (Route::Direct, false, "direct", true),
                (Route::Pxn, false, "pxn, token order", several),
                (Route::Pxn, true, "pxn, relay order", several && layout == RowLayout::RankMajor),
            ] {
                if is_there {
                    let work = Self::of_ranks(&RankDispatches { layout, route, spans, ..*dispatch })?;
                    ways.push((format!("{}, {how}", layout.name()), work));
                }
            }
        }
        Ok(ways)
    }
}

/// A dispatch of all ranks of a group.
#[derive(Clone, Copy, Debug)]
pub struct RankDispatches<'a> {
    /// Where experts live.
    pub map: &'a ExpertMap,
    /// Which ranks share a node.
    pub nodes: &'a NodeMap,
    /// Decisions of every rank.
    pub routings: &'a [Routing<'a>],
    /// Order of received rows.
    pub layout: RowLayout,
    /// Route of rows to other nodes.
    pub route: Route,
    /// Whether blocks lie in the order of their relays, who then copy spans.
    pub spans: bool,
    /// Bytes of a row that is sent.
    pub row_bytes: u64,
    /// Bytes of a returned row.
    pub return_bytes: u64,
}

impl CopyEngineWork {
    /// Of a dispatch, combine or release of slots.
    pub fn of_stream(program: &StreamProgram, me: u32) -> Self {
        Self::of_items(&program.stage().items, &program.operands(), me, |_| true)
    }

    /// Of the rows of a dispatch that is placed so, at a rank that relays `forward`.
    pub fn of_dispatch(at: &FillContext, layout: &DispatchLayout, forward: &RelayPlan) -> Self {
        let (paths, me) = (at.paths, at.paths.me());
        let near = |peer| paths.same_node(peer);
        let mut own = CallerTables::new(paths, at.chunks);
        own.rows(at, layout, false);
        let (row_bytes, calls) = (at.sizing.row_bytes, Calls::new(0));
        let rows = Operands { runs: &layout.runs, rows: &layout.rows, ..own.operands(calls, row_bytes) };
        let mut relayed = RelayTables::new(paths, at.chunks);
        relayed.forward(at, forward, false);
        let blocks =
            Operands { runs: &forward.runs, rows: &forward.rows, row_bytes, ..relayed.operands(calls) };
        let programs = RankPrograms::new(paths, at.chunks, false, Engines::default());
        let mut work = CopyEngineWork::default();
        for step in programs.own(CallKind::Dispatch, Relays::Inline).line(None) {
            // Entries and counts are the host's.
            let Action::Run(stage, part) = step.action else { continue };
            let operands = match (stage.tensor(), stage.operands()) {
                (StageTensor::Rows, _) => &rows,
                (_, StageOperands::Relayed) => &blocks,
                _ => continue,
            };
            work += Self::of_items(programs.stages.items(stage, part), operands, me, near);
        }
        work
    }

    /// Of a dispatch, at every rank, each placed as it would place itself.
    ///
    /// # Errors
    /// Every error of a routing.
    pub fn of_ranks(dispatch: &RankDispatches) -> Result<Vec<Self>, PlanError> {
        let &RankDispatches { map, nodes, routings, layout, route, spans, row_bytes, return_bytes } =
            dispatch;
        let top_k = routings.iter().map(Routing::top_k).max().unwrap_or(1);
        let tokens = routings.iter().map(Routing::tokens).max().unwrap_or(0);
        let bins = Bins::of_layout(layout, map, SumOrder::Expert, nodes);
        let metadata = RowMetadata::of(layout, ReceiveMode::Exact, spans);
        let words_out = metadata.words(top_k);
        let (return_words, partial_bytes, rank_sums) = (1, None, false);
        let sizing = RowSizes {
            row_bytes,
            return_bytes,
            words_out,
            return_words,
            partial_bytes,
            rank_sums,
            pulled_bytes: PulledSums::CHUNK_BYTES,
        };
        let paths = |me| Paths::new(nodes, route, me);
        let (paths_of_0, mode) = (paths(0), ReceiveMode::Exact);
        let chunks = Block::chunks_for_engines(u64::from(tokens) * row_bytes);
        let frame = PlanContext { bins: &bins, paths: paths_of_0, align: 1, chunks, sizing, mode };
        let (mut everyone, mut layouts) = (GroupRouting::default(), Vec::new());
        everyone.sort(&frame, top_k, |me, sorted| {
            let routing: &Routing = &routings[me as usize];
            sorted.fill(map, &bins, metadata, me, routing)
        })?;
        everyone.each(&frame, (top_k, tokens), |frame, known, _| {
            let RankRouting { sorted, crossing, counts, sizes } = known;
            if spans {
                RelaySorter::default().arrange(frame, (&mut *sorted, &mut *crossing), counts, sizes);
            }
            let mut layout = DispatchLayout::default();
            layout.fill(frame, (sorted, crossing), top_k, counts, sizes);
            layouts.push(layout);
        });
        let choices = u64::from(tokens) * u64::from(top_k);
        let control = ControlLayout::new(&paths_of_0, &bins, choices, sizing.metadata_bytes());
        let work = |me: u32| {
            let mut forward = RelayPlan::default();
            forward.spans = spans;
            let frame = PlanContext { paths: paths(me), ..frame };
            forward.know(&frame, false, |source, nth| layouts[source as usize].blocks[nth].clone());
            // NICs reach the devices.
            let (control, far) = (&control, WindowId::POOL);
            let at =
                FillContext { paths: paths(me), control, sizing, chunks, parity: 0, far, metadata: None };
            Self::of_dispatch(&at, &layouts[me as usize], &forward)
        };
        Ok((0..nodes.ranks()).map(work).collect())
    }

    /// Each figure of several ranks, made one.
    pub fn fold(ranks: &[Self], one: impl Fn(&mut dyn Iterator<Item = u64>) -> u64) -> Self {
        let of = |figure: fn(&Self) -> u64| one(&mut ranks.iter().map(figure));
        CopyEngineWork {
            copies: of(|work| work.copies),
            bytes: of(|work| work.bytes),
            batches: of(|work| work.batches),
            memory_ops: of(|work| work.memory_ops),
            memory_op_batches: of(|work| work.memory_op_batches),
            nic_bytes: of(|work| work.nic_bytes),
        }
    }

    /// Groups of consecutive operations of rank `me`. A group begins with the first put behind a
    /// wait.
    fn of_items(items: &[TrackOp], operands: &Operands, me: u32, near: impl Fn(u32) -> bool) -> Self {
        let (mut all, mut group, mut waited) = (CopyEngineWork::default(), CopyEngineWork::default(), false);
        for item in items {
            match item.op {
                Op::Put { to, operand } | Op::PutRows { to, operand } => {
                    let copies = operands.puts(to, operand).into_iter().filter_map(|effect| match effect {
                        Effect::Copy { from, to: bytes } if !bytes.range.is_empty() => {
                            (to != me || from.is_some()).then_some(bytes.range.end - bytes.range.start)
                        }
                        _ => None,
                    });
                    for bytes in copies {
                        if !near(to) {
                            group.nic_bytes += bytes;
                            continue;
                        }
                        if std::mem::take(&mut waited) {
                            all += std::mem::take(&mut group).enqueued();
                        }
                        group.copies += 1;
                        group.bytes += bytes;
                    }
                }
                // A NIC's signal goes with its rows.
                Op::Signal { to, .. } => group.memory_ops += u64::from(near(to)),
                Op::Wait { .. } => {
                    group.memory_ops += 1;
                    waited = true;
                }
                Op::Reduce { .. } => {}
            }
        }
        all += group.enqueued();
        all
    }

    /// One group, with the calls that it takes.
    fn enqueued(self) -> Self {
        let batches = copy_batches(self.copies as usize).count() as u64;
        let memory_op_batches = self.memory_ops.div_ceil(MAX_BATCH as u64);
        CopyEngineWork { batches, memory_op_batches, ..self }
    }
}

impl AddAssign for CopyEngineWork {
    fn add_assign(&mut self, other: CopyEngineWork) {
        self.copies += other.copies;
        self.bytes += other.bytes;
        self.batches += other.batches;
        self.memory_ops += other.memory_ops;
        self.memory_op_batches += other.memory_op_batches;
        self.nic_bytes += other.nic_bytes;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use sidelane_core::gate::{Pattern, synthetic};
    use sidelane_core::schedule::call_program::SlotCall;
    use sidelane_core::schedule::stream_program::Slots;
    use sidelane_core::schedule::{Flag, FlagValue, Operand, OperandId, PutSource, SpanCopy, WindowId};

    use super::*;

    /// A stage of rank 9 over spans of 16 bytes.
    fn work(ops: &[Op], near: impl Fn(u32) -> bool) -> CopyEngineWork {
        let from = PutSource::Window { owner: 9, window: WindowId::POOL };
        let span = SpanCopy { from, from_offset: 0, to: WindowId::POOL, to_offset: 0, len: 16 };
        let table = [Operand::Spans { first: 0, count: 1 }];
        let operands = Operands { table: &table, spans: &[span], ..Operands::default() };
        let items: Vec<_> = ops.iter().map(|&op| TrackOp { track: 0, op }).collect();
        CopyEngineWork::of_items(&items, &operands, 9, near)
    }

    fn put(to: u32) -> Op {
        Op::Put { to, operand: OperandId(0) }
    }

    fn signal(to: u32) -> Op {
        Op::Signal { to, of: 9, flag: Flag::Landed, level: FlagValue::Call }
    }

    fn wait(from: u32) -> Op {
        Op::Wait { from, flag: Flag::Landed, level: FlagValue::Call }
    }

    #[test]
    fn a_batch_ends_where_a_copy_has_to_wait() {
        let ops = [put(0), signal(0), put(1), signal(1), wait(0), wait(1), put(2), signal(2)];
        let CopyEngineWork { copies, bytes, batches, memory_ops, memory_op_batches, nic_bytes } =
            work(&ops, |_| true);
        let seen = (copies, bytes, batches, memory_ops, memory_op_batches, nic_bytes);
        assert_eq!(seen, (3, 48, 2, 5, 2, 0));
    }

    #[test]
    fn rows_to_other_nodes_are_a_nics_and_their_signal_too() {
        let ops = [put(0), signal(0), put(5), signal(5), wait(5)];
        let CopyEngineWork { copies, memory_ops, nic_bytes, .. } = work(&ops, |peer| peer < 5);
        assert_eq!((copies, memory_ops, nic_bytes), (1, 2, 16));
    }

    #[test]
    fn batches_of_copies_grow_and_a_list_holds_255_words() {
        let ops: Vec<Op> = (0..256).map(put).chain((0..255).map(signal)).collect();
        let CopyEngineWork { copies, batches, memory_ops, memory_op_batches, .. } = work(&ops, |_| true);
        assert_eq!((copies, batches, memory_ops, memory_op_batches), (256, 5, 255, 1));
    }

    #[test]
    fn slots_ask_for_a_copy_and_three_words_a_peer() {
        // The largest group that one list serves.
        let slots = Slots::new(86, 256, 256).unwrap();
        let work = CopyEngineWork::of_stream(&StreamProgram::new(SlotCall::Dispatch, slots, 3).unwrap(), 3);
        assert_eq!((work.copies, work.batches, work.bytes), (85, 3, 85 * 256));
        assert_eq!((work.memory_ops, work.memory_op_batches), (3 * 85, 1));
        let release = CopyEngineWork::of_stream(&StreamProgram::new(SlotCall::Release, slots, 3).unwrap(), 3);
        assert_eq!((release.copies, release.batches, release.memory_ops), (0, 0, 3 * 85));
    }

    /// Decisions of all ranks on nodes of these sizes.
    struct Decided {
        map: ExpertMap,
        nodes: NodeMap,
        routings: Vec<Routing<'static>>,
    }

    impl Decided {
        fn new(ranks_per_node: &[u32]) -> Self {
            let labels = (0..).zip(ranks_per_node).flat_map(|(node, &ranks)| vec![node; ranks as usize]);
            let nodes = NodeMap::from_labels(&labels.collect::<Vec<u32>>());
            let routing = |rank| synthetic(Pattern::Zipf(1.0), 24, 4, 50, 3, rank).unwrap();
            let map = ExpertMap::contiguous(24, nodes.ranks()).unwrap();
            Decided { map, routings: (0..nodes.ranks()).map(routing).collect(), nodes }
        }

        /// Where the rows of a token go: a rank for each choice, or each rank once.
        fn ranks_of(&self, layout: RowLayout, source: u32, token: u32) -> Vec<u32> {
            let experts = self.routings[source as usize].experts_of(token).iter();
            let slots = experts.filter_map(|&expert| self.map.slot_for(source, expert as u32));
            let rank =
                |slot| (0..self.nodes.ranks()).find(|&r| self.map.slots_of(r).contains(&slot)).unwrap();
            let ranks = slots.map(rank);
            match layout {
                RowLayout::ExpertMajor => ranks.collect(),
                RowLayout::RankMajor => ranks.collect::<BTreeSet<u32>>().into_iter().collect(),
                other => unreachable!("{other:?}"),
            }
        }

        /// Rows of the engines of a rank and of its NIC, counted token by token.
        fn rows(&self, layout: RowLayout, route: Route, me: u32) -> [u64; 2] {
            let (nodes, mut engines, mut nics) = (&self.nodes, 0, 0);
            for (source, token) in (0..nodes.ranks()).flat_map(|source| (0..50).map(move |t| (source, t))) {
                let (near, far): (Vec<u32>, Vec<u32>) =
                    self.ranks_of(layout, source, token).iter().partition(|&&rank| nodes.same_node(rank, me));
                let rail = |source| nodes.rail_peer(source, nodes.node_of(me)) == me;
                if source == me {
                    engines += near.iter().filter(|&&rank| rank != me).count();
                    nics += match route {
                        Route::Direct => far.len(),
                        Route::Pxn => {
                            far.iter().map(|&rank| nodes.node_of(rank)).collect::<BTreeSet<u32>>().len()
                        }
                        other => unreachable!("{other:?}"),
                    };
                } else if route == Route::Pxn && !nodes.same_node(source, me) && rail(source) {
                    engines += near.len();
                }
            }
            [engines as u64, nics as u64]
        }
    }

    #[test]
    fn bytes_are_those_of_a_count_token_by_token() {
        let ways = RowLayout::ALL.into_iter().flat_map(|layout| Route::ALL.map(|route| (layout, route)));
        let ways = ways.flat_map(|(layout, route)| {
            let spans = layout == RowLayout::RankMajor && route == Route::Pxn;
            [(layout, route, false), (layout, route, spans)]
        });
        let shapes: [&[u32]; 3] = [&[4], &[2, 2], &[3, 1, 2]];
        for (shape, (layout, route, spans)) in
            shapes.into_iter().flat_map(|shape| ways.clone().map(move |w| (shape, w)))
        {
            let decided = Decided::new(shape);
            let Decided { map, nodes, routings } = &decided;
            let bytes = 32;
            let dispatch = RankDispatches {
                map,
                nodes,
                routings,
                layout,
                route,
                spans,
                row_bytes: bytes,
                return_bytes: bytes,
            };
            for (me, work) in (0..).zip(CopyEngineWork::of_ranks(&dispatch).unwrap()) {
                let expected = decided.rows(layout, route, me).map(|rows| rows * bytes);
                let title = format!("{shape:?} {layout:?} {route:?} {spans} {me}");
                assert_eq!([work.bytes, work.nic_bytes], expected, "{title}");
                // A rank that is alone on its node has no work for engines.
                assert!(work.copies * bytes <= work.bytes, "{title}");
                assert_eq!(work.copies > 0, work.bytes > 0, "{title}");
            }
        }
    }
}
