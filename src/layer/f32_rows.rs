//! Between the element type of a layer's tensors and the f32 of its arithmetic.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::dtype::{Dtype, Element};
use crate::ep::ExpertRows;
use crate::error::Error;
use crate::rows::Arithmetic;

/// Elements as f32, exactly. Without arithmetic there are none: a layer is not built for such a
/// type.
pub(super) fn widened<E: Element>(values: &[E]) -> Vec<f32> {
    match Arithmetic::try_from(E::DTYPE) {
        Ok(Arithmetic::F32) => bytemuck::cast_slice(values).to_vec(),
        Ok(Arithmetic::Bf16) => bytemuck::cast_slice::<_, bf16>(values).to_f32_vec(),
        Ok(Arithmetic::F16) => bytemuck::cast_slice::<_, f16>(values).to_f32_vec(),
        Err(_) => Vec::new(),
    }
}

/// f32 rounded to elements, to nearest even.
pub(super) fn round_into<E: Element>(values: &[f32], to: &mut [E]) {
    match Arithmetic::try_from(E::DTYPE) {
        Ok(Arithmetic::F32) => bytemuck::cast_slice_mut::<_, f32>(to).copy_from_slice(values),
        Ok(Arithmetic::Bf16) => bytemuck::cast_slice_mut::<_, bf16>(to).convert_from_f32_slice(values),
        Ok(Arithmetic::F16) => bytemuck::cast_slice_mut::<_, f16>(to).convert_from_f32_slice(values),
        Err(_) => {}
    }
}

/// Received rows as f32: where they lie if they are, else a copy, and the pool has its memory back.
#[allow(clippy::large_enum_variant, reason = "calls allocate nothing")]
pub(super) enum F32Rows {
    Landed(ExpertRows),
    Widened(Vec<f32>),
}

impl F32Rows {
    pub fn new<E: Element>(rows: ExpertRows) -> Result<F32Rows, Error> {
        if E::DTYPE == Dtype::F32 {
            return Ok(F32Rows::Landed(rows));
        }
        Ok(F32Rows::Widened(widened(rows.rows::<E>()?)))
    }

    pub fn values(&self) -> Result<&[f32], Error> {
        match self {
            F32Rows::Landed(rows) => rows.rows(),
            F32Rows::Widened(values) => Ok(values),
        }
    }
}

impl std::fmt::Debug for F32Rows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("values", &self.values().map_or(0, <[f32]>::len)).finish()
    }
}
