//! Element types of the rows that move, of partial sums between nodes, and rows in fp8.
//!
//! Moving rows needs only their width; summing rows (combine) needs their meaning. All sums are
//! taken in `f32` from +0 and rounded once, to nearest even, when the result is stored. Partial
//! sums between nodes travel in a type of their own, the [`PartialDtype`]:
//!
//! ```text
//!   node 0   a ---+                     node 1   c ---+
//!                 +--> partial of 0                   +--> partial of 1 ---- net -----+
//!            b ---+         |                    d ---+                               |
//!                           v                                                         v
//!                   token of node 0   =   round( +0 + PartialDtype(partial of 0) + PartialDtype(partial of 1) )
//! ```
//!
//! The partial of node 0 stays where it is and is rounded to that type all the same.
//! Otherwise a result would depend on which ranks share a node, and no other machine could
//! reproduce it.

#[doc(hidden)]
pub use half::{bf16, f16};

/// The type of one element of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// bfloat16: the upper half of a binary32.
    Bf16,
    /// IEEE binary16.
    F16,
    /// Bytes without arithmetic (fp8 with its scales, for example, as [`Fp8RowShape`] lays them
    /// out): dispatch moves them, and combine refuses them.
    Bytes,
}

impl Dtype {
    /// Width of one element, in bytes.
    pub const fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::Bytes => 1,
        }
    }

    /// The name used on the command line and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
            Dtype::Bytes => "bytes",
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type whose slices can be handed over as rows.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// The row type it stands for.
    const DTYPE: Dtype;
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
}
impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}
impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;
}
impl Element for u8 {
    const DTYPE: Dtype = Dtype::Bytes;
}

/// The type in which partial sums travel between nodes. Every partial is rounded to it, also one
/// that does not travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum PartialDtype {
    /// Partials keep all the bits of the `f32` sum.
    #[default]
    F32,
    /// Partials are rounded to bf16: half the bytes, one more rounding each. For rows of bf16
    /// alone.
    Bf16,
}

/// Takes the place of a length among the lengths of groups: this group is one row that holds a
/// partial sum, in that type. It is added as it is, without a weight, because its summands
/// were weighted already.
pub const PARTIAL: u32 = u32::MAX;

impl PartialDtype {
    /// Every type.
    pub const ALL: [PartialDtype; 2] = [PartialDtype::F32, PartialDtype::Bf16];

    /// Width of one element of a partial, in bytes.
    pub const fn size(self) -> usize {
        self.dtype().size()
    }

    /// The type of a partial's elements.
    pub const fn dtype(self) -> Dtype {
        match self {
            PartialDtype::F32 => Dtype::F32,
            PartialDtype::Bf16 => Dtype::Bf16,
        }
    }

    /// Whether partial sums of rows of `dtype` may travel in this type. `f32` suits every type with
    /// arithmetic, bf16 suits rows of bf16.
    pub const fn carries(self, dtype: Dtype) -> bool {
        match self {
            PartialDtype::F32 => matches!(dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16),
            PartialDtype::Bf16 => matches!(dtype, Dtype::Bf16),
        }
    }

    /// The name used on the command line and in JSON.
    pub const fn name(self) -> &'static str {
        self.dtype().name()
    }
}

impl std::fmt::Display for PartialDtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Rows that a sum with these groups reads.
pub fn rows_of(groups: &[u32]) -> usize {
    groups.iter().map(|&group| if group == PARTIAL { 1 } else { group as usize }).sum()
}

/// Where payload and scales lie in the record of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8RowShape {
    hidden: u32,
}

impl Fp8RowShape {
    /// Values that share a scale. The last block of a row may have fewer.
    pub const BLOCK: usize = 128;

    /// Records of rows of `hidden` values.
    pub const fn new(hidden: u32) -> Fp8RowShape {
        Fp8RowShape { hidden }
    }

    /// Values of a row, and bytes of its payload, which comes first.
    pub const fn hidden(self) -> usize {
        self.hidden as usize
    }

    /// Scales of a row.
    pub const fn scales(self) -> usize {
        self.hidden().div_ceil(Fp8RowShape::BLOCK)
    }

    /// First byte of the scales: a multiple of 4.
    pub const fn scales_offset(self) -> usize {
        self.hidden().next_multiple_of(size_of::<f32>())
    }

    /// Bytes of a record, and from one to the next: a multiple of 16, like every row that is
    /// dispatched.
    pub const fn bytes(self) -> usize {
        (self.scales_offset() + self.scales() * size_of::<f32>()).next_multiple_of(16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    mod partials {
        use super::*;

        #[test]
        fn every_sum_may_travel_in_f32_and_that_of_bf16_rows_in_bf16() {
            for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
                assert!(PartialDtype::F32.carries(dtype));
                assert_eq!(PartialDtype::Bf16.carries(dtype), dtype == Dtype::Bf16);
            }
            assert!(
                PartialDtype::ALL.iter().all(|partial| !partial.carries(Dtype::Bytes)),
                "bytes have no sums"
            );
        }

        #[test]
        fn partial_dtype_is_named_like_its_elements() {
            for partial in PartialDtype::ALL {
                let json = serde_json::to_string(&partial).unwrap();
                assert_eq!(json, format!("\"{}\"", partial.dtype()));
                assert_eq!(serde_json::from_str::<PartialDtype>(&json).unwrap(), partial);
            }
        }

        #[test]
        fn a_partial_counts_as_one_row_among_the_groups() {
            assert_eq!(rows_of(&[]), 0);
            assert_eq!(rows_of(&[3, 0, PARTIAL, 2, PARTIAL]), 7);
        }
    }

    mod record {
        use super::*;

        /// (hidden, scales, scales_offset, bytes)
        const SHAPES: [(u32, usize, usize, usize); 8] = [
            (0, 0, 0, 0),
            (1, 1, 4, 16),
            (127, 1, 128, 144),
            (128, 1, 128, 144),
            (129, 2, 132, 144),
            (2048, 16, 2048, 2112),
            (7168, 56, 7168, 7392),
            (u32::MAX, 1 << 25, 1 << 32, (1 << 32) + (1 << 27)),
        ];

        #[test]
        fn payload_and_scales_lie_where_the_picture_says() {
            for (hidden, scales, scales_offset, bytes) in SHAPES {
                let shape = Fp8RowShape::new(hidden);
                assert_eq!(shape.hidden(), hidden as usize);
                assert_eq!(
                    (shape.scales(), shape.scales_offset(), shape.bytes()),
                    (scales, scales_offset, bytes)
                );
            }
        }

        #[test]
        fn the_parts_of_a_record_do_not_overlap_and_waste_less_than_twenty_bytes() {
            for shape in (0..3000).map(Fp8RowShape::new) {
                let content = shape.hidden() + 4 * shape.scales();
                assert!(shape.scales_offset() >= shape.hidden());
                assert!(shape.scales_offset() + 4 * shape.scales() <= shape.bytes());
                assert!(shape.bytes() - content < 3 + 16);
                assert!(shape.scales_offset().is_multiple_of(4) && shape.bytes().is_multiple_of(16));
            }
        }
    }
}
