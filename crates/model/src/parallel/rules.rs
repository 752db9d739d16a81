//! Rules of thumb of the scaling book (jax-ml, "How to Parallelize a Transformer for Training"):
//! where transfers take longer than the products that they overlap with.
//!
//! ```text
//!   bytes of an MLP [D, F] in bf16     forward          backward
//!     data parallelism                 0                8 DF              B/N > C/W         tokens per device
//!     FSDP                             4 DF             8 DF              B/N > C/W
//!     tensor parallelism, Y ways       4 BD             4 BD              Y < F W/C         width against ways
//!     FSDP X ways, tensor Y ways       4 DF/Y + 4 BD/X  8 DF/Y + 4 BD/X   B/N > (C/W)^2/F   tokens per device
//!   products                           4 BDF / (N C)    8 BDF / (N C)
//! ```
//!
//! `B` tokens, `N = X Y` devices. A group of more axes has as many times the rate. The book writes
//! 8 BD/X for the last backward pass; its tensor parallelism alone has 4 BD, and so have we.
//! Factors `(n-1)/n` are taken as 1: [`step`](super::step_time) has them.

use serde::Serialize;

use super::device_rates::{Devices, Fabric};
use super::mesh::divisors;
use super::transformer::Transformer;

/// Least tokens per device below which data parallelism or FSDP binds: `C / (axes W)`. Weights are
/// gathered and gradients reduced once per step, so a smaller batch has too few products.
///
/// `sparsity` is parameters by active parameters (1: dense). Bytes count all experts, products only
/// the chosen ones.
pub fn least_data_tokens(devices: &Devices, axes: u32, sparsity: f64) -> f64 {
    devices.intensity() / f64::from(axes) * sparsity
}

/// The same across nodes, in tokens per node: each device reduces its part of the gradients with
/// the same part of other nodes, so `C / W_nic` tokens are needed, however many devices there are.
pub fn least_node_tokens(devices: &Devices, sparsity: f64) -> f64 {
    devices.flops / devices.nic_rate * sparsity
}

/// Ways of tensor parallelism above which it binds: `axes F W / C`. More ways have less to multiply
/// and the same activations to gather.
pub fn most_tensor_ways(devices: &Devices, width: u64, axes: u32) -> f64 {
    f64::from(axes) * width as f64 / devices.intensity()
}

/// FSDP together with tensor parallelism on a number of devices.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Mixed {
    /// The best ways of FSDP, `sqrt(B N axes_X / (F axes_Y))`: both then transfer as long.
    pub data_ways: f64,
    /// The shape next to it that the devices have, FSDP x tensor.
    pub shape: (u32, u32),
    /// Least tokens per device. `(C/W)^2 / (axes_X axes_Y F)` on a torus, where both transfer at
    /// the same time; four times as many behind a switch, where both share one link.
    pub least_tokens: f64,
}

impl Mixed {
    /// For so many tokens and devices, and an MLP of this width.
    pub fn of(devices: &Devices, tokens: f64, count: u32, width: u64) -> Self {
        let (data_axes, tensor_axes) = devices.axes(true, true);
        let [data_axes, tensor_axes, width] = [data_axes.into(), tensor_axes.into(), width as f64];
        let data_ways = (tokens * f64::from(count) * data_axes / (width * tensor_axes)).sqrt();
        let shared = if devices.fabric == Fabric::Switch { 4.0 } else { 1.0 };
        let distance = |ways: u32| (f64::from(ways) / data_ways).ln().abs();
        let ways = divisors(count).into_iter().min_by(|a, b| distance(*a).total_cmp(&distance(*b)));
        let ways = ways.unwrap_or(1);
        Mixed {
            data_ways,
            shape: (ways, count / ways),
            least_tokens: shared * devices.intensity().powi(2) / (data_axes * tensor_axes * width),
        }
    }
}

/// All rules, for a model on devices.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rules {
    /// [`least_data_tokens`] over all axes.
    pub least_data_tokens: f64,
    /// [`least_node_tokens`].
    pub least_node_tokens: f64,
    /// [`most_tensor_ways`] next to data parallelism.
    pub most_tensor_ways: f64,
    /// `None` for a model with experts, which tensor parallelism does not cut here.
    pub mixed: Option<Mixed>,
}

impl Rules {
    /// For so many tokens per step.
    pub fn of(model: &Transformer, devices: &Devices, tokens: u64, count: u32) -> Self {
        let sparsity = model.parameters() as f64 / model.active_parameters() as f64;
        let (all_axes, _) = devices.axes(true, false);
        let (_, tensor_axes) = devices.axes(true, true);
        let width = model.tensor_width();
        let is_dense = model.experts.is_none();
        Rules {
            least_data_tokens: least_data_tokens(devices, all_axes, sparsity),
            least_node_tokens: least_node_tokens(devices, sparsity),
            most_tensor_ways: most_tensor_ways(devices, width, tensor_axes),
            mixed: is_dense.then(|| Mixed::of(devices, tokens as f64, count, width)),
        }
    }
}

/// Seconds for so many tokens at a share of the peak: six operations for each parameter and token,
/// two forward and four backward.
pub fn training_seconds(devices: &Devices, parameters: u64, tokens: f64, count: u32, share: f64) -> f64 {
    6.0 * parameters as f64 * tokens / (f64::from(count) * devices.flops * share)
}
