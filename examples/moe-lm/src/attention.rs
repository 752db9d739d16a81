//! Causal attention: each position looks at those before it and at itself.

use candle_core::{D, Device, Result, Tensor};

/// How tokens lie in rows.
#[derive(Clone, Debug)]
pub struct Attention {
    window: usize,
    heads: usize,
    /// `[window, window]`: minus infinity where a position would look ahead.
    future: Tensor,
}

impl Attention {
    /// For windows of this many tokens.
    ///
    /// # Errors
    /// If there is no memory for the mask.
    pub fn new(window: usize, heads: usize) -> Result<Attention> {
        let look = |at: usize| if at % window > at / window { f32::NEG_INFINITY } else { 0.0 };
        let mask: Vec<f32> = (0..window * window).map(look).collect();
        Ok(Attention { window, heads, future: Tensor::from_vec(mask, (window, window), &Device::Cpu)? })
    }

    /// Rows `[windows * window, width]`, of which each becomes a mixture of those of its window;
    /// `qkv` is `[width, 3 width]`, `out` `[width, width]`.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn forward(&self, x: &Tensor, qkv: &Tensor, out: &Tensor) -> Result<Tensor> {
        let (rows, width) = x.dims2()?;
        let depth = width / self.heads;
        let mixed = x.matmul(qkv)?.reshape((rows / self.window, self.window, 3, self.heads, depth))?;
        // [q k v, window of the batch, head, position, depth]
        let mixed = mixed.permute((2, 0, 3, 1, 4))?.contiguous()?;
        let (q, k, v) = (mixed.get(0)?, mixed.get(1)?, mixed.get(2)?);
        let scores = (q.matmul(&k.transpose(2, 3)?.contiguous()?)? / (depth as f64).sqrt())?;
        let look = softmax(&scores.broadcast_add(&self.future)?)?;
        let seen = look.matmul(&v)?.transpose(1, 2)?.contiguous()?;
        seen.reshape((rows, width))?.matmul(out)
    }
}

fn softmax(x: &Tensor) -> Result<Tensor> {
    let e = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?.exp()?;
    e.broadcast_div(&e.sum_keepdim(D::Minus1)?)
}
