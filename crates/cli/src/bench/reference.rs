//! Whether the arrived rows are right, bit by bit, by a reference that knows nothing of the
//! library's placement.
//!
//! The rows and places that every rank must see are computed from the routing of all ranks at once.
//! The library computes the same from sums of counts; none of that code is used here.

use half::{bf16, f16};
use sidelane::Element;
use sidelane::dtype::{Fp8RowShape, PartialDtype};
use sidelane::ep::{Handle, RowIndex};
use sidelane::error::PlanError;
use sidelane::gate::Routing;
use sidelane::plan::{ExpertMap, ReceiveMode, RowLayout, SumOrder};
use sidelane::rows::{Arithmetic, RowKernels, Simd};
use sidelane::topology::NodeMap;

use super::config::{Config, RowType};
use crate::routing::Router;

/// Rows that one rank should see.
pub struct Expected {
    /// Origin of each received row; `None` is a pad or an unused slot.
    rows: Vec<Option<Origin>>,
    /// Per row, or rank-major per row and choice: its weight.
    weights: Vec<f32>,
    /// Rank-major, per row and choice: its local expert, or -1.
    local: Vec<i32>,
    /// Per row: the experts that it is for, ascending.
    experts: Vec<Vec<u32>>,
    /// Which row in visible order each row is.
    visible: Vec<u32>,
    /// Which of this rank's choices have no room.
    dropped: Vec<bool>,
    /// Rows that each rank needs.
    required: Vec<u32>,
    /// This rank's choices; those that were dropped are -1.
    routing: Routing<'static>,
    map: ExpertMap,
    nodes: NodeMap,
    rank: u32,
    plain: Plain,
}

impl Expected {
    /// For one rank, from the routing of all.
    pub fn new(config: &Config, router: &Router, rank: u32) -> Result<Self, PlanError> {
        let placement = Placement::new(config, router, config.receive.mode())?;
        let (own, k) = (placement.routing(rank), config.top_k as usize);
        let (mut dropped, mut required) = (vec![false; own.experts().len()], Vec::new());
        let mut rows = Vec::new();
        for peer in 0..config.ranks() {
            let place = placement.at(peer, |row| {
                for (choice, _) in placement.stands_for(peer, row).filter(|_| row.source == rank) {
                    dropped[row.token as usize * k + choice as usize] = true;
                }
            });
            required.push(place.required);
            if peer == rank {
                rows = place.rows;
            }
        }
        let first = placement.map.slots_of(rank).start;
        let (mut weights, mut local, mut experts) = (Vec::new(), Vec::new(), Vec::new());
        for row in &rows {
            let choices: Vec<(u32, u32)> =
                row.iter().flat_map(|&row| placement.stands_for(rank, row)).collect();
            let weight = |choice: u32| {
                let Origin { source, token, .. } = row.unwrap_or_default();
                placement.routing(source).weights()[token as usize * k + choice as usize]
            };
            let mut ids: Vec<u32> = choices.iter().map(|&(_, slot)| placement.map.expert_of(slot)).collect();
            ids.sort_unstable();
            experts.push(ids);
            match config.layout {
                RowLayout::ExpertMajor => {
                    weights.push(choices.first().map_or(0.0, |&(choice, _)| weight(choice)));
                }
                RowLayout::RankMajor => {
                    let at = weights.len();
                    weights.resize(at + k, 0.0);
                    local.resize(at + k, -1);
                    for (choice, slot) in choices {
                        weights[at + choice as usize] = weight(choice);
                        local[at + choice as usize] = (slot - first) as i32;
                    }
                }
            }
        }
        let kept = own.experts().iter().zip(&dropped).map(|(&id, &dropped)| if dropped { -1 } else { id });
        let routing = Routing::new(config.top_k, kept.collect::<Vec<i32>>(), own.weights().to_vec())?;
        let (map, nodes) = (placement.map, config.node_map());
        let plain = Plain::new(config.dtype, config.hidden);
        let visible = (0..rows.len() as u32).collect();
        Ok(Expected {
            rows,
            weights,
            local,
            experts,
            visible,
            dropped,
            required,
            routing,
            map,
            nodes,
            rank,
            plain,
        })
    }

