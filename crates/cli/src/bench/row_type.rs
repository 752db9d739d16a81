//! What rows are made of, and rows as they are dispatched.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use sidelane::dtype::{Dtype, RecordShape};
use sidelane::error::PlanError;
use sidelane::rows::{Arithmetic, Rows, Simd};

use super::tensor::Number;

/// What `--dtype` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowType {
    Bf16,
    F16,
    F32,
    /// Dispatched as records of e4m3 values and their scales; what comes back is bf16
    Fp8,
}

impl RowType {
    /// Type of the elements that come back and are summed.
    pub fn element(self) -> Dtype {
        match self {
            RowType::Bf16 | RowType::Fp8 => Dtype::Bf16,
            RowType::F16 => Dtype::F16,
            RowType::F32 => Dtype::F32,
        }
    }

    /// Record of a row of `hidden` elements, if rows are dispatched as records.
    pub fn record(self, hidden: u32) -> Option<RecordShape> {
        (self == RowType::Fp8).then(|| RecordShape::new(hidden))
    }

    /// Bytes of a row of `hidden` elements that is dispatched, and of one that comes back.
    pub fn bytes(self, hidden: u32) -> (u64, u64) {
        let home = u64::from(hidden) * self.element().size() as u64;
        (self.record(hidden).map_or(home, |record| record.bytes() as u64), home)
    }

    /// The word of the command line.
    pub fn name(self) -> &'static str {
        match self {
            RowType::Fp8 => "fp8",
            _ => self.element().name(),
        }
    }
}

/// What becomes of rows on their way to an expert, by the plain kernels whatever the library takes.
pub struct Plain {
    record: Option<RecordShape>,
    kernels: Rows,
}

impl Plain {
    /// Of rows of `hidden` elements.
    pub fn new(rows: RowType, hidden: u32) -> Self {
        let simd = Simd::named("portable").unwrap_or_else(|_| Simd::best());
        Plain { record: rows.record(hidden), kernels: Rows::new(simd) }
    }

    /// These rows as they are dispatched.
    pub fn sent<E: Number>(&self, rows: &[E]) -> Result<Vec<u8>, PlanError> {
        let bytes: &[u8] = bytemuck::cast_slice(rows);
        let Some(shape) = self.record else { return Ok(bytes.to_vec()) };
        let mut records = vec![0; rows.len() / shape.hidden() * shape.bytes()];
        self.kernels.quantise(Arithmetic::try_from(E::DTYPE)?, shape, bytes, &mut records)?;
        Ok(records)
    }

    /// Rows that were dispatched, as an expert takes them.
    pub fn seen<E: Number>(&self, sent: &[u8]) -> Result<Vec<E>, PlanError> {
        let Some(shape) = self.record else { return Ok(bytemuck::allocation::pod_collect_to_vec(sent)) };
        let mut rows = vec![E::of(0.0); sent.len() / shape.bytes() * shape.hidden()];
        let bytes = bytemuck::cast_slice_mut(&mut rows);
        self.kernels.dequantise(Arithmetic::try_from(E::DTYPE)?, shape, sent, bytes)?;
        Ok(rows)
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn rows_are_seen_as_they_are_unless_they_are_records() {
        let row: Vec<bf16> = (0..32).map(|i| bf16::from_f32(i as f32 * 1.07)).collect();
        let seen = |rows| {
            let plain = Plain::new(rows, 32);
            plain.seen::<bf16>(&plain.sent(&row).unwrap()).unwrap()
        };
        assert_eq!(seen(RowType::Bf16), row);
        assert_ne!(seen(RowType::Fp8), row, "e4m3 has three bits of a fraction");
        assert_eq!((seen(RowType::Fp8)[0], seen(RowType::Fp8).len()), (bf16::ZERO, 32));
    }
}
