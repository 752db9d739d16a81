//! Attention of one window, as the ranks of a context parallel group compute it, one after another.
//!
//! Each query sees the keys of its own rank, then those of the rank before, and so on round the
//! ring. Of each rank's block it has a softmax of its own, and adds it to what it has. With Ulysses
//! a rank has all tokens of its heads, so there is one block. The order of all sums is that of
//! [`sidelane_parallel::context`], written here as loops over tokens, heads and keys.

use std::ops::Range;

use sidelane_parallel::context::{AttentionGradients, AttentionShape, ring_order};

use super::super::tensors::part;

/// The tokens of a window: those of each rank of the ring behind those of the one before.
#[derive(Clone, Debug)]
pub struct Window {
    /// Heads of a tensor parallel rank.
    pub shape: AttentionShape,
    /// Ranks of the ring.
    pub ranks: usize,
    /// Parts of the query heads, of which each has a replica of its keys and values: with Ulysses
    /// the ranks, in a ring one.
    pub replicas: usize,
    /// Position of each token.
    pub positions: Vec<usize>,
    /// `[tokens, query_heads, head_dim]`
    pub query: Vec<f32>,
    /// `[tokens, kv_heads, head_dim]`
    pub key: Vec<f32>,
    /// `[tokens, kv_heads, head_dim]`
    pub value: Vec<f32>,
}

/// State of a query after the keys that it has seen.
#[derive(Clone, Debug)]
struct Seen {
    largest: f32,
    sum: f32,
    output: Vec<f32>,
}

/// A window with the outputs of its tokens.
#[derive(Clone, Debug)]
pub struct Attended {
    window: Window,
    /// By token and query head.
    seen: Vec<Seen>,
}

impl Window {
    /// The tokens of a rank.
    fn block(&self, rank: usize) -> Range<usize> {
        let each = self.positions.len() / self.ranks;
        rank * each..(rank + 1) * each
    }

    /// Tokens of a rank that a token sees: itself and earlier ones.
    fn visible(&self, token: usize, rank: usize) -> impl Iterator<Item = usize> {
        let latest = self.positions[token];
        self.block(rank).filter(move |&key| self.positions[key] <= latest)
    }

    /// Ranks in the order in which the queries of one see their blocks.
    fn order(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        ring_order((rank as u32, self.ranks as u32)).map(|rank| rank as usize)
    }

    /// Elements of a query head.
    fn of_query(&self, token: usize, head: usize) -> Range<usize> {
        let row = token * self.shape.query_heads + head;
        row * self.shape.head_dim..(row + 1) * self.shape.head_dim
    }

    /// Elements of the key, and of the value, that a query head sees.
    fn of_key(&self, token: usize, head: usize) -> Range<usize> {
        let row = token * self.shape.kv_heads + head * self.shape.kv_heads / self.shape.query_heads;
        row * self.shape.head_dim..(row + 1) * self.shape.head_dim
    }

    fn scale(&self) -> f32 {
        1.0 / (self.shape.head_dim as f32).sqrt()
    }

    fn score(&self, (token, head): (usize, usize), key: usize) -> f32 {
        dot(&self.query[self.of_query(token, head)], &self.key[self.of_key(key, head)]) * self.scale()
    }

    /// A query's part from the block of a rank.
    fn see(&self, (token, head): (usize, usize), rank: usize) -> Seen {
        let scores: Vec<f32> = self.visible(token, rank).map(|key| self.score((token, head), key)).collect();
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut seen = Seen { largest, sum: 0.0, output: vec![0.0; self.shape.head_dim] };
        for (key, score) in self.visible(token, rank).zip(scores) {
            let power = libm::expf(score - base(largest));
            seen.sum += power;
            add_scaled(&mut seen.output, power, &self.value[self.of_key(key, head)]);
        }
        seen
    }

    /// Lets all queries see all blocks.
    pub fn attend(self) -> Attended {
        let mut all = Vec::new();
        for rank in 0..self.ranks {
            for token in self.block(rank) {
                for head in 0..self.shape.query_heads {
                    let blocks = self.order(rank).map(|from| self.see((token, head), from));
                    let mut seen = blocks.reduce(Seen::and).expect("a rank sees its own block");
                    seen.output.iter_mut().for_each(|output| *output /= seen.sum);
                    all.push(seen);
                }
            }
        }
        Attended { window: self, seen: all }
    }
}

