//! Attention of the queries of one rank over blocks of keys, forward and backward.
//!
//! An online softmax keeps, for each query and head, the largest score so far, the sum of powers
//! and the sum of values by their powers. A block that raises the largest score corrects both sums
//! first. They are divided once, at the end:
//!
//! ```text
//!   block           largest' = max(largest, scores)            c = e^(largest - largest')
//!                   sum'     = c sum    + e^(score - largest') + ..
//!                   output'  = c output + e^(score - largest') value + ..
//!   end             output / sum
//!
//!   backward        p        = e^(score - largest) / sum
//!                   of_score = p (of_output . value - of_output . output) / sqrt(head_dim)
//! ```
//!
//! The first block's correction is `e^-inf`, which is 0. So attention over one block is a plain
//! softmax. While all scores are `-inf`, 0 stands for the largest: such keys have no weight.

use super::shape::AttentionShape;

/// Queries of a rank with what attention has made of them, and what a backward pass needs of that.
/// Rows are `[tokens, query_heads]`.
#[derive(Clone, Debug)]
pub(super) struct Attended {
    shape: AttentionShape,
    query: Vec<f32>,
    largest: Vec<f32>,
    sum: Vec<f32>,
    output: Vec<f32>,
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

impl Attended {
    /// Queries that have seen no key.
    pub fn new(shape: AttentionShape, query: Vec<f32>) -> Attended {
        let rows = query.len() / shape.head_dim;
        let output = vec![0.0; query.len()];
        Attended { shape, query, largest: vec![f32::NEG_INFINITY; rows], sum: vec![0.0; rows], output }
    }

    /// Elements of the outputs.
    pub fn len(&self) -> usize {
        self.output.len()
    }

    /// Lets each query see the first `visible(token)` keys of a block.
    pub fn see(&mut self, block: Block<&[f32]>, visible: impl Fn(usize) -> usize) {
        let (shape, scale) = (self.shape, self.scale());
        let rows = self.query.chunks_exact(shape.head_dim);
        let outputs = self.output.chunks_exact_mut(shape.head_dim);
        let mut scores = Vec::new();
        for (row, (query, output)) in rows.zip(outputs).enumerate() {
            let (token, head) = (row / shape.query_heads, row % shape.query_heads);
            let keys = head_rows(shape, head, block.key).take(visible(token));
            scores.clear();
            scores.extend(keys.map(|key| dot(query, key) * scale));
            if scores.is_empty() {
                continue;
            }
            let before = self.largest[row];
            let largest = scores.iter().copied().fold(before, f32::max);
            // Keys of score -inf have no weight: only a finite score can be subtracted from them.
            let base = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
            let correction = libm::expf(before - base);
            let mut sum = self.sum[row] * correction;
            output.iter_mut().for_each(|output| *output *= correction);
            for (score, value) in scores.iter().zip(head_rows(shape, head, block.value)) {
                let power = libm::expf(score - base);
                sum += power;
                add_scaled(output, power, value);
            }
            (self.largest[row], self.sum[row]) = (largest, sum);
        }
    }

    /// Divides the outputs, after the last block. Returns a copy of them, for the caller.
    pub fn finish(&mut self) -> Vec<f32> {
        for (output, sum) in self.output.chunks_exact_mut(self.shape.head_dim).zip(&self.sum) {
            output.iter_mut().for_each(|output| *output /= sum);
        }
        self.output.clone()
    }

    /// The gradients of outputs in the form that all blocks use.
    pub fn output_gradients<'a>(&self, of_output: &'a [f32]) -> OutputGradients<'a> {
        let rows = |of: &'a [f32]| of.chunks_exact(self.shape.head_dim);
        let outputs = self.output.chunks_exact(self.shape.head_dim);
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
        let (shape, scale) = (self.shape, self.scale());
        let rows = self.query.chunks_exact(shape.head_dim).zip(of.of_output.chunks_exact(shape.head_dim));
        let of_queries = of_query.chunks_exact_mut(shape.head_dim);
        for (row, ((query, of_output), of_query)) in rows.zip(of_queries).enumerate() {
            let (token, head) = (row / shape.query_heads, row % shape.query_heads);
            let keys = head_rows(shape, head, block.key).zip(head_rows(shape, head, block.value));
            let of_keys = head_rows_mut(shape, head, of_block.key);
            let of_keys = of_keys.zip(head_rows_mut(shape, head, of_block.value));
            for ((key, value), (of_key, of_value)) in keys.zip(of_keys).take(visible(token)) {
                let score = dot(query, key) * scale;
                let p = libm::expf(score - self.largest[row]) / self.sum[row];
                let of_score = p * (dot(of_output, value) - of.products[row]) * scale;
                add_scaled(of_query, of_score, key);
                add_scaled(of_key, of_score, query);
                add_scaled(of_value, p, of_output);
            }
        }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.shape.head_dim as f32).sqrt()
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
