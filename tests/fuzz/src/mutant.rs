//! Mutants: an input with a few changes by chance.

use std::ops::Range;

use rand::{RngExt, seq::IndexedRandom};
use rand_chacha::ChaCha8Rng;

/// Numbers at which programs go wrong.
const EDGES: [u64; 12] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 32,
    i64::MAX as u64,
    u64::MAX,
];
/// Most changes of one mutant.
const MOST: u32 = 6;

/// An input with changes, some of them by parts of another one.
pub fn mutate([input, other]: [&[u8]; 2], rng: &mut ChaCha8Rng) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..rng.random_range(1..=MOST) {
        change(&mut bytes, other, rng);
    }
    bytes
}

fn change(bytes: &mut Vec<u8>, other: &[u8], rng: &mut ChaCha8Rng) {
    let at = rng.random_range(0..=bytes.len());
    match rng.random_range(0..8) {
        0 => bytes.insert(at, rng.random()),
        1 => drop(bytes.drain(part(bytes.len(), rng))),
        2 => {
            let again = bytes[part(bytes.len(), rng)].to_vec();
            drop(bytes.splice(at..at, again));
        }
        3 => {
            let from = part(other.len(), rng);
            let to = part(bytes.len(), rng);
            drop(bytes.splice(to, other[from].to_vec()));
        }
        _ if at == bytes.len() => bytes.push(rng.random()),
        4 => bytes[at] ^= 1 << rng.random_range(0..8),
        5 => bytes[at] = rng.random(),
        6 => bytes[at] = bytes[at].wrapping_add(rng.random_range(0..=16)).wrapping_sub(8),
        _ => {
            let number = EDGES.choose(rng).copied().unwrap_or_default().to_le_bytes();
            let len = [1, 2, 4, 8].choose(rng).copied().unwrap_or(1).min(bytes.len() - at);
            bytes[at..at + len].copy_from_slice(&number[..len]);
        }
    }
}

/// A part of so many bytes: short ones come more often.
fn part(len: usize, rng: &mut ChaCha8Rng) -> Range<usize> {
    let first = rng.random_range(0..=len);
    let most = if rng.random() { len - first } else { (len - first).min(16) };
    first..first + rng.random_range(0..=most)
}