    /// Rows lie as the index says, or in visible order. An index that is no permutation will not
    /// match.
    pub fn arrange(&mut self, index: Option<&RowIndex>) {
        let plain: Vec<u32> = (0..self.rows.len() as u32).collect();
        let now = index.map_or(&plain[..], RowIndex::visible);
        if now == self.visible || now.len() != self.visible.len() {
            return;
        }
        let mut was = vec![0; plain.len()];
        self.visible.iter().zip(0..).for_each(|(&row, at)| was[row as usize] = at);
        let from: Vec<usize> = now.iter().map(|&row| was[row as usize]).collect();
        let words = self.weights.len() / from.len();
        self.rows = from.iter().map(|&at| self.rows[at]).collect();
        self.experts = from.iter().map(|&at| self.experts[at].clone()).collect();
        self.weights = from.iter().flat_map(|&at| self.weights[at * words..][..words].to_vec()).collect();
        self.local = from.iter().flat_map(|&at| self.local[at * words..][..words].to_vec()).collect();
        self.visible = now.to_vec();
    }

    /// Rows that should land here, pads counted.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Choices of this rank whose expert is on another node, and which have room.
    pub fn crossing_choices(&self) -> u64 {
        let ids = self.routing.experts().iter().filter_map(|&id| u32::try_from(id).ok());
        let far =
            |&id: &u32| !self.nodes.same_node(self.rank, self.map.rank_of(self.map.slot_for(self.rank, id)));
        ids.filter(far).count() as u64
    }

    /// Whether a handle says which choices have no room, and how many rows each rank needs.
    pub fn right_handle(&self, handle: &Handle) -> bool {
        handle.dropped() == self.dropped && handle.required_rows() == self.required
    }

    /// Number of dispatched rows that are bitwise right, with their metadata.
    pub fn right_rows<E: Number>(&self, config: &Config, rows: &[u8], handle: &Handle) -> u64 {
        let (weights, local) = (handle.row_weights(), handle.row_experts());
        if weights.len() != self.weights.len() || local.len() != self.local.len() {
            return 0;
        }
        let words = weights.len() / self.rows.len().max(1);
        let right_notes = |row: usize| {
            let notes = row * words..(row + 1) * words;
            let bits = |weights: &[f32]| weights.iter().map(|weight| weight.to_bits()).collect::<Vec<_>>();
            let experts = if local.is_empty() { 0..0 } else { notes.clone() };
            bits(&weights[notes.clone()]) == bits(&self.weights[notes])
                && local[experts.clone()] == self.local[experts]
        };
        self.count(
            config,
            rows,
            config.sent_bytes(),
            |row: &[E]| self.plain.sent(row).unwrap_or_default(),
            right_notes,
        )
    }

    /// Number of gradients of rows that are bitwise right: those of the tokens are the tokens.
    pub fn right_gradients<E: Number>(&self, config: &Config, rows: &[E]) -> u64 {
        let same = |row: &[E]| bytemuck::cast_slice(row).to_vec();
        self.count(config, bytemuck::cast_slice(rows), config.row_bytes(), same, |_| true)
    }

    /// Rows that are what `sent` makes of their tokens, or zero; and `also` right.
    fn count<E: Number>(
        &self,
        config: &Config,
        rows: &[u8],
        row_bytes: u64,
        sent: impl Fn(&[E]) -> Vec<u8>,
        also: impl Fn(usize) -> bool,
    ) -> u64 {
        let row_bytes = row_bytes as usize;
        if rows.len() != self.rows.len() * row_bytes {
            return 0;
        }
        let mut x: Vec<E> = Vec::with_capacity(config.hidden as usize);
        let mut right = 0;
        for (at, (origin, seen)) in self.rows.iter().zip(rows.chunks_exact(row_bytes)).enumerate() {
            x.clear();
            let same = match *origin {
                Some(Origin { source, token, .. }) => {
                    fill(&mut x, config.seed, source, token, config.hidden);
                    sent(&x) == seen
                }
                None => seen.iter().all(|&byte| byte == 0),
            };
            right += u64::from(same && also(at));
        }
        right
    }

