//! The naive reference: results of all calls of a layer, computed from the routing of all ranks at
//! once.
//!
//! It shares no code with placement: no counts, no prefixes, no bins. Tests and the program compare
//! calls with it, bit for bit.
//!
//! ```text
//!   Case, Tokens of all ranks --Visible--> row of each choice
//!                                 --Reference--> rows, metadata, sums, gradients
//! ```

use std::collections::HashMap;

use half::{bf16, f16};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sidelane_core::dtype::{Element, PartialDtype};
use sidelane_core::plan::{ExpertMap, Overflow, ReceiveMode, RowLayout, Strategy, SumOrder};
use sidelane_core::topology::{NodeMap, Route};

/// Rounding to an element type.
pub trait To<E> {
    /// The nearest value.
    fn to(self) -> E;
}

impl To<f32> for f32 {
    fn to(self) -> f32 {
        self
    }
}

impl To<bf16> for f32 {
    fn to(self) -> bf16 {
        bf16::from_f32(self)
    }
}

impl To<f16> for f32 {
    fn to(self) -> f16 {
        f16::from_f32(self)
    }
}

impl To<u8> for f32 {
    fn to(self) -> u8 {
        self.to_bits() as u8
    }
}

/// An element type that is summed.
pub trait Real: Element + Into<f32> {
    /// The nearest value.
    fn of(value: f32) -> Self;
}

impl<E: Element + Into<f32>> Real for E
where
    f32: To<E>,
{
    fn of(value: f32) -> Self {
        value.to()
    }
}

/// One rank's input.
#[derive(Clone, Debug)]
pub struct Tokens<E> {
    /// Rows, `[tokens, hidden]`.
    pub x: Vec<E>,
    /// Chosen experts, `[tokens, top_k]`; -1 is dropped.
    pub ids: Vec<i32>,
    /// Weights of the choices.
    pub weights: Vec<f32>,
}

/// Random tokens with distinct experts; one choice in eight is dropped.
pub fn tokens<E: Element>(seed: u64, count: u32, hidden: usize, top_k: u32, experts: u32) -> Tokens<E>
where
    f32: To<E>,
{
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let x = (0..count as usize * hidden).map(|_| (rng.random::<f32>() * 4.0 - 2.0).to()).collect();
    let mut ids = Vec::new();
    for _ in 0..count {
        let mut all: Vec<i32> = (0..experts as i32).collect();
        for k in 0..top_k as usize {
            let pick = rng.random_range(k..all.len());
            all.swap(k, pick);
            ids.push(if rng.next_u32() % 8 == 0 { -1 } else { all[k] });
        }
    }
    let weights = ids.iter().map(|_| rng.random::<f32>()).collect();
    Tokens { x, ids, weights }
}

/// Element of row `row` at rank `rank` of the tensor with this number: any function of them.
fn element<E: Real>(tensor: u32, rank: usize, row: usize, column: usize) -> E {
    let mixed = [rank as u32, row as u32, column as u32]
        .iter()
        .fold(tensor.wrapping_mul(0x9e37_79b9) ^ 0x55, |hash, &n| {
            (hash ^ n).wrapping_mul(0x85eb_ca6b).rotate_left(13)
        });
    E::of((mixed >> 8) as f32 / (1 << 22) as f32 - 2.0)
}

/// `<a, b>` as documented: 16 lanes of rounded products, folded by halves.
pub fn dot<E: Real>(a: &[E], b: &[E]) -> f32 {
    let mut lanes = [0.0f32; 16];
    for (column, (&a, &b)) in a.iter().zip(b).enumerate() {
        lanes[column % 16] += a.into() * b.into();
    }
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
    }
    lanes[0]
}

/// Inputs of all ranks, and the results that follow.
#[derive(Clone, Debug)]
pub struct Reference<E> {
    /// Settings.
    pub case: Case,
    /// Input of each rank.
    pub all: Vec<Tokens<E>>,
    /// Expert ids of each rank.
    pub ids: Vec<Vec<i32>>,
    /// Places of all rows.
    pub seen: Visible,
}

