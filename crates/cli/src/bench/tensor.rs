//! Numbers that every rank can compute for every other, so that nothing has to be sent to know what is right.

use half::{bf16, f16};
use sidelane::Element;

/// An element type with arithmetic in `f32`, rounded once.
pub trait Number: Element + PartialEq {
    fn of(value: f32) -> Self;
    fn value(self) -> f32;
}

impl Number for f32 {
    fn of(value: f32) -> Self {
        value
    }
    fn value(self) -> f32 {
        self
    }
}

impl Number for bf16 {
    fn of(value: f32) -> Self {
        bf16::from_f32(value)
    }
    fn value(self) -> f32 {
        self.to_f32()
    }
}

impl Number for f16 {
    fn of(value: f32) -> Self {
        f16::from_f32(value)
    }
    fn value(self) -> f32 {
        self.to_f32()
    }
}

/// The row of a token, appended to `row`: values in [-2, 2) that differ in every rank, token and column.
pub fn fill<E: Number>(row: &mut Vec<E>, seed: u64, rank: u32, token: u32, hidden: u32) {
    let mut state = mix(seed ^ u64::from(rank) << 40 ^ u64::from(token));
    row.extend((0..hidden).map(|_| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        E::of(((mix(state) >> 52) as f32 - 2048.0) / 1024.0)
    }));
}

/// What expert `expert` makes of an element: enough to tell experts apart in a sum.
pub fn expert<E: Number>(element: E, expert: u32) -> E {
    E::of(element.value() * (1.0 + expert as f32 / 64.0))
}

/// The finaliser of splitmix64.
fn mix(mut z: u64) -> u64 {
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_different_tokens_and_ranks_differ_and_repeat() {
        let row = |rank, token| {
            let mut row: Vec<f32> = Vec::new();
            fill(&mut row, 7, rank, token, 64);
            row
        };
        assert_eq!(row(1, 2), row(1, 2));
        assert_ne!(row(1, 2), row(2, 1));
        assert!(row(0, 0).iter().all(|x| (-2.0..2.0).contains(x)));
    }
}
