//! Products of groups as single products along columns.

use std::ffi::c_int;

use super::{Gemm, KERNEL};
use crate::device::kernels::{MatmulArgs, MatmulShape, WORD};
use crate::error::DeviceError;

/// The products of those groups that have rows, and where sums without a term go.
#[derive(Debug, Default)]
pub struct Gemms {
    pub all: Vec<Gemm>,
    /// Bytes from the result's begin, and rows and columns, of matrices that are to be zeros.
    pub empty: Vec<(u64, [u32; 2])>,
}

impl Gemms {
    pub fn of(matmul: &MatmulArgs<'_>) -> Result<Self, DeviceError> {
        let (a, b, out) = (matmul.a.address, matmul.b.address, matmul.out.address);
        let mut gemms = Gemms::default();
        for group in matmul.groups() {
            let (first, nth) = (u64::from(group.first), group.nth);
            match matmul.shape {
                MatmulShape::Rows { depth, columns, transposed, apart, .. } => {
                    let offset = first * u64::from(columns) * WORD;
                    if depth == 0 {
                        gemms.zeros(matmul, offset, [group.rows, columns]);
                        continue;
                    }
                    gemms.push(Gemm {
                        transposed: [transposed, false],
                        sides: [side(columns)?, side(group.rows)?, side(depth)?],
                        at: [b + nth * apart * WORD, a + first * u64::from(depth) * WORD, out + offset],
                        pitches: [
                            side(if transposed { depth } else { columns })?,
                            side(depth)?,
                            side(columns)?,
                        ],
                    });
                }
                MatmulShape::Depth { rows, columns, apart, .. } => {
                    let offset = nth * apart * WORD;
                    if group.rows == 0 {
                        gemms.zeros(matmul, offset, [rows, columns]);
                        continue;
                    }
                    let (of_a, of_b) = (first * u64::from(rows) * WORD, first * u64::from(columns) * WORD);
                    gemms.push(Gemm {
                        transposed: [false, true],
                        sides: [side(columns)?, side(rows)?, side(group.rows)?],
                        at: [b + of_b, a + of_a, out + offset],
                        pitches: [side(columns)?, side(rows)?, side(columns)?],
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
