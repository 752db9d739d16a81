//! Which experts a token chooses, by the keys of one token.
//!
//! ```text
//!   keys [E]    | 3 1 | 2 2 | 9 0 | 5 4 |    4 groups of 2, 2 kept, by the sum of the best two
//!   group score    4     4     9     9
//!   kept                     | 9 0 | 5 4 |   side by side, in order: the best of these are chosen
//! ```

use fearless_simd::prelude::*;
use fearless_simd::{Level, Simd, dispatch, f32x8};

use super::math::largest;
use super::top_k::TopK;
use super::{GroupScore, Select};

/// Chooses; keeps its memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Selector {
    top_k: TopK,
    worth: Vec<f32>,
    kept: Vec<u32>,
    keys: Vec<f32>,
}

impl Selector {
    /// Fills `ids` with the best by key, best first. Returns whether they stay the best, perhaps in
    /// another order, under any keys that differ by less than `error`. `error` must exceed 2^-20 of
    /// the largest key.
    pub(super) fn choose(&mut self, select: Select, keys: &[f32], error: f32, ids: &mut [i32]) -> bool {
        let Select::Groups { count, kept, by } = select else {
            let clear = self.top_k.find(keys, ids.len(), 2.0 * error);
            ids.iter_mut().zip(self.top_k.places()).for_each(|(id, at)| *id = at as i32);
            return clear;
        };
        let size = keys.len() / count as usize;
        self.weigh(by, keys, size);
        // A sum of n keys is off by n errors, and n - 1 times by what each addition rounds away.
        let n = by.count() as f32;
        let kept_clear = self.top_k.find(&self.worth, kept as usize, 2.0 * error * n * n);
        self.kept.clear();
        self.kept.extend(self.top_k.places());
        self.kept.sort_unstable();
        self.keys.clear();
        self.kept
            .iter()
            .for_each(|&group| self.keys.extend_from_slice(&keys[group as usize * size..][..size]));
        let clear = self.top_k.find(&self.keys, ids.len(), 2.0 * error);
        for (id, at) in ids.iter_mut().zip(self.top_k.places()) {
            let nth = at / size as u32;
            *id = (at + (self.kept[nth as usize] - nth) * size as u32) as i32;
        }
        kept_clear && clear
    }

    /// What each group of `size` is worth.
    fn weigh(&mut self, by: GroupScore, keys: &[f32], size: usize) {
        let Selector { worth, top_k, .. } = self;
        worth.clear();
        let groups = keys.chunks_exact(size);
        match by {
            GroupScore::Best | GroupScore::SumOfBest(1) => worth.extend(groups.map(largest)),
            GroupScore::SumOfBest(2) => {
                worth.resize(groups.len(), 0.0);
                dispatch!(Level::new(), simd => best_two_each(simd, keys, worth));
            }
            GroupScore::SumOfBest(n) => worth.extend(
                groups.map(|group| top_k.of(group, n as usize).map(|at| group[at as usize]).sum::<f32>()),
            ),
        }
    }
}

impl GroupScore {
    /// How many keys are added up.
    fn count(self) -> u32 {
        match self {
            GroupScore::Best => 1,
            GroupScore::SumOfBest(n) => n,
        }
    }
}

/// The sums of the best two of groups of one size.
#[inline(always)]
fn best_two_each<S: Simd>(simd: S, keys: &[f32], sums: &mut [f32]) {
    let size = keys.len() / sums.len();
    for (sum, group) in sums.iter_mut().zip(keys.chunks_exact(size)) {
        *sum = best_two(simd, group);
    }
}

/// The sum of the best two: of eight columns first, then of half as many, and so on.
#[inline(always)]
fn best_two<S: Simd>(simd: S, keys: &[f32]) -> f32 {
    let none = f32x8::splat(simd, f32::NEG_INFINITY);
    let mut best = (none, none);
    let (rows, rest) = keys.as_chunks::<8>();
    for row in rows {
        best = merge(best, (f32x8::from_slice(simd, row), none));
    }
    if !rest.is_empty() {
        let mut row = [f32::NEG_INFINITY; 8];
        row[..rest.len()].copy_from_slice(rest);
        best = merge(best, (f32x8::from_slice(simd, &row), none));
    }
    let ((first, others), (second, more)) = (best.0.split(), best.1.split());
    let best = merge((first, second), (others, more));
    let best = merge(best, (best.0.rotate_elements_left::<2>(), best.1.rotate_elements_left::<2>()));
    let best = merge(best, (best.0.rotate_elements_left::<1>(), best.1.rotate_elements_left::<1>()));
    best.0[0] + best.1[0]
}

/// The best two of two pairs, column by column.
#[inline(always)]
fn merge<S: Simd, V: SimdFloat<S>>(one: (V, V), other: (V, V)) -> (V, V) {
    (one.0.max(other.0), one.0.min(other.0).max(one.1.max(other.1)))
}
