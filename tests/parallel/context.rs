//! Ulysses and ring attention, forward and backward, against attention in one process.
//!
//! # Bound of ring attention
//!
//! The reference takes the scores as they are in `f32`, since all orders compute the same ones, and
//! all else in `f64`. Let `u` be half of `f32::EPSILON`, `B` the blocks, `n` the keys, `R` the
//! range of a query's scores, and `p` the softmax.
//!
//! ```text
//!   exponents        a key's own and those of corrections have one sign and add up to at most R     u R
//!   powers           at most B, each by libm within an ulp, which is at most 2 u                    2 B u
//!   corrections      at most B - 1 products                                                         (B - 1) u
//!   sum              at most n additions                                                            n u
//!   sum of values    one product more                                                               (n + 1) u
//!   output           both sums and a division, of sum p |v|          2 (R + 3 B + n) u              (output)
//!   p, backward      exponent, power, sum, division                  (2 R + 3 B + n + 2) u          (p)
//! ```
//!
//! A gradient of a score is `p (a - b) scale`, where `a` and `b` are sums of `head_dim` products.
//! It is off by `(p) + 3 u` of `p (|a| + |b|) scale`, and by the errors of `a` and `b`; that of `b`
//! includes the output's. A sum of N products is off by `N + 1` roundings of the sum of their
//! sizes. Products of two such errors are less than a hundredth of them.
//!
//! With rows of bf16 all this is the same, and the tape has outputs in `f32`. Then an output and a
//! gradient of a query are rounded once, by half of `bf16::EPSILON` of their size. A gradient of a
//! key or a value is rounded by each of the B ranks, by at most that much of the sizes of its
//! addends.

use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sidelane::collective::Communicator;
use sidelane::error::{CallError, PlanError};
use sidelane::overlap::HostExecutor;
use sidelane::{Error, World};
use sidelane_parallel::context::{
    AttentionGradients, AttentionShape, RingAttention, UlyssesAttention, cut_zig_zag, ring_order,
    zig_zag_pieces,
};
use sidelane_parallel::tensor::cut_rows;

use crate::ranks::{on_ranks, random_seed, tiny};
use crate::tensors::{Elements, WORLDS, bits, communicator, elements, rounded, summed, tensor, values};

/// Parts of equal pieces for one to four ranks.
const TOKENS: usize = 24;
const DIM: usize = 8;

/// Attention of all tokens, and the gradients of its outputs.
struct Whole {
    shape: AttentionShape,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    of_output: Vec<f32>,
}

/// Outputs and gradients.
#[derive(Clone)]
struct Results {
    output: Vec<f32>,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
}

impl Results {
    fn new<E: Elements>(output: &[E], gradients: &AttentionGradients<E>) -> Results {
        let AttentionGradients { query, key, value } = gradients;
        let [output, query, key, value] = [output, query, key, value].map(values);
        Results { output, query, key, value }
    }

    fn named(&self) -> [(&'static str, &[f32]); 4] {
        let Results { output, query, key, value } = self;
        [("output", output), ("of query", query), ("of key", key), ("of value", value)]
    }
}

fn shape(query_heads: usize, kv_heads: usize, causal: bool) -> AttentionShape {
    AttentionShape { query_heads, kv_heads, head_dim: DIM, causal }
}

impl Whole {
    fn new(seed: u64, shape: AttentionShape, tokens: usize, size: f32) -> Whole {
        let random = |nth, heads: usize| -> Vec<f32> {
            tensor(seed, nth, tokens * heads * shape.head_dim).iter().map(|value| value * size).collect()
        };
        let (queries, keys) = (shape.query_heads, shape.kv_heads);
        let (query, key, value) = (random(0, queries), random(1, keys), random(2, keys));
        Whole { shape, query, key, value, of_output: random(3, queries) }
    }

    /// The same attention of the nearest elements.
    fn rounded<E: Elements>(self) -> Whole {
        let Whole { shape, query, key, value, of_output } = self;
        let [query, key, value, of_output] = [query, key, value, of_output].map(|of| rounded::<E>(&of));
        Whole { shape, query, key, value, of_output }
    }

    fn tokens(&self) -> usize {
        self.key.len() / self.key_width()
    }

    fn query_width(&self) -> usize {
        self.shape.query_heads * self.shape.head_dim
    }

    fn key_width(&self) -> usize {
        self.shape.kv_heads * self.shape.head_dim
    }

    fn query_range(&self, token: usize, head: usize) -> std::ops::Range<usize> {
        let first = token * self.query_width() + head * self.shape.head_dim;
        first..first + self.shape.head_dim
    }

    /// Of the KV head that serves a query head.
    fn key_range(&self, token: usize, head: usize) -> std::ops::Range<usize> {
        let own = head / (self.shape.query_heads / self.shape.kv_heads);
        let first = token * self.key_width() + own * self.shape.head_dim;
        first..first + self.shape.head_dim
    }

    fn sees(&self, query: usize, key: usize) -> bool {
        !self.shape.causal || key <= query
    }