    /// Applies the experts of this rank to rows that were dispatched. Rank-major, their outputs of
    /// a row are added up from +0 in `f32` by ascending expert, and rounded once. Pads become NaN:
    /// no call may read them.
    pub fn experts<E: Number>(&self, config: &Config, rows: &[u8]) -> Result<Vec<E>, PlanError> {
        let mut y = self.plain.seen::<E>(rows)?;
        for (row, ids) in y.chunks_exact_mut(config.hidden as usize).zip(&self.experts) {
            row.iter_mut().for_each(|x| *x = if ids.is_empty() { E::of(f32::NAN) } else { made(ids, *x) });
        }
        Ok(y)
    }

    /// Number of tokens whose sum is bitwise right.
    pub fn right_tokens<E: Number>(&self, config: &Config, out: &[E]) -> u64 {
        let mut x: Vec<E> = Vec::with_capacity(config.hidden as usize);
        let right = out.chunks_exact(config.hidden as usize).zip(0u32..).filter(|(seen, token)| {
            x.clear();
            fill(&mut x, config.seed, self.rank, *token, config.hidden);
            let terms = self.terms(config, *token);
            let taken = self.plain.sent(&x).and_then(|sent| self.plain.seen::<E>(&sent)).unwrap_or_default();
            let sum: Vec<E> = taken.iter().map(|&x| reference(&terms, config.partials(), x)).collect();
            same(&sum, seen)
        });
        right.count() as u64
    }

    /// Gradients of the weights of received rows, distinguishable by their routing weights.
    pub fn weight_gradients(&self) -> Vec<f32> {
        self.weights.iter().map(|weight| weight * 2.0).collect()
    }

    /// Whether these returned: twice each weight, zero where a choice was dropped.
    pub fn right_weights(&self, home: &[f32]) -> bool {
        let pairs = self.routing.experts().iter().zip(self.routing.weights());
        home.len() == self.routing.experts().len()
            && home
                .iter()
                .zip(pairs)
                .all(|(home, (&id, weight))| *home == if id < 0 { 0.0 } else { weight * 2.0 })
    }

    /// The rows of a token in order of addition: groups first, then their sums.
    fn terms(&self, config: &Config, token: u32) -> Vec<Term> {
        let chosen = self.routing.experts_of(token).iter().filter_map(|&id| u32::try_from(id).ok());
        let mut choices: Vec<(u32, u32, u32)> = chosen
            .map(|id| {
                let rank = self.map.rank_of(self.map.slot_for(self.rank, id));
                let by_rank = config.layout == RowLayout::RankMajor || config.sum_order != SumOrder::Expert;
                let group = match config.sum_order {
                    SumOrder::Expert => 0,
                    SumOrder::Rank => rank,
                    SumOrder::Node => self.nodes.node_of(rank),
                };
                (group, if by_rank { rank } else { 0 }, id)
            })
            .collect();
        choices.sort_unstable();
        let one_row =
            |a: &(u32, u32, u32), b: &(u32, u32, u32)| config.layout == RowLayout::RankMajor && a.1 == b.1;
        let rows = choices.chunk_by(one_row);
        rows.map(|row| Term { group: row[0].0, experts: row.iter().map(|choice| choice.2).collect() })
            .collect()
    }
}

/// One row among those that are added up.
struct Term {
    group: u32,
    /// The experts that made it.
    experts: Vec<u32>,
}

/// What experts make of an element of one row.
fn made<E: Number>(experts: &[u32], x: E) -> E {
    E::of(experts.iter().fold(0.0, |sum, &id| sum + expert(x, id).value()))
}

/// From +0 in `f32`: groups first, each rounded to the type of partial sums, then their sums; one
/// rounding at the end.
fn reference<E: Number>(terms: &[Term], partials: Option<PartialDtype>, x: E) -> E {
    let groups = terms.chunk_by(|a, b| a.group == b.group);
    let sums = groups.map(|group| group.iter().fold(0.0, |sum, row| sum + made(&row.experts, x).value()));
    let rounded = sums.map(|sum| match partials {
        Some(PartialDtype::Bf16) => bf16::from_f32(sum).to_f32(),
        Some(PartialDtype::F32) | None => sum,
    });
    E::of(rounded.fold(0.0, |total, sum| total + sum))
}

