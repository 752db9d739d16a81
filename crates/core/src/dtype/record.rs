//! A row in fp8, with its scales: one record, so that one copy moves both.
//!
//! ```text
//!   0            hidden               scales_offset                    bytes
//!   | hidden e4m3  | to a multiple of 4 | ceil(hidden / 128) scales, f32 | to a multiple of 16 |
//!   |   payload    |        zero        |  of values 0..128, 128..256 .. |        zero         |
//! ```
//!
//! To dispatch, a record is a row of [`Dtype::Bytes`](super::Dtype::Bytes) with
//! [`Fp8RowShape::bytes`] columns. A reader of such rows sees two strided tensors: the payload,
//! `[rows, hidden]`, and the scales, `[rows, scales]`, whose rows are both `bytes` apart.
//! Everything is in the byte order of the machine.

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
