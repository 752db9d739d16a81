//! Products of groups as single products along columns.

use std::ffi::c_int;

use super::{Columns, Gemm, KERNEL, Types};
use crate::device::kernels::{MatmulArgs, MatmulShape};
use crate::error::DeviceError;

/// The products of those groups that have rows, and where sums without a term go.
#[derive(Debug, Default)]
pub struct Gemms {
    pub all: Vec<Gemm>,
    /// Bytes from the result's begin, and rows and columns, of matrices that are to be zeros.
    pub empty: Vec<(u64, [u32; 2])>,
}

/// Bytes that a, b and the result must have, if they can be counted.
pub fn needed(matmul: &MatmulArgs<'_>, types: Types, b_columns: Option<Columns>) -> [Option<u64>; 3] {
    let [a, b, out] = matmul.elements();
    let b = match (matmul.shape, b_columns) {
        (MatmulShape::Depth { depth, .. }, Some(of)) => Some(u64::from(depth) * u64::from(of.row)),
        _ => b,
    };
    let (element, out_size) = (types.element.size(), types.out.size());
    [(a, element), (b, element), (out, out_size)].map(|(count, size)| count?.checked_mul(size))
}

impl Gemms {
    pub fn of(
        matmul: &MatmulArgs<'_>,
        types: Types,
        b_columns: Option<Columns>,
    ) -> Result<Self, DeviceError> {
        let (element, out_size) = (types.element.size(), types.out.size());
        let (a, b, out) = (matmul.a.address, matmul.b.address, matmul.out.address);
        let mut gemms = Gemms::default();
        for group in matmul.groups() {
            let (first, nth) = (u64::from(group.first), group.nth);
            match matmul.shape {
                MatmulShape::Rows { depth, columns, transposed, apart, .. } => {
                    let offset = first * u64::from(columns) * out_size;
                    if depth == 0 {
                        gemms.zeros(matmul, offset, [group.rows, columns]);
                        continue;
                    }
                    gemms.push(Gemm {
                        transposed: [transposed, false],
                        sides: [side(columns)?, side(group.rows)?, side(depth)?],
                        at: [b + nth * apart * element, a + first * u64::from(depth) * element, out + offset],
                        pitches: [
                            side(if transposed { depth } else { columns })?,
                            side(depth)?,
                            side(columns)?,
                        ],
                    });
                }
                MatmulShape::Depth { rows, columns, apart, .. } => {
                    let offset = nth * apart * out_size;
                    if group.rows == 0 {
                        gemms.zeros(matmul, offset, [rows, columns]);
                        continue;
                    }
                    let Columns { first: b_first, row: b_row } =
                        b_columns.unwrap_or(Columns { first: 0, row: columns });
                    let of_a = first * u64::from(rows) * element;
                    let of_b = (first * u64::from(b_row) + u64::from(b_first)) * element;
                    gemms.push(Gemm {
                        transposed: [false, true],
                        sides: [side(columns)?, side(rows)?, side(group.rows)?],
                        at: [b + of_b, a + of_a, out + offset],
                        pitches: [side(b_row)?, side(rows)?, side(columns)?],
                    });
                }
            }
        }
        Ok(gemms)
    }

    /// A product, unless its result has no element.
    fn push(&mut self, gemm: Gemm) {
        if gemm.sides.iter().all(|&side| side > 0) {
            self.all.push(gemm);
        }
    }

    /// An empty sum, unless it is added to what is there.
    fn zeros(&mut self, matmul: &MatmulArgs<'_>, offset: u64, sides: [u32; 2]) {
        if !matmul.add && sides.iter().all(|&side| side > 0) {
            self.empty.push((offset, sides));
        }
    }
}

fn side(number: u32) -> Result<c_int, DeviceError> {
    let (what, given, expected) = ("a side of a matrix", number.into(), "at most 2147483647");
    c_int::try_from(number).map_err(|_| DeviceError::Shape { kernel: KERNEL, what, given, expected })
}