fn same<E: Number>(a: &[E], b: &[E]) -> bool {
    bytemuck::cast_slice::<E, u8>(a) == bytemuck::cast_slice::<E, u8>(b)
}

/// What becomes of rows on their way to an expert, by the plain kernels whatever the library takes.
pub struct Plain {
    record: Option<Fp8RowShape>,
    kernels: RowKernels,
}

impl Plain {
    /// Of rows of `hidden` elements.
    pub fn new(rows: RowType, hidden: u32) -> Self {
        let simd = Simd::named("portable").unwrap_or_else(|_| Simd::best());
        Plain { record: rows.record(hidden), kernels: RowKernels::new(simd) }
    }

    /// These rows as they are dispatched.
    pub fn sent<E: Number>(&self, rows: &[E]) -> Result<Vec<u8>, PlanError> {
        let bytes: &[u8] = bytemuck::cast_slice(rows);
        let Some(shape) = self.record else { return Ok(bytes.to_vec()) };
        let mut records = vec![0; rows.len() / shape.hidden() * shape.bytes()];
        self.kernels.quantise(Arithmetic::try_from(E::DTYPE)?, shape, bytes, &mut records)?;
        Ok(records)
    }

    /// Rows that were dispatched, as an expert takes them.
    pub fn seen<E: Number>(&self, sent: &[u8]) -> Result<Vec<E>, PlanError> {
        let Some(shape) = self.record else { return Ok(bytemuck::allocation::pod_collect_to_vec(sent)) };
        let mut rows = vec![E::of(0.0); sent.len() / shape.bytes() * shape.hidden()];
        let bytes = bytemuck::cast_slice_mut(&mut rows);
        self.kernels.dequantise(Arithmetic::try_from(E::DTYPE)?, shape, sent, bytes)?;
        Ok(rows)
    }
}

/// Source of a row's token, and the first choice of the token that it stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    pub source: u32,
    pub token: u32,
    pub choice: u32,
}

/// The rows of one rank.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// Origin of each row; `None` is a pad or an unused slot.
    pub rows: Vec<Option<Origin>>,
    /// Rows that would be needed, pads and unused slots counted.
    pub required: u32,
    /// Rows of each source in each bin, at most.
    pub most: u32,
}

/// The routing of all, and what decides where rows go.
pub struct Placement {
    pub map: ExpertMap,
    routings: Vec<Routing<'static>>,
    layout: RowLayout,
    align: usize,
    mode: ReceiveMode,
}

impl Placement {
    /// Computes the routing of all ranks.
    pub fn new(config: &Config, router: &Router, mode: ReceiveMode) -> Result<Self, PlanError> {
        let ranks = 0..config.ranks();
        Ok(Placement {
            map: ExpertMap::contiguous(config.experts, config.ranks())?,
            routings: ranks.map(|rank| router.routing(config.share(), rank)).collect::<Result<_, _>>()?,
            layout: config.layout,
            align: config.align as usize,
            mode,
        })
    }

    pub fn ranks(&self) -> u32 {
        self.routings.len() as u32
    }

