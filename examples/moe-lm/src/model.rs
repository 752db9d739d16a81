//! The language model: blocks of attention and of experts, each behind a norm and with a residual
//! path.

use std::collections::HashMap;

use candle_core::{D, Device, Result, Tensor, Var};

use crate::attention::Attention;
use crate::batches::Windows;
use crate::error;
use crate::moe::Moe;
use crate::record::Decisions;
use crate::settings::Shape;
use crate::trainer::State;
use crate::weights::{Entry, Weights};

/// One rank's model: MoE layers of its own, and its share of the dense weights.
pub struct Model {
    shape: Shape,
    attention: Attention,
    layers: Vec<Moe>,
}

/// Results of a backward pass.
pub struct Pass {
    /// What these tokens have in the mean loss.
    pub loss: f32,
    /// As [`Weights::dense`].
    pub dense: Vec<f32>,
    /// As [`Weights::experts`].
    pub experts: Vec<f32>,
}

impl Model {
    /// Of MoE layers.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new(shape: Shape, layers: Vec<Moe>) -> Result<Model> {
        Ok(Model { shape, attention: Attention::new(&shape)?, layers })
    }

    /// The MoE layers.
    pub fn layers(&self) -> &[Moe] {
        &self.layers
    }

    /// Gives the layers their weights.
    ///
    /// # Errors
    /// Those of the layers.
    pub fn load(&self, state: &State) -> error::Result<()> {
        let (dense, experts) = (&state.dense.weights, &state.experts.weights);
        let each = experts.values.len() / self.layers.len();
        for (nth, layer) in self.layers.iter().enumerate() {
            let router = &dense.values[dense.range(&format!("router.{nth}"))];
            layer.state().layer.load(router, &experts.values[nth * each..][..each])?;
        }
        Ok(())
    }

    /// Loss and gradients of some windows, of which each token counts as one of `tokens`. Calls
    /// `halfway` between the forward and the backward pass.
    ///
    /// # Errors
    /// Those of candle and of the layers.
    pub fn learn(
        &self,
        dense: &Weights,
        windows: &Windows,
        tokens: usize,
        halfway: impl FnOnce(),
    ) -> error::Result<Pass> {
        self.named(self.pass(dense, windows, tokens, halfway))
    }

    /// The loss alone, and the last router's decisions.
    ///
    /// # Errors
    /// As [`learn`](Self::learn).
    pub fn judge(
        &self,
        dense: &Weights,
        windows: &Windows,
        tokens: usize,
    ) -> error::Result<(f32, Decisions)> {
        let loss = self.vars(dense).and_then(|vars| self.loss(&vars, windows, tokens)?.to_scalar());
        let loss = self.named(loss)?;
        Ok((loss, self.decisions()))
    }

    /// The last router's decisions in the last pass.
    pub fn decisions(&self) -> Decisions {
        self.layers.last().map(|layer| layer.state().decisions.clone()).unwrap_or_default()
    }

    /// The layer's own error, where one failed.
    fn named<T>(&self, result: Result<T>) -> error::Result<T> {
        result.map_err(|error| {
            let failure = self.layers.iter().find_map(|layer| layer.state().failure.take());
            failure.map_or(error.into(), Into::into)
        })
    }

    fn pass(
        &self,
        dense: &Weights,
        windows: &Windows,
        tokens: usize,
        halfway: impl FnOnce(),
    ) -> Result<Pass> {
        let vars = self.vars(dense)?;
        let loss = self.loss(&vars, windows, tokens)?;
        halfway();
        let of_vars = loss.backward()?;
        let mut pass =
            Pass { loss: loss.to_scalar()?, dense: vec![0.0; dense.values.len()], experts: Vec::new() };
        for (name, var) in &vars {
            if let Some(gradient) = of_vars.get(var.as_tensor()) {
                let gradient: Vec<f32> = gradient.flatten_all()?.to_vec1()?;
                pass.dense[dense.range(name)].copy_from_slice(&gradient);
            }
        }
        for (nth, layer) in self.layers.iter().enumerate() {
            if let Some(gradients) = layer.state().gradients.take() {
                pass.dense[dense.range(&format!("router.{nth}"))].copy_from_slice(&gradients.router);
                pass.experts.extend(gradients.experts);
            }
        }
        Ok(pass)
    }

    fn vars(&self, dense: &Weights) -> Result<HashMap<String, Var>> {
        let tensors = dense.entries.iter().filter(|entry| !entry.name.starts_with("router"));
        let var = |entry: &Entry| {
            let values = &dense.values[entry.range.clone()];
            Ok((entry.name.clone(), Var::from_slice(values, &entry.shape[..], &Device::Cpu)?))
        };
        tensors.map(var).collect()
    }

    fn loss(&self, vars: &HashMap<String, Var>, windows: &Windows, tokens: usize) -> Result<Tensor> {
        let rows = windows.tokens.len();
        let Shape { window, width, .. } = self.shape;
        let ids = Tensor::from_slice(&windows.tokens, rows, &Device::Cpu)?;
        let x = vars["token"].index_select(&ids, 0)?.reshape((rows / window, window, width))?;
        let mut x = x.broadcast_add(&vars["place"])?.reshape((rows, width))?;
        for (nth, layer) in self.layers.iter().enumerate() {
            let (qkv, out) = (&vars[&format!("qkv.{nth}")], &vars[&format!("out.{nth}")]);
            x = (&x + self.attention.forward(&norm(&x)?, qkv, out)?)?;
            x = (&x + norm(&x)?.apply_op1(layer.clone())?)?;
        }
        let head = if self.shape.tied { vars["token"].t()? } else { vars["head"].as_tensor().clone() };
        let scores = norm(&x)?.matmul(&head)?;
        let following = Tensor::from_slice(&windows.following, (rows, 1), &Device::Cpu)?;
        log_softmax(&scores)?.gather(&following, 1)?.sum_all()? * (-1.0 / tokens as f64)
    }
}

/// Rows to the length of the root of their width.
fn norm(x: &Tensor) -> Result<Tensor> {
    x.broadcast_div(&(x.sqr()?.mean_keepdim(D::Minus1)? + 1e-6)?.sqrt()?)
}

fn log_softmax(x: &Tensor) -> Result<Tensor> {
    let x = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?;
    x.broadcast_sub(&x.exp()?.sum_keepdim(D::Minus1)?.log()?)
}