    fn score(&self, query: usize, head: usize, key: usize) -> f32 {
        let (query, key) = (&self.query[self.query_range(query, head)], &self.key[self.key_range(key, head)]);
        dot(query, key) * self.scale()
    }

    fn scale(&self) -> f32 {
        1.0 / (self.shape.head_dim as f32).sqrt()
    }

    /// Every query sees the keys of `blocks(query)`, in their order. A key sums the gradients of
    /// each of `parts(key)`, and then the sums of the parts. A part has visits, queries with their
    /// heads. Each visit has a sum of its own, which is added to those before it. Tensors that
    /// travel are rounded to elements.
    fn attended<E: Elements>(
        &self,
        blocks: impl Fn(usize) -> Vec<Vec<usize>>,
        parts: impl Fn(usize) -> Vec<Vec<Vec<(usize, usize)>>>,
    ) -> Results {
        let mut output = vec![0.0; self.query.len()];
        let mut of_query = vec![0.0; self.query.len()];
        let rows = self.tokens() * self.shape.query_heads;
        let (mut largest, mut sums) = (vec![f32::NEG_INFINITY; rows], vec![0.0; rows]);
        let row = |query: usize, head: usize| query * self.shape.query_heads + head;
        for (query, head) in all_rows(self.tokens(), self.shape.query_heads) {
            let (at, out) = (row(query, head), &mut output[self.query_range(query, head)]);
            for (nth, block) in blocks(query).into_iter().enumerate() {
                let seen: Vec<usize> = block.into_iter().filter(|key| self.sees(query, *key)).collect();
                let scores = || seen.iter().map(|&key| self.score(query, head, key));
                let of_block = scores().fold(f32::NEG_INFINITY, f32::max);
                let (mut sum, mut row) = (0.0, vec![0.0; DIM]);
                for (&key, score) in seen.iter().zip(scores()) {
                    let power = libm::expf(score - of_block);
                    sum += power;
                    add(&mut row, power, &self.value[self.key_range(key, head)]);
                }
                if nth == 0 {
                    (largest[at], sums[at]) = (of_block, sum);
                    out.copy_from_slice(&row);
                    continue;
                }
                let both = largest[at].max(of_block);
                let (own, other) = (libm::expf(largest[at] - both), libm::expf(of_block - both));
                (largest[at], sums[at]) = (both, sums[at] * own + sum * other);
                out.iter_mut().zip(row).for_each(|(out, row)| *out = *out * own + row * other);
            }
            out.iter_mut().for_each(|out| *out /= sums[at]);
        }
        let of_score = |query: usize, head: usize, key: usize| {
            let of_output = &self.of_output[self.query_range(query, head)];
            let of_p = dot(of_output, &self.value[self.key_range(key, head)]);
            let p =
                libm::expf(self.score(query, head, key) - largest[row(query, head)]) / sums[row(query, head)];
            (p, p * (of_p - dot(of_output, &output[self.query_range(query, head)])) * self.scale())
        };
        for (query, head) in all_rows(self.tokens(), self.shape.query_heads) {
            for key in blocks(query).into_iter().flatten().filter(|key| self.sees(query, *key)) {
                let (_, of_score) = of_score(query, head, key);
                let of_query = &mut of_query[self.query_range(query, head)];
                add(of_query, of_score, &self.key[self.key_range(key, head)]);
            }
        }
        let (mut of_key, mut of_value) = (vec![0.0; self.key.len()], vec![0.0; self.value.len()]);
        for key in 0..self.tokens() {
            let parts = parts(key).into_iter().map(|part| {
                let zeros = || vec![0.0; self.key_width()];
                let (mut sum_of_key, mut sum_of_value) = (zeros(), zeros());
                for visit in part {
                    let (mut of_key, mut of_value) = (zeros(), zeros());
                    for (query, head) in visit.into_iter().filter(|(query, _)| self.sees(*query, key)) {
                        let ((p, of_score), own) = (of_score(query, head, key), self.key_range(0, head));
                        add(&mut of_key[own.clone()], of_score, &self.query[self.query_range(query, head)]);
                        add(&mut of_value[own], p, &self.of_output[self.query_range(query, head)]);
                    }
                    sum_of_key = rounded::<E>(&summed([sum_of_key, of_key]));
                    sum_of_value = rounded::<E>(&summed([sum_of_value, of_value]));
                }
                (sum_of_key, sum_of_value)
            });
            let (of_keys, of_values): (Vec<_>, Vec<_>) = parts.unzip();
            let own = key * self.key_width()..(key + 1) * self.key_width();
            of_key[own.clone()].copy_from_slice(&summed(of_keys));
            of_value[own].copy_from_slice(&summed(of_values));
        }
        let results = [output, of_query, of_key, of_value];
        let [output, query, key, value] = results.map(|of| rounded::<E>(&of));
        Results { output, query, key, value }
    }

