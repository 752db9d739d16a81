//! Which experts a token chooses, by the keys of one token.
//!
//! ```text
//!   keys [E]    | 3 1 | 2 2 | 9 0 | 5 4 |    4 groups of 2, 2 kept, by the sum of the best two
//!   group score    4     4     9     9
//!   kept                     | 9 0 | 5 4 |   side by side, in order: the best of these are chosen
//! ```

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
    /// Fills `ids` with the best by key, best first.
    pub(super) fn choose(&mut self, select: Select, keys: &[f32], ids: &mut [i32]) {
        let Select::Groups { count, kept, by } = select else {
            let best = self.top_k.of(keys, ids.len());
            return ids.iter_mut().zip(best).for_each(|(id, at)| *id = at as i32);
        };
        let size = keys.len() / count as usize;
        self.worth.clear();
        for group in keys.chunks_exact(size) {
            let worth = worth(by, group, &mut self.top_k);
            self.worth.push(worth);
        }
        self.kept.clear();
        self.kept.extend(self.top_k.of(&self.worth, kept as usize));
        self.kept.sort_unstable();
        self.keys.clear();
        self.kept
            .iter()
            .for_each(|&group| self.keys.extend_from_slice(&keys[group as usize * size..][..size]));
        let best = self.top_k.of(&self.keys, ids.len());
        for (id, at) in ids.iter_mut().zip(best) {
            let nth = at / size as u32;
            *id = (at + (self.kept[nth as usize] - nth) * size as u32) as i32;
        }
    }
}

fn worth(by: GroupScore, group: &[f32], top_k: &mut TopK) -> f32 {
    match by {
        GroupScore::Best | GroupScore::SumOfBest(1) => largest(group),
        GroupScore::SumOfBest(2) => best_two(group),
        GroupScore::SumOfBest(n) => top_k.of(group, n as usize).map(|at| group[at as usize]).sum(),
    }
}

/// The sum of the best two: of eight columns first, then of half as many, and so on.
fn best_two(keys: &[f32]) -> f32 {
    let order = |a: f32, b: f32| if b > a { (b, a) } else { (a, b) };
    let (mut first, mut second) = ([f32::NEG_INFINITY; 8], [f32::NEG_INFINITY; 8]);
    let mut row = |keys: &[f32]| {
        for ((a, b), &key) in first.iter_mut().zip(&mut second).zip(keys) {
            let (larger, smaller) = order(*a, key);
            (*a, *b) = (larger, order(*b, smaller).0);
        }
    };
    let mut rows = keys.chunks_exact(8);
    (&mut rows).for_each(&mut row);
    row(rows.remainder());
    for half in [4, 2, 1] {
        for column in 0..half {
            let (larger, smaller) = order(first[column], first[column + half]);
            let seconds = order(second[column], second[column + half]).0;
            (first[column], second[column]) = (larger, order(smaller, seconds).0);
        }
    }
    first[0] + second[0]
}