impl<E: Real> Reference<E> {
    /// Rows that the largest bin of a rank gets from one source: the slots that have room for all.
    pub fn most_slots(&self) -> u32 {
        let mut slots = HashMap::new();
        for (rank, rows) in self.seen.rows.iter().enumerate() {
            for row in rows.iter().flatten() {
                let bin = (!self.case.layout.is_per_rank()).then(|| self.ids[row.source][row.choices[0]]);
                *slots.entry((rank, row.source, bin)).or_insert(0) += 1;
            }
        }
        slots.into_values().max().unwrap_or(0)
    }

    /// Random tokens, others for each seed.
    pub fn seeded(case: &Case, seed: u64) -> Self {
        let of_rank = |(seed, &count)| {
            let drawn = tokens::<f32>(seed, count, case.hidden, case.top_k, case.map.experts());
            Tokens { x: drawn.x.into_iter().map(E::of).collect(), ids: drawn.ids, weights: drawn.weights }
        };
        Self::of(case, (seed..).zip(&case.counts).map(of_rank).collect())
    }

    /// These tokens.
    pub fn of(case: &Case, all: Vec<Tokens<E>>) -> Self {
        let ids: Vec<Vec<i32>> = all.iter().map(|tokens| tokens.ids.clone()).collect();
        let seen = Visible::new(case, &ids);
        Reference { case: case.clone(), all, ids, seen }
    }

    /// Words of metadata of a row, and words per row that return to its choices.
    pub fn words(&self) -> usize {
        if self.case.layout == RowLayout::RankMajor { self.case.top_k as usize } else { 1 }
    }

    /// One row at a rank of the tensor with this number.
    pub fn row(&self, number: u32, rank: usize, row: usize) -> Vec<E> {
        (0..self.case.hidden).map(|column| element(number, rank, row, column)).collect()
    }

    /// So many rows at a rank of the tensor with this number.
    pub fn tensor(&self, number: u32, rank: usize, rows: usize) -> Vec<E> {
        (0..rows).flat_map(|row| self.row(number, rank, row)).collect()
    }

    /// The tokens of a rank in the tensor with this number.
    pub fn sent(&self, number: u32, rank: usize) -> Vec<E> {
        self.tensor(number, rank, self.case.counts[rank] as usize)
    }

    /// Rows that land at a rank, in visible order, where each rank sends these tokens. Pads are 0.
    pub fn rows(&self, me: usize, sent: impl Fn(usize) -> Vec<E>) -> Vec<E> {
        let (hidden, sent) = (self.case.hidden, (0..self.all.len()).map(sent).collect::<Vec<_>>());
        let zeros = vec![E::zeroed(); hidden];
        let of = |row: &Option<Row>| match row {
            Some(Row { source, token, .. }) => sent[*source][token * hidden..][..hidden].to_vec(),
            None => zeros.clone(),
        };
        self.seen.rows[me].iter().flat_map(of).collect()
    }

    /// Metadata of the rows of a rank: weights and, rank-major, local experts.
    pub fn metadata(&self, me: usize) -> (Vec<f32>, Vec<i32>) {
        let (mut weights, mut experts) = (Vec::new(), Vec::new());
        for (at, row) in self.seen.rows[me].iter().enumerate() {
            let weight = |choice: usize| row.as_ref().map_or(0.0, |row| self.all[row.source].weights[choice]);
            let choices = row.as_ref().map_or(&[][..], |row| &row.choices);
            match self.case.layout {
                RowLayout::ExpertMajor => weights.push(choices.first().map_or(0.0, |&choice| weight(choice))),
                RowLayout::RankMajor => {
                    let mut of_row = vec![0.0; self.words()];
                    choices.iter().for_each(|&choice| of_row[choice % self.words()] = weight(choice));
                    weights.extend(of_row);
                    experts.extend(self.seen.local_experts(&self.case, &self.ids, me, at));
                }
                other => unknown(other),
            }
        }
        (weights, experts)
    }