    /// The decisions of a rank.
    pub fn routing(&self, rank: u32) -> &Routing<'static> {
        &self.routings[rank as usize]
    }

    /// The choices of a token that lie on `rank`, with their expert slots.
    fn choices_on(&self, rank: u32, source: u32, token: u32) -> impl Iterator<Item = (u32, u32)> {
        let slots = self.map.slots_of(rank);
        let ids = (0..).zip(self.routings[source as usize].experts_of(token));
        ids.filter_map(move |(choice, &id)| {
            let slot = self.map.slot_for(source, u32::try_from(id).ok()?);
            slots.contains(&slot).then_some((choice, slot))
        })
    }

    /// The choices that a row on `rank` stands for, with their expert slots.
    fn stands_for(&self, rank: u32, row: Origin) -> impl Iterator<Item = (u32, u32)> {
        let all = self.layout == RowLayout::RankMajor;
        let choices = self.choices_on(rank, row.source, row.token);
        choices.filter(move |&(choice, _)| all || choice == row.choice)
    }

    /// The rows of a rank; `lost` is called for rows without room.
    pub fn at(&self, rank: u32, mut lost: impl FnMut(Origin)) -> Place {
        let slots = self.map.slots_of(rank);
        // Rank-major there is one bin, and one row stands for all choices of a token.
        let (bins, rows_per_token) = match self.layout {
            RowLayout::ExpertMajor => (slots.len(), usize::MAX),
            RowLayout::RankMajor => (1, 1),
        };
        let mut segments: Vec<Vec<Option<Origin>>> = vec![Vec::new(); bins];
        let mut most = 0;
        for (source, routing) in (0u32..).zip(&self.routings) {
            let before: Vec<usize> = segments.iter().map(Vec::len).collect();
            for token in 0..routing.tokens() {
                for (choice, slot) in self.choices_on(rank, source, token).take(rows_per_token) {
                    let bin = if bins == 1 { 0 } else { (slot - slots.start) as usize };
                    segments[bin].push(Some(Origin { source, token, choice }));
                }
            }
            for (segment, before) in segments.iter_mut().zip(before) {
                most = most.max((segment.len() - before) as u32);
                if let Some(room) = self.mode.slots() {
                    let end = before + room as usize;
                    segment.drain(end.min(segment.len())..).flatten().for_each(&mut lost);
                    segment.resize(end, None);
                }
            }
        }
        for segment in &mut segments {
            segment.resize(segment.len().next_multiple_of(self.align), None);
        }
        let mut rows = segments.concat();
        let required = rows.len() as u32;
        let room = self.mode.budget().unwrap_or(required).min(required);
        rows.drain(room as usize..).flatten().for_each(lost);
        Place { rows, required, most }
    }
}

/// An element type with arithmetic in `f32`, rounded once.
pub trait Number: Element + PartialEq {
    fn of(value: f32) -> Self;
    fn value(self) -> f32;
}

impl Number for f32 {
    fn of(value: f32) -> Self {
        value
    }
    fn value(self) -> f32 {
        self
    }
}

impl Number for bf16 {
    fn of(value: f32) -> Self {
        bf16::from_f32(value)
    }
    fn value(self) -> f32 {
        self.to_f32()
    }
}

impl Number for f16 {
    fn of(value: f32) -> Self {
        f16::from_f32(value)
    }
    fn value(self) -> f32 {
        self.to_f32()
    }
}

/// The row of a token, appended to `row`: values in [-2, 2) that differ in every rank, token and
/// column.
pub fn fill<E: Number>(row: &mut Vec<E>, seed: u64, rank: u32, token: u32, hidden: u32) {
    let mut state = mix(seed ^ u64::from(rank) << 40 ^ u64::from(token));
    row.extend((0..hidden).map(|_| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        E::of(((mix(state) >> 52) as f32 - 2048.0) / 1024.0)
    }));
}

/// Output of expert `expert` for an element: different enough to distinguish experts in a sum.
pub fn expert<E: Number>(element: E, expert: u32) -> E {
    E::of(element.value() * (1.0 + expert as f32 / 64.0))
}

