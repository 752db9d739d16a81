//! Where what is seen differs from what must be, bit by bit.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use sidelane::Dtype;

/// The first element that is wrong.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// Member of the group that sees it.
    pub rank: u32,
    /// The tensor, or the outcome.
    pub what: String,
    /// Row, or token of sums.
    pub row: u64,
    /// Element of the row.
    pub column: u64,
    /// Value by the naive reference.
    pub expected: String,
    /// Value of the call.
    pub seen: String,
}

impl Difference {
    /// Another outcome than the expected one.
    pub fn outcome(rank: u32, what: &str, expected: impl Into<String>, seen: impl Into<String>) -> Self {
        Difference {
            rank,
            what: what.to_owned(),
            row: 0,
            column: 0,
            expected: expected.into(),
            seen: seen.into(),
        }
    }

    /// One line about it.
    pub fn text(&self) -> String {
        let Difference { rank, what, row, column, expected, seen } = self;
        format!("rank {rank}: {what}, row {row}, column {column}: {seen} is seen, expected {expected}")
    }
}

/// Compares tensors of rows with so many columns.
pub(crate) fn compare(
    rank: u32,
    what: &str,
    (dtype, columns): (Dtype, usize),
    seen: &[u8],
    expected: &[u8],
) -> Option<Difference> {
    let [elements, others] = [seen, expected].map(|bytes| bytes.chunks(dtype.size()).collect::<Vec<_>>());
    first(rank, what, columns, (&elements, &others), |bytes| number(dtype, bytes))
}

/// Compares lists of whole numbers or flags, in rows of so many.
pub(crate) fn compare_list<T: PartialEq + std::fmt::Debug>(
    rank: u32,
    what: &str,
    columns: usize,
    seen: &[T],
    expected: &[T],
) -> Option<Difference> {
    first(rank, what, columns, (seen, expected), |number| format!("{number:?}"))
}

/// The first difference of two lists of elements.
fn first<T: PartialEq>(
    rank: u32,
    what: &str,
    columns: usize,
    (seen, expected): (&[T], &[T]),
    words: impl Fn(&T) -> String,
) -> Option<Difference> {
    if seen.len() != expected.len() {
        let [seen, expected] = [seen, expected].map(|list| format!("{} elements", list.len()));
        return Some(Difference::outcome(rank, what, expected, seen));
    }
    let at = seen.iter().zip(expected).position(|(seen, expected)| seen != expected)?;
    let [row, column] = [at / columns.max(1), at % columns.max(1)].map(|at| at as u64);
    let [expected, seen] = [expected, seen].map(|list| words(&list[at]));
    Some(Difference { rank, what: what.to_owned(), row, column, expected, seen })
}

/// An element, with its bits: two that look alike may differ.
fn number(dtype: Dtype, bytes: &[u8]) -> String {
    let bits = bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect::<String>();
    let value = match (dtype, bytes) {
        (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (Dtype::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        (Dtype::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        _ => return format!("0x{bits}"),
    };
    format!("{value} (0x{bits})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flipped_bit_is_found_where_it_is() {
        let right: Vec<f32> = (0..12).map(|at| at as f32 / 4.0).collect();
        let expected = bytemuck::cast_slice::<f32, u8>(&right);
        assert_eq!(compare(2, "sums", (Dtype::F32, 4), expected, expected), None);
        for bit in [0, 7, 31] {
            let mut wrong = right.clone();
            wrong[9] = f32::from_bits(right[9].to_bits() ^ 1 << bit);
            let found = compare(2, "sums", (Dtype::F32, 4), bytemuck::cast_slice(&wrong), expected).unwrap();
            assert_eq!((found.rank, found.row, found.column), (2, 2, 1), "bit {bit}");
            assert_ne!(found.expected, found.seen);
            let text = found.text();
            assert!(text.starts_with("rank 2: sums, row 2, column 1: "), "{text}");
            assert!(text.ends_with("expected 2.25 (0x40100000)"), "{text}");
        }
    }

    #[test]
    fn sign_of_zero_and_bits_of_nan_differ() {
        let zeros = [bf16::ZERO, bf16::NEG_ZERO];
        let [plus, minus] = [&zeros[..1], &zeros[1..]].map(bytemuck::cast_slice::<bf16, u8>);
        let found = compare(0, "rows", (Dtype::Bf16, 1), minus, plus).unwrap();
        assert_eq!((found.expected.as_str(), found.seen.as_str()), ("0 (0x0000)", "-0 (0x8000)"));
        let nan = bytemuck::bytes_of(&bf16::NAN);
        assert_eq!(compare(0, "rows", (Dtype::Bf16, 1), nan, nan), None);
    }

    #[test]
    fn first_number_that_differs_is_found() {
        let found = compare_list(0, "experts", 2, &[0, 1, 2, -1], &[0, 1, 3, 3]).unwrap();
        assert_eq!((found.row, found.column), (1, 0));
        assert_eq!((found.expected.as_str(), found.seen.as_str()), ("3", "2"));
        assert_eq!(compare_list(0, "dropped", 2, &[true], &[true]), None);
        assert_eq!(compare_list(0, "counts", 2, &[1], &[1, 0]).unwrap().expected, "2 elements");
    }

    #[test]
    fn tensors_of_another_size_differ() {
        let found = compare(1, "rows", (Dtype::Bytes, 4), &[0; 4], &[0; 8]).unwrap();
        assert_eq!((found.expected.as_str(), found.seen.as_str()), ("8 elements", "4 elements"));
    }
}
