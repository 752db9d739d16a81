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

mod visible;

use half::{bf16, f16};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sidelane_core::dtype::{Element, PartialDtype};
use sidelane_core::plan::RowLayout;

pub use visible::{Case, Row, Visible};

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
pub trait Real: Element + Into<f32> {}
impl<E: Element + Into<f32>> Real for E {}

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
fn element<E>(tensor: u32, rank: usize, row: usize, column: usize) -> E
where
    f32: To<E>,
{
    let mixed = [rank as u32, row as u32, column as u32]
        .iter()
        .fold(tensor.wrapping_mul(0x9e37_79b9) ^ 0x55, |hash, &n| {
            (hash ^ n).wrapping_mul(0x85eb_ca6b).rotate_left(13)
        });
    ((mixed >> 8) as f32 / (1 << 22) as f32 - 2.0).to()
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

impl<E: Real> Reference<E>
where
    f32: To<E>,
{
    /// Random tokens, others for each seed.
    pub fn seeded(case: &Case, seed: u64) -> Self {
        let of_rank = |(seed, &count)| tokens(seed, count, case.hidden, case.top_k, case.map.experts());
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

    /// So many rows at a rank of the tensor with this number.
    pub fn tensor(&self, number: u32, rank: usize, rows: usize) -> Vec<E> {
        let row = |row: usize| (0..self.case.hidden).map(move |column| element(number, rank, row, column));
        (0..rows).flat_map(row).collect()
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
            }
        }
        (weights, experts)
    }

    /// Outputs of a rank's experts: the tensor with this number, NaN where no sum may read.
    pub fn outputs(&self, me: usize, number: u32) -> Vec<E> {
        let mut y = self.tensor(number, me, self.seen.rows[me].len());
        for (row, y) in self.seen.rows[me].iter().zip(y.chunks_exact_mut(self.case.hidden)) {
            if row.is_none() {
                y.fill(f32::NAN.to());
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
                    };
                }
                total.to()
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
            row.iter().map(|&g| (weight * g.into()).to()).collect()
        };
        rows.chunks_exact(self.case.hidden).zip(weights).flat_map(of_row).collect()
    }

    /// Gradients of the weights of a weighted combine: `<y, g>` of these two tensors.
    pub fn products(&self, me: usize, outputs: u32, gradients: u32) -> Vec<f32> {
        let (hidden, k, sent) = (self.case.hidden, self.case.top_k as usize, self.sent(gradients, me));
        self.of_choices(me, |rank, row, choice| {
            let y: Vec<E> = (0..hidden).map(|column| element(outputs, rank, row, column)).collect();
            dot(&y, &sent[choice / k * hidden..][..hidden])
        })
    }
}