impl Seen {
    /// With what the same query has of another block.
    fn and(self, other: Seen) -> Seen {
        let largest = self.largest.max(other.largest);
        let [own, others] = [&self, &other].map(|seen| libm::expf(seen.largest - base(largest)));
        let pairs = self.output.iter().zip(&other.output);
        let output = pairs.map(|(output, other)| output * own + other * others).collect();
        Seen { largest, sum: self.sum * own + other.sum * others, output }
    }
}

impl Attended {
    /// Outputs, `[tokens, query_heads, head_dim]`.
    pub fn outputs(&self) -> Vec<f32> {
        self.seen.iter().flat_map(|seen| &seen.output).copied().collect()
    }

    /// Gradients of all tokens from those of their outputs. A block's gradients are added in the
    /// order of the ranks that it visits: its own, then those behind it.
    pub fn backward(&self, of_outputs: &[f32]) -> AttentionGradients {
        let (window, ranks) = (&self.window, self.window.ranks);
        let mut query = vec![0.0; window.query.len()];
        // By the rank that sees a block, and by the block's rank.
        let mut of_rank = |rank| {
            let mut of_blocks = vec![Vec::new(); ranks];
            for from in window.order(rank) {
                of_blocks[from] = self.of_block(rank, from, of_outputs, &mut query);
            }
            of_blocks
        };
        let seen: Vec<Vec<Vec<f32>>> = (0..ranks).map(&mut of_rank).collect();
        let (mut key, mut value) = (Vec::new(), Vec::new());
        for block in 0..ranks {
            let mut sums = seen[block][block].clone();
            for visit in 1..ranks {
                let of_visit = &seen[(block + visit) % ranks][block];
                sums.iter_mut().zip(of_visit).for_each(|(sum, of)| *sum += of);
            }
            let (of_key, of_value) = sums.split_at(sums.len() / 2);
            key.extend_from_slice(of_key);
            value.extend_from_slice(of_value);
        }
        AttentionGradients { query, key, value }
    }

    /// Adds the gradients of a rank's queries through a block. Returns those of the block's keys,
    /// and behind them those of its values.
    fn of_block(&self, rank: usize, from: usize, of_outputs: &[f32], of_query: &mut [f32]) -> Vec<f32> {
        let (window, scale) = (&self.window, self.window.scale());
        let first = window.of_key(window.block(from).start, 0).start;
        let elements = window.key.len() / window.ranks;
        let mut of_block = vec![0.0; 2 * elements];
        for heads in (0..window.replicas).map(|nth| part(window.shape.query_heads, nth, window.replicas)) {
            let mut of_replica = vec![0.0; 2 * elements];
            let (of_keys, of_values) = of_replica.split_at_mut(elements);
            for (token, head) in
                window.block(rank).flat_map(|token| heads.clone().map(move |head| (token, head)))
            {
                let (own, seen) =
                    (window.of_query(token, head), &self.seen[token * window.shape.query_heads + head]);
                let of_output = &of_outputs[own.clone()];
                let along = dot(of_output, &seen.output);
                for key in window.visible(token, from) {
                    let place = window.of_key(key, head);
                    let local = place.start - first..place.end - first;
                    let p = libm::expf(window.score((token, head), key) - seen.largest) / seen.sum;
                    let of_score = p * (dot(of_output, &window.value[place.clone()]) - along) * scale;
                    add_scaled(&mut of_query[own.clone()], of_score, &window.key[place]);
                    add_scaled(&mut of_keys[local.clone()], of_score, &window.query[own.clone()]);
                    add_scaled(&mut of_values[local], p, of_output);
                }
            }
            of_block.iter_mut().zip(of_replica).for_each(|(sum, of)| *sum += of);
        }
        of_block
    }
}

/// The number that is subtracted from scores: 0 where a query sees no key of a block.
fn base(largest: f32) -> f32 {
    if largest == f32::NEG_INFINITY { 0.0 } else { largest }
}

/// By ascending element, from +0.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |sum, (a, b)| sum + a * b)
}

fn add_scaled(sums: &mut [f32], factor: f32, row: &[f32]) {
    sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += factor * value);
}