    /// By ascending token, and parts of the query heads that are added up at last.
    fn plain<E: Elements>(&self, replicas: usize) -> Results {
        let heads = self.shape.query_heads;
        // Replica c of each KV head serves the c-th part of its query heads.
        let replica = |head: usize| head * self.shape.kv_heads * replicas / heads % replicas;
        let blocks = |_| vec![(0..self.tokens()).collect()];
        let part = |nth| all_rows(self.tokens(), heads).filter(|(_, head)| replica(*head) == nth).collect();
        self.attended::<E>(blocks, |_| (0..replicas).map(|nth| vec![part(nth)]).collect())
    }

    /// As so many ranks see it, by one thread. `owned` are the tokens of each.
    fn ring<E: Elements>(&self, owned: &[Vec<usize>]) -> Results {
        let ranks = owned.len();
        let owner = |token: usize| owned.iter().position(|tokens| tokens.contains(&token)).unwrap();
        let before = |rank: usize, step: usize| (rank + ranks - step) % ranks;
        let blocks = |query| (0..ranks).map(|step| owned[before(owner(query), step)].clone()).collect();
        let visits = |key| {
            let rows = |&query: &usize| (0..self.shape.query_heads).map(move |head| (query, head));
            let visit = |step: usize| owned[(owner(key) + step) % ranks].iter().flat_map(rows).collect();
            vec![(0..ranks).map(visit).collect()]
        };
        self.attended::<E>(blocks, visits)
    }
}

fn all_rows(tokens: usize, heads: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..tokens).flat_map(move |token| (0..heads).map(move |head| (token, head)))
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sum = 0.0;
    for (a, b) in a.iter().zip(b) {
        sum += a * b;
    }
    sum
}

fn add(sums: &mut [f32], factor: f32, of: &[f32]) {
    sums.iter_mut().zip(of).for_each(|(sum, of)| *sum += factor * of);
}

fn ulysses<E: Elements>(world: &World, whole: &Whole) -> Results {
    let mut group = communicator(world);
    let own = |of, width| elements::<E>(cut_rows(of, width, (world.rank(), world.size())).unwrap());
    let (query_width, key_width) = (whole.query_width(), whole.key_width());
    let (query, key) = (own(&whole.query, query_width), own(&whole.key, key_width));
    let attention = UlyssesAttention::new(&mut group, whole.shape).unwrap().with_rows::<E>();
    let (output, tape) = attention.forward(&mut group, &query, &key, &own(&whole.value, key_width)).unwrap();
    Results::new(&output, &tape.backward(&mut group, &own(&whole.of_output, query_width)).unwrap())
}

fn ring<E: Elements>(world: &World, whole: &Whole) -> Results {
    let mut group = communicator(world);
    let part = (world.rank(), world.size());
    let own = |of: &[f32], width| match whole.shape.causal {
        true => elements::<E>(&cut_zig_zag(of, width, part).unwrap()),
        false => elements::<E>(cut_rows(of, width, part).unwrap()),
    };
    let (query_width, key_width) = (whole.query_width(), whole.key_width());
    let (query, key) = (own(&whole.query, query_width), own(&whole.key, key_width));
    let (value, of_output) = (own(&whole.value, key_width), own(&whole.of_output, query_width));
    let attention = RingAttention::new(&mut group, whole.shape).unwrap().with_rows::<E>();
    let (output, tape) = attention.forward(&mut group, &query, &key, &value).unwrap();
    let results = Results::new(&output, &tape.backward(&mut group, &of_output).unwrap());
    let executor = HostExecutor::new();
    let (output, tape) = attention.forward_overlapped(&mut group, &query, &key, &value, &executor).unwrap();
    let of = tape.backward_overlapped(&mut group, &of_output, &executor).unwrap();
    assert_bits(&Results::new(&output, &of), &results, "next to transfers");
    results
}

/// Tokens of each rank.
fn owned(whole: &Whole, ranks: usize) -> Vec<Vec<usize>> {
    let (tokens, piece) = (whole.tokens() / ranks, whole.tokens() / (2 * ranks));
    let of = |rank: usize| match whole.shape.causal {
        true => [rank, 2 * ranks - 1 - rank].iter().flat_map(|at| at * piece..(at + 1) * piece).collect(),
        false => (rank * tokens..(rank + 1) * tokens).collect(),
    };
    (0..ranks).map(of).collect()
}

/// Results of ranks in the order of tokens.
fn joined(whole: &Whole, owned: &[Vec<usize>], results: &[Results]) -> Results {
    let join = |of: fn(&Results) -> &Vec<f32>, width: usize| {
        let mut all = vec![f32::NAN; whole.tokens() * width];
        for (tokens, result) in owned.iter().zip(results) {
            assert_eq!(of(result).len(), tokens.len() * width);
            for (token, row) in tokens.iter().zip(of(result).chunks_exact(width)) {
                all[token * width..][..width].copy_from_slice(row);
            }
        }
        all
    };
    Results {
        output: join(|of| &of.output, whole.query_width()),
        query: join(|of| &of.query, whole.query_width()),
        key: join(|of| &of.key, whole.key_width()),
        value: join(|of| &of.value, whole.key_width()),
    }
}

