//! Structs made of words, some of which are spoilt.

use proptest::prelude::*;
use sidelane_c::SIDELANE_DTYPE_F32;

/// As many bytes as any struct may say it has, and one word more.
const WORDS: usize = 1025;
/// Experts, tokens and elements of a row for which arrays are large enough.
pub const ROOM: usize = 1 << 16;

/// What becomes of a struct that is good.
#[derive(Clone, Debug)]
pub struct Spoilt {
    /// Its declared size; 0: its own.
    pub size: u64,
    /// Words that are others.
    pub words: Vec<(usize, u32)>,
}

pub fn spoilt() -> impl Strategy<Value = Spoilt> {
    let few = (0_u32..6).prop_map(|eights| eights * 8);
    let word = prop_oneof![4 => 0_u32..3, 3 => few, 2 => 0_u32..40, 1 => any::<u32>(), 1 => Just(u32::MAX)];
    let place = prop_oneof![30 => 2_usize..30, 1 => 0..WORDS];
    let size = prop_oneof![
        6 => Just(0_u64),
        1 => 0_u64..200,
        1 => (0..WORDS as u64 - 1).prop_map(|words| words * 4),
        1 => any::<u64>(),
    ];
    let count = prop_oneof![4 => 0_usize..4, 1 => 0_usize..60];
    let words = count.prop_flat_map(move |count| prop::collection::vec((place.clone(), word.clone()), count));
    (size, words).prop_map(|(size, words)| Spoilt { size, words })
}

/// Options of a layer that can be built: 4 experts, 2 choices, 8 elements of f32.
pub const LAYER: [u32; 4] = [4, 2, 8, SIDELANE_DTYPE_F32];

/// A struct made of words.
pub struct Struct(Vec<u64>);

impl Struct {
    pub fn new<T>(good: &[u32], spoilt: &Spoilt) -> Struct {
        let mut words = vec![0; WORDS + 1];
        words[2..][..good.len()].copy_from_slice(good);
        for &(place, word) in &spoilt.words {
            words[place] = word;
        }
        let mut longs: Vec<u64> = words.chunks(2).map(|w| u64::from(w[0]) | u64::from(w[1]) << 32).collect();
        longs[0] = if spoilt.size == 0 { size_of::<T>() as u64 } else { spoilt.size };
        Struct(longs)
    }

    /// A struct in which nothing is set but its size.
    pub fn empty<T>() -> Struct {
        Struct::new::<T>(&[], &Spoilt { size: 0, words: Vec::new() })
    }

    pub fn at<T>(&mut self) -> *mut T {
        self.0.as_mut_ptr().cast()
    }
}
