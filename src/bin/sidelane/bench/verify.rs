//! Whether what arrived is right, bit by bit, by a reference that knows nothing of the library's placement.

use sidelane::error::PlanError;
use sidelane::gate::Routing;
use sidelane::plan::ExpertMap;

use super::args::Order;
use super::config::Config;
use super::source::Router;
use super::tensor::{Number, expert, fill};

/// What one rank should see.
pub struct Expected {
    /// Origin of each received row, (rank, token); `None` is a pad row.
    rows: Vec<Option<(u32, u32)>>,
    /// Rows of each local expert, pads counted, and its id.
    segments: Vec<(u32, usize)>,
    /// Weight of each received row.
    weights: Vec<f32>,
    routing: Routing<'static>,
    map: ExpertMap,
    rank: u32,
}

impl Expected {
    /// For one rank, from the routing of all.
    pub fn new(config: &Config, router: &Router, rank: u32) -> Result<Self, PlanError> {
        let map = ExpertMap::contiguous(config.experts, config.ranks())?;
        let mut segments: Vec<Vec<(u32, u32, f32)>> = vec![Vec::new(); map.slots_of(rank).len()];
        for source in 0..config.ranks() {
            let routing = router.routing(config, source)?;
            let choices = routing.experts().iter().zip(routing.weights()).enumerate();
            for (choice, (&id, &weight)) in choices.filter(|(_, (id, _))| **id >= 0) {
                let slot = map.slot_for(source, id as u32);
                if map.rank_of(slot) == rank {
                    let token = choice as u32 / config.top_k;
                    segments[(slot - map.slots_of(rank).start) as usize].push((source, token, weight));
                }
            }
        }
        let (mut rows, mut weights, mut sizes) = (Vec::new(), Vec::new(), Vec::new());
        for (segment, slot) in segments.iter().zip(map.slots_of(rank)) {
            let padded = segment.len().next_multiple_of(config.align as usize);
            rows.extend(segment.iter().map(|&(source, token, _)| Some((source, token))));
            weights.extend(segment.iter().map(|&(.., weight)| weight));
            rows.resize(rows.len() + padded - segment.len(), None);
            weights.resize(rows.len(), 0.0);
            sizes.push((map.expert_of(slot), padded));
        }
        let routing = router.routing(config, rank)?;
        Ok(Expected { rows, segments: sizes, weights, routing, map, rank })
    }

    /// Rows that should land here, pads counted.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Rows among them that come from other nodes, by the node of each rank.
    pub fn rows_over_rails(&self, node_of: &[u32]) -> usize {
        let far = |&&(source, _): &&(u32, u32)| node_of[source as usize] != node_of[self.rank as usize];
        self.rows.iter().flatten().filter(far).count()
    }

    /// Number of received rows that are bitwise right.
    pub fn right_rows<E: Number>(&self, config: &Config, rows: &[E], weights: &[f32]) -> u64 {
        let hidden = config.hidden as usize;
        if rows.len() != self.rows.len() * hidden || weights.len() != self.weights.len() {
            return 0;
        }
        let mut row: Vec<E> = Vec::with_capacity(hidden);
        let right =
            self.rows.iter().zip(rows.chunks_exact(hidden)).enumerate().filter(|(at, (origin, seen))| {
                row.clear();
                match **origin {
                    Some((source, token)) => fill(&mut row, config.seed, source, token, config.hidden),
                    None => row.resize(hidden, E::of(0.0)),
                }
                same(&row, seen) && weights[*at].to_bits() == self.weights[*at].to_bits()
            });
        right.count() as u64
    }

    /// Applies the experts of this rank to its rows.
    pub fn experts<E: Number>(&self, config: &Config, rows: &[E], out: &mut [E]) {
        let mut at = 0;
        for &(id, count) in &self.segments {
            let end = at + count * config.hidden as usize;
            for (to, &from) in out[at..end].iter_mut().zip(&rows[at..end]) {
                *to = expert(from, id);
            }
            at = end;
        }
    }

    /// Number of tokens whose sum is bitwise right.
    pub fn right_tokens<E: Number>(&self, config: &Config, out: &[E]) -> u64 {
        let mut x: Vec<E> = Vec::with_capacity(config.hidden as usize);
        let mut sum: Vec<E> = Vec::with_capacity(config.hidden as usize);
        let right = out.chunks_exact(config.hidden as usize).zip(0u32..).filter(|(seen, token)| {
            x.clear();
            sum.clear();
            fill(&mut x, config.seed, self.rank, *token, config.hidden);
            let terms = self.terms(config.order, *token);
            sum.extend(x.iter().map(|&x| reference(&terms, x)));
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

    /// (group, expert) of each choice, in order of addition.
    fn terms(&self, order: Order, token: u32) -> Vec<(u32, u32)> {
        let chosen = self.routing.experts_of(token).iter().filter(|&&id| id >= 0);
        let mut terms: Vec<(u32, u32)> = chosen
            .map(|&id| match order {
                Order::Expert => (0, id as u32),
                Order::Rank => (self.map.rank_of(self.map.slot_for(self.rank, id as u32)), id as u32),
            })
            .collect();
        terms.sort_unstable();
        terms
    }
}

/// From +0 in `f32`: groups first, then their sums; one rounding.
fn reference<E: Number>(terms: &[(u32, u32)], x: E) -> E {
    let partials = terms.chunk_by(|a, b| a.0 == b.0);
    E::of(partials.fold(0.0, |total, group| {
        total + group.iter().fold(0.0, |sum, &(_, id)| sum + expert(x, id).value())
    }))
}

fn same<E: Number>(a: &[E], b: &[E]) -> bool {
    bytemuck::cast_slice::<E, u8>(a) == bytemuck::cast_slice::<E, u8>(b)
}