fn assert_bits(got: &Results, right: &Results, case: &str) {
    for ((name, got), (_, right)) in got.named().into_iter().zip(right.named()) {
        assert_eq!(bits(got), bits(right), "{name}, {case}");
    }
}

fn check_ulysses<E: Elements>(seed: u64) {
    for nodes in WORLDS {
        let ranks = nodes.len();
        for kv_heads in [1, 2, 3, 4, 12].into_iter().filter(|kv| kv % ranks == 0 || ranks % kv == 0) {
            for causal in [false, true] {
                let whole = Whole::new(seed, shape(12, kv_heads, causal), TOKENS, 1.0).rounded::<E>();
                let results = on_ranks(nodes, &tiny(), |world| ulysses::<E>(&world, &whole));
                let owned: Vec<Vec<usize>> = (0..TOKENS)
                    .collect::<Vec<_>>()
                    .chunks_exact(TOKENS / ranks)
                    .map(<[usize]>::to_vec)
                    .collect();
                let plain = whole.plain::<E>((ranks / kv_heads).max(1));
                let case = format!("{}, {nodes:?}, {kv_heads} KV heads, causal {causal}", E::NAME);
                assert_bits(&joined(&whole, &owned, &results), &plain, &case);
            }
        }
    }
}

#[test]
fn ulysses_has_the_bits_of_attention_in_one_process() {
    let seed = random_seed();
    check_ulysses::<f32>(seed);
    check_ulysses::<bf16>(seed);
}

fn ring_cases<E: Elements>(seed: u64, check: impl Fn(&Whole, &[u32], &Results)) {
    for nodes in WORLDS {
        for (query_heads, kv_heads) in [(1, 1), (6, 2), (3, 1)] {
            for causal in [false, true] {
                let whole =
                    Whole::new(seed, shape(query_heads, kv_heads, causal), TOKENS, 1.0).rounded::<E>();
                let results = on_ranks(nodes, &tiny(), |world| ring::<E>(&world, &whole));
                check(&whole, nodes, &joined(&whole, &owned(&whole, nodes.len()), &results));
            }
        }
    }
}

fn check_ring<E: Elements>(seed: u64) {
    ring_cases::<E>(seed, |whole, nodes, results| {
        let replayed = whole.ring::<E>(&owned(whole, nodes.len()));
        assert_bits(results, &replayed, &format!("{}, {nodes:?}, {:?}", E::NAME, whole.shape));
    });
}

#[test]
fn ring_has_the_bits_of_its_order_replayed_in_one_process() {
    let seed = random_seed();
    check_ring::<f32>(seed);
    check_ring::<bf16>(seed);
}

/// A value in `f64`, and how far `f32` may be off.
#[derive(Clone, Copy, Default)]
struct Near {
    value: f64,
    bound: f64,
    /// Sizes of the addends, together.
    size: f64,
}

/// A sum of so many products, by their exact values and their errors.
fn near(terms: usize, products: impl Iterator<Item = (f64, f64)>) -> Near {
    let add =
        |(sum, size, error), (product, off): (f64, f64)| (sum + product, size + product.abs(), error + off);
    let (value, size, error) = products.fold((0.0, 0.0, 0.0), add);
    Near { value, bound: error + (terms + 1) as f64 * U * size, size }
}

const U: f64 = f32::EPSILON as f64 / 2.0;

