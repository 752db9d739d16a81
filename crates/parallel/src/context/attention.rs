//! Attention of the queries of one rank over blocks of keys, forward and backward.
//!
//! Of each block a query and head has the largest score, the sum of powers and the sum of values by
//! their powers. An online softmax adds what two blocks gave, and corrects both by the larger score
//! first. So a block can be corrected and added while the next one is seen. Sums are divided once,
//! at the end:
//!
//! ```text
//!   block           largest  = max(scores)
//!                   sum      = e^(score - largest) + ..
//!                   output   = e^(score - largest) value + ..
//!   two blocks      largest  = max(largest1, largest2)         c = e^(largest1 - largest), e^(largest2 - largest)
//!                   sum      = c1 sum1    + c2 sum2
//!                   output   = c1 output1 + c2 output2
//!   end             output / sum
//!
//!   backward        p        = e^(score - largest) / sum
//!                   of_score = p (of_output . value - of_output . output) / sqrt(head_dim)
//! ```
//!
//! So attention over one block is a plain softmax. While all scores are `-inf`, 0 stands for the
//! largest: such keys have no weight.

use super::shape::AttentionShape;

/// Queries of a rank, `[tokens, query_heads, head_dim]`.
#[derive(Clone, Debug)]
pub(super) struct Queries {
    shape: AttentionShape,
    values: Vec<f32>,
}

/// Results of queries for the blocks that they have seen: a row of `output` and one number of the
/// others for each query and head.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    largest: Vec<f32>,
    sum: Vec<f32>,
    output: Vec<f32>,
}

/// Queries with what they have of all blocks, divided: what a backward pass needs.
#[derive(Clone, Debug)]
pub(super) struct Attended {
    queries: Queries,
    seen: Seen,
}

/// Keys and values of a block, or their gradients: `[tokens, kv_heads, head_dim]` each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block<T> {
    pub key: T,
    pub value: T,
}

impl Block<Vec<f32>> {
    pub fn as_slices(&self) -> Block<&[f32]> {
        Block { key: &self.key, value: &self.value }
    }

    pub fn as_mut_slices(&mut self) -> Block<&mut [f32]> {
        Block { key: &mut self.key, value: &mut self.value }
    }

    /// Gradients that nothing was added to.
    pub fn zeros(&self) -> Self {
        Block { key: vec![0.0; self.key.len()], value: vec![0.0; self.value.len()] }
    }
}

/// Gradients of outputs, with their products with the outputs: `[tokens, query_heads]`.
#[derive(Clone, Debug)]
pub(super) struct OutputGradients<'a> {
    of_output: &'a [f32],
    products: Vec<f32>,
}

impl Queries {
    pub fn new(shape: AttentionShape, values: Vec<f32>) -> Queries {
        Queries { shape, values }
    }

    /// Lets each query see the first `visible(token)` keys of a block.
    pub fn see(&self, block: Block<&[f32]>, visible: impl Fn(usize) -> usize) -> Seen {
        let (shape, scale) = (self.shape, self.scale());
        let rows = self.values.len() / shape.head_dim;
        let mut seen = Seen {
            largest: vec![f32::NEG_INFINITY; rows],
            sum: vec![0.0; rows],
            output: vec![0.0; self.values.len()],
        };
        let queries = self.values.chunks_exact(shape.head_dim);
        let outputs = seen.output.chunks_exact_mut(shape.head_dim);
        let mut scores = Vec::new();
        for (row, (query, output)) in queries.zip(outputs).enumerate() {
            let (token, head) = (row / shape.query_heads, row % shape.query_heads);
            let keys = head_rows(shape, head, block.key).take(visible(token));
            scores.clear();
            scores.extend(keys.map(|key| dot(query, key) * scale));
            let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let (base, mut sum) = (base(largest), 0.0);
            for (score, value) in scores.iter().zip(head_rows(shape, head, block.value)) {
                let power = libm::expf(score - base);
                sum += power;
                add_scaled(output, power, value);
            }
            (seen.largest[row], seen.sum[row]) = (largest, sum);
        }
        seen
    }

    /// Divides the outputs, after the last block. Returns a copy of them, for the caller.
    pub fn finish(self, mut seen: Seen) -> (Vec<f32>, Attended) {
        for (output, sum) in seen.output.chunks_exact_mut(self.shape.head_dim).zip(&seen.sum) {
            output.iter_mut().for_each(|output| *output /= sum);
        }
        (seen.output.clone(), Attended { queries: self, seen })
    }

