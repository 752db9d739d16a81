//! Partial sums between nodes: the type they travel in, and their mark among the groups of a sum.
//!
//! ```text
//!   node 0   a ---+                     node 1   c ---+
//!                 +--> partial of 0                   +--> partial of 1 ---- wire ----+
//!            b ---+         |                    d ---+                               |
//!                           v                                                         v
//!                   token of node 0   =   round( +0 + wire(partial of 0) + wire(partial of 1) )
//! ```
//!
//! The partial of node 0 stays where it is and is rounded to the wire's type all the same.
//! Otherwise a result would depend on which ranks share a node, and no other machine could
//! reproduce it.

use super::Dtype;

/// The type in which partial sums travel between nodes. Every partial is rounded to it, also one
/// that does not travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PartialDtype {
    /// Partials keep all the bits of the `f32` sum.
    #[default]
    F32,
    /// Partials are rounded to bf16: half the bytes, one more rounding each. For rows of bf16
    /// alone.
    Bf16,
}

/// Takes the place of a length among the lengths of groups: this group is one row that holds a
/// partial sum, in the wire's type. It is added as it is, without a weight, because its summands
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sum_may_travel_in_f32_and_that_of_bf16_rows_in_bf16() {
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            assert!(PartialDtype::F32.carries(dtype));
            assert_eq!(PartialDtype::Bf16.carries(dtype), dtype == Dtype::Bf16);
        }
        assert!(PartialDtype::ALL.iter().all(|wire| !wire.carries(Dtype::Bytes)), "bytes have no sums");
    }

    #[test]
    fn a_wire_is_named_like_the_type_of_its_elements() {
        for wire in PartialDtype::ALL {
            let json = serde_json::to_string(&wire).unwrap();
            assert_eq!(json, format!("\"{}\"", wire.dtype()));
            assert_eq!(serde_json::from_str::<PartialDtype>(&json).unwrap(), wire);
        }
    }

    #[test]
    fn a_partial_counts_as_one_row_among_the_groups() {
        assert_eq!(rows_of(&[]), 0);
        assert_eq!(rows_of(&[3, 0, PARTIAL, 2, PARTIAL]), 7);
    }
}