/// Outputs and gradients of queries, keys and values, each with its bound for so many blocks.
fn exact(whole: &Whole, blocks: usize) -> [Vec<Near>; 4] {
    let (tokens, heads, scale) = (whole.tokens(), whole.shape.query_heads, f64::from(whole.scale()));
    let of = |of: &[f32], at: usize| f64::from(of[at]);
    let rows = [&whole.query, &whole.query, &whole.key, &whole.value];
    let mut results = rows.map(|of| vec![Near::default(); of.len()]);
    // By query, head and key: the softmax and the gradient of the score, each with its bound.
    let mut scores = Vec::new();
    for (query, head) in all_rows(tokens, heads) {
        let seen: Vec<usize> = (0..tokens).filter(|key| whole.sees(query, *key)).collect();
        let raw: Vec<f64> = seen.iter().map(|&key| f64::from(whole.score(query, head, key))).collect();
        let largest = raw.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let range = largest - raw.iter().copied().fold(f64::INFINITY, f64::min);
        let sum: f64 = raw.iter().map(|score| (score - largest).exp()).sum();
        let p: Vec<f64> = raw.iter().map(|score| (score - largest).exp() / sum).collect();
        let (n, blocks) = (seen.len() as f64, blocks as f64);
        for (element, at) in whole.query_range(query, head).enumerate() {
            let values = seen.iter().map(|&key| of(&whole.value, whole.key_range(key, head).start + element));
            let products: Vec<f64> = values.zip(&p).map(|(value, p)| p * value).collect();
            let size: f64 = products.iter().map(|product| product.abs()).sum();
            let bound = 2.0 * (range + 3.0 * blocks + n) * U * size;
            results[0][at] = Near { value: products.iter().sum(), bound, size };
        }
        let row = whole.query_range(query, head);
        let with_output = row.clone().map(|at| {
            let Near { value, bound, .. } = results[0][at];
            (of(&whole.of_output, at) * value, of(&whole.of_output, at).abs() * bound)
        });
        let b = near(DIM, with_output);
        let off_p = (2.0 * range + 3.0 * blocks + n + 2.0) * U;
        for (&key, p) in seen.iter().zip(p) {
            let values = row.clone().zip(whole.key_range(key, head));
            let a =
                near(DIM, values.map(|(at, key)| (of(&whole.of_output, at) * of(&whole.value, key), 0.0)));
            let off = (off_p + 3.0 * U) * (a.value.abs() + b.value.abs()) + a.bound + b.bound;
            let of_score = (p * (a.value - b.value) * scale, p * scale * off);
            scores.push((query, head, key, (p, p * off_p), of_score));
        }
    }
    let times = |(value, bound): (f64, f64), by: f64| (value * by, bound * by.abs());
    for element in 0..DIM {
        for (query, head) in all_rows(tokens, heads) {
            let seen = scores.iter().filter(|score| (score.0, score.1) == (query, head));
            let products = seen.map(|&(_, _, key, _, of_score)| {
                times(of_score, of(&whole.key, whole.key_range(key, head).start + element))
            });
            results[1][whole.query_range(query, head).start + element] = near(tokens, products);
        }
        for (key, kv_head) in all_rows(tokens, whole.shape.kv_heads) {
            let at = key * whole.key_width() + kv_head * DIM + element;
            let seen =
                scores.iter().filter(|score| score.2 == key && whole.key_range(key, score.1).contains(&at));
            let query = |query, head| whole.query_range(query, head).start + element;
            let of_keys = seen
                .clone()
                .map(|&(token, head, _, _, of_score)| times(of_score, of(&whole.query, query(token, head))));
            results[2][at] = near(tokens * heads, of_keys);
            let of_values =
                seen.map(|&(token, head, _, p, _)| times(p, of(&whole.of_output, query(token, head))));
            results[3][at] = near(tokens * heads, of_values);
        }
    }
    results
}

fn check_bound<E: Elements>(seed: u64) {
    ring_cases::<E>(seed, |whole, nodes, results| {
        let exact = exact(whole, nodes.len());
        for ((nth, (name, got)), exact) in results.named().into_iter().enumerate().zip(exact) {
            for (at, (got, Near { value, bound, size })) in got.iter().zip(exact).enumerate() {
                let (times, size) = if nth < 2 { (1, value.abs()) } else { (nodes.len(), size) };
                let bound = 1.01 * (bound + times as f64 * E::ROUNDING * (size + bound));
                let off = (f64::from(*got) - value).abs();
                assert!(off <= bound, "{} {name} {at}: {got} is not {value}, by {bound}", E::NAME);
            }
        }
    });
}

#[test]
fn ring_is_attention_within_the_bound_of_its_roundings() {
    let seed = random_seed();
    check_bound::<f32>(seed);
    check_bound::<bf16>(seed);
}

#[test]
fn gradients_are_differences_of_outputs() {
    let seed = random_seed();
    let whole = Whole::new(seed, shape(4, 2, true), 6, 1.0);
    let gradients = whole.plain::<f32>(1);
    let loss = |tensors: &[Vec<f64>; 3]| -> f64 {
        let [query, key, value] = tensors;
        let dot = |query_row: std::ops::Range<usize>, key_row: std::ops::Range<usize>| -> f64 {
            query_row.zip(key_row).map(|(at, key_at)| query[at] * key[key_at]).sum()
        };
        let rows = all_rows(whole.tokens(), whole.shape.query_heads).map(|(token, head)| {
            let row = whole.query_range(token, head);
            let powers: Vec<f64> = (0..=token)
                .map(|key| (dot(row.clone(), whole.key_range(key, head)) * f64::from(whole.scale())).exp())
                .collect();
            let output = |element: usize| -> f64 {
                let values = (0..=token).map(|key| value[whole.key_range(key, head).start + element]);
                values.zip(&powers).map(|(value, power)| value * power).sum::<f64>()
                    / powers.iter().sum::<f64>()
            };
            row.enumerate().map(|(element, at)| f64::from(whole.of_output[at]) * output(element)).sum::<f64>()
        });
        rows.sum()
    };
    let tensors = [&whole.query, &whole.key, &whole.value]
        .map(|of| of.iter().map(|value| f64::from(*value)).collect::<Vec<_>>());
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for (nth, (name, gradient)) in gradients.named().into_iter().skip(1).enumerate() {
        for _ in 0..16 {
            let at = rng.random_range(0..gradient.len());
            let moved = |by: f64| {
                let mut tensors = tensors.clone();
                tensors[nth][at] += by;
                loss(&tensors)
            };
            // Roundings of f32, and of the difference, are far below a wrong formula.
            let slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
            assert!((f64::from(gradient[at]) - slope).abs() < 1e-4, "{name} {at}: {slope}");
        }
    }
}