    /// Weight of a rank's choices that were dropped.
    pub fn dropped_weight(&self, me: usize) -> f64 {
        let lost = self.all[me].weights.iter().zip(&self.seen.dropped[me]).filter(|(_, lost)| **lost);
        lost.fold(0.0, |sum, (&weight, _)| sum + f64::from(weight))
    }

    /// Outputs of a rank's experts: the tensor with this number, NaN where no sum may read.
    pub fn outputs(&self, me: usize, number: u32) -> Vec<E> {
        let mut y = self.tensor(number, me, self.seen.rows[me].len());
        for (row, y) in self.seen.rows[me].iter().zip(y.chunks_exact_mut(self.case.hidden)) {
            if row.is_none() {
                y.fill(E::of(f32::NAN));
            }
        }
        y
    }

    /// Outputs of all ranks, summed for the tokens of this one.
    pub fn sums(&self, me: usize, number: u32, weighted: bool) -> Vec<E> {
        self.sums_of(me, weighted, |rank, row, column| element::<E>(number, rank, row, column).into())
    }

    /// Sums of rows whose elements are `y(rank, row, column)`: from +0 in f32, in the order of the
    /// sum, partials rounded to their type, one rounding at the end.
    pub fn sums_of(&self, me: usize, weighted: bool, y: impl Fn(usize, usize, usize) -> f32) -> Vec<E> {
        let (case, mine) = (&self.case, &self.all[me]);
        let mut out = Vec::new();
        for token in 0..case.counts[me] as usize {
            let partials = self.seen.terms(case, &self.ids, me, token);
            out.extend((0..case.hidden).map(|column| -> E {
                let mut total = 0.0f32;
                for terms in &partials {
                    let mut partial = 0.0f32;
                    for &(rank, row, choice) in terms {
                        let y = y(rank, row, column);
                        partial += if weighted { mine.weights[choice] * y } else { y };
                    }
                    total += match case.wire {
                        PartialDtype::Bf16 => bf16::from_f32(partial).to_f32(),
                        PartialDtype::F32 => partial,
                        other => unknown(other),
                    };
                }
                E::of(total)
            }));
        }
        out
    }

    /// One word per choice of a rank: `of(rank, row, choice)`, 0 where it has no row.
    fn of_choices(&self, me: usize, of: impl Fn(usize, usize, usize) -> f32) -> Vec<f32> {
        let k = self.case.top_k as usize;
        let word = |choice| {
            self.seen.place_of(me, choice / k, choice).map_or(0.0, |(rank, row)| of(rank, row, choice))
        };
        (0..self.ids[me].len()).map(word).collect()
    }

    /// Gradients of the weights of a rank's rows: words of the tensor with this number.
    pub fn row_words(&self, me: usize, number: u32) -> Vec<f32> {
        let of_row = |row| (0..self.words()).map(move |nth| element::<f32>(number, me, row, nth));
        (0..self.seen.rows[me].len()).flat_map(of_row).collect()
    }

    /// The same words, back at the choices of a rank.
    pub fn returned_words(&self, me: usize, number: u32) -> Vec<f32> {
        self.of_choices(me, |rank, row, choice| element::<f32>(number, rank, row, choice % self.words()))
    }

    /// Gradients of the outputs of a weighted combine at a rank, where token gradients are the
    /// tensor with this number.
    pub fn weighted_rows(&self, me: usize, gradients: u32) -> Vec<E> {
        let weights = self.metadata(me).0;
        let rows = self.rows(me, |rank| self.sent(gradients, rank));
        let of_row = |(row, weight): (&[E], f32)| -> Vec<E> {
            row.iter().map(|&g| E::of(weight * g.into())).collect()
        };
        rows.chunks_exact(self.case.hidden).zip(weights).flat_map(of_row).collect()
    }

