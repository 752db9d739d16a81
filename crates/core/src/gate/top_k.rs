//! The experts with the best keys: of all, or of the best groups; of equal ones the first.
//!
//! ```text
//!   keys [E]    | 3 1 | 2 2 | 9 0 | 5 4 |    4 groups of 2, 2 kept, by the sum of the best two
//!   group score    4     4     9     9
//!   kept                     | 9 0 | 5 4 |   side by side, in order: the best of these are chosen
//! ```
//!
//! The best few of many are found without a branch for each key, since nothing foretells which keys
//! these are:
//!
//! ```text
//!   keys [E]    read as rows of 16 columns (32, 64 for more choices)
//!   bound       the k-th best of the columns' largest: k keys at least reach it, for 8 of 256 about 10 do
//!   places      of those that reach it, from a mask of bits
//!   best        each of these few goes where it belongs: behind as many as are better
//! ```

use fearless_simd::Select as _;
use fearless_simd::prelude::*;
use fearless_simd::{Level, Simd, dispatch, f32x8, f32x16, f64x8, i32x16, i64x8};

use super::math::largest;
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

    /// Score of each group of `size`.
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

/// A place and its key share the 52 bits of a float.
const PLACE_BITS: u32 = 20;

/// So many keys at most.
pub(super) const PLACES: u32 = 1 << PLACE_BITS;

/// Keys that are compared with the bound together.
const BLOCK: usize = 64;

/// As many candidates are put in order by counting, for each, those that are better; more are
/// sorted.
const FEW: usize = 32;

/// Finds the best of a row; keeps its memory.
#[derive(Clone, Debug, Default)]
pub(super) struct TopK {
    /// Keys that reach the bound, packed, by place.
    candidates: Vec<f64>,
    /// The same by falling value; in the end the best.
    best: Vec<f64>,
}

impl TopK {
    /// The places of the `k` best of `keys`, best first. From `k` to [`PLACES`] keys, none NaN; -0
    /// and +0 are equal.
    pub(super) fn of(&mut self, keys: &[f32], k: usize) -> impl Iterator<Item = u32> + '_ {
        self.find(keys, k, 0.0);
        self.places()
    }

    /// Finds the `k` best of `keys`; whether each of them is more than `gap` above each of the
    /// others.
    pub(super) fn find(&mut self, keys: &[f32], k: usize, gap: f32) -> bool {
        for list in [&mut self.candidates, &mut self.best] {
            list.clear();
            // Where all are equal all are candidates.
            list.reserve(keys.len());
        }
        dispatch!(Level::new(), simd => self.put_in_order(simd, keys, k, gap));
        let clear = match (self.best.get(k.wrapping_sub(1)), self.best.get(k)) {
            (Some(&last), Some(&next)) => keys[place(last) as usize] - keys[place(next) as usize] > gap,
            _ => true,
        };
        self.best.truncate(k);
        clear
    }

    /// The places that were found, best first.
    fn places(&self) -> impl Iterator<Item = u32> + '_ {
        self.best.iter().map(|&packed| place(packed))
    }

    /// Leaves the best by falling value: all that lie at most the gap below the k-th, and perhaps
    /// more.
    #[inline(always)]
    fn put_in_order<S: Simd>(&mut self, simd: S, keys: &[f32], k: usize, gap: f32) {
        reaching(simd, keys, bound(simd, keys, k) - gap, &mut self.candidates);
        let TopK { candidates, best } = self;
        best.resize(candidates.len(), 0.0);
        match candidates.len() {
            0..=8 => rank::<S, 1>(simd, candidates, best),
            9..=16 => rank::<S, 2>(simd, candidates, best),
            17..=FEW => rank::<S, 4>(simd, candidates, best),
            _ => {
                best.copy_from_slice(candidates);
                best.sort_unstable_by(|a, b| b.total_cmp(a));
            }
        }
    }
}

/// A value that at least `k` keys reach.
#[inline(always)]
fn bound<S: Simd>(simd: S, keys: &[f32], k: usize) -> f32 {
    match k {
        0..=16 => bound_of::<S, 1>(simd, keys, k),
        17..=32 => bound_of::<S, 2>(simd, keys, k),
        33..=64 => bound_of::<S, 4>(simd, keys, k),
        _ => f32::NEG_INFINITY,
    }
}