#[test]
fn twelve_tokens_of_eight_elements_on_three_ranks_are_within_a_millionth() {
    let orders: Vec<Vec<u32>> = (0..3).map(|rank| ring_order((rank, 3)).collect()).collect();
    assert_eq!(orders, [[0, 2, 1], [1, 0, 2], [2, 1, 0]]);
    let seed = random_seed();
    // Small values, for which the bound is less than a millionth.
    let whole = Whole::new(seed, shape(1, 1, false), 12, 0.2);
    let results = on_ranks(&[0, 0, 0], &tiny(), |world| ring::<f32>(&world, &whole));
    let (ring, plain) = (joined(&whole, &owned(&whole, 3), &results), whole.plain::<f32>(1));
    let bounds = exact(&whole, 3).into_iter().zip(exact(&whole, 1));
    let both = ring.named().into_iter().zip(plain.named());
    for (((name, ring), (_, plain)), (of_ring, of_plain)) in both.zip(bounds) {
        for (at, (ring, plain)) in ring.iter().zip(plain).enumerate() {
            let bound = 1.01 * (of_ring[at].bound + of_plain[at].bound);
            assert!(bound < 1e-6, "{name} {at}: a bound of {bound}");
            assert!(f64::from((ring - plain).abs()) < 1e-6, "{name} {at}: {ring}, not {plain}");
        }
    }
}

#[test]
fn zig_zag_of_four_ranks_pairs_pieces_from_both_ends() {
    let pieces: Vec<_> = (0..4).map(|rank| zig_zag_pieces((rank, 4)).unwrap()).collect();
    assert_eq!(pieces, [[0, 7], [1, 6], [2, 5], [3, 4]]);
    let bad = |parameter, seen, expected| PlanError::BadParameter { parameter, seen, expected };
    assert_eq!(zig_zag_pieces((4, 4)), Err(bad("part", 4, "below the number of parts")));
    let odd = bad("tokens of a rank", 3, "an even number: it has two pieces");
    assert_eq!(cut_zig_zag(&[0.0; 6], 1, (0, 2)), Err(odd));
    let uneven = bad("tokens", 7, "a multiple of the ranks of the group");
    assert_eq!(cut_zig_zag(&[0.0; 7], 1, (0, 2)), Err(uneven));
}

#[test]
fn heads_that_do_not_make_equal_parts_are_refused() {
    on_ranks(&[0, 0, 0, 0], &tiny(), |world| {
        let mut group = communicator(&world);
        let mut ulysses = |query, kv| UlyssesAttention::new(&mut group, shape(query, kv, true)).map(drop);
        let bad = |parameter, seen, expected| {
            Err(Error::from(PlanError::BadParameter { parameter, seen, expected }))
        };
        assert_eq!(ulysses(8, 2), Ok(()));
        assert_eq!(ulysses(6, 2), bad("query heads", 6, "a multiple of the ranks of the group"));
        assert_eq!(ulysses(8, 3), bad("query heads", 8, "a multiple of the KV heads"));
        let replicas = "a multiple of the ranks of the group, or a divisor of them";
        assert_eq!(ulysses(12, 3), bad("KV heads", 3, replicas));
        assert_eq!(ulysses(12, 6), bad("KV heads", 6, replicas));
        let mut ring = |query, kv| RingAttention::new(&mut group, shape(query, kv, true)).map(drop);
        assert_eq!(ring(6, 3), Ok(()));
        assert_eq!(ring(6, 4), bad("query heads", 6, "a multiple of the KV heads"));
        assert_eq!(ring(0, 1), bad("query heads", 0, "at least 1"));
        assert_eq!(ring(1, 0), bad("KV heads", 0, "at least 1"));
        assert_eq!(ring(1 << 31, 1), bad("query heads", 1 << 31, "less than 2^32 elements of all heads"));
        let empty = AttentionShape { head_dim: 0, ..shape(1, 1, true) };
        assert_eq!(
            RingAttention::new(&mut group, empty).map(drop),
            bad("elements of a head", 0, "at least 1")
        );
    });
}

