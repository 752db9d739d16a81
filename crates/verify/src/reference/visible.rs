//! Expected rows of a dispatch at every rank, in every layout and mode, computed from the routing
//! of all ranks at once.

use sidelane_core::dtype::PartialDtype;
use sidelane_core::plan::{ExpertMap, Overflow, ReceiveMode, RowLayout, Strategy, SumOrder};
use sidelane_core::topology::{NodeMap, Route};

/// Inputs of a dispatch.
#[derive(Clone, Debug)]
pub struct Case {
    /// Node of each rank.
    pub nodes: Vec<u32>,
    /// Tokens of each rank.
    pub counts: Vec<u32>,
    /// Places of experts.
    pub map: ExpertMap,
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
    /// Per rank: which of its choices had no room.
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
            dropped: ids.iter().map(|ids| vec![false; ids.len()]).collect(),
            required: vec![0; ranks],
            per_expert: vec![Vec::new(); ranks],
            padded: vec![Vec::new(); ranks],
            places: ids.iter().map(|ids| vec![Vec::new(); tokens(ids)]).collect(),
        };
        for rank in 0..ranks {
            let segments: Vec<Vec<u32>> = match case.layout {
                RowLayout::ExpertMajor => case.map.slots_of(rank as u32).map(|slot| vec![slot]).collect(),
                RowLayout::RankMajor => vec![case.map.slots_of(rank as u32).collect()],
            };
            for slots in segments {
                seen.add_segment(case, ids, rank, &slots);
            }
            seen.clip(case, rank);
            seen.count(case, ids, rank);
        }
        seen
    }

    /// Rows from every source for these slots of a rank, then pads.
    fn add_segment(&mut self, case: &Case, ids: &[Vec<i32>], rank: usize, slots: &[u32]) {
        let mut segment: Vec<Option<Row>> = Vec::new();
        for source in 0..ids.len() {
            let mut rows = rows_from(case, ids, source, slots);
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
            };
            let partial = match case.order {
                SumOrder::Expert => 0,
                SumOrder::Rank => rank as u32,
                SumOrder::Node => nodes.node_of(rank as u32),
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

/// The slot of a choice.
fn slot_of(case: &Case, ids: &[Vec<i32>], source: usize, choice: usize) -> Option<u32> {
    let expert = u32::try_from(ids[source][choice]).ok()?;
    Some(case.map.slot_for(source as u32, expert))
}

/// The rows that a source has for any of these slots, in token order.
fn rows_from(case: &Case, ids: &[Vec<i32>], source: usize, slots: &[u32]) -> Vec<Row> {
    let k = case.top_k as usize;
    let wanted =
        |&choice: &usize| slot_of(case, ids, source, choice).is_some_and(|slot| slots.contains(&slot));
    let of_token = |token: usize| -> Vec<usize> { (token * k..(token + 1) * k).filter(wanted).collect() };
    let rows = (0..ids[source].len() / k).map(|token| Row { source, token, choices: of_token(token) });
    rows.filter(|row| !row.choices.is_empty()).collect()
}
