//! The best few of many, by falling key; of equal ones the first.
//!
//! ```text
//!   keys [E]    read as rows of 8 columns (16, 32, 64 for more choices)
//!   bound       the least of the columns' largest: as many keys as there are columns reach it, for 8 of 256 about 22 do
//!   places      of those that reach it, from a mask of bits
//!   best        these few, put in order
//! ```
//!
//! Which keys these are cannot be foretold, so there is no branch for it.

/// A place and its key share the 52 bits of a float.
const PLACE_BITS: u32 = 20;

/// So many keys at most.
pub(super) const PLACES: u32 = 1 << PLACE_BITS;

/// Finds the best of a row; keeps its memory.
#[derive(Clone, Debug, Default)]
pub(super) struct TopK {
    /// Per key: 1 if it reaches the bound.
    reach: Vec<u8>,
    /// Keys that do, packed; in the end the best, by falling value.
    best: Vec<f64>,
}

impl TopK {
    /// The places of the `k` best of `keys`, best first. From `k` to [`PLACES`] keys, none NaN; -0 and +0 are equal.
    pub(super) fn of(&mut self, keys: &[f32], k: usize) -> impl Iterator<Item = u32> + '_ {
        let bound = match k {
            0..=8 => bound::<8>(keys),
            9..=16 => bound::<16>(keys),
            17..=32 => bound::<32>(keys),
            33..=64 => bound::<64>(keys),
            _ => f32::NEG_INFINITY,
        };
        // A rest that is no multiple of 64 reaches nothing.
        self.reach.clear();
        self.reach.extend(keys.iter().map(|&key| u8::from(key >= bound)));
        self.reach.resize(keys.len().next_multiple_of(64), 0);
        self.best.clear();
        let places = self
            .reach
            .chunks_exact(64)
            .enumerate()
            .flat_map(|(block, reach)| Bits(mask(reach)).map(move |bit| block as u32 * 64 + bit));
        let packed = places.map(|at| pack(keys[at as usize], at));
        if k <= 8 {
            // Few enough to stay in registers.
            let mut few = [0.0; 8];
            packed.for_each(|value| insert(&mut few, value));
            self.best.extend_from_slice(&few[..k]);
        } else {
            self.best.extend(packed);
            self.best.sort_unstable_by(|a, b| b.total_cmp(a));
            self.best.truncate(k);
        }
        self.best.iter().map(|&packed| place(packed))
    }
}

/// A value that at least `C` keys reach.
fn bound<const C: usize>(keys: &[f32]) -> f32 {
    if keys.len() < 4 * C {
        return f32::NEG_INFINITY;
    }
    let mut columns = [f32::NEG_INFINITY; C];
    for row in keys.chunks_exact(C) {
        for (column, &key) in columns.iter_mut().zip(row) {
            *column = if key > *column { key } else { *column };
        }
    }
    columns.into_iter().fold(f32::INFINITY, |least, column| if column < least { column } else { least })
}

/// A bit for each of 64 bytes that are 0 or 1.
fn mask(bytes: &[u8]) -> u64 {
    let eight = |bytes: &[u8]| {
        let word = bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
        // Moves the bit of byte i to bit 56 + i.
        word.wrapping_mul(0x0102_0408_1020_4080) >> 56
    };
    bytes.chunks_exact(8).rev().fold(0, |mask, bytes| mask << 8 | eight(bytes))
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

/// Puts a value in its place of a falling row, whose last one falls out.
fn insert(row: &mut [f64; 8], mut value: f64) {
    for slot in row {
        let (larger, smaller) = if value > *slot { (value, *slot) } else { (*slot, value) };
        *slot = larger;
        value = smaller;
    }
}

/// From 1 up to 2: grows with the key and, of equal keys, falls with the place. A float, because two instructions put two
/// of them in order.
fn pack(key: f32, at: u32) -> f64 {
    f64::from_bits(1023 << 52 | u64::from(ordered(key)) << PLACE_BITS | u64::from(!at % PLACES))
}

/// The place that was packed.
fn place(packed: f64) -> u32 {
    !(packed.to_bits() as u32) % PLACES
}

/// A number that grows with the key; -0 and +0 have the same.
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
