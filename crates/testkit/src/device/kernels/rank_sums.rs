//! Sums of a token's rows at the rank of their experts.

use sidelane::device::RankSumArgs;
use sidelane::dtype::PartialDtype;
use sidelane::rows::Arithmetic;

use crate::TestError;
use crate::device::gpu::{Bench, POISON, same};
use crate::values::{Random, Terms, any_f32, any_row};

/// Rows of one rank: by expert, then by the sum that they are part of.
#[derive(Clone, Debug)]
pub struct Received {
    dtype: Arithmetic,
    columns: usize,
    sums: usize,
    rows: Vec<Vec<u8>>,
    numbers: Vec<i32>,
    /// Of each expert, without and with pads.
    counts: Vec<i64>,
    /// Experts as their rows are added up.
    order: Vec<u32>,
    weights: Option<Vec<f32>>,
}

impl Received {
    /// About one in three experts has a row of each sum; each expert's rows are padded to a
    /// multiple of three.
    pub fn any(
        random: &mut Random,
        (sums, experts, columns): (usize, usize, usize),
        (dtype, weighted): (Arithmetic, bool),
    ) -> Self {
        let (mut numbers, mut used, mut padded) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..experts {
            let first = numbers.len();
            numbers.extend((0..sums as i32).filter(|_| random.next().is_multiple_of(3)));
            used.push((numbers.len() - first) as i64);
            numbers.resize(first + (numbers.len() - first).next_multiple_of(3), -1);
            padded.push((numbers.len() - first) as i64);
        }
        let rows = numbers.iter().map(|_| any_row(random, dtype, columns)).collect();
        let weights = weighted.then(|| numbers.iter().map(|_| any_f32(random)).collect());
        let mut order: Vec<u32> = (0..experts as u32).collect();
        for last in (1..experts).rev() {
            order.swap(last, random.below(last as u32 + 1) as usize);
        }
        Received { dtype, columns, sums, rows, numbers, counts: [used, padded].concat(), order, weights }
    }

    /// Rows of all experts, with pads.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Compares the device's sums with those by their definition: what no row is part of stays.
    pub fn check(&self, bench: &Bench) -> Result<(), TestError> {
        let (rows, numbers) = (bench.put(&self.rows.concat())?, bench.put(&self.numbers)?);
        let (counts, order) = (bench.put(&self.counts)?, bench.put(&self.order)?);
        let weights = self.weights.as_ref().map(|weights| bench.put(weights)).transpose()?;
        let out = bench.room((self.sums * self.columns * self.dtype.size()) as u64)?;
        let sums = RankSumArgs {
            sums: self.sums as u32,
            columns: self.columns as u32,
            dtype: self.dtype.into(),
            n_rows: self.rows.len() as u32,
            rows: rows.span()?,
            numbers: numbers.span()?,
            n_experts: self.order.len() as u32,
            counts: counts.span()?,
            order: order.span()?,
            weights: weights.as_ref().map(|weights| weights.span()).transpose()?,
            out: out.span()?,
        };
        bench.kernels.rank_sums(&bench.stream, &sums)?;
        same("sums by rank", &bench.read(&out)?, &self.reference())
    }

    fn reference(&self) -> Vec<u8> {
        let padded = &self.counts[self.order.len()..];
        let begin = |expert: u32| padded[..expert as usize].iter().sum::<i64>() as usize;
        let rows_of = |&expert: &u32| begin(expert)..begin(expert + 1);
        let mut of_sums = vec![Vec::new(); self.sums];
        for row in self.order.iter().flat_map(rows_of) {
            if let Ok(sum) = usize::try_from(self.numbers[row]) {
                of_sums[sum].push(row);
            }
        }
        let of_sum = |at: &Vec<usize>| {
            if at.is_empty() {
                return vec![POISON; self.columns * self.dtype.size()];
            }
            let rows: Vec<Vec<u8>> = at.iter().map(|&row| self.rows[row].clone()).collect();
            let weights: Option<Vec<f32>> =
                self.weights.as_ref().map(|weights| at.iter().map(|&row| weights[row]).collect());
            let terms = Terms {
                dtype: self.dtype,
                wire: PartialDtype::F32,
                rows: &rows,
                weights: weights.as_deref(),
                groups: &[rows.len() as u32],
            };
            terms.sum(self.columns, self.dtype)
        };
        of_sums.iter().flat_map(of_sum).collect()
    }
}