    fn scale(&self) -> f32 {
        1.0 / (self.shape.head_dim as f32).sqrt()
    }
}

impl Seen {
    /// Adds what the same queries have of another block.
    pub fn add(&mut self, block: &Seen) {
        let head_dim = self.output.len() / self.sum.len().max(1);
        let outputs = self.output.chunks_exact_mut(head_dim.max(1));
        for (row, (output, of_block)) in outputs.zip(block.output.chunks_exact(head_dim.max(1))).enumerate() {
            let largest = self.largest[row].max(block.largest[row]);
            let correction = |before: f32| libm::expf(before - base(largest));
            let (own, others) = (correction(self.largest[row]), correction(block.largest[row]));
            self.sum[row] = self.sum[row] * own + block.sum[row] * others;
            for (output, of_block) in output.iter_mut().zip(of_block) {
                *output = *output * own + of_block * others;
            }
            self.largest[row] = largest;
        }
    }
}

/// The number subtracted from scores. Keys of score -inf have no weight, and only a finite number
/// can be subtracted from them.
fn base(largest: f32) -> f32 {
    if largest == f32::NEG_INFINITY { 0.0 } else { largest }
}

impl Attended {
    /// Elements of the outputs.
    pub fn len(&self) -> usize {
        self.seen.output.len()
    }

    /// The gradients of outputs in the form that all blocks use.
    pub fn output_gradients<'a>(&self, of_output: &'a [f32]) -> OutputGradients<'a> {
        let rows = |of: &'a [f32]| of.chunks_exact(self.queries.shape.head_dim);
        let outputs = self.seen.output.chunks_exact(self.queries.shape.head_dim);
        let products = rows(of_output).zip(outputs).map(|(of_output, output)| dot(of_output, output));
        OutputGradients { of_output, products: products.collect() }
    }

    /// Adds the gradients of a block, and of queries through it.
    pub fn add_gradients(
        &self,
        block: Block<&[f32]>,
        of: &OutputGradients<'_>,
        visible: impl Fn(usize) -> usize,
        of_query: &mut [f32],
        of_block: Block<&mut [f32]>,
    ) {
        let (shape, scale) = (self.queries.shape, self.queries.scale());
        let queries = self.queries.values.chunks_exact(shape.head_dim);
        let rows = queries.zip(of.of_output.chunks_exact(shape.head_dim));
        let of_queries = of_query.chunks_exact_mut(shape.head_dim);
        for (row, ((query, of_output), of_query)) in rows.zip(of_queries).enumerate() {
            let (token, head) = (row / shape.query_heads, row % shape.query_heads);
            let keys = head_rows(shape, head, block.key).zip(head_rows(shape, head, block.value));
            let of_keys = head_rows_mut(shape, head, of_block.key);
            let of_keys = of_keys.zip(head_rows_mut(shape, head, of_block.value));
            for ((key, value), (of_key, of_value)) in keys.zip(of_keys).take(visible(token)) {
                let score = dot(query, key) * scale;
                let p = libm::expf(score - self.seen.largest[row]) / self.seen.sum[row];
                let of_score = p * (dot(of_output, value) - of.products[row]) * scale;
                add_scaled(of_query, of_score, key);
                add_scaled(of_key, of_score, query);
                add_scaled(of_value, p, of_output);
            }
        }
    }
}

/// Rows of the KV head of a query head, by token.
fn head_rows(shape: AttentionShape, query_head: usize, of: &[f32]) -> impl Iterator<Item = &[f32]> {
    of.chunks_exact(shape.head_dim).skip(shape.kv_head(query_head)).step_by(shape.kv_heads)
}

fn head_rows_mut(
    shape: AttentionShape,
    query_head: usize,
    of: &mut [f32],
) -> impl Iterator<Item = &mut [f32]> {
    of.chunks_exact_mut(shape.head_dim).skip(shape.kv_head(query_head)).step_by(shape.kv_heads)
}

/// By ascending element, from +0.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |sum, (a, b)| sum + a * b)
}

/// `sum + factor row`
fn add_scaled(sum: &mut [f32], factor: f32, row: &[f32]) {
    sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += factor * value);
}