fn check_bytes<E: Elements>(world: &World) {
    let (ranks, tokens, element) = (4u64, 8u64, size_of::<E>() as u64);
    let mut group = communicator(world);
    for (query_heads, kv_heads) in [(8, 8), (8, 4), (8, 2), (4, 1)] {
        let shape = shape(query_heads, kv_heads, true);
        let zeros = |heads: usize| vec![E::zeroed(); tokens as usize * heads * DIM];
        let (query, key) = (zeros(query_heads), zeros(kv_heads));
        let (query_bytes, kv_bytes) =
            (element * tokens * (query_heads * DIM) as u64, element * tokens * DIM as u64);
        let attention = UlyssesAttention::new(&mut group, shape).unwrap().with_rows::<E>();
        group.take_counts();
        let of_all = 2 * query_bytes + 2 * kv_bytes * ranks.max(kv_heads as u64);
        let (_, tape) = attention.forward(&mut group, &query, &key, &key).unwrap();
        assert_eq!(group.take_counts().inter_node_bytes, of_all * (ranks - 1) / ranks);
        tape.backward(&mut group, &query).unwrap();
        assert_eq!(group.take_counts().inter_node_bytes, of_all * (ranks - 1) / ranks);

        let attention = RingAttention::new(&mut group, shape).unwrap().with_rows::<E>();
        group.take_counts();
        let (block, agreed) = (2 * kv_bytes * kv_heads as u64, 16 * (ranks - 1));
        let (_, tape) = attention.forward(&mut group, &query, &key, &key).unwrap();
        assert_eq!(group.take_counts().inter_node_bytes, agreed + (ranks - 1) * block);
        tape.backward(&mut group, &query).unwrap();
        assert_eq!(group.take_counts().inter_node_bytes, agreed + (ranks - 1) * 2 * block + block);
    }
}

#[test]
fn ranks_send_the_bytes_that_the_page_states() {
    on_ranks(&[0, 1, 2, 3], &tiny(), |world| check_bytes::<f32>(&world));
    on_ranks(&[0, 1, 2, 3], &tiny(), |world| check_bytes::<bf16>(&world));
}

#[test]
fn rows_of_different_elements_are_refused_on_all_ranks() {
    on_ranks(&[0, 0], &tiny(), |world| {
        let mut group = communicator(&world);
        let (rank, peer) = (world.rank(), 1 - world.rank());
        let shape = AttentionShape { query_heads: 2, kv_heads: 2, head_dim: 1, causal: false };
        let (wide, narrow) = ([1.0; 4], [bf16::ONE; 4]);

        let ring = RingAttention::new(&mut group, shape).unwrap();
        let result = match rank {
            0 => ring.forward(&mut group, &wide, &wide, &wide).map(drop),
            _ => ring.with_rows().forward(&mut group, &narrow, &narrow, &narrow).map(drop),
        };
        let (what, mine, theirs) = ("bytes of an element", [4, 2][rank as usize], [2, 4][rank as usize]);
        assert_eq!(result, Err(CallError::ConfigsDiffer { what, rank, peer, mine, theirs }.into()));

        let ulysses = UlyssesAttention::new(&mut group, shape).unwrap();
        let result = match rank {
            0 => ulysses.forward(&mut group, &wide, &wide, &wide).map(drop),
            _ => ulysses.with_rows().forward(&mut group, &narrow, &narrow, &narrow).map(drop),
        };
        assert!(matches!(result, Err(Error::Call(CallError::Disagree { .. }))), "{result:?}");
        assert_eq!(ring.forward(&mut group, &wide, &wide, &wide).unwrap().0, wide);
    });
}

/// This rank is wrong, or another one refused.
fn refused(error: &Error, wrong: bool, tensor: &str, len: usize) -> bool {
    match error {
        Error::Plan(PlanError::WrongShape { what, seen, .. }) => wrong && *what == tensor && *seen == len,
        Error::Call(CallError::PeerRefused { peer: 1, .. }) => !wrong,
        _ => false,
    }
}

#[test]
fn wrong_lengths_are_refused_on_all_ranks_and_the_next_call_works() {
    on_ranks(&[0, 0, 1], &tiny(), |world| {
        let mut group = communicator(&world);
        let shape = AttentionShape { query_heads: 3, kv_heads: 1, head_dim: 2, causal: false };
        let wrong = world.rank() == 1;
        let (query, key) = ([0.0; 12], [1.0; 4]);
        let long = [1.0; 6];
        let bad: &[f32] = if wrong { &long } else { &key };
        let none = [[0.0; 12], [1.0; 12]];
        let bad_of_output: &[f32] = if wrong { &key } else { &none[0] };

        let attention = UlyssesAttention::new(&mut group, shape).unwrap();
        let error = attention.forward(&mut group, &query, bad, &key).unwrap_err();
        assert!(refused(&error, wrong, "keys", 6), "{error}");
        let (output, tape) = attention.forward(&mut group, &query, &key, &key).unwrap();
        assert_eq!(output, none[1]);
        let error = tape.backward(&mut group, bad_of_output).unwrap_err();
        assert!(refused(&error, wrong, "gradients of outputs", 4), "{error}");
        assert_eq!(tape.backward(&mut group, &none[0]).unwrap().query, none[0]);

        let attention = RingAttention::new(&mut group, shape).unwrap();
        let error = attention.forward(&mut group, &query, &key, bad).unwrap_err();
        assert!(refused(&error, wrong, "values", 6), "{error}");
        let (output, tape) = attention.forward(&mut group, &query, &key, &key).unwrap();
        assert_eq!(output, none[1]);
        let error = tape.backward(&mut group, bad_of_output).unwrap_err();
        assert!(refused(&error, wrong, "gradients of outputs", 4), "{error}");
        assert_eq!(tape.backward(&mut group, &none[0]).unwrap().query, none[0]);
    });
}

