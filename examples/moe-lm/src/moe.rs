//! Sidelane's MoE layer as an operation of candle: it holds its weights, and its gradients lie next
//! to candle's.
//!
//! ```text
//!   candle    .. x ------> Moe ------> y ..          .. dy -----> Moe -----> dx ..
//!                           |                                      |
//!   sidelane           layer.forward, tape               layer.backward, gradients
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::layer::{Gradients, Layer};
use crate::record::Decisions;
use candle_core::{CpuStorage, CustomOp1, Device, Layout, Shape, Tensor, bail};

/// A layer that takes part in candle's graph. Clones are the same layer.
#[derive(Clone)]
pub struct Moe(Arc<Mutex<State>>);

/// What passes between candle's calls and the trainer.
pub struct State {
    /// The layer.
    pub layer: Layer,
    /// Of the last backward pass, but for those of the tokens.
    pub gradients: Option<Gradients>,
    /// The router's decisions in the last forward pass.
    pub decisions: Decisions,
    /// Why the last pass failed: candle would make words of it.
    pub failure: Option<sidelane::Error>,
}

impl Moe {
    /// Around a layer.
    pub fn new(layer: Layer) -> Moe {
        let decisions = Decisions::default();
        Moe(Arc::new(Mutex::new(State { layer, gradients: None, decisions, failure: None })))
    }

    /// The layer and its state.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn kept<T>(&mut self, result: sidelane::Result<T>) -> candle_core::Result<T> {
        result.map_err(|error| {
            self.failure = Some(error.clone());
            candle_core::Error::wrap(error)
        })
    }
}

impl CustomOp1 for Moe {
    fn name(&self) -> &'static str {
        "moe"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let Some((first, end)) = layout.contiguous_offsets() else { bail!("moe: rows must be contiguous") };
        let x = &storage.as_slice::<f32>()?[first..end];
        let state = &mut *self.state();
        let passed = state.layer.forward(x);
        let out = state.kept(passed)?;
        state.decisions = state.layer.decision().map(Decisions::of).unwrap_or_default();
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, of_out: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let of_out: Vec<f32> = of_out.flatten_all()?.to_vec1()?;
        let state = &mut *self.state();
        let passed = state.layer.backward(&of_out);
        let Some(mut gradients) = state.kept(passed)? else { bail!("moe: backward without forward") };
        let of_x = std::mem::take(&mut gradients.x);
        state.gradients = Some(gradients);
        Ok(Some(Tensor::from_vec(of_x, x.shape(), &Device::Cpu)?))
    }
}