    /// Gradients of the weights of a weighted combine: `<y, g>` of these two tensors.
    pub fn products(&self, me: usize, outputs: u32, gradients: u32) -> Vec<f32> {
        let (hidden, k, sent) = (self.case.hidden, self.case.top_k as usize, self.sent(gradients, me));
        self.of_choices(me, |rank, row, choice| {
            dot(&self.row(outputs, rank, row), &sent[choice / k * hidden..][..hidden])
        })
    }
}

/// Inputs of a dispatch.
#[derive(Clone, Debug)]
pub struct Case {
    /// Node of each rank.
    pub nodes: Vec<u32>,
    /// Tokens of each rank.
    pub counts: Vec<u32>,
    /// Places of experts.
    pub map: ExpertMap,
    /// Ranks that take part: true for an active one.
    pub active: Vec<bool>,
    /// Choices of a token.
    pub top_k: u32,
    /// Elements of a row.
    pub hidden: usize,
    /// Rows to a multiple of which segments are padded.
    pub align: u32,
    /// Order of rows.
    pub layout: RowLayout,
    /// Receive memory.
    pub mode: ReceiveMode,
    /// Route between nodes.
    pub route: Route,
    /// Order of sums.
    pub order: SumOrder,
    /// Type of partial sums.
    pub wire: PartialDtype,
    /// Whether a combine multiplies rows with their weights.
    pub weighted: bool,
    /// Whether relays copy spans: then rows land in another order than the visible one, and an
    /// index says in which.
    pub spans: bool,
    /// Strategy of a dispatch.
    pub strategy: Strategy,
}

impl Case {
    /// Experts in blocks; everything else as the builder has it.
    pub fn new(nodes: &[u32], counts: &[u32], experts: u32, top_k: u32) -> Case {
        Case {
            nodes: nodes.to_vec(),
            counts: counts.to_vec(),
            map: ExpertMap::contiguous(experts, nodes.len() as u32).unwrap(),
            active: vec![true; nodes.len()],
            top_k,
            hidden: 24,
            align: 1,
            layout: RowLayout::ExpertMajor,
            mode: ReceiveMode::Exact,
            route: Route::Direct,
            order: SumOrder::Expert,
            wire: PartialDtype::F32,
            weighted: false,
            spans: false,
            strategy: Strategy::AllToAll,
        }
    }

    /// The most tokens of a rank.
    pub fn max_tokens(&self) -> u32 {
        self.counts.iter().copied().max().unwrap_or(0)
    }
}

/// A row: its token, and the choices, of `[tokens, top_k]`, that it stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Rank of the token.
    pub source: usize,
    /// The token there.
    pub token: usize,
    /// The choices.
    pub choices: Vec<usize>,
}

/// One dispatch, as all ranks see it.
#[derive(Clone, Debug)]
pub struct Visible {
    /// Per rank: its rows in visible order; `None` is a pad or an unused slot.
    pub rows: Vec<Vec<Option<Row>>>,
    /// Per rank: which of its choices had no room, or no active rank.
    pub dropped: Vec<Vec<bool>>,
    /// Per rank: rows that it needs, pads counted.
    pub required: Vec<u32>,
    /// Per rank and local expert: rows that chose it.
    pub per_expert: Vec<Vec<i64>>,
    /// Per rank and segment: rows, pads and unused slots counted.
    pub padded: Vec<Vec<i64>>,
    /// Per rank and token: (rank, row) of the rows that stand for it.
    places: Vec<Vec<Vec<(usize, usize)>>>,
}

