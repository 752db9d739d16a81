//! Causal attention: each position looks at those before it and at itself.

use candle_core::{D, Device, Result, Tensor};

use crate::settings::Shape;

/// How tokens lie in rows.
#[derive(Clone, Debug)]
pub struct Attention {
    window: usize,
    heads: usize,
    kv_heads: usize,
    /// `[window, window]`: minus infinity where a position would look ahead.
    future: Tensor,
}

impl Attention {
    /// For windows and heads of a model.
    ///
    /// # Errors
    /// If there is no memory for the mask.
    pub fn new(shape: &Shape) -> Result<Attention> {
        let Shape { window, heads, kv_heads, .. } = *shape;
        let look = |at: usize| if at % window > at / window { f32::NEG_INFINITY } else { 0.0 };
        let mask: Vec<f32> = (0..window * window).map(look).collect();
        let future = Tensor::from_vec(mask, (window, window), &Device::Cpu)?;
        Ok(Attention { window, heads, kv_heads, future })
    }

    /// Rows `[windows * window, width]`, of which each becomes a mixture of those of its window;
    /// `qkv` is `[width, width + 2 kv_width]`, `out` `[width, width]`.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn forward(&self, x: &Tensor, qkv: &Tensor, out: &Tensor) -> Result<Tensor> {
        let (rows, width) = x.dims2()?;
        let depth = width / self.heads;
        let (heads, kv_heads, windows) = (self.heads, self.kv_heads, rows / self.window);
        let mixed = x.matmul(qkv)?.reshape((windows, self.window, heads + 2 * kv_heads, depth))?;
        // [window of the batch, head of q, of k, of v, position, depth]
        let mixed = mixed.transpose(1, 2)?.contiguous()?;
        let q = mixed.narrow(1, 0, heads)?.contiguous()?;
        let of_heads = |first| -> Result<Tensor> {
            let of_kv_heads = mixed.narrow(1, first, kv_heads)?;
            let shape = (windows, kv_heads, heads / kv_heads, self.window, depth);
            let of_heads = of_kv_heads.unsqueeze(2)?.broadcast_as(shape)?;
            of_heads.reshape((windows, heads, self.window, depth))?.contiguous()
        };
        let (k, v) = (of_heads(heads)?, of_heads(heads + kv_heads)?);
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
