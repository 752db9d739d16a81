//! A matrix product, as cuBLAS makes it: along columns, with sums in an order of its own.
//!
//! By the seed sums go from the last term to the first, each rounded, or are exact to the last
//! rounding. Real libraries have other orders again, and no caller may count on one. Factors in
//! TF32 lose their last 13 bits, by the seed cut off or rounded: no manual says which. A sum for a
//! result of two bytes is made in halves, each rounded to that type, unless the caller forbids it.

use std::ops::Range;

use crate::code::Result;
use crate::memory::Engine;

/// Element types, by the numbers of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    F32 = 0,
    Bf16 = 14,
}

/// The order of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Backward,
    Exact,
}

/// `c [m, n] = alpha * op(a) [m, k] * op(b) [k, n] + beta * c`, of addresses that are multiples of
/// their elements' size.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// Whether a and b lie as their transposes.
    pub transposed: [bool; 2],
    /// m, n and k.
    pub sides: [usize; 3],
    /// Addresses of a, b and c.
    pub at: [u64; 3],
    /// Elements from a column to the next, of a, b and c.
    pub pitches: [usize; 3],
    pub kinds: [Kind; 3],
    pub alpha: f32,
    pub beta: f32,
    pub order: Order,
    /// Whether factors are those of TF32.
    pub tf32: bool,
    /// Whether parts of a sum may be rounded to the type of the result.
    pub reduced: bool,
}

/// Where columns of matrices begin that tensor cores multiply in grouped calls.
const VECTOR: u64 = 16;

impl Kind {
    pub fn of(number: i32) -> Option<Kind> {
        [Kind::F32, Kind::Bf16].into_iter().find(|&kind| kind as i32 == number)
    }

    pub fn size(self) -> usize {
        match self {
            Kind::F32 => 4,
            Kind::Bf16 => 2,
        }
    }

    fn read(self, bytes: &[u8]) -> f32 {
        match self {
            Kind::F32 => f32::from_ne_bytes(bytes.try_into().expect("four bytes")),
            Kind::Bf16 => {
                let bits = u16::from_ne_bytes(bytes.try_into().expect("two bytes"));
                f32::from_bits(u32::from(bits) << 16)
            }
        }
    }

    /// As it is read again.
    fn rounded(self, value: f32) -> f32 {
        let mut bytes = [0; 4];
        let bytes = &mut bytes[..self.size()];
        self.write(value, bytes);
        self.read(bytes)
    }

    /// Ties to even. Values are no NaN that rounding could turn into another number.
    fn write(self, value: f32, bytes: &mut [u8]) {
        match self {
            Kind::F32 => bytes.copy_from_slice(&value.to_ne_bytes()),
            Kind::Bf16 => {
                let bits = value.to_bits();
                let even = bits >> 16 & 1;
                let rounded = if value.is_nan() { bits | 1 << 22 } else { bits.wrapping_add(0x7fff + even) };
                bytes.copy_from_slice(&((rounded >> 16) as u16).to_ne_bytes());
            }
        }
    }
}

/// A factor with 10 bits behind its leading one.
fn tf32(factor: f32, order: Order) -> f32 {
    const LOST: u32 = (1 << 13) - 1;
    let more = if order == Order::Exact && factor.is_finite() { LOST / 2 + 1 } else { 0 };
    f32::from_bits((factor.to_bits() + more) & !LOST)
}

/// Elements of a matrix along columns, as they were when they were read.
struct Matrix {
    bytes: Vec<u8>,
    pitch: usize,
    kind: Kind,
}

impl Matrix {
    fn read(engine: &Engine, (at, pitch, kind): (u64, usize, Kind), sides: [usize; 2]) -> Result<Self> {
        let [rows, columns] = sides;
        let bytes = engine.snapshot(at, ((columns - 1) * pitch + rows) * kind.size())?;
        Ok(Matrix { bytes, pitch, kind })
    }

    fn at(&self, row: usize, column: usize) -> f32 {
        let (first, size) = ((column * self.pitch + row) * self.kind.size(), self.kind.size());
        self.kind.read(&self.bytes[first..first + size])
    }
}

impl Product {
    pub fn is_empty(&self) -> bool {
        self.sides.contains(&0)
    }

    /// With addresses, if these are multiples of their elements.
    pub fn placed(self, at: [u64; 3]) -> Option<Product> {
        let straight = |(&at, kind): (&u64, &Kind)| at != 0 && at.is_multiple_of(kind.size() as u64);
        at.iter().zip(&self.kinds).all(straight).then_some(Product { at, ..self })
    }

    /// The same for a grouped call: there tensor cores take columns in vectors alone.
    pub fn placed_in_group(self, at: [u64; 3]) -> Option<Product> {
        let placed = self.placed(at)?;
        let pitches = self.pitches.iter().zip(self.kinds).map(|(&pitch, kind)| (pitch * kind.size()) as u64);
        let vectors = at.into_iter().chain(pitches).all(|at| at.is_multiple_of(VECTOR));
        (vectors || !(self.tf32 || self.kinds[0] == Kind::Bf16)).then_some(placed)
    }

    /// Reads, multiplies and writes. All sides are at least 1.
    pub fn run(&self, engine: &Engine) -> Result<()> {
        let Product { transposed: [op_a, op_b], sides: [m, n, k], alpha, beta, .. } = *self;
        let of = |nth: usize| (self.at[nth], self.pitches[nth], self.kinds[nth]);
        let a = Matrix::read(engine, of(0), if op_a { [k, m] } else { [m, k] })?;
        let b = Matrix::read(engine, of(1), if op_b { [n, k] } else { [k, n] })?;
        // What is there is not looked at unless it counts.
        let before = (beta != 0.0).then(|| Matrix::read(engine, of(2), [m, n])).transpose()?;
        let term = |row, column, depth| {
            let left = if op_a { a.at(depth, row) } else { a.at(row, depth) };
            let right = if op_b { b.at(column, depth) } else { b.at(depth, column) };
            if self.tf32 { (tf32(left, self.order), tf32(right, self.order)) } else { (left, right) }
        };
        let (at, pitch, kind) = of(2);
        let mut made = vec![0; m * kind.size()];
        for column in 0..n {
            for (row, bytes) in made.chunks_exact_mut(kind.size()).enumerate() {
                let sum_of = |depths: Range<usize>| {
                    let terms = depths.rev().map(|depth| term(row, column, depth));
                    match self.order {
                        Order::Backward => terms.fold(0.0_f32, |sum, (left, right)| sum + left * right),
                        Order::Exact => {
                            terms.map(|(left, right)| f64::from(left) * f64::from(right)).sum::<f64>() as f32
                        }
                    }
                };
                let sum = match self.reduced && kind == Kind::Bf16 {
                    true => kind.rounded(sum_of(k / 2..k)) + kind.rounded(sum_of(0..k / 2)),
                    false => sum_of(0..k),
                };
                let more = before.as_ref().map_or(0.0, |before| beta * before.at(row, column));
                kind.write(alpha * sum + more, bytes);
            }
            engine.write(at + (column * pitch * kind.size()) as u64, &made)?;
        }
        Ok(())
    }
}