impl Visible {
    /// From the expert ids of all ranks.
    pub fn new(case: &Case, ids: &[Vec<i32>]) -> Visible {
        let ranks = case.nodes.len();
        let tokens = |ids: &Vec<i32>| ids.len() / case.top_k as usize;
        let mut seen = Visible {
            rows: vec![Vec::new(); ranks],
            dropped: (0..ranks).map(|rank| masked(case, ids, rank)).collect(),
            required: vec![0; ranks],
            per_expert: vec![Vec::new(); ranks],
            padded: vec![Vec::new(); ranks],
            places: ids.iter().map(|ids| vec![Vec::new(); tokens(ids)]).collect(),
        };
        for rank in 0..ranks {
            let segments: Vec<Vec<u32>> = match case.layout {
                RowLayout::ExpertMajor => case.map.slots_of(rank as u32).map(|slot| vec![slot]).collect(),
                RowLayout::RankMajor => vec![case.map.slots_of(rank as u32).collect()],
                other => unknown(other),
            };
            let here = case.map.slots_of(rank as u32);
            let chosen = |source: usize| -> Vec<(usize, u32)> {
                let slots = (0..ids[source].len())
                    .filter_map(|choice| Some((choice, slot_of(case, ids, source, choice)?)));
                slots.filter(|(_, slot)| here.contains(slot)).collect()
            };
            let chosen: Vec<_> = (0..ranks).map(chosen).collect();
            for slots in segments {
                seen.add_segment(case, &chosen, rank, &slots);
            }
            seen.clip(case, rank);
            seen.count(case, ids, rank);
        }
        seen
    }

    /// Rows from every source for these slots of a rank, by each source's choices there; then pads.
    fn add_segment(&mut self, case: &Case, chosen: &[Vec<(usize, u32)>], rank: usize, slots: &[u32]) {
        let mut segment: Vec<Option<Row>> = Vec::new();
        for (source, chosen) in chosen.iter().enumerate() {
            let mut rows = rows_from(case, source, chosen, slots);
            if let ReceiveMode::Slots { rows: room, .. } = case.mode {
                rows.drain((room as usize).min(rows.len())..).for_each(|row| self.drop_row(&row));
                segment.extend(rows.into_iter().map(Some));
                segment.resize((source + 1) * room as usize, None);
            } else {
                segment.extend(rows.into_iter().map(Some));
            }
        }
        segment.resize(segment.len().next_multiple_of(case.align as usize), None);
        self.padded[rank].push(segment.len() as i64);
        self.rows[rank].extend(segment);
    }

    /// Rows that a budget keeps.
    fn clip(&mut self, case: &Case, rank: usize) {
        self.required[rank] = self.rows[rank].len() as u32;
        let ReceiveMode::Budget { rows: budget, .. } = case.mode else { return };
        let kept = self.rows[rank].len().min(budget as usize);
        for row in self.rows[rank].split_off(kept).into_iter().flatten() {
            self.drop_row(&row);
        }
        let mut left = kept as i64;
        for segment in &mut self.padded[rank] {
            *segment = left.min(*segment);
            left -= *segment;
        }
    }

    fn drop_row(&mut self, row: &Row) {
        row.choices.iter().for_each(|&choice| self.dropped[row.source][choice] = true);
    }

    fn count(&mut self, case: &Case, ids: &[Vec<i32>], rank: usize) {
        let slots = case.map.slots_of(rank as u32);
        self.per_expert[rank] = vec![0; slots.len()];
        for (at, row) in self.rows[rank].iter().enumerate() {
            let Some(row) = row else { continue };
            self.places[row.source][row.token].push((rank, at));
            for &choice in &row.choices {
                let slot = slot_of(case, ids, row.source, choice).unwrap();
                self.per_expert[rank][(slot - slots.start) as usize] += 1;
            }
        }
    }

    /// Local expert of each choice of a row, -1 where it has none: metadata of rank-major rows.
    ///
    /// # Panics
    /// Without such a row.
    pub fn local_experts(&self, case: &Case, ids: &[Vec<i32>], rank: usize, row: usize) -> Vec<i32> {
        let mut experts = vec![-1; case.top_k as usize];
        if let Some(row) = &self.rows[rank][row] {
            for &choice in &row.choices {
                let slot = slot_of(case, ids, row.source, choice).unwrap();
                experts[choice % case.top_k as usize] = (slot - case.map.slots_of(rank as u32).start) as i32;
            }
        }
        experts
    }