/// The finaliser of splitmix64.
fn mix(mut z: u64) -> u64 {
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_seen_as_they_are_unless_they_are_records() {
        let row: Vec<bf16> = (0..32).map(|i| bf16::from_f32(i as f32 * 1.07)).collect();
        let seen = |rows| {
            let plain = Plain::new(rows, 32);
            plain.seen::<bf16>(&plain.sent(&row).unwrap()).unwrap()
        };
        assert_eq!(seen(RowType::Bf16), row);
        assert_ne!(seen(RowType::Fp8), row, "e4m3 has three bits of a fraction");
        assert_eq!((seen(RowType::Fp8)[0], seen(RowType::Fp8).len()), (bf16::ZERO, 32));
    }

    #[test]
    fn partial_sums_are_rounded_before_they_are_added() {
        let term = |(group, expert)| Term { group, experts: vec![expert] };
        let (terms, x) = ([(0, 1), (0, 2), (1, 3)].map(term), 1.3f32);
        let [a, b, c] = [1, 2, 3].map(|id| expert(x, id));
        let round = |sum| bf16::from_f32(sum).to_f32();
        let (wide, narrow) = ((a + b) + c, round(a + b) + round(c));
        assert_eq!(reference(&terms, Some(PartialDtype::F32), x), wide);
        assert_eq!(reference(&terms, Some(PartialDtype::Bf16), x), narrow);
        assert_ne!(wide, narrow);
    }

    #[test]
    fn what_experts_of_a_rank_make_of_a_row_is_rounded_to_one_row() {
        let term = |experts: &[u32]| Term { group: 0, experts: experts.to_vec() };
        let (by_rank, by_expert) = ([term(&[1, 2]), term(&[3])], [1, 2, 3].map(|id| term(&[id])));
        let mut differ = 0;
        for x in (0..256).map(|i| bf16::from_f32(i as f32 / 128.0)) {
            let [a, b, c] = [1, 2, 3].map(|id| expert(x, id).value());
            let round = bf16::from_f32;
            let rows = reference(&by_rank, None, x);
            assert_eq!(rows, round(round(a + b).value() + c));
            differ += u32::from(rows != reference(&by_expert, None, x));
        }
        assert!(differ > 0, "the bits of the two layouts are not the same");
    }

    /// Two ranks of two experts; two tokens each, of two choices.
    fn placement(layout: RowLayout, align: usize, mode: ReceiveMode) -> Placement {
        let routing = |ids: [i32; 4]| Routing::new(2, ids.to_vec(), vec![0.5; 4]).unwrap();
        let routings = vec![routing([0, 1, 1, 3]), routing([1, -1, 2, 0])];
        Placement { map: ExpertMap::contiguous(4, 2).unwrap(), routings, layout, align, mode }
    }

    /// Source, token, choice.
    type Row = (u32, u32, u32);

    /// The rows of rank 0, and those that were lost.
    fn rows(placement: &Placement) -> (Vec<Option<Row>>, Vec<Row>) {
        let of = |row: Origin| (row.source, row.token, row.choice);
        let mut lost = Vec::new();
        let place = placement.at(0, |row| lost.push(of(row)));
        (place.rows.into_iter().map(|row| row.map(of)).collect(), lost)
    }

    #[test]
    fn rows_lie_by_expert_or_by_source() {
        let (seen, _) = rows(&placement(RowLayout::ExpertMajor, 3, ReceiveMode::Exact));
        let [a, b, c, d, e] = [(0, 0, 0), (1, 1, 1), (0, 0, 1), (0, 1, 0), (1, 0, 0)].map(Some);
        assert_eq!(seen, [a, b, None, c, d, e]);
        let by_rank = placement(RowLayout::RankMajor, 1, ReceiveMode::Exact);
        assert_eq!(rows(&by_rank).0, [a, d, e, b]);
        let both = by_rank.stands_for(0, Origin::default()).collect::<Vec<_>>();
        assert_eq!(both, [(0, 0), (1, 1)]);
    }

    #[test]
    fn what_has_no_room_is_lost() {
        let overflow = sidelane::plan::Overflow::Drop;
        let (seen, lost) =
            rows(&placement(RowLayout::ExpertMajor, 1, ReceiveMode::Budget { rows: 3, overflow }));
        assert_eq!((seen.len(), lost), (3, vec![(0, 1, 0), (1, 0, 0)]));
        let slots = placement(RowLayout::ExpertMajor, 1, ReceiveMode::Slots { rows: 1, overflow });
        let (seen, lost) = rows(&slots);
        assert_eq!(seen, [(0, 0, 0), (1, 1, 1), (0, 0, 1), (1, 0, 0)].map(Some));
        assert_eq!((lost, slots.at(0, drop).most), (vec![(0, 1, 0)], 2));
    }

    #[test]
    fn rows_of_different_tokens_and_ranks_differ_and_repeat() {
        let row = |rank, token| {
            let mut row: Vec<f32> = Vec::new();
            fill(&mut row, 7, rank, token, 64);
            row
        };
        assert_eq!(row(1, 2), row(1, 2));
        assert_ne!(row(1, 2), row(2, 1));
        assert!(row(0, 0).iter().all(|x| (-2.0..2.0).contains(x)));
    }
}
