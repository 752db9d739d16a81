//! The best few of many, by falling key; of equal ones the first.
//!
//! ```text
//!   keys [E]    read as rows of 16 columns (32, 64 for more choices)
//!   bound       the k-th best of the columns' largest: k keys at least reach it, for 8 of 256 about 10 do
//!   places      of those that reach it, from a mask of bits
//!   best        each of these few goes where it belongs: behind as many as are better
//! ```
//!
//! Which keys these are cannot be foretold, so there is no branch for it.

use fearless_simd::prelude::*;
use fearless_simd::{Level, Simd, dispatch, f32x16, f64x8, i32x16, i64x8};

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
    pub(super) fn places(&self) -> impl Iterator<Item = u32> + '_ {
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