    /// The row that stands for a choice: (rank, row there).
    pub fn place_of(&self, source: usize, token: usize, choice: usize) -> Option<(usize, usize)> {
        let stands = |&(rank, at): &(usize, usize)| {
            self.rows[rank][at].as_ref().is_some_and(|row| row.choices.contains(&choice))
        };
        self.places[source][token].iter().copied().find(stands)
    }

    /// The rows of a token, (rank, row there, first choice), in the order of the sum, by partial.
    ///
    /// # Panics
    /// Without such a token.
    pub fn terms(
        &self,
        case: &Case,
        ids: &[Vec<i32>],
        source: usize,
        token: usize,
    ) -> Vec<Vec<(usize, usize, usize)>> {
        let nodes = NodeMap::from_labels(&case.nodes);
        let keyed = |&(rank, at): &(usize, usize)| {
            let choice = self.rows[rank][at].as_ref().unwrap().choices[0];
            let expert = match case.layout {
                RowLayout::ExpertMajor => ids[source][choice],
                RowLayout::RankMajor => 0,
                other => unknown(other),
            };
            let partial = match case.order {
                SumOrder::Expert => 0,
                SumOrder::Rank => rank as u32,
                SumOrder::Node => nodes.node_of(rank as u32),
                other => unknown(other),
            };
            let by_rank = case.order != SumOrder::Expert || case.layout == RowLayout::RankMajor;
            (partial, if by_rank { rank } else { 0 }, expert, (rank, at, choice))
        };
        let mut terms: Vec<_> = self.places[source][token].iter().map(keyed).collect();
        terms.sort_unstable();
        terms.chunk_by(|a, b| a.0 == b.0).map(|group| group.iter().map(|term| term.3).collect()).collect()
    }

    /// The first rank that needs more than its budget.
    pub fn over_budget(&self, case: &Case) -> Option<(u32, u32)> {
        let ReceiveMode::Budget { rows, overflow: Overflow::Error } = case.mode else { return None };
        (0..).zip(self.required.iter().copied()).find(|&(_, required)| required > rows)
    }
}

/// The slot of a choice: of all active replicas of its expert, those of an active rank take turns
/// by rank and expert.
fn slot_of(case: &Case, ids: &[Vec<i32>], source: usize, choice: usize) -> Option<u32> {
    let expert = u32::try_from(ids[source][choice]).ok()?;
    if !case.active.contains(&false) {
        return case.map.slot_for(source as u32, expert);
    }
    let is_active = |slot: &u32| case.active[case.map.rank_of(*slot) as usize];
    let holds = |slot: &u32| case.map.expert_of(*slot) == expert;
    let replicas: Vec<u32> = (0..case.map.slots()).filter(holds).filter(is_active).collect();
    let turn = (source + expert as usize).checked_rem(replicas.len())?;
    case.active[source].then(|| replicas[turn])
}

/// The choices of a rank that a mask leaves without a slot.
fn masked(case: &Case, ids: &[Vec<i32>], rank: usize) -> Vec<bool> {
    let choices = ids[rank].iter().enumerate();
    choices.map(|(choice, &id)| id >= 0 && slot_of(case, ids, rank, choice).is_none()).collect()
}

/// The rows that a source has for any of these slots, of its choices at this rank; in token order.
fn rows_from(case: &Case, source: usize, chosen: &[(usize, u32)], slots: &[u32]) -> Vec<Row> {
    let k = case.top_k as usize;
    let chosen = chosen.iter().filter(|(_, slot)| slots.contains(slot));
    let choices: Vec<usize> = chosen.map(|&(choice, _)| choice).collect();
    let rows = choices.chunk_by(|a, b| a / k == b / k);
    rows.map(|choices| Row { source, token: choices[0] / k, choices: choices.to_vec() }).collect()
}

/// Ends the comparison: the reference says what every variant means, and does not know this one.
fn unknown(variant: impl std::fmt::Debug) -> ! {
    panic!("the naive reference has no rule for {variant:?}")
}
