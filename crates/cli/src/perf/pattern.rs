//! What is put, so that whoever receives it can tell that all of it came, and came last.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Bytes at the end that count the puts.
const STAMP: usize = 8;

/// The bytes that the rank at this position of a pair puts, all at a time.
pub fn fill(position: u32, bytes: u64) -> Vec<u8> {
    let mut drawn = vec![0; bytes as usize];
    ChaCha8Rng::seed_from_u64(bytes << 1 | u64::from(position)).fill(&mut drawn[..]);
    drawn
}

/// Makes them those of the put with this number.
#[inline]
pub fn stamp(bytes: &mut [u8], put: u64) {
    let at = bytes.len().saturating_sub(STAMP);
    let end = &mut bytes[at..];
    end.copy_from_slice(&put.to_le_bytes()[..end.len()]);
}

/// Bytes of which none is what the put with this number would leave.
pub fn poison(position: u32, bytes: u64, put: u64) -> Vec<u8> {
    let mut wrong = fill(position, bytes);
    stamp(&mut wrong, put);
    wrong.iter_mut().for_each(|byte| *byte = !*byte);
    wrong
}

/// Whether these bytes are what the put with this number leaves.
pub fn is_put(seen: &[u8], position: u32, put: u64) -> bool {
    let mut expected = fill(position, seen.len() as u64);
    stamp(&mut expected, put);
    seen == expected
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_that_did_not_come_is_missed() {
        for len in [1, 7, 8, 9, 64] {
            let mut seen = fill(1, len);
            stamp(&mut seen, 99);
            assert!(is_put(&seen, 1, 99), "{len}");
            let poisoned = poison(1, len, 99);
            for at in 0..len as usize {
                let mut torn = seen.clone();
                torn[at] = poisoned[at];
                assert!(!is_put(&torn, 1, 99), "byte {at} of {len}");
            }
        }
    }

    #[test]
    fn bytes_of_an_earlier_put_or_of_the_other_rank_are_told_apart() {
        let mut seen = fill(1, 64);
        stamp(&mut seen, 99);
        assert!(!is_put(&seen, 1, 98) && !is_put(&seen, 0, 99) && !is_put(&seen[..63], 1, 99));
    }
}
