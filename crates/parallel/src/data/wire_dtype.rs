//! Element types of parameters and gradients on their way between ranks. Elsewhere they are `f32`.

use std::sync::Arc;

use half::bf16;
use half::slice::HalfFloatSliceExt;
use sidelane::Error;
use sidelane::collective::Communicator;

use super::memory::{Counted, Gauge};

/// An element type of what travels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WireDtype {
    /// Values travel as they are.
    #[default]
    F32,
    /// Values are rounded to bf16, to nearest even, and half the bytes travel.
    Bf16,
}

/// Element types of what travels between ranks. All ranks must choose the same.
///
/// Megatron and FSDP2 gather parameters in bf16 and reduce gradients in `f32`, or both in bf16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Wire {
    /// Parameters that are gathered: by ZeRO-1 and ZeRO-2 in a step, by ZeRO-3 in each pass. All
    /// ranks compute with the rounded ones. The optimizer changes those of `f32`, which their owner
    /// keeps.
    pub parameters: WireDtype,
    /// Gradients that are reduced: each rank's are rounded, and so is their sum, which is taken in
    /// `f32`.
    pub gradients: WireDtype,
}

impl WireDtype {
    /// Gathers the parts of all ranks.
    pub(super) fn all_gather(
        self,
        group: &mut Communicator,
        gauge: &Arc<Gauge>,
        part: &[f32],
        whole: &mut [f32],
    ) -> Result<(), Error> {
        match self {
            WireDtype::F32 => group.all_gather(part, whole),
            WireDtype::Bf16 => {
                let _copies = Counted::new(gauge, narrow_bytes(part) + narrow_bytes(whole));
                let mut all = vec![bf16::ZERO; whole.len()];
                group.all_gather(&rounded(part), &mut all)?;
                all.convert_to_f32_slice(whole);
                Ok(())
            }
        }
    }

    /// Sums values over the ranks.
    pub(super) fn all_reduce(
        self,
        group: &mut Communicator,
        gauge: &Arc<Gauge>,
        values: &mut [f32],
    ) -> Result<(), Error> {
        match self {
            WireDtype::F32 => group.all_reduce(values),
            WireDtype::Bf16 => {
                let _copy = Counted::new(gauge, narrow_bytes(values));
                let mut sums = rounded(values);
                group.all_reduce(&mut sums)?;
                sums.convert_to_f32_slice(values);
                Ok(())
            }
        }
    }

    /// Sums each part of the values over the ranks, for the rank of this part.
    pub(super) fn reduce_scatter(
        self,
        group: &mut Communicator,
        gauge: &Arc<Gauge>,
        values: &[f32],
        part: &mut [f32],
    ) -> Result<(), Error> {
        match self {
            WireDtype::F32 => group.reduce_scatter(values, part),
            WireDtype::Bf16 => {
                let _copies = Counted::new(gauge, narrow_bytes(values) + narrow_bytes(part));
                let mut sums = vec![bf16::ZERO; part.len()];
                group.reduce_scatter(&rounded(values), &mut sums)?;
                sums.convert_to_f32_slice(part);
                Ok(())
            }
        }
    }

    /// Values as they come out of a call that moves them.
    pub(super) fn moved(self, mut values: Vec<f32>) -> Vec<f32> {
        match self {
            WireDtype::F32 => values,
            WireDtype::Bf16 => {
                values.iter_mut().for_each(|value| *value = bf16::from_f32(*value).to_f32());
                values
            }
        }
    }
}

fn rounded(values: &[f32]) -> Vec<bf16> {
    let mut elements = vec![bf16::ZERO; values.len()];
    elements.convert_from_f32_slice(values);
    elements
}

/// Bytes of values in bf16.
fn narrow_bytes(values: &[f32]) -> u64 {
    (values.len() * size_of::<bf16>()) as u64
}
