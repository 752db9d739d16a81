//! Weights of experts on a device: f32 and, where products take that, a copy in bf16.
//!
//! The copy is made on the layer's stream before a pass, unless the weights are unchanged since the
//! last one. Callers change them by the range that a layer hands out, so a pass converts them after
//! each [`hand_out`](Weights::hand_out). If a clone or a part of that range is alive then, a
//! stream's included, the next pass converts them again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::device_memory::{HostStaging, span};
use super::expert_products::Compute;
use super::swiglu_bf16::Bf16Weights;
use crate::device::DeviceRange;
use crate::error::{DeviceError, Error};
use crate::layer::GroupedSwiGlu;

/// Sizes of SwiGLU experts: `w1` and `w3` are `[hidden, ffn]`, `w2` is `[ffn, hidden]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub experts: u32,
    pub hidden: u32,
    pub ffn: u32,
}

impl Sizes {
    pub fn of(host: &GroupedSwiGlu) -> Sizes {
        let [experts, hidden, ffn] = [host.experts, host.hidden, host.ffn].map(|number| number as u32);
        Sizes { experts, hidden, ffn }
    }

    /// Elements of a matrix.
    pub fn matrix(self) -> u64 {
        u64::from(self.hidden) * u64::from(self.ffn)
    }

    /// Elements from a matrix of one expert to that of the next.
    pub fn apart(self) -> u64 {
        3 * self.matrix()
    }
}

/// Weights of all experts of a rank, in the order of [`GroupedSwiGlu`].
#[derive(Debug)]
pub(super) struct Weights {
    values: Arc<DeviceRange>,
    /// The same memory, by a claim on the value above: so clones that others hold are counted.
    handed_out: DeviceRange,
    may_have_changed: AtomicBool,
    bf16: Option<Arc<Bf16Weights>>,
}

/// Claims on the values if no caller has one: that of [`Weights`], and that of the range that it
/// hands out.
const OWN_CLAIMS: usize = 2;

impl Weights {
    pub fn new(on: &Compute, host: &GroupedSwiGlu, staging: &mut HostStaging) -> Result<Self, Error> {
        let values = on.memory.alone(host.weights.len())?;
        staging.send(&on.stream, &values, &host.weights)?;
        let values = Arc::new(values);
        let handed_out = DeviceRange::part_of(&values, |values| values, (0, values.len()))?;
        let copy = |blas| -> Result<_, DeviceError> {
            let values = on.memory.alone(host.weights.len().div_ceil(2))?;
            Ok(Arc::new(Bf16Weights { values, sizes: Sizes::of(host), blas }))
        };
        let bf16 = on.bf16_products().map(copy).transpose()?;
        Ok(Weights { values, handed_out, may_have_changed: AtomicBool::new(true), bf16 })
    }

    /// For products of f32.
    pub fn values(&self) -> &DeviceRange {
        &self.values
    }

    /// For products of bf16, if the layer makes these.
    pub fn bf16(&self) -> Option<&Arc<Bf16Weights>> {
        self.bf16.as_ref()
    }

    /// The values, for a caller that may change them.
    pub fn hand_out(&self) -> &DeviceRange {
        self.may_have_changed.store(true, Ordering::Relaxed);
        &self.handed_out
    }

    /// Has the stream make the copy again, if it may differ from the weights. No other pass uses
    /// them meanwhile: the layer is borrowed for this one.
    pub fn refresh(&mut self, on: &Compute) -> Result<(), DeviceError> {
        let Some(bf16) = &self.bf16 else { return Ok(()) };
        // The holder of a claim may write until it drops it, also behind this pass.
        let is_held = Arc::strong_count(&self.values) > OWN_CLAIMS;
        if !is_held && !*self.may_have_changed.get_mut() {
            return Ok(());
        }
        let Sizes { experts, hidden, ffn } = bf16.sizes;
        let [from, to] = [span(&self.values)?, span(&bf16.values)?];
        on.kernels.narrow_weights(&on.stream, [experts, hidden, ffn], [from, to])?;
        *self.may_have_changed.get_mut() = is_held;
        Ok(())
    }
}