#[test]
fn different_numbers_of_tokens_are_refused_on_all_ranks() {
    on_ranks(&[0, 0, 1], &tiny(), |world| {
        let mut group = communicator(&world);
        let shape = AttentionShape { query_heads: 3, kv_heads: 3, head_dim: 1, causal: true };
        let tokens = if world.rank() == 2 { 4 } else { 2 };
        let rows = vec![1.0; tokens * 3];

        let attention = UlyssesAttention::new(&mut group, shape).unwrap();
        let error = attention.forward(&mut group, &rows, &rows, &rows).unwrap_err();
        assert!(matches!(error, Error::Call(CallError::Disagree { .. })), "{error}");
        assert_eq!(attention.forward(&mut group, &[1.0; 6], &[1.0; 6], &[1.0; 6]).unwrap().0, [1.0; 6]);

        let attention = RingAttention::new(&mut group, shape).unwrap();
        let error = attention.forward(&mut group, &rows, &rows, &rows).unwrap_err();
        let (rank, peer, mine, theirs) =
            if world.rank() == 2 { (2, 0, 4, 2) } else { (world.rank(), 2, 2, 4) };
        assert_eq!(error, CallError::ConfigsDiffer { what: "tokens", rank, peer, mine, theirs }.into());
        let error = attention.forward(&mut group, &[1.0; 9], &[1.0; 9], &[1.0; 9]).unwrap_err();
        let (parameter, expected) = ("tokens of a rank", "an even number: it has two pieces");
        assert_eq!(error, Error::Plan(PlanError::BadParameter { parameter, seen: 3, expected }));
        assert_eq!(attention.forward(&mut group, &[1.0; 6], &[1.0; 6], &[1.0; 6]).unwrap().0, [1.0; 6]);
    });
}

#[test]
fn ranks_of_different_shapes_are_told_what_differs() {
    on_ranks(&[0, 0], &tiny(), |world| {
        let mut group = communicator(&world);
        let (rank, peer) = (world.rank(), 1 - world.rank());
        // As many elements on both ranks.
        let (kv_heads, head_dim) = [(1, 4), (2, 2)][rank as usize];
        let shape = AttentionShape { query_heads: 4, kv_heads, head_dim, causal: false };
        let (mine, theirs) = (kv_heads as u64, 3 - kv_heads as u64);
        let differ = CallError::ConfigsDiffer { what: "KV heads", rank, peer, mine, theirs };
        assert_eq!(RingAttention::new(&mut group, shape).unwrap_err(), differ.clone().into());
        assert_eq!(UlyssesAttention::new(&mut group, shape).unwrap_err(), differ.into());

        let shape = AttentionShape { query_heads: 2, kv_heads: 2, head_dim: 1, causal: rank == 0 };
        let (mine, theirs) = (u64::from(rank == 0), u64::from(rank == 1));
        let differ = CallError::ConfigsDiffer { what: "causal attention", rank, peer, mine, theirs };
        assert_eq!(UlyssesAttention::new(&mut group, shape).unwrap_err(), differ.into());
    });
}

#[test]
fn groups_in_which_a_rank_has_another_place_are_refused() {
    on_ranks(&[0, 0], &tiny(), |world| {
        let mut group = communicator(&world);
        let mut turned = Communicator::builder(&world.group(&[1, 0]).unwrap()).chunk(2048).build().unwrap();
        let shape = AttentionShape { query_heads: 2, kv_heads: 2, head_dim: 1, causal: true };
        let bad = PlanError::BadParameter {
            parameter: "rank in the group",
            seen: u64::from(1 - world.rank()),
            expected: "the rank that this was made for",
        };
        let rows = [1.0; 4];
        let ring = RingAttention::new(&mut group, shape).unwrap();
        assert_eq!(ring.forward(&mut turned, &rows, &rows, &rows).unwrap_err(), bad.clone().into());
        let ulysses = UlyssesAttention::new(&mut group, shape).unwrap();
        assert_eq!(ulysses.forward(&mut turned, &rows, &rows, &rows).unwrap_err(), bad.into());
        assert_eq!(ring.forward(&mut group, &rows, &rows, &rows).unwrap().0, rows);
    });
}

#[test]
fn keys_of_infinite_distance_have_no_weight_whichever_block_comes_first() {
    on_ranks(&[0, 0], &tiny(), |world| {
        let mut group = communicator(&world);
        let shape = AttentionShape { query_heads: 1, kv_heads: 1, head_dim: 1, causal: false };
        let attention = RingAttention::new(&mut group, shape).unwrap();
        let key = [f32::NEG_INFINITY, 1.0][world.rank() as usize];
        let (output, _) = attention.forward(&mut group, &[1.0], &[key], &[key.max(-7.0)]).unwrap();
        assert_eq!(output, [1.0]);
    });
}
