//! Whether what arrived is right, bit by bit, by a reference that knows nothing of the library's placement.

use half::bf16;
use sidelane::dtype::Wire;
use sidelane::ep::{Handle, RowIndex};
use sidelane::error::PlanError;
use sidelane::gate::Routing;
use sidelane::plan::{ExpertMap, Order, RowLayout};
use sidelane::topology::NodeMap;

use super::config::Config;
use super::placement::{Origin, Placement};
use super::row_type::Plain;
use super::tensor::{Number, expert, fill};
use crate::routing::Router;

/// What one rank should see.
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
        let placement = Placement::new(config, router, config.room.mode())?;
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

    /// Rows lie as the index says, or in visible order. One that is no permutation will not match what arrived.
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

    /// Number of dispatched rows that are bitwise right, with what goes with them.
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

    /// Applies the experts of this rank to rows that were dispatched. Rank-major, what they make of a row is added up from
    /// +0 in `f32` by ascending expert, and rounded once. Pads become NaN: nobody may read them.
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

    /// Gradients of the weights of received rows that are told apart by what they were.
    pub fn weight_gradients(&self) -> Vec<f32> {
        self.weights.iter().map(|weight| weight * 2.0).collect()
    }

    /// Whether these came home: twice each weight, zero where a choice was dropped.
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
                let by_rank = config.layout == RowLayout::RankMajor || config.order != Order::Expert;
                let group = match config.order {
                    Order::Expert => 0,
                    Order::Rank => rank,
                    Order::Node => self.nodes.node_of(rank),
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

/// From +0 in `f32`: groups first, each rounded to what partial sums are, then their sums; one rounding at the end.
fn reference<E: Number>(terms: &[Term], partials: Option<Wire>, x: E) -> E {
    let groups = terms.chunk_by(|a, b| a.group == b.group);
    let sums = groups.map(|group| group.iter().fold(0.0, |sum, row| sum + made(&row.experts, x).value()));
    let rounded = sums.map(|sum| match partials {
        Some(Wire::Bf16) => bf16::from_f32(sum).to_f32(),
        Some(Wire::F32) | None => sum,
    });
    E::of(rounded.fold(0.0, |total, sum| total + sum))
}

fn same<E: Number>(a: &[E], b: &[E]) -> bool {
    bytemuck::cast_slice::<E, u8>(a) == bytemuck::cast_slice::<E, u8>(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_sums_are_rounded_before_they_are_added() {
        let term = |(group, expert)| Term { group, experts: vec![expert] };
        let (terms, x) = ([(0, 1), (0, 2), (1, 3)].map(term), 1.3f32);
        let [a, b, c] = [1, 2, 3].map(|id| expert(x, id));
        let round = |sum| bf16::from_f32(sum).to_f32();
        let (wide, narrow) = ((a + b) + c, round(a + b) + round(c));
        assert_eq!(reference(&terms, Some(Wire::F32), x), wide);
        assert_eq!(reference(&terms, Some(Wire::Bf16), x), narrow);
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
}