/// The k-th best of the largest of `16 V` columns.
#[inline(always)]
fn bound_of<S: Simd, const V: usize>(simd: S, keys: &[f32], k: usize) -> f32 {
    if keys.len() < 32 * V {
        return f32::NEG_INFINITY;
    }
    let mut columns = [f32x16::splat(simd, f32::NEG_INFINITY); V];
    for row in keys.chunks_exact(16 * V) {
        for (column, keys) in columns.iter_mut().zip(row.chunks_exact(16)) {
            *column = column.max(f32x16::from_slice(simd, keys));
        }
    }
    let none = f32x16::splat(simd, f32::INFINITY);
    let mut least = none;
    for &some in &columns {
        let mut above = i32x16::splat(simd, 0);
        for others in &columns {
            for &other in others.as_slice() {
                above += f32x16::splat(simd, other).simd_gt(some).to_vector();
            }
        }
        let among = (above + k as i32).simd_gt(i32x16::splat(simd, 0));
        least = least.min(among.select(some, none));
    }
    least.reduce_min()
}

/// Packs all keys that are at least `least`, by place.
#[inline(always)]
fn reaching<S: Simd>(simd: S, keys: &[f32], least: f32, to: &mut Vec<f64>) {
    let least = f32x16::splat(simd, least);
    for (number, block) in keys.chunks(BLOCK).enumerate() {
        let (rows, rest) = block.as_chunks::<16>();
        let mut mask = 0;
        for row in rows.iter().rev() {
            mask = mask << 16 | f32x16::from_slice(simd, row).simd_ge(least).to_bitmask();
        }
        if !rest.is_empty() {
            let mut row = [0.0; 16];
            row[..rest.len()].copy_from_slice(rest);
            let reached = f32x16::from_slice(simd, &row).simd_ge(least).to_bitmask();
            mask |= (reached & !(u64::MAX << rest.len())) << (16 * rows.len());
        }
        for bit in Bits(mask) {
            let at = number * BLOCK + bit as usize;
            to.push(pack(keys[at], at as u32));
        }
    }
}

/// Puts up to `8 V` different values in falling order.
#[inline(always)]
fn rank<S: Simd, const V: usize>(simd: S, values: &[f64], best: &mut [f64]) {
    let mut room = [[0.0; 8]; V];
    room.as_flattened_mut()[..values.len()].copy_from_slice(values);
    let mut above = [[0; 8]; V];
    for (row, above) in room.iter().zip(&mut above) {
        let row = f64x8::from_slice(simd, row);
        let mut better = i64x8::splat(simd, 0);
        for &value in values {
            better -= f64x8::splat(simd, value).simd_gt(row).to_vector();
        }
        *above = better.into();
    }
    for (&value, &above) in values.iter().zip(above.as_flattened()) {
        best[above as usize] = value;
    }
}

/// The places of the bits that are set, from the lowest.
struct Bits(u64);

impl Iterator for Bits {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        let bit = self.0.trailing_zeros();
        (self.0 != 0).then(|| {
            self.0 &= self.0 - 1;
            bit
        })
    }
}

/// From 1 up to 2: grows with the key and, of equal keys, falls with the place. A float, because
/// two instructions sort two of them.
#[inline(always)]
fn pack(key: f32, at: u32) -> f64 {
    f64::from_bits(1023 << 52 | u64::from(ordered(key)) << PLACE_BITS | u64::from(!at % PLACES))
}

/// The place that was packed.
fn place(packed: f64) -> u32 {
    !(packed.to_bits() as u32) % PLACES
}

/// A number that grows with the key; -0 and +0 have the same.
#[inline(always)]
pub(super) fn ordered(key: f32) -> u32 {
    // Of -0 and +0, the sum makes +0.
    let bits = (key + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn chosen(keys: &[f32], k: usize) -> Vec<u32> {
        TopK::default().of(keys, k).collect()
    }

    #[test]
    fn of_equal_keys_the_first_is_chosen() {
        assert_eq!(chosen(&[1.0, 3.0, 3.0, 2.0, 3.0], 3), [1, 2, 4]);
        assert_eq!(chosen(&[0.5; 256], 8), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(chosen(&[-0.0, 0.0, -0.0, 0.0], 3), [0, 1, 2]);
        assert_eq!(chosen(&[f32::MIN, f32::MAX, f32::MIN, -1.0, 1e-45], 5), [1, 4, 3, 0, 2]);
    }

    #[test]
    fn a_masked_key_comes_last() {
        assert_eq!(chosen(&[f32::NEG_INFINITY, -1.0, f32::NEG_INFINITY, -2.0], 2), [1, 3]);
    }

    proptest! {
        #[test]
        fn the_best_are_those_of_a_stable_sort(
            keys in prop::collection::vec(prop_oneof![-1e3f32..1e3, (-4i8..4).prop_map(f32::from)], 1..400),
            k in 1usize..80,
        ) {
            let k = k.min(keys.len());
            let mut order: Vec<u32> = (0..keys.len() as u32).collect();
            order.sort_by(|&a, &b| keys[b as usize].partial_cmp(&keys[a as usize]).unwrap());
            prop_assert_eq!(chosen(&keys, k), &order[..k]);
        }
    }
}
