//! The gate on a device decides what the host's does, to the bit.

use sidelane::device::{GateArgs, LayerKernels};
use sidelane::gate::{Gate, GateConfig, GateInput};

use crate::TestError;
use crate::device::gpu::{Bench, same};

/// Compares experts and weights of a decision with the host's.
pub fn check(
    bench: &Bench,
    kernels: &LayerKernels,
    config: &GateConfig,
    call: &GateInput<'_>,
) -> Result<(), TestError> {
    let tokens = call.logits.len() as u32 / config.experts;
    let mut host = Gate::new(config.clone())?;
    let decision = host.route(call)?;
    let logits = bench.put(call.logits)?;
    let bias = call.bias.map(|bias| bench.put(bias)).transpose()?;
    let used = call.token_mask.map(|used| used.iter().map(|&is| is.into()).collect::<Vec<u8>>());
    let used = used.map(|used| bench.put(&used)).transpose()?;
    let choices = u64::from(tokens * config.top_k) * 4;
    let (ids, weights, status) = (bench.room(choices)?, bench.room(choices)?, bench.put(&[0_u32])?);
    let args = GateArgs {
        tokens,
        logits: logits.span()?,
        bias: bias.as_ref().map(|bias| bias.span()).transpose()?,
        used: used.as_ref().map(|used| used.span()).transpose()?,
        experts: ids.span()?,
        weights: weights.span()?,
        status: status.word()?,
    };
    kernels.gate(&bench.stream, config, &args)?;
    same("experts", &bench.read(&ids)?, decision.experts())?;
    same("weights", &bench.read(&weights)?, decision.weights())?;
    same("the status word", &bench.read(&status)?, &[0_u32])
}
