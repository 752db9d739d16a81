//! Values at which sums go wrong, and the sum as its definition reads.

use half::{bf16, f16};
use sidelane::dtype::{PARTIAL, PartialDtype};
use sidelane::rows::Arithmetic;
pub use sidelane_verify::random::Random;

/// Zeros, denormals, ties of the two-byte types, extremes, infinities, NaN.
pub const SPECIAL_F32: [u32; 18] = [
    0x0000_0000,
    0x8000_0000,
    0x0000_0001,
    0x8000_0001,
    0x0040_0000,
    0x007f_ffff,
    0x0080_0000,
    0x3f80_0000,
    0x3f80_8000,
    0x3f81_8000,
    0x477f_f000,
    0x3300_0000,
    0x7f7f_ffff,
    0xff7f_ffff,
    0x7f80_0000,
    0xff80_0000,
    0x7f80_0001,
    0xffc0_1234,
];

/// Denormals, infinities, NaN of both kinds, zeros, extremes; any bits; values whose sums round and
/// tie.
pub fn any_f32(random: &mut Random) -> f32 {
    let bits = random.next();
    match bits >> 60 {
        0..=2 => f32::from_bits(SPECIAL_F32[(bits % SPECIAL_F32.len() as u64) as usize]),
        3..=5 => f32::from_bits(bits as u32),
        _ => (bits as i32 >> (bits >> 40 & 31)) as f32 / 1024.0,
    }
}

/// The bytes of a row of such values, or of any bits of its type.
pub fn any_row(random: &mut Random, dtype: Arithmetic, columns: usize) -> Vec<u8> {
    let mut row = Vec::new();
    for _ in 0..columns {
        let any = random.next();
        match dtype {
            Arithmetic::F32 => row.extend(any_f32(random).to_ne_bytes()),
            _ if any & 7 == 0 => row.extend(((any >> 32) as u16).to_ne_bytes()),
            Arithmetic::Bf16 => row.extend(bf16::from_f32(any_f32(random)).to_ne_bytes()),
            Arithmetic::F16 => row.extend(f16::from_f32(any_f32(random)).to_ne_bytes()),
        }
    }
    row
}

/// The one NaN that sums give, or the number itself.
pub fn canonical(x: f32) -> f32 {
    if x.is_nan() { f32::from_bits(0x7fc0_0000) } else { x }
}

/// The element of a column.
pub fn load(dtype: Arithmetic, row: &[u8], column: usize) -> f32 {
    let element = &row[column * dtype.size()..][..dtype.size()];
    match dtype {
        Arithmetic::F32 => bytemuck::pod_read_unaligned(element),
        Arithmetic::Bf16 => bytemuck::pod_read_unaligned::<bf16>(element).to_f32(),
        Arithmetic::F16 => bytemuck::pod_read_unaligned::<f16>(element).to_f32(),
    }
}

/// Appends `x`, rounded to `dtype`.
pub fn store(dtype: Arithmetic, x: f32, into: &mut Vec<u8>) {
    match dtype {
        Arithmetic::F32 => into.extend(canonical(x).to_ne_bytes()),
        Arithmetic::Bf16 if x.is_nan() => into.extend(0x7fc0u16.to_ne_bytes()),
        Arithmetic::Bf16 => into.extend(bf16::from_f32(x).to_ne_bytes()),
        Arithmetic::F16 if x.is_nan() => into.extend(0x7e00u16.to_ne_bytes()),
        Arithmetic::F16 => into.extend(f16::from_f32(x).to_ne_bytes()),
    }
}

/// The operands of a sum, for the scalar reference.
#[derive(Clone, Copy, Debug)]
pub struct Terms<'a> {
    /// Type of rows.
    pub dtype: Arithmetic,
    /// Type in which a partial sum travels.
    pub wire: PartialDtype,
    /// Rows in the order of the sum.
    pub rows: &'a [Vec<u8>],
    /// A weight for each row.
    pub weights: Option<&'a [f32]>,
    /// Rows of each group, or [`PARTIAL`] of one that is summed already.
    pub groups: &'a [u32],
}

impl Terms<'_> {
    /// The sum as its definition reads: groups, then their partial sums, one column at a time;
    /// stored as `out`.
    pub fn sum(&self, columns: usize, out: Arithmetic) -> Vec<u8> {
        let wire = wire_type(self.wire);
        let mut stored = Vec::new();
        for column in 0..columns {
            let (mut total, mut row) = (0f32, 0);
            for &group in self.groups {
                if group == PARTIAL {
                    total += load(wire, &self.rows[row], column);
                    row += 1;
                    continue;
                }
                let mut partial = 0f32;
                for _ in 0..group {
                    let x = load(self.dtype, &self.rows[row], column);
                    partial += self.weights.map_or(x, |weights| weights[row] * x);
                    row += 1;
                }
                let mut rounded = Vec::new();
                store(wire, partial, &mut rounded);
                total += load(wire, &rounded, 0);
            }
            store(out, total, &mut stored);
        }
        stored
    }
}

/// The type of a partial's elements.
pub fn wire_type(wire: PartialDtype) -> Arithmetic {
    Arithmetic::try_from(wire.dtype()).unwrap()
}
